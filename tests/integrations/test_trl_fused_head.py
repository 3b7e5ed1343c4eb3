"""TRL's public `add_fused_lm_head` and ours: a model's forward with each, and every trainer."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("trl")
import trl
import trl.trainer.utils as trl_utils
from datasets import Dataset

from benchmarks import parity, tiny_models, tiny_run
from grpo_kernels.trl import FusedGRPOTrainer, fused_head, patch_trl, unpatch_trl
from tests.support.tiny_architectures import VISION
from tests.support.trl_training import Run, train

pytestmark = pytest.mark.unit

THEIRS = trl_utils.add_fused_lm_head
ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
LENGTHS = (10, 10, 7, 9)
B, L = len(LENGTHS), max(LENGTHS)
MASK = (torch.arange(L) < torch.tensor(LENGTHS)[:, None]).long()
Given = dict[str, Any]


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    yield
    unpatch_trl()


def ours(model: Any, *args: Any, patched: Given | None = None, **kwargs: Any) -> None:
    with patch_trl(**patched or {}):
        trl_utils.add_fused_lm_head(model, *args, **kwargs)


def batch(where: str = "anywhere", name: str = "labels") -> Given:
    """Two rows share their first tokens, one is padded on its right, one on its left."""
    ids, mask, column = torch.randint(3, tiny_models.VOCAB, (B, L)), MASK.clone(), torch.arange(L)
    ids[1, :5] = ids[0, :5]
    mask[3] = mask[3].flip(0)
    ids = ids * mask
    is_label = {
        "completions": column >= 5,
        "anywhere": (ids % 3 == 0) & (torch.arange(B)[:, None] != 2),
        "everywhere": column >= 0,
        "nowhere": column < 0,
    }[where]
    labels = ids.masked_fill(~is_label | (mask == 0), -100)
    return {"input_ids": ids, "attention_mask": mask, name: labels}


def answer(model: Any, *args: Any, **given: Any) -> dict[str, Tensor]:
    """Every field of the forward's record, and what it gives every parameter."""
    output = model(*args, fused_lm_head=True, **given)
    assert type(output) is trl_utils.FusedCausalLMOutput
    factors = torch.arange(output.log_probs.numel()).view_as(output.log_probs) % 5
    total = output.loss + (factors * output.log_probs).mean()
    if output.entropy is not None:
        total = total - 0.3 * (factors * output.entropy).mean()
    total.backward()
    gradients = {f"d {name}": x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {**output, **gradients}


def check(*args, make=tiny_models.model, add=lambda give, model: give(model, outputs=ALL), **given):
    """The answers of a model with our head, which are those of one with TRL's.

    `add` gives the model a head, and may return another model to ask.
    """
    answers = []
    for give in (THEIRS, ours):
        model = make()
        answers.append(answer(add(give, model) or model, *args, **given))
    wanted, found = answers
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert found[name].requires_grad == x.requires_grad, name
        torch.testing.assert_close(
            found[name], x, rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}"
        )
    return found


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
@pytest.mark.parametrize("where", ["completions", "anywhere", "everywhere", "nowhere"])
def test_labels_say_what_is_scored(where: str, name: str) -> None:
    found = check(**batch(where, name))
    assert found["is_top1"].dtype == torch.bool
    assert found["log_probs"].shape == (B, L if name == "shift_labels" else L - 1)
    if where == "nowhere":
        assert found["loss"] == 0.0
        assert not any(x.any() for name, x in found.items() if name.startswith("d "))


OUTPUTS: list[Given] = [
    {"temperature": 0.7, "outputs": ALL},
    {"temperature": 1.3, "outputs": ("entropy",)},
    {"outputs": ("is_top1", "log_probs")},
]


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_models_and_outputs(kind: str) -> None:
    for options in OUTPUTS:
        given = batch()
        if "entropy" in options["outputs"]:
            given["num_items_in_batch"] = torch.tensor(37)
        check(
            make=lambda: tiny_models.model(kind),
            add=lambda give, model, options=options: give(model, **options),
            **given,
        )


@pytest.mark.parametrize("name", VISION)
def test_images(name: str) -> None:
    """TRL takes a soft-cap from the config that Gemma 3's forward does not apply; ours does not."""
    model, ids, inputs = VISION[name]()
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < 8, -100)
    logits = model(input_ids=ids, **inputs).logits[:, :-1]
    wanted = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0] * (labels[:, 1:] != -100)
    ours(model)
    found = model(input_ids=ids, **inputs, labels=labels, fused_lm_head=True).log_probs
    assert found.dtype == torch.float32, "as TRL's record, though the model is in fp64"
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
    trained = [x for x in model.parameters() if x.requires_grad]
    gradients = [torch.autograd.grad(x.sum(), trained, allow_unused=True) for x in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("asked", [{"output_router_logits": True}, {}], ids=["call", "config"])
def test_the_load_balancing_loss_of_a_mixture_of_experts(asked: Given) -> None:
    fields = {"output_router_logits": not asked, "router_aux_loss_coef": 0.2}
    make = functools.partial(tiny_models.model, "experts", **fields)
    assert check(make=make, **batch(), **asked)["aux_loss"] > 0


def test_a_copy_of_the_model_is_scored_and_projected_by_its_own_weights() -> None:
    given, copies = batch(), []

    def add(give: Any, model: Any) -> Any:
        give(model, outputs=ALL)
        copies.append(copy.deepcopy(model))
        with torch.no_grad():
            for x in model.parameters():
                x.mul_(1.1)
        return copies[-1]

    assert "d lm_head.weight" in check(add=add, **given)
    torch.testing.assert_close(copies[1](**given).logits, tiny_models.model()(**given).logits)


def test_the_last_of_two_heads_serves_and_arguments_may_be_positional() -> None:
    def add(give: Any, model: Any) -> None:
        THEIRS(model, temperature=0.7)
        give(model, temperature=0.5)
        give(model, 2.0, False, ALL)

    given = batch()
    check(given.pop("input_ids"), given.pop("attention_mask"), add=add, **given)


def test_a_forward_that_does_not_ask_for_the_head_is_the_models_own() -> None:
    model, given = tiny_models.model(), batch()
    prompts = {name: x[:2, :5] for name, x in given.items() if name != "labels"}
    options = {"max_new_tokens": 6, "do_sample": False}
    signature = inspect.signature(model.forward)
    before = model.generate(**prompts, **options), model(**given)
    for temperature in (0.5, 2.0):
        ours(model, temperature=temperature)
    after = model.generate(**prompts, **options), model(**given)
    assert torch.equal(before[0], after[0])
    assert type(before[1]) is type(after[1])
    torch.testing.assert_close([*after[1][:2]], [*before[1][:2]], rtol=0, atol=0)
    assert inspect.signature(model.forward) == signature  # which `generate` reads
    del given["labels"]
    with pytest.raises(ValueError, match=r"labels: expected \(B, L\) with fused_lm_head=True"):
        model(**given, fused_lm_head=True)


@pytest.mark.parametrize("in_fp32", [False, True], ids=["", "cast_lm_head_to_fp32"])
@pytest.mark.parametrize("by_autocast", [False, True], ids=["bfloat16", "autocast"])
def test_logits_are_rounded_as_trls_if_asked(by_autocast: bool, in_fp32: bool) -> None:
    """TRL rounds logits to the dtype of the hidden states, unless the head is in fp32."""
    given, logps, gradients = batch("everywhere"), {}, {}
    for name, give, options in (
        ("theirs", THEIRS, {}),
        ("rounded", ours, {"patched": {"logits_dtype": "input", "layout": "padded"}}),
        ("ours", ours, {"patched": {"layout": "padded"}}),
    ):
        model = tiny_models.model(dtype=torch.float32 if by_autocast else torch.bfloat16)
        if in_fp32:  # as TRL's trainers do it
            head = model.lm_head.float()
            head.forward = lambda x, head=head: F.linear(x.float(), head.weight)
        give(model, cast_lm_head_to_fp32=in_fp32, **options)
        with torch.autocast("cpu", torch.bfloat16, enabled=by_autocast):
            found = answer(model, **given)
        logps[name], gradients[name] = found["log_probs"].detach(), found["d lm_head.weight"]
    torch.testing.assert_close(logps["rounded"], logps["theirs"], rtol=0, atol=1e-5)
    gap = float((logps["ours"] - logps["theirs"]).abs().max())
    assert (gap < 1e-5) if in_fp32 else (1e-3 < gap < 0.1)
    for x in gradients.values():
        assert x.dtype == (torch.float32 if in_fp32 or by_autocast else torch.bfloat16)
        torch.testing.assert_close(x, gradients["theirs"], rtol=2e-2, atol=2e-2)


def trainer_of(name: str) -> tuple[type, dict[str, Any]]:
    prompts = [*tiny_run.dataset(16)["prompt"]]
    texts = [[f" w{(7 * i + k) % 200} w{(3 * i) % 200}" for i in range(16)] for k in (1, 50)]
    turns = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"}]
    rl = {"gradient_accumulation_steps": 2, "num_generations": 4, "max_completion_length": 8}
    data, options = {
        "SFT": ({"text": [f"{prompt} w5 w9" for prompt in prompts]}, {}),
        "DPO": ({"prompt": prompts, "chosen": texts[0], "rejected": texts[1]}, {}),
        "KTO": ({"prompt": prompts, "completion": texts[0], "label": [True, False] * 8}, {}),
        "RLOO": (None, {"reward_funcs": tiny_run.reward, **rl}),
        "GKD": ({"messages": [turns] * 16}, {"teacher_model": tiny_models.model(), "lmbda": 0.0}),
    }[name]
    if data is not None:
        options["train_dataset"] = Dataset.from_dict(data)
    module = pytest.importorskip("trl.experimental.gkd") if name == "GKD" else trl
    options["config_class"] = getattr(module, f"{name}Config")
    return getattr(module, f"{name}Trainer"), options


SHARES = ("rows/projected", "rows/gradient", "tokens/computed", "tokens/gradient")
SHARES += ("sequences/gradient",)


def shares_of(run: Run) -> list[dict[str, float]]:
    steps = [entry for entry in run.trainer.state.log_history if "loss" in entry]
    return [{name: step[name] for name in SHARES if name in step} for step in steps]


@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "RLOO"])
def test_patched_trainers(name: str) -> None:
    """Same losses and logs, and the shares of labels and of tokens below the head."""
    trainer_class, options = trainer_of(name)
    stock = train(trainer_class, **options)
    assert shares_of(stock) == [{}, {}]
    shares = {}
    for layout in ("padded", "trim", "tree"):
        with patch_trl(layout=layout) as done:
            assert done
            patched = train(trainer_class, **options)
        # absolute too: DPO's and KTO's figures are differences of whole sequences
        how = {"rel": parity.TOLERANCE, "abs": parity.TOLERANCE, "nan_ok": True}
        for left, right in zip(stock.steps, patched.steps, strict=True):
            assert right == pytest.approx(left, **how)
        shares[layout] = shares_of(patched)
        assert all(0 < x["rows/projected"] <= 1 for x in shares[layout])
        # the reward of the first step is the same for some of RLOO's groups
        assert [x["rows/gradient"] == 1.0 for x in shares[layout]] == [name != "RLOO", True]
    for padded, trim, tree in zip(*shares.values(), strict=True):
        computed = [x["tokens/computed"] for x in (padded, trim, tree)]
        assert 1.0 == computed[0] > computed[1] > computed[2]
        assert name != "DPO" or computed[2] < 0.5  # a pair's prompt once


def test_patch_and_unpatch() -> None:
    modules, root = [trl_utils], Path(trl.__file__).parent
    for path in root.rglob("*.py"):
        if re.search(r"^ +add_fused_lm_head,$", path.read_text(), re.MULTILINE):
            parts = path.relative_to(root.parent).with_suffix("").parts
            modules.append(importlib.import_module(".".join(parts).removesuffix(".__init__")))
    assert len(modules) >= 8

    def are_theirs() -> bool:
        (is_theirs,) = {x.add_fused_lm_head is THEIRS for x in modules}
        return is_theirs

    unpatch_trl()  # nothing to undo
    assert are_theirs()
    assert patch_trl()
    with patch_trl() as again:  # changes nothing, so it undoes nothing
        assert again
    assert not are_theirs()
    for _ in range(2):
        unpatch_trl()
        assert are_theirs()


OPTIONS: Given = {"engine": "lean", "backend": "torch", "workspace_bytes": 2**16}


def test_head_calls_have_the_options_of_the_patch_or_of_the_trainer(monkeypatch):
    seen: list[Given] = []
    compute = fused_head.linear_logps

    def noted(*args: Any, **options: Any) -> Any:
        seen.append({name: getattr(options["run"], name) for name in OPTIONS})
        return compute(*args, **options)

    monkeypatch.setattr(fused_head, "linear_logps", noted)
    in_force = "as in the patch already applied, got"
    patch_trl(logits_dtype="input", **OPTIONS)
    for others, expected in (
        (OPTIONS, f"logits_dtype: expected 'input', {in_force} 'float32'"),
        ({"logits_dtype": "input"}, f"engine: expected 'lean', {in_force} 'auto'"),
        ({"layout": "trim", **OPTIONS}, f"layout: expected 'tree', {in_force} 'trim'"),
    ):
        with pytest.raises(ValueError, match=expected):
            patch_trl(**others)
    train(trl.GRPOTrainer, 1, prepare=lambda _: unpatch_trl())
    of_patch = [seen.pop() for _ in [*seen]]
    train(FusedGRPOTrainer, 1, **OPTIONS)
    for found in (of_patch, seen):
        assert len(found) >= 2
        assert all(call == OPTIONS for call in found)
    with patch_trl():
        train(FusedGRPOTrainer, 1)
    assert seen[-1] == {"engine": "auto", "backend": "auto", "workspace_bytes": None}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"engine": "fast"}, "engine: expected one of auto, score,"),
        ({"backend": "cuda"}, "backend: expected"),
        ({"workspace_bytes": 0}, "workspace_bytes: expected a number of bytes > 0, got 0"),
        ({"layout": "packed"}, "layout: expected one of tree, trim, padded, got"),
        ({"logits_dtype": "bfloat16"}, "logits_dtype: expected one of float32, input, got 'bf"),
    ],
)
def test_options_of_head_calls_are_checked(option: Given, message: str) -> None:
    for make in (patch_trl, FusedGRPOTrainer):
        if make is patch_trl or "logits_dtype" not in option:
            with pytest.raises(ValueError, match=message):
                make(**option)
    assert trl_utils.add_fused_lm_head is THEIRS


def test_the_trainer_logs_the_share_of_completion_tokens_and_of_those_with_an_advantage() -> None:
    batches: list[Given] = []

    class Noted(FusedGRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Given) -> Tensor:
            inputs["completion_mask"][::2, -3:] = 0  # completions that ended early
            inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
            inputs["tool_mask"][:, 1::3] = 0
            batches.append(inputs)
            return super()._compute_loss(model, inputs)

    # the reward of the first steps is the same for some groups, which then have no gradient
    found = shares_of(train(Noted, temperature=0.2))  # whose entropies have no gradient
    for step, part in zip(found, (batches[:2], batches[2:]), strict=True):
        masks = [(x["completion_mask"] * x["tool_mask"]).bool() for x in part]
        graded = [int(x[y["advantages"] != 0].sum()) for x, y in zip(masks, part, strict=True)]
        counted, places = sum(int(x.sum()) for x in masks), sum(x.numel() for x in masks)
        assert step["rows/projected"] == counted / places < 1
        assert step["rows/gradient"] == sum(graded) / counted
        assert 0 < step["tokens/gradient"] <= step["tokens/computed"] < 1
        live = torch.cat([batch["advantages"] != 0 for batch in part])
        assert step["sequences/gradient"] == live.float().mean()
    assert any(0 < step["rows/gradient"] < 1 for step in found), "the case shows nothing"
    # a row counts once, also if log-probability and entropy have a gradient
    (step,) = shares_of(train(FusedGRPOTrainer, 1, entropy_coef=0.01))
    assert step["rows/gradient"] == 1.0


def test_a_trainer_keeps_its_options_and_counters_when_a_later_one_takes_its_model() -> None:
    def make_another(older: Any) -> None:
        given = {"model": older.model, "args": older.args, "train_dataset": older.train_dataset}
        given["processing_class"] = older.processing_class
        FusedGRPOTrainer(reward_funcs=tiny_run.reward, layout="padded", **given)

    alone, shared = (train(FusedGRPOTrainer, 1, prepare=x) for x in (None, make_another))
    assert shares_of(shared) == shares_of(alone) != [{}]
    assert shared.steps == alone.steps


@pytest.mark.usefixtures("forget_warnings")
@pytest.mark.parametrize("name", ["SFT", "GKD"])
def test_a_trainer_that_trains_without_ours_is_named_once(name: str) -> None:
    trainer_class, options = trainer_of(name)
    if name == "GKD":
        patch_trl()

    def prepare(_: Any) -> None:
        patch_trl()
        warnings.simplefilter("always")  # a tiny run is silent

    with pytest.warns(RuntimeWarning, match="patch_trl") as caught:
        train(trainer_class, prepare=prepare, **options)
    (said,) = [str(x.message) for x in caught if "patch_trl" in str(x.message)]
    assert f"{name}Trainer has trained a step without TRL's fused head" in said
    assert "the trainer was created before patch_trl()" in said
