"""A C++ compiler in sh."""

from __future__ import annotations

from pathlib import Path


def script(path: Path, body: str) -> Path:
    """A compiler that does `body`; $out is the file it is to write."""
    path.write_text(
        f'#!/bin/sh\nfor word; do [ "$last" = -o ] && out=$word; last=$word; done\n{body}\n'
    )
    path.chmod(0o755)
    return path
