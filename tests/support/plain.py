"""A plain candidate: float32, full logits, the gradient written out by hand. The tolerance must
accept it.

Its hooks plant faults: the tolerance must reject each. The per-token loss is the reference's, in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.support.case_builder import Case
from tests.support.reference import evaluate, mean_metrics
from tests.support.reference_head import head, on_grid, teacher_log_probs
from tests.support.reference_terms import divergence, settings

Edit = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    """No fault."""
    return x


@dataclass
class Hooks:
    """Where a fault may sit."""

    # what the loss is told, as against what the head is told
    case: Callable[[Case], Case] = lambda case: case
    raw: Edit = same  # (n, V) the products' result
    # (B, T) each
    slopes: Callable[[Case, Tensor, Tensor], tuple[Tensor, Tensor]] = lambda case, a, b: (a, b)
    d_raw: Edit = same  # (n, V) the gradient of the products' result
    loss: Edit = same
    logps: Edit = same
    entropies: Edit = same
    metrics: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda metrics: metrics
    grads: dict[str, Edit] = field(default_factory=dict)  # by name: hidden, weight, bias
    # (n, V) d KL / d z, of another head
    pull: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda p, d, kl: p * (d - kl)
    chain_cap: bool = True  # the soft-cap's derivative
    accumulate: torch.dtype | None = None  # the weight gradient's accumulator, one row at a time


def plain(
    case: Case, hooks: Hooks | None = None
) -> tuple[SimpleNamespace, dict[str, Tensor | None]]:
    """(output, gradients by name) in float32 (float64 for float64 inputs)."""
    hooks = hooks or Hooks()
    dtype = torch.float64 if case.hidden.dtype == torch.float64 else torch.float32
    o = settings(case)
    h = head(case, dtype, hooks.raw)
    told = hooks.case(case)
    scores, full = [h.logps, h.entropies], o.beta != 0 and o.kl_estimator == "full"
    if full:
        scores.append(divergence(1.0, h.log_probs, teacher_log_probs(told, dtype)))
    leaves = [on_grid(x.detach(), h.counted).requires_grad_() for x in scores]
    at = evaluate(told, *leaves)
    found = (
        torch.autograd.grad(at.loss, leaves, allow_unused=True)
        if at.loss.requires_grad
        else (None,) * len(leaves)
    )
    a, b, *c = (torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True))
    a, b = hooks.slopes(case, a, b)
    more = pulled(told, h, c[0], leaves[2].detach(), hooks) if full else 0.0
    output = SimpleNamespace(
        loss=hooks.loss(at.loss.detach()),
        logps=hooks.logps(leaves[0].detach()),
        entropies=hooks.entropies(leaves[1].detach()),
        metrics=hooks.metrics(mean_metrics(at)),
    )
    return output, backward(case, o, h, a[h.counted][:, None], b[h.counted][:, None], more, hooks)


def pulled(case: Case, h, c: Tensor, kl: Tensor, hooks: Hooks) -> Tensor:
    """c d KL / d z (n, V), given c = d loss / d KL and the KL from another head's distributions,
    (B, T) each."""
    log_p, log_q = h.log_probs.detach(), teacher_log_probs(case, h.log_probs.dtype)
    return c[h.counted][:, None] * hooks.pull(log_p.exp(), log_p - log_q, kl[h.counted][:, None])


def backward(
    case: Case, o: SimpleNamespace, h, a: Tensor, b: Tensor, more: Tensor | float, hooks: Hooks
) -> dict[str, Tensor | None]:
    """d z_j = a (1[j = y] - p_j) - b p_j (log p_j + entropy) + more, then the chain to hidden,
    weight and bias."""
    logs, raw = h.log_probs.detach(), h.raw.detach()
    p = logs.exp()
    dz = a * (torch.nn.functional.one_hot(h.ids, logs.shape[1]) - p)
    dz = dz - b * p * (logs.masked_fill(logs.isinf(), 0.0) + h.entropies.detach()[:, None]) + more
    if o.final_logit_softcapping is not None and hooks.chain_cap:
        dz = dz * (1 - torch.tanh(raw / o.final_logit_softcapping) ** 2)
    dz = hooks.d_raw(dz * (o.logit_scale / o.temperature))
    if case.hidden.dtype.itemsize == 2:  # what goes into the two products has the input's dtype
        dz = dz.to(case.hidden.dtype).to(dz.dtype)
    d_weight = dz.T @ h.hidden.detach()
    if hooks.accumulate is not None:
        d_weight = torch.zeros_like(d_weight, dtype=hooks.accumulate)
        for row, x in zip(dz, h.hidden.detach(), strict=True):
            d_weight += torch.outer(row, x)
    d_hidden = on_grid(dz @ h.weight.detach(), h.counted)
    named = {"hidden": d_hidden, "weight": d_weight, "bias": None if h.bias is None else dz.sum(0)}
    grads: dict[str, Tensor | None] = {}
    for name, grad in named.items():
        tensor = getattr(case, name)
        keep = grad is not None and name not in case.frozen
        grads[name] = hooks.grads.get(name, same)(grad).to(tensor.dtype) if keep else None
    return grads
