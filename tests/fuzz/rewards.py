"""Hostile reward functions: each end of one reaches the caller, in time and with its name; the next call is right."""

from __future__ import annotations

import asyncio
import functools
import math
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.fuzz.harness import Category, Options
from tests.fuzz.rank_pool import RankFailure, RankPool

SECONDS = 3.0
POOL = RankPool(world_size=1, seconds=SECONDS)


class Odd:
    """An object whose conversion to a number raises."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def __float__(self) -> float:
        raise self.error or OverflowError("no number")


class Endless:
    """Something with a length that lies."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter([1.0])


def _raise(error: BaseException) -> Any:
    raise error


def _stop_loop() -> None:
    try:
        asyncio.get_running_loop().stop()
    except RuntimeError:
        raise ValueError("no loop to stop") from None


def _cancel() -> None:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        raise ValueError("no task to cancel") from None
    assert task is not None
    task.cancel()


# What a function does; n is the batch. What is returned is right or has to be refused with the function's name.
GOOD: dict[str, Callable[[int], Any]] = {
    "floats": lambda n: [0.5] * n,
    "ints": lambda n: [1] * n,
    "None": lambda n: [None, *[1.0] * (n - 1)],
    "bools": lambda n: [True] * n,
    "tuple": lambda n: (0.25,) * n,
    "tensor": lambda n: torch.ones(n),
    "tensor that wants a gradient": lambda n: torch.ones(n, requires_grad=True),
    "tensors": lambda n: [torch.tensor(1.0)] * n,
}
BAD: dict[str, Callable[[int], Any]] = {
    "raises": lambda n: _raise(ValueError("bad")),
    "raises without words": lambda n: _raise(RuntimeError()),
    "raises StopIteration": lambda n: _raise(StopIteration(3)),
    "raises StopAsyncIteration": lambda n: _raise(StopAsyncIteration()),
    "raises a TimeoutError": lambda n: _raise(TimeoutError("late")),
    "raises an error that takes arguments": lambda n: _raise(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")),
    "exits": lambda n: sys.exit(3),
    "is interrupted": lambda n: _raise(KeyboardInterrupt()),
    "is cancelled": lambda n: _raise(asyncio.CancelledError()),
    "generator exit": lambda n: _raise(GeneratorExit()),
    "recurses": lambda n: BAD["recurses"](n),
    "stops its loop": lambda n: _stop_loop() or [1.0] * n,
    "one too many": lambda n: [1.0] * (n + 1),
    "one too few": lambda n: [1.0] * (n - 1),
    "nothing": lambda n: None,
    "a number": lambda n: 1.0,
    "a string": lambda n: "1" * n,
    "bytes": lambda n: b"1" * n,
    "strings": lambda n: ["0.5"] * n,
    "a dict": lambda n: dict.fromkeys(range(n), 1.0),
    "a generator": lambda n: (1.0 for _ in range(n)),
    "a length that lies": lambda n: Endless(),
    "10**400": lambda n: [10**400] * n,
    "complex": lambda n: [1j] * n,
    "lists": lambda n: [[1.0]] * n,
    "objects": lambda n: [object()] * n,
    "objects that raise": lambda n: [Odd()] * n,
    "objects that raise KeyError": lambda n: [Odd(KeyError("x"))] * n,
    "meta tensor": lambda n: torch.ones(n, device="meta"),
    "meta tensors": lambda n: [torch.ones((), device="meta")] * n,
    "sparse tensor": lambda n: torch.ones(n).to_sparse(),
    "tensor of another shape": lambda n: torch.ones(n, 2),
    "0-d tensor": lambda n: torch.tensor(1.0),
    "complex tensor": lambda n: torch.ones(n, dtype=torch.complex64),
    "a coroutine in a list": lambda n: [asyncio.sleep(0)] * n,
}
ENDS = ("exits", "is interrupted", "is cancelled", "generator exit")  # of the program, from sync code
KINDS = ("sync", "async", "async later", "partial", "object", "returns a coroutine")


def draw(random_: random.Random) -> Options:
    options: Options = {"bad": random_.choice([*BAD]), "kind": random_.choice(KINDS), "rows": random_.choice((1, 2, 5))}
    for i in range(random_.randint(0, 3)):
        options[f"other {i}"] = (random_.choice([*GOOD]), random_.choice(KINDS), random_.random() < 0.5)
    if random_.random() < 0.3:
        options["other bad"] = (random_.choice([*BAD]), random_.choice(KINDS), random_.random() < 0.5)
    if random_.random() < 0.2:
        options["running loop"] = True
    if random_.random() < 0.1:
        options.pop("bad")
        options.pop("other bad", None)
    return options


def function(name: str, body: Callable[[int], Any], kind: str) -> Any:
    """A reward function of this name that does `body`."""

    def sync(prompts: list[Any], **rest: Any) -> Any:
        return body(len(prompts))

    async def at_once(prompts: list[Any], **rest: Any) -> Any:
        return body(len(prompts))

    async def later(prompts: list[Any], **rest: Any) -> Any:
        await asyncio.sleep(0.001)
        return body(len(prompts))

    class Scorer:
        def __call__(self, **rest: Any) -> Any:
            return sync(**rest)

    made = {"async": at_once, "async later": later, "returns a coroutine": lambda **given: at_once(**given)}
    found = Scorer() if kind == "object" else made.get(kind, sync)
    found.__name__ = name
    return functools.partial(found) if kind == "partial" else found


def call(rank: int, options: Options) -> tuple[str, str, list[list[float]] | None]:
    """The task of the process: the end of the call, its words, and what was returned; then a call that is right."""
    from grpo_kernels.rewards import compute_rewards

    rows = options.get("rows", 2)
    funcs = []
    for key, value in options.items():
        if key.startswith("other"):
            what, kind, first = value
            body = (BAD if key == "other bad" else GOOD)[what]
            funcs.insert(0 if first else len(funcs), function(f"{key.replace(' ', '_')}", body, kind))
    if "bad" in options:
        funcs.insert(len(funcs) // 2, function("the_bad_one", BAD[options["bad"]], options.get("kind", "sync")))
    funcs = funcs or [function("the_good_one", GOOD["floats"], "async")]

    def compute(funcs: list[Any]) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compute_rewards(funcs, ["p"] * rows, ["c"] * rows)

    async def under_a_loop() -> torch.Tensor:
        return compute(funcs)

    end, words, table = "", "", None
    try:
        table = (asyncio.run(under_a_loop()) if "running loop" in options else compute(funcs)).tolist()
    except BaseException as error:
        end, words = type(error).__name__, " ".join([str(error), *getattr(error, "__notes__", [])])
    good = [function("first", GOOD["ints"], "async later"), function("second", GOOD["floats"], "sync")]
    again = compute(good).tolist()
    assert again == [[1.0, 0.5]] * rows, f"the next call: {again}"
    return end, words, table


def check(options: Options) -> None:
    """Nothing hangs, nobody is silently left out, and the error has the function's name."""
    try:
        ((end, words, table),) = POOL.run(call, options)
    except RankFailure as failure:
        raise AssertionError(f"the call: {failure}") from None
    except AssertionError:
        POOL.close()
        raise
    if not {"bad", "other bad"} & options.keys():
        assert not end, f"right functions were refused: {end}: {words}"
        count = max(1, sum(key.startswith("other") for key in options))
        assert table is not None and all(len(row) == count for row in table)
        assert all(math.isnan(x) or 0 < x <= 1 for row in table for x in row), table
        return
    bad = [options.get("bad"), options.get("other bad", (None,))[0]]
    if "running loop" in options and "stops its loop" in bad:
        return  # the caller's own, where the function is not async
    assert end, f"it was accepted: {table}"
    sync_ends = [options.get("bad")] if options.get("kind", "sync") in ("sync", "partial", "object") else []
    sync_ends += [x[0] for k, x in options.items() if k == "other bad" and x[1] in ("sync", "partial", "object")]
    if any(what in ENDS for what in sync_ends) and end not in ("RuntimeError", "ValueError"):
        return  # the program ends, as anywhere else
    assert "the_bad_one" in words or "other_bad" in words, f"no name in {end}: {words}"


REWARDS = Category("rewards", draw, check, close=POOL.close)
