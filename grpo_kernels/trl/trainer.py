"""TRL's GRPO trainer with its language-model head, forward and backward, by `grpo_kernels`.

The loss stays TRL's (the exact KL adds its term). `FusedGRPOTrainer` gives the policy and the
reference our `add_fused_lm_head`, and tells the policy's forward what TRL's call of it does not
say: which tokens the loss reads, and which gradient it is going to send back
(`grpo_kernels.policy_expectation`). The one-pass engine computes the gradient for the expected
coefficients in the forward, and the backward checks them against the true ones, so that an
expectation that is off (an option this module does not know, a subclass with its own term) costs
time and never changes the result; a gradient where none was expected raises.

The calls, and what is ours of them::

    train                      after an interruption: what it has left
    once a generation
      _prepare_inputs          TRL's generates and rewards, kept from scoring (`OldScoring.prepare`)
        _regrouped             each window of micro-batches is divided anew (`regroup`)
        _score_old             old log-probabilities of what later optimizer steps take
    each micro-batch
      _with_reference          the reference scores it
      _compute_loss
        _loss_of               what is foreseen: rows that are read, gradient, live sequences
          _loss_by_trl         TRL's _compute_loss
            _get_per_token_logps_and_entropies
              model(..., labels=..., fused_lm_head=True)
                FusedHead.run  the body where it is needed, the head, TRL's record
    after the last micro-batch of a window
      _log_as_trl              TRL's _compute_loss on what was kept, for its metrics
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import trl.trainer.grpo_trainer as trl_grpo
from torch import Tensor
from trl import GRPOTrainer

from grpo_kernels.base import choices
from grpo_kernels.base.checks import warn_once
from grpo_kernels.body import trial
from grpo_kernels.body.trunk import trunk_of
from grpo_kernels.call.plan import Run, check_run
from grpo_kernels.objective.config import config_of_trainer
from grpo_kernels.patching import KnownRows, Shares, replaced
from grpo_kernels.transformers.call import TrunkOptions
from grpo_kernels.transformers.causal_lm import check_skip
from grpo_kernels.trl import exact_kl, fused_head, micro_batches, regroup, scoring
from grpo_kernels.trl.fused_head import Foreseen, HeadOptions, head_of
from grpo_kernels.trl.regroup import PART, Part
from grpo_kernels.trl.sampled_sets import (
    SETS,
    SampledSets,
    check_sampling_mask,
    sets_of_batch,
    taken_sets,
)

_logger = logging.getLogger(__name__)
_PARTS = ("prompt", "completion")
_SEES_MICRO_BATCHES = (*scoring.READERS, *scoring.OF_LOSS)


@dataclass(eq=False)
class Call:
    """One scoring that the trainer knows: that of a micro-batch, by its loss or for it."""

    model: Any
    inputs: dict[str, Any]
    foreseen: Foreseen = field(default_factory=Foreseen)
    is_unscored: bool = False  # `inputs` are to get old log-probabilities
    scores: tuple[Tensor, Tensor] | None = None  # log-probabilities and entropies (B, T)
    is_done: bool = False  # the scores are known: no model runs

    def is_of(self, model: Any, ids: Tensor, mask: Tensor, columns: int) -> bool:
        """True if this is the scoring of the last `columns` of these rows, (B, L) each."""
        is_same = model is self.model and columns == self.inputs["completion_ids"].shape[1]
        return is_same and all(
            torch.equal(torch.cat([self.inputs[f"{x}_{of}"] for x in _PARTS], dim=1), given)
            for of, given in (("ids", ids), ("mask", mask))
        )


class FusedLossMixin(fused_head.LogsRows):
    """Makes a ``GRPOTrainer`` subclass use the fused loss.

    For example ``class Mine(FusedLossMixin, GMPOTrainer)``.

    Args:
        fused_sampling_correction: ``"auto"``: until the policy changes, the ratio to the sampler
            (``use_vllm`` with ``vllm_importance_sampling_correction``) and old log-probabilities
            (``num_iterations``, ``steps_per_generation``) come from the loss's own forward. That
            saves TRL's scoring of the batch, a forward of the model. With dropout, or if a subclass
            overrides a method that may read them, TRL scores. True: not even then; an error
            without a sampler to correct for. False: TRL always scores.
        kl_estimator: ``"k3"``, TRL's estimate from sampled tokens; or ``"full"``: the KL term
            (`beta`) and the metric ``kl`` are the divergence from the reference over the whole
            vocabulary, exact and with less variance. `use_bias_correction_kl` does not apply to it.
            A micro-batch then keeps hidden states (B, T, H') of the reference.
        zero_advantage, layout: as in `grpo_kernels.transformers.causal_lm_loss`: what the model
            computes below its head for sequences without gradient, for padding, and for prefixes
            that sequences share.
        regroup: ``"auto"``: the samples of an optimizer step come together by prompt, micro-batches
            fill up one after the other, and those that are left compute nothing. The step's
            gradient and all that is logged stay TRL's. Not where the loss depends on which samples
            share a micro-batch, nor where a subclass overrides a method that sees one. True: there
            an error, a subclass is trusted. False: micro-batches are TRL's.
        tokens_per_forward: most tokens of a regrouped micro-batch, a shared prompt counted once;
            None: as many as TRL's padded micro-batch has. More of them is faster and takes more
            memory.
        sampling_mask: None: all is scored over the whole vocabulary, as in TRL. ``"error"`` or
            ``"full"``, the `without_set` of `grpo_kernels.linear_logprob`: a `rollout_func` returns
            the ids that a truncating sampler kept (``"sampling_mask"``), and log-probabilities and
            entropies are over these sets. Logged: ``kept/size``, the mean size of a set, and
            ``kept/without_set``, the share of tokens without one.
        engine, backend, workspace_bytes: as in `grpo_kernels.Run`, of every call of the head. On a
            GPU with memory free the default takes more memory than TRL's head,
            ``workspace_bytes=512 * 2**20`` less: docs/memory.md.
        args, kwargs: the trainer's own.
    """

    args: Any
    accelerator: Any
    beta: float
    loss_type: str
    num_iterations: int
    ref_model: Any
    _buffered_inputs: Any
    _step: int
    _call: Call | None = None  # the scoring that runs

    def __init__(
        self,
        *args: Any,
        fused_sampling_correction: bool | Literal["auto"] = "auto",
        kl_estimator: Literal["k3", "full"] = "k3",
        zero_advantage: choices.ZeroAdvantage = "score",
        layout: choices.BatchLayout = "tree",
        regroup: bool | Literal["auto"] = "auto",
        tokens_per_forward: int | None = None,
        sampling_mask: choices.WithoutSet | None = None,
        engine: choices.EngineName = "auto",
        backend: choices.BackendName = "auto",
        workspace_bytes: int | None = None,
        **kwargs: Any,
    ) -> None:
        run = Run(engine, backend, workspace_bytes)
        self.trunk_options = TrunkOptions(zero_advantage, layout)
        check_run(run)
        if kl_estimator not in ("k3", "full"):
            raise ValueError(
                f"kl_estimator: expected 'k3', which is TRL's own, or 'full', got {kl_estimator!r}"
            )
        for name, value in (
            ("regroup", regroup),
            ("fused_sampling_correction", fused_sampling_correction),
        ):
            if not isinstance(value, bool) and value != "auto":
                raise ValueError(f"{name}: expected 'auto', True or False, got {value!r}")
        self.tokens_per_forward = tokens_per_forward
        self.fused_sampling_correction = fused_sampling_correction
        self.kl_estimator = kl_estimator
        self.sampling_mask = sampling_mask
        self._old_scoring, self._shares = scoring.OldScoring(), Shares()
        options = HeadOptions(run, self.trunk_options, "float32", self._shares, sampling_mask)
        ours = partial(fused_head.add_fused_lm_head, options=options)
        with fused_head.adapters_allowed(), replaced(trl_grpo, "add_fused_lm_head", ours):
            super().__init__(*args, **kwargs)
        fused_head.check_head(self.model, self.args)
        self._check_skip()
        self.regroup, self._is_trusted = self._decided(regroup), regroup is True
        if kl_estimator == "full":
            exact_kl.check(self)
        check_sampling_mask(self)
        scoring.warn_of_truncation(self)
        if self.args.torch_compile:
            warn_once(
                "torch_compile: the forward of the loss is not compiled as a whole; compile the "
                "model's layers instead (docs/training-step.md)"
            )

    def _check_skip(self) -> None:
        if self.trunk_options.zero_advantage != "skip":
            return
        check_skip(config_of_trainer(self.args))
        for name, is_set in (
            ("use_adaptive_entropy", self.args.use_adaptive_entropy),
            ("fused_sampling_correction", self.fused_sampling_correction is True),
        ):
            if is_set:
                raise ValueError(
                    f"zero_advantage: expected 'score' or 'train' with {name}, which reads all "
                    "sequences, got 'skip'"
                )

    def _decided(self, regroups: bool | str) -> bool:
        """True if samples are regrouped; raise ValueError if they are to be and cannot."""
        reason, budget = regroup.reason_against(self), self.tokens_per_forward
        if regroups is True and reason is not None:
            raise ValueError(f"regroup: expected 'auto' or False with {reason}, got True")
        reader = scoring.reader_of(self, (*_SEES_MICRO_BATCHES, "training_step"))
        if reader is not None:
            reason = reason or f"{reader}, which may read micro-batches"
        if self.trunk_options.layout == "padded":
            reason = reason or "layout='padded', as TRL computes them"
        found = regroups is True or (regroups == "auto" and reason is None)
        if regroups == "auto" and not found:
            _logger.debug("regroup: samples stay in TRL's micro-batches, because of %s", reason)
        is_number = isinstance(budget, int) and not isinstance(budget, bool) and budget >= 1
        if budget is not None and not (found and is_number):
            expected = "a number of tokens, an int >= 1, or None" if found else "None"
            why = "" if found else " where samples are not regrouped"
            why += f" ({reason})" if not found and regroups == "auto" else ""
            raise ValueError(f"tokens_per_forward: expected {expected}{why}, got {budget!r}")
        return found

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does; first see to what an interrupted training has left."""
        if self.regroup and self._step % regroup.window_of(self):
            self._stop_regrouping(
                "a training was interrupted within an optimizer step, and train() called again, so "
                "that the steps to come are not of whole windows"
            )
        due = self._old_scoring.due(self._buffered_inputs or ())
        if due:
            self.model.train()  # as it will be: an evaluation may have come last
        for batch in due:
            self._score_old(batch)
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def _stop_regrouping(self, why: str) -> None:
        """From now on, micro-batches are TRL's, and those that are left of a generation, too."""
        warnings.warn(
            f"grpo_kernels: regroup: {why}: samples stay in TRL's micro-batches from now on",
            stacklevel=3,
        )
        names = [scoring.OLD, scoring.RATIO] if micro_batches.is_corrected(self) else [scoring.OLD]
        buffered = self._buffered_inputs or ()
        self.regroup = False
        self._buffered_inputs = regroup.undone(buffered, names) or None
        self._old_scoring.forget_figures()

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """TRL's micro-batch, scored by the reference; after a generation, regroup all of them."""
        begins = self.regroup and self._trains and self._step % regroup.window_of(self) == 0
        reason = regroup.reason_against(self) if begins else None
        if begins and reason is None and not self._is_trusted:
            reason = scoring.reader_of(self, _SEES_MICRO_BATCHES)
        if reason is not None:
            self._stop_regrouping(f"the trainer has changed since it was made: {reason}")
        if self.regroup and self._trains:
            regroup.check_window(self)
        before = self._buffered_inputs
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        if not self._trains:
            return self._with_reference(inputs)
        if self.regroup and self._buffered_inputs is not before:
            self._buffered_inputs = self._regrouped(self._buffered_inputs)
            inputs = self._buffered_inputs[self._step % len(self._buffered_inputs)]
        if self.accelerator.sync_gradients:  # the policy changes after this micro-batch
            for batch in self._old_scoring.due(self._buffered_inputs):
                if batch is not inputs:
                    self._score_old(batch)
        return self._with_reference(inputs)

    def _with_reference(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a loss, with what the reference has to give if TRL left it out."""
        name = exact_kl.REFERENCE if self._has_exact_kl else scoring.REFERENCE
        is_left_out = self.beta != 0.0 and self._old_scoring.defers_reference and name not in inputs
        if not is_left_out or self._is_idle(inputs):
            return inputs
        found: Tensor | exact_kl.Reference
        with scoring.as_reference(self) as model, self._over_sets(inputs):
            if self._has_exact_kl:
                found = exact_kl.Reference(self.accelerator.unwrap_model(model))
                labelled = KnownRows(inputs["completion_mask"])
                call = Call(model, inputs, Foreseen(labelled, score=found.take))
                with replaced(self, "_call", call):
                    scoring.score(self, model, inputs)
            else:
                found = scoring.score(self, model, inputs)
        if self._trains and self.num_iterations > 1:
            inputs[name] = found  # of TRL's buffer, for later passes over it
        return {**inputs, name: found}

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's batch; with `sampling_mask` it has the sampler's sets."""
        with self._over_sets({}):
            prepare = super()._generate_and_score_completions  # type: ignore[misc]
            batch = self._old_scoring.prepare(self, prepare, inputs)
            sets = head_of(self.model).sets
        if sets is not None:
            batch[SETS] = sets_of_batch(sets, batch)
        return batch

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """What TRL's rollout generates; with `sampling_mask`, keep the sampler's sets."""
        generated = super()._generate(*args, **kwargs)  # type: ignore[misc]
        if self.sampling_mask is not None:
            metrics = micro_batches.metrics_of(self)
            self._set_sets(taken_sets(generated, self.accelerator, metrics))
        return generated

    @contextmanager
    def _over_sets(self, batch: dict[str, Any]) -> Iterator[None]:
        """Inside, completions are scored over the sets of `batch`, where it has some."""
        self._set_sets(batch.get(SETS))
        try:
            yield
        finally:
            self._set_sets(None)

    def _set_sets(self, sets: list[SampledSets | None] | None) -> None:
        for model in (self.model, self.ref_model) if self.sampling_mask is not None else ():
            if model is not None:
                head_of(model).sets = sets

    def _regrouped(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The micro-batches of a generation, samples regrouped within each optimizer step."""
        stays = any(batch.get("pixel_values") is not None for batch in batches)
        stays |= len({len(batch["prompt_ids"]) for batch in batches}) > 1
        # on every process, or on none: micro-batches ask the others for their metrics
        if self.accelerator.gather(torch.tensor([stays], device=self.accelerator.device)).any():
            _logger.debug("regroup: samples stay, since there are images or uneven micro-batches")
            return batches
        in_trees = self.trunk_options.layout == "tree"
        if in_trees:
            trunk = trunk_of(self.accelerator.unwrap_model(self.model))
            if trial.fits_trees(trunk) is None:  # it has not run yet: try it on one sample
                scoring.score(self, self.model, regroup.first_sample(batches[0]))
            in_trees = trial.fits_trees(trunk) is True
        return regroup.regrouped(self, batches, in_trees=in_trees)

    def _score_old(self, batch: dict[str, Any]) -> None:
        """Old log-probabilities of a micro-batch that is trained on after the policy's change."""
        if self._is_idle(batch):
            self._old_scoring.pass_over(self, batch)
            self._old_scoring.log_figures(self)
            return
        live: Tensor | None = None
        phi = self.loss_type == "vespo" and self.trunk_options.zero_advantage != "skip"
        if not (phi or micro_batches.is_corrected(self)):  # whose metrics are of all sequences
            # the loss will have a ratio to old log-probabilities, not known yet
            old = torch.zeros_like(batch["completion_mask"], dtype=torch.float32)
            live = micro_batches.live_of_loss(self, {**batch, scoring.OLD: old})
        with self._over_sets(batch):
            self._old_scoring.take(self, batch, scoring.score(self, self.model, batch, live))
        self._old_scoring.log_figures(self)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss; the policy's forward is told which gradient to expect."""
        part: Part | None = inputs.get(PART)
        if self._is_idle(inputs):
            self._old_scoring.pass_over(self, inputs)
            loss = torch.zeros((), device=self.accelerator.device, requires_grad=True)
        elif part is None:
            loss = self._loss_of(model, inputs)[0]
        else:
            with regroup.unlogged(self):
                loss, kept = self._loss_of(model, inputs)
            loss = regroup.share_of_mean(self, inputs) * loss
            part.window.keep(part.samples, kept)
        self._old_scoring.log_figures(self)
        if part is not None and part.is_last:
            for batch in part.window.restored():
                self._log_as_trl(model, batch)
        return loss

    def _loss_of(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, and what its metrics are made of, (B, ...) by name."""
        is_unscored = self._old_scoring.is_missing(self, inputs)
        inputs = {**inputs}  # gets the log-probabilities of the loss, if it is unscored
        config = micro_batches.loss_config(self, is_unscored=is_unscored)
        rows = micro_batches.rows_of_loss(self, inputs, config)
        live: Tensor | None = None
        factor: Tensor | float = 1.0
        if self.trunk_options.zero_advantage == "skip":
            live = micro_batches.live_sequences(self, rows)
        if live is not None:
            inputs, factor = micro_batches.without_dead(inputs, live, config)
            rows = micro_batches.rows_of_loss(self, inputs, config)
        elif self.trunk_options.zero_advantage == "score":
            live = micro_batches.live_sequences(self, rows)
        foreseen = Foreseen(rows or KnownRows(inputs["completion_mask"]), live)
        if self._has_exact_kl:
            foreseen.score = inputs[exact_kl.REFERENCE].compare
        call = Call(model, inputs, foreseen, is_unscored)
        with self._over_sets(inputs):
            loss, kept = self._loss_by_trl(model, call)
        names = [scoring.OLD, scoring.RATIO, scoring.REFERENCE, "completion_mask"]
        kept |= {name: inputs[name] for name in names if name in inputs}
        return factor * loss, kept

    def _log_as_trl(self, model: Any, batch: dict[str, Any]) -> None:
        """Have TRL log what it does for a micro-batch of its own, of what its samples have given.

        No model runs.
        """
        scores = batch.pop("logps"), batch.pop("entropies")
        divergences = batch.pop("divergences", None)
        with torch.no_grad():
            call = Call(model, batch, scores=scores, is_done=True)
            self._loss_by_trl(model, call, divergences)

    def _loss_by_trl(
        self, model: Any, call: Call, divergences: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """TRL's loss of a call, and the (B, T) numbers that it is made of, detached.

        `divergences` are of the exact KL; None: of the call.
        """
        skips, mask = self.trunk_options.zero_advantage == "skip", call.inputs["completion_mask"]
        is_measured = not skips or self.accelerator.gather(mask.any().reshape(1)).any()
        with ExitStack() as stack:
            if not is_measured:  # no process has a sequence left
                stack.enter_context(regroup.unlogged(self))
            stack.enter_context(replaced(self, "_call", call))
            if not self._has_exact_kl:
                loss = super()._compute_loss(model, call.inputs)  # type: ignore[misc]
            else:  # without a KL term of TRL's own
                with replaced(self, "beta", 0.0):
                    loss = super()._compute_loss(model, call.inputs)  # type: ignore[misc]
                if divergences is None:
                    divergences = call.inputs[exact_kl.REFERENCE].given()
                loss = exact_kl.add_term(self, loss, call.inputs, divergences)
        found = {} if divergences is None else {"divergences": divergences.detach()}
        if call.scores is not None:
            found |= {"logps": call.scores[0].detach(), "entropies": call.scores[1].detach()}
        return loss, found

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """TRL's scoring, of a call that is known with what is foreseen of it."""
        call, given = self._call, (input_ids, attention_mask, logits_to_keep)
        score = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        if call is None or not call.is_of(model, *given):
            return score(model, *given, *args, **kwargs)
        if call.is_done and call.scores is not None:
            return (*call.scores, None)
        with replaced(head_of(model), "foreseen", call.foreseen):
            results = score(model, *given, *args, **kwargs)
        call.scores = results[:2]
        if call.is_unscored:
            call.is_unscored = False
            self._old_scoring.take(self, call.inputs, results[0])
            self._old_scoring.keep(self, call.inputs)
        return results

    @property
    def loss_owner(self) -> type:
        """The class that defines ``super()._compute_loss``."""
        after = type(self).__mro__[type(self).__mro__.index(FusedLossMixin) + 1 :]
        return next(cls for cls in after if "_compute_loss" in vars(cls))

    @property
    def _has_exact_kl(self) -> bool:
        return bool(self.kl_estimator == "full" and self.beta != 0.0)

    def _is_idle(self, inputs: dict[str, Any]) -> bool:
        """True if no other process waits for the forward of a micro-batch without samples."""
        return regroup.is_empty(inputs) and bool(self.accelerator.num_processes == 1)

    @property
    def _trains(self) -> bool:
        return bool(self.model.training)


class FusedGRPOTrainer(FusedLossMixin, GRPOTrainer):
    """``trl.GRPOTrainer`` with the same arguments, losses and metrics, and fewer matrix products.

    It also logs ``rows/projected`` and ``rows/gradient``, which show that it is at work.

    With N completion tokens, a share s of which carries gradient, its head costs (2 + 4s)NVH
    floating-point operations a step where TRL's costs 8NVH. Prompt, padding and tool tokens are not
    projected; TRL's head projects tool tokens too and, where it has no Triton (on a CPU), prompt
    and padding. Where the loss couples tokens (a sequence-level ratio with old log-probabilities,
    vespo, an entropy quantile, an off-policy mask) it costs (2 + 6s)NVH. Gradients are exact either
    way. With vLLM, and in the first of several optimizer steps on a batch,
    ``fused_sampling_correction`` saves a forward of the whole model, see `FusedLossMixin`.

    Other trainers of the process are not touched; `patch_trl` is for those.
    """
