"""The script that measures the noise of KL terms: what it computes of known gradients, and gradients that are known."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import kl_variance
from benchmarks.kl_variance import gradients, kl, policies, share_for, summary, table


def test_noise_bias_and_chance_of_gradients_that_are_known() -> None:
    g = torch.Generator().manual_seed(0)
    true = torch.tensor([3.0, 4.0], dtype=torch.float64)
    noise = torch.randn(4000, 2, generator=g, dtype=torch.float64)
    batches = [{"full": true, "off": 2 * true + 5 * x, "exact": true + 0.0 * x} for x in noise]
    found = summary(batches)
    assert found["full"] == found["exact"] == (0.0, 0.0, 0.0)
    assert found["off"] == pytest.approx((2**0.5, 1.0, (2 / 4000) ** 0.5), rel=0.05)


def test_on_policy_k3_with_the_correction_is_the_gradient_of_k2_and_the_distance_is_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``(k3 + 1 - e^d) grad logp = -d grad logp``; by sampled tokens all differ from the whole vocabulary's."""
    monkeypatch.setattr(kl_variance, "GENERATIONS", 2)
    monkeypatch.setattr(kl_variance, "PROMPTS", 4)
    found = policies(warm_steps=10, steps=10)
    policy = found.at(share_for(found, 0.1))
    torch.manual_seed(2)
    assert kl(found, policy, found.rollout(policy)) == pytest.approx(0.1, rel=0.3)
    ((_, of_terms),) = gradients(found, policy, 1)
    torch.testing.assert_close(of_terms["k3, corrected"], of_terms["k2"], atol=1e-6, rtol=1e-3)
    for name in ("k1", "k1, corrected", "k2", "k3"):
        assert (of_terms[name] - of_terms["full"]).norm() > 0.05 * of_terms["full"].norm(), name
    rows = table(found, (0.1,), 2, lambda text: None)
    assert len(rows) == 2 + len(kl_variance.TERMS)
