"""What the tests of the C++ library's build share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.acted_build import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A cache, sources and a compiler that are acted."""
    return World(tmp_path, monkeypatch)
