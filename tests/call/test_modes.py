"""A table of calls in every mode: compiled to the bits of eager calls, fake with their looks, of ops that are sound.

And what no graph holds: an adapter, kept sets, a teacher.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tests.support import run_case
from tests.support.case_builder import make_case
from tests.support.modes import LOSSES, SCORES, Results, Scene, assert_same_bits, compiled, looks

EVERY_CHECK = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
pytestmark = pytest.mark.usefixtures("nothing_compiled")

# the last of `EVERY_CHECK` takes ten times as long as the others
TRACED = [
    "loss G/f64/grpo",
    "loss G/transposed/grpo",
    "scores B/head/f32",
    "scores G/transposed/dapo",
]


@pytest.mark.parametrize(
    ("engine", "scene"), [*LOSSES, *(("any", scene) for scene in SCORES)], ids=str
)
def test_every_mode(engine: str, scene: Scene) -> None:
    fast, recorder = compiled(scene.function)
    for upstream in scene.upstreams:
        want = scene.run(upstream)
        assert_same_bits(scene.run(upstream, fast), want)
    assert recorder.graphs == 1
    assert all(
        isinstance(x, Tensor) for x in recorder.inputs
    )  # a graph would be made for each value of a number
    assert looks(scene.run_with_fake_tensors()) == looks(want)
    assert recorder.calls
    checks = EVERY_CHECK if scene.name in TRACED else EVERY_CHECK[:3]
    for op, given in recorder.calls:
        assert opcheck(op, given, test_utils=checks) == dict.fromkeys(checks, "SUCCESS")

    if scene in SCORES:  # their upstream gradient is NaN where masked
        assert recorder.ops["forward"] == ["linear_logprob"]
        assert all(
            x is None or x.isfinite().all() for name, x in want.items() if name.startswith("d_")
        )
    else:
        assert want["engine"] == engine
        recomputes = engine in ("two_pass", "lean")
        assert recorder.ops == {
            "forward": ["policy_loss"], "backward": ["linear_logprob_backward"] if recomputes else [],
        }  # fmt: skip


FULL_KL = {"kl_estimator": "full", "beta": 0.3, "teacher": 0.3}
# (function, what its case has)
EAGER = [
    ("grpo_loss", {"lora": 3, "lora_input": True}),
    ("grpo_loss", {"lora": 3, **FULL_KL}),
    ("grpo_loss", {"kept": 14, "others": {"without_set": "full"}}),
    ("linear_logprob", {"lora": 3, "temperatures": True}),
    ("linear_logprob", {"kept": 14, "bias": True}),
    ("linear_divergence", {"teacher": 0.3, "temperatures": True}),
    ("topk_divergence", {"listed": 5, "lora": 3}),
]


@pytest.mark.parametrize(("function", "options"), EAGER, ids=str)
def test_what_no_graph_holds(
    function: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph breaks there, and the results have the bits of the eager call; one graph of it all is refused."""
    case, eager = make_case("eager", **options), getattr(run_case, function)

    def results() -> Results:
        if function == "grpo_loss":
            out, grads = run_case.run(case)
            return {
                "loss": out.loss,
                "logps": out.per_token_logps,
                "entropies": out.entropies,
                **out.metrics,
                **grads,
            }
        scores, grads = run_case.run_scores(case)
        return scores | grads

    want = results()
    monkeypatch.setattr(run_case, function, torch.compile(eager, backend="eager"))
    assert_same_bits(results(), want)
    torch.compiler.reset()
    monkeypatch.setattr(run_case, function, torch.compile(eager, backend="eager", fullgraph=True))
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"grpo_kernels: .*an adapter, .*kept sets"
    ):
        results()
