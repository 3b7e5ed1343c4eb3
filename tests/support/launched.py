"""``launched.py SCRIPT OPTIONS...``: a process of `accelerate launch` on GPUs, but on a CPU."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support import zero3

if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
    zero3.deepspeed()  # before accelerate looks for it

import accelerate.accelerator

from tests.support.trl_ranks import fsdp2_without_gpus


def main() -> None:
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    prepare = accelerate.accelerator.Accelerator.prepare

    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(self, *args, **kwargs)
        for x in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
            self.print(f"prepared: {type(x).__name__}")
        return prepared

    with (
        fsdp2_without_gpus(),
        mock.patch.object(accelerate.accelerator.Accelerator, "prepare", told),
    ):
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
