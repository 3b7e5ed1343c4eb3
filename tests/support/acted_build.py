"""A C++ compiler in sh."""

from __future__ import annotations

from pathlib import Path


def script(path: Path, body: str) -> Path:
    """A compiler that does `body`; $out is the file it is to write."""
    find_out = 'for word; do [ "$last" = -o ] && out=$word; last=$word; done'
    path.write_text(f"#!/bin/sh\n{find_out}\n{body}\n")
    path.chmod(0o755)
    return path
