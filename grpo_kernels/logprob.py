"""Log-probabilities and entropies straight from hidden states, both differentiable, for other losses to build on.

If the upstream gradient is expected, d hidden and d weight are computed in the forward, on logits that are there
anyway. The backward finds the scale c between the expected gradient and the one that came, and recomputes only the rows
where they do not fit. So the gradient is always exact, and a right expectation saves the recomputation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from grpo_kernels.base.checks import check_fake, is_fake
from grpo_kernels.base.choices import BackendName, EngineName, LogitsDtype, LogprobOutput, WithoutSet
from grpo_kernels.batch.kept_ids import KeptIds, check_without_set
from grpo_kernels.call.expected import Expectation, Expected
from grpo_kernels.call.kept import KeptInputs, kept_logprob
from grpo_kernels.call.logprob import ScoreInputs, score
from grpo_kernels.call.options import Execution, HeadOptions, Projection
from grpo_kernels.call.projected import projected_logprob
from grpo_kernels.engine.engines import ONE_PASS
from grpo_kernels.engine.request import Gather
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.head.lora import LoRA

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from grpo_kernels.call.keywords import LogprobKeywords

__all__ = ["Expectation", "Expected", "linear_logprob", "linear_logprob_with"]


@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = ...,
    entropy: Literal[True, "full"] = ...,
    **options: Unpack[LogprobKeywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = ...,
    entropy: Literal[False],
    **options: Unpack[LogprobKeywords],
) -> tuple[Tensor, None]: ...


@overload
def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = ...,
    entropy: bool | Literal["full"],
    **options: Unpack[LogprobKeywords],
) -> tuple[Tensor, Tensor | None]: ...


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
    entropy: bool | Literal["full"] = True,
    kept_ids: Tensor | KeptIds | None = None,  # (..., K)
    without_set: WithoutSet = "error",
    expected: Expected | None = None,
    logits_dtype: LogitsDtype = "float32",
    projection: Projection = "library",
    engine: EngineName = "auto",
    backend: BackendName = "auto",
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
        mask: (...) bool, int or float; non-zero counts, NaN is refused. None: every position counts.
        temperature: a number, or one per position, shaped like `ids`; a constant, without gradient.
        final_logit_softcapping: cap, or None.
        logit_scale: factor on the logits.
        entropy: whether to compute the entropy at all; ``"full"`` only with `kept_ids`.
        kept_ids, without_set: as in `kept_set_logprob`, which computes the call if `kept_ids` are given.
        expected: the upstream gradient that will arrive, up to one common factor: a = d loss / d logp shaped like
            `ids`; or (a, b) with b = d loss / d entropy or None; or an `Expectation`, or just its function. The
            gradient is exact whatever is expected. Not used under torch.compile, which takes two passes.
        logits_dtype: ``"float32"``, or ``"input"`` to round the logits to the operands' dtype.
        projection: ``"library"``, or whose product with the head to take for the bits of a sampler: ``"dispatch"``,
            ``torch.mm`` in the operands' dtype, for which a batch-invariant mode may have registered a kernel; or a
            function of rows (n, H) and the transposed weight (H, V) that returns their product (n, V). Slower; no
            other option of how the call is computed goes with it but `workspace_bytes`.
        engine: one of `grpo_kernels.typing.EngineName`.
        backend: one of `grpo_kernels.typing.BackendName`.
        workspace_bytes: bound on temporary memory, whatever the number of tokens. None: 512 MiB; on a GPU up to
            3 GiB, by the size of the head and the free memory.
        lora: a low-rank adapter on the head, `LoRA`.
        process_group: the group over which the head is sharded by rows of the vocabulary, in rank order; the shards may
            be uneven. Arguments other than the head are the same on every rank, and so are the results; each rank gets
            the gradient of its own rows of the head and the whole gradient of `hidden`. Not needed if `weight` and
            `hidden` are DTensors, `Shard(0)` and replicated. The ranks send each other three numbers per row, four with
            the entropy, and sum d hidden; nothing that they send has the size of the vocabulary.
        vocab_size: number of ids, at most V (of all shards together); the head's rows from there on are padding.
            Like `lora` and `process_group` it breaks the graph of torch.compile.

    Returns:
        logps (...) and entropies (...), fp32 (fp64 for fp64 inputs), 0 where masked; the second None if not asked for.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. Raised before any work is done.
    """
    inputs = ScoreInputs(mask, ("entropy",) if entropy else (), ids, expected)
    head = LMHead(hidden, weight, bias, lora, process_group, vocab_size)
    options = HeadOptions(temperature, final_logit_softcapping, logit_scale, logits_dtype)
    execution = Execution(engine, backend, workspace_bytes, projection=projection)
    if kept_ids is not None:
        return kept_logprob(
            KeptInputs(mask, (), ids, kept_ids, without_set, entropy, execution, expected), head, options
        )
    check_without_set(without_set)
    if not isinstance(entropy, bool):
        raise TypeError(f"entropy: expected a bool without kept_ids, got {entropy!r}")
    results = _score(inputs, head, execution, options)
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
    outputs: tuple[LogprobOutput, ...] = ("entropy",),
    kept_ids: Tensor | KeptIds | None = None,  # (..., K)
    without_set: WithoutSet = "error",
    expected: Expected | None = None,
    logits_dtype: LogitsDtype = "float32",
    projection: Projection = "library",
    engine: EngineName = "auto",
    backend: BackendName = "auto",
    workspace_bytes: int | None = None,
    gather: Gather | None = None,
    lora: LoRA | None = None,
    process_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> dict[str, Tensor]:
    """`linear_logprob` with a choice of `outputs`, in the same pass: a dict with ``"logps"`` and those asked for.

    Besides ``"entropy"`` there are, without gradient, ``"log_sum_sq_probs"`` (log of sum p_j^2), ``"mean_logits"`` (z's
    mean over the vocabulary) and ``"is_top1"`` (bool); over kept sets there is the entropy alone. `gather` makes a
    context in which the weight is whole (DeepSpeed ZeRO-3), for a backward that reads it again. All results have the
    shape of `ids`.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it.
    """
    head = LMHead(hidden, weight, bias, lora, process_group, vocab_size)
    options = HeadOptions(temperature, final_logit_softcapping, logit_scale, logits_dtype)
    execution = Execution(engine, backend, workspace_bytes, gather, projection=projection)
    if kept_ids is None:
        check_without_set(without_set)
        return _score(ScoreInputs(mask, outputs, ids, expected), head, execution, options)
    if {*outputs} - {"entropy"}:
        raise ValueError(f"outputs: expected no other than 'entropy' with kept_ids, got {outputs}")
    sets = KeptInputs(mask, (), ids, kept_ids, without_set, "entropy" in outputs, execution, expected)
    logps, entropies = kept_logprob(sets, head, options)
    return {"logps": logps} if entropies is None else {"logps": logps, "entropy": entropies}


def _score(inputs: ScoreInputs, head: LMHead, execution: Execution, options: HeadOptions) -> dict[str, Tensor]:
    """Make the call: eagerly, while a graph is compiled, or with fake tensors."""
    compiling = torch.compiler.is_compiling()
    if execution.projection != "library":
        if not compiling:
            return projected_logprob(inputs, head, execution, options)
        from grpo_kernels.call import compiled

        return compiled.eagerly(projected_logprob, inputs, head, execution, options)
    if not compiling and not is_fake(head.hidden, head.weight):
        return score(inputs, head, execution, options)
    from grpo_kernels.call import compiled  # not at import: it loads the compiler

    engine, gather = execution.engine, execution.gather
    if inputs.expected is not None and engine == ONE_PASS.name:  # an expectation only buys speed
        engine = "auto"
    if not compiling:
        named = ("ids", inputs.ids), ("mask", inputs.mask)
        check_fake(head.hidden, head.weight, head.bias, *named, lora=head.lora, process_group=head.process_group)
        head, gather = LMHead(head.hidden, head.weight, head.bias), None  # no shape depends on what is left out
    execution = replace(execution, engine=engine, gather=gather)
    if gather is None and head.is_plain:
        return compiled.linear_logprob(inputs, head, execution, options)
    return compiled.eagerly(score, inputs, head, execution, options)
