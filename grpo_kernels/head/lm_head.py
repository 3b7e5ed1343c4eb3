"""The head of a call: as the caller passes it, then with this rank's tensors (`local`), then its rows (`divided`).

A head is divided by rows of the vocabulary over a process group (tensor parallelism), in rank order; hidden states are
the same on every rank, and get their whole gradient there. Padding rows at the end of the head can be left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import check_head, first_rows, is_dtensor
from grpo_kernels.base.distributed import check_group
from grpo_kernels.engine.memory import FreeMemory
from grpo_kernels.engine.records import HeadTensors, NeedsGrad, Operands
from grpo_kernels.engine.vocab_parallel import Shard
from grpo_kernels.head.head import Head
from grpo_kernels.head.lora import check_kind, check_lora
from grpo_kernels.head.other_head import OtherHead

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_OF_HEAD = [x.name for x in fields(Head)]


@dataclass(frozen=True, eq=False)
class LMHead(Head):
    """A `Head` in a call: with the hidden states that it projects, and the second head, a reference or teacher."""

    hidden: Tensor = field(kw_only=True)  # (..., H)
    reference: OtherHead | None = field(
        default=None, kw_only=True
    )  # divided over the ranks as `weight` is

    @staticmethod
    def of_call(hidden: Tensor, head: Head, reference: OtherHead | None = None) -> LMHead:
        """Return `head` with the hidden states of a call."""
        return LMHead(
            *[getattr(head, name) for name in _OF_HEAD], hidden=hidden, reference=reference
        )

    def grouped(self) -> LMHead:
        """Return the head with its process group: the argument, or that of the DTensors hidden and weight.

        Raises:
            TypeError, ValueError: `process_group` is no group, or a DTensor weight is not sharded once, by rows.
        """
        check_group("process_group", self.process_group)
        if self.process_group is None and is_dtensor(self.hidden) and is_dtensor(self.weight):
            return replace(self, process_group=_sharding_group(self.weight))
        return self

    def local(self) -> LMHead:
        """Return the head with this rank's plain tensors; a whole head loses its rows beyond `vocab_size`.

        Raises:
            TypeError, ValueError: a wrong argument.
        """
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
            a, b = (_local(f"lora.{x}", getattr(lora, x), group, sharded=x == "b") for x in "ab")
            lora = replace(
                lora, a=a, b=b, input=_local("lora.input", lora.input, group, sharded=False)
            )
        hidden = _local("hidden", self.hidden, group, sharded=False)
        weight, bias = (
            _local(x, getattr(self, x), group, sharded=True) for x in ("weight", "bias")
        )
        if other is not None:
            names = ("hidden", "weight", "bias")
            other = other.with_tensors(
                *(
                    _local(f"{other.prefix}{x}", getattr(other, x), group, sharded=x != "hidden")
                    for x in names
                )
            )
        if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[0] == 0:
            raise ValueError(
                "weight: expected at least one row of the vocabulary on every rank, got none"
            )
        return replace(self, hidden=hidden, weight=weight, bias=bias, lora=lora, reference=other)

    def check(self, *, ranks: tuple[int, ...] | None = None) -> None:
        """Raise unless the tensors fit each other; `ranks`: allowed values of `hidden.dim()`, None: any >= 2."""
        check_head(self.hidden, self.weight, self.bias, ranks=ranks)
        if self.lora is not None:
            check_lora(self.lora, self.hidden, self.weight)
        if self.reference is not None:
            self.reference.check(self.hidden, self.weight)

    def needs_grad(self) -> NeedsGrad:
        """Return which gradients autograd will need; none where grad mode is off."""
        if not torch.is_grad_enabled():
            return NeedsGrad()
        bias, lora = self.bias, self.lora
        trains_bias = bias is not None and bias.requires_grad
        needs_grad = NeedsGrad(self.hidden.requires_grad, self.weight.requires_grad, trains_bias)
        if lora is None:
            return needs_grad
        x = self.hidden if lora.input is None else lora.input
        return replace(
            needs_grad, lora_u=x.requires_grad or lora.a.requires_grad, lora_b=lora.b.requires_grad
        )

    def compute_dtype(self) -> torch.dtype:
        """Return the dtype of the products' operands: autocast's within autocast, else that of the tensors."""
        dtype, kind = (
            torch.promote_types(self.hidden.dtype, self.weight.dtype),
            self.hidden.device.type,
        )
        if dtype != torch.float64 and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return dtype

    def operands(self, positions: Tensor) -> Operands:
        """Return the flat tensors for the engines; the adapter's for `positions` (n,)."""
        lora = self.lora
        lora_u = None if lora is None else lora.project(self.hidden, positions)
        hidden = self.hidden.reshape(-1, self.hidden.shape[-1])
        teacher = None
        if self.reference is not None:
            other = self.reference.hidden
            tensors = HeadTensors(
                other.reshape(-1, other.shape[-1]), self.reference.weight, self.reference.bias
            )
            teacher = tensors.map(Tensor.detach)
        return Operands(
            hidden, self.weight, self.bias, lora_u, None if lora is None else lora.b, teacher
        )

    def divided(self, values: Mapping[str, Any]) -> tuple[LMHead, Shard | None, FreeMemory]:
        """Return this rank's head without padding, its `Shard` (None: the only rank) and the ranks' least free memory,
        from all ranks' `values`.

        Raises:
            ValueError: on all ranks: `vocab_size` does not fit the shards.
        """
        import torch.distributed as dist

        assert self.process_group is not None
        sizes, rank, vocab_size = (
            values["rows of weight"],
            dist.get_rank(self.process_group),
            self.vocab_size,
        )
        if vocab_size is not None:
            if vocab_size > sum(sizes):
                raise ValueError(
                    f"vocab_size: expected at most the {sum(sizes)} rows of all shards, got {vocab_size}"
                )
            starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
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
        """Return the first `count` ids of the head, and of its reference.

        Raises:
            ValueError: bias or adapter does not have one row for each row of the weight.
        """
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
    """Return this rank's part of a DTensor, sharded by rows over the group or replicated; anything else as it is."""
    if not is_dtensor(x):
        return x
    if sharded:
        if _sharding_group(x) is not process_group and _ranks(_sharding_group(x)) != _ranks(
            process_group
        ):
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
