"""Helpers for every part of the library. They know no loss and no head.

- `checks`: checks of arguments; `choices`: names to choose from.
- `distributed`: collectives.
- `tensors`: records of tensors, sums, quantiles, sampling ratios, sequences of a batch.
- `modes`: modules in evaluation mode, and calls that leave no trace.
"""

VERSION = "0.1.0"  # as in pyproject.toml
