"""Trainers that an agent serves, without processes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from p2p_dmc.agent.jobs import Jobs


def test_nobody_looks_for_the_data_set_of_a_trainer_that_has_ended() -> None:
    data = SimpleNamespace(by_name=lambda name: None, manifests=lambda: ())
    agent = SimpleNamespace(journal=SimpleNamespace(listeners=[]), data=data, say=print)

    async def life() -> None:
        jobs = Jobs(cast(Any, agent))
        jobs._run_of_trainer[b"t"] = "r"
        looking = asyncio.ensure_future(jobs._dataset(b"t", "faces"))
        await asyncio.sleep(0.01)
        assert not looking.done()
        del jobs._run_of_trainer[b"t"]
        await asyncio.wait_for(looking, 5)

    asyncio.run(life())
