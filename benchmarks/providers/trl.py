"""TRL 1.16's fused head: the op its GRPO trainer calls through `add_fused_lm_head`, with its chunk size and outputs."""

from __future__ import annotations

import importlib
import sys
import types

import torch
from torch import Tensor

from benchmarks.cases import Inputs
from benchmarks.providers import Forward, from_logps, without_init

OUTPUTS = ("log_probs", "entropy")  # what its GRPO trainer asks for


def trl(inputs: Inputs) -> Forward:
    """The op, with the policy loss in torch behind it. Masked positions are left out where TRL leaves them out."""
    note = ""
    try:
        from trl.trainer import utils

        op, chunk = utils._ChunkedLogProbFunction, utils._CHUNKED_LOGPROB_CHUNK_SIZE
    except Exception as error:  # the trainer's needs are many; the op's are few
        op, chunk = _op_alone(), 32768
        note = f"trl.kernels alone, without the trainer ({type(error).__name__}: {error})"[:300]
    case = inputs.case
    outputs = OUTPUTS[:1] if case.score and not case.wants_entropy else OUTPUTS
    counted = inputs.mask.bool()
    compact = case.padding > 0 and importlib.import_module("trl.kernels.chunked_logprob")._use_triton(inputs.ids.device)

    def whole(found: Tensor) -> Tensor:
        if not compact:
            return found.view(inputs.ids.shape)
        return found.new_zeros(counted.shape).masked_scatter(counted, found)  # as TRL pads it again

    def logps() -> tuple[Tensor, Tensor | None]:
        hidden = inputs.hidden[counted] if compact else inputs.hidden.reshape(-1, case.h)
        ids = inputs.ids[counted] if compact else inputs.ids.reshape(-1)
        found = op.apply(hidden, inputs.weight, None, ids, 1.0, chunk, case.softcap, 1.0, outputs)
        return whole(found[0]), whole(found[1]) if "entropy" in outputs else None

    return from_logps(inputs, logps, note)


def _op_alone() -> type[torch.autograd.Function]:
    stand_in_for_the_trainer()
    return importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction


def stand_in_for_the_trainer() -> None:
    """Make `trl.kernels` importable where the trainers are not, of which it wants one function."""
    from contextlib import nullcontext

    without_init("trl", "trl.kernels", "trl.trainer")
    utils = types.ModuleType("trl.trainer.utils")
    utils.maybe_gather_lm_head_ctx = lambda *_: nullcontext()  # type: ignore[attr-defined]
    sys.modules["trl.trainer.utils"] = utils
