"""How new a peer's promises are travels with every sign of life, and decides whether its crash counts."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from p2p_dmc.agent import agent, member_desk, run_files
from p2p_dmc.agent.agent import Agent, AgentOptions
from p2p_dmc.agent.clock import now_ms
from p2p_dmc.agent.home import Home
from p2p_dmc.agent.run import Run
from p2p_dmc.agent.run_files import RunOptions, RunRecord, load_record, save_record
from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_messages import (
    AgreementSettings,
    Promised,
    Promises,
    Ready,
    StateRef,
    Stopped,
    Verdict,
)
from p2p_dmc.core.membership import MemberRecord
from p2p_dmc.core.quorum import Quorum
from tests.agent.helpers import peer, surroundings

STATE = StateRef(lineage=(0, 0), digest=b"s" * 16)
WAIT_S = 20.0


def with_core(run: Run) -> Run:
    """As when its trainer is ready."""
    run.agreement = Agreement(
        me=run.me,
        quorum=Quorum.MAJORITY,
        promises=run._promises,
        completed=STATE,
        payload=lambda: b"",
        rng=random.Random(1),
        settings=AgreementSettings(),
        now_ms=now_ms(),
    )
    return run


def said(run: Run, version: int) -> Promised:
    return Promised(history=b"", sender=run.me, n=0, base=None, pending=(), version=version)


async def until(condition: Callable[[], bool]) -> None:
    async def met() -> None:
        while not condition():
            await asyncio.sleep(0.02)

    await asyncio.wait_for(met(), WAIT_S)


@contextlib.asynccontextmanager
async def agents(root: Path) -> AsyncIterator[tuple[Agent, Agent]]:
    """Two that know each other, with a run of one name."""
    async with contextlib.AsyncExitStack() as stack:
        two: list[Agent] = []
        for name in "ab":
            home = Home(root / name)
            home.lock()
            seeds = tuple(one.address for one in two)
            agent = Agent(
                AgentOptions(home=home.root, name=name, port=0, seeds=seeds), home, lambda line: None
            )
            await agent.start()
            stack.push_async_callback(agent.stop, graceful=False)
            agent.runs["r"] = Run("r", RunOptions(), agent.services())
            agent.meta_changed()
            two.append(agent)
        a, b = two
        await until(lambda: len(a.members()) == len(b.members()) == 2)
        yield a, b


def told(agent: Agent, other: Agent) -> dict[str, int]:
    assert agent.membership is not None
    return agent.membership.last_promised(other.peer_id)


@pytest.mark.parametrize(("arrived", "counts"), [(6, True), (5, False)])
def test_a_crash_counts_with_promises_as_new_as_the_last_sign_of_life_told(
    tmp_path: Path, arrived: int, counts: bool
) -> None:
    """Else it is only a death."""

    async def life() -> tuple[dict[str, int], bool, list[Stopped]]:
        async with contextlib.AsyncExitStack() as stack:
            a, b = await stack.enter_async_context(agents(tmp_path))
            here = with_core(a.runs["r"]).agreement
            assert here is not None
            b.send(a.peer_id, said(b.runs["r"], arrived), "r")
            await until(lambda: b.runs["r"].me in here._book.promised)
            b.services().promised("r", 6)
            await until(lambda: told(a, b) == {"r": 6})
            last = told(a, b)
            await b.control.close()  # its host refuses from here on
            await until(lambda: here._book.gone(b.peer_id))
            return last, b.runs["r"].me in here._book.crashed, list(here._book.records.values())

    last, seen, records = asyncio.run(life())
    assert last == {"r": 6} and seen
    assert [record.withdrawn for record in records] == ([False] if counts else [])


def test_a_run_tells_what_is_on_disk_before_it_says_more(tmp_path: Path) -> None:
    """The version of a closed record goes on where it was."""
    around = surroundings(tmp_path)
    folder = around.services.home.run_folder("r")
    save_record(folder, RunRecord(promises=Promises(n=3, version=8), closed=False, boot=1))
    order: list[object] = []
    services = around.services
    object.__setattr__(services, "promised", lambda run, version: order.append((run, version)))
    object.__setattr__(services, "send", lambda to, message, run: order.append(message))
    run = with_core(Run("r", RunOptions(), services))
    assert run.agreement is not None
    run.act(run.agreement.found((peer(1), peer(2)), now_ms()))
    words = [one for one in order if not isinstance(one, tuple)]
    assert [one for one in order if isinstance(one, tuple)] == [("r", 8), ("r", 9)]
    assert order.index(("r", 9)) < order.index(words[0]) and words[0].version == 9  # type: ignore[attr-defined]
    record = load_record(folder)
    assert record is not None and record.promises.version == 9


def test_a_closed_record_knows_of_all_that_was_said(tmp_path: Path) -> None:
    """What is said after the next start opens it: at the one after that this peer is somebody else."""
    run = Run("r", RunOptions(), surroundings(tmp_path).services)
    core = SimpleNamespace(promises=Promises(n=3, version=8), promise_version=8)
    run.agreement = cast(Agreement, core)
    run.fall_silent()
    assert run.save_closed()
    run.agreement = cast(Agreement, core)  # as after its next start
    run.act(Ready())
    record = load_record(run.folder)
    assert record is not None and record.closed and record.promises.version == 8
    core.promises, core.promise_version = Promises(n=3, version=9), 9
    run.act(Ready())
    record = load_record(run.folder)
    assert record is not None and not record.closed and record.promises.version == 9


def test_who_opens_a_closed_run_again_tells_nothing_before_it_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same member at its next start: who counted it as crashed would count out one that lives."""
    monkeypatch.setattr(run_files, "closed_is_whole", lambda folder: True)
    around, told = surroundings(tmp_path), []
    services = around.services
    object.__setattr__(services, "promised", lambda run, version: told.append(version))
    promises = Promises(n=3, version=8)
    save_record(services.home.run_folder("r"), RunRecord(promises=promises, closed=True, boot=1))
    run = with_core(Run("r", RunOptions(), services))
    assert run.agreement is not None and run.me.boot == 1
    run.act(Ready())
    assert set(told) == {None}
    run.act(run.agreement.found((peer(1), peer(2)), now_ms()))
    assert told[-1] == 9


@pytest.mark.parametrize(("reopened", "crashed"), [(False, True), (True, False)])
def test_a_member_that_has_reopened_a_closed_run_only_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reopened: bool, crashed: bool
) -> None:
    monkeypatch.setattr(run_files, "closed_is_whole", lambda folder: True)

    async def life() -> tuple[dict[str, int], bool]:
        async with contextlib.AsyncExitStack() as stack:
            a, b = await stack.enter_async_context(agents(tmp_path))
            here = with_core(a.runs["r"]).agreement
            assert here is not None and told(a, b) == {"r": 0}
            boot = b.runs["r"].me.boot if not reopened else b.runs["r"].me.boot - 1
            folder = b.home.run_folder("r")
            save_record(folder, RunRecord(promises=Promises(version=4), closed=reopened, boot=boot))
            b.runs["r"] = Run("r", RunOptions(), b.services())
            b.meta_changed()
            await until(lambda: told(a, b) == ({} if reopened else {"r": 4}))
            last = told(a, b)
            await b.control.close()  # its host refuses from here on
            await until(lambda: here._book.gone(b.peer_id))
            return last, bool(here._book.crashed)

    assert asyncio.run(life()) == ({} if reopened else {"r": 4}, crashed)


def test_the_version_reaches_the_core(tmp_path: Path) -> None:
    run = with_core(Run("r", RunOptions(), surroundings(tmp_path).services))
    run.verdict(peer(2), 3, Verdict.CRASHED, 7)
    assert run.agreement is not None
    assert [(m.peer_id, m.boot, told) for m, told in run.agreement._book.crashed.items()] == [(peer(2), 3, 7)]


def test_promises_that_a_connection_lost_are_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the members of the view, while they are this peer's last. Nothing else of agreement is repeated here."""
    around, sent = surroundings(tmp_path), []
    object.__setattr__(around.services, "send", lambda to, message, run: sent.append((to, message)))
    run = Run("r", RunOptions(), around.services)
    view = SimpleNamespace(peers=(run.me.peer_id, peer(2), peer(3)))
    core = SimpleNamespace(promises=Promises(), promise_version=7, view=view)
    run.agreement = cast(Agreement, core)
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    run.act(Ready(sends=((peer(2), said(run, 7)),)))
    assert sent == [(peer(2), said(run, 7))]
    sent.clear()
    run.members.say_promises_again(run.agreement)
    assert not sent
    for _ in range(2):
        now_s += member_desk.PROMISED_AGAIN_S
        run.members.say_promises_again(run.agreement)
        run.members.say_promises_again(run.agreement)
        assert sent == [(peer(2), said(run, 7)), (peer(3), said(run, 7))]
        sent.clear()
    core.promise_version, now_s = 8, now_s + member_desk.PROMISED_AGAIN_S
    run.members.say_promises_again(run.agreement)
    assert not sent, "a proposal knows of more"
    core.promise_version, core.view = 7, None
    run.members.say_promises_again(run.agreement)
    assert not sent


@pytest.mark.parametrize("latest", [1, 2])
def test_what_is_heard_of_the_one_that_follows_is_not_heard_of_the_dead(
    monkeypatch: pytest.MonkeyPatch, latest: int
) -> None:
    """The old port refuses while the peer has been started again on another one."""

    async def refused(address: str) -> bool:
        return True

    monkeypatch.setattr(agent, "refused_by_host", refused)
    told: list[tuple[int | None, dict[str, int]]] = []
    membership = SimpleNamespace(
        last_heard_ms=lambda peer_id: 7,
        last_promised=lambda peer_id: {"r": 3},
        get=lambda peer_id: SimpleNamespace(boot=latest),
        refused=lambda *_: None,
    )
    verdicts = SimpleNamespace(
        crashed=lambda record, heard_ms, _, promised: told.append((heard_ms, promised))
    )
    one = SimpleNamespace(membership=membership, verdicts=verdicts, _act=lambda _: None)
    record = SimpleNamespace(peer_id=peer(1), boot=1, address="tcp://127.0.0.1:9")
    asyncio.run(Agent._ask_host(cast(Agent, one), cast(MemberRecord, record)))
    assert told == [(7, {"r": 3}) if latest == 1 else (None, {})]
