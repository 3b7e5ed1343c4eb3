"""Which cases are measured, with which providers: all in the main case, else few."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.cases import HEADS, WORKLOADS, BenchCase, case
from benchmarks.figures import is_ours

# There liger_torch is what liger_ce chooses.
ON_CPU = (
    "trl", "liger_grpo", "liger_ce", "verl_triton", "verl_torch", "unsloth", "cce", "linear_ce",
    "compiled", "eager",
)  # fmt: skip
SHORT = ("ours", "products", "eager", "trl")
ANCHORS = ("ours", "products")  # timed again with every peer, so that a ratio is of the same minute
GOAL_CASES = ("main", "frozen", "half_zero", "score")
# Liger's own choice last: on an H100 it compiles for a minute, or its compiler is absent.
GOALS = (*ANCHORS, "trl", "liger_grpo", "liger_torch", "eager", "liger_ce")
REST = (
    "unsloth", "verl_triton", "cce", "linear_ce", "compiled", "liger_grpo/uncompiled", "verl_torch",
)  # fmt: skip
OURS = ("ours/two_pass", "ours/lean", "ours/torch")
SMALL: dict[str, Any] = {"n": 128, "t": 32}
LIMITED = {"rounds": 3}  # where the products are timed: what is called a limit has to be one
PARTS = ("main", "workloads", "shapes", "accuracy")
ROUNDS = 25  # on a GPU
SCALES = (10.0, 20.0, 40.0)
EXACTNESS = (
    "ours", "trl", "liger_grpo", "liger_ce", "verl_triton", "verl_torch", "unsloth", "cce",
    "linear_ce", "eager",
)  # fmt: skip


def cpu_cases() -> list[BenchCase]:
    """In fp32, at token counts that fit a CPU: ten minutes on two cores."""
    everything = ("ours", "ours@64", "ours/torch", "products", *ON_CPU)
    few = ("ours", "products", "trl")
    main = [
        case("main", rounds=3, providers=everything, **SMALL),
        case("frozen", frozen=True, providers=(*SHORT, "unsloth"), **SMALL, **LIMITED),
        case("score", score=True, providers=(*SHORT, "unsloth", "liger_ce"), **SMALL, **LIMITED),
        case("bf16", dtype="bfloat16", providers=SHORT, **SMALL, **LIMITED),
    ]
    workloads = [
        case(name, workload=name, part="workloads", providers=few, **SMALL, **LIMITED)
        for name in WORKLOADS
        if name != "all tokens"
    ]
    # frozen: the gradient of such a head alone is gigabytes
    large: dict[str, Any] = {"part": "shapes", "n": 64, "t": 16, "frozen": True, **LIMITED}
    others = [model for model in HEADS if model != "Qwen3-0.6B"]
    shapes = [case(model, model, providers=few, **large) for model in others]
    return main + workloads + shapes + _exactness(n=256, t=32, v=32768)


def gpu_cases() -> list[BenchCase]:
    """In bf16, the most important first: how many there is time for is not known beforehand."""
    size: dict[str, Any] = {"n": 8192, "t": 512, "dtype": "bfloat16", "rounds": ROUNDS}
    main = case("main", "Qwen3-8B", providers=GOALS + REST + OURS, **size)
    trainable = (*ANCHORS, "trl", "liger_ce", "unsloth", *OURS[:2], "eager", "verl_triton")
    some = ("unsloth", "verl_triton", "cce", "linear_ce", "compiled")
    found = [
        main,
        replace(main, name="frozen", frozen=True, providers=(*GOALS, *some, "ours/one_pass")),
        replace(main, name="half_zero", zero_share=0.5, providers=(*GOALS, *some)),
        replace(main, name="score", score=True, providers=(*GOALS, *some)),
        *_edges(main),
        *_exactness(n=2048, t=128),
    ]
    for name, fields in WORKLOADS.items():
        if name not in ("all tokens", "half zero"):
            found.append(replace(main, name=name, part="workloads", providers=trainable, **fields))
    for model in HEADS:
        if model != main.model:
            found.append(case(model, model, part="shapes", providers=trainable, **size))
    return found


def passes(case: BenchCase) -> list[tuple[str, ...]]:
    """The providers of `case` in its passes, each with the anchors first: a goal's
    case has three, about the goals, other peers, and other forms of ours."""
    anchors = tuple(name for name in case.providers if name in ANCHORS)
    others = [name for name in case.providers if name not in ANCHORS]
    if case.name not in GOAL_CASES:
        return [(*anchors, *others)]
    about_goals = [x for x in others if x in GOALS]
    peers = [x for x in others if x not in GOALS and not is_ours(x)]
    ours = [x for x in others if x not in GOALS and is_ours(x)]
    return [(*anchors, *names) for names in (about_goals, peers, ours) if names]


def _edges(main: BenchCase) -> list[BenchCase]:
    """What users have: fp32 weights under autocast, odd V, small heads, few rows."""
    providers = (*ANCHORS, "trl", "liger_grpo", "liger_ce", "unsloth", "eager")
    mixed = {"weight_dtype": "float32", "autocast": True}
    shapes: dict[str, dict[str, Any]] = {
        "fp32 weight, autocast": mixed, "V 151665": {"v": 151665}, "V 50257": {"v": 50257},
        "H 1024": {"model": "Qwen3-0.6B", "h": 1024}, "1024 rows": {"n": 1024},
    }  # fmt: skip
    modes: dict[str, dict[str, Any]] = {"": {}}
    modes |= {", frozen": {"frozen": True}, ", score": {"score": True}}
    return [
        replace(main, name=name + mode, part="edges", providers=providers, **fields, **how)
        for name, fields in shapes.items()
        for mode, how in modes.items()
        if not (name.startswith("V") and mode)
    ]


def _exactness(**shape: int) -> list[BenchCase]:
    """In bf16, off-policy, with about one ratio in twenty clipped; not timed."""
    kinds: dict[str, Any] = {f"logits {scale:g}": {"scale": scale} for scale in SCALES}
    kinds["peaked"] = {"peaked": True}
    common: dict[str, Any] = {"drift": 0.1, "part": "accuracy", "dtype": "bfloat16", "rounds": 0}
    common |= {"providers": EXACTNESS, **shape}
    return [case(name, **common, **kind) for name, kind in kinds.items()]
