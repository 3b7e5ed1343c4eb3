"""A low-rank adapter on a head of another precision: logps, entropies and gradients against
float64."""

from __future__ import annotations

import torch

from grpo_kernels import Head, LoRA, Run, grpo_loss, linear_logps

SCALING, RANK = 0.6, 3


def check_adapter(
    base: torch.dtype,
    dtype: torch.dtype,
    *,
    n: int = 12,
    device: str = "cpu",
    gradient: float,
    **options: str,
) -> None:
    """`base` is the head's dtype, `dtype` the adapter's; `gradient` bounds errors relative to the
    largest entry."""
    width, vocab = 16, 50
    g = torch.Generator().manual_seed(3)
    shapes = (1, n, width), (vocab, width)
    hidden, weight = (torch.randn(shape, generator=g).to(device, base) for shape in shapes)
    shapes = (RANK, width), (vocab, RANK)
    a, b = ((torch.randn(x, generator=g) * 0.4).to(device, dtype).requires_grad_() for x in shapes)
    hidden, ids = hidden.requires_grad_(), torch.randint(vocab, (1, n), generator=g).to(device)
    head, advantages = Head(weight, lora=LoRA(a, b, SCALING)), torch.ones(1, n, device=device)

    with torch.no_grad():  # what the adapter's own first product rounds is not the head's affair
        wide = dtype if dtype.itemsize > base.itemsize else base
        u = SCALING * (hidden.to(wide) @ a.to(wide).T)
        logits = hidden.double() @ weight.double().T + u.double() @ b.double().T
        want = torch.log_softmax(logits, -1).gather(2, ids[..., None])[..., 0]
        found = linear_logps(hidden, head, ids, run=Run(backend=options.get("backend", "auto")))
    torch.testing.assert_close(found.logps.double(), want, rtol=0, atol=3e-6)

    given, old = (hidden, head, ids, None, advantages), want.float()
    out = grpo_loss(*given, old_per_token_logps=old, run=Run(**options))
    out.loss.backward()
    leaves = [x.detach().double().requires_grad_() for x in (hidden, a, b)]
    logits = leaves[0] @ (weight.double() + SCALING * leaves[2] @ leaves[1]).T
    logps = torch.log_softmax(logits, -1).gather(2, ids[..., None])[..., 0]
    (-torch.exp(logps - logps.detach()).mean()).backward()
    for got, exact in zip((hidden, a, b), leaves, strict=True):
        assert got.grad.dtype == got.dtype
        bound = gradient * float(exact.grad.abs().amax())
        torch.testing.assert_close(got.grad.double(), exact.grad, rtol=0, atol=bound)
