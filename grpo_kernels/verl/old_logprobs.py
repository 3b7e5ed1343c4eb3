"""verl's trainers: no scoring of the old policy where the update computes the same numbers.

verl scores a batch with the policy before it trains on it, for the ratio in its loss and for what
it logs. If the batch is one optimizer step, the forward of that step finds the same
log-probabilities. Then

    `_compute_old_log_prob`  asks the workers to wait: they answer with NaN, and run nothing,
    `_update_actor`          has the loss take its own log-probabilities, detached, as the old ones.
                             The workers keep them, with the entropies. verl's scoring is called
                             again afterwards, gets what they kept, and logs it.

What is asked stands in the batch (`REQUEST`). A worker that does not know it, or cannot wait,
scores as ever: no NaN tells the trainer so.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.modes import random_rates
from grpo_kernels.patching import function_of, replaced
from grpo_kernels.verl.engine import BACKEND, MARK, OPTIONS, chosen
from grpo_kernels.verl.rows import actor_config, flag

REQUEST = "grpo_kernels_old_logprobs"
WAIT, TRAIN, TAKE = "wait", "train", "take"  # a batch's requests, in this order
ROW = "grpo_kernels_row"  # field of a micro-batch: which sequences of the worker's batch it has
# Attributes: of a worker, its scores by sequence, None until they are there (or for all, if it does
# not wait); of a trainer, True from a batch's first request to its last.
KEPT, WAITS = "_grpo_kernels_kept", "_grpo_kernels_waits"

SCORES = ("log_probs", "entropy")  # what verl's scoring returns
OLD, ENTROPY = "old_log_probs", "actor/entropy"
READ_OLD = ("optimal_token_baseline", "tir_optimal_token_baseline")  # advantage estimators


class FirstPass:
    """verl's ``ppo_loss`` for a batch's only step; looks like the ``functools.partial`` it is of.

    `kept` gets the log-probabilities and entropies of each sequence.
    """

    def __init__(self, loss: Any, kept: list[Any], *, entropy: bool) -> None:
        """`entropy`: whether `loss` gets entropies."""
        self.func, self.args, self.keywords = loss.func, loss.args, loss.keywords
        self._loss, self._kept, self._entropy = loss, kept, entropy

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        padding = importlib.import_module("verl.workers.utils.padding")
        rows = data.get(ROW, None)
        if rows is not None:  # else it is a part of a micro-batch, asked for a derivative
            lengths = data["input_ids"].offsets().diff().tolist()
            found = {name: _flat(model_output[name]).split(lengths) for name in SCORES}
            for i, row in enumerate(rows.tolist()):
                self._kept[row] = {name: x[i] for name, x in found.items()}
        data = data.copy()
        data[OLD] = padding.no_padding_2_padding(model_output["log_probs"].detach(), data)
        if not self._entropy:
            model_output = {name: x for name, x in model_output.items() if name != "entropy"}
        return self._loss(model_output=model_output, data=data, dp_group=dp_group)


def _flat(x: Tensor) -> Tensor:
    return (x.values() if x.is_nested else x).detach()


def worker_changes(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements for verl.workers.engine_workers."""
    worker = getattr(module, "TrainingWorker", None)
    if worker is None:
        raise LookupError(f"{module.__name__} has no TrainingWorker")
    infer = function_of(worker, "infer_batch", ("self", "data"))
    train = function_of(worker, "train_batch", ("self", "data"))
    tensordict_utils = importlib.import_module("verl.utils.tensordict_utils")

    def request_of(data: Any) -> Any:  # which may be a reference to a batch
        return flag(data, REQUEST, None) if isinstance(data, module.TensorDict) else None

    def answer(self: Any, data: Any, kept: list[Any] | None) -> Any:
        """What verl's scoring returns; NaN if nothing is kept."""
        if not self.engine.is_mp_src_rank_with_outputs():
            return None
        if kept is None:
            lengths = data["input_ids"].offsets().diff().tolist()
            kept = [dict.fromkeys(SCORES, torch.full((n,), math.nan)) for n in lengths]
        found = {
            name: torch.nested.as_nested_tensor([x[name] for x in kept], layout=torch.jagged)
            for name in SCORES
        }
        metrics = {"metrics": {"mfu": 0.0}}  # no operations
        return tensordict_utils.get_tensordict(found, metrics).cpu()

    @functools.wraps(infer)
    def infer_batch(self: Any, data: Any) -> Any:
        request = request_of(data)
        if request == WAIT:
            reason = _reason_of_worker(self)
            vars(self)[KEPT] = None if reason else [None] * len(data)
            if reason is None:
                return answer(self, data, None)
            _say(reason)
        if request != TAKE:
            return infer(self, data)
        kept = vars(self).pop(KEPT)
        if kept is not None and None in kept:
            raise RuntimeError(f"{REQUEST}: expected an update of the batch before {TAKE!r}")
        return answer(self, data, kept)

    @functools.wraps(train)
    def train_batch(self: Any, data: Any) -> Any:
        kept = vars(self).get(KEPT)
        if request_of(data) != TRAIN or kept is None:
            return train(self, data)
        if kept != [None] * len(data):
            raise RuntimeError(
                f"{OLD}: expected one optimizer step for the {len(kept)} sequences of a batch, got "
                f"a step of {len(data)}; set {OPTIONS}.old_logprobs=score"
            )
        loss = FirstPass(self.loss_fn, kept, entropy=bool(flag(data, "calculate_entropy")))
        data[ROW] = torch.arange(len(data))
        data[OLD] = torch.zeros_like(data[OLD])  # in place of NaN, also where nothing is computed
        tensordict_utils.assign_non_tensor(data, calculate_entropy=True)
        with replaced(self, "loss_fn", loss):
            return train(self, data)

    yield worker, "infer_batch", infer_batch
    yield worker, "train_batch", train_batch


def _reason_of_worker(worker: Any) -> str | None:
    """Why a worker cannot leave the scoring to its update."""
    model = getattr(worker.engine, "module", None)
    if getattr(model, MARK, None) != BACKEND:
        return "another engine than FSDP's"
    if actor_config(worker.loss_fn) is None:
        return "another loss than ppo_loss"
    if any(random_rates(module) for module in model.modules()):  # type: ignore[union-attr]
        return "dropout, or noise"
    return None


def ray_changes(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements for verl.trainer.ppo.ray_trainer (``trainer.use_v1=False``)."""
    trainer = getattr(module, "RayPPOTrainer", None)
    if trainer is None:
        raise LookupError(f"{module.__name__} has no RayPPOTrainer")
    score = function_of(trainer, "_compute_old_log_prob", ("self", "batch"))
    update = function_of(trainer, "_update_actor", ("self", "batch"))
    function_of(trainer, "fit", ("self",))
    if not hasattr(module, "agg_loss"):
        raise LookupError(f"{module.__name__} has no agg_loss")
    own = ("fit", "_compute_old_log_prob", "_update_actor")

    @functools.wraps(score)
    def _compute_old_log_prob(self: Any, batch: Any) -> Any:
        vars(self)[WAITS] = False
        if not _can_wait(self, trainer, own, len(batch)):
            return score(self, batch)
        with _asked(batch.meta_info, WAIT):
            found, mfu = score(self, batch)
        vars(self)[WAITS] = bool(found.batch[OLD].isnan().any())
        return found, mfu

    @functools.wraps(update)
    def _update_actor(self: Any, batch: Any) -> Any:
        if not vars(self).get(WAITS, False):
            return update(self, batch)
        with _asked(batch.meta_info, TRAIN):
            output = update(self, batch)
        with _asked(batch.meta_info, TAKE):
            found, _ = score(self, batch)
        vars(self)[WAITS] = False
        actor, metrics = self.config.actor_rollout_ref.actor, output.meta_info["metrics"]
        batch.batch[OLD] = found.batch[OLD]
        metrics[ENTROPY] = module.agg_loss(
            loss_mat=found.batch["entropys"],
            loss_mask=batch.batch["response_mask"],
            loss_agg_mode=actor.loss_agg_mode,
            loss_scale_factor=actor.loss_scale_factor,
        ).item()
        if "rollout_log_probs" in batch.batch.keys():  # noqa: SIM118
            debug = importlib.import_module("verl.utils.debug.metrics")
            metrics.update(debug.calculate_debug_metrics(batch))
            metrics.update(_rollout_metrics(self, batch))
        return output

    yield trainer, "_compute_old_log_prob", _compute_old_log_prob
    yield trainer, "_update_actor", _update_actor


def v1_changes(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements for verl.trainer.ppo.v1.trainer_base."""
    trainer = getattr(module, "PPOTrainer", None)
    if trainer is None:
        raise LookupError(f"{module.__name__} has no PPOTrainer")
    parameters = ("self", "batch", "metrics")
    score = function_of(trainer, "_compute_old_log_prob", parameters)
    update = function_of(trainer, "_update_actor", parameters)
    function_of(trainer, "_compute_advantage", parameters)
    function_of(trainer, "_step_once", ("self", "metrics", "timing_raw", "sample_batch_size"))
    own = ("_step_once", "_compute_old_log_prob", "_compute_advantage", "_update_actor")

    @functools.wraps(score)
    def _compute_old_log_prob(self: Any, batch: Any, metrics: Any) -> Any:
        vars(self)[WAITS] = False
        if not _can_wait(self, trainer, own, len(batch)):
            return score(self, batch, metrics)
        with _asked(batch.extra_info, WAIT):
            found = score(self, batch, metrics)
        vars(self)[WAITS] = math.isnan(metrics[ENTROPY])
        return found

    @functools.wraps(update)
    def _update_actor(self: Any, batch: Any, metrics: Any) -> Any:
        if not vars(self).get(WAITS, False):
            return update(self, batch, metrics)
        with _asked(batch.extra_info, TRAIN):
            batch = update(self, batch, metrics)
        with _asked(batch.extra_info, TAKE):
            score(self, batch, metrics)
        vars(self)[WAITS] = False
        fields = ["response_mask", "rollout_log_probs", OLD]
        data = module.tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
        )
        if "rollout_log_probs" in data.keys():  # noqa: SIM118
            data = module.DataProto(batch=data.to_padded_tensor())
            metrics.update(_rollout_metrics(self, data))
        return batch

    yield trainer, "_compute_old_log_prob", _compute_old_log_prob
    yield trainer, "_update_actor", _update_actor


@contextmanager
def _asked(info: dict[str, Any], request: str) -> Iterator[None]:
    """Inside, the workers that get a batch with this `info` find the `request`."""
    info[REQUEST] = request
    try:
        yield
    finally:
        del info[REQUEST]


def _rollout_metrics(trainer: Any, batch: Any) -> dict[str, Any]:
    """What verl logs of a `batch` under rollout_corr/."""
    config = trainer.config.algorithm.get("rollout_correction", None)
    if config is None:
        return {}
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    metrics: dict[str, Any]
    _, metrics = helper.compute_rollout_correction_and_add_to_batch(batch, config)
    return metrics


def _can_wait(trainer: Any, cls: type, own: Sequence[str], size: int) -> bool:
    """True if the update may score the `size` sequences of a batch; say it if not."""
    model = trainer.config.actor_rollout_ref.model
    options = model.get("fused_kernel_options", None) or {}
    if not model.get("use_fused_kernels", False) or options.get("impl_backend") != BACKEND:
        return False
    if chosen(options, "old_logprobs", ("auto", "score")) == "score":
        return False
    correction = trainer.config.algorithm.get("rollout_correction", None) or {}
    has_update = trainer.config.trainer.critic_warmup <= trainer.global_steps
    if correction.get("bypass_mode", False) or not has_update:
        return False
    others = [name for name in own if getattr(type(trainer), name) is not getattr(cls, name)]
    if others:
        reason: str | None = f"{type(trainer).__name__}.{others[0]}"
    else:
        reason = _reason_to_score(trainer.config, size)
    if reason is not None:
        _say(reason)
    return reason is None


def _reason_to_score(config: Any, size: int) -> str | None:
    """What reads the old log-probabilities before the update, or in more steps than one."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    correction = algorithm.get("rollout_correction", None) or {}
    step = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    reasons = {
        f"a batch is not one step of {step} sequences": size != step,
        f"actor.ppo_epochs={actor.ppo_epochs}": actor.ppo_epochs != 1,
        "actor.shuffle": actor.shuffle,
        "actor.calculate_sum_pi_squared": actor.get("calculate_sum_pi_squared", False),
        "algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "algorithm.use_pf_ppo": algorithm.get("use_pf_ppo", False),
        f"algorithm.adv_estimator={algorithm.adv_estimator}": algorithm.adv_estimator in READ_OLD,
        "algorithm.rollout_correction": bool(
            correction.get("rollout_is", None) or correction.get("rollout_rs", None)
        ),
        "distillation": (config.get("distillation", None) or {}).get("enabled", False),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@functools.cache
def _say(reason: str) -> None:  # once, where verl says such things
    print(f"{BACKEND}: verl scores the old policy before each update ({reason})")
