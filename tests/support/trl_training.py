"""Short trainings with TRL's trainers and with ours: what they log, and that it is the same. TRL's
GRPO loss out of all logits, to hold a trainer against: its own, and with the exact KL."""

from __future__ import annotations

import dataclasses
import gc
import math
import random
import tempfile
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from torch import Tensor
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer

from benchmarks import parity, tiny_models, tiny_run
from benchmarks.tiny_run import Run
from grpo_kernels.trl import FusedLossMixin
from grpo_kernels.trl.fused_head import adapters_allowed
from tests.support.case_builder import seeded
from tests.support.reference import evaluate, mean_metrics, pick

# accelerate collects garbage after every training, a third of a second with all that is imported
gc.freeze()

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}


class FusedGMPOTrainer(FusedLossMixin, GMPOTrainer):
    pass


class Written:
    """In front of a trainer: completions that depend on prompt, place in the group, and call."""

    _calls = 0

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        self._calls += 1
        completions, seen = [], Counter[tuple[int, ...]]()
        for prompt in map(tuple, prompt_ids):
            draw = random.Random(hash((prompt, seen[prompt], self._calls)))
            seen[prompt] += 1
            words = range(draw.randrange(2, 11))
            first = len(tiny_models.SPECIAL)
            ids = [draw.randrange(first, tiny_models.VOCAB) for _ in words]
            completions.append([*ids, 1])  # the end of the sequence
        return completions, None


class Drawn(Written):
    """In front of a trainer of distillation."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        return super()._generate_single_turn(*args, **kwargs)[0]  # type: ignore[no-any-return]


class Curious:
    """In front of a trainer: it scores other completions whenever it can, and keeps `seen`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[Tensor] = []

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        self._look()
        return super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        self._look()
        return super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]

    def _look(self) -> None:
        score = self._get_per_token_logps_and_entropies  # type: ignore[attr-defined]
        ids = 3 + torch.arange(16 * 9).view(16, 9) % 50
        with torch.no_grad():
            for model in (self.model, self.ref_model):  # type: ignore[attr-defined]
                self.seen.append(score(model, ids, torch.ones_like(ids), 5)[0])


class Half:
    """In front of a trainer: it keeps every second sample, the last one first."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        size = len(batch["prompt_ids"])
        chosen = range(size - 1, 0, -2)
        for name, x in batch.items():
            if isinstance(x, Tensor) and x.dim() and len(x) == size:
                batch[name] = x[[*chosen]]
            elif isinstance(x, list) and len(x) == size:
                batch[name] = [x[i] for i in chosen]
        return batch


def mixed(mixin: type, trainer_class: type) -> type:
    """`trainer_class` with `mixin` in front."""
    return type(trainer_class.__name__, (mixin, trainer_class), {})


def train(
    trainer: Any, steps: int = 2, *, config_class: Any = trl.GRPOConfig, **options: Any
) -> Run:
    """A training by a configuration of `options`; those that it lacks are `tiny_run.train`'s."""
    of_config = {x.name for x in dataclasses.fields(config_class)}
    arguments = {name: options.pop(name) for name in [*options] if name not in of_config}
    with tempfile.TemporaryDirectory() as folder:
        if issubclass(config_class, trl.GRPOConfig):
            args = tiny_run.config(folder, steps, config_class, **options)
        else:
            args = config_class(**{**tiny_run.common_options(folder, steps), **options})
        return tiny_run.train(trainer, args, **arguments)


def assert_same(stock: Run, ours: Run, tolerance: float | None = None) -> None:
    """Every logged number, and to 1e-6 each micro-batch's loss; or all within `tolerance`.

    Where samples are regrouped, the sum of each optimizer step's losses.
    """
    of_steps, of_losses = (parity.TOLERANCE, 1e-6) if tolerance is None else (tolerance, tolerance)
    errors = parity.differences(stock.steps, ours.steps)
    assert max(errors.values()) <= of_steps, errors
    losses = [stock.losses, ours.losses]
    if getattr(ours.trainer, "regroup", False):
        losses = [sums(stock), sums(ours)]
        of_losses *= 5  # sums in another order, over steps
    assert losses[1] == pytest.approx(losses[0], rel=of_losses, abs=of_losses)


def sums(run: Run) -> list[float]:
    count = run.trainer.args.gradient_accumulation_steps
    return [sum(run.losses[i : i + count]) for i in range(0, len(run.losses), count)]


def count_scored(trainer: Any) -> None:
    """`trainer.scored` counts the policy's forwards without gradient, and sequences with tokens.

    The forward of one sample, which says whether the model serves trees, does not count.
    """
    trainer.scored = Counter()

    def count(_: Any, __: Any, given: dict[str, Any]) -> None:
        scores = given.get("fused_lm_head") and len(given["labels"]) > 1
        if scores and not torch.is_grad_enabled():
            trainer.scored["forwards"] += 1
            trainer.scored["sequences"] += int((given["labels"] != -100).any(dim=1).sum())

    trainer.model.register_forward_pre_hook(count, with_kwargs=True)


def evaluations(trainer: Any) -> list[dict[str, float]]:
    return [tiny_run.compared(entry) for entry in trainer.state.log_history if "eval_loss" in entry]


def divergence_inputs(of_masked: float = 0.7, *, width: int = 16) -> dict[str, Any]:
    """Arguments of TRL's divergence; the student's states are `of_masked` where nothing counts."""
    draw = partial(torch.randn, generator=seeded("distillation"))
    mask = draw(3, 7) < 0.25
    student = draw(3, 7, 12).masked_fill(~mask[..., None], of_masked)
    return {
        "student_hidden_states": student.requires_grad_(),
        "teacher_hidden_states": draw(3, 7, width),
        "student_lm_head_weight": draw(50, 12).requires_grad_(),
        "teacher_lm_head_weight": draw(50, width),
        "completion_mask": mask.long(),
    }


class AllLogits(GRPOTrainer):
    """TRL's trainer with log-probabilities out of the model's own logits; it refuses nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with adapters_allowed():
            super().__init__(*args, **kwargs)

    def outside(self, logits: Tensor) -> Tensor:
        """True where an id is none that the sampler may choose."""
        return torch.zeros_like(logits, dtype=torch.bool)

    def _get_per_token_logps_and_entropies(self, model, ids, mask, count, *_, **options):
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -count - 1 : -1]
        labeled, outside = mask[:, -count:], self.outside(logits)
        logits = (logits / self.temperature).masked_fill(outside, -math.inf)
        log_probs = logits.log_softmax(-1)
        logps = log_probs.gather(-1, ids[:, -count:, None])[..., 0].masked_fill(labeled == 0, 0)
        entropies = -(log_probs.exp() * log_probs.masked_fill(outside, 0.0)).sum(-1) * labeled
        return logps, entropies if options.get("compute_entropy") else None, None


class Checked(Written):
    """Each loss, its gradient and its KL metric against all logits of policy and reference."""

    accelerator: Any
    args: Any
    ref_model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kls: list[float] = []

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
        want, wanted_metrics = self.plain(model, inputs)
        metrics = self._metrics["train" if model.training else "eval"]  # type: ignore[attr-defined]
        torch.testing.assert_close(loss.detach(), want.detach(), rtol=1e-5, atol=1e-6)
        for name in ("kl", "policy_loss") if self.args.entropy_coef else ("kl",):
            wanted = float(wanted_metrics[name])
            assert metrics[name][-1] == pytest.approx(wanted, rel=1e-5, abs=1e-7), name
        self.kls.append(metrics["kl"][-1])
        if torch.is_grad_enabled():
            trained = [x for x in model.parameters() if x.requires_grad]
            gradients = (torch.autograd.grad(x, trained, retain_graph=True) for x in (loss, want))
            found, exact = gradients
            largest = max(float(x.abs().max()) for x in exact)
            for got, right in zip(found, exact, strict=True):
                assert float((got - right).abs().max()) <= 2e-5 * largest
        return loss

    def plain(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        args, ids, mask = self.args, inputs["completion_ids"], inputs["completion_mask"]
        everything = torch.cat([inputs["prompt_ids"], ids], 1)
        attended = torch.cat([inputs["prompt_mask"], mask], 1)

        def log_probs(of: Any) -> Tensor:
            logits = of(input_ids=everything, attention_mask=attended).logits / args.temperature
            return logits[:, -ids.shape[1] - 1 : -1].log_softmax(-1)

        policy = log_probs(model)
        with torch.no_grad():
            if self.ref_model is not None:
                reference = log_probs(self.ref_model)
            else:
                with model.disable_adapter():
                    reference = log_probs(model)
        counted = mask * inputs.get("tool_mask", 1)
        logps = policy.gather(-1, ids[..., None])[..., 0]
        entropies = -(policy.exp() * policy).sum(-1)
        divergences = (policy.exp() * (policy - reference)).sum(-1)
        trains, items = model.training, inputs["num_items_in_batch"]
        items = items / args.steps_per_generation if trains else items
        names = ("loss_type", "importance_sampling_level", "epsilon", "beta", "entropy_coef")
        case: Any = SimpleNamespace(
            config={name: getattr(args, name) for name in names} | {"kl_estimator": "full"},
            others={},
            completion_mask=counted,
            advantages=inputs["advantages"],
            old_per_token_logps=inputs.get("old_per_token_logps"),
            importance_sampling_ratio=None,
            num_items_in_batch=items,
        )
        found = evaluate(case, *(pick(x, counted != 0) for x in (logps, entropies, divergences)))
        accumulated = self.current_gradient_accumulation_steps if trains else 1  # type: ignore[attr-defined]
        return found.loss / accumulated, mean_metrics(found)
