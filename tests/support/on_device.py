"""What the tests on a device share: cases moved there, float64 truth, graphs, waits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.case_builder import Case
from tests.support.row_cases import same
from tests.support.run_case import run


def move(case: Case, to: Callable[[Tensor], Tensor]) -> Case:
    """The case with every tensor moved by `to`."""
    return replace(case, **{name: to(x) for name, x in case.tensors().items()})


def run_on(
    case: Case, device: torch.device, engine: str, backend: str
) -> tuple[SimpleNamespace, dict[str, Tensor | None]]:
    """What the tolerance looks at of the library's results for `case` on `device`, on the CPU."""
    return run_there(case, lambda x: x.to(device), Tensor.cpu, engine, backend)


def run_there(
    case: Case, to: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor], engine: str,
    backend: str,
) -> tuple[SimpleNamespace, dict[str, Tensor | None]]:  # fmt: skip
    output, grads = run(move(case, to), engine, backend=backend)
    found = {name: back(getattr(output, name).detach()) for name in ("loss", "logps", "entropies")}
    metrics = {name: back(x) for name, x in output.metrics.items()}
    returned = {name: None if x is None else back(x) for name, x in grads.items()}
    return SimpleNamespace(**found, metrics=metrics), returned


def leaves(
    device: torch.device, n: int, h: int, v: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (n, H), weight (V, H), ids (n,), seeded; the first two want gradients."""
    g = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(n, h, generator=g, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(v, h, generator=g, device=device) * (2.0 / h**0.5)).to(dtype)
    return hidden, weight.requires_grad_(), torch.randint(v, (n,), generator=g, device=device)


def truth(
    hidden: Tensor, weight: Tensor, ids: Tensor, coefficients: Tensor, at_once: int = 1024
) -> tuple[Tensor, Tensor, Tensor]:
    """Float64 log-probabilities (n,), and the gradients of ``sum(coefficients * logps)``."""
    h64, w64 = hidden.detach().double(), weight.detach().double()
    logps, d_hidden, d_weight = [], [], torch.zeros_like(w64)
    for rows in torch.arange(len(ids), device=ids.device).split(at_once):
        log_probs = torch.log_softmax(h64[rows] @ w64.t(), dim=1)
        target = torch.zeros_like(log_probs).scatter_(1, ids[rows, None], 1.0)
        dz = coefficients[rows, None].double() * (target - log_probs.exp())
        logps.append(log_probs.gather(1, ids[rows, None])[:, 0])
        d_hidden.append(dz @ w64)
        d_weight += dz.t() @ h64[rows]
    return torch.cat(logps), torch.cat(d_hidden), d_weight


def relative(got: Tensor | None, want: Tensor) -> float:
    """Norm of the error over the norm of what is wanted; NaN stays."""
    return float((got.detach().double() - want).norm() / want.norm().clamp(min=1e-30))


def same_bits(one: Any, other: Any) -> bool:
    """True if two results have the same tensors, bit for bit, and are equal in all else; NaN equals
    NaN, and None only None."""
    return all(
        same(x.detach(), y.detach())
        if isinstance(x, Tensor) and isinstance(y, Tensor)
        else type(x) is type(y) and x == y
        for x, y in zip(tree_leaves(one), tree_leaves(other), strict=True)
    )


def copy_of(result: Any) -> Any:
    """Detached copies of all tensors, which later runs do not overwrite."""
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, result)


class Graphed:
    """`function` of fixed tensors as a CUDA graph; on a CPU it is run again instead.

    Its results are the same tensors every time, as they are in a graph.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device) -> None:
        self._function, self._graph = function, None
        if device.type != "cuda":
            self.results = copy_of(function())
            return
        side = torch.cuda.Stream()  # what is compiled and allocated once must not be in the graph
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                function()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.results = function()

    def replay(self) -> Any:
        """Run it on what is in the tensors now."""
        if self._graph is not None:
            self._graph.replay()
        else:
            results = tree_leaves(self.results), tree_leaves(self._function())
            for old, new in zip(*results, strict=True):
                old.copy_(new)
        return self.results


def waits(function: Callable[[], Any]) -> list[str]:
    """Each wait for the device in `function`, in words."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [
        f"{w.filename.rpartition('/')[2]}:{w.lineno}"
        for w in caught
        if "called a synchronizing" in str(w.message)
    ]


def report(failures: Mapping[str, Exception], of: int) -> None:
    """Raise one error for all failures of a loop, so that a run tells as much as it can."""
    if failures:
        first = "\n".join(
            f"{name}: {type(e).__name__}: {str(e)[:300]}" for name, e in list(failures.items())[:12]
        )
        raise AssertionError(f"{len(failures)} of {of} failed:\n{first}")
