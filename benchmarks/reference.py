"""The float64 result that every provider is held against before it is timed.

The loss, all log-probabilities and entropies; of the gradients some rows of d hidden and some of d weight, which need a
part of the products only. With z = softcap(x), x = h @ W.T, p = softmax(z), a = d loss / d logp and y the target::

    d x_tj = a_t (1[j = y_t] - p_tj) dz_tj / dx_tj     d hidden = d x @ W     d weight = d x^T @ h

and of a divergence from a teacher the same of its own d z, by the textbook's formulas, which float64 can afford.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases import EPSILON, SEED, BenchCase, Inputs, capped, counted_mean, policy_loss
from benchmarks.providers import Outcome

SLICE = 8192  # of the vocabulary at a time
SAMPLE = 64
BLOCK = 64  # rows whose logits of both heads are there at once
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


def reference(inputs: Inputs) -> Reference:
    """Float64 results from the inputs as they are, rounded to bf16."""
    softcap, weight, ids = inputs.case.softcap, inputs.weight.detach(), inputs.ids.reshape(-1)
    hidden = inputs.hidden.detach().reshape(-1, inputs.case.h).double()
    rows, tokens = _sampled(ids, len(weight))
    if inputs.teacher is not None:
        return _of_divergence(inputs, hidden, rows, tokens)
    lse, target, entropies = _row_statistics(hidden, weight, ids, softcap)
    logps = (target - lse).requires_grad_()
    shape = inputs.ids.shape
    loss = policy_loss(inputs, logps.view(shape), entropies.view(shape))
    (a,) = torch.autograd.grad(loss, logps)

    d_hidden = torch.zeros_like(hidden[rows])
    for start, w in _in_double(weight):
        columns = torch.arange(start, start + len(w), device=ids.device)
        d_hidden += _d_raw(hidden[rows] @ w.t(), columns, ids[rows], lse[rows], a[rows], softcap) @ w
    d_raw = _d_raw(hidden @ weight[tokens].double().t(), tokens, ids, lse, a, softcap)
    return Reference(logps.detach(), entropies, loss.detach(), rows, d_hidden, tokens, d_raw.t() @ hidden)


def divergence_terms(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Of log-probabilities (n, V): the divergence of each row (n,), and its gradient in the student's logits (n, V)."""
    p, q = log_p.exp(), log_q.exp()
    if beta == 0.0:
        return (q * (log_q - log_p)).sum(dim=1), p - q
    log_m = log_q if beta == 1.0 else torch.logaddexp(log_p + math.log(1.0 - beta), log_q + math.log(beta))
    apart = (p * (log_p - log_m)).sum(dim=1, keepdim=True)
    if beta == 1.0:
        return apart[:, 0], p * (log_p - log_q - apart)
    value = (1.0 - beta) * apart[:, 0] + beta * (q * (log_q - log_m)).sum(dim=1)
    return value, (1.0 - beta) * p * (log_p - log_m - apart)


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


def _of_divergence(inputs: Inputs, hidden: Tensor, rows: Tensor, tokens: Tensor) -> Reference:
    """All logits of both heads, a block of rows at a time."""
    case, weight, teacher = inputs.case, inputs.weight.detach(), inputs.teacher
    assert teacher is not None and case.divergence is not None
    teacher_hidden, ids = teacher.hidden.reshape(len(hidden), -1).double(), inputs.ids.reshape(-1)
    counted = inputs.mask.reshape(-1).double()
    a = counted / counted.sum().clamp(min=1.0)
    logps, entropies, divergences = torch.zeros_like(a), torch.zeros_like(a), torch.zeros_like(a)
    d_hidden, d_weight = torch.zeros_like(hidden), hidden.new_zeros(len(tokens), case.h)
    for start in range(0, len(hidden), BLOCK):
        at = slice(start, start + BLOCK)
        z = _logits(hidden[at], weight, case.softcap)
        log_p = torch.log_softmax(z, dim=1)
        log_q = torch.log_softmax(_logits(teacher_hidden[at], teacher.weight, case.softcap), dim=1)
        logps[at], entropies[at] = log_p.gather(1, ids[at, None])[:, 0], -(log_p.exp() * log_p).sum(dim=1)
        divergences[at], d = divergence_terms(log_p, log_q, case.divergence)
        d = d * a[at, None]
        d = d if case.softcap is None else d * (1 - (z / case.softcap) ** 2)
        chosen = rows[(rows >= start) & (rows < start + BLOCK)]
        d_hidden[chosen] = sum(d[chosen - start, i : i + len(w)] @ w for i, w in _in_double(weight))
        d_weight += d[:, tokens].t() @ hidden[at]
    loss = counted_mean(divergences.view(inputs.ids.shape), inputs)
    return Reference(logps, entropies, loss, rows, d_hidden[rows], tokens, d_weight, divergences)


def _logits(hidden: Tensor, weight: Tensor, softcap: float | None) -> Tensor:
    """(n, V) in float64."""
    return capped(torch.cat([hidden @ w.t() for _, w in _in_double(weight)], dim=1), softcap)


def _row_statistics(
    hidden: Tensor, weight: Tensor, ids: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(log sum exp of each row's logits, the target's logit, entropy), (N,) each."""
    top = torch.full_like(hidden[:, 0], -torch.inf)
    total, weighted, target = torch.zeros_like(top), torch.zeros_like(top), torch.zeros_like(top)
    for start, w in _in_double(weight):
        z = capped(hidden @ w.t(), softcap)
        new_top = torch.maximum(top, z.amax(dim=1))
        e = torch.exp(z - new_top[:, None])
        scale = torch.exp(top - new_top)
        total, weighted = total * scale + e.sum(dim=1), weighted * scale + (e * z).sum(dim=1)
        top, place = new_top, ids - start
        inside = (place >= 0) & (place < z.shape[1])
        target = torch.where(inside, z.gather(1, torch.where(inside, place, 0)[:, None])[:, 0], target)
    lse = top + total.log()
    return lse, target, lse - weighted / total


def _in_double(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows of the weight in float64), a slice at a time, all in the same memory."""
    memory = weight.new_empty(min(SLICE, len(weight)), weight.shape[1], dtype=torch.float64)
    for start in range(0, len(weight), SLICE):
        rows = weight[start : start + SLICE]
        yield start, memory[: len(rows)].copy_(rows)


def _d_raw(raw: Tensor, columns: Tensor, ids: Tensor, lse: Tensor, a: Tensor, softcap: float | None) -> Tensor:
    """d loss / d x at some columns of the vocabulary, (rows, columns)."""
    z = capped(raw, softcap)
    d = a[:, None] * ((ids[:, None] == columns).double() - torch.exp(z - lse[:, None]))
    return d if softcap is None else d * (1 - (z / softcap) ** 2)


def _is_clipped(log_ratio: Tensor) -> Tensor:
    ratio = torch.exp(log_ratio)
    return (ratio < 1 - EPSILON) | (ratio > 1 + EPSILON)


def _relative(got: Tensor, want: Tensor) -> float:
    size = want.norm()
    return float((got.double() - want).norm() / torch.where(size > 0, size, 1.0))
