"""Assignment: everything once, balanced, holders first, against dumb oracles; and a whole run with churn."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.core.assignment import Assignment, assign, shares
from p2p_dmc.core.braids import Braid, in_turn, size, unordered
from p2p_dmc.core.ledger import Ledger, Stretch, check_exact, sample_index, shard_order

DIGEST = b"d" * 32
SEEDS = st.integers(0, 2**32)


def stretch(shard: int, lo: int, hi: int) -> Stretch:
    return Stretch(shard=shard, lo=lo, hi=hi)


def samples(stretches: Sequence[Stretch]) -> list[tuple[int, int]]:
    return [(s.shard, p) for s in stretches for p in range(s.lo, s.hi)]


def everything(assignment: Assignment) -> list[tuple[int, int]]:
    return [sample for braids in assignment.lists for sample in in_turn(braids)]


def random_ledger(rng: random.Random, shards: int, most: int) -> Ledger:
    """A ledger somewhere in its first epoch."""
    counts = [rng.randint(0, most) for _ in range(shards)] + [most]
    ledger = Ledger.start(DIGEST, counts, rng.randrange(100), 2)
    for _ in range(rng.randrange(6)):
        piece = rng.choice(ledger.remaining())
        cut = rng.randint(piece.lo + 1, piece.hi)
        if cut - piece.lo < sum(map(len, ledger.remaining())):
            ledger = rng.choice([ledger.advance, ledger.skip])([stretch(piece.shard, piece.lo, cut)])
    return ledger


def random_claims(rng: random.Random, ledger: Ledger, members: int) -> list[list[Braid]]:
    """Claims as the network might bring them: overlapping, counted already, of shards that do not exist."""
    claims: list[list[Braid]] = []
    for _ in range(members):
        claims.append([])
        for _ in range(rng.randrange(3)):
            length, shards = rng.randint(1, 10), range(len(ledger.counts) + 1)
            picked = rng.sample(shards, min(len(shards), rng.randint(1, 3)))
            claims[-1].append(tuple(stretch(shard, lo := rng.randrange(20), lo + length) for shard in picked))
    return claims


def random_world(
    seed: int,
) -> tuple[Ledger, list[frozenset[int]], list[int], list[list[Braid]], frozenset[int]]:
    rng = random.Random(seed)
    ledger = random_ledger(rng, rng.randint(1, 12), rng.choice([3, 25]))
    shards, members = range(len(ledger.counts)), rng.randint(1, 6)
    chance = rng.choice([0.0, 0.3, 1.0])
    holdings = [frozenset(s for s in shards if rng.random() < chance) for _ in range(members)]
    speeds = [rng.choice([0, 1, 5, 100]) for _ in range(members)]
    unavailable = frozenset(s for s in shards if rng.random() < 0.2)
    return ledger, holdings, speeds, random_claims(rng, ledger, members), unavailable


def granted(ledger: Ledger, claims: Sequence[Sequence[Braid]]) -> list[list[tuple[int, int]]]:
    """The dumb rule for claims: a sample that is open and that nobody before has claimed."""
    open_ones = set(samples(ledger.remaining()))
    kept: list[list[tuple[int, int]]] = []
    for claim in claims:
        kept.append([])
        for sample in in_turn(claim):
            if sample in open_ones:
                open_ones.remove(sample)
                kept[-1].append(sample)
    return kept


# --- properties ------------------------------------------------------------------------------------------


@given(SEEDS)
@settings(max_examples=300, deadline=None)
def test_every_open_available_sample_is_in_exactly_one_list(seed: int) -> None:
    ledger, holdings, speeds, claims, unavailable = random_world(seed)
    result = assign(ledger, len(holdings), holdings, speeds, claims, unavailable)
    claimed = {sample for claim in granted(ledger, claims) for sample in claim}
    due = [x for x in samples(ledger.remaining()) if x[0] not in unavailable or x in claimed]
    assert Counter(everything(result)) == Counter(due)
    assert result.epoch == ledger.epoch and len(result.lists) == len(holdings)


@given(SEEDS)
@settings(max_examples=300, deadline=None)
def test_claims_come_first_and_verbatim(seed: int) -> None:
    ledger, holdings, speeds, claims, unavailable = random_world(seed)
    result = assign(ledger, len(holdings), holdings, speeds, claims, unavailable)
    for member, claim in enumerate(granted(ledger, claims)):
        assert list(in_turn(result.consumed(member, 0, len(claim)))) == claim


@given(SEEDS)
@settings(max_examples=300, deadline=None)
def test_the_work_is_balanced_to_the_sample(seed: int) -> None:
    ledger, holdings, speeds, claims, unavailable = random_world(seed)
    result = assign(ledger, len(holdings), holdings, speeds, claims, unavailable)
    work = [result.length(m) - len(claim) for m, claim in enumerate(granted(ledger, claims))]
    known = sorted(speed for speed in speeds if speed)
    weights = [speed or (known[(len(known) - 1) // 2] if known else 1) for speed in speeds]
    for length, weight in zip(work, weights, strict=True):
        assert abs(length - Fraction(sum(work) * weight, sum(weights))) < 1


@given(SEEDS)
@settings(max_examples=300, deadline=None)
def test_only_samples_whose_holders_are_all_busy_are_fetched(seed: int) -> None:
    """Nobody fetches what a holder could have trained on instead of something that it had to fetch itself."""
    ledger, holdings, speeds, claims, unavailable = random_world(seed)
    result = assign(ledger, len(holdings), holdings, speeds, claims, unavailable)
    work = [
        list(in_turn(result.consumed(m, len(c), result.length(m))))
        for m, c in enumerate(granted(ledger, claims))
    ]
    fetching = {m for m, held in enumerate(holdings) for shard, _ in work[m] if shard not in held}
    for m, held in enumerate(holdings):
        for shard, _ in work[m]:
            if shard not in held:
                assert not any(shard in holdings[other] for other in fetching)


@given(SEEDS)
@settings(max_examples=100, deadline=None)
def test_lists_are_in_the_epochs_order_own_shards_before_fetched_ones(seed: int) -> None:
    ledger, holdings, speeds, _, unavailable = random_world(seed)
    members = len(holdings)
    result = assign(ledger, members, holdings, speeds, [[]] * members, unavailable, lanes=1)
    rank = {s: i for i, s in enumerate(shard_order(DIGEST, ledger.seed, ledger.epoch, len(ledger.counts)))}
    for held, braids in zip(holdings, result.lists, strict=True):
        stretches = [stretch for (stretch,) in braids]
        places = [(s.shard not in held, rank[s.shard], s.lo) for s in stretches]
        assert places == sorted(places)
        assert all(a.shard != b.shard or a.hi < b.lo for a, b in pairwise(stretches))


@given(SEEDS)
@settings(max_examples=100, deadline=None)
def test_the_kind_and_order_of_the_containers_do_not_matter(seed: int) -> None:
    ledger, holdings, speeds, claims, unavailable = random_world(seed)
    rng = random.Random(seed)
    shuffled = [rng.sample(sorted(held), len(held)) for held in holdings]
    one = assign(ledger, len(holdings), holdings, speeds, claims, unavailable)
    other = assign(
        ledger, len(holdings), shuffled, tuple(speeds), tuple(map(tuple, claims)), sorted(unavailable)
    )
    assert one == other and one.digest() == other.digest()


@given(SEEDS, st.integers(0, 60), st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_cursors_name_samples(seed: int, a: int, b: int) -> None:
    ledger, holdings, speeds, claims, unavailable = random_world(seed)
    result = assign(ledger, len(holdings), holdings, speeds, claims, unavailable)
    for member, braids in enumerate(result.lists):
        length = result.length(member)
        lo, hi = sorted((min(a, length), min(b, length)))
        assert list(in_turn(result.consumed(member, lo, hi))) == list(in_turn(braids))[lo:hi]
        with pytest.raises(ValueError, match="samples in epoch"):
            result.consumed(member, 0, length + 1)
        with pytest.raises(ValueError, match="cursor"):
            result.consumed(member, 2, 1)


# --- examples --------------------------------------------------------------------------------------------


def test_speeds_of_1_1_2_4_finish_together_and_stay_at_home() -> None:
    ledger = Ledger.start(DIGEST, [100] * 64, 0, 1)
    result = assign(ledger, 4, [range(64)] * 4, [10, 10, 20, 40], [()] * 4)
    assert [result.length(m) for m in range(4)] == [800, 800, 1600, 3200]
    assert (
        sum(len(result.stretches(m)) for m in range(4)) <= 64 + 3
    )  # at most one more piece per shared boundary


def test_two_replicas_spread_by_chance_are_enough_for_equal_machines() -> None:
    rng = random.Random(5)
    ledger = Ledger.start(DIGEST, [40] * 256, 0, 1)
    holders = [rng.sample(range(8), 2) for _ in range(256)]
    holdings = [frozenset(s for s in range(256) if m in holders[s]) for m in range(8)]
    result = assign(ledger, 8, holdings, [0] * 8, [()] * 8)
    fetched = sum(len(s) for m in range(8) for s in result.stretches(m) if s.shard not in holdings[m])
    assert {result.length(m) for m in range(8)} == {1280}
    assert fetched <= 0.02 * 256 * 40


def test_a_member_without_shards_fetches_few_of_them_whole() -> None:
    ledger = Ledger.start(DIGEST, [50] * 20, 0, 1)
    result = assign(ledger, 2, [range(20), ()], [100, 100], [(), ()])
    assert [result.length(m) for m in range(2)] == [500, 500]
    assert len(result.stretches(1)) == 10


def test_a_machine_20_times_faster_is_not_held_to_its_share_of_the_bytes() -> None:
    ledger = Ledger.start(DIGEST, [50] * 42, 0, 1)
    result = assign(ledger, 3, [range(14), range(14, 28), range(28, 42)], [20, 1, 1], [()] * 3)
    assert [result.length(m) for m in range(3)] == [1909, 96, 95]


def test_a_shard_with_one_holder_is_not_crowded_out_by_common_ones() -> None:
    ledger = Ledger.start(DIGEST, [10, 10, 10, 10], 0, 1)
    result = assign(ledger, 2, [range(4), (0, 1)], [1, 1], [(), ()])
    assert [{s.shard for s in result.stretches(m)} for m in (0, 1)] == [{2, 3}, {0, 1}]


def test_of_two_claims_on_a_sample_the_lower_member_has_it() -> None:
    ledger = Ledger.start(DIGEST, [10], 0, 1).advance([stretch(0, 0, 2)])
    result = assign(ledger, 2, [(), ()], [1, 1], [[(stretch(0, 3, 5),)], [(stretch(0, 0, 7),)]])
    assert result.lists[0][0] == (stretch(0, 3, 5),)
    assert result.lists[1][:2] == ((stretch(0, 2, 3),), (stretch(0, 5, 7),))


def test_a_claim_on_a_shard_that_nobody_has_any_more_stands() -> None:
    ledger = Ledger.start(DIGEST, [10], 0, 1)
    result = assign(ledger, 1, [()], [1], [[(stretch(0, 4, 6),)]], unavailable={0})
    assert result.lists == (((stretch(0, 4, 6),),),)


def test_nothing_is_assigned_after_the_last_epoch() -> None:
    ledger = Ledger.start(DIGEST, [10], 0, 1).advance([stretch(0, 0, 10)])
    assert assign(ledger, 2, [(0,), ()], [1, 1], [[(stretch(0, 1, 2),)], []]).lists == ((), ())


def test_an_unknown_speed_is_the_lower_median_of_the_others() -> None:
    assert shares(100, [0, 10, 30]) == shares(100, [10, 10, 30]) == [20, 20, 60]
    assert shares(10, [0, 0, 0]) == [4, 3, 3]
    assert shares(0, [1, 2]) == [0, 0]
    assert shares(1, [1, 2]) == [0, 1]


def test_entries_that_do_not_fit_the_members_are_refused() -> None:
    ledger = Ledger.start(DIGEST, [10], 0, 1)
    with pytest.raises(ValueError, match="2 members"):
        assign(ledger, 2, [(0,)], [1, 1], [(), ()])
    with pytest.raises(ValueError, match="nobody"):
        assign(ledger, 0, [], [], [])
    with pytest.raises(ValueError, match="speed"):
        assign(ledger, 1, [(0,)], [-1], [()])


def test_the_digest_tells_lists_apart() -> None:
    one, other = (stretch(0, 0, 2),), (stretch(1, 0, 2),)
    all_of_them = [
        Assignment(epoch=0, lists=((one, other), ())),
        Assignment(epoch=1, lists=((one, other), ())),
        Assignment(epoch=0, lists=((), (one, other))),
        Assignment(epoch=0, lists=((other, one), ())),
        Assignment(epoch=0, lists=(((*one, *other),), ())),
    ]
    assert len({a.digest() for a in all_of_them}) == 5 and len(all_of_them[0].digest()) == 16


# --- a whole run with churn ------------------------------------------------------------------------------


class Run:
    """Peers come, go and crash, rounds complete or fail: DESIGN section 7 with no network at all."""

    def __init__(self, rng: random.Random, digest: bytes = DIGEST, counts: Sequence[int] = ()) -> None:
        self.rng = rng
        self.counts = list(counts) or [rng.randint(1, 20) for _ in range(rng.randint(4, 12))]
        self.ledger = Ledger.start(digest, self.counts, rng.randrange(9), 2)
        self.counted: list[tuple[int, Stretch]] = []
        self.claims: dict[int, tuple[Braid, ...]] = {}
        self.failed_rounds = 0

    def go_on(self) -> None:
        """A view: new members (survivors keep claims), an assignment, a few rounds, the last may fail."""
        rng = self.rng
        members = sorted(rng.sample(range(6), rng.randint(1, 5)))
        self.claims = {
            m: claim for m, claim in self.claims.items() if m in members
        }  # the others' die with them
        while not self.ledger.done:
            plan = self.plan(members)
            cursors = [size(self.claims.get(m, ())) for m in members]
            counted = [0] * len(members)
            for _ in range(rng.randint(1, 6)):
                for i in range(len(members)):
                    cursors[i] = min(plan.length(i), cursors[i] + rng.randrange(5))
                if rng.random() < 0.3:
                    self.failed_rounds += 1
                    self.claims = {m: plan.consumed(i, counted[i], cursors[i]) for i, m in enumerate(members)}
                    return
                consumed = unordered(
                    braid for i in range(len(members)) for braid in plan.consumed(i, counted[i], cursors[i])
                )
                self.counted += [(self.ledger.epoch, s) for s in consumed]
                self.ledger, counted = self.ledger.advance(consumed), list(cursors)
                if self.ledger.epoch != plan.epoch:
                    break
            else:
                self.claims = dict.fromkeys(members, ())
                return
            self.claims = {}  # an epoch's end is no view change: the next assignment, the same members

    def holdings(self) -> frozenset[int]:
        """Of one member, in this view."""
        return frozenset(s for s in range(len(self.counts)) if self.rng.random() < 0.5)

    def plan(self, members: list[int]) -> Assignment:
        holdings = [self.holdings() for _ in members]
        claims = [self.claims.get(m, ()) for m in members]
        plan = assign(
            self.ledger, len(members), holdings, [self.rng.choice([0, 1, 9]) for _ in members], claims
        )
        for i, claim in enumerate(claims):  # survivors' claims are disjoint and open: they stand as they are
            assert plan.lists[i][: len(claim)] == claim
        return plan


@pytest.mark.parametrize("seed", range(60))
def test_whatever_crashes_every_epoch_ends_exactly(seed: int) -> None:
    run = Run(random.Random(seed))
    while not run.ledger.done and run.failed_rounds < 1000:
        run.go_on()
    assert run.ledger.done and run.failed_rounds > 0
    assert check_exact(run.counts, 2, run.counted) == []
    for epoch in range(2):  # and as samples rather than positions
        seen = Counter(
            (s.shard, sample_index(DIGEST, run.ledger.seed, epoch, s.shard, run.counts[s.shard], p))
            for e, s in run.counted
            if e == epoch
            for p in range(s.lo, s.hi)
        )
        assert seen == Counter((shard, i) for shard, count in enumerate(run.counts) for i in range(count))
    assert run.ledger.samples_total == 2 * sum(run.counts)


def test_a_full_member_fetches_nothing_while_another_can() -> None:
    ledger = Ledger.start(b"d" * 16, [10, 10, 10, 10], 0, 1)
    held = [{0}, {1, 2, 3}, set()]
    plain = assign(ledger, 3, held, [1, 1, 1], [()] * 3)
    assert any(s.shard != 0 for s in plain.stretches(0)), "else the case shows nothing"
    spared = assign(ledger, 3, held, [1, 1, 1], [()] * 3, (), {0})
    assert {s.shard for s in spared.stretches(0)} <= {0}
    assert sum(map(spared.length, range(3))) == 40
    everybody = assign(ledger, 3, held, [1, 1, 1], [()] * 3, (), {0, 1, 2})
    assert sum(map(everybody.length, range(3))) == 40
