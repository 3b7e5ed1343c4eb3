"""The Triton row kernels against float64 within derived bounds, against the torch backend, and against themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.rows import LogitTransform, RowStats
from grpo_kernels.backends.torch_rows import TorchRows
from tests.row_truth import Truth, U, check, check_stats, gradient, loss_terms, truth

pytest.importorskip("triton")

from grpo_kernels.backends.triton_rows import TritonRows
from grpo_kernels.backends.triton_rows.configs import RowConfig
from grpo_kernels.backends.triton_rows.fused import launch_fused
from grpo_kernels.backends.triton_rows.grad import launch_grad
from grpo_kernels.backends.triton_rows.stats import launch_stats
from tests.row_cases import DEVICE, EXTRAS, FIELDS, PLAIN, assert_same, make_loss, make_transform, rows, tile

# 7 x 29 shapes: rows of one tile, of less and of more; lanes that see no logit, one, or several.
NS = (1, 2, 3, 5, 8, 16, 17)
VOCABS = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    32,
    33,
    47,
    48,
    49,
    63,
    64,
    65,
    96,
    97,
    127,
    128,
    129,
    191,
    192,
    193,
    255,
)


@pytest.mark.parametrize("rounded_to", [None, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("n", NS)
def test_every_kernel_on_every_shape(n: int, rounded_to: torch.dtype | None) -> None:
    """fp16: the logits are rounded to it, and the gradient is in it."""
    for kind, vocab in enumerate(VOCABS):
        raw, ids = rows(n, vocab)
        transform = make_transform(n, vocab, kind, rounded_to)
        at = truth(raw, ids, transform)
        stats = check_stats_kernel(raw, ids, transform, at)
        check_grad_kernel(raw, ids, transform, at, stats, rounded_to, has_b=kind % 3 != 0)
        check_fused_kernel(raw, ids, transform, at, stats, rounded_to, kind + n)


def check_stats_kernel(raw: Tensor, ids: Tensor, transform: LogitTransform, at: Truth) -> RowStats:
    stats = launch_stats(raw, ids, transform, tile(raw.shape[1]), entropy=True, extras=EXTRAS)
    check_stats(stats, at)
    z = raw.clone()
    TorchRows().prepare_(z, transform)
    want = TorchRows().stats(z, ids, transform, entropy=True, extras=EXTRAS)
    for field in FIELDS:
        check(f"{tuple(raw.shape)}: {field}", getattr(stats, field), getattr(want, field), 2 * at.bound[field])
    assert torch.equal(stats.extras["is_top1"], want.extras["is_top1"]), raw.shape
    return stats


def check_grad_kernel(
    raw: Tensor,
    ids: Tensor,
    transform: LogitTransform,
    at: Truth,
    stats: RowStats,
    dtype: torch.dtype | None,
    *,
    has_b: bool,
) -> None:
    (n, vocab), name = raw.shape, f"{tuple(raw.shape)}: d raw"
    a, b = torch.randn(n, device=DEVICE), torch.randn(n, device=DEVICE) if has_b else None
    out = torch.empty(n, vocab, dtype=dtype or torch.float32, device=DEVICE)
    launch_grad(raw, ids, stats, a, b, transform, out, tile(vocab), first_id=0)
    want, bound = gradient(at, ids, a, b)
    check(name, out, want, bound + rounding(want, dtype))
    z = raw.clone()
    TorchRows().prepare_(z, transform)
    TorchRows().grad(z, ids, stats, a, b, transform, z)
    cancelled = 0.0 if transform.softcap is None else 16 * U * (want / at.slope).abs()  # in torch's 1 - tanh^2
    check(f"{name} of torch", out, z, 2 * bound + cancelled + rounding(want, dtype))


def check_fused_kernel(
    raw: Tensor,
    ids: Tensor,
    transform: LogitTransform,
    at: Truth,
    stats: RowStats,
    dtype: torch.dtype | None,
    kind: int,
) -> None:
    (n, vocab), name = raw.shape, f"{tuple(raw.shape)}"
    loss, out = make_loss(stats.logps, kind), torch.empty(n, vocab, dtype=dtype or torch.float32, device=DEVICE)
    fused = launch_fused(raw, ids, transform, loss, out, tile(vocab))
    assert_same(fused, stats, name)
    assert set(fused.extras) == set(loss.terms)
    for term, (want, size) in loss_terms(loss, fused.logps, fused.extras["log_ratio"]).items():
        check(f"{name}: {loss.surrogate} {loss.kl} {term}", fused.extras[term], want, 8 * U * size)
    b = torch.full((n,), loss.b, device=DEVICE)
    want, bound = gradient(at, ids, fused.extras["a"], b)
    check(f"{name}: d raw", out, want, bound + rounding(want, dtype))


def rounding(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """What one rounding to `dtype` may change."""
    kind = torch.finfo(dtype or torch.float32)
    return kind.eps / 2 * x.abs() + kind.smallest_normal * kind.eps


@pytest.mark.parametrize("vocab", [1000, 5003])
def test_default_tiles(vocab: int) -> None:
    raw, ids = rows(5, vocab)
    transform, backend = make_transform(5, vocab, 3, torch.bfloat16), TritonRows()
    at, loss = truth(raw, ids, transform), make_loss(-torch.rand(5, device=DEVICE), 3)
    stats, out = backend.stats(raw, ids, transform, entropy=True), torch.empty_like(raw)
    check_stats(stats, at)
    fused = backend.fused(raw, ids, transform, loss, out)
    assert_same(fused, stats)
    by_grad = torch.empty_like(raw)
    b = torch.full_like(stats.logps, loss.b) if loss.b else None
    backend.grad(raw, ids, stats, fused.extras["a"], b, transform, by_grad)
    assert torch.equal(out, by_grad)
    check("d raw", out, *gradient(at, ids, fused.extras["a"], b))


@pytest.mark.parametrize("vocab", [50, 300])
def test_bits_of_a_row_are_its_own(vocab: int) -> None:
    """Alone, in a batch, permuted, in another tile of as many lanes, and whatever the loss around it."""
    raw, ids = rows(40, vocab)
    transform, config, order = make_transform(40, vocab, 3, None), tile(vocab), torch.randperm(40, device=DEVICE)
    whole = launch_stats(raw, ids, transform, config, entropy=True, extras=EXTRAS)
    out = torch.empty_like(raw)
    fused = launch_fused(raw, ids, transform, make_loss(whole.logps, 9), out, config)
    assert_same(fused, whole)

    def of(index: Tensor, config: RowConfig) -> RowStats:
        inv_t = transform.inv_temperature
        assert isinstance(inv_t, Tensor)
        some = replace(transform, inv_temperature=inv_t[index])
        return launch_stats(raw[index], ids[index], some, config, entropy=True, extras=EXTRAS)

    assert_same(of(order, config), whole.rows(order), "permuted")
    for i in (0, 17, 39):
        alone = torch.tensor([i], device=DEVICE)
        assert_same(of(alone, config), whole.rows(alone), "alone")
    assert_same(of(order, replace(config, block_n=2, num_warps=1)), whole.rows(order), "another tile")
    for _ in range(3):
        assert_same(launch_stats(raw, ids, transform, config, entropy=True, extras=EXTRAS), whole, "again")


def test_entropy_does_not_depend_on_the_target() -> None:
    raw = torch.randn(1, 50, device=DEVICE).repeat(50, 1)
    stats = launch_stats(raw, torch.arange(50, device=DEVICE), PLAIN, tile(50), entropy=True, extras=())
    assert stats.entropies is not None
    for x in (stats.entropies, stats.log_sum, stats.max_logit):
        assert x.unique().numel() == 1
    without = launch_stats(raw, torch.arange(50, device=DEVICE), PLAIN, tile(50), entropy=False, extras=())
    assert without.entropies is None
    assert torch.equal(without.logps, stats.logps)


def test_rows_may_be_strided_and_gradients_overwrite_logits() -> None:
    n, vocab, config = 5, 70, tile(70)
    raw, ids = rows(n, vocab)
    transform, a, b = make_transform(n, vocab, 3, None), torch.randn(n, device=DEVICE), torch.randn(n, device=DEVICE)
    want = launch_stats(raw, ids, transform, config, entropy=True, extras=EXTRAS)
    d_raw = torch.empty_like(raw)
    launch_grad(raw, ids, want, a, b, transform, d_raw, config, first_id=0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wide = torch.full((n, 96), 77.0, device=DEVICE)
        wide_out = torch.full((n, 104), 77.0, dtype=dtype, device=DEVICE)
        wide[:, 3:73] = raw
        part, out = wide[:, 3:73], wide_out[:, 5:75]
        assert_same(launch_stats(part, ids, transform, config, entropy=True, extras=EXTRAS), want)
        launch_grad(part, ids, want, a, b, transform, out, config, first_id=0)
        assert torch.equal(out, d_raw.to(dtype))
        assert (wide_out[:, :5] == 77).all()
        assert (wide_out[:, 75:] == 77).all()
        assert torch.equal(part, raw)
    launch_grad(part, ids, want, a, b, transform, part, config, first_id=0)
    assert torch.equal(part, d_raw)

    loss, out = make_loss(want.logps, 0), torch.empty_like(raw)
    launch_fused(raw, ids, transform, loss, out, config)
    assert torch.equal(launch_fused(raw, ids, transform, loss, None, config).logps, want.logps)
    launch_fused(raw, ids, transform, loss, raw, config)
    assert torch.equal(raw, out)


def test_gradient_of_a_part_of_the_vocabulary() -> None:
    raw, ids = rows(6, 90)
    a, b = torch.randn(6, device=DEVICE), torch.randn(6, device=DEVICE)
    stats = launch_stats(raw, ids, PLAIN, tile(90), entropy=True, extras=())
    whole, parts = torch.empty_like(raw), torch.empty_like(raw)
    launch_grad(raw, ids, stats, a, b, PLAIN, whole, tile(90), first_id=0)
    for start, stop in ((0, 1), (1, 40), (40, 90)):
        launch_grad(raw[:, start:stop], ids, stats, a, b, PLAIN, parts[:, start:stop], tile(90), first_id=start)
    assert torch.equal(parts, whole)


def test_refusals() -> None:
    raw, ids = rows(2, 8)
    with pytest.raises(ValueError, match="backend: expected float32 logits"):
        TritonRows().stats(raw.double(), ids, PLAIN, entropy=False)
    with pytest.raises(ValueError, match="backend: expected logits with contiguous rows"):
        TritonRows().stats(raw.T, ids, PLAIN, entropy=False)


def test_cpu_tensors_without_the_interpreter() -> None:
    code = (
        "import torch; from grpo_kernels.backends.rows import LogitTransform\n"
        "from grpo_kernels.backends.triton_rows import INTERPRETED, TritonRows\n"
        "assert not INTERPRETED\n"
        "TritonRows().stats(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), LogitTransform(), entropy=False)"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert found.returncode != 0
    assert "ValueError: backend: 'triton' expected tensors on a GPU" in found.stderr
