"""Samples that a trainer could not decode: counted as skipped by everybody, in the round that counts the others."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_dmc.agent.barrier import BarrierResult
from p2p_dmc.agent.course import Course, divide
from p2p_dmc.agent.training import check_header, check_skipped
from p2p_dmc.agent.work import Work
from p2p_dmc.core import adacomm
from p2p_dmc.core.braids import Braid, in_turn, unordered
from p2p_dmc.core.ledger import Ledger, Stretch, check_exact
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.observe.narrator import Narrator
from p2p_dmc.observe.reports import _epoch_cells
from p2p_dmc.wire.messages import RoundHeader
from p2p_dmc.wire.trainer_messages import MAX_SKIPPED, Lease, Reduce, RoundComplete
from tests.agent.helpers import DATASET, POLICY, payload, view_of
from tests.agent.test_training import ALL, alone, two

Places = list[int]


def positions(braids: Any) -> Places:
    """(shard, position) of every sample, in order of consumption, as one number each."""
    return [shard * 1000 + at for shard, at in in_turn(braids)]


def test_a_round_with_skipped_samples(tmp_path: Path) -> None:
    m = two(tmp_path)
    mine, theirs = (m.training.work.next_of(i, n) for i, n in ((0, 6), (1, 4)))
    m.consume(6, skipped=((1, 2), (4, 6)))
    assert m.host.mail[-1][1].skipped == ((1, 2), (4, 6))
    m.other_says(2, 4, skipped=((0, 1),))
    order = m.last(Reduce)
    assert (order.weight, order.divisor) == (3, 6)  # what was skipped is not in the average
    m.reduced()
    after = m.training.ledger
    assert after.progress() == (6, 4, 40) and after.samples_total == 6
    gone = [positions(mine)[i] for i in (1, 4, 5)] + positions(theirs)[:1]
    assert sorted(
        s * 1000 + p for s, cuts in enumerate(after.skipped) for lo, hi in cuts for p in range(lo, hi)
    ) == sorted(gone)
    assert m.training.work.cursors == [6, 4]
    (line,) = m.host.rounds
    assert (line["samples_round"], line["samples_skipped"], line["samples_total"]) == (6, 4, 6)
    assert sorted(s * 1000 + p for _, s, lo, hi in line["skipped"] for p in range(lo, hi)) == sorted(gone)
    assert line["weights"] == [3, 3]
    assert m.training._stale is False  # they lie behind the cursors: the view stands
    m.lease(6)
    assert not set(told(m.last(Lease).braids)) & set(positions(mine))


def test_a_round_in_which_everything_was_skipped(tmp_path: Path) -> None:
    m = alone(tmp_path, (3, 3), epochs=2)
    m.consume(4, skipped=((0, 4),))
    assert m.last(RoundComplete).epoch == 0  # without a reduction: nobody has anything to add
    assert m.training.ledger.progress() == (0, 4, 6)
    m.consume(4, skipped=((0, 2),))
    assert m.last(RoundComplete).epoch == 1
    assert m.training.ledger.progress() == (0, 0, 6) and m.training.ledger.epoch == 1
    assert [line["samples_skipped"] for line in m.host.rounds] == [4, 2]


def test_what_was_skipped_in_a_round_that_did_not_count_is_open_again(tmp_path: Path) -> None:
    m = two(tmp_path)
    m.consume(6, skipped=((0, 1),), finite=False)
    m.other_says(2, 4)
    m.reduced()
    assert m.training.ledger.progress() == (4, 0, 40) and m.training.work.cursors == [0, 4]


@pytest.mark.parametrize(
    "skipped",
    [((3, 3),), ((2, 1),), ((-1, 2),), ((0, 7),), ((2, 3), (0, 1)), ((0, 2), (2, 4)), ((0, 3), (1, 2))],
)
def test_skipped_samples_that_cannot_be(tmp_path: Path, skipped: tuple[tuple[int, int], ...]) -> None:
    m = two(tmp_path)
    m.lease(6)
    with pytest.raises(RemoteProtocolError):
        m.ready(6, skipped=skipped)
    header = m.training._header(samples=6, steps=1, loss_sum_micro=0, compute_us=1, finite=True)
    check_header(replace(header, skipped=((0, 1), (2, 6))))
    with pytest.raises(RemoteProtocolError):
        check_header(replace(header, skipped=skipped))


def test_a_header_tells_of_so_many_stretches() -> None:
    apart = tuple((2 * i, 2 * i + 1) for i in range(MAX_SKIPPED + 1))
    check_skipped(apart[:-1], 1 << 20)
    with pytest.raises(RemoteProtocolError):
        check_skipped(apart, 1 << 20)


def test_the_loss_is_that_of_the_trained_samples() -> None:
    header = RoundHeader(
        view_epoch=1, view_id=b"", round=1, digest=b"", payload_spec=b"", samples=10, steps=2,
        loss_sum_micro=12, compute_us=1, comm_us=1, wait_us=0, bytes_sent=0, bytes_received=0,
        finite=True, change=False, closing=False, final=False, skipped=((0, 3), (5, 6)),
    )  # fmt: skip
    assert header.trained == 6


def test_the_line_of_it() -> None:
    event = {"event": "given_up", "samples": 5, "keys": ["a", "b", "c", "d", "e"], "peer_id": "p"}
    assert Narrator().event(event) == ["5 samples skipped: 'a', 'b', 'c' and 2 more"]
    assert Narrator().event(event | {"samples": 1, "keys": ["a"]}) == ["1 sample skipped: 'a'"]


def test_status_says_how_many_of_the_epoch() -> None:
    run = {"epoch": 1, "epochs": 3, "epoch_progress": {"counted": 5, "skipped": 2, "total": 10}}
    assert _epoch_cells(run) == ("2 of 3", "70%, 2 skipped")
    run["epoch_progress"] = {"counted": 5, "skipped": 0, "total": 10}
    assert _epoch_cells(run) == ("2 of 3", "50%")


braids = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=3), st.integers(1, 9)
    ).map(lambda t: tuple(Stretch(shard=shard, lo=lo, hi=lo + t[1]) for shard, lo in t[0])),
    max_size=5,
)


def cuts(places: Places) -> tuple[tuple[int, int], ...]:
    """Sorted places as [lo, hi)."""
    made: list[list[int]] = []
    for place in sorted(places):
        if made and made[-1][1] == place:
            made[-1][1] += 1
        else:
            made.append([place, place + 1])
    return tuple((lo, hi) for lo, hi in made)


@given(braids, st.randoms(use_true_random=False))
def test_divide(consumed: list[Braid], dice: random.Random) -> None:
    whole = positions(consumed)
    places = [i for i in range(len(whole)) if dice.random() < 0.4]
    trained, skipped = divide(consumed, cuts(places))
    assert positions(skipped) == [whole[i] for i in places]
    assert positions(trained) == [at for i, at in enumerate(whole) if i not in set(places)]


@pytest.mark.parametrize("seed", range(20))
def test_a_run_with_skips_is_exact_and_the_same_for_all(seed: int) -> None:
    """Two members, or one that learns of the rounds from their headers: equal ledgers, each sample settled once."""
    dice = random.Random(seed)
    counts, epochs = (5, 7, 1, 4), 2
    view = view_of([payload(ALL), payload(ALL)])
    start = Ledger.start(DATASET, counts, seed, epochs)
    courses = [
        Course(
            view, me, start, Work.for_view(view, me, start, keep_leases=False), adacomm.start(POLICY), POLICY
        )
        for me in (0, 1)
    ]
    counted: list[tuple[int, Stretch]] = []
    skipped: list[tuple[int, Stretch]] = []
    while not courses[0].ledger.done:
        headers = []
        for i in (0, 1):
            left = courses[0].work.assignment.length(i) - courses[0].work.cursors[i]
            samples = dice.randint(0, min(6, left))
            bad = [place for place in range(samples) if dice.random() < 0.3]
            finite = dice.random() < 0.95
            headers.append(plain_header(view, samples, cuts(bad), finite))
        result = BarrierResult(headers=tuple(headers), voting=(True, True))
        for course in courses:
            course.work.leased = course.work.cursors[course.me] + headers[course.me].samples
        outcomes = [course.outcome(result) for course in courses]
        before = courses[0].ledger
        now = unordered(braid for part in outcomes[0].counted for braid in part)
        counted += [(before.epoch, s) for s in now]
        gone = outcomes[0].ledger.given_up_since(before, now)
        skipped += gone
        for course, outcome in zip(courses, outcomes, strict=True):
            course.take(result, outcome)
        assert courses[0].ledger == courses[1].ledger
        if outcomes[0].quarantined:
            for course in courses:  # a view would follow
                course.work = Work.for_epoch(view, course.me, course.ledger, (0, 0))
    assert check_exact(counts, epochs, counted, skipped) == []
    assert skipped
    assert courses[0].ledger.samples_total == sum(len(s) for _, s in counted)


def plain_header(view: Any, samples: int, skipped: tuple[tuple[int, int], ...], finite: bool) -> RoundHeader:
    return RoundHeader(
        view_epoch=view.view_epoch,
        view_id=view.view_id,
        round=1,
        digest=b"d" * 16,
        payload_spec=b"p" * 16,
        samples=samples,
        steps=1,
        loss_sum_micro=0,
        compute_us=1,
        comm_us=1,
        wait_us=0,
        bytes_sent=0,
        bytes_received=0,
        finite=finite,
        change=False,
        closing=False,
        final=False,
        skipped=skipped,
    )


def test_a_lease_says_what_follows(tmp_path: Path) -> None:
    m = alone(tmp_path)
    whole = positions(m.training.work.peek(40))
    m.training.lease(6, 9)
    lease = m.last(Lease)
    assert told(lease.braids) == whole[:6] and told(lease.ahead) == whole[6:15]
    assert lease.left == 34 and m.training.work.leased == 6  # nobody's yet
    m.training.lease(30, 100)
    lease = m.last(Lease)
    assert told(lease.braids) == whole[6:36] and told(lease.ahead) == whole[36:] and lease.left == 4


def test_only_what_is_here_is_said_to_follow(tmp_path: Path) -> None:
    m = alone(tmp_path, (4,) * 12)
    whole = positions(m.training.work.peek(48))
    m.host.away = {whole[-1] // 1000}
    first_away = next(i for i, at in enumerate(whole) if at // 1000 in m.host.away)
    m.training.lease(2, 40)
    assert told(m.last(Lease).ahead) == whole[2:first_away]
    assert {shard for shard, _ in m.host.fetches} == m.host.away


def told(braids: Any) -> Places:
    """The same of braids as a message has them."""
    return positions(tuple(Stretch(shard=s, lo=lo, hi=hi) for s, lo, hi in braid) for braid in braids)
