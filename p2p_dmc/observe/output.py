"""Standard output and error, written from a thread: a terminal that is paused must not pause the agent."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable

MOST_WAITING = 2000
"""Pieces kept for a slow reader; what comes then is lost and counted."""


class Output:
    """A bounded queue in front of the two streams. ``broken`` once nobody reads one of them any more."""

    def __init__(self, most_waiting: int = MOST_WAITING) -> None:
        self.broken = False
        self.on_broken: Callable[[], None] = lambda: None
        """Called once, from the writing thread."""
        self.lost = 0
        self._queue: queue.Queue[tuple[int, bytes] | None] = queue.Queue(most_waiting)
        self._thread = threading.Thread(target=self._write_forever, name="dmc-output", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many pieces the thread has not begun to write."""
        return self._queue.qsize()

    def put(self, descriptor: int, data: bytes) -> None:
        """Write ``data`` when the reader has time."""
        try:
            if self.lost:
                note = f"... {self.lost} lines were not shown: the output was not read in time\n"
                self._queue.put_nowait((2, note.encode()))
                self.lost = 0
            self._queue.put_nowait((descriptor, data))
        except queue.Full:
            self.lost += 1

    def close(self, wait_s: float = 2.0) -> None:
        """Give the reader a last moment to read the rest."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=wait_s)
            self._thread.join(wait_s)
        if self.broken:
            # What python itself would still flush into the closed pipe, it would complain about.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())

    def _write_forever(self) -> None:
        while (item := self._queue.get()) is not None:
            if not self.broken:
                try:
                    write_all(*item)
                except OSError:
                    self.broken = True
                    self.on_broken()


def write_all(descriptor: int, data: bytes) -> None:
    """All of it; OSError when nobody reads."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
