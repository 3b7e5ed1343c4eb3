"""Names and arguments of 0.1.0.dev that have moved: errors that say what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_HEAD = "the second argument, head: a weight, a Head or a module"
# Arguments of 0.1.0.dev, and where they are now (docs/from-0.1.0.dev.md)
MOVED = {
    "weight": _HEAD,
    **{
        name: f"Head(weight, {name}=...), the second argument"
        for name in (
            "bias", "lora", "process_group", "vocab_size", "final_logit_softcapping", "logit_scale", "logits_dtype",
        )
    },
    **{
        name: f"run=Run({name}=...)" for name in ("engine", "backend", "workspace_bytes", "gather")
    },
    "projection": "a recipe, examples/sampler_product.py",
    "teacher_weight": "the fourth argument, teacher_head: a weight, a Head or a module",
    **{
        f"teacher_{name}": f"Head(teacher_weight, {name}=...), the fourth argument"
        for name in ("bias", "final_logit_softcapping", "logit_scale")
    },
    "outputs": "entropy=, extras= and ids=; what a call returns has a name for each",
}  # fmt: skip


# Names of 0.1.0.dev that have gone, and what to call instead
_GONE = {
    "linear_logprob_with": "linear_logprob(..., extras=...)",
    "linear_divergence_with": "linear_divergence(..., entropy=True, ids=...)",
    "topk_divergence_with": "topk_divergence, whose result has student_mass",
    "kept_set_logprob": "linear_logprob(..., kept_ids=...)",
    "ReferenceHead": "reference=(hidden, head)",
}


def gone(name: str) -> Callable[..., Any]:
    """Return a function that raises TypeError, which names what to call instead of `name`.

    Raises:
        AttributeError: there was never such a name.
    """
    if name not in _GONE:
        raise AttributeError(f"module 'grpo_kernels' has no attribute {name!r}")

    def refuse(*_: Any, **__: Any) -> Any:
        raise TypeError(f"{name}: no longer in grpo_kernels; call {_GONE[name]}")

    return refuse


def refuse_moved(function: str, names: Any) -> None:
    """Raise TypeError if one of `names` is an argument that has moved."""
    for name in names:
        if name in MOVED:
            raise TypeError(f"{name}: no argument of {function} any more, but {MOVED[name]}")
