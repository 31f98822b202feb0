"""Why a run stands still on this peer, for the person who waits (DESIGN.md section 6: a paused side says so)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from p2p_dmc.agent.run_files import load_names

if TYPE_CHECKING:
    from p2p_dmc.agent.run import Run

LOOK_EVERY_S = 0.25
SAY_AFTER_S = 2.0
"""Changes of view are over sooner, and nobody wants to read about them."""
REMIND_AFTER_S = 60.0
PEER_ID = re.compile(r"\b[0-9a-f]{32}\b")


def waiting(run: Run) -> str:
    """Why no round can be had, in words; "" when nothing is in the way."""
    if run.end.outcome or run.agreement is None or not run.desk.up:
        return ""
    reason = run.waiting if run.rounds is None else run.agreement.waiting_for() or ""
    return PEER_ID.sub(lambda found: called(run, found[0]), reason)


def called(run: Run, peer_id: str) -> str:
    record = run.services.record(peer_id)
    name = record.name if record is not None else load_names(run.folder).get(peer_id)
    return f"{name} ({peer_id[:8]})" if name else peer_id[:8]


class Patience:
    """Decides when a reason is worth a line: once it has stood a while, when it changes, again each minute."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._reason = self._said = ""
        self._waiting_since_s = self._reason_since_s = self._said_s = 0.0

    def look(self, reason: str, now_s: float) -> str:
        """The line to say now, mostly ""."""
        if reason and not self._reason:
            self._waiting_since_s = now_s
        if reason != self._reason:
            self._reason, self._reason_since_s = reason, now_s
        if not reason:
            said, self._said = self._said, ""
            return f"run {self._run!r} goes on" if said else ""
        if self._said:
            is_new = reason != self._said and now_s - self._reason_since_s > SAY_AFTER_S
            due = is_new or now_s - self._said_s > REMIND_AFTER_S
        else:
            due = now_s - self._waiting_since_s > SAY_AFTER_S
        if not due:
            return ""
        self._said, self._said_s = reason, now_s
        return f"run {self._run!r} waits: {reason}"


async def say_waiting(run: Run, say: Callable[[str], None]) -> None:
    """Tell the person who waits, until the run is over."""
    patience, loop = Patience(run.name), asyncio.get_running_loop()
    while not run.end.outcome:
        line = patience.look(waiting(run), loop.time())
        if line:
            say(line)
        await asyncio.sleep(LOOK_EVERY_S)
