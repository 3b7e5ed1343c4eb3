"""A loss type is a record, a formula and a field per parameter: one that is added so works on every backend."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_kernels.backends.cpp_rows.compiler import compiler
from tests.support.acted_build import script

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
FORMULA = '''
def foo(log_ratio, advantage, logp, scale):
    """``-(1 - e^(-scale r)) / scale A``"""
    ratio = exp(log_ratio)
    rest = exp(-scale * ratio)
    loss = -times((1.0 - rest) / scale, advantage)
    return loss, -times(ratio, rest * advantage), full_like(loss, 0.0)


def k1('''
EDITS = {  # file -> what is there, and what comes in its place
    "base/choices.py": [('"sapo",', '"foo", "sapo",')],
    "objective/losses.py": [
        ('LossType("sapo",', 'LossType("foo", "foo", lambda c: (c.foo_scale,), "token_mean"), LossType("sapo",')
    ],
    "token_loss/formulas.py": [("\ndef k1(", FORMULA), ("unclipped, constant", "unclipped, foo, constant")],
    "objective/config.py": [("    vespo_k_pos: float", "    foo_scale: float = 0.5\n    vespo_k_pos: float")],
}
USE = """
from types import SimpleNamespace
import torch
from benchmarks import parity
from grpo_kernels import LossConfig, Run, grpo_loss
from grpo_kernels.objective.losses import LOSSES
from tests.support import interpreter

interpreter.prepare()
assert "foo" in LOSSES and "foo" in parity.LOSS_TYPES
torch.manual_seed(0)
hidden, weight, ids = torch.randn(2, 3, 4), torch.randn(9, 4), torch.randint(9, (2, 3))
mask, advantages = torch.tensor([[1, 1, 1], [1, 1, 0]]), torch.tensor([1.0, -0.7])
config = LossConfig.from_trl(SimpleNamespace(loss_type="foo", foo_scale=0.8, beta=0.0))
assert config == LossConfig(loss_type="foo", foo_scale=0.8)

h = hidden.double().requires_grad_()
logps = torch.log_softmax(h @ weight.double().T, -1).gather(2, ids[..., None])[..., 0]
for old in (None, logps.detach().float() - 0.3):
    r = (logps - (logps.detach() if old is None else old)).exp()
    want = (-(1 - torch.exp(-0.8 * r)) / 0.8 * advantages[:, None] * mask).sum() / mask.sum()
    (slope,) = torch.autograd.grad(want, h, retain_graph=True)
    for backend in ("torch", "cpp", "triton"):
        leaf = hidden.clone().requires_grad_()
        given = {"old_per_token_logps": old, "config": config, "run": Run(backend=backend)}
        out = grpo_loss(leaf, weight, ids, mask, advantages, **given)
        out.loss.backward()
        torch.testing.assert_close(out.loss.detach().double(), want.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(leaf.grad.double(), slope, rtol=1e-4, atol=1e-6)
"""


@pytest.mark.slow
def test_four_edits_add_a_loss_with_a_parameter(tmp_path: Path) -> None:
    for name in ("grpo_kernels", "csrc", "benchmarks", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "results"))
    for name, edits in EDITS.items():
        path = tmp_path / "grpo_kernels" / name
        text = path.read_text()
        for old, new in edits:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path.write_text(text)
    # not optimised, the library is there in a third of the time
    unoptimised = script(tmp_path / "cxx", f'exec {shlex.join(compiler())} "$@" -O0')
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"),
        "TRITON_INTERPRET": "1",
        "CXX": str(unoptimised),
    }
    for command in (["csrc/generate.py"], ["-c", USE]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
