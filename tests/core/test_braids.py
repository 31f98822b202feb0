"""Stretches consumed in turn, against the dumbest way to say the same: a list of every sample."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.core.braids import INTERLEAVED, Braid, in_turn, part, size, unordered, weave, without
from p2p_dmc.core.ledger import Stretch

SEEDS = st.integers(0, 2**32)
Sample = tuple[int, int]


def stretch(shard: int, lo: int, hi: int) -> Stretch:
    return Stretch(shard=shard, lo=lo, hi=hi)


def some_stretches(rng: random.Random, most: int = 12) -> list[Stretch]:
    found = []
    for shard in rng.sample(range(50), rng.randrange(most)):
        lo = rng.randrange(20)
        found.append(stretch(shard, lo, lo + rng.randint(1, 15)))
    return found


def dumb_weave(stretches: list[Stretch], lanes: int) -> list[Sample]:
    """One sample at a time from each of the first so many; who has none left gives way after the row."""
    waiting = [[(s.shard, at) for at in range(s.lo, s.hi)] for s in stretches]
    active: list[list[Sample]] = []
    order: list[Sample] = []
    while waiting or active:
        while waiting and len(active) < lanes:
            active.append(waiting.pop(0))
        order += [lane.pop(0) for lane in active]
        active = [lane for lane in active if lane]
    return order


@given(SEEDS, st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_stretches_in_turn_are_what_a_child_would_do(seed: int, lanes: int) -> None:
    stretches = some_stretches(random.Random(seed))
    braids = weave(stretches, lanes)
    assert list(in_turn(braids)) == dumb_weave(stretches, lanes)
    assert size(braids) == sum(map(len, stretches))
    assert all(len({len(s) for s in braid}) == 1 and len(braid) <= lanes for braid in braids)
    assert len(braids) <= max(1, len(stretches))  # little space, however many samples


@given(SEEDS)
@settings(max_examples=200, deadline=None)
def test_any_part_is_the_same_samples_in_the_same_order(seed: int) -> None:
    rng = random.Random(seed)
    braids = weave(some_stretches(rng), rng.randint(1, 9))
    every = list(in_turn(braids))
    lo, hi = sorted(rng.randint(0, len(every) + 3) for _ in range(2))
    piece = part(braids, lo, hi)
    assert list(in_turn(piece)) == every[lo:hi]
    again = rng.randint(0, hi - lo)
    assert list(in_turn(part(piece, again, hi))) == every[lo:hi][again:]


@given(SEEDS)
@settings(max_examples=200, deadline=None)
def test_what_is_taken_out_leaves_the_rest_in_order(seed: int) -> None:
    rng = random.Random(seed)
    braids = weave(some_stretches(rng), rng.randint(1, 9))
    gone = {s.shard: ((s.lo, s.hi),) for s in some_stretches(rng, 50)}
    taken = {(shard, at) for shard, intervals in gone.items() for lo, hi in intervals for at in range(lo, hi)}
    assert list(in_turn(without(braids, gone))) == [x for x in in_turn(braids) if x not in taken]
    assert without(braids, {}) == braids


@given(SEEDS)
@settings(max_examples=100, deadline=None)
def test_without_their_order_they_are_few_stretches(seed: int) -> None:
    rng = random.Random(seed)
    stretches = some_stretches(rng)
    found = unordered(part(weave(stretches, 4), 0, rng.randrange(100)))
    assert Counter((s.shard, at) for s in found for at in range(s.lo, s.hi)).total() == sum(map(len, found))
    assert unordered(weave(stretches, 4)) == tuple(sorted(stretches))
    assert list(found) == sorted(found) and len({s.shard for s in found}) == len(found)


def test_a_batch_has_as_many_shards_as_are_interleaved() -> None:
    braids = weave([stretch(shard, 0, 100) for shard in range(3 * INTERLEAVED)])
    every = list(in_turn(braids))
    for at in range(0, len(every), 32):
        shards = Counter(shard for shard, _ in every[at : at + 32])
        assert len(shards) >= INTERLEAVED and max(shards.values()) == 32 // INTERLEAVED


def test_a_million_samples_take_little_space() -> None:
    braids = weave([stretch(shard, 0, 1000) for shard in range(1000)])
    assert size(braids) == 10**6 and sum(map(len, braids)) == 1000
    piece: tuple[Braid, ...] = part(braids, 123_457, 987_651)
    assert size(piece) == 987_651 - 123_457 and sum(map(len, piece)) < 1100


@pytest.mark.parametrize("lanes", [1, 8])
def test_nothing_in_turn_is_nothing(lanes: int) -> None:
    assert weave([], lanes) == () and part((), 0, 5) == () and unordered(()) == () and size(()) == 0
