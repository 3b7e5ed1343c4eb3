"""What must not matter: padding, packing, the batch, order; temperature is applied once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from grpo_kernels import Head, LossConfig, Run, grpo_loss, linear_logprob
from tests.support.case_builder import PER_TOKEN, make_case
from tests.support.cases import LOSSES
from tests.support.flat import flat
from tests.support.measure import AllocationWatcher
from tests.support.run_case import arguments, config_of, packed, run

NAN = math.nan
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


on_every_backend = pytest.mark.usefixtures("every_backend")


@pytest.mark.parametrize(("loss_type", "level"), LOSSES)
def test_padding_changes_nothing(loss_type: str, level: str) -> None:
    """Masked columns of NaN change no loss, metric or gradient."""
    options = (
        {} if loss_type == "gmpo" else {"entropy_coef": 0.01, "ratio": "token", "adv": "token"}
    )
    case = make_case(
        "padding", beta=0.1, **options, loss_type=loss_type, importance_sampling_level=level
    )
    names = (
        "hidden",
        "completion_ids",
        "completion_mask",
        "importance_sampling_ratio",
        "advantages",
        *PER_TOKEN,
    )
    out, grads = run(case)
    for left, right in ((0, 5), (5, 0), (1, 63)):
        wide = {}
        for name in names:
            x = getattr(case, name)
            if x is None or x.dim() == 1:
                continue
            fill = 0 if name == "completion_mask" else NAN if x.is_floating_point() else -100
            pad = lambda n: x.new_full((len(x), n, *x.shape[2:]), fill)  # noqa: B023, E731
            wide[name] = torch.cat([pad(left), x, pad(right)], 1)
        padded, wide_grads = run(case.but(**wide))
        keep = slice(left, left + 7)
        # the sum over a sequence may be in another order
        assert_close(padded.loss, out.loss, rtol=2e-7, atol=0)
        assert torch.equal(padded.per_token_logps[:, keep], out.per_token_logps)
        assert_close(wide_grads["hidden"][:, keep], grads["hidden"], rtol=1e-6, atol=1e-8)
        assert_close(wide_grads["weight"], grads["weight"], rtol=1e-5, atol=1e-7)
        for name, x in out.metrics.items():
            assert name == "rows/projected" or torch.allclose(
                x, padded.metrics[name], equal_nan=True
            ), name


@pytest.mark.parametrize(("loss_type", "level"), LOSSES)
def test_packed_is_padded(loss_type: str, level: str) -> None:
    """The packed form has the bits of the padded one; the loss up to rounding."""
    case = make_case(
        "packed", b=5, mask="ragged", beta=0.1, loss_type=loss_type, importance_sampling_level=level
    )
    given = arguments(case)
    cut, stays = packed(case, given)
    out, one = flat(grpo_loss)(**cut, config=config_of(case)), run(case)
    out.loss.backward()
    assert torch.equal(out.per_token_logps, one[0].per_token_logps[stays])
    assert torch.equal(out.entropies, one[0].entropies[stays])
    # VESPO weighs by e to the sum over a sequence
    assert_close(out.loss, one[0].loss, rtol=5e-7, atol=0)
    assert_close(given["hidden"].grad, one[1]["hidden"], rtol=1e-6, atol=1e-8)
    assert_close(given["weight"].grad, one[1]["weight"], rtol=1e-5, atol=1e-7)


SHAPES = [(16, 50), (64, 151), (7, 1000), (96, 33), (33, 4097)]


@pytest.mark.parametrize(("h", "v"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_batch(
    h: int, v: int, dtype: torch.dtype, every_backend: str
) -> None:
    """Alone, in batches of any size, permuted: the same bits of its log-probability and entropy."""
    # the interpreter is slow
    most = 64 if every_backend == "torch" or v < 100 else 17 if v < 200 else 4
    hidden, weight = torch.randn(most, h).to(dtype), (torch.randn(v, h) / h**0.5).to(dtype)
    ids = torch.randint(0, v, (most,))

    def same(index: Tensor, run: Run | None = None) -> bool:
        part = linear_logprob(hidden[index], weight, ids[index], run=run).given
        return all(torch.equal(x, whole[name][index]) for name, x in part.items())

    whole, every = linear_logprob(hidden, weight, ids).given, torch.arange(most)
    sizes = (1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 15, 16, 17, 31, 33, 63)
    for n in sizes if every_backend == "torch" else (1, 3, 5, 12, 16, 33):
        if n >= most:
            break
        for start in (0, most - n, (most - n) // 2):
            assert same(every[start : start + n]), f"{n} rows from {start}"
    assert same(torch.randperm(most))
    assert same(every[:5].repeat(3))
    # 16-bit weights are converted in slices whose width depends on the workspace
    if dtype == torch.float32:
        for rows in (5, 13, 29):
            assert same(every, Run(workspace_bytes=rows * v * 8)), f"chunks of about {rows} rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo", "vespo", "gmpo"])
def test_ratio_is_exactly_one_on_policy(
    dtype: torch.dtype, loss_type: str, every_backend: str
) -> None:
    """Old log-probabilities of another batch, without gradient, are those of this."""
    case = make_case(
        "on-policy", b=6, t=9, h=24, v=333, dtype=dtype, loss_type=loss_type, temperature=0.7
    )
    with torch.no_grad():
        rows = [
            linear_logprob(
                case.hidden[i, :n].clone(), case.weight, case.completion_ids[i, :n], temperature=0.7
            ).logps
            for i, n in enumerate((9, 9))
        ]
        rest = linear_logprob(
            case.hidden[2:].flip(0), case.weight, case.completion_ids[2:].flip(0), temperature=0.7
        )
    old = torch.stack([*rows, *rest.logps.flip(0)])
    out, grads = run(case.but(old_per_token_logps=old))
    on_policy, own = run(case.but(old_per_token_logps=None))
    assert float(out.metrics["ratio"]) == 1.0
    if every_backend == "torch":
        assert torch.equal(out.loss, on_policy.loss)
    else:  # a fused kernel multiplies in another order than `PolicyObjective`
        assert_close(out.loss, on_policy.loss, rtol=2e-6, atol=0)
    assert all(torch.equal(grads[name], own[name]) for name in ("hidden", "weight"))


@on_every_backend
def test_rows_are_the_same_in_every_engine() -> None:
    """Which engine serves a call changes no bit of its log-probabilities and entropies."""
    case = make_case("engines", b=5, t=9, h=24, v=333, zero_adv=True)
    outs = [run(case, engine)[0] for engine in ("one_pass", "two_pass")]
    outs += [run(case.but(frozen=frozenset(["weight"])), "frozen")[0]]
    outs += [run(case.but(frozen=frozenset(["hidden", "weight"])), "score")[0]]
    for out in outs[1:]:
        assert torch.equal(out.per_token_logps, outs[0].per_token_logps)
        assert torch.equal(out.entropies, outs[0].entropies)
        assert torch.equal(out.loss, outs[0].loss)


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperature_is_applied_once_to_the_logits(dtype: torch.dtype) -> None:
    """After scale and soft-cap; for the entropy too; a number is that of each row."""
    hidden = torch.randn(13, 8).to(dtype)
    weight = torch.randn(21, 8).to(dtype)
    bias = torch.randn(21).to(dtype)
    ids, t = torch.arange(13), torch.linspace(0.4, 2.0, 13)
    for cap, scale in ((None, 1.0), (3.0, 1.0), (2.0, -0.7)):
        raw = scale * (hidden.double() @ weight.double().T + bias.double())
        z = (raw if cap is None else cap * torch.tanh(raw / cap)) / t[:, None]
        log_probs = torch.log_softmax(z, -1)
        head = Head(weight, bias, final_logit_softcapping=cap, logit_scale=scale)
        every = linear_logprob(hidden, head, ids, temperature=t)
        assert_close(every.logps.double(), log_probs[range(13), ids], rtol=1e-5, atol=2e-5)
        assert_close(
            every.entropies.double(), -(log_probs.exp() * log_probs).sum(-1), rtol=1e-5, atol=2e-5
        )
        for i in range(13):
            one = linear_logprob(hidden[i : i + 1], head, ids[i : i + 1], temperature=float(t[i]))
            assert_close(one.logps[0], every.logps[i], rtol=1e-6, atol=1e-6)
            assert_close(one.entropies[0], every.entropies[i], rtol=1e-6, atol=1e-6)


@on_every_backend
def test_loss_and_logprob_take_the_same_temperature() -> None:
    """`config.temperature` is `linear_logprob`'s: the same bits."""
    case = make_case(
        "temperature", temperature=0.6, final_logit_softcapping=4.0, logit_scale=1.3, mask="full"
    )
    head = Head(case.weight, final_logit_softcapping=4.0, logit_scale=1.3)
    scores = linear_logprob(case.hidden, head, case.completion_ids, temperature=0.6)
    out = run(case)[0]
    assert torch.equal(out.per_token_logps, scores.logps)
    assert torch.equal(out.entropies, scores.entropies)


def test_packed_sequences_of_very_different_lengths_need_no_padding(every_backend: str) -> None:
    """Nothing of (sequences, longest) elements is made."""
    short = 2000 if every_backend == "torch" else 200  # the interpreter is slow
    lengths = [2 * short] + [1] * short
    n = sum(lengths)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    hidden, weight = torch.randn(n, 2), torch.randn(5, 2)
    old = torch.full((n,), -1.6)
    config = LossConfig(loss_type="grpo", importance_sampling_level="sequence")
    with AllocationWatcher() as watch:
        grpo_loss(
            hidden, weight, torch.randint(5, (n,)), torch.ones(n), torch.randn(short + 1),
            old_per_token_logps=old, config=config, cu_seqlens=bounds,
        )  # fmt: skip
    assert watch.largest <= 10 * n
