"""The GRPO family of losses straight from hidden states: chunked, exact, without the (tokens, vocabulary) logits.

`grpo_loss` and its module `GRPOLoss` are the loss; `linear_logprob` is what other losses build on; `advantages` and
`rewards` make what the loss takes; `grpo_kernels.integrations` holds what connects it to trainers.
"""

from __future__ import annotations

import logging

from grpo_kernels import advantages, objectives, presets, rewards
from grpo_kernels.call import ops as ops  # which registers them, for graphs that were saved
from grpo_kernels.call.sparse import SparseGradient
from grpo_kernels.config import LossConfig
from grpo_kernels.divergence import linear_divergence, linear_divergence_with
from grpo_kernels.expectation import policy_expectation
from grpo_kernels.from_logps import policy_loss_from_logps
from grpo_kernels.head.lora import LoRA
from grpo_kernels.head.reference import ReferenceHead
from grpo_kernels.kept_set import kept_set_logprob
from grpo_kernels.logprob import Expectation, linear_logprob, linear_logprob_with
from grpo_kernels.loss import GRPOLoss, LossOutput, grpo_loss
from grpo_kernels.modules import LMHeadLogProb, attach
from grpo_kernels.objective.custom import TokenInputs, token_level
from grpo_kernels.topk_divergence import topk_divergence, topk_divergence_with

__version__ = "0.1.0"
logging.getLogger(__name__).addHandler(logging.NullHandler())  # what is said there is for its user to show

__all__ = [
    "Expectation",
    "GRPOLoss",
    "LMHeadLogProb",
    "LoRA",
    "LossConfig",
    "LossOutput",
    "ReferenceHead",
    "SparseGradient",
    "TokenInputs",
    "advantages",
    "attach",
    "grpo_loss",
    "kept_set_logprob",
    "linear_divergence",
    "linear_divergence_with",
    "linear_logprob",
    "linear_logprob_with",
    "objectives",
    "policy_expectation",
    "policy_loss_from_logps",
    "presets",
    "rewards",
    "token_level",
    "topk_divergence",
    "topk_divergence_with",
]
