"""Everything that only a GPU can tell, in one command: ``python -m benchmarks.gpu`` (or ``make gpu``).

Smoke test, tests, sanitizers and benchmarks, each within its share of a time budget; whatever fails, the rest still
runs, and each result is in the JSON file as soon as it is known. ``--dry-run`` does all of it on a CPU at toy sizes.
"""
