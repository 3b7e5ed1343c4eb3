"""Sequences whose tokens are split over processes, against a single process that has them whole, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from grpo_kernels import Head, LossConfig, grpo_loss, token_level
from grpo_kernels.base.distributed import gather_stacked
from grpo_kernels.engine.memory import AMPLE, FreeMemory
from tests.support.case_builder import PER_TOKEN, Case, make_case
from tests.support.cases import LOSSES, loss
from tests.support.flat import flat
from tests.support.ranks import run_ranks
from tests.support.run_case import arguments, config_of

SHAPE = {"b": 3, "t": 8, "h": 6, "v": 20, "dtype": torch.float64}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "entropy bonus": {"entropy_coef": 0.1},
    "top entropy": {"top_entropy_quantile": 0.37, "entropy_coef": 0.05},
    "off-policy mask": {"off_policy_mask_threshold": 0.05, "sampling": True},
    "corrected KL": {"beta": 0.1},
    "uncorrected KL, bonus": {"beta": 0.1, "use_bias_correction_kl": False, "entropy_coef": 0.02},
    "sampling, token": {"vllm_importance_sampling_mode": "token_truncate", "sampling": True},
    "sampling, mean": {"vllm_importance_sampling_mode": "sequence_mean_mask", "sampling": True},
    "sampling, sequence": {
        "vllm_importance_sampling_mode": "sequence_mask",
        "sampling": True,
        "beta": 0.05,
    },
}
NAMES = (
    "hidden", "teacher_hidden", "completion_ids", "completion_mask", "importance_sampling_ratio", "advantages",
)  # fmt: skip
EVERY = {2: 1, 4: 5}  # which of the cases: with more processes than cores, collectives are slow
# how the positions are split over the ranks, as shares: a rank may have none
SPLITS = {
    2: ((1, 1), (3, 1), (0, 1), (1, 0)),
    4: ((1, 1, 1, 1), (3, 1, 2, 2), (2, 0, 1, 1), (0, 0, 4, 0)),
}


def cases() -> Iterator[Case]:
    """Every loss with every option, on- and off-policy by turns, and so the masks, one of an empty sequence."""
    masks = ("holes", "ragged", "first_empty", "full")
    for (i, (loss_type, level)), (j, (name, option)) in itertools.product(
        enumerate(LOSSES), enumerate(OPTIONS.items())
    ):
        kind = loss(loss_type, level) | ({"epsilon_high": 1.1} if loss_type == "cispo" else {})
        switch = {"vllm_importance_sampling_correction": True} if "sampling," in name else {}
        more = {"adv": "token"} if (i + j) % 5 == 0 and loss_type != "gmpo" else {}
        turn = {"old": (i // 2 + j) % 2 == 0, "mask": masks[(i + i // 4 + j) % 4]}
        case = make_case(
            f"{loss_type}-{level}/{name}", **turn, **SHAPE, **kind, **option, **switch, **more
        )
        yield case.but(num_items_in_batch=11.0 if j % 3 == 0 else None)
    for ratio in ("token", "batch"):
        for loss_type in ("dapo", "vespo"):
            yield make_case(f"ratio/{loss_type}/{ratio}", ratio=ratio, loss_type=loss_type, **SHAPE)
    yield make_case(
        "full KL", kl_estimator="full", beta=0.3, teacher=0.3, loss_type="grpo", **SHAPE
    )
    nothing = make_case("nothing counts", mask="none", loss_type="grpo", entropy_coef=0.1, **SHAPE)
    yield from (nothing, nothing.but(config={"top_entropy_quantile": 0.5}))
    yield make_case("no positions", loss_type="dapo", **SHAPE | {"t": 0})
    yield make_case("no sequences", loss_type="dapo", **SHAPE | {"b": 0})


def part_of(case: Case, shares: tuple[int, ...], rank: int) -> Case:
    """The rank's columns of what is one a token."""
    length = case.completion_ids.shape[1]
    stops = [length * sum(shares[: i + 1]) // sum(shares) for i in range(len(shares))]
    columns = slice(stops[rank - 1] if rank else 0, stops[rank])
    tensors = {name: getattr(case, name) for name in (*NAMES, *PER_TOKEN)}
    return case.but(
        **{name: x[:, columns] for name, x in tensors.items() if x is not None and x.dim() >= 2}
    )


def run(case: Case, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    given = arguments(case)
    out = flat(grpo_loss)(**given, config=config_of(case), **options)
    if out.loss.requires_grad:
        out.loss.backward()
    return out, {
        name: given[name].grad for name in ("hidden", "weight") if given[name].grad is not None
    }


def assert_part(
    case: Case, shares: tuple[int, ...], rank: int, objective: Any = None, **options: Any
) -> str:
    """This rank's part of `case` against the whole case, which it computes by itself. Returns the engine."""
    whole, grads = run(case, objective=objective)
    part, part_grads = run(
        part_of(case, shares, rank), sequence_group=dist.group.WORLD, objective=objective, **options
    )
    close = {"rtol": 1e-10, "atol": 1e-13, "equal_nan": True}
    assert part.loss.dtype == torch.float64
    total = gather_stacked(part.loss.detach(), dist.group.WORLD).sum(0)
    assert_close(total, whole.loss.detach(), **close)
    inputs = case.but(hidden=grads.get("hidden", torch.zeros_like(case.hidden)))
    want = part_of(inputs, shares, rank).hidden
    assert_close(part_grads.get("hidden", torch.zeros_like(want)), want, **close)
    if "weight" in grads:
        assert_close(
            gather_stacked(part_grads["weight"], dist.group.WORLD).sum(0), grads["weight"], **close
        )
    assert part.metrics.pairs.keys() == whole.metrics.pairs.keys() and [*part.metrics] == [
        *whole.metrics
    ]
    for mine, wholes in ((part.metrics.pairs, whole.metrics.pairs), (part.metrics, whole.metrics)):
        compared = {*wholes} - {
            "rows/gradient"
        }  # engines differ in it where there is nothing to do
        assert_close(
            {name: mine[name] for name in compared},
            {name: wholes[name] for name in compared},
            **close,
        )
    every = gather_stacked(torch.stack([*part.metrics.values()]).nan_to_num(7.0), dist.group.WORLD)
    assert bool((every == every[0]).all()), "metrics differ between ranks"
    return part.engine


def every_case(rank: int, world_size: int) -> int:
    """The task of each process: the whole grid, and what is special."""
    chosen = [*enumerate(cases())][:: EVERY[world_size]]
    for i, case in chosen:
        turn = i + 2 * (i // len(OPTIONS))  # so that each option meets each split
        shares = SPLITS[world_size][turn % len(SPLITS[world_size])]
        try:
            assert_part(case, shares, rank)
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"{case.name}, {shares}: {error}") from error
    shares = SPLITS[world_size][1]
    gspo = make_case("engines", old=True, entropy_coef=0.1, **SHAPE, **loss("grpo", "sequence"))
    for engine in ("two_pass", "lean"):
        assert assert_part(gspo, shares, rank, engine=engine) == engine
    assert (
        assert_part(
            gspo.but(config={"entropy_coef": 0.0}, frozen=frozenset(["weight"])), shares, rank
        )
        == "frozen"
    )
    assert assert_part(gspo.but(frozen=frozenset(["weight", "hidden"])), shares, rank) == "score"
    dapo = make_case("dapo", loss_type="dapo", **SHAPE)
    assert assert_part(dapo, shares, rank) == "one_pass"
    short = replace(AMPLE, tight=rank == 0)  # one rank has no memory for an accumulator
    with mock.patch.object(FreeMemory, "of", return_value=short):
        assert assert_part(dapo, shares, rank) == "lean"
    # coefficients that need all ranks once, and a rank without a row to ask for them
    once = make_case(
        "once",
        old=False,
        beta=0.1,
        use_bias_correction_kl=False,
        **SHAPE,
        **loss("grpo", "sequence"),
    )
    for backend in ("torch", "cpp"):
        assert assert_part(once, SPLITS[world_size][2], rank, backend=backend) == "one_pass"
    own = token_level(
        lambda tokens: -tokens.advantages * tokens.logps.exp() - 0.1 * tokens.entropies
    )
    assert assert_part(dapo, shares, rank, own) == "one_pass"
    _refusals(part_of(dapo, shares, rank), rank)
    return len(chosen)


def _refusals(case: Case, rank: int) -> None:
    """What no rank can compute is refused before any collective, what ranks do not agree on on all of them."""
    given = arguments(case) | {"sequence_group": dist.group.WORLD}
    differs = "^sequence_group: expected the same call on every rank, got "
    for change, error, message in (
        (
            {"sequence_group": "world"},
            TypeError,
            r"^sequence_group: expected .*ProcessGroup.*, got str",
        ),
        (
            {"objective": lambda tokens: tokens.logps},
            ValueError,
            "^objective: expected a token_level function",
        ),
        (
            {"config": LossConfig(epsilon=0.1 + rank)},
            ValueError,
            differs + r"epsilon = [0-3]\.1 on rank",
        ),
        (
            {"num_items_in_batch": 5.0 if rank else None},
            ValueError,
            differs + "num_items_in_batch = (5.0|None)",
        ),
        (
            {"old_per_token_logps": None} if rank else {},
            ValueError,
            differs + "dtype and shape of old_",
        ),
        ({"engine": "lean" if rank else "auto"}, ValueError, differs + "engine"),
    ):
        with pytest.raises(error, match=message):
            flat(grpo_loss)(**given | change)
    packed = {
        name: x.flatten(0, 1) for name, x in given.items() if isinstance(x, Tensor) and x.dim() >= 2
    }
    packed["weight"], bounds = given["weight"], torch.arange(4) * case.completion_ids.shape[1]
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected None with a sequence_group"):
        flat(grpo_loss)(**given | packed, cu_seqlens=bounds)


@pytest.mark.parametrize("world_size", [2, 4])
def test_parts_add_up_to_the_whole(world_size: int) -> None:
    done = run_ranks(every_case, world_size)
    assert done == [-(-(len(LOSSES) * len(OPTIONS) + 9) // EVERY[world_size])] * world_size


def _compiled(rank: int, world_size: int) -> bool:
    case = make_case("compiled", **SHAPE, **loss("grpo", "sequence"))
    given = arguments(part_of(case, (1, 1), rank)) | {"sequence_group": dist.group.WORLD}
    given["head"] = Head(given.pop("weight"), given.pop("bias"))
    want = grpo_loss(**given).loss
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"grpo_kernels: .* group of ranks"):
        torch.compile(grpo_loss, backend="eager", fullgraph=True)(**given)
    torch._dynamo.reset()
    return torch.equal(torch.compile(grpo_loss, backend="eager")(**given).loss, want)


def test_compiled_it_runs_eagerly() -> None:
    assert run_ranks(_compiled, 2) == [True, True]
