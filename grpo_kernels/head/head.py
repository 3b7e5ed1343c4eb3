"""A language model's head, as every call takes it: its tensors, and the constants of its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grpo_kernels.base.checks import check_choice, check_number, check_shape, check_tensor
from grpo_kernels.base.choices import LogitsDtype, choices

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class LoRA:
    """A low-rank adapter (https://arxiv.org/abs/2106.09685) on the head itself.

    It adds ``scaling * x @ a.T @ b.T`` to the head's raw projection; x is `input` or hidden states.

    The V x H product of the two is never made; they cost r (H + V) multiplications per token. Both
    factors, `input` and the hidden states get exact gradients. Pass several adapters as one:
    concatenate their factors along r.

    Args:
        a: (r, H), PEFT's ``lora_A.weight``.
        b: (V, r), PEFT's ``lora_B.weight``; with a sharded head the same rows as the weight.
        scaling: a finite number, PEFT's ``scaling``.
        input: (..., H), the input of `a` instead of the hidden states, such as the hidden states
            after dropout.
    """

    a: Tensor
    b: Tensor
    scaling: float = 1.0
    input: Tensor | None = None

    def project(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Return u = scaling * x @ a.T, (N, r), of N positions; 0 except at `positions` (n,).

        Other positions are not read: NaN there would reach the gradient of `a`, even times 0. The
        dtype is the promoted dtype of x and a; within autocast, autocast's, as in PEFT.
        """
        x = (hidden if self.input is None else self.input).reshape(-1, hidden.shape[-1])
        n = x.shape[0]
        x = x if len(positions) == n else x.index_select(0, positions)
        dtype = torch.promote_types(x.dtype, self.a.dtype)
        u = self.scaling * (x.to(dtype) @ self.a.to(dtype).t())
        return u if len(positions) == n else u.new_zeros(n, u.shape[1]).index_copy(0, positions, u)


def check_kind(lora: Any) -> None:
    """Raise TypeError unless `lora` is a `LoRA`."""
    if not isinstance(lora, LoRA):
        raise TypeError(f"lora: expected a LoRA, got {type(lora).__name__}")


def check_lora(lora: LoRA, hidden: Tensor, weight: Tensor) -> None:
    """Raise unless the adapter's tensors fit hidden states (..., H) and weight (V, H)."""
    check_kind(lora)
    check_tensor("lora.a", lora.a, like=hidden, floating=True)
    check_tensor("lora.b", lora.b, like=hidden, floating=True)
    check_number("lora.scaling", lora.scaling)
    rank = lora.a.shape[0] if lora.a.dim() else 0
    check_shape("lora.a", lora.a, ("(r, H)", (rank, hidden.shape[-1])))
    check_shape("lora.b", lora.b, ("(V, r)", (weight.shape[0], rank)))
    if rank == 0:
        raise ValueError(f"lora.a: expected shape (r, H) with r > 0, got {tuple(lora.a.shape)}")
    if lora.input is not None:
        check_tensor("lora.input", lora.input, like=hidden, floating=True)
        check_shape("lora.input", lora.input, ("that of hidden", tuple(hidden.shape)))


CONSTANTS = ("final_logit_softcapping", "logit_scale", "logits_dtype")


@dataclass(frozen=True, eq=False)
class Head:
    """A language model's head.

    Its logits are ``softcap(logit_scale * (hidden @ weight.T + bias))``, where ``softcap(x)`` is
    ``cap * tanh(x / cap)``.

    Every call takes one in its second place, and for the second model that some calls compare with:
    a KL term's reference, distillation's teacher. A plain weight, or the model's own module, may
    stand there instead: it means ``Head(weight)``.

    Args:
        weight: (V, H). Or the head's module: an ``nn.Linear``, or PEFT's LoRA layer around one. The
            call then reads its weight, bias and active adapters, within the hooks by which FSDP2
            and DeepSpeed ZeRO-3 make parameters whole; `bias` and `lora` stay None. Forward and
            backward hooks, which would be handed logits, are refused.
        bias: (V,), or None.
        lora: a low-rank adapter on the head, `LoRA`.
        process_group: the group over which the head is sharded by rows of the vocabulary, in rank
            order; the shards may be uneven. Arguments other than the head are the same on every
            rank, and so are the results; each rank gets the gradient of its own rows of the head
            and the whole gradient of the hidden states. Not needed if weight and hidden states are
            DTensors, `Shard(0)` and replicated. The ranks send each other three numbers per row,
            four with the entropy, and sum d hidden; nothing that they send has the size of the
            vocabulary.
        vocab_size: number of ids, at most V (of all shards together); the head's rows from there on
            are padding.
        final_logit_softcapping: the cap, > 0, or None.
        logit_scale: factor on the logits.
        logits_dtype: ``"float32"``: logits straight from the product's fp32 accumulator;
            ``"input"``: rounded to the dtype of the product's operands first, as a sampler with a
            16-bit head does.

    Raises:
        TypeError, ValueError: a constant of the wrong type, or out of its range. The tensors are
            checked by the call.
    """

    weight: Any
    bias: Tensor | None = None
    lora: LoRA | None = None
    process_group: ProcessGroup | None = None
    vocab_size: int | None = None
    final_logit_softcapping: float | None = None
    logit_scale: float = 1.0
    logits_dtype: LogitsDtype = "float32"

    def __post_init__(self) -> None:
        cap, scale, allowed = self.final_logit_softcapping, self.logit_scale, choices(LogitsDtype)
        if cap is not None:
            check_number("final_logit_softcapping", cap, 0.0)
        check_number("logit_scale", scale)
        check_choice("logits_dtype", self.logits_dtype, allowed)
        # as Python's types, from numpy's or enums
        object.__setattr__(self, "final_logit_softcapping", None if cap is None else float(cap))
        object.__setattr__(self, "logit_scale", float(scale))
        object.__setattr__(self, "logits_dtype", allowed[allowed.index(self.logits_dtype)])

    @staticmethod
    def of(head: HeadLike) -> Head:
        """Return `head`, or the head of a plain weight or a module."""
        return head if isinstance(head, Head) else Head(head)


HeadLike = Head | Tensor | nn.Module
