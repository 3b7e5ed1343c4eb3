"""The package as a whole: what importing it does, how its layers import each other, and `python -m grpo_kernels`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo_kernels
from grpo_kernels import Head, LossConfig, grpo_loss, linear_divergence, linear_logprob
from grpo_kernels.batch.inputs import LossInputs
from grpo_kernels.call.run import Execution
from grpo_kernels.call.scores import ScoreCall
from grpo_kernels.compiled import calls
from grpo_kernels.engine.first_order import _Refusal, _Tie
from grpo_kernels.head.lm_head import LMHead

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

# folder -> the folders that its files may reach, through whatever they import; its own is one of them
REACHES = {
    "base": set(),
    "token_loss": set(),
    "advantages": {"base"},
    "rewards": {"base"},
    "rollouts": {"base"},
    "batch": {"base"},
    "backends": {"base", "token_loss"},
    "engine": {"base", "token_loss", "backends"},  # the vocabulary, and no policy
    "objective": {"base", "token_loss", "batch"},  # the policy, and no vocabulary
    "head": {"base", "token_loss", "backends", "engine"},
}
REACHES["call"] = {*REACHES}
REACHES["compiled"] = {*REACHES}
REACHES["public"] = INNER = {*REACHES}
REACHES |= {name: {*INNER, "public"} for name in ("diagnostics", "integrations")}
FILES_OF = {"diagnostics": {"__main__", "report"}, "objective": {"objectives", "presets"}}
PUBLIC = {"divergence", "expectation", "from_logps", "logprob", "loss", "modules", "topk_divergence"}
FILES_OF["public"] = {*PUBLIC, "typing"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False)


def folder(path: Path) -> str:
    """grpo_kernels/engine/sweep.py -> engine; of the files at the top, as `FILES_OF` says."""
    first, *more = path.relative_to(ROOT).parts
    if more:
        return first
    return next(name for name, files in FILES_OF.items() if first.removesuffix(".py") in files)


def imported(path: Path) -> set[Path]:
    """The files of the package that a file imports, wherever in it the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: import by the whole path"
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return {MODULES[name] for name in found if name in MODULES}


def reached(path: Path) -> set[Path]:
    """What a file imports, and what that imports, and so on."""
    found: set[Path] = set()
    ahead = imported(path)
    while ahead:
        found |= ahead
        ahead = {more for file in ahead for more in IMPORTS[file]} - found
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES if path.parent != ROOT or path.stem != "__init__"}
IMPORTS = {path: imported(path) for path in MODULES.values()}


def test_import_loads_no_heavy_package_says_nothing_and_warns_of_nothing():
    listed = f"import sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = run("-W", "error::DeprecationWarning:grpo_kernels", "-c", f"import grpo_kernels; {listed}")
    torch_alone = run("-c", f"import torch; {listed}")  # torch itself may load some of them
    assert (done.returncode, done.stdout, done.stderr) == (0, torch_alone.stdout, "")


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


def test_dir_is_what_is_public():
    shown = {name for name in dir(grpo_kernels) if not name.startswith("__")}
    assert shown == {*grpo_kernels.__all__, "typing"}
    assert all(hasattr(grpo_kernels, name) for name in dir(grpo_kernels))


def test_a_name_that_has_gone_says_what_to_call_instead():
    with pytest.raises(TypeError, match=r"^kept_set_logprob: .* call linear_logprob\(..., kept_ids=...\)$"):
        grpo_kernels.kept_set_logprob(None, None)
    with pytest.raises(AttributeError, match=r"^module 'grpo_kernels' has no attribute 'grpo_los'$"):
        _ = grpo_kernels.grpo_los


def test_an_integration_is_imported_when_it_is_first_asked_for():
    name = "grpo_kernels.integrations.liger"
    done = run("-c", f"import grpo_kernels, sys; print({name!r} in sys.modules, {name}.patch_liger.__module__)")
    assert (done.stdout.split(), done.stderr) == (["False", name], "")
    with pytest.raises(AttributeError, match=r"no attribute 'tlr'; there are liger, transformers, trl, verl$"):
        _ = grpo_kernels.integrations.tlr


def test_json_report_and_self_check():
    done = run("-m", "grpo_kernels", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["ok"]
    assert len(said["checks"]) >= 10
    assert all(check["ok"] for check in said["checks"])
    assert sum(check["name"].endswith("V 9001, bfloat16") for check in said["checks"]) >= 5
    assert said["environment"]["versions"]["torch"] == torch.__version__
    assert set(said["environment"]["backend"]) >= {"cpu"}


def test_text_report():
    done = run("-m", "grpo_kernels", "--no-check")
    assert done.returncode == 0, done.stderr
    assert "backend" in done.stdout
    assert "self-check" not in done.stdout


def test_version_is_printed():
    done = run("-m", "grpo_kernels", "--version")
    assert (done.returncode, done.stdout) == (0, f"grpo_kernels {grpo_kernels.__version__}\n")


def test_a_reader_that_has_enough_gets_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "grpo_kernels", "memory", "--model", "Qwen3-8B", "--rows", "8"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_self_check_sees_a_wrong_result(monkeypatch):
    from grpo_kernels.diagnostics import selfcheck

    def half(*args: Any, **kwargs: Any) -> Any:
        out = grpo_loss(*args, **kwargs)
        object.__setattr__(out, "loss", out.loss * 0.5)
        return out

    def raises(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no")

    def off(*args: Any, **kwargs: Any) -> Any:
        found = linear_divergence(*args, **kwargs)
        return replace(found, divergence=1.01 * found.divergence)

    monkeypatch.setattr(selfcheck, "grpo_loss", half)
    monkeypatch.setattr(selfcheck, "linear_logprob", raises)
    monkeypatch.setattr(selfcheck, "linear_divergence", off)
    checks = selfcheck.run([torch.device("cpu")])
    assert not any(check.ok for check in checks)
    assert "RuntimeError: no" in selfcheck.render(checks)
    assert [x.error for x in checks].count(None) == 3  # of each head one; the others came to a number


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
            scores = linear_logprob(h, Head(w, b), ids, mask=mask, expected=expected)
            (scores.logps + 2 * scores.entropies).sum().backward()
        of_ours = [(None, {"importance_sampling_level": x, "entropy_coef": 0.01}) for x in ("token", "sequence")]
        for objective, terms in (*of_ours, (rowwise, {}), (whole, {})):
            config = LossConfig(loss_type="grpo", **terms)
            for old_logps in (None, old):
                out = grpo_loss(
                    h,
                    Head(w, b),
                    ids,
                    mask,
                    advantages,
                    old_per_token_logps=old_logps,
                    config=config,
                    objective=objective,
                )
                out.loss.backward()
        differentiate_compiled(h, w, b, (ids, mask, advantages, old))
    kept = torch.arange(7).expand(2, 3, 7)
    scores = linear_logprob(hidden.clone().requires_grad_(), weight, ids, kept_ids=kept, mask=mask)
    grpo_kernels.policy_loss_from_logps(scores.logps, scores.entropies, mask, advantages).loss.backward()


def differentiate_compiled(hidden: Any, weight: Any, bias: Any, batch: tuple[Any, ...]) -> None:
    """The same for what torch.compile traces, run as it stands."""
    ids, mask, advantages, old = batch
    head, inputs = LMHead(weight, bias, hidden=hidden), LossInputs(ids, mask, advantages, old)
    for level, bonus in itertools.product(("token", "sequence"), (0.0, 0.1)):
        config = LossConfig(importance_sampling_level=level, entropy_coef=bonus)
        calls._policy_loss(inputs, head, Execution(), config)[0].backward()
    for outputs in ((), ("entropy",)):
        found = calls._linear_logprob(ScoreCall(mask, 1.0, outputs, ids), head, Execution())
        sum(found.given.values()).sum().backward()


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


@pytest.mark.parametrize("name", REACHES)
def test_imports_flow_one_way(name):
    of_folder = [path for path in IMPORTS if folder(path) == name]
    assert of_folder
    for path in of_folder:
        beyond = {file for file in reached(path) if folder(file) not in REACHES[name] | {name}}
        assert not beyond, (path, beyond)


@pytest.mark.parametrize("path", IMPORTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_reaches_itself(path):
    assert path not in reached(path)


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


def test_no_test_imports_another_and_no_benchmark_a_test():
    for where, foreign in (("tests", r"tests\.([a-z_]+\.)*test_"), ("benchmarks", r"tests\.")):
        for path in (ROOT.parent / where).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                    assert not [name for name in names if re.match(foreign, name)], f"{path}, line {node.lineno}"


def test_uninitialised_memory_is_nan():
    x = torch.ones(3, 4)
    for made in (torch.empty(5), torch.empty_like(x), x.new_empty(2), torch.empty_strided((2, 3), (3, 1))):
        assert made.isnan().all()
    assert torch.ones(2).resize_(7)[2:].isnan().all()
    assert torch.empty(3, dtype=torch.bfloat16).isnan().all()
