"""Results of calls, registered as pytrees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch.utils._pytree as pytree
from torch import Tensor

from grpo_kernels.base.checks import listed, no_attribute
from grpo_kernels.objective.metrics import NO_KL, Metrics


class _Output:
    """A call's results, which are read by name."""

    @property
    def given(self) -> dict[str, Any]:
        """The results that are not None, by name."""
        results = {x.name: getattr(self, x.name) for x in fields(self)}  # type: ignore[arg-type]
        return {name: x for name, x in results.items() if x is not None}

    def __getitem__(self, key: object) -> Tensor:
        """Raise TypeError: read results by name."""
        kind, names = type(self).__name__, ", ".join(f".{name}" for name in self.given)
        raise TypeError(f"{kind}: expected a result by its name, {names}, got [{key!r}]")

    if not TYPE_CHECKING:  # else type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name, (x.name for x in fields(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({listed(self.given.items())})"


# not frozen: Lightning's Fabric copies what a module returns, and sets the copy's fields
@dataclass(repr=False)
class LossOutput(_Output):
    """Result of `grpo_loss`, `GRPOLoss`, `causal_lm_loss` and `policy_loss_from_logps`.

    ::

        out.loss.backward()                   # the loss alone has a gradient
        wandb.log(out.metrics.floats())
        old_logps = out.logps.detach()        # for further updates with this batch

    Attributes:
        loss: a 0-d tensor, attached to the graph, in fp32 (fp64 for fp64 inputs).
        logps: (B, T) or (N,) log-probabilities in the dtype of `loss`, 0 where masked. A backward
            through them raises an error; to use them as constants, call ``.detach()``.
        entropies: entropies in the shape and dtype of `logps`, also without gradient. None only
            from `policy_loss_from_logps` without ``entropies=``. The annotation is Tensor because
            all other calls return one.
        metrics: `Metrics`, a mapping from names to means; ``metrics.pairs`` maps names to (sum,
            count).
        engine: name of the engine that ran the call: an `EngineName`, ``"kept_sets"`` with
            `kept_ids`, or ``"given"`` from `policy_loss_from_logps`.
        backend: name of the backend that computed the call: ``"cpp"``, ``"triton"`` or ``"torch"``;
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
            if name in self.__dict__.get("metrics", ()):
                raise AttributeError(f"LossOutput has no {name}: read out.metrics[{name!r}]")
            if name == "kl":
                raise no_attribute(self, name, (), NO_KL)
            return super().__getattr__(name)


@dataclass(repr=False)
class Scores(_Output):
    """Results per token of a call that returns log-probabilities or divergences.

    ::

        scores = causal_lm_logps(model, input_ids, attention_mask, completion_mask)
        scores.logps, scores.entropies  # (B, T) each

    What each call returns::

        linear_logps, causal_lm_logps           logps, entropies; what linear_logps is asked for
        linear_divergence, causal_lm_divergence  divergence, entropies, logps of the ids
        topk_divergence                          divergence, student_mass

    Results that you did not request are None. All other results have the shape of the positions,
    are in fp32 (fp64 for fp64 inputs), and are 0 where masked.

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


# DDP with static_graph=True silently drops the gradients of an output that is not a registered
# pytree.
def _register(kind: Any, names: Sequence[str]) -> None:
    """Register `kind`, whose attributes `names` have tensors unless they are None."""

    def flatten(out: Any) -> tuple[list[Any], Any]:
        children = {name: getattr(out, name) for name in names}
        children = {name: x for name, x in children.items() if x is not None}
        facts = tuple(item for item in vars(out).items() if item[0] not in children)
        return [*children.values()], ((*children,), facts)

    def flatten_with_keys(out: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], Any]:
        children, context = flatten(out)
        return [*zip(map(pytree.GetAttrKey, context[0]), children, strict=True)], context

    def unflatten(children: Iterable[Any], context: Any) -> Any:
        (names, facts), out = context, object.__new__(kind)
        vars(out).update({**dict(facts), **dict(zip(names, children, strict=True))})
        return out

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"grpo_kernels.{kind.__name__}",
        to_dumpable_context=lambda context: context,
        # JSON has lists
        from_dumpable_context=lambda x: (tuple(x[0]), tuple(map(tuple, x[1]))),
        flatten_with_keys_fn=flatten_with_keys,
    )


_register(LossOutput, ("loss", "logps", "entropies", "metrics"))
_register(Scores, [x.name for x in fields(Scores)])
_register(Metrics, ("_pairs", "_extremes"))
