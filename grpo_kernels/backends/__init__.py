"""Row backends: their interface, and the choice among them.

A backend does the work on each row of a chunk of logits, between the matrix products. It computes
no matrix product, and except in ``fused`` it knows the loss only by each row's coefficients. An
engine makes these calls on a chunk, in this order::

    prepare_(logits, transform)             raw logits -> the form that the backend reads
    stats(chunk, ...)    -> RowStats        log-probability, entropy, the numbers `grad` needs
    diverge(chunk, stats, reference_stats)  the divergence from a second head, if there is one
    grad(chunk, stats, coefficients, out)   out = d loss / d raw logits

If a `FusedLoss` describes the loss and the backend can fuse it, one call of ``fused`` replaces all
but ``prepare_``. `torch_rows.TorchRows` runs anywhere and is the oracle for every other backend;
`triton_rows.rows.TritonRows` runs on a GPU, `cpp_rows.CppRows` on a CPU.

The module ``x_rows`` holds the backend that `BackendName` calls x. Importing it compiles nothing,
and imports no package that may be missing. It has two functions::

    refusal(device, dtype, asked_for=...)   why it cannot serve these logits, in words, or None;
                                            unless requested by name, it also warns of a reason that
                                            the user can remove (`warn_of_torch`)
    load()               -> RowBackend      called only if there is no refusal
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from types import ModuleType
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from grpo_kernels.base import BackendName
from grpo_kernels.base.checks import check_choice, warn_once

BACKENDS = get_args(BackendName)  # valid values of `backend=`
# statistics that only a fused kernel computes: those of the loss
LOSS_STATS = ("loss", "d_logp", "log_ratio", "kl")
ROUNDED_ROWS = 16  # rows at a time when torch rounds logits


def statistic_dtype(name: str, accumulator: torch.dtype) -> torch.dtype:
    """Dtype of a statistic of `RowStats`, or of `EXTRAS`."""
    return torch.bool if name == "is_top1" else accumulator


@dataclass(frozen=True)
class LogitTransform:
    """``z = softcap(scale * round(x + bias)) / temperature``: from raw to scaled logits.

    ``softcap(x) = cap * tanh(x / cap)``. The raw logits x are the products of a head
    (`head.HeadTensors`).
    """

    scale: float = 1.0
    softcap: float | None = None
    inv_temperature: float | Tensor = 1.0  # a number, or (n, 1): one per row
    bias: Tensor | None = None  # (V,), contiguous, in the accumulator's dtype
    rounded_to: torch.dtype | None = None  # a 16-bit dtype that x + bias is rounded to

    def inner_outer(self) -> tuple[float, float]:
        """The factors (inner, outer) that all rows share, without per-row temperatures.

        ``z = x * inner`` with inner = scale / T; with a soft-cap ``z = tanh(x * inner) * outer``,
        inner = scale / cap and outer = cap / T. A per-row temperature divides outer if there is a
        soft-cap, else inner. Computed in double, as in torch.
        """
        shared = 1.0 if isinstance(self.inv_temperature, Tensor) else self.inv_temperature
        if self.softcap is None:
            return float(self.scale * shared), 1.0
        return float(self.scale / self.softcap), float(self.softcap * shared)

    def apply_(self, x: Tensor) -> None:
        """Turn raw logits (n, K) into scaled logits, in place."""
        cap, inv_t = self.softcap, self.inv_temperature
        if self.bias is not None:
            x.add_(self.bias)
        if self.rounded_to is not None:
            for block in x.split(ROUNDED_ROWS):
                block.copy_(block.to(self.rounded_to))
        factor = self.scale * (inv_t if cap is None else 1.0 / cap)
        if isinstance(factor, Tensor) or factor != 1.0:
            x.mul_(factor)
        if cap is not None:
            x.tanh_().mul_(cap * inv_t)

    def slope(self, z: Tensor) -> Tensor | float:
        """d z / d (raw logits) of scaled logits z (n, K)."""
        inv_t, cap = self.inv_temperature, self.softcap
        factor = self.scale * inv_t
        return factor if cap is None else factor * (1.0 - (z / (cap * inv_t)).square())


@dataclass(frozen=True)
class Chunk:
    """Some rows of the logits, as a backend reads them.

    Attributes:
        logits: fp32 (fp64 for fp64 inputs), contiguous rows, as `RowBackend.prepare_` left them:
            scaled logits on the torch backend, raw logits on the others. n is at least 16, except
            over kept sets.
        ids: int64 in [0, V), each row's target; `fused` and `grad` define the meaning of other ids.
        transform: from the raw logits to the scaled logits z.
        reference: the logits of another head for the same rows, if the loss needs a divergence from
            it (`backends.divergence`); never written.
        jsd_beta: 0 for KL(reference || student), 1 for KL(student || reference); values between
            give Jensen-Shannon divergences.
    """

    logits: Tensor  # (n, V)
    ids: Tensor  # (n,)
    transform: LogitTransform
    reference: Chunk | None = None
    jsd_beta: float = 1.0


@dataclass(frozen=True)
class RowStats:
    """Per-row results over the scaled logits z (n, V): (n,) each, in the accumulator's dtype."""

    logps: Tensor  # log softmax(z)[id]
    max_logit: Tensor  # max_j z_j
    log_sum: Tensor  # log sum_j exp(z_j - max_logit)
    entropies: Any = None  # -sum_j p_j log p_j; None unless asked for
    # without gradient, by name: of `EXTRAS`, or of `engine.topk` the student_mass
    extras: dict[str, Tensor] = field(default_factory=dict)
    loss_stats: dict[str, Tensor] = field(default_factory=dict)  # of `fused`, see `FusedLoss`
    divergence: DivergenceStats | None = None  # from a second head, or from a teacher's K ids
    topk_logps: Tensor | None = None  # of `engine.topk`: log-probabilities (n, K) of K more ids

    def for_gradient(self) -> RowStats:
        """The statistics that `RowBackend.grad` reads."""
        return replace(self, extras={}, loss_stats={}, topk_logps=None)

    @staticmethod
    def concatenate(chunks: list[RowStats]) -> RowStats:
        """Concatenate the statistics of at least one chunk."""
        if len(chunks) == 1:
            return chunks[0]
        return RowStats(*(_joined([getattr(x, f.name) for x in chunks]) for f in fields(RowStats)))


class DivergenceStats(NamedTuple):
    """Per-row results over the logits of both heads, (n,) each."""

    value: Tensor  # D >= 0
    sum_k: Tensor  # sum of k over the vocabulary; `grad` subtracts p times it from k
    # of the second head; None if a teacher gave only K ids (`engine.topk`)
    reference_max_logit: Any = None
    reference_log_sum: Any = None


def _joined(parts: list[Any] | tuple[Any, ...]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], dict):
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}
    return parts[0] and DivergenceStats(*map(_joined, zip(*parts, strict=True)))


class Coefficients(NamedTuple):
    """Gradient of a loss with respect to each row's numbers; None means 0.

    Each is (n,), except `d_topk`. The docs call the first three a, b and c.
    """

    d_logp: Tensor | None = None  # d loss / d log-probability
    d_entropy: Tensor | None = None  # d loss / d entropy
    # d loss / d divergence from a reference model or a teacher
    d_divergence: Tensor | None = None
    # d loss / d log-probability of K more ids, (n, K)
    d_topk: Tensor | None = None

    def put(self, index: Tensor, into: dict[str, Tensor], n: int) -> None:
        """Write each coefficient to rows `index` of its tensor (n, ...) in `into`, at first 0."""
        for name, x in self._asdict().items():
            if x is not None:
                if name not in into:
                    into[name] = x.new_zeros(n, *x.shape[1:])
                into[name][index] = x


@dataclass(frozen=True)
class FusedLoss:
    """A built-in loss as numbers per token and a few constants, for backends that fuse it.

    No token's loss depends on another token. Tensors are (n,), in the accumulator's dtype. With R =
    logp - old (0 on-policy), w the weight, gate the sampling ratio (an on-policy mask is in
    `d_policy`), and ``surrogate`` and ``kl_estimator`` from `formulas`::

        loss_t    = w * gate * surrogate(R, A, logp) + beta * w * kl [* exp(R)]
        d_logp_t  = d loss_t / d logp_t
        d_entropy = d loss / d entropy_t, the same for every token

    A loss whose tokens share R can only be fused on-policy. There R is 0, and the policy term's
    derivative, `d_policy`, is known beforehand, whatever the surrogate. Its loss is known too, and
    left out, or it is ``d_policy * logp`` (`is_linear`). On-policy, the loss is NaN where the log-
    probability is not finite. Where the log-probability is NaN, as with an id of -1, loss and
    d_logp are NaN too.

    `PolicyLoss.fused_loss` makes the record, which knows no vocabulary. The kernels know no loss
    type, config or sequence.
    """

    weights: Tensor
    # one of `formulas.ESTIMATORS`, or "full" with a second head; None without a KL term
    kl_estimator: str | None = None
    corrects_kl: bool = False  # the estimate is multiplied by exp(R)
    ref: Tensor | None = None  # only for an estimate
    beta: float = 0.0
    d_entropy: float = 0.0  # d loss / d entropy
    # on-policy
    d_policy: Tensor | None = None  # the policy term's derivative, including weight and gate
    is_linear: bool = False  # the policy term is d_policy * logp
    # otherwise
    surrogate: str | None = None  # one of `formulas.SURROGATES`
    constants: tuple[float, ...] = ()  # of the surrogate, in the order of its arguments
    advantages: Tensor | None = None  # A
    old: Tensor | None = None
    gate: Tensor | None = None  # None: 1

    @property
    def stat_names(self) -> tuple[str, ...]:
        """The `LOSS_STATS` that this loss has."""
        return LOSS_STATS if self.kl_estimator is not None else LOSS_STATS[:-1]


class RowBackend(ABC):
    """Row work on a chunk of logits."""

    name: str

    def scratch_rows(self, n: int, vocab: int, *, reference: bool = False) -> int:
        """Temporary memory that a chunk of `n` rows needs, in rows of logits."""
        return 0

    def prepare_(self, logits: Tensor, transform: LogitTransform) -> None:
        """Turn the raw logits into the form that the other methods read, in place.

        A backend that reads raw logits does nothing.
        """
        return None

    @abstractmethod
    def stats(self, chunk: Chunk, *, entropy: bool, extras: tuple[str, ...] = ()) -> RowStats:
        """Compute each row's statistics: the log-probability of its id, and what `grad` reads.

        Args:
            entropy: compute `RowStats.entropies` too.
            extras: names from `EXTRAS` of further statistics.
        """
        ...

    @abstractmethod
    def diverge(
        self, chunk: Chunk, stats: RowStats, reference_stats: RowStats
    ) -> tuple[Tensor, Tensor]:
        """Compute `DivergenceStats.value` and ``.sum_k`` (n,) of a chunk with a reference.

        If the columns are only a part of the vocabulary, pass the statistics of the whole
        vocabulary; the results of the parts add up.
        """
        ...

    @abstractmethod
    def grad(self, chunk: Chunk, stats: RowStats, coefficients: Coefficients, out: Tensor) -> None:
        """``out = d loss / d (raw logits)``, from a row's coefficients.

        d_logp is not None; d_topk is not read (`engine.topk` adds its part).

        `out` (n, V) may be the logits themselves or another tensor, including a 16-bit one; the
        backend may overwrite the logits in either case. A row has no target if its id is not among
        the columns. Without `d_divergence`, the backend ignores a reference.
        """
        ...

    def scale(self, x: Tensor, factor: Tensor, out: Tensor) -> None:
        """``out = x * factor``, rounded once: a gradient of any shape, times () or (m, 1).

        `x` is in the accumulator's dtype. `out` has the shape of `x`; it may be `x` itself or a
        16-bit tensor.
        """
        torch.mul(x, factor, out=out)


class FusedRowBackend(RowBackend):
    """Backend that can also compute a whole `FusedLoss` with the statistics and the gradient."""

    fuses_reference: bool  # True if `fused` takes chunks with a reference

    @abstractmethod
    def fused(self, chunk: Chunk, fused_loss: FusedLoss, out: Tensor | None) -> RowStats:
        """Compute each row's statistics and loss and, if `out` is given, write the gradient to it.

        The call does the work of `stats`, fills `RowStats.loss_stats`, and then does the work of
        `grad`. For a chunk with a reference, `FusedLoss.kl_estimator` is ``"full"``: the call
        computes the divergence too. An id outside [0, V) is invalid: the row's log-probability,
        loss and d_logp are NaN.
        """
        ...


def choose_backend(
    name: str, device: torch.device, dtype: torch.dtype = torch.float32
) -> RowBackend:
    """Choose the row backend for logits of `dtype` on `device`.

    The first choice of the C++ kernels in a process may compile them.

    Args:
        name: one of `BACKENDS`.

    Raises:
        ValueError: no backend has that name, or the named backend cannot serve here.
    """
    check_choice("backend", name, BACKENDS)
    if name == "auto":
        name = "torch" if why_torch(device, dtype) else _preferred(device)
    elif refusal := _module(name).refusal(device, dtype, asked_for=True):
        raise ValueError(f"backend: expected one that can serve here, got {name!r}: {refusal}")
    backend: RowBackend = _module(name).load()
    return backend


def why_torch(device: torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """Say in words why "auto" chooses torch here; None if it does not."""
    refusal = _module(_preferred(device)).refusal(device, dtype, asked_for=False)
    return None if refusal is None else f"not {_preferred(device)}: {refusal}"


def _preferred(device: torch.device) -> str:
    return "cpp" if device.type == "cpu" else "triton"


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}_rows")


def warn_of_torch(place: str, better: str, refusal: str) -> None:
    """Warn once that torch does the row work on the `place`, slower than `better`, and why."""
    warn_once(
        f"on the {place}, losses and log-probabilities run in torch operations, slower than in "
        f'{better} (backend="torch" asks for this without a warning): {refusal}',
        RuntimeWarning,
    )
