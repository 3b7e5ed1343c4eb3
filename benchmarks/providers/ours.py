"""grpo_kernels: `GRPOLoss`, or `linear_logprob` to score, and for a trainer that owns its loss."""

from __future__ import annotations

from torch import Tensor

from benchmarks.cases import EPSILON, Absence, Inputs
from benchmarks.memory import MIB
from benchmarks.providers import Forward, Outcome, from_logps
from grpo_kernels import GRPOLoss, Head, Run, linear_logprob
from grpo_kernels.backends import choose_backend


def ours(
    inputs: Inputs, *, backend: str = "auto", engine: str = "auto", mask: str = "given", workspace: str = ""
) -> Forward:
    """The library as it comes, or with one of its engines, a backend, no mask, a workspace in MiB."""
    case, name = inputs.case, _backend(inputs, backend)
    run = Run(engine, name, int(workspace) * MIB if workspace else None)
    if case.score:

        def score() -> tuple[Tensor, Tensor | None]:
            scores = linear_logprob(inputs.hidden, _head(inputs), inputs.ids, entropy=case.wants_entropy, run=run)
            return scores.logps, scores.entropies

        return from_logps(inputs, score, f"score, backend {name}" if engine == "auto" else engine)
    loss_fn = GRPOLoss(
        epsilon=EPSILON,
        beta=case.beta,
        use_bias_correction_kl=False,
        importance_sampling_level="sequence" if case.sequence else "token",
        top_entropy_quantile=case.top_entropy,
        run=run,
    )
    completion_mask = None if mask == "none" else inputs.mask

    def forward() -> Outcome:
        out = loss_fn(
            inputs.hidden,
            _head(inputs),
            inputs.ids,
            completion_mask,
            inputs.advantages,
            old_per_token_logps=inputs.old,
            ref_per_token_logps=inputs.ref,
        )
        return Outcome(out.loss, out.per_token_logps, out.entropies, f"{out.engine}, backend {name}")

    return forward


def expected(inputs: Inputs, *, backend: str = "auto") -> Forward:
    """What the TRL integration does: the loss stays the trainer's, and the head is told what gradient to expect."""
    case, name = inputs.case, _backend(inputs, backend)
    if case.score or case.sequence or case.drift or case.beta or case.top_entropy < 1:
        raise Absence("measured on-policy, where the expected gradient is known beforehand")
    gradient, run = (inputs.advantages[:, None] * inputs.mask).neg(), Run(backend=name)

    def logps() -> tuple[Tensor, Tensor | None]:
        scores = linear_logprob(inputs.hidden, _head(inputs), inputs.ids, mask=inputs.mask, expected=gradient, run=run)
        return scores.logps, scores.entropies

    return from_logps(inputs, logps, "expected")


def _head(inputs: Inputs) -> Head:
    return Head(inputs.weight, final_logit_softcapping=inputs.case.softcap)


def _backend(inputs: Inputs, backend: str) -> str:
    try:
        chosen, _ = choose_backend(backend, inputs.hidden.device)
    except ValueError as error:
        raise Absence(str(error)) from error
    return chosen.name
