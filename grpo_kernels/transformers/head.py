"""A transformers model's head: describe it, and let it score tokens instead of projecting them.

**One forward.** The model's own forward runs with its head replaced during the call: the head
receives the hidden states and scores the completion tokens. This is exact for more architectures
than running the body and reading the head afterwards. It includes whatever the model applies before
its head (a multiplier, a dense layer and a norm, a cast), and needs no names of inner modules.
Hooks on the model, its head and its parts run as usual. FSDP2 gathers the weight there, and again
for the backward, whether the head is in the root's unit or in a separate one; so does DeepSpeed
ZeRO-3. DDP, PEFT and accelerate see one call of the model. Results leave through the outputs of
head and model, where these engines hook the backward.

**The logits.** Models differ in what they do to logits after the projection. They scale them
(Cohere, Falcon-H1, Granite), soft-cap them (the Gemma family), or cut off padding rows (Inkling).
Their configs have a dozen names for these numbers. One name means a factor in one model, a divisor
in a second, and a divisor of the hidden states in a third. So the config is only a first guess: in
the first forward, `HeadCheck` measures what the model's own code does, at the cost of one row of
the head, without random numbers or collectives. If the config was wrong, the model runs a second
time with the measured constants.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from grpo_kernels.base import BatchLayout
from grpo_kernels.base.distributed import most_of_ranks
from grpo_kernels.base.modes import evaluating, guest, identity
from grpo_kernels.body.trunk import TrunkCall, live_trunk, ordinary_id, trunk_of, unwrapped
from grpo_kernels.engine.plan import Run
from grpo_kernels.head import Head
from grpo_kernels.head_module import (
    divided_modules,
    foreign_hooks,
    gather_of,
    is_fsdp_unit,
    linear_of,
    parameters_of,
    rank_groups,
    within_forwards,
)
from grpo_kernels.patching import forward_name, replaced
from grpo_kernels.scores import linear_logps

RESULTS, FIELDS = "results", "others"  # keys of the dict that the model returns to its wrappers
_MOST_RUNS = 3  # per call; the second uses measured constants
T = TypeVar("T")
Results = dict[str, Tensor]
Score = Callable[[Tensor, Head], Results]  # (the head's input (B, L, H), head) -> results
# models with a scalar output, which may need the whole batch
_models_with_scalars: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# head -> factor by which the model multiplies the body's output before the head
_factors: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()
# Names of the scale and the soft-cap in the configs of transformers' models
_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_FACTS = 16  # entries of `_known` kept per head
# (scale, soft-cap, number of ids) of a head; without a number of ids, all rows are ids
Constants = tuple[float, float | None, int | None]
# head -> facts of the call (`_facts`) -> (measured constants, True if a row of logits was
# compared too)
_known: weakref.WeakKeyDictionary[nn.Module, dict[Any, tuple[Constants, bool]]] = (
    weakref.WeakKeyDictionary()
)


def read(head: Head, hidden: Tensor) -> Head:
    """Read the tensors of the head's module, for `hidden` (..., H); call this in that forward."""
    weight, bias, lora = parameters_of(head.weight, hidden)
    return replace(head, weight=weight, bias=bias, lora=lora)


def gathering(head: Head, run: Run | None) -> Run:
    """Make the run gather the weight for the backward if ZeRO-3 shards it."""
    run = Run() if run is None else run
    gather = gather_of(head.weight.parameters())
    return run if gather is None else replace(run, gather=gather)


def describe_head(model: nn.Module) -> Head:
    """Make the `Head` of a causal language model, text or vision-language, wrapped or not.

    Its `weight` is the head's module. The `Head` includes what the model does to the logits (scale,
    soft-cap, number of ids), but not what the model does to the hidden states before the head.

    If the library has already run the model, it has measured these constants. Otherwise, they come
    from the config.

    Args:
        model: as in `causal_lm_logps`.

    Returns:
        `Head`, for `linear_logps` and `grpo_loss`.

    Raises:
        TypeError: `model` is not a transformers model or is an encoder-decoder model, or its head
            is not one linear layer; the message says what was found.
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
            f"{type(base).__name__}, an encoder-decoder model: call linear_logps or grpo_loss "
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


def _constants(head: Head) -> Constants:
    return head.logit_scale, head.final_logit_softcapping, head.vocab_size


def _from_config(base: PreTrainedModel) -> Constants:
    config = base.config.get_text_config(decoder=True)

    def first(names: tuple[str, ...]) -> float | None:
        numbers = (getattr(config, name, None) for name in names)
        return next((float(x) for x in numbers if isinstance(x, int | float) and x > 0), None)

    scale = first(_FACTORS) or 1.0 / (first(_DIVISORS) or 1.0)
    return scale, first(_CAPS), None


def run_in_head(
    model: nn.Module,
    run: Callable[[HeadCall], dict[str, Any]],
    score: Score,
    inputs: dict[str, Any],
    layout: BatchLayout,
    needed: Tensor,  # (B, L) bool, cells whose hidden states are read
    live: Tensor | None,  # (B,) bool, as in `live_trunk`
) -> tuple[Results, ModelOutput, dict[str, tuple[int, int]]]:
    """Run a model with `score` in its head: (results, output without logits, counts by metric).

    `run` runs the model on `inputs`, and packs its output with the call that it gets. A model whose
    output has a scalar may need the whole batch, so the first time it runs once more, on all of it.
    """
    base = causal_lm(model)
    # PEFT expects an adapter name per sequence of the padded batch
    if base in _models_with_scalars or "adapter_names" in inputs:
        layout, live = "padded", None

    def score_whole(hidden: Tensor, head: Head) -> Results:
        # accelerate makes FSDP2 cast logits to 16 bits, where log-probabilities keep only 8 bits
        unit: Any = next((x for x in base.modules() if is_fsdp_unit(x)), None)
        root = None if unit is None else unit._get_fsdp_state()._state_ctx.iter_forward_root
        if root is not None and root._mp_policy.output_dtype is not None:
            root._mp_policy = replace(root._mp_policy, output_dtype=None)
        return score(hidden, head)

    call = HeadCall(model, score_whole, inputs, needed)

    def run_trunk() -> tuple[dict[str, Any], TrunkCall]:
        with live_trunk(model, layout, live, needed) as of_trunk:
            return run(call), of_trunk

    returned, of_trunk = call.run(run_trunk)
    fields: dict[str, Any] = returned[FIELDS]
    has_scalar = any(isinstance(x, Tensor) and x.dim() == 0 for x in pytree.tree_leaves(fields))
    part, is_new = of_trunk.computed(), has_scalar and base not in _models_with_scalars
    if is_new and most_of_ranks(rank_groups(trunk_of(model)), [int(part is not None)])[0]:
        _models_with_scalars.add(base)  # such as an aux_loss, which may need all hidden states
        return run_in_head(model, run, score, inputs, layout, needed, live)
    if part is not None:
        fields = pytree.tree_map(functools.partial(_nan_but_at, part), fields)
    return returned[RESULTS], call.output_type(**fields), of_trunk.counts()


def _nan_but_at(computed: Tensor, x: Any) -> Any:
    """Set `x`, a tensor (B, L, ...) of an output, to NaN outside the cells `computed` (B, L)."""
    if not isinstance(x, Tensor) or x.shape[:2] != computed.shape or not x.is_floating_point():
        return x
    cells = computed.to(x.device, non_blocking=True).reshape(*computed.shape, *(1,) * (x.dim() - 2))
    return x.masked_fill(~cells, float("nan"))


def measured_head(base: nn.Module, forward: Callable[..., Any]) -> Head:
    """The head of `base`, with constants that map the body's output to the model's logits.

    It is for callers that run body and head themselves, without the model's own `forward`. On first
    use, `forward` runs on two tokens as a guest. It runs inside the caller's own call of `base`, so
    FSDP2 and ZeRO-3 have gathered what it reads.
    """
    states: list[Tensor] = []  # gets the body's output, then the head's input

    def keep(hidden: Tensor, _: Head) -> Results:
        states.append(hidden)
        return {"none": hidden.new_zeros(1)}

    def look(*args: Any) -> None:
        output = args[-1]
        states.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

    call = HeadCall(base, keep)
    module, linear = call.head.weight, linear_of(call.head.weight)
    if not call.is_checked or module not in _factors:
        ids = torch.full((1, 2), ordinary_id(base), device=linear.weight.device)

        def run_two_tokens() -> None:
            with torch.no_grad(), guest(base, ids.device), evaluating(base):
                looking = trunk_of(base).register_forward_hook(look)
                try:
                    call.pack_output(forward(input_ids=ids))
                finally:
                    looking.remove()

        call.run(run_two_tokens)
        of_body, made = (x[0, -1].double() for x in states[-2:])
        factor = ((made @ of_body) / (of_body @ of_body)).item()
        factor = 1.0 if abs(factor - 1.0) < 1e-3 else factor
        if (made - factor * of_body).norm() > 1e-2 * made.norm():
            raise ValueError(
                "model: expected a head that reads the output of its body, but "
                f"{type(base).__name__} changes it in between; use causal_lm_loss and "
                "causal_lm_logps, which are exact for it"
            )
        _factors[module] = factor
    factor = _factors[module]
    if factor != 1.0 and linear.bias is not None:
        raise ValueError(
            "model: expected a head without bias, since its hidden states are scaled by "
            f"{factor:g}, got one with bias"
        )
    return replace(call.head, logit_scale=call.head.logit_scale * factor)


class HeadCall:
    """Replacement for a model's head during a forward; it returns scores instead of logits.

    Scores are laid out in a (1, R, V) tensor, so that the model can treat them as logits. Until the
    head `is_checked`, the two rows of a `HeadCheck` come first.

    For each forward: `in_head`, inside it `pack_output` with what the model returns. If the model
    uses other constants than those of `head`, the `head` then gets the measured ones; `run` repeats
    the forward until they are right.

    Args:
        inputs: the model's inputs, on which the head's constants may depend.
        needed: (B, L) bool, cells whose hidden states are read; None: all.
    """

    check: HeadCheck | None = None  # of the last forward; None: the head is known
    # each forward sets these
    project: Callable[..., Tensor]  # the head's own forward
    result_specs: dict[str, tuple[torch.Size, torch.dtype]]  # name -> shape, dtype
    results: Results
    output: Tensor  # (1, R, V)
    rows: Tensor  # (R, V), detached
    output_type: type[ModelOutput]

    def __init__(
        self,
        model: nn.Module,
        score: Score,
        inputs: Mapping[str, Any] | None = None,
        needed: Tensor | None = None,
    ) -> None:
        self.model, self.score, self.needed = causal_lm(model), score, needed
        self.head, self.facts, self.is_checked = known_head(model, inputs or {})

    def run(self, forward: Callable[[], T]) -> T:
        """Call `forward` with this in the head's place, and again if a constant was wrong."""
        for _ in range(_MOST_RUNS):
            used = self.head
            with self.in_head():
                found = forward()
            if self.head is used:  # equal on all ranks, so all run again
                return found
        raise ValueError(
            "model: expected one scale, soft-cap or cut of the logits, got another in each run: "
            f"{_constants(self.head)}"
        )

    @contextmanager
    def in_head(self) -> Iterator[None]:
        """Replace the head inside the context, and verify its constants afterwards."""
        self.result_specs, self.results = {}, {}
        head, name = self.head.weight, forward_name(self.head.weight)
        self.project = getattr(head, name)
        if isinstance(getattr(self.project, "__self__", None), HeadCall):
            raise RuntimeError(
                "model: expected one whose head is not in use, got one inside head_inputs or "
                "another call of it"
            )
        with replaced(head, name, self._head_forward):
            unpacking = head.register_forward_hook(self._unpack)
            try:
                yield
            finally:
                unpacking.remove()
        if self.check is not None:
            self.head = self.check.verified(self.model, self.facts)

    def _head_forward(self, hidden: Tensor, *others: Any, **named: Any) -> Tensor:
        """Score `hidden` (B, L, H) instead of projecting it; the scores are (1, R, V)."""
        if self.result_specs:
            raise RuntimeError(
                "model: expected a forward that calls its head once, but "
                f"{type(self.head.weight).__name__} is called again"
            )
        if others or named:  # for example PEFT's adapter_names, one adapter per row
            given = ", ".join([*(type(x).__name__ for x in others), *named])
            raise ValueError(
                f"model: expected its head to get only hidden states, got {given} as well"
            )
        sample = None if self.is_checked else self._sample(hidden)

        def compute(hidden: Tensor) -> tuple[Tensor, ...]:
            if sample is not None:
                self.check = HeadCheck(self.head, *sample)
            found = self.score(hidden, self.head)
            self.result_specs = {name: (x.shape, x.dtype) for name, x in found.items()}
            return tuple(found.values())

        # under ZeRO-3, these are the adapters
        inner = [x for x in divided_modules(self.head.weight) if x is not self.head.weight]
        results = within_forwards(inner, compute, hidden)
        flat = torch.cat([x.reshape(-1) for x in results])
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))  # like the check's rows
        vocab = linear_of(self.head.weight).weight.shape[0]
        rows = nn.functional.pad(flat, (0, -flat.numel() % vocab)).view(-1, vocab)
        if self.check:
            rows = torch.cat([self.check.rows.to(rows.dtype), rows])
        self.rows = rows.detach()
        # a copy: if it were a view, a model that writes into its logits would remove FSDP2's hook
        self.output = rows[None].clone()
        return self.output

    @torch.no_grad()
    def _sample(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(a state (H,) of `hidden` that is read, its logits (V,) by the head's own forward)."""
        cell = 0
        if self.needed is not None:  # `hidden` may lack columns on the left, or have more of them
            columns = min(hidden.shape[-2], self.needed.shape[1])
            hidden = hidden[..., -columns:, :]
            cell = int(self.needed[:, -columns:].to(torch.uint8).argmax())
        states = hidden.reshape(-1, hidden.shape[-1])
        dtype = linear_of(self.head.weight).weight.dtype  # TRL's fp32 head gets 16-bit states
        # a wrong shape is reported by the score
        state = states[min(cell, len(states) - 1)].detach().to(dtype)
        with evaluating(self.head.weight):
            return state, self.project(state.view(1, 1, -1)).view(-1)

    def _unpack(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Read the results from the head's `output`, after all other hooks."""
        if is_fsdp_unit(module) and output.dtype != self.output.dtype:
            output = self.output  # FSDP2's mixed precision hooks it, and passes on a rounded copy
        hooks = foreign_hooks(module)
        if hooks and not torch.allclose(
            output[0].detach().to(self.rows), self.rows, rtol=0, atol=0, equal_nan=True
        ):
            raise TypeError(
                "model: expected forward hooks on its head that change nothing, got "
                f"{', '.join(hooks)}"
            )
        flat = output[0, 2 if self.check else 0 :].reshape(-1)
        sizes = [shape.numel() for shape, _ in self.result_specs.values()]
        pieces = flat[: sum(sizes)].split(sizes)
        for x, (name, (shape, dtype)) in zip(pieces, self.result_specs.items(), strict=True):
            # a copy, because the model may write into its logits
            self.results[name] = x.view(shape).to(dtype, copy=True)

    def pack_output(self, output: Any) -> Any:
        """Make a dict to return instead of the model's `output`: results, and other fields."""
        if not self.results:
            name = type(self.head.weight).__name__
            raise RuntimeError(
                f"model: expected a forward that calls its head, but {name} was not called"
            )
        logits = getattr(output, "logits", None)
        is_of_rows = isinstance(logits, Tensor) and logits.dim() == 3 and logits.shape[1] > 1
        if not isinstance(output, ModelOutput) or (self.check and not is_of_rows):
            raise ValueError(
                f"model: expected an output with logits (B, T, V), got {type(output).__name__}"
            )
        if self.check:
            self.check.made = output.logits[0, :2].detach()
        self.output_type = type(output)
        others = {name: x for name, x in output.items() if name != "logits"}
        return {RESULTS: self.results, FIELDS: others}


class HeadInputs:
    """The head and its input; filled when the block ``with head_inputs(model)`` ends.

    Attributes:
        hidden: (B, L, H), attached to the model's graph; position t predicts token t + 1.
        of_model: a `Head` around the model's own module, with the model's scale, soft-cap and
            vocabulary size.
    """

    hidden: Tensor
    of_model: Head

    def head(self, states: Tensor) -> Head:
        """Return the head for scoring `states` (..., H), a part of `hidden`."""
        return read(self.of_model, states)


@contextmanager
def head_inputs(model: nn.Module) -> Iterator[HeadInputs]:
    """Capture the input of the head from one forward, without computing logits.

    ::

        with head_inputs(model) as found:
            model(input_ids=ids, attention_mask=attention_mask)
        states = found.hidden[:, :-1]
        scores = linear_logps(states, found.head(states), ids[:, 1:])

    Use it for losses that `causal_lm_logps` and `causal_lm_loss` do not cover, or to get a
    teacher's hidden states. In the model's output, `logits` holds the head's input (B, L, H); all
    other fields are unchanged.

    Args:
        model: as in `causal_lm_logps`. The head's parameters are read after the forward. If
            FSDP2 or ZeRO-3 shards the head, its weight is incomplete at that time; use
            `causal_lm_logps` or `causal_lm_loss`, which compute inside the forward.

    Yields:
        `HeadInputs`, empty until the context ends.

    Raises:
        TypeError, ValueError: as in `causal_lm_logps`. The library checks a model's logits the
            first time that it sees the model.
        RuntimeError: the model did not run inside the context, or called its head more than once.
    """
    base = causal_lm(model)
    found, model_forward = HeadInputs(), base.forward
    call = HeadCall(model, lambda hidden, _: {"hidden": hidden})

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = model_forward(*args, **kwargs)
        hidden = call.pack_output(output)[RESULTS]["hidden"]
        return type(output)(**{**output, "logits": hidden})

    def take(module: nn.Module, args: Any, output: Any) -> None:
        _, dtype = call.result_specs["hidden"]
        found.hidden = output.logits.to(dtype)  # undoes accelerate's cast of 16 bits to fp32

    with call.in_head(), replaced(base, "forward", forward):
        # This hook runs after the hooks of wrappers, such as FSDP2's for the backward.
        last = model.register_forward_hook(take)
        try:
            yield found
        finally:
            last.remove()
    if not call.results:
        raise RuntimeError("head_inputs: expected one forward of the model inside, got none")
    found.of_model = call.head


class HeadCheck:
    """Compare a head with its model's own logits, in one forward of the model.

    Along with the scores, the head returns two rows as logits. The first row holds real logits,
    which the model's own head projects from one hidden state; they serve to compare
    log-probabilities. The second row holds known numbers. If the model changes them in any way
    other than the constants predict, they serve to measure the constants.

    It is made inside the head's forward, where the parameters are complete.
    """

    rows: Tensor  # (2, V), to return to the model as logits
    made: Tensor  # what the model returned for them, (2, V) or with fewer columns; for `verified`

    @torch.no_grad()
    def __init__(self, head: Head, state: Tensor, logits: Tensor) -> None:
        self._head, self._eps, size = head, torch.finfo(logits.dtype).eps, len(logits)
        count = head.vocab_size or size
        self._ids = torch.linspace(0, count - 1, 8, device=logits.device).long()
        self._ids[0] = logits[:count].argmax()
        states = state.expand(len(self._ids), -1)
        with evaluating(head.weight):
            self._logps = linear_logps(states, read(head, states), self._ids, entropy=False).logps
        # (V,) numbers of both signs from 0.01 to 1e8, which reveal any factor and any cap
        steps = 10.0 ** torch.arange(-2, 9, dtype=self._logps.dtype, device=logits.device)
        both = torch.stack([steps, -steps], dim=1).reshape(-1)
        rungs = both.repeat(size // 22 + 1)[:size]
        self.rows = torch.stack([logits.to(self._logps.dtype), rungs])

    @torch.no_grad()
    def verified(self, model: nn.Module, facts: Any) -> Head:
        """The head with the constants that `model` really uses, measured if necessary.

        From now on, `known_head` returns it for these `facts`.
        """
        head, (own, climbed), (logits, rungs) = self._head, self.made, self.rows
        agrees, name = not len(_wrong_ids(head, rungs, climbed)), type(model).__name__
        # logits at padding may be NaN, which cannot be compared
        is_finite = bool(logits.isfinite().all())
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
        known[facts] = _constants(head), agrees and is_finite
        if len(known) > _FACTS:  # some arguments have a new value in each call
            del known[next(iter(known))]
        return head


def _wrong_ids(head: Head, rungs: Tensor, logits: Tensor) -> Tensor:
    """Ids whose logit `head` makes differently from `rungs` (V,), up to rounding.

    If it makes another number of logits, these are the first ids of positive rungs.
    """
    cap = head.final_logit_softcapping
    expected = head.logit_scale * rungs[: head.vocab_size].double()
    expected = expected if cap is None else cap * torch.tanh(expected / cap)
    if expected.shape != logits.shape:
        return torch.arange(0, 8, 2)
    tolerance = 16 * torch.finfo(logits.dtype).eps
    agrees = (logits.double() - expected).abs() <= tolerance * expected.abs()
    return (~agrees).nonzero().squeeze(1)


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
        if not len(_wrong_ids(found, rungs, logits)):
            return found
    ids = _wrong_ids(head, rungs, logits)[:4].tolist()
    pairs = ", ".join(f"{rungs[i]:g} -> {logits[i]:g} (id {i})" for i in ids if i < count)
    raise ValueError(
        f"model: expected a scale, a soft-cap or a cut of the logits, but {name} turns "
        f"{rungs.shape[0]} raw logits into {count}: {pairs}"
    )
