"""Whether there is time left: until a moment, and until somebody asks the command to end.

A signal only sets a flag, which the loops read. An exception out of a signal handler could be lost
wherever Python swallows exceptions, such as in ``__del__``, or be taken for an error of what runs
at that moment.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

_asked = False


def end_at_signals() -> None:
    """SIGTERM and Ctrl-C now ask the command to end; a second Ctrl-C interrupts at once."""

    def ask(kind: int, frame: FrameType | None) -> None:
        global _asked
        _asked = True
        if kind == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGTERM, ask)
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # a shell's background ignores it
        signal.signal(signal.SIGINT, ask)


def is_asked() -> bool:
    """Return True if somebody has asked the command to end."""
    return _asked


def is_past(until: float) -> bool:
    """Return True if ``time.time()`` is past `until`, or the command was asked to end."""
    return _asked or time.time() > until
