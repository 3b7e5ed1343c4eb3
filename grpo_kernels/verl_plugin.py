"""Entry point that ``import verl`` loads (group ``verl.plugins``): importing it calls `patch_verl`.

verl logs a plug-in's errors where they are easily missed, so an error here is also a warning.
"""

import warnings

try:
    from grpo_kernels.verl import patch_verl

    patch_verl()
except Exception as error:
    warnings.warn(
        "grpo_kernels: the plug-in for verl failed to load, so impl_backend=grpo_kernels is not "
        f"available: {error!r}",
        RuntimeWarning,
        stacklevel=2,
    )
    raise
