"""The head of a call: as the caller passes it, then with this rank's tensors, then its rows.

A head is divided by rows of the vocabulary over a process group (tensor parallelism), in rank
order; hidden states are the same on every rank, and get their whole gradient there. Padding rows at
the end of the head can be left out.

A reference and a teacher are one thing, the second head of a call. A KL term calls it a reference
(argument `reference`), distillation a teacher (`teacher_hidden`, `teacher_head`); only the names in
errors differ. The engines call its tensors the teacher's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import (
    check_head,
    check_shape,
    check_tensor,
    first_rows,
    is_dtensor,
    refuse_logits,
)
from grpo_kernels.base.distributed import check_group
from grpo_kernels.engine.device import FreeMemory
from grpo_kernels.engine.records import HeadTensors, NeedsGrad, Operands
from grpo_kernels.engine.vocab_parallel import Shard
from grpo_kernels.head.head import CONSTANTS, Head, HeadLike, check_kind, check_lora

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class OtherHead:
    """The hidden states and head of the other model, as constants.

    Attributes:
        hidden: (..., H'), at the positions of the policy's hidden states; H' may differ from H.
        head: a `Head`, a weight (V, H') or a module, for the ids of the policy's head; of a sharded
            head this rank's rows.
        prefix: prefix of the names in errors, ``"teacher_"`` or ``"reference."``.
    """

    hidden: Tensor
    head: Any
    prefix: str

    @staticmethod
    def of_reference(reference: Any) -> OtherHead | None:
        """Return the argument `reference`, (hidden states, head) or None; `read` checks it."""
        if reference is None:
            return None
        is_pair = isinstance(reference, tuple) and len(reference) == 2
        hidden, head = reference if is_pair else (reference, None)
        return OtherHead(hidden, head, "reference.")

    def read(self, policy: Head) -> OtherHead:
        """Return the same with a `Head`, which has all constants of its logits."""
        if self.head is None:
            got = type(self.hidden).__name__
            wanted = (
                f"(hidden, head), got {got}" if self.prefix == "reference." else "a head, got None"
            )
            raise TypeError(f"{self.prefix.rstrip('._')}: expected {wanted}")
        for name in () if isinstance(self.head, Head) else CONSTANTS:
            if getattr(policy, name) != getattr(Head, name):
                raise ValueError(
                    f"{self.prefix}head: expected a Head, which says its own {name}, since that of "
                    f"the other head is {getattr(policy, name)!r}, got {type(self.head).__name__}"
                )
        head = Head.of(self.head)
        if head.lora is not None:
            raise ValueError(
                f"{self.prefix}head.lora: expected None, since the head is a constant, got a LoRA"
            )
        for name in ("process_group", "vocab_size"):
            value, of_policy = getattr(head, name), getattr(policy, name)
            if value is not None and value is not of_policy and value != of_policy:
                raise ValueError(
                    f"{self.prefix}head.{name}: expected None or that of the other head, got "
                    f"{value!r}"
                )
        return replace(self, head=head)

    @property
    def weight(self) -> Any:
        return self.head.weight

    @property
    def bias(self) -> Any:
        return self.head.bias

    def check(self, hidden: Tensor, weight: Tensor) -> None:
        """Raise unless the tensors fit each other and the policy's hidden states and weight."""
        check_tensor(f"{self.prefix}hidden", self.hidden, like=hidden, floating=True)
        check_tensor(f"{self.prefix}weight", self.weight, like=hidden, floating=True)
        width = self.hidden.shape[-1] if self.hidden.dim() else 0
        shape = (*hidden.shape[:-1], width)
        check_shape(f"{self.prefix}hidden", self.hidden, ("(*that of hidden without H, H')", shape))
        vocab = weight.shape[0]
        refuse_logits(f"{self.prefix}hidden", self.hidden, self.weight)
        if tuple(self.weight.shape) != (vocab, width):
            raise ValueError(
                f"{self.prefix}weight: expected shape (V, H') = {(vocab, width)}, of the ids of "
                f"weight, got {tuple(self.weight.shape)}; vocab_size leaves out the rows of both "
                "from there on"
            )
        if self.bias is not None:
            check_tensor(f"{self.prefix}bias", self.bias, like=hidden, floating=True)
            check_shape(f"{self.prefix}bias", self.bias, ("(V,)", (vocab,)))

    def compute_dtype(self, of_policy: torch.dtype) -> torch.dtype:
        """Return the dtype that the products' operands are rounded to, given the policy's.

        It is that of the tensors; within autocast a wider one becomes the policy's, since autocast
        rounds both alike. Both heads share one accumulator dtype: float64 is for both or neither.
        """
        dtype = torch.promote_types(self.hidden.dtype, self.weight.dtype)
        autocast = torch.is_autocast_enabled(self.hidden.device.type)
        if of_policy == torch.float64 or (autocast and dtype.itemsize > 2):
            return of_policy
        return torch.float32 if dtype == torch.float64 else dtype

    def with_tensors(self, hidden: Tensor, weight: Any, bias: Tensor | None) -> OtherHead:
        """Return the same head with other tensors."""
        return replace(self, hidden=hidden, head=replace(self.head, weight=weight, bias=bias))

    def first_rows(self, count: int) -> OtherHead:
        """Return the head's first `count` ids."""
        weight = self.weight
        if not isinstance(weight, Tensor) or weight.dim() == 0 or weight.shape[0] <= count:
            return self
        bias = first_rows(f"{self.prefix}bias", self.bias, weight, count)
        return self.with_tensors(self.hidden, weight[:count], bias)


@dataclass(frozen=True, eq=False)
class LMHead(Head):
    """A `Head` in a call: with the hidden states that it projects, and the second head."""

    hidden: Tensor = field(kw_only=True)  # (..., H)
    # divided over the ranks as `weight` is
    reference: OtherHead | None = field(default=None, kw_only=True)

    @staticmethod
    def of_call(hidden: Tensor, head: HeadLike, reference: OtherHead | None = None) -> LMHead:
        """Return `head` with the hidden states of a call."""
        of_head = {x.name: getattr(Head.of(head), x.name) for x in fields(Head)}
        return LMHead(**of_head, hidden=hidden, reference=reference)

    def grouped(self) -> LMHead:
        """Return the head with its process group: the argument, or that of the DTensors."""
        check_group("process_group", self.process_group)
        if self.process_group is None and is_dtensor(self.hidden) and is_dtensor(self.weight):
            return replace(self, process_group=_sharding_group(self.weight))
        return self

    def local(self) -> LMHead:
        """Return the head with this rank's plain tensors; a whole head without padding rows."""
        size, group, weight = self.vocab_size, self.process_group, self.weight
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"vocab_size: expected an int > 0, got {size!r}")
        if self.lora is not None:
            check_kind(self.lora)
        other = None if self.reference is None else self.reference.read(self)
        if group is None:
            head = replace(self, reference=other)
            if size is None or not isinstance(weight, Tensor) or weight.dim() == 0:
                return head
            if size > weight.shape[0]:
                raise ValueError(
                    f"vocab_size: expected at most the {weight.shape[0]} rows of weight, got {size}"
                )
            return head._first_rows(size)
        lora = self.lora
        if lora is not None:
            a = _local("lora.a", lora.a, group, sharded=False)
            b = _local("lora.b", lora.b, group, sharded=True)
            x = _local("lora.input", lora.input, group, sharded=False)
            lora = replace(lora, a=a, b=b, input=x)
        hidden = _local("hidden", self.hidden, group, sharded=False)
        weight = _local("weight", weight, group, sharded=True)
        bias = _local("bias", self.bias, group, sharded=True)
        if other is not None:
            other = other.with_tensors(
                _local(f"{other.prefix}hidden", other.hidden, group, sharded=False),
                _local(f"{other.prefix}weight", other.weight, group, sharded=True),
                _local(f"{other.prefix}bias", other.bias, group, sharded=True),
            )
        if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[0] == 0:
            raise ValueError(
                "weight: expected at least one row of the vocabulary on every rank, got none"
            )
        return replace(self, hidden=hidden, weight=weight, bias=bias, lora=lora, reference=other)

    def check(self, *, ranks: tuple[int, ...] | None = None) -> None:
        """Raise unless the tensors fit each other.

        Args:
            ranks: allowed values of `hidden.dim()`; None: any >= 2.
        """
        check_head(self.hidden, self.weight, self.bias, ranks=ranks)
        if self.lora is not None:
            check_lora(self.lora, self.hidden, self.weight)
        if self.reference is not None:
            self.reference.check(self.hidden, self.weight)

    def needs_grad(self) -> NeedsGrad:
        """Return which gradients autograd will need; none where grad mode is off."""
        if not torch.is_grad_enabled():
            return NeedsGrad()
        hidden, bias, lora = self.hidden, self.bias, self.lora
        trains_bias = bias is not None and bias.requires_grad
        needs_grad = NeedsGrad(hidden.requires_grad, self.weight.requires_grad, trains_bias)
        if lora is None:
            return needs_grad
        x = hidden if lora.input is None else lora.input
        trains_u = x.requires_grad or lora.a.requires_grad
        return replace(needs_grad, lora_u=trains_u, lora_b=lora.b.requires_grad)

    def compute_dtype(self) -> torch.dtype:
        """Return the dtype of the products' operands: autocast's, or that of the tensors."""
        dtype = torch.promote_types(self.hidden.dtype, self.weight.dtype)
        kind = self.hidden.device.type
        if dtype != torch.float64 and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return dtype

    def operands(self, positions: Tensor) -> Operands:
        """Return the flat tensors for the engines; the adapter's for `positions` (n,)."""
        lora, other, teacher = self.lora, self.reference, None
        lora_u = None if lora is None else lora.project(self.hidden, positions)
        lora_b = None if lora is None else lora.b
        if other is not None:
            states = other.hidden.reshape(-1, other.hidden.shape[-1])
            teacher = HeadTensors(states, other.weight, other.bias).map(Tensor.detach)
        hidden = self.hidden.reshape(-1, self.hidden.shape[-1])
        return Operands(hidden, self.weight, self.bias, lora_u, lora_b, teacher)

    def divided(self, values: Mapping[str, Any]) -> tuple[LMHead, Shard | None, FreeMemory]:
        """Return this rank's head without padding, its shard, and the ranks' least free memory.

        The shard is None for the only rank. `values` are of all ranks.
        """
        import torch.distributed as dist

        assert self.process_group is not None
        sizes, vocab_size = values["rows of weight"], self.vocab_size
        rank = dist.get_rank(self.process_group)
        if vocab_size is not None:
            if vocab_size > sum(sizes):
                raise ValueError(
                    f"vocab_size: expected at most the {sum(sizes)} rows of all shards, got "
                    f"{vocab_size}"
                )
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            sizes = [
                min(size, max(0, vocab_size - start))
                for size, start in zip(sizes, starts, strict=True)
            ]
        if min(sizes) == 0:
            raise ValueError(
                f"weight: expected at least one row of the vocabulary on every rank, got {sizes}"
            )
        memory = FreeMemory(
            tight=any(values["tight"]),
            converts=all(values["converts"]),
            workspace=min(values["workspace"]),
        )
        shard = Shard(self.process_group, rank, tuple(sizes)) if len(sizes) > 1 else None
        return self._first_rows(sizes[rank]), shard, memory

    def _first_rows(self, count: int) -> LMHead:
        """Return the first `count` ids of the head, and of its reference."""
        other = None if self.reference is None else self.reference.first_rows(count)
        if self.weight.shape[0] == count:
            return replace(self, reference=other)
        lora, bias = self.lora, first_rows("bias", self.bias, self.weight, count)
        if lora is not None:
            lora = replace(lora, b=first_rows("lora.b", lora.b, self.weight, count))
        return replace(self, weight=self.weight[:count], bias=bias, lora=lora, reference=other)


def _sharding_group(weight: Any) -> ProcessGroup:
    """Return the group of the one mesh dimension over which `weight`, a DTensor, is sharded."""
    dims = [i for i, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if len(dims) != 1 or not weight.placements[dims[0]].is_shard(0):
        raise ValueError(
            f"weight: expected a DTensor sharded once, by rows: Shard(0), got {weight.placements}"
        )
    group: ProcessGroup = weight.device_mesh.get_group(dims[0])
    return group


def _local(name: str, x: Any, process_group: ProcessGroup, *, sharded: bool) -> Any:
    """Return this rank's part of a DTensor, sharded over the group or replicated; else `x`."""
    if not is_dtensor(x):
        return x
    if sharded:
        group = _sharding_group(x)
        if group is not process_group and _ranks(group) != _ranks(process_group):
            raise ValueError(
                f"{name}: expected a DTensor sharded over process_group, got {x.placements}"
            )
        return x.to_local()
    if not all(placement.is_replicate() for placement in x.placements):
        raise ValueError(
            f"{name}: expected a replicated DTensor, or a plain tensor, got {x.placements}"
        )
    return x.to_local(grad_placements=x.placements)


def _ranks(process_group: ProcessGroup) -> list[int]:
    import torch.distributed as dist

    return dist.get_process_group_ranks(process_group)
