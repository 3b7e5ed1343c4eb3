"""``python -m tests.vllm.engine``: samples of a vLLM engine, with its log-probabilities, into a
file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="folder of the model")
    add("--dtype", required=True, choices=["float32", "bfloat16"])
    add("--head", choices=["float32"], help="precision of the head, if it is another")
    add("--cases", nargs="+", choices=CASES, required=True)
    add("--save", type=Path, required=True)
    options = parser.parse_args()
    more = {} if options.head is None else {"hf_overrides": {"head_dtype": options.head}}
    engine = LLM(
        model=options.model, dtype=options.dtype, enforce_eager=True, max_model_len=512, seed=1,
        max_logprobs=KEPT, logprobs_mode="processed_logprobs", **more,
    )  # fmt: skip
    found = {}
    for name in options.cases:
        params = SamplingParams(n=2, max_tokens=64, logprobs=KEPT, **CASES[name])
        found[name] = [
            {"prompt": [*request.prompt_token_ids], **read(sample)}
            for request in engine.chat(CHATS, params, use_tqdm=False)
            for sample in request.outputs
        ]
    torch.save(found, options.save)


if __name__ == "__main__":
    main()
