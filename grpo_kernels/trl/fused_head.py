"""TRL's fused language-model head, computed by our engines.

TRL 1.15 and 1.16 route every fused head (GRPO, RLOO, DPO, KTO, SFT, AsyncGRPO) through one autograd function, which
they look up at call time as ``trl.trainer.utils._ChunkedLogProbFunction``. `FusedHead` has the same ``apply`` and
returns the same five values. What a trainer knows about the rows is in `SCORING` and `CALL` meanwhile.
"""

from __future__ import annotations

import functools
import types
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from torch import Tensor

from grpo_kernels.base.checks import warn_once
from grpo_kernels.base.choices import Extra, LogitsDtype, choices
from grpo_kernels.call.output import Scores
from grpo_kernels.engine.request import Gather
from grpo_kernels.head.head import Head
from grpo_kernels.host import HostFunction, during
from grpo_kernels.logprob import linear_logprob
from grpo_kernels.transformers.call import measured_head
from grpo_kernels.trl.head import ModelHead
from grpo_kernels.trl.row_count import count_rows
from grpo_kernels.trl.scoring import CALL, HEAD_OF_MODEL, SCORING, ModelCall, Scoring

EXTRAS: tuple[Extra, ...] = choices(Extra)  # type: ignore[assignment]

Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class FusedHead:
    """Stand-in for TRL's autograd function: same call, same results, our engines."""

    @staticmethod
    @torch.compiler.disable  # a compiled model breaks its graph here: which rows count depends on data
    def apply(
        hidden: Tensor,  # (N, H)
        weight: Tensor | ModelHead,  # (V, H)
        bias: Tensor | None,  # (V,)
        targets: Tensor,  # (N,)
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", *EXTRAS),
    ) -> Results:
        """(logps, entropy, log_sum_sq_probs, mean_logits, is_top1), each (N,), None where `outputs` lacks the name.

        `chunk_size`, the width of TRL's tiles, is not used: the engine plans its own workspace.
        """
        scoring, call = SCORING.get(), CALL.get()
        options: dict[str, Any] = {
            "ids": targets,
            "entropy": "entropy" in outputs,
            "extras": tuple(name for name in EXTRAS if name in outputs),
            "temperature": temperature,
        }

        constants = constants_of(HEAD_OF_MODEL.get(), final_logit_softcapping, logit_scale)

        def score(hidden: Tensor, head: Head, gather: Gather | None) -> Scores:
            head = replace(head, logits_dtype=scoring.logits_dtype, **constants)
            return _score(
                scoring, call, hidden, head, run=replace(scoring.run, gather=gather), **options
            )

        if isinstance(weight, ModelHead):
            scores = weight.score(hidden, score)
        else:
            # ZeRO-3 partitions the weight again after the forward
            scores = score(
                hidden, Head(weight, bias), lambda: trl_utils.maybe_gather_lm_head_ctx(weight, bias)
            )
        return (
            scores.logps,
            scores.entropies,
            scores.log_sum_sq_probs,
            scores.mean_logits,
            scores.is_top1,
        )


# Modules that copy TRL's function when they are imported
ADDERS = [f"trl.trainer.{name}_trainer" for name in ("grpo", "rloo", "kto", "sft", "dpo")]
ADDERS.append("trl.experimental.async_grpo.async_grpo_trainer")


def add_fused_lm_head(model: Any, *args: Any, **kwargs: Any) -> None:
    """Do what TRL's function does; the head's constants are those of the model's own logits, measured.

    They are measured in the first call, if they are not known by then.
    """
    _theirs(model, *args, **kwargs)
    fused = model.forward.__func__

    @functools.wraps(fused)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head or not HEAD.is_ours():
            return fused(self, *args, fused_lm_head=fused_lm_head, **kwargs)
        with during(HEAD_OF_MODEL, measured_head(self, functools.partial(fused, self))):
            return fused(self, *args, fused_lm_head=True, **kwargs)

    model.forward = types.MethodType(forward, model)


def add_measured_lm_head(model: Any, *args: Any, **kwargs: Any) -> None:
    """Do the same, and measure the constants before anything is generated.

    Raises:
        ValueError: the model's logits are not one product of its body's output with the head.
    """
    add_fused_lm_head(model, *args, **kwargs)
    measured(model)


def measured(model: Any) -> Head | None:
    """Return `measured_head`, outside of a call of `model`; None where its parameters are not whole there."""
    kinds = {type(x).__name__ for x in model.parameters()}
    if kinds & {"DTensor", "FlatParameter"} or any(
        x.is_meta or hasattr(x, "ds_status") for x in model.parameters()
    ):
        return None
    return measured_head(model, model.forward)


def constants_of(measured: Head | None, cap: float | None, scale: float) -> dict[str, Any]:
    """Return the soft-cap and scale of a `measured` head by name; those of TRL, from the config, without one."""
    if measured is None:
        return {"final_logit_softcapping": cap, "logit_scale": scale}
    ours = measured.final_logit_softcapping, measured.logit_scale
    if cap != ours[0] or abs(scale - ours[1]) > 1e-6 * abs(ours[1]):
        warn_once(
            f"trl's head would use the soft-cap and scale {(cap, scale)}, from the config; the model's own logits have "
            f"{ours}, which are used, so that losses are the model's and not stock trl's"
        )
    return {"final_logit_softcapping": ours[0], "logit_scale": ours[1]}


def _score(scoring: Scoring, call: ModelCall, hidden: Tensor, head: Head, **options: Any) -> Scores:
    """Return the results (N,) of one head call on `hidden` (N, H); `options` are those of `linear_logprob`."""
    positions = _positions(call, hidden)
    rows = None if positions is None or call.rows is None else call.rows.at(positions)
    if rows is not None:
        options |= {"mask": rows.counted, "expected": rows.expected}
    with _operands_as_trls(hidden, scoring.logits_dtype):
        if call.compute is None:
            scores = linear_logprob(hidden, head, **options)
        else:
            scores = call.compute(hidden, head, positions, **options)
    if rows is not None:
        scores.logps = rows.filled(scores.logps)
    places, mask = (len(hidden), None) if rows is None else (call.passed, rows.counted)
    count_rows(scoring.shares, places, mask, (scores.logps, scores.entropies))
    return scores


def _positions(call: ModelCall, hidden: Tensor) -> Tensor | None:
    """Return the place (N,) of each row of `hidden` (N, H) in the batch's (B, T), -1 outside; None: unknown."""
    use_triton = getattr(
        trl_utils, "_use_triton", None
    )  # TRL 1.15 has none, and always passes only labelled rows
    positions = call.next_call(len(hidden), compact=use_triton is None or use_triton(hidden.device))
    if (
        positions is None or positions.device != hidden.device
    ):  # a head on another device than the batch
        return None
    return positions


def _operands_as_trls(hidden: Tensor, logits_dtype: LogitsDtype) -> AbstractContextManager[Any]:
    """Context in which products of 16-bit hidden states are in 16 bits, if `logits_dtype` is "input"."""
    kind = hidden.device.type
    if logits_dtype != "input" or hidden.dtype.itemsize != 2 or torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, hidden.dtype)


_theirs: Any = getattr(trl_utils, "add_fused_lm_head", None)
HEAD = HostFunction(
    trl_utils,
    "_ChunkedLogProbFunction",
    FusedHead,
    unknown="fused language-model head with the signature of trl 1.15 and 1.16; TRL works unchanged",
    needed=("add_fused_lm_head", "maybe_gather_lm_head_ctx"),
)
