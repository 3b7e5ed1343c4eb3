"""Adapters to trainers, each imported at first use: it may need the package that it is named after.

`grpo_kernels.integrations.trl`: `FusedGRPOTrainer`, `patch_trl`, `unpatch_trl` (``pip install 'trl>=1.16'``).
`grpo_kernels.integrations.verl`: `patch_verl`, `unpatch_verl`; ``import verl`` calls `patch_verl` by itself.
`grpo_kernels.integrations.liger`: `LigerFusedLinearGRPOLoss`, which needs no Liger; `patch_liger`, `unpatch_liger`.
`grpo_kernels.integrations.transformers`: `causal_lm_loss`, `completion_logprobs`, `head_inputs`, for any causal LM.
"""

from __future__ import annotations

import importlib
from types import ModuleType

_ADAPTERS = ("liger", "transformers", "trl", "verl")


def __getattr__(name: str) -> ModuleType:
    if name in _ADAPTERS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(_ADAPTERS)}")
