"""`LMHeadLogProb` and `attach` in one process: the functions on the head's own parameters, PEFT's adapters included."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing import assert_close

from grpo_kernels import (
    Head,
    LMHeadLogProb,
    LoRA,
    LossConfig,
    LossOutput,
    Run,
    attach,
    grpo_loss,
    linear_divergence,
    linear_logprob,
    topk_divergence,
)

B, T, H, V = 3, 5, 8, 19
IDS = torch.arange(B * T).view(B, T) * 7 % V
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
ADVANTAGES = torch.tensor([1.3, -0.7, 0.4], dtype=torch.float64)
OLD = -3.0 + torch.linspace(-0.5, 0.5, B * T, dtype=torch.float64).view(B, T)


def states() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(B, T, H, generator=generator, dtype=torch.float64).requires_grad_()


def attached(bias: bool = True) -> Any:
    return attach(nn.Linear(H, V, bias=bias, dtype=torch.float64))


def module(bias: bool = True) -> Any:
    return LMHeadLogProb(H, V, bias=bias, dtype=torch.float64)


MAKERS: dict[str, Callable[..., Any]] = {"attach": attached, "LMHeadLogProb": module}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("bias", [True, False])
def test_methods_are_the_functions_with_the_heads_own_parameters(maker: str, bias: bool) -> None:
    head, hidden = MAKERS[maker](bias), states()
    config = LossConfig(loss_type="grpo", importance_sampling_level="sequence", temperature=0.8)
    given = {"config": config, "old_per_token_logps": OLD, "run": Run(workspace_bytes=2**20)}
    ours = head.loss(hidden, IDS, MASK, ADVANTAGES, **given)
    want = grpo_loss(hidden, Head(head.weight, head.bias), IDS, MASK, ADVANTAGES, **given)
    scores = head.logprobs(hidden, IDS, mask=MASK, temperature=0.8)
    assert_close(ours.loss, want.loss, rtol=0, atol=0)
    assert ours.engine == want.engine == "two_pass"
    assert_close(ours.per_token_logps, want.per_token_logps, rtol=0, atol=0)
    assert_close(scores.logps.detach(), want.per_token_logps)
    assert_close(scores.entropies.detach(), want.entropies)
    leaves = [hidden, *head.parameters()]
    for got, expected in ((ours.loss, want.loss), (scores.logps.sum(), None)):
        expected = plain_logps(head, hidden, 0.8).mul(MASK).sum() if expected is None else expected
        for x, y in zip(
            torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True
        ):
            assert_close(x, y, rtol=1e-12, atol=1e-13)
    assert head.logprobs(hidden, IDS, entropy=False).entropies is None
    with torch.no_grad():
        scored = head.logprobs(hidden, IDS).logps
    assert_close(scored, linear_logprob(hidden, Head(head.weight, head.bias), IDS).logps.detach())
    assert not scored.requires_grad


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("constants", [{}, {"final_logit_softcapping": 2.0, "logit_scale": 1.5}])
def test_every_call_takes_a_module_or_a_head_around_one(
    constants: dict[str, Any], bias: bool
) -> None:
    head, hidden = attached(bias), states()
    teacher = torch.randn(V, H, dtype=torch.float64)
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "logprobs": (linear_logprob, (IDS,)),
        "loss": (grpo_loss, (IDS, MASK, ADVANTAGES)),
        "divergence": (linear_divergence, (1.3 * hidden.detach(), Head(teacher))),
        "topk_divergence": (
            topk_divergence,
            (IDS[..., None], torch.full((B, T, 1), -1.0, dtype=torch.float64)),
        ),
    }

    def results(out: Any) -> dict[str, Tensor]:
        return (
            {"loss": out.loss, "logps": out.per_token_logps}
            if isinstance(out, LossOutput)
            else out.given
        )

    for name, (call, others) in calls.items():
        want = results(call(hidden, Head(head.weight, head.bias, **constants), *others))
        found = [call(hidden, Head(head, **constants), *others)]
        if not constants:
            found += [call(hidden, head, *others), getattr(head, name)(hidden, *others)]
        for got in found:
            assert_close(results(got), want, rtol=0, atol=0)


def plain_logps(head: Any, hidden: Tensor, temperature: float = 1.0) -> Tensor:
    """From the head's own logits."""
    log_probs = torch.log_softmax(head(hidden) / temperature, dim=-1)
    return log_probs.gather(-1, IDS[..., None])[..., 0]


@pytest.mark.parametrize("maker", MAKERS)
def test_the_head_stays_a_linear_layer_that_can_be_copied_and_saved(maker: str) -> None:
    head, hidden = MAKERS[maker](), states()
    plain = nn.Linear(H, V, dtype=torch.float64)
    plain.load_state_dict(head.state_dict())
    assert_close(head(hidden), plain(hidden), rtol=0, atol=0)
    assert isinstance(head, nn.Linear)
    assert [name for name, _ in head.named_modules()] == [""]
    stream = io.BytesIO()
    torch.save(head, stream)
    stream.seek(0)
    for other in (copy.deepcopy(head), torch.load(stream, weights_only=False)):
        with torch.no_grad():
            other.weight.zero_()
            other.bias.zero_()
        logps = other.logprobs(hidden, IDS).logps  # of the copy's parameters, not of the first's
        assert_close(
            logps, torch.full((B, T), -torch.log(torch.tensor(float(V))), dtype=torch.float64)
        )
    assert attach(head) is head


class NormedHead(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, nn.functional.normalize(self.weight))


@pytest.mark.parametrize(
    ("head", "named"),
    [
        (nn.Embedding(V, H), "torch.nn.modules.sparse.Embedding"),
        (NormedHead(H, V), "NormedHead"),
        (nn.Sequential(nn.Linear(H, V)), "Sequential"),
    ],
    ids=["embedding", "own forward", "sequential"],
)
def test_what_is_not_a_linear_head_is_refused_by_name(head: nn.Module, named: str) -> None:
    with pytest.raises(
        TypeError, match=f"lm_head: expected an nn.Linear with its own forward.*got .*{named}"
    ):
        attach(head)


def test_a_forward_that_was_put_on_the_head_itself_is_not_left_out_in_silence() -> None:
    head = nn.Linear(H, V)
    plain = head.forward
    head.forward = lambda x: 2 * plain(x)  # type: ignore[method-assign]
    with pytest.raises(TypeError, match=r"lm_head: expected .*got one whose forward was replaced"):
        attach(head)
    head = nn.Linear(H, V)
    hooks = pytest.importorskip("accelerate.hooks")
    assert attach(hooks.add_hook_to_module(head, hooks.ModelHook())) is head


def linear() -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(H, V, dtype=torch.float64)


def with_pre_hook(hook: Callable[..., Any], **options: Any) -> nn.Linear:
    head = linear()
    head.register_forward_pre_hook(hook, **options)
    return head


# whose weight, or input, something makes before the forward
MADE: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": lambda: parametrizations.spectral_norm(linear()),
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "spectral_norm, by a hook": lambda: nn.utils.spectral_norm(linear()),
    "pruned": lambda: prune.random_unstructured(linear(), "weight", 0.3),
    "input": lambda: with_pre_hook(lambda module, args: 1.5 * args[0]),
    "input, as a tuple": lambda: with_pre_hook(lambda module, args: (args[0].tanh(),)),
    "input, with names": lambda: with_pre_hook(
        lambda m, args, kwargs: ((-args[0],), kwargs), with_kwargs=True
    ),
    "observed": lambda: with_pre_hook(lambda m, args, kwargs: None, with_kwargs=True),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("case", MADE)
def test_what_happens_before_the_forward_happens_before_a_score(case: str) -> None:
    """Scores, gradients and state, a step and a training forward later: a weight made before is stale."""
    ours, theirs = attach(MADE[case]()), MADE[case]()
    theirs.load_state_dict(ours.state_dict())
    for head in (ours, theirs):
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.mul_(1.3).add_(0.1)
    hidden = states()
    logps = ours.logprobs(hidden, IDS).logps
    want = plain_logps(theirs, hidden)
    assert_close(logps, want, rtol=1e-12, atol=1e-12)
    found, expected = (
        torch.autograd.grad(x.sum(), [hidden, *head.parameters()])
        for x, head in ((logps, ours), (want, theirs))
    )
    assert_close(found, expected, rtol=1e-10, atol=1e-11)
    assert_close(
        ours.state_dict(), theirs.state_dict(), rtol=1e-12, atol=1e-12
    )  # one power iteration, not two


def test_parametrizations_can_be_put_on_and_taken_off_around_attach() -> None:
    head, hidden = attach(parametrizations.weight_norm(linear())), states()
    parametrize.remove_parametrizations(head, "weight")
    assert type(head) is LMHeadLogProb
    assert_close(head.logprobs(hidden, IDS).logps, plain_logps(linear(), hidden))
    parametrizations.spectral_norm(head).eval()
    assert_close(head.logprobs(hidden, IDS).logps, plain_logps(head, hidden))


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    ("register", "kind"),
    [
        ("register_forward_hook", "forward hook"),
        ("register_full_backward_hook", "backward hook"),
        ("register_full_backward_pre_hook", "backward pre-hook"),
    ],
)
def test_hooks_that_would_be_handed_logits_are_refused_by_name(
    maker: str, register: str, kind: str
) -> None:
    head = MAKERS[maker]()
    handle = getattr(head, register)(double)
    message = rf"lm_head: expected no {kind}, .*got {__name__}\.double"
    with pytest.raises(TypeError, match=message):
        attach(head)
    for call in (
        lambda: head.logprobs(states(), IDS),
        lambda: head.loss(states(), IDS, MASK, ADVANTAGES),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    handle.remove()
    assert attach(head).logprobs(states(), IDS).logps.requires_grad


def test_pre_hooks_that_give_more_than_hidden_states_are_refused() -> None:
    head = attach(with_pre_hook(lambda m, args, kwargs: (args, {"names": 1}), with_kwargs=True))
    with pytest.raises(
        TypeError,
        match=r"lm_head: expected its forward pre-hooks to give one input, got .*'names'\]",
    ):
        head.logprobs(states(), IDS)


@pytest.mark.parametrize(
    "make", [linear, lambda: peft_head(2), module], ids=["linear", "PEFT", "LMHeadLogProb"]
)
def test_a_copy_or_replica_scores_with_its_own_weight(make: Callable[[], Any]) -> None:
    head, hidden = attach(make()), states()
    base = getattr(head, "base_layer", head)
    before = head.logprobs(hidden, IDS).logps
    replica = head._replicate_for_data_parallel()  # as nn.DataParallel makes them
    for other in (copy.copy(head), replica):
        linear_of_other = getattr(other, "base_layer", other)
        if linear_of_other is base:  # a module of a module; DataParallel replicates each of them
            linear_of_other = base._replicate_for_data_parallel()
            other._modules = {**other._modules, "base_layer": linear_of_other}
        linear_of_other._parameters = dict(linear_of_other._parameters)
        linear_of_other.weight = nn.Parameter(2 * base.weight.detach())
        linear_of_other.bias = base.bias
        assert_close(other.logprobs(hidden, IDS).logps, plain_logps(other, hidden))
        assert float((other.logprobs(hidden, IDS).logps - before).abs().max().detach()) > 0.1
    assert_close(head.logprobs(hidden, IDS).logps, before)


def test_pefts_layer_stays_what_it_is_and_can_be_saved() -> None:
    head, hidden = peft_head(2), states()
    before = type(head)
    assert isinstance(attach(head), before)
    stream = io.BytesIO()
    torch.save(head, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    assert type(loaded) is type(head)
    assert_close(loaded.logprobs(hidden, IDS).logps, head.logprobs(hidden, IDS).logps)
    head.base_layer.register_forward_pre_hook(lambda module, args: args)
    with pytest.raises(
        TypeError, match=r"lm_head\.base_layer: expected no forward pre-hook, .*lambda"
    ):
        head.logprobs(hidden, IDS)


def test_a_head_that_accelerate_has_offloaded_is_told_what_to_do() -> None:
    accelerate = pytest.importorskip("accelerate")
    head = linear()
    accelerate.cpu_offload(head, execution_device="cpu")
    with pytest.raises(
        ValueError, match=r"lm_head: expected its weight on a device, .*device_map.*causal_lm_loss"
    ):
        attach(head).logprobs(states(), IDS)


def test_wrong_arguments_are_named_as_by_the_functions() -> None:
    head = attached()
    with pytest.raises(ValueError, match=r"completion_ids: expected shape"):
        head.loss(states(), IDS[:, 1:], MASK, ADVANTAGES)
    with pytest.raises(TypeError, match=r"epsilom: .*; did you mean epsilon\?"):
        head.loss(states(), IDS, MASK, ADVANTAGES, epsilom=0.1)
    with pytest.raises(ValueError, match=r"bias: expected None, since it is lm_head's own"):
        grpo_loss(states(), Head(head, torch.zeros(V, dtype=torch.float64)), IDS, MASK, ADVANTAGES)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'extra'"):
        head.logprobs(states(), IDS, extra=("log_sum_sq_probs",))


def peft_head(*ranks: int, bias: bool = False, **options: Any) -> Any:
    """PEFT's layer around a head, with adapters a0, a1, ... of these ranks, all active; both factors random."""
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
    "one adapter": lambda: peft_head(2),
    "two adapters": lambda: peft_head(2, 3),
    "rank-stabilised, bias of head and adapter": lambda: peft_head(
        4, bias=True, use_rslora=True, lora_bias=True
    ),
    "two with biases": lambda: peft_head(2, 1, bias=True, lora_bias=True),
    "dropout": lambda: peft_head(3, lora_dropout=0.4),
    "two with dropout, evaluated": lambda: peft_head(2, 2, lora_dropout=0.4).eval(),
}


@pytest.mark.parametrize("case", PEFT)
@pytest.mark.parametrize("base_trains", [False, True])
def test_peft_adapters_on_the_head_have_the_gradients_of_pefts_own_forward(
    case: str, base_trains: bool
) -> None:
    head, hidden = PEFT[case](), states()
    head.base_layer.requires_grad_(base_trains)
    attach(head)
    torch.manual_seed(9)  # of the dropout
    want = plain_logps(head, hidden)
    torch.manual_seed(9)
    scores = head.logprobs(hidden, IDS)
    assert_close(scores.logps, want, rtol=1e-12, atol=1e-12)
    assert scores.entropies is not None
    leaves = [hidden, *[x for x in head.parameters() if x.requires_grad]]
    slopes = torch.linspace(-1.0, 1.0, B * T, dtype=torch.float64).view(B, T)
    found = torch.autograd.grad(scores.logps, leaves, slopes)
    for x, y in zip(found, torch.autograd.grad(want, leaves, slopes), strict=True):
        assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_merged_and_disabled_adapters_mean_the_base_weight_alone() -> None:
    head, hidden = attach(peft_head(2, 3)), states()
    active = head.logprobs(hidden, IDS).logps
    head.merge()
    assert_close(head.logprobs(hidden, IDS).logps, active, rtol=1e-10, atol=1e-11)
    head.enable_adapters(False)
    off = head.logprobs(hidden, IDS).logps
    assert not head.merged
    assert_close(off, plain_logps(head.base_layer, hidden), rtol=1e-10, atol=1e-11)
    assert float((off - active).abs().max().detach()) > 0.1
    head.enable_adapters(True)
    assert_close(head.logprobs(hidden, IDS).logps, active, rtol=1e-10, atol=1e-11)
    head.set_adapter(["a1"])
    assert_close(
        head.logprobs(hidden, IDS).logps, plain_logps(head, hidden), rtol=1e-10, atol=1e-11
    )


def test_a_loss_trains_the_adapters_of_a_frozen_head_in_one_pass() -> None:
    head, hidden = attach(peft_head(2)), states()
    out = head.loss(hidden, IDS, MASK, ADVANTAGES, old_per_token_logps=OLD)
    assert out.engine == "one_pass"
    out.loss.backward()
    names = {name for name, x in head.named_parameters() if x.grad is not None}
    assert names == {"lora_A.a0.weight", "lora_B.a0.weight"}


def test_adapters_that_are_not_plain_lora_are_refused_by_name() -> None:
    dora = attach(peft_head(2, use_dora=True))
    with pytest.raises(
        ValueError,
        match=r"lm_head: expected adapters that are plain LoRA, got DoraLinear.* as 'a0'",
    ):
        dora.logprobs(states(), IDS)
    with pytest.raises(
        ValueError, match=r"lm_head: expected one active adapter if there is dropout, got 2"
    ):
        attach(peft_head(2, 2, lora_dropout=0.4)).logprobs(states(), IDS)
    with pytest.raises(ValueError, match=r"lora: expected None, since PEFT's adapters"):
        linear_logprob(
            states(), Head(peft_head(2), lora=LoRA(torch.zeros(1, H), torch.zeros(V, 1))), IDS
        )
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"lm_head": nn.Linear(H, V)})
    peft.inject_adapter_in_model(peft.LoHaConfig(r=2, target_modules=["lm_head"]), model)
    with pytest.raises(TypeError, match=r"lm_head: expected .*, got peft.tuners.loha.layer.Linear"):
        attach(model["lm_head"])
