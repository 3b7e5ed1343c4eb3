"""Scoring before the loss: old log-probabilities, the reference's, and what a sampler hands over.

TRL scores a generated batch with the policy before it trains on it: for the ratio to the sampler
(``vllm_importance_sampling_correction``), or if the policy changes before all of the batch is used.
Until the policy changes, a micro-batch's loss computes the same log-probabilities. So TRL prepares
the batch without that scoring here, and then

    micro-batches of the first optimizer step   take the log-probabilities that their loss computes,
    all other micro-batches                     are scored just before that step changes the policy.

They are kept for later passes over the batch (``num_iterations``). Sequences that cannot have a
gradient are not scored unless metrics read them. The ratio to the sampler is computed in the middle
of TRL's loss: after its log-probabilities, and before it reads the ratio.

The reference scores a micro-batch just before its loss, in the rows and the layout of the loss.
Where policy and reference are equal, the bits of their log-probabilities then are, too, and the
gradient of the KL term is exactly 0. A rounding in its place would be a full step of Adam.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from grpo_kernels.base.checks import warn_once
from grpo_kernels.base.modes import random_rates
from grpo_kernels.base.tensors import scored_difference
from grpo_kernels.head.module import is_fsdp_unit, origin
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.objective.policy import bounded_ratio
from grpo_kernels.patching import replaced
from grpo_kernels.trl import micro_batches
from grpo_kernels.trl.micro_batches import counted_tokens, is_corrected, metrics_of
from grpo_kernels.trl.regroup import is_empty

OLD, RATIO, REFERENCE = "old_per_token_logps", "importance_sampling_ratio", "ref_per_token_logps"
# Methods that read a batch or the log-probabilities of its loss; those that see a micro-batch in
# another way; and modules whose are known.
READERS = (
    "_generate_and_score_completions",
    "_prepare_inputs",
    "compute_loss",
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
)
OF_LOSS = ("get_off_policy_mask", "get_gamma_weights")
_KNOWN = ("transformers.", "trl.trainer.", "trl.experimental.gmpo.", "grpo_kernels.")
_TRL_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


class OldScoring:
    """What TRL is kept from scoring at a generation: the policy, and the reference."""

    def __init__(self) -> None:
        self.is_deferred: bool | None = None  # decided at the first generation
        self.defers_reference = False  # decided with it
        self._generated_at = 0  # optimizer steps before the last generation
        # of a generation's micro-batches, in training and in an evaluation, which may come between
        self._figures: dict[bool, list[tuple[Tensor, Tensor]]] = {True: [], False: []}

    def prepare(
        self, trainer: Any, prepare: Callable[[Any], dict[str, Any]], inputs: Any
    ) -> dict[str, Any]:
        """Return the batch of TRL's method `prepare`, without what is scored later."""
        if self.is_deferred is None:
            self.is_deferred = _is_deferred(trainer)
            self.defers_reference = _defers_reference(trainer)
        changes: list[tuple[Any, str, Any]] = []
        if self.defers_reference:
            changes.append((trainer, "beta", 0.0))
        if self.is_deferred:  # as if there were no correction and no step before the batch ends
            changes.append((trainer, "vllm_importance_sampling_correction", False))
            changes.append((trainer.args, "gradient_accumulation_steps", _micro_steps(trainer)))
        with ExitStack() as stack:
            for name in ("_generate", "_calculate_rewards"):  # for which all is as it was
                method = _with_own(changes, getattr(trainer, name))
                stack.enter_context(replaced(trainer, name, method))
            for change in changes:
                stack.enter_context(replaced(*change))
            batch = prepare(inputs)
        if not self.is_deferred:
            return batch
        if is_corrected(trainer) and "sampling_per_token_logps" not in batch:
            raise ValueError(
                "sampling_per_token_logps: expected the sampler's for its correction, got None"
            )
        self._figures[trainer.model.training].clear()
        if trainer.model.training:
            self._generated_at = trainer.state.global_step
        return batch

    def due(self, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of TRL's `batches` that lack old log-probabilities."""
        return [x for x in batches if self.is_deferred and OLD not in x]

    def is_missing(self, trainer: Any, inputs: dict[str, Any]) -> bool:
        """True if the loss of `inputs` has to give the old log-probabilities, and can."""
        if not self.is_deferred or OLD in inputs:
            return False
        steps = trainer.state.global_step
        if trainer.model.training and steps != self._generated_at:
            raise RuntimeError(
                f"{OLD}: expected them in a batch generated at optimizer step "
                f"{self._generated_at}, got None at step {steps}; pass "
                "fused_sampling_correction=False"
            )
        return True

    def take(self, trainer: Any, inputs: dict[str, Any], logps: Tensor) -> None:
        """Put the old policy's `logps` (B, T) into `inputs`, and the ratio to the sampler."""
        inputs[OLD] = logps.detach()
        if not is_corrected(trainer):
            return
        sampling = inputs["sampling_per_token_logps"]
        config = LossConfig(**micro_batches.correction_options(trainer))
        mask = counted_tokens(inputs).bool()
        log_ratio = torch.where(mask, scored_difference(logps, sampling), 0.0)
        per_sequence = config.sampling_ratio_is_per_sequence
        if per_sequence:
            log_ratio = log_ratio.sum(dim=-1, keepdim=True)
        inputs[RATIO] = ratio = bounded_ratio(config, log_ratio)
        # of the tokens that the sampler could score
        gaps = (logps.detach() - sampling).abs()[mask & ~torch.isnan(sampling)]
        ratios = ratio.flatten() if per_sequence else ratio[mask]
        figures = (gaps[:0], ratios[:0]) if is_empty(inputs) else (gaps, ratios)
        self._figures[trainer.model.training].append(figures)

    def log_figures(self, trainer: Any) -> None:
        """Log what TRL does of a generation's ratios, once those of all micro-batches are there.

        As TRL: each is reduced on every rank (0 if it has no numbers), then over ranks.
        """
        figures, trains = self._figures[trainer.model.training], trainer.model.training
        if len(figures) < (trainer.args.steps_per_generation if trains else 1):
            return
        gaps, ratios = map(torch.cat, zip(*figures, strict=True))
        figures.clear()
        for name, x, own, all_ranks in (
            ("sampling_logp_difference/mean", gaps, torch.mean, torch.mean),
            ("sampling_logp_difference/max", gaps, torch.max, torch.max),
            ("importance_sampling_ratio/min", ratios, torch.min, torch.min),
            ("importance_sampling_ratio/mean", ratios, torch.mean, torch.mean),
            ("importance_sampling_ratio/max", ratios, torch.max, torch.max),
        ):
            here = own(x) if x.numel() > 0 else x.new_zeros(())
            found = all_ranks(trainer.accelerator.gather(here)).item()
            metrics_of(trainer)[f"sampling/{name}"].append(found)

    def pass_over(self, trainer: Any, inputs: dict[str, Any]) -> None:
        """Put zeros into a micro-batch without samples: neither a loss nor a scoring runs."""
        if self.is_deferred and OLD not in inputs:
            zeros = torch.zeros_like(inputs["completion_mask"], dtype=torch.float32)
            self.take(trainer, inputs, zeros)
            self.keep(trainer, inputs)

    def keep(self, trainer: Any, inputs: dict[str, Any]) -> None:
        """Copy what the loss's `inputs` took into TRL's micro-batch, for later passes over it."""
        for batch in trainer._buffered_inputs or ():
            if batch["completion_ids"] is inputs["completion_ids"]:
                batch.update({name: inputs[name] for name in (OLD, RATIO) if name in inputs})

    def forget_figures(self) -> None:
        """Of a generation whose micro-batches will be scored anew."""
        self._figures[True].clear()


def _with_own(
    changes: Sequence[tuple[Any, str, Any]], method: Callable[..., Any]
) -> Callable[..., Any]:
    """`method`, with the values of now for the attributes that `changes` are going to change."""
    own = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for value in own:
                stack.enter_context(replaced(*value))
            return method(*args, **kwargs)

    return run


@contextmanager
def as_reference(trainer: Any) -> Iterator[Any]:
    """Inside, the model that is given is the reference."""
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    with use_adapter(model, "ref" if "ref" in model.peft_config else None):
        try:
            yield trainer.model
        finally:
            # FSDP2 leaves parameters whole after a forward without a backward. PEFT switches the
            # gradient of adapters off here, and on again at the parameters that it finds: if it
            # found shards first and whole ones then, the shards' would stay off.
            for module in model.modules():
                if is_fsdp_unit(module):
                    module.reshard()


def score(trainer: Any, model: Any, batch: dict[str, Any], live: Tensor | None = None) -> Tensor:
    """Log-probabilities (B, T) of a micro-batch; 0, lest a ratio overflow, where not `live`."""
    mask = batch["completion_mask"]
    if live is not None:
        mask = mask * live.to(mask.device)[:, None]
    parameters = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    images = {name: batch[name] for name in parameters if name in batch}
    checkpointing = trainer.args.gradient_checkpointing_kwargs
    with torch.no_grad(), disable_gradient_checkpointing(trainer.model, checkpointing):
        logps, *_ = trainer._get_per_token_logps_and_entropies(
            model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], mask], dim=1),
            mask.size(1),
            **images,
        )
    return logps


def _is_deferred(trainer: Any) -> bool:
    """True if TRL's scoring of the old policy is left out; warn if a correction keeps it."""
    option, mode = trainer.fused_sampling_correction, trainer.vllm_importance_sampling_mode
    corrects = is_corrected(trainer)
    if option is True:
        if not corrects:
            raise ValueError(
                "fused_sampling_correction: expected False without a sampler to correct for "
                "(use_vllm=True and vllm_importance_sampling_correction=True), got True"
            )
        if mode not in _TRL_MODES:
            raise ValueError(
                "vllm_importance_sampling_mode: expected one of "
                f"{', '.join(map(repr, _TRL_MODES))}, got {mode!r}"
            )
        return True
    is_scored = corrects or trainer.args.gradient_accumulation_steps % _micro_steps(trainer) != 0
    if option is False or not is_scored or (corrects and mode not in _TRL_MODES):
        return False
    reader = reader_of(trainer)
    if corrects and trainer.trunk_options.zero_advantage == "skip":
        reason = (
            "sampling/* metrics read the sequences that zero_advantage='skip' leaves out; 'score' "
            "computes less here"
        )
    elif reader is not None:
        reason = f"{reader} may read its result; pass True if not"
    elif any(random_rates(module) for module in trainer.model.modules()):
        reason = "dropout, or noise, makes log-probabilities random; set it to 0, or pass True"
    else:
        return True
    if corrects:
        warn_once(
            "fused_sampling_correction: False, so TRL scores each batch for its correction: "
            f"{reason}"
        )
    return False


def _defers_reference(trainer: Any) -> bool:
    """True if nobody reads the reference's scoring before a micro-batch is handed out."""
    if trainer.kl_estimator == "full":
        return True
    moves = trainer.args.sync_ref_model  # it has to score at the generation
    return not moves and reader_of(trainer, READERS[:2]) is None


def reader_of(trainer: Any, names: Sequence[str] = READERS) -> str | None:
    """A method of `names` that is not TRL's or ours, of a class or set on the trainer, or None."""
    for name in names:
        if name in vars(trainer) and not origin(vars(trainer)[name]).startswith(_KNOWN):
            return f"the trainer's own {name}"
    for cls in type(trainer).__mro__:
        if not cls.__module__.startswith(_KNOWN):
            for name in names:
                if name in vars(cls):
                    return f"{cls.__name__}.{name}"
    return None


def _micro_steps(trainer: Any) -> int:  # between two generations
    return int(trainer.args.steps_per_generation * trainer.num_iterations)


def warn_of_truncation(trainer: Any) -> None:
    """Warn of a sampler that truncates where TRL multiplies the loss by a sequence's ratio."""
    args = trainer.args
    cuts = {
        f"top_p={args.top_p}": args.top_p is not None and args.top_p < 1.0,
        f"top_k={args.top_k}": args.top_k is not None and args.top_k > 0,
        f"min_p={args.min_p}": bool(args.min_p),
    }
    mode = args.vllm_importance_sampling_mode
    of_sequence = is_corrected(trainer) and mode.startswith("sequence_")
    if trainer.sampling_mask is None and of_sequence and any(cuts.values()):
        warn_once(
            f"{', '.join(name for name, is_set in cuts.items() if is_set)}: the sampler's "
            "log-probabilities are of the ids that it keeps, ours of all, so that a sequence's "
            "ratio falls with its length, and "
            f"vllm_importance_sampling_mode={mode!r} multiplies the loss by it; hand over the sets "
            "(sampling_mask=, docs/truncating-samplers.md), or sample from the whole vocabulary"
        )
