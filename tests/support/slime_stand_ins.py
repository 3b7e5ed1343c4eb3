"""slime's functions that docs/recipes.md replaces or calls, 0.3.1 (624b824), in plain torch of our own.

Without context parallelism. Imported by ranks alone: Megatron-Core takes seconds.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor

from tests.support.trainer_stand_ins import scores_of


def _build_shifted_tokens(
    T, device, unconcat_tokens, total_lengths, response_lengths, allgather_cp
):
    """The token after each of the packed row, (T,)."""
    rows = [torch.cat([tokens[1:], tokens.new_zeros(1)]) for tokens in unconcat_tokens]
    return torch.nn.functional.pad(torch.cat(rows), (0, T - sum(total_lengths)))


def _extract_per_sample(log_prob_full, entropy_full, total_lengths, response_lengths, allgather_cp):
    """The part of each response, of (T,) each."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    end = 0
    for total, response in zip(total_lengths, response_lengths, strict=True):
        end += total
        for x, parts in zip((log_prob_full, entropy_full), found, strict=True):
            if x is not None:
                parts.append(x[end - response - 1 : end - 1])
    return found


def get_log_probs_and_entropy(
    logits,
    *,
    args,
    unconcat_tokens,
    total_lengths,
    response_lengths,
    with_entropy=False,
    non_loss_data=True,
    top_p_token_ids=None,
    top_p_token_offsets=None,
):
    whole = gather_from_tensor_model_parallel_region(logits)[0] / args.rollout_temperature
    lengths = total_lengths, response_lengths
    ids = _build_shifted_tokens(
        len(whole), whole.device, unconcat_tokens, *lengths, args.allgather_cp
    )
    logps, entropies = _extract_per_sample(*scores_of(whole, ids), *lengths, args.allgather_cp)
    return whole.new_empty(0), {
        "log_probs": logps,
        **({"entropy": entropies} if with_entropy else {}),
    }
