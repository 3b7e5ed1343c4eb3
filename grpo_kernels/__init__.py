"""GRPO-family losses computed from hidden states, without storing (tokens, vocabulary) logits.

::

    out = grpo_loss(hidden, model.lm_head.weight, completion_ids, completion_mask, advantages)
    out.loss.backward()

    loss               grpo_loss, or the module GRPOLoss; they return LossOutput with Metrics
      options          LossConfig; presets: published algorithms
      your own loss    objectives, TokenInputs, token_level
      from log-probs   policy_loss_from_logps
    log-probabilities  linear_logps, which returns Scores
    distillation       linear_divergence, topk_divergence, which return Scores
    a whole model      transformers.causal_lm_loss, .causal_lm_logps, .causal_lm_divergence
    head of a model    Head, LoRA
    engine, memory     Run
    before the loss    advantages, rewards, rollouts
    rarely needed      KeptIds (truncated sets); Expectation, policy_expectation (gradient hints)
    trainers           trl, verl, liger, transformers: modules, imported on first use
    annotations        typing

``help(grpo_kernels.grpo_loss)`` and so on describe the arguments; ``python -m grpo_kernels``
reports the environment and checks results against float64. Everything on the API
page (docs/api/core.md) is public; everything else may change in any release.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from grpo_kernels import advantages, objectives, presets, rewards, rollouts
from grpo_kernels import typing as typing  # not in __all__: import * would hide Python's
from grpo_kernels.base import VERSION
from grpo_kernels.base.checks import did_you_mean, no_name
from grpo_kernels.engine.plan import Run
from grpo_kernels.head import Head, LoRA
from grpo_kernels.kept_ids import KeptIds
from grpo_kernels.loss import GRPOLoss, grpo_loss, policy_expectation, policy_loss_from_logps
from grpo_kernels.objective.config import LossConfig, preset_hint
from grpo_kernels.objective.custom import TokenInputs, token_level
from grpo_kernels.objective.expected import Expectation
from grpo_kernels.objective.metrics import Metrics
from grpo_kernels.results import LossOutput, Scores
from grpo_kernels.scores import linear_divergence, linear_logps, topk_divergence

__version__ = VERSION
logging.getLogger(__name__).addHandler(logging.NullHandler())  # the application decides

__all__ = [
    "Expectation",
    "GRPOLoss",
    "Head",
    "KeptIds",
    "LoRA",
    "LossConfig",
    "LossOutput",
    "Metrics",
    "Run",
    "Scores",
    "TokenInputs",
    "advantages",
    "grpo_loss",
    "linear_divergence",
    "linear_logps",
    "objectives",
    "policy_expectation",
    "policy_loss_from_logps",
    "presets",
    "rewards",
    "rollouts",
    "token_level",
    "topk_divergence",
]


_TRAINERS = ("liger", "transformers", "trl", "verl")
_OF_TRAINERS = {
    "transformers": ("causal_lm_divergence", "causal_lm_logps", "causal_lm_loss", "describe_head"),
    "trl": ("FusedGRPOTrainer", "patch_trl"),
    "verl": ("patch_verl",),
    "liger": ("LigerFusedLinearGRPOLoss", "patch_liger"),
}  # to say where a name is

if TYPE_CHECKING:
    from grpo_kernels import liger as liger
    from grpo_kernels import transformers as transformers
    from grpo_kernels import trl as trl
    from grpo_kernels import verl as verl
else:

    def __getattr__(name: str) -> Any:
        """Import a trainer's module on first use, since it may need that trainer's package."""
        if name in _TRAINERS:
            return importlib.import_module(f"{__name__}.{name}")
        ours = (advantages, presets, rewards, rollouts)
        homes = {y: x.__name__ for x in ours for y in x.__all__}
        homes |= {y: f"{__name__}.{x}" for x, names in _OF_TRAINERS.items() for y in names}
        if name in homes:
            raise no_name(__name__, name, f"; it is in {homes[name]}")
        hint = preset_hint(name) or did_you_mean(name, [*__all__, *_TRAINERS, *homes])
        hint += next((f" It is in {homes[x]}" for x in homes if f"mean {x}?" in hint), "")
        raise no_name(__name__, name, hint)


def __dir__() -> list[str]:
    """List the public names, without the modules that define them."""
    return [*__all__, "typing", *(name for name in globals() if name.startswith("__"))]
