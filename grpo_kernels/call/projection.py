"""How the rows of a call are projected: dtype, backend, budget, engine; for the loss and log-probabilities alike."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends import check_backend, choose_backend
from grpo_kernels.backends.interface import STATISTICS, DotRowBackend
from grpo_kernels.base.checks import (
    check_budget,
    check_counted_ids,
    check_head,
    check_ids,
    check_mask,
    check_shape,
    check_tensor,
)
from grpo_kernels.batch.tokens import counted_positions
from grpo_kernels.config import LossConfig
from grpo_kernels.engine.gradients import Wants
from grpo_kernels.engine.memory import Room, default_workspace
from grpo_kernels.engine.operands import Head, HeadConfig, Rows
from grpo_kernels.engine.plan import Coupling, check_engine, choose_engine
from grpo_kernels.engine.vocab_parallel import Shard, widest_part
from grpo_kernels.head.lora import LoRA, check_lora


def check_options(engine: Any, backend: Any, workspace_bytes: Any) -> None:
    """Raise unless they are what calls take, before there is a call: whether they can serve it, it finds out."""
    check_engine(engine)
    check_backend(backend)
    if workspace_bytes is not None:
        check_budget(workspace_bytes)


def compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """What the products' operands are rounded to: autocast's dtype within autocast, else that of the tensors."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if dtype != torch.float64 and torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return dtype


def warn_if_promoted(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    """Warn, once, of products in fp32 that the tensors' dtypes ask for and nobody may have meant.

    That is with a 16-bit weight, on a GPU that would multiply 16-bit operands an order of magnitude faster. An fp32
    weight is kept on purpose.
    """
    mixes = weight.is_cuda and torch.version.hip is None
    if mixes and dtype == torch.float32 and weight.dtype.itemsize == 2:
        _warn_of_promotion(hidden.dtype, weight.dtype)


@functools.cache
def _warn_of_promotion(hidden: torch.dtype, weight: torch.dtype) -> None:
    warnings.warn(
        f"grpo_kernels: hidden in {hidden} with a weight in {weight}, outside autocast, is multiplied in "
        "torch.float32, which takes a GPU about ten times as long as 16 bits. Cast hidden to the weight's dtype, or "
        "call within torch.autocast; if float32 is meant, cast the weight to it",
        RuntimeWarning,
        stacklevel=3,
    )


def plan_rows(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    ids: Tensor,  # (...)
    *,
    bias: Tensor | None,
    mask: Tensor | None,
    temperature: float | Tensor,
    final_logit_softcapping: float | None,
    logit_scale: float,
    logits_dtype: str,
    outputs: tuple[str, ...],
    engine: str,
    backend: str,
    workspace_bytes: int | None,
    wants: Wants | None = None,
    dtype: torch.dtype | None = None,
    lora: LoRA | None = None,
) -> tuple[HeadConfig, Rows, Wants]:
    """Check the arguments of `linear_logprob_with`: how to project, which rows, and the gradients wanted.

    `wants` and `dtype` are read off the tensors and autocast if not given. Only at its end does it wait for the device.
    The ids are as they came: `read_rows` looks at them.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it.
    """
    check_head(hidden, weight, bias)
    check_lora(lora, hidden, weight)
    check_ids("ids", ids, hidden)
    if mask is not None:
        check_mask("mask", mask, ids)
    unknown = set(outputs) - {"entropy", *STATISTICS}
    if unknown:
        raise ValueError(f"outputs: expected some of entropy, {', '.join(STATISTICS)}, got {sorted(unknown)}")
    per_row = isinstance(temperature, Tensor)
    spec = LossConfig(
        temperature=1.0 if per_row else temperature,  # type: ignore[arg-type]
        final_logit_softcapping=final_logit_softcapping,
        logit_scale=logit_scale,
        logits_dtype=logits_dtype,
    )
    wants = wanted(hidden, weight, bias, lora) if wants is None else wants
    config = head_config(hidden, weight, wants, spec, backend, workspace_bytes, dtype, engine=engine)
    positions = counted_positions("mask", mask, ids)
    inv_t: float | Tensor = 1.0 / spec.temperature
    if per_row:
        inv_t = row_temperatures(temperature, ids, positions, config.accumulator)
    return config, Rows(positions, ids.detach().reshape(-1)[positions].long(), inv_t), wants


def head_config(
    hidden: Tensor,
    weight: Tensor,
    wants: Wants,
    spec: LossConfig,
    backend: str,
    workspace_bytes: int | None,
    dtype: torch.dtype | None = None,
    *,
    engine: str,
) -> HeadConfig:
    """How rows of a whole head are projected: the options of `spec`, and `dtype`, by default `compute_dtype`.

    `engine` is the one asked for: only where it is ``"auto"`` is it looked at whether memory is short.
    """
    if workspace_bytes is not None:
        check_budget(workspace_bytes)
    if dtype is None:
        dtype = compute_dtype(hidden, weight)
    warn_if_promoted(hidden, weight, dtype)
    room = Room.of(weight, wants, dtype, workspace_bytes, asks_tight=engine == "auto")
    if workspace_bytes is None:
        workspace_bytes = default_workspace(weight, wants, ample=room.ample)
    chosen, _ = choose_backend(backend, hidden.device, dtype)
    return HeadConfig(
        backend=chosen,
        compute_dtype=dtype,
        workspace_bytes=workspace_bytes,
        scale=float(spec.logit_scale),
        softcap=spec.final_logit_softcapping,
        round_logits=spec.logits_dtype == "input" and dtype.itemsize < 4,
        room=room,
    )


def of_shard(
    config: HeadConfig, shard: Shard | None, weight: Tensor, wants: Wants, workspace_bytes: int | None
) -> HeadConfig:
    """`config` where this rank's `weight` is `shard` of the head: planned by what is the same on all ranks."""
    if shard is None:
        return config
    if workspace_bytes is None:
        workspace_bytes = default_workspace(widest_part(weight, shard), wants, ample=shard.room.ample)
    return replace(config, shard=shard, room=shard.room, workspace_bytes=workspace_bytes)


def pick_engine(
    coupling: Coupling,
    wants: Wants,
    config: HeadConfig,
    *,
    entropy_gradient: bool,
    engine: str,
    only_logps: bool = True,
) -> str:
    """`choose_engine` for this head, on this device."""
    return choose_engine(
        coupling,
        hidden_trains=wants.hidden,
        head_trains=wants.head,
        entropy_gradient=entropy_gradient,
        tight_memory=config.room.tight,
        scores_without_logits=only_logps and isinstance(config.backend, DotRowBackend),
        engine=engine,
    )


def read_rows(name: str, rows: Rows, vocab: int, shard: Shard | None = None) -> Rows:
    """`rows`, once their ids have been looked at; `vocab` is this rank's, if there is a shard."""
    ids = rows.ids
    invalid = check_counted_ids(name, ids, vocab if shard is None else shard.vocab)
    start, marked = 0 if shard is None else shard.start, None
    if invalid is not None:
        ids, marked = ids.masked_fill(invalid, 0), ids.masked_fill(invalid, -1)
    return replace(rows, ids=ids - start if start else ids, invalid=invalid, marked=marked)


def wanted(hidden: Tensor, weight: Tensor, bias: Tensor | None, lora: LoRA | None = None) -> Wants:
    """Which gradients autograd will ask for; none where it is off."""
    if not torch.is_grad_enabled():
        return Wants()
    found = Wants(hidden.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)
    if lora is None:
        return found
    x = hidden if lora.input is None else lora.input
    return replace(found, u=x.requires_grad or lora.a.requires_grad, b=lora.b.requires_grad)


def head_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, lora: LoRA | None, rows: Rows) -> Head:
    """The head's tensors as the engines take them, for `rows`."""
    u = None if lora is None else lora.project(hidden, rows.positions)
    return Head(hidden.reshape(-1, hidden.shape[-1]), weight, bias, u, None if lora is None else lora.b)


def row_temperatures(temperature: Any, ids: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """1 / temperature of the rows at `positions` (n,), (n, 1), from one temperature a position."""
    check_tensor("temperature", temperature, like=ids, floating=True)
    check_shape("temperature", temperature, ("that of the ids", tuple(ids.shape)))
    rows = temperature.detach().reshape(-1)[positions].to(dtype)
    bad = ~((rows > 0) & torch.isfinite(rows))
    if rows.device.type == "cpu" and bool(bad.any()):
        raise ValueError(f"temperature: expected finite numbers > 0 where the mask counts, got {rows[bad][0].item()}")
    return (1.0 / rows)[:, None]
