"""Processes of a fork server that has torch and this package imported: several of one group, or a
script in one."""

from __future__ import annotations

import io
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 900.0  # of a start or a task: a collective that a rank does not join would wait for ever
GRACE = 5.0  # for the other ranks, after one has raised or died
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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_ranks(
    task: Callable[..., Any], world_size: int, *args: Any, backend: str = "gloo",
    seconds: float = SECONDS,
) -> list[Any]:  # fmt: skip
    """``[task(rank, world_size, *args) for each rank]``, in processes of their own."""
    with Ranks(world_size, seconds, backend) as ranks:
        return ranks.run(task, *args)


@contextmanager
def one_rank() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Ranks:
    """``ranks.run(task, *args)`` is ``[task(rank, world_size, *args) for each rank]``, in processes
    that are kept, and replaced after a task that failed. Tasks are functions of a module."""

    def __init__(
        self, world_size: int = 2, seconds: float = SECONDS, backend: str = "gloo"
    ) -> None:
        self.world_size, self.seconds, self.backend = world_size, seconds, backend
        self.starts = 0
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, task: Callable[..., Any], *args: Any) -> list[Any]:
        """Raise AssertionError if a rank raises, dies, or does not return in time."""
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send((task, args))
        return self._collect(self.seconds)

    def _start(self) -> None:
        context = server_context()
        self._folder = tempfile.TemporaryDirectory()
        self.starts += 1
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            store = os.path.join(self._folder.name, "store")
            args = (rank, self.world_size, self.backend, store, theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        self._collect(SECONDS)  # each says that it is there

    def _collect(self, seconds: float) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        end = time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            for pipe in wait([*waiting], timeout=max(0.0, end - time.monotonic())):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answer = io.BytesIO(pipe.recv_bytes())
                    results[rank], error = torch.load(answer, weights_only=False)
                except EOFError:
                    error = self._last_words(rank)
                if error is not None:
                    errors[rank] = error
                    end = min(end, time.monotonic() + GRACE)
        if not waiting and not errors:
            return [results[rank] for rank in range(self.world_size)]
        self.close()
        told = [f"rank {rank}: {error}" for rank, error in errors.items()]
        if waiting:
            within = "" if told else f" within {seconds:g} s"
            told.append(f"ranks {sorted(waiting.values())} did not return{within}")
        raise AssertionError("\n".join([*told, f"results: {results}"]))

    def _last_words(self, rank: int) -> str:
        process = self._ranks[rank][0]
        process.join(GRACE)
        words = Path(f"{self._folder.name}/store.{rank}").read_text(errors="replace").split()
        return f"died, exit code {process.exitcode}: {' '.join(words)[-300:]}"

    def close(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(rank: int, world_size: int, backend: str, store: str, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.dup2(os.open(f"{store}.{rank}", os.O_CREAT | os.O_WRONLY), 2)  # gloo's last words among them
    torch.set_num_threads(1)
    group = {"rank": rank, "world_size": world_size, "init_method": f"file://{store}"}
    dist.init_process_group(backend, **group)
    pipe.send_bytes(_packed((None, None)))
    while True:
        try:
            task, args = pipe.recv()
        except EOFError:  # the parent is gone
            return
        torch.manual_seed(0)
        try:
            answer = _packed((task(rank, world_size, *args), None))
        except BaseException:
            answer = _packed((None, traceback.format_exc()))
        pipe.send_bytes(answer)


def _packed(x: Any) -> bytes:
    """Bytes, since a tensor sent as such lies in memory that goes with the process that made it."""
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return buffer.getvalue()


def run_script(path: Path, options: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and output of ``python path *options``, printed to a file in `folder`."""
    printed = folder / f"{path.stem}.txt"
    process = server_context().Process(target=_run_script, args=(path, options, printed))
    process.start()
    process.join(600.0)
    if process.is_alive():
        process.kill()
        process.join()
    code = process.exitcode
    return (-1 if code is None else code), printed.read_text() if printed.exists() else ""


def _run_script(path: Path, options: list[str], printed: Path) -> None:
    file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))
    os.environ.update(HF_HUB_OFFLINE="1")
    torch.set_num_threads(1)
    sys.argv, sys.path[:0] = [str(path), *options], [str(path.parent)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except BaseException:
        traceback.print_exc()
        raise
