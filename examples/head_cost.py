"""What a language-model head costs: seconds, peak bytes and floating-point operations, measured alike for TRL and us.

A dispatch mode sees every operation. Inside the head it adds up the FLOPs (the formulas of torch) and follows each
tensor that the head allocated until it is freed; the peak is the largest sum of those alive at once, the gradient of
the weight among them. Scratch space inside one torch operation is not seen.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from trl.trainer import utils as trl_utils

from grpo_kernels import LossConfig, grpo_loss


class HeadMeter(TorchDispatchMode):
    """Measures what runs while `inside` is true: `seconds`, `flops` and `peak_bytes`.

    With `attach` that is, in each call of a model with TRL's fused head, from the end of the backbone to the end of the
    forward, and in the backward from the gradient of the log-probabilities to that of the hidden states.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.flops, self.live_bytes, self.peak_bytes = 0.0, 0, 0, 0
        self.inside = False
        self._live: set[int] = set()
        self._started = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.inside:
            # In-place products (addmm_) are not in torch's table; they cost what their namesakes do.
            formula = flop_registry.get(
                getattr(torch.ops.aten, func._overloadpacket.__name__.rstrip("_"), None)
            )
            if formula is not None:
                self.flops += formula(*args, **(kwargs or {}), out_val=result)
            inputs = {
                x.untyped_storage()._cdata
                for x in tree_leaves((args, kwargs))
                if isinstance(x, Tensor)
            }
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in inputs:
                    self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._live:
            return
        self._live.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._live.discard(key)
        self.live_bytes -= size

    def start(self) -> None:
        """Enter the head (nothing if already inside)."""
        if not self.inside:
            self.inside, self._started = True, time.perf_counter()

    def stop(self) -> None:
        """Leave the head."""
        if self.inside:
            self.inside = False
            self.seconds += time.perf_counter() - self._started

    @contextmanager
    def head(self) -> Iterator[None]:
        """Everything in the block is the head."""
        with self:
            self.start()
            try:
                yield
            finally:
                self.stop()

    def attach(self, model: Any) -> None:
        """Watch the fused head of `model`; only calls with ``fused_lm_head=True`` count, generation does not."""
        fused = False

        def before_model(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            nonlocal fused
            fused = bool(kwargs.get("fused_lm_head"))

        def after_backbone(module: Any, args: Any, output: Any) -> None:
            if fused:
                if output.last_hidden_state.requires_grad:
                    output.last_hidden_state.register_hook(lambda grad: self.stop())
                self.start()

        def after_model(module: Any, args: Any, output: Any) -> None:
            self.stop()
            for result in (output.log_probs, output.entropy) if fused else ():
                if result is not None and result.requires_grad:
                    result.register_hook(lambda grad: self.start())

        model.register_forward_pre_hook(before_model, with_kwargs=True)
        model.base_model.register_forward_hook(after_backbone)
        model.register_forward_hook(after_model)


@dataclass(frozen=True)
class HeadBatch:
    """One head and one batch of completions, all of whose tokens count."""

    hidden: Tensor  # (B, T, H)
    weight: Tensor  # (V, H)
    ids: Tensor  # (B, T)
    mask: Tensor  # (B, T)


def head_batch(
    vocab: int, hidden_size: int, sequences: int, length: int, seed: int = 0
) -> HeadBatch:
    """Random hidden states of unit scale and a head with the usual initialisation, in fp32."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(sequences, length, hidden_size, generator=generator)
    weight = torch.randn(vocab, hidden_size, generator=generator).mul_(0.02)
    ids = torch.randint(vocab, (sequences, length), generator=generator)
    mask = torch.ones(sequences, length, dtype=torch.long)
    return HeadBatch(hidden.requires_grad_(), weight.requires_grad_(), ids, mask)


def trl_head_loss(batch: HeadBatch, advantages: Tensor) -> Tensor:
    """TRL's head function, as its trainer calls it, under the default (dapo, on-policy) loss written out."""
    logps, *_ = trl_utils._ChunkedLogProbFunction.apply(
        batch.hidden.reshape(-1, batch.hidden.size(-1)),
        batch.weight,
        None,
        batch.ids.reshape(-1),
        1.0,
        trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE,
        None,
        1.0,
        ("log_probs", "entropy"),
    )
    ratio = torch.exp(logps - logps.detach()).view_as(batch.ids)
    gain = advantages[:, None]
    per_token = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    return (per_token * batch.mask).sum() / batch.mask.sum().clamp(min=1)


def our_head_loss(batch: HeadBatch, advantages: Tensor) -> Tensor:
    """The same loss by `grpo_loss`."""
    return grpo_loss(
        batch.hidden, batch.weight, batch.ids, batch.mask, advantages, config=LossConfig()
    ).loss


def measure(
    loss: Callable[[HeadBatch, Tensor], Tensor], batch: HeadBatch, advantages: Tensor
) -> dict[str, Any]:
    """One forward and backward: seconds, peak_bytes, flops, in units of NVH too, the loss and both gradients."""
    batch.hidden.grad = batch.weight.grad = None
    meter = HeadMeter()
    with meter.head():
        value = loss(batch, advantages)
        value.backward()
    unit = batch.ids.numel() * batch.weight.numel()
    return {
        "seconds": meter.seconds,
        "peak_bytes": meter.peak_bytes,
        "flops": meter.flops,
        "flops_nvh": meter.flops / unit,
        "loss": value.item(),
        "gradients": (batch.hidden.grad, batch.weight.grad),
    }


def measure_both(batch: HeadBatch, advantages: Tensor) -> list[dict[str, Any]]:
    """TRL's figures and ours, one after the other; a line says how far it is."""
    found = [measure(loss, batch, advantages) for loss in (trl_head_loss, our_head_loss)]
    (theirs, ours), live = (x["seconds"] for x in found), (advantages != 0).float().mean().item()
    print(
        f"  {live:.0%} of the sequences with gradient: stock TRL {theirs:.1f} s, grpo_kernels {ours:.1f} s"
    )
    return found


def compare_heads(
    vocab: int, hidden_size: int, sequences: int, length: int, repeats: int = 3
) -> dict[str, dict[str, Any]]:
    """Both heads on one batch, first with all advantages non-zero, then with those of half of the groups zero.

    Returns: {"all" | "half": {"trl": figures, "ours": figures, "gradient_difference": largest |difference| of the two
    gradients' entries, as a share of the largest |entry|}}.
    """
    batch = head_batch(vocab, hidden_size, sequences, length)
    advantages = torch.linspace(-1.5, 1.5, sequences)
    half = advantages.where(torch.arange(sequences) < sequences // 2, 0.0)
    small = head_batch(512, 32, 2, 8)  # the first call of anything is slow
    for loss in (trl_head_loss, our_head_loss):
        measure(loss, small, advantages[:2])
    found: dict[str, dict[str, Any]] = {}
    for name, given in (("all", advantages), ("half", half)):
        theirs, ours = measure_both(batch, given)
        for _ in range(
            repeats - 1
        ):  # turn and turn about; the smallest time is the one with the least disturbance
            for best, again in zip((theirs, ours), measure_both(batch, given), strict=True):
                best["seconds"] = min(best["seconds"], again["seconds"])
        pairs = zip(theirs.pop("gradients"), ours.pop("gradients"), strict=True)
        difference = max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)
        found[name] = {"trl": theirs, "ours": ours, "gradient_difference": difference}
    return found
