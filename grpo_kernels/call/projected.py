"""Log-probabilities whose product with the head is the caller's: for the bits of a sampler.

The products of the other calls are those of `engine/products.py`, chosen for speed and an fp32 result. A sampler has
its own: batch-invariant kernels that it has registered for ``aten::mm``, or calls by name. Here each chunk of rows is
multiplied by one call over the whole vocabulary, and then goes the way of a sampler's logits: fp32, bias, soft-cap,
division by the temperature, ``aten::_log_softmax``. The backward makes the same logits again and differentiates them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.call.logprob import ScoreInputs
from grpo_kernels.call.options import Execution, Project
from grpo_kernels.call.output import Scores
from grpo_kernels.call.plan import check_call
from grpo_kernels.engine.first_order import first_order
from grpo_kernels.engine.head_plan import HeadPlan
from grpo_kernels.engine.records import Rows
from grpo_kernels.head.lm_head import LMHead

COPIES = 6  # of a chunk's logits, in the accumulator's dtype, while they are differentiated


@dataclass(frozen=True, eq=False)
class _Call:
    """A checked call: its rows, n of them, and how they are projected."""

    rows: Rows
    plan: HeadPlan
    project: Project
    temperature: float | Tensor  # a number, or (n, 1)
    entropy: bool

    def chunks(self, vocab: int) -> list[slice]:
        """Return the rows, in chunks that keep within the workspace."""
        bytes_a_row = vocab * (self.plan.compute_dtype.itemsize + COPIES * self.plan.accumulator.itemsize)
        size, n = max(1, self.plan.workspace_bytes // bytes_a_row), len(self.rows)
        return [slice(start, min(start + size, n)) for start in range(0, n, size)]

    def projected(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the product (m, V) of some rows (m, H) with the weight (V, H), in the accumulator's dtype.

        Raises:
            TypeError, ValueError: a callable's result is no such tensor.
        """
        dtype, want = self.plan.compute_dtype, (hidden.shape[0], weight.shape[0])
        found = self.project(hidden.to(dtype), weight.to(dtype).t())
        if not isinstance(found, Tensor) or not found.is_floating_point():
            raise TypeError(f"projection: expected it to return floating-point logits, got {type(found).__name__}")
        if tuple(found.shape) != want:
            raise ValueError(f"projection: expected it to return {want}, got {tuple(found.shape)}")
        return found.to(self.plan.accumulator)

    def scores(self, logits: Tensor, bias: Tensor | None, chunk: slice) -> tuple[Tensor, ...]:
        """Return the log-probabilities (m,) and, if asked for, entropies (m,) of projected rows (m, V)."""
        plan, temperature = self.plan, self.temperature
        if bias is not None:
            logits = logits + bias
        if plan.scale != 1.0:
            logits = logits * plan.scale
        if plan.softcap is not None:
            logits = plan.softcap * torch.tanh(logits / plan.softcap)
        logits = logits / (temperature[chunk] if isinstance(temperature, Tensor) else temperature)
        logps = torch.log_softmax(logits, dim=-1)
        chosen = logps.gather(1, self.rows.ids[chunk, None])[:, 0]
        return (chosen, -(logps.exp() * logps).sum(dim=-1)) if self.entropy else (chosen,)


@first_order
class _ProjectedLogprob(torch.autograd.Function):
    """``forward(ctx, call, hidden, weight, bias)`` -> log-probabilities (n,) and, if asked for, entropies (n,)."""

    @staticmethod
    def forward(ctx: Any, call: _Call, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(hidden, weight, bias)
        wide = None if bias is None else bias.to(call.plan.accumulator)
        results = hidden.new_empty(1 + call.entropy, len(call.rows), dtype=call.plan.accumulator)
        for chunk in call.chunks(weight.shape[0]):
            results[:, chunk] = torch.stack(call.scores(call.projected(hidden[chunk], weight), wide, chunk))
        return results.unbind()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        call, (hidden, weight, bias) = ctx.call, ctx.saved_tensors
        wide = None if bias is None else bias.to(call.plan.accumulator)
        sums = _Sums(call.plan, hidden, weight, bias, ctx.needs_input_grad[1:])
        for chunk in call.chunks(weight.shape[0]):
            logits = call.projected(hidden[chunk], weight).requires_grad_()
            with torch.enable_grad():
                results = call.scores(logits, wide, chunk)
            arrived = [(x, g[chunk]) for x, g in zip(results, upstream, strict=True) if g is not None]
            if arrived:
                (d_logits,) = torch.autograd.grad([x for x, _ in arrived], logits, [g for _, g in arrived])
                sums.add(d_logits, chunk)
        return None, *sums.gradients()


class _Sums:
    """Gradients of hidden states (n, H), weight (V, H) and bias (V,), summed over chunks in the accumulator's dtype."""

    def __init__(
        self, plan: HeadPlan, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]
    ) -> None:
        # The range of fp16 is too small for d logits; its products are done in fp32.
        dtype = torch.float32 if plan.compute_dtype == torch.float16 else plan.compute_dtype
        self._products, self._tensors = replace(plan, compute_dtype=dtype).products(weight), (hidden, weight, bias)
        self._sums = [
            torch.zeros_like(x, dtype=plan.accumulator) if needs and x is not None else None
            for x, needs in zip(self._tensors, needed, strict=True)
        ]

    def add(self, d_logits: Tensor, chunk: slice) -> None:
        """Add what the rows of `chunk`, with `d_logits` (m, V), contribute."""
        hidden, (d_hidden, d_weight, d_bias) = self._tensors[0], self._sums
        if d_bias is not None:
            d_bias += d_logits.sum(dim=0)
        d_logits = d_logits.to(self._products.gradient_dtype)
        if d_hidden is not None:
            self._products.d_hidden(d_logits, d_hidden[chunk])
        if d_weight is not None:
            self._products.d_weight(d_logits, self._products.operand(hidden[chunk]), d_weight, first=False)

    def gradients(self) -> list[Tensor | None]:
        """Return the sums, each in the dtype of its tensor."""
        pairs = zip(self._sums, self._tensors, strict=True)
        return [None if x is None or y is None else x.to(y.dtype) for x, y in pairs]


def projected_logprob(inputs: ScoreInputs, head: LMHead, execution: Execution) -> Scores:
    """Make the call with ``execution.projection``; results as those of `score`.

    Raises:
        TypeError, ValueError: a wrong argument, or one that has no use here; the message names it.
    """
    project = _project(inputs, head, execution)
    planned, rows, _ = check_call(inputs, head, replace(execution, backend="torch"))
    temperature = inputs.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().reshape(-1)[rows.positions, None].to(planned.plan.accumulator)
    call = _Call(rows, planned.plan, project, temperature, inputs.entropy)
    hidden = planned.head.hidden.reshape(-1, planned.head.hidden.shape[-1])[rows.positions]
    found = _ProjectedLogprob.apply(call, hidden, planned.head.weight, planned.head.bias)
    if rows.invalid is not None:
        found = (found[0].masked_fill(rows.invalid, torch.nan), *found[1:])
    ids = inputs.ids
    whole = [x.new_zeros(ids.numel()).index_put((rows.positions,), x).view(ids.shape) for x in found]
    return Scores(*whole)


def _project(inputs: ScoreInputs, head: LMHead, execution: Execution) -> Project:
    projection = execution.projection
    if not callable(projection) and projection != "dispatch":
        raise ValueError(f"projection: expected 'library', 'dispatch' or a function, got {projection!r}")
    used = {
        "process_group": head.grouped().process_group is not None,
        "lora": head.lora is not None,
        "vocab_size": head.vocab_size is not None,
        "expected": inputs.expected is not None,
        "extras": bool(inputs.extras),
        "engine": execution.engine != "auto",
        "backend": execution.backend != "auto",
        "gather": execution.gather is not None,
        "logits_dtype": head.logits_dtype != "float32",
    }
    for name, is_used in used.items():
        if is_used:
            raise ValueError(f"{name}: expected its default with projection = {projection!r}, got another value")
    return projection if callable(projection) else torch.mm
