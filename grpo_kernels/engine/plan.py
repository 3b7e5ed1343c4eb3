"""Which engine serves a call, and in which chunks: functions of what is asked, and the cost that decides.

N rows projected, s the share of them that carries gradient, one product 2NVH floating point operations:

========== =========================================== ======================== ==================
engine     what it does                                head and hidden train    head frozen
========== =========================================== ======================== ==================
score      project                                     2 (no gradient at all)
score_dot  the same without any logits in memory       2 (no gradient at all)
frozen     project; d logp / d hidden, scaled later    (not possible)           2 + 2s
one_pass   project; gradient on the same logits        2 + 4s                   2 + 2s
two_pass   project; later project again, gradient      2 + 6s                   2 + 4s
lean       the same, later by slices of the vocabulary 2 + 6s                   2 + 4s
========== =========================================== ======================== ==================

(In NVH.) One pass needs each row's coefficients a = d loss / d logp and b = d loss / d entropy as soon as the row's own
logits are there. `frozen` needs nothing, since d hidden is linear in a, but it is of no use to b. Two passes serve all.
`lean` writes each slice of d weight once, in the weight's dtype, and so needs no accumulator of the weight's size.
Rows whose coefficients are certain to be 0 are only projected, in score, frozen and one_pass; in two_pass and lean, so
are all rows whose coefficients came out 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

# In order of preference; at equal cost frozen comes before one_pass, since it needs no coefficients. The last two are
# for special ends: `lean` where memory is short, `score_dot` where it is asked for.
ENGINES = ("score", "frozen", "one_pass", "two_pass", "lean", "score_dot")
FEW_ROWS = 16  # on a CPU
TILE_ROWS = 128  # on a GPU
WIDTH_MULTIPLE = 64  # elements, on a GPU
CHUNKS_OF_A_GROUP = (8, 4, 2)  # as many as have rows enough: `LARGE_CHUNK_ROWS` each, or at least so many
LARGE_CHUNK_ROWS, LEAST_CHUNK_ROWS = 1024, 256


class Coupling(Enum):
    """When a row's coefficients are known."""

    KNOWN = "before the forward"
    TOKEN = "from the row's own log-probability and entropy"
    COUPLED = "only when other rows are done"

    @staticmethod
    def of(*, known: bool, coupled: bool) -> Coupling:
        """That of a loss whose gradient is known before any log-probability is, or couples its tokens, or neither."""
        return Coupling.KNOWN if known else Coupling.COUPLED if coupled else Coupling.TOKEN


def check_engine(name: object) -> None:
    """Raise ValueError unless `name` is ``"auto"`` or one of `ENGINES`."""
    if name not in ("auto", *ENGINES):
        raise ValueError(f"engine: expected one of auto, {', '.join(ENGINES)}, got {name!r}")


def choose_engine(
    coupling: Coupling,
    *,
    hidden_trains: bool,
    head_trains: bool,
    entropy_gradient: bool,
    tight_memory: bool = False,
    scores_without_logits: bool = False,
    engine: str = "auto",
) -> str:
    """The cheapest engine that gives the exact gradient, or `engine` if it can; "score" if no gradient is wanted.

    Args:
        coupling: when the coefficients of a row are known.
        hidden_trains, head_trains: what trains (weight or bias for the head).
        entropy_gradient: whether the loss depends on the entropies, b != 0.
        tight_memory: whether an accumulator for d weight would not fit.
        scores_without_logits: whether the backend can.
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
        "lean": True,
        "score_dot": no_gradient and scores_without_logits,
    }
    if engine == "auto":
        if tight_memory and head_trains:
            return "lean"
        return next(name for name in ENGINES if possible[name])
    check_engine(engine)
    if not possible[engine]:
        needs = {
            "score": "that no gradient is wanted",
            "score_dot": "that no gradient is wanted, no output but the entropy, no lora, and the triton backend",
            "one_pass": f"coefficients known row by row; here they are known {coupling.value}",
            "frozen": "a frozen head, without a lora of its own, and no gradient of the entropy",
        }
        raise ValueError(f"engine: expected one that gives this gradient, got {engine!r}, which needs {needs[engine]}")
    return "score" if no_gradient and engine != "score_dot" else engine


def padded_rows(n: int, *, on_gpu: bool = False) -> int:
    """How many rows the products of `n` rows are done with.

    The vendor library picks its kernel by the number of rows, and the bits of a row must not depend on how many others
    there are. On a CPU the choice matters below `FEW_ROWS`. On a GPU a whole tile costs no more than a part of it.
    """
    return -(-n // TILE_ROWS) * TILE_ROWS if on_gpu else max(n, FEW_ROWS) if n > 0 else 0


def row_width(vocab: int, *, on_gpu: bool = False) -> int:
    """How far apart rows of logits lie, in elements.

    On a GPU they start at multiples of 128 bytes, d logits of 16 bits too: with rows that do not, the vendor library's
    products are slower by a factor, and the row kernels have to go element by element.
    """
    return -(-vocab // WIDTH_MULTIPLE) * WIDTH_MULTIPLE if on_gpu else vocab


@dataclass(frozen=True)
class Group:
    """Rows whose d logits enter one backward product: the places [start, stop), projected in chunks."""

    start: int
    stop: int
    rows: int  # stop - start, padded
    chunks: tuple[slice, ...]  # of those rows

    def __len__(self) -> int:
        return self.stop - self.start


def plan_groups(
    n: int,
    workspace_bytes: int,
    *,
    chunk_row_bytes: int,
    group_row_bytes: int,
    grouped: bool,
    scratch_bytes: Callable[[int], int],
    on_gpu: bool = False,
) -> list[Group]:
    """The groups of `n` rows whose workspace stays within `workspace_bytes`, if that allows `least_rows`.

    Groups differ by at most one row (on a GPU by one tile), so that none is much smaller than the others.

    Args:
        chunk_row_bytes: what a row of a chunk takes, as long as the chunk lasts.
        group_row_bytes: what a row of a group takes, as long as the group lasts.
        grouped: whether several chunks may share a backward product; else a group is one chunk. Each product with d
            weight reads and writes all of its accumulator, so fewer are better.
        scratch_bytes: what a chunk of so many rows takes besides; not decreasing.
    """

    def most_rows(per_group: int) -> int:
        return chunk_rows(chunk_row_bytes + per_group * group_row_bytes, workspace_bytes, scratch_bytes, on_gpu=on_gpu)

    sizes = {per_group: most_rows(per_group) for per_group in (CHUNKS_OF_A_GROUP if grouped else ())}
    choices = ((per_group, least) for least in (LARGE_CHUNK_ROWS, LEAST_CHUNK_ROWS) for per_group in sizes)
    per_group = next((per_group for per_group, least in choices if sizes[per_group] >= least), 1)
    most = sizes.get(per_group) or most_rows(per_group)
    multiple = TILE_ROWS if on_gpu else 1
    most -= most % multiple
    groups = []
    for start, stop in _even_parts(n, per_group * most, multiple):
        rows = padded_rows(stop - start, on_gpu=on_gpu)
        parts = [(0, rows)] if per_group == 1 else _even_parts(rows, most, multiple)
        groups.append(Group(start, stop, rows, tuple(slice(*part) for part in parts)))
    return groups


def _even_parts(n: int, most: int, multiple: int) -> list[tuple[int, int]]:
    """[0, n) in as few parts as hold at most `most` each, which start at multiples of `multiple`."""
    count = -(-n // most)
    bounds = [min(n, -(-(n * i // count) // multiple) * multiple) for i in range(count + 1)] if count else []
    return list(itertools.pairwise(bounds))


def least_rows(*, on_gpu: bool = False) -> int:
    """How many rows a chunk may have whatever the budget: to fewer, padding would be added."""
    return TILE_ROWS if on_gpu else FEW_ROWS


def chunk_rows(
    row_bytes: int, workspace_bytes: int, scratch_bytes: Callable[[int], int], *, on_gpu: bool = False
) -> int:
    """The most rows a chunk may have so that the workspace stays within `workspace_bytes`; at least `least_rows`.

    Args:
        row_bytes: what a row takes: its logits and its hidden state.
        workspace_bytes: the budget.
        scratch_bytes: what a chunk of so many rows takes besides; not decreasing.
    """
    least = least_rows(on_gpu=on_gpu)
    low, high = least, max(least, workspace_bytes // row_bytes)
    while low < high:
        middle = (low + high + 1) // 2
        rows = padded_rows(middle, on_gpu=on_gpu)
        if rows * row_bytes + scratch_bytes(rows) <= workspace_bytes:
            low = middle
        else:
            high = middle - 1
    return low
