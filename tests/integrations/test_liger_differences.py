"""Where Liger 0.8.5 is not TRL, and by how much: the rows of docs/start/liger.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from grpo_kernels.liger import LigerFusedLinearGRPOLoss
from tests.support.case_builder import Case
from tests.support.liger_cases import (
    assert_is_trls,
    assert_same,
    call,
    case_of,
    truth,
)
from tests.support.measure import count_flops
from tests.support.reference import head, on_grid

chunked_loss = pytest.importorskip("liger_kernel.chunked_loss")
Theirs = chunked_loss.LigerFusedLinearGRPOLoss


def pin(case: Case, given: dict[str, Tensor] | None = None, **settings: Any) -> float:
    """Ours is TRL's; returns how far Liger's loss is from that."""
    ours = call(LigerFusedLinearGRPOLoss, case, given or {}, **settings)
    assert_is_trls(case, ours)
    return abs(float(call(Theirs, case, given or {}, **settings)[0]) - float(truth(case).loss))


def test_luspo_depends_on_the_padding() -> None:
    loss = {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.5}
    case, _ = case_of("luspo", mask="ragged", **loss)
    names = (
        "hidden",
        "completion_ids",
        "completion_mask",
        "old_per_token_logps",
        "ref_per_token_logps",
    )
    longer = {
        x: torch.cat([getattr(case, x), torch.zeros_like(getattr(case, x))], dim=1) for x in names
    }
    padded = case.but(**longer)
    assert_close(truth(case).loss, truth(padded).loss)
    assert pin(case) > 0.1
    assert pin(padded) > 10
    theirs = call(Theirs, case, {})[2]["hidden"]
    assert (
        theirs[case.completion_mask == 0].abs().amax() > 0.01
    )  # d loss / d a state that is padding


def test_advantages_a_token() -> None:
    """Right by luck with its default chunk of one sequence."""
    case, _ = case_of("token advantages", adv="token", loss_type="dapo")
    assert pin(case) < 1e-5
    assert pin(case, chunk_size=3) > 0.5


def test_an_fp32_head_is_rounded() -> None:
    case, _ = case_of(
        "fp32 head", h=64, v=50, spread=6.0, noise=0.02, shift=0.0, loss_type="dapo", beta=0.0
    )
    case = case.but(hidden=case.hidden.bfloat16(), weight=case.weight)
    scored = head(case)
    case = case.but(old_per_token_logps=on_grid(scored.logps.detach(), scored.counted).float())
    assert pin(case) > 5e-3


def test_bf16_logits_are_rounded() -> None:
    case, _ = case_of("bf16 logits", h=64, v=50, spread=6.0, loss_type="dapo", dtype=torch.bfloat16)
    scored = head(case)
    case = case.but(old_per_token_logps=on_grid(scored.logps.detach(), scored.counted).float())
    assert pin(case) > 5e-4


def test_d_weight_is_summed_in_the_weights_dtype() -> None:
    """One sequence at a time, so that the error grows with their number."""
    case, _ = case_of(
        "many",
        b=64,
        t=2,
        mask="full",
        loss_type="dapo",
        dtype=torch.bfloat16,
        spread=0.5,
        old=False,
    )
    want, far = truth(case).d_weight, []
    for cls in (LigerFusedLinearGRPOLoss, Theirs):
        d_weight = call(cls, case, {})[2]["weight"]
        far.append(float((d_weight.double() - want).norm() / want.norm()))
    assert far[0] < 2.5e-3
    assert far[1] > 2 * far[0]


def test_what_stands_at_a_masked_position() -> None:
    case, _ = case_of("masked", mask="ragged", loss_type="dapo")
    garbage = case.hidden.masked_fill((case.completion_mask == 0)[..., None], torch.nan)
    ours = call(LigerFusedLinearGRPOLoss, case.but(hidden=garbage), {})
    assert_same(ours, call(LigerFusedLinearGRPOLoss, case, {}), rtol=0.0, atol=0.0)
    assert call(Theirs, case.but(hidden=garbage), {})[0].isnan()


def test_vespo_takes_ratios_of_masked_positions() -> None:
    case, _ = case_of("vespo", mask="ragged", loss_type="vespo", ratio="token")
    assert pin(case) > 0.5


def test_an_id_that_does_not_exist() -> None:
    case, _ = case_of("id", mask="full", loss_type="dapo")
    case.completion_ids[1, 2] = 99
    assert call(Theirs, case, {})[0].isfinite()
    with pytest.raises(ValueError, match=r"completion_ids: expected ids in \[0, V\) = \[0, 17\)"):
        call(LigerFusedLinearGRPOLoss, case, {})


def test_no_reference_and_no_kl_term() -> None:
    """Liger wants a reference model's numbers where `use_ref_model` is left at its default."""
    case, _ = case_of("no reference", loss_type="dapo", beta=0.0)
    assert_is_trls(case, call(LigerFusedLinearGRPOLoss, case, {}, use_ref_model=True))
    with pytest.raises(AssertionError, match="use_ref_model"):
        call(Theirs, case, {}, use_ref_model=True)


def test_products() -> None:
    """Liger projects masked positions and makes gradients that nobody asked for."""
    case, _ = case_of("flops", b=4, t=16, mask="holes", loss_type="dapo", sources="ref_input")
    product = 2 * case.hidden.shape[-1] * case.weight.shape[0]
    counted, everything = int(case.completion_mask.sum()), case.completion_mask.numel()
    assert counted < everything and counted >= 12

    def score(cls: Any) -> int:
        loss_fn = cls(beta=0.0, compiled=False, use_ref_model=False)
        args = (
            case.hidden,
            case.weight,
            case.completion_ids,
            case.completion_mask,
            case.advantages,
        )
        with torch.no_grad():
            return count_flops(lambda: loss_fn(*args))

    assert count_flops(lambda: call(LigerFusedLinearGRPOLoss, case, {})) == 3 * product * counted
    assert count_flops(lambda: call(Theirs, case, {})) == 4 * product * everything
    assert score(LigerFusedLinearGRPOLoss) == product * counted
    assert score(Theirs) >= 2 * product * everything
