"""What must not matter: packing, the batch, order, chunks; and what must show: NaN, banned ids."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from grpo_kernels import Run, grpo_loss, linear_logps
from tests.support.case_builder import PER_TOKEN, Case, make_case
from tests.support.cases import LOSSES, loss
from tests.support.flat import flat
from tests.support.measure import AllocationWatcher
from tests.support.reference import TERMS
from tests.support.run_case import arguments, config_of, packed, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("loss_type", "level"), LOSSES)
def test_packed_is_padded(loss_type: str, level: str) -> None:
    kind = {"loss_type": loss_type, "importance_sampling_level": level}
    case = make_case("packed", b=5, mask="ragged", beta=0.1, **kind)
    given = arguments(case)
    cut, stays = packed(case, given)
    out, (one, grads) = flat(grpo_loss)(**cut, config=config_of(case)), run(case)
    out.loss.backward()
    assert torch.equal(out.logps, one.logps[stays])
    assert torch.equal(out.entropies, one.entropies[stays])
    # VESPO weighs by e to the sum over a sequence
    assert_close(out.loss, one.loss, rtol=5e-7, atol=0)
    assert_close(given["hidden"].grad, grads["hidden"], rtol=1e-6, atol=1e-8)
    assert_close(given["weight"].grad, grads["weight"], rtol=1e-5, atol=1e-7)


SHAPES = [(16, 50), (64, 151), (7, 1000), (96, 33), (33, 4097)]


@pytest.mark.parametrize(("h", "v"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_batch(h, v, dtype, every_backend):
    """Alone, in batches of any size, permuted: the same bits of its log-probability and entropy."""
    # the interpreter is slow
    most = 64 if every_backend == "torch" or v < 100 else 17 if v < 200 else 4
    hidden, weight = torch.randn(most, h).to(dtype), (torch.randn(v, h) / h**0.5).to(dtype)
    ids = torch.randint(0, v, (most,))
    whole, every = linear_logps(hidden, weight, ids).given, torch.arange(most)

    def same(index: Tensor, run: Run | None = None) -> bool:
        part = linear_logps(hidden[index], weight, ids[index], run=run).given
        return all(torch.equal(x, whole[name][index]) for name, x in part.items())

    sizes = (1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 15, 16, 17, 31, 33, 63)
    for n in sizes if every_backend == "torch" else (1, 3, 5, 12, 16, 33):
        for start in (0, most - n, (most - n) // 2) if n < most else ():
            assert same(every[start : start + n]), f"{n} rows from {start}"
    assert same(torch.randperm(most))
    assert same(every[:5].repeat(3))
    # 16-bit weights are converted in slices whose width depends on the workspace
    for rows in (5, 13, 29) if dtype == torch.float32 else ():
        assert same(every, Run(workspace_bytes=rows * v * 8)), f"chunks of about {rows} rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo", "vespo", "gmpo"])
def test_ratio_is_exactly_one_on_policy(dtype, loss_type, every_backend):
    """Old log-probabilities of other batches, without gradient, are those of this."""
    options = {"dtype": dtype, "loss_type": loss_type, "temperature": 0.7}
    case = make_case("on-policy", b=6, t=9, h=24, v=333, **options)
    old = []
    with torch.no_grad():
        for rows in (slice(0, 1), slice(1, 2), slice(2, 6)):
            given = case.hidden[rows].flip(0), case.weight, case.completion_ids[rows].flip(0)
            old.append(linear_logps(*given, temperature=0.7).logps.flip(0))
    out, grads = run(case.but(old_per_token_logps=torch.cat(old)))
    on_policy, own = run(case.but(old_per_token_logps=None))
    assert float(out.metrics["ratio"]) == 1.0
    # a fused kernel multiplies in another order
    rtol = 0 if every_backend == "torch" else 2e-6
    assert_close(out.loss, on_policy.loss, rtol=rtol, atol=0)
    assert all(torch.equal(grads[name], own[name]) for name in ("hidden", "weight"))


def test_packed_sequences_of_very_different_lengths_need_no_padding(every_backend: str) -> None:
    """Nothing of (sequences, longest) elements is made."""
    short = 2000 if every_backend == "torch" else 200  # the interpreter is slow
    lengths = [2 * short] + [1] * short
    n = sum(lengths)
    given = torch.randn(n, 2), torch.randn(5, 2), torch.randint(5, (n,)), torch.ones(n)
    options = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    options |= {"old_per_token_logps": torch.full((n,), -1.6)}
    options |= {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}
    with AllocationWatcher() as watch:
        grpo_loss(*given, torch.randn(short + 1), **options)
    assert watch.largest <= 10 * n


NAN, INF = math.nan, math.inf
RATIO = "importance_sampling_ratio"
EACH_BACKEND = pytest.mark.usefixtures("every_backend")


def with_nan(case: Case, name: str) -> Case:
    x = getattr(case, name).clone()
    x[1, 2] = NAN
    return case.but(**{name: x})


@EACH_BACKEND
def test_packed_of_nothing() -> None:
    for lengths in ([0], [0, 0, 0], []):
        hidden, weight = (torch.randn(n, 4, requires_grad=True) for n in (0, 6))
        bounds, none = torch.tensor([0, *lengths]), torch.zeros(0)
        advantages = torch.randn(len(lengths))
        out = grpo_loss(hidden, weight, none.long(), none, advantages, cu_seqlens=bounds)
        out.loss.backward()
        assert float(out.loss.detach()) == 0.0 and weight.grad is not None and not weight.grad.any()


@EACH_BACKEND
@pytest.mark.parametrize(
    ("loss_type", "level"),
    [("grpo", "token"), ("grpo", "sequence"), *((x, "token") for x in ("cispo", "vespo", "gmpo"))],
)
def test_banned_target_on_policy(loss_type: str, level: str) -> None:
    """The loss is NaN, since no policy samples what it bans; the ratio is 1, and the gradient what
    it tends to."""
    case = make_case("banned", mask="holes", old=False, bias=True, **loss(loss_type, level))
    case = case.but(advantages=torch.tensor([1.0, -0.5, 0.0]))
    banned, ids, bias = 3, case.completion_ids.clone(), case.bias.clone()
    ids[ids == banned] = banned + 1
    ids[case.completion_mask.cumsum(1) == 1] = banned  # the first that counts of each sequence
    bias[banned] = -1e4  # and no other token notices
    case = case.but(completion_ids=ids, bias=bias)
    out, limit = run(case)
    assert bool(out.loss.isfinite())
    bias[banned] = -INF
    for engine in ("one_pass", "two_pass", "lean", "frozen"):
        frozen = {"weight", "bias"} if engine == "frozen" else set()
        out, grads = run(case.but(bias=bias, frozen=frozenset(frozen)), engine)
        assert out.engine == engine
        assert bool(out.loss.isnan()) and float(out.metrics["ratio"]) == 1.0
        for name in limit.keys() - frozen:
            assert_close(grads[name], limit[name], rtol=1e-5, atol=1e-6)


@EACH_BACKEND
@pytest.mark.parametrize(("loss_type", "level"), LOSSES)
def test_nan_at_a_counted_position_surfaces(loss_type: str, level: str) -> None:
    """A hidden state's in the loss and in its row's logp, entropy and gradient; on-policy, too,
    where the coefficients would be known without any log-probability. An argument's is refused."""
    options = {"mask": "full", "bias": True, **loss(loss_type, level)}
    ratio = None if loss_type == "gmpo" else "token"  # which takes no ratio
    off_policy = make_case("nan", beta=0.1, adv="token", ratio=ratio, **options)
    for name in (*PER_TOKEN[:2], *([] if ratio is None else [RATIO])):
        with pytest.raises(ValueError, match=f"^{name}: expected .*, got nan for 1 of 21"):
            run(with_nan(off_policy, name))
    rows = torch.zeros(3, 7, dtype=torch.bool)
    rows[1, 2] = True
    for case in (off_policy, make_case("nan on-policy", old=False, **options)):
        out, grads = run(with_nan(case, "hidden"))
        assert bool(out.loss.isnan()) and bool(grads["weight"].isnan().any())
        assert torch.equal(out.logps.isnan(), rows)
        assert torch.equal(out.entropies.isnan(), rows)
        if level == "token" and not TERMS[loss_type].per_sequence:
            assert bool(grads["hidden"][[0, 2]].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradient_has_one_rounding_however_many_chunks(dtype, every_backend):
    """Accumulated in fp32: d weight is off by one rounding, for 4 sequences or 256."""
    for batch in (4, 64, 256) if every_backend == "torch" else (4, 16):  # the interpreter is slow
        hidden, weight = torch.randn(batch, 8, 32).to(dtype), torch.randn(200, 32).to(dtype)
        given = torch.randint(200, (batch, 8)), torch.ones(batch, 8), torch.randn(batch)
        exact = weight.double().requires_grad_()
        weight.requires_grad_()
        grpo_loss(hidden, weight, *given, run=Run(workspace_bytes=64 * 1024)).loss.backward()
        grpo_loss(hidden.double(), exact, *given).loss.backward()
        best = (exact.grad.to(dtype).double() - exact.grad).norm()
        assert (weight.grad.double() - exact.grad).norm() <= 1.02 * best
