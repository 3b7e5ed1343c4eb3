"""TRL's GRPO trainers on several gloo processes, under what accelerate makes of the model: DDP, FSDP1, FSDP2 or
ZeRO-1 to 3.

Completions come from the prompts, so that any number of processes trains on the same ones.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import transformers
import trl
from torch import Tensor

from benchmarks import head_flops, tiny_models, tiny_run
from grpo_kernels.base.checks import is_dtensor
from grpo_kernels.head.module import gather_of
from grpo_kernels.trl import FusedGRPOTrainer
from tests.support.trl_training import Written

SEQUENCES = 8  # of all processes together, a micro-batch


class OursWritten(Written, FusedGRPOTrainer):
    pass


class StockWritten(Written, trl.GRPOTrainer):
    pass


@dataclass(frozen=True)
class Job:
    """One training run: how the model is divided, which model it is, and options of the configuration and trainer."""

    wrap: str = "DDP"
    stock: bool = False
    kind: str = "qwen3"
    lora: tuple[str, ...] = ()  # the modules that get an adapter
    options: dict[str, Any] = field(default_factory=lambda: {"beta": 0.04, "num_iterations": 2})
    arguments: dict[str, Any] = field(default_factory=dict)
    counted: bool = False  # whether to count the operations of the head


@dataclass(frozen=True)
class Found:
    """What one rank has logged, all that TRL means to log, and what the model has become."""

    steps: list[dict[str, float]]
    classes: list[str]  # of the wrapped model and its bases
    head: str
    counts: head_flops.Counts  # if the job is to be counted
    moved: dict[str, Tensor]  # by parameter: what training has added to it


def train(
    job: Job,
    folder: str,
    processes: int = 1,
    prepare: Callable[[Any], None] | None = None,
    **options: Any,
) -> tuple[list[dict[str, float]], dict[str, Tensor], Any]:
    """What two steps have logged, what they have added to each parameter, and the trainer; `folder`: `save_model`."""
    tiny_run.quiet()
    policy = tiny_models.model(job.kind, num_hidden_layers=1)
    policy.config._name_or_path = folder  # TRL loads the reference from there
    arguments: dict[str, Any] = {**job.arguments}
    if job.lora:
        from peft import LoraConfig

        chosen = LoraConfig(
            r=4, target_modules=[*job.lora], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        arguments["peft_config"] = chosen
    history = tiny_run.History()
    with tempfile.TemporaryDirectory() as output:
        options = {"optim": "sgd", "learning_rate": 0.1, **job.options, **options}
        args = tiny_run.config(
            output, 2, per_device_train_batch_size=SEQUENCES // processes, **options
        )
        trainer = (StockWritten if job.stock else OursWritten)(
            model=policy,
            args=args,
            processing_class=tiny_models.tokenizer(),
            reward_funcs=tiny_run.reward,
            train_dataset=tiny_run.dataset(),
            **arguments,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        tiny_run.record(trainer, history)
        if prepare is not None:
            prepare(trainer)
        before = _whole_parameters(trainer.model)
        trainer.train()
    after = _whole_parameters(trainer.model)
    return history.steps, {name: x - before[name] for name, x in after.items()}, trainer


def _whole_parameters(model: Any) -> dict[str, Tensor]:
    """Copies of the parameters of a model, whole however it is divided."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    is_fsdp1 = isinstance(model, FullyShardedDataParallel)
    gather = gather_of(model.parameters()) or nullcontext
    with FullyShardedDataParallel.summon_full_params(model) if is_fsdp1 else gather():
        names = {
            name.replace("_fsdp_wrapped_module.", ""): x.detach()
            for name, x in model.named_parameters()
        }
        return {
            name: (x.full_tensor() if is_dtensor(x) else x).clone() for name, x in names.items()
        }


def save_model(kind: str, folder: str) -> None:
    """The model of `train`, for the reference."""
    tiny_models.model(kind, num_hidden_layers=1).save_pretrained(folder)


def train_all(
    rank: int, world_size: int, jobs: dict[str, Job], folders: dict[str, str]
) -> dict[str, Found]:
    """For `run_ranks`: what came of each job, by its name."""
    from accelerate.state import AcceleratorState, GradientState

    results = {}
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"
    )  # accelerate wants them, and the group is there
    for name, job in jobs.items():
        if job.wrap.startswith("ZeRO") and "deepspeed" not in sys.modules:
            _find_deepspeed()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        counts = head_flops.Counts()
        counting = head_flops.watched(counts) if job.counted else nullcontext()
        with counting as prepare, WRAPS[job.wrap]() as options:
            logged, moved, trainer = train(job, folders[job.kind], world_size, prepare, **options)
        results[name] = Found(
            steps=logged,
            classes=[x.__name__ for x in type(trainer.model_wrapped).__mro__],
            head=type(trainer.model.get_output_embeddings()).__name__,
            counts=counts,
            moved=moved,
        )
    return results


@contextmanager
def _ddp() -> Iterator[dict[str, Any]]:
    yield {}


@contextmanager
def fsdp2_without_gpus() -> Iterator[None]:
    """accelerate's own FSDP, which it takes on GPUs alone: without them it makes DDP of it and says nothing."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    begin = AcceleratorState.__init__

    def as_on_a_gpu(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = (
                DistributedType.FSDP
            )

    with mock.patch.object(AcceleratorState, "__init__", as_on_a_gpu):
        yield


@contextmanager
def _fsdp2(*, root_alone: bool = False, **variables: str) -> Iterator[dict[str, Any]]:
    import accelerate.accelerator
    from torch.distributed.fsdp import fully_shard

    asked = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    }
    asked |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", **variables}
    with fsdp2_without_gpus(), mock.patch.dict(os.environ, asked):
        if not root_alone:
            yield {}
            return
        with mock.patch.object(
            accelerate.accelerator, "fsdp2_prepare_model", lambda _, model: fully_shard(model)
        ):
            yield {}


def _head_apart() -> Any:
    """Every linear layer a unit of its own."""
    return _fsdp2(FSDP_TRANSFORMER_CLS_TO_WRAP="Qwen3DecoderLayer,Linear")


@contextmanager
def _fsdp1(*, original: bool) -> Iterator[dict[str, Any]]:
    """`original`: `use_orig_params`."""
    from torch.distributed.fsdp import _init_utils

    asked = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "1",
        "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    }
    asked |= {
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer",
    }
    asked["FSDP_USE_ORIG_PARAMS"] = str(original).lower()
    # accelerate names the device cpu:0, and torch compares it with cpu
    on_cpu = mock.patch.object(
        _init_utils, "_get_device_from_device_id", return_value=torch.device("cpu")
    )
    with fsdp2_without_gpus(), mock.patch.dict(os.environ, asked), on_cpu:
        yield {}


@contextmanager
def _zero(stage: int) -> Iterator[dict[str, Any]]:
    automatic = (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    yield {
        "deepspeed": {
            "zero_optimization": {
                "stage": stage,
                "stage3_param_persistence_threshold": 0,
            },  # stage 3 divides small ones too
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **dict.fromkeys(automatic, "auto"),
        }
    }


WRAPS: dict[str, Any] = {
    "DDP": _ddp,
    "FSDP2": _fsdp2,  # accelerate 1.15: the head in one unit with the last norm, and the embedding if it is tied
    "FSDP2, head in the root unit": lambda: _fsdp2(root_alone=True),
    "FSDP2, head its own unit": _head_apart,
    "FSDP1": lambda: _fsdp1(original=False),  # the head in the root unit
    "FSDP1, original parameters": lambda: _fsdp1(original=True),
    **{f"ZeRO-{stage}": partial(_zero, stage) for stage in (1, 2, 3)},
}


def _find_deepspeed() -> None:
    """Makes DeepSpeed known to what was imported without it."""
    from tests.support import zero3

    zero3.deepspeed()
    import accelerate.accelerator
    import accelerate.utils
    import accelerate.utils.deepspeed as wrappers
    import transformers.integrations.deepspeed
    import transformers.trainer

    for module in (accelerate.utils, accelerate.accelerator, transformers.trainer):
        for name in vars(wrappers):
            if "DeepSpeed" in name or name in (
                "DummyOptim",
                "DummyScheduler",
                "map_pytorch_optim_to_deepspeed",
            ):
                setattr(module, name, getattr(wrappers, name))
    importlib.reload(sys.modules["transformers.integrations.deepspeed"])  # whose base class it is
