"""The plug-in's forward in verl's code, against verl's torch backend and the model's own logits;
and how it gets into verl and out again, also where verl is not as we know it."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
from benchmarks import tiny_models
from grpo_kernels import verl as plugin
from grpo_kernels.verl import forward as verl_forward
from grpo_kernels.verl import patch_verl, unpatch_verl
from grpo_kernels.verl.engine import ARGUMENT
from grpo_kernels.verl.rows import HeadTask
from tests.support import verl_peer
from tests.support.case_builder import seeded
from tests.support.on_device import relative
from tests.support.verl_peer import TEMPERATURE

pytestmark = [pytest.mark.unit, verl_peer.needs_verl]

Scored = tuple[Tensor, Tensor, dict[str, Tensor]]


@pytest.fixture
def verl_patch() -> Iterator[ModuleType]:
    with verl_peer.patched() as module:
        yield module


def text_model(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    if kind == "qwen2":
        return verl_peer.text_model("Qwen2", vocab_size=203, num_hidden_layers=2).to(dtype)
    return verl_peer.with_own_class(tiny_models.model(kind, dtype=dtype))


def batch(packed: bool) -> dict[str, Any]:
    """Two sequences, one shorter: padded on the left, or packed into one row."""
    ids = torch.randint(2, 97, (2, 9))
    if not packed:
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        return {"input_ids": ids * mask, "attention_mask": mask}
    positions = torch.cat([torch.arange(6), torch.arange(9)])[None]
    return {"input_ids": ids.view(1, -1)[:, 3:], "attention_mask": None, "position_ids": positions}


def backward(model: nn.Module, logps: Tensor, entropy: Tensor) -> Scored:
    """The two, and the gradient of all parameters of a loss that reads both."""
    a, b = torch.randn((2, *logps.shape), generator=seeded("verl"), dtype=torch.float64)
    model.zero_grad()
    (logps.double() * a + entropy.double() * b).sum().backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return logps.detach(), entropy.detach(), gradients


def own_logits(model: nn.Module, inputs: dict[str, Any]) -> Scored:
    model = copy.deepcopy(model).double()
    forward = type(model).__mro__[1].forward
    logps = (forward(model, **inputs, use_cache=False).logits / TEMPERATURE).log_softmax(-1)
    ids = inputs["input_ids"].roll(-1, -1)
    entropy = -(logps.exp() * logps).sum(-1)
    return backward(model, logps.gather(-1, ids[..., None])[..., 0], entropy)


def through_verl(patch, backend, model, inputs, **more):
    """As verl's FSDP engine calls a model that it has patched."""
    patch.apply_monkey_patch(
        model,
        use_remove_padding="position_ids" in inputs,
        use_fused_kernels=True,
        fused_kernels_backend=backend,
    )
    output = model(**inputs, temperature=TEMPERATURE, return_dict=True, use_cache=False, **more)
    assert type(output).__name__.endswith("CausalLMOutputForPPO")
    assert output.logits is None
    return backward(model, output.log_probs, output.entropy)


def errors(got: Scored, want: Scored) -> dict[str, float]:
    """Largest errors of logps and entropies, and the largest relative one of a gradient."""
    assert got[2].keys() == want[2].keys()
    return {
        "logps": float((got[0] - want[0]).abs().max()),
        "entropy": float((got[1] - want[1]).abs().max()),
        "gradient": max(relative(x, want[2][n]) for n, x in got[2].items()),
    }


def test_labels(verl_patch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids are aligned with the hidden states, or refused."""
    model, inputs = text_model("qwen3"), batch(packed=False)
    others = (inputs["input_ids"] + 1) % 97
    both = {"labels": others, "shift_labels": inputs["input_ids"].clamp(max=5)}
    for more in ({}, {"labels": others}, both):
        want = through_verl(verl_patch, "torch", model, inputs, **more)
        ours = through_verl(verl_patch, "grpo_kernels", model, inputs, **more)
        assert max(errors(ours, want).values()) < 1e-4
    with pytest.raises(ValueError, match=r"shift_labels: expected \(2, 9\)"):
        model(**inputs, return_dict=True, shift_labels=others[:, 1:])
    with pytest.raises(ValueError, match="shift_labels, labels, input_ids: expected one, got none"):
        model(inputs_embeds=model.model.embed_tokens(inputs["input_ids"]), return_dict=True)
    with pytest.raises(NotImplementedError, match="pixel_values: expected text"):
        model(**inputs, return_dict=True, pixel_values=torch.ones(1))
    ulysses = verl_peer.verl_module("utils.ulysses")
    monkeypatch.setattr(ulysses, "get_ulysses_sequence_parallel_world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"shift_labels: .*span 2 ranks"):
        model(**inputs, return_dict=True)
    model(**inputs, return_dict=True, shift_labels=inputs["input_ids"])


@pytest.mark.parametrize(
    ("kind", "packed"),
    [
        *(("qwen2", False), ("qwen2", True), ("tied", False)),
        *(("softcap", True), ("logit_scale", False), ("bias", True)),
    ],
)
def test_forward(verl_patch: ModuleType, kind: str, packed: bool) -> None:
    """What a model does to its logits verl's fused heads leave out, but not the sampler."""
    model, inputs = text_model(kind, torch.float64), batch(packed)
    more = {"shift_labels": inputs["input_ids"].roll(-1, -1)} if packed else {}
    want = own_logits(model, inputs)
    ours = through_verl(verl_patch, "grpo_kernels", model, inputs, **more)
    assert max(errors(ours, want).values()) < 1e-11
    theirs = through_verl(verl_patch, "torch", model, inputs, **more)[0]
    assert ((theirs - want[0]).abs().max() < 1e-3) == (kind in ("qwen2", "tied"))


@pytest.mark.usefixtures("forget_warnings")
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"])
def test_vision_language(verl_patch: ModuleType, kind: str) -> None:
    """Text alone, since verl's handling of images needs an older release."""
    model = verl_peer.vision_model(kind)
    inputs = {"input_ids": torch.randint(3, 80, (2, 9)), "attention_mask": torch.ones(2, 9)}
    inputs["position_ids"] = torch.arange(9).expand(4, 2, 9).contiguous()
    found = []
    for backend in ("torch", "grpo_kernels"):
        verl_patch.patch_forward_with_backends(model, True, backend)
        output = model(**inputs, temperature=TEMPERATURE, use_cache=False)
        found.append((*backward(model, output.log_probs, output.entropy), type(output)))
    assert found[0][3] is found[1][3]
    task = HeadTask()
    task.layout = "tree"
    with pytest.warns(UserWarning, match="position_ids is not a value per token"):
        output = model(**inputs, temperature=TEMPERATURE, use_cache=False, **{ARGUMENT: task})
    assert torch.equal(output.log_probs, found[1][0])
    assert max(errors(found[1][:3], found[0][:3]).values()) < 1e-5


# What a user's process does, with the package installed: it imports verl, and nothing of ours
FRESH = """
import sys, verl
loaded = "grpo_kernels.verl_plugin" in sys.modules
assert loaded, "install the package again, for its metadata"
models = "transformers.modeling_utils" in sys.modules
assert not models, "a process that asks for nothing must not pay for the models"
print([type(finder).__module__ for finder in sys.meta_path])
"""


@pytest.fixture(autouse=True)
def nothing_patched() -> Iterator[None]:
    importlib.import_module("verl")  # which patches the first time, not within a test
    unpatch_verl()
    yield
    unpatch_verl()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], ModuleType]]:
    """Imports a module `verl_stand_in`, which we patch as we do verl's: `VALUE` becomes 2."""

    def changes(module: ModuleType) -> Iterator[tuple[ModuleType, str, int]]:
        if module.VALUE != 1:
            raise LookupError("VALUE is not 1")
        yield module, "VALUE", 2

    (tmp_path / "verl_stand_in.py").write_text("VALUE = 1\n\n\ndef own():\n    return VALUE\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(plugin.PATCHERS, "verl_stand_in", changes)
    yield lambda: importlib.import_module("verl_stand_in")
    unpatch_verl()
    sys.modules.pop("verl_stand_in", None)


@pytest.mark.slow
def test_import_verl_is_enough(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=600, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert plugin.__name__ in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("first", ["patch", "import"])
def test_any_order_and_back(library: Callable[[], ModuleType], first: str) -> None:
    if first == "import":
        assert library().VALUE == 1
    for _ in range(2):  # the second call changes nothing
        patch_verl()
    module = library()
    assert module.own() == 2
    assert "return VALUE" in inspect.getsource(module.own)
    assert importlib.reload(module).VALUE == 2
    unpatch_verl()
    assert module.VALUE == 1
    unpatch_verl()
    assert importlib.reload(module).VALUE == 1


def test_what_is_not_verls_of_0_9_1_is_left_alone(library: Callable[[], ModuleType]) -> None:
    """What another has put there before us, after a warning, or since."""
    verl_peer.verl_module("protocol")
    module = library()
    module.VALUE = 5
    with pytest.warns(
        RuntimeWarning, match=r"differs from verl 0\.9\.1 .*VALUE is not 1.*unpatched"
    ):
        patch_verl()
    assert module.VALUE == 5
    assert importlib.reload(module).VALUE == 2
    module.VALUE = 3
    unpatch_verl()
    assert module.VALUE == 3


class Other(type):
    """A class that has everything, with other parameters than verl's."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Other(name, (), {"__init__": lambda self, model, more: None})


@pytest.mark.parametrize("name", plugin.PATCHERS)
def test_what_is_not_as_we_know_it_is_left_alone(name: str) -> None:
    with pytest.raises(LookupError, match="has no"):
        list(plugin.PATCHERS[name](ModuleType(name)))
    module: Any = Other(name, (), {})
    with pytest.raises(LookupError, match="expected the parameters"):
        list(plugin.PATCHERS[name](module))


def test_an_unknown_forward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for ours must not get another head in silence."""
    patch_verl()
    patch, model = verl_peer.monkey_patch(), verl_peer.with_own_class(tiny_models.model("qwen3"))
    before, dense = type(model).forward, verl_peer.verl_module("models.transformers.dense_common")
    with monkeypatch.context() as patched:
        patched.delattr(dense, "forward_base_model")
        verl_forward._forward.cache_clear()
        with pytest.raises(LookupError, match="dense_common has no forward_base_model"):
            patch.patch_forward_with_backends(model, True, "grpo_kernels")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(TypeError, match="head"):
        patch.patch_forward_with_backends(model, True, "grpo_kernels")
    assert type(model).forward is before


@pytest.mark.usefixtures("forget_warnings")
@pytest.mark.parametrize(
    "asked",
    [(True, "torch"), (True, "triton"), (True, "liger"), (False, "grpo_kernels"), (True, None)],
)
def test_verls_own_backends_are_verls(asked: tuple[bool, str | None]) -> None:
    module = verl_peer.monkey_patch()
    forwards = []
    for patched in (False, True):
        if patched:
            patch_verl()
        model = verl_peer.with_own_class(tiny_models.model("qwen3"))
        useless = patched and asked == (False, "grpo_kernels")
        with pytest.warns(UserWarning, match="without use_f") if useless else nullcontext():
            module.patch_forward_with_backends(model, *asked)
        forwards.append((type(model).forward, getattr(model, "_verl_fused_kernels_backend", None)))
    assert forwards[0] == forwards[1]
    assert not hasattr(model.lm_head, "logprobs")


def test_unpatching_gives_classes_their_forward_back() -> None:
    module, model = verl_peer.monkey_patch(), verl_peer.with_own_class(tiny_models.model("qwen3"))
    theirs, before = module.patch_forward_with_backends, type(model).forward
    patch_verl()
    module.patch_forward_with_backends(model, True, "torch")
    by_verl = type(model).forward
    for _ in range(2):
        module.patch_forward_with_backends(model, True, "grpo_kernels")
    assert type(model).forward not in (before, by_verl)
    unpatch_verl()
    assert type(model).forward is by_verl
    assert module.patch_forward_with_backends is theirs


def test_the_plug_in_loads_in_silence_or_tells_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl writes it to its debug log alone."""
    name = "grpo_kernels.verl_plugin"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with warnings.catch_warnings(action="error"):
        importlib.import_module(name)
    assert plugin._importer in sys.meta_path

    def broken() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("grpo_kernels.verl.patch_verl", broken)
    monkeypatch.delitem(sys.modules, name)
    with pytest.warns(RuntimeWarning, match="failed to load.*broken"), pytest.raises(RuntimeError):
        importlib.import_module(name)
