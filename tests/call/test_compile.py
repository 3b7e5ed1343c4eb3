"""torch.compile(fullgraph=True): few graphs, in a model, exported, and errors. (Bits: test_modes.py.)"""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from grpo_kernels import GRPOLoss, Head, LossConfig, LossOutput, grpo_loss, linear_logprob
from tests.support.case_builder import make_case
from tests.support.flat import flat
from tests.support.modes import (
    Arguments,
    Function,
    Results,
    assert_same_bits,
    compiled,
    loss_results,
    score_results,
)
from tests.support.run_case import arguments, config_of, packed

H, V = 8, 19
LOSS = flat(grpo_loss)
TERMS = {"loss_type": "grpo", "beta": 0.1, "entropy_coef": 0.01}
EVERY = {"bias": True, "sampling": True, "ratio": "token"}
GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
pytestmark = pytest.mark.usefixtures("nothing_compiled")


def batch(size: int = 2, length: int = 5, **options: Any) -> Arguments:
    """Arguments of `LOSS`, as `make_case` makes them: the same numbers in every call."""
    case = make_case("compiled", b=size, t=length, h=H, v=V, **options)
    return arguments(case) | {"config": config_of(case)}


def score_batch(size: int, length: int) -> Arguments:
    given = batch(size, length, bias=True)
    return {name: given[name] for name in ("hidden", "weight", "bias")} | {
        "ids": given["completion_ids"]
    }


def assert_as_eager(fast: Function, function: Function = LOSS, **options: Any) -> None:
    assert_same_bits(loss_results(fast, batch(**options)), loss_results(function, batch(**options)))


LENGTHS = (3, 4, 5, 7, 8, 16, 17, 22)
SIZES = {
    "lengths": [(2, length) for length in LENGTHS],
    "sequences": [(size, 4) for size in (2, 3, 7)],
    "both": [(2 + length % 5, length) for length in LENGTHS],
}


@pytest.mark.parametrize(
    ("changing", "function", "make", "results"),
    [
        ("lengths", partial(LOSS, engine="one_pass"), partial(batch, **TERMS), loss_results),
        ("both", partial(LOSS, engine="two_pass"), partial(batch, **TERMS), loss_results),
        ("sequences", partial(LOSS, engine="one_pass"), partial(batch, **TERMS), loss_results),
        ("lengths", flat(linear_logprob), score_batch, score_results),
    ],
)
def test_at_most_two_graphs(
    changing: str, function: Function, make: Function, results: Function
) -> None:
    fast, recorder = compiled(function)
    for size in SIZES[changing]:
        assert_same_bits(results(fast, make(*size)), results(function, make(*size)))
    assert recorder.graphs <= 2


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_number_of_items_makes_no_graphs(kind: Any) -> None:
    fast, recorder = compiled(LOSS)
    for value in (3, 5, 9):
        assert_as_eager(fast, num_items=kind(value))
    assert recorder.graphs <= 2


class Policy(nn.Module):
    """A model with a tied head and the loss in it, all that is compiled."""

    def __init__(self, config: LossConfig) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(V, H))
        self.mix = nn.Parameter(torch.randn(H, H))
        self.loss = GRPOLoss(config)

    def forward(self, ids: Tensor, bias: Tensor | None = None, **given: Any) -> Any:
        return self.loss(self.embedding[ids] @ self.mix, Head(self.embedding, bias), **given)


@pytest.mark.parametrize(("options", "autocast"), [(TERMS, False), ({"loss_type": "vespo"}, True)])
def test_in_a_model(options: dict[str, Any], autocast: bool) -> None:
    """Forward and backward, with a graph of its own under no_grad; under autocast the products are bf16."""
    config = LossConfig(**options)
    slow = Policy(config)
    model = copy.deepcopy(slow)
    fast, recorder = compiled(model)

    def step(call: Function, of: Policy, length: int) -> Results:
        given = batch(2, length, frozen=("bias",), **EVERY, **options)
        names = (
            "weight",
            "config",
            "reference",
            "final_logit_softcapping",
            "logit_scale",
            "logits_dtype",
        )
        ids = given.pop("hidden").sum(-1).long() % V
        given = {name: x for name, x in given.items() if name not in names}
        of.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            results = loss_results(lambda **given: call(ids, **given), given)
        return results | {name: x.grad for name, x in of.named_parameters() if x.grad is not None}

    for length in (4, 6, 9):
        assert_same_bits(step(fast, model, length), step(slow, slow, length))
    assert recorder.graphs <= 2
    with torch.no_grad():
        got, want = step(fast, model, 6), step(slow, slow, 6)
    assert got["engine"] == "score"
    assert not got["requires grad"]
    assert_same_bits(got, want)


@pytest.mark.parametrize("options", [{"old": False}, GSPO], ids=["one_pass", "two_pass"])
def test_an_upstream_gradient_that_is_nan(options: dict[str, Any]) -> None:
    """It reaches what counts, and no masked position."""
    given = batch(**options)
    nan = loss_results(compiled(LOSS)[0], given, torch.nan)["d_hidden"].isnan().any(-1)
    assert torch.equal(nan, given["completion_mask"].bool())
    assert not nan.all()


def test_packed() -> None:
    fast, recorder = compiled(LOSS)

    def cut(size: int, length: int) -> Arguments:
        case = make_case("compiled", b=size, t=length, h=H, v=V, mask="ragged", **GSPO)
        given = packed(case, arguments(case))[0] | {"config": config_of(case)}
        return given | {"hidden": given["hidden"].detach().requires_grad_()}

    for size in ((2, 5), (2, 9), (4, 6)):
        assert_same_bits(loss_results(fast, cut(*size)), loss_results(LOSS, cut(*size)))
    assert recorder.graphs <= 3  # the length, then the number of sequences


def test_a_graph_for_each_config() -> None:
    """And no more: none of its numbers becomes an input."""
    fast, recorder = compiled(LOSS)
    for temperature in (1.0, 0.7, 0.9, 1.0):
        assert_as_eager(fast, loss_type="vespo", temperature=temperature)
    assert recorder.graphs == 3


def test_constants_of_the_head_may_change() -> None:
    """Of a `Head` that is made inside or outside."""

    def outside(weight: Tensor, bias: None, reference: None, **given: Any) -> Any:
        return grpo_loss(head=head, **given)

    inside, with_head = compiled(LOSS)[0], compiled(outside)[0]
    for constants in (
        {},
        {"logit_scale": 1.5},
        {"logit_scale": 0.7},
        {"final_logit_softcapping": 2.5},
    ):
        assert_as_eager(inside, **constants)
    for constants in ({"logit_scale": 1.5}, {"final_logit_softcapping": 2.5}):
        given = {name: x for name, x in batch(**constants).items() if name not in constants}
        head = Head(given["weight"], **{name: np.float32(x) for name, x in constants.items()})
        assert_same_bits(loss_results(with_head, given), loss_results(LOSS, batch(**constants)))


def test_config_may_be_made_inside() -> None:
    def loss(config: LossConfig, **given: Any) -> Any:
        return flat(GRPOLoss(loss_type="grpo", beta=0.1))(**given)

    assert_as_eager(compiled(loss)[0], loss, beta=0.1)


def test_values_raise_as_in_eager_mode() -> None:
    fast, _ = compiled(LOSS)
    for wrong, message in (
        ({"completion_ids": torch.full((2, 5), V), "completion_mask": None}, "expected ids in"),
        ({"num_items_in_batch": -1}, "num_items_in_batch"),
    ):
        with pytest.raises(ValueError, match=message):
            fast(**batch() | wrong)
    with pytest.raises(
        Exception, match="engine: expected one of auto"
    ):  # whatever the compiler makes of it
        fast(**batch(), engine="none")
    with pytest.raises(ValueError, match="temperature: expected"):
        compiled(flat(linear_logprob))[0](**score_batch(2, 5), temperature=torch.zeros(2, 5))


def test_custom_objective_breaks_the_graph() -> None:
    """It is the user's function: fullgraph=True refuses it with the reason, else it runs eagerly."""

    def loss(**given: Any) -> Any:
        return LOSS(**given, objective=lambda tokens: -tokens.advantages * tokens.logps)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="grpo_kernels: a function of yours"):
        compiled(loss)[0](**batch())
    torch._dynamo.reset()
    assert_as_eager(torch.compile(loss, backend="aot_eager"), loss)


def test_exported_graph_runs() -> None:
    """Also of a module that returns the loss's output as it is, written to a file and read again."""

    class Loss(nn.Module):
        def forward(self, given: Arguments) -> LossOutput:
            return LOSS(**given, config=LossConfig(**GSPO))

    given = {name: x.detach() for name, x in batch(bias=True).items() if isinstance(x, Tensor)}
    file = io.BytesIO()
    torch.export.save(torch.export.export(Loss(), (given,)), file)
    file.seek(0)
    want, again = Loss()(given), torch.export.load(file).module()
    assert_same_bits(
        loss_results(lambda **_: again(given), given), loss_results(lambda **_: want, given)
    )


def test_an_output_is_a_pytree() -> None:
    """Of its tensors: what maps over them gives an output again, with all of its metrics."""
    out = LOSS(**batch(**EVERY, **TERMS))
    leaves, spec = pytree.tree_flatten(out)
    assert len(leaves) == 3 + 2 * len(out.metrics.pairs) + len(out.metrics) - len(out.metrics.pairs)
    assert all(isinstance(x, Tensor) for x in leaves)
    paths = pytree.tree_flatten_with_path(out)[0]
    assert len({pytree.keystr(path) for path, _ in paths}) == len(leaves)
    doubled = pytree.tree_map(lambda x: x.detach().double(), out)
    read = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert isinstance(hash(spec), int)
    for again in (doubled, pytree.tree_unflatten(leaves, read)):
        assert isinstance(again, LossOutput) and again.engine == out.engine
        assert [*again.metrics] == [*out.metrics] and [*again.metrics.pairs] == [*out.metrics.pairs]
    assert doubled.metrics.pairs["kl"][1].dtype == torch.float64
    total, count = out.metrics.pairs["kl"]
    assert doubled.metrics["kl"] == total.double() / count.double()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's own
def test_inductor() -> None:
    """The default backend: one graph with all of it."""
    counter = CompileCounterWithBackend("inductor")
    fast = torch.compile(LOSS, backend=counter, fullgraph=True)
    assert_same_bits(
        loss_results(fast, batch(**TERMS), 0.3), loss_results(LOSS, batch(**TERMS), 0.3)
    )
    assert counter.frame_count == 1
