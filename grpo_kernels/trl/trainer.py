"""TRL's GRPO trainer, with the forward and backward of its language-model head in `grpo_kernels`.

TRL's own code computes the loss; the exact KL adds its term. `FusedGRPOTrainer` gives policy and
reference this library's `add_fused_lm_head`. It also tells the policy's forward what TRL does not:
which tokens the loss reads, and which gradient it will send back
(`grpo_kernels.policy_expectation`). The one-pass engine computes the gradient for the expected
coefficients in the forward, and the backward checks them against the true ones. The expectation is
wrong if a subclass adds its own term, or if this module does not know an option. That costs time
but never changes the result. A gradient where none was expected raises an error.

The calls, and what this module adds to them::

    train                      drop what an earlier call left of a generation
    once per generation
      _prepare_inputs          TRL generates and rewards, without scoring
        _regrouped             regroup the samples of each window (`micro_batches`)
        _score_old             old log-probabilities for later optimizer steps
    each micro-batch
      _with_reference          the reference scores it
      _compute_loss
        _loss_of               predict the rows that are read, the gradient, live sequences
          _loss_by_trl         TRL's _compute_loss
            _get_per_token_logps_and_entropies
              model(..., labels=..., fused_lm_head=True)
                FusedHead.run  the body where it is needed, the head, TRL's record
    after the last micro-batch of a window
      _loss_by_trl             TRL's _compute_loss on the kept scores, for its metrics

**Old log-probabilities.** TRL scores a generated batch with the policy before it trains on the
batch. It needs the scores for the ratio to the sampler (``vllm_importance_sampling_correction``),
or because the policy changes before the whole batch is used. Until the policy changes, a
micro-batch's loss computes the same log-probabilities. So here TRL prepares the batch without that
scoring, and then

    micro-batches of the first optimizer step   use the log-probabilities that their loss computes,
    all other micro-batches                     are scored just before that step changes the policy.

Scores are kept for later passes over the batch (``num_iterations``). Sequences that cannot get a
gradient are not scored, unless metrics read their scores. The ratio to the sampler is computed
inside TRL's loss, after the log-probabilities and before TRL reads the ratio.

**The reference** scores a micro-batch with the loss's rows and layout, just before its loss. It
scores those of later optimizer steps before the first of these steps ends, since a callback may
then change the reference. If policy and reference are equal, their log-probabilities are equal bit
for bit, and the gradient of the KL term is exactly 0. Otherwise, a rounding error would become a
full step of Adam. For the KL over the whole vocabulary, a micro-batch keeps the input of the
reference's head, (B, T, H'), in place of log-probabilities. The loss's call of the policy's head
then projects both inputs, and returns each token's divergence along with its log-probability.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, get_args

import torch
import trl.trainer.grpo_trainer as trl_grpo
from torch import Tensor
from transformers import Trainer
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from grpo_kernels import base
from grpo_kernels import head_module as modules
from grpo_kernels.base.checks import check_choice, did_you_mean, warn_once
from grpo_kernels.base.modes import random_rates
from grpo_kernels.base.tensors import scored_difference
from grpo_kernels.body.trial import fits_trees
from grpo_kernels.body.trunk import trunk_of
from grpo_kernels.engine.plan import Run
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.objective.policy import bounded_ratio
from grpo_kernels.patching import LogsShares, all_replaced, replaced
from grpo_kernels.results import Scores
from grpo_kernels.transformers.causal_lm import check_skip
from grpo_kernels.trl import fused_head, micro_batches
from grpo_kernels.trl.fused_head import HeadOptions, Reference, Scoring, scored_by
from grpo_kernels.trl.micro_batches import (
    OLD,
    PART,
    RATIO,
    REFERENCE,
    Batch,
    Part,
    is_corrected,
    metrics_of,
)
from grpo_kernels.trl.sampled_sets import SETS, sets_of_batch, taken_sets

_logger = logging.getLogger(__name__)
STATES = "reference_of_exact_kl"  # entry of a micro-batch that holds its `Reference`
_RESULTS: tuple[str, ...] = ("logps", "entropies", "divergence")  # keys of `Scoring.results`
# Methods that read a batch or the log-probabilities of its loss
_READERS = (
    "_generate_and_score_completions",
    "_prepare_inputs",
    "compute_loss",
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
)
_SEES_MICRO_BATCHES = (*_READERS, "get_off_policy_mask", "get_gamma_weights")
# modules whose versions of these methods this mixin takes into account
_KNOWN = ("transformers.", "trl.trainer.", "trl.experimental.gmpo.", "grpo_kernels.")


class FusedLossMixin(LogsShares):
    """Add the fused loss to a subclass of ``GRPOTrainer``.

    ::

        class FusedGMPOTrainer(FusedLossMixin, GMPOTrainer): ...

    Any subclass works. Put the mixin first: the wrong order raises a TypeError. If the subclass
    defines its own loss, samples are not regrouped. No backward is skipped either, unless that loss
    is TRL's GMPO. The mixin takes the arguments of `FusedGRPOTrainer`.
    """

    _step: int  # TRL's number of micro-batches so far
    _buffered_inputs: Any  # TRL's micro-batches of the last generation, or None
    _scoring: Scoring  # the scoring in progress
    # True: TRL does not score the old policy, or the reference; decided at the first generation
    _is_deferred: bool | None = None
    _defers_reference = False
    _generated_at = 0  # number of optimizer steps before the last generation

    # (differences from the sampler's log-probabilities, ratios) of a generation's micro-batches.
    # Training (True) and evaluation (False) have separate lists, since evaluation may interrupt
    # training.
    _figures: dict[bool, list[tuple[Tensor, Tensor]]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__init__ is not FusedLossMixin.__init__:
            cls.__signature__ = None  # not FusedGRPOTrainer's, which it would inherit
        name, order = cls.__name__, cls.__mro__
        others = [x for x in order if issubclass(x, Trainer) and not issubclass(x, FusedLossMixin)]
        if others and GRPOTrainer not in others:
            raise TypeError(
                f"{name}: expected a subclass of trl.GRPOTrainer, got {others[0].__name__}; "
                "for TRL's other trainers, call patch_trl()"
            )
        if others and order.index(others[0]) < order.index(FusedLossMixin):
            first = others[0].__name__
            raise TypeError(
                f"{name}: expected FusedLossMixin before {first}, as in class "
                f"{name}(FusedLossMixin, {first}), got {first} first"
            )

    def __init__(
        self,
        *args: Any,
        fused_sampling_correction: bool | Literal["auto"] = "auto",
        kl_estimator: Literal["k3", "full"] = "k3",
        zero_advantage: base.ZeroAdvantage = "score",
        layout: base.BatchLayout = "tree",
        regroup: bool | Literal["auto"] = "auto",
        tokens_per_forward: int | None = None,
        on_missing_set: base.OnMissingSet | None = None,
        engine: base.EngineName = "auto",
        backend: base.BackendName = "auto",
        workspace_bytes: int | None = None,
        **kwargs: Any,
    ) -> None:
        _check_names(type(self), kwargs)
        run = Run(engine, backend, workspace_bytes)
        self._options = HeadOptions(run, layout, on_missing_set=on_missing_set)
        self._scoring, self._shares = Scoring(self._options), self._options.shares
        self._figures = {True: [], False: []}
        check_choice("zero_advantage", zero_advantage, get_args(base.ZeroAdvantage))
        check_choice("kl_estimator", kl_estimator, ("k3", "full"), "; 'k3' is TRL's own")
        for name, value in (
            ("regroup", regroup),
            ("fused_sampling_correction", fused_sampling_correction),
        ):
            if not isinstance(value, bool) and value != "auto":
                raise ValueError(f"{name}: expected 'auto', True or False, got {value!r}")
        self.fused_sampling_correction, self.kl_estimator = fused_sampling_correction, kl_estimator
        self.zero_advantage, self.layout = zero_advantage, layout
        self.tokens_per_forward, self.on_missing_set = tokens_per_forward, on_missing_set
        ours = partial(fused_head.add_fused_lm_head, options=self._options)
        with fused_head.adapters_allowed(), replaced(trl_grpo, "add_fused_lm_head", ours):
            super().__init__(*args, **kwargs)
        fused_head.check_head(self.model, self.args)
        self._is_trusted = regroup is True
        self.regroup = self._regroups(regroup)
        self._check_options()
        self._warn_of_truncation()
        if self.args.torch_compile:
            warn_once(
                "torch_compile: the loss's forward is not compiled as a whole; compile the model's "
                "layers instead (docs/skipped-work.md)"
            )

    def _regroups(self, option: bool | str) -> bool:
        """Decide if samples are regrouped; raise ValueError if that is required but impossible."""
        reason = self._reason_to_stay("training_step")
        if option is True and reason is not None:
            raise ValueError(f"regroup: expected 'auto' or False with {reason}, got True")
        if self.layout == "padded":
            reason = reason or "layout='padded', as TRL computes them"
        found = option is True or (option == "auto" and reason is None)
        if option == "auto" and not found:
            _logger.debug("regroup: samples stay in TRL's micro-batches, because of %s", reason)
        budget, expected = self.tokens_per_forward, "a number of tokens, an int >= 1, or None"
        if not found:
            expected = "None where samples are not regrouped"
            expected += f" ({reason})" if option == "auto" else ""
        is_number = isinstance(budget, int) and not isinstance(budget, bool) and budget >= 1
        if budget is not None and not (found and is_number):
            raise ValueError(f"tokens_per_forward: expected {expected}, got {budget!r}")
        return found

    def _reason_to_stay(self, *names: str) -> str | None:
        """Say why the loss, as it is now, needs TRL's own micro-batches; None if it does not.

        `names` are further methods that may not be overridden.
        """
        reason = micro_batches.reason_against_regrouping(self)
        if reason is not None or self._is_trusted:
            return reason
        reader = _reader_of(self, (*_SEES_MICRO_BATCHES, *names))
        return None if reader is None else f"{reader}, which may read micro-batches"

    def _check_options(self) -> None:
        args, sets, has_sets = self.args, self.on_missing_set, self.on_missing_set is not None
        skips, is_exact = self.zero_advantage == "skip", self.kl_estimator == "full"
        if skips:
            check_skip(micro_batches.config_of(self))
        only = "zero_advantage: expected 'score' or 'train' with"
        read_all = "which reads all sequences, got 'skip'"
        for is_wrong, message in (
            (skips and args.use_adaptive_entropy, f"{only} use_adaptive_entropy, {read_all}"),
            (
                skips and self.fused_sampling_correction is True,
                f"{only} fused_sampling_correction, {read_all}",
            ),
            (
                is_exact and args.beta == 0.0,
                "kl_estimator: expected 'k3' with beta = 0, since there is no KL term, got 'full'; "
                "set beta",
            ),
            (
                is_exact and self.loss_owner is not GRPOTrainer,
                f"kl_estimator: expected 'k3', since {self.loss_owner.__name__} has a loss of its "
                "own, got 'full'",
            ),
            (
                is_exact and args.sync_ref_model,
                "sync_ref_model: expected False with kl_estimator = 'full', which keeps the "
                "reference's hidden states while its head may change, got True",
            ),
            (
                has_sets and is_exact,
                "on_missing_set: expected None with kl_estimator='full', the divergence over the "
                f"whole vocabulary, got {sets!r}",
            ),
            (
                has_sets and self.rollout_func is None,
                "on_missing_set: expected None without a rollout_func, which returns the sets, "
                f"got {sets!r}",
            ),
        ):
            if is_wrong:
                raise ValueError(message)

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
        reader = _reader_of(self, _READERS)
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

    @property
    def loss_owner(self) -> type:
        """The class that defines ``super()._compute_loss``."""
        after = type(self).__mro__[type(self).__mro__.index(FusedLossMixin) + 1 :]
        return next(cls for cls in after if "_compute_loss" in vars(cls))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does; what an earlier call left of a generation is not trained on."""
        if self._step:  # as in a new process: TRL loads the policy into vLLM, and generates
            self._step, self._buffered_inputs, self._last_loaded_step = 0, None, -1
            self._metrics["train"].clear()
            self._shares.take()
        return super().train(*args, **kwargs)

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        """TRL's micro-batch, scored by the reference; regroup after each generation."""
        before = self._buffered_inputs
        self._check_window()
        inputs: Batch = super()._prepare_inputs(generation_batch)
        if not self._trains:
            return self._with_reference(inputs)
        batches, place = self._buffered_inputs, self._step % len(self._buffered_inputs)
        if self.regroup and batches is not before:
            self._buffered_inputs = batches = self._regrouped(batches)
            inputs = batches[place]
        if PART in inputs:
            self._check_regrouped()
        if self.accelerator.sync_gradients:  # the policy changes after this micro-batch
            for batch in batches:
                if batch is not inputs and self._is_deferred and OLD not in batch:
                    self._score_old(batch)
            # a callback may change the reference; for the exact KL, that is not supported
            for batch in () if self._has_exact_kl else batches[place + 1 :]:
                batch.update(self._with_reference(batch))
        return self._with_reference(inputs)

    def _generate_and_score_completions(self, inputs: Any) -> Batch:
        """TRL's batch without deferred scores, plus the sets if `on_missing_set` is given."""
        if self._is_deferred is None:
            self._is_deferred = self._defers_old()
            self._defers_reference = self.kl_estimator == "full" or not (
                # if the reference changes, it must score when the batch is generated
                self.args.sync_ref_model or _reader_of(self, _READERS[:2])
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
        scoring = Scoring(self._options)
        with all_replaced(changes), self._following(scoring):
            batch: Batch = super()._generate_and_score_completions(inputs)
        if SETS in scoring.inputs:
            batch[SETS] = sets_of_batch(scoring.inputs[SETS], batch)
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
            sets = taken_sets(generated, self.accelerator, metrics_of(self))
            self._scoring.inputs[SETS] = sets  # TRL scores this generation over them
        return generated

    def _check_window(self) -> None:
        """Check that the optimizer step does not end within a window that is regrouped."""
        count = micro_batches.window_of(self)
        ends = self._trains and self.accelerator.sync_gradients  # with this micro-batch
        if self.regroup and ends and (self._step + 1) % count and self._reason_to_stay() is None:
            raise RuntimeError(
                f"regroup: expected each optimizer step to end after {count} micro-batches, got "
                "one that ends earlier; pass regroup=False"
            )

    def _check_regrouped(self) -> None:
        """Check that the loss still allows the regrouping."""
        reason = self._reason_to_stay()
        if reason is not None:
            raise RuntimeError(
                "regroup: expected a trainer that does not change while it trains on a regrouped "
                f"generation, got {reason}; pass regroup=False"
            )

    def _regrouped(self, batches: list[Batch]) -> list[Batch]:
        """Regroup a generation's micro-batches within each optimizer step, if every process can."""
        reason = self._reason_to_stay()
        if reason is not None:
            warn_once(
                "regroup: the trainer has changed since it was made, so samples stay in TRL's "
                f"micro-batches, because of {reason}; pass regroup=False"
            )
        stays = reason is not None or any(x.get("pixel_values") is not None for x in batches)
        stays |= len({len(batch["prompt_ids"]) for batch in batches}) > 1
        # All processes regroup, or none: each micro-batch gathers metrics over processes.
        if self.accelerator.gather(torch.tensor([stays], device=self.accelerator.device)).any():
            reason = reason or "images or uneven micro-batches"
            _logger.debug("regroup: samples of a generation stay, because of %s", reason)
            return batches
        in_trees = self.layout == "tree"
        if in_trees:
            trunk = trunk_of(self.model)
            if fits_trees(trunk) is None:  # not tried yet: run it on one sample
                self._score(self.model, micro_batches.samples_of(batches[0], [0]))
            in_trees = fits_trees(trunk) is True
        return micro_batches.regrouped(self, batches, in_trees=in_trees)

    def _lacks_old(self, inputs: Batch) -> bool:
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
        if not (phi or is_corrected(self)):  # both log metrics over all sequences
            # zeros stand for the old log-probabilities that the loss will get
            _, _, live = micro_batches.foreseen(self, {**batch, OLD: zeros})
        logps = zeros if self._is_idle(batch) else self._score(self.model, batch, live)
        self._take_old(batch, logps)

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
            per_sequence = config.sampling_ratio_is_per_sequence
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

    def _compute_loss(self, model: Any, inputs: Batch) -> Tensor:
        """Compute TRL's loss, and tell the policy's forward which gradient to expect."""
        part: Part | None = inputs.get(PART)
        if self._is_idle(inputs):
            if self._lacks_old(inputs):
                self._score_old(inputs)
            loss = torch.zeros((), device=self.accelerator.device, requires_grad=True)
        elif part is None:
            loss = self._loss_of(model, inputs)[0]
        else:
            with micro_batches.unlogged(self):
                loss, kept = self._loss_of(model, inputs)
            definition = micro_batches.config_of(self).definition
            if definition.loss_over(num_items=True) == "sequences":
                size = len(part.window.batches[0]["prompt_ids"])  # TRL's micro-batch size
                loss = len(inputs["prompt_ids"]) / size * loss
            part.window.keep(part.samples, kept)
        self._log_figures()
        if part is not None and part.is_last:
            # TRL's loss logs the metrics of its own micro-batches; no model runs
            for batch in part.window.restored():
                results = {name: batch.pop(name) for name in _RESULTS if name in batch}
                with torch.no_grad():
                    done = Scoring(self._options, model, batch, results=results, is_done=True)
                    self._loss_by_trl(done)
        return loss

    def _loss_of(self, model: Any, inputs: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss of a micro-batch, the tensors behind its metrics, (B, ...) by name)."""
        lacks_old = self._lacks_old(inputs)
        inputs = {**inputs}  # a copy: if unscored, the loss adds its own log-probabilities
        config, expected, live = micro_batches.foreseen(self, inputs)
        factor: Tensor | float = 1.0
        if self.zero_advantage == "train":
            live = None
        elif self.zero_advantage == "skip" and live is not None:
            inputs, factor = micro_batches.without_dead(inputs, live, config)
            config, expected, _ = micro_batches.foreseen(self, inputs)
        mask = inputs["completion_mask"]
        counted = mask if config is None else micro_batches.counted_tokens(inputs)
        scoring = Scoring(
            self._options, model, inputs, counted, expected, live, lacks_old=lacks_old
        )
        if self._has_exact_kl:
            scoring.score = inputs[STATES].compare
        loss = self._loss_by_trl(scoring)
        kept = {
            name: inputs[name]
            for name in (OLD, RATIO, REFERENCE, "completion_mask")
            if name in inputs
        }
        return factor * loss, kept | {name: x.detach() for name, x in scoring.results.items()}

    def _loss_by_trl(self, scoring: Scoring) -> Tensor:
        """Compute TRL's loss, plus the exact KL if requested."""
        mask, has_exact_kl = scoring.inputs["completion_mask"], self._has_exact_kl
        skips = self.zero_advantage == "skip"
        is_measured = not skips or self.accelerator.gather(mask.any().reshape(1)).any()
        # for the exact KL, leave out TRL's own term
        changes = [(self, "beta", 0.0)] if has_exact_kl else []
        # nothing is logged if no process has a sequence left
        with nullcontext() if is_measured else micro_batches.unlogged(self):
            with all_replaced(changes), self._following(scoring):
                loss: Tensor = super()._compute_loss(scoring.model, scoring.inputs)
            if not has_exact_kl:
                return loss
            if "divergence" not in scoring.results:
                raise RuntimeError(
                    "kl_estimator: expected TRL's loss to run its fused head, but it did not"
                )
            return micro_batches.with_exact_kl(
                self, loss, scoring.inputs, scoring.results["divergence"]
            )

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
        inputs = {**batch, "completion_mask": mask}
        scoring = Scoring(self._options, model, inputs, mask, score=score)
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(self.model, checkpointing),
            self._following(scoring),
        ):
            rows = (*scoring.rows, mask.size(1))
            logps, *_ = self._get_per_token_logps_and_entropies(model, *rows, **images)
        return logps

    @contextmanager
    def _following(self, scoring: Scoring) -> Iterator[None]:
        """Inside the context, `scoring` is in progress.

        The forwards that a subclass runs itself, of policy or reference, have its options and sets.
        """
        of_others = scored_by(scoring.of_other_rows(), self.model, self.ref_model)
        with replaced(self, "_scoring", scoring), of_others:
            yield

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Score as TRL does, with the trainer's options and what it predicts for these rows."""
        scoring, rows = self._scoring, (input_ids, attention_mask, logits_to_keep)
        if not scoring.is_of(model, *rows):
            scoring = scoring.of_other_rows()
        if scoring.is_done:
            return scoring.results["logps"], scoring.results["entropies"], None
        with scored_by(scoring, model):
            results = super()._get_per_token_logps_and_entropies(model, *rows, *args, **kwargs)
        scores = zip(("logps", "entropies"), results[:2], strict=True)
        scoring.results |= {name: x for name, x in scores if x is not None}
        if scoring.lacks_old:
            scoring.lacks_old = False
            self._take_old(scoring.inputs, results[0])
        return results


class FusedGRPOTrainer(FusedLossMixin, GRPOTrainer):
    """Train like TRL's ``GRPOTrainer``, with less work: same arguments, losses and metrics.

    ::

        trainer = FusedGRPOTrainer(
            model="Qwen/Qwen3-0.6B", reward_funcs=rewards, train_dataset=data, args=GRPOConfig(...)
        )
        trainer.train()

    The trainer logs additional metrics. Two of them, ``tokens/computed`` and ``rows/projected``,
    show that it is active. Other trainers in the process are unaffected; `patch_trl` speeds them
    up.

    Args:
        fused_sampling_correction: whether to skip the forward with which TRL scores a batch before
            computing its loss. If this forward is skipped, the forward of the loss also gives the
            old log-probabilities, and the ratio to the sampler if TRL corrects for vLLM.
            ``"auto"``: skip it while the policy is still the one that generated the batch. TRL
            still scores if the model has dropout, or if a subclass overrides a method that may read
            the scores. True: skip it without checking for dropout and overridden methods; raise an
            error if there is no sampler to correct for. False: TRL always scores.
        kl_estimator: ``"k3"``: TRL's estimate from sampled tokens. ``"full"``: the KL term (`beta`)
            and the metric ``kl`` are the exact divergence from the reference, over the whole
            vocabulary; `use_bias_correction_kl` is ignored. Each micro-batch then keeps the
            reference's hidden states (B, T, H').
        zero_advantage, layout: as in `grpo_kernels.transformers.causal_lm_loss`. They decide what
            the model computes for sequences without a gradient, for padding, and for shared
            prefixes.
        regroup: whether to sort the samples of an optimizer step into micro-batches by prompt. Each
            prompt then runs once, and micro-batches that become empty compute nothing. The gradient
            of the step and every logged value remain the same as in TRL. ``"auto"``: regroup,
            unless the loss depends on which samples share a micro-batch, or a subclass overrides a
            method that sees a micro-batch. True: regroup without checking for overridden methods;
            raise an error if the loss depends on the grouping. False: use TRL's micro-batches.
        tokens_per_forward: maximum number of tokens in a regrouped micro-batch, counting a shared
            prompt once. A higher maximum is faster and needs more memory. None: as many tokens as
            TRL's padded micro-batch has.
        on_missing_set: None: score over the whole vocabulary, as TRL does. ``"error"`` or
            ``"full"``: score over the ids that a truncating sampler kept, which your `rollout_func`
            returns as ``"sampling_mask"``. With ``"error"``, a token without a set raises an error
            on a CPU and gives NaN on other devices. ``"full"`` scores such tokens over the whole
            vocabulary. Both settings log ``kept/size``, the mean size of a set, and
            ``kept/without_set``, the share of tokens without one.
        engine, backend, workspace_bytes: as in `grpo_kernels.Run`, for every call of the head. On a
            GPU with free memory, the default needs more memory than TRL's head. With
            ``workspace_bytes=512 * 2**20``, a head that trains needs less than TRL's
            (docs/memory.md).
        args, kwargs: arguments of TRL's trainer.

    Raises:
        ValueError: an invalid option, or options that cannot be combined.
    """

    # help() shows TRL's arguments, then ours
    __signature__ = inspect.Signature(
        [
            x.replace(annotation=x.empty)
            for function in (GRPOTrainer, FusedLossMixin.__init__)
            for x in inspect.signature(function).parameters.values()
            if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY) and x.name != "self"
        ]
    )


def _check_names(trainer: type, given: Collection[str]) -> None:
    """Raise TypeError for a misspelled option of ours; TRL reports other unknown names."""
    owners = [x for x in trainer.__mro__ if "__init__" in vars(x)]
    known = {name for x in owners for name in inspect.signature(vars(x)["__init__"]).parameters}
    own = inspect.signature(FusedLossMixin.__init__).parameters.values()
    ours = [x.name for x in own if x.kind is x.KEYWORD_ONLY]
    for name in given:
        hint = "" if name in known else did_you_mean(name, ours)
        if "did you mean" in hint:
            raise TypeError(f"{name}: {trainer.__name__} has no such argument{hint}")


def _reader_of(trainer: Any, names: Sequence[str]) -> str | None:
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
