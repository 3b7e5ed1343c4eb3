"""``python -m benchmarks.other_trainers``: steps of TRL's other trainers, stock and patched.

The model is that of `benchmarks.step`, on a CPU in fp32. DPO and KTO have prompts of `PROMPT`
tokens and answers of log-normal lengths; SFT has texts of such lengths; RLOO has groups of 4 on one
prompt, two of them in a micro-batch. CPU seconds of a step, the first one left out: the median over
rounds, stock and ours in turn. Losses and metrics of stock TRL are compared first.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import warnings
from typing import Any

import transformers
import trl
from datasets import Dataset

from benchmarks import parity, step, tiny_models, tiny_run
from benchmarks.figures import STOCK
from benchmarks.memory import freed_memory_kept
from grpo_kernels.trl import patch_trl

PROMPT, MEDIAN, LONGEST, ROWS, STEPS, ROUNDS = 192, 48, 256, 48, 5, 3
WAYS: dict[str, dict[str, Any] | None] = {
    STOCK: None, "head alone": {"layout": "padded"}, "trim": {"layout": "trim"},
    "default": {},
}  # fmt: skip


def words(count: int, draw: random.Random) -> str:
    return " ".join(f"w{draw.randrange(tiny_models.WORDS)}" for _ in range(count))


def trainers() -> dict[str, tuple[Any, Any, dict[str, list[Any]], dict[str, Any]]]:
    draw = random.Random(0)

    def length() -> int:
        return max(4, min(int(MEDIAN * draw.lognormvariate(0.0, 0.8)), LONGEST))

    prompts = [words(PROMPT, draw) for _ in range(ROWS)]
    better, worse, texts = ([" " + words(length(), draw) for _ in range(ROWS)] for _ in range(3))
    size = {"per_device_train_batch_size": 8, "max_length": None}
    rl = {"per_device_train_batch_size": 8, "num_generations": 4}
    rl |= {"max_completion_length": LONGEST, "gradient_accumulation_steps": 2, "beta": 0.0}
    pairs = {"prompt": prompts, "chosen": better, "rejected": worse}
    labeled = {"prompt": prompts, "completion": better, "label": [True, False] * (ROWS // 2)}
    return {
        "SFT": (trl.SFTTrainer, trl.SFTConfig, {"text": texts}, size),
        "DPO": (trl.DPOTrainer, trl.DPOConfig, pairs, size),
        "KTO": (trl.KTOTrainer, trl.KTOConfig, labeled, size),
        "RLOO": (trl.RLOOTrainer, trl.RLOOConfig, {"prompt": prompts}, rl),
    }


class Given(step.Given):
    """RLOO has no log-probabilities of a sampler."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        return super()._generate_single_turn(*args, **kwargs)[0]


def train(name: str, way: str) -> tuple[list[dict[str, float]], list[float]]:
    trainer_class, config_class, data, options = trainers()[name]
    front = (step.Timed, Given) if name == "RLOO" else (step.Timed,)
    given = {"reward_funcs": tiny_run.reward} if name == "RLOO" else {}
    patch = WAYS[way]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = step.policy(step.SCENES["long prompts"])
        policy.save_pretrained(folder)  # TRL loads the reference from there
        policy.config._name_or_path = folder
        undo = None if patch is None else patch_trl(**patch)
        try:
            trainer = type("Trainer", (*front, trainer_class), {})(
                model=policy,
                args=config_class(**{**tiny_run.common_options(folder, STEPS), **options}),
                train_dataset=Dataset.from_dict(data),
                processing_class=tiny_models.tokenizer(),
                **given,
            )
            trainer.scene = step.SCENES["long prompts"]
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()
        finally:
            if undo is not None:
                undo.__exit__()
    seconds = [step.without_generation(x["seconds"]) for x in trainer.steps]
    return [x["logs"] for x in trainer.steps], seconds[1:]


def main() -> None:
    tiny_run.quiet()
    print("| trainer | way | times as fast as stock | tokens computed | largest difference |")
    print("|---|---|---|---|---|")
    with freed_memory_kept():
        for name in trainers():
            taken: dict[str, list[float]] = {way: [] for way in WAYS}
            logged: dict[str, list[dict[str, float]]] = {}
            for _ in range(ROUNDS):
                for way in WAYS:
                    logged[way], seconds = train(name, way)
                    taken[way].append(statistics.fmean(seconds))
            for way, logs in logged.items():
                faster = statistics.median(taken[STOCK]) / statistics.median(taken[way])
                computed = statistics.fmean(x.get("tokens/computed", 1.0) for x in logs)
                apart = max(parity.from_stock(logged[STOCK], logs).values())
                row = f"| {name} | {way} | {faster:.2f} | {computed:.2f} | {apart:.1e} |"
                print(row, flush=True)


if __name__ == "__main__":
    main()
