"""The float64 result that every provider is held against before it is timed.

The loss, all log-probabilities and entropies; of the gradients some rows of d hidden and some of d weight, which need a
part of the products only. With z = softcap(x), x = h @ W.T, p = softmax(z), a = d loss / d logp and y the target::

    d x_tj = a_t (1[j = y_t] - p_tj) dz_tj / dx_tj     d hidden = d x @ W     d weight = d x^T @ h

and of a divergence from a teacher the same of its own d z, by the textbook's formulas, which float64 can afford.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases import EPSILON, SEED, BenchCase, Inputs, capped, counted_mean, policy_loss
from benchmarks.providers import Outcome

SLICE = 8192  # of the vocabulary at a time
SAMPLE = 64
# What counts as the same result, for a peer that rounds logits and gradients to 16 bits: wrong formulas are far beyond.
LIMITS = {
    "loss": 0.02, "logp_mean": 0.05, "logp_max": 1.0, "entropy_mean": 0.1, "divergence": 0.05, "d_hidden": 0.05,
    "d_weight": 0.05,
}  # fmt: skip
# A rounded logp puts some ratios on the other side of the clip, and some entropies on the other side of a quantile.
CHOSEN_LIMITS = {**LIMITS, "d_hidden": 0.4, "d_weight": 0.4}
EXACT_LIMITS = {**dict.fromkeys(LIMITS, 1e-4), "logp_max": 1e-3}  # of float32
CHOSEN_EXACT_LIMITS = {**EXACT_LIMITS, "d_hidden": 0.1, "d_weight": 0.1}


@dataclass(frozen=True)
class Reference:
    """Float64 results of one case."""

    logps: Tensor  # (N,)
    entropies: Tensor  # (N,)
    loss: Tensor  # ()
    rows: Tensor  # (r,) which of the hidden states
    d_hidden: Tensor  # (r, H)
    tokens: Tensor  # (k,) which rows of the weight
    d_weight: Tensor  # (k, H)
    divergences: Tensor | None = None  # (N,), where there is a teacher


@dataclass(frozen=True)
class _Head:
    """Hidden states (N, H) in float64, and the weight (V, H)."""

    hidden: Tensor
    weight: Tensor
    softcap: float | None

    def logits(self, at: Tensor | slice, columns: Tensor) -> Tensor:
        """Of some rows, at some columns of the vocabulary."""
        return capped(self.hidden[at] @ self.weight[columns].double().t(), self.softcap)

    def statistics(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(log sum exp of each row's logits, the log-probability of its token, entropy), (N,) each."""
        top = torch.full_like(self.hidden[:, 0], -torch.inf)
        total, weighted, target = torch.zeros_like(top), torch.zeros_like(top), torch.zeros_like(top)
        for columns in self.slices():
            z = self.logits(slice(None), columns)
            new_top = torch.maximum(top, z.amax(dim=1))
            e, scale = torch.exp(z - new_top[:, None]), torch.exp(top - new_top)
            total, weighted = total * scale + e.sum(dim=1), weighted * scale + (e * z).sum(dim=1)
            target += (z * (ids[:, None] == columns)).sum(dim=1)
            top = new_top
        lse = top + total.log()
        return lse, target - lse, lse - weighted / total

    def slices(self) -> tuple[Tensor, ...]:
        """All columns, so many at a time that their logits and the weight's rows fit."""
        return torch.arange(len(self.weight), device=self.weight.device).split(SLICE)


def reference(inputs: Inputs) -> Reference:
    """Float64 results from the inputs as they are, rounded to bf16."""
    case, ids, counted = inputs.case, inputs.ids.reshape(-1), inputs.mask.reshape(-1).double()
    student = _Head(inputs.hidden.detach().reshape(-1, case.h).double(), inputs.weight.detach(), case.softcap)
    lse, logps, entropies = student.statistics(ids)
    divergences = None
    if inputs.teacher is None:
        leaf = logps.clone().requires_grad_()
        loss = policy_loss(inputs, leaf.view(inputs.ids.shape), entropies.view(inputs.ids.shape))
        (a,) = torch.autograd.grad(loss, leaf)

        def d_logits(z: Tensor, at: Tensor | slice, columns: Tensor) -> Tensor:
            return a[at, None] * ((ids[at, None] == columns).double() - torch.exp(z - lse[at, None]))

    else:
        assert case.divergence is not None
        beta, of_teacher = case.divergence, inputs.teacher
        teacher = _Head(of_teacher.hidden.reshape(len(ids), -1).double(), of_teacher.weight, case.softcap)
        teacher_lse, *_ = teacher.statistics(ids)

        def terms(z: Tensor, at: Tensor | slice, columns: Tensor) -> tuple[Tensor, Tensor]:
            log_q = teacher.logits(at, columns) - teacher_lse[at, None]
            return divergence_terms(z - lse[at, None], log_q, beta)

        divergences, slopes = torch.zeros_like(lse), torch.zeros_like(lse)
        for columns in student.slices():
            value, slope = terms(student.logits(slice(None), columns), slice(None), columns)
            divergences, slopes = divergences + value.sum(dim=1), slopes + slope.sum(dim=1)
        loss, a = counted_mean(divergences.view(inputs.ids.shape), inputs), counted / counted.sum().clamp(min=1.0)

        def d_logits(z: Tensor, at: Tensor | slice, columns: Tensor) -> Tensor:
            _, slope = terms(z, at, columns)
            return a[at, None] * (slope - torch.exp(z - lse[at, None]) * slopes[at, None])

    def d_raw(at: Tensor | slice, columns: Tensor) -> Tensor:
        """d loss / d x of some rows, at some columns."""
        z = student.logits(at, columns)
        d = d_logits(z, at, columns)
        return d if case.softcap is None else d * (1 - (z / case.softcap) ** 2)

    rows, tokens = _sampled(ids, case.v)
    d_hidden = sum(d_raw(rows, columns) @ student.weight[columns].double() for columns in student.slices())
    assert isinstance(d_hidden, Tensor)
    d_weight = d_raw(slice(None), tokens).t() @ student.hidden
    return Reference(logps, entropies, loss.detach(), rows, d_hidden, tokens, d_weight, divergences)


def divergence_terms(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Of log-probabilities (n, V): terms whose sum over V is the divergence; terms k (n, V) of its gradient in the
    student's logits, which is k - p sum(k).
    """
    p, q = log_p.exp(), log_q.exp()
    if beta == 0.0:
        return q * (log_q - log_p), -q
    log_m = log_q if beta == 1.0 else torch.logaddexp(log_p + math.log(1.0 - beta), log_q + math.log(beta))
    k = p * (log_p - log_m)
    return (k, k) if beta == 1.0 else ((1.0 - beta) * k + beta * q * (log_q - log_m), (1.0 - beta) * k)


def errors(outcome: Outcome, inputs: Inputs, want: Reference) -> dict[str, float]:
    """How far a step's results are off, on the tokens that count: absolute for loss, log-probabilities and entropies,
    relative in norm for divergences and gradients; ``ratio_off``, the share of ratios to the true policy that are off
    by more than 1 %; ``clip_differs``, the share of tokens that are clipped and should not be, or the other way round.
    """
    found: dict[str, float] = {}
    counted = inputs.mask.reshape(-1).bool()
    if outcome.loss is not None:
        found["loss"] = float((outcome.loss.detach().double() - want.loss).abs())
    if outcome.divergences is not None and want.divergences is not None:
        found["divergence"] = _relative(outcome.divergences.detach().reshape(-1)[counted], want.divergences[counted])
    if outcome.logps is not None:
        signed = (outcome.logps.detach().double().reshape(-1) - want.logps)[counted]
        found["logp_mean"], found["logp_max"] = float(signed.abs().mean()), float(signed.abs().max())
        found["ratio_off"] = float((torch.expm1(signed).abs() > 0.01).double().mean())
        if inputs.old is not None:
            drift = (want.logps - inputs.old.double().reshape(-1))[counted]
            found["clip_differs"] = float((_is_clipped(drift + signed) != _is_clipped(drift)).double().mean())
    if outcome.entropies is not None:
        off = (outcome.entropies.detach().double().reshape(-1) - want.entropies).abs()[counted]
        found["entropy_mean"], found["entropy_max"] = float(off.mean()), float(off.max())
    if inputs.hidden.requires_grad:
        assert inputs.hidden.grad is not None, "no gradient of the hidden states"
        rows = inputs.hidden.grad.reshape(-1, inputs.case.h)[want.rows]
        found["d_hidden"] = _relative(rows, want.d_hidden)
    if inputs.weight.requires_grad:
        assert inputs.weight.grad is not None, "no gradient of the weight"
        found["d_weight"] = _relative(inputs.weight.grad[want.tokens], want.d_weight)
    return found


def is_right(found: dict[str, float], case: BenchCase) -> bool:
    """Whether the gradients, or log-probabilities, were compared, and all that was is within the limits; NaN is not."""
    rounds = case.dtype != "float32"
    chosen = case.drift > 0 or case.top_entropy < 1
    exact = CHOSEN_EXACT_LIMITS if chosen else EXACT_LIMITS
    limits = (CHOSEN_LIMITS if chosen else LIMITS) if rounds else exact
    scored = {"logp_mean"} if case.divergence is None else {"loss"}
    needed = scored if case.score else {"loss", "d_hidden"} | (set() if case.frozen else {"d_weight"})
    return needed <= found.keys() and all(found[name] <= limits[name] for name in limits if name in found)


def _sampled(ids: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Which rows of the hidden states, and which rows of the weight, have their gradient compared."""
    g = torch.Generator().manual_seed(SEED)
    rows = torch.randperm(len(ids), generator=g)[:SAMPLE].to(ids.device)
    others = torch.randint(vocab, (SAMPLE,), generator=g).to(ids.device)
    return rows, torch.cat([ids[rows], others]).unique()


def _is_clipped(log_ratio: Tensor) -> Tensor:
    ratio = torch.exp(log_ratio)
    return (ratio < 1 - EPSILON) | (ratio > 1 + EPSILON)


def _relative(got: Tensor, want: Tensor) -> float:
    size = want.norm()
    return float((got.double() - want).norm() / torch.where(size > 0, size, 1.0))
