"""How far a result may lie from the float64 reference, per element and dtype.

- logp: e = 2 * 2^-22 * max_v(sum |h| |w| + |bias|) * scale / T + 2e-5 (float64: 2^-51 and 1e-11).
  The entropy's bound follows from it to first order.
- loss, d loss / d logp, d loss / d entropy: the reference evaluated again at logps and entropies
  moved by their bounds, plus 16 float32 roundings of the terms in their sums.
- gradients: to first order from those, plus one rounding of d logits in the input's dtype if that
  has 16 bits, the rounding of a float32-accumulated product, and one ulp of the output's dtype.
- a divergence: to first order from the errors of both heads' logits, plus their square.

Where a discrete choice (top-entropy or off-policy mask) lies within the bounds, only logps and
entropies are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.case_builder import PER_TOKEN, Case
from tests.support.reference import (
    LEAVES,
    OVERFLOW,
    SCORES,
    Evaluation,
    Head,
    ReferenceResult,
    ScoresResult,
    divergence,
    divergences_of,
    evaluate,
    head,
    on_grid,
    pick,
    settings,
    teacher_case,
    teacher_log_probs,
)


@dataclass(frozen=True)
class Unit:
    """Relative roundings of the dtype that is computed in."""

    product: float  # of a sum of products, relative to the sum of their absolute values
    extra: float  # absolute, of a logp
    extra_of_few: float  # the same of a kept set or a teacher's list
    term: float  # of a per-token term: some 16 elementary roundings
    one: float  # of one operation
    floor: float  # absolute, of anything: below it numbers lose bits to underflow


UNITS = {
    torch.float32: Unit(
        product=2.0**-22, extra=2e-5, extra_of_few=2e-6, term=2.0**-20, one=2.0**-23, floor=1e-36
    ),
    torch.float64: Unit(
        product=2.0**-51, extra=1e-11, extra_of_few=1e-13, term=2.0**-48, one=2.0**-52, floor=1e-300
    ),
}


def computed_in(case: Case) -> torch.dtype:
    """float64 inputs are computed in float64, all others in float32."""
    wide = torch.float64 in (case.hidden.dtype, case.weight.dtype)
    return torch.float64 if wide else torch.float32


def compute_unit(case: Case) -> Unit:
    """The roundings of the dtype the case is computed in; of a few ids logps are all but exact."""
    unit = UNITS[computed_in(case)]
    of_few = case.kept_ids is not None or case.listed_ids is not None
    return replace(unit, extra=unit.extra_of_few) if of_few else unit


def score_bounds(case: Case, want: ScoresResult) -> tuple[Tensor, Tensor]:
    """(n,) bounds of logps and of entropies at the counted positions."""
    h = want.head
    e = logit_error(case, h)
    logs = h.wide_log_probs.detach()
    away = logs.masked_fill(logs.isinf(), 0.0) + h.entropies.detach()[:, None]
    return e, e * (1 + (logs.exp() * away.abs()).sum(-1))


def logit_error(case: Case, h: Head) -> Tensor:
    """(n,) bound of the logits of the counted positions, and of their normalizer."""
    o, unit = settings(case), compute_unit(case)
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
    error = (2 * unit.product * size + rounding) * abs(o.logit_scale) / h.temperature
    nowhere = h.wide_log_probs.isinf() & h.log_probs.isinf()
    return error.masked_fill(nowhere, 0.0).amax(-1) + unit.extra


def between_products(case: Case) -> float:
    """Half a unit in the last place of what lies between an adapter's two products, if that has 16
    bits."""
    if case.lora_a is None:
        return 0.0
    seen = case.hidden if case.lora_input is None else case.lora_input
    kinds = [torch.finfo(x.dtype) for x in (seen, case.lora_a)]
    return 0.0 if any(kind.bits > 16 for kind in kinds) else max(kind.eps / 2 for kind in kinds)


def spread(at_want: Tensor, at_moved: list[Tensor]) -> Tensor:
    """Largest distance of the moved values from the value itself, element by element."""
    return torch.stack([(x - at_want).abs() for x in at_moved]).amax(0).detach()


@dataclass(frozen=True)
class Diverging:
    """What another head's distributions add, by row of the counted positions."""

    value: Tensor  # (n,) bound of the divergence
    slope: Tensor  # (n, V) d divergence / d z
    slope_bound: Tensor  # (n, V)


def divergence_bounds(case: Case, h: Head, e: Tensor) -> Diverging:
    """What a divergence and its gradient may be off by, if the logits are by e (n,) and the
    teacher's by as much.

    d D / d z_j = p_j (s_j - mean s) of the derivative s in p: log(p / q), or 1 - q / p, or (1 -
    beta) log(p / m). None moves by more than the two logits and their normalizers do.
    """
    o, unit = settings(case), compute_unit(case)
    if case.listed_ids is not None:
        return listed_bounds(case, h, e)
    log_p, log_q = h.log_probs.detach(), teacher_log_probs(case)
    z, y = log_p.clone().requires_grad_(), log_q.clone().requires_grad_()
    value = divergence(o.beta_of_divergence, z.log_softmax(-1), y.log_softmax(-1))
    slopes_z, slopes_y = torch.autograd.grad(value.sum(), (z, y))
    p, q = log_p.exp(), log_q.exp()
    other = teacher_case(case)
    e_y = logit_error(other, head(other))
    both = (e + e_y)[:, None]
    size = slopes_z.abs() * e[:, None] + slopes_y.abs() * e_y[:, None]
    error = size.nan_to_num(0.0).sum(-1) + 4 * both[:, 0] ** 2
    error = error + 4 * unit.term * value.detach().abs()
    spread_of = {0.0: p + q, 1.0: p}.get(o.beta_of_divergence, p)
    bound = 4 * both * spread_of + 2 * both * slopes_z.abs() + p * error[:, None]
    bound = bound + unit.term * (slopes_z.abs() + p * (1 + value.detach()[:, None]))
    return Diverging(error, slopes_z, bound)


def listed_bounds(case: Case, h: Head, e: Tensor) -> Diverging:
    """How far a divergence from a list and its slopes move, if each logit moves by e (n,) in any
    direction."""
    unit, log_p = compute_unit(case), h.log_probs.detach()

    def at(moved_by: Tensor | float) -> tuple[Tensor, Tensor]:
        z = (log_p + moved_by).requires_grad_()
        value = divergences_of(case, z.log_softmax(-1))
        return value.detach(), torch.autograd.grad(value.sum(), z)[0]

    value, slope = at(0.0)
    g = torch.Generator().manual_seed(7)
    signs = torch.randn(4, *log_p.shape, generator=g, dtype=log_p.dtype).sign()
    signs = (1.0, slope.sign(), -slope.sign(), *signs)
    values, slopes = zip(*(at(e[:, None] * sign) for sign in signs), strict=True)
    error = spread(value, list(values)) + unit.extra + unit.term * value.abs()
    sizes = slope.abs() + log_p.exp() * (1 + value.abs()[:, None])
    bound = 2 * spread(slope, list(slopes)) + (2 * unit.extra + unit.term) * sizes
    return Diverging(error, slope, bound)


def logit_bounds(
    case: Case, want: ScoresResult, e: Tensor, e_entropy: Tensor, d_a: Tensor, d_b: Tensor,
    a_size: Tensor, diverging: Diverging | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(n, V): the gradient of the products' result (before bias, scale and soft-cap), and its
    bound.

    d z_j = a (1[j = y] - p_j) - b p_j (log p_j + entropy) + c d D / d z_j, times scale / T and the
    soft-cap's slope. With a kept set the entropy's p may be that of the whole vocabulary.
    """
    o, unit, h = settings(case), compute_unit(case), want.head
    rows = lambda x: x[h.counted][:, None]  # noqa: E731
    a, b, d_a, d_b, a_size = map(rows, (want.d_logps, want.d_entropies, d_a, d_b, a_size))
    e, e_entropy = e[:, None], e_entropy[:, None]
    logs, p = h.wide_log_probs.detach(), h.log_probs.detach().exp()
    hot = torch.nn.functional.one_hot(h.ids, logs.shape[1])
    wide = logs.exp()
    away = (logs.masked_fill(logs.isinf(), 0.0) + h.entropies.detach()[:, None]) * (wide > 0)
    parts = a * (hot - p), -b * wide * away
    dz = parts[0] + parts[1]
    bound = (d_a + unit.term * a_size) * (hot - p).abs() + a.abs() * p * e
    bound = bound + (d_b + unit.term * b.abs()) * wide * away.abs()
    bound = bound + b.abs() * wide * (away.abs() * e + e + e_entropy)
    least = torch.finfo(computed_in(case)).smallest_normal  # a probability below it may count as 0
    bound = bound + least * (a.abs() + b.abs() * away.abs())
    if case.kept_ids is not None:  # outside of its set nothing is computed
        bound = bound.masked_fill(logs.isinf(), 0.0)
    if diverging is not None and want.d_divergences is not None:
        c = rows(want.d_divergences)
        dz = dz + torch.where(c == 0, 0.0, c * diverging.slope)
        lost = least * (diverging.slope / p).nan_to_num(0.0, 0.0, 0.0).abs()
        slope_bound = diverging.slope_bound + unit.term * diverging.slope.abs() + lost
        bound = bound + torch.where(c == 0, 0.0, c.abs() * slope_bound)
    chain = torch.ones_like(dz) * o.logit_scale / h.temperature
    slack = torch.zeros_like(dz)
    cap = o.final_logit_softcapping
    if cap is not None:
        tanh = torch.tanh(h.raw.detach() / cap)
        inner = 2 * tanh.abs() * (1 - tanh**2) * e * h.temperature / cap + 4 * unit.one
        slack, chain = chain.abs() * inner, chain * (1 - tanh**2)
    d_raw = dz * chain
    bound = bound * chain.abs() + dz.abs() * slack
    if case.hidden.dtype.itemsize == 2:
        kind = torch.finfo(case.hidden.dtype)
        rounded = d_raw.abs()
        if case.kept_ids is not None:  # a set's gradient is rounded, and the vocabulary's
            rounded = (parts[0].abs() + parts[1].abs()) * chain.abs()
        bound = bound + kind.eps / 2 * rounded + kind.smallest_normal * kind.eps
    return d_raw, bound


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """One unit in the last place of `dtype` at `x`; inf where `dtype` overflows."""
    kind = torch.finfo(dtype)
    step = x.abs().clamp(min=kind.smallest_normal) * kind.eps
    return torch.where(x.abs() > 0.99 * kind.max, math.inf, step)


def head_bounds(
    case: Case, want: ScoresResult, d_raw: Tensor, d_raw_bound: Tensor
) -> dict[str, Tensor | None]:
    """Bounds of the leaves' gradients by name, from the gradient of the products' result and its
    bound (n, V)."""
    unit, h, scaling = compute_unit(case), want.head, settings(case).lora_scaling
    of = {name: x.detach().abs() for name, x in h.leaves.items()}
    seen, rounding = of.get("lora_input", of["hidden"]), between_products(case)

    def products(x: Tensor) -> dict[str, Tensor]:
        """What the leaves' gradients are of d raw = `x` (n, V), all of one sign."""
        found = {"hidden": x @ of["weight"], "weight": x.T @ of["hidden"], "bias": x.sum(0)}
        if "lora_a" in of:
            b, u = scaling * of["lora_b"], scaling * seen @ of["lora_a"].T
            d_u = x @ b + 2 * rounding * (d_raw.abs() @ b)
            found |= {"lora_a": d_u.T @ seen, "lora_b": x.T @ u + 2 * rounding * d_raw.abs().T @ u}
            found["lora_input"] = d_u @ of["lora_a"]
            found["hidden"] = found["hidden"] + (0.0 if "lora_input" in of else found["lora_input"])
        return found

    bounds, sizes = products(d_raw_bound + 2 * unit.product * d_raw.abs()), products(d_raw.abs())
    limits: dict[str, Tensor | None] = {"d_bias": None}
    for name in h.leaves:
        limit = torch.nan_to_num(bounds[name], nan=math.inf, posinf=math.inf)  # of inf * 0
        grad, dtype = getattr(want, f"d_{name}"), getattr(case, name).dtype
        last, by_position = ulp(grad, dtype), name in ("hidden", "lora_input")
        if by_position:
            limit, last = on_grid(limit, h.counted), pick(last, h.counted[..., None])
        if dtype.itemsize == 2 and in_two_parts(case, name):
            last = ulp(on_grid(sizes[name], h.counted) if by_position else sizes[name], dtype)
        limits[f"d_{name}"] = limit + last
    return limits


def in_two_parts(case: Case, name: str) -> bool:
    """Whether the gradient is a sum of two, each rounded: of sets and of the vocabulary, or through
    an adapter, too."""
    o = settings(case)
    through_both = name == "hidden" and case.lora_a is not None and case.lora_input is None
    of_all = o.on_missing_set == "full" or o.entropy_of != "the set"
    return through_both or (case.kept_ids is not None and of_all)


@dataclass
class Bounds:
    """Largest allowed |got - want|, element by element; inf where float32 cannot hold the
    number."""

    logps: Tensor  # (B, T)
    entropies: Tensor  # (B, T)
    loss: float
    d_hidden: Tensor  # (B, T, H)
    d_weight: Tensor  # (V, H)
    d_bias: Tensor | None  # (V,)
    metrics: dict[str, float]
    ambiguous: bool  # a discrete choice could fall either way
    overflow: bool  # float32 overflows: the loss may be infinite, of the right sign
    d_lora_a: Tensor | None = None  # (r, H)
    d_lora_b: Tensor | None = None  # (V, r)
    d_lora_input: Tensor | None = None  # (B, T, H)


def slopes(
    case: Case, logps: Tensor, entropies: Tensor, divergences: Tensor | None = None
) -> tuple[Evaluation, Tensor, Tensor]:
    """The reference's loss at `logps`, `entropies` (B, T), d loss / d logps and d loss / d
    entropies."""
    leaves = [x.detach().requires_grad_() for x in (logps, entropies)]
    at = evaluate(case, *leaves, divergences)
    found: tuple[Tensor | None, ...] = (None, None)
    if at.loss.requires_grad:
        found = torch.autograd.grad(at.loss, leaves, allow_unused=True, retain_graph=True)
    a, b = (torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True))
    return at, a, b


def moved(
    case: Case, want: ReferenceResult, e: Tensor, e_entropy: Tensor, e_divergence: Tensor | float
) -> list[tuple[Evaluation, Tensor, Tensor]]:
    """The reference at logps, entropies and divergences that are off by their bounds, in four
    patterns of signs."""
    counted, unit, g = want.head.counted, compute_unit(case), torch.Generator().manual_seed(7)
    # The inputs next to a logp are rounded when they are subtracted from it.
    for x in (getattr(case, name) for name in PER_TOKEN if getattr(case, name) is not None):
        x = pick(x.double(), counted).nan_to_num(0.0, 0.0, 0.0).abs()
        e = e + unit.one * x.clamp(max=1e6)
    flip = 1.0 - 2.0 * torch.randint(2, counted.shape, generator=g)

    def at(sign: Tensor | float) -> tuple[Evaluation, Tensor, Tensor]:
        divergences = None if want.divergences is None else want.divergences + sign * e_divergence
        return slopes(case, want.logps + sign * e, want.entropies + sign * e_entropy, divergences)

    return [at(sign) for sign in (1.0, -1.0, flip, -flip)]


def slope_sizes(case: Case, at: Evaluation, a: Tensor) -> Tensor:
    """(B, T): sum of the absolute values of the terms that d loss / d logp is summed from."""
    o, counted = settings(case), case.completion_mask != 0
    size = a.abs() + at.kl_slope_size
    of_ratios = at.log_ratios.requires_grad and at.policy.requires_grad
    if not of_ratios or o.importance_sampling_level != "sequence":
        return size
    (g,) = torch.autograd.grad(at.policy, at.log_ratios, allow_unused=True, retain_graph=True)
    if g is None:
        return size
    mean = g.abs().sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)
    return size + pick(mean, counted)


def is_ambiguous(
    case: Case, want: ReferenceResult, e_entropy: Tensor, others: list[Evaluation]
) -> bool:
    """Whether a token or sequence could fall on either side of the top-entropy or off-policy
    threshold."""
    o = settings(case)
    pairs = [zip(want.evaluation.keeps, x.keeps, strict=True) for x in others]
    if any(not torch.equal(k, x) for pair in pairs for k, x in pair):
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


def metric_bounds(case: Case, want: ReferenceResult, others: list[Evaluation]) -> dict[str, float]:
    """A mean may be off by the mean of what its values may be off by."""
    unit, at = compute_unit(case), want.evaluation
    bounds = {}
    for name, (values, counts) in at.means.items():
        error = spread(values, [x.means[name][0] for x in others]) + 2 * unit.term * values.abs()
        if name == "kl":
            error = error + 2 * unit.term * at.kl_size
        error, counts = torch.broadcast_tensors(error, counts)
        bounds[name] = float(pick(error, counts).sum() / counts.sum().clamp(min=1))
        if (pick(values.abs().expand_as(counts), counts) > OVERFLOW).any():
            bounds[name] = math.inf
    for name, value in at.extremes.items():
        bounds[name] = float(spread(value, [x.extremes[name] for x in others])) + 2 * unit.term
    bounds["policy_loss"] = bounds["policy_loss"] + loss_bound(want, others, unit)
    return bounds


def loss_bound(want: ReferenceResult, others: list[Evaluation], unit: Unit) -> float:
    """Sum of what each token's share of the loss may be off by, and of the sum's own rounding."""
    at = want.evaluation
    each = [spread(x, [y.parts[k] for y in others]).sum() for k, x in at.parts.items()]
    return float(sum(each) + unit.term * sum(x.sum() for x in at.sizes.values()))


def bounds_of(want: ReferenceResult, case: Case) -> Bounds:
    unit, h = compute_unit(case), want.head
    e, e_entropy = score_bounds(case, want)
    e_grid, entropy_grid = on_grid(e, h.counted), on_grid(e_entropy, h.counted)
    diverging = None if want.divergences is None else divergence_bounds(case, h, e)
    e_divergence = 0.0 if diverging is None else on_grid(diverging.value, h.counted)
    others = moved(case, want, e_grid, entropy_grid, e_divergence)
    at = [x for x, _, _ in others]
    d_a = spread(want.d_logps, [a for _, a, _ in others])
    d_b = spread(want.d_entropies, [b for _, _, b in others])
    lost = want.evaluation.overflow & h.counted
    d_a = torch.where(lost, math.inf, d_a)
    sizes = slope_sizes(case, want.evaluation, want.d_logps)
    d_raw, d_raw_bound = logit_bounds(case, want, e, e_entropy, d_a, d_b, sizes, diverging)
    d_raw_bound = torch.where(lost[h.counted][:, None], math.inf, d_raw_bound)
    return Bounds(
        e_grid, entropy_grid, loss_bound(want, at, unit),
        **head_bounds(case, want, d_raw, d_raw_bound),
        metrics=metric_bounds(case, want, at), ambiguous=is_ambiguous(case, want, e_entropy, at),
        overflow=bool(lost.any()),
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
    bound = torch.where(bound > 0, bound + compute_unit(case).floor, bound)
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
        compare_grads(grads, reference, case, vars(limits), scale)


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
    case: Case, want: ScoresResult, results: dict[str, Tensor], grads: dict[str, Tensor | None],
    engine: str = "auto",
) -> None:  # fmt: skip
    """Scores by name and gradients of an engine against the reference; a masked position has
    exactly 0."""
    e, e_entropy = score_bounds(case, want)
    diverging = divergence_bounds(case, want.head, e) if case.diverges else None
    limits = {"logps": e, "entropies": e_entropy, "divergences": diverging and diverging.value}
    expected = {"divergences"} if case.listed_ids is not None else {*SCORES[: 2 + case.diverges]}
    assert results.keys() == expected, f"{case.name}: results {[*results]}"
    for name, x in results.items():
        assert x.dtype == computed_in(case), f"{case.name}: {name}: dtype {x.dtype}"
        compare(name, x, getattr(want, name), on_grid(limits[name], want.head.counted), case)
    d_raw, bound = raw_bounds(case, want, (e, e_entropy), diverging, engine)
    compare_grads(grads, want, case, head_bounds(case, want, d_raw, bound), 1.0)


def raw_bounds(
    case: Case,
    want: ScoresResult,
    errors: tuple[Tensor, Tensor],
    diverging: Diverging | None,
    engine: str,
) -> tuple[Tensor, Tensor]:
    """What was stored for an expectation that did not come true is taken off again: it counts with
    its size."""
    zeros, o = torch.zeros_like(want.d_logps), settings(case)
    d_raw, bound = logit_bounds(case, want, *errors, zeros, zeros, want.d_logps.abs(), diverging)
    as_expected = o.arrives == "same" and not o.more
    if diverging is None or engine not in ("auto", "one_pass") or as_expected:
        return d_raw, bound
    # What is stored is the divergences' alone, so that it cancels nothing of the others.
    largest = want.d_divergences.abs().max() if want.d_divergences.numel() else 0.0
    slopes = torch.full_like(want.d_divergences, 2.0) * largest
    stored = replace(want, d_logps=zeros, d_entropies=zeros, d_divergences=slopes)
    more, more_bound = logit_bounds(case, stored, *errors, zeros, zeros, zeros, diverging)
    return d_raw.abs() + more.abs(), bound + more_bound
