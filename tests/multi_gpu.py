"""Gradients on several devices against one process in float64: ``torchrun --nproc-per-node 4 -m tests.multi_gpu``.

The cases of the gloo tests (DDP, FSDP2, HSDP, a head sharded by rows of the vocabulary) with NCCL on CUDA devices, in
float64, float32 and bf16 (FSDP2's mixed precision). Prints a table, and fails if an error is above its bound. With
``--device cpu`` the same runs over gloo. It has not been run on GPUs yet.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from grpo_kernels import LossConfig, grpo_loss
from tests.support import parallel_cases as cases
from tests.support.case_builder import Case
from tests.support.parallel_cases import LOSSES, SETUPS, Run, relative_error, truth
from tests.support.reference import reference_loss

# Largest difference from float64 over the largest entry of a gradient; bf16 rounds weights and hidden states.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}
HSDP = ("FSDP2, head in the root unit", "FSDP2, head its own unit")
SHARDED = "head sharded by rows"


@dataclass(frozen=True)
class Row:
    """One comparison."""

    setup: str
    loss: str
    dtype: torch.dtype
    error: float

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound; not so for NaN."""
        return self.error <= BOUNDS[self.dtype]


def compare(rank: int, world_size: int, device_type: str, quick: bool = False) -> list[Row]:
    """Every case, on this rank; within an initialised process group. `quick`: two losses, float32."""
    device = torch.device(device_type, rank % torch.cuda.device_count() if device_type == "cuda" else 0)
    dtypes = [torch.float32] if quick else [torch.float64, torch.float32]
    losses = ["off-policy", "sequence ratio"] if quick else [*LOSSES]
    mesh = cases.hsdp_mesh(device_type, world_size) if world_size >= 4 and world_size % 2 == 0 else None
    rows = []
    for dtype, loss in itertools.product(dtypes, losses):
        want = truth(LOSSES[loss], world_size, accumulate=2)
        for setup in SETUPS:
            rows.append(Row(setup, loss, dtype, data_parallel(setup, loss, device, dtype, None, want)))
        for setup in HSDP if mesh is not None else ():
            error = data_parallel(setup, loss, device, dtype, mesh, want)
            rows.append(Row(setup.replace("FSDP2", "HSDP"), loss, dtype, error))
        rows.append(Row(SHARDED, loss, dtype, sharded_head(rank, world_size, loss, device, dtype)))
    for loss in losses:
        rows.append(Row("FSDP2, mixed precision", loss, torch.bfloat16, mixed_precision(loss, device, world_size)))
    return rows


def data_parallel(
    setup: str, loss: str, device: torch.device, dtype: torch.dtype, mesh: DeviceMesh | None, want: dict[str, Tensor]
) -> float:
    """Two micro-batches, of which the first leaves its gradients unreduced."""
    got = Run(SETUPS[setup], LOSSES[loss], device, dtype, mesh).gradients(accumulate=2)
    return max(relative_error(got, want).values())


def mixed_precision(loss: str, device: torch.device, world_size: int) -> float:
    """FSDP2 with bf16 parameters and float32 reduction, against float64: the error is mostly that of bf16."""
    setup = cases.Setup(cases.units("mid", "lm_head", mp_policy=cases.BF16), inside=False)
    got = Run(setup, LOSSES[loss], device, torch.float32).gradients()
    return max(relative_error(got, truth(LOSSES[loss], world_size)).values())


def sharded_head(rank: int, world_size: int, name: str, device: torch.device, dtype: torch.dtype) -> float:
    """The head divided over all ranks, the batch the same on each: gradients of the rows and of hidden states."""
    loss, batch = LOSSES[name], cases.make_batch(0, world_size, dtype, last_empty=False)
    model = cases.make_model(torch.float64, loss)
    hidden, weight = model(batch.tokens).detach().to(dtype), model.lm_head.weight.detach().to(dtype)
    given = cases.arguments(loss, batch, float(batch.completion_mask.sum()))
    want = reference_loss(Case("", hidden, weight, config=loss.config, **given))
    leaf = hidden.to(device).requires_grad_()
    part = weight.tensor_split(world_size)[rank].to(device).requires_grad_(not loss.frozen_head)
    moved = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in given.items()}
    options = {"config": LossConfig(**loss.config), "engine": loss.engine, "process_group": dist.group.WORLD}
    grpo_loss(leaf, part, **moved, **options).loss.backward()
    got, expected = {"hidden": leaf.grad.cpu()}, {"hidden": want.d_hidden}
    if not loss.frozen_head:
        got["weight"], expected["weight"] = part.grad.cpu(), want.d_weight.tensor_split(world_size)[rank]
    return max(relative_error(got, expected).values())


def worst(rows: Iterable[Row]) -> Row:
    """The one with the largest error, or one without a number."""
    return max(rows, key=lambda row: (not row.passed, row.error))


def report(rows: list[Row], world_size: int, device_type: str) -> str:
    """A Markdown table of the worst loss of each setup, under what it was measured on."""
    names = "CPU, gloo" if device_type == "cpu" else f"{torch.cuda.get_device_name()}, NCCL"
    lines = [f"{world_size} x {names}; torch {torch.__version__}", ""]
    lines.append("| setup | dtype | losses | worst of them | its error | |\n| --- | --- | --- | --- | --- | --- |")
    for setup, dtype in dict.fromkeys((row.setup, row.dtype) for row in rows):
        same = [row for row in rows if (row.setup, row.dtype) == (setup, dtype)]
        row = worst(same)
        verdict = "ok" if row.passed else f"above {BOUNDS[dtype]:.0e}"
        lines.append(f"| {setup} | {str(dtype)[6:]} | {len(same)} | {row.loss} | {row.error:.1e} | {verdict} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="two losses, float32")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("start it with: torchrun --nproc-per-node N -m tests.multi_gpu")
    if given.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = compare(rank, world_size, given.device, given.quick)
    every: list[list[Row]] = [[] for _ in range(world_size)]
    dist.all_gather_object(every, rows)
    of_all_ranks = [worst(same) for same in zip(*every, strict=True)]
    if rank == 0:
        print(report(of_all_ranks, world_size, given.device))
    dist.destroy_process_group()
    if not all(row.passed for row in of_all_ranks):
        sys.exit(1)


if __name__ == "__main__":
    main()
