"""The stored cases: random ones of `tests.support.cases`, at small sizes, and every preset.

Hidden states and heads are multiples of 1/16, whose products are exact in any order; other numbers
are multiples of 1/1024, far coarser than rounding.
"""

from __future__ import annotations

import io
import lzma
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, get_args

import torch

from grpo_kernels import LossConfig, LossOutput, grpo_loss, presets
from grpo_kernels.typing import Extra
from tests.support.case_builder import Case
from tests.support.cases import Draw, random_case, random_scores
from tests.support.flat import flat
from tests.support.reference import LEAVES
from tests.support.run_case import (
    WHOLE,
    allowed_engines,
    config_of,
    engines_of,
    gradients_of,
    leaves_of,
    loss_arguments,
    packed,
    run,
    scores,
    upstream_of,
)
from tests.support.sampler import MODES, PREFIX

BOUNDS = {f"{PREFIX}clip_max": 1.25, f"{PREFIX}clip_min": 0.7}
SOME = (torch.float32, torch.bfloat16)
Results = dict[str, Any]  # name -> tensor or text
Made = Callable[[], Results]


def turn(choices: Sequence[Any], seed: int) -> Any:
    """One of `choices`, in turn: of backends by the seed, of engines by seed // 2 and of sizes by
    seed // 6 and // 18, so that no two go in step."""
    return choices[seed % len(choices)]


def small(make: Callable[..., Case], seed: int) -> Case:
    """Random case number `seed` at a small size, its numbers on a grid."""
    case = make(seed, b=3, t=4, h=turn((3, 5, 8), seed // 6), v=turn((7, 19, 33), seed // 18))
    on_grid = {}
    for name, x in case.tensors().items():
        if x.is_floating_point():
            steps = 16 if name.removeprefix("teacher_") in LEAVES else 1024
            on_grid[name] = ((x.double() * steps).floor() / steps).to(x.dtype)
    return case.but(**on_grid)


def of_loss(out: LossOutput, grads: dict[str, Any]) -> Results:
    found = {name: getattr(out, name) for name in ("loss", "logps", "entropies")}
    found |= {f"metric {name}": x for name, x in out.metrics.items()}
    found |= {f"count {name}": x for name, (_, x) in out.metrics.pairs.items()}
    found |= {"engine": out.engine, "backend": out.backend}
    return found | {f"d_{name}": x for name, x in grads.items()}


def engine_of(case: Case, seed: int) -> str:
    """One of those that are exact for the case's loss, in turn."""
    return turn(sorted({"auto", *allowed_engines(case)}), seed // 2)


def loss_case(case: Case, seed: int, backend: str) -> Results:
    return of_loss(*run(case, engine_of(case, seed), backend=backend))


def sampler_case(case: Case, seed: int, backend: str) -> Results:
    """The ratio to the sampler is known after a pass over the vocabulary."""
    return of_loss(*run(case, turn(("auto", "lean", "two_pass"), seed // 2), backend=backend))


def packed_case(case: Case, seed: int, backend: str) -> Results:
    leaves, chosen = leaves_of(case), {"engine": engine_of(case, seed), "backend": backend}
    chosen["workspace_bytes"] = case.workspace_bytes
    given = packed(case, loss_arguments(case, leaves))[0]
    out = flat(grpo_loss)(**given, config=config_of(case), **chosen)
    if out.loss.requires_grad:
        out.loss.backward()
    return of_loss(out, gradients_of(leaves))


def scores_case(case: Case, seed: int, backend: str, **more: Any) -> Results:
    engine, leaves, up = turn(engines_of(case), seed // 2), leaves_of(case), upstream_of(case)
    found = scores(case, leaves, engine, WHOLE, backend=backend, **more).given
    up["divergence"] = up.pop("divergences")
    sent = [x for x in found if found[x].requires_grad]
    if sent:
        torch.autograd.backward([found[x] for x in sent], [up[x] for x in sent])
    found |= {"engine": engine, "backend": backend}
    return found | {f"d_{name}": x for name, x in gradients_of(leaves).items()}


def extras_case(case: Case, seed: int, backend: str) -> Results:
    """Extras, or what is expected: rightly, wrongly, or of the log-probabilities alone."""
    a, b = (upstream_of(case)[x].nan_to_num(0.0) for x in ("logps", "entropies"))
    expected = turn((None, a, (a, b), b), seed // 2)
    more = {"extras": get_args(Extra)} if expected is None else {"expected": expected}
    return scores_case(case, 0, backend, **more)


def corrected(case: Case, seed: int) -> Case:
    """With the ratio to the sampler made inside of the loss; it could not score the first token."""
    sampling = case.sampling_per_token_logps.clone()
    sampling[0, 0] = torch.nan
    config = {f"{PREFIX}correction": True, f"{PREFIX}mode": turn(MODES, seed), **BOUNDS}
    changes = {"importance_sampling_ratio": None, "sampling_per_token_logps": sampling}
    return case.but(config=config, **changes)


def mixed(case: Case, seed: int) -> Case:
    """Each leaf with a dtype of its own."""
    draw, leaves = Draw(f"dtypes {seed}"), {x: getattr(case, x) for x in LEAVES}
    return case.but(**{x: y.to(draw.choice(SOME)) for x, y in leaves.items() if y is not None})


def is_whole(case: Case) -> bool:
    return not case.diverges and case.kept_ids is None


def can_pack(case: Case) -> bool:
    return case.importance_sampling_ratio is None


def is_sampled(case: Case) -> bool:
    return case.sampling_per_token_logps is not None and case.config["loss_type"] != "gmpo"


def is_single(case: Case) -> bool:
    return {x.dtype for x in case.tensors().values() if x.is_floating_point()} == {torch.float32}


def numbered(
    number: int,
    make: Callable[..., Case],
    compute: Callable[..., Results],
    *,
    fits: Callable[[Case], bool] = lambda case: True,
    change: Callable[[Case, int], Case] = lambda case, seed: case,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backends: tuple[str, ...] = ("torch", "cpp"),
) -> Iterator[tuple[int, Made]]:
    """The first cases that fit, by seed, and the functions that compute them."""

    def made(seed: int, case: Case) -> Results:
        with around():
            return compute(change(case, seed), seed, turn(backends, seed))

    every = ((seed, small(make, seed)) for seed in count())
    for seed, case in islice((x for x in every if fits(x[1])), number):
        yield seed, partial(made, seed, case)


def of_config(config: LossConfig) -> Results:
    return {name: repr(x) for name, x in asdict(config).items()}


def of_configs() -> Iterator[tuple[str, Made]]:
    yield "default", lambda: of_config(LossConfig())
    for name in presets.__all__:
        yield name, partial(of_config, getattr(presets, name))


def groups() -> dict[str, Iterator[tuple[Any, Made]]]:
    """By group, its cases."""
    losses = partial(numbered, make=random_case, compute=loss_case)
    scored = partial(numbered, make=random_scores, compute=scores_case)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    interpreted = {"fits": is_single, "backends": ("triton",)}
    if "TRITON_INTERPRET" in os.environ:
        return {"loss": losses(38, **interpreted), "scores": scored(32, **interpreted)}
    return {
        "presets": of_configs(),
        "loss": losses(1000),
        "packed": losses(120, compute=packed_case, fits=can_pack),
        "sampler": losses(100, compute=sampler_case, fits=is_sampled, change=corrected),
        "no-grad": losses(40, around=torch.no_grad),
        "mixed": losses(60, fits=is_single, change=mixed),
        "autocast": losses(40, around=autocast),
        "scores": scored(800),
        "extras": scored(160, compute=extras_case, fits=is_whole),
        "no-grad-scores": scored(30, around=torch.no_grad),
        "mixed-scores": scored(40, fits=is_single, change=mixed),
    }


def compute(wanted: list[str]) -> dict[str, Results]:
    """The results of all cases, or of some groups; in Triton's interpreter, of its cases."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    for group, numbers in groups().items():
        for name, made in numbers if not wanted or group in wanted else ():
            try:
                results = made()
            except Exception as error:
                results = {"raises": type(error).__name__}
            found[f"{group}/{name}"] = {x: _plain(y) for x, y in results.items() if y is not None}
    return found


def _plain(x: Any) -> Any:
    return x if isinstance(x, str) else torch.as_tensor(x).detach().clone()


def write(path: str, *groups: str) -> None:
    file = io.BytesIO()
    torch.save({"torch": torch.__version__.split("+")[0], "cases": compute([*groups])}, file)
    Path(path).write_bytes(lzma.compress(file.getvalue()))
