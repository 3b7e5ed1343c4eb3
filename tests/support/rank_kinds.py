"""How a mismatch between the ranks of a group is written down: `Mismatch`, and short ways to make one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_kernels import LossConfig
from tests.support.rank_calls import CALLS, Arguments


@dataclass(frozen=True)
class Mismatch:
    """One kind: what the odd rank gives instead, `change`, in a call that has `both` besides the usual."""

    name: str
    change: Mapping[str, Any]  # a function makes its value from the rank's arguments
    names: str  # a pattern that every error has to match
    call: str = "loss"
    both: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False  # the odd rank's arguments are wrong by themselves
    other_call: str = ""  # what the odd rank calls instead
    no_grad: bool = False  # the odd rank calls without gradients
    fits: bool = False  # no mismatch: ranks may differ so

    def arguments(self, rank: int, odd: bool) -> tuple[str, Arguments]:
        """What the rank calls, and with what."""
        call = self.other_call if odd and self.other_call else self.call
        given = CALLS[call].right_part(self.both if call == self.call else {}, rank)
        change = self.change if odd else {}
        return call, given | {name: x(given) if callable(x) else x for name, x in change.items()}


def differs(what: str, names: str = "", call: str = "loss", **change: Any) -> Mismatch:
    """Right by itself, but not what the other rank gives; `both` among the changes is for both."""
    both = change.pop("both", {})
    return Mismatch(what, change, names or "|".join(change), call, both)


def config(call: str, **fields: Any) -> Mismatch:
    """Another config."""
    what = ", ".join(f"{name} {value}" for name, value in fields.items())
    return differs(what, "|".join(("config", *fields)), call, config=LossConfig(**fields))


def alone(what: str, call: str = "loss", **change: Any) -> Mismatch:
    """Wrong by itself: both errors name the argument, the other rank's says which rank refused."""
    return replace(differs(f"refused alone: {what}", call=call, **change), alone=True)


def fits(what: str, call: str = "loss", **change: Any) -> Mismatch:
    """What ranks may differ in."""
    return replace(differs(f"fits: {what}", call=call, **change), fits=True)
