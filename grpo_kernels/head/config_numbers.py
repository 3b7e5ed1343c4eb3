"""Scale and soft-cap from a model's config: transformers' models name the same two numbers in many ways."""

from __future__ import annotations

from collections.abc import Callable

FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
DIVISORS = ("logits_scaling",)
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def scale_and_cap(value_of: Callable[[str], object]) -> tuple[float, float | None]:
    """Return (factor on the logits, soft-cap or None); `value_of` gives the config's value of a name, or None."""

    def first(names: tuple[str, ...]) -> float | None:
        numbers = (value_of(name) for name in names)
        return next((float(x) for x in numbers if isinstance(x, int | float) and x > 0), None)

    scale, divisor = first(FACTORS), first(DIVISORS)
    if scale is None:
        scale = 1.0 if divisor is None else 1.0 / divisor
    return scale, first(CAPS)
