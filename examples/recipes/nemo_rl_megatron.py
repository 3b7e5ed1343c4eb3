"""NeMo-RL's Megatron workers without logits: import this file in each of them.

It needs `policy.megatron_cfg.use_fused_linear_logprobs=true`. docs/start/other-trainers.md has
the limits.
"""

import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from nemo_rl.distributed import model_utils

from grpo_kernels import Head, linear_logps


def from_parallel_hidden_states_to_logprobs(
    hidden, weight, gather, target, *, tp_group, cp_group=None, **others
):
    if cp_group is not None and dist.get_world_size(cp_group) > 1:
        raise NotImplementedError("context parallelism")
    # (S / ranks, B, H) -> (S, B, H); every rank has all of d hidden, and takes its part
    hidden = gather_from_sequence_parallel_region(
        hidden, tensor_parallel_output_grad=False, group=tp_group
    )
    head = Head(weight, process_group=tp_group if dist.get_world_size(tp_group) > 1 else None)
    states = hidden.transpose(0, 1)[:, :-1]
    return linear_logps(states, head, target[:, 1:], entropy=False).logps  # (B, S - 1)


model_utils.from_parallel_hidden_states_to_logprobs = from_parallel_hidden_states_to_logprobs
