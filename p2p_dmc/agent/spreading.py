"""Which range of which shard is asked of whom next. No socket, no file, no clock, no task: `fetching` does the rest.

A shard is cut into pieces, sets of pieces are the bits of an integer. Whoever holds a shard can be asked for any of
it; a peer that is receiving it can be asked for what it has. A source is asked for so much at once as it answers within
a moment, so each gives what its link allows, and a fast one takes what a slow one has not been asked for yet.

Peers that receive the same shard at the same time begin at places of their own: its blocks belong to them in turn, in
the order in which HRW ranks them. Each asks a holder first for its own blocks, and the other receivers for theirs as
they get them; so a lone holder sends each byte about once, and nobody coordinates that. Only who has nothing else to
ask for asks a holder for another's blocks, after a while, from the back, and for one range at a time: while the holder
sends those the others wait for what they need of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from p2p_dmc.core.pledges import Key

WINDOW_START_BYTES, WINDOW_MOST_BYTES = 256 << 10, 8 << 20
QUICK_S, SLOW_S = 0.1, 0.4
"""A source is asked for more at once while ranges come back within the one, and for less when they take the other."""
WINDOW_RANGES = 2
"""A window holds so many ranges: one is on its way while another is written."""
GENTLE_BYTES = 1 << 20
"""Where a run trains no source is asked for more at once of what nobody waits for: it would be on its way, and in the
way, when the run's next round begins to be averaged."""
PATIENCE_S, ACTIVE_S = 2.0, 2.0
"""Blocks of other receivers are left to them for so long, while one of them has told so lately that it has some."""
OVERDUE_S, OVERDUE_TIMES = 0.25, 3.0
"""A range that is outstanding for so long, and so many times longer than an idle source takes for one, is asked of
that one too: the first answer wins."""


@dataclass(eq=False, slots=True)
class Ask:
    """One range, asked of one source."""

    peer_id: str
    key: Key
    pieces: int
    offset: int
    size: int
    at_s: float


@dataclass(slots=True)
class Source:
    """A peer that is asked for ranges, over all shards."""

    window_bytes: int = WINDOW_START_BYTES
    asked_bytes: int = 0
    range_s: float = 0.0  # what one range takes, lately

    def answered(self, size: int, seconds: float, piece_bytes: int) -> None:
        """It sent a range."""
        self.range_s = seconds if not self.range_s else 0.75 * self.range_s + 0.25 * seconds
        if seconds < QUICK_S:
            self.window_bytes = min(self.window_bytes + size, WINDOW_MOST_BYTES)
        elif seconds > SLOW_S:
            self.window_bytes = max(self.window_bytes - size // 2, piece_bytes)


@dataclass(eq=False, slots=True)
class ShardPlan:
    """One shard that is being fetched. ``block_pieces``: so many in a row belong to one receiver."""

    key: Key
    size_bytes: int
    piece_bytes: int
    urgent: bool
    free: int = 0
    """Pieces that nobody has been asked for."""
    done: int = 0
    own: int = -1
    """Pieces of the blocks that belong to this peer."""
    sharers: frozenset[str] = frozenset()
    """Other peers that blocks belong to."""
    own_asked_s: float | None = None
    """Since when no piece of its own was left to ask for."""
    holders: frozenset[str] = frozenset()
    receivers: dict[str, int] = field(default_factory=dict)
    """Pieces that peers have which receive the shard, too."""
    lacking: set[str] = field(default_factory=set)
    """Sources that failed at this shard: they are not asked again."""
    asks: list[Ask] = field(default_factory=list)
    given: dict[str, int] = field(default_factory=dict)
    """Pieces that came from each source."""

    @classmethod
    def of(
        cls,
        key: Key,
        size_bytes: int,
        piece_bytes: int,
        written: Sequence[tuple[int, int]],
        *,
        urgent: bool,
    ) -> ShardPlan:
        """A plan to get what is not ``written`` yet, (start, end) each."""
        plan = cls(key=key, size_bytes=size_bytes, piece_bytes=piece_bytes, urgent=urgent)
        plan.done = plan.pieces_within(written)
        plan.free = plan.all & ~plan.done
        return plan

    @property
    def all(self) -> int:
        return (1 << -(-self.size_bytes // self.piece_bytes)) - 1

    @property
    def complete(self) -> bool:
        return self.done == self.all

    def pieces_within(self, ranges: Sequence[tuple[int, int]]) -> int:
        """Pieces that lie in these ranges as a whole."""
        mask = 0
        for start, end in ranges:
            first = -(-max(0, start) // self.piece_bytes)
            stop = (
                -(-self.size_bytes // self.piece_bytes) if end >= self.size_bytes else end // self.piece_bytes
            )
            if first < stop:
                mask |= ((1 << (stop - first)) - 1) << first
        return mask

    def share(self, me: str, receivers: Sequence[str], block_pieces: int) -> None:
        """Which blocks are this peer's own among those who receive the shard, in an order that all agree on."""
        if len(receivers) < 2 or me not in receivers:
            self.own, self.sharers = -1, frozenset()
            return
        self.sharers = frozenset(receivers) - {me}
        block, place = (1 << block_pieces) - 1, receivers.index(me)
        self.own = 0
        for first in range(place * block_pieces, self.all.bit_length(), len(receivers) * block_pieces):
            self.own |= block << first

    def has(self, peer_id: str) -> int:
        """Pieces that this source can be asked for."""
        if peer_id in self.lacking:
            return 0
        return self.all if peer_id in self.holders else self.receivers.get(peer_id, 0)

    def known_elsewhere(self) -> int:
        """Pieces that some other receiver has."""
        mask = 0
        for peer_id, pieces in self.receivers.items():
            if peer_id not in self.lacking:
                mask |= pieces
        return mask

    def stuck(self) -> bool:
        """Nothing is outstanding, and nobody that is known has what is left."""
        hopeful = self.holders - self.lacking or self.free & self.known_elsewhere()
        return not self.complete and not self.asks and not hopeful


class Spreading:
    """All shards that are being fetched, and all sources."""

    def __init__(self, piece_bytes: int, range_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self._range_bytes = max(piece_bytes, range_bytes)
        self.plans: dict[Key, ShardPlan] = {}
        self.sources: dict[str, Source] = {}
        self.active_s: dict[str, float] = {}
        """When a receiver told last that it has some of what it is receiving."""

    @property
    def block_pieces(self) -> int:
        """Pieces in a row that belong to one receiver."""
        return self._range_bytes // self.piece_bytes

    def unasked_bytes(self) -> int:
        """What this peer would ask the holders for before anything else."""
        return sum((plan.free & plan.own).bit_count() for plan in self.plans.values()) * self.piece_bytes

    def background_asked(self) -> int:
        """Outstanding ranges of shards that nobody waits for."""
        return sum(len(plan.asks) for plan in self.plans.values() if not plan.urgent)

    def next_ask(
        self, peer_id: str, now_s: float, *, urgent_only: bool = False, gently: bool = False
    ) -> Ask | None:
        """The next range for a source; None when it has been asked for enough, or for everything it has.

        ``gently``: a run trains here.
        """
        source = self.sources.setdefault(peer_id, Source())
        if source.asked_bytes >= source.window_bytes:
            return None
        plans = [plan for plan in self.plans.values() if plan.urgent]
        if not urgent_only and not (gently and source.asked_bytes >= GENTLE_BYTES):
            plans += [plan for plan in self.plans.values() if not plan.urgent]
        able = [(plan, mask) for plan in plans if (mask := plan.has(peer_id))]
        for plan, pieces in self._choices(able, peer_id, now_s, idle=not source.asked_bytes):
            limit = GENTLE_BYTES if gently and not plan.urgent else WINDOW_MOST_BYTES
            most_bytes = min(min(source.window_bytes, limit) // WINDOW_RANGES, self._range_bytes)
            return self._ask(source, peer_id, plan, pieces, max(1, most_bytes // self.piece_bytes), now_s)
        return self._overdue(source, able, peer_id, now_s)

    def _choices(
        self, able: Sequence[tuple[ShardPlan, int]], peer_id: str, now_s: float, *, idle: bool
    ) -> Iterator[tuple[ShardPlan, int]]:
        """Sets of pieces to begin with, the best first. ``idle``: the source has nothing else to send."""
        for plan, mask in able:
            if peer_id not in plan.holders:
                wanted = plan.free & mask
            else:
                wanted = plan.free & plan.own & ~plan.known_elsewhere()
            if wanted:
                yield plan, wanted
        others = [
            (p, mask) for p, mask in able if p.urgent or (idle and not self._leaves_to_others(p, now_s))
        ]
        for plan, mask in reversed(others):
            wanted = plan.free & mask & ~plan.known_elsewhere()
            if wanted:
                yield plan, _last_run(wanted, self.block_pieces)
        for plan, mask in others:
            if plan.free & mask:
                yield plan, plan.free & mask

    def _leaves_to_others(self, plan: ShardPlan, now_s: float) -> bool:
        """Its own blocks are asked for, and the others may still get theirs."""
        if plan.free & plan.own or plan.own_asked_s is None:
            plan.own_asked_s = now_s
        patient = now_s - plan.own_asked_s < PATIENCE_S
        return patient and any(now_s - self.active_s.get(p, -ACTIVE_S) < ACTIVE_S for p in plan.sharers)

    def _ask(
        self, source: Source, peer_id: str, plan: ShardPlan, pieces: int, most: int, now_s: float
    ) -> Ask:
        first, count = _first_run(pieces, most)
        offset = first * plan.piece_bytes
        size = min(count * plan.piece_bytes, plan.size_bytes - offset)
        mask = ((1 << count) - 1) << first
        plan.free &= ~mask
        return self._note(source, Ask(peer_id, plan.key, mask, offset, size, now_s), plan)

    def _note(self, source: Source, ask: Ask, plan: ShardPlan) -> Ask:
        source.asked_bytes += ask.size
        plan.asks.append(ask)
        return ask

    def _overdue(
        self, source: Source, able: Sequence[tuple[ShardPlan, int]], peer_id: str, now_s: float
    ) -> Ask | None:
        """The range that is outstanding longest, where this source, if it is idle, would be quicker."""
        if source.asked_bytes:
            return None
        patience_s = max(OVERDUE_S, OVERDUE_TIMES * source.range_s)
        late = [
            (ask.at_s, number, ask, plan)
            for number, (plan, mask) in enumerate(able)
            for ask in plan.asks
            if now_s - ask.at_s > patience_s
            and not ask.pieces & ~mask
            and not any(other.peer_id == peer_id and other.pieces & ask.pieces for other in plan.asks)
        ]
        if not late:
            return None
        _, _, ask, plan = min(late, key=lambda one: one[:2])
        again = Ask(peer_id, ask.key, ask.pieces, ask.offset, ask.size, now_s)
        return self._note(source, again, plan)

    def asked_bytes(self, peer_id: str) -> int:
        """What a source has been asked for and has not sent yet."""
        source = self.sources.get(peer_id)
        return source.asked_bytes if source is not None else 0

    def taken(self, ask: Ask) -> tuple[bool, list[Ask]]:
        """A range came. Whether it is news, and asks that are superfluous now."""
        plan = self.plans.get(ask.key)
        if plan is None or not ask.pieces & ~plan.done:
            return False, []
        plan.done |= ask.pieces
        plan.given[ask.peer_id] = plan.given.get(ask.peer_id, 0) | ask.pieces
        return True, [other for other in plan.asks if other is not ask and other.pieces & ask.pieces]

    def answered(self, ask: Ask, now_s: float) -> None:
        """It is in the file, too."""
        self.sources[ask.peer_id].answered(ask.size, now_s - ask.at_s, self.piece_bytes)

    def dropped(self, ask: Ask) -> None:
        """A range is not waited for any more; unless it came, or somebody else is asked for it, it is free again."""
        self.sources[ask.peer_id].asked_bytes -= ask.size
        plan = self.plans.get(ask.key)
        if plan is None or ask not in plan.asks:
            return
        plan.asks.remove(ask)
        asked = 0
        for other in plan.asks:
            asked |= other.pieces
        plan.free |= ask.pieces & ~plan.done & ~asked

    def forget(self, alive: Mapping[str, object]) -> None:
        """Sources that are gone, unless they are still waited for."""
        self.active_s = {p: s for p, s in self.active_s.items() if p in alive}
        for peer_id in [p for p, s in self.sources.items() if p not in alive and not s.asked_bytes]:
            del self.sources[peer_id]


def _first_run(pieces: int, most: int) -> tuple[int, int]:
    """(first, count) of the lowest pieces in a row, at most so many."""
    first = (pieces & -pieces).bit_length() - 1
    rest = pieces >> first
    return first, min(most, (~rest & (rest + 1)).bit_length() - 1)


def _last_run(pieces: int, most: int) -> int:
    """The highest pieces in a row, at most so many."""
    top = pieces.bit_length()
    low = top - 1
    while low > 0 and top - low < most and pieces >> (low - 1) & 1:
        low -= 1
    return ((1 << (top - low)) - 1) << low
