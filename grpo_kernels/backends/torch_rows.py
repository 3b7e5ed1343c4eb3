"""The row backend in plain torch: runs on any device, and is the oracle for the others.

With m = max_j z_j, e_j = exp(z_j - m), S = sum_j e_j and id the target::

    logp     = log p_id = -log(1 + exp(log sum_{j != id} e_j + m - z_id))
    entropy  = log S - sum_j e_j (z_j - m) / S
    d z_j    = a * (1[j = id] - p_j) - b * p_j * (log p_j + entropy) + c * (k_j - p_j sum_i k_i)

with a, b, c = `d_logp`, `d_entropy`, `d_divergence` (`backends.Coefficients`). k belongs to the
divergence from the logits of a second head, the reference (`divergence`); for the KL to a reference
with probabilities q, k_j = p_j (log p_j - log q_j).

The sum in logp leaves out the target, and the sum in log S leaves out the largest term, so that
neither loses digits when a token is nearly certain; ``1 - p_id = -expm1(logp)`` for the same
reason. A probability of zero (a logit of -inf) drops out of the entropy. The entropy's bits do not
depend on the target: tokens with the same hidden state have exactly equal entropies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends import (
    Chunk,
    Coefficients,
    DivergenceStats,
    LogitTransform,
    RowBackend,
    RowStats,
    statistic_dtype,
)
from grpo_kernels.backends.divergence import terms_function
from grpo_kernels.base.tensors import take

BLOCK_ELEMENTS = 2**21  # small enough to stay in the caches, large enough to keep threads busy
FEW_ELEMENTS = 2**12  # a block is not made smaller than this
LEAST_BLOCK_ROWS = 3
# block-sized temporaries that the terms of a divergence need
DIVERGENCE_TEMPORARIES = 16
LOWEST = -1e4  # exp(LOWEST) is 0 in every dtype, and so is 0 * LOWEST, unlike 0 * -inf


def refusal(device: torch.device, dtype: torch.dtype, *, asked_for: bool) -> None:
    """Never refuse: torch serves anywhere. "auto" chooses it if no other backend serves."""


def load() -> RowBackend:
    """Make the backend."""
    return TorchRows()


class TorchRows(RowBackend):
    """Row work in torch operations, a cache-sized block of rows at a time."""

    name = "torch"

    def scratch_rows(self, n: int, vocab: int, *, reference: bool = False) -> int:
        divergence_rows = _divergence_rows(n, vocab) if reference else 0
        return max(2 * _block_rows(n, vocab), DIVERGENCE_TEMPORARIES * divergence_rows)

    def prepare_(self, logits: Tensor, transform: LogitTransform) -> None:
        transform.apply_(logits)

    def stats(self, chunk: Chunk, *, entropy: bool, extras: tuple[str, ...] = ()) -> RowStats:
        logits = chunk.logits
        n, vocab = logits.shape
        names = ["logps", "max_logit", "log_sum", *(["entropies"] if entropy else [])]
        out: dict[str, Any] = {
            name: logits.new_empty(n, dtype=statistic_dtype(name, logits.dtype))
            for name in (*names, *extras)
        }
        scratch = logits.new_empty(2, _block_rows(n, vocab), vocab)
        for block in _blocks(n, _block_rows(n, vocab)):
            shifted, exps = scratch[:, : block.stop - block.start]
            block_out = {name: x[block] for name, x in out.items()}
            _block_stats(logits[block], chunk.ids[block, None], shifted, exps, block_out)
        extra_stats = {name: out.pop(name) for name in extras}
        return RowStats(**out, extras=extra_stats)

    def diverge(
        self, chunk: Chunk, stats: RowStats, reference_stats: RowStats
    ) -> tuple[Tensor, Tensor]:
        value, sum_k = torch.empty_like(stats.logps), torch.empty_like(stats.logps)
        diverged = DivergenceStats(value, sum_k, reference_stats.max_logit, reference_stats.log_sum)
        stats = replace(stats, divergence=diverged)
        for block in _blocks(len(chunk.logits), _divergence_rows(*chunk.logits.shape)):
            terms, k = _divergence_terms(chunk, block, take(stats, block))
            value[block], sum_k[block] = terms.sum(dim=1), k.sum(dim=1)
        # NaN if a row of either head has NaN or no finite logit
        nan_or_0 = _offset(stats, diverged) * 0.0
        return value + nan_or_0, sum_k + nan_or_0

    def grad(self, chunk: Chunk, stats: RowStats, coefficients: Coefficients, out: Tensor) -> None:
        if coefficients.d_divergence is not None:
            self._grad_with_reference(chunk, stats, coefficients, out)
            return
        d_logp, d_entropy, *_ = coefficients
        assert d_logp is not None
        logits, transform = chunk.logits, chunk.transform
        n, vocab = logits.shape
        # d logits = dz * dz/d logits: a and b absorb the factor that a whole row shares
        inv_t = transform.inv_temperature
        row_factor = transform.scale * (inv_t[:, 0] if isinstance(inv_t, Tensor) else inv_t)
        a = d_logp * row_factor
        b = None if d_entropy is None else d_entropy * row_factor
        scratch = logits.new_empty(2, _block_rows(n, vocab), vocab)
        for block in _blocks(n, _block_rows(n, vocab)):
            slope, exps = scratch[:, : block.stop - block.start]
            _block_grad_(
                logits[block],
                chunk.ids[block, None],
                take(stats, block),
                a[block, None],
                None if b is None else b[block, None],
                transform.softcap,
                inv_t[block] if isinstance(inv_t, Tensor) else inv_t,
                slope,
                exps,
            )
        if out is not logits:
            out.copy_(logits)

    def _grad_with_reference(
        self,
        chunk: Chunk,
        stats: RowStats,
        coefficients: Coefficients,
        out: Tensor,
    ) -> None:
        d_divergence = coefficients.d_divergence
        without_divergence = coefficients._replace(d_divergence=None)
        assert stats.divergence is not None and d_divergence is not None
        logits, transform, inv_t = chunk.logits, chunk.transform, chunk.transform.inv_temperature
        for block in _blocks(len(logits), _divergence_rows(*logits.shape)):
            z, block_stats = logits[block], take(stats, block)
            assert block_stats.divergence is not None
            k = _divergence_terms(chunk, block, block_stats)[1]
            p = torch.exp(z - block_stats.max_logit[:, None]).mul_(
                torch.exp(-block_stats.log_sum)[:, None]
            )
            # c (k_j - p_j sum_i k_i), times dz/d logits
            p_sum_k = p.mul_(block_stats.divergence.sum_k[:, None])
            divergence_part = k.sub_(p_sum_k).mul_(d_divergence[block, None])
            block_inv_t = inv_t[block] if isinstance(inv_t, Tensor) else inv_t
            block_transform = replace(transform, inv_temperature=block_inv_t)
            divergence_part.mul_(block_transform.slope(z))
            plain = Chunk(z, chunk.ids[block], block_transform)
            self.grad(plain, block_stats, take(without_divergence, block), z)
            z.add_(divergence_part)
        if out is not logits:
            out.copy_(logits)


def _offset(stats: RowStats, divergence: DivergenceStats) -> Tensor:
    """(z - y) - (log p - log q), (n,)."""
    return (stats.max_logit - divergence.reference_max_logit) + (
        stats.log_sum - divergence.reference_log_sum
    )


def _divergence_terms(chunk: Chunk, block: slice, stats: RowStats) -> tuple[Tensor, Tensor]:
    """The divergence's terms and k, (r, V) each, for the rows `block`, which have `stats`."""
    divergence = stats.divergence
    assert chunk.reference is not None and divergence is not None
    z, y = chunk.logits[block], chunk.reference.logits[block]
    d = z - y
    # z - y is NaN if both are -inf: then p = q = 0. Any other NaN is in the offset.
    d = torch.where(torch.isnan(d), 0.0, d - _offset(stats, divergence)[:, None])
    ahead = d >= 0.0
    m, reference_m = stats.max_logit[:, None], divergence.reference_max_logit[:, None]
    lead = torch.where(ahead, z - m, y - reference_m).exp_()
    inv_sum = torch.exp(-stats.log_sum)[:, None]
    reference_inv_sum = torch.exp(-divergence.reference_log_sum)[:, None]
    lead.mul_(torch.where(ahead, inv_sum, reference_inv_sum))
    return terms_function(chunk.jsd_beta)(d, lead, chunk.jsd_beta)


def _block_stats(
    z: Tensor,  # (r, V) scaled logits
    ids: Tensor,  # (r, 1)
    shifted: Tensor,  # (r, V) scratch
    exps: Tensor,  # (r, V) scratch
    out: dict[str, Tensor],  # each (r,), written
) -> None:
    top, argmax = z.max(dim=1, keepdim=True)
    torch.sub(z, top, out=shifted)
    torch.exp(shifted, out=exps)
    exp_target, z_target = exps.gather(1, ids), z.gather(1, ids)
    is_argmax = ids == argmax
    rest = exps.scatter_(1, argmax, 0.0).sum(dim=1, keepdim=True)  # all but the largest, which is 1
    is_inf = top == torch.inf  # all other logits then have probability 0, even an equal inf
    rest = rest.masked_fill_(is_inf, 0.0)
    # all but the target. In the second case >= 1, so nothing cancels.
    others = torch.where(is_argmax, rest, 1.0 + (rest - exp_target))
    log_sum = torch.log1p(rest)
    margin = others.log() + (top - z_target)
    out["logps"].copy_(-torch.logaddexp(torch.zeros_like(margin), margin)[:, 0])
    out["max_logit"].copy_(top[:, 0])
    out["log_sum"].copy_(log_sum[:, 0])
    if "log_sum_sq_probs" in out:
        squares = (
            torch.linalg.vector_norm(exps, dim=1, keepdim=True).square().masked_fill_(is_inf, 0.0)
        )
        out["log_sum_sq_probs"].copy_((squares.log1p() - 2 * log_sum)[:, 0])
    if "mean_logits" in out:
        out["mean_logits"].copy_(z.mean(dim=1))
    if "is_top1" in out:  # among equal logits the one with the lowest id counts as the largest
        # False if no logit is the largest
        out["is_top1"].copy_((is_argmax & ~log_sum.isnan())[:, 0])
    if "entropies" in out:
        mean_shifted = exps.mul_(shifted.clamp_(min=LOWEST)).sum(dim=1, keepdim=True) / (1 + rest)
        out["entropies"].copy_((log_sum - mean_shifted)[:, 0])


def _block_grad_(
    z: Tensor,  # (r, V) scaled logits; overwritten with d logits
    columns: Tensor,  # (r, 1) the target's column; may be out of range
    stats: RowStats,  # of these rows
    a: Tensor,  # (r, 1), with the factor of dz/d logits that the row shares
    b: Tensor | None,  # (r, 1), with the same factor
    softcap: float | None,
    inv_t: float | Tensor,  # number or (r, 1)
    slope: Tensor,  # (r, V) scratch
    exps: Tensor,  # (r, V) scratch
) -> None:
    if softcap is not None:  # d cap*tanh(x/cap) / dx = 1 - tanh^2, and z = cap * inv_t * tanh
        torch.div(z, softcap * inv_t, out=slope).square_().neg_().add_(1.0)
    logps, log_sum = stats.logps[:, None], stats.log_sum[:, None]
    inv_sum = torch.exp(-log_sum)
    z.sub_(stats.max_logit[:, None])
    d_target = a * -torch.expm1(logps)  # a (1 - p_id)
    if b is None:
        z.exp_().mul_(-a * inv_sum)  # -a p_j
    else:
        entropies = stats.entropies[:, None]
        p = torch.exp(z, out=exps).mul_(inv_sum)
        # (-b (log p_j + entropy) - a) p_j, with log p_j = z_j - m - log S
        z.clamp_(min=LOWEST).add_(entropies - log_sum).mul_(-b).sub_(a).mul_(p)
        d_target = d_target - b * torch.exp(logps) * (logps.clamp_min(LOWEST) + entropies)
    here = (columns >= 0) & (columns < z.shape[1])
    columns = torch.where(here, columns, 0)
    z.scatter_(1, columns, torch.where(here, d_target, z.gather(1, columns)))
    if softcap is not None:
        z.mul_(slope)


def _block_rows(n: int, vocab: int) -> int:
    least = max(LEAST_BLOCK_ROWS, FEW_ELEMENTS // vocab)
    return min(n, max(least, min(BLOCK_ELEMENTS // vocab, n // 8)))


def _divergence_rows(n: int, vocab: int) -> int:
    """Rows per block for work with `DIVERGENCE_TEMPORARIES` temporaries per row."""
    return max(min(n, LEAST_BLOCK_ROWS), _block_rows(n, vocab) * 2 // DIVERGENCE_TEMPORARIES)


def _blocks(n: int, most: int) -> Iterator[slice]:
    # no block is a single row unless n is 1: torch sums a single row in another order
    count = -(-n // most)
    return (slice(n * i // count, n * (i + 1) // count) for i in range(count))
