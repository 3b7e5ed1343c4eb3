"""A batch of two prompts, its loss and gradients in each layout, and the layouts in which each
family is exact."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.gptj import modeling_gptj
from transformers.utils import ModelOutput

from grpo_kernels import GRPOLoss
from grpo_kernels.transformers import causal_lm_loss
from tests.support import tiny_architectures as tiny
from tests.support.all_architectures import OUTCOME
from tests.support.case_builder import seeded

PADDED: dict[str, Any] = {"zero_advantage": "train", "layout": "padded"}
MODES: dict[str, dict[str, Any]] = {mode: {"layout": mode} for mode in ("tree", "trim", "padded")}
SCORED = ("input_ids", "attention_mask", "completion_mask")
# One family of each kind of attention, position and state (test_all_architectures.py has all), and
# its best layout; the later ones of `MODES` are exact, too.
NAMES = ("llama", "mistral", "qwen3_moe", "gemma2", "gpt_oss", "minicpm3", "opt", "bert", "bloom")
NAMES += ("falcon_h1", "gptj", "recurrent_gemma")
FAMILIES = {kind: OUTCOME[kind].layout for kind in NAMES}
if hasattr(modeling_gptj, "ALL_ATTENTION_FUNCTIONS"):  # from transformers 5.24 on
    FAMILIES["gptj"] = "tree"
WIDE = {"mistral": 64, "gpt_oss": 64}  # a sliding window longer than the sequences


def family(kind: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    wide = {"sliding_window": WIDE[kind]} if kind in WIDE else {}
    return tiny.text_model(kind, dtype, **wide, **fields)


def batch(sequences: int = 6) -> dict[str, Tensor]:
    """Two padded prompts with three completions each; half of the advantages are 0."""
    draw = seeded("two prompts")
    prompts = torch.randint(3, 90, (2, 8), generator=draw).repeat_interleave(3, dim=0)
    ids = torch.cat([prompts, torch.randint(3, 90, (6, 10), generator=draw)], dim=1)
    first = torch.tensor([4, 4, 4, 0, 0, 0])[:, None]
    last = torch.tensor([18, 11, 15, 13, 10, 16])[:, None]
    mask = ((torch.arange(18) >= first) & (torch.arange(18) < last)).long()
    advantages = torch.tensor([1.0, 0.0, -0.5, 0.0, 0.0, 0.7])
    found = {
        "input_ids": ids.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "completion_mask": mask[:, 8:],
    }
    return {name: x[:sequences] for name, x in {**found, "advantages": advantages}.items()}


def lengthened(given: dict[str, Tensor], times: int) -> dict[str, Tensor]:
    """The batch with each completion repeated."""
    ends = {name: given[name] for name in SCORED}
    for name in ("input_ids", "attention_mask"):
        ends[name] = torch.cat([given[name][:, :8], *[given[name][:, 8:]] * times], dim=1)
    ends["input_ids"] = (ends["input_ids"] + torch.arange(ends["input_ids"].shape[1])) % 87 + 3
    ends["input_ids"][:3, :8], ends["input_ids"][3:, :8] = (
        ends["input_ids"][0, :8],
        ends["input_ids"][3, :8],
    )
    # the attended tokens of a completion first
    mask = ends["attention_mask"][:, 8:].sort(dim=1, descending=True).values
    ends["attention_mask"] = torch.cat([given["attention_mask"][:, :8], mask], dim=1)
    return {**given, **ends, "completion_mask": mask}


def loss_of(
    model: Any, given: dict[str, Any], *, beta: float = 0.0, **options: Any
) -> tuple[Any, dict[str, Tensor]]:
    model.zero_grad()
    loss_fn = GRPOLoss(loss_type="dapo", beta=beta)
    items = max(50.0, float((given["completion_mask"] != 0).sum()))
    out = causal_lm_loss(model, loss_fn, **given, num_items_in_batch=items, **options)
    out.loss.backward()
    return out, {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@contextmanager
def positions_left_to_the_model(model: Any) -> Iterator[None]:
    """Inside, the model counts positions itself, as in TRL's trainer, which hands it none."""
    with mock.patch.object(type(model), "_prepare_position_ids_for_generation"):
        yield


def distance(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm."""
    assert got.keys() == want.keys()
    gap = sum((got[name].double() - x.double()).square().sum() for name, x in want.items())
    return float(gap / sum(x.double().square().sum() for x in want.values())) ** 0.5


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], bound: float = 3e-6) -> None:
    assert distance(got, want) <= bound


def assert_right(
    model: Any,
    given: dict[str, Any],
    *words: str,
    modes: Iterable[dict[str, Any]] = ({},),
    quiet: bool = False,
    padded: dict[str, Any] | None = None,
) -> Any:
    """Each mode's loss and gradients are those of the `padded` batch (None: `given`) in its padded
    layout. One warning has the `words`."""
    want, gradients = loss_of(model, given if padded is None else padded, **PADDED)
    found: list[Any] = []
    said = said_by(lambda: found.extend(loss_of(model, given, **options) for options in modes))
    for out, got in found:
        torch.testing.assert_close(out.loss, want.loss, rtol=2e-6, atol=2e-6)
        assert_same(got, gradients)
    assert not (quiet and said), said
    assert not words or (len(said) == 1 and all(word in said[0] for word in words)), said
    return found[-1][0]


def assert_any_rows(model: Any, *, counts: bool = True) -> None:
    """As padded, of rows of two ids, which part anywhere; with `counts` each prefix of `rows` that
    predicts a token is computed once."""
    draw = random.Random(5)
    for _ in range(8):
        rows = [
            [draw.randrange(3, 5) for _ in range(draw.randrange(2, 13))]
            for _ in range(draw.randrange(2, 9))
        ]
        ids = [torch.tensor(x) for x in rows]
        given = {"input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=77)}
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
        given |= {"attention_mask": mask, "completion_mask": mask[:, 1:]}
        given["advantages"] = 0.1 + torch.arange(len(rows))
        want, gradients = loss_of(model, given, **PADDED)
        out, got = loss_of(model, given)
        torch.testing.assert_close(out.loss, want.loss, rtol=2e-6, atol=2e-6)
        assert_same(got, gradients, 5e-6)
        prefixes = {tuple(x[:n]) for x in rows for n in range(1, len(x))}
        computed = round(out.metrics["tokens/computed"].item() * mask.numel())
        assert computed == len(prefixes) or not counts


def said_by(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as found:
        call()
    return [str(x.message) for x in found if "grpo_kernels" in str(x.message)]


@dataclass
class ReadOutput(ModelOutput):
    logits: Tensor | None = None
    values: Tensor | None = None
    aux_loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    losses: tuple[Tensor, ...] | None = None


class Reader(LlamaForCausalLM):  # type: ignore[misc]
    """A value head and a loss of its own read the hidden states of all attended tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.value_head = nn.Linear(config.hidden_size, 1)
        self.adds_loss = self.nests_loss = False

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> ReadOutput:
        hidden = self.model(input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        aux_loss = hidden[attention_mask.bool()].square().mean() if self.adds_loss else None
        losses = None if aux_loss is None else (aux_loss,)
        values = self.value_head(hidden)[..., 0]
        return ReadOutput(
            self.lm_head(hidden), values, None if self.nests_loss else aux_loss, (hidden,), losses
        )


def reader() -> Any:
    torch.manual_seed(0)
    return Reader(tiny.text_model("llama", torch.float32).config).eval()
