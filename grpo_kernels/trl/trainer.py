"""TRL's GRPO trainer, with the forward and backward of its language-model head in `grpo_kernels`.

TRL's own code computes the loss; the exact KL adds its term. `FusedGRPOTrainer` gives policy and
reference this library's `add_fused_lm_head`. It also tells the policy's forward what TRL does not:
which tokens the loss reads, and which gradient it will send back
(`grpo_kernels.policy_expectation`). The one-pass engine computes the gradient for the expected
coefficients in the forward, and the backward checks them against the true ones. The expectation is
wrong if a subclass adds its own term, or if this module does not know an option. That costs time
but never changes the result. A gradient where none was expected raises an error.

The calls, and what this module adds to them::

    train                      after an interruption: score leftover micro-batches
    once per generation
      _prepare_inputs          TRL generates and rewards, without scoring (`Scoring`)
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
"""

from __future__ import annotations

import logging
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
import trl.trainer.grpo_trainer as trl_grpo
from torch import Tensor
from trl import GRPOTrainer

from grpo_kernels.base import choices
from grpo_kernels.base.checks import check_choice, warn_once
from grpo_kernels.body import trial
from grpo_kernels.body.trunk import trunk_of
from grpo_kernels.engine.plan import Run
from grpo_kernels.objective.config import config_of_trainer
from grpo_kernels.objective.losses import averaged_over
from grpo_kernels.patching import Shares, all_replaced, replaced
from grpo_kernels.transformers.causal_lm import check_skip
from grpo_kernels.trl import fused_head, micro_batches, scoring
from grpo_kernels.trl.fused_head import Call, HeadOptions
from grpo_kernels.trl.micro_batches import OLD, PART, RATIO, REFERENCE, Batch, Part
from grpo_kernels.trl.scoring import STATES, reader_of

_logger = logging.getLogger(__name__)
_RESULTS: tuple[str, ...] = ("logps", "entropies", "divergence")  # keys of `Call.results`
_SEES_MICRO_BATCHES = (*scoring.READERS, "get_off_policy_mask", "get_gamma_weights")


class FusedLossMixin(scoring.Scoring):
    """Add the fused loss to a subclass of ``GRPOTrainer``.

    ::

        class FusedGMPOTrainer(FusedLossMixin, GMPOTrainer): ...

    Any subclass works. If it has its own loss, samples are not regrouped and all sequences get a
    backward; TRL's GMPO is an exception. The mixin takes the arguments of `FusedGRPOTrainer`.
    """

    def __init__(
        self,
        *args: Any,
        fused_sampling_correction: bool | Literal["auto"] = "auto",
        kl_estimator: Literal["k3", "full"] = "k3",
        zero_advantage: choices.ZeroAdvantage = "score",
        layout: choices.BatchLayout = "tree",
        regroup: bool | Literal["auto"] = "auto",
        tokens_per_forward: int | None = None,
        on_missing_set: choices.OnMissingSet | None = None,
        engine: choices.EngineName = "auto",
        backend: choices.BackendName = "auto",
        workspace_bytes: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._shares, self._figures = Shares(), {True: [], False: []}
        run = Run(engine, backend, workspace_bytes)
        options = HeadOptions(run, layout, on_missing_set=on_missing_set, shares=self._shares)
        check_choice("zero_advantage", zero_advantage, choices.choices(choices.ZeroAdvantage))
        check_choice("kl_estimator", kl_estimator, ("k3", "full"), "; 'k3' is TRL's own")
        if on_missing_set is not None:
            modes, hint = choices.choices(choices.OnMissingSet), "; None: the whole vocabulary"
            check_choice("on_missing_set", on_missing_set, modes, hint)
        for name, value in (
            ("regroup", regroup),
            ("fused_sampling_correction", fused_sampling_correction),
        ):
            if not isinstance(value, bool) and value != "auto":
                raise ValueError(f"{name}: expected 'auto', True or False, got {value!r}")
        self.fused_sampling_correction, self.kl_estimator = fused_sampling_correction, kl_estimator
        self.zero_advantage, self.layout = zero_advantage, layout
        self.tokens_per_forward, self.on_missing_set = tokens_per_forward, on_missing_set
        ours = partial(fused_head.add_fused_lm_head, options=options)
        with fused_head.adapters_allowed(), replaced(trl_grpo, "add_fused_lm_head", ours):
            super().__init__(*args, **kwargs)
        fused_head.check_head(self.model, self.args)
        self.regroup, self._is_trusted = self._regroups(regroup), regroup is True
        self._check_options()
        self._warn_of_truncation()
        if self.args.torch_compile:
            warn_once(
                "torch_compile: the loss's forward is not compiled as a whole; compile the model's "
                "layers instead (docs/skipped-work.md)"
            )

    def _regroups(self, option: bool | str) -> bool:
        """Decide if samples are regrouped; raise ValueError if that is required but impossible."""
        reason = micro_batches.reason_against_regrouping(self)
        if option is True and reason is not None:
            raise ValueError(f"regroup: expected 'auto' or False with {reason}, got True")
        reader = reader_of(self, (*_SEES_MICRO_BATCHES, "training_step"))
        if reader is not None:
            reason = reason or f"{reader}, which may read micro-batches"
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

    def _check_options(self) -> None:
        args, sets, has_sets = self.args, self.on_missing_set, self.on_missing_set is not None
        skips, is_exact = self.zero_advantage == "skip", self.kl_estimator == "full"
        if skips:
            check_skip(config_of_trainer(args))
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

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does, after scoring what an interrupted run left behind."""
        if self.regroup and self._step % micro_batches.window_of(self):
            self._stop_regrouping(
                "training was interrupted within an optimizer step, so in the new call of train() "
                "the next steps do not consist of whole windows"
            )
        due = self._due()
        if due:
            self.model.train()  # the mode of the coming step; the last call may be an evaluation
        for batch in due:
            self._score_old(batch)
        return super().train(*args, **kwargs)

    def _stop_regrouping(self, why: str) -> None:
        """Use TRL's own micro-batches from now on, also for the rest of this generation."""
        warnings.warn(
            f"grpo_kernels: regroup: {why}: samples stay in TRL's micro-batches from now on",
            stacklevel=3,
        )
        names = [OLD, RATIO] if micro_batches.is_corrected(self) else [OLD]
        self.regroup = False
        self._buffered_inputs: Any = (
            micro_batches.undone(self._buffered_inputs or (), names) or None
        )
        self._figures[True].clear()  # the restored micro-batches are scored again

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        """TRL's micro-batch, scored by the reference; regroup after each generation."""
        if self.regroup and self._trains:
            self._check_regrouping()
        before = self._buffered_inputs
        inputs: Batch = super()._prepare_inputs(generation_batch)
        if not self._trains:
            return self._with_reference(inputs)
        if self.regroup and self._buffered_inputs is not before:
            self._buffered_inputs = self._regrouped(self._buffered_inputs)
            inputs = self._buffered_inputs[self._step % len(self._buffered_inputs)]
        if self.accelerator.sync_gradients:  # the policy changes after this micro-batch
            for batch in self._due():
                if batch is not inputs:
                    self._score_old(batch)
        return self._with_reference(inputs)

    def _check_regrouping(self) -> None:
        """Check that a window may begin at this micro-batch, and that no window is cut off."""
        window = micro_batches.window_of(self)
        if self._step % window == 0:
            reason = micro_batches.reason_against_regrouping(self)
            if reason is None and not self._is_trusted:
                reason = reader_of(self, _SEES_MICRO_BATCHES)
            if reason is not None:
                self._stop_regrouping(f"the trainer has changed since it was created: {reason}")
        if self.regroup and self.accelerator.sync_gradients and (self._step + 1) % window:
            raise RuntimeError(
                f"regroup: expected each optimizer step to end after {window} micro-batches, got "
                "one that ends earlier; pass regroup=False"
            )

    def _regrouped(self, batches: list[Batch]) -> list[Batch]:
        """Regroup a generation's micro-batches within each optimizer step, if every process can."""
        stays = any(batch.get("pixel_values") is not None for batch in batches)
        stays |= len({len(batch["prompt_ids"]) for batch in batches}) > 1
        # All processes regroup, or none: each micro-batch gathers metrics over processes.
        if self.accelerator.gather(torch.tensor([stays], device=self.accelerator.device)).any():
            _logger.debug("regroup: samples stay, because of images or uneven micro-batches")
            return batches
        in_trees = self.layout == "tree"
        if in_trees:
            trunk = trunk_of(self.model)
            if trial.fits_trees(trunk) is None:  # not tried yet: run it on one sample
                self._score(self.model, micro_batches.samples_of(batches[0], [0]))
            in_trees = trial.fits_trees(trunk) is True
        return micro_batches.regrouped(self, batches, in_trees=in_trees)

    def _compute_loss(self, model: Any, inputs: Batch) -> Tensor:
        """Compute TRL's loss, and tell the policy's forward which gradient to expect."""
        part: Part | None = inputs.get(PART)
        if self._is_idle(inputs):
            if self._is_unscored(inputs):
                self._score_old(inputs)
            loss = torch.zeros((), device=self.accelerator.device, requires_grad=True)
        elif part is None:
            loss = self._loss_of(model, inputs)[0]
        else:
            with micro_batches.unlogged(self):
                loss, kept = self._loss_of(model, inputs)
            if averaged_over(micro_batches.config_of(self), num_items=True) == "sequences":
                size = len(part.window.batches[0]["prompt_ids"])  # TRL's micro-batch size
                loss = len(inputs["prompt_ids"]) / size * loss
            part.window.keep(part.samples, kept)
        self._log_figures()
        if part is not None and part.is_last:
            # TRL's loss logs the metrics of its own micro-batches; no model runs
            for batch in part.window.restored():
                results = {name: batch.pop(name) for name in _RESULTS if name in batch}
                with torch.no_grad():
                    self._loss_by_trl(Call(model, batch, results=results, is_done=True))
        return loss

    def _loss_of(self, model: Any, inputs: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss of a micro-batch, the tensors behind its metrics, (B, ...) by name)."""
        is_unscored = self._is_unscored(inputs)
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
        call = Call(model, inputs, counted, expected, live, is_unscored=is_unscored)
        if self._has_exact_kl:
            call.score = inputs[STATES].compare
        loss = self._loss_by_trl(call)
        kept = {
            name: inputs[name]
            for name in (OLD, RATIO, REFERENCE, "completion_mask")
            if name in inputs
        }
        return factor * loss, kept | {name: x.detach() for name, x in call.results.items()}

    def _loss_by_trl(self, call: Call) -> Tensor:
        """Compute TRL's loss of a call, plus the exact KL if requested."""
        mask, has_exact_kl = call.inputs["completion_mask"], self._has_exact_kl
        skips = self.zero_advantage == "skip"
        is_measured = not skips or self.accelerator.gather(mask.any().reshape(1)).any()
        changes: list[tuple[Any, str, Any]] = [(self, "_call", call)]
        if has_exact_kl:  # leave out TRL's own KL term
            changes.append((self, "beta", 0.0))
        # nothing is logged if no process has a sequence left
        with nullcontext() if is_measured else micro_batches.unlogged(self):
            with self._over_sets(call.inputs), all_replaced(changes):
                loss: Tensor = super()._compute_loss(call.model, call.inputs)
            if not has_exact_kl:
                return loss
            if "divergence" not in call.results:
                raise RuntimeError(
                    "kl_estimator: expected TRL's loss to run its fused head, but it did not"
                )
            return micro_batches.with_exact_kl(self, loss, call.inputs, call.results["divergence"])

    @property
    def loss_owner(self) -> type:
        """The class that defines ``super()._compute_loss``."""
        after = type(self).__mro__[type(self).__mro__.index(FusedLossMixin) + 1 :]
        return next(cls for cls in after if "_compute_loss" in vars(cls))


class FusedGRPOTrainer(FusedLossMixin, GRPOTrainer):
    """Train like TRL's ``GRPOTrainer``, but faster: same arguments, losses and metrics.

    ::

        trainer = FusedGRPOTrainer(
            model="Qwen/Qwen3-0.6B", reward_funcs=rewards, train_dataset=data, args=GRPOConfig(...)
        )
        trainer.train()

    The trainer also logs ``sequences/gradient``, ``tokens/computed`` and ``rows/gradient``, which
    show that the fused loss is active. It does not affect other trainers in the process. To speed
    up those, use `patch_trl`.

    Args:
        fused_sampling_correction: whether to skip the forward with which TRL scores a batch before
            computing its loss. ``"auto"``: skip it while the policy is still the one that generated
            the batch. The forward of the loss then also gives the old log-probabilities and the
            ratio to the sampler (``use_vllm`` with ``vllm_importance_sampling_correction``). TRL
            still scores if the model has dropout, or if a subclass overrides a method that may read
            the scores. True: skip the forward even in these two cases; raise an error if there is
            no sampler to correct for. False: TRL always scores.
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
            returns as ``"sampling_mask"``. ``"error"`` refuses tokens without a set, and ``"full"``
            scores them over the whole vocabulary. This logs ``kept/size``, the mean size of a set,
            and ``kept/without_set``, the share of tokens without one.
        engine, backend, workspace_bytes: as in `grpo_kernels.Run`, for every call of the head. On a
            GPU with free memory, the default needs more memory than TRL's head, and
            ``workspace_bytes=512 * 2**20`` needs less than TRL's head (docs/memory.md).
        args, kwargs: arguments of TRL's trainer.

    Raises:
        ValueError: an invalid option, or options that cannot be combined.
    """
