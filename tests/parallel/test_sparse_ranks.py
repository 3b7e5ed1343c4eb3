"""Sparse gradients on several ranks: a sharded head draws what one process would, ranks with other tokens do not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import LossConfig, ReferenceHead, SparseGradient, grpo_loss
from tests.support.cheap_entries import entries_cost_nothing
from tests.support.ranks import run_ranks

N, H, V = 60, 16, 900
SPANS = {2: ((0, 300), (300, V)), 3: ((0, 10), (10, 500), (500, V))}
CONFIGS = {
    "one_pass": LossConfig(),
    "two_pass": LossConfig(importance_sampling_level="sequence"),
    "full": LossConfig(beta=0.1, kl_estimator="full"),
}
Found = dict[str, Tensor]


def inputs(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(2, N // 2, H, generator=g) * 1.4, torch.randn(V, H, generator=g)
    ids = (hidden @ weight.t()).softmax(-1).flatten(0, 1).multinomial(1, generator=g).view(2, N // 2)
    return {"hidden": hidden, "weight": weight, "completion_ids": ids, "advantages": torch.tensor([1.0, -0.5])}


def run(name: str, gradient: Any, span: tuple[int, int] = (0, V), **options: Any) -> Found:
    given: dict[str, Any] = inputs()
    hidden, weight = (given[x].clone().requires_grad_() for x in ("hidden", "weight"))
    part = given["weight"][slice(*span)].clone().requires_grad_() if span != (0, V) else weight
    if name == "full":
        given["reference"] = ReferenceHead(given["hidden"] + 0.1, given["weight"][slice(*span)])
    if name == "two_pass":
        given["old_per_token_logps"] = torch.full((2, N // 2), -2.0)
    given |= {"hidden": hidden, "weight": part}
    out = grpo_loss(**given, completion_mask=None, config=CONFIGS[name], gradient=gradient, **options)
    out.loss.backward()
    figures = torch.tensor([float(out.metrics["gradient/d_hidden_error"])] if gradient != "exact" else [0.0])
    return {"hidden": hidden.grad, "weight": part.grad, "error": figures}


def sparse(*, weight: bool) -> SparseGradient:
    return SparseGradient(0.05, weight=weight, seed=7)


def run_sharded(rank: int, world_size: int) -> dict[str, Found]:
    with entries_cost_nothing():
        found = {}
        for name in CONFIGS:
            for weight in (False, True):
                options = {"process_group": dist.group.WORLD, "backend": "torch" if weight else "auto"}
                found[f"{name} {weight}"] = run(name, sparse(weight=weight), SPANS[world_size][rank], **options)
        return found


def test_a_sharded_head_draws_what_one_process_would() -> None:
    """Even shards or not, one of them smaller than a block: top, length and threshold are those of the whole row."""
    with entries_cost_nothing():
        want = {f"{name} {w}": run(name, sparse(weight=w)) for name in CONFIGS for w in (False, True)}
        exact = {name: run(name, "exact") for name in CONFIGS}
    for world_size in (2, 3):
        ranks = run_ranks(run_sharded, world_size)
        for key, whole in want.items():
            apart = (whole["hidden"] - exact[key.split()[0]]["hidden"]).abs().max()
            assert apart > 0
            for rank, (start, stop) in enumerate(SPANS[world_size]):
                got = ranks[rank][key]
                assert (got["hidden"] - whole["hidden"]).abs().max() <= 2e-3 * apart, key
                torch.testing.assert_close(got["weight"], whole["weight"][start:stop], rtol=1e-4, atol=1e-6)
                torch.testing.assert_close(got["error"], whole["error"], rtol=1e-4, atol=0)


def run_alike(rank: int, world_size: int) -> Found:
    """The same tokens and the same seed on ranks that have their own tokens."""
    with entries_cost_nothing():
        return run("one_pass", sparse(weight=False))


def run_sequence(rank: int, world_size: int) -> Found:
    """Each rank has half of each sequence."""
    with entries_cost_nothing():
        given: dict[str, Any] = inputs()
        columns = slice(0, 11) if rank == 0 else slice(11, None)
        hidden, weight = given["hidden"][:, columns].clone().requires_grad_(), given["weight"].clone().requires_grad_()
        out = grpo_loss(
            hidden, weight, given["completion_ids"][:, columns], None, given["advantages"],
            gradient=sparse(weight=False), sequence_group=dist.group.WORLD,
        )  # fmt: skip
        out.loss.backward()
        return {"hidden": hidden.grad, "weight": weight.grad}


def test_ranks_with_tokens_of_their_own_draw_apart() -> None:
    """Else the errors of data-parallel ranks would add up where they should average out."""
    with entries_cost_nothing():
        exact, alone = run("one_pass", "exact")["hidden"], run("one_pass", sparse(weight=False))["hidden"]
    first, second = (x["hidden"] for x in run_ranks(run_alike, 2))
    assert torch.equal(first, alone)
    assert not torch.equal(second, first)
    a, b = (first - exact).flatten(), (second - exact).flatten()
    assert abs(float(a @ b)) <= 0.2 * float(a.norm() * b.norm())
    halves = run_ranks(run_sequence, 2)
    joined = torch.cat([x["hidden"] for x in halves], dim=1)
    assert 0 < float((joined - exact).norm()) <= 0.06 * float(exact.norm())


def run_mismatched(rank: int, world_size: int) -> str:
    try:
        run("one_pass", "exact" if rank else "sparse", SPANS[2][rank], process_group=dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_ranks_of_one_head_have_to_ask_for_the_same() -> None:
    assert all("gradient" in message for message in run_ranks(run_mismatched, 2))
