"""One run's shell where it is delicate: views that come in the middle of a message, peers that have to go."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_dmc.agent import member_desk, run_end
from p2p_dmc.agent.adoption import AdoptionFailedError
from p2p_dmc.agent.checkpoints import write_checkpoint
from p2p_dmc.agent.run import Run
from p2p_dmc.agent.run_files import RunOptions, RunRecord, load_record, save_record
from p2p_dmc.agent.state import SlotPool
from p2p_dmc.agent.trainer_desk import MAX_BYTES
from p2p_dmc.agent.training import Training
from p2p_dmc.agent.view_opening import out_of_date, view_started
from p2p_dmc.agent.work import Hand, Strike, Work, encode_strikes
from p2p_dmc.core.adacomm import TauPolicy, start
from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_messages import (
    PAYLOAD_MAX_BYTES,
    AgreementSettings,
    Promises,
    Ready,
    StateRef,
    Stopped,
)
from p2p_dmc.core.ledger import Ledger, Stretch
from p2p_dmc.core.quorum import Quorum
from p2p_dmc.errors import RemoteProtocolError, UserError
from p2p_dmc.wire.messages import (
    GroupFailed,
    JoinRequest,
    PeerMeta,
    RoundHeader,
    RunClosed,
    StartOffered,
    Withdrawn,
    decode_meta,
    encode_meta,
)
from p2p_dmc.wire.trainer_messages import Local, RoundFailed, RoundReady, RoundResult, RunFinished
from tests.agent.helpers import (
    NUMEL,
    PARAMETERS,
    POLICY,
    Around,
    member,
    payload,
    peer,
    plain,
    record,
    run_meta,
    state,
    surroundings,
    view_of,
)


def run_of(around: Around) -> Run:
    return Run("r", RunOptions(), around.services)


@pytest.mark.parametrize("policy", [POLICY, TauPolicy(kind="adacomm", tau0=4)])
def test_a_view_tells_the_trainer_whether_its_rate_may_decay(tmp_path: Path, policy: TauPolicy) -> None:
    run = run_of(surroundings(tmp_path))
    run.me = member(1)
    run.keeper.open(PARAMETERS)
    held = state(run.keeper.pool(), (0, 0), tau=start(policy))
    training = SimpleNamespace(
        view=view_of([payload()]),
        held=held,
        course=SimpleNamespace(steps=lambda: (4, 0)),
        ledger=held.ledger,
    )
    started = view_started(run, cast(Any, training), Local.RESET)
    assert (started.may_decay, started.tau, started.digest) == (policy == POLICY, 4, held.anchor_digest)


def in_a_view_of_two(around: Around) -> Run:
    """Peer 1, whose trainer is up, in a view with peer 2 that it has not opened yet."""
    run = run_of(around)
    stopped = Stopped(member=member(1), n=1, withdrawn=True)
    run.agreement = cast(
        Agreement,
        SimpleNamespace(
            frozen=False,
            withdraw=lambda: stopped,
            history=b"h" * 16,
            promises=Promises(),
            promise_version=0,
        ),
    )
    run.view = view_of([payload(), payload()])
    run.desk.up = True
    return run


@pytest.mark.parametrize("kind", [RoundReady, RoundResult])
def test_a_view_of_one_may_give_way_to_the_next_within_a_message(tmp_path: Path, kind: type) -> None:
    run = run_of(surroundings(tmp_path))

    def installed(_: Any) -> None:
        run.training = None  # alone, proposing and installing are one

    training = SimpleNamespace(round_ready=installed, round_result=installed, in_flight=(1, 2))
    run.training = cast(Any, training)
    run.trainer_message(plain(kind))
    assert run.training is None and run.in_flight == (1, 2)


@pytest.mark.parametrize("end", ["complete", "frozen", "over", "trainer lost"])
def test_a_peer_that_leaves_ends_its_round_and_begins_no_other(tmp_path: Path, end: str) -> None:
    around = surroundings(tmp_path)
    run = in_a_view_of_two(around)
    slots = run.keeper.slots = SlotPool(around.services.memory, NUMEL)
    said: list[Any] = []
    barrier = SimpleNamespace(own=None)
    training = SimpleNamespace(
        round_ready=said.append,
        in_flight=None,
        frozen=False,
        freeze=lambda: None,
        view=run.view,
        barrier=barrier,
        ledger=SimpleNamespace(epoch=0, part=0),
        work=SimpleNamespace(claims=lambda: ()),
    )
    run.training = cast(Any, training)
    run.trainer_message(plain(RoundReady))
    assert len(said) == 1
    barrier.own = plain(RoundHeader)

    async def life() -> None:
        run.end.round_over()  # an earlier one
        leaving = asyncio.ensure_future(run.end.leave_between_rounds())
        await asyncio.sleep(0)
        assert not leaving.done()
        if end == "complete":
            run.hold(state(slots, (1, 2)))
        elif end == "over":
            run.end.over("finished", "")
        elif end == "trainer lost":
            run.views.forget()
        else:
            run.views.frozen()
        await asyncio.wait_for(leaving, 1)

    asyncio.run(life())
    run.trainer_message(plain(RoundReady))
    assert len(said) == 1


def test_leaving_waits_where_a_round_may_end_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = in_a_view_of_two(surroundings(tmp_path))
    asyncio.run(asyncio.wait_for(run.end.leave_between_rounds(), 1))  # nothing is trained
    said, stepping = SimpleNamespace(own=plain(RoundHeader)), SimpleNamespace(own=None)
    for frozen, barrier in ((True, said), (False, stepping)):
        run.training = cast(Any, SimpleNamespace(frozen=frozen, barrier=barrier))
        asyncio.run(asyncio.wait_for(run.end.leave_between_rounds(), 1))
    run.training = cast(Any, SimpleNamespace(frozen=False, barrier=said))
    run.end._closing = True  # all have agreed on the end
    asyncio.run(asyncio.wait_for(run.end.leave_between_rounds(), 1))
    run.end._closing = False
    monkeypatch.setattr(run_end, "LAST_ROUND_S", 0.01)
    run.training = cast(Any, SimpleNamespace(frozen=False, barrier=said))
    asyncio.run(asyncio.wait_for(run.end.leave_between_rounds(), 1))


def test_nobody_waits_for_a_peer_that_is_refused(tmp_path: Path) -> None:
    around = surroundings(tmp_path)
    run = in_a_view_of_two(around)
    run.desk.refuse("its loss is not finite")
    told = [(to, m.stopped.member) for to, m, _ in around.sent if isinstance(m, Withdrawn)]
    assert told == [(peer(2), member(1))]
    assert run.end.outcome == "refused" and not run.desk.up


@pytest.mark.parametrize(
    "fault", [AdoptionFailedError("no donor"), UserError("no room"), OSError("no slot")], ids=str
)
def test_a_peer_that_cannot_have_the_start_state_leaves_the_others_alone(
    tmp_path: Path, fault: Exception
) -> None:
    around = surroundings(tmp_path)
    run = in_a_view_of_two(around)

    async def fail(*_: object, **__: object) -> None:
        raise fault

    run.keeper.adopt = fail  # type: ignore[method-assign, assignment]
    assert run.view is not None
    asyncio.run(run.views._open(run.view, None, None))
    assert [to for to, m, _ in around.sent if isinstance(m, Withdrawn)] == [peer(2)]
    assert run.end.outcome == "refused" and str(fault) in run.end.detail


def test_a_strike_that_the_ledger_has_is_known_by_its_key(tmp_path: Path) -> None:
    desk = run_of(surroundings(tmp_path)).desk
    strike = Strike(victim="a:1", view_epoch=1, death=1, epoch=0, stretches=((0, 0, 3),))
    desk.learn_strikes((strike, strike))
    desk.forget_strikes({strike.key})
    desk.learn_strikes((strike,))  # told late
    assert desk.strikes == [] and desk.counted == (strike.key,)
    for death in range(200):
        desk.forget_strikes({("b:1", 1, death)})
    assert len(desk.counted) <= 64


def test_strikes_that_others_tell_of_fit_a_proposal(tmp_path: Path) -> None:
    desk = run_of(surroundings(tmp_path)).desk
    for death in range(100):
        stretches = tuple((shard, 0, 1 << 40) for shard in range(2000))
        desk.learn_strikes((Strike(victim="a:1", view_epoch=1, death=death, epoch=0, stretches=stretches),))
    assert 0 < len(encode_strikes(desk.strikes)) < PAYLOAD_MAX_BYTES // 2 + 1


@pytest.mark.parametrize("shards", [1, 3000])
def test_deaths_of_its_own_trainer_fit_a_proposal_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    run = run_of(surroundings(tmp_path))
    in_hand = tuple((Stretch(shard=shard, lo=0, hi=1 << 40),) for shard in range(shards))
    monkeypatch.setattr(run.views, "hand", lambda: Hand(0, 0, in_hand))
    for _ in range(100):
        run.desk.up = True
        run.desk.lost("killed", in_hand=True)
    assert run.desk.strikes[-1].death == 100
    assert len(run.desk.strikes) <= 64 and len(encode_strikes(run.desk.strikes)) <= MAX_BYTES


def test_a_trainer_that_was_started_again_at_the_end_hears_that_the_run_is_finished(tmp_path: Path) -> None:
    around = surroundings(tmp_path)
    run = run_of(around)
    told: list[object] = []
    run.desk.connected(told.append)
    run.keeper.slots = SlotPool(around.services.memory, NUMEL)
    run.keeper.hold(state(run.keeper.slots, (1, 5)))
    run.end.over("finished", "final/model.safetensors")
    run.desk._ready_to_train()
    assert [type(m) for m in told] == [RunFinished] and not run.desk.up
    assert cast(RunFinished, told[0]).final_path == "final/model.safetensors"


def test_what_a_peer_says_of_itself_is_bounded() -> None:
    good = run_meta()
    assert decode_meta(encode_meta(PeerMeta(weight=1, runs=(good,)))) is not None
    for facts in (
        {"boot": -1},
        {"boot": 1 << 63},
        {"quorum": "most"},
        {"replaced": (b"h" * 15,)},
        {"replaced": (b"h" * 16,) * 5},
    ):
        with pytest.raises(ValueError):
            replace(good, **facts)
    for weight in (-1, 1 << 40):
        with pytest.raises(ValueError):
            PeerMeta(weight=weight, runs=())


def test_a_run_that_was_closed_at_no_state_is_the_senders_fault(tmp_path: Path) -> None:
    around = surroundings(tmp_path)
    run = run_of(around)
    run.keeper.slots = SlotPool(around.services.memory, NUMEL)
    for lineage, digest in (((-1, 0), b"d" * 16), ((1, 1 << 63), b"d" * 16), ((1, 2), b"d")):
        with pytest.raises(RemoteProtocolError):
            run.end.closed_elsewhere(peer(2), plain(RunClosed, lineage=lineage, digest=digest, finished=True))


def test_a_script_that_is_run_again_is_another_member(tmp_path: Path) -> None:
    around = surroundings(tmp_path)
    around.services.home.start_identity()  # this agent's: boot 1
    first = run_of(around)
    assert first.me.boot == 1 and run_of(around).me.boot == 1  # nothing was said yet
    first._save(Promises(n=3), closed=False)
    second = run_of(around)
    assert second.me.boot == 2 and around.services.home.start_identity().boot == 3
    second._save(Promises(n=4), closed=True)
    held = state(SlotPool(around.services.memory, NUMEL), (3, 4), 1.0, Ledger.start(b"d" * 16, [4], 1, 1))
    write_checkpoint(second.folder, held, PARAMETERS, b"h" * 16, True, 3)
    assert run_of(around).me.boot == 2  # it keeps its vote
    (second.folder / "checkpoints" / "3-4" / "ledger.msgpack").unlink()
    assert run_of(around).me.boot == 4  # with the state that it was closed with it has lost that


def test_shards_that_are_lost_or_back_or_no_room_ask_for_another_view() -> None:
    has = {0, 1}
    data = SimpleNamespace(reachable=lambda: frozenset(has), full=False)
    ledger = Ledger.start(b"d" * 16, [4, 4, 4], 1, 1).advance([Stretch(shard=1, lo=0, hi=4)])
    work = Work.for_view(view_of([payload((), 3, reachable=(0, 1))]), 0, ledger, keep_leases=False)
    training = cast(Training, SimpleNamespace(work=work, ledger=ledger, full=False))

    def reason() -> str:
        return out_of_date(training, cast(Any, data))

    assert reason() == ""
    has.remove(1)  # all of it is counted
    assert reason() == ""
    has.remove(0)
    assert "any more" in reason()
    has |= {0, 2}
    assert "back" in reason()
    has.remove(2)
    data.full = True
    assert "no room" in reason()


def test_a_history_may_be_given_up_within_a_tick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2p_dmc.agent.run.out_of_date", lambda training, data: "")
    run = in_a_view_of_two(surroundings(tmp_path))
    nothing = SimpleNamespace(froze=False, installed=None, persist=None, sends=(), trace=())
    run.agreement = cast(
        Agreement,
        SimpleNamespace(left_out=False, cut_off_from=(), tick=lambda now: nothing, promise_version=0),
    )
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in ("serve_lease", "repeat")}
    run.training = cast(Training, SimpleNamespace(frozen=False, **steps))
    run.rivals.look = lambda: setattr(run, "training", None)  # type: ignore[method-assign]
    run.tick()
    assert run.training is None and calls == ["serve_lease", "repeat"]


def test_a_newcomer_whose_hosts_are_gone_joins_those_that_go_on(tmp_path: Path) -> None:
    around = surroundings(tmp_path)
    around.members.append(record(2, run_meta(name="r", history=b"2" * 16, view_epoch=4)))
    run = run_of(around)
    run.agreement = Agreement(
        me=member(1),
        quorum=Quorum.MAJORITY,
        promises=Promises(n=3, courted=b"1" * 16),
        completed=StateRef(lineage=(0, 0), digest=b"s" * 16),
        payload=lambda: b"",
        rng=random.Random(1),
        settings=AgreementSettings(),
        now_ms=0,
    )
    run._enter()
    saved = load_record(run.folder)
    assert saved is not None and (saved.promises.courted, saved.promises.n) == (b"2" * 16, 3)


def test_whoever_is_left_out_says_at_once_that_it_has_no_view(tmp_path: Path) -> None:
    """Others would ask it to be let into that, and nobody would begin anew."""
    around = surroundings(tmp_path)
    told: list[bool] = []
    around.services = replace(around.services, meta_changed=lambda: told.append(True))
    run = in_a_view_of_two(around)
    nothing = SimpleNamespace(froze=False, installed=None, persist=None, sends=(), trace=())
    run.agreement = cast(
        Agreement,
        SimpleNamespace(
            left_out=True, frozen=False, cut_off_from=(), tick=lambda now: nothing, promise_version=0
        ),
    )
    view = SimpleNamespace(view_epoch=1)
    at, work = SimpleNamespace(epoch=0, part=0), SimpleNamespace(claims=lambda: ())
    training = SimpleNamespace(
        frozen=True, frozen_s=0.0, freeze=lambda: None, view=view, ledger=at, work=work
    )
    run.training = cast(Any, training)
    run.desk.up = False
    run.tick()
    assert told and run.training is None and run.stood_in == 0


@pytest.mark.parametrize("hindrance", ["", "header said", "frozen", "no change wanted"])
def test_a_start_is_offered_to_whoever_is_let_in_at_this_rounds_barrier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hindrance: str
) -> None:
    around = surroundings(tmp_path)
    run = in_a_view_of_two(around)
    slots = run.keeper.slots = SlotPool(around.services.memory, NUMEL)
    nothing = SimpleNamespace(froze=False, installed=None, persist=None, sends=(), trace=())
    wanted = hindrance != "no change wanted"
    run.agreement = cast(
        Agreement,
        SimpleNamespace(join_requested=lambda peer, now: nothing, change_wanted=wanted, promise_version=0),
    )
    held = state(slots, (1, 2))
    run.keeper.hold(held)
    barrier = SimpleNamespace(own=plain(RoundHeader) if hindrance == "header said" else None)
    run.training = cast(
        Any,
        SimpleNamespace(
            frozen=hindrance == "frozen", barrier=barrier, held=held, repeat=lambda: None, view=run.view
        ),
    )
    run.members.message(member(3).peer_id, JoinRequest(fingerprint=()))
    offers = [m for _, m, _ in around.sent if isinstance(m, StartOffered)]
    assert [o.start for o in offers] == ([held.ref] if not hindrance else [])
    assert bool(run.keeper.last_request_s) is not bool(hindrance), "it stays as long as somebody may want it"
    if hindrance:
        return
    for lineage, value in (
        ((1, 2), 0.0),
        ((1, 3), 1.0),
    ):  # again; and whoever was not let in with that waits longer
        run.training.held = state(slots, lineage, value)
        run.members.message(member(3).peer_id, JoinRequest(fingerprint=()))
    assert [m.start for _, m, _ in around.sent if isinstance(m, StartOffered)] == [held.ref] * 2
    monkeypatch.setattr(member_desk, "OFFER_AGAIN_S", -1.0)
    run.members.message(member(3).peer_id, JoinRequest(fingerprint=()))
    assert around.sent[-1][1] == StartOffered(start=run.training.held.ref)


@pytest.mark.parametrize(
    "hindrance", ["", "in a view", "trainer lost", "unknown sender", "over", "reductions fail"]
)
def test_an_offered_start_is_for_a_ready_peer_without_a_view(tmp_path: Path, hindrance: str) -> None:
    around = surroundings(tmp_path)
    meta = run_meta(name="r", history=b"2" * 16, view_epoch=4)
    around.members += [record(2, meta), record(3, meta), record(4, run_meta(name="r", history=b"1" * 16))]
    run = run_of(around)
    run.desk.up = hindrance != "trainer lost"
    run.desk.policy = TauPolicy(kind="adacomm", tau0=4)
    run.agreement = cast(Agreement, SimpleNamespace(frozen=hindrance != "in a view", left_out=False))
    run.end.outcome = "left" if hindrance == "over" else ""
    run.keeper.slots = SlotPool(around.services.memory, NUMEL)
    if hindrance == "reductions fail":  # it is not let in for long, and would yield to no reduction meanwhile
        run._unproven.add(4)
    sender = 9 if hindrance == "unknown sender" else 2
    start = StateRef(lineage=(4, 1), digest=b"s" * 16)

    async def life() -> None:
        run.members.message(member(sender).peer_id, StartOffered(start=start))
        assert (run.views._catch_up is None) is bool(hindrance)
        if not hindrance:
            assert run.views._catch_up.target == start
            assert run.views._offering == (member(2).peer_id, member(3).peer_id)
            assert len(run.views._learners_donors()) == 2
            run.learning = cast(Any, SimpleNamespace(view=view_of([payload()] * 4, members=(1, 2, 3, 4))))
            assert len(run.views._learners_donors()) == 3, "in a view, its holders"
        run.end.over("left", "")
        assert run.views._catch_up is None, "nothing is downloaded for a run that is over"

    asyncio.run(life())


@pytest.mark.parametrize("mode", ["training", "learning"])
def test_whoever_is_in_a_view_looks_for_rivals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A learner, too: its voters may have given their history up, and say nothing in the old view any more."""
    monkeypatch.setattr("p2p_dmc.agent.run.out_of_date", lambda training, data: "")
    run = in_a_view_of_two(surroundings(tmp_path))
    nothing = SimpleNamespace(froze=False, installed=None, persist=None, sends=(), trace=())
    run.agreement = cast(
        Agreement,
        SimpleNamespace(left_out=False, cut_off_from=(), tick=lambda now: nothing, promise_version=0),
    )
    looked: list[bool] = []
    setattr(run, mode, SimpleNamespace(frozen=False, serve_lease=lambda: None, repeat=lambda: None))
    monkeypatch.setattr(run.rivals, "look", lambda: looked.append(True))
    run.tick()
    assert looked


def test_a_failed_group_is_told_again_to_whoever_stands_at_its_barrier(tmp_path: Path) -> None:
    """The first word may be lost, and the others would wait there for this peer's next header."""
    around = surroundings(tmp_path)
    run = in_a_view_of_two(around)
    assert run.view is not None
    agreement = cast(Any, run.agreement)
    agreement.view, agreement.wants_change = None, lambda *_, **__: Ready()
    run.trainer_message(plain(RoundFailed, view_epoch=run.view.view_epoch, reason="broken"))

    def told() -> list[str]:
        return [to for to, m, _ in around.sent if isinstance(m, GroupFailed)]

    assert told() == [peer(2)]
    facts = {"digest": b"d" * 16, "payload_spec": b"s" * 16, "view_epoch": run.view.view_epoch}
    run.members.message(peer(2), plain(RoundHeader, view_id=run.view.view_id, **facts))
    assert told() == [peer(2)] * 2
    run.members.message(peer(2), plain(RoundHeader, view_id=b"another view....", **facts))
    assert told() == [peer(2)] * 2


def test_whoever_resumes_a_closed_run_and_leaves_it_has_given_its_votes_up(tmp_path: Path) -> None:
    """Also if it has said nothing before: its next start is somebody else's, for it has said that it votes no more."""
    around = surroundings(tmp_path)
    folder = around.services.home.run_folder("r")
    save_record(folder, RunRecord(promises=Promises(n=3), closed=True, boot=1))
    run = run_of(around)
    run._closed = True  # the state that it was closed with is whole
    told: list[bool] = []
    run.members.tell_withdrawal = lambda *_: told.append(load_record(folder).closed)  # type: ignore[method-assign, union-attr]
    stopped = Stopped(member=member(1), n=3, withdrawn=True)
    run.agreement = cast(
        Agreement, SimpleNamespace(withdraw=lambda: stopped, promises=Promises(n=3), history=b"h" * 16)
    )
    run.withdraw("its trainer is gone")
    assert told == [False], "first on disk, then said"


def test_a_run_that_was_closed_stays_so(tmp_path: Path) -> None:
    """Nobody is told that this peer withdraws, either: its votes would count as given up, and it keeps them."""
    around = surroundings(tmp_path)
    run = in_a_view_of_two(around)
    run.fall_silent()
    assert run.save_closed()
    run.withdraw("the agent stops")
    record = load_record(run.folder)
    assert record is not None and record.closed and around.sent == []
