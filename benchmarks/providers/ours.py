"""grpo_kernels: `GRPOLoss`, or `linear_logprob` to score."""

from __future__ import annotations

from benchmarks.cases import EPSILON, Absence, Inputs
from benchmarks.memory import MIB
from benchmarks.providers import Forward, Outcome, Scored, from_logps
from grpo_kernels import GRPOLoss, Head, Run, linear_logprob
from grpo_kernels.backends import choose_backend


def ours(inputs: Inputs, *, backend: str, engine: str = "auto", workspace: str = "") -> Forward:
    """The library as it comes, or with one of its engines, a backend, a workspace in MiB."""
    case, run = inputs.case, _run(inputs, backend, engine, workspace)
    if case.score:

        def score() -> Scored:
            scores = linear_logprob(
                inputs.hidden, _head(inputs), inputs.ids, entropy=case.wants_entropy, run=run
            )
            return scores.logps, scores.entropies

        return from_logps(
            inputs, score, f"score, backend {run.backend}" if engine == "auto" else engine
        )
    loss_fn = GRPOLoss(
        epsilon=EPSILON,
        beta=case.beta,
        use_bias_correction_kl=False,
        importance_sampling_level="sequence" if case.sequence else "token",
        top_entropy_quantile=case.top_entropy,
        run=run,
    )

    def forward() -> Outcome:
        out = loss_fn(
            inputs.hidden,
            _head(inputs),
            inputs.ids,
            inputs.mask,
            inputs.advantages,
            old_per_token_logps=inputs.old,
            ref_per_token_logps=inputs.ref,
        )
        return Outcome(
            out.loss, out.per_token_logps, out.entropies, f"{out.engine}, backend {run.backend}"
        )

    return forward


def _head(inputs: Inputs) -> Head:
    return Head(inputs.weight, final_logit_softcapping=inputs.case.softcap)


def _run(inputs: Inputs, backend: str, engine: str, workspace: str) -> Run:
    try:
        chosen, _ = choose_backend(backend, inputs.hidden.device)
    except ValueError as error:
        raise Absence(str(error)) from error
    return Run(engine, chosen.name, int(workspace) * MIB if workspace else None)
