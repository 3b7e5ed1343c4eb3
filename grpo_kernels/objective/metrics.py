"""The metrics of a loss: `Metrics`, and how they are computed.

Everything stays on the device: only `Metrics.floats`, and `repr` through it, waits for it. Names
and definitions are TRL's, unless docs/troubleshooting.md says otherwise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import did_you_mean, warn_of_ratio
from grpo_kernels.base.tensors import extreme
from grpo_kernels.objective.custom import CustomLoss
from grpo_kernels.objective.policy import Evaluation, PolicyLoss

NO_KL = "; the loss has a KL term only with beta > 0"  # a hint in errors


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
        any_parts: Any = parts
        if isinstance(any_parts, Metrics):
            raise TypeError("parts: expected a list of the metrics of calls, got Metrics alone")
        parts = any_parts = [*any_parts]
        for part in any_parts:
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
            values = torch.stack([part[name] for part in parts])
            extremes[name] = extreme(values, largest=name.endswith("max"))
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
            hint = NO_KL if name == "kl" else did_you_mean(str(name), self)
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


def loss_metrics(
    token_loss: PolicyLoss | CustomLoss,
    logps: Tensor,
    entropies: Tensor,
    evaluation: Evaluation,
    gradient_count: int | Tensor,
) -> Metrics:
    """Compute the metrics of one loss, whose backward has products for `gradient_count` tokens.

    Warns of ratios that are far from 1. Means are over the counted tokens, or over the sequences if
    there is one value per sequence. A sequence without a counted token has ratio 1. Sums over the
    tokens are computed together at the end: one sum for all numbers, one for all flags.
    """
    config, inputs = token_loss.config, evaluation.metric_inputs
    tokens = token_loss.tokens if inputs is None else inputs.tokens
    layout, n = tokens.layout, len(tokens)
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
        per_sequence = entropies.new_full((layout.batch,), empty)
        per_sequence[layout.sequence] = x.to(per_sequence.dtype)
        return per_sequence

    def mean_of(name: str, x: Tensor, per_sequence: bool, empty: float = 0.0) -> None:
        if per_sequence:
            over_sequences(name, shared(x, empty))
        else:
            over_tokens(name, x)

    if tokens.old_per_token_logps is not None and inputs is not None:
        warn_of_ratio(inputs.token_log_ratio)
    sampling = tokens.sampling_per_token_logps
    if sampling is not None:
        old = logps if tokens.old_per_token_logps is None else tokens.old_per_token_logps
        difference = old - sampling
        warn_of_ratio(difference, "sampling_per_token_logps")
    if tokens.ref_per_token_logps is not None and config.estimates_kl:
        warn_of_ratio(logps - tokens.ref_per_token_logps, "ref_per_token_logps")
    pairs["policy_loss"] = (evaluation.loss_without_entropy, number(1))
    over_tokens("entropy", entropies)
    over_tokens("advantages/mean", tokens.advantages)
    over_tokens("advantages/zero", tokens.advantages == 0)
    pairs["rows/projected"] = (number(n), number(math.prod(layout.shape)))
    if isinstance(gradient_count, Tensor):
        gradient_rows = gradient_count.to(entropies.dtype)
    else:
        gradient_rows = number(gradient_count)
    pairs["rows/gradient"] = (gradient_rows, number(n))
    if inputs is not None and inputs.kl is not None:
        over_tokens("kl", inputs.kl)
    ratio = tokens.sampling_ratio_per_sequence
    if ratio is not None:
        over_sequences("importance_sampling_ratio", ratio)
    elif (ratio := tokens.importance_sampling_ratio) is not None:
        over_tokens("importance_sampling_ratio", ratio)
    if inputs is not None and inputs.off_policy_mask is not None:
        over_tokens("off_policy_masked", ~inputs.off_policy_mask)
    if sampling is not None:
        over_tokens("sampling_unscored", torch.isnan(sampling))
    if inputs is not None and config.corrects_sampling and ratio is not None:
        difference, missing = difference.abs(), torch.isnan(difference)
        scored = (~missing).sum(dtype=difference.dtype)
        name = "sampling/sampling_logp_difference"
        pairs[f"{name}/mean"] = (torch.where(missing, 0.0, difference).sum(), scored)
        extremes[f"{name}/max"] = extreme(difference, largest=True)
        for bound in ("min", "max"):
            name = f"sampling/importance_sampling_ratio/{bound}"
            extremes[name] = extreme(ratio, largest=bound == "max")

    if inputs is not None:
        definition, ratios = config.definition, torch.exp(inputs.log_ratio.value)
        per_sequence = config.shares_ratio
        mean_of("ratio", ratios, per_sequence, empty=1.0)
        # with one ratio and one advantage per sequence, TRL counts clipped sequences, else tokens
        follows_level = definition.log_ratio is None
        counts_sequences = follows_level and per_sequence and tokens.advantages_per_sequence
        own_metrics = definition.more_metrics(inputs.surrogate_input, tokens.advantages, config)
        for name, x in own_metrics.items():
            mean_of(name, x, tokens.advantages_per_sequence, empty=1.0)
        clipped = definition.clipped_tokens(
            ratios, inputs.token_log_ratio, tokens.advantages, config
        )
        for name, x in clipped.items():
            mean_of(name, x, counts_sequences)
        if "clip_ratio/low_mean" in clipped:
            low, high = clipped["clip_ratio/low_mean"], clipped["clip_ratio/high_mean"]
            if counts_sequences:
                shares = [shared(low), shared(high)]
            else:  # shares of each sequence's tokens; exact, whatever the order of the sums
                ones = torch.stack([low, high], dim=1).to(entropies.dtype)
                counts = ones.new_zeros(layout.batch, 2).index_add_(0, layout.sequence, ones)
                shares = [x / layout.lengths for x in counts.unbind(1)]
            extremes["clip_ratio/low_min"] = extreme(shares[0], largest=False)
            extremes["clip_ratio/high_max"] = extreme(shares[1], largest=True)

    for flags in (False, True):
        summands = {name: x for name, x in summed.items() if (x.dtype == torch.bool) == flags}
        if summands:
            sums = torch.stack([*summands.values()]).sum(dim=1, dtype=entropies.dtype)
            pairs |= {k: (x, pairs[k][1]) for k, x in zip(summands, sums.unbind(), strict=True)}
    return Metrics(pairs, extremes, sequences=layout.batch, loss_over=token_loss.loss_over)
