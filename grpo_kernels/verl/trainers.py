"""verl's trainers (v1): skip the scoring of the old policy, and bring prompts to one rank.

verl scores a batch with the policy before it trains on the batch, for the ratio in its loss and for
its logs. If the batch is a single optimizer step, that step's forward computes the same
log-probabilities. Then `_compute_old_log_prob` asks the workers to defer: they run nothing and
answer with NaN. In `_update_actor`, the loss uses its own detached log-probabilities as the old
ones, and the workers keep them along with the entropies. Afterwards verl's scoring is called again;
it collects and logs what the workers kept. The request is stored in the batch (`REQUEST`). A worker
that does not know it, or cannot defer, scores as usual; the trainer recognizes that by the missing
NaN.

verl divides a batch over ranks by number of tokens, without regard to prompts. Afterwards this
module exchanges sequences between ranks within each of the actor's mini-batches, so that a tree
computes the prompt of several responses once.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch

from grpo_kernels.base.checks import warn_once
from grpo_kernels.base.modes import random_rates
from grpo_kernels.patching import found_in, function_of, replaced
from grpo_kernels.verl.engine import BACKEND, MARK, OPTIONS, Changes, Prompts, options_of
from grpo_kernels.verl.rows import actor_config, by_sequence, flag, joined, may_move

REQUEST = "grpo_kernels_old_log_probs"
DEFER, UPDATE, COLLECT = "defer", "update", "collect"  # a batch's requests, in this order
ROW = "grpo_kernels_row"  # field of a micro-batch: its sequences' indices in the worker's batch
# Attribute of a worker: scores by sequence, each None until computed; None if it does not defer.
# Attribute of a trainer between a batch's scoring and update: True if the workers deferred.
KEPT, DEFERRED = "_grpo_kernels_kept", "_grpo_kernels_deferred"

SCORES = ("log_probs", "entropy")  # what verl's scoring returns
OLD = "old_log_probs"
# methods of a trainer; an override may read old log-probabilities before the update
METHODS = ("_step_once", "_compute_advantage", "_compute_old_log_prob", "_update_actor")
READ_OLD = ("optimal_token_baseline", "tir_optimal_token_baseline")  # advantage estimators


class ScoreKeepingLoss:
    """verl's ``ppo_loss`` for a batch that is a single step.

    It has the attributes of the partial that it replaces, so that `name_of` recognizes it. It
    stores each sequence's log-probabilities and entropies in `kept`. `entropy` is True if the loss
    reads entropies.
    """

    def __init__(self, loss: Any, kept: list[Any], *, entropy: bool) -> None:
        self.func, self.keywords = loss.func, loss.keywords  # `name_of` reads these
        self._loss, self._kept, self._entropy = loss, kept, entropy

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        padding = importlib.import_module("verl.workers.utils.padding")
        rows = data.get(ROW, None)
        if rows is not None:  # None: part of a micro-batch, evaluated for the derivative only
            output = {name: model_output[name].detach() for name in SCORES}
            for row, scores in zip(rows.tolist(), by_sequence(output), strict=True):
                self._kept[row] = scores
        data = data.copy()
        data[OLD] = padding.no_padding_2_padding(model_output["log_probs"].detach(), data)
        if not self._entropy:
            model_output = {name: x for name, x in model_output.items() if name != "entropy"}
        return self._loss(model_output=model_output, data=data, dp_group=dp_group)


def worker_changes(module: ModuleType) -> Changes:
    """Yield the replacements for verl.workers.engine_workers."""
    worker = found_in(module, "TrainingWorker")
    infer = function_of(worker, "infer_batch", ("self", "data"))
    train = function_of(worker, "train_batch", ("self", "data"))
    tensordict_utils = importlib.import_module("verl.utils.tensordict_utils")

    def request_of(data: Any) -> Any:  # data may be only a reference to a batch
        return flag(data, REQUEST, None) if isinstance(data, module.TensorDict) else None

    def answer(self: Any, kept: list[Any]) -> Any:
        """Kept scores, in the form that verl's scoring returns."""
        if not self.engine.is_mp_src_rank_with_outputs():
            return None
        return tensordict_utils.get_tensordict(joined(kept)).cpu()

    @functools.wraps(infer)
    def infer_batch(self: Any, data: Any) -> Any:
        request = request_of(data)
        if request == DEFER:
            reason = _reason_of_worker(self)
            vars(self)[KEPT] = None if reason else [None] * len(data)
            if reason is None:
                lengths = data["input_ids"].offsets().diff().tolist()
                return answer(
                    self, [dict.fromkeys(SCORES, torch.full((n,), math.nan)) for n in lengths]
                )
            _say(reason)
        kept = vars(self).pop(KEPT) if request == COLLECT else None
        if kept is None:
            return infer(self, data)
        if None in kept:
            text = f"expected an update of the batch before {COLLECT!r}"
            raise RuntimeError(f"{REQUEST}: {text}, got none")
        return answer(self, kept)

    @functools.wraps(train)
    def train_batch(self: Any, data: Any) -> Any:
        kept = vars(self).get(KEPT)
        if request_of(data) != UPDATE or kept is None:
            return train(self, data)
        if kept != [None] * len(data):
            raise RuntimeError(
                f"{OLD}: expected one optimizer step for the {len(kept)} sequences of a batch, got "
                f"a step of {len(data)}; set {OPTIONS}.old_log_probs=score"
            )
        loss = ScoreKeepingLoss(self.loss_fn, kept, entropy=bool(flag(data, "calculate_entropy")))
        data[ROW] = torch.arange(len(data))
        data[OLD] = torch.zeros_like(data[OLD])  # replaces NaN, also in rows that are not computed
        tensordict_utils.assign_non_tensor(data, calculate_entropy=True)
        with replaced(self, "loss_fn", loss):
            return train(self, data)

    yield worker, "infer_batch", infer_batch
    yield worker, "train_batch", train_batch


def _reason_of_worker(worker: Any) -> str | None:
    """Say why a worker cannot leave scoring to its update; None if it can."""
    model = getattr(worker.engine, "module", None)
    if getattr(model, MARK, None) != BACKEND:
        return "an engine other than FSDP's"
    if actor_config(worker.loss_fn) is None:
        return "a loss other than ppo_loss"
    if any(random_rates(module) for module in model.modules()):  # type: ignore[union-attr]
        return "dropout, or noise"
    return None


def trainer_changes(module: ModuleType) -> Changes:
    """Yield the replacements for verl.trainer.ppo.v1.trainer_base."""
    trainer, of_step = found_in(module, "PPOTrainer"), ("self", "batch", "metrics")
    function_of(trainer, "_step_once", ("self", "metrics", "timing_raw", "sample_batch_size"))
    function_of(trainer, "_compute_advantage", of_step)
    score = function_of(trainer, "_compute_old_log_prob", of_step)
    update = function_of(trainer, "_update_actor", of_step)
    of_balance = (*of_step, "logging_prefix", "keep_minibatch")
    balance = function_of(trainer, "_balance_batch", of_balance)
    correct = found_in(module, "compute_rollout_correction_and_add_to_batch")
    log_seqlen_unbalance = found_in(module, "log_seqlen_unbalance")

    @contextmanager
    def asked(batch: Any, request: str) -> Iterator[None]:
        """Send the `request` to workers that get `batch` inside the context."""
        batch.extra_info[REQUEST] = request
        try:
            yield
        finally:
            del batch.extra_info[REQUEST]

    @functools.wraps(score)
    def _compute_old_log_prob(self: Any, batch: Any, metrics: Any) -> Any:
        can_defer = _can_defer(self, trainer, len(batch))
        with asked(batch, DEFER) if can_defer else nullcontext():
            found = score(self, batch, metrics)
        vars(self)[DEFERRED] = can_defer and math.isnan(metrics["actor/entropy"])
        return found

    @functools.wraps(update)
    def _update_actor(self: Any, batch: Any, metrics: Any) -> Any:
        if not vars(self).pop(DEFERRED, False):
            return update(self, batch, metrics)
        with asked(batch, UPDATE):
            found = update(self, batch, metrics)
        with asked(batch, COLLECT):
            score(self, batch, metrics)
        correction = self.config.algorithm.get("rollout_correction", None)
        fields = ["response_mask", "rollout_log_probs", OLD]
        data = module.tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
        )
        if correction is not None and "rollout_log_probs" in data.keys():  # noqa: SIM118
            padded = module.DataProto(batch=data.to_padded_tensor())
            metrics.update(correct(padded, correction)[1])  # _compute_advantage's were of NaN
        return found

    @functools.wraps(balance)
    def _balance_batch(
        self: Any,
        batch: Any,
        metrics: Any,
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> Any:
        batch = balance(self, batch, metrics, logging_prefix, keep_minibatch)
        if not _shares_prompts(self):
            return batch
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        step = _sequences_of_step(self)
        if ranks == 1 or step % ranks or len(batch) % step:
            return batch
        names = [key.rsplit("_", 2)[0] for key in batch.keys]  # {uid}_{session}_{output}
        lengths, shared = ([tag[x] for tag in batch.tags] for x in ("seq_len", "prompt_len"))
        responses = [n - own for n, own in zip(lengths, shared, strict=True)]
        prompts = Prompts([*zip(names, shared, strict=True)], responses)
        parts = _exchanged(prompts, ranks, step)
        batch.reorder([i for part in parts for i in part])
        logged = log_seqlen_unbalance(lengths, parts, logging_prefix)
        metrics.update({name: x for name, x in logged.items() if "balanced_" in name})
        return batch

    yield trainer, "_compute_old_log_prob", _compute_old_log_prob
    yield trainer, "_update_actor", _update_actor
    yield trainer, "_balance_batch", _balance_batch


def _options(trainer: Any) -> dict[str, Any] | None:
    """Options of this library's head; None if the actor uses another head."""
    model = trainer.config.actor_rollout_ref.model
    given = model.get("fused_kernel_options", None) or {}
    if not model.get("use_fused_kernels", False) or given.get("impl_backend") != BACKEND:
        return None
    strategy = trainer.config.actor_rollout_ref.actor.strategy
    if strategy not in ("fsdp", "fsdp2", "megatron"):
        warn_once(
            f"{OPTIONS}.impl_backend={BACKEND}: no effect with actor.strategy={strategy}, whose "
            "engine keeps its own head; use fsdp, fsdp2 or megatron"
        )
    return options_of(given)


def _distils(config: Any) -> bool:
    return bool((config.get("distillation", None) or {}).get("enabled", False))


def _sequences_of_step(trainer: Any) -> int:
    """Number of sequences of the actor's mini-batch, an optimizer step."""
    config = trainer.config.actor_rollout_ref
    return int(config.actor.ppo_mini_batch_size * config.rollout.n)


def _can_defer(trainer: Any, cls: type, size: int) -> bool:
    """True if the update may score the batch of `size` sequences; print the reason if not."""
    options, config = _options(trainer), trainer.config
    if options is None or options["old_log_probs"] == "score":
        return False
    correction = config.algorithm.get("rollout_correction", None) or {}
    if correction.get("bypass_mode", False) or config.trainer.critic_warmup > trainer.global_steps:
        return False
    others = [x for x in METHODS if getattr(type(trainer), x) is not getattr(cls, x)]
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    step = _sequences_of_step(trainer)
    # These cases read old log-probabilities before the update, or in more than one step.
    reasons = {
        f"{type(trainer).__name__}.{', '.join(others)}": others,
        f"a batch is not one step of {step} sequences": size != step,
        f"actor.ppo_epochs={actor.ppo_epochs}": actor.ppo_epochs != 1,
        "actor.shuffle": actor.shuffle,
        "actor.calculate_sum_pi_squared": actor.get("calculate_sum_pi_squared", False),
        "algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "algorithm.use_pf_ppo": algorithm.get("use_pf_ppo", False),
        f"algorithm.adv_estimator={algorithm.adv_estimator}": algorithm.adv_estimator in READ_OLD,
        "algorithm.rollout_correction": (
            correction.get("rollout_is", None) or correction.get("rollout_rs", None)
        ),
        "distillation": _distils(config),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        _say(reason)
    return reason is None


@functools.cache
def _say(reason: str) -> None:  # cached, so it prints once per reason, to stdout like verl
    print(f"{BACKEND}: verl scores the old policy before each update ({reason})")


def _shares_prompts(trainer: Any) -> bool:
    """True if the actor computes prompts once, and ranks may exchange sequences."""
    options, config = _options(trainer), trainer.config
    actor = config.actor_rollout_ref.actor
    if options is None or options["layout"] != "tree" or actor.strategy != "fsdp2":
        return False
    divides = actor.get("ulysses_sequence_parallel_size", 1) > 1
    # a critic may use different mini-batches
    if actor.shuffle or _distils(config) or divides or getattr(trainer, "use_critic", False):
        return False
    return may_move(actor)


def _exchanged(prompts: Prompts, ranks: int, step: int) -> list[list[int]]:
    """Assign sequences to ranks, with prompts kept together within steps of `step` sequences.

    Each rank's list begins with its part of the first step. With few groups, the load of the ranks
    can become uneven: verl's order is kept if the exchange would give the busiest rank more tokens.
    """
    own, size = len(prompts.of) // ranks, step // ranks
    verls = [[*range(k * own, (k + 1) * own)] for k in range(ranks)]

    def slowest(parts: list[list[int]]) -> int:
        """Tokens of the busiest rank, summed over steps."""
        steps = ([part[i : i + size] for part in parts] for i in range(0, own, size))
        return sum(max(map(prompts.tokens, step)) for step in steps)

    found: list[list[int]] = [[] for _ in range(ranks)]
    used = [0] * ranks
    for start in range(0, own, size):
        groups: dict[Any, list[int]] = {}
        for part in verls:
            for i in part[start : start + size]:
                groups.setdefault(prompts.of[i], []).append(i)
        for left in sorted(groups.values(), key=prompts.tokens, reverse=True):
            while left:
                room = [start + size - len(part) for part in found]
                fits = [k for k in range(ranks) if room[k] >= len(left)]
                # The whole group goes to the rank with the fewest tokens; if it fits nowhere, as
                # many of its sequences as fit go to the rank with the most room.
                k = min(fits, key=used.__getitem__) if fits else room.index(max(room))
                found[k] += left[: room[k]]
                used[k] += prompts.tokens(left[: room[k]])
                left = left[room[k] :]
    return min(found, verls, key=slowest)
