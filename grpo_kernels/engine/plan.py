"""Which engine serves a call: one function of what is asked, and the cost that decides.

N rows projected, s the share of them that carries gradient, one product 2NVH floating point operations:

========== =========================================== ======================== ==================
engine     what it does                                head and hidden train    head frozen
========== =========================================== ======================== ==================
score      project                                     2 (no gradient at all)
frozen     project; d logp / d hidden, scaled later    (not possible)           2 + 2s
one_pass   project; gradient on the same logits        2 + 4s                   2 + 2s
two_pass   project; later project again, gradient      2 + 6s                   2 + 4s
========== =========================================== ======================== ==================

(In NVH.) One pass needs each row's coefficients a = d loss / d logp and b = d loss / d entropy as soon as the row's own
logits are there. `frozen` needs nothing, since d hidden is linear in a, but it is of no use to b. Two passes serve all.
Rows whose coefficients are certain to be 0 are only projected, in the first three; in two passes, so are all rows whose
coefficients came out 0.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

# In order of preference; at equal cost frozen comes before one_pass, since it needs no coefficients.
ENGINES = ("score", "frozen", "one_pass", "two_pass")
FEW_ROWS, ROW_MULTIPLE = 12, 4


class Coupling(Enum):
    """When a row's coefficients are known."""

    KNOWN = "before the forward"
    TOKEN = "from the row's own log-probability and entropy"
    COUPLED = "only when other rows are done"


def choose_engine(
    coupling: Coupling, *, hidden_trains: bool, head_trains: bool, entropy_gradient: bool, engine: str = "auto"
) -> str:
    """The cheapest engine that gives the exact gradient, or `engine` if it can; "score" if no gradient is wanted.

    Args:
        coupling: when the coefficients of a row are known.
        hidden_trains, head_trains: what wants a gradient (weight or bias for the head).
        entropy_gradient: whether the loss depends on the entropies, b != 0.
        engine: ``"auto"``, or the name of the engine to use.

    Raises:
        ValueError: `engine` is no engine, or cannot give this gradient.
    """
    no_gradient = not (hidden_trains or head_trains)
    possible = {
        "score": no_gradient,
        "one_pass": coupling is not Coupling.COUPLED,
        "frozen": not head_trains and not entropy_gradient,
        "two_pass": True,
    }
    if engine == "auto":
        return next(name for name in ENGINES if possible[name])
    if engine not in possible:
        raise ValueError(f"engine: expected one of auto, {', '.join(ENGINES)}, got {engine!r}")
    if not possible[engine]:
        needs = {
            "score": "that no gradient is wanted",
            "one_pass": f"coefficients known row by row; here they are known {coupling.value}",
            "frozen": "a frozen head and no gradient of the entropy",
        }
        raise ValueError(f"engine: expected one that gives this gradient, got {engine!r}, which needs {needs[engine]}")
    return "score" if no_gradient else engine


def padded_rows(n: int) -> int:
    """How many rows the products of `n` rows are done with.

    Below `FEW_ROWS` the CPU library picks its kernel by the exact number of rows, unless that is a multiple of
    `ROW_MULTIPLE`: the bits of a row would depend on how many others there are.
    """
    return n if n >= FEW_ROWS else -(-n // ROW_MULTIPLE) * ROW_MULTIPLE


def chunk_rows(row_bytes: int, workspace_bytes: int, scratch_bytes: Callable[[int], int]) -> int:
    """The most rows a chunk may have so that the workspace stays within `workspace_bytes`; at least `ROW_MULTIPLE`.

    Args:
        row_bytes: what a row takes: its logits and its hidden state.
        workspace_bytes: the budget.
        scratch_bytes: what a chunk of so many rows takes besides; not decreasing.
    """
    low, high = ROW_MULTIPLE, max(ROW_MULTIPLE, workspace_bytes // row_bytes)
    while low < high:
        middle = (low + high + 1) // 2
        rows = padded_rows(middle)
        if rows * row_bytes + scratch_bytes(rows) <= workspace_bytes:
            low = middle
        else:
            high = middle - 1
    return low
