"""Describe the head of a transformers model, and what the model applies to its output.

Models differ in what they do to logits after the projection. They scale them (Cohere, Falcon-H1,
Granite), soft-cap them (the Gemma family), or cut off padding rows (Inkling). Their configs have a
dozen names for these numbers. One name means a factor in one model, a divisor in a second, and a
divisor of the hidden states in a third. So the config is only a first guess: in the first forward,
`HeadCheck` measures what the model's own code does.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_kernels.base.choices import LogitsDtype
from grpo_kernels.base.modes import evaluating, identity
from grpo_kernels.body.trunk import unwrapped
from grpo_kernels.engine.plan import Run
from grpo_kernels.head import Head
from grpo_kernels.module import gather_of, linear_of, parameters_of
from grpo_kernels.scores import linear_logprob

# Names of the scale and the soft-cap in the configs of transformers' models
_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_FACTS = 16  # entries of `_known` kept per head
Constants = tuple[float, float | None, int | None]
# head -> facts of the call (`_facts`) -> (measured constants, True if a row of logits was
# compared too)
_known: weakref.WeakKeyDictionary[nn.Module, dict[Any, tuple[Constants, bool]]] = (
    weakref.WeakKeyDictionary()
)


def constants_of(head: Head) -> Constants:
    """(scale, soft-cap, number of ids) of a head. Without a number of ids, all rows are ids."""
    return head.logit_scale, head.final_logit_softcapping, head.vocab_size


def read(head: Head, hidden: Tensor, logits_dtype: LogitsDtype = "float32") -> Head:
    """Read the tensors of the head's module, for `hidden` (..., H); call this in that forward."""
    weight, bias, lora = parameters_of(head.weight, hidden)
    return replace(head, weight=weight, bias=bias, lora=lora, logits_dtype=logits_dtype)


def gathering(head: Head, run: Run | None) -> Run:
    """Make the run gather the weight for the backward if ZeRO-3 shards it."""
    run = Run() if run is None else run
    gather = gather_of(head.weight.parameters())
    return run if gather is None else replace(run, gather=gather)


def describe_head(model: nn.Module) -> Head:
    """Describe the head of a causal language model, text or vision-language, wrapped or not.

    The result's `weight` is the head's module. The result's scale, soft-cap and number of ids
    describe what the model applies after the product. The description leaves out what the model
    applies to the hidden states before its head.

    The constants are read from the config, or measured once the library has run the model.

    Args:
        model: as in `completion_logprobs`.

    Returns:
        `Head`, for `linear_logprob` and `grpo_loss`.

    Raises:
        TypeError: not a transformers model, an encoder-decoder model, or a head that is not one
            linear layer; the message says what was found.
    """
    return known_head(model, {})[0]


def known_head(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Head, Any, bool]:
    """Describe the head as `describe_head` does, with the constants for a call with `inputs`.

    Returns:
        the head; the facts of the call that the constants depend on; True if the model's logits
        were compared under the same facts.
    """
    base = causal_lm(model)
    if "decoder_input_ids" in inspect.signature(type(base).forward).parameters:
        raise TypeError(
            "model: expected a model of one sequence, prompt and completion, got "
            f"{type(base).__name__}, an encoder-decoder model: call linear_logprob or grpo_loss "
            "with its decoder's hidden states and ids"
        )
    # call the class's method, since TRL's trainer may have replaced the object's
    head = type(base).get_output_embeddings(base)
    if head is None:
        raise TypeError(
            f"model: expected a causal language model, got {type(base).__name__}, whose "
            "get_output_embeddings() returns None"
        )
    head = inner_head(head)
    linear_of(head)
    facts = _facts(base, inputs)
    constants, compared = _known.get(head, {}).get(facts, (_from_config(base), False))
    scale, cap, size = constants
    found = Head(head, vocab_size=size, final_logit_softcapping=cap, logit_scale=scale)
    return found, facts, compared


def _facts(base: PreTrainedModel, inputs: Mapping[str, Any]) -> Any:
    """Facts that logits depend on besides the head: config, code, and scalars in `inputs`."""
    inputs = {name: x for name, x in inputs.items() if name not in ("use_cache", "return_dict")}
    values = [(name, x) for name, x in inputs.items() if isinstance(x, bool | int | float | str)]
    tensors = [(name, x) for name, x in inputs.items() if isinstance(x, Tensor)]
    values += [(name, x.item()) for name, x in tensors if x.numel() == 1]
    forwards = type(base).forward, vars(base).get("forward")
    code = [identity(x)[0] for x in forwards if x is not None]
    attributes = (x for part in (base, base.base_model) for x in vars(part).items())
    scales = [(name, x) for name, x in attributes if isinstance(x, float)]
    return _from_config(base), tuple(code), tuple(scales), tuple(sorted(values, key=str))


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """Find the transformers model inside PEFT, DDP, FSDP1, DeepSpeed, Fabric or torch.compile."""
    return unwrapped(model)[1]


def inner_head(head: nn.Module) -> nn.Module:
    """Find the module that projects: `head`, or PEFT's trained copy (`modules_to_save`)."""
    copies = getattr(head, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return head
    wrapper: Any = head
    active = [] if wrapper.disable_adapters else wrapper.active_adapters
    return copies[active[0]] if active else wrapper.original_module


def _from_config(base: PreTrainedModel) -> Constants:
    config = base.config.get_text_config(decoder=True)

    def first(names: tuple[str, ...]) -> float | None:
        numbers = (getattr(config, name, None) for name in names)
        return next((float(x) for x in numbers if isinstance(x, int | float) and x > 0), None)

    scale = first(_FACTORS) or 1.0 / (first(_DIVISORS) or 1.0)
    return scale, first(_CAPS), None


class HeadCheck:
    """Compare a head with its model's own logits, in one forward of the model.

    Along with the scores, the head returns two rows as logits. The first row holds real logits,
    which the model's own head projects from one hidden state; they serve to compare
    log-probabilities. The second row holds known numbers. If the model changes them in any way
    other than the constants predict, they serve to measure the constants.

    Order of calls: inside the head, `project` and `score`, then read `rows`; set `made` to what the
    model returns for these rows, (2, V) or with fewer columns; then `verified`.
    """

    made: Tensor

    def __init__(self, head: Head, state_of: Callable[[Tensor], Tensor]) -> None:
        self._head, self._state_of = head, state_of  # (B, L, H), the head's input -> (H,)

    @torch.no_grad()
    def project(self, hidden: Tensor, forward: Callable[..., Tensor]) -> None:
        """Compute the logits of one state in `hidden` (B, L, H) with the head's own `forward`."""
        self._state = self._state_of(hidden).detach()  # (H,)
        with evaluating(self._head.weight):
            self._logits = forward(self._state.view(1, 1, -1)).view(-1)  # (V,)
        self._eps = torch.finfo(self._logits.dtype).eps

    @torch.no_grad()
    def score(self) -> None:
        """Score some ids with that state; call this where the head's parameters are complete."""
        logits = self._logits
        count = self._head.vocab_size or logits.shape[0]
        ids = torch.linspace(0, count - 1, 8, device=logits.device).long()
        ids[0] = logits[:count].argmax()
        states = self._state.expand(ids.shape[0], -1)
        with evaluating(self._head.weight):
            found = linear_logprob(states, read(self._head, states), ids, entropy=False)
        self._logps = found.logps
        self._ids, self._logits = ids, logits.to(self._logps.dtype)
        # (V,) numbers of both signs from 0.01 to 1e8, which reveal any factor and any cap
        steps = 10.0 ** torch.arange(-2, 9, dtype=self._logps.dtype, device=logits.device)
        vocab, both = logits.shape[0], torch.stack([steps, -steps], dim=1).reshape(-1)
        self._rungs = both.repeat(vocab // 22 + 1)[:vocab]

    @property
    def rows(self) -> Tensor:
        """(2, V), rows to return to the model as logits: real logits and known numbers."""
        return torch.stack([self._logits, self._rungs])

    def verified(self, model: nn.Module, facts: Any) -> Head:
        """The head with the constants that `model` really uses, measured if necessary.

        From now on, `known_head` returns it for these `facts`.
        """
        head, (own, climbed), rungs = self._head, self.made, self._rungs
        agrees, name = _agrees(head, rungs, climbed), type(model).__name__
        # logits at padding may be NaN, which cannot be compared
        is_finite = bool(self._logits.isfinite().all())
        if agrees:
            theirs = own.log_softmax(-1, dtype=self._logps.dtype)[self._ids]
            allowed = max(1e-4, 4 * self._eps) * max(1.0, own.abs().max().item())
            gap = (theirs - self._logps).abs().max().item()
            if is_finite and not gap <= allowed:
                raise ValueError(
                    f"model: expected {name}'s logits to be those of one linear layer, but its "
                    f"log-probabilities differ by {gap:.3g}; "
                    f"{type(head.weight).__name__} computes something else"
                )
        else:
            head = _measured(head, rungs, climbed, name)
        known = _known.setdefault(head.weight, {})
        known[facts] = constants_of(head), agrees and is_finite
        if len(known) > _FACTS:  # some arguments have a new value in each call
            del known[next(iter(known))]
        return head


def _agrees(head: Head, rungs: Tensor, logits: Tensor) -> bool:
    """True if `head` maps `rungs` (V,) to the model's own logits, up to rounding."""
    cap = head.final_logit_softcapping
    expected = head.logit_scale * rungs[: head.vocab_size].double()
    expected = expected if cap is None else cap * torch.tanh(expected / cap)
    if expected.shape != logits.shape:
        return False
    tolerance = 16 * torch.finfo(logits.dtype).eps
    return bool(((logits.double() - expected).abs() <= tolerance * expected.abs()).all())


def _measured(head: Head, rungs: Tensor, logits: Tensor, name: str) -> Head:
    """`head` with constants measured from `rungs` (V,) and the model's `logits` (v,).

    ``logits = cap tanh(scale x / cap)`` approaches the cap for large x and ``scale x`` near 0.
    """
    count = logits.shape[-1]
    if 22 <= count <= rungs.shape[0] and logits.dtype.itemsize >= 4:
        x, y = rungs[:22:2].double(), logits[:22:2].double()
        small, cap = y[0], y[-1]
        linear = bool(cap > 9.0 * y[-2])
        scale = (small / x[0] if linear else torch.atanh(small / cap) * cap / x[0]).item()
        for known in (1.0, head.logit_scale):
            if abs(scale / known - 1.0) < 1e-6:  # only rounding
                scale = known
        found = replace(
            head,
            logit_scale=scale,
            final_logit_softcapping=None if linear else cap.item(),
            vocab_size=None if count == rungs.shape[0] else count,
        )
        if _agrees(found, rungs, logits):
            return found
    pairs = ", ".join(f"{x:g} -> {y:g}" for x, y in zip(rungs[:8:2], logits[:8:2], strict=False))
    raise ValueError(
        f"model: expected a scale, a soft-cap or a cut of the logits, but {name} turns "
        f"{rungs.shape[0]} raw logits into {count}: {pairs}"
    )
