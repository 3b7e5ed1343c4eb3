"""TRL's trainers with our head, divergence or trunk against TRL's own: same losses and metrics,
fewer products. The loss by option; each loss type for many steps is for make parity."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
import transformers
import trl
import trl.trainer.distillation_trainer as trl_distillation
from torch.utils.flop_counter import FlopCounterMode
from trl import GRPOTrainer

from benchmarks import head_flops, parity, tiny_models, tiny_run
from grpo_kernels.commands.scripts import difference
from grpo_kernels.trl import (
    FusedDistillationTrainer,
    FusedGRPOTrainer,
    FusedLossMixin,
    distillation,
    micro_batches,
    patch_trl,
)
from tests.support.training_step import distance
from tests.support.trl_training import (
    Drawn,
    Half,
    Run,
    assert_same,
    divergence_inputs,
    mixed,
    train,
)

pytestmark = pytest.mark.unit

TWICE = {"num_iterations": 2, "beta": 0.04}
TRAININGS: dict[str, dict[str, Any]] = {
    "LoRA": {"learning_rate": 1e-2, "peft_config": parity.lora(), **TWICE},
    # a saturated cap makes many small gradients, of whose last bits Adam's first steps make
    # directions: 4.1e-5 with the C++ kernels, 1.9e-6 with torch, both as near to float64
    "soft-capping": {"kind": "softcap", "tolerance": 1e-4, **TWICE},
    "fp32 head in bf16": {
        "cast_lm_head_to_fp32": True, "dtype": torch.bfloat16, "tolerance": 2e-2
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TRAININGS)
def test_training_is_the_same(name: str) -> None:
    options = {**TRAININGS[name]}
    tolerance = options.pop("tolerance", None)
    assert_same(*(train(x, **options) for x in (trl.GRPOTrainer, FusedGRPOTrainer)), tolerance)


def test_help_shows_the_arguments_of_the_trainer_and_those_of_a_subclass() -> None:
    own = type("Own", (FusedGRPOTrainer,), {"__init__": lambda self, mine: None})
    assert {"model", "layout"} <= {*inspect.signature(FusedGRPOTrainer).parameters}
    assert [*inspect.signature(own).parameters] == ["mine"]


def test_a_mixture_of_experts_with_its_load_balancing_loss():
    # without the KL term: sequences without an advantage have the gradient of this loss alone
    theirs, ours = (train(x, kind="experts") for x in (trl.GRPOTrainer, FusedGRPOTrainer))
    assert_same(theirs, ours)
    assert all(step["aux_loss"] > 0 for step in theirs.steps)


def test_no_row_is_computed_twice_where_the_gradient_can_be_foreseen() -> None:
    theirs, ours = (head_flops.count(x, steps=1) for x in (trl.GRPOTrainer, FusedGRPOTrainer))
    assert theirs.flops == 8 * theirs.rows * theirs.size
    assert (ours.scored, ours.live) == (theirs.scored, theirs.live)
    assert 0 < ours.live < ours.scored == ours.rows <= theirs.rows
    assert ours.flops == (6 * ours.live + 2 * (ours.scored - ours.live)) * ours.size
    # beta or the bonus: every row carries gradient
    sequences = {"importance_sampling_level": "sequence", "use_bias_correction_kl": False}
    for options in (
        {"entropy_coef": 0.01, "loss_type": "grpo", **TWICE},
        {"loss_type": "dr_grpo", "steps": 1, "beta": 0.04, **sequences},
    ):
        ours = head_flops.count(FusedGRPOTrainer, **options)
        assert ours.flops == 6 * ours.scored * ours.size
    # coupled coefficients cost a second pass at most
    options = parity.loss_options("grpo", "sequence", num_iterations=2)
    ours = head_flops.count(FusedGRPOTrainer, **options)
    assert 2 * ours.scored < ours.flops / ours.size <= 2 * ours.scored + 6 * ours.live


class Columns:
    """Advantages (B, 1): TRL's loss broadcasts them, and nothing is foreseen."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        scored = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        return scored | {"advantages": scored["advantages"].unsqueeze(1)}


def test_inputs_that_only_trl_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(micro_batches.warnings, "warn", lambda text, *_, **__: warned.append(text))
    ours = train(mixed(Columns, FusedGRPOTrainer))
    assert any("gradient of this loss: advantages: expected shape" in str(text) for text in warned)
    assert_same(train(mixed(Columns, trl.GRPOTrainer)), ours)


UNKNOWN = """
import json, warnings
import trl

trl.__version__ = "9.9.0"
theirs = trl.trainer.utils.add_fused_lm_head
caught = []
warnings.showwarning = lambda text, *_: caught.append(str(text))
from grpo_kernels.trl import FusedGRPOTrainer, patch_trl
from tests.support.trl_training import assert_same, train

imported = [*caught]
assert_same(train(trl.GRPOTrainer), train(FusedGRPOTrainer, engine="lean"), tolerance=0.0)
try:
    train(FusedGRPOTrainer, kl_estimator="full")
except ValueError as error:
    print(error)
with patch_trl(layout="trim") as is_patched:
    assert not is_patched and trl.trainer.utils.add_fused_lm_head is theirs
print([x for x in imported if x.startswith("grpo_kernels")])
"""


def test_an_unknown_trl_is_left_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNKNOWN], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    message = "grpo_kernels: expected trl 1.16, got trl 9.9.0, so everything runs as stock TRL"
    refused = "kl_estimator: expected 'k3' with trl 9.9.0, got 'full'"
    assert done.stdout.splitlines()[-2:] == [refused, f"{[message]}"]


THEIRS = trl_distillation._chunked_divergence_loss
WIDER = {"hidden_size": 48, "head_dim": 12}
COOLER = {"temperature": 0.7}
# name -> (student, teacher, how the teacher's config differs, beta, options)
DISTILLED: dict[str, tuple[str, str, dict[str, Any], float, dict[str, Any]]] = {
    "forward KL, a wider teacher": ("qwen3", "qwen3", WIDER, 0.0, {}),
    "JSD, tied student with adapters on the body": (
        "tied", "qwen3", {}, 0.5, {"peft_config": parity.lora(), **COOLER}
    ),
    "JSD, scaled student, capped teacher": ("logit_scale", "softcap", {}, 0.3, {}),
    "reverse KL, a bias each, scaled teacher": ("bias", "logits_scaling", {}, 1.0, COOLER),
}  # fmt: skip


STOCK, OURS = (mixed(Drawn, x) for x in (trl.DistillationTrainer, FusedDistillationTrainer))


def trained(trainer_class: type, name: str, **options: Any) -> Run:
    student, teacher, changes, beta, of_case = DISTILLED[name]
    given = {
        "kind": student,
        "teacher_model": tiny_models.model(teacher, seed=5, num_hidden_layers=1, **changes),
        "beta": beta,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 12,
    }
    options = {"config_class": trl.DistillationConfig, **given, **of_case, **options}
    return train(trainer_class, **options)


@pytest.mark.parametrize("name", DISTILLED)
def test_distillation_is_the_same(name: str) -> None:
    stock, ours = (trained(x, name) for x in (STOCK, OURS))
    assert stock.steps[0]["loss"] > 1e-3
    assert {"loss", "grad_norm", "entropy"} <= stock.steps[0].keys()
    assert_same(stock, ours)
    assert trl_distillation._chunked_divergence_loss is THEIRS
    log = ours.trainer.state.log_history[0]
    assert 0 < log["rows/projected"] <= 1
    assert log["rows/gradient"] == 1.0


def test_a_patched_distillation_is_the_same_and_unpatching_gives_trls_back() -> None:
    name = "JSD, tied student with adapters on the body"
    stock = trained(trl.DistillationTrainer, name, steps=1)
    with patch_trl():
        patched = trained(trl.DistillationTrainer, name, steps=1)
    assert_same(stock, patched)
    logs = [run.trainer.state.log_history[0] for run in (stock, patched)]
    assert "rows/gradient" not in logs[0]
    assert 0 < logs[1]["rows/projected"] <= logs[1]["rows/gradient"] == 1.0
    assert trl_distillation._chunked_divergence_loss is THEIRS


@pytest.mark.usefixtures("forget_warnings")
def test_our_trainer_under_a_patch_counts_its_own_rows_and_nothing_is_said() -> None:
    def prepare(_: Any) -> None:
        warnings.simplefilter("always")  # a tiny run is silent

    with patch_trl(), warnings.catch_warnings(record=True) as caught:
        ours = trained(OURS, "JSD, scaled student, capped teacher", steps=1, prepare=prepare)
    assert ours.trainer.state.log_history[0]["rows/gradient"] == 1.0
    assert not [x for x in caught if "patch_trl" in str(x.message)]


def test_masked_positions_are_never_read() -> None:
    results = []
    for function, of_masked in ((distillation.divergence_loss, torch.nan), (THEIRS, 0.7)):
        given = divergence_inputs(of_masked)
        loss, entropy, count = function(beta=0.5, num_items_in_batch=torch.tensor(40), **given)
        wanted = given["student_hidden_states"], given["student_lm_head_weight"]
        results.append((loss, entropy, count, *torch.autograd.grad(loss, wanted)))
        assert not entropy.requires_grad
    torch.testing.assert_close(*results, rtol=2e-5, atol=1e-7)


def test_a_batch_without_a_counted_token_gives_a_loss_of_zero_that_is_attached() -> None:
    given = divergence_inputs(torch.nan) | {"completion_mask": torch.zeros(3, 7)}
    loss, entropy, count = distillation.divergence_loss(beta=1.0, **given)
    loss.backward()
    assert (loss.item(), entropy.item(), count.item()) == (0.0, 0.0, 0)
    assert not given["student_lm_head_weight"].grad.any()


def test_each_head_is_projected_once() -> None:
    given = divergence_inputs(width=12) | {"completion_mask": torch.ones(3, 7)}
    for beta in (0.0, 0.5, 1.0):
        with FlopCounterMode(display=False) as counter:
            distillation.divergence_loss(beta=beta, **given)[0].backward()
        assert counter.get_total_flops() == 8 * 21 * 50 * 12  # two projections, d hidden, d weight


# The loss with a trunk that computes what carries gradient, by option

B, P, T = 8, 10, 14
SAVINGS = {"defaults": {}, "trim": {"layout": "trim"}, "skip": {"zero_advantage": "skip"}}
SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.05}


def noisy() -> Tensor:
    return -5.2 + 0.3 * torch.randn(B, T)


def far_off_dead(given: dict[str, Any]) -> dict[str, Any]:
    """A ratio of e^200 where the advantage is 0 would be a NaN, were it computed."""
    old = given["old_per_token_logps"].clone()
    old[[1, 3]] -= 2.0
    return {"old_per_token_logps": old}


CHANGES: dict[str, Any] = {
    "old": lambda _: {"old_per_token_logps": noisy()},
    "reference": lambda _: {"ref_per_token_logps": noisy()},
    "tools": lambda _: {"tool_mask": (torch.rand(B, T) < 0.7).long()},
    "per_token": lambda x: {"advantages": x["advantages"][:, None] * (torch.rand(B, T) < 0.5)},
    "token_ratios": lambda _: {"importance_sampling_ratio": torch.rand(B, T)},
    "sequence_ratios": lambda _: {"importance_sampling_ratio": (torch.rand(B, 1) < 0.5).float()},
    "all_clipped": lambda _: {
        "old_per_token_logps": torch.full((B, T), -9.0),
        "advantages": torch.ones(B),
    },
    "all_dead": lambda _: {"advantages": torch.zeros(B)},
    "far_off_dead": far_off_dead,
}


def batch(changes: str = "") -> dict[str, Any]:
    """Two prompts with four completions each; half of the advantages are 0."""
    prompts = torch.randint(3, tiny_models.VOCAB, (2, P)).repeat_interleave(4, dim=0)
    prompt_mask = (torch.arange(P) >= torch.tensor([6] * 4 + [1] * 4)[:, None]).long()
    completions = torch.randint(3, tiny_models.VOCAB, (B, T))
    lengths = torch.randint(5, T + 1, (B, 1))  # so long that not all tokens are clipped
    mask = (torch.arange(T) < lengths).long()
    given = {
        "prompt_ids": prompts * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": completions * mask,
        "completion_mask": mask,
        "advantages": torch.tensor([1.2, 0.0, -0.7, 0.0, 0.0, 0.0, 0.4, 0.0]),
        "num_items_in_batch": mask.sum(),
    }
    for name in changes.split():
        given |= CHANGES[name](given)
    return given


SEQUENCE = {"importance_sampling_level": "sequence"}
# name -> (what changes in the batch, options of the configuration)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{name}, on-policy": ("", {"loss_type": name}) for name in parity.LOSS_TYPES},
    **{f"{name}, old": ("old", {"loss_type": name}) for name in parity.LOSS_TYPES},
    "gspo": ("old", {"loss_type": "grpo", **SEQUENCE}),
    "beta": ("reference", {"beta": 0.04}),
    "entropy bonus": ("", {"entropy_coef": 0.01}),
    "adaptive entropy": ("", {"entropy_coef": 0.01, "use_adaptive_entropy": True}),
    "entropy quantile": ("", {"top_entropy_quantile": 0.4}),
    "off-policy mask": ("old", {"off_policy_mask_threshold": 0.01}),
    "delta": ("old", {"delta": 1.5}),
    # some sequences have few tokens: not all clipped
    "tools": ("old tools", {"epsilon": 0.9, "epsilon_high": 3.0}),
    "advantages per token": ("per_token", {}),
    "token ratios": ("old token_ratios", {}),
    "sequence ratios": ("old sequence_ratios", {}),
    "all clipped": ("all_clipped", {}),
    "all dead": ("all_dead", {"loss_type": "grpo"}),
    "far off, dead": ("old far_off_dead", {"loss_type": "grpo"}),
    "checkpointing": ("old", {"gradient_checkpointing": True}),
}
ENTROPY_STATE = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")
NO_SKIP = ("adaptive entropy", "entropy quantile")
# where each sequence's gradient is known beforehand, exactly those have a graph
EXACTLY_LIVE = ("dapo, on-policy", "grpo, old", "all dead", "tools", "checkpointing")


@cache
def model() -> Any:
    return tiny_models.model("qwen3").train()


def trainer_of(base: type, options: dict[str, Any], **more: Any) -> Any:
    beta = options.get("beta", 0.0)
    sizes = {"per_device_train_batch_size": B, "num_generations": 4}
    sizes |= {"gradient_checkpointing": False}
    args = tiny_run.config(tempfile.gettempdir(), **{**sizes, **options, "beta": 0.0})
    tiny_run.quiet()
    policy = model()
    policy.gradient_checkpointing_disable()
    trainer = base(
        model=policy,
        args=args,
        reward_funcs=tiny_run.reward,
        train_dataset=tiny_run.dataset(16),
        processing_class=tiny_models.tokenizer(),
        **more,
    )
    trainer.current_gradient_accumulation_steps = 2
    trainer.beta = args.beta = beta  # afterwards: it would load a reference
    trainer.state_of_entropy = {name: vars(trainer).get(name) for name in ENTROPY_STATE}
    policy.train()
    return trainer


def step(trainer: Any, given: dict[str, Any]) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    trainer.model.zero_grad()
    trainer.use_vllm = "importance_sampling_ratio" in given
    trainer._metrics["train"].clear()
    vars(trainer).update(trainer.state_of_entropy)
    loss = trainer._compute_loss(trainer.model, dict(given))
    loss.backward()
    gradients = {name: x.grad.clone() for name, x in trainer.model.named_parameters()}
    return loss.item(), gradients, {name: x[-1] for name, x in trainer._metrics["train"].items()}


def assert_metrics(got: dict[str, float], want: dict[str, float], what: str = "") -> None:
    for name, x in want.items():
        assert difference(name, x, got[name]) <= 1e-5, f"{what}: {name}"


class Spied(GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.arrived: list[Tensor] = []
        for x in found[:2]:
            x.register_hook(self.arrived.append)
        return found


@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_and_metrics_are_stock_trls(name: str) -> None:
    changes, options = CASES[name]
    given = batch(changes)
    stock = trainer_of(Spied, options)
    loss, gradients, metrics = step(stock, given)
    live = int(torch.stack([(x != 0).any(dim=1) for x in stock.arrived]).any(dim=0).sum())
    for saving, of_body in SAVINGS.items():
        if saving == "skip" and name in NO_SKIP:
            continue
        ours = trainer_of(FusedGRPOTrainer, options, **of_body)
        got_loss, got, got_metrics = step(ours, given)
        assert abs(got_loss - loss) <= 1e-6 * max(1.0, abs(loss)), saving
        assert not gradients["lm_head.weight"].any() or distance(got, gradients) <= 5e-6, saving
        graphs = ours._shares.pairs["sequences/gradient"][0]
        assert graphs >= live, f"{saving}: {graphs} for {live}"
        assert graphs == live or name not in EXACTLY_LIVE, f"{saving}: {graphs} for {live}"
        if saving != "skip":
            assert got_metrics.keys() == metrics.keys()
            assert_metrics(got_metrics, metrics, saving)


def test_skipped_sequences_leave_the_metrics() -> None:
    given = batch("old")
    ours = trainer_of(FusedGRPOTrainer, {}, zero_advantage="skip")
    _, _, got = step(ours, given)
    live = given["advantages"] != 0
    alone = {name: x[live] if isinstance(x, Tensor) and x.dim() else x for name, x in given.items()}
    _, _, want = step(trainer_of(GRPOTrainer, {}), alone)
    assert want["clip_ratio/region_mean"] > 0
    assert_metrics(got, want)
    assert ours._shares.pairs["tokens/computed"][0] == ours._shares.pairs["tokens/gradient"][0]
    _, gradients, metrics = step(ours, given | CHANGES["all_dead"](given))
    assert metrics == {}, "a micro-batch without a live sequence has nothing to measure"
    assert not any(x.any() for x in gradients.values())


class WithATermOfItsOwn(FusedGRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        logps, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.own = logps.square().mean()
        return logps, *others

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return super()._compute_loss(model, inputs) + 0.1 * self.own


def test_a_gradient_that_was_not_foreseen_is_an_error() -> None:
    message = r"zero_advantage: expected no gradient for the sequences \[1, 3, 4, 5, 7\].*'train'"
    with pytest.raises(RuntimeError, match=message):
        step(trainer_of(WithATermOfItsOwn, {}), batch())
    trainer = trainer_of(WithATermOfItsOwn, {}, zero_advantage="train")
    assert step(trainer, batch())[1]["lm_head.weight"].any()


SKIP, REGROUP = {"zero_advantage": "skip"}, {"regroup": True}
WINDOWS = {"gradient_accumulation_steps": 4, "steps_per_generation": 6}
# options of the configuration, arguments of the trainer, message
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"top_entropy_quantile": 0.4}, SKIP, "zero_advantage: .*top_entropy_quantile"),
    ({"use_adaptive_entropy": True}, SKIP, "zero_advantage: .*use_adaptive_entropy"),
    ({}, {"fused_sampling_correction": True, **SKIP}, "zero_advantage: .*fused_sampling"),
    ({"loss_type": "bnpo"}, REGROUP, "regroup: expected 'auto' or False with loss_type='bnpo'"),
    ({"entropy_coef": 0.01}, REGROUP, "regroup: expected 'auto' or False with entropy_coef"),
    ({"top_entropy_quantile": 0.4}, REGROUP, "regroup: .*top_entropy_quantile"),
    (WINDOWS, REGROUP, "regroup: .*steps_per_generation=6 and gradient_accumulation_steps=4"),
    ({}, {"regoup": True}, r"regoup: .* has no such argument; did you mean regroup\?"),
    ({}, {"kl_estimator": "k1"}, "kl_estimator: expected one of k3, full, got 'k1'"),
    ({}, {"kl_estimator": "full"}, "kl_estimator: expected 'k3' with beta = 0, .* set beta"),
    ({}, {"on_missing_set": True}, "on_missing_set: expected one of error, full, got True; None"),
    ({}, {"on_missing_set": "error"}, "on_missing_set: expected None without a rollout_func"),
    ({}, {"fused_sampling_correction": "on"}, "fused_sampling_.*: expected 'auto', True or False"),
    ({}, {"zero_advantage": "drop"}, "zero_advantage: expected one of score, skip, train"),
    ({}, {"layout": True}, "layout: expected one of tree, trim, padded, got True"),
    ({}, {"tokens_per_forward": 0, **REGROUP}, "tokens_per_forward: expected a number of tokens"),
    ({}, {"tokens_per_forward": 64, "regroup": False}, "tokens_per_forward: .* None .* got 64"),
    ({"loss_type": "bnpo"}, {"tokens_per_forward": 64}, "tokens_per_forward: .*bnpo.* got 64"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "arguments", "message"), REFUSED, ids=str)
def test_options_that_the_loss_does_not_allow_are_refused(options, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        trainer_of(FusedGRPOTrainer, options, **arguments)


def test_a_mixin_in_front_of_no_grpo_trainer_or_behind_one_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a subclass .* got RLOOTrainer; .* patch_trl"):
        type("OfRLOO", (FusedLossMixin, trl.RLOOTrainer), {})
    with pytest.raises(TypeError, match=r"Behind: .* class Behind\(FusedLossMixin, GRPOTrainer\)"):
        type("Behind", (GRPOTrainer, FusedLossMixin), {})
    before = type("Before", (FusedLossMixin,), {})  # a mixin of the user's own
    assert issubclass(mixed(before, GRPOTrainer), FusedLossMixin)


def assert_regrouped(stock: Run, ours: Run) -> None:
    """Samples have other micro-batches, and nothing that is logged tells."""
    assert ours.trainer.regroup
    assert stock.losses != pytest.approx(ours.losses, rel=1e-3), "each has the micro-batch it had"
    assert_same(stock, ours)


# each normalizer, and what a loss may read besides
OF_STEPS: dict[str, dict[str, Any]] = {
    **{name: parity.loss_options(name) for name in ("luspo", "dr_grpo", "vespo")},
    "GSPO, beta": {"loss_type": "grpo", **SEQUENCE, "beta": 0.04},
    "exact KL": {"beta": 0.04, "kl_estimator": "full"},
    "off-policy mask, delta": {"off_policy_mask_threshold": 0.01, "delta": 1.1},
    "truncated": {"mask_truncated_completions": True},
}


@pytest.mark.parametrize("name", OF_STEPS)
def test_regrouped_steps_are_stock_trls(name: str) -> None:
    options: dict[str, Any] = {"epsilon": 0.02, **OF_STEPS[name], **SGD, "steps": 4}
    options |= {"num_iterations": 2, "steps_per_generation": 4}
    of_ours = {"tokens_per_forward": 200, "kl_estimator": options.pop("kl_estimator", "k3")}
    ours = train(FusedGRPOTrainer, **of_ours, **options)
    if name == "exact KL":  # not stock TRL's
        del of_ours["tokens_per_forward"]
        stock = train(FusedGRPOTrainer, regroup=False, **of_ours, **options)
    else:
        stock = train(GRPOTrainer, **options)
    assert_regrouped(stock, ours)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_a_subclass_that_keeps_a_part_of_the_samples(loss_type: str) -> None:
    options = {**parity.loss_options(loss_type), "beta": 0.04, **SGD}
    stock = train(mixed(Half, GRPOTrainer), **options)
    for fused in (mixed(Half, FusedGRPOTrainer), mixed(FusedLossMixin, mixed(Half, GRPOTrainer))):
        assert_regrouped(stock, train(fused, tokens_per_forward=120, **REGROUP, **options))


def test_a_class_that_sees_micro_batches_keeps_them_unless_it_is_trusted() -> None:
    assert trainer_of(FusedGRPOTrainer, {}).regroup
    of_loss = ("get_off_policy_mask", "get_gamma_weights", "compute_loss", "_compute_loss")
    for name in (*of_loss, "training_step"):
        reader = type("Reader", (FusedGRPOTrainer,), {name: getattr(FusedGRPOTrainer, name)})
        assert not trainer_of(reader, {}).regroup
        assert trainer_of(reader, {}, **REGROUP).regroup


def on(event: str, act: Callable[..., None]) -> transformers.TrainerCallback:
    callback = transformers.TrainerCallback()
    setattr(callback, event, act)
    return callback


def changed(base: type, change: Callable[[Any], None], **options: Any) -> Run:
    """A training whose trainer is changed at the end of each step."""
    prepare = lambda x: x.add_callback(on("on_step_end", lambda *_, **__: change(x)))  # noqa: E731
    return train(base, prepare=prepare, **{"steps": 3, "beta": 0.04, **SGD, **options})


def losses_by_size(trainer: Any) -> None:
    if "compute_loss" in vars(trainer):
        return
    compute = trainer.compute_loss

    def compute_loss(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        return (1 + inputs["advantages"].abs().mean()) * compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss


def other_loss(trainer: Any) -> None:
    trainer.loss_type = "bnpo"


def other_reference(trainer: Any) -> None:
    trainer.ref_model.load_state_dict(trainer.model.state_dict())


HALVES = {"steps_per_generation": 4}  # a generation is two optimizer steps


@pytest.mark.parametrize(
    ("change", "options"), [(other_loss, {}), (losses_by_size, {}), (other_reference, HALVES)]
)
def test_what_a_callback_changes_is_stock_trls(change, options, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("grpo_kernels.trl.trainer.warn_once", said.append)
    stock, ours = (changed(x, change, **options) for x in (GRPOTrainer, FusedGRPOTrainer))
    assert max(parity.differences(stock.steps, ours.steps).values()) <= parity.TOLERANCE
    stays = change is not other_reference
    assert {micro_batches.PART in x for x in ours.trainer._buffered_inputs} == {not stays}
    assert [x.startswith("regroup: the trainer has changed") for x in said] == [True, True] * stays


def test_a_loss_that_changes_within_a_regrouped_generation_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"regroup: .* got loss_type='bnpo'.*pass regroup=False"):
        changed(FusedGRPOTrainer, other_loss, **HALVES)


def test_a_step_that_ends_early_is_an_error_before_anything_is_generated() -> None:
    trainer = train(FusedGRPOTrainer, steps=1).trainer
    trainer.model.train()
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    with pytest.raises(RuntimeError, match=r"regroup: .* to end after 2 micro-batches.*=False"):
        trainer._prepare_inputs(None)


class PaidByBeta:
    """In front of a trainer: its reward reads options that TRL scores a batch with."""

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]
        steps = self.args.gradient_accumulation_steps  # type: ignore[attr-defined]
        return rewards * (1 + self.beta) + 0.1 * steps * rewards.square()  # type: ignore[attr-defined]


def test_rewards_see_the_trainers_own_options() -> None:
    options = {"beta": 0.3, "steps_per_generation": 4, **SGD}
    assert_same(*(train(mixed(PaidByBeta, x), **options) for x in (GRPOTrainer, FusedGRPOTrainer)))


def interrupt(_: Any, state: Any, *__: Any, **___: Any) -> None:
    if state.global_step == 2:  # within the first step of the second generation
        raise KeyboardInterrupt


@pytest.mark.parametrize("regroup", [True, False])
def test_a_second_training_begins_with_a_new_generation(regroup: bool) -> None:
    options = {"epsilon": 0.02, "num_iterations": 2, "steps": 4, **SGD}
    again: list[Run] = []
    for base, own in ((GRPOTrainer, {}), (FusedGRPOTrainer, {"regroup": regroup})):
        made, stops = list[Any](), on("on_substep_end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(base, prepare=made.append, callbacks=[stops], **own, **options)
        (trainer,) = made
        trainer.remove_callback(stops)
        if base is GRPOTrainer:
            trainer._step, trainer._buffered_inputs = 0, None
            trainer._metrics["train"].clear()
        else:
            trainer._shares.add({"interrupted": (1, 2)})
        again.append(tiny_run.recorded(trainer))
        trainer.train()
        assert base is GRPOTrainer or trainer._last_loaded_step == -1  # vLLM gets the policy again
        assert not any("interrupted" in x for x in trainer.state.log_history)
    assert_same(*again)


@pytest.mark.usefixtures("forget_warnings")
def test_a_compiled_model_trains_as_stock_trls_and_it_is_said() -> None:
    options = {"torch_compile": True, "torch_compile_backend": "eager", "steps": 1}
    stock = train(GRPOTrainer, **options)
    with pytest.warns(UserWarning, match="torch_compile: the loss's forward is not compiled"):
        ours = trainer_of(FusedGRPOTrainer, options).args
    assert ours.torch_compile
    assert_same(stock, train(FusedGRPOTrainer, **options))
