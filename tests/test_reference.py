"""The float64 reference against TRL's own loss, and the tolerance against right and deliberately
wrong candidates."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig, policy_loss_from_logps
from grpo_kernels.typing import LossTypeName
from tests.support.case_builder import Case
from tests.support.cases import LOSSES, fixed_cases
from tests.support.reference import ReferenceResult, reference_loss
from tests.support.reference_terms import CLIPPED, DEFAULTS, TERMS, settings
from tests.support.tolerance import Bounds, assert_matches, bounds_of, computed_in
from tests.support.trl_oracle import OracleResult, in_domain, trl_loss

IN_TRL = [pair for pair in LOSSES if TERMS[pair[0]].in_trl]
CASES = {case.name: case for case in fixed_cases()}
IN_DOMAIN = [case for case in CASES.values() if in_domain(case)]


@cache
def known(name: str) -> tuple[ReferenceResult, Bounds]:
    """The reference and its bounds, once a case."""
    reference = reference_loss(CASES[name])
    return reference, bounds_of(reference, CASES[name])


def loss_of(case: Case) -> tuple[str, str]:
    o = settings(case)
    return o.loss_type, o.importance_sampling_level


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    if not got.numel():
        return 0.0
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-12))


def differences_from_trl(case: Case, trl: OracleResult) -> dict[str, float]:
    """Relative for the loss and the gradients, absolute for the metrics."""
    ours, names = known(case.name)[0], ["loss", "d_hidden", "d_weight"]
    names += [] if trl.d_bias is None else ["d_bias"]
    found = {name: relative(getattr(ours, name), getattr(trl, name)) for name in names}
    for name, value in trl.metrics.items():  # TRL puts its 0 / 1 shares in float32
        found[f"{name} / 1e4"] = abs(float(ours.metrics[name]) - value) / 1e4
    return found


@pytest.mark.parametrize(("loss_type", "level"), IN_TRL)
def test_reference_equals_trl(loss_type: str, level: str) -> None:
    cases = [x for x in IN_DOMAIN if loss_of(x) == (loss_type, level)]
    assert len(cases) >= 4
    for case in cases:
        for name, difference in differences_from_trl(case, trl_loss(case)).items():
            assert difference < 1e-10, f"{case.name}: {name}: {difference:.3g}"


def test_enough_cases() -> None:
    assert len(CASES) == len(fixed_cases()) >= 270
    assert len(IN_DOMAIN) >= 100
    assert {loss_of(x) for x in IN_DOMAIN} == set(IN_TRL)
    undecided = [name for name in CASES if known(name)[1].ambiguous]
    assert not undecided, f"a discrete choice lies within the bounds: {undecided}"


BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
GRADS = ("d_hidden", "d_weight", "d_bias")
Edit = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Fault:
    """A wrong result, the cases it is wrong on, and the share of them on which the tolerance must
    notice."""

    name: str
    applies: Callable[[Case, Any], bool] = lambda case, o: True  # of a case and its settings
    groups: str = "AB"
    dtype: torch.dtype = F32
    share: float = 1.0
    told: Callable[[Case], Case] = lambda case: case  # the loss that is computed instead
    in_gradients: bool = False  # alone
    raw: Edit | None = None  # (n, V) the products' result
    edits: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)  # of results by name


def candidate(case: Case, fault: Fault) -> tuple[SimpleNamespace, dict[str, Tensor | None]]:
    """Output and gradients by name, each rounded once; right but for the fault."""
    want = reference_loss(fault.told(case), fault.raw)
    right, edit = known(case.name)[0] if fault.in_gradients else want, fault.edits.get
    names = ("loss", "logps", "entropies", "metrics")
    found = {name: edit(name, lambda x: x)(getattr(right, name)) for name in names}
    for name in names[:3]:
        found[name] = found[name].to(computed_in(case))
    grads: dict[str, Tensor | None] = {}
    for name in want.head.leaves:
        grad = edit(f"d_{name}", lambda x: x)(getattr(want, f"d_{name}"))
        grads[name] = None if name in case.frozen else grad.to(getattr(case, name).dtype)
    return SimpleNamespace(**found), grads


def accepted(case: Case, fault: Fault) -> bool:
    reference, bounds = known(case.name)
    try:
        assert_matches(*candidate(case, fault), reference, case, bounds)
    except AssertionError:
        return False
    return True


def gradients(edit: Edit, *names: str) -> dict[str, Any]:
    return {"edits": dict.fromkeys(names or GRADS, edit)}


def told(**changes: Any) -> dict[str, Any]:
    return {"told": lambda case: case.but(**changes)}


def config(**changes: Any) -> dict[str, Any]:
    return told(config=changes)


def through(dtype: torch.dtype) -> Edit:
    """A stop at another dtype on the way."""
    return lambda x: x.to(dtype).to(x.dtype)


def clips(case: Case, o: Any) -> bool:
    """By a range that is not symmetric, at the token."""
    return off_policy(case, o) and o.loss_type in CLIPPED and o.epsilon != o.epsilon_high


def off_policy(case: Case, o: Any) -> bool:
    return case.old_per_token_logps is not None


def given(name: str) -> Callable[[Case, Any], bool]:
    return lambda case, o: getattr(case, name) is not None


def other_head(case: Case, o: Any) -> bool:
    """The KL term is one over the vocabulary, from a head that is not the policy's own."""
    return o.beta != 0 and case.name not in ("H/same", "H/none")


def drops_a_token(case: Case, o: Any) -> bool:
    """The off-policy mask drops a counted token whose advantage is not 0."""
    if o.off_policy_mask_threshold is None or not off_policy(case, o):
        return False
    advantages = case.advantages if case.advantages.dim() == 2 else case.advantages[:, None]
    dropped = ~known(case.name)[0].evaluation.keeps[-1]
    return bool((dropped & (case.completion_mask != 0) & (advantages != 0)).any())


def swapped(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Low and high clip shares the wrong way round."""
    names = ("clip_ratio/low_mean", "clip_ratio/high_mean")
    other = dict(zip(names, reversed(names), strict=True))
    return {other.get(name, name): x for name, x in metrics.items()}


def swap_epsilons(case: Case) -> Case:
    o = settings(case)
    return case.but(config={"epsilon": o.epsilon_high, "epsilon_high": o.epsilon})


def padded_mean(case: Case) -> Case:
    """Each sequence divided by the padded length."""
    width = case.completion_mask.shape[1]
    return case.but(config={"loss_type": "dr_grpo", "max_completion_length": width})


FAULTS = [
    Fault("gradients x 1.001", **gradients(lambda x: 1.001 * x)),
    Fault("weight gradient x 1.001", **gradients(lambda x: 1.001 * x, "d_weight")),
    Fault("hidden gradient x 0.9995", **gradients(lambda x: 0.9995 * x, "d_hidden")),
    Fault("gradients through bfloat16", **gradients(through(BF16))),
    Fault("bias gradient lost", given("bias"), **gradients(torch.zeros_like, "d_bias")),
    Fault("float32 for float64", groups="CDFGH", dtype=F64, **gradients(through(F32))),
    Fault("logits in bfloat16", lambda case, o: o.logits_dtype == "float32", raw=through(BF16)),
    Fault("logits in float16", raw=through(torch.float16)),
    Fault("logits off by 2^-12 (TF32)", raw=lambda x: x * (1 + 2**-12 * torch.cos(1e4 * x))),
    Fault("last vocabulary lane lost",
          raw=lambda x: x.masked_fill(torch.arange(x.shape[1]) == x.shape[1] - 1, -1e4)),
    Fault("temperature 1 % off", raw=lambda x: 1.01 * x),
    Fault("entropy gradient dropped", lambda case, o: o.entropy_coef != 0, in_gradients=True,
          **config(entropy_coef=0.0)),
    Fault("epsilons swapped", clips, share=0.9, told=swap_epsilons),
    Fault("nothing clipped", clips, share=0.8, **config(epsilon=50.0, epsilon_high=50.0)),
    Fault("delta ignored", lambda case, o: clips(case, o) and o.delta is not None, share=0.5,
          **config(delta=None)),
    Fault("old logps ignored", off_policy, **told(old_per_token_logps=None)),
    Fault("old logps in bfloat16", off_policy,
          told=lambda case: case.but(old_per_token_logps=case.old_per_token_logps.bfloat16())),
    Fault("mean over the padded length", lambda case, o: o.loss_type == "grpo" and o.beta == 0,
          told=padded_mean),
    Fault("luspo as grpo", lambda case, o: o.loss_type == "luspo", **config(loss_type="grpo")),
    Fault("dapo as bnpo", lambda case, o: "items" in case.name and o.loss_type == "dapo", "D",
          **config(loss_type="bnpo")),
    Fault("KL without bias correction",
          lambda case, o: off_policy(case, o) and o.beta != 0 and o.use_bias_correction_kl
          and o.loss_type != "gmpo", **config(use_bias_correction_kl=False)),
    Fault("full KL of the other direction", other_head, "H", share=0.9,
          **told(others={"beta_of_divergence": 0.0})),
    Fault("full KL without a soft-cap of the reference",
          lambda case, o: o.teacher_final_logit_softcapping is not None, "H",
          **told(others={"teacher_final_logit_softcapping": None})),
    Fault("KL dropped", lambda case, o: off_policy(case, o) and o.beta != 0, **config(beta=0.0)),
    Fault("k2 for k3", lambda case, o: o.beta != 0 and o.kl_estimator == "k3",
          **config(kl_estimator="k2")),
    Fault("sequence ratio for token ratio",
          lambda case, o: off_policy(case, o) and o.importance_sampling_level == "token"
          and not TERMS[o.loss_type].per_sequence,
          **config(importance_sampling_level="sequence")),
    Fault("importance ratio ignored", given("importance_sampling_ratio"),
          **told(importance_sampling_ratio=None)),
    Fault("sampling logps ignored",
          lambda case, o: o.off_policy_mask_threshold is not None and off_policy(case, o)
          and case.sampling_per_token_logps is not None, share=0.5,
          **told(sampling_per_token_logps=None)),
    Fault("off-policy mask ignored", drops_a_token, **config(off_policy_mask_threshold=None)),
    Fault("top-entropy mask ignored", lambda case, o: o.top_entropy_quantile != 1,
          **config(top_entropy_quantile=1.0)),
    Fault("masked logps not 0", lambda case, o: bool((case.completion_mask == 0).any()),
          edits={"logps": lambda x: torch.where(x == 0, 1e-12, x)}),
    Fault("loss in bfloat16", share=0.9, edits={"loss": through(BF16)}),
    Fault("entropies in bfloat16", edits={"entropies": through(BF16)}),
    Fault("clip shares swapped", clips, share=0.8, edits={"metrics": swapped}),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_tolerance_rejects(fault: Fault) -> None:
    """And accepts what has no fault."""
    cases = [case for case in CASES.values() if case.group in fault.groups]
    cases = [case for case in cases if case.hidden.dtype == fault.dtype]
    cases = [case for case in cases if fault.applies(case, settings(case))]
    missed = [case.name for case in cases if accepted(case, fault)]
    assert cases
    assert len(missed) <= (1 - fault.share) * len(cases), f"of {len(cases)} missed: {missed[:5]}"
    assert all(accepted(case, Fault("none")) for case in cases)


def test_a_failure_names_the_worst_element() -> None:
    name = "A/dapo-t/off-policy/f32"
    output, grads = candidate(CASES[name], Fault("none"))
    grads["weight"][3, 5] += 1e-3
    message = rf"{name}: d_weight\[3, 5\]: got .* want .* allowed"
    with pytest.raises(AssertionError, match=message):
        assert_matches(output, grads, known(name)[0], CASES[name])


def test_clipped_branch_of_an_overflowing_ratio_has_no_gradient() -> None:
    case = CASES["F/overflow-clipped/dapo-t"]
    reference, _ = known(case.name)
    hit = (torch.arange(case.completion_mask.shape[1]) % 2 == 0) & (case.completion_mask != 0)
    assert torch.isfinite(reference.d_hidden).all()
    assert (reference.d_logps[hit] == 0).all()
    assert (reference.d_logps != 0).any()


def loss_of_three(kind: Any, **fields: Any) -> torch.Tensor:
    """The loss of one token with a ratio of 3 and a negative advantage."""
    now, one = torch.zeros(1, 1), torch.ones(1, 1)
    old = {"old_per_token_logps": now - 1.0986}
    config = LossConfig(loss_type=kind, max_completion_length=1, **fields)
    return policy_loss_from_logps(now, now, one, -one[0], config=config, **old).loss


def test_the_reference_has_every_loss_and_every_option() -> None:
    assert get_args(LossTypeName) == tuple(TERMS)
    clipped = [x for x in TERMS if loss_of_three(x) != loss_of_three(x, delta=2.0)]
    assert tuple(clipped) == CLIPPED
    for option in fields(LossConfig):
        if not option.name.startswith("vllm_"):  # of a ratio that the reference is given
            default = option.default
            if option.name == "max_completion_length":  # ours has none
                default = 512
            assert DEFAULTS[option.name] == default, option.name


def test_reference_knows_nothing_of_the_library() -> None:
    of_reference = ("reference", "reference_head", "reference_terms", "tolerance")
    for module in (*of_reference, "cases", "case_builder", "random_cases"):
        source = inspect.getsource(__import__(f"tests.support.{module}", fromlist=[module]))
        assert not re.search(r"(import|from) grpo_kernels", source)
