"""A loss of the user's own: any torch function of per-token log-probabilities and entropies, with the same engines.

::

    @grpo_kernels.token_level
    def reinforce(tokens):
        return -tokens.advantages * tokens.logps

    out = grpo_kernels.grpo_loss(..., objective=reinforce)

The function returns a per-token loss; autograd gives its coefficients; the config's ``loss_type`` gives its normaliser.
It replaces all of the config's terms: ratio, KL, masks and entropy bonus. Tensors that `TokenInputs` does not have come
in by a closure: ``extra.flatten()[tokens.index]`` for `extra` of the shape of the ids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import is_captured
from grpo_kernels.batch.tokens import Tokens
from grpo_kernels.objective.evaluation import Evaluation
from grpo_kernels.token_loss.record import Coefficients


@dataclass(frozen=True)
class TokenInputs:
    """Arguments of a custom objective; all tensors have the shape of `logps`.

    For a `token_level` function that shape is (n,), some of the counted tokens. For any other it is (B, T), with 0 at
    masked positions; T of a packed batch is the longest sequence. Only `logps` and `entropies` carry gradient; a
    function that reads another tensor with a gradient, such as a parameter of its own, is refused.

    Attributes:
        logps, entropies: of the policy, with gradient.
        mask: bool, the tokens that count.
        advantages: each token's.
        old_per_token_logps: the current ones, held constant, if the caller gave none.
        ref_per_token_logps, sampling_per_token_logps, importance_sampling_ratio: None if the caller gave none.
        index: int64, the token's place in the caller's flattened batch, of B * T or packed N places:
            ``extra.flatten()[tokens.index]`` reads a tensor of the shape of the ids.
        sequence: int64, the number of the token's sequence, in [0, B): ``bonus[tokens.sequence]`` reads a tensor (B,).
        position: int64, the token's place in its sequence, the column of a padded batch: ``bonus[tokens.position]``
            reads a tensor (T,).
    """

    logps: Tensor
    entropies: Tensor
    mask: Tensor
    advantages: Tensor
    old_per_token_logps: Tensor
    ref_per_token_logps: Tensor | None
    sampling_per_token_logps: Tensor | None
    importance_sampling_ratio: Tensor | None
    # absent: `logps` are all of a padded batch, (B, T), or of one sequence, (n,)
    index: Tensor = field(default=None)  # type: ignore[assignment]
    sequence: Tensor = field(default=None)  # type: ignore[assignment]
    position: Tensor = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        absent = [name for name in ("index", "sequence", "position") if getattr(self, name) is None]
        if absent:
            places = torch.arange(self.logps.numel(), device=self.logps.device).view(
                self.logps.shape
            )
            columns = max(1, self.logps.shape[-1])
            defaults = {
                "index": places,
                "sequence": places // columns,
                "position": places % columns,
            }
            for name in absent:
                object.__setattr__(self, name, defaults[name])


TOLERANCE = 1e-3  # relative to a number, or to the mean size of all: far above rounding
FEW = 64
SCATTER, SCATTER_MODULUS = (
    2_654_435_761,
    2**32,
)  # Knuth's multiplicative hash: an order without a pattern

PerTokenLoss = Callable[[TokenInputs], Tensor]


def token_level(objective: PerTokenLoss, *, verify: bool = True) -> PerTokenLoss:
    """Declare that `objective`'s loss of a token depends on that token alone: it then gets the one-pass engine.

    It is evaluated on some tokens at a time for the gradient and on all of them for the loss, and so must be a function
    of its argument alone, without randomness. The first call of at least two tokens verifies this, and so does the
    first with another choice of optional inputs: loss and gradient of some tokens must be the same without the other
    tokens. The check costs one evaluation, and one wait for the device.

    Args:
        verify: False to skip the check, for a function that agrees only roughly (16-bit products, a compiled function).

    Raises:
        TypeError: `objective` is no function, or `verify` no bool. ValueError, in a call: the function couples tokens.
    """
    if not callable(objective):
        raise TypeError(
            f"objective: expected a function of TokenInputs, got {type(objective).__name__}"
        )
    if not isinstance(verify, bool):
        raise TypeError(f"verify: expected a bool, got {verify!r}")

    @functools.wraps(objective)
    def declared(tokens: TokenInputs) -> Tensor:
        return objective(tokens)

    declared.token_level = True  # type: ignore[attr-defined]
    declared.verified = set() if verify else None  # type: ignore[attr-defined]
    return declared


def _declared(function: Any, name: str, default: bool) -> bool:
    """What `function`, or the function that a ``functools.partial`` is of, declares."""
    while isinstance(function, functools.partial):
        function = function.func
    return bool(getattr(function, name, default))


class CustomObjective:
    """A user's function in place of `PolicyObjective`."""

    is_known = False

    def __init__(
        self, function: PerTokenLoss, tokens: Tokens, weights: Tensor, chosen: Tensor | None = None
    ) -> None:
        """Take `tokens`, and their `weights` (n,); `chosen` (n,) are their indices in the layout (None: all of it)."""
        self.function, self.tokens, self.weights, self._chosen = function, tokens, weights, chosen

    @property
    def couples_tokens(self) -> bool:
        return not _declared(self.function, "token_level", False)

    @cached_property
    def has_entropy_gradient(self) -> bool:
        """True if the loss depends on the entropies, as a call on zeros shows; False if ``uses_entropies`` is False."""
        if not _declared(self.function, "uses_entropies", True):
            return False
        nothing = torch.zeros_like(self.tokens.advantages)
        return self._evaluate(nothing, nothing)[0].coefficients.d_entropy is not None

    def may_have_grad(self) -> None:
        """Return None: any token may have a gradient."""
        return None

    def coefficients_of(self, index: Tensor, logps: Tensor, entropies: Tensor) -> Coefficients:
        """Return the coefficients of the tokens at `index` (m,), from these tokens alone."""
        return self._at(index)._evaluate(logps, entropies)[0].coefficients

    def _at(self, index: Tensor) -> CustomObjective:
        chosen = index if self._chosen is None else self._chosen[index]
        return CustomObjective(self.function, self.tokens.at(index), self.weights[index], chosen)

    def token_loss(self) -> None:
        """Return None: a row kernel cannot call the user's function."""
        return None

    def evaluate(self, logps: Tensor, entropies: Tensor) -> Evaluation:
        """The loss and its gradient, by autograd, at `logps`, `entropies`, (n,) each.

        Raises:
            ValueError: the function returns no per-token loss; or it is declared `token_level` and couples tokens,
                which is checked once for each choice of optional inputs.
        """
        result, per_token = self._evaluate(logps, entropies)
        verified: set[tuple[str, ...]] | None = getattr(self.function, "verified", None)
        present = self.tokens.present
        can_tell = (
            len(self.tokens) > 1
            and not torch.is_inference_mode_enabled()
            and not is_captured(logps)
        )
        if verified is not None and can_tell and present not in verified:
            verified.update([present] if self._verify(logps, entropies, result, per_token) else [])
        return result

    def _verify(
        self, logps: Tensor, entropies: Tensor, whole: Evaluation, per_token: Tensor
    ) -> bool:
        """Raise unless each part of the tokens has the same loss and gradient alone as among all. Return False if all
        gradients are 0, which proves nothing (advantages of 0).

        The parts are a few tokens, whose means differ from those of all, and two halves of the rest. Their tokens are
        scattered over the batch, so that no part repeats a pattern of it.
        """
        n = len(self.tokens)
        order = (torch.arange(1, n + 1, device=logps.device) * SCATTER % SCATTER_MODULUS).argsort()
        few = max(1, min(n // 3, FEW))
        differences = []
        for part in order.tensor_split([few] if n < 3 else [few, few + (n - few) // 2]):
            alone, losses = self._at(part)._evaluate(logps[part], entropies[part])
            pairs = [(losses, per_token), (alone.d_logp, whole.d_logp)]
            of_alone, of_whole = alone.coefficients.d_entropy, whole.coefficients.d_entropy
            if of_whole is not None or of_alone is not None:
                nothing = torch.zeros_like(logps)
                pairs.append(
                    (
                        nothing[part] if of_alone is None else of_alone,
                        nothing if of_whole is None else of_whole,
                    )
                )
            differences += [_difference(x, y[part], y) for x, y in pairs]
        worst, largest = torch.stack(
            [torch.stack(differences).max(), whole.d_logp.abs().max()]
        ).tolist()
        if worst > TOLERANCE:
            name = getattr(self.function, "__name__", type(self.function).__name__)
            raise ValueError(
                f"objective: expected a loss of each token alone, as {name!r} is declared token_level, but with fewer "
                f"tokens beside them its values or gradients differ by {worst:.1e} of their size. Take the declaration "
                "off (numbers that belong to a token: extra.flatten()[tokens.index]), or, if it is rounding, pass "
                "verify=False to token_level"
            )
        return bool(largest != 0)

    def _evaluate(self, logps: Tensor, entropies: Tensor) -> tuple[Evaluation, Tensor]:
        """Return the evaluation, and the loss of each token, (n,)."""
        if torch.is_inference_mode_enabled():  # no gradient can follow
            per_token = self._call(logps, entropies)
            loss = (self.weights * per_token).sum()
            return Evaluation(loss, Coefficients(torch.zeros_like(logps)), loss), per_token
        with torch.enable_grad():
            logps, entropies = logps.clone().requires_grad_(), entropies.clone().requires_grad_()
            per_token = self._call(logps, entropies)
            loss = (self.weights * per_token).sum()
            if not loss.requires_grad:
                raise ValueError(
                    "objective: expected a loss that depends on tokens.logps or tokens.entropies"
                )
            _check_leaves(loss, logps, entropies)
            d_logp, d_entropy = torch.autograd.grad(loss, (logps, entropies), allow_unused=True)
        coefficients = Coefficients(
            torch.zeros_like(logps) if d_logp is None else d_logp, d_entropy
        )
        result = Evaluation(loss.detach(), coefficients, loss.detach())
        return result, per_token.detach()

    def _call(self, logps: Tensor, entropies: Tensor) -> Tensor:
        layout, tokens = self.tokens.layout, self.tokens

        def shaped(x: Tensor) -> Tensor:
            return layout.dense(x) if self.couples_tokens else x

        def optional(x: Tensor | None) -> Tensor | None:
            return None if x is None else shaped(x)

        places = {"index": layout.positions, "sequence": layout.sequence, "position": layout.column}
        old = logps.detach() if tokens.old_per_token_logps is None else tokens.old_per_token_logps
        inputs = TokenInputs(
            logps=shaped(logps),
            entropies=shaped(entropies),
            mask=shaped(torch.ones_like(logps, dtype=torch.bool)),
            advantages=shaped(tokens.advantages),
            old_per_token_logps=shaped(old),
            ref_per_token_logps=optional(tokens.ref_per_token_logps),
            sampling_per_token_logps=optional(tokens.sampling_per_token_logps),
            importance_sampling_ratio=optional(tokens.importance_sampling_ratio),
            **{
                name: shaped(x if self._chosen is None else x[self._chosen])
                for name, x in places.items()
            },
        )
        try:
            per_token = self.function(inputs)
        except (TypeError, AttributeError) as error:
            absent = _absent_reads(self.function, inputs) if "NoneType" in str(error) else []
            if not absent:
                raise
            raise ValueError(
                f"objective: expected {', '.join(absent)} beside the loss's other arguments, since it reads "
                f"{', '.join(f'tokens.{name}' for name in absent)}, got None"
            ) from error
        except (RuntimeError, IndexError) as error:
            if self.couples_tokens:
                raise
            raise ValueError(
                f"objective: expected a function of {len(logps)} tokens, since it is declared token_level and gets "
                "some of the counted tokens, (n,), at a time; of the caller's tensors take extra.flatten()"
                f"[tokens.index], (B,)[tokens.sequence] or (T,)[tokens.position]; got an error: {error}"
            ) from error
        if not isinstance(per_token, Tensor) or per_token.shape != inputs.logps.shape:
            got = (
                tuple(per_token.shape)
                if isinstance(per_token, Tensor)
                else type(per_token).__name__
            )
            raise ValueError(
                f"objective: expected a per-token loss of the shape of tokens.logps = {tuple(inputs.logps.shape)}, "
                f"got {got}"
            )
        return per_token[layout.sequence, layout.column] if self.couples_tokens else per_token


def _check_leaves(loss: Tensor, *inputs: Tensor) -> None:
    """Raise ValueError if `loss` depends on a tensor that trains but `inputs`: it would get no gradient."""
    left, seen = [loss.grad_fn], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not any(leaf is x for x in inputs):
            raise ValueError(
                "objective: expected no tensor that trains but tokens.logps and tokens.entropies, got one of the "
                f"shape {tuple(leaf.shape)}, which would get no gradient here: detach it, or make the loss from the "
                "log-probabilities of linear_logprob"
            )
        left += [x for x, _ in node.next_functions]


def _absent_reads(function: PerTokenLoss, inputs: TokenInputs) -> list[str]:
    """Return the names of the absent inputs that `function` reads; it failed on `inputs`, and is run again to see."""
    read: dict[str, None] = {}

    class Watched(TokenInputs):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if value is None:
                read[name] = None
            return value

    with suppress(TypeError, AttributeError):
        function(Watched(**{x.name: getattr(inputs, x.name) for x in fields(TokenInputs)}))
    return [*read]


def _difference(x: Tensor, y: Tensor, every: Tensor) -> Tensor:
    """Return the largest distance () of x from y (m,), relative to y or to the mean of `every`; NaN equals NaN."""
    size = torch.maximum(y.abs(), every.abs().nan_to_num(0.0, 0.0, 0.0).mean())
    same = (x == y) | (x.isnan() & y.isnan())
    return torch.where(same, 0.0, ((x - y).abs() / size).nan_to_num(torch.inf)).max()
