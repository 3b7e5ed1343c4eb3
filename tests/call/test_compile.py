"""torch.compile(fullgraph=True): the bits of eager mode, and few graphs."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from functorch.compile import make_boxed_compiler
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from grpo_kernels import GRPOLoss, Head, LossConfig, LossOutput, grpo_loss, linear_logprob
from tests.support.flat import flat
from tests.support.small_batch import small_batch

H, V = 8, 19
NAMES, BOTH, HIDDEN = ("hidden", "weight", "bias"), (True, True, True), (True, False, False)
Case = dict[str, Any]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any, backend: str = "aot_eager") -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True), counter


def batch(size: int = 2, length: int = 5, *names: str, trains: tuple[bool, ...] = BOTH, **changes: Any) -> Case:
    """Arguments of `grpo_loss`, the optional tensors among them by name; the same numbers in every call."""
    draw = torch.Generator().manual_seed(length)
    mask = torch.rand(size, length, generator=draw) < 0.8
    advantages = torch.where(torch.arange(size) % 3 == 2, 0.0, torch.randn(size, generator=draw))
    given, wanted = {"completion_mask": mask, "advantages": advantages} | changes, compress(NAMES, trains)
    return small_batch(size, length, H, V, names, seed=length, trains=wanted, **given)


def results(function: Callable[..., Any], given: Case, upstream: float = 1.0) -> Case:
    """Everything a loss gives back, its gradients for an upstream gradient included."""
    out = function(**given)
    if out.loss.requires_grad:
        (out.loss * upstream).backward()
    pairs = {f"{name}[{i}]": x for name, pair in out.metrics.pairs.items() for i, x in enumerate(pair)}
    grads = {name: given[name].grad for name in ("hidden", "weight", "bias") if name in given}
    named = {
        "loss": out.loss,
        "logps": out.per_token_logps,
        "entropies": out.entropies,
        **out.metrics,
        **pairs,
        **grads,
    }
    merged_by = {"sequences": out.metrics.sequences, "loss over": out.metrics.loss_over}
    return {"engine": out.engine, "requires grad": out.loss.requires_grad, **merged_by, **named}


def assert_same_bits(found: Case, want: Case) -> None:
    assert [*found] == [*want]
    for name, x in want.items():
        if isinstance(x, Tensor):
            torch.testing.assert_close(found[name], x, rtol=0, atol=0, equal_nan=True, msg=name)
        else:
            assert found[name] == x, name


OLD, REF = "old_per_token_logps", "ref_per_token_logps"
EVERY = ("bias", OLD, REF, "sampling_per_token_logps", "importance_sampling_ratio")
# name -> (config, optional tensors, what trains, engine)
LOSSES: dict[str, tuple[LossConfig, tuple[str, ...], tuple[bool, ...], str]] = {
    "dapo on-policy": (LossConfig(), (), BOTH, "one_pass"),
    "grpo, all terms": (LossConfig(loss_type="grpo", beta=0.1, entropy_coef=0.01), EVERY, BOTH, "one_pass"),
    "cispo": (LossConfig(loss_type="cispo", epsilon_high=5.0, temperature=0.8), EVERY, BOTH, "one_pass"),
    "sapo, softcap": (LossConfig(loss_type="sapo"), (OLD,), BOTH, "one_pass"),
    "gspo": (LossConfig(loss_type="grpo", importance_sampling_level="sequence"), (OLD, "bias"), BOTH, "two_pass"),
    "vespo": (LossConfig(loss_type="vespo", entropy_coef=0.1, temperature=0.8), EVERY, BOTH, "two_pass"),
    "gmpo": (LossConfig(loss_type="gmpo", beta=0.1), EVERY, BOTH, "two_pass"),
    "top entropy": (LossConfig(top_entropy_quantile=0.5), (OLD,), BOTH, "two_pass"),
    "off-policy mask": (LossConfig(off_policy_mask_threshold=0.1), EVERY, BOTH, "two_pass"),
    "lean": (LossConfig(loss_type="bnpo"), (OLD, "bias"), BOTH, "lean"),
    "frozen": (LossConfig(loss_type="vespo"), (OLD,), HIDDEN, "frozen"),
    "frozen head, bonus": (LossConfig(loss_type="luspo", entropy_coef=0.1), (OLD,), HIDDEN, "one_pass"),
    "only the bias": (LossConfig(loss_type="dr_grpo"), EVERY, (False, False, True), "one_pass"),
}
CONSTANTS = {"sapo, softcap": {"final_logit_softcapping": 4.0}, "lean": {"logit_scale": 1.5}}


@pytest.mark.parametrize("name", LOSSES)
def test_same_bits(name: str) -> None:
    """Also for an upstream gradient that is no power of two."""
    config, names, trains, engine = LOSSES[name]
    asked = engine if engine == "lean" else "auto"

    def loss(**given: Any) -> Any:
        return flat(grpo_loss)(**given, **CONSTANTS.get(name, {}), config=config, engine=asked)

    fast, counter = compiled(loss)
    for upstream in (1.0, -0.3):
        want = results(loss, batch(3, 5, *names, trains=trains), upstream)
        assert want["engine"] == engine
        assert_same_bits(results(fast, batch(3, 5, *names, trains=trains), upstream), want)
    assert counter.frame_count == 1


@pytest.mark.parametrize("engine", ["one_pass", "two_pass"])
@pytest.mark.parametrize("changing", ["lengths", "sequences", "both"])
def test_at_most_two_graphs(changing: str, engine: str) -> None:
    """20 lengths, 3 numbers of sequences."""
    config = LossConfig(loss_type="grpo", beta=0.1, entropy_coef=0.01)

    def loss(**given: Any) -> Any:
        return flat(grpo_loss)(**given, config=config, engine=engine)

    fast, counter = compiled(loss)
    sizes = {
        "lengths": [(2, length) for length in range(3, 23)],
        "sequences": [(size, 4) for size in (2, 3, 7)],
        "both": [(2 + length % 5, length) for length in range(3, 23)],
    }[changing]
    for size in sizes:
        assert_same_bits(results(fast, batch(*size, OLD, REF)), results(loss, batch(*size, OLD, REF)))
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    "values", [(3, 5, 9), (3.0, 4.5, 7.25), tuple(torch.tensor(x) for x in (3, 5, 9))], ids=["int", "float", "tensor"]
)
def test_number_of_items_makes_no_graphs(values: tuple[Any, ...]) -> None:
    fast, counter = compiled(flat(grpo_loss))
    for value in values:
        given = {"num_items_in_batch": value, "completion_mask": None}
        assert_same_bits(results(fast, batch(2, 5, OLD, **given)), results(flat(grpo_loss), batch(2, 5, OLD, **given)))
    assert counter.frame_count <= 2


class Policy(nn.Module):
    """A model with a tied head and the loss in it, all that is compiled."""

    def __init__(self, config: LossConfig) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(V, H, generator=draw))
        self.mix = nn.Parameter(torch.randn(H, H, generator=draw))
        self.loss = GRPOLoss(config)

    def forward(self, ids: Tensor, bias: Tensor | None = None, **given: Any) -> Any:
        return self.loss(self.embedding[ids] @ self.mix, Head(self.embedding, bias), **given)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["grpo, all terms", "vespo"])
def test_in_a_model(name: str, autocast: bool) -> None:
    """Forward and backward, with a graph of its own under no_grad; under autocast the products are bf16."""
    config, names, *_ = LOSSES[name]
    slow, model = Policy(config), Policy(config)
    fast, counter = compiled(model)

    def step(call: Callable[..., Any], of: Policy, length: int) -> Case:
        given = batch(2, length, *names)
        given["bias"].requires_grad_(False)
        of.zero_grad()
        ids = given.pop("hidden").sum(-1).long() % V
        del given["weight"]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found = results(lambda **given: call(ids, **given), given)
        return found | {name: x.grad for name, x in of.named_parameters() if x.grad is not None}

    for length in (4, 6, 9):
        assert_same_bits(step(fast, model, length), step(slow, slow, length))
    assert counter.frame_count <= 2
    with torch.no_grad():
        found, want = step(fast, model, 6), step(slow, slow, 6)
    assert found["engine"] == "score"
    assert not found["requires grad"]
    assert_same_bits(found, want)


def logprobs(
    function: Callable[..., Any], given: Case, upstream: tuple[float, float], **options: Any
) -> dict[str, Any]:
    names = ("hidden", "weight", "bias")
    tensors = {name: given[name] for name in names if name in given}
    found = function(**tensors, ids=given["completion_ids"], mask=given["completion_mask"], **options)
    weights = torch.arange(1.0, 1 + given["completion_ids"].numel()).view(given["completion_ids"].shape)
    total = (found.logps * weights).sum() * upstream[0]
    if upstream[1]:
        total = total + (found.entropies * weights).sum() * upstream[1]
    if total.requires_grad:
        total.backward()
    return {**found.given, **{name: x.grad for name, x in tensors.items()}}


ROWS = torch.linspace(0.5, 1.5, 10).view(2, 5)
HEAD = {"final_logit_softcapping": 4.0, "logit_scale": 1.5, "temperature": 0.7}
# name -> (options, what trains, upstream factors of logps and entropies, the eager engine with the same bits)
LOGPROBS: dict[str, tuple[Case, tuple[bool, ...], tuple[float, float], str]] = {
    "both": ({}, BOTH, (1.0, 0.5), "auto"),
    "entropies not differentiated": ({}, BOTH, (1.0, 0.0), "auto"),
    "head options": (HEAD, BOTH, (1.0, 0.5), "auto"),
    "temperatures": ({"temperature": ROWS, "entropy": False}, BOTH, (1.0, 0.0), "auto"),
    "extras": ({"extras": ("is_top1", "mean_logits")}, BOTH, (1.0, 0.5), "auto"),
    "an expectation": ({"expected": ROWS, "engine": "one_pass"}, BOTH, (1.0, 0.5), "two_pass"),
    "lean": ({"engine": "lean"}, BOTH, (1.0, 0.5), "lean"),
    "frozen": ({"entropy": False}, HIDDEN, (0.3, 0.0), "auto"),
    "frozen, entropies": ({}, HIDDEN, (1.0, 0.5), "two_pass"),
    "score": ({}, (False, False, False), (1.0, 0.0), "auto"),
}


@pytest.mark.parametrize("name", LOGPROBS)
def test_linear_logprob(name: str) -> None:
    options, trains, upstream, engine = LOGPROBS[name]
    fast, counter = compiled(flat(linear_logprob))
    eager = {key: x for key, x in options.items() if key != "expected"} | {"engine": engine}
    for size, length in [(2, 5)] if "temperature" in options else [(2, 5), (2, 7), (2, 8)]:
        found = logprobs(fast, batch(size, length, "bias", trains=trains), upstream, **options)
        want = logprobs(flat(linear_logprob), batch(size, length, "bias", trains=trains), upstream, **eager)
        assert_same_bits(found, want)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", ["dapo on-policy", "gspo", "frozen"])
def test_an_upstream_gradient_of_a_loss_that_is_nan(name: str) -> None:
    """It reaches what counts, and no masked position."""
    config, names, trains, _ = LOSSES[name]
    given = batch(2, 5, *names, trains=trains) | {"config": config}
    found = results(compiled(flat(grpo_loss))[0], given, float("nan"))["hidden"].isnan().any(-1)
    assert torch.equal(found, given["completion_mask"])


@pytest.mark.parametrize("name", ["both", "frozen"])
def test_an_upstream_gradient_that_is_nan_where_masked(name: str) -> None:
    options, trains, *_ = LOGPROBS[name]
    given = batch(2, 5, trains=trains)
    counted = given["completion_mask"].clone()
    assert not counted.all()

    def gradients(function: Callable[..., Any], masked: float) -> list[Tensor]:
        found = function(given["hidden"], given["weight"], given["completion_ids"], mask=counted, **options)
        leaves = [x for x in (given["hidden"], given["weight"]) if x.requires_grad]
        return list(torch.autograd.grad(found.logps, leaves, torch.where(counted, 1.0, masked)))

    for x, y in zip(
        gradients(compiled(flat(linear_logprob))[0], torch.nan), gradients(linear_logprob, 0.0), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def test_one_op_in_the_forward_and_none_in_the_backward_of_one_pass() -> None:
    """And no number among the inputs: it would be one that a graph was made for."""
    ops: dict[str, list[str]] = {}

    def lister(name: str) -> Any:
        def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
            ops[name] = [str(node.target) for node in graph.graph.nodes if "grpo_kernels" in str(node.target)]
            inputs = [node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder"]
            assert all(isinstance(x, Tensor) for x in inputs)
            return graph.forward

        return make_boxed_compiler(keep)

    backend = aot_autograd(fw_compiler=lister("forward"), bw_compiler=lister("backward"))
    for name, in_backward in (("grpo, all terms", []), ("gspo", ["grpo_kernels.linear_logprob_backward.default"])):
        config, names, *_ = LOSSES[name]
        results(torch.compile(flat(grpo_loss), backend=backend, fullgraph=True), batch(2, 5, *names, config=config))
        assert ops == {"forward": ["grpo_kernels.policy_loss.default"], "backward": in_backward}


def test_packed() -> None:
    config = LossConfig(loss_type="grpo", importance_sampling_level="sequence")

    def loss(**given: Any) -> Any:
        return flat(grpo_loss)(**given, config=config)

    def packed(bounds: list[int]) -> Case:
        given = batch(1, bounds[-1], OLD)
        given = {name: x.detach().flatten(0, 1) if x.dim() > 1 and name != "weight" else x for name, x in given.items()}
        given["hidden"].requires_grad_()
        return given | {"cu_seqlens": torch.tensor(bounds), "advantages": torch.linspace(-1, 1, len(bounds) - 1)}

    fast, counter = compiled(loss)
    for bounds in ([0, 3, 7], [0, 1, 9], [0, 5, 6, 12]):
        assert_same_bits(results(fast, packed(bounds)), results(loss, packed(bounds)))
    assert counter.frame_count <= 3  # the length, then the number of sequences


def test_a_graph_for_each_config() -> None:
    """And no more: none of its numbers becomes an input."""
    fast, counter = compiled(flat(grpo_loss))
    configs = [LossConfig(loss_type="vespo", temperature=x) for x in (1.0, 0.7, 0.9)]
    for config in (*configs, LossConfig(epsilon=0.1), configs[0]):
        given = {"config": config}
        assert_same_bits(results(fast, batch(2, 5, OLD, **given)), results(flat(grpo_loss), batch(2, 5, OLD, **given)))
    assert counter.frame_count == 4


def test_constants_of_the_head_may_change() -> None:
    """Of a `Head` that is made outside or inside: whatever graphs that takes, the bits are those of eager calls."""

    def outside(weight: Tensor, **given: Any) -> Any:
        return grpo_loss(head=head, **given)

    inside, with_head = compiled(flat(grpo_loss))[0], compiled(outside)[0]
    for constants in ({}, {"logit_scale": 1.5}, {"logit_scale": 0.7}, {"final_logit_softcapping": 2.5}):
        want = results(flat(grpo_loss), batch(2, 5, OLD) | constants)
        assert_same_bits(results(inside, batch(2, 5, OLD) | constants), want)
        given = batch(2, 5, OLD)
        head = Head(given["weight"], **{name: np.float32(x) for name, x in constants.items()})
        if "logit_scale" not in constants or constants["logit_scale"] == 1.5:  # 0.7 is another number in float32
            assert_same_bits(results(with_head, given), want)


def test_config_may_be_made_inside() -> None:
    def loss(**given: Any) -> Any:
        return flat(GRPOLoss(loss_type="grpo", beta=0.1))(**given)

    assert_same_bits(results(compiled(loss)[0], batch(2, 5, REF)), results(loss, batch(2, 5, REF)))


def test_values_raise_as_in_eager_mode() -> None:
    fast, _ = compiled(flat(grpo_loss))
    wrong = batch(2, 5) | {"completion_ids": torch.full((2, 5), V), "completion_mask": None}
    for given, message in (
        (wrong, "expected ids in"),
        (batch(2, 5) | {"num_items_in_batch": -1}, "num_items_in_batch"),
    ):
        with pytest.raises(ValueError, match=message):
            fast(**given)
    with pytest.raises(Exception, match="engine: expected one of auto"):  # whatever the compiler makes of it
        fast(**batch(2, 5), engine="none")


def test_custom_objective_breaks_the_graph() -> None:
    """It is the user's function: fullgraph=True refuses it with the reason, else it runs eagerly."""

    def loss(**given: Any) -> Any:
        return flat(grpo_loss)(**given, objective=lambda tokens: -tokens.advantages * tokens.logps)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="grpo_kernels: a function of yours"):
        compiled(loss)[0](**batch(2, 5))
    torch._dynamo.reset()
    broken = torch.compile(loss, backend="aot_eager")
    assert_same_bits(results(broken, batch(2, 5)), results(loss, batch(2, 5)))


def test_exported_graph_runs() -> None:
    """Also of a module that returns the loss's output as it is, written to a file and read again."""

    class Loss(nn.Module):
        def forward(self, given: Case) -> LossOutput:
            return flat(grpo_loss)(**given, config=LOSSES["gspo"][0])

    given = {name: x.detach() for name, x in batch(2, 5, *LOSSES["gspo"][1]).items()}
    file = io.BytesIO()
    torch.export.save(torch.export.export(Loss(), (given,)), file)
    file.seek(0)
    want, again = Loss()(given), torch.export.load(file).module()
    assert_same_bits(results(lambda **_: again(given), given), results(lambda **_: want, given))


def test_an_output_is_a_pytree() -> None:
    """Of its tensors: what maps over them gives an output again, with all of its metrics."""
    config = LOSSES["grpo, all terms"][0]
    out = flat(grpo_loss)(**batch(2, 5, *EVERY), config=config)
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
    config = LOSSES["grpo, all terms"][0]

    def loss(**given: Any) -> Any:
        return flat(grpo_loss)(**given, config=config)

    fast, counter = compiled(loss, "inductor")
    assert_same_bits(results(fast, batch(2, 5, OLD, REF), 0.3), results(loss, batch(2, 5, OLD, REF), 0.3))
    assert counter.frame_count == 1
