"""Bounds on what bulk traffic takes of a link: a bucket that all senders, or all receivers, of one agent draw from."""

from __future__ import annotations

import asyncio
import time

BURST_S = 0.1
"""What was not used for so long may be caught up on."""


class RateLimit:
    """``rate`` in bytes a second; None: none."""

    def __init__(self, rate: int | None = None) -> None:
        self.rate = rate
        self._until_s = 0.0
        """When what has been taken so far is paid for."""

    async def take(self, size_bytes: int) -> None:
        """Wait for one's turn: first come, first served."""
        if self.rate is None:
            return
        now_s = time.monotonic()
        start_s = max(self._until_s, now_s - BURST_S)
        self._until_s = start_s + size_bytes / self.rate
        if start_s > now_s:
            await asyncio.sleep(start_s - now_s)

    def wait_s(self, now_s: float) -> float:
        """How long whoever came now would wait."""
        return max(0.0, self._until_s - now_s)

    def give_back(self, size_bytes: int) -> None:
        """So much of what was taken is not used."""
        if self.rate is not None:
            self._until_s -= size_bytes / self.rate
