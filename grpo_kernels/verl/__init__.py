"""verl: `impl_backend=grpo_kernels` among its fused heads, for its FSDP and its Megatron engines.

    actor_rollout_ref.model.use_fused_kernels=True
    actor_rollout_ref.model.fused_kernel_options.impl_backend=grpo_kernels

Nothing else changes, and without the second line nothing changes at all. ``import verl`` finds the
plug-in by itself (entry point group ``verl.plugins``), in Ray's workers too; `patch_verl` does the
same by hand, where entry points are switched off (``VERL_USE_EXTERNAL_PLUGINS=none``).

verl's modules (0.9.1) are patched as they are imported, whenever that is: `forward` gives models
the forward of the FSDP engines, `engine` tells it what a micro-batch asks of the head, `megatron`
does both for Megatron's engine, and `trainers` keeps verl's trainers from scoring what an update
computes anyway, and brings the responses of a prompt to one rank. A module that differs from the
release we know is left as it is, after a warning.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from grpo_kernels.patching import needed
from grpo_kernels.verl import engine, forward, megatron, trainers

__all__ = ["patch_verl", "unpatch_verl"]

# They raise LookupError if verl is not as we know it.
PATCHERS: dict[str, Callable[[ModuleType], engine.Changes]] = {
    "verl.models.transformers.monkey_patch": forward.changes,
    "verl.models.mcore.model_forward_fused": megatron.forward_changes,
    "verl.models.mcore.model_forward_1f1b_overlap": megatron.function_changes,
    "verl.workers.engine.megatron.transformer_impl": megatron.engine_changes,
    "verl.workers.engine.fsdp.transformer_impl": engine.changes,
    "verl.workers.engine_workers": trainers.worker_changes,
    "verl.trainer.ppo.ray_trainer": trainers.ray_changes,
    "verl.trainer.ppo.v1.trainer_base": trainers.v1_changes,
}


class _Importer(MetaPathFinder):
    """Finder of the modules in `PATCHERS`: others find them, and we patch right after they run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in PATCHERS:
            return None
        finders = [x for x in sys.meta_path if x is not self and hasattr(x, "find_spec")]
        found = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((x for x in found if x is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            spec.loader = copy(spec.loader)  # which an archive's modules share

            def exec_module(module: ModuleType) -> None:
                run(module)
                _patched.discard(fullname)  # it may have been loaded before
                _patch(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


_importer = _Importer()
_patched: set[str] = set()


def patch_verl() -> None:
    """Let verl's configuration name ``grpo_kernels`` as the `impl_backend` of its fused kernels.

    verl need not be imported yet: its imported modules are patched now, others when they are
    imported. Models that already have their forward keep it, so call this before verl builds them.
    Calling it again changes nothing.

    Raises:
        ModuleNotFoundError: verl is not installed.

    Warns:
        RuntimeWarning: this verl differs from the release we know; that part is left alone.
    """
    with needed("'verl>=0.9'", "verl"):
        if "verl" not in sys.modules and importlib.util.find_spec("verl") is None:
            raise ModuleNotFoundError("No module named 'verl'", name="verl")
    if _importer not in sys.meta_path:
        sys.meta_path.insert(0, _importer)
    for name in PATCHERS:
        module = sys.modules.get(name)
        if module is not None:
            _patch(module)


def unpatch_verl() -> None:
    """Restore all of verl, also the forwards of models that asked for ours."""
    if _importer in sys.meta_path:
        sys.meta_path.remove(_importer)
    _patched.clear()
    forward.patches.restore()


def _patch(module: ModuleType) -> None:
    name = module.__name__
    if name in _patched:
        return
    try:
        changes = list(PATCHERS[name](module))
    except LookupError as error:
        version = getattr(sys.modules.get("verl"), "__version__", "of unknown version")
        warnings.warn(
            f"grpo_kernels: verl {version} is not as verl 0.9.1 in {name} ({error.args[0]}): it is "
            "left alone, and impl_backend=grpo_kernels has no effect there",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    _patched.add(name)
    for change in changes:
        forward.patches.replace(*change)
