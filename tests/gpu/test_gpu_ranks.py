"""Gradients on several GPUs by NCCL, against one process in float64.

The cases are those of the gloo tests; on a CPU two gloo processes compare two losses in float32. It
has not been run on GPUs yet.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from grpo_kernels import LossConfig, grpo_loss
from tests.support import parallel_cases as cases
from tests.support.case_builder import Case
from tests.support.flat import flat
from tests.support.parallel_cases import LOSSES, SETUPS, Run, relative_error, truth
from tests.support.ranks import run_ranks
from tests.support.reference import reference_loss

# Largest difference from float64 over the largest entry of a gradient; bf16 rounds weights and
# hidden states.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}
HSDP = ("FSDP2, head in the root unit", "FSDP2, head its own unit")
QUICK = ("off-policy", "sequence ratio")


def compare(
    rank: int, world_size: int, device_type: str
) -> dict[tuple[str, str, torch.dtype], float]:
    """The error of every case, by how the model is divided, the loss and the dtype."""
    on_gpus = device_type == "cuda"
    if on_gpus:
        torch.cuda.set_device(rank)
    device = torch.device(device_type, rank if on_gpus else 0)
    mesh = (
        cases.hsdp_mesh(device_type, world_size)
        if world_size >= 4 and world_size % 2 == 0
        else None
    )
    dtypes = [torch.float64, torch.float32] if on_gpus else [torch.float32]
    found = {}
    for dtype, loss in itertools.product(dtypes, LOSSES if on_gpus else QUICK):
        want = truth(LOSSES[loss], world_size, accumulate=2)
        for setup in SETUPS:
            found[setup, loss, dtype] = data_parallel(setup, loss, device, dtype, None, want)
        for setup in HSDP if mesh is not None else ():
            error = data_parallel(setup, loss, device, dtype, mesh, want)
            found[setup.replace("FSDP2", "HSDP"), loss, dtype] = error
        found["head sharded by rows", loss, dtype] = sharded_head(
            rank, world_size, loss, device, dtype
        )
        found["FSDP2, mixed precision", loss, torch.bfloat16] = mixed_precision(
            loss, device, world_size
        )
    return found


def data_parallel(
    setup: str,
    loss: str,
    device: torch.device,
    dtype: torch.dtype,
    mesh: DeviceMesh | None,
    want: dict[str, Tensor],
) -> float:
    """Two micro-batches, of which the first leaves its gradients unreduced."""
    got = Run(SETUPS[setup], LOSSES[loss], device, dtype, mesh).gradients(accumulate=2)
    return max(relative_error(got, want).values())


def mixed_precision(loss: str, device: torch.device, world_size: int) -> float:
    """FSDP2 with bf16 parameters and float32 reduction, against float64: mostly bf16's error."""
    setup = cases.Setup(cases.units("mid", "lm_head", mp_policy=cases.BF16), inside=False)
    got = Run(setup, LOSSES[loss], device, torch.float32).gradients()
    return max(relative_error(got, truth(LOSSES[loss], world_size)).values())


def sharded_head(
    rank: int, world_size: int, name: str, device: torch.device, dtype: torch.dtype
) -> float:
    """The head divided over all ranks, the batch the same: gradients of rows and hidden states."""
    loss, batch = LOSSES[name], cases.make_batch(0, world_size, dtype, last_empty=False)
    model = cases.make_model(torch.float64, loss)
    hidden, weight = model(batch.tokens).detach().to(dtype), model.lm_head.weight.detach().to(dtype)
    given = cases.arguments(loss, batch, float(batch.completion_mask.sum()))
    want = reference_loss(Case("", hidden, weight, config=loss.config, **given))
    leaf = hidden.to(device).requires_grad_()
    part = weight.tensor_split(world_size)[rank].to(device).requires_grad_(not loss.frozen_head)
    moved = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in given.items()}
    options = {
        "config": LossConfig(**loss.config),
        "engine": loss.engine,
        "process_group": dist.group.WORLD,
    }
    flat(grpo_loss)(leaf, part, **moved, **options).loss.backward()
    got, expected = {"hidden": leaf.grad.cpu()}, {"hidden": want.d_hidden}
    if not loss.frozen_head:
        got["weight"], expected["weight"] = (
            part.grad.cpu(),
            want.d_weight.tensor_split(world_size)[rank],
        )
    return max(relative_error(got, expected).values())


def test_gradients_are_those_of_one_process(device: torch.device) -> None:
    world_size = torch.cuda.device_count() if device.type == "cuda" else 2
    if world_size < 2:
        pytest.skip("needs two GPUs")
    backend = "nccl" if device.type == "cuda" else "gloo"
    for found in run_ranks(compare, world_size, device.type, backend=backend, seconds=600):
        # nor is NaN within it
        wrong = {case: error for case, error in found.items() if not error <= BOUNDS[case[2]]}
        assert not wrong
