"""`python -m grpo_kernels run` and `compare`: scripts that train with TRL, by our trainers, and
beside stock TRL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import grpo_kernels
from grpo_kernels.__main__ import main
from grpo_kernels.commands.scripts import PHASES
from tests.support.ranks import run_script

pytest.importorskip("trl")

ROOT = Path(grpo_kernels.__file__).parents[1]


def run(script: str, folder: Path, *arguments: str) -> tuple[int, str]:
    path, command = folder / "train.py", folder / "command.py"
    path.write_text(script)
    command.write_text("from grpo_kernels.__main__ import main\n\nraise SystemExit(main())\n")
    return run_script(command, ["run", str(path), *arguments], folder)


SHOWS = """
import sys
import helper
import trl
from trl import GRPOTrainer, SFTTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.trainer import GRPOTrainer as second
from trl.trainer.grpo_trainer import GRPOTrainer as third
from grpo_kernels.trl import FusedGRPOTrainer

assert __name__ == "__main__" and sys.modules["__main__"].GRPOTrainer is GRPOTrainer
assert FusedGRPOTrainer is GRPOTrainer is trl.GRPOTrainer is second is third
assert issubclass(GMPOTrainer, FusedGRPOTrainer)
assert not issubclass(SFTTrainer, FusedGRPOTrainer)
print("arguments:", sys.argv[1:])
sys.exit(7)
"""


@pytest.mark.slow
def test_a_script_runs_as_main_with_our_trainer_under_every_name(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("")  # a script imports what is beside it
    code, said = run(SHOWS, tmp_path, "--steps", "3", "--", "-h")
    assert code == 7, said
    assert "arguments: ['--steps', '3', '--', '-h']" in said


TRAINS = f"""
import sys
sys.path.append({str(ROOT)!r})
import torch
from benchmarks import tiny_models, tiny_run
from trl import GRPOTrainer

planted, is_fused = sys.argv[1], "Fused" in GRPOTrainer.__name__


class Mine(GRPOTrainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return 1.5 * loss if planted == "loss" and is_fused else loss

    def _generate_single_turn(self, *args, **kwargs):
        if planted == "noise" and is_fused:
            torch.manual_seed(5)
        return super()._generate_single_turn(*args, **kwargs)


# wandb is not installed, so that reporting would raise
options = {{"save_strategy": "steps", "save_steps": 1, "report_to": "wandb"}}
options["steps_per_generation"] = 4  # which is two steps: they depend on how it is shuffled
if planted == "rate" and is_fused:
    options["learning_rate"] = 2e-3
trainer = Mine(
    model=tiny_models.model("tied", attention_dropout=0.1 if planted == "noise" else 0.0),
    args=tiny_run.config("out", 50, **options),
    reward_funcs=tiny_run.reward,
    train_dataset=tiny_run.dataset(),
    processing_class=tiny_models.tokenizer(),
)
trainer.train(resume_from_checkpoint=True)
trainer.save_model("saved")
"""


def compare(script, folder, *arguments, steps=2):
    (folder / "train.py").write_text(script)
    command = ["compare", "--steps", str(steps), "--json", "result.json", "train.py", *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "grpo_kernels", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    written = folder / "result.json"
    return done, json.loads(written.read_text()) if written.exists() else {}


@pytest.mark.slow
def test_a_script_is_alike_and_writes_nothing(tmp_path: Path) -> None:
    """Though our trainer draws other tokens, and the model has dropout: masks depend on shapes."""
    done, result = compare(TRAINS, tmp_path, "noise", steps=3)
    assert done.returncode == 0, done.stderr
    assert {x.name for x in tmp_path.iterdir()} == {"train.py", "result.json"}
    stock, fused = (result["runs"][name] for name in ("stock", "fused"))
    assert (stock["trainer"], fused["trainer"]) == ("Mine", "Mine")
    for run, has_rows in ((stock, False), (fused, True)):
        assert len(run["logs"]) == len(run["seconds"]) == 3
        assert [("rows/projected" in log) for log in run["logs"]] == [has_rows] * 3
        assert run["peak_mib"] > 100
        for step in run["seconds"]:
            assert all(x > 0 for name, x in step.items() if name != "generation"), step
        assert [step["generation"] > 0 for step in run["seconds"]] == [True, False, True]
    assert {"loss", "grad_norm", "reward", "entropy"} <= result["metrics"].keys()
    assert not {"step_time", "learning_rate", "rows/projected"} & result["metrics"].keys()
    assert all(x["difference"] <= 1e-5 for x in result["metrics"].values())
    parameters = result["parameters"]
    assert parameters["change"] > 0 and parameters["relative"] <= 1e-3
    assert parameters["largest"] < 1e-4 and parameters["in"].startswith("model.")
    said = done.stdout
    assert stock["noise_off"] and "Dropout and other noise are off in both runs" in said
    assert said.splitlines()[-1] == (
        "ALIKE: no difference exceeds the tolerance: 0.001 for logged numbers, 0.01 for parameters"
    )
    ours, theirs = (result["seconds"][name]["optimizer"] for name in ("fused", "stock"))
    assert f"optimizer {theirs:28.3f}{ours:14.3f}\n" in said


@pytest.mark.parametrize(("steps", "has_ratios"), [(1, False), (3, False), (4, True), (9, True)])
def test_times_have_a_ratio_from_three_timed_steps_on(steps, has_ratios, capsys, monkeypatch):
    """Of runs of 2 and 1 seconds per step, which take no time here; the first step is a warm-up."""

    def trained(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        variant, folder = command[3:5]
        seconds = dict.fromkeys(PHASES, 0.0) | {"optimizer": 2.0 if variant == "stock" else 1.0}
        parameters = {"relative": 0.0, "change": 1.0, "largest": 0.0, "in": "weight"}
        written = {
            "trainer": "GRPOTrainer", "device": "cpu", "is_16_bit": False, "noise_off": False,
            "peak_mib": 1.0, "seconds": [seconds] * steps, "logs": [{"loss": 0.5}] * steps,
            "parameters": parameters,
        }  # fmt: skip
        Path(folder, f"{variant}.json").write_text(json.dumps(written))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", trained)
    assert main(["compare", "--steps", str(steps), __file__]) == 0
    said = capsys.readouterr().out
    assert f"optimizer {2.0:28.3f}{1.0:14.3f}{'    2.00' if has_ratios else ''}\n" in said
    assert said.count("ratio\n") == has_ratios
    assert ("For ratios of times, run at least 4 steps (--steps)." in said) is not has_ratios


@pytest.mark.slow
@pytest.mark.parametrize(("planted", "steps"), [("loss", 2), ("rate", 1)])
def test_a_planted_difference_is_reported(planted: str, steps: int, tmp_path: Path) -> None:
    """A loss that depends on the trainer; and a learning rate, which only the parameters show."""
    done, result = compare(TRAINS, tmp_path, planted, steps=steps)
    assert done.returncode == 1, done.stderr
    assert not result["runs"]["stock"]["noise_off"] and "Dropout" not in done.stdout
    assert "\nDIFFERENT: a difference exceeds the tolerance: 0.001" in done.stdout
    differences = {name: x["difference"] for name, x in result["metrics"].items()}
    if planted == "loss":
        assert differences["grad_norm"] == pytest.approx(0.5, abs=0.01)
        assert "grad_norm, in step " in done.stdout
    else:
        assert max(differences.values()) <= 1e-5
        assert result["parameters"]["relative"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.slow
def test_a_run_that_does_not_train_is_no_comparison(tmp_path: Path) -> None:
    done, result = compare("raise ValueError('planted')", tmp_path, "--steps=9")
    assert "compare: --steps after the script is passed to the script" in done.stderr
    assert (done.returncode, done.stdout, result) == (2, "", {})
    assert "ValueError: planted" in done.stderr
    assert "compare: the stock run ended with status 1 without finishing a training" in done.stderr


@pytest.mark.parametrize(
    ("command", "processes", "message"),
    [
        ("run /nowhere.py", "1", "script: expected a Python file, got /nowhere.py"),
        ("compare /nowhere.py", "1", "script: expected a Python file, got /nowhere.py"),
        (f"compare {__file__}", "2", "expected one process, without accelerate launch"),
        (f"compare --json {ROOT} {__file__}", "1", "--json: expected a file that can be written"),
        (f"compare --json /no/x {__file__}", "1", "--json: expected a file in a folder that exist"),
    ],
)
def test_wrong_arguments_end_a_command_before_anything_runs(
    command: str,
    processes: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", processes)
    with pytest.raises(SystemExit, match="2"):
        main(command.split())
    assert message in capsys.readouterr().err
