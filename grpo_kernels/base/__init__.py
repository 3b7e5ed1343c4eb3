"""What every part of the library shares.

This file has the version, and the names that options accept, as types: type checkers and the checks
at run time both read them. The helpers know no loss and no head:

- `checks`: checks of arguments.
- `distributed`: collectives.
- `tensors`: records of tensors, sums, quantiles, sampling ratios, sequences of a batch.
- `modes`: modules in evaluation mode, and calls that leave no trace.
- `eagerly`: a call outside the compiled graph.
"""

from typing import Literal, get_args

VERSION = "0.1.0"  # as in pyproject.toml

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

EXTRAS = get_args(Extra)
