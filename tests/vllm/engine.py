"""Samples of a vLLM engine, with its log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams

KEPT = 50  # most ids of a set, and log-probabilities that are asked for
QUESTIONS = (
    "What is 7 plus 5?", "Name three colours.", "Write one sentence about the sea.",
    "What is the capital of France?", "Explain what a prime number is.",
    "Tell me a short story about a dog.", "What is 12 times 3?", "List two uses of iron.",
)  # fmt: skip
CHATS = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": x}] for x in QUESTIONS
]
CASES: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "top-p and top-k": {"temperature": 1.0, "top_p": 0.9, "top_k": KEPT},
    "top-p and top-k, temperature 0.7": {"temperature": 0.7, "top_p": 0.9, "top_k": KEPT},
}


def read(sample: Any) -> dict[str, Any]:
    drawn = zip(sample.logprobs, sample.token_ids, strict=True)
    return {
        "ids": [*sample.token_ids],
        "logps": [token[i].logprob for token, i in drawn],
        "top": [{i: x.logprob for i, x in token.items()} for token in sample.logprobs],
    }


def sample(
    model: str, dtype: str, cases: Sequence[str], head: str | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Samples of each of the `cases`; `head` is the precision of the head, if it is another."""
    more = {} if head is None else {"hf_overrides": {"head_dtype": head}}
    engine = LLM(
        model=model, dtype=dtype, enforce_eager=True, max_model_len=512, seed=1,
        max_logprobs=KEPT, logprobs_mode="processed_logprobs", **more,
    )  # fmt: skip
    found = {}
    for name in cases:
        params = SamplingParams(n=2, max_tokens=64, logprobs=KEPT, **CASES[name])
        found[name] = [
            {"prompt": [*request.prompt_token_ids], **read(output)}
            for request in engine.chat(CHATS, params, use_tqdm=False)
            for output in request.outputs
        ]
    return found
