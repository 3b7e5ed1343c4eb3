"""The meaning of instructions whose results are easy to get wrong."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.emulator.arithmetic import fused_multiply_add
from tests.emulator.moves import to_bfloat16
from tests.emulator.ptx import parse
from tests.emulator.written import TEXT, execute

INF, NAN = float("inf"), float("nan")


def bits(x: float) -> str:
    return f"0f{np.float32(x).view(np.uint32):08X}"


def result(code: str, kind: str = "b32") -> int:
    """What `code` leaves in %r2, %rd2 or %rs2, in the first thread."""
    size, register = int(kind[1:]), {"b16": "%rs2", "b32": "%r2", "b64": "%rd20"}[kind]
    out = torch.zeros(32 * size // 8, dtype=torch.uint8)
    step = f"mul.wide.u32 %rd10, %r0, {size // 8}; add.s64 %rd11, %rd0, %rd10;"
    execute(f"{code} {step} st.global.{kind} [%rd11], {register};", out)
    return int(out.numpy().view(f"u{size // 8}")[0])


@pytest.mark.parametrize(
    ("code", "want"),
    [
        ("shl.b32 %r2, 1, 32;", 0),
        ("shr.u32 %r2, -1, 40;", 0),
        ("shr.s32 %r2, -8, 40;", 0xFFFFFFFF),
        ("prmt.b32 %r2, 0x33221180, 0x77665544, 0x8765;", 0xFF776655),
        ("prmt.b32 %r2, 0x33221180, 0x77665544, 0x0008;", 0x808080FF),
        ("bfe.u32 %r2, 0xABCD1234, 8, 12;", 0xD12),
        ("bfe.s32 %r2, 0xABCD1234, 12, 8;", 0xFFFFFFD1),
        ("lop3.b32 %r2, 0xF0F0, 0xFF00, 0x3333, 0xCA;", (0xF0F0 & 0xFF00) | (~0xF0F0 & 0x3333)),
        ("div.s32 %r2, -7, 2;", 0xFFFFFFFD),
        ("rem.s32 %r2, -7, 2;", 0xFFFFFFFF),
        ("mul.hi.u32 %r2, 0xFFFFFFFF, 3;", 2),
        ("min.s32 %r2, -1, 1;", 0xFFFFFFFF),
        ("min.u32 %r2, -1, 1;", 1),
        ("setp.lt.u32 %p1, -1, 1; selp.b32 %r2, 5, 6, %p1;", 6),
        (f"setp.lt.f32 %p1, {bits(NAN)}, {bits(1)}; selp.b32 %r2, 5, 6, %p1;", 6),
        (f"setp.ltu.f32 %p1, {bits(NAN)}, {bits(1)}; selp.b32 %r2, 5, 6, %p1;", 5),
        (f"setp.ne.f32 %p1, {bits(NAN)}, {bits(1)}; selp.b32 %r2, 5, 6, %p1;", 6),
        (f"setp.neu.f32 %p1, {bits(NAN)}, {bits(1)}; selp.b32 %r2, 5, 6, %p1;", 5),
        ("setp.eq.s32 %p1, 1, 1; setp.eq.and.s32 %p2, 2, 2, !%p1; selp.b32 %r2, 5, 6, %p2;", 6),
        (f"max.f32 %r2, {bits(NAN)}, {bits(2)};", int(bits(2)[2:], 16)),
        (f"ex2.approx.ftz.f32 %r2, {bits(-127)};", 0),
        (f"ex2.approx.f32 %r2, {bits(-127)};", 1 << 22),
        (f"mul.ftz.f32 %r2, {bits(-1e-30)}, {bits(1e-10)};", 0x80000000),
        (f"rsqrt.approx.ftz.f32 %r2, {bits(4)};", int(bits(0.5)[2:], 16)),
        (f"cvt.rni.s32.f32 %r2, {bits(2.5)};", 2),
        (f"cvt.rzi.s32.f32 %r2, {bits(-3e9)};", 0x80000000),
        (f"cvt.rzi.s32.f32 %r2, {bits(INF)};", 0x7FFFFFFF),
        (f"cvt.rzi.s32.f32 %r2, {bits(NAN)};", 0),
        (f"cvt.rmi.ftz.f32.f32 %r2, {bits(-1.5)};", int(bits(-2)[2:], 16)),
        (f"cvt.rn.bf16x2.f32 %r2, {bits(1)}, {bits(2)};", 0x3F804000),
        ("mov.u32 %r3, 0x12345678; mov.b32 {%rs1, %rs2}, %r3; mov.b32 %r2, {%rs2, %rs1};", 0x56781234),
        ("redux.sync.min.s32 %r2, %r0, -1;", 0),
        ("redux.sync.max.s32 %r2, %r0, -1;", 31),
        ("shfl.sync.bfly.b32 %r2, %r0, 16, 31, -1;", 16),
        ("shfl.sync.idx.b32 %r2, %r0, 7, 31, -1;", 7),
        ("shfl.sync.down.b32 %r2, %r0, 3, 31, -1;", 3),
        ("shfl.sync.up.b32 %r2|%p1, %r0, 3, 0, -1; selp.b32 %r2, 1, 9, %p1;", 9),
    ],
)  # fmt: skip
def test_results(code: str, want: int) -> None:
    assert result(code) == want & 0xFFFFFFFF


def test_wide_and_narrow_registers() -> None:
    assert result("cvt.s64.s32 %rd20, -2;", "b64") == 2**64 - 2
    assert result("mov.b32 %r3, -2; cvt.u64.u32 %rd20, %r3;", "b64") == 2**32 - 2
    assert result("mad.wide.s32 %rd20, -3, 5, 1;", "b64") == 2**64 - 14
    assert result("mul.lo.s64 %rd20, 0x100000001, 3;", "b64") == 0x300000003
    assert result("cvt.u16.u32 %rs2, 0x12345678;", "b16") == 0x5678
    assert result("mov.b32 %r2, 0; mov.b16 %rs1, -1; cvt.u32.u16 %r2, %rs1;") == 0xFFFF


def test_one_rounding_of_a_product_and_a_sum() -> None:
    """Against fractions, also where a sum rounded in double precision lies in the middle of two floats."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(20_000).astype(np.float32) for _ in range(2))
    z = np.where(rng.random(20_000) < 0.5, -x * y, x * y * np.float32(2.0**-24)).astype(np.float32)
    x[:4], y[:4] = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12)  # the product ends in 2^-24
    z[:4] = [2.0**-70, -(2.0**-70), 0.0, 2.0**-23]
    x[4:8], y[4:8], z[4:8] = 2.0**-75, [2.0**-75, -(2.0**-75), 2.0**-74, 2.0**-76], 3 * 2.0**-149
    x[8:1000] *= np.float32(2.0**-70)
    y[8:1000] *= np.float32(2.0**-70)
    z[8:1000] *= np.float32(2.0**-140)
    found = fused_multiply_add(x, y, z)
    for a, b, c, d in zip(x, y, z, found, strict=True):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        near = [np.nextafter(d, np.float32(-INF)), d, np.nextafter(d, np.float32(INF))]
        errors = [abs(Fraction(float(value)) - exact) for value in near]
        assert errors[1] == min(errors), (a, b, c, d)
        if errors.count(min(errors)) == 2:
            assert int(d.view(np.uint32)) % 2 == 0, "ties go to even"


def test_bfloat16_is_rounded_to_the_nearest() -> None:
    x = torch.cat(
        [
            torch.randn(10_000),
            torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, INF, -INF, 3.4e38, 0.0, -0.0]),
        ]
    )
    assert np.array_equal(
        to_bfloat16(x.numpy()), x.bfloat16().view(torch.int16).numpy().view(np.uint16)
    )


def test_text_is_read_as_written() -> None:
    """Labels, guards, source lines, comments, blocks, and vectors among operands."""
    body = """
    .loc 1 12 5 // steps.py:12:5 @[ grad.py:3:4 @[ fused.py:177:86 ] ]
    // begin inline asm
    { .reg .pred %q; setp.eq.s32 %q, %r0, 3; }
    // end inline asm
    @!%p1 bra $L__BB0_2;
    $L__BB0_2: ld.global.v2.b32 { %r2, %r3 }, [%rd0+16];
    """
    head = '.file 1 "/somewhere/steps.py"\n'
    kernel = parse(
        head
        + TEXT.format(parameters=".param .u64 written_param_0", threads=32, loads="", body=body)
    )
    assert kernel.parameters == ("written_param_0",)
    compare, branch, load, _ret = kernel.code[-4:]
    assert (compare.opcode, compare.line) == ("setp.eq.s32", "steps.py:12")
    assert compare.callers == ("grad.py:3", "fused.py:177")
    assert (branch.guard, branch.negated, branch.operands) == ("%p1", True, ("$L__BB0_2",))
    assert load.operands == ("{ %r2, %r3 }", "[%rd0+16]")
    assert kernel.labels == {"$L__BB0_2": len(kernel.code) - 2}
    assert (kernel.bits("%rd7"), kernel.bits("%q"), kernel.bits("%p3")) == (64, 0, 0)
