"""Ways to execute a call: eagerly, compiled, with fake tensors; and the registered ops that it is compiled to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from grpo_kernels import grpo_loss, linear_logprob
from tests.support.cases import fixed_cases
from tests.support.flat import flat
from tests.support.run_case import arguments, config_of, constants_of, packed

CASES = {case.name: case for case in fixed_cases()}
HEAD = ("hidden", "weight", "bias")
Function = Callable[..., Any]
Arguments = dict[str, Any]
Results = dict[str, Any]


class Recorder:
    """A backend of torch.compile that runs graphs as they are.

    Attributes:
        graphs: how many there are.
        inputs: values that stand for their inputs.
        ops: names of our ops in the last forward graph and in the last backward graph.
        calls: each call of such an op, with its arguments.
    """

    def __init__(self) -> None:
        self.graphs = 0
        self.inputs: list[Any] = []
        self.ops: dict[str, list[str]] = {"forward": [], "backward": []}
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs += 1
        return aot_autograd(
            fw_compiler=self._runner("forward"), bw_compiler=self._runner("backward")
        )(graph, inputs)

    def _runner(self, direction: str) -> Function:
        calls = self.calls

        def is_ours(target: Any) -> bool:
            return str(target).startswith("grpo_kernels.")

        class Keeping(torch.fx.Interpreter):
            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                if is_ours(target):
                    calls.append((target, tree_map_only(Tensor, Tensor.detach, args)))
                return super().call_function(target, args, kwargs)

        def compiler(graph: torch.fx.GraphModule, _: Any) -> Function:
            nodes = graph.graph.nodes
            self.inputs += [node.meta.get("val") for node in nodes if node.op == "placeholder"]
            self.ops[direction] = [node.target._opname for node in nodes if is_ours(node.target)]
            return make_boxed_func(Keeping(graph).run)

        return compiler


def compiled(function: Function) -> tuple[Function, Recorder]:
    """`function` as one graph, and what keeps its calls."""
    recorder = Recorder()
    return torch.compile(function, backend=recorder, fullgraph=True), recorder


def gradients(given: Arguments) -> Results:
    return {f"d_{name}": given[name].grad for name in HEAD if given.get(name) is not None}


def loss_results(function: Function, given: Arguments, upstream: float = 1.0) -> Results:
    """All that a loss returns, and its gradients under the gradient `upstream`."""
    out = function(**given)
    if out.loss.requires_grad:
        (out.loss * upstream).backward()
    tensors = {
        "loss": out.loss,
        "logps": out.per_token_logps,
        "entropies": out.entropies,
        **out.metrics,
    }
    pairs = {
        f"{name}[{i}]": x for name, pair in out.metrics.pairs.items() for i, x in enumerate(pair)
    }
    merged_by = {"sequences": out.metrics.sequences, "loss over": out.metrics.loss_over}
    chosen = {"engine": out.engine, "backend": out.backend, "requires grad": out.loss.requires_grad}
    return {**chosen, **merged_by, **tensors, **pairs, **gradients(given)}


def score_results(
    function: Function, given: Arguments, upstream: tuple[float, float] = (1.0, 0.5)
) -> Results:
    """All that `linear_logprob` returns, and its gradients; that of the first position is 0, of masked ones NaN."""
    scores, mask = function(**given), given.get("mask")
    weights = torch.arange(float(given["ids"].numel())).view(given["ids"].shape)
    if mask is not None:
        weights = torch.where(mask != 0, weights, torch.nan)
    total = (scores.logps * weights).sum() * upstream[0]
    if upstream[1]:
        total = total + (scores.entropies * weights).sum() * upstream[1]
    if total.requires_grad:
        total.backward()
    return {**scores.given, **gradients(given)}


def assert_same_bits(got: Results, want: Results) -> None:
    """NaN equals NaN."""
    assert [*got] == [*want]
    for name, x in want.items():
        if isinstance(x, Tensor):
            torch.testing.assert_close(got[name], x, rtol=0, atol=0, equal_nan=True, msg=name)
        else:
            assert got[name] == x, name


def looks(results: Results) -> Results:
    """Shape, dtype and device of each tensor; what is no tensor as it is."""
    return {
        k: (tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else x
        for k, x in results.items()
    }


@dataclass(frozen=True)
class Scene:
    """A call of `function`, and what is looked at of it; each run makes the arguments anew."""

    name: str
    function: Function
    arguments: Callable[[], Arguments]
    results: Callable[..., Results]
    upstreams: tuple[Any, ...]
    eager: Arguments = field(default_factory=dict)  # arguments of the eager call that are others
    autocast: bool = False

    def __str__(self) -> str:
        return self.name

    def run(self, upstream: Any, function: Function | None = None) -> Results:
        """Eagerly, or by the compiled `function`."""
        given = self.arguments() | self.eager if function is None else self.arguments()
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.autocast else nullcontext():
            return self.results(function or self.function, given, upstream)

    def run_with_fake_tensors(self) -> Results:
        mode = FakeTensorMode()
        given = tree_map_only(Tensor, mode.from_tensor, self.arguments())
        with mode:
            return self.results(self.function, given, self.upstreams[0])


def loss_scene(
    name: str, frozen: str = "", *, is_packed: bool = False, autocast: bool = False, **run: Any
) -> Scene:
    """A call of `grpo_loss`, under an upstream gradient of 1 and one that is no power of two."""
    case = replace(CASES[name], frozen=frozenset(frozen.split()))

    def given() -> dict[str, Any]:
        tensors = arguments(case)
        if is_packed:
            tensors = packed(case, tensors)[0]
            tensors["hidden"] = tensors["hidden"].detach().requires_grad_()
        return {
            **tensors,
            "config": config_of(case),
            "workspace_bytes": case.workspace_bytes,
            **run,
        }

    return Scene(
        f"loss {name}", flat(grpo_loss), given, loss_results, (1.0, -0.3), autocast=autocast
    )


def score_scene(
    name: str, frozen: str = "", upstream: tuple[float, float] = (1.0, 0.5), *,
    eager: str = "auto", mask: bool = True, temperature: Tensor | None = None, autocast: bool = False, **options: Any,
) -> Scene:  # fmt: skip
    """A call of `linear_logprob`; `eager` is the engine of the eager call that has the same bits."""
    case = replace(CASES[name], frozen=frozenset(frozen.split()))

    def given() -> dict[str, Any]:
        tensors = arguments(case)
        named = {x: tensors[x] for x in ("hidden", "weight", "bias")} | constants_of(case)
        named |= {"ids": case.completion_ids, "mask": case.completion_mask if mask else None}
        return named | options | ({} if temperature is None else {"temperature": temperature})

    others = {"engine": eager, "expected": None}
    return Scene(
        f"scores {name}", flat(linear_logprob), given, score_results, (upstream,), others, autocast
    )


# (engine that serves the call, the call)
LOSSES = [
    ("one_pass", loss_scene("A/dapo-t/on-policy/f32")),
    ("one_pass", loss_scene("A/cispo-t/off-policy/bf16")),
    ("one_pass", loss_scene("G/f64/grpo")),
    ("one_pass", loss_scene("G/f16/sapo")),
    ("one_pass", loss_scene("B/head/f32", autocast=True)),
    ("one_pass", loss_scene("B/entropy/dapo-t", "weight bias")),
    ("one_pass", loss_scene("B/bias/f32", "hidden weight")),
    ("one_pass", loss_scene("B/kl/dapo-t", backend="triton")),
    ("two_pass", loss_scene("B/everything/grpo-s")),
    ("two_pass", loss_scene("B/everything/vespo-t")),
    ("two_pass", loss_scene("B/everything/gmpo-t")),
    ("two_pass", loss_scene("B/vespo-shape/batch")),
    ("two_pass", loss_scene("G/transposed/grpo")),
    ("two_pass", loss_scene("D/first_empty/gmpo", is_packed=True)),
    ("two_pass", loss_scene("C/0x5/vespo")),
    ("two_pass", loss_scene("D/none/vespo")),
    ("lean", loss_scene("C/workspace-2/luspo", engine="lean")),
    ("frozen", loss_scene("A/vespo-t/off-policy/f32", "weight bias")),
    ("score", loss_scene("B/input-logits/bf16", "hidden weight bias")),
]
SCORES = [
    score_scene("B/bias/f32"),
    score_scene("B/bias/f32", autocast=True),
    score_scene("B/head/f32", "bias", extras=("is_top1", "mean_logits")),
    score_scene("B/hot/f32", "hidden", backend="triton"),
    score_scene("B/input-logits/bf16", upstream=(1.0, 0.0), mask=False),
    score_scene(
        "C/1x40x8x33/dapo",
        upstream=(1.0, 0.0),
        temperature=torch.linspace(0.5, 1.5, 40)[None],
        entropy=False,
    ),
    score_scene("G/sliced/dapo", expected=torch.ones(3, 8), engine="one_pass", eager="two_pass"),
    score_scene("C/workspace-2/grpo", engine="lean", workspace_bytes=300, eager="lean"),
    score_scene("G/f64/dapo", "hidden"),
    score_scene("G/transposed/dapo", "weight bias", (0.3, 0.0), entropy=False),
    score_scene("B/scale/f16", "weight bias", eager="two_pass"),
    score_scene("C/0x5/dapo", "weight bias", (1.0, 0.0), entropy=False),
    score_scene("B/softcap/f32", "hidden weight bias", extras=("is_top1", "log_sum_sq_probs")),
]
