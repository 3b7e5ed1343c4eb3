"""The right calls that ranks make together, and whether what each rank got is its part of the whole result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import Head, Scores, grpo_loss, linear_divergence, linear_logprob, topk_divergence
from tests.support.case_builder import seeded
from tests.support.flat import flat

Arguments = dict[str, Any]
ROWS = (4, 6)  # of the head, on each rank


@dataclass(frozen=True)
class Call:
    """A function, what one process would give it, and what of that each rank gives it."""

    function: Callable[..., Any]
    whole: Callable[[], Arguments]
    part: Callable[[Arguments, int], Arguments]
    part_of_result: Callable[[Mapping[str, Tensor], int], Mapping[str, Tensor]] = (
        lambda whole, rank: whole
    )

    def right_part(self, both: Mapping[str, Any], rank: int) -> Arguments:
        """What the rank gives, if all do right; `both` is what this call has besides the usual."""
        return self.part(self.whole() | dict(both), rank)

    def assert_right(self, both: Mapping[str, Any], rank: int) -> None:
        """Make the right call, which has to give the rank's part of what one process gets from the whole."""
        want = results(self.function(**(self.whole() | dict(both))))
        got = results(self.function(**self.right_part(both, rank)))
        for name, x in self.part_of_result(want, rank).items():
            torch.testing.assert_close(
                got[name], x, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


def results(output: Any) -> dict[str, Tensor]:
    """What of an output can be compared, by name."""
    if isinstance(output, Scores):
        return output.given
    return {
        "logps": output.per_token_logps,
        "loss": output.loss,
        "policy_loss": output.metrics["policy_loss"],
    }


def cut(x: Tensor, sizes: tuple[int, ...], rank: int, dim: int = 0) -> Tensor:
    """The rank's piece, a leaf if the whole is one."""
    return x.detach().split(sizes, dim)[rank].clone().requires_grad_(x.requires_grad)


def _loss() -> Arguments:
    g = seeded("loss of ranks")
    return {
        "hidden": torch.randn(2, 3, 4, generator=g).requires_grad_(),
        "weight": torch.randn(10, 4, generator=g).requires_grad_(),
        "completion_ids": torch.randint(10, (2, 3), generator=g),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "advantages": torch.tensor([1.0, -0.5]),
    }


def _head(**others: Tensor) -> Arguments:
    loss = _loss()
    return {"hidden": loss["hidden"], "weight": loss["weight"], **others}


def _logprob() -> Arguments:
    return _head(ids=_loss()["completion_ids"])


def _divergence() -> Arguments:
    g = seeded("teacher of ranks")
    return _head(
        teacher_hidden=torch.randn(2, 3, 5, generator=g),
        teacher_weight=torch.randn(10, 5, generator=g),
    )


def _diverge(
    hidden: Tensor,
    weight: Tensor,
    *,
    teacher_weight: Tensor,
    teacher_logit_scale: float = 1.0,
    **given: Any,
) -> Scores:
    """`linear_divergence` with the fields of all its records as arguments of its own."""
    teacher_head = Head(teacher_weight, logit_scale=teacher_logit_scale)
    scores: Scores = flat(linear_divergence)(hidden, weight, teacher_head=teacher_head, **given)
    return scores


def _top_k() -> Arguments:
    logps, ids = torch.randn(2, 3, 10, generator=seeded("top K of ranks")).log_softmax(-1).topk(4)
    return _head(teacher_ids=ids, teacher_logps=logps)


def _shard(whole: Arguments, rank: int) -> Arguments:
    """The head's rows divided."""
    part = whole | {
        "process_group": dist.group.WORLD,
        "hidden": whole["hidden"].detach().requires_grad_(),
    }
    for name in ("weight", "bias", "teacher_weight"):
        if part.get(name) is not None:
            part[name] = cut(part[name], ROWS, rank)
    if part.get("lora") is not None:
        part["lora"] = replace(part["lora"], b=cut(part["lora"].b, ROWS, rank))
    return part


CALLS = {
    "loss": Call(flat(grpo_loss), _loss, _shard),
    "logprob": Call(flat(linear_logprob), _logprob, _shard),
    "divergence": Call(_diverge, _divergence, _shard),
    "topk": Call(flat(topk_divergence), _top_k, _shard),
}  # fmt: skip
