"""TRL's trainers with their language-model head computed by `grpo_kernels`.

This package supports one minor version of TRL. With any other version, everything in it warns and
then behaves like stock TRL.
"""

from grpo_kernels.base.checks import only_public
from grpo_kernels.patching import needed

with needed("'trl>=1.16,<1.17'", "trl", "transformers"):
    from trl import __version__ as _version

    _IS_KNOWN = _version.startswith("1.16.")
    if _IS_KNOWN:
        from grpo_kernels.trl.distillation import FusedDistillationTrainer
        from grpo_kernels.trl.fused_head import patch_trl, unpatch_trl
        from grpo_kernels.trl.trainer import FusedGRPOTrainer, FusedLossMixin
    else:
        import warnings
        from typing import Any

        from trl import DistillationTrainer, GRPOTrainer

        from grpo_kernels.base.checks import warn_once
        from grpo_kernels.patching import Patch

        _MESSAGE = f"expected trl 1.16, got trl {_version}, so everything runs as stock TRL"
        _OF_RESULTS = {"kl_estimator": "k3", "on_missing_set": None}
        _OF_COST = {
            *("fused_sampling_correction", "zero_advantage", "layout", "regroup"),
            *("tokens_per_forward", "engine", "backend", "workspace_bytes"),
        }
        warnings.warn(f"grpo_kernels: {_MESSAGE}", stacklevel=2)

        # an assignment, since the documentation's builder cannot resolve another package's names
        FusedDistillationTrainer = DistillationTrainer  # type: ignore[misc]

        class FusedLossMixin:  # type: ignore[no-redef]
            """Accept this library's options on an unchanged trainer of an unsupported TRL."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                warn_once(_MESSAGE)
                for name, default in _OF_RESULTS.items():
                    if (given := kwargs.pop(name, default)) != default:
                        with_trl = f"{default!r} with trl {_version}"
                        raise ValueError(f"{name}: expected {with_trl}, got {given!r}")
                super().__init__(*args, **{x: y for x, y in kwargs.items() if x not in _OF_COST})

        class FusedGRPOTrainer(FusedLossMixin, GRPOTrainer):  # type: ignore[no-redef]
            """TRL's own trainer, unchanged."""

        def patch_trl(**_: Any) -> Patch:  # type: ignore[misc]
            """Warn that this TRL is not supported and stays unpatched."""
            warn_once(_MESSAGE)
            return Patch(False)

        def unpatch_trl() -> None:
            """Do nothing, since nothing was patched."""


__all__ = [
    "FusedDistillationTrainer",
    "FusedGRPOTrainer",
    "FusedLossMixin",
    "patch_trl",
    "unpatch_trl",
]

only_public(__name__)
