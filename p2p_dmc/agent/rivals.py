"""Two foundings of one run that come to know of each other while both train (DESIGN.md section 6, History)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from p2p_dmc.agent.entering import others, run_meta

if TYPE_CHECKING:
    from p2p_dmc.agent.run import Run

LOOK_EVERY_S = 1.0
REMIND_AFTER_S = 60.0


class Rivals:
    """Looks for another history of the run now and then; gives this one up, or names both to the user."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._looked_s = 0.0
        self._said_s: float | None = None

    def look(self) -> None:
        """Call often, while a view stands; acts once a second."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        run = self._run
        step = run.entrance.rivals(run_meta(run), others(run.services, run.name))
        if step is None:
            return
        run.services.meta_changed()  # the other side decides by what this one has committed by now
        if step.yield_to:
            run.give_up_history(step)
        elif step.waiting and (self._said_s is None or now_s - self._said_s > REMIND_AFTER_S):
            self._said_s = now_s
            run.services.say(step.waiting)
            run.event("two_histories", reason=step.waiting)
