"""Short trainings with TRL's GRPO trainer on given completions: what `benchmarks.step` measures.

A completion is drawn from a checksum of its prompt, so that every variant of the trainer gets the same tokens.
"""

from __future__ import annotations

import random
import tempfile
import time
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from datasets import Dataset
from torch import Tensor, nn
from trl import GRPOTrainer

from benchmarks import tiny_models, tiny_run
from benchmarks.tables import STOCK
from grpo_kernels.integrations.trl import FusedGRPOTrainer

# name: options of FusedGRPOTrainer
VARIANTS: dict[str, dict[str, Any] | None] = {
    STOCK: None,
    "fused head alone": {"zero_advantage": "train", "padding": "keep"},
    "defaults": {},
    "free": {"padding": "free"},
    "split": {"padding": "split"},
    "skip, split": {"zero_advantage": "skip", "padding": "split"},
    "shared, regrouped": {"shared_prompts": True, "regroup": True},
    "skip, split, shared, regrouped": {
        "zero_advantage": "skip", "padding": "split", "shared_prompts": True, "regroup": True,
    },
}  # fmt: skip
FEW = (STOCK, "fused head alone", "defaults", "split")


@dataclass(frozen=True)
class Scene:
    """A model, its batches, and the variants that train it.

    Attributes:
        prompt: fewest and most tokens of a prompt.
        completion: median and most tokens of a completion; lengths are log-normal of deviation `sigma`.
        steps: optimizer steps of a training, the first of which warms up.
        rounds: timed trainings of each variant.
    """

    variants: tuple[str, ...] = tuple(VARIANTS)
    prompt: tuple[int, int] = (16, 64)
    completion: tuple[int, int] = (48, 384)
    sigma: float = 0.8
    checkpointing: bool = False
    vocab: int = 2048
    hidden: int = 128
    layers: int = 4
    sequences: int = 8  # of a micro-batch
    micro_batches: int = 4
    group: int = 8
    steps: int = 7
    rounds: int = 3

    def toy(self) -> Scene:
        """The scene in seconds."""
        sizes = {"prompt": (4, 9), "completion": (6, 16), "vocab": 256, "hidden": 32, "layers": 2}
        return replace(self, **sizes, sequences=4, micro_batches=2, group=4, steps=2, rounds=1)

    @property
    def about(self) -> str:
        """The scene in words."""
        kept = "; activation checkpointing" if self.checkpointing else ""
        return (
            f"Qwen3-like model with V {self.vocab}, H {self.hidden}, {self.layers} layers, fp32; {self.sequences} "
            f"sequences a micro-batch, {self.micro_batches} micro-batches a step, groups of {self.group}, half of them "
            f"with equal rewards; prompts of {self.prompt[0]} to {self.prompt[1]} tokens, completions log-normal with "
            f"a median of {self.completion[0]} and at most {self.completion[1]} tokens{kept}"
        )


SCENES = {
    "short prompts": Scene(),
    "activation checkpointing": Scene(FEW, checkpointing=True),
    "long prompts": Scene((*FEW, "shared, regrouped"), prompt=(128, 256)),
}


class Given:
    """A trainer whose completions are given; the mixin goes in front of the trainer class."""

    scene: Scene
    given_seconds = 0.0  # CPU seconds of the generation that is replaced
    saved: list[int] | None = None  # bytes that the graph of each micro-batch saves; None: not counted
    _calls = 0

    def _generate_single_turn(self, prompt_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> Any:
        started = time.process_time()
        self._calls += 1
        seen: Counter[tuple[int, ...]] = Counter()
        found = []
        for prompt in map(tuple, prompt_ids):
            found.append(completion(self.scene, f"{self._calls} {seen[prompt]} {prompt}"))
            seen[prompt] += 1
        self.given_seconds += time.process_time() - started
        return found, None

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if self.saved is None:
            return super()._compute_loss(model, inputs)  # type: ignore[misc]
        with saved_bytes(model) as count:
            loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
            self.saved.append(count())
        return loss


class Stock(Given, GRPOTrainer):
    """TRL's."""


class Ours(Given, FusedGRPOTrainer):
    """TRL's with our options."""


class StepClock(transformers.TrainerCallback):
    """CPU seconds of each optimizer step without its generation."""

    def __init__(self, trainer: Given) -> None:
        self.trainer = trainer
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started = time.process_time() - self.trainer.given_seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(time.process_time() - self.trainer.given_seconds - self._started)


class _Held:
    """A tensor that a graph has saved; gone when the graph is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[Callable[[], int]]:
    """Inside, the function that is given returns the bytes that graphs made since have saved, without parameters."""
    held: weakref.WeakSet[_Held] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Held:
        found = _Held(tensor.detach())  # an output with its graph would hold itself
        held.add(found)
        return found

    def count() -> int:
        storages = {x.tensor.untyped_storage().data_ptr(): x.tensor.untyped_storage().nbytes() for x in held}
        for parameter in model.parameters():
            storages.pop(parameter.untyped_storage().data_ptr(), None)
        return sum(storages.values())

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.tensor):
        yield count


def completion(scene: Scene, seed: str) -> list[int]:
    """Token ids that `seed` decides, in every run the same; the last is the end of the sequence."""
    draw = random.Random(zlib.crc32(seed.encode()))
    middle, most = scene.completion
    length = max(4, min(int(middle * draw.lognormvariate(0.0, scene.sigma)), most))
    return [*(draw.randrange(len(tiny_models.SPECIAL), scene.vocab) for _ in range(length - 1)), 1]


def prompts(scene: Scene) -> Dataset:
    """Prompts of random words; every second one starts with `w0`, and `tiny_run.reward` scores its group alike."""
    draw = random.Random(0)
    found = []
    for i in range(64):
        length = draw.randint(*scene.prompt)
        words = [f"w{i % 2}", *(f"w{draw.randrange(1, tiny_models.WORDS)}" for _ in range(length - 1))]
        found.append(" ".join(words))
    return Dataset.from_dict({"prompt": found})


def policy(scene: Scene) -> Any:
    """The model of the scene, the same weights each time."""
    return tiny_models.model(
        vocab_size=scene.vocab,
        hidden_size=scene.hidden,
        intermediate_size=3 * scene.hidden,
        num_hidden_layers=scene.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=scene.hidden // 8,
        max_position_embeddings=1024,
    )


def train(scene: Scene, name: str, *, watched: bool = False, **changed: Any) -> tuple[Any, dict[str, Any]]:
    """Train one variant; returns its model and ``seconds`` by step, ``logs`` by step, ``saved`` bytes by micro-batch.

    Args:
        watched: count what graphs save, which takes time.
        changed: options of the trainer's configuration.
    """
    options = VARIANTS[name]
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": scene.sequences,
        "gradient_accumulation_steps": scene.micro_batches,
        "num_generations": scene.group,
        "max_completion_length": scene.completion[1],
        "gradient_checkpointing": scene.checkpointing,
        "learning_rate": 1e-4,
        **changed,
    }
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer: Any = (Stock if options is None else Ours)(
            model=policy(scene),
            args=tiny_run.config(folder, scene.steps, **arguments),
            reward_funcs=tiny_run.reward,
            train_dataset=prompts(scene),
            processing_class=tiny_models.tokenizer(),
            **(options or {}),
        )
        trainer.scene, trainer.saved = scene, [] if watched else None
        trainer.remove_callback(transformers.PrinterCallback)
        clock = StepClock(trainer)
        trainer.add_callback(clock)
        trainer.train()
    logs = [tiny_run.compared(x) for x in trainer.state.log_history if "loss" in x]
    return trainer.model, {"seconds": clock.seconds, "logs": logs, "saved": trainer.saved}
