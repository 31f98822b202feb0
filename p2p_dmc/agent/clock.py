"""The clock that the shell hands to the cores."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Monotonic milliseconds: a step of the wall clock moves nobody."""
    return time.monotonic_ns() // 1_000_000
