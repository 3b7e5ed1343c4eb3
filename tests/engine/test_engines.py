"""Which engine serves what, and what it costs, with a second head too: counted floating point
operations, exactly."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

import grpo_kernels
from grpo_kernels import LossConfig, Run, TokenInputs, grpo_loss, linear_divergence
from grpo_kernels.typing import EngineName, LossTypeName
from tests.support import reference
from tests.support.flat import flat
from tests.support.measure import AllocationWatcher, count_flops
from tests.support.small_batch import small_batch

B, T, H, V = 8, 12, 10, 64


def batch(share_zero: float, head: str) -> dict[str, Any]:
    """A padded batch; 3 of the 12 columns do not count; the first sequences have advantage 0."""
    trains = {"trainable": ("hidden", "weight"), "frozen": ("hidden",), "no grad": ()}[head]
    given = small_batch(B, T, H, V, ("ref_per_token_logps",), trains=trains)
    given["advantages"][: int(B * share_zero)] = 0.0
    given["completion_mask"][:, 9:] = 0
    return given


def nvh(run_with: dict[str, Any], config: LossConfig, **options: Any) -> tuple[float, str]:
    """Cost in units of NVH, N the counted tokens, and the engine."""
    engine = ""

    def run() -> None:
        nonlocal engine
        out = flat(grpo_kernels.grpo_loss)(**run_with, config=config, **options)
        engine = out.engine
        if out.loss.requires_grad:
            out.loss.backward()

    flops = count_flops(run)
    return flops / (int(run_with["completion_mask"].sum()) * V * H), engine


COST = {  # of the share s of rows with gradient: (head trains, head frozen)
    "score": (lambda s: 2, lambda s: 2),
    "one_pass": (lambda s: 2 + 4 * s, lambda s: 2 + 2 * s),
    "frozen": (None, lambda s: 2 + 2 * s),
    "two_pass": (lambda s: 2 + 6 * s, lambda s: 2 + 4 * s),
}


@pytest.mark.parametrize(("share_zero", "off_policy"), [(0.0, False), (0.5, False), (0.5, True)])
@pytest.mark.parametrize("head", ["trainable", "frozen", "no grad"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", get_args(LossTypeName))
def test_cost_of_every_loss(loss_type, level, head, share_zero, off_policy):
    inputs = batch(share_zero, head)
    # nothing is clipped
    options = {"importance_sampling_level": level, "max_completion_length": 512}
    config = LossConfig(loss_type=loss_type, epsilon=100.0, **options)
    if off_policy:
        inputs["old_per_token_logps"] = inputs["ref_per_token_logps"] * 0 - 4.2
    couples = off_policy and (level == "sequence" or reference.TERMS[loss_type].per_sequence)
    trained = "two_pass" if couples else "one_pass"
    expected = {"trainable": trained, "frozen": "frozen", "no grad": "score"}[head]
    cost, engine = nvh(inputs, config)
    assert engine == expected
    assert cost == COST[expected][head == "frozen"](1 - share_zero)


def coupled(tokens: TokenInputs) -> torch.Tensor:
    return -tokens.advantages * tokens.logps * tokens.logps.detach().mean()


def coupled_entropy(tokens: TokenInputs) -> torch.Tensor:
    return -tokens.advantages * tokens.logps - tokens.entropies * tokens.logps.detach().mean()


@grpo_kernels.token_level
def token(tokens: TokenInputs) -> torch.Tensor:
    return -tokens.advantages * tokens.logps


SEQUENCE = {"importance_sampling_level": "sequence"}
# With a KL term or an entropy bonus an advantage of 0 leaves no row without gradient; of a custom
# objective none is given.
EVERY_ROW = [  # options, engine of a head that trains, and of a frozen one
    ({"beta": 0.1}, "one_pass", "frozen"),
    ({"beta": 0.1, **SEQUENCE}, "two_pass", "frozen"),
    ({"beta": 0.1, **SEQUENCE, "use_bias_correction_kl": False}, "one_pass", "frozen"),
    ({"entropy_coef": 0.01}, "one_pass", "one_pass"),
    ({"entropy_coef": 0.01, "beta": 0.1}, "one_pass", "one_pass"),
    ({"objective": token}, "one_pass", "frozen"),
    ({"objective": coupled}, "two_pass", "frozen"),
    ({"objective": coupled_entropy}, "two_pass", "two_pass"),
]


@pytest.mark.parametrize(("options", "trainable", "frozen"), EVERY_ROW, ids=range(len(EVERY_ROW)))
def test_cost_where_every_row_carries_gradient(options, trainable, frozen):
    custom = {k: x for k, x in options.items() if k == "objective"}
    config = LossConfig(**{} if custom else options)
    for head, name in (("trainable", trainable), ("frozen", frozen)):
        cost, engine = nvh(batch(0.0 if custom else 0.5, head), config, **custom)
        assert (engine, cost) == (name, COST[name][head == "frozen"](1.0))


def test_two_passes_skip_rows_whose_coefficient_came_out_zero() -> None:
    """The top-entropy mask leaves a quarter of the rows; of ratios far above the clip, half of the
    sequences have a positive advantage. With a frozen head the gradient of all logps was taken in
    the forward, unless there is an entropy bonus."""
    top = LossConfig(top_entropy_quantile=0.25)
    bonus = LossConfig(top_entropy_quantile=0.25, entropy_coef=0.1)
    for head, config, want in (
        ("trainable", top, (2 + 6 * 0.25, "two_pass")),
        ("frozen", top, (4, "frozen")),
        ("frozen", bonus, (2 + 4 * 0.25, "two_pass")),
    ):
        assert nvh(batch(0.0, head), config) == want
    inputs = batch(0.0, "trainable")
    inputs["advantages"] = torch.tensor([1.0, -1.0] * (B // 2))
    inputs["old_per_token_logps"] = torch.full((B, T), -40.0)  # every ratio is far above the clip
    assert nvh(inputs, LossConfig(loss_type="grpo", **SEQUENCE)) == (2 + 6 * 0.5, "two_pass")


@pytest.mark.parametrize("head", ["trainable", "frozen"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_lean_costs_what_two_passes_cost(level: str, head: str) -> None:
    inputs = batch(0.5, head) | {"old_per_token_logps": torch.full((B, T), -4.2)}
    inputs["completion_mask"][:, 8:] = 0  # the rows with gradient are whole blocks of 16
    config = LossConfig(importance_sampling_level=level, epsilon=100.0)
    for budget in (2**12, 2**16, 2**29):  # several slices of the vocabulary, and one
        cost, engine = nvh(inputs, config, engine="lean", workspace_bytes=budget)
        assert (cost, engine) == (COST["two_pass"][head == "frozen"](0.5), "lean")


def test_only_the_head_trains() -> None:
    """No product for d hidden: 2 + 2s in one pass."""
    inputs = batch(0.5, "trainable")
    inputs["hidden"] = inputs["hidden"].detach()
    assert nvh(inputs, LossConfig()) == (3.0, "one_pass")
    metrics = flat(grpo_kernels.grpo_loss)(**inputs).metrics
    assert (metrics["rows/projected"], metrics["rows/gradient"]) == (9 / 12, 0.5)
    assert [x.item() for x in metrics.pairs["rows/gradient"]] == [36, 72]


@pytest.mark.parametrize("engine", get_args(EngineName))
def test_without_a_gradient_nothing_but_the_forward_is_done(engine: str) -> None:
    """Whatever was asked; `test_arguments.py` has the engines that a loss refuses."""
    coupled = LossConfig(**SEQUENCE)
    assert nvh(batch(0.0, "no grad"), coupled, engine=engine) == (2.0, "score")


N = B * T
MIB = 2**20
KINDS = ({}, {"divergence": "forward_kl"}, {"divergence": "jsd", "beta": 0.3})


def two_heads(head: str, n: int = N, v: int = V, h: int = H) -> tuple[Any, ...]:
    """Hidden states, weight, and the teacher's two, of the same width."""
    g = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=g) for shape in ((n, h), (v, h), (n, h), (v, h))]
    made[0].requires_grad_(head != "no grad")
    made[1].requires_grad_(head == "trainable")
    return made[0], made[1], (made[2], made[3])


def divergence_nvh(head: str, gradient: Any = None, **options: Any) -> float:
    """Cost of forward and backward in units of NVH."""
    given, upstream = two_heads(head), torch.full((N,), 0.3) if gradient is None else gradient

    def run() -> None:
        found = flat(linear_divergence)(*given, **options).divergence
        if found.requires_grad:
            found.backward(upstream)

    return count_flops(run) / (N * V * H)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_divergence_costs_8_with_a_head_that_trains(kind: dict[str, Any]) -> None:
    costs = {head: divergence_nvh(head, **kind) for head in ("trainable", "frozen", "no grad")}
    assert costs == {"trainable": 8, "frozen": 6, "no grad": 4}
    for engine in ("two_pass", "lean"):
        options = {"engine": engine, **kind}
        assert divergence_nvh("trainable", **options) == 12
        assert divergence_nvh("frozen", **options) == 10


def test_an_expectation_that_does_not_come_true_costs_a_second_pass_of_the_rows_it_misses() -> None:
    half = torch.full((N,), 0.3)
    half[: N // 4] = 0.9
    assert divergence_nvh("trainable", half) == 8 + 8 / 4
    assert divergence_nvh("trainable", half, expected=half) == 8
    assert divergence_nvh("frozen", half) == 6


def with_exact_kl(given: Any, **options: Any) -> torch.Tensor:
    """A loss whose KL term is the divergence from a reference, of on-policy tokens."""
    hidden, weight, (other, other_weight) = given
    shape = (8, N // 8)
    config = LossConfig(beta=0.1, kl_estimator="full", **options.pop("config", {}))
    return grpo_loss(
        hidden.view(*shape, H), weight, torch.zeros(shape, dtype=torch.long), None, torch.ones(8),
        reference=(other.view(*shape, H), other_weight), config=config, **options,
    ).loss  # fmt: skip


@pytest.mark.parametrize(
    ("old", "level", "cost"), [(False, "token", 8), (True, "token", 8), (True, "sequence", 12)]
)
def test_the_exact_kl_of_a_loss_adds_the_projection_of_the_reference(old, level, cost):
    options: dict[str, Any] = {"config": {"importance_sampling_level": level}}
    if old:
        options["old_per_token_logps"] = torch.full((8, N // 8), -4.0)
    for head, engines in (("trainable", cost), ("frozen", cost - 2), ("no grad", 4)):
        given = two_heads(head)

        def run(given: Any = given) -> None:
            loss = with_exact_kl(given, **options)
            if loss.requires_grad:
                loss.backward()

        assert count_flops(run) / (N * V * H) == engines


@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean"])
def test_the_workspace_holds_both_logits(engine: str) -> None:
    n, v, h, workspace = 1024, 15013, 32, 4 * MIB
    given = two_heads("trainable", n, v, h)
    run = Run(engine=engine, workspace_bytes=workspace)
    with AllocationWatcher() as watch:
        linear_divergence(*given, run=run).divergence.sum().backward()
    gradients = 2 * 4 * (n * h + v * h)  # in the accumulator, and as they are returned
    assert watch.peak <= workspace + gradients + 60 * n * 4
    assert watch.largest < n * v / 8
