"""Trainers that an agent serves, without processes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_dmc.agent import jobs as jobs_module
from p2p_dmc.agent.jobs import Job, Jobs
from p2p_dmc.wire.trainer_messages import ShardReady, ShardRequest, TrainerBye


def test_nobody_looks_for_the_data_set_of_a_trainer_that_has_ended() -> None:
    data = SimpleNamespace(by_name=lambda name: None, manifests=lambda: ())
    agent = SimpleNamespace(journal=SimpleNamespace(listeners=[]), data=data, say=print, runs={})

    async def life() -> None:
        jobs = Jobs(cast(Any, agent))
        jobs._run_of_trainer[b"t"] = "r"
        looking = asyncio.ensure_future(jobs._dataset(b"t", "faces"))
        await asyncio.sleep(0.01)
        assert not looking.done()
        del jobs._run_of_trainer[b"t"]
        await asyncio.wait_for(looking, 5)

    asyncio.run(life())


def test_a_shard_is_wanted_again_until_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "SHARD_AGAIN_S", 0.01)
    wanted: list[Any] = []
    sent: list[Any] = []
    here = [False]
    data = SimpleNamespace(
        usable=lambda dataset, shard: here[0],
        want=lambda dataset, shard, then: wanted.append(then),  # its source fails: nobody calls back
        store=SimpleNamespace(path=lambda dataset, shard: "a.tar"),
    )
    send = SimpleNamespace(send=lambda to, message: sent.append((to, message)))
    agent = SimpleNamespace(journal=SimpleNamespace(listeners=[]), data=data, local=send)
    request = ShardRequest(dataset=b"d" * 16, shard=3)

    async def life() -> None:
        jobs = Jobs(cast(Any, agent))
        jobs._run_of_trainer[b"t"] = "r"
        getting = asyncio.ensure_future(jobs._get_shard(b"t", request))
        while len(wanted) < 3:
            await asyncio.sleep(0.001)
        assert all(then == wanted[0] for then in wanted) and not sent  # one and the same, kept once
        here[0] = True
        wanted[0]()
        await asyncio.wait_for(getting, 5)
        here[0] = False
        await asyncio.wait_for(jobs._get_shard(b"gone", request), 5)

    asyncio.run(life())
    assert sent == [(b"t", ShardReady(dataset=b"d" * 16, shard=3, path="a.tar"))]


def test_a_peer_in_several_runs_leaves_them_all_at_once() -> None:
    """Each may have to wait for the end of a round."""
    left: list[int] = []

    async def life() -> None:
        together = asyncio.Barrier(3)
        jobs = Jobs(cast(Any, SimpleNamespace(journal=SimpleNamespace(listeners=[]))))

        async def leave(job: Any, reason: str) -> None:
            await together.wait()
            left.append(job.number)
            job.ended.set()

        jobs._leave = leave  # type: ignore[method-assign]
        for number in range(4):
            over = "it is over" if number == 2 else None
            jobs._jobs[str(number)] = cast(
                Any, SimpleNamespace(number=number, result=over, ended=asyncio.Event(), process=None)
            )
        await asyncio.wait_for(jobs.stop_all("enough"), 5)

    asyncio.run(life())
    assert sorted(left) == [0, 1, 3]


def test_what_is_committed_is_on_disk_before_a_peer_leaves_between_rounds() -> None:
    done: list[str] = []

    async def step(name: str) -> None:
        done.append(name)

    end = SimpleNamespace(
        save_before_leaving=lambda: step("save"),
        leave_between_rounds=lambda: step("between rounds"),
        over=lambda outcome, reason: done.append(outcome),
    )
    run = SimpleNamespace(end=end, withdraw=lambda reason: done.append(f"withdraw: {reason}"))
    job = SimpleNamespace(run=run, stopping=False)
    jobs = Jobs(cast(Any, SimpleNamespace(journal=SimpleNamespace(listeners=[]))))
    asyncio.run(jobs._leave(cast(Any, job), "enough"))
    assert done == ["save", "between rounds", "withdraw: enough", "left"]
    assert job.stopping


@pytest.mark.parametrize(
    ("bye", "outcome", "killed"), [(True, "finished", False), (False, "finished", True), (True, "", True)]
)
def test_a_script_may_go_on_for_long_once_the_run_is_finished(bye: bool, outcome: str, killed: bool) -> None:
    """Its session is closed then, so that it says nothing any more. Before the end others would wait for it."""
    settings = SimpleNamespace(trainer_silence_s=1.0, tick_ms=100)
    journal = SimpleNamespace(listeners=[], event=lambda *_, **__: None)
    jobs = Jobs(cast(Any, SimpleNamespace(journal=journal, settings=settings, say=lambda line: None)))
    ended: list[str] = []
    run = SimpleNamespace(name="r", end=SimpleNamespace(outcome=outcome))
    job = Job(submit=cast(Any, SimpleNamespace(attach=0)), run=cast(Any, run), tell=ended.append)  # type: ignore[arg-type]
    job.process, job.trainer_id = cast(Any, SimpleNamespace(kill=lambda: ended.append("killed"))), b"t"
    jobs._jobs["r"], jobs._run_of_trainer[b"t"] = job, "r"
    if bye:
        jobs.message(b"t", TrainerBye())
    for _ in range(20):
        jobs.tick()
    assert bool(ended) is killed
