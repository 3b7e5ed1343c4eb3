"""Gradients on several GPUs by NCCL, against one process in float64, with the cases of the gloo
tests; on a CPU two gloo processes compare two losses. It has not been run on GPUs yet."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import Head, LossConfig, Run, grpo_loss
from tests.support import parallel_cases as cases
from tests.support.case_builder import Case
from tests.support.ranks import run_ranks
from tests.support.reference import reference_loss

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}  # error over the largest entry of a gradient


def compare(rank: int, world_size: int, device_type: str) -> dict:
    """The error of every case, by how the model is divided, the loss and the dtype."""
    on_gpus = device_type == "cuda"
    if on_gpus:
        torch.cuda.set_device(rank)
    device, found = torch.device(device_type, rank if on_gpus else 0), {}
    for dtype in (torch.float64, torch.float32) if on_gpus else (torch.float32,):
        for name in cases.LOSSES if on_gpus else ("off-policy", "sequence ratio"):
            loss = cases.LOSSES[name]
            want = cases.truth(loss, world_size, accumulate=2)
            for setup, divided in cases.SETUPS.items():
                got = cases.Run(divided, loss, device, dtype, None).gradients(accumulate=2)
                found[setup, name, dtype] = max(cases.relative_error(got, want).values())
            error = sharded_head(rank, world_size, loss, device, dtype)
            found["head sharded by rows", name, dtype] = error
    return found


def sharded_head(rank, world_size, loss, device: torch.device, dtype: torch.dtype) -> float:
    """The head divided over all ranks, the batch the same: gradients of rows and hidden states."""
    batch = cases.make_batch(0, world_size, dtype, last_empty=False)
    model = cases.make_model(torch.float64, loss)
    hidden, weight = model(batch.tokens).detach().to(dtype), model.lm_head.weight.detach().to(dtype)
    given = cases.arguments(loss, batch, float(batch.completion_mask.sum()))
    want = reference_loss(Case("", hidden, weight, config=loss.config, **given))
    leaf = hidden.to(device).requires_grad_()
    part = weight.tensor_split(world_size)[rank].to(device).requires_grad_(not loss.frozen_head)
    moved = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in given.items()}
    head, config = Head(part, process_group=dist.group.WORLD), LossConfig(**loss.config)
    grpo_loss(leaf, head, **moved, config=config, run=Run(loss.engine)).loss.backward()
    got, expected = {"hidden": leaf.grad.cpu()}, {"hidden": want.d_hidden}
    if not loss.frozen_head:
        got["weight"] = part.grad.cpu()
        expected["weight"] = want.d_weight.tensor_split(world_size)[rank]
    return max(cases.relative_error(got, expected).values())


def test_gradients_are_those_of_one_process(device: torch.device) -> None:
    world_size = torch.cuda.device_count() if device.type == "cuda" else 2
    if world_size < 2:
        pytest.skip("needs two GPUs")
    backend = "nccl" if device.type == "cuda" else "gloo"
    for found in run_ranks(compare, world_size, device.type, backend=backend, seconds=600):
        # nor is NaN within it
        wrong = {case: error for case, error in found.items() if not error <= BOUNDS[case[2]]}
        assert not wrong
