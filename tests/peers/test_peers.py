"""The runner of other people's tests, on a source that is made up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.peers import __main__ as peers

pytestmark = pytest.mark.unit

THEIRS = """
import os
import pytest

def test_good(): assert True
def test_known(): assert os.environ["GRPO_KERNELS_WAY"] == "as it is"
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
    ways, known = ("another way",), {"test_known": "expects theirs"}
    peer = peers.Peer("torch", "THEIR_SOURCE", "tests", "tests/test_theirs.py", ways, known=known)
    missing = peers.Peer("torch", "THEIR_SOURCE", "tests", "tests/test_missing.py", ways)
    monkeypatch.setattr(peers, "PEERS", (peer, missing))
    assert peers.main([]) == 2
    assert "set THEIR_SOURCE" in capsys.readouterr().out
    monkeypatch.setenv("THEIR_SOURCE", str(tmp_path))
    assert peers.main(["-k", "not slow"]) == 1
    told = capsys.readouterr().out
    assert (
        "test_theirs.py | as it is | 3 | 1 | 0 | 1 |" in told
        and "| another way | 1 | 3 | 0 | 1 |" in told
    )
    assert told.splitlines()[-3:] == [
        "another way: tests.test_theirs::test_known: failed (known: it expects theirs)",
        "another way: tests.test_theirs::test_of_theirs: failed",
        f"not run: {tmp_path} has no tests/test_missing.py",
    ]
    assert peers.main(["-k", "not of_theirs"]) == 0
    capsys.readouterr()
    peers.main(["-k", "nothing"])
    assert "not run: no test of tests/test_theirs.py is selected" in capsys.readouterr().out
    with pytest.raises(
        SystemExit, match=r"torch, as it is: pytest ended with 4(?s:.)*unrecognized"
    ):
        peers.main(["--no-such-option"])


def test_tokenizers_of_the_tests_hub_lose_no_text() -> None:
    pytest.importorskip("trl")
    from tests.peers import trl_hub

    tokenizer = trl_hub.tokenizer("tiny-Qwen3ForCausalLM")
    text = "Zen é\n<tool_call>{}</tool_call><|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) < len(text) and max(ids) < trl_hub.VOCAB and tokenizer.decode(ids) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)


def test_our_estimators_take_what_verls_take(monkeypatch: pytest.MonkeyPatch) -> None:
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    from tests.peers import tests_of_ours

    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
    rewards, index = torch.randn(4, 3) * mask, np.array(["a", "a", "b", "b"])
    groups = {"token_level_rewards": rewards, "response_mask": mask, "index": index}
    of_values = {"values": torch.randn(4, 3), "gamma": 0.9, "lam": 0.95}
    of_gae = {x: groups[x] for x in ("token_level_rewards", "response_mask")} | of_values
    given = {
        "compute_grpo_outcome_advantage": groups,
        "compute_rloo_outcome_advantage": groups,
        "compute_gae_advantage_return": of_gae,
    }
    theirs = {name: getattr(core_algos, name) for name in given}
    for name, function in theirs.items():
        monkeypatch.setattr(core_algos, name, function)  # so that it comes back
    tests_of_ours._verl()
    for name, arguments in given.items():
        found, want = getattr(core_algos, name)(**arguments), theirs[name](**arguments)
        torch.testing.assert_close(found[0] * mask, want[0] * mask)
