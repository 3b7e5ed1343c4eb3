"""The calls as ops for torch.compile and torch.export: opaque, on real tensors, without autograd.

Each runs the code of the eager call (`call/loss.py`, `call/plan.py`, `engine/passes.py`); `compiled/calls.py` puts
autograd around them. Values are checked inside, so that a graph has no branch on them. A tensor that is not wanted
comes back empty. No argument is written to, and results share no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from grpo_kernels.compiled.ops import linear_logprob, policy_loss

SETTINGS = """float? final_logit_softcapping, float logit_scale, str logits_dtype, str engine, str backend,
    int? workspace_bytes, ScalarType dtype, bool[3] wants"""
SCHEMAS = {
    "policy_loss": f"""(
        Tensor hidden, Tensor weight, Tensor? bias, Tensor completion_ids, Tensor? completion_mask, Tensor advantages,
        Tensor? old_per_token_logps, Tensor? ref_per_token_logps, Tensor? sampling_per_token_logps,
        Tensor? importance_sampling_ratio, Tensor? num_items_in_batch, Tensor? cu_seqlens,
        str config, {SETTINGS}
    ) -> (
        Tensor loss, Tensor logps, Tensor entropies, Tensor pairs, Tensor extremes,
        Tensor d_hidden, Tensor d_weight, Tensor d_bias, Tensor d_logps, Tensor d_entropies,
        Tensor max_logit, Tensor log_sum
    )""",
    "linear_logprob": f"""(
        Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor? mask, Tensor? temperatures, str[] outputs,
        float temperature, {SETTINGS}
    ) -> (Tensor logps, Tensor entropies, Tensor max_logit, Tensor log_sum, Tensor d_hidden, Tensor[] extras)""",
    "linear_logprob_backward": f"""(
        Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor? mask, Tensor? temperatures,
        Tensor d_logps, Tensor? d_entropies, Tensor logps, Tensor? entropies, Tensor max_logit, Tensor log_sum,
        float temperature, {SETTINGS}
    ) -> (Tensor d_hidden, Tensor d_weight, Tensor d_bias)""",
}


def _register() -> torch.library.Library:
    library = torch.library.Library("grpo_kernels", "DEF")
    # Counting rows waits for the device, which the capture of a CUDA graph forbids; and strides decide which of its
    # kernels the vendor library takes, so they must be those that eager mode would see.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe, torch.Tag.needs_exact_strides)
    implementations: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "policy_loss": (policy_loss.run, policy_loss.fake),
        "linear_logprob": (linear_logprob.run, linear_logprob.fake),
        "linear_logprob_backward": (linear_logprob.run_backward, linear_logprob.fake_backward),
    }
    for name, (run, fake) in implementations.items():
        library.define(name + SCHEMAS[name], tags=tags)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"grpo_kernels::{name}", fake, lib=library)
    return library


_LIBRARY = _register()  # the ops exist as long as this object
