"""The deaths of a loader's worker processes, noticed where they can be acted on.

torch's SIGCHLD handler raises wherever the main thread is, in the middle of a step or of a round. While a loader has
workers, an error about one of these is kept until the loader looks; every other goes on as it came.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


class WorkerWatch:
    """Of one set of workers: those that start between ``begin`` and ``started``."""

    def __init__(self) -> None:
        self._before: set[int | None] = set()
        self._workers: list[Any] = []
        self._theirs: Handler | None = None
        self.waiting = False
        """The main thread waits for a worker: an error about one may be raised at once."""
        self.alarm = False
        """An error about one was kept: see ``dead``."""

    def begin(self) -> None:
        """Workers are about to be started."""
        self._before = {child.pid for child in multiprocessing.active_children()}

    def started(self) -> None:
        """All of them run, and torch has its handler in place."""
        self._workers = [c for c in multiprocessing.active_children() if c.pid not in self._before]
        theirs = signal.getsignal(signal.SIGCHLD)
        if self._workers and callable(theirs) and threading.current_thread() is threading.main_thread():
            self._theirs = theirs
            signal.signal(signal.SIGCHLD, self._handle)

    def end(self) -> None:
        """They are gone, or will be; the signal is torch's again."""
        if self._theirs is not None and signal.getsignal(signal.SIGCHLD) == self._handle:
            signal.signal(signal.SIGCHLD, self._theirs)
        self._theirs, self._workers, self.alarm = None, [], False

    def dead(self, patience_s: float = 0.0) -> int | None:
        """How the first one that died ended: an exit code, or minus a signal's number; None while all live.

        Waits so long for one to die.
        """
        if patience_s and self._workers:
            ending = wait([worker.sentinel for worker in self._workers], patience_s)
            for worker in self._workers:
                if worker.sentinel in ending:  # its end is near, and not yet to be asked for
                    worker.join(patience_s)
        codes = [worker.exitcode for worker in self._workers]
        return next((code for code in codes if code), None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._theirs is not None:
            try:
                self._theirs(number, frame)
            except RuntimeError:
                if self.waiting or self.dead() is None:
                    raise
                self.alarm = True
