"""Types to annotate your own code: the names that options accept, and a loss's keyword arguments.

::

    from grpo_kernels.typing import BackendName, LossFields

    def make_loss(backend: BackendName, **fields: Unpack[LossFields]) -> GRPOLoss:
        return GRPOLoss(run=Run(backend=backend), **fields)

A type checker does not accept a plain ``str`` as one of these names. Cast a string that is read at
run time, as in ``cast(BackendName, arguments.backend)``; `LossConfig` and the calls check its
value.
"""

from grpo_kernels.base import (
    AdvantageScale,
    AdvantageStd,
    BackendName,
    BatchLayout,
    CorrectionLevel,
    CorrectionMode,
    DivergenceName,
    EngineName,
    Extra,
    ImportanceSamplingLevel,
    KLEstimator,
    LogitsDtype,
    LossTypeName,
    OnMissingSet,
    RewardAggregation,
    SamplingMode,
    TopKDivergenceName,
    ZeroAdvantage,
)
from grpo_kernels.engine.plan import Gather
from grpo_kernels.head import HeadLike
from grpo_kernels.loss import LossInputKeywords
from grpo_kernels.objective.config import LossFields
from grpo_kernels.objective.custom import PerTokenLoss
from grpo_kernels.objective.expected import Expected

__all__ = [
    # names
    "AdvantageScale", "AdvantageStd", "BackendName", "BatchLayout", "CorrectionLevel",
    "CorrectionMode", "DivergenceName", "EngineName", "Extra", "ImportanceSamplingLevel",
    "KLEstimator", "LogitsDtype", "LossTypeName", "RewardAggregation", "SamplingMode",
    "TopKDivergenceName", "OnMissingSet", "ZeroAdvantage",
    # keyword arguments
    "LossFields", "LossInputKeywords",
    # arguments
    "Expected", "Gather", "HeadLike", "PerTokenLoss",
]  # fmt: skip
