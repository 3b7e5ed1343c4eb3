"""The arguments of a TRL trainer, read without importing TRL: the loss's, and those that no loss can honour."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

CORRECTION = (
    "vllm_importance_sampling_correction"  # TRL's trainer makes the ratio, so the loss must not
)

# name -> (value with which it does nothing, what to do instead)
REFUSED: dict[str, tuple[Any, str]] = {
    "use_adaptive_entropy": (
        False,
        "its controller is the trainer's: change the coefficient between steps, replace(config, entropy_coef=...)",
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
    if (
        of_trl
        and of_trl[0] != "GRPOConfig"
        and not ("GRPOConfig" in of_trl and "loss_type" in overrides)
    ):
        hint = (
            "; its loss, if it is meant: from_trl(args, loss_type=...)"
            if "GRPOConfig" in of_trl
            else ""
        )
        raise TypeError(
            f"args: expected a trl.GRPOConfig or its like, got {type(args).__name__}, of a trainer with another "
            f"loss{hint}"
        )
    for name, (neutral, instead) in REFUSED.items():
        value = getattr(args, name, neutral)
        if value != neutral:
            raise ValueError(
                f"{name}: expected {neutral}, since a LossConfig cannot hold it, got {value!r}; {instead}, and turn it "
                f"off in a copy, dataclasses.replace(args, {name}={neutral})"
            )


def loss_fields(args: Any, names: Collection[str], optional: Collection[str]) -> dict[str, Any]:
    """Return the fields of `args` that are among `names`, by name; a None is left out unless the field is `optional`.

    Raises:
        TypeError: `args` has none of them: it is None, or a mapping (where nobody would notice a misspelt key).
    """
    names = {name for name in names if hasattr(args, name)} - {CORRECTION}
    if not names:
        hint = (
            "; of a mapping: trl.GRPOConfig(**args), or LossConfig(**args)"
            if isinstance(args, Mapping)
            else ""
        )
        raise TypeError(
            f"args: expected a trl.GRPOConfig or its like, got {type(args).__name__}{hint}"
        )
    values = {name: getattr(args, name) for name in names}
    values = {
        name: value for name, value in values.items() if value is not None or name in optional
    }
    if getattr(args, "vllm_importance_sampling_cap", None) is not None:
        values["vllm_importance_sampling_clip_max"] = args.vllm_importance_sampling_cap
    return values
