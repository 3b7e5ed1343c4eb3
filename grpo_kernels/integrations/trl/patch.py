"""`patch_trl`: the fused head of every trainer of TRL's is ours, and the divergence of its distillation."""

from __future__ import annotations

from grpo_kernels.base.choices import LogitsDtype
from grpo_kernels.config import LossConfig
from grpo_kernels.integrations.patching import Patches
from grpo_kernels.integrations.trl import distillation, hook, row_count

_patches = Patches("trl")


class Patch(int):
    """1 if TRL is patched, 0 if it was left alone. As a context manager it undoes on exit what it did."""

    undoes: bool = False

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        if self.undoes:
            unpatch_trl()


def patch_trl(*, logits_dtype: LogitsDtype = "float32") -> Patch:
    """Compute the fused head of every TRL trainer (GRPO, RLOO, DPO, KTO, SFT, AsyncGRPO) with `grpo_kernels`.

    And the divergence of its DistillationTrainer, unless this TRL's is unknown, which a warning says. Models,
    configurations and losses stay TRL's; models that already have their fused head use ours from the next call
    on. What the trainers log has ``rows/projected`` and ``rows/gradient`` besides (`row_count`), which show that it is
    at work; a trainer that makes all logits itself (GKD, IW-OPD, GOLD, TPO, A2PO, CPO, ORPO, SDFT, SDPO) has none, and
    one warning. Calling it again changes nothing.

    Args:
        logits_dtype: as in `linear_logprob`: ``"float32"``, logits out of the product's accumulator; or ``"input"``,
            rounded to 16 bits where hidden states have no more, as TRL's own are, and an fp32 head before that.
            For `FusedGRPOTrainer` too, while patched; not for distillation, whose logits TRL does not round.

    Returns:
        a true value if TRL is patched; a false one, after a warning, if this TRL is unknown and was left alone. The
        value is also a context manager: ``with patch_trl(): trainer.train()``.

    Raises:
        ValueError: an unknown `logits_dtype`, or another one than that of the patch that is in force.
    """
    LossConfig(logits_dtype=logits_dtype)  # which knows the choices
    if hook.SEAM.is_filled():
        if logits_dtype != hook.logits_dtype:
            raise ValueError(
                f"logits_dtype: expected {hook.logits_dtype!r}, that of the patch in force, got {logits_dtype!r}; "
                "unpatch_trl() comes first"
            )
        return Patch(True)
    if not hook.SEAM.is_known():
        hook.SEAM.warn_unknown()
        return Patch(False)
    hook.logits_dtype = logits_dtype
    hook.SEAM.fill(_patches)
    if not distillation.SEAM.is_known():
        distillation.SEAM.warn_unknown()
    distillation.SEAM.fill(_patches)
    row_count.patch(_patches)
    done = Patch(True)
    done.undoes = True
    return done


def unpatch_trl() -> None:
    """Give TRL its own functions back. Without `patch_trl` before, nothing changes."""
    _patches.restore()
    row_count.PATCHED.reset()
    hook.logits_dtype = LossConfig.logits_dtype
