"""Sharing out the rest of an epoch anew while a view stands, so that all are done at the same time (DESIGN section 9).

A pure function of what everybody knows after a complete round: what each member still has, how fast it was, which
shards it has. Whoever has more left than its share gives of it what it would train on last; what it keeps, it keeps in
its order, so that hardly anything that was leased or decoded ahead is lost. Shards go to those that have them; one is
fetched only by a member that would idle longer than fetching takes.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from p2p_dmc.core.assignment import shares, supposed
from p2p_dmc.core.braids import INTERLEAVED, Braid, in_lanes, part, size, weave, without
from p2p_dmc.core.ledger import Intervals, Stretch, union

__all__ = ["Member", "is_due", "rebalanced"]

SLACK = 8
"""A member may have one part in so many more left than its share: its speed is not known any better."""
FETCH_MS = 500
"""A shard of 64 MiB takes about as long on a link of 1 Gbit/s; and it is 5 % of an epoch of ten seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One that trains."""

    rest: tuple[Braid, ...]
    """What it has not been counted for yet, in its order."""
    held: Container[int]
    """Shards that it has on disk, for all that everybody knows."""
    speed: int
    """Samples a second, 0 when unknown."""
    batch: int
    """Samples of a local step: less is not worth giving."""
    full: bool
    """It can fetch nothing."""


def is_due(rests: Sequence[int], speeds: Sequence[int], batches: Sequence[int]) -> bool:
    """Whether somebody has enough more left than its share: samples, samples a second, samples of a local step."""
    due = shares(sum(rests), speeds)
    return any(
        rest - share > max(batch, rest // SLACK)
        for rest, share, batch in zip(rests, due, batches, strict=True)
    )


def rebalanced(members: Sequence[Member], lanes: int = INTERLEAVED) -> tuple[tuple[Braid, ...], ...] | None:
    """Everybody's list from here on; None when nobody has enough too much, or nobody can take it."""
    rests = [size(member.rest) for member in members]
    speeds = [member.speed for member in members]
    if not is_due(rests, speeds, [member.batch for member in members]):
        return None
    due = shares(sum(rests), speeds)
    over = [rest - share for rest, share in zip(rests, due, strict=True)]
    moves = _Moves(members, [max(0, -more) for more in over])
    for giver in sorted(range(len(members)), key=lambda i: (-over[i], i)):
        moves.give(giver, max(0, over[giver]))
    if not any(moves.taken):
        return None
    return tuple(
        (*without(member.rest, gone), *weave(taken, lanes))
        for member, gone, taken in zip(members, moves.gone, moves.taken, strict=True)
    )


class _Moves:
    """What goes from whom to whom."""

    def __init__(self, members: Sequence[Member], room: list[int]) -> None:
        self._members = members
        self._room = room
        """Samples that each member may take."""
        speeds = supposed([member.speed for member in members])
        self._worth = [-(-FETCH_MS * speed // 1000) for speed in speeds]
        """With room for so many samples it would idle longer than it takes to fetch a shard."""
        self.gone: list[dict[int, Intervals]] = [{} for _ in members]
        self.taken: list[list[Stretch]] = [[] for _ in members]

    def give(self, giver: int, samples: int) -> None:
        """So many of a member's samples to who has room.

        To holders first the end of its order, so that it keeps what it has leased, then what else they hold. What is
        fetched are its last stretches whole, so that it is few shards.
        """
        rest = self._members[giver].rest
        keeps = size(rest) - samples
        for pieces in (part(rest, keeps, size(rest)), part(rest, 0, keeps)):
            samples -= self._hand_over(giver, in_lanes(pieces)[::-1], samples, fetching=False)
        left = without(rest, self.gone[giver])
        self._hand_over(giver, in_lanes(left)[::-1], samples, fetching=True)

    def _hand_over(self, giver: int, pieces: Sequence[Stretch], samples: int, *, fetching: bool) -> int:
        """Of these pieces so many samples, the ends first; how many went."""
        went = 0
        for piece in pieces:
            lo, hi = piece.lo, piece.hi
            while lo < hi and went < samples:
                taker = self._taker(piece.shard, fetching)
                if taker is None:
                    break
                cut = hi - min(hi - lo, self._room[taker], samples - went)
                self.taken[taker].append(Stretch(shard=piece.shard, lo=cut, hi=hi))
                gone = self.gone[giver]
                gone[piece.shard] = union(gone.get(piece.shard, ()), ((cut, hi),))
                self._room[taker] -= hi - cut
                went, hi = went + hi - cut, cut
        return went

    def _taker(self, shard: int, fetching: bool) -> int | None:
        """Who takes a piece of this shard: of those that may, the one with the most room."""
        able = [
            i
            for i, member in enumerate(self._members)
            if self._room[i]
            and (shard in member.held or (fetching and not member.full and self._room[i] >= self._worth[i]))
        ]
        return max(able, key=lambda i: (self._room[i], -i), default=None)
