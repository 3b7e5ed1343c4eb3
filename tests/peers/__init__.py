"""Other people's tests of GRPO, run with theirs and with ours: `python -m tests.peers`
(docs/dev/testing.md)."""
