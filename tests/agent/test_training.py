"""One member's rounds with a run, a trainer and other members that are made by hand."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from p2p_dmc.agent import training as training_module
from p2p_dmc.agent.course import facts
from p2p_dmc.agent.state import Held
from p2p_dmc.agent.state_keeper import StateKeeper
from p2p_dmc.agent.training import BAD_ROUNDS, SHARD_PATIENCE_S, Measured, Training, check_header
from p2p_dmc.agent.work import PlainBraid, Work
from p2p_dmc.core import adacomm
from p2p_dmc.core.adacomm import TauPolicy
from p2p_dmc.core.agreement_messages import MemberId, Promises, StateRef, View
from p2p_dmc.core.braids import INTERLEAVED, in_turn
from p2p_dmc.core.ledger import Ledger, Stretch, check_exact
from p2p_dmc.core.outer import AVERAGE, OuterPolicy, parse
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.wire.messages import RoundHeader
from p2p_dmc.wire.trainer_messages import (
    Lease,
    LeaseEnd,
    Reduce,
    RoundComplete,
    RoundReady,
    RoundRefused,
    RoundResult,
)
from tests.agent.helpers import (
    DATASET,
    NUMEL,
    PARAMETERS,
    POLICY,
    fill,
    header_like,
    member,
    payload,
    peer,
    plain,
    state,
    surroundings,
    view_of,
)
from tests.agent.test_state import balanced

T = TypeVar("T")
SPEC = b"p" * 16


class Host:
    """A run that notes what its training asks for."""

    def __init__(self, keeper: StateKeeper) -> None:
        self.keeper = keeper
        self.trainer: list[Any] = []
        self.mail: list[tuple[str, RoundHeader]] = []
        self.asked: list[StateRef] = []
        self.commits: list[Held] = []
        self.rounds: list[dict[str, Any]] = []
        self.fetches: list[tuple[int, Callable[[], None]]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.away: set[int] = set()
        self.frozen = self.change = self.stop = False

    def to_trainer(self, message: object) -> None:
        self.trainer.append(message)

    def to_member(self, peer_id: str, message: object) -> None:
        assert isinstance(message, RoundHeader)
        self.mail.append((peer_id, message))

    def complete(self, ref: StateRef) -> bool:
        self.asked.append(ref)
        return not self.frozen

    def hold(self, held: Held) -> None:
        self.keeper.hold(held)

    def committed(self, held: Held) -> None:
        self.commits.append(held)

    def barrier_change(self) -> None:
        self.calls.append(("change",))

    def change_wanted(self) -> bool:
        return self.change

    def closing(self) -> bool:
        return self.stop

    def close(self, finished: bool) -> None:
        self.calls.append(("close", finished))

    def diverged(self, odd: tuple[MemberId, ...], me: bool) -> None:
        self.calls.append(("diverged", tuple(m.peer_id for m in odd), me))

    def not_finite(self, member: MemberId) -> None:
        self.calls.append(("not finite", member.peer_id))

    def poisoned(self, rounds: int) -> None:
        self.calls.append(("poisoned", rounds))

    def shard_here(self, shard: int) -> bool:
        return shard not in self.away

    def fetch_shard(self, shard: int, then: Callable[[], None]) -> None:
        self.fetches.append((shard, then))

    def log_round(self, **facts: Any) -> None:
        self.rounds.append(facts)


class Member:
    """One member: its training, its host, and the part of its trainer that talks."""

    def __init__(
        self,
        root: Path,
        i: int,
        view: View,
        ledger: Ledger,
        measured: Measured | None = None,
        opened: Ledger | None = None,
        policy: TauPolicy = POLICY,
        outer: OuterPolicy = AVERAGE,
    ) -> None:
        self.peer_id = peer(i)
        keeper = StateKeeper("r", root / f"run{i}", surroundings(root, me=i).services, Promises())
        keeper.open(PARAMETERS, outer)
        self.held = state(keeper.pool(), view.start.lineage, 0.0, ledger, adacomm.start(policy))
        keeper.hold(self.held)
        self.host = Host(keeper)
        me = view.members.index(member(i))
        opened = opened or ledger
        self.training = Training(
            host=self.host,
            view=view,
            me=member(i),
            held=self.held,
            ledger=opened,
            work=Work.for_view(view, me, opened, keep_leases=True),
            policy=policy,
            payload_spec=SPEC,
            measured=measured or Measured(),
            keeper=keeper,
        )

    def last(self, kind: type[T]) -> T:
        found = self.host.trainer[-1]
        assert isinstance(found, kind), found
        return found

    def lease(self, samples: int) -> tuple[tuple[int, int, int], ...]:
        self.training.lease(samples)
        return flat(self.last(Lease).braids)

    def ready(self, samples: int, **given: Any) -> None:
        """Local steps done."""
        said = {
            "view_epoch": self.training.view.view_epoch,
            "round": self.training.barrier.round,
            "samples": samples,
            "steps": 4,
            "loss_sum_micro": 2_000_000 * samples,
            "compute_us": 1_000_000,
            "finite": True,
        } | given
        self.training.round_ready(RoundReady(**said))

    def consume(self, samples: int, **given: Any) -> tuple[tuple[int, int, int], ...]:
        leased = self.lease(samples)
        self.ready(sum(hi - lo for _, lo, hi in leased), **given)
        return leased

    def other_says(self, i: int, samples: int = 0, **given: Any) -> None:
        """A header of another member, in step with mine."""
        mine = self.training._header(
            samples=samples, steps=4, loss_sum_micro=0, compute_us=1_000_000, finite=True
        )
        self.training.header(peer(i), header_like(mine, **({"change": False, "closing": False} | given)))

    def reduced(self, value: float = 1.0, **given: Any) -> None:
        """The trainer's answer to the last Reduce."""
        order = self.last(Reduce)
        said = {
            "view_epoch": order.view_epoch,
            "round": order.round,
            "digest": fill(Path(order.slot_path), value),
            "comm_us": 7000,
            "bytes_sent": 28,
            "bytes_received": 28,
        } | given
        self.training.round_result(RoundResult(**said))


ALL = (0, 1, 2, 3)


def ledger(counts: tuple[int, ...] = (10, 10, 10, 10), epochs: int = 2) -> Ledger:
    return Ledger.start(DATASET, counts, 1, epochs)


def two(root: Path, **given: Any) -> Member:
    """Peer 1 of a view of two."""
    return Member(root, 1, view_of([payload(ALL), payload(ALL)]), ledger(), **given)


def alone(root: Path, counts: tuple[int, ...] = (10, 10, 10, 10), epochs: int = 2, **given: Any) -> Member:
    shards = range(len(counts))
    return Member(root, 1, view_of([payload(shards, len(counts))]), ledger(counts, epochs), **given)


def flat(braids: Iterable[PlainBraid]) -> tuple[tuple[int, int, int], ...]:
    """Their stretches."""
    return tuple((shard, lo, hi) for braid in braids for shard, lo, hi in braid)


def size(stretches: tuple[tuple[int, int, int], ...]) -> int:
    return sum(hi - lo for _, lo, hi in stretches)


# -- a round ----------------------------------------------------------------------------------------------------------


def test_a_round_from_lease_to_completion(tmp_path: Path) -> None:
    m = two(tmp_path)
    host = m.host
    leased = m.consume(6)
    assert size(leased) == 6 and m.training.in_flight is not None and m.training.in_flight.lineage == (1, 1)
    ((to, mine),) = host.mail
    assert to == peer(2) and (mine.view_epoch, mine.round, mine.samples, mine.digest) == (
        1,
        1,
        6,
        m.held.ref.digest,
    )
    assert mine.payload_spec == SPEC and not (mine.change or mine.closing or mine.final)
    assert host.commits == [] and host.asked == []
    m.other_says(2, 4)
    assert host.commits == [m.held] and m.training.committed_round == (0, 0)
    order = m.last(Reduce)
    assert (order.weight, order.divisor, order.round) == (6, 10, 1)
    assert Path(order.slot_path) != m.held.slot
    m.reduced(1.0)
    done = m.last(RoundComplete)
    assert done == RoundComplete(
        view_epoch=1, round=1, steps=1, limit_us=0, epoch=0, reset=False, retake=False
    )
    held = m.training.held
    assert host.asked == [held.ref] and held.ref.lineage == (1, 1) and held.slot == Path(order.slot_path)
    assert m.training.ledger == held.ledger and held.ledger.progress() == (10, 0, 40)
    assert host.keeper.current == held and balanced(host.keeper)
    assert m.training.barrier.round == 2 and m.training.in_flight is None
    (line,) = host.rounds
    assert (line["round"], line["samples_round"], line["samples_total"], line["members"]) == (1, 10, 10, 2)
    assert line["loss"] == 1.2 and line["digest"] == held.anchor_digest.hex() and line["committed_round"] == 0
    assert line["comm_s"] == 0.007 and line["compute_s"] == 1.0 and line["bytes_sent"] == 28
    assert set(flat(line["counted"])) >= set(leased) and size(flat(line["counted"])) == 10
    assert not set(m.lease(6)) & set(leased)  # and so on
    assert m.training.measured.speed == 6


def test_tau_its_reason_and_whether_the_rate_may_decay(tmp_path: Path) -> None:
    """The second round ends an interval in which the loss has not fallen: tau is halved, to its least."""
    policy = TauPolicy(kind="adacomm", tau0=2, t0_ms=1500, rule="paper", rate=True)
    m = two(tmp_path, policy=policy)
    for may_decay in (False, True, True):
        m.consume(6, rate_nano=10**8)
        assert m.host.mail[-1][1].rate_nano == 10**8
        m.other_says(2, 4)
        m.reduced()
        assert m.last(RoundComplete).may_decay is may_decay
        assert m.training.held.tau.rate_nano == 10**8
    told = [(line["tau"], line["tau_reason"]) for line in m.host.rounds]
    assert told == [(2, "start"), (2, "start"), (1, "halved: loss 1.00 of the first round's")]


@pytest.mark.parametrize("outer", ["average", "block(beta=0.3)", "nesterov(lr=0.7, momentum=0.9)"])
def test_the_outer_step_follows_from_the_rounds_steps(tmp_path: Path, outer: str) -> None:
    """tau is 16; the two take 1 and 2 steps, then 16 and 20, then one has no weight."""
    policy = parse(outer)
    m = two(tmp_path, policy=TauPolicy(kind="fixed", tau0=16), outer=policy)
    for mine, theirs, samples, steps in ((1, 2, 4, 2), (16, 20, 4, 16), (9, 16, 0, 9)):
        m.consume(2, steps=mine)
        m.other_says(2, samples, steps=theirs)
        assert m.last(Reduce).outer == (policy.step(steps, 16) or ())
        m.reduced()
    assert m.held.slot.stat().st_size == 4 * NUMEL * policy.vectors


def test_a_run_begins_with_two_rounds_of_one_step(tmp_path: Path) -> None:
    """Nobody's speed is known: with tau steps a quick machine would wait long for a slow one, twice."""
    m = two(tmp_path)
    given = [m.training.course.steps()]
    for i in range(2):
        m.consume(4)
        m.other_says(2, 4)
        m.reduced(float(i))
        done = m.last(RoundComplete)
        given.append((done.steps, done.limit_us))
    assert given == [(1, 0), (1, 0), (m.held.tau.tau, 0)] and m.held.tau.tau > 1
    known = Member(tmp_path / "2", 1, view_of([payload(ALL, speed=9), payload(ALL)]), ledger())
    assert known.training.course.steps() == (m.held.tau.tau, 0)  # one of them has trained before
    assert alone(tmp_path / "3").training.course.steps() == (m.held.tau.tau, 0)


def test_the_next_headers_commit_the_round(tmp_path: Path) -> None:
    m = two(tmp_path)
    for i in range(1, 4):
        m.consume(2)
        m.other_says(2, 2)
        assert m.host.commits[-1].ref.lineage == ((1, i - 1) if i > 1 else (0, 0))
        m.reduced(float(i))
    assert [line["committed_round"] for line in m.host.rounds] == [0, 1, 2]
    assert m.host.rounds[-1]["round"] == 3


def test_a_header_that_comes_first_waits_for_mine(tmp_path: Path) -> None:
    m = two(tmp_path)
    m.other_says(2, 4)
    assert m.host.trainer == [] and m.host.commits == []
    m.consume(2)
    m.last(Reduce)


def test_a_header_is_said_once(tmp_path: Path) -> None:
    """Others may have acted on it: a trainer that starts again cannot change its mind."""
    m = two(tmp_path)
    m.consume(2)
    m.ready(1)
    assert len(m.host.mail) == 1 and m.training.barrier.own is not None
    assert m.training.barrier.own.samples == 2


def test_what_is_not_this_round_is_ignored(tmp_path: Path) -> None:
    m = two(tmp_path)
    m.lease(5)
    m.ready(2, view_epoch=0)
    m.ready(2, round=2)
    m.ready(2, round=0)
    assert m.host.mail == [] and m.training.in_flight is None
    with pytest.raises(RemoteProtocolError, match="consumed 6 samples, more than it was given"):
        m.ready(6)
    m.training.freeze()
    m.ready(2)
    assert m.host.mail == []


# -- a freeze ---------------------------------------------------------------------------------------------------------


def test_a_result_after_the_freeze_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    m = two(tmp_path)
    m.consume(6)
    m.other_says(2, 4)
    m.host.frozen = True  # the core says no, before the training hears of it
    before = m.training.held, m.training.ledger, list(m.training.work.cursors)
    m.reduced()
    assert m.last(RoundRefused) == RoundRefused(view_epoch=1, round=1)
    assert (m.training.held, m.training.ledger, m.training.work.cursors) == before
    assert m.host.rounds == [] and m.host.keeper.current == m.held and balanced(m.host.keeper)
    assert len(list(in_turn(m.training.work.claims()))) == 6  # claimed in the next view
    assert m.training.in_flight is not None and m.training.in_flight.lineage == (1, 1)


def test_a_frozen_training_does_nothing_more(tmp_path: Path) -> None:
    m = two(tmp_path)
    m.consume(6)
    m.other_says(2, 4)
    order = m.last(Reduce)
    m.training.freeze()
    frozen_s = m.training.frozen_s
    m.training.freeze()
    assert m.training.frozen_s == frozen_s > 0
    m.training.round_result(plain(RoundResult, view_epoch=1, round=1, digest=b"x" * 16))
    assert m.last(RoundRefused).round == order.round and m.host.asked == []
    said = len(m.host.mail), len(m.host.trainer)
    m.training.lease(5)
    m.training.repeat()
    m.other_says(2, 4)
    m.training.check_barrier()
    assert (len(m.host.mail), len(m.host.trainer)) == said


@pytest.mark.parametrize("given", [{"view_epoch": 2}, {"round": 2}, {"round": 0}])
def test_a_result_of_another_round_is_refused(tmp_path: Path, given: dict[str, int]) -> None:
    m = alone(tmp_path)
    m.consume(6)
    m.last(Reduce)
    m.reduced(**given)
    m.last(RoundRefused)
    assert m.host.asked == [] and m.training.barrier.round == 1


def test_a_result_without_a_reduction_is_refused(tmp_path: Path) -> None:
    m = two(tmp_path)
    m.consume(6)
    m.training.round_result(plain(RoundResult, view_epoch=1, round=1, digest=b"x" * 16))
    m.last(RoundRefused)
    assert m.host.asked == []


# -- what is not finite -----------------------------------------------------------------------------------------------


def test_a_member_that_is_not_finite_weighs_nothing_and_begins_again(tmp_path: Path) -> None:
    m = two(tmp_path)
    bad = m.consume(6, finite=False)
    assert m.training.in_flight is None  # if others complete the round, mine is not in it
    m.other_says(2, 4)
    order = m.last(Reduce)
    assert (order.weight, order.divisor) == (0, 4)
    m.reduced()
    assert m.last(RoundComplete).reset
    assert m.training.ledger.progress() == (4, 0, 40)
    assert m.training.ledger.strikes == tuple(Stretch(shard=s, lo=lo, hi=hi) for s, lo, hi in sorted(bad))
    assert ("not finite", peer(1)) in m.host.calls
    assert m.host.rounds[0]["loss"] == 0.0 and m.host.rounds[0]["samples_round"] == 4
    assert m.lease(6) == bad  # handed out again


def test_another_members_bad_round_costs_me_nothing(tmp_path: Path) -> None:
    m = two(tmp_path)
    m.consume(6)
    m.other_says(2, 4, finite=False)
    order = m.last(Reduce)
    assert (order.weight, order.divisor) == (6, 6)
    m.reduced()
    assert not m.last(RoundComplete).reset and m.training.ledger.progress() == (6, 0, 40)
    assert sum(map(len, m.training.ledger.strikes)) == 4
    assert m.host.calls == [("not finite", peer(2))] and m.training.measured.bad_rounds == 0


def test_nobody_is_finite(tmp_path: Path) -> None:
    """The round completes without a reduction: the strikes must be on record, or it would go on for ever."""
    m = two(tmp_path)
    m.consume(6, finite=False)
    m.other_says(2, 4, finite=False)
    done = m.last(RoundComplete)
    assert done.reset and (done.view_epoch, done.round) == (1, 1)
    held = m.training.held
    assert (
        held.ref.lineage == (1, 1) and held.slot == m.held.slot and held.anchor_digest == m.held.anchor_digest
    )
    assert held.ledger.progress() == (0, 0, 40) and sum(map(len, held.ledger.strikes)) == 10
    assert m.host.keeper.current == held and balanced(m.host.keeper)
    assert m.host.rounds[0]["loss"] is None and m.host.rounds[0]["comm_s"] == 0.0


def test_a_round_of_nobodys_that_is_refused_leaves_the_pins(tmp_path: Path) -> None:
    m = two(tmp_path)
    m.host.frozen = True
    m.consume(6, finite=False)
    m.other_says(2, 4, finite=False)
    assert m.host.asked and m.training.held == m.held and balanced(m.host.keeper)


def test_samples_that_poison_twice_are_put_out_and_the_view_changes(tmp_path: Path) -> None:
    m = two(tmp_path)
    bad = m.consume(6, finite=False)
    m.other_says(2, 4)
    m.reduced()
    assert m.consume(6, finite=False) == bad
    m.other_says(2, 4)
    m.reduced(2.0)
    assert m.training.ledger.progress() == (8, 6, 40)
    assert {tuple(one) for one in m.host.rounds[-1]["skipped"]} == {(0, *one) for one in bad}
    m.training.lease(6)  # the assignment still has them: nothing is handed out of it
    m.last(LeaseEnd)
    m.ready(0)
    m.other_says(2, 4)
    assert m.host.calls[-1] == ("change",) and len(m.host.asked) == 2


def test_whoever_keeps_going_without_a_finite_delta_is_poisoned(tmp_path: Path) -> None:
    measured = Measured()
    for i in range(BAD_ROUNDS):  # over as many views
        m = two(tmp_path / str(i), measured=measured)
        m.consume(6, finite=False)
        m.other_says(2, 4)
        m.reduced()
        poisoned = [c for c in m.host.calls if c[0] == "poisoned"]
        assert poisoned == ([("poisoned", BAD_ROUNDS)] if i == BAD_ROUNDS - 1 else [])
    m = two(tmp_path / "good", measured=measured)
    m.consume(6)
    m.other_says(2, 4)
    m.reduced()
    assert measured.bad_rounds == 0


# -- the barrier's other ways out -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mine", [True, False])
def test_a_change_flag_of_anybody_posts_no_payload(tmp_path: Path, mine: bool) -> None:
    m = two(tmp_path)
    m.host.change = mine
    m.consume(6)
    m.host.change = False
    m.other_says(2, 4, change=not mine)
    assert m.host.calls == [("change",)] and m.host.commits == [m.held]
    assert not any(isinstance(one, Reduce) for one in m.host.trainer)


@pytest.mark.parametrize("mine", [True, False])
def test_a_closing_flag_of_anybody_stops_the_run(tmp_path: Path, mine: bool) -> None:
    m = two(tmp_path)
    m.host.stop = mine
    m.consume(6)
    m.other_says(2, 4, closing=not mine, change=True)
    assert m.host.calls == [("close", False)]
    assert not any(isinstance(one, Reduce) for one in m.host.trainer)


def test_unequal_states_stop_at_once_and_commit_nothing(tmp_path: Path) -> None:
    view = view_of([payload(ALL)] * 3)
    for name, says, odd, me in (
        ("other", {"digest": b"x" * 16}, (peer(3),), False),
        ("model", {"payload_spec": b"x" * 16}, (peer(3),), False),
    ):
        m = Member(tmp_path / name, 1, view, ledger())
        m.consume(6)
        m.other_says(2, 4)
        m.other_says(3, 4, **says)
        assert m.host.calls == [("diverged", odd, me)] and m.training.frozen and m.host.commits == []
    m = Member(tmp_path / "me", 1, view, ledger())
    m.consume(6)
    m.other_says(2, 4, digest=b"x" * 16)
    m.other_says(3, 4, digest=b"x" * 16)
    assert m.host.calls == [("diverged", (peer(1),), True)] and m.host.commits == []


def test_a_header_that_counts_more_than_was_assigned_is_a_divergence(tmp_path: Path) -> None:
    m = two(tmp_path)
    m.consume(6)
    m.other_says(2, 21)
    assert m.host.calls == [("diverged", (peer(2),), False)] and m.training.frozen


# -- repetition -------------------------------------------------------------------------------------------------------


def test_three_who_each_missed_the_next_ones_header_go_on(tmp_path: Path) -> None:
    view = view_of([payload(ALL)] * 3)
    members = [Member(tmp_path, i, view, ledger()) for i in (1, 2, 3)]
    for i, m in enumerate(members):
        m.consume(2)
        [(_, said), _] = m.host.mail
        members[i - 1].training.header(m.peer_id, said)  # and not the one after
        m.host.mail.clear()
    assert not any(m.training._reducing for m in members)
    for _ in range(3):
        for m in members:
            m.training.repeat()
            for to, header in m.host.mail:
                members[int(to, 16) - 1].training.header(m.peer_id, header)
            m.host.mail.clear()
    assert all(m.training._reducing for m in members)


def test_a_header_is_repeated_to_whom_it_may_not_have_reached(tmp_path: Path) -> None:
    m = Member(tmp_path, 1, view_of([payload(ALL)] * 3), ledger())
    m.training.repeat()
    assert m.host.mail == []  # nothing was said yet
    m.consume(6)
    said = m.host.mail[0][1]
    m.other_says(3, 2)
    m.host.mail.clear()
    m.training.repeat()
    assert m.host.mail == [(peer(2), said)]
    m.training.repeat()  # to another one in turn, too: it may have missed mine, and wait for a third one's
    assert m.host.mail[1:] == [(peer(2), said), (peer(3), said)]
    m.other_says(2, 2)
    m.host.mail.clear()
    m.training.repeat()  # the reduction runs
    assert m.host.mail == []
    m.other_says(2, 2)  # it repeats itself: mine was lost
    assert m.host.mail == [(peer(2), said)]
    m.reduced()
    m.host.mail.clear()
    m.training.header(peer(3), header_like(said, samples=2))  # still in the round before
    assert m.host.mail == [(peer(3), said)]


def test_headers_that_come_again_complete_no_round_twice(tmp_path: Path) -> None:
    m = two(tmp_path)
    m.consume(6)
    for _ in range(3):
        m.other_says(2, 4)
    assert len([one for one in m.host.trainer if isinstance(one, Reduce)]) == 1 and len(m.host.commits) == 1


def test_with_nothing_to_reduce_they_wait_and_flags_raised_later_are_said(tmp_path: Path) -> None:
    """All of the epoch that can be had is consumed; a lost shard holds its end up."""
    view = view_of([payload((0,), 2, reachable=(0,)), payload((0,), 2, reachable=(0,))])
    m = Member(tmp_path, 1, view, ledger((10, 10)))
    m.consume(5)
    m.other_says(2, 5)
    m.reduced()
    m.training.lease(5)
    assert m.last(LeaseEnd) == LeaseEnd(epoch=0, finished=False)
    m.ready(0)
    m.other_says(2, 0)
    assert len(m.host.asked) == 1 and m.host.calls == []
    m.host.mail.clear()
    m.training.repeat()
    assert [header.change for _, header in m.host.mail] == [False]
    m.host.change = True  # the shard is back
    m.training.repeat()
    assert [header.change for _, header in m.host.mail] == [False, True] and m.host.calls == [("change",)]
    m.host.change, m.host.stop = False, True
    m.training.repeat()
    assert m.host.mail[-1][1].closing and m.host.calls[-1] == ("close", False)


def test_all_may_come_empty_handed_although_there_is_work(tmp_path: Path) -> None:
    """Late shards: a round without payload lets them ask again, instead of standing there for ever."""
    m = two(tmp_path)
    m.ready(0)
    m.other_says(2, 0)
    assert m.last(RoundComplete).round == 1 and m.training.held.ref.lineage == (1, 1)
    assert balanced(m.host.keeper)
    m.consume(6)
    m.other_says(2, 4)
    m.last(Reduce)


# -- leases -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [50.0]
    monkeypatch.setattr(training_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


def test_a_lease_waits_for_its_shard_but_not_for_ever(tmp_path: Path, clock: list[float]) -> None:
    m = two(tmp_path)
    m.host.away = set(ALL)
    m.training.lease(6)
    first, second = (stretch.shard for stretch in m.training.work.peek(6)[0])
    assert m.host.trainer == [] and [shard for shard, _ in m.host.fetches] == [first, second]
    clock[0] += SHARD_PATIENCE_S - 0.1
    m.training.serve_lease()
    assert m.host.trainer == []
    m.host.away.discard(first)
    m.host.fetches[0][1]()  # it has come
    assert {shard for shard, _, _ in flat(m.last(Lease).braids)} == {first}
    said = len(m.host.trainer)
    m.training.serve_lease()
    assert len(m.host.trainer) == said  # a lease is answered once
    m.host.away = set(ALL)
    m.training.lease(6)
    clock[0] += SHARD_PATIENCE_S
    m.training.serve_lease()
    assert m.last(LeaseEnd) == LeaseEnd(epoch=0, finished=False)
    m.training.serve_lease()
    assert len(m.host.trainer) == said + 1


def test_a_lease_ends_before_a_shard_that_is_not_here(tmp_path: Path, clock: list[float]) -> None:
    m = alone(tmp_path)
    lanes = [s.shard for s in m.training.work.peek(40)[0]]
    m.host.away = {lanes[2]}
    leased = m.lease(40)
    assert [(s, lo, hi) for s, lo, hi in leased] == [(lanes[0], 0, 1), (lanes[1], 0, 1)]
    assert {shard for shard, _ in m.host.fetches} == {lanes[2]}


def test_shards_of_the_leases_to_come_are_fetched_ahead(tmp_path: Path) -> None:
    m = alone(tmp_path, (10,) * (INTERLEAVED + 1))
    last = m.training.work.assignment.lists[0][-1][0].shard  # the others are consumed in turn
    m.host.away = {last}
    m.lease(20)
    m.lease(20)
    assert m.host.fetches == []  # they last for longer than that and four more
    m.lease(30)
    assert {shard for shard, _ in m.host.fetches} == {last}


def test_odd_requests_are_bounded(tmp_path: Path) -> None:
    m = two(tmp_path)
    assert size(m.lease(0)) == 1 and size(m.lease(-5)) == 1 and size(m.lease(1 << 60)) == 18
    m.training.lease(1)
    m.last(LeaseEnd)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_the_last_round_is_followed_by_headers_alone(tmp_path: Path) -> None:
    m = Member(tmp_path, 1, view_of([payload((0,), 1), payload((0,), 1)]), ledger((8,), 1))
    m.consume(4)
    m.other_says(2, 4)
    m.host.mail.clear()
    m.reduced()
    assert m.last(RoundComplete).epoch == 1 and m.training.ledger.done
    ((to, said),) = m.host.mail
    assert to == peer(2) and said.final and said.samples == 0 and said.round == 2
    assert said.digest == m.training.held.ref.digest
    assert m.host.calls == [] and m.host.commits[-1] == m.held
    m.training.lease(4)  # nothing is answered: the end of the run follows
    m.last(RoundComplete)
    m.other_says(2, 0, final=True)
    assert m.host.calls == [("close", True)] and m.host.commits[-1] == m.training.held


def test_it_is_not_over_before_all_say_so(tmp_path: Path) -> None:
    m = Member(tmp_path, 1, view_of([payload((0,), 1), payload((0,), 1)]), ledger((8,), 1))
    m.consume(4)
    m.other_says(2, 4)
    m.reduced()
    m.other_says(2, 0, final=False)
    assert m.host.calls == []


def test_a_view_that_opens_on_a_finished_ledger_says_headers_alone(tmp_path: Path) -> None:
    done = ledger((8,), 1).advance([Stretch(shard=0, lo=0, hi=8)])
    view = view_of([payload((0,), 1), payload((0,), 1)], view_epoch=3, start=(2, 5))
    m = Member(tmp_path, 1, view, done)
    m.training.start()
    ((_, said),) = m.host.mail
    assert said.final and said.round == 6
    m.other_says(2, 0, final=True)
    assert m.host.calls == [("close", True)]


def test_what_the_opening_skipped_is_put_on_record_before_the_end(tmp_path: Path) -> None:
    """The start state knows nothing of it yet, and a joiner would adopt that."""
    begun = ledger((8, 2), 1).advance([Stretch(shard=0, lo=0, hi=8)])
    opened = begun.skip(begun.remaining())
    assert opened.done
    view = view_of([payload((0,), 2, reachable=(0,))] * 2, view_epoch=3, start=(2, 5))
    m = Member(tmp_path, 1, view, begun, opened=opened)
    m.training.start()
    assert [header.final for _, header in m.host.mail] == [False]
    m.other_says(2, 0)
    assert m.training.held.ledger == opened and m.training.held.ref.lineage == (3, 6)
    assert m.host.rounds[0]["skipped"] == [[0, 1, 0, 2]]
    assert m.host.mail[-1][1].final
    m.other_says(2, 0, final=True)
    assert m.host.calls == [("close", True)]


def test_an_epoch_that_ends_gives_a_new_assignment_in_the_same_view(tmp_path: Path) -> None:
    m = alone(tmp_path, (4, 4))
    m.consume(8)
    m.reduced()
    assert m.last(RoundComplete).epoch == 1 and m.training.work.assignment.epoch == 1
    m.training.lease(100)
    assert m.last(Lease).epoch == 1 and size(flat(m.last(Lease).braids)) == 8


# -- several members to the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(25))
def test_members_in_step_agree_on_everything_and_count_each_sample_once(tmp_path: Path, seed: int) -> None:
    """Real trainings against each other; mail in any order, some of it lost and repeated, rounds not finite."""
    rng, count = random.Random(seed), 1 + seed % 3
    counts, epochs = (7, 0, 5, 3), 2
    view = view_of([payload(sorted(rng.sample(ALL, 3)), speed=rng.randrange(9)) for _ in range(count)])
    members = {peer(i): Member(tmp_path, i, view, ledger(counts, epochs)) for i in range(1, count + 1)}
    for _ in range(400):
        for m in rng.sample(list(members.values()), count):
            _act(m, rng)
            for to, header in rng.sample(m.host.mail, len(m.host.mail)):
                if rng.random() < 0.8:
                    members[to].training.header(m.peer_id, header)
            m.host.mail.clear()
            if rng.random() < 0.3:
                m.training.repeat()
        if all(m.host.calls[-1:] in ([("close", True)], [("change",)]) for m in members.values()):
            break
    else:
        raise AssertionError("it did not come to an end")
    first = members[peer(1)]
    for m in members.values():
        assert balanced(m.host.keeper)
        assert [(r["round"], r["state"], r["counted"]) for r in m.host.rounds] == [
            (r["round"], r["state"], r["counted"]) for r in first.host.rounds
        ]
    counted = [
        (r["epoch"], Stretch(shard=s, lo=lo, hi=hi))
        for r in first.host.rounds
        for s, lo, hi in flat(r["counted"])
    ]
    skipped = [
        (e, Stretch(shard=s, lo=lo, hi=hi)) for r in first.host.rounds for e, s, lo, hi in r["skipped"]
    ]
    assert check_exact(counts, first.training.ledger.epoch, counted, skipped) == []


def _act(m: Member, rng: random.Random) -> None:
    """The trainer's next word."""
    last = m.host.trainer[-1] if m.host.trainer else None
    if isinstance(last, Reduce):
        m.reduced(float(last.round))
    elif not m.training.ledger.done and m.training.barrier.own is None:
        m.training.lease(rng.randint(1, 4))
        last = m.host.trainer[-1]
        samples = size(flat(last.braids)) if isinstance(last, Lease) else 0
        m.ready(samples, finite=not samples or rng.random() < 0.97, compute_us=rng.choice([0, 1000]))


# -- headers from the network -----------------------------------------------------------------------------------------

GOOD = plain(RoundHeader, digest=b"d" * 16, payload_spec=b"p" * 16)


@pytest.mark.parametrize(
    "name", ["samples", "steps", "compute_us", "comm_us", "wait_us", "round", "rate_nano"]
)
def test_numbers_of_a_header_are_bounded(name: str) -> None:
    check_header(replace(GOOD, **{name: (1 << 53) - 1}))
    for wrong in (-1, 1 << 53, 1 << 63):
        with pytest.raises(RemoteProtocolError, match="out of range"):
            check_header(replace(GOOD, **{name: wrong}))


def test_losses_and_digests_of_a_header_are_bounded() -> None:
    for loss in (0, 1 << 62, -(1 << 62)):
        check_header(replace(GOOD, loss_sum_micro=loss))
    for loss in ((1 << 62) + 1, -(1 << 62) - 1):
        with pytest.raises(RemoteProtocolError):
            check_header(replace(GOOD, loss_sum_micro=loss))
    for name in ("digest", "payload_spec"):
        for wrong in (b"", b"d" * 15, b"d" * 17):
            with pytest.raises(RemoteProtocolError, match="16 bytes"):
                check_header(replace(GOOD, **{name: wrong}))


def test_what_the_tau_controller_reads_of_a_header() -> None:
    header = replace(GOOD, samples=5, steps=2, loss_sum_micro=9, compute_us=3, comm_us=4, finite=True)
    assert facts(replace(header, rate_nano=7)).rate_nano == 7
    read = facts(header)
    assert (read.samples, read.steps, read.loss_sum_micro, read.compute_us, read.comm_us) == (5, 2, 9, 3, 4)
    read = facts(replace(header, finite=False))
    assert (read.samples, read.loss_sum_micro, read.comm_us, read.compute_us) == (0, 0, 0, 3)


def test_pins_are_counted_in_these_tests(tmp_path: Path) -> None:
    m = two(tmp_path)
    assert balanced(m.host.keeper)
    m.host.keeper.pool().pin(m.held.slot)
    assert not balanced(m.host.keeper) and Counter({m.held.slot: 2}) == +m.host.keeper.pool()._pins
