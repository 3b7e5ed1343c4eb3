"""The first minute on a GPU: every kernel, every engine, the products, one bandwidth; ``benchmarks.gpu --only smoke``.

Each check holds what came against float64, prints a line, and has its result in the JSON file at once. Compiling takes
most of the time: each group of checks has a process, all at once; the bandwidth is measured at the end, alone. A check
that failed can be run by itself: ``python -m benchmarks.gpu.smoke "grad, V 9001, bfloat16"``.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.process import environment, start, stop
from benchmarks.run import Absence, Results, describe
from benchmarks.timing import Clock
from grpo_kernels.backends.interface import STATISTICS, Chunk, DivergenceStats, LogitTransform, RowStats, Teacher
from grpo_kernels.engine.engines import ENGINES
from grpo_kernels.token_loss.record import TokenLoss

Compared = tuple[str, Tensor, Tensor, Tensor | float, float]  # name, ours, float64's, its size, error allowed of that
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
STATISTIC = 2e-5  # allowed of a statistic, of 1 + its size
GRADIENT = {FP32: 1e-4, BF16: 5e-3, FP16: 6e-4}  # allowed of d logits by their dtype: half a unit and more
PRODUCT = {FP32: 1e-4, BF16: 1e-2}  # allowed of a whole gradient by the dtype of the head, in the norm
SCALE = 1024.0  # of the coefficients, so that gradients of a long row are normal numbers of fp16
ROWS = 16


@dataclass(frozen=True)
class Sizes:
    """Shapes and dtypes of all checks."""

    vocabs: tuple[int, int]  # no multiple of 16, and a multiple of 64; both have whole steps of a tile and a tail
    dtypes: tuple[torch.dtype, ...]
    engine: tuple[int, int, int]  # B, T, H, with the second vocabulary
    engine_dtype: torch.dtype
    bandwidth_rows: int


ON_GPU = Sizes((9001, 151936), (FP32, BF16, FP16), (4, 16, 128), BF16, 1024)
DRY_RUN = Sizes((1100, 1088), (FP32, FP16), (4, 4, 16), FP32, 16)  # the interpreter has no exact bf16
SANITIZED = Sizes((9001, 1088), (FP32, BF16), (4, 4, 16), BF16, 16)  # small: the tools make kernels slow
COMMAND = (sys.executable, "-m", "benchmarks.gpu.smoke")


def run_smoke(results: Results, *, seconds: float, toy: bool, command: Sequence[str] = COMMAND) -> None:
    """Run all checks by processes of `command` within `seconds`; the result of each goes into ``smoke`` at once."""
    groups = checks(DRY_RUN if toy else ON_GPU, torch.device("cpu" if toy else "cuda"))
    names = [name for group in groups for name in group]
    results.merge("smoke", status="running", checks={name: {"status": "not run"} for name in names})
    *others, bandwidth = groups
    rounds = [[names]] if toy else [[list(group) for group in others], [list(bandwidth)]]
    command, until, in_time = [*command, *(["--dry-run"] if toy else [])], time.time() + seconds, True
    for shares in rounds:
        in_time = in_time and _run_processes([[*command, *share] for share in shares], results, until, toy=toy)
    found = results.at("smoke", "checks")
    for name in [name for name, x in found.items() if x["status"] == "running"]:
        _note(results, {"name": name, "status": "crashed" if in_time else "hung"})
    counts = Counter(x["status"] for x in found.values())
    results.merge("smoke", status="passed" if counts["ok"] + counts["absent"] == len(names) else "failed")
    print(f"smoke: of {len(names)} checks {', '.join(f'{n} {how}' for how, n in counts.items())}", flush=True)


def _run_processes(commands: Sequence[Sequence[str]], results: Results, until: float, *, toy: bool) -> bool:
    """Whether all of `commands`, at once and with one pipe for the lines they write, ended before `until`."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as out:
        processes = [start(command, env=environment(toy=toy), out=out) for command in commands]
    late = threading.Event()

    def end() -> None:
        late.set()
        for process in processes:
            stop(process)

    timer = threading.Timer(max(0.0, until - time.time()), end)
    timer.start()
    try:
        with os.fdopen(read, errors="replace") as lines:
            for line in lines:  # until the last process has closed its end
                if line.startswith('{"name"'):
                    _note(results, json.loads(line))
                else:
                    print(line, end="", flush=True)
        return not late.is_set()
    finally:
        timer.cancel()
        for process in processes:
            stop(process)


def _note(results: Results, found: dict[str, Any]) -> None:
    name = found.pop("name")
    results.merge("smoke", "checks", name, **found)
    if found["status"] != "running":
        about = [f"{key} {x}" for key, x in found.items() if key != "status"]
        print(f"smoke: {name}: {', '.join([found['status'], *about])}", flush=True)


def main(names: Sequence[str]) -> None:
    """Run the checks of these names, or all, in this process; each writes lines of JSON."""
    on_gpu = "--dry-run" not in names
    device = torch.device("cuda" if on_gpu else "cpu")
    wanted = [name for name in names if name not in ("--dry-run", "--sanitized")]
    sizes = (SANITIZED if "--sanitized" in names else ON_GPU) if on_gpu else DRY_RUN
    known = {name: check for group in checks(sizes, device) for name, check in group.items()}
    for name in wanted or known:
        _say(name, status="running")
        try:
            _say(name, **known[name]())
        except Absence as reason:
            _say(name, status="absent", reason=str(reason))
        except Exception as error:
            _say(name, status="error", reason=describe(error))
            if on_gpu:
                torch.cuda.synchronize()  # raises where the device is lost to this process


def _say(name: str, **found: Any) -> None:
    sys.stdout.write(json.dumps({"name": name, **found}) + "\n")
    sys.stdout.flush()


Check = Callable[[], dict[str, Any]]


def checks(sizes: Sizes, device: torch.device) -> list[dict[str, Check]]:
    """All checks by name, in groups that share kernels; each returns its status and what is worth knowing, or raises.

    The last group is the bandwidth.
    """
    groups = [_kernel_checks(device, vocab, dtype) for vocab in sizes.vocabs for dtype in sizes.dtypes]
    rest: dict[str, Check] = {}
    for engine in ENGINES:
        name = f"engine {engine}, V {sizes.vocabs[1]}, {_short(sizes.engine_dtype)}"
        rest[name] = _checked(compare_engine, engine, sizes, device)
    for add, dtype in product((False, True), (BF16, FP16)):
        name = f"{'addmm' if add else 'mm'} of {_short(dtype)} with out_dtype=float32"
        rest[name] = _checked(compare_product, dtype, add, device)
    return [*groups, rest, {"bandwidth": lambda: measure_bandwidth(sizes, device)}]


def _kernel_checks(device: torch.device, vocab: int, dtype: torch.dtype) -> dict[str, Check]:
    found = {}
    for kernel, compare in KERNELS.items():
        if (kernel, dtype) == ("single_pass", FP16):
            continue  # its gradients, up to e^40, do not fit
        for in_place in (False, True) if dtype == FP32 and kernel in WRITES else (False,):
            name = f"{kernel}, V {vocab}, {_short(dtype)}{', in place' if in_place else ''}"
            found[name] = _checked(_compare_kernel, compare, device, vocab, dtype, in_place)
    return found


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _checked(compare: Callable[..., Iterator[Compared]], *given: Any) -> Check:
    """A check that everything `compare` yields is within its bound."""

    def check() -> dict[str, Any]:
        shares = {}
        for name, got, want, size, allowed in compare(*given):
            share = ((got.double() - want) / (allowed * size)).detach().abs().nan_to_num(nan=torch.inf)
            shares[name] = share.max().item()
        worst = max(shares, key=lambda name: shares[name])
        status = "ok" if shares[worst] <= 1 else "wrong"
        return {"status": status, "error": f"{shares[worst]:.2g} of what is allowed, in {worst}"}

    return check


def _compare_kernel(compare: Callable[[Case, Any], Iterator[Compared]], device: torch.device, *given: Any) -> Any:
    return compare(Case(device, *given), triton_rows(device))


class Case:
    """Rows of two heads' logits for one kernel, and what float64 makes of them.

    Attributes:
        chunk, pair: logits (n, V) in fp32, rounded to `dtype`; the same with the teacher's beside them.
        a, b, c: (n,) d loss / d logp, / d entropy and / d divergence.
        out: where the gradient goes: the chunk's logits if `in_place`, else rows of `dtype`.
        raw, all_logps, logps, entropies, divergence: float64, a graph from `raw` (n, V) on.
        size: (n, V) what terms of a gradient are made of.
    """

    def __init__(self, device: torch.device, vocab: int, dtype: torch.dtype, in_place: bool) -> None:
        self.device, self.vocab, self.dtype = device, vocab, dtype
        torch.manual_seed(vocab)
        normal = lambda *shape: torch.randn(shape, device=device)  # noqa: E731
        raw, teacher_raw = 3.0 * normal(ROWS, vocab), 3.0 * normal(ROWS, vocab)
        self.a, self.b, self.c = SCALE * normal(3, ROWS)
        self.old_gap, self.ref_gap = 0.2 * normal(2, ROWS)
        transform, beta = LogitTransform(rounded_to=None if dtype == FP32 else dtype), 1.0
        if vocab % 16:  # all that a head may have
            inv_t, bias, beta = 1.0 + 0.1 * normal(ROWS, 1), normal(vocab), 0.5
            transform = replace(transform, scale=1.5, softcap=6.0, inv_temperature=inv_t, bias=bias)
        ids = torch.linspace(0, vocab - 1, ROWS).long().to(device)  # the first and the last among them
        raw[torch.arange(0, ROWS, 2), ids[::2]] += 20.0  # every other target is certain
        teacher = Teacher(padded(teacher_raw), LogitTransform(), beta)
        self.pair = Chunk(padded(raw), ids, transform, teacher=teacher)
        self.chunk = replace(self.pair, teacher=None)
        self.out = self.chunk.logits if in_place else padded(torch.zeros_like(raw), dtype)

        self.raw = raw.double().requires_grad_()
        self.all_logps = log_probs(self.raw, transform)
        self.logps = self.all_logps.gather(1, ids[:, None])[:, 0]
        probs, teacher_logps = self.all_logps.exp(), log_probs(teacher_raw.double(), LogitTransform())
        self.entropies = -(probs * self.all_logps).sum(1)
        self.divergence = divergence(self.all_logps, teacher_logps, beta)
        self.size = probs.detach() + teacher_logps.exp()

    def statistics(self, kernels: Any) -> RowStats:
        """Ours, of the pair."""
        stats, teacher = kernels.stats(self.chunk, entropy=True), kernels.stats(self.pair.of_teacher(), entropy=False)
        found = kernels.diverge(self.pair, stats, teacher)
        return replace(stats, divergence=DivergenceStats(*found, teacher.max_logit, teacher.log_sum))

    def gradient(self, loss: Tensor, factor: Tensor | None = None) -> Iterator[Compared]:
        """`out`, times a `factor` (n, 1) if there is one, against d loss.sum() / d raw; the padding stays."""
        (want,) = torch.autograd.grad(loss.sum(), self.raw, retain_graph=True)
        found, coefficient = (self.out, SCALE) if factor is None else (self.out.double() * factor.double(), 1.0)
        size = want.abs() + coefficient * self.size + torch.finfo(self.out.dtype).smallest_normal
        yield "d logits", found, want, size, GRADIENT[self.out.dtype]
        beyond = self.out.as_strided((ROWS, self.out.stride(0) - self.vocab), self.out.stride(), self.vocab)
        yield "padding", beyond.isnan(), torch.ones_like(beyond, dtype=torch.float64), 1.0, 0.5

    def of(self, stats: RowStats) -> Iterator[Compared]:
        """The statistics that every kernel returns."""
        assert stats.entropies is not None
        yield "logps", stats.logps, self.logps, 1.0 + self.logps.abs(), STATISTIC
        yield "entropies", stats.entropies, self.entropies, 1.0 + self.entropies.abs(), STATISTIC

    def token_loss(self, kl: str) -> tuple[TokenLoss, Tensor, float]:
        """A clipped loss with a KL term: for the kernel; of each row (n,) in float64; and d loss / d entropy."""
        old, ref = (self.logps.detach().float() + gap for gap in (self.old_gap, self.ref_gap))
        advantages, beta, bonus = self.a / SCALE, 0.04, -0.01 * SCALE
        loss = TokenLoss(
            surrogate="clipped", constants=(0.8, 1.2, math.inf), kl=kl, corrects_kl=False, advantages=advantages,
            d_logps=None, weights=torch.full_like(advantages, SCALE), old=old, ref=None if kl == "full" else ref,
            gate=None, beta=beta, d_entropy=bonus,
        )  # fmt: skip
        ratio, ahead = (self.logps - old.double()).exp(), ref.double() - self.logps
        policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        of_kl = self.divergence if kl == "full" else ahead.exp() - ahead - 1.0
        return loss, SCALE * (policy + beta * of_kl), bonus


def log_probs(raw: Tensor, transform: LogitTransform) -> Tensor:
    """log softmax of the scaled logits (n, V), in float64; a rounding has the slope 1."""
    x = raw if transform.bias is None else raw + transform.bias
    if transform.rounded_to is not None:
        x = x + (x.detach().float().to(transform.rounded_to).double() - x.detach())
    x = transform.scale * x
    if transform.softcap is not None:
        x = transform.softcap * torch.tanh(x / transform.softcap)
    return (x * transform.inv_temperature).log_softmax(1)


def divergence(logps: Tensor, teacher_logps: Tensor, beta: float) -> Tensor:
    """(n,): KL(student || teacher) for beta = 1; the Jensen-Shannon divergence between 0 and 1."""
    if beta == 1.0:
        return (logps.exp() * (logps - teacher_logps)).sum(1)
    mixture = torch.logaddexp(logps + math.log(1.0 - beta), teacher_logps + math.log(beta))
    of_student, of_teacher = (x.exp() * (x - mixture) for x in (logps, teacher_logps))
    return ((1.0 - beta) * of_student + beta * of_teacher).sum(1)


def padded(x: Tensor, dtype: torch.dtype = FP32) -> Tensor:
    """`x` (n, V) in rows that are as far apart as the engine's, with NaN between them."""
    rows = torch.full((len(x), -(-(x.shape[1] + 1) // 64) * 64), math.nan, dtype=dtype, device=x.device)
    rows[:, : x.shape[1]] = x
    return rows[:, : x.shape[1]]


def compare_stats(case: Case, kernels: Any) -> Iterator[Compared]:
    stats = kernels.stats(case.chunk, entropy=True, extras=STATISTICS)
    yield from case.of(stats)
    squares = (2.0 * case.all_logps).logsumexp(1)
    yield "log_sum_sq_probs", stats.extras["log_sum_sq_probs"], squares, 1.0 + squares.abs(), STATISTIC
    is_top1 = (case.all_logps.argmax(1) == case.chunk.ids).double()
    yield "is_top1", stats.extras["is_top1"], is_top1, 1.0, 0.5


def compare_diverge(case: Case, kernels: Any) -> Iterator[Compared]:
    found = case.statistics(kernels).divergence
    assert found is not None
    yield "divergence", found.value, case.divergence, 1.0 + case.divergence, STATISTIC


def compare_grad(case: Case, kernels: Any) -> Iterator[Compared]:
    stats = kernels.stats(case.chunk, entropy=True)
    kernels.grad(case.chunk, stats, case.a, case.b, case.out)
    yield from case.gradient(case.a * case.logps + case.b * case.entropies)


def compare_fused(case: Case, kernels: Any) -> Iterator[Compared]:
    loss, want, bonus = case.token_loss("k3")
    stats = kernels.fused(case.chunk, loss, case.out)
    yield from case.of(stats)
    yield "loss", stats.terms["loss"], want, 4.0 * SCALE, STATISTIC
    yield from case.gradient(want + bonus * case.entropies)


def compare_single_pass(case: Case, kernels: Any) -> Iterator[Compared]:
    stats, factor = kernels.single_pass(case.chunk, case.out, entropy=True)
    yield from case.of(stats)
    yield from case.gradient(case.logps, factor[:, None])


def compare_teacher_grad(case: Case, kernels: Any) -> Iterator[Compared]:
    kernels.grad(case.pair, case.statistics(kernels), case.a, case.b, case.out, case.c)
    yield from case.gradient(case.a * case.logps + case.b * case.entropies + case.c * case.divergence)


def compare_teacher_fused(case: Case, kernels: Any) -> Iterator[Compared]:
    loss, want, bonus = case.token_loss("full")
    stats = kernels.fused(case.pair, loss, case.out)
    yield from case.of(stats)
    yield "loss", stats.terms["loss"], want, 4.0 * SCALE, STATISTIC
    yield from case.gradient(want + bonus * case.entropies)


def compare_scale(case: Case, kernels: Any) -> Iterator[Compared]:
    x, factor = case.raw.detach().float(), torch.tensor(0.3, device=case.device)
    want = case.raw.detach() * factor.double()
    out = x if case.out is case.chunk.logits else torch.empty_like(x, dtype=case.dtype)
    kernels.scale(x, factor, out)
    yield "product", out, want, want.abs() + torch.finfo(case.dtype).smallest_normal, GRADIENT[case.dtype]


def compare_dot(case: Case, kernels: Any) -> Iterator[Compared]:
    """`dot` and `combine`: hidden states (n, 128) and weight (V, 128) in place of the logits, which are not rounded."""
    hidden = torch.randn(ROWS, 128, device=case.device).to(case.dtype)
    weight = (torch.randn(case.vocab, 128, device=case.device) / 4).to(case.dtype)
    transform = replace(case.chunk.transform, rounded_to=None)
    stats = kernels.score_dot(hidden, weight, case.chunk.ids, transform, entropy=True)
    logps = log_probs(hidden.double() @ weight.double().T, transform)
    target, entropies = logps.gather(1, case.chunk.ids[:, None])[:, 0], -(logps.exp() * logps).sum(1)
    yield "logps", stats.logps, target, 1.0 + target.abs(), STATISTIC
    yield "entropies", stats.entropies, entropies, 1.0 + entropies, STATISTIC


# By the name of the kernel; `teacher_grad` is `grad` with a teacher, `dot` has `combine` in it. Those of `WRITES` write
# a gradient, also over the logits.
KERNELS: dict[str, Callable[[Case, Any], Iterator[Compared]]] = {
    "stats": compare_stats,
    "diverge": compare_diverge,
    "grad": compare_grad,
    "fused": compare_fused,
    "single_pass": compare_single_pass,
    "teacher_grad": compare_teacher_grad,
    "teacher_fused": compare_teacher_fused,
    "scale": compare_scale,
    "dot": compare_dot,
}
WRITES = ("grad", "fused", "single_pass", "teacher_grad", "teacher_fused", "scale")


def compare_engine(engine: str, sizes: Sizes, device: torch.device) -> Iterator[Compared]:
    """A whole call by `engine`, and its backward where it has one, against the logits of all positions in float64."""
    from grpo_kernels import LossConfig, grpo_loss, linear_logprob

    (b, t, width), vocab, dtype = sizes.engine, sizes.vocabs[1], sizes.engine_dtype
    torch.manual_seed(0)
    hidden = torch.randn(b, t, width, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, device=device) * (2.0 / width**0.5)).to(dtype)
    weight.requires_grad_(engine != "frozen")
    ids = torch.randint(vocab, (b, t)).to(device)
    h64, w64 = (x.detach().double().requires_grad_(x.requires_grad) for x in (hidden, weight))
    all_logps = (h64 @ w64.T).log_softmax(-1)
    logps, entropies = all_logps.gather(-1, ids[..., None])[..., 0], -(all_logps.exp() * all_logps).sum(-1)
    if engine in ("score", "score_dot"):
        with torch.no_grad():
            found = linear_logprob(hidden, weight, ids, engine=engine, backend="triton")
        yield "logps", found[0], logps, 1.0 + logps.abs(), STATISTIC
        yield "entropies", found[1], entropies, 1.0 + entropies, STATISTIC
        return
    mask = torch.ones(b, t, device=device)
    mask[0, t // 2 :] = 0.0
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.5], device=device)  # of one sequence none: nothing to compute
    old = logps.detach().float() + 0.2 * torch.randn(b, t, device=device)
    out = grpo_loss(
        hidden, weight, ids, mask, advantages, config=LossConfig(epsilon=0.2), old_per_token_logps=old, engine=engine,
        backend="triton",
    )  # fmt: skip
    out.loss.backward()
    ratio, gain = (logps - old.double()).exp(), advantages[:, None]
    per_token = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    loss = (per_token * mask).sum() / mask.sum()
    loss.backward()
    yield "loss", out.loss, loss.detach(), 1.0, STATISTIC
    yield "logps", out.per_token_logps, (logps * mask).detach(), 1.0 + logps.detach().abs(), STATISTIC
    for name, x, x64 in (("d hidden", hidden, h64), ("d weight", weight, w64)):
        if x64.grad is not None:
            assert x.grad is not None
            off, size = (x.grad.double() - x64.grad).norm(), x64.grad.norm()
            yield name, off, torch.zeros_like(off), size, PRODUCT[dtype]


def compare_product(dtype: torch.dtype, add: bool, device: torch.device) -> Iterator[Compared]:
    """A product as the engine has it: 16-bit operands, one of them transposed, and an fp32 result that they add to."""
    from grpo_kernels.engine.device import device_of

    kind = device_of(device)
    if not kind.mixed_products(dtype):
        raise Absence(f"on this device operands of {_short(dtype)} are converted to float32")
    left, right = (torch.randn(512, n, device=device).to(dtype) for n in (1000, 256))
    out = torch.randn(1000, 256, device=device)
    want = left.double().T @ right.double() + (out.double() if add else 0.0)
    kind.mixed_mm(left.T, right, out, add=add)
    yield "product", out, want, 512**0.5, STATISTIC


def measure_bandwidth(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """GB/s at which `stats` reads fp32 logits that are not in the cache."""
    kernels, vocab = triton_rows(device), sizes.vocabs[1]
    logits = torch.randn(sizes.bandwidth_rows, vocab, device=device)
    chunk = Chunk(logits, torch.zeros(len(logits), dtype=torch.int64, device=device), LogitTransform())
    clock = Clock(device, flush=True, queued=True)
    ms = [clock.time(lambda: kernels.stats(chunk, entropy=True)) for _ in range(3 if device.type == "cpu" else 25)]
    return {"status": "ok", "gb_per_s": round(logits.nbytes / 1e6 / median(ms[2:]), 1)}


def triton_rows(device: torch.device) -> Any:
    """The Triton backend; an error says why there is none."""
    from grpo_kernels.backends import choose_backend

    return choose_backend("triton", device)[0]


if __name__ == "__main__":
    main(sys.argv[1:])
