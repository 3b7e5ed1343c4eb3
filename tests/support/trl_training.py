"""Short trainings with TRL's trainers and with ours: what they log, and that it is the same."""

from __future__ import annotations

import dataclasses
import gc
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
import trl
from trl.experimental.gmpo import GMPOTrainer

from benchmarks import parity, tiny_models, tiny_run
from grpo_kernels.integrations.trl import FusedLossMixin

gc.freeze()  # accelerate collects garbage after every training, for a third of a second with all that is imported here


class FusedGMPOTrainer(FusedLossMixin, GMPOTrainer):
    pass


class Written:
    """In front of a trainer: completions that depend on the prompt, on which of its completions it is, and the call."""

    _calls = 0

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        self._calls += 1
        completions, seen = [], Counter[tuple[int, ...]]()
        for prompt in map(tuple, prompt_ids):
            draw = random.Random(hash((prompt, seen[prompt], self._calls)))
            seen[prompt] += 1
            words = [draw.randrange(len(tiny_models.SPECIAL), tiny_models.VOCAB) for _ in range(draw.randrange(2, 11))]
            completions.append([*words, 1])  # the end of the sequence
        return completions, None


@dataclasses.dataclass(frozen=True)
class Run:
    """What a training has logged, one mapping an optimizer step; the loss of every micro-batch; and the trainer."""

    steps: list[dict[str, float]]
    losses: list[float]
    trainer: Any


def mixed(mixin: type, trainer_class: type) -> type:
    """`trainer_class` with `mixin` in front."""
    return type(trainer_class.__name__, (mixin, trainer_class), {})


def trainer_of(trainer_class: Any, args: Any, policy: Any, **arguments: Any) -> Any:
    """A trainer of `policy` on the prompts of `tiny_run`, with its reward where a reward is asked for."""
    tiny_run.quiet()
    rewarded = {"reward_funcs": tiny_run.reward} if isinstance(args, (trl.GRPOConfig, trl.RLOOConfig)) else {}
    given = {"train_dataset": tiny_run.dataset(), **rewarded, **arguments}
    trainer = trainer_class(model=policy, args=args, processing_class=tiny_models.tokenizer(), **given)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def train(
    trainer_class: Any,
    steps: int = 2,
    *,
    config_class: Any = trl.GRPOConfig,
    model: Any = "qwen3",
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Run:
    """A training of `model`, or of one layer of the kind of that name; `options` that the configuration lacks are the
    trainer's.

    `prepare` gets the trainer before it starts.
    """
    of_config = {x.name for x in dataclasses.fields(config_class)}
    arguments = {name: options.pop(name) for name in [*options] if name not in of_config}
    policy = tiny_models.model(model, dtype=dtype, num_hidden_layers=1) if isinstance(model, str) else model
    history = tiny_run.History()
    with tempfile.TemporaryDirectory() as folder:
        if issubclass(config_class, trl.GRPOConfig):
            args = tiny_run.config(folder, steps, config_class, **options)
        else:
            args = config_class(**{**tiny_run.common_options(folder, steps), **options})
        if not policy.config._name_or_path:  # TRL loads the reference from where the policy came
            policy.save_pretrained(folder)
            policy.config._name_or_path = folder
        trainer = trainer_of(trainer_class, args, policy, **arguments)
        tiny_run.record(trainer, history)
        if prepare is not None:
            prepare(trainer)
        trainer.train()
    return Run(history.steps, history.losses, trainer)


def assert_same(stock: Run, ours: Run, tolerance: float = parity.TOLERANCE) -> None:
    """Every logged number and every micro-batch's loss."""
    errors = parity.differences(stock.steps, ours.steps)
    assert max(errors.values()) <= tolerance, errors
    assert ours.losses == pytest.approx(stock.losses, rel=tolerance, abs=tolerance)


def count_scored(trainer: Any) -> None:
    """`trainer.scored` counts forwards of the policy without gradient, and the sequences with a token to score."""
    trainer.scored, score = Counter(), trainer._get_per_token_logps_and_entropies

    def counted(model: Any, ids: Any, mask: Any, columns: int, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() and model is trainer.model:
            trainer.scored["forwards"] += -(-len(ids) // (kwargs.get("batch_size") or len(ids)))
            trainer.scored["sequences"] += int((mask[:, -columns:] != 0).any(dim=1).sum())
        return score(model, ids, mask, columns, *args, **kwargs)

    trainer._get_per_token_logps_and_entropies = counted


def evaluations(trainer: Any) -> list[dict[str, float]]:
    """What each evaluation has logged."""
    return [tiny_run.compared(entry) for entry in trainer.state.log_history if "eval_loss" in entry]
