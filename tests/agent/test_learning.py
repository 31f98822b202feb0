"""A learner's rounds in one view: what it says, what it reduces, what it keeps, and what it leaves to the voters."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from p2p_dmc.agent.catch_up import CatchUp, Kept
from p2p_dmc.agent.learning import NO_DIGEST, Learning
from p2p_dmc.agent.state_keeper import StateKeeper
from p2p_dmc.core.agreement_messages import MemberId, Promises
from p2p_dmc.core.compression import Compression
from p2p_dmc.wire.messages import RoundHeader
from p2p_dmc.wire.trainer_messages import Reduce, RoundReady, RoundRefused, RoundResult
from tests.agent.helpers import PARAMETERS, header_like, member, payload, peer, plain, surroundings, view_of
from tests.agent.test_state import balanced

SPEC = b"p" * 16
STATE = b"s" * 16
ALL = (0, 1, 2, 3)


class Host:
    """A run that notes what its learning asks for."""

    def __init__(self) -> None:
        self.trainer: list[Any] = []
        self.mail: list[tuple[str, RoundHeader]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.change = False
        self.proofs = 0

    def to_trainer(self, message: object) -> None:
        self.trainer.append(message)

    def to_member(self, peer_id: str, message: object) -> None:
        assert isinstance(message, RoundHeader)
        self.mail.append((peer_id, message))

    def change_wanted(self) -> bool:
        return self.change

    def proved(self) -> None:
        self.proofs += 1

    def diverged(self, odd: tuple[MemberId, ...], me: bool) -> None:
        self.calls.append(("diverged", tuple(m.peer_id for m in odd), me))

    def stopped(self) -> None:
        self.calls.append(("stopped",))


class CatchUpNotes:
    """What the learning tells its catch-up."""

    def __init__(self) -> None:
        self.lost = False
        self.kept: list[Kept] = []
        self.said: list[tuple[tuple[int, int], bytes]] = []
        self.yielding = False

    def heard(self, lineage: tuple[int, int], digest: bytes) -> None:
        self.said.append((lineage, digest))

    def reducing(self) -> None:
        self.yielding = True

    def quiet(self) -> None:
        self.yielding = False

    def keep(self, kept: Kept) -> None:
        self.quiet()
        self.kept.append(kept)


class Learner:
    """Peer 2 learns in view 3, which starts from round 7; peers 1 and 3 vote."""

    def __init__(self, root: Path) -> None:
        self.host, self.catch_up = Host(), CatchUpNotes()
        self.keeper = StateKeeper("r", root / "run", surroundings(root, me=2).services, Promises())
        self.keeper.open(PARAMETERS)
        self.view = view_of([payload(ALL)] * 3, view_epoch=3, start=(2, 7), learners=(2,))
        self.learning = Learning(
            self.host, self.view, member(2), cast(CatchUp, self.catch_up), SPEC, self.keeper
        )
        self.learning.start()

    def own(self) -> RoundHeader:
        header = self.learning.barrier.own
        assert header is not None
        return header

    def hear(self, i: int, samples: int = 4, **facts: Any) -> None:
        """A voter's header of my round."""
        facts = {"digest": STATE, "change": False, "samples": samples} | facts
        self.learning.header(peer(i), header_like(self.own(), **facts))

    def all_stand(self, samples: int = 4, **facts: Any) -> None:
        self.hear(1, samples, **facts)
        self.hear(3, samples, **facts)

    def orders(self) -> list[Reduce]:
        return [m for m in self.host.trainer if isinstance(m, Reduce)]

    def reduced(self, **facts: Any) -> None:
        """The trainer's answer to the last order."""
        last = self.orders()[-1]
        facts = {"view_epoch": last.view_epoch, "round": last.round} | facts
        self.learning.round_result(plain(RoundResult, **facts))


@pytest.fixture
def one(tmp_path: Path) -> Learner:
    return Learner(tmp_path)


def test_it_says_its_header_before_anything_else(one: Learner) -> None:
    assert [to for to, _ in one.host.mail] == [peer(1), peer(3)]
    header = one.own()
    assert all(m == header for _, m in one.host.mail)
    assert (header.view_epoch, header.round, header.digest, header.payload_spec) == (3, 8, NO_DIGEST, SPEC)
    assert (header.samples, header.steps, header.finite) == (0, 0, True)
    assert not (header.change or header.closing or header.final)
    assert one.host.trainer == [] and one.catch_up.kept == []


def test_a_round_is_reduced_with_weight_zero_and_kept(one: Learner) -> None:
    one.hear(1, 4)
    assert one.orders() == []
    one.hear(3, 6)
    (order,) = one.orders()
    assert (order.view_epoch, order.round, order.weight, order.divisor) == (3, 8, 0, 10)
    assert one.catch_up.yielding and not one.catch_up.kept
    one.reduced()
    (kept,) = one.catch_up.kept
    assert not one.catch_up.yielding
    assert kept.lineage == (3, 8) and kept.view is one.view and str(kept.mean) == order.slot_path
    assert kept.result.weights == (4, 0, 6) and kept.result.voting == (True, False, True)
    assert one.own().round == 9 and one.host.mail[-1] == (peer(3), one.own())  # at once: nobody waits for it
    one.all_stand()
    assert one.orders()[-1].slot_path != order.slot_path, "what is kept is not written over"
    one.reduced()
    assert [k.lineage for k in one.catch_up.kept] == [(3, 8), (3, 9)]
    for kept in one.catch_up.kept:
        assert kept.mean is not None
        one.keeper.pool().unpin(kept.mean)
    assert balanced(one.keeper)


def test_the_voters_digests_are_told(one: Learner) -> None:
    one.hear(1, digest=b"x" * 16)
    assert one.catch_up.said == [((3, 7), b"x" * 16)]
    one.learning.header(peer(3), header_like(one.own(), view_id=b"o" * 16, digest=b"y" * 16))
    one.learning.header(peer(4), header_like(one.own(), digest=b"z" * 16))
    assert len(one.catch_up.said) == 1  # none of this view's voters


def test_another_learner_says_no_digest(tmp_path: Path) -> None:
    one = Learner(tmp_path)
    one.view = view_of([payload(ALL)] * 3, view_epoch=3, start=(2, 7), learners=(2, 3))
    one.learning = Learning(one.host, one.view, member(2), cast(CatchUp, one.catch_up), SPEC, one.keeper)
    one.learning.start()
    one.hear(3, 0, digest=NO_DIGEST)
    assert one.catch_up.said == [] and one.orders() == []
    one.hear(1, 5)
    assert [order.divisor for order in one.orders()] == [5]


def test_a_voter_a_round_ahead_is_heard_in_time(one: Learner) -> None:
    ahead = header_like(one.own(), round=9, digest=b"n" * 16, samples=2)
    one.all_stand()
    one.learning.header(peer(1), ahead)
    assert one.catch_up.said[-1] == ((3, 8), b"n" * 16) and len(one.orders()) == 1
    one.reduced()
    one.learning.header(peer(3), header_like(one.own(), digest=b"n" * 16, samples=3))
    assert [(o.round, o.divisor) for o in one.orders()] == [(8, 8), (9, 5)]


def test_a_round_without_weight_counts_when_a_voter_says_so(one: Learner) -> None:
    one.all_stand(0)
    assert one.orders() == [] and one.catch_up.kept == []
    one.learning.header(peer(1), header_like(one.own(), round=9, digest=STATE, samples=3))
    (kept,) = one.catch_up.kept
    assert (kept.lineage, kept.mean, kept.result.weights) == ((3, 8), None, (0, 0, 0))
    assert one.own().round == 9 and one.catch_up.said[-1] == ((3, 8), STATE)
    one.hear(3, 1)
    assert [order.divisor for order in one.orders()] == [4]  # the header that came early counts


def test_nobody_was_finite(one: Learner) -> None:
    one.all_stand(4, finite=False)
    assert one.orders() == []
    one.learning.header(peer(3), header_like(one.own(), round=9, digest=STATE, samples=3))
    assert [k.mean for k in one.catch_up.kept] == [None]


def test_while_all_stand_without_weight_a_flag_may_be_raised(one: Learner) -> None:
    one.all_stand(0)
    said = len(one.host.mail)
    one.learning.repeat()
    assert len(one.host.mail) == said  # nobody is missing
    one.host.change = True
    one.learning.repeat()
    assert [m.change for _, m in one.host.mail[said:]] == [True, True]
    one.learning.repeat()
    assert len(one.host.mail) == said + 2  # once
    one.hear(1, 0)  # on its way before that voter had all headers
    one.learning.header(peer(1), header_like(one.own(), round=9, digest=STATE))
    assert [k.lineage for k in one.catch_up.kept] == [
        (3, 8)
    ]  # the voters were through before they heard of it


def test_a_header_is_said_once_otherwise(one: Learner) -> None:
    one.host.change = True
    one.hear(1)
    said = len(one.host.mail)
    one.learning.repeat()
    assert [to for to, _ in one.host.mail[said:]] == [peer(3)]  # who has not answered
    assert not one.host.mail[-1][1].change, "others may have acted on it"
    one.hear(3)
    one.learning.repeat()
    assert len(one.host.mail) == said + 1  # nothing while a reduction runs
    one.reduced()
    assert one.own().change


def test_who_has_lost_its_way_asks_for_another_view(one: Learner) -> None:
    one.catch_up.lost = True
    one.all_stand()
    one.reduced()
    assert one.own().change
    one.all_stand()
    assert len(one.orders()) == 1 and one.catch_up.kept[-1].round == 8  # no payload with it


def test_who_missed_a_header_hears_it_again(one: Learner) -> None:
    one.all_stand()
    one.reduced()
    said = len(one.host.mail)
    last = one.learning.barrier.last_own
    assert last is not None
    one.learning.header(peer(3), header_like(last, digest=STATE))  # still in the round before
    assert one.host.mail[said:] == [(peer(3), last)]


@pytest.mark.parametrize("flag", ["change", "final"])
def test_the_voters_say_how_it_goes_on(one: Learner, flag: str) -> None:
    one.all_stand(3 if flag == "change" else 0, **{flag: True})
    one.learning.repeat()
    assert one.orders() == [] and one.host.calls == [] and one.catch_up.kept == [] and one.own().round == 8


def test_a_run_that_is_stopped_is_over_for_it_too(one: Learner) -> None:
    one.all_stand(3, closing=True)
    assert one.host.calls == [("stopped",)] and one.orders() == [] and one.learning.frozen


def test_the_run_ends_at_headers_that_are_final_and_closing(one: Learner) -> None:
    one.all_stand(0, closing=True, final=True)
    assert one.host.calls == [] and not one.learning.frozen  # the voters say that it is finished


def test_another_payload_is_noticed(one: Learner) -> None:
    one.hear(1)
    one.hear(3, payload_spec=b"q" * 16)
    ((what, odd, me),) = one.host.calls
    assert what == "diverged" and one.learning.frozen and one.orders() == []
    assert len(odd) in (1, 2) and me == (peer(2) in odd)


def test_voters_that_differ_are_noticed(tmp_path: Path) -> None:
    one = Learner(tmp_path)
    one.hear(1)
    one.hear(3, digest=b"t" * 16)
    ((what, odd, me),) = one.host.calls
    assert what == "diverged" and not me and len(odd) == 1


def test_the_result_of_another_round_or_after_a_freeze_is_refused(one: Learner) -> None:
    one.all_stand()
    for facts in ({"round": 7}, {"round": 9}, {"view_epoch": 2}):
        one.reduced(**facts)
        assert isinstance(one.host.trainer[-1], RoundRefused)
    assert one.catch_up.kept == []
    one.learning.freeze()
    assert not one.catch_up.yielding, "the download need not wait for a reduction that is broken off"
    one.reduced()
    assert isinstance(one.host.trainer[-1], RoundRefused) and one.catch_up.kept == []
    assert balanced(one.keeper)


def test_frozen_it_says_nothing_and_reduces_nothing(one: Learner) -> None:
    one.hear(1)
    one.learning.freeze()
    frozen_s = one.learning.frozen_s
    said = len(one.host.mail)
    one.hear(3)
    one.hear(1)
    one.learning.repeat()
    one.learning.check_barrier()
    one.learning.freeze()
    assert len(one.host.mail) == said and one.orders() == []
    assert one.learning.frozen_s == frozen_s > 0
    assert one.catch_up.said == [((3, 7), STATE)]  # of what came before


def test_local_steps_of_a_learner_mean_nothing(one: Learner) -> None:
    one.learning.round_ready(plain(RoundReady, view_epoch=3, round=8, samples=5))
    one.all_stand()
    assert one.orders()[-1].weight == 0 and one.orders()[-1].divisor == 8


def test_a_slot_that_is_kept_is_taken_from_the_keeper_once(one: Learner) -> None:
    one.all_stand()
    scratch = one.keeper.scratch()
    one.reduced()
    assert one.keeper._scratch is None and one.catch_up.kept[0].mean == scratch
    assert one.keeper.pool()._pins[scratch] == 1


def test_one_reduction_that_went_well_is_proof(one: Learner) -> None:
    """Before that this peer does not say what it holds: as a voter it might stop the others."""
    one.all_stand()
    assert one.host.proofs == 0 and not one.learning.proved
    for _ in range(2):
        one.reduced()
        one.all_stand()
    assert one.host.proofs == 1 and one.learning.proved
    for kept in one.catch_up.kept:
        assert kept.mean is not None
        one.keeper.pool().unpin(kept.mean)


def test_where_nothing_can_be_reduced_no_proof_is_needed(one: Learner) -> None:
    """The others may be waiting for the data that this peer has."""
    one.all_stand(samples=0)
    assert one.host.proofs == 1


def test_whose_group_failed_asks_where_the_voters_are(one: Learner) -> None:
    """They may have gone on without it, and nobody else tells it."""
    one.all_stand()
    one.learning.group_failed()
    assert not one.catch_up.yielding
    before = len(one.host.mail)
    one.learning.repeat()
    assert [to for to, _ in one.host.mail[before:]] == [peer(1), peer(3)]
    one.all_stand()
    one.reduced()  # the trainer's late word
    assert len(one.orders()) == 1 and one.catch_up.kept == []


def test_a_learner_reads_the_scheme_from_the_same_headers(tmp_path: Path) -> None:
    one = Learner(tmp_path)
    one.learning.compression = Compression(setting="auto", parameters=10_000_000)
    one.hear(1, comm_us=3_000_000, bytes_sent=12_500_000)
    one.hear(3, comm_us=1_000_000, bytes_sent=12_500_000)
    assert [order.compress for order in one.orders()] == ["int8"]
