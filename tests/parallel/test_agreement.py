"""Ranks of one group that are called differently: every one of them raises, at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import (
    Head,
    LoRA,
    LossConfig,
    Run,
    grpo_loss,
    linear_divergence,
    linear_logprob,
    topk_divergence,
)
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


def of_top_k(rank: int) -> Arguments:
    hidden, head = parts(rank)
    ids, logps = torch.tensor([1, 7]).expand(2, 3, 2), torch.full((2, 3, 2), 0.25).log()
    return {"hidden": hidden, "head": head, "teacher_ids": ids, "teacher_logps": logps}


def a_head(**fields: Any) -> Callable[[Arguments], Head]:
    """Another head of the same rows; a function makes a field from the right one's weight."""

    def make(right: Arguments) -> Head:
        weight = right["head"].weight
        made = {name: x(weight) if callable(x) else x for name, x in fields.items()}
        return Head(**{"weight": weight, "process_group": dist.group.WORLD} | made)

    return make


def an_adapter(weight: Tensor, *, trains: bool = False) -> LoRA:
    """Whose `a` may train."""
    return LoRA(torch.ones(2, 4, requires_grad=trains), torch.ones(len(weight), 2))


def with_adapter(rank: int) -> Arguments:
    """Of a frozen body: whether d (hidden @ a.T) is summed hangs on `a` alone."""
    right = a_loss(rank)
    return right | {"hidden": right["hidden"].detach(), "head": a_head(lora=an_adapter)(right)}


Case = tuple[Callable[..., Any], Callable[[int], Arguments], Arguments, str]
# what the odd rank gives instead; "alone": it is wrong by itself, and that rank's own error names
# it
LOSS: dict[str, tuple[Arguments, str]] = {
    "H": ({"hidden": torch.ones(2, 3, 5),
        "head": a_head(weight=lambda w: torch.ones(len(w), 5))}, "hidden"),
    "one more sequence": ({"hidden": torch.ones(3, 3, 4), "completion_ids": IDS[:1].repeat(3, 1),
        "completion_mask": torch.ones(3, 3), "advantages": torch.ones(3)}, "hidden"),
    "other tokens count": ({"completion_mask": torch.ones(2, 3)}, "completion_mask"),
    "fewer tokens count": ({"completion_mask": torch.tensor([[1, 1, 0], [1, 1, 0]])},
        "counted tokens"),
    "advantages per token": ({"advantages": torch.ones(2, 3)}, "advantages"),
    "an input more": ({"old_per_token_logps": -torch.ones(2, 3)}, "old_per_token_logps"),
    "dtype of hidden": ({"hidden": lambda right: right["hidden"].detach().double()}, "hidden"),
    "dtype of weight": ({"head": a_head(weight=lambda w: w.double())}, "weight"),
    "frozen hidden": ({"hidden": lambda right: right["hidden"].detach()}, "gradients wanted"),
    "frozen weight": ({"head": a_head(weight=Tensor.detach)}, "gradients wanted"),
    "bias": ({"head": a_head(bias=lambda w: torch.ones(len(w)))}, "bias"),
    "lora": ({"head": a_head(lora=an_adapter)}, "lora"),
    "soft-cap": ({"head": a_head(final_logit_softcapping=5.0)}, "final_logit_softcapping"),
    "temperature": ({"config": LossConfig(temperature=0.5)}, "temperature"),
    "loss type": ({"loss_type": "grpo"}, "loss_type"),
    "num_items_in_batch": ({"num_items_in_batch": 5.0}, "num_items_in_batch"),
    "objective": ({"objective": lambda right: lambda tokens: tokens.logps}, "objective"),
    "engine": ({"run": Run(engine="two_pass")}, "engine"),
    "backend": ({"run": Run(backend="torch")}, "backend"),
    "budget": ({"run": Run(workspace_bytes=2**21)}, "workspace_bytes"),
    "alone, shape": ({"completion_mask": torch.ones(2, 9)}, "completion_mask"),
    "alone, type": ({"config": {"beta": 0.1}}, "config"),
}  # fmt: skip
SCORES: dict[str, tuple[Arguments, str]] = {
    "extras": ({"extras": ("is_top1",)}, "extras"),
    "no entropy": ({"entropy": False}, "entropy"),
    "per-token temperature": ({"temperature": torch.ones(2, 3)}, "temperature"),
    "expected": ({"expected": torch.ones(2, 3)}, "expected"),
    "kept sets": ({"kept_ids": IDS[..., None]}, "kept_ids"),
    "alone, temperature": ({"temperature": 0.0}, "temperature"),
}
CASES: dict[str, Case] = {
    **{f"loss, {x}": (grpo_loss, a_loss, *case) for x, case in LOSS.items()},
    "loss, a lora that trains": (grpo_loss, with_adapter,
        {"head": a_head(lora=partial(an_adapter, trains=True))}, "gradients wanted"),
    **{f"scores, {x}": (linear_logprob, some_scores, *case) for x, case in SCORES.items()},
    "divergence": (linear_divergence, a_divergence, {"divergence": "forward_kl"}, "divergence"),
    "teacher's H": (linear_divergence, a_divergence, {"teacher": lambda right: (
        torch.ones(2, 3, 6), torch.ones(len(right["head"].weight), 6))}, "reference"),
    "K": (topk_divergence, of_top_k, {"teacher_ids": IDS[..., None], "teacher_logps": -torch.ones(2,
        3, 1)}, "teacher_ids"),
}  # fmt: skip


def error_of(function: Callable[..., Any], given: Arguments) -> str:
    try:
        function(**given)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def attempt(rank: int, world_size: int, name: str, odd: int) -> str:
    """Return the rank's error; rank `odd` makes the other call."""
    function, right, change, _ = CASES[name]
    given = right(rank)
    if rank == odd:
        given |= {
            x: y(right(rank)) if callable(y) and type(y).__name__ == "function" else y
            for x, y in change.items()
        }
    return error_of(function, given)


def another_call(rank: int, world_size: int) -> str:
    if rank:
        return error_of(linear_logprob, some_scores(rank))
    return error_of(grpo_loss, a_loss(rank))


def right_calls(rank: int, world_size: int) -> list[str]:
    calls = dict.fromkeys((function, right) for function, right, _, _ in CASES.values())
    numbers = {"config": LossConfig(temperature=1 if rank else 1.0)}  # 1 and 1.0 are the same
    return [error_of(f, right(rank) | (numbers if f is grpo_loss else {})) for f, right in calls]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(seconds=30.0) as made:
        yield made


def test_every_mismatch_raises_on_every_rank(ranks: Ranks) -> None:
    """The odd rank is now the first, now the second; after it the ranks are in step."""
    for i, (name, (*_, says)) in enumerate(CASES.items()):
        odd = i % 2
        errors = ranks.run(attempt, name, odd)
        alone, other = "alone" in name, errors[1 - odd]
        assert re.search(rf"\b{says}\b", errors[odd]), (name, errors)
        expected = f"rank {odd} refuses" if alone else "expected the same"
        assert f"process_group: {expected}" in other, (name, errors)
        assert alone or says in other, (name, errors)
    assert all("expected the same call" in x for x in ranks.run(another_call))
    assert ranks.run(right_calls) == [[""] * 5] * 2
    assert ranks.starts == 1, "the ranks had to be replaced"
