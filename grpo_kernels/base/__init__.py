"""Helpers for every part of the library. They know no loss and no head.

- Arguments: checks of them (`checks`), names to choose from (`choices`), those of a TRL trainer (`trl_args`).
- Ranks: collectives (`distributed`), and the check that all ranks make the same call (`agreement`).
- Tensors: sums and means (`sums`), quantiles (`quantile`), importance sampling ratios (`importance`), sequences of a
  batch (`packing`), and records of tensors (`records`).
- Modules in evaluation mode (`modes`).
"""
