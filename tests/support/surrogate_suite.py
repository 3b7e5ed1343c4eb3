"""The tests that every backend's surrogates and KL estimators pass, and its fused kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig, Run, grpo_loss, linear_logprob, policy_loss_from_logps
from grpo_kernels.backends.interface import FusedRowBackend
from grpo_kernels.objective.losses import LOSSES
from grpo_kernels.token_loss.formulas import ESTIMATORS, SURROGATES, times
from tests.support.reference_terms import TERMS, either, filled, vespo
from tests.support.row_cases import DEVICE, ON_POLICY, same
from tests.support.row_truth import U, check

INF, NAN = math.inf, math.nan
Constants = tuple[float, ...]
LOG_RATIOS = (
    -INF,
    -200,
    -80,
    -3,
    -0.5,
    -0.25,
    -0.1,
    -1e-4,
    0.0,
    1e-6,
    0.1,
    0.17,
    0.25,
    0.5,
    3,
    20,
    87,
    88.5,
)
ADVANTAGES = (-2.5, -1.0, -1e-3, -0.0, 0.0, 1e-3, 0.7, 3.0)


def grid(device: str, special: bool = False) -> list[Tensor]:
    """Log-ratios, advantages and log-probabilities in all combinations."""
    ratios = [*LOG_RATIOS, 200, 800, INF, NAN] if special else list(LOG_RATIOS)
    logps = (-3.0, 0.0, -INF) if special else (-3.0, -0.2)
    combinations = torch.cartesian_prod(*(torch.tensor(x) for x in (ratios, ADVANTAGES, logps))).to(
        device
    )
    return [x.contiguous() for x in combinations.unbind(1)]


# Loss type and options. At R = 0 the ratio is exactly 1, so that it meets a bound of 1 exactly, and
# both branches of a minimum tie.
CASES: list[tuple[str, dict[str, float]]] = [
    ("grpo", {"epsilon_high": 0.28}),
    ("grpo", {"epsilon_high": 0.28, "delta": 1.5}),
    ("grpo", {"epsilon": 0.0, "epsilon_high": 0.28}),
    ("grpo", {"epsilon_high": 0.0}),
    ("grpo", {"epsilon": 0.5, "epsilon_high": 0.28, "delta": 1.0}),
    ("grpo", {"epsilon_high": 0.28, "delta": 1.1}),
    ("grpo", {"epsilon": 0.0}),
    ("cispo", {"epsilon_high": 5.0}),
    ("cispo", {"epsilon_high": 1.0}),
    *((name, {}) for name, loss in LOSSES.items() if loss.surrogate not in ("clipped", "cispo")),
]
LOSS_OF = {
    (LOSSES[name].surrogate, LOSSES[name].constants(LossConfig(loss_type=name, **options))): (
        name,
        options,
    )
    for name, options in CASES
}
EACH = [*LOSS_OF]
each_surrogate = pytest.mark.parametrize(("name", "constants"), EACH, ids=str)


def mirrored(name: str, constants: Constants, *inputs: Tensor) -> Tensor:
    """What torch makes of the formula: (3, n)."""
    return torch.stack(SURROGATES[name](*inputs, *constants))


def steepness(name: str, constants: Constants, log_ratio: Tensor) -> Tensor:
    """How many times a relative error of the ratio there is in a loss."""
    ratio = log_ratio.double().exp()
    ratio = torch.where(ratio < 1e3, ratio, 0.0)  # beyond it a sigmoid is 0 or 1, and phi is 0
    if name == "vespo":
        return max(constants) * (1 + ratio + torch.where(ratio > 0, log_ratio.double().abs(), 0.0))
    return 1 + (0 * ratio if name in ("clipped", "cispo", "unclipped") else ratio)


def is_nothing(name: str, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """(n,) bool: where loss and derivatives have to be 0. An infinite log w makes NaN."""
    return (advantages == 0) & ~log_ratio.isnan() & (log_ratio.isfinite() | (name != "vespo"))


def differentiated(
    name: str, constants: Constants, log_ratio: Tensor, advantages: Tensor, logps: Tensor
) -> Tensor:
    """The loss by the reference in float64, and its derivatives in R and logp: (3, n)."""
    log_ratio, advantages, logps = (x.double().clone() for x in (log_ratio, advantages, logps))
    log_ratio.requires_grad_()
    logps.requires_grad_()
    ratio = log_ratio.exp()
    loss_type, options = LOSS_OF[name, constants]
    o, surrogate, phi = filled(**options), TERMS[loss_type].surrogate, None
    if surrogate is vespo:
        k, rate = (
            either(advantages >= 0, constants[i], constants[i + 2], ratio.dtype) for i in (0, 1)
        )
        phi = (ratio**k * torch.exp(rate * (1 - ratio))).detach()
    loss = -ratio * advantages if surrogate is None else surrogate(o, ratio, advantages, logps, phi)
    grads = torch.autograd.grad(loss.sum(), [log_ratio, logps], allow_unused=True)
    return torch.stack(
        [loss.detach(), *(torch.zeros_like(ratio) if g is None else g for g in grads)]
    )


def check_like(name: str, got: Tensor, want: Tensor, bound: Tensor, like: Tensor) -> None:
    """Where `like`, by the same operations, is no number, `got` is that; else near `want`."""
    assert same(got.isnan(), like.isnan()), name
    assert same(got.isinf(), like.isinf()), name
    assert torch.equal(got[like.isinf()], like[like.isinf()]), name
    # a ratio that is 0 in float32 may be more in float64, times -inf
    number = like.isfinite() & want.isfinite()
    check(name, got[number], want[number], bound[number])


def estimates_differentiated(name: str, logps: Tensor, ref: Tensor) -> Tensor:
    """The same, written anew in float64: derivatives of kl and of r * kl, by autograd."""
    leaf = logps.double().clone().requires_grad_()
    d = ref.double() - leaf
    kl = {"k1": -d, "k2": d.square() / 2, "k3": torch.exp(d) - 1 - d}[name]
    corrected = kl * (leaf - leaf.detach()).exp()
    slopes = [torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0] for x in (kl, corrected)]
    return torch.stack([kl.detach(), *slopes])


class SurrogateSuite:
    kernels: FusedRowBackend
    device = DEVICE
    # of the dtypes that it computes in, the most precise at last
    units: ClassVar = {torch.float32: U}
    slack = 8  # roundings of a surrogate
    log_ratios: Sequence[float] = (0.0,)  # that an estimator is tried with

    def run(
        self, name: str, constants: Constants, *inputs: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """What `seen` has of a surrogate, and its inputs as they came out."""
        raise NotImplementedError

    def seen(self, terms: Tensor) -> Tensor:
        """What a backend shows of a loss and its derivatives in R and logp (3, n)."""
        return terms

    def estimate(
        self, name: str, corrects: bool, *inputs: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """KL, loss and slope (3, n) of an estimator; log-probabilities, reference, log-ratios."""
        raise NotImplementedError

    def test_every_surrogate_is_tried(self) -> None:
        assert {name for name, _ in EACH} | {*ON_POLICY} == {*SURROGATES}

    @each_surrogate
    def test_surrogates_are_those_of_torch(self, name: str, constants: Constants) -> None:
        """In every branch, at ties, at exact bounds, and where the ratio overflows, is 0 or NaN."""
        for dtype, unit in self.units.items():
            got, inputs = self.run(
                name, constants, *(x.to(dtype) for x in grid(self.device, special=True))
            )
            want = self.seen(mirrored(name, constants, *(x.double() for x in inputs)))
            bound = self.slack * unit * want.abs() * steepness(name, constants, inputs[0])
            check_like(
                f"{name} {dtype}", got, want, bound, self.seen(mirrored(name, constants, *inputs))
            )
            assert (got[:, is_nothing(name, *inputs[:2])] == 0).all()

    @each_surrogate
    def test_surrogates_against_autograd(self, name: str, constants: Constants) -> None:
        """The derivatives are those of the loss, written down anew."""
        dtype, unit = [*self.units.items()][-1]
        inputs = [x[grid(self.device)[0].abs() < 30].to(dtype) for x in grid(self.device)]
        got, inputs = self.run(name, constants, *inputs)
        want = self.seen(differentiated(name, constants, *inputs))
        nonzero = inputs[1] != 0  # at 0 both branches tie, whatever the ratio: a share of nothing
        bound = self.slack * unit * want.abs() * steepness(name, constants, inputs[0])
        if name == "sapo" and dtype is torch.float64:
            # autograd's 1 - sigmoid cancels
            bound[1] += 2.0**-50 * inputs[0].exp() * inputs[1].abs()
        check(name, got[:, nonzero], want[:, nonzero], bound[:, nonzero])
        assert (got[:, ~nonzero] == 0).all()

    @pytest.mark.parametrize("corrects", [False, True])
    @pytest.mark.parametrize("name", ESTIMATORS)
    def test_kl_estimators(self, name: str, corrects: bool) -> None:
        """Against torch's, and the derivative against autograd."""
        for dtype, unit in self.units.items():
            ds = [
                *torch.linspace(-20, 20, 161).tolist(),
                1e-6,
                -1e-6,
                80,
                200,
                800,
                -1e4,
                -INF,
                INF,
                NAN,
            ]
            log_ratios = self.log_ratios if corrects else (0.0,)
            d, log_ratio = (
                torch.cartesian_prod(torch.tensor(ds), torch.tensor(log_ratios))
                .to(self.device, dtype)
                .T
            )
            logps = torch.where(d.abs() < 1, -0.5, 0.0).to(dtype)
            got, (logps, ref, log_ratio) = self.estimate(name, corrects, logps, d, log_ratio)

            def wanted(logps: Tensor, ref: Tensor, ratio: Tensor) -> Tensor:
                kl, slope, corrected = ESTIMATORS[name](logps, ref)
                if corrects:
                    kl, slope = times(ratio, kl), times(ratio, corrected)
                return torch.stack([kl, *torch.where(ratio.isnan(), NAN, torch.stack([kl, slope]))])

            d, ratio = ref.double() - logps.double(), log_ratio.double().exp()
            want, like = (
                wanted(logps.double(), ref.double(), ratio),
                wanted(logps, ref, log_ratio.exp()),
            )
            steep, grown = 1 + d.abs(), d.expm1().abs()
            kl_size, slope_size = {
                "k1": (d.abs(), torch.ones_like(d)),
                "k2": (d * d / 2, d.abs()),
                "k3": (
                    grown + d.abs(),
                    d.abs() / steep if corrects else torch.where(d < 0, grown / steep, grown),
                ),
            }[name]
            bound = 8 * unit * steep * torch.stack([kl_size, kl_size, slope_size]) * ratio
            check_like(f"{name} {dtype}", got, want, bound, like)
            usual = got.isfinite().all(0) & (ratio < 1e30)
            slope = (
                estimates_differentiated(name, logps[usual], ref[usual])[1 + corrects]
                * ratio[usual]
            )
            # of autograd's own sum, of numbers as large as e^d
            rounding = 2.0**-50 * (1 + d[usual].exp()) * ratio[usual]
            check(f"{name} slope", got[2][usual], slope, bound[2][usual] + rounding)

    @pytest.mark.parametrize("log_ratio", [None, -3.0, 0.3])
    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_corrected_kl_gradient_however_far_the_reference(
        self, estimator: str, log_ratio: float | None
    ) -> None:
        """r (kl + kl') to 1e-6. Of k3 that is -r d, which sums of parts of e^d would lose."""
        raw, weight = torch.randn(12, 1, 3, device=self.device), torch.eye(3, device=self.device)
        raw[..., 0] -= 6.0
        ids = torch.zeros(12, 1, dtype=torch.long, device=self.device)
        logps = linear_logprob(raw, weight, ids, run=Run(backend=self.kernels.name)).logps
        # e^88 is the last
        ds = [-90.0, -16.0, -1e-3, 1e-3, 0.3, 4.0, 10.0, 16.0, 30.0, 60.0, 88.0, 300.0]
        given = {
            "old_per_token_logps": None if log_ratio is None else logps - log_ratio,
            "ref_per_token_logps": logps + torch.tensor(ds, device=self.device)[:, None],
            "config": LossConfig(beta=0.5, kl_estimator=estimator),
        }
        nothing = torch.zeros(12, device=self.device)  # advantages
        at = logps.double()
        d = given["ref_per_token_logps"].double() - at
        r = torch.ones_like(at) if log_ratio is None else (at - (logps - log_ratio)).exp()
        want = 0.5 / 12 * r * {"k1": 1 - d, "k2": d * d / 2 - d, "k3": -d}[estimator]
        found, leaf = {}, logps.clone().requires_grad_()
        policy_loss_from_logps(leaf, logps, None, nothing, **given).loss.backward()
        found["from log-probabilities"] = leaf.grad
        for engine in ("one_pass", "two_pass"):
            hidden, run = raw.clone().requires_grad_(), Run(engine, self.kernels.name)
            grpo_loss(hidden, weight, ids, None, nothing, **given, run=run).loss.backward()
            found[engine] = hidden.grad[..., 0] / -at.expm1()
        for name, x in found.items():
            torch.testing.assert_close(
                x.double(), want, rtol=2e-6, atol=0, msg=lambda m, n=name: f"{n}: {m}"
            )

    @pytest.mark.parametrize("estimator", [None, *ESTIMATORS])
    @pytest.mark.parametrize("off_policy", [False, True], ids=["on-policy", "off-policy"])
    @pytest.mark.parametrize("loss_type", LOSSES)
    def test_fused_kernel_is_the_objective(
        self, loss_type: str, off_policy: bool, estimator: str | None
    ) -> None:
        """Loss, metrics and gradient are those of its own log-probabilities and entropies."""
        draw = lambda: torch.randn(2, 5, device=self.device) * 0.3 - 2  # noqa: E731
        given = {
            "old_per_token_logps": draw() if off_policy else None,
            "ref_per_token_logps": draw(),
            "importance_sampling_ratio": torch.rand(2, 5, device=self.device) + 0.5,
            "config": LossConfig(
                loss_type=loss_type,
                beta=0.0 if estimator is None else 0.3,
                kl_estimator=estimator or "k3",
                use_bias_correction_kl=estimator != "k2",
                epsilon_high=1.2 if loss_type == "cispo" else 0.28,
                delta=1.4 if loss_type == "grpo" else None,
                entropy_coef=0.05 if off_policy else 0.0,
            ),
        }
        ids = torch.randint(7, (2, 5), device=self.device)
        advantages = torch.tensor([1.5, -0.7], device=self.device)
        raw = torch.randn(2, 5, 7, device=self.device).requires_grad_()
        same, weight = raw.detach().clone().requires_grad_(), torch.eye(7, device=self.device)
        run = Run(backend=self.kernels.name)
        got = grpo_loss(raw, weight, ids, None, advantages, **given, run=run)
        log_probs = same.log_softmax(-1)
        logps = log_probs.gather(-1, ids[..., None])[..., 0]
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        want = policy_loss_from_logps(logps, entropies, None, advantages, **given)
        got.loss.backward()
        want.loss.backward()
        pairs = {"loss": (got.loss, want.loss), "d logits": (raw.grad, same.grad)}
        for name in ("policy_loss", *(() if estimator is None else ("kl",))):
            pairs[name] = got.metrics[name], want.metrics[name]
        for name, (x, y) in pairs.items():
            check(name, x.detach(), y.detach(), 64 * U * (1 + y.detach().abs()))
