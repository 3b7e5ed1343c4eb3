"""How far a result may lie from the float64 reference, per element and dtype.

The reference runs six times more, off by as much as rounding may, in six patterns of signs. With
the eps of what the case is computed in (float32; float64 if hidden states or weight are):

- each log-probability of a row by 4 eps * max_v(sum |h| |w| + |bias|) * |scale| / T, with an
  adapter's products in the sum, plus 2e-5 (float64: 1e-12; a tenth over a set or a teacher's list).
  What 16 bits round between an adapter's products, or in logits of dtype "input", adds to it;
- the gradient of the logits by half the eps of 16-bit hidden states, else by 8 eps, relatively;
- advantages and importance ratios by 8 eps, relatively. The loss is evaluated in that dtype.

Scores may be as far off as the furthest run, plus eps of themselves; a loss as the sum of its
tokens, each as far off as its furthest run plus 8 eps of itself. A gradient may be 1.5 times as far
off as the furthest run in its row, plus 4 eps of the row's largest number, plus an eps of its own
dtype: of itself, or of the row's largest number if it is a sum of two.

Where a discrete choice (top-entropy or off-policy mask) differs between the runs, or could, only
logps and entropies are compared. A loss that float32 cannot hold must have the right sign and be
above 1e33 in size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.case_builder import Case
from tests.support.reference import (
    LEAVES,
    OVERFLOW,
    SCORES,
    Exact,
    Head,
    ReferenceResult,
    ScoresResult,
    head,
    pick,
    reference_loss,
    reference_scores,
    settings,
)


def computed_in(case: Case) -> torch.dtype:
    """float64 inputs are computed in float64, all others in float32."""
    wide = torch.float64 in (case.hidden.dtype, case.weight.dtype)
    return torch.float64 if wide else torch.float32


def eps_of(case: Case) -> float:
    return torch.finfo(computed_in(case)).eps


def term_of(case: Case) -> float:
    """Relative error of a per-token term, after some 16 elementary roundings."""
    return 8 * eps_of(case)


def logit_error(case: Case, h: Head) -> Tensor:
    """(n,) bound of the logits of the counted positions, and of their normalizer."""
    o = settings(case)
    of = {name: x.detach() for name, x in h.leaves.items()}
    size = of["hidden"].abs() @ of["weight"].abs().T
    if "bias" in of:
        size = size + of["bias"].abs().masked_fill(of["bias"].isinf(), 0.0)
    rounding = torch.zeros_like(size)
    if "lora_a" in of:
        seen = of.get("lora_input", of["hidden"])
        between = abs(o.lora_scaling) * of["lora_b"].abs().T
        size = size + seen.abs() @ of["lora_a"].abs().T @ between
        rounding = 2 * between_products(case) * ((seen @ of["lora_a"].T).abs() @ between)
    if o.logits_dtype == "input":
        raw = h.raw.detach().masked_fill(h.raw.isinf(), 0.0).abs()
        rounding = torch.finfo(case.hidden.dtype).eps * raw / abs(o.logit_scale)
    error = (4 * eps_of(case) * size + rounding) * abs(o.logit_scale) / h.temperature
    nowhere = h.wide_log_probs.isinf() & h.log_probs.isinf()
    extra = 2e-5 if computed_in(case) == torch.float32 else 1e-12
    if case.kept_ids is not None or case.listed_ids is not None:  # of a few ids
        extra /= 10
    return error.masked_fill(nowhere, 0.0).amax(-1) + extra


def between_products(case: Case) -> float:
    """Half a unit in the last place of what lies between an adapter's two products, if that has 16
    bits."""
    if case.lora_a is None:
        return 0.0
    seen = case.hidden if case.lora_input is None else case.lora_input
    kinds = [torch.finfo(x.dtype) for x in (seen, case.lora_a)]
    return 0.0 if any(kind.bits > 16 for kind in kinds) else max(kind.eps / 2 for kind in kinds)


class LogSoftmax(torch.autograd.Function):
    """log_softmax with an error in its result, which its derivative reads, and one in that."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, error: Tensor, relative: Tensor, least: float, aligned: bool
    ) -> Tensor:
        log_probs = logits.log_softmax(-1) + error
        ctx.save_for_backward(log_probs, relative)
        ctx.least, ctx.aligned = least, aligned
        return log_probs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        log_probs, relative = ctx.saved_tensors
        d_logits = g - log_probs.exp() * g.sum(-1, keepdim=True)
        rounding = (d_logits.abs() if ctx.aligned else d_logits) * relative
        return d_logits + rounding + ctx.least * relative.sign(), None, None, None, None


class Rounded(Exact):
    """A head whose operations are off by as much as rounding may, up or down by `sign`.

    `aligned`: all of a gradient's roundings go the same way, so that they add up in d bias.
    """

    def __init__(self, case: Case, h: Head, sign: Callable[[Tensor], Tensor], aligned: bool):
        self.case, self.sign, self.dtype, self.aligned = case, sign, computed_in(case), aligned
        self.error, self.temperature = logit_error(case, h)[:, None], h.temperature

    def log_softmax(self, logits: Tensor, dim: int) -> Tensor:
        kind, sign = torch.finfo(self.case.hidden.dtype), self.sign(logits)
        short = kind.bits == 16
        relative = (kind.eps / 2 if short else term_of(self.case)) * self.sign(logits)
        least = kind.smallest_normal * kind.eps if short else 0.0
        return LogSoftmax.apply(logits, self.error * sign, relative, least, self.aligned)

    def between(self, u: Tensor) -> Tensor:
        return u * (1 + 2 * between_products(self.case) * self.sign(u))

    def softcap(self, raw: Tensor, cap: float) -> Tensor:
        tanh = torch.tanh(raw.detach() / cap)
        moved = self.error * self.temperature / cap
        off = 4 * eps_of(self.case) + 2 * tanh.abs() * (1 - tanh**2) * moved
        return super().softcap(raw, cap) + off * self.sign(raw) * (raw - raw.detach())

    def teacher(self, case: Case) -> Rounded:
        return Rounded(case, head(case), lambda x: -self.sign(x), self.aligned)


def rounded(case: Case, h: Head) -> Iterator[tuple[Case, Rounded]]:
    """`case` and the operations of its head, all off by their rounding, in six patterns of signs:
    all the same, those of d logits aligned; alternating; any."""
    g = torch.Generator().manual_seed(7)
    for number in range(6):

        def sign(x: Tensor, number: int = number) -> Tensor:
            odd = [torch.zeros(x.shape), torch.arange(x.shape[-1] if x.dim() else 1) % 2]
            odd.append(torch.randint(2, x.shape, generator=g))
            return (1.0 - 2.0 * ((odd[number // 2] + number) % 2)).double().expand(x.shape)

        named = {name: getattr(case, name) for name in ("advantages", "importance_sampling_ratio")}
        moved = {
            name: x.double() * (1 + term_of(case) * sign(x))
            for name, x in named.items() if x is not None
        }  # fmt: skip
        yield case.but(**moved), Rounded(case, h, sign, number < 2)


def spread(want: Tensor, moved: list[Tensor]) -> Tensor:
    """Largest distance of the moved values from `want`, element by element."""
    want = want.detach()
    distances = torch.stack([torch.where(x == want, 0.0, x.detach() - want).abs() for x in moved])
    return distances.nan_to_num(math.inf).amax(0)


def score_bound(case: Case, name: str, want: ScoresResult, moved: list[Any]) -> Tensor:
    """(B, T): what a score may be off by."""
    value = getattr(want, name)
    return spread(value, [getattr(x, name) for x in moved]) + eps_of(case) * value.abs()


def grad_bounds(case: Case, want: ScoresResult, moved: list[ScoresResult]) -> dict[str, Tensor]:
    """By name: the largest error of a row, and a unit in the last place; sums of two, each rounded,
    have that of the row's largest number."""
    bounds = {}
    for name in want.head.leaves:
        field, dtype = f"d_{name}", getattr(case, name).dtype
        grad = getattr(want, field)
        each = spread(grad, [getattr(x, field) for x in moved])
        size, untouched = grad.abs(), (each == 0) & (grad == 0)
        rows = grad.dim() > 1 and grad.numel()
        each, most = (x.amax(-1, keepdim=True) if rows else x for x in (each, size))
        kind = torch.finfo(dtype)
        rounded_once = case.kept_ids is None and case.lora_a is None
        last = (size if rounded_once else most).clamp(min=kind.smallest_normal) * kind.eps
        bound = 1.5 * each + last + 4 * eps_of(case) * torch.where(most < OVERFLOW, most, 0.0)
        beyond = (grad.abs() > 0.99 * kind.max) | (each > OVERFLOW)
        bound = torch.where(beyond, math.inf, bound)
        bounds[field] = torch.where(untouched, 0.0, bound)
    return bounds


@dataclass
class Bounds:
    """Largest allowed |got - want|, element by element; inf where float32 cannot hold the
    number."""

    logps: Tensor  # (B, T)
    entropies: Tensor  # (B, T)
    loss: float
    grads: dict[str, Tensor]  # d_hidden and so on
    metrics: dict[str, Tensor]
    ambiguous: bool  # a discrete choice could fall either way
    overflow: bool  # float32 overflows: the loss may be infinite, of the right sign


def is_ambiguous(
    case: Case, want: ReferenceResult, e_entropy: Tensor, moved: list[ReferenceResult]
) -> bool:
    """True if a token or sequence could fall on either side of the top-entropy or off-policy
    threshold."""
    o, keeps = settings(case), want.evaluation.keeps
    if any(
        not torch.equal(*pair)
        for x in moved
        for pair in zip(keeps, x.evaluation.keeps, strict=True)
    ):
        return True
    pool = want.head.entropies.detach().sort().values
    if o.top_entropy_quantile >= 1.0 or len(pool) < 2:
        return False
    position = (1 - o.top_entropy_quantile) * (len(pool) - 1)
    below, above = pool[math.floor(position)], pool[math.ceil(position)]
    threshold = below + (above - below) * (position - math.floor(position))
    error = 2 * e_entropy.max()
    near = threshold - below < error or above - threshold < error
    return bool(abs(position - round(position)) < 1e-3 or near)


def loss_bound(case: Case, want: ReferenceResult, moved: list[ReferenceResult]) -> float:
    """Sum of what each token's share of the loss may be off by, and of the sum's own rounding."""
    parts, term = want.evaluation.parts, term_of(case)
    moved_parts = {k: [x.evaluation.parts[k] for x in moved] for k in parts}
    each = [spread(x, moved_parts[k]) + term * x.detach().abs() for k, x in parts.items()]
    return float(sum(x.sum() for x in each))


def metric_bounds(
    case: Case, want: ReferenceResult, moved: list[ReferenceResult]
) -> dict[str, Tensor]:
    """A mean may be off by the mean of what its values may be off by."""
    bounds, means = {}, want.evaluation.means
    for name, x in want.metrics.items():
        error = spread(x, [y.metrics[name] for y in moved]) + 2 * term_of(case) * x.abs()
        if name in means:
            values, counts = means[name]
            each = spread(values, [y.evaluation.means[name][0] for y in moved])
            each = pick(*torch.broadcast_tensors(each, counts))
            error = error + each.sum() / counts.sum().clamp(min=1)
        bounds[name] = torch.where(x.abs() > OVERFLOW, math.inf, error)
    bounds["policy_loss"] += loss_bound(case, want, moved)
    return bounds


def bounds_of(want: ReferenceResult, case: Case) -> Bounds:
    moved = [reference_loss(*pair) for pair in rounded(case, want.head)]
    e, e_entropy = (score_bound(case, name, want, moved) for name in SCORES[:2])
    return Bounds(
        e, e_entropy, loss_bound(case, want, moved), grad_bounds(case, want, moved),
        metric_bounds(case, want, moved),
        is_ambiguous(case, want, e_entropy, moved), bool(want.evaluation.overflow.any()),
    )  # fmt: skip


def compare(name: str, got: Tensor, want: Tensor, bound: Tensor | float, case: Case) -> None:
    """Raise with the worst element, unless every |got - want| is within its bound and NaN meets
    NaN."""
    assert got.shape == want.shape, (
        f"{case.name}: {name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    )
    got = got.detach().double()
    bound = torch.as_tensor(bound, dtype=torch.float64).expand_as(want)
    # where exactly 0 is asked for, exactly 0
    bound = torch.where(
        bound > 0, bound + 100 * torch.finfo(computed_in(case)).smallest_normal, bound
    )
    error = (got - want).abs()
    ratio = torch.nan_to_num(error / bound, nan=math.inf, posinf=math.inf)
    excess = torch.where(error <= bound, 0.0, ratio)
    excess = torch.where((got == want) | bound.isposinf(), 0.0, excess)
    excess = torch.where(want.isnan(), torch.where(got.isnan(), 0.0, math.inf), excess)
    if excess.numel() == 0 or not bool((excess > 0).any()):
        return
    where = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    index = f"[{', '.join(map(str, where))}]" if where else ""
    raise AssertionError(
        f"{case.name}: {name}{index}: got {got[where]:.9g}, want {want[where]:.9g}, "
        f"error {error[where]:.3g}, allowed {bound[where]:.3g} "
        f"({int((excess > 0).sum())} of {excess.numel()} elements are off)"
    )


def assert_matches(
    output: Any,
    grads: Mapping[str, Tensor | None] | None,
    reference: ReferenceResult,
    case: Case,
    bounds: Bounds | None = None,
    scale: float = 1.0,
) -> None:
    """`output` (loss, logps, entropies, metrics) and `grads` (hidden, weight, bias)
    against the reference.

    `grads=None` compares the forward alone; `scale` is the upstream gradient that `grads` were
    taken under.
    """
    limits = bounds_of(reference, case) if bounds is None else bounds
    compare("logps", output.logps, reference.logps, limits.logps, case)
    compare("entropies", output.entropies, reference.entropies, limits.entropies, case)
    for name in ("loss", "logps", "entropies"):
        dtype = getattr(output, name).dtype
        assert dtype == computed_in(case), f"{case.name}: {name}: dtype {dtype}"
    if limits.ambiguous:
        return
    if limits.overflow:
        loss = float(output.loss.detach()) * math.copysign(1.0, reference.loss)
        assert loss > 1e33, f"{case.name}: loss {output.loss}, want an overflow"
    else:
        compare("loss", output.loss, reference.loss, limits.loss, case)
    for name in reference.metrics.keys() & output.metrics.keys():
        both = output.metrics[name], reference.metrics[name]
        compare(f"metrics[{name}]", *both, limits.metrics[name], case)
    if grads is not None:
        compare_grads(grads, reference, case, limits.grads, scale)


def compare_grads(
    grads: Mapping[str, Tensor | None],
    reference: ScoresResult,
    case: Case,
    limits: Mapping[str, Any],
    scale: float,
) -> None:
    """A frozen tensor has no gradient; every other one has one, in its own dtype and within its
    bounds."""
    for name in LEAVES:
        tensor, got = getattr(case, name), grads.get(name)
        if tensor is None or name in case.frozen:
            assert got is None, f"{case.name}: d_{name}: a gradient for a tensor that asks for none"
            continue
        assert got is not None, f"{case.name}: d_{name}: no gradient"
        assert got.dtype == tensor.dtype, (
            f"{case.name}: d_{name}: dtype {got.dtype}, expected {tensor.dtype}"
        )
        want, bound = getattr(reference, f"d_{name}"), limits[f"d_{name}"]
        compare(f"d_{name}", got, scale * want, abs(scale) * bound, case)


def assert_scores(
    case: Case, up: dict[str, Tensor], results: dict[str, Tensor], grads: dict[str, Tensor | None],
    engine: str = "auto",
) -> None:  # fmt: skip
    """Scores by name and gradients under `up` of an engine against the reference; a masked position
    has exactly 0."""
    want = reference_scores(case, up)
    moved = [reference_scores(at, up, does) for at, does in rounded(case, want.head)]
    expected = {"divergences"} if case.listed_ids is not None else {*SCORES[: 2 + case.diverges]}
    assert results.keys() == expected, f"{case.name}: results {[*results]}"
    for name, x in results.items():
        assert x.dtype == computed_in(case), f"{case.name}: {name}: dtype {x.dtype}"
        compare(name, x, getattr(want, name), score_bound(case, name, want, moved), case)
    o, bounds = settings(case), grad_bounds(case, want, moved)
    if case.diverges and engine in ("auto", "one_pass") and (o.arrives != "same" or o.more):
        # What was stored for an expectation that did not come true is taken off again.
        c = up["divergences"][want.head.counted].abs()
        none = torch.zeros_like(up["divergences"])
        stored = dict.fromkeys(SCORES, none)
        stored["divergences"] = none + (2 * c.max() if c.numel() else 0.0)
        want_stored = reference_scores(case, stored)
        moved = [reference_scores(at, stored, does) for at, does in rounded(case, want.head)]
        more = grad_bounds(case, want_stored, moved)
        bounds = {name: bound + more[name] for name, bound in bounds.items()}
    compare_grads(grads, want, case, bounds, 1.0)
