"""TRL's fused language-model head: the forward that TRL calls with ``fused_lm_head=True``.

TRL installs that forward with one public function, `add_fused_lm_head` (GRPO, RLOO, SFT, DPO, KTO,
AsyncGRPO), and reads a `FusedCausalLMOutput`. This module replaces the function for one trainer or,
with `patch_trl`, for all trainers. Labels say which positions are scored. The model's own forward
runs: its body computes only what is needed, and its head computes scores instead of logits
(`grpo_kernels.transformers.head`).
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

import torch
import trl.trainer.distillation_trainer as trl_distillation
import trl.trainer.grpo_trainer as trl_grpo
import trl.trainer.utils as trl_utils
from torch import Tensor, nn
from torch.nn import functional as F
from trl.trainer.base_trainer import _BaseTrainer
from trl.trainer.utils import FusedCausalLMOutput

from grpo_kernels import base
from grpo_kernels import head_module as modules
from grpo_kernels.base.checks import check_choice, warn_once
from grpo_kernels.engine.plan import Run, check_run
from grpo_kernels.head import Head
from grpo_kernels.objective.expected import Expectation
from grpo_kernels.patching import LogsShares, Patch, Patches, Shares, all_replaced, replaced
from grpo_kernels.results import Scores
from grpo_kernels.scores import linear_divergence, linear_logps
from grpo_kernels.transformers import head as heads
from grpo_kernels.trl.distillation import divergence_loss
from grpo_kernels.trl.sampled_sets import SETS, over_sets

# the extras that TRL's record has fields for
_EXTRAS: Any = tuple(x.name for x in fields(FusedCausalLMOutput) if x.name in base.EXTRAS)
IGNORED = -100  # label of positions that are not scored
_HEADS = "_grpo_kernels_heads"  # attribute of a model that holds its `FusedHead`s
_TUNED = "BaseTunerLayer"  # PEFT's class; TRL's module imports it if PEFT is installed
# Modules that copy TRL's function on import or on first access
_ADDERS = [f"trl.trainer.{name}_trainer" for name in ("grpo", "rloo", "kto", "sft", "dpo")]
_ADDERS += ["trl.trainer", "trl.experimental.async_grpo.async_grpo_trainer"]


@dataclass(frozen=True)
class HeadOptions:
    """Options of a model's fused forwards, and the counters of their rows."""

    run: Run = field(default_factory=Run)
    layout: base.BatchLayout = "tree"
    logits_dtype: base.LogitsDtype = "float32"
    # as in `linear_logps`, for rows that have sets
    on_missing_set: base.OnMissingSet | None = None
    shares: Shares = field(default_factory=Shares)

    def __post_init__(self) -> None:  # each line raises if the value is unknown
        Head(None, logits_dtype=self.logits_dtype)
        check_choice("layout", self.layout, get_args(base.BatchLayout))
        check_run(self.run)
        if self.on_missing_set is not None:
            modes, hint = get_args(base.OnMissingSet), "; None: the whole vocabulary"
            check_choice("on_missing_set", self.on_missing_set, modes, hint)


@dataclass(eq=False)
class Scoring:
    """A trainer's options, and its knowledge about the scoring of a micro-batch."""

    options: HeadOptions
    model: Any = None
    inputs: dict[str, Any] = field(default_factory=dict)  # TRL's micro-batch
    counted: Tensor | None = None  # (B, T), nonzero for tokens that are read; None: all labels
    expected: Expectation | None = None  # predicted gradient
    live: Tensor | None = None  # (B,) bool, sequences that may get a gradient; None: all
    score: Callable[..., Scores] | None = None  # replaces `linear_logps`; same arguments
    lacks_old: bool = False  # True: the inputs still lack old log-probabilities
    # (B, T) each, by their names in `Scores`; "divergence" is the exact KL's
    results: dict[str, Tensor] = field(default_factory=dict)
    is_done: bool = False  # True: the results are complete, and no model runs

    @functools.cached_property
    def rows(self) -> tuple[Tensor, ...]:
        """(ids, mask) of prompts and completions, (B, L) each."""
        of = self.inputs
        return tuple(
            torch.cat([of[f"prompt_{x}"], of[f"completion_{x}"]], dim=1) for x in ("ids", "mask")
        )

    def is_of(self, model: Any, ids: Tensor, mask: Tensor, columns: int) -> bool:
        """True if this scores the last `columns` of these rows, (B, L) each."""
        if model is not self.model or columns != self.inputs["completion_ids"].shape[1]:
            return False
        # `equal` synchronizes with the device
        return all(x is y or torch.equal(x, y) for x, y in zip(self.rows, (ids, mask), strict=True))

    def of_other_rows(self) -> Scoring:
        """The same options and sets for unknown rows, of which nothing is predicted."""
        # a scoring without rows has no other inputs than sets, and may get them later
        inputs = self.inputs if self.model is None else {SETS: self.inputs.get(SETS)}
        return Scoring(self.options, inputs=inputs)


class Reference:
    """The reference model of a micro-batch: its head and the head's input.

    The constructor reads `model` with the adapters that are active at that time.
    """

    def __init__(self, model: Any) -> None:
        head = heads.describe_head(model).weight
        self._linear = modules.linear_of(head)
        if self._linear is not head and modules.active_adapters(head):
            raise ValueError(
                "kl_estimator: expected 'k3' if the reference is a separate adapter that covers "
                "lm_head, got 'full'"
            )
        self._hidden, self._constants = torch.empty(0), Head(None)

    def take(self, hidden: Tensor, head: Head, ids: Tensor, **how: Any) -> Scores:
        """Keep `hidden` (B, T, H') and return zeros. Used as `Scoring.score` of the reference."""
        self._constants = replace(head, weight=None, bias=None, lora=None)
        self._hidden = hidden.detach().clone()  # a view would keep the prompt's states in memory
        return Scores(logps=hidden.new_zeros(ids.shape, dtype=torch.float32))

    def compare(
        self, hidden: Tensor, head: Head, ids: Tensor, *, extras: Sequence[str], **how: Any
    ) -> Scores:
        """Score `ids`, with the divergence. Used as `Scoring.score` of the policy."""
        states = self._hidden.to(hidden.device)
        # read now, because under FSDP2 the weight is a different tensor inside a forward
        weight, bias = modules.constant_parameters(self._linear, "reference")
        reference = replace(self._constants, weight=weight, bias=bias)
        return linear_divergence(hidden, head, (states, reference), completion_ids=ids, **how)


@dataclass(eq=False)
class FusedHead:
    """The fused forward of one model, stored on the model by `add_fused_lm_head`."""

    forward: Callable[..., Any]  # the model's own
    scoring: Scoring  # a trainer of this library replaces it for the duration of a forward
    temperature: float
    in_fp32: bool
    outputs: Sequence[str]

    @torch.compiler.disable  # the number of rows depends on data
    def run(self, model: Any, inputs: dict[str, Any]) -> FusedCausalLMOutput:
        """Make TRL's record of labeled positions, (B, L - 1), or (B, L) with `shift_labels`."""
        inputs = {name: x for name, x in inputs.items() if x is not None} | {"use_cache": False}
        of_loss = "labels", "shift_labels", "num_items_in_batch"
        labels, shift_labels, num_items_in_batch = (inputs.pop(name, None) for name in of_loss)
        if shift_labels is not None:
            targets = shift_labels
        elif labels is not None:
            targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        else:
            raise ValueError("labels: expected (B, L) with fused_lm_head=True, got None")
        needed, length = targets != IGNORED, targets.shape[1]
        scoring, options = self.scoring, self.scoring.options
        compute = scoring.score or linear_logps
        sets = None if options.on_missing_set is None else scoring.inputs.get(SETS)
        columns, counted = slice(0, length), needed
        if scoring.counted is not None:  # only the last T columns are read
            columns = slice(length - 1 - scoring.counted.shape[1], length - 1)
            counted = needed[:, columns] & (scoring.counted != 0)
        ids, labeled = targets[:, columns], needed[:, columns]
        expected = scoring.expected if torch.is_grad_enabled() else None
        if sets is not None:
            start = columns.start
            compute, drawn = over_sets(sets, inputs, labeled, start, options.on_missing_set)
            counted = counted & drawn

        def score(hidden: Tensor, head: Head) -> dict[str, Tensor]:
            states = hidden[:, columns]
            precision: AbstractContextManager[Any] = nullcontext()
            if self.in_fp32:
                states = states.float()
                precision = torch.autocast(states.device.type, enabled=False)
            with precision:
                return compute(
                    states,
                    replace(heads.read(head, states), logits_dtype=options.logits_dtype),
                    ids.clamp(min=0).to(states.device),
                    completion_mask=counted.to(states.device),
                    temperature=self.temperature,
                    entropy="entropy" in self.outputs,
                    extras=tuple(x for x in _EXTRAS if x in self.outputs),
                    expected=expected,
                    run=heads.gathering(head, options.run),
                ).given

        def run(head_call: heads.HeadCall) -> Any:
            return head_call.pack_output(self.forward(**inputs))

        found, output, counts = heads.run_in_head(
            model, run, score, inputs, options.layout, needed, scoring.live
        )
        device = found["logps"].device
        if "divergence" in found:
            scoring.results["divergence"] = found.pop("divergence")
        # TRL's record is fp32
        found = {name: x.float() if x.dtype == torch.float64 else x for name, x in found.items()}
        counted, needed = counted.to(device), needed.to(device)
        options.shares.add(counts)
        options.shares.add_rows(counted, [found["logps"], found.get("entropies")])
        earlier = (scoring.inputs.get(x) for x in ("old_per_token_logps", "ref_per_token_logps"))
        fill = next((x for x in earlier if x is not None), None)
        if fill is not None:  # tool tokens get these values, so that their ratios are finite
            others = labeled.to(device) & ~counted
            found["logps"] = torch.where(others, fill.to(found["logps"]), found["logps"])
        end = length - 1 if shift_labels is None else length
        around = (columns.start, end - columns.stop)
        # FSDP2 hooks these outputs, so they must not be views
        found = {name: F.pad(x, around) for name, x in found.items()}
        mask, logps = needed[:, :end], found["logps"]
        items = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss, aux_loss = -logps.sum() / items, output.get("aux_loss")
        if aux_loss is not None:
            config = model.config.get_text_config()
            loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss.to(device)
        return FusedCausalLMOutput(
            loss=loss,
            log_probs=logps,
            entropy=found.get("entropies"),
            label_mask=mask,
            aux_loss=aux_loss,
            **{name: found[name].detach() if name in found else None for name in _EXTRAS},
        )


def add_fused_lm_head(
    model: Any,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: Sequence[str] = ("log_probs",),
    *,
    options: HeadOptions | None = None,
) -> None:
    """Replace TRL's function of this name: `grpo_kernels` computes the scores of the model.

    The arguments are TRL's, plus `options`. A model that several trainers share has several heads.
    Forwards use the last one, as in TRL; this library's trainers bring their options (`scored_by`).
    """
    fused: list[FusedHead] = vars(model).setdefault(_HEADS, [])
    place, scoring = len(fused), Scoring(options or HeadOptions())
    fused.append(FusedHead(model.forward, scoring, temperature, cast_lm_head_to_fp32, outputs))
    names = [*inspect.signature(type(model).forward).parameters][1:]

    @functools.wraps(type(model).forward)  # `generate` reads the signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            return vars(self)[_HEADS][-1].run(self, given)
        return vars(self)[_HEADS][place].forward(*args, **kwargs)  # `self` may be a copy of model

    model.forward = types.MethodType(forward, model)


def head_of(model: nn.Module) -> FusedHead | None:
    """Find the fused forward of a model, wrapped or not; None if it has none of ours."""
    return next((vars(x)[_HEADS][-1] for x in model.modules() if _HEADS in vars(x)), None)


def scored_by(scoring: Scoring, *models: nn.Module | None) -> AbstractContextManager[None]:
    """Inside the context, fused forwards of these models follow `scoring`."""
    found = [head_of(model) for model in models if model is not None]
    return all_replaced((head, "scoring", scoring) for head in found if head is not None)


def adapters_allowed() -> AbstractContextManager[None]:
    """Let TRL's trainers accept an adapter on the head; `check_head` checks it afterwards."""
    if not hasattr(trl_grpo, _TUNED):
        return nullcontext()
    return replaced(trl_grpo, _TUNED, type(_TUNED, (), {}))  # a class without instances


def check_head(model: nn.Module, args: Any) -> None:
    """Require the head to be ``nn.Linear``, alone or with plain LoRA and without fp32 cast."""
    head = heads.describe_head(model).weight
    if modules.linear_of(head) is head:
        return
    modules.active_adapters(head)
    if getattr(args, "cast_lm_head_to_fp32", False):
        raise ValueError(
            "cast_lm_head_to_fp32: expected False with an adapter on lm_head, since the adapter "
            "would keep its own precision, got True"
        )


_patches = Patches("trl")
# (options of the current patch, row counts of the trainers created under it). Trainers created
# under an earlier patch keep the fused head and the counts of that patch.
_in_force: tuple[dict[str, Any], Shares] | None = None


def patch_trl(
    *,
    layout: base.BatchLayout = "tree",
    logits_dtype: base.LogitsDtype = "float32",
    engine: base.EngineName = "auto",
    backend: base.BackendName = "auto",
    workspace_bytes: int | None = None,
) -> Patch:
    """Use the fused head in TRL's trainers: GRPO, RLOO, DPO, KTO, SFT, AsyncGRPO, distillation.

    ::

        patch_trl()
        trainer = DPOTrainer(...)  # or any of the others, created after the patch

    This replaces two functions of TRL. The first, ``add_fused_lm_head``, affects only trainers that
    you create from now on. The second computes the divergence of DistillationTrainer. Models,
    configurations and losses remain TRL's. Trainers also log ``rows/projected``, ``rows/gradient``,
    ``tokens/computed`` and ``tokens/gradient``, which show that the patch is active. A trainer that
    computes all logits itself (GKD, IW-OPD, GOLD, TPO, A2PO, CPO, ORPO, SDFT, SDPO) logs none of
    these metrics, and warns once. A second call of `patch_trl` changes nothing.

    Args:
        layout: as in `grpo_kernels.transformers.causal_lm_loss`. It decides what the model computes
            for padding and for shared prefixes, such as the prompt of a DPO pair.
        logits_dtype: as in `Head`: ``"float32"``, unrounded logits; or ``"input"``, rounded to the
            dtype of the hidden states, as in TRL. Ignored by distillation.
        engine, backend, workspace_bytes: as in `Run`, for every call of a fused head. Ignored by
            distillation.

    Returns:
        Truthy if TRL is patched. If this version of TRL is not supported, `patch_trl` warns, leaves
        TRL unpatched and returns a falsy value. The first call's return value is also a context
        manager that calls `unpatch_trl` on exit.

    Raises:
        ValueError: an unknown option, or one that differs from the patch already applied.
    """
    global _in_force
    asked = {**locals()}
    options = HeadOptions(Run(engine, backend, workspace_bytes), layout, logits_dtype)
    if _in_force is not None:
        for name, value in _in_force[0].items():
            if asked[name] != value:
                raise ValueError(
                    f"{name}: expected {value!r}, as in the patch already applied, got "
                    f"{asked[name]!r}; call unpatch_trl() first"
                )
        return Patch(True)
    _in_force = asked, options.shares
    ours = functools.partial(add_fused_lm_head, options=options)
    _patches.replace(trl_utils, "add_fused_lm_head", ours, importers=_ADDERS)
    divergence = functools.partial(divergence_loss, shares=options.shares)
    _patches.replace(trl_distillation, "_chunked_divergence_loss", divergence)
    _patches.replace(_BaseTrainer, "log", _log)
    found = Patch(True)
    found.undo = unpatch_trl
    return found


def unpatch_trl() -> None:
    """Restore TRL's own functions. Trainers created earlier keep the fused head."""
    global _in_force
    _patches.restore()
    _in_force = None


def _log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
    """Log as transformers does, plus this process's row counts; warn if a step had no rows."""
    if self.model.training and _in_force is not None:
        shares = _in_force[1].take()
        head = head_of(self.model)
        counts_elsewhere = isinstance(self, LogsShares)  # a trainer of this library
        counts_elsewhere |= head is not None and head.scoring.options.shares is not _in_force[1]
        if not shares and "loss" in logs and not counts_elsewhere:
            warn_once(
                f"patch_trl: {type(self).__name__} has trained a step without TRL's fused head, so "
                "grpo_kernels computed nothing in it. Either the trainer was created before "
                "patch_trl() was called, or it computes all logits itself, as TRL's GKD, IW-OPD, "
                "GOLD, TPO, A2PO, CPO, ORPO, SDFT and SDPO trainers do. In your own loss, you can "
                "replace logits by linear_divergence and linear_logps: examples/gkd_trl.py",
                RuntimeWarning,
            )
        logs.update(shares)
    super(_BaseTrainer, self).log(logs, *args, **kwargs)
