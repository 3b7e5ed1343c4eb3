"""What ``python -m grpo_kernels`` reports of the environment: `collect` returns it as a dict, `render` as text."""

from grpo_kernels.diagnostics.report import collect, render

__all__ = ["collect", "render"]
