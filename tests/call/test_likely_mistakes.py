"""Mistakes that many make once, and names that are almost right: the error says what to do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import grpo_kernels
from grpo_kernels import (
    Expectation,
    GRPOLoss,
    Head,
    KeptIds,
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
    linear_logps,
    objectives,
    policy_loss_from_logps,
    presets,
    rewards,
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
NEVER = torch.where(torch.arange(5) + 5 * torch.arange(2)[:, None] == 3, -torch.inf, LOGPS)
SHARED = {name: x for name, x in BATCH.items() if name not in ("hidden", "completion_ids")}
HEAD = nn.Linear(*reversed(WEIGHT.shape), bias=False)


def loss(head: Any = WEIGHT, **changes: Any) -> Any:
    return grpo_loss(**{**BATCH, "head": head, **changes})


def scores(**options: Any) -> Any:
    return linear_logps(HIDDEN, WEIGHT, IDS, **options)


class Model(nn.Module):
    def get_output_embeddings(self) -> None: ...


def given_loss(**changes: Any) -> Any:
    return policy_loss_from_logps(**{"logps": LOGPS, "entropies": -LOGPS, **SHARED, **changes})


HINT, RATIO = AttributeError, "importance_sampling_ratio"
SWAPPED = "completion_ids, completion_mask: ... swapped?"
LONGER, A_ROW = torch.ones(40, 4), "expected a row for each of the 40 of weight, got shape "
OF_HEAD = "an option of the head: Head(weight, final_logit_softcapping=...)"
# what is no argument of GRPOLoss -> how its error ends
ELSEWHERE = {
    "penalty": "no such argument; did you mean objective?$",
    "engine": "did you mean run=Run(engine=...)?$",
    "chunk_size": "did you mean run=Run(workspace_bytes=...)?$",
    "compiled": "no such argument$",
    "mask": "did you mean completion_mask? It is an argument of a call of GRPOLoss$",
    "clip": "did you mean epsilon?$",
    "model": "causal_lm_loss",
    "adv_estimator": "grpo_kernels.advantages has a function for each$",
    "final_logit_softcapping": OF_HEAD,
    "num_iterations": "call the loss once per step",
    "mask_truncated_completions": "set completion_mask to 0",
    "use_ref_model": "needs beta above 0, and ref_per_token_logps in the call$",
    "tis_imp_ratio_cap": "presets.TIS is that loss",
    "rollout_is_weights": "importance_sampling_ratio? It is an argument of a call of GRPOLoss$",
}
# an ellipsis stands for anything, a dollar at the end for the end
GUESSES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: GRPOLoss(presets.DR_GRPO), ValueError, "max_completion_length: ..., got None"),
    (lambda: loss(advantages=torch.tensor([1.0, torch.nan])), ValueError,
     "advantages: expected finite numbers at unmasked positions, got nan"),
    (lambda: loss(advantages=torch.ones(2, 5) > 0), TypeError,
     "advantages: expected numbers, got torch.bool"),
    (lambda: loss(objective=lambda tokens: tokens.ratio), HINT,
     "TokenInputs has no ratio: compute (tokens.logps - tokens.old_per_token_logps).exp"),
    *((lambda x=x: loss(objective=lambda tokens: tokens.logps + torch.ones(x)), ValueError,
       "objective: ... of shape (2, 5); index ..., (B,)[tokens.sequence] ...; ...The size of")
      for x in (2, 99)),
    (lambda: loss(objective=lambda tokens: tokens.logps.sum(1)), ValueError,
     "objective: ... tokens.logps = (2, 5), got (2,); index ..., (B,)[tokens.sequence]"),
    *((lambda x=x: loss(beta=0.1, **{"ref_per_token_logps": LOGPS, **x}), ValueError,
       "...: expected finite numbers at unmasked positions, got ...inf for 1 of 10 tokens; mask")
      for y in (NEVER, -NEVER) for x in ({"old_per_token_logps": y}, {"ref_per_token_logps": y})),
    (lambda: rewards.compute_rewards([len], ["a"]), TypeError,  # type: ignore[call-arg]
     "completions: expected by compute_rewards, got none"),
    (lambda: advantages.gae(LOGPS, torch.ones(2, 5), LOGPS / 3), ValueError,
     "values, completion_mask: ...swapped?"),
    *((lambda name=name: getattr(grpo_kernels, name), HINT, f"...mean {meant}? It is in {home}$")
      for name, meant, home in (("FusedGRPOTrainr", "FusedGRPOTrainer", "grpo_kernels.trl"),
                                ("group_advantage", "group_advantages", "...advantages"))),
    (lambda: advantages.process_rewards, HINT, "...; did you mean process_advantages?"),
    (lambda: loss(objective=lambda tokens, scale: tokens.logps), TypeError,
     "objective: expected a function of one argument, TokenInputs, got (tokens, scale)"),
    (lambda: loss(objective=LossConfig()), TypeError,
     "objective: ..., got LossConfig; pass it as config="),
    (lambda: objectives.ipo(eps=0.1), TypeError,  # type: ignore[call-arg]
     "ipo: ... functools.partial(objectives.ipo, ...)"),
    (lambda: loss(completion_mask=torch.ones(2)), ValueError,
     "completion_mask: ... got (2,); ... expand it: completion_mask[:, None]"),
    (lambda: loss(completion_mask=torch.ones(2, 9)), ValueError,
     "completion_mask: ... got (2, 9); take the columns of these tokens"),
    (lambda: grpo_loss(HIDDEN, WEIGHT, IDS, None), TypeError,  # type: ignore[call-arg]
     "advantages: expected by grpo_loss, got none; it requires hidden, head, completion_ids"),
    (lambda: policy_loss_from_logps(LOGPS, IDS), TypeError,  # type: ignore[call-arg]
     "advantages: ...; it requires logps, completion_mask, advantages, got 2 by position"),
    (lambda: policy_loss_from_logps(LOGPS, LOGPS, IDS, LOGPS[:, 0]), TypeError,  # type: ignore
     "policy_loss_from_logps: expected at most logps, completion_mask, advantages by position"),
    (lambda: given_loss(entropies=LOGPS), ValueError,
     "entropies: expected entropies, >= 0 ..., got -1 for 10 of 10 tokens...log-probabilities?"),
    *((lambda name=name, x=x: given_loss(entropies=None, **{name: x}), ValueError,
       f"entropies: expected a tensor, since {name} = {x} reads them, got None")
      for name, x in (("entropy_coef", 0.1), ("top_entropy_quantile", 0.5))),
    (lambda: given_loss(entropies=None, objective=lambda tokens: tokens.logps * tokens.entropies),
     TypeError, "...NoneType...; the call was given no ...entropies"),
    (lambda: loss().metrics["kl"], KeyError, "...got 'kl'; the loss has a KL term only with"),
    (lambda: loss().kl, HINT, "...; the loss has a KL term only with"),
    (lambda: loss().metrics["entropies"], KeyError, "...got 'entropies'; did you mean entropy?"),
    (lambda: loss()["loss"], TypeError, "LossOutput: ... by its name, .loss, ... ['loss']"),
    (lambda: loss().backward(), HINT, "...call out.loss.backward()"),
    (lambda: loss().metrics.entropy, HINT, "Metrics has no entropy: read metrics["),
    (lambda: scores()[0], TypeError,
     "Scores: expected a result by its name, .logps, .entropies, got [0]"),
    (lambda: scores(extras="is_top1"), TypeError, "extras: ... got 'is_top1'; pass ('is_top1',)"),
    (lambda: linear_logps(HEAD, WEIGHT, IDS), TypeError, "hidden: ... causal_lm_logps"),
    (lambda: linear_logps(HIDDEN, WEIGHT.T, IDS), ValueError,
     "head.weight: expected ...(V, H) ...; it looks transposed"),
    (lambda: linear_logps(HIDDEN, Model(), IDS), TypeError,
     "...whole model, Model; pass model.lm_head, or call causal"),
    (lambda: linear_divergence(HIDDEN, WEIGHT, (HIDDEN, Model())), TypeError,
     "teacher.head: ... call causal_lm_divergence(student"),
    (lambda: linear_divergence(HIDDEN, WEIGHT, (LOGITS, WEIGHT)), ValueError,
     "teacher.hidden: expected ...: these look like logits"),
    (lambda: linear_divergence(HIDDEN, WEIGHT, (HIDDEN, WEIGHT), entropy="full"),  # type: ignore
     TypeError, "entropy: expected a bool, got 'full'"),
    (lambda: grpo_loss(WEIGHT, HIDDEN, IDS, None, IDS), ValueError,
     "hidden: expected shape (B, T, H), got ...; are hidden and head swapped?"),
    (lambda: loss(completion_mask=LOGPS[:, 0], advantages=IDS > 0), ValueError,
     "completion_mask: expected ...; if it is the advantages, pass them after the mask"),
    (lambda: given_loss(logps=-LOGPS), ValueError,
     "logps: expected log-probabilities, <= 0 ...: take the logarithm of probabilities"),
    (lambda: linear_divergence(HIDDEN, WEIGHT, None), TypeError,  # type: ignore[arg-type]
     "teacher: expected a tuple (hidden, head), got NoneType"),
    (lambda: objectives.gspo, HINT, "...presets.GSPO is that loss"),
    (lambda: GRPOLoss(HIDDEN, WEIGHT, IDS, None, None), TypeError,  # type: ignore
     "GRPOLoss: expected at most config by position, got 5 arguments"),
    (lambda: grpo_loss(HIDDEN, WEIGHT, IDS, response_mask=IDS, advantages=LOGPS), TypeError,
     "completion_mask: expected by grpo_loss, got none; did you mean it by response_mask?"),
    (lambda: loss(WEIGHT.numpy()), TypeError, "head: expected a weight ..., got ndarray"),
    (lambda: Head(Head(WEIGHT)), TypeError, "weight: expected a tensor or a module, got Head"),
    (lambda: Head(WEIGHT, bias=30.0), TypeError, "bias: expected a tensor, got float"),
    (lambda: Head(WEIGHT, logit_scale=0), ValueError, "logit_scale: ... other than 0, got 0"),
    (lambda: Head(WEIGHT, vocab_size=0), ValueError, "vocab_size: expected an int > 0, got 0"),
    (lambda: loss(run="lean"), TypeError, "run: expected a Run, got str"),
    (lambda: loss(engine="lean"), TypeError, "engine: ...; did you mean run=Run(engine=...)?"),
    (lambda: loss(old_per_token_logps=scores()), TypeError,
     "old_per_token_logps: expected a tensor, got Scores; pass a tensor of it, such as its logps"),
    (lambda: loss(beta=0.04, reference=(HIDDEN, WEIGHT)), ValueError,
     "ref_per_token_logps: ...got None; `reference` is read only with kl_estimator"),
    (lambda: GRPOLoss(kl_estimator="low_var_kl"), ValueError, "kl_estimator: ... is 'k3'"),
    (lambda: GRPOLoss(lambda tokens: tokens.loss), TypeError, "config: ... it as objective"),
    (lambda: GRPOLoss("DAPO"), TypeError,
     "config: expected a LossConfig, got str; config=presets.DAPO has the paper's settings"),
    (lambda: GRPOLoss(kl_coef=0.1), TypeError, "kl_coef: ...did you mean beta"),
    (lambda: GRPOLoss(num_items_in_batch=3), TypeError,
     "num_items_in_batch: ...; it is an argument of a call of GRPOLoss"),
    (lambda: GRPOLoss()(head=WEIGHT, **BATCH, beta=0.1), TypeError,
     "beta: ...; it is an argument of GRPOLoss(...)"),
    *((lambda name=name: GRPOLoss()(head=WEIGHT, **BATCH, **{name: None}), TypeError,
       f"{name}: a call of GRPOLoss has no such argument; it is an argument of GRPOLoss")
      for name in ("config", "objective", "run")),
    *((lambda name=name: GRPOLoss(**{name: 1}), TypeError, f"{name}: GRPOLoss ...{hint}")
      for name, hint in ELSEWHERE.items()),
    *((lambda call=call: call(scale_rewards=1, num_generations=1), TypeError,
       "scale_rewards: ...; it is an argument of grpo_kernels.advantages.group_advantages")
      for call in (loss, given_loss)),
    *((lambda name=name: scores(**{name: 1}), TypeError, f"{name}: linear_logps ...{hint}")
      for name, hint in (("targets", "did you mean completion_ids?"), ("softcap", OF_HEAD))),
    (lambda: grpo_loss(HIDDEN, WEIGHT, input_ids=IDS), TypeError, "... did you mean it by input"),
    (lambda: GRPOLoss(loss_type="seq-mean-token-mean"), ValueError, "...; did you mean grpo?"),
    (lambda: GRPOLoss(importance_sampling_level="seq"), ValueError, "...; did you mean sequence?"),
    (lambda: grpo_kernels.gspo_loss, HINT, "...presets.GSPO is that loss"),
    (lambda: grpo_kernels.causal_lm_logprobs, HINT, "...; did you mean causal_lm_logps?"),
    (lambda: linear_divergence(HIDDEN, WEIGHT, HEAD), TypeError,  # type: ignore[arg-type]
     "teacher: ..., got Linear; for a whole model, call causal_lm_divergence(student, teacher"),
    (lambda: group_advantages(torch.ones(4), torch.zeros(4)),  # type: ignore
     TypeError, "num_generations: expected an int, got Tensor; pass group ids as group_ids="),
    (lambda: grpo_kernels.GrpoLoss, HINT, "... did you mean GRPOLoss"),
    (lambda: presets.grpo, HINT, "... did you mean GRPO?"),
    (lambda: loss(advantages=torch.ones(2, 1)), ValueError,
     "advantages: ..., got (2, 1); pass advantages[:, 0]"),
    (lambda: loss(completion_mask=np.ones((2, 5))), TypeError,
     "completion_mask: ..., got ndarray; pass torch.as_tensor"),
    (lambda: loss(num_items_in_batch=torch.ones(2, 5)), ValueError,
     "num_items_in_batch: ..., got a tensor of shape (2, 5); pass completion_mask.sum()"),
    (lambda: loss(beta=torch.tensor(0.1)), TypeError, "beta: ... tensor(0.1000); pass its .item()"),
    (lambda: loss(loss_type=presets.DAPO), ValueError, "loss_type: ...; pass it as config="),
    (lambda: LossConfig(reference=LOGPS), TypeError,  # type: ignore[call-arg]
     "reference: ...; it is an argument of a loss's call, such as grpo_loss$"),
    (lambda: loss(config=SimpleNamespace(loss_type="grpo")), TypeError,
     "config: ... SimpleNamespace; pass LossConfig.from_trl(args)"),
    (lambda: loss(epsilon=(0.2, 0.28)), TypeError, "epsilon: ...; the upper one is epsilon_high"),
    *((lambda x=x: loss(hidden=x), TypeError,
       "hidden: expected a tensor, got ...; pass the last layer's ..., output.hidden_states[-1]")
      for x in ((HIDDEN, HIDDEN), SimpleNamespace(hidden_states=(HIDDEN,)))),
    (lambda: loss(advantages=(LOGPS, LOGPS)), TypeError,
     "advantages: expected a tensor, got tuple; pass one of its tensors"),
    (lambda: linear_logps(HIDDEN, WEIGHT, IDS - IDS - 100), ValueError,
     "completion_ids: ..., got -100; set completion_mask to 0 at labels of -100"),
    (lambda: loss(kept_ids=LOGITS > 0), TypeError,
     "kept_ids: ..., got torch.bool; pass KeptIds.from_counts(kept_ids.nonzero()[:, -1],"),
    (lambda: loss(kept_ids=[[[1]]]), TypeError, "kept_ids: ..., got list; pass KeptIds.from_rows("),
    (lambda: linear_divergence(HIDDEN, WEIGHT, (LOGITS,)), TypeError,  # type: ignore[arg-type]
     "teacher: expected a tuple (hidden, head), got tuple of 1"),
    (lambda: advantages.gae(LOGPS, torch.zeros(2, 6), -LOGPS), ValueError,
     "values: ..., got (2, 6); pass V after a row's last token as last_value="),
    (lambda: loss(objective=lambda tokens: tokens.lengths), HINT, "...; it has logps, ..., loss"),
    (lambda: loss(config={"beta": 0.1}), TypeError, "config: ... dict; pass LossConfig(**config)"),
    (lambda: loss(config=GRPOLoss()), TypeError, "config: ... GRPOLoss; pass its config"),
    (lambda: grpo_loss(*[IDS] * 6), TypeError, "grpo_loss: ...; pass the others by name"),
    (lambda: given_loss(logps=LOGPS[0], entropies=-LOGPS[0], completion_mask=None, advantages=
                        LOGPS[0], cu_seqlens=torch.tensor([2, 3])), ValueError,
     "cu_seqlens: ..., got [2, 3]; of lengths, pass the sums, beginning with 0"),
    (lambda: linear_divergence(HIDDEN, WEIGHT, [HIDDEN, WEIGHT]), TypeError,  # type: ignore
     "teacher: expected a tuple (hidden, head), got list"),
    (lambda: scores(expected=LossConfig()), TypeError, "expected: ... policy_expectation(config,"),
    (lambda: Expectation(LOGPS), TypeError,  # type: ignore[arg-type]
     "coefficients: expected a function ...; pass the tensor itself as expected="),
    (lambda: Metrics.merge([loss()]), TypeError, "parts: ... LossOutput; pass its metrics"),
    (lambda: Metrics.merge(loss().metrics), TypeError, "parts: expected a list ..., got Metrics"),
    (lambda: KeptIds.from_logprobs([{1: -0.1}, {}], torch.ones(2, 1)), TypeError,
     "rows: expected, for each sequence, a list of mappings ..., got int in one"),
    (lambda: KeptIds.from_rows([[1, 2], [3]], torch.tensor([[1, 1], [1, 0]])), TypeError,
     "rows: expected a list of ids for each token, got 1 as one"),
    (lambda: KeptIds.from_rows(None, LOGPS), TypeError,  # type: ignore[arg-type]
     "rows: expected a list with a list for each sequence, got NoneType"),
    (lambda: KeptIds.from_padded(torch.ones(2, 3, 4)), TypeError,
     "kept: expected signed integer ids ..., got torch.float32"),
    (lambda: testing.check_token_level(GRPOLoss), TypeError,  # type: ignore[arg-type]
     "objective: expected a function of TokenInputs, got GRPOLoss"),
    (lambda: loss(objective=partial(objectives.topr, scores=torch.ones(2))), ValueError,
     "scores: ..., got (2,); ..., pass scores[:, None].expand_as(completion_ids)"),
    (lambda: objectives.m2po_mask(LOGPS, -LOGPS, torch.ones(2, 5)), ValueError,
     "sampling_per_token_logps: expected log-probabilities"),
    (lambda: advantages.process_advantages([[1.0]], [[1]], 1), TypeError,  # type: ignore
     "completion_mask: expected by process_advantages, got none"),
    (lambda: advantages.process_advantages(
        [["x"]], [[1]], 1, completion_mask=torch.ones(1, 2)), TypeError,  # type: ignore
     "step_rewards: expected numbers or None in the lists, got str"),
    (lambda: LossConfig().kl_coef, HINT, "... 'kl_coef'; did you mean beta?"),
    (lambda: presets.DAPO.replace(beta=0.1), HINT, "... dataclasses.replace(config, ...)"),
    (lambda: presets.DAPO(beta=0.1), TypeError,  # type: ignore[operator]
     "config: ... dataclasses.replace(config, beta=0.1), or GRPOLoss(config, beta=0.1)"),
    (lambda: Run(2**29), ValueError, "engine: ..., got 536870912; pass bytes as workspace_bytes="),
    (lambda: Run("fast"), ValueError, "engine: expected one of auto, score, ..., got 'fast'"),
    (lambda: Run(backend="cuda"), ValueError, "backend: expected one of ..., got 'cuda'"),
    (lambda: Run(workspace_bytes="64MB"), TypeError,  # type: ignore[arg-type]
     "workspace_bytes: expected an int, got '64MB'"),
    (lambda: Run(workspace_bytes=True), TypeError, "workspace_bytes: expected an int, got True"),
    (lambda: Run(workspace_bytes=0), ValueError, "workspace_bytes: expected a number of bytes > 0"),
    (lambda: Run(gather=1), TypeError, "gather: expected"),  # type: ignore[arg-type]
    *((lambda call=call, x=x: call(importance_sampling_ratio=x), ValueError,
       "importance_sampling_ratio: expected ratios >= 0 ..., got -1 for ...: take the exponen")
      for call in (loss, given_loss) for x in (-torch.ones(2, 5), -torch.ones(2))),
    (lambda: loss(importance_sampling_ratio=torch.full((2, 5), torch.inf)), ValueError,
     "importance_sampling_ratio: expected finite ratios"),
    *((lambda call=call, declare=declare, name=name: call(
        objective=declare(lambda tokens: getattr(tokens, name).exp() * tokens.logps)),
       HINT, f"...NoneType...; the call was given no ...{name}")
      for call, declare in ((loss, token_level), (given_loss, lambda x: x))
      for name in ("ref_per_token_logps", "sampling_per_token_logps", RATIO)),
    *((lambda name=name: GRPOLoss(loss_type=name), ValueError,
       f"loss_type: expected one of grpo, ...config=presets.{preset}")
      for name, preset in (("gspo", "GSPO"), ("ppo", "PPO"), ("dr-grpo", "DR_GRPO"))),
    *((lambda name=name: setattr(GRPOLoss(), name, 0.1), HINT,
       "GRPOLoss has no ...; did you mean beta? It is a field of its config")
      for name in ("kl_coef", "betas")),
    (lambda: setattr(GRPOLoss(), "beta", 0.1), HINT, "...replace(loss_fn.config, beta="),
    *((lambda name=name: setattr(GRPOLoss(), name, "x"), TypeError, f"{name}: expected ... got str")
      for name in ("config", "objective", "run")),
    (lambda: GRPOLoss().beta, HINT, "...read loss_fn.config.beta"),
    (lambda: grpo_loss(HIDDEN, WEIGHT, IDS, BATCH["advantages"], mask=IDS), TypeError,
     "advantages: ... got none, but mask; did you mean compl"),
    (lambda: grpo_loss(HIDDEN, WEIGHT, IDS % 2, IDS, torch.ones(2)), ValueError, SWAPPED),
    (lambda: linear_logps(HIDDEN, WEIGHT, IDS % 2, IDS), ValueError, SWAPPED),
    (lambda: loss(hidden=HIDDEN.flatten(0, 1), completion_ids=IDS.flatten(), completion_mask=
                  torch.ones(10)), ValueError, "...packed rows need cu_seqlens"),
    (lambda: loss(cu_seqlens=torch.tensor([0, 5, 10])), ValueError,
     "...pass the rows of the packed sequences"),
    *((lambda x=x: topk_divergence(HIDDEN, WEIGHT, IDS[..., None], x.expand(2, 5, 1)), ValueError,
       "teacher_logps: expected log-probabilities of one distribution ... add up to")
      for x in (torch.tensor(3.0), torch.tensor(0.9))),
    (lambda: linear_divergence(HIDDEN, LONGER[:20], (HIDDEN, Head(LONGER, LONGER[:20, 0]))),
     ValueError, f"teacher.head.bias: {A_ROW}(20,)"),
    (lambda: linear_logps(HIDDEN, Head(LONGER, LONGER[:20, 0], vocab_size=20), IDS),
     ValueError, f"head.bias: {A_ROW}(20,)"),
    (lambda: linear_logps(
        HIDDEN, Head(LONGER, lora=LoRA(LONGER[:2], LONGER[:20, :2]), vocab_size=20), IDS),
     ValueError, f"head.lora.b: {A_ROW}(20, 2)"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), GUESSES, ids=[x[2][:20] for x in GUESSES])
def test_a_wrong_guess_is_told_what_to_write(call, error, message):
    parts = [re.escape(part) for part in message.removesuffix("$").split("...")]
    with pytest.raises(error, match=f"^{'.*'.join(parts)}{'$' * message.endswith('$')}"):
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
        with pytest.raises(ImportError, match=rf"'{name}'; it is in grpo_kernels\.{home}$"):
            exec(f"from grpo_kernels import {name}")
    assert dir(advantages) == sorted(advantages.__all__)


@pytest.mark.parametrize(("call", "more"), [(grpo_loss, SHARED), (linear_logps, {})])
def test_logits_in_the_place_of_hidden_states_and_a_shift(call: Any, more: Any) -> None:
    longer = torch.cat([HIDDEN, HIDDEN[:, :1]], dim=1)
    looks = r"^hidden: expected hidden states of width H = 4, .* got \(.*9\): these look like log"
    shifted = r"^completion_ids: .*position t - 1 predicts token t: drop the"
    for hidden, message in (
        (LOGITS, looks),
        (longer, rf"{shifted} last position, hidden\[\.\.\., :-1, :\]"),
        (HIDDEN[:, :-1], rf"{shifted} first id, \[\.\.\., 1:\]"),
        (HIDDEN.repeat(1, 2, 1), r".* for the last tokens, pass hidden\[\.\.\., -6:-1, :\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call(hidden, WEIGHT, IDS, **more)
    call(longer[..., :-1, :], WEIGHT, IDS, **more)  # as it says


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


def test_the_calls_take_fields_as_the_module_does() -> None:
    """Those of a config that is given are replaced."""
    config, ref = LossConfig(loss_type="grpo", beta=0.04), {"ref_per_token_logps": 2 * LOGPS}
    mask = {"completion_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])}
    for call in (loss, given_loss):
        want = call(config=config, **ref, **mask).loss
        for given in (None, LossConfig(loss_type="dapo", beta=0.04)):
            fields = {"loss_type": "grpo", "beta": 0.04, "config": given}
            assert call(**fields, **ref, **mask).loss == want
        assert call(loss_type="grpo", **ref, **mask).loss != want


@pytest.mark.parametrize("objective", [None, token_level(lambda tokens: tokens.loss)])
def test_a_loss_of_log_probabilities_needs_no_entropies(objective: Any) -> None:
    with_entropies, out = (given_loss(entropies=x, objective=objective) for x in (-LOGPS, None))
    assert out.loss == with_entropies.loss
    assert out.entropies is None
    assert {*with_entropies.metrics} - {*out.metrics} == {"entropy"}
    assert Metrics.merge([out.metrics] * 2)["policy_loss"] == out.metrics["policy_loss"]


@pytest.mark.usefixtures("forget_warnings")
def test_inputs_that_have_no_effect_warn() -> None:
    with pytest.warns(UserWarning, match=r"off_policy_mask_threshold: drops nothing without"):
        loss(off_policy_mask_threshold=0.1)
    with pytest.warns(UserWarning, match=r"temperature: not used, since logps include it"):
        given_loss(temperature=0.7)
    given_loss(config=LossConfig(temperature=0.7))  # as the call has that computed the logps
    listed = (HIDDEN @ WEIGHT.T).log_softmax(-1)[..., :3]
    topk_divergence(HIDDEN, WEIGHT, IDS[..., None].expand(2, 5, 3), listed)
    with pytest.warns(UserWarning, match=r"teacher_logps: the K ids' probabilities add up to 1"):
        topk_divergence(HIDDEN, WEIGHT, torch.arange(3).expand(2, 5, 3), listed.log_softmax(-1))
    with pytest.warns(UserWarning, match=r"group_ids: each reward has a group of its own"):
        group_advantages(torch.tensor([1.0, 2.0, 3.0]), group_ids=[0, 1, 2])


def test_a_repr_shows_what_differs_from_the_default_and_no_numbers() -> None:
    shown = "LossConfig(loss_type='dapo', beta=0.1, use_bias_correction_kl=True)"
    assert repr(LossConfig(beta=0.1)) == shown
    assert repr(scores()).startswith("Scores(logps=tensor of shape (2, 5), ")
    assert repr(Head(WEIGHT, logit_scale=2.0)) == (
        "Head(weight=tensor of shape (9, 4), logit_scale=2.0)"
    )
    assert repr(Head(HEAD)) == "Head(weight=Linear)"
    assert repr(LoRA(LONGER[:2], LONGER)).endswith("b=tensor of shape (40, 4))")
    metrics = loss(advantages=torch.ones(2)).metrics
    assert repr(metrics).startswith("Metrics(policy_loss=-1, entropy=")
    assert "\n" not in repr(metrics)
    shapes = torch.utils._pytree.tree_map(lambda x: x.shape, metrics)
    assert repr(shapes).startswith("Metrics(policy_loss, entropy")
    assert LossConfig(**vars(presets.DAPO)) == presets.DAPO


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
    missing = "(.* has no such (argument|field)|not an argument of )"
    message = f"^{wrong}: {missing}.*; did you mean {wrong[:-1]}"
    if name in ("grpo_kernels.grpo_loss", "grpo_kernels.policy_loss_from_logps"):
        given = (torch.ones(1, 2, 3), torch.ones(4, 3), *torch.ones(3, 1, 2))
        given = given if "from" not in name else given[-3:]
    with pytest.raises(TypeError, match=message):
        call(*given, **{wrong: None})
