"""``python -m benchmarks.gpu --check-peers``: what it finds of peers, and how it catches and compiles their kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import check_peers
from benchmarks.gpu.meta_gpu import GPU, pretended
from benchmarks.harness.child import ROOT, environment

pytest.importorskip("triton")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: x for name, x in environment(toy=False).items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_peer_and_one_that_is_not_there(tmp_path: Path) -> None:
    """TRL's two kernels compile for sm_90; a peer that cannot be imported fails the gate and says what it lacks."""
    out = tmp_path / "peers.json"
    done = python("-m", "benchmarks.gpu", "--check-peers", "--providers", "trl", "quack", "--out", str(out))
    found = json.loads(out.read_text())["checked_peers"]
    assert found["trl"]["importable"] == "installed", done.stdout + done.stderr
    assert found["trl"]["kernels"] == {"_forward_kernel": "compiles", "_backward_kernel": "compiles"}
    assert "| `trl` | installed | `_forward_kernel`, `_backward_kernel` |  |" in done.stdout
    try:
        metadata.version("quack-kernels")
    except metadata.PackageNotFoundError:
        assert done.returncode == 1
        assert found["quack"]["importable"] == "no"
        assert "No module named 'quack'" in found["quack"]["reason"]


KERNELS = """
import torch, triton
import triton.language as tl
from benchmarks.gpu.meta_gpu import pretended
from benchmarks.gpu.peer_kernels import caught, compiled

@triton.autotune([triton.Config({"BLOCK": size}) for size in (64, 128)], key=["n"])
@triton.heuristics({"EVEN": lambda given: given["n"] % given["BLOCK"] == 0})
@triton.jit
def good(x, y, n, scale, flag, BLOCK: tl.constexpr, EVEN: tl.constexpr, EXTRA: tl.constexpr = 1):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offs) if EVEN else tl.load(x + offs, mask=offs < n, other=0.0)
    tl.store(y + offs, value * scale + EXTRA, mask=offs < n)

@triton.jit
def bad(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.nonsense(BLOCK))

with pretended(), caught() as launches:
    x = torch.empty(1000, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x, dtype=torch.float32)
    assert x.is_cuda and y.device.type == "cuda"
    for _ in range(3):
        good[(8,)](x, y, 1000, 0.5, True)
    bad[(1,)](x, BLOCK=100)
assert len(launches) == 2, launches
assert launches[0].constexprs[(5,)] == 64, launches[0]
for name, how in compiled(launches).items():
    print(name, how.split(":")[0])
"""


def test_launches_are_caught_and_compiled(tmp_path: Path) -> None:
    """By place or by name, autotuned, with defaults; each different one once; what does not compile is told."""
    script = tmp_path / "kernels.py"
    script.write_text(KERNELS)
    done = python(str(script))
    assert done.stdout == "good compiles\nbad CompilationError\n", done.stdout + done.stderr


def test_what_pretends_to_be_a_gpu() -> None:
    """Tensors without memory that say they are CUDA's, products with another dtype too; all as before afterwards."""
    before = torch.empty
    with pretended():
        x = torch.empty(4, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        wide = torch.mm(x.detach(), x.detach().t(), out_dtype=torch.float32)
        assert (wide.shape, wide.dtype, wide.is_cuda) == ((4, 4), torch.float32, True)
        (x.float().sum() + torch.zeros((), device=x.device)).backward()
        assert x.grad is not None
        assert x.grad.device == GPU
        assert torch.ones(2).device.type == "cpu"
    assert torch.empty is before
    assert x.device.type == "meta"
    assert not x.is_cuda


def test_the_table() -> None:
    found = {
        "a": {"importable": "wheel", "kernels": {"k": "compiles"}, "reason": ""},
        "b": {"importable": "wheel", "kernels": {"k": "compiles", "l": "CompilationError: x|y"}, "reason": ""},
        "c": {"importable": "no", "kernels": {}, "reason": "No module named 'c'"},
        "d": {"importable": "installed", "kernels": {}, "reason": ""},
    }
    assert check_peers.table(found)[2:] == [
        "| `a` | wheel | `k` |  |",
        "| `b` | wheel | `k` | l: CompilationError: x/y |",
        "| `c` | no |  | No module named 'c' |",
        "| `d` | installed |  |  |",
    ]
    assert [check_peers.is_well(x) for x in found.values()] == [True, False, False, True]
    assert check_peers.summary(found["d"]) == "launches no Triton kernel of its own"
