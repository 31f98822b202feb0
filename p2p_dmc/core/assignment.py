"""Who trains on what: a pure function of the ledger and of the view's members (DESIGN section 9).

Every peer computes everyone's assignment, so a cursor ("n samples consumed") is enough to say which samples
it means.

How it balances. Each member's share of the samples is proportional to its speed, to the sample, so all are
expected to finish at the same time. Shards go to their holders, those with the fewest holders first, each to
the holder with the most of its share still free, and are split where a share is full. What is left then (its
holders are busy for the whole epoch) goes to the members that would idle, who fetch it; it comes last in
their lists, which is when it is needed. The holders' part is greedy: an exact flow would now and then save a
fetch and cost a page of code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import cast

import msgpack

from p2p_dmc.core.ledger import Intervals, Ledger, Stretch, common, shard_order, subtract, union

__all__ = ["Assignment", "assign", "shares"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """For one epoch, what each view member trains on, in the order in which it consumes it."""

    epoch: int
    stretches: tuple[tuple[Stretch, ...], ...]
    """One list per member, in ring order. Invariant: no sample is in two of them, or twice in one."""

    def length(self, member_index: int) -> int:
        """Samples of one member."""
        return sum(map(len, self.stretches[member_index]))

    def consumed(self, member_index: int, lo: int, hi: int) -> tuple[Stretch, ...]:
        """What the member consumes between cursors `lo` and `hi` (samples); ValueError if it has fewer."""
        if not 0 <= lo <= hi:
            raise ValueError(f"a cursor moves forward: {lo} to {hi}")
        pieces: list[Stretch] = []
        at = 0
        for stretch in self.stretches[member_index]:
            first, last = max(lo - at, 0), min(hi - at, len(stretch))
            if first < last:
                pieces.append(Stretch(shard=stretch.shard, lo=stretch.lo + first, hi=stretch.lo + last))
            at += len(stretch)
        if hi > at:
            raise ValueError(f"member {member_index} has {at} samples in epoch {self.epoch}, not {hi}")
        return tuple(pieces)

    def digest(self) -> bytes:
        """16 bytes that differ when any member's list does."""
        lists = tuple(tuple((s.shard, s.lo, s.hi) for s in stretches) for stretches in self.stretches)
        return hashlib.blake2b(cast(bytes, msgpack.packb((self.epoch, lists))), digest_size=16).digest()


def assign(
    ledger: Ledger,
    members: int,
    holdings: Sequence[Container[int]],
    speeds: Sequence[int],
    claims: Sequence[Sequence[Stretch]],
    unavailable: Container[int] = (),
    full: Container[int] = (),
) -> Assignment:
    """Hand out what the current epoch still needs: each available sample to exactly one member.

    Per member, in ring order: `holdings`, the shards it has on disk; `speeds`, samples per second (0:
    unknown, taken as the others' median); `claims`, what it has consumed in this epoch and no round has
    counted yet. Claims come first in its list, in the given order, and are no work, so the balance is over
    the rest. Of a claim, samples that the ledger has settled or a lower member has claimed are cut out.
    `unavailable`: shards that nobody has. `full`: members that can fetch nothing; they get what they hold
    only, as long as anybody else can fetch.
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
        stretches=tuple(
            (*mine[m], *_in_order(own[m], rank), *_in_order(fetched[m], rank)) for m in range(members)
        ),
    )


def shares(samples: int, speeds: Sequence[int]) -> list[int]:
    """`samples` divided in proportion to `speeds`, by largest remainder (ties: lower index).

    An unknown speed, 0, is taken as the lower median of the known ones, or 1.
    """
    if any(speed < 0 for speed in speeds):
        raise ValueError(f"a speed is 0 or more samples per second: {speeds}")
    known = sorted(speed for speed in speeds if speed)
    usual = known[(len(known) - 1) // 2] if known else 1
    weights = [speed or usual for speed in speeds]
    whole = sum(weights)
    parts = [samples * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(samples * weights[i] % whole), i))
    for i in by_remainder[: samples - sum(parts)]:
        parts[i] += 1
    return parts


def granted(
    ledger: Ledger, claims: Sequence[Sequence[Stretch]]
) -> tuple[list[list[Stretch]], dict[int, Intervals]]:
    """What stands of the claims: per member the stretches, and per shard all claimed positions."""
    claimed: dict[int, Intervals] = {}
    kept: list[list[Stretch]] = []
    for claim in claims:
        kept.append([])
        for stretch in claim:
            shard = stretch.shard
            if shard >= len(ledger.counts):
                continue
            taken = claimed.get(shard, ())
            rest = subtract(common(((stretch.lo, stretch.hi),), ledger.open_positions(shard)), taken)
            kept[-1] += [Stretch(shard=shard, lo=lo, hi=hi) for lo, hi in rest]
            claimed[shard] = union(taken, rest)
    return kept, claimed


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
