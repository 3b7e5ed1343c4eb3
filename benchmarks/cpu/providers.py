"""One adapter for each way to compute the loss and its gradients, each used as its users would.

======================= ===============================================================================================
ours, ours/torch        `GRPOLoss` with engine "auto"; its backend is the one asked for, or torch
products                the matrix products that `ours` makes, and nothing else: what it cannot be faster than
eager                   all logits at once, `torch.log_softmax`, and the tokens' picked from that
eager/selective         the same by TRL's `selective_log_softmax`, which keeps no log-probability of other tokens
trl                     the head function of TRL's GRPO trainer, which gives entropies, and the loss in torch
liger                   `LigerFusedLinearGRPOLoss(compiled=False)`, a sequence at a time, its default
======================= ===============================================================================================

``ours@128``, ``products@128``: with a workspace of 128 MiB, not the default of 512. Ours gives entropies as TRL does;
Liger and eager do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu import providers as gpu_providers
from benchmarks.gpu.cases import EPSILON, Inputs, policy_loss
from benchmarks.gpu.events import Absence
from benchmarks.gpu.providers import Step
from benchmarks.gpu.reference import Outcome
from grpo_kernels import GRPOLoss
from grpo_kernels.backends import choose_backend
from grpo_kernels.engine.products import Products

PROVIDERS = ("ours", "ours@128", "ours/torch", "products", "eager", "eager/selective", "trl", "liger")
MIB = 2**20


def build(name: str, inputs: Inputs, backend: str) -> Step:
    """The step of the provider `name`, with `backend` for ours.

    Raises:
        Absence: it is not installed, or cannot run here.
        ValueError: no provider of that name.
    """
    kind, _, mib = name.partition("@")
    workspace = int(mib) * MIB if mib else None
    makers: dict[str, Callable[[], Step]] = {
        "ours": partial(_ours, inputs, backend, workspace),
        "ours/torch": partial(_ours, inputs, "torch", workspace),
        "products": partial(_products, inputs, backend, workspace),
        "eager": partial(_eager, inputs, _log_softmax),
        "eager/selective": partial(_eager, inputs, _selective),
        "trl": partial(gpu_providers.build, "trl", inputs),
        "liger": partial(gpu_providers.build, "liger_grpo", inputs),
    }
    if kind not in makers:
        raise ValueError(f"providers: expected some of {', '.join(makers)}, got {name!r}")
    try:
        return makers[kind]()
    except ImportError as error:
        raise Absence(f"{type(error).__name__}: {error}") from error


def _ours(inputs: Inputs, backend: str, workspace: int | None) -> Step:
    try:
        chosen, _ = choose_backend(backend, inputs.hidden.device)
    except ValueError as error:
        raise Absence(str(error)) from error
    loss_fn = GRPOLoss(epsilon=EPSILON, backend=chosen.name, workspace_bytes=workspace)

    def step() -> Outcome:
        out = loss_fn(inputs.hidden, inputs.weight, inputs.ids, inputs.mask, inputs.advantages)
        out.loss.backward()
        return Outcome(out.loss, out.per_token_logps, f"{out.engine}, backend {chosen.name}")

    return step


def _products(inputs: Inputs, backend: str, workspace: int | None) -> Step:
    """The calls of one step of ours, recorded; made again on the same tensors, which are in memory by then."""
    calls: list[Callable[[], None]] = []

    def recorded(method: Callable[..., None]) -> Callable[..., None]:
        def record(*args: Any, **kwargs: Any) -> None:
            calls.append(partial(method, *args, **kwargs))
            method(*args, **kwargs)

        return record

    step = _ours(inputs, backend, workspace)
    names = ("logits", "d_hidden", "d_weight")
    with mock.patch.multiple(Products, **{name: recorded(getattr(Products, name)) for name in names}):
        step()
    inputs.clear_gradients()
    count = [sum(call.func.__name__ == name for call in calls) for name in names]  # type: ignore[attr-defined]

    def replay() -> Outcome:
        with torch.no_grad():
            for call in calls:
                call()
        return Outcome(note="calls: " + ", ".join(f"{k} {name}" for k, name in zip(count, names, strict=True)))

    return replay


def _eager(inputs: Inputs, logps_of: Callable[[Tensor, Tensor], Tensor]) -> Step:
    def step() -> Outcome:
        logps = logps_of(torch.nn.functional.linear(inputs.hidden, inputs.weight), inputs.ids)
        loss = policy_loss(inputs, logps.float())
        loss.backward()
        return Outcome(loss, logps)

    return step


def _log_softmax(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1).gather(-1, ids[..., None])[..., 0]


def _selective(logits: Tensor, ids: Tensor) -> Tensor:
    from trl.trainer.utils import selective_log_softmax

    return selective_log_softmax(logits, ids)
