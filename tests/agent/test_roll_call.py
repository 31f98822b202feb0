"""A run is stopped: who is told when, what each waits for, and whose vote is kept (DESIGN.md section 6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_dmc.agent import roll_call, run_end, run_files
from p2p_dmc.agent.agent import Agent
from p2p_dmc.agent.requests import Requests
from p2p_dmc.agent.run import Run
from p2p_dmc.agent.run_files import RunOptions, load_record
from p2p_dmc.agent.state import SlotPool
from p2p_dmc.agent.work import encode_strikes
from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_messages import Promises, Ready, Stopped, Verdict, View, ViewRef
from p2p_dmc.core.membership import MemberState
from p2p_dmc.wire import messages
from p2p_dmc.wire.messages import RoundHeader, RunClosed, Withdrawn
from p2p_dmc.wire.trainer_messages import TrainerStop
from tests.agent.helpers import (
    NUMEL,
    VIEW_ID,
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

AT = (1, 7)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "REPEAT_S", 0.005)
    monkeypatch.setattr(run_end, "LINGER_S", 0.02)


class Host:
    """One peer's run in a view at whose last barrier all are to stop; its disk takes as long as the test wants."""

    def __init__(self, root: Path, number: int, view: View, pending: tuple[ViewRef, ...] = ()) -> None:
        self.around: Around = surroundings(root, me=number)
        self.run = Run("r", RunOptions(), self.around.services)
        slots = self.run.keeper.slots = SlotPool(self.around.services.memory, NUMEL)
        self.run.keeper.hold(state(slots, AT))
        self.run.view, self.run.desk.up = view, True
        held = self.run.keeper.current
        self.run.training = cast(
            Any,
            SimpleNamespace(
                frozen=False,
                held=held,
                view=view,
                reducing=None,
                header=lambda *_: None,
                freeze=lambda: None,
                ledger=SimpleNamespace(epoch=0, part=0),
                work=SimpleNamespace(claims=lambda: ()),
            ),
        )
        self.core_heard: list[str] = []
        self.promises = Promises(n=1, history=b"h" * 16, pending=pending)
        self.run._save(self.promises, closed=False)
        self.run.agreement = cast(Agreement, self)
        self.disk = asyncio.Event()
        self.written = True
        self.withdraws: Stopped | None = None
        self.run.keeper.checkpoint = self._checkpoint  # type: ignore[method-assign, assignment]
        self.trainer: list[object] = []
        self.run.desk.connected(self.trainer.append)
        for other in range(1, 4):
            self.around.members.append(record(other, run_meta(view_epoch=1)))

    async def _checkpoint(self, *_: object, **__: object) -> bool:
        await self.disk.wait()
        return self.written

    # of the core, what a peer that stops may still use
    committed_lineage = AT

    def checkpointed(self, *_: object) -> Ready:
        return Ready(persist=self.promises)

    def withdraw(self) -> Stopped | Ready:
        return self.withdraws or Ready()

    def __getattr__(self, name: str) -> Callable[..., Ready]:
        if name.startswith("_"):
            raise AttributeError(name)

        def heard(*_: object, **__: object) -> Ready:
            self.core_heard.append(name)
            return Ready()

        return heard

    @property
    def closed(self) -> bool:
        found = load_record(self.run.folder)
        return found is not None and found.closed

    @property
    def lines(self) -> str:
        return "\n".join(self.around.said)


class Net:
    """Three of them. `lost`: (from, to) pairs between which nothing arrives."""

    def __init__(self, root: Path, learners: tuple[int, ...] = (), **facts: Any) -> None:
        self.view = view_of([payload()] * 3, learners=learners)
        self.hosts = {n: Host(root, n, self.view, **(facts if n == 1 else {})) for n in (1, 2, 3)}
        self.lost: set[tuple[int, int]] = set()
        self.told: list[tuple[int, int, RunClosed]] = []

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def deliver(self) -> None:
        for number, host in self.hosts.items():
            sent, host.around.sent[:] = list(host.around.sent), []
            for to, message, _ in sent:
                receiver = int(to, 16)
                if isinstance(message, RunClosed):
                    self.told.append((number, receiver, message))
                if (number, receiver) not in self.lost and receiver in self.hosts:
                    self[receiver].run.members.message(peer(number), message)

    async def until(self, true: Callable[[], bool]) -> None:
        async def look() -> None:
            while not true():
                self.deliver()
                await asyncio.sleep(0.001)

        await asyncio.wait_for(look(), 20)

    async def settle(self, *numbers: int) -> None:
        """Until these no longer linger."""
        await self.until(lambda: all(self._left_s(n) <= 0 for n in numbers))

    def _left_s(self, number: int) -> float:
        end = self[number].run.end
        return end.linger_s(asyncio.get_running_loop().time()) if end.outcome else 1.0

    def close(self, *numbers: int) -> None:
        for number in numbers:
            self[number].run.end.close(finished=False)


def test_nobody_says_that_it_stopped_before_its_state_is_on_disk_or_keeps_its_vote_before_all_did(
    tmp_path: Path,
) -> None:
    async def life() -> None:
        net = Net(tmp_path)
        net.close(1, 2, 3)
        await net.until(lambda: True)
        assert net.told == []
        for number in (1, 2):
            net[number].disk.set()
        await net.until(lambda: len({to for _, to, _ in net.told}) == 3)
        assert {sender for sender, _, _ in net.told} == {1, 2}
        assert [type(m) for m in net[1].trainer] == [TrainerStop]
        assert not any(host.closed for host in net.hosts.values())
        assert net[1].run.end.outcome == "stopped" and net._left_s(1) > 0
        net[3].disk.set()
        await net.settle(1, 2, 3)
        assert all(host.closed for host in net.hosts.values())
        assert not any(host.core_heard for host in net.hosts.values())
        assert all(host.around.named("roll_call")[0]["missing"] == [] for host in net.hosts.values())
        count = len(net.told)
        await asyncio.sleep(0.05)
        net.deliver()
        assert len(net.told) == count, "once all are heard nobody says anything any more"

    asyncio.run(life())


def test_lost_words_are_said_again_until_they_are_heard(tmp_path: Path) -> None:
    async def life() -> None:
        net = Net(tmp_path)
        net.lost = {(1, 3), (3, 1), (2, 1)}
        for host in net.hosts.values():
            host.disk.set()
        net.close(1, 2, 3)
        await net.until(lambda: len(net.told) > 12)
        assert net[2].closed and not net[1].closed and not net[3].closed
        net.lost = {(3, 1)}  # then 1 says it again, and 3 knows that 1 has not heard it
        await net.until(lambda: net[3].closed)
        assert not net[1].closed
        net.lost = set()
        await net.settle(1, 2, 3)
        assert net[1].closed

    asyncio.run(life())


def test_who_misses_the_last_barrier_stops_when_it_hears_of_it(tmp_path: Path) -> None:
    async def life() -> None:
        net = Net(tmp_path)
        for host in net.hosts.values():
            host.disk.set()
        net.close(1)
        await net.settle(1, 2, 3)
        assert all(host.closed for host in net.hosts.values())

    asyncio.run(life())


def test_one_that_starts_anew_does_not_stop_with_those_that_are_over(tmp_path: Path) -> None:
    net = Net(tmp_path)
    net[2].run.view, net[2].run.training = None, None
    word = plain(RunClosed, lineage=AT, digest=net[2].run.keeper.current.ref.digest, view_id=VIEW_ID)  # type: ignore[union-attr]
    net[2].run.members.message(peer(1), word)
    assert net[2].run.agreement is not None and net[2].run.end.outcome == ""


@pytest.fixture
def stopping(tmp_path: Path) -> Iterator[Host]:
    """It has begun to stop; its state is not on disk yet."""
    net = Net(tmp_path)

    async def begin() -> None:
        net.close(1)
        await asyncio.sleep(0)

    asyncio.run(begin())
    yield net[1]


def farewell(number: int) -> Withdrawn:
    stopped = Stopped(member=member(number), n=1, withdrawn=True)
    return Withdrawn(stopped=stopped, reason="", strikes=encode_strikes([]), completed=AT)


EVENTS: dict[str, Callable[[Run], object]] = {
    "verdict": lambda run: run.verdict(peer(2), 1, Verdict.CRASHED),
    "withdrawn": lambda run: run.withdrawn(Stopped(member=member(2), n=1)),
    "farewell": lambda run: run.members.message(
        peer(2),
        farewell(2),
    ),
    "proposal": lambda run: run.members._hear(cast(Any, SimpleNamespace())),
    "header": lambda run: run.members._header(
        peer(2), plain(RoundHeader, view_id=b"w" * 16, view_epoch=2, digest=b"d" * 16, payload_spec=b"s" * 16)
    ),
    "tick": lambda run: run.tick(),
    "join": lambda run: run.join_requested(peer(4)),
    "broken group": lambda run: run.wants_change("broken"),
    "a new trainer": lambda run: run.trainer_ready(),
    "its trainer is lost": lambda run: run.desk.lost("killed", in_hand=False),
    "leave": lambda run: run.withdraw("it leaves"),
    "complete": lambda run: run.complete(cast(Any, None)),
}


@pytest.mark.parametrize("event", EVENTS)
def test_whoever_stops_is_deaf_and_dumb_from_then_on(stopping: Host, event: str) -> None:
    """Else a view could be installed without one that has stopped faster and is gone."""
    assert stopping.run.training is not None and stopping.run.training.frozen
    stopping.around.sent.clear()
    EVENTS[event](stopping.run)
    assert stopping.core_heard == [] and stopping.run.agreement is None
    said = [m for _, m, _ in stopping.around.sent if isinstance(m, (*messages.AGREEMENT_MESSAGES, Withdrawn))]
    assert said == []


def test_one_that_has_said_a_set_beyond_the_view_counts_for_nobody_and_nobody_waits_for_it(
    tmp_path: Path,
) -> None:
    """Somebody may have installed it, and go on without those that have stopped."""
    beyond = (ViewRef(view_epoch=2, members=(member(1), member(2))),)

    async def life() -> None:
        net = Net(tmp_path, pending=beyond)
        net.close(1, 2, 3)
        await asyncio.sleep(0)
        for host in net.hosts.values():
            host.disk.set()
        await net.until(lambda: all(host.around.named("roll_call") for host in net.hosts.values()))
        assert not any(host.closed for host in net.hosts.values())
        assert "could not keep its vote; all peers of the last view are needed" in net[1].lines
        for number in (2, 3):
            assert net[number].run.end.outcome == "stopped"
            assert f"no word came that peer1 ({peer(1)[:8]}) stopped at the same round" in net[number].lines

    asyncio.run(life())


@pytest.mark.parametrize("fault", ["disk", "left", "promises"])
def test_one_that_does_not_remember_its_stop_has_no_vote_and_costs_the_others_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Its disk takes nothing, it left meanwhile: it is deaf all the same, and says so."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async def life() -> None:
        net = Net(tmp_path)
        net[1].written = fault != "disk"
        net.close(1, 2, 3)
        await asyncio.sleep(0)
        if fault == "left":
            net[1].run.end.over("left", "")
        with monkeypatch.context() as patch:
            if fault == "promises":
                patch.setattr(run_files, "save_record", full)
            net[1].disk.set()
            await net.until(lambda: bool(net[1].run.end.outcome))
        for host in net.hosts.values():
            host.disk.set()
        await net.until(lambda: all(host.around.named("roll_call") for host in net.hosts.values()))
        assert [host.closed for host in net.hosts.values()] == [fault == "promises", True, True]
        no_vote = "is not on this peer's disk: at its next start it has no vote" in net[1].lines
        assert no_vote is (fault != "promises"), "a record that is written after all is whole"
        assert not any("are needed to go on" in host.lines for host in net.hosts.values())

    asyncio.run(life())


def asked_to_stop(run: Run) -> dict[str, Any]:
    """What `dmc-peer stop` hears from this peer."""
    return Requests(cast(Agent, SimpleNamespace(runs={"r": run}, members=lambda: ()))).stop("")


def restarted(host: Host) -> None:
    host.around.members[2] = replace(host.around.members[2], boot=2)


def dead(host: Host) -> None:
    host.around.members[2] = record(3, run_meta(view_epoch=1), state=MemberState.DEAD)


def later(host: Host) -> None:
    host.around.members[2] = record(3, run_meta(view_epoch=2))


def outside(host: Host) -> None:
    host.around.members[2] = record(3, run_meta(view_epoch=0))


def withdrew(host: Host) -> None:
    host.run.members.message(peer(3), farewell(3))


def stopped_later(host: Host) -> None:
    host.run.members.message(peer(3), plain(RunClosed, lineage=(2, 9), digest=b"l" * 16, view_id=b"w" * 16))


def ctrl_c(host: Host) -> None:
    host.run.end.leaving = True


@pytest.mark.parametrize("what", [restarted, dead, later, outside, withdrew, stopped_later, ctrl_c])
def test_nobody_waits_for_one_that_will_not_say_that_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Callable[[Host], None]
) -> None:
    monkeypatch.setattr(roll_call, "SAY_AFTER_S", 0.02)

    async def life() -> None:
        net = Net(tmp_path)
        net[1].disk.set()
        net[2].disk.set()
        net.close(1, 2)
        net.lost = {(1, 3), (2, 3)}
        waits = f"is stopped here; waiting for word that peer3 ({peer(3)[:8]}) stopped, too"
        await net.until(lambda: waits in net[1].lines)
        assert net[1].around.said.count(net[1].around.said[-1]) == 1 and net._left_s(1) > 0
        assert asked_to_stop(net[1].run) == {"run": "r", "stopping": True}, "it is, and not yet over"
        monkeypatch.setattr(roll_call, "NEWS_S", 0.0)
        what(net[1])
        await net.until(lambda: not net[1].run.end.roll.attending)
        assert net[1].around.named("roll_call")[0]["missing"] == [peer(3)] and not net[1].closed
        assert "no word came that peer3" in net[1].lines
        assert net[2].run.end.roll.attending, "it knows nothing of that"
        net[2].run.end.leaving = True
        await net.settle(2)

    asyncio.run(life())


def test_news_of_membership_may_be_older_than_the_last_barrier(tmp_path: Path) -> None:
    async def life() -> None:
        net = Net(tmp_path)
        outside(net[1])  # as it was before this view
        for host in net.hosts.values():
            host.disk.set()
        net.close(1, 2)
        net.lost = {(3, 1)}
        await net.until(lambda: net[3].closed and net[2].closed)
        assert net[1].run.end.roll.attending
        net.lost = set()
        await net.settle(1, 2, 3)
        assert net[1].closed

    asyncio.run(life())


def test_a_learner_is_not_waited_for(tmp_path: Path) -> None:
    async def life() -> None:
        net = Net(tmp_path, learners=(3,))
        net.lost = {(1, 3), (2, 3)}
        for host in net.hosts.values():
            host.disk.set()
        net.close(1, 2)
        await net.settle(1, 2)
        assert net[1].closed and net[2].closed and not net[3].closed
        net.lost = set()
        net[1].around.sent.clear()
        net[1].run.members.message(peer(3), plain(RoundHeader))  # it has not heard yet, and has caught up
        await net.until(lambda: bool(net[3].around.named("roll_call")))
        assert net[3].run.end.outcome == "stopped" and not net[3].closed and net[3].around.said == []

    asyncio.run(life())


def test_one_that_withdraws_while_others_write_their_state_is_not_waited_for(tmp_path: Path) -> None:
    async def life() -> None:
        net = Net(tmp_path)
        net.close(1)
        net[1].run.members.message(peer(3), farewell(3))
        net[1].disk.set()
        net[2].disk.set()
        net.lost = {(1, 3)}
        await net.until(lambda: bool(net[1].around.named("roll_call")))
        assert net[1].around.named("roll_call")[0]["missing"] == [peer(3)]
        net[2].run.end.leaving = True
        await net.settle(1, 2)

    asyncio.run(life())


def test_one_that_stopped_in_another_view_is_not_counted(tmp_path: Path) -> None:
    async def life() -> None:
        net = Net(tmp_path)
        net[3].run.view = replace(net.view, view_id=b"w" * 16)
        for host in net.hosts.values():
            host.disk.set()
        net.close(1, 2, 3)
        await net.settle(1, 2, 3)
        assert not any(host.closed for host in net.hosts.values())

    asyncio.run(life())


def test_one_whose_trainer_died_at_the_last_barrier_keeps_no_vote_that_it_gave_up(tmp_path: Path) -> None:
    """All had its header, so all stop, it too. But whoever heard that it withdrew does not count it in this view."""

    async def life() -> None:
        net = Net(tmp_path)
        for host in net.hosts.values():
            host.disk.set()
        net[3].withdraws = farewell(3).stopped
        net[3].run.desk.lost("killed by SIGKILL", in_hand=False)
        net[3].around.sent.clear()  # the other two have begun to stop, and hear nothing of it
        net.close(1, 2)
        await net.until(lambda: all(host.around.named("roll_call") for host in net.hosts.values()))
        assert {word.view_id for sender, _, word in net.told if sender == 3} == {b""}
        assert not any(host.closed for host in net.hosts.values())

    asyncio.run(life())


def test_whoever_has_given_up_votes_of_an_earlier_view_keeps_those_of_this_one(tmp_path: Path) -> None:
    async def life() -> None:
        net = Net(tmp_path)
        for host in net.hosts.values():
            host.disk.set()
            host.run.view = replace(net.view, view_epoch=2)
        net[3].withdraws = farewell(3).stopped  # up to view 1
        net[3].run.withdraw("its trainer was killed once")
        net.close(1, 2, 3)
        await net.until(lambda: all(host.closed for host in net.hosts.values()))

    asyncio.run(life())


def test_one_that_was_counted_out_stops_nobody_who_went_on_from_its_state(tmp_path: Path) -> None:
    """They would stop wherever they are in a round that the others may complete."""
    net = Net(tmp_path)
    net[2].run.view = replace(
        net.view, view_id=b"w" * 16, members=net.view.members[1:], voters=net.view.voters[1:]
    )
    assert net[2].run.keeper.current is not None
    word = plain(RunClosed, lineage=AT, digest=net[2].run.keeper.current.ref.digest, view_id=VIEW_ID)
    net[2].run.members.message(peer(1), word)
    assert net[2].run.agreement is not None and not net[2].run.training.frozen  # type: ignore[union-attr]


def test_what_a_core_wants_once_its_peer_stops_is_saved_and_neither_said_nor_done(tmp_path: Path) -> None:
    """It may find, with its last checkpoint, that a change is due which had to wait for a moment."""

    async def life() -> None:
        net = Net(tmp_path)
        host = net[1]
        installed = cast(Any, SimpleNamespace())
        due = Ready(
            persist=replace(host.promises, n=2),
            sends=((peer(2), host.promises),),
            froze=True,
            installed=installed,  # type: ignore[arg-type]
        )
        host.run.fall_silent()
        host.run.act(due)
        assert host.around.sent == [] and host.run.view is net.view and host.trainer == []
        found = load_record(host.run.folder)
        assert found is not None and found.promises.n == 2

    asyncio.run(life())


def test_whoever_leaves_while_its_state_goes_to_disk_says_first_that_it_stopped(tmp_path: Path) -> None:
    """The write would go on all the same, and the others would need this peer to go on."""

    async def life() -> None:
        net = Net(tmp_path)
        net[1].disk.set()
        net[2].disk.set()
        net.close(1, 2, 3)
        leaving = asyncio.ensure_future(net[3].run.end.save_before_leaving())
        await net.until(lambda: net[1].run.end.outcome == "stopped")
        assert not leaving.done() and "leaving once its state is on disk" in net[3].lines
        net[3].disk.set()
        await net.until(leaving.done)
        net[3].run.end.leaving = True
        await net.settle(1, 2, 3)
        assert net[1].closed and net[2].closed and net[3].run.end.outcome == "stopped"

    asyncio.run(life())


def test_alone_a_peer_keeps_its_vote_at_once(tmp_path: Path) -> None:
    async def life() -> None:
        host = Host(tmp_path, 1, view_of([payload()]))
        host.disk.set()
        host.run.end.close(finished=False)
        while not host.run.end.outcome:
            await asyncio.sleep(0.001)
        assert host.closed

    asyncio.run(life())


def test_whoever_says_a_header_to_one_that_stopped_is_told(tmp_path: Path) -> None:
    async def life() -> None:
        net = Net(tmp_path)
        net[1].disk.set()
        net.close(1)
        net.lost = {(1, 2), (1, 3)}
        await net.until(lambda: net[1].run.end.outcome == "stopped")
        net[1].around.sent.clear()
        net[1].run.members.message(peer(2), plain(RoundHeader))
        [(to, word, _)] = net[1].around.sent
        assert to == peer(2) and isinstance(word, RunClosed)
        assert (word.lineage, word.view_id, word.answer, word.finished) == (AT, VIEW_ID, True, False)
        net[1].run.end.leaving = True
        await net.settle(1)

    asyncio.run(life())


def test_a_disk_that_refuses_the_closed_record_is_asked_once() -> None:
    """Each word of another one would have it said again."""
    asked: list[None] = []
    run = SimpleNamespace(save_closed=lambda: bool(asked.append(None)))
    roll = roll_call.RollCall(cast(Run, run))
    roll._own, roll._on_disk = cast(RunClosed, SimpleNamespace(view_id=b"v")), True
    for _ in range(3):
        roll.look()
    assert len(asked) == 1 and not roll.kept
