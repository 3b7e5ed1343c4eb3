"""The head of another model, a reference or a teacher, whose distributions the policy's are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import check_number, check_shape, check_tensor, first_rows, refuse_logits

SAME = "same"


@dataclass(frozen=True, eq=False)
class ReferenceHead:
    """Another model's hidden states and head, as constants; its logits are ``hidden @ weight.T``, like the policy's.

    Args:
        hidden: (..., H'), at the positions of the policy's hidden states; H' may differ from H.
        weight: (V, H'), for the ids of the policy's head; of a sharded head this rank's rows. The methods of
            `LMHeadLogProb` also take the reference's head module here: they read its weight and bias, and gather them
            if FSDP2 or ZeRO-3 has divided them.
        bias: (V,), or None.
        final_logit_softcapping, logit_scale: as in `LossConfig`; ``"same"``: the policy's value.
    """

    hidden: Tensor
    weight: Any
    bias: Tensor | None = None
    final_logit_softcapping: float | str | None = SAME
    logit_scale: float | str = SAME
    prefix: str = field(default="reference.", repr=False)  # of the names in errors

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
        if self.logit_scale != SAME:
            check_number(f"{self.prefix}logit_scale", self.logit_scale)
        if self.final_logit_softcapping not in (SAME, None):
            check_number(f"{self.prefix}final_logit_softcapping", self.final_logit_softcapping, 0.0)

    def compute_dtype(self, of_policy: torch.dtype) -> torch.dtype:
        """Return the dtype that the products' operands are rounded to, given the policy's.

        It is the tensors' own; within autocast a wider one becomes the policy's, since autocast rounds both alike. Both
        heads share one accumulator dtype, so float64 is for both or for neither.
        """
        own = torch.promote_types(self.hidden.dtype, self.weight.dtype)
        if of_policy == torch.float64 or (torch.is_autocast_enabled(self.hidden.device.type) and own.itemsize > 2):
            return of_policy
        return torch.float32 if own == torch.float64 else own

    def first_rows(self, count: int) -> ReferenceHead:
        """Return the head's first `count` ids.

        Raises:
            ValueError: the bias does not fit the weight.
        """
        if not isinstance(self.weight, Tensor) or self.weight.dim() == 0 or self.weight.shape[0] <= count:
            return self
        bias = first_rows(f"{self.prefix}bias", self.bias, self.weight, count)
        return replace(self, weight=self.weight[:count], bias=bias)


def check_reference(reference: Any) -> None:
    """Raise TypeError unless `reference` is a `ReferenceHead`."""
    if not isinstance(reference, ReferenceHead):
        raise TypeError(f"reference: expected a ReferenceHead, got {type(reference).__name__}")
