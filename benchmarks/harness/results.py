"""The results: one dictionary, in its file after every change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.harness.events import finite


class Results:
    """A tree of plain values that is always on disk, whatever happens next."""

    def __init__(self, path: Path, **data: Any) -> None:
        self.path, self.data = path, data
        path.parent.mkdir(parents=True, exist_ok=True)
        self.save()

    def at(self, *path: str) -> dict[str, Any]:
        """The dictionary at `path`, made if it is not there."""
        here = self.data
        for key in path:
            here = here.setdefault(key, {})
        return here

    def merge(self, *path: str, **value: Any) -> None:
        """Put `value` into the dictionary at `path`, and save."""
        self.at(*path).update(value)
        self.save()

    def save(self) -> None:
        """Write the file anew; whoever reads it sees the old one or the new one, whole."""
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(finite(self.data), indent=1) + "\n")
        os.replace(part, self.path)
