"""What is no error but likely not meant: one warning that says what to do, at the caller's line."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels import (
    Head,
    LossConfig,
    grpo_loss,
    linear_divergence,
    linear_logps,
    policy_loss_from_logps,
    presets,
    topk_divergence,
)
from grpo_kernels.liger import LigerFusedLinearGRPOLoss
from tests.support.flat import flat
from tests.support.small_batch import small_batch

pytestmark = pytest.mark.usefixtures("forget_warnings")

ODD_MASKS = torch.full((2, 5), 0.5), torch.arange(10).view(2, 5)
SAMPLING = "vllm_importance_sampling"
NORMAL = torch.linspace(-3.0, -1.0, 10).view(2, 5)


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        *(({"num_items_in_batch": x}, {"loss_type": "grpo"},
           "num_items_in_batch: not used by loss_type = 'grpo'") for x in (7, 0.5)),
        ({"num_items_in_batch": 10}, {"loss_type": "dapo"}, None),
        ({"num_items_in_batch": 2}, {}, "num_items_in_batch: 2 is less than the 10 tokens of this"),
        *(({"num_items_in_batch": x}, {}, f"num_items_in_batch: {x} counts as 1; pass the number")
          for x in (0.5, 0)),
        *(({name: x.clone().requires_grad_()}, config, f"{name}: counted as constants, so")
          for name, x, config in (
              ("advantages", torch.ones(2), {}),
              ("old_per_token_logps", NORMAL, {}),
              ("ref_per_token_logps", NORMAL, {"loss_type": "grpo", "beta": 0.04}),
              ("sampling_per_token_logps", NORMAL, {"off_policy_mask_threshold": 1.0}),
              ("importance_sampling_ratio", -NORMAL, {}),
          )),
        ({"sampling_per_token_logps": NORMAL}, {}, "sampling_per_token_logps: used for a metric"),
        ({"sampling_per_token_logps": NORMAL}, {"off_policy_mask_threshold": 1.0}, None),
        ({"old_per_token_logps": NORMAL.bfloat16()}, {},
         "old_per_token_logps: rounded to torch.bfloat16"),
        ({"old_per_token_logps": NORMAL}, {}, None),
        ({"old_per_token_logps": NORMAL}, {"epsilon": 3e-4},
         "epsilon: 0.0003 with importance_sampling_level = 'token' clips most tokens"),
        *(({"completion_mask": mask}, {}, "completion_mask: it holds values other than 0 and 1")
          for mask in ODD_MASKS),
        ({"old_per_token_logps": torch.full((2, 5), -25.0)}, {},
         "old_per_token_logps: the geometric mean of the ratios to them is "),
        ({"ref_per_token_logps": torch.full((2, 5), -25.0)}, {"loss_type": "grpo", "beta": 0.04},
         "ref_per_token_logps: the geometric mean of the ratios to them is "),
        ({"sampling_per_token_logps": NORMAL.masked_fill(NORMAL == -3.0, -torch.inf)}, presets.TIS,
         "sampling_per_token_logps: -inf for 1 of 10 tokens"),
        ({"sampling_per_token_logps": NORMAL * torch.nan}, presets.TIS,
         "sampling_per_token_logps: NaN for every token"),
        ({"sampling_per_token_logps": torch.full((2, 5), -25.0)}, presets.TIS,
         "sampling_per_token_logps: the geometric mean of the ratios to them is "),
        ({}, {"loss_type": "cispo"}, "epsilon_high: in 'cispo' it is the cap on the ratio itself"),
        ({}, {"delta": 1.1}, "delta: 1.1 is below the clip range's bound, 1 + epsilon_high = 1.2"),
        ({}, {"delta": 1.5}, None),
        ({}, {"loss_type": "sapo", "epsilon": 0.3}, "epsilon: not used by loss_type = 'sapo'"),
        ({}, {"loss_type": "vespo", "importance_sampling_level": "sequence"},
         "importance_sampling_level: not used by loss_type = 'vespo'"),
        ({"ref_per_token_logps": NORMAL},
         {"loss_type": "vespo", "importance_sampling_level": "sequence", "beta": 0.1}, None),
        ({}, {"vespo_k_pos": 1.0}, "vespo_k_pos: not used by loss_type = 'dapo'"),
        ({}, {"loss_type": "dr_grpo", "max_completion_length": 4},
         "max_completion_length: loss_type = 'dr_grpo' divides by it, and 4 is less"),
        ({}, {"loss_type": "dr_grpo", "max_completion_length": 5}, None),
        ({}, {"max_completion_length": 5}, "max_completion_length: not used by loss_type = 'dapo'"),
        ({}, LossConfig.from_trl(SimpleNamespace(max_completion_length=5)), None),
        ({}, {f"{SAMPLING}_mode": "token_mask", f"{SAMPLING}_clip_max": 2.0},
         f"{SAMPLING}_mode, {SAMPLING}_clip_max: not used without an importance sampling ratio; "),
        ({"importance_sampling_ratio": torch.ones(2, 5)}, {f"{SAMPLING}_mode": "token_mask"}, None),
        ({"sampling_per_token_logps": NORMAL}, presets.TIS, None),
        ({"old_per_token_logps": NORMAL}, {"epsilon_high": 1.28},
         "epsilon_high: the upper bound of the ratio is 1 +"),
        ({"old_per_token_logps": NORMAL}, {"epsilon": 1.5, "epsilon_high": 0.3},
         "epsilon: ratios are clipped to [1 -"),
        ({"old_per_token_logps": NORMAL}, {"importance_sampling_level": "sequence"},
         "epsilon: 0.2 with importance_"),
        ({"old_per_token_logps": NORMAL}, presets.GSPO, None),
        ({}, {"epsilon_high": 1.28}, None),  # nothing is clipped on-policy
        ({"importance_sampling_ratio": torch.full((2, 5), 2.0)}, presets.GMPO,
         "importance_sampling_ratio: not used by loss_type = 'gmpo'"),
        ({}, {"loss_type": "gmpo", "off_policy_mask_threshold": 0.1},
         "off_policy_mask_threshold: not used by loss_type = 'gmpo'"),
        ({"advantages": torch.eye(2, 5)}, presets.GSPO, "advantages: they differ within a seq"),
        ({"advantages": torch.eye(2, 5)}, {}, None),
        ({"ref_per_token_logps": NORMAL}, {}, "ref_per_token_logps: not used with beta = 0"),
        ({"ref_per_token_logps": NORMAL}, {"loss_type": "grpo", "beta": 0.04}, None),
        ({}, {"kl_estimator": "k1"}, "kl_estimator: 'k1' has no effect in a loss with"),
        ({"completion_mask": torch.ones(2, 5).triu().to(torch.uint8)}, {}, None),
    ],
)  # fmt: skip
def test_what_is_likely_not_meant_is_warned_of_once(options, config, message):
    loss = config if isinstance(config, LossConfig) else LossConfig(**config)
    given = {**small_batch(), **options, "config": loss}
    weight = given.pop("weight")
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(2):
            grpo_loss(head=weight, **given)
        scores = linear_logps(given.pop("hidden"), weight, given.pop("completion_ids"))
        policy_loss_from_logps(scores.logps, entropies=scores.entropies, **given)
    ours = [x for x in caught if "grpo_kernels: " in str(x.message)]
    lines = [x.lineno for x in ours]
    assert (message is None) == (not lines)
    assert len({*lines}) == len(lines)  # once for each line, not for each call
    for warning in ours:
        assert str(warning.message).startswith(f"grpo_kernels: {message}")
        assert warning.filename == __file__


def test_values_that_belong_to_other_tokens_are_warned_of(forget_warnings):
    """Shifted by one or in another order: the mean of the log-ratios is near 0 all the same."""
    torch.manual_seed(0)
    hidden, weight, ids = torch.randn(4, 8, 16), torch.randn(60, 16), torch.randint(60, (4, 8))
    logps, given = linear_logps(hidden, weight, ids).logps, (None, torch.ones(4))
    for dim in (0, 1):
        forget_warnings()
        with pytest.warns(UserWarning, match="old_per_token_logps: the log-ratios to them have a"):
            grpo_loss(hidden, weight, ids, *given, old_per_token_logps=logps.roll(1, dim))
    with warnings.catch_warnings(action="error"):
        old = logps + 0.1 * torch.randn(4, 8)
        grpo_loss(hidden, weight, ids, *given, old_per_token_logps=old.clamp(max=0.0))


def test_the_same_mistake_on_another_line_is_warned_of_again() -> None:
    """As in the next cell of a notebook, or in another function of the library."""
    batch = small_batch()
    weight, odd = batch.pop("weight"), torch.full((2, 5), 0.5)
    hidden, ids = batch["hidden"], batch["completion_ids"]
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(2):
            linear_logps(hidden, weight, ids, odd)
            linear_divergence(hidden, weight, (hidden, weight), odd)
    assert ["completion_mask" in str(x.message) for x in caught] == [True, True]


def test_a_filter_that_makes_warnings_errors_raises_in_every_call() -> None:
    batch = small_batch()
    batch["head"] = batch.pop("weight")
    for _ in range(2):
        raised = pytest.raises(UserWarning, match=r"delta: .* is below")
        with warnings.catch_warnings(action="error"), raised:
            grpo_loss(**batch, delta=1.1)


def test_heads_of_two_sizes_are_warned_of_unless_that_is_stated() -> None:
    batch = small_batch()
    hidden, weight = batch["hidden"], batch["weight"]
    shorter = hidden, weight[:-1]
    with pytest.warns(UserWarning, match="teacher: its head has 8 ids, the other head 9; "):
        linear_divergence(hidden, weight, shorter)
    with warnings.catch_warnings(action="error"):
        linear_divergence(hidden, Head(weight, vocab_size=len(weight) - 1), shorter)


def test_a_second_model_with_a_graph_is_warned_of() -> None:
    batch = small_batch()
    hidden, weight, ids = batch["hidden"], batch["weight"], batch["completion_ids"]
    attached, listed = hidden.clone().requires_grad_(), -torch.ones(2, 5, 1, requires_grad=True)
    second = {"reference": (attached, weight), "beta": 0.1, "kl_estimator": "full"}
    for name, call in (
        ("teacher.hidden", lambda: linear_divergence(hidden, weight, (attached, weight))),
        ("reference.hidden", lambda: flat(grpo_loss)(**small_batch(), **second)),
        ("teacher_logps", lambda: topk_divergence(hidden, weight, ids[..., None], listed)),
    ):
        with pytest.warns(UserWarning, match=rf"{name}: counted as constants, .* {name}.detach"):
            call()


def test_a_workspace_of_a_few_bytes_warns_once() -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        for size in (64, 512, 2**20):
            flat(grpo_loss)(**small_batch(), workspace_bytes=size)
    (said,) = caught
    assert str(said.message).startswith("grpo_kernels: workspace_bytes is in bytes; values under 1")


def test_ligers_call_which_always_has_a_number_of_items_does_not_warn() -> None:
    given = [*small_batch().values()]
    for loss_type in ("grpo", "dapo"):
        loss = LigerFusedLinearGRPOLoss(loss_type=loss_type, use_ref_model=False)
        with warnings.catch_warnings(action="error"):
            found, several = (loss(*given, num_items_in_batch=items)[0] for items in (None, 40))
        assert torch.equal(several, found) == (loss_type == "grpo")
