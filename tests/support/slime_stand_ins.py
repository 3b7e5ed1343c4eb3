"""slime's functions that docs/recipes.md replaces or calls, 0.3.1 (624b824), in plain torch of our own.

Without context parallelism. Imported by ranks alone: Megatron-Core takes seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor

from tests.support.trainer_stand_ins import scores_of


def _build_shifted_tokens(
    T: int,
    device: torch.device,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    allgather_cp: bool,
) -> Tensor:
    """The token after each of the packed row, (T,)."""
    rows = [torch.cat([tokens[1:], tokens.new_zeros(1)]) for tokens in unconcat_tokens]
    return torch.nn.functional.pad(torch.cat(rows), (0, T - sum(total_lengths)))


def _extract_per_sample(
    log_prob_full: Tensor,
    entropy_full: Tensor | None,
    total_lengths: list[int],
    response_lengths: list[int],
    allgather_cp: bool,
) -> tuple[list[Tensor], list[Tensor]]:
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
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    top_p_token_ids: Any = None,
    top_p_token_offsets: Any = None,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    whole = gather_from_tensor_model_parallel_region(logits)[0] / args.rollout_temperature
    lengths = total_lengths, response_lengths
    ids = _build_shifted_tokens(len(whole), whole.device, unconcat_tokens, *lengths, args.allgather_cp)
    logps, entropies = _extract_per_sample(*scores_of(whole, ids), *lengths, args.allgather_cp)
    return whole.new_empty(0), {"log_probs": logps, **({"entropy": entropies} if with_entropy else {})}
