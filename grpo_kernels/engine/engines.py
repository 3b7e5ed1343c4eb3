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
from grpo_kernels.engine.plan import Coupling, Engine, Situation, Stored

SCORE = Engine(
    name="score",
    stores=Stored.NOTHING,
    serves=lambda call: call.no_gradient,
    needs="that no gradient is wanted",
    first_pass=score,
    second_pass=recompute,
)
FROZEN = Engine(
    name="frozen",
    stores=Stored.PER_ROW,
    serves=lambda call: not (call.head_trains or call.entropy_gradient or call.mixed_gradient),
    needs="a frozen head, without a lora of its own, and no gradient but that of one number a row",
    first_pass=store,
    second_pass=recompute,  # for the entropy after all, or for rows that were not expected to have a gradient
)
ONE_PASS = Engine(
    name="one_pass",
    stores=Stored.GRADIENT,
    serves=lambda call: call.coupling in (Coupling.KNOWN, Coupling.TOKEN),
    needs="coefficients known row by row; here they are known {coupling}",
    first_pass=store,
    second_pass=recompute,  # for coefficients other than the expected
)
TWO_PASS = Engine(
    name="two_pass",
    stores=Stored.STATISTICS,
    serves=lambda call: True,
    needs="nothing",
    first_pass=score,
    second_pass=recompute,
)
LEAN = Engine(
    name="lean",
    stores=Stored.STATISTICS,
    serves=lambda call: True,
    needs="nothing",
    first_pass=score,
    second_pass=recompute_slices,
    comes_first=lambda call: call.tight_memory and call.head_trains,
)

# In order of preference; at equal cost frozen comes before one_pass, since it needs no
# coefficients. `lean` is for short memory.
_ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (SCORE, FROZEN, ONE_PASS, TWO_PASS, LEAN)
}
ENGINES = tuple(_ENGINES)
NAMES = choices(EngineName)  # names that calls take: "auto" and these


def check_engine(name: object) -> None:
    """Raise ValueError unless `name` is ``"auto"`` or one of `ENGINES`."""
    if name not in NAMES:
        raise ValueError(f"engine: expected one of {', '.join(NAMES)}, got {name!r}")


def choose_engine(call: Situation, name: str = "auto") -> Engine:
    """The cheapest engine that gives the exact gradient, or the one named; `SCORE` if no gradient
    is wanted.

    Raises:
        ValueError: there is no engine of that name, or it cannot give this gradient.
    """
    if name == "auto":
        engines = _ENGINES.values()
        first = next((engine for engine in engines if engine.comes_first(call)), None)
        return first or next(engine for engine in engines if engine.serves(call))
    check_engine(name)
    engine = _ENGINES[name]
    if not engine.serves(call):
        needs = engine.needs.format(coupling=call.coupling.value)
        raise ValueError(
            f"engine: expected one that gives this gradient, got {name!r}, which needs {needs}"
        )
    return SCORE if call.no_gradient else engine
