"""The engines, one record each, and the choice of the cheapest one that can serve a call.

Costs in NVH floating point operations, for N projected rows, a share s of which carries gradient; a
product takes 2:

========== =========================================== ======================== ==================
engine     what it does                                head and hidden train    head frozen
========== =========================================== ======================== ==================
score      project                                     2 (no gradient at all)
frozen     project; d logp / d hidden, scaled later    (not possible)           2 + 2s
one_pass   project; gradient on the same logits        2 + 4s                   2 + 2s
two_pass   project; later project again, gradient      2 + 6s                   2 + 4s
lean       the same, later by slices of the vocabulary 2 + 6s                   2 + 4s
========== =========================================== ======================== ==================

A divergence from a teacher adds 2 for every projection of the rows: the teacher projects them, too.
`one_pass` needs each row's coefficients, d loss / d logp, d loss / d entropy and d loss / d
divergence, as soon as the row's own logits are there. `frozen` needs no coefficients, since d
hidden is linear in a single one; it cannot serve several. `two_pass` and `lean` serve all calls.
`lean` writes each slice of d weight once, in the weight's dtype, and so needs no accumulator of the
weight's size. Rows whose coefficients are certain to be 0 are only projected in `frozen` and
`one_pass`. In `two_pass` and `lean` so are all rows whose coefficients turn out to be 0.

A new engine is a name in `base.choices`, a record here, and its passes (`passes.py`).
"""

from __future__ import annotations

from grpo_kernels.base.choices import EngineName, choices
from grpo_kernels.engine.passes import recompute, recompute_slices, score, store
from grpo_kernels.engine.plan import Coupling, Engine, Stored

SCORE = Engine("score", Stored.NOTHING, score, recompute)
# its second pass is for the entropy after all, or for rows that no gradient was expected for
FROZEN = Engine("frozen", Stored.PER_ROW, store, recompute)
# its second pass is for coefficients other than the expected
ONE_PASS = Engine("one_pass", Stored.GRADIENT, store, recompute)
TWO_PASS = Engine("two_pass", Stored.STATISTICS, score, recompute)
LEAN = Engine("lean", Stored.STATISTICS, score, recompute_slices)

# In order of preference; at equal cost frozen comes before one_pass, since it needs no
# coefficients. `lean` is for short memory.
_ENGINES: dict[str, Engine] = {x.name: x for x in (SCORE, FROZEN, ONE_PASS, TWO_PASS, LEAN)}
ENGINES = tuple(_ENGINES)
NAMES = choices(EngineName)  # names that calls take: "auto" and these


def check_engine(name: object) -> None:
    """Raise ValueError unless `name` is ``"auto"`` or one of `ENGINES`."""
    if name not in NAMES:
        raise ValueError(f"engine: expected one of {', '.join(NAMES)}, got {name!r}")


def choose_engine(
    coupling: Coupling,
    name: str = "auto",
    *,
    hidden_trains: bool,
    head_trains: bool,
    entropy_gradient: bool,
    mixed_gradient: bool = False,
    tight_memory: bool = False,
) -> Engine:
    """Return the cheapest engine that gives the exact gradient, or the one named.

    Args:
        coupling: when the coefficients of a row are known.
        hidden_trains, head_trains: True if these need a gradient (weight, bias or an adapter).
        entropy_gradient: True if the loss depends on the entropies; read only if the head is
            frozen.
        mixed_gradient: True if the loss depends on divergences and on log-probabilities, or on
            several log-probabilities of a row.
        tight_memory: True if an accumulator for d weight would not fit.

    Raises:
        ValueError: there is no engine of that name, or it cannot give this gradient.
    """
    no_gradient = not (hidden_trains or head_trains)
    serves = {
        "score": no_gradient,
        "frozen": not (head_trains or entropy_gradient or mixed_gradient),
        "one_pass": coupling in (Coupling.KNOWN, Coupling.TOKEN),
        "two_pass": True,
        "lean": True,
    }
    if name == "auto":
        if tight_memory and head_trains:
            return LEAN
        return _ENGINES[next(x for x in ENGINES if serves[x])]
    check_engine(name)
    if not serves[name]:
        needs = {
            "score": "that no gradient is wanted",
            "frozen": "a frozen head, without a lora of its own, and no gradient but that of one "
            "number a row",
            "one_pass": f"coefficients known row by row; here they are known {coupling.value}",
        }
        raise ValueError(
            f"engine: expected one that gives this gradient, got {name!r}, which needs "
            f"{needs[name]}"
        )
    return SCORE if no_gradient else _ENGINES[name]
