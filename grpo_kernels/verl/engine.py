"""verl's FSDP engines: what they tell our forward about a micro-batch.

verl's engine has the whole micro-batch and the loss at hand when it calls the model, but hands on
ids and positions alone. So `prepare_model_inputs` gets one argument more for a model with our
forward (`forward`): the rows that count, with the gradient to expect there (`rows`), the layout of
the trunk, and the teacher of a distillation. `forward_step` notes the loss for it.

**Trees.** verl scatters the responses of a prompt over micro-batches. Where a tree is exact for the
model, and the loss is the same sum however sequences are divided, they are brought together: in
micro-batches of as many sequences, or, in dynamic ones, of as many distinct tokens as verl allows
tokens. Dynamic micro-batches are then as few as the rank needs that needs most.

**zero_advantage=score.** Where all rewards of a group are equal, its advantages are 0, and so is
the gradient of its sequences. This option puts them into micro-batches of their own, which are
scored under ``no_grad``, for the metrics. The loss itself confirms each of them, by its derivatives
at the log-probabilities found: if one is not 0, the micro-batch runs again with a graph. All ranks
run equally many of both kinds, since FSDP's collectives go in step.

**Distillation** (`loss_mode=forward_kl_topk`). verl's own fused heads have no logits for that loss.
But its engine reads the field ``fused_linear_aux`` of a model's output, if there is one: the loss
of each token, and both models' mass on the listed ids. So our forward gets the teacher's ids and
log-probabilities, and returns that field.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from grpo_kernels.base.checks import warn_once
from grpo_kernels.base.choices import BatchLayout, choices
from grpo_kernels.patching import KnownRows, divided, during, function_of, numbered
from grpo_kernels.verl.rows import (
    Mode,
    Places,
    actor_config,
    flag,
    has_other_terms,
    mode_of,
    numbers_of,
    packed_rows,
    padded,
    slopes_of,
)

BACKEND = "grpo_kernels"
ARGUMENT = "grpo_kernels_task"  # argument of our forward
MARK = "_verl_fused_kernels_backend"  # verl's own mark of a model whose forward it has replaced
DEAD = "grpo_kernels_dead"  # flag of a micro-batch: it has no gradient
OPTIONS = "actor_rollout_ref.model.fused_kernel_options"
WHERE = f"{OPTIONS}.zero_advantage"
MODE = "forward_kl_topk"

STEP = ("self", "micro_batch", "loss_function", "forward_only")
RUN = ("self", "data", "loss_function", "forward_only")
_BY_SIZE = ("num_batches_divided_by", "same_micro_num_in_dp", "min_num_micro_batch")
DIVIDE = ("data", "dp_group", *_BY_SIZE, "use_dynamic_bsz_balance")


class Plan:
    """How the sequences of a mini-batch are divided into micro-batches.

    Attributes:
        loss_of: (model's output, micro-batch) -> (loss, metrics).
        live: (B,) bool, those that may have a gradient; None: all.
        moves: True if those of a prompt come together, on each rank where
        fits: a tree is exact for the model.
        parts: the sequences of each of our micro-batches; none: they are verl's.
        theirs: verl's micro-batches, and the sequences of each.
        outputs: what the model has given for each of ours.
    """

    def __init__(
        self, loss_of: Callable[..., Any], live: Tensor | None, *, moves: bool, fits: bool
    ) -> None:
        self.loss_of, self.live, self.moves, self.fits = loss_of, live, moves, fits
        self.parts: list[list[int]] = []
        self.theirs: list[tuple[Any, list[int]]] = []
        self.outputs: list[dict[str, Tensor]] = []

    def as_verls(self) -> Iterator[dict[str, Any]]:
        """What verl's micro-batches would have given, from the outputs of ours."""
        found: dict[str, dict[int, Tensor]] = {name: {} for name in self.outputs[0]}
        for part, output in zip(self.parts, self.outputs, strict=True):
            for name, x in output.items():
                found[name].update(zip(part, x.unbind(), strict=True))
        for micro_batch, part in self.theirs:
            output = {
                name: torch.nested.as_nested_tensor([x[i] for i in part], layout=torch.jagged)
                for name, x in found.items()
            }
            with torch.no_grad():
                loss, metrics = self.loss_of(output, micro_batch)
            yield {"model_output": output, "loss": float(loss), "metrics": metrics}


_loss_function: ContextVar[Any] = ContextVar("loss_function", default=None)
_plan: ContextVar[Plan | None] = ContextVar("plan", default=None)


# No dataclasses below: FSDP rounds the tensors of a dataclass on the way into a model.
class TeacherLogprobs:
    """Teacher's log-probabilities for a forward.

    Attributes:
        ids, logps: (1, N, K), for the packed tokens of this rank.
        log_prob_min_clamp: as in `topk_divergence`.
        alone: True if only the divergence is wanted, without log-probabilities and entropies.
    """

    def __init__(
        self, ids: Tensor, logps: Tensor, log_prob_min_clamp: float | None, *, alone: bool
    ) -> None:
        self.ids, self.logps = ids, logps
        self.log_prob_min_clamp, self.alone = log_prob_min_clamp, alone


class HeadTask:
    """Request of a micro-batch to the head.

    Attributes:
        rows: those of the call, as its labels lie; None: all count.
        teacher: of a distillation.
        layout: of the trunk, as in `causal_lm_loss`.
    """

    def __init__(
        self,
        rows: KnownRows | None = None,
        teacher: TeacherLogprobs | None = None,
        layout: BatchLayout = "padded",
    ) -> None:
        self.rows, self.teacher, self.layout = rows, teacher, layout


def changes(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements for verl.workers.engine.fsdp.transformer_impl."""
    engine = getattr(module, "FSDPEngineWithLMHead", None)
    if engine is None:
        raise LookupError(f"{module.__name__} has no FSDPEngineWithLMHead")
    prepare = function_of(engine, "prepare_model_inputs", ("self", "micro_batch"))
    step = function_of(engine, "forward_step", STEP)
    run = function_of(engine, "forward_backward_batch", RUN)
    theirs = function_of(module, "prepare_micro_batches", DIVIDE)
    join = function_of(module, "postprocess_batch_func", ("output_lst", "indices", "data"))
    function_of(engine, "_get_packed_pad_size", ("self", "packed_length"))

    @functools.wraps(prepare)
    def prepare_model_inputs(self: Any, micro_batch: Any) -> Any:
        model_inputs, output_args = prepare(self, micro_batch)
        if _is_ours(self, micro_batch):
            loss_function = _loss_function.get()
            rows = packed_rows(micro_batch, loss_function, self.get_data_parallel_group())
            if rows is not None:
                rows = rows.at(_laid_out(self, micro_batch, numbers_of(rows)) - 1)
            teacher, layout = _teacher(self, micro_batch, loss_function), _layout(self)
            model_inputs[ARGUMENT] = HeadTask(rows, teacher, layout)
        return model_inputs, output_args

    @functools.wraps(step)
    def forward_step(self: Any, micro_batch: Any, loss_function: Any, forward_only: Any) -> Any:
        def run_with(function: Any) -> Any:
            return step(self, micro_batch, function, forward_only)

        with during(_loss_function, loss_function):
            if flag(micro_batch, DEAD):
                found = _scored(run_with, loss_function, self.get_data_parallel_group())
            else:
                found = run_with(loss_function)
        plan = _plan.get()
        if plan is not None:
            plan.outputs.append(found[1]["model_output"])
        return found

    @functools.wraps(run)
    def forward_backward_batch(
        self: Any, data: Any, loss_function: Any, forward_only: Any = False
    ) -> Any:
        plan = None

        def loss_of(output: Any, micro_batch: Any) -> Any:
            if loss_function is None:
                return 1.0, {}  # as verl
            group = self.get_data_parallel_group()
            micro_batch = micro_batch.to(module.get_device_id())
            return loss_function(model_output=output, data=micro_batch, dp_group=group)

        if _is_ours(self, data):
            live = None
            if asks_to_score(self.model_config.fused_kernel_options) and not forward_only:
                live = _live_sequences(data, loss_function)
            moves = _layout(self) == "tree" and _may_move(data, loss_function)
            if moves or live is not None:
                plan = Plan(loss_of, live, moves=moves, fits=moves and _fits_trees(self))
        with during(_plan, plan):
            return run(self, data, loss_function, forward_only)

    @functools.wraps(theirs)
    def prepare_micro_batches(data: Any, dp_group: Any = None, **options: Any) -> Any:
        plan = _plan.get()
        if plan is None:
            return theirs(data, dp_group, **options)

        def divide(part: Any) -> Any:
            return theirs(part, dp_group, **options)

        return _divided(divide, data, plan, dp_group, module.get_device_id())

    @functools.wraps(join)
    def postprocess_batch_func(output_lst: Any, indices: Any, data: Any) -> Any:
        """verl's results: of its micro-batches, whatever ours were."""
        plan = _plan.get()
        if plan is None or not plan.parts:
            return join(output_lst, indices, data)
        names = output_lst[0].keys()  # without model_output, where nobody reads it
        outputs = [{name: x[name] for name in names} for x in plan.as_verls()]
        return join(outputs, [part for _, part in plan.theirs], data)

    yield engine, "prepare_model_inputs", prepare_model_inputs
    yield engine, "forward_step", forward_step
    yield engine, "forward_backward_batch", forward_backward_batch
    yield module, "prepare_micro_batches", prepare_micro_batches
    yield module, "postprocess_batch_func", postprocess_batch_func


def _is_ours(engine: Any, data: Any) -> bool:
    """True if the model has our forward, and `data` asks for it."""
    return bool(flag(data, "use_fused_kernels")) and getattr(engine.module, MARK, None) == BACKEND


def _laid_out(engine: Any, micro_batch: Any, numbers: Tensor) -> Tensor:
    """`numbers` of the packed tokens (N,) as verl lays out the labels; 0 where it pads."""
    if not flag(micro_batch, "use_remove_padding", default=True):
        offsets = micro_batch["input_ids"].offsets()
        nested = torch.nested.nested_tensor_from_jagged(numbers, offsets)
        size = len(offsets) - 1, int(offsets.diff().max())
        return torch.nested.to_padded_tensor(nested, 0, output_size=size)
    numbers = F.pad(numbers, (0, engine._get_packed_pad_size(len(numbers))))[None]
    if engine.use_ulysses_sp:
        ulysses = importlib.import_module("verl.utils.ulysses")
        ranks = engine.ulysses_sequence_parallel_size
        numbers = ulysses.ulysses_pad_and_slice_inputs(numbers, None, ranks)[0]
    return numbers


def _teacher(engine: Any, micro_batch: Any, loss_function: Any) -> TeacherLogprobs | None:
    """The teacher's part of the micro-batch, for the tokens of this rank, if one is asked for."""
    if not flag(micro_batch, "distillation_use_topk"):
        return None
    config = getattr(loss_function, "keywords", {}).get("distillation_config")
    loss = None if config is None else config.distillation_loss
    if loss is None or loss.loss_mode != MODE:
        got = None if loss is None else loss.loss_mode
        raise ValueError(
            f"distillation.distillation_loss.loss_mode: expected {MODE!r}, got {got!r}"
        )
    if not flag(micro_batch, "use_remove_padding", default=True):
        raise ValueError(
            "actor_rollout_ref.model.use_remove_padding: expected True for distillation with fused "
            "kernels, got False"
        )
    names = ("teacher_ids", "teacher_logprobs")
    ids, logps = (micro_batch[name].values().unsqueeze(0) for name in names)
    if engine.use_ulysses_sp:
        ulysses = importlib.import_module("verl.utils.ulysses")
        ids, logps = (ulysses.slice_input_tensor(x, dim=1, padding=True) for x in (ids, logps))
    alone = flag(micro_batch, "distillation_only") and not flag(micro_batch, "calculate_entropy")
    return TeacherLogprobs(ids, logps, loss.log_prob_min_clamp, alone=bool(alone))


def asks_to_score(options: Any) -> bool:
    """Read verl's ``fused_kernel_options``; True: ``zero_advantage=score``."""
    unknown = set(options) - {"impl_backend", "zero_advantage", "layout", "old_logprobs"}
    if unknown:
        raise ValueError(
            f"{OPTIONS}: expected impl_backend, zero_advantage, layout and old_logprobs, got "
            f"{', '.join(sorted(map(str, unknown)))}"
        )
    chosen(options, "old_logprobs", ("auto", "score"))  # which the trainer reads
    return chosen(options, "zero_advantage", ("train", "score")) == "score"


def chosen(options: Any, name: str, values: tuple[str, ...]) -> str:
    """The value of an option of ``fused_kernel_options``; the first one is the default."""
    value = options.get(name, values[0])
    if value not in values:
        raise ValueError(
            f"{OPTIONS}.{name}: expected one of {', '.join(map(repr, values))}, got {value!r}"
        )
    return str(value)


def _layout(engine: Any) -> BatchLayout:
    options = engine.model_config.fused_kernel_options
    layout = cast(BatchLayout, chosen(options, "layout", choices(BatchLayout)))
    if engine.use_ulysses_sp and layout != "padded":
        warn_once(
            f"{OPTIONS}.layout={layout}: Ulysses divides sequences over ranks, so they run as "
            "given; results are the same"
        )
        return "padded"
    return layout


def _fits_trees(engine: Any) -> bool:
    from grpo_kernels.body.trial import fits_trees
    from grpo_kernels.body.trunk import trunk_of

    return fits_trees(trunk_of(engine.module)) is True


def _may_move(data: Any, loss_function: Any) -> bool:
    """True if no result depends on which sequences share a micro-batch, as far as is known."""
    if not {"prompts", "responses"} <= set(data.keys()) or flag(data, "force_group_size", 1) != 1:
        return False
    config = actor_config(loss_function)
    if config is None:
        return loss_function is None
    return may_move(config)


def may_move(config: Any) -> bool:
    """True if an actor's loss is a sum over sequences, whichever share a micro-batch."""
    return mode_of(config) != Mode() and not _is_by_width(config)


def _is_by_width(config: Any) -> bool:
    norm = config.loss_agg_mode == "seq-mean-token-sum-norm"
    return norm and config.loss_scale_factor is None


def _live_sequences(data: Any, loss_function: Any) -> Tensor:
    """(B,) bool: sequences of `data` that may have a gradient."""
    reason = _reason_to_train(data, loss_function)
    if reason is not None:
        raise ValueError(f"{WHERE}: expected 'train' {reason}, got 'score'")
    names = ["response_mask", "advantages"]
    if "rollout_is_weights" in data.keys() and mode_of(actor_config(loss_function)).by_weight:  # noqa: SIM118
        names.append("rollout_is_weights")
    width = Places(data).width
    return torch.stack([padded(data[name], width) != 0 for name in names]).all(dim=0).any(dim=1)


def _reason_to_train(data: Any, loss_function: Any) -> str | None:
    config = actor_config(loss_function)
    if config is None:
        return "with another loss than ppo_loss"
    if has_other_terms(config, entropy=bool(flag(data, "calculate_entropy"))):
        return "with a KL or entropy term, which gives all sequences a gradient"
    if not mode_of(config).by_advantage:
        return f"with loss_mode={config.policy_loss.get('loss_mode', 'vanilla')}"
    if _is_by_width(config):
        return (
            "with seq-mean-token-sum-norm without loss_scale_factor, which divides by a "
            "micro-batch's own width"
        )
    if flag(data, "return_model_output") or flag(data, "force_group_size", 1) != 1:
        return "with return_model_output or force_group_size"
    return None


def _divided(
    divide: Callable[[Any], Any], data: Any, plan: Plan, group: Any, device: Any
) -> tuple[list[Any], list[list[int]] | None]:
    """Our micro-batches of `data` and their sequences; `divide` makes verl's, of which as many.

    Those without gradient come first, and are flagged: verl synchronises gradients in the last
    one, so one with a graph is left to the end.
    """
    tensordict_utils = importlib.import_module("verl.utils.tensordict_utils")
    select = tensordict_utils.index_select_tensor_dict
    dynamic = flag(data, "use_dynamic_bsz", default=True)
    batches, indices = divide(data)
    if plan.live is None and not (plan.fits or (plan.moves and dynamic)):
        return batches, indices
    prompts, lengths = _prompts(data) if plan.fits else ([(0, 0)] * len(data), [])
    live = torch.ones(len(data), dtype=torch.bool) if plan.live is None else plan.live.cpu()
    order = sorted(range(len(data)), key=lambda i: (bool(live[i]), prompts[i]))
    n_dead = int((~live).sum())

    def part_of(rows: list[int]) -> list[list[int]]:
        return by_prompt(rows, [[rows[i] for i in x] for x in divide(select(data, rows))[1]])

    def by_prompt(rows: list[int], theirs: list[list[int]]) -> list[list[int]]:
        if not plan.moves:
            return theirs
        own, sizes = [prompts[i] for i in rows], [lengths[i] for i in rows if plan.fits]
        budget = data["max_token_len_per_gpu"]
        count, parts = len(theirs), None
        least = -(-_tokens(own, sizes, range(len(rows))) // budget) if plan.fits else count + 1
        for n in range(least, count + 1):
            found = divided(own, sizes, [True] * len(rows), n, budget, len(rows), in_trees=True)
            if max(_tokens(own, sizes, part) for part in found) <= budget:
                count, parts = n, found
                break
        most = -_least(group, device, -count)[0]
        if parts is None:
            return theirs
        parts += [[] for _ in range(most - len(parts))]
        for part in parts:  # other ranks need more
            if not part:
                largest = max(parts, key=lambda x: (len(x) > 1, _tokens(own, sizes, x)))
                part += largest[len(largest) // 2 :]
                del largest[len(largest) // 2 :]
        parts.sort(key=lambda part: -_tokens(own, sizes, part))  # on all ranks: none waits for long
        return [[rows[i] for i in part] for part in parts]

    if dynamic:
        dead: list[list[int]] = []
        live_parts: list[list[int]] = []
        if plan.live is not None and min(_least(group, device, n_dead, len(data) - n_dead)):
            with suppress(ValueError):  # on all ranks: one has too few for another's micro-batches
                dead, live_parts = part_of(order[:n_dead]), part_of(order[n_dead:])
        parts, without = dead + live_parts or by_prompt(order, indices), len(dead)
    else:
        size = data["micro_batch_size_per_gpu"]
        parts, without = [order[i : i + size] for i in range(0, len(order), size)], 0
        if plan.live is not None:
            (without,) = _least(group, device, min(n_dead // size, len(parts) - 1))
        indices = [[*range(i, i + size)] for i in range(0, len(order), size)]
    plan.parts, plan.theirs = parts, [*zip(batches, indices, strict=True)]
    micro_batches = [select(data, part) for part in parts]
    for micro_batch in micro_batches[:without]:
        tensordict_utils.assign_non_tensor(micro_batch, **{DEAD: True})
    return micro_batches, parts


def _prompts(data: Any) -> tuple[list[tuple[int, int]], list[int]]:
    """(the prompt, `numbered`; the number of tokens of the response) of each sequence."""
    lengths = Places(data).lengths.tolist()
    rows = [x.tolist() for x in data["input_ids"].cpu().unbind()]
    prompts = [tuple(x[: len(x) - n]) for x, n in zip(rows, lengths, strict=True)]
    return numbered(prompts), lengths


def _tokens(prompts: list[tuple[int, int]], lengths: list[int], part: Sequence[int]) -> int:
    """Tokens of the sequences `part`, prompts counted once."""
    return sum(lengths[i] for i in part) + sum(n for _, n in {prompts[i] for i in part})


def _least(group: Any, device: Any, *counts: int) -> list[int]:
    found = torch.tensor(counts, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    return [int(x) for x in found.tolist()]


def _scored(step: Callable[[Any], Any], loss_function: Any, group: Any) -> tuple[Any, Any]:
    """Run `step`, of a loss function, without a graph; again with one if there is a gradient."""
    steepest: list[Tensor] = []

    def confirmed(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, Any]:
        results: list[tuple[Tensor, Any]] = []

        def loss(leaves: dict[str, Tensor]) -> Tensor:
            results.append(loss_function(model_output=leaves, data=data, dp_group=dp_group))
            return results[0][0]

        # packed tensors do, too
        slopes = slopes_of(loss, {name: x.values() for name, x in model_output.items()})
        steepest.append(torch.stack([x.abs().amax() for x in slopes.values()]).amax())
        return results[0][0].detach(), results[0][1]

    with torch.no_grad():
        loss, output = step(confirmed)
    has_gradient = (steepest[0] != 0).float()  # NaN too
    dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=group)
    if has_gradient.item():
        warnings.warn(
            f"{WHERE}: expected no gradient where all advantages are 0, got one: those sequences "
            "run twice, since the loss has a term that is not known here; set it to 'train'",
            RuntimeWarning,
            stacklevel=2,
        )
        found: tuple[Any, Any] = step(loss_function)
        return found
    # verl calls its backward
    return loss + torch.zeros((), device=loss.device, requires_grad=True), output
