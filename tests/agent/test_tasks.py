"""Background tasks: nothing is lost, all end with their owner."""

from __future__ import annotations

import asyncio

from p2p_dmc.agent.tasks import Tasks


def test_what_a_task_raises_is_heard_of_and_close_ends_the_rest() -> None:
    async def fails() -> None:
        raise ValueError("a slip")

    async def waits() -> None:
        await asyncio.Event().wait()

    async def life() -> tuple[list[str], bool]:
        heard: list[str] = []
        tasks = Tasks(lambda error: heard.append(str(error)))
        tasks.spawn(fails())
        waiting = tasks.spawn(waits())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await tasks.close()
        return heard, waiting.cancelled()

    assert asyncio.run(life()) == (["a slip"], True)
