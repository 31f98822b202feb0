"""How a ready trainer gets in: every step, with a clock of our own."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from p2p_dmc.agent.entering import Entrance, OtherPeer, Step, others
from p2p_dmc.core.membership import MemberState
from p2p_dmc.wire.messages import RunMeta
from tests.agent.helpers import peer, record, run_meta, surroundings

ME = peer(5)
H1, H2 = b"1" * 16, b"2" * 16


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Door:
    """An entrance that founds after 0.7 s of stillness and asks every 0.5 s."""

    def __init__(self, min_peers: int = 1) -> None:
        self.clock = Clock()
        self.entrance = Entrance(min_peers, 700, 500, self.clock)

    def after(
        self,
        seconds: float,
        *peers: OtherPeer,
        mine: RunMeta | None = None,
        seed_known: bool = True,
        courted: bytes = b"",
    ) -> Step:
        self.clock.now_s += seconds
        return self.entrance.step(mine or run_meta(), ME, peers, seed_known, courted)


def other(i: int, **facts: object) -> OtherPeer:
    return OtherPeer(peer_id=peer(i), meta=run_meta(**facts))


def test_it_founds_with_all_that_are_ready_once_nothing_has_changed_for_a_while() -> None:
    door = Door()
    assert door.after(0, other(7)) == Step()
    assert door.after(0.6, other(7)) == Step()
    assert door.after(0.6, other(7), other(3)) == Step()  # somebody came: from the beginning
    assert door.after(0.6, other(7), other(3)) == Step()
    assert door.after(0.11, other(7), other(3)) == Step(found=(peer(3), ME, peer(7)))
    assert door.after(0, other(7), other(3), other(9, ready=False)).found  # who is not ready is no change
    assert door.after(0, other(7)) == Step()  # somebody left


def test_alone_it_founds_alone() -> None:
    door = Door()
    door.after(0)
    assert door.after(0.7) == Step(found=(ME,))


def test_it_waits_for_the_seed_and_for_enough_trainers_and_says_so() -> None:
    door = Door(min_peers=3)
    assert door.after(0, other(1), seed_known=False).waiting == "no seed has answered yet"
    assert door.after(9, other(1)).waiting == "2 of at least 3 trainers are ready (--min-peers)"
    assert door.after(9, other(1), other(2, fingerprint=b"else")).waiting.startswith("2 of at least 3")
    assert door.after(9, other(1), other(2)) == Step()  # enough, and still for no time yet
    assert len(door.after(0.7, other(1), other(2)).found) == 3


def test_a_run_that_has_begun_does_not_wait_for_min_peers() -> None:
    """Its quorum decides who may go on."""
    door = Door(min_peers=3)
    door.after(0, mine=run_meta(history=H1))
    assert door.after(0.7, mine=run_meta(history=H1)) == Step(found=(ME,))


def test_others_of_the_same_history_or_none_found_together() -> None:
    door = Door()
    mine = run_meta(history=H1, samples=5)
    peers = (other(1), other(2, history=H1))
    door.after(0, *peers, mine=mine)
    assert door.after(0.7, *peers, mine=mine) == Step(found=(peer(1), peer(2), ME))


def test_who_trains_something_else_is_not_founded_with() -> None:
    """Of two groups the one with the smallest peer founds; the other asks to join, and is told the difference."""
    misfit = other(1, fingerprint=b"e" * 8)
    door = Door()
    door.after(0, misfit)
    assert door.after(9, misfit) == Step()
    misfit = other(8, fingerprint=b"e" * 8)
    door = Door()
    door.after(0, misfit)
    assert door.after(9, misfit) == Step(found=(ME,))
    asleep = other(1, fingerprint=b"e" * 8, ready=False)
    door = Door()
    door.after(0, asleep)
    assert door.after(9, asleep) == Step(found=(ME,))


def test_where_a_view_stands_it_asks_now_and_then() -> None:
    door = Door()
    standing = other(2, view_epoch=4, history=H1)
    assert door.after(0, standing, other(3)) == Step(ask=(peer(2),))
    assert door.after(0.4, standing, other(3)) == Step()
    assert door.after(0.1, standing, other(3)) == Step(ask=(peer(2),))
    assert door.after(9, standing, seed_known=False) == Step(ask=(peer(2),))  # no founding, so no seed needed
    many = [other(i, view_epoch=1, history=H1) for i in range(20)]
    assert len(door.after(9, *many).ask) == 8


def test_it_asks_all_in_turn() -> None:
    """A view is left when most of its voters want to: eight of twenty are too few, whoever they are."""
    door = Door()
    many = [other(i, view_epoch=1, history=H1) for i in range(20)]
    asked = [door.after(1, *many).ask for _ in range(3)]
    assert [len(ask) for ask in asked] == [8, 8, 8] and {name for ask in asked for name in ask} == {
        one.peer_id for one in many
    }


def test_of_several_histories_a_newcomer_asks_the_one_that_is_the_furthest() -> None:
    """Whoever asks and then does not answer, for it answered another one, costs them a view."""
    few = other(1, view_epoch=9, history=H2, samples=5)
    many = [other(i, view_epoch=2, history=H1, samples=i) for i in (2, 7)]
    assert Door().after(0, few, *many) == Step(ask=(peer(2), peer(7)))
    evicted = replace(few.meta, samples=900)
    took = [OtherPeer(peer_id=o.peer_id, meta=replace(o.meta, replaced=(H2,))) for o in many]
    assert Door().after(0, OtherPeer(peer_id=peer(1), meta=evicted), *took) == Step(ask=(peer(2), peer(7)))


# -- a newcomer that was asked to join a history ----------------------------------------------------------------------


def test_it_asks_those_that_continue_that_history_and_no_others() -> None:
    mine = other(3, view_epoch=2, history=H1)
    rival = other(1, view_epoch=9, history=H2, samples=900)
    assert Door().after(0, rival, mine, courted=H1) == Step(ask=(peer(3),))


def test_it_founds_nothing_and_says_why() -> None:
    door = Door()
    door.after(0, other(7), courted=H1)
    step = door.after(99, other(7), courted=H1)
    assert step == Step(waiting=f"nobody is here of those that have begun it (history {H1.hex()[:8]})")


def test_it_waits_for_one_of_that_history_that_pauses_whoever_else_goes_on() -> None:
    pauses = other(3, history=H1)
    goes_on = other(1, view_epoch=9, history=H2, samples=900)
    step = Door().after(99, pauses, goes_on, courted=H1)
    assert step == Step(ask=(peer(3),), waiting=f"peer {peer(3)} has begun it and pauses")


@pytest.mark.parametrize("history", [H1, H2])
def test_it_asks_those_that_may_have_finished_the_run(history: bytes) -> None:
    finished = other(3, history=history, samples=900, ready=False)
    step = Door().after(0, finished, other(4), courted=H1)
    assert step.ask == (peer(3),) and step.waiting and not step.court


def test_once_nobody_is_heard_of_that_history_it_joins_one_that_goes_on() -> None:
    few = other(1, view_epoch=9, history=H2, samples=5)
    many = other(2, view_epoch=2, history=b"3" * 16, samples=6)
    paused = other(3, history=b"4" * 16, samples=7)
    assert Door().after(0, few, many, paused, courted=H1) == Step(court=b"3" * 16)
    assert Door().after(0, few, paused, other(4), courted=H1) == Step(court=H2)


# -- two histories ----------------------------------------------------------------------------------------------------


def test_a_history_that_has_committed_nothing_yields() -> None:
    door = Door()
    assert door.after(0, other(1, history=H2, samples=5), mine=run_meta(history=H1)) == Step(yield_to=H2)
    assert door.after(0, other(1, history=H2), mine=run_meta(history=H1, samples=5)) == Step()  # it yields
    assert door.after(0, other(1, history=H2), mine=run_meta(history=H1)) == Step(yield_to=H2)
    assert door.after(0, other(1, history=H1), mine=run_meta(history=H2)) == Step()
    best = (other(1, history=H1, samples=3), other(2, history=b"3" * 16, samples=9))
    assert door.after(0, *best, mine=run_meta(history=H2)) == Step(yield_to=b"3" * 16)


def test_of_two_histories_with_samples_neither_yields_and_both_are_named() -> None:
    theirs = other(1, history=H2, samples=7, view_epoch=3)
    step = Door().after(0, theirs, mine=run_meta(history=H1, samples=5))
    assert step == Step(waiting=step.waiting)
    for word in (peer(1)[:8], H2.hex()[:8], "7 samples", H1.hex()[:8], "5", "give one another --run name"):
        assert word in step.waiting


@pytest.mark.parametrize(("a", "b"), list(itertools.product([0, 4, 9], repeat=2)))
def test_of_two_that_meet_at_most_one_yields(a: int, b: int) -> None:
    """Both look at each other: exactly one gives way if either has nothing, else none."""
    one, two = run_meta(history=H1, samples=a), run_meta(history=H2, samples=b)
    seen_by_one = Door().after(0, OtherPeer(peer_id=peer(2), meta=two), mine=one)
    seen_by_two = Door().after(0, OtherPeer(peer_id=peer(1), meta=one), mine=two)
    yields = bool(seen_by_one.yield_to) + bool(seen_by_two.yield_to)
    assert yields == (1 if 0 in (a, b) else 0)
    assert not seen_by_one.found and not seen_by_two.found


@pytest.mark.parametrize(("a", "b"), list(itertools.product([0, 4, 9], repeat=2)))
def test_with_quorum_any_exactly_one_of_two_yields(a: int, b: int) -> None:
    one = replace(run_meta(history=H1, samples=a), quorum="any")
    two = replace(run_meta(history=H2, samples=b), quorum="any")
    seen_by_one = Door().entrance.rivals(one, [OtherPeer(peer_id=peer(2), meta=two)])
    seen_by_two = Door().entrance.rivals(two, [OtherPeer(peer_id=peer(1), meta=one)])
    assert seen_by_one is not None and seen_by_two is not None
    assert bool(seen_by_one.yield_to) + bool(seen_by_two.yield_to) == 1
    assert seen_by_one.yield_to == (H2 if (b, H2) > (a, H1) else b"")


@pytest.mark.parametrize("quorum", ["majority", "any"])
def test_a_learner_yields_when_its_history_does(quorum: str) -> None:
    """What it has got of it by now is less. Once its voters are in the other one, its own count is all there is."""
    learner = run_meta(history=H1, samples=0, quorum=quorum, view_epoch=3)
    voter = other(1, history=H1, samples=9, quorum=quorum, view_epoch=3)
    rival = other(2, history=H2, samples=5, quorum=quorum, view_epoch=2)
    door = Door().entrance
    assert door.rivals(learner, [voter, rival]) == door.rivals(voter.meta, [rival])
    assert door.rivals(learner, [rival]) == Step(yield_to=H2)


def test_peers_of_one_history_are_no_rivals() -> None:
    assert Door().entrance.rivals(run_meta(history=H1), [other(1, history=H1), other(2)]) is None


def test_a_stranger_without_a_view_or_without_a_history_is_no_second_history() -> None:
    door = Door()
    door.after(0, other(1), mine=run_meta(history=H1))
    assert door.after(0.7, other(1), mine=run_meta(history=H1)).found
    door = Door()
    assert door.after(0, other(1, history=H1, view_epoch=2)).ask  # I have none: I join it


# -- who is there -----------------------------------------------------------------------------------------------------


def test_others_are_the_living_that_speak_of_this_run(tmp_path: Path) -> None:
    around = surroundings(tmp_path, me=5)
    mine, another = run_meta(name="r"), run_meta(name="q")
    around.members += [
        record(1, another, mine),
        record(2, mine, state=MemberState.SUSPECT),
        record(3, mine, state=MemberState.DEAD),
        record(4, mine, state=MemberState.LEFT),
        record(5, mine),
        record(6, another),
        record(7),
    ]
    assert [o.peer_id for o in others(around.services, "r")] == [peer(1), peer(2)]
    assert [o.peer_id for o in others(around.services, "q")] == [peer(1), peer(6)]


# -- a history that took another's place -----------------------------------------------------------------------------


@pytest.mark.parametrize("quorum", ["majority", "strict", "any"])
@pytest.mark.parametrize(("mine", "theirs"), [(900, 10), (10, 900), (0, 0)])
def test_whoever_is_in_a_history_that_was_replaced_gives_it_up(quorum: str, mine: int, theirs: int) -> None:
    """However much it has trained; and the other one does not yield to it, whatever the quorum."""
    old = run_meta(history=H1, samples=mine, quorum=quorum, view_epoch=3)
    new = run_meta(history=H2, samples=theirs, quorum=quorum, view_epoch=2, replaced=(H1,))
    door = Door()
    step = door.entrance.step(old, ME, [OtherPeer(peer_id=peer(1), meta=new)], True)
    assert (step.yield_to, step.replaced) == (H2, True)
    assert door.entrance.rivals(new, [OtherPeer(peer_id=ME, meta=old)]) is None


def test_of_two_that_took_its_place_the_one_with_more_samples() -> None:
    """Two machines that evicted each other name each other; who comes back from before joins one of them."""
    h3 = b"3" * 16
    few = other(1, history=H2, samples=5, view_epoch=4, replaced=(H1,))
    many = other(2, history=h3, samples=6, view_epoch=4, replaced=(b"0" * 16, H1))
    step = Door().after(0, few, many, mine=run_meta(history=H1, samples=9))
    assert (step.yield_to, step.replaced) == (h3, True)
    assert "stop one of the two" in Door().after(0, many, mine=few.meta).waiting


def test_a_newcomer_gives_nothing_up() -> None:
    door = Door()
    assert door.after(1, other(1, history=H2, samples=5, view_epoch=4, replaced=(H1,))).ask == (peer(1),)
