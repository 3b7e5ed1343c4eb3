"""TRL's GRPO trainer with its language-model head, forward and backward, computed by `grpo_kernels`.

All of the loss stays TRL's. `FusedGRPOTrainer` adds two facts that TRL's call to its head does not pass: which rows
are completion tokens, and which gradient the loss is going to send back (`grpo_kernels.policy_expectation`). The
one-pass engine computes the gradient for the expected coefficients in the forward, and the backward checks them against
the true ones, so that an expectation that is off (an option this module does not know, a subclass with its own term)
costs time and never changes the result.
"""

from __future__ import annotations

import dataclasses
import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from trl import GRPOTrainer

from grpo_kernels.base.choices import BackendName, BatchLayout, EngineName, WithoutSet, ZeroAdvantage
from grpo_kernels.call.options import Run, check_run
from grpo_kernels.integrations.transformers import exactness
from grpo_kernels.integrations.transformers.options import TrunkOptions
from grpo_kernels.integrations.transformers.token_count import TokenCount
from grpo_kernels.integrations.transformers.trunk import live_trunk, trunk_of
from grpo_kernels.integrations.trl import exact_kl, foreseen, hook, old_scoring, sampled_sets, sampling, step
from grpo_kernels.integrations.trl import head as heads
from grpo_kernels.integrations.trl.row_count import RowCount, counting
from grpo_kernels.objective.config import LossConfig, config_of_trainer


class FusedLossMixin:
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
            `use_bias_correction_kl` does not apply to it. The batch then has the reference's hidden states, (B, T, H'),
            in place of its log-probabilities.
        zero_advantage, layout: as in `grpo_kernels.integrations.transformers.causal_lm_loss`: what the model computes
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
            `backend` choose how it is computed, `workspace_bytes` bounds its temporary memory.
        args, kwargs: the trainer's own.
    """

    args: Any
    accelerator: Any
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
        if not hook.SEAM.is_known():
            hook.SEAM.warn_unknown()
        old_scoring.check_option(fused_sampling_correction)
        self.fused_sampling_correction = fused_sampling_correction
        self.kl_estimator = kl_estimator
        self.sampling_mask = sampling_mask
        self._sampled: list[sampled_sets.SampledSets] | None = None  # of the batch that is being scored
        self._reference_head: exact_kl.Kept | None = None  # kept in the reference's last scoring
        self._reference: exact_kl.Reference | None = None  # for the loss that is being computed
        self._loss_rows: hook.Rows | None = None
        self._row_count = RowCount()
        self._token_count = TokenCount()
        self._old_scoring = old_scoring.OldScoring()
        self._unscored: dict[str, Any] | None = None  # the inputs of the loss, while it has to score them
        with heads.adapters_allowed() if hook.SEAM.is_known() else nullcontext():
            super().__init__(*args, **kwargs)
        if hook.SEAM.is_known():
            heads.check_head(self.model, self.args)  # type: ignore[attr-defined]
        step.check_options(self, self._loss_owner())
        exact_kl.check_beta(self)
        sampled_sets.check_option(self, is_known=hook.SEAM.is_known())
        sampled_sets.warn_of_truncation(self)
        if self._has_exact_kl:
            exact_kl.check_trainer(self, self._loss_owner(), hook.SEAM.is_known())

    @property
    def _has_exact_kl(self) -> bool:
        return self.kl_estimator == "full" and self.args.beta != 0.0

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return what TRL's rollout generates; with `sampling_mask`, keep the sampler's sets."""
        generated = super()._generate(*args, **kwargs)  # type: ignore[misc]
        if self.sampling_mask is not None:
            self._sampled = sampled_sets.taken(generated)
            sampled_sets.measure(self, self._sampled)
        return generated

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Return TRL's batch; for the exact KL term the reference's hidden states replace its log-probabilities."""
        batch = self._prepared_batch(inputs)
        if self._sampled is not None:
            batch[sampled_sets.KEY], self._sampled = self._sampled, None
        if self._has_exact_kl:
            if self._reference_head is None:
                raise RuntimeError("kl_estimator: expected trl to score its reference, got a batch without")
            del batch["ref_per_token_logps"]
            batch[exact_kl.KEY] = self._reference_head.give()
        return batch

    def _prepared_batch(self, inputs: Any) -> dict[str, Any]:
        """Return TRL's batch, as `old_scoring` wants it."""
        self._reference_head = None
        prepare = super()._generate_and_score_completions  # type: ignore[misc]
        return self._old_scoring.prepare(self, prepare, inputs)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Return TRL's micro-batch; after a generation, regroup all micro-batches if `regroup` is set.

        Before the optimizer step that ends with it, score the other micro-batches for which TRL's scoring was left out.
        """
        before = self._buffered_inputs
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        if self.regroup and self._trains and self._buffered_inputs is not before:
            batches, window = self._buffered_inputs, self.args.gradient_accumulation_steps
            live = [self._live_sequences(self._foreseen_rows(batch)) for batch in batches]
            in_trees, budget = self._fits_trees(batches[0]), self.tokens_per_forward
            self._buffered_inputs = step.regrouped(batches, live, min(window, len(batches)), budget, in_trees=in_trees)
            inputs = self._buffered_inputs[self._step % len(batches)]  # type: ignore[attr-defined]
        if self._trains:
            due = self._old_scoring.due(inputs, self._buffered_inputs) if self.accelerator.sync_gradients else []
            for batch in due:
                self._score_old(batch)
            self._old_scoring.start(inputs)
        return inputs

    def _fits_trees(self, batch: dict[str, Any]) -> bool:
        """Return True if micro-batches run as trees; tries the model on one sample of `batch` if it has not run."""
        if self.trunk_options.layout != "tree":
            return False
        trunk = trunk_of(self.accelerator.unwrap_model(self.model))  # type: ignore[attr-defined]
        if exactness.fits_trees(trunk) is None:
            old_scoring.score(self, step.first_sample(batch), None)
        return exactness.fits_trees(trunk) is True

    def _score_old(self, batch: dict[str, Any]) -> None:
        """Put old log-probabilities into a micro-batch that is trained on only after the policy has changed."""
        if step.EMPTY in batch and self._is_alone:
            self._old_scoring.pass_over(self, batch)
            return
        live: Tensor | None = None
        if not old_scoring.reads_dead(self):  # the loss will have a ratio to old log-probabilities, not known yet
            with_old = {**batch, old_scoring.OLD: torch.zeros_like(batch["completion_mask"], dtype=torch.float32)}
            live = self._live_sequences(self._foreseen_rows(with_old))
        self._sampled = batch.get(sampled_sets.KEY)
        try:
            self._old_scoring.take(self, batch, old_scoring.score(self, batch, live))
        finally:
            self._sampled = None

    @property
    def _is_alone(self) -> bool:
        """True if no other process waits for this one's forwards and gradients."""
        return bool(self.accelerator.num_processes == 1)

    @property
    def _trains(self) -> bool:
        return bool(self.model.training)  # type: ignore[attr-defined]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Compute TRL's loss; its head calls are told which gradient to expect."""
        if step.EMPTY in inputs and self._is_alone:
            self._old_scoring.pass_over(self, inputs)
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        if self._old_scoring.is_missing(self, inputs):
            inputs = self._unscored = {**inputs}
        self._sampled = inputs.get(sampled_sets.KEY)
        self._loss_rows = self._foreseen_rows(inputs)
        live = self._live_sequences(self._loss_rows)
        regroups = self.regroup and self._trains
        factor: Tensor | float = step.share_of_mean(self, inputs) if regroups else 1.0
        skips = live is not None and self.trunk_options.zero_advantage == "skip"
        if live is not None and skips:
            inputs, skipped = step.without_dead(inputs, live, self._loss_config())
            factor = factor * skipped
            self._loss_rows = self._foreseen_rows(inputs)
        measured: AbstractContextManager[None] = nullcontext()
        if skips or regroups:
            counts = inputs["completion_mask"].any().reshape(1)
            if not self.accelerator.gather(counts).any():
                measured = step.unmeasured(self._metrics["train"])  # type: ignore[attr-defined]
        try:
            with measured:
                if self._has_exact_kl:
                    return factor * self._loss_with_exact_kl(model, inputs)
                return factor * super()._compute_loss(model, inputs)  # type: ignore[misc]
        finally:
            self._loss_rows = self._unscored = self._reference = self._sampled = None

    def _loss_with_exact_kl(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        assert self._reference_head is not None
        reference = self._reference = exact_kl.Reference(inputs[exact_kl.KEY], self._reference_head)
        with exact_kl.without_estimate(self):
            loss = super()._compute_loss(model, inputs)  # type: ignore[misc]
        if reference.divergences is None:
            raise RuntimeError("kl_estimator: expected trl's loss to call its fused head, got none")
        config = config_of_trainer(self.args)
        return exact_kl.add_term(self, config, loss, inputs, reference.divergences)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's scoring (policy, old policy, reference), in which only completion tokens are projected."""
        score = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        given = inspect.signature(score).bind(*args, **kwargs).arguments
        rows = self._rows_of_call(given)
        whole = heads.whole_heads(given["model"]) if hook.SEAM.is_known() else nullcontext()
        trunk = self._trunk(given, rows) if rows is not None and hook.SEAM.is_known() else nullcontext()
        with hook.SEAM.filled(), hook.rows(rows, self._run), counting(self._row_count), whole, trunk:
            results = score(*args, **kwargs)
        if self._unscored is not None:
            inputs, self._unscored = self._unscored, None
            self._old_scoring.take(self, inputs, results[0])
            self._old_scoring.keep(inputs)
        return results

    def _trunk(self, given: dict[str, Any], rows: hook.Rows) -> AbstractContextManager[Any]:
        """Context in which the model's trunk computes only what the rows of a scoring call need."""
        mask = given["attention_mask"] != 0
        mask[:, : -rows.labelled.size(1)] = False
        needed = torch.nn.functional.pad(mask[:, 1:], (0, 1))  # a token is predicted from the one before it
        live = None if self.trunk_options.zero_advantage == "train" else self._live_sequences(rows)
        count = self._token_count if self._trains else TokenCount()
        return live_trunk(given["model"], self.trunk_options, needed=needed, live=live, count=count)

    def _live_sequences(self, rows: hook.Rows | None) -> Tensor | None:
        """(B,) bool: sequences that may get a gradient; None: not known."""
        expected = None if rows is None else rows.expected
        if expected is None or expected.graded is None or self.aux_loss_enabled:  # type: ignore[attr-defined]
            return None
        return expected.graded.any(dim=1)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log TRL's metrics, of all ranks, with this rank's row and token counts since the last log."""
        if self._trains:
            found = self._row_count.take() | self._token_count.take()
            for name, mean in found.items():
                self._metrics["train"][name].append(mean)  # type: ignore[attr-defined]
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _rows_of_call(self, given: dict[str, Any]) -> hook.Rows | None:
        """The rows of the head calls of one scoring call, whose arguments are `given`."""
        rows = self._rows_over_vocabulary(given)
        if rows is None or self._sampled is None or self.sampling_mask is None:
            return rows
        compute, drawn = sampled_sets.scoring_over(self._sampled, rows.labelled, self.sampling_mask)
        return dataclasses.replace(rows, compute=compute, counted=drawn if rows.counted is None else rows.counted)

    def _rows_over_vocabulary(self, given: dict[str, Any]) -> hook.Rows | None:
        """The same, but for the sampler's sets."""
        if "attention_mask" not in given or "logits_to_keep" not in given:
            return None
        labelled = given["attention_mask"][:, -given["logits_to_keep"] :] != 0  # (B, T)
        batch_size = given.get("batch_size") or labelled.size(0)
        if self._reference is not None:
            known = self._loss_rows or hook.Rows(labelled, batch_size)
            compare = self._reference.compare
            return dataclasses.replace(known, labelled=labelled, batch_size=batch_size, compute=compare)
        if self._has_exact_kl and exact_kl.is_reference(self, given["model"]):
            self._reference_head = kept = exact_kl.Kept(self.accelerator.unwrap_model(given["model"]), labelled)
            return hook.Rows(labelled, batch_size, compute=kept.take)
        loss_rows = self._loss_rows
        if loss_rows is None or not torch.is_grad_enabled() or loss_rows.labelled.shape != labelled.shape:
            return hook.Rows(labelled, batch_size)
        return dataclasses.replace(loss_rows, labelled=labelled, batch_size=batch_size)

    def _foreseen_rows(self, inputs: dict[str, Any]) -> hook.Rows | None:
        """Rows that the loss of this micro-batch reads, and the gradient it will send; None if the loss is unknown."""
        config = self._loss_config() if torch.is_grad_enabled() and hook.SEAM.is_known() else None
        return None if config is None else foreseen.rows_of_loss(self, inputs, config)

    def _loss_config(self) -> LossConfig | None:
        """Configuration of the loss that ``super()._compute_loss`` computes, or None if we do not know that loss."""
        makes_ratio = self._unscored is not None and sampling.is_corrected(self)
        return foreseen.loss_config(self, self._loss_owner(), makes_ratio=makes_ratio)

    def _loss_owner(self) -> type:
        """Return the class that defines ``super()._compute_loss``."""
        after = type(self).__mro__[type(self).__mro__.index(FusedLossMixin) + 1 :]
        return next(cls for cls in after if "_compute_loss" in vars(cls))


class FusedGRPOTrainer(FusedLossMixin, GRPOTrainer):
    """``trl.GRPOTrainer`` with the same arguments, losses and metrics, and fewer matrix products.

    It also logs ``rows/projected`` and ``rows/gradient`` (`row_count`), which show that it is at work.

    With N completion tokens, a share s of which carries gradient, its head costs (2 + 4s)NVH floating-point
    operations a step where TRL's costs 8NVH, and prompt, padding and tool tokens are not projected at all. Where the
    loss couples tokens (a sequence-level ratio with old log-probabilities, vespo, an entropy quantile, an off-policy
    mask) it costs (2 + 6s)NVH. Gradients are exact either way. With vLLM, and in the first of several optimizer
    steps on a batch, ``fused_sampling_correction`` saves a forward of the whole model, see `FusedLossMixin`.

    Other trainers of the process are not touched; `patch_trl` is for those.
    """
