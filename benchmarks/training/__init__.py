"""How much of a whole TRL training step the head is: measured where the model fits, computed where it does not."""

from benchmarks.training.flops import computed
from benchmarks.training.measured import measure, measure_all
from benchmarks.training.models import MODELS

__all__ = ["MODELS", "computed", "measure", "measure_all"]
