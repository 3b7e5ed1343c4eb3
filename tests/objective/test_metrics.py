"""Metrics: those of micro-batches merge into those of the whole batch; a mapping, a pytree.
Quantiles of more values than torch takes."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.utils._pytree as pytree

from grpo_kernels import LossOutput, Metrics, grpo_loss, linear_logps
from grpo_kernels.base import tensors
from grpo_kernels.typing import LossTypeName
from tests.support.case_builder import make_case
from tests.support.flat import flat
from tests.support.run_case import run
from tests.support.small_batch import small_batch

MERGED = [(x, None) for x in get_args(LossTypeName)]
MERGED += [(x, 17) for x in ("dapo", "cispo", "vespo")]


@pytest.mark.parametrize(("loss_type", "items"), MERGED)
def test_metrics_of_micro_batches_merge(loss_type: str, items: int | None) -> None:
    """Into those of one call on the whole batch; parts are of one, three and two sequences, one
    without a token."""
    hidden, weight, ids = torch.randn(6, 4, 8), torch.randn(20, 8), torch.randint(20, (6, 4))
    mask, old = torch.rand(6, 4) > 0.3, torch.randn(6, 4) - 3
    mask[2] = False
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0, 0.3, -0.4])
    options = {"beta": 0.1, "epsilon_high": 0.3, "entropy_coef": 0.1, "max_completion_length": 4}
    options |= {"vllm_importance_sampling_correction": loss_type != "gmpo"}
    options |= {"loss_type": loss_type, "num_items_in_batch": items}

    def metrics(rows: slice) -> Metrics:
        shifted = {"ref_per_token_logps": old + 0.1, "sampling_per_token_logps": old - 0.2}
        logps = {name: x[rows] for name, x in {"old_per_token_logps": old, **shifted}.items()}
        given = hidden[rows], weight, ids[rows], mask[rows], advantages[rows]
        return grpo_loss(*given, **logps, **options).metrics

    whole, (first, *rest) = metrics(slice(6)), map(metrics, (slice(1), slice(1, 4), slice(4, 6)))
    merged = Metrics.merge([first, Metrics.merge(rest)])
    assert list(merged) == list(whole)
    torch.testing.assert_close(dict(merged), dict(whole))
    for part in (first, rest[0]):
        assert abs(part["policy_loss"] - whole["policy_loss"]) > 1e-3
    for name, pair in merged.pairs.items():
        torch.testing.assert_close(pair, whole.pairs[name])


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo", "cispo", "vespo"])
def test_the_policy_loss_has_a_kl_term_and_no_entropy_bonus(loss_type: str) -> None:
    """As TRL's; of a mean over tokens, docs/troubleshooting.md says how to take the KL term out."""
    ref = torch.linspace(-3.0, -1.0, 10).view(2, 5)
    inputs = small_batch(loss_type=loss_type, ref_per_token_logps=ref, advantages=torch.ones(2, 5))
    with_kl = flat(grpo_loss)(**inputs, beta=0.5, entropy_coef=0.1).metrics
    alone = flat(grpo_loss)(**inputs).metrics["policy_loss"]
    torch.testing.assert_close(with_kl["policy_loss"] - 0.5 * with_kl["kl"], alone)


def test_metrics_of_different_losses_do_not_merge() -> None:
    inputs = small_batch(num_items_in_batch=10)
    dapo, bnpo = (flat(grpo_loss)(**inputs, loss_type=x).metrics for x in ("dapo", "bnpo"))
    for parts in ([dapo, bnpo], []):
        with pytest.raises(ValueError, match=r"^parts: expected the metrics of one loss"):
            Metrics.merge(parts)
    with pytest.raises(TypeError, match=r"^parts: expected the metrics of calls, got dict"):
        Metrics.merge([dict(dapo)])  # type: ignore[list-item]


def test_rewards_in_the_place_of_advantages_show_in_the_metrics() -> None:
    rewards = torch.arange(2.0)
    for advantages, mean, zero in (
        (rewards, 0.5, 0.5),
        (rewards - rewards.mean(), 0.0, 0.0),
        (rewards[:, None].expand(2, 5), 0.5, 0.5),
    ):
        metrics = flat(grpo_loss)(**small_batch(advantages=advantages)).metrics
        assert (metrics["advantages/mean"], metrics["advantages/zero"]) == (mean, zero)


def test_metrics_are_a_mapping_that_knows_near_names() -> None:
    metrics = flat(grpo_loss)(**small_batch(old_per_token_logps=-torch.ones(2, 5))).metrics
    nearest = {"clip_ratio": "clip_ratio/low_mean", "entropies": "entropy", "kl": "policy_loss"}
    for asked, near in nearest.items():
        with pytest.raises(KeyError, match=rf"metrics: expected one of .*{near}.*, got '{asked}'"):
            metrics[asked]
        assert asked not in metrics
        assert metrics.get(asked) is None
    assert {"entropy", "clip_ratio/low_min"} <= {name for name in metrics if name in metrics}
    assert metrics.floats() == {name: value.item() for name, value in metrics.items()}


def test_an_output_is_a_pytree() -> None:
    """Of its tensors: what maps over them gives an output again, with all of its metrics."""
    case = make_case("pytree", bias=True, sampling=True, ratio="token", loss_type="grpo", beta=0.1)
    out, _ = run(case)
    leaves, spec = pytree.tree_flatten(out)
    assert len(leaves) == 3 + len(out.metrics.pairs) + len(out.metrics)
    paths = pytree.tree_flatten_with_path(out)[0]
    assert len({pytree.keystr(path) for path, _ in paths}) == len(leaves)
    doubled = pytree.tree_map(lambda x: x.detach().double(), out)
    read = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert isinstance(hash(spec), int)
    for again in (doubled, pytree.tree_unflatten(leaves, read)):
        assert isinstance(again, LossOutput) and again.engine == out.engine
        assert [*again.metrics] == [*out.metrics]
    total, count = doubled.metrics.pairs["kl"]
    assert total.dtype == torch.float64 and doubled.metrics["kl"] == total / count


def test_the_ratio_of_a_sequence_that_is_masked_whole_is_not_read() -> None:
    batch = small_batch() | {"completion_mask": torch.tensor([[1] * 5, [0] * 5])}
    out = flat(grpo_loss)(**batch, importance_sampling_ratio=torch.tensor([1.0, torch.nan]))
    assert out.metrics["importance_sampling_ratio"] == 1


@pytest.mark.parametrize("n", [1, 2, 3, 10, 41, 1000])
def test_quantiles_have_the_bits_of_torchs(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, where torch finds the places as exactly."""
    monkeypatch.setattr(tensors, "MOST", 0)
    x = torch.randn(n, dtype=torch.float64).round(decimals=1)
    holes = torch.where(torch.rand(n) < 0.3, torch.nan, x)
    for q in (0.0, 0.2, 0.25, 0.5, 0.75, 0.999, 1.0):
        assert torch.equal(tensors.quantile(x, q), torch.quantile(x, q))
        assert tensors.quantile(holes, q).isnan() == holes.isnan().any()
        got = tensors.quantile_of_numbers(holes, q)
        want = torch.nanquantile(holes, q, interpolation="lower")
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    for none in (x[:0], x * torch.nan):
        assert tensors.quantile_of_numbers(none, 0.5).isnan()


def test_losses_beyond_the_limit_ask_torch_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threshold on entropies, and the scale of an expectation."""
    hidden, weight = (torch.randn(shape, requires_grad=True) for shape in ((4, 7, 8), (11, 8)))
    ids, advantages, expected = torch.randint(11, (4, 7)), torch.randn(4), torch.randn(4, 7)
    monkeypatch.setattr(tensors, "MOST", 0)
    for name in ("quantile", "nanquantile"):
        monkeypatch.setattr(torch, name, None)
    grpo_loss(hidden, weight, ids, None, advantages, top_entropy_quantile=0.3).loss.backward()
    linear_logps(hidden, weight, ids, expected=expected).logps.backward(3 * expected)
