"""Metrics of a loss as means and as (sum, count) pairs, so that micro-batches and ranks can be added up.

`measure` computes them. Everything stays on the device: nothing here waits for it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor


class Metrics(Mapping[str, Tensor]):
    """Name -> mean (a 0-d tensor); 0 where nothing was counted.

    Attributes:
        pairs: name -> (sum, count), 0-d tensors each. Smallest and largest values have no pair:
            ``clip_ratio/low_min`` and ``clip_ratio/high_max``, of the sequences, and ``sampling/.../min`` and ``max``.
            ``policy_loss`` has (loss, 1): added pairs give its mean over the calls. `merge` weighs by the normaliser.
        sequences: number of sequences.
        loss_over: ``"sequences"``, ``"tokens"`` or ``"nothing"``, see `normaliser.averaged_over`.
    """

    def __init__(
        self,
        pairs: Mapping[str, Any],
        extremes: dict[str, Tensor] | None = None,
        *,
        sequences: int = 0,
        loss_over: str = "nothing",
    ) -> None:
        """Without `extremes`, `pairs` is name -> mean: Lightning's Fabric copies a mapping as ``type(x)(items)``."""
        self._lost = extremes is None
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {} if extremes is None else {**pairs}
        self._extremes: dict[str, Tensor] = {**pairs} if extremes is None else extremes
        self.sequences, self.loss_over = sequences, loss_over

    @property
    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        if self._lost:
            raise RuntimeError(
                "metrics: expected those that the loss made, got a copy that a wrapper of the module (Lightning's "
                "Fabric) made of their means: return out.metrics.pairs beside the loss from the module's forward"
            )
        return self._pairs

    @classmethod
    def merge(cls, parts: Iterable[Metrics]) -> Metrics:
        """Merge the metrics of micro-batches into those that one call on all of them would give.

        ``policy_loss`` goes by its normaliser. A mean over sequences (grpo, sapo, gmpo, dr_grpo, luspo) weighs each
        part by its sequences, a mean over tokens (bnpo; dapo, cispo and vespo without ``num_items_in_batch``) by its
        counted tokens; with ``num_items_in_batch``, that of the whole step, the parts add up.

        Raises:
            TypeError, ValueError: `parts` are no metrics, none at all, or those of different losses.
        """
        parts = list(parts)
        for part in parts:
            if not isinstance(part, Metrics):
                raise TypeError(f"parts: expected the metrics of calls, got {type(part).__name__}")
        kinds = {(*part, part.loss_over) for part in parts}
        if len(kinds) != 1:
            raise ValueError(f"parts: expected the metrics of one loss, got those of {len(kinds)}")
        first = parts[0]
        pairs = {name: _added([part.pairs[name] for part in parts]) for name in first.pairs}
        losses = torch.stack([part["policy_loss"] for part in parts])
        weights = torch.stack([part._loss_weight() for part in parts])
        loss = (losses * weights).sum()
        if first.loss_over != "nothing":
            loss = loss / weights.sum().clamp(min=1)
        pairs["policy_loss"] = loss, torch.ones_like(loss)
        extremes = {
            name: extreme(torch.stack([part[name] for part in parts]), largest=name.endswith("max"))
            for name in first._extremes
        }
        sequences = sum(part.sequences for part in parts)
        return cls(pairs, extremes, sequences=sequences, loss_over=first.loss_over)

    def floats(self) -> dict[str, float]:
        """Return the metrics as numbers, for a logger. Waits for the device, once."""
        return dict(zip(self, torch.stack([*self.values()]).tolist(), strict=True))

    def joined(self, more: Mapping[str, tuple[Tensor, Tensor]]) -> Metrics:
        """Return these metrics with `more` pairs."""
        pairs = {**self.pairs, **more}
        return Metrics(pairs, self._extremes, sequences=self.sequences, loss_over=self.loss_over)

    def _loss_weight(self) -> Tensor:
        loss = self["policy_loss"]
        if self.loss_over == "tokens":
            return self.pairs["entropy"][1].to(loss)
        return torch.full_like(loss, self.sequences if self.loss_over == "sequences" else 1)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._extremes:
            return self._extremes[name]
        if name not in self._pairs:
            raise KeyError(f"metrics: expected one of {', '.join(self._near(name))}; got {name!r}")
        total, count = self._pairs[name]
        return total / count.clamp(min=1)

    def _near(self, name: object) -> list[str]:
        """The names that may be meant, or all."""
        names = [*self]
        begin_so = [x for x in names if x.startswith(f"{name}/")]
        return begin_so or difflib.get_close_matches(str(name), names) or names

    def __contains__(self, name: object) -> bool:
        return name in self._pairs or name in self._extremes

    def __iter__(self) -> Iterator[str]:
        yield from self._pairs
        yield from self._extremes

    def __len__(self) -> int:
        return len(self._pairs) + len(self._extremes)

    def __repr__(self) -> str:
        return f"Metrics({', '.join(self)})"


class _Context(NamedTuple):
    """Facts about metrics besides their tensors."""

    pairs: tuple[str, ...]
    extremes: tuple[str, ...]
    sequences: int
    loss_over: str
    lost: bool


def _flatten(metrics: Metrics) -> tuple[list[Any], _Context]:
    pairs, extremes = metrics._pairs, metrics._extremes
    leaves = [*(x for pair in pairs.values() for x in pair), *extremes.values()]
    return leaves, _Context(
        (*pairs,), (*extremes,), metrics.sequences, metrics.loss_over, metrics._lost
    )


def _flatten_with_keys(metrics: Metrics) -> tuple[list[tuple[pytree.KeyEntry, Any]], _Context]:
    leaves, context = _flatten(metrics)
    keys = [*(f"{name}[{i}]" for name in context.pairs for i in range(2)), *context.extremes]
    return [(pytree.MappingKey(key), x) for key, x in zip(keys, leaves, strict=True)], context


def _unflatten(leaves: Iterable[Any], context: _Context) -> Metrics:
    values = iter(leaves)
    pairs = {name: (next(values), next(values)) for name in context.pairs}
    extremes = dict(zip(context.extremes, values, strict=True))
    if context.lost:
        return Metrics(extremes)
    return Metrics(pairs, extremes, sequences=context.sequences, loss_over=context.loss_over)


pytree.register_pytree_node(
    Metrics,
    _flatten,
    _unflatten,
    serialized_type_name="grpo_kernels.Metrics",
    to_dumpable_context=lambda context: context,
    from_dumpable_context=lambda x: _Context(
        tuple(x[0]), tuple(x[1]), *x[2:]
    ),  # JSON knows lists only
    flatten_with_keys_fn=_flatten_with_keys,
)


def _added(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    total, count = torch.stack([torch.stack(pair) for pair in pairs]).sum(dim=0).unbind()
    return total, count


def extreme(x: Tensor, *, largest: bool) -> Tensor:
    """The largest or smallest value that is not NaN; NaN if there is none."""
    if x.numel() == 0:
        return x.new_full((), torch.nan)
    missing = torch.isnan(x)
    filled = x.masked_fill(missing, -torch.inf if largest else torch.inf)
    return (filled.amax() if largest else filled.amin()).masked_fill(missing.all(), torch.nan)
