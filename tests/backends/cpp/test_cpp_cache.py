"""The C++ library's cache: what is loaded from it, and what is not."""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import shlex
import stat
import subprocess
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels.backends.cpp_rows import build, cache, compiler
from tests.support.acted_build import EMPTY, GOOD, GOOD_NAME, LOSS, World, at_most, lines, script, start

NOBODY = 65534
ANY_NAME = "0123456789abcdef.so"


def give_away(world: World, path: Path) -> None:
    """To another user; as only root can do that, others act it."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
        return
    check = cache._check

    def acted(each: Path, found: os.stat_result, *, ours: bool) -> None:
        fields = list(found)
        fields[stat.ST_UID] = NOBODY if each == path else found.st_uid
        check(each, os.stat_result(fields), ours=ours)

    world.patch.setattr(cache, "_check", acted)


def replace_by_link(world: World, path: Path) -> None:
    path.symlink_to(path.rename(world.folder / "elsewhere"))


def mode(bits: int) -> Callable[[World, Path], None]:
    return lambda _, path: path.chmod(bits)


FILES = {
    "another user's": (give_away, f"-rwx------, user {NOBODY}"),
    "the group can write": (mode(0o720), "-rwx-w----, user"),
    "all can write": (mode(0o702), "-rwx----w-, user"),
    "a link": (replace_by_link, "lrwxrwxrwx, user"),
}


@pytest.mark.parametrize(("spoil", "expected"), FILES.values(), ids=FILES)
def test_file_that_others_could_have_written_is_not_loaded_but_built_again(world, spoil, expected):
    path = world.find().path
    spoil(world, path)
    world.compiler(f'printf "{GOOD}" > "$out"; touch "{world.folder}/compiled"')
    world.patch.setattr(
        torch.ops, "load_library", lambda _: world.attempts.append((world.folder / "compiled").exists())
    )
    found = world.find()
    assert world.attempts == [path, True], "loaded before it was built again"
    assert (found.path, found.origin[:9]) == (path, "built in ")
    assert f"{path} is not yours alone ({expected}" in found.warning
    assert "remove it or set TORCH_EXTENSIONS_DIR" in found.warning
    assert stat.S_ISREG(path.lstat().st_mode)
    if os.geteuid() == 0 or spoil is not give_away:  # else it is still acted that it is another's
        assert world.find() == build.Library("cached", path)


FOLDERS = {
    "another user's": (2, give_away, f"drwx------, user {NOBODY}"),
    "the one of the key, all can write": (1, mode(0o777), "drwxrwxrwx, user"),
    "sticky, but ours": (2, mode(0o1777), "drwxrwxrwt, user"),
    "the group can write": (2, mode(0o770), "drwxrwx---, user"),
    "a link": (2, replace_by_link, "lrwxrwxrwx, user"),
    "the key's is a link": (1, replace_by_link, "lrwxrwxrwx, user"),
    "others can write above": (3, mode(0o777), "drwxrwxrwx, user"),
    "another user's above": (3, give_away, f"drwx------, user {NOBODY}"),
    "others can write far above": (4, mode(0o757), "drwxr-xrwx, user"),
}


@pytest.mark.parametrize(("up", "spoil", "expected"), FOLDERS.values(), ids=FOLDERS)
def test_folder_that_others_can_write_is_left_alone(world, up, spoil, expected, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("temporary")
    world.patch.setattr(tempfile, "tempdir", str(elsewhere))
    path = world.find().path
    folder = [path, *path.parents][up]
    spoil(world, folder)
    before = sorted(world.cache.rglob("*"))
    found = world.find()
    assert path not in world.attempts[1:]
    assert elsewhere in world.attempts[-1].parents
    assert list(elsewhere.iterdir()) == [], "something was left"
    assert sorted(world.cache.rglob("*")) == before
    assert found.path is None
    assert found.origin.endswith("s for this process alone")
    assert f"{folder} is not yours alone ({expected}" in found.warning
    fix = f"chmod go-w {folder}" if up > 2 else "remove it"
    assert f"{fix} or set TORCH_EXTENSIONS_DIR to a folder that only you can write; until then" in found.warning


def test_nothing_is_made_where_others_can_write(world):
    world.cache.mkdir()
    world.cache.chmod(0o777)
    world.find()
    assert list(world.cache.iterdir()) == []
    world.temporary.chmod(0o777)
    said = world.refusal()
    for place in (world.cache, world.temporary):
        assert f"{place} is not yours alone (drwxrwxrwx, user" in said
    assert list(world.temporary.iterdir()) == []


def test_sticky_folders_links_above_and_a_group_of_ones_own_are_safe(world, monkeypatch):
    (world.folder / "real").mkdir()
    world.cache.symlink_to(world.folder / "real")
    (world.folder / "real").chmod(0o1777)
    found = world.find()
    assert (found.warning, found.path.parents[2]) == (None, world.folder / "real")
    user = pwd.getpwuid(os.geteuid())
    own = grp.struct_group((user.pw_name, "x", user.pw_gid, []))
    (world.folder / "real").chmod(0o770)
    os.chown(world.folder / "real", -1, user.pw_gid)
    for members, name, safe in (([], own.gr_name, True), (["eve"], own.gr_name, False), ([], "staff", False)):
        monkeypatch.setattr(grp, "getgrgid", lambda _, x=(name, "x", own.gr_gid, members): grp.struct_group(x))
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
    assert world.find() == build.Library("cached", path)


OTHERS = {
    "a dangling link": lambda path: path.symlink_to("/no/such/place"),
    "a loop": lambda path: path.symlink_to(path),
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a pipe": lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe")),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((kind, ANY_NAME) for kind in OTHERS), *((kind, GOOD_NAME) for kind in OTHERS if kind != "a folder")],
)
def test_other_entries_do_not_matter(world, kind, name):
    folder = world.version_folder()
    OTHERS[kind](folder / name)
    with at_most(20):
        found = world.find()
        assert found.origin.startswith("built in ")
        assert (found.path, world.find().origin) == (folder / GOOD_NAME, "cached")
        assert (found.warning is not None) == ("link" in kind or "loop" in kind)


def test_library_without_the_ops_is_passed_by(world):
    folder = world.version_folder()
    empty = folder / f"{hashlib.sha256(EMPTY.encode()).hexdigest()[:16]}.so"
    empty.write_text(EMPTY)
    empty.chmod(0o600)
    found = world.find()
    assert world.attempts == [empty, empty, folder / GOOD_NAME]
    assert f"{empty} has none of the ops stats, diverge, grad, fused, isa" in found.warning
    world.compiler(f'printf "{EMPTY}" > "$out"')
    (world.sources / "row.h").write_text("// new")
    assert "has none of the ops" in world.refusal()


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
    with pytest.raises(build.Unavailable, match=r"^a file: expected the ops .*; remove it and start again") as caught:
        build.has_ops("a file")
    assert found in str(caught.value)
    refused = build._load_once.__wrapped__()  # no other is loaded beside it, which would end the process
    assert refused.refusal.startswith("the library that was loaded before: expected the ops ")
    library._destroy()


def test_ops_of_the_real_library(cpp_library):
    assert build.has_ops("it")


def test_noexec_cache_is_said_to_be_so_and_not_built_in(world):
    flags = os.statvfs(world.folder).f_flag
    world.patch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flags | os.ST_NOEXEC))
    world.compiler(f'touch "{world.folder}/compiled"; exit 1')
    assert f"{world.version_folder()} is mounted noexec; set TORCH_EXTENSIONS_DIR elsewhere" in world.refusal()
    assert not (world.folder / "compiled").exists()


def test_command_says_that_there_is_no_place(world, capsys):
    world.patch.setattr(build, "source_folder", lambda: world.sources)
    world.cache.mkdir()
    world.cache.chmod(0o777)
    assert build.main([]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{world.cache} is not yours alone (drwxrwxrwx" in err


def test_planted_library_does_not_run(tmp_path, cpp_library):
    """The real loader: a constructor in a library of the right name, where all can write."""
    source = f'#include <stdio.h>\n__attribute__((constructor)) void run() {{ fopen("{tmp_path}/ran", "w"); }}'
    (tmp_path / "planted.cpp").write_text(source)
    folder = tmp_path / "cache" / "grpo_kernels" / build.cache_key(build.source_folder())
    cache.own_folder(folder, made=2)
    planted = folder / "planted.so"
    command = [*compiler.compiler(), "-shared", "-fPIC", str(tmp_path / "planted.cpp"), "-o", str(planted)]
    subprocess.run(command, check=True)
    planted.rename(folder / f"{hashlib.sha256(planted.read_bytes()).hexdigest()[:16]}.so")
    folder.chmod(0o777)
    copier = script(tmp_path / "cxx", f'cp {shlex.quote(str(build.load().path))} "$out"')
    process = start(LOSS.format(backend="auto"), TORCH_EXTENSIONS_DIR=tmp_path / "cache", CXX=copier)
    (warned,), logps = json.loads(lines(process)[-1])
    assert f"{folder} is not yours alone (drwxrwxrwx" in warned
    torch.testing.assert_close(torch.tensor(logps), torch.full((5,), 1 / 7).log())
    assert not (tmp_path / "ran").exists()
