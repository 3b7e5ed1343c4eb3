"""Report of the environment, as ``python -m grpo_kernels`` prints it: `collect` returns a dict, `render` the text."""

from grpo_kernels.diagnostics.report import collect, render

__all__ = ["collect", "render"]
