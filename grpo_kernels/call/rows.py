"""Steps of the calls that score positions, and what a divergence is measured by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import (
    check_choice,
    check_mask,
    check_number,
    check_shape,
    check_signed_ids,
    check_tensor,
)
from grpo_kernels.base.choices import DivergenceName, TopKDivergenceName, choices
from grpo_kernels.batch.tokens import counted_positions
from grpo_kernels.call.expected import Expectation, ExpectedRows, divergence_weights, read_expected
from grpo_kernels.call.plan import Call
from grpo_kernels.call.results import Scores
from grpo_kernels.engine.autograd import LinearLogprob
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.plan import Request
from grpo_kernels.engine.records import Rows
from grpo_kernels.engine.top_k import TopKLogps, TopKTeacher
from grpo_kernels.token_loss.record import Coefficients


def no_ids(hidden: Tensor) -> Tensor:
    """Return zeros (...), one per position of hidden states (..., H), for a call without ids."""
    return hidden.new_zeros((), dtype=torch.long).expand(hidden.shape[:-1])


def read_rows(call: Call, ids: Tensor, mask: Tensor | None, temperature: float | Tensor) -> Rows:
    """Return the rows where the mask counts, with ids not yet checked for range."""
    if mask is not None:
        check_mask("mask", mask, ids)
    positions = counted_positions("mask", mask, ids)
    inverse = _inv_temperature(temperature, ids, positions, call.plan.accumulator)
    return Rows(positions, ids.detach().reshape(-1)[positions].long(), inverse)


def _inv_temperature(
    temperature: float | Tensor, ids: Tensor, positions: Tensor, dtype: torch.dtype
) -> float | Tensor:
    """Return 1 / temperature of the rows: a number, or (n, 1) if it is one per position."""
    if not isinstance(temperature, Tensor):
        check_number("temperature", temperature, 0.0)
        return 1.0 / float(temperature)
    check_tensor("temperature", temperature, like=ids, floating=True)
    check_shape("temperature", temperature, ("that of the ids", tuple(ids.shape)))
    rows = temperature.detach().reshape(-1)[positions].to(dtype)
    bad = ~((rows > 0) & torch.isfinite(rows))
    if rows.device.type == "cpu" and bool(bad.any()):
        got = rows[bad][0].item()
        raise ValueError(
            f"temperature: expected finite numbers > 0 where the mask counts, got {got}"
        )
    return (1.0 / rows)[:, None]


def request_of(
    call: Call, rows: Rows, gradient: ExpectedRows, *, entropy: bool, extras: tuple[str, ...] = ()
) -> Request:
    """Return the request of `rows`, whose ids are checked, with their expected gradient."""
    is_captured = device_of(rows.positions.device).is_capturing()
    gradient = replace(gradient, is_captured=is_captured)
    return call.request(rows, gradient, entropy=entropy, extras=extras)


def scored(call: Call, request: Request, *, has_ids: bool = True) -> Scores:
    """Run one forward, and return its results in the shape of the positions."""
    operands, shape = call.head.operands(request.rows.positions), call.head.hidden.shape[:-1]
    logps, entropies, divergence, *extras = LinearLogprob.apply(
        request, operands.teacher, *operands
    )
    results = {
        "logps": logps if has_ids else None,
        "entropies": entropies,
        "divergence": divergence,
        **dict(zip(request.extras, extras, strict=True)),
    }
    return Scores.of(
        **{name: None if x is None else x.view(*shape, *x.shape[1:]) for name, x in results.items()}
    )


def beta_of(divergence: Any, beta: Any) -> float:
    """Return the divergence as a beta: 0 forward KL, 1 reverse KL (`interface.Teacher`)."""
    check_choice("divergence", divergence, choices(DivergenceName))
    if divergence != "jsd":
        if beta is not None:
            raise ValueError(
                f"beta: expected None with divergence = {divergence!r}, which has none, got "
                f"{beta!r}"
            )
        return 1.0 if divergence == "reverse_kl" else 0.0
    beta = 0.5 if beta is None else beta
    check_number("beta", beta, 0.0, inclusive=True)
    if beta > 1.0:
        raise ValueError(f"beta: expected a number in [0, 1], got {beta!r}")
    return float(beta)


def expected_divergence(
    call: Call, rows: Rows, expected: Any, ids: Tensor | None, *, entropy: bool
) -> ExpectedRows:
    """Read the expected gradient in divergences and log-probabilities, up to one factor.

    From an `Expectation` also that in entropies.
    """
    hidden, dtype = call.head.hidden, call.plan.accumulator
    if isinstance(expected, Expectation):
        of_ids = no_ids(hidden) if ids is None else ids
        return read_expected(
            expected, of_ids, rows.positions, dtype, entropy=entropy, divergence=True
        )
    pair = expected if isinstance(expected, tuple) else (expected,)
    if len(pair) not in ((1,) if ids is None else (1, 2)):
        raise ValueError(
            f"expected: expected a tensor, or with ids two, got a tuple of {len(pair)}"
        )
    weights = [
        divergence_weights(name, x, hidden, rows.positions, dtype)
        for name, x in zip(("expected", "expected[1]"), pair, strict=False)
    ]
    d_logp = weights[1] if len(weights) == 2 else None
    return ExpectedRows.of(Coefficients(d_logp=d_logp, d_divergence=weights[0]))


def measure_of(
    divergence: Any, tail: Any, log_prob_min_clamp: Any, loss_max_clamp: Any, *dtypes: torch.dtype
) -> dict[str, Any]:
    """Return the fields of a `TopKTeacher` that these arguments describe.

    Args:
        dtypes: those of the result and of the teacher's log-probabilities.
    """
    check_choice("divergence", divergence, choices(TopKDivergenceName))
    reverse = divergence == "reverse_kl"
    if tail is not None and not isinstance(tail, bool):
        raise TypeError(f"tail: expected a bool or None, got {tail!r}")
    if reverse and tail is False:
        raise ValueError(
            "tail: expected True or None with divergence = 'reverse_kl', got False: over the "
            "listed ids alone it is least where the student gives them nothing"
        )
    tail = reverse if tail is None else tail
    if log_prob_min_clamp is not None:
        check_number("log_prob_min_clamp", log_prob_min_clamp)
        if tail:
            raise ValueError(
                f"log_prob_min_clamp: expected None with a tail, got {log_prob_min_clamp!r}; it is "
                "of the forward KL over the listed ids alone"
            )
    if loss_max_clamp is not None:
        check_number("loss_max_clamp", loss_max_clamp, 0.0)
    least_rest = max(torch.finfo(dtype).eps for dtype in dtypes) if tail else None
    return {
        "reverse": reverse,
        "least_rest": least_rest,
        "log_prob_min_clamp": log_prob_min_clamp,
        "loss_max_clamp": loss_max_clamp,
    }


def check_listed(name: str, ids: Any, hidden: Tensor, logps: Any = None) -> None:
    """Raise unless ids (..., K), the argument `name`, and log-probabilities, ``*_logps`` of the
    same name, fit hidden states (..., H)."""
    check_signed_ids(name, ids, hidden)
    shape = (*hidden.shape[:-1], max(1, ids.shape[-1] if ids.dim() else 0))
    check_shape(name, ids, ("(*that of hidden without H, K), K > 0", shape))
    if logps is not None:
        of_them = name.replace("_ids", "_logps")
        check_tensor(of_them, logps, like=hidden, floating=True)
        check_shape(of_them, logps, (f"that of {name}", shape))


def with_listed(
    call: Call, teacher_ids: Tensor, teacher_logps: Tensor, measure: dict[str, Any]
) -> Rows:
    """Return the call's rows with the teacher's ids, sorted and counted from this rank's first row.

    Padding and repeated ids get the log-probability -inf.
    """
    rows, start = call.rows, call.ids_here[1]
    ids, outside = _listed(call, "teacher_ids", teacher_ids)
    logps = teacher_logps.detach().flatten(0, -2)[rows.positions].double()
    # padding, which must not be the first of a repeated id
    ids, order, repeats = _sorted(torch.where(logps == -torch.inf, -1, ids))
    padding = repeats | (ids == -1)
    logps = logps.gather(1, order).masked_fill(padding, -torch.inf)
    logps = logps.masked_fill(outside[:, None], torch.nan)
    teacher = TopKTeacher(ids - start, padding, logps, **measure)
    return replace(rows, ids=rows.ids - start, top_k=teacher)


def with_topk(call: Call, rows: Rows, name: str, topk_ids: Tensor) -> tuple[Rows, Tensor]:
    """Return checked `rows` with the ids of argument `name` to score as well; and which of them,
    (n, K) bool, are padding or repeat one before."""
    ids, outside = _listed(call, name, topk_ids)
    start = call.ids_here[1]
    ids, order, repeats = _sorted(torch.cat([ids, (rows.ids[:, None] + start).int()], dim=1))
    columns = torch.arange(ids.shape[1], device=ids.device, dtype=torch.int32)
    first = torch.where(repeats, 0, columns).cummax(dim=1).values  # of equal ids
    place = torch.empty_like(first).scatter_(1, order, first)
    padding = repeats | (ids == -1)
    of_given = torch.empty_like(padding).scatter_(1, order, padding)[:, :-1]
    if ids.device.type != "cpu":
        rows = replace(rows, invalid=outside if rows.invalid is None else rows.invalid | outside)
    return replace(rows, top_k=TopKLogps(ids - start, padding, place)), of_given


def _listed(call: Call, name: str, listed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids (n, K) of the rows, and the rows (n,) with one out of range, which on a CPU
    raises."""
    vocab, _ = call.ids_here
    ids = listed.detach().flatten(0, -2)[call.rows.positions].long()
    outside = (ids < -1) | (ids >= vocab)
    if ids.device.type == "cpu" and bool(outside.any()):
        bad = ids[outside][0].item()
        raise ValueError(
            f"{name}: expected ids in [0, V) = [0, {vocab}), or -1 for padding, where the "
            f"mask counts, got {bad}"
        )
    return ids.int(), outside.any(dim=1)


def _sorted(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's ids in order, the order, and which of them repeat the one before."""
    ids, order = ids.sort(dim=1, stable=True)
    repeats = torch.zeros_like(ids, dtype=torch.bool)
    repeats[:, 1:] = ids[:, 1:] == ids[:, :-1]
    return ids, order, repeats
