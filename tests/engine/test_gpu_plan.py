"""What a call does on a GPU, without one: rows and bytes that are planned, launches that are
counted at real sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from grpo_kernels import Run, grpo_loss, linear_logprob
from grpo_kernels.engine.device import AMPLE, CUDA, FreeMemory, default_workspace, large_workspace
from grpo_kernels.engine.plan import Group, divide
from grpo_kernels.engine.records import NeedsGrad
from tests.support.flat import flat
from tests.support.gpu_tape import Tape, taped, tensor
from tests.support.pretend_gpu import OnGPU

MIB, GIB = 2**20, 2**30
N, H, V = 8192, 4096, 151936
BF16, FP32 = torch.bfloat16, torch.float32

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
    **options: Any,
) -> Tape:
    """Forward and backward of an on-policy loss, or scoring; within autocast if the weight is in
    fp32."""
    batch, t = n // 512, 512
    with taped(autocast=BF16 if weight == FP32 else None) as tape:
        hidden = tensor(batch, t, h, dtype=BF16).requires_grad_(not score)
        head = tensor(v, h, dtype=weight)
        # as trainers have it
        ids, mask = (OnGPU(make(batch, t, dtype=torch.long)) for make in (torch.zeros, torch.ones))
        if score:
            with torch.no_grad():
                linear_logprob(hidden, head, ids, mask=mask)
            return tape
        head.requires_grad_(not frozen)
        advantages = torch.ones(batch)
        advantages[: int(batch * zero_share)] = 0.0
        torch.autograd.backward(
            flat(grpo_loss)(hidden, head, ids, mask, OnGPU(advantages), **options).loss
        )
    return tape


def scored(weight: torch.dtype = BF16) -> Tape:
    return step(weight=weight, score=True)


@pytest.fixture(scope="module")
def main_step() -> Tape:
    return step()


def groups_of(
    n: int, v: int, h: int, workspace: int, *, gradient: bool, grouped: bool
) -> tuple[list[Group], int, int]:
    """As a sweep in bf16 plans them, and what a row of a chunk and of a group takes."""
    chunk, group = 4 * CUDA.row_width(v), 2 * h + (2 * CUDA.row_width(v) if gradient else 0)
    costs: dict[str, Any] = {"chunk_row_bytes": chunk, "group_row_bytes": group, "grouped": grouped}
    return divide(n, workspace, CUDA, **costs, scratch_bytes=lambda rows: 0), chunk, group


@pytest.mark.parametrize("v", [33, 32_003, 151_936, 262_144])
@pytest.mark.parametrize("workspace", [1, 16 * MIB, 64 * MIB, 100 * MIB, 512 * MIB, 2 * GIB])
def test_a_small_workspace_multiplies_no_work(v: int, workspace: int) -> None:
    """Rows computed over rows asked, and the budget, which one tile of rows may exceed."""
    for n, h, (gradient, grouped) in itertools.product(
        (1, 100, 128, 1000, 1024, 1025, 3000, 8192, 65_536),
        (896, 4096),
        ((False, False), (True, False), (True, True)),
    ):
        groups, chunk, group = groups_of(n, v, h, workspace, gradient=gradient, grouped=grouped)
        computed = sum(g.rows for g in groups)
        assert [g.start for g in groups] == [0, *[g.stop for g in groups[:-1]]]
        assert groups[-1].stop == n
        for g in groups:
            assert g.n <= g.rows == CUDA.padded_rows(g.n) and g.start % 128 == 0
            assert [c.start for c in g.chunks] == [0, *[c.stop for c in g.chunks[:-1]]]
            assert g.chunks[-1].stop == g.rows
        assert computed <= max(128, (1.25 if n >= 1024 else 2) * n)
        for g in groups:
            used = max(c.stop - c.start for c in g.chunks) * chunk + g.rows * group
            assert used <= workspace or used <= 128 * (chunk + group)


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


def test_an_fp32_weight_is_converted_once(main_step: Tape) -> None:
    """Under autocast, TRL's default: products and rows of a bf16 weight, and one conversion."""
    found = step(weight=FP32)
    assert len(found.of("product")) <= 1.1 * len(main_step.of("product"))
    casts = [x for x in found.of("launch") if x.written == 2 * V * H and x.shape == (V, H)]
    assert len(casts) == 1
    for kind in ("product", "rows"):
        assert sum(x.moved for x in found.of(kind)) <= 1.1 * sum(
            x.moved for x in main_step.of(kind)
        )


@pytest.mark.parametrize("kind", ["frozen", "scoring"])
def test_an_fp32_weight_is_converted_once_elsewhere(kind: str) -> None:
    plain, found = (
        step(frozen=True, weight=w) if kind == "frozen" else scored(weight=w) for w in (BF16, FP32)
    )
    assert len(found.of("product")) <= 1.1 * len(plain.of("product"))
    assert len([x for x in found.of("launch") if x.shape == (V, H)]) == 1


def test_without_room_an_fp32_weight_is_converted_in_slices() -> None:
    with mock.patch.object(FreeMemory, "of", return_value=replace(AMPLE, converts=False)):
        found = step(n=1024, weight=FP32, engine="one_pass")
    copies = [
        x.written for x in found.of("launch", "_to_copy") if x.shape[1:] == (H,) and x.shape[0] != V
    ]
    assert len(copies) > 30
    assert max(copies) <= 32 * MIB


@pytest.mark.parametrize("v", [151_665, 50_257, 32_003, V])
@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "frozen"])
def test_rows_of_logits_are_aligned_whatever_the_vocabulary(v: int, engine: str) -> None:
    """Of the products, and of what the row kernels read and write."""
    found = step(n=1024, h=1024, v=v, engine=engine, frozen=engine == "frozen")
    assert found.of("product")
    assert all(x.aligned for x in (*found.of("product"), *found.of("rows")))


@pytest.mark.parametrize(
    "shape", ["frozen", "scoring", "H 896", "H 1024, frozen", "N 8192, V 50257"]
)
def test_default_chunks_are_large(shape: str) -> None:
    found = {
        "frozen": lambda: step(frozen=True),
        "scoring": scored,
        "H 896": lambda: step(h=896),
        "H 1024, frozen": lambda: step(h=1024, frozen=True),
        "N 8192, V 50257": lambda: step(v=50_257),
    }[shape]()
    assert min(x.shape[0] for x in found.of("rows")) >= 1024


def room(
    free: int, unused: int | None = 0, fragments: int = 0, **asked: Any
) -> tuple[FreeMemory, list[str]]:
    """`FreeMemory.of` a bf16 weight with its gradient, and what was asked for it.

    Given what the driver has free, and what the allocator has reserved for nobody, in whole blocks
    and in fragments of blocks that are in use; `unused` None: to ask it raises.
    """
    calls: list[str] = []
    dtype = asked.pop("dtype", BF16)
    size = dtype.itemsize
    in_use = 5 * GIB
    held = {
        "reserved": in_use + (unused or 0) + fragments,
        "active": in_use,
        "inactive_split": fragments,
    }
    stats = {f"{name}_bytes": {"all": {"current": x}} for name, x in held.items()}

    def told(name: str, value: Any) -> Callable[..., Any]:
        def ask(*_: Any) -> Any:
            calls.append(name)
            if value is None:
                raise RuntimeError("not supported by this allocator")
            return value

        return ask

    cuda = SimpleNamespace(
        is_current_stream_capturing=lambda: False,
        mem_get_info=told("free", (free, 2**40)),
        memory_stats_as_nested_dict=told("allocator", None if unused is None else stats),
    )
    weight, hidden = (
        SimpleNamespace(
            shape=(k, H),
            dtype=dtype,
            device=torch.device("cuda"),
            numel=lambda k=k: k * H,
            element_size=lambda: size,
        )
        for k in (V, N)
    )
    given: dict[str, Any] = {
        "needs_grad": NeedsGrad(True, True),
        "workspace_bytes": None,
        "asks_tight": True,
        **asked,
    }
    with mock.patch.object(torch, "cuda", cuda):
        return FreeMemory.of(weight, hidden, compute_dtype=BF16, **given), calls  # type: ignore[arg-type]


GRADIENTS = 6 * (V + N) * H  # bf16, and in fp32 before they are rounded


def test_the_allocator_is_asked_only_where_the_driver_has_not_enough() -> None:
    plenty, none, least = 64 * GIB, 0, FreeMemory(tight=True, converts=False, workspace=512 * MIB)
    assert room(plenty) == (AMPLE, ["free"])
    assert room(none, plenty) == (AMPLE, ["free", "allocator"])
    assert room(none, none)[0] == least
    assert room(none, None)[0] == least  # raises nothing
    assert not room(none, none, asks_tight=False)[0].tight
    assert not room(none, none, needs_grad=NeedsGrad(hidden=True))[0].tight
    assert room(GRADIENTS + 64 * MIB, workspace_bytes=64 * MIB)[0] == replace(
        AMPLE, workspace=64 * MIB
    )


def test_the_workspace_grows_in_steps_with_what_is_free() -> None:
    """Six of them, whatever is free; within a step the rows of a chunk are the same, and the bits
    with them."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for beside in range(0, 4 * GIB, 64 * MIB):
        workspace = room(GRADIENTS + beside)[0].workspace
        assert workspace <= max(512 * MIB, beside)
        groups, _, _ = groups_of(N, V, H, workspace, gradient=True, grouped=True)
        found.setdefault(workspace, set()).add(
            tuple(c.stop - c.start for g in groups for c in g.chunks)
        )
    assert [*found] == [x * MIB for x in (512, 768, 1024, 1536, 2048, 3072)]
    assert all(len(chunks) == 1 for chunks in found.values())
    assert all(1024 in chunks for x, (chunks,) in found.items() if x >= 1536 * MIB)
    assert all(min(chunks) >= 256 for (chunks,) in found.values())


def test_the_workspace_is_no_larger_than_it_helps() -> None:
    """Rows of a frozen head take less: 1,024 of them are below a step, which is then as good as the
    largest."""
    frozen = NeedsGrad(hidden=True)
    wanted = large_workspace(OnGPU(torch.empty(V, H, dtype=BF16, device="meta")), frozen)
    assert 768 * MIB < wanted < 1024 * MIB
    enough, calls = room(GRADIENTS + 1024 * MIB, needs_grad=frozen)
    assert calls == ["free"]
    weight = OnGPU(torch.empty(V, H, dtype=BF16, device="meta"))
    assert default_workspace(weight, frozen, enough) == default_workspace(weight, frozen) == wanted


def test_fragments_of_reserved_memory_are_no_room() -> None:
    beside = 1024 * MIB
    assert room(GRADIENTS, beside, fragments=64 * GIB)[0].workspace == beside
    assert room(0, 0, fragments=64 * GIB)[0].tight
    assert room(0, 64 * GIB, fragments=64 * GIB)[0] == AMPLE


def test_a_copy_of_the_weight_comes_before_a_larger_workspace() -> None:
    """Without it every chunk converts the weight again."""
    gradients, copy = 8 * (V + N) * H, 2 * V * H
    for beside, converts, workspace in (
        (copy + 511 * MIB, False, 1536),
        (copy + 512 * MIB, True, 512),
        (copy + 1600 * MIB, True, 1536),
    ):
        found, _ = room(gradients + beside, dtype=FP32)
        assert (found.converts, found.workspace) == (converts, workspace * MIB)


@pytest.mark.parametrize("engine", ["auto", "one_pass"])
def test_memory_is_asked_for_before_any_wait(engine: str) -> None:
    """Once, and whether it is short only for "auto"."""
    seen: list[tuple[int, bool]] = []
    with taped() as tape:
        ask = FreeMemory.of

        def noted(*given: Any, **options: Any) -> FreeMemory:
            seen.append((len(tape.of("wait")), options["asks_tight"]))
            return ask(*given, **options)

        with mock.patch.object(FreeMemory, "of", noted):
            hidden, weight = tensor(2, 4, 8).requires_grad_(), tensor(20, 8).requires_grad_()
            ids = OnGPU(torch.zeros(2, 4, dtype=torch.long))
            mask, advantages = OnGPU(torch.ones(2, 4)), OnGPU(torch.ones(2))
            grpo_loss(hidden, weight, ids, mask, advantages, run=Run(engine=engine))
    assert seen == [(0, engine == "auto")]


def test_the_backward_scales_and_casts_in_one_pass(main_step: Tape) -> None:
    """By the backend: at most 6 bytes an element of d weight, and 6 of d hidden."""
    for shape in ((V, H), (N, H)):
        passes = [x for x in main_step.of("launch") if x.shape == shape]
        assert sum(x.moved for x in passes) <= 6 * shape[0] * shape[1] + 8 * N
        assert [x.name for x in passes] == ["scale"]


# Counted so on the code before: 225 launches besides products and row kernels; 30 operations of the
# host, 15 of them launches, between the last wait and the first product.
@pytest.mark.parametrize(
    ("kind", "before"), [("launch", 225), ("after the wait", 30), ("launch after the wait", 15)]
)
def test_small_launches_are_few(kind: str, before: int, main_step: Tape) -> None:
    after = main_step.after_last_wait()
    count = {
        "launch": len(main_step.of("launch")),
        "after the wait": len(after),
        "launch after the wait": sum(x.kind == "launch" for x in after),
    }
    assert count[kind] <= before / 2


def test_fp32_products_have_one_tile_of_rows() -> None:
    """Whatever N is, the library gets the same shapes, so a row has the same bits; 16-bit ones have
    whole chunks."""
    for n in (512, 1024, 4096):
        with taped() as tape, torch.no_grad():
            linear_logprob(tensor(n, 64), tensor(1000, 64), OnGPU(torch.zeros(n, dtype=torch.long)))
        assert {x.shape[0] for x in tape.of("product")} == {CUDA.fp32_rows}
    assert min(x.shape[0] for x in scored().of("product")) >= 1024
