"""How noisy the gradient of each KL term is: ``python -m benchmarks.kl_variance``, on the examples' small policy.

The loss's KL term alone (advantages 0, beta 1), as the mean over the tokens of a batch of completions that the policy
sampled: by the estimators of the sampled token, without and with the correction that multiplies them by the ratio
(TRL's `use_bias_correction_kl`), and over the whole vocabulary. The policy is where training without mistakes leads
from the reference, as far along as the KL asked for; prompts stay, completions are sampled anew for each batch, and
the gradients are those of all parameters. Printed, in markdown::

    noise     sqrt(mean ||g - mean g||^2) / ||true||, of one batch
    bias      ||mean g - true|| / ||true||, true being the mean of the whole vocabulary's
    by chance the bias that the noise would leave in the mean of so many batches
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report.columns import markdown
from grpo_kernels import GRPOLoss, ReferenceHead, linear_divergence, linear_logprob

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from arithmetic import Rollout, hidden_states, sample, warm_model, warm_start

NATS = (0.01, 0.1, 1.0)
BATCHES = 32
PROMPTS, GENERATIONS = 16, 8
TERMS: dict[str, dict[str, Any]] = {
    "k1": {"kl_estimator": "k1", "use_bias_correction_kl": False},
    "k1, corrected": {"kl_estimator": "k1"},
    "k2": {"kl_estimator": "k2", "use_bias_correction_kl": False},
    "k2, corrected": {"kl_estimator": "k2"},
    "k3": {"kl_estimator": "k3", "use_bias_correction_kl": False},
    "k3, corrected": {"kl_estimator": "k3"},
    "full": {"kl_estimator": "full"},
}


@dataclass(frozen=True)
class Policies:
    """A reference, and where the policy goes from there."""

    reference: Any
    goal: dict[str, Tensor]
    tokenizer: Any
    problems: list[Any]

    def at(self, share: float) -> Any:
        """The policy that has gone `share` of the way, or beyond it."""
        policy = copy.deepcopy(self.reference)
        with torch.no_grad():
            for name, x in policy.named_parameters():
                x.lerp_(self.goal[name], share)
        return policy

    def rollout(self, policy: Any) -> Rollout:
        """Completions of the same prompts."""
        return sample(policy, self.tokenizer, self.problems[:PROMPTS], num_generations=GENERATIONS)


def policies(warm_steps: int = 150, steps: int = 200) -> Policies:
    """A model that learnt from noisy demonstrations, and the same after some without noise."""
    reference, tokenizer, problems = warm_model(steps=warm_steps)
    trained = copy.deepcopy(reference)
    warm_start(trained, tokenizer, problems, steps=steps, noise=0.0, batch_size=32, learning_rate=2e-3, seed=1)
    return Policies(reference, dict(trained.named_parameters()), tokenizer, problems)


@torch.no_grad()
def kl(found: Policies, policy: Any, rollout: Rollout) -> float:
    """Nats a token, over the whole vocabulary."""
    hidden, other = hidden_states(policy, rollout), hidden_states(found.reference, rollout)
    weights = policy.lm_head.weight, found.reference.lm_head.weight
    mask = rollout.completion_mask
    values = linear_divergence(hidden, weights[0], other, weights[1], mask=mask, backend="torch")
    return float(values.sum() / mask.sum())


def share_for(found: Policies, nats: float) -> float:
    """How far the policy has to go for that KL."""
    low, high = 0.0, 16.0
    for _ in range(16):
        middle = (low + high) / 2
        policy = found.at(middle)
        torch.manual_seed(2)
        low, high = (middle, high) if kl(found, policy, found.rollout(policy)) < nats else (low, middle)
    return high


def gradients(found: Policies, policy: Any, batches: int) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """For each batch its KL, and the gradient of each term as one vector."""
    losses = {name: GRPOLoss(loss_type="dapo", beta=1.0, backend="torch", **options) for name, options in TERMS.items()}
    for i in range(batches):
        torch.manual_seed(100 + i)
        rollout = found.rollout(policy)
        with torch.no_grad():
            other = hidden_states(found.reference, rollout)
            ids, mask = rollout.completion_ids, rollout.completion_mask
            head = found.reference.lm_head.weight
            of_sampled, _ = linear_logprob(other, head, ids, mask=mask, entropy=False)
        found_kl = kl(found, policy, rollout)
        yield (
            found_kl,
            {
                name: _gradient(policy, rollout, loss, of_sampled, ReferenceHead(other, head))
                for name, loss in losses.items()
            },
        )


def _gradient(policy: Any, rollout: Rollout, loss: GRPOLoss, of_sampled: Tensor, head: ReferenceHead) -> Tensor:
    full = loss.config.kl_estimator == "full"
    out = loss(
        hidden_states(policy, rollout),
        policy.lm_head.weight,
        rollout.completion_ids,
        rollout.completion_mask,
        torch.zeros(len(rollout.completion_ids)),
        ref_per_token_logps=None if full else of_sampled,
        reference=head if full else None,
    )
    return torch.cat([x.flatten() for x in torch.autograd.grad(out.loss, list(policy.parameters()))]).double()


def summary(of_batches: list[dict[str, Tensor]]) -> dict[str, tuple[float, float, float]]:
    """(noise, bias, by chance) of each term."""
    stacked = {name: torch.stack([x[name] for x in of_batches]) for name in of_batches[0]}
    true = stacked["full"].mean(dim=0)
    size = true.norm()
    result = {}
    for name, x in stacked.items():
        noise = (x - x.mean(dim=0)).square().sum() / (len(x) - 1)
        bias = (x.mean(dim=0) - true).norm()
        result[name] = tuple(float(value / size) for value in (noise.sqrt(), bias, (noise / len(x)).sqrt()))
    return result  # type: ignore[return-value]


def table(found: Policies, nats: tuple[float, ...], batches: int, progress: Callable[[str], None]) -> list[str]:
    """A row for each term, and at each distance its noise, over that of the whole vocabulary's too, and its bias."""
    head, cells = ["KL term"], {name: [name] for name in TERMS}
    for target in nats:
        policy = found.at(share_for(found, target))
        kls, of_batches = zip(*gradients(found, policy, batches), strict=True)
        progress(f"{target:g} nats: measured at {sum(kls) / len(kls):.3g}")
        figures = summary(list(of_batches))
        head += [f"{target:g} nats: noise", "/ full", "bias", "by chance"]
        for name, (noise, bias, chance) in figures.items():
            cells[name] += [f"{noise:.2f}", f"{noise / figures['full'][0]:.1f}", f"{bias:.2f}", f"{chance:.2f}"]
    return markdown(head, list(cells.values()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kl_variance", description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=BATCHES)
    options = parser.parse_args()
    lines = table(policies(), NATS, options.batches, lambda text: print(text, flush=True))
    print(f"\n{options.batches} batches of {PROMPTS} x {GENERATIONS} completions, gradients of all parameters\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
