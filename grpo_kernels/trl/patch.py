"""`patch_trl`: our fused head for every TRL trainer, our divergence for its DistillationTrainer."""

from __future__ import annotations

from typing import Any

import trl.trainer.utils as trl_utils

from grpo_kernels.base.checks import warn_once
from grpo_kernels.base.choices import BackendName, EngineName, LogitsDtype
from grpo_kernels.call.plan import Run, check_run
from grpo_kernels.head.head import Head
from grpo_kernels.patching import Patches, Shares
from grpo_kernels.trl.distillation import DIVERGENCE
from grpo_kernels.trl.fused_head import ADDERS, HEAD, PATCHED, add_measured_lm_head

try:
    from trl.trainer.base_trainer import _BaseTrainer
except ImportError:  # another TRL: nothing is logged then
    _BaseTrainer = None

_patches = Patches("trl")


class Patch(int):
    """1 if TRL is patched, 0 if it was left alone. As a context manager it undoes what it did."""

    undoes: bool = False

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        if self.undoes:
            unpatch_trl()


def patch_trl(
    *,
    logits_dtype: LogitsDtype = "float32",
    engine: EngineName = "auto",
    backend: BackendName = "auto",
    workspace_bytes: int | None = None,
) -> Patch:
    """Compute the fused head of all TRL trainers (GRPO, RLOO, DPO, KTO, SFT, AsyncGRPO).

    The divergence of its DistillationTrainer is replaced too, or a warning says that this TRL's is
    unknown. Models, configurations and losses stay TRL's; models that already have their fused head
    use ours from the next call on. Trainers also log ``rows/projected`` and ``rows/gradient``,
    which show that the patch is at work. A trainer that computes all logits itself (GKD, IW-OPD,
    GOLD, TPO, A2PO, CPO, ORPO, SDFT, SDPO) logs neither, and warns once. Calling `patch_trl` again
    changes nothing.

    Args:
        logits_dtype: as in `Head`: ``"float32"``, unrounded logits; or ``"input"``: with 16-bit
            hidden states an fp32 head is rounded to 16 bits first, then the logits, as in TRL. It
            applies to `FusedGRPOTrainer` too while patched, but not to distillation, whose logits
            TRL does not round.
        engine, backend, workspace_bytes: as in `Run`, of every call of a fused head;
            `FusedGRPOTrainer` has its own. They do not apply to distillation.

    Returns:
        a true value if TRL is patched; a false one, after a warning, if this TRL is unknown and was
        left alone. The value is also a context manager: ``with patch_trl(): trainer.train()``.

    Raises:
        ValueError: an unknown `logits_dtype`, `engine` or `backend`, or another than that of the
            patch in force.
    """
    Head(None, logits_dtype=logits_dtype)  # raises for an unknown one
    run = Run(engine, backend, workspace_bytes)
    check_run(run)
    if HEAD.is_ours():
        for name, in_force, value in (
            ("logits_dtype", PATCHED.logits_dtype, logits_dtype),
            ("engine", PATCHED.run.engine, engine),
            ("backend", PATCHED.run.backend, backend),
            ("workspace_bytes", PATCHED.run.workspace_bytes, workspace_bytes),
        ):
            if value != in_force:
                raise ValueError(
                    f"{name}: expected {in_force!r}, that of the patch in force, got {value!r}; "
                    "unpatch_trl() comes first"
                )
        return Patch(True)
    if not HEAD.is_known():
        HEAD.warn_unknown()
        return Patch(False)
    PATCHED.logits_dtype, PATCHED.run, PATCHED.shares = logits_dtype, run, Shares()
    HEAD.replace(_patches)
    _patches.replace(trl_utils, "add_fused_lm_head", add_measured_lm_head, importers=ADDERS)
    if not DIVERGENCE.is_known():
        DIVERGENCE.warn_unknown()
    DIVERGENCE.replace(_patches)
    if _BaseTrainer is not None:
        _patches.replace(_BaseTrainer, "log", _log)
    done = Patch(True)
    done.undoes = True
    return done


def unpatch_trl() -> None:
    """Give TRL its own functions back. Without `patch_trl` before, nothing changes."""
    _patches.restore()
    PATCHED.logits_dtype, PATCHED.run, PATCHED.shares = "float32", Run(), Shares()


def _log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
    """Log as transformers does, with this process's row counts; warn if a step had no rows."""
    if self.model.training:
        shares = PATCHED.shares.take()
        if not shares and "loss" in logs and not hasattr(self, "_shares"):
            warn_once(
                f"patch_trl: {type(self).__name__} has trained a step without TRL's fused head, so "
                "nothing of it is computed by grpo_kernels. It makes all logits itself, as TRL's "
                "GKD, IW-OPD, GOLD, TPO, A2PO, CPO, ORPO, SDFT and SDPO trainers do; in a loss of "
                "your own, linear_divergence and linear_logprob take the place of logits: "
                "examples/gkd_trl.py",
                RuntimeWarning,
            )
        logs.update(shares)
    super(_BaseTrainer, self).log(logs, *args, **kwargs)
