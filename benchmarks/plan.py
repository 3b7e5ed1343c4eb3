"""Which cases are measured, with which providers: fewer where they are slow, all in the main case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.cases import HEADS, WORKLOADS, BenchCase, case
from benchmarks.timing import ROUNDS

PEERS = (
    "trl", "liger_grpo", "liger_ce", "liger_torch", "verl_triton", "verl_torch", "unsloth", "cce", "quack", "linear_ce",
    "compiled", "eager", "eager/selective",
)  # fmt: skip
# There liger_torch is what liger_ce chooses, and eager/selective another form of eager.
ON_CPU = tuple(name for name in PEERS if name not in ("liger_torch", "eager/selective"))
SHORT = ("ours", "products", "eager", "trl")
SMALL: dict[str, Any] = {"n": 128, "t": 32}
PARTS = ("main", "workloads", "shapes", "scaling", "accuracy")
SCALES = (10.0, 20.0, 40.0)
EXACTNESS = (
    "ours", "trl", "liger_grpo", "liger_ce", "verl_triton", "verl_torch", "unsloth", "cce", "linear_ce", "eager",
)  # fmt: skip


def cpu_cases() -> list[BenchCase]:
    """In fp32, at token counts that fit a CPU: all of it is measured in less than ten minutes on two cores."""
    everything = ("ours", "ours@64", "ours/torch", "products", *ON_CPU)
    main = [
        case("main", series="n v share", rounds=3, providers=everything, **SMALL),
        case("frozen", frozen=True, providers=("ours", "products", "eager", "trl", "unsloth"), **SMALL),
        case("score", score=True, providers=("ours", "products", "eager", "trl", "unsloth", "liger_ce"), **SMALL),
        case("bf16", dtype="bfloat16", providers=SHORT, **SMALL),
    ]
    workloads = [
        case(name, workload=name, part="workloads", providers=("ours", "products", "trl"), **SMALL)
        for name in WORKLOADS
        if name != "all tokens"
    ]
    shapes = [  # frozen: the gradient of such a head alone is gigabytes
        case(model, model, part="shapes", n=64, t=16, frozen=True, providers=("ours", "products", "trl"))
        for model in HEADS
        if model != "Qwen3-0.6B"
    ]
    scaling = [
        *(_scaled("n", n, n=n, t=32) for n in (64, 256)),
        *(_scaled("v", v, v=v, **SMALL) for v in (32768, 65536)),
        *(_scaled("share", 1 - zero, zero_share=zero, **SMALL) for zero in (0.5, 0.75)),
    ]
    return main + workloads + shapes + scaling + _exactness(n=256, t=32, v=32768)


def gpu_cases() -> list[BenchCase]:
    """In bf16, the most important first: how many there is time for is not known beforehand."""
    variants = ("ours/two_pass", "ours/lean", "ours/expected", "ours/torch", "ours/no_mask")
    providers = ("ours", "products", *PEERS, *variants)
    main = case("main", "Qwen3-8B", n=8192, t=512, dtype="bfloat16", rounds=ROUNDS, providers=providers)
    trainable = ("ours", "products", "trl", "liger_ce", "unsloth", "ours/two_pass", "ours/lean", "eager", "verl_triton")
    frozen = ("ours", "products", "trl", "liger_ce", "unsloth", "ours/one_pass", "eager", "verl_triton", "liger_grpo")
    found = [
        main,
        replace(main, name="frozen", frozen=True, providers=frozen),
        replace(main, name="half_zero", zero_share=0.5, providers=("ours", "products", "trl", "liger_ce", "eager")),
        replace(
            main, name="score", score=True,
            providers=("ours", "ours/score_dot", "products", "trl", "liger_ce", "unsloth", "eager", "verl_triton"),
        ),
        *_exactness(n=2048, t=128),
    ]  # fmt: skip
    for name, fields in WORKLOADS.items():
        if name not in ("all tokens", "half zero"):
            found.append(replace(main, name=name, part="workloads", providers=trainable, **fields))
    large: dict[str, Any] = {"n": 4096, "t": 512, "dtype": "bfloat16", "rounds": ROUNDS}
    for model in HEADS:
        if model != main.model:
            found.append(case(model, model, part="shapes", providers=trainable, **{**large, "n": 8192}))
    found += [_scaled("n", n, **{**large, "n": n}) for n in (1024, 2048, 8192, 16384, 32768)]
    found += [_scaled("v", v, v=v, **large) for v in (32768, 65536, 262144)]
    found += [_scaled("share", 1 - zero, zero_share=zero, **large) for zero in (0.25, 0.5, 0.75)]
    return [*found, replace(_scaled("n v share", 4096, **large), name="n 4096")]


def _scaled(series: str, value: float, **fields: Any) -> BenchCase:
    """A point on the axes `series`: the number of tokens, the vocabulary, the share of rows that carry gradient."""
    return case(f"{series} {value}", part="scaling", series=series, providers=("ours", "eager", "trl"), **fields)


def _exactness(**shape: int) -> list[BenchCase]:
    """In bf16, which is what heads are trained in; off-policy, with about one ratio in twenty clipped; not timed."""

    def at(name: str, **fields: object) -> BenchCase:
        return case(
            name, drift=0.1, part="accuracy", dtype="bfloat16", rounds=0, providers=EXACTNESS, **shape,
            **fields,
        )  # fmt: skip

    return [*(at(f"logits {scale:g}", scale=scale) for scale in SCALES), at("peaked", peaked=True)]
