"""The cache of built libraries: the checks before one is loaded, and the lock of the one builder.

Loading a library runs it. So the folders that we make, and the files in them, must belong to us or to root, and nobody
else may be able to write them. No folder above them, links followed, may let another user replace them. Only we can
change a folder that passes: what was checked is what is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from grpo_kernels.backends.cpp_rows.compiler import Unavailable

if sys.platform != "win32":
    import fcntl
    import grp
    import pwd

LOCK_SECONDS = 120.0  # of waiting for another process's build, which takes about 6


class Untrusted(Unavailable):
    """Error: another user could have written a file or folder; it names that, and the way to fix it."""


def own_folder(folder: Path, *, made: int) -> None:
    """Make `folder` and the missing ones above it, for us alone whatever the umask, and check each from the top.

    Args:
        folder: a path without links. Its last `made` folders must be ours alone, and a link there is refused.

    Raises:
        Untrusted: another user could put something in one of them, or in its place. Nothing is made below it.
    """
    for depth, each in reversed([*enumerate((folder, *folder.parents))]):
        if not os.path.lexists(each):
            with contextlib.suppress(FileExistsError):  # another process was faster
                each.mkdir(mode=0o700)
        _check(each, each.lstat(), ours=depth < made)


def libraries(folder: Path, troubles: list[str]) -> Iterator[Path]:
    """Yield the complete libraries in `folder`, each named by its digest; `troubles` gets why others are not safe."""
    for path in sorted(folder.glob("*.so")):
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISLNK(status.st_mode):
                continue
            _check(path, status, ours=True)
            if digest(path) == path.stem:
                yield path
        except Untrusted as why:
            troubles.append(str(why))
        except OSError:  # it cannot be read, or is gone
            continue


def digest(path: Path) -> str:
    """Return a digest of the content of `path`: 16 hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@contextlib.contextmanager
def one_builder(folder: Path) -> Iterator[None]:
    """Lock `folder` itself, so that one process builds in it and the others find the result.

    The lock ends with its holder and leaves no file. It saves work and nothing else: after `LOCK_SECONDS`, or on a file
    system without locks, the process goes on without it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    end = time.monotonic() + LOCK_SECONDS
    try:
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # no locks here
                break
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(
                descriptor, fcntl.LOCK_UN
            )  # closing would not do: a process forked meanwhile has it open too
        os.close(descriptor)


def _check(path: Path, status: os.stat_result, *, ours: bool) -> None:
    """Raise `Untrusted` if another user can change `path`, which is ours alone or a folder above."""
    owners = {0, os.geteuid()}
    writers = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not ours:
        owners.add(os.lstat("/").st_uid)  # root, as a user namespace without root shows it
        if status.st_mode & stat.S_ISVTX or (
            writers == stat.S_IWGRP and _is_own_group(status.st_gid)
        ):
            writers = 0
    if writers or status.st_uid not in owners or stat.S_ISLNK(status.st_mode):
        raise Untrusted(
            f"{path} is not yours alone ({stat.filemode(status.st_mode)}, user {status.st_uid}), so what is loaded "
            f"from there could be anyone's; {'remove it' if ours else f'chmod go-w {path}'} or set "
            "TORCH_EXTENSIONS_DIR to a folder that only you can write"
        )


def _is_own_group(group: int) -> bool:
    """Return True if `group` has this user's name and nobody else in it, as many systems make one for each user."""
    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return (
        group == user.pw_gid
        and entry.gr_name == user.pw_name
        and set(entry.gr_mem) <= {user.pw_name}
    )
