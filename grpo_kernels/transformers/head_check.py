"""Check of a head in a model's first forward: what does the model do to logits, and is its head one linear layer?

Beside the scores the model is given two rows in place of logits: real logits, which its own head has projected from
one hidden state; and a ladder of known numbers, which shows every scale, soft-cap and cut. If the ladder comes back
otherwise than the constants of `Head` predict, they are measured from it. The real logits give the model's own
log-probabilities, and ours are compared with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.base.modes import evaluating
from grpo_kernels.head.head import Head
from grpo_kernels.logprob import linear_logprob
from grpo_kernels.transformers import head as heads


class HeadCheck:
    """Comparison of a head with its model's own logits, in one forward.

    Order of the calls: `project` and `score` within the head; `rows`, which the head returns; `take` for the model's
    output; `verified`.
    """

    def __init__(self, head: Head, state_of: Callable[[Tensor], Tensor]) -> None:
        """`state_of` chooses the state (H,) to compare at, of the head's input (B, L, H)."""
        self._head, self._state_of = head, state_of

    @torch.no_grad()
    def project(self, hidden: Tensor, forward: Callable[..., Tensor]) -> None:
        """Compute, by the head's own `forward`, the logits of one state of `hidden` (B, L, H)."""
        self._state = self._state_of(hidden).detach()  # (H,)
        with evaluating(self._head.weight):
            self._logits = forward(self._state.view(1, 1, -1)).view(-1)  # (V,)
        self._eps = torch.finfo(self._logits.dtype).eps

    @torch.no_grad()
    def score(self) -> None:
        """Compute our log-probabilities of some ids at that row; to be called where the head's parameters are whole."""
        logits = self._logits
        count = self._head.vocab_size or logits.shape[0]
        ids = torch.linspace(0, count - 1, 8, device=logits.device).long()
        ids[0] = logits[:count].argmax()
        states = self._state.expand(ids.shape[0], -1)
        with evaluating(self._head.weight):
            found = linear_logprob(states, heads.read(self._head, states), ids, entropy=False)
        self._logps = found.logps
        self._ids, self._logits = ids, logits.to(self._logps.dtype)
        self._rungs = _ladder(logits.shape[0], self._logits)

    @property
    def rows(self) -> Tensor:
        """Logits to give the model, (2, V): those of the row, and the ladder."""
        return torch.stack([self._logits, self._rungs])

    def take(self, output: Any) -> None:
        """Keep what the model has made of `rows`: the first two rows of logits in its `output`."""
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[1] < 2:
            raise ValueError(
                f"model: expected an output with logits (B, T, V), got {type(output).__name__}"
            )
        self._made = logits[0, :2].detach()

    @property
    def is_finite(self) -> bool:
        """True if the row's logits are finite, so that they can be compared."""
        return bool(self._logits.isfinite().all())

    def verified(self, model: nn.Module) -> Head:
        """Return the head as `model` really uses it: the checked one, or the same with measured constants.

        Raises:
            ValueError: no `Head` describes it.
        """
        (own, climbed), rungs, name = self._made, self._rungs, type(model).__name__
        if not _agrees(self._head, rungs, climbed):
            found = _measured(self._head, rungs, climbed)
            if found is None:
                pairs = ", ".join(
                    f"{x:g} -> {y:g}" for x, y in zip(rungs[:8:2], climbed[:8:2], strict=False)
                )
                raise ValueError(
                    f"model: expected a scale, a soft-cap or a cut of the logits, {name} makes of {rungs.shape[0]} "
                    f"raw logits {climbed.shape[0]}, {pairs}"
                )
            return found
        theirs = own.log_softmax(-1, dtype=self._logps.dtype)[self._ids]
        allowed = max(1e-4, 4 * self._eps) * max(1.0, own.abs().max().item())
        gap = (theirs - self._logps).abs().max().item()
        if self.is_finite and not gap <= allowed:
            raise ValueError(
                f"model: expected the logits of one linear layer, {name}'s own log-probabilities differ from it by "
                f"{gap:.3g}; {type(self._head.weight).__name__} does something else"
            )
        return self._head


def _ladder(vocab: int, like: Tensor) -> Tensor:
    """(V,) numbers of both signs from 0.01 to 1e8, which show any factor and any cap, all over the vocabulary."""
    steps = 10.0 ** torch.arange(-2, 9, dtype=like.dtype, device=like.device)
    return torch.stack([steps, -steps], dim=1).reshape(-1).repeat(vocab // 22 + 1)[:vocab]


def _agrees(head: Head, rungs: Tensor, logits: Tensor) -> bool:
    """Return True if `head` turns `rungs` (V,) into the model's own logits, up to rounding."""
    expected = heads.logits_of(head, rungs.double())
    if expected.shape != logits.shape:
        return False
    tolerance = 16 * torch.finfo(logits.dtype).eps
    return bool(((logits.double() - expected).abs() <= tolerance * expected.abs()).all())


def _measured(head: Head, rungs: Tensor, logits: Tensor) -> Head | None:
    """Return `head` with the constants that turn `rungs` (V,) into `logits` (v,), or None if they cannot be measured.

    ``logits = cap tanh(scale x / cap)`` is the cap for large x and ``scale x`` near 0.
    """
    count = logits.shape[-1]
    if count > rungs.shape[0] or count < 22 or logits.dtype.itemsize < 4:
        return None
    x, y = rungs[:22:2].double(), logits[:22:2].double()
    small, cap = y[0], y[-1]
    linear = bool(cap > 9.0 * y[-2])
    scale = (small / x[0] if linear else torch.atanh(small / cap) * cap / x[0]).item()
    for known in (1.0, head.logit_scale):
        if abs(scale / known - 1.0) < 1e-6:  # no more than rounding
            scale = known
    found = replace(
        head,
        logit_scale=scale,
        final_logit_softcapping=None if linear else cap.item(),
        vocab_size=None if count == rungs.shape[0] else count,
    )
    return found if _agrees(found, rungs, logits) else None
