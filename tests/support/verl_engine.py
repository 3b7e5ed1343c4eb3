"""verl's FSDP engine itself, on CPUs: a tiny model trained by its `forward_backward_batch`,
products counted.

The engine is made without its constructor, which wants GPUs and a model on disk; what runs is
verl's own code: the layout of the inputs, the loss, the micro-batches, the gradients. `VOCAB` is in
no other dimension, so that products of the head are told from the trunk's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel

from benchmarks import verl_step
from benchmarks.verl_step import Products
from grpo_kernels.verl import patch_verl, unpatch_verl
from tests.support import verl_peer
from tests.support.ranks import one_rank
from tests.support.verl_peer import verl_module

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
    return verl_peer.text_model("Qwen3", **sizes)


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


def batch(size=8, *, seed=0, dead=4, tools=False, weights=False, group=1):
    """A mini-batch as verl's trainer sends it: `dead` sequences (the first so many, or a mask) have
    the advantage 0, and every (`size` / `group`)-th one has the same prompt."""
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
    data = verl_step.mini_batch(there, ids, PROMPT, fields)
    logps = run(None, data, None, forward_only=True).model_output["log_probs"]
    logps = verl_module("workers.utils.padding").no_padding_2_padding(logps, data)
    for name, deviation in (("old_log_probs", OLD), ("ref_log_prob", REF)):
        data[name] = logps + deviation * torch.randn(logps.shape, generator=g)
    if weights:
        w = 2 * torch.rand(logps.shape, generator=g)
        data["rollout_is_weights"] = w * (w >= 0.4)
    return data


def places(prompts: Tensor, responses: Tensor) -> Tensor:
    """1 where a token is: prompts end, responses begin, at PROMPT."""
    place = torch.arange(PROMPT + RESPONSE)
    return ((place >= PROMPT - prompts) & (place < PROMPT + responses)).long()


def jagged(x: Tensor, there: Tensor) -> Tensor:
    """The cells of `x` (B, L) that are `there`, a row per sequence."""
    rows = [row[at] for row, at in zip(x, there.bool(), strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def nested(data: Any) -> Any:
    there = data["attention_mask"]
    made = data.exclude("attention_mask", "max_response_len", "max_seq_len", "indices")
    made["prompts"] = jagged(data["prompts"], there[:, :PROMPT])
    names = ("response_mask", "old_log_probs", "advantages", "ref_log_prob", "loss_mask")
    for name in (*names, "responses"):
        made[name] = jagged(data[name], there[:, PROMPT:])
    return made


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
    verl_peer.monkey_patch().patch_forward_with_backends(module, True, backend)
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
    verl_peer.monkey_patch()
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
    return max(verl_peer.relative(got.gradients[name], x) for name, x in want.gradients.items())


def metrics_of(step: Any) -> dict[str, float]:
    reduced = verl_module("utils.metric").reduce_metrics(dict(step.metrics))
    return {name: float(x) for name, x in reduced.items()}


def divided_by_ulysses(found: Any) -> None:
    """Have the engine divide each sequence over all ranks, which then have the same data."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "sp"))
    found.use_ulysses_sp, found.ulysses_sequence_parallel_size = True, dist.get_world_size()
    found.ulysses_device_mesh = mesh
    verl_module("utils.ulysses").set_ulysses_sequence_parallel_group(mesh["sp"].get_group())
