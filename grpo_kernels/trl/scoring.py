"""Scoring before the loss: old and reference log-probabilities, and the sampler's sets.

TRL scores a generated batch with the policy before it trains on the batch. It needs the scores for
the ratio to the sampler (``vllm_importance_sampling_correction``), or because the policy changes
before the whole batch is used. Until the policy changes, a micro-batch's loss computes the same
log-probabilities. So here TRL prepares the batch without that scoring, and then

    micro-batches of the first optimizer step   use the log-probabilities that their loss computes,
    all other micro-batches                     are scored just before that step changes the policy.

Scores are kept for later passes over the batch (``num_iterations``). Sequences that cannot get a
gradient are not scored, unless metrics read their scores. The ratio to the sampler is computed
inside TRL's loss, after the log-probabilities and before TRL reads the ratio.

The reference scores a micro-batch just before its loss, with the loss's rows and layout. If policy
and reference are equal, their log-probabilities are then equal bit for bit, and the gradient of the
KL term is exactly 0. Otherwise, a rounding error would become a full step of Adam.

For the KL over the whole vocabulary, a micro-batch keeps the input of the reference's head, (B, T,
H'), in place of log-probabilities. The loss's call of the policy's head then projects both inputs,
and returns each token's divergence along with its log-probability.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from grpo_kernels import module as modules
from grpo_kernels.base.checks import warn_once
from grpo_kernels.base.modes import random_rates
from grpo_kernels.base.tensors import scored_difference
from grpo_kernels.head import Head
from grpo_kernels.objective.config import LossConfig, sampling_ratio_is_per_sequence
from grpo_kernels.objective.policy import bounded_ratio
from grpo_kernels.patching import LogsShares, all_replaced, replaced
from grpo_kernels.results import Scores
from grpo_kernels.scores import linear_divergence
from grpo_kernels.transformers.head import describe_head
from grpo_kernels.trl import micro_batches
from grpo_kernels.trl.fused_head import Call, head_of
from grpo_kernels.trl.micro_batches import OLD, RATIO, REFERENCE, Batch, is_corrected, metrics_of
from grpo_kernels.trl.sampled_sets import SETS, SampledSets, sets_of_batch, taken_sets

STATES = "reference_of_exact_kl"  # entry of a micro-batch that holds its `Reference`
# Methods that read a batch or the log-probabilities of its loss
READERS = (
    "_generate_and_score_completions",
    "_prepare_inputs",
    "compute_loss",
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
)
# modules whose versions of these methods this mixin takes into account
_KNOWN = ("transformers.", "trl.trainer.", "trl.experimental.gmpo.", "grpo_kernels.")


class Scoring(LogsShares):
    """Mixin for a GRPO trainer: decides what is scored outside the loss, and when."""

    _call: Call | None = None  # the scoring in progress
    # True: TRL does not score the old policy, or the reference; decided at the first generation
    _is_deferred: bool | None = None
    _defers_reference = False
    _generated_at = 0  # number of optimizer steps before the last generation

    # (differences from the sampler's log-probabilities, ratios) of a generation's micro-batches.
    # Training (True) and evaluation (False) have separate lists, since evaluation may interrupt
    # training.
    _figures: dict[bool, list[tuple[Tensor, Tensor]]]

    @property
    def _trains(self) -> bool:
        return bool(self.model.training)

    @property
    def _has_exact_kl(self) -> bool:
        return bool(self.kl_estimator == "full" and self.beta != 0.0)

    @property
    def _micro_steps(self) -> int:
        """Number of micro-batches between two generations."""
        return int(self.args.steps_per_generation * self.num_iterations)

    def _generate_and_score_completions(self, inputs: Any) -> Batch:
        """TRL's batch without deferred scores, plus the sets if `on_missing_set` is given."""
        if self._is_deferred is None:
            self._is_deferred = self._defers_old()
            self._defers_reference = self.kl_estimator == "full" or not (
                # if the reference changes, it must score when the batch is generated
                self.args.sync_ref_model or reader_of(self, READERS[:2])
            )
        changes: list[tuple[Any, str, Any]] = []
        if self._defers_reference:
            changes.append((self, "beta", 0.0))
        # TRL skips its scoring without a correction and without an optimizer step within the batch
        if self._is_deferred:
            changes.append((self, "vllm_importance_sampling_correction", False))
            changes.append((self.args, "gradient_accumulation_steps", self._micro_steps))
        unchanged = all_replaced([(owner, x, getattr(owner, x)) for owner, x, _ in changes])
        for name in ("_generate", "_calculate_rewards"):  # these must see the unchanged values
            changes.append((self, name, unchanged(getattr(self, name))))
        with self._over_sets({}), all_replaced(changes):
            batch: Batch = super()._generate_and_score_completions(inputs)
            sets = head_of(self.model).sets
        if sets is not None:
            batch[SETS] = sets_of_batch(sets, batch)
        if self._is_deferred:
            if is_corrected(self) and "sampling_per_token_logps" not in batch:
                raise ValueError(
                    "sampling_per_token_logps: expected a tensor, for the correction, got None; "
                    "your rollout_func must return the sampler's log-probabilities"
                )
            self._figures[self._trains].clear()
            if self._trains:
                self._generated_at = self.state.global_step
        return batch

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as TRL does, and keep the sampler's sets if `on_missing_set` is given."""
        generated = super()._generate(*args, **kwargs)
        if self.on_missing_set is not None:
            self._set_sets(taken_sets(generated, self.accelerator, metrics_of(self)))
        return generated

    @contextmanager
    def _over_sets(self, batch: Batch) -> Iterator[None]:
        """Let both models score completions over the sets of `batch`, if it has any."""
        self._set_sets(batch.get(SETS))
        try:
            yield
        finally:
            self._set_sets(None)

    def _set_sets(self, sets: Sequence[SampledSets | None] | None) -> None:
        for model in (self.model, self.ref_model) if self.on_missing_set is not None else ():
            if model is not None:
                head_of(model).sets = sets

    def _defers_old(self) -> bool:
        """True if TRL's scoring of the old policy is skipped; warn if a correction needs it."""
        option, corrects = self.fused_sampling_correction, is_corrected(self)
        if option is True and not corrects:
            raise ValueError(
                "fused_sampling_correction: expected False without a sampler to correct for "
                "(use_vllm=True and vllm_importance_sampling_correction=True), got True"
            )
        is_scored = corrects or self.args.gradient_accumulation_steps % self._micro_steps != 0
        if isinstance(option, bool) or not is_scored:
            return option is True
        reader = reader_of(self, READERS)
        if corrects and self.zero_advantage == "skip":
            reason = (
                "sampling/* metrics read the sequences that zero_advantage='skip' leaves out; "
                "'score' is cheaper here"
            )
        elif reader is not None:
            reason = f"{reader} may read its result; pass True if not"
        elif any(random_rates(module) for module in self.model.modules()):
            reason = "dropout, or noise, makes log-probabilities random; set it to 0, or pass True"
        else:
            return True
        if corrects:
            warn_once(
                "fused_sampling_correction: False, so TRL scores each batch for its correction: "
                f"{reason}"
            )
        return False

    def _warn_of_truncation(self) -> None:
        """Warn of a truncating sampler if TRL multiplies the loss by ratios of sequences."""
        args, mode = self.args, self.args.vllm_importance_sampling_mode
        cuts = [
            f"{name}={getattr(args, name)}"
            for name, is_set in (
                ("top_p", args.top_p is not None and args.top_p < 1.0),
                ("top_k", args.top_k is not None and args.top_k > 0),
                ("min_p", bool(args.min_p)),
            )
            if is_set
        ]
        of_sequence = is_corrected(self) and mode.startswith("sequence_")
        if cuts and of_sequence and self.on_missing_set is None:
            warn_once(
                f"{', '.join(cuts)}: the sampler's log-probabilities are normalized over the ids "
                "it keeps, the policy's over all ids. The ratio of a sequence then falls with its "
                f"length, and vllm_importance_sampling_mode={mode!r} multiplies the loss by it. "
                "Pass the kept sets (on_missing_set=, docs/samplers.md), or sample from the whole "
                "vocabulary"
            )

    def _due(self) -> list[Batch]:
        """This generation's micro-batches that still lack old log-probabilities."""
        return [x for x in self._buffered_inputs or () if self._is_deferred and OLD not in x]

    def _is_unscored(self, inputs: Batch) -> bool:
        """True if the loss of `inputs` must provide the old log-probabilities."""
        if not self._is_deferred or OLD in inputs:
            return False
        steps = self.state.global_step
        if self._trains and steps != self._generated_at:
            raise RuntimeError(
                f"{OLD}: expected a tensor in a batch generated at optimizer step "
                f"{self._generated_at}, got None at step {steps}; pass "
                "fused_sampling_correction=False"
            )
        return True

    def _score_old(self, batch: Batch) -> None:
        """Score a micro-batch with the old policy if its loss runs after the policy has changed."""
        live: Tensor | None = None
        phi = self.loss_type == "vespo" and self.zero_advantage != "skip"
        zeros = torch.zeros_like(batch["completion_mask"], dtype=torch.float32)
        if self._is_idle(batch):
            logps = zeros
        else:
            if not (phi or is_corrected(self)):  # both log metrics over all sequences
                # zeros stand for the old log-probabilities that the loss will get
                _, _, live = micro_batches.foreseen(self, {**batch, OLD: zeros})
            logps = self._score(self.model, batch, live)
        self._take_old(batch, logps)
        self._log_figures()

    def _is_idle(self, inputs: Batch) -> bool:
        """True for an empty micro-batch, if no other process waits for its forward."""
        return micro_batches.is_empty(inputs) and bool(self.accelerator.num_processes == 1)

    def _take_old(self, inputs: Batch, logps: Tensor) -> None:
        """Store the old policy's `logps` (B, T), and the ratio to the sampler, in `inputs`.

        They are also stored in TRL's micro-batch, for later passes over it.
        """
        inputs[OLD] = logps.detach()
        if is_corrected(self):
            sampling = inputs["sampling_per_token_logps"]
            config = LossConfig(**micro_batches.correction_options(self))
            mask = micro_batches.counted_tokens(inputs).bool()
            log_ratio = torch.where(mask, scored_difference(logps, sampling), 0.0)
            per_sequence = sampling_ratio_is_per_sequence(config)
            if per_sequence:
                log_ratio = log_ratio.sum(dim=-1, keepdim=True)
            inputs[RATIO] = ratio = bounded_ratio(config, log_ratio)
            # leave out tokens that the sampler has not scored
            gaps = (logps.detach() - sampling).abs()[mask & ~torch.isnan(sampling)]
            ratios = ratio.flatten() if per_sequence else ratio[mask]
            ratios = ratios[:0] if micro_batches.is_empty(inputs) else ratios
            self._figures[self._trains].append((gaps, ratios))
        for batch in self._buffered_inputs or ():
            if batch["completion_ids"] is inputs["completion_ids"]:
                batch.update({name: inputs[name] for name in (OLD, RATIO) if name in inputs})

    def _log_figures(self) -> None:
        """Log TRL's metrics of a generation's ratios once all micro-batches have contributed.

        As in TRL, each metric is reduced on every rank (0 if it has no values), then over ranks.
        """
        figures = self._figures[self._trains]
        if len(figures) < (self.args.steps_per_generation if self._trains else 1):
            return
        gaps, ratios = map(torch.cat, zip(*figures, strict=True))
        figures.clear()
        for name, x, reduce in (
            ("sampling_logp_difference/mean", gaps, torch.mean),
            ("sampling_logp_difference/max", gaps, torch.max),
            ("importance_sampling_ratio/min", ratios, torch.min),
            ("importance_sampling_ratio/mean", ratios, torch.mean),
            ("importance_sampling_ratio/max", ratios, torch.max),
        ):
            here = reduce(x) if x.numel() > 0 else x.new_zeros(())
            found = reduce(self.accelerator.gather(here)).item()
            metrics_of(self)[f"sampling/{name}"].append(found)

    def _with_reference(self, inputs: Batch) -> Batch:
        """The inputs of a loss, plus the reference's scores if TRL did not compute them."""
        name = STATES if self._has_exact_kl else REFERENCE
        is_left_out = self.beta != 0.0 and self._defers_reference and name not in inputs
        if not is_left_out or self._is_idle(inputs):
            return inputs
        found: Tensor | Reference
        with self._as_reference() as model:
            if self._has_exact_kl:
                found = Reference(model)
                self._score(model, inputs, score=found.take)
            else:
                found = self._score(model, inputs)
        if self._trains and self.num_iterations > 1:
            inputs[name] = found  # stays in TRL's buffer for later passes
        return {**inputs, name: found}

    @contextmanager
    def _as_reference(self) -> Iterator[Any]:
        """Yield a model that acts as the reference inside the context."""
        if self.ref_model is not None:
            yield self.ref_model
            return
        model = self.accelerator.unwrap_model(self.model)
        with use_adapter(model, "ref" if "ref" in model.peft_config else None):
            try:
                yield self.model
            finally:
                # FSDP2 leaves parameters unsharded after a forward without backward. PEFT turns off
                # requires_grad of adapters here, and later turns it on for the parameters that it
                # finds then. Without resharding, it would find the unsharded parameters, and the
                # shards would stay without gradient.
                for module in model.modules():
                    if modules.is_fsdp_unit(module):
                        module.reshard()

    def _score(
        self,
        model: Any,
        batch: Batch,
        live: Tensor | None = None,
        score: Callable[..., Scores] | None = None,
    ) -> Tensor:
        """Log-probabilities (B, T) of a micro-batch, 0 in sequences that are not `live`."""
        mask = batch["completion_mask"]
        if live is not None:
            mask = mask * live.to(mask.device)[:, None]
        parameters = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
        images = {name: batch[name] for name in parameters if name in batch}
        checkpointing = self.args.gradient_checkpointing_kwargs
        call = Call(model, {**batch, "completion_mask": mask}, mask, score=score)
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(self.model, checkpointing),
            replaced(self, "_call", call),
            self._over_sets(batch),
        ):
            rows = (*call.rows, mask.size(1))
            logps, *_ = self._get_per_token_logps_and_entropies(model, *rows, **images)
        return logps

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Score as TRL does. For a known `Call`, also pass its predictions to the fused head."""
        call, given = self._call, (input_ids, attention_mask, logits_to_keep)
        score = super()._get_per_token_logps_and_entropies
        if call is None or not call.is_of(model, *given):
            return score(model, *given, *args, **kwargs)
        if call.is_done:
            return call.results["logps"], call.results["entropies"], None
        with replaced(head_of(model), "call", call):
            results = score(model, *given, *args, **kwargs)
        scores = zip(("logps", "entropies"), results[:2], strict=True)
        call.results |= {name: x for name, x in scores if x is not None}
        if call.is_unscored:
            call.is_unscored = False
            self._take_old(call.inputs, results[0])
        return results


def reader_of(trainer: Any, names: Sequence[str]) -> str | None:
    """Name a method in `names` that neither TRL nor this library defines; None if there is none."""
    for name in names:
        if name in vars(trainer) and not modules.origin(vars(trainer)[name]).startswith(_KNOWN):
            return f"the trainer's own {name}"
    for cls in type(trainer).__mro__:
        if not cls.__module__.startswith(_KNOWN):
            for name in names:
                if name in vars(cls):
                    return f"{cls.__name__}.{name}"
    return None


class Reference:
    """The reference model of a micro-batch: its head and the head's input.

    The constructor reads `model` with the adapters that are active at that time.
    """

    def __init__(self, model: Any) -> None:
        head = describe_head(model).weight
        self._linear = modules.linear_of(head)
        if self._linear is not head and modules.active_adapters(head):
            raise ValueError(
                "kl_estimator: expected 'k3' if the reference is a separate adapter that covers "
                "lm_head, got 'full'"
            )
        self._hidden, self._constants = torch.empty(0), Head(None)

    def take(self, hidden: Tensor, head: Head, ids: Tensor, **how: Any) -> Scores:
        """Keep `hidden` (B, T, H') and return zeros. Used as `Call.score` of the reference."""
        self._constants = replace(head, weight=None, bias=None, lora=None)
        self._hidden = hidden.detach().clone()  # a view would keep the prompt's states in memory
        return Scores(logps=hidden.new_zeros(ids.shape, dtype=torch.float32))

    def compare(
        self, hidden: Tensor, head: Head, ids: Tensor, *, extras: Sequence[str], **how: Any
    ) -> Scores:
        """Score `ids`, with the divergence, as the policy's `Call.score`; TRL reads no `extras`."""
        states = self._hidden.to(hidden.device)
        # read now, because under FSDP2 the weight is a different tensor inside a forward
        weight, bias = modules.constants_of(self._linear, "reference")
        reference = replace(self._constants, weight=weight, bias=bias)
        return linear_divergence(hidden, head, (states, reference), completion_ids=ids, **how)
