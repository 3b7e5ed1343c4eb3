"""A head, in one process: its module in the place of its weight, with hooks and PEFT's adapters;
`Head` with constants and an adapter of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.testing import assert_close

from grpo_kernels import (
    Head,
    LoRA,
    LossOutput,
    Run,
    grpo_loss,
    linear_divergence,
    linear_logps,
    topk_divergence,
)
from grpo_kernels.typing import BackendName, EngineName
from tests.support.measure import count_flops

BF16, FP16 = torch.bfloat16, torch.float16
B, T, H, V = 3, 5, 8, 19
IDS = torch.arange(B * T).view(B, T) * 7 % V
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
ADVANTAGES = torch.tensor([1.3, -0.7, 0.4], dtype=torch.float64)
OLD = -3.0 + torch.linspace(-0.5, 0.5, B * T, dtype=torch.float64).view(B, T)


def states() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(B, T, H, generator=generator, dtype=torch.float64).requires_grad_()


def linear(bias: bool = True) -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(H, V, bias=bias, dtype=torch.float64)


def logps_of(head: Any, hidden: Tensor) -> Tensor:
    return linear_logps(hidden, head, IDS).logps


def plain_logps(head: Any, hidden: Tensor) -> Tensor:
    return torch.log_softmax(head(hidden), dim=-1).gather(-1, IDS[..., None])[..., 0]


def assert_refused(head: Any, message: str, error: type[Exception] = TypeError) -> None:
    with pytest.raises(error, match=f"^head{message}"):
        logps_of(head, states())


@pytest.mark.parametrize("bias", [True, False])
def test_every_call_takes_a_module_or_a_head_around_one(bias: bool) -> None:
    """With the results and gradients of a call with the module's parameters."""
    module, hidden = linear(bias), states()
    teacher = 1.3 * hidden.detach(), Head(torch.randn(V, H, dtype=torch.float64))
    listed = IDS[..., None], torch.full((B, T, 1), -1.0, dtype=torch.float64)
    calls: list[Callable[[Any], Any]] = [
        lambda head: linear_logps(hidden, head, IDS, completion_mask=MASK, temperature=0.8),
        lambda head: grpo_loss(hidden, head, IDS, MASK, ADVANTAGES, old_per_token_logps=OLD),
        lambda head: linear_divergence(hidden, head, teacher),
        lambda head: topk_divergence(hidden, head, *listed),
    ]

    def results(out: Any) -> dict[str, Tensor]:
        named = {"loss": out.loss} if isinstance(out, LossOutput) else out.given
        total = sum(x.sum() for x in named.values() if x.requires_grad)
        grads = torch.autograd.grad(total, [hidden, *module.parameters()])
        return named | {f"gradient {i}": x for i, x in enumerate(grads)}

    constants = {"final_logit_softcapping": 2.0, "logit_scale": 1.5}
    for call in calls:
        want = results(call(Head(module.weight, module.bias)))
        for given in (Head(module), module):
            assert_close(results(call(given)), want, rtol=0, atol=0)
        want = results(call(Head(module.weight, module.bias, **constants)))
        assert_close(results(call(Head(module, **constants))), want, rtol=0, atol=0)


class NormedHead(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, nn.functional.normalize(self.weight))


def test_what_is_not_a_linear_head_is_refused_by_name() -> None:
    for head, named in (
        (nn.Embedding(V, H), "torch.nn.modules.sparse.Embedding"),
        (NormedHead(H, V), "NormedHead"),
        (nn.Sequential(nn.Linear(H, V)), "Sequential"),
    ):
        assert_refused(head, f": expected an nn.Linear with its own forward.*got .*{named}")


def test_a_forward_that_was_put_on_the_head_itself_is_not_left_out_in_silence() -> None:
    head = linear()
    plain = head.forward
    head.forward = lambda x: 2 * plain(x)  # type: ignore[method-assign]
    assert_refused(head, ": expected .*got one whose forward was replaced")
    hooks = pytest.importorskip("accelerate.hooks")
    hooked = hooks.add_hook_to_module(linear(), hooks.ModelHook())
    assert_close(logps_of(hooked, states()), logps_of(linear(), states()))


def with_pre_hook(hook: Callable[..., Any], **options: Any) -> nn.Linear:
    head = linear()
    head.register_forward_pre_hook(hook, **options)
    return head


# whose weight, or input, something makes before the forward
MADE: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": lambda: parametrizations.spectral_norm(linear()),
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "pruned": lambda: prune.random_unstructured(linear(), "weight", 0.3),
    "input": lambda: with_pre_hook(lambda module, args: 1.5 * args[0]),
    "input, with names": lambda: with_pre_hook(
        lambda m, args, kwargs: ((-args[0],), kwargs), with_kwargs=True
    ),
    "observed": lambda: with_pre_hook(lambda m, args, kwargs: None, with_kwargs=True),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("case", MADE)
def test_what_happens_before_the_forward_happens_before_a_score(case: str) -> None:
    """Scores, gradients and state, a step later: a weight made before is stale."""
    ours, theirs = MADE[case](), MADE[case]()
    theirs.load_state_dict(ours.state_dict())
    for head in (ours, theirs):
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.mul_(1.3).add_(0.1)
    hidden = states()
    logps, want = logps_of(ours, hidden), plain_logps(theirs, hidden)
    assert_close(logps, want, rtol=1e-12, atol=1e-12)
    found, expected = (
        torch.autograd.grad(x.sum(), [hidden, *head.parameters()])
        for x, head in ((logps, ours), (want, theirs))
    )
    assert_close(found, expected, rtol=1e-10, atol=1e-11)
    # one power iteration, not two
    assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-12, atol=1e-12)


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def test_hooks_that_would_be_handed_logits_are_refused_by_name() -> None:
    head = linear()
    for register, kind in (
        ("register_forward_hook", "forward hook"),
        ("register_full_backward_hook", "backward hook"),
        ("register_full_backward_pre_hook", "backward pre-hook"),
    ):
        handle = getattr(head, register)(double)
        message = rf": expected no {kind}, .*got {__name__}\.double"
        assert_refused(head, message)
        with pytest.raises(TypeError, match=f"^head{message}"):
            grpo_loss(states(), head, IDS, MASK, ADVANTAGES)
        handle.remove()
    assert logps_of(head, states()).requires_grad


def test_pre_hooks_that_give_more_than_hidden_states_are_refused() -> None:
    head = with_pre_hook(lambda m, args, kwargs: (args, {"names": 1}), with_kwargs=True)
    assert_refused(head, r": expected its forward pre-hooks to return one input, got .*'names'\]")
    layer = peft_head(2)
    layer.base_layer.register_forward_pre_hook(lambda module, args: args)
    assert_refused(layer, r"\.base_layer: expected no forward pre-hook, .*lambda")


def test_a_head_that_accelerate_has_offloaded_is_told_what_to_do() -> None:
    accelerate = pytest.importorskip("accelerate")
    head = linear()
    accelerate.cpu_offload(head, execution_device="cpu")
    says = ": expected its weight on a device, .*device_map.*causal_lm_loss"
    assert_refused(head, says, ValueError)


def peft_head(*ranks: int, bias: bool = False, **options: Any) -> Any:
    """PEFT's layer around a head, with active random adapters a0, a1, ... of these ranks."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    model = nn.ModuleDict({"lm_head": nn.Linear(H, V, bias=bias, dtype=torch.float64)})
    names = [f"a{i}" for i in range(len(ranks))]
    for name, rank in zip(names, ranks, strict=True):
        config = peft.LoraConfig(r=rank, lora_alpha=3, target_modules=["lm_head"], **options)
        peft.inject_adapter_in_model(config, model, adapter_name=name)
    layer: Any = model["lm_head"]
    layer.set_adapter(names)
    layer.double()
    with torch.no_grad():
        for name, x in layer.named_parameters():
            if "lora_" in name:
                x.normal_()
    return layer


PEFT: dict[str, Callable[[], Any]] = {
    "rank-stabilised, bias of head and adapter": lambda: peft_head(
        4, bias=True, use_rslora=True, lora_bias=True
    ),
    "two with biases": lambda: peft_head(2, 1, bias=True, lora_bias=True),
    "dropout": lambda: peft_head(3, lora_dropout=0.4),
    "two with dropout, evaluated": lambda: peft_head(2, 2, lora_dropout=0.4).eval(),
}


@pytest.mark.parametrize("case", PEFT)
@pytest.mark.parametrize("base_trains", [False, True])
def test_peft_adapters_on_the_head_have_the_gradients_of_pefts_own_forward(case, base_trains):
    head, hidden = PEFT[case](), states()
    head.base_layer.requires_grad_(base_trains)
    torch.manual_seed(9)  # of the dropout
    want = plain_logps(head, hidden)
    torch.manual_seed(9)
    logps = logps_of(head, hidden)
    assert_close(logps, want, rtol=1e-12, atol=1e-12)
    leaves = [hidden, *[x for x in head.parameters() if x.requires_grad]]
    slopes = torch.linspace(-1.0, 1.0, B * T, dtype=torch.float64).view(B, T)
    found = torch.autograd.grad(logps, leaves, slopes)
    for x, y in zip(found, torch.autograd.grad(want, leaves, slopes), strict=True):
        assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_merged_and_disabled_adapters_mean_the_base_weight_alone() -> None:
    head, hidden, close = peft_head(2, 3), states(), {"rtol": 1e-10, "atol": 1e-11}
    active = logps_of(head, hidden)
    head.merge()
    assert_close(logps_of(head, hidden), active, **close)
    head.enable_adapters(False)
    off = logps_of(head, hidden)
    assert not head.merged
    assert_close(off, plain_logps(head.base_layer, hidden), **close)
    assert float((off - active).abs().max().detach()) > 0.1
    head.enable_adapters(True)
    assert_close(logps_of(head, hidden), active, **close)
    head.set_adapter(["a1"])
    assert_close(logps_of(head, hidden), plain_logps(head, hidden), **close)


def test_adapters_that_are_not_plain_lora_are_refused_by_name() -> None:
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"lm_head": nn.Linear(H, V)})
    peft.inject_adapter_in_model(peft.LoHaConfig(r=2, target_modules=["lm_head"]), model)
    own = LoRA(torch.zeros(1, H), torch.zeros(V, 1))
    for head, error, message in (
        (peft_head(2, use_dora=True), ValueError,
         "adapters that are plain LoRA, got DoraLinear.* as 'a0'"),
        (peft_head(2, 2, lora_dropout=0.4), ValueError,
         "a single active adapter if it has dropout, got 2"),
        (Head(peft_head(2), lora=own), ValueError, "None, since PEFT's adapters"),
        (model["lm_head"], TypeError, ".*, got peft.tuners.loha.layer.Linear"),
    ):  # fmt: skip
        assert_refused(head, rf"(\.lora)?: expected {message}", error)


WEIGHT = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
CONSTANTS: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
    (ValueError, "final_logit_softcapping", (0.0, -30.0, math.nan)),
    (TypeError, "final_logit_softcapping", ("30", True)),
    (ValueError, "logit_scale", (math.inf,)),
    (TypeError, "logit_scale", (None, np.array([0.5]), torch.tensor(0.5))),
    (ValueError, "logits_dtype", ("bfloat16", torch.float32)),
]


def test_wrong_constants_are_refused_where_it_is_made() -> None:
    for error, name, values in CONSTANTS:
        for value in values:
            with pytest.raises(error, match=rf"^{name}: expected .+, got "):
                Head(WEIGHT, **{name: value})


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean"])
@pytest.mark.parametrize(
    ("base", "dtype"), [(BF16, BF16), (FP16, FP16), (FP16, torch.float32)], ids=str
)
def test_an_adapter_of_a_16_bit_head_rounds_its_own_first_product_alone(
    base: torch.dtype, dtype: torch.dtype, engine: EngineName, backend: BackendName
) -> None:
    """With what that product rounds in the truth, too, the log-probabilities are those of fp32;
    gradients are those of the merged head."""
    n, width, vocab, rank, scaling = 12, 16, 50, 3, 0.6
    g = torch.Generator().manual_seed(3)
    shapes = (1, n, width), (vocab, width)
    hidden, weight = (torch.randn(shape, generator=g).to(base) for shape in shapes)
    shapes = (rank, width), (vocab, rank)
    a, b = ((torch.randn(x, generator=g) * 0.4).to(dtype).requires_grad_() for x in shapes)
    hidden, ids = hidden.requires_grad_(), torch.randint(vocab, (1, n), generator=g)
    head, advantages = Head(weight, lora=LoRA(a, b, scaling)), torch.ones(1, n)

    with torch.no_grad():  # what the adapter's own first product rounds is not the head's affair
        u = scaling * (hidden.to(dtype) @ a.T)
        logits = hidden.double() @ weight.double().T + u.double() @ b.double().T
        want = torch.log_softmax(logits, -1).gather(2, ids[..., None])[..., 0]
        found = linear_logps(hidden, head, ids, run=Run(backend=backend))
    torch.testing.assert_close(found.logps.double(), want, rtol=0, atol=3e-6)

    given, old = (hidden, head, ids, None, advantages), want.float()
    out = grpo_loss(*given, old_per_token_logps=old, run=Run(engine, backend))
    out.loss.backward()
    leaves = [x.detach().double().requires_grad_() for x in (hidden, a, b)]
    logits = leaves[0] @ (weight.double() + scaling * leaves[2] @ leaves[1]).T
    logps = torch.log_softmax(logits, -1).gather(2, ids[..., None])[..., 0]
    (-torch.exp(logps - logps.detach()).mean()).backward()
    for got, exact in zip((hidden, a, b), leaves, strict=True):
        assert got.grad.dtype == got.dtype
        bound = 2.0**-7 * float(exact.grad.abs().amax())
        torch.testing.assert_close(got.grad.double(), exact.grad, rtol=0, atol=bound)


@pytest.mark.parametrize(("trains_head", "products"), [(False, 4), (True, 6)])
def test_no_product_of_the_two_factors_is_made(trains_head: bool, products: int) -> None:
    """Besides the head's there are three products of B and three of A."""
    n, vocab, width, rank = 24, 90, 20, 3
    hidden = torch.randn(n, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=trains_head)
    a, b = (torch.randn(shape, requires_grad=True) for shape in ((rank, width), (vocab, rank)))
    head, ids = Head(weight, lora=LoRA(a, b)), torch.randint(vocab, (n,))

    def step() -> None:
        scores = linear_logps(hidden, head, ids, entropy=False, expected=torch.ones(n))
        scores.logps.sum().backward()

    assert count_flops(step) == products * n * vocab * width + 6 * n * rank * (vocab + width)


def test_an_adapter_that_does_not_fit_is_refused() -> None:
    hidden, weight, ids = torch.randn(3, 8), torch.randn(10, 8), torch.zeros(3, dtype=torch.long)
    a, b = torch.randn(2, 8), torch.randn(10, 2)
    wrong = {
        r"lora: expected a LoRA, got tuple": (a, b),
        r"lora\.a: expected shape \(r, H\) = \(2, 8\)": LoRA(torch.randn(2, 7), b),
        r"lora\.b: expected shape \(V, r\) = \(10, 2\)": LoRA(a, torch.randn(9, 2)),
        r"lora\.scaling: expected a finite number": LoRA(a, b, float("nan")),
        r"lora\.input: expected shape hidden\.shape": LoRA(a, b, input=torch.randn(2, 8)),
        r"lora\.a: expected shape \(r, H\) with r > 0": LoRA(torch.randn(0, 8), torch.randn(10, 0)),
    }
    for says, lora in wrong.items():
        with pytest.raises((TypeError, ValueError), match=says):
            linear_logps(hidden, Head(weight, lora=lora), ids)  # type: ignore[arg-type]
    leaf = hidden.view(1, 3, 8).requires_grad_()
    head = Head(weight, lora=LoRA(a.requires_grad_(), b))
    message = r"engine: expected one that gives this gradient, got 'frozen', .* lora"
    with pytest.raises(ValueError, match=message):
        grpo_loss(leaf, head, ids[None], None, torch.ones(1), run=Run(engine="frozen"))


def test_two_kinds_of_16_bits() -> None:
    """Hidden states in bf16 may be larger than any number of an adapter in fp16."""
    hidden = torch.tensor([[1e5, 1.0]], dtype=torch.bfloat16)
    weight = torch.zeros(3, 2, dtype=torch.bfloat16)
    a, b = torch.tensor([[1e-4, 0.5]]).half(), torch.tensor([[0.25], [0.5], [-1.0]]).half()
    logps = linear_logps(hidden, Head(weight, lora=LoRA(a, b)), torch.tensor([1])).logps
    want = torch.log_softmax(hidden.double() @ a.double().T @ b.double().T, -1)[:, 1]
    torch.testing.assert_close(logps.double(), want, rtol=1e-5, atol=0)
