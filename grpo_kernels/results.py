"""Results of calls, registered as pytrees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from grpo_kernels.base.checks import did_you_mean, listed, no_attribute
from grpo_kernels.base.tensors import extreme

_NO_KL = "; the loss has a KL term only with beta > 0"


class Metrics(Mapping[str, Tensor]):
    """Metrics of a loss: a mapping from names to 0-d tensors, without gradient.

    ::

        out.metrics["entropy"].item()
        wandb.log(out.metrics.floats())                # all of them, in one wait for the device
        Metrics.merge([a.metrics, b.metrics])          # of micro-batches

    docs/troubleshooting.md lists them. As in TRL, ``policy_loss`` is the loss with its KL term, but
    without the entropy bonus. A mean over no tokens is 0.

    Attributes:
        pairs: name -> (sum, count), each a 0-d tensor. Minima and maxima have no pair:
            ``clip_ratio/low_min`` and ``clip_ratio/high_max`` (over the sequences), and
            ``sampling/.../min`` and ``max``. The pair of ``policy_loss`` is (loss, 1): if you sum
            pairs, every call has equal weight. `merge` weights each call as the loss does.
        sequences: number of sequences.
        loss_over: ``"sequences"`` or ``"tokens"`` if the loss is a mean over the call's sequences
            or tokens; ``"nothing"`` if the normalizer comes from outside the call. The loss of a
            batch is then the sum over its calls.
    """

    def __init__(
        self,
        pairs: Mapping[str, Any],
        extremes: dict[str, Tensor] | None = None,
        *,
        sequences: int = 0,
        loss_over: str = "nothing",
    ) -> None:
        """Store `pairs`, and minima and maxima in `extremes`.

        If `extremes` is None, `pairs` maps names to means: Lightning's Fabric passes such a mapping
        when it copies a mapping by ``type(x)(items)``.
        """
        self._lost = extremes is None
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {} if extremes is None else {**pairs}
        self._extremes: dict[str, Tensor] = {**pairs} if extremes is None else extremes
        self.sequences, self.loss_over = sequences, loss_over

    @property
    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Name -> (sum, count), to sum over ranks."""
        if self._lost:
            raise RuntimeError(
                "metrics: expected the loss's own metrics, got a copy of their means, made by a "
                "wrapper of the module (Lightning's Fabric): return out.metrics.pairs beside the "
                "loss from the module's forward"
            )
        return self._pairs

    @classmethod
    def merge(cls, parts: Iterable[Metrics]) -> Metrics:
        """Merge the metrics of micro-batches into those of a single call on the whole batch.

        ``policy_loss`` is averaged as the loss is: over sequences if its `loss_type` averages over
        sequences or divides by their number, else over counted tokens. If ``num_items_in_batch``
        divides the loss, the losses of the parts are added.

        Raises:
            TypeError, ValueError: `parts` is empty, contains objects that are not `Metrics`, or
                mixes metrics of different losses.
        """
        given: Any = parts
        if isinstance(given, Metrics):
            raise TypeError("parts: expected a list of the metrics of calls, got Metrics alone")
        parts = given = [*given]
        for part in given:
            if not isinstance(part, Metrics):
                hint = "; pass its metrics" if hasattr(part, "metrics") else ""
                got = f"{type(part).__name__}{hint}"
                raise TypeError(f"parts: expected the metrics of calls, got {got}")
        kinds = {(*part, part.loss_over) for part in parts}
        if len(kinds) != 1:
            raise ValueError(f"parts: expected the metrics of one loss, got those of {len(kinds)}")
        first, sequences = parts[0], [part.sequences for part in parts]
        pairs: dict[str, Any] = {}
        for name in first.pairs:
            stacked = torch.stack([torch.stack(part.pairs[name]) for part in parts])
            pairs[name] = stacked.sum(dim=0).unbind()
        losses = torch.stack([part["policy_loss"] for part in parts])
        weights = torch.ones_like(losses)
        if first.loss_over == "sequences":
            weights = torch.stack([torch.full_like(losses[0], n) for n in sequences])
        elif first.loss_over == "tokens":
            weights = torch.stack([part.pairs["advantages/mean"][1] for part in parts]).to(losses)
        loss = (losses * weights).sum()
        if first.loss_over != "nothing":
            loss = loss / weights.sum().clamp(min=1)
        pairs["policy_loss"] = loss, torch.ones_like(loss)
        extremes = {}
        for name in first._extremes:
            found = torch.stack([part[name] for part in parts])
            extremes[name] = extreme(found, largest=name.endswith("max"))
        return cls(pairs, extremes, sequences=sum(sequences), loss_over=first.loss_over)

    def floats(self) -> dict[str, float]:
        """Convert the metrics to numbers, for a logger. The host waits for the device once."""
        return dict(zip(self, torch.stack([*self.values()]).tolist(), strict=True))

    def with_pairs(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> Metrics:
        """Copy these metrics, with `pairs` in place of their own."""
        return Metrics(pairs, self._extremes, sequences=self.sequences, loss_over=self.loss_over)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._extremes:
            return self._extremes[name]
        if name not in self._pairs:
            hint = _NO_KL if name == "kl" else did_you_mean(str(name), self)
            raise KeyError(f"metrics: expected one of {', '.join(self)}, got {name!r}{hint}")
        total, count = self._pairs[name]
        return total / count.clamp(min=1)

    if not TYPE_CHECKING:  # else type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            if name in self.__dict__.get("_pairs", ()):
                raise AttributeError(f"Metrics has no {name}: read metrics[{name!r}]")
            raise AttributeError(f"'Metrics' object has no attribute {name!r}")

    def __contains__(self, name: object) -> bool:
        return name in self._pairs or name in self._extremes

    def __iter__(self) -> Iterator[str]:
        yield from self._pairs
        yield from self._extremes

    def __len__(self) -> int:
        return len(self._pairs) + len(self._extremes)

    def __repr__(self) -> str:
        try:
            values = [f"{name}={x:.4g}" for name, x in self.floats().items()] if self else []
        except Exception:  # mapped by a pytree function, without values
            values = [*self]
        return f"Metrics({', '.join(values)})"


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
                raise no_attribute(self, name, (), _NO_KL)
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
