"""The C++ ops refuse arguments that would have them read or write elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.cpp_rows import CppRows
from grpo_kernels.backends.interface import (
    Chunk,
    Coefficients,
    DivergenceStats,
    LogitTransform,
    ReferenceLogits,
)
from tests.support.row_cases import PLAIN, full_loss, make_loss, rows

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("cpp_library")]

N, V = 4, 33
CPP = CppRows()
RAW, IDS = rows(N, V, "cpu")
TURNED, SHORT = RAW.T.contiguous().T, torch.zeros(V - 1)
STATS: list[tuple[str, dict[str, Any]]] = [
    (r"ids: expected contiguous \(4,\)", {"ids": IDS[:-1]}),
    ("ids: expected contiguous", {"ids": IDS.repeat_interleave(2)[::2]}),
    (r"expected scalar type \S*Long", {"ids": IDS.int()}),
    ("expected float32, float64, bfloat16 or float16", {"logits": IDS[:, None].repeat(1, V)}),
    ("logits: expected contiguous rows", {"logits": TURNED}),
    (r"bias: expected contiguous \(33,\)", {"bias": SHORT}),
    (r"expected scalar type \S*Float", {"bias": torch.zeros(V).double()}),
    ("inv_temperatures: expected", {"inv_temperature": torch.ones(N + 1, 1)}),
    ("rounded_to: expected a dtype of 16 bits", {"rounded_to": torch.float32}),
]
REFERENCES: list[tuple[str, dict[str, Any]]] = [
    (r"reference_logits: expected \(4, 33\)", {"logits": RAW[:, :-1]}),
    ("reference_logits: expected contiguous rows", {"logits": TURNED}),
    ("reference_logits: float64 goes with float64 alone", {"logits": RAW.double()}),
    ("reference_bias: expected", {"bias": SHORT}),
    ("reference_inv_temperatures: expected", {"inv_temperature": torch.ones(N + 1, 1)}),
    (r"jsd_beta: expected a number in \[0, 1\], got nan", {"beta": float("nan")}),
]


@pytest.mark.parametrize(("message", "given"), STATS, ids=[x[0][:20] for x in STATS])
def test_rows_are_refused(message: str, given: dict[str, Any]) -> None:
    logits, ids, *_ = ({"logits": RAW, "ids": IDS} | given).values()
    transform = {name: x for name, x in given.items() if name not in ("logits", "ids")}
    with pytest.raises(RuntimeError, match=message):
        CPP.stats(Chunk(logits, ids, LogitTransform(**transform)), entropy=False)


def chunk_of(logits: Tensor = RAW, beta: float = 0.5, **transform: Any) -> Chunk:
    return Chunk(
        RAW, IDS, PLAIN, reference=ReferenceLogits(logits, LogitTransform(**transform), beta)
    )


@pytest.mark.parametrize(("message", "given"), REFERENCES, ids=[x[0][10:30] for x in REFERENCES])
def test_references_are_refused(message: str, given: dict[str, Any]) -> None:
    stats = CPP.stats(Chunk(RAW, IDS, PLAIN), entropy=False)
    with pytest.raises(RuntimeError, match=message):
        CPP.diverge(chunk_of(**given), stats, stats)


def test_gradients_and_losses_are_refused() -> None:
    plain, two, out = Chunk(RAW, IDS, PLAIN), chunk_of(RAW.flip(0)), torch.empty_like(RAW)
    stats = CPP.stats(plain, entropy=False)
    a, found = stats.logps, CPP.diverge(two, stats, stats)
    full = replace(stats, divergence=DivergenceStats(*found, stats.max_logit, stats.log_sum))
    wrong = torch.empty(N, V + 1), torch.empty(N, V, dtype=torch.float64), torch.empty(V, N).T
    for message, call in (
        *(("out: ", lambda x=x: CPP.grad(plain, stats, Coefficients(a), x)) for x in wrong),
        ("entropies: expected with d_en", lambda: CPP.grad(plain, stats, Coefficients(a, a), out)),
        ("d_logp: expected", lambda: CPP.grad(plain, stats, Coefficients(a[:2]), out)),
        ("reference_logits: expected", lambda: CPP.diverge(plain, full, full)),
        ("d_divergence, sum_k, .*: e", lambda: CPP.grad(two, stats, Coefficients(a, None, a), out)),
        ("kl: expected", lambda: CPP.fused(plain, full_loss(a, 0), out)),
        ("estimator: expected none with a", lambda: CPP.fused(two, make_loss(a, 1), out)),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            call()
