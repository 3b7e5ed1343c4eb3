"""Old log-probabilities from the losses themselves, and the reference's from just before them.

TRL scores a generated batch with the policy before it trains on it: for the ratio to the sampler (`sampling`), or if
the policy changes before all of the batch is used. Until the policy changes, a micro-batch's loss computes the same
log-probabilities. So TRL prepares the batch without that scoring here, and then

    micro-batches of the first optimizer step   take the log-probabilities that their loss computes,
    all other micro-batches                     are scored just before that step changes the policy.

They are kept for later passes over the batch (``num_iterations``). Sequences that cannot have a gradient are not scored
unless something reads them (`reads_dead`).

The reference scores a micro-batch just before its loss, in the rows and the layout of the loss. Where policy and
reference are equal, the bits of their log-probabilities then are, too, and the gradient of the KL term is exactly 0. A
rounding in place of that 0 would be a full step of Adam.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from grpo_kernels.base.checks import warn_once
from grpo_kernels.host import replaced
from grpo_kernels.trl import sampling
from grpo_kernels.trl.fused_head import HEAD
from grpo_kernels.trl.micro_batches import EMPTY

OLD, RATIO, REFERENCE = "old_per_token_logps", "importance_sampling_ratio", "ref_per_token_logps"
# Methods that read a batch or the log-probabilities of its loss, and the modules whose versions of them are known.
_READERS = (
    "_generate_and_score_completions",
    "_prepare_inputs",
    "compute_loss",
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
)
_KNOWN = ("transformers.", "trl.trainer.", "trl.experimental.gmpo.", "grpo_kernels.")
_RANDOM = (
    "drop",
    "jitter",
    "noise",
)  # in the names of a module's attributes; they are 0.0 where nothing is drawn


def check_option(value: Any) -> None:
    """Raise ValueError unless `value` is one that `fused_sampling_correction` can have."""
    if not isinstance(value, bool) and value != "auto":
        raise ValueError(
            f"fused_sampling_correction: expected 'auto', True or False, got {value!r}"
        )


class OldScoring:
    """What TRL is kept from scoring at a generation: the policy (`is_deferred`), the reference (`defers_reference`)."""

    def __init__(self) -> None:
        self.is_deferred: bool | None = None  # decided at the first generation
        self.defers_reference = False  # decided with it
        self._generated_at = 0  # optimizer steps before the last generation
        self._buffered: dict[str, Any] | None = (
            None  # the micro-batch of TRL's buffer whose loss comes next
        )
        self._figures = sampling.SamplingFigures(0)

    def prepare(
        self, trainer: Any, prepare: Callable[[Any], dict[str, Any]], inputs: Any
    ) -> dict[str, Any]:
        """Return the batch of TRL's method `prepare`, without what is scored later."""
        if self.is_deferred is None:
            self.is_deferred, self.defers_reference = (
                _is_deferred(trainer),
                _defers_reference(trainer),
            )
        unreferenced = replaced(trainer, "beta", 0.0) if self.defers_reference else nullcontext()
        with unreferenced, _without_scoring(trainer) if self.is_deferred else nullcontext():
            batch = prepare(inputs)
        if not self.is_deferred:
            return batch
        if sampling.is_corrected(trainer) and "sampling_per_token_logps" not in batch:
            raise ValueError(
                "sampling_per_token_logps: expected them of the sampler for its correction, got None"
            )
        trains = trainer.model.training
        self._figures = sampling.SamplingFigures(trainer.args.steps_per_generation if trains else 1)
        if trains:
            self._generated_at = trainer.state.global_step
        return batch

    def start(self, inputs: dict[str, Any]) -> None:
        """Note that the loss of `inputs`, a micro-batch of TRL's buffer, comes next."""
        self._buffered = inputs if self.is_deferred and OLD not in inputs else None

    def due(
        self, inputs: dict[str, Any], batches: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return those of TRL's `batches` to score before the optimizer step that follows the loss of `inputs`."""
        return [
            batch
            for batch in batches
            if self.is_deferred and OLD not in batch and batch is not inputs
        ]

    def is_missing(self, trainer: Any, inputs: dict[str, Any]) -> bool:
        """Return True if the loss of `inputs` has to give the old log-probabilities.

        Raises:
            RuntimeError: it cannot, since the policy has changed since the generation.
        """
        if not self.is_deferred or OLD in inputs:
            return False
        steps = trainer.state.global_step
        if trainer.model.training and steps != self._generated_at:
            raise RuntimeError(
                f"{OLD}: expected them in a batch generated at optimizer step {self._generated_at}, got None at step "
                f"{steps}; pass fused_sampling_correction=False"
            )
        return True

    def take(self, trainer: Any, inputs: dict[str, Any], logps: Tensor) -> None:
        """Put `logps` (B, T) of the policy that generated `inputs` into them, and the ratio to the sampler."""
        found = {OLD: logps.detach()}
        if sampling.is_corrected(trainer):
            found[RATIO], gaps, ratios = sampling.ratio_and_figures(trainer, inputs, logps)
            if EMPTY in inputs:
                gaps, ratios = gaps[:0], ratios[:0]
            if self._figures.add(gaps, ratios):
                metrics = trainer._metrics["train" if trainer.model.training else "eval"]
                self._figures.log(metrics, trainer.accelerator)
        inputs.update(found)

    def pass_over(self, trainer: Any, inputs: dict[str, Any]) -> None:
        """Put zeros into a micro-batch without samples, for which neither a loss nor a scoring runs."""
        if self.is_deferred and OLD not in inputs:
            self.take(
                trainer, inputs, torch.zeros_like(inputs["completion_mask"], dtype=torch.float32)
            )
            self.keep(inputs)

    def keep(self, inputs: dict[str, Any]) -> None:
        """Copy what the loss's `inputs` took into TRL's micro-batch, for later passes over it."""
        if self._buffered is not None:
            self._buffered.update({name: inputs[name] for name in (OLD, RATIO) if name in inputs})
            self._buffered = None


def reads_dead(trainer: Any) -> bool:
    """Return True if something reads old log-probabilities of sequences that cannot have a gradient.

    The metrics ``sampling/*`` and ``vespo/phi_seq_mean`` are of all sequences. Clip ratios count tokens with an
    advantage.
    """
    measures_phi = (
        trainer.args.loss_type == "vespo" and trainer.trunk_options.zero_advantage != "skip"
    )
    return sampling.is_corrected(trainer) or measures_phi


@contextmanager
def as_reference(trainer: Any) -> Iterator[Any]:
    """Inside, the model that is given is the reference."""
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    with use_adapter(model, "ref" if "ref" in model.peft_config else None):
        yield trainer.model


def score(trainer: Any, model: Any, batch: dict[str, Any], live: Tensor | None = None) -> Tensor:
    """Return the log-probabilities (B, T) of a micro-batch under `model`, 0 where `live` (B,) is False.

    With 0 for the old log-probability no ratio overflows.
    """
    mask = batch["completion_mask"]
    if live is not None:
        mask = mask * live.to(mask.device)[:, None]
    parameters = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    images = {name: batch[name] for name in parameters if name in batch}
    with (
        torch.no_grad(),
        disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs),
    ):
        logps, *_ = trainer._get_per_token_logps_and_entropies(
            model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], mask], dim=1),
            mask.size(1),
            **images,
        )
    return logps


def _is_deferred(trainer: Any) -> bool:
    """Return True if TRL's scoring of the old policy is left out; warn once if a sampler's correction keeps it.

    Raises:
        ValueError: `fused_sampling_correction` is True, but `trainer` has no correction that is known.
    """
    if trainer.fused_sampling_correction is True:
        sampling.check_correction(trainer)
        return True
    corrects = sampling.is_corrected(trainer)
    is_scored = corrects or trainer.args.gradient_accumulation_steps % _micro_steps(trainer) != 0
    is_known = HEAD.is_known() and (
        not corrects or trainer.vllm_importance_sampling_mode in sampling.TRL_MODES
    )
    if trainer.fused_sampling_correction is False or not is_scored or not is_known:
        return False
    reason = _reason_against(trainer)
    if reason is not None and corrects:
        warn_once(
            f"fused_sampling_correction: False, so TRL scores each batch for its correction: {reason}"
        )
    return reason is None


def _reason_against(trainer: Any) -> str | None:
    """Return None if losses and metrics stay TRL's, else the reason why not, and a way out."""
    if sampling.is_corrected(trainer) and trainer.trunk_options.zero_advantage == "skip":
        return "sampling/* metrics read the sequences that zero_advantage='skip' leaves out; 'score' computes less here"
    reader = _reader(trainer, _READERS)
    if reader is not None:
        return f"{reader} may read its result; pass True if not"
    if any(_draws(module) for module in trainer.model.modules()):
        return "dropout, or noise, makes log-probabilities random; set it to 0, or pass True"
    return None


def _reader(trainer: Any, names: Sequence[str]) -> str | None:
    """Return the first method of `names` that a class has which is not known to us, or None."""
    unknown = [cls for cls in type(trainer).__mro__ if not cls.__module__.startswith(_KNOWN)]
    return next(
        (f"{cls.__name__}.{name}" for cls in unknown for name in names if name in vars(cls)), None
    )


def _defers_reference(trainer: Any) -> bool:
    """Return True if TRL's scoring of the reference is left out: nobody reads it before a micro-batch is handed out.

    A reference that moves (``sync_ref_model``) has to score at the generation.
    """
    if trainer.kl_estimator == "full":
        return True
    moves = getattr(trainer.args, "sync_ref_model", False)
    return HEAD.is_known() and not moves and _reader(trainer, _READERS[:2]) is None


def _draws(module: nn.Module) -> bool:
    """Return True if `module` draws random numbers in training: dropout, a router's jitter, noise on embeddings."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0.0
    found = ((name, x) for name, x in vars(module).items() if isinstance(x, float) and x > 0.0)
    return any(part in name for name, _ in found for part in _RANDOM)


def _micro_steps(trainer: Any) -> int:
    """Return the number of micro-batches trained on between two generations."""
    return int(trainer.args.steps_per_generation * trainer.num_iterations)


@contextmanager
def _without_scoring(trainer: Any) -> Iterator[None]:
    """Inside, TRL prepares a batch as if nothing read old log-probabilities: no correction, no step before its end."""
    uncorrected = replaced(trainer, "vllm_importance_sampling_correction", False)
    with uncorrected, replaced(trainer.args, "gradient_accumulation_steps", _micro_steps(trainer)):
        yield
