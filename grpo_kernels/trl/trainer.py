"""TRL's GRPO trainer with its language-model head, forward and backward, by `grpo_kernels`.

All of the loss stays TRL's. `FusedGRPOTrainer` adds two facts that TRL's call to its head does not
pass: which rows are completion tokens, and which gradient the loss is going to send back
(`grpo_kernels.policy_expectation`). The one-pass engine computes the gradient for the expected
coefficients in the forward, and the backward checks them against the true ones, so that an
expectation that is off (an option this module does not know, a subclass with its own term) costs
time and never changes the result.

TRL calls `_prepare_inputs` and `_compute_loss` for each micro-batch. The chain of calls::

    _prepare_inputs                        generates; gives the micro-batch, scored by the reference
    _compute_loss                          puts what is foreseen into a `Scoring`
      TRL's _compute_loss
        _get_per_token_logps_and_entropies
          _only_needed                     replaces the forward of the trunk, and TRL's fused head
            TRL's _get_per_token_logps_and_entropies
              the model's forward          once or, with a batch size, part by part
                run, of a `_TrunkCall`     computes the hidden states that are needed
              FusedHead.apply              takes `HeadCalls` from its context variable
                linear_logprob
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import trl.trainer.grpo_trainer as trl_grpo
from torch import Tensor
from torch.nn import functional as F
from trl import GRPOTrainer

from grpo_kernels.base import choices
from grpo_kernels.body import trial
from grpo_kernels.body.inputs import TrunkOptions
from grpo_kernels.body.trunk import live_trunk, trunk_of
from grpo_kernels.call.plan import Run, check_run
from grpo_kernels.call.results import Scores
from grpo_kernels.patching import KnownRows, Shares, during, replaced
from grpo_kernels.transformers.head import causal_lm
from grpo_kernels.trl import exact_kl, fused_head, micro_batches, scoring
from grpo_kernels.trl.fused_head import CALL, HEAD, PATCHED, HeadCalls
from grpo_kernels.trl.micro_batches import EMPTY


@dataclass
class Scoring:
    """One loss of a micro-batch, or one generation, or one scoring of a batch before its loss."""

    # (B, L) of the loss's call, which alone `rows`, `unscored` and `compute` are of; None: of all
    ids: Tensor | None = None
    rows: KnownRows | None = None  # the (B, T) tokens that are read, and the expected gradient
    sampled: Sequence[scoring.SampledSets | None] | None = None  # by completion
    unscored: dict[str, Any] | None = None  # inputs that lack old log-probabilities
    compute: Callable[..., Scores] | None = None  # as in `HeadCalls`


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
        regroup: True to bring the samples of an optimizer step together by prompt: micro-batches
            fill up one after the other, and those that are left compute nothing. The step's
            gradient stays the same, metrics weigh samples differently: docs/training-step.md.
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
    num_iterations: int
    _buffered_inputs: Any
    _scoring: Scoring | None = None  # of the loss or generation that runs

    def __init__(
        self,
        *args: Any,
        fused_sampling_correction: bool | Literal["auto"] = "auto",
        kl_estimator: Literal["k3", "full"] = "k3",
        zero_advantage: choices.ZeroAdvantage = "score",
        layout: choices.BatchLayout = "tree",
        regroup: bool = False,
        tokens_per_forward: int | None = None,
        sampling_mask: choices.WithoutSet | None = None,
        engine: choices.EngineName = "auto",
        backend: choices.BackendName = "auto",
        workspace_bytes: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._run = Run(engine, backend, workspace_bytes)
        check_run(self._run)
        if kl_estimator not in ("k3", "full"):
            raise ValueError(
                f"kl_estimator: expected 'k3', which is TRL's own, or 'full', got {kl_estimator!r}"
            )
        self.trunk_options = TrunkOptions(zero_advantage, layout)
        if not isinstance(regroup, bool):
            raise TypeError(f"regroup: expected a bool, got {regroup!r}")
        if not isinstance(fused_sampling_correction, bool) and fused_sampling_correction != "auto":
            raise ValueError(
                "fused_sampling_correction: expected 'auto', True or False, got "
                f"{fused_sampling_correction!r}"
            )
        self.regroup, self.tokens_per_forward = regroup, tokens_per_forward
        self.fused_sampling_correction = fused_sampling_correction
        self.kl_estimator = kl_estimator
        self.sampling_mask = sampling_mask
        self._old_scoring = scoring.OldScoring()
        is_known = HEAD.is_known()
        if not is_known:
            HEAD.warn_unknown()
        with ExitStack() as stack:
            if is_known:
                ours = fused_head.add_fused_lm_head
                stack.enter_context(fused_head.adapters_allowed())
                stack.enter_context(replaced(trl_grpo, "add_fused_lm_head", ours))
            super().__init__(*args, **kwargs)
        if is_known:
            fused_head.check_head(self.model, self.args)
            fused_head.measured(causal_lm(self.accelerator.unwrap_model(self.model)))
        micro_batches.check_options(self)
        exact_kl.check(self)
        scoring.check_sampling_mask(self)
        scoring.warn_of_truncation(self)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does; first score what an interrupted training has left unscored."""
        for batch in self._old_scoring.due(self._buffered_inputs or ()):
            self._score_old(batch)
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """TRL's micro-batch, scored by the reference; after a generation, regroup all of them."""
        if self.regroup and self._trains:
            micro_batches.check_window(self)
        before = self._buffered_inputs
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        if not self._trains:
            return self._with_reference(inputs)
        if self.regroup and self._buffered_inputs is not before:
            self._buffered_inputs = self._regrouped(self._buffered_inputs)
            inputs = self._buffered_inputs[self._step % len(self._buffered_inputs)]  # type: ignore[attr-defined]
        if self.accelerator.sync_gradients:  # the policy changes after this micro-batch
            for batch in self._old_scoring.due(self._buffered_inputs):
                if batch is not inputs:
                    self._score_old(batch)
        self._old_scoring.start(inputs)
        return self._with_reference(inputs)

    def _with_reference(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a loss, with what the reference has to give if TRL left it out."""
        name = exact_kl.Reference.KEY if self._has_exact_kl else scoring.REFERENCE
        is_left_out = self.beta != 0.0 and self._old_scoring.defers_reference and name not in inputs
        if not is_left_out or self._is_idle(inputs):
            return inputs
        now = Scoring(sampled=inputs.get(scoring.SETS))
        found: Tensor | exact_kl.Reference | None = None
        with scoring.as_reference(self) as model, replaced(self, "_scoring", now):
            if self._has_exact_kl:
                shape = inputs["completion_ids"].shape
                found = exact_kl.Reference(self.accelerator.unwrap_model(model), shape)
                now.compute = found.take
            logps = scoring.score(self, model, inputs)
        found = logps if found is None else found
        if self._trains and self.num_iterations > 1:
            inputs[name] = found  # of TRL's buffer, for later passes over it
        return {**inputs, name: found}

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's batch; with `sampling_mask` it has the sampler's sets."""
        now = Scoring()
        with replaced(self, "_scoring", now):
            prepare = super()._generate_and_score_completions  # type: ignore[misc]
            batch = self._old_scoring.prepare(self, prepare, inputs)
        if now.sampled is not None:
            batch[scoring.SETS] = scoring.sets_of_batch(now.sampled, batch)
        return batch

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """What TRL's rollout generates; with `sampling_mask`, keep the sampler's sets."""
        generated = super()._generate(*args, **kwargs)  # type: ignore[misc]
        if self.sampling_mask is not None:
            (self._scoring or Scoring()).sampled = scoring.taken_sets(self, generated)
        return generated

    def _regrouped(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The micro-batches of a generation, samples regrouped within each optimizer step."""
        in_trees = self.trunk_options.layout == "tree"
        if in_trees:
            trunk = trunk_of(self.accelerator.unwrap_model(self.model))
            if trial.fits_trees(trunk) is None:  # it has not run yet: try it on one sample
                scoring.score(self, self.model, micro_batches.first_sample(batches[0]))
            in_trees = trial.fits_trees(trunk) is True
        return micro_batches.regrouped(self, batches, in_trees=in_trees)

    def _score_old(self, batch: dict[str, Any]) -> None:
        """Old log-probabilities of a micro-batch that is trained on after the policy's change."""
        if self._is_idle(batch):
            self._old_scoring.pass_over(self, batch)
            return
        live: Tensor | None = None
        phi = self.args.loss_type == "vespo" and self.trunk_options.zero_advantage != "skip"
        if not (phi or micro_batches.is_corrected(self)):  # whose metrics are of all sequences
            # the loss will have a ratio to old log-probabilities, not known yet
            old = torch.zeros_like(batch["completion_mask"], dtype=torch.float32)
            live = micro_batches.live_of_loss(self, {**batch, scoring.OLD: old})
        with replaced(self, "_scoring", Scoring(sampled=batch.get(scoring.SETS))):
            self._old_scoring.take(self, batch, scoring.score(self, self.model, batch, live))

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Compute TRL's loss; its head calls are told which gradient to expect."""
        if self._is_idle(inputs):
            self._old_scoring.pass_over(self, inputs)
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        is_unscored = self._old_scoring.is_missing(self, inputs)
        unscored = {**inputs} if is_unscored else None  # gets the log-probabilities of the loss
        inputs = inputs if unscored is None else unscored
        regroups = self.regroup and self._trains
        factor: Tensor | float = micro_batches.share_of_mean(self, inputs) if regroups else 1.0
        config = micro_batches.loss_config(self, is_unscored=is_unscored)
        rows, live = micro_batches.rows_of_loss(self, inputs, config), None
        if self.trunk_options.zero_advantage == "skip":
            live = micro_batches.live_sequences(self, rows)
        if live is not None:
            inputs, of_tokens = micro_batches.without_dead(inputs, live, config)
            factor = factor * of_tokens
            rows = micro_batches.rows_of_loss(self, inputs, config)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        now = Scoring(ids, rows, inputs.get(scoring.SETS), unscored)
        may_be_empty = regroups or live is not None
        with micro_batches.measured(self, inputs) if may_be_empty else nullcontext():
            if not self._has_exact_kl:
                with replaced(self, "_scoring", now):
                    return factor * super()._compute_loss(model, inputs)  # type: ignore[misc]
            reference: exact_kl.Reference = inputs[exact_kl.Reference.KEY]
            now.compute = reference.compare
            # without a KL term of TRL's own
            with replaced(self, "_scoring", now), replaced(self, "beta", 0.0):
                loss = super()._compute_loss(model, inputs)  # type: ignore[misc]
            divergences, reference.divergences = reference.divergences, None
            return factor * exact_kl.add_term(self, loss, inputs, divergences)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's scoring (policy, old policy, reference) that projects only completion tokens."""
        score = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        arguments = inspect.signature(score).bind(*args, **kwargs).arguments
        now = self._scoring or Scoring()
        if now.ids is not None and not torch.equal(now.ids, arguments["input_ids"]):
            now = Scoring(sampled=now.sampled)
        with self._only_needed(now, arguments) if HEAD.is_known() else nullcontext():
            results = score(*args, **kwargs)
        if now.unscored is not None:
            inputs, now.unscored = now.unscored, None
            self._old_scoring.take(self, inputs, results[0])
            self._old_scoring.keep(inputs)
        return results

    @contextmanager
    def _only_needed(self, now: Scoring, arguments: dict[str, Any]) -> Iterator[None]:
        """Inside, trunk and head compute only what TRL's call with `arguments` needs."""
        model = arguments["model"]
        trunk: AbstractContextManager[Any] = nullcontext()
        call = HeadCalls(self._run, PATCHED.logits_dtype, self._shares, compute=now.compute)
        if "attention_mask" in arguments and "logits_to_keep" in arguments:
            mask, columns = arguments["attention_mask"], arguments["logits_to_keep"]
            call.labelled = labelled = mask[:, -columns:] != 0
            call.batch_size = arguments.get("batch_size") or len(labelled)
            rows = now.rows
            if rows is None or rows.counted.shape != labelled.shape or not torch.is_grad_enabled():
                rows = KnownRows(labelled)
            if now.sampled is not None and self.sampling_mask is not None:
                sets = scoring.sets_of_rows(now.sampled, arguments["input_ids"], mask, columns)
                if any(x is not None for x in sets):
                    call.compute, drawn = scoring.over_sets(sets, labelled, self.sampling_mask)
                    rows = KnownRows(rows.counted * drawn, rows.fill, rows.expected)
            call.rows = rows
            live = None
            if self.trunk_options.zero_advantage != "train":
                live = micro_batches.live_sequences(self, rows)
            # the cells that predict labelled tokens: each the next one
            needed = F.pad(labelled, (mask.shape[1] - columns - 1, 1))
            shares = self._shares if self._trains else Shares()
            trunk = live_trunk(model, self.trunk_options, needed=needed, live=live, shares=shares)
        with HEAD.replaced(), during(CALL, call), fused_head.whole_heads(model), trunk:
            yield

    @property
    def _loss_owner(self) -> type:
        """The class that defines ``super()._compute_loss``."""
        after = type(self).__mro__[type(self).__mro__.index(FusedLossMixin) + 1 :]
        return next(cls for cls in after if "_compute_loss" in vars(cls))

    @property
    def _has_exact_kl(self) -> bool:
        return bool(self.kl_estimator == "full" and self.args.beta != 0.0)

    def _is_idle(self, inputs: dict[str, Any]) -> bool:
        """True if no other process waits for the forward of a micro-batch without samples."""
        return EMPTY in inputs and bool(self.accelerator.num_processes == 1)

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
