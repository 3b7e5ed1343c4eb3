"""What the sanitizers watch: every engine and kernel once, at shapes that are no multiple of anything.

Prints ``sanitized: <what>`` after each part, so that a log that breaks off says where.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

# Rows, hidden size, vocabulary: whole steps of a tile and a tail; a tail alone.
SHAPES = ((5, 64, 9001), (37, 96, 517), (3, 64, 129))
FEWER = {"racecheck": SHAPES[:1], "dry run": ((3, 16, 70),)}  # the slow ones


def main(tool: str = "memcheck") -> None:
    """Run all parts; a part that fails is said, and the rest goes on."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    failed = 0
    for n, h, v in FEWER.get(tool, SHAPES):
        for dtype in (torch.bfloat16, torch.float32)[: 1 if tool == "dry run" else 2]:
            for name, part in _parts(n, h, v, dtype, device).items():
                try:
                    part()
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                    print(f"sanitized: {name} {n}x{h}x{v} {dtype}", flush=True)
                except Exception as error:
                    failed += 1
                    print(f"failed: {name} {n}x{h}x{v} {dtype}: {type(error).__name__}: {error}"[:400], flush=True)
    print(f"failed parts: {failed}")
    print("sanitized: all done", flush=True)
    sys.exit(1 if failed else 0)


def _parts(n: int, h: int, v: int, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], object]]:
    from grpo_kernels import LossConfig, ReferenceHead, grpo_loss, linear_divergence, linear_logprob

    g = torch.Generator().manual_seed(n * v)
    normal = lambda *shape: torch.randn(shape, generator=g)  # noqa: E731
    hidden = (normal(2, n, h)).to(device, dtype).requires_grad_()
    weight = (normal(v, h) / h**0.5).to(device, dtype).requires_grad_()
    bias = normal(v).to(device, dtype).requires_grad_()
    ids = torch.randint(v, (2, n), generator=g).to(device)
    mask = (torch.rand(2, n, generator=g) > 0.2).to(device)
    advantages, old = normal(2).to(device), (normal(2, n) * 0.1 - 7).to(device)
    teacher = ReferenceHead(normal(2, n, h).to(device, dtype), (normal(v, h) / h**0.5).to(device, dtype))

    def loss(engine: str, config: LossConfig, **inputs: object) -> Callable[[], object]:
        def part() -> None:
            out = grpo_loss(
                hidden,
                weight,
                ids,
                mask,
                advantages,
                config=config,
                engine=engine,
                backend="triton",
                **inputs,  # type: ignore[arg-type]
            )
            (0.5 * out.loss).backward()  # with a factor, that d weight is scaled by

        return part

    def scores(engine: str) -> Callable[[], object]:
        def part() -> object:
            with torch.no_grad():
                return linear_logprob(hidden, weight, ids, engine=engine, backend="triton")

        return part

    def frozen() -> None:
        grpo_loss(hidden, weight.detach(), ids, mask, advantages, engine="frozen", backend="triton").loss.backward()

    def diverges() -> None:
        heads = (hidden, weight, teacher.hidden, teacher.weight)
        found = linear_divergence(*heads, divergence="jsd", bias=bias, engine="two_pass", backend="triton")
        found.sum().backward()

    exact_kl = LossConfig(beta=0.1, kl_estimator="full")
    everything = LossConfig(beta=0.1, entropy_coef=0.01, final_logit_softcapping=5.0, temperature=0.8)
    return {
        "one_pass": loss("one_pass", LossConfig(), old_per_token_logps=old),
        "one_pass_everything": loss(
            "one_pass", everything, old_per_token_logps=old, ref_per_token_logps=old, bias=bias
        ),
        "one_pass_cispo": loss("one_pass", LossConfig(loss_type="cispo", epsilon_high=2.0), old_per_token_logps=old),
        "one_pass_sapo": loss("one_pass", LossConfig(loss_type="sapo"), old_per_token_logps=old),
        "two_pass": loss("two_pass", everything, old_per_token_logps=old, ref_per_token_logps=old, bias=bias),
        "lean": loss("lean", LossConfig(entropy_coef=0.01), workspace_bytes=2**16),
        "one_pass_exact_kl": loss("one_pass", exact_kl, old_per_token_logps=old, reference=teacher),
        "two_pass_divergence": diverges,
        "frozen": frozen,
        "score": scores("score"),
        "score_dot": scores("score_dot"),
    }


if __name__ == "__main__":
    main(*sys.argv[1:2])
