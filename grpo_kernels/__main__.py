"""`python -m grpo_kernels` prints a bug report's details and checks results against float64.

`python -m grpo_kernels memory`: compute how much memory a loss needs, without running it.
`python -m grpo_kernels estimate`: estimate the speedup of a TRL training run, without running it.
`python -m grpo_kernels compare train.py`: run a few steps of a script with stock TRL and with
`FusedGRPOTrainer`, and compare them.
`python -m grpo_kernels run train.py`: run a TRL script with `FusedGRPOTrainer`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial

from grpo_kernels.base import VERSION
from grpo_kernels.commands import estimate, memory, report, scripts

COMMANDS = (  # name, help, description, function that adds options, function that runs it
    ("memory", "compute how much memory a loss needs with each engine",
     memory.__doc__, memory.add_arguments, memory.run),
    ("estimate", "estimate the speedup of a TRL training run",
     estimate.__doc__, estimate.add_arguments, estimate.run),
    ("compare", "run a few steps of a TRL script, stock and fused, and compare them",
     scripts.__doc__, scripts.add_compare_arguments, scripts.compare),
    ("run", "run a TRL script with FusedGRPOTrainer",
     scripts.__doc__, scripts.add_run_arguments, scripts.run),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report and checks (return 1 if a check failed, else 0), or run a command."""
    parser = argparse.ArgumentParser(prog="python -m grpo_kernels", description=__doc__)
    parser.add_argument("--version", action="version", version=f"grpo_kernels {VERSION}")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--no-check", action="store_true", help="print the environment only")
    commands = parser.add_subparsers(dest="command")
    raw = argparse.RawDescriptionHelpFormatter
    for name, about, description, add_arguments, run in COMMANDS:
        command = commands.add_parser(
            name, help=about, description=description, formatter_class=raw
        )
        add_arguments(command)
        command.set_defaults(run=partial(run, command))
    options = parser.parse_args(arguments)
    if options.command is not None:
        if options.json or options.no_check:
            parser.error(f"{options.command}: expected neither --json nor --no-check before it")
        return options.run(options)

    environment, checks = report.collect(), []
    if not options.json:
        print(report.render(environment), flush=True)
    for check in () if options.no_check else report.check():
        checks.append(check)
        if options.json:
            continue
        if len(checks) == 1:
            print("\nself-check against float64")
        error = "      -" if check["error"] is None else f"{check['error']:.1e}"
        verdict = "OK" if check["ok"] else f"FAILED {check['detail']}"
        about = f"{check['name']:<48}  {check['device']:<6}  {check['backend']:<6}"
        print(f"  {about}  {error}  {verdict}", flush=True)
    right = sum(check["ok"] for check in checks)
    ok = right == len(checks)
    if options.json:
        print(json.dumps({"environment": environment, "checks": checks, "ok": ok}, indent=2))
    elif checks:
        print(f"{right} of {len(checks)} checks OK")
    return 0 if ok else 1


if __name__ == "__main__":
    try:
        try:
            status = main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
