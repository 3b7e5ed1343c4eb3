"""``python -m benchmarks.verl_engine RESULTS.json``: a mini-batch of verl's FSDP2 engine, verl's
heads and ours.

The engine of `benchmarks.verl_step`, wrapped by verl, with its micro-batches and ``ppo_loss``:
`RANKS` gloo processes of one thread, on a CPU in fp32. Each rank has two prompts of eight responses
each, scattered over two micro-batches of eight; one group's advantages are 0. All sequences have
one length, padded: verl's packed rows have a mask over the whole row on a CPU, which would be
unfair. CPU seconds of `forward_backward_batch`, summed over ranks: the median over rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import machine, verl_step
from benchmarks.groups import Shape

RANKS, GROUP, PROMPTS, COMPLETION, ROUNDS = 2, 8, (64, 256, 1024), 256, 3
OURS = {"impl_backend": "grpo_kernels"}
SIZE = replace(verl_step.SIZE, vocab=4080)  # in no other dimension, so that its products are told
WAYS: dict[str, dict[str, str]] = {  # verl's fused_kernel_options
    "verl, unfused": {},
    "verl, torch head": {"impl_backend": "torch"},
    "head alone": OURS | {"layout": "padded"},
    "default": OURS,
    "zero_advantage=score": OURS | {"zero_advantage": "score"},
}


def engine(shape: Shape, options: dict[str, str]) -> Any:
    model = verl_step.model(SIZE, shape, options)
    model.config.tie_word_embeddings = True  # verl's head cannot read one that is divided
    model.tie_weights()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrap = verl_step.verl("utils.fsdp_utils").apply_fsdp2
    wrap(model, {"mesh": mesh, "reshard_after_forward": True}, {})
    return verl_step.engine(model, options, use_no_sync_for_gradient_accumulation=True)


def batch(prompt: int, *, fused: bool) -> Any:
    g, size = torch.Generator().manual_seed(dist.get_rank()), 2 * GROUP
    ids = torch.randint(3, SIZE.vocab, (size, prompt + COMPLETION), generator=g)
    ids[:, :prompt] = ids[:2, :prompt].repeat(GROUP, 1)
    mask = torch.ones(size, COMPLETION, dtype=torch.long)
    advantages = torch.randn(size, 1, generator=g) * (torch.arange(size) % 2)[:, None]
    fields = {"response_mask": mask, "advantages": advantages * mask}
    fields["old_log_probs"] = -8.0 + torch.randn(mask.shape, generator=g)
    data = verl_step.mini_batch(torch.ones_like(ids), ids, prompt, fields)
    flags = {"use_remove_padding": False, "use_dynamic_bsz": False, "use_fused_kernels": fused}
    flags |= {"micro_batch_size_per_gpu": GROUP, "calculate_entropy": False}
    verl_step.verl("utils.tensordict_utils").assign_non_tensor(
        data, temperature=1.0, global_batch_size=size * RANKS, **flags
    )
    return data


def rank(number: int, folder: str, results: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=number, world_size=RANKS
    )
    loss = verl_step.actor_loss(GROUP, GROUP)
    for prompt in PROMPTS:
        engines = {way: engine(Shape(prompt, COMPLETION), options) for way, options in WAYS.items()}
        found: dict[str, dict[str, Any]] = {way: {"seconds": []} for way in WAYS}
        want: list[torch.Tensor] = []
        for i in range(-2, ROUNDS):  # first what is tried once, then counts, then times
            for way, made in engines.items():
                data = batch(prompt, fused=bool(WAYS[way]))
                made.module.zero_grad()
                counts, began = verl_step.Products(SIZE.vocab), time.process_time()
                with counts if i == -1 else nullcontext():
                    made.forward_backward_batch(data, loss)
                if i >= 0:
                    seconds = torch.tensor(time.process_time() - began)
                    dist.all_reduce(seconds)
                    found[way]["seconds"].append(float(seconds))
                if i == -1:
                    nvh = 2 * GROUP * COMPLETION * SIZE.vocab * SIZE.hidden
                    found[way] |= {"tokens": counts.tokens, "NVH": counts.head / nvh}
                    got = [x.grad.full_tensor() for x in made.module.parameters()]
                    want = want or got
                    pairs = zip(got, want, strict=True)
                    gaps = [float((x - y).norm() / y.norm()) for x, y in pairs]
                    found[way]["gradient off by"] = max(gaps)
        if number == 0:
            results["prompts"][str(prompt)] = found
            show(prompt, found)
    if number == 0:
        Path(sys.argv[1]).write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()


def show(prompt: int, found: dict[str, dict[str, Any]]) -> None:
    medians = {way: statistics.median(x["seconds"]) for way, x in found.items()}
    for way, x in found.items():
        times = [medians[peer] / medians[way] for peer in ("verl, unfused", "verl, torch head")]
        print(
            f"| {prompt} | {way} | {x['tokens']:,} | {x['NVH']:.2f} | {medians[way]:.2f} | "
            f"{times[0]:.2f} | {times[1]:.2f} | {x['gradient off by']:.1e} |",
            flush=True,
        )


def main() -> None:
    about = {**machine.about(on_gpu=False), "ranks": RANKS, "threads of a rank": 1}
    about |= {"group": GROUP, "completion": COMPLETION, "model": asdict(SIZE)}
    print("| prompt | way | tokens | NVH | CPU s | x unfused | x torch head | gradient off by |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (folder, {**about, "prompts": {}}), nprocs=RANKS)


if __name__ == "__main__":
    main()
