"""`python -m grpo_kernels`: what a bug report needs, then a short check of the results against float64.

`python -m grpo_kernels memory`: how much memory a loss needs, without computing it.
`python -m grpo_kernels warmup`: compiles what the first calls of a head would compile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from grpo_kernels import __version__
from grpo_kernels.diagnostics import memory, report, selfcheck, warmup

SUBCOMMANDS = {
    "memory": (memory, "how much memory a loss needs with each engine"),
    "warmup": (warmup, "compile what the first calls of a head would compile"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its status; or print report and checks, and return 0 if none failed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m grpo_kernels", description=__doc__)
    parser.add_argument("--version", action="version", version=f"grpo_kernels {__version__}")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--no-check", action="store_true", help="the environment only")
    commands = parser.add_subparsers(dest="command")
    parsers = {
        name: commands.add_parser(name, help=says, description=module.__doc__)
        for name, (module, says) in SUBCOMMANDS.items()
    }
    for name, (module, _) in SUBCOMMANDS.items():
        module.add_arguments(parsers[name])
    options = parser.parse_args(arguments)
    if options.command is not None:
        if options.json or options.no_check:
            parser.error(f"{options.command}: expected neither --json nor --no-check before it")
        return SUBCOMMANDS[options.command][0].run(parsers[options.command], options)

    environment = report.collect()
    if not options.json:
        print(report.render(environment), flush=True)
    checks = [] if options.no_check else selfcheck.run(report.devices())
    ok = all(check.ok for check in checks)
    if options.json:
        print(
            json.dumps(
                {
                    "environment": environment,
                    "checks": [check.as_dict() for check in checks],
                    "ok": ok,
                },
                indent=2,
            )
        )
    elif checks:
        print(f"\nself-check against float64\n{selfcheck.render(checks)}")
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
