"""Add `impl_backend=grpo_kernels` to verl's fused heads, for its FSDP and Megatron engines.

    actor_rollout_ref.model.use_fused_kernels=True
    actor_rollout_ref.model.fused_kernel_options.impl_backend=grpo_kernels

These two settings are enough. Without the second one, nothing changes. ``import verl`` loads the
plug-in (entry point group ``verl.plugins``), also in Ray's workers. If entry points are turned off
(``VERL_USE_EXTERNAL_PLUGINS=none``), call `patch_verl` instead.

verl's modules (0.9.1) are patched when they are imported. `forward` provides the models' forward in
the FSDP engines, and `engine` tells that forward what a micro-batch needs from the head; `megatron`
does both for Megatron's engine. `trainers` keeps verl's trainers (v1) from scoring what an update
computes anyway, and brings the responses to one prompt to one rank. If a module differs from verl
0.9.1, it is left unpatched, with a warning.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from grpo_kernels.patching import needed
from grpo_kernels.verl import engine, forward, megatron, trainers

__all__ = ["patch_verl", "unpatch_verl"]

# Each raises LookupError if verl's module differs from the supported release.
PATCHERS: dict[str, Callable[[ModuleType], engine.Changes]] = {
    "verl.models.transformers.monkey_patch": forward.changes,
    "verl.models.mcore.model_forward_fused": megatron.forward_changes,
    "verl.models.mcore.model_forward_1f1b_overlap": megatron.function_changes,
    "verl.workers.engine.megatron.transformer_impl": megatron.engine_changes,
    "verl.workers.engine.fsdp.transformer_impl": engine.changes,
    "verl.workers.engine_workers": trainers.worker_changes,
    "verl.trainer.ppo.v1.trainer_base": trainers.trainer_changes,
}


class _Importer(MetaPathFinder):
    """Import hook for the modules in `PATCHERS`: patches each right after its code has run."""

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

            def exec_module(module: ModuleType) -> None:
                run(module)
                _patch(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


_importer = _Importer()
_patched: set[str] = set()


def patch_verl() -> None:
    """Make ``grpo_kernels`` available as `impl_backend` of verl 0.9.1's fused kernels.

    ::

        from grpo_kernels.verl import patch_verl

        patch_verl()  # only if verl's plug-ins are turned off

    You may call it before or after importing verl: it patches loaded modules now, and others when
    they are imported. Models that verl has already built keep their forward, so call `patch_verl`
    before verl builds models. A second call changes nothing.

    Raises:
        ModuleNotFoundError: verl is not installed.

    Warns:
        RuntimeWarning: a module of verl differs from verl 0.9.1 and is left unpatched.
    """
    with needed("'verl>=0.9'", "verl"):
        if "verl" not in sys.modules and importlib.util.find_spec("verl") is None:
            raise ModuleNotFoundError("No module named 'verl'", name="verl")
    if _importer not in sys.meta_path:
        sys.meta_path.insert(0, _importer)
    for name in PATCHERS:
        module = sys.modules.get(name)
        if module is not None and name not in _patched:
            _patch(module)


def unpatch_verl() -> None:
    """Restore verl completely, including the forwards of models that use `grpo_kernels`."""
    if _importer in sys.meta_path:
        sys.meta_path.remove(_importer)
    _patched.clear()
    forward.patches.restore()


def _patch(module: ModuleType) -> None:
    name = module.__name__
    try:
        changes = list(PATCHERS[name](module))
    except LookupError as error:
        version = getattr(sys.modules.get("verl"), "__version__", "of unknown version")
        warnings.warn(
            f"grpo_kernels: in verl {version}, {name} differs from verl 0.9.1 ({error.args[0]}). "
            "It is left unpatched, and impl_backend=grpo_kernels has no effect there",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    _patched.add(name)
    for change in changes:
        forward.patches.replace(*change)
