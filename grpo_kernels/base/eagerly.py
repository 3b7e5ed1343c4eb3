"""Run a call outside the compiled graph.

This module is imported only while torch.compile traces, because the decorators of `torch.compiler`
load the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(
    reason="grpo_kernels: this call runs eagerly, since its rows and its engine depend on data; "
    "what stands before and after it is compiled"
)
def eagerly(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call `function` outside the graph; with ``fullgraph=True``, torch raises the reason above."""
    return function(*arguments, **options)
