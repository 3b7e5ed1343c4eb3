"""Metrics of a loss: their names and definitions.

Everything stays on the device: nothing here waits for it. Names and definitions are TRL's, unless noted.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kernels.batch.tokens import Layout, Tokens
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.objective.evaluation import Evaluation, Terms
from grpo_kernels.objective.losses import loss_of
from grpo_kernels.objective.metrics import Metrics, extreme
from grpo_kernels.objective.normaliser import averaged_over

_SAMPLING_EXTREMES = (
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/max",
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
    """Return the metrics of one loss. A sequence without a counted token has the ratio 1.

    `num_items` is True if ``num_items_in_batch`` was given.

    As in TRL: ``entropy`` and ``kl``, means over the counted tokens; ``policy_loss``, the loss without the entropy
    bonus; ``clip_ratio/*``, ``cispo_clip_ratio`` and ``vespo/phi_seq_mean``, over the counted tokens, or over the
    sequences where there is one value per sequence; if the loss makes the importance sampling ratio itself,
    ``sampling/sampling_logp_difference/*``, of the tokens that the sampler could score, and
    ``sampling/importance_sampling_ratio/*``. Ours: ``ratio``; ``advantages/mean`` and
    ``advantages/zero``, mean and share of 0 over the counted tokens; ``importance_sampling_ratio``, its mean;
    ``sampling_unscored``, the share of the counted tokens whose sampling log-probability is NaN;
    ``off_policy_masked``, the share of the counted tokens that were dropped; ``rows/projected``, the share of the
    positions that were projected; ``rows/gradient``, the share of the projected positions that got a backward product,
    `with_grad` of them.
    """
    layout, terms = tokens.layout, evaluation.terms
    part = _Part(layout, entropies)
    n = len(tokens)
    part.pairs["policy_loss"] = (evaluation.policy_loss, part.number(1))
    part.over_tokens("entropy", entropies)
    part.over_tokens("advantages/mean", tokens.advantages)
    part.over_tokens("advantages/zero", tokens.advantages == 0)
    part.pairs["rows/projected"] = (part.number(n), part.number(math.prod(layout.shape)))
    part.pairs["rows/gradient"] = (with_grad.to(entropies.dtype), part.number(n))
    if terms.kl is not None:
        part.over_tokens("kl", terms.kl)
    ratio = (
        tokens.unexpanded_ratio
        if terms.importance_sampling_ratio is None
        else terms.importance_sampling_ratio
    )
    if ratio is not None:
        per_sequence = tokens.sequence_ratio is not None
        if terms.sampling_difference is not None:
            per_sequence = config.sampling_ratio_is_per_sequence
        (part.over_sequences if per_sequence else part.over_tokens)(
            "importance_sampling_ratio", ratio
        )
    if terms.on_policy_keep is not None:
        part.over_tokens("off_policy_masked", ~terms.on_policy_keep)
    if tokens.sampling_per_token_logps is not None:
        part.over_tokens("sampling_unscored", torch.isnan(tokens.sampling_per_token_logps))
    if terms.sampling_difference is not None and ratio is not None:
        gap, missing = terms.sampling_difference.abs(), torch.isnan(terms.sampling_difference)
        scored = (~missing).sum(dtype=gap.dtype)
        part.pairs["sampling/sampling_logp_difference/mean"] = (
            torch.where(missing, 0.0, gap).sum(),
            scored,
        )
        for name, x, largest in zip(
            _SAMPLING_EXTREMES, (gap, ratio, ratio), (True, False, True), strict=True
        ):
            part.extremes[name] = extreme(x, largest=largest)
    if terms.log_ratio is not None:
        _add_ratio_metrics(config, tokens, terms, part)
    return part.joined(averaged_over(config, num_items=num_items))


class _Part:
    """The metrics while they are collected. Sums over all tokens are taken once, at the end."""

    def __init__(self, layout: Layout, like: Tensor) -> None:
        self.layout, self._like = layout, like
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}
        self._summed: dict[str, Tensor] = {}  # (n,) each
        self._numbers: dict[float, Tensor] = {}
        self.clipped: dict[str, Tensor] = {}  # (B,) clipped tokens of each sequence
        self.clipped_once = False  # True: `clipped` counts a sequence as a whole
        self.extremes: dict[str, Tensor] = {}

    def number(self, x: float) -> Tensor:
        """Return `x` on the device, (), one tensor per value."""
        if x not in self._numbers:
            self._numbers[x] = self._like.new_full((), x)
        return self._numbers[x]

    def over_tokens(self, name: str, x: Tensor) -> None:
        """Add the mean of `x` (n,) as metric `name`."""
        self._summed[name] = x
        self.pairs[name] = (
            x,
            self.number(x.shape[0]),
        )  # keeps the place in the order; `joined` sums x

    def over_sequences(self, name: str, x: Tensor) -> None:
        """Add the mean of `x` (B,)."""
        self.pairs[name] = (x.to(self._like.dtype).sum(), self.number(self.layout.batch))

    def over_shared(self, name: str, x: Tensor, *, empty: float = 0.0) -> None:
        """Add the mean over the sequences of `x` (n,), shared by a sequence's tokens; `empty` where it has none."""
        self.over_sequences(name, self.shared(x, empty))

    def shared(self, x: Tensor, empty: float = 0.0) -> Tensor:
        """(n,) -> (B,): a value that all counted tokens of a sequence share; `empty` for a sequence without any."""
        shared = self._like.new_full((self.layout.batch,), empty)
        shared[self.layout.sequence] = x.to(shared.dtype)
        return shared

    def count_clipped(self, name: str, x: Tensor, *, once: bool) -> None:
        """Count each sequence's clipped tokens `x` (n,) bool; `once`: count a sequence, clipped as a whole, as one."""
        self.clipped_once = once
        self.clipped[name] = self.shared(x) if once else x

    def joined(self, loss_over: str) -> Metrics:
        """Return the metrics."""
        self._add_up()
        for name, x in self.clipped.items():
            share = (
                x if self.clipped_once else x / self.layout.lengths
            )  # NaN for one without tokens
            self.extremes[name] = extreme(share, largest=name.endswith("max"))
        layout = self.layout
        return Metrics(self.pairs, self.extremes, sequences=layout.batch, loss_over=loss_over)

    def _add_up(self) -> None:
        """Sum over the tokens: all numbers in one sum, all flags in another; clipped tokens by sequence."""
        for flags in (False, True):
            summands = {
                name: x for name, x in self._summed.items() if (x.dtype == torch.bool) == flags
            }
            if summands:
                sums = torch.stack([*summands.values()]).sum(dim=1, dtype=self._like.dtype)
                totals = zip(summands, sums.unbind(), strict=True)
                self.pairs |= {name: (x, self.pairs[name][1]) for name, x in totals}
        if self.clipped and not self.clipped_once:
            ones = torch.stack([*self.clipped.values()], dim=1).to(
                self._like.dtype
            )  # counted exactly, in any order
            counts = ones.new_zeros(self.layout.batch, ones.shape[1]).index_add_(
                0, self.layout.sequence, ones
            )
            self.clipped = dict(zip(self.clipped, counts.unbind(1), strict=True))


def _add_ratio_metrics(config: LossConfig, tokens: Tokens, terms: Terms, part: _Part) -> None:
    assert terms.log_ratio is not None and terms.token_log_ratio is not None
    loss_type, ratio = loss_of(config), torch.exp(terms.log_ratio)
    of_level, by_sequence = loss_type.takes_level, config.importance_sampling_level == "sequence"
    # with one ratio and one advantage per sequence, TRL counts clipped sequences, otherwise clipped tokens
    once = by_sequence and of_level and tokens.advantages_per_sequence

    def mean_of(name: str, x: Tensor, per_sequence: bool, empty: float = 0.0) -> None:
        if per_sequence:
            part.over_shared(name, x, empty=empty)
        else:
            part.over_tokens(name, x)

    mean_of("ratio", ratio, by_sequence or not of_level, empty=1.0)
    if terms.phi is not None:
        mean_of("vespo/phi_seq_mean", terms.phi, tokens.advantages_per_sequence, empty=1.0)
    if loss_type.capped is not None:
        mean_of("cispo_clip_ratio", loss_type.capped(config, ratio, tokens.advantages), once)
    if loss_type.clipped is not None:
        low, high = loss_type.clipped(config, ratio, terms.token_log_ratio, tokens.advantages)
        mean_of("clip_ratio/low_mean", low, once)
        mean_of("clip_ratio/high_mean", high, once)
        mean_of("clip_ratio/region_mean", low | high, once)
        part.count_clipped("clip_ratio/low_min", low, once=once)
        part.count_clipped("clip_ratio/high_max", high, once=once)
