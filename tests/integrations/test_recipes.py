"""docs/start/other-trainers.md: every block of Python, and the files of examples/recipes, run as
they stand and give what the trainer gave."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

pytest.importorskip("transformers")

from grpo_kernels.liger import LigerFusedLinearGRPOLoss, unpatch_liger
from tests.support import tiny_architectures as tiny
from tests.support import trainer_stand_ins as theirs
from tests.support.model_checks import text_batch
from tests.support.ranks import one_rank
from tests.support.trainer_stand_ins import BLOCKS, assert_same, module, run


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


def clipped(logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = (logps - old).exp()
    return -(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages) * mask).sum()


def assert_clipped(loss_of: Callable[[Tensor, Tensor, Tensor, Tensor], Any], *shape: int) -> None:
    logps = (torch.randn(shape, dtype=torch.float64) - 4).requires_grad_()
    old, advantages = torch.randn_like(logps) - 4, torch.randn_like(logps)
    given = logps, old, advantages, torch.rand(shape) < 0.7
    (expected,) = torch.autograd.grad(clipped(*given), logps)
    loss = loss_of(*given)
    assert_close(loss, clipped(*given))
    assert_close(torch.autograd.grad(loss, logps)[0], expected)


def test_skyrls_registered_loss_is_a_sum_of_clipped_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, Any] = {}
    register = lambda name: lambda function: registered.setdefault(name, function)  # noqa: E731
    module(monkeypatch, "skyrl.backends.skyrl_train.utils.ppo_utils", register_policy_loss=register)
    run("SkyRL", 1)
    config = SimpleNamespace(eps_clip_low=0.2, eps_clip_high=0.28)
    dapo = registered["dapo"]
    assert_clipped(lambda x, old, a, mask: dapo(x, old, a, config, mask.double())[0], 3, 5)


@pytest.mark.parametrize(
    "way", ["whole vocabulary", "kept sets", "log-probabilities of kept ids", "supervised"]
)
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
    replays = way in ("kept sets", "log-probabilities of kept ids")

    def compute() -> tuple[Tensor, ...]:
        head = heads.FusedOutputLinear(8, 33, chunk_size=4)
        head.weight = weight
        head.return_mask_logprobs = way == "log-probabilities of kept ids"
        t, mask = None if way == "supervised" else temperature, kept if replays else None
        return tuple(head(hidden, labels, temperature=t, sampling_mask=mask).values())

    assert_same(compute, [weight, hidden], "prime-rl")
    if way != "supervised":
        monkeypatch.setattr(theirs.FusedOutputLinear, "forward", None)
        compute()  # without it


def test_prime_rls_custom_loss_is_a_sum_of_clipped_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = make_dataclass("LossOutputs", ["loss", "metrics"])
    module(monkeypatch, "prime_rl.trainer.rl.loss", LossOutputs=outputs)
    my_loss = run("prime-rl", 1)["my_loss"]

    def loss_of(logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Any:
        inputs = {"inference_logprobs": old, "advantages": advantages, "loss_mask": mask}
        return my_loss(SimpleNamespace(trainer_logprobs=logps, **inputs), epsilon_high=0.28).loss

    assert_clipped(loss_of, 9)


def test_open_instructs_function_returns_what_it_did(
    monkeypatch: pytest.MonkeyPatch, batch: SimpleNamespace
) -> None:
    utils = module(monkeypatch, "open_instruct.grpo_utils", **of_theirs("forward_for_logprobs"))
    batch.model.config.use_cache = False
    ids = batch.ids[:1].clamp(min=1)
    ids[0, -2:] = 0  # padding
    # two sequences in one row
    positions = torch.cat([torch.arange(4), torch.arange(ids.shape[1] - 4)])[None]
    given = batch.model, ids, None, positions, 0, 0.7

    def compute() -> tuple[Tensor, ...]:
        found = utils.forward_for_logprobs(*given, return_entropy=True)
        return tuple(x * (ids[:, 1:] != 0) for x in found)

    assert_same(compute, batch.parameters, "Open-Instruct")


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


@pytest.fixture
def liger() -> Iterator[Any]:
    yield pytest.importorskip("liger_kernel.chunked_loss")
    unpatch_liger()


def test_ms_swift_and_axolotl_construct_our_class(
    monkeypatch: pytest.MonkeyPatch, liger: Any
) -> None:
    run("ms-swift")
    assert liger.LigerFusedLinearGRPOLoss is LigerFusedLinearGRPOLoss
    unpatch_liger()
    assert liger.LigerFusedLinearGRPOLoss is not LigerFusedLinearGRPOLoss
    module(monkeypatch, "axolotl.integrations.base", BasePlugin=object)
    run("Axolotl")["FusedLoss"]().register({})
    assert liger.LigerFusedLinearGRPOLoss is LigerFusedLinearGRPOLoss


def test_torchtunes_loss_returns_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = module(monkeypatch, "torchtune.dev.rl.linear_grpo_loss", **of_theirs("LinearGRPOLoss"))
    model: Any = SimpleNamespace(output=nn.Linear(8, 33, bias=False, dtype=torch.float64))
    (hidden,) = parameters((3, 6, 8))
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[0, 4:] = False
    inputs = {
        "pi_old_outputs": hidden,
        "pi_outputs": torch.randint(33, (3, 6)),
        "ref_outputs": torch.randn(3, 6, dtype=torch.float64) - 3,
        "advantages": torch.randn(3, dtype=torch.float64),
        "padding_masks": mask,
    }
    found = []
    for loss_class in (losses.LinearGRPOLoss, run("torchtune")["FusedGRPOLoss"]):
        loss_fn = loss_class(kl_coeff=0.04)
        loss_fn.set_model_output(model)
        *results, logps = loss_fn(**inputs)
        gradients = torch.autograd.grad(results[0], [hidden, model.output.weight])
        found.append(([x.detach() for x in (*results, logps * mask)], gradients))
    assert_close(found[1], found[0], check_dtype=False)


def test_nemo_rls_function_returns_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = {"gather_from_sequence_parallel_region": lambda x, **options: x}
    module(monkeypatch, "megatron.core.tensor_parallel", **gather)
    name = "from_parallel_hidden_states_to_logprobs"
    utils = module(monkeypatch, "nemo_rl.distributed.model_utils", **of_theirs(name))
    hidden, weight = parameters((6, 2, 8), (33, 8))
    target, options = torch.randint(33, (2, 6)), {"inference_only": False, "cp_group": None}
    options |= {"vocab_start_index": 0, "vocab_end_index": 33, "chunk_size": 4}

    def compute() -> tuple[Tensor, ...]:
        group = dist.group.WORLD
        return (getattr(utils, name)(hidden, weight, None, target, tp_group=group, **options),)

    with one_rank():
        assert_same(compute, [hidden, weight], "NeMo-RL")


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


def test_rays_workers_get_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    ray = module(monkeypatch, "my_ray", init=lambda *args, **options: started.append(options))
    monkeypatch.setitem(sys.modules, "ray", ray)
    module(monkeypatch, "my_patches", apply=print)
    trainer: list[str] = []

    def run_module(name: str, run_name: str) -> None:
        trainer.append(name)
        ray.init(runtime_env={"env_vars": {"A": "1"}}, num_cpus=1)

    monkeypatch.setattr("runpy.run_module", run_module)
    run("Where the lines have to run")
    assert trainer == ["openrlhf.cli.train_ppo_ray"]
    environment = {"env_vars": {"A": "1"}, "worker_process_setup_hook": print}
    assert started == [{"runtime_env": environment, "num_cpus": 1}]


def test_every_block_has_its_test() -> None:
    paths = Path(__file__), Path(__file__).parents[1] / "support" / "megatron_recipes.py"
    source = "".join(path.read_text() for path in paths)
    for section, blocks in BLOCKS.items():
        for index in range(len(blocks)):
            calls = [f'"{section}", {index}']
            if index == 0:
                calls += [f'"{section}")', f'"{section}", bound', f'"{section}", lm_head']
            assert any(call in source for call in calls), f"{section}, block {index}"
