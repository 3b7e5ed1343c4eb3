"""How the C++ library is found, built, cached, loaded, and done without."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import grpo_kernels
from grpo_kernels import backends
from grpo_kernels.backends.cpp_rows import build
from grpo_kernels.commands import report
from tests.support.acted_build import script

pytestmark = pytest.mark.unit

CHECKOUT = Path(grpo_kernels.__file__).parents[1]
GOOD, EMPTY, BAD = "a library", "without ops", "of another libc"  # what an acted loader finds
WAYS_OUT = ("CXX", "make wheel", "install grpo_kernels again", "WSL", "TORCH_EXTENSIONS_DIR")
LOAD = """
from grpo_kernels.backends.cpp_rows.build import load
print(load().origin, load().path, sep="\\n")
"""
LOSS = """
import json, os, torch, warnings
from grpo_kernels import Run, linear_logps
hidden, weight, ids = torch.ones(5, 3), torch.ones(7, 3), torch.arange(5)
for backend in {backends!r}:
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(3):
            logps = linear_logps(hidden, weight, ids, run=Run(backend=backend)).logps
    said = [str(x.message) for x in caught if x.category is RuntimeWarning]
    print(json.dumps([said, logps.tolist(), os.listdir()]))
"""


def lines(code: str, folder: Path = CHECKOUT, **environment: object) -> list[str]:
    """What a Python process of its own prints, in `folder`."""
    changed = {name: str(value) for name, value in environment.items()}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input="typed",  # which is not for the compiler
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)} | changed,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


class World:
    """Folders of its own, an acted compiler and loader: the real ops can be registered once."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch, self.loaded = folder, patch, ""
        self.sources, self.home = folder / "csrc", folder / "home"
        self.cache, self.prebuilt = folder / "cache" / "grpo_kernels", folder / "prebuilt.so"
        patch.setenv("TORCH_EXTENSIONS_DIR", str(self.cache.parent))
        self.sources.mkdir()
        (self.sources / "ops.cpp").write_text("// 1")
        (self.sources / "row.h").write_text("// 2")
        patch.setattr(build, "PREBUILT", self.prebuilt)
        patch.setattr(build, "source_folder", lambda: self.sources)
        patch.setattr(torch.ops, "load_library", self.load)
        patch.setattr(build, "has_ops", lambda: self.loaded == GOOD)
        self.compiles(GOOD)

    @property
    def place(self) -> Path:
        return self.cache / f"{build.cache_key()}.so"

    def put(self, content: str) -> Path:
        self.cache.mkdir(parents=True)
        self.place.write_text(content)
        return self.place

    def put_prebuilt(self, content: str) -> Path:
        self.prebuilt.write_text(content)
        return self.prebuilt

    def compiler(self, body: str) -> None:
        said = f'echo compile >> "{self.folder}/events"; {body}'
        self.patch.setenv("CXX", str(script(self.folder / "cxx", said)))

    def compiles(self, content: str) -> None:
        self.compiler(f'printf "{content}" > "$out"')

    def load(self, path: str) -> None:
        where = "prebuilt" if Path(path) == self.prebuilt else "cached"
        with (self.folder / "events").open("a") as file:
            file.write(f"load {where}\n")
        self.loaded = Path(path).read_text()
        if self.loaded not in (GOOD, EMPTY):
            raise OSError(f"Could not load this library: {path}") from OSError("invalid ELF header")

    def events(self) -> str:
        """What was compiled and loaded, or tried, since this was asked last."""
        file = self.folder / "events"
        events = file.read_text().splitlines() if file.exists() else []
        file.write_text("")
        return ", ".join(events)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def without_home(world: World) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    world.patch.setattr(Path, "home", home)
    for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        world.patch.setenv(name, "")


def without_compiler(world: World) -> None:
    world.patch.setenv("CXX", "")
    world.patch.setenv("PATH", "")


def hanging(world: World) -> None:
    world.compiler("exec sleep 600")
    world.patch.setattr(build, "COMPILER_SECONDS", 0.5)


def cxx(body: str) -> Callable[[World], object]:
    return lambda world: world.compiler(body)


def failing_beside_a_bad_prebuilt(world: World) -> Path:
    world.compiler("exit 1")
    return world.put_prebuilt(BAD)


REBUILT = "load prebuilt, compile, load cached"
AGAIN = "load cached, load cached, compile, load cached"  # another process might have built
NOT_LOADED = "{at} does not load (invalid ELF header)"
# What is done, what the next process does about it, and its library's origin.
FOUND = {
    "nothing": (lambda _: None, "compile, load cached", "built in "),
    "a library": (lambda w: w.put(GOOD), "load cached", "cached"),
    "two": (lambda w: (w.put(GOOD), w.put_prebuilt(GOOD)), "load prebuilt", "prebuilt"),
    "no home": (lambda w: (w.put_prebuilt(GOOD), without_home(w)), "load prebuilt", "prebuilt"),
    "bad prebuilt": (lambda w: w.put_prebuilt(BAD), REBUILT, "built in "),
    "a bad library": (lambda w: w.put(BAD), AGAIN, "built in "),
    "one without the ops": (lambda w: w.put(EMPTY), AGAIN, "built in "),
}
# What is done, what the next process does about it, and why it has no library.
REFUSED = (
    (without_compiler, "", "no C++ compiler: any of c++, g++, clang++ is not on PATH"),
    (lambda w: w.patch.setenv("CXX", "nix -O3"), "", "compiler: nix, which CXX names, is not on"),
    (cxx("printf '\\377\\376' >&2; exit 3"), "compile", "the compiler failed (exit status 3)"),
    (cxx("exit 0"), "compile", "cxx wrote no library, although it ended well"),
    (failing_beside_a_bad_prebuilt, "load prebuilt, compile", f"{NOT_LOADED}; the compiler failed"),
    (hanging, "compile", "the compiler took more than 0.5 s"),
    (lambda w: w.compiles(BAD), "compile, load cached", "(invalid ELF header); try another comp"),
    (lambda w: w.compiles(EMPTY), "compile, load cached", "has not the ops of grpo_kernels_cpp"),
    (lambda w: (w.sources / "ops.cpp").unlink(), "", "its sources are not in"),
    (lambda w: w.cache.parent.write_text("a file"), "", "cannot be written"),
    (without_home, "", "home directory.); set TORCH_EXTENSIONS_DIR or HOME"),
    (lambda w: w.patch.setattr(sys, "platform", "win32"), "", "no Windows build"),
)


@pytest.mark.parametrize(("make", "events", "origin"), FOUND.values(), ids=FOUND)
def test_a_library_is_found_or_built(world, make, events, origin):
    make(world)
    library = build.find()
    assert world.events() == events
    assert origin in library.origin
    if origin == "prebuilt":
        assert library.path == world.prebuilt
        return
    assert library.path == world.place
    assert [*world.cache.iterdir()] == [world.place], "something was left"
    assert world.place.read_text() == GOOD
    assert build.find() == build.Library("cached", world.place), "by the process after that"


@pytest.mark.parametrize(("make", "events", "said"), REFUSED, ids=[x[2] for x in REFUSED])
def test_why_there_is_none(world, make, events, said):
    at = make(world)
    refusal = build.find().refusal
    assert said.format(at=at) in refusal
    assert "\n" not in refusal
    assert any(way in refusal for way in WAYS_OUT)
    assert world.events() == events
    assert not list(world.cache.glob("building*")), "something was left"


def fork(work: Callable[[], object]) -> ForkProcess:
    process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    process.start()
    return process


def test_many_processes_compile_once(world: World) -> None:
    world.compiler(f'sleep 0.5; printf "{GOOD}" > "$out"')
    processes = [fork(build.find) for _ in range(4)]
    for process in processes:
        process.join(300)
    assert sorted(world.events().split(", ")) == ["compile", *["load cached"] * 4]


def test_who_waits_for_a_lock_says_so_and_the_lock_ends_with_its_holder(world, capfd):
    begun = world.folder / "begun"
    world.compiler(f'touch "{begun}"; exec sleep 600')
    holder, end = fork(build.find), time.monotonic() + 120
    while not begun.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    capfd.readouterr()
    world.compiles(GOOD)
    threading.Timer(0.3, holder.kill).start()
    assert build.find().origin.startswith("built in ")
    holder.join()
    waiting, compiling = capfd.readouterr().err.splitlines()
    assert waiting.startswith("grpo_kernels: waiting for another process, which compiles the C++")
    assert compiling.startswith("grpo_kernels: compiling the C++ kernels")
    build.find()
    assert not capfd.readouterr().err, "now it is cached"


def test_file_system_without_locks(world: World) -> None:
    world.patch.setattr(fcntl, "flock", Mock(side_effect=OSError("No locks available")))
    assert build.find().origin.startswith("built in ")


@pytest.mark.slow
def test_fresh_cache_is_filled_once_and_serves_without_a_compiler(tmp_path: Path) -> None:
    strict = shlex.join([*build.compiler(), "-Wall", "-Wextra", "-Werror"])
    origin, path = lines(LOAD, TORCH_EXTENSIONS_DIR=tmp_path, CXX=strict)
    assert origin.startswith("built in ")
    assert Path(path).parent == tmp_path / "grpo_kernels"
    assert lines(LOAD, TORCH_EXTENSIONS_DIR=tmp_path, CXX="", PATH="") == ["cached", path]


def test_key_is_of_sources_flags_and_torch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [build.cache_key()]
    (world.sources / "notes.txt").write_text("no source")
    assert build.cache_key() == keys[0]
    (world.sources / "row.h").write_text("// 3")
    keys.append(build.cache_key())
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O3"))
    keys.append(build.cache_key())
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    keys.append(build.cache_key())
    assert len(set(keys)) == 4


@pytest.mark.parametrize(("torch_extensions", "xdg"), [("/a", "/b"), ("", "/b"), ("", "")])
def test_where_the_cache_is(monkeypatch, torch_extensions, xdg):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", torch_extensions)
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setenv("HOME", "/c")
    assert build.cache_folder() == Path(torch_extensions or xdg or "/c/.cache") / "grpo_kernels"


def test_torch_builds_nothing_and_auto_warns_once_and_goes_on_with_it(tmp_path: Path) -> None:
    failing = script(
        tmp_path / "cxx", f'cat >> "{tmp_path}/calls"; echo call >> "{tmp_path}/calls"; exit 1'
    )
    code, cache = LOSS.format(backends=["torch", "auto"]), tmp_path / "cache"
    printed = lines(code, tmp_path, TORCH_EXTENSIONS_DIR=cache, CXX=failing)
    torchs, (warned, logps, _) = map(json.loads, printed)
    assert torchs[::2] == [[], ["cxx"]], "what was said, and what lies there"
    for word in ("slower", "the compiler failed", "cpp_rows.build", "make wheel", '"torch"'):
        assert word in warned[0]
    assert len(warned) == 1
    assert (tmp_path / "calls").read_text() == "call\n"
    torch.testing.assert_close(torch.tensor(logps), torch.full((5,), 1 / 7).log())


def test_forced_backend_fails_loudly_and_a_report_warns_of_nothing(monkeypatch, forget_warnings):
    library = build.Library(refusal="no C++ compiler; install one")
    monkeypatch.setattr(build, "load", lambda: library)
    message = r"can serve here, got 'cpp': no C\+\+ compiler; install one"
    with pytest.raises(ValueError, match=message):
        backends.choose_backend("cpp", torch.device("cpu"))
    with warnings.catch_warnings(action="error"):
        said = report.collect()["backend"]
    assert said["cpu"] == "torch (not cpp: no C++ compiler; install one)"
    assert said["C++ library"] == "none"


def test_library_that_someone_else_loaded_is_taken() -> None:
    assert build.load().refusal is None
    assert build.load.__wrapped__() == build.Library("loaded before")


def test_command_says_where_or_why_not(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main([]) == 0
    assert Path(capsys.readouterr().out.strip()) == world.place
    assert build.main(["--into", str(world.folder / "here")]) == 0
    assert capsys.readouterr().out.strip() == str(world.folder / "here" / "grpo_kernels_cpp.so")
    world.compiler("exit 1")
    assert build.main(["--into", str(world.folder / "there")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "the compiler failed" in err


@pytest.mark.slow
def test_the_short_form_of_make_sanitize_finds_nothing() -> None:
    asked = [*build.compiler(), "-print-file-name=libasan.so"]
    if not Path(subprocess.run(asked, capture_output=True, text=True).stdout.strip()).is_absolute():
        pytest.skip("needs GCC and its AddressSanitizer")
    command = [sys.executable, "-m", "tests.sanitize", "--quick"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "reads and writes too far, and unaligned ones, are seen" in done.stdout
    assert "0 of 1 runs failed" in done.stdout
