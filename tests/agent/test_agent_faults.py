"""A fault of ours in a message handler ends the agent loudly instead of leaving it deaf."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from p2p_dmc.agent.agent import Agent, AgentOptions
from p2p_dmc.agent.client import ask
from p2p_dmc.agent.home import Home
from p2p_dmc.agent.requests import Requests


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
