"""The whole optimizer step of TRL's GRPO trainer: stock, and ours with each of its savings.

A round trains each variant of a scene from the same weights, in another order each round. The first
is not timed: metrics are compared with stock TRL's, and what graphs save is counted. The others
give the CPU seconds of each step but the first, which warms up.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from trl import GRPOTrainer

from benchmarks import groups, parity, tiny_models, tiny_run
from benchmarks.figures import ALL_OPTIONS, DEFAULTS, ONE_GROUP, STOCK, UNGROUPED
from benchmarks.machine import Watch
from benchmarks.memory import MIB, freed_memory_kept, saved_bytes
from benchmarks.run import Results
from benchmarks.tables import SHARES
from benchmarks.timing import order
from grpo_kernels.trl import FusedGRPOTrainer

# name: options of FusedGRPOTrainer; "auto" regroups nothing behind a class that times micro-batches
VARIANTS: dict[str, dict[str, Any] | None] = {
    STOCK: None,
    "fused head alone": {"zero_advantage": "train", "layout": "padded", "regroup": False},
    "trim": {"layout": "trim", "regroup": False},
    UNGROUPED: {"regroup": False},
    DEFAULTS: {"regroup": True},
    ALL_OPTIONS: {"zero_advantage": "skip", "regroup": True},
    ONE_GROUP: {"regroup": False},  # and `Scene.by_groups`
}
EVERY = tuple(name for name in VARIANTS if name != ONE_GROUP)
MOST = tuple(name for name in EVERY if name != ALL_OPTIONS)


@dataclass(frozen=True)
class Scene:
    """A model, its batches, and the variants that train it."""

    variants: tuple[str, ...] = EVERY
    prompt: tuple[int, int] = (16, 64)  # fewest and most tokens
    completion: tuple[int, int] = (48, 384)  # median and most tokens; lengths are log-normal
    sigma: float = 0.8
    checkpointing: bool = False
    vocab: int = 2048
    hidden: int = 128
    layers: int = 4
    sequences: int = 8  # of a micro-batch
    micro_batches: int = 4
    group: int = 8
    generated: int | None = None  # micro-batches at once, which TRL shuffles; None: of a step
    loss_type: str = "dapo"
    steps: int = 7  # of a training, the first of which warms up
    rounds: int = 3  # timed trainings of each variant

    def toy(self) -> Scene:
        """The scene in seconds; with two variants where another scene has all of them."""
        sizes = {"prompt": (4, 9), "completion": (6, 16), "vocab": 256, "hidden": 32, "layers": 2}
        variants = (STOCK, DEFAULTS) if self.variants == MOST else self.variants
        rows = min(self.sequences, 4)
        few = {"sequences": rows, "micro_batches": 8 // rows, "group": 4}
        return replace(self, **sizes, **few, variants=variants, steps=2, rounds=1)

    def by_groups(self) -> Scene:
        """The scene with the same samples, one whole group in each micro-batch."""
        count = self.sequences * self.micro_batches // self.group
        return replace(self, sequences=self.group, micro_batches=count, generated=1)

    @property
    def about(self) -> str:
        prompt = " to ".join(str(x) for x in sorted({*self.prompt}))
        kept = "; activation checkpointing" if self.checkpointing else ""
        loss = "" if self.loss_type == "dapo" else f"; loss of the type {self.loss_type}"
        return (
            f"Qwen3-like model with V {self.vocab}, H {self.hidden}, {self.layers} layers, fp32; "
            f"{self.sequences} sequences a micro-batch, {self.micro_batches} micro-batches a step, "
            f"groups of {self.group}, half of them with equal rewards; prompts of {prompt} tokens, "
            "completions log-normal with "
            f"a median of {self.completion[0]} and at most {self.completion[1]} tokens{kept}{loss}"
        )


SCENES = {
    "short prompts": Scene(),
    "activation checkpointing": Scene(MOST, checkpointing=True),
    "long prompts": Scene(MOST, prompt=(128, 256)),
    "two per micro-batch": Scene(
        (STOCK, UNGROUPED, DEFAULTS, ONE_GROUP), prompt=(256, 256), completion=(48, 256),
        sequences=2, micro_batches=16,
        # a mean over sequences: the same step however samples are divided into generations
        loss_type="grpo",
    ),
}  # fmt: skip
PHASES = ("generation", "scoring", "loss", "optimizer")


class Timed:
    """In front of a trainer: one record a step, of what it logged and of the CPU seconds of each
    phase, without those of a phase within; "other" is what no phase is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.steps: list[dict[str, Any]] = []
        self._spent: Counter[str] = Counter()
        self._open: list[float] = []  # seconds of the phases within each open one
        self._ended = time.process_time()
        super().__init__(*args, **kwargs)

    @contextmanager
    def _within(self, phase: str) -> Iterator[None]:
        self._open.append(0.0)
        started = time.process_time()
        try:
            yield
        finally:
            took = time.process_time() - started
            self._spent[phase] += took - self._open.pop()
            if self._open:
                self._open[-1] += took

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self._within("generation"):
            return super()._generate(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        with self._within("loss" if torch.is_grad_enabled() else "scoring"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._within("loss"):
            return super().training_step(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        optimizer.step = self._within("optimizer")(optimizer.step)
        return optimizer

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        now = time.process_time()
        super().log(logs, *args, **kwargs)
        if "loss" in logs:  # TRL has added its metrics by now
            self._spent["other"] = now - self._ended - self._spent.total()
            seconds = {name: round(self._spent[name], 5) for name in (*PHASES, "other")}
            found = tiny_run.compared(self.state.log_history[-1])
            self.steps.append({"logs": found, "seconds": seconds})
            self._spent.clear()
            self._ended = time.process_time()


class Given:
    scene: Scene
    # bytes that the graph of each micro-batch saves; None: not counted
    saved: list[int] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seen: Counter[tuple[int, ...]] = Counter()  # completions of each prompt so far

    def _generate_single_turn(self, prompt_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> Any:
        completions = []
        for prompt in map(tuple, prompt_ids):
            completions.append(completion(self.scene, f"{self._seen[prompt]} {prompt}"))
            self._seen[prompt] += 1
        return completions, None

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if self.saved is None:
            return super()._compute_loss(model, inputs)
        with saved_bytes(model) as count:
            loss = super()._compute_loss(model, inputs)
            self.saved.append(count())
        return loss


def trainer_of(options: dict[str, Any] | None, *mixins: type, **arguments: Any) -> Any:
    """`FusedGRPOTrainer` with `options`, or TRL's for None, behind `mixins`; prints nothing."""
    base = GRPOTrainer if options is None else FusedGRPOTrainer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = type("Trainer", (*mixins, base), {})(**arguments, **(options or {}))
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def completion(scene: Scene, seed: str) -> list[int]:
    """Token ids that `seed` decides, in every run the same; the last is the end of the sequence."""
    draw = random.Random(zlib.crc32(seed.encode()))
    middle, most = scene.completion
    length = max(4, min(int(middle * draw.lognormvariate(0.0, scene.sigma)), most))
    return [*(draw.randrange(len(tiny_models.SPECIAL), scene.vocab) for _ in range(length - 1)), 1]


def policy(scene: Scene) -> Any:
    h = scene.hidden
    sizes = {"vocab_size": scene.vocab, "hidden_size": h, "intermediate_size": 3 * h}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": h // 8}
    return tiny_models.model(
        num_hidden_layers=scene.layers, max_position_embeddings=1024, **sizes, **heads
    )


def train(
    scene: Scene, name: str, *, watched: bool = False, **changed: Any
) -> tuple[Any, dict[str, Any]]:
    """Train one variant; its model, and ``seconds`` and ``logs`` by step, ``saved`` bytes by
    micro-batch if `watched`, which takes time."""
    options = VARIANTS[name]
    scene = scene.by_groups() if name == ONE_GROUP else scene
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": scene.sequences,
        "gradient_accumulation_steps": scene.micro_batches, "steps_per_generation": scene.generated,
        "num_generations": scene.group, "max_completion_length": scene.completion[1],
        "loss_type": scene.loss_type, "gradient_checkpointing": scene.checkpointing,
        "learning_rate": 1e-4, **changed,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = tiny_run.config(folder, scene.steps, **arguments)
        trainer = trainer_of(
            options, Timed, Given, model=policy(scene), args=args, reward_funcs=tiny_run.reward,
            train_dataset=tiny_run.dataset(words=scene.prompt),
            processing_class=tiny_models.tokenizer(),
        )  # fmt: skip
        trainer.scene, trainer.saved = scene, [] if watched else None
        trainer.train()
    seconds = [without_generation(x["seconds"]) for x in trainer.steps]
    logs = [x["logs"] for x in trainer.steps]
    return trainer.model, {"seconds": seconds, "logs": logs, "saved": trainer.saved}


def without_generation(seconds: dict[str, float]) -> float:
    return sum(seconds.values()) - seconds["generation"]


ONE_GROUP_TOLERANCE = 2e-5  # the weights that it begins a step with have other roundings


def measure_all(results: Results, *, toy: bool = False) -> None:
    threads = torch.get_num_threads()
    tiny_run.quiet()
    gc.freeze()  # every training collects garbage, of which what is imported is none
    try:
        with freed_memory_kept():
            results.merge("runs", step={"threads": 1})
            for name, scene in SCENES.items():
                _measure(results, ("step", "scenes", name), scene.toy() if toy else scene)
            groups.measure_groups(results, toy=toy)
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)


def _measure(results: Results, path: tuple[str, ...], scene: Scene) -> None:
    watch = Watch()
    about = {k: x for k, x in asdict(scene).items() if k != "variants"}
    variants = {name: {"options": VARIANTS[name], "status": "not run"} for name in scene.variants}
    results.merge(*path, **about, about=scene.about, variants=variants)
    stock: list[dict[str, float]] = []
    for i in range(1 + scene.rounds):
        for name in scene.variants if i == 0 else order(scene.variants, i):
            at = (*path, "variants", name)
            with results.noting(*at):
                _, found = train(scene, name, watched=i == 0)
                if name == STOCK and i == 0:
                    stock = found["logs"]
                if i == 0:
                    results.merge(*at, **_compared(name, stock, found))
                else:
                    of_round = [round(x, 5) for x in found["seconds"][1:]]
                    samples = [*results.at(*at).get("samples", []), of_round]
                    results.merge(*at, samples=samples, seconds=seconds(samples))
    results.merge(*path, cpu_of_others=watch.others())


def _compared(name: str, stock: list[dict[str, float]], found: dict[str, Any]) -> dict[str, Any]:
    """Status, differences from stock TRL, saved MiB and shares, of a variant's first round."""
    options, logs, saved = VARIANTS[name] or {}, found["logs"], found["saved"]
    divides = name == ONE_GROUP
    metrics = parity.from_stock(stock, logs)
    differences: dict[str, Any] = {key: metrics.pop(key) for key in ("loss", "grad_norm")}
    worst = max(metrics, key=lambda k: metrics[k])
    other_means = divides or options.get("zero_advantage") == "skip"  # by intent
    bound = ONE_GROUP_TOLERANCE if divides else parity.TOLERANCE
    checked = [*differences.values(), *(() if other_means else (metrics[worst],))]
    return {
        "status": "ok" if max(checked) <= bound else "wrong",
        "differences": {**differences, "metrics": metrics[worst], "worst": worst},
        "saved_mib": {"mean": statistics.fmean(saved) / MIB, "max": max(saved) / MIB},
        "shares": {k: statistics.fmean(log[k] for log in logs) for k in SHARES if k in logs[0]},
    }


def seconds(samples: Sequence[Sequence[float]]) -> float:
    return statistics.fmean(statistics.median(step) for step in zip(*samples, strict=True))
