"""`LMHeadLogProb` and `attach` in one process: the functions on the head's own parameters, PEFT's adapters included."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from grpo_kernels import LMHeadLogProb, LoRA, LossConfig, attach, grpo_loss, linear_logprob

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
    given = {"config": config, "old_per_token_logps": OLD, "workspace_bytes": 2**20}
    ours = head.loss(hidden, IDS, MASK, ADVANTAGES, **given)
    want = grpo_loss(hidden, head.weight, IDS, MASK, ADVANTAGES, bias=head.bias, **given)
    logps, entropies = head.logprobs(hidden, IDS, mask=MASK, temperature=0.8)
    assert_close(ours.loss, want.loss, rtol=0, atol=0)
    assert ours.engine == want.engine == "two_pass"
    assert_close(ours.per_token_logps, want.per_token_logps, rtol=0, atol=0)
    assert_close(logps.detach(), want.per_token_logps)
    assert_close(entropies.detach(), want.entropies)
    leaves = [hidden, *head.parameters()]
    for got, expected in ((ours.loss, want.loss), (logps.sum(), None)):
        expected = plain_logps(head, hidden, 0.8).mul(MASK).sum() if expected is None else expected
        for x, y in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True):
            assert_close(x, y, rtol=1e-12, atol=1e-13)
    assert head.logprobs(hidden, IDS, entropy=False)[1] is None
    with torch.no_grad():
        scored, _ = head.logprobs(hidden, IDS)
    assert_close(scored, linear_logprob(hidden, head.weight, IDS, bias=head.bias)[0].detach())
    assert not scored.requires_grad


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
        logps, _ = other.logprobs(hidden, IDS)  # of the copy's parameters, not of the first's
        assert_close(logps, torch.full((B, T), -torch.log(torch.tensor(float(V))), dtype=torch.float64))
    assert attach(head) is head


def test_a_compiled_model_computes_the_loss_in_its_head_without_a_graph_break() -> None:
    head = module()

    def step(hidden: Tensor) -> Tensor:
        return head.loss(hidden, IDS, MASK, ADVANTAGES).loss

    hidden = states()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(hidden)
    assert_close(torch.autograd.grad(compiled, hidden), torch.autograd.grad(step(hidden), hidden))


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
    with pytest.raises(TypeError, match=f"lm_head: expected an nn.Linear with its own forward.*got .*{named}"):
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


def test_wrong_arguments_are_named_as_by_the_functions() -> None:
    head = attached()
    with pytest.raises(ValueError, match=r"completion_ids: expected shape"):
        head.loss(states(), IDS[:, 1:], MASK, ADVANTAGES)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'epsilon'"):
        head.loss(states(), IDS, MASK, ADVANTAGES, epsilon=0.1)
    with pytest.raises(ValueError, match=r"bias: expected None, since it is lm_head's own"):
        head.loss(states(), IDS, MASK, ADVANTAGES, bias=torch.zeros(V, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'outputs'"):
        head.logprobs(states(), IDS, outputs=("log_sum_sq_probs",))


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
    "rank-stabilised, bias of head and adapter": lambda: peft_head(4, bias=True, use_rslora=True, lora_bias=True),
    "two with biases": lambda: peft_head(2, 1, bias=True, lora_bias=True),
    "dropout": lambda: peft_head(3, lora_dropout=0.4),
    "two with dropout, evaluated": lambda: peft_head(2, 2, lora_dropout=0.4).eval(),
}


@pytest.mark.parametrize("case", PEFT)
@pytest.mark.parametrize("base_trains", [False, True])
def test_peft_adapters_on_the_head_have_the_gradients_of_pefts_own_forward(case: str, base_trains: bool) -> None:
    head, hidden = PEFT[case](), states()
    head.base_layer.requires_grad_(base_trains)
    attach(head)
    torch.manual_seed(9)  # of the dropout
    want = plain_logps(head, hidden)
    torch.manual_seed(9)
    got, entropies = head.logprobs(hidden, IDS)
    assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert entropies is not None
    leaves = [hidden, *[x for x in head.parameters() if x.requires_grad]]
    slopes = torch.linspace(-1.0, 1.0, B * T, dtype=torch.float64).view(B, T)
    found = torch.autograd.grad(got, leaves, slopes)
    for x, y in zip(found, torch.autograd.grad(want, leaves, slopes), strict=True):
        assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_merged_and_disabled_adapters_mean_the_base_weight_alone() -> None:
    head, hidden = attach(peft_head(2, 3)), states()
    active, _ = head.logprobs(hidden, IDS)
    head.merge()
    assert_close(head.logprobs(hidden, IDS)[0], active, rtol=1e-10, atol=1e-11)
    head.enable_adapters(False)
    off, _ = head.logprobs(hidden, IDS)
    assert not head.merged
    assert_close(off, plain_logps(head.base_layer, hidden), rtol=1e-10, atol=1e-11)
    assert float((off - active).abs().max().detach()) > 0.1
    head.enable_adapters(True)
    assert_close(head.logprobs(hidden, IDS)[0], active, rtol=1e-10, atol=1e-11)
    head.set_adapter(["a1"])
    assert_close(head.logprobs(hidden, IDS)[0], plain_logps(head, hidden), rtol=1e-10, atol=1e-11)


def test_a_loss_trains_the_adapters_of_a_frozen_head_in_one_pass() -> None:
    head, hidden = attach(peft_head(2)), states()
    out = head.loss(hidden, IDS, MASK, ADVANTAGES, old_per_token_logps=OLD)
    assert out.engine == "one_pass"
    out.loss.backward()
    names = {name for name, x in head.named_parameters() if x.grad is not None}
    assert names == {"lora_A.a0.weight", "lora_B.a0.weight"}


def test_adapters_that_are_not_plain_lora_are_refused_by_name() -> None:
    dora = attach(peft_head(2, use_dora=True))
    with pytest.raises(ValueError, match=r"lm_head: expected adapters that are plain LoRA, got DoraLinear.* as 'a0'"):
        dora.logprobs(states(), IDS)
    with pytest.raises(ValueError, match=r"lm_head: expected one active adapter if there is dropout, got 2"):
        attach(peft_head(2, 2, lora_dropout=0.4)).logprobs(states(), IDS)
    with pytest.raises(ValueError, match=r"lora: expected None, since PEFT's adapters"):
        attach(peft_head(2)).logprobs(states(), IDS, lora=LoRA(torch.zeros(1, H), torch.zeros(V, 1)))
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"lm_head": nn.Linear(H, V)})
    peft.inject_adapter_in_model(peft.LoHaConfig(r=2, target_modules=["lm_head"]), model)
    with pytest.raises(TypeError, match=r"lm_head: expected .*, got peft.tuners.loha.layer.Linear"):
        attach(model["lm_head"])
