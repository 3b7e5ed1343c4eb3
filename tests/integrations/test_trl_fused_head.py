"""TRL's fused head: the op itself, patching every trainer, and the rows that are logged."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
import trl
import trl.trainer.utils as trl_utils
from datasets import Dataset
from trl.trainer.base_trainer import _BaseTrainer

from benchmarks import parity, tiny_models, tiny_run
from grpo_kernels.trl import FusedGRPOTrainer, patch_trl, unpatch_trl
from grpo_kernels.trl.fused_head import EXTRAS, HEAD, PATCHED, FusedHead, count_rows
from tests.support.case_builder import seeded
from tests.support.trl_training import Run, train

pytestmark = pytest.mark.unit

THEIRS = trl_utils._ChunkedLogProbFunction


def current() -> Any:
    return getattr(trl_utils, "_ChunkedLogProbFunction", None)


def head_inputs(rows: int = 9) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = seeded("head of TRL")
    ids = torch.randint(0, 50, (rows,), generator=draw)
    shapes = (rows, 16), (50, 16), (50,)
    hidden, weight, bias = (torch.randn(x, generator=draw).requires_grad_() for x in shapes)
    return hidden, weight, bias, ids


OUTPUTS = [
    ("log_probs",),
    ("log_probs", "entropy"),
    ("entropy", *EXTRAS),
    ("is_top1",),
    ("mean_logits", "entropy"),
]
TRAINS = [("hidden", "weight"), ("hidden", "weight", "bias"), ("hidden",), ("weight",), ()]


@pytest.mark.parametrize("needs", TRAINS, ids="-".join)
@pytest.mark.parametrize("outputs", OUTPUTS, ids="-".join)
def test_the_op_returns_and_differentiates_what_trl_does(
    outputs: tuple[str, ...], needs: tuple[str, ...]
) -> None:
    of_op = []
    for op in (THEIRS, FusedHead):
        hidden, weight, bias, ids = head_inputs()
        leaves = {"hidden": hidden, "weight": weight, "bias": bias}
        for name, x in leaves.items():
            x.requires_grad_(name in needs)
        given = (hidden, weight, bias if "bias" in needs else None, ids, 0.7, 32, 5.0, 0.5, outputs)
        results = op.apply(*given)
        assert len(results) == 5
        total = results[0].sum() if results[1] is None else (results[0] - 0.3 * results[1]).sum()
        assert total.requires_grad == bool(needs)
        if needs:
            total.backward()
        assert {name for name, x in leaves.items() if x.grad is not None} == {*needs}
        of_op.append((*results, *(x.grad for x in leaves.values())))
    for theirs, ours in zip(*of_op, strict=True):
        assert (theirs is None) == (ours is None)
        if theirs is not None:
            assert theirs.requires_grad == ours.requires_grad
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_op_without_rows() -> None:
    hidden, weight, bias, ids = head_inputs(rows=0)
    results = FusedHead.apply(hidden, weight, bias, ids, 1.0, 32)
    assert all(x is not None and x.shape == (0,) for x in results)
    results[0].sum().backward()
    assert not weight.grad.any()


def test_autocast_multiplies_in_its_dtype_and_keeps_fp32_gradients() -> None:
    hidden, weight, _, ids = head_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logps = FusedHead.apply(hidden, weight, None, ids, 1.0, 32)[0]
    logps.sum().backward()
    rounded = hidden.detach().bfloat16().float() @ weight.detach().bfloat16().float().t()
    wanted = rounded.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logps.detach(), wanted, rtol=1e-5, atol=1e-5)
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in (hidden, weight))


def test_a_partitioned_weight_is_gathered_for_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-3 takes the parameter apart between the forward and the backward."""
    hidden, weight, _, ids = head_inputs()
    full, apart = weight.data, torch.full_like(weight, float("nan"))
    gathered = []

    @contextmanager
    def gather(*params: Tensor | None) -> Iterator[None]:
        assert params == (weight, None)
        gathered.append(True)
        weight.data = full
        yield
        weight.data = apart

    given = hidden, weight, None, ids, 1.0, 32, None, 1.0, ("log_probs",)
    factors, leaves = torch.arange(len(ids)), (hidden, weight)
    wanted = torch.autograd.grad((THEIRS.apply(*given)[0] * factors).sum(), leaves)
    monkeypatch.setattr(trl_utils, "maybe_gather_lm_head_ctx", gather)
    logps = FusedHead.apply(*given)[0]
    weight.data = apart
    found = torch.autograd.grad((logps * factors).sum(), leaves)
    assert gathered
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kept_in", [torch.bfloat16, torch.float32], ids=str)
def test_logits_rounded_as_trls_are(kept_in: torch.dtype) -> None:
    """TRL rounds logits, and the head before, to the dtype of the hidden states; ours if asked."""
    hidden, weight, _, ids = head_inputs()
    hidden = hidden.detach().bfloat16().requires_grad_()
    weight = weight.detach().to(kept_in).requires_grad_()
    given = (hidden, weight, None, ids, 0.7, 32, 5.0, 0.5, ("log_probs", "entropy"))
    logits = 5 * torch.tanh(0.5 * (hidden.double() @ weight.double().t()) / 5) / 0.7
    exact = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0].detach()

    def errors() -> list[float]:
        ours, theirs = (op.apply(*given)[0] for op in (current(), THEIRS))
        gradients = [torch.autograd.grad(x.sum(), weight)[0] for x in (ours, theirs)]
        assert [x.dtype for x in gradients] == [kept_in, kept_in]
        torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)
        ours, theirs = ours.detach().double(), theirs.detach().double()
        return [float((ours - x).abs().max()) for x in (theirs, exact)]

    with patch_trl(logits_dtype="input"):
        from_theirs, from_exact = errors()
        assert from_theirs < 1e-5 < 1e-3 < from_exact
    with patch_trl():
        from_theirs, from_exact = errors()
        assert from_exact < 1e-5 < 1e-3 < from_theirs


def preferences() -> tuple[list[str], list[str], list[str]]:
    prompts = [*tiny_run.dataset(16)["prompt"]]
    better, worse = (
        [f" w{(7 * i + k) % 200} w{(3 * i) % 200}" for i in range(16)] for k in (1, 50)
    )
    return prompts, better, worse


def others() -> dict[str, tuple[type, type, dict[str, Any]]]:
    prompts, better, worse = preferences()
    texts = {"text": [f"{p} w5 w9" for p in prompts]}
    pairs = {"prompt": prompts, "chosen": better, "rejected": worse}
    labelled = {"prompt": prompts, "completion": better, "label": [True, False] * 8}
    rl = {"gradient_accumulation_steps": 2, "num_generations": 4, "max_completion_length": 8}

    def of(data: dict[str, Any]) -> dict[str, Any]:
        return {"train_dataset": Dataset.from_dict(data)}

    return {
        "SFT": (trl.SFTTrainer, trl.SFTConfig, of(texts)),
        "DPO": (trl.DPOTrainer, trl.DPOConfig, of(pairs)),
        "KTO": (trl.KTOTrainer, trl.KTOConfig, of(labelled)),
        "RLOO": (trl.RLOOTrainer, trl.RLOOConfig, {"reward_funcs": tiny_run.reward, **rl}),
    }


@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "RLOO"])
def test_patched_trainers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer_class, config_class, options = others()[name]
    calls, ours = [], FusedHead.apply
    apply = staticmethod(lambda *a: calls.append(len(a)) or ours(*a))
    monkeypatch.setattr(FusedHead, "apply", apply)
    stock = train(trainer_class, config_class=config_class, **options)
    assert not calls
    with patch_trl() as done:
        assert done
        patched = train(trainer_class, config_class=config_class, **options)
    assert calls
    assert current() is THEIRS
    for left, right in zip(stock.steps, patched.steps, strict=True):
        # absolute too: DPO's and KTO's figures are differences of whole sequences
        assert right == pytest.approx(left, rel=parity.TOLERANCE, abs=parity.TOLERANCE, nan_ok=True)


def test_patch_and_unpatch() -> None:
    unpatch_trl()  # nothing to undo
    assert current() is THEIRS
    assert patch_trl()
    assert current() is FusedHead
    with patch_trl() as again:  # changes nothing, so it undoes nothing
        assert again
    assert current() is FusedHead
    for _ in range(2):
        unpatch_trl()
        assert current() is THEIRS


@pytest.mark.parametrize("found", ["other signature", None])
def test_an_unknown_trl_is_left_alone(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Renamed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, ids: Any, scale: float) -> Any:
            return hidden

    if found is None:
        monkeypatch.delattr(trl_utils, "_ChunkedLogProbFunction")
    else:
        found = Renamed
        monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", found)
    with pytest.warns(UserWarning, match="TRL works unchanged") as seen:
        assert patch_trl() == False  # noqa: E712
    assert len(seen) == 1
    with HEAD.replaced():
        assert current() is found
    unpatch_trl()
    assert current() is found


OPTIONS: dict[str, Any] = {"engine": "lean", "backend": "torch", "workspace_bytes": 2**16}


def test_head_calls_have_the_options_of_the_patch_or_of_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from grpo_kernels.trl import fused_head

    seen: list[dict[str, Any]] = []
    compute = fused_head.linear_logprob

    def noted(*args: Any, **options: Any) -> Any:
        seen.append({name: getattr(options["run"], name) for name in OPTIONS})
        return compute(*args, **options)

    monkeypatch.setattr(fused_head, "linear_logprob", noted)
    hidden, weight, _, ids = head_inputs()
    in_force = "that of the patch in force, got"
    with patch_trl(logits_dtype="input", **OPTIONS):
        FusedHead.apply(hidden, weight, None, ids, 1.0, 32)[0].sum().backward()
        with pytest.raises(ValueError, match=f"logits_dtype: expected 'input', {in_force} 'float"):
            patch_trl(**OPTIONS)
        with pytest.raises(ValueError, match=f"engine: expected 'lean', {in_force} 'auto'"):
            patch_trl(logits_dtype="input")
    with patch_trl():
        FusedHead.apply(hidden, weight, None, ids, 1.0, 32)
    assert seen == [OPTIONS, {"engine": "auto", "backend": "auto", "workspace_bytes": None}]
    train(FusedGRPOTrainer, 1, **OPTIONS)
    assert len(seen) >= 4
    assert all(call == OPTIONS for call in seen[2:])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"engine": "fast"}, "engine: expected one of auto, score,"),
        ({"backend": "cuda"}, "backend: expected"),
        ({"workspace_bytes": 0}, "workspace_bytes: expected a number of bytes > 0, got 0"),
        ({"logits_dtype": "bfloat16"}, "logits_dtype: expected one of float32, input, got 'bf"),
    ],
)
def test_options_of_head_calls_are_checked(option: dict[str, Any], message: str) -> None:
    for make in (patch_trl, FusedGRPOTrainer):
        if make is patch_trl or "logits_dtype" not in option:
            with pytest.raises(ValueError, match=message):
                make(**option)


ROWS = {"rows/projected", "rows/gradient"}


def steps_of(run: Run) -> list[dict[str, float]]:
    return [entry for entry in run.trainer.state.log_history if "loss" in entry]


def logged(trainer_class: type) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """The training steps in the log of a short run, and the shares that they should have."""
    batches: list[dict[str, Any]] = []

    class Noted(trainer_class):  # type: ignore[misc, valid-type]
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            inputs["completion_mask"][::2, -3:] = 0  # completions that ended early
            batches.append(inputs)
            return super()._compute_loss(model, inputs)

    def shares(batches: list[dict[str, Any]]) -> dict[str, float]:
        masks = [batch["completion_mask"].bool() for batch in batches]
        graded = [x[y["advantages"] != 0].sum() for x, y in zip(masks, batches, strict=True)]
        counted, places = sum(int(x.sum()) for x in masks), sum(x.numel() for x in masks)
        return {"rows/projected": counted / places, "rows/gradient": int(sum(graded)) / counted}

    # the reward of the first steps is the same for some groups, which then have no gradient
    steps = steps_of(train(Noted, temperature=0.2))
    return steps, [shares(batches[:2]), shares(batches[2:])]


def test_the_trainer_logs_the_share_of_completion_tokens_and_of_those_with_an_advantage() -> None:
    steps, wanted = logged(FusedGRPOTrainer)  # whose entropies have no gradient
    assert [{name: step[name] for name in ROWS} for step in steps] == wanted
    assert any(0 < step["rows/gradient"] < 1 for step in wanted), "the case shows nothing"
    assert all(step["rows/projected"] < 1 for step in wanted), "the case shows nothing"
    # a row counts once, also if log-probability and entropy have a gradient
    (step,) = steps_of(train(FusedGRPOTrainer, 1, entropy_coef=0.01))
    assert step["rows/gradient"] == 1.0


def test_a_patched_trainer_logs_the_rows_that_trl_passes_and_an_unpatched_one_none() -> None:
    count_rows(PATCHED.shares, 4, None, (2 * torch.randn(4, requires_grad=True),))
    with patch_trl():
        assert PATCHED.shares.take() == {}, "counted before"
        steps, wanted = logged(trl.GRPOTrainer)
    # on a CPU TRL passes every position, prompt and padding too
    assert all(step["rows/projected"] == 1.0 for step in steps)
    is_graded = [step["rows/gradient"] > 0 for step in steps]
    assert is_graded == [step["rows/gradient"] > 0 for step in wanted]
    assert "log" not in vars(_BaseTrainer)
    assert not any(ROWS & step.keys() for step in steps_of(train(trl.GRPOTrainer)))


@pytest.mark.usefixtures("forget_warnings")
def test_a_trainer_that_makes_its_own_logits_is_named_once() -> None:
    gkd = pytest.importorskip("trl.experimental.gkd")
    turns = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4 w5"}]
    given = {
        "teacher_model": tiny_models.model(),
        "train_dataset": Dataset.from_dict({"messages": [turns] * 16}),
        "prepare": lambda _: warnings.simplefilter("always"),  # a tiny run is silent
    }
    with patch_trl(), pytest.warns(RuntimeWarning, match="patch_trl") as caught:
        train(gkd.GKDTrainer, config_class=gkd.GKDConfig, lmbda=0.0, **given)
    (said,) = [str(x.message) for x in caught if "patch_trl" in str(x.message)]
    assert "GKDTrainer has trained a step without TRL's fused head" in said
