"""verl itself, to test against: its real package, with what its import needs, all from
requirements/peers.txt.

verl asks for other releases of transformers, TRL and tensordict than ours, so it is installed
without its dependencies. The modules named here import and run all the same; its trainers (Ray
clusters, vLLM) are not touched. ``import verl`` also loads every installed plug-in of verl, ours
among them.

verl's FSDP engine runs on CPUs: a tiny model is trained by its `forward_backward_batch`, products
counted. The engine is made without its constructor, which wants GPUs and a model on disk; what runs
is verl's own code: the layout of the inputs, the loss, the micro-batches, the gradients. `VOCAB` is
in no other dimension, so that products of the head are told from the trunk's."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel

from benchmarks import verl_step
from benchmarks.verl_step import Products
from grpo_kernels.verl import patch_verl, unpatch_verl
from tests.support.case_builder import seeded
from tests.support.on_device import relative
from tests.support.ranks import one_rank

if TYPE_CHECKING:
    from transformers import PreTrainedModel

needs_verl = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed"
)

TEMPERATURE = 0.7

_TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
_EYES: dict[str, Any] = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32}
_EYES |= {"patch_size": 2}
_ROPE: dict[str, Any] = {"rope_type": "default", "mrope_section": [1, 1, 2]}
_MROPE: dict[str, Any] = {"rope_parameters": _ROPE}
_LINEAR: dict[str, Any] = {
    "layer_types": ["full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_QWEN2 = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
_QWEN2_5 = {**_EYES, "intermediate_size": 16, "fullatt_block_indexes": [0]}
_PLACES = {**_EYES, "num_position_embeddings": 16}
# kind -> (its class without the ending, fields of the text model, fields of the vision model)
_VISION_KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", _MROPE, _QWEN2),
    "qwen2_5_vl": ("Qwen2_5_VL", _MROPE, _QWEN2_5),
    "qwen3_vl": ("Qwen3VL", _MROPE, {**_PLACES, "deepstack_visual_indexes": [0]}),
    "qwen3_5": ("Qwen3_5", _LINEAR, _PLACES),
    "glm4v": ("Glm4v", {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}}, _EYES),
}


def verl_module(name: str) -> ModuleType:
    """The module `name` of verl; the test is skipped where verl is not installed."""
    pytest.importorskip("verl")
    return importlib.import_module(f"verl.{name}")


def core_algos() -> ModuleType:
    return verl_module("trainer.ppo.core_algos")


def monkey_patch() -> ModuleType:
    """verl's module that gives models their forward, made to work with the TRL and transformers we
    have.

    verl looks for a class that TRL 1.16 has no more, and for output classes that transformers has
    replaced by one."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    module = verl_module("models.transformers.monkey_patch")
    module.is_trl_available = lambda: False
    for folder, (prefix, *_) in _VISION_KINDS.items():
        modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        name = f"{prefix}CausalLMOutputWithPast"
        if not hasattr(modeling, name):
            setattr(modeling, name, CausalLMOutputWithPast)
    return module


@contextmanager
def patched() -> Iterator[ModuleType]:
    """`monkey_patch` with our plug-in; everything is as before afterwards."""
    module, name = monkey_patch(), "_flash_attention_forward"
    attention = importlib.import_module("transformers.integrations.flash_attention")
    before = getattr(attention, name)  # verl replaces it for good
    unpatch_verl()
    patch_verl()
    try:
        yield module
    finally:
        unpatch_verl()
        setattr(attention, name, before)


def with_own_class(model: PreTrainedModel) -> PreTrainedModel:
    """The model, of a subclass of its own: verl replaces the forward of a class."""
    cls = type(model)
    model.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__})
    return model


def text_model(kind: str = "Qwen3", **fields: Any) -> PreTrainedModel:
    """A tiny text model with random weights and a class of its own."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**_TEXT, **fields})
    return with_own_class(getattr(transformers, f"{kind}ForCausalLM")(config))


def vision_model(kind: str) -> PreTrainedModel:
    import transformers

    prefix, text, eyes = _VISION_KINDS[kind]
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    fields = {"text_config": {**_TEXT, **text}, "vision_config": eyes, "tie_word_embeddings": False}
    fields |= {name: 90 + i for i, name in enumerate(tokens)}
    config = getattr(transformers, f"{prefix}Config")(**fields)
    return with_own_class(getattr(transformers, f"{prefix}ForConditionalGeneration")(config))


def draw(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids below 30, and weights of log-probabilities and entropies; the same on every rank."""
    g = seeded("verl")
    ids = torch.randint(3, 30, shape, generator=g)
    a, b = torch.randn((2, *shape), generator=g, dtype=torch.float64)
    return ids, a, b


WRAPPED = "_fsdp_wrapped_module"  # the child of a FullyShardedDataParallel

VOCAB, HIDDEN, PROMPT, RESPONSE = 211, 32, 24, 40
OLD, REF = 0.1, 0.2  # deviations of old and reference log-probabilities from the model's
OURS = {"impl_backend": "grpo_kernels"}  # verl's fused_kernel_options
SCORE = OURS | {"zero_advantage": "score"}
AS_GIVEN = {"layout": "padded"}  # the trunk computes all tokens, also those of shared prompts


@contextmanager
def on_one_rank() -> Iterator[None]:
    """A group of this process alone, and verl as it is outside afterwards."""
    with one_rank():
        try:
            yield
        finally:
            unpatch_verl()


def model(layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": layers}
    return text_model("Qwen3", **sizes)


def config(mode: str = "vanilla", **options: Any) -> Any:
    """An actor's configuration; `correction` is that of ``bypass_mode``."""
    workers = verl_module("workers.config")
    correction = options.pop("correction", None)
    made = workers.ActorConfig(
        strategy="fsdp2",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=4,
        use_dynamic_bsz=False,
        policy_loss=workers.PolicyLossConfig(loss_mode=mode, dro_beta=0.1),
        **options,
    )
    if correction is not None:
        object.__setattr__(made.policy_loss, "rollout_correction", correction)
    return made


def ppo_loss(settings: Any) -> Any:
    return functools.partial(verl_module("workers.utils.losses").ppo_loss, config=settings)


def batch(size=8, *, seed=0, dead=4, tools=False, weights=False, group=1, padded=False):
    """A mini-batch as verl's trainer sends it, or the one before v1 if `padded`: `dead` sequences
    (the first so many, or a mask) have the advantage 0, and every (`size` / `group`)-th one has the
    same prompt."""
    g = torch.Generator().manual_seed(seed)
    prompts = torch.randint(8, PROMPT + 1, (size, 1), generator=g)
    responses = torch.randint(RESPONSE // 4, RESPONSE + 1, (size, 1), generator=g)
    ids = torch.randint(3, VOCAB, (size, PROMPT + RESPONSE), generator=g)
    if group > 1:
        prompts = prompts[: size // group].repeat(group, 1)
        ids[:, :PROMPT] = ids[: size // group, :PROMPT].repeat(group, 1)
    there = places(prompts, responses)
    mask = there[:, PROMPT:].clone()
    if tools:
        mask[:, 5:9] = 0
    advantages = torch.randn(size, 1, generator=g)
    advantages[torch.arange(size) < dead if isinstance(dead, int) else dead] = 0.0
    fields = {"response_mask": mask, "advantages": advantages * mask}
    common = {"input_ids": ids, "attention_mask": there, "position_ids": there.cumsum(1) - 1}
    common |= {"prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:]}
    padding = verl_module("workers.utils.padding")
    data = verl_module("utils.tensordict_utils").get_tensordict(common | fields)
    data = padding.left_right_2_no_padding(data)
    logps = run(None, data, None, forward_only=True).model_output["log_probs"]
    logps = padding.no_padding_2_padding(logps, data)
    for name, deviation in (("old_log_probs", OLD), ("ref_log_prob", REF)):
        fields[name] = logps + deviation * torch.randn(logps.shape, generator=g)
    if weights:
        w = 2 * torch.rand(logps.shape, generator=g)
        fields["rollout_is_weights"] = w * (w >= 0.4)
    return data.update(fields) if padded else verl_step.mini_batch(there, ids, PROMPT, fields)


def places(prompts: Tensor, responses: Tensor) -> Tensor:
    """1 where a token is: prompts end, responses begin, at PROMPT."""
    place = torch.arange(PROMPT + RESPONSE)
    return ((place >= PROMPT - prompts) & (place < PROMPT + responses)).long()


def wrap(module: nn.Module, strategy: str | None, *, use_orig_params: bool = True) -> nn.Module:
    """`module` as verl wraps it: `strategy` is fsdp, fsdp2 or None."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    utilities = verl_module("utils.fsdp_utils")
    if strategy == "fsdp2":
        utilities.apply_fsdp2(module, {"mesh": mesh, "reshard_after_forward": True}, {})
    if strategy == "fsdp":
        policy = utilities.get_fsdp_wrap_policy(module, {})
        options = {"device_mesh": mesh, "device_id": torch.device("cpu")}
        options |= {"use_orig_params": use_orig_params, "auto_wrap_policy": policy}
        module = FullyShardedDataParallel(module, **options)
    return module


def engine(module: nn.Module, options: dict[str, str], strategy: str | None) -> Any:
    verl_module("utils.seqlen_balancing").get_device_name = lambda: "cpu"
    module = wrap(module, strategy)
    return verl_step.engine(module, options, use_no_sync_for_gradient_accumulation=True)


def use_backend(module: nn.Module, options: dict[str, str]) -> None:
    """Give `module` the fused head of verl's `options`."""
    backend = options["impl_backend"]
    monkey_patch().patch_forward_with_backends(module, True, backend)
    with torch.no_grad():  # a first call measures the head's constants: no work of a step
        module(input_ids=torch.ones(1, 2, dtype=torch.long), return_dict=True)


def run(
    options: dict[str, str] | None,  # verl's fused_kernel_options; None: unfused
    data: Any,
    loss: Any,
    *,
    micro: int = 8,
    strategy: str | None = "fsdp2",
    layers: int = 1,
    adapter: bool = False,  # LoRA on the attention
    forward_only: bool = False,
    prepare: Callable[[Any], None] | None = None,  # of the engine
    tried: bool = False,  # the model has run before
    **flags: Any,
) -> Any:
    """What one mini-batch through verl's engine came to."""
    monkey_patch()
    unpatch_verl()
    patch_verl()
    made = model(layers)
    if options is not None:
        use_backend(made, options)
    if adapter:
        import peft

        lora = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
        made = peft.get_peft_model(made, peft.LoraConfig(r=4, **lora))
    the_engine = engine(made, options or {}, strategy)
    if prepare is not None:
        prepare(the_engine)
    data = data.clone()
    settings = {
        "use_remove_padding": True,
        "use_dynamic_bsz": False,
        "max_token_len_per_gpu": 160,
        "micro_batch_size_per_gpu": micro,
        "use_fused_kernels": options is not None,
        "calculate_entropy": False,
        "global_batch_size": len(data) * dist.get_world_size(),
        "temperature": 0.9,
    }
    verl_module("utils.tensordict_utils").assign_non_tensor(data, **{**settings, **flags})
    if tried:
        the_engine.forward_backward_batch(data.clone(), None, True)
    products = Products(VOCAB)
    with products:
        out = the_engine.forward_backward_batch(data, loss, forward_only)
    gradients = gradients_of(the_engine.module, whole=strategy != "fsdp" or forward_only)
    return SimpleNamespace(loss=sum(out.pop("loss")), gradients=gradients, products=products, **out)


def gradients_of(module: nn.Module, *, whole: bool) -> dict[str, Tensor]:
    """The whole gradient of each parameter; of FSDP1's flat ones, if not `whole`."""
    if not whole:
        with FullyShardedDataParallel.summon_full_params(module, with_grads=True):
            found = gradients_of(module, whole=True)
            return {name.replace(f"{WRAPPED}.", ""): x.clone() for name, x in found.items()}
    found = {name: x.grad for name, x in module.named_parameters() if x.grad is not None}
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in found.items()}


def gap(got: Any, want: Any) -> float:
    """Largest relative error of a parameter's gradient."""
    assert got.gradients.keys() == want.gradients.keys()
    return max(relative(got.gradients[name], x) for name, x in want.gradients.items())


def metrics_of(step: Any) -> dict[str, float]:
    reduced = verl_module("utils.metric").reduce_metrics(dict(step.metrics))
    return {name: float(x) for name, x in reduced.items()}


def divided_by_ulysses(found: Any) -> None:
    """Have the engine divide each sequence over all ranks, which then have the same data."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "sp"))
    found.use_ulysses_sp, found.ulysses_sequence_parallel_size = True, dist.get_world_size()
    found.ulysses_device_mesh = mesh
    verl_module("utils.ulysses").set_ulysses_sequence_parallel_group(mesh["sp"].get_group())
