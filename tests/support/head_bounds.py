"""Error bounds of a head's scores and of its gradients, by the rules at the head of `tolerance`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.support.case_builder import Case
from tests.support.reference import ScoresResult
from tests.support.reference_head import (
    Head,
    divergences_of,
    head,
    on_grid,
    teacher_case,
    teacher_log_probs,
)
from tests.support.reference_terms import divergence, pick, settings


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
        assert value is not None
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
    dz = a * (hot - p) - b * wide * away
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
        bound = bound + kind.eps / 2 * d_raw.abs() + kind.smallest_normal * kind.eps
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
