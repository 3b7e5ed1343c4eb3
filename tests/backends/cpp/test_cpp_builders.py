"""The first build of the C++ library: many processes at once, forks, and compilers that are stopped."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from grpo_kernels.backends.cpp_rows import build, cache, compiler
from tests.support.acted_build import GOOD, World, at_most


def fork(work: Callable[[], object]) -> ForkProcess:
    process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    process.start()
    return process


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def test_many_processes_compile_once(world):
    world.compiler(f'sleep 0.5; printf "{GOOD}" > "$out"')
    processes = [fork(world.find) for _ in range(4)]
    for process in processes:
        process.join(300)
    assert sorted(world.events().split(", ")) == ["compile", *["load cached"] * 4]


def test_what_a_killed_build_left_is_removed_by_the_next(world):
    """And nothing that another build may still be at."""
    folders = [world.version_folder() / f"{build.WORK}{name}" for name in ("old", "new")]
    for folder, age in zip(folders, (build.LONGEST_BUILD + 60, 0), strict=True):
        folder.mkdir()
        (folder / "half.o").touch()
        os.utime(folder, (time.time() - age,) * 2)
    assert world.find().origin.startswith("built in")
    assert [x.exists() for x in folders] == [False, True]


@pytest.mark.parametrize("kept", [True, False], ids=["its holder sleeps", "its holder ends"])
def test_lock_is_waited_for_until_it_ends_or_so_long_and_no_longer(world, kept):
    folder, held = world.version_folder(), world.folder / "held"
    if kept:
        world.patch.setattr(cache, "LOCK_SECONDS", 0.3)

    def hold() -> None:
        with cache.one_builder(folder):
            held.touch()
            time.sleep(600)

    holder = fork(hold)
    with at_most(120):
        wait_for(held)
        begun = time.monotonic()
        if not kept:
            threading.Timer(0.3, holder.kill).start()
        assert world.find().origin.startswith("built in ")
        assert time.monotonic() - begun >= 0.3
    assert holder.is_alive() == kept
    holder.kill()
    holder.join()


def test_file_system_without_locks(world):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    world.patch.setattr(fcntl, "flock", refuse)
    assert world.find().origin.startswith("built in ")


@contextmanager
def nursery(world: World) -> Iterator[Callable[[], bytes]]:
    """A compiler with a child that would outlive it; the function has the child's next words, empty at its end."""
    os.mkfifo(world.folder / "pipe")
    end = os.open(world.folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    world.compiler(f'(trap "" TERM; echo born; sleep 600) > "{world.folder}/pipe" & wait')

    def words() -> bytes:
        assert select.select([end], [], [], 120)[0], "still alive"
        return os.read(end, 100)

    with at_most(300):
        yield words
    assert words() == b""
    assert list(world.version_folder().iterdir()) == []


def test_compiler_out_of_time_takes_its_children_along(world):
    world.patch.setattr(compiler, "COMPILER_SECONDS", 0.5)
    with nursery(world) as words:
        assert "the compiler took more than 0.5 s" in world.find().refusal
        assert words() == b"born\n"


def test_interrupted_compiler_takes_its_children_along(world):
    with nursery(world) as words:

        def interrupt() -> None:
            while words() != b"born\n":
                time.sleep(0.01)
            time.sleep(0.5)  # the child may speak before `Popen` has returned
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            world.find()
    world.compiles(GOOD)
    assert world.find().origin.startswith("built in ")


def test_fork_during_the_first_build(world):
    """The child neither waits for a thread that it does not have, nor removes what the other is building in."""
    world.patch.setattr(build, "_load_once", world.find)
    world.compiler(
        f'cd "{world.folder}"; touch begun; while [ ! -e go ]; do sleep 0.05; done; printf "{GOOD}" > "$out"'
    )
    found: list[build.Library] = []
    thread = threading.Thread(target=lambda: found.append(build.load()))
    thread.start()
    with at_most(300):
        wait_for(world.folder / "begun")
        child = fork(lambda: (world.folder / "origin").write_text(build.load().origin))
        (world.folder / "go").touch()
        child.join(120)
        child.kill()
        thread.join()
    assert (world.folder / "origin").read_text() == "cached"
    assert found[0].origin.startswith("built in ")
