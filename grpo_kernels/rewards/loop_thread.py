"""Async reward functions on an event loop of their own, in a thread that lasts as long as the process.

However a function ends (an error, `sys.exit`, stopping the loop), the caller gets an error and is not left waiting.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any

_CLEANING_SECONDS = 1.0  # time to clean up, for the tasks on a loop that a function ended


def failure(name: str, error: BaseException) -> RuntimeError:
    """Return the exception to raise for `error`, which reward function `name` raised."""
    return RuntimeError(f"reward function {name!r} raised {type(error).__name__}: {error}")


class _LoopThread(threading.Thread):
    """A daemon thread that runs one event loop for the rest of the process, or until a function of the user's ends it.

    Attributes:
        ended: future of the loop's end; its result is the exception that ended it, or None if it was stopped.
    """

    def __init__(self) -> None:
        super().__init__(name="grpo-kernels-rewards", daemon=True)
        self.loop = asyncio.new_event_loop()
        self.ended: Future[BaseException | None] = Future()
        self.start()

    def run(self) -> None:
        global _loop_thread
        raised: BaseException | None = None
        try:
            self.loop.run_forever()
        except (
            BaseException
        ) as error:  # SystemExit or KeyboardInterrupt, from a task or callback of a function
            raised = error
        with _starting:  # from here on nobody sends anything to this loop
            if _loop_thread is self:
                _loop_thread = None
        self.ended.set_result(raised)
        self._close()

    def _close(self) -> None:
        """Cancel the tasks that are left on the loop, so that they can clean up."""
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        with suppress(BaseException):
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=_CLEANING_SECONDS))
        self.loop.close()


_loop_thread: _LoopThread | None = None
_starting = threading.Lock()


def run_together(calls: list[tuple[str, Callable[[], Awaitable[Any]]]]) -> list[Any]:
    """Run async functions, (name, call) each, together on the loop thread, and return their results.

    The thread is started on first use, again after a fork, and again when a function has ended its loop.

    Raises:
        RuntimeError: a function raised or ended the loop (the message names it, or all that ran), or called this.
    """
    global _loop_thread
    if threading.current_thread() is _loop_thread:
        raise RuntimeError(
            "compute_rewards: called inside an async reward function, whose loop it would wait for"
        )
    with _starting:
        if _loop_thread is None or not _loop_thread.is_alive():
            _loop_thread = _LoopThread()
        thread = _loop_thread
        outcomes = asyncio.run_coroutine_threadsafe(_outcomes(calls), thread.loop)
    try:
        ends: list[Future[Any]] = [outcomes, thread.ended]  # a loop that ended completes nothing
        wait(ends, return_when=FIRST_COMPLETED)
    except BaseException:
        outcomes.cancel()
        raise
    if not outcomes.done() or outcomes.cancelled():
        raised = thread.ended.result()
        how = "was stopped" if raised is None else f"was ended by {type(raised).__name__}: {raised}"
        names = ", ".join(repr(name) for name, _ in calls)
        raise RuntimeError(
            f"reward function{'s' if calls[1:] else ''} {names}: the event loop {how}"
        ) from raised
    for _, error in outcomes.result():
        if error is not None:
            raise error
    return [value for value, _ in outcomes.result()]


async def _outcomes(
    calls: list[tuple[str, Callable[[], Awaitable[Any]]]],
) -> list[tuple[Any, RuntimeError | None]]:
    """Return the result of each function, or the error that ended it."""

    async def outcome(
        name: str, call: Callable[[], Awaitable[Any]]
    ) -> tuple[Any, RuntimeError | None]:
        try:
            return await call(), None
        except (
            BaseException
        ) as error:  # asyncio would let SystemExit and KeyboardInterrupt end the loop
            raised = failure(name, error)
            raised.__cause__ = error
            return None, raised

    return await asyncio.gather(*(outcome(name, call) for name, call in calls))
