"""A pytest plugin for other people's tests: ours in the place of theirs, in the way that
GRPO_KERNELS_WAY names."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest

WAY, PACKAGE = os.environ.get("GRPO_KERNELS_WAY", ""), os.environ.get("GRPO_KERNELS_PEER", "")
calls = 0  # of ours: a run that never reached it would prove nothing


def counted(function: Any) -> Any:
    """The function, with its calls counted."""

    def count(*args: Any, **kwargs: Any) -> Any:
        global calls
        calls += 1
        return function(*args, **kwargs)

    return count


def pytest_configure(config: pytest.Config) -> None:
    if PACKAGE == "trl":
        _trl_without_hub()
    if WAY in WAYS:
        WAYS[WAY]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if WAY in WAYS and not calls:
        raise pytest.UsageError(f"{WAY}: none of the tests reached ours")


def _trl_without_hub() -> None:
    import torch
    import trl.import_utils as packages
    import trl_hub

    trl_hub.make(Path.cwd())

    def has(name: str) -> Any:
        """Tests of another release ask for packages with functions that this release may not
        have.
        """
        asked = re.fullmatch(r"is_(\w+)_available", name)
        if asked is None:
            raise AttributeError(f"module 'trl.import_utils' has no attribute {name!r}")
        return lambda: importlib.util.find_spec(asked[1]) is not None

    packages.__getattr__ = has  # type: ignore[attr-defined]
    # its kernels would stay in the models of all later tests, and run on GPUs alone
    if not torch.cuda.is_available():
        packages.is_liger_kernel_available = lambda *_, **__: False


def _trl() -> None:
    """Our head for every model that their trainers give one."""
    from grpo_kernels.trl import patch_trl

    _count_heads()
    if not patch_trl():
        raise pytest.UsageError("this TRL is one that we do not know")


def _fused_trainer() -> None:
    """Our trainer under the name of theirs."""
    import trl

    from grpo_kernels.trl import FusedGRPOTrainer

    _count_heads()
    trl.GRPOTrainer = FusedGRPOTrainer


def _count_heads() -> None:
    from grpo_kernels.trl import fused_head

    fused_head.linear_logprob = counted(fused_head.linear_logprob)


def _liger() -> None:
    from grpo_kernels import liger

    liger.grpo_loss = counted(liger.grpo_loss)
    if not liger.patch_liger():
        raise pytest.UsageError("this liger-kernel is one that we do not know")


def _verl() -> None:
    """Their estimators' signatures, from (B, T) rewards to (advantages, returns)."""
    import torch
    from verl.trainer.ppo import core_algos

    from grpo_kernels import advantages as ours

    def groups(index: Any) -> list[int]:
        places = {name: i for i, name in enumerate(dict.fromkeys(index.tolist()))}
        return [places[name] for name in index.tolist()]

    def spread(one: Any, mask: Any) -> tuple[Any, Any]:
        every = one[:, None] * mask
        return every, every

    @torch.no_grad()
    def gae(token_level_rewards: Any, values: Any, response_mask: Any, gamma: Any, lam: Any) -> Any:
        given = token_level_rewards, values, response_mask, float(gamma), float(lam)
        return ours.gae(*given, whiten_advantages=True)

    @torch.no_grad()
    def rloo(token_level_rewards: Any, response_mask: Any, index: Any, **rest: Any) -> Any:
        rewards = token_level_rewards.sum(-1)
        return spread(ours.rloo_advantages(rewards, group_ids=groups(index)), response_mask)

    @torch.no_grad()
    def grpo(
        token_level_rewards: Any, response_mask: Any, index: Any, epsilon: float = 1e-6,
        norm_adv_by_std_in_grpo: bool = True, **rest: Any,
    ) -> Any:  # fmt: skip
        rewards, scale = token_level_rewards.sum(-1), "group" if norm_adv_by_std_in_grpo else "none"
        options = {"group_ids": groups(index), "scale_rewards": scale, "eps": epsilon}
        return spread(ours.group_advantages(rewards, **options), response_mask)

    names = {"gae_advantage_return": gae, "rloo_outcome_advantage": rloo}
    for name, function in (names | {"grpo_outcome_advantage": grpo}).items():
        assert hasattr(core_algos, f"compute_{name}"), f"verl has no compute_{name}"
        setattr(core_algos, f"compute_{name}", counted(function))


WAYS = {
    "patch_trl": _trl,
    "FusedGRPOTrainer": _fused_trainer,
    "patch_liger": _liger,
    "grpo_kernels.advantages": _verl,
}
