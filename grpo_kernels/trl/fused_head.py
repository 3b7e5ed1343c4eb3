"""TRL's fused language-model head: what a model returns where TRL passes ``fused_lm_head=True``.

TRL gives a model that forward by one public function, `add_fused_lm_head` (GRPO, RLOO, SFT, DPO,
KTO, AsyncGRPO), and reads a `FusedCausalLMOutput`. Ours has its place: labels say which positions
are scored; the model's own forward runs, with its body computed where it is needed and its head
scoring in place of projecting (`grpo_kernels.transformers.call`).
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import trl.trainer.grpo_trainer as trl_grpo
from torch import Tensor, nn
from torch.nn import functional as F
from trl.trainer.utils import FusedCausalLMOutput

from grpo_kernels.base.choices import Extra, LogitsDtype, WithoutSet, choices
from grpo_kernels.call.plan import Run
from grpo_kernels.call.results import Scores
from grpo_kernels.head import module as modules
from grpo_kernels.head.head import Head
from grpo_kernels.patching import KnownRows, Shares, replaced
from grpo_kernels.scores import linear_logprob
from grpo_kernels.transformers import head as heads
from grpo_kernels.transformers.call import HeadCall, TrunkOptions, run_in_head
from grpo_kernels.trl.sampled_sets import SampledSets, over_sets

EXTRAS: tuple[Extra, ...] = choices(Extra)  # type: ignore[assignment]
IGNORED = -100  # the label of a position that is not scored
_HEADS = "_grpo_kernels_heads"  # attribute of a model
_TUNED = "BaseTunerLayer"  # PEFT's class, which TRL's module imports if PEFT is installed


@dataclass(frozen=True)
class HeadOptions:
    """The options of a model's fused forwards, and where their rows are counted."""

    run: Run = field(default_factory=Run)
    trunk: TrunkOptions = field(default_factory=TrunkOptions)
    logits_dtype: LogitsDtype = "float32"
    shares: Shares = field(default_factory=Shares)
    without_set: WithoutSet | None = (
        None  # as in `linear_logprob`, where a sampler's sets are given
    )


@dataclass(eq=False)
class Foreseen:
    """What a trainer knows of a forward before it runs."""

    rows: KnownRows | None = None  # the (B, T) tokens that are read, and the gradient to expect
    live: Tensor | None = None  # (B,) bool, sequences that may get a gradient; None: all
    score: Callable[..., Scores] | None = None  # None: `linear_logprob`


class FusedHead:
    """The fused forward of one model, kept on the model by `add_fused_lm_head`.

    Attributes:
        foreseen: set by a trainer around one forward.
        sets: of the completions that a sampler has truncated; rows that have some are scored over
            them.
    """

    def __init__(
        self,
        model: Any,
        options: HeadOptions,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: Sequence[str] = ("log_probs",),
    ) -> None:
        self.forward, self.options = model.forward, options
        self.temperature, self.in_fp32, self.outputs = temperature, cast_lm_head_to_fp32, outputs
        self.foreseen = Foreseen()
        self.sets: Sequence[SampledSets | None] | None = None

    @torch.compiler.disable  # which rows count depends on data
    def run(
        self,
        model: Any,
        inputs: dict[str, Any],
        labels: Tensor | None,  # (B, L)
        shift_labels: Tensor | None,  # (B, L)
        num_items_in_batch: Tensor | int | None,
    ) -> FusedCausalLMOutput:
        """TRL's record of the labelled positions, (B, L - 1), or (B, L) with `shift_labels`."""
        inputs = {name: x for name, x in inputs.items() if x is not None} | {"use_cache": False}
        if labels is not None and shift_labels is None:
            targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        elif shift_labels is not None:
            targets = shift_labels
        else:
            raise ValueError("labels: expected (B, L) with fused_lm_head=True, got None")
        needed, length = targets != IGNORED, targets.shape[1]
        rows, compute = self.foreseen.rows, self.foreseen.score or linear_logprob
        columns = slice(0, length)
        if rows is not None:  # all that is read lies in the last T columns
            columns = slice(length - 1 - rows.counted.shape[1], length - 1)
        ids, labelled = targets[:, columns], needed[:, columns]
        counted = labelled if rows is None else labelled & (rows.counted != 0)
        expected = rows.expected if rows is not None and torch.is_grad_enabled() else None
        if self.sets is not None:
            without_set = self.options.without_set
            compute, drawn = over_sets(self.sets, inputs, labelled, columns.start, without_set)
            counted = counted & drawn
        names: list[str] = []

        def score(hidden: Tensor, head: Head) -> tuple[Tensor, ...]:
            states = hidden[:, columns]
            precision: AbstractContextManager[Any] = nullcontext()
            if self.in_fp32:
                states = states.float()
                precision = torch.autocast(states.device.type, enabled=False)
            with precision:
                found = compute(
                    states,
                    replace(heads.read(head, states), logits_dtype=self.options.logits_dtype),
                    ids.clamp(min=0).to(states.device),
                    mask=counted.to(states.device),
                    temperature=self.temperature,
                    entropy="entropy" in self.outputs,
                    extras=tuple(name for name in EXTRAS if name in self.outputs),
                    expected=expected,
                    run=heads.gathering(head, self.options.run),
                ).given
            names[:] = found
            return tuple(found.values())

        def state_of(hidden: Tensor) -> Tensor:
            row, column = divmod(int(needed.reshape(-1).to(torch.uint8).argmax()), length)
            return hidden[row, column].float() if self.in_fp32 else hidden[row, column]

        def run(call: HeadCall) -> dict[str, Any]:
            with call.in_head():
                return call.pack_output(self.forward(**inputs))

        layout, live = self.options.trunk.layout, self.foreseen.live
        scored = run_in_head(model, run, score, inputs, layout, needed, live, state_of)
        results, output, shares = scored
        # TRL's record is in fp32
        single = (x.float() if x.dtype == torch.float64 else x for x in results)
        found = dict(zip(names, single, strict=True))
        device = results[0].device
        counted, needed = counted.to(device), needed.to(device)
        self.options.shares.join(shares)
        count_rows(self.options.shares, counted, [found["logps"], found.get("entropies")])
        if rows is not None and rows.fill is not None:
            others = labelled.to(device) & ~counted
            found["logps"] = torch.where(others, rows.fill.to(device), found["logps"])
        end = length - 1 if shift_labels is None else length
        around = (columns.start, end - columns.stop)
        found = {name: F.pad(x, around) for name, x in found.items()}  # no views: FSDP2 hooks them
        mask, logps = needed[:, :end], found["logps"]
        items = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss, aux_loss = -logps.sum() / items, output.get("aux_loss")
        if aux_loss is not None:
            config = model.config.get_text_config()
            loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss.to(device)
        extras = {name: found[name].detach() if name in found else None for name in EXTRAS}
        return FusedCausalLMOutput(
            loss=loss,
            log_probs=logps,
            entropy=found.get("entropies"),
            label_mask=mask,
            aux_loss=aux_loss,
            **extras,
        )


def add_fused_lm_head(
    model: Any, *args: Any, options: HeadOptions | None = None, **kwargs: Any
) -> None:
    """Do what TRL's function of this name does, with its arguments; the scores are ours.

    A model of several trainers has several heads, and the last one serves.
    """
    fused: list[FusedHead] = vars(model).setdefault(_HEADS, [])
    place = len(fused)
    fused.append(FusedHead(model, options or HeadOptions(), *args, **kwargs))
    names = [*inspect.signature(type(model).forward).parameters][1:]

    @functools.wraps(type(model).forward)  # `generate` reads its signature
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        of_loss = labels, shift_labels, num_items_in_batch
        if fused_lm_head:
            inputs = {**dict(zip(names, args, strict=False)), **kwargs}
            return head_of(self).run(self, inputs, *of_loss)
        given = zip(("labels", "shift_labels", "num_items_in_batch"), of_loss, strict=True)
        kwargs |= {name: x for name, x in given if x is not None}
        return vars(self)[_HEADS][place].forward(*args, **kwargs)  # of this model, if it is a copy

    model.forward = types.MethodType(forward, model)


def head_of(model: nn.Module) -> FusedHead:
    """The fused forward of a trainer's model, wrapped or not."""
    found: FusedHead = vars(heads.causal_lm(model))[_HEADS][-1]
    return found


def adapters_allowed() -> AbstractContextManager[None]:
    """Inside, TRL's trainers accept an adapter on the head; `check_head` checks it afterwards."""
    if not hasattr(trl_grpo, _TUNED):
        return nullcontext()
    return replaced(trl_grpo, _TUNED, type(_TUNED, (), {}))  # a class that has no instances


def check_head(model: nn.Module, args: Any) -> None:
    """Raise unless the head is ``nn.Linear``, alone or with plain LoRA and without fp32 cast."""
    head = heads.inner_head(heads.causal_lm(model).get_output_embeddings())
    if modules.linear_of(head) is head:
        return
    modules.active_adapters(head)
    if getattr(args, "cast_lm_head_to_fp32", False):
        raise ValueError(
            "cast_lm_head_to_fp32: expected False with an adapter on lm_head, which would go on "
            "in its own precision, got True"
        )


def count_rows(shares: Shares, mask: Tensor, results: Sequence[Tensor | None]) -> None:
    """Count a scoring of the positions where `mask` is True, unless it is without gradient.

    ``rows/projected``: the share of positions that went through the head's product.
    ``rows/gradient``: the share of projected rows whose `results` get a gradient.
    """
    attached = [x for x in results if x is not None and x.requires_grad]
    if not attached:
        return
    projected = mask.sum()
    shares.add("rows/projected", projected, mask.numel())
    shares.add("rows/gradient", 0, projected)
    counted = torch.zeros_like(mask)

    # no hook on several tensors: torch's holds their nodes, which hold it
    def look(gradient: Tensor | None) -> None:
        nonlocal counted
        if gradient is None:  # of a result that nothing reads, where its node made several
            return
        graded = (gradient != 0) & mask
        shares.add("rows/gradient", (graded & ~counted).sum(), 0)
        counted = counted | graded

    for x in attached:
        x.register_hook(look)


class LogsRows:
    """In front of a trainer's class: logs its `_shares`, of this process, since the last log."""

    model: Any
    _shares: Shares

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as TRL does, with the shares."""
        if self.model.training:
            logs.update(self._shares.take())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
