"""Heads of torch alone: all logits at once, compiled or not, and torch's own linear cross-entropy.

`compiled` is `torch.compile` of the eager step, the row work fused by inductor: 6 NVH, 4 with a frozen head. It is
compiled in the first call of a shape, by the C++ compiler on a CPU and by Triton on a GPU. Masked positions are
computed, as eager trainers do. A dispatch mode cannot count its operations: under one torch refuses to compile.

`linear_ce` is `torch.nn.functional.linear_cross_entropy`, new in torch 2.13. With ``reduction="none"`` it gives -logp a
token. In chunks (``options=``) its backward recomputes the logits: 8 NVH, 6 with a frozen head; without, it is all
logits at once: 6 and 4. Its documentation says that chunks pay from as many tokens as the head's H: they are of some
NH/V rows, and each touches the whole gradient of the weight. Masked tokens are its `ignore_index`: they have no loss,
and are computed. Log-probabilities come in the dtype of the operands. In chunks its products are out of sight of a
dispatch mode, inside a custom operator. Tested with torch 2.13.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import Absence, Inputs, capped
from benchmarks.providers import Forward, from_logps, without_masked

GRAPHS = 64  # a shape each; torch gives up past 8
IGNORE = -100


def eager(inputs: Inputs) -> Forward:
    """`torch.log_softmax` of the logits in fp32, and the tokens' picked from that."""

    def found() -> tuple[Tensor, Tensor | None]:
        log_p = torch.log_softmax(_logits(inputs).float(), dim=-1)
        logps = log_p.gather(-1, inputs.ids[..., None])[..., 0]
        return logps, entropies(log_p) if inputs.case.wants_entropy else None

    return from_logps(inputs, found)


def selective(inputs: Inputs) -> Forward:
    """TRL's `selective_log_softmax`, which keeps no log-probability of other tokens."""
    from trl.trainer.utils import selective_log_softmax

    def found() -> tuple[Tensor, Tensor | None]:
        logits = _logits(inputs)
        logps = selective_log_softmax(logits, inputs.ids)
        if not inputs.case.wants_entropy:
            return logps, None
        return logps, entropies(torch.log_softmax(logits.detach().float(), dim=-1))

    return from_logps(inputs, found)


@torch.no_grad()
def entropies(log_p: Tensor) -> Tensor:
    """(B, T), without gradient, of log-probabilities (B, T, V)."""
    return -(log_p.exp() * log_p).sum(dim=-1)


def _logits(inputs: Inputs) -> Tensor:
    return capped(torch.nn.functional.linear(inputs.hidden, inputs.weight), inputs.case.softcap)


def compiled(inputs: Inputs) -> Forward:
    """One graph for the forward and one for the backward, for these shapes alone."""
    torch._dynamo.config.recompile_limit = GRAPHS
    function = torch.compile(_logps_and_entropies, fullgraph=True, dynamic=False)
    case = inputs.case

    def logps() -> tuple[Tensor, Tensor | None]:
        return function(inputs.hidden, inputs.weight, inputs.ids, case.softcap, case.wants_entropy)

    return from_logps(inputs, logps, "fullgraph, dynamic=False")


def _logps_and_entropies(
    hidden: Tensor,  # (B, T, H)
    weight: Tensor,  # (V, H)
    ids: Tensor,  # (B, T)
    softcap: float | None,
    wants_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities (B, T), and entropies (B, T) without gradient where they are wanted."""
    log_p = torch.log_softmax(capped(torch.nn.functional.linear(hidden, weight), softcap).float(), dim=-1)
    logps = log_p.gather(-1, ids[..., None])[..., 0]
    return logps, entropies(log_p.detach()) if wants_entropy else None


def linear_ce(inputs: Inputs) -> Forward:
    """In chunks where its documentation recommends them, else without."""
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        raise Absence(f"torch {torch.__version__} has no F.linear_cross_entropy")
    case = inputs.case
    if case.softcap is not None:
        raise Absence("no soft-cap")
    in_chunks = case.n >= case.h
    options = torch.nn.LinearCrossEntropyOptions() if in_chunks else None
    ids = without_masked(inputs, IGNORE).reshape(-1)

    def logps() -> tuple[Tensor, None]:
        hidden = inputs.hidden.reshape(-1, case.h)
        nll = function(hidden, inputs.weight, ids, reduction="none", ignore_index=IGNORE, options=options)
        return -nll.float().view(inputs.ids.shape), None

    note = "in chunks, LinearCrossEntropyOptions()" if in_chunks else "options=None"
    return from_logps(inputs, logps, f"{note}, no entropy")
