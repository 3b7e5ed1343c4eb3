"""``python -m benchmarks.aot.roofline``: costs on sm_90, against docs/dev/roofline.md (SASS).

The table of that document is what is expected, to the digit, of the release of Triton that it
names; by another release the counts are printed, and no more. Some rules hold by any: in a loop
over a row lanes do not wait for each other, no register is spilled, and each load moves 16 bytes.

Exit status: 1 if a count is not the document's or a rule is broken, 2 if it could not start.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.aot import in_processes, is_interpreted, sass
from benchmarks.aot.checks import compile_for, nvidia_usage
from benchmarks.aot.kernels import Loss, V
from benchmarks.aot.matrix import Case
from benchmarks.aot.sass import LOADS, count, moved
from grpo_kernels.backends.triton_rows.device import row_config
from grpo_kernels.base import EXTRAS

ARCH = "sm_90"
DOCUMENT = Path(__file__).parents[2] / "docs" / "dev" / "roofline.md"
HEAD = "| kernel | variant | instructions | MUFU | bytes | registers | shared | CTAs/SM |"
TABLE = re.compile(
    rf"By Triton (?P<triton>[\w.]+):\n\n{re.escape(HEAD)}\n\|[-:| ]+\|\n(?P<lines>(?:\|.*\n)+)"
)
SWEEPS = {"fused": 2}  # over a row
ENTRIES = {"diverge": "stats"}  # kernel: whose tiles it has
ODD = {"vocab": 151665}
SOFTCAP = {"transform": "soft-cap"}
CONSTANT = {"loss": Loss("constant")}


def cases() -> list[Case]:
    """All, in an order that does not change; a kernel to come is one more line."""
    return [
        _case("stats", "plain"),
        _case("stats", "plain, V 151665", **ODD),
        _case("stats", "soft-cap", **SOFTCAP),
        _case("stats", "all extras", extras=EXTRAS),
        _case("fused", "constant", **CONSTANT),
        _case("fused", "constant, V 151665", **CONSTANT, **ODD),
        _case("fused", "constant, soft-cap", **CONSTANT, **SOFTCAP),
        _case("fused", "clipped, KL", loss=Loss("clipped", "k3")),
        _case("grad", "plain", entropy=False),
        _case("grad", "plain, V 151665", entropy=False, **ODD),
        _case("grad", "soft-cap", entropy=False, **SOFTCAP),
        _case("grad", "entropy gradient"),
        *(
            _case("diverge", name, reference=("plain", beta))
            for name, beta in (("forward", 0.0), ("reverse", 1.0), ("Jensen-Shannon", 0.5))
        ),
        _case("grad", "reference, reverse", entropy=False, reference=("plain", 1.0)),
    ]


def _case(kernel: str, variant: str, **options: Any) -> Case:
    """A row kernel on rows that begin where the engine lets them, for odd vocabularies too."""
    config = row_config(ENTRIES.get(kernel, kernel), options.get("vocab", V), ARCH)
    return Case(kernel, variant, ARCH, {"apart": True, "entropy": True, **options}, config)


def counts_of(case: Case) -> tuple[str, list[str]]:
    compiled = compile_for(case.caught(), ARCH)
    code = sass.disassembled(compiled.asm["cubin"])
    sweeps = SWEEPS.get(case.kernel, 1)
    loops = sass.inner_loops(code, lambda x: x.name in LOADS)[:sweeps]
    registers, _ = nvidia_usage(compiled.asm)
    shared, threads = compiled.metadata.shared, 32 * compiled.metadata.num_warps
    heads = 2 if "reference" in case.options else 1
    by_sm = ctas_per_sm(registers, threads, shared)
    cells = [*_an_element(loops, heads), *map(str, (registers, shared, by_sm))]
    few = [f"expected {sweeps} loops over a row, got {len(loops)}"] if len(loops) < sweeps else []
    line = f"| {' | '.join([case.kernel, case.variant, *cells])} |"
    return line, few + _broken(loops)


def _an_element(loops: list[list[sass.Instruction]], heads: int) -> list[str]:
    """Instructions, results of the special function unit, and bytes, for each sweep."""
    # of a thread in a round, each logit in fp32
    elements = [moved(loop, LOADS) // (4 * heads) for loop in loops]
    each = list(zip(loops, elements, strict=True))
    instructions = " + ".join(f"{len(loop) / n:.1f}" for loop, n in each)
    specials = sum(count(loop, "MUFU") / n for loop, n in each)
    loaded, stored = (sum(moved(x, names) // n for x, n in each) for names in (LOADS, sass.STORES))
    return [instructions, f"{specials:.2f}", f"{loaded} + {stored}"]


def _broken(loops: list[list[sass.Instruction]]) -> list[str]:
    found = []
    for loop in loops:
        forbidden = {"SHFL": count(loop, "SHFL"), "spilled": count(loop, *sass.SPILLING)}
        forbidden["narrow loads"] = sum(x.name in LOADS and x.bytes < 16 for x in loop)
        found += [f"{n} {what} in a loop over a row" for what, n in forbidden.items() if n]
    return found


def ctas_per_sm(registers: int, threads: int, shared: int) -> int:
    """How many programs of so many registers, threads and bytes of shared memory an SM holds.

    A warp's registers are rounded up to a multiple of 256, and lie in one of four partitions of
    16,384. Of the 228 KiB of shared memory the system takes one a program.
    """
    warps = threads // 32
    by_registers = 16384 // (-(-32 * registers // 256) * 256) * 4 // warps
    by_shared = 228 * 1024 // (-(-shared // 128) * 128 + 1024)
    return min(by_registers, 2048 // threads, by_shared, 32)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot.roofline", description=__doc__)
    update = "write the table of docs/dev/roofline.md anew"
    parser.add_argument("--update", action="store_true", help=update)
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    arguments = parser.parse_args()
    if is_interpreted():
        return 2
    import triton

    found = list(in_processes(counts_of, cases(), arguments.workers))
    text = DOCUMENT.read_text()
    table = TABLE.search(text)
    assert table, f"no table in {DOCUMENT}"
    if arguments.update:
        lines = "".join(f"{line}\n" for line, _ in found)
        text = text[: table.start("lines")] + lines + text[table.end("lines") :]
        by = f"By Triton {table['triton']}:", f"By Triton {triton.__version__}:"
        DOCUMENT.write_text(text.replace(*by))
    is_pinned = triton.__version__ == table["triton"] and not arguments.update
    expected = table["lines"].splitlines()
    differs = 0
    print(HEAD)
    for place, (line, broken) in enumerate(found):
        if is_pinned and expected[place] != line:
            broken.append(f"expected {expected[place]}")
        differs += bool(broken)
        print(line, *broken, sep="\n  BROKEN: ")
    if not is_pinned and not arguments.update:
        why = f"the document's are by {table['triton']}, and were not compared"
        print(f"by Triton {triton.__version__}; {why}")
    print(f"{differs} of {len(found)} kernels are not as in {DOCUMENT.name}")
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
