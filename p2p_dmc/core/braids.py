"""In which order samples of several stretches are consumed: in turn, so that a batch is a mixture of shards.

A braid is a tuple of stretches of one length: the first sample of each, then the second of each, and so on. Braids
one after the other are an order of any number of samples in little space, and any part of it is one, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from p2p_dmc.core.ledger import Intervals, Stretch, subtract, union

__all__ = [
    "INTERLEAVED",
    "Braid",
    "in_turn",
    "kept",
    "part",
    "piece",
    "size",
    "unordered",
    "weave",
    "without",
]

Braid = tuple[Stretch, ...]

INTERLEAVED = 16
"""So many shards at a time: with shards of one class each a batch still has most of ten (benchmarks/shuffle.py). A
reader keeps that many files open."""


def weave(stretches: Iterable[Stretch], lanes: int = INTERLEAVED) -> tuple[Braid, ...]:
    """So many stretches in turn; where one ends, the next one that waits takes its place."""
    waiting = deque(stretches)
    active: list[Stretch] = []
    braids: list[Braid] = []
    while waiting or active:
        while waiting and len(active) < lanes:
            active.append(waiting.popleft())
        length = min(map(len, active))
        braids.append(tuple(Stretch(shard=s.shard, lo=s.lo, hi=s.lo + length) for s in active))
        active = [Stretch(shard=s.shard, lo=s.lo + length, hi=s.hi) for s in active if s.lo + length < s.hi]
    return tuple(braids)


def size(braids: Iterable[Braid]) -> int:
    """Samples."""
    return sum(len(braid) * len(braid[0]) for braid in braids)


def piece(braid: Braid, lo: int, hi: int) -> list[Braid]:
    """Samples `lo` to `hi` of one braid, in its order: nothing beyond its ends."""
    lanes = len(braid)
    lo, hi = max(lo, 0), min(hi, lanes * len(braid[0]))
    if lo >= hi:
        return []
    return [_rows(braid[cut], first, last) for cut, first, last in cuts(lanes, lo, hi)]


def cuts(lanes: int, lo: int, hi: int) -> list[tuple[slice, int, int]]:
    """What samples `lo` to `hi` of so many lanes are, at least one: the rest of a row, whole rows, the beginning of
    a row; of each, which lanes, its first row and the row behind its last.
    """
    (first, skipped), (last, taken) = divmod(lo, lanes), divmod(hi, lanes)
    if first == last:
        return [(slice(skipped, taken), first, first + 1)]
    found = []
    if skipped:
        found.append((slice(skipped, lanes), first, first + 1))
        first += 1
    if first < last:
        found.append((slice(0, lanes), first, last))
    if taken:
        found.append((slice(0, taken), last, last + 1))
    return found


def part(braids: Iterable[Braid], lo: int, hi: int) -> tuple[Braid, ...]:
    """Samples `lo` to `hi` of braids one after the other; fewer where they end."""
    found: list[Braid] = []
    at = 0
    for braid in braids:
        found += piece(braid, lo - at, hi - at)
        at += size([braid])
    return tuple(found)


def in_turn(braids: Iterable[Braid]) -> Iterator[tuple[int, int]]:
    """Every sample in order: (shard, position in the epoch's order of the shard)."""
    for braid in braids:
        for row in range(len(braid[0])):
            for stretch in braid:
                yield stretch.shard, stretch.lo + row


def unordered(braids: Iterable[Braid]) -> tuple[Stretch, ...]:
    """The same samples in as few stretches as possible, sorted: what was consumed, whatever the order."""
    per_shard: dict[int, list[tuple[int, int]]] = {}
    for braid in braids:
        for stretch in braid:
            per_shard.setdefault(stretch.shard, []).append((stretch.lo, stretch.hi))
    return tuple(
        Stretch(shard=shard, lo=lo, hi=hi)
        for shard in sorted(per_shard)
        for lo, hi in union(tuple(per_shard[shard]), ())
    )


def in_lanes(braids: Iterable[Braid]) -> tuple[Stretch, ...]:
    """The same samples as stretches in the order in which their last samples come."""
    found: dict[tuple[int, int], Stretch] = {}
    """By shard and end: braids of one lane after each other become one stretch again."""
    for braid in braids:
        for stretch in braid:
            before = found.pop((stretch.shard, stretch.lo), None)
            lo = stretch.lo if before is None else before.lo
            found[stretch.shard, stretch.hi] = Stretch(shard=stretch.shard, lo=lo, hi=stretch.hi)
    return tuple(found.values())


def without(braids: Iterable[Braid], gone: Mapping[int, Intervals]) -> tuple[Braid, ...]:
    """What is left, in the same order, when these positions of each shard are taken out."""
    left: list[Braid] = []
    for braid in braids:
        left += kept(braid, [subtract(((s.lo, s.hi),), gone.get(s.shard, ())) for s in braid])
    return tuple(left)


def kept(braid: Braid, positions: Sequence[Intervals]) -> list[Braid]:
    """Of one braid, only these positions of each of its stretches (all of them within it), in its order."""
    rows = [[(lo - s.lo, hi - s.lo) for lo, hi in p] for s, p in zip(braid, positions, strict=True)]
    bounds = sorted({bound for lane in rows for interval in lane for bound in interval})
    found = []
    for first, last in pairwise(bounds):
        there = [
            stretch
            for stretch, lane in zip(braid, rows, strict=True)
            if any(lo <= first and last <= hi for lo, hi in lane)
        ]
        if there:
            found.append(_rows(tuple(there), first, last))
    return found


def _rows(braid: Braid, first: int, last: int) -> Braid:
    return tuple(Stretch(shard=s.shard, lo=s.lo + first, hi=s.lo + last) for s in braid)
