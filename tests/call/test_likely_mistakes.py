"""Mistakes that many make once, and names that are almost right: the error says what to do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grpo_kernels
from grpo_kernels import (
    GRPOLoss,
    Head,
    LoRA,
    LossConfig,
    LossOutput,
    Metrics,
    Run,
    Scores,
    TokenInputs,
    advantages,
    grpo_loss,
    linear_divergence,
    linear_logprob,
    objectives,
    policy_expectation,
    policy_loss_from_logps,
    presets,
    rollouts,
    testing,
    token_level,
    topk_divergence,
)
from grpo_kernels.advantages import group_advantages
from tests.support.small_batch import small_batch

BATCH = small_batch()
HIDDEN, WEIGHT, IDS = BATCH["hidden"], BATCH.pop("weight"), BATCH["completion_ids"]
LOGITS, LOGPS = HIDDEN @ WEIGHT.T, -torch.ones(2, 5)
SHARED = {name: x for name, x in BATCH.items() if name not in ("hidden", "completion_ids")}
HEAD = nn.Linear(*reversed(WEIGHT.shape), bias=False)


def loss(head: Any = WEIGHT, **changes: Any) -> Any:
    """`grpo_loss` of the batch."""
    return grpo_loss(**{**BATCH, "head": head, **changes})


def scores(**options: Any) -> Any:
    return linear_logprob(HIDDEN, WEIGHT, IDS, **options)


class Model(nn.Module):
    def get_output_embeddings(self) -> None: ...


def given_loss(**changes: Any) -> Any:
    """`policy_loss_from_logps` of the batch."""
    return policy_loss_from_logps(**{"logps": LOGPS, "entropies": -LOGPS, **SHARED, **changes})


CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "grpo_loss": lambda hidden, ids: grpo_loss(hidden, WEIGHT, ids, **SHARED),
    "linear_logprob": lambda hidden, ids: linear_logprob(hidden, WEIGHT, ids),
    "kept sets": lambda hidden, ids: linear_logprob(hidden, WEIGHT, ids, kept_ids=ids[..., None]),
    "module": lambda hidden, ids: linear_logprob(hidden, HEAD, ids),
}


HINT = AttributeError
# an ellipsis stands for anything
GUESSES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: GRPOLoss(presets.DR_GRPO), ValueError, "max_completion_length: ..., got None"),
    (lambda: loss(loss_type="dr_grpo"), ValueError, "max_completion_length: ..., got None"),
    (lambda: loss(advantages=torch.tensor([1.0, torch.nan])), ValueError,
     "advantages: expected finite numbers where the mask counts, got nan"),
    (lambda: loss(advantages=torch.full((2, 5), torch.inf)), ValueError, "advantages: ... inf"),
    (lambda: loss(advantages=torch.ones(2, 5) > 0), TypeError,
     "advantages: expected numbers, got torch.bool"),
    (lambda: loss(objective=lambda tokens: tokens.ratio), HINT,
     "TokenInputs has no ratio: compute (tokens.logps - tokens.old_per_token_logps).exp"),
    (lambda: loss(objective=lambda tokens: tokens.old_logps), HINT,
     "...no attribute 'old_logps'; did you mean old_per_token_logps"),
    (lambda: loss(objective=lambda tokens: tokens.logps + None), TypeError, "...NoneType"),
    (lambda: loss(objective=lambda tokens: tokens.logps + torch.ones(99)), RuntimeError,
     "The size of tensor a"),
    (lambda: loss(objective=lambda tokens, scale: tokens.logps), TypeError,
     "objective: expected a function of one argument, TokenInputs, got (tokens, scale)"),
    (lambda: loss(objective=LossConfig()), TypeError,
     "objective: ..., got LossConfig; pass it as config="),
    (lambda: GRPOLoss(objective=GRPOLoss), TypeError,
     "objective: expected a function ..., got GRPOLoss"),
    (lambda: GRPOLoss(objective=GRPOLoss()), TypeError,
     "objective: expected a function of one argument"),
    (lambda: objectives.ipo(eps=0.1), TypeError,  # type: ignore[call-arg]
     "ipo: ... functools.partial(objectives.ipo, ...)"),
    (lambda: testing.check_token_level(objectives.ipo, tolerances=1.0),  # type: ignore[call-arg]
     TypeError, "tolerances: ...; did you mean tolerance?"),
    (lambda: loss(completion_mask=torch.ones(2)), ValueError,
     "completion_mask: ... got (2,); ... expand it: completion_mask[:, None]"),
    (lambda: loss(completion_mask=torch.ones(2, 9)), ValueError,
     "completion_mask: ... got (2, 9); take the columns of these tokens"),
    (lambda: grpo_loss(HIDDEN, WEIGHT, IDS, None), TypeError,  # type: ignore[call-arg]
     "advantages: expected by grpo_loss, got none; it requires hidden, head, completion_ids"),
    (lambda: GRPOLoss()(HIDDEN, WEIGHT, IDS, None), TypeError,  # type: ignore[call-arg]
     "advantages: expected by a call of GRPOLoss, got none"),
    (lambda: policy_expectation(LossConfig(), advantages=LOGPS), TypeError,  # type: ignore
     "completion_mask: expected by policy_expectation, got none"),
    (lambda: loss().metrics["kl"], KeyError, "...got 'kl'; the loss has a KL term only with"),
    (lambda: loss()["loss"], TypeError, "LossOutput: ... by its name, .loss, ... ['loss']"),
    (lambda: loss().entropy, HINT, "LossOutput has no entropy: read out.metrics["),
    (lambda: loss().losses, HINT, "...no attribute 'losses'; did you mean loss"),
    (lambda: loss().backward(), HINT, "...call out.loss.backward()"),
    (lambda: loss().metrics.entropy, HINT, "Metrics has no entropy: read metrics["),
    (lambda: scores()[0], TypeError,
     "Scores: expected a result by its name, .logps, .entropies, got [0]"),
    (lambda: scores().logp, HINT, "...no attribute 'logp'; did you mean logps"),
    *((lambda name=name: getattr(scores(), name), HINT,
       f"...no attribute '{name}': it is no tensor, but has some: logps, entropies")
      for name in ("sum", "mean", "backward")),
    (lambda: scores(extras="is_top1"), TypeError, "extras: ... got 'is_top1'; pass ('is_top1',)"),
    (lambda: linear_logprob(HEAD, WEIGHT, IDS), TypeError, "hidden: ... completion_logprobs"),
    (lambda: linear_logprob(HIDDEN, lm_head=WEIGHT), TypeError, "lm_head: ... head"),
    (lambda: linear_logprob(HIDDEN, WEIGHT.T, IDS), ValueError,
     "head.weight: expected ...(V, H) ...; it looks transposed"),
    (lambda: linear_logprob(HIDDEN, Model(), IDS), TypeError,
     "...whole model, Model; pass model.lm_head, or call causal"),
    (lambda: linear_divergence(HIDDEN, WEIGHT, (HIDDEN, Model())), TypeError,
     "teacher.head: ... call causal_lm_divergence(student"),
    (lambda: linear_divergence(HIDDEN, WEIGHT, (LOGITS, WEIGHT)), ValueError,
     "teacher.hidden: expected ...: these look like logits"),
    (lambda: linear_divergence(HIDDEN, WEIGHT, (HIDDEN, WEIGHT), kind="jsd"),  # type: ignore
     TypeError, "kind: ...; it has hidden, head, teacher"),
    (lambda: linear_divergence(HIDDEN, WEIGHT, (HIDDEN, WEIGHT), divergence="kl"), ValueError,
     "divergence: ..., got 'kl'; did you mean reverse_kl or forward_kl?"),
    (lambda: linear_divergence(HIDDEN, WEIGHT, (HIDDEN, 3)), TypeError,  # type: ignore
     "teacher.head: expected a weight ..., got int"),
    (lambda: GRPOLoss(HIDDEN, WEIGHT, IDS, None, None), TypeError,  # type: ignore
     "GRPOLoss: expected at most config by position, got 5 arguments"),
    (lambda: grpo_loss(HIDDEN, WEIGHT, IDS, response_mask=IDS, advantages=LOGPS), TypeError,
     "completion_mask: expected by grpo_loss, got none; did you mean it by response_mask?"),
    (lambda: loss(bias=WEIGHT[:, 0]), TypeError, "bias: ...; did you mean head?"),
    (lambda: scores().loss, HINT, "...no attribute 'loss'; did you mean divergence?"),
    (lambda: Head(), TypeError, "weight: expected by Head, got none"),  # type: ignore[call-arg]
    (lambda: loss(WEIGHT.numpy()), TypeError, "head: expected a weight ..., got ndarray"),
    (lambda: loss(nn.Embedding(9, 4)), TypeError,
     "head: expected an nn.Linear ...Embedding; pass its weight"),
    (lambda: Head(HEAD.weight.tolist()), TypeError, "weight: ... or a module, got list"),
    (lambda: Head(Head(WEIGHT)), TypeError, "weight: expected a tensor or a module, got Head"),
    (lambda: Head(WEIGHT, bias=30.0), TypeError, "bias: expected a tensor, got float"),
    (lambda: Head(WEIGHT, lora="x"), TypeError, "lora: expected a LoRA, got str"),
    (lambda: Head(WEIGHT, softcap=30.0), TypeError, "softcap: ... final_logit_softcapping"),
    (lambda: Head(WEIGHT, vocab_size=0), ValueError, "vocab_size: expected an int > 0, got 0"),
    (lambda: loss(run="lean"), TypeError, "run: expected a Run, got str"),
    (lambda: loss(engine="lean"), TypeError, "engine: ...; did you mean run=Run(engine=...)?"),
    (lambda: loss(old_per_token_logps=scores()), TypeError,
     "old_per_token_logps: expected a tensor, got Scores; pass a tensor of it, such as its logps"),
    (lambda: loss(beta=0.04, reference=(HIDDEN, WEIGHT)), ValueError,
     "ref_per_token_logps: ...got None; `reference` is read only with kl_estimator"),
    (lambda: loss(beta=0.04), ValueError, "...got None; completion_logprobs or linear_logprob"),
    (lambda: GRPOLoss(kl_estimator="low_var_kl"), ValueError, "kl_estimator: ... is 'k3'"),
    (lambda: GRPOLoss(lambda tokens: tokens.loss), TypeError, "config: ... it as objective"),
    (lambda: GRPOLoss("DAPO"), TypeError,
     "config: expected a LossConfig, got str; GRPOLoss(presets.DAPO) has the paper's settings"),
    (lambda: GRPOLoss(kl_loss_coef=0.1), TypeError, "kl_loss_coef: ... did you mean beta"),
    (lambda: GRPOLoss(kl_coef=0.1), TypeError, "kl_coef: ...did you mean beta"),
    (lambda: GRPOLoss(epsilon_hi=0.3), TypeError, "epsilon_hi: ...; did you mean epsilon_high?"),
    (lambda: GRPOLoss(num_items_in_batch=3), TypeError,
     "num_items_in_batch: ...; it is an argument of the module's call"),
    (lambda: GRPOLoss(old_logps=IDS), TypeError,
     "old_logps: LossConfig has no such field; ... mean old_per_token_logps? It is an argument"),
    (lambda: GRPOLoss()(head=WEIGHT, **BATCH, old_logps=IDS), TypeError,
     "old_logps: ...; did you mean old_per_token_logps?"),
    (lambda: GRPOLoss()(head=WEIGHT, **BATCH, beta=0.1), TypeError,
     "beta: ...; it is a field, as in GRPOLoss"),
    (lambda: group_advantages(torch.ones(4), torch.zeros(4)),  # type: ignore
     TypeError, "num_generations: expected an int, got Tensor; pass group ids as group_ids="),
    (lambda: group_advantages(torch.ones(4), group_size=2), TypeError, "... num_generations"),
    (lambda: group_advantages(torch.ones(4), normalize=True), TypeError, "... scale_rewards"),
    (lambda: advantages.rloo_advantages(torch.ones(4), normalize=True), TypeError,
     "... normalize_adv"),
    (lambda: grpo_kernels.transformers.causal_lm_logps, HINT, "... mean completion_logprobs"),
    (lambda: grpo_kernels.transformers.causal_lm_losses, HINT, "... causal_lm_loss"),
    (lambda: grpo_kernels.GrpoLoss, HINT, "... did you mean GRPOLoss"),
    (lambda: grpo_kernels.linear_loss, HINT, "module 'grpo_kernels' has no attribute 'linear_l"),
    *((lambda name=name: getattr(presets, name), HINT, f"... did you mean {meant}?")
      for name, meant in (("grpo", "GRPO"), ("DrGRPO", "DR_GRPO"))),
    (lambda: presets.DAPO(beta=0.1), TypeError,  # type: ignore[operator]
     "config: ... dataclasses.replace(config, beta=0.1), or GRPOLoss(config, beta=0.1)"),
    (lambda: objectives.IPO, HINT, "... did you mean ipo?"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), GUESSES, ids=[x[2][:20] for x in GUESSES])
def test_a_wrong_guess_is_told_what_to_write(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    parts = [re.escape(part) for part in message.split("...")]
    with pytest.raises(error, match=f"^{'.*'.join(parts)}"):
        call()


def test_a_name_of_another_module_is_said_to_be_there() -> None:
    for name, home in (
        ("causal_lm_loss", "transformers"),
        ("group_advantages", "advantages"),
        ("FusedGRPOTrainer", "trl"),
        ("DAPO", "presets"),
    ):
        with pytest.raises(AttributeError, match=rf"it is in grpo_kernels\.{home}$"):
            getattr(grpo_kernels, name)
        with pytest.raises(ImportError, match=rf"no {name}; it is in grpo_kernels\.{home}$"):
            exec(f"from grpo_kernels import {name}")
    assert dir(advantages) == sorted(advantages.__all__)


@pytest.mark.parametrize("name", CALLS)
def test_logits_in_the_place_of_hidden_states_and_a_shift(name: str) -> None:
    call, longer = CALLS[name], torch.cat([HIDDEN, HIDDEN[:, :1]], dim=1)
    looks = r"^hidden: expected hidden states of width H = 4, .* got \(.*9\): these look like log"
    shifted = r"^completion_ids: .*position t - 1 predicts token t: drop the"
    for hidden, message in (
        (LOGITS, looks),
        (longer, rf"{shifted} last position, hidden\[\.\.\., :-1, :\]"),
        (HIDDEN[:, :-1], rf"{shifted} first id, \[\.\.\., 1:\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call(hidden, IDS)
    call(longer[..., :-1, :], IDS)  # as it says


LOSSES: dict[str, Callable[..., Any]] = {
    "grpo_loss": loss,
    "GRPOLoss": lambda **given: GRPOLoss()(head=WEIGHT, **given),
    "module": lambda **given: loss(HEAD, **given),
    "policy_loss_from_logps": lambda hidden, completion_ids, **given: policy_loss_from_logps(
        -hidden.square().mean(-1), hidden.square().mean(-1), **given
    ),
}
PACKED = {name: x.reshape(10, *x.shape[2:]) for name, x in BATCH.items() if x.shape[:2] == (2, 5)}
PACKED["advantages"] = BATCH["advantages"]
PACKED["cu_seqlens"] = torch.tensor([0, 5, 10], dtype=torch.int32)
COLUMN, FLAT = BATCH["advantages"][:, None], LOGPS.view(1, 10)
SHAPES: list[tuple[dict[str, Any], str, Tensor, str]] = [
    (BATCH, "advantages", COLUMN, r"\(B,\) = \(2,\) or \(B, T\) = \(2, 5\), got \(2, 1\)"),
    (PACKED, "advantages", COLUMN, r"\(B,\) = \(2,\) or \(N,\) = \(10,\), got \(2, 1\)"),
    (PACKED, "advantages", FLAT, r"\(B,\) = \(2,\) or \(N,\) = \(10,\), got \(1, 10\)"),
    (PACKED, "completion_mask", FLAT, r".* = \(10,\), got \(1, 10\)"),
    (PACKED, "old_per_token_logps", FLAT, r"\(N,\) = \(10,\), got \(1, 10\)"),
]


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_takes_the_same_shapes(name: str) -> None:
    call = LOSSES[name]
    for given in (BATCH, PACKED):
        per_token = LOGPS if given is BATCH else LOGPS.view(10)
        assert call(**given).loss.isfinite()
        assert call(**{**given, "advantages": per_token}).loss.isfinite()
    for given, argument, wrong, message in SHAPES:
        with pytest.raises(ValueError, match=rf"^{argument}: expected shape {message}$"):
            call(**{**given, argument: wrong})
    message = r"expected shape \(N,( H)?\) with cu_seqlens, got \(1, 10(, 4)?\)"
    with pytest.raises(ValueError, match=message):
        call(**{**PACKED, "hidden": PACKED["hidden"][None]})


def with_kl(tokens: TokenInputs) -> Tensor:
    ratio = 1.0 if tokens.importance_sampling_ratio is None else tokens.importance_sampling_ratio
    gap = tokens.ref_per_token_logps - tokens.logps
    return -ratio * tokens.advantages * tokens.logps + 0.1 * (gap.exp() - gap - 1)


READING: list[tuple[Callable[[TokenInputs], Tensor], str]] = [
    (with_kl, "ref_per_token_logps"),
    (lambda tokens: tokens.sampling_per_token_logps.exp() * tokens.logps,
     "sampling_per_token_logps"),
    (lambda tokens: torch.exp(tokens.importance_sampling_ratio) * tokens.logps,
     "importance_sampling_ratio"),
]  # fmt: skip


@pytest.mark.parametrize("declare", [lambda x: x, token_level], ids=["", "token_level"])
def test_an_objective_that_reads_what_was_not_given(declare: Callable[[Any], Any]) -> None:
    for objective, absent in READING:
        message = f"NoneType.*; the call was given no .*{absent}"
        for call in (loss, given_loss):
            with pytest.raises((TypeError, AttributeError), match=message):
                call(objective=declare(objective))
    assert loss(ref_per_token_logps=LOGPS, objective=declare(with_kl)).loss.isfinite()


@pytest.mark.parametrize("kind", ["old", "ref", "sampling"])
def test_probabilities_or_likelihoods_in_the_place_of_log_probabilities(kind: str) -> None:
    name, config = f"{kind}_per_token_logps", LossConfig(beta=0.1, off_policy_mask_threshold=1.0)
    right = torch.linspace(-3.0, -1.0, 10).view(2, 5)
    masked = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    given = {"ref_per_token_logps": right, "completion_mask": masked, "config": config}
    message = rf"^{name}: expected log-probabilities, <= 0 .*, got none below 0"
    for wrong in (-right, right.exp()):
        with pytest.raises(ValueError, match=message):
            loss(**{**given, name: wrong})
    rounded = torch.full((2, 5), 1e-6)  # tokens that are nearly certain
    for fine in (right, rounded, *(torch.where(masked == 0, x, right) for x in (1e9, torch.nan))):
        assert loss(**{**given, name: fine}).loss.isfinite()


@pytest.mark.parametrize("per_sequence", [False, True])
def test_log_ratios_in_the_place_of_ratios(per_sequence: bool) -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    ratio = torch.where(mask == 0, -1.0, 1.0)  # masked values are never read
    for call in (loss, given_loss):
        assert call(completion_mask=mask, importance_sampling_ratio=ratio).loss.isfinite()
        wrong = -ratio[:, 0] if per_sequence else -ratio
        message = r"^importance_sampling_ratio: expected ratios >= 0 .*, got -1: take the exponen"
        with pytest.raises(ValueError, match=message):
            call(completion_mask=mask, importance_sampling_ratio=wrong)


def test_logits_in_the_place_of_a_teachers_log_probabilities() -> None:
    ids, wrong = torch.tensor([0, 1, 2]).expand(2, 5, 3), torch.tensor([1.0, 2.0, 3.0])
    message = r"^teacher_logps: expected log-probabilities of one distribution .* add up to"
    for given in (wrong, wrong.softmax(0)):
        with pytest.raises(ValueError, match=message):
            topk_divergence(HIDDEN, WEIGHT, ids, given.expand(2, 5, 3))
    topk_divergence(HIDDEN, WEIGHT, ids, wrong.log_softmax(0).expand(2, 5, 3))


def test_a_preset_in_the_place_of_a_loss_type() -> None:
    for name in ("gspo", "GSPO", "ppo", "dr-grpo", "gsp"):
        with pytest.raises(ValueError, match=r"^loss_type: expected one of grpo, ") as raised:
            GRPOLoss(loss_type=name)  # type: ignore[arg-type]
        preset = name.upper().replace("-", "_")
        named = f"; grpo_kernels.presets.{preset} is that loss: GRPOLoss(presets.{preset})"
        if name == "dr-grpo":  # both a preset and a loss type
            named = "; GRPOLoss(presets.DR_GRPO) has the paper's settings, "
            named += "GRPOLoss(loss_type='dr_grpo') the defaults"
        assert str(raised.value).endswith(named) == (name != "gsp")


def test_a_bias_of_another_head_than_the_weight_that_is_cut() -> None:
    longer, bias = torch.ones(40, 4), torch.zeros(20)
    adapter = LoRA(torch.ones(2, 4), torch.ones(20, 2))
    cut = lambda **options: linear_logprob(  # noqa: E731
        HIDDEN, Head(longer, vocab_size=20, **options), IDS
    )
    for name, shape, call in (
        ("teacher.head.bias", "(20,)",
         lambda: linear_divergence(HIDDEN, longer[:20], (HIDDEN, Head(longer, bias)))),
        ("head.bias", "(20,)", lambda: cut(bias=bias)),
        ("head.lora.b", "(20, 2)", lambda: cut(lora=adapter)),
    ):  # fmt: skip
        message = f"{name}: expected a row for each of the 40 of weight, got shape {shape}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            call()
    cut(bias=torch.zeros(40))


def test_the_calls_take_fields_as_the_module_does() -> None:
    """Those of a config that is given are replaced."""
    config, ref = LossConfig(loss_type="grpo", beta=0.04), {"ref_per_token_logps": 2 * LOGPS}
    mask = {"completion_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])}
    for call in (loss, lambda **more: loss(HEAD, **more), given_loss):
        want = call(config=config, **ref, **mask).loss
        for fields, same in (
            ({"loss_type": "grpo", "beta": 0.04}, True),
            ({"config": LossConfig(loss_type="dapo", beta=0.04), "loss_type": "grpo"}, True),
            ({"loss_type": "grpo"}, False),
        ):
            assert (call(**fields, **ref, **mask).loss == want) == same


MEANT = {
    "old_logps": "old_per_token_logps", "ref_logprobs": "ref_per_token_logps",
    "entropy_coeff": "entropy_coef", "loss_typ": "loss_type", "num_items": "num_items_in_batch",
    "cu_seqlen": "cu_seqlens",
}  # fmt: skip


def test_misspelt_names_are_answered_with_ours() -> None:
    for call, function in ((loss, "grpo_loss"), (given_loss, "policy_loss_from_logps")):
        for name, meant in MEANT.items():
            message = rf"^{name}: {function} has no such argument, .* did you mean {meant}\?"
            with pytest.raises(TypeError, match=message):
                call(**{name: 0.1})


def test_swapped_ids_and_mask_are_refused() -> None:
    """On a CPU; elsewhere the mask's values draw a warning at most."""
    ids, mask = IDS.clone(), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    ids[0, 0] = 7
    for call in (
        lambda: grpo_loss(HIDDEN, WEIGHT, mask, ids, torch.ones(2)),
        lambda: linear_logprob(HIDDEN, WEIGHT, mask, ids),
    ):
        with pytest.raises(ValueError, match=r"^completion_ids, completion_mask: .* swapped\?$"):
            call()


def test_help_on_the_module_says_what_a_call_returns() -> None:
    signature = inspect.signature(GRPOLoss.forward)
    assert signature.return_annotation == "LossOutput"
    assert (GRPOLoss.__init__.__doc__ or "").startswith("Take a config")


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


WRONG_RUNS: list[tuple[str, Any, type[Exception], str]] = [
    ("engine", "fast", ValueError, "expected one of auto, score, .*, got 'fast'"),
    ("engine", None, ValueError, "expected one of .*, got None"),
    ("backend", "cuda", ValueError, "expected one of .*, got 'cuda'"),
    ("workspace_bytes", "64MB", TypeError, "expected an int, got '64MB'"),
    ("workspace_bytes", 2.0**20, TypeError, "expected an int, got 1048576.0"),
    ("workspace_bytes", True, TypeError, "expected an int, got True"),
    ("workspace_bytes", 0, ValueError, "expected a number of bytes > 0, got 0"),
    ("gather", 1, TypeError, "expected"),
]


@pytest.mark.parametrize(("name", "wrong", "error", "message"), WRONG_RUNS)
def test_a_run_checks_itself_when_it_is_made(
    name: str, wrong: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{name}: {message}"):
        Run(**{name: wrong})


def test_a_config_shows_what_differs_from_the_default() -> None:
    assert repr(LossConfig(beta=0.1)) == "LossConfig(loss_type='dapo', beta=0.1)"

    @dataclass(frozen=True, repr=False)
    class OfOurRun(LossConfig):
        run: str = "first"

    assert repr(OfOurRun(run="second")) == "OfOurRun(loss_type='dapo', run='second')"
    assert repr(Scores(logps=torch.zeros(1))) == "Scores(logps=tensor of shape (1,))"
    assert len(str(GRPOLoss(presets.GSPO))) < 200
