"""The second head of a call: that of another model, with whose distributions the policy's are compared.

A reference and a teacher are one thing. A KL term calls the second head a reference (argument `reference`),
distillation calls it a teacher (`teacher_hidden`, `teacher_head`); only the names in errors differ. `LMHead.reference`
holds it, and the engines call its tensors the teacher's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import check_shape, check_tensor, first_rows, refuse_logits
from grpo_kernels.head.head import Head


@dataclass(frozen=True, eq=False)
class OtherHead:
    """The hidden states and head of the other model, as constants.

    Attributes:
        hidden: (..., H'), at the positions of the policy's hidden states; H' may differ from H.
        head: a `Head`, a weight (V, H') or a module, for the ids of the policy's head; of a sharded head this rank's
            rows.
        prefix: prefix of the names in errors, ``"teacher_"`` or ``"reference."``.
    """

    hidden: Tensor
    head: Any
    prefix: str

    @staticmethod
    def of_reference(reference: Any) -> OtherHead | None:
        """Return the argument `reference`, (hidden states, head) or None, as a record; `read` checks it."""
        if reference is None:
            return None
        hidden, head = (
            reference if isinstance(reference, tuple) and len(reference) == 2 else (reference, None)
        )
        return OtherHead(hidden, head, "reference.")

    def read(self, policy: Head) -> OtherHead:
        """Return the same with a `Head`, which has all constants of its logits.

        Raises:
            TypeError: there is no head.
            ValueError: a plain weight beside a policy whose head has constants; or a head with an adapter, or divided
                otherwise than the policy's.
        """
        if self.head is None:
            got = type(self.hidden).__name__
            wanted = (
                f"(hidden, head), got {got}" if self.prefix == "reference." else "a head, got None"
            )
            raise TypeError(f"{self.prefix.rstrip('._')}: expected {wanted}")
        if not isinstance(self.head, Head):
            for name in policy.own_constants:
                raise ValueError(
                    f"{self.prefix}head: expected a Head, which says its own {name}, since that of the other head is "
                    f"{getattr(policy, name)!r}, got {type(self.head).__name__}"
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
                    f"{self.prefix}head.{name}: expected None or that of the other head, got {value!r}"
                )
        return replace(self, head=head)

    @property
    def weight(self) -> Any:
        """(V, H')."""
        return self.head.weight

    @property
    def bias(self) -> Tensor | None:
        """(V,), or None."""
        bias: Tensor | None = self.head.bias
        return bias

    def check(self, hidden: Tensor, weight: Tensor) -> None:
        """Raise unless the tensors fit each other, and hidden states (..., H) and weight (V, H) of the policy.

        Raises:
            TypeError, ValueError: the message names the argument.
        """
        check_tensor(f"{self.prefix}hidden", self.hidden, like=hidden, floating=True)
        check_tensor(f"{self.prefix}weight", self.weight, like=hidden, floating=True)
        width = self.hidden.shape[-1] if self.hidden.dim() else 0
        shape = (*hidden.shape[:-1], width)
        check_shape(f"{self.prefix}hidden", self.hidden, ("(*that of hidden without H, H')", shape))
        vocab = weight.shape[0]
        refuse_logits(f"{self.prefix}hidden", self.hidden, self.weight)
        if tuple(self.weight.shape) != (vocab, width):
            raise ValueError(
                f"{self.prefix}weight: expected shape (V, H') = {(vocab, width)}, of the ids of weight, got "
                f"{tuple(self.weight.shape)}; vocab_size leaves out the rows of both from there on"
            )
        if self.bias is not None:
            check_tensor(f"{self.prefix}bias", self.bias, like=hidden, floating=True)
            check_shape(f"{self.prefix}bias", self.bias, ("(V,)", (vocab,)))

    def compute_dtype(self, of_policy: torch.dtype) -> torch.dtype:
        """Return the dtype that the products' operands are rounded to, given the policy's.

        It is that of the tensors; within autocast a wider one becomes the policy's, since autocast rounds both alike.
        Both heads share one accumulator dtype, so float64 is for both or for neither.
        """
        dtype = torch.promote_types(self.hidden.dtype, self.weight.dtype)
        if of_policy == torch.float64 or (
            torch.is_autocast_enabled(self.hidden.device.type) and dtype.itemsize > 2
        ):
            return of_policy
        return torch.float32 if dtype == torch.float64 else dtype

    def with_tensors(self, hidden: Tensor, weight: Any, bias: Tensor | None) -> OtherHead:
        """Return the same head with other tensors."""
        return replace(self, hidden=hidden, head=replace(self.head, weight=weight, bias=bias))

    def first_rows(self, count: int) -> OtherHead:
        """Return the head's first `count` ids.

        Raises:
            ValueError: the bias does not fit the weight.
        """
        if (
            not isinstance(self.weight, Tensor)
            or self.weight.dim() == 0
            or self.weight.shape[0] <= count
        ):
            return self
        bias = first_rows(f"{self.prefix}bias", self.bias, self.weight, count)
        return self.with_tensors(self.hidden, self.weight[:count], bias)
