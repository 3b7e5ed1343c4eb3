"""The Triton backend's thinning for tests whose tensors are on the CPU: it runs where Triton's kernels do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from grpo_kernels.backends.sparse import Entries, Thinned
from grpo_kernels.backends.triton_rows import TritonRows
from tests.support.row_cases import DEVICE


class TritonSparse:
    """Moves its arguments there, and what comes of them back."""

    def largest(self, d_logits: Tensor) -> Tensor:
        return _back(TritonRows().largest(*_there(d_logits)))

    def certain(self, d_logits: Tensor, top: Tensor, most: int) -> Entries:
        return _back(TritonRows().certain(*_there(d_logits, top), most))

    def errors(self, d_logits: Tensor, norms: Tensor, top: Tensor) -> Tensor:
        return _back(TritonRows().errors(*_there(d_logits, norms, top)))

    def thin(self, d_logits: Tensor, top: Tensor, k: Tensor, keys: Tensor, most: int, first_id: int = 0) -> Thinned:
        return _back(TritonRows().thin(*_there(d_logits, top, k, keys), most, first_id))

    def combine(self, entries: Entries, source: Tensor, out: Tensor, targets: Tensor | None = None) -> None:
        entries, source, sums, targets = _there(entries, source, out, targets)
        TritonRows().combine(entries, source, sums, targets)
        out.copy_(sums)


def _there(*arguments: Any) -> Any:
    return tree_map(lambda x: x.to(DEVICE) if isinstance(x, Tensor) else x, arguments)


def _back(results: Any) -> Any:
    return tree_map(torch.Tensor.cpu, results)
