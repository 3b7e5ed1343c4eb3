"""`linear_divergence` against the float64 reference: a case with another head, and what arrives at its results."""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch
from torch import Tensor

from grpo_kernels import Scores, linear_divergence
from tests.support.case_builder import Case, make_case, seeded
from tests.support.flat import flat
from tests.support.random_cases import head_options, teacher_options, with_garbage
from tests.support.reference import head, on_grid, teacher_log_probs
from tests.support.reference_terms import divergence, pick, settings
from tests.support.run_case import constants_of, reference_of
from tests.support.tolerance import compare, divergence_bounds, head_bounds, logit_bounds, score_bounds

KINDS = {1.0: {"divergence": "reverse_kl"}, 0.0: {"divergence": "forward_kl"}}
UPSTREAM = ("divergence", "entropies", "logps")


def divergence_case(name: str, *, beta: float = 1.0, arrives: str = "same", more: bool = False, **options) -> Case:
    """A case whose config says which divergence, and what arrives: the same for all, "any", "some" or "none" of it.

    With `more` something arrives at the entropies and log-probabilities, too.
    """
    others = {"beta_of_divergence": beta, "arrives": arrives, "more": more, **options.pop("others", {})}
    return make_case(name, others=others, **{"teacher": 0.3, "old": False} | options)


def random_divergence_case(seed: int) -> Case:
    """Any head, teacher and divergence, often with garbage where masked."""
    draw = random.Random(f"divergence {seed}")
    shape = {"b": draw.choice((1, 2, 3, 6)), "t": draw.choice((1, 2, 5, 11)), "h": draw.choice((1, 3, 16, 31))}
    vocab = draw.choice((2, 7, 33, 64, 129, 200))
    case = divergence_case(
        f"divergence/{seed}",
        beta=draw.choice((0.0, 1.0, 1.0, 0.5, 0.1, 0.9)),
        arrives=draw.choice(("same", "same", "any", "some", "none")),
        more=draw.random() < 0.3,
        mask=draw.choice(("ragged", "holes", "full", "left", "one", "none")),
        workspace=draw.choice((2**29, 4 * vocab, 50 * vocab)),
        v=vocab,
        **shape,
        **head_options(draw),
        **teacher_options(draw),
    )
    return with_garbage(case, draw) if draw.random() < 0.3 else case


def upstream_of(case: Case) -> dict[str, Tensor]:
    """What arrives at each result, (B, T); 0 where the case says none."""
    g, shape = seeded(f"{case.name} upstream"), case.completion_mask.shape
    arrives, kind = case.others["arrives"], torch.float64 if case.hidden.dtype == torch.float64 else torch.float32
    any_of = lambda: torch.randn(shape, generator=g).to(kind)  # noqa: E731
    nothing = torch.zeros(shape, dtype=kind)
    c = {
        "same": torch.full(shape, 0.37, dtype=kind),
        "any": any_of(),
        "some": torch.where(torch.rand(shape, generator=g) < 0.5, 0.25, 0.0).to(kind),
        "none": nothing,
    }[arrives]
    more = case.others["more"]
    return {"divergence": c, "entropies": any_of() if more else nothing, "logps": any_of() if more else nothing}


def run_divergence(case: Case, engine: str = "auto", **options) -> tuple[Scores, dict[str, Tensor | None]]:
    """The library's results, and the gradients that `upstream_of` gives."""
    leaf = lambda name: getattr(case, name).detach().requires_grad_(name not in case.frozen)  # noqa: E731
    tensors = {name: None if getattr(case, name) is None else leaf(name) for name in ("hidden", "weight", "bias")}
    beta = case.others["beta_of_divergence"]
    found = flat(linear_divergence)(
        tensors["hidden"],
        tensors["weight"],
        *reference_of(case),
        bias=tensors["bias"],
        mask=case.completion_mask,
        ids=case.completion_ids,
        entropy=True,
        **KINDS.get(beta, {"divergence": "jsd", "beta": beta}),
        temperature=case.config.get("temperature", 1.0),
        **constants_of(case),
        engine=engine,
        workspace_bytes=case.workspace_bytes,
        **options,
    )
    upstream = upstream_of(case)
    sent = [name for name in UPSTREAM if name == "divergence" or case.others["more"]]
    results = [getattr(found, name) for name in sent]
    if any(x.requires_grad for x in results):
        torch.autograd.backward(results, [upstream[name] for name in sent])
    return found, {name: None if x is None else x.grad for name, x in tensors.items()}


def check_divergence(case: Case, engines: tuple[str, ...]) -> None:
    """Results and gradients of every engine that serves the case, within their bounds."""
    h, o = head(case), settings(case)
    value = divergence(o.beta_of_divergence, h.log_probs, teacher_log_probs(case))
    sent = {name: pick(x.double(), h.counted) for name, x in upstream_of(case).items()}
    results = {"divergence": value, "entropies": h.entropies, "logps": h.logps}
    total = sum((sent[name][h.counted] * x).nan_to_num(posinf=0.0).sum() for name, x in results.items())
    leaves = [h.hidden, h.weight, *([] if h.bias is None else [h.bias])]
    d_hidden, d_weight, *d_bias = torch.autograd.grad(total, leaves)
    want = SimpleNamespace(
        head=h, d_logps=sent["logps"], d_entropies=sent["entropies"], d_divergences=sent["divergence"],
        entropies=on_grid(h.entropies.detach(), h.counted), d_hidden=on_grid(d_hidden, h.counted), d_weight=d_weight,
        d_bias=d_bias[0] if d_bias else None,
    )  # fmt: skip
    e, e_entropy = score_bounds(case, want)
    diverging = divergence_bounds(case, h, e)
    limits = {"divergence": diverging.value, "entropies": e_entropy, "logps": e}
    for engine in engines:
        found, grads = run_divergence(case, engine)
        for name, x in results.items():
            wide = case.but(name=f"{case.name}, engine {engine}")
            compare(name, getattr(found, name), on_grid(x.detach(), h.counted), on_grid(limits[name], h.counted), wide)
        check_gradients(case.but(name=f"{case.name}, engine {engine}"), want, grads, diverging, (e, e_entropy), engine)


def check_gradients(case, want, grads, diverging, errors, engine) -> None:
    """What was stored for an expectation that did not come true is taken off again: it counts with its size."""
    zeros = torch.zeros_like(want.d_logps)
    d_raw, bound = logit_bounds(case, want, *errors, zeros, zeros, want.d_logps.abs(), diverging)
    if engine in ("auto", "one_pass"):  # what is stored is the divergences' alone, so that it cancels nothing here
        largest = want.d_divergences.abs().max() if want.d_divergences.numel() else 0.0
        slopes = {"d_divergences": torch.full_like(want.d_divergences, 2.0) * largest}
        stored = SimpleNamespace(**vars(want) | {"d_logps": zeros, "d_entropies": zeros} | slopes)
        more, more_bound = logit_bounds(case, stored, *errors, zeros, zeros, zeros, diverging)
        if case.others["arrives"] != "same" or case.others["more"]:
            d_raw, bound = d_raw.abs() + more.abs(), bound + more_bound
    for name, limit in zip(("hidden", "weight", "bias"), head_bounds(case, want, d_raw, bound), strict=True):
        tensor = getattr(case, name)
        if tensor is None or name in case.frozen:
            assert grads[name] is None
        else:
            assert grads[name] is not None, f"{case.name}: d_{name}: no gradient"
            compare(f"d_{name}", grads[name], getattr(want, f"d_{name}"), limit, case)
