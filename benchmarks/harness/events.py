"""How the worker says what it does and finds: lines of JSON in a file, so that a crash loses nothing."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

LIMIT_SECONDS = 60.0
LOST = 70  # exit status of a worker whose device no longer answers


class Absence(Exception):
    """Something that cannot run here; the text says why."""


class Events:
    """Writes events. `path` is where a value belongs in the results, keys from the top."""

    def __init__(self, file: Path, item: int = 0) -> None:
        self._file, self.item = file.open("a", buffering=1), item

    def begin(self, *path: str, limit: float = LIMIT_SECONDS) -> None:
        """From now on, whatever happens is to be noted at `path`; past `limit` seconds it hangs."""
        self._write(event="begin", path=path, limit=limit, at=time.time())

    def result(self, *path: str, **value: Any) -> None:
        """Merge `value` into the results at `path`."""
        self._write(event="result", path=path, value=value)

    def done(self) -> None:
        """The item is complete."""
        self._write(event="done")

    @contextmanager
    def noting(self, *path: str, limit: float = LIMIT_SECONDS) -> Iterator[None]:
        """Whatever goes wrong within is written at `path`, and no more; only a lost device ends the process."""
        self.begin(*path, limit=limit)
        try:
            yield
        except Exception as error:
            self.failed(error, *path)

    def failed(self, error: Exception, *path: str) -> None:
        """Write what went wrong at `path`."""
        if isinstance(error, Absence):
            self.result(*path, status="absent", reason=str(error))
            return
        if isinstance(error, torch.OutOfMemoryError):
            self.result(*path, status="out of memory", reason=str(error)[:300])
        else:
            self.result(*path, status="error", reason=describe(error))
        self._leave_if_lost()

    def _leave_if_lost(self) -> None:
        """An error such as an illegal address stays with the process: another one has to go on."""
        if not torch.cuda.is_available():
            return
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception:
            raise SystemExit(LOST) from None

    def _write(self, **event: Any) -> None:
        self._file.write(json.dumps(finite({"item": self.item, **event})) + "\n")


def describe(error: Exception) -> str:
    """The error and where it was raised, in a few lines."""
    where = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{Path(x.filename).name}:{x.lineno}" for x in reversed(where))
    return f"{type(error).__name__}: {str(error)[:1500]} [{places}]"


def finite(value: Any) -> Any:
    """`value` as JSON can hold it: no NaN, no infinity, nothing but plain types."""
    if isinstance(value, dict):
        return {str(k): finite(x) for k, x in value.items()}
    if isinstance(value, list | tuple):
        return [finite(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
