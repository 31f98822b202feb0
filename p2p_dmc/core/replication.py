"""What one peer does so that every shard has its copies: what it is to keep, fetch and give up, and what it waits for.

`Plan` is who is to keep what at one moment: placement, but for peers without room, in whose stead the next ones of the
placement *without* them keep what they lack. `Duty` is what follows for one peer over time. Both are pure; each peer
computes its own part from what the others say, nobody assigns anything.

Bytes wait out flapping shard by shard: a shard is fetched when it has been this peer's to keep for a moment, given up
when it has not been for longer. So a peer that comes and goes puts off what concerns its own shards and nobody else's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from p2p_dmc.core.placement import Placement
from p2p_dmc.core.shard_set import Mask, ShardSet, union

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """What one peer says of its copies of one data set."""

    verified: ShardSet
    """Whose bytes had the right digest in this life of the peer, and whose files were not written to since."""
    unverified: ShardSet
    """Whose files are there, and were not looked at yet: not lost, and not to be relied on."""
    full: bool
    """It has no room for what it lacks."""
    there: ShardSet = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "there", self.verified | self.unverified)


class Plan:
    """Who is to keep what.

    ``full``: peers without room, each with what it holds all the same. A pure function of these two; ``before``, a plan
    for the same shards, spares work.
    """

    __slots__ = ("_full", "_spare", "placed")

    def __init__(self, placed: Placement, full: Mapping[str, ShardSet], before: Plan | None = None) -> None:
        self.placed = placed
        self._full = {p.peer_id: full[p.peer_id] for p in placed.peers if p.peer_id in full}
        with_room = [p for p in placed.peers if p.peer_id not in self._full]
        nearest: Placement = placed if before is None else before._spare
        self._spare: Placement = nearest.with_peers(with_room) if self._full else placed

    def is_of(self, placed: Placement, full: Mapping[str, ShardSet]) -> bool:
        """Whether these two would give this plan."""
        listed = {p.peer_id: full[p.peer_id] for p in placed.peers if p.peer_id in full}
        return self.placed is placed and self._full == listed

    def keepers(self, shard: int) -> tuple[str, ...]:
        """The peers that are to keep a shard: R, or fewer where there are no more with room for it."""
        placed = self.placed.holders(shard)
        kept = [p for p in placed if p not in self._full or shard in self._full[p]]
        if len(kept) < len(placed):
            domain_of = {p.peer_id: p.domain or p.peer_id for p in self.placed.peers}
            used = {domain_of[p] for p in kept}
            spare = [p for p in self._spare.holders(shard) if p not in kept]
            spare.sort(key=lambda p: domain_of[p] in used)  # stable: else in the placement's order
            kept += spare[: len(placed) - len(kept)]
        return tuple(kept)

    def ranks_of(self, peer_id: str) -> npt.NDArray[np.int32]:
        """Of shape (shards,): the peer's place among the keepers, -1 where it is none."""
        ranks = self.placed.ranks_of(peer_id)
        if peer_id in self._full:
            return np.where(self._full[peer_id].mask(), ranks, np.int32(-1)).astype(np.int32)
        if self._full:
            for shard in np.flatnonzero(self._passed_on() & (self._spare.ranks_of(peer_id) >= 0)).tolist():
                keepers = self.keepers(shard)
                ranks[shard] = keepers.index(peer_id) if peer_id in keepers else -1
        return ranks

    def _passed_on(self) -> Mask:
        """Shards that one of their holders has no room for."""
        lacked = np.zeros(len(self.placed), dtype=bool)
        for other, held in self._full.items():
            lacked |= (self.placed.ranks_of(other) >= 0) & ~held.mask()
        return lacked

    def lacking(self, there: Mapping[str, ShardSet]) -> I64:
        """Of shape (shards,): how many of its keepers do not have each shard; ``there``: what peers have."""
        peers, shards = self.placed.peers, len(self.placed)
        total = np.zeros(shards, dtype=np.int64)
        if not peers:
            return total
        nothing = ShardSet.of([], shards)
        bits = np.stack([there.get(p.peer_id, nothing).bits for p in peers])
        index = np.arange(shards)
        for columns in self.placed.columns():
            total += 1 - (bits[columns, index >> 3] >> (7 - (index & 7)).astype(np.uint8) & 1)
        for shard in np.flatnonzero(self._passed_on()).tolist() if self._full else ():
            total[shard] = sum(shard not in there.get(p, nothing) for p in self.keepers(shard))
        return total


class Duty:
    """What one peer is to keep of one data set, and for how long that has been so."""

    __slots__ = ("_since_ms", "ranks")

    def __init__(self, shards: int) -> None:
        self.ranks = np.full(shards, -1, dtype=np.int32)
        self._since_ms: I64 | None = None

    def follow(self, ranks: npt.NDArray[np.int32], now_ms: int) -> None:
        """The peer's places among the keepers, as they are now."""
        if self._since_ms is None:
            self._since_ms = np.full(len(ranks), now_ms, dtype=np.int64)
        else:
            self._since_ms[(ranks >= 0) != (self.ranks >= 0)] = now_ms
        self.ranks = ranks

    def to_keep(self, still_ms: int, now_ms: int) -> Mask:
        """Shards that have been this peer's to keep for ``still_ms``."""
        return (self.ranks >= 0) & self._settled(still_ms, now_ms)

    def to_give_up(self, still_ms: int, now_ms: int) -> Mask:
        """Shards that have not been this peer's to keep for ``still_ms``."""
        return (self.ranks < 0) & self._settled(still_ms, now_ms)

    def _settled(self, still_ms: int, now_ms: int) -> Mask:
        if self._since_ms is None:
            return np.zeros(len(self.ranks), dtype=bool)
        return now_ms - self._since_ms >= still_ms


def counted(sets: list[ShardSet], shards: int) -> I64:
    """Of shape (shards,): in how many of the sets each shard is."""
    total = np.zeros(shards, dtype=np.int64)
    for one in sets:
        total += one.mask()
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How a data set stands, as one peer sees it. Numbers of shards, but ``in_flight``, of copies."""

    wanted: int
    """Copies of each shard: R, or as many as there are peers that stay."""
    under_replicated: int
    """Shards with fewer verified copies on peers that stay."""
    in_flight: int
    """Copies that a peer with room is to keep and has not: being fetched, or about to be."""
    unverified: int
    """Shards of which no verified copy is there, but a file that was not looked at yet."""
    lost: int
    """Shards of which no live peer has anything."""


def tally(plan: Plan, copies: Mapping[str, Copies], replicas: int, staying: set[str]) -> Tally:
    """``copies`` of every live peer, this one included; ``staying``: those that placement counts."""
    shards = len(plan.placed)
    kept = counted([c.verified for p, c in copies.items() if p in staying], shards)
    verified = union([c.verified for c in copies.values()], shards).mask()
    there = union([c.there for c in copies.values()], shards).mask()
    wanted = min(replicas, len(staying))
    lacking = plan.lacking({p: c.there for p, c in copies.items()})
    return Tally(
        wanted=wanted,
        under_replicated=int((kept < wanted).sum()),
        in_flight=int(lacking[there].sum()),
        unverified=int((there & ~verified).sum()),
        lost=int((~there).sum()),
    )
