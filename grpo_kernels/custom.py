"""A loss of the user's own: any torch function of per-token log-probabilities and entropies, with the same engines.

::

    @grpo_kernels.token_level
    def reinforce(tokens):
        return -tokens.advantages * tokens.logps

    out = grpo_kernels.grpo_loss(..., objective=reinforce)

The function returns a per-token loss; autograd gives its coefficients; the config's ``loss_type`` gives its normaliser.
It stands in place of all of the config's terms: ratio, KL, masks and bonus are its own affair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from grpo_kernels.batch import Tokens
from grpo_kernels.evaluation import Evaluation


@dataclass(frozen=True)
class TokenInputs:
    """What a custom objective sees; all tensors of the shape of `logps`.

    That shape is (B, T), 0 where the mask is, for a function that looks at sequences, and (n,), some of the counted
    tokens, for one that is `token_level`. Only `logps` and `entropies` carry gradient: parameters of the function's own
    get none.
    """

    logps: Tensor
    entropies: Tensor
    mask: Tensor  # bool
    advantages: Tensor
    old_per_token_logps: Tensor  # the current ones, held constant, if the caller gave none
    ref_per_token_logps: Tensor | None
    sampling_per_token_logps: Tensor | None
    importance_sampling_ratio: Tensor | None


PerTokenLoss = Callable[[TokenInputs], Tensor]


def token_level(objective: PerTokenLoss) -> PerTokenLoss:
    """Declare that `objective`'s loss of a token depends on that token alone: it then gets the one-pass engine.

    It is evaluated on some tokens at a time for the gradient and on all of them for the loss, and so must be a function
    of its argument alone, without randomness.
    """

    @functools.wraps(objective)
    def declared(tokens: TokenInputs) -> Tensor:
        return objective(tokens)

    declared.token_level = True  # type: ignore[attr-defined]
    return declared


class CustomObjective:
    """A user's function in the place of `objective.PolicyObjective`."""

    is_known = False

    def __init__(self, function: PerTokenLoss, tokens: Tokens, weights: Tensor) -> None:
        self.function, self.tokens, self.weights = function, tokens, weights

    @property
    def couples_tokens(self) -> bool:
        return not getattr(self.function, "token_level", False)

    @cached_property
    def has_entropy_gradient(self) -> bool:
        """Whether the function uses the entropies differentiably; found by evaluating it at zeros, unless it says."""
        if getattr(self.function, "uses_entropies", True) is False:
            return False
        nothing = torch.zeros_like(self.tokens.advantages)
        return self.evaluate(nothing, nothing).b is not None

    def may_have_gradient(self) -> None:
        """None: any of its tokens may."""
        return None

    def coefficients(self, index: Tensor, logps: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor | None]:
        """(a, b) of the tokens at `index` (m,) from their own numbers."""
        part = CustomObjective(self.function, self.tokens.at(index), self.weights[index])
        result = part.evaluate(logps, entropies)
        return result.a, result.b

    def token_loss(self) -> None:
        """None: a row kernel cannot call a function of the user's."""
        return None

    def evaluate(self, logps: Tensor, entropies: Tensor) -> Evaluation:
        """The loss and its gradient, by autograd, at `logps`, `entropies`, (n,) each."""
        if torch.is_inference_mode_enabled():  # there is no gradient to want
            loss = (self.weights * self._call(logps, entropies)).sum()
            return Evaluation(loss, torch.zeros_like(logps), None, loss)
        with torch.enable_grad():
            logps, entropies = logps.clone().requires_grad_(), entropies.clone().requires_grad_()
            per_token = self._call(logps, entropies)
            loss = (self.weights * per_token).sum()
            if not loss.requires_grad:
                raise ValueError("objective: expected a loss that depends on tokens.logps or tokens.entropies")
            a, b = torch.autograd.grad(loss, (logps, entropies), allow_unused=True)
        return Evaluation(loss.detach(), torch.zeros_like(logps) if a is None else a, b, loss.detach())

    def _call(self, logps: Tensor, entropies: Tensor) -> Tensor:
        layout, tokens = self.tokens.layout, self.tokens

        def view(x: Tensor) -> Tensor:
            return layout.dense(x) if self.couples_tokens else x

        def maybe(x: Tensor | None) -> Tensor | None:
            return None if x is None else view(x)

        old = logps.detach() if tokens.old_per_token_logps is None else tokens.old_per_token_logps
        inputs = TokenInputs(
            logps=view(logps),
            entropies=view(entropies),
            mask=view(torch.ones_like(logps, dtype=torch.bool)),
            advantages=view(tokens.advantages),
            old_per_token_logps=view(old),
            ref_per_token_logps=maybe(tokens.ref_per_token_logps),
            sampling_per_token_logps=maybe(tokens.sampling_per_token_logps),
            importance_sampling_ratio=maybe(tokens.importance_sampling_ratio),
        )
        per_token = self.function(inputs)
        if not isinstance(per_token, Tensor) or per_token.shape != inputs.logps.shape:
            got = tuple(per_token.shape) if isinstance(per_token, Tensor) else type(per_token).__name__
            raise ValueError(
                f"objective: expected a per-token loss of the shape of tokens.logps = {tuple(inputs.logps.shape)}, "
                f"got {got}"
            )
        return per_token[layout.sequence, layout.column] if self.couples_tokens else per_token
