"""The arguments of a TRL trainer, read without importing TRL: the loss's, and those refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

# TRL's trainer makes the ratio, so the loss must not
CORRECTION = "vllm_importance_sampling_correction"

# name -> (value with which it does nothing, what to do instead)
REFUSED: dict[str, tuple[Any, str]] = {
    "use_adaptive_entropy": (
        False,
        "its controller is the trainer's: change the coefficient between steps, replace(config, "
        "entropy_coef=...)",
    ),
    "mask_truncated_completions": (
        False,
        "set completion_mask to 0 in every completion without an end token",
    ),
    "cast_lm_head_to_fp32": (False, "pass the weight in float32"),
    "router_aux_loss_coef": (None, "pass it to causal_lm_loss"),
}


def check_args(args: Any, overrides: Collection[str]) -> None:
    """Raise unless a `LossConfig` with `overrides` can hold all that `args` say of the loss.

    Raises:
        TypeError: the arguments of a TRL trainer with another loss than GRPO's.
        ValueError: an option of `REFUSED` is on.
    """
    of_trl = [x.__name__ for x in type(args).__mro__ if x.__module__.partition(".")[0] == "trl"]
    is_like = "GRPOConfig" in of_trl
    if of_trl and of_trl[0] != "GRPOConfig" and not (is_like and "loss_type" in overrides):
        hint = "; its loss, if it is meant: from_trl(args, loss_type=...)" if is_like else ""
        raise TypeError(
            f"args: expected a trl.GRPOConfig or its like, got {type(args).__name__}, of a trainer "
            f"with another loss{hint}"
        )
    for name, (neutral, instead) in REFUSED.items():
        value = getattr(args, name, neutral)
        if value != neutral:
            raise ValueError(
                f"{name}: expected {neutral}, since a LossConfig cannot hold it, got {value!r}; "
                f"{instead}, and turn it off in a copy, dataclasses.replace(args, {name}={neutral})"
            )


def loss_fields(args: Any, names: Collection[str], optional: Collection[str]) -> dict[str, Any]:
    """The fields of `args` among `names`, by name; a None is left out unless `optional`.

    Raises:
        TypeError: `args` has none of them: it is None, or a mapping, where nobody would notice a
            misspelt key.
    """
    found = {name: getattr(args, name) for name in names if hasattr(args, name)}
    found.pop(CORRECTION, None)
    if not found:
        is_mapping = isinstance(args, Mapping)
        hint = "; of a mapping: trl.GRPOConfig(**args), or LossConfig(**args)" if is_mapping else ""
        raise TypeError(
            f"args: expected a trl.GRPOConfig or its like, got {type(args).__name__}{hint}"
        )
    found = {name: x for name, x in found.items() if x is not None or name in optional}
    if getattr(args, "vllm_importance_sampling_cap", None) is not None:
        found["vllm_importance_sampling_clip_max"] = args.vllm_importance_sampling_cap
    return found
