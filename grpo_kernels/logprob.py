"""Log-probabilities and entropies straight from hidden states, both differentiable: what other losses build on.

With an expectation of the gradient, d hidden and d weight are taken in the forward, on logits that are there anyway.
The backward then finds the scale c that turns the expectation into what came, and recomputes only the rows where it
does not fit: the result is the gradient of what was really computed; a right expectation saves the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.backends.interface import RowStats
from grpo_kernels.base.agreement import Agreement, described
from grpo_kernels.base.checks import check_fake, check_gather, check_shape, check_tensor, is_dtensor, is_fake
from grpo_kernels.call.projection import head_of, of_shard, pick_engine, plan_rows, read_rows
from grpo_kernels.engine.autograd import LinearLogprob
from grpo_kernels.engine.operands import Coefficients, Rows
from grpo_kernels.engine.passes import Gather, Request
from grpo_kernels.engine.plan import Coupling
from grpo_kernels.head.local_shard import describe_shard, divided, local_head, sharding_group
from grpo_kernels.head.lora import LoRA

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Expectation:
    """An expected gradient that is computed on the logits' own chunk.

    Args:
        coefficients: maps (index (n,), logps (n,), entropies (n,) or None), index being positions in the flattened ids,
            to a = d loss / d logp or (a, b) with b = d loss / d entropy, (n,) each. None: not known row by row.
        graded: bool, shaped like the ids: False where a = b = 0 is certain, so that nothing is computed; None: nowhere.
        has_entropy_gradient: whether b may be other than None.
    """

    coefficients: Callable[[Tensor, Tensor, Tensor | None], Any] | None
    graded: Tensor | None = None
    has_entropy_gradient: bool = True


Expected = Tensor | tuple[Tensor, Tensor | None] | Expectation | Callable[[Tensor, Tensor, Tensor], Any]


def linear_logprob(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    ids: Tensor,  # (...)
    *,
    bias: Tensor | None = None,  # (V,)
    mask: Tensor | None = None,  # (...)
    temperature: float | Tensor = 1.0,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool = True,
    expected: Expected | None = None,
    logits_dtype: str = "float32",
    engine: str = "auto",
    backend: str = "auto",
    workspace_bytes: int | None = None,
    lora: LoRA | None = None,
    process_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``log softmax(z)[id]`` and the entropy of ``softmax(z)``, without the (tokens, vocabulary) logits in memory.

    ``z = softcap(logit_scale * (hidden @ weight.T + bias)) / temperature``, ``softcap(x) = cap * tanh(x / cap)``.

    Args:
        hidden: (..., H) hidden states, aligned with `ids`: the library never shifts.
        weight, bias: the head, (V, H) and (V,).
        ids: (...) integers; read only where the mask counts.
        mask: (...) bool, int or float; non-zero counts, NaN is refused. Without it every position does.
        temperature: a number, or one a position, shaped like `ids`; a constant, without gradient.
        final_logit_softcapping: cap, or None.
        logit_scale: factor on the logits.
        entropy: whether to compute the entropy at all.
        expected: what gradient will arrive, up to one common factor: a = d loss / d logp shaped like `ids`; or (a, b)
            with b = d loss / d entropy or None; or an `Expectation`, or just its function. Whatever is expected, the
            gradient is that of what is really computed. Not used under torch.compile, which takes two passes.
        logits_dtype: ``"float32"``, or ``"input"`` to round the logits to the operands' dtype.
        engine: ``"auto"`` or one of `grpo_kernels.engine.plan.ENGINES`.
        backend: ``"auto"`` or the name of a row backend.
        workspace_bytes: bound on temporary memory, whatever the number of tokens. None: 512 MiB; on a GPU, where the
            weight trains, 4 V H bytes, but at least that and at most 2 GiB.
        lora: a low-rank adapter on the head, `LoRA`.
        process_group: the group over which the head is sharded by rows of the vocabulary, in rank order; the shards may
            be uneven. `hidden`, `ids` and all else are the same on every rank, and so are the results; each rank gets
            the gradient of its own rows of the head and the whole one of `hidden`. Not needed where `weight` and
            `hidden` are DTensors, `Shard(0)` and replicated. The ranks send each other three numbers a row,
            four with the entropy, and sum d hidden; nothing has the size of the vocabulary.
        vocab_size: ids of the head, at most V (of all shards together): rows from there on are padding, and no token.
            Like `lora` and `process_group` it breaks the graph of torch.compile.

    Returns:
        logps (...) and entropies (...), fp32 (fp64 for fp64 inputs), 0 where masked; the second None if not asked for.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. Raised before any work is done.
    """
    results = linear_logprob_with(
        hidden,
        weight,
        ids,
        bias=bias,
        mask=mask,
        temperature=temperature,
        final_logit_softcapping=final_logit_softcapping,
        logit_scale=logit_scale,
        outputs=("entropy",) if entropy else (),
        expected=expected,
        logits_dtype=logits_dtype,
        engine=engine,
        backend=backend,
        workspace_bytes=workspace_bytes,
        lora=lora,
        process_group=process_group,
        vocab_size=vocab_size,
    )
    return results["logps"], results.get("entropy")


def linear_logprob_with(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = ("entropy",),
    expected: Expected | None = None,
    logits_dtype: str = "float32",
    engine: str = "auto",
    backend: str = "auto",
    workspace_bytes: int | None = None,
    gather: Gather | None = None,
    lora: LoRA | None = None,
    process_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> dict[str, Tensor]:
    """`linear_logprob` with a choice of `outputs`, in the same pass: a dict with ``"logps"`` and those asked for.

    Besides ``"entropy"`` there are, without gradient, ``"log_sum_sq_probs"`` (log of sum p_j^2), ``"mean_logits"`` (z's
    mean over the vocabulary) and ``"is_top1"`` (bool). `gather` makes the context in which a backward that needs
    the weight again runs; it must make the weight whole (DeepSpeed ZeRO-3). All results have the shape of `ids`.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it.
    """
    options: dict[str, Any] = {
        "bias": bias,
        "mask": mask,
        "temperature": temperature,
        "final_logit_softcapping": final_logit_softcapping,
        "logit_scale": logit_scale,
        "outputs": outputs,
        "logits_dtype": logits_dtype,
        "backend": backend,
        "workspace_bytes": workspace_bytes,
    }
    compiling = torch.compiler.is_compiling()
    if compiling or is_fake(hidden, weight):
        from grpo_kernels.call import compiled  # not at import: it loads the compiler

        if expected is not None and engine == "one_pass":  # an expectation only buys speed
            engine = "auto"
        apart = {"lora": lora, "process_group": process_group, "vocab_size": vocab_size}
        if not compiling:
            check_fake(hidden, weight, bias, ("ids", ids), ("mask", mask), lora=lora, process_group=process_group)
            apart, gather = {}, None  # no shape depends on what is left
        if gather is None and all(x is None for x in apart.values()) and not is_dtensor(weight):
            return compiled.linear_logprob(hidden, weight, ids, **options, engine=engine)
        options |= {"expected": expected, "engine": engine, "gather": gather, **apart}
        return compiled.eagerly(linear_logprob_with, hidden, weight, ids, **options)
    process_group = sharding_group(hidden, weight, process_group)
    with Agreement("process_group", process_group, "linear_logprob") as ranks:
        check_gather(gather)
        head = local_head(hidden, weight, bias, lora, process_group, vocab_size)
        given = {**options, "bias": head.bias, "lora": head.lora, "engine": engine}
        config, rows, wants = plan_rows(head.hidden, head.weight, ids, **given)
        _check_pair(expected, entropy="entropy" in outputs)
        coefficients, graded, expects_entropy = _read_expected(expected, ids, rows.positions, config.accumulator)
        if ranks:
            describe_shard(ranks, head, wants, config, vocab_size)
            kind = (coefficients is not None, graded is not None, expects_entropy)
            _describe(ranks, rows, graded, {**options, "hidden": described(head.hidden), "engine": engine}, kind)
    head, shard = divided(head, ranks, vocab_size)
    config = of_shard(config, shard, head.weight, wants, workspace_bytes)
    rows = read_rows("ids", rows, head.weight.shape[0], shard)
    coupling = Coupling.COUPLED if coefficients is None else Coupling.TOKEN
    only_logps = set(outputs) <= {"entropy"} and lora is None
    engine = pick_engine(
        coupling, wants, config, entropy_gradient=expects_entropy, engine=engine, only_logps=only_logps
    )
    request = Request(
        rows=rows,
        config=config,
        wants=wants,
        engine=engine,
        entropy="entropy" in outputs,
        extras=tuple(name for name in outputs if name != "entropy"),
        coefficients=coefficients,
        graded=graded,
        gather=nullcontext if gather is None else gather,
    )
    logps, entropies, *extras = LinearLogprob.apply(*head_of(*head, rows), request)
    results = {"logps": logps, **dict(zip(request.extras, extras, strict=True))}
    if entropies is not None:
        results["entropy"] = entropies
    return {name: x.view(ids.shape) for name, x in results.items()}


def _describe(
    ranks: Agreement, rows: Rows, graded: Tensor | None, options: dict[str, Any], expected: tuple[bool, ...]
) -> None:
    """Say which positions are scored and how, and for which of them a gradient is expected."""
    apart = {"bias", "mask", "temperature"}
    inv_t = rows.inv_temperature
    ranks.same({name: x for name, x in options.items() if name not in apart})
    ranks.same({"temperature": "one a position" if isinstance(inv_t, Tensor) else 1.0 / inv_t})
    ranks.same({"expected (coefficients, graded, of the entropy)": expected})
    ranks.same_bits("mask", rows.positions)
    ranks.same_bits("ids", rows.ids)
    if isinstance(inv_t, Tensor):
        ranks.same_values({"temperatures": inv_t[:, 0]})
    if graded is not None:
        ranks.same_bits("expected: where it is not 0", graded)


def _check_pair(expected: Any, *, entropy: bool) -> None:
    """Raise ValueError for a tuple that is not (a, b), or that has a b although there is no entropy."""
    if isinstance(expected, tuple) and (len(expected) != 2 or (expected[1] is not None and not entropy)):
        pair = "(a, b)" if entropy else "(a, None) since there is no entropy"
        raise ValueError(f"expected: expected a tensor, {pair} or an Expectation, got a tuple of {len(expected)}")


def _read_expected(
    expected: Any, ids: Tensor, positions: Tensor, dtype: torch.dtype
) -> tuple[Callable[[Tensor, RowStats], Coefficients] | None, Tensor | None, bool]:
    """(coefficients by place among the rows, which rows they may be non-zero for, whether any is for the entropy)."""
    if expected is None:
        return None, None, False

    def usable(x: Tensor) -> Tensor:  # whose products neither overflow nor lose bits to underflow: else expect nothing
        x, largest = x.to(dtype), torch.finfo(dtype).max ** 0.5
        return torch.where((x.abs() <= largest) & (x.abs() >= 1 / largest), x, 0.0)

    def rows(name: str, x: Any) -> Tensor:
        check_tensor(name, x, like=ids)
        check_shape(name, x, ("that of the ids", tuple(ids.shape)))
        return x.detach().reshape(-1)[positions]

    if callable(expected):
        expected = Expectation(expected)
    if isinstance(expected, Expectation):
        coefficients = expected.coefficients

        def ask(index: Tensor, stats: RowStats) -> Coefficients:
            assert coefficients is not None
            answer = coefficients(positions[index], stats.logps, stats.entropies)
            a, b = answer if isinstance(answer, tuple) else (answer, None)
            if stats.entropies is None:  # then no gradient of it can come
                b = None
            for name, x in (("expected", a), ("expected[1]", b)):
                if x is not None or name == "expected":
                    check_tensor(name, x, like=ids)
                    check_shape(name, x, ("that of the index", tuple(index.shape)))
            return usable(a), None if b is None else usable(b)

        graded = None if expected.graded is None else rows("expected.graded", expected.graded).bool()
        return None if coefficients is None else ask, graded, expected.has_entropy_gradient

    a, b = expected if isinstance(expected, tuple) else (expected, None)
    a = usable(rows("expected", a))
    b = None if b is None else usable(rows("expected[1]", b))

    def look_up(index: Tensor, _: RowStats) -> Coefficients:
        return a[index], None if b is None else b[index]

    return look_up, (a != 0) if b is None else (a != 0) | (b != 0), b is not None
