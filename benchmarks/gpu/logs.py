"""What the child processes print, whole and bounded, in a folder beside the results."""

from __future__ import annotations

import shutil
from pathlib import Path

FILE_BYTES = 4 * 2**20
FOLDER_BYTES = 32 * 2**20


def folder_for(out: Path) -> Path:
    """The folder of the results `out`, empty: logs of an earlier run of that name go as its results do."""
    folder = out.with_name(out.name + ".logs")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def bound(folder: Path, *, file_bytes: int = FILE_BYTES, folder_bytes: int = FOLDER_BYTES) -> None:
    """Cut the middle out of files of more than `file_bytes`, or less where all would be more than `folder_bytes`."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    most = min(file_bytes, folder_bytes // max(1, len(files)))
    for file in files:
        size = file.stat().st_size
        if size > most:
            _cut(file, size, most)


def _cut(file: Path, size: int, most: int) -> None:
    """The first quarter of what may stay, and the end: errors come last."""
    note = f"\n[... {size} bytes in all, the middle left out ...]\n".encode()
    head = max(0, most - len(note)) // 4
    tail = max(0, most - len(note) - head)
    with file.open("rb") as source:
        start = source.read(head)
        source.seek(size - tail)
        end = source.read()
    file.write_bytes(start + note + end)
