"""Liger's call: the axes of its own public tests (test/chunked_loss/test_grpo_loss.py of
linkedin/Liger-Kernel), against Liger's module, and TRL's float64 where Liger 0.8.5 is not TRL."""

from __future__ import annotations

import inspect
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from grpo_kernels.liger import LigerFusedLinearGRPOLoss as Ours
from grpo_kernels.liger import patch_liger, unpatch_liger
from tests.support.case_builder import make_case
from tests.support.ranks import run_ranks
from tests.support.reference import head, on_grid, reference_loss
from tests.support.tolerance import bounds_of, compare, compare_grads

chunked_loss = pytest.importorskip("liger_kernel.chunked_loss")
Theirs = chunked_loss.LigerFusedLinearGRPOLoss

TOKEN_LEVEL = ("cispo", "sapo", "vespo")  # Liger has no sequence level for these
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
GRID = [(x, level) for x in CLIPPED for level in ("token", "sequence")]
GRID = [x for x in GRID if x != ("luspo", "token")] + [(x, "token") for x in TOKEN_LEVEL]
SOURCES = ("ref and old logps", "ref_input", "old logps")
NEAR = {"rtol": 2e-4, "atol": 2e-5}  # of Liger to us, where both are right, in fp32
LEAVES = ("hidden", "weight", "bias")


def case_of(name: str, sources: str = SOURCES[0], **options: Any) -> tuple[Any, dict[str, Any]]:
    """A case, and the reference's hidden states and head where the loss scores them."""
    base = {"b": 3, "t": 7, "h": 8, "v": 17, "old": sources != "ref_input"}
    base |= {"use_bias_correction_kl": False, "max_completion_length": 9}
    case = make_case(f"liger/{name}/{sources}", **{**base, **options})
    if sources == "old logps":
        return case.but(ref_per_token_logps=None), {}
    if sources == SOURCES[0] or case.ref_per_token_logps is None:
        return case, {}
    noise = [0.1 * torch.randn(x.shape).to(x.dtype) for x in (case.hidden, case.weight)]
    reference = case.but(hidden=case.hidden + noise[0], weight=case.weight + noise[1])
    scored = head(reference)
    given = {"ref_input": reference.hidden, "ref_weight": reference.weight}
    given |= {} if case.bias is None else {"ref_bias": case.bias}
    return case.but(ref_per_token_logps=on_grid(scored.logps.detach(), scored.counted)), given


def call(cls: Any, case: Any, given: Any = None, **settings: Any) -> Any:
    given, has_ref = given or {}, case.ref_per_token_logps is not None
    config = {"epsilon_high": 0.2, "beta": 0.0, "compiled": False, **case.config}
    config |= {"epsilon_low": config.pop("epsilon", 0.2), "use_ref_model": has_ref}
    leaves = {x: getattr(case, x) for x in LEAVES if getattr(case, x) is not None}
    leaves = {x: y.clone().requires_grad_(x not in case.frozen) for x, y in leaves.items()}
    loss, metrics = cls(**{**config, **settings})(
        leaves["hidden"],
        leaves["weight"],
        case.completion_ids,
        case.completion_mask,
        case.advantages,
        bias=leaves.get("bias"),
        old_per_token_logps=case.old_per_token_logps,
        ref_per_token_logps=None if given else case.ref_per_token_logps,
        vllm_is_ratio=case.importance_sampling_ratio,
        num_items_in_batch=case.num_items_in_batch,
        **given,
    )
    loss.backward()
    assert not any(x.requires_grad for x in metrics)
    return loss.detach(), metrics, {name: x.grad for name, x in leaves.items()}


def check(case: Any, given: Any, *, differs: bool = False) -> Any:
    """Ours is Liger's, or where that `differs` TRL's by its formulas."""
    ours = call(Ours, case, given)
    if not differs:
        assert_close(ours, call(Theirs, case, given), **NEAR)
        return ours
    want = reference_loss(case if "beta" in case.config else case.but(config={"beta": 0.0}))
    limits = bounds_of(want, case)
    compare("loss", ours[0], want.loss, limits.loss, case)
    compare_grads(ours[2], want, case, limits.grads, 1.0)
    return ours


@pytest.mark.parametrize("sources", SOURCES)
@pytest.mark.parametrize(("loss_type", "level"), GRID)
def test_the_grid(loss_type: str, level: str, sources: str) -> None:
    clips, loss = 0.0, {"loss_type": loss_type, "importance_sampling_level": level}
    for beta, epsilon, temperature in ((0.1, 0.2, 1.0), (0.0, 0.1, 2.0)):
        loss |= {"beta": beta, "epsilon": epsilon, "epsilon_high": epsilon}
        for delta in (None, 1.1) if loss_type in CLIPPED else (None,):
            loss |= {"temperature": temperature, "delta": delta, "bias": delta is None}
            name = f"{loss_type}/{level}/{delta}/{beta}"
            case, given = case_of(name, sources, noise=0.35, **loss)
            differs = loss_type == "luspo" and case.ref_per_token_logps is not None
            clips += float(check(case, given, differs=differs)[1][-1])
    assert clips > 0 or sources == "ref_input" or loss_type in ("sapo", "vespo")


@pytest.mark.parametrize("ratio", ["token", "sequence", "batch"])
@pytest.mark.parametrize("loss_type", [*CLIPPED, *TOKEN_LEVEL])
def test_importance_ratios_and_items(loss_type: str, ratio: str) -> None:
    is_luspo = loss_type == "luspo"
    options = {"importance_sampling_level": "sequence" if is_luspo else "token", "mask": "ragged"}
    options |= {"beta": 0.0 if is_luspo else 0.1, "num_items": 23.0, "loss_type": loss_type}
    case, given = case_of(f"ratio/{loss_type}/{ratio}", ratio=ratio, **options)
    ours = check(case, given, differs=ratio == "token" and loss_type in ("luspo", "vespo"))
    items = case.but(num_items_in_batch=torch.tensor(23))
    assert_close(ours, call(Ours, items, given))


HOT = {"sources": "ref_input", "beta": 0.3, "loss_type": "grpo", "temperature": 1.7, "bias": True}
OTHERS: dict[str, dict[str, Any]] = {"a reference at the same temperature": HOT}
for level in ("token", "sequence"):
    corrected = {"beta": 0.2, "use_bias_correction_kl": True, "loss_type": "grpo"}
    OTHERS[f"corrected/{level}"] = {**corrected, "importance_sampling_level": level}
OTHERS["no token counts"] = {"mask": "none", "beta": 0.1, "loss_type": "dapo"}


@pytest.mark.parametrize("name", OTHERS)
def test_other_options(name: str) -> None:
    check(*case_of(name, **OTHERS[name]))


def test_the_signatures_are_ligers() -> None:
    for function in ("__init__", "forward"):
        theirs = inspect.signature(getattr(Theirs, function)).parameters
        ours = inspect.signature(getattr(Ours, function)).parameters
        assert [*ours][: len(theirs)] == [*theirs]
        assert {x: ours[x].default for x in theirs} == {x: y.default for x, y in theirs.items()}
        assert all(x.kind is x.KEYWORD_ONLY for name, x in ours.items() if name not in theirs)
    attributes = {name for name in vars(Theirs()) if not name.startswith("_")}
    assert attributes <= vars(Ours()).keys()


def test_an_attribute_that_a_trainer_changes_counts() -> None:
    case, _ = case_of("trainers", beta=0.1, loss_type="dapo", ratio="token")
    args = case.hidden, case.weight, case.completion_ids, case.completion_mask, case.advantages
    loss_fn = Ours(beta=0.1, loss_type="grpo", epsilon_high=0.2)
    loss_fn.loss_type = "dapo"
    logps = {x: getattr(case, x) for x in ("old_per_token_logps", "ref_per_token_logps")}
    found = loss_fn(*args, vllm_is_ratio=case.importance_sampling_ratio, **logps)
    assert_close(found, call(Ours, case)[:2])


ZEROS = torch.zeros(2, 3, 4)
NO_REFERENCE = "ref_per_token_logps: expected a tensor, or ref_input and ref_weight"
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"loss_type": "gmpo"}, {}, "loss_type: Liger's API has no 'gmpo'"),
    ({"delta": -1.0}, {}, "delta: expected a finite number > 0"),
    ({"engine": "fast"}, {}, "engine: expected one of"),
    ({"loss_type": "dr_grpo"}, {}, "max_completion_length: expected an int"),
    ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, {}, "Sequence-level impo"),
    ({"beta": 0.1}, {}, NO_REFERENCE),
    ({"beta": 0.1}, {"ref_input": ZEROS}, NO_REFERENCE),
    ({}, {"_input": ZEROS.long()}, "_input: expected a floating-point tensor"),
    ({}, {"attention_mask": torch.ones(2)}, "attention_mask: expected shape"),
    ({}, {"selected_token_ids": torch.zeros(2, 3)}, "selected_token_ids: expected integer ids"),
]


@pytest.mark.parametrize(("settings", "inputs", "message"), WRONG)
def test_wrong_arguments(settings: Any, inputs: Any, message: str) -> None:
    good: dict[str, Any] = {"_input": ZEROS, "lin_weight": torch.zeros(5, 4)}
    good |= {"attention_mask": torch.ones(2, 3), "advantages": torch.ones(2)}
    good |= {"selected_token_ids": torch.zeros(2, 3, dtype=torch.long)}
    Ours(beta=0.0)(**good)
    with pytest.raises((TypeError, ValueError), match=message):
        Ours(**{"beta": 0.0, **settings})(**{**good, **inputs})


def test_a_reference_given_twice_is_the_log_probabilities() -> None:
    case, given = case_of("twice", "ref_input", beta=0.1, loss_type="dapo")
    args = case.hidden, case.weight, case.completion_ids, case.completion_mask, case.advantages
    given["ref_input"] = torch.zeros_like(given["ref_input"])
    with pytest.warns(UserWarning, match="Using ref_per_token_logps"):
        loss, _ = Ours(beta=0.1)(*args, ref_per_token_logps=case.ref_per_token_logps, **given)
    assert_close(loss, call(Ours, case)[0])


def case_of_rank(rank: int, loss_type: str) -> Any:
    options = {"b": 2 + rank, "h": 8, "v": 17, "mask": "ragged", "loss_type": loss_type}
    return make_case(f"liger/rank {rank}", **options)


def losses_of_rank(rank: int, world_size: int) -> list[torch.Tensor]:
    dapo, grpo = (case_of_rank(rank, loss_type) for loss_type in ("dapo", "grpo"))
    items = (None, 31.0, torch.tensor(31))
    return [call(Ours, x)[0] for x in (*(dapo.but(num_items_in_batch=n) for n in items), grpo)]


def test_ranks_share_the_number_of_items() -> None:
    """A rank divides by the number of all ranks over their number, as Liger's does."""
    cases = [case_of_rank(rank, "dapo") for rank in range(2)]
    counted = sum(int(case.completion_mask.sum()) for case in cases)
    for rank, (*dapo, grpo) in enumerate(run_ranks(losses_of_rank, 2)):
        for loss, items in zip(dapo, (counted, 31, 31), strict=True):
            alone = cases[rank].but(num_items_in_batch=items / 2)
            assert_close(loss, call(Theirs, alone)[0], **NEAR)
        assert_close(grpo, call(Ours, case_of_rank(rank, "grpo"))[0])


def test_a_divided_weight_is_whole_in_the_backward_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL gathers a weight of ZeRO-3 around the call; a ratio per sequence needs it again later."""
    weight = torch.nn.Parameter(torch.randn(11, 4))
    full, weight.ds_status = weight.data, SimpleNamespace(name="AVAILABLE")

    @contextmanager
    def gather(parameters: Any) -> Any:
        assert parameters[0] is weight
        weight.data, weight.ds_status.name = full, "AVAILABLE"
        yield
        weight.data, weight.ds_status.name = torch.empty(0), "NOT_AVAILABLE"

    deepspeed = ModuleType("deepspeed")
    deepspeed.zero = SimpleNamespace(GatheredParameters=gather)
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    hidden, ids = torch.randn(2, 3, 4, requires_grad=True), torch.randint(11, (2, 3))
    others = ids, torch.ones(2, 3), torch.tensor([1.0, -0.5])
    old = {"old_per_token_logps": -2.5 * torch.ones(2, 3)}
    loss_fn = Ours(beta=0.0, loss_type="grpo", importance_sampling_level="sequence")
    plain = full.clone().requires_grad_()
    want = torch.autograd.grad(loss_fn(hidden, plain, *others, **old)[0], (hidden, plain))
    with gather([weight]):
        loss, _ = loss_fn(hidden, weight, *others, **old)
    assert weight.numel() == 0
    assert_close(torch.autograd.grad(loss, (hidden, weight)), want)


def test_what_liger_needs_and_ours_does_not() -> None:
    """Ours takes no reference for beta 0, and does not read a masked position."""
    case, _ = case_of("no reference", mask="ragged", loss_type="dapo", beta=0.0)
    want = call(Ours, case)
    assert_close(call(Ours, case, use_ref_model=True), want)
    masked = (case.completion_mask == 0)[..., None]
    garbage = case.but(hidden=case.hidden.masked_fill(masked, torch.nan))
    assert_close(call(Ours, garbage), want, rtol=0.0, atol=0.0)
    case, _ = case_of("no KL term", loss_type="dapo", beta=0.3)
    loss, (kl, _), _ = call(Ours, case, use_ref_model=False)
    assert_close(loss, call(Ours, case.but(config={"beta": 0.0}))[0])
    assert kl == 0


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where `patch_liger` finds the class, too: TRL <= 1.12 binds the name."""
    trainer = ModuleType("trl.trainer.grpo_trainer")
    trainer.LigerFusedLinearGRPOLoss = Theirs
    monkeypatch.setitem(sys.modules, "trl.trainer.grpo_trainer", trainer)
    yield trainer
    unpatch_liger()
    assert chunked_loss.LigerFusedLinearGRPOLoss is Theirs


def test_patched_and_back(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        assert patch_liger() and patch_liger()
        assert chunked_loss.LigerFusedLinearGRPOLoss is trainer.LigerFusedLinearGRPOLoss is Ours
        unpatch_liger()
        unpatch_liger()
        assert chunked_loss.LigerFusedLinearGRPOLoss is trainer.LigerFusedLinearGRPOLoss is Theirs
    patch_liger()
    trainer.LigerFusedLinearGRPOLoss = int  # somebody else's
    unpatch_liger()
    patch_liger()
    assert trainer.LigerFusedLinearGRPOLoss is int
    unpatch_liger()
    monkeypatch.setitem(sys.modules, "trl.trainer.grpo_trainer", None)  # its import is blocked
    assert patch_liger()
    assert chunked_loss.LigerFusedLinearGRPOLoss is Ours


def test_an_unknown_liger_is_left_alone(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer(Theirs):
        def forward(self, *args: Any, temperatures: Any = None) -> Any:
            raise AssertionError

    said = r"not supported: forward\(args\), forward\(temperatures\)"
    for new, warning in ((Newer, said), (None, "has no LigerFused")):
        with monkeypatch.context() as patch:
            patch.setattr(chunked_loss, "LigerFusedLinearGRPOLoss", new)
            with pytest.warns(UserWarning, match=warning):
                assert not patch_liger()
            assert chunked_loss.LigerFusedLinearGRPOLoss is new
    monkeypatch.setitem(sys.modules, "liger_kernel.chunked_loss", None)
    with pytest.raises(ImportError):
        patch_liger()
