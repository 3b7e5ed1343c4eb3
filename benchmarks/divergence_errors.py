"""How exact divergences are where the two policies nearly agree: ``python -m benchmarks.divergence_errors``.

In fp32, from 1e-8 to 10 nats a token, against float64 of the same numbers: relative errors in norm of the divergences
of all rows, and of their gradient in the hidden states. Once from the same fp32 logits (the weight is the identity, so
that the hidden states are the logits, and their product is exact), where what is left is the error of the formula; and
once from hidden states, where the rounding of the logits is in it, which no formula can take back. Printed: markdown.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from benchmarks.harness.reference import divergence_terms
from benchmarks.report.columns import markdown
from benchmarks.teacher import words
from grpo_kernels import linear_divergence

SEED = 7
NATS = (1e-8, 1e-6, 1e-4, 1e-2, 1.0, 10.0)
BETAS = (1.0, 0.0, 0.5)
ROWS, SPREAD = 16, 2.5  # standard deviation of the logits
LOGITS = 4096  # V of the identity
VOCAB, HIDDEN = 32768, 256


@dataclass(frozen=True)
class Heads:
    """A student and a teacher."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    teacher_hidden: Tensor  # (N, H)
    teacher_weight: Tensor  # (V, H)


Divergences = Callable[[Heads, float], Tensor]


def ours(heads: Heads, beta: float, *, backend: str = "auto") -> Tensor:
    """`linear_divergence`."""
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    tensors = (heads.hidden, heads.weight, heads.teacher_hidden, heads.teacher_weight)
    return linear_divergence(*tensors, divergence=kind, beta=beta if kind == "jsd" else None, backend=backend)


def trl(heads: Heads, beta: float) -> Tensor:
    """TRL's `ChunkedDivergenceFunction`."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    student, teacher = (heads.hidden, heads.weight, None), (heads.teacher_hidden, heads.teacher_weight, None)
    found: Tensor = ChunkedDivergenceFunction.apply(*student, *teacher, beta)[0]
    return found


def liger(heads: Heads, beta: float) -> Tensor:
    """Liger's `LigerFusedLinearJSDLoss`, a row at a time: it gives a mean."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    function = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=False)
    label = torch.zeros(1, dtype=torch.long)
    rows = zip(heads.hidden.split(1), heads.teacher_hidden.split(1), strict=True)
    return torch.stack([function(h, heads.weight, t, heads.teacher_weight, label) for h, t in rows])


def eager(heads: Heads, beta: float) -> Tensor:
    """torch's `kl_div` of `log_softmax`."""
    log_p = torch.log_softmax(heads.hidden @ heads.weight.t(), dim=1)
    log_q = torch.log_softmax(heads.teacher_hidden @ heads.teacher_weight.t(), dim=1)
    if beta == 0.0:
        return kl_div(log_p, log_q, reduction="none", log_target=True).sum(dim=1)
    if beta == 1.0:
        return kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=1)
    log_m = torch.logaddexp(log_p + torch.tensor(1.0 - beta).log(), log_q + torch.tensor(beta).log())
    apart = [kl_div(log_m, x, reduction="none", log_target=True).sum(dim=1) for x in (log_p, log_q)]
    return (1.0 - beta) * apart[0] + beta * apart[1]


def from_logits(beta: float, nats: float) -> Heads:
    """Heads whose hidden states are the logits, `nats` apart in the mean."""
    g = torch.Generator().manual_seed(SEED)
    z, noise = (SPREAD * torch.randn(ROWS, LOGITS, generator=g, dtype=torch.float64) for _ in range(2))
    size = _size(lambda x: _truth(z, z + x * noise, beta)[0].mean(), nats)
    eye = torch.eye(LOGITS)
    return Heads(z.float(), eye, (z + size * noise).float(), eye)


def from_hidden(beta: float, nats: float) -> Heads:
    """A teacher with the student's weight and hidden states that moved, `nats` apart in the mean."""
    g = torch.Generator().manual_seed(SEED)
    hidden, noise = (torch.randn(ROWS, HIDDEN, generator=g, dtype=torch.float64) for _ in range(2))
    weight = (SPREAD / HIDDEN**0.5 * torch.randn(VOCAB, HIDDEN, generator=g)).double()
    z, moved = hidden @ weight.t(), noise @ weight.t()
    size = _size(lambda x: _truth(z, z + x * moved, beta)[0].mean(), nats)
    return Heads(hidden.float(), weight.float(), (hidden + size * noise).float(), weight.float())


def errors(heads: Heads, beta: float, divergences: Divergences) -> tuple[float, float]:
    """Relative errors in norm: of the divergences (N,), and of their sum's gradient in the hidden states (N, H)."""
    weight = heads.weight.double()
    teacher = heads.teacher_hidden.double() @ heads.teacher_weight.double().t()
    value, d = _truth(heads.hidden.double() @ weight.t(), teacher, beta)
    student = Heads(heads.hidden.clone().requires_grad_(), heads.weight, heads.teacher_hidden, heads.teacher_weight)
    found = divergences(student, beta)
    found.sum().backward()
    assert student.hidden.grad is not None
    return _relative(found.detach(), value), _relative(student.hidden.grad, d @ weight)


def table(make: Callable[[float, float], Heads], functions: dict[str, Divergences]) -> list[str]:
    """A row for each divergence and size: error of the value, error of the gradient, of each function."""
    cells = []
    for beta in BETAS:
        for nats in NATS:
            if beta not in (0.0, 1.0) and nats > 0.5:  # a JSD is log 2 at most
                continue
            heads = make(beta, nats)
            found = [errors(heads, beta, function) for function in functions.values()]
            cells.append([words(beta), f"{nats:.0e}", *(f"{value:.0e}, {gradient:.0e}" for value, gradient in found)])
    return markdown(["divergence", "nats", *functions], cells)


def _truth(z: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Divergences (N,) and their gradient in the logits (N, V), of float64 logits."""
    return divergence_terms(torch.log_softmax(z, dim=1), torch.log_softmax(teacher, dim=1), beta)


def _size(nats_at: Callable[[float], Tensor], nats: float) -> float:
    """Where `nats_at`, which grows, is `nats`."""
    low, high = 0.0, 64.0
    for _ in range(48):
        middle = (low + high) / 2
        low, high = (middle, high) if float(nats_at(middle)) < nats else (low, middle)
    return high


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.divergence_errors", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="auto", help="of ours")
    backend = parser.parse_args().backend
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    functions: dict[str, Divergences] = {
        "ours": partial(ours, backend=backend),
        "TRL": trl,
        "Liger": liger,
        "torch": eager,
    }
    print("Relative errors of the divergence, and of its gradient in the hidden states, in fp32 against float64.\n")
    print(f"From the same logits, N {ROWS}, V {LOGITS}:\n")
    print("\n".join(table(from_logits, functions)))
    print(f"\nFrom hidden states, N {ROWS}, H {HIDDEN}, V {VOCAB}:\n")
    print("\n".join(table(from_hidden, functions)))


if __name__ == "__main__":
    main()
