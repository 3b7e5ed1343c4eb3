"""A head whose vocabulary is divided among processes, against the float64 reference of the whole
one.

A third of the cases of the differential suite runs on 2 or on 4 ranks, by one of the engines that
are exact for it, in shards that are even or not, and every result and gradient is held to the
bounds of a single process.
"""

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

from grpo_kernels import Head, KeptIds, LoRA, Run, grpo_loss, linear_divergence, linear_logprob
from grpo_kernels.typing import Extra
from tests.support.case_builder import make_case, seeded
from tests.support.cases import fixed_cases, head_cases
from tests.support.ranks import run_ranks
from tests.support.reference import reference_loss, reference_scores
from tests.support.run_case import allowed_engines, engines_of, run, run_scores, upstream_of
from tests.support.sampler import PREFIX, candidates, centered_loss
from tests.support.score_cases import score_cases
from tests.support.tolerance import assert_matches, assert_scores, bounds_of

CASES = [case for case in (*head_cases(), *fixed_cases()) if case.weight.shape[0] >= 10]
SCORED = [case for case in score_cases() if case.weight.shape[0] >= 10]


def spans(vocab: int, parts: int, *, uneven: bool = False) -> list[tuple[int, int]]:
    """[start, stop) of each rank's rows: nearly equal, or growing."""
    shares = [rank + 1 if uneven else 1 for rank in range(parts)]
    stops = [vocab * x // sum(shares) for x in accumulate(shares)]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def same_on_every_rank(x: Tensor) -> bool:
    """Bit by bit, NaN too."""
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
        rows = slice(*spans(case.weight.shape[0], world_size, uneven=uneven)[rank])
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
        rows = slice(*spans(case.weight.shape[0], world_size, uneven=uneven)[rank])
        results, grads = run_scores(case, engine, rows=rows, process_group=dist.group.WORLD)
        assert all(same_on_every_rank(x) for x in results.values()), case.name
        grads = gathered(grads)
        if rank == 0:
            named = case.but(name=f"{case.name}, engine {engine!r}, uneven {uneven}")
            assert_scores(named, reference_scores(case, upstream_of(case)), results, grads, engine)


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
    """All results of a head with rows beyond its vocabulary, on the last rank alone; shards against
    the whole head."""
    start, stop = spans(23, world_size, uneven=world_size == 2)[rank]
    upstream, group = torch.linspace(-1, 1, 9, dtype=torch.float64), dist.group.WORLD
    head, other = make_head(), {name: x.detach() for name, x in make_head("teacher").items()}
    divided = ("weight", "bias", "lora_b")
    part = head | {
        name: head[name].detach()[start:stop].clone().requires_grad_() for name in divided
    }
    for vocab_size in (None, 19):
        wholes, parts = (
            Head(x["weight"], x["bias"], LoRA(x["lora_a"], x["lora_b"]), vocab_size=vocab_size)
            for x in (head, part)
        )
        parts = replace(parts, process_group=group)
        given, shard = (head["hidden"], head["ids"]), slice(start, stop)
        for kind in ("scores", "divergences"):
            found = []
            for of, rows in ((wholes, slice(None)), (parts, shard)):
                if kind == "scores":
                    scores = linear_logprob(given[0], of, given[1], extras=get_args(Extra))
                    main = scores.logps + 0.3 * scores.entropies
                else:
                    second = Head(other["weight"][rows], other["bias"][rows])
                    scores = linear_divergence(given[0], of, (other["hidden"], second))
                    main = scores.divergence
                leaves = [head["hidden"], head["lora_a"], of.weight, of.bias, of.lora.b]
                grads = torch.autograd.grad((main * upstream).sum(), leaves)
                found.append((scores.given, grads))
            (want, want_grads), (got, got_grads) = found
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
            assert all(same_on_every_rank(x.detach()) for x in got.values())
            cut = [*want_grads[:2], *(x[shard] for x in want_grads[2:])]
            torch.testing.assert_close([*got_grads], cut, rtol=1e-11, atol=1e-11)
            if vocab_size is not None and stop > vocab_size:
                assert not any(x[max(0, vocab_size - start) :].any() for x in got_grads[2:])
    shorter = other["weight"][start + rank : stop]
    with pytest.raises(ValueError, match=r"teacher\.head\.weight|refuses"):
        linear_divergence(head["hidden"], parts, (head["hidden"], shorter))
    given = head["hidden"], parts, (head["hidden"], other["weight"][start:stop])
    with pytest.raises(ValueError, match="same beta of"):  # on all ranks
        linear_divergence(*given, divergence="jsd", beta=0.3 if rank else 0.5)


def check_edges(rank: int, world_size: int) -> None:
    """Nearly certain tokens keep their digits; a rank of logits -inf adds nothing, unless a
    soft-cap bounds them."""
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
        scores = linear_logprob(logits, head, ids)
        torch.testing.assert_close(scores.logps.double(), want, rtol=3e-6, atol=0)
        torch.testing.assert_close(scores.entropies.double(), want_entropy, rtol=3e-6, atol=0)
        scores.entropies.sum().backward()
        assert part.grad.isfinite().all()


def check_expectation(rank: int, world_size: int) -> None:
    """A right and a wrong expectation: one pass, and the rest recomputed."""
    head = make_head()
    start, stop = spans(23, world_size)[rank]
    upstream = torch.linspace(-1, 1, 9, dtype=torch.float64)
    want = torch.autograd.grad(linear_logprob(*head_of(head)).logps, head_of(head)[:2], upstream)
    for expected in (upstream, 2 * upstream, upstream.flip(0), upstream * (torch.arange(9) > 3)):
        part = head["weight"].detach()[start:stop].clone().requires_grad_()
        own = Head(part, process_group=dist.group.WORLD)
        scores = linear_logprob(head["hidden"], own, head["ids"], expected=expected)
        got = torch.autograd.grad(scores.logps, (head["hidden"], part), upstream)
        torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got[1], want[1][start:stop], rtol=1e-12, atol=1e-12)


def head_of(head: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return head["hidden"], head["weight"], head["ids"]


def check_dtensors(rank: int, world_size: int) -> None:
    """Shard(0) DTensors, of a number of rows that the ranks do not divide, beside plain or
    replicated hidden states."""
    mesh, head = init_device_mesh("cpu", (world_size,)), make_head()
    scores = linear_logprob(head["hidden"], Head(head["weight"], head["bias"]), head["ids"])
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
        scores = linear_logprob(hidden, Head(weight, bias, process_group=group), head["ids"])
        (scores.logps.sum() + scores.entropies.sum()).backward()
        for x, y in zip((hidden, weight, bias), want, strict=True):
            got = x.grad if x is hidden and not hidden_too else x.grad.full_tensor()
            torch.testing.assert_close(got, y, rtol=1e-12, atol=1e-12)
    columns = distribute_tensor(head["weight"].detach(), mesh, [Shard(1)])
    with pytest.raises(ValueError, match=r"weight: expected a DTensor sharded once, by rows"):
        linear_logprob(hidden, columns, head["ids"])
    says = r"weight: .* got a DTensor.*the head's module.*process_group="
    with pytest.raises(ValueError, match=says):
        linear_logprob(head["hidden"], weight, head["ids"])


def check_errors(rank: int, world_size: int) -> None:
    """A head too short for the ranks, and ids beyond it, raise on all; so do products in other
    dtypes."""
    head, group = make_head(), dist.group.WORLD
    hidden, weight, ids = head_of(head)
    part = weight[slice(*spans(23, world_size)[rank])]
    calls: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = {
        "at least one row|refuses": (weight[: 0 if rank else 23], ids, {}),
        "at least one row of the": (part, ids * 0, {"vocab_size": 3}),
        "at most the 23 rows": (part, ids, {"vocab_size": 24}),
        r"\[0, 23\)": (part, ids + 23, {}),
    }
    for says, (own, wrong, options) in calls.items():
        with pytest.raises(ValueError, match=says):
            linear_logprob(hidden, Head(own, process_group=group, **options), wrong)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=rank == 0),
        pytest.raises(ValueError, match="dtype of the products"),
    ):
        linear_logprob(hidden.float(), Head(part.float(), process_group=group), ids)
    with pytest.raises(TypeError, match="process_group: expected"):
        linear_logprob(hidden, Head(part, process_group="tp"), ids)


def check_kept_sets(rank: int, world_size: int) -> None:
    """Sets in one row are the padded ones; the ranks must agree on them."""
    case = make_case(
        "divided", t=9, kept=14, mask="full", loss_type="grpo", others={"on_missing_set": "full"}
    )
    own = case.weight[rank * 25 : (rank + 1) * 25]
    head = Head(own, process_group=dist.group.WORLD)
    given = case.completion_ids, case.completion_mask, case.advantages
    in_a_row = KeptIds.from_padded(case.kept_ids)
    out = grpo_loss(case.hidden, head, *given, kept_ids=in_a_row, on_missing_set="full")
    whole = grpo_loss(
        case.hidden, case.weight, *given, kept_ids=case.kept_ids, on_missing_set="full"
    )
    for name in ("kept/without_set", "kept/size"):
        torch.testing.assert_close(out.metrics[name], whole.metrics[name], rtol=0, atol=0)
    torch.testing.assert_close(out.loss, whole.loss)
    with pytest.raises(ValueError, match=r"process_group: .*kept_ids"):
        linear_logprob(case.hidden, head, case.completion_ids, kept_ids=case.kept_ids[..., rank:])


def check_candidates(rank: int, world_size: int) -> None:
    """A sampler's candidates, in a loss and as scores, on uneven shards: those of one process."""
    options = {"old": False, "bias": True, "dtype": torch.float64, "t": 7, "lora": 2}
    correction = {f"{PREFIX}correction": True, f"{PREFIX}mode": "token_truncate"}
    case = candidates(make_case("candidates", **options, **correction), 8)
    rows = slice(*spans(50, world_size, uneven=True)[rank])
    loss, want = centered_loss(case)
    for engine in ("one_pass", "two_pass", "lean"):
        out, grads = run(case, engine, rows=rows, process_group=dist.group.WORLD)
        assert same_on_every_rank(out.loss.detach())
        torch.testing.assert_close(out.loss.detach(), loss, rtol=1e-12, atol=1e-13)
        for name, x in gathered(grads).items():
            if x is not None:
                torch.testing.assert_close(x, want[name], rtol=1e-10, atol=1e-13)
    ids, given = case.sampling_topk_ids, (case.hidden, case.completion_ids)
    head = Head(case.weight[rows], process_group=dist.group.WORLD)
    divided = linear_logprob(given[0], head, given[1], topk_ids=ids).topk_logps
    whole = linear_logprob(given[0], case.weight, given[1], topk_ids=ids).topk_logps
    torch.testing.assert_close(divided, whole)
    with pytest.raises(ValueError, match=r"process_group: .*topk_ids"):
        linear_logprob(given[0], head, given[1], topk_ids=ids[..., rank:])


def check_traffic(rank: int, world_size: int) -> dict[str, list[int]]:
    """Numbers that a rank sends, forward and backward, of 64 rows, 16 at a time."""
    sent: dict[str, list[int]] = {}
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(64, 8, generator=g), torch.randn(300, 8, generator=g)
    ids, advantages = torch.randint(300, (4, 16), generator=g), torch.randn(4, generator=g)
    kept = torch.stack([ids, (ids + 1) % 300], dim=-1)
    half = kept.masked_fill(torch.arange(16)[:, None] % 2 > 0, -1)  # of the positions have a set
    given: dict[str, dict[str, Any]] = {"one_pass": {}, "two_pass": {}, "lean": {}}
    given |= {"kept_sets": {"kept_ids": kept}}
    given |= {"kept_sets, half": {"kept_ids": half, "on_missing_set": "full"}}
    for engine, sets in given.items():
        counts: list[int] = []
        wrapped = {
            name: mock.patch.object(dist, name, counting(counts, getattr(dist, name)))
            for name in ("all_gather", "all_reduce")
        }
        leaf = hidden.view(4, 16, 8).requires_grad_()
        with wrapped["all_gather"], wrapped["all_reduce"]:
            part = weight[slice(*spans(300, world_size)[rank])].clone().requires_grad_()
            budget = 20 * 4 * -(-300 // world_size)
            run = Run(engine="auto" if sets else engine, workspace_bytes=budget)
            head = Head(part, process_group=dist.group.WORLD)
            grpo_loss(leaf, head, ids, None, advantages, run=run, **sets).loss.backward()
        sent[engine] = counts
    return sent


def counting(counts: list[int], function: Any) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts.append(args[-1].numel())  # what this rank gives
        return function(*args, **kwargs)

    return counted


def check_rest(rank: int, world_size: int) -> None:
    """On-policy ratios are exactly 1; a group of one rank."""
    g = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(2, 5, 16, generator=g), torch.randn(40, 16, generator=g)
    ids = torch.randint(40, (2, 5), generator=g)
    part = weight[slice(*spans(40, world_size)[rank])].clone().requires_grad_()
    group = dist.group.WORLD
    head = Head(part, process_group=group)
    with torch.no_grad():
        old = linear_logprob(hidden, head, ids)
    out = grpo_loss(hidden, head, ids, None, torch.ones(2), old_per_token_logps=old.logps)
    assert torch.equal(out.logps, old.logps)
    assert out.metrics["ratio"] == 1.0
    alone = [dist.new_group([x]) for x in range(world_size)][rank]
    by_one = linear_logprob(hidden, Head(weight, process_group=alone), ids)
    torch.testing.assert_close(by_one.given, old.given, rtol=0, atol=5e-6)


def check_all(rank: int, world_size: int) -> dict[str, list[int]]:
    for check in (check_padding_rows, check_edges, check_expectation, check_dtensors, check_errors):
        check(rank, world_size)
    if world_size == 2:
        for check in (check_kept_sets, check_candidates, check_rest):
            check(rank, world_size)
    return check_traffic(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
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
