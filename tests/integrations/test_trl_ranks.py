"""TRL on two processes (DDP, FSDP1, FSDP2 and ZeRO of accelerate) with our trainers: what comes out
is one process's.

Completions come from the prompts, so that any number of processes trains on the same ones.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor

pytest.importorskip("trl")
import trl

from benchmarks import head_flops, parity, tiny_models
from grpo_kernels.base.checks import is_dtensor
from grpo_kernels.head_module import gather_of
from grpo_kernels.trl import FusedGRPOTrainer, patch_trl, unpatch_trl
from grpo_kernels.trl.distillation import divergence_loss
from tests.support import trl_training, zero3
from tests.support.launched import fsdp2_without_gpus
from tests.support.ranks import Ranks
from tests.support.training_step import assert_same
from tests.support.trl_training import Written, divergence_inputs, mixed

pytestmark = [pytest.mark.unit, pytest.mark.slow]

SEQUENCES = 8  # of all processes together, a micro-batch


@dataclass(frozen=True)
class Job:
    wrap: str = "DDP"
    stock: bool = False
    kind: str = "qwen3"
    lora: tuple[str, ...] = ()  # the modules that get an adapter
    options: dict[str, Any] = field(default_factory=lambda: {"beta": 0.04, "num_iterations": 2})
    arguments: dict[str, Any] = field(default_factory=dict)
    counted: bool = False  # counts the operations of the head
    patched: bool = False  # by `patch_trl`


def trained(job, processes=1, prepare=None, **options):
    """What two steps have logged and added to each parameter, and the trainer."""
    before: dict[str, Tensor] = {}

    def begin(trainer: Any) -> None:
        unpatch_trl()
        if prepare is not None:
            prepare(trainer)
        before.update(_whole_parameters(trainer.model))

    options = {"optim": "sgd", "learning_rate": 0.1, **job.options, **job.arguments, **options}
    if job.lora:
        from peft import LoraConfig

        shape = {"r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
        options["peft_config"] = LoraConfig(target_modules=[*job.lora], **shape)
    options["per_device_train_batch_size"] = SEQUENCES // processes
    base = trl.GRPOTrainer if job.stock else FusedGRPOTrainer
    owner = transformers.PreTrainedModel
    saves = mock.patch.object(owner, "should_save_on_this_rank", return_value=True)
    # each rank has the reference in a folder of its own
    with saves, patch_trl() if job.patched else nullcontext():
        run = trl_training.train(mixed(Written, base), kind=job.kind, prepare=begin, **options)
    after = _whole_parameters(run.trainer.model)
    return run.steps, {name: x - before[name] for name, x in after.items()}, run.trainer


def _whole_parameters(model: Any) -> dict[str, Tensor]:
    """Copies of the parameters of a model, whole however it is divided."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    is_fsdp1 = isinstance(model, FullyShardedDataParallel)
    gather = gather_of(model.parameters()) or nullcontext
    with FullyShardedDataParallel.summon_full_params(model) if is_fsdp1 else gather():
        found = {}
        for name, x in model.named_parameters():
            whole = x.detach().full_tensor() if is_dtensor(x) else x.detach()
            found[name.replace("_fsdp_wrapped_module.", "")] = whole.clone()
        return found


def divided_heads(rank: int, world_size: int) -> dict[str, Any]:
    """Distillation with the teacher's head divided by FSDP2; then with the student's too."""
    from torch.distributed.fsdp import fully_shard

    given = divergence_inputs()
    both = {**given}
    for name in ("student_lm_head_weight", "teacher_lm_head_weight"):
        weight = given[name].detach()
        head = torch.nn.Linear(weight.shape[1], 50, bias=False)
        head.weight.data.copy_(weight)
        both[name] = fully_shard(head).weight
    of_teacher = {**both, "student_lm_head_weight": given["student_lm_head_weight"]}
    loss, *_ = divergence_loss(beta=0.5, **of_teacher)
    loss.backward()
    with pytest.raises(ValueError, match="student_lm_head_weight: expected a plain tensor"):
        divergence_loss(beta=0.5, **both)
    with torch.no_grad():
        scored = divergence_loss(beta=0.5, **both)[0]
    grad = given["student_lm_head_weight"].grad
    return {"loss": loss.detach(), "grad": grad, "scored": scored}


def train_all(rank: int, world_size: int, jobs: dict[str, Job]) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, GradientState

    results = {}
    # accelerate wants them, and the group is there
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    for name, job in jobs.items():
        if job.wrap.startswith("ZeRO") and "deepspeed" not in sys.modules:
            _find_deepspeed()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        counts = head_flops.Counts()
        counting = head_flops.watched(counts) if job.counted else nullcontext()
        with counting as prepare, _wrapping(job.wrap) as options:
            logged, moved, trainer = trained(job, world_size, prepare, **options)
        results[name] = SimpleNamespace(
            steps=logged,
            classes=[x.__name__ for x in type(trainer.model_wrapped).__mro__],
            head=type(trainer.model.get_output_embeddings()).__name__,
            counts=counts,  # of the head's operations, if the job is to be counted
            moved=moved,  # by parameter: what training has added to it
        )
    return results


_FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
_FSDP2 = {**_FSDP, "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
_LAYER = "Qwen3DecoderLayer"
# name -> what accelerate reads of the environment
WRAPS: dict[str, dict[str, str]] = {
    "DDP": {},
    # accelerate 1.15: the head in one unit with the last norm, and the embedding if it is tied
    "FSDP2": _FSDP2,
    "FSDP2, head in the root unit": _FSDP2,
    "FSDP2, head its own unit": {**_FSDP2, "FSDP_TRANSFORMER_CLS_TO_WRAP": f"{_LAYER},Linear"},
    "FSDP1": {  # the head in the root unit
        "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", **_FSDP,
        "FSDP_TRANSFORMER_CLS_TO_WRAP": _LAYER, "FSDP_USE_ORIG_PARAMS": "false",
    },
    "ZeRO-3": {},
}  # fmt: skip
_SIZES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_ZERO3 = {**zero3.CONFIG, **dict.fromkeys(_SIZES, "auto")}


@contextmanager
def _wrapping(name: str) -> Iterator[dict[str, Any]]:
    """Options of a trainer's config with which accelerate divides its model so."""
    from torch.distributed.fsdp import fully_shard

    changes: list[Any] = [mock.patch.dict(os.environ, WRAPS[name])]
    if "FSDP" in name:
        changes.append(fsdp2_without_gpus())
    if "root" in name:
        prepare = "accelerate.accelerator.fsdp2_prepare_model"
        changes.append(mock.patch(prepare, lambda _, model: fully_shard(model)))
    if name == "FSDP1":  # accelerate names the device cpu:0, and torch compares it with cpu
        named = "torch.distributed.fsdp._init_utils._get_device_from_device_id"
        changes.append(mock.patch(named, return_value=torch.device("cpu")))
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        yield {"deepspeed": _ZERO3} if name.startswith("ZeRO") else {}


def _find_deepspeed() -> None:
    """Makes DeepSpeed known to what was imported without it."""
    zero3.deepspeed()
    import accelerate.accelerator
    import accelerate.utils
    import accelerate.utils.deepspeed as wrappers
    import transformers.integrations.deepspeed
    import transformers.trainer

    others = ("DummyOptim", "DummyScheduler", "map_pytorch_optim_to_deepspeed")
    for module in (accelerate.utils, accelerate.accelerator, transformers.trainer):
        for name, x in vars(wrappers).items():
            if "DeepSpeed" in name or name in others:
                setattr(module, name, x)
    importlib.reload(sys.modules["transformers.integrations.deepspeed"])  # whose base class it is


def in_bf16(rank: int, world_size: int) -> dict[str, Tensor]:
    """Log-probabilities of TRL's fused forward and of ours; FSDP2 as accelerate has it for bf16."""
    import trl.trainer.utils as trl_utils
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from grpo_kernels.trl.fused_head import add_fused_lm_head

    bf16, found = torch.bfloat16, {}
    policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32, output_dtype=bf16)
    ids = torch.arange(3, 43).view(2, 20)
    for name, add in (("theirs", trl_utils.add_fused_lm_head), ("ours", add_fused_lm_head)):
        model = tiny_models.model()
        add(model)
        for modules in [[x] for x in model.model.layers] + [[model.model.norm, model.lm_head]]:
            fully_shard(modules, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        logps = model(**given, fused_lm_head=True).log_probs
        (-logps.sum()).backward()
        found[name] = logps.detach()
        found[f"{name}, d head"] = model.lm_head.weight.grad.full_tensor()
    return found


TOLERANCE = 1e-5
LORA = ("q_proj", "lm_head")
ADAPTED: dict[str, Any] = {"lora": LORA, "arguments": {"kl_estimator": "full"}}
# the last micro-batches have no samples
LEFT: dict[str, Any] = {"tokens_per_forward": 10_000}
# a mean over micro-batches: other ones on one process
BONUS = {"entropy_coef": 0.01, "num_iterations": 2}
JOBS = {
    "DDP": Job(),
    "FSDP2": Job("FSDP2"),
    "FSDP2, tied": Job("FSDP2", kind="tied"),
    "FSDP2, head in the root unit": Job("FSDP2, head in the root unit"),
    "FSDP2, head its own unit": Job("FSDP2, head its own unit"),
    "FSDP2, head its own unit, patched": Job("FSDP2, head its own unit", stock=True, patched=True),
    "FSDP2, adapter on the head, exact KL": Job("FSDP2", **ADAPTED),
    "FSDP1": Job("FSDP1"),
    "FSDP1: micro-batches are left": Job("FSDP1", arguments=LEFT),
    "DDP: micro-batches are left": Job(arguments=LEFT),
}
# half of a batch is scored, its live sequences alone
HALVES: dict[str, Any] = {"options": {"steps_per_generation": 4, "epsilon": 1e-3}}
# the loss follows the reference's scoring
ONCE: dict[str, Any] = {"lora": LORA, "options": {"beta": 0.04}}
OTHER_JOBS = {
    "bonus, DDP": Job(options=BONUS, counted=True),
    "bonus, stock": Job(stock=True, options=BONUS),
    "halves, stock": Job(stock=True, **HALVES),
    "halves, DDP": Job(**HALVES),
    "halves, FSDP2": Job("FSDP2", **HALVES),
    "once, DDP": Job(**ONCE),
    "once, FSDP2": Job("FSDP2", **ONCE),
}
ZERO_JOBS = {
    "ZeRO-3": Job("ZeRO-3"),
    "ZeRO-3, tied": Job("ZeRO-3", kind="tied"),
    "ZeRO-3, adapter on the head, exact KL": Job("ZeRO-3", **ADAPTED),
}
BECOMES = {
    "DDP": "DistributedDataParallel",
    "FSDP1": "FullyShardedDataParallel",
    "FSDP2": "FSDPModule",
}


@pytest.fixture(scope="module")
def logged(ranks: Ranks) -> list[dict[str, Any]]:
    """By rank, by job; ZeRO last, as it changes accelerate."""
    of_zero = {} if zero3.needs_deepspeed.args[0] else ZERO_JOBS
    return ranks.run(train_all, JOBS | OTHER_JOBS | of_zero)


def test_a_divided_teacher_is_right_and_a_divided_student_that_trains_is_refused(ranks):
    given = divergence_inputs()
    loss, *_ = divergence_loss(beta=0.5, **given)
    loss.backward()
    want = {"loss": loss.detach(), "grad": given["student_lm_head_weight"].grad}
    for found in ranks.run(divided_heads):
        torch.testing.assert_close(found, want | {"scored": loss.detach()})


def test_bf16_under_fsdp2_rounds_no_log_probability(ranks: Ranks) -> None:
    """accelerate has FSDP2 round what a model returns; stock TRL's log-probabilities, too."""
    for found in ranks.run(in_bf16):
        theirs, ours = found["theirs"], found["ours"]
        assert (theirs.dtype, ours.dtype) == (torch.bfloat16, torch.float32)
        assert (ours != ours.bfloat16().float()).any()
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-2, atol=5e-2)
        heads = found["ours, d head"], found["theirs, d head"]
        torch.testing.assert_close(*heads, rtol=0.1, atol=0.3)


@cache
def of_one_process(kind: str, adapted: bool) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    return trained(Job(kind=kind, **ADAPTED) if adapted else Job(kind=kind, stock=True))[:2]


@pytest.mark.parametrize(
    "name", [*JOBS, *(pytest.param(name, marks=zero3.needs_deepspeed) for name in ZERO_JOBS)]
)
def test_a_divided_model_trains_as_on_one_process(name, logged):
    job = (JOBS | ZERO_JOBS)[name]
    want, moved = of_one_process(job.kind, bool(job.lora))
    assert all(x["grad_norm"] > 0.1 for x in want)
    for of_rank in logged:
        ran = of_rank[name]
        errors = parity.differences(want, ran.steps)
        assert max(errors["loss"], errors["grad_norm"]) < TOLERANCE, errors
        assert_same(ran.moved, moved, TOLERANCE)
        assert BECOMES.get(job.wrap.split(",")[0], "DeepSpeedEngine") in ran.classes
        assert ran.head.startswith("FSDP") == (job.wrap in ("FSDP2", "FSDP2, head its own unit"))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("bonus, DDP", "bonus, stock"),
        ("halves, DDP", "halves, stock"),
        ("halves, FSDP2", "halves, stock"),
        # PEFT switches the gradient of adapters off for the reference, and on again afterwards
        ("once, FSDP2", "once, DDP"),
    ],
)
def test_metrics_are_those_of_stock_trl_or_of_ddp_on_as_many_processes(name, other, logged):
    for of_rank in logged:
        errors = parity.differences(of_rank[other].steps, of_rank[name].steps)
        assert max(errors.values()) < TOLERANCE, errors
        assert of_rank[name].steps[-1]["clip_ratio/region_mean"] > 0 or "halves" not in name
        counts = of_rank[name].counts
        # the gradient is foreseen with the normalizer of all processes; else rows would be
        # projected twice, since those of the bonus and of the policy's term differ
        assert counts.flops == 6 * counts.scored * counts.size
        assert (counts.flops > 0) == name.startswith("bonus")
