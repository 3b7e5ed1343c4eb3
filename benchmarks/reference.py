"""The float64 result that every provider is held against before it is timed.

The loss, all log-probabilities and entropies; of the gradients some rows of d hidden and of d
weight: with x = h @ W.T, a row's log-probability l and a = d loss / d l::

    d x_t = a_t dl_t / dx_t     d hidden = d x @ W     d weight = d x^T @ h

Autograd gives dl / dx, of a few rows at a time; a comes from the loss of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases import SEED, BenchCase, Inputs, capped, policy_loss
from benchmarks.providers import Outcome

ROWS, SLICE = 256, 8192  # rows of logits at a time; of the weight, in float64
SAMPLE = 64
# What counts as the same result, for a peer that rounds logits and gradients to 16 bits: wrong
# formulas are far beyond.
LIMITS = {
    "loss": 0.02, "logp_mean": 0.05, "logp_max": 1.0, "entropy_mean": 0.1, "d_hidden": 0.05,
    "d_weight": 0.05,
}  # fmt: skip
# A rounded logp puts some ratios on the other side of the clip, and some entropies on the other
# side of a quantile.
CHOSEN_LIMITS = {**LIMITS, "d_hidden": 0.4, "d_weight": 0.4}
EXACT_LIMITS = {**dict.fromkeys(LIMITS, 1e-4), "logp_max": 1e-3}  # of float32
CHOSEN_EXACT_LIMITS = {**EXACT_LIMITS, "d_hidden": 0.1, "d_weight": 0.1}


@dataclass(frozen=True)
class Reference:
    logps: Tensor  # (N,)
    entropies: Tensor  # (N,)
    loss: Tensor  # ()
    rows: Tensor  # (r,) indices of hidden states
    d_hidden: Tensor  # (r, H)
    tokens: Tensor  # (k,) indices of rows of the weight
    d_weight: Tensor  # (k, H)


def reference(inputs: Inputs) -> Reference:
    """Float64 results from the inputs as they are, rounded to bf16."""
    case, shape, ids = inputs.case, inputs.ids.shape, inputs.ids.reshape(-1)
    hidden, weight = inputs.hidden.detach().reshape(-1, case.h).double(), inputs.weight.detach()
    sampled, tokens = _sampled(ids, case.v)
    of_chunks: list[tuple[Tensor, ...]] = []
    for at in torch.arange(len(ids), device=ids.device).split(ROWS):
        x = _logits(hidden[at], weight).requires_grad_()
        log_p = capped(x, case.softcap).log_softmax(dim=1)
        fixed = log_p.detach()
        logps = log_p.gather(1, ids[at, None])[:, 0]
        (slopes,) = torch.autograd.grad(logps.sum(), x)
        of_sample = slopes[torch.isin(at, sampled)]
        d_sample = sum(
            s @ w.double()
            for s, w in zip(of_sample.split(SLICE, dim=1), weight.split(SLICE), strict=True)
        )
        entropies = -(fixed.exp() * fixed).sum(dim=1)
        of_chunks.append((logps.detach(), entropies, d_sample, slopes[:, tokens]))
    logps, entropies, d_sample, of_tokens = (torch.cat(x) for x in zip(*of_chunks, strict=True))
    leaf = logps.clone().requires_grad_()
    loss = policy_loss(inputs, leaf.view(shape), entropies.view(shape))
    (a,) = torch.autograd.grad(loss, leaf)
    d_hidden, d_weight = a[sampled, None] * d_sample, (a[:, None] * of_tokens).t() @ hidden
    return Reference(logps, entropies, loss.detach(), sampled, d_hidden, tokens, d_weight)


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([hidden @ part.double().t() for part in weight.split(SLICE)], dim=1)


def errors(outcome: Outcome, inputs: Inputs, want: Reference) -> dict[str, float]:
    """How far a step's results are off, on the tokens that count: absolute for loss,
    log-probabilities and entropies, relative in norm for gradients; ``ratio_off``, the share of
    ratios to the true policy that are off by more than 1%."""
    found: dict[str, float] = {}
    counted = inputs.mask.reshape(-1).bool()
    if outcome.loss is not None:
        found["loss"] = float((outcome.loss.detach().double() - want.loss).abs())
    if outcome.logps is not None:
        signed = (outcome.logps.detach().double().reshape(-1) - want.logps)[counted]
        found |= {"logp_mean": float(signed.abs().mean()), "logp_max": float(signed.abs().max())}
        found["ratio_off"] = float((torch.expm1(signed).abs() > 0.01).double().mean())
    if outcome.entropies is not None:
        off = (outcome.entropies.detach().double().reshape(-1) - want.entropies).abs()[counted]
        found["entropy_mean"] = float(off.mean())
    if inputs.hidden.requires_grad:
        assert inputs.hidden.grad is not None, "no gradient of the hidden states"
        rows = inputs.hidden.grad.reshape(-1, inputs.case.h)[want.rows]
        found["d_hidden"] = _relative(rows, want.d_hidden)
    if inputs.weight.requires_grad:
        assert inputs.weight.grad is not None, "no gradient of the weight"
        found["d_weight"] = _relative(inputs.weight.grad[want.tokens], want.d_weight)
    return found


def is_right(found: dict[str, float], case: BenchCase) -> bool:
    """True if what has to be compared was, and all of it is within the limits; NaN is not."""
    rounds = case.dtype != "float32"
    chosen = case.drift > 0 or case.top_entropy < 1
    exact = CHOSEN_EXACT_LIMITS if chosen else EXACT_LIMITS
    limits = (CHOSEN_LIMITS if chosen else LIMITS) if rounds else exact
    needed = {"loss", "d_hidden"} | (set() if case.frozen else {"d_weight"})
    needed = {"logp_mean"} if case.score else needed
    within = all(found[name] <= limits[name] for name in limits if name in found)
    return needed <= found.keys() and within


def _sampled(ids: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(SEED)
    rows = torch.randperm(len(ids), generator=g)[:SAMPLE].sort().values.to(ids.device)
    others = torch.randint(vocab, (SAMPLE,), generator=g).to(ids.device)
    return rows, torch.cat([ids[rows], others]).unique()


def _relative(got: Tensor, want: Tensor) -> float:
    size = want.norm()
    return float((got.double() - want).norm() / torch.where(size > 0, size, 1.0))
