"""A results file as the benchmark suite writes it, with plausible figures from formulas: nothing is timed."""

from __future__ import annotations

import random
from typing import Any

SHAPES = {"Qwen3-0.6B": (1024, 151936), "Llama-3.2-1B": (2048, 128256), "Gemma-3-1B": (1152, 262144)}
# time over the products', FLOPs in NVH (None: inside a kernel), MiB, error of a log-probability
PEERS: dict[str, tuple[float, float | None, float, float]] = {
    "ours": (1.04, 6.0, 308.5, 4e-7),
    "ours@128": (1.2, 6.0, 115.2, 4e-7),
    "ours/torch": (1.14, 6.0, 323.4, 5e-7),
    "products": (1.0, 6.0, 0.0, 0.0),
    "eager": (1.1, 6.0, 306.1, 6e-7),
    "eager/selective": (1.18, 6.0, 307.0, 6e-7),
    "compiled": (1.09, 6.0, 310.4, 6e-7),
    "linear_ce": (1.6, 8.0, 420.9, 7e-7),
    "trl": (2.2, 8.0, 570.3, 9e-3),
    "liger_grpo": (2.8, 8.0, 669.0, 2e-2),
    "liger_ce": (1.7, 8.0, 640.2, 2e-2),
    "verl_torch": (1.9, 8.0, 512.7, 1e-2),
    "unsloth": (1.5, None, 280.4, 3e-6),
}
ABSENT = {
    "verl_triton": ("absent", "needs a GPU"),
    "cce": ("error", "RuntimeError: no kernel | in /opt/someone/site-packages/cce/linear.py for 'cpu'"),
    "quack": ("absent", "ModuleNotFoundError: No module named 'quack'"),
    "liger_torch": ("wrong", "d_weight 0.4"),
}
VERSIONS = {
    "torch": "2.13.0+cpu", "trl": "1.16.0", "liger-kernel": "0.8.5", "verl": "0.9.1", "unsloth_zoo": "2026.10.9",
    "cut-cross-entropy": "absent", "quack-kernels": "absent", "transformers": "5.23.0",
}  # fmt: skip
MACHINE = {
    "versions": {"python": "3.11.7", "triton": "3.7.1", **VERSIONS},
    "system": {"os": "Linux-6.18-x86_64", "cpu": "AMD EPYC", "cores": "2", "torch cpu capability": "AVX512"},
    "backend": {"cpu": "cpp (CPU tensors)", "C++ library": "avx512, /home/someone/.cache/grpo_kernels/lib.so"},
}


def results(seed: int = 1) -> dict[str, Any]:
    """All parts."""
    rng = random.Random(seed)
    cases: dict[str, Any] = {"main": case(rng, "main", modes=("full", "forward", "backward"))}
    for model, (h, v) in SHAPES.items():
        cases[f"shape_{model}"] = case(rng, "shapes", ("ours", "products", "eager", "trl"), model=model, h=h, v=v)
    for name, changed in {
        "half zero": {"zero_share": 0.5}, "padded": {"padding": 0.3}, "off_policy": {"drift": 0.1},
        "top_entropy": {"top_entropy": 0.2}, "gspo": {"sequence": True, "drift": 0.1}, "kl": {"beta": 0.04},
        "softcap": {"softcap": 30.0}, "frozen": {"frozen": True}, "score": {"score": True},
    }.items():  # fmt: skip
        peers = ("ours", "products", "eager", "compiled", "trl", "liger_grpo", "verl_torch", "verl_triton")
        cases[name] = case(rng, "workloads", peers, modes=("score" if name == "score" else "full",), **changed)
    peers = ("ours", "products", "eager", "trl", "liger_grpo", "unsloth")
    for n in (256, 512, 1024, 2048):
        cases[f"n_{n}"] = case(rng, "scaling", peers, n=n, series="n")
    for v in (32000, 65536, 151936, 262144):
        cases[f"v_{v}"] = case(rng, "scaling", peers, v=v, series="v")
    for zeros in (0.0, 0.25, 0.5, 0.75):
        cases[f"share_{zeros}"] = case(rng, "scaling", peers, zero_share=zeros, series="share")
    for scale in (10.0, 20.0, 40.0):
        cases[f"logits {scale:.0f}"] = case(rng, "accuracy", modes=(), scale=scale, dtype="bfloat16")
    cases["peaked"] = case(rng, "accuracy", modes=(), scale=11.0, peaked=True, dtype="bfloat16")
    for n in (16384, 512, 4096):
        cases[f"tokens {n}"] = case(rng, "memory", ("ours", "ours@128", "eager", "trl"), modes=(), n=n, h=64, t=n // 8)
    cases["tokens 16384"]["providers"]["eager"] = {"status": "absent", "reason": "would need about 28 GiB"}
    return {
        "format": 2, "date": "2026-11-21T10:00:00+00:00", "commit": "0123456789abcdef0123456789abcdef01234567",
        "command": ["--save", "/home/someone/out/found.json", "--plot"], "device": "cpu", "threads": 2,
        "status": "complete", "machine": MACHINE, "versions": VERSIONS, "cases": cases,
        "step": STEP,
        "runs": {
            "memory": {"date": "2026-11-22T09:00:00+00:00", "commit": "fedcba98765"}, "step": {"threads": 1},
        },
        "goals": [
            {"case": "main", "figure": "seconds, trl / ours", "goal": ">= 1.9", "value": 2.115, "verdict": "pass"},
            {"case": "gone", "figure": "seconds", "goal": "<= 1.05", "value": None, "verdict": "not measured"},
        ],
    }  # fmt: skip


def case(
    rng: random.Random,
    part: str,
    providers: tuple[str, ...] = (*PEERS, *ABSENT),
    modes: tuple[str, ...] = ("full",),
    **changed: Any,
) -> dict[str, Any]:
    """One case; time and memory grow with its shape."""
    found: dict[str, Any] = {
        "part": part, "model": "Qwen3-0.6B", "n": 512, "h": 1024, "v": 151936, "t": 64, "dtype": "float32",
        "softcap": None, "frozen": False, "score": False, "padding": 0.0, "zero_share": 0.0, "drift": 0.0,
        "top_entropy": 1.0, "sequence": False, "beta": 0.0, "scale": 10.0, "peaked": False, "rounds": 3,
        "series": None, "cpu_of_others": 0.012,
    } | changed  # fmt: skip
    kept = 1.0 - found["zero_share"]
    found["products_nvh"] = 2.0 if found["score"] else 2.0 + (2.0 if found["frozen"] else 4.0) * kept
    found["providers"] = {name: provider(rng, name, found, modes) for name in providers}
    return found


def provider(rng: random.Random, name: str, case: dict[str, Any], modes: tuple[str, ...]) -> dict[str, Any]:
    """What one provider has in a case."""
    if name in ABSENT:
        status, reason = ABSENT[name]
        return {"status": status, "reason": reason}
    factor, flops, mib, off = PEERS[name]
    off *= case["scale"] / 10.0 * (1.0 if case["dtype"] == "float32" else 2.0) * rng.uniform(0.9, 1.1)
    exact = off < 1e-4
    found: dict[str, Any] = {"status": "ok", "note": "one_pass, backend cpp" if name == "ours" else ""}
    if name != "products":
        found["errors"] = {
            "loss": off / 10, "logp_mean": off, "logp_max": 9 * off, "entropy_mean": 2 * off, "d_hidden": 1.4 * off,
            "d_weight": 0.5 * off, "ratio_off": 0.0 if exact else min(0.9, 9 * off),
            "clip_differs": 0.0 if exact else off,
        }  # fmt: skip
    found["extra_mib"] = round(mib * (case["n"] * case["v"] / 512 / 151936 if name != "ours@128" else 1.0), 1)
    if not name.startswith(("ours", "products")):  # who does not skip rows takes what the whole case takes
        needed = 2.0 if case["score"] else 4.0 if case["frozen"] else 6.0
    else:
        needed = case["products_nvh"]
    found["flops_nvh"] = None if flops is None else flops * needed / 6.0
    ms = 3300.0 * factor * needed / 6.0 * case["n"] * case["v"] * case["h"] / (512 * 151936 * 1024)
    parts = {"full": 1.0, "score": 1.0, "forward": 0.4, "backward": 0.6}
    samples = {mode: [ms * parts[mode] * rng.uniform(0.97, 1.03) for _ in range(case["rounds"])] for mode in modes}
    if samples:
        found |= {"samples_ms": samples, "ms": {mode: quantiles(x) for mode, x in samples.items()}}
    return found


def quantiles(samples: list[float]) -> dict[str, Any]:
    """As the suite's own, of three samples."""
    at = sorted(samples)
    found = {"median": at[len(at) // 2], "p20": at[0], "p80": at[-1], "min": at[0]}
    return {"samples": len(at), **{name: round(x, 4) for name, x in found.items()}}


def sparse() -> dict[str, Any]:
    """A run that was stopped early, and in which a lot went wrong."""
    full = {"samples": 1, "median": 12.5, "p20": None, "p80": None, "min": 12.5}
    found = {
        "ours": {"status": "ok", "ms": {"full": full}, "errors": {}, "flops_nvh": None, "extra_mib": None},
        "trl": {"status": "ok", "ms": {"full": {"samples": 0}}},
        "eager": {"status": "wrong", "reason": "d_hidden", "ms": {"full": {"samples": 2, "median": 10.0}}},
        "cce": {"status": "out of memory"},
        "liger_ce": {},
    }
    shape = {"part": "main", "n": 64, "h": 32, "v": 700, "t": 8, "dtype": "bfloat16"}
    return {
        "format": 2,
        "device": "cpu",
        "status": "stopped",
        "cases": {"a": {**shape, "providers": found}, "b": {**shape, "providers": {}}},
    }


def parsed(text: list[str], title: str) -> list[list[dict[str, str]]]:
    """The tables under a heading, each a list of rows by column."""
    start = next(i for i, line in enumerate(text) if line == f"## {title}")
    found: list[list[dict[str, str]]] = []
    head: list[str] = []
    for before, line in zip(text[start:], text[start + 1 :], strict=False):
        if line.startswith("## "):
            break
        cells = [cell.strip() for cell in line[1:-1].split("|")] if line.startswith("|") else []
        if cells and not before.startswith("|"):
            head = cells
            found.append([])
        elif cells and not line.startswith("| ---"):
            assert len(cells) == len(head)
            found[-1].append(dict(zip(head, cells, strict=True)))
    return found


def _step_variant(seconds: float, mib: float, options: dict[str, Any] | None) -> dict[str, Any]:
    """A variant of the part "step" in two rounds of three steps; the second round takes a tenth more."""
    samples = [[seconds * step * slow for step in (0.5, 1.0, 1.5)] for slow in (1.0, 1.1)]
    shares = {"sequences/gradient": 0.5, "tokens/computed": 0.6125, "tokens/gradient": 0.3}
    return {
        "options": options, "status": "ok", "samples": samples, "seconds": 1.05 * seconds,
        "differences": {"loss": 0.0, "grad_norm": 2e-7, "metrics": 1e-6, "worst": "entropy"},
        "saved_mib": {"mean": 0.6 * mib, "max": mib}, "shares": {} if options is None else shares,
    }  # fmt: skip


def _step_scene(about: str, stock: float) -> dict[str, Any]:
    return {
        "about": about, "steps": 4, "rounds": 2, "cpu_of_others": 0.012,
        "variants": {
            "stock TRL": _step_variant(stock, 200.0, None),
            "defaults": _step_variant(0.5, 80.0, {}),
            "split": {"options": {"padding": "split"}, "status": "error", "reason": "ValueError: in /opt/me/a.py | no"},
            "shared, regrouped": _step_variant(0.25, 40.0, {"shared_prompts": True, "regroup": True}),
        },
    }  # fmt: skip


STEP = {
    "conditions": {"time": "CPU seconds", "saved": "MiB"},
    "scenes": {
        "short prompts": _step_scene("Qwen3-like model with V 2048", 2.0),
        "long prompts": _step_scene("the same, longer", 3.0),
    },
    "sgd": {"stock TRL": {"parameters": 0.0, "loss": 0.0, "grad_norm": 0.0}}
    | {name: {"parameters": 1.2e-6, "loss": 1e-8, "grad_norm": 2e-7} for name in ("defaults", "shared, regrouped")},
}  # fmt: skip
