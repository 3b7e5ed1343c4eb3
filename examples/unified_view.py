"""DeepSeekMath's unified view: SFT, RFT, online RFT and three kinds of GRPO are one loop with two choices.

Each step's gradient is the sum of coefficient x gradient of log p over the tokens of some completions (section 5.2 of
https://arxiv.org/abs/2402.03300). A method says whose completions (`data`) and which coefficients; all else is shared:
the start, the optimiser, the number of completions a step. Written: curves.json, which
`python -m benchmarks.curves` draws.
The claims at the end: RFT ends above SFT, and what learns from the policy's own samples above RFT, if the reward is
right. A reward that has to be learnt from samples of this task is not. docs/unified-view.md says more.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import multiprocessing
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from begin import begin

if __name__ == "__main__":
    begin(__doc__)

import torch
from arithmetic import (
    EOS,
    PAD,
    Problem,
    Rollout,
    accuracy,
    encode,
    evaluate,
    hidden_states,
    noisy_working,
    sample,
    take_step,
    warm_model,
)
from iterative_grpo import RewardModel
from process_supervision import score_steps
from torch import Tensor

from grpo_kernels import LossConfig, grpo_loss, linear_logprob, presets
from grpo_kernels.advantages import group_advantages, process_advantages

PROMPTS, GENERATIONS, NOISE = 16, 8, 0.5
LABELLED, ITERATIONS = (
    4,
    3,
)  # samples a problem that a learnt reward begins with; see `Method.renews`
LEARNT = "iterative GRPO, learnt reward"
Begin, Run = tuple[Any, Any, list[Problem]], dict[str, Any]


@dataclass(frozen=True)
class Size:
    largest: int  # digit
    warm_steps: int
    steps: int
    reward_steps: int  # of the first reward model
    every: int  # how many steps there are between two evaluations


FULL, QUICK = Size(5, 250, 60, 150, 6), Size(2, 40, 2, 4, 1)


def ones(rollout: Rollout) -> Tensor:
    """SFT: every completion counts alike."""
    return torch.ones(len(rollout.texts))


def accepted(rollout: Rollout) -> Tensor:
    """RFT: 1 for a right answer, 0 for a wrong one."""
    return (accuracy(rollout) >= 1.0).float()


def outcome(rollout: Rollout) -> Tensor:
    """GRPO with outcome supervision: the answer's reward against its group's."""
    return group_advantages(accuracy(rollout), GENERATIONS)


def process(rollout: Rollout) -> Tensor:
    """GRPO with process supervision: what the steps still to come are worth, (B, T)."""
    return process_advantages(
        *score_steps(rollout), GENERATIONS, completion_mask=rollout.completion_mask
    )


def learnt(reward_model: RewardModel, rollout: Rollout) -> Tensor:
    """Outcome supervision by a reward model, which is trained along."""
    return group_advantages(reward_model.score(rollout), GENERATIONS)


@dataclass(frozen=True)
class Method:
    """`data`: "demonstrations", "start" (samples of the model before training) or "policy" (of the current one)."""

    data: str
    coefficients: Callable[[Rollout], Tensor] | None  # None: `learnt`
    config: LossConfig
    renews: bool = False  # whether each of the `ITERATIONS` has the policy at its start for the KL term's reference


METHODS = {
    "SFT": Method("demonstrations", ones, presets.REINFORCE),
    "RFT": Method("start", accepted, presets.REINFORCE),
    "online RFT": Method("policy", accepted, presets.REINFORCE),
    "GRPO, outcome": Method("policy", outcome, presets.GRPO),
    "GRPO, process": Method("policy", process, presets.GRPO),
    "iterative GRPO": Method("policy", outcome, presets.GRPO, renews=True),
    LEARNT: Method("policy", None, presets.GRPO, renews=True),
}
CHECKED = (
    "online RFT",
    "GRPO, outcome",
    "GRPO, process",
    "iterative GRPO",
)  # the policy's own samples, a right reward


def demonstrate(tokenizer: Any, problems: Sequence[Problem]) -> Rollout:
    """As many noisy workings as there would be samples; wrong about as often as those that the model began with."""
    repeated = [problem for problem in problems for _ in range(GENERATIONS)]
    texts = [noisy_working(problem, NOISE, random) for problem in repeated]
    longest = max(map(len, texts)) + 1
    ids = encode(tokenizer, [text + EOS + PAD * (longest - len(text) - 1) for text in texts])
    mask = (ids != tokenizer.pad_token_id).long()
    return Rollout(
        encode(tokenizer, [problem.prompt for problem in repeated]), ids, mask, repeated, texts
    )


def completions(
    data: str, models: dict[str, Any], tokenizer: Any, problems: Sequence[Problem]
) -> Rollout:
    """`GENERATIONS` of each problem, as `Method.data` says."""
    if data == "demonstrations":
        return demonstrate(tokenizer, problems)
    return sample(models[data], tokenizer, problems, GENERATIONS)


def loss(
    policy: Any, reference: Any, rollout: Rollout, coefficients: Tensor, config: LossConfig
) -> Tensor:
    """The one call that all methods make."""
    batch, ref = (rollout.completion_ids, rollout.completion_mask), None
    if config.beta:
        with torch.no_grad():
            states, head = hidden_states(reference, rollout), reference.lm_head
            ref = linear_logprob(states, head, batch[0], mask=batch[1], entropy=False).logps
    states, head = hidden_states(policy, rollout), policy.lm_head
    return grpo_loss(
        states, head, *batch, coefficients, ref_per_token_logps=ref, config=config
    ).loss


def train(warm: Begin, name: str, seed: int, size: Size) -> Run:
    """The reward, how many completions had been used by then, and how many of them had a coefficient other than 0."""
    torch.manual_seed(seed)
    random.seed(seed)
    start, tokenizer, problems = warm
    method, policy, reference = METHODS[name], copy.deepcopy(start), start
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    coefficients_of, reward_model, used, carried = method.coefficients, None, 0, 0
    if coefficients_of is None:
        reward_model = RewardModel(start, tokenizer)
        reward_model.train(sample(start, tokenizer, problems, LABELLED), steps=size.reward_steps)
        coefficients_of, used = partial(learnt, reward_model), LABELLED * len(problems)
    found: Run = {"method": name, "seed": seed, "completions": [], "carried": [], "reward": []}

    def record() -> None:
        reward = round(evaluate(policy, tokenizer, problems * 2, seed), 4)
        for key, value in (("completions", used), ("carried", carried), ("reward", reward)):
            found[key].append(value)

    record()
    for step in range(size.steps):
        first = step * PROMPTS % len(problems)
        some = (problems * 2)[first : first + PROMPTS]
        rollout = completions(method.data, {"start": start, "policy": policy}, tokenizer, some)
        coefficients = coefficients_of(rollout)
        take_step(optimizer, loss(policy, reference, rollout, coefficients, method.config))
        used += len(rollout.texts)
        carried += int((coefficients != 0).view(len(rollout.texts), -1).any(1).sum())
        if reward_model is not None:
            reward_model.train(rollout, steps=4)
        if method.renews and (step + 1) % max(size.steps // ITERATIONS, 1) == 0:
            reference = copy.deepcopy(policy)
        if (step + 1) % size.every == 0:
            record()
    return found


def ends(runs: Sequence[Run], name: str) -> list[float]:
    """The last reward of each run of a method."""
    return [run["reward"][-1] for run in runs if run["method"] == name]


def table(runs: Sequence[Run]) -> list[str]:
    """Of each method the reward at the end, mean and range over the seeds, and the completions that had a say."""
    lines = [
        f"{'method':<32}{'reward at the end':>24}{'completions':>13}{'with a coefficient':>20}"
    ]
    for name in METHODS:
        some, last = [run for run in runs if run["method"] == name], ends(runs, name)
        share = statistics.fmean(
            run["carried"][-1] / (run["completions"][-1] - run["completions"][0]) for run in some
        )
        reward = f"{statistics.fmean(last):.3f} ({min(last):.3f}-{max(last):.3f})"
        lines.append(f"{name:<32}{reward:>24}{some[0]['completions'][-1]:>13}{share:>20.2f}")
    return lines


def _run(arguments: tuple[Any, ...]) -> Run:
    torch.set_num_threads(1)
    return train(*arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument(
        "--quick", action="store_true", help="an easier task and a few steps; nothing is judged"
    )
    parser.add_argument("--output", type=Path, default=Path("build/unified_view"))
    parser.add_argument(
        "--report", type=Path, metavar="JSON", help="train nothing: show these curves"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    runs = json.loads(options.report.read_text())["runs"] if options.report else train_all(options)
    print("\n".join(table(runs)))
    mean = {name: statistics.fmean(ends(runs, name)) for name in METHODS}
    own = [mean[name] for name in CHECKED]
    if not options.quick:
        assert mean["RFT"] > mean["SFT"] + 0.1, "rejecting wrong answers is no better than SFT"
        assert min(own) > mean["RFT"] + 0.1, (
            "the policy's own samples are no better than the first model's"
        )
    print(
        f"The policy's own samples, checked: {min(own):.0%} to {max(own):.0%} right in the end.",
        end=" ",
    )
    print(
        f"The first model's samples, checked: {mean['RFT']:.0%}. Demonstrations: {mean['SFT']:.0%}"
    )


def train_all(options: argparse.Namespace) -> list[Run]:
    """Every method from every seed; written to curves.json."""
    size = QUICK if options.quick else FULL
    warm = warm_model(noise=NOISE, largest=size.largest, steps=size.warm_steps)
    work = [(warm, name, seed, size) for seed in range(1, options.seeds + 1) for name in METHODS]
    runs = []
    with (
        multiprocessing.get_context("spawn").Pool(options.processes)
        if options.processes > 1
        else nullcontext() as pool
    ):
        for run in pool.imap(_run, work) if pool else map(_run, work):
            first, *_, last = run["reward"]
            print(
                f"{run['method']}, seed {run['seed']}: {first:.3f} right before, {last:.3f} after",
                flush=True,
            )
            runs.append(run)
    lines = ",\n".join(json.dumps(run) for run in runs)
    made = {
        "date": datetime.date.today().isoformat(),
        "versions": {"torch": torch.__version__},
        "device": "cpu",
    }
    head = json.dumps({**made, "dtype": "float32", "model": "H 64, 2 layers", "v": 64})[1:-1]
    (options.output / "curves.json").write_text(f'{{{head}, "runs": [\n{lines}\n]}}\n')
    return runs


if __name__ == "__main__":
    main()
