"""``python -m benchmarks.aot.roofline``: what the kernels cost on sm_90, counted in SASS, against docs/roofline.md.

The table of that document is what is expected, to the digit, of the release of Triton that it names; by another release
the counts are printed, and no more. Some rules hold by any: in a loop over a row lanes do not wait for each other, no
register is spilled, and each load moves 16 bytes.

Exit status: 1 if a count is not the document's or a rule is broken, 2 if it could not start.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.aot import in_processes, is_interpreted
from benchmarks.aot.checks import compile_for, nvidia_usage
from benchmarks.aot.matrix import BF16, FP32, Case, H, N, V, empty, ids, pair_statistics, row_statistics, token_loss
from benchmarks.aot.sass import LOADS, SPILLING, STORES, Instruction, count, disassembled, inner_loops, moved
from grpo_kernels.backends.interface import STATISTICS, Chunk, LogitTransform, Teacher
from grpo_kernels.backends.triton_rows import divergence, dot, fused, grad, single_pass, stats, teacher_fused
from grpo_kernels.backends.triton_rows.configs import dot_config, row_config
from grpo_kernels.engine.device import CUDA

ARCH = "sm_90"
ODD_V = 151665
PLAIN, SOFTCAP = LogitTransform(), LogitTransform(softcap=30.0)
# surrogate, KL estimator, whether it is corrected, gate, dtype of the gradient, entropy bonus
CONSTANT = ("constant", None, False, False, BF16, 0.0)
CLIPPED_KL = ("clipped", "k3", False, False, BF16, 0.0)
DOCUMENT = Path(__file__).parents[2] / "docs" / "roofline.md"
HEAD = "| kernel | variant | instructions | MUFU | bytes | registers | shared | CTAs/SM |"
TABLE = re.compile(rf"By Triton (?P<triton>[\w.]+):\n\n{re.escape(HEAD)}\n\|[-:| ]+\|\n(?P<lines>(?:\|.*\n)+)")


@dataclass(frozen=True)
class Counted:
    """A launch to take apart."""

    kernel: str
    variant: str
    launch: Callable[[], Any]
    sweeps: int = 1  # over a row; a further loop is for rare rows
    heads: int = 1  # whose logits are loaded


def cases() -> list[Counted]:
    """All, in an order that does not change; a kernel to come is one more line."""
    return [
        Counted("stats", "plain", lambda: _stats()),
        Counted("stats", f"plain, V {ODD_V}", lambda: _stats(vocab=ODD_V)),
        Counted("stats", "soft-cap", lambda: _stats(SOFTCAP)),
        Counted("stats", "all extras", lambda: _stats(extras=STATISTICS)),
        Counted("fused", "constant", lambda: _fused(CONSTANT), sweeps=2),
        Counted("fused", f"constant, V {ODD_V}", lambda: _fused(CONSTANT, vocab=ODD_V), sweeps=2),
        Counted("fused", "constant, soft-cap", lambda: _fused(CONSTANT, SOFTCAP), sweeps=2),
        Counted("fused", "clipped, KL", lambda: _fused(CLIPPED_KL), sweeps=2),
        Counted("single_pass", "plain", lambda: _single_pass()),
        Counted("single_pass", f"plain, V {ODD_V}", lambda: _single_pass(vocab=ODD_V)),
        Counted("single_pass", "soft-cap", lambda: _single_pass(SOFTCAP)),
        Counted("grad", "plain", lambda: _grad()),
        Counted("grad", f"plain, V {ODD_V}", lambda: _grad(vocab=ODD_V)),
        Counted("grad", "soft-cap", lambda: _grad(SOFTCAP)),
        Counted("grad", "entropy gradient", lambda: _grad(has_b=True)),
        Counted("diverge", "forward", lambda: _diverge(0.0), heads=2),
        Counted("diverge", "reverse", lambda: _diverge(1.0), heads=2),
        Counted("diverge", "Jensen-Shannon", lambda: _diverge(0.5), heads=2),
        Counted("grad", "teacher, reverse", lambda: _teacher_grad(1.0), heads=2),
        Counted("teacher_fused", "constant, reverse", lambda: _teacher_fused(1.0), sweeps=3, heads=2),
        Counted("dot", "bf16", lambda: _dot()),
    ]


def counts_at(place: int) -> tuple[str, list[str]]:
    """The line of the case at a place, and the rules that it breaks."""
    case = cases()[place]
    compiled = compile_for(Case(case.kernel, case.variant, ARCH, case.launch).caught(), ARCH)
    code = disassembled(compiled.asm["cubin"])
    is_dot = case.kernel == "dot"
    loops = inner_loops(code, lambda x: x.name in (("HGMMA",) if is_dot else LOADS))[: case.sweeps]
    registers, _ = nvidia_usage(compiled.asm)
    shared, threads = compiled.metadata.shared, 32 * compiled.metadata.num_warps
    of_loops = [str(len(loops[0])), "", ""] if is_dot else _an_element(loops, case.heads)
    cells = [*of_loops, str(registers), str(shared), str(ctas_per_sm(registers, threads, shared))]
    broken = [f"expected {case.sweeps} loops over a row, got {len(loops)}"] if len(loops) < case.sweeps else []
    return f"| {' | '.join([case.kernel, case.variant, *cells])} |", broken + ([] if is_dot else _broken(loops))


def _an_element(loops: list[list[Instruction]], heads: int) -> list[str]:
    """Instructions, results of the special function unit, and bytes; a number for each sweep where they differ."""
    elements = [moved(loop, LOADS) // (4 * heads) for loop in loops]  # of a thread in a round, each logit in fp32
    instructions = " + ".join(f"{len(loop) / n:.1f}" for loop, n in zip(loops, elements, strict=True))
    specials = sum(count(loop, "MUFU") / n for loop, n in zip(loops, elements, strict=True))
    loaded, stored = (
        sum(moved(loop, names) // n for loop, n in zip(loops, elements, strict=True)) for names in (LOADS, STORES)
    )
    return [instructions, f"{specials:.2f}", f"{loaded} + {stored}"]


def _broken(loops: list[list[Instruction]]) -> list[str]:
    found = []
    for loop in loops:
        forbidden = {"SHFL": count(loop, "SHFL"), "spilled": count(loop, *SPILLING)}
        forbidden["narrow loads"] = sum(x.name in LOADS and x.bytes < 16 for x in loop)
        found += [f"{times} {what} in a loop over a row" for what, times in forbidden.items() if times]
    return found


def ctas_per_sm(registers: int, threads: int, shared: int) -> int:
    """How many programs of so many registers a thread, threads and bytes of shared memory an SM of sm_90 holds.

    A warp's registers are rounded up to a multiple of 256, and lie in one of four partitions of 16,384. Of the 228 KiB
    of shared memory the system takes one a program.
    """
    warps = threads // 32
    by_registers = 16384 // (-(-32 * registers // 256) * 256) * 4 // warps
    by_shared = 228 * 1024 // (-(-shared // 128) * 128 + 1024)
    return min(by_registers, 2048 // threads, by_shared, 32)


def _stats(transform: LogitTransform = PLAIN, *, vocab: int = V, extras: tuple[str, ...] = ()) -> Any:
    return stats.launch_stats(_chunk(vocab, transform), row_config("stats", vocab, ARCH), entropy=True, extras=extras)


def _fused(loss: Any, transform: LogitTransform = PLAIN, *, vocab: int = V) -> Any:
    config = row_config("fused", vocab, ARCH)
    return fused.launch_fused(_chunk(vocab, transform), token_loss(*loss), _rows(vocab, BF16), config)


def _single_pass(transform: LogitTransform = PLAIN, *, vocab: int = V) -> Any:
    config = row_config("stats", vocab, ARCH)
    return single_pass.launch_single_pass(
        _chunk(vocab, transform), _rows(vocab, BF16), config, entropy=True, extras=(), in_place=False
    )


def _grad(transform: LogitTransform = PLAIN, *, vocab: int = V, has_b: bool = False) -> Any:
    b, config = empty(N) if has_b else None, row_config("grad", vocab, ARCH)
    return grad.launch_grad(_chunk(vocab, transform), row_statistics(), empty(N), b, _rows(vocab, BF16), config)


def _diverge(beta: float) -> Any:
    known = row_statistics()
    return divergence.launch_diverge(_pair(beta), known, known, row_config("stats", V, ARCH))


def _teacher_grad(beta: float) -> Any:
    config = row_config("grad", V, ARCH)
    return grad.launch_grad(_pair(beta), pair_statistics(), empty(N), None, _rows(V, BF16), config, empty(N))


def _teacher_fused(beta: float) -> Any:
    loss = replace(token_loss(*CONSTANT), kl="full")
    return teacher_fused.launch_teacher_fused(_pair(beta), loss, _rows(V, BF16), row_config("fused", V, ARCH))


def _dot() -> Any:
    hidden, weight = empty(N, H, dtype=BF16), empty(V, H, dtype=BF16)
    config = dot_config(H, V, BF16, ARCH, softcap=False, aligned=dot.is_aligned(weight))
    return dot.launch_dot(hidden, weight, ids(), PLAIN, config, entropy=True)


def _chunk(vocab: int, transform: LogitTransform) -> Chunk:
    return Chunk(_rows(vocab), ids(), transform)


def _pair(beta: float) -> Chunk:
    """A chunk with a teacher."""
    return replace(_chunk(V, PLAIN), teacher=Teacher(_rows(V), PLAIN, beta))


def _rows(vocab: int, dtype: torch.dtype = FP32) -> Tensor:
    """Rows that begin where the engine lets them; an odd vocabulary must cost no more than another."""
    return empty(N, CUDA.row_width(vocab), dtype=dtype)[:, :vocab]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot.roofline", description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the table of docs/roofline.md anew")
    parser.add_argument("--case", metavar="TEXT", help="only those whose kernel and variant contain this")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    arguments = parser.parse_args()
    if is_interpreted():
        return 2
    if arguments.update and arguments.case:
        print("error: --update writes all cases, not those of --case alone", file=sys.stderr)
        return 2
    import triton

    places = [i for i, case in enumerate(cases()) if (arguments.case or "") in f"{case.kernel} {case.variant}"]
    found = list(in_processes(counts_at, places, arguments.workers))
    text = DOCUMENT.read_text()
    table = TABLE.search(text)
    assert table, f"no table in {DOCUMENT}"
    if arguments.update:
        lines = "".join(f"{line}\n" for line, _ in found)
        text = text[: table.start("lines")] + lines + text[table.end("lines") :]
        DOCUMENT.write_text(text.replace(f"By Triton {table['triton']}:", f"By Triton {triton.__version__}:"))
    is_pinned = triton.__version__ == table["triton"] and not arguments.update
    expected = table["lines"].splitlines() if is_pinned else []
    differs = 0
    print(HEAD)
    for place, (line, broken) in zip(places, found, strict=True):
        if expected and expected[place] != line:
            broken.append(f"expected {expected[place]}")
        differs += bool(broken)
        print(line, *broken, sep="\n  BROKEN: ")
    if not is_pinned and not arguments.update:
        print(f"by Triton {triton.__version__}; the document's are by {table['triton']}, and were not compared")
    print(f"{differs} of {len(places)} kernels are not as in {DOCUMENT.name}")
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
