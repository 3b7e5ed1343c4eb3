"""Plan of a call: its rows, backend and dtypes, and when the gradient is computed.

Costs of the engines in NVH floating point operations, for N projected rows, of which a share s
carries gradient; a product takes 2:

========== =========================================== ======================== ==================
engine     what it does                                head and hidden train    head frozen
========== =========================================== ======================== ==================
score      project                                     2 (no gradient at all)
frozen     project; d logp / d hidden, then scaled     (not possible)           2 + 2s
one_pass   project; gradient on the same logits        2 + 4s                   2 + 2s
two_pass   project; later project again, gradient      2 + 6s                   2 + 4s
lean       like two_pass, by slices of the vocabulary  2 + 6s                   2 + 4s
========== =========================================== ======================== ==================

A divergence from a second head adds 2 for every projection of the rows, since that head projects
them too. `one_pass` needs each row's coefficients, d loss / d logp, d loss / d entropy and d loss /
d divergence, as soon as the row's own logits exist. `frozen` does not need them beforehand, since d
hidden is linear in a single coefficient; it cannot serve a loss with several. `two_pass` and `lean`
serve all calls. `lean` writes each slice of d weight once, in the weight's dtype, so it needs no
accumulator of the weight's size. `frozen` and `one_pass` do no more than project rows whose
coefficients are known to be 0 beforehand. `two_pass` and `lean` also skip the gradient of all rows
whose coefficients turn out to be 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from grpo_kernels.backends import (
    BACKENDS,
    Coefficients,
    FusedLoss,
    FusedRowBackend,
    LogitTransform,
    RowBackend,
    RowStats,
    choose_backend,
)
from grpo_kernels.backends.torch_rows import TorchRows
from grpo_kernels.base import BackendName, EngineName
from grpo_kernels.base.checks import (
    check_choice,
    check_counted_ids,
    hints_names,
    warn_once,
)
from grpo_kernels.base.tensors import accumulator_of, map_tensors, take
from grpo_kernels.engine.gemm import Product
from grpo_kernels.engine.ranks import Ranks, Shard
from grpo_kernels.engine.topk import TopKLogps, TopKTeacher
from grpo_kernels.engine.workspace import (
    AMPLE,
    Memory,
    device_of,
    free_memory,
    large_workspace,
    needs_conversion,
)
from grpo_kernels.head import (
    Head,
    HeadTensors,
    StatesAndHead,
    first_ids,
    needs_grad_of,
    operand_dtype_of,
    tensors_of,
    with_its_group,
)

_AS_IT_IS, _TORCH = LogitTransform(), TorchRows()
# bytes of the weight to convert at a time; less only if the budget is small
SLICE_BYTES = 32 * 2**20
Gather = Callable[[], AbstractContextManager[Any]]
# When the gradient is computed: in the forward ("now"), in the backward ("later"), or in the
# forward for the coefficient 1 in each row ("now_unscaled"), to be scaled once that of the row is
# known.
When = Literal["never", "now_unscaled", "now", "later"]


class Engine(NamedTuple):
    """When a gradient is computed, in which order, and whether that gives a call's gradient."""

    when: When
    order: Literal["rows", "slices"]  # slices of the vocabulary
    serves: Callable[[CoefficientSource, Job], bool]
    needs: str = ""  # what `serves` asks for, in errors


def _has_one_number(source: CoefficientSource, job: Job) -> bool:
    """True if the head gets no gradient, and the hidden states' is one number times a known one."""
    if any(job.needs_grad[1:]) or isinstance(job.rows.topk, TopKLogps):
        return False
    # without a gradient, this does not evaluate a user's function
    no_gradient = not job.needs_grad.hidden and job.reference is None
    return no_gradient or source.one_coefficient


def _is_known_by_row(source: CoefficientSource, job: Job) -> bool:
    """True if the statistics of a row determine its coefficients, or the caller expects them.

    Not with GSPO and old log-probabilities, which share a ratio: `PolicyLoss.is_coupled`.
    """
    # in a CUDA graph, the comparison with expected ones may not wait for the device
    waits = source.is_expected and device_of(job.rows.positions.device).is_capturing()
    return not (source.is_coupled or waits)


# The first that serves is the cheapest; frozen precedes one_pass since it needs no coefficients.
ENGINES = {
    "score": Engine(
        "never", "rows", lambda _, job: not any(job.needs_grad), "a call without gradient"
    ),
    "frozen": Engine(
        "now_unscaled", "rows", _has_one_number,
        "a frozen head, without a lora of its own, and a loss that depends on one number per row",
    ),
    "one_pass": Engine(
        "now", "rows", _is_known_by_row, "a loss of each row alone; for scores, pass expected="
    ),
    "two_pass": Engine("later", "rows", lambda *_: True),
    "lean": Engine("later", "slices", lambda *_: True),  # to save memory
}  # fmt: skip
ENGINE_NAMES = get_args(EngineName)  # valid values of `engine=`: "auto" and these


@hints_names
@dataclass(frozen=True, eq=False)
class Run:
    """Options for the speed and memory of a call. They change results only by rounding.

    ::

        Run(workspace_bytes=512 * 2**20)  # at most 512 MiB of temporary memory
        Run(engine="lean")                # no accumulator of the weight's size

    Args:
        engine: ``"auto"`` chooses the cheapest engine that gives the exact gradient. You may also
            name an engine: ``"one_pass"``; ``"two_pass"``, which computes the logits again in the
            backward; ``"lean"``, which does the same with less memory; ``"frozen"``, for a head
            that does not train; ``"score"``, which computes no gradient. The call raises an error
            if the engine that you named cannot compute the gradient.
        backend: ``"auto"``, ``"triton"``, ``"cpp"`` or ``"torch"``.
        workspace_bytes: upper bound on temporary memory, in bytes; it does not depend on the number
            of tokens. None: 512 MiB on a CPU; up to 3 GiB on a GPU, depending on the head's size
            and on free memory; 64 MiB with `kept_ids`.
        gather: function that returns a context manager in which the whole weight is available.
            DeepSpeed ZeRO-3 needs this for a backward that reads the weight again.

    Raises:
        TypeError, ValueError: an option has an invalid value.
    """

    engine: EngineName = "auto"
    backend: BackendName = "auto"
    workspace_bytes: int | None = None
    gather: Gather | None = None

    def __post_init__(self) -> None:
        hint = "; pass bytes as workspace_bytes=" if isinstance(self.engine, int) else ""
        check_choice("engine", self.engine, ENGINE_NAMES, hint)
        check_choice("backend", self.backend, BACKENDS)
        gather: Any = self.gather
        budget: Any = self.workspace_bytes
        if gather is not None and not callable(gather):
            expected = "a function that returns a context manager"
            raise TypeError(f"gather: expected {expected}, got {type(gather).__name__}")
        if budget is None:
            return
        if isinstance(budget, bool) or not isinstance(budget, int):
            raise TypeError(f"workspace_bytes: expected an int, got {budget!r}")
        if budget <= 0:
            raise ValueError(f"workspace_bytes: expected a number of bytes > 0, got {budget}")
        if budget < 2**20:
            warn_once(
                "workspace_bytes is in bytes; values under 1 MiB are slow. For 512 MiB, pass "
                "512 * 2**20"
            )


def check_run(run: Any) -> Run:
    """Return the `Run`, for None the default one; `plan` checks if its engine can serve.

    Raises:
        TypeError: `run` is neither.
    """
    if not isinstance(run, Run | None):
        raise TypeError(f"run: expected a Run, got {type(run).__name__}")
    return Run() if run is None else run


class CoefficientSource(Protocol):
    """The gradient that a call's rows will get, as far as it is known before the backward.

    A built-in loss, a custom loss and what a caller of scores expects each have these members.

    Attributes:
        is_coupled: False if a row's own statistics, or less, determine its coefficients.
        is_expected: True if the caller only expects this gradient; the backward compares it with
            the upstream gradient, and computes what is missing.
        live: (n,) bool, rows that may have a coefficient other than 0; None means all rows.
        one_coefficient: True if the loss depends on one number of each row, the log-probability or
            the divergence (`Job.d_result`). Read only if the head is frozen, since it may evaluate
            a user's function.
    """

    is_expected: bool

    @property
    def is_coupled(self) -> bool: ...
    @property
    def live(self) -> Tensor | None: ...
    @property
    def one_coefficient(self) -> bool: ...

    def coefficients_at(self, index: Tensor, stats: RowStats) -> Coefficients:
        """The coefficients of the rows at `index` (m,), which have `stats`."""

    def fused_loss(self) -> FusedLoss | None:
        """This loss in the form that one kernel computes; None if no kernel can."""


@dataclass(frozen=True)
class Rows:
    """The positions to project, as copies, so the caller may change its own tensors later.

    Attributes:
        positions: (n,) int64, indices into `hidden`.
        ids: (n,) int64 in [0, V). From `with_engine` on (over kept sets: `plan_sets`), 0 is the id
            of this rank's first row of the head, so another rank's ids are out of range.
        inv_temperature: a number, or (n, 1).
        invalid: (n,) bool, rows whose log-probability is NaN; None if there are none.
        topk: K more ids of each row, to score, or with a teacher's log-probabilities.
    """

    positions: Tensor
    ids: Tensor
    inv_temperature: float | Tensor = 1.0
    invalid: Tensor | None = None
    topk: TopKTeacher | TopKLogps | None = None

    @staticmethod
    def of(ids: Tensor, positions: Tensor, inv_temperature: float | Tensor) -> Rows:
        """The rows at `positions` (n,) of `ids` (...), whose range is not yet checked."""
        return Rows(positions, ids.detach().reshape(-1)[positions].long(), inv_temperature)

    def __len__(self) -> int:
        return self.positions.shape[0]

    def with_ids_from(self, first_id: int) -> Rows:
        """The same rows with ids that start at 0 for `first_id`."""
        topk = None if self.topk is None else replace(self.topk, ids=self.topk.ids - first_id)
        return replace(self, ids=self.ids - first_id, topk=topk) if first_id else self


class JobHead(NamedTuple):
    """A head of a call, as products and row work read it; a reference's tensors are constants."""

    tensors: HeadTensors
    operand_dtype: torch.dtype  # of its products
    transform: LogitTransform = _AS_IT_IS  # raw to scaled logits, without bias and temperature

    def matrices(self) -> list[tuple[Tensor, torch.dtype]]:
        """Weight and adapter, each with its operands' dtype; an adapter keeps its own."""
        (_, weight), *adapter = self.tensors.factor_pairs()
        return [
            (weight, self.operand_dtype),
            *((b, torch.promote_types(u.dtype, b.dtype)) for u, b in adapter),
        ]

    def converted(self) -> JobHead:
        """Convert the weight to the dtype of 16-bit products."""
        weight = self.tensors.weight
        if not needs_conversion(weight, self.operand_dtype):
            return self
        return self._replace(tensors=self.tensors._replace(weight=weight.to(self.operand_dtype)))


@dataclass(frozen=True)
class Job:
    """A planned call.

    Attributes:
        rows: n rows; all results are 0 at all other positions.
        head: the head.
        needs_grad: which of the head's tensors need a gradient.
        backend: does the row work. Over kept sets that is torch: sets are short, so it costs little
            compared with gathering.
        reference: the head of a reference or a teacher; None without one.
        jsd_beta: the divergence from it, as in `backends.Chunk`.
        shard: this rank's shard, if the head's rows are divided among ranks.
        engine: one of `ENGINES`. Over kept sets, nothing reads it.
        entropy, extras: further statistics, from the backend.
        gather: returns a context in which the backward has the whole weight (ZeRO-3).
    """

    rows: Rows
    head: JobHead
    needs_grad: HeadTensors
    workspace_bytes: int
    backend: RowBackend = _TORCH
    reference: JobHead | None = None
    jsd_beta: float = 1.0
    memory: Memory = AMPLE
    shard: Shard | None = None
    engine: str = "score"
    entropy: bool = True
    extras: tuple[str, ...] = ()
    gather: Gather = nullcontext

    @property
    def when(self) -> When:
        return ENGINES[self.engine].when

    @property
    def order(self) -> Literal["rows", "slices"]:
        return ENGINES[self.engine].order

    @property
    def shard_start(self) -> int:
        """The id of this rank's first row of the head."""
        return 0 if self.shard is None else self.shard.start

    @property
    def vocab(self) -> int:
        """The number of ids of all ranks."""
        return self.head.tensors.weight.shape[0] if self.shard is None else self.shard.vocab

    def at(self, index: Tensor) -> Job:
        """The same call for the rows at `index` (m,) alone."""
        return replace(self, rows=take(self.rows, index))

    def with_tensors(self, tensors: HeadTensors, reference_tensors: Any) -> Job:
        """The same call with other tensors of its heads."""
        reference = self.reference and self.reference._replace(tensors=reference_tensors)
        return replace(self, head=self.head._replace(tensors=tensors), reference=reference)

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """Dtype of logits, statistics, and gradients before their one rounding."""
        return accumulator_of(self.head.operand_dtype)

    def loss_to_fuse(self, source: CoefficientSource) -> FusedLoss | None:
        """The loss of `source`, for a kernel that does it at once; None if none can here.

        All conditions but fp16's (`sweep`) stand here and in `CoefficientSource.fused_loss`: its
        rows must not be coupled, and a custom loss has none. Only one_pass asks for it. torch has
        no such kernel, and Triton has none with a reference. The ranks of a sharded head must
        combine statistics before the loss is known. An empty batch needs no kernel.
        """
        backend = self.backend
        if self.when != "now" or len(self.rows) == 0 or not isinstance(backend, FusedRowBackend):
            return None
        if self.shard is not None or self.rows.topk is not None:
            return None
        if self.reference is not None and not backend.fuses_reference:
            return None
        return source.fused_loss()

    @property
    def d_result(self) -> Literal["d_logp", "d_divergence"]:
        """Which of a row's `Coefficients` belongs to its result, the one that a call asks for.

        The result is the log-probability, or the divergence in a call that computes one. A loss
        with a reference depends on both, so this says nothing about it.
        """
        diverges = self.reference is not None or isinstance(self.rows.topk, TopKTeacher)
        return "d_divergence" if diverges else "d_logp"

    def products(self, head: JobHead, columns: slice = slice(None)) -> list[Product]:
        """The products with some columns of `head`, one for each of its matrices."""
        return [self._product(matrix[columns], dtype) for matrix, dtype in head.matrices()]

    def widest_product(self, head: JobHead) -> Product:
        """The product with the weight of the rank that has the most rows: plans by it agree."""
        return self._product(_widest_part(head.tensors.weight, self.shard), head.operand_dtype)

    def _product(self, matrix: Tensor, dtype: torch.dtype) -> Product:
        slice_bytes = min(SLICE_BYTES, self.workspace_bytes // 8)
        return Product(matrix, dtype, self.accumulator_dtype, slice_bytes)

    def converted(self) -> Job:
        """Convert both heads' weights to the dtype of 16-bit products, if memory allows copies.

        Otherwise each product converts its weight slice by slice.
        """
        if not self.memory.converts:
            return self
        head, reference = self.head.converted(), self.reference and self.reference.converted()
        if head is self.head and reference is self.reference:
            return self
        return replace(self, head=head, reference=reference)


@contextmanager
def checked_on_all_ranks(
    call: str, arguments: Mapping[str, Any]
) -> Iterator[tuple[Head, Run, Ranks | None]]:
    """Context for a public call's checks and plan: yields its head, its `Run` and its `Ranks`.

    The head has its process group; without one, there are no ranks. If one rank raises inside the
    context before `Ranks.agree`, all ranks raise: each rank sends the same number of integers,
    whatever its call. `arguments` are the call's arguments by name, compared between ranks, except
    heads, hidden states and `run`, which `plan` compares.
    """
    head, ranks = with_its_group(arguments["hidden"], arguments["head"]), None
    if head.process_group is not None:
        apart = ("hidden", "head", "reference", "teacher", "run")
        compared = {k: x for k, x in arguments.items() if k not in apart}
        ranks = Ranks(call, head.process_group, compared)
    try:
        yield head, check_run(arguments["run"]), ranks
    except Exception:
        if ranks is not None and not ranks.compared:
            ranks.exchange(1)
        raise


class CallHeads(NamedTuple):
    """What a call's heads need and what the device has for them, before the call waits for it."""

    models: list[tuple[StatesAndHead, torch.dtype]]  # with the dtype of their products' operands
    needs_grad: HeadTensors
    memory: Memory

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the call's statistics and per-token inputs."""
        return accumulator_of(self.models[0][1])


def call_heads(
    hidden: Tensor, head: Head, run: Run, reference: StatesAndHead | None = None
) -> CallHeads:
    """Ask what a call's checked heads need; after a wait, the device would idle meanwhile."""
    dtype = operand_dtype_of(hidden, head.weight)
    models = [(StatesAndHead(hidden, head), dtype)]
    if reference is not None:
        reference_dtype = operand_dtype_of(reference.hidden, reference.head.weight, dtype)
        models.append((reference, reference_dtype))
    needs_grad, weights = needs_grad_of(hidden, head), [(x.head.weight, y) for x, y in models]
    memory = free_memory(weights, hidden, needs_grad, run.workspace_bytes)
    return CallHeads(models, needs_grad, memory)


def plan(
    heads: CallHeads,
    rows: Rows,
    run: Run,
    ranks: Ranks | None,
    source: CoefficientSource | None,
    *,
    jsd_beta: float = 1.0,
    entropy: bool = True,
    extras: tuple[str, ...] = (),
) -> Job:
    """Plan a call with checked heads.

    Args:
        rows: rows with ids of the whole vocabulary.
        ranks: the ranks of a sharded head, which compare their calls here.
        source: the engine is chosen for it. None over kept sets: `with_engine` plans the rest.
        jsd_beta, entropy, extras: as in `Job`.
    """
    models, needs_grad, memory = heads
    for model, dtype in models:
        _warn_if_promoted(model, dtype)
    shard = None
    if ranks is not None:
        (hidden, head, _), dtype = models[0]
        values = {
            **_compared([model for model, _ in models], rows, run),
            "gradients wanted": [bool(x) for x in needs_grad],
            "dtype of the products": [dtype for _, dtype in models],
            "backend that serves": choose_backend(run.backend, hidden.device, dtype).name,
        }
        shard, memory = ranks.agree(values, head, memory)
        own_ids = shard.sizes[shard.rank]
        models = [(first_ids(model, own_ids), dtype) for model, dtype in models]
        if len(shard.sizes) == 1:
            shard = None
    workspace_bytes = run.workspace_bytes
    if workspace_bytes is None:
        widest = _widest_part(models[0][0].head.weight, shard)
        large = large_workspace(widest, needs_grad, heads=len(models))
        workspace_bytes = min(large, memory.workspace)
    policy, *references = [
        JobHead(tensors_of(states, head, rows.positions), dtype, _transform(head, dtype))
        for (states, head, _), dtype in models
    ]
    constants = [x._replace(tensors=map_tensors(Tensor.detach, x.tensors)) for x in references]
    job = Job(
        rows=rows,
        head=policy,
        needs_grad=needs_grad,
        workspace_bytes=workspace_bytes,
        reference=constants[0] if constants else None,
        jsd_beta=jsd_beta,
        memory=memory,
        shard=shard,
        entropy=entropy,
        extras=extras,
        gather=run.gather or nullcontext,
    )
    return job if source is None else with_engine(job, run, source)


def with_engine(job: Job, run: Run, source: CoefficientSource) -> Job:
    """Check the ids of `job`, and choose its backend and the engine for `source`."""
    rows = in_range(job.rows, job.vocab).with_ids_from(job.shard_start)
    backend = choose_backend(run.backend, rows.ids.device, job.head.operand_dtype)
    engine = choose_engine(run.engine, source, job)
    return replace(job, rows=rows, backend=backend, engine=engine)


def choose_engine(name: str, source: CoefficientSource, job: Job) -> str:
    """Choose the cheapest engine that gives the exact gradient, or the engine `name`.

    Raises:
        ValueError: the engine `name` cannot give this gradient.
    """
    if name == "auto" and job.memory.tight and any(job.needs_grad[1:]):
        return "lean"
    if name == "auto":
        return next(x for x, engine in ENGINES.items() if engine.serves(source, job))
    if not ENGINES[name].serves(source, job):
        raise ValueError(
            f"engine: expected one that gives this gradient, got {name!r}, which needs "
            f"{ENGINES[name].needs}"
        )
    return name if any(job.needs_grad) else "score"


def in_range(rows: Rows, vocab: int) -> Rows:
    """Check that ids are in range.

    On a GPU, out-of-range ids raise no error; the row's results become NaN.

    Raises:
        ValueError: an id is out of range, on a CPU.
    """
    ids, topk = rows.ids, rows.topk
    invalid = check_counted_ids("completion_ids", ids, vocab)
    if invalid is not None:
        ids = ids.masked_fill(invalid, 0)
    if topk is not None:
        outside = check_counted_ids(topk.name, topk.ids, vocab, padded=True)
        if outside is not None and isinstance(topk, TopKTeacher):
            any_outside = outside.any(dim=1, keepdim=True)
            topk = replace(topk, logps=topk.logps.masked_fill(any_outside, torch.nan))
        elif outside is not None:
            any_outside = outside.any(dim=1)
            invalid = any_outside if invalid is None else invalid | any_outside
    return replace(rows, ids=ids, invalid=invalid, topk=topk)


def _widest_part(weight: Tensor, shard: Shard | None) -> Tensor:
    """A tensor in the shape of the largest part of the head, perhaps without data."""
    if shard is None or shard.widest == weight.shape[0]:
        return weight
    return weight.new_empty(()).expand(shard.widest, weight.shape[1])


def _transform(head: Head, dtype: torch.dtype) -> LogitTransform:
    rounds = head.logits_dtype == "input" and dtype.itemsize < 4
    cap = head.final_logit_softcapping
    return LogitTransform(head.logit_scale, cap, rounded_to=dtype if rounds else None)


def _compared(models: list[StatesAndHead], rows: Rows, run: Run) -> dict[str, Any]:
    """The arguments that `plan` reads and that must agree between the ranks of a sharded head."""
    # heads without rows, since their number may differ
    alike = tuple(x._replace(head=replace(x.head, process_group=None)) for x in models)
    (_, head, _), *references = map_tensors(lambda x: x[:0], alike)
    return {
        **{x.name: getattr(head, x.name) for x in fields(Head)},
        **{x: getattr(run, x) for x in ("engine", "backend", "workspace_bytes")},
        "reference": tuple((x.hidden, x.head) for x in references),
        "hidden": models[0].hidden,
        "counted tokens": len(rows),
    }


def _warn_if_promoted(model: StatesAndHead, dtype: torch.dtype) -> None:
    """Warn once if dtype promotion makes the products fp32, which is likely a mistake.

    A GPU multiplies 16-bit operands about ten times as fast, so this warns of a 16-bit weight
    there. An fp32 weight counts as intended.
    """
    hidden, weight, prefix = model.hidden, model.head.weight, model.prefix
    name, weight_name = f"{prefix}hidden", f"{prefix}head.weight"
    # without mixed products, the device multiplies in fp32 anyway
    has_16_bits = weight.dtype.itemsize == 2 and device_of(weight.device).mixed_products
    if has_16_bits and dtype == torch.float32:
        warn_once(
            f"{name} in {hidden.dtype} with a {weight_name} in {weight.dtype}, outside autocast, "
            "is multiplied in torch.float32, which takes a GPU about ten times as long as 16 bits. "
            f"Cast {name} to the dtype of {weight_name}, or call within torch.autocast; for "
            f"float32, cast {weight_name} to it",
            RuntimeWarning,
        )
