"""verl's trainers: responses of a prompt go to one rank, where a tree computes their prompt once.

verl divides a batch over ranks so that each has as many tokens, whichever prompts they belong to.
After it, `changes` exchanges sequences between ranks, within each of the actor's mini-batches: so
each optimizer step sums over the same sequences as before, and each rank has as many. Few groups
can make ranks uneven: if the one that computes most would get more than before, verl's order stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from grpo_kernels.patching import function_of
from grpo_kernels.verl.engine import BACKEND, may_move

PARAMETERS = ("self", "batch", "metrics", "logging_prefix", "keep_minibatch")


def changes(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements for verl.trainer.ppo.ray_trainer and verl.trainer.ppo.v1.trainer_base.

    The first is for ``trainer.use_v1=False``.
    """
    trainer = getattr(module, "RayPPOTrainer", None) or getattr(module, "PPOTrainer", None)
    if trainer is None:
        raise LookupError(f"{module.__name__} has neither RayPPOTrainer nor PPOTrainer")
    theirs: Callable[..., Any] = function_of(trainer, "_balance_batch", PARAMETERS)
    if not hasattr(module, "log_seqlen_unbalance"):
        raise LookupError(f"{module.__name__} has no log_seqlen_unbalance")

    @functools.wraps(theirs)
    def _balance_batch(
        self: Any,
        batch: Any,
        metrics: Any,
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> Any:
        found = theirs(self, batch, metrics, logging_prefix, keep_minibatch)
        balanced = batch if found is None else found  # the older trainer's is changed in place
        if not _asks(self):
            return found
        group = self.actor_rollout_wg
        is_v1 = hasattr(balanced, "tags")
        if is_v1:  # keys are {uid}_{session}_{output}
            prompts = [key.rsplit("_", 2)[0] for key in balanced.keys]
            lengths, shared = ([tag[x] for tag in balanced.tags] for x in ("seq_len", "prompt_len"))
            ranks = max(group._dispatch_info["actor"]) + 1
        else:
            prompts = balanced.non_tensor_batch["uid"].tolist()
            mask, width = balanced.batch["attention_mask"], balanced.batch["prompts"].shape[1]
            lengths, shared = (x.sum(-1).tolist() for x in (mask, mask[:, :width]))
            ranks = self._get_dp_size(group, "actor")
        actor = self.config.actor_rollout_ref
        step = actor.actor.ppo_mini_batch_size * actor.rollout.n
        if ranks == 1 or step % ranks or len(prompts) % step:
            return found
        parts = exchanged(prompts, lengths, shared, ranks, step)
        order = [i for part in parts for i in part]
        balanced.reorder(order if is_v1 else torch.tensor(order))
        logged = module.log_seqlen_unbalance(lengths, parts, logging_prefix)
        metrics.update({name: x for name, x in logged.items() if "balanced_" in name})
        return found

    yield trainer, "_balance_batch", _balance_batch


def _asks(trainer: Any) -> bool:
    """True if the actor shares prompts, and each step is a sum however ranks divide it."""
    config = trainer.config
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    options = model.get("fused_kernel_options", None) or {}
    is_ours = model.get("use_fused_kernels", False) and options.get("impl_backend") == BACKEND
    if not is_ours or options.get("layout", "tree") != "tree" or actor.strategy != "fsdp2":
        return False
    distils = (config.get("distillation", None) or {}).get("enabled", False)
    divides = actor.get("ulysses_sequence_parallel_size", 1) > 1
    # a critic's mini-batches may be others
    if actor.shuffle or distils or divides or getattr(trainer, "use_critic", False):
        return False
    return may_move(actor)


def exchanged(
    prompts: Sequence[Hashable],
    lengths: Sequence[int],
    shared: Sequence[int],
    ranks: int,
    step: int,
) -> list[list[int]]:
    """The sequences of each rank, those of a prompt together, within steps of `step` sequences.

    Args:
        prompts, lengths, shared: of each sequence, the last one the length of its prompt; those of
            the first rank first, and each has its part of the first step first.
    """
    own, size = len(prompts) // ranks, step // ranks

    def computed(part: Sequence[int]) -> int:
        """Tokens of the sequences `part`, prompts counted once."""
        once = {prompts[i]: shared[i] for i in part}
        return sum(lengths[i] - shared[i] for i in part) + sum(once.values())

    def slowest(parts: list[list[int]]) -> int:
        """Those of the rank that has most, over all steps."""
        return sum(max(computed(x[i : i + size]) for x in parts) for i in range(0, own, size))

    found: list[list[int]] = [[] for _ in range(ranks)]
    used = [0] * ranks
    for start in range(0, own, size):
        groups: dict[Hashable, list[int]] = {}
        for rank in range(ranks):
            for i in range(rank * own + start, rank * own + start + size):
                groups.setdefault(prompts[i], []).append(i)
        parts: list[list[int]] = [[] for _ in range(ranks)]
        for left in sorted(groups.values(), key=computed, reverse=True):
            while left:
                fits = [k for k in range(ranks) if len(parts[k]) + len(left) <= size]
                # whole where fewest tokens are, else as many as there is room for
                most = min(range(ranks), key=lambda k: len(parts[k]))
                k = min(fits, key=used.__getitem__) if fits else most
                room = size - len(parts[k])
                parts[k] += left[:room]
                used[k] += computed(left[:room])
                left = left[room:]
        for k, part in enumerate(parts):
            found[k] += part
    return min(found, [[*range(k * own, (k + 1) * own)] for k in range(ranks)], key=slowest)
