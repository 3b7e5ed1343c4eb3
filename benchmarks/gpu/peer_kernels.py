"""One peer without a GPU: is it importable, and do the Triton kernels that it launches compile for sm_90?

``python -m benchmarks.gpu.peer_kernels NAME FOLDER...``, the folders being those of its wheels. Its adapter is called
as in the main case, forward and backward, with tensors without memory (`meta_gpu`); launches are caught, and compiled
ahead of time. An autotuned kernel is compiled in the first configuration that it would try. The last line is JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import site
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

PACKAGES = {  # of the adapters' modules
    "trl": "trl", "liger_grpo": "liger_kernel", "liger_ce": "liger_kernel", "unsloth": "unsloth_zoo", "verl": "verl",
    "cce": "cut_cross_entropy", "quack": "quack",
}  # fmt: skip
ARCH = "sm_90"


def main(name: str, *folders: str) -> None:
    """Check the peer and print what was found."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("CUTE_DSL_ARCH", ARCH + "a")
    os.environ.pop("TRITON_INTERPRET", None)
    for folder in folders:
        site.addsitedir(folder)
    print(json.dumps(check(name, folders)), flush=True)


def check(name: str, folders: tuple[str, ...] = ()) -> dict[str, Any]:
    """``importable`` ("wheel", "installed" or "no"), ``kernels`` by name ("compiles" or why not), ``reason``."""
    import torch

    from benchmarks.gpu.meta_gpu import open_operators, pretended
    from benchmarks.harness.events import Absence, describe
    from benchmarks.harness.measure import Step
    from benchmarks.providers import build, named

    package = PACKAGES[named(name).module]
    found: dict[str, Any] = {"importable": "no", "kernels": {}, "reason": ""}
    with pretended(), mock.patch.object(torch, "compile", _as_it_is), caught() as launches:
        try:
            forward = build(name, main_inputs())
        except Absence as error:
            return {**found, "reason": _short(str(error))}
        except Exception as error:
            return {**found, "reason": _short(describe(error))}
        found["importable"] = _origin(package, folders)
        open_operators(package)
        try:
            Step(forward)()
        except Exception as error:  # what was launched till then is compiled all the same
            found["reason"] = _short(describe(error))
    found["kernels"] = compiled(launches)
    return found


def main_inputs() -> Any:
    """Those of the main case, without memory."""
    import torch

    from benchmarks.cases import Inputs
    from benchmarks.plan import gpu_cases

    case = gpu_cases()[0]
    batch, dtype = case.n // case.t, getattr(torch, case.dtype)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    hidden = empty(batch, case.t, case.h, dtype=dtype).requires_grad_()
    weight = empty(case.v, case.h, dtype=dtype).requires_grad_()
    ids = empty(batch, case.t, dtype=torch.int64)
    return Inputs(case, hidden, weight, ids, empty(batch, case.t), empty(batch), None, None)


@contextmanager
def caught() -> Iterator[list[Any]]:
    """Inside, Triton's kernels are not launched but put on the list, each different launch once."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    from benchmarks.aot.launches import describe

    launches: dict[str, Any] = {}

    def catch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = describe(self, {**dict(zip(self.arg_names, args, strict=False)), **kwargs})
        launches.setdefault(repr(launch), launch)
        into[:] = launches.values()

    def first(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
        config = self.configs[0]
        return self.fn.run(*args, **{**kwargs, **config.all_kwargs()})

    into: list[Any] = []
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", catch))
        stack.enter_context(mock.patch.object(Autotuner, "run", first))
        yield into


def compiled(launches: list[Any]) -> dict[str, str]:
    """Each kernel by name: "compiles", or what the compiler says of the first launch that does not."""
    import triton
    from triton.compiler import ASTSource

    from benchmarks.aot.checks import target_of

    found: dict[str, str] = {}
    for launch in launches:
        name = launch.kernel.__name__
        try:
            source = ASTSource(launch.kernel, launch.signature, launch.constexprs, launch.attrs)
            triton.compile(source, target=target_of(ARCH), options=launch.options)
            found.setdefault(name, "compiles")
        except Exception as error:
            found[name] = f"{type(error).__name__}: {_short(str(error)[-300:])}"
    return found


def _short(text: str) -> str:
    """One line without a terminal's colours."""
    return " ".join(re.sub(r"\x1b\[[\d;]*m", "", text).split())[:300]


def _as_it_is(function: Any = None, **_: Any) -> Any:
    """Instead of `torch.compile`: what that would make is torch's, not the peer's."""
    return _as_it_is if function is None else function


def _origin(package: str, folders: tuple[str, ...]) -> str:
    """Whether the package comes from the wheels' folders; what is installed comes before them."""
    module = sys.modules.get(package)
    if module is not None:
        places = list(getattr(module, "__path__", []))
    else:
        spec = importlib.util.find_spec(package)
        places = list(spec.submodule_search_locations or []) if spec else []
    return "wheel" if any(place.startswith(tuple(folders)) for place in places if folders) else "installed"


if __name__ == "__main__":
    main(*sys.argv[1:])
