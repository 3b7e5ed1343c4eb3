"""The registered ops (`grpo_kernels/compiled/ops`): their schemas, and the key of a config. (Calls: test_modes.py.)"""

from __future__ import annotations

import random
from enum import Enum
from typing import Any

import numpy
import pytest
import torch

from grpo_kernels import LossConfig
from grpo_kernels.compiled.ops import linear_logprob, policy_loss
from grpo_kernels.objective.config import config_of

OPS = {
    name: getattr(torch.ops.grpo_kernels, name).default
    for name in ("policy_loss", "linear_logprob", "linear_logprob_backward")
}


@pytest.mark.parametrize("op", OPS)
def test_schema_mutates_and_aliases_nothing(op: str) -> None:
    schema = OPS[op]._schema
    assert not schema.is_mutable
    assert all(x.alias_info is None for x in (*schema.arguments, *schema.returns))
    assert torch.Tag.pt2_compliant_tag in OPS[op].tags
    assert torch.Tag.cudagraph_unsafe in OPS[op].tags  # row counts are read


def test_schemas_name_what_the_code_names() -> None:
    def names(values: Any) -> tuple[str, ...]:
        return tuple(x.name for x in values)

    schemas = {name: op._schema for name, op in OPS.items()}
    assert names(schemas["policy_loss"].arguments) == policy_loss.Arguments._fields
    assert names(schemas["policy_loss"].returns) == policy_loss.LossResults._fields
    assert names(schemas["linear_logprob"].returns) == linear_logprob.ScoreResults._fields
    for name in ("linear_logprob", "linear_logprob_backward"):
        assert names(schemas[name].arguments)[-9:] == linear_logprob.Settings._fields


def test_config_survives_its_key() -> None:
    """Whatever types its values came in."""

    class Kind(str, Enum):
        GSPO = "sequence"

    for config in (
        LossConfig(),
        LossConfig(
            epsilon=numpy.float32(0.1),
            beta=numpy.float64(0.3),
            max_completion_length=numpy.int64(7),
        ),
        LossConfig(importance_sampling_level=Kind.GSPO, delta=3, top_entropy_quantile=0.3),
        LossConfig(epsilon=random.random(), kl_estimator="k1", use_bias_correction_kl=False),
    ):
        assert config_of(config.key) == config
        assert config_of(config.key).key == config.key
