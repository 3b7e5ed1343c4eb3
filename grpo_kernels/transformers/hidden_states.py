"""The input of a model's head, in place of its product, from a forward that the caller runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.head.head import Head
from grpo_kernels.transformers import head as heads
from grpo_kernels.transformers.call import RESULTS, HeadCall
from grpo_kernels.transformers.head_check import HeadCheck


class HeadInputs:
    """Input of a head in one forward of its model, and the head; both are there after `head_inputs`.

    Attributes:
        hidden: (B, L, H), with the graph of the model; position t predicts token t + 1.
        of_model: the head, its `weight` the module, with the constants that its model's logits have.
    """

    hidden: Tensor
    of_model: Head

    def head(self, states: Tensor) -> Head:
        """Return the head with the tensors that its module has for `states` (..., H), some of the hidden states."""
        return heads.read(self.of_model, states)


@contextmanager
def head_inputs(model: nn.Module) -> Iterator[HeadInputs]:
    """Inside, one forward of the model hands over the input of its head, and makes no logits.

    ::

        with head_inputs(model) as found:
            model(input_ids=ids, attention_mask=attention_mask)
        states = found.hidden[:, :-1]
        scores = linear_logprob(states, found.head(states), ids[:, 1:])

    For losses that `completion_logprobs` and `causal_lm_loss` do not have, and for the hidden states of a teacher. In
    the model's output these hidden states (B, L, H) take the place of the logits; all else in it is the model's.

    Args:
        model: as in `completion_logprobs`. The head's parameters are read after the forward: if FSDP2 or ZeRO-3 has
            divided them they are not whole there, so that a loss has to be computed by `completion_logprobs` or
            `causal_lm_loss`, which compute within the forward.

    Yields:
        `HeadInputs`, empty until the context has ended.

    Raises:
        TypeError, ValueError: as `completion_logprobs`; the model's logits are checked in its first call.
        RuntimeError: the model has not run inside, or has called its head more than once.
    """
    base = heads.causal_lm(model)
    facts = heads.facts_of(base, {})
    head, is_checked = heads.known_head(model, facts)
    check = None if is_checked else HeadCheck(head, lambda hidden: hidden[0, 0])
    call, found = _Handing(head, check), HeadInputs()

    def take(module: nn.Module, args: Any, output: Any) -> None:
        found.hidden = output.logits.to(call.dtype)

    with call.within(base):
        last = model.register_forward_hook(
            take
        )  # after the hooks of wrappers, such as FSDP2's for the backward
        try:
            yield found
        finally:
            last.remove()
    if call.results is None:
        raise RuntimeError("head_inputs: expected one forward of the model inside, got none")
    found.of_model = head if check is None else check.verified(base)
    if check is not None:
        as_expected = heads.constants_of(found.of_model) == heads.constants_of(head)
        heads.remember(model, found.of_model, facts, compared=check.is_finite and as_expected)


class _Handing(HeadCall):
    """A `HeadCall` whose one score is the head's input, and takes the place of the logits in the model's output."""

    def __init__(self, head: Head, check: HeadCheck | None) -> None:
        super().__init__(head, _as_rows, check)
        self.dtype = torch.float32

    def _head_forward(self, hidden: Tensor, *others: Any, **named: Any) -> Tensor:
        self.dtype = hidden.dtype
        return super()._head_forward(hidden, *others, **named)

    def pack_output(self, output: Any) -> Any:
        (hidden,) = super().pack_output(output)[RESULTS]
        return type(output)(**{**output, "logits": hidden.to(self.dtype)})


def _as_rows(hidden: Tensor, head: Head) -> tuple[Tensor, ...]:
    return (
        hidden.to(torch.promote_types(hidden.dtype, torch.float32)),
    )  # beside the rows of the check
