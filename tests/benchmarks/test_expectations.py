"""What trainings of Qwen3 may expect, by arithmetic."""

from __future__ import annotations

import pytest

from benchmarks.machine import ROOT
from benchmarks.real.expectations import MODELS, Batch, gain, lines, whole


def test_the_gain_is_that_of_the_products_counted_by_hand() -> None:
    small, large = MODELS
    assert (small.body, large.body) == (440_401_920, 6_945_767_424)
    head = 151_936 * 4096
    stock = 2 * 2 * large.body * 8 * 1280 + 6 * head * 8 * 512
    ours = 1.5 * 2 * large.body * (256 + 8 * 512) + 3 * head * 8 * 512
    assert gain(large, Batch("", 256, equal=0.5), lora=True, kl=False) == pytest.approx(stock / ours)
    scored = stock + 2 * large.body * 8 * 1280 + 2 * head * 8 * 512
    assert gain(large, Batch("", 256, vllm=True, equal=0.5), lora=True, kl=False) == pytest.approx(scored / ours)


def test_equal_rewards_gain_nothing_with_a_kl_term() -> None:
    gains = {gain(MODELS[0], Batch("", 256, equal=equal), lora=False, kl=True) for equal in (0.0, 0.5, 1.0)}
    assert len(gains) == 1


def test_the_whole_step_gains_less_the_more_of_it_is_generation() -> None:
    assert [whole(3.0, share) for share in (0.0, 0.5, 1.0)] == pytest.approx([3.0, 1.5, 1.0])


def test_the_page_has_the_table() -> None:
    assert "\n".join(lines()) in (ROOT / "docs" / "real.md").read_text(encoding="utf-8")
