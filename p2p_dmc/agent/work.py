"""What this peer's trainer may consume: leases, cursors and claims within one view's assignment (DESIGN.md section 7).

A lease is the agent's word that these samples are the trainer's. Leased and not yet counted is what a proposal claims;
so the loader hands out nothing between freeze and install, because the agent leases nothing then.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from p2p_dmc.core.agreement_messages import PAYLOAD_MAX_BYTES, Lineage, StateRef, View
from p2p_dmc.core.assignment import Assignment, assign, granted
from p2p_dmc.core.braids import Braid, in_turn, part, size
from p2p_dmc.core.ledger import Ledger, Stretch, common
from p2p_dmc.core.pace import Pace
from p2p_dmc.core.rebalancing import Member, is_due, rebalanced
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.wire import codec

PlainBraid = tuple[tuple[int, int, int], ...]
"""Stretches of one length that are consumed in turn, (shard, lo, hi) each, in epoch order."""

MAX_STRIKES = 64
"""That one member knows of; a view's members bring theirs into its ledger."""
MOST_IN_HAND = 1 << 15
"""Stretches that a trainer has in hand at most: a proposal has room for them beside two bitmaps of a million shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What a trainer had in hand when it died. Told by its agent; counted once however many members repeat it."""

    victim: str
    view_epoch: int
    death: int  # numbers the deaths of one agent's trainers
    epoch: int
    stretches: tuple[tuple[int, int, int], ...]

    @property
    def key(self) -> tuple[str, int, int]:
        return self.victim, self.view_epoch, self.death


@dataclass(frozen=True, slots=True, kw_only=True)
class StrikeList:
    """Strikes on their way to other peers, when a trainer is lost."""

    strikes: tuple[Strike, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalPayload:
    """What a member's proposal carries for the assignment. Fixed at the first word of an attempt."""

    view_epoch: int  # of the last view it stood in: claims of an older one than anybody's are dead
    epoch: int  # data epoch of the claims
    part: int  # of the epoch, in which the assignment was made that the claims are of
    claims: tuple[PlainBraid, ...]
    holdings: bytes  # bitmap of the shards it holds, verified
    reachable: bytes  # bitmap of the shards that it knows somebody to hold, members or not
    speed: int  # samples a second, 0 when unknown
    full: bool  # no room for more shards: it trains on what it holds
    strikes: tuple[Strike, ...]
    counted: tuple[tuple[str, int, int], ...] = ()  # keys of strikes that its ledger has already


def encode_payload(payload: ProposalPayload) -> bytes:
    return codec.pack_value(payload)


def decode_payload(data: bytes) -> ProposalPayload:
    return codec.unpack_value(ProposalPayload, data, PAYLOAD_MAX_BYTES)


def encode_strikes(strikes: Sequence[Strike]) -> bytes:
    return codec.pack_value(StrikeList(strikes=tuple(strikes)))


def decode_strikes(data: bytes) -> tuple[Strike, ...]:
    return codec.unpack_value(StrikeList, data, 1 << 20).strikes


def check_payload(data: bytes, shards: int | None) -> None:
    """Whether a view could be opened with this payload; RemoteProtocolError. ``shards``: of the run's data set."""
    payload = decode_payload(data)
    if min(payload.speed, payload.view_epoch, payload.epoch, payload.part) < 0:
        raise RemoteProtocolError("a payload's number is negative")
    if len(payload.strikes) > MAX_STRIKES:
        raise RemoteProtocolError(f"{len(payload.strikes)} strikes, at most {MAX_STRIKES}")
    if any(len({hi - lo for _, lo, hi in braid}) != 1 for braid in payload.claims):
        raise RemoteProtocolError("a claim's stretches are of different lengths")
    if shards is not None:
        from_bitmap(payload.holdings, shards)
        from_bitmap(payload.reachable, shards)


def bitmap(shards: Container[int], count: int) -> bytes:
    """One bit a shard, numpy.packbits order."""
    return np.packbits(np.fromiter((i in shards for i in range(count)), dtype=bool, count=count)).tobytes()


def from_bitmap(data: bytes, count: int) -> frozenset[int]:
    """RemoteProtocolError when its size does not fit ``count`` shards."""
    if len(data) != (count + 7) // 8:
        raise RemoteProtocolError(f"a bitmap of {len(data)} bytes for {count} shards")
    return frozenset(np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), count=count)).tolist())


class _Held(Container[int]):
    """Shards of a bitmap, and some more; made at once, however many there are."""

    def __init__(self, bits: bytes, more: frozenset[int]) -> None:
        self._bits = bits
        self._more = more

    def __contains__(self, shard: object) -> bool:
        if not isinstance(shard, int):
            return False
        byte, bit = divmod(shard, 8)
        return shard in self._more or (byte < len(self._bits) and bool(self._bits[byte] & (0x80 >> bit)))


def opening_ledger(payloads: Sequence[ProposalPayload], ledger: Ledger, *, skip_lost: bool) -> Ledger:
    """The ledger that a view's first round continues: the start state's, with the strikes that the members bring.

    A pure function of the view and of its start state. ``skip_lost``: shards that no member can reach count as lost.
    """
    if ledger.done:  # a trainer may die with the run's last samples in hand, which are counted
        return ledger
    counted = {key for p in payloads for key in p.counted}  # who was not there brings them again
    fresh = [s for p in payloads for s in p.strikes if s.epoch == ledger.epoch and s.key not in counted]
    strikes = {s.key: s for s in fresh}
    for key in sorted(strikes):
        if ledger.epoch == strikes[key].epoch:
            ledger = ledger.strike(*to_stretches(strikes[key].stretches, ledger))
    if skip_lost:
        lost = unreachable(payloads, ledger)
        ledger = ledger.skip([s for s in ledger.remaining() if s.shard in lost])
    return ledger


def unreachable(payloads: Sequence[ProposalPayload], ledger: Ledger) -> frozenset[int]:
    """Shards that no member knows anybody to hold."""
    known: set[int] = set()
    for payload in payloads:
        known |= _reachable(payload, ledger)
    return frozenset(range(len(ledger.counts))) - known


def _reachable(payload: ProposalPayload, ledger: Ledger) -> frozenset[int]:
    return from_bitmap(payload.reachable, len(ledger.counts))


def to_stretches(plain: Sequence[tuple[int, int, int]], ledger: Ledger) -> tuple[Stretch, ...]:
    """Stretches of this data set; what does not exist in it is left out."""
    return tuple(
        Stretch(shard=s, lo=lo, hi=hi)
        for s, lo, hi in plain
        if 0 <= s < len(ledger.counts) and 0 <= lo < hi <= ledger.counts[s]
    )


def plain(braids: Sequence[Braid]) -> tuple[PlainBraid, ...]:
    """As messages and journals have them."""
    return tuple(tuple((s.shard, s.lo, s.hi) for s in braid) for braid in braids)


def to_braids(plain: Sequence[PlainBraid], ledger: Ledger) -> tuple[Braid, ...]:
    """Braids of this data set; what does not exist in it is left out."""
    there = (to_stretches(braid, ledger) for braid in plain)
    return tuple(braid for braid in there if braid)


def valid_claims(
    payloads: Sequence[ProposalPayload], voting: Sequence[bool], ledger: Ledger
) -> tuple[tuple[Braid, ...], ...]:
    """Claims that the new view honours: voters', of this part of this epoch, from the newest view that anybody here
    stood in. Whoever did not complete a round after which the rest was shared out anew has claims of before that:
    what of it the round did not count is somebody's now, who may have begun with it.
    """
    newest = max(p.view_epoch for p in payloads)
    return tuple(
        to_braids(p.claims, ledger) if votes and p.view_epoch == newest and of_now(p, ledger) else ()
        for p, votes in zip(payloads, voting, strict=True)
    )


def of_now(payload: ProposalPayload, ledger: Ledger) -> bool:
    """Whether a member's claims are of the assignment that the ledger's holders go by."""
    return (payload.epoch, payload.part) == (ledger.epoch, ledger.part)


def gave_up_claims(
    payloads: Sequence[ProposalPayload], voting: Sequence[bool], me: int, ledger: Ledger
) -> bool:
    """Whether samples that this member has in hand are skipped or others': its trainer begins anew from the anchor.

    Two members may claim the same ones: some may have installed one view and some another of the same number.
    """
    mine = payloads[me]
    if not of_now(mine, ledger):  # none of them is honoured
        return bool(mine.claims)
    claims = to_braids(mine.claims, ledger)
    if any(common(((s.lo, s.hi),), ledger.skipped[s.shard]) for braid in claims for s in braid):
        return True
    alone, beside_others = granted(ledger, [claims]), granted(ledger, valid_claims(payloads, voting, ledger))
    return size(alone[0][0]) != size(beside_others[0][me])


class Hand(NamedTuple):
    """What a trainer has in hand, leased and counted by no complete round; and of which assignment."""

    epoch: int
    part: int
    braids: tuple[Braid, ...]


class InFlight(NamedTuple):
    """The round whose header this peer said, and how many samples it was to count of its."""

    lineage: Lineage
    samples: int


def in_start(in_flight: InFlight | None, start: StateRef, payload: ProposalPayload, ledger: Ledger) -> bool:
    """Whether the start state is that round, completed by others, and the samples are in it.

    Its number does not tell: where nobody but one side knows a view, the other may have another one of that number.
    ``payload``: this peer's, whose claims begin with those samples. ``ledger``: that of the start state.
    """
    if in_flight is None or in_flight.lineage != start.lineage:
        return False
    said = part(to_braids(payload.claims, ledger), 0, in_flight.samples)
    return not any(common(((s.lo, s.hi),), ledger.open_positions(s.shard)) for braid in said for s in braid)


class Work:
    """One assignment, how far each member's counted cursor is, and how far this member's lease."""

    def __init__(
        self,
        assignment: Assignment,
        me: int,
        leased: int,
        lost: frozenset[int] = frozenset(),
        reachable: frozenset[int] = frozenset(),
    ) -> None:
        self.assignment = assignment
        self.lost = lost
        """Shards that no member can reach: left out."""
        self.reachable = reachable
        """Those that this member knew somebody to hold, as it said for this view."""
        self.me = me
        self.cursors = [0] * len(assignment.lists)
        self.trained: tuple[frozenset[int], ...] = (frozenset(),) * len(assignment.lists)
        """Shards that each member has trained on since the view stands: it has them on disk."""
        self.leased = leased
        """Invariant: cursors[me] <= leased <= length of my list."""

    @classmethod
    def for_view(cls, view: View, me: int, ledger: Ledger, *, keep_leases: bool) -> Work:
        """The assignment is a function of the view and of the ledger that it starts from: the same on every member."""
        payloads = [decode_payload(p) for p in view.payloads]
        voting = voters_of(view)
        claims = valid_claims(payloads, voting, ledger)
        assignment = _assign(payloads, voting, ledger, [p.speed for p in payloads], claims)
        kept = size(granted(ledger, claims)[0][me]) if keep_leases else 0
        return cls(assignment, me, kept, unreachable(payloads, ledger), _reachable(payloads[me], ledger))

    @classmethod
    def for_epoch(cls, view: View, me: int, ledger: Ledger, speeds: Sequence[int]) -> Work:
        """An epoch's end is no view change: the next assignment comes from the same view, nothing is claimed."""
        payloads = [decode_payload(p) for p in view.payloads]
        assignment = _assign(payloads, voters_of(view), ledger, speeds, [()] * len(payloads))
        return cls(assignment, me, 0, unreachable(payloads, ledger), _reachable(payloads[me], ledger))

    def rebalanced(
        self, view: View, weights: Sequence[int], paces: Sequence[Pace], *, drop_leases: bool
    ) -> Work | None:
        """For the rest of the epoch after a complete round that counts ``weights``; None to go on with this.

        A pure function of the view and its rounds' headers, but for my lease, which I keep if it is still mine.
        """
        lists = self.assignment.lists
        voters = [i for i, votes in enumerate(voters_of(view)) if votes]
        cursors = [cursor + weight for cursor, weight in zip(self.cursors, weights, strict=True)]
        rests = [self.assignment.length(i) - cursors[i] for i in voters]
        if not is_due(rests, [paces[i].speed for i in voters], [paces[i].batch for i in voters]):
            return None
        payloads = {i: decode_payload(view.payloads[i]) for i in voters}
        trained = self._trained(weights)
        found = rebalanced(
            [
                Member(
                    rest=self.assignment.consumed(i, cursors[i], self.assignment.length(i)),
                    held=_Held(payloads[i].holdings, trained[i]),
                    speed=paces[i].speed,
                    batch=paces[i].batch,
                    full=payloads[i].full,
                )
                for i in voters
            ]
        )
        if found is None:
            return None
        new = dict(zip(voters, found, strict=True))
        shared = Assignment(
            epoch=self.assignment.epoch, lists=tuple(new.get(i, ()) for i in range(len(lists)))
        )
        work = Work(shared, self.me, 0, self.lost, self.reachable)
        work.trained = trained
        mine = min(cursors[self.me], self.leased)
        in_hand = self.assignment.consumed(self.me, mine, self.leased)
        if not drop_leases and size(in_hand) <= shared.length(self.me):
            still_mine = shared.consumed(self.me, 0, size(in_hand))
            work.leased = size(in_hand) if list(in_turn(still_mine)) == list(in_turn(in_hand)) else 0
        return work

    def _trained(self, weights: Sequence[int]) -> tuple[frozenset[int], ...]:
        return tuple(
            before.union(s.shard for braid in self.next_of(i, weight) for s in braid)
            for i, (before, weight) in enumerate(zip(self.trained, weights, strict=True))
        )

    @property
    def busy(self) -> tuple[bool, ...]:
        """Whose lists go on beyond what has been counted; the same on every member."""
        return tuple(cursor < self.assignment.length(i) for i, cursor in enumerate(self.cursors))

    @property
    def left(self) -> bool:
        """Whether anybody's does."""
        return any(self.busy)

    def lease(self, samples: int) -> tuple[Braid, ...]:
        """The next of my list for my trainer, at most ``samples``; empty at its end."""
        braids = self.peek(samples)
        self.leased += size(braids)
        return braids

    def peek(self, samples: int) -> tuple[Braid, ...]:
        """What the next lease of so many samples would hand out: nothing while too many stretches are in hand."""
        end = min(self.leased + samples, self.assignment.length(self.me))
        if end <= self.leased:
            return ()
        braids = self.assignment.consumed(self.me, self.leased, end)
        room = MOST_IN_HAND - sum(map(len, self.claims()))
        fitting = sum(used <= room for used in accumulate(map(len, braids)))
        return braids[:fitting]

    def claims(self) -> tuple[Braid, ...]:
        """Leased, not counted."""
        cursor = self.cursors[self.me]
        return self.assignment.consumed(self.me, cursor, self.leased) if self.leased > cursor else ()

    def next_of(self, member: int, samples: int) -> tuple[Braid, ...]:
        """The ``samples`` that follow a member's counted cursor; RemoteProtocolError beyond the end of its list."""
        cursor = self.cursors[member]
        if cursor + samples > self.assignment.length(member):
            raise RemoteProtocolError(f"member {member} says it consumed more than it was given")
        return self.assignment.consumed(member, cursor, cursor + samples) if samples else ()

    def advance(self, consumed: Sequence[int]) -> None:
        """A complete round counted so many samples of each member."""
        self.trained = self._trained(consumed)
        for member, samples in enumerate(consumed):
            self.cursors[member] += samples
        if self.cursors[self.me] > self.leased:
            raise AssertionError(f"counted {self.cursors[self.me]} samples of {self.leased} leased ones")

    def drop_leases(self) -> None:
        """The trainer forgot what it had in hand; it is handed out again."""
        self.leased = self.cursors[self.me]


def voters_of(view: View) -> tuple[bool, ...]:
    """Of each member, in ring order, whether it is one."""
    return tuple(member in view.voters for member in view.members)


def _assign(
    payloads: Sequence[ProposalPayload],
    voting: Sequence[bool],
    ledger: Ledger,
    speeds: Sequence[int],
    claims: Sequence[tuple[Braid, ...]],
) -> Assignment:
    """Among the voters: a learner has nothing to train on."""
    voters = [i for i, votes in enumerate(voting) if votes]
    shared = assign(
        ledger,
        len(voters),
        [from_bitmap(payloads[i].holdings, len(ledger.counts)) for i in voters],
        [speeds[i] for i in voters],
        [claims[i] for i in voters],
        unreachable(payloads, ledger),
        {place for place, i in enumerate(voters) if payloads[i].full},
    )
    lists: list[tuple[Braid, ...]] = [()] * len(payloads)
    for place, i in enumerate(voters):
        lists[i] = shared.lists[place]
    return Assignment(epoch=shared.epoch, lists=tuple(lists))
