"""The first build of the C++ library: many processes at once, forks, and compilers that are stopped."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_kernels.backends.cpp_rows import build, cache, compiler
from tests.support.acted_build import GOOD, World, at_most


def children(count: int, work: Callable[[], str]) -> Iterator[tuple[int, Path]]:
    """Processes forked to do `work`, and files with what it returned."""
    folder = Path(tempfile.mkdtemp(dir=tempfile.gettempdir()))
    for index in range(count):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                (folder / str(index)).write_text(work())
                status = 0
            finally:
                os._exit(status)
        yield pid, folder / str(index)


def test_many_processes_compile_once(world):
    world.compiler(f'echo >> "{world.folder}/calls"; sleep 0.5; printf "{GOOD}" > "$out"')
    started = list(children(4, lambda: world.find().origin))
    with at_most(300):
        assert [os.waitpid(pid, 0)[1] for pid, _ in started] == [0] * 4
    origins = sorted(path.read_text()[:8] for _, path in started)
    assert origins == ["built in", "cached", "cached", "cached"]
    assert (world.folder / "calls").read_text() == "\n"


def test_what_a_killed_build_left_is_removed_by_the_next(world):
    """And nothing that another build may still be at."""
    folders = [world.version_folder() / f"{build.WORK}{name}" for name in ("old", "new")]
    for folder, age in zip(folders, (build.LONGEST_BUILD + 60, 0), strict=True):
        folder.mkdir()
        (folder / "half.o").touch()
        os.utime(folder, (time.time() - age,) * 2)
    assert world.find().origin.startswith("built in")
    assert [x.exists() for x in folders] == [False, True]


@contextmanager
def held_lock(world: World) -> Iterator[int]:
    """Another process has the lock of the build, and does nothing."""
    folder = world.version_folder()

    def hold() -> str:
        with cache.one_builder(folder):
            (folder / "held").touch()
            time.sleep(60)
        return ""

    ((pid, _),) = children(1, hold)
    try:
        while not (folder / "held").exists():
            time.sleep(0.01)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_lock_is_waited_for_so_long_and_no_longer(world):
    world.patch.setattr(cache, "LOCK_SECONDS", 0.3)
    with held_lock(world), at_most(20):
        begun = time.monotonic()
        assert world.find().origin.startswith("built in ")
        assert time.monotonic() - begun >= 0.3


def test_lock_ends_with_its_holder(world):
    with held_lock(world) as pid, at_most(20):
        begun = time.monotonic()
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        assert world.find().origin.startswith("built in ")
        assert time.monotonic() - begun >= 0.3


def test_file_system_without_locks(world):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    world.patch.setattr(fcntl, "flock", refuse)
    assert world.find().origin.startswith("built in ")


class Nursery:
    """A compiler that starts a child which would outlive it, and a pipe that tells whether it does."""

    def __init__(self, world: World) -> None:
        os.mkfifo(world.folder / "pipe")
        self._end = os.open(world.folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        world.compiler(f'(trap "" TERM; echo born; sleep 600) > "{world.folder}/pipe" & wait')

    def said(self) -> bytes:
        """The child's next words, empty at its end."""
        assert select.select([self._end], [], [], 10)[0], "still alive"
        return os.read(self._end, 100)

    def wait_for_birth(self) -> None:
        while self.said() != b"born\n":
            time.sleep(0.01)


def left(world: World) -> list[Path]:
    return list(world.version_folder().iterdir())


def test_compiler_out_of_time_takes_its_children_along(world):
    nursery = Nursery(world)
    world.patch.setattr(compiler, "COMPILER_SECONDS", 0.5)
    with at_most(300):
        assert "the compiler took more than 0.5 s" in world.refusal()
        assert nursery.said() == b"born\n"
        assert nursery.said() == b""
    assert left(world) == []


def test_interrupted_compiler_takes_its_children_along(world):
    nursery = Nursery(world)

    def interrupt() -> None:
        nursery.wait_for_birth()
        time.sleep(0.5)  # the child may speak before `Popen` has returned
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with at_most(300), pytest.raises(KeyboardInterrupt):
        world.find()
    assert nursery.said() == b""
    assert left(world) == []
    world.compiler(f'printf "{GOOD}" > "$out"')
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
        while not (world.folder / "begun").exists():
            time.sleep(0.01)

        def work() -> str:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            return build.load().origin

        ((pid, origin),) = children(1, work)
        (world.folder / "go").touch()
        assert os.waitpid(pid, 0)[1] == 0
        thread.join()
    assert origin.read_text() == "cached"
    assert found[0].origin.startswith("built in ")
