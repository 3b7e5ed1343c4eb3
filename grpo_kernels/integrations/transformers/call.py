"""One forward of a transformers model whose head scores tokens in place of projecting, and the check of its logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.base.checks import check_tensor
from grpo_kernels.head.hooks import foreign_hooks
from grpo_kernels.head.module import divided_modules, linear_of
from grpo_kernels.integrations.transformers import head as heads
from grpo_kernels.integrations.transformers.head import HeadSpec
from grpo_kernels.integrations.transformers.masks import check_attended, check_attention_mask
from grpo_kernels.integrations.transformers.options import TrunkOptions
from grpo_kernels.integrations.transformers.token_count import TokenCount
from grpo_kernels.integrations.transformers.trunk import live_trunk
from grpo_kernels.integrations.transformers.within import evaluating, forward_name, replaced
from grpo_kernels.logprob import linear_logprob_with
from grpo_kernels.modules import within_forwards

Score = Callable[[Tensor, HeadSpec], tuple[Tensor, ...]]  # the head's input (B, L, H) -> results, attached


def run_scored(
    model: nn.Module,
    batch: Batch,
    score: Score,
    inputs: dict[str, Any],
    trunk: TrunkOptions,
    live: Tensor | None = None,  # (B,) bool
    count: TokenCount | None = None,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Run `model` on the batch and `inputs` with `score` in its head: (the scores, the model's aux_loss or None).

    `trunk`, `live` and `count` are for `live_trunk`.

    The first time, the model's logits are checked; see `grpo_kernels.integrations.transformers`.

    Raises:
        TypeError, ValueError, RuntimeError: as `completion_logprobs`.
    """
    if inputs.get("labels") is not None:
        raise ValueError("labels: expected none, since there are no logits to hold them against; got labels")
    inputs = {"input_ids": batch.input_ids, **{name: x for name, x in inputs.items() if x is not None}}
    if "adapter_names" in inputs:  # PEFT's, one for each sequence of the padded batch
        trunk, live = TrunkOptions(zero_advantage="train", padding="keep"), None
    attention_mask, needed = inputs.get("attention_mask"), batch.needed()
    check_attention_mask(attention_mask, batch.input_ids)
    base = heads.causal_lm(model)
    parameters = inspect.signature(type(base).forward).parameters
    if "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        inputs.setdefault("use_cache", False)
    head, check = heads.describe_head(model), not heads.is_checked(model)
    if check or batch.input_ids.device.type == "cpu":  # later it would be a wait for the device
        check_attended(attention_mask, needed, has_positions="position_ids" in inputs)
    for _ in range(2):  # a second time with the constants that the first has measured, if the config was wrong
        call = _HeadCall(head, score, batch, check)
        if count is not None:
            count.reset()
        with live_trunk(model, trunk, needed=needed, live=live, count=count), call.within(base):
            returned = model(**inputs)
        call.expect(returned)
        found = call.verified(base) if check else head
        if found == head:
            break
        head = found
    else:
        raise ValueError(f"model: expected one scale, soft-cap or cut of the logits, got another in each run: {found}")
    if check:
        # What was measured is the same on all ranks, which run the model equally often; a row of padding may be NaN.
        heads.remember(model, head, compared=call.is_finite)
    return returned["results"], returned.get("aux_loss")


@dataclass(frozen=True)
class Batch:
    """The ids of a call and which of them count."""

    input_ids: Tensor  # (B, L)
    completion_mask: Tensor  # (B, T)

    @classmethod
    def of(cls, input_ids: Any, completion_mask: Any) -> Batch:
        """The batch, checked."""
        check_tensor("input_ids", input_ids)
        check_tensor("completion_mask", completion_mask)
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids: expected shape (B, L), got {tuple(input_ids.shape)}")
        (sequences, length), shape = input_ids.shape, tuple(completion_mask.shape)
        if len(shape) != 2 or shape[0] != sequences or not 0 < shape[1] <= length:
            raise ValueError(
                f"completion_mask: expected shape (B, T) with B = {sequences} and 0 < T <= {length}, got {shape}"
            )
        return cls(input_ids, completion_mask)

    def needed(self) -> Tensor:
        """(B, L) bool: the positions whose hidden states predict a token that counts."""
        found = torch.zeros(self.input_ids.shape, dtype=torch.bool, device=self.completion_mask.device)
        count = self.completion_mask.shape[1]
        found[:, -count:] = self.completion_mask != 0
        return nn.functional.pad(found[:, 1:], (0, 1))

    def aligned(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(states (B, T, H), ids (B, T), mask (B, T)): each id with the hidden states that predict it."""
        (sequences, length), count = self.input_ids.shape, self.completion_mask.shape[1]
        if hidden.dim() != 3 or hidden.shape[0] != sequences or hidden.shape[1] < min(count + 1, length):
            raise RuntimeError(
                f"model: expected hidden states of {sequences} sequences and at least {min(count + 1, length)} "
                f"positions at its head, got {tuple(hidden.shape)}; is logits_to_keep too small?"
            )
        ids, mask = self.input_ids[:, -count:].to(hidden.device), self.completion_mask.to(hidden.device)
        if hidden.shape[1] > count:
            return hidden[:, -count - 1 : -1], ids, mask
        mask = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, 1:]], dim=1)  # nothing predicts the first
        return hidden.roll(1, dims=1), ids, mask


@dataclass(frozen=True)
class _Probe:
    """Logits of one row by the head's own forward and by ours."""

    logits: Tensor  # (V,), before the model has scaled or capped them
    rungs: Tensor  # (V,)
    ids: Tensor  # (k,)
    logps: Tensor  # (k,), ours
    eps: float  # of the head's own output


class _HeadCall:
    """Stand-in for a head during one forward: it scores, and returns the scores in the place of logits.

    They are the rows of a (1, R, V) tensor, so that whatever the model does to logits finds a vocabulary to do it to.
    """

    def __init__(self, head: HeadSpec, score: Score, batch: Batch, check: bool) -> None:
        self.head, self.score, self.batch, self.check = head, score, batch, check
        self.project: Callable[..., Tensor] = head.module.forward
        self.scores: list[tuple[torch.Size, torch.dtype]] = []
        self.rows = torch.empty(0)  # what leaves the head
        self.results: tuple[Tensor, ...] | None = None
        self.probe: _Probe | None = None
        self.logits: Tensor | None = None  # (2, V): what the model made of the probe

    @contextmanager
    def within(self, base: nn.Module) -> Iterator[None]:
        """Inside, the head of `base` is this call, and `base` returns its results."""
        head, forward = self.head.module, base.forward
        name = forward_name(head)
        self.project = getattr(head, name)

        def run(*args: Any, **kwargs: Any) -> dict[str, Any]:
            return self._take(forward(*args, **kwargs))

        with ExitStack() as stack:
            stack.enter_context(replaced(head, name, self._score))
            stack.enter_context(replaced(base, "forward", run))
            stack.callback(head.register_forward_hook(self._unpack).remove)
            yield

    def _score(self, hidden: Tensor, *others: Any, **named: Any) -> Tensor:
        """In the place of the head's forward."""
        if self.scores:
            raise RuntimeError(f"model: expected a forward that calls its head once, {self._name()} is called again")
        if others or named:  # PEFT's adapter_names, say, with which an adapter on the head would be another in each row
            given = [*(type(x).__name__ for x in others), *named]
            raise ValueError(
                f"model: expected its head to be given hidden states alone, got {', '.join(given)} as well"
            )
        probe = self._own_logits(hidden) if self.check else None

        def compute(hidden: Tensor) -> tuple[Tensor, ...]:
            if probe is not None:
                self.probe = self._our_logps(*probe)
            return self.score(hidden, self.head)

        inner = [x for x in divided_modules(self.head.module) if x is not self.head.module]  # adapters, under ZeRO-3
        scores = within_forwards(inner, compute, hidden)
        self.scores = [(x.shape, x.dtype) for x in scores]
        flat, vocab = torch.cat([x.reshape(-1) for x in scores]), linear_of(self.head.module).out_features
        rows = nn.functional.pad(flat, (0, -flat.numel() % vocab)).view(-1, vocab)
        if self.probe is not None:
            rows = torch.cat([torch.stack([self.probe.logits, self.probe.rungs]).to(rows.dtype), rows])
        self.rows = rows.detach()
        return rows[None].clone()  # no view: FSDP2 would lose its hook on it if the model wrote into its logits

    @torch.no_grad()
    def _own_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One row (H,) that counts, if any does, and what the head's own forward makes of it, (V,)."""
        states, _, mask = self.batch.aligned(hidden)
        row, column = divmod(int((mask != 0).reshape(-1).to(torch.uint8).argmax()), mask.shape[1])
        state = states[row, column].detach()
        with evaluating(self.head.module):
            return state, self.project(state.view(1, 1, -1)).view(-1)

    @torch.no_grad()
    def _our_logps(self, state: Tensor, logits: Tensor) -> _Probe:
        count = self.head.vocab_size or logits.shape[0]
        ids = torch.linspace(0, count - 1, 8, device=state.device).long()
        ids[0] = logits[:count].argmax()
        states = state.expand(ids.shape[0], -1)
        with evaluating(self.head.module):
            options = {**self.head.constant_options, **self.head.tensors(states)}
            logps = linear_logprob_with(states, ids=ids, outputs=(), **options)["logps"]
        eps, logits = torch.finfo(logits.dtype).eps, logits.to(logps.dtype)
        return _Probe(logits, heads.ladder(logits.shape[0], logits), ids, logps, eps)

    def _unpack(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """A hook on the head, after all others: what they have done to the output is on the way of the gradient."""
        others = foreign_hooks(module)
        if others and not torch.allclose(output[0].detach().to(self.rows), self.rows, rtol=0, atol=0, equal_nan=True):
            raise TypeError(f"model: expected forward hooks on its head that change nothing, got {', '.join(others)}")
        flat = output[0, 0 if self.probe is None else 2 :].reshape(-1)
        sizes = [shape.numel() for shape, _ in self.scores]
        parts = flat[: sum(sizes)].split(sizes)
        # copies, since a model may write into its logits
        self.results = tuple(x.view(shape).clone() for x, (shape, _) in zip(parts, self.scores, strict=True))

    def _take(self, output: Any) -> dict[str, Any]:
        """Return what replaces the model's own output."""
        if self.results is None:
            raise RuntimeError(f"model: expected a forward that calls its head, {self._name()} was not called")
        if self.check:
            self.logits = getattr(output, "logits", None)
            if not isinstance(self.logits, Tensor) or self.logits.dim() != 3 or self.logits.shape[1] < 2:
                raise ValueError(f"model: expected an output with logits (B, T, V), got {type(output).__name__}")
            self.logits = self.logits[0, :2].detach()
        aux_loss = getattr(output, "aux_loss", None)
        return {"results": self.results} | ({} if aux_loss is None else {"aux_loss": aux_loss})

    def expect(self, returned: Any) -> None:
        """Raise unless `returned` are the results, as precise as they were made."""
        if not isinstance(returned, dict) or "results" not in returned:
            raise RuntimeError(
                "model: expected a wrapper that calls the model's forward as it is now and passes its result on, got "
                f"{type(returned).__name__}; a compiled model may not look again: compile its layers instead"
            )
        for x, (_, dtype) in zip(returned["results"], self.scores, strict=True):
            if x.dtype.itemsize < dtype.itemsize:
                raise ValueError(
                    f"model: expected results of {dtype}, and a wrapper of the model has made them {x.dtype}; under "
                    "FSDP2, leave output_dtype out of MixedPrecisionPolicy"
                )

    @property
    def is_finite(self) -> bool:
        """True if the probe has finite logits, so that it can be compared."""
        return self.probe is not None and bool(self.probe.logits.isfinite().all())

    def verified(self, base: nn.Module) -> HeadSpec:
        """The head as the model really uses it: that of this call, or one with other constants.

        Raises:
            ValueError: it cannot be expressed.
        """
        assert self.probe is not None and self.logits is not None
        own, climbed = self.logits
        if not heads.agrees(self.head, self.probe.rungs, climbed):
            found = heads.measure(self.head, self.probe.rungs, climbed)
            if found is None:
                pairs = ", ".join(
                    f"{x:g} -> {y:g}" for x, y in zip(self.probe.rungs[:8:2], climbed[:8:2], strict=False)
                )
                raise ValueError(
                    f"model: expected a scale, a soft-cap or a cut of the logits, {type(base).__name__} makes of "
                    f"{self.probe.rungs.shape[0]} raw logits {climbed.shape[0]}, {pairs}"
                )
            return found
        theirs = own.log_softmax(-1, dtype=self.probe.logps.dtype)[self.probe.ids]
        allowed = max(1e-4, 4 * self.probe.eps) * max(1.0, own.abs().max().item())
        gap = (theirs - self.probe.logps).abs().max().item()
        if self.is_finite and not gap <= allowed:
            raise ValueError(
                f"model: expected the logits of one linear layer, {type(base).__name__}'s own log-probabilities differ "
                f"from it by {gap:.3g}; {self._name()} does something else"
            )
        return self.head

    def _name(self) -> str:
        return type(self.head.module).__name__
