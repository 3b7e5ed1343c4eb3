"""`linear_logps(..., expected=...)`: exact whatever was expected; only what was expected wrongly
is recomputed.

Costs are counted in products of all N rows: a right expectation takes 3 (6NVH), and each row that
it does not fit three more of its own (6VH).
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import Expectation, LossOutput, grpo_loss, linear_logps, policy_expectation
from tests.support.case_builder import Case, make_case
from tests.support.flat import flat
from tests.support.measure import count_flops
from tests.support.reference import TERMS, evaluate
from tests.support.run_case import arguments, config_of
from tests.support.sampler import PREFIX, given_ratio

N, H, V = 32, 8, 23
IDS = torch.arange(N) * 5 % V
A = torch.linspace(-1.5, 2.0, N)
B = torch.linspace(0.7, -0.2, N)


def multiplied(rows: int) -> int:
    """The rows that a product of so many takes on a CPU."""
    return max(rows, 16) if rows else 0


def leaves(frozen: bool = False) -> list[Tensor]:
    g = torch.Generator().manual_seed(2)
    shapes = ((N, H), (V, H), (V,))
    return [
        torch.randn(s, generator=g).requires_grad_(i == 0 or not frozen)
        for i, s in enumerate(shapes)
    ]


def run(g, h, frozen=False, **options):
    """Products (in those of all rows) and gradients for upstream gradients g and h."""
    hidden, weight, bias = leaves(frozen)

    def step() -> None:
        scores = flat(linear_logps)(hidden, weight, IDS, bias=bias, **options)
        outs = zip((scores.logps, scores.entropies), (g, h), strict=True)
        pairs = [(out, up) for out, up in outs if out is not None and up is not None]
        torch.autograd.backward(*zip(*pairs, strict=True))

    return count_flops(step) / (2 * N * H * V), [x.grad for x in (hidden, weight, bias)]


def near(got: list[Tensor | None], want: list[Tensor | None], rtol: float = 2e-6) -> bool:
    """Within a few roundings of the largest element of each gradient."""
    assert [x is None for x in got] == [x is None for x in want]
    pairs = [(x, y) for x, y in zip(got, want, strict=True) if x is not None and y is not None]
    return all(float((x - y).abs().max()) <= rtol * float(y.abs().max()) for x, y in pairs)


def some_rows(x: Tensor, rows: int) -> Tensor:
    x = x.clone()
    x[3 : 3 + rows] = x[3 : 3 + rows] * -2 + 0.3
    return x


def ask(index: Tensor, logps: Tensor, entropies: Tensor | None) -> Any:
    return A[index] if entropies is None else (A[index], B[index])


ONES, ROW = torch.ones(N), torch.tensor([5])
FIRST, HALF = torch.arange(N) < 8, torch.arange(N) % 2
ANY, OTHER = torch.linspace(-1.0, 2.0, N).roll(5), torch.linspace(1.5, -0.4, N).roll(9)
WRONG: dict[str, tuple[Any, Tensor | None, Tensor | None]] = {
    "completely": (ANY, OTHER, None),
    "completely, both": ((ANY, OTHER), OTHER, ANY),
    "a, but the entropies' gradient comes": (A, None, B),
    "a, but both come": (A, A, B),
    "a and b, but only a comes": ((A, B), A, None),
    "a and b, but only b comes": ((A, B), None, B),
    "a and b of different scale": ((A, 3 * B), A, B),
    **{f"{x} times too large in a row": (ONES.index_fill(0, ROW, x), ONES, None)
       for x in (1e2, 3e38)},
    **{f"{x} in a row": (A.index_fill(0, ROW, x), A, None) for x in (float("nan"), float("inf"))},
    "nothing but that half are live": (Expectation(None, HALF), A, B),
    "nothing but that none is live": (Expectation(None, torch.zeros(N)), None, B),
    "the largest there is": (A.sign() * torch.finfo(torch.float32).max, ANY, None),
    "beyond float32": (A.double() * 1e300, ANY, None),
    "subnormal, of what is tiny": (A * 1e-42, A * 1e-12, None),
    "nothing comes": (A, torch.zeros(N), None),
    "zero, both": ((torch.zeros(N), torch.zeros(N)), A, B),
    "zero where it comes": (A * (torch.arange(N) < 16), A * (torch.arange(N) >= 16), None),
    "wrongly live": (Expectation(ask, live=HALF), A, B),
    "otherwise each time": (lambda index, logps, _: torch.rand_like(logps), A, None),
    "live and wrong": (Expectation(lambda *x: x[1] * 0 + 1, live=torch.arange(N) % 3), A, B),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_whatever_is_expected(kind: str, every_backend: str) -> None:
    """The gradient is that of what came, at twice the cost of a right expectation at most."""
    # which needs coefficients
    by_one_pass = [] if kind.startswith("nothing but") else [(False, "one_pass")]
    others = [(True, "auto"), *by_one_pass] if every_backend == "cpp" else []
    expected, g, h = WRONG[kind]
    for frozen, engine in [(False, "auto"), *others]:
        products, got = run(g, h, frozen, expected=expected, engine=engine)
        want = run(g, h, frozen, engine="two_pass")[1]
        assert all(x is None or bool(x.isfinite().all()) for x in got), (frozen, engine)
        assert near(got, want, 2e-6 if "in a row" in kind else 5e-6), (frozen, engine)
        assert products <= (4 if frozen else 6), (frozen, engine)


def rows_wrong(a: int, b: int) -> tuple[Tensor, Tensor]:
    return some_rows(A, a), some_rows(B, b)


ONLY_A = Expectation(lambda *x: (A[x[0]], None), has_entropy_gradient=False)
LIVE = Expectation(lambda *x: A[x[0]], live=FIRST)
Row = tuple[Any, Tensor | None, Tensor | None, float]
COSTS: dict[str, Row] = {
    # right, up to a factor
    "a tensor": (A, -0.3 * A, None, 3.0),
    "integers": (torch.ones(N, dtype=torch.long), 1e4 * ONES, None, 3.0),
    "of another dtype": (A.double() * 7, 1e-6 * A, None, 3.0),
    "a pair without entropies": ((A, None), 1e4 * A, None, 3.0),
    "an expectation without entropies": (ONLY_A, A, None, 3.0),
    "both": ((A, B), A, B, 3.0),
    "both, of which one is 0": ((0 * A, B), 0 * A, B, 3.0),
    "both, a function": (ask, -0.3 * A, -0.3 * B, 3.0),
    # rows that do not fit, and no others, are computed again: 6VH each
    **{f"{a} rows wrong about a, {b} about b": (
        rows_wrong(a, b), 0.5 * A, 0.5 * B, 3 + 3 * multiplied(max(a, b)) / N
    ) for a, b in ((0, 0), (4, 0), (0, 12), (4, 4))},
    "the entropies' gradient was not expected": (A, A, B, 6.0),
    "nothing was expected": (torch.zeros(N), A, None, 4.0),
    "half is known to carry none": (A * HALF, A * HALF, None, 2.0),
    "half was wrongly said to carry none": (A * HALF, A, None, 2.0 + 1.5),
    "live: 8 rows": (LIVE, A * FIRST, None, (3 * multiplied(8) + N - 8) / N),
}  # fmt: skip


@pytest.mark.usefixtures("every_backend")
@pytest.mark.parametrize("kind", COSTS)
def test_costs(kind: str) -> None:
    expected, g, h, products = COSTS[kind]
    cost, got = run(g, h, expected=expected)
    assert cost == products
    assert near(got, run(g, h, engine="two_pass")[1])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_upstream_gradient_that_is_not_finite_surfaces(value: float) -> None:
    """A loss scaler must see the overflow, where it was."""
    g = A.index_fill(0, ROW, value)
    got, want = run(g, None, expected=A)[1], run(g, None, engine="two_pass")[1]
    for x, y in zip(got, want, strict=True):
        assert x is not None and y is not None
        assert torch.equal(x.isfinite(), y.isfinite()) and not bool(x.isfinite().all())


def test_expected_entropy_gradient_without_entropies() -> None:
    """Given as a tensor, an entropy's gradient that cannot come is an error."""
    message = r"^expected: expected .*\(a, None\) since there is no entropy"
    with pytest.raises(ValueError, match=message):
        run(A, None, entropy=False, expected=(A, B))
    want = run(A, None, engine="two_pass")[1]
    for expected in (ask, Expectation(lambda *x: (A[x[0]], B[x[0]]))):
        products, got = run(A, None, entropy=False, expected=expected)
        assert products == 3
        assert near(got, want)


def told(case: Case) -> tuple[LossOutput, dict[str, Any], Expectation, Tensor, Tensor | None]:
    """The loss, its arguments, what is expected of it, and (a, b) of its logps and entropies."""
    config, given = config_of(case), arguments(case)
    of_head = ("hidden", "weight", "bias", "completion_ids", "reference")
    inputs = {name: x for name, x in given.items() if name not in of_head}
    out = flat(grpo_loss)(**given, config=config)
    leaves = [x.clone().requires_grad_() for x in (out.logps, out.entropies)]
    corrected = config.vllm_importance_sampling_correction
    same = given_ratio(case, out.logps.double()) if corrected else case
    a, b = torch.autograd.grad(evaluate(same, *leaves).loss, leaves, allow_unused=True)
    return out, given, policy_expectation(config, **inputs), a, b


def assert_foreseen(case, expected_flops):
    """The gradient by `linear_logps` is that of the loss, at the expected cost."""
    out, given, expected, a, b = told(case)
    trains = {name: name not in case.frozen for name in ("hidden", "weight")}
    hidden, weight = (given[name].detach().requires_grad_(x) for name, x in trains.items())

    def step() -> None:
        scores = linear_logps(hidden, weight, case.completion_ids, expected=expected)
        arrives = [(scores.logps, 3 * a), *([] if b is None else [(scores.entropies, 3 * b)])]
        torch.autograd.backward(*zip(*arrives, strict=True))

    assert count_flops(step) == expected_flops(out, a)
    (3 * out.loss).backward()
    assert near([hidden.grad, weight.grad], [given["hidden"].grad, given["weight"].grad], 5e-6)
    return expected


def sampled(mode: str) -> dict[str, Any]:
    """On-policy, with the ratio to a sampler made inside of the loss."""
    correction = {f"{PREFIX}correction": True, f"{PREFIX}mode": mode, f"{PREFIX}clip_max": 1.25}
    return {"old": False, "sampling": True, **correction}


OPTIONS = (
    {}, {"beta": 0.1}, {"entropy_coef": 0.05}, {"ratio": "token"}, {"old": False},
    sampled("token_truncate"),
)  # fmt: skip


@pytest.mark.parametrize("loss_type", [x for x, loss in TERMS.items() if not loss.per_sequence])
def test_policy_expectation_foresees_the_loss(loss_type: str) -> None:
    """Without coupled tokens nothing is computed twice; other rows are projected."""
    for options in OPTIONS:
        shape = {"b": 4, "t": 8, "mask": "full", "zero_adv": True}
        case = make_case(f"foresee/{loss_type}", **shape, loss_type=loss_type, **options)
        product = 2 * case.completion_ids.numel() * case.weight.numel()

        def flops(out: LossOutput, _: Tensor, product: int = product) -> float:
            return round(product * (1 + 2 * float(out.metrics["rows/gradient"])))

        assert_foreseen(case, flops)


COUPLED = [
    {"loss_type": "vespo"}, {"loss_type": "gmpo"}, {"top_entropy_quantile": 0.5},
    {"off_policy_mask_threshold": 0.1}, {"importance_sampling_level": "sequence"},
    sampled("sequence_mask"),
]  # fmt: skip


@pytest.mark.parametrize("options", COUPLED, ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_policy_expectation_of_coupled_tokens(options: dict[str, Any], frozen: bool) -> None:
    """Rows that cannot have a gradient are known; a frozen head needs no more."""
    case = make_case("coupled", b=4, t=8, mask="full", zero_adv=True, **options)
    case = case.but(frozen=frozenset(["weight"] if frozen else []))

    def flops(out: LossOutput, a: Tensor) -> float:
        again = 3 * multiplied(int((a != 0).sum()))
        return 2 * case.weight.numel() * (32 + (16 if frozen else again))

    expected = assert_foreseen(case, flops)
    assert expected.coefficients is None
    assert torch.equal(expected.live, (case.advantages != 0)[:, None].expand(4, 8))


def test_one_large_upstream_gradient_hides_no_wrong_row() -> None:
    g = torch.ones(N).index_fill(0, torch.tensor([0]), 1e8)
    expected = torch.ones(N).index_fill(0, torch.tensor([1]), 5.0)
    got, want = run(g, None, expected=expected)[1], run(g, None, engine="two_pass")[1]
    torch.testing.assert_close(got[0][1:], want[0][1:], rtol=1e-5, atol=1e-7)


def test_a_row_that_gets_no_gradient_after_all_is_exactly_zero() -> None:
    """As a clipped token: no rounding of what was stored for it is left in d hidden."""
    g = A.index_fill(0, torch.tensor([3, 7]), 0.0)
    (d_hidden, *_) = run(g, None, expected=A)[1]
    assert bool((d_hidden[[3, 7]] == 0).all()) and bool((d_hidden[:3] != 0).any())


def test_function_of_the_wrong_kind() -> None:
    for wrong in (1.0, torch.tensor(1.0), torch.ones(N, 1)):
        with pytest.raises((TypeError, ValueError), match=r"^expected: expected .+, got "):
            run(A, None, expected=lambda index, logps, entropies, x=wrong: x)


@pytest.mark.usefixtures("forget_warnings")
def test_an_expectation_that_fits_few_tokens_is_said_once() -> None:
    """It costs 6 products, where a right one costs 3; a few wrong rows are no reason for a word."""
    with warnings.catch_warnings(record=True, action="always") as said:
        assert run(A, None, entropy=False)[0] == 4.0
        assert run(A, None, entropy=False, expected=A)[0] == 3.0
        run(A, None, entropy=False, expected=some_rows(A, 4))
        assert not said
        for _ in range(2):
            assert run(A, None, entropy=False, expected=A.flip(0).abs() + 0.1)[0] > 5.5
    (message,) = (str(x.message) for x in said)
    assert message.startswith(
        "grpo_kernels: expected: in most tokens the upstream gradient is not a multi"
    )
