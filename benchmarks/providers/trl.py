"""TRL 1.16's fused head: the op its GRPO trainer calls through `add_fused_lm_head`, with its chunk
size and outputs.

Where the trainer cannot be imported, whose needs are many, its op is used by itself, whose needs
are few.
"""

from __future__ import annotations

import importlib
import sys
import types
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from benchmarks.cases import Inputs
from benchmarks.providers import Forward, Scored, from_rows, without_init

OUTPUTS = ("log_probs", "entropy")  # what its GRPO trainer asks for


def trl(inputs: Inputs) -> Forward:
    """The op, with the policy loss in torch behind it; packed where TRL packs."""
    note, case = "", inputs.case
    try:
        from trl.trainer import utils

        op, chunk = utils._ChunkedLogProbFunction, utils._CHUNKED_LOGPROB_CHUNK_SIZE
    except Exception as error:
        op, chunk, note = (
            _alone("chunked_logprob").ChunkedLogProbFunction,
            32768,
            _without_the_trainer(error),
        )
    outputs = OUTPUTS[:1] if case.score and not case.wants_entropy else OUTPUTS

    def rows(hidden: Tensor, ids: Tensor) -> Scored:
        found = op.apply(hidden, inputs.weight, None, ids, 1.0, chunk, case.softcap, 1.0, outputs)
        return found[0], found[1] if "entropy" in outputs else None

    packs = importlib.import_module("trl.kernels.chunked_logprob")._use_triton(inputs.ids.device)
    return from_rows(inputs, rows, note, packs=packs)


def _without_the_trainer(error: Exception) -> str:
    return f"trl.kernels alone, without the trainer ({type(error).__name__}: {error})"[:300]


def _alone(name: str) -> Any:
    """A module of `trl.kernels`, where the trainers cannot be imported."""
    without_init("trl", "trl.kernels", "trl.trainer")
    utils = types.ModuleType("trl.trainer.utils")
    utils.maybe_gather_lm_head_ctx = lambda *_: nullcontext()  # type: ignore[attr-defined]
    sys.modules["trl.trainer.utils"] = utils
    return importlib.import_module(f"trl.kernels.{name}")
