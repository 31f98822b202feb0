"""The barrier: whose headers count, who is told what, and what follows from a full set."""

from __future__ import annotations

import itertools

import pytest

from p2p_dmc.agent.barrier import Barrier, BarrierResult
from p2p_dmc.wire.messages import RoundHeader
from tests.agent.helpers import VIEW_ID, header_like, member, payload, peer, plain, view_of

VIEW = view_of([payload(), payload(), payload()], view_epoch=4, start=(3, 7))


def header(**facts: object) -> RoundHeader:
    given = {"view_epoch": 4, "view_id": VIEW_ID, "round": 8, "digest": b"s" * 16, "finite": True} | facts
    made = plain(RoundHeader, **given)
    assert isinstance(made, RoundHeader)
    return made


def barrier() -> Barrier:
    return Barrier(VIEW, member(1))


def test_the_first_round_follows_the_start_state() -> None:
    assert barrier().round == 8 and barrier().own is None and barrier().last_own is None


def test_a_full_set_in_ring_order_whatever_the_order_of_arrival() -> None:
    for order in itertools.permutations((1, 2, 3)):
        b = barrier()
        for n, i in enumerate(order):
            assert b.result() is None
            assert b.missing() == tuple(member(j) for j in (1, 2, 3) if j not in order[:n])
            if i == 1:
                b.say(header(samples=10))
            else:
                b.add(peer(i), header(samples=10 * i))
        result = b.result()
        assert result is not None and result.weights == (10, 20, 30) and b.missing() == ()
        assert list(b.heard()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("sender", "facts"),
    [
        (2, {"view_epoch": 3}),
        (2, {"view_epoch": 5}),
        (2, {"view_id": b"w" * 16}),
        (9, {}),
        (2, {"round": 6}),
        (2, {"round": 7}),
        (2, {"round": 10}),
    ],
)
def test_headers_of_another_view_round_or_stranger_do_not_count(
    sender: int, facts: dict[str, object]
) -> None:
    b = barrier()
    assert b.add(peer(sender), header(**facts)) is None
    assert list(b.heard()) == [] and len(b.missing()) == 3


def test_a_faster_member_may_be_one_round_ahead() -> None:
    b = barrier()
    b.add(peer(2), header(round=9, samples=5))
    assert list(b.heard()) == []
    b.say(header())
    b.next_round()
    assert b.round == 9 and list(b.heard()) == [1]
    b.add(peer(3), header(round=10))
    b.next_round()
    assert list(b.heard()) == [2]


def test_whoever_repeats_itself_after_all_have_spoken_is_told_mine_again() -> None:
    """It seems to have missed mine. While anybody is missing, I repeat anyhow, so nothing is answered."""
    b = barrier()
    own = header(samples=1)
    assert b.add(peer(2), header()) is None
    assert b.add(peer(2), header()) is None  # I have said nothing
    b.say(own)
    assert b.add(peer(2), header()) is None  # the third is missing
    assert b.add(peer(3), header()) is None  # complete now, and it was not a repetition
    assert b.add(peer(3), header()) == own
    assert b.add(peer(2), header(round=9)) is None
    assert b.add(peer(2), header(round=9)) is None  # it is ahead, it has mine


def test_whoever_is_a_round_behind_is_told_my_last_header() -> None:
    b = barrier()
    own = header(samples=1)
    b.say(own)
    b.next_round()
    assert b.last_own == own and b.own is None
    assert b.add(peer(2), header()) == own
    assert list(b.heard()) == []


def test_a_later_header_of_a_round_replaces_the_earlier_one() -> None:
    b = barrier()
    b.say(header())
    b.add(peer(2), header())
    b.add(peer(3), header())
    b.add(peer(3), header(change=True))
    result = b.result()
    assert result is not None and result.change


def result_of(*facts: dict[str, object]) -> BarrierResult:
    return BarrierResult(
        headers=tuple(header(**one) for one in facts),
        voting=tuple(one.get("samples") != LEARNER for one in facts),
    )


LEARNER = 999
"""Samples of a header that a learner said: they weigh nothing."""


def test_a_learner_weighs_nothing_and_has_no_digest() -> None:
    both = result_of({"samples": 3, "final": True}, {"samples": LEARNER, "digest": b"?" * 16})
    assert both.weights == (3, 0)
    assert both.final and both.odd_ones() == ()
    assert both.common()[0] == both.headers[0].digest
    other_model = result_of({"samples": 3}, {"samples": LEARNER, "payload_spec": b"?" * 16})
    assert other_model.odd_ones() == (1,), "its size would abort the reduction"
    assert result_of({"samples": 3}, {"samples": LEARNER, "change": True}).change


def test_flags() -> None:
    """One change or closing flag moves all; a run is over only when nobody has anything left."""
    assert not result_of({}, {}).change and result_of({}, {"change": True}).change
    assert not result_of({}, {}).closing and result_of({"closing": True}, {}).closing
    assert not result_of({"final": True}, {}).final and result_of({"final": True}, {"final": True}).final


def test_what_is_not_finite_weighs_nothing() -> None:
    assert result_of({"samples": 3}, {"samples": 4, "finite": False}, {}).weights == (3, 0, 0)


@pytest.mark.parametrize(
    ("digests", "odd"),
    [("aaa", ()), ("aab", (2,)), ("baa", (0,)), ("abb", (0,)), ("ab", (0,)), ("ba", (1,)), ("abcc", (0, 1))],
)
def test_the_majority_names_the_odd_ones(digests: str, odd: tuple[int, ...]) -> None:
    """Of two halves the greater digest is right, wherever it stands, so that all name the same members."""
    assert result_of(*({"digest": d.encode() * 16} for d in digests)).odd_ones() == odd
    assert result_of(*({"payload_spec": d.encode() * 16} for d in digests)).odd_ones() == odd


def test_a_header_like_another() -> None:
    """The helper that other tests build on."""
    assert header_like(header(samples=3), samples=4) == header(samples=4)
