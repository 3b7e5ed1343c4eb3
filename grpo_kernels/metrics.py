"""What happened in a loss, as means and as (sum, count) pairs, so that micro-batches and ranks can be added up.

Everything stays on the device: nothing here waits for it. Names and definitions are TRL's, except where said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from grpo_kernels.batch import Tokens
from grpo_kernels.config import CLIPPED_LOSS_TYPES, LossConfig
from grpo_kernels.evaluation import Evaluation, Terms


class Metrics(Mapping[str, Tensor]):
    """Name -> mean (a 0-d tensor); 0 where nothing was counted.

    Attributes:
        pairs: name -> (sum, count), 0-d tensors each. ``clip_ratio/low_min`` and ``clip_ratio/high_max`` are the
            smallest and largest sequence and have no pair.
    """

    def __init__(self, pairs: dict[str, tuple[Tensor, Tensor]], extremes: dict[str, Tensor]) -> None:
        self.pairs, self._extremes = pairs, extremes

    def stacked(self) -> tuple[Tensor, Tensor]:
        """The pairs (K, 2) and the extremes (E,), each in one tensor."""
        pairs = torch.stack([x for pair in self.pairs.values() for x in pair]).view(-1, 2)
        return pairs, torch.stack([*self._extremes.values()]) if self._extremes else pairs.new_empty(0)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._extremes:
            return self._extremes[name]
        total, count = self.pairs[name]
        return total / count.clamp(min=1)

    def __iter__(self) -> Iterator[str]:
        yield from self.pairs
        yield from self._extremes

    def __len__(self) -> int:
        return len(self.pairs) + len(self._extremes)

    def __repr__(self) -> str:
        return f"Metrics({', '.join(self)})"


def metric_names(
    config: LossConfig, *, importance_ratio: bool, sampled: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that `loss_metrics` gives a loss of `config`: those with a pair, and the extremes.

    Args:
        importance_ratio, sampled: whether the tokens have importance sampling ratios, and sampling log-probabilities.
    """
    clips = config.loss_type in CLIPPED_LOSS_TYPES or config.loss_type == "gmpo"
    pairs = {
        "policy_loss": True,
        "entropy": True,
        "rows/projected": True,
        "rows/gradient": True,
        "kl": config.beta != 0.0,
        "importance_sampling_ratio": importance_ratio,
        "off_policy_masked": config.masks_off_policy,
        "sampling_unscored": sampled,
        "ratio": True,
        "vespo/phi_seq_mean": config.loss_type == "vespo",
        "cispo_clip_ratio": config.loss_type == "cispo",
        **dict.fromkeys(("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"), clips),
    }
    extremes = ("clip_ratio/low_min", "clip_ratio/high_max") if clips else ()
    return tuple(name for name, is_there in pairs.items() if is_there), extremes


def loss_metrics(
    config: LossConfig, tokens: Tokens, entropies: Tensor, evaluation: Evaluation, graded: Tensor
) -> Metrics:
    """The metrics of one loss. A sequence without a counted token has the ratio 1.

    As in TRL: ``entropy`` and ``kl``, means over the counted tokens; ``policy_loss``, the loss without the entropy
    bonus; ``clip_ratio/*``, ``cispo_clip_ratio`` and ``vespo/phi_seq_mean``, over the counted tokens, or over the
    sequences where there is one value a sequence. Ours: ``ratio``; ``importance_sampling_ratio``;
    ``sampling_unscored``, the share of the counted tokens whose sampling log-probability is NaN;
    ``off_policy_masked``, the share of the counted tokens that were dropped; ``rows/projected``, the share of the
    positions that were projected; ``rows/gradient``, the share of those that a backward product was done for, `graded`
    of them.
    """
    layout, terms = tokens.layout, evaluation.terms
    n, one = len(tokens), entropies.new_ones(())

    def over_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.to(entropies.dtype).sum(), one * n

    pairs = {
        "policy_loss": (evaluation.policy_loss, one),
        "entropy": over_tokens(entropies),
        "rows/projected": (one * n, one * math.prod(layout.shape)),
        "rows/gradient": (one * graded, one * n),
    }
    if terms.kl is not None:
        pairs["kl"] = over_tokens(terms.kl)
    if tokens.sequence_ratio is not None:
        pairs["importance_sampling_ratio"] = (tokens.sequence_ratio.sum(), one * layout.batch)
    elif tokens.importance_sampling_ratio is not None:
        pairs["importance_sampling_ratio"] = over_tokens(tokens.importance_sampling_ratio)
    if terms.on_policy_keep is not None:
        pairs["off_policy_masked"] = over_tokens(~terms.on_policy_keep)
    if tokens.sampling_per_token_logps is not None:
        pairs["sampling_unscored"] = over_tokens(torch.isnan(tokens.sampling_per_token_logps))
    extremes: dict[str, Tensor] = {}
    if terms.log_ratio is not None:
        _add_ratio_metrics(config, tokens, terms, pairs, extremes)
    return Metrics(pairs, extremes)


def _add_ratio_metrics(
    config: LossConfig,
    tokens: Tokens,
    terms: Terms,
    pairs: dict[str, tuple[Tensor, Tensor]],
    extremes: dict[str, Tensor],
) -> None:
    assert terms.log_ratio is not None
    ratio = torch.exp(terms.log_ratio)
    # VESPO's ratio, as logged, is that of the token or sequence: its sequence weight is phi's affair
    per_sequence = config.importance_sampling_level == "sequence" or config.loss_type == "gmpo"
    # where a sequence has one ratio and one advantage, TRL counts it once if it is clipped, else each of its tokens
    once = config.importance_sampling_level == "sequence" and config.loss_type != "gmpo"
    once = once and tokens.advantages_per_sequence

    def mean_of(x: Tensor, per_sequence: bool, empty: float = 0.0) -> tuple[Tensor, Tensor]:
        x, one = x.to(ratio.dtype), ratio.new_ones(())
        if not per_sequence:
            return x.sum(), one * len(tokens)
        return _shared(x, tokens, empty).sum(), one * tokens.layout.batch

    pairs["ratio"] = mean_of(ratio, per_sequence, empty=1.0)
    if terms.phi is not None:
        pairs["vespo/phi_seq_mean"] = mean_of(terms.phi, tokens.advantages_per_sequence, empty=1.0)
    if config.loss_type == "cispo":
        pairs["cispo_clip_ratio"] = mean_of((ratio > config.clip_high) & (tokens.advantages > 0), once)
    elif config.loss_type in CLIPPED_LOSS_TYPES or config.loss_type == "gmpo":
        low, high = _clipped(config, terms, tokens.advantages)
        pairs["clip_ratio/low_mean"] = mean_of(low, once)
        pairs["clip_ratio/high_mean"] = mean_of(high, once)
        pairs["clip_ratio/region_mean"] = mean_of(low | high, once)
        extremes["clip_ratio/low_min"] = _extreme(_sequence_means(low, tokens, once), largest=False)
        extremes["clip_ratio/high_max"] = _extreme(_sequence_means(high, tokens, once), largest=True)


def _clipped(config: LossConfig, terms: Terms, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) bool each: below the range with a negative advantage, above it with a positive one."""
    if config.loss_type == "gmpo":
        assert terms.token_log_ratio is not None
        below, above = terms.token_log_ratio < -config.epsilon, terms.token_log_ratio > config.clip_high
    else:
        assert terms.log_ratio is not None
        ratio = torch.exp(terms.log_ratio)
        if config.delta is not None:  # as in TRL, after the upper bound
            ratio = ratio.clamp(max=config.delta)
        below, above = ratio < 1 - config.epsilon, ratio > 1 + config.clip_high
    return below & (advantages < 0), above & (advantages > 0)


def _shared(x: Tensor, tokens: Tokens, empty: float = 0.0) -> Tensor:
    """(n,) -> (B,): a value that all counted tokens of a sequence share; `empty` for a sequence without any."""
    shared = x.new_full((tokens.layout.batch,), empty)
    shared[tokens.layout.sequence] = x
    return shared


def _sequence_means(x: Tensor, tokens: Tokens, once: bool) -> Tensor:
    """(n,) -> (B,): the mean over each sequence, NaN for one without tokens unless it is counted `once`."""
    x = x.to(tokens.advantages.dtype)
    return _shared(x, tokens) if once else tokens.layout.sequence_sum(x) / tokens.layout.lengths


def _extreme(x: Tensor, *, largest: bool) -> Tensor:
    """The largest or smallest value that is not NaN; NaN if there is none."""
    fill = -torch.inf if largest else torch.inf
    filled = torch.cat([torch.where(torch.isnan(x), fill, x), x.new_full((1,), fill)])
    extreme = filled.amax() if largest else filled.amin()
    return torch.where(torch.isinf(extreme), torch.nan, extreme)
