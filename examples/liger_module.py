"""Liger's GRPO loss class, computed by this library: change one import, save matrix products.

`LigerFusedLinearGRPOLoss` has Liger's constructor, call and metrics. The script compares it with
Liger's own class, if liger-kernel is installed, on dapo with a KL term and on GSPO, and counts the
matrix products of both. If a trainer constructs Liger's class itself (TRL up to 1.12, ms-swift,
Axolotl), call `patch_liger()` first. At the end, the script asserts equal losses and gradients, and
fewer than three products where Liger needs four.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from begin import begin

if __name__ == "__main__":
    begin(__doc__)

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from grpo_kernels import linear_logps
from grpo_kernels.liger import LigerFusedLinearGRPOLoss, patch_liger, unpatch_liger

B, T, H, V = 8, 16, 64, 1000
Batch = dict[str, Tensor]


def make_batch() -> Batch:
    """Completions of 4 to 16 tokens; old and reference log-probabilities near the policy's own."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(B, T, H), 0.3 * torch.randn(V, H)
    ids, mask = torch.randint(V, (B, T)), (torch.arange(T) < torch.randint(4, T + 1, (B, 1))).long()
    logps = linear_logps(hidden, weight, ids, entropy=False).logps
    return {
        "_input": hidden.requires_grad_(),
        "lin_weight": weight.requires_grad_(),
        "selected_token_ids": ids,
        "attention_mask": mask,
        "advantages": torch.randn(B),
        "old_per_token_logps": logps + 0.2 * torch.randn(B, T),
        "ref_per_token_logps": logps + 0.1 * torch.randn(B, T),
    }


def run(loss_fn: Any, batch: Batch) -> tuple[list[Tensor], float]:
    """Loss, metrics and both gradients; the products that it took, in those of all positions with
    the head."""
    with FlopCounterMode(display=False) as counter:
        loss, metrics = loss_fn(**batch)
        grads = torch.autograd.grad(loss, (batch["_input"], batch["lin_weight"]))
    return [loss.detach(), *metrics, *grads], counter.get_total_flops() / (2 * B * T * H * V)


def main() -> None:
    batch, worst, products = make_batch(), 0.0, []
    settings = {
        "dapo": {"beta": 0.04, "loss_type": "dapo", "epsilon_high": 0.28},
        "gspo": {
            "beta": 0.0,
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "use_ref_model": False,
        },
    }
    has_liger = importlib.util.find_spec("liger_kernel") is not None
    for name, setting in settings.items():
        ours, made = run(LigerFusedLinearGRPOLoss(**setting), batch)
        products.append(made)
        print(f"{name}: loss {ours[0]:+.6f}, clipped {ours[-3]:.3f}, products {made:.2f}")
        if has_liger:
            from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss as Theirs

            theirs, made = run(Theirs(**setting, compiled=False), batch)
            gaps = [
                ((x - y).abs().max() / (1e-3 + y.abs().max())).item()
                for x, y in zip(ours, theirs, strict=True)
            ]
            worst = max(worst, *gaps)
            print(f"      Liger {theirs[0]:+.6f}, clipped {theirs[-3]:.3f}, products {made:.2f}")
    if has_liger:
        assert patch_liger()
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss as Patched

        print(f"after patch_liger(), a trainer constructs {Patched.__module__}.{Patched.__name__}")
        unpatch_liger()
        print(
            f"largest difference from Liger: {worst:.1e} of the largest entry, "
            f"with {max(products):.1f} of its 4 products"
        )
    assert worst < 1e-4, "the results are not Liger's"
    assert max(products) < 3, "more products than three of the counted tokens"


if __name__ == "__main__":
    main()
