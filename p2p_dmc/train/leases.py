"""Samples that the agent has handed out and that no batch has taken yet."""

from __future__ import annotations

from collections import deque

from p2p_dmc.wire.trainer_messages import Lease, LeaseEnd

Position = tuple[int, int, int]  # ledger epoch, shard, position in the epoch's order of that shard


class Leases:
    """Stretches in the order in which they are to be consumed.

    ``generation`` grows whenever they are all dropped: what was taken before is no longer this peer's.
    """

    def __init__(self) -> None:
        self.count = 0
        self.end: LeaseEnd | None = None  # the agent has nothing more for now
        self.generation = 0
        self._stretches: deque[tuple[int, int, int, int]] = deque()  # epoch, shard, lo, hi

    def add(self, lease: Lease) -> None:
        """What the agent handed out."""
        for braid in lease.braids:
            length = braid[0][2] - braid[0][1]
            rows = 1 if len(braid) == 1 else length  # one stretch alone goes in one piece
            for row in range(0, length, length // rows):
                self._stretches.extend(
                    (lease.epoch, shard, lo + row, lo + row + length // rows) for shard, lo, _ in braid
                )
            self.count += length * len(braid)

    def take(self, count: int) -> list[Position]:
        """The next ``count`` positions, fewer if there are no more."""
        taken: list[Position] = []
        while self._stretches and len(taken) < count:
            epoch, shard, lo, hi = self._stretches.popleft()
            cut = min(hi, lo + count - len(taken))
            taken.extend((epoch, shard, position) for position in range(lo, cut))
            if cut < hi:
                self._stretches.appendleft((epoch, shard, cut, hi))
        self.count -= len(taken)
        return taken

    def clear(self) -> None:
        """They are others' now."""
        self._stretches.clear()
        self.count = 0
        self.end = None
        self.generation += 1
