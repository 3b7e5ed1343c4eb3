"""Liger's call: the grid of Liger's own public tests, against Liger's module and against TRL's formulas in float64.

(linkedin/Liger-Kernel, test/chunked_loss/test_grpo_loss.py, by its axes: loss types, levels, KL and clip settings,
where reference and old log-probabilities come from, bias, delta, dtypes; smaller tensors.) Where Liger is not
TRL, test_liger_differences.py says by how much.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from grpo_kernels import liger
from grpo_kernels.liger import LigerFusedLinearGRPOLoss, patch_liger, unpatch_liger
from tests.support.liger_cases import (
    CLIPPED,
    GRID,
    LIGER,
    SETTINGS,
    SOURCES,
    TOKEN_LEVEL,
    assert_same,
    call,
    case_of,
    case_of_rank,
    check,
    losses_of_rank,
)
from tests.support.ranks import run_ranks

chunked_loss = pytest.importorskip("liger_kernel.chunked_loss")
Theirs = chunked_loss.LigerFusedLinearGRPOLoss


@pytest.mark.parametrize("sources", SOURCES)
@pytest.mark.parametrize(("loss_type", "level"), GRID)
def test_the_grid(loss_type: str, level: str, sources: str) -> None:
    clips = 0
    for options in SETTINGS:
        for delta in (None, 1.1) if loss_type in CLIPPED else (None,):
            loss = {"loss_type": loss_type, "importance_sampling_level": level, "delta": delta}
            name = f"{loss_type}/{level}/{delta}/{options['beta']}"
            case, given = case_of(
                name, sources=sources, bias=delta is None, noise=0.35, **loss, **options
            )
            differs = (
                loss_type == "luspo" and case.ref_per_token_logps is not None
            )  # see the differences
            clips += float(check(None if differs else Theirs, case, given)[1][-1])
    assert clips > 0 or sources == "ref_input" or loss_type in ("sapo", "vespo")


@pytest.mark.parametrize("ratio", ["token", "sequence", "batch"])
@pytest.mark.parametrize("loss_type", [*CLIPPED, *TOKEN_LEVEL])
def test_importance_ratios_and_items(loss_type: str, ratio: str) -> None:
    level = "sequence" if loss_type == "luspo" else "token"
    loss = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "beta": 0.0 if loss_type == "luspo" else 0.1,
    }
    case, given = case_of(
        f"ratio/{loss_type}/{ratio}", ratio=ratio, num_items=23.0, mask="ragged", **loss
    )
    ours = check(
        None if ratio == "token" and loss_type in ("luspo", "vespo") else Theirs, case, given
    )
    if (
        loss_type == "vespo" and ratio == "token"
    ):  # TRL's own ratio is 1 where masked, and Liger relies on it
        ratios = torch.where(case.completion_mask != 0, case.importance_sampling_ratio, 1.0)
        assert_same(ours, call(Theirs, case.but(importance_sampling_ratio=ratios), given))
    assert_same(
        ours,
        call(LigerFusedLinearGRPOLoss, case.but(num_items_in_batch=torch.tensor(23)), given),
        rtol=1e-6,
    )


CORRECTED = {"beta": 0.2, "use_bias_correction_kl": True, "epsilon_high": 0.3}
HOT = {"sources": "ref_input", "beta": 0.3, "loss_type": "grpo", "temperature": 1.7, "bias": True}
SHAPES = (
    (1, 5, "full"),
    (4, 1, "full"),
    (2, 3, "none"),
    (3, 4, "first_empty"),
)  # one sequence, one token, none counts
OTHERS: dict[str, dict[str, Any]] = {
    **{
        f"corrected/{loss_type}/{level}": {
            "loss_type": loss_type,
            "importance_sampling_level": level,
            **CORRECTED,
        }
        for loss_type in ("grpo", "dapo")
        for level in ("token", "sequence")
    },
    "a reference at the same temperature": HOT,
    **{
        f"{b}x{t}/{loss_type}": {"b": b, "t": t, "mask": mask, "beta": 0.1, "loss_type": loss_type}
        for b, t, mask in SHAPES
        for loss_type in ("grpo", "dapo", "dr_grpo")
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_options_and_the_last_shapes(name: str) -> None:
    check(Theirs, *case_of(name, **OTHERS[name]))


@pytest.mark.parametrize("frozen", [("weight", "bias"), ("hidden",), ()])
def test_frozen_parts_upstream_gradients_and_float64(frozen: tuple[str, ...]) -> None:
    for dtype in (torch.float32, torch.float64):
        case, given = case_of(
            "frozen", bias=True, beta=0.1, loss_type="dapo", frozen=frozen, dtype=dtype
        )
        compared = dtype == torch.float32 and frozen != ("hidden",)  # Liger makes it anyway
        check(Theirs if compared else None, case, given, scale=-3.5)


@pytest.mark.parametrize("sources", SOURCES)
@pytest.mark.parametrize(
    ("loss_type", "level"), [("dapo", "token"), ("grpo", "sequence"), ("sapo", "token")]
)
def test_bf16(loss_type: str, level: str, sources: str) -> None:
    """Ours to the project's bounds; Liger's, whose logits are rounded, to those of its own tests."""
    loss = {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.1}
    case, given = case_of(
        f"bf16/{loss_type}", sources=sources, dtype=torch.bfloat16, bias=True, **loss
    )
    check(Theirs, case.but(advantages=case.advantages.bfloat16()), given, rtol=0.5, atol=0.1)


def test_the_signatures_are_ligers() -> None:
    """Name, order and default of every argument; ours come after them, by keyword alone."""
    for function in ("__init__", "forward"):
        theirs = inspect.signature(getattr(Theirs, function)).parameters
        ours = inspect.signature(getattr(LigerFusedLinearGRPOLoss, function)).parameters
        assert [*ours][: len(theirs)] == [*theirs]
        assert {name: ours[name].default for name in theirs} == {
            name: x.default for name, x in theirs.items()
        }
        assert all(x.kind is x.KEYWORD_ONLY for name, x in ours.items() if name not in theirs)
    attributes = {name for name in vars(Theirs()) if not name.startswith("_")}
    assert attributes - {"training"} <= vars(LigerFusedLinearGRPOLoss()).keys()


def test_the_trainers_calls() -> None:
    """TRL 1.10 to 1.12 and ms-swift 4.6 give keywords; what they change afterwards counts."""
    case, _ = case_of("trainers", beta=0.1, loss_type="dapo", ratio="token")
    loss_fn = LigerFusedLinearGRPOLoss(
        beta=0.1, compiled=False, epsilon_low=0.2, epsilon_high=0.2, temperature=1.0, use_ref_model=True,
        loss_type="grpo", max_completion_length=7, importance_sampling_level="token", delta=None,
        use_bias_correction_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, vespo_k_pos=2.0,
        vespo_k_neg=3.0, vespo_lambda_pos=3.0, vespo_lambda_neg=2.0, chunk_size=4,
    )  # fmt: skip
    loss_fn.loss_type = "dapo"
    loss, metrics = loss_fn(
        _input=case.hidden, lin_weight=case.weight, selected_token_ids=case.completion_ids,
        attention_mask=case.completion_mask, advantages=case.advantages, bias=None,
        old_per_token_logps=case.old_per_token_logps, ref_per_token_logps=case.ref_per_token_logps,
        vllm_is_ratio=case.importance_sampling_ratio, num_items_in_batch=case.completion_mask.sum(),
    )  # fmt: skip
    want = call(LigerFusedLinearGRPOLoss, case, {})
    assert_close(loss, want[0])
    assert_close(metrics, want[1])
    assert not any(x.requires_grad for x in metrics)


@pytest.mark.parametrize(
    ("settings", "inputs", "message"),
    [
        ({"loss_type": "ppo"}, {}, "loss_type: expected one of"),
        ({"sapo_temperature_neg": 0.0}, {}, "sapo_temperature_neg: expected a finite number > 0"),
        ({"delta": -1.0}, {}, "delta: expected a finite number > 0"),
        (
            {"loss_type": "dr_grpo", "max_completion_length": None},
            {},
            "max_completion_length: expected an int",
        ),
        (
            {"loss_type": "cispo", "importance_sampling_level": "sequence"},
            {},
            "Sequence-level importance sampling",
        ),
        ({"beta": 0.1}, {}, "ref_per_token_logps: expected it, or ref_input and ref_weight"),
        (
            {"beta": 0.1},
            {"ref_input": torch.zeros(2, 3, 4)},
            "ref_per_token_logps: expected it, or ref_input",
        ),
        ({}, {"attention_mask": None}, "attention_mask: expected a tensor"),
        ({}, {"attention_mask": torch.ones(2)}, "attention_mask: expected shape"),
        ({}, {"selected_token_ids": torch.zeros(2, 3)}, "selected_token_ids: expected integer ids"),
        ({}, {"_input": [1]}, "_input: expected a tensor"),
        ({}, {"lin_weight": torch.zeros(5, 3)}, "weight: expected shape"),
        ({}, {"vllm_is_ratio": torch.ones(3)}, "importance_sampling_ratio: expected shape"),
    ],
)
def test_wrong_arguments(settings: dict[str, Any], inputs: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "_input": torch.zeros(2, 3, 4), "lin_weight": torch.zeros(5, 4), "attention_mask": torch.ones(2, 3),
        "selected_token_ids": torch.zeros(2, 3, dtype=torch.long), "advantages": torch.ones(2),
    }  # fmt: skip
    LigerFusedLinearGRPOLoss(beta=0.0)(**good)
    with pytest.raises((TypeError, ValueError), match=message):
        LigerFusedLinearGRPOLoss(**{"beta": 0.0, **settings})(**{**good, **inputs})


def test_a_reference_given_twice_is_the_log_probabilities() -> None:
    case, given = case_of("twice", sources="ref_input", beta=0.1, loss_type="dapo")
    want = call(LigerFusedLinearGRPOLoss, case, {})
    loss_fn = LigerFusedLinearGRPOLoss(beta=0.1, loss_type="dapo")
    args = (case.hidden, case.weight, case.completion_ids, case.completion_mask, case.advantages)
    given["ref_input"] = torch.zeros_like(given["ref_input"])
    with pytest.warns(UserWarning, match="Using ref_per_token_logps"):
        loss, _ = loss_fn(*args, ref_per_token_logps=case.ref_per_token_logps, **given)
    assert_close(loss, want[0])


def test_ranks_share_the_number_of_items() -> None:
    """What a rank divides by is the number of all ranks over their number, as in Liger; which waits for ever where they
    have unequal numbers of sequences, since it asks the others once a sequence."""
    cases = [case_of_rank(rank, "dapo") for rank in range(2)]
    counted = sum(int(case.completion_mask.sum()) for case in cases)
    assert cases[0].completion_mask.sum() != cases[1].completion_mask.sum()
    for rank, (*dapo, grpo) in enumerate(run_ranks(losses_of_rank, 2)):
        for loss, items in zip(dapo, (counted, 31, 31), strict=True):
            alone = cases[rank].but(num_items_in_batch=items / 2)
            assert_close(loss, call(Theirs, alone, {})[0], **LIGER)
        assert_close(grpo, call(LigerFusedLinearGRPOLoss, case_of_rank(rank, "grpo"), {})[0])


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A parameter as ZeRO-3 divides it: whole inside `GatheredParameters` alone."""
    weight = torch.nn.Parameter(torch.randn(11, 4))
    full, gathered = weight.data, []

    @contextmanager
    def gather(parameters: list[Tensor]) -> Iterator[None]:
        assert parameters[0] is weight
        gathered.append(True)
        weight.data, weight.ds_status.name = full, "AVAILABLE"
        yield
        weight.data, weight.ds_status.name = torch.empty(0), "NOT_AVAILABLE"

    weight.ds_status = SimpleNamespace(name="AVAILABLE")
    deepspeed = ModuleType("deepspeed")
    deepspeed.zero = SimpleNamespace(GatheredParameters=gather)
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    return SimpleNamespace(weight=weight, gather=gather, gathered=gathered)


def test_a_divided_weight_is_whole_in_the_backward_too(divided: Any) -> None:
    """TRL gathers around the call; a ratio a sequence needs the weight again later."""
    hidden, mask = torch.randn(2, 3, 4, requires_grad=True), torch.ones(2, 3)
    ids, advantages, old = (
        torch.randint(11, (2, 3)),
        torch.tensor([1.0, -0.5]),
        -2.5 * torch.ones(2, 3),
    )
    loss_fn = LigerFusedLinearGRPOLoss(
        beta=0.0, loss_type="grpo", importance_sampling_level="sequence"
    )
    plain = loss_fn(
        hidden,
        divided.weight.detach().requires_grad_(),
        ids,
        mask,
        advantages,
        old_per_token_logps=old,
    )[0]
    (want,) = torch.autograd.grad(plain, hidden)
    with divided.gather([divided.weight]):
        loss, _ = loss_fn(hidden, divided.weight, ids, mask, advantages, old_per_token_logps=old)
    assert divided.weight.numel() == 0
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, divided.weight))
    assert len(divided.gathered) == 2
    assert d_weight.shape == (11, 4)
    assert_close(d_hidden, want)


class TestPatch:
    """`patch_liger` where the trainers look."""

    @pytest.fixture(autouse=True)
    def _trl_that_bound_the_name(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        self.trainer = ModuleType("trl.trainer.grpo_trainer")  # TRL <= 1.12
        self.trainer.LigerFusedLinearGRPOLoss = Theirs
        monkeypatch.setitem(sys.modules, "trl.trainer.grpo_trainer", self.trainer)
        yield
        unpatch_liger()
        assert chunked_loss.LigerFusedLinearGRPOLoss is Theirs

    def test_there_and_back(self) -> None:
        for _ in range(2):
            assert patch_liger() and patch_liger()
            from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss as found

            assert found is self.trainer.LigerFusedLinearGRPOLoss is LigerFusedLinearGRPOLoss
            unpatch_liger()
            unpatch_liger()
            assert (
                chunked_loss.LigerFusedLinearGRPOLoss
                is self.trainer.LigerFusedLinearGRPOLoss
                is Theirs
            )

    def test_a_trainer_imported_meanwhile_gets_ligers_back_too(self) -> None:
        del self.trainer.LigerFusedLinearGRPOLoss
        patch_liger()
        self.trainer.LigerFusedLinearGRPOLoss = chunked_loss.LigerFusedLinearGRPOLoss
        unpatch_liger()
        assert self.trainer.LigerFusedLinearGRPOLoss is Theirs

    def test_somebody_elses_class_is_left_alone(self) -> None:
        self.trainer.LigerFusedLinearGRPOLoss = int
        patch_liger()
        assert self.trainer.LigerFusedLinearGRPOLoss is int

    def test_an_unknown_liger_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Newer(Theirs):
            def forward(self, *args: Any, temperatures: Any = None) -> Any:
                raise AssertionError

        for new, said in (
            (Newer, r"forward\(args\), forward\(temperatures\)"),
            (None, "has no LigerFused"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(chunked_loss, "LigerFusedLinearGRPOLoss", new)
                with pytest.warns(UserWarning, match=said):
                    assert not patch_liger()
                assert chunked_loss.LigerFusedLinearGRPOLoss is new

    def test_without_trl_or_liger(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "trl.trainer.grpo_trainer")
        assert patch_liger()
        unpatch_liger()
        monkeypatch.setitem(sys.modules, "liger_kernel.chunked_loss", None)
        with pytest.raises(ImportError):
            patch_liger()
        assert not liger._patches._restorations
