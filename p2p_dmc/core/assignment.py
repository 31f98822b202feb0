"""Who trains on what: a pure function of the ledger and of the view's members (DESIGN section 9).

Every peer computes everyone's assignment, so a cursor ("n samples consumed") is enough to say which samples
it means. A member consumes several of its shards in turn (`core.braids`).

How it balances. Each member's share of the samples is proportional to its speed, to the sample, so all are
expected to finish at the same time. Shards go to their holders, those with the fewest holders first, each to
the holder with the most of its share still free, and are split where a share is full. What is left then (its
holders are busy for the whole epoch) goes to the members that would idle, who fetch it; it comes last in
their lists, which is when it is needed. The holders' part is greedy: an exact flow would now and then save a
fetch and cost a page of code.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast

import msgpack

from p2p_dmc.core.braids import INTERLEAVED, Braid, kept, piece, size, unordered, weave
from p2p_dmc.core.ledger import Intervals, Ledger, Stretch, common, shard_order, subtract, union

__all__ = ["Assignment", "assign", "granted", "shares", "supposed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """For one epoch, what each view member trains on, in the order in which it consumes it."""

    epoch: int
    lists: tuple[tuple[Braid, ...], ...]
    """One list per member, in ring order. Invariant: no sample is in two of them, or twice in one."""
    ends: tuple[tuple[int, ...], ...] = field(init=False, compare=False, repr=False)
    """Per member, how many samples its list has up to the end of each braid."""

    def __post_init__(self) -> None:
        ends = tuple(tuple(accumulate(size([braid]) for braid in braids)) for braids in self.lists)
        object.__setattr__(self, "ends", ends)

    def length(self, member_index: int) -> int:
        """Samples of one member."""
        return self.ends[member_index][-1] if self.ends[member_index] else 0

    def stretches(self, member_index: int) -> tuple[Stretch, ...]:
        """The same samples without their order."""
        return unordered(self.lists[member_index])

    def consumed(self, member_index: int, lo: int, hi: int) -> tuple[Braid, ...]:
        """What the member consumes between cursors `lo` and `hi` (samples); ValueError if it has fewer."""
        if not 0 <= lo <= hi:
            raise ValueError(f"a cursor moves forward: {lo} to {hi}")
        if hi > self.length(member_index):
            there = f"member {member_index} has {self.length(member_index)} samples in epoch {self.epoch}"
            raise ValueError(f"{there}, not {hi}")
        braids, ends = self.lists[member_index], self.ends[member_index]
        pieces: list[Braid] = []
        for i in range(bisect_right(ends, lo), len(braids)):
            start = ends[i - 1] if i else 0
            if start >= hi:
                break
            pieces += piece(braids[i], lo - start, hi - start)
        return tuple(pieces)

    def digest(self) -> bytes:
        """16 bytes that differ when any member's list does."""
        lists = [[[(s.shard, s.lo, s.hi) for s in braid] for braid in braids] for braids in self.lists]
        return hashlib.blake2b(cast(bytes, msgpack.packb((self.epoch, lists))), digest_size=16).digest()


def assign(
    ledger: Ledger,
    members: int,
    holdings: Sequence[Container[int]],
    speeds: Sequence[int],
    claims: Sequence[Sequence[Braid]],
    unavailable: Container[int] = (),
    full: Container[int] = (),
    lanes: int = INTERLEAVED,
) -> Assignment:
    """Hand out what the current epoch still needs: each available sample to exactly one member.

    Per member, in ring order: `holdings`, the shards it has on disk; `speeds`, samples per second (0:
    unknown, taken as the others' median); `claims`, what it has consumed in this epoch and no round has
    counted yet. Claims come first in its list, in the given order, and are no work, so the balance is over
    the rest. Of a claim, samples that the ledger has settled or a lower member has claimed are cut out.
    `unavailable`: shards that nobody has. `full`: members that can fetch nothing; they get what they hold
    only, as long as anybody else can fetch. `lanes`: so many stretches of a member are consumed in turn.
    """
    if not members == len(holdings) == len(speeds) == len(claims):
        raise ValueError(f"{members} members, but {len(holdings)}, {len(speeds)} and {len(claims)} entries")
    if members == 0:
        raise ValueError("nobody to assign anything to")
    mine, claimed = granted(ledger, claims)
    work = _work(ledger, claimed, unavailable)
    free = shares(sum(map(len, work)), speeds)
    own, homeless = _to_holders(work, holdings, free)
    fetched = _to_idle(homeless, free, full)
    rank = {shard: i for i, shard in enumerate(_order(ledger))}
    return Assignment(
        epoch=ledger.epoch,
        lists=tuple(
            (*mine[m], *weave([*_in_order(own[m], rank), *_in_order(fetched[m], rank)], lanes))
            for m in range(members)
        ),
    )


def shares(samples: int, speeds: Sequence[int]) -> list[int]:
    """`samples` divided in proportion to `speeds`, by largest remainder (ties: lower index)."""
    weights = supposed(speeds)
    whole = sum(weights)
    parts = [samples * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(samples * weights[i] % whole), i))
    for i in by_remainder[: samples - sum(parts)]:
        parts[i] += 1
    return parts


def supposed(speeds: Sequence[int]) -> list[int]:
    """An unknown speed, 0, is taken as the lower median of the known ones, or 1."""
    if any(speed < 0 for speed in speeds):
        raise ValueError(f"a speed is 0 or more samples per second: {speeds}")
    known = sorted(speed for speed in speeds if speed)
    usual = known[(len(known) - 1) // 2] if known else 1
    return [speed or usual for speed in speeds]


def granted(
    ledger: Ledger, claims: Sequence[Sequence[Braid]]
) -> tuple[list[list[Braid]], dict[int, Intervals]]:
    """What stands of the claims: per member the braids, and per shard all claimed positions."""
    claimed: dict[int, Intervals] = {}
    mine: list[list[Braid]] = []
    for claim in claims:
        mine.append([])
        for braid in claim:
            there = tuple(stretch for stretch in braid if stretch.shard < len(ledger.counts))
            free: list[Intervals] = []
            for stretch in there:
                taken = claimed.get(stretch.shard, ())
                open_ones = common(((stretch.lo, stretch.hi),), ledger.open_positions(stretch.shard))
                free.append(subtract(open_ones, taken))
                claimed[stretch.shard] = union(taken, free[-1])
            mine[-1] += kept(there, free)
    return mine, claimed


def _work(ledger: Ledger, claimed: dict[int, Intervals], unavailable: Container[int]) -> list[Stretch]:
    """The unclaimed, available rest of the epoch, in its order."""
    return [
        Stretch(shard=s.shard, lo=lo, hi=hi)
        for s in ledger.remaining()
        if s.shard not in unavailable
        for lo, hi in subtract(((s.lo, s.hi),), claimed.get(s.shard, ()))
    ]


def _to_holders(
    work: list[Stretch], holdings: Sequence[Container[int]], free: list[int]
) -> tuple[list[list[Stretch]], list[Stretch]]:
    """Stretches to members that hold them, as far as `free` goes (reduced here); and what is left."""
    holders = {s.shard: [m for m, held in enumerate(holdings) if s.shard in held] for s in work}
    share = [max(1, samples) for samples in free]
    own: list[list[Stretch]] = [[] for _ in holdings]
    homeless: list[Stretch] = []
    for stretch in sorted(work, key=lambda s: len(holders[s.shard])):  # stable: else in the epoch's order
        rest: Stretch | None = stretch
        while rest is not None:
            able = [m for m in holders[rest.shard] if free[m]]
            if not able:
                homeless.append(rest)
                break
            chosen = max(able, key=lambda m: (free[m] * 2**32 // share[m], -m))
            rest = _hand_over(rest, chosen, own, free)
    return own, homeless


def _to_idle(homeless: list[Stretch], free: list[int], full: Container[int]) -> list[list[Stretch]]:
    """Stretches whose holders are busy, to who has the most samples free: few members per shard."""
    fetched: list[list[Stretch]] = [[] for _ in free]
    able = [m for m in range(len(free)) if m not in full] or list(range(len(free)))
    left = sum(free) - sum(free[m] for m in able)  # what full members would have fetched
    for i, m in enumerate(able):
        free[m] += left // len(able) + (i < left % len(able))
    for stretch in sorted(homeless, key=lambda s: (-len(s), s)):
        rest: Stretch | None = stretch
        while rest is not None:
            chosen = max(able, key=lambda m: (free[m], -m))
            rest = _hand_over(rest, chosen, fetched, free)
    return fetched


def _hand_over(stretch: Stretch, member: int, lists: list[list[Stretch]], free: list[int]) -> Stretch | None:
    """As much of the stretch as fits the member's share; returns what does not."""
    fits = min(len(stretch), free[member])
    cut = stretch.lo + fits
    lists[member].append(Stretch(shard=stretch.shard, lo=stretch.lo, hi=cut))
    free[member] -= fits
    return Stretch(shard=stretch.shard, lo=cut, hi=stretch.hi) if cut < stretch.hi else None


def _order(ledger: Ledger) -> tuple[int, ...]:
    return shard_order(ledger.dataset_digest, ledger.seed, ledger.epoch, len(ledger.counts))


def _in_order(stretches: list[Stretch], rank: dict[int, int]) -> list[Stretch]:
    """In the epoch's order. No two are neighbours: a member takes as much of a stretch as it can at once."""
    return sorted(stretches, key=lambda s: (rank[s.shard], s.lo))
