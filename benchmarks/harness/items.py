"""What pytest runs for `python -m benchmarks`; the turns come from `suite.Suite`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

    from benchmarks.harness.suite import Measured, Turn


def test_step(turn: Turn, measured: Measured, request: pytest.FixtureRequest) -> None:
    """A provider's check, or one timed step of it."""
    if turn.round is None:
        measured.check(turn.provider)
    else:
        measured.time(turn.provider, request.getfixturevalue("benchmark"))
