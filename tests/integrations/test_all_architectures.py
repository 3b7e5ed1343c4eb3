"""Each architecture of transformers gets the padded numbers in its best layout."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
import transformers

from grpo_kernels.transformers import causal_lm_logps
from tests.support import all_architectures as every
from tests.support import tiny_architectures as tiny
from tests.support import training_step

pytestmark = pytest.mark.usefixtures("forget_warnings")

ROOT = Path(__file__).parents[2]
CONSTRAINTS = (ROOT / "requirements/constraints.txt").read_text().split()
IS_PINNED = f"transformers=={transformers.__version__}" in CONSTRAINTS
# and the largest share of the cells that each computes
LAYOUTS = {"tree": 0.6, "trim": 0.8, "padded": 1.0}


def kinds(*outcomes: str) -> list[str]:
    listed = every.OUTCOME.items()
    return sorted(kind for kind, x in listed if x.layout in outcomes and kind in every.CLASSES)


def assert_right(model: Any, given: dict[str, Tensor]) -> float:
    """Loss and gradients are the padded forward's; returns the share of the cells that ran."""
    want, gradients = training_step.loss_of(model, given, **training_step.PADDED)
    out, got = training_step.loss_of(model, given)
    torch.testing.assert_close(out.loss, want.loss, rtol=3e-6, atol=3e-6)
    # experts that no token has chosen
    idle = {name: torch.zeros_like(x) for name, x in model.named_parameters()}
    # its recurrences round otherwise where their chunks begin elsewhere: 2e-6 to 3.02e-6 here
    is_rough = model.config.model_type == "bailing_hybrid"
    training_step.assert_same({**idle, **got}, {**idle, **gradients}, 1e-5 if is_rough else 3e-6)
    return float(out.metrics["tokens/computed"])


def assert_own_logprobs(model: Any, given: dict[str, Tensor]) -> None:
    """Log-probabilities are those of the model's own logits, without any of our code."""
    ids, mask, counted = (given[name] for name in training_step.SCORED)
    takes = "use_cache" in inspect.signature(model.forward).parameters
    more = {"use_cache": False} if takes else {}
    with torch.no_grad():
        want, _ = tiny.plain_logprobs(model, ids, attention_mask=mask, **more)
        with training_step.positions_left_to_the_model(model):
            got = causal_lm_logps(model, ids, mask, counted).logps
    want = want[:, -counted.shape[1] :] * counted
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)


# attention with a mask of its own, one config per kind of layer, chunks of columns, a mask by name
QUICK = ("glm_moe_dsa", "gemma4_text", "llama4_text", "afmoe")


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in kinds(*LAYOUTS)]
)
def test_each_architecture_gets_the_padded_numbers_in_its_layout(kind: str) -> None:
    given = training_step.lengthened(training_step.batch(), 8)
    model, shares = every.build(kind), list[float]()

    def run() -> None:
        if kind != "reformer":  # which has a gradient in train mode alone
            assert_own_logprobs(model, given)
            shares.append(assert_right(model, given))
        shares.append(assert_right(model.train(), given))

    said = training_step.said_by(run)
    if IS_PINNED:
        layout, warned = every.OUTCOME[kind]
        better = [*LAYOUTS.values()][: [*LAYOUTS].index(layout)]
        least = max(better, default=0)
        assert all(least < share <= LAYOUTS[layout] for share in shares), (shares, said)
        assert bool(said) == bool(warned)
        assert any(re.search(warned, x) for x in said) or not warned, said


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds("refused"))
def test_architectures_without_one_head_are_refused(kind: str) -> None:
    for options in ({}, training_step.PADDED):
        with pytest.raises((TypeError, RuntimeError), match=every.OUTCOME[kind].said):
            training_step.loss_of(every.build(kind), training_step.batch(), **options)


@pytest.mark.skipif(not IS_PINNED, reason="the list is that of the pinned transformers")
def test_the_list_has_all_types_of_transformers() -> None:
    new = every.CLASSES.keys() - every.OUTCOME.keys()
    gone = every.OUTCOME.keys() - every.CLASSES.keys()
    where = "the table of docs/status.md"
    assert not new, f"run these types, and add them to {where}: {sorted(new)}"
    assert not gone, f"transformers no longer has these types; out of {where}: {sorted(gone)}"


def test_the_page_counts_its_list() -> None:
    assert len(every.LISTED) == len(every.OUTCOME), "expected each type once"
    counts = Counter(x.layout for x in every.OUTCOME.values())
    layouts = (
        f"{counts['tree']} run as `tree`, {counts['trim']} as `trim` and {counts['padded']} as"
    )
    for words in (
        f"{len(every.OUTCOME)} model types, {layouts} `padded`",
        f"raises an error for {counts['refused']} types",
        f"could not build {counts['not built']} other types",
    ):
        assert words in every.PAGE.replace("\n", " ")
