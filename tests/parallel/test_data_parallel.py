"""DDP, FSDP2, HSDP, ZeRO-3, also beside a teacher that is divided in its own way: gradients of
head and body equal those of one process in float64."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import grpo_kernels
from grpo_kernels import LossConfig, grpo_loss, linear_divergence, linear_logps
from tests.support import parallel_cases as cases
from tests.support import zero3
from tests.support.case_builder import Case
from tests.support.ranks import Ranks, run_ranks
from tests.support.reference import reference_loss
from tests.support.tolerance import bounds_of

CPU = torch.device("cpu")
VARIANTS = [{"accumulate": n, "last_empty": x} for n in (1, 2) for x in (False, True)]
OWN_UNIT, ROOT_UNIT = "FSDP2, head its own unit", "FSDP2, head in the root unit"
BOTH = ("off-policy", "sequence ratio")
Gradients = dict[str, Tensor]
# a way to divide the model, a loss, options of model, batch and run
Scene = tuple[str, str, dict[str, Any]]


@functools.cache
def wanted(world_size: int, loss: str, **options: Any) -> Gradients:
    options.pop("dtype", None)
    return cases.truth(cases.LOSSES[loss], world_size, **options)


def check(found: list[Gradients], want: Gradients, what: object, bound: float = 1e-13) -> None:
    """Every rank has the gradients wanted; `bound` is of the largest entry."""
    for got in found:
        errors = cases.relative_error(got, want)
        assert max(errors.values()) < bound, f"{what}: {errors}"


TWO_PARTS = {"tied": True, "accumulate": 2, "last_empty": True}
SCENES: dict[str, list[Scene]] = {
    "every setup with every loss": [  # each sees each of `VARIANTS`
        (setup, loss, VARIANTS[(i + j) % len(VARIANTS)])
        for (i, setup), (j, loss) in itertools.product(
            enumerate(cases.SETUPS), enumerate(cases.LOSSES)
        )
    ],
    "heads": [
        *itertools.product(cases.TIED, BOTH, ({"tied": True}, TWO_PARTS)),
        *itertools.product(("DDP", OWN_UNIT), BOTH, [{"bias": True}]),
        (OWN_UNIT, "off-policy", {"dtype": torch.float32}),
    ],
    "adapters": [
        (setup, loss, {"adapter": where})
        for where, loss in itertools.product(cases.PLACES, BOTH)
        for setup in ("DDP", ROOT_UNIT, OWN_UNIT)
    ],
}
HYBRID: list[Scene] = [
    (setup, loss, VARIANTS[i])
    for setup in (ROOT_UNIT, OWN_UNIT)
    for loss, i in (("off-policy", 0), ("sequence ratio", 3), ("frozen head", 2), ("lean", 1))
]


def run_scenes(rank: int, world_size: int, scenes: list[Scene]) -> list[Gradients]:
    """On four ranks two replicas of two shards each."""
    mesh = {"mesh": cases.hsdp_mesh("cpu", world_size)} if world_size == 4 else {}
    return [
        cases.gradients(cases.SETUPS[x], loss, **options, **mesh) for x, loss, options in scenes
    ]


def check_scenes(ranks: Ranks, scenes: list[Scene]) -> None:
    found = zip(*ranks.run(run_scenes, scenes), strict=True)
    for (setup, loss, options), got in zip(scenes, found, strict=True):
        want = wanted(ranks.world_size, loss, **options)
        bound = 2e-6 if options.get("dtype") == torch.float32 else 1e-13
        check([*got], want, (setup, loss, options), bound)


@pytest.mark.parametrize("name", SCENES)
def test_gradients_are_those_of_one_process(ranks: Ranks, name: str) -> None:
    check_scenes(ranks, SCENES[name])


def test_two_replicas_of_two_shards_each() -> None:
    with Ranks(4) as four:
        check_scenes(four, HYBRID)


def run_mixed(rank: int, world_size: int, output_dtype: torch.dtype | None) -> dict[str, Any]:
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    policy = MixedPrecisionPolicy(**dtypes, output_dtype=output_dtype)
    wrap = cases.units("mid", "lm_head", mp_policy=policy)
    run = cases.Run(
        cases.Setup(wrap, inside=False), cases.LOSSES["sequence ratio"], CPU, torch.float32
    )
    model = cases.make_model(torch.float32, run.loss)
    wrapped = run.setup.wrap(model, None)
    hidden = wrapped(run.batch.tokens)
    given = cases.arguments(run.loss, run.batch, run.items)
    out = grpo_loss(hidden, model.lm_head, config=LossConfig(**run.loss.config), **given)
    with torch.no_grad():
        ids, mask = run.batch.completion_ids, run.batch.completion_mask
        scores = linear_logps(hidden, model.lm_head, ids, completion_mask=mask)
    out.loss.backward()
    results = {"hidden": hidden.detach(), "loss": out.loss.detach(), "logps": out.logps}
    scored = {"scored": scores.logps, "entropies": scores.entropies}
    return {**results, **scored, "grad": cases.whole(model.lm_head.weight.grad), "given": given}


@pytest.mark.parametrize("output_dtype", [None, torch.bfloat16], ids=["", "bf16 outputs"])
def test_mixed_precision_rounds_weights_and_hidden_states_and_nothing_else(ranks, output_dtype):
    got = ranks.run(run_mixed, output_dtype)
    model = cases.make_model(torch.float32, cases.LOSSES["sequence ratio"])
    weight = model.lm_head.weight.detach().bfloat16()
    total, allowed = torch.zeros(2, *weight.shape, dtype=torch.float64)
    for found in got:
        assert found["hidden"].dtype == torch.bfloat16
        assert found["loss"].dtype == found["logps"].dtype == found["scored"].dtype == torch.float32
        config = cases.LOSSES["sequence ratio"].config
        case = Case("", found["hidden"], weight, config=config, **found["given"])
        want = reference_loss(case)
        bounds = bounds_of(want, case)
        assert not bounds.ambiguous
        for name in ("logps", "scored"):
            assert bool(((found[name] - want.logps).abs() <= bounds.logps).all()), name
        assert bool(((found["entropies"] - want.entropies).abs() <= bounds.entropies).all())
        assert abs(float(found["loss"] - want.loss)) <= bounds.loss
        total, allowed = total + want.d_weight / 2, allowed + bounds.grads["d_weight"] / 2
    for found in got:
        assert bool(((found["grad"] - total).abs() <= allowed + 1e-7 * total.abs()).all())


def by_hand(loss: str, *, twice: bool) -> dict[str, Tensor]:
    """What the message for an empty weight says: forward and backward in one context. Or `twice`:
    for the forward, and again by the backward, which recomputes."""
    run = cases.Run(zero3.AFTER, cases.LOSSES[loss], CPU, torch.float64)
    model = cases.make_model(torch.float64, run.loss)
    engine, weight = zero3.divided(model), model.lm_head.weight
    hidden = engine(run.batch.tokens)

    def call(gather: Any = None) -> Tensor:
        given = cases.arguments(run.loss, run.batch, run.items)
        options = {"config": LossConfig(**run.loss.config), "run": grpo_kernels.Run(gather=gather)}
        return grpo_loss(hidden, weight, **options, **given).loss

    says = r"weight: .*which is empty; under DeepSpeed ZeRO-3.*pass the head's module instead"
    with pytest.raises(ValueError, match=says):
        call()
    gather = functools.partial(zero3.deepspeed().zero.GatheredParameters, [weight])
    with gather():
        out = call(gather if twice else None)
        if not twice:
            engine.backward(out)
    if twice:
        engine.backward(out)
    return cases.gradients_of(model)


OF_ZERO3: list[tuple[Any, str, dict[str, Any]]] = [
    *((setup, loss, {}) for setup in (zero3.INSIDE, zero3.AFTER) for loss in cases.LOSSES),
    *((zero3.INSIDE, loss, x) for loss in BOTH for x in ({"last_empty": True}, {"tied": True})),
    (zero3.INSIDE, "sequence ratio", {"bias": True}),
    *((zero3.AFTER, x, {"adapter": y}) for x, y in itertools.product(BOTH, cases.PLACES)),
]
BY_HAND = {"sequence ratio": False, "frozen head, sequence ratio": True}


def run_zero3(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    found = [cases.gradients(setup, loss, **options) for setup, loss, options in OF_ZERO3]
    return found + [by_hand(loss, twice=twice) for loss, twice in BY_HAND.items()]


@zero3.needs_deepspeed
def test_gradients_of_zero3() -> None:
    wanted = [*OF_ZERO3, *((None, loss, {}) for loss in BY_HAND)]
    found = zip(*run_ranks(run_zero3, 2), strict=True)
    for got, (_, loss, options) in zip(found, wanted, strict=True):
        # DeepSpeed keeps gradients in float32, whatever the model's dtype
        check([*got], cases.truth(cases.LOSSES[loss], 2, **options), (loss, options), 2e-7)


ZERO3 = "ZeRO-3"
# the student's way, the teacher's, the divergence, engine, tied
TEACHERS = (
    ("DDP", "whole", "jsd", "auto", False),
    ("DDP", OWN_UNIT, "reverse_kl", "lean", True),
    ("DDP", ROOT_UNIT, "jsd", "lean", False),
    (OWN_UNIT, OWN_UNIT, "jsd", "auto", False),
    (f"{OWN_UNIT}, after the forward", OWN_UNIT, "jsd", "two_pass", False),
    (OWN_UNIT, OWN_UNIT, "forward_kl", "lean", False),
    (ROOT_UNIT, ROOT_UNIT, "jsd", "two_pass", False),
    (ROOT_UNIT, ROOT_UNIT, "jsd", "auto", True),
)
TEACHERS_OF_ZERO3 = (
    (ZERO3, ZERO3, "jsd", "auto", False),
    (ZERO3, ZERO3, "reverse_kl", "lean", False),
)


def make_teacher() -> cases.TinyModel:
    """Another model than the student, with a bias."""
    teacher = cases.make_model(torch.float64, cases.LOSSES["off-policy"], bias=True)
    with torch.no_grad():
        for x in teacher.parameters():
            x.mul_(0.7).add_(0.1)
    return teacher.requires_grad_(False)


def divided(teacher: cases.TinyModel, way: str) -> nn.Module:
    if way == ZERO3:
        return zero3.divided(teacher)
    if way == OWN_UNIT:
        fully_shard(teacher.lm_head)
    return teacher if way == "whole" else fully_shard(teacher)


def score(
    heads: tuple[nn.Linear, nn.Linear], batch: cases.Batch, states: Tensor, divergence: str,
    engine: str, hidden: Tensor,
) -> Tensor:  # fmt: skip
    """A divergence from the teacher, and a loss whose KL term is one."""
    items, run = cases.items_per_rank(2, last_empty=False), grpo_kernels.Run(engine)
    given = cases.arguments(cases.LOSSES["off-policy"], batch, items) | {"run": run}
    kl, second = {"beta": 0.3, "kl_estimator": "full"}, (states, heads[1])
    out = grpo_loss(hidden, heads[0], **kl, reference=second, **given)
    assert engine in ("auto", out.engine)
    given = {"completion_mask": batch.completion_mask, "divergence": divergence, "run": run}
    found = linear_divergence(hidden, heads[0], second, **given).divergence
    return out.loss + found.sum() / items


def with_teacher(
    student_way: str, teacher_way: str, divergence: str, engine: str, tied: bool
) -> Gradients:
    setup = zero3.INSIDE if student_way == ZERO3 else cases.SETUPS[student_way]
    run = cases.Run(setup, cases.LOSSES["off-policy"], CPU, torch.float64)
    student, teacher = cases.make_model(torch.float64, run.loss, tied=tied), make_teacher()
    wrapped, tokens = setup.wrap(student, None), run.batch.tokens
    with torch.no_grad():
        states = divided(teacher, teacher_way)(tokens)
    heads = student.lm_head, teacher.lm_head
    then = functools.partial(score, heads, run.batch, states, divergence, engine)
    cases.backward(wrapped, wrapped(tokens, then) if setup.inside else then(wrapped(tokens)))
    return cases.gradients_of(student)


def truth_of_teacher(divergence: str, tied: bool) -> Gradients:
    """The mean over ranks."""
    student = cases.make_model(torch.float64, cases.LOSSES["off-policy"], tied=tied)
    teacher = make_teacher()
    for rank in range(2):
        batch = cases.make_batch(rank, 2, torch.float64, last_empty=False)
        states, hidden = teacher(batch.tokens), student(batch.tokens)
        heads = student.lm_head, teacher.lm_head
        (score(heads, batch, states, divergence, "auto", hidden) / 2).backward()
    return cases.gradients_of(student)


def run_cases(rank: int, world_size: int, given: Any) -> list[Gradients]:
    return [with_teacher(*case) for case in given]


# of the largest entry; DeepSpeed keeps gradients in float32
@pytest.mark.parametrize(
    ("given", "bound"),
    [(TEACHERS, 1e-13), pytest.param(TEACHERS_OF_ZERO3, 2e-7, marks=zero3.needs_deepspeed)],
    ids=["", "ZeRO-3"],
)
def test_gradients_beside_a_divided_teacher_are_those_of_one_process(given, bound):
    wanted = [truth_of_teacher(divergence, tied) for _, _, divergence, _, tied in given]
    found = zip(*run_ranks(run_cases, 2, given), strict=True)
    for case, got, want in zip(given, found, wanted, strict=True):
        check([*got], want, case, bound)
