"""Interface between engines and row backends: the seam between matrix products and row work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from grpo_kernels.base.checks import warn_once
from grpo_kernels.base.choices import Extra, choices
from grpo_kernels.token_loss.record import TokenLoss

STATISTICS = choices(Extra)


class Backend(Protocol):
    """A row backend before it is loaded: where it serves, and why not elsewhere.

    The backend that `BackendName` calls x is `BACKEND` in the module ``backends.x_rows``. Importing
    the module compiles nothing, and imports no package that may be missing.
    """

    def prefers(self, device: torch.device) -> bool:
        """Return True if "auto" takes this backend for tensors on `device`, unless it refuses."""
        ...

    def reason(self, device: torch.device) -> str:
        """Return the reason why "auto" takes it, in words."""
        ...

    def refusal(self, device: torch.device, dtype: torch.dtype, *, asked_for: bool) -> str | None:
        """Return why this backend cannot serve these logits here, in words; None if it can.

        Unless it was `asked_for` by name, warn of a reason that the user can remove
        (`warn_of_torch`).
        """
        ...

    def load(self) -> RowBackend:
        """Return the row work; called only where there is no `refusal`."""
        ...


def warn_of_torch(place: str, better: str, refusal: str) -> None:
    """Warn, once, that torch does the row work on the `place`, slower than in `better`, and why."""
    warn_once(
        f"on the {place}, losses and log-probabilities run in torch operations, slower than in "
        f'{better} (backend="torch" asks for this without a warning): {refusal}',
        RuntimeWarning,
    )


@dataclass(frozen=True)
class LogitTransform:
    """``z = softcap(scale * round(x + bias)) / temperature`` of the raw projection x.

    ``softcap(x) = cap * tanh(x / cap)``.
    """

    scale: float = 1.0
    softcap: float | None = None
    inv_temperature: float | Tensor = 1.0  # a number, or (n, 1): one per row
    bias: Tensor | None = None  # (V,), contiguous, in the accumulator's dtype
    rounded_to: torch.dtype | None = None  # a 16-bit dtype that x + bias is rounded to

    def factors(self) -> tuple[float, float]:
        """Return (inner, outer), the factors that all rows share, without temperatures per row.

        ``z = x * inner`` with inner = scale / T; with a soft-cap ``z = tanh(x * inner) * outer``,
        inner = scale / cap and outer = cap / T. A temperature per row divides outer with a
        soft-cap, else inner. In double, as in torch.
        """
        shared = 1.0 if isinstance(self.inv_temperature, Tensor) else self.inv_temperature
        if self.softcap is None:
            return float(self.scale * shared), 1.0
        return float(self.scale / self.softcap), float(self.softcap * shared)


@dataclass(frozen=True)
class Chunk:
    """Some rows of the logits, as a backend reads them.

    Attributes:
        logits: fp32 (fp64 for fp64 inputs), the rows contiguous, as `RowBackend.prepare_` left
            them; n is at least 16.
        ids: int64 in [0, V), each row's target; `fused` and `grad` define the meaning of other ids.
        transform: from the raw projection to the scaled logits z.
        first_id: the id of the first column, if the columns are a slice of the vocabulary: only
            `grad` supports that.
        teacher: the logits of another head for the same rows, if a divergence from them is wanted.
    """

    logits: Tensor  # (n, V)
    ids: Tensor  # (n,)
    transform: LogitTransform
    first_id: int = 0
    teacher: Teacher | None = None

    def of_teacher(self) -> Chunk:
        """Return the teacher's logits as a chunk of their own, for `stats`."""
        assert self.teacher is not None
        return Chunk(self.teacher.logits, torch.zeros_like(self.ids), self.teacher.transform)


@dataclass(frozen=True)
class Teacher:
    """The other distribution of a chunk's rows, and the divergence (`backends.divergence`).

    Attributes:
        logits: in the shape and dtype of the chunk's; never written.
        jsd_beta: 0 for KL(teacher || student), 1 for KL(student || teacher), between them
            Jensen-Shannon divergences.
    """

    logits: Tensor  # (n, V)
    transform: LogitTransform
    jsd_beta: float


@dataclass(frozen=True)
class RowStats:
    """Per-row results over the scaled logits z (n, V): (n,) each, in the accumulator's dtype."""

    logps: Tensor  # log softmax(z)[id]
    max_logit: Tensor  # max_j z_j
    log_sum: Tensor  # log sum_j exp(z_j - max_logit)
    entropies: Tensor | None = None  # -sum_j p_j log p_j
    extras: dict[str, Tensor] = field(default_factory=dict)  # by names of STATISTICS
    terms: dict[str, Tensor] = field(default_factory=dict)  # a fused loss's, see `TokenLoss`
    divergence: DivergenceStats | None = None  # of rows that have a teacher

    @staticmethod
    def concatenate(
        chunks: list[RowStats],
        like: Tensor,
        dtype: torch.dtype,
        *,
        entropy: bool,
        extras: tuple[str, ...],
        terms: tuple[str, ...] = (),
        divergence: bool = False,
    ) -> RowStats:
        """Concatenate the statistics of `chunks`; without any, those of no rows, like `like`."""
        if not chunks:
            none, flags = like.new_empty(0, dtype=dtype), like.new_empty(0, dtype=torch.bool)
            empty = {name: flags if name == "is_top1" else none for name in extras}
            diverged = DivergenceStats(none, none, none, none) if divergence else None
            return RowStats(
                none,
                none,
                none,
                none if entropy else None,
                empty,
                dict.fromkeys(terms, none),
                diverged,
            )
        if len(chunks) == 1:
            return chunks[0]
        return RowStats(
            torch.cat([chunk.logps for chunk in chunks]),
            torch.cat([chunk.max_logit for chunk in chunks]),
            torch.cat([chunk.log_sum for chunk in chunks]),
            torch.cat([chunk.entropies for chunk in chunks if chunk.entropies is not None])
            if entropy
            else None,
            {name: torch.cat([chunk.extras[name] for chunk in chunks]) for name in extras},
            {name: torch.cat([chunk.terms[name] for chunk in chunks]) for name in terms},
            DivergenceStats.concatenate(
                [chunk.divergence for chunk in chunks if chunk.divergence is not None]
            ),
        )


class DivergenceStats(NamedTuple):
    """Per-row results over the logits of both heads, (n,) each."""

    value: Tensor  # D >= 0
    sum_k: Tensor  # sum of k over the vocabulary; `grad` takes p times it off k
    max_logit: Tensor  # the teacher's
    log_sum: Tensor  # the teacher's

    @staticmethod
    def concatenate(parts: list[DivergenceStats]) -> DivergenceStats | None:
        """Concatenate the statistics of `parts`; return None if there are none."""
        return DivergenceStats(*map(torch.cat, zip(*parts, strict=True))) if parts else None


class RowBackend(Protocol):
    """Row work on a chunk of logits."""

    name: str

    def scratch_rows(self, n: int, vocab: int, *, teacher: bool = False) -> int:
        """Return the temporary memory that a chunk of `n` rows needs, in rows of logits."""
        ...

    def prepare_(self, logits: Tensor, transform: LogitTransform) -> None:
        """Turn the raw projection into the form that the other methods read, in place."""
        ...

    def stats(self, chunk: Chunk, *, entropy: bool, extras: tuple[str, ...] = ()) -> RowStats:
        """Reduce each row."""
        ...

    def diverge(self, chunk: Chunk, stats: RowStats, teacher: RowStats) -> tuple[Tensor, Tensor]:
        """`DivergenceStats.value` and ``.sum_k`` (n,) of a chunk with a teacher.

        The statistics may be those of a whole vocabulary that the columns are a part of: the parts'
        results add up.
        """
        ...

    def grad(
        self,
        chunk: Chunk,
        stats: RowStats,
        d_logp: Tensor,
        d_entropy: Tensor | None,
        out: Tensor,
        d_divergence: Tensor | None = None,
    ) -> None:
        """``out = d loss / d (raw projection)``, from derivatives in a row's three numbers (n,).

        `out` (n, V) may be the logits themselves, or another tensor, also of 16 bits; the logits
        may be overwritten either way. A row whose id is none of the columns has no target. Without
        `d_divergence` a teacher is ignored.
        """
        ...

    def scale(self, x: Tensor, factor: Tensor, out: Tensor) -> None:
        """``out = x * factor``, rounded once: a gradient of any shape, times () or (m, 1).

        `x` is in the accumulator's dtype. `out` has its shape, and may be `x`, or be of 16 bits.
        """
        ...


@runtime_checkable
class FusedRowBackend(RowBackend, Protocol):
    """Backend that also computes a whole `TokenLoss`, between a row's statistics and gradient."""

    fuses_teacher: bool  # True if `fused` takes chunks with a teacher

    def fused(self, chunk: Chunk, token_loss: TokenLoss, out: Tensor | None) -> RowStats:
        """Do `stats`, compute the loss of each row as `terms`, and do `grad` if `out` is given.

        For a chunk with a teacher `TokenLoss.kl` is ``"full"``: the divergence is computed, too. An
        id of -1 is invalid: the row's log-probability, loss and d_logp are NaN.
        """
        ...
