"""Megatron's GPT model on CPUs under verl's Megatron engine, for ranks of `run_ranks`.

What is for GPUs alone is replaced (the device that it allocates on, its random states) or left out:
attention, and the packing of sequences with it."""

from __future__ import annotations

import functools
import itertools
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_tensor_model_parallel_region,
    get_cuda_rng_tracker,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.verl_step import Products
from tests.support import verl_peer
from tests.support.case_builder import seeded
from tests.support.on_device import relative
from tests.support.verl_peer import draw, verl_module

TOKENS = 30  # of the 32 rows of the head
TEMPERATURE = 0.75  # verl rounds it to float32


def start(*, tensor: int = 1, context: int = 1) -> None:
    """Divide the ranks; again, if they were divided before."""
    torch.cuda.current_device = lambda: "cpu"
    get_cuda_rng_tracker().fork = nullcontext
    parallel_state.destroy_model_parallel()
    sizes = {"tensor_model_parallel_size": tensor, "context_parallel_size": context}
    parallel_state.initialize_model_parallel(**sizes)


def megatron_model(sequence_parallel: bool, tied: bool) -> nn.Module:
    """A GPT model of Megatron: embedding, MLP, head."""
    projections = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp = ModuleSpec(MLP, submodules=projections)
    submodules = TransformerLayerSubmodules(mlp=mlp, mlp_bda=get_bias_dropout_add)
    layer = ModuleSpec(TransformerLayer, submodules=submodules)
    sizes = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4}
    off = ("add_bias_linear", "bias_activation_fusion", "gradient_accumulation_fusion")
    config = TransformerConfig(
        **sizes,
        **dict.fromkeys(off, False),
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
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


def engine_of(model: nn.Module) -> Any:
    """verl's engine around `model`, with our head."""
    owner = verl_module("workers.engine.megatron.transformer_impl").MegatronEngineWithLMHead
    made = owner.__new__(owner)
    made.module = [model]
    made.is_value_model = False
    made.enable_routing_replay = False
    made.tf_config = None
    flags = {"pad_to_length": False, "dynamic_context_parallel": False}
    made.engine_config = SimpleNamespace(use_fused_kernels=True, use_remove_padding=True, **flags)
    options = verl_peer.SCORE | {}
    made.model_config = SimpleNamespace(
        fused_kernel_options=options,
        mtp=SimpleNamespace(enable=False),
        hf_config=transformers.Qwen3Config(vocab_size=TOKENS, architectures=["Qwen3ForCausalLM"]),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    with pytest.raises(ValueError, match="zero_advantage: expected 'train' with Megatron's engine"):
        made._maybe_enable_fused_kernels()
    del options["zero_advantage"]
    made._maybe_enable_fused_kernels()
    return made


def scores_of(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `ids` and entropies, like `ids`, of logits that predict them."""
    logps = logits.log_softmax(-1)
    return logps.gather(-1, ids[..., None])[..., 0], -(logps.exp() * logps).sum(-1)


def step(sequence_parallel: bool, tied: bool, **options: Any) -> dict[str, float]:
    """A step of verl's engine on a micro-batch of `verl_peer.batch`: errors against the model's
    own logits, and the products of the head in N V H, unless the vocabulary is divided; `options`
    are those of the loss, ``ppo_loss``."""
    module = verl_module("workers.engine.megatron.transformer_impl")
    module.get_device_id = lambda: "cpu"
    model = megatron_model(sequence_parallel, tied)
    engine = engine_of(model)
    data = verl_peer.batch()
    ids, offsets = data["input_ids"].values() % TOKENS, data["input_ids"].offsets()
    data["input_ids"] = torch.nested.nested_tensor_from_jagged(ids, offsets)
    tensordict_utils = verl_module("utils.tensordict_utils")
    flags = {"calculate_entropy": True, "temperature": TEMPERATURE, "dp_size": 1}
    more = {"use_fused_kernels": True, "num_micro_batch": 1, "global_batch_size": len(data)}
    more["batch_num_tokens"] = int(data["response_mask"].values().sum())
    tensordict_utils.assign_non_tensor(data, **flags, **more)
    loss_function = verl_peer.ppo_loss(verl_peer.config(**options))

    weights = {
        name: whole(name, x.detach()).requires_grad_() for name, x in model.named_parameters()
    }
    embedding, up, down, *rest = weights.values()
    x = F.embedding(ids, embedding)
    head = rest[0] if rest else embedding
    logits = (x + F.gelu(x @ up.T) @ down.T) @ head[:TOKENS].T
    chosen, entropy = scores_of(logits / TEMPERATURE, ids.roll(-1))
    given = {"log_probs": chosen, "entropy": entropy}
    old = verl_module("workers.utils.padding").no_padding_2_padding(chosen.detach(), data)
    data["old_log_probs"] = old + 0.1 * torch.randn(old.shape, generator=seeded("old"))
    nested = {name: torch.nested.nested_tensor_from_jagged(x, offsets) for name, x in given.items()}
    want = loss_function(model_output=nested, data=data)[0]
    want.backward()

    postprocess = functools.partial(
        engine.postprocess_micro_batch_func, forward_only=False, loss_function=loss_function
    )
    products = Products(TOKENS)
    with products:
        output, finish = engine.forward_step(iter([data]), model, loss_function, postprocess)
        loss, _ = finish(output)
        loss.backward()
    found = {"loss": abs(float(loss.detach()) - float(want))}
    for name, x in model.named_parameters():
        # as Megatron does
        dist.all_reduce(x.grad, group=parallel_state.get_context_parallel_group())
        found[name] = relative(whole(name, x.grad), weights[name].grad)
    operations = torch.tensor(products.head)
    dist.all_reduce(operations, group=parallel_state.get_context_parallel_group())
    counted, live = (data[x].values() != 0 for x in ("response_mask", "advantages"))
    share = float((counted & live).sum() / counted.sum())
    return {**found, "nvh": int(operations) / (TOKENS * 16 * int(counted.sum())), "share": share}


def whole(name: str, shard: Tensor) -> Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return torch.cat(shards, dim=1 if "fc2" in name else 0)


# The recipe for Megatron-Core of docs/start/other-trainers.md

RECIPE = Path(__file__).parents[2] / "examples" / "recipes" / "my_megatron.py"


def differences(tensor: int) -> dict[str, float]:
    """Largest relative difference of results and gradients to the model without recipe, by case."""
    start(tensor=tensor)
    names: dict[str, Any] = {"__name__": "my_megatron"}
    exec(compile(RECIPE.read_text(), str(RECIPE), "exec"), names)
    ids, fuse, found = draw((2, 8))[0], names["fuse"], {}
    for sequence_parallel, tied in itertools.product((False, True)[:tensor], (False, True)):
        for case in (scores, loss):
            models = tuple(megatron_model(sequence_parallel, tied) for _ in range(2))
            name = f"{case.__name__}, sequence_parallel={sequence_parallel}, tied={tied}"
            found[name] = difference(models, *case(fuse, models, ids))
    model = megatron_model(False, False)
    model.config.mtp_num_layers = 1
    with pytest.raises(NotImplementedError, match="multi-token prediction"):
        fuse(model)
    return found


def scores(fuse: Any, models: Any, ids: torch.Tensor) -> tuple[Any, Any]:
    """Over the rows that are tokens, 30 of 32."""
    fused, stock = models
    score, labels = fuse(fused, TOKENS), ids.roll(-1, 1)
    logits = gather_from_tensor_model_parallel_region(stock(ids, None, None))
    logits = logits[..., :TOKENS] / TEMPERATURE
    found = score(fused(ids, None, None), labels, temperature=TEMPERATURE)
    return found, scores_of(logits, labels)


def loss(fuse: Any, models: Any, ids: torch.Tensor) -> tuple[Any, Any]:
    """Megatron-Core's own cross entropy, which counts the padding and computes in float32."""
    fuse(models[0])
    fused, stock = ((x(ids, None, None, labels=ids.roll(-1, 1)),) for x in models)
    return fused, stock


def difference(models: Any, *results: Any) -> float:
    for values in results:
        torch.manual_seed(4)
        sum((x * torch.randn(x.shape, dtype=torch.float64)).sum() for x in values).backward()
    parameters = zip(*(model.parameters() for model in models), strict=True)
    pairs = [*zip(*results, strict=True), *((x.grad, y.grad) for x, y in parameters)]
    return max(float(((x - y).norm() / y.norm()).detach()) for x, y in pairs)
