"""K ids of each row: their log-probabilities, or the divergence from a teacher.

The teacher gives its own log-probabilities of the K ids. The K logits are gathered from a chunk of
raw logits before a backend reads it, and are transformed here. A loss of the log-probabilities,
with coefficients g_k = d loss / d log p_k, has::

    d loss / d z_k = g_k - p_k G      d loss / d z_v = -p_v G, v not among the K      G = sum_k g_k

With p the student's and q the teacher's probabilities of the K ids, and p_r = 1 - sum_k p_k and q_r
= 1 - sum_k q_k the probabilities of all other ids, the tail, the divergences are::

                           D
    forward                sum_k q_k log(q_k / p_k)                          Q = sum_k q_k
    forward with a tail    sum_k q_k log(q_k / p_k) + q_r log(q_r / p_r)
    reverse with a tail    sum_k p_k log(p_k / q_k) + p_r log(p_r / q_r)

                           d D / d z_k                      d D / d z_v, v not among the K
    forward                p_k Q - q_k                      -p_v (-Q)
    forward with a tail    p_k - q_k                        -p_v (q_r / p_r - 1)
    reverse with a tail    p_k (log(p_k / q_k) - D)         -p_v (D - log(p_r / q_r))

The factor of -p_v in the right column is one number per row, `DivergenceStats.sum_k`; so is G. A
backend first writes all columns like the gradient of a log-probability with that coefficient, for
an id outside the columns. The formula in the middle column then overwrites the K columns. So no
backend needs a kernel for this. With a tail, D has the terms of `backends.divergence`, which are
never negative. All work on (n, K) numbers is in double precision.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.backends import (
    Chunk,
    Coefficients,
    DivergenceStats,
    LogitTransform,
    RowStats,
)
from grpo_kernels.backends.divergence import forward, reverse
from grpo_kernels.base.checks import check_shape, check_signed_ids, check_tensor

if TYPE_CHECKING:
    from typing_extensions import Self

    from grpo_kernels.engine.ranks import Shard

ENTRY_BYTES = 160  # bytes of temporaries per entry (row, k)


@dataclass(frozen=True)
class TopK:
    """K ids of each row.

    Attributes:
        ids: (n, K) int32, as in `Rows.ids`; the ids of a row differ from each other, except
            in padding.
        padding: (n, K) bool.
        z: (n, K) logits of the ids among a chunk's columns, 0 for other ids; None until they are
            gathered.
    """

    ids: Tensor
    padding: Tensor
    z: Tensor | None = field(default=None, kw_only=True)
    name: str = field(default="topk_ids", kw_only=True)  # of the argument, for errors

    def row_bytes(self) -> int:
        """Bytes of temporary memory per row."""
        return self.ids.shape[1] * ENTRY_BYTES

    def gathered(self, raw: Tensor, transform: LogitTransform) -> Self:
        """This record with the logits z of the ids that are among the columns of `raw` (n, V)."""
        columns, here = self._columns(raw.shape[1])
        z = raw.gather(1, columns)
        bias = None if transform.bias is None else transform.bias[columns]
        replace(transform, bias=bias).apply_(z)
        return replace(self, z=z.masked_fill_(~here, 0.0))

    def _columns(self, width: int) -> tuple[Tensor, Tensor]:
        # the column of each id (n, K), 0 if outside or padding; and True if it is neither
        columns = self.ids.long()
        here = (columns >= 0) & (columns < width) & ~self.padding
        return torch.where(here, columns, 0), here

    def _logps(self, stats: RowStats, shard: Shard | None = None) -> Tensor:
        """Log-probabilities (n, K), -inf at padding; with a `shard`, the ranks sum their logits."""
        assert self.z is not None
        z = self.z if shard is None else shard.sum_(self.z.clone())
        # a backend's maximum may round below the same logit computed by torch
        shifted = (z.double() - stats.max_logit[:, None].double()).clamp(max=0.0)
        logp = shifted - stats.log_sum[:, None].double()
        return logp.masked_fill(self.padding, -torch.inf)

    def write(self, d_z: Tensor, chunk: Chunk, out: Tensor) -> None:
        """Write d loss / d (raw logits) of the ids to their columns of `out` (n, V)."""
        assert self.z is not None
        columns, here = self._columns(chunk.logits.shape[1])
        d_logits = d_z * chunk.transform.slope(self.z)
        _overwrite(out, columns, here, d_logits.to(out.dtype))


@dataclass(frozen=True)
class TopKLogps(TopK):
    """Log-probabilities of K ids, including the row's own id, for a loss that depends on them.

    Attributes:
        index_in_ids: (n, K' + 1) int32, columns in `ids`: of each of the K' ids that the caller
            gave, in the caller's order, with repetitions; and of the row's own id.
    """

    index_in_ids: Tensor

    @staticmethod
    def of(topk_ids: Tensor, row_ids: Tensor, name: str = "topk_ids") -> tuple[TopKLogps, Tensor]:
        """Make the record from ids (n, K'), -1 where padded, and each row's own id (n,).

        Also returns (n, K') bool, True where a given id is padding or repeats an earlier one.
        """
        ids, order, repeats = _sorted(torch.cat([topk_ids, row_ids[:, None]], dim=1))
        columns = torch.arange(ids.shape[1], device=ids.device, dtype=torch.int32)
        first_of_equal = torch.where(repeats, 0, columns).cummax(dim=1).values
        index_in_ids = torch.empty_like(first_of_equal).scatter_(1, order, first_of_equal)
        padding = repeats | (ids == -1)
        callers_padding = torch.empty_like(padding).scatter_(1, order, padding)[:, :-1]
        return TopKLogps(ids, padding, index_in_ids, name=name), callers_padding

    def completed(self, stats: RowStats, shard: Shard | None) -> RowStats:
        """Add to `stats` the log-probabilities of the given ids, (n, K'), -inf at padding."""
        index_in_ids = self.index_in_ids[:, :-1].long()
        logps = self._logps(stats, shard).gather(1, index_in_ids).to(stats.logps.dtype)
        logps = torch.where(stats.logps.isnan()[:, None], torch.nan, logps)
        return replace(stats, topk_logps=logps)

    def slopes(self, stats: RowStats, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
        """d loss / d z (n, K) of the ids, and G (n,)."""
        d_logp, d_entropy, _, d_topk = coefficients
        assert d_logp is not None
        if d_topk is None:
            d_topk = d_logp.new_zeros(len(d_logp), self.index_in_ids.shape[1] - 1)
        upstream = torch.cat([d_topk, d_logp[:, None]], dim=1).double()
        g = torch.zeros_like(upstream).scatter_add_(1, self.index_in_ids.long(), upstream)
        g = g.masked_fill_(self.padding, 0.0)
        logp, total = self._logps(stats), g.sum(dim=1)
        p = logp.exp()
        d_z = g - p * total[:, None]
        if d_entropy is not None:
            slope = torch.where(p > 0.0, p * (logp + stats.entropies[:, None]), 0.0)
            d_z -= d_entropy[:, None] * slope
        return d_z, total.to(d_logp.dtype)


@dataclass(frozen=True)
class TopKTeacher(TopK):
    """A teacher's log-probabilities of K ids of each row, and the divergence from it.

    Attributes:
        logps: (n, K) in double precision, -inf at padding, NaN in rows whose results must be NaN.
        reverse: True for KL(student || teacher), False for KL(teacher || student).
        least_tail: lower bound of the tail's probability, if the tail counts as one more outcome.
            None: the tail is left out.
        log_prob_min_clamp: lower bound that both log-probabilities are clamped to, only for the
            forward divergence without a tail; None: no bound.
        loss_max_clamp: bound that |D| is clamped to; D has no gradient there. None: no bound.
    """

    logps: Tensor
    reverse: bool
    least_tail: float | None = None
    log_prob_min_clamp: float | None = None
    loss_max_clamp: float | None = None

    @staticmethod
    def of(teacher_ids: Tensor, logps: Tensor, measure: dict[str, Any]) -> TopKTeacher:
        """Make the record from ids (n, K), -1 where padded, and their log-probabilities.

        `measure` holds the other fields. Padding and repeated ids get the log-probability -inf.
        """
        logps = logps.double()
        # an entry of -inf counts as padding, so that it does not hide a later entry of the same id
        ids, order, repeats = _sorted(torch.where(logps == -torch.inf, -1, teacher_ids))
        padding = repeats | (ids == -1)
        logps = logps.gather(1, order).masked_fill(padding, -torch.inf)
        return TopKTeacher(ids, padding, logps, **measure, name="teacher_ids")

    def completed(self, stats: RowStats, shard: Shard | None) -> RowStats:
        """Add to the student's `stats` the divergence, and student_mass = sum_k p_k."""
        dtype, logq = stats.logps.dtype, self.logps
        logp = self._logps(stats, shard)
        if self.least_tail is None:
            logp_clamped, logq, q = self._clamped(logp)
            terms = torch.where(logq == -torch.inf, 0.0, logq.exp() * (logq - logp_clamped))
            value, sum_k = terms.sum(dim=1), -q.sum(dim=1)
        else:
            value, sum_k = _with_tail(logp, logq, self.least_tail, self.reverse)
        if self.loss_max_clamp is not None:
            bound = self.loss_max_clamp
            sum_k = torch.where(value.abs() >= bound, 0.0, sum_k)
            value = value.clamp(min=-bound, max=bound)
        divergence = DivergenceStats(value.to(dtype), sum_k.to(dtype))
        mass = logp.exp().sum(dim=1).to(dtype)
        return replace(stats, divergence=divergence, extras={"student_mass": mass})

    def slopes(self, stats: RowStats, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
        """d loss / d z (n, K) of the ids, and what G is in the gradient of a log-probability.

        The divergence's coefficient is the only one.
        """
        d_divergence = coefficients.d_divergence
        assert stats.divergence is not None and d_divergence is not None
        assert coefficients.d_entropy is None
        logp = self._logps(stats)
        p, value = logp.exp(), stats.divergence.value[:, None]
        if self.reverse:
            d_z = torch.where(p > 0.0, p * (logp - self.logps - value), p)
        elif self.least_tail is not None:
            d_z = p - self.logps.exp()
        else:
            d_z = -stats.divergence.sum_k[:, None] * p - self._clamped(logp)[2]
        if self.loss_max_clamp is not None:
            d_z = torch.where(value.abs() >= self.loss_max_clamp, 0.0, d_z)
        return d_z * d_divergence[:, None], d_divergence * stats.divergence.sum_k

    def _clamped(self, logp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # both log-probabilities, clamped except at padding; and q, 0 where the student's is clamped
        least, logq = self.log_prob_min_clamp, self.logps
        if least is None:
            return logp, logq, logq.exp()
        logq = torch.where(logq == -torch.inf, logq, logq.clamp(min=least))
        return logp.clamp(min=least), logq, torch.where(logp < least, 0.0, logq.exp())


def check_topk(name: str, ids: Any, hidden: Tensor, logps: Any = None) -> None:
    """Check ids (..., K), and their log-probabilities if given, against hidden states (..., H).

    `name` is the argument of the ids, ``*_ids``; errors call the log-probabilities ``*_logps``.
    """
    check_signed_ids(name, ids, hidden)
    shape = (*hidden.shape[:-1], max(1, ids.shape[-1] if ids.dim() else 0))
    check_shape(name, ids, ("(*hidden.shape[:-1], K), K > 0", shape))
    if logps is not None:
        logps_name = name.replace("_ids", "_logps")
        check_tensor(logps_name, logps, (f"{name}.shape", shape), like=hidden, floating=True)


def _sorted(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's sorted ids, their order, and a mask of ids that repeat the one before."""
    ids, order = ids.clamp(-2, 2**31 - 1).int().sort(dim=1, stable=True)
    repeats = torch.zeros_like(ids, dtype=torch.bool)
    repeats[:, 1:] = ids[:, 1:] == ids[:, :-1]
    return ids, order, repeats


def _with_tail(logp: Tensor, logq: Tensor, least: float, reversed_: bool) -> tuple[Tensor, Tensor]:
    """D (n,) over K + 1 outcomes, and its sum_k, from log-probabilities (n, K)."""
    p_tail, q_tail = _tail(logp).clamp(min=least), _tail(logq).clamp(min=least)
    d_tail = p_tail.log() - q_tail.log()
    d = torch.where(logq == -torch.inf, 0.0, logp - logq)
    lead = torch.maximum(logp, logq).exp()
    d = torch.cat([d, d_tail[:, None]], dim=1)
    lead = torch.cat([lead, torch.maximum(p_tail, q_tail)[:, None]], dim=1)
    terms, _ = reverse(d, lead, 1.0) if reversed_ else forward(d, lead, 0.0)
    value = terms.sum(dim=1)
    return value, value - d_tail if reversed_ else torch.expm1(-d_tail)


def _tail(logps: Tensor) -> Tensor:
    # 1 - sum exp(logps) of each row: expm1 subtracts the largest first, without cancellation
    largest, place = logps.max(dim=1, keepdim=True)
    rest = logps.exp().scatter(1, place, 0.0).sum(dim=1)
    return -torch.expm1(largest[:, 0]) - rest


def _overwrite(out: Tensor, columns: Tensor, here: Tensor, values: Tensor) -> None:
    """Write ``out[i, columns[i, k]] = values[i, k]`` where `here`; the columns of a row differ.

    All other entries of a row repeat its first entry that is `here`, so no two writes conflict. In
    a row without one, they write back the value of column 0.
    """
    first = here.to(torch.uint8).argmax(dim=1, keepdim=True)
    kept = torch.where(here.any(dim=1, keepdim=True), values.gather(1, first), out[:, :1])
    index = torch.where(here, columns, columns.gather(1, first))
    out.scatter_(1, index, torch.where(here, values, kept))
