"""Settings of torch that change the numbers: shown by the report, refused or warned of
(docs/precision.md). Under torch.compile the calls run eagerly; what is around them is compiled."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from grpo_kernels import (
    GRPOLoss,
    Head,
    LoRA,
    Run,
    grpo_loss,
    linear_divergence,
    linear_logps,
    policy_loss_from_logps,
    topk_divergence,
)
from grpo_kernels.commands import report
from tests.support.flat import flat
from tests.support.pretend_gpu import OnGPU, autocast, pretended
from tests.support.ranks import server_context

pytestmark = pytest.mark.filterwarnings("ignore:.*CUDA is not available")

N, H, V = 256, 8, 300
CUDA, CPU = "float32 products, cuda", "float32 products, cpu"
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def call(hidden, weight, *, there=True, **options):
    """Log-probabilities (N,) of tensors of these dtypes that train, `there` or on the CPU."""
    given = [torch.randn(N, H).to(hidden), torch.randn(V, H).to(weight), torch.randint(V, (N,))]
    given = [OnGPU(x) for x in given] if there else given
    for x in given[:2]:
        x.requires_grad_()
    return flat(linear_logps)(*given, backend="torch", **options).logps


CUDA_IEEE = "torch.backends.cuda.matmul.fp32_precision = 'ieee'"
# what a process does -> how the report then calls products of fp32 on CUDA, and on the CPU
SETTINGS = {
    "pass": ("full", "full"),
    "torch.backends.cuda.matmul.allow_tf32 = True": ("TF32", "full"),
    "torch.set_float32_matmul_precision('medium')": ("TF32", "bfloat16"),
    "torch.backends.fp32_precision = 'tf32'": ("TF32", "TF32"),
    f"torch.set_float32_matmul_precision('high'); {CUDA_IEEE}": ("full", "TF32"),
}


def shown_after(setting: str) -> dict[str, str]:
    warnings.simplefilter("error")
    exec(setting, {"torch": torch})
    return report.collect()["settings of torch"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_the_report_shows_the_precision_of_fp32_products() -> None:
    """However it was set, and without a warning or an error from torch."""
    with server_context().Pool(1, maxtasksperchild=1) as pool:  # a process for each
        reports = pool.map(shown_after, SETTINGS, chunksize=1)
    for setting, shown in zip(SETTINGS, reports, strict=True):
        said = tuple(shown[name].split()[0].rstrip(",") for name in (CUDA, CPU))
        assert said == SETTINGS[setting], setting
        assert "fp32_precision" in shown[CUDA], setting
        assert ("not exact" in shown[CUDA]) == (SETTINGS[setting][0] != "full"), setting


REFUSED = (
    r"torch\.backends\.cuda\.matmul\.allow_fp16_accumulation: expected False .*float16.*, got True"
)


@pytest.fixture
def accumulates(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Set whether a pretended GPU accumulates products in fp16; in the test it does."""
    before = torch.backends.cuda.matmul.allow_fp16_accumulation

    def set_to(value: bool) -> None:
        torch.backends.cuda.matmul.allow_fp16_accumulation = value

    set_to(True)
    with pretended(monkeypatch):
        yield set_to
    set_to(before)


def test_fp16_accumulation_is_refused_before_any_product(accumulates) -> None:
    for engine in ("auto", "one_pass", "two_pass", "lean"):
        options = {"expected": OnGPU(torch.ones(N))} if engine == "one_pass" else {}
        with FlopCounterMode(display=False) as counter, pytest.raises(RuntimeError, match=REFUSED):
            call(HALF, HALF, engine=engine, **options)
        assert counter.get_total_flops() == 0
    assert "refused" in report.collect()["settings of torch"]["float16 products, cuda"]
    a, b, hidden = (OnGPU(torch.randn(shape).half()) for shape in ((2, H), (V, 2), (N, H)))
    with pytest.raises(RuntimeError, match=REFUSED):
        call(BRAIN, BRAIN, lora=LoRA(a, b, input=hidden))
    for dtype in (BRAIN, SINGLE):
        torch.autograd.backward(call(dtype, dtype).sum())
    call(HALF, HALF, there=False).sum().backward()
    accumulates(False)
    logps = call(HALF, HALF)
    accumulates(True)
    with pytest.raises(RuntimeError, match=REFUSED):  # in a backward too
        torch.autograd.backward(logps.sum())


def test_a_promotion_to_fp32_warns_once(monkeypatch, forget_warnings):
    """Not where there is none; least of all of an fp32 head, which is kept so on purpose."""

    def said(*pairs: tuple[torch.dtype, torch.dtype], there: bool = True) -> list[str]:
        forget_warnings()
        with warnings.catch_warnings(record=True, action="always") as caught:
            for pair in pairs:
                call(*pair, there=there)
        return [str(x.message) for x in caught if "grpo_kernels" in str(x.message)]

    assert said((SINGLE, BRAIN), there=False) == []
    with pretended(monkeypatch):
        (promoted,) = said((SINGLE, BRAIN), (SINGLE, BRAIN))
        assert all(x in promoted for x in ("torch.float32", "torch.bfloat16", "autocast"))
        assert len(said((HALF, BRAIN))) == 1  # two kinds of 16 bits have only fp32 in common
        given = torch.randn(1, 4, H), torch.randn(V, H).half(), torch.zeros(1, 4, dtype=torch.long)
        forget_warnings()
        message = r"hidden in torch\.float32 with a head\.weight in torch\.float16"
        with pytest.warns(RuntimeWarning, match=message):
            grpo_loss(*map(OnGPU, given), None, OnGPU(torch.ones(1)), run=Run(backend="torch"))
        assert said((BRAIN, BRAIN), (SINGLE, SINGLE), (BRAIN, SINGLE), (HALF, SINGLE)) == []
        with monkeypatch.context() as patch:
            patch.setattr(torch.version, "hip", "6.4")
            assert said((SINGLE, BRAIN)) == []  # multiplied in fp32 anyway
        with autocast(BRAIN):
            assert said((SINGLE, BRAIN)) == []


B, T, VOCAB = 2, 5, 19


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Policy(nn.Module):
    def __init__(self, step: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, H)
        self.mix, self.lm_head = nn.Linear(H, H), nn.Linear(H, VOCAB)
        self.step, self.loss = step, GRPOLoss(epsilon=0.1, beta=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.mix(self.embedding(ids)).sin()
        return self.step(self, hidden, ids).tanh()


MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
OLD = torch.linspace(-4.0, -1.0, B * T).view(B, T)
GIVEN: dict[str, Any] = {"advantages": torch.tensor([1.0, -0.5]), "old_per_token_logps": OLD}
Step = Callable[[Policy, Tensor, Tensor], Tensor]


def mean(x: Tensor) -> Tensor:
    return (x * MASK).sum() / MASK.sum()


def by_loss(head: Callable[[Policy], Any], **options: Any) -> Step:
    return lambda p, hidden, ids: grpo_loss(hidden, head(p), ids, MASK, **GIVEN, **options).loss


def scored(p: Policy, hidden: Tensor, ids: Tensor) -> Tensor:
    scores = linear_logps(hidden, p.lm_head, ids, completion_mask=MASK)
    return mean((scores.logps - OLD).exp() * scores.logps - 0.1 * scores.entropies)


def over_sets(p: Policy, hidden: Tensor, ids: Tensor) -> Tensor:
    every = torch.arange(VOCAB).expand(B, T, VOCAB)
    return mean(linear_logps(hidden, p.lm_head, ids, kept_ids=every, completion_mask=MASK).logps)


def from_logps(p: Policy, hidden: Tensor, ids: Tensor) -> Tensor:
    logps = (hidden @ p.lm_head.weight.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return policy_loss_from_logps(logps, MASK, entropies=-logps, **GIVEN).loss


STEPS: dict[str, Step] = {
    "GRPOLoss, a module": lambda p, hidden, ids: (
        p.loss(hidden, p.lm_head, ids, MASK, ref_per_token_logps=OLD, **GIVEN).loss
    ),
    "grpo_loss, two passes, a Head made inside": by_loss(
        lambda p: Head(p.lm_head.weight, p.lm_head.bias, logit_scale=1.5),
        importance_sampling_level="sequence",
        epsilon=1e-3,
    ),
    "grpo_loss, an objective": by_loss(
        lambda p: p.lm_head, objective=lambda tokens: -tokens.advantages * tokens.logps
    ),
    "linear_logps": scored,
    "linear_logps, kept sets": over_sets,
    "linear_divergence": lambda p, hidden, ids: mean(
        linear_divergence(
            hidden, p.lm_head, (hidden.detach() + 1, p.lm_head), completion_mask=MASK
        ).divergence
    ),
    "topk_divergence": lambda p, hidden, ids: mean(
        topk_divergence(
            hidden, p.lm_head, ids[..., None], OLD[..., None], completion_mask=MASK
        ).divergence
    ),
    "policy_loss_from_logps": from_logps,
}


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("step", STEPS)
def test_a_compiled_model_has_eager_results(step: str) -> None:
    """To the bit; body and tail are two graphs, and the second step adds none."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    ids, model = torch.arange(B * T).view(B, T) % VOCAB, Policy(STEPS[step])
    compiled, first = torch.compile(model, backend=keep), 0
    for turn in range(2):
        done = []
        for policy in (compiled, model):
            loss = policy(ids + turn)
            grads = torch.autograd.grad(loss, [*model.parameters()], materialize_grads=True)
            done.append((loss, *grads))
        assert all(torch.equal(got, want) for got, want in zip(*done, strict=True))
        first = first or len(graphs)
    assert len(graphs) == first
    operations = [[str(x.target) for x in graph.graph.nodes] for graph in graphs]
    assert any("sin" in x for x in operations) and any("tanh" in x for x in operations)


@pytest.mark.usefixtures("nothing_compiled")
def test_a_whole_graph_is_refused_with_the_reason() -> None:
    model = Policy(STEPS["linear_logps"])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="grpo_kernels: this call runs eagerly"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.zeros(B, T, dtype=torch.long))
