"""Entry point that ``import verl`` loads (group ``verl.plugins``); importing it calls `patch_verl`.

verl logs errors of a plug-in where you can easily miss them, so this module also warns.
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
