"""The hook in TRL's fused head: the op itself, patching every trainer and undoing it, and a TRL that is not known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
import trl
import trl.trainer.utils as trl_utils
from datasets import Dataset

from benchmarks import parity, tiny_run
from grpo_kernels.host import KnownRows
from grpo_kernels.trl import FusedGRPOTrainer, fused_head, patch_trl, unpatch_trl
from grpo_kernels.trl.scoring import ModelCall
from tests.support.case_builder import seeded
from tests.support.trl_training import train

THEIRS = trl_utils._ChunkedLogProbFunction


def _preferences() -> Dataset:
    prompts = tiny_run.dataset(16)["prompt"]
    better, worse = (
        [f" w{(7 * i + k) % 200} w{(3 * i) % 200}" for i in range(16)] for k in (1, 50)
    )
    return Dataset.from_dict({"prompt": list(prompts), "chosen": better, "rejected": worse})


def _labelled() -> Dataset:
    pairs = _preferences()
    both = [
        (p, c, i % 2 == 0)
        for i, (p, c) in enumerate(zip(pairs["prompt"], pairs["chosen"], strict=True))
    ]
    prompts, completions, labels = zip(*both, strict=True)
    return Dataset.from_dict(
        {"prompt": list(prompts), "completion": list(completions), "label": list(labels)}
    )


def _others() -> dict[str, tuple[type, type, dict[str, Any]]]:
    texts = Dataset.from_dict({"text": [f"{p} w5 w9" for p in tiny_run.dataset(16)["prompt"]]})
    rl = {"gradient_accumulation_steps": 2, "num_generations": 4, "max_completion_length": 8}
    return {
        "SFT": (trl.SFTTrainer, trl.SFTConfig, {"train_dataset": texts}),
        "DPO": (trl.DPOTrainer, trl.DPOConfig, {"train_dataset": _preferences()}),
        "KTO": (trl.KTOTrainer, trl.KTOConfig, {"train_dataset": _labelled()}),
        "RLOO": (trl.RLOOTrainer, trl.RLOOConfig, {"reward_funcs": tiny_run.reward, **rl}),
    }


@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "RLOO"])
def test_patched_trainers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer_class, config_class, options = _others()[name]
    calls = []
    ours = fused_head.FusedHead.apply
    monkeypatch.setattr(
        fused_head.FusedHead, "apply", staticmethod(lambda *a: calls.append(len(a)) or ours(*a))
    )
    stock = train(trainer_class, config_class=config_class, **options)
    assert not calls
    with patch_trl() as done:
        assert done
        patched = train(trainer_class, config_class=config_class, **options)
    assert calls
    assert trl_utils._ChunkedLogProbFunction is THEIRS
    for left, right in zip(stock.steps, patched.steps, strict=True):
        # absolute too: DPO's and KTO's figures are differences of whole sequences' log-probabilities
        assert right == pytest.approx(left, rel=parity.TOLERANCE, abs=parity.TOLERANCE, nan_ok=True)


def test_patch_and_unpatch() -> None:
    unpatch_trl()  # nothing to undo
    assert trl_utils._ChunkedLogProbFunction is THEIRS
    assert patch_trl()
    assert trl_utils._ChunkedLogProbFunction is fused_head.FusedHead
    with patch_trl() as again:  # changes nothing, so it undoes nothing
        assert again
    assert trl_utils._ChunkedLogProbFunction is fused_head.FusedHead
    unpatch_trl()
    assert trl_utils._ChunkedLogProbFunction is THEIRS
    unpatch_trl()
    assert trl_utils._ChunkedLogProbFunction is THEIRS


@pytest.mark.parametrize("kept_in", [torch.bfloat16, torch.float32], ids=str)
def test_logits_rounded_as_trls_are(kept_in: torch.dtype) -> None:
    """TRL rounds logits, and the head before, to the dtype of the hidden states; ours only if they are asked to."""
    hidden, weight, _, ids = _head_inputs()
    hidden, weight = (
        x.detach().to(dtype).requires_grad_()
        for x, dtype in ((hidden, torch.bfloat16), (weight, kept_in))
    )
    given = (hidden, weight, None, ids, 0.7, 32, 5.0, 0.5, ("log_probs", "entropy"))
    logits = 5 * torch.tanh(0.5 * (hidden.double() @ weight.double().t()) / 5) / 0.7
    exact = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0].detach()

    def errors() -> list[float]:
        ours, theirs = (op.apply(*given)[0] for op in (trl_utils._ChunkedLogProbFunction, THEIRS))
        gradients = [torch.autograd.grad(x.sum(), weight)[0] for x in (ours, theirs)]
        assert [x.dtype for x in gradients] == [kept_in, kept_in]
        torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)
        return [
            float((ours.detach().double() - x).abs().max())
            for x in (theirs.detach().double(), exact)
        ]

    with patch_trl(logits_dtype="input") as done:
        assert done
        from_theirs, from_exact = errors()
        assert from_theirs < 1e-5 < 1e-3 < from_exact
        with pytest.raises(
            ValueError,
            match="logits_dtype: expected 'input', that of the patch in force, got 'float",
        ):
            patch_trl()
    with patch_trl():
        from_theirs, from_exact = errors()
        assert from_exact < 1e-5 < 1e-3 < from_theirs
    with pytest.raises(
        ValueError, match="logits_dtype: expected one of float32, input, got 'bfloat16'"
    ):
        patch_trl(logits_dtype="bfloat16")
    assert trl_utils._ChunkedLogProbFunction is THEIRS


OPTIONS: dict[str, Any] = {"engine": "lean", "backend": "torch", "workspace_bytes": 2**16}


def test_head_calls_have_the_options_of_the_patch_or_of_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[dict[str, Any]] = []
    compute = fused_head.linear_logprob
    monkeypatch.setattr(
        fused_head, "linear_logprob", lambda *a, **k: seen.append(k) or compute(*a, **k)
    )

    def given() -> list[dict[str, Any]]:
        found, seen[:] = (
            [{name: getattr(call["run"], name) for name in OPTIONS} for call in seen],
            [],
        )
        return found

    hidden, weight, _, ids = _head_inputs()
    with patch_trl(**OPTIONS):
        fused_head.FusedHead.apply(hidden, weight, None, ids, 1.0, 32)[0].sum().backward()
        assert given() == [OPTIONS]
        with pytest.raises(
            ValueError, match="engine: expected 'lean', that of the patch in force, got 'auto'"
        ):
            patch_trl()
    with patch_trl():
        fused_head.FusedHead.apply(hidden, weight, None, ids, 1.0, 32)
        assert given() == [{"engine": "auto", "backend": "auto", "workspace_bytes": None}]
    train(FusedGRPOTrainer, 1, **OPTIONS)
    calls = given()
    assert len(calls) >= 2
    assert all(call == OPTIONS for call in calls)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"engine": "fast"}, "engine: expected one of auto, score,"),
        ({"backend": "cuda"}, "backend: expected"),
        ({"workspace_bytes": 0}, "workspace_bytes: expected a number of bytes > 0, got 0"),
    ],
)
def test_options_of_head_calls_are_checked(option: dict[str, Any], message: str) -> None:
    for make in (patch_trl, FusedGRPOTrainer):
        with pytest.raises(ValueError, match=message):
            make(**option)


class _Renamed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, ids: Any, scale: float) -> Any: ...


@pytest.mark.parametrize("found", [_Renamed, None], ids=["other signature", "no hook"])
def test_an_unknown_trl_is_left_alone(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if found is None:
        monkeypatch.delattr(trl_utils, "_ChunkedLogProbFunction")
    else:
        monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", found)
    with pytest.warns(UserWarning, match="TRL works unchanged") as seen:
        assert patch_trl() == False  # noqa: E712
    assert len(seen) == 1
    with fused_head.HEAD.replaced():
        assert getattr(trl_utils, "_ChunkedLogProbFunction", None) is found
    unpatch_trl()
    assert getattr(trl_utils, "_ChunkedLogProbFunction", None) is found


def _head_inputs(rows: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = seeded("head of TRL")
    ids = torch.randint(0, 50, (rows,), generator=draw)
    hidden, weight, bias = (
        torch.randn(shape, generator=draw) for shape in ((rows, 16), (50, 16), (50,))
    )
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), ids


@pytest.mark.parametrize(
    "needs", [("hidden", "weight"), ("hidden", "weight", "bias"), ("hidden",), ("weight",), ()]
)
@pytest.mark.parametrize(
    "outputs",
    [
        ("log_probs",),
        ("log_probs", "entropy"),
        ("entropy", *fused_head.EXTRAS),
        ("is_top1",),
        ("mean_logits", "entropy"),
    ],
    ids="-".join,
)
def test_the_op_returns_and_differentiates_what_trl_does(
    outputs: tuple[str, ...], needs: tuple[str, ...]
) -> None:
    of_op = []
    for op in (THEIRS, fused_head.FusedHead):
        hidden, weight, bias, ids = _head_inputs()
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
            assert theirs.dtype == ours.dtype
            assert theirs.requires_grad == ours.requires_grad
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_op_without_rows() -> None:
    hidden, weight, bias, ids = _head_inputs(rows=0)
    results = fused_head.FusedHead.apply(hidden, weight, bias, ids, 1.0, 32)
    assert all(x is not None and x.shape == (0,) for x in results)
    results[0].sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_autocast_multiplies_in_its_dtype_and_keeps_fp32_gradients() -> None:
    hidden, weight, _, ids = _head_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logps = fused_head.FusedHead.apply(hidden, weight, None, ids, 1.0, 32)[0]
    logps.sum().backward()
    rounded = (
        hidden.detach().bfloat16().float() @ weight.detach().bfloat16().float().t()
    ).log_softmax(-1)
    torch.testing.assert_close(
        logps.detach(), rounded.gather(1, ids[:, None])[:, 0], rtol=1e-5, atol=1e-5
    )
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in (hidden, weight))


def test_a_partitioned_weight_is_gathered_for_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-3 takes the parameter apart between the forward and the backward."""
    hidden, weight, _, ids = _head_inputs()
    full, apart = weight.data, torch.full_like(weight, float("nan"))
    gathered = []

    @contextmanager
    def gather(*params: torch.Tensor | None) -> Iterator[None]:
        assert params == (weight, None)
        gathered.append(True)
        weight.data = full
        yield
        weight.data = apart

    plain = THEIRS.apply(hidden, weight, None, ids, 1.0, 32, None, 1.0, ("log_probs",))[0]
    d_plain = torch.autograd.grad((plain * torch.arange(len(ids))).sum(), (hidden, weight))
    monkeypatch.setattr(trl_utils, "maybe_gather_lm_head_ctx", gather)
    logps = fused_head.FusedHead.apply(
        hidden, weight, None, ids, 1.0, 32, None, 1.0, ("log_probs",)
    )[0]
    weight.data = apart
    found = torch.autograd.grad((logps * torch.arange(len(ids))).sum(), (hidden, weight))
    assert gathered
    torch.testing.assert_close(found, d_plain, rtol=1e-5, atol=1e-5)


def test_a_trl_that_passes_the_labelled_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL 1.15 has no `_use_triton`, and compacts its rows everywhere."""
    monkeypatch.delattr(fused_head.trl_utils, "_use_triton")
    assert fused_head.HEAD.is_known()
    labelled = torch.tensor([[1, 1, 0], [1, 0, 0]]) != 0
    counted = torch.tensor([[1, 0, 0], [1, 0, 0]])
    positions = fused_head._positions(ModelCall(labelled=labelled, batch_size=2), torch.zeros(3, 4))
    assert positions is not None
    assert positions.tolist() == [0, 1, 3]
    rows = KnownRows(counted).at(positions)
    assert rows.counted.tolist() == [True, False, True]
    assert rows.expected is None
    assert rows.fill is None
