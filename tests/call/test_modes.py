"""A table of calls in every mode: compiled to the bits of eager calls, fake with their looks, of ops that are sound."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.library import opcheck

from tests.support.modes import LOSSES, SCORES, Scene, assert_same_bits, compiled, looks

EVERY_CHECK = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
pytestmark = pytest.mark.usefixtures("nothing_compiled")

# the last of `EVERY_CHECK` takes ten times as long as the others
TRACED = ["loss G/f64/grpo", "loss G/transposed/grpo", "scores B/head/f32", "scores G/transposed/dapo"]


@pytest.mark.parametrize(("engine", "scene"), [*LOSSES, *(("any", scene) for scene in SCORES)], ids=str)
def test_every_mode(engine: str, scene: Scene) -> None:
    fast, recorder = compiled(scene.function)
    for upstream in scene.upstreams:
        want = scene.run(upstream)
        assert_same_bits(scene.run(upstream, fast), want)
    assert recorder.graphs == 1
    assert all(isinstance(x, Tensor) for x in recorder.inputs)  # a graph would be made for each value of a number
    assert looks(scene.run_with_fake_tensors()) == looks(want)
    assert recorder.calls
    checks = EVERY_CHECK if scene.name in TRACED else EVERY_CHECK[:3]
    for op, given in recorder.calls:
        assert opcheck(op, given, test_utils=checks) == dict.fromkeys(checks, "SUCCESS")

    if scene in SCORES:  # their upstream gradient is NaN where masked
        assert recorder.ops["forward"] == ["linear_logprob"]
        assert all(x is None or x.isfinite().all() for name, x in want.items() if name.startswith("d_"))
    else:
        assert want["engine"] == engine
        recomputes = engine in ("two_pass", "lean")
        assert recorder.ops == {
            "forward": ["policy_loss"], "backward": ["linear_logprob_backward"] if recomputes else [],
        }  # fmt: skip
