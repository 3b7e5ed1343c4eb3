"""Information for bug reports: `collect` gathers the environment, `render` formats it as text.

`check` compares small random calls with plain float64 formulas. The formulas are written out here,
so they share no code with what they check. ``python -m grpo_kernels`` prints the environment and
the checks.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels.backends import choose_backend, why_torch
from grpo_kernels.backends.cpp_rows import build
from grpo_kernels.base import VERSION
from grpo_kernels.engine.plan import Run
from grpo_kernels.head import Head
from grpo_kernels.loss import grpo_loss
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.scores import linear_divergence

PACKAGES = ("triton", "trl", "transformers", "accelerate", "peft", "liger-kernel", "verl", "numpy")
PRECISIONS = {  # torch's name for the precision of float32 products -> text
    **dict.fromkeys(("none", "ieee"), "full"),
    "tf32": "TF32, 10 bits of mantissa if the device has it: float32 results are not exact",
    "bf16": "bfloat16, 7 bits of mantissa if the device has it: float32 results are not exact",
}


def collect() -> dict[str, dict[str, str]]:
    """Collect the report as {section: {name: text}}, without importing packages besides torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report has the same information
        chosen = {str(device): _chosen_backend(device) for device in _devices()}
    library, kernels = build.load(), "none"
    if not library.refusal:
        kernels = f"{torch.ops.grpo_kernels_cpp.isa('')}, {library.origin}"
        kernels += f", {library.path}" if library.path else ""
    return {
        "versions": {
            "python": platform.python_version(),
            "grpo-kernels": VERSION,
            "torch": str(torch.__version__),  # includes the build: +cpu, +cu130
            **{name: version(name) for name in PACKAGES},
        },
        "system": {
            "os": platform.platform(),
            "cpu": _cpu_name(),
            "cores": str(os.cpu_count()),
            "torch threads": str(torch.get_num_threads()),
            "torch cpu capability": torch.backends.cpu.get_cpu_capability(),
        },
        "devices": {str(device): _describe(device) for device in _devices()},
        "backend": {
            **chosen,
            "C++ library": kernels,
        },
        "settings of torch": _settings(),
    }


def render(report: dict[str, dict[str, str]]) -> str:
    """Format the report as aligned plain text, one block for each section."""
    width = max(len(name) for section in report.values() for name in section)
    blocks = (
        "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in section.items())])
        for title, section in report.items()
    )
    return "\n\n".join(blocks)


def _devices() -> list[torch.device]:
    """The CPU and every CUDA or ROCm device."""
    gpus = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return [torch.device("cpu"), *gpus]


def _chosen_backend(device: torch.device) -> str:
    name, why = choose_backend("auto", device).name, why_torch(device)
    return name if why is None else f"{name} ({why})"


def version(package: str) -> str:
    """Look up the installed version of a package; "absent" if there is none."""
    return next((x.version for x in metadata.distributions(name=package)), "absent")


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(x.split(":", 1)[1].strip() for x in file if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return platform.machine()
    gpu = torch.cuda.get_device_properties(device)
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    memory = f"{gpu.total_memory / 2**30:.0f} GiB"
    return f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {memory}, {runtime}"


def _settings() -> dict[str, str]:
    """Settings of torch in this process that change the results of matrix products."""
    # allow_tf32 and get_float32_matmul_precision raise if the newer fp32_precision was set
    cuda = torch.backends.cuda.matmul
    mkldnn = cast(Any, torch.backends.mkldnn).matmul  # missing in torch's type stub
    lines = {}
    for device, name, module in (("cpu", "mkldnn", mkldnn), ("cuda", "cuda", cuda)):
        value = module.fp32_precision
        setting = f"torch.backends.{name}.matmul.fp32_precision: {value}"
        lines[f"float32 products, {device}"] = f"{PRECISIONS.get(value, value)} ({setting})"
    refused = cuda.allow_fp16_accumulation
    how = "refused, since torch would sum in float16" if refused else "summed in float32"
    setting = f"torch.backends.cuda.matmul.allow_fp16_accumulation: {refused}"
    return {**lines, "float16 products, cuda": f"{how} ({setting})"}


# The self-check. dtype of a result -> allowed error, relative to the result's largest element.
# float32 has errors of about 1e-6 at these sizes. A bfloat16 head rounds the gradient of the
# logits, then the gradient that it computes from it.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-6}
B, T, H, V = 4, 9, 16, 9001  # V: several tiles of a GPU kernel, and a tail
TEMPERATURE, SCALE, CAP = 0.9, 1.5, 4.0

Pairs = dict[str, tuple[Any, Any]]  # name of a result -> (ours, the float64 formula's)


def check() -> Iterator[dict[str, Any]]:
    """Compare each backend that works, on every device, with float64; yield a dict for each call.

    The value of ``error`` belongs to the result that comes closest to its tolerance, and is
    relative to that result's largest element. It is None if the call raised.
    """
    for device in _devices():
        for backend in ("torch", "cpp" if device.type == "cpu" else "triton"):
            try:
                choose_backend(backend, device)
            except ValueError:  # the backend does not work here; the report says why
                continue
            run = Run(backend=cast(Any, backend))
            for dtype, (name, call) in itertools.product(TOLERANCES, CALLS.items()):
                about = f"{name}, {str(dtype).removeprefix('torch.')}"
                entry = {"name": about, "device": str(device), "backend": backend}
                try:
                    share, error, what = max(_errors(call(*_drawn(dtype, device), run)))
                except Exception as raised:
                    detail = f"{type(raised).__name__}: {raised}"
                    yield entry | {"error": None, "ok": False, "detail": detail}
                    continue
                shown, ok = error if math.isfinite(error) else None, share <= 1
                yield entry | {"error": shown, "ok": ok, "detail": "" if ok else f"in {what}"}


def _errors(pairs: Pairs) -> Iterator[tuple[float, float, str]]:
    """Yield (error / tolerance, error, name) for each result."""
    for name, (ours, exact) in pairs.items():
        gap = (ours.detach().double().cpu() - exact.detach()).abs().max()
        error = float((gap / exact.detach().abs().max().clamp(min=1e-12)).nan_to_num(nan=math.inf))
        yield error / TOLERANCES[ours.dtype], error, name


def _drawn(dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Draw hidden, weight, bias, and a teacher's hidden and weight, in `dtype` and in float64."""
    draw = torch.Generator().manual_seed(0)
    shapes = (B, T, H), (V, H), (V,), (B, T, H), (V, H)
    values = [torch.randn(shape, generator=draw).div(3).to(dtype) for shape in shapes]
    ours = [x.to(device, copy=True).requires_grad_() for x in values]
    return ours, [x.double().requires_grad_() for x in values]


def _loss(
    ours: list[Tensor], exact: list[Tensor], run: Run, frozen: bool = False, **fields: Any
) -> Pairs:
    """Compare `grpo_loss` with its formula: clipped ratios, KL, sequence means, entropy bonus."""
    config = LossConfig(loss_type="grpo", temperature=TEMPERATURE, **fields)
    ids = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(T) < torch.tensor([[T], [1], [T - 2], [T // 2]])
    advantages = torch.tensor([1.3, -0.7, 0.0, -1.1])
    logits = SCALE * (exact[0] @ exact[1].T + exact[2])
    log_p = (CAP * torch.tanh(logits / CAP) / TEMPERATURE).log_softmax(-1)
    logps, entropies = log_p.gather(-1, ids[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    drift = torch.linspace(-0.4, 0.4, B * T).view(B, T)
    old, ref = (logps.detach() + drift).float(), (logps.detach() - drift.flip(1)).float()
    weight, bias = (x.detach() if frozen else x for x in ours[1:3])
    out = grpo_loss(
        ours[0],
        Head(weight, bias, final_logit_softcapping=CAP, logit_scale=SCALE),
        *(x.to(weight.device) for x in (ids, mask, advantages)),
        old_per_token_logps=old.to(weight.device),
        ref_per_token_logps=ref.to(weight.device) if config.beta else None,
        config=config,
        run=run,
    )
    out.loss.backward()

    lengths, a = mask.sum(1, keepdim=True), advantages.double()[:, None]
    log_ratio = (logps - old.double()) * mask
    if config.importance_sampling_level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / lengths
    ratio, gap = log_ratio.exp(), ref.double() - logps
    clipped = ratio.clamp(1 - config.epsilon, 1 + config.epsilon)
    kl = config.beta * (gap.exp() - gap - 1) * ratio
    per_token = kl - torch.minimum(ratio * a, clipped * a)
    bonus = config.entropy_coef * (entropies * mask).sum() / mask.sum()
    loss = (per_token * mask / lengths).sum() / B - bonus
    loss.backward()
    pairs = {"loss": (out.loss, loss), "logps": (out.logps, logps * mask)}
    pairs |= {"entropies": (out.entropies, entropies * mask)}
    names = ("hidden",) if frozen else ("hidden", "weight", "bias")
    return pairs | {f"d {x}": (ours[i].grad, exact[i].grad) for i, x in enumerate(names)}


def _divergence(ours: list[Tensor], exact: list[Tensor], run: Run, *, kind: Any) -> Pairs:
    hidden, weight, _, other, other_weight = ours
    teacher = other.detach(), other_weight.detach()
    computed = linear_divergence(hidden, weight, teacher, divergence=kind, run=run).divergence
    log_p, log_q = ((exact[i] @ exact[i + 1].T).log_softmax(-1) for i in (0, 3))
    log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
    wanted = {
        "reverse_kl": log_p.exp() * (log_p - log_q),
        "forward_kl": log_q.exp() * (log_q - log_p),
        "jsd": (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)) / 2,
    }[kind].sum(-1)
    computed.sum().backward()
    wanted.sum().backward()
    pairs = {f"d {x}": (ours[i].grad, exact[i].grad) for i, x in enumerate(("hidden", "weight"))}
    return pairs | {"divergence": (computed, wanted)}


CALLS: dict[str, Callable[..., Pairs]] = {
    "grpo_loss, KL": partial(_loss, beta=0.04),
    "grpo_loss, KL, frozen head": partial(_loss, beta=0.04, frozen=True),
    "grpo_loss, entropy bonus": partial(_loss, entropy_coef=0.01),
    "grpo_loss, sequences": partial(_loss, importance_sampling_level="sequence", epsilon=3e-4),
    **{
        f"linear_divergence, {kind}": partial(_divergence, kind=kind)
        for kind in ("reverse_kl", "forward_kl", "jsd")
    },
}
