"""`patch_trl`: our fused head for every TRL trainer, our divergence for its DistillationTrainer."""

from __future__ import annotations

from functools import partial
from typing import Any

import trl.trainer.distillation_trainer as trl_distillation
import trl.trainer.utils as trl_utils
from trl.trainer.base_trainer import _BaseTrainer

from grpo_kernels.base.checks import warn_once
from grpo_kernels.base.choices import BackendName, BatchLayout, EngineName, LogitsDtype
from grpo_kernels.call.plan import Run, check_run
from grpo_kernels.head.head import Head
from grpo_kernels.patching import Patches
from grpo_kernels.transformers.call import TrunkOptions
from grpo_kernels.trl.distillation import divergence_loss
from grpo_kernels.trl.fused_head import HeadOptions, add_fused_lm_head
from grpo_kernels.trl.supported import Patch

# Modules that copy TRL's function when they are imported, or asked for it
_ADDERS = [f"trl.trainer.{name}_trainer" for name in ("grpo", "rloo", "kto", "sft", "dpo")]
_ADDERS += ["trl.trainer", "trl.experimental.async_grpo.async_grpo_trainer"]
_patches = Patches("trl")
_in_force: HeadOptions | None = None


def patch_trl(
    *,
    layout: BatchLayout = "tree",
    logits_dtype: LogitsDtype = "float32",
    engine: EngineName = "auto",
    backend: BackendName = "auto",
    workspace_bytes: int | None = None,
) -> Patch:
    """Give our fused head to the models of all TRL trainers (GRPO, RLOO, DPO, KTO, SFT, AsyncGRPO).

    It takes the place of TRL's public function ``add_fused_lm_head``, so it applies to trainers
    that are made from now on. The divergence of TRL's DistillationTrainer is replaced too. Models,
    configurations and losses stay TRL's. Trainers also log ``rows/projected`` and
    ``rows/gradient``, ``tokens/computed`` and ``tokens/gradient``, which show that the patch is at
    work. A trainer that computes all logits itself (GKD, IW-OPD, GOLD, TPO, A2PO, CPO, ORPO, SDFT,
    SDPO) logs none of them, and warns once. Calling `patch_trl` again changes nothing.

    Args:
        layout: as in `grpo_kernels.transformers.causal_lm_loss`: what the model computes below its
            head for padding, and for prefixes that sequences share, as the two answers of a DPO
            pair share their prompt.
        logits_dtype: as in `Head`: ``"float32"``, unrounded logits; or ``"input"``: rounded to the
            dtype of the hidden states, as TRL's are. It does not apply to distillation.
        engine, backend, workspace_bytes: as in `Run`, of every call of a fused head. They do not
            apply to distillation.

    Returns:
        a true value if TRL is patched; a false one, after a warning, if this TRL is unknown and was
        left alone. The value is also a context manager, within which trainers are made.

    Raises:
        ValueError: an unknown option, or another than that of the patch in force.
    """
    global _in_force
    Head(None, logits_dtype=logits_dtype)  # raises for an unknown one
    run, trunk = Run(engine, backend, workspace_bytes), TrunkOptions(layout=layout)
    check_run(run)
    options = HeadOptions(run, trunk, logits_dtype)
    if _in_force is not None:
        known, asked = _by_name(_in_force), _by_name(options)
        for name in known:
            if asked[name] != known[name]:
                raise ValueError(
                    f"{name}: expected {known[name]!r}, that of the patch in force, got "
                    f"{asked[name]!r}; unpatch_trl() comes first"
                )
        return Patch(True)
    _in_force = options
    ours = partial(add_fused_lm_head, options=options)
    _patches.replace(trl_utils, "add_fused_lm_head", ours, importers=_ADDERS)
    divergence = partial(divergence_loss, shares=options.shares)
    _patches.replace(trl_distillation, "_chunked_divergence_loss", divergence)
    _patches.replace(_BaseTrainer, "log", _log)
    return Patch(True, unpatch_trl)


def unpatch_trl() -> None:
    """Give TRL its own functions back. Trainers that were made before keep our head."""
    global _in_force
    _patches.restore()
    _in_force = None


def _by_name(options: HeadOptions) -> dict[str, Any]:
    run = options.run
    return {
        "layout": options.trunk.layout,
        "logits_dtype": options.logits_dtype,
        "engine": run.engine,
        "backend": run.backend,
        "workspace_bytes": run.workspace_bytes,
    }


def _log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
    """Log as transformers does, with this process's row counts; warn if a step had no rows."""
    if self.model.training and _in_force is not None:
        shares = _in_force.shares.take()
        if not shares and "loss" in logs and not hasattr(self, "_shares"):
            warn_once(
                f"patch_trl: {type(self).__name__} has trained a step without TRL's fused head, so "
                "nothing of it is computed by grpo_kernels. Either it was made before patch_trl() "
                "was called, or it makes all logits itself, as TRL's GKD, IW-OPD, GOLD, TPO, A2PO, "
                "CPO, ORPO, SDFT and SDPO trainers do; in a loss of your own, linear_divergence "
                "and linear_logprob take the place of logits: examples/gkd_trl.py",
                RuntimeWarning,
            )
        logs.update(shares)
    super(_BaseTrainer, self).log(logs, *args, **kwargs)
