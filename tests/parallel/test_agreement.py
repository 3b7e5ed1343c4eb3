"""Ranks of one group that are called differently: every one of them raises, at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import Head, LoRA, LossConfig, Run, grpo_loss, linear_divergence, linear_logps
from tests.support.case_builder import seeded
from tests.support.ranks import Ranks

Arguments = dict[str, Any]
IDS = torch.randint(10, (2, 3), generator=seeded("ids of ranks"))


def parts(rank: int) -> tuple[Tensor, Head]:
    """Hidden states (2, 3, 4), which both ranks have, and half of a head (10, 4)."""
    g = seeded("loss of ranks")
    hidden, weight = torch.randn(2, 3, 4, generator=g), torch.randn(10, 4, generator=g)
    own = weight.split((4, 6))[rank].clone().requires_grad_()
    return hidden.requires_grad_(), Head(own, process_group=dist.group.WORLD)


def a_loss(rank: int) -> Arguments:
    hidden, head = parts(rank)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    given = {"completion_mask": mask, "advantages": torch.tensor([1.0, -0.5])}
    return {"hidden": hidden, "head": head, "completion_ids": IDS, **given}


def some_scores(rank: int) -> Arguments:
    hidden, head = parts(rank)
    return {"hidden": hidden, "head": head, "completion_ids": IDS}


def a_divergence(rank: int) -> Arguments:
    hidden, head = parts(rank)
    teacher = torch.ones(2, 3, 5), torch.ones(len(head.weight), 5)
    return {"hidden": hidden, "head": head, "teacher": teacher}


def an_adapter(weight: Tensor, *, trains: bool = False) -> LoRA:
    """Whose `a` may train."""
    return LoRA(torch.ones(2, 4, requires_grad=trains), torch.ones(len(weight), 2))


def a_head(**fields: Any) -> Callable[[Arguments], Arguments]:
    """Another head of the same rows; a function makes a field from the right one's weight."""

    def change(right: Arguments) -> Arguments:
        weight = right["head"].weight
        made = {name: x(weight) if callable(x) else x for name, x in fields.items()}
        return {"head": Head(**{"weight": weight, "process_group": dist.group.WORLD} | made)}

    return change


def with_adapter(rank: int) -> Arguments:
    """Of a frozen body: whether d (hidden @ a.T) is summed hangs on `a` alone."""
    right = a_loss(rank)
    return right | {"hidden": right["hidden"].detach()} | a_head(lora=an_adapter)(right)


# what is named, and what the odd rank gives instead
LOSS: list[tuple[str, Any]] = [
    ("completion_mask", {"completion_mask": torch.ones(2, 3)}),
    ("counted tokens", {"completion_mask": torch.tensor([[1, 1, 0], [1, 1, 0]])}),
    ("old_per_token_logps", {"old_per_token_logps": -torch.ones(2, 3)}),
    ("advantages", {"advantages": torch.ones(2, 3)}),
    ("weight", a_head(weight=lambda w: w.double())),
    ("gradients wanted", lambda right: {"hidden": right["hidden"].detach()}),
    ("gradients wanted", a_head(weight=Tensor.detach)),
    ("bias", a_head(bias=lambda w: torch.ones(len(w)))),
    ("lora", a_head(lora=an_adapter)),
    ("final_logit_softcapping", a_head(final_logit_softcapping=5.0)),
    ("temperature", {"config": LossConfig(temperature=0.5)}),
    ("objective", {"objective": lambda tokens: tokens.logps}),
    ("engine", {"run": Run(engine="two_pass")}),
    ("workspace_bytes", {"run": Run(workspace_bytes=2**21)}),
]
# the odd rank's call is wrong by itself, and that rank's own error names it
ALONE = [("completion_mask", {"completion_mask": torch.ones(2, 9)}), ("config", {"config": {}})]
CASES: list[tuple[Any, Callable[[int], Arguments], str, Any]] = [
    *((grpo_loss, a_loss, *case) for case in ALONE + LOSS),
    (grpo_loss, with_adapter, "gradients wanted", a_head(lora=partial(an_adapter, trains=True))),
    (linear_logps, some_scores, "extras", {"extras": ("is_top1",)}),
    (linear_logps, some_scores, "kept_ids", {"kept_ids": IDS[..., None]}),
    (linear_divergence, a_divergence, "divergence", {"divergence": "forward_kl"}),
]


def error_of(function: Callable[..., Any], given: Arguments) -> str:
    try:
        function(**given)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def attempt(rank: int, world_size: int, number: int) -> str:
    """Return the rank's error; the odd rank, now the first, now the second, calls otherwise."""
    function, right, _, change = CASES[number]
    given = right(rank)
    if rank == number % 2:
        given |= change(given) if callable(change) else change
    return error_of(function, given)


def another_call(rank: int, world_size: int) -> str:
    if rank:
        return error_of(linear_logps, some_scores(rank))
    return error_of(grpo_loss, a_loss(rank))


def right_calls(rank: int, world_size: int) -> list[str]:
    calls = dict.fromkeys((function, right) for function, right, _, _ in CASES)
    numbers = {"config": LossConfig(temperature=1 if rank else 1.0)}  # 1 and 1.0 are the same
    return [error_of(f, right(rank) | (numbers if f is grpo_loss else {})) for f, right in calls]


def test_every_mismatch_raises_on_every_rank() -> None:
    with Ranks(seconds=30.0) as ranks:
        for i, (*_, says, _) in enumerate(CASES):
            errors = ranks.run(attempt, i)
            alone, other = i < len(ALONE), errors[1 - i % 2]
            assert re.search(rf"\b{says}\b", errors[i % 2]), (says, errors)
            expected = f"rank {i % 2} refuses" if alone else "expected the same"
            assert f"process_group: {expected}" in other, (says, errors)
            assert alone or says in other, (says, errors)
        assert all("expected the same call" in x for x in ranks.run(another_call))
        assert ranks.run(right_calls) == [[""] * 4] * 2
        assert ranks.starts == 1, "the ranks had to be replaced"
