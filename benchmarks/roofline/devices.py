"""The numbers of a device that a prediction takes, and how many programs one of its multiprocessors holds.

Sources: SMs, DRAM and matrix rates are NVIDIA's data sheets (H100 SXM: 3.35 TB/s, 989 TF/s dense bf16; H200: 4.8 TB/s,
the same chip; HGX B200: 148 SMs, 7.7 TB/s, 2250 TF/s). 4 warp instructions a clock (one a scheduler), 16 results of the
special function unit a clock: CUDA programming guide, throughput of arithmetic instructions, 9.0 and 10.0. Clocks are
what is sustained, not the boost clock: 1.755 GHz on Hopper; for B200 that is an assumption.

What is reached of the data sheet: others measured 770-788 TF/s of bf16 products on an H200 (0.787 of it) and 4.2-4.3
TB/s (0.885). The same shares are assumed for the other two.
"""

from __future__ import annotations

from dataclasses import dataclass

PRODUCTS_REACHED, DRAM_REACHED = 0.787, 0.885
ISSUED = 128  # thread instructions a clock, an SM: 4 warps of 32
MUFU = 16  # results a clock, an SM

# Of one SM of sm_90 and sm_100.
REGISTERS, REGISTER_UNIT = 65536, 256  # 32-bit; a warp's are rounded up to a multiple of the unit
PARTITIONS = 4  # a warp's registers lie in one of them
THREADS, PROGRAMS, WARP = 2048, 32, 32
SHARED, SHARED_UNIT, SHARED_RESERVED = 228 * 1024, 128, 1024  # bytes; the system takes 1 KiB a program


@dataclass(frozen=True)
class Device:
    """Rates of the data sheet."""

    name: str
    sms: int
    clock: float  # Hz
    dram_sheet: float  # bytes / s
    products_sheet: float  # operations / s, dense bf16

    @property
    def dram(self) -> float:
        return DRAM_REACHED * self.dram_sheet

    @property
    def products(self) -> float:
        return PRODUCTS_REACHED * self.products_sheet


DEVICES = {
    d.name: d
    for d in (
        Device("H100", 132, 1.755e9, 3.35e12, 989e12),
        Device("H200", 132, 1.755e9, 4.8e12, 989e12),
        Device("B200", 148, 1.755e9, 7.7e12, 2250e12),
    )
}


def ctas_per_sm(registers: int, threads: int, shared: int) -> int:
    """How many programs of so many registers a thread, threads and bytes of shared memory an SM holds at once."""
    warps = -(-threads // WARP)
    of_warp = _up(registers * WARP, REGISTER_UNIT)
    by_registers = REGISTERS // PARTITIONS // of_warp * PARTITIONS // warps
    by_shared = SHARED // (_up(shared, SHARED_UNIT) + SHARED_RESERVED)
    return min(by_registers, THREADS // (WARP * warps), by_shared, PROGRAMS)


def _up(x: int, unit: int) -> int:
    return -(-x // unit) * unit
