"""Calls of the launchers on new tensors: on a GPU to be timed, on "meta" to be compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels import backends
from grpo_kernels.backends import Chunk, FusedLoss, LogitTransform
from grpo_kernels.backends.triton_rows import divergence, fused, grad, reduce
from grpo_kernels.backends.triton_rows.device import RowConfig
from grpo_kernels.objective import loss_types
from grpo_kernels.objective.config import LossConfig

N, V, H = 4, 151936, 4096
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
META = torch.device("meta")


class Loss(NamedTuple):
    """The form of a token's loss, which kernels are compiled for."""

    surrogate: str
    kl: str | None = None
    corrects_kl: bool = False
    has_gate: bool = False
    d_entropy: float = 0.0

    def of_rows(self, numbers: Callable[[], Tensor]) -> FusedLoss:
        on_policy = self.surrogate in ("constant", "linear")
        constants = {x.surrogate: x.constants(LossConfig()) for x in loss_types.LOSSES.values()}
        return FusedLoss(
            surrogate=None if on_policy else self.surrogate,
            constants=constants.get(self.surrogate, ()), kl_estimator=self.kl,
            corrects_kl=self.corrects_kl, is_linear=self.surrogate == "linear",
            advantages=None if on_policy else numbers(),
            d_policy=numbers() if on_policy else None, weights=numbers(),
            old=None if on_policy else -numbers(), ref=None if self.kl is None else -numbers(),
            gate=numbers() if self.has_gate else None, beta=0.04, d_entropy=self.d_entropy,
        )  # fmt: skip


def transform_of(name: str, vocab: int, n: int = N, device: torch.device = META) -> LogitTransform:
    bias, inv_t = torch.randn(vocab, device=device), torch.rand(n, 1, device=device)
    return {
        "plain": LogitTransform(),
        "bias": LogitTransform(scale=2.0, bias=bias),
        "row T": LogitTransform(inv_temperature=inv_t),
        "all": LogitTransform(softcap=30.0, inv_temperature=inv_t, bias=bias, rounded_to=BF16),
        "rounded fp16": LogitTransform(rounded_to=FP16),
        "soft-cap": LogitTransform(softcap=30.0),
    }[name]


def row_runs(
    kernel: str, *, n: int = N, device: torch.device = META, vocab: int = V, apart: bool = False,
    transform: str = "plain", reference: tuple[str, float] | None = None,
    out: torch.dtype | None = BF16, loss: Loss | None = None, entropy: bool = False,
    extras: tuple[str, ...] = (),
) -> Callable[[RowConfig], Callable[[], Any]]:  # fmt: skip
    """From a configuration to the launch of a row kernel; "grad" may have a `reference`'s transform
    and beta, too. Rows `apart` begin at multiples of 64, as the engine lays them on a GPU."""

    def rows(dtype: torch.dtype) -> Tensor:
        width = -(-vocab // 64) * 64 if apart else vocab
        return torch.empty(n, width, dtype=dtype, device=device)[:, :vocab]

    def logits() -> Tensor:
        return rows(FP32).normal_(std=3.0)

    def numbers() -> Tensor:
        return torch.rand(n, device=device)

    ids = torch.randint(vocab, (n,), device=device)
    pair = reference and Chunk(logits(), ids, transform_of(reference[0], vocab, n, device))
    beta = reference[1] if reference else 1.0
    chunk = Chunk(logits(), ids, transform_of(transform, vocab, n, device), pair, beta)
    diverged = pair and backends.DivergenceStats(*(numbers() for _ in range(4)))
    statistics = backends.RowStats(
        -numbers(), chunk.logits.amax(1), numbers(), numbers(), divergence=diverged
    )
    gradient = None if out is None else rows(out)
    coefficients = backends.Coefficients(
        numbers(), numbers() if entropy else None, pair and numbers()
    )
    of_rows = loss and loss.of_rows(numbers)
    wanted = {"entropy": entropy, "extras": extras}
    launch: Callable[[Any], Any] = {
        "stats": lambda config: reduce.launch_stats(chunk, config, **wanted),
        "grad": lambda config: grad.launch_grad(chunk, statistics, coefficients, gradient, config),
        "fused": lambda config: fused.launch_fused(chunk, of_rows, gradient, config),
        "diverge": lambda config: divergence.launch_diverge(chunk, statistics, statistics, config),
    }[kernel]
    return lambda config: partial(launch, config)
