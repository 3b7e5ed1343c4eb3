"""The library against the float64 reference, within `tests/support/tolerance.py`.

Fixed cases by every engine in torch, by the default and one more in C++ and Triton. Random ones by
the default and one more, in 7 blocks a run: of 100 losses in torch, 50 in C++ and 20 in Triton, and
half as many scores; GRPO_KERNELS_RANDOM_FACTOR multiplies the blocks. A failure prints the case's
name, which has its seed: `check(random_case(seed))`, or `check_scores(random_scores(seed))`,
replays it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict

import pytest
import torch

from grpo_kernels import GRPOLoss, LossOutput
from tests.support.case_builder import Case, make_case
from tests.support.cases import fixed_cases, random_case, random_scores
from tests.support.flat import flat
from tests.support.reference import ReferenceResult, reference_loss
from tests.support.run_case import allowed_engines, arguments, check_scores, config_of, run
from tests.support.tolerance import assert_matches, bounds_of

ENGINES = ("score", "frozen", "one_pass", "two_pass", "lean")
BLOCKS, BLOCK_SIZE = 7, 100
FACTOR = int(os.environ.get("GRPO_KERNELS_RANDOM_FACTOR", "1"))
pytestmark = pytest.mark.usefixtures("every_backend")


def check_row_shares(case: Case, output: LossOutput, reference: ReferenceResult) -> None:
    """Only counted positions are projected, and all that carry gradient get one."""
    counted, share = reference.head.counted, output.metrics.floats()
    projected = counted.double().mean() if counted.numel() else 0.0
    assert abs(share["rows/projected"] - projected) < 1e-6, case.name
    if not case.frozen >= {"hidden", "weight"} and not reference.loss.isnan():
        carries = reference.d_logps.abs() + reference.d_entropies.abs() > 1e-30
        least = carries.sum() / counted.sum().clamp(min=1) - 1e-6
        assert least <= share["rows/gradient"] <= 1.0, case.name


def check(case: Case, engines: Iterable[str] = ("auto", *ENGINES)) -> None:
    """The library on `case`, by every engine that is exact for it; the others must refuse."""
    reference, allowed, done = reference_loss(case), allowed_engines(case), set()
    bounds = bounds_of(reference, case)
    for engine in engines if case.kept_ids is None else ("auto",):
        if engine in allowed & done:  # "auto" came to it
            continue
        if engine != "auto" and engine not in allowed:
            with pytest.raises(ValueError, match=f"^engine: .*{engine}.* needs "):
                run(case, engine)
            continue
        output, grads = run(case, engine)
        done.add(output.engine)
        named = case.but(name=f"{case.name}, engine {engine}")
        assert_matches(output, grads, reference, named, bounds)
        assert set(reference.metrics) <= set(output.metrics)
        assert not any(x.requires_grad for x in output.metrics.values())
        if not bounds.ambiguous:
            check_row_shares(case, output, reference)


@pytest.mark.parametrize("case", fixed_cases(), ids=lambda case: case.name)
def test_fixed_case(case: Case, every_backend: str) -> None:
    """By all engines in torch, by the choice of a compiled backend and one of the others."""
    others = sorted(allowed_engines(case) - {"auto"})
    turn = sum(map(ord, case.name)) % len(others)
    check(case, ("auto", *(ENGINES if every_backend == "torch" else others[turn:][:1])))


@pytest.mark.parametrize("block", range(BLOCKS * FACTOR))
def test_random_cases(block: int, every_backend: str) -> None:
    count = {"torch": BLOCK_SIZE, "cpp": BLOCK_SIZE // 2, "triton": BLOCK_SIZE // 5}[every_backend]
    for seed in range(block * BLOCK_SIZE, block * BLOCK_SIZE + count):
        check(random_case(seed), ("auto", ENGINES[seed % 5]))
        if seed % 2:
            check_scores(random_scores(seed), seed // 2)


# probabilities below float32's least times a divergence's slope of 80; SAPO's gate near 1
FAILED_ONCE = (
    {"b": 2, "t": 2, "h": 8, "v": 200, "loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 1.5,
     "beta": 0.01, "kl_estimator": "full", "top_entropy_quantile": 0.18674926029850936,
     "zero_adv": True, "ratio": "masked", "entropy_coef": 0.05, "temperature": 0.5,
     "dtype": torch.bfloat16, "spread": 20.0, "teacher": 0.1,
     "others": {"teacher_final_logit_softcapping": None, "teacher_logit_scale": -1.0}},
    {"b": 2, "t": 5, "h": 8, "v": 2, "loss_type": "sapo", "logit_scale": 2.0, "temperature": 0.9,
     "dtype": torch.float64, "lora": 4, "shift": 3.0, "noise": 1.0},
)  # fmt: skip


def test_what_failed_once() -> None:
    for name, options in zip((666619833641, 321530804517), FAILED_ONCE, strict=True):
        check(make_case(f"fuzz/{name}", mask="full", sampling=True, **options))


def test_module_equals_function() -> None:
    case = make_case("module", beta=0.05, entropy_coef=0.02, bias=True, ratio="token")
    given, config = arguments(case), config_of(case)
    one, _ = run(case)
    for module in (GRPOLoss(config), GRPOLoss(**asdict(config))):
        other = flat(module)(**given)
        assert torch.equal(one.loss, other.loss)
        assert torch.equal(one.logps, other.logps)
        assert one.metrics.floats() == other.metrics.floats()
