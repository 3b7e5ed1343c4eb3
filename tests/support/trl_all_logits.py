"""TRL's GRPO loss out of all logits, to hold a trainer against: its own, and with the exact KL."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from grpo_kernels.trl.fused_head import adapters_allowed
from tests.support.reference import evaluate, mean_metrics, pick
from tests.support.trl_training import Written


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
