"""Liger's GRPO loss with our engines: the same constructor and call, TRL's loss, fewer matrix products.

TRL up to 1.12, ms-swift and Axolotl call ``LigerFusedLinearGRPOLoss`` if ``use_liger_kernel`` is on. Take the class
from here, or leave the trainer as it is and call `patch_liger` before it builds its loss; only `patch_liger` needs
liger-kernel. Where Liger's loss differs from TRL's, this one follows TRL: docs/start/liger.md lists the differences.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor, nn

from grpo_kernels.base.checks import check_ids, check_mask, check_tensor
from grpo_kernels.base.choices import BackendName, EngineName, ImportanceSamplingLevel, LossTypeName
from grpo_kernels.base.distributed import all_reduce
from grpo_kernels.call.output import LossOutput
from grpo_kernels.call.run import Run, check_run
from grpo_kernels.head.head import Head
from grpo_kernels.head.module import gather_of
from grpo_kernels.host import Patches, needed, parameter_names
from grpo_kernels.logprob import linear_logprob
from grpo_kernels.loss import grpo_loss
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.objective.losses import loss_of

__all__ = ["LigerFusedLinearGRPOLoss", "patch_liger", "unpatch_liger"]

NAME = "LigerFusedLinearGRPOLoss"
IMPORTERS = ("trl.trainer.grpo_trainer",)  # TRL <= 1.12 copies the class when it is imported
SAME_NAMES = (  # arguments of Liger's class that are fields of `LossConfig`
    "loss_type",
    "importance_sampling_level",
    "delta",
    "use_bias_correction_kl",
    "temperature",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)
TOKEN_LEVEL_ONLY = ("cispo", "sapo", "vespo")  # losses for which Liger has no sequence-level ratio


class LigerFusedLinearGRPOLoss(nn.Module):
    """``liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss`` of liger-kernel 0.8.5, computed by `grpo_loss`.

    Args:
        beta: weight of the KL term (k3).
        compiled, chunk_size: not used: nothing here is compiled, and the engine plans its own chunks.
        use_ref_model: True if there is a reference model; without one there is no KL term, whatever `beta` is.
        epsilon_low, epsilon_high: clip range; for ``"cispo"`` `epsilon_high` is the cap on the ratio.
        loss_type: ``"grpo"``, ``"bnpo"``, ``"dr_grpo"``, ``"dapo"``, ``"cispo"``, ``"sapo"``, ``"luspo"``, ``"vespo"``.
        max_completion_length: needed for ``"dr_grpo"``.
        importance_sampling_level: ``"token"`` or ``"sequence"``; the latter not for cispo, sapo and vespo.
        sapo_temperature_pos, sapo_temperature_neg: as in `LossConfig`, with Liger's defaults.
        temperature, delta, use_bias_correction_kl: likewise.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: likewise.
        engine, backend, workspace_bytes: *ours*; as in `grpo_loss`.

    All may be changed afterwards, as attributes.

    Raises:
        TypeError, ValueError: a value that the loss does not take.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: LossTypeName = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: ImportanceSamplingLevel = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        *,
        engine: EngineName = "auto",
        backend: BackendName = "auto",
        workspace_bytes: int | None = None,
    ) -> None:
        super().__init__()
        check_run(Run(engine, backend, workspace_bytes))
        self.engine, self.backend, self.workspace_bytes = engine, backend, workspace_bytes
        self.beta, self.use_ref_model = beta, use_ref_model
        self.compiled, self.chunk_size = compiled, chunk_size
        self.epsilon_low, self.epsilon_high, self.delta = epsilon_low, epsilon_high, delta
        self.loss_type, self.importance_sampling_level = loss_type, importance_sampling_level
        self.max_completion_length, self.temperature = max_completion_length, temperature
        self.sapo_temperature_pos, self.sapo_temperature_neg = (
            sapo_temperature_pos,
            sapo_temperature_neg,
        )
        self.use_bias_correction_kl = use_bias_correction_kl
        self.vespo_k_pos, self.vespo_lambda_pos = vespo_k_pos, vespo_lambda_pos
        self.vespo_k_neg, self.vespo_lambda_neg = vespo_k_neg, vespo_lambda_neg
        self.loss_config()  # raises for a value that the loss does not take

    def loss_config(self) -> LossConfig:
        """Return the configuration of the loss, for `grpo_loss`."""
        fields = {name: getattr(self, name) for name in SAME_NAMES}
        if self.max_completion_length is not None:
            fields["max_completion_length"] = self.max_completion_length
        return LossConfig(
            epsilon=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            beta=self.beta if self.use_ref_model else 0.0,
            **fields,
        )

    def forward(
        self,
        _input: Tensor,  # (B, T, H)
        lin_weight: Tensor,  # (V, H)
        selected_token_ids: Tensor,  # (B, T)
        attention_mask: Tensor,  # (B, T)
        advantages: Tensor,  # (B,) or (B, T)
        bias: Tensor | None = None,  # (V,)
        ref_per_token_logps: Tensor | None = None,  # (B, T)
        old_per_token_logps: Tensor | None = None,  # (B, T)
        ref_input: Tensor | None = None,  # (B, T, H')
        ref_weight: Tensor | None = None,  # (V, H')
        ref_bias: Tensor | None = None,  # (V,)
        vllm_is_ratio: Tensor | None = None,  # (B, T), (B, 1) or (B,)
        num_items_in_batch: float | Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the loss and its metrics.

        Args:
            _input: (B, T, H), hidden states that predict `selected_token_ids`; dtypes, devices and errors as in
                `grpo_loss`.
            lin_weight, bias: (V, H) and (V,), the head.
            selected_token_ids: (B, T).
            advantages: (B,) or (B, T).
            ref_per_token_logps, old_per_token_logps: (B, T).
            attention_mask: (B, T), the loss mask, 0 or 1 (anything but 0 counts as 1).
            ref_input, ref_weight, ref_bias: (B, T, H'), (V, H') and (V,), head of the reference model, scored here if
                there is a KL term and `ref_per_token_logps` is not given.
            vllm_is_ratio: (B, T), (B, 1) or (B,), importance sampling ratio of the sampler.
            num_items_in_batch: counted tokens of the whole generation batch, over all ranks; dapo, cispo and vespo
                divide by it / world size. None: the counted tokens of this call, averaged over the ranks; all
                ranks must then make the call.

        Returns:
            (loss, metrics): the loss () in fp32 (fp64 for fp64 inputs), attached; metrics () each, detached, over the
            counted tokens: the mean KL, if `beta` is not 0, then the share of tokens that are clipped.

        Raises:
            TypeError, ValueError: a wrong argument; the message names it, or `grpo_loss`'s name for it.
        """
        if self.importance_sampling_level == "sequence" and self.loss_type in TOKEN_LEVEL_ONLY:
            raise ValueError(
                f"importance_sampling_level: Sequence-level importance sampling is not supported for loss_type="
                f"{self.loss_type!r} in Liger's call; grpo_loss has it"
            )
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError(
                "max_completion_length: expected an int for loss_type='dr_grpo', got None"
            )
        config = self.loss_config()
        check_tensor("_input", _input, floating=True)
        check_ids("selected_token_ids", selected_token_ids, _input)
        check_mask("attention_mask", attention_mask, selected_token_ids)
        if config.beta != 0.0:
            if ref_per_token_logps is None:
                ref_per_token_logps = self._score(
                    ref_input, ref_weight, selected_token_ids, attention_mask, ref_bias
                )
            elif ref_input is not None:
                warnings.warn(  # in Liger's words, which its tests look for
                    "grpo_kernels: Both ref_per_token_logps and ref_input are provided. Using ref_per_token_logps.",
                    stacklevel=2,
                )
        takes_items = loss_of(config).normaliser == "num_items"
        num_items_in_batch = (
            _items_of_a_rank(attention_mask, num_items_in_batch) if takes_items else None
        )
        # ZeRO-3 partitions the weight again when the trainer's own gathering, around the call, has ended
        gather = gather_of(x for x in (lin_weight, bias) if x is not None)
        out = grpo_loss(
            _input,
            Head(lin_weight, bias),
            selected_token_ids,
            attention_mask,
            advantages,
            old_per_token_logps=old_per_token_logps,
            # Liger's call demands a reference for beta = 0, too
            ref_per_token_logps=ref_per_token_logps if config.beta != 0.0 else None,
            importance_sampling_ratio=vllm_is_ratio,
            num_items_in_batch=num_items_in_batch,
            config=config,
            run=Run(self.engine, self.backend, self.workspace_bytes, gather),
        )
        clipped = _clipped_share(config, out, attention_mask, advantages, old_per_token_logps)
        if self.beta == 0.0:
            return out.loss, (clipped,)
        return out.loss, (
            out.metrics["kl"] if config.beta != 0.0 else torch.zeros_like(clipped),
            clipped,
        )

    def _score(
        self,
        ref_input: Tensor | None,
        ref_weight: Tensor | None,
        ids: Tensor,
        mask: Tensor,
        ref_bias: Tensor | None,
    ) -> Tensor:
        """Return the reference's log-probabilities (B, T), at the loss's temperature."""
        if ref_input is None or ref_weight is None:
            raise ValueError(
                f"ref_per_token_logps: expected it, or ref_input and ref_weight, since beta = {self.beta}, got None"
            )
        with torch.no_grad():
            found = linear_logprob(
                ref_input,
                Head(ref_weight, ref_bias),
                ids,
                mask=mask,
                temperature=self.temperature,
                entropy=False,
                run=Run("auto", self.backend, self.workspace_bytes),
            )
        return found.logps


def _items_of_a_rank(
    mask: Tensor, num_items_in_batch: float | Tensor | None
) -> float | Tensor | None:
    """Return the number that this rank divides by; None: its own counted tokens."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return num_items_in_batch
    if num_items_in_batch is None:
        num_items_in_batch = all_reduce(mask.ne(0).sum().float(), "sum", dist.group.WORLD)
    return num_items_in_batch / dist.get_world_size()


@torch.no_grad()
def _clipped_share(
    config: LossConfig,
    out: LossOutput,
    mask: Tensor,
    advantages: Tensor,
    old_per_token_logps: Tensor | None,
) -> Tensor:
    """Share of the counted tokens whose ratio is past the bound that clips it; `delta` does not count."""
    loss_type, config = loss_of(config), replace(config, delta=None)
    counted, logps = mask != 0, out.per_token_logps
    log_ratio = torch.zeros_like(logps)
    if old_per_token_logps is not None:
        log_ratio = torch.where(counted, logps - old_per_token_logps.to(logps), 0.0)
    if config.importance_sampling_level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True) / counted.sum(dim=1, keepdim=True).clamp(
            min=1
        )
    ratio, advantages = (
        log_ratio.exp(),
        advantages if advantages.dim() == 2 else advantages[:, None],
    )
    if loss_type.capped is not None:
        clipped = loss_type.capped(config, ratio, advantages)
    elif loss_type.clipped is not None:
        low, high = loss_type.clipped(config, ratio, log_ratio, advantages)
        clipped = low | high
    else:
        return torch.zeros_like(out.loss)
    return (clipped & counted).sum().to(logps.dtype) / counted.sum().clamp(min=1)


_patches = Patches("liger-kernel")


def patch_liger() -> bool:
    """Replace Liger's class by ours, for trainers that construct it from now on; return True if ours is in place.

    It is set on ``liger_kernel.chunked_loss`` and, where TRL up to 1.12 is imported already, on
    ``trl.trainer.grpo_trainer``. A Liger whose class takes arguments that ours does not know is left as it is, with a
    warning. Calling it again has no effect.

    Raises:
        ImportError: liger-kernel is not installed, or has no `chunked_loss`.
    """
    with needed("liger-kernel", "liger_kernel"):
        import liger_kernel.chunked_loss as chunked_loss

    theirs = getattr(chunked_loss, NAME, None)
    if theirs is LigerFusedLinearGRPOLoss:
        return True
    unknown = [
        f"{function}({parameter})"
        for function in ("__init__", "forward")
        for parameter in (() if theirs is None else parameter_names(getattr(theirs, function)))
        if parameter not in parameter_names(getattr(LigerFusedLinearGRPOLoss, function))
    ]
    if theirs is None or unknown:
        what = f"has no {NAME}" if theirs is None else f"takes {', '.join(unknown)}"
        warnings.warn(
            f"grpo_kernels: this liger-kernel {what}, which we do not know; it is left as it is",
            stacklevel=2,
        )
        return False
    _patches.replace(chunked_loss, NAME, LigerFusedLinearGRPOLoss, importers=IMPORTERS)
    return True


def unpatch_liger() -> None:
    """Put Liger's class back; losses that were constructed meanwhile stay ours. Without a patch, nothing happens."""
    _patches.restore()
