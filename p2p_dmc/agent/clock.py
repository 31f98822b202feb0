"""The clock that the shell hands to the cores."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine is suspended (on Linux the other one does not). By a clock that stood still, a laptop that
wakes up would have heard just now a peer that went on without it for hours, and then died."""


def now_ms() -> int:
    """Monotonic milliseconds: a step of the wall clock moves nobody."""
    return time.clock_gettime_ns(_CLOCK) // 1_000_000
