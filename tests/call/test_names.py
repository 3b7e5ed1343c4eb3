"""Names that callers may get wrong: arguments, results, inputs of an objective."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

import grpo_kernels
from grpo_kernels import (
    GRPOLoss,
    Head,
    LossOutput,
    Metrics,
    Run,
    Scores,
    TokenInputs,
    advantages,
    linear_divergence,
    linear_logprob,
    objectives,
    rollouts,
    testing,
)
from tests.support.small_batch import small_batch

PUBLIC: dict[str, Any] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (grpo_kernels, advantages, rollouts, testing)
    for name in module.__all__
    if not isinstance(getattr(module, name), ModuleType)
}
# results, whose fields nobody writes; a decorator; a class that is a mapping
for x in (LossOutput, Scores, Metrics, TokenInputs, rollouts.Correction, grpo_kernels.token_level):
    PUBLIC = {name: y for name, y in PUBLIC.items() if y is not x}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_wrong_argument_names_the_right_one(name: str) -> None:
    """Of every public function and class of these modules, before anything else is looked at; the
    calls with a model of transformers look at the model first."""
    call, given = PUBLIC[name], ()
    names = [*inspect.signature(call).parameters]
    wrong = names[-2] + "x" if names[-1] in ("fields", "inputs") else names[-1] + "x"
    message = f"^{wrong}: .* has no such (argument|field).*; did you mean {wrong[:-1]}"
    if name in ("grpo_kernels.grpo_loss", "grpo_kernels.policy_loss_from_logps"):
        given = (torch.ones(1, 2, 3), torch.ones(4, 3), *torch.ones(3, 1, 2))
        given = given if "from" not in name else given[-4:]
    with pytest.raises(TypeError, match=message):
        call(*given, **{wrong: None})


def test_results_and_inputs_hint_too() -> None:
    inputs, seen = small_batch(2, 3), []
    inputs["head"] = inputs.pop("weight")

    def objective(tokens: TokenInputs) -> torch.Tensor:
        seen.append(tokens)
        return tokens.logps

    out = grpo_kernels.grpo_loss(**inputs, objective=objective)
    scores = Scores(logps=torch.zeros(1))
    for record, wrong, right in (
        (out, "losses", "loss"),
        (scores, "logp", "logps"),
        (seen[0], "old_logps", "old_per_token_logps"),
    ):
        message = f"has no attribute '{wrong}'; did you mean {right}"
        with pytest.raises(AttributeError, match=message):
            getattr(record, wrong)
    with pytest.raises(AttributeError, match=r"call out\.loss\.backward\(\)"):
        out.backward()
    assert repr(scores) == "Scores(logps=tensor([0.]))"


def test_run_checks_itself() -> None:
    """When it is made, not in the call that gets it."""
    wrong: Any
    for wrong, kind, message in (
        ({"engine": "fast"}, ValueError, "engine: expected one of auto, score, .*, got 'fast'"),
        ({"engine": None}, ValueError, "engine: expected one of .*, got None"),
        ({"backend": "cuda"}, ValueError, "backend: expected one of .*, got 'cuda'"),
        ({"workspace_bytes": "64MB"}, TypeError, "workspace_bytes: expected an int, got '64MB'"),
        (
            {"workspace_bytes": 2.0**20},
            TypeError,
            "workspace_bytes: expected an int, got 1048576.0",
        ),
        ({"workspace_bytes": True}, TypeError, "workspace_bytes: expected an int, got True"),
        (
            {"workspace_bytes": 0},
            ValueError,
            "workspace_bytes: expected a number of bytes > 0, got 0",
        ),
        ({"gather": 1}, TypeError, "gather: expected"),
    ):
        with pytest.raises(kind, match=f"^{message}"):
            Run(**wrong)


def test_an_objective_that_is_called_says_how_to_pass_it() -> None:
    with pytest.raises(TypeError, match=r"^ipo: .* functools.partial\(objectives.ipo, ...\)"):
        objectives.ipo(eps=0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^tolerances: .*; did you mean tolerance\?"):
        testing.check_token_level(objectives.ipo, tolerances=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GRPOLoss(kl_coef=0.1), "kl_coef: .*did you mean beta"),
        (lambda: Head(torch.ones(3, 2), softcap=30.0), "softcap: .* final_logit_softcapping"),
        (lambda: advantages.group_advantages(torch.ones(4), group_size=2), ".* num_generations"),
        (lambda: linear_logprob(torch.ones(1, 2), lm_head=torch.ones(3, 2)), "lm_head: .* head"),
        (lambda: advantages.group_advantages(torch.ones(4), normalize=True), ".* scale_rewards"),
        (lambda: advantages.rloo_advantages(torch.ones(4), normalize=True), ".* normalize_adv"),
    ],
    ids=["kl_coef", "softcap", "group_size", "lm_head", "normalize", "normalize, RLOO"],
)
def test_names_of_other_libraries_are_known(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}"):
        call()


def test_names_in_other_modules_are_found() -> None:
    for name, home in (
        ("causal_lm_loss", "grpo_kernels.transformers"),
        ("group_advantages", "grpo_kernels.advantages"),
        ("FusedGRPOTrainer", "grpo_kernels.trl"),
        ("DAPO", "grpo_kernels.presets"),
    ):
        with pytest.raises(AttributeError, match=f"it is in {home}$"):
            getattr(grpo_kernels, name)


def test_a_config_shows_what_differs_from_the_default() -> None:
    assert repr(grpo_kernels.LossConfig(beta=0.1)) == "LossConfig(loss_type='dapo', beta=0.1)"

    @dataclass(frozen=True, repr=False)
    class OfOurRun(grpo_kernels.LossConfig):
        run: str = "first"

    assert repr(OfOurRun(run="second")) == "OfOurRun(loss_type='dapo', run='second')"
    assert len(str(GRPOLoss(grpo_kernels.presets.GSPO))) < 200


def test_a_whole_model_is_not_a_head() -> None:
    class Model(torch.nn.Module):
        def get_output_embeddings(self) -> None: ...

    with pytest.raises(TypeError, match=r"whole model, Model; pass model\.lm_head, or call causal"):
        linear_logprob(torch.ones(1, 2), Model(), torch.ones(1, dtype=torch.long))
    teacher = torch.ones(1, 2), Model()
    with pytest.raises(TypeError, match=r"^teacher\.head: .* call causal_lm_divergence\(student"):
        linear_divergence(torch.ones(1, 2), torch.ones(3, 2), teacher)
    with pytest.raises(ValueError, match=r"^vocab_size: expected an int > 0, got 0"):
        Head(torch.ones(3, 2), vocab_size=0)
