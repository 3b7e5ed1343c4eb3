"""TRL's GRPO trainer with its language-model head, forward and backward, computed by `grpo_kernels`.

All of the loss stays TRL's. `FusedGRPOTrainer` adds two facts that TRL's call to its head does not pass: which rows
are completion tokens, and which gradient the loss is going to send back (`grpo_kernels.policy_expectation`). The
one-pass engine computes the gradient for the expected coefficients in the forward, and the backward checks them against
the true ones, so that an expectation that is off (an option this module does not know, a subclass with its own term)
costs time and never changes the result.

TRL calls `_prepare_inputs` and `_compute_loss` for each micro-batch. The chain of calls, one within the other::

    _prepare_inputs                                    generates; gives the micro-batch, which the reference scores
    _compute_loss                                      puts what is foreseen about the micro-batch into a `Scoring`
      TRL's _compute_loss
        _get_per_token_logps_and_entropies
          only_needed                                  replaces the forward of the trunk, and TRL's fused head
            TRL's _get_per_token_logps_and_entropies
              the model's forward                      once or, with a batch size, part by part
                run, of a `_TrunkCall`                 computes the hidden states that are needed
              FusedHead.apply                          takes `Scoring` and `ModelCall` from their context variables
                linear_logprob
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal

import torch
import trl.trainer.grpo_trainer as trl_grpo
from torch import Tensor
from trl import GRPOTrainer

from grpo_kernels.base.choices import (
    BackendName,
    BatchLayout,
    EngineName,
    WithoutSet,
    ZeroAdvantage,
)
from grpo_kernels.body import trial
from grpo_kernels.body.inputs import TrunkOptions
from grpo_kernels.body.trunk import trunk_of
from grpo_kernels.call.run import Run, check_run
from grpo_kernels.host import during, replaced
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.transformers.head import causal_lm
from grpo_kernels.trl import exact_kl, expected_gradient, micro_batches, old_scoring, sampled_sets
from grpo_kernels.trl import head as heads
from grpo_kernels.trl.expected_gradient import live_sequences
from grpo_kernels.trl.fused_head import HEAD, add_fused_lm_head, measured
from grpo_kernels.trl.row_count import LogsRows
from grpo_kernels.trl.scoring import PATCHED, SCORING, Scoring
from grpo_kernels.trl.scoring_call import only_needed


class FusedLossMixin(LogsRows):
    """Mixin that makes a ``GRPOTrainer`` subclass use the fused loss: ``class Mine(FusedLossMixin, GMPOTrainer)``.

    Args:
        fused_sampling_correction: ``"auto"``: until the policy changes, the ratio to the sampler (``use_vllm`` with
            ``vllm_importance_sampling_correction``) and old log-probabilities (``num_iterations``,
            ``steps_per_generation``) come from the loss's own forward, wherever losses and metrics are TRL's to
            rounding: not with dropout, nor if a subclass overrides a method that may read them. That saves TRL's
            scoring of the batch, a forward of the model. False: TRL scores. True: as ``"auto"`` without these two
            conditions; an error without a sampler to correct for.
        kl_estimator: ``"k3"``, TRL's estimate from sampled tokens; or ``"full"``: the KL term (`beta`) and the metric
            ``kl`` are the divergence from the reference over the whole vocabulary, exact and with less variance.
            `use_bias_correction_kl` does not apply to it. A micro-batch then has the reference's hidden states,
            (B, T, H'), in place of its log-probabilities.
        zero_advantage, layout: as in `grpo_kernels.transformers.causal_lm_loss`: what the model computes
            below its head for sequences without gradient, for padding, and for prefixes that sequences share.
        regroup: True to bring the samples of an optimizer step together by prompt: micro-batches fill up one after the
            other, and those that are left compute nothing. The step's gradient stays the same, metrics weigh samples
            differently: docs/training-step.md.
        tokens_per_forward: most tokens of a regrouped micro-batch, a shared prompt counted once; None: as many as TRL's
            padded micro-batch has. More of them is faster and takes more memory.
        sampling_mask: ``"error"`` or ``"full"``: a `rollout_func` returns the ids that a truncating sampler kept
            (``"sampling_mask"``), and all log-probabilities and entropies are taken over these sets; the value is
            `without_set` of `grpo_kernels.linear_logprob`. None: over the whole vocabulary, as in TRL. Logged:
            ``kept/size``, the mean number of ids in a set, and ``kept/without_set``, the share of tokens without one.
        engine, backend, workspace_bytes: as in `grpo_kernels.Run`, of every call of the head: `engine` and
            `backend` choose how it is computed, `workspace_bytes` bounds its temporary memory. On a GPU
            with memory free the default takes more than TRL's head, ``workspace_bytes=512 * 2**20`` less:
            docs/memory.md.
        args, kwargs: the trainer's own.
    """

    args: Any
    accelerator: Any
    beta: float
    num_iterations: int
    _buffered_inputs: Any

    def __init__(
        self,
        *args: Any,
        fused_sampling_correction: bool | Literal["auto"] = "auto",
        kl_estimator: Literal["k3", "full"] = "k3",
        zero_advantage: ZeroAdvantage = "score",
        layout: BatchLayout = "tree",
        regroup: bool = False,
        tokens_per_forward: int | None = None,
        sampling_mask: WithoutSet | None = None,
        engine: EngineName = "auto",
        backend: BackendName = "auto",
        workspace_bytes: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._run = Run(engine, backend, workspace_bytes)
        check_run(self._run)
        exact_kl.check_estimator(kl_estimator)
        self.trunk_options = TrunkOptions(zero_advantage, layout)
        if not isinstance(regroup, bool):
            raise TypeError(f"regroup: expected a bool, got {regroup!r}")
        self.regroup, self.tokens_per_forward = regroup, tokens_per_forward
        if not HEAD.is_known():
            HEAD.warn_unknown()
        old_scoring.check_option(fused_sampling_correction)
        self.fused_sampling_correction = fused_sampling_correction
        self.kl_estimator = kl_estimator
        self.sampling_mask = sampling_mask
        self._old_scoring = old_scoring.OldScoring()
        self._reference_head: exact_kl.ReferenceHead | None = (
            None  # of the reference's last scoring
        )
        with ExitStack() as stack:
            if HEAD.is_known():
                stack.enter_context(heads.adapters_allowed())
                stack.enter_context(replaced(trl_grpo, "add_fused_lm_head", add_fused_lm_head))
            super().__init__(*args, **kwargs)
        if HEAD.is_known():
            heads.check_head(self.model, self.args)
            measured(causal_lm(self.accelerator.unwrap_model(self.model)))
        micro_batches.check_options(self, self._loss_owner())
        exact_kl.check_beta(self)
        sampled_sets.check_option(self, is_known=HEAD.is_known())
        sampled_sets.warn_of_truncation(self)
        if exact_kl.is_asked_for(self):
            exact_kl.check_trainer(self, self._loss_owner(), HEAD.is_known())

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does; first score what an interrupted training has left unscored in TRL's buffer."""
        for batch in self._old_scoring.due({}, self._buffered_inputs or ()):
            self._score_old(batch)
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Return TRL's micro-batch, scored by the reference; after a generation, regroup all if `regroup` is set.

        Before the optimizer step that ends with it, score the other micro-batches for which TRL's scoring was left out.
        """
        if self.regroup and self._trains:
            micro_batches.check_window(self)
        before = self._buffered_inputs
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        if not self._trains:
            return self._with_reference(inputs)
        if self.regroup and self._buffered_inputs is not before:
            self._buffered_inputs = self._regrouped(self._buffered_inputs)
            inputs = self._buffered_inputs[self._step % len(self._buffered_inputs)]  # type: ignore[attr-defined]
        due = (
            self._old_scoring.due(inputs, self._buffered_inputs)
            if self.accelerator.sync_gradients
            else []
        )
        for batch in due:
            self._score_old(batch)
        self._old_scoring.start(inputs)
        return self._with_reference(inputs)

    def _with_reference(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of a loss, with the reference's log-probabilities or head inputs if TRL left them out."""
        is_exact = exact_kl.is_asked_for(self)
        name = exact_kl.KEY if is_exact else old_scoring.REFERENCE
        is_left_out = self.beta != 0.0 and self._old_scoring.defers_reference and name not in inputs
        if not is_left_out or (micro_batches.EMPTY in inputs and self._is_alone):
            return inputs
        scoring = self._scoring(sampled=inputs.get(sampled_sets.KEY))
        with old_scoring.as_reference(self) as model, during(SCORING, scoring):
            if is_exact:
                unwrapped, shape = (
                    self.accelerator.unwrap_model(model),
                    inputs["completion_ids"].shape,
                )
                scoring.reference_head = self._reference_head = exact_kl.ReferenceHead(
                    unwrapped, shape
                )
            found = old_scoring.score(self, model, inputs)
        if scoring.reference_head is not None:
            found = scoring.reference_head.give()
        if self._trains and self.num_iterations > 1:
            inputs[name] = found  # of TRL's buffer, for later passes over it
        return {**inputs, name: found}

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Return TRL's batch; with `sampling_mask` it has the sampler's sets."""
        scoring = self._scoring()
        with during(SCORING, scoring):
            prepare = super()._generate_and_score_completions  # type: ignore[misc]
            batch = self._old_scoring.prepare(self, prepare, inputs)
        if scoring.sampled is not None:
            batch[sampled_sets.KEY] = sampled_sets.of_batch(scoring.sampled, batch)
        return batch

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return what TRL's rollout generates; with `sampling_mask`, keep the sampler's sets for its scoring."""
        generated = super()._generate(*args, **kwargs)  # type: ignore[misc]
        if self.sampling_mask is not None:
            scoring = self._current()
            scoring.sampled = sampled_sets.taken(generated)
            sampled_sets.measure(self, scoring.sampled)
        return generated

    def _regrouped(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the micro-batches of a generation, their samples regrouped within each optimizer step."""
        live = [self._live(batch) for batch in batches]
        window = min(self.args.gradient_accumulation_steps, len(batches))
        in_trees = self._fits_trees(batches[0])
        return micro_batches.regrouped(
            batches, live, window, self.tokens_per_forward, in_trees=in_trees
        )

    def _fits_trees(self, batch: dict[str, Any]) -> bool:
        """Return True if micro-batches run as trees; tries the model on one sample of `batch` if it has not run."""
        if self.trunk_options.layout != "tree":
            return False
        trunk = trunk_of(self.accelerator.unwrap_model(self.model))
        if trial.fits_trees(trunk) is None:
            old_scoring.score(self, self.model, micro_batches.first_sample(batch))
        return trial.fits_trees(trunk) is True

    def _score_old(self, batch: dict[str, Any]) -> None:
        """Put old log-probabilities into a micro-batch that is trained on only after the policy has changed."""
        if micro_batches.EMPTY in batch and self._is_alone:
            self._old_scoring.pass_over(self, batch)
            return
        live: Tensor | None = None
        if not old_scoring.reads_dead(
            self
        ):  # the loss will have a ratio to old log-probabilities, not known yet
            with_old = {
                **batch,
                old_scoring.OLD: torch.zeros_like(batch["completion_mask"], dtype=torch.float32),
            }
            live = self._live(with_old)
        with during(SCORING, self._scoring(sampled=batch.get(sampled_sets.KEY))):
            self._old_scoring.take(self, batch, old_scoring.score(self, self.model, batch, live))

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Compute TRL's loss; its head calls are told which gradient to expect."""
        if micro_batches.EMPTY in inputs and self._is_alone:
            self._old_scoring.pass_over(self, inputs)
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        inputs, scoring, factor, may_be_empty = self._foreseen(inputs)
        with self._measured(inputs, may_be_empty=may_be_empty), during(SCORING, scoring):
            if scoring.comparison is None:
                return factor * super()._compute_loss(model, inputs)  # type: ignore[misc]
            with exact_kl.without_estimate(self):
                loss = super()._compute_loss(model, inputs)  # type: ignore[misc]
            return factor * exact_kl.add_term(self, loss, inputs, scoring.comparison.divergences)

    def _foreseen(
        self, inputs: dict[str, Any]
    ) -> tuple[dict[str, Any], Scoring, Tensor | float, bool]:
        """Return what is foreseen of the loss of a micro-batch: (inputs, scoring, factor, may_be_empty).

        TRL computes its loss of these `inputs`, in which ``zero_advantage="skip"`` has masked sequences; `factor`
        multiplies the loss. `may_be_empty` is True if no sequence may be left to measure.
        """
        is_unscored = self._old_scoring.is_missing(self, inputs)
        unscored = (
            {**inputs} if is_unscored else None
        )  # the log-probabilities of the loss are put into it
        inputs = inputs if unscored is None else unscored
        regroups = self.regroup and self._trains
        factor: Tensor | float = micro_batches.share_of_mean(self, inputs) if regroups else 1.0
        config = self._loss_config(is_unscored=is_unscored)
        rows = expected_gradient.rows_of_loss(self, inputs, config)
        live = live_sequences(self, rows) if self.trunk_options.zero_advantage == "skip" else None
        if live is not None:
            inputs, of_tokens = micro_batches.without_dead(inputs, live, config)
            factor, rows = factor * of_tokens, expected_gradient.rows_of_loss(self, inputs, config)
        comparison = exact_kl.comparison_of(self, inputs)
        sampled = inputs.get(sampled_sets.KEY)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        scoring = self._scoring(
            ids=ids, rows=rows, sampled=sampled, unscored=unscored, comparison=comparison
        )
        return inputs, scoring, factor, regroups or live is not None

    def _measured(
        self, inputs: dict[str, Any], *, may_be_empty: bool
    ) -> AbstractContextManager[None]:
        """Return a context for a loss whose metrics count only if some process has a sequence to measure."""
        if (
            not may_be_empty
            or self.accelerator.gather(inputs["completion_mask"].any().reshape(1)).any()
        ):
            return nullcontext()
        return micro_batches.unmeasured(self._metrics["train"])  # type: ignore[attr-defined]

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's scoring (policy, old policy, reference), in which only completion tokens are projected."""
        score = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        arguments = inspect.signature(score).bind(*args, **kwargs).arguments
        scoring = self._current()
        if scoring.ids is not None and not torch.equal(scoring.ids, arguments["input_ids"]):
            scoring = self._scoring(sampled=scoring.sampled)
        with only_needed(self, scoring, arguments):
            results = score(*args, **kwargs)
        if scoring.unscored is not None:
            inputs, scoring.unscored = scoring.unscored, None
            self._old_scoring.take(self, inputs, results[0])
            self._old_scoring.keep(inputs)
        return results

    def _scoring(self, **facts: Any) -> Scoring:
        """Return a new `Scoring` with the options and shares of this trainer."""
        return Scoring(self._run, PATCHED.logits_dtype, self._shares, **facts)

    def _current(self) -> Scoring:
        """Return the `Scoring` that is valid now; a new one outside of losses and generations."""
        return self._scoring() if SCORING.get() is PATCHED else SCORING.get()

    def _live(self, inputs: dict[str, Any]) -> Tensor | None:
        """Return (B,) bool: sequences of a micro-batch that may get a gradient from its loss; None: not known."""
        return live_sequences(
            self, expected_gradient.rows_of_loss(self, inputs, self._loss_config())
        )

    def _loss_config(self, *, is_unscored: bool = False) -> LossConfig | None:
        """Configuration of the loss that ``super()._compute_loss`` computes; None: not known, or without gradient."""
        if not (torch.is_grad_enabled() and HEAD.is_known()):
            return None
        return expected_gradient.loss_config(self, self._loss_owner(), is_unscored=is_unscored)

    def _loss_owner(self) -> type:
        """Return the class that defines ``super()._compute_loss``."""
        after = type(self).__mro__[type(self).__mro__.index(FusedLossMixin) + 1 :]
        return next(cls for cls in after if "_compute_loss" in vars(cls))

    @property
    def _is_alone(self) -> bool:
        """True if no other process waits for this one's forwards and gradients."""
        return bool(self.accelerator.num_processes == 1)

    @property
    def _trains(self) -> bool:
        return bool(self.model.training)


class FusedGRPOTrainer(FusedLossMixin, GRPOTrainer):
    """``trl.GRPOTrainer`` with the same arguments, losses and metrics, and fewer matrix products.

    It also logs ``rows/projected`` and ``rows/gradient`` (`row_count`), which show that it is at work.

    With N completion tokens, a share s of which carries gradient, its head costs (2 + 4s)NVH floating-point
    operations a step where TRL's costs 8NVH. Prompt, padding and tool tokens are not projected; TRL's head
    projects tool tokens too and, where it has no Triton (on a CPU), prompt and padding. Where the loss
    couples tokens (a sequence-level ratio with old log-probabilities, vespo, an entropy quantile, an
    off-policy mask) it costs (2 + 6s)NVH. Gradients are exact either way. With vLLM, and in the first of
    several optimizer steps on a batch, ``fused_sampling_correction`` saves a forward of the whole model,
    see `FusedLossMixin`.

    Other trainers of the process are not touched; `patch_trl` is for those.
    """
