"""`python -m tests.peers`: peers' own tests, as they are and with ours in place, from the sources
that are given.

Of a source only its tests are used, in a folder of their own: what they import is the installed
package. The counts of both runs go to stdout as a table, and every test whose outcome differs.
Arguments are handed on to pytest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
OUTCOMES = ("passed", "failed", "error", "skipped")
STOCK = "as it is"


@dataclass(frozen=True)
class Peer:
    """Where a peer's tests are, which of them run, and in which ways they run with ours."""

    package: str
    variable: str  # of the environment: the folder with its source
    tests: str  # the folder in it that they are in
    file: str
    ways: tuple[str, ...]
    select: str = ""  # pytest's -k
    environment: Mapping[str, str] = field(default_factory=dict)
    # pattern of "way: test" -> why it differs
    known: Mapping[str, str] = field(default_factory=dict)

    def why(self, way: str, test: str) -> str | None:
        found = (x for what, x in self.known.items() if re.search(what, f"{way}: {test}"))
        return next(found, None)


def of_trl(name: str, *ways: str, **more: Any) -> Peer:
    """Tests of one of TRL's trainers."""
    # no images, no server, no models of the hub with their weights
    select = "not VLM and not VisionLanguage and not vllm and not Slow"
    file = f"tests/test_{name}_trainer.py"
    return Peer("trl", "TRL_SOURCE", "tests", file, ways, select, **more)


ADAPTER = {r"^FusedGRPOTrainer: .*_peft_lm_head_raises": "expects that LoRA on lm_head is refused"}
PEERS = (
    of_trl("grpo", "patch_trl", "FusedGRPOTrainer", known=ADAPTER),
    *(of_trl(name, "patch_trl") for name in ("rloo", "dpo", "kto")),
    Peer(
        "liger_kernel", "LIGER_SOURCE", "test", "test/chunked_loss/test_grpo_loss.py",
        ("patch_liger",),
        select="not 8-128-1024-4096",  # of the grid the small shape, 3 x 47 x 31 x 123
        # else every test compiles Liger's module anew: hours
        environment={"TORCHDYNAMO_DISABLE": "1"},
        known={r"-sequence-luspo-True-\w+-\w+-0\.1-.*-dtype1-": "luspo's KL term counts padding"},
    ),
    Peer(
        "verl", "VERL_SOURCE", "tests", "tests/trainer/ppo/test_core_algos_on_cpu.py",
        ("grpo_kernels.advantages",),
    ),
)  # fmt: skip


def run(peer: Peer, source: Path, way: str, options: Sequence[str]) -> dict[str, str]:
    """The outcome of each test."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / peer.tests).symlink_to(source.resolve() / peer.tests)
        report = folder / "report.xml"
        command = [
            sys.executable, "-m", "pytest", peer.file, "-q", "-p", "no:cacheprovider", "-p",
            "tests_of_ours",
            "-c", os.devnull, "--rootdir", str(folder), f"--junitxml={report}", "-W", "ignore",
            "-k", peer.select, *options,
        ]  # fmt: skip
        path = os.pathsep.join([str(folder), str(Path(__file__).parent), str(CHECKOUT)])
        environment = os.environ | peer.environment | {
            "PYTHONPATH": path, "GRPO_KERNELS_WAY": way, "GRPO_KERNELS_PEER": peer.package,
            "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode == 5:  # none was selected
            return {}
        if done.returncode not in (0, 1):  # neither all passed nor some failed
            told = done.stdout[-3000:] + done.stderr[-3000:]
            raise SystemExit(f"{peer.package}, {way}: pytest ended with {done.returncode}\n{told}")
        return outcomes(report)


def outcomes(report: Path) -> dict[str, str]:
    """Test -> outcome, of a JUnit report."""
    found = {}
    for case in ET.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        what = next((x for x in ("error", "failure", "skipped") if x in tags), "passed")
        outcome = "failed" if what == "failure" else what
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def row(peer: Peer, way: str, found: dict[str, str]) -> str:
    counts = " | ".join(str(sum(x == outcome for x in found.values())) for outcome in OUTCOMES)
    return f"| {peer.package} {version(peer.package)}, {Path(peer.file).name} | {way} | {counts} |"


def main(options: Sequence[str]) -> int:
    """0 if every test has the same outcome with ours, but for those known; `options` are for
    pytest."""
    sources = [(peer, os.environ.get(peer.variable)) for peer in PEERS]
    given = [(peer, Path(source)) for peer, source in sources if source]
    if not given:
        variables = dict.fromkeys(peer.variable for peer in PEERS)
        print(f"no source is given: set {', '.join(variables)} to their folders")
        return 2
    print(f"| tests of | with | {' | '.join(OUTCOMES)} |\n|---|---|{'---|' * len(OUTCOMES)}")
    told: list[str] = []
    lost = False
    for peer, source in given:
        if not (source / peer.file).exists():
            told.append(f"not run: {source} has no {peer.file}")
            continue
        stock = run(peer, source, STOCK, options)
        if not stock:
            told.append(f"not run: no test of {peer.file} is selected")
            continue
        print(row(peer, STOCK, stock), flush=True)
        for way in peer.ways:
            ours = run(peer, source, way, options)
            print(row(peer, way, ours), flush=True)
            for test in (test for test, outcome in stock.items() if outcome != ours.get(test)):
                reason = peer.why(way, test)
                known = f" (known: it {reason})" if reason else ""
                told.append(f"{way}: {test}: {ours.get(test)}{known}")
                lost |= reason is None
    print("\n".join(told) if told else "every test has the same outcome with ours")
    return int(lost)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
