"""How fast each member is, by what the headers of its last rounds say: the same on all who know them.

From it follow how long each member needs for what it has (`core.rebalancing`), and how many local steps it takes in
a round: tau the slowest of them, the others as many as they can in that time, so that nobody waits for long at the
barrier (DESIGN.md section 7). With tau 1 every step is a round, for everybody.
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
    rounds: tuple[tuple[int, int, int], ...] = ()
    """Samples, local steps, microseconds of them: of the last rounds in which it had any, oldest first."""

    def after(self, samples: int, steps: int, compute_us: int) -> Pace:
        """A round went by."""
        if min(samples, steps, compute_us) <= 0:
            return self
        return replace(self, rounds=(*self.rounds, (samples, steps, compute_us))[-KEPT:])

    @property
    def speed(self) -> int:
        """Samples a second, 0 when unknown: one round alone tells too little."""
        if len(self.rounds) < 2:
            return self.before
        speeds = sorted(samples * 1_000_000 // compute_us for samples, _, compute_us in self.rounds)
        return max(1, speeds[len(speeds) // 2])

    @property
    def step_us(self) -> int:
        """Microseconds of a local step, 0 when unknown."""
        if len(self.rounds) < 2:
            return 0
        times = sorted(compute_us // steps for _, steps, compute_us in self.rounds)
        return max(1, times[(len(times) - 1) // 2])

    @property
    def batch(self) -> int:
        """Samples of a local step, rounded up; 1 when unknown."""
        if not self.rounds:
            return 1
        samples, steps, _ = self.rounds[-1]
        return -(-samples // steps)


def local_steps(tau: int, paces: Sequence[Pace], member: int, busy: Sequence[bool]) -> int:
    """How many the member takes in the next round. `busy`: who has anything to train on."""
    mine = paces[member].step_us
    slowest = max((pace.step_us for pace, works in zip(paces, busy, strict=True) if works), default=0)
    if tau == 1 or not mine or slowest <= mine:
        return tau
    return min(MOST_STEPS * tau, (2 * tau * slowest + mine) // (2 * mine))
