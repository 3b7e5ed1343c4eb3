"""What the tests of every backend's surrogates try, and the test that its fused kernel is the objective."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig
from grpo_kernels.backends.interface import Chunk, FusedRowBackend, LogitTransform
from grpo_kernels.batch.inputs import LossInputs
from grpo_kernels.batch.tokens import read_tokens
from grpo_kernels.objective.losses import LOSSES
from grpo_kernels.objective.normaliser import token_weights
from grpo_kernels.objective.policy import PolicyObjective
from grpo_kernels.token_loss.formulas import ESTIMATORS, SURROGATES
from tests.support.reference_terms import TERMS, either, filled, vespo
from tests.support.row_cases import DEVICE, ON_POLICY
from tests.support.row_truth import U, check

INF, NAN = math.inf, math.nan
Constants = tuple[float, ...]
LOG_RATIOS = (-INF, -200, -80, -3, -0.5, -0.25, -0.1, -1e-4, 0.0, 1e-6, 0.1, 0.17, 0.25, 0.5, 3, 20, 87, 88.5)
ADVANTAGES = (-2.5, -1.0, -1e-3, -0.0, 0.0, 1e-3, 0.7, 3.0)


def grid(special: bool = False, device: str = DEVICE) -> tuple[Tensor, Tensor, Tensor]:
    """Log-ratios, advantages and log-probabilities in all combinations."""
    ratios = [*LOG_RATIOS, 200, 800, INF, NAN] if special else list(LOG_RATIOS)
    logps = (-3.0, 0.0, -INF) if special else (-3.0, -0.2)
    found = torch.cartesian_prod(*(torch.tensor(x) for x in (ratios, ADVANTAGES, logps))).to(device)
    return tuple(x.contiguous() for x in found.unbind(1))  # type: ignore[return-value]


# Loss type and options. At R = 0 the ratio is exactly 1, so that it meets a bound of 1 exactly, and both branches of a
# minimum tie.
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
    (LOSSES[name].surrogate, LOSSES[name].constants(LossConfig(loss_type=name, **options))): (name, options)
    for name, options in CASES
}
EACH = [*LOSS_OF]
each_surrogate = pytest.mark.parametrize(("name", "constants"), EACH, ids=str)


def mirrored(name: str, constants: Constants, *inputs: Tensor) -> Tensor:
    """What torch makes of the formula: (3, n)."""
    return torch.stack(SURROGATES[name](*inputs, *constants))


def steepness(name: str, constants: Constants, log_ratio: Tensor) -> Tensor:
    """How many times a relative error of the ratio there is in a loss, over what a product of it has."""
    ratio = log_ratio.double().exp()
    ratio = torch.where(ratio < 1e3, ratio, 0.0)  # beyond it a sigmoid is 0 or 1, and phi is 0
    if name == "vespo":
        return max(constants) * (1 + ratio + torch.where(ratio > 0, log_ratio.double().abs(), 0.0))
    return 1 + (0 * ratio if name in ("clipped", "cispo", "unclipped") else ratio)


def is_nothing(name: str, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """(n,) bool: where loss and derivatives have to be 0. An infinite log w, which the objective has not, makes NaN."""
    return (advantages == 0) & ~log_ratio.isnan() & (log_ratio.isfinite() | (name != "vespo"))


def differentiated(name: str, constants: Constants, log_ratio: Tensor, advantages: Tensor, logps: Tensor) -> Tensor:
    """The loss by the reference, in float64, and its derivatives in R and logp by autograd: (3, n)."""
    log_ratio, advantages, logps = (x.double().clone() for x in (log_ratio, advantages, logps))
    log_ratio.requires_grad_()
    logps.requires_grad_()
    ratio = log_ratio.exp()
    loss_type, options = LOSS_OF[name, constants]
    o, surrogate, phi = filled(**options), TERMS[loss_type].surrogate, None
    if surrogate is vespo:
        k, rate = (either(advantages >= 0, constants[i], constants[i + 2], ratio.dtype) for i in (0, 1))
        phi = (ratio**k * torch.exp(rate * (1 - ratio))).detach()
    loss = -ratio * advantages if surrogate is None else surrogate(o, ratio, advantages, logps, phi)
    grads = torch.autograd.grad(loss.sum(), [log_ratio, logps], allow_unused=True)
    return torch.stack([loss.detach(), *(torch.zeros_like(ratio) if g is None else g for g in grads)])


def test_every_surrogate_is_tried() -> None:
    assert {name for name, _ in EACH} | {*ON_POLICY} == {*SURROGATES}


def estimates(name: str, logps: Tensor, ref: Tensor) -> Tensor:
    """What torch makes of an estimator: KL and its two derivatives in logp, (3, n)."""
    return torch.stack(ESTIMATORS[name](logps, ref))


def estimates_differentiated(name: str, logps: Tensor, ref: Tensor) -> Tensor:
    """The same, written down anew in float64: the derivatives, of kl and of r * kl where r is 1, by autograd."""
    leaf = logps.double().clone().requires_grad_()
    d = ref.double() - leaf
    kl = {"k1": -d, "k2": d.square() / 2, "k3": torch.exp(d) - 1 - d}[name]
    corrected = kl * (leaf - leaf.detach()).exp()
    slopes = [torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0] for x in (kl, corrected)]
    return torch.stack([kl.detach(), *slopes])


class FusedSuite:
    kernels: FusedRowBackend
    device = DEVICE

    @pytest.mark.parametrize("log_ratio", [None, -3.0, 0.3])
    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_corrected_kl_gradient_however_far_the_reference(self, estimator: str, log_ratio: float | None) -> None:
        """r (kl + kl') to 1e-6. Of k3 that is -r d, of which nothing is left where two parts of e^d are added up."""
        raw = torch.randn(12, 3, device=self.device)
        ids = torch.zeros(12, dtype=torch.long, device=self.device)
        logps = self.kernels.stats(Chunk(raw, ids, LogitTransform()), entropy=False).logps
        distances = [-90.0, -16.0, -1e-3, 1e-3, 0.3, 4.0, 10.0, 16.0, 30.0, 60.0, 88.0, 300.0]  # e^88 is the last
        shape = lambda x: x.view(12, 1)  # noqa: E731
        inputs = LossInputs(
            shape(ids),
            None,
            torch.zeros(12, device=self.device),
            old_per_token_logps=None if log_ratio is None else shape(logps - log_ratio),
            ref_per_token_logps=shape(logps + torch.tensor(distances, device=self.device)),
        )
        tokens = read_tokens(inputs, torch.float32)
        config = LossConfig(beta=0.5, kl_estimator=estimator)
        made = PolicyObjective(config, tokens, token_weights(config, tokens.layout, None, torch.float32))
        loss = made.token_loss()
        assert loss is not None
        fused = self.kernels.fused(Chunk(raw, ids, LogitTransform()), loss, None)
        found = {"fused": fused.terms["d_logp"], "evaluated": made.evaluate(logps, logps).d_logp}
        found["in part"] = made.coefficients_of(torch.arange(12, device=self.device), logps, logps)[0]
        at = logps.double()
        assert tokens.ref_per_token_logps is not None
        d = tokens.ref_per_token_logps.double() - at
        r = torch.ones_like(at) if tokens.old_per_token_logps is None else (at - tokens.old_per_token_logps).exp()
        want = 0.5 * made.weights.double() * r * {"k1": 1 - d, "k2": d * d / 2 - d, "k3": -d}[estimator]
        for name, x in found.items():
            torch.testing.assert_close(x.double(), want, rtol=1e-6, atol=0, msg=lambda m, n=name: f"{n}: {m}")

    @pytest.mark.parametrize("estimator", [None, *ESTIMATORS])
    @pytest.mark.parametrize("off_policy", [False, True], ids=["on-policy", "off-policy"])
    @pytest.mark.parametrize("loss_type", LOSSES)
    def test_fused_kernel_is_the_objective(self, loss_type: str, off_policy: bool, estimator: str | None) -> None:
        """The loss, its terms and its derivative, put together by `assemble`, are those of `evaluate`."""
        draw = lambda: torch.randn(2, 5, device=self.device) * 0.3 - 2  # noqa: E731
        config = LossConfig(
            loss_type=loss_type,
            beta=0.0 if estimator is None else 0.3,
            kl_estimator=estimator or "k3",
            use_bias_correction_kl=estimator != "k2",
            epsilon_high=1.2 if loss_type == "cispo" else 0.28,
            delta=1.4 if loss_type == "grpo" else None,
            entropy_coef=0.05 if off_policy else 0.0,
        )
        inputs = LossInputs(
            torch.randint(7, (2, 5), device=self.device),
            None,
            torch.tensor([1.5, -0.7], device=self.device),
            old_per_token_logps=draw() if off_policy else None,
            ref_per_token_logps=draw(),
            importance_sampling_ratio=torch.rand(2, 5, device=self.device) + 0.5,
        )
        tokens = read_tokens(inputs, torch.float32)
        made = PolicyObjective(config, tokens, token_weights(config, tokens.layout, None, torch.float32))
        loss = made.token_loss()
        assert (loss is None) == made.couples_tokens
        if loss is None:
            return
        raw = torch.randn(10, 7, device=self.device)
        found = self.kernels.fused(Chunk(raw, tokens.ids, LogitTransform()), loss, None)
        assert found.entropies is not None
        got, want = made.assemble(found.terms, found.entropies), made.evaluate(found.logps, found.entropies)
        for name in ("loss", "d_logp", "policy_loss"):
            x = getattr(want, name)
            check(name, getattr(got, name), x, 64 * U * (1 + x.abs()))
        assert (got.coefficients.d_entropy is None) == (want.coefficients.d_entropy is None)
        if estimator is not None:
            assert got.terms.kl is not None
            check("kl", got.terms.kl, want.terms.kl, 64 * U * (1 + want.terms.kl.abs()))
