"""verl's trainer on CPUs: `fit` leaves the scoring of the old policy to the update, against itself
with ``old_log_probs=score``; responses of a prompt come to one rank, in verl's optimizer steps.

It runs over verl's own workers and its FSDP engine (`verl_peer`). Stand-ins: the sampler, which
repeats the same responses; Ray, whose part `Workers` plays on the ranks of a group, each of which
runs the trainer; the store; packages that verl's trainer imports for servers, data and that store.
All are made without their constructors."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("verl")
pytest.importorskip("ray")
from omegaconf import OmegaConf

from benchmarks.verl_step import Products, mini_batch
from grpo_kernels.verl import patch_verl, trainers, unpatch_verl
from tests.support import verl_peer
from tests.support.ranks import run_ranks
from tests.support.verl_peer import OURS, PROMPT, RESPONSE, SCORE, VOCAB, places, verl_module

pytestmark = pytest.mark.unit

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
    package = Path(importlib.import_module("verl").__file__ or "").parent
    return OmegaConf.load(package / "trainer" / "config" / "_generated_ppo_trainer.yaml")


def config(**changes: Any) -> Any:
    """verl's configuration, with one optimizer step a batch; `changes` by path, __ for a point."""
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
        "trainer.val_before_train": False,
        "trainer.balance_batch": False,
        "trainer.total_epochs": 1,
        "trainer.logger": [],
    }
    for name, value in (given | {k.replace("__", "."): x for k, x in changes.items()}).items():
        OmegaConf.update(made, name, value, force_add=True)
    return made


def batch(seed: int, sampled: bool) -> dict[str, Any]:
    """SIZE sequences, with the sampler's log-probabilities if `sampled`."""
    g = torch.Generator().manual_seed(seed)
    prompts = torch.randint(8, PROMPT + 1, (SIZE // GROUP, 1), generator=g)
    prompts = prompts.repeat_interleave(GROUP, 0)
    responses = torch.randint(RESPONSE // 4, RESPONSE + 1, (SIZE, 1), generator=g)
    there = places(prompts, responses)
    ids = torch.randint(3, VOCAB, there.shape, generator=g)
    mask = there[:, PROMPT:].clone()
    mask[:, 5:9] = 0  # a tool's output
    rewards = torch.zeros(mask.shape)
    rewards[:, 0] = torch.randint(0, 2, (SIZE,), generator=g).float()
    rewards[:GROUP, 0] = 1.0  # a group without gradient
    fields = {"response_mask": mask, "rm_scores": rewards}
    if sampled:
        fields["rollout_log_probs"] = -5.35 + 0.1 * torch.randn(mask.shape, generator=g)
    uids = [f"prompt{i // GROUP}" for i in range(SIZE)]
    return {**mini_batch(there, ids, PROMPT, fields), "uid": uids, "num_turns": [1] * SIZE}


def worker(options: dict[str, str], settings: Any, strategy: str | None, model: Any = None) -> Any:
    from verl.utils.config import omega_conf_to_dataclass

    module = module_of_trainers("workers.engine_workers")
    device = SimpleNamespace(max_memory_allocated=lambda: 0, max_memory_reserved=lambda: 0)
    module.get_torch_device = lambda: device
    memory = SimpleNamespace(used=0)  # a metric, which ranks have to agree on
    module.psutil = SimpleNamespace(virtual_memory=lambda: memory)
    verl_module("utils.fsdp_utils").get_device_id = lambda: "cpu"
    net = verl_peer.model() if model is None else model
    verl_peer.use_backend(net, options)
    engine = verl_peer.engine(net, options, strategy)
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
    made.loss_fn = verl_peer.ppo_loss(omega_conf_to_dataclass(actor))
    return made


@dataclass
class Meta:
    """A reference to a batch."""

    keys: list[str]
    tags: Sequence[dict[str, int]] = ()
    extra_info: dict[str, Any] = field(default_factory=dict)
    partition_id: str = "train"

    def __len__(self) -> int:
        return len(self.keys)

    def reorder(self, order: list[int]) -> None:
        self.keys, self.tags = ([x[i] for i in order] for x in (self.keys, self.tags))


class Store:
    """TransferQueue and the sampler: `batches`, one a step, of fields by name."""

    def __init__(self, batches: list[dict[str, Any]]) -> None:
        self.batches = batches
        self.fields: dict[str, Any] = {}
        self.tags: list[dict[str, int]] = []

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        self.fields = self.batches[global_steps - 1]
        tag = dict.fromkeys(("min_global_steps", "max_global_steps"), global_steps - 1)
        self.tags = [tag] * SIZE
        return Meta([f"prompt{i // GROUP}_{i}_0" for i in range(SIZE)], self.tags), {}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        found = {name: self.fields[name] for name in select_fields if name in self.fields}
        return verl_module("utils.tensordict_utils").get_tensordict(found)

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: Any) -> Any:
        self.fields.update(fields.items())
        return Meta(keys, self.tags)

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        self.fields = {}


class Workers:
    """The worker group: each rank takes its part of the batch that a reference names, and puts what
    all return beside it."""

    def __init__(self, actor: Any, store: Store) -> None:
        worker_class = module_of_trainers("workers.engine_workers").ActorRolloutRefWorker
        self.own, self.store = worker_class.__new__(worker_class), store
        self.own.actor, self.own.enable_routing_replay, self.own.profiler = actor, False, None

    def compute_log_prob(self, data: Any) -> Any:
        found = verl_module("utils.tensordict_utils").concat_tensordict(
            self._on_all("compute_log_prob", data)
        )
        return self.store.kv_batch_put(data.keys, "train", found.exclude("metrics"))

    def update_actor(self, data: Any) -> Any:
        found = self._on_all("update_actor", data)[0]
        return {"metrics": verl_module("utils.tensordict_utils").get(found, "metrics")}

    def _on_all(self, name: str, data: Any) -> list[Any]:
        tensordict_utils = verl_module("utils.tensordict_utils")
        whole = self.store.kv_batch_get(data.keys, "train", [*self.store.fields])
        whole = whole.exclude("uid", "num_turns")
        tensordict_utils.assign_non_tensor(whole, **data.extra_info)
        ranks = dist.get_world_size()
        part = tensordict_utils.chunk_tensordict(whole, ranks)[dist.get_rank()]
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, getattr(self.own, name)(part))
        return found


def train(
    options: dict[str, str],
    *,
    steps: int = 2,
    sampled: bool = True,
    strategy: str | None = "fsdp2",
    model: Any = None,
    change: Callable[[Any], None] | None = None,  # of the trainer
    **changes: Any,
) -> Any:
    """Some steps of verl's `fit`."""
    unpatch_verl()
    patch_verl()
    settings = config(actor_rollout_ref__model__fused_kernel_options=options, **changes)
    settings.actor_rollout_ref.rollout.calculate_log_probs = sampled
    actor = worker(options, settings, strategy, model)
    store = Store([batch(seed, sampled) for seed in range(steps)])
    trainer = bare_trainer(settings, Workers(actor, store))
    trainer.replay_buffer, trainer.total_training_steps = store, steps
    trainer._balance_batch = lambda batch, metrics: batch
    if change is not None:
        change(trainer)
    run = SimpleNamespace(products=Products(VOCAB), metrics=[], batches=store.batches)
    tracking = SimpleNamespace(log=lambda data, step: run.metrics.append(data))
    base = module_of_trainers("trainer.ppo.v1.trainer_base")
    stand_ins = {"tq": store, "KVBatchMeta": Meta, "Tracking": lambda **_: tracking}
    with run.products, mock.patch.multiple(base, **stand_ins):
        trainer.fit(None)
    module = actor.engine.module
    run.weights = {
        name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()
        for name, x in module.named_parameters()
    }
    return run


def bare_trainer(settings: Any, workers: Any) -> Any:
    base = module_of_trainers("trainer.ppo.v1.trainer_base")
    trainer = module_of_trainers("trainer.ppo.v1.trainer_sync").PPOTrainerSync
    made = trainer.__new__(trainer)
    made.config, made.actor_rollout_wg, made.global_steps = settings, workers, 0
    made.use_critic = made.use_reference_policy = made.ref_in_actor = False
    made.trainer_mode, made.parameter_sync_step, made.steps_per_epoch = "sync", 1, 100
    made.checkpoint_manager = SimpleNamespace(
        update_weights=lambda *_: None, sleep_replicas=lambda: None
    )
    made.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    made.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
    made._rollout_moe_lb_metrics_accumulator = base.RolloutMoELoadBalanceMetricsAccumulator()
    made._add_batch_to_generate = lambda: None
    made._init_dump_executor()
    return made


OLD = "old_log_probs"
SCORED = {"old_log_probs": "score"}
TIMINGS = ("timing_", "perf/time_per_step", "perf/throughput")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with verl_peer.on_one_rank():
        yield


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    trainers._say.cache_clear()
    unpatch_verl()
    yield
    unpatch_verl()


def logged(step: dict[str, Any]) -> dict[str, float]:
    return {name: float(x) for name, x in step.items() if not name.startswith(TIMINGS)}


def check_same(auto: Any, score: Any) -> None:
    assert len(auto.metrics) == len(score.metrics) == 2
    for got, want in zip(auto.metrics, score.metrics, strict=True):
        assert logged(got) == pytest.approx(logged(want), rel=1e-6, abs=1e-6)
    for got, want in zip(auto.batches, score.batches, strict=True):
        pair = (x[OLD].values() for x in (got, want))
        torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(auto.weights, score.weights, rtol=0, atol=1e-7)


def reference(trainer: Any) -> None:
    """The policy itself, as its own reference: by the call that also scores the old policy."""
    workers = trainer.actor_rollout_wg
    trainer.use_reference_policy = True
    trainer.ref_policy_wg = SimpleNamespace(compute_ref_log_prob=workers.compute_log_prob)


def actor(**changes: Any) -> dict[str, Any]:
    return {f"actor_rollout_ref__actor__{name}": x for name, x in changes.items()}


SEQ_MEAN = {"loss_agg_mode": "seq-mean-token-mean"}
DR_GRPO = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 40}
# of the run, and of verl's configuration
SCENES: dict[str, dict[str, Any]] = {
    "token-mean": {},
    "gspo": actor(**SEQ_MEAN, policy_loss__loss_mode="gspo"),
    "cispo": actor(policy_loss__loss_mode="cispo"),
    "entropy": actor(entropy_coeff=0.01),
    "entropy, as a metric": actor(calculate_entropy=True),
    "kl": {"change": reference, **actor(use_kl_loss=True, kl_loss_coef=0.1)},
    "dynamic batches": actor(use_dynamic_bsz=True),
    "without a sampler's": {"sampled": False},
    "dr_grpo": actor(**DR_GRPO),
    "zero_advantage": {"options": SCORE},
    "fsdp": {"strategy": "fsdp"},
}
# what `make test` runs of them: a term besides, other micro-batches
QUICK = ("token-mean", "zero_advantage", "dynamic batches", "kl")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in SCENES]
)
def test_what_verl_logs_and_learns_is_the_same(name: str) -> None:
    flags = dict(SCENES[name])
    options = flags.pop("options", OURS)
    runs = [train(options | more, **flags) for more in ({}, SCORED)]
    check_same(*runs)
    auto, score = (run.products.all for run in runs)
    assert auto < 0.85 * score
    for step in runs[0].metrics:
        assert step["actor/ppo_kl" if "actor/ppo_kl" in step else "actor/pg_clipfrac"] == 0.0


def with_kl_in_reward(trainer: Any) -> None:
    reference(trainer)
    trainer.config.algorithm.use_kl_in_reward = True
    trainer.kl_ctrl_in_reward = verl_peer.core_algos().FixedKLController(0.1)


def with_own_update(trainer: Any) -> None:
    base = type(trainer)

    def _update_actor(self: Any, *args: Any, **kwargs: Any) -> Any:
        return base._update_actor(self, *args, **kwargs)

    trainer.__class__ = type("Mine", (base,), {"_update_actor": _update_actor})


def model_with_dropout() -> Any:
    model = verl_peer.model()
    model.model.layers[0].self_attn.attention_dropout = 1e-9
    return model


# what is said -> the run
SCORING: dict[str, dict[str, Any]] = {
    "a batch is not one step of 4 sequences": actor(ppo_mini_batch_size=1),
    "actor.ppo_epochs=2": actor(ppo_epochs=2),
    "actor.shuffle": actor(shuffle=True),
    "algorithm.rollout_correction": {"algorithm__rollout_correction__rollout_is": "token"},
    "algorithm.use_kl_in_reward": {"change": with_kl_in_reward},
    "Mine._update_actor": {"change": with_own_update},
    "dropout, or noise": {"model": model_with_dropout},
    "": {"trainer__critic_warmup": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("reason", SCORING)
def test_verl_scores_where_it_has_to(reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All is as without the option, operations too, and one line says why."""
    flags = dict(SCORING[reason])
    make = flags.pop("model", verl_peer.model)
    runs = [train(OURS | more, model=make(), **flags) for more in ({}, SCORED)]
    check_same(*runs)
    assert runs[0].products.all == runs[1].products.all
    line = f"grpo_kernels: verl scores the old policy before each update ({reason})"
    told = [x for x in capsys.readouterr().out.splitlines() if "verl scores the old" in x]
    assert told == ([line] if reason else [])


def test_who_else_scores(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="old_log_probs: expected one of auto, score, got"):
        train(OURS | {"old_log_probs": "no"})
    is_nan = []

    def change(trainer: Any) -> None:
        advantages, store = trainer._compute_advantage, trainer.replay_buffer

        def look(batch: Any, metrics: Any) -> Any:
            is_nan.append(bool(store.fields[OLD].values().isnan().any()))
            return advantages(batch, metrics)

        trainer._compute_advantage = look

    for options in (OURS, {"impl_backend": "torch"}):
        train(options, steps=1, strategy="fsdp", change=change)
    assert is_nan == [True, False]  # until the update
    assert "verl scores" not in capsys.readouterr().out


@pytest.mark.parametrize("more", [{"mini_batch_size": 4}, {"epochs": 2}], ids=str)
def test_a_second_step_is_refused(more: dict[str, int]) -> None:
    def change(trainer: Any) -> None:
        update = trainer.actor_rollout_wg.update_actor

        def update_actor(data: Any) -> Any:
            data.extra_info.update(more)
            return update(data)

        trainer.actor_rollout_wg.update_actor = update_actor

    with pytest.raises(RuntimeError, match="expected one optimizer step for the 8 sequences"):
        train(OURS, change=change)


def on_ranks(rank: int, ranks: int) -> None:
    for strategy in ("fsdp2", "fsdp"):
        auto, score = (
            train(SCORE | more, strategy=strategy, model=verl_peer.model(layers=2))
            for more in ({}, SCORED)
        )
        check_same(auto, score)
        assert auto.products.all < 0.8 * score.products.all


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(on_ranks, 2)


# Responses of a prompt on one rank, in the optimizer steps that verl made

RANKS, PROMPTS = 2, 6
UIDS = [f"u_{i}" for i in range(PROMPTS) for _ in range(GROUP)]
SHARED = 12  # tokens
LENGTHS = torch.randint(17, 52, (len(UIDS),), generator=torch.Generator().manual_seed(0)).tolist()


def balanced(prompts=PROMPTS, lengths=LENGTHS, **changed):
    """(uid and length) of each sequence, those of the first rank first; and what is logged."""
    options = {"impl_backend": "grpo_kernels"}
    given = {"model.fused_kernel_options": options, "actor.ppo_mini_batch_size": prompts, **changed}
    settings = {f"actor_rollout_ref.{name}": x for name, x in given.items()}
    workers, metrics = SimpleNamespace(_dispatch_info={"actor": [0, 1]}), dict[str, Any]()
    made = bare_trainer(config(**settings), workers)
    made.tokenizer = SimpleNamespace(eos_token_id=0)
    keys = [f"{uid}_{i % GROUP}_0" for i, uid in enumerate(UIDS)]
    tags = [{"seq_len": n, "prompt_len": SHARED} for n in lengths]
    batch = made._balance_batch(Meta(keys, tags), metrics)
    uids = [key.rsplit("_", 2)[0] for key in batch.keys]
    return [*zip(uids, (x["seq_len"] for x in batch.tags), strict=True)], metrics


def steps(found: list[Any], prompts: int) -> list[list[list[Any]]]:
    """The sequences of each rank in each optimizer step."""
    own, size = len(found) // RANKS, prompts * GROUP // RANKS
    ranks = [found[rank * own :][:own] for rank in range(RANKS)]
    return [[rank[i : i + size] for rank in ranks] for i in range(0, own, size)]


@pytest.mark.parametrize("prompts", [PROMPTS, 2])
def test_steps_stay_and_prompts_come_together(prompts: int) -> None:
    stock, _ = balanced(prompts)
    patch_verl()
    ours, metrics = balanced(prompts)
    apart = [0, 0]
    for want, got in zip(steps(stock, prompts), steps(ours, prompts), strict=True):
        assert sorted(x for rank in want for x in rank) == sorted(x for rank in got for x in rank)
        assert len({len(rank) for rank in got}) == 1
        for i, ranks in enumerate((want, got)):
            apart[i] += sum(len({uid for uid, _ in rank}) for rank in ranks)
    assert apart[1] < 0.85 * apart[0]
    if prompts == PROMPTS:  # whole groups
        assert apart[1] == PROMPTS
    own = len(ours) // RANKS
    tokens = [sum(n for _, n in ours[i * own :][:own]) for i in range(RANKS)]
    assert metrics["global_seqlen/balanced_max"] == max(tokens) < 1.2 * min(tokens)


LONG = [SHARED + (400 if i < GROUP else 4) for i in range(len(UIDS))]
STAYS: list[dict[str, Any]] = [
    {"model.use_fused_kernels": False},
    {"model.fused_kernel_options.layout": "padded"},
    {"actor.strategy": "fsdp"},
    {"actor.shuffle": True},
    {"actor.policy_loss.loss_mode": "kl_cov"},
    {"lengths": LONG},  # one group has most of the tokens: verl divides it
]


def test_what_shares_nothing_or_would_change_or_be_slower_stays() -> None:
    stock = [balanced(**changed) for changed in STAYS]
    patch_verl()
    assert [balanced(**changed) for changed in STAYS] == stock


@pytest.mark.usefixtures("forget_warnings")
def test_an_engine_with_a_head_of_its_own_is_told() -> None:
    patch_verl()
    with pytest.warns(UserWarning, match=r"no effect with actor\.strategy=veomni"):
        balanced(**{"actor.strategy": "veomni"})
