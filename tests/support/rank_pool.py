"""Long-lived gloo ranks that run one task after another, and are replaced when a task hangs or kills one of them."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tests.support.ranks import server_context

START_SECONDS = 60.0  # of the first task of new ranks: it includes their start


class RankFailure(Exception):
    """A task did not come back from every rank: one hung or died. The ranks were replaced."""


class RankPool:
    """``pool.run(task, *args)`` is ``[task(rank, *args) for each rank]`` in processes of one gloo group, kept between
    calls. Tasks are functions of a module; what they return is pickled."""

    def __init__(self, world_size: int = 2, seconds: float = 10.0) -> None:
        self.world_size, self.seconds = world_size, seconds
        self.starts = 0
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, task: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank returned.

        Raises:
            RankFailure: a rank hung past the pool's seconds, or died.
            AssertionError: the task raised on a rank; its traceback is the message.
        """
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send((task, args))
        results = self._collect(self.seconds)
        errors = [f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(results) if error is not None]
        if errors:
            raise AssertionError("\n".join(errors))
        return [result for result, _ in results]

    def _collect(self, seconds: float) -> list[tuple[Any, str | None]]:
        found: dict[int, tuple[Any, str | None]] = {}
        died: dict[int, int | None] = {}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        end = time.monotonic() + seconds
        while len(found) + len(died) < self.world_size and time.monotonic() < end:
            waiting = [pipe for pipe, rank in pipes.items() if rank not in found and rank not in died]
            for ready in wait(waiting, timeout=max(0.0, end - time.monotonic())):
                assert isinstance(ready, Connection)
                rank = pipes[ready]
                try:
                    found[rank] = ready.recv()
                except EOFError:
                    process = self._ranks[rank][0]
                    process.join(1.0)
                    died[rank] = process.exitcode
        if len(found) == self.world_size:
            return [found[rank] for rank in range(self.world_size)]
        words = self._words()
        hung = [rank for rank in range(self.world_size) if rank not in found and rank not in died]
        returned = {rank: result if error is None else error for rank, (result, error) in found.items()}
        self.close()
        what = [f"ranks {hung} did not return within {seconds:g} s"] if hung else []
        what += [f"rank {rank} died, exit code {code}: {words[rank]}" for rank, code in died.items()]
        raise RankFailure(f"{'; '.join(what)}; the others: {returned}")

    def _start(self) -> None:
        context = server_context()
        self._folder = tempfile.TemporaryDirectory()
        self.starts += 1
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            args = (rank, self.world_size, os.path.join(self._folder.name, "store"), theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        self._collect(START_SECONDS)  # each says that it is there

    def _words(self) -> list[str]:
        """The end of what each rank wrote to its stderr."""
        assert self._folder is not None
        files = [Path(self._folder.name) / f"store.{rank}" for rank in range(self.world_size)]
        return [" ".join(file.read_text(errors="replace").split())[-300:] if file.exists() else "" for file in files]

    def close(self) -> None:
        """End the ranks; the next `run` starts new ones."""
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.dup2(os.open(f"{store}.{rank}", os.O_CREAT | os.O_WRONLY), 2)  # gloo's last words among them
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    dist.barrier()
    pipe.send((None, None))
    while True:
        try:
            task, args = pipe.recv()
        except EOFError:  # the parent is gone
            return
        try:
            answer = (task(rank, *args), None)
        except BaseException:
            answer = (None, traceback.format_exc())
        pipe.send(answer)
