"""Several gloo processes for one test: `run_ranks` gives each rank the same task and collects what they return.

They come from a fork server that has torch and this package imported already, so that they start in a fraction of a
second.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 120  # of one `run_ranks`; a collective that a rank does not join would wait for ever
PRELOADED = [
    "torch",
    "torch._dynamo",  # DDP imports it
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "grpo_kernels",
    "transformers.models.qwen3.modeling_qwen3",  # of the examples
    "tests.support.cases",
]


def server_context() -> Any:
    """The fork server that has everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_ranks(
    task: Callable[..., Any], world_size: int, *args: Any, backend: str = "gloo", seconds: float = SECONDS
) -> list[Any]:
    """``[task(rank, world_size, *args) for each rank]``, each in a process of its own, within one group.

    Raises:
        AssertionError: a rank raised (its traceback is the message), or did not return in time.
    """
    context = server_context()
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=_work, args=(task, rank, world_size, store, results, args, backend), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            return _collect(results, ranks, seconds)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _collect(results: Any, ranks: list[Any], seconds: float) -> list[Any]:
    found: dict[int, Any] = {}
    end = time.monotonic() + seconds
    while len(found) < len(ranks):
        try:
            rank, result, error = results.get(timeout=1.0)
        except queue.Empty:
            dead = [i for i, process in enumerate(ranks) if i not in found and process.exitcode is not None]
            if dead and results.empty():
                codes = {i: ranks[i].exitcode for i in dead}
                raise AssertionError(f"ranks ended without a result, exit codes {codes}") from None
            if time.monotonic() > end:
                missing = sorted(set(range(len(ranks))) - found.keys())
                raise AssertionError(f"ranks {missing} did not return within {seconds:g} s") from None
            continue
        if error is not None:
            raise AssertionError(f"rank {rank}:\n{error}")
        found[rank] = torch.load(io.BytesIO(result), weights_only=False)
    return [found[rank] for rank in range(len(ranks))]


def _work(
    task: Callable[..., Any], rank: int, world_size: int, store: str, results: Any, args: Any, backend: str
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
        result = task(rank, world_size, *args)
        dist.barrier()
        results.put((rank, _packed(result), None))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()


def _packed(x: Any) -> bytes:
    """Bytes, since a tensor sent as such lies in memory that goes with the process that made it."""
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return buffer.getvalue()
