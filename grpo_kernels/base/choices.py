"""Names that options accept, as types. Type checkers and the checks at run time both read them."""

from __future__ import annotations

from typing import Any, Literal, get_args

LossTypeName = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "gmpo"]
ImportanceSamplingLevel = Literal["token", "sequence"]
KLEstimator = Literal["k1", "k2", "k3", "full"]
SamplingMode = Literal[
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "sequence_mean_mask"
]
LogitsDtype = Literal["float32", "input"]

EngineName = Literal["auto", "score", "frozen", "one_pass", "two_pass", "lean"]
BackendName = Literal["auto", "torch", "triton", "cpp"]

ZeroAdvantage = Literal["score", "skip", "train"]
# A call uses the first exact layout in this order, beginning with the requested one.
BatchLayout = Literal["tree", "trim", "padded"]

# additional results of `linear_logps`
Extra = Literal["log_sum_sq_probs", "mean_logits", "is_top1"]
DivergenceName = Literal["reverse_kl", "forward_kl", "jsd"]
TopKDivergenceName = Literal["forward_kl", "reverse_kl"]
OnMissingSet = Literal["error", "full"]

AdvantageScale = Literal["group", "batch", "mean", "none"]
AdvantageStd = Literal["sample", "population"]
RewardAggregation = Literal["sum_then_normalize", "normalize_then_sum"]

CorrectionLevel = Literal["token", "sequence", "geometric"]
CorrectionMode = Literal["truncate", "mask"]


def choices(names: Any) -> tuple[str, ...]:
    """List the names that a type of this file allows, in its order."""
    return get_args(names)


EXTRAS = choices(Extra)
