"""The rest of an epoch shared out anew: nothing lost or doubled, nearer to even, no more fetched than that."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.core.assignment import shares, supposed
from p2p_dmc.core.braids import Braid, in_turn, size, weave
from p2p_dmc.core.ledger import Stretch
from p2p_dmc.core.pace import MOST_STEPS, Pace, local_steps
from p2p_dmc.core.rebalancing import FETCH_MS, SLACK, Member, is_due, rebalanced

SEEDS = st.integers(0, 2**32)
ALL = range(100)


def shard(number: int, samples: int, lo: int = 0) -> Stretch:
    return Stretch(shard=number, lo=lo, hi=lo + samples)


def member(
    *stretches: Stretch, held: Sequence[int] = ALL, speed: int = 0, batch: int = 1, full: bool = False
) -> Member:
    return Member(rest=weave(stretches), held=frozenset(held), speed=speed, batch=batch, full=full)


def random_members(seed: int) -> list[Member]:
    rng = random.Random(seed)
    members, number = [], 0
    for _ in range(rng.randint(1, 6)):
        mine = []
        for _ in range(rng.randrange(6)):
            mine.append(shard(number, rng.randint(1, 40), rng.randrange(9)))
            number += 1
        members.append(
            member(
                *mine,
                held=[s for s in range(40) if rng.random() < rng.choice([0.2, 1.0])],
                speed=rng.choice([0, 1, 2, 10, 500]),
                batch=rng.choice([1, 4]),
                full=rng.random() < 0.2,
            )
        )
    return members


def lengths(lists: Sequence[Sequence[Braid]]) -> list[int]:
    return [size(braids) for braids in lists]


def last_done(samples: Sequence[int], speeds: Sequence[int]) -> Fraction:
    return max(Fraction(n, speed) for n, speed in zip(samples, supposed(speeds), strict=True))


@given(SEEDS)
@settings(max_examples=300, deadline=None)
def test_every_sample_stays_one_members_and_what_is_kept_keeps_its_order(seed: int) -> None:
    members = random_members(seed)
    found = rebalanced(members)
    if found is None:
        return
    before = Counter(sample for m in members for sample in in_turn(m.rest))
    assert Counter(sample for braids in found for sample in in_turn(braids)) == before
    for m, braids in zip(members, found, strict=True):
        mine, now = list(in_turn(m.rest)), list(in_turn(braids))
        kept = [x for x in mine if x in set(now)]
        assert now[: len(kept)] == kept  # what comes from others comes last


@given(SEEDS)
@settings(max_examples=300, deadline=None)
def test_all_are_done_no_later_than_before(seed: int) -> None:
    members = random_members(seed)
    speeds = [m.speed for m in members]
    found = rebalanced(members)
    if found is not None:
        before = last_done(lengths([m.rest for m in members]), speeds)
        assert last_done(lengths(found), speeds) <= max(before, before + Fraction(1, min(supposed(speeds))))


@given(SEEDS)
@settings(max_examples=300, deadline=None)
def test_where_everybody_has_everything_each_has_its_share_at_once(seed: int) -> None:
    members = [
        Member(rest=m.rest, held=ALL, speed=m.speed, batch=m.batch, full=m.full) for m in random_members(seed)
    ]
    found, rests = rebalanced(members), lengths([m.rest for m in members])
    due = shares(sum(rests), [m.speed for m in members])
    if found is not None:
        assert lengths(found) == due
        again = [
            Member(rest=braids, held=ALL, speed=m.speed, batch=m.batch, full=m.full)
            for m, braids in zip(members, found, strict=True)
        ]
        assert rebalanced(again) is None
    else:
        assert all(
            rest - share <= max(m.batch, rest // SLACK)
            for m, rest, share in zip(members, rests, due, strict=True)
        )


@given(SEEDS)
@settings(max_examples=200, deadline=None)
def test_who_fetches_would_idle_for_longer_than_that_takes(seed: int) -> None:
    members = random_members(seed)
    found = rebalanced(members)
    speeds = supposed([m.speed for m in members])
    rests = lengths([m.rest for m in members])
    due = shares(sum(rests), speeds)
    for i, braids in enumerate(found or ()):
        had = set(in_turn(members[i].rest))
        fetched = [s for s, at in in_turn(braids) if (s, at) not in had and s not in members[i].held]
        if fetched:
            assert not members[i].full and 1000 * (due[i] - rests[i]) >= FETCH_MS * speeds[i]


def test_the_slow_one_gives_what_it_would_train_on_last() -> None:
    slow, fast = (
        member(shard(0, 40), shard(1, 40), speed=10, batch=4),
        member(shard(2, 80), speed=30, batch=4),
    )
    found = rebalanced([slow, fast])
    assert found is not None and lengths(found) == [40, 120]
    mine = list(in_turn(slow.rest))
    assert list(in_turn(found[0]))[:10] != [] and set(in_turn(found[0])) <= set(mine)
    assert found[1][:1] == fast.rest


def test_a_little_too_much_is_left_as_it_is() -> None:
    def one(rest: int, batch: int = 1) -> bool:
        return is_due([rest, 200 - rest], [10, 10], [batch, batch])

    assert not one(112) and one(116)  # one part in eight of what is left
    assert rebalanced([member(shard(0, 112)), member(shard(1, 88))]) is None
    assert rebalanced([member(shard(0, 116)), member(shard(1, 84))]) is not None
    assert not one(116, batch=16) and one(117, batch=16)  # less than a step is not worth it


def test_nobody_takes_what_it_would_have_to_fetch_for_a_moment() -> None:
    slow = member(shard(0, 100), held=[0], speed=10)
    assert rebalanced([slow, member(held=[5], speed=190)]) is not None  # it would idle for half a second
    assert rebalanced([slow, member(held=[5], speed=190, full=True)]) is None
    assert rebalanced([slow, member(held=[5], speed=191)]) is None
    assert rebalanced([slow, member(held=[0], speed=191)]) is not None


def test_holders_come_first() -> None:
    slow = member(shard(0, 400), shard(1, 400), held=[0, 1], speed=10)
    found = rebalanced([slow, member(held=[1], speed=10), member(held=[], speed=20)])
    assert found is not None and lengths(found) == [200, 200, 400]
    assert sorted(in_turn(found[1])) == [(1, at) for at in range(200, 400)]  # though the other has more room


# --- paces -----------------------------------------------------------------------------------------------


def pace(*rounds: tuple[int, int, int], before: int = 0) -> Pace:
    made = Pace(before=before)
    for one in rounds:
        made = made.after(*one)
    return made


def test_one_odd_round_is_not_the_speed() -> None:
    usual, odd = (40, 4, 1_000_000), (40, 4, 90_000_000)
    assert pace(odd).speed == 0 and pace(odd, before=7).speed == 7
    assert pace(odd, usual).speed == pace(odd, usual, usual).speed == pace(usual, odd, usual).speed == 40
    assert pace(usual, usual, usual, odd).speed == 40 and pace(usual, usual, odd, odd).speed == 1
    assert pace(odd, usual).step_us == pace(usual, odd, usual).step_us == 250_000


def test_rounds_without_samples_or_time_say_nothing() -> None:
    there = pace((8, 2, 500), (8, 2, 500))
    assert there.after(0, 0, 0) == there.after(8, 2, 0) == there.after(0, 2, 500) == there
    assert there.batch == 4 and pace((9, 2, 500)).batch == 5 and pace().batch == 1
    assert there.after(1, 1, 250) == there  # the last batch of an epoch says nothing of the machine


@pytest.mark.parametrize(
    ("tau", "steps"), [(1, [1, 1, 1, 1]), (2, [2, 2, 4, 8]), (8, [8, 8, 16, 32]), (10, [10, 10, 20, 40])]
)
def test_in_the_time_of_the_slowest_ones_tau_steps_the_others_take_more(tau: int, steps: list[int]) -> None:
    paces = [pace(*[(4, 1, 4000 // times)] * 3) for times in (1, 1, 2, 4)]
    limits = [0 if n == tau else 3 * tau * 4000 // 2 for n in steps]
    assert [local_steps(tau, paces, i, [True] * 4) for i in range(4)] == list(zip(steps, limits, strict=True))
    assert local_steps(tau, paces, 3, [False, False, True, True])[0] == (2 * tau if tau > 1 else 1)
    assert local_steps(tau, paces, 0, [False, False, True, True]) == (
        tau,
        0,
    )  # it is slower, and has nothing to do
    limit_us = 3 * tau * 4000 // 2 if tau > 1 else 0
    assert local_steps(tau, [*paces[:3], pace()], 3, [True] * 4) == (tau, limit_us)  # nothing is known of it
    slow = [pace(*[(4, 1, 10**9)] * 2), pace(*[(4, 1, 1)] * 2)]
    assert local_steps(tau, slow, 1, [True] * 2)[0] == (MOST_STEPS * tau if tau > 1 else 1)


@pytest.mark.parametrize("tau", [2, 8])
def test_until_somebodys_pace_is_known_all_take_one_step(tau: int) -> None:
    """Rounds of one step are short whoever is slow: two of them tell how fast everybody is."""
    nothing, once, twice = pace(), pace((4, 1, 4000)), pace((4, 1, 9000), (4, 1, 4000))
    two, quick = [True] * 2, pace((4, 1, 9000), (4, 1, 1000))
    for paces in ([nothing, nothing], [once, once], [once, nothing]):
        assert [local_steps(tau, paces, i, two) for i in range(2)] == [(1, 0), (1, 0)]
    assert [local_steps(tau, [twice, quick], i, two)[0] for i in range(2)] == [tau, 4 * tau]
    # nobody waits for whoever has nothing to do, nor is it known how fast one is that did nothing
    assert local_steps(tau, [once, twice], 0, [True, False]) == (tau, 0)
    assert [local_steps(tau, [nothing] * 2, i, [True, False]) for i in range(2)] == [(tau, 0)] * 2
    # what was said for the view tells how much to expect, and the first round of how many samples a step is
    assert local_steps(tau, [pace(before=1000), nothing], 1, two) == (tau, 0)
    said = [pace((4, 1, 90_000), before=1000), pace((16, 1, 90_000), before=16_000)]
    assert [one.expected_us for one in said] == [4000, 1000]
    assert pace((4, 1, 90_000), (4, 1, 500), before=1000).expected_us == 500  # by now it is measured
    assert [local_steps(tau, said, i, two)[0] for i in range(2)] == [tau, 4 * tau]
    assert [one.speed for one in said] == [1000, 16_000]


def test_equal_machines_take_tau_steps_each_however_their_times_jitter() -> None:
    rng = random.Random(3)
    paces = [pace(*[(32, 8, rng.randint(98_000, 102_000)) for _ in range(3)]) for _ in range(8)]
    assert {local_steps(8, paces, i, [True] * 8) for i in range(8)} == {(8, 0)}
