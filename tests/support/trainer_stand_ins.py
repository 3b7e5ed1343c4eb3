"""The trainers that docs/start/other-trainers.md puts its lines into, in plain torch from logits.

Each docstring names the version that it stands for. `module` puts stand-ins where a trainer's
module would be imported from, `run` and `assert_same` run the blocks of the page."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "start" / "other-trainers.md").read_text()
SECTIONS = dict(zip(*[iter(re.split(r"^## (.*)$", PAGE, flags=re.M)[1:])] * 2, strict=True))
SHOWN = r"^```python\n(?P<shown>.*?)^```$"
FILE = r"\]\(\.\./\.\./(?P<file>examples/recipes/\w+\.py)\)"
# A section's blocks and the files that it links to, in their order.
BLOCKS = {
    name: [
        x["shown"] or (ROOT / x["file"]).read_text()
        for x in re.finditer(f"{SHOWN}|{FILE}", text, re.M | re.S)
    ]
    for name, text in SECTIONS.items()
}


def run(section: str, index: int = 0, **given: Any) -> dict[str, Any]:
    """The names that a block makes, which finds those that are `given`."""
    names: dict[str, Any] = {"__name__": "my_module", **given}
    exec(compile(BLOCKS[section][index], f"other-trainers.md: {section}", "exec"), names)
    return names


def assert_same(
    compute: Callable[[], tuple[Tensor, ...]], parameters: list[Tensor], section: str,
    index: int = 0, bound: float = 1e-10,
) -> None:  # fmt: skip
    """What `compute` returns, and its gradients, before and after a block of the page has run."""
    found = []
    for recipe in (False, True):
        if recipe:
            run(section, index)
        results = compute()
        torch.manual_seed(3)
        loss = sum((torch.randn_like(x) * x).sum() for x in results if x.requires_grad)
        found.append(([x.detach() for x in results], torch.autograd.grad(loss, parameters)))
    assert_close(found[1], found[0], rtol=bound, atol=bound / 100)


def module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    """A module of that name, importable with all the packages that it is in."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        full = ".".join(parts[:end])
        if full not in sys.modules or full == name:
            monkeypatch.setitem(sys.modules, full, ModuleType(full))
            if end > 1:
                package = sys.modules[".".join(parts[: end - 1])]
                monkeypatch.setattr(package, parts[end - 1], sys.modules[full], raising=False)
    made = sys.modules[name]
    vars(made).update(contents)
    return made


def scores_of(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `ids` and entropies, like `ids`, of logits that predict them."""
    logps = logits.log_softmax(-1)
    return logps.gather(-1, ids[..., None])[..., 0], -(logps.exp() * logps).sum(-1)


def unpad_and_slice_tensor(
    sequences: Tensor, attention_mask: Tensor, ring_attn_group: Any
) -> tuple[Any, ...]:
    """OpenRLHF 0.11.0's (3c3be62), without a ring: the attended tokens, in one row (1, N)."""
    indices = attention_mask.flatten().nonzero()[:, 0]
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    ids, positions, rolled = (
        x.flatten()[indices][None] for x in (sequences, positions, sequences.roll(-1, 1))
    )
    return ids, positions, rolled, 0, indices


def gather_and_pad_tensor(
    tensor: Tensor, ring_attn_group: Any, ring_attn_pad_len: int, indices: Tensor, batch: int,
    seqlen: int,
) -> Tensor:  # fmt: skip
    """OpenRLHF 0.11.0's (3c3be62), without a ring: (1, N) back to (batch, seqlen)."""
    return tensor.new_zeros(batch * seqlen).index_put((indices,), tensor[0]).view(batch, seqlen)


class Actor(nn.Module):
    """OpenRLHF 0.11.2's, as its PPO calls it; its output has the model's ``aux_loss``."""

    def __init__(self, model: nn.Module, temperature: float, packing_samples: bool) -> None:
        super().__init__()
        self.model, self.temperature, self.packing_samples = model, temperature, packing_samples

    def forward(
        self, sequences, action_mask=None, attention_mask=None, return_output=False,
        allgather_logits=False, return_logprobs=False, ring_attn_group=None, packed_seq_lens=None,
        return_entropy=False, **mm_inputs,
    ):  # fmt: skip
        if self.packing_samples:
            ids, positions, rolled, pad_len, indices = unpad_and_slice_tensor(
                sequences, attention_mask, None
            )
            attended = None
        else:
            ids, attended, rolled = sequences, attention_mask, sequences.roll(-1, 1)
            positions = (attention_mask.cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        output = self.model(ids, attention_mask=attended, position_ids=positions)
        scores = scores_of(output["logits"] / self.temperature, rolled)
        if self.packing_samples:
            scores = [
                gather_and_pad_tensor(x, None, pad_len, indices, *sequences.shape) for x in scores
            ]
        logps, output.entropy = scores[0][:, :-1], scores[1][:, :-1]
        logps = logps[:, -action_mask.shape[1] :] * action_mask
        return (logps, output) if return_output else logps


def sampling_replay_mask(sampling_mask: Tensor, labels: Tensor) -> Tensor:
    """prime-rl's of its pull request 3431: where a kept set (ids padded with -1) has the label."""
    return (labels >= 0) & (sampling_mask == labels[..., None]).any(-1)


class FusedOutputLinear(nn.Linear):
    """prime-rl's after its pull request 3431: every model passes ``sampling_mask=`` (B, L, K).

    It was reviewed on 2026-09-01. Two additions of later source are there, too: the loss of
    supervised training, which has no temperature, and `mask_logprobs`.
    """

    def __init__(self, in_features: int, out_features: int, chunk_size: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.chunk_size = chunk_size
        self.return_mask_logprobs = False

    def forward(self, hidden_states, labels=None, temperature=None, sampling_mask=None):
        logits = super().forward(hidden_states)
        if temperature is None:
            pairs = logits.flatten(0, 1), labels.flatten()
            return {"loss": nn.functional.cross_entropy(*pairs, reduction="sum")}
        logits = logits / temperature[..., None]
        logps, entropies = scores_of(logits, labels)
        output = {"logprobs": logps, "entropy": entropies}
        if sampling_mask is not None:
            replayed = sampling_replay_mask(sampling_mask, labels)[..., None]
            kept = replayed & (sampling_mask >= 0)
            kept_logits = logits.gather(-1, sampling_mask.clamp(min=0).long())
            kept_logits = kept_logits.masked_fill(~kept, -1e30)
            normalizers = kept_logits.logsumexp(-1, keepdim=True)
            replay = logits.gather(-1, labels[..., None]) - normalizers
            output["logprobs"] = replay.where(replayed, logps[..., None])[..., 0]
            if self.return_mask_logprobs:
                output["mask_logprobs"] = (kept_logits - normalizers).where(kept, 0)
        return output


def _build_shifted_tokens(
    T, device, unconcat_tokens, total_lengths, response_lengths, allgather_cp
):
    """slime 0.3.1's (624b824): the token after each of the packed row, (T,)."""
    rows = [torch.cat([tokens[1:], tokens.new_zeros(1)]) for tokens in unconcat_tokens]
    return nn.functional.pad(torch.cat(rows), (0, T - sum(total_lengths)))


def _extract_per_sample(log_prob_full, entropy_full, total_lengths, response_lengths, allgather_cp):
    """slime 0.3.1's (624b824): the part of each response, of (T,) each."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    end = 0
    for total, response in zip(total_lengths, response_lengths, strict=True):
        end += total
        for x, parts in zip((log_prob_full, entropy_full), found, strict=True):
            if x is not None:
                parts.append(x[end - response - 1 : end - 1])
    return found


def get_log_probs_and_entropy(
    logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False,
    non_loss_data=True, top_p_token_ids=None, top_p_token_offsets=None,
):  # fmt: skip
    """slime 0.3.1's (624b824), without context parallelism."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    whole = gather_from_tensor_model_parallel_region(logits)[0] / args.rollout_temperature
    lengths = total_lengths, response_lengths
    ids = _build_shifted_tokens(
        len(whole), whole.device, unconcat_tokens, *lengths, args.allgather_cp
    )
    logps, entropies = _extract_per_sample(*scores_of(whole, ids), *lengths, args.allgather_cp)
    found = {"log_probs": logps, "entropy": entropies}
    return whole.new_empty(0), found if with_entropy else {"log_probs": logps}
