"""One forward of a transformers model whose head scores tokens in place of projecting.

The model's own forward runs, with its head replaced for the length of the call: the head is handed
the hidden states and, instead of projecting them, scores the completion tokens. That is exact for
more architectures than running the body and reading the head afterwards. Whatever the model does
before its head (a multiplier, a dense layer and a norm, a cast) has been done, and no inner module
needs to be known by name. Hooks on the model, its head and its parts run as ever: FSDP2 (the head
in the root's unit or in its own) and DeepSpeed ZeRO-3 gather the weight there, and again for the
backward; DDP, PEFT and accelerate see one call of the model. The results leave through the outputs
of head and model, which is where those engines hook the backward.

One thing remains unknown: what the model does to the logits after its head. The config says so
under many names, and is not trusted: in the first call of a model its forward is given a few known
numbers in place of logits, and one row of real ones (`HeadCheck`). That costs one row of the head,
once, and no forward of its own: nothing random is drawn, no collective is added. If the config was
wrong, the model runs a second time with the constants that were measured; if no constants fit, the
call raises.

Not for: encoder-decoder models, several heads (codebooks), quantised heads, ``nn.DataParallel``, a
model that two threads use at a time.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput

from grpo_kernels.base.choices import BatchLayout
from grpo_kernels.base.distributed import most_of_ranks, rank_groups
from grpo_kernels.base.modes import evaluating, guest
from grpo_kernels.body.trunk import ordinary_id
from grpo_kernels.head.head import Head
from grpo_kernels.head.module import (
    divided_modules,
    foreign_hooks,
    is_fsdp_unit,
    linear_of,
    within_forwards,
)
from grpo_kernels.patching import Shares, forward_name, replaced
from grpo_kernels.transformers import head as heads
from grpo_kernels.transformers.head import HeadCheck, constants_of
from grpo_kernels.transformers.inputs import Batch, check_attended, check_attention_mask
from grpo_kernels.transformers.seam import as_it_is, live_trunk, trunk_of

RESULTS, FIELDS = "results", "others"  # of the dict that the model returns: wrappers look into it
_MOST_RUNS = 4  # of one call: constants are measured, and a number of the whole batch is computed
Score = Callable[[Tensor, Head], tuple[Tensor, ...]]  # the head's input (B, L, H) -> results
# an output of theirs may need the whole batch
_models_with_scalars: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# by head: the factor on the body's output, before the head
_factors: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()


def run_scored(
    model: nn.Module,
    batch: Batch,
    score: Score,
    inputs: dict[str, Any],
    layout: BatchLayout,
    live: Tensor | None = None,  # (B,) bool
) -> tuple[tuple[Tensor, ...], ModelOutput, Shares]:
    """Run `model` with `score` in its head; the results, its output without logits, and shares.

    `layout` and `live` go to `live_trunk`.
    """
    base, inputs = _model_inputs(model, batch, inputs)
    needed = batch.needed()
    is_checked = heads.known_head(model, heads.facts_of(base, inputs))[1]
    # in later calls it would wait for the device
    if not is_checked or needed.device.type == "cpu":
        check_attended(
            inputs.get("attention_mask"),
            needed,
            input_ids=batch.input_ids,
            config=base.config,
            has_positions="position_ids" in inputs,
        )

    def run(call: HeadCall) -> dict[str, Any]:
        with call.within(base):
            returned: dict[str, Any] = model(**inputs)
        call.check_output(returned)
        return returned

    return run_in_head(model, run, score, inputs, layout, needed, live, batch.counted_state)


def run_in_head(
    model: nn.Module,
    run: Callable[[HeadCall], dict[str, Any]],
    score: Score,
    inputs: dict[str, Any],
    layout: BatchLayout,
    needed: Tensor,  # (B, L) bool, cells whose hidden states are read
    live: Tensor | None,  # (B,) bool
    state_of: Callable[[Tensor], Tensor],
) -> tuple[tuple[Tensor, ...], ModelOutput, Shares]:
    """`run_scored` where `run` runs the model on `inputs` within the call that it is given.

    The first time, the model's logits are checked at the state that `state_of` chooses, and where
    the config was wrong the model runs once more, with the constants that were measured.
    """
    base = heads.causal_lm(model)
    if "adapter_names" in inputs:  # PEFT's, one for each sequence of the padded batch
        layout, live = "padded", None
    facts = heads.facts_of(base, inputs)
    head, is_checked = heads.known_head(model, facts)

    def score_whole(hidden: Tensor, head: Head) -> tuple[Tensor, ...]:
        _keep_precision(base)
        return score(hidden, head)

    groups = rank_groups(trunk_of(model))
    for _ in range(_MOST_RUNS):
        is_whole = base in _models_with_scalars
        check = None if is_checked else HeadCheck(head, state_of)
        call, shares = HeadCall(head, score_whole, check), Shares()
        runs = ("padded", None) if is_whole else (layout, live)
        with live_trunk(model, *runs, needed=needed, shares=shares) as computed:
            returned = run(call)
        fields: dict[str, Any] = returned[FIELDS]
        has_scalar = any(isinstance(x, Tensor) and x.dim() == 0 for x in pytree.tree_leaves(fields))
        if has_scalar and not is_whole and most_of_ranks(groups, [int(bool(computed))])[0]:
            _models_with_scalars.add(base)  # such as an aux_loss: it may be of all hidden states
            continue
        measured = head if check is None else check.verified(base)
        if check is not None and constants_of(measured) == constants_of(head):
            # logits of a row of padding may be NaN
            heads.remember(head, facts, compared=check.is_finite)
        elif check is not None:  # all ranks measure the same
            head = measured
            continue
        return returned[RESULTS], call.output_type(**_nan_where_skipped(fields, computed)), shares
    raise ValueError(
        "model: expected one scale, soft-cap or cut of the logits, got another in each run: "
        f"{constants_of(head)}"
    )


def _keep_precision(base: nn.Module) -> None:
    """Have FSDP2 return results as they are, in a forward of `base`, from now on.

    accelerate sets ``output_dtype`` to 16 bits for logits. Of log-probabilities it would leave 8.
    """
    unit: Any = next((x for x in base.modules() if is_fsdp_unit(x)), None)
    root = None if unit is None else unit._get_fsdp_state()._state_ctx.iter_forward_root
    if root is not None and root._mp_policy.output_dtype is not None:
        root._mp_policy = replace(root._mp_policy, output_dtype=None)


def measured_head(base: nn.Module, forward: Callable[..., Any]) -> Head:
    """The head of `base`, with constants that turn its body's output into the model's logits.

    For callers that run body and head themselves, and read the model's own `forward` nowhere else.
    The first time it runs on two tokens, as a guest and within the caller's own call of `base`, so
    that FSDP2 and ZeRO-3 have made whole what it reads.
    """
    facts = heads.facts_of(base, {})
    head, is_checked = heads.known_head(base, facts)
    factor, body = _factors.get(head.weight, 1.0), trunk_of(base)
    device = linear_of(head.weight).weight.device
    states: list[Tensor] = []

    def keep(hidden: Tensor, _: Head) -> tuple[Tensor, ...]:
        states.append(hidden)
        return (hidden.new_zeros(1, dtype=torch.promote_types(hidden.dtype, torch.float32)),)

    def look(*args: Any) -> None:
        output = args[-1]
        states.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

    for _ in range(0 if is_checked and head.weight in _factors else 3):
        check = HeadCheck(head, lambda hidden: hidden[0, -1])
        call = HeadCall(head, keep, check)
        ids = torch.full((1, 2), ordinary_id(base), device=device)
        with torch.no_grad(), guest(base, device), evaluating(base), call.in_head(), as_it_is(body):
            looking = body.register_forward_hook(look)
            try:
                call.pack_output(forward(input_ids=ids))
            finally:
                looking.remove()
        made, of_body = (states.pop()[0, -1].double() for _ in range(2))
        measured = check.verified(base)
        factor = ((made @ of_body) / (of_body @ of_body)).item()
        factor = 1.0 if abs(factor - 1.0) < 1e-3 else factor
        if (made - factor * of_body).norm() > 1e-2 * made.norm():
            raise ValueError(
                "model: expected a head that is given the output of its body, "
                f"{type(base).__name__} changes it in between; its own loss and log-probabilities "
                "are those of causal_lm_loss and completion_logprobs"
            )
        if constants_of(measured) == constants_of(head):
            heads.remember(head, facts, compared=check.is_finite)
            _factors[head.weight] = factor
            break
        head = measured
    if factor != 1.0 and linear_of(head.weight).bias is not None:
        raise ValueError(
            f"model: expected a head without bias behind hidden states times {factor:g}, got one "
            "with bias"
        )
    return replace(head, logit_scale=head.logit_scale * factor)


def _model_inputs(
    model: nn.Module, batch: Batch, inputs: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """(the transformers model, the arguments of its forward)."""
    if inputs.get("labels") is not None:
        raise ValueError(
            "labels: expected none, since there are no logits to hold them against; got labels"
        )
    inputs = {name: x for name, x in inputs.items() if x is not None}
    check_attention_mask(inputs.get("attention_mask"), batch.input_ids)
    base = heads.causal_lm(model)
    parameters = inspect.signature(type(base).forward).parameters
    if "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        inputs.setdefault("use_cache", False)
    return base, {"input_ids": batch.input_ids, **inputs}


def _nan_where_skipped(fields: dict[str, Any], computed: list[Tensor]) -> dict[str, Any]:
    """The fields of an output, NaN at the cells that the trunk has skipped.

    A tensor (B, L, ...) is marked wherever it is, such as in a tuple of hidden states. `computed`
    are (b, L) bool each.
    """
    if not computed:
        return fields
    skipped = ~torch.cat(computed)

    def mark(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.shape[:2] != skipped.shape or not x.is_floating_point():
            return x
        cells = skipped.to(x.device).reshape(*skipped.shape, *(1,) * (x.dim() - 2))
        return x.masked_fill(cells, float("nan"))

    marked: dict[str, Any] = pytree.tree_map(mark, fields)
    return marked


class HeadCall:
    """Stand-in for a head during one forward: it scores, and returns scores in place of logits.

    The scores are laid out in a (1, R, V) tensor, so that the model can treat them as logits of a
    vocabulary. With a `check`, its two rows come first.
    """

    def __init__(self, head: Head, score: Score, check: HeadCheck | None) -> None:
        self.head, self.score, self.check = head, score, check
        self.name = type(head.weight).__name__
        self.project: Callable[..., Tensor] = head.weight.forward
        # of each result, once the head has run
        self.result_specs: list[tuple[torch.Size, torch.dtype]] = []
        self.output = torch.empty(0)  # of the head, (1, R, V)
        self.rows = torch.empty(0)  # the same, detached, (R, V)
        self.results: tuple[Tensor, ...] | None = None
        self.output_type = ModelOutput

    @contextmanager
    def within(self, base: nn.Module) -> Iterator[None]:
        """Inside, this call replaces the head of `base`, and `base` returns its results."""
        model_forward = base.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.pack_output(model_forward(*args, **kwargs))

        with self.in_head(), replaced(base, "forward", forward):
            yield

    @contextmanager
    def in_head(self) -> Iterator[None]:
        """Inside, this call replaces the head; `pack_output` takes what the model returns."""
        head, name = self.head.weight, forward_name(self.head.weight)
        self.project = getattr(head, name)
        if isinstance(getattr(self.project, "__self__", None), HeadCall):
            raise RuntimeError(
                "model: expected one whose head is not in use, got one within head_inputs or "
                "another call of it"
            )
        with replaced(head, name, self._head_forward):
            unpacking = head.register_forward_hook(self._unpack)
            try:
                yield
            finally:
                unpacking.remove()

    def _head_forward(self, hidden: Tensor, *others: Any, **named: Any) -> Tensor:
        """Score `hidden` (B, L, H) in place of the head's forward; the scores as (1, R, V)."""
        if self.result_specs:
            raise RuntimeError(
                f"model: expected a forward that calls its head once, {self.name} is called again"
            )
        if others or named:  # as PEFT's adapter_names, which give each row its own adapter
            given = ", ".join([*(type(x).__name__ for x in others), *named])
            raise ValueError(
                f"model: expected its head to be given hidden states alone, got {given} as well"
            )
        if self.check:
            self.check.project(hidden, self.project)

        def compute(hidden: Tensor) -> tuple[Tensor, ...]:
            if self.check:
                self.check.score()
            return self.score(hidden, self.head)

        # adapters, under ZeRO-3
        inner = [x for x in divided_modules(self.head.weight) if x is not self.head.weight]
        results = within_forwards(inner, compute, hidden)
        self.result_specs = [(x.shape, x.dtype) for x in results]
        flat = torch.cat([x.reshape(-1) for x in results])
        vocab = linear_of(self.head.weight).weight.shape[0]
        rows = nn.functional.pad(flat, (0, -flat.numel() % vocab)).view(-1, vocab)
        if self.check:
            rows = torch.cat([self.check.rows.to(rows.dtype), rows])
        self.rows = rows.detach()
        # no view: FSDP2 would lose its hook on it if the model wrote into its logits
        self.output = rows[None].clone()
        return self.output

    def _unpack(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Take the results out of the head's `output`, after all other hooks."""
        if is_fsdp_unit(module) and output.dtype != self.output.dtype:
            output = self.output  # which FSDP2's mixed precision has hooked, and rounded a copy of
        hooks = foreign_hooks(module)
        if hooks and not torch.allclose(
            output[0].detach().to(self.rows), self.rows, rtol=0, atol=0, equal_nan=True
        ):
            raise TypeError(
                "model: expected forward hooks on its head that change nothing, got "
                f"{', '.join(hooks)}"
            )
        flat = output[0, 2 if self.check else 0 :].reshape(-1)
        sizes = [shape.numel() for shape, _ in self.result_specs]
        pieces = zip(flat[: sum(sizes)].split(sizes), self.result_specs, strict=True)
        # copies, since a model may write into its logits
        self.results = tuple(x.view(shape).to(dtype, copy=True) for x, (shape, dtype) in pieces)

    def pack_output(self, output: Any) -> Any:
        """A dict in place of the model's `output`: the results, and its fields without logits."""
        if self.results is None:
            raise RuntimeError(
                f"model: expected a forward that calls its head, {self.name} was not called"
            )
        if self.check:
            self.check.take(output)
        if not isinstance(output, ModelOutput):
            raise ValueError(
                f"model: expected an output with logits (B, T, V), got {type(output).__name__}"
            )
        self.output_type = type(output)
        others = {name: x for name, x in output.items() if name != "logits"}
        return {RESULTS: self.results, FIELDS: others}

    def check_output(self, returned: Any) -> None:
        """Raise unless `returned` holds the results, no less precise than they were computed."""
        if not isinstance(returned, dict) or RESULTS not in returned:
            raise RuntimeError(
                "model: expected a wrapper that calls the model's forward, which is replaced for "
                f"this call, and returns its result, got {type(returned).__name__}; a compiled "
                "model may run the forward that it was compiled with: compile its layers instead"
            )
        for x, (_, dtype) in zip(returned[RESULTS], self.result_specs, strict=True):
            if x.dtype.itemsize < dtype.itemsize:
                raise ValueError(
                    f"model: expected results of {dtype}, and a wrapper of the model has made them "
                    f"{x.dtype}; under FSDP2, leave output_dtype out of MixedPrecisionPolicy"
                )
