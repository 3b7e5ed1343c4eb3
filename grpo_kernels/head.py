"""A language model's head, which turns hidden states (N, H) into logits (N, V).

The reference model of a KL term and the teacher in distillation are each a second `Head`, with
hidden states of their own. A head may be sharded by rows of the vocabulary over a process group
(tensor parallelism). The hidden states are then the same on every rank, and each rank gets their
whole gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from grpo_kernels.base import LogitsDtype
from grpo_kernels.base.checks import (
    check_choice,
    check_number,
    check_shape,
    check_tensor,
    hints_names,
    is_dtensor,
    listed,
    warn_of_graph,
)
from grpo_kernels.base.distributed import check_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class HeadTensors(NamedTuple):
    """One value for each tensor of a head; None where the head has no such tensor.

    The value is the tensor itself, its gradient, its shape and dtype, or True if it needs a
    gradient. The raw logits are ``hidden @ weight.T + lora_u @ lora_b.T``; row backends add the
    bias.
    """

    hidden: Any  # (N, H)
    weight: Any  # (V, H)
    bias: Any = None  # (V,)
    lora_u: Any = None  # (N, r), the hidden states times the adapter's first factor
    lora_b: Any = None  # (V, r)

    def factor_pairs(self) -> list[tuple[Any, Any]]:
        """The values of the pairs (N, K), (V, K) whose products add up to the raw logits."""
        adapter = [] if self.lora_u is None or self.lora_b is None else [(self.lora_u, self.lora_b)]
        return [(self.hidden, self.weight), *adapter]


@hints_names
@dataclass(frozen=True)
class LoRA:
    """A low-rank adapter (https://arxiv.org/abs/2106.09685) on the head itself.

    The adapter adds ``scaling * x @ a.T @ b.T`` to the head's raw logits, where x is `input`
    or, without an `input`, the hidden states.

    The V x H product of `a` and `b` is never formed; an adapter costs r (H + V) multiplications per
    token. `a`, `b`, `input` and the hidden states get exact gradients. To use several adapters,
    concatenate their factors along r.

    Args:
        a: (r, H), PEFT's ``lora_A.weight``.
        b: (V, r), PEFT's ``lora_B.weight``. With a sharded head, pass this rank's rows of `b`,
            matching its shard of the weight.
        scaling: a finite number, PEFT's ``scaling``.
        input: (..., H) tensor that `a` multiplies instead of the hidden states, such as the hidden
            states after dropout.
    """

    a: Tensor
    b: Tensor
    scaling: float = 1.0
    input: Tensor | None = None

    def __repr__(self) -> str:
        return _repr(self)

    def project(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Compute u = scaling * x @ a.T, (N, r), for N positions; 0 except at `positions` (n,).

        Other positions are not read: a NaN there would reach the gradient of `a` even if multiplied
        by 0. The result has the promoted dtype of x and `a`, or autocast's dtype under autocast, as
        in PEFT.
        """
        x = (hidden if self.input is None else self.input).reshape(-1, hidden.shape[-1])
        n = x.shape[0]
        x = x if len(positions) == n else x.index_select(0, positions)
        dtype = torch.promote_types(x.dtype, self.a.dtype)
        u = self.scaling * (x.to(dtype) @ self.a.to(dtype).t())
        return u if len(positions) == n else u.new_zeros(n, u.shape[1]).index_copy(0, positions, u)


def _repr(x: Any) -> str:
    """The fields that differ from their defaults, without the numbers of tensors."""
    values = ((option, getattr(x, option.name)) for option in fields(x))
    return f"{type(x).__name__}({listed((o.name, v) for o, v in values if v is not o.default)})"


_LOGITS_DTYPES = get_args(LogitsDtype)


@hints_names
@dataclass(frozen=True, eq=False)
class Head:
    """A language model's head: the second argument of every call that takes hidden states.

    ::

        Head(model.lm_head, final_logit_softcapping=30.0)  # a model that caps its logits
        Head(weight, bias, lora=LoRA(a, b, scaling=2.0))
        Head(shard, process_group=group)                   # divided over ranks by rows

    Its logits are ``softcap(logit_scale * (hidden @ weight.T + bias))``, where ``softcap(x)`` is
    ``cap * tanh(x / cap)``.

    Calls that take a `Head` also accept a plain weight or the model's own head module, and read it
    as ``Head(weight)``. Some calls take a second head, for the reference model of a KL term or for
    a teacher.

    Args:
        weight: a tensor (V, H), or the head's module, which is an ``nn.Linear`` or PEFT's LoRA
            layer around an ``nn.Linear``. With a module, leave `bias` and `lora` None: the call
            reads the weight, bias and active adapters from the module. Under FSDP2 and DeepSpeed
            ZeRO-3, it reads them while they are gathered. A module with other forward or
            backward hooks raises an error, since these hooks expect logits.
        bias: (V,), or None.
        lora: a low-rank adapter on the head, `LoRA`.
        process_group: the group of ranks that shard the head by rows of the vocabulary, in rank
            order; the shards may be uneven. All other arguments must be the same on every rank; the
            results are then the same, too. Each rank gets the gradient of its own rows of the head,
            and the whole gradient of the hidden states. You need no group if the weight is a
            DTensor with `Shard(0)` and the hidden states are a replicated DTensor.
        vocab_size: number of ids, at most the V of all shards together. The head's rows beyond this
            number are padding.
        final_logit_softcapping: the cap, > 0, or None.
        logit_scale: factor on the logits.
        logits_dtype: ``"float32"``: logits come unrounded from the product's fp32 accumulator.
            ``"input"``: logits are first rounded to the dtype of the product's operands, as in a
            sampler with a 16-bit head.

    Raises:
        TypeError, ValueError: a constant has the wrong type or is out of range. The call that takes
            the head checks the tensors.
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
        cap, scale, allowed = self.final_logit_softcapping, self.logit_scale, _LOGITS_DTYPES
        if cap is not None:
            check_number("final_logit_softcapping", cap, 0.0)
        check_number("logit_scale", scale)
        if scale == 0:
            raise ValueError("logit_scale: expected a number other than 0, got 0")
        for name, kind, what in (("bias", Tensor, "a tensor"), ("lora", LoRA, "a LoRA")):
            value: Any = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name}: expected {what}, got {type(value).__name__}")
        hint = "; pass its name" if isinstance(self.logits_dtype, torch.dtype) else ""
        check_choice("logits_dtype", self.logits_dtype, allowed, hint)
        # None: the `Head` holds only constants; its weight is set later
        if not isinstance(self.weight, Tensor | nn.Module | None):
            got = type(self.weight).__name__
            hint = ": it is a head already" if isinstance(self.weight, Head) else ""
            raise TypeError(f"weight: expected a tensor or a module, got {got}{hint}")
        size: Any = self.vocab_size
        if size is not None and (not isinstance(size, Integral) or size is True or size < 1):
            raise ValueError(f"vocab_size: expected an int > 0, got {size!r}")
        # convert numpy's types and enums to Python's types
        object.__setattr__(self, "final_logit_softcapping", None if cap is None else float(cap))
        object.__setattr__(self, "logit_scale", float(scale))
        object.__setattr__(self, "vocab_size", None if size is None else int(size))
        object.__setattr__(self, "logits_dtype", allowed[allowed.index(self.logits_dtype)])

    def __repr__(self) -> str:
        return _repr(self)

    @staticmethod
    def of(head: Any, name: str = "head") -> Head:
        """Make a `Head` of a plain weight or a module; errors call it `name`."""
        if not isinstance(head, Head | Tensor | nn.Module):
            wanted, got = "a weight (V, H), a Head or the head's module", type(head).__name__
            raise TypeError(f"{name}: expected {wanted}, got {got}")
        return head if isinstance(head, Head) else Head(head)


HeadLike = Head | Tensor | nn.Module


def is_module(head: Any) -> bool:
    """True for a module, or a `Head` that has one as its weight."""
    return isinstance(head.weight if isinstance(head, Head) else head, nn.Module)


class StatesAndHead(NamedTuple):
    """Hidden states and head of one of a call's models."""

    hidden: Any
    head: Head
    prefix: str = ""  # of their names in errors; of a second model "reference." or "teacher."


def with_its_group(hidden: Any, head: Any) -> Head:
    """Make the `Head` of a call, with its process group from the argument or from DTensors."""
    head = Head.of(head)
    if head.process_group is not None:
        check_group(head.process_group)
    elif is_dtensor(hidden) and is_dtensor(head.weight):
        return replace(head, process_group=_sharding_group(head.weight))
    return head


def read_heads(
    hidden: Any, head: Head, reference: StatesAndHead | None = None, *, dim: int | None = None
) -> tuple[Tensor, Head, StatesAndHead | None]:
    """Check a call's heads; return this rank's plain tensors. A whole head loses its padding rows.

    `dim` is the number of dimensions of `hidden`; None allows any from 2 up.
    """
    size, group, weight = head.vocab_size, head.process_group, head.weight
    policy = StatesAndHead(hidden, head)
    if group is not None:
        policy, reference = _local(policy, group), reference and _local(reference, group)
        weight = policy.head.weight
        if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[0] == 0:
            import torch.distributed as dist

            raise ValueError(
                "head.weight: expected at least one row of the vocabulary on every rank of "
                f"process_group, got none on rank {dist.get_rank(group)}"
            )
    elif size is not None and isinstance(weight, Tensor) and weight.dim():
        if size > weight.shape[0]:
            raise ValueError(
                f"head.vocab_size: expected at most the {weight.shape[0]} rows of weight, got "
                f"{size}"
            )
        policy, reference = first_ids(policy, size), reference and first_ids(reference, size)
    _check_head(policy, dim=dim)
    if reference is not None:
        for name in ("process_group", "vocab_size"):
            value, policy_value = getattr(reference.head, name), getattr(head, name)
            if value is not None and value is not policy_value and value != policy_value:
                raise ValueError(
                    f"{reference.prefix}head.{name}: expected None or the other head's value, got "
                    f"{value!r}"
                )
        _check_head(reference, policy=policy)
        way_out = ", or swap the two models if this one trains"
        warn_of_graph(f"{reference.prefix}hidden", reference.hidden, way_out)
    return policy.hidden, policy.head, reference


def first_ids(model: StatesAndHead, count: int) -> StatesAndHead:
    """Cut the head to its first `count` ids."""
    (_, head, prefix), weight = model, model.head.weight
    if not isinstance(weight, Tensor) or not weight.dim() or weight.shape[0] <= count:
        return model
    lora, bias = head.lora, _first_rows(f"{prefix}head.bias", head.bias, weight, count)
    if lora is not None:
        lora = replace(lora, b=_first_rows(f"{prefix}head.lora.b", lora.b, weight, count))
    return model._replace(head=replace(head, weight=weight[:count], bias=bias, lora=lora))


def _first_rows(name: str, x: Any, weight: Tensor, count: int) -> Any:
    """Select the first `count` rows of a tensor `x`, which must have as many rows as `weight`.

    Anything else is returned as it is.
    """
    if not isinstance(x, Tensor):
        return x
    if x.shape[:1] != weight.shape[:1]:
        wanted = f"a row for each of the {weight.shape[0]} of weight"
        raise ValueError(f"{name}: expected {wanted}, got shape {tuple(x.shape)}")
    return x[:count]


def _check_head(
    model: StatesAndHead, *, dim: int | None = None, policy: StatesAndHead | None = None
) -> None:
    """Require hidden states (..., H), weight (V, H), bias (V,) and adapter that fit together.

    A reference must also fit the `policy`. `dim` is the number of dimensions of `hidden`; None
    allows any from 2 up.
    """
    hidden, head, prefix = model
    weight, name, weight_name = head.weight, f"{prefix}hidden", f"{prefix}head.weight"
    check_tensor(name, hidden, like=None if policy is None else policy.hidden, floating=True)
    if policy is not None:
        places = tuple(policy.hidden.shape[:-1])
        wanted = f"(*hidden.shape[:-1], H') with hidden.shape[:-1] = {places}"
        check_shape(name, hidden, (wanted, (*places, None)))
    if dim is not None:
        wanted = "(B, T, H)" if dim == 3 else "(N, H) with cu_seqlens"
        if hidden.dim() == 3:
            hint = "; pass the rows of the packed sequences, as in hidden[mask], or no cu_seqlens"
        elif isinstance(weight, Tensor) and weight.dim() == dim:
            hint = "; are hidden and head swapped?"
        else:
            hint = "; packed rows need cu_seqlens" if hidden.dim() == 2 else ""
        check_shape(name, hidden, (wanted, (None,) * dim), hint=hint)
    if hidden.dim() < 2:
        wanted = "(..., H) of at least two dimensions"
        raise ValueError(f"{name}: expected shape {wanted}, got {tuple(hidden.shape)}")
    check_tensor(weight_name, weight, like=hidden, floating=True)
    if weight.numel() == 0:
        raise ValueError(
            f"{weight_name}: expected shape (V, H), got {tuple(weight.shape)}, which is empty; "
            "under DeepSpeed ZeRO-3, pass the head's module instead, or call inside the model's "
            "forward, or gather the weight: with deepspeed.zero.GatheredParameters([weight]) "
            "around forward and backward"
        )
    width, vocab = hidden.shape[-1], None if policy is None else policy.head.weight.shape[0]
    if weight.dim() == 2 and weight.shape[1] < width == weight.shape[0]:
        raise ValueError(
            f"{name}: expected hidden states of width H = {weight.shape[1]}, for a weight (V, H) = "
            f"{tuple(weight.shape)}, got {tuple(hidden.shape)}: these look like logits; pass the "
            "hidden states before lm_head"
        )
    wanted, hint = f"(V, H) with H = {width} as in {name}", ""
    if vocab is not None:
        wanted = "(V, H')"
        hint = "; V is that of the other head: vocab_size leaves out the rows of both beyond it"
    if weight.shape[:-1] == (width,):
        hint = "; it looks transposed, or hidden looks like logits: pass the hidden states "
        hint += "before lm_head"
    check_shape(weight_name, weight, (wanted, (vocab, width)), hint=hint)
    if head.bias is not None:
        shape = "(V,)", (weight.shape[0],)
        check_tensor(f"{prefix}head.bias", head.bias, shape, like=hidden, floating=True)
    if head.lora is not None:
        _check_lora(head.lora, hidden, weight)


def _check_lora(lora: LoRA, hidden: Tensor, weight: Tensor) -> None:
    check_tensor("head.lora.a", lora.a, like=hidden, floating=True)
    check_tensor("head.lora.b", lora.b, like=hidden, floating=True)
    check_number("head.lora.scaling", lora.scaling)
    rank = lora.a.shape[0] if lora.a.dim() else 0
    check_shape("head.lora.a", lora.a, ("(r, H)", (rank, hidden.shape[-1])))
    check_shape("head.lora.b", lora.b, ("(V, r)", (weight.shape[0], rank)))
    if rank == 0:
        raise ValueError(
            f"head.lora.a: expected shape (r, H) with r > 0, got {tuple(lora.a.shape)}"
        )
    if lora.input is not None:
        shape = "hidden.shape", hidden.shape
        check_tensor("head.lora.input", lora.input, shape, like=hidden, floating=True)


def tensors_of(hidden: Tensor, head: Head, positions: Tensor) -> HeadTensors:
    """The tensors that products read: `hidden` (..., H) flattened, the adapter's at `positions`."""
    lora, flat = head.lora, hidden.reshape(-1, hidden.shape[-1])
    factors = () if lora is None else (lora.project(hidden, positions), lora.b)
    return HeadTensors(flat, head.weight, head.bias, *factors)


def needs_grad_of(hidden: Tensor, head: Head) -> HeadTensors:
    """True for each of `tensors_of` whose gradient autograd will need."""
    if not torch.is_grad_enabled():
        return HeadTensors(False, False)
    bias, lora = head.bias, head.lora
    needs = HeadTensors(
        hidden.requires_grad, head.weight.requires_grad, bias is not None and bias.requires_grad
    )
    if lora is None:
        return needs
    x = hidden if lora.input is None else lora.input
    needs_u = x.requires_grad or lora.a.requires_grad
    return needs._replace(lora_u=needs_u, lora_b=lora.b.requires_grad)


def operand_dtype_of(
    hidden: Tensor, weight: Tensor, policy_dtype: torch.dtype | None = None
) -> torch.dtype:
    """The dtype that the operands of products are rounded to: autocast's, or the tensors' own.

    For a reference, `policy_dtype` is that of the policy's operands: autocast rounds both alike,
    and both share one accumulator dtype, so float64 applies to both or to neither.
    """
    dtype, kind = torch.promote_types(hidden.dtype, weight.dtype), hidden.device.type
    autocast = torch.is_autocast_enabled(kind)
    if policy_dtype is None:
        rounds = autocast and dtype != torch.float64
        return torch.get_autocast_dtype(kind) if rounds else dtype
    if policy_dtype == torch.float64 or (autocast and dtype.itemsize > 2):
        return policy_dtype
    return torch.float32 if dtype == torch.float64 else dtype


def _local(model: StatesAndHead, group: Any) -> StatesAndHead:
    """This rank's parts of tensors that may be DTensors, sharded over the group or replicated."""
    hidden, head, prefix = model

    def whole(name: str, x: Any) -> Any:
        if not is_dtensor(x):
            return x
        if not all(placement.is_replicate() for placement in x.placements):
            raise ValueError(
                f"{prefix}{name}: expected a replicated DTensor, or a plain tensor, got "
                f"{x.placements}"
            )
        return x.to_local(grad_placements=x.placements)

    def part(name: str, x: Any) -> Any:
        if not is_dtensor(x):
            return x
        mesh_group = _sharding_group(x)
        if mesh_group is not group and _ranks(mesh_group) != _ranks(group):
            raise ValueError(
                f"{prefix}{name}: expected a DTensor sharded over process_group, got {x.placements}"
            )
        return x.to_local()

    lora = head.lora
    if lora is not None:
        a, b = whole("head.lora.a", lora.a), part("head.lora.b", lora.b)
        lora = replace(lora, a=a, b=b, input=whole("head.lora.input", lora.input))
    hidden, weight = whole("hidden", hidden), part("head.weight", head.weight)
    head = replace(head, weight=weight, bias=part("head.bias", head.bias), lora=lora)
    return StatesAndHead(hidden, head, prefix)


def _sharding_group(weight: Any) -> ProcessGroup:
    """The group of the one mesh dimension over which `weight`, a DTensor, is sharded."""
    dims = [i for i, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if len(dims) != 1 or not weight.placements[dims[0]].is_shard(0):
        raise ValueError(
            "head.weight: expected a DTensor sharded once, by rows: Shard(0), got "
            f"{weight.placements}"
        )
    group: ProcessGroup = weight.device_mesh.get_group(dims[0])
    return group


def _ranks(process_group: ProcessGroup) -> list[int]:
    import torch.distributed as dist

    return dist.get_process_group_ranks(process_group)
