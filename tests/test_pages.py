"""The pages that list what the library has: all of it is there, and what they say of it is so."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_kernels import LossConfig, grpo_loss, linear_logprob, presets
from grpo_kernels.objective.losses import LOSSES
from grpo_kernels.objective.normaliser import averaged_over
from tests.support.small_batch import small_batch

DOCS = Path(__file__).parent.parent / "docs"
LOSSES_PAGE, METRICS_PAGE = ((DOCS / name).read_text() for name in ("choosing-a-loss.md", "metrics.md"))
PAGES = ("choosing-a-loss.md", "metrics.md", "memory.md", "faq.md")


def rows_of(page: str, title: str) -> dict[str, list[str]]:
    """First cell, without its quotes and link -> the others, of the table in the section `title`."""
    section = page.split(f"\n## {title}\n")[1].split("\n## ")[0]
    found = [[x.strip() for x in line.strip("|").split(" | ")] for line in section.splitlines() if line.startswith("|")]
    return {re.sub(r"^\[?`(.*?)`.*", r"\1", row[0]): row[1:] for row in found[2:]}


def test_every_preset_is_in_the_table_and_has_a_section() -> None:
    assert list(rows_of(LOSSES_PAGE, "The presets")) == re.findall(r"^### (\w+)$", LOSSES_PAGE, re.MULTILINE)
    assert set(rows_of(LOSSES_PAGE, "The presets")) == set(presets.__all__)


@pytest.mark.parametrize("name", presets.__all__)
def test_table_of_presets_is_true(name: str) -> None:
    config: LossConfig = getattr(presets, name)
    _, ratio, mean, kl, passes = rows_of(LOSSES_PAGE, "The presets")[name]
    assert ratio.startswith("sequence" if config.ratio_is_per_sequence else "token")
    kinds = {"sequence_mean": "sequences", "max_length": "constant length", "sequence_sum": "sum over tokens"}
    kind = LOSSES[config.loss_type].normaliser
    assert kinds.get(kind, "tokens of the") in mean
    assert ("sequences" in mean) == (averaged_over(config, num_items=False) == "sequences")
    assert kl == ("none" if config.beta == 0 else f"{config.beta}")
    taken = []
    for on_policy in (True, False):
        inputs = {name: x.requires_grad_() if name in ("hidden", "weight") else x for name, x in small_batch().items()}
        if not on_policy:
            inputs["old_per_token_logps"] = -torch.ones(2, 5)
        if config.beta:
            inputs["ref_per_token_logps"] = -torch.ones(2, 5)
        taken.append(grpo_loss(**inputs, config=config).engine)
    assert passes == ", ".join({"one_pass": "1", "two_pass": "2"}[engine] for engine in taken)


def test_every_field_of_the_config_is_in_the_table_with_its_default() -> None:
    shown = {name: row[0] for name, row in rows_of(LOSSES_PAGE, "Every field").items()}
    expected = {}
    for field in dataclasses.fields(LossConfig):
        quoted = f'`"{field.default}"`' if isinstance(field.default, str) else str(field.default)
        expected[field.name] = "None: `epsilon`" if field.name == "epsilon_high" else quoted
    assert shown == expected


def keys_of(**more: Any) -> set[str]:
    """Of one loss with old, reference and sampling log-probabilities."""
    inputs: dict[str, Any] = {**small_batch(), "old_per_token_logps": -torch.ones(2, 5), **more}
    for name in ("hidden", "weight"):
        inputs[name] = inputs[name].requires_grad_()
    return {*grpo_loss(**inputs).metrics}


def every_key() -> set[str]:
    """Of every loss type with everything on, and of a ratio that is given."""
    found = keys_of(importance_sampling_ratio=torch.ones(2, 5))
    for name in LOSSES:
        terms = {"beta": 0.1, "entropy_coef": 0.1, "off_policy_mask_threshold": 0.5, "top_entropy_quantile": 0.5}
        config = LossConfig(loss_type=name, vllm_importance_sampling_correction=name != "gmpo", **terms)
        found |= keys_of(
            config=config, ref_per_token_logps=-torch.ones(2, 5), sampling_per_token_logps=-torch.ones(2, 5)
        )
    return found


@pytest.mark.filterwarnings("ignore:grpo_kernels. sampling_per_token_logps")  # which GMPO does not read
def test_page_of_metrics_has_every_key_and_no_other() -> None:
    shown = re.findall(r"^\| `([^`]+)` \|", METRICS_PAGE, re.MULTILINE)
    assert len(shown) == len(set(shown))
    assert set(shown) == every_key()


def test_metrics_are_there_when_the_page_says() -> None:
    always = set(rows_of(METRICS_PAGE, "Always there"))
    assert keys_of(config=LossConfig(loss_type="sapo")) == always
    assert keys_of(objective=lambda tokens: -tokens.logps) == always - {"ratio"}
    clipping = {name for name in rows_of(METRICS_PAGE, "Clipping") if name.startswith("clip_ratio/")}
    clipped = re.search(r"There for (.*?)\. What", METRICS_PAGE)
    assert clipped is not None
    named = set(re.findall(r"`(\w+)`", clipped[1]))
    for name in LOSSES:
        assert (clipping <= keys_of(config=LossConfig(loss_type=name))) == (name in named)


@pytest.mark.parametrize("name", PAGES)
def test_links_of_a_page_lead_somewhere(name: str) -> None:
    """To a file of the repository, and to a heading of it as GitHub and mkdocs name it."""
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", (DOCS / name).read_text()):
        if target.startswith("http"):
            continue
        page = DOCS / (target or name)
        assert page.is_file(), target
        headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
        names = {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in headings}
        assert not anchor or anchor in names, (target, anchor, names)


def test_answers_on_the_loss_the_ratio_and_accumulation_are_so() -> None:
    inputs: dict[str, Any] = small_batch()
    ids, mask, hidden = inputs["completion_ids"], inputs["completion_mask"], inputs["hidden"]
    weight = inputs["weight"].requires_grad_()
    first = grpo_loss(**inputs)
    first.loss.backward()
    assert abs(first.loss.item()) < 1e-6
    assert weight.grad is not None and weight.grad.norm() > 0.1
    old, _ = linear_logprob(hidden, weight.detach(), ids, mask=mask, entropy=False)
    again = grpo_loss(**inputs, old_per_token_logps=old)
    assert abs(again.metrics["ratio"].item() - 1) < 1e-6
    unshifted = grpo_loss(**{**inputs, "hidden": hidden.roll(1, dims=1)}, old_per_token_logps=old)
    assert abs(unshifted.metrics["ratio"].item() - 1) > 0.1

    mask[0, 2:] = 0
    whole = grpo_loss(**inputs, old_per_token_logps=old + 0.1).loss
    parts = [
        grpo_loss(
            **{name: x if name == "weight" else x[i : i + 1] for name, x in inputs.items()},
            old_per_token_logps=old[i : i + 1] + 0.1,
            num_items_in_batch=mask.sum(),
        ).loss
        for i in range(2)
    ]
    torch.testing.assert_close(sum(parts), whole)
