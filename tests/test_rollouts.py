"""Rollout correction: against verl's own helper, and the other trainers' formulas written out in
float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.rollouts import correct
from tests.support.ranks import run_ranks
from tests.support.verl_peer import verl_module

FLOAT = torch.float64
NAN = float("nan")

VERLS_REJECTIONS = {
    "token_k1": (0.8, 1.3), "token_k2": 0.05, "token_k3": 0.04,
    "seq_sum_k1": (0.6, 1.4), "seq_sum_k2": 0.4, "seq_sum_k3": 0.3,
    "seq_mean_k1": (0.95, 1.1), "seq_mean_k2": 0.05, "seq_mean_k3": 0.05,
    "seq_max_k2": 0.2, "seq_max_k3": 0.3,
}  # fmt: skip


def batch(seed: int = 0, rows: int = 24, length: int = 9) -> SimpleNamespace:
    """Log-probabilities of two policies with a gap that differs by row; NaN where masked."""
    gen = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, length, 5, generator=gen, dtype=FLOAT)
    old = torch.log_softmax(logits, dim=-1)[..., 0] - 0.01
    gaps = 0.3 * torch.rand(rows, 1, generator=gen, dtype=FLOAT)
    gaps = gaps * torch.randn(rows, length, generator=gen, dtype=FLOAT)
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=gen)
    mask[: rows // 2, 1:] &= torch.rand(rows // 2, length - 1, generator=gen) < 0.7
    gaps[3, 0], gaps[5, 0] = 23.0, -24.0  # beyond the safety bound
    data = SimpleNamespace(mask=mask.long(), d=gaps.masked_fill(~mask, 0.0), counts=mask)
    data.old, data.sampling = old.masked_fill(~mask, NAN), (old - gaps).masked_fill(~mask, NAN)
    return data


def of_verl(data: SimpleNamespace, **options: Any) -> tuple[Any, Tensor, dict[str, float]]:
    helper = verl_module("trainer.ppo.rollout_corr_helper")
    given = data.old.nan_to_num(nan=-1.0), data.sampling.nan_to_num(nan=-1.0), data.mask
    weights, *rest = helper.compute_rollout_correction_and_rejection_mask(*given, **options)
    return None if weights is None else weights.batch["rollout_is_weights"], *rest


def ours(data: SimpleNamespace, **options: Any) -> Any:
    return correct(data.old, data.sampling, data.mask, **options)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def check_verls(found: Any, weights: Any, mask: Tensor, metrics: dict[str, float]) -> None:
    """Every metric of verl's, to 1e-6; it has no fraction below a bound that is not there."""
    if weights is not None:
        close(found.weights, weights, 1e-6)
    assert torch.equal(found.keep, mask)
    assert metrics.keys() <= found.metrics.keys()
    for name, x in found.metrics.items():
        if name in metrics:
            assert x == pytest.approx(metrics[name], rel=1e-6, abs=1e-6), name
        else:
            assert name.endswith("seq_fraction_low") and not x


@pytest.mark.parametrize("batch_normalize", [False, True])
@pytest.mark.parametrize("threshold", [2.0, 1.05, "0.9_1.1"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_verls(level: str, threshold: float | str, batch_normalize: bool) -> None:
    bounds: dict[str, Any] = {"clip_max": threshold}
    if isinstance(threshold, str):
        bounds = {"mode": "mask", "clip_min": 0.9, "clip_max": 1.1}
    options = {"rollout_is": level, "rollout_is_threshold": threshold}
    for seed, length in ((0, 9), (1, 9), (2, 9), (0, 1)):
        data = batch(seed, length=length)
        found = ours(data, level=level, batch_normalize=batch_normalize, **bounds)
        check_verls(found, *of_verl(data, **options, rollout_is_batch_normalize=batch_normalize))
        assert ("rollout_corr/rollout_is_batch_norm_factor" in found.metrics) == batch_normalize


@pytest.mark.parametrize(("name", "bound"), VERLS_REJECTIONS.items())
def test_rejections_are_verls(name: str, bound: Any) -> None:
    text = "_".join(map(str, bound)) if isinstance(bound, tuple) else str(bound)
    for data in map(batch, range(3)):
        found = ours(data, level=None, reject={name: bound})
        check_verls(found, *of_verl(data, rollout_rs=name, rollout_rs_threshold=text))
        assert 0 < found.keep.sum() < data.mask.sum()
        assert torch.equal(found.weights, data.mask.to(FLOAT))


def test_every_rejection_of_verl_is_there_and_a_list_of_them_is_an_and() -> None:
    helper = verl_module("trainer.ppo.rollout_corr_helper")
    assert VERLS_REJECTIONS.keys() == helper.SUPPORTED_ROLLOUT_RS_OPTIONS
    data, reject = batch(1), {"token_k1": 1.2, "seq_max_k3": 0.5, "seq_mean_k2": 0.2}
    found = ours(data, level="sequence", clip_max=3.0, reject=reject)
    texts = {"rollout_rs": ",".join(reject), "rollout_rs_threshold": "1.2,0.5,0.2"}
    check_verls(found, *of_verl(data, rollout_is="sequence", rollout_is_threshold=3.0, **texts))


def test_sequences_without_a_token_enter_no_metric() -> None:
    data, options = batch(2), {"level": "sequence", "batch_normalize": True}
    options["reject"] = {"seq_sum_k1": 2.0}
    alone = ours(data, **options)
    nothing = torch.full((2, 9), NAN, dtype=FLOAT)
    padded = [torch.cat([nothing, x, nothing]) for x in (data.old, data.sampling)]
    masks = torch.cat([torch.zeros(2, 9), data.mask, torch.zeros(2, 9)])
    found = correct(*padded, masks, **options)
    assert found.metrics == alone.metrics
    for x, y in ((found.weights, alone.weights), (found.keep, alone.keep)):
        assert torch.equal(x[2:-2], y.to(x))
        assert not x[[0, 1, -2, -1]].any()


def aggregated(data: SimpleNamespace, how: str, x: Tensor) -> Tensor:
    if how == "token":
        return x
    if how == "seq_max":
        return x.masked_fill(~data.counts, -math.inf).amax(1, keepdim=True)
    sums = torch.where(data.counts, x, 0.0).sum(1, keepdim=True)
    return sums / data.mask.sum(1, keepdim=True) if how == "seq_mean" else sums


def another_batch() -> SimpleNamespace:
    """Ratios that no safety bound meets, one of them e^-10."""
    data = batch(3)
    data.d[3, 0], data.d[5, 0], data.d[9, 0] = 4.0, -4.0, -10.0
    data.sampling = torch.where(data.counts, data.old - data.d, NAN)
    return data


@pytest.mark.parametrize("batch_normalize", [False, True])
@pytest.mark.parametrize(("low", "high"), [(0.5, 5.0), (0.95, 1.1), (None, 2.0), (None, None)])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize(
    ("level", "how"), [("token", "token"), ("sequence", "seq_sum"), ("geometric", "seq_mean")]
)
def test_weights(level, how, mode, low, high, batch_normalize):
    """Truncated, clipped or masked by NeMo-RL, OpenRLHF, AReaL and slime, normalized over the batch
    by slime."""
    data, least, most = another_batch(), low or 0.0, high or math.inf
    w = aggregated(data, how, data.d).exp()
    w = w.clamp(least, most) if mode == "truncate" else w * ((w >= least) & (w <= most))
    if batch_normalize:
        w = w / (w[data.counts] if level == "token" else w).mean()
    options = {"level": level, "mode": mode, "clip_min": low, "clip_max": high}
    options["safety_bound"] = 20.0 if batch_normalize else math.inf
    found = ours(data, batch_normalize=batch_normalize, **options)
    close(found.weights, torch.where(data.counts, w, 0.0))


@pytest.mark.parametrize("kind", ["ratio", "k1", "k2", "k3", "reverse_k3"])
@pytest.mark.parametrize("how", ["token", "seq_sum", "seq_mean", "seq_max"])
def test_rejections(how: str, kind: str) -> None:
    """AReaL's k1 is a ratio's logarithm, its k3 ours of the other direction; slime has ratios and
    the veto."""
    data = another_batch()
    d, counts, n = data.d, data.counts, int(data.mask.sum())
    of_tokens = {"ratio": d, "k1": -d, "k2": d**2 / 2, "k3": d.exp() - 1 - d}
    of_tokens["reverse_k3"] = (-d).exp() - 1 + d
    x = aggregated(data, how, of_tokens[kind])
    x = x.exp() if kind in ("ratio", "k1") else x
    low, high = {"ratio": (0.97, 1.2), "k1": (0.8, 1.2)}.get(kind, (0.0, 0.03))
    for veto in (1e-30, 1e-4):
        found = ours(data, reject={f"{how}_{kind}": (low, high)}, veto_threshold=veto)
        keep = counts & (x >= low) & (x <= high)
        keep = keep & ~((d.exp() < veto) & counts).any(1, keepdim=True)
        assert torch.equal(found.keep.bool(), keep)
        assert torch.equal(found.weights, ours(data).weights)
        kept = int(keep.sum())
        assert 0 < kept < n
        shares = {"rollout_rs_masked_fraction": 1 - kept / n}
        shares |= {"catastrophic_seq_fraction": (veto == 1e-4) / 24}  # row 9
        shares |= {"catastrophic_token_fraction": (veto == 1e-4) / n}
        assert shares == pytest.approx({x: found.metrics[f"rollout_corr/{x}"] for x in shares})


def test_a_token_that_the_sampler_could_not_score_has_ratio_1_or_is_left_out_by_the_mask() -> None:
    """TRL and AReaL keep it; NeMo-RL gives it weight 0."""
    data = batch(5)
    data.sampling[2, 0], data.sampling[7, 0] = NAN, -math.inf
    found = ours(data)
    assert found.weights[2, 0] == 1.0
    assert found.weights[7, 0] == 2.0
    ratios = (data.old - data.sampling).exp()
    theirs = torch.nan_to_num(ratios, nan=0.0, posinf=0.0, neginf=0.0).clamp(0.0, 2.0)
    scored = data.mask * data.sampling.isfinite()
    found = correct(data.old, data.sampling, scored, safety_bound=math.inf)
    close(found.weights, theirs * data.mask)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_packed_batches(level: str) -> None:
    """Equal to the padded call, values and metrics; also with a sequence that has no token."""
    data = batch()
    lengths = torch.randint(0, data.mask.shape[1] + 1, (len(data.mask),))
    lengths[1] = 0
    inside = torch.arange(data.mask.shape[1]) < lengths[:, None]
    mask = data.mask * inside
    options = {"level": level, "mode": "mask", "clip_max": 1.1}
    options |= {"reject": {"seq_max_k2": 0.1}, "veto_threshold": 1e-3}
    want = correct(data.old, data.sampling, mask, **options)
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    packed = [x[inside] for x in (data.old, data.sampling, mask)]
    found = correct(*packed, cu_seqlens=bounds, **options)
    assert torch.equal(found.weights, want.weights[inside])
    assert torch.equal(found.keep, want.keep[inside])
    assert found.metrics == pytest.approx(want.metrics, rel=1e-12, nan_ok=True)
    with pytest.raises(ValueError, match="cu_seqlens: expected to rise from 0 to N"):
        correct(*packed, cu_seqlens=bounds[:-1])


def test_dtypes_no_gradient_and_nothing_that_counts() -> None:
    data = batch(9)
    old = data.old.float().requires_grad_()
    found = correct(old, data.sampling.float(), data.counts, reject={"token_k2": 0.1})
    kinds = found.weights.dtype, found.keep.dtype, found.weights.requires_grad
    assert kinds == (torch.float32, torch.bool, False)
    expected = ours(data, reject={"token_k2": 0.1})
    close(found.weights.double(), expected.weights, 1e-5)
    assert torch.equal(found.keep, expected.keep.bool())
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)
    nothing = torch.full((3, 4), NAN)
    options: dict[str, Any] = {"reject": {"seq_max_k3": 1.0}, "veto_threshold": 0.1}
    for x in (nothing, nothing[:0], nothing[:, :0]):
        found = correct(x, x, torch.zeros(x.shape), batch_normalize=True, **options)
        assert found.weights.shape == found.keep.shape == x.shape
        assert not found.weights.any() and not found.keep.any()
        assert found.metrics == {}
    dropped = ours(batch(10), mode="mask", clip_min=1e6, clip_max=1e7, batch_normalize=True)
    assert dropped.metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0
    assert dropped.metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1.0
    one = correct(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.ones(1, 1))
    assert one.metrics["rollout_corr/rollout_is_seq_std"] == 0.0


def normalized_part(rank: int, world_size: int) -> Any:
    data, rows = batch(12), (slice(0, 20), slice(20, 24))[rank]
    group = torch.distributed.group.WORLD
    numbers = data.old[rows], data.sampling[rows]
    masks = {"token": data.mask[rows], "sequence": data.mask[rows] * (rank == 0)}
    options = {"batch_normalize": True, "process_group": group}
    return [
        correct(*numbers, mask, level=level, **options).weights for level, mask in masks.items()
    ]


def test_ranks_share_the_mean() -> None:
    data = batch(12)
    first, second = run_ranks(normalized_part, 2)
    close(torch.cat([first[0], second[0]]), ours(data, batch_normalize=True).weights)
    data.mask[20:] = 0
    expected = ours(data, level="sequence", batch_normalize=True).weights
    close(torch.cat([first[1], second[1]]), expected)


X, M = -torch.ones(2, 3), torch.ones(2, 3)
OLD, SAMPLING = "old_per_token_logps", "sampling_per_token_logps"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_max": 0}, "clip_max: expected a finite number > 0, got 0"),
        ({"clip_min": 3.0}, "clip_min: expected at most clip_max = 2.0, got 3.0"),
        ({"veto_threshold": NAN}, "veto_threshold: expected a finite number > 0, got nan"),
        ({"batch_normalize": 1}, "batch_normalize: expected True or False, got 1"),
        ({"level": None, "mode": "mask"}, "level: expected a name, .* ask for weights, got None"),
        ({"level": None, "clip_max": 3.0}, "level: expected a name, .* ask for weights, got None"),
        ({"reject": {"token_k1": 0.5}}, r".* of at most the upper one, got \(2, 0.5\)"),
        ({"reject": {"token_k1": [2, 1]}}, r".* of at most the upper one, got \(2, 1\)"),
        ({"reject": [("token_k1", 2.0)]}, "reject: expected a mapping .*, or None, got list"),
        ({"reject": {"seq_k1": 2.0}}, "reject: expected one of token_ratio, .* got 'seq_k1'; did "
         "you mean seq_sum_k1, seq_mean_k1 or seq_max_k1"),
        ({"reject": {"token_k1": (0.0, 2.0)}}, r"reject\['token_k1'\]: .* number > 0, got 0.0"),
        ({"reject": {"token_ratio": (2, 1)}}, r"reject\['token_ratio'\]: expected a lower bound"),
        ({"process_group": "x"}, "process_group: expected a torch.distributed.ProcessGroup"),
        ({OLD: X[0]}, rf"{OLD}: expected shape \(B, T\), got \(3,\)"),
        ({OLD: X / 0}, f"{OLD}: expected finite numbers at unmasked positions, got -inf"),
        ({SAMPLING: -X}, f"{SAMPLING}: expected log-probabilities, <= 0 at unmasked positions"),
        ({"cu_seqlens": torch.tensor([0, 6])}, rf"{OLD}: expected shape \(N,\), since there are"),
    ],
)  # fmt: skip
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        correct(**{OLD: X, SAMPLING: X, "completion_mask": M, **options})
