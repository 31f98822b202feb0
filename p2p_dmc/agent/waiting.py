"""Why a run stands still on this peer, for the person who waits (DESIGN.md section 6: a paused side says so)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

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
    if run.training is None:
        reason = run.waiting
    else:
        reason = run.agreement.waiting_for() or "" if run.training.frozen else ""
    return PEER_ID.sub(lambda found: _name(run, found[0]), reason)


def _name(run: Run, peer_id: str) -> str:
    record = run.services.record(peer_id)
    return f"{record.name} ({peer_id[:8]})" if record is not None else peer_id[:8]


async def say_waiting(run: Run, say: Callable[[str], None]) -> None:
    """Say a reason when it has stood for two seconds, again each minute, and when it is gone."""
    loop = asyncio.get_running_loop()
    reason, since_s, said_s = "", loop.time(), 0.0
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if run.end.outcome:
            return
        now_s, reason_now = loop.time(), waiting(run)
        if bool(reason_now) != bool(reason):
            if said_s and not reason_now:
                say(f"run {run.name!r} goes on")
            since_s, said_s = now_s, 0.0
        changed = reason_now != reason
        reason = reason_now
        if (
            reason
            and now_s - since_s > SAY_AFTER_S
            and (changed or now_s - said_s > REMIND_AFTER_S or not said_s)
        ):
            said_s = now_s
            say(f"run {run.name!r} waits: {reason}")
