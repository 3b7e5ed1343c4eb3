"""Run a TRL training script with FusedGRPOTrainer, or compare it with stock TRL.

`run` replaces `trl.GRPOTrainer` with `FusedGRPOTrainer` before the script imports it, under every
name that TRL has for it, so subclasses in the script derive from it. For TRL's other trainers, it
calls `patch_trl`.

`compare` runs the script twice for a few steps, stock and fused, each in a separate process. The
fused run generates too, for the timings, but trains on the completions of the stock run: a single
token flipped by rounding would change everything after it. The script ends after its first
training. It saves nothing and reports to no tracker.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from grpo_kernels.base.modes import random_rates
from grpo_kernels.commands.memory import whole_number
from grpo_kernels.engine.workspace import MIB

STOCK, FUSED = "stock", "fused"
METHODS = {  # of TRL's trainers; time in a nested call counts for the inner phase
    "generation": "_generate",
    "scoring and preparing": "_prepare_inputs",
    "forward and backward": "training_step",
}
PHASES = (*METHODS, "optimizer", "other")
SAMPLERS = ("_generate_single_turn", "rollout_func")  # methods of TRL's trainers that sample
# clocks and schedules, which are not part of the loss
NOT_COMPARED = ("time", "per_second", "epoch", "learning_rate", "total_flos")
RESTRICTED = {  # trainer arguments: log every step, no files, no trackers
    "logging_strategy": "steps", "logging_steps": 1, "log_completions": False, "report_to": [],
    "save_strategy": "no", "load_best_model_at_end": False, "push_to_hub": False,
    "eval_on_start": False,
}  # fmt: skip
TOLERANCE, TOLERANCE_16_BIT = 1e-3, 5e-2
# Differences are divided by the stock value, or by a floor if the value is smaller. A loss sums
# terms of size |advantage| (times |logp| for cispo and vespo) that nearly cancel. So the size of
# the sum does not measure its rounding error.
LOSS_FLOOR, METRIC_FLOOR = 1.0, 1e-2
# Fewer timed steps than this are too noisy for a ratio of times.
TIMED_STEPS = 3
# Parameters may differ by this times the tolerance: Adam turns rounding errors of tiny gradients
# into full steps.
OF_PARAMETERS = 10


def use_fused_trainers() -> None:
    """Make later imports of TRL's GRPO trainer return `FusedGRPOTrainer`."""
    import trl
    from trl.trainer import grpo_trainer

    from grpo_kernels.trl import FusedGRPOTrainer, patch_trl

    for module in (trl, trl.trainer, grpo_trainer):
        module.GRPOTrainer = FusedGRPOTrainer
    patch_trl()


def use_stock_trainers() -> None:
    """Make later imports of this library's trainers return TRL's, which ignore our options."""
    import trl

    ours: Any = importlib.import_module("grpo_kernels.trl")
    options = ours.FusedLossMixin.__init__.__kwdefaults__

    class Stock:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{k: x for k, x in kwargs.items() if k not in options})

    ours.FusedLossMixin = Stock
    ours.FusedGRPOTrainer = type("GRPOTrainer", (Stock, trl.GRPOTrainer), {})
    ours.FusedDistillationTrainer = trl.DistillationTrainer
    ours.patch_trl = lambda **_: nullcontext()


def run_script(script: Path, arguments: list[str]) -> None:
    """Run a script like ``python script *arguments``."""
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m grpo_kernels run``."""
    parser.add_argument("script", type=_script, help="a Python script that trains with TRL")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the script with the fused trainers."""
    use_fused_trainers()
    run_script(options.script, options.arguments)
    return 0


def _script(argument: str) -> Path:
    if not Path(argument).is_file():
        raise argparse.ArgumentTypeError(f"expected a Python file, got {argument}")
    return Path(argument)


class Watch:
    """Record the first training of this process: logs, seconds by phase, memory, parameters.

    The stock run writes its completions and parameters to `folder`; the fused run reads them there.
    """

    def __init__(self, variant: str, folder: Path, steps: int) -> None:
        from transformers import Trainer, TrainingArguments

        self.variant, self.folder, self.steps, self.draws = variant, folder, steps, 0
        self.restricted = RESTRICTED | {"output_dir": str(folder / "output")}
        self.seconds: list[dict[str, float]] = []
        self.spent, self.phase, self.began = dict.fromkeys(PHASES, 0.0), "other", _now()
        init, train = Trainer.__init__, Trainer.train

        def restricted(
            trainer: Any, model: Any = None, args: Any = None, *others: Any, **named: Any
        ) -> None:
            args = args or TrainingArguments()
            vars(args).update(self.restricted)
            init(trainer, model, args, *others, **named)

        def watched(trainer: Any, resume_from_checkpoint: Any = None, **named: Any) -> None:
            had_noise = self.begin(trainer)
            train(trainer, **named)
            self.end(trainer, had_noise)
            raise SystemExit(0)

        Trainer.__init__, Trainer.train = restricted, watched

    def begin(self, trainer: Any) -> bool:
        """Time a trainer's methods; return True if noise had to be turned off."""
        from transformers import TrainerCallback

        watch = self

        class Steps(TrainerCallback):
            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                watch.enter("optimizer")

            def on_optimizer_step(self, *_: Any, **__: Any) -> None:
                watch.enter("other")

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                watch.enter("other")
                watch.seconds.append(watch.spent)
                watch.spent = dict.fromkeys(PHASES, 0.0)
                control.should_training_stop |= state.global_step >= watch.steps

        vars(trainer.args).update(self.restricted)  # the script may have changed them
        for phase, name in METHODS.items():
            if hasattr(trainer, name):
                setattr(trainer, name, partial(self.timed, phase, getattr(trainer, name)))
        for name in SAMPLERS:
            if callable(getattr(trainer, name, None)):
                setattr(trainer, name, partial(self.redrawn, getattr(trainer, name)))
        trainer.add_callback(Steps())
        if self.variant == STOCK:
            torch.save(_trained(trainer.model), self.folder / "begin.pt")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.began = _now()
        # Turn off dropout, router jitter and the like: the two runs compute tokens in different
        # shapes, so they would draw different noise.
        noise = [(x, rate) for x in trainer.model.modules() for rate in random_rates(x)]
        for module, rate in noise:
            setattr(module, rate, 0.0)
        return bool(noise)

    def end(self, trainer: Any, had_noise: bool) -> None:
        """Write the recorded values to ``stock.json`` or ``fused.json``."""
        args, model = trainer.args, trainer.model
        result = {
            "trainer": type(trainer).__name__,
            "device": str(args.device),
            "is_16_bit": args.bf16 or args.fp16 or any(x.itemsize < 4 for x in model.parameters()),
            "noise_off": had_noise,
            "peak_mib": _peak_mib(),
            "seconds": self.seconds,
            "logs": [
                {
                    name: float(x)
                    for name, x in log.items()
                    if isinstance(x, (int, float)) and not any(y in name for y in NOT_COMPARED)
                }
                for log in trainer.state.log_history
                if "loss" in log
            ],
        }
        if self.variant == STOCK:
            torch.save(_trained(model), self.folder / "end.pt")
        else:
            result["parameters"] = _parameters_apart(self.folder, _trained(model))
        (self.folder / f"{self.variant}.json").write_text(json.dumps(result))

    def enter(self, phase: str) -> str:
        """Begin a phase; return the previous one, which gets the time since the last call."""
        now, before = _now(), self.phase
        self.spent[before] += now - self.began
        self.began, self.phase = now, phase
        return before

    def timed(self, phase: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self.enter(phase)
        result = function(*args, **kwargs)
        self.enter(before)
        return result

    def redrawn(self, draw: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Draw completions, but return those of the stock run in the fused run."""
        from transformers import set_seed

        drawn, file = draw(*args, **kwargs), self.folder / f"{self.draws}.pickle"
        if self.variant == STOCK:
            file.write_bytes(pickle.dumps(drawn))
        self.draws += 1
        set_seed(self.draws)  # the two runs may have drawn different numbers of random values
        return pickle.loads(file.read_bytes())


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak_mib() -> float:
    """Peak memory so far in MiB: allocated on the GPUs, or of this process if there are none."""
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        return sum(torch.cuda.max_memory_allocated(i) for i in devices) / MIB
    import resource  # absent on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def _trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.detach() for name, x in model.named_parameters() if x.requires_grad}


def _parameters_apart(folder: Path, ours: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Compare `ours` with the stock run's parameters.

    The result has the largest difference of a number. It also has the norm of all differences,
    divided by the norm of the change that the stock run has made.
    """
    begin, end = (
        torch.load(folder / name, map_location="cpu", mmap=True, weights_only=True)
        for name in ("begin.pt", "end.pt")
    )
    largest, difference, change = (0.0, ""), 0.0, 0.0
    for name, x in end.items():
        apart = ours[name].cpu().double() - x.double()
        largest = max(largest, (apart.abs().max().item(), name))
        difference = math.hypot(difference, apart.norm().item())
        change = math.hypot(change, (x.double() - begin[name].double()).norm().item())
    relative = difference / change if change else math.inf if difference else 0.0
    return {"relative": relative, "change": change, "largest": largest[0], "in": largest[1]}


def _watched_run() -> None:
    """Do one run of `compare`, in a separate process."""
    from transformers import set_seed

    variant, folder, steps, script, *arguments = sys.argv[1:]
    (use_fused_trainers if variant == FUSED else use_stock_trainers)()
    Watch(variant, Path(folder), int(steps))
    set_seed(0)
    run_script(Path(script), arguments)


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m grpo_kernels compare``."""
    add = parser.add_argument
    add("--steps", type=whole_number, default=4, help="optimizer steps; default: 4")
    about = f"{TOLERANCE:g}, or {TOLERANCE_16_BIT:g} with 16-bit weights or mixed precision"
    add("--tolerance", type=float, help=f"largest difference of a logged number; default: {about}")
    add("--json", type=Path, metavar="FILE", dest="save", help="write the result here, too")
    add_run_arguments(parser)


def compare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the script twice and print the differences.

    Returns 0 if all differences are within the tolerance, 1 if not, 2 if a run failed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("compare: expected one process, without accelerate launch or torchrun")
    if options.save is not None:  # before the runs, which take long
        folder_of_file = options.save.absolute().parent
        if not folder_of_file.is_dir():
            parser.error(f"--json: expected a file in a folder that exists, got {options.save}")
        writable = os.access(options.save if options.save.exists() else folder_of_file, os.W_OK)
        if options.save.is_dir() or not writable:
            parser.error(f"--json: expected a file that can be written, got {options.save}")
    names = [x.partition("=")[0] for x in options.arguments]
    passed_on = [x for x in ("--steps", "--tolerance", "--json") if x in names]
    if passed_on:
        text = f"compare: {', '.join(passed_on)} after the script is passed to the script"
        print(f"{text}; put options of compare before the script", file=sys.stderr, flush=True)
    runs = {}
    with tempfile.TemporaryDirectory(prefix="grpo_kernels-") as folder:
        for variant in (STOCK, FUSED):
            print(f"compare: {variant} run", file=sys.stderr, flush=True)
            code = "from grpo_kernels.commands.scripts import _watched_run; _watched_run()"
            what = [variant, folder, str(options.steps), str(options.script), *options.arguments]
            done = subprocess.run(
                [sys.executable, "-c", code, *what],
                stdout=2,  # only the report goes to stdout
                env={**os.environ, "WANDB_MODE": "disabled", "PYTHONHASHSEED": "0"},
                check=False,
            )
            file = Path(folder, f"{variant}.json")
            if done.returncode or not file.exists():
                ended = f"ended with status {done.returncode} without finishing a training"
                print(f"compare: the {variant} run {ended}", file=sys.stderr)
                return 2
            runs[variant] = json.loads(file.read_text())
    result = _result(runs, options.tolerance)
    print(_text(result), flush=True)
    if options.save is not None:
        options.save.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["ok"] else 1


def _result(runs: dict[str, dict[str, Any]], tolerance: float | None) -> dict[str, Any]:
    """Differences, seconds and memory of two runs, as written by --json."""
    stock, fused = runs[STOCK], runs[FUSED]
    if tolerance is None:
        tolerance = TOLERANCE_16_BIT if stock["is_16_bit"] else TOLERANCE
    metrics: dict[str, dict[str, Any]] = {}
    logs = zip_longest(stock["logs"], fused["logs"], fillvalue=dict[str, float]())
    for step, (theirs, ours) in enumerate(logs, 1):
        for name, x in theirs.items():
            apart = difference(name, x, ours.get(name))
            if name not in metrics or apart > metrics[name]["difference"]:
                metrics[name] = {"difference": apart, "step": step}
    parameters = fused.pop("parameters") | {"tolerance": OF_PARAMETERS * tolerance}
    within = all(x["difference"] <= tolerance for x in metrics.values())
    return {
        "ok": within and parameters["relative"] <= parameters["tolerance"],
        "tolerance": tolerance,
        "metrics": metrics,
        "parameters": parameters,
        "seconds": {variant: _seconds(x) for variant, x in runs.items()},
        "runs": runs,
    }


def difference(name: str, stock: float | None, ours: float | None) -> float:
    """|ours - stock| / max(|stock|, floor); infinite if one value is NaN or missing."""
    if stock is None or ours is None:
        return math.inf
    if stock == ours or (math.isnan(stock) and math.isnan(ours)):
        return 0.0
    floor = LOSS_FLOOR if name in ("loss", "policy_loss") else METRIC_FLOOR
    apart = abs(ours - stock) / max(abs(stock), floor)
    return apart if math.isfinite(apart) else math.inf


def _seconds(run: dict[str, Any]) -> dict[str, float]:
    """Mean seconds per step by phase, without the first step if there are others."""
    steps = run["seconds"][1:] or run["seconds"]
    seconds = {phase: fmean(step[phase] for step in steps) for phase in PHASES}
    return {**seconds, "whole step": sum(seconds.values())}


def _text(result: dict[str, Any]) -> str:
    stock, fused = (result["runs"][name] for name in (STOCK, FUSED))
    parameters, steps, rows = result["parameters"], len(stock["logs"]), ""
    has_ratios = steps > TIMED_STEPS  # the first step is not timed
    for phase, theirs in result["seconds"][STOCK].items():
        ours = result["seconds"][FUSED][phase]
        if theirs and ours:
            ratio = f"{theirs / ours:8.2f}" if has_ratios else ""
            rows += f"{phase:<24}{theirs:>14.3f}{ours:>14.3f}{ratio}\n"
    peak = f"peak of the {'GPU' if stock['device'].startswith('cuda') else 'process'}, MiB"
    rows += f"{peak:<24}{stock['peak_mib']:>14,.0f}{fused['peak_mib']:>14,.0f}\n"
    if steps > 1:
        rows += "The first step is a warm-up and not included in the seconds.\n"
    if not has_ratios:
        rows += f"For ratios of times, run at least {TIMED_STEPS + 1} steps (--steps).\n"
    metrics = sorted(result["metrics"].items(), key=lambda x: -x[1]["difference"])
    lines = [
        f"  {x['difference']:.1e}  {name}, in step {x['step']}\n"
        for name, x in metrics
        if x["difference"] > 0.0
    ]
    notes = ""
    if parameters["change"] == 0.0:
        notes += "No parameter changed: all groups had equal rewards, or the learning rate is 0.\n"
    if stock["noise_off"]:
        notes += "Dropout and other noise are off in both runs, since their masks would differ.\n"
    if not any("rows/projected" in log for log in fused["logs"]):
        notes += "grpo_kernels computed nothing in the fused run.\n"
    verdict = "ALIKE: no difference exceeds" if result["ok"] else "DIFFERENT: a difference exceeds"
    return f"""\
stock TRL: {stock["trainer"]}; grpo_kernels: {fused["trainer"]}; on {stock["device"]}

{"seconds per step":<24}{"stock TRL":>14}{"grpo_kernels":>14}{"ratio" if has_ratios else "":>8}
{rows}
largest difference over {steps} steps
{"".join(lines)}  0 in {len(metrics) - len(lines)} {"other " if lines else ""}logged numbers
  {parameters["relative"]:.1e}  parameters: norm of the difference / norm of the change; \
the largest difference is {parameters["largest"]:.1e}, in {parameters["in"]}
{notes}
{verdict} the tolerance: {result["tolerance"]:g} for logged numbers, \
{parameters["tolerance"]:g} for parameters"""
