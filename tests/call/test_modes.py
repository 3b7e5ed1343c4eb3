"""A table of calls in every mode: compiled to the bits of eager calls, fake with their looks, of ops that are sound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from grpo_kernels import grpo_loss, linear_logprob
from tests.support.cases import fixed_cases
from tests.support.flat import flat
from tests.support.modes import Scene, assert_same_bits, compiled, looks, loss_results, score_results
from tests.support.run_case import arguments, config_of, constants_of, packed

CASES = {case.name: case for case in fixed_cases()}
EVERY_CHECK = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
pytestmark = pytest.mark.usefixtures("nothing_compiled")


def loss(name: str, frozen: str = "", *, is_packed: bool = False, autocast: bool = False, **run: Any) -> Scene:
    """A call of `grpo_loss`, under an upstream gradient of 1 and one that is no power of two."""
    case = replace(CASES[name], frozen=frozenset(frozen.split()))

    def given() -> dict[str, Any]:
        tensors = arguments(case)
        if is_packed:
            tensors = packed(case, tensors)[0]
            tensors["hidden"] = tensors["hidden"].detach().requires_grad_()
        return {**tensors, "config": config_of(case), "workspace_bytes": case.workspace_bytes, **run}

    return Scene(f"loss {name}", flat(grpo_loss), given, loss_results, (1.0, -0.3), autocast=autocast)


def scores(
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
    return Scene(f"scores {name}", flat(linear_logprob), given, score_results, (upstream,), others, autocast)


# (engine that serves the call, the call)
LOSSES = [
    ("one_pass", loss("A/dapo-t/on-policy/f32")),
    ("one_pass", loss("A/cispo-t/off-policy/bf16")),
    ("one_pass", loss("G/f64/grpo")),
    ("one_pass", loss("G/f16/sapo")),
    ("one_pass", loss("B/head/f32", autocast=True)),
    ("one_pass", loss("B/entropy/dapo-t", "weight bias")),
    ("one_pass", loss("B/bias/f32", "hidden weight")),
    ("one_pass", loss("B/kl/dapo-t", backend="triton")),
    ("two_pass", loss("B/everything/grpo-s")),
    ("two_pass", loss("B/everything/vespo-t")),
    ("two_pass", loss("B/everything/gmpo-t")),
    ("two_pass", loss("B/vespo-shape/batch")),
    ("two_pass", loss("G/transposed/grpo")),
    ("two_pass", loss("D/first_empty/gmpo", is_packed=True)),
    ("two_pass", loss("C/0x5/vespo")),
    ("two_pass", loss("D/none/vespo")),
    ("lean", loss("C/workspace-2/luspo", engine="lean")),
    ("frozen", loss("A/vespo-t/off-policy/f32", "weight bias")),
    ("score", loss("B/input-logits/bf16", "hidden weight bias")),
]
SCORES = [
    scores("B/bias/f32"),
    scores("B/bias/f32", autocast=True),
    scores("B/head/f32", "bias", extras=("is_top1", "mean_logits")),
    scores("B/hot/f32", "hidden", backend="triton"),
    scores("B/input-logits/bf16", upstream=(1.0, 0.0), mask=False),
    scores("C/1x40x8x33/dapo", upstream=(1.0, 0.0), temperature=torch.linspace(0.5, 1.5, 40)[None], entropy=False),
    scores("G/sliced/dapo", expected=torch.ones(3, 8), engine="one_pass", eager="two_pass"),
    scores("C/workspace-2/grpo", engine="lean", workspace_bytes=300, eager="lean"),
    scores("G/f64/dapo", "hidden"),
    scores("G/transposed/dapo", "weight bias", (0.3, 0.0), entropy=False),
    scores("B/scale/f16", "weight bias", eager="two_pass"),
    scores("C/0x5/dapo", "weight bias", (1.0, 0.0), entropy=False),
    scores("B/softcap/f32", "hidden weight bias", extras=("is_top1", "log_sum_sq_probs")),
]
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
