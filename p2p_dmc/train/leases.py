"""Samples that the agent has handed out and that no batch has taken yet, and those that it means to hand out next."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from p2p_dmc.wire.trainer_messages import Lease, LeaseEnd

Piece = tuple[int, int, int]  # shard, lo, hi: positions in the epoch's order of that shard


@dataclass(frozen=True, slots=True)
class Batch:
    """Which samples make a batch. Equal batches have equal samples, whatever view or lease they came from."""

    epoch: int
    pieces: tuple[Piece, ...]
    size: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(hi - lo for _, lo, hi in self.pieces))

    def __len__(self) -> int:
        return self.size

    def __reduce__(self) -> tuple[Any, ...]:
        """Small and quick: each batch goes to a worker so."""
        return _unpacked, (self.epoch, array("q", [n for piece in self.pieces for n in piece]).tobytes())


def _unpacked(epoch: int, packed: bytes) -> Batch:
    numbers = iter(array("q", packed))
    return Batch(epoch, tuple(zip(numbers, numbers, numbers, strict=True)))


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
        self._stretches: deque[tuple[int, Piece]] = deque()  # with their epoch
        self._ahead: tuple[tuple[int, Piece], ...] = ()
        self._ahead_count = 0
        self._uncut: deque[tuple[int, Piece]] | None = (
            None  # what follows the planned batches; None: plan anew
        )
        self._planned: deque[Batch] = deque()

    def add(self, lease: Lease) -> None:
        """What the agent handed out."""
        for piece in _in_turn(lease.braids):
            self._stretches.append((lease.epoch, piece))
            self.count += piece[2] - piece[1]
        self._ahead = tuple((lease.epoch, piece) for piece in _in_turn(lease.ahead))
        self._ahead_count = sum(hi - lo for _, (_, lo, hi) in self._ahead)
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
            self._uncut = deque([*self._stretches, *self._ahead])
        left = self.count + self._ahead_count - sum(map(len, self._planned))
        is_all = self.end is not None or self.left == self._ahead_count
        while len(self._planned) < batches and left >= (1 if is_all else batch_size):
            self._planned.append(_cut(self._uncut, batch_size))
            left -= len(self._planned[-1])
        return self._planned

    def take(self, batch: Batch) -> None:
        """The planned batch that comes first was handed out."""
        if self._planned.popleft() != batch or len(batch) > self.count:
            raise RuntimeError(f"{batch} was handed out, which is not what is leased")
        self.count -= len(batch)
        left = len(batch)
        while left:
            epoch, (shard, lo, hi) = self._stretches.popleft()
            if hi - lo > left:
                self._stretches.appendleft((epoch, (shard, lo + left, hi)))
            left -= min(left, hi - lo)

    def clear(self) -> None:
        """They are others' now."""
        self._stretches.clear()
        self._ahead, self._ahead_count, self._uncut = (), 0, None
        self.count = 0
        self.end = self.left = None
        self.generation += 1


def _in_turn(braids: Iterable[Sequence[Piece]]) -> Iterator[Piece]:
    """What is consumed first comes first; one stretch alone goes in one piece."""
    for braid in braids:
        length = braid[0][2] - braid[0][1]
        if len(braid) == 1:
            yield braid[0]
        else:
            for row in range(length):
                for shard, lo, _ in braid:
                    yield shard, lo + row, lo + row + 1


def _cut(stretches: deque[tuple[int, Piece]], count: int) -> Batch:
    """Take the first ``count`` positions away, fewer if the epoch or the stretches end; at least one is there."""
    epoch = stretches[0][0]
    pieces: list[Piece] = []
    while count and stretches and stretches[0][0] == epoch:
        _, (shard, lo, hi) = stretches.popleft()
        cut = min(hi, lo + count)
        count -= cut - lo
        if pieces and pieces[-1][0] == shard and pieces[-1][2] == lo:
            lo = pieces.pop()[1]
        pieces.append((shard, lo, cut))
        if cut < hi:
            stretches.appendleft((epoch, (shard, cut, hi)))
    return Batch(epoch, tuple(pieces))
