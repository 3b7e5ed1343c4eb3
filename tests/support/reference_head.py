"""The head of the float64 reference: from a case's tensors to log-probabilities, entropies and
divergences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.support.reference_terms import divergence, listed_divergence, settings

if TYPE_CHECKING:
    from tests.support.case_builder import Case

# fields of a case that may want a gradient
LEAVES = ("hidden", "weight", "bias", "lora_a", "lora_b", "lora_input")
SCORES = ("logps", "entropies", "divergences")


@dataclass
class Head:
    """The projection of the n counted positions, in one dtype."""

    counted: Tensor  # (B, T) bool
    ids: Tensor  # (n,)
    leaves: dict[str, Tensor]  # those of LEAVES that there are, (n, H) where one per position
    temperature: Tensor | float  # (n, 1) if one per position
    raw: Tensor  # (n, V) logit_scale * (hidden @ weight.T + the adapter's + bias)
    log_probs: Tensor  # (n, V), -inf outside of a kept set
    wide_log_probs: Tensor  # (n, V), what the entropies are of
    logps: Tensor  # (n,)
    entropies: Tensor  # (n,)

    def __getattr__(self, name: str) -> Tensor | None:
        """A leaf, None if there is none of that name."""
        if name in LEAVES:
            return self.leaves.get(name)
        raise AttributeError(name)


def teacher_case(case: Case) -> Case:
    """The case with the other head in the place of the policy's."""
    names = ("final_logit_softcapping", "logit_scale")
    options = {name: getattr(settings(case), f"teacher_{name}") for name in names}
    return case.but(
        hidden=case.teacher_hidden, weight=case.teacher_weight, bias=case.teacher_bias,
        config=options,
        lora_a=None, lora_b=None, lora_input=None,
    )  # fmt: skip


def teacher_log_probs(case: Case) -> Tensor:
    """(n, V) log-probabilities of the other head at the counted positions; constants."""
    return head(teacher_case(case)).log_probs.detach()


def head(case: Case, dtype: torch.dtype = torch.float64, edit_raw=None) -> Head:
    """Log-probabilities and entropies of the counted positions, straight from the full logits.

    logits = softcap(logit_scale * (hidden @ weight.T + scaling * input @ a.T @ b.T + bias)) /
    temperature, at -inf outside of a kept set; softcap(x) = cap * tanh(x / cap); entropy = -sum_v
    p_v log p_v over the lanes with p_v > 0.
    """
    o = settings(case)
    counted = case.completion_mask != 0
    flat = counted.reshape(-1).nonzero().squeeze(1)
    rows = lambda x: x.reshape(-1, *x.shape[2:])[flat]  # noqa: E731
    ids, vocab = rows(case.completion_ids).long(), case.weight.shape[0]
    if ((ids < 0) | (ids >= vocab)).any():
        raise ValueError(f"completion_ids: a counted id lies outside [0, {vocab})")
    tensors = {name: getattr(case, name) for name in LEAVES if getattr(case, name) is not None}
    leaves = {}
    for name, x in tensors.items():
        x = rows(x) if name in ("hidden", "lora_input") else x
        leaves[name] = x.detach().to(dtype).requires_grad_()
    raw = leaves["hidden"] @ leaves["weight"].T
    if "lora_a" in leaves:
        seen = leaves.get("lora_input", leaves["hidden"])
        raw = raw + o.lora_scaling * seen @ leaves["lora_a"].T @ leaves["lora_b"].T
    raw = o.logit_scale * (raw + leaves["bias"] if "bias" in leaves else raw)
    raw = raw if edit_raw is None else edit_raw(raw)
    cap = o.final_logit_softcapping
    capped = raw if cap is None else cap * torch.tanh(raw / cap)
    temperature = o.temperature
    if case.temperature is not None:
        temperature = rows(case.temperature).to(dtype)[:, None]
    logits = capped / temperature
    log_probs = wide = torch.log_softmax(logits, dim=-1)
    if case.kept_ids is not None:
        inside = kept_lanes(rows(case.kept_ids).long(), vocab)
        if o.on_missing_set == "full":
            inside = inside | ~inside.gather(1, ids[:, None])
        log_probs = torch.log_softmax(logits.masked_fill(~inside, -torch.inf), dim=-1)
        wide = log_probs if o.entropy_of == "the set" else wide
    logps = log_probs.gather(1, ids[:, None]).squeeze(1)
    entropies = -(wide.exp() * wide.masked_fill(wide == -torch.inf, 0.0)).sum(-1)
    return Head(counted, ids, leaves, temperature, raw, log_probs, wide, logps, entropies)


def kept_lanes(kept: Tensor, vocab: int) -> Tensor:
    """(n, V) bool of ids (n, K) that are padded with -1."""
    lanes = torch.zeros(len(kept), vocab + 1, dtype=torch.bool)
    return lanes.scatter(-1, torch.where(kept < 0, vocab, kept), True)[:, :vocab]


def divergences_of(case: Case, log_probs: Tensor) -> Tensor | None:
    """(n,) from the case's other head, or from the ids that its teacher lists."""
    if case.listed_ids is not None and case.listed_logps is not None:
        counted = case.completion_mask != 0
        ids, logps = case.listed_ids[counted].long(), case.listed_logps[counted].double()
        least = torch.finfo(case.listed_logps.dtype).eps
        return listed_divergence(settings(case), log_probs, ids, logps, least)
    if case.teacher_hidden is None:
        return None
    return divergence(settings(case).beta_of_divergence, log_probs, teacher_log_probs(case))


def on_grid(rows: Tensor, counted: Tensor) -> Tensor:
    """(n, ...) values of the counted positions -> (B, T, ...), 0 elsewhere, differentiable."""
    grid = rows.new_zeros((counted.numel(), *rows.shape[1:]))
    index = counted.reshape(-1).nonzero().squeeze(1)
    return grid.index_put((index,), rows).reshape(*counted.shape, *rows.shape[1:])
