"""A peer that alone does not hear some member stands aside for a while, so that the others go on, and tries again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from p2p_dmc.agent.clock import now_ms
from p2p_dmc.observe.phases import reach
from p2p_dmc.wire.trainer_messages import Park

if TYPE_CHECKING:
    from p2p_dmc.agent.run import Run

FIRST_S, MOST_S = 10.0, 1800.0
"""How long it stands aside the first time; each time in a row it is twice as long, up to the second figure."""
TRY_S = 20.0
"""So long it tries to be a voter again, before that counts as another time."""


class Aside:
    """Whether this peer stands aside now (`Agreement.cut_off_from`)."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._gap_s = FIRST_S
        self._until_s: float | None = None
        self._tries_until_s: float | None = None
        self._missed: tuple[str, ...] = ()

    def look(self) -> bool:
        """Call at each tick: whether there is nothing to do but to wait."""
        run, now_s = self._run, time.monotonic()
        agreement = run.agreement
        if agreement is None:
            return False
        if self._until_s is not None:
            if now_s < self._until_s or not run.desk.up:
                return True  # without a trainer there is nothing to come back with
            self._until_s, self._tries_until_s = None, now_s + TRY_S
            run.act(agreement.rejoin(now_ms()))
            return False
        if run.rounds is not None:  # it was let in: what comes of that is for the reductions to show
            self._tries_until_s = None
        in_vain = self._tries_until_s is not None and now_s >= self._tries_until_s and run.desk.up
        if agreement.cut_off_from or in_vain:
            self._stand_aside(agreement.cut_off_from or self._missed, now_s)
            return True
        return False

    @property
    def stands(self) -> bool:
        """It does now: its trainer may come and go meanwhile."""
        return self._until_s is not None

    def trains(self) -> None:
        """A round is complete: everybody in it can be reached."""
        self._gap_s, self._tries_until_s = FIRST_S, None

    def _stand_aside(self, missed: tuple[str, ...], now_s: float) -> None:
        run, gap_s = self._run, self._gap_s
        self._missed, self._until_s, self._tries_until_s = missed, now_s + gap_s, None
        self._gap_s = min(2 * gap_s, MOST_S)
        run.waiting = (
            f"waiting for word of {', '.join(missed)}, which others hear: see that TCP connections between the "
            f"machines are let through on all ports; the others go on, and this peer tries again in {gap_s:g} s"
        )
        run.event("stands_aside", missed=list(missed), seconds=gap_s)
        run.views.frozen()
        reach("aside")
        run.withdraw(f"no word of {', '.join(missed)} comes through")
        run.to_trainer(Park())
