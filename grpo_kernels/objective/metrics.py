"""What happened in a loss, as means and as (sum, count) pairs, so that micro-batches and ranks can be added up.

Everything stays on the device: nothing here waits for it. Names and definitions are TRL's, except where said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from grpo_kernels.base.distributed import gather_stacked
from grpo_kernels.batch.tokens import Layout, Tokens
from grpo_kernels.config import CLIPPED_LOSS_TYPES, LossConfig
from grpo_kernels.objective.evaluation import Evaluation, Terms
from grpo_kernels.objective.normaliser import averaged_over

_SAMPLING_EXTREMES = (
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/max",
)


class Metrics(Mapping[str, Tensor]):
    """Name -> mean (a 0-d tensor); 0 where nothing was counted.

    Attributes:
        pairs: name -> (sum, count), 0-d tensors each. What is a smallest or a largest value has no pair:
            ``clip_ratio/low_min`` and ``clip_ratio/high_max``, of the sequences, and ``sampling/.../min`` and ``max``.
            ``policy_loss`` has (loss, 1): pairs that are added up give its mean over the calls. `merge` knows better.
        sequences: how many there were.
        loss_over: what the policy loss is a mean over, see `aggregate.averaged_over`.
    """

    def __init__(
        self,
        pairs: Mapping[str, Any],
        extremes: dict[str, Tensor] | None = None,
        *,
        sequences: int = 0,
        loss_over: str = "nothing",
    ) -> None:
        """`pairs` alone is name -> value: so Lightning's Fabric and others copy a mapping, ``type(x)(its items)``."""
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
        """The metrics of one step from those of its micro-batches, as one call on all of them would have them.

        ``policy_loss`` goes by the normaliser. A mean over sequences (grpo, sapo, gmpo, dr_grpo, luspo) weighs each
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
            name: _extreme(torch.stack([part[name] for part in parts]), largest=name.endswith("max"))
            for name in first._extremes
        }
        sequences = sum(part.sequences for part in parts)
        return cls(pairs, extremes, sequences=sequences, loss_over=first.loss_over)

    def _loss_weight(self) -> Tensor:
        loss = self["policy_loss"]
        if self.loss_over == "tokens":
            return self.pairs["entropy"][1].to(loss)
        return torch.full_like(loss, self.sequences if self.loss_over == "sequences" else 1)

    def stacked(self) -> tuple[Tensor, Tensor]:
        """The pairs (K, 2) and the extremes (E,), each in one tensor."""
        pairs = torch.stack([x for pair in self.pairs.values() for x in pair]).view(-1, 2)
        return pairs, torch.stack([*self._extremes.values()]) if self._extremes else pairs.new_empty(0)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._extremes:
            return self._extremes[name]
        total, count = self._pairs[name]
        return total / count.clamp(min=1)

    def __iter__(self) -> Iterator[str]:
        yield from self._pairs
        yield from self._extremes

    def __len__(self) -> int:
        return len(self._pairs) + len(self._extremes)

    def __repr__(self) -> str:
        return f"Metrics({', '.join(self)})"


class _Context(NamedTuple):
    """What metrics are besides their tensors."""

    pairs: tuple[str, ...]
    extremes: tuple[str, ...]
    sequences: int
    loss_over: str
    lost: bool


def _flatten(metrics: Metrics) -> tuple[list[Any], _Context]:
    pairs, extremes = metrics._pairs, metrics._extremes
    leaves = [*(x for pair in pairs.values() for x in pair), *extremes.values()]
    return leaves, _Context((*pairs,), (*extremes,), metrics.sequences, metrics.loss_over, metrics._lost)


def _flatten_with_keys(metrics: Metrics) -> tuple[list[tuple[pytree.KeyEntry, Any]], _Context]:
    leaves, context = _flatten(metrics)
    keys = [*(f"{name}[{i}]" for name in context.pairs for i in range(2)), *context.extremes]
    return [(pytree.MappingKey(key), x) for key, x in zip(keys, leaves, strict=True)], context


def _unflatten(leaves: Iterable[Any], context: _Context) -> Metrics:
    found = iter(leaves)
    pairs = {name: (next(found), next(found)) for name in context.pairs}
    extremes = dict(zip(context.extremes, found, strict=True))
    if context.lost:
        return Metrics(extremes)
    return Metrics(pairs, extremes, sequences=context.sequences, loss_over=context.loss_over)


pytree.register_pytree_node(
    Metrics,
    _flatten,
    _unflatten,
    serialized_type_name="grpo_kernels.Metrics",
    to_dumpable_context=lambda context: context,
    from_dumpable_context=lambda x: _Context(tuple(x[0]), tuple(x[1]), *x[2:]),  # JSON knows lists only
    flatten_with_keys_fn=_flatten_with_keys,
)


def metric_names(
    config: LossConfig, *, importance_ratio: bool, sampled: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that `loss_metrics` gives a loss of `config`: those with a pair, and the extremes.

    Args:
        importance_ratio, sampled: whether the tokens have importance sampling ratios, and sampling log-probabilities.
    """
    clips = _clips(config)
    corrects = config.corrects_sampling
    pairs = {
        "policy_loss": True,
        "entropy": True,
        "rows/projected": True,
        "rows/gradient": True,
        "kl": config.beta != 0.0,
        "importance_sampling_ratio": importance_ratio or corrects,
        "off_policy_masked": config.masks_off_policy,
        "sampling_unscored": sampled,
        "sampling/sampling_logp_difference/mean": corrects,
        "ratio": True,
        "vespo/phi_seq_mean": config.loss_type == "vespo",
        "cispo_clip_ratio": config.loss_type == "cispo",
        **dict.fromkeys(("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"), clips),
    }
    extremes = dict.fromkeys(_SAMPLING_EXTREMES, corrects)
    extremes |= dict.fromkeys(("clip_ratio/low_min", "clip_ratio/high_max"), clips)
    return tuple(name for name, x in pairs.items() if x), tuple(name for name, x in extremes.items() if x)


def loss_metrics(
    config: LossConfig,
    tokens: Tokens,
    entropies: Tensor,
    evaluation: Evaluation,
    graded: Tensor,
    *,
    num_items: bool,
) -> Metrics:
    """The metrics of one loss. A sequence without a counted token has the ratio 1.

    `num_items` says whether there is a ``num_items_in_batch``.

    As in TRL: ``entropy`` and ``kl``, means over the counted tokens; ``policy_loss``, the loss without the entropy
    bonus; ``clip_ratio/*``, ``cispo_clip_ratio`` and ``vespo/phi_seq_mean``, over the counted tokens, or over the
    sequences where there is one value a sequence; where the importance sampling ratio is made here,
    ``sampling/sampling_logp_difference/*``, of the tokens that the sampler could score, and
    ``sampling/importance_sampling_ratio/*``. Ours: ``ratio``; ``importance_sampling_ratio``, its mean;
    ``sampling_unscored``, the share of the counted tokens whose sampling log-probability is NaN;
    ``off_policy_masked``, the share of the counted tokens that were dropped; ``rows/projected``, the share of the
    positions that were projected; ``rows/gradient``, the share of those that a backward product was done for, `graded`
    of them.

    Where the tokens of the sequences are split over ranks, all of it is that of the whole sequences, the same on every
    rank; they are joined in one collective.
    """
    layout, terms = tokens.layout, evaluation.terms
    part = _Part(layout, entropies)
    n, speaks = len(tokens), layout.span is None or layout.span.rank == 0
    part.pairs["policy_loss"] = (evaluation.policy_loss, part.number(int(speaks)))
    part.over_tokens("entropy", entropies)
    part.pairs["rows/projected"] = (part.number(n), part.number(math.prod(layout.shape)))
    part.pairs["rows/gradient"] = (graded.to(entropies.dtype), part.number(n))
    if terms.kl is not None:
        part.over_tokens("kl", terms.kl)
    ratio = tokens.given_ratio if terms.importance_sampling_ratio is None else terms.importance_sampling_ratio
    if ratio is not None:
        per_sequence = tokens.sequence_ratio is not None
        if terms.sampling_difference is not None:
            per_sequence = config.sampling_ratio_is_per_sequence
        (part.over_sequences if per_sequence else part.over_tokens)("importance_sampling_ratio", ratio)
    if terms.on_policy_keep is not None:
        part.over_tokens("off_policy_masked", ~terms.on_policy_keep)
    if tokens.sampling_per_token_logps is not None:
        part.over_tokens("sampling_unscored", torch.isnan(tokens.sampling_per_token_logps))
    if terms.sampling_difference is not None and ratio is not None:
        gap, missing = terms.sampling_difference.abs(), torch.isnan(terms.sampling_difference)
        scored = (~missing).sum(dtype=gap.dtype)
        part.pairs["sampling/sampling_logp_difference/mean"] = (torch.where(missing, 0.0, gap).sum(), scored)
        for name, x, largest in zip(_SAMPLING_EXTREMES, (gap, ratio, ratio), (True, False, True), strict=True):
            part.extremes[name] = (_extreme(x, largest=largest), largest)
    if terms.log_ratio is not None:
        _add_ratio_metrics(config, tokens, terms, part)
    return part.joined(averaged_over(config, num_items=num_items))


class _Part:
    """What the tokens of this rank add to the metrics. Sums over all tokens are taken together, at the end."""

    def __init__(self, layout: Layout, like: Tensor) -> None:
        self.layout, self._like = layout, like
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}
        self._summed: dict[str, Tensor] = {}  # (n,) each
        self._numbers: dict[float, Tensor] = {}
        self.clipped: dict[str, Tensor] = {}  # (B,) clipped tokens of each sequence
        self.clipped_once = False  # whether that counts a sequence, as a whole
        self.extremes: dict[str, tuple[Tensor, bool]] = {}  # and whether it is the largest value

    def number(self, x: float) -> Tensor:
        """`x` on the device, ()."""
        if x not in self._numbers:
            self._numbers[x] = self._like.new_full((), x)
        return self._numbers[x]

    def over_tokens(self, name: str, x: Tensor) -> None:
        """The mean of `x` (n,)."""
        self._summed[name] = x
        self.pairs[name] = (x, self.number(x.shape[0]))  # whose place among the names this is

    def over_sequences(self, name: str, x: Tensor) -> None:
        """The mean of `x` (B,), right in the sequences that this rank speaks for."""
        span, x = self.layout.span, x.to(self._like.dtype)
        if span is None:
            self.pairs[name] = (x.sum(), self.number(self.layout.batch))
        else:
            self.pairs[name] = (torch.where(span.speaks_for, x, 0.0).sum(), span.speaks_for.to(x.dtype).sum())

    def over_shared(self, name: str, x: Tensor, *, empty: float = 0.0) -> None:
        """The mean over the sequences of `x` (n,), which the tokens of a sequence share; `empty` where it has none."""
        self.over_sequences(name, self.shared(x, empty))

    def shared(self, x: Tensor, empty: float = 0.0) -> Tensor:
        """(n,) -> (B,): a value that all counted tokens of a sequence share; `empty` for a sequence without any."""
        shared = self._like.new_full((self.layout.batch,), empty)
        shared[self.layout.sequence] = x.to(shared.dtype)
        return shared

    def count_clipped(self, name: str, x: Tensor, *, once: bool) -> None:
        """How much of each sequence `x` (n,) bool clips: all or nothing, or some of its tokens."""
        self.clipped_once = once
        if not once:
            self.clipped[name] = x
            return
        span, shared = self.layout.span, self.shared(x)
        self.clipped[name] = shared if span is None else torch.where(span.speaks_for, shared, 0.0)

    def joined(self, loss_over: str) -> Metrics:
        """The metrics of all ranks' parts."""
        self._add_up()
        span, pairs, clipped = self.layout.span, self.pairs, self.clipped
        extremes = {name: x for name, (x, _) in self.extremes.items()}
        if span is not None:
            own = [*(x for pair in pairs.values() for x in pair), *clipped.values(), *extremes.values()]
            of_ranks = gather_stacked(torch.cat([x.reshape(-1) for x in own]), span.group)  # (R, ...)
            per_sequence, last = len(clipped) * self.layout.batch, of_ranks.shape[1] - len(extremes)
            sums = of_ranks[:, :last].sum(dim=0)
            both = sums[: last - per_sequence].view(-1, 2)
            pairs = {name: (x[0], x[1]) for name, x in zip(pairs, both, strict=True)}
            counts = sums[last - per_sequence :].view(len(clipped), self.layout.batch)
            clipped = dict(zip(clipped, counts, strict=True))
            largest = [x for _, x in self.extremes.values()]
            found = zip(extremes, of_ranks[:, last:].unbind(1), largest, strict=True)
            extremes = {name: _extreme(x, largest=is_largest) for name, x, is_largest in found}
        for name, x in clipped.items():
            share = x if self.clipped_once else x / self.layout.lengths  # NaN for one without tokens
            extremes[name] = _extreme(share, largest=name.endswith("max"))
        return Metrics(pairs, extremes, sequences=self.layout.batch, loss_over=loss_over)

    def _add_up(self) -> None:
        """The sums over the tokens, those of numbers and those of flags each in one; clipped tokens by sequence."""
        for flags in (False, True):
            some = {name: x for name, x in self._summed.items() if (x.dtype == torch.bool) == flags}
            if some:
                sums = torch.stack([*some.values()]).sum(dim=1, dtype=self._like.dtype)
                found = zip(some, sums.unbind(), strict=True)
                self.pairs |= {name: (x, self.pairs[name][1]) for name, x in found}
        if self.clipped and not self.clipped_once:
            ones = torch.stack([*self.clipped.values()], dim=1).to(self._like.dtype)  # counted exactly, in any order
            counts = ones.new_zeros(self.layout.batch, ones.shape[1]).index_add_(0, self.layout.sequence, ones)
            self.clipped = dict(zip(self.clipped, counts.unbind(1), strict=True))


def _add_ratio_metrics(config: LossConfig, tokens: Tokens, terms: Terms, part: _Part) -> None:
    assert terms.log_ratio is not None
    ratio = torch.exp(terms.log_ratio)
    # VESPO's ratio, as logged, is that of the token or sequence: its sequence weight is phi's affair
    per_sequence = config.importance_sampling_level == "sequence" or config.loss_type == "gmpo"
    # where a sequence has one ratio and one advantage, TRL counts it once if it is clipped, else each of its tokens
    once = config.importance_sampling_level == "sequence" and config.loss_type != "gmpo"
    once = once and tokens.advantages_per_sequence

    def mean_of(name: str, x: Tensor, per_sequence: bool, empty: float = 0.0) -> None:
        if per_sequence:
            part.over_shared(name, x, empty=empty)
        else:
            part.over_tokens(name, x)

    mean_of("ratio", ratio, per_sequence, empty=1.0)
    if terms.phi is not None:
        mean_of("vespo/phi_seq_mean", terms.phi, tokens.advantages_per_sequence, empty=1.0)
    if config.loss_type == "cispo":
        mean_of("cispo_clip_ratio", (ratio > config.clip_high) & (tokens.advantages > 0), once)
    elif _clips(config):
        low, high = _clipped(config, terms, ratio, tokens.advantages)
        mean_of("clip_ratio/low_mean", low, once)
        mean_of("clip_ratio/high_mean", high, once)
        mean_of("clip_ratio/region_mean", low | high, once)
        part.count_clipped("clip_ratio/low_min", low, once=once)
        part.count_clipped("clip_ratio/high_max", high, once=once)


def _clips(config: LossConfig) -> bool:
    """Whether there is a range that ratios are clipped to from both sides."""
    if config.loss_type not in (*CLIPPED_LOSS_TYPES, "gmpo", "cispo", "sapo", "vespo"):
        raise NotImplementedError(f"loss_type: no metrics for {config.loss_type!r}")
    return config.loss_type in CLIPPED_LOSS_TYPES or config.loss_type == "gmpo"


def _clipped(config: LossConfig, terms: Terms, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) bool each: below the range with a negative advantage, above it with a positive one."""
    if config.loss_type == "gmpo":
        assert terms.token_log_ratio is not None
        below, above = terms.token_log_ratio < -config.epsilon, terms.token_log_ratio > config.clip_high
    else:
        if config.delta is not None:  # as in TRL, after the upper bound
            ratio = ratio.clamp(max=config.delta)
        below, above = ratio < 1 - config.epsilon, ratio > 1 + config.clip_high
    return below & (advantages < 0), above & (advantages > 0)


def _added(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    total, count = torch.stack([torch.stack(pair) for pair in pairs]).sum(dim=0).unbind()
    return total, count


def _extreme(x: Tensor, *, largest: bool) -> Tensor:
    """The largest or smallest value that is not NaN; NaN if there is none."""
    if x.numel() == 0:
        return x.new_full((), torch.nan)
    missing = torch.isnan(x)
    filled = x.masked_fill(missing, -torch.inf if largest else torch.inf)
    return (filled.amax() if largest else filled.amin()).masked_fill(missing.all(), torch.nan)
