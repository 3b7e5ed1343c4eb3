"""verl's FSDP engines: pass information about a micro-batch to the model's forward.

verl's engine has the whole micro-batch and the loss when it calls the model, but passes on only ids
and positions. So `prepare_model_inputs` adds an argument for a model with the forward from
`forward`. The argument holds the rows that count, with the gradient to expect there (`rows`), the
layout of the trunk, and the teacher in distillation. The engine then reads each token's loss from
the field ``fused_linear_aux`` of the output.

verl scatters the responses to a prompt over micro-batches. If a tree is exact for the model, and
the loss is the same sum however sequences are grouped, `MiniBatch` brings the responses together.
With ``zero_advantage=score``, sequences without gradient get separate micro-batches, which run
under ``no_grad``. The loss itself confirms that they have no gradient; otherwise the micro-batch
runs again with a graph. FSDP's collectives must stay in step, so all ranks run the same number of
micro-batches with a graph, and the same number without.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from types import ModuleType
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from grpo_kernels.base import BatchLayout
from grpo_kernels.base.checks import check_choice, warn_once
from grpo_kernels.base.distributed import most_of_ranks
from grpo_kernels.patching import divided, during, found_in, function_of, numbered
from grpo_kernels.verl.rows import (
    HeadTask,
    Places,
    actor_config,
    by_sequence,
    flag,
    has_other_terms,
    head_task,
    is_by_width,
    joined,
    live_rows,
    may_move,
    mode_of,
    slopes_of,
)

BACKEND = "grpo_kernels"
ARGUMENT = "grpo_kernels_task"  # argument of the forward
MARK = "_verl_fused_kernels_backend"  # verl's mark on a model whose forward it has replaced
DEAD = "grpo_kernels_dead"  # flag of a micro-batch without gradient
OPTIONS = "actor_rollout_ref.model.fused_kernel_options"
# option -> allowed values; the first is the default
VALUES = {
    "zero_advantage": ("train", "score"),
    "layout": get_args(BatchLayout),
    "old_log_probs": ("auto", "score"),
}
TOP_K = "forward_kl_topk"  # verl's loss_mode of a distillation

Changes = Iterator[tuple[Any, str, Any]]  # (object, attribute, replacement)


def options_of(given: Mapping[Any, Any]) -> dict[str, Any]:
    """Read all options from verl's ``fused_kernel_options``, with defaults filled in."""
    unknown = set(given) - {"impl_backend", *VALUES}
    if unknown:
        raise ValueError(
            f"{OPTIONS}: expected impl_backend, zero_advantage, layout and old_log_probs, got "
            f"{', '.join(sorted(map(str, unknown)))}"
        )
    found = {name: given.get(name, values[0]) for name, values in VALUES.items()}
    for name, value in found.items():
        check_choice(f"{OPTIONS}.{name}", value, VALUES[name])
    return found


class MiniBatch:
    """The current mini-batch, and how its sequences are divided into micro-batches."""

    def __init__(self, engine: Any, data: Any, loss_function: Any, *, forward_only: bool) -> None:
        from grpo_kernels.body.trial import fits_trees
        from grpo_kernels.body.trunk import trunk_of

        options = options_of(engine.model_config.fused_kernel_options)
        self.loss_function = loss_function  # verl's; None: log-probabilities go to the caller
        self.group, self.layout = engine.get_data_parallel_group(), options["layout"]
        if engine.use_ulysses_sp and self.layout != "padded":
            warn_once(
                f"{OPTIONS}.layout={self.layout}: Ulysses divides sequences over ranks, so the "
                "layout is 'padded'; results are the same"
            )
            self.layout = "padded"
        self.live: list[bool] | None = None  # sequences that may have a gradient; None: all
        if options["zero_advantage"] == "score" and not forward_only:
            self.live = _live_sequences(data, loss_function)
        # True: bring the responses to a prompt together. `prompts` is None on a rank where a tree
        # is not exact for the model.
        self.moves = self.layout == "tree" and _may_move(data, loss_function)
        if "responses" in data.keys() and not data["responses"].is_nested:  # noqa: SIM118
            self._warn_of_deprecated(options)
        fits = self.moves and fits_trees(trunk_of(engine.module)) is True
        self.prompts = _prompts(data) if fits else None
        # sequences of each of our micro-batches, and the model's outputs; empty: verl's are used
        self.parts: list[list[int]] = []
        self.outputs: list[dict[str, Tensor]] = []
        self.theirs: list[tuple[Any, list[int]]] = []  # verl's micro-batches, and their sequences

    def _warn_of_deprecated(self, options: Mapping[str, Any]) -> None:
        """Warn of what a run loses with verl's deprecated trainer, if anything."""
        scatters = self.moves and dist.get_world_size(self.group) > 1
        losses = ["scores the old policy before each update"] * (options["old_log_probs"] == "auto")
        losses += ["scatters the responses to a prompt over ranks"] * scatters
        if losses:
            warn_once(
                "responses: expected nested tensors, got padded ones, as verl's deprecated trainer "
                f"sends them; it gets the head, but {', and '.join(losses)}; set "
                "trainer.use_v1=True",
                key="deprecated trainer",
            )

    def divided(
        self, divide: Callable[[Any], Any], data: Any
    ) -> tuple[list[Any], list[list[int]] | None]:
        """Divide `data` into our micro-batches: (micro-batches, the sequences of each).

        There are at most as many as verl makes with `divide`. Micro-batches without gradient come
        first, with a flag. verl synchronizes gradients in the last micro-batch, so that one always
        has a graph.
        """
        tensordict_utils = importlib.import_module("verl.utils.tensordict_utils")
        select = tensordict_utils.index_select_tensor_dict
        dynamic = flag(data, "use_dynamic_bsz", default=True)
        theirs, indices = divide(data)
        prompts = self.prompts
        if self.live is None and prompts is None and not (self.moves and dynamic):
            return theirs, indices
        count = len(data)
        live = self.live or [True] * count
        order = sorted(range(count), key=lambda i: (live[i], prompts.of[i] if prompts else ()))
        n_dead, without = live.count(False), 0
        if dynamic:
            budget, parts = data["max_token_len_per_gpu"], list[list[int]]()

            def of_kind(rows: list[int]) -> list[list[int]]:
                verls = [[rows[i] for i in part] for part in divide(select(data, rows))[1]]
                return self._by_prompt(rows, verls, budget)

            if self.live is not None and not any(self.most(n_dead == 0, n_dead == count)):
                # if one rank has too few sequences, all ranks raise ValueError
                with suppress(ValueError):
                    dead, others = of_kind(order[:n_dead]), of_kind(order[n_dead:])
                    parts, without = dead + others, len(dead)
            parts = parts or self._by_prompt(order, indices, budget)
        else:
            size = data["micro_batch_size_per_gpu"]
            parts = [order[i : i + size] for i in range(0, count, size)]
            indices = [[*range(i, i + size)] for i in range(0, count, size)]
            if self.live is not None:
                without = -self.most(-min(n_dead // size, len(parts) - 1))[0]
        self.parts, self.theirs = parts, [*zip(theirs, indices, strict=True)]
        micro_batches = [select(data, part) for part in parts]
        for micro_batch in micro_batches[:without]:
            tensordict_utils.assign_non_tensor(micro_batch, **{DEAD: True})
        return micro_batches, parts

    def most(self, *counts: int) -> list[int]:
        """Take the maximum of each count over ranks."""
        return most_of_ranks([self.group], [int(x) for x in counts])

    def _by_prompt(self, rows: list[int], verls: list[list[int]], budget: int) -> list[list[int]]:
        """Divide sequences `rows` into micro-batches of `budget` tokens, keeping prompts together.

        All ranks get as many micro-batches as the rank that needs most, and at most as many as
        `verls` has.
        """
        if not self.moves:
            return verls
        count, parts, prompts = len(verls), None, self.prompts
        if prompts is not None:
            own, lengths = [prompts.of[i] for i in rows], [prompts.lengths[i] for i in rows]
            live = [True] * len(rows)
            for n in range(-(-prompts.tokens(rows) // budget), count + 1):
                found = divided(own, lengths, live, n, tokens=budget)
                found = [[rows[i] for i in part] for part in found]
                if max(map(prompts.tokens, found)) <= budget:
                    count, parts = n, found
                    break
        most = self.most(count)[0]
        if prompts is None or parts is None:
            return verls
        parts += [[] for _ in range(most - count)]
        for part in parts:
            if not part:
                largest = max(parts, key=lambda x: (len(x) > 1, prompts.tokens(x)))
                part += largest[len(largest) // 2 :]
                del largest[len(largest) // 2 :]
        # similar sizes at the same time on all ranks avoid long waits
        return sorted(parts, key=lambda part: -prompts.tokens(part))

    def as_verls(self) -> Iterator[dict[str, Any]]:
        """Yield the results of verl's micro-batches, collected from the outputs of ours."""
        found: dict[int, dict[str, Tensor]] = {}
        for part, output in zip(self.parts, self.outputs, strict=True):
            found |= zip(part, by_sequence(output), strict=True)
        for micro_batch, part in self.theirs:
            output = joined([found[i] for i in part])
            loss, metrics = 1.0, dict[str, Any]()  # verl's own values without a loss
            if self.loss_function is not None:
                data = micro_batch.to(next(iter(output.values())).device)
                with torch.no_grad():
                    loss, metrics = self.loss_function(
                        model_output=output, data=data, dp_group=self.group
                    )
            yield {"model_output": output, "loss": float(loss), "metrics": metrics}


class Prompts:
    """Prompts of sequences, (name, number of tokens) each, and lengths of responses."""

    def __init__(self, of: Sequence[tuple[Any, int]], lengths: Sequence[int]) -> None:
        self.of, self.lengths = of, lengths

    def tokens(self, part: Sequence[int]) -> int:
        """Number of tokens of sequences `part`, counting each prompt once."""
        return sum(self.lengths[i] for i in part) + sum(n for _, n in {self.of[i] for i in part})


def _prompts(data: Any) -> Prompts:
    lengths = Places(data).lengths.tolist()
    rows = [x.tolist() for x in data["input_ids"].cpu().unbind()]
    of = numbered([tuple(x[: len(x) - n]) for x, n in zip(rows, lengths, strict=True)])
    return Prompts(of, lengths)


_mini_batch: ContextVar[MiniBatch | None] = ContextVar("mini_batch", default=None)


def changes(module: ModuleType) -> Changes:
    """Yield the replacements for verl.workers.engine.fsdp.transformer_impl."""
    engine = found_in(module, "FSDPEngineWithLMHead")
    prepare = function_of(engine, "prepare_model_inputs", ("self", "micro_batch"))
    of_step = "loss_function", "forward_only"
    step = function_of(engine, "forward_step", ("self", "micro_batch", *of_step))
    run = function_of(engine, "forward_backward_batch", ("self", "data", *of_step))
    parameters = (
        *("data", "dp_group", "num_batches_divided_by", "same_micro_num_in_dp"),
        *("min_num_micro_batch", "use_dynamic_bsz_balance"),
    )
    divide = function_of(module, "prepare_micro_batches", parameters)
    join = function_of(module, "postprocess_batch_func", ("output_lst", "indices", "data"))
    function_of(engine, "_get_packed_pad_size", ("self", "packed_length"))

    @functools.wraps(prepare)
    def prepare_model_inputs(self: Any, micro_batch: Any) -> Any:
        model_inputs, output_args = prepare(self, micro_batch)
        mini_batch = _mini_batch.get()
        if mini_batch is not None:
            model_inputs[ARGUMENT] = _task(self, micro_batch, mini_batch)
        return model_inputs, output_args

    @functools.wraps(step)
    def forward_step(self: Any, micro_batch: Any, loss_function: Any, forward_only: Any) -> Any:
        def run_with(function: Any) -> Any:
            return step(self, micro_batch, function, forward_only)

        mini_batch = _mini_batch.get()
        if mini_batch is None:
            return run_with(loss_function)
        if flag(micro_batch, DEAD):
            found = _scored(run_with, mini_batch)
        else:
            found = run_with(loss_function)
        if mini_batch.parts:
            mini_batch.outputs.append(found[1]["model_output"])
        return found

    @functools.wraps(run)
    def forward_backward_batch(
        self: Any, data: Any, loss_function: Any, forward_only: Any = False
    ) -> Any:
        mini_batch = None
        if flag(data, "use_fused_kernels") and getattr(self.module, MARK, None) == BACKEND:
            mini_batch = MiniBatch(self, data, loss_function, forward_only=forward_only)
        with during(_mini_batch, mini_batch):
            return run(self, data, loss_function, forward_only)

    @functools.wraps(divide)
    def prepare_micro_batches(data: Any, dp_group: Any = None, **options: Any) -> Any:
        def theirs(part: Any) -> Any:
            return divide(part, dp_group, **options)

        mini_batch = _mini_batch.get()
        return theirs(data) if mini_batch is None else mini_batch.divided(theirs, data)

    @functools.wraps(join)
    def postprocess_batch_func(output_lst: Any, indices: Any, data: Any) -> Any:
        mini_batch = _mini_batch.get()
        if mini_batch is None or not mini_batch.parts:
            return join(output_lst, indices, data)
        names = output_lst[0].keys()  # lacks model_output if nobody reads it
        outputs = [{name: x[name] for name in names} for x in mini_batch.as_verls()]
        return join(outputs, [part for _, part in mini_batch.theirs], data)

    yield engine, "prepare_model_inputs", prepare_model_inputs
    yield engine, "forward_step", forward_step
    yield engine, "forward_backward_batch", forward_backward_batch
    yield module, "prepare_micro_batches", prepare_micro_batches
    yield module, "postprocess_batch_func", postprocess_batch_func


def _task(engine: Any, micro_batch: Any, mini_batch: MiniBatch) -> HeadTask:
    """Make the `HeadTask` of a micro-batch, in verl's layout."""
    loss_function = mini_batch.loss_function
    ulysses = engine.use_ulysses_sp and importlib.import_module("verl.utils.ulysses")
    is_packed = flag(micro_batch, "use_remove_padding", default=True)

    def layout(numbers: Tensor) -> Tensor:
        if not is_packed:
            offsets = micro_batch["input_ids"].offsets()
            nested = torch.nested.nested_tensor_from_jagged(numbers, offsets)
            size = len(offsets) - 1, int(offsets.diff().max())
            return torch.nested.to_padded_tensor(nested, 0, output_size=size)
        numbers = F.pad(numbers, (0, engine._get_packed_pad_size(len(numbers))))[None]
        if ulysses:
            ranks = engine.ulysses_sequence_parallel_size
            numbers = ulysses.ulysses_pad_and_slice_inputs(numbers, None, ranks)[0]
        return numbers

    task = head_task(micro_batch, loss_function, mini_batch.group, layout)
    task.layout = mini_batch.layout
    if not flag(micro_batch, "distillation_use_topk"):
        return task
    loss = loss_function.keywords["distillation_config"].distillation_loss
    if loss.loss_mode != TOP_K:
        raise ValueError(
            f"distillation.distillation_loss.loss_mode: expected {TOP_K!r}, got {loss.loss_mode!r}"
        )
    if not is_packed:
        raise ValueError(
            "actor_rollout_ref.model.use_remove_padding: expected True for distillation with fused "
            "kernels, got False"
        )
    names = ("teacher_ids", "teacher_logprobs")
    ids, logps = (micro_batch[name].values().unsqueeze(0) for name in names)
    if ulysses:
        ids, logps = (ulysses.slice_input_tensor(x, dim=1, padding=True) for x in (ids, logps))
    task.teacher, task.log_prob_min_clamp = (ids, logps), loss.log_prob_min_clamp
    task.only_teacher = bool(flag(micro_batch, "distillation_only")) and not task.entropy
    return task


def _may_move(data: Any, loss_function: Any) -> bool:
    """True if results are known not to depend on the grouping of sequences."""
    if not {"prompts", "responses"} <= set(data.keys()) or flag(data, "force_group_size", 1) != 1:
        return False
    config = actor_config(loss_function)
    return loss_function is None if config is None else may_move(config)


def _live_sequences(data: Any, loss_function: Any) -> list[bool]:
    """For each sequence of `data`, True if it may have a gradient."""
    config = actor_config(loss_function)
    reason = _reason_to_train(data, config)
    if reason is not None:
        raise ValueError(f"{OPTIONS}.zero_advantage: expected 'train' {reason}, got 'score'")
    lengths = data["input_ids"].offsets().diff().tolist()
    return [bool(x.any()) for x in live_rows(data, config, Places(data)).split(lengths)]


def _reason_to_train(data: Any, config: Any) -> str | None:
    if config is None:
        return "with a loss other than ppo_loss"
    if has_other_terms(data, config):
        return "with a KL or entropy term, which gives all sequences a gradient"
    if not mode_of(config).by_advantage:
        return f"with loss_mode={config.policy_loss.get('loss_mode', 'vanilla')}"
    if is_by_width(config):
        return (
            "with seq-mean-token-sum-norm without loss_scale_factor, which divides by a "
            "micro-batch's own width"
        )
    if flag(data, "return_model_output") or flag(data, "force_group_size", 1) != 1:
        return "with return_model_output or force_group_size"
    return None


def _scored(step: Callable[[Any], Any], mini_batch: MiniBatch) -> tuple[Any, Any]:
    """Run `step` without a graph; if its loss has a gradient after all, run it again with one."""
    loss_function, has_gradient = mini_batch.loss_function, False

    def confirmed(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, Any]:
        nonlocal has_gradient
        loss, metrics, slopes = slopes_of(loss_function, model_output, data, dp_group)
        # NaN counts too
        has_gradient = any(bool((x.values() != 0).any()) for x in slopes.values())
        return loss, metrics

    with torch.no_grad():
        loss, output = step(confirmed)
    if mini_batch.most(has_gradient)[0]:
        warnings.warn(
            f"{OPTIONS}.zero_advantage: expected no gradient where all advantages are 0, got one. "
            "The loss has an unknown term, so these sequences run twice; set the option to 'train'",
            RuntimeWarning,
            stacklevel=2,
        )
        found: tuple[Any, Any] = step(loss_function)
        return found
    # verl calls backward on this loss, so it needs a graph
    return loss + torch.zeros((), device=loss.device, requires_grad=True), output
