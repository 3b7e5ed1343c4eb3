"""The C++ library's cache: what may lie where the library is sought, and what a process that needs it then does."""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels.backends.cpp_rows import build, cache, compiler
from tests.support.acted_build import BAD, EMPTY, GOOD, World, at_most, losses, name_of, script

WAYS_OUT = (
    "CXX",
    "make wheel",
    "upgrade torch",
    "install grpo_kernels again",
    "WSL",
    "TORCH_EXTENSIONS_DIR",
)
BUILT, ALONE = "built in ", "s for this process alone"
Row = tuple[Callable[[World], object], str, str, tuple[str, ...]]


def give_away(world: World, path: Path) -> None:
    """It looks as if it were another user's; only root could really give it away."""
    check, inode = cache._check, path.lstat().st_ino

    def acted(each: Path, status: os.stat_result, *, ours: bool) -> None:
        fields = list(status)
        fields[stat.ST_UID] = 65534 if status.st_ino == inode else status.st_uid
        check(each, os.stat_result(fields), ours=ours)

    world.patch.setattr(cache, "_check", acted)


def replace_by_link(world: World, path: Path) -> None:
    path.symlink_to(path.rename(world.home / "elsewhere"))


def mode(bits: int) -> Callable[[World, Path], None]:
    return lambda _, path: path.chmod(bits)


# Which part of the path of a built library, what is done to it, and what is said of it.
UNTRUSTED = {
    "another user's file": (0, give_away, "-rwx------, user 65534"),
    "the group can write the file": (0, mode(0o720), "-rwx-w----, user"),
    "all can write the file": (0, mode(0o702), "-rwx----w-, user"),
    "the file is a link": (0, replace_by_link, "lrwxrwxrwx, user"),
    "all can write the key's folder": (1, mode(0o777), "drwxrwxrwx, user"),
    "the key's folder is a link": (1, replace_by_link, "lrwxrwxrwx, user"),
    "another user's folder": (2, give_away, "drwx------, user 65534"),
    "sticky, but ours": (2, mode(0o1777), "drwxrwxrwt, user"),
    "the group can write the folder": (2, mode(0o770), "drwxrwx---, user"),
    "the folder is a link": (2, replace_by_link, "lrwxrwxrwx, user"),
    "others can write above": (3, mode(0o777), "drwxrwxrwx, user"),
    "another user's above": (3, give_away, "drwx------, user 65534"),
    "others can write far above": (4, mode(0o757), "drwxr-xrwx, user"),
}
# What has the name of a library and is none.
ENTRIES: dict[str, Callable[[Path], object]] = {
    "a dangling link": lambda path: path.symlink_to("/no/such/place"),
    "a loop of a link": lambda path: path.symlink_to(path),
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a pipe": lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe")),
}


def untrusted(part: int, spoil: Callable[[World, Path], None], status: str) -> Row:
    def make(world: World) -> Path:
        path = world.put(GOOD)
        at = [path, *path.parents][part]
        spoil(world, at)
        return at

    fix = "chmod go-w {at}" if part > 2 else "remove it"
    fix += " or set TORCH_EXTENSIONS_DIR to a folder that only you can write"
    said = f"{{at}} is not yours alone ({status}"
    if part == 0:
        return make, "compile, load cached", BUILT, (said, fix)
    return make, "compile, load private", ALONE, (said, f"{fix}; until then")


def entry(kind: str, name: str) -> Row:
    def make(world: World) -> Path:
        path = world.version_folder() / name
        ENTRIES[kind](path)
        return path

    return (
        make,
        "compile, load cached",
        BUILT,
        ("{at} is not yours alone (l",) if "link" in kind else (),
    )


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
    world.patch.setattr(compiler, "COMPILER_SECONDS", 0.5)


def noexec(world: World) -> Path:
    flags = os.statvfs(world.folder).f_flag
    world.patch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flags | os.ST_NOEXEC))
    return world.version_folder()


def cxx(body: str) -> Callable[[World], object]:
    """A compiler that does that."""
    return lambda world: world.compiler(body)


def nothing_compiles_beside_a_bad_prebuilt(world: World) -> Path:
    world.compiler("exit 1")
    return world.put_prebuilt(BAD)


def all_is_bad(world: World) -> Path:
    world.compiles(BAD)
    return world.put(BAD)


AGAIN = "load cached, load cached, compile, load cached"  # tried twice: another process might have built meanwhile
NOT_LOADED = "{at} does not load (invalid ELF header)"
# What is done, what the next process does about it, its library's origin, and what it warns of.
LIBRARIES = {
    "nothing": (lambda _: None, "compile, load cached", BUILT, ()),
    "a library": (lambda w: w.put(GOOD), "load cached", "cached", ()),
    "two": (lambda w: (w.put(GOOD), w.put_prebuilt(GOOD)), "load prebuilt", "prebuilt", ()),
    "a prebuilt, no home": (
        lambda w: (w.put_prebuilt(GOOD), without_home(w)),
        "load prebuilt",
        "prebuilt",
        (),
    ),
    "a bad prebuilt": (
        lambda w: w.put_prebuilt(BAD),
        "load prebuilt, compile, load cached",
        BUILT,
        (NOT_LOADED,),
    ),
    "a truncated library": (
        lambda w: w.put(GOOD).write_text(GOOD[:4]),
        "compile, load cached",
        BUILT,
        (),
    ),
    "a bad library": (
        lambda w: w.put(BAD),
        AGAIN,
        BUILT,
        (f"the C++ library was compiled again: {NOT_LOADED}",),
    ),
    "one without the ops": (
        lambda w: w.put(EMPTY),
        AGAIN,
        BUILT,
        (f"{{at}} has none of the ops {', '.join(build.OPS)}",),
    ),
}
# What is done, what the next process does about it, and why it has no library.
REFUSED = (
    (without_compiler, "", "no C++ compiler: any of c++, g++, clang++ is not on PATH"),
    (
        lambda w: w.patch.setenv("CXX", "nix -O3"),
        "",
        "no C++ compiler: nix, which CXX names, is not on PATH",
    ),
    (
        lambda w: w.patch.setenv("CXX", 'g++ "'),
        "",
        "expected a command in CXX, got 'g++ \"' (No closing quotation)",
    ),
    (cxx("echo last words >&2; exit 3"), "compile", "the compiler failed (exit status 3)"),
    (cxx("printf '\\377\\376' >&2; exit 1"), "compile", "the compiler failed (exit status 1)"),
    (cxx("exit 0"), "compile", "cxx wrote no library, although it ended well"),
    (
        nothing_compiles_beside_a_bad_prebuilt,
        "load prebuilt, compile",
        f"{NOT_LOADED}; the compiler failed",
    ),
    (hanging, "compile", "the compiler took more than 0.5 s"),
    (
        lambda w: w.compiles(BAD),
        "compile, load cached",
        "does not load (invalid ELF header); try another compiler",
    ),
    (all_is_bad, AGAIN, f"{NOT_LOADED}; try another compiler"),
    (lambda w: w.compiles(EMPTY), "compile, load cached", "has none of the ops stats, "),
    (lambda w: (w.sources / "ops.cpp").unlink(), "", "its sources are not in"),
    (lambda w: w.cache.write_text("a file"), "", "cannot be written"),
    (noexec, "", "{at} is mounted noexec; set TORCH_EXTENSIONS_DIR elsewhere"),
    (without_home, "", "home directory.); set TORCH_EXTENSIONS_DIR or HOME"),
    (lambda w: w.patch.setattr(sys, "platform", "win32"), "", "no Windows build"),
    (
        lambda w: w.patch.setattr(torch, "__version__", "2.10.1+cu"),
        "",
        "torch 2.10.1+cu is older than 2.11",
    ),
)
ROWS: dict[str, Row] = {
    **{name: untrusted(*row) for name, row in UNTRUSTED.items()},
    **{f"{kind} of any name": entry(kind, "0123456789abcdef.so") for kind in ENTRIES},
    **{
        f"{kind} of the right name": entry(kind, name_of(GOOD))
        for kind in ENTRIES
        if kind != "a folder"
    },
    **LIBRARIES,
    **{said: (make, events, "", (said,)) for make, events, said in REFUSED},
}


@pytest.mark.parametrize(("make", "events", "origin", "warned"), ROWS.values(), ids=ROWS)
def test_what_lies_there(
    world: World, make: Callable[[World], object], events: str, origin: str, warned: tuple[str, ...]
) -> None:
    at = make(world)
    before = sorted(world.cache.rglob("*"))
    with at_most(120):
        library = world.find()
    assert world.events() == events
    said = library.warning if origin else library.refusal
    assert (said is None) == (warned == ()), said
    for words in warned:
        assert words.format(at=at) in said
    assert list(world.temporary.iterdir()) == [], "something was left"
    assert not list(world.cache.glob(f"*/*/{build.WORK}*")), "something was left"
    if origin == "":
        assert "\n" not in said
        assert any(way in said for way in WAYS_OUT)
        assert "cached" in events or list(world.cache.glob("*/*/*")) == []
        return
    assert origin in library.origin
    if origin == ALONE:
        assert library.path is None
        assert sorted(world.cache.rglob("*")) == before
    elif origin == "prebuilt":
        assert library.path == world.prebuilt
    else:
        assert library.path == world.version_folder() / name_of(GOOD)
        assert stat.S_ISREG(library.path.lstat().st_mode)
        assert library.path.read_text() == GOOD
        assert world.find() == build.Library("cached", library.path), "by the process after that"


def test_nothing_is_made_where_others_can_write(world):
    world.cache.mkdir()
    world.cache.chmod(0o777)
    world.find()
    assert list(world.cache.iterdir()) == []
    world.temporary.chmod(0o777)
    said = world.find().refusal
    for place in (world.cache, world.temporary):
        assert f"{place} is not yours alone (drwxrwxrwx, user" in said
    assert list(world.temporary.iterdir()) == []


def test_sticky_folders_links_above_and_a_group_of_ones_own_are_safe(world, monkeypatch):
    real = world.folder / "real"
    real.mkdir()
    world.cache.symlink_to(real)
    real.chmod(0o1777)
    found = world.find()
    assert (found.warning, found.path.parents[2]) == (None, real)
    user = pwd.getpwuid(os.geteuid())
    own = grp.struct_group((user.pw_name, "x", user.pw_gid, []))
    real.chmod(0o770)
    os.chown(real, -1, user.pw_gid)
    for members, name, safe in (
        ([], own.gr_name, True),
        (["eve"], own.gr_name, False),
        ([], "staff", False),
    ):
        monkeypatch.setattr(
            grp, "getgrgid", lambda _, x=(name, "x", own.gr_gid, members): grp.struct_group(x)
        )
        assert (world.find().origin == "cached") == safe


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_what_is_made_is_ours_alone_whatever_the_umask(world, umask):
    before = os.umask(umask)
    try:
        path = world.find().path
    finally:
        os.umask(before)
    assert not path.stat().st_mode & 0o022
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in path.parents[:3]} == {0o700}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, None),
        ({"grad": None}, "got {'stats': 3, 'fused': 2, 'isa': 1}"),
        ({"grad": "(Tensor x, Tensor y) -> ()"}, "'grad': 2"),
        ({"isa": "without a kernel"}, "'fused': 2}"),
    ],
    ids=["all", "one is missing", "another form", "no kernel"],
)
def test_ops_are_checked(monkeypatch, change, found):
    """In a namespace of its own, since the real one may have the real ops."""
    name = f"grpo_kernels_try_{uuid.uuid4().hex}"
    monkeypatch.setattr(build, "NAME", name)
    monkeypatch.setattr(build, "OPS", {"stats": 3, "grad": 1, "fused": 2, "isa": 1})
    assert not build.has_ops("a file")
    library = torch.library.Library(name, "DEF")
    for op, count in build.OPS.items():
        form = change.get(op, "whole")
        if form is not None:
            whole = f"({', '.join(f'Tensor x{i}' for i in range(count))}) -> ()"
            library.define(op + (form if form.startswith("(") else whole))
            if form != "without a kernel":
                library.impl(op, lambda *_: None, "CPU")
    if found is None:
        assert build.has_ops("a file")
        return
    with pytest.raises(
        build.Unavailable, match=r"^a file: expected the ops .*; remove it and start again"
    ) as caught:
        build.has_ops("a file")
    assert found in str(caught.value)
    refused = (
        build._load_once.__wrapped__()
    )  # no other is loaded beside it, which would end the process
    assert refused.refusal.startswith("the library that was loaded before: expected the ops ")
    library._destroy()


def test_planted_library_does_not_run(tmp_path, cpp_library):
    """The real loader: a constructor in a library of the right name, where all can write."""
    source = f'#include <stdio.h>\n__attribute__((constructor)) void run() {{ fopen("{tmp_path}/ran", "w"); }}'
    (tmp_path / "planted.cpp").write_text(source)
    folder = tmp_path / "cache" / "grpo_kernels" / build.cache_key(build.source_folder())
    cache.own_folder(folder, made=2)
    planted = folder / "planted.so"
    command = [
        *compiler.compiler(),
        "-shared",
        "-fPIC",
        str(tmp_path / "planted.cpp"),
        "-o",
        str(planted),
    ]
    subprocess.run(command, check=True)
    planted.rename(folder / f"{cache.digest(planted)}.so")
    folder.chmod(0o777)
    copier = script(tmp_path / "cxx", f'cp {shlex.quote(str(build.load().path))} "$out"')
    (((warned,), logps, _),) = losses(["auto"], tmp_path, copier)
    assert f"{folder} is not yours alone (drwxrwxrwx" in warned
    torch.testing.assert_close(torch.tensor(logps), torch.full((5,), 1 / 7).log())
    assert not (tmp_path / "ran").exists()
