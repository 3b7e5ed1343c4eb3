"""What a call does on a GPU, without one, at real sizes: the rows of its chunks, the bytes that it
takes, its launches, and what it makes of the memory that is free."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_kernels import grpo_loss, linear_logps
from tests.support.flat import flat
from tests.support.gpu_tape import PLENTY, GPUAllocations, Tape, taped, tensor
from tests.support.pretend_gpu import OnGPU

MIB, GIB = 2**20, 2**30
N, H, V = 8192, 4096, 151936
BF16, FP32 = torch.bfloat16, torch.float32
GRADIENTS = 6 * (V + N) * H  # bf16, and in fp32 before they are rounded
COPY = 2 * V * H  # of an fp32 weight in bf16
WORKSPACES = [x * MIB for x in (512, 768, 1024, 1536, 2048, 3072)]

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:.*CUDA is not available")]


def step(
    n: int = N,
    h: int = H,
    v: int = V,
    *,
    weight: torch.dtype = BF16,
    frozen: bool = False,
    score: bool = False,
    zero_share: float = 0.0,  # of the sequences with advantage 0
    memory: dict[str, Any] | None = None,
    **options: Any,
) -> Tape:
    """Forward and backward of an on-policy loss, or scoring; within autocast if the weight is in
    fp32."""
    t = 512 if n % 512 == 0 else n
    batch = n // t
    autocast = BF16 if weight == FP32 else None
    with taped(autocast=autocast, **(memory or {})) as tape:
        hidden = tensor(batch, t, h, dtype=BF16).requires_grad_(not score)
        head = tensor(v, h, dtype=weight).requires_grad_(not (frozen or score))
        # as trainers have it
        ids, mask = (OnGPU(make(batch, t, dtype=torch.long)) for make in (torch.zeros, torch.ones))
        advantages = torch.ones(batch)
        advantages[: int(batch * zero_share)] = 0.0
        with GPUAllocations() as watch:
            if score:
                flat(linear_logps)(hidden, head, ids, completion_mask=mask, **options)
            else:
                out = flat(grpo_loss)(hidden, head, ids, mask, OnGPU(advantages), **options)
                tape.engine = out.engine
                torch.autograd.backward(out.loss)
        tape.peak = watch.peak
    return tape


def chunks(tape: Tape) -> list[int]:
    """Rows of each chunk."""
    return [x.shape[0] for x in tape.of("rows")]


@pytest.fixture(scope="module")
def main_step() -> Tape:
    return step()


@pytest.mark.parametrize(
    "workspace",
    [
        1,
        100 * MIB,
        *(pytest.param(x, marks=pytest.mark.slow) for x in (16 * MIB, 512 * MIB, 2 * GIB)),
    ],
)
@pytest.mark.parametrize(("n", "v"), [(1, V), (100, 33), (1025, V), (3000, 262_144), (N, 32_003)])
def test_a_small_workspace_multiplies_no_work(n: int, v: int, workspace: int) -> None:
    """Rows computed over rows asked, and the budget, which one tile of rows may exceed."""
    h, rows = 896, max(n, 128)
    for case, nvh, gradients in (
        ({"score": True}, 2, 0),
        ({"frozen": True}, 4, 6 * rows * h),
        ({}, 6, 6 * (rows + v) * h),
    ):
        found = step(n, h, v, workspace_bytes=workspace, **case)
        computed = sum(x.flops for x in found.of("product")) / (nvh * v * h)
        assert computed <= max(128, (1.25 if n >= 1024 else 2) * n)
        tile = 128 * (6 * (v + 64) + 2 * h)
        assert found.peak <= max(workspace, tile) + gradients + 200 * rows


@pytest.mark.parametrize(
    ("shape", "nvh"),
    [
        ({}, 6), ({"frozen": True}, 4), ({"score": True}, 2), ({"zero_share": 0.5}, 4),
        ({"weight": FP32}, 6), ({"v": 151_665}, 6), ({"h": 1024}, 6), ({"n": 1024}, 6),
    ],
    ids=str,
)  # fmt: skip
def test_nothing_is_multiplied_that_the_case_does_not_need(shape: dict[str, Any], nvh: int) -> None:
    needed = nvh * shape.get("n", N) * shape.get("h", H) * shape.get("v", V)
    assert needed <= sum(x.flops for x in step(**shape).of("product")) <= 1.03 * needed


def test_without_room_an_fp32_weight_is_converted_in_slices() -> None:
    found = step(n=1024, weight=FP32, engine="one_pass", memory={"free": 0})
    slices = [x for x in found.of("launch", "_to_copy") if x.shape[1:] == (H,) and x.shape[0] != V]
    assert len(slices) > 30
    assert max(x.written for x in slices) <= 32 * MIB


@pytest.mark.parametrize("v", [151_665, 50_257, 32_003, V])
@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "frozen"])
def test_rows_of_logits_are_aligned_whatever_the_vocabulary(v: int, engine: str) -> None:
    """Of the products, and of what the row kernels read and write."""
    found = step(n=1024, h=1024, v=v, engine=engine, frozen=engine == "frozen")
    assert found.of("product")
    assert all(x.aligned for x in (*found.of("product"), *found.of("rows")))


@pytest.mark.parametrize(
    ("case", "memory", "engine", "asked"),
    [
        ({}, {"free": PLENTY}, "one_pass", ["driver"]),
        ({}, {"free": 0, "unused": PLENTY}, "one_pass", ["driver", "allocator"]),
        ({}, {"free": 0, "unused": 0}, "lean", ["driver", "allocator"]),
        ({}, {"free": 0, "unused": None}, "lean", ["driver", "allocator"]),  # it raises
        # fragments of blocks that are in use are no room
        ({}, {"free": 0, "unused": 0, "fragments": 64 * GIB}, "lean", ["driver", "allocator"]),
        ({"frozen": True}, {"free": 0, "unused": 0}, "frozen", ["driver", "allocator"]),
        ({"engine": "one_pass"}, {"free": 0, "unused": 0}, "one_pass", ["driver", "allocator"]),
        ({"workspace_bytes": 64 * MIB}, {"free": GRADIENTS + 64 * MIB}, "one_pass", ["driver"]),
    ],
    ids=str,
)
def test_short_memory_chooses_lean(case, memory, engine, asked):
    """Where the head trains and no engine was named. The allocator is asked only where the driver
    has not enough; nothing is asked after a wait."""
    found = step(n=1024, **case, memory=memory)
    assert found.engine == engine
    assert [x.name for x in found.of("asks")] == asked
    first_wait = next(i for i, x in enumerate(found.events) if x.kind == "wait")
    assert not any(x.kind == "asks" for x in found.events[first_wait:])


def test_the_workspace_grows_in_steps_with_what_is_free() -> None:
    """Six of them, whatever is free; within a step the rows of a chunk are the same, and the bits
    with them."""
    seen: dict[int, set[tuple[int, ...]]] = {}
    for beside in (0, 511, 512, 767, 768, 1000, 1024, 1500, 1536, 2000, 2048, 3000, 3072, 4096):
        found = step(memory={"free": GRADIENTS + beside * MIB, "unused": 0})
        budget = max([512 * MIB, *(x for x in WORKSPACES if x <= beside * MIB)])
        assert found.engine == ("lean" if beside < 512 else "one_pass")
        if beside >= 512:
            seen.setdefault(budget, set()).add(tuple(chunks(found)))
            assert found.peak <= budget + GRADIENTS + 200 * N
    assert [*seen] == WORKSPACES
    assert all(len(kinds) == 1 for kinds in seen.values())
    assert all(min(kind) >= (1024 if x >= 1536 * MIB else 256) for x, (kind,) in seen.items())


@pytest.mark.parametrize(
    ("beside", "conversions", "workspace"), [(511, 0, 1536), (512, 1, 512), (1600, 1, 1536)]
)
def test_a_copy_of_the_weight_comes_before_a_larger_workspace(beside, conversions, workspace):
    """Without it every chunk converts the weight again."""
    free = (8 * V + 6 * N) * H + COPY + beside * MIB
    found = step(weight=FP32, engine="one_pass", memory={"free": free, "unused": 0})
    casts = [x for x in found.of("launch", "_to_copy") if x.shape == (V, H)]
    assert len([x for x in casts if x.written == COPY]) == conversions
    wanted = step(memory={"free": GRADIENTS + workspace * MIB, "unused": 0})
    if conversions:  # a chunk that converts has a slice of the weight beside its logits
        assert chunks(found) == chunks(wanted)


def test_the_backward_scales_and_casts_in_one_pass(main_step: Tape) -> None:
    """By the backend: at most 6 bytes an element of d weight, and 6 of d hidden."""
    for shape in ((V, H), (N, H)):
        passes = [x for x in main_step.of("launch") if x.shape == shape]
        assert sum(x.moved for x in passes) <= 6 * shape[0] * shape[1] + 8 * N
        assert [x.name for x in passes] == ["scale"]


def test_fp32_products_have_one_tile_of_rows() -> None:
    """Whatever N is, the library gets the same shapes, so a row has the same bits; 16-bit ones have
    whole chunks."""
    for n in (512, 1024, 4096):
        with taped() as tape, torch.no_grad():
            linear_logps(tensor(n, 64), tensor(1000, 64), OnGPU(torch.zeros(n, dtype=torch.long)))
        assert {x.shape[0] for x in tape.of("product")} == {128}
    assert min(x.shape[0] for x in step(score=True).of("product")) >= 1024
