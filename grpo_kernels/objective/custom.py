"""Custom losses: any torch function of per-token log-probabilities and entropies.

They run on the same engines as the built-in losses::

    @grpo_kernels.token_level
    def reinforce(tokens):
        return -tokens.advantages * tokens.logps

    out = grpo_kernels.grpo_loss(..., objective=reinforce)

The function returns a per-token loss. Autograd computes its coefficients, and the config's
``loss_type`` sets its normalizer. The function replaces the config's loss of a token, but may read
that loss and build on it::

    def with_penalty(tokens):
        return tokens.loss + 0.01 * tokens.logps.square()

A closure gives the function other tensors: ``extra.flatten()[tokens.index]`` reads a tensor `extra`
that is shaped like the ids.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.backends import Coefficients, RowStats
from grpo_kernels.base.checks import no_attribute, warn_once
from grpo_kernels.objective.config import check_loss_is_read, warn_of_loss
from grpo_kernels.objective.policy import Evaluation, MetricInputs, PolicyLoss, stats_of
from grpo_kernels.tokens import Tokens

OPTIONAL = ("ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")


@dataclass(frozen=True)
class TokenInputs:
    """The tensors that a custom objective reads, all with the shape of `logps`.

    For a `token_level` function, that shape is (n,), a chunk of the counted tokens. Otherwise it is
    (B, T), with 0 at masked positions; in a packed batch, T is the length of the longest sequence.
    Only `logps`, `entropies` and `loss` carry a gradient. A function that reads another tensor with
    a gradient, such as a parameter of your own, raises an error.

    Attributes:
        logps, entropies: the policy's log-probabilities and entropies, with gradient.
        mask: bool, True for tokens that count.
        advantages: the advantage of each token.
        old_per_token_logps: the caller's values; if the caller passes none, the current
            log-probabilities, held constant.
        ref_per_token_logps, sampling_per_token_logps, importance_sampling_ratio: the caller's
            values, or None.
        index: int64, the token's index in the caller's flattened batch, which has B * T positions
            (packed: N). ``extra.flatten()[tokens.index]`` reads a tensor shaped like the ids.
        sequence: int64, the index of the token's sequence, in [0, B): ``bonus[tokens.sequence]``
            reads a tensor (B,). Always index it: ``tokens.logps + bonus`` is silently wrong if B
            equals the number of columns or tokens; otherwise, it raises an error.
        position: int64, the token's index in its sequence, which is the column in a padded batch:
            ``bonus[tokens.position]`` reads a tensor (T,).
        loss: the config's own loss of each token, with its KL term, masks and importance sampling
            ratio, differentiable in `logps`. This loss is computed when you read it.
    """

    logps: Tensor
    entropies: Tensor
    mask: Tensor
    advantages: Tensor
    old_per_token_logps: Tensor
    ref_per_token_logps: Tensor | None
    sampling_per_token_logps: Tensor | None
    importance_sampling_ratio: Tensor | None
    # if absent, `logps` are a whole padded batch (B, T), or one sequence (n,)
    index: Tensor = field(default=None)  # type: ignore[assignment]
    sequence: Tensor = field(default=None)  # type: ignore[assignment]
    position: Tensor = field(default=None)  # type: ignore[assignment]
    _loss: Callable[[], Tensor] | None = field(default=None, init=False)  # set by `with_loss`
    _read: set[str] = field(default_factory=set, init=False)  # of `OPTIONAL`, what was read

    def __post_init__(self) -> None:
        places = torch.arange(self.logps.numel(), device=self.logps.device).view(self.logps.shape)
        columns = max(1, self.logps.shape[-1])
        defaults = {"index": places, "sequence": places // columns, "position": places % columns}
        for name, x in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, x)

    @property
    def loss(self) -> Tensor:
        if self._loss is None:
            raise ValueError(
                "tokens.loss: expected to be read from the argument of an objective, got "
                "TokenInputs from elsewhere"
            )
        return self._loss()

    if not TYPE_CHECKING:  # otherwise type checkers would accept any name

        def __getattribute__(self, name: str) -> Any:
            if name in OPTIONAL:
                self._read.add(name)
            return object.__getattribute__(self, name)

        def __getattr__(self, name: str) -> Any:
            if name in ("ratio", "log_ratio"):
                difference = "tokens.logps - tokens.old_per_token_logps"
                made = difference if name == "log_ratio" else f"({difference}).exp()"
                raise AttributeError(f"TokenInputs has no {name}: compute {made}")
            raise no_attribute(self, name, (*INPUTS, "loss"))

    def __repr__(self) -> str:
        shapes = ((name, getattr(self, name)) for name in INPUTS)
        shown = (f"{name}={tuple(x.shape)}" for name, x in shapes if x is not None)
        return f"TokenInputs({', '.join(shown)})"


_INDEX = (
    "; index your own tensors with extra.flatten()[tokens.index], (B,)[tokens.sequence] or "
    "(T,)[tokens.position]"
)
INPUTS = tuple(x.name for x in fields(TokenInputs) if x.init)
PerTokenLoss = Callable[[TokenInputs], Tensor]


def with_loss(inputs: TokenInputs, loss: Callable[[], Tensor]) -> TokenInputs:
    """Set the function that `inputs.loss` calls."""
    object.__setattr__(inputs, "_loss", loss)
    return inputs


def token_level(objective: PerTokenLoss) -> PerTokenLoss:
    """Declare that each token's loss depends on that token alone, so that one pass suffices.

    ::

        @token_level
        def penalized(tokens):
            return tokens.loss + 0.01 * tokens.logps.square()

    A call evaluates the function on chunks of tokens for the gradient, and on all tokens for the
    loss. So the function must be deterministic and use nothing but its argument. On a CPU, a call
    raises an error if the gradient by chunks differs from that of all tokens at once. A call with
    one chunk, or on another device, does not notice a difference. To check your function on any
    device, call `grpo_kernels.testing.check_token_level` in a test.

    Args:
        objective: a function of `TokenInputs` with n tokens that returns their losses, (n,).

    Raises:
        TypeError: `objective` is not a function.
    """
    if not callable(objective):
        raise TypeError(
            f"objective: expected a function of TokenInputs, got {type(objective).__name__}"
        )

    @functools.wraps(objective)
    def declared(tokens: TokenInputs) -> Tensor:
        return objective(tokens)

    declared.token_level = True  # type: ignore[attr-defined]
    return declared


def _declared(function: Any, name: str, default: bool) -> bool:
    """What `function`, or the function inside a ``functools.partial``, declares."""
    while isinstance(function, functools.partial):
        function = function.func
    return bool(getattr(function, name, default))


class CustomLoss:
    """A loss that calls a user's function, used instead of `PolicyLoss`."""

    is_expected = False
    live = None  # any token may have a gradient

    def __init__(
        self,
        function: PerTokenLoss,
        tokens: Tokens,
        config_loss: PolicyLoss,
        chosen: Tensor | None = None,
        *,
        has_entropies: bool = True,
    ) -> None:
        """Take `tokens`, and the config's loss of them.

        `chosen` (n,) are the indices of the tokens in the layout; None means all of it. Unless the
        call `has_entropies`, the function gets None.
        """
        self.function, self.tokens, self.config_loss = function, tokens, config_loss
        self.config, self.loss_over = config_loss.config, config_loss.loss_over
        self._chosen, self.has_entropies = chosen, has_entropies
        # from the chunks so far, (n,) each, by name; on a CPU alone
        self._chunk_coefficients: dict[str, Tensor] = {}
        self.is_coupled = not _declared(function, "token_level", False)

    @cached_property
    def has_entropy_gradient(self) -> bool:
        """True if the loss depends on the entropies, found by a call on zeros.

        False if the function declares ``uses_entropies = False``.
        """
        if not _declared(self.function, "uses_entropies", True):
            return False
        nothing = torch.zeros_like(self.tokens.advantages)
        return self.evaluate(stats_of(nothing, nothing)).coefficients.d_entropy is not None

    @property
    def one_coefficient(self) -> bool:
        return not self.has_entropy_gradient

    def coefficients_at(self, index: Tensor, stats: RowStats) -> Coefficients:
        """Compute the coefficients of the tokens at `index` (m,) from these tokens alone."""
        chunk = CustomLoss(self.function, self.tokens.at(index), self.config_loss.at(index), index)
        coefficients = chunk.evaluate(stats).coefficients
        if index.device.type == "cpu":  # elsewhere, `check_chunks` would wait for the device
            coefficients.put(index, self._chunk_coefficients, len(self.tokens))
        return coefficients

    def check_chunks(self, coefficients: Coefficients) -> None:
        """Raise if the coefficients from chunks differ from `coefficients`, of all tokens at once.

        Raises:
            ValueError: the function is not what `token_level` declares.
        """
        rounding = 1e-6 * self.config_loss.token_weights.sum()
        for name, from_chunks in self._chunk_coefficients.items():
            whole = getattr(coefficients, name)
            if whole is None:
                continue
            error = (from_chunks - whole).abs().sum()
            finite = whole.isfinite().all()  # else the loss of all tokens has no gradient either
            if bool(finite & ~(error <= 1e-3 * whole.abs().sum() + rounding)):
                raise ValueError(
                    "objective: expected a loss of each token alone, since it is declared "
                    "token_level, got other gradients from some tokens at a time than from all; "
                    "leave token_level out. grpo_kernels.testing.check_token_level tests a function"
                )

    def fused_loss(self) -> None:
        """None: a row kernel cannot call the user's function."""
        return None

    def evaluate(self, stats: RowStats) -> Evaluation:
        """Compute the loss and its gradient, by autograd, from the statistics of all tokens.

        Raises:
            ValueError: the function does not return a per-token loss.
        """
        logps, entropies, weights = stats.logps, stats.entropies, self.config_loss.token_weights
        if torch.is_inference_mode_enabled():  # no gradient can follow
            per_token, metric_inputs = self._call(logps, entropies)
            loss = (weights * per_token).sum()
            return Evaluation(loss, Coefficients(torch.zeros_like(logps)), loss, metric_inputs)
        with torch.enable_grad():
            logps, entropies = logps.clone().requires_grad_(), entropies.clone().requires_grad_()
            per_token, metric_inputs = self._call(logps, entropies)
            loss = (weights * per_token).sum()
            if not loss.requires_grad:
                expected = "a loss that depends on tokens.logps or tokens.entropies"
                raise ValueError(f"objective: expected {expected}")
            _check_leaves(loss, logps, entropies)
            d_logp, d_entropy = torch.autograd.grad(loss, (logps, entropies), allow_unused=True)
        d_logp = torch.zeros_like(logps) if d_logp is None else d_logp
        loss = loss.detach()
        return Evaluation(loss, Coefficients(d_logp, d_entropy), loss, metric_inputs)

    def _call(self, logps: Tensor, entropies: Tensor) -> tuple[Tensor, MetricInputs | None]:
        """Call the function; return its loss of each token, (n,), and inputs of the metrics.

        The latter belong to the config's own loss; None if the function does not read that loss.
        """
        layout, tokens, is_coupled = self.tokens.layout, self.tokens, self.is_coupled

        def shaped(x: Any) -> Any:  # a copy: the function may write into it
            if x is None:
                return None
            return layout.dense(x) if is_coupled else x.clone()

        old = logps.detach() if tokens.old_per_token_logps is None else tokens.old_per_token_logps
        optional = {name: shaped(getattr(tokens, name)) for name in OPTIONAL}
        visible_entropies: Any = shaped(entropies) if self.has_entropies else None
        places = {"index": layout.positions, "sequence": layout.sequence, "position": layout.column}
        if self._chosen is not None:
            places = {name: x[self._chosen] for name, x in places.items()}
        read_inputs: list[MetricInputs] = []  # of the config's loss, once the function reads it

        visible_logps = shaped(logps)
        inputs = TokenInputs(
            logps=visible_logps,
            entropies=visible_entropies,
            mask=shaped(torch.ones_like(logps, dtype=torch.bool)),
            advantages=shaped(tokens.advantages),
            old_per_token_logps=shaped(old),
            **optional,
            **{name: shaped(x) for name, x in places.items()},
        )

        def rows(x: Tensor) -> Tensor:
            return x[layout.sequence, layout.column] if is_coupled else x

        @functools.cache
        def config_loss_per_token() -> Tensor:  # differentiable in the function's own `logps`
            # not `inputs`, which holds this function: a cycle would keep all these tensors
            losses, metric_inputs = self.config_loss.per_token_loss(
                rows(visible_logps), entropies, token_level=not is_coupled
            )
            read_inputs.append(metric_inputs)
            return shaped(losses)

        try:
            per_token = self.function(with_loss(inputs, config_loss_per_token))
        except (TypeError, AttributeError) as error:
            may_be_absent = {**optional, "entropies": visible_entropies}
            absent = ", ".join(name for name, x in may_be_absent.items() if x is None)
            if "NoneType" not in str(error) or not absent:
                raise
            raise type(error)(f"{error}; the call was given no {absent}") from error
        except (RuntimeError, IndexError) as error:
            if is_coupled and not re.search("size of tensor|shape|broadcast", str(error)):
                raise
            expected = f"a function of tokens.logps of shape {tuple(visible_logps.shape)}"
            if not is_coupled:
                expected = f"a function of {len(logps)} tokens, since it is declared token_level "
                expected += "and gets some of the counted tokens, (n,), at a time"
            raise ValueError(
                f"objective: expected {expected}{_INDEX}; got an error: {error}"
            ) from error
        if not isinstance(per_token, Tensor) or per_token.shape != inputs.logps.shape:
            is_tensor = isinstance(per_token, Tensor)
            got = tuple(per_token.shape) if is_tensor else type(per_token).__name__
            raise ValueError(
                "objective: expected a per-token loss of the shape of tokens.logps = "
                f"{tuple(inputs.logps.shape)}, got {got}{_INDEX if is_tensor else ''}"
            )
        if not read_inputs:
            check_loss_is_read(self.config)
            for name, x in optional.items():
                if x is not None and name not in inputs._read and self._chosen is None:
                    warn_once(
                        f"{name}: not used by the objective, which replaces the config's loss; "
                        f"read tokens.{name} there, or leave it out"
                    )
            return rows(per_token), None
        if self._chosen is None:
            warn_of_loss(self.config, tokens)
        return rows(per_token), read_inputs[0]


def _check_leaves(loss: Tensor, *inputs: Tensor) -> None:
    """Raise ValueError if `loss` depends on a trained tensor other than `inputs`.

    Such a tensor would get no gradient.
    """
    left, seen = [loss.grad_fn], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not any(leaf is x for x in inputs):
            raise ValueError(
                "objective: expected no tensor that trains but tokens.logps and tokens.entropies, "
                f"got one of shape {tuple(leaf.shape)}, which would get no gradient here: "
                "detach it, or compute the loss from the log-probabilities of linear_logps"
            )
        left += [x for x, _ in node.next_functions]
