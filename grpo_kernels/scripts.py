"""Scripts that train with TRL: run with our trainer in the place of theirs, and compared with it.

`run` replaces `trl.GRPOTrainer` by `FusedGRPOTrainer`, under every name that TRL has for it, before
the script imports it; subclasses in the script then derive from ours. Other trainers of TRL get
`patch_trl`.

`compare` runs the script twice, stock and fused, each in a process of its own, for a few steps.
The fused run generates too, for the clock, but trains on the completions of the stock run: one
token that rounding decides differently would make every later number another. The script ends
where its first training ends. It saves nothing and reports to no tracker.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import os
import pickle
import random
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from grpo_kernels.memory import MIB, whole_number

STOCK, FUSED = "stock", "fused"
PHASES = ("generation", "scoring and preparing", "forward and backward", "optimizer", "other")
# methods and attributes of TRL's trainers that draw completions
SAMPLERS = ("_generate_single_turn", "rollout_func")
# clocks and schedules say nothing of the loss
NOT_COMPARED = ("time", "per_second", "epoch", "learning_rate", "total_flos")
NOISE = ("drop", "jitter", "noise")  # in names of the attributes of modules
TOLERANCE, TOLERANCE_16_BIT = 1e-3, 5e-2
OF_PARAMETERS = 10  # times the tolerance: Adam makes whole steps of rounding in tiny gradients


def use_fused_trainers() -> None:
    """From now on, whoever imports TRL's GRPO trainer gets `FusedGRPOTrainer`."""
    import trl
    from trl.trainer import grpo_trainer

    from grpo_kernels.trl import FusedGRPOTrainer, patch_trl

    for module in (trl, trl.trainer, grpo_trainer):
        module.GRPOTrainer = FusedGRPOTrainer
    patch_trl()


def use_stock_trainers() -> None:
    """From now on, whoever imports this library's trainers gets TRL's, which ignore our options."""
    import trl

    ours: Any = importlib.import_module("grpo_kernels.trl")
    parameters = inspect.signature(ours.FusedLossMixin.__init__).parameters.values()
    options = {x.name for x in parameters if x.kind is x.KEYWORD_ONLY}

    class Stock:
        def __init__(self, *given: Any, **named: Any) -> None:
            named = {name: x for name, x in named.items() if name not in options}
            super().__init__(*given, **named)

    ours.FusedLossMixin = Stock
    ours.FusedGRPOTrainer = type("GRPOTrainer", (Stock, trl.GRPOTrainer), {})
    ours.FusedDistillationTrainer = trl.DistillationTrainer
    ours.patch_trl = lambda **_: nullcontext()


def run_script(script: Path, arguments: list[str]) -> int:
    """Run a script as ``python script *arguments`` does; return its exit status.

    A traceback begins in the script. `SystemExit` is raised as it is.
    """
    sys.argv = [str(script), *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m grpo_kernels run``."""
    parser.add_argument("script", type=_script, help="a Python script that trains with TRL")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the script with our trainers."""
    use_fused_trainers()
    return run_script(options.script, options.arguments)


def _script(argument: str) -> Path:
    if not Path(argument).is_file():
        raise argparse.ArgumentTypeError(f"expected a Python file, got {argument}")
    return Path(argument)


class Watch:
    """One training of a few steps: what it logs, its seconds by phase, memory and parameters.

    The stock run leaves its completions and its parameters in `folder`, where the fused run reads
    them.
    """

    def __init__(self, variant: str, folder: Path, steps: int) -> None:
        self.variant, self.folder, self.steps = variant, folder, steps
        self.seconds: list[dict[str, float]] = []
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._within_others: list[float] = []  # seconds of the phases inside each open one
        self._step_began = 0.0
        self._optimizer_began = 0.0
        self._drawn: list[tuple[Any, Any]] = []  # completions, and the state of random numbers
        if variant == FUSED:
            self._drawn = pickle.loads((folder / "drawn.pickle").read_bytes())
        self._had_noise = False
        self._draws = 0
        self._equal_draws = 0

    def install(self) -> None:
        """Watch the first training of this process."""
        from transformers import Trainer

        init, train = Trainer.__init__, Trainer.train
        signature = inspect.signature(init)

        def watched_init(trainer: Any, *given: Any, **named: Any) -> None:
            bound = signature.bind(trainer, *given, **named)
            if bound.arguments.get("args") is not None:
                self._restrict(bound.arguments["args"])
            init(*bound.args, **bound.kwargs)

        def watched_train(trainer: Any, *given: Any, **named: Any) -> None:
            bound = inspect.signature(train).bind(trainer, *given, **named)
            bound.arguments.pop("resume_from_checkpoint", None)
            self._begin(trainer)
            train(*bound.args, **bound.kwargs)
            self._end(trainer)
            raise SystemExit(0)

        Trainer.__init__, Trainer.train = watched_init, watched_train

    def _restrict(self, args: Any) -> None:
        """Change arguments of a trainer: a log at each step, no files, no trackers."""
        from transformers.trainer_utils import IntervalStrategy, SaveStrategy

        changed = {
            "output_dir": str(self.folder / "output"),
            "report_to": [],
            "push_to_hub": False,
            "save_strategy": SaveStrategy.NO,
            "load_best_model_at_end": False,
            "logging_strategy": IntervalStrategy.STEPS,
            "logging_steps": 1,
            "eval_on_start": False,
            "log_completions": False,
            "log_completions_hub_repo": None,
        }
        for name, value in changed.items():
            if hasattr(args, name):
                setattr(args, name, value)

    def _begin(self, trainer: Any) -> None:
        from transformers import TrainerCallback

        self._restrict(trainer.args)  # what the script has changed since
        watch = self

        class Steps(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                watch._step_began = _now()

            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                watch._optimizer_began = _now()

            def on_optimizer_step(self, *_: Any, **__: Any) -> None:
                watch._spent["optimizer"] += _now() - watch._optimizer_began

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                control.should_training_stop |= state.global_step >= watch.steps

            def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
                if "loss" in logs:
                    watch._close_step()

        for name, phase in (
            ("_generate", "generation"),
            ("_prepare_inputs", "scoring and preparing"),
            ("training_step", "forward and backward"),
        ):
            if hasattr(trainer, name):
                setattr(trainer, name, self._timed(phase, getattr(trainer, name)))
        for name in SAMPLERS:
            if callable(getattr(trainer, name, None)):
                setattr(trainer, name, self._redrawn(getattr(trainer, name)))
        trainer.add_callback(Steps())
        self._had_noise = _without_noise(trainer.model)
        if self.variant == STOCK:
            torch.save(_trained(trainer.model), self.folder / "begin.pt")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def _end(self, trainer: Any) -> None:
        """Write what was watched to ``stock.json`` or ``fused.json``."""
        peak = _peak_mib()
        parameters = _trained(trainer.model)
        apart: dict[str, dict[str, float]] = {}
        if self.variant == STOCK:
            torch.save(parameters, self.folder / "end.pt")
            (self.folder / "drawn.pickle").write_bytes(pickle.dumps(self._drawn))
        else:
            apart = _parameters_apart(self.folder, parameters)
        halves, args = (torch.bfloat16, torch.float16), trainer.args
        dtypes = {x.dtype for x in trainer.model.parameters()}
        result = {
            "trainer": type(trainer).__name__,
            "device": str(args.device),
            "peak_mib": peak,
            "seconds": self.seconds,
            "logs": [_compared(x) for x in trainer.state.log_history if "loss" in x],
            "draws": self._draws,
            "equal_draws": self._equal_draws,
            "is_16_bit": args.bf16 or args.fp16 or not dtypes.isdisjoint(halves),
            "noise_off": self._had_noise,
            "parameters": apart,
        }
        (self.folder / f"{self.variant}.json").write_text(json.dumps(result))

    @contextmanager
    def _within(self, phase: str) -> Iterator[None]:
        self._within_others.append(0.0)
        began = _now()
        try:
            yield
        finally:
            took = _now() - began
            self._spent[phase] += took - self._within_others.pop()
            if self._within_others:
                self._within_others[-1] += took

    def _timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._within(phase):
                return function(*args, **kwargs)

        return timed

    def _redrawn(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        """`draw`, which in the fused run gives what it has given in the stock run."""

        def redrawn(*args: Any, **kwargs: Any) -> Any:
            drawn = draw(*args, **kwargs)
            self._draws += 1
            if self.variant == STOCK:
                self._drawn.append((drawn, _random_state()))
                return drawn
            if self._draws > len(self._drawn):
                raise RuntimeError(
                    f"compare: expected {len(self._drawn)} generations, as in the stock run, got "
                    "another"
                )
            stock, state = self._drawn[self._draws - 1]
            self._equal_draws += str(_ids(drawn)) == str(_ids(stock))
            _set_random_state(state)
            return stock

        return redrawn

    def _close_step(self) -> None:
        now = _now()
        self._spent["other"] = now - self._step_began - sum(self._spent.values())
        self.seconds.append(self._spent)
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._step_began = now


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak_mib() -> float:
    """Most memory so far, in MiB: allocated on the GPUs, or without one of this process."""
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        return sum(torch.cuda.max_memory_allocated(i) for i in devices) / MIB
    import resource  # absent on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def _random_state() -> tuple[Any, ...]:
    import numpy as np

    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpus


def _set_random_state(state: tuple[Any, ...]) -> None:
    import numpy as np

    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    torch.cuda.set_rng_state_all(state[3])


def _ids(drawn: Any) -> Any:
    """Completion ids in what a sampler returns."""
    if isinstance(drawn, dict):
        return drawn["completion_ids"]
    return drawn[0] if isinstance(drawn, tuple) else drawn


def _without_noise(model: torch.nn.Module) -> bool:
    """Turn dropout, router jitter and the like off; return whether there was any.

    The two runs compute tokens in other shapes, and would draw other noise.
    """
    found = False
    for module in model.modules():
        is_dropout = "Dropout" in type(module).__name__
        for name, x in [*vars(module).items()]:
            draws = any(part in name for part in NOISE) or (is_dropout and name == "p")
            if draws and isinstance(x, float) and x > 0.0:
                setattr(module, name, 0.0)
                found = True
    return found


def _trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.detach() for name, x in model.named_parameters() if x.requires_grad}


def _parameters_apart(folder: Path, ours: dict[str, torch.Tensor]) -> dict[str, dict[str, float]]:
    """By parameter: largest difference from stock, and norms of the difference and of what stock
    has changed."""
    begin, end = (
        torch.load(folder / name, map_location="cpu", mmap=True, weights_only=True)
        for name in ("begin.pt", "end.pt")
    )
    if ours.keys() != end.keys():
        raise RuntimeError("compare: expected the stock run's parameters, got others")
    apart = {}
    for name, x in ours.items():
        stock = end[name].double()
        difference = x.cpu().double() - stock
        apart[name] = {
            "largest": difference.abs().max().item() if x.numel() else 0.0,
            "difference": difference.norm().item(),
            "change": (stock - begin[name].double()).norm().item(),
        }
    return apart


def _compared(logs: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(x)
        for name, x in logs.items()
        if isinstance(x, (int, float)) and not any(part in name for part in NOT_COMPARED)
    }


def _watched_run() -> None:
    """A run of `compare`, in a process of its own."""
    from transformers import set_seed

    variant, folder, steps, script, *arguments = sys.argv[1:]
    (use_fused_trainers if variant == FUSED else use_stock_trainers)()
    Watch(variant, Path(folder), int(steps)).install()
    set_seed(0)
    sys.exit(run_script(Path(script), arguments))


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m grpo_kernels compare``."""
    add = parser.add_argument
    add("--steps", type=whole_number, default=3, help="optimizer steps; default: 3")
    add(
        "--tolerance",
        type=float,
        help=f"largest difference of a logged number; default: {TOLERANCE:g}, or "
        f"{TOLERANCE_16_BIT:g} with 16-bit weights or mixed precision",
    )
    add("--json", type=Path, metavar="FILE", dest="save", help="write the result here, too")
    add_run_arguments(parser)


def compare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the script twice and print how far apart the two are.

    Returns 0 if every difference is within the tolerance, 1 if one is not, 2 if a run failed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("compare: expected one process, without accelerate launch or torchrun")
    results = {}
    with tempfile.TemporaryDirectory(prefix="grpo_kernels-") as folder:
        for variant in (STOCK, FUSED):
            print(f"compare: {variant} run", file=sys.stderr, flush=True)
            code = "from grpo_kernels.scripts import _watched_run; _watched_run()"
            what = [variant, folder, str(options.steps), str(options.script), *options.arguments]
            done = subprocess.run(
                [sys.executable, "-c", code, *what],
                stdout=2,  # the report alone goes to our own
                env={**os.environ, "WANDB_MODE": "disabled", "PYTHONHASHSEED": "0"},
                check=False,
            )
            file = Path(folder, f"{variant}.json")
            if done.returncode or not file.exists():
                ended = f"ended with status {done.returncode}"
                print(f"compare: the {variant} run {ended}, without a training", file=sys.stderr)
                return 2
            results[variant] = json.loads(file.read_text())
    result = _result(results[STOCK], results[FUSED], options.tolerance)
    if options.save is not None:
        options.save.write_text(json.dumps(result, indent=2) + "\n")
    print("\n".join(_lines(result)))
    return 0 if result["ok"] else 1


def _result(
    stock: dict[str, Any], fused: dict[str, Any], tolerance: float | None
) -> dict[str, Any]:
    """Differences, seconds and memory of two runs, as --json writes them."""
    if tolerance is None:
        tolerance = TOLERANCE_16_BIT if stock["is_16_bit"] else TOLERANCE
    metrics: dict[str, dict[str, Any]] = {}
    for step, (theirs, ours) in enumerate(zip(stock["logs"], fused["logs"], strict=False), 1):
        for name, x in theirs.items():
            apart = _apart(name, x, ours.get(name, math.nan))
            if name not in metrics or apart > metrics[name]["difference"]:
                metrics[name] = {"difference": apart, "step": step}
    difference, change = (
        math.hypot(*(x[name] for x in fused["parameters"].values()))
        for name in ("difference", "change")
    )
    relative = difference / change if change else (math.inf if difference else 0.0)
    steps = len(stock["logs"])
    within = all(x["difference"] <= tolerance for x in metrics.values())
    within = within and relative <= OF_PARAMETERS * tolerance
    return {
        "ok": within and len(fused["logs"]) == steps > 0,
        "tolerance": tolerance,
        "steps": {STOCK: steps, FUSED: len(fused["logs"])},
        "metrics": metrics,
        "parameters": {
            "relative": relative,
            "change": change,
            "tolerance": OF_PARAMETERS * tolerance,
            "each": fused["parameters"],
        },
        "noise_off": stock["noise_off"],
        "generations": {"all": fused["draws"], "equal": fused["equal_draws"]},
        "seconds": {STOCK: _seconds(stock), FUSED: _seconds(fused)},
        "runs": {
            name: {key: run[key] for key in ("trainer", "device", "peak_mib", "seconds", "logs")}
            for name, run in ((STOCK, stock), (FUSED, fused))
        },
    }


def _apart(name: str, stock: float, ours: float) -> float:
    """|ours - stock| / max(|stock|, 0.01), of a loss / max(|stock|, 1); infinite if one is NaN."""
    if stock == ours or (math.isnan(stock) and math.isnan(ours)):
        return 0.0
    apart = abs(ours - stock) / max(abs(stock), 1.0 if name == "loss" else 0.01)
    return apart if math.isfinite(apart) else math.inf


def _seconds(run: dict[str, Any]) -> dict[str, float]:
    """Mean seconds of a step by phase, without the first step if there are others."""
    steps = run["seconds"][1:] or run["seconds"]
    seconds = {phase: fmean(step[phase] for step in steps) for phase in PHASES}
    return {**seconds, "whole step": sum(seconds.values())}


def _lines(result: dict[str, Any]) -> list[str]:
    """The result as text."""
    stock, fused = (result["runs"][name] for name in (STOCK, FUSED))
    seconds, parameters, steps = result["seconds"], result["parameters"], result["steps"]
    lines = [
        f"stock TRL: {stock['trainer']}; grpo_kernels: {fused['trainer']}; on {stock['device']}",
        "",
        f"{'seconds of a step':<24}{'stock TRL':>14}{'grpo_kernels':>14}{'ratio':>8}",
    ]
    for phase in seconds[STOCK]:
        theirs, ours = (seconds[name][phase] for name in (STOCK, FUSED))
        if theirs or ours:
            ratio = f"{theirs / ours:8.2f}" if ours else ""
            lines.append(f"{phase:<24}{theirs:>14.3f}{ours:>14.3f}{ratio}")
    where = "GPU" if stock["device"].startswith("cuda") else "process"
    peak = [run["peak_mib"] for run in (stock, fused)]
    lines.append(f"{f'peak of the {where}, MiB':<24}{peak[0]:>14,.0f}{peak[1]:>14,.0f}")
    if steps[STOCK] > 1:
        lines.append("The first step, which warms up, is left out of the seconds.")
    theirs, ours = (seconds[name]["generation"] for name in (STOCK, FUSED))
    if not 0.8 * theirs <= ours <= 1.25 * theirs:
        lines.append(
            "Generation is the same code in both runs: the machine was not equally free, and the "
            "other ratios are off, too."
        )
    lines += ["", f"largest difference over {steps[STOCK]} steps"]
    if steps[STOCK] != steps[FUSED]:
        lines.append(f"  {steps[FUSED]} steps in the fused run")
    metrics = sorted(result["metrics"].items(), key=lambda x: -x[1]["difference"])
    some = [x for x in metrics if x[1]["difference"] > 0.0]
    for name, x in some:
        lines.append(f"  {x['difference']:.1e}  {name}, in step {x['step']}")
    lines.append(f"  0 in {len(metrics) - len(some)} {'other ' if some else ''}logged numbers")
    if parameters["each"]:
        name, x = max(parameters["each"].items(), key=lambda x: x[1]["largest"])
        lines.append(
            f"  {parameters['relative']:.1e}  parameters: norm of the difference over that of "
            f"the change; the largest difference of a number is {x['largest']:.1e}, in {name}"
        )
    if parameters["change"] == 0.0:
        lines.append("No parameter has changed: no group had unequal rewards, or the rate is 0.")
    drawn = result["generations"]
    if drawn["all"]:
        lines.append(
            f"The fused run drew the same tokens in {drawn['equal']} of {drawn['all']} "
            "generations, and trained on the stock run's."
        )
    if result["noise_off"]:
        lines.append("Dropout and other noise are off in both runs: they would draw other masks.")
    if not any("rows/projected" in log for log in fused["logs"]):
        lines.append("Nothing of the fused run was computed by grpo_kernels.")
    allowed = (
        f"{result['tolerance']:g} for logged numbers, {parameters['tolerance']:g} for parameters"
    )
    verdict = "ALIKE: no difference exceeds" if result["ok"] else "DIFFERENT: a difference exceeds"
    return [*lines, "", f"{verdict} the tolerance: {allowed}"]
