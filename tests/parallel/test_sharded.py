"""A head whose vocabulary is divided among processes, in shards that are even or not, against the
float64 reference of the whole one, within the bounds of a single process."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, product
from typing import Any, get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from grpo_kernels import Head, LoRA, Run, grpo_loss, linear_divergence, linear_logps
from grpo_kernels.typing import Extra
from tests.support.case_builder import make_case, seeded
from tests.support.cases import fixed_cases, random_case, random_scores
from tests.support.ranks import run_ranks
from tests.support.reference import reference_loss
from tests.support.run_case import allowed_engines, engines_of, run, run_scores, upstream_of
from tests.support.sampler import PREFIX, candidates, centered_loss
from tests.support.tolerance import assert_matches, assert_scores, bounds_of

LOSSES = (*fixed_cases(), *map(random_case, range(400)))
CASES = [case for case in LOSSES if case.weight.shape[0] >= 10]
SCORED = [case for case in map(random_scores, range(150)) if case.weight.shape[0] >= 10]


def spans(vocab: int, parts: int, *, uneven: bool = False) -> list[tuple[int, int]]:
    """[start, stop) of each rank's rows: nearly equal, or growing."""
    shares = [rank + 1 if uneven else 1 for rank in range(parts)]
    stops = [vocab * x // sum(shares) for x in accumulate(shares)]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def rows_of(vocab: int, rank: int, world_size: int, *, uneven: bool = False) -> slice:
    return slice(*spans(vocab, world_size, uneven=uneven)[rank])


def same_on_every_rank(x: Tensor) -> bool:
    return all(
        torch.equal(x.nan_to_num(), other.nan_to_num()) for other in of_ranks(x.contiguous())
    )


def of_ranks(x: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, x)
    return found


def gathered(grads: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Those of the head as of the whole one."""
    for name in ("weight", "bias", "lora_b"):
        x = grads[name]
        if x is not None:
            grads[name] = torch.cat(of_ranks(x))
    return grads


def check_cases(rank: int, world_size: int, first: int) -> set[str]:
    engines = set()
    for number, case in enumerate(CASES[first::6]):
        if number % 4 == 0:
            case = case.but(frozen=frozenset({"weight", "bias"}))
        allowed = ["auto", *sorted(allowed_engines(case) - {"auto"})]
        engine, uneven = allowed[number % len(allowed)], number % 3 > 0
        rows = rows_of(case.weight.shape[0], rank, world_size, uneven=uneven)
        backend = "torch" if number % 5 == 0 else "auto"
        group = dist.group.WORLD
        output, grads = run(case, engine, backend=backend, rows=rows, process_group=group)
        engines.add(output.engine)
        assert same_on_every_rank(output.loss.detach()), case.name
        assert grads["hidden"] is None or same_on_every_rank(grads["hidden"].float()), case.name
        grads = gathered(grads)
        if rank == 0:
            reference = reference_loss(case)
            case = case.but(name=f"{case.name}, engine {engine!r}, uneven {uneven}")
            assert_matches(output, grads, reference, case, bounds_of(reference, case))
    return engines


def check_scores(rank: int, world_size: int, first: int) -> None:
    """Adapters, kept sets, temperatures, divergences from another head and from a list."""
    for number, case in enumerate(SCORED[first::5]):
        engine, uneven = engines_of(case)[number % len(engines_of(case))], number % 3 > 0
        rows = rows_of(case.weight.shape[0], rank, world_size, uneven=uneven)
        results, grads = run_scores(case, engine, rows=rows, process_group=dist.group.WORLD)
        assert all(same_on_every_rank(x) for x in results.values()), case.name
        grads = gathered(grads)
        if rank == 0:
            named = case.but(name=f"{case.name}, engine {engine!r}, uneven {uneven}")
            assert_scores(named, upstream_of(case), results, grads, engine)


def check_every_case(rank: int, world_size: int, first: int) -> set[str]:
    check_scores(rank, world_size, first)
    return check_cases(rank, world_size, first)


@pytest.mark.parametrize(
    ("world_size", "first"), [(2, 0), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_every_case_is_exact_on_shards(world_size: int, first: int) -> None:
    every = {"frozen", "one_pass", "two_pass", "lean", "kept_sets"}
    assert run_ranks(check_every_case, world_size, first)[0] >= every


def make_head(name: str = "head") -> dict[str, Tensor]:
    """Hidden states, a head with an adapter, and ids; the same on every rank."""
    g = seeded(name)
    shapes = {"hidden": (9, 8), "weight": (23, 8), "bias": (23,), "lora_a": (2, 8)}
    made = {
        name: torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()
        for name, shape in (shapes | {"lora_b": (23, 2)}).items()
    }
    return made | {"ids": torch.randint(19, (9,), generator=g)}


def check_padding_rows(rank: int, world_size: int) -> None:
    """Rows beyond the vocabulary, on the last rank alone; against the whole head."""
    rows, group = rows_of(23, rank, world_size, uneven=world_size == 2), dist.group.WORLD
    upstream = torch.linspace(-1, 1, 9, dtype=torch.float64)
    head, other = make_head(), {name: x.detach() for name, x in make_head("teacher").items()}
    divided = ("weight", "bias", "lora_b")
    part = head | {name: head[name].detach()[rows].clone().requires_grad_() for name in divided}
    for vocab_size in (None, 19):
        wholes, parts = (
            Head(x["weight"], x["bias"], LoRA(x["lora_a"], x["lora_b"]), vocab_size=vocab_size)
            for x in (head, part)
        )
        parts = replace(parts, process_group=group)
        for kind in ("scores", "divergences"):
            found = []
            for of, own in ((wholes, slice(None)), (parts, rows)):
                if kind == "scores":
                    scores = linear_logps(head["hidden"], of, head["ids"], extras=get_args(Extra))
                    main = scores.logps + 0.3 * scores.entropies
                else:
                    second = Head(other["weight"][own], other["bias"][own])
                    scores = linear_divergence(head["hidden"], of, (other["hidden"], second))
                    main = scores.divergence
                leaves = [head["hidden"], head["lora_a"], of.weight, of.bias, of.lora.b]
                grads = torch.autograd.grad((main * upstream).sum(), leaves)
                found.append((scores.given, grads))
            (want, want_grads), (got, got_grads) = found
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
            assert all(same_on_every_rank(x.detach()) for x in got.values())
            cut = [*want_grads[:2], *(x[rows] for x in want_grads[2:])]
            torch.testing.assert_close([*got_grads], cut, rtol=1e-11, atol=1e-11)
    shorter = other["weight"][rows.start + rank : rows.stop]
    with pytest.raises(ValueError, match=r"teacher\.head\.weight|refuses"):
        linear_divergence(head["hidden"], parts, (head["hidden"], shorter))
    given = head["hidden"], parts, (head["hidden"], other["weight"][rows])
    with pytest.raises(ValueError, match="same beta of"):  # on all ranks
        linear_divergence(*given, divergence="jsd", beta=0.3 if rank else 0.5)


def check_edges(rank: int, world_size: int) -> None:
    """Nearly certain tokens keep their digits; a rank of logits -inf adds nothing without a cap."""
    vocab = 24
    logits = torch.randn(10, vocab, generator=torch.Generator().manual_seed(8)) - 20.0
    logits[0, 3], logits[1, 20], logits[2, [2, 21]] = 0.0, 0.0, 0.0
    logits[3, 9], logits[4, 9] = 2.0, -90.0
    ids = torch.tensor([3, 20, 2, 9, 9, 0, 23, 6, 7, 13])
    start, stop = spans(vocab, world_size)[rank]
    most = vocab // world_size
    for banned, cap in product(
        (slice(0, 0), slice(0, most), slice(vocab - most, vocab)), (None, 5.0)
    ):
        bias = torch.zeros(vocab)
        bias[banned] = -torch.inf
        exact = logits.double() + bias
        exact = torch.log_softmax(exact if cap is None else cap * torch.tanh(exact / cap), -1)
        want = exact.gather(1, ids[:, None])[:, 0]
        want_entropy = -(exact.exp() * exact.masked_fill(exact.isinf(), 0.0)).sum(-1)
        part = torch.eye(vocab)[start:stop].requires_grad_()
        group = dist.group.WORLD
        head = Head(part, bias[start:stop], process_group=group, final_logit_softcapping=cap)
        scores = linear_logps(logits, head, ids, extras=get_args(Extra))
        torch.testing.assert_close(scores.logps.double(), want, rtol=3e-6, atol=0)
        squares = torch.logsumexp(2 * exact, -1)
        torch.testing.assert_close(scores.log_sum_sq_probs.double(), squares, rtol=3e-6, atol=1e-6)
        means = torch.full_like(squares, -torch.inf) if banned.stop and cap is None else None
        assert means is None or torch.equal(scores.mean_logits.double(), means)
        assert torch.equal(scores.is_top1, want == exact.amax(-1))
        torch.testing.assert_close(scores.entropies.double(), want_entropy, rtol=3e-6, atol=0)
        scores.entropies.sum().backward()
        assert part.grad.isfinite().all()


def head_of(head: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return head["hidden"], head["weight"], head["ids"]


def check_dtensors(rank: int, world_size: int) -> None:
    """Shard(0) DTensors, uneven, beside plain or replicated hidden states."""
    mesh, head = init_device_mesh("cpu", (world_size,)), make_head()
    scores = linear_logps(head["hidden"], Head(head["weight"], head["bias"]), head["ids"])
    leaves = [head[x] for x in ("hidden", "weight", "bias")]
    want = torch.autograd.grad(scores.logps.sum() + scores.entropies.sum(), leaves)
    for hidden_too in (False, True):
        weight, bias = (
            distribute_tensor(head[x].detach(), mesh, [Shard(0)]).requires_grad_()
            for x in ("weight", "bias")
        )
        hidden = head["hidden"].detach().clone()
        hidden = distribute_tensor(hidden, mesh, [Replicate()]) if hidden_too else hidden
        hidden.requires_grad_()
        group = None if hidden_too else mesh.get_group()
        scores = linear_logps(hidden, Head(weight, bias, process_group=group), head["ids"])
        (scores.logps.sum() + scores.entropies.sum()).backward()
        for x, y in zip((hidden, weight, bias), want, strict=True):
            got = x.grad if x is hidden and not hidden_too else x.grad.full_tensor()
            torch.testing.assert_close(got, y, rtol=1e-12, atol=1e-12)
    columns = distribute_tensor(head["weight"].detach(), mesh, [Shard(1)])
    with pytest.raises(ValueError, match=r"weight: expected a DTensor sharded once, by rows"):
        linear_logps(hidden, columns, head["ids"])
    says = r"weight: .* got a DTensor.*the head's module.*process_group="
    with pytest.raises(ValueError, match=says):
        linear_logps(head["hidden"], weight, head["ids"])


def check_errors(rank: int, world_size: int) -> None:
    """What one rank gets wrong raises on all."""
    head, group = make_head(), dist.group.WORLD
    hidden, weight, ids = head_of(head)
    part = weight[rows_of(23, rank, world_size)]
    calls: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = {
        "at least one row|refuses": (weight[: 0 if rank else 23], ids, {}),
        "at least one row of the": (part, ids * 0, {"vocab_size": 3}),
        "at most the 23 rows": (part, ids, {"vocab_size": 24}),
        r"\[0, 23\)": (part, ids + 23, {}),
    }
    for says, (own, wrong, options) in calls.items():
        with pytest.raises(ValueError, match=says):
            linear_logps(hidden, Head(own, process_group=group, **options), wrong)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=rank == 0),
        pytest.raises(ValueError, match="dtype of the products"),
    ):
        linear_logps(hidden.float(), Head(part.float(), process_group=group), ids)
    with pytest.raises(TypeError, match="process_group: expected"):
        linear_logps(hidden, Head(part, process_group="tp"), ids)


def check_candidates(rank: int, world_size: int) -> None:
    """A sampler's candidates, in a loss and as scores, on uneven shards: those of one process."""
    options = {"old": False, "bias": True, "dtype": torch.float64, "t": 7, "lora": 2}
    correction = {f"{PREFIX}correction": True, f"{PREFIX}mode": "token_truncate"}
    case = candidates(make_case("candidates", **options, **correction), 8)
    rows, group = rows_of(50, rank, world_size, uneven=True), dist.group.WORLD
    loss, want = centered_loss(case)
    for engine in ("one_pass", "two_pass", "lean"):
        out, grads = run(case, engine, rows=rows, process_group=group)
        torch.testing.assert_close(out.loss.detach(), loss, rtol=1e-12, atol=1e-13)
        for name, x in gathered(grads).items():
            if x is not None:
                torch.testing.assert_close(x, want[name], rtol=1e-10, atol=1e-13)
    ids, given = case.sampling_topk_ids, (case.hidden, case.completion_ids)
    heads = Head(case.weight[rows], process_group=group), Head(case.weight)
    divided, whole = (linear_logps(given[0], x, given[1], topk_ids=ids) for x in heads)
    torch.testing.assert_close(divided.topk_logps, whole.topk_logps)


def check_traffic(rank: int, world_size: int) -> dict[str, list[int]]:
    """Numbers that a rank sends, forward and backward, of 64 rows, 16 at a time."""
    sent: dict[str, list[int]] = {}
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(4, 16, 8, generator=g), torch.randn(300, 8, generator=g)
    ids, advantages = torch.randint(300, (4, 16), generator=g), torch.randn(4, generator=g)
    kept = torch.stack([ids, (ids + 1) % 300], dim=-1)
    half = kept.masked_fill(torch.arange(16)[:, None] % 2 > 0, -1)  # of the positions have a set
    given: dict[str, dict[str, Any]] = {"one_pass": {}, "two_pass": {}, "lean": {}}
    given |= {"kept_sets": {"kept_ids": kept}}
    given |= {"kept_sets, half": {"kept_ids": half, "on_missing_set": "full"}}
    for engine, sets in given.items():
        counts = sent[engine] = list[int]()
        part = weight[rows_of(300, rank, world_size)].clone().requires_grad_()
        budget = 20 * 4 * -(-300 // world_size)
        run = Run(engine="auto" if sets else engine, workspace_bytes=budget)
        head = Head(part, process_group=dist.group.WORLD)
        with mock.patch.multiple(
            dist,
            all_gather=counting(counts, dist.all_gather),
            all_reduce=counting(counts, dist.all_reduce),
        ):
            leaf = hidden.clone().requires_grad_()
            grpo_loss(leaf, head, ids, None, advantages, run=run, **sets).loss.backward()
    return sent


def counting(counts: list[int], function: Any) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts.append(args[-1].numel())  # what this rank gives
        return function(*args, **kwargs)

    return counted


def check_rest(rank: int, world_size: int) -> None:
    """On-policy ratios are exactly 1; a group of one rank."""
    head = {name: x.detach() for name, x in make_head().items()}
    hidden, weight, ids = (x.unsqueeze(0) if x.shape[0] == 9 else x for x in head_of(head))
    part, group = weight[rows_of(23, rank, world_size)], dist.group.WORLD
    old = linear_logps(hidden, Head(part, process_group=group), ids)
    given = Head(part, process_group=group), ids, None, torch.ones(1)
    out = grpo_loss(hidden, *given, old_per_token_logps=old.logps)
    assert torch.equal(out.logps, old.logps)
    assert out.metrics["ratio"] == 1.0
    alone = [dist.new_group([x]) for x in range(world_size)][rank]
    by_one = linear_logps(hidden, Head(weight, process_group=alone), ids)
    torch.testing.assert_close(by_one.given, old.given)


def check_all(rank: int, world_size: int) -> dict[str, list[int]]:
    for check in (check_padding_rows, check_edges, check_dtensors, check_errors):
        check(rank, world_size)
    if world_size == 2:
        for check in (check_candidates, check_rest):
            check(rank, world_size)
    return check_traffic(rank, world_size)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_outputs_dtensors_errors_and_traffic(world_size: int) -> None:
    """What ranks say first, once; three numbers and an entropy a row, a chunk at a time, of sets at
    once; in the backward d hidden, once. Positions without a set add their rows'."""
    sent = run_ranks(check_all, world_size)[0]
    agreed, of_sets, *rest = sent.pop("kept_sets, half")
    assert (agreed < 200, of_sets, sum(rest)) == (True, 4 * 64, 4 * 32 + 32 * 8 + 64 * 8)
    for engine, counts in sent.items():
        agreed, *gathered, summed = counts
        assert agreed < 200, engine
        assert sum(gathered) == 4 * 64, engine
        assert summed == 64 * 8, engine
    assert len(sent["one_pass"]) > 4, "expected several chunks"
    assert len(sent["kept_sets"]) == 3
