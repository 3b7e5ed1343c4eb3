"""``launched.py SCRIPT OPTIONS...``: a process of `accelerate launch` on GPUs, but on a CPU."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support import zero3

if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
    zero3.deepspeed()  # before accelerate looks for it

import accelerate.accelerator


@contextmanager
def fsdp2_without_gpus() -> Iterator[None]:
    """accelerate's own FSDP, which it takes on GPUs alone: else it makes DDP of it, silently."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    begin = AcceleratorState.__init__

    def as_on_a_gpu(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    with mock.patch.object(AcceleratorState, "__init__", as_on_a_gpu):
        yield


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
