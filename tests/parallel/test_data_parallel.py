"""DDP, FSDP2 and HSDP in gloo processes: gradients of head and body equal those of one process in
float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from grpo_kernels import GRPOLoss, LossConfig, LossOutput, grpo_loss, linear_logprob
from tests.support import parallel_cases as cases
from tests.support.case_builder import Case, seeded
from tests.support.parallel_cases import LOSSES, SETUPS, TIED, Run, relative_error, truth
from tests.support.ranks import Ranks
from tests.support.reference import reference_loss
from tests.support.tolerance import bounds_of

CPU = torch.device("cpu")
EXACT = {torch.float64: 1e-13, torch.float32: 2e-6}  # of the largest entry
VARIANTS = [
    {"accumulate": accumulate, "last_empty": last_empty}
    for accumulate, last_empty in itertools.product((1, 2), (False, True))
]
OWN_UNIT, ROOT_UNIT = "FSDP2, head its own unit", "FSDP2, head in the root unit"
BOTH = ("off-policy", "sequence ratio")
Gradients = dict[str, Tensor]
# a way to divide the model, a loss, options of model, batch and run
Scene = tuple[str, str, dict[str, Any]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as made:
        yield made


def gradients(
    setup: str, loss: str, *, adapter: str = "", accumulate: int = 1, **options: Any
) -> Gradients:
    """Of one run on this rank; `adapter` names the module that has one."""
    of_run = {name: options.pop(name) for name in ("mesh", "last_empty") if name in options}
    of_loss = cases.adapted_loss(adapter, loss) if adapter else LOSSES[loss]
    run = Run(SETUPS[setup], of_loss, CPU, options.pop("dtype", torch.float64), **of_run)
    return run.train(cases.adapted(adapter)) if adapter else run.gradients(accumulate, **options)


@functools.cache
def wanted(world_size: int, loss: str, *, adapter: str = "", **options: Any) -> Any:
    """Gradients of one process."""
    options.pop("dtype", None)
    if adapter:
        return cases.adapted_truth(adapter, LOSSES[loss])
    return truth(LOSSES[loss], world_size, **options)


def check(
    got: list[Gradients], want: Gradients, what: object, dtype: torch.dtype = torch.float64
) -> None:
    """Every rank has the gradients wanted."""
    for found in got:
        errors = relative_error(found, want)
        assert max(errors.values()) < EXACT[dtype], f"{what}: {errors}"


HEADS: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    "bias": {"bias": True},
    "tied, two parts": {"tied": True, "accumulate": 2, "last_empty": True},
}
SCENES: dict[str, list[Scene]] = {
    "every setup with every loss": [  # each sees each of `VARIANTS`
        (setup, loss, VARIANTS[(i + j) % len(VARIANTS)])
        for (i, setup), (j, loss) in itertools.product(enumerate(SETUPS), enumerate(LOSSES))
    ],
    "heads": [
        (setup, loss, options)
        for (name, options), loss in itertools.product(HEADS.items(), BOTH)
        for setup in (TIED if "tied" in name else ("DDP", OWN_UNIT))
    ],
    "float32": [(OWN_UNIT, loss, {"dtype": torch.float32}) for loss in BOTH],
    "adapters": [
        (setup, loss, {"adapter": where})
        for where, loss in itertools.product(cases.PLACES, BOTH)
        for setup in ("DDP", ROOT_UNIT, OWN_UNIT, "FSDP2, head in a unit with another layer")
    ],
}
HYBRID: list[Scene] = [
    (setup, loss, VARIANTS[i])
    for setup in (ROOT_UNIT, OWN_UNIT)
    for loss, i in (("off-policy", 0), ("sequence ratio", 3), ("frozen head", 2), ("lean", 1))
]


def run_scenes(rank: int, world_size: int, scenes: list[Scene]) -> list[Gradients]:
    """On four ranks two replicas of two shards each."""
    mesh = {"mesh": cases.hsdp_mesh("cpu", world_size)} if world_size == 4 else {}
    return [gradients(setup, loss, **options, **mesh) for setup, loss, options in scenes]


def check_scenes(ranks: Ranks, scenes: list[Scene]) -> None:
    found = zip(*ranks.run(run_scenes, scenes), strict=True)
    for (setup, loss, options), got in zip(scenes, found, strict=True):
        want = wanted(ranks.world_size, loss, **options)
        check([*got], want, (setup, loss, options), options.get("dtype", torch.float64))


@pytest.mark.parametrize("name", SCENES)
def test_gradients_are_those_of_one_process(ranks: Ranks, name: str) -> None:
    check_scenes(ranks, SCENES[name])


def test_two_replicas_of_two_shards_each() -> None:
    with Ranks(4) as four:
        check_scenes(four, HYBRID)


def run_full_tensor(rank: int, world_size: int) -> dict[str, Gradients]:
    """The head its own unit, its weight read as TRL and verl read it, and given as its module."""
    run = Run(SETUPS[OWN_UNIT], LOSSES["off-policy"], CPU, torch.float64)
    given = cases.arguments(run.loss, run.batch, run.items)
    found = {}
    for way in ("full_tensor", "module"):
        model = cases.make_model(torch.float64, run.loss)
        wrapped = run.setup.wrap(model, None)

        def then(hidden: Tensor, head: Any = model.lm_head, way: str = way) -> Tensor:
            if way == "full_tensor":
                return grpo_loss(hidden, head.weight.full_tensor(), **given).loss
            shorter = {**given, "completion_mask": run.batch.completion_mask[:, 1:]}
            with pytest.raises(ValueError, match="completion_mask: expected shape"):
                grpo_loss(hidden, head, **shorter)
            return grpo_loss(hidden, head, **given).loss  # a call that failed leaves nothing behind

        wrapped(run.batch.tokens, then).backward()
        found[way] = cases.gradients_of(model)
    return found


def test_a_bare_full_tensor_gives_a_head_gradient_that_is_wrong_by_about_all_of_it(
    ranks: Ranks,
) -> None:
    want = truth(LOSSES["off-policy"], 2)
    others = {name: x for name, x in want.items() if name != "lm_head.weight"}
    for found in ranks.run(run_full_tensor):
        check([found["module"]], want, "module")
        wrong = found["full_tensor"].pop("lm_head.weight") - want["lm_head.weight"]
        assert 0.5 < float(wrong.norm() / want["lm_head.weight"].norm()) < 2.0
        check([found["full_tensor"]], others, "only the head's is wrong")


def run_divided(rank: int, world_size: int) -> list[str]:
    """What is said of a head whose weight is not whole: outside the unit it belongs to, and read
    from outside."""
    run = Run(SETUPS[ROOT_UNIT], LOSSES["off-policy"], CPU, torch.float64)
    model = cases.make_model(torch.float64, run.loss)
    run.setup.wrap(model, None)
    head = model.lm_head
    hidden = torch.randn(cases.SEQUENCES, cases.COLUMNS, cases.WIDTH, dtype=torch.float64)
    given = cases.arguments(run.loss, run.batch, run.items)
    messages = []
    for given_head in (head, head.weight):
        with pytest.raises(ValueError, match="weight: expected a plain tensor, got a") as raised:
            grpo_loss(hidden, given_head, **given)
        messages.append(str(raised.value))
    return messages


def test_a_divided_weight_raises_and_the_message_names_the_fix(ranks: Ranks) -> None:
    for message in itertools.chain(*ranks.run(run_divided)):
        assert "pass the head's module instead of its weight" in message
        assert "process_group=" in message


def run_mixed(rank: int, world_size: int, output_dtype: torch.dtype | None) -> dict[str, Any]:
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    policy = MixedPrecisionPolicy(**dtypes, output_dtype=output_dtype)
    wrap = cases.units("mid", "lm_head", mp_policy=policy)
    run = Run(cases.Setup(wrap, inside=False), LOSSES["sequence ratio"], CPU, torch.float32)
    model = cases.make_model(torch.float32, run.loss)
    wrapped = run.setup.wrap(model, None)
    hidden = wrapped(run.batch.tokens)
    given = cases.arguments(run.loss, run.batch, run.items)
    out = grpo_loss(hidden, model.lm_head, config=LossConfig(**run.loss.config), **given)
    with torch.no_grad():
        ids, mask = run.batch.completion_ids, run.batch.completion_mask
        scores = linear_logprob(hidden, model.lm_head, ids, completion_mask=mask)
    out.loss.backward()
    results = {"hidden": hidden.detach(), "loss": out.loss.detach(), "logps": out.logps}
    scored = {"scored": scores.logps, "entropies": scores.entropies}
    return {**results, **scored, "grad": cases.whole(model.lm_head.weight.grad), "given": given}


@pytest.mark.parametrize("output_dtype", [None, torch.bfloat16], ids=["", "bf16 outputs"])
def test_mixed_precision_rounds_weights_and_hidden_states_and_nothing_else(
    ranks: Ranks, output_dtype: torch.dtype | None
) -> None:
    got = ranks.run(run_mixed, output_dtype)
    model = cases.make_model(torch.float32, LOSSES["sequence ratio"])
    weight = model.lm_head.weight.detach().bfloat16()
    total, allowed = torch.zeros(2, *weight.shape, dtype=torch.float64)
    for found in got:
        assert found["hidden"].dtype == torch.bfloat16
        assert found["loss"].dtype == found["logps"].dtype == found["scored"].dtype == torch.float32
        config = LOSSES["sequence ratio"].config
        case = Case("", found["hidden"], weight, config=config, **found["given"])
        want = reference_loss(case)
        bounds = bounds_of(want, case)
        assert not bounds.ambiguous
        for name in ("logps", "scored"):
            assert bool(((found[name] - want.logps).abs() <= bounds.logps).all()), name
        assert bool(((found["entropies"] - want.entropies).abs() <= bounds.entropies).all())
        assert abs(float(found["loss"] - want.loss)) <= bounds.loss
        total, allowed = total + want.d_weight / 2, allowed + bounds.d_weight / 2
    for found in got:
        assert bool(((found["grad"] - total).abs() <= allowed + 1e-7 * total.abs()).all())


def run_logprobs(rank: int, world_size: int) -> dict[tuple[str, bool], Gradients]:
    """A loss of one's own, on log-probabilities that are changed in place first; with entropies and
    without."""
    found = {}
    for setup, entropy in itertools.product(("DDP", OWN_UNIT, ROOT_UNIT), (True, False)):
        run = Run(SETUPS[setup], LOSSES["off-policy"], CPU, torch.float64)
        model = cases.make_model(torch.float64, run.loss)
        wrapped = run.setup.wrap(model, None)
        head: Any = model.lm_head
        options = {"completion_mask": run.batch.completion_mask, "entropy": entropy}

        def then(hidden: Tensor, head: Any = head, run: Run = run, options: Any = options) -> Any:
            return linear_logprob(hidden, head, run.batch.completion_ids, **options)

        scores = wrapped(run.batch.tokens, then)
        scores.logps.mul_(3.0)
        loss = scores.logps.square().sum()
        assert (scores.entropies is not None) == entropy
        (loss - scores.entropies.sum() if entropy else loss).backward()
        found[setup, entropy] = cases.gradients_of(model)
    return found


def logprobs_truth(entropy: bool) -> Gradients:
    model = cases.make_model(torch.float64, LOSSES["off-policy"])
    for rank in range(2):
        batch = cases.make_batch(rank, 2, torch.float64, last_empty=False)
        log_probs = torch.log_softmax(model(batch.tokens) @ model.lm_head.weight.T, dim=-1)
        logps = log_probs.gather(-1, batch.completion_ids[..., None])[..., 0]
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        per_token = (3.0 * logps).square() - (entropies if entropy else 0.0)
        (per_token * batch.completion_mask).sum().div(2).backward()
    return cases.gradients_of(model)


def test_logprobs_and_entropies_of_a_divided_head_are_differentiable(ranks: Ranks) -> None:
    for found in ranks.run(run_logprobs):
        for (setup, entropy), got in found.items():
            check([got], logprobs_truth(entropy), setup)


class ReturnsTheOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 11, bias=False)
        for name, x in self.named_parameters():
            nn.init.normal_(x, generator=seeded(name))
        self.loss = GRPOLoss(loss_type="grpo")

    def forward(self, x: Tensor) -> LossOutput:
        ids = torch.arange(10).view(2, 5)
        return self.loss(self.body(x), self.head.weight, ids, None, torch.tensor([1.0, -0.5]))


def static_graph(rank: int, world_size: int, wrap: bool = True) -> list[Tensor]:
    """Gradients of two steps: the first is where DDP learns the graph."""
    module: nn.Module = ReturnsTheOutput()
    if wrap:
        module = nn.parallel.DistributedDataParallel(module, static_graph=True)
    for step in range(2):
        module.zero_grad()
        out = module(torch.randn(2, 5, 6, generator=seeded(f"step {step}, rank {rank}")))
        assert isinstance(out, LossOutput) and out.metrics.pairs["rows/projected"][1] == 10
        out.loss.backward()
    return [x.grad.clone() for x in module.parameters() if x.grad is not None]


def test_an_output_of_ddp_with_a_static_graph_keeps_its_gradients(ranks: Ranks) -> None:
    alone = [static_graph(rank, 2, wrap=False) for rank in range(2)]
    want = [torch.stack(x).mean(0) for x in zip(*alone, strict=True)]
    for found in ranks.run(static_graph):
        torch.testing.assert_close(found, want)
