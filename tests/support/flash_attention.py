"""Stand-ins for attention functions of GPUs, in plain torch. Their contract is the real ones':
sequences one after the other, the last query of each aligned with its last key, windows, soft-caps
and sinks, heads in groups."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash
from torch import Tensor
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
from transformers.modeling_utils import AttentionInterface

HUB = "kernels-community/stand-in"
TAKES = ("dropout_p", "window_size", "softcap", "max_seqlen_q", "max_seqlen_k", "s_aux")
TAKES_NOT = ("deterministic", "block_table", "page_table", "cache_seqlens", "learnable_sink")


def ragged(
    query: Tensor,  # (T_q, heads, d)
    key: Tensor,  # (T_k, heads or fewer, d)
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout_p: float = 0.0,
    **others: Any,
) -> Tensor:
    """``flash_attn_varlen_func``."""
    assert causal and not dropout_p and not others, others
    assert cu_seqlens_q[-1] == len(query) and cu_seqlens_k[-1] == len(key) == len(value)
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    found, at_q, at_k = [], cu_seqlens_q[1:-1].long(), cu_seqlens_k[1:-1].long()
    sequences = (query.tensor_split(at_q), key.tensor_split(at_k), value.tensor_split(at_k))
    for q, k, v in zip(*sequences, strict=True):
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        ahead = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        visible = ahead >= 0
        if window_size[0] >= 0:
            visible = visible & (ahead <= window_size[0])
        scores = torch.einsum("qhd,khd->hqk", q, k) * (
            q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        )
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        if s_aux is not None:
            scores = torch.cat([scores, s_aux[:, None, None].expand(-1, len(q), 1)], dim=-1)
        found.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v))
    return torch.cat(found)


def ragged_varlen(
    query: Tensor, key: Tensor, value: Tensor, *, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int,
    max_k: int, scale: float | None, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """``torch.nn.attention.varlen.varlen_attn``."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert window_size == (-1, 0)
    sizes = {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
    return ragged(query, key, value, cu_seq_q, cu_seq_k, causal=True, softmax_scale=scale, **sizes)


def dense(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """``flash_attn_func``, (B, T, heads, d)."""
    batch, length = query.shape[:2]
    ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32)
    sizes = {"max_seqlen_q": length, "max_seqlen_k": length}
    flat = (x.flatten(0, 1) for x in (query, key, value))
    return ragged(*flat, ends, ends, **{**options, **sizes}).unflatten(0, (batch, length))


@contextmanager
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also under the name `HUB` of a kernel repository."""
    known = dict.fromkeys(TAKES, True) | dict.fromkeys(TAKES_NOT, False)
    options = functools.partial(flash._process_flash_attention_kwargs, supports_mapping=known)
    functions = (dense, ragged, None, flash._pad_input, flash._unpad_input)
    with monkeypatch.context() as patch:
        patch.setattr(
            flash, "lazy_import_flash_attention", lambda *_, **__: (functions, (options, options))
        )
        AttentionInterface.register(HUB, flash_attention_forward)
        AttentionMaskInterface.register(HUB, flash_attention_mask)
        yield


def set_attention(model: Any, name: str) -> None:
    """Give `model` an attention implementation without transformers' check of what is installed."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = name
