"""How many calls are drawn: a few, always the same; with ``--hypothesis-profile=fuzz``, others for
about ten minutes."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase

SAME = settings(
    max_examples=120, deadline=None, derandomize=True, print_blob=False,
    # no phase that explains failures: it traces every line of every trial
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
# whatever hypothesis takes for the surroundings, such as continuous integration
KEPT = DirectoryBasedExampleDatabase(".hypothesis/examples")
settings.register_profile("fuzz", SAME, max_examples=3000, derandomize=False, database=KEPT)
