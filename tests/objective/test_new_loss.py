"""CONTRIBUTING's recipe for a new loss, followed on a copy: all suites that go by losses have it,
and pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.acted_build import script
from tests.support.sources import copy_sources

pytest.importorskip("triton")

FORMULA = '''

def novel(log_ratio, advantage, logp, scale):
    """``-scale r / (1 + r) A``"""
    gate = sigmoid(log_ratio)
    loss = -times(scale * gate, advantage)
    return loss, -times(scale * gate * sigmoid(-log_ratio), advantage), full_like(loss, 0.0)
'''
IN_THE_REFERENCE = """

def novel(o, ratio, adv, logps, phi):
    rises = -1 / (1 + ratio)  # as ratio / (1 + ratio), by a slope that keeps its digits
    return -o.novel_scale * ((ratio / (1 + ratio)).detach() + (rises - rises.detach())) * adv


def plain(o, ratio, adv, logps, phi):
    return -ratio * adv
"""
RECORDS = """
        LossType("novel_token", "novel", lambda c: (c.novel_scale,), ("novel_scale",),
                 "token_mean"),
        LossType("novel_sequence", "unclipped", lambda _: (), (), "sequence_sum"),"""
TERMS = """
    "novel_token": Loss(novel, token_mean, in_trl=False),
    "novel_sequence": Loss(plain, sequence_sum, in_trl=False),"""
ADDED = (  # file, the beginning of a list, its end, what comes before that end
    ("grpo_kernels/base/choices.py", "LossTypeName = Literal[", "]",
     ', "novel_token", "novel_sequence"'),
    ("grpo_kernels/backends/formulas.py", "", "\n\nHELPERS", FORMULA),
    ("grpo_kernels/backends/formulas.py", "SURROGATES: dict", ")\n}", ", novel"),
    ("grpo_kernels/objective/losses.py", "LOSSES = {", "\n    )\n}", RECORDS),
    ("grpo_kernels/objective/config.py", "    Args:", "\n\n",
     "\n        novel_scale: bound of the loss."),
    (
        "grpo_kernels/objective/config.py", "    loss_type: LossTypeName =", "\n\n",
        "\n    novel_scale: float = field(default=0.5, metadata=_above(0.0))",
    ),
    ("grpo_kernels/objective/config.py", "class LossFields", "\n\n\n", "\n    novel_scale: float"),
    ("tests/support/reference_terms.py", "DEFAULTS = {", "\n}", '\n    "novel_scale": 0.5,'),
    ("tests/support/reference_terms.py", "", "\n\n@dataclass(frozen=True)\nclass Loss:",
     IN_THE_REFERENCE),
    ("tests/support/reference_terms.py", "TERMS = {", "\n}", TERMS),
)  # fmt: skip
# Tests that go through all losses in one loop: through the new ones only.
NARROWED = (("tests/support/random_cases.py", "choice(tuple(TERMS)", ")", "[-2:]"),)
SUITES = ["call", "engine", "head", "objective", "parallel", "backends"]
SUITES += ["test_catalogue.py", "test_reference.py", "test_types.py"]
# Parametrised by a loss, about the list of them, or going through all of them.
CHOSEN = (
    "novel", "test_reference.py and not equals_trl", "test_config.py", "test_formulas.py",
    "it_is_the_loss", "handed_on", "every_surrogate", "every_loss_takes", "every_case_is_exact",
    "test_differential.py and random_cases and torch-0",
)  # fmt: skip


def with_two_losses(to: Path) -> None:
    """A copy of the checkout, with a loss that averages over tokens and one that sums over each
    sequence."""
    copy_sources(to)
    for name, beginning, end, text in (*ADDED, *NARROWED):
        path = to / name
        source = path.read_text()
        assert beginning in source, beginning
        begins = source.index(beginning)
        at = source.index(end, begins + len(beginning)) if end else len(source)
        path.write_text(source[:at] + text + source[at:])


@pytest.mark.slow
def test_the_recipe_adds_losses_to_every_suite(tmp_path: Path) -> None:
    with_two_losses(tmp_path)
    # not optimized, the library is there in a third of the time
    unoptimized = script(tmp_path / "cxx", f'exec {os.environ.get("CXX", "c++")} "$@" -O0')
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"),
        "TRITON_INTERPRET": "1",
        "CXX": str(unoptimized),
    }
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", " or ".join(CHOSEN)]
    suites = ["-m", "pytest", *options, *(f"tests/{x}" for x in SUITES)]
    for command in (["csrc/generate.py"], suites):
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        done = subprocess.run([sys.executable, *command], timeout=1500, check=False, **options)
        assert done.returncode == 0, done.stdout + done.stderr
