"""torch's counter of floating-point operations, with products that its table lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def counter() -> FlopCounterMode:
    """A counter of products, in place, of grouped experts and of attention on a CPU too."""
    aten = torch.ops.aten
    formulas = {
        aten.addmm: addmm,  # torch's own does not take ``out_dtype``
        aten.addmm_: addmm,
        aten._grouped_mm: _grouped_mm,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


def addmm(_self: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Of shapes (n, k) and (k, m); whatever else is given."""
    return int(2 * a[0] * a[1] * b[1])


def _grouped_mm(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return int(
        2 * a[0] * a[1] * b[-1]
    )  # the groups cut the first dimension of `a`, or the inner one


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Of shapes (batch, heads, tokens, width); torch 2.11 counts no heads that share keys."""
    return int(2 * query[0] * query[1] * query[2] * key[2] * (key[3] + value[3]))


def _attention_backward(_grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """The scores again, their gradient, and those of queries, keys and values."""
    return int(2 * query[0] * query[1] * query[2] * key[2] * (3 * key[3] + 2 * value[3]))
