"""``python -m benchmarks.verl_step``: verl's scoring of the old policy and its update, on a CPU.

One group of completions, all with a gradient, through verl's own FSDP engine (not wrapped, fp32)
and its ``ppo_loss``: with verl's fused torch head, with ours alone, with ours where the update
scores (``old_log_probs=auto``), and with the prompt run once besides, which is the default. CPU
seconds of all micro-batches, without the optimizer; the variants take turns in one process.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from benchmarks.groups import Shape, Size, gradient
from benchmarks.machine import Watch
from benchmarks.parity import TOLERANCE
from benchmarks.timing import order
from grpo_kernels.verl import patch_verl, trainers

TORCH, SCORED, OURS = "verl's torch head", "head alone, scored", "head alone"
TREE = "default"  # the prompt runs once
# head : layers as in Qwen3-0.6B, 0.33 parameters
SIZE, SHAPE, ROUNDS = Size(vocab=4096), Shape(1024, 256), 5
TOY_SIZE, TOY_SHAPE = Size(32, 64, 2, 2, 1, 16, 500), Shape(24, 12, 4)


def verl(name: str) -> Any:
    return importlib.import_module(f"verl.{name}")


class Products(TorchDispatchMode):
    """Counts floating point operations: `all`, and those of the `head`, whose vocabulary is in no
    other shape; and the `tokens` that are embedded."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.all, self.head, self.tokens = vocabulary, 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        count = flop_registry.get(getattr(torch.ops.aten, name.rstrip("_"), None))
        if name == "embedding":
            self.tokens += args[1].numel()
        if count is not None and func.namespace == "aten":
            operations = count(*args, **(kwargs or {}), out_val=out)
            self.all += operations
            tensors = [x for x in tree_iter((args, out)) if isinstance(x, Tensor)]
            self.head += operations * any(self.vocabulary in x.shape for x in tensors)
        return out


def engine(model: Any, options: dict[str, str], **config: Any) -> Any:
    """verl's engine around a model; made without its constructor, which wants a GPU."""
    module = verl("workers.engine.fsdp.transformer_impl")
    module.get_device_id = module.get_device_name = lambda: "cpu"
    module.device_name = "cpu"
    made = module.FSDPEngineWithLMHead.__new__(module.FSDPEngineWithLMHead)
    made.module, made.model_config = model, SimpleNamespace(fused_kernel_options=options)
    flags = {"entropy_checkpointing": False, "entropy_from_logits_with_chunking": False}
    made.engine_config = SimpleNamespace(**flags, **config)
    made.compute_entropy_from_logits = verl("utils.torch_functional").entropy_from_logits
    made.use_ulysses_sp, made.ulysses_sequence_parallel_size = False, 1
    made.ulysses_device_mesh, made.scaler = None, None
    made.pad_to_length, made.pad_to_length_bucket = False, 1
    made._autocast_dtype = torch.float32
    return made


def model(size: Size, shape: Shape, options: dict[str, str]) -> Any:
    """A model with the head of verl's ``fused_kernel_options``, if any."""
    patch = verl("models.transformers.monkey_patch")
    patch.is_trl_available = lambda: False  # it looks for a class that TRL has no more
    made = size.model(shape.prompt + shape.completion)
    if options:
        backend = options["impl_backend"]
        made.__class__ = type(backend, (type(made),), {})  # verl replaces the forward of a class
        patch.patch_forward_with_backends(made, True, backend)
    return made


def mini_batch(there: Tensor, ids: Tensor, prompt: int, fields: dict[str, Tensor]) -> Any:
    """Sequences, whose first `prompt` columns are the prompts, as verl's trainer sends them to a
    worker: nested, without padding; `there` where a token is, `fields` of the responses."""

    def nested(x: Tensor, inside: Tensor) -> Tensor:
        rows = [row[at] for row, at in zip(x, inside.bool(), strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    fields = fields | {"responses": ids[:, prompt:], "loss_mask": fields["response_mask"]}
    made = {name: nested(x, there[:, prompt:]) for name, x in fields.items()}
    made["prompts"] = nested(ids[:, :prompt], there[:, :prompt])
    made["input_ids"], made["position_ids"] = nested(ids, there), nested(there.cumsum(1) - 1, there)
    return verl("utils.tensordict_utils").get_tensordict(made)


def batch(size: Size, shape: Shape, micro: int, *, packed: bool) -> Any:
    """The group as verl's trainer sends it to a worker, without old log-probabilities."""
    draw = torch.Generator().manual_seed(1)
    prompt = torch.randint(size.vocab, (1, shape.prompt), generator=draw)
    answers = torch.randint(size.vocab, (shape.group, shape.completion), generator=draw)
    ids = torch.cat([prompt.expand(shape.group, -1), answers], dim=1)
    mask, advantages = torch.ones_like(answers), torch.randn(shape.group, 1, generator=draw)
    fields = {"response_mask": mask, "advantages": advantages * mask}
    data = mini_batch(torch.ones_like(ids), ids, shape.prompt, fields)
    verl("utils.tensordict_utils").assign_non_tensor(
        data, use_remove_padding=packed, use_dynamic_bsz=False, micro_batch_size_per_gpu=micro,
        use_fused_kernels=True, global_batch_size=shape.group, temperature=1.0,
    )  # fmt: skip
    return data


def step(made: Any, data: Any, loss: Any, *, scored: bool) -> tuple[float, float, Tensor]:
    tensordict_utils = verl("utils.tensordict_utils")
    data = data.clone()
    made.module.zero_grad()
    started = time.process_time()
    if scored:
        tensordict_utils.assign_non_tensor(data, calculate_entropy=True)  # which verl logs
        made.module.eval()
        found = made.infer_batch(data)["model_output"]["log_probs"]
        data["old_log_probs"] = verl("workers.utils.padding").no_padding_2_padding(found, data)
        tensordict_utils.assign_non_tensor(data, calculate_entropy=False)
    else:  # as the worker asks for it
        loss = trainers.ScoreKeepingLoss(loss, [None] * len(data), entropy=False)
        data[trainers.ROW] = torch.arange(len(data))
        data["old_log_probs"] = torch.zeros_like(data["advantages"])
        tensordict_utils.assign_non_tensor(data, calculate_entropy=True)
    made.module.train()
    out = made.forward_backward_batch(data, loss, forward_only=False)
    seconds = time.process_time() - started
    return seconds, sum(out["loss"]), gradient(made.module)


def actor_loss(group: int, micro: int) -> Any:
    config = verl("workers.config").ActorConfig(
        strategy="fsdp2", rollout_n=group, ppo_micro_batch_size_per_gpu=micro, use_dynamic_bsz=False
    )
    return functools.partial(verl("workers.utils.losses").ppo_loss, config=config)


def measure(size: Size, shape: Shape, rounds: int, micro: int, *, packed: bool) -> dict[str, Any]:
    patch_verl()
    loss = actor_loss(shape.group, micro)
    data = batch(size, shape, micro, packed=packed)
    ours_alone = {"impl_backend": "grpo_kernels", "layout": "padded"}  # prompts run as in verl
    theirs, ours, tree = (
        engine(model(size, shape, x), x)
        for x in ({"impl_backend": "torch"}, ours_alone, {"impl_backend": "grpo_kernels"})
    )
    variants = {
        TORCH: (theirs, True), SCORED: (ours, True), OURS: (ours, False), TREE: (tree, False),
    }  # fmt: skip

    def run(name: str) -> tuple[float, float, Tensor]:
        made, scored = variants[name]
        return step(made, data, loss, scored=scored)

    watch = Watch()
    _, want, gradient = run(TORCH)
    differences = {}
    for name in (SCORED, OURS, TREE):  # which warms up, too
        run(name)  # the first call tries the layout
        _, got, x = run(name)
        apart = float((x - gradient).norm() / gradient.norm())
        differences[name] = {"loss": abs(got - want), "gradient": apart}
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(rounds):
        for name in order([*variants], i):
            samples[name].append(run(name)[0])
    seconds = {name: statistics.median(x) for name, x in samples.items()}
    right = all(max(x.values()) <= TOLERANCE for x in differences.values())
    return {
        "status": "ok" if right else "wrong",
        "shape": f"{shape.name}, micro-batches of {micro}, {'packed' if packed else 'padded'}",
        "seconds": seconds, "speed": {name: seconds[TORCH] / x for name, x in seconds.items()},
        "samples": samples, "differences": differences, "cpu_of_others": watch.others(),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verl_step", description=__doc__)
    parser.add_argument("--micro", type=int, default=4, help="sequences of a micro-batch")
    parser.add_argument("--packed", action="store_true", help="use_remove_padding=True")
    parser.add_argument("--smoke", action="store_true", help="at toy size, once")
    options = parser.parse_args()
    size, shape, rounds = (TOY_SIZE, TOY_SHAPE, 1) if options.smoke else (SIZE, SHAPE, ROUNDS)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = measure(size, shape, rounds, options.micro, packed=options.packed)
    finally:
        dist.destroy_process_group()
    print(json.dumps(found, indent=1))
    return 0 if found["status"] == "ok" else 1


if __name__ == "__main__":
    raise SystemExit(main())
