"""Lanes: the threads of some programs, a place in numpy arrays each, that execute a kernel.

Lanes at the same instruction take it at once; of those that parted, the ones that are furthest
behind go first, so that they meet again as soon as they can. At a barrier a lane waits until no
lane of its program runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator import instructions
from tests.emulator.memory import WARP, Global, Shared, Who
from tests.emulator.ptx import TYPES, UNSIGNED, Fault, Instruction, Kernel, Values, constant

# in a register that nobody wrote: a NaN, or an address that leads nowhere
ANYTHING = 0x7FC0DEAD_7FC0DEAD


class Lanes:
    """`count` programs of `threads` from program `first` on, of a grid of `programs`."""

    def __init__(
        self,
        kernel: Kernel,
        arguments: dict[str, int],
        memory: Global,
        shared_bytes: int,
        *,
        programs: int,
        threads: int,
        first: int,
        count: int,
        number: int = 0,  # of the first lane among those of the launch
    ) -> None:
        self.kernel, self.arguments, self.memory = kernel, arguments, memory
        self.count = n = count * threads
        self.shared = Shared(count, shared_bytes, _smallest(kernel), threads)
        self.lane = np.arange(n)
        self.program = self.lane // threads
        self.threads = threads
        zero = np.zeros(n, np.uint32)
        self.special = {
            "%tid.x": (self.lane % threads).astype(np.uint32),
            "%ctaid.x": (self.program + first).astype(np.uint32),
            "%ntid.x": zero + np.uint32(threads),
            "%nctaid.x": zero + np.uint32(programs),
            "%laneid": (self.lane % WARP).astype(np.uint32),
            **{f"%{name}.{axis}": zero for name in ("tid", "ctaid") for axis in "yz"},
        }
        self.registers: dict[str, Values] = {}
        self.active: NDArray[np.bool_] | None = None  # who takes the current instruction; None: all
        self.numbers = (self.lane + number).astype(np.int32)
        self.epoch = np.zeros(count, np.int32)
        self._at = np.zeros(n, np.int32)
        self._waits, self._gone = np.zeros(n, bool), np.zeros(n, bool)

    # -- what instructions ask for

    def get(self, operand: str, kind: str) -> Values:
        """An operand as numbers of `kind`, such as ``"s32"``: of every lane, or one for all."""
        dtype = TYPES[kind]
        if operand[0] != "%":
            return constant(operand, kind)
        found = self.special.get(operand)
        if found is None:
            found = self._register(operand)
        if found.itemsize > dtype.itemsize or found.itemsize < dtype.itemsize:
            found = found.astype(UNSIGNED[8 * dtype.itemsize])
        return found.view(dtype)

    def predicate(self, operand: str) -> NDArray[np.bool_]:
        """A predicate of every lane, or a constant one."""
        if operand[0] == "!":
            return ~self.predicate(operand[1:])
        return self._register(operand) if operand[0] == "%" else np.asarray(bool(int(operand, 0)))

    def put(self, register: str, values: Values) -> None:
        """Give the active lanes a register's new value, extended where the register is wider."""
        if register == "_":
            return
        target = self._register(register)
        values = np.asarray(values)
        if values.dtype.kind == "f":  # a GPU has one NaN: what it was made of does not show
            values = np.where(np.isnan(values), np.asarray(np.nan, values.dtype), values)
        if target.dtype != bool and values.dtype != target.dtype:
            if values.dtype.kind != "i":
                values = values.view(UNSIGNED[8 * values.itemsize])
            values = values.astype(target.dtype, copy=False)
        np.copyto(target, values, where=True if self.active is None else self.active)

    def everywhere(self, values: Values) -> Values:
        """One value a lane, of what may be one for all."""
        return np.broadcast_to(values, (self.count,))

    def chosen(self) -> NDArray[np.int64]:
        """The numbers of the active lanes."""
        return self.lane if self.active is None else self.lane[self.active]

    def who(self, lanes: NDArray[np.int64]) -> Who:
        """What races are found by."""
        return Who(self.numbers[lanes, None], self.epoch[self.program[lanes], None])

    def whole_warps(self) -> None:
        """Raise unless the lanes of a warp are active together."""
        if self.active is not None:
            warps = self.active.reshape(-1, WARP)
            if (warps.any(1) != warps.all(1)).any():
                raise Fault("a part of a warp takes an instruction of whole warps")

    def _register(self, name: str) -> Values:
        found = self.registers.get(name)
        if found is None:
            bits = self.kernel.bits(name)
            dtype = UNSIGNED[bits] if bits else np.dtype(bool)
            anything = ANYTHING % 2**bits if bits else True
            found = self.registers[name] = np.full(self.count, anything, dtype)
        return found

    # -- running

    def run(self) -> None:
        """Until every lane has returned."""
        code = self.kernel.code
        targets = {self.kernel.labels[i.operands[0]] for i in code if i.opcode.startswith("bra")}
        with np.errstate(all="ignore"):
            while not self._gone.all():
                runs = ~(self._waits | self._gone)
                if not runs.any():
                    self._pass_barriers()
                    continue
                at = int(self._at[runs].min())
                here = runs & (self._at == at)
                self._run_until_parting(at, None if here.all() else here, targets)

    def _run_until_parting(
        self, at: int, here: NDArray[np.bool_] | None, targets: set[int]
    ) -> None:
        """The lanes that are `here`, up to where some go elsewhere, wait, return or join."""
        everyone: Any = slice(None) if here is None else here
        while True:
            step = self.kernel.code[at]
            at += 1
            self.active = here if step.guard is None else self._guarded(step, here)
            if step.opcode in ("bra", "bra.uni", "ret", "exit", "bar.sync"):
                taken: Any = slice(None) if self.active is None else self.active
                self._at[everyone] = at
                if step.opcode.startswith("bra"):
                    self._at[taken] = self.kernel.labels[step.operands[0]]
                elif step.opcode == "bar.sync":
                    self._waits[taken] = True
                else:
                    self._gone[taken] = True
                return
            if self.active is None or self.active.any():
                try:
                    instructions.execute(self, step)
                except Fault as fault:
                    raise Fault(f"{self.kernel.name}: {step}: {fault}") from None
            if at in targets:
                self._at[everyone] = at
                return

    def _guarded(
        self, step: Instruction, here: NDArray[np.bool_] | None
    ) -> NDArray[np.bool_] | None:
        assert step.guard is not None
        guard = self._register(step.guard)
        guard = ~guard if step.negated else guard
        active = guard.copy() if here is None else guard & here
        return None if active.all() else active

    def _pass_barriers(self) -> None:
        """All lanes of a program wait, or are gone."""
        waits, gone = self._waits.reshape(-1, self.threads), self._gone.reshape(-1, self.threads)
        places = self._at.reshape(-1, self.threads)
        arrived = waits.any(1)
        if (arrived & gone.any(1)).any():
            what = "threads wait at a barrier for others that have returned"
            raise Fault(f"{self.kernel.name}: {what}")
        if (places[arrived] != places[arrived, :1]).any():
            raise Fault(f"{self.kernel.name}: threads of a program wait at different barriers")
        self.epoch[arrived] += 1
        waits[...] = False


def _smallest(kernel: Kernel) -> int:
    """Bytes of the smallest access to shared memory."""
    shared = ("ld.shared", "st.shared", "ldmatrix")
    opcodes = [step.opcode for step in kernel.code if step.opcode.startswith(shared)]
    return min([16, *(TYPES[opcode.rsplit(".", 1)[1]].itemsize for opcode in opcodes)])
