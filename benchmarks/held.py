"""What calls of a model leave in memory until Python's cyclic collector runs: ``python -m
benchmarks.held``.

A loss of one batch, forward and backward or forward alone, many times, with the collector off and
as Python has it: resident memory after the last call above that after the fifth, and the highest
above that before the first counted one, without a collection between them and with glibc's own
settings, as a training has them. Beside it the same loss of the model's own logits. Linux; each row
is measured in a process of its own.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.memory import CLEAR_REFS, MIB, status_bytes
from grpo_kernels import GRPOLoss
from grpo_kernels.transformers import causal_lm_loss

CALLS, WARM = 25, 5
ROWS, PROMPT, COMPLETION = 8, 64, 192
SIZES = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip


def step_of(name: str) -> Callable[[], None]:
    """Return one step of ours, or of "logits": the model's own forward and their loss."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).train()
    ids = torch.randint(3, 2000, (ROWS, PROMPT + COMPLETION))
    ids[:, :PROMPT] = ids[0, :PROMPT]
    mask, advantages = torch.ones(ROWS, COMPLETION), torch.linspace(-1.0, 1.0, ROWS)

    def ours() -> None:
        causal_lm_loss(
            model, GRPOLoss(), ids, torch.ones_like(ids), mask, advantages
        ).loss.backward()
        model.zero_grad(set_to_none=False)

    def forward_alone() -> None:
        causal_lm_loss(model, GRPOLoss(), ids, torch.ones_like(ids), mask, advantages)

    def logits() -> None:
        found = model(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 : -1].log_softmax(-1)
        logps = found.gather(-1, ids[:, PROMPT:, None]).squeeze(-1)
        (-(logps - logps.detach()).exp() * advantages[:, None]).mean().backward()
        model.zero_grad(set_to_none=False)

    return {"ours": ours, "ours, forward alone": forward_alone, "logits": logits}[name]


def measure(name: str, *, collects: bool) -> tuple[float, float]:
    """(MiB that a call leaves, MiB of the highest peak of the calls)."""
    step = step_of(name)
    if not collects:
        gc.disable()
    for _ in range(WARM):
        step()
    before = status_bytes("VmRSS")
    CLEAR_REFS.write_text("5")
    for _ in range(CALLS):
        step()
    return (status_bytes("VmRSS") - before) / CALLS / MIB, (status_bytes("VmHWM") - before) / MIB


def main() -> None:
    """Print one row for each."""
    if sys.argv[1:]:
        print(*(f"{x:.2f}" for x in measure(sys.argv[1], collects=sys.argv[2] == "on")))
        return
    hidden = ROWS * (PROMPT + COMPLETION) * SIZES["hidden_size"] * 4 / MIB
    print(f"hidden states of the batch: {hidden:.2f} MiB\n")
    print(
        "| | collector | MiB left by a call | of the hidden states | highest peak, MiB "
        "|\n|---|---|---|---|---|"
    )
    for name in ("ours", "ours, forward alone", "logits"):
        for collector in ("off", "on"):
            command = [sys.executable, "-m", "benchmarks.held", name, collector]
            left, peak = map(float, subprocess.check_output(command, text=True).split())
            print(f"| {name} | {collector} | {left:.2f} | {left / hidden:.2f} | {peak:.0f} |")


if __name__ == "__main__":
    main()
