"""How fast each member is, by what the headers of its last rounds say: the same on all who know them.

From it follow how long each member needs for what it has (`core.rebalancing`), and how many local steps it takes in
a round: tau the slowest of them, the others as many as they can in that time, so that nobody waits for long at the
barrier (DESIGN.md section 7). With tau 1 every step is a round, for everybody.

A run begins with two rounds of one step, in which the members measure themselves: with tau steps the quicker ones would
stand idle for most of both. That is two rounds' communication, once: a view among whose members is one that has trained
before begins with tau steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["Pace", "local_steps"]

KEPT = 3
"""Rounds of which the middle one tells: neither a first step that loads libraries nor a machine that was suspended
counts, and two rounds are enough to notice that a speed has changed."""
MOST_STEPS = 32
"""A member takes at most so many times tau steps: beyond that its parameters go too far astray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Of one member."""

    before: int
    """Samples a second as it said for the view; 0 when unknown."""
    batch: int = 1
    """Samples of a local step, rounded up: the most so far, for the last batches of an epoch are short."""
    times: tuple[int, ...] = ()
    """Microseconds of a local step in the last rounds that had full ones, oldest first."""

    def after(self, samples: int, steps: int, compute_us: int) -> Pace:
        """A round went by."""
        if min(samples, steps, compute_us) <= 0:
            return self
        batch = max(self.batch, -(-samples // steps))
        if 4 * samples < 3 * steps * batch:
            return self
        return replace(self, batch=batch, times=(*self.times, max(1, compute_us // steps))[-KEPT:])

    @property
    def speed(self) -> int:
        """Samples a second, 0 when unknown: one round alone tells too little."""
        return max(1, self.batch * 1_000_000 // self.step_us) if self.step_us else self.before

    @property
    def step_us(self) -> int:
        """Microseconds of a local step, 0 when unknown."""
        times = sorted(self.times)
        return times[(len(times) - 1) // 2] if len(times) > 1 else 0

    @property
    def expected_us(self) -> int:
        """The same, by the speed that it said for the view while only its batch is known; 0 when unknown."""
        if self.step_us or not (self.times and self.before):
            return self.step_us
        return max(1, self.batch * 1_000_000 // self.before)


def local_steps(tau: int, paces: Sequence[Pace], member: int, busy: Sequence[bool]) -> tuple[int, int]:
    """How many the member takes in the next round; and microseconds after which it takes no more, 0 for no limit.

    `busy`: who has anything to train on. A member that takes more than tau, or of which nothing is known while others'
    pace is, stops when the slowest one's time is over by half: its own speed has changed, or is far lower.
    """
    working = [pace for pace, works in zip(paces, busy, strict=True) if works]
    slowest = max((pace.expected_us for pace in working), default=0)
    mine = paces[member].expected_us
    if tau == 1 or len(working) < 2:
        return tau, 0
    if not slowest:
        return (tau if any(pace.before for pace in working) else 1), 0
    limit_us = 3 * tau * slowest // 2
    if not mine:
        return tau, limit_us
    if slowest <= mine:
        return tau, 0
    steps = min(MOST_STEPS * tau, (2 * tau * slowest + mine) // (2 * mine))
    return steps, limit_us if steps > tau else 0
