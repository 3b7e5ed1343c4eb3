"""The runner of other people's tests, on a source that is made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers import __main__ as peers

THEIRS = """
import os
import pytest

def test_good(): assert True
def test_of_theirs(): assert os.environ["GRPO_KERNELS_WAY"] == "as it is"
def test_bad(): assert False
@pytest.mark.skip
def test_skipped(): ...
"""


def test_outcomes_of_a_source_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_theirs.py").write_text(THEIRS)
    peer = peers.Peer("torch", "THEIR_SOURCE", "tests", ("tests/test_theirs.py",), ("another way",))
    monkeypatch.setattr(peers, "PEERS", (peer,))
    assert peers.main([]) == 2
    assert "set THEIR_SOURCE" in capsys.readouterr().out
    monkeypatch.setenv("THEIR_SOURCE", str(tmp_path))
    assert peers.main(["-k", "not slow"]) == 1
    told = capsys.readouterr().out
    assert "| as it is | 2 | 1 | 0 | 1 |" in told and "| another way | 1 | 2 | 0 | 1 |" in told
    assert told.splitlines()[-1] == "another way: tests.test_theirs::test_of_theirs: failed"
