"""`python -m tests.peers`: peers' own tests, as they are and with ours in place, from the sources that are given.

Of a source only its tests are used, in a folder of their own: what they import is the installed package. The counts of
both runs go to stdout as a table, and every test whose outcome differs. Arguments are handed on to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
OUTCOMES = ("passed", "failed", "error", "skipped")
STOCK = "as it is"


@dataclass(frozen=True)
class Peer:
    """Where a peer's tests are, and in which ways they run with ours."""

    package: str
    variable: str  # of the environment: the folder with its source
    tests: str  # the folder in it that they are in
    files: tuple[str, ...]
    ways: tuple[str, ...]


PEERS = (
    Peer("liger_kernel", "LIGER_SOURCE", "test", ("test/chunked_loss/test_grpo_loss.py",), ("patch_liger",)),
    Peer(
        "verl", "VERL_SOURCE", "tests", ("tests/trainer/ppo/test_core_algos_on_cpu.py",), ("grpo_kernels.advantages",)
    ),
)


def run(peer: Peer, source: Path, way: str, options: Sequence[str]) -> dict[str, str]:
    """The outcome of each test."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / peer.tests).symlink_to(source.resolve() / peer.tests)
        report = folder / "report.xml"
        command = [
            sys.executable, "-m", "pytest", *peer.files, "-q", "-p", "no:cacheprovider", "-p", "tests_of_ours",
            "-c", os.devnull, "--rootdir", str(folder), f"--junitxml={report}", "-W", "ignore",
            *options,
        ]  # fmt: skip
        path = os.pathsep.join([str(folder), str(Path(__file__).parent), str(CHECKOUT)])
        environment = os.environ | {"PYTHONPATH": path, "GRPO_KERNELS_WAY": way, "PYTHONDONTWRITEBYTECODE": "1"}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if not report.exists():
            raise SystemExit(
                f"{peer.package}, {way}: pytest made no report\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
        return outcomes(report)


def outcomes(report: Path) -> dict[str, str]:
    """Test -> outcome, of a JUnit report."""
    found = {}
    for case in ET.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        what = next((x for x in ("error", "failure", "skipped") if x in tags), "passed")
        found[f"{case.get('classname')}::{case.get('name')}"] = "failed" if what == "failure" else what
    return found


def row(peer: Peer, way: str, found: dict[str, str]) -> str:
    counts = " | ".join(str(sum(x == outcome for x in found.values())) for outcome in OUTCOMES)
    return f"| {peer.package} {version(peer.package)} | {way} | {counts} |"


def main(options: Sequence[str]) -> int:
    """0 if every test has the same outcome with ours; `options` are for pytest."""
    given = [(peer, Path(os.environ[peer.variable])) for peer in PEERS if os.environ.get(peer.variable)]
    if not given:
        print(f"no source is given: set {', '.join(peer.variable for peer in PEERS)} to their folders")
        return 2
    print(f"| tests of | with | {' | '.join(OUTCOMES)} |\n|---|---|{'---|' * len(OUTCOMES)}")
    lost: list[str] = []
    for peer, source in given:
        stock = run(peer, source, STOCK, options)
        print(row(peer, STOCK, stock), flush=True)
        for way in peer.ways:
            ours = run(peer, source, way, options)
            print(row(peer, way, ours), flush=True)
            lost += [f"{way}: {test}: {ours.get(test)}" for test, x in stock.items() if x != ours.get(test)]
    print("\n".join(lost) if lost else "every test has the same outcome with ours")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
