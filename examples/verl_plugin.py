"""`impl_backend=grpo_kernels` in verl: its FSDP engine with verl's torch head and with ours.

For a run of verl, you need two more lines of configuration, and no code:

    actor_rollout_ref.model.use_fused_kernels=True
    actor_rollout_ref.model.fused_kernel_options.impl_backend=grpo_kernels

The script shows their effect with a small random Qwen3 on a CPU. It runs the same steps twice: a
clipped policy gradient with an entropy bonus and a temperature, on packed sequences. At the end, it
asserts that the losses and the trained weights agree.
"""

from __future__ import annotations

from begin import begin

if __name__ == "__main__":
    begin(__doc__)

import torch
import verl  # loads the plug-in
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.models.transformers.monkey_patch import (
    patch_forward_with_backends,
)  # what verl's engine calls

STEPS = 4
LENGTHS = (13, 20)  # of the sequences, packed into one row


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Ids and positions (1, N), and advantages (N,); a sequence's last position predicts nothing
    that counts."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 512, (1, sum(LENGTHS)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    advantages = torch.cat([torch.full((n,), a) for n, a in zip(LENGTHS, (1.0, -0.5), strict=True)])
    advantages[torch.tensor(LENGTHS).cumsum(0) - 1] = 0.0
    return ids, positions, advantages


def train(backend: str) -> tuple[list[float], Tensor]:
    """Losses of the steps, and all weights in the end."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend=backend)
    ids, positions, advantages = batch()
    counted = advantages != 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    old, losses = None, []
    for _ in range(STEPS):
        output = model(
            input_ids=ids,
            position_ids=positions,
            shift_labels=ids.roll(-1, -1),
            temperature=0.8,
            return_dict=True,
            use_cache=False,
        )
        logps, entropy = output.log_probs[0], output.entropy[0]
        old = logps.detach() if old is None else old
        ratio = torch.exp(logps - old)
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = -(surrogate + 0.01 * entropy)[counted].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([x.detach().flatten() for x in model.parameters()])


def main() -> None:
    print(f"verl {verl.__version__}")
    theirs, weights = train("torch")
    ours, our_weights = train("grpo_kernels")
    for step, (a, b) in enumerate(zip(theirs, ours, strict=True), start=1):
        print(f"step {step}  loss {a:+.6f} with verl's torch head, {b:+.6f} with grpo_kernels")
    gap = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
    moved = ((our_weights - weights).abs().max() / weights.abs().max()).item()
    print(f"largest difference: {gap:.1e} of a loss, {moved:.1e} of a weight")
    assert theirs[-1] < theirs[0], "the loss did not fall"
    assert gap < 1e-5, "the losses differ"
    assert moved < 1e-5, "the weights differ"


if __name__ == "__main__":
    main()
