"""After a call nothing of it is held: Python's cyclic collector is off, and tensors and graphs are
counted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_kernels import (
    GRPOLoss,
    Head,
    LoRA,
    Run,
    grpo_loss,
    linear_divergence,
    linear_logprob,
    policy_expectation,
    policy_loss_from_logps,
    presets,
    token_level,
    topk_divergence,
)

CALLS = 20


class Saved:
    """A tensor that a node of a graph has saved; gone when the node is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


@contextmanager
def counting() -> Iterator[Callable[[], tuple[int, int, int]]]:
    """Inside, no cycle is collected; the function counts tensors, their bytes, and tensors saved by
    live nodes."""
    saved: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Saved:
        saved.add(found := Saved(tensor))
        return found

    def count() -> tuple[int, int, int]:
        tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
        return len(tensors), sum(x.numel() * x.element_size() for x in tensors), len(saved)

    gc.collect()
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.tensor):
            yield count
    finally:
        gc.enable()


def assert_nothing_is_held(call: Callable[[], Any]) -> None:
    with counting() as count:
        call()
        call()
        before = count()
        for _ in range(CALLS - 2):
            call()
        after = count()
    assert before == after, f"(tensors, bytes, saved) after call 2 and {CALLS}: {before}, {after}"


B, T, H, V, K = 2, 5, 8, 24, 6
IDS = torch.arange(B * T).view(B, T) % V
MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
ADVANTAGES = torch.tensor([1.0, -0.5])


def operands() -> tuple[Tensor, Tensor]:
    return torch.randn(B, T, H, requires_grad=True), torch.randn(V, H, requires_grad=True)


def backward(result: Tensor) -> None:
    if result.requires_grad:
        result.sum().backward()


def loss(head: Callable[[Tensor], Any] = lambda weight: weight, **more: Any) -> Callable[[], None]:
    def call() -> None:
        hidden, weight = operands()
        backward(grpo_loss(hidden, head(weight), IDS, MASK, ADVANTAGES, **more).loss)

    return call


def with_lora(weight: Tensor) -> Head:
    a, b = torch.randn(2, H, requires_grad=True), torch.randn(V, 2, requires_grad=True)
    return Head(weight, lora=LoRA(a, b, 0.5))


def of_module() -> Callable[[], None]:
    """The same module in every call: what one leaves on it is there in the next."""
    module = nn.Linear(H, V)

    def call() -> None:
        backward(grpo_loss(operands()[0], module, IDS, MASK, ADVANTAGES).loss)
        module.zero_grad()

    return call


def scores(**more: Any) -> Callable[[], None]:
    def call() -> None:
        found = linear_logprob(*operands(), IDS, completion_mask=MASK, **more)
        backward(found.logps + (0.0 if found.entropies is None else found.entropies))

    return call


def expected() -> None:
    """Rightly, then wrongly."""
    hint = policy_expectation(presets.DAPO, completion_mask=MASK, advantages=ADVANTAGES)
    for expected in (hint, torch.ones(B, T)):
        found = linear_logprob(*operands(), IDS, completion_mask=MASK, expected=expected)
        backward(-(found.logps * ADVANTAGES[:, None] * MASK) / MASK.sum())


def divergence(**more: Any) -> Callable[[], None]:
    def call() -> None:
        teacher = torch.randn(B, T, H + 1), torch.randn(V, H + 1)
        backward(linear_divergence(*operands(), teacher, completion_mask=MASK, **more).divergence)

    return call


def top_k() -> None:
    listed = torch.arange(K).expand(B, T, K), torch.randn(B, T, K).log_softmax(-1)
    backward(topk_divergence(*operands(), *listed, completion_mask=MASK).divergence)


def own(tokens: Any) -> Tensor:
    return -tokens.logps * tokens.advantages


def own_of_sequences(tokens: Any) -> Tensor:
    return -tokens.logps * tokens.advantages * tokens.logps.detach().mean()


def from_logps() -> None:
    logps, entropies = (torch.rand(B, T, requires_grad=True) for _ in range(2))
    backward(policy_loss_from_logps(-logps, entropies, MASK, ADVANTAGES).loss)


def unused() -> None:
    """A forward whose backward never comes."""
    hidden, head = operands()
    grpo_loss(hidden, head, IDS, MASK, ADVANTAGES)
    linear_logprob(hidden, head, IDS)
    linear_divergence(hidden, head, (torch.randn(B, T, H), torch.randn(V, H)))


def refused() -> None:
    """A gradient that may not be differentiated again."""
    hidden, head = operands()
    for result in (grpo_loss(hidden, head, IDS, MASK, ADVANTAGES).loss,
                   linear_logprob(hidden, head, IDS).logps.sum()):  # fmt: skip
        torch.autograd.grad(result, hidden, create_graph=True)


KEPT = torch.cat([IDS[..., None], (IDS[..., None] + torch.arange(1, K)) % V], dim=-1)
OLD = {"old_per_token_logps": torch.full((B, T), -3.0)}
CASES: dict[str, Callable[[], None]] = {
    **{f"loss, {x}": loss(run=Run(backend=x)) for x in ("torch", "cpp")},
    **{f"loss, {x}": loss(run=Run(x), **OLD) for x in ("one_pass", "two_pass", "lean")},
    "loss, frozen": loss(Tensor.detach),
    "loss, LoRA": loss(with_lora),
    "loss, sequences": loss(loss_type="grpo", importance_sampling_level="sequence", **OLD),
    "loss, KL": loss(beta=0.1, ref_per_token_logps=torch.full((B, T), -3.0)),
    "loss, a module": of_module(),
    "loss, kept sets": loss(kept_ids=KEPT),
    "loss, candidates": loss(
        sampling_topk_ids=IDS[..., None], sampling_topk_logps=torch.full((B, T, 1), -1.0)
    ),
    "objective by token": loss(objective=token_level(own)),
    "objective by sequence": loss(objective=own_of_sequences),
    "scores": scores(),
    "scores, with entropies out": scores(entropy=False),
    "scores, everything": scores(extras=("log_sum_sq_probs", "mean_logits", "is_top1")),
    "scores, kept sets": scores(kept_ids=KEPT),
    "scores, more ids": scores(topk_ids=IDS[..., None]),
    "expected": expected,
    **{f"divergence, {x}": divergence(divergence=x) for x in ("reverse_kl", "forward_kl")},
    "divergence, with ids": divergence(completion_ids=IDS, entropy=True),
    "top-k divergence": top_k,
    "from log-probabilities": from_logps,
    "unused": unused,
    "refused": refused,
}


@pytest.mark.parametrize("name", CASES)
def test_calls_with_tensors(name: str) -> None:
    assert_nothing_is_held(CASES[name])


def test_what_is_held_is_seen() -> None:
    """A closure that names itself holds the graph: the counts rise."""

    def call() -> None:
        result = linear_logprob(*operands(), IDS).logps

        def again(n: int) -> Any:
            return result if n == 0 else again(n - 1)

        again(1)

    with pytest.raises(AssertionError, match="after call 2"):
        assert_nothing_is_held(call)
    gc.collect()


# Models of transformers


@pytest.mark.parametrize(
    ("kind", "options"),
    [("qwen3", {}), ("qwen3", {"layout": "padded", "zero_advantage": "train"}), ("mamba", {})],
)
def test_calls_with_a_model(kind: str, options: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    from grpo_kernels.transformers import causal_lm_loss, completion_logprobs, head_inputs
    from tests.support import tiny_architectures as tiny
    from tests.support.training_step import batch

    model, given = tiny.text_model(kind, torch.float32), batch()
    scored = {name: x for name, x in given.items() if name != "advantages"}
    layout = {name: x for name, x in options.items() if name == "layout"}

    def trained() -> None:
        causal_lm_loss(model, GRPOLoss(), **given, **options)  # a forward alone
        causal_lm_loss(model, GRPOLoss(), **given, **options).loss.backward()
        model.zero_grad()

    def logprobs() -> None:
        completion_logprobs(model, **scored, **layout).logps.sum().backward()
        with torch.no_grad():
            completion_logprobs(model, **scored, **layout)
        model.zero_grad()

    def head() -> None:
        with head_inputs(model) as found:
            model(input_ids=given["input_ids"], attention_mask=given["attention_mask"])
        states = found.hidden[:, :-1]
        linear_logprob(states, found.head(states), given["input_ids"][:, 1:]).logps.sum().backward()
        model.zero_grad()

    for call in (trained, logprobs, head):
        assert_nothing_is_held(call)


def test_no_parameter_of_an_earlier_call_is_held() -> None:
    """A node that gathers a parameter's gradient knows its shape: it must be gone when the
    parameter is replaced."""
    pytest.importorskip("transformers")
    from grpo_kernels.transformers import causal_lm_loss
    from tests.support import tiny_architectures as tiny
    from tests.support.training_step import batch

    model = tiny.text_model("qwen2", torch.float32)
    with counting():
        for size in (97, 110, 103):
            model.resize_token_embeddings(size)
            causal_lm_loss(model, GRPOLoss(), **batch()).loss.backward()
            assert model.get_input_embeddings().weight.grad.shape[0] == size
            model.zero_grad()


# Trainers

TRAINERS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "exact KL": {"kl_estimator": "full", "beta": 0.04},
    "several steps": {"num_iterations": 2, "beta": 0.04},
    "TRL's micro-batches": {"regroup": False},
    "skipped": {"zero_advantage": "skip", "loss_type": "dapo"},
    "patched": {},
    "stock": {},
    "distillation": {
        "beta": 0.5, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "max_completion_length": 12,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINERS)
def test_steps_of_a_trainer(name: str) -> None:
    trl = pytest.importorskip("trl")
    from transformers import TrainerCallback

    from benchmarks import tiny_models
    from grpo_kernels.trl import FusedDistillationTrainer, FusedGRPOTrainer, patch_trl, unpatch_trl
    from tests.support.trl_training import Written, train

    class Counted(TrainerCallback):
        found: list[tuple[int, int, int]] = []  # noqa: RUF012

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.found.append(count())

    class Distilled(Written, FusedDistillationTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> list[list[int]]:
            return super()._generate_single_turn(*args, **kwargs)[0]  # type: ignore[no-any-return]

    trainer = trl.GRPOTrainer if name in ("stock", "patched") else FusedGRPOTrainer
    options = dict(TRAINERS[name])
    if name == "distillation":
        teacher = tiny_models.model("qwen3", seed=5, num_hidden_layers=1)
        trainer = Distilled
        options |= {"config_class": trl.DistillationConfig, "teacher_model": teacher}
    if name == "patched":
        patch_trl()
    try:
        with counting() as count:
            train(trainer, 6, callbacks=[Counted()], **options)
    finally:
        unpatch_trl()
    for kind in (0, 2):  # tensors, saved tensors; TRL keeps two numbers of its logs
        counts = [x[kind] for x in Counted.found]
        assert max(counts[4:]) <= max(counts[2:4]), counts


def test_verls_forward() -> None:
    pytest.importorskip("verl")
    from benchmarks import tiny_models
    from tests.support import verl_peer

    with verl_peer.patched() as patch:
        model = verl_peer.with_own_class(tiny_models.model("qwen3"))
        ids = torch.randint(2, 97, (2, 9))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        fused = {"use_fused_kernels": True, "fused_kernels_backend": "grpo_kernels"}
        patch.apply_monkey_patch(model, use_remove_padding=False, **fused)

        def call() -> None:
            output = model(**inputs, temperature=1.0, return_dict=True, use_cache=False)
            (output.log_probs + output.entropy).sum().backward()
            model.zero_grad()

        assert_nothing_is_held(call)
