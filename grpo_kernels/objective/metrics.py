"""Metrics of a loss, as means and as (sum, count) pairs that can be added over micro-batches and
ranks.

Everything stays on the device: nothing here waits for it. Names and definitions are TRL's, unless
docs/metrics.md says otherwise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from grpo_kernels.base.checks import did_you_mean
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.objective.losses import averaged_over, loss_type_of
from grpo_kernels.objective.policy import Evaluation
from grpo_kernels.tokens import Tokens


class Metrics(Mapping[str, Tensor]):
    """Metrics of a loss: name -> mean, a 0-d tensor, which is 0 if nothing was counted.

    Attributes:
        pairs: name -> (sum, count), 0-d tensors each. Minima and maxima have no pair:
            ``clip_ratio/low_min`` and ``clip_ratio/high_max`` (over the sequences), and
            ``sampling/.../min`` and ``max``. ``policy_loss`` has (loss, 1), so added pairs give
            its mean over the calls; `merge` instead weights calls by the loss's normalizer.
        sequences: number of sequences.
        loss_over: ``"sequences"`` or ``"tokens"`` if the loss is a mean over the call's sequences
            or tokens; ``"nothing"`` if the losses of a batch's calls add up.
    """

    def __init__(
        self,
        pairs: Mapping[str, Any],
        extremes: dict[str, Tensor] | None = None,
        *,
        sequences: int = 0,
        loss_over: str = "nothing",
    ) -> None:
        """Store `pairs`, and minima and maxima in `extremes`. Without `extremes`, `pairs` is name
        -> mean: Lightning's Fabric copies a mapping as ``type(x)(items)``."""
        self._lost = extremes is None
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {} if extremes is None else {**pairs}
        self._extremes: dict[str, Tensor] = {**pairs} if extremes is None else extremes
        self.sequences, self.loss_over = sequences, loss_over

    @property
    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        if self._lost:
            raise RuntimeError(
                "metrics: expected the loss's own metrics, got a copy of their means, made by a "
                "wrapper of the module (Lightning's Fabric): return out.metrics.pairs beside the "
                "loss from the module's forward"
            )
        return self._pairs

    @classmethod
    def merge(cls, parts: Iterable[Metrics]) -> Metrics:
        """Merge the metrics of micro-batches into the metrics of one call on all of them.

        ``policy_loss`` is merged by the loss's normalizer: a mean over sequences (grpo, sapo, gmpo,
        dr_grpo, luspo) weights each part by its sequences; a mean over tokens (bnpo; dapo, cispo
        and vespo without ``num_items_in_batch``) by its counted tokens. With the
        ``num_items_in_batch`` of the whole step, the parts add up.

        Raises:
            TypeError, ValueError: `parts` is empty, or holds other objects or metrics of different
                losses.
        """
        parts = list(parts)
        for part in parts:
            if not isinstance(part, Metrics):
                raise TypeError(f"parts: expected the metrics of calls, got {type(part).__name__}")
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
            weights = torch.stack([part.pairs["entropy"][1] for part in parts]).to(losses)
        loss = (losses * weights).sum()
        if first.loss_over != "nothing":
            loss = loss / weights.sum().clamp(min=1)
        pairs["policy_loss"] = loss, torch.ones_like(loss)
        extremes = {}
        for name in first._extremes:
            found = torch.stack([part[name] for part in parts])
            extremes[name] = _extreme(found, largest=name.endswith("max"))
        return cls(pairs, extremes, sequences=sum(sequences), loss_over=first.loss_over)

    def floats(self) -> dict[str, float]:
        """Return the metrics as numbers, for a logger. Waits for the device once."""
        return dict(zip(self, torch.stack([*self.values()]).tolist(), strict=True))

    def joined(self, more: Mapping[str, tuple[Tensor, Tensor]]) -> Metrics:
        """Return these metrics with `more` pairs."""
        pairs = {**self.pairs, **more}
        return Metrics(pairs, self._extremes, sequences=self.sequences, loss_over=self.loss_over)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._extremes:
            return self._extremes[name]
        if name not in self._pairs:
            got = f"{name!r}{did_you_mean(str(name), self)}"
            raise KeyError(f"metrics: expected one of {', '.join(self)}; got {got}")
        total, count = self._pairs[name]
        return total / count.clamp(min=1)

    def __contains__(self, name: object) -> bool:
        return name in self._pairs or name in self._extremes

    def __iter__(self) -> Iterator[str]:
        yield from self._pairs
        yield from self._extremes

    def __len__(self) -> int:
        return len(self._pairs) + len(self._extremes)

    def __repr__(self) -> str:
        return f"Metrics({', '.join(self)})"


def _flatten(metrics: Metrics) -> tuple[list[Any], tuple[Any, ...]]:
    facts = metrics.sequences, metrics.loss_over, metrics._lost
    return [metrics._pairs, metrics._extremes], facts


def _flatten_with_keys(metrics: Metrics) -> tuple[list[tuple[pytree.KeyEntry, Any]], Any]:
    children, facts = _flatten(metrics)
    names = ("pairs", "extremes")
    return [(pytree.MappingKey(x), y) for x, y in zip(names, children, strict=True)], facts


def _unflatten(children: Iterable[Any], facts: tuple[Any, ...]) -> Metrics:
    (pairs, extremes), (sequences, loss_over, lost) = children, facts
    if lost:
        return Metrics(extremes)
    return Metrics(pairs, extremes, sequences=sequences, loss_over=loss_over)


pytree.register_pytree_node(
    Metrics,
    _flatten,
    _unflatten,
    serialized_type_name="grpo_kernels.Metrics",
    to_dumpable_context=lambda facts: facts,
    from_dumpable_context=tuple,  # JSON has lists
    flatten_with_keys_fn=_flatten_with_keys,
)


def loss_metrics(
    config: LossConfig,
    tokens: Tokens,
    entropies: Tensor,
    evaluation: Evaluation,
    with_grad: Tensor,
    *,
    num_items: bool,
) -> Metrics:
    """Return the metrics of one loss, whose backward has products for `with_grad` () tokens.

    `num_items` is True if ``num_items_in_batch`` was given. Means are over the counted tokens, or
    over the sequences if there is one value per sequence. A sequence without a counted token has
    ratio 1. Sums over the tokens are taken once, at the end: one for all numbers, one for all
    flags.
    """
    layout, terms, n = tokens.layout, evaluation.terms, len(tokens)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    summed: dict[str, Tensor] = {}  # (n,) each
    extremes: dict[str, Tensor] = {}

    @functools.cache
    def number(x: float) -> Tensor:  # on the device, (), one tensor per value
        return entropies.new_full((), x)

    def over_tokens(name: str, x: Tensor) -> None:
        summed[name] = x
        pairs[name] = (x, number(n))  # keeps the place in the order

    def over_sequences(name: str, x: Tensor) -> None:
        pairs[name] = (x.to(entropies.dtype).sum(), number(layout.batch))

    def shared(x: Tensor, empty: float = 0.0) -> Tensor:  # shared by a sequence's tokens -> (B,)
        of_sequence = entropies.new_full((layout.batch,), empty)
        of_sequence[layout.sequence] = x.to(of_sequence.dtype)
        return of_sequence

    def mean_of(name: str, x: Tensor, per_sequence: bool, empty: float = 0.0) -> None:
        if per_sequence:
            over_sequences(name, shared(x, empty))
        else:
            over_tokens(name, x)

    pairs["policy_loss"] = (evaluation.policy_loss, number(1))
    over_tokens("entropy", entropies)
    over_tokens("advantages/mean", tokens.advantages)
    over_tokens("advantages/zero", tokens.advantages == 0)
    pairs["rows/projected"] = (number(n), number(math.prod(layout.shape)))
    pairs["rows/gradient"] = (with_grad.to(entropies.dtype), number(n))
    ratio, per_sequence = tokens.unexpanded_ratio, tokens.sequence_ratio is not None
    gap = None if terms is None else terms.sampling_difference
    if terms is not None and terms.kl is not None:
        over_tokens("kl", terms.kl)
    if terms is not None and terms.importance_sampling_ratio is not None:
        ratio = terms.importance_sampling_ratio
    if gap is not None:
        per_sequence = config.sampling_ratio_is_per_sequence
    if ratio is not None:
        (over_sequences if per_sequence else over_tokens)("importance_sampling_ratio", ratio)
    if terms is not None and terms.on_policy_keep is not None:
        over_tokens("off_policy_masked", ~terms.on_policy_keep)
    if tokens.sampling_per_token_logps is not None:
        over_tokens("sampling_unscored", torch.isnan(tokens.sampling_per_token_logps))
    if gap is not None and ratio is not None:
        gap, missing = gap.abs(), torch.isnan(gap)
        scored = (~missing).sum(dtype=gap.dtype)
        name = "sampling/sampling_logp_difference"
        pairs[f"{name}/mean"] = (torch.where(missing, 0.0, gap).sum(), scored)
        extremes[f"{name}/max"] = _extreme(gap, largest=True)
        for least in ("min", "max"):
            name = f"sampling/importance_sampling_ratio/{least}"
            extremes[name] = _extreme(ratio, largest=least == "max")

    if terms is not None:
        loss_type, ratios = loss_type_of(config), torch.exp(terms.log_ratio)
        of_level = loss_type.takes_level
        by_sequence = config.importance_sampling_level == "sequence"
        # with one ratio and one advantage per sequence, TRL counts clipped sequences, else tokens
        once = by_sequence and of_level and tokens.advantages_per_sequence
        mean_of("ratio", ratios, by_sequence or not of_level, empty=1.0)
        if terms.phi is not None:
            mean_of("vespo/phi_seq_mean", terms.phi, tokens.advantages_per_sequence, empty=1.0)
        if loss_type.capped is not None:
            capped = loss_type.capped(config, ratios, tokens.advantages)
            mean_of("cispo_clip_ratio", capped, once)
        if loss_type.clipped is not None:
            both = ratios, terms.token_log_ratio
            low, high = loss_type.clipped(config, *both, tokens.advantages)
            mean_of("clip_ratio/low_mean", low, once)
            mean_of("clip_ratio/high_mean", high, once)
            mean_of("clip_ratio/region_mean", low | high, once)
            if once:
                shares = [shared(low), shared(high)]
            else:  # shares of each sequence's tokens; exact, whatever the order of the sums
                ones = torch.stack([low, high], dim=1).to(entropies.dtype)
                counts = ones.new_zeros(layout.batch, 2).index_add_(0, layout.sequence, ones)
                shares = [x / layout.lengths for x in counts.unbind(1)]
            extremes["clip_ratio/low_min"] = _extreme(shares[0], largest=False)
            extremes["clip_ratio/high_max"] = _extreme(shares[1], largest=True)

    for flags in (False, True):
        summands = {name: x for name, x in summed.items() if (x.dtype == torch.bool) == flags}
        if summands:
            sums = torch.stack([*summands.values()]).sum(dim=1, dtype=entropies.dtype)
            pairs |= {k: (x, pairs[k][1]) for k, x in zip(summands, sums.unbind(), strict=True)}
    loss_over = averaged_over(config, num_items=num_items)
    return Metrics(pairs, extremes, sequences=layout.batch, loss_over=loss_over)


def _extreme(x: Tensor, *, largest: bool) -> Tensor:
    """The largest or smallest value that is not NaN; NaN if there is none."""
    if x.numel() == 0:
        return x.new_full((), torch.nan)
    missing = torch.isnan(x)
    filled = x.masked_fill(missing, -torch.inf if largest else torch.inf)
    return (filled.amax() if largest else filled.amin()).masked_fill(missing.all(), torch.nan)
