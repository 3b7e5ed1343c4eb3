"""Megatron's GPT model on CPUs, tensor parallel, under verl's Megatron engine; for ranks that `run_ranks` has started.

Two things of Megatron are for GPUs alone and are replaced: the device that it allocates on, and its random states
(there is no dropout here). Its attention is left out of the model, and the packing of sequences with it.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, get_cuda_rng_tracker
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.verl_peer import TEMPERATURE, draw, relative, verl_module

TOKENS = 30  # of the 32 rows of the head


def start(ranks: int) -> None:
    torch.cuda.current_device = lambda: "cpu"
    get_cuda_rng_tracker().fork = nullcontext
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)


def megatron_model(sequence_parallel: bool, tied: bool) -> nn.Module:
    """A GPT model of Megatron without attention, whose kernels are for GPUs: embedding, MLP, head."""
    layer = ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            mlp=ModuleSpec(
                MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        ffn_hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=sequence_parallel,
        add_bias_linear=False,
        bias_activation_fusion=False,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        params_dtype=torch.float64,
    )
    torch.manual_seed(5)
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer], layer_norm=IdentityOp),
        vocab_size=32,
        max_sequence_length=16,
        position_embedding_type="none",
        share_embeddings_and_output_weights=tied,
    )
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(20.0)
    return model


def errors(sequence_parallel: bool, tied: bool) -> dict[str, float]:
    """Errors of what verl's engine and fused forward make of a model, whose whole weights are put together here."""
    model = megatron_model(sequence_parallel, tied)
    options: dict[str, str] = {}
    engine = SimpleNamespace(
        module=[model],
        is_value_model=False,
        engine_config=SimpleNamespace(use_fused_kernels=True, use_remove_padding=True),
        model_config=SimpleNamespace(
            fused_kernel_options=options,
            mtp=SimpleNamespace(enable=False),
            hf_config=transformers.Qwen3Config(vocab_size=TOKENS),
        ),
    )
    ids, a, b = (x[0] for x in draw((1, 8)))
    inputs = {"input_ids": ids[None], "position_ids": None, "attention_mask": None, "labels": ids.roll(-1)[None]}
    enable = verl_module("workers.engine.megatron.transformer_impl").MegatronEngine._maybe_enable_fused_kernels
    enable(engine)
    with pytest.raises((RuntimeError, AssertionError), match=r"NVTX|^$"):  # verl's own kernel, which wants a GPU
        model(**inputs, temperature=TEMPERATURE)
    options["impl_backend"] = "grpo_kernels"
    enable(engine)
    output = model(**inputs, temperature=TEMPERATURE)
    (output.log_probs * a + output.entropy * b).sum().backward()

    weights = {name: whole(name, x.detach()).requires_grad_() for name, x in model.named_parameters()}
    embedding, up, down, *rest = weights.values()
    x = F.embedding(ids, embedding)
    hidden = x + F.gelu(x @ up.T) @ down.T
    logps = ((hidden @ (rest[0] if rest else embedding)[:TOKENS].T) / TEMPERATURE).log_softmax(-1)
    chosen, entropy = logps.gather(-1, inputs["labels"][0][:, None])[:, 0], -(logps.exp() * logps).sum(-1)
    (chosen * a + entropy * b).sum().backward()
    found = {name: relative(whole(name, x.grad), weights[name].grad) for name, x in model.named_parameters()}
    return {**found, "logps": relative(output.log_probs, chosen), "entropy": relative(output.entropy, entropy)}


def whole(name: str, shard: Tensor) -> Tensor:
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, shard.contiguous())
    return torch.cat(shards, dim=1 if "fc2" in name else 0)
