"""Where built libraries are kept: which files may be loaded, and one build at a time.

What is loaded runs, so nobody but its user (or root) may have been able to write it. Three things are asked:

- the folders that we make, and the files in them, belong to us or to root, and neither group nor others can write them;
- no folder above them, whose links were followed first, lets another user put something else in their place;
- no link is followed from there on.

A folder that passes stays as it is, since only we can change it: what was checked is what is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl
    import grp
    import pwd

PREFIX = "grpo_kernels-build-"
LEFT_AFTER = 3600.0  # seconds, after which nobody is still building in a folder


class Untrusted(Exception):
    """What another user could have written, and the way to fix that."""


def check_folder(folder: Path, *, made: int) -> None:
    """Refuse a folder in which, or in whose place, another user could put something.

    Args:
        folder: as `os.path.realpath` gives it, but for its last `made` names, which are ours alone. What is not there
            yet passes.

    Raises:
        Untrusted: the first of them that is not safe, from the top.
    """
    for depth, each in reversed(list(enumerate((folder, *folder.parents)))):
        with contextlib.suppress(FileNotFoundError):
            _check(each, each.lstat(), ours=depth < made)


def make_folder(folder: Path) -> None:
    """`folder` and those above it that are missing, for us alone, whatever the umask."""
    for each in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        with contextlib.suppress(FileExistsError):  # another process was faster, or a link that `check_folder` refuses
            each.mkdir(mode=0o700)


def libraries(folder: Path, troubles: list[str]) -> Iterator[Path]:
    """The complete ones in `folder`, each named by its own digest. Why others are not safe goes to `troubles`."""
    for path in sorted(folder.glob("*.so")):
        try:
            if digest(path) == path.stem:
                yield path
        except Untrusted as why:
            if str(why) not in troubles:
                troubles.append(str(why))
        except OSError:  # a folder, a dangling link, a socket, or not readable: none of our libraries
            continue


def digest(path: Path) -> str:
    """Of the regular file `path` that nobody else can have written; empty for what is no regular file.

    Raises:
        Untrusted: it is a link, or others could have written it.
        OSError: it cannot be read.
    """
    if path.is_symlink() and path.exists():
        _check(path, path.lstat(), ours=True)
    with open(path, "rb", opener=_open_itself) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            return ""
        _check(path, found, ours=True)
        return hashlib.sha256(file.read()).hexdigest()[:16]


def _open_itself(path: str, flags: int) -> int:
    """Neither what a link points to, nor waiting for the other end of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _check(path: Path, found: os.stat_result, *, ours: bool) -> None:
    """Raise `Untrusted` if another user can change `path`, which is ours alone or a folder above."""
    owners = {0, os.geteuid()}
    writers = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not ours:
        owners.add(os.lstat("/").st_uid)  # root, as a user namespace without root shows it
        if found.st_mode & stat.S_ISVTX or (writers == stat.S_IWGRP and _is_own_group(found.st_gid)):
            writers = 0
    fixes = ["remove it" if ours else f"chmod go-w {path}", "set TORCH_EXTENSIONS_DIR to a folder only you can write"]
    if stat.S_ISLNK(found.st_mode):
        problem = "is a link"
    elif found.st_uid not in owners:
        problem = f"belongs to another user ({found.st_uid})"
        fixes = fixes if ours else fixes[1:]
    elif writers:
        problem = f"can be written by others (mode {stat.S_IMODE(found.st_mode):04o})"
    else:
        return
    raise Untrusted(f"{path} {problem}, so what is loaded from there could be anyone's; {' or '.join(fixes)}")


def _is_own_group(group: int) -> bool:
    """Whether `group` is this user's own, of the same name and with nobody else in it, as many systems make them."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Have the lock `path`, so that one process builds and the others find what it built; or go on after `seconds`.

    A record lock: it ends with its holder, however that ends, and a fork does not inherit it. Only work is saved by it,
    never correctness; so one that is stuck, or a file system that has no locks, is passed by.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError:
        descriptor = -1
    try:
        end = time.monotonic() + seconds
        while descriptor >= 0 and _is_held(descriptor) and time.monotonic() < end:
            time.sleep(0.05)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _is_held(descriptor: int) -> bool:
    """By another process; if not, it is ours from now on, where there are locks."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    return False


@contextlib.contextmanager
def work_folder(within: Path) -> Iterator[Path]:
    """A new folder for us alone, removed at the end; also those that a process left which was killed.

    Not `TemporaryDirectory`, which a process forked meanwhile would remove at its own end.
    """
    for left in within.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = left.lstat()
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > LEFT_AFTER:
                shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=within))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
