"""Checks of the arguments of ``correct``. Each error names the argument, the expected and the actual value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from grpo_kernels.base.checks import (
    check_logps,
    check_mask_values,
    check_number,
    check_shape,
    check_tensor,
    did_you_mean,
)
from grpo_kernels.base.choices import CorrectionLevel, CorrectionMode, choices
from grpo_kernels.rollouts.rules import STATISTICS, Rule


def options(
    level: Any,
    mode: Any,
    clip_max: Any,
    clip_min: Any,
    batch_normalize: Any,
    veto_threshold: Any,
    safety_bound: Any,
) -> None:
    """Raise TypeError or ValueError unless the options, named as in ``correct``, are in range and fit each other."""
    if level not in (*choices(CorrectionLevel), None):
        raise ValueError(
            f"level: expected one of {_listed(choices(CorrectionLevel))} or None, got {level!r}"
        )
    if mode not in choices(CorrectionMode):
        raise ValueError(f"mode: expected one of {_listed(choices(CorrectionMode))}, got {mode!r}")
    for name, bound in {
        "clip_max": clip_max,
        "clip_min": clip_min,
        "veto_threshold": veto_threshold,
    }.items():
        if bound is not None:
            check_number(name, bound, lowest=0, inclusive=name == "clip_min")
    if clip_min is not None and clip_max is not None and clip_min > clip_max:
        raise ValueError(f"clip_min: expected at most clip_max = {clip_max}, got {clip_min}")
    if not isinstance(batch_normalize, bool):
        raise TypeError(f"batch_normalize: expected True or False, got {batch_normalize!r}")
    if level is None and (batch_normalize or clip_min is not None or mode != "truncate"):
        raise ValueError(
            f"level: expected one of {_listed(choices(CorrectionLevel))}, since clip_min, mode or batch_normalize ask "
            "for weights, got None"
        )
    if safety_bound != math.inf:
        check_number("safety_bound", safety_bound, lowest=0)


def rules(reject: Any) -> list[Rule]:
    """``reject`` as rules, with bounds in the unit of their statistic."""
    if reject is None:
        return []
    if not isinstance(reject, Mapping):
        raise TypeError(
            f"reject: expected a mapping from statistics to bounds, or None, got {type(reject).__name__}"
        )
    return [_rule(name, bound) for name, bound in reject.items()]


def _rule(name: Any, bound: Any) -> Rule:
    """Check one entry of ``reject``, and make its rule."""
    if name not in STATISTICS:
        hint = did_you_mean(str(name), STATISTICS)
        raise ValueError(f"reject: expected names among {_listed(STATISTICS)}, got {name!r}{hint}")
    level, kind = STATISTICS[name]
    where = f"reject[{name!r}]"
    if isinstance(bound, tuple) and len(bound) == 2:
        low, high = bound
    else:
        check_number(where, bound, lowest=0)
        low, high = 1 / bound if kind == "k1" else None, bound
    for end in (low, high):
        if end is not None:
            check_number(where, end, lowest=0, inclusive=kind != "k1")
    low, high = 0.0 if low is None else low, math.inf if high is None else high
    if low > high:
        raise ValueError(f"{where}: expected a lower bound of at most the upper one, got {bound}")
    if kind == "k1":
        low, high = math.log(low) if low else -math.inf, math.log(high)
    return Rule(name, level, kind, low, high)


def counted(old: Any, sampling: Any, completion_mask: Any, *, packed: bool) -> Tensor:
    """Check the three arguments, (B, T), or (N,) if `packed`; return where the mask counts, as bool."""
    check_tensor("old_per_token_logps", old, floating=True)
    if old.dim() != (1 if packed else 2):
        expected = "(N,), since there are cu_seqlens" if packed else "(B, T)"
        raise ValueError(f"old_per_token_logps: expected shape {expected}, got {tuple(old.shape)}")
    check_tensor("sampling_per_token_logps", sampling, like=old, floating=True)
    check_tensor("completion_mask", completion_mask, like=old)
    for name, x in {
        "sampling_per_token_logps": sampling,
        "completion_mask": completion_mask,
    }.items():
        check_shape(name, x, ("that of old_per_token_logps", tuple(old.shape)))
    counts = completion_mask != 0
    if bool(completion_mask.ne(counts).any()):
        check_mask_values("completion_mask", has_nan=bool(completion_mask.isnan().any()))
    rows = old[counts]
    if not bool(rows.isfinite().all()):
        bad = rows[~rows.isfinite()][0].item()
        raise ValueError(
            f"old_per_token_logps: expected finite numbers where the mask counts, got {bad}"
        )
    check_logps("old_per_token_logps", rows)
    check_logps("sampling_per_token_logps", sampling[counts])
    return counts


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))
