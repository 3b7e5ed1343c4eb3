"""Kernels written by hand, for tests of the emulator."""

from __future__ import annotations

from torch import Tensor

from tests.emulator.lanes import Lanes
from tests.emulator.memory import Global
from tests.emulator.ptx import parse
from tests.emulator.races import WARP

TEXT = """
.visible .entry written(
{parameters}
)
.reqntid {threads}
{{
    .reg .pred %p<20>;
    .reg .b16 %rs<20>;
    .reg .b32 %r<40>;
    .reg .b64 %rd<40>;
    {loads}
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %ctaid.x;
    {body}
    ret;
}}
"""


def execute(
    body: str, *tensors: Tensor, threads: int = WARP, programs: int = 1, shared: int = 0
) -> Lanes:
    """Run `body` where %r0 is the thread, %r1 the program and %rd0, %rd1, ... point to `tensors`."""
    names = [f"written_param_{i}" for i in range(len(tensors))]
    text = TEXT.format(
        parameters=",\n".join(f".param .u64 .ptr .global .align 1 {name}" for name in names),
        threads=threads,
        loads="\n".join(f"ld.param.b64 %rd{i}, [{name}];" for i, name in enumerate(names)),
        body=body,
    )
    memory = Global(dict(zip(names, tensors, strict=True)), threads)
    pointers = {name: memory.pointer(name) for name in names}
    lanes = Lanes(
        parse(text),
        pointers,
        memory,
        shared,
        programs=programs,
        threads=threads,
        first=0,
        count=programs,
    )
    lanes.run()
    memory.copy_back()
    return lanes
