"""A run is stopped while scripts end by themselves and disks take nothing: who goes on at the next start, with whom.

The peers' cores, records and checkpoints are real; trainers and the network are made by hand (DESIGN.md section 6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_dmc.agent import jobs as jobs_module
from p2p_dmc.agent import roll_call, run_end, run_files, state_keeper
from p2p_dmc.agent.jobs import Job, Jobs
from p2p_dmc.agent.run import Run
from p2p_dmc.agent.run_files import RunOptions
from p2p_dmc.agent.supervisor import TrainerExit
from p2p_dmc.config import AgentSettings
from p2p_dmc.core.agreement_messages import StateRef
from p2p_dmc.wire.messages import AGREEMENT_MESSAGES, RunClosed, SubmitScript, Withdrawn
from p2p_dmc.wire.trainer_messages import TrainerRefused, TrainerStop
from tests.agent.helpers import PARAMETERS, Around, peer, plain, record, run_meta, state, surroundings
from tests.core.agreement_cluster import Cluster

AT = (1, 1)
TURNS = 100
"""Of the loop: more than any task takes to the next thing that it waits for."""
FULL = OSError(28, "No space left on device")
ENDS = {
    "its own end": TrainerExit(code=0, signal_name="", last_line="done"),
    "an error": TrainerExit(code=1, signal_name="", last_line="ValueError: no"),
    "killed": TrainerExit(code=-9, signal_name="SIGKILL", last_line=""),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "REPEAT_S", 0.005)
    monkeypatch.setattr(run_end, "LINGER_S", 0.02)
    monkeypatch.setattr(run_end, "LOOK_S", 0.005)


class Script:
    """A trainer's process that ends when the test wants; started once more, it stays."""

    pid = 1

    def __init__(self, **_: object) -> None:
        self.ended: asyncio.Future[TrainerExit] = asyncio.get_running_loop().create_future()

    async def run(self) -> TrainerExit:
        return await self.ended

    def kill(self) -> None:
        if not self.ended.done():
            self.ended.set_result(ENDS["killed"])


class Machine:
    """One peer, whose script trains in a view at whose last barrier all are to stop."""

    def __init__(self, root: Path, number: int, net: Net) -> None:
        self.root, self.name = root, peer(number)
        self.around: Around = surroundings(root, me=number)
        for other in net.numbers:
            self.around.members.append(record(other, run_meta(view_epoch=1)))
        self.run = Run("r", RunOptions(), self.around.services)
        self.run.keeper.open(PARAMETERS)
        self.run.keeper.hold(state(self.run.keeper.pool(), AT))
        self.disk = asyncio.Event()
        self.checkpoint, self.run.keeper.checkpoint = self.run.keeper.checkpoint, self._checkpoint  # type: ignore[method-assign]
        core, held = net.cores[self.name], self.run.keeper.current
        assert held is not None and net.cores.do(self.name, core.complete(held.ref, net.cores.now)).accepted
        core.committed(AT)
        core.established(1)
        self.run.agreement, self.run.view, self.run.desk.up = core, core.view, True
        self.run._save(net.cores.disk[self.name], closed=False)
        self.run.training = cast(Any, self._training())
        self.said: list[Any] = []
        self.run.desk.connected(self.said.append)
        self.jobs, self.tasks = self._jobs(), set[Any]()

    def _training(self) -> SimpleNamespace:
        ledger = SimpleNamespace(epoch=0, part=0)
        work = SimpleNamespace(claims=lambda: ())
        facts = {"reducing": None, "ledger": ledger, "work": work, "freeze": lambda: None}
        facts["repeat"] = lambda: None
        return SimpleNamespace(frozen=False, held=self.run.keeper.current, view=self.run.view, **facts)

    def _jobs(self) -> Jobs:
        data = SimpleNamespace(release_use=lambda: None)
        services = self.around.services
        agent = SimpleNamespace(journal=services.journal, home=services.home, say=services.say, endpoint="")
        agent.settings, agent.data, agent.spawn = AgentSettings(), data, self._spawn
        return Jobs(cast(Any, agent))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.add(asyncio.ensure_future(work))

    async def _checkpoint(self, *args: Any, **facts: Any) -> bool:
        await self.disk.wait()
        return await self.checkpoint(*args, **facts)

    def start(self) -> None:
        """Its script runs."""
        given = {"arguments": (), "seeds": (), "environment": ()}
        submit = plain(SubmitScript, run="r", script="train.py", **given)
        self.job = Job(submit=submit, run=self.run, tell=self.said.append)
        self._spawn(self.jobs._work(self.job))

    @property
    def script(self) -> Script:
        return cast(Script, self.job.process)

    @property
    def closed(self) -> bool:
        found = run_files.own_record(self.run.folder)
        return found is not None and found.closed

    @property
    def lines(self) -> str:
        return "\n".join(self.around.said)


class Net:
    """Some of them, in a view that was founded by their cores."""

    def __init__(self, root: Path, count: int = 3) -> None:
        self.numbers = range(1, count + 1)
        self.cores = Cluster("")
        names = [peer(n) for n in self.numbers]
        for name in names:
            self.cores.start(name, completed=StateRef(lineage=(0, 0), digest=name[-16:].encode()))
        self.cores.found()
        self.cores.adopt(cast(str, names))
        self.machines = {n: Machine(root, n, self) for n in self.numbers}
        self.told: list[tuple[int, RunClosed]] = []

    def __getitem__(self, number: int) -> Machine:
        return self.machines[number]

    def deliver(self) -> None:
        for number, machine in self.machines.items():
            sent, machine.around.sent[:] = list(machine.around.sent), []
            for to, message, _ in sent:
                assert not isinstance(message, (*AGREEMENT_MESSAGES, Withdrawn)), "whoever stops is dumb"
                if isinstance(message, RunClosed):
                    self.told.append((number, message))
                self[int(to, 16)].run.members.message(machine.name, message)

    async def until(self, true: Callable[[], bool]) -> None:
        async def look() -> None:
            while not true():
                self.deliver()
                await asyncio.sleep(0.001)

        await asyncio.wait_for(look(), 20)

    async def turns(self) -> None:
        """Whatever can go on without a disk or a word does."""
        for _ in range(TURNS):
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """At the last barrier: all have begun to stop, and no state is on a disk."""
        for machine in self.machines.values():
            machine.start()
        await self.until(lambda: all(m.job.process is not None for m in self.machines.values()))
        for machine in self.machines.values():
            machine.run.end.close(finished=False)
        await asyncio.sleep(0)

    async def end(self) -> None:
        """The disks have had time; the scripts that are told to stop do so, and all commands end."""
        for machine in self.machines.values():
            machine.disk.set()

        def ended() -> bool:
            for machine in self.machines.values():
                if any(isinstance(said, TrainerStop) for said in machine.said):
                    machine.script.kill()
            return all(machine.job.ended.is_set() for machine in self.machines.values())

        await self.until(ended)

    def again(self, *numbers: int) -> Cluster:
        """These are started again on their homes; the cores that stand for them have met."""
        cores = Cluster("")
        for number in numbers:
            run = Run("r", RunOptions(), replace(surroundings(self[number].root, me=number).services, boot=2))
            run.keeper.open(PARAMETERS)
            held = run.keeper.current or state(run.keeper.pool(), (0, 0))
            cores.start(peer(number), run.me.boot, held.ref, run._promises)
        for number in numbers:
            cores.do(peer(number), cores[peer(number)].found(tuple(map(peer, numbers)), cores.now))
        cores.deliver()
        cores.wait(2_000)
        return cores

    def goes_on(self, *numbers: int) -> bool:
        """Whether these go on by themselves, and then where they were stopped."""
        cores = self.again(*numbers)
        views = {cores[peer(n)].view for n in numbers}
        assert len(views) == 1
        (view,) = views
        assert view is None or view.start.lineage == AT
        return view is not None


def stopped(root: Path, change: Callable[[Net], object], count: int = 3) -> Net:
    """They have been stopped; ``change`` happens before any state is on a disk."""
    made: list[Net] = []

    async def life() -> None:
        net = Net(root, count)
        made.append(net)
        await net.stop()
        change(net)
        await net.turns()
        net.deliver()
        await net.end()

    asyncio.run(life())
    return made[0]


@pytest.mark.parametrize("how", ENDS)
def test_a_script_that_ends_while_its_peer_stops_costs_no_vote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """All have agreed to stop: its agent closes the run's record with the others, and nothing is started anew."""
    monkeypatch.setattr(jobs_module, "TrainerProcess", Script)
    net = stopped(tmp_path, lambda net: net[3].script.ended.set_result(ENDS[how]))
    assert [net[n].run.end.outcome for n in net.numbers] == ["stopped"] * 3
    assert all(net[n].closed for n in net.numbers)
    for pair in ((1, 2), (2, 3), (1, 3)):
        assert net.goes_on(*pair)
    result = net[3].job.result
    assert result is not None and result.code == (how == "an error")
    if how == "an error":
        assert result.line == "run 'r' is stopped, but the script failed: ValueError: no"
    else:
        assert result.line == "run 'r' stopped; the same command goes on from there"
    assert not any("started again" in said for said in net[3].around.said)


def test_a_stop_that_fails_holds_no_command_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of this program: what is to come never comes."""
    monkeypatch.setattr(jobs_module, "TrainerProcess", Script)

    async def life() -> None:
        net = Net(tmp_path)

        async def broken(*_: object, **__: object) -> bool:
            raise RuntimeError("a fault")

        net[3].run.keeper.checkpoint = broken  # type: ignore[method-assign, assignment]
        await net.stop()
        await net.turns()
        net[3].script.ended.set_result(ENDS["an error"])
        leaving = asyncio.ensure_future(net[3].run.end.save_before_leaving())
        await net.until(lambda: net[3].job.ended.is_set() and leaving.done())
        assert net[3].around.named("fault")

    asyncio.run(life())


def test_for_whom_a_stop_waits_can_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a step to end, for a disk, for a word: at each peer by itself."""
    monkeypatch.setattr(jobs_module, "TrainerProcess", Script)

    async def life() -> None:
        net = Net(tmp_path)
        one = net[1].run
        barrier = SimpleNamespace(missing=lambda: [one.me, *one.view.voters[2:]] if one.view else [])
        one.training.barrier = cast(Any, barrier)  # type: ignore[union-attr]
        assert one.end.waits_for == (), "nobody stops it"
        one.end.ask_stop("", tell=False)
        assert one.end.waits_for == (peer(1), peer(3))
        await net.stop()
        assert one.end.waits_for == (peer(1),)
        net[1].disk.set()
        await net.until(lambda: one.end.roll.attending)
        assert one.end.waits_for == one.end.roll.unheard == (peer(2), peer(3))
        net[2].disk.set()
        await net.until(lambda: one.end.waits_for == (peer(3),))
        assert net[3].run.end.waits_for == (peer(3),)
        await net.end()
        assert one.end.waits_for == one.end.roll.unheard == ()

    asyncio.run(life())


class Disks:
    """Those of these numbers take no checkpoint any more, no record of promises, or neither."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full: dict[str, tuple[int, ...]] = {}
        for module, name, place in (
            (state_keeper, "write_checkpoint", "checkpoint"),
            (run_files, "save_record", "record"),
        ):
            monkeypatch.setattr(module, name, self._or_not(getattr(module, name), place))

    def _or_not(self, write: Callable[..., Any], what: str) -> Callable[..., Any]:
        def wrapped(folder: Path, *args: Any, **facts: Any) -> Any:
            if any(f"home{n}" in folder.parts for n in self.full.get(what, ())):
                raise FULL
            return write(folder, *args, **facts)

        return wrapped

    def fill(self, what: str, *numbers: int) -> None:
        self.full |= {one: numbers for one in ("checkpoint", "record") if what in (one, "disk")}


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> Disks:
    monkeypatch.setattr(jobs_module, "TrainerProcess", Script)
    return Disks(monkeypatch)


@pytest.mark.parametrize("what", ["checkpoint", "record", "disk"])
def test_one_disk_that_takes_nothing_costs_one_vote_and_no_more(
    tmp_path: Path, disks: Disks, what: str
) -> None:
    """Its peer is deaf and dumb like the others: nobody can go on with it without them."""
    net = stopped(tmp_path, lambda net: disks.fill(what, 3))
    disks.full.clear()
    assert [net[n].run.end.outcome for n in net.numbers] == ["stopped"] * 3
    assert [net[n].closed for n in net.numbers] == [True, True, False]
    assert net[3].around.named("roll_call")[0] == net[3].around.named("roll_call")[0] | {
        "kept": False,
        "missing": [],
    }
    assert "No space left on device" in net[3].lines and "training goes on" not in net[3].lines
    assert "is not on this peer's disk: at its next start it has no vote" in net[3].lines
    assert not any("all peers of the last view are needed" in net[n].lines for n in net.numbers)
    assert [type(m) for m in net[3].said if isinstance(m, (TrainerStop, TrainerRefused))] == [TrainerStop]
    assert net.goes_on(1, 2) and net.goes_on(1, 2, 3)
    assert net.goes_on(1, 3), (
        "its next life says what it promised, and half with the first of the view is enough"
    )
    assert not net.goes_on(2, 3) and not net.goes_on(3)


@pytest.mark.parametrize(("full", "alone"), [(2, True), (1, False)])
def test_of_two_the_one_whose_disk_takes_the_state_brings_it_back(
    tmp_path: Path, disks: Disks, full: int, alone: bool
) -> None:
    net = stopped(tmp_path, lambda net: disks.fill("disk", full), count=2)
    disks.full.clear()
    other = 3 - full
    assert net[other].closed and not net[full].closed
    assert net.goes_on(other) is alone and not net.goes_on(full)
    assert net.goes_on(1, 2)


def test_with_no_disk_left_all_are_needed(tmp_path: Path, disks: Disks) -> None:
    net = stopped(tmp_path, lambda net: disks.fill("disk", 1, 2, 3))
    disks.full.clear()
    assert not any(net[n].closed for n in net.numbers)
    for pair in ((1, 2), (2, 3), (1, 3)):
        assert all(core.view is None for core in net.again(*pair).cores.values())
    assert all(core.view is not None for core in net.again(1, 2, 3).cores.values())
