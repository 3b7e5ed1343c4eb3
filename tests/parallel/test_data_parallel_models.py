"""A transformers model under FSDP2; PEFT's adapters on the body and on the head under DDP and FSDP2."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.support import parallel_cases as cases
from tests.support.parallel_adapters import PLACES, adapted, adapted_loss, adapted_truth
from tests.support.parallel_cases import LOSSES, SETUPS, Run, Setup, relative_error
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
CHOSEN = ("off-policy", "sequence ratio")
DIVIDED = (
    "DDP",
    "FSDP2, head in the root unit",
    "FSDP2, head its own unit",
    "FSDP2, head in a unit with another layer",
)
Gradients = dict[str, Tensor]


class Policy(nn.Module):
    """A causal language model whose forward gives hidden states, or what `then` makes of them."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(1)
        config = transformers.Qwen3Config(
            vocab_size=cases.VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, head_dim=8,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=False,
        )  # fmt: skip
        self.lm = transformers.Qwen3ForCausalLM(config).double()

    @property
    def lm_head(self) -> Any:
        return self.lm.lm_head

    def forward(self, tokens: Tensor, then: Any = None) -> Any:
        hidden = self.lm.model(tokens, use_cache=False).last_hidden_state
        return hidden if then is None else then(hidden)


def every_layer_and_the_head(model: Any, mesh: DeviceMesh | None) -> nn.Module:
    for module in (*model.lm.model.layers, model.lm_head):
        fully_shard(module)
    return fully_shard(model)


def run_models(rank: int, world_size: int) -> tuple[dict[Any, Gradients], dict[Any, Gradients]]:
    qwen, adapters = {}, {}
    setup = Setup(every_layer_and_the_head)
    for loss in CHOSEN:
        qwen[loss] = Run(setup, LOSSES[loss], CPU, torch.float64).train(Policy(), accumulate=2)
    for where, loss, way in itertools.product(PLACES, CHOSEN, DIVIDED):
        run = Run(SETUPS[way], adapted_loss(where, loss), CPU, torch.float64)
        adapters[where, loss, way] = run.train(adapted(where))
    return qwen, adapters


def qwen_truth(loss: str) -> Gradients:
    model: Any = Policy()
    for rank in range(2):
        for batch in cases.micro_batches(cases.make_batch(rank, 2, torch.float64, last_empty=False), 2):
            items = cases.items_per_rank(2, last_empty=False)
            cases.backward_by_reference(model, batch, LOSSES[loss], items, 0.5)
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def test_a_transformers_model_and_adapters_on_body_or_head() -> None:
    for qwen, adapters in run_ranks(run_models, 2):  # one set of processes: they have much to import
        for loss, gradients in qwen.items():
            errors = relative_error(gradients, qwen_truth(loss))
            assert errors["lm.lm_head.weight"] < 1e-6
            assert max(errors.values()) < 1e-5, errors  # its norms compute in float32
        for (where, loss, way), gradients in adapters.items():
            errors = relative_error(gradients, adapted_truth(where, LOSSES[loss]))
            assert len(errors) == 2
            assert max(errors.values()) < 1e-12, f"{where}, {loss}, {way}: {errors}"
