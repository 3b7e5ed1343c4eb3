"""Results of calls, registered as pytrees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch.utils._pytree as pytree
from torch import Tensor

from grpo_kernels.base.checks import no_attribute
from grpo_kernels.objective.metrics import Metrics


# not frozen: Lightning's Fabric copies what a module returns, and sets the copy's fields
@dataclass
class LossOutput:
    """Result of `grpo_loss`, `GRPOLoss`, `causal_lm_loss` and `policy_loss_from_logps`.

    Attributes:
        loss: 0-d, attached to the graph; fp32 (fp64 for fp64 inputs).
        logps: (B, T) or (N,) log-probabilities, detached, 0 where masked; in the dtype of `loss`.
        entropies: entropies in the same shape and dtype, detached, 0 where masked.
        metrics: `Metrics`: name -> mean; ``metrics.pairs`` holds name -> (sum, count).
        engine: name of the engine that served the call: an `EngineName`, ``"kept_sets"`` with
            `kept_ids`, or ``"given"`` from `policy_loss_from_logps`.
        backend: name of the backend that computed it: ``"cpp"``, ``"triton"`` or ``"torch"``;
            always ``"torch"`` with `kept_ids` or from `policy_loss_from_logps`.
    """

    loss: Tensor
    logps: Tensor
    entropies: Tensor
    metrics: Metrics
    engine: str
    backend: str

    if not TYPE_CHECKING:  # else type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            if name == "backward":
                raise AttributeError("LossOutput has no backward(): call out.loss.backward()")
            raise no_attribute(self, name, (x.name for x in fields(self)))


@dataclass
class Scores:
    """Results of `linear_logprob`, `linear_divergence`, `topk_divergence` and
    `completion_logprobs`.

    Results that you did not ask for are None. The others have the shape of the positions, in fp32
    (fp64 for fp64 inputs), and are 0 where masked.

    Attributes:
        logps: log-probabilities of the ids, differentiable.
        entropies: entropies of the distributions, differentiable.
        divergence: divergences from the teacher, differentiable.
        log_sum_sq_probs: log of sum_v p_v^2.
        mean_logits: mean of the logits over the vocabulary.
        is_top1: bool; True where the id has the largest logit.
        student_mass: the student's total probability of the teacher's ids.
        topk_logps: (..., K) log-probabilities of `topk_ids`, differentiable; -inf at padding.
    """

    # typed as Tensor, since callers read the results that they asked for

    logps: Tensor = None  # type: ignore[assignment]
    entropies: Tensor = None  # type: ignore[assignment]
    divergence: Tensor = None  # type: ignore[assignment]
    log_sum_sq_probs: Tensor = None  # type: ignore[assignment]
    mean_logits: Tensor = None  # type: ignore[assignment]
    is_top1: Tensor = None  # type: ignore[assignment]
    student_mass: Tensor = None  # type: ignore[assignment]
    topk_logps: Tensor = None  # type: ignore[assignment]

    @staticmethod
    def of(**results: Tensor | None) -> Scores:
        """Return the results that are not None."""
        return Scores(**{name: x for name, x in results.items() if x is not None})

    @property
    def given(self) -> dict[str, Tensor]:
        """The results that are not None, by name."""
        results = {name: getattr(self, name) for name in _OF_SCORES}
        return {name: x for name, x in results.items() if x is not None}

    def __getitem__(self, key: object) -> Tensor:
        """Raise TypeError: results are read by name."""
        names = ", ".join(f".{name}" for name in self.given)
        raise TypeError(f"Scores: expected a result by its name, {names}, got [{key!r}]")

    if not TYPE_CHECKING:  # else type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name, _OF_SCORES)

    def __repr__(self) -> str:
        return f"Scores({', '.join(f'{name}={x!r}' for name, x in self.given.items())})"


_OF_SCORES = [x.name for x in fields(Scores)]
_PLAIN = ("engine", "backend")  # fields that hold no tensors
_Context = tuple[tuple[str, ...], tuple[str, ...]]  # names of the leaves; values of `_PLAIN`


def _flatten(out: Any) -> tuple[list[Any], _Context]:
    values = {x.name: getattr(out, x.name) for x in fields(out)}
    leaves = {name: x for name, x in values.items() if x is not None and name not in _PLAIN}
    return [*leaves.values()], ((*leaves,), tuple(values[x] for x in _PLAIN if x in values))


def _flatten_with_keys(out: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], _Context]:
    leaves, context = _flatten(out)
    names = map(pytree.GetAttrKey, context[0])
    return [*zip(names, leaves, strict=True)], context


# DDP with static_graph=True silently drops the gradients of an output that is not a registered
# pytree.
def _register(kind: Any) -> None:
    def unflatten(leaves: Iterable[Any], context: _Context) -> Any:
        names, plain = context
        return kind(**dict(zip((*names, *_PLAIN), (*leaves, *plain), strict=False)))

    pytree.register_pytree_node(
        kind,
        _flatten,
        unflatten,
        serialized_type_name=f"grpo_kernels.{kind.__name__}",
        to_dumpable_context=lambda context: context,
        from_dumpable_context=lambda lists: tuple(map(tuple, lists)),
        flatten_with_keys_fn=_flatten_with_keys,
    )


_register(LossOutput)
_register(Scores)
