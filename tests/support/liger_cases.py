"""Cases in the words of Liger's call, and what its results are held against.

It does not import Liger, which takes seconds, so that ranks need not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from grpo_kernels.liger import LigerFusedLinearGRPOLoss
from tests.support.case_builder import Case, make_case
from tests.support.reference import ReferenceResult, head, on_grid, reference_loss
from tests.support.tolerance import bounds_of, compare, compare_grads, computed_in

TOKEN_LEVEL = ("cispo", "sapo", "vespo")  # Liger has no sequence level for these
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
GRID = [
    *(
        (x, level)
        for x in CLIPPED
        for level in ("token", "sequence")
        if (x, level) != ("luspo", "token")
    ),
    *((x, "token") for x in TOKEN_LEVEL),
]
SETTINGS = (  # beta, epsilon, temperature
    {"beta": 0.1, "epsilon": 0.2, "epsilon_high": 0.2, "temperature": 1.0},
    {"beta": 0.0, "epsilon": 0.1, "epsilon_high": 0.1, "temperature": 2.0},
)
SOURCES = ("ref and old logps", "ref_input", "old logps")
LIGER = {"rtol": 2e-4, "atol": 2e-5}  # of Liger to us, where both are right, in fp32


def case_of(
    name: str, *, sources: str = "ref and old logps", **options: Any
) -> tuple[Case, dict[str, Tensor]]:
    """A case, and what else the call gets: the reference's hidden states and head where it is scored in the loss."""
    options = {
        "b": 3,
        "t": 7,
        "h": 8,
        "v": 17,
        "use_bias_correction_kl": False,
        "max_completion_length": 9,
        **options,
    }
    case = make_case(f"liger/{name}/{sources}", **{"old": sources != "ref_input", **options})
    if sources == "old logps":
        return case.but(ref_per_token_logps=None), {}
    if sources == "ref and old logps" or case.ref_per_token_logps is None:
        return case, {}
    noise = [0.1 * torch.randn(x.shape).to(x.dtype) for x in (case.hidden, case.weight)]
    reference = case.but(hidden=case.hidden + noise[0], weight=case.weight + noise[1])
    scored = head(reference)
    given = {"ref_input": reference.hidden, "ref_weight": reference.weight}
    given |= {} if case.bias is None else {"ref_bias": case.bias}
    return case.but(ref_per_token_logps=on_grid(scored.logps.detach(), scored.counted)), given


def settings_of(case: Case) -> dict[str, Any]:
    """The case's config in the words of Liger's constructor."""
    config = dict(case.config)
    config["epsilon_low"] = config.pop("epsilon", 0.2)
    return {"epsilon_high": 0.2, "beta": 0.0, "compiled": False, **config}


def call(
    cls: Any, case: Case, given: dict[str, Tensor], *, scale: float = 1.0, **settings: Any
) -> tuple[Tensor, tuple[Tensor, ...], dict[str, Tensor | None]]:
    """Loss, metrics, and the gradients of `scale` times the loss."""
    has_ref = case.ref_per_token_logps is not None
    leaves = {name: getattr(case, name) for name in ("hidden", "weight", "bias")}
    leaves = {
        name: None if x is None else x.detach().clone().requires_grad_(name not in case.frozen)
        for name, x in leaves.items()
    }
    loss_fn = cls(**{**settings_of(case), "use_ref_model": has_ref, **settings})
    loss, metrics = loss_fn(
        leaves["hidden"],
        leaves["weight"],
        case.completion_ids,
        case.completion_mask,
        case.advantages,
        bias=leaves["bias"],
        old_per_token_logps=case.old_per_token_logps,
        ref_per_token_logps=None if given or not has_ref else case.ref_per_token_logps,
        vllm_is_ratio=case.importance_sampling_ratio,
        num_items_in_batch=case.num_items_in_batch,
        **given,
    )
    (scale * loss).backward()
    return (
        loss.detach(),
        metrics,
        {name: None if x is None else x.grad for name, x in leaves.items()},
    )


def truth(case: Case) -> ReferenceResult:
    """TRL's loss in float64; without a reference model it has no KL term."""
    return reference_loss(
        case if case.ref_per_token_logps is not None else case.but(config={"beta": 0.0})
    )


def clipped(case: Case, want: ReferenceResult) -> Tensor:
    """Liger's clip metric: of all counted tokens, those clipped where it matters, whatever `delta` is."""
    ratio, config = want.evaluation.log_ratios.detach().exp(), case.config
    advantages = case.advantages.double()
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    high = {"cispo": config.get("epsilon_high", 0.2)}.get(
        config["loss_type"], 1 + config.get("epsilon_high", 0.2)
    )
    found = (ratio > high) & (advantages > 0)
    if config["loss_type"] != "cispo":
        found |= (ratio < 1 - config.get("epsilon", 0.2)) & (advantages < 0)
    if config["loss_type"] in ("sapo", "vespo"):
        found = torch.zeros_like(found)
    counted = case.completion_mask != 0
    return (found & counted).sum() / counted.sum().clamp(min=1).double()


def assert_is_trls(case: Case, found: tuple[Any, ...], scale: float = 1.0) -> None:
    """Loss, metrics and gradients are those of TRL's formulas, within the project's bounds."""
    loss, metrics, grads = found
    want = truth(case)
    told = case if case.ref_per_token_logps is not None else case.but(config={"beta": 0.0})
    limits = bounds_of(want, told)
    assert loss.dtype == computed_in(case)
    compare("loss", loss, want.loss, limits.loss, case)
    compare_grads(grads, want, case, vars(limits), scale)
    *kl, share = metrics
    assert len(kl) == (1 if case.config.get("beta") else 0)
    for x in kl:
        compare(
            "kl",
            x,
            want.metrics.get("kl", torch.zeros((), dtype=torch.float64)),
            limits.metrics.get("kl", 0.0),
            case,
        )
    assert_close(share.double(), clipped(case, want), rtol=0, atol=1e-6)


def assert_same(ours: tuple[Any, ...], theirs: tuple[Any, ...], **tolerance: float) -> None:
    for x, y in zip(
        (ours[0], *ours[1], *ours[2].values()),
        (theirs[0], *theirs[1], *theirs[2].values()),
        strict=True,
    ):
        assert (x is None) == (y is None)
        if x is not None:
            assert_close(x, y, **{**LIGER, **tolerance})


def check(
    theirs: Any, case: Case, given: dict[str, Tensor], *, scale: float = 1.0, **tolerance: float
) -> tuple[Any, ...]:
    """What ours returns, which is TRL's, and what Liger's class returns, unless it is None."""
    ours = call(LigerFusedLinearGRPOLoss, case, given, scale=scale)
    assert_is_trls(case, ours, scale)
    if theirs is not None:
        assert_same(ours, call(theirs, case, given, scale=scale), **tolerance)
    return ours


def case_of_rank(rank: int, loss_type: str) -> Case:
    """Two sequences on the first rank, three on the second, of other lengths."""
    return make_case(
        f"liger/rank {rank}", b=2 + rank, t=7, h=8, v=17, mask="ragged", loss_type=loss_type
    )


def losses_of_rank(rank: int, world_size: int) -> list[Tensor]:
    """Of dapo with no number of items, a float and a tensor, then of grpo."""
    dapo, grpo = (case_of_rank(rank, loss_type) for loss_type in ("dapo", "grpo"))
    cases = (
        *(dapo.but(num_items_in_batch=items) for items in (None, 31.0, torch.tensor(31))),
        grpo,
    )
    return [call(LigerFusedLinearGRPOLoss, case, {})[0] for case in cases]
