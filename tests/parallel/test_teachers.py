"""A student and its teacher, each divided in its own way over gloo processes: gradients equal those
of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from grpo_kernels import Head, LossConfig, Run, grpo_loss, linear_divergence
from tests.support import parallel_cases as cases
from tests.support.parallel_cases import LOSSES, SETUPS, Batch, TinyModel, relative_error
from tests.support.ranks import run_ranks
from tests.support.reference_terms import divergence
from tests.support.zero3 import CONFIG, deepspeed, needs_deepspeed

EXACT, EXACT_ZERO3 = 1e-13, 2e-7  # of the largest entry; DeepSpeed keeps gradients in float32
KL = {"beta": 0.3, "kl_estimator": "full"}
Gradients = dict[str, Tensor]

ROOT, OWN = "head in the root unit", "head its own unit"
FROM_OWN = "FSDP2, head its own unit"
FROM_ROOT = "FSDP2, head in the root unit"
BETAS = {"reverse_kl": 1.0, "forward_kl": 0.0, "jsd": 0.5}

# (the student's way, the teacher's, what is computed, engine, tied)
CASES = (
    ("DDP", "whole", "jsd", "auto", False),
    ("DDP", OWN, "reverse_kl", "lean", True),
    (FROM_OWN, OWN, "jsd", "auto", False),
    (f"{FROM_OWN}, after the forward", OWN, "jsd", "two_pass", False),
    (FROM_OWN, OWN, "forward_kl", "lean", False),
    (FROM_ROOT, ROOT, "reverse_kl", "auto", False),
    (FROM_ROOT, ROOT, "jsd", "two_pass", False),
    (FROM_ROOT, ROOT, "jsd", "lean", True),
    (FROM_OWN, OWN, "loss", "auto", False),
    (FROM_OWN, OWN, "loss", "two_pass", False),
    (FROM_ROOT, ROOT, "loss", "auto", True),
    ("DDP", ROOT, "loss", "lean", False),
)


def make_teacher() -> TinyModel:
    """Another model than the student, with a bias."""
    teacher = cases.make_model(torch.float64, LOSSES["off-policy"], bias=True)
    with torch.no_grad():
        for x in teacher.parameters():
            x.mul_(0.7).add_(0.1)
    return teacher.requires_grad_(False)


def divided_teacher(way: str) -> TinyModel:
    teacher = make_teacher()
    if way == OWN:
        fully_shard(teacher.lm_head)
    if way != "whole":
        fully_shard(teacher)
    return teacher


def make_batch(rank: int) -> Batch:
    return cases.make_batch(rank, 2, torch.float64, last_empty=False)


def gradients(student_way: str, teacher_way: str, what: str, engine: str, tied: bool) -> Gradients:
    """Of one run on this rank."""
    run = cases.Run(SETUPS[student_way], LOSSES["off-policy"], torch.device("cpu"), torch.float64)
    student = cases.make_model(torch.float64, run.loss, tied=tied)
    teacher = divided_teacher(teacher_way)
    wrapped, batch = run.setup.wrap(student, None), run.batch
    with torch.no_grad():
        states = teacher(batch.tokens)

    def then(hidden: Tensor) -> Tensor:
        heads = student.lm_head, hidden, states, teacher.lm_head
        return score(*heads, batch, run.items, what, engine)

    loss = wrapped(batch.tokens, then) if run.setup.inside else then(wrapped(batch.tokens))
    loss.backward()
    return cases.gradients_of(student)


def score(
    head: Any, hidden: Tensor, states: Tensor, teacher_head: nn.Module, batch: Batch, items: float,
    what: str, engine: str,
) -> Tensor:  # fmt: skip
    run = Run(engine)
    if what == "loss":
        given = cases.arguments(LOSSES["off-policy"], batch, items)
        reference, config = (states, teacher_head), LossConfig(**KL)
        out = grpo_loss(hidden, head, config=config, reference=reference, run=run, **given)
        assert engine in ("auto", out.engine)
        return out.loss
    given = {"completion_mask": batch.completion_mask, "divergence": what, "run": run}
    return linear_divergence(hidden, head, (states, teacher_head), **given).divergence.sum() / items


def truth(what: str, tied: bool) -> Gradients:
    """The mean over ranks, with all logits of the divergence."""
    student = cases.make_model(torch.float64, LOSSES["off-policy"], tied=tied)
    teacher = make_teacher()
    items = cases.items_per_rank(2, last_empty=False)
    for rank in range(2):
        batch = make_batch(rank)
        hidden, states = student(batch.tokens), teacher(batch.tokens)
        if what == "loss":
            given = cases.arguments(LOSSES["off-policy"], batch, items)
            given["reference"] = states, Head(teacher.lm_head.weight, teacher.lm_head.bias)
            weight, run = student.lm_head.weight, Run(backend="torch")
            loss = grpo_loss(hidden, weight, config=LossConfig(**KL), run=run, **given).loss
        else:
            pairs = (student, hidden), (teacher, states)
            log_p, log_q = (m.lm_head(x).log_softmax(-1).flatten(0, 1) for m, x in pairs)
            each = divergence(BETAS[what], log_p, log_q) * batch.completion_mask.flatten()
            loss = each.sum() / items
        (loss / 2).backward()
    return cases.gradients_of(student)


def assert_those_of_one_process(
    found: list[list[Gradients]], wanted: list[Gradients], bound: float
) -> None:
    for of_rank in found:
        for i, (got, want) in enumerate(zip(of_rank, wanted, strict=True)):
            errors = relative_error(got, want)
            assert max(errors.values()) < bound, f"case {i}: {errors}"


def run_cases(rank: int, world_size: int) -> list[Gradients]:
    return [gradients(*case) for case in CASES]


def test_gradients_are_those_of_one_process() -> None:
    wanted = [truth(what, tied) for _, _, what, _, tied in CASES]
    assert_those_of_one_process(run_ranks(run_cases, 2), wanted, EXACT)


ZERO3 = [("jsd", "auto"), ("reverse_kl", "lean"), ("loss", "auto"), ("loss", "two_pass")]


def by_zero3(what: str, engine: str) -> Gradients:
    """Both models divided, the teacher's without an optimizer."""
    package, batch = deepspeed(), make_batch(torch.distributed.get_rank())
    items = cases.items_per_rank(2, last_empty=False)
    student, teacher = cases.make_model(torch.float64, LOSSES["off-policy"]), make_teacher()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.0)
    trained, *_ = package.initialize(model=student, config=CONFIG, optimizer=optimizer)
    frozen, *_ = package.initialize(model=teacher, config=CONFIG)
    assert teacher.lm_head.weight.numel() == student.lm_head.weight.numel() == 0
    with torch.no_grad():
        states = frozen(batch.tokens)

    def then(hidden: Tensor) -> Tensor:
        return score(student.lm_head, hidden, states, teacher.lm_head, batch, items, what, engine)

    trained.backward(trained(batch.tokens, then))
    assert teacher.lm_head.weight.numel() == student.lm_head.weight.numel() == 0
    found = {
        name: package.utils.safe_get_full_grad(x).clone() for name, x in student.named_parameters()
    }
    trained.destroy()
    frozen.destroy()
    return found


def run_zero3(rank: int, world_size: int) -> list[Gradients]:
    return [by_zero3(what, engine) for what, engine in ZERO3]


@needs_deepspeed
def test_gradients_under_zero3_are_those_of_one_process() -> None:
    wanted = [truth(what, False) for what, _ in ZERO3]
    assert_those_of_one_process(run_ranks(run_zero3, 2), wanted, EXACT_ZERO3)


def heads() -> tuple[nn.Linear, nn.Linear, Tensor, Tensor]:
    return nn.Linear(6, 11), nn.Linear(4, 11), torch.randn(2, 3, 6), torch.randn(2, 3, 4)


def loss_with(reference: Any, head: Any = None) -> Tensor:
    own, _, hidden, states = heads()
    given = torch.zeros(2, 3, dtype=torch.long), None, torch.ones(2)
    config, reference = LossConfig(**KL), (states, reference)
    return grpo_loss(hidden, head or own, *given, config=config, reference=reference).loss


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"head": nn.Linear(4, 11)})
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["head"]), model)
    return model["head"]


def hooked() -> nn.Module:
    made = nn.Linear(4, 11)
    made.register_forward_hook(lambda module, args, output: output)
    return made


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (adapted, ValueError, "expected no active adapter"),
        (hooked, TypeError, "expected no forward hook"),
        (lambda: nn.Embedding(11, 4), TypeError, "expected an nn.Linear with its own forward"),
    ],
    ids=["adapter", "hook", "embedding"],
)
def test_a_head_that_cannot_be_compared_with_is_refused(
    make: Any, error: type[Exception], message: str
) -> None:
    head, _, hidden, states = heads()
    with pytest.raises(error, match=f"reference.head: {message}"):
        loss_with(make())
    with pytest.raises(error, match=f"teacher.head: {message}"):
        linear_divergence(hidden, head, (states, make()))


def test_of_heads_with_other_ids_those_count_that_both_have() -> None:
    head, _, hidden, states = heads()
    found = linear_divergence(hidden, head, (states, nn.Linear(4, 12)), entropy=True)
    assert found.divergence.shape == (2, 3) and {*found.given} == {"divergence", "entropies"}
    with pytest.raises(ValueError, match=r"reference\.head\.weight: expected shape"):
        loss_with(nn.Linear(4, 12))


def test_an_adapter_that_is_off_and_the_layer_within_are_fine() -> None:
    head, _, hidden, states = heads()
    layer = adapted()
    nn.init.normal_(layer.lora_B["default"].weight)
    within = linear_divergence(hidden, head, (states, layer.base_layer)).divergence
    layer.enable_adapters(False)
    assert torch.equal(linear_divergence(hidden, head, (states, layer)).divergence, within)


def test_arguments_that_the_heads_have_themselves_are_refused() -> None:
    head, teacher, hidden, states = heads()
    bias = torch.zeros(11)
    for name, *both in (
        (r"head\.bias", Head(head, bias), teacher),
        (r"teacher\.head\.bias", head, Head(teacher, bias)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"^{name}: expected None"):
            linear_divergence(hidden, both[0], (states, both[1]))
    with pytest.raises(ValueError, match=r"reference\.head\.bias: expected None"):
        loss_with(Head(teacher, bias))


def test_a_plain_weight_takes_a_module_to_compare_with() -> None:
    found = []
    for as_module in (True, False):
        torch.manual_seed(0)
        teacher, weight = nn.Linear(4, 11), torch.randn(11, 6)
        found.append(
            loss_with(teacher if as_module else Head(teacher.weight, teacher.bias), Head(weight))
        )
    assert torch.equal(*found)
