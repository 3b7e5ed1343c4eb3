"""How the C++ library is found, built, cached, loaded, and done without."""

from __future__ import annotations

import logging
import re
import shlex
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from grpo_kernels import backends, report
from grpo_kernels.backends.cpp_rows import build, compiler
from grpo_kernels.base import checks
from tests.support.acted_build import GOOD, World, lines, losses, script

CPU = torch.device("cpu")
LOAD = """
from grpo_kernels.backends.cpp_rows.build import load
print(load().origin, load().path, sep="\\n")
"""


@pytest.mark.slow
def test_fresh_cache_is_filled_once_and_serves_without_a_compiler(tmp_path):
    strict = shlex.join([*compiler.compiler(), "-Wall", "-Wextra", "-Werror"])
    origin, path = lines(LOAD, TORCH_EXTENSIONS_DIR=tmp_path, CXX=strict)
    assert origin.startswith("built in ")
    assert Path(path).parents[1] == tmp_path / "grpo_kernels"
    for folder in (Path(path).parent, Path(path).parents[1]):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert lines(LOAD, TORCH_EXTENSIONS_DIR=tmp_path, CXX="", PATH="") == ["cached", path]


def test_key_is_of_sources_flags_and_torch(world, monkeypatch):
    keys = [build.cache_key(world.sources)]
    (world.sources / "notes.txt").write_text("no source")
    assert build.cache_key(world.sources) == keys[0]
    (world.sources / "row.h").write_text("// 3")
    keys.append(build.cache_key(world.sources))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O3"))
    keys.append(build.cache_key(world.sources))
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    keys.append(build.cache_key(world.sources))
    assert len(set(keys)) == 4


@pytest.mark.parametrize(
    ("torch_extensions", "xdg", "expected"),
    [
        ("/a", "/b", "/a/grpo_kernels"),
        ("", "/b", "/b/grpo_kernels"),
        ("", "", "/home/c/.cache/grpo_kernels"),
    ],
)
def test_where_the_cache_is(monkeypatch, torch_extensions, xdg, expected):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", torch_extensions)
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setenv("HOME", "/home/c")
    assert build.cache_folder() == Path(expected)


def test_the_log_says_that_it_is_compiled_and_for_debugging_how(world, caplog):
    with caplog.at_level(logging.INFO, "grpo_kernels"):
        world.find()
        world.find()  # now it is cached, and nothing is said
    begins, ends = [record.getMessage() for record in caplog.records]
    assert (
        begins
        == f"compiling the C++ kernels with {world.folder / 'cxx'}; once, unless torch or the sources change"
    )
    assert re.fullmatch(r"compiled the C\+\+ kernels in \d+\.\d s", ends)

    caplog.clear()
    (world.sources / "ops.cpp").write_text("// new")
    world.compiler("echo first words >&2; echo last words >&2; exit 3")
    with caplog.at_level(logging.DEBUG, "grpo_kernels"):
        world.find()
    begins, command, said = [record.getMessage() for record in caplog.records]
    assert command.startswith(f"the command: {world.folder / 'cxx'} -std=c++17 ")
    assert said == "the compiler said:\nfirst words\nlast words"


def test_torch_builds_nothing_and_auto_warns_once_and_goes_on_with_it(tmp_path):
    failing = script(
        tmp_path / "cxx", f'echo call >> "{tmp_path}/calls"; echo no such luck >&2; exit 1'
    )
    torchs, autos = losses(["torch", "auto"], tmp_path, failing)
    assert torchs[0] == []
    assert torchs[2] == ["cxx"], "what lies there"
    (warned,), logps, _ = autos
    for word in (
        "slower",
        "the compiler failed",
        "backends.cpp_rows.build",
        "make wheel",
        'backend="torch"',
    ):
        assert word in warned
    assert (tmp_path / "calls").read_text() == "call\n"
    torch.testing.assert_close(torch.tensor(logps), torch.full((5,), 1 / 7).log())


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process whose library cannot be had."""
    monkeypatch.setattr(
        build, "load", lambda: build.Library(refusal="no C++ compiler; install one")
    )
    checks.warn_once.cache_clear()
    yield
    checks.warn_once.cache_clear()


def test_forced_backend_fails_loudly(refused):
    with pytest.raises(
        ValueError, match="can serve here, got 'cpp': no C\\+\\+ compiler; install one"
    ):
        backends.choose_backend("cpp", CPU)
    with pytest.raises(ValueError, match="it serves CPU tensors, and these are meta tensors"):
        backends.choose_backend("cpp", torch.device("meta"))


def test_warning_of_the_cache_comes_once_and_is_in_the_report(monkeypatch, cpp_library):
    monkeypatch.setattr(
        build, "load", lambda: build.Library("built", warning="not safe; remove it")
    )
    checks.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("cpp", "auto"):
            assert backends.choose_backend(name, CPU)[0].name == "cpp"
    assert [str(x.message) for x in caught] == ["grpo_kernels: not safe; remove it"]
    checks.warn_once.cache_clear()
    assert report.collect()["backend"]["C++ library"].endswith(", built; not safe; remove it")


def test_report_of_a_refusal_warns_of_nothing(refused):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = report.collect()["backend"]
    assert said["cpu"] == "torch (not cpp: no C++ compiler; install one)"
    assert said["C++ library"] == "none"


def test_library_that_someone_else_loaded_is_taken():
    assert build.load().refusal is None
    assert build._load_once.__wrapped__() == build.Library("loaded before")


def test_report_of_the_library():
    said = report.collect()["backend"]
    assert said["cpu"] == f"cpp (CPU tensors; library {build.load().origin})"
    assert said["C++ library"] == f"{torch.ops.grpo_kernels_cpp.isa('')}, {build.load().path}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_auto_takes_it_for_cpu_tensors_only(dtype):
    assert backends.choose_backend("auto", CPU, dtype)[0].name == "cpp"
    assert backends.choose_backend("cpp", CPU, dtype)[1] == "asked for"
    assert backends.choose_backend("auto", torch.device("meta"), dtype)[0].name == "torch"


def test_command_says_where_or_why_not(world, capsys):
    world.patch.setattr(build, "source_folder", lambda: world.sources)
    assert build.main([]) == 0
    assert Path(capsys.readouterr().out.strip()).parents[2] == world.cache
    assert build.main(["--into", str(world.folder / "here")]) == 0
    assert capsys.readouterr().out.strip() == str(world.folder / "here" / "grpo_kernels_cpp.so")
    world.compiler("exit 1")
    assert build.main(["--into", str(world.folder / "there")]) == 1
    assert "the compiler failed" in capsys.readouterr().err
    world.cache.chmod(0o777)
    world.compiles(GOOD)
    assert build.main([]) == 1, "it was for that process alone"
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{world.cache} is not yours alone (drwxrwxrwx" in err


@pytest.mark.parametrize("slow", [True, False])
def test_a_compiler_that_takes_long_is_told_of_in_one_line(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], slow: bool
) -> None:
    monkeypatch.setattr(compiler, "SILENT_SECONDS", 0.05 if slow else 60.0)
    world.compiler(f'{"sleep 0.5; " if slow else ""}printf "{GOOD}" > "$out"')
    world.find()
    line = "grpo_kernels: compiling the C++ kernels for the CPU, up to half a minute; once, then they are cached\n"
    assert capfd.readouterr().err == (line if slow else "")
