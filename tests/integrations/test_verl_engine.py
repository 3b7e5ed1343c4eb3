"""verl's engine with our head against verl's own forward, products and tokens counted, on one rank
and on two. 2NVH is one product of the N response tokens that count with a head (V, H)."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("transformers")
import transformers.integrations.flash_attention as flash_integration

pytest.importorskip("verl")
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from grpo_kernels.verl import rows
from tests.support import verl_peer
from tests.support.flash_attention import flash_attention, set_attention
from tests.support.on_device import relative
from tests.support.ranks import Ranks
from tests.support.verl_peer import (
    AS_GIVEN,
    HIDDEN,
    OURS,
    SCORE,
    TEMPERATURE,
    VOCAB,
    config,
    draw,
    gap,
    metrics_of,
    ppo_loss,
    run,
    verl_module,
)

pytestmark = pytest.mark.unit

BYPASS = {"rollout_is": "token", "rollout_is_threshold": 1.1, "loss_type": "reinforce"}
CLIPPED = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.9_1.1"}
OF_SEQUENCES = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"}
SEQ_MEAN = {"loss_agg_mode": "seq-mean-token-mean"}
BY_WIDTH = {"loss_agg_mode": "seq-mean-token-sum-norm"}
ENTROPY = {"calculate_entropy": True}
MICRO, DYNAMIC = {"micro": 4}, {"use_dynamic_bsz": True}
PADDED = {"use_remove_padding": False}
PROMPTS = [0, 2, 4, 6], [1, 3, 5, 7]  # the responses of each


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with verl_peer.on_one_rank():
        yield


@functools.cache
def batch(**options: Any) -> Any:
    return verl_peer.batch(group=4, **options)


def tokens_of(data: Any) -> int:
    return int(data["input_ids"].values().numel())


def tree_tokens(data: Any, *parts: list[int]) -> int:
    """Distinct tokens of micro-batches, without the responses' last ones."""
    found = 0
    prompts, responses = data["prompts"].unbind(), data["responses"].unbind()
    for part in parts or [[*range(len(data))]]:
        distinct = {tuple(prompts[i].tolist()) for i in part}
        found += sum(map(len, distinct)) + sum(len(responses[i]) - 1 for i in part)
    return found


def share(data: Any) -> float:
    """The share of the counted tokens that have an advantage and a weight."""
    live = data["response_mask"].values() != 0
    for name in {"advantages", "rollout_is_weights"} & set(data.keys()):
        live &= data[name].values() != 0
    return int(live.sum()) / counted(data)


def counted(data: Any) -> int:
    return int(data["response_mask"].values().sum())


def nvh(step: Any, data: Any) -> float:
    return step.products.head / (counted(data) * VOCAB * HIDDEN)


def both(data, loss, options=OURS, tried=True, **flags):
    steps = []
    for one in (None, options):
        torch.manual_seed(0)  # clip_cov draws
        steps.append(run(one, data, loss, tried=tried and one is not None, **flags))
    unfused, ours = steps
    assert ours.loss == pytest.approx(unfused.loss, abs=1e-6)
    assert gap(ours, unfused) < 3e-6
    assert metrics_of(ours) == pytest.approx(metrics_of(unfused), rel=1e-4, abs=1e-6)
    return unfused, ours


def wide(engine: Any) -> None:
    """verl's `pad_to_length` pads the packed row, and what is padded does not count."""
    engine.pad_to_length, engine.pad_to_length_bucket = True, 64


@dataclass(frozen=True)
class Scene:
    """A step, and how many products of V H it takes where a share s of the tokens is live."""

    config: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    products: str = "2 + 4s"
    batch: dict[str, Any] = field(default_factory=dict)


def mode(name: str, **options: Any) -> dict[str, Any]:
    return {"mode": name, **options}


GSPO = mode("gspo", clip_ratio_low=0.03, clip_ratio_high=0.04, **SEQ_MEAN)
SCENES = {
    "vanilla": Scene(),
    "dr_grpo": Scene({**BY_WIDTH, "loss_scale_factor": 1024}),
    "tools": Scene(batch={"tools": True}),
    "rollout_is": Scene(batch={"weights": True}),
    "bypass, clipped": Scene(mode("bypass_mode", correction=CLIPPED)),
    **{name: Scene(mode(name)) for name in ("cispo", "dppo_tv", "dppo_kl", "sapo", "gpg")},
    "entropy, as a metric": Scene(flags=ENTROPY),
    "kl, as a metric": Scene({"use_kl_loss": True, "kl_loss_coef": 0.0}),
    # rows without advantage have a gradient
    "dro": Scene(mode("dro"), products="6"),
    "kl": Scene({"use_kl_loss": True, "kl_loss_coef": 0.01}, products="6"),
    "entropy": Scene({"entropy_coeff": 0.01, **SEQ_MEAN}, ENTROPY, "6"),
    "all tokens live": Scene(batch={"dead": 0}, products="6"),
    # losses that read all tokens first: the rows that count, and those with a gradient again in the
    # backward
    **{name: Scene(mode(name), {}, "2 + 6s") for name in ("geo_mean", "clip_cov", "kl_cov")},
    **{
        f"bypass, {name} {value}": Scene(
            mode("bypass_mode", correction={**BYPASS, name: value}), {}, "2 + 6s"
        )
        for name, value in (("rollout_is", "sequence"), ("rollout_is_batch_normalize", True))
    },
    "bypass, rollout_rs": Scene(mode("bypass_mode", correction=OF_SEQUENCES), {}, "2 + 6s"),
    # responses of a prompt come together: in micro-batches, dynamic ones
    "micro-batches": Scene(flags=MICRO),
    "micro-batches, kl": Scene({"use_kl_loss": True, "kl_loss_coef": 0.01}, MICRO, "6"),
    "dynamic, bypass": Scene(mode("bypass_mode", correction=BYPASS), DYNAMIC),
    "dynamic, gspo": Scene(GSPO, DYNAMIC, "2 + 6s"),
    "dynamic, entropy": Scene({"entropy_coeff": 0.01, **SEQ_MEAN}, ENTROPY | DYNAMIC, "6"),
    # padded inputs of the model, and rows
    "padded inputs": Scene(flags=PADDED),
    "padded inputs, micro-batches": Scene(flags=PADDED | MICRO),
    "padded inputs, dynamic": Scene(flags=PADDED | DYNAMIC),
    "padded rows": Scene(flags={"prepare": wide}),
}


@pytest.mark.parametrize("name", SCENES)
def test_what_counts_is_computed(name: str) -> None:
    """verl's own way takes 6 products of all tokens, prompts too, and of padding."""
    scene = SCENES[name]
    data = batch(**scene.batch)
    unfused, ours = both(data, ppo_loss(config(**scene.config)), **scene.flags)
    theirs, s = nvh(unfused, data), share(data)
    tokens = tokens_of(data) / counted(data)
    assert theirs > 6 * tokens if "padded" in name else theirs == pytest.approx(6 * tokens)
    done, exact = nvh(ours, data), {"6": 6, "2 + 4s": 2 + 4 * s}
    if scene.products in exact:
        assert done == pytest.approx(exact[scene.products])
    else:
        assert 2 + 4 * s < done <= 2 + 6 * s + 1e-9
    is_divided = {*MICRO, *DYNAMIC} & {*scene.flags}
    assert ours.products.tokens == tree_tokens(data, *(PROMPTS if is_divided else ()))


@pytest.mark.parametrize(("options", "loss"), [(OURS, GSPO), (SCORE, {})], ids=str)
def test_the_trainer_before_v1(options, loss, forget_warnings, monkeypatch) -> None:
    """Its batches are padded. It gets our head, and a tree within a rank."""
    data, padded = batch(), batch(padded=True)
    with pytest.warns(UserWarning, match=r"set trainer\.use_v1=True"):
        ours = both(padded, ppo_loss(config(**loss)), options, **MICRO)[1]
    assert nvh(ours, data) < 2 + 6 * share(data) + 1e-9
    if options == OURS:
        assert ours.products.tokens == tree_tokens(data, *PROMPTS)
    forget_warnings()
    with warnings.catch_warnings(action="error"):  # nothing is lost on one rank
        run(options | {"old_log_probs": "score"}, padded, ppo_loss(config(**loss)), **MICRO)
    if options == OURS:
        two_ranks = SimpleNamespace(get_world_size=lambda _: 2)
        monkeypatch.setattr("grpo_kernels.verl.engine.dist", two_ranks)
        with pytest.warns(UserWarning, match="head, but scatters the responses"):
            run(options | {"old_log_probs": "score"}, padded, ppo_loss(config(**loss)), **MICRO)


def test_lora_and_layers_that_are_recomputed() -> None:
    """The head is frozen: 2 + 2s."""
    pytest.importorskip("peft")

    def recompute(engine: Any) -> None:
        engine.module.gradient_checkpointing_enable({"use_reentrant": False})
        engine.module.train()

    data = batch()
    _, ours = both(data, ppo_loss(config()), adapter=True, prepare=recompute, strategy=None)
    assert nvh(ours, data) == pytest.approx(2 + 2 * share(data))
    assert all("lora" in name for name in ours.gradients)
    assert ours.products.tokens == tree_tokens(data)


@pytest.mark.parametrize("flags", [{}, {"micro": 2}, DYNAMIC], ids=str)
def test_compute_log_prob(flags: dict[str, Any]) -> None:
    data = batch(tools=True).exclude("old_log_probs", "advantages")
    flags = {"forward_only": True, **ENTROPY, **flags}
    unfused, ours = run(None, data, None, **flags), run(OURS, data, None, tried=True, **flags)
    assert nvh(ours, data) == pytest.approx(2, abs=0.2)  # fewer than 16 rows are padded to 16
    assert ours.products.tokens < 0.9 * unfused.products.tokens
    mask = torch.nested.to_padded_tensor(data["response_mask"], 0) != 0
    padded = verl_module("workers.utils.padding").no_padding_2_padding
    for name, x in ours.model_output.items():
        got, want = padded(x, data), padded(unfused.model_output[name], data)
        torch.testing.assert_close(got[mask], want[mask], rtol=1e-5, atol=3e-6)
        assert not got[~mask].any()


def test_sft() -> None:
    """verl's supervised loss has a mask over whole sequences, and no advantages."""
    data = batch().select("input_ids", "position_ids")
    ids = data["input_ids"]
    mask = (torch.arange(tokens_of(data)) % 3 == 0).long()
    data["loss_mask"] = torch.nested.nested_tensor_from_jagged(mask, ids.offsets())
    loss = functools.partial(verl_module("workers.utils.losses").sft_loss, config=None)
    unfused, ours = run(None, data, loss), run(OURS, data, loss)
    assert ours.loss == pytest.approx(unfused.loss, rel=1e-6)
    assert gap(ours, unfused) < 2e-6
    assert ours.products.head == 6 * VOCAB * HIDDEN * int(mask.sum())


def test_what_another_may_read_is_computed() -> None:
    """An unknown loss, and a caller that wants the log-probabilities back, get all of them."""
    data, theirs = batch(), ppo_loss(config())

    def prompts_too(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        loss, metrics = theirs(model_output=model_output, data=data, dp_group=dp_group)
        return loss + 0.1 * model_output["log_probs"].values().mean(), metrics

    tokens = tokens_of(data) / counted(data)
    assert nvh(both(data, functools.partial(prompts_too))[1], data) == pytest.approx(8 * tokens)
    got, want = (
        step.model_output["log_probs"].values()
        for step in both(data, theirs, tried=False, return_model_output=True)
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["mine", "vanilla"])
def test_a_loss_mode_of_ones_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may depend on its micro-batch, also under a name of verl's."""
    registry, seen = verl_peer.core_algos().POLICY_LOSS_REGISTRY, list[dict[str, Any]]()
    theirs = registry["vanilla"]

    @functools.wraps(theirs)
    def mine(**given: Any) -> Any:
        seen.append(given)
        loss, metrics = theirs(**given)
        return loss / (given["log_prob"].detach() * given["response_mask"]).sum(), metrics

    monkeypatch.setitem(registry, name, mine)
    data = batch(tools=True)
    _, ours = both(data, ppo_loss(config(name)), **MICRO)
    assert nvh(ours, data) <= 2 + 6 * share(data) + 1e-9
    got, old = (seen[-1][name][:, 5:9] for name in ("log_prob", "old_log_prob"))  # a tool's output
    assert torch.equal(got, old)


def test_what_depends_on_its_micro_batch_stays() -> None:
    data, theirs = batch(), ppo_loss(config())

    def mine(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        return theirs(model_output=model_output, data=data, dp_group=dp_group)

    halves = tree_tokens(data, [0, 1, 2, 3], [4, 5, 6, 7])
    for loss in (ppo_loss(config("kl_cov")), ppo_loss(config(**BY_WIDTH))):
        assert both(data, loss, **MICRO)[1].products.tokens == halves
    assert both(data, functools.partial(mine), **MICRO)[1].products.tokens > halves


def test_a_wrong_expectation_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs time alone; with `zero_advantage=score` the guard says so."""
    # but it has a gradient without an advantage
    monkeypatch.setitem(rows.MODES, "dro", rows.MODES["vanilla"])
    data, loss = batch(), ppo_loss(config("dro"))
    unfused, ours = both(data, loss, micro=2)
    assert nvh(ours, data) > 6
    with pytest.warns(
        RuntimeWarning, match="zero_advantage: expected no gradient where all advantages are 0"
    ):
        score = run(SCORE, data, loss, micro=2)
    assert gap(score, unfused) < 2e-6


REFUSED: list[tuple[dict[str, Any] | None, dict[str, Any], str]] = [
    ({"use_kl_loss": True}, {}, "with a KL or entropy term"),
    ({"entropy_coeff": 0.01}, ENTROPY, "with a KL or entropy term"),
    ({"mode": "dro"}, {}, "with loss_mode=dro"),
    ({"mode": "kl_cov"}, {}, "with loss_mode=kl_cov"),
    (BY_WIDTH, {}, "without loss_scale_factor"),
    ({}, {"return_model_output": True}, "with return_model_output"),
    (None, {}, "with a loss other than ppo_loss"),
]


@pytest.mark.parametrize(("options", "flags", "reason"), REFUSED, ids=str)
def test_zero_advantage_is_refused(options, flags, reason):
    loss = (lambda **_: None) if options is None else ppo_loss(config(**options))
    message = rf"zero_advantage: expected 'train' .*{reason}.*, got 'score'"
    with pytest.raises(ValueError, match=message):
        run(SCORE, batch(), loss, **flags)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("zero_advantage", "skip", "zero_advantage: expected one of train, score, got 'skip'"),
        ("zero_advantages", "score", "layout and old_log_probs, got zero_advantages"),
        ("layout", "packed", "layout: expected one of tree, trim, padded, got 'packed'"),
    ],
)
def test_an_option_that_does_not_exist(name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(OURS | {name: value}, batch(), ppo_loss(config()))


def test_a_padded_layout_and_scoring_with_zero_advantage() -> None:
    data, loss = batch(), ppo_loss(config())
    unfused, as_given = both(data, loss, OURS | AS_GIVEN, **MICRO)
    assert as_given.products.tokens == unfused.products.tokens == tokens_of(data)
    assert run(SCORE, data, None, forward_only=True).model_output["log_probs"].values().any()


HALF = torch.arange(8) % 2 == 0


@pytest.mark.parametrize(
    ("mode", "dead", "more"),
    [
        ("gspo", HALF, {"micro": 2}),
        ("cispo", HALF, DYNAMIC),
        ("gspo", 8, DYNAMIC),
        ("cispo", 0, {"micro": 2}),
    ],
)
def test_sequences_without_gradient(mode: str, dead: Any, more: dict[str, Any]) -> None:
    data = verl_peer.batch(group=4, dead=dead)
    _, score = both(data, ppo_loss(config(mode, **SEQ_MEAN)), SCORE, **more)
    if dead is HALF:
        parts = PROMPTS if more == DYNAMIC else ([0, 2], [4, 6], [1, 3], [5, 7])
        assert score.products.tokens == tree_tokens(data, *parts)


def test_sequences_without_gradient_run_forward_only() -> None:
    data, loss = verl_peer.batch(dead=HALF), ppo_loss(config())
    got, usual = (
        run(options | AS_GIVEN, data, loss, micro=2).products for options in (SCORE, OURS)
    )
    lengths = data["input_ids"].offsets().diff()
    share = float((lengths.sum() + 2 * lengths[~HALF].sum()) / (3 * lengths.sum()))
    assert (got.all - got.head) / (usual.all - usual.head) == pytest.approx(share)


def test_flash_attention_as_verl_replaces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl puts its own function in front of it, for Ulysses, wherever rows are packed."""
    theirs = verl_peer.monkey_patch()._ulysses_flash_attention_forward
    with flash_attention(monkeypatch):
        monkeypatch.setattr(flash_integration, "_flash_attention_forward", theirs)

        def flash(engine: Any) -> None:
            set_attention(engine.module, "flash_attention_2")

        data = batch()
        ours = both(data, ppo_loss(config()), prepare=flash)[1]
        assert ours.products.tokens == tree_tokens(data)


@pytest.mark.usefixtures("forget_warnings")
def test_ulysses_runs_as_given_and_says_so() -> None:
    data = batch()
    with pytest.warns(UserWarning, match="layout=tree: Ulysses divides sequences"):
        ours = run(
            OURS, data, ppo_loss(config()), prepare=verl_peer.divided_by_ulysses, strategy=None
        )
    verl_module("utils.ulysses").set_ulysses_sequence_parallel_group(None)
    assert ours.products.tokens == tokens_of(data)


# Distillation from a teacher's top-k log-probabilities: our loss within verl's engine

K = 6


def distilling(data: Any, **fields: Any) -> tuple[Any, Any]:
    """The mini-batch with a teacher's top K, and verl's loss for it."""
    offsets = data["input_ids"].offsets()
    tokens = len(data["input_ids"].values())
    logps = (3 * torch.randn(tokens, VOCAB)).log_softmax(-1).topk(K, -1)
    data = data.clone()
    data["teacher_logprobs"] = torch.nested.nested_tensor_from_jagged(logps.values, offsets)
    data["teacher_ids"] = torch.nested.nested_tensor_from_jagged(logps.indices, offsets)
    off = ("use_chunked_topk", "use_task_rewards", "use_policy_gradient")
    given = {"loss_mode": "forward_kl_topk", "log_prob_min_clamp": -5.3, "loss_max_clamp": None}
    given |= {**dict.fromkeys(off, False), "distillation_loss_coef": 0.5, "topk": K, **fields}
    distillation = SimpleNamespace(distillation_loss=SimpleNamespace(**given))
    loss = verl_module("trainer.distillation.losses").distillation_ppo_loss
    return data, functools.partial(loss, config=config(), distillation_config=distillation)


@pytest.mark.parametrize(
    ("rewards", "least", "most"), [(False, 6, 6), (True, 12, 14)], ids=["alone", "with rewards"]
)
def test_within_verls_engine(rewards: bool, least: int, most: int) -> None:
    data, loss = distilling(verl_peer.batch(dead=0, tools=True), use_task_rewards=rewards)
    flags = {"distillation_use_topk": True, "distillation_only": not rewards}
    unfused, ours = (run(options, data, loss, **flags) for options in (None, OURS))
    assert ours.loss == pytest.approx(unfused.loss, rel=1e-6)
    assert gap(ours, unfused) < 5e-6
    for mass in ("distillation/student_mass", "distillation/teacher_mass"):
        assert ours.metrics[mass] == pytest.approx(unfused.metrics[mass])
    assert least <= nvh(ours, data) <= most


@pytest.mark.parametrize(
    ("mode", "more", "message"),
    [
        ("another", {}, "loss_mode: expected 'forward_kl_topk', got 'another'"),
        ("forward_kl_topk", {"use_remove_padding": False}, "use_remove_padding: expected True"),
    ],
)
def test_what_verls_fused_heads_do_not_serve_is_refused(mode, more, message):
    data, loss = distilling(verl_peer.batch(), loss_mode=mode)
    with pytest.raises(ValueError, match=message):
        run(OURS, data, loss, distillation_use_topk=True, **more)


# Two ranks: FSDP's and Megatron's fused forward, and Megatron's recipes. They compare, in float64
# where a missing part of a gradient could hide behind rounding.

RANKS = 2


def loss_of(model: nn.Module, rows: slice) -> Tensor:
    ids, a, b = draw((4, 9))
    inputs: dict[str, Any] = {"input_ids": ids[rows], "attention_mask": torch.ones_like(ids[rows])}
    if hasattr(model.config, "vision_config"):
        inputs["position_ids"] = torch.arange(9).expand(4, len(ids[rows]), 9)
    else:
        inputs["return_dict"] = True
    output = model(**inputs, temperature=TEMPERATURE, use_cache=False)
    return (output.log_probs * a[rows] + output.entropy * b[rows]).sum()


def patched(kind: str, **fields: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model, and the gradients of one process, a mean over ranks, that each should have."""
    module = verl_peer.monkey_patch()
    torch.manual_seed(0)
    made: Any = verl_peer.vision_model if kind.endswith("_vl") else verl_peer.text_model
    model = made(kind, **fields).double()
    module.patch_forward_with_backends(model, True, "grpo_kernels")
    whole = copy.deepcopy(model)
    (loss_of(whole, slice(0, 4)) / RANKS).backward()
    return model, {n: x.grad for n, x in whole.named_parameters() if x.grad is not None}


def on_fsdp2(rank: int, ranks: int, kind: str, fields: dict[str, Any]) -> None:
    """The head is a unit of its own if it is not tied; two micro-batches that accumulate."""
    model, want = patched(kind, **fields)
    verl_peer.wrap(model, "fsdp2")
    assert isinstance(model.lm_head, FSDPModule) == (not fields.get("tie_word_embeddings"))
    for row in (2 * rank, 2 * rank + 1):
        loss_of(model, slice(row, row + 1)).backward()
    got = {name: x.grad.full_tensor() for name, x in model.named_parameters() if x.grad is not None}
    assert got.keys() == want.keys()
    assert len(want) >= 10
    assert max(relative(got[name], want[name]) for name in want) < 1e-12


def on_fsdp1(rank: int, ranks: int) -> None:
    """verl's strategy ``fsdp``: the head is in the root's flat parameter. By a step of SGD, since
    `use_orig_params` is False as in verl."""
    model, want = patched("Qwen3")
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    wrapped = verl_peer.wrap(model, "fsdp", use_orig_params=False)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    loss_of(wrapped, slice(2 * rank, 2 * rank + 2)).backward()
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(wrapped):
        for name, x in wrapped.named_parameters():
            name = name.replace(f"{verl_peer.WRAPPED}.", "")
            assert relative(before[name] - x.detach(), want[name]) < 1e-12, name


def trees(rank: int, ranks: int, strategy: str, more: dict[str, Any]) -> None:
    """One rank's responses share two prompts, and the other's none. Ranks have equally many
    micro-batches; FSDP1's units run one forward each, of all tokens."""
    data = verl_peer.batch(8, seed=rank, group=(4, 1)[rank], dead=(6, 3)[rank])
    loss = ppo_loss(config())
    flags: dict[str, Any] = {"strategy": strategy, "layers": 2, **more}
    unfused = run(None, data, loss, **flags)
    for options in (OURS, SCORE):
        step = run(options, data, loss, tried=True, **flags)
        assert max(gap(step, unfused), abs(step.loss - unfused.loss)) < 3e-6
        assert metrics_of(step) == pytest.approx(metrics_of(unfused), abs=3e-6)
        tokens = step.products.tokens / unfused.products.tokens
        assert tokens < (0.95, 1.0)[rank] if strategy == "fsdp2" else tokens == 1, tokens


def on_ulysses(rank: int, ranks: int, options: dict[str, Any], nvh: float) -> None:
    """Without layers, since verl's attention under Ulysses is for GPUs: embedding, norm, head."""
    data, loss = verl_peer.batch(), ppo_loss(config(**SEQ_MEAN, **options))
    flags: dict[str, Any] = {"layers": 0, "strategy": None, "calculate_entropy": bool(options)}
    want = run(None, data, loss, **flags)
    flags |= {"prepare": verl_peer.divided_by_ulysses, "global_batch_size": len(data)}
    got = run(OURS, data, loss, **flags)
    verl_peer.verl_module("utils.ulysses").set_ulysses_sequence_parallel_group(None)
    for x in got.gradients.values():
        dist.all_reduce(x)
        x /= ranks  # as FSDP does
    assert gap(got, want) < 1e-6
    operations = torch.tensor(got.products.head)
    dist.all_reduce(operations)
    done = int(operations) / (counted(data) * VOCAB * HIDDEN)
    assert nvh <= done < nvh + 0.15  # on each rank, fewer than 16 rows are padded to 16


def on_megatron(rank, ranks, context, divided, tied, options, row, live):
    """Divided by context, or else by the vocabulary; products are 2NVH for `row` and `live`."""
    from tests.support import megatron_peer  # takes seconds, and only the ranks need it

    megatron_peer.start(tensor=ranks // context, context=context)
    step = megatron_peer.step(divided, tied, **options)
    nvh, share = step.pop("nvh"), step.pop("share")
    assert len(step) == (4 if tied else 5)
    assert max(step.values()) < 1e-12, step
    if context == ranks:
        assert nvh == pytest.approx(row + live * share)


def recipe_of_megatron_core(rank: int, ranks: int, tensor: int) -> None:
    """docs/start/other-trainers.md, with the vocabulary divided over `tensor` ranks."""
    from tests.support import megatron_peer

    found = megatron_peer.differences(tensor)
    assert len(found) == 4 * tensor
    for case, difference in found.items():
        assert difference < (1e-6 if case.startswith("loss") else 1e-11), case


BONUS = {"entropy_coeff": 0.01}
FEW = {"max_token_len_per_gpu": 64, **DYNAMIC}  # a sequence or two
TASKS: dict[Callable[..., None], list[tuple[Any, ...]]] = {
    on_fsdp2: [("Qwen3", {}), ("Qwen3", {"tie_word_embeddings": True}), ("qwen3_vl", {})],
    on_fsdp1: [()],
    trees: [("fsdp2", {"micro": 4}), ("fsdp2", DYNAMIC), ("fsdp2", FEW), ("fsdp", FEW)],
    on_ulysses: [({}, 3.99), (BONUS, 6)],
    on_megatron: [
        *((1, divided, tied, BONUS, 6, 0) for divided in (False, True) for tied in (False, True)),
        *((1, False, False, options, 2, 4) for options in ({}, {"mode": "gspo"})),
        (RANKS, False, False, {}, 2, 4),
        (RANKS, False, False, {"mode": "gspo"}, 2, 6),
        (RANKS, False, False, BONUS, 6, 0),
    ],
    recipe_of_megatron_core: [(1,), (RANKS,)],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "given"),
    [pytest.param(task, x, id=f"{task.__name__}{x}") for task, xs in TASKS.items() for x in xs],
)
def test_on_two_ranks(ranks: Ranks, task: Callable[..., None], given: tuple[Any, ...]) -> None:
    ranks.run(task, *given)
