"""TRL's fused language-model head, computed by our engines.

TRL routes every fused head (GRPO, RLOO, DPO, KTO, SFT, AsyncGRPO) through one autograd function,
which it looks up at call time as ``trl.trainer.utils._ChunkedLogProbFunction``. `FusedHead` has
the same ``apply`` and returns the same five values. TRL does not pass what a trainer knows about
the rows: that is the value of `CALL` meanwhile.

TRL's forward reads ``lm_head.weight``. With LoRA on the head that is the base weight alone, and
TRL refuses such models. If the head is an FSDP2 unit of its own it is a shard, which TRL gathers
by ``full_tensor()``: a copy whose gradient is not summed over ranks. There the model returns a
`ModelHead`, and TRL's computation runs within the head's own forward (`grpo_kernels.head.module`).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import trl.trainer.grpo_trainer as trl_grpo
import trl.trainer.utils as trl_utils
from torch import Tensor, nn

from grpo_kernels.base.checks import warn_once
from grpo_kernels.base.choices import Extra, LogitsDtype, choices
from grpo_kernels.call.plan import Run
from grpo_kernels.call.results import Scores
from grpo_kernels.engine.plan import Gather
from grpo_kernels.head import module as heads
from grpo_kernels.head.head import Head
from grpo_kernels.patching import HostFunction, KnownRows, Shares, during, replaced
from grpo_kernels.scores import linear_logprob
from grpo_kernels.transformers.call import measured_head
from grpo_kernels.transformers.head import causal_lm, inner_head

EXTRAS: tuple[Extra, ...] = choices(Extra)  # type: ignore[assignment]
_TUNED = "BaseTunerLayer"  # PEFT's class, which TRL's module imports if PEFT is installed


@dataclass
class HeadCalls:
    """Facts about the head calls of one forward, in which TRL walks through the B sequences."""

    run: Run = field(default_factory=Run)
    logits_dtype: LogitsDtype = "float32"
    shares: Shares = field(default_factory=Shares)  # where their rows are counted
    labelled: Tensor | None = None  # (B, T) bool: TRL labels them; its other results are 0
    batch_size: int = 0  # sequences of one head call
    rows: KnownRows | None = None  # the (B, T) tokens that are read, and the expected gradient
    # in place of `linear_logprob`, with its options and `positions` (n,) in the flattened (B, T)
    compute: Callable[..., Scores] | None = None
    heads: tuple[Head | None, Head | None] = (None, None)  # measured, of student and teacher
    start: int = 0  # first sequence of the next head call
    passed: int = 0  # completion tokens, labelled or not, of the last head call

    def next_call(self, hidden: Tensor) -> Tensor | None:
        """Return the place (N,) of each row of `hidden` (N, H) in the flattened (B, T), -1 outside.

        TRL passes only the labelled rows if it has Triton, else every position of the sequences,
        whose last T positions are the completion. None: the places are not known.
        """
        if self.labelled is None:
            return None
        first, length, rows = self.start, self.labelled.size(1), len(hidden)
        count = min(self.batch_size, self.labelled.size(0) - first)
        self.start, self.passed = first + count, count * length
        if self.labelled.device != hidden.device:
            return None
        if trl_utils._use_triton(hidden.device):
            labelled = self.labelled[first : first + count].reshape(-1).nonzero().squeeze(1)
            return labelled + first * length if labelled.numel() == rows else None
        if count <= 0 or rows % count or rows // count < length:
            return None
        positions = torch.full((count, rows // count), -1, device=self.labelled.device)
        positions[:, -length:] = torch.arange(
            first * length, (first + count) * length, device=positions.device
        ).view(count, length)
        return positions.reshape(-1)


# of all other trainers: `patch_trl` sets its options, and they log its shares
PATCHED = HeadCalls()
CALL: ContextVar[HeadCalls] = ContextVar("grpo_kernels_trl_call", default=PATCHED)
# the measured constants of the model whose forward runs
HEAD_OF_MODEL: ContextVar[Head | None] = ContextVar("grpo_kernels_trl_head", default=None)


class FusedHead:
    """Stand-in for TRL's autograd function: same call, same results, our engines."""

    @staticmethod
    @torch.compiler.disable  # which rows count depends on data
    def apply(
        hidden: Tensor,  # (N, H)
        weight: Tensor | ModelHead,  # (V, H)
        bias: Tensor | None,  # (V,)
        targets: Tensor,  # (N,)
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", *EXTRAS),
    ) -> tuple[Tensor | None, ...]:
        """(logps, entropy, log_sum_sq_probs, mean_logits, is_top1), each (N,); None if not asked.

        `chunk_size`, the width of TRL's tiles, is not used: the engine plans its own workspace.
        """
        call = CALL.get()
        constants = constants_of(HEAD_OF_MODEL.get(), final_logit_softcapping, logit_scale)

        def score(hidden: Tensor, head: Head, gather: Gather | None) -> Scores:
            return _score(
                call,
                hidden,
                replace(head, logits_dtype=call.logits_dtype, **constants),
                run=replace(call.run, gather=gather),
                ids=targets,
                entropy="entropy" in outputs,
                extras=tuple(name for name in EXTRAS if name in outputs),
                temperature=temperature,
            )

        if isinstance(weight, ModelHead):
            found = weight.score(hidden, score)
        else:
            # ZeRO-3 partitions the weight again after the forward
            gather = functools.partial(trl_utils.maybe_gather_lm_head_ctx, weight, bias)
            found = score(hidden, Head(weight, bias), gather)
        extras = found.log_sum_sq_probs, found.mean_logits, found.is_top1
        return found.logps, found.entropies, *extras


def _score(call: HeadCalls, hidden: Tensor, head: Head, **options: Any) -> Scores:
    """The results (N,) of one head call; `options` are those of `linear_logprob`."""
    positions = call.next_call(hidden)
    rows = None if positions is None or call.rows is None else call.rows.at(positions)
    if rows is not None:
        options |= {"mask": rows.counted, "expected": rows.expected}
    operands: AbstractContextManager[Any] = nullcontext()
    kind = hidden.device.type
    rounds = call.logits_dtype == "input" and hidden.dtype.itemsize == 2
    if rounds and not torch.is_autocast_enabled(kind):
        operands = torch.autocast(kind, hidden.dtype)  # products in 16 bits, as TRL's
    if call.compute is not None and positions is None:
        raise RuntimeError(
            "kl_estimator='full' and sampling_mask: expected TRL to score (B, T) positions, got "
            "others"
        )
    with operands:
        if call.compute is None:
            scores = linear_logprob(hidden, head, **options)
        else:
            scores = call.compute(hidden, head, positions=positions, **options)
    if rows is not None:
        scores.logps = rows.filled(scores.logps)
    places, mask = (len(hidden), None) if rows is None else (call.passed, rows.counted)
    count_rows(call.shares, places, mask, (scores.logps, scores.entropies))
    return scores


# Modules that copy TRL's function when they are imported
ADDERS = [f"trl.trainer.{name}_trainer" for name in ("grpo", "rloo", "kto", "sft", "dpo")]
ADDERS.append("trl.experimental.async_grpo.async_grpo_trainer")
_add_trls: Any = getattr(trl_utils, "add_fused_lm_head", None)


def add_fused_lm_head(model: Any, *args: Any, **kwargs: Any) -> None:
    """Do what TRL's function does, with the head's constants measured in the first call."""
    _add_trls(model, *args, **kwargs)
    fused = model.forward.__func__

    @functools.wraps(fused)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head or not HEAD.is_ours():
            return fused(self, *args, fused_lm_head=fused_lm_head, **kwargs)
        with during(HEAD_OF_MODEL, measured_head(self, functools.partial(fused, self))):
            return fused(self, *args, fused_lm_head=True, **kwargs)

    model.forward = types.MethodType(forward, model)


def add_measured_lm_head(model: Any, *args: Any, **kwargs: Any) -> None:
    """Do the same, and measure the constants before anything is generated."""
    add_fused_lm_head(model, *args, **kwargs)
    measured(model)


def measured(model: Any) -> Head | None:
    """`measured_head`, outside of a call of `model`; None where its parameters are divided."""
    for x in model.parameters():
        if x.is_meta or hasattr(x, "ds_status") or type(x).__name__ in ("DTensor", "FlatParameter"):
            return None
    return measured_head(model, model.forward)


def constants_of(measured: Head | None, cap: float | None, scale: float) -> dict[str, Any]:
    """Soft-cap and scale of a `measured` head by name; without one TRL's, from the config."""
    if measured is None:
        return {"final_logit_softcapping": cap, "logit_scale": scale}
    ours = measured.final_logit_softcapping, measured.logit_scale
    if cap != ours[0] or abs(scale - ours[1]) > 1e-6 * abs(ours[1]):
        warn_once(
            f"trl's head would use the soft-cap and scale {(cap, scale)}, from the config; the "
            f"model's own logits have {ours}, which are used, so that losses are the model's and "
            "not stock trl's"
        )
    return {"final_logit_softcapping": ours[0], "logit_scale": ours[1]}


HEAD = HostFunction(
    trl_utils,
    "_ChunkedLogProbFunction",
    FusedHead,
    unknown="fused language-model head with the signature of trl 1.16; TRL works unchanged",
    needed=("add_fused_lm_head", "maybe_gather_lm_head_ctx", "_use_triton"),
)


class ModelHead:
    """A head for TRL's forward, which passes `weight`, this object, to `FusedHead`."""

    bias = None  # TRL passes none: `score` reads the head's

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def weight(self) -> ModelHead:
        return self

    @property
    def device(self) -> torch.device:
        return heads.linear_of(inner_head(self._module)).weight.device

    @property
    def ds_status(self) -> Any:
        """Tell TRL, which asks under ZeRO-3, that this parameter needs no gathering."""
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        return ZeroParamStatus.AVAILABLE

    def score(
        self, hidden: Tensor, compute: Callable[[Tensor, Head, Gather | None], Scores]
    ) -> Scores:
        """Call ``compute(hidden, head, gather)`` with the head's parameters, whole inside."""
        head = inner_head(self._module)
        unit = self._module if heads.is_fsdp_unit(self._module) else head
        heads.check_hooks(unit)
        names: list[str] = []

        def whole(hidden: Tensor) -> tuple[Tensor, ...]:
            weight, bias, lora = heads.parameters_of(head, hidden)
            found = compute(
                hidden, Head(weight, bias, lora), heads.gather_of(head.parameters())
            ).given
            names[:] = found
            # no views: FSDP2 may lose its hooks on them
            return tuple(x.clone() for x in found.values())

        return Scores(**dict(zip(names, heads.within_head(unit, whole, hidden), strict=False)))


@contextmanager
def whole_heads(model: nn.Module) -> Iterator[None]:
    """Inside, `model` has a `ModelHead` if TRL must not read the weight of its head."""
    base: Any = causal_lm(model)
    head = base.get_output_embeddings()
    layer = getattr(trl_grpo, _TUNED, None)
    is_tuned = layer is not None and isinstance(inner_head(head), layer)
    if not (heads.is_fsdp_unit(head) or heads.divided_modules(head) or is_tuned):
        yield
        return
    try:
        with replaced(base, "get_output_embeddings", lambda: ModelHead(head)):
            yield
    finally:
        # FSDP2 leaves parameters whole after a forward that has no backward. PEFT switches the
        # gradient of adapters off for the reference, and on again, at the parameters that it
        # finds: if it found shards first and whole ones then, the shards' would stay off.
        for module in model.modules() if not torch.is_grad_enabled() else ():
            if heads.is_fsdp_unit(module):
                module.reshard()  # type: ignore[operator]


def adapters_allowed() -> AbstractContextManager[None]:
    """Inside, TRL's trainers accept an adapter on the head; `check_head` checks it afterwards."""
    if not hasattr(trl_grpo, _TUNED):
        return nullcontext()
    return replaced(trl_grpo, _TUNED, type(_TUNED, (), {}))  # a class that has no instances


def check_head(model: nn.Module, args: Any) -> None:
    """Raise unless the head is ``nn.Linear``, alone or with plain LoRA and without fp32 cast."""
    head = inner_head(causal_lm(model).get_output_embeddings())
    if heads.linear_of(head) is head:
        return
    heads.active_adapters(head)
    if getattr(args, "cast_lm_head_to_fp32", False):
        raise ValueError(
            "cast_lm_head_to_fp32: expected False with an adapter on lm_head, which would go on "
            "in its own precision, got True"
        )


def count_rows(
    shares: Shares, positions: int, mask: Tensor | None, results: Sequence[Tensor | None]
) -> None:
    """Count a head call, unless it is without gradient, for a trainer's log.

    ``rows/projected``: the share of `positions` that went through the head's product: all, or those
    where `mask` (rows,) is True. Positions are those of the completions if the trainer says which
    they are, else all that TRL passes.
    ``rows/gradient``: the share of projected rows whose `results`, (rows,) each, get a gradient.
    """
    attached = [x for x in results if x is not None and x.requires_grad]
    if not attached:
        return
    projected = positions if mask is None else mask.sum()
    shares.add("rows/projected", projected, positions)
    shares.add("rows/gradient", 0, projected)

    counted = torch.zeros_like(attached[0], dtype=torch.bool)

    # no hook on several tensors: torch's holds their nodes, which hold it
    def look(gradient: Tensor | None) -> None:
        nonlocal counted
        if gradient is None:  # of a result that nothing reads, where its node made several
            return
        graded = (gradient != 0) if mask is None else (gradient != 0) & mask
        shares.add("rows/gradient", (graded & ~counted).sum(), 0)
        counted = counted | graded

    for x in attached:
        x.register_hook(look)


class LogsRows:
    """In front of a trainer's class: logs its `_shares`, of this process, since the last log."""

    model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._shares = Shares()
        super().__init__(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as TRL does, with the shares."""
        if self.model.training:
            logs.update(self._shares.take())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
