"""A fault of ours in a message handler ends the agent loudly instead of leaving it deaf."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from p2p_dmc.agent.agent import Agent, AgentOptions
from p2p_dmc.agent.client import ask
from p2p_dmc.agent.home import Home
from p2p_dmc.agent.requests import Requests
from p2p_dmc.agent.run import Run
from p2p_dmc.agent.run_files import RunOptions
from p2p_dmc.core.membership import MemberEvent, MemberState
from tests.agent.helpers import peer, record


def test_a_handler_that_fails_ends_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a slip of ours")

    async def life() -> str:
        home = Home(tmp_path / "home")
        home.lock()
        agent = Agent(AgentOptions(home=home.root, name="a", port=0), home, lambda line: None)
        await agent.start()
        monkeypatch.setattr(Requests, "handle", fail)
        asking = asyncio.create_task(asyncio.to_thread(_ask, agent.address))
        try:
            await asyncio.wait_for(agent.leaving.wait(), 10)
        finally:
            await agent.stop(graceful=False)
            await asking
        return agent.fault

    fault = asyncio.run(life())
    assert "a slip of ours" in fault and "agent.log" in fault


def _ask(address: str) -> None:
    with pytest.raises(Exception, match="answer"):
        ask([address], "status", timeout_s=1.0)


def test_a_run_that_failed_here_is_not_told_of(tmp_path: Path) -> None:
    """Otherwise a newcomer waits for a peer that has begun the run and will not go on with it."""

    async def life() -> tuple[list[str], list[str]]:
        home = Home(tmp_path / "home")
        home.lock()
        agent = Agent(AgentOptions(home=home.root, name="a", port=0), home, lambda line: None)
        await agent.start()
        try:
            run = Run("digits", RunOptions(), agent.services())
            agent.runs["digits"] = run
            before = [one.name for one in agent._meta().runs]
            run.end.over("failed", "its script failed")
            return before, [one.name for one in agent._meta().runs]
        finally:
            await agent.stop(graceful=False)

    assert asyncio.run(life()) == (["digits"], [])


def test_a_seed_is_meant_by_name_once_it_has_answered(tmp_path: Path) -> None:
    """Else two clusters become one when a peer of the second takes over the port of the first one's seed."""
    seed, other = "tcp://127.0.0.1:7301", "tcp://127.0.0.1:7302"

    def alive(i: int, address: str, state: MemberState = MemberState.ALIVE) -> MemberEvent:
        one = replace(record(i, state=state), address=address)
        return MemberEvent(peer_id=one.peer_id, old=None, new=state, record=one, reason="a test")

    async def life() -> list[str]:
        home = Home(tmp_path / "home")
        home.lock()
        agent = Agent(AgentOptions(home=home.root, name="a", port=0, seeds=(seed,)), home, lambda line: None)
        await agent.start()
        try:
            meant = [agent._meant_at(seed)]  # whoever is there
            agent._member_event(alive(1, seed))
            agent._others_alive = lambda: True  # type: ignore[method-assign]
            meant += [agent._meant_at(seed), agent._meant_at(other)]
            agent._others_alive = lambda: False  # type: ignore[method-assign]
            return [*meant, agent._meant_at(seed)]  # alone, it takes anybody for its seed
        finally:
            await agent.stop(graceful=False)

    assert asyncio.run(life()) == ["", peer(1), "", ""]
