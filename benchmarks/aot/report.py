"""docs/roofline.md, from counts alone: the same counts, the same file."""

from __future__ import annotations

from pathlib import Path

from benchmarks.aot import budget
from benchmarks.aot.costs import PRODUCT, Pins, Taken
from benchmarks.aot.predict import (
    DEVICES,
    DRAM_REACHED,
    PRODUCTS_REACHED,
    Device,
    ctas_per_sm,
    instructions,
    loops,
    moved,
    products_ms,
    specials,
    times,
)

FILE = Path(__file__).parents[2] / "docs" / "roofline.md"
ROWS, WIDTH = 8192, 4096

INTRODUCTION = """\
# The row kernels against the machine: predictions

Made by `make roofline`, which needs no GPU: it compiles the kernels for sm_90 with Triton {triton}, takes their machine
code apart, and counts what an element of a row costs. **No time here was measured.** Counts are exact; milliseconds are
predictions from them, to be trusted to 15 % at best. `make roofline` fails if a count is not what
`benchmarks/aot/pins.json` says; after a change to a kernel, `make roofline ROOFLINE_ARGS=--update` writes both.

## What the compiler made

Instructions of a thread an element of V = 151936 (or as named), in the main loops, one number for each sweep over the
row, and in all, with what a row costs besides them (lanes merged, the loss, the last tiles). MUFU are results of the
special function unit (exponentials, reciprocals), bytes are loaded + stored. CTAs/SM is how many programs a
multiprocessor of sm_90 holds by its registers, threads and shared memory. A kernel without a loop, whose program is a
tile, is counted whole. `dot` computes products too: its counts are of what it does to a tile of them.

"""
TIMES = """
## What that predicts

For {rows} x 151936 logits (or as named), in ms. *Issue*: instructions at 4 warps a clock and multiprocessor. *MUFU*:
16 a clock and multiprocessor. *DRAM*: bytes at {dram:.1%} of the data sheet's rate, every read counted. **Predicted**:
the largest of the three and an eighth of the second largest. The last column is its share of the matrix products of the
call that the kernel is a part of (scoring 1, frozen head 2, trainable head 3, each 2 N V H at H = {width}, at
{products:.1%} of the data sheet's rate, what others measured on an H200: 770-788 TF/s). `dot` takes the place of its
product, so its number is of all it does: the product at that rate, and twice the issue of the rest; a lower bound.
"""
DEVICE = """
### {name}: predicted

{sms} SMs at {clock:.3f} GHz, DRAM {dram:.2f} TB/s, products {products:.0f} TF/s{remark}. One product
of the main shape: {product:.1f} ms.

"""


BUDGET = """
## What a step should take

Forward and backward on an H200, in ms, from what a step launches and how many bytes that moves, noted down at real
sizes on tensors that have no data (`benchmarks/aot/budget.py`). bf16, N {rows}, H {width}, V 151936, trainable,
on-policy dapo with a mask, the default workspace, save for what the name says. *Products alone*: those that the case
cannot do without. *Rows*: the row kernels. *Other*: all other launches, by their bytes, at least 2.5 µs each; of a
trainable head nearly all of it is d weight, which the backward scales and casts (6 bytes an element). *Host*: what the
device waits for before the first product, {launch:g} µs a launch and {wait:g} µs a wait, both chosen, and the
conversion of an fp32 weight, which comes before it. **Ratio**: total over products alone.

"""
WHY = """
With H 1024 a product takes a quarter, and the rows what they always take: 10 bytes of each logit. With N 1024 scaling
and casting d weight, which does not depend on N, is a sixth of the step.
"""


def report(pins: Pins) -> str:
    """The whole file."""
    text = INTRODUCTION.format(triton=pins.triton)
    text += _table(
        "kernel | variant | instructions | in all | MUFU | bytes | registers | shared | CTAs/SM",
        map(_counts, pins.cases),
    )
    text += TIMES.format(rows=ROWS, dram=DRAM_REACHED, width=WIDTH, products=PRODUCTS_REACHED)
    for device in DEVICES.values():
        remark = ", by the counts of sm_90" if device.name == "B200" else ""
        text += DEVICE.format(
            name=device.name, sms=device.sms, clock=device.clock / 1e9, dram=device.dram / 1e12, remark=remark,
            products=device.products / 1e12, product=products_ms(ROWS, 151936, WIDTH, device),
        )  # fmt: skip
        text += _table(
            "kernel | variant | issue | MUFU | DRAM | **predicted** | of the products",
            (_times(taken, device) for taken in pins.cases),
        )
    text += BUDGET.format(rows=ROWS, width=WIDTH, launch=1e3 * budget.LAUNCH_MS, wait=1e3 * budget.WAIT_MS)
    return text + _table(*budget.table()) + WHY


def _table(header: str, lines: object) -> str:
    names = header.split(" | ")
    rule = ["---" if name in ("kernel", "variant", "case") else "---:" for name in names]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (names, rule, *lines))  # type: ignore[misc]


def _counts(taken: Taken) -> list[str]:
    loaded, stored = moved(taken)
    has_product = any(p.does == PRODUCT for p in taken.parts)
    return [
        taken.kernel,
        taken.variant,
        " + ".join(f"{x:.1f}" for x in loops(taken)),
        "" if has_product else f"{instructions(taken, taken.vocab):.1f}",
        f"{specials(taken, taken.vocab):.2f}",
        "" if has_product else f"{loaded:g} + {stored:g}",
        str(taken.registers),
        str(taken.shared),
        str(ctas_per_sm(taken.registers, taken.threads, taken.shared)),
    ]


def _times(taken: Taken, device: Device) -> list[str]:
    found = times(taken, ROWS, taken.vocab, device, width=WIDTH)
    share = found.predicted / (taken.products * products_ms(ROWS, taken.vocab, WIDTH, device))
    ms = [f"{found.issue:.2f}", f"{found.special:.2f}", f"{found.dram:.2f}" if found.dram else ""]
    return [taken.kernel, taken.variant, *ms, f"**{found.predicted:.2f}**", f"{share:.1%}"]
