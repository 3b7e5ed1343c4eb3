"""A catalogue of known failure modes of losses from hidden states: what must hold instead."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from grpo_kernels import Run, grpo_loss, linear_logprob
from tests.support.case_builder import PER_TOKEN, Case, make_case
from tests.support.cases import LOSSES
from tests.support.reference_terms import CLIPPED, TERMS
from tests.support.run_case import run

NAN, INF = math.nan, math.inf
TYPES = sorted({loss_type for loss_type, _ in LOSSES})
F64 = torch.float64


pytestmark = pytest.mark.usefixtures("every_backend")


def kind(loss_type: str, level: str = "token") -> dict[str, str]:
    return {"loss_type": loss_type, "importance_sampling_level": level}


def results(case: Case) -> list[Tensor]:
    """Everything a call returns and every gradient."""
    out, grads = run(case)
    metrics = [
        x
        for name in sorted(out.metrics)
        for x in (out.metrics[name], *out.metrics.pairs.get(name, ()))
    ]
    found = [x for x in grads.values() if x is not None]
    return [out.loss.detach(), out.per_token_logps, out.entropies, *metrics, *found]


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    """NaN equals NaN: a metric of no sequence is NaN."""
    pairs = list(zip(one, other, strict=True))
    return all(
        torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())
        for x, y in pairs
    )


def eager(
    hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Plain torch; a probability of 0 adds nothing to the entropy."""
    log_probs = torch.log_softmax(hidden @ weight.T + (0 if bias is None else bias), dim=-1)
    return log_probs.gather(-1, ids[..., None])[..., 0], -(
        log_probs.exp() * log_probs.masked_fill(log_probs == -INF, 0.0)
    ).sum(-1)


def two_sets(
    *tensors: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors as leaves of `dtype`, and the same numbers as leaves of float64."""
    got = [x.detach().to(dtype, copy=True).requires_grad_() for x in tensors]
    return got, [x.detach().to(F64, copy=True).requires_grad_() for x in got]


@pytest.mark.parametrize("v", [1, 2, 3, 7, 8, 9, 31, 33, 127, 129, 255, 257, 1023, 1025])
@pytest.mark.parametrize("h", [1, 5])
def test_any_vocabulary_is_exact(v: int, h: int) -> None:
    """No vocabulary size leaves a lane over or out; V = 1 has probability 1 and gradient 0, H = 1
    is a size."""
    g = torch.Generator().manual_seed(v)
    hidden, weight = (
        torch.randn(13, h, generator=g, dtype=F64),
        torch.randn(v, h, generator=g, dtype=F64),
    )
    ids = torch.randint(0, v, (13,), generator=g)
    ids[:2] = torch.tensor([0, v - 1])
    for dtype, rtol in ((F64, 1e-12), (torch.float32, 3e-5)):
        got, want = two_sets(hidden, weight, dtype=dtype)
        scores, plain = linear_logprob(*got, ids), eager(*want, ids)
        ours = (scores.logps, scores.entropies)
        for outs in (ours, plain):
            (outs[0].sum() + 0.3 * outs[1].sum()).backward()
        for x, y in [
            *zip(ours, plain, strict=True),
            *zip((x.grad for x in got), (x.grad for x in want), strict=True),
        ]:
            assert_close(x.double(), y, rtol=rtol, atol=rtol)
        if v == 1:
            assert not any(x.any() for x in (*ours, *(x.grad for x in got)))


def poisoned(case: Case, name: str, value: float) -> Case:
    """`value` in one tensor wherever the mask is 0."""
    x, masked = getattr(case, name).clone(), case.completion_mask == 0
    x[masked] = value
    return case.but(**{name: x})


@pytest.mark.parametrize(("loss_type", "level"), LOSSES)
def test_garbage_at_masked_positions_changes_no_bit(
    loss_type: str, level: str, every_backend: str
) -> None:
    """Each tensor, each value: loss, logps, entropies, metrics and gradients keep their bits."""
    options: dict[str, Any] = {"beta": 0.1}
    if loss_type != "gmpo":
        options |= {
            "sampling": True,
            "ratio": "token",
            "adv": "token",
            "off_policy_mask_threshold": 0.2,
        }
    options |= {"top_entropy_quantile": 0.7} if level == "sequence" else {"entropy_coef": 0.01}
    case = make_case(
        "garbage",
        b=4,
        t=5,
        h=4,
        v=9,
        mask="first_empty",
        bias=True,
        **options,
        **kind(loss_type, level),
    )
    clean = results(case)
    names = (
        "hidden",
        *PER_TOKEN,
        "importance_sampling_ratio",
        *(["advantages"] if case.advantages.dim() == 2 else []),
    )
    for name in (name for name in names if getattr(case, name) is not None):
        # interpreted: slow
        for value in (NAN, INF, -INF, 1e30, -200.0) if every_backend != "triton" else (NAN, INF):
            assert same_bits(results(poisoned(case, name, value)), clean), (name, value)
    for value in (-100, -1, 9, 2**40) if every_backend != "triton" else (-100, 9):
        assert same_bits(results(poisoned(case, "completion_ids", value)), clean), value


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30])
def test_garbage_at_masked_positions_of_logprob(value: float) -> None:
    """Nor of `linear_logprob`: hidden states, ids, temperatures, and the gradient that arrives
    there."""
    case = make_case("garbage")
    counted = case.completion_mask != 0
    got = []
    for fill, bad_id in ((0.0, 0), (value, -100)):
        put = lambda x: torch.where(counted, x, fill)  # noqa: B023, E731
        h = torch.where(counted[..., None], case.hidden, fill).requires_grad_()
        w = case.weight.clone().requires_grad_()
        ids = torch.where(counted, case.completion_ids, bad_id)
        scores = linear_logprob(
            h, w, ids, mask=counted, temperature=put(torch.full(counted.shape, 0.7))
        )
        outs = (scores.logps, scores.entropies)
        torch.autograd.backward(
            outs, [put(torch.ones(counted.shape)), put(torch.full(counted.shape, 0.2))]
        )
        got.append([*outs, h.grad, w.grad])
        assert not any(x[~counted].any() for x in (*outs, h.grad))
    assert same_bits(*got)


@pytest.mark.parametrize(("b", "t"), [(0, 5), (3, 0), (0, 0), (2, 4)])
@pytest.mark.parametrize(("loss_type", "level"), LOSSES)
def test_nothing_to_learn_from(b: int, t: int, loss_type: str, level: str) -> None:
    """No sequence, no column or nothing counted: an attached loss of exactly 0, zero gradients."""
    case = make_case(
        "empty",
        b=b,
        t=t,
        mask="none",
        beta=0.1,
        bias=True,
        entropy_coef=0.1,
        **kind(loss_type, level),
    )
    out, grads = run(case)
    assert out.loss.requires_grad
    assert float(out.loss.detach()) == 0.0
    assert out.per_token_logps.shape == out.entropies.shape == (b, t)
    for name in ("hidden", "weight", "bias"):
        assert (
            grads[name] is not None
            and not grads[name].any()
            and grads[name].shape == getattr(case, name).shape
        )
    assert all(
        bool(x.isfinite()) for name, x in out.metrics.items() if not name.endswith(("min", "max"))
    )
    scores = linear_logprob(case.hidden.requires_grad_(), case.weight, case.completion_ids)
    (scores.logps.sum() + scores.entropies.sum()).backward()
    assert scores.logps.shape == (b, t) and scores.logps.requires_grad


def test_packed_of_nothing() -> None:
    """Sequences without tokens, also all of them, in the packed form."""
    for lengths in ([0], [0, 0, 0], []):
        hidden, weight = (
            torch.randn(0, 4, requires_grad=True),
            torch.randn(6, 4, requires_grad=True),
        )
        bounds, none = torch.tensor([0, *lengths]), torch.zeros(0)
        out = grpo_loss(
            hidden, weight, none.long(), none, torch.randn(len(lengths)), cu_seqlens=bounds
        )
        out.loss.backward()
        assert float(out.loss.detach()) == 0.0 and weight.grad is not None and not weight.grad.any()


def off_policy(advantage: float, shift: float, **options: Any) -> Case:
    """Old logps moved by `shift` at one token (by all at sequence level); every advantage of the
    same sign."""
    case = make_case("clipped", mask="full", noise=0.05, shift=0.02, **options)
    old = case.old_per_token_logps.clone()
    old[(1, slice(None)) if options.get("importance_sampling_level") == "sequence" else (1, 3)] += (
        shift
    )
    return case.but(old_per_token_logps=old, advantages=torch.full((3,), advantage))


@pytest.mark.parametrize(
    ("loss_type", "level"), [(x, level) for x in CLIPPED for level in ("token", "sequence")]
)
@pytest.mark.parametrize("by", [-90.0, -300.0, -3e30, -INF])
def test_ratio_that_overflows_on_the_clipped_branch(loss_type: str, level: str, by: float) -> None:
    """Its gradient is exactly 0, and the loss the clipped one, for ratios up to infinity."""
    case = off_policy(1.0, by, **kind(loss_type, level))
    out, grads = run(case)
    at = (1, slice(None)) if level == "sequence" else (1, 3)
    assert bool(out.loss.isfinite())
    assert not grads["hidden"][at].any()
    assert bool(grads["hidden"][0].any())
    assert bool(grads["weight"].isfinite().all())
    assert_close(
        out.loss, run(off_policy(1.0, -5.0, **kind(loss_type, level)))[0].loss, rtol=1e-5, atol=1e-6
    )


def test_k3_overflows_where_the_maths_does() -> None:
    """exp(ref - logp) beyond fp32 is inf, in its own row only; k1 and k2 stay finite; far below is
    finite."""
    case = make_case("k3", beta=0.1, mask="full", old=False)
    ref = case.ref_per_token_logps.clone()
    for by, infinite in ((200.0, True), (-200.0, False), (50.0, False)):
        ref[1, 2] = by
        for estimator in ("k1", "k2", "k3"):
            out, grads = run(case.but(ref_per_token_logps=ref, config={"kl_estimator": estimator}))
            assert bool(out.loss.isinf()) == (infinite and estimator == "k3")
            assert bool(grads["hidden"][0].isfinite().all()) and not bool(out.loss.isnan())


@pytest.mark.parametrize("loss_type", [x for x in TYPES if x != "gmpo"])
def test_sampling_logp_that_is_nan(loss_type: str) -> None:
    """A token that the sampler could not score is no evidence: as if it agreed; and the others
    still are."""
    case = make_case(
        "sampling", mask="full", sampling=True, off_policy_mask_threshold=0.1, loss_type=loss_type
    )
    sampling = case.sampling_per_token_logps.clone()
    sampling[:, 2] = NAN
    with_nan = run(case.but(sampling_per_token_logps=sampling))[0]
    sampling[:, 2] = run(case)[0].per_token_logps[:, 2]
    agreeing = run(case.but(sampling_per_token_logps=sampling))[0]
    assert bool(with_nan.loss.isfinite()) and torch.equal(with_nan.loss, agreeing.loss)
    assert torch.equal(with_nan.metrics["off_policy_masked"], agreeing.metrics["off_policy_masked"])


@pytest.mark.parametrize(
    ("loss_type", "level"),
    [("grpo", "token"), ("grpo", "sequence"), *((x, "token") for x in ("cispo", "vespo", "gmpo"))],
)
def test_banned_target_on_policy(loss_type: str, level: str) -> None:
    """The loss is NaN, since no policy samples what it bans; the ratio is 1, and the gradient what
    it tends to."""
    case = make_case("banned", mask="holes", old=False, bias=True, **kind(loss_type, level))
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
            assert_close(
                grads[name],
                limit[name],
                rtol=1e-5,
                atol=1e-6,
                msg=lambda m, e=engine, n=name: f"{e} {n}: {m}",
            )


WHERE_NAN_SURFACES = [
    (name, *loss)
    for name in ("hidden", "advantages", *PER_TOKEN[:2], "importance_sampling_ratio")
    for loss in LOSSES
    if (name, loss[0]) != ("importance_sampling_ratio", "gmpo")  # which takes no ratio
]


@pytest.mark.parametrize(("name", "loss_type", "level"), WHERE_NAN_SURFACES)
def test_nan_at_a_counted_position_surfaces(name: str, loss_type: str, level: str) -> None:
    """In the loss, and if it is the hidden state's in its row's logp, entropy and gradient."""
    ratio = None if loss_type == "gmpo" else "token"
    case = make_case(
        "nan", mask="full", beta=0.1, adv="token", ratio=ratio, bias=True, **kind(loss_type, level)
    )
    x = getattr(case, name).clone()
    x[1, 2] = NAN
    out, grads = run(case.but(**{name: x}))
    assert bool(out.loss.isnan())
    assert bool(grads["weight"].isnan().any())
    rows = torch.zeros(3, 7, dtype=torch.bool)
    rows[1, 2] = name == "hidden"
    assert torch.equal(out.per_token_logps.isnan(), rows) and torch.equal(
        out.entropies.isnan(), rows
    )
    if level == "token" and not TERMS[loss_type].per_sequence:
        assert bool(grads["hidden"][[0, 2]].isfinite().all())


@pytest.mark.parametrize(("loss_type", "level"), LOSSES)
def test_nan_hidden_state_surfaces_on_policy(loss_type: str, level: str) -> None:
    """Also where the loss and its coefficients would be known without any log-probability."""
    case = make_case("nan on-policy", mask="full", old=False, **kind(loss_type, level))
    hidden = case.hidden.clone()
    hidden[1, 2] = NAN
    out, grads = run(case.but(hidden=hidden))
    assert bool(out.loss.isnan())
    assert bool(grads["weight"].isnan().any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradient_has_one_rounding_however_many_chunks(
    dtype: torch.dtype, every_backend: str
) -> None:
    """Accumulated in fp32: d weight is off by one rounding, for 4 sequences or 256."""
    for batch in (4, 64, 256) if every_backend == "torch" else (4, 16):  # the interpreter is slow
        g = torch.Generator().manual_seed(batch)
        hidden = torch.randn(batch, 8, 32, generator=g).to(dtype)
        weight = torch.randn(200, 32, generator=g).to(dtype).requires_grad_()
        ids, advantages = (
            torch.randint(200, (batch, 8), generator=g),
            torch.randn(batch, generator=g),
        )
        mask = torch.ones(batch, 8)
        grpo_loss(
            hidden, weight, ids, mask, advantages, run=Run(workspace_bytes=64 * 1024)
        ).loss.backward()
        exact = weight.detach().double().requires_grad_()
        grpo_loss(hidden.double(), exact, ids, mask, advantages).loss.backward()
        assert exact.grad is not None and weight.grad is not None
        rounded = exact.grad.to(dtype).double()
        best = (rounded - exact.grad).norm()
        assert (weight.grad.double() - exact.grad).norm() <= 1.02 * best


def test_logits_beyond_the_range_of_fp16() -> None:
    """Logits of 10^5 from fp16 operands: they are never stored in 16 bits."""
    hidden, weight = (
        torch.full((12, 64), 200.0, dtype=torch.float16),
        torch.randn(40, 64).half() * 30,
    )
    scores = linear_logprob(hidden, weight, torch.arange(12))
    z = hidden.double() @ weight.double().T
    assert z.abs().max() > 65504
    assert_close(
        scores.logps.double(),
        z.log_softmax(-1)[torch.arange(12), torch.arange(12)],
        atol=0.05,
        rtol=1e-6,
    )
    assert scores.entropies is not None and bool(scores.entropies.isfinite().all())
