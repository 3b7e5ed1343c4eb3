"""`grpo_kernels.diagnostics.report` under its documented name."""

from grpo_kernels.diagnostics.report import collect, render

__all__ = ["collect", "render"]
