"""Hooks on a head that scores instead of projecting: its forward pre-hooks are run, all other hooks are refused.

A forward pre-hook makes the weight (`torch.nn.utils.spectral_norm`, `weight_norm`, `prune`) or changes the input. A
forward or backward hook would be handed logits, which are never made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# Modules whose hooks are left alone: FSDP2's and ZeRO-3's, which `forward` runs, and `causal_lm_loss`'s
_KNOWN = ("torch.distributed.", "deepspeed.", "grpo_kernels.")
_REFUSED = {
    "_forward_hooks": "forward hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_forward_pre_hooks": "forward pre-hook",
}


def check_hooks(lm_head: nn.Module, name: str = "lm_head") -> None:
    """Raise unless scoring can respect the hooks on `lm_head` and on its submodules; errors call it `name`.

    Raises:
        TypeError: a forward or backward hook; or a hook of any kind within PEFT's layer.
    """
    for path, module in lm_head.named_modules():
        for attribute, kind in _REFUSED.items():
            if module is lm_head and attribute == "_forward_pre_hooks":
                continue
            hooks = foreign_hooks(module, attribute)
            if hooks:
                where = f"{name}.{path}" if path else name
                raise TypeError(
                    f"{where}: expected no {kind}, since a head that scores makes no logits, got {', '.join(hooks)}"
                )


def foreign_hooks(module: nn.Module, attribute: str = "_forward_hooks") -> list[str]:
    """Return the names of the hooks of one kind that are not ours, FSDP2's or DeepSpeed's."""
    return [name_of(hook) for hook in getattr(module, attribute).values() if not is_known(hook)]


def run_pre_hooks(lm_head: nn.Module, hidden: Tensor) -> Tensor:
    """Apply the forward pre-hooks of `lm_head` to its input.

    Raises:
        TypeError: they return something other than one input.
    """
    for key, hook in lm_head._forward_pre_hooks.items():
        if is_known(hook):
            continue
        args: Any = (hidden,)
        kwargs: dict[str, Any] = {}
        if key in lm_head._forward_pre_hooks_with_kwargs:
            args, kwargs = hook(lm_head, args, kwargs) or (args, kwargs)
        else:
            changed = hook(lm_head, args)
            args = (
                args if changed is None else changed if isinstance(changed, tuple) else (changed,)
            )
        if len(args) != 1 or kwargs:
            got = [*(type(x).__name__ for x in args), *kwargs]
            raise TypeError(
                f"lm_head: expected its forward pre-hooks to give one input, got {got} from {name_of(hook)}"
            )
        hidden = args[0]
    return hidden


def is_known(hook: Callable[..., Any]) -> bool:
    """Return True for a hook of ours, FSDP2's or DeepSpeed's."""
    return origin(hook).startswith(_KNOWN)


def origin(hook: Any) -> str:
    """Return the name of the module that a hook comes from; the hook may be an object or a partial."""
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


def name_of(hook: Any) -> str:
    """Return the name by which a person would look for the hook, which may be an object or a partial."""
    hook = getattr(hook, "func", hook)
    return f"{origin(hook)}.{getattr(hook, '__qualname__', type(hook).__name__)}"
