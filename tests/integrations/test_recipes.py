"""docs/start/other-trainers.md: recipes that rewrite a trainer's forward give what it gave.

Names and arguments of all blocks: tests/test_docs.py; Megatron's recipes: test_verl_ranks.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from tests.support import tiny_architectures as tiny
from tests.support import trainer_stand_ins as theirs
from tests.support.model_checks import text_batch
from tests.support.trainer_stand_ins import assert_same, module, run


@pytest.fixture
def batch() -> SimpleNamespace:
    model = tiny.text_model("qwen3", torch.float64)
    ids, attention_mask = text_batch()
    return SimpleNamespace(
        model=model, parameters=[*model.parameters()], ids=ids, attention_mask=attention_mask,
        count=4, mask=attention_mask[:, -4:].double(),
    )  # fmt: skip


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]


def of_theirs(*names: str) -> dict[str, Any]:
    return {name: getattr(theirs, name) for name in names}


@pytest.mark.parametrize("packing", [False, True])
def test_openrlhfs_actor_returns_what_it_did(
    monkeypatch: pytest.MonkeyPatch, batch: SimpleNamespace, packing: bool
) -> None:
    actor_class = type("Actor", (theirs.Actor,), {})
    module(monkeypatch, "openrlhf.models.actor", Actor=actor_class)
    packed = of_theirs("unpad_and_slice_tensor", "gather_and_pad_tensor")
    module(monkeypatch, "openrlhf.models.ring_attn_utils", **packed)
    model = tiny.text_model("qwen3_moe", torch.float64)
    model.config.output_router_logits, model.config.use_cache = True, False  # as OpenRLHF sets them
    actor = actor_class(model, 0.7, packing_samples=packing)
    options = {"ring_attn_group": None, "packed_seq_lens": None}
    options |= {"return_output": True, "return_entropy": True}

    def compute() -> tuple[Tensor, ...]:
        logps, output = actor(batch.ids, batch.mask, attention_mask=batch.attention_mask, **options)
        return logps, output.entropy[:, -batch.count :] * batch.mask, output.aux_loss

    # its norms and router compute in float32
    assert_same(compute, [*model.parameters()], "OpenRLHF", bound=1e-5)
    with pytest.raises(NotImplementedError, match="pixel_values"):
        actor(batch.ids, batch.mask, batch.attention_mask, pixel_values=batch.mask)


def test_skyrls_wrapper_returns_what_it_did(
    monkeypatch: pytest.MonkeyPatch, batch: SimpleNamespace
) -> None:
    wrapper_class = type("HFModelWrapper", (theirs.HFModelWrapper,), {})
    name = "skyrl.backends.skyrl_train.workers.model_wrapper"
    module(monkeypatch, name, HFModelWrapper=wrapper_class)
    wrapper = wrapper_class(batch.model)
    options = {"temperature": 0.7, "return_output": True, "compute_entropy": True}
    options |= {"pixel_values": None, "attention_mask": batch.attention_mask}

    def compute() -> tuple[Tensor, ...]:
        logps, output = wrapper(batch.ids, batch.count, **options)
        return logps * batch.mask, output["entropy"][:, -batch.count - 1 : -1] * batch.mask

    assert_same(compute, batch.parameters, "SkyRL")


@pytest.mark.parametrize("way", ["kept sets", "log-probabilities of kept ids", "supervised"])
def test_prime_rls_head_returns_what_it_did(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    contents = of_theirs("FusedOutputLinear", "sampling_replay_mask")
    name = "prime_rl.trainer.models.layers.lm_head"
    heads = module(monkeypatch, name, PrimeLmOutput=dict, **contents)
    weight, hidden = parameters((33, 8), (2, 6, 8))
    labels, temperature = torch.randint(33, (2, 6)), torch.rand(2, 6, dtype=torch.float64) + 0.5
    others = (labels + 1) % 33, (labels + 5) % 33, torch.full_like(labels, -1)
    kept = torch.stack([labels, *others], -1).int()
    kept[0, 1] = -1  # no set: the whole vocabulary
    kept[0, 2, 0] = -1  # a set without the label: the whole vocabulary, too
    kept[1, 3, 1:] = -1  # the label alone: its log-probability is 0

    def compute() -> tuple[Tensor, ...]:
        head = heads.FusedOutputLinear(8, 33, chunk_size=4)
        head.weight = weight
        head.return_mask_logprobs = way == "log-probabilities of kept ids"
        t, mask = (None, None) if way == "supervised" else (temperature, kept)
        return tuple(head(hidden, labels, temperature=t, sampling_mask=mask).values())

    assert_same(compute, [weight, hidden], "prime-rl")
    if way != "supervised":
        monkeypatch.setattr(theirs.FusedOutputLinear, "forward", None)
        compute()  # without it


@pytest.mark.parametrize("padding_free", [False, True])
def test_ms_swifts_forward_returns_what_it_did(
    monkeypatch: pytest.MonkeyPatch, batch: SimpleNamespace, padding_free: bool
) -> None:
    template = SimpleNamespace(padding_free=padding_free)
    trainer_class = type("GRPOTrainer", (theirs.GRPOTrainer,), {"template": template})
    module(monkeypatch, "swift.rlhf_trainers.grpo_trainer", GRPOTrainer=trainer_class)
    inputs = {"input_ids": batch.ids, "attention_mask": batch.attention_mask}
    keep, mask = batch.count, batch.mask
    if padding_free:  # one row: all sequences without padding, from the first completion token on
        real = batch.attention_mask != 0
        positions = (batch.attention_mask.cumsum(1) - 1)[real][None]
        inputs, keep = {"input_ids": batch.ids[real][None]}, positions.shape[1] - 3
        inputs["position_ids"] = positions
        mask = (positions[:, -keep:] != 0).double()  # nothing predicts a sequence's first token

    def compute() -> tuple[Tensor, ...]:
        score = trainer_class()._get_logps_via_local_forward
        found = score(batch.model, {**inputs}, keep, inputs["input_ids"], True)
        assert [x.shape for x in found] == [mask.shape, mask.shape]
        return tuple(x * mask for x in found)

    # trimmed, and its norms compute in float32
    assert_same(compute, batch.parameters, "ms-swift", 1, bound=1e-4)


class ClippedLoss:
    use_fused_linear_logprobs = False

    def __call__(self, logps: Tensor, data: Any, global_valid_toks: Tensor) -> Any:
        counted = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
        return (logps.exp() * counted).sum() / global_valid_toks, {}


@pytest.mark.parametrize("processor", ["loss", "log-probabilities"])
def test_nemo_rls_automodel_forward_returns_what_it_did(
    monkeypatch: pytest.MonkeyPatch, processor: str
) -> None:
    names = ("LossPostProcessor", "LogprobsPostProcessor", "need_top_k_or_top_p_filtering")
    forward = of_theirs("forward_with_post_processing_fn")
    train = module(monkeypatch, "nemo_rl.models.automodel.train", **of_theirs(*names), **forward)
    name = "nemo_rl.models.policy.workers.dtensor_policy_worker_v2"
    worker = module(monkeypatch, name, **forward)
    model = tiny.text_model("qwen3", torch.float64)
    ids, _ = text_batch()
    lengths = torch.tensor([12, 10, 11])
    attention_mask = (torch.arange(12) < lengths[:, None]).long()
    data = {
        "input_ids": ids,
        "input_lengths": lengths,
        "token_mask": attention_mask * (torch.arange(12) >= 5),
        "sample_mask": torch.tensor([1, 1, 0]),
    }
    inputs = SimpleNamespace(input_ids=ids, attention_mask=attention_mask, is_multimodal=False)
    inputs.position_ids = torch.arange(12).expand(3, 12)
    batch = SimpleNamespace(data_dict=data, processed_inputs=inputs)
    batch.original_batch_size, batch.original_seq_len = 3, 12
    sampling: Any = SimpleNamespace(temperature=0.7, top_k=None, top_p=1.0)
    valid = {"global_valid_seqs": torch.tensor(2), "global_valid_toks": torch.tensor(9)}

    def compute() -> tuple[Tensor, ...]:
        owner, process = worker, theirs.LogprobsPostProcessor()
        if processor == "loss":
            owner, process = train, theirs.LossPostProcessor(ClippedLoss())
        forward = owner.forward_with_post_processing_fn
        return forward(model, process, batch, sampling_params=sampling, **valid)[:1]

    # its norms compute in float32
    assert_same(compute, [*model.parameters()], "NeMo-RL", 1, bound=1e-4)
    sampling.top_k = 5
    with pytest.raises(NotImplementedError, match="top-k"):
        compute()
    forward = worker.forward_with_post_processing_fn
    assert forward(model, lambda **x: x["logits"], batch)[0].shape[-1] == tiny.VOCAB


def test_ligers_call_gives_a_loss_and_its_metrics() -> None:
    hidden, weight = parameters((4, 3, 8), (33, 8))
    logps = -3 - torch.rand(4, 3, dtype=torch.float64)
    tensors = {"ids": torch.randint(33, (4, 3)), "mask": torch.ones(4, 3), "ref": logps}
    tensors |= {"hidden": hidden, "advantages": torch.randn(4).double(), "old": logps}
    found = run("Liger", lm_head=SimpleNamespace(weight=weight), **tensors)
    found["loss"].backward()
    assert weight.grad is not None
    assert len(found["metrics"]) == 2  # the KL, and the share of clipped tokens
