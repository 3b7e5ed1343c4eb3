"""How far a result may lie from the float64 reference, per element and dtype, with no global
relative tolerance.

- logp: e = 2 * 2^-22 * max_v(sum |h| |w| + |bias|) * scale / T + 2e-5 (float64: 2^-51 and 1e-11),
from a product with
  float32 accumulation whose result nobody rounded. The entropy's bound follows from it to first
  order.
- loss, d loss / d logp, d loss / d entropy: the reference evaluated again at logps and entropies
moved by their bounds,
  so that it widens by itself at clip edges and steep ratios; plus 16 float32 roundings of the terms
  in their sums.
- gradients: to first order from those, plus one rounding of d logits in the input's dtype if that
has 16 bits, the
  rounding of a float32-accumulated product, and one ulp of the output's dtype.
- a divergence: to first order from the errors of both heads' logits, plus their square; from a
teacher's list, as far
  as it moves if the logits do.
- an adapter: its rank's products count as the head's; between them is one rounding of the wider
dtype.

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
from tests.support.head_bounds import (
    Diverging,
    Unit,
    compute_unit,
    computed_in,
    divergence_bounds,
    head_bounds,
    logit_bounds,
    score_bounds,
    spread,
)
from tests.support.reference import Evaluation, ReferenceResult, ScoresResult, evaluate
from tests.support.reference_head import LEAVES, SCORES, on_grid
from tests.support.reference_terms import OVERFLOW, pick, settings


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
    """All bounds of one case."""
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
