"""The package as a whole: what importing it does, how its layers import each other, and `python -m grpo_kernels`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo_kernels
from grpo_kernels import LossConfig, grpo_loss, linear_logprob
from grpo_kernels.call import compiled
from grpo_kernels.engine.first_order import _Refusal, _Tie

ROOT = Path(grpo_kernels.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
CORE = [path for path in FILES if "integrations" not in path.parts]  # those follow their trainer
BUILDING = {  # a compiler's and a cache's files, and the variables that any user of such knows, none of our own
    ROOT / "backends" / "cpp_rows" / "build.py": {"TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"},
    ROOT / "backends" / "cpp_rows" / "compiler.py": {"CXX"},
}
HEAVY = (
    "accelerate",
    "datasets",
    "liger_kernel",
    "matplotlib",
    "pandas",
    "peft",
    "transformers",
    "triton",
    "trl",
    "verl",
)

# layer -> the layers it must not import; a layer is the first name below grpo_kernels
CALLS = {"head", "call", "ops", "compiled", "logprob", "loss"}  # one call, each on those before it
ENTRIES = CALLS | {"kept_set", "from_logps", "head_parameters", "modules", "integrations", "advantages", "rewards"}
ENTRIES |= {"head_hooks", "report", "selfcheck", "__main__"}
# per-token numbers, no vocabulary
POLICY = {"objective", "evaluation", "surrogates", "custom", "objectives", "aggregate", "metrics", "batch"}
POLICY |= {"log_ratio", "masks", "sampling", "span", "described"}
HEAD = {"engine", "backends"}  # the vocabulary, no policy
BASE = ("config", "presets", "checks", "distributed", "agreement", "token_loss", "quantile")  # of all the others
NEVER = {
    **dict.fromkeys(POLICY, HEAD | ENTRIES),
    **dict.fromkeys(BASE, HEAD | ENTRIES | POLICY),
    **dict.fromkeys(
        ("advantages", "rewards", "loop_thread", "group_stats"), HEAD | POLICY | ENTRIES - {"advantages", "rewards"}
    ),
    "lora": HEAD | ENTRIES | POLICY,
    "sharding": ENTRIES | POLICY | {"backends"},
    "engine": POLICY | ENTRIES | {"config", "presets"},
    "backends": POLICY | ENTRIES | {"config", "presets", "engine"},
    "head": POLICY - {"batch"} | ENTRIES,
    "call": ENTRIES - {"head"},
    "ops": ENTRIES - {"head", "call"},
    "compiled": ENTRIES - {"head", "call", "ops"},
    "logprob": POLICY | ENTRIES - {"head", "compiled"},
    "loss": ENTRIES - {"head", "call", "compiled"},
    "expectation": ENTRIES - {"logprob"},
    **dict.fromkeys(("head_hooks", "head_parameters"), POLICY | ENTRIES),
    "modules": POLICY | ENTRIES - {"head_hooks", "head_parameters", "logprob", "loss"},
    "kept_set": POLICY - {"batch"} | ENTRIES - {"head", "compiled"},
    "from_logps": ENTRIES - {"loss", "compiled"},
    "integrations": {"report", "selfcheck", "__main__"},
}
FREE = {"__init__", "__main__", "report", "selfcheck"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False)


def layer(path: Path) -> str:
    """grpo_kernels/engine/plan.py -> engine; grpo_kernels/loss.py -> loss"""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_layers(path: Path) -> Iterator[str]:
    """The layers that a file imports, wherever in it the import stands."""
    package = ("grpo_kernels", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) + 1 - node.level]] if node.level else [])
            module = ".".join(filter(None, [base, node.module]))
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "grpo_kernels" and len(parts) > 1:
                yield parts[1]


def test_import_loads_no_heavy_package():
    heavy = run("-c", f"import grpo_kernels, sys; print([name for name in {HEAVY} if name in sys.modules])")
    # torch itself may load some of them
    torch_alone = run("-c", f"import torch, sys; print([name for name in {HEAVY} if name in sys.modules])")
    assert heavy.returncode == 0, heavy.stderr
    assert heavy.stdout == torch_alone.stdout


def test_import_prints_nothing_and_warns_of_nothing():
    done = run("-W", "error::DeprecationWarning:grpo_kernels", "-c", "import grpo_kernels")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_version_is_the_distributions():
    assert grpo_kernels.__version__ == metadata.version("grpo-kernels")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no release elsewhere")
def test_triton_is_there_so_that_no_kernel_goes_untested():
    assert importlib.util.find_spec("triton") is not None


def test_ships_its_types():
    assert resources.files("grpo_kernels").joinpath("py.typed").is_file()


@pytest.mark.parametrize("name", grpo_kernels.__all__)
def test_public_names_are_documented(name):
    assert (getattr(grpo_kernels, name).__doc__ or "").strip()


def test_json_report_and_self_check():
    done = run("-m", "grpo_kernels", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["ok"]
    assert len(said["checks"]) >= 10
    assert all(check["ok"] for check in said["checks"])
    assert said["environment"]["versions"]["torch"] == torch.__version__
    assert set(said["environment"]["backend"]) >= {"cpu"}


def test_text_report():
    done = run("-m", "grpo_kernels", "--no-check")
    assert done.returncode == 0, done.stderr
    assert "backend" in done.stdout
    assert "self-check" not in done.stdout


def test_self_check_sees_a_wrong_result(monkeypatch):
    from grpo_kernels.diagnostics import selfcheck

    def half(*args: Any, **kwargs: Any) -> Any:
        out = grpo_loss(*args, **kwargs)
        object.__setattr__(out, "loss", out.loss * 0.5)
        return out

    def raises(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(selfcheck, "grpo_loss", half)
    monkeypatch.setattr(selfcheck, "linear_logprob", raises)
    checks = selfcheck.run([torch.device("cpu")])
    assert not any(check.ok for check in checks)
    assert "RuntimeError: no" in selfcheck.render(checks)


def autograd_functions() -> set[type[torch.autograd.Function]]:
    """Those that any module of the package defines."""
    names = [found.name for found in pkgutil.walk_packages([str(ROOT)], "grpo_kernels.")]
    values = [
        x for name in names if not name.endswith("__main__") for x in vars(importlib.import_module(name)).values()
    ]
    kinds = {x for x in values if isinstance(x, type) and issubclass(x, torch.autograd.Function)}
    return {kind for kind in kinds if kind.__module__.startswith("grpo_kernels.")}


def differentiate_everything() -> None:
    """A backward through every engine of both public functions: trainable and frozen heads, with and without a bias."""
    hidden, weight, bias = torch.randn(2, 3, 4), torch.randn(7, 4), torch.randn(7)
    ids, mask, old = torch.randint(7, (2, 3)), torch.tensor([[1, 1, 1], [1, 0, 0]]), -torch.ones(2, 3)
    advantages = torch.tensor([1.0, -1.0])

    @grpo_kernels.token_level
    def rowwise(tokens: Any) -> torch.Tensor:
        return -tokens.advantages * tokens.logps - 0.01 * tokens.entropies

    def whole(tokens: Any) -> torch.Tensor:
        return -tokens.logps * tokens.logps.detach().sum()

    for trains, head_bias in itertools.product((True, False), (None, bias)):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trains)
        b = None if head_bias is None else head_bias.clone().requires_grad_(trains)
        for expected in (None, torch.ones(2, 3), (torch.ones(2, 3), torch.ones(2, 3))):
            logps, entropy = linear_logprob(h, w, ids, bias=b, mask=mask, expected=expected)
            (logps + 2 * entropy).sum().backward()
        for level, objective in itertools.product(("token", "sequence"), (None, rowwise, whole)):
            bonus = 0.01 if objective is None else 0.0
            config = LossConfig(loss_type="grpo", importance_sampling_level=level, entropy_coef=bonus)
            for old_logps in (None, old):
                out = grpo_loss(
                    h,
                    w,
                    ids,
                    mask,
                    advantages,
                    bias=b,
                    old_per_token_logps=old_logps,
                    config=config,
                    objective=objective,
                )
                out.loss.backward()
        differentiate_compiled(h, w, b, (ids, mask, advantages, old))
    kept = torch.arange(7).expand(2, 3, 7)
    logps, entropies = grpo_kernels.kept_set_logprob(hidden.clone().requires_grad_(), weight, ids, kept, mask=mask)
    grpo_kernels.policy_loss_from_logps(logps, entropies, mask, advantages).loss.backward()


def differentiate_compiled(hidden: Any, weight: Any, bias: Any, batch: tuple[Any, ...]) -> None:
    """The same for what torch.compile traces, run as it stands."""
    ids, mask, advantages, old = batch
    absent = dict.fromkeys(("ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"))
    absent |= dict.fromkeys(("num_items_in_batch", "cu_seqlens", "workspace_bytes"))
    for level, bonus in itertools.product(("token", "sequence"), (0.0, 0.1)):
        loss, *_ = compiled.policy_loss(
            hidden,
            weight,
            ids,
            mask,
            advantages,
            bias=bias,
            old_per_token_logps=old,
            config=LossConfig(importance_sampling_level=level, entropy_coef=bonus),
            engine="auto",
            backend="auto",
            **absent,
        )
        loss.backward()
    for outputs in ((), ("entropy",)):
        found = compiled.linear_logprob(
            hidden,
            weight,
            ids,
            bias=bias,
            mask=mask,
            temperature=1.0,
            final_logit_softcapping=None,
            logit_scale=1.0,
            outputs=outputs,
            logits_dtype="float32",
            engine="auto",
            backend="auto",
            workspace_bytes=None,
        )
        sum(found.values()).sum().backward()


def test_backward_returns_a_gradient_for_each_input(monkeypatch):
    # torch takes a surplus of None in silence, so that a forward and its backward drift apart unseen.
    counts: dict[type, set[tuple[int, int]]] = {}

    def counting(function: type[torch.autograd.Function]) -> Callable[..., Any]:
        backward = function.backward

        def count(ctx: Any, *upstream: Any) -> Any:
            gradients = backward(ctx, *upstream)
            returned = len(gradients) if isinstance(gradients, tuple) else 1
            counts.setdefault(function, set()).add((returned, len(ctx.needs_input_grad)))
            return gradients

        return count

    functions = autograd_functions() - {_Refusal, _Tie}  # whose backwards only raise
    for function in functions:
        monkeypatch.setattr(function, "backward", staticmethod(counting(function)))
    differentiate_everything()
    assert functions
    assert counts.keys() == functions, "a Function that differentiate_everything() does not reach"
    for function, pairs in counts.items():
        assert all(returned == taken for returned, taken in pairs), (function, pairs)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_flow_one_way(path):
    assert layer(path) in NEVER.keys() | FREE, "a layer that the table above does not know"
    assert not NEVER.get(layer(path), set()) & (set(imported_layers(path)) - {layer(path)})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_reads_no_environment_variable(path):
    if path in BUILDING:
        read = set(re.findall(r'environ\.get\("(\w+)"', path.read_text()))
        assert read == BUILDING[path]
        assert path.read_text().count("environ") == len(read)
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("environ", "environb", "getenv", "putenv"), f"line {node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            assert not {alias.name for alias in node.names} & {"environ", "environb", "getenv", "putenv"}


def test_uninitialised_memory_is_nan():
    x = torch.ones(3, 4)
    for made in (torch.empty(5), torch.empty_like(x), x.new_empty(2), torch.empty_strided((2, 3), (3, 1))):
        assert made.isnan().all()
    assert torch.ones(2).resize_(7)[2:].isnan().all()
    assert torch.empty(3, dtype=torch.bfloat16).isnan().all()
