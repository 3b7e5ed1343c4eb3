"""verl's trainers themselves, on CPUs: `fit` of the one, `_step_once` of the other, over verl's own
workers and its FSDP engine (`verl_engine`).

Stand-ins: the sampler, which repeats the same responses; Ray, whose part `Workers` plays on the
ranks of a group, each of which runs the trainer; the store of the newer trainer; packages that
verl's trainers import for servers, data and that store. All are made without their constructors."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.verl_step import Products
from grpo_kernels.verl import patch_verl, unpatch_verl
from tests.support import verl_engine, verl_peer
from tests.support.verl_engine import PROMPT, RESPONSE, VOCAB, places
from tests.support.verl_peer import verl_module

GROUP, SIZE = 4, 8
ABSENT = ("torchdata", "transfer_queue", "cachetools", "uvicorn", "fastapi", "starlette", "aiohttp")


class _Absent(MetaPathFinder, Loader):
    """Finder of last resort: what is imported from packages that are absent is an empty class."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def exec_module(self, module: ModuleType) -> None:
        def content(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        vars(module)["__getattr__"] = content


def module_of_trainers(name: str) -> ModuleType:
    """A module of verl that imports packages which are not installed."""
    verl_peer.monkey_patch()
    finder = _Absent()
    sys.meta_path.append(finder)
    try:
        return verl_module(name)
    finally:
        sys.meta_path.remove(finder)
        for package, module in [*sys.modules.items()]:
            if isinstance(getattr(module, "__loader__", None), _Absent):
                del sys.modules[package]  # others ask whether it is installed


@functools.cache
def _of_verl() -> Any:
    from omegaconf import OmegaConf

    package = Path(importlib.import_module("verl").__file__ or "").parent
    return OmegaConf.load(package / "trainer" / "config" / "_generated_ppo_trainer.yaml")


def config(**changes: Any) -> Any:
    """verl's configuration, with one optimizer step a batch; `changes` by path, __ for a point."""
    from omegaconf import OmegaConf

    made = copy.deepcopy(_of_verl())
    actor = "actor_rollout_ref.actor."
    given = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.use_fused_kernels": True,
        "actor_rollout_ref.rollout.n": GROUP,
        "actor_rollout_ref.rollout.temperature": 0.9,
        f"{actor}strategy": "fsdp2",
        f"{actor}ppo_mini_batch_size": SIZE // GROUP,
        f"{actor}ppo_micro_batch_size_per_gpu": 2,
        f"{actor}rollout_n": GROUP,
        "trainer.critic_warmup": 0,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.balance_batch": False,
        "trainer.total_epochs": 1,
        "trainer.logger": [],
    }
    for name, value in (given | {k.replace("__", "."): x for k, x in changes.items()}).items():
        OmegaConf.update(made, name, value, force_add=True)
    return made


def batch(seed: int, sampled: bool) -> dict[str, Tensor]:
    """SIZE sequences, with the sampler's log-probabilities if `sampled`."""
    g = torch.Generator().manual_seed(seed)
    prompts = torch.randint(8, PROMPT + 1, (SIZE // GROUP, 1), generator=g)
    prompts = prompts.repeat_interleave(GROUP, 0)
    responses = torch.randint(RESPONSE // 4, RESPONSE + 1, (SIZE, 1), generator=g)
    there = places(prompts, responses)
    ids = torch.randint(3, VOCAB, there.shape, generator=g) * there
    mask = there[:, PROMPT:].clone()
    mask[:, 5:9] = 0  # a tool's output
    rewards = torch.zeros(mask.shape)
    rewards[:, 0] = torch.randint(0, 2, (SIZE,), generator=g).float()
    rewards[:GROUP, 0] = 1.0  # a group without gradient
    found = {
        "input_ids": ids,
        "attention_mask": there,
        "position_ids": (there.cumsum(1) - 1).clamp(min=0),
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "response_mask": mask,
        "rm_scores": rewards,
    }
    if sampled:
        found["rollout_log_probs"] = -5.35 + 0.1 * torch.randn(mask.shape, generator=g)
    return found


def worker(options: dict[str, str], settings: Any, strategy: str | None, model: Any = None) -> Any:
    from verl.utils.config import omega_conf_to_dataclass

    module = module_of_trainers("workers.engine_workers")
    device = SimpleNamespace(max_memory_allocated=lambda: 0, max_memory_reserved=lambda: 0)
    module.get_torch_device = lambda: device
    memory = SimpleNamespace(used=0)  # a metric, which ranks have to agree on
    module.psutil = SimpleNamespace(virtual_memory=lambda: memory)
    verl_module("utils.fsdp_utils").get_device_id = lambda: "cpu"
    net = verl_engine.model() if model is None else model
    verl_engine.use_backend(net, options)
    engine = verl_engine.engine(net, options, strategy)
    engine.engine_config.fsdp_size = dist.get_world_size()
    engine.engine_config.forward_only = False
    engine._is_offload_param = engine._is_offload_optimizer = engine._qat_enabled = False
    engine.ulysses_parallel_group = None
    engine.optimizer_config = SimpleNamespace(clip_grad=1.0)
    engine.optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.5)
    engine.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(engine.optimizer)
    actor = settings.actor_rollout_ref.actor
    made = module.TrainingWorker.__new__(module.TrainingWorker)
    made.engine, made.device_name = engine, "cpu"
    made.profiler = SimpleNamespace(rank=0, check_enable=lambda: False, step=lambda: None)
    made.model_config = {"use_remove_padding": True}
    made.engine_config = SimpleNamespace(
        forward_only=False,
        use_dynamic_bsz=actor.use_dynamic_bsz,
        max_token_len_per_gpu=160,
        infer_max_token_len_per_gpu=160,
        micro_batch_size_per_gpu=actor.ppo_micro_batch_size_per_gpu,
        infer_micro_batch_size_per_gpu=4,
        use_fused_kernels=True,
    )
    made.flops_counter = SimpleNamespace(estimate_flops=lambda *_, **__: (1.0, 1.0))
    made.loss_fn = verl_engine.ppo_loss(omega_conf_to_dataclass(actor))
    return made


class Workers:
    """The worker group: each rank takes its part of a batch, and gets what all return."""

    def __init__(self, actor: Any) -> None:
        worker_class = module_of_trainers("workers.engine_workers").ActorRolloutRefWorker
        self.own = worker_class.__new__(worker_class)
        self.own.actor, self.own.enable_routing_replay, self.own.profiler = actor, False, None

    def compute_log_prob(self, data: Any) -> Any:
        return self._on_all("compute_log_prob", data)

    def update_actor(self, data: Any) -> Any:
        return self._on_all("update_actor", data)

    def _on_all(self, name: str, data: Any) -> Any:
        tensordict_utils = verl_module("utils.tensordict_utils")
        ranks = dist.get_world_size()
        part = tensordict_utils.chunk_tensordict(data, ranks)[dist.get_rank()]
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, getattr(self.own, name)(part))
        return tensordict_utils.concat_tensordict(found) if name == "compute_log_prob" else found[0]


def train(
    options: dict[str, str],
    *,
    v1: bool = False,
    steps: int = 2,
    sampled: bool = True,
    strategy: str | None = "fsdp2",
    model: Any = None,
    change: Callable[[Any], None] | None = None,  # of the trainer
    **changes: Any,
) -> Any:
    """Some steps of verl's trainer, the older one or `v1`."""
    unpatch_verl()
    patch_verl()
    settings = config(actor_rollout_ref__model__fused_kernel_options=options, **changes)
    settings.actor_rollout_ref.rollout.calculate_log_probs = sampled
    actor = worker(options, settings, strategy, model)
    made = bare_trainer(settings, (StoredWorkers if v1 else Workers)(actor), v1=v1)
    if change is not None:
        change(made)
    run = SimpleNamespace()
    run.products = Products(VOCAB)
    data = [batch(seed, sampled) for seed in range(steps)]
    with run.products:
        run.metrics, run.batches = (_v1_steps if v1 else _fit)(made, data)
    module = actor.engine.module
    run.weights = {
        name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()
        for name, x in module.named_parameters()
    }
    return run


def bare_trainer(settings: Any, workers: Any, *, v1: bool) -> Any:
    name = "v1.trainer_sync" if v1 else "ray_trainer"
    module = module_of_trainers(f"trainer.ppo.{name}")
    trainer = module.PPOTrainerSync if v1 else module.RayPPOTrainer
    made = trainer.__new__(trainer)
    made.config, made.actor_rollout_wg, made.global_steps = settings, workers, 1
    made.use_critic = made.use_reference_policy = made.ref_in_actor = False
    made.checkpoint_manager = SimpleNamespace(
        update_weights=lambda *_: None, sleep_replicas=lambda: None
    )
    return made


def _fit(trainer: Any, data: list[dict[str, Tensor]]) -> tuple[list[Any], list[Any]]:
    import numpy as np

    protocol = verl_module("protocol")
    batches, logged = iter(data), []

    def generate_sequences(prompts: Any) -> Any:
        found = protocol.DataProto.from_single_dict(next(batches))
        found.meta_info["timing"] = {}
        found.non_tensor_batch["multi_modal_inputs"] = np.array([{}] * SIZE, dtype=object)
        return found

    trainer.use_rm = False
    trainer._dump_executor = SimpleNamespace(_shutdown=False, shutdown=lambda **_: None)
    trainer._load_checkpoint, trainer._dump_futures = (lambda: None), []
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
    seen: list[Any] = []
    prompts = {"index": torch.arange(SIZE // GROUP)}
    trainer.train_dataloader = [dict(prompts) for _ in data]
    trainer.train_dataset = SimpleNamespace(on_batch_end=lambda batch: seen.append(batch.batch))
    trainer.total_training_steps = len(data) + 1
    trainer.async_rollout_manager = SimpleNamespace(generate_sequences=generate_sequences)
    tracking = SimpleNamespace(log=lambda data, step: logged.append(data))
    with mock.patch.object(verl_module("utils.tracking"), "Tracking", return_value=tracking):
        trainer.fit()
    return logged, seen


class Store:
    """TransferQueue's part for one batch: its fields by name."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        from tensordict import TensorDict

        found = {name: self.fields[name] for name in select_fields if name in self.fields}
        return TensorDict(found, batch_size=[len(keys)])

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: Any) -> Any:
        self.fields.update(fields.items())
        return Meta(keys)


class Meta:
    """A reference to that batch."""

    partition_id = "train"

    def __init__(self, keys: list[str], tags: Sequence[dict[str, int]] = ()) -> None:
        self.keys, self.tags, self.extra_info = keys, tags, {}

    def __len__(self) -> int:
        return len(self.keys)

    def reorder(self, order: list[int]) -> None:
        self.keys, self.tags = ([x[i] for i in order] for x in (self.keys, self.tags))


class StoredWorkers(Workers):
    """Workers that get a reference to a batch, and put their results beside it."""

    store: Store

    def _on_all(self, name: str, data: Any) -> Any:
        tensordict_utils = verl_module("utils.tensordict_utils")
        whole = self.store.kv_batch_get(data.keys, "train", [*self.store.fields])
        whole = whole.exclude("uid")
        tensordict_utils.assign_non_tensor(whole, **data.extra_info)
        found = super()._on_all(name, whole)
        if name == "update_actor":
            return {"metrics": tensordict_utils.get(found, "metrics")}
        return self.store.kv_batch_put(data.keys, "train", found.exclude("metrics"))


def _v1_steps(trainer: Any, data: list[dict[str, Tensor]]) -> tuple[list[Any], list[Any]]:
    trainer.curr_step_profile = False
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    trainer._balance_batch = lambda batch, metrics: batch
    logged, stores = [], []
    base = module_of_trainers("trainer.ppo.v1.trainer_base")
    for step, padded in enumerate(data):
        store = Store(_jagged(padded))
        trainer.actor_rollout_wg.store = store
        keys = [f"prompt{i // GROUP}_{i}_0" for i in range(SIZE)]
        sample = Meta(keys), {}
        trainer.replay_buffer = SimpleNamespace(sample=lambda sample=sample, **_: sample)
        trainer.global_steps = step + 1
        metrics: dict[str, Any] = {}
        with mock.patch.object(base, "tq", store):
            trainer._step_once(metrics, {}, SIZE)
        logged.append(metrics)
        stores.append(store.fields)
    return logged, stores


def _jagged(padded: dict[str, Tensor]) -> dict[str, Any]:
    from tensordict.tensorclass import NonTensorStack

    there = padded["attention_mask"]
    inside = {"prompts": there[:, :PROMPT], "input_ids": there, "position_ids": there}
    made: dict[str, Any] = {
        name: verl_engine.jagged(x, inside.get(name, there[:, PROMPT:]))
        for name, x in padded.items()
        if name != "attention_mask"
    }
    made["loss_mask"] = made["response_mask"]
    made["uid"] = NonTensorStack(*(f"prompt{i // GROUP}" for i in range(SIZE)))
    return made
