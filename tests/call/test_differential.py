"""The library against the float64 reference: fixed cases, random cases, every engine and backend.

Random cases: 8 blocks of 100 a run, the seeds drawn by hypothesis; GRPO_KERNELS_RANDOM_FACTOR multiplies them. A
failure prints the call that replays it, `check(random_case(seed))`.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels import GRPOLoss, LossConfig, grpo_loss
from tests.support.case_builder import PER_TOKEN, Case, make_case, thinned
from tests.support.cases import fixed_cases, random_case
from tests.support.reference import ReferenceResult, reference_loss
from tests.support.reference_terms import pick
from tests.support.run_case import allowed_engines, arguments, packed, run
from tests.support.tolerance import assert_matches, bounds_of, compare

ENGINES = ("score", "frozen", "one_pass", "two_pass", "lean")
BLOCKS, BLOCK_SIZE = 8, 100
FACTOR = int(os.environ.get("GRPO_KERNELS_RANDOM_FACTOR", "1"))
pytestmark = pytest.mark.usefixtures("every_backend")
SPLITTABLE = [c for c in fixed_cases() if c.group in "ABDH" and not c.frozen and c.completion_mask.numel()]


def check_row_shares(case: Case, output, reference: ReferenceResult) -> None:
    """Only counted positions are projected, and all that carry gradient get one."""
    counted = reference.head.counted
    projected = counted.double().mean() if counted.numel() else torch.zeros(())
    assert abs(float(output.metrics["rows/projected"]) - float(projected)) < 1e-6, case.name
    carries = (reference.d_logps.abs() + reference.d_entropies.abs() > 1e-30).sum() / counted.sum().clamp(min=1)
    if set(case.frozen) >= {"hidden", "weight"} or torch.isnan(reference.loss):
        return
    assert float(carries) - 1e-6 <= float(output.metrics["rows/gradient"]) <= 1.0, case.name


def check(case: Case, engines: tuple[str, ...] = ("auto", *ENGINES)) -> None:
    """The library on `case`, by every engine that is exact for it; the others must refuse."""
    reference = reference_loss(case)
    bounds, allowed, done = bounds_of(reference, case), allowed_engines(case), set()
    for engine in engines:
        if engine in allowed & done:  # "auto" came to it
            continue
        if engine != "auto" and engine not in allowed:
            with pytest.raises(ValueError, match="engine"):
                run(case, engine)
            continue
        try:
            output, grads = run(case, engine)
            done.add(output.engine)
            assert_matches(output, grads, reference, case, bounds)
            missing = set(reference.metrics) - set(output.metrics)
            assert not missing, f"{case.name}: metrics missing: {missing}"
            attached = [name for name, x in output.metrics.items() if x.requires_grad]
            assert not attached, f"{case.name}: metrics attached to the graph: {attached}"
            if engine == "auto" and not bounds.ambiguous:
                check_row_shares(case, output, reference)
        except Exception as error:
            error.add_note(f"{case.name}, engine {engine!r}") if hasattr(error, "add_note") else None
            raise


@pytest.mark.parametrize("case", fixed_cases(), ids=lambda case: case.name)
def test_fixed_case(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("frozen", ["weight bias", "hidden", "hidden bias", "hidden weight bias"])
@pytest.mark.parametrize("part", range(4))
def test_frozen(frozen: str, part: int, every_backend: str) -> None:
    names = frozenset(frozen.split())
    for case in thinned(SPLITTABLE[part::8], every_backend):
        check(case.but(frozen=names, name=f"{case.name} without d_{frozen}"))


@pytest.mark.parametrize("scale", [0.0, -3.0, 0.25, 65536.0])
def test_upstream_scale(scale: float, every_backend: str) -> None:
    for case in thinned(SPLITTABLE[::9], every_backend):
        if case.hidden.dtype == torch.float16 and scale > 1:
            continue
        reference = reference_loss(case)
        for engine in ("auto", "two_pass"):
            assert_matches(*run(case, engine, scale), reference, case, scale=scale)


@pytest.mark.parametrize("block", range(BLOCKS * FACTOR))
def test_random_cases(block: int, every_backend: str) -> None:
    hypothesis = pytest.importorskip("hypothesis")

    @hypothesis.seed(block)  # the same examples in every run
    @hypothesis.settings(
        max_examples=BLOCK_SIZE if every_backend == "torch" else BLOCK_SIZE // 10,  # the interpreter is slow
        derandomize=False,
        database=None,
        deadline=None,  # a slow machine is no failure
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(seed=hypothesis.strategies.integers(0, 2**48))
    def one_block(seed: int) -> None:
        hypothesis.note(f"replay: check(random_case({seed}))")
        case = random_case(seed)
        check(case, ("auto", ENGINES[seed % 5]))

    one_block()


@pytest.mark.parametrize("part", range(4))
def test_packed_equals_padded(part: int, every_backend: str) -> None:
    for case in thinned([c for c in SPLITTABLE if c.completion_mask.shape[1] > 1][part::4], every_backend):
        reference, given = reference_loss(case), arguments(case)
        cut, stays = packed(case, given)
        output = grpo_loss(**cut, config=LossConfig(**case.config), workspace_bytes=case.workspace_bytes)
        output.loss.backward()
        grads = {name: None if given[name] is None else given[name].grad for name in ("hidden", "weight", "bias")}
        grid = lambda x: x.new_zeros(stays.shape).masked_scatter(stays, x)  # noqa: B023, E731
        metrics = {name: output.metrics[name] for name in reference.metrics}
        unpacked = SimpleNamespace(
            loss=output.loss,
            per_token_logps=grid(output.per_token_logps),
            entropies=grid(output.entropies),
            metrics=metrics,
        )
        assert_matches(unpacked, grads, reference, case)


@pytest.mark.parametrize("head", [torch.float32, torch.float16, torch.float64])
def test_mixed_dtypes_work_or_are_refused(head: torch.dtype) -> None:
    case = make_case(f"mixed/{head}", dtype=torch.bfloat16, beta=0.1)
    case = case.but(weight=case.weight.to(head))
    try:
        output, grads = run(case)
    except (TypeError, ValueError) as error:
        assert "weight" in str(error)  # noqa: PT017
        return
    assert_matches(output, grads, reference_loss(case), case)


def test_module_equals_function() -> None:
    case = next(case for case in fixed_cases() if case.name == "B/everything/dapo-t")
    given = arguments(case)
    one, _ = run(case)
    for module in (GRPOLoss(LossConfig(**case.config)), GRPOLoss(**case.config)):
        other = module(**given)
        assert torch.equal(one.loss, other.loss)
        assert torch.equal(one.per_token_logps, other.per_token_logps)
        assert {name: float(x) for name, x in one.metrics.items()} == {
            name: float(x) for name, x in other.metrics.items()
        }


def test_metric_pairs_add_up() -> None:
    for case in SPLITTABLE[::7]:
        metrics = run(case)[0].metrics
        for name, (total, count) in metrics.pairs.items():
            assert total.dim() == count.dim() == 0
            compare(f"pairs[{name}]", metrics[name], (total / count.clamp(min=1)).double(), 1e-6, case)


def test_masked_values_change_no_bit() -> None:
    """Group E again, bit for bit: whatever stands where masked, against zeros there."""
    for case in fixed_cases():
        if case.group != "E":
            continue
        counted = case.completion_mask != 0
        clean = {
            name: pick(x, counted[..., None] if x.dim() == 3 else counted)
            for name in ("hidden", "completion_ids", "advantages", "importance_sampling_ratio", *PER_TOKEN)
            if (x := getattr(case, name)) is not None and x.shape[:2] == counted.shape
        }
        (one, grads), (other, clean_grads) = run(case), run(case.but(**clean))
        assert torch.equal(one.loss, other.loss), case.name
        assert torch.equal(one.per_token_logps, other.per_token_logps), case.name
        assert torch.equal(one.entropies, other.entropies), case.name
        for name, grad in grads.items():
            assert grad is None or torch.equal(grad, clean_grads[name]), f"{case.name}: d_{name}"
