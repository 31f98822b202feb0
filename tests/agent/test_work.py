"""Who trains on what within a view: equal on all members, claims first, nothing leased twice, strikes told once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.agent.takeovers import Takeover, takeovers
from p2p_dmc.agent.trainer_desk import MAX_BYTES
from p2p_dmc.agent.view_opening import local_mode
from p2p_dmc.agent.work import (
    MOST_IN_HAND,
    InFlight,
    PlainBraid,
    ProposalPayload,
    Strike,
    Work,
    _Held,
    bitmap,
    check_payload,
    decode_payload,
    encode_payload,
    from_bitmap,
    gave_up_claims,
    in_start,
    opening_ledger,
    plain,
    to_braids,
    to_stretches,
    unreachable,
    valid_claims,
)
from p2p_dmc.core.agreement_messages import PAYLOAD_MAX_BYTES, StateRef, View
from p2p_dmc.core.assignment import Assignment
from p2p_dmc.core.braids import Braid, in_turn, unordered
from p2p_dmc.core.ledger import Ledger, Stretch
from p2p_dmc.core.pace import Pace
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.wire.trainer_messages import Local
from tests.agent.helpers import DATASET, payload, peer, view_of

ALL = (0, 1, 2, 3)
Plain = tuple[int, int, int]


def ledger(counts: tuple[int, ...] = (10, 10, 10, 10), epochs: int = 2) -> Ledger:
    return Ledger.start(DATASET, counts, 5, epochs)


def stretch(shard: int, lo: int, hi: int) -> Stretch:
    return Stretch(shard=shard, lo=lo, hi=hi)


def triples(stretches: tuple[Stretch, ...]) -> tuple[Plain, ...]:
    return tuple((s.shard, s.lo, s.hi) for s in stretches)


def each(*stretches: Plain) -> tuple[PlainBraid, ...]:
    """Braids of one stretch."""
    return tuple((one,) for one in stretches)


def samples(braids: Iterable[Braid]) -> list[tuple[int, int]]:
    return list(in_turn(braids))


# -- what a proposal carries ------------------------------------------------------------------------------------------


@given(st.integers(0, 70), st.data())
def test_bitmaps(count: int, data: st.DataObject) -> None:
    held = (
        frozenset(data.draw(st.sets(st.integers(0, max(0, count - 1)), max_size=count)))
        if count
        else frozenset()
    )
    packed = bitmap(held, count)
    assert from_bitmap(packed, count) == held and len(packed) == -(-count // 8)
    for wrong in (packed + b"\0", packed[:-1] if packed else b"\0"):
        with pytest.raises(RemoteProtocolError, match="a bitmap of"):
            from_bitmap(wrong, count)


@given(st.binary(max_size=4), st.sets(st.integers(0, 40)))
def test_one_bit_tells_what_the_whole_bitmap_does(bits: bytes, more: set[int]) -> None:
    held = _Held(bits, frozenset(more))
    assert {i for i in range(60) if i in held} == from_bitmap(bits, 8 * len(bits)) | more


def test_bits_beyond_the_last_shard_name_none() -> None:
    assert from_bitmap(b"\xff", 3) == {0, 1, 2}


def test_stretches_that_do_not_exist_are_left_out() -> None:
    there = ((0, 0, 10), (3, 9, 10))
    nowhere = ((4, 0, 1), (-1, 0, 1), (0, -1, 3), (0, 3, 3), (0, 4, 3), (0, 0, 11))
    assert triples(to_stretches(there + nowhere, ledger())) == there
    assert plain(to_braids([there, nowhere, nowhere[:1] + there[:1]], ledger())) == (there, there[:1])


def test_claims_of_an_older_view_or_another_epoch_are_dead() -> None:
    claim = each((0, 0, 4))
    payloads = [
        payload(view_epoch=7, claims=claim),
        payload(view_epoch=6, claims=claim),
        payload(view_epoch=7, epoch=1, claims=claim),
        payload(view_epoch=7, claims=each((1, 0, 2))),
    ]
    assert list(map(plain, valid_claims(payloads, [True] * len(payloads), ledger()))) == [
        claim,
        (),
        (),
        each((1, 0, 2)),
    ]


# -- one assignment for all -------------------------------------------------------------------------------------------

COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any).map(tuple)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Ledger, list[object]]:
    """A ledger that has come some way, and members with claims that may overlap each other and it."""
    begun = ledger(draw(COUNTS))
    counts = begun.counts

    def some(most: int) -> tuple[Plain, ...]:
        picked = []
        for _ in range(draw(st.integers(0, most))):
            shard = draw(st.integers(0, len(counts) - 1))
            if counts[shard]:
                lo = draw(st.integers(0, counts[shard] - 1))
                picked.append((shard, lo, draw(st.integers(lo + 1, counts[shard]))))
        return tuple(picked)

    for one in to_stretches(some(3), begun):
        if set(samples(((one,),))) <= set(samples((s,) for s in begun.remaining())) and begun.epoch == 0:
            begun = begun.advance([one])
    shards = st.sets(st.integers(0, len(counts) - 1))
    payloads = [
        payload(
            sorted(draw(shards)),
            len(counts),
            view_epoch=draw(st.integers(0, 1)),
            epoch=draw(st.integers(0, 1)),
            claims=each(*some(3)),
            reachable=sorted(draw(shards)),
            speed=draw(st.integers(0, 50)),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    return begun, payloads


@settings(max_examples=120, deadline=None)
@given(situations(), st.booleans(), st.sets(st.integers(2, 4)))
def test_every_member_computes_the_same_and_every_open_sample_is_one_members(
    situation: tuple[Ledger, list[object]], keep: bool, learners: set[int]
) -> None:
    begun, payloads = situation
    view = view_of(payloads, learners=sorted(learners))  # type: ignore[arg-type]
    voting = [member in view.voters for member in view.members]
    works = [Work.for_view(view, i, begun, keep_leases=keep) for i in range(len(payloads))]
    assert len({w.assignment.digest() for w in works}) == 1
    assert len({w.lost for w in works}) == 1
    handed = [sample for part in works[0].assignment.lists for sample in samples(part)]
    assert len(handed) == len(set(handed))  # nobody's twice
    said = [decode_payload(p) for p in view.payloads]
    claimed = {s for claims in valid_claims(said, voting, begun) for s in samples(claims)}
    lost = unreachable(said, begun)
    due = {(s.shard, p) for s in begun.remaining() for p in range(s.lo, s.hi)}
    assert set(handed) == {s for s in due if s[0] not in lost or s in claimed}
    for i, work in enumerate(works):
        mine = samples(works[0].assignment.lists[i])
        assert voting[i] or not mine
        if keep:  # leased is exactly the head of my list that I claimed
            assert set(mine[: work.leased]) <= set(samples(valid_claims(said, voting, begun)[i]))
            rest = set(samples(valid_claims(said, voting, begun)[i])) - set(mine[: work.leased])
            assert not rest & set(mine)
        else:
            assert work.leased == 0


def test_the_next_epoch_needs_no_new_view() -> None:
    view = view_of([payload(ALL, claims=each((0, 0, 10))), payload(ALL)])
    over = ledger().skip(ledger().remaining())
    assert over.epoch == 1
    works = [Work.for_epoch(view, i, over, [30, 10]) for i in (0, 1)]
    assert works[0].assignment == works[1].assignment and works[0].assignment.epoch == 1
    assert [works[0].assignment.length(i) for i in (0, 1)] == [30, 10]
    assert [w.leased for w in works] == [0, 0]


# -- leases -----------------------------------------------------------------------------------------------------------


def two_members(claims: tuple[PlainBraid, ...] = ()) -> Work:
    return Work.for_view(view_of([payload(ALL, claims=claims), payload(ALL)]), 0, ledger(), keep_leases=True)


def test_leases_follow_the_list_and_end_with_it() -> None:
    work = two_members()
    whole = samples(work.assignment.lists[0])
    assert len(whole) == 20
    assert samples(work.peek(6)) == whole[:6] and work.leased == 0  # peeking takes nothing
    assert samples(work.lease(6)) == whole[:6] == samples(work.claims())
    assert samples(work.lease(100)) == whole[6:]
    assert work.lease(1) == work.peek(1) == ()
    assert samples(work.claims()) == whole


def test_no_more_stretches_are_leased_than_a_proposal_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2p_dmc.agent.work.MOST_IN_HAND", 20)
    counts = (1,) * 40
    view = view_of([payload(range(40), 40)])
    work = Work.for_view(view, 0, ledger(counts), keep_leases=False)
    handed_out: list[tuple[int, int]] = []
    while work.left:
        leased = samples(work.lease(100))
        assert 0 < len(leased) <= 20 and work.lease(100) == ()
        handed_out += leased
        one_stays = work.cursors[0] == 0
        work.advance([work.leased - work.cursors[0] - one_stays])
    assert len(handed_out) == len(set(handed_out)) == 40


def test_the_most_that_a_member_may_have_to_say_fits_a_proposal() -> None:
    many = 1 << 20
    full = payload(
        range(many),
        many,
        claims=(((many, 1 << 24, 1 << 24),),) * MOST_IN_HAND,
        strikes=(Strike(victim="a" * 40, view_epoch=1 << 40, death=1, epoch=0, stretches=((1, 0, 1),)),),
    )
    assert len(encode_payload(full)) + MAX_BYTES <= PAYLOAD_MAX_BYTES


def test_what_a_round_counted_is_claimed_no_more() -> None:
    work = two_members()
    whole = samples(work.assignment.lists[0])
    work.lease(8)
    assert samples(work.next_of(0, 5)) == whole[:5] and work.next_of(1, 0) == ()
    work.advance([5, 2])
    assert work.cursors == [5, 2] and samples(work.claims()) == whole[5:8]
    assert samples(work.next_of(0, 5)) == whole[5:10]
    work.drop_leases()
    assert work.claims() == () and samples(work.lease(2)) == whole[5:7]


def test_more_than_it_was_given_is_the_members_fault() -> None:
    work = two_members()
    assert len(samples(work.next_of(1, 20))) == 20
    with pytest.raises(RemoteProtocolError, match="member 1 says it consumed more"):
        work.next_of(1, 21)


def test_counting_what_was_never_leased_is_our_own_bug() -> None:
    work = two_members()
    work.lease(3)
    with pytest.raises(AssertionError, match="counted 4 samples of 3"):
        work.advance([4, 0])


def test_keep_counted_and_reset() -> None:
    """What becomes of 8 leased samples, 5 of them in a round that failed, was completed by others, or is void."""
    before = two_members()
    before.lease(8)
    claims = plain(before.claims())
    view = view_of([payload(ALL, view_epoch=1, claims=claims), payload(ALL, view_epoch=1)], view_epoch=2)
    kept = Work.for_view(view, 0, ledger(), keep_leases=True)  # KEEP: nothing was counted
    assert kept.leased == 8 and samples(kept.claims()) == samples(before.claims())
    assert not set(samples(kept.lease(100))) & set(samples(before.claims()))
    counted = ledger().advance(unordered(before.next_of(0, 5)))  # COUNTED: the start state has my five
    work = Work.for_view(view, 0, counted, keep_leases=True)
    assert work.leased == 3 and samples(work.claims()) == samples(before.claims())[5:]
    reset = Work.for_view(view, 0, ledger(), keep_leases=False)  # RESET: to be consumed again, and mine first
    assert reset.leased == 0 and set(samples(reset.peek(8))) == set(samples(before.claims()))


def test_claims_survive_several_views_without_a_round() -> None:
    work = two_members()
    work.lease(7)
    for epoch in range(2, 5):
        mine = payload(ALL, view_epoch=epoch - 1, claims=plain(work.claims()))
        view = view_of([mine, payload(ALL, view_epoch=epoch - 1)], view_epoch=epoch)
        claimed = samples(work.claims())
        work = Work.for_view(view, 0, ledger(), keep_leases=True)
        assert samples(work.claims()) == claimed


def state_ref(view_epoch: int, number: int, mark: bytes = b"s") -> StateRef:
    return StateRef(lineage=(view_epoch, number), digest=mark * 16)


START, BASE, OTHER = state_ref(5, 9), state_ref(5, 9), state_ref(5, 8)


@pytest.mark.parametrize(
    ("honoured", "base", "counted", "mode"),
    [
        (True, BASE, False, Local.KEEP),
        (True, BASE, True, Local.KEEP),
        (True, state_ref(5, 9, b"i"), False, Local.RESET),
        (True, OTHER, True, Local.COUNTED),
        (True, OTHER, False, Local.RESET),
        (True, state_ref(4, 9), True, Local.COUNTED),
        (True, None, True, Local.RESET),
        (False, BASE, False, Local.RESET),
        (False, OTHER, True, Local.RESET),
    ],
)
def test_local_mode(honoured: bool, base: StateRef | None, counted: bool, mode: Local) -> None:
    assert local_mode(START, honoured=honoured, base=base, counted=counted) is mode


@pytest.mark.parametrize(
    ("lineage", "samples", "settled", "counted"),
    [
        ((5, 9), 3, [(0, 0, 2), (1, 5, 6)], True),
        ((5, 9), 3, [(0, 0, 2), (1, 5, 8)], True),
        ((5, 9), 3, [(0, 0, 2)], False),  # the start is another view's round of this number
        ((5, 9), 3, [(1, 5, 6)], False),
        ((5, 9), 0, [], True),
        ((5, 8), 3, [(0, 0, 2), (1, 5, 6)], False),
    ],
)
def test_a_header_is_in_the_start_if_its_samples_are(
    lineage: tuple[int, int], samples: int, settled: list[Plain], counted: bool
) -> None:
    mine = payload(claims=each((0, 0, 2), (1, 5, 8)))
    start = ledger().advance([stretch(*one) for one in settled])
    assert in_start(InFlight(lineage, samples), START, mine, start) is counted
    assert not in_start(None, START, mine, start)


# -- the rest shared out anew ------------------------------------------------------------------------------------------

SLOW = Pace(before=0).after(4, 1, 4_000_000).after(4, 1, 4_000_000)
QUICK = Pace(before=0).after(4, 1, 40_000).after(4, 1, 40_000)
FAST = Pace(before=0).after(4, 1, 400_000).after(4, 1, 400_000)


def three_works(leased: int) -> tuple[View, list[Work]]:
    """Of two voters and a learner; the first has so many samples in hand."""
    view = view_of([payload(ALL), payload(ALL), payload(ALL)], learners=[3])
    works = [Work.for_view(view, i, ledger(), keep_leases=False) for i in range(3)]
    works[0].lease(leased)
    return view, works


def test_all_compute_the_same_rest_and_a_learner_has_none_of_it() -> None:
    view, works = three_works(4)
    weights, paces = (2, 4, 0), (SLOW, FAST, Pace(before=0))
    counted = {x for work in works[:1] for i, w in enumerate(weights) for x in samples(work.next_of(i, w))}
    shared = [work.rebalanced(view, weights, paces, drop_leases=False) for work in works]
    assert all(work is not None for work in shared)
    assert len({work.assignment.digest() for work in shared if work is not None}) == 1
    assert shared[0] is not None and works[0].cursors == [0, 0, 0]  # nothing has changed yet
    lists = shared[0].assignment.lists
    assert [shared[0].assignment.length(i) for i in range(3)] == [3, 31, 0]
    rest = [x for braids in lists for x in samples(braids)]
    assert len(rest) == len(set(rest)) == 34 and not counted & set(rest)


def test_a_lease_that_is_still_mine_stays_and_another_is_taken_back() -> None:
    for leased, left in ((2, 0), (4, 2), (5, 3), (6, 0), (20, 0)):
        view, works = three_works(leased)
        in_hand = samples(works[0].assignment.consumed(0, 2, leased))
        work = works[0].rebalanced(view, (2, 4, 0), (SLOW, FAST, Pace(before=0)), drop_leases=False)
        assert work is not None and work.leased == left
        assert samples(work.claims()) == in_hand[:left]
        dropped = works[0].rebalanced(view, (2, 4, 0), (SLOW, FAST, Pace(before=0)), drop_leases=True)
        assert dropped is not None and dropped.leased == 0


def test_equal_members_go_on_as_they_are() -> None:
    view, works = three_works(4)
    assert works[0].rebalanced(view, (4, 4, 0), (FAST, FAST, Pace(before=0)), drop_leases=False) is None
    assert works[0].rebalanced(view, (4, 4, 0), (Pace(before=0),) * 3, drop_leases=False) is None


def test_a_shard_that_was_trained_on_here_is_here() -> None:
    """The first member holds nothing: it fetched, and what it has fetched it may be given more of."""
    view = view_of([payload((), 1), payload((0,), 1)])
    work = Work.for_view(view, 1, ledger((40,)), keep_leases=False)
    assert [work.assignment.length(i) for i in (0, 1)] == [20, 20]
    work.lease(20)
    paces = (QUICK, SLOW)  # the first one idles for less than half a second
    unknown = work.rebalanced(view, (0, 4), paces, drop_leases=False)
    work.advance((4, 4))
    known = work.rebalanced(view, (0, 4), paces, drop_leases=False)
    assert known is not None and known.assignment.length(0) > 16 and unknown is None


def test_claims_of_before_the_rest_was_shared_out_anew_are_dead() -> None:
    claim = each((0, 0, 4))
    old, new = payload(view_epoch=7, claims=claim), payload(view_epoch=7, part=1, claims=claim)
    begun = ledger().shared_anew()
    assert list(map(plain, valid_claims([old, new], [True, True], begun))) == [(), claim]
    assert gave_up([old], begun) and not gave_up([new], begun) and not gave_up([old], ledger())


def gave_up(payloads: list[ProposalPayload], ledger: Ledger) -> bool:
    """The last one of these members."""
    return gave_up_claims(payloads, [True] * len(payloads), len(payloads) - 1, ledger)


def test_of_two_who_claim_the_same_one_begins_anew() -> None:
    """Some have installed one view, some another of the same number, with other assignments."""
    one = payload(view_epoch=7, claims=each((0, 0, 4)))
    other = payload(view_epoch=7, claims=(((1, 0, 2), (0, 3, 5)),))
    assert gave_up([one, other], ledger()) and gave_up([other, one], ledger())
    assert not gave_up([one, payload(view_epoch=7, claims=each((0, 4, 6)))], ledger())
    assert not gave_up_claims([one, other], [True, True], 0, ledger())  # the first one has them
    assert not gave_up_claims([one, other], [False, True], 1, ledger())  # a learner claims nothing
    counted = ledger().advance([stretch(0, 3, 5)])
    assert not gave_up([one, other], counted)  # whether that is its own round is told by the start state


# -- strikes and lost shards ------------------------------------------------------------------------------------------


def strike(*stretches: Plain, victim: str = "a:1", death: int = 1, epoch: int = 0) -> Strike:
    return Strike(victim=victim, view_epoch=1, death=death, epoch=epoch, stretches=stretches)


def test_a_strike_counts_once_however_many_repeat_it() -> None:
    told = [payload(strikes=(strike((0, 0, 3)),)), payload(strikes=(strike((0, 0, 3)), strike((0, 0, 3))))]
    opened = opening_ledger(told, ledger(), skip_lost=False)
    assert opened.strikes == (stretch(0, 0, 3),) and opened.progress()[1] == 0


def test_a_death_that_the_ledger_knows_does_not_count_again_when_its_victim_is_back() -> None:
    once = strike((0, 0, 3))
    begun = opening_ledger([payload(strikes=(once,))], ledger(), skip_lost=False)
    there, back = payload(counted=(once.key,)), payload(strikes=(once,))
    for order in ((there, back), (back, there)):
        assert opening_ledger(order, begun, skip_lost=False) == begun
    assert opening_ledger([back], begun, skip_lost=False).skipped[0] == ((0, 3),)  # nobody knows better


def test_claims_of_an_epoch_that_skipping_ends_are_given_up() -> None:
    begun = ledger((4,)).advance([stretch(0, 0, 2)])
    mine = payload((0,), 1, claims=each((0, 2, 4)), strikes=(strike((0, 2, 4)), strike((0, 2, 4), death=2)))
    opened = opening_ledger([mine], begun, skip_lost=False)
    assert opened.epoch == 1
    assert gave_up([mine], opened) and not gave_up([mine], begun)
    assert not gave_up([payload((0,), 1)], opened)  # nothing in hand, nothing lost


def test_two_deaths_put_a_sample_out() -> None:
    payloads = [payload(strikes=(strike((0, 0, 3)),)), payload(strikes=(strike((0, 2, 5), victim="b:1"),))]
    for order in itertools.permutations(payloads):
        opened = opening_ledger(order, ledger(), skip_lost=False)
        assert opened.skipped[0] == ((2, 3),)
    again = strike((0, 0, 3), death=2)  # the same trainer's second death is another strike
    assert opening_ledger([payload(strikes=(strike((0, 0, 3)), again))], ledger(), skip_lost=False).skipped[
        0
    ] == ((0, 3),)


def test_strikes_of_another_epoch_or_of_nothing_are_forgotten() -> None:
    payloads = [
        payload(strikes=(strike((0, 0, 3), epoch=1), strike((9, 0, 3), death=2), strike((0, 0, 99), death=3)))
    ]
    assert opening_ledger(payloads, ledger(), skip_lost=False) == ledger()


def test_strikes_that_end_the_epoch_say_nothing_of_the_next() -> None:
    """Both strikes put the last open samples out; a third names positions of an epoch that is over by then."""
    begun = ledger((4,)).advance([stretch(0, 0, 2)])
    payloads = [
        payload((0,), 1, strikes=(strike((0, 2, 4)), strike((0, 2, 4), death=2), strike((0, 2, 4), death=3)))
    ]
    opened = opening_ledger(payloads, begun, skip_lost=False)
    assert opened.epoch == 1 and opened.strikes == () and opened.progress() == (0, 0, 4)


def test_strikes_after_the_last_epoch_say_nothing() -> None:
    """A trainer that dies between the last round and the end of the run has counted samples in hand."""
    done = ledger((4,), 1).advance([stretch(0, 0, 4)])
    assert done.done
    payloads = [payload((0,), 1, epoch=1, claims=each((0, 0, 4)), strikes=(strike((0, 0, 4), epoch=1),))]
    assert opening_ledger(payloads, done, skip_lost=True) == done
    work = Work.for_view(view_of(payloads), 0, done, keep_leases=True)
    assert work.leased == 0 and work.lease(5) == ()


def test_lost_shards_are_those_that_no_member_can_reach() -> None:
    payloads = [payload(reachable=(0, 1)), payload(reachable=(1, 3))]
    assert unreachable(payloads, ledger()) == {2}
    assert opening_ledger(payloads, ledger(), skip_lost=False) == ledger()
    opened = opening_ledger(payloads, ledger(), skip_lost=True)
    assert [i for i in range(4) if opened.skipped[i] == ((0, 10),)] == [2] and opened.progress()[1] == 10
    with pytest.raises(RemoteProtocolError):
        unreachable([payload(count=9)], ledger())


def test_lost_shards_wait_outside_the_assignment() -> None:
    view = view_of([payload((0, 1), reachable=(0, 1)), payload((3,), reachable=(0, 1, 3))])
    work = Work.for_view(view, 0, ledger(), keep_leases=False)
    assert work.lost == {2}
    assert {shard for part in work.assignment.lists for shard, _ in samples(part)} == {0, 1, 3}


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_opening_is_the_same_whatever_the_order_of_members_and_strikes(rng: random.Random) -> None:
    strikes = [
        strike(
            (rng.randrange(4), lo := rng.randrange(9), rng.randint(lo + 1, 10)),
            victim=f"{rng.randrange(3)}:1",
            death=d,
        )
        for d in range(rng.randint(0, 6))
    ]

    def told() -> Ledger:
        order = [payload(strikes=tuple(rng.sample(strikes, len(strikes)))) for _ in range(3)]
        return opening_ledger(order, ledger(), skip_lost=False)

    assert told() == told()


# -- takeovers --------------------------------------------------------------------------------------------------------


def work_of(*parts: tuple[Plain, ...], epoch: int = 0) -> Work:
    lists = tuple(tuple((stretch(*one),) for one in part) for part in parts)
    return Work(Assignment(epoch=epoch, lists=lists), 0, 0)


def test_the_gone_members_rest_and_who_has_it_now() -> None:
    old_view, new_view = view_of([payload()] * 3), view_of([payload()] * 2, members=(1, 3))
    old = work_of(((0, 0, 10),), ((1, 0, 10), (2, 5, 9)), ((3, 0, 10),))
    new = work_of(((0, 0, 10), (1, 4, 7)), ((3, 0, 10), (1, 7, 10), (2, 0, 10)))
    assert takeovers(old, old_view, new, new_view) == (
        Takeover(shard=1, from_peer=peer(2), to_peer=peer(1), first=4, samples=3),
        Takeover(shard=1, from_peer=peer(2), to_peer=peer(3), first=7, samples=3),
        Takeover(shard=2, from_peer=peer(2), to_peer=peer(3), first=5, samples=4),
    )
    moved = work_of(((1, 0, 10),), ((0, 0, 10), (2, 5, 9)), ((3, 0, 10),))
    assert takeovers(old, old_view, moved, old_view) == ()  # nobody is gone
    next_epoch = work_of(((1, 0, 10),), (), epoch=1)
    assert takeovers(old, old_view, next_epoch, new_view) == ()  # the same numbers name other samples


def test_a_payload_that_no_view_could_be_opened_with_is_refused_when_it_is_said() -> None:
    good = ProposalPayload(
        view_epoch=0,
        epoch=0,
        part=0,
        claims=(),
        holdings=b"\xff",
        reachable=b"\xff",
        speed=0,
        full=False,
        strikes=(),
    )
    strike = Strike(victim="a:1", view_epoch=1, death=1, epoch=0, stretches=((0, 0, 1),))
    check_payload(encode_payload(good), 8)
    check_payload(encode_payload(replace(good, strikes=(strike,) * 64)), None)
    uneven = (((0, 0, 2), (1, 0, 3)),)
    for bad in (
        replace(good, speed=-1),
        replace(good, holdings=b""),
        replace(good, reachable=b"\xff\xff"),
        replace(good, claims=uneven),
        replace(good, claims=((),)),
        replace(good, strikes=(strike,) * 65),
    ):
        with pytest.raises(RemoteProtocolError):
            check_payload(encode_payload(bad), 8)
    with pytest.raises(RemoteProtocolError):
        check_payload(b"junk", None)
