"""How the plug-in gets into verl and out again, also where verl is not as we know it."""

from __future__ import annotations

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

pytest.importorskip("transformers")

from benchmarks import tiny_models
from grpo_kernels import verl as plugin
from grpo_kernels.verl import forward as verl_forward
from grpo_kernels.verl import patch_verl, unpatch_verl
from tests.support import verl_peer

pytestmark = [pytest.mark.unit, verl_peer.needs_verl]

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
    with pytest.raises(LookupError, match=r"expected the parameters|has no linear_cross"):
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module(name)
    assert plugin._importer in sys.meta_path

    def broken() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("grpo_kernels.verl.patch_verl", broken)
    monkeypatch.delitem(sys.modules, name)
    with (
        pytest.warns(RuntimeWarning, match="failed to load.*broken"),
        pytest.raises(RuntimeError),
    ):
        importlib.import_module(name)
