"""Samples that the agent has handed out and that no batch has taken yet, and those that it means to hand out next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from p2p_dmc.core.braids import cuts
from p2p_dmc.wire.trainer_messages import Lease, LeaseEnd

Piece = tuple[int, int, int]  # shard, lo, hi: positions in the epoch's order of that shard
PlainBraid = tuple[Piece, ...]  # of one length, consumed in turn


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Which samples make a batch. Equal batches have the same samples in the same order, whatever view or lease they
    came from, and however that cut them into braids.
    """

    epoch: int
    braids: tuple[PlainBraid, ...]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(map(_size, self.braids)))

    def __len__(self) -> int:
        return self.size

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The same without turns, neighbours joined: one way to say it for each order of samples."""
        pieces: list[Piece] = []
        for braid in self.braids:
            for row in range(braid[0][2] - braid[0][1] if len(braid) > 1 else 1):
                for shard, lo, hi in braid:
                    first, last = (lo + row, lo + row + 1) if len(braid) > 1 else (lo, hi)
                    if pieces and pieces[-1][0] == shard and pieces[-1][2] == first:
                        first = pieces.pop()[1]
                    pieces.append((shard, first, last))
        return tuple(pieces)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Batch):
            return NotImplemented
        if (self.epoch, self.size) != (other.epoch, other.size):
            return False
        return self.braids == other.braids or self.pieces == other.pieces

    def __hash__(self) -> int:
        return hash((self.epoch, self.pieces))

    def __reduce__(self) -> tuple[Any, ...]:
        """Small and quick: each batch goes to a worker so."""
        return Batch, (self.epoch, self.braids)


class Leases:
    """Stretches in the order in which they are to be consumed.

    ``generation`` grows whenever they are all dropped: what was taken before is no longer this peer's.
    """

    def __init__(self) -> None:
        self.count = 0
        self.end: LeaseEnd | None = None  # the agent has nothing more for now
        self._epoch = 0  # of the last lease
        self.left: int | None = None  # samples of that epoch still to be leased; None: not known
        self.generation = 0
        self._leased = _Line()
        self._ahead: tuple[tuple[int, PlainBraid], ...] = ()  # with their epoch
        self._ahead_count = 0
        self._uncut: _Line | None = None  # what follows the planned batches; None: plan anew
        self._planned: deque[Batch] = deque()
        self._planned_count = 0

    def add(self, lease: Lease) -> None:
        """What the agent handed out."""
        self._leased.braids += [(lease.epoch, braid) for braid in lease.braids]
        self.count += sum(map(_size, lease.braids))
        self._ahead = tuple((lease.epoch, braid) for braid in lease.ahead)
        self._ahead_count = sum(map(_size, lease.ahead))
        self._epoch, self.left = lease.epoch, lease.left
        self._uncut = None

    def foreseen(self, epoch: int) -> int | None:
        """Samples of that epoch that this peer is still to consume, as far as the agent has said."""
        return self.count + self.left if self.left is not None and self._epoch == epoch else None

    def stop(self, end: LeaseEnd) -> None:
        """The agent has nothing more for now: what was to come next is not to be relied on."""
        self.end = end
        self._ahead, self._ahead_count, self._uncut = (), 0, None

    def plan(self, batch_size: int, batches: int) -> Sequence[Batch]:
        """The next batches, as many if so many are known: those that are leased, then those to be expected.

        Only the first is sure to be handed out as it is, and only if ``batch_size`` samples are leased or the agent
        has no more. A short one is planned when it is known to be the last.
        """
        if self._uncut is None:
            self._planned.clear()
            self._planned_count = 0
            self._uncut = _Line((*self._leased.braids, *self._ahead), self._leased.at)
        if len(self._planned) < batches:
            left = self.count + self._ahead_count - self._planned_count
            is_all = self.end is not None or self.left == self._ahead_count
            while len(self._planned) < batches and left >= (1 if is_all else batch_size):
                batch = self._uncut.cut(batch_size)
                self._planned.append(batch)
                self._planned_count += len(batch)
                left -= len(batch)
        return self._planned

    def take(self, batch: Batch) -> None:
        """The planned batch that comes first was handed out."""
        if self._planned.popleft() != batch or len(batch) > self.count:
            raise RuntimeError(f"{batch} was handed out, which is not what is leased")
        self._planned_count -= len(batch)
        self.count -= len(batch)
        self._leased.skip(len(batch))

    def clear(self) -> None:
        """They are others' now."""
        self._leased = _Line()
        self._ahead, self._ahead_count, self._uncut = (), 0, None
        self.count = 0
        self.end = self.left = None
        self.generation += 1


class _Line:
    """Braids one after the other, each with its epoch; the first ``at`` samples of the first one are gone."""

    def __init__(self, braids: Iterable[tuple[int, PlainBraid]] = (), at: int = 0) -> None:
        self.braids = deque(braids)
        self.at = at

    def cut(self, count: int) -> Batch:
        """Take the first ``count`` samples away, fewer if the epoch or the line ends; at least one is there."""
        epoch = self.braids[0][0]
        taken: list[PlainBraid] = []
        while count and self.braids and self.braids[0][0] == epoch:
            braid = self.braids[0][1]
            end = min(_size(braid), self.at + count)
            taken += _part(braid, self.at, end)
            count -= end - self.at
            self._advance(end)
        return Batch(epoch, tuple(taken))

    def skip(self, count: int) -> None:
        """Take so many away, which are there."""
        while count:
            end = min(_size(self.braids[0][1]), self.at + count)
            count -= end - self.at
            self._advance(end)

    def _advance(self, end: int) -> None:
        self.at = end
        if end == _size(self.braids[0][1]):
            self.braids.popleft()
            self.at = 0


def _size(braid: PlainBraid) -> int:
    return len(braid) * (braid[0][2] - braid[0][1])


def _part(braid: PlainBraid, lo: int, hi: int) -> list[PlainBraid]:
    """Samples ``lo`` to ``hi`` of it, at least one."""
    return [_rows(braid[cut], first, last) for cut, first, last in cuts(len(braid), lo, hi)]


def _rows(braid: PlainBraid, first: int, last: int) -> PlainBraid:
    return tuple([(shard, lo + first, lo + last) for shard, lo, _ in braid])
