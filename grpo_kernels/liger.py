"""A replacement for Liger's GRPO loss, computed by `grpo_loss`: same constructor, call and metrics.

TRL up to 1.12, ms-swift and Axolotl call ``LigerFusedLinearGRPOLoss`` if ``use_liger_kernel`` is
on. Import the class from here, or call `patch_liger` before the trainer builds its loss. Where
Liger's loss differs from TRL's, this class follows TRL; docs/start/other-trainers.md lists the
differences.
"""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grpo_kernels.base import BackendName, EngineName, ImportanceSamplingLevel, LossTypeName
from grpo_kernels.base.checks import check_ids, check_mask, check_tensor
from grpo_kernels.base.distributed import all_reduce
from grpo_kernels.base.tensors import sequence_means
from grpo_kernels.engine.plan import Run
from grpo_kernels.head import Head
from grpo_kernels.head_module import gather_of
from grpo_kernels.loss import grpo_loss
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.patching import Patches, needed, parameter_names
from grpo_kernels.scores import linear_logps

__all__ = ["LigerFusedLinearGRPOLoss", "patch_liger", "unpatch_liger"]

NAME = "LigerFusedLinearGRPOLoss"
OF_TOKENS = ("cispo", "sapo", "vespo")  # loss types for which Liger has no per-sequence ratio


@dataclass(eq=False, repr=False)
class LigerFusedLinearGRPOLoss(nn.Module):
    """Drop-in replacement for ``LigerFusedLinearGRPOLoss`` of liger-kernel 0.8.5.

    `grpo_loss` computes the loss. The arguments and their defaults are Liger's, plus `engine`,
    `backend` and `workspace_bytes` from `grpo_kernels.Run`. You may change any of them later, as
    attributes.

    Raises:
        TypeError, ValueError: an invalid argument.
    """

    beta: float = 0.04  # weight of the KL term (k3)
    compiled: bool = True  # ignored: nothing here is compiled
    use_ref_model: bool = True  # False: no KL term, whatever `beta` is
    chunk_size: int = 1  # ignored: the engine plans its chunks
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2  # for "cispo", the cap on the ratio
    loss_type: LossTypeName = "dapo"  # any of Liger's types, so not "gmpo"
    max_completion_length: int | None = None  # required for "dr_grpo"
    importance_sampling_level: ImportanceSamplingLevel = "token"  # required by cispo, sapo, vespo
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    temperature: float = 1.0
    delta: float | None = None
    use_bias_correction_kl: bool = False
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    _: KW_ONLY
    engine: EngineName = "auto"
    backend: BackendName = "auto"
    workspace_bytes: int | None = None

    def __post_init__(self) -> None:
        super().__init__()
        Run(self.engine, self.backend, self.workspace_bytes)  # raises if an option is invalid
        self.loss_config()

    def loss_config(self) -> LossConfig:
        """Make the configuration of this loss for `grpo_loss`."""
        if self.loss_type == "gmpo":
            raise ValueError("loss_type: Liger's API has no 'gmpo'; use grpo_loss")
        names = {field.name for field in fields(LossConfig)} & vars(self).keys()
        options = {name: getattr(self, name) for name in names}
        options |= {"epsilon": self.epsilon_low, "beta": self.beta if self.use_ref_model else 0.0}
        if self.loss_type != "dr_grpo":  # TRL passes a length for every loss type
            del options["max_completion_length"]
        return LossConfig(**options)

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the loss and its metrics; dtypes, devices and errors are as in `grpo_loss`.

        Errors about weights, biases, `ref_input`, `vllm_is_ratio` and invalid ids use the argument
        names of `grpo_loss`.

        Args:
            _input: (B, T, H), hidden states that predict `selected_token_ids`.
            lin_weight: (V, H), weight of the head.
            selected_token_ids: (B, T), the completion tokens.
            attention_mask: (B, T), the loss mask; any nonzero value counts as 1.
            advantages: (B,) or (B, T).
            bias: (V,), bias of the head.
            ref_per_token_logps: (B, T), log-probabilities from the reference model.
            old_per_token_logps: (B, T), log-probabilities from before the update; None: the ratio
                is 1.
            ref_input, ref_weight, ref_bias: the reference model's hidden states (B, T, H'), head
                weight (V, H') and bias (V,). They are used if there is a KL term and no
                `ref_per_token_logps`.
            vllm_is_ratio: (B, T), (B, 1) or (B,), importance sampling ratio to the sampler.
            num_items_in_batch: number of counted tokens in the whole generation batch, over all
                ranks; dapo, cispo and vespo divide the loss by this number / world size. None: the
                counted tokens of this call, averaged over the ranks; every rank must then make the
                call.

        Returns:
            (loss, metrics). The loss () is fp32 (fp64 for fp64 inputs) and has a gradient. The
            metrics are detached, () each: first the mean KL, if `beta` is not 0, then the share of
            clipped tokens.
        """
        config, run = self.loss_config(), Run(self.engine, self.backend, self.workspace_bytes)
        if self.importance_sampling_level == "sequence" and self.loss_type in OF_TOKENS:
            raise ValueError(
                "importance_sampling_level: Sequence-level importance sampling is not supported for"
                f" loss_type={self.loss_type!r} in Liger's API; use grpo_loss"
            )
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError("max_completion_length: expected an int for 'dr_grpo', got None")
        check_tensor("_input", _input, floating=True)
        check_ids("selected_token_ids", selected_token_ids, _input)
        check_mask("attention_mask", attention_mask, selected_token_ids)
        counted = attention_mask != 0
        if config.beta == 0.0:
            ref_per_token_logps = None  # Liger requires it even without a KL term
        elif ref_per_token_logps is not None and ref_input is not None:
            warnings.warn(  # Liger's text
                "grpo_kernels: Both ref_per_token_logps and ref_input are provided. Using "
                "ref_per_token_logps.",
                stacklevel=2,
            )
        elif ref_per_token_logps is None:
            if ref_input is None or ref_weight is None:
                raise ValueError(
                    "ref_per_token_logps: expected a tensor, or ref_input and ref_weight, since "
                    f"beta = {config.beta}; got None"
                )
            with torch.no_grad():
                ref_per_token_logps = linear_logps(
                    ref_input,
                    Head(ref_weight, ref_bias),
                    selected_token_ids,
                    completion_mask=attention_mask,
                    temperature=self.temperature,
                    entropy=False,
                    run=replace(run, engine="auto"),
                ).logps
        # ZeRO-3 shards the weight again when the trainer's own gathering context ends
        gather = gather_of(x for x in (lin_weight, bias) if x is not None)
        if config.definition.normalizer != "num_items":
            num_items_in_batch = None
        elif dist.is_available() and dist.is_initialized():
            if num_items_in_batch is None:
                num_items_in_batch = all_reduce(counted.sum().float(), "sum", dist.group.WORLD)
            num_items_in_batch = num_items_in_batch / dist.get_world_size()
        out = grpo_loss(
            _input,
            Head(lin_weight, bias),
            selected_token_ids,
            attention_mask,
            advantages,
            old_per_token_logps=old_per_token_logps,
            ref_per_token_logps=ref_per_token_logps,
            importance_sampling_ratio=vllm_is_ratio,
            num_items_in_batch=num_items_in_batch,
            config=config,
            run=replace(run, gather=gather),
        )
        clipped = _clipped(config, out.logps, counted, advantages, old_per_token_logps)
        if self.beta == 0.0:
            return out.loss, (clipped,)
        return out.loss, (out.metrics["kl"] if config.beta else torch.zeros_like(clipped), clipped)


@torch.no_grad()
def _clipped(
    config: LossConfig, logps: Tensor, counted: Tensor, advantages: Tensor, old: Tensor | None
) -> Tensor:
    """Share of counted tokens whose ratio is clipped, without regard to `delta`."""
    config = replace(config, delta=None)
    log_ratio = torch.zeros_like(logps) if old is None else logps - old.to(logps)
    if config.importance_sampling_level == "sequence":
        log_ratio = sequence_means(log_ratio, counted)
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    clipped = torch.zeros_like(counted)
    found = config.definition.clipped_tokens(log_ratio.exp(), log_ratio, advantages, config)
    for x in found.values():
        clipped = clipped | x
    return (clipped & counted).sum().to(logps.dtype) / counted.sum().clamp(min=1)


_patches = Patches("liger-kernel")


def patch_liger() -> bool:
    """Replace Liger's class with `LigerFusedLinearGRPOLoss` in losses that are built later.

    This sets the class on ``liger_kernel.chunked_loss`` and, if TRL up to 1.12 is imported, on
    ``trl.trainer.grpo_trainer``. If Liger's class has arguments that this library does not know,
    the function warns and leaves Liger's class in place. A second call has no effect.

    Returns:
        True if Liger's class is replaced.

    Raises:
        ImportError: liger-kernel is not installed, or has no `chunked_loss`.
    """
    with needed("liger-kernel", "liger_kernel"):
        import liger_kernel.chunked_loss as chunked_loss

    theirs, ours = getattr(chunked_loss, NAME, None), LigerFusedLinearGRPOLoss
    why = f"has no {NAME}"
    if theirs is not None:
        unknown = [
            f"{function}({name})"
            for function in ("__init__", "forward")
            for name in parameter_names(getattr(theirs, function))
            if name not in parameter_names(getattr(ours, function))
        ]
        why = f"has arguments that are not supported: {', '.join(unknown)}" if unknown else ""
    if why:
        warnings.warn(
            f"grpo_kernels: this release of liger-kernel {why}; Liger's own loss stays in place",
            stacklevel=2,
        )
        return False
    _patches.replace(chunked_loss, NAME, ours, importers=("trl.trainer.grpo_trainer",))
    return True


def unpatch_liger() -> None:
    """Restore Liger's class. Loss objects that were created before remain ours."""
    _patches.restore()
