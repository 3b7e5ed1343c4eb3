"""`python -m grpo_kernels`: what a bug report needs, then a check of the results against float64.

`python -m grpo_kernels memory`: how much memory a loss needs, without computing it.
`python -m grpo_kernels estimate`: what a training with TRL would gain, without running it.
`python -m grpo_kernels compare train.py`: a few steps of a script, with stock TRL and with ours.
`python -m grpo_kernels run train.py`: the script with our trainers in the place of TRL's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial

from grpo_kernels import __version__, estimate, memory, report, scripts

COMMANDS = (  # name, help, description, options, what it runs
    ("memory", "how much memory a loss needs with each engine",
     memory.__doc__, memory.add_arguments, memory.run),
    ("estimate", "what a training with TRL would gain, by arithmetic",
     estimate.__doc__, estimate.add_arguments, estimate.run),
    ("compare", "run a script that trains with TRL twice for a few steps, stock and with ours",
     scripts.__doc__, scripts.add_compare_arguments, scripts.compare),
    ("run", "run a script that trains with TRL, with our trainers in the place of TRL's",
     scripts.__doc__, scripts.add_run_arguments, scripts.run),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Print report and checks, and return 0 if no check failed, else 1; or run a command."""
    parser = argparse.ArgumentParser(prog="python -m grpo_kernels", description=__doc__)
    parser.add_argument("--version", action="version", version=f"grpo_kernels {__version__}")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--no-check", action="store_true", help="the environment only")
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
    for check in () if options.no_check else report.check(report.devices()):
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
    except BrokenPipeError:  # whoever read the output has enough, as `| head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
