"""Under torch.compile the calls run eagerly; what is around them is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_kernels import (
    GRPOLoss,
    Head,
    grpo_loss,
    linear_divergence,
    linear_logps,
    policy_loss_from_logps,
    topk_divergence,
)

B, T, H, V = 2, 5, 8, 19


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Policy(nn.Module):
    def __init__(self, step: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, H)
        self.mix, self.lm_head = nn.Linear(H, H), nn.Linear(H, V)
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
    every = torch.arange(V).expand(B, T, V)
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


@pytest.mark.parametrize("step", STEPS)
def test_a_compiled_model_has_eager_results(step: str) -> None:
    """To the bit; body and tail are two graphs, and the second step adds none."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    ids, model = torch.arange(B * T).view(B, T) % V, Policy(STEPS[step])
    compiled, first = torch.compile(model, backend=keep), 0
    for turn in range(2):
        done = []
        for call in (compiled, model):
            loss = call(ids + turn)
            grads = torch.autograd.grad(loss, [*model.parameters()], materialize_grads=True)
            done.append((loss, *grads))
        assert all(torch.equal(got, want) for got, want in zip(*done, strict=True))
        first = first or len(graphs)
    assert len(graphs) == first
    operations = [[str(x.target) for x in graph.graph.nodes] for graph in graphs]
    assert any("sin" in x for x in operations) and any("tanh" in x for x in operations)


def test_a_whole_graph_is_refused_with_the_reason() -> None:
    model = Policy(STEPS["linear_logps"])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="grpo_kernels: this call runs eagerly"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.zeros(B, T, dtype=torch.long))
