"""docs/recipes.md: NeMo-RL's Automodel worker, Megatron-Core and slime, against their own way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tests.support import nemo_rl_stand_ins as theirs
from tests.support import tiny_architectures as tiny
from tests.support.model_checks import text_batch
from tests.support.ranks import run_ranks
from tests.support.recipes import assert_same
from tests.support.trainer_stand_ins import module
from tests.support.verl_peer import needs_verl

TEMPERATURE = 0.7


@pytest.mark.parametrize("processor", ["loss", "log-probabilities"])
def test_nemo_rls_automodel_forward_returns_what_it_did(monkeypatch: pytest.MonkeyPatch, processor: str) -> None:
    names = ("LossPostProcessor", "LogprobsPostProcessor", "need_top_k_or_top_p_filtering")
    forward = "forward_with_post_processing_fn"
    contents = {name: getattr(theirs, name) for name in (*names, forward)}
    train = module(monkeypatch, "nemo_rl.models.automodel.train", **contents)
    worker = module(
        monkeypatch, "nemo_rl.models.policy.workers.dtensor_policy_worker_v2", **{forward: contents[forward]}
    )
    model = tiny.text_model("qwen3", torch.float64)
    ids, _ = text_batch()
    lengths = torch.tensor([12, 10, 11])
    attention_mask = (torch.arange(12) < lengths[:, None]).long()
    token_mask = attention_mask * (torch.arange(12) >= 5)
    data = {
        "input_ids": ids,
        "input_lengths": lengths,
        "token_mask": token_mask,
        "sample_mask": torch.tensor([1, 1, 0]),
    }
    inputs = SimpleNamespace(
        input_ids=ids, attention_mask=attention_mask, position_ids=torch.arange(12).expand(3, 12), is_multimodal=False
    )
    batch = SimpleNamespace(data_dict=data, processed_inputs=inputs, original_batch_size=3, original_seq_len=12)
    sampling: Any = SimpleNamespace(temperature=TEMPERATURE, top_k=None, top_p=1.0)

    class Loss:
        use_fused_linear_logprobs = False

        def __call__(self, logps: Tensor, data: Any, global_valid_toks: Tensor) -> tuple[Tensor, dict[str, Any]]:
            counted = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
            return (logps.exp() * counted).sum() / global_valid_toks, {}

    def compute() -> tuple[Tensor, ...]:
        process = theirs.LossPostProcessor(Loss()) if processor == "loss" else theirs.LogprobsPostProcessor()
        valid = {"global_valid_seqs": torch.tensor(2), "global_valid_toks": torch.tensor(9)}
        function = (
            train.forward_with_post_processing_fn if processor == "loss" else worker.forward_with_post_processing_fn
        )
        found, _, _ = function(model, process, batch, sampling_params=sampling, **valid)
        return (found,)

    assert_same(compute, [*model.parameters()], "NeMo-RL", 1, bound=1e-4)  # its norms compute in float32
    sampling.top_k = 5
    with pytest.raises(NotImplementedError, match="top-k"):
        compute()
    assert worker.forward_with_post_processing_fn(model, lambda **x: x["logits"], batch)[0].shape[-1] == tiny.VOCAB


def differences(rank: int, world_size: int) -> dict[str, float]:
    from tests.support import megatron_recipes  # not above: it takes seconds, and only the ranks need it

    return megatron_recipes.differences(world_size)


@needs_verl  # whose environment has Megatron-Core
@pytest.mark.parametrize("ranks", [1, 2])
def test_megatron_core_and_slime(ranks: int) -> None:
    for found in run_ranks(differences, ranks):
        assert len(found) == 6 * ranks
        for case, difference in found.items():
            assert difference < (1e-6 if case.startswith("loss") else 1e-11), case
