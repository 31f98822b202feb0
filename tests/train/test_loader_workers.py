"""Workers that die or hang: nothing is lost or counted twice, nobody stays, and who is to blame is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from p2p_dmc.errors import RunStopped
from p2p_dmc.train.loader import Loader
from p2p_dmc.train.prefetch import Pipe, WorkerDied
from p2p_dmc.train.shared_buffers import SPARE
from p2p_dmc.train.source import Outcome
from p2p_dmc.train.worker_watch import WorkerWatch
from p2p_dmc.wire import trainer_messages as tm
from tests.train.loading import (
    Leader,
    Trainer,
    comes,
    gone,
    leave_out_earlier,
    number,
    numbers,
    shared_memory,
    workers,
)
from tests.train.scripted import ScriptedAgent


@pytest.fixture
def agent(tmp_path: Path) -> ScriptedAgent:
    return ScriptedAgent(tmp_path)


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Any:
    leave_out_earlier()
    ours = {os.getpid()}
    started = WorkerWatch.started

    def noted(watch: WorkerWatch) -> None:
        started(watch)
        ours.update(worker.pid for worker in watch._workers)

    monkeypatch.setattr(WorkerWatch, "started", noted)
    yield
    assert gone(workers())
    assert not shared_memory(ours)
    assert not isinstance(getattr(signal.getsignal(signal.SIGCHLD), "__self__", None), WorkerWatch)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_is_killed_costs_nothing(
    agent: ScriptedAgent, capsys: pytest.CaptureFixture[str], persistent: bool
) -> None:
    """Wherever the script is: here in its own code, where torch would raise."""

    def loop(one: Trainer, loader: Loader) -> None:
        for batch in loader:
            if len(one.batches) == 1:
                os.kill(workers()[0], signal.SIGKILL)
                assert comes(
                    lambda: loader._pipe._watch.alarm
                )  # else all may have been made before it is told
            one.step(batch)

    leader = Leader(epochs=2)
    one = Trainer(agent, 2, epochs=2, num_workers=2, persistent_workers=persistent)
    with agent.play(leader):
        one.run(loop)
    assert one.numbers == numbers(agent) + numbers(agent, epoch=1)
    assert sum(ready.samples for ready in leader.said) == 20
    said = capsys.readouterr().err.splitlines()
    assert said == ["a worker of the loader was killed by SIGKILL: starting anew, one batch at a time"]


def test_a_worker_that_dies_while_its_batch_is_fetched_costs_nothing(
    agent: ScriptedAgent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor is had from the worker that made it: the connection breaks before the death is told."""
    wait, calls = Pipe._wait, iter(range(100))

    def broken_once(pipe: Pipe) -> Outcome:
        if next(calls) == 2:
            os.kill(workers()[0], signal.SIGKILL)
            raise ConnectionResetError
        return wait(pipe)

    monkeypatch.setattr(Pipe, "_wait", broken_once)
    one = Trainer(agent, 2, epochs=1, num_workers=2)
    with agent.play(Leader(epochs=1)):
        one.run()
    assert one.numbers == numbers(agent)
    said = capsys.readouterr().err.splitlines()
    assert said == ["a worker of the loader was killed by SIGKILL: starting anew, one batch at a time"]


def test_a_sample_that_kills_workers_is_named(agent: ScriptedAgent) -> None:
    """Also when it was prepared ahead: what comes before it is handed out first."""
    whole = numbers(agent)

    def decode(sample: Any) -> float:
        if number(sample) == whole[5]:
            os.kill(os.getpid(), signal.SIGSEGV)
        return number(sample)

    said: list[tm.RoundReady] = []

    def script(agent: ScriptedAgent) -> None:
        agent.begin(tau=9)
        agent.expect(tm.LeaseRequest)
        agent.send(
            tm.Lease(epoch=0, braids=tuple(((s, 0, n),) for s, n in enumerate(agent.manifest.sample_counts)))
        )

    one = Trainer(agent, 2, tau=9, decode=decode, num_workers=2)
    with agent.play(script), pytest.raises(WorkerDied, match="SIGSEGV over samples") as caught:
        one.run()
    assert f"'s{whole[5]:.0f}'" in str(caught.value)
    assert caught.value.worker_signal == signal.SIGSEGV
    assert one.numbers == whole[:4] and not said


def test_a_worker_that_hangs_is_given_up(agent: ScriptedAgent) -> None:
    whole = numbers(agent)

    def decode(sample: Any) -> float:
        if number(sample) == whole[2]:
            time.sleep(600)
        return number(sample)

    def script(agent: ScriptedAgent) -> None:
        agent.begin(tau=9)
        agent.expect(tm.LeaseRequest)
        agent.send(
            tm.Lease(epoch=0, braids=tuple(((s, 0, n),) for s, n in enumerate(agent.manifest.sample_counts)))
        )

    pids: list[int] = []

    def loop(one: Trainer, loader: Loader) -> None:
        with pytest.raises(RuntimeError, match="timed out") as caught:
            for batch in loader:
                pids.extend(workers())
                one.step(batch)
        assert f"'s{whole[2]:.0f}'" in f"{caught.value}{getattr(caught.value, '__notes__', '')}"

    one = Trainer(agent, 2, tau=9, decode=decode, num_workers=1, timeout=3)
    with agent.play(script):
        one.run(loop)
    assert one.numbers == whole[:2] and pids and gone(pids)


def test_an_interrupted_loop_has_lost_nothing(agent: ScriptedAgent) -> None:
    """Ctrl-C in a notebook, while the loop waits for a slow batch, and the loop is run again."""
    whole = numbers(agent)
    parent = os.getpid()
    interrupted: list[float] = []

    def decode(sample: Any) -> float:
        if number(sample) == whole[4] and not interrupted:
            os.kill(parent, signal.SIGINT)
            time.sleep(600)
        return number(sample)

    def loop(one: Trainer, loader: Loader) -> None:
        with pytest.raises(KeyboardInterrupt):
            one.all_batches(loader)
        assert gone(workers())
        interrupted.append(time.time())
        one.all_batches(loader)

    leader = Leader()
    one = Trainer(agent, 2, decode=decode, num_workers=2)
    with agent.play(leader):
        one.run(loop)
    assert one.numbers == whole
    assert sum(ready.samples for ready in leader.said) == 10


def test_a_stop_ends_the_workers(agent: ScriptedAgent) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.begin(tau=1)
        agent.lease((0, 0, 2))
        agent.expect(tm.RoundReady)
        agent.send(tm.TrainerStop(reason=""))

    one = Trainer(agent, 2, tau=1, num_workers=2, persistent_workers=True)
    with agent.play(script), pytest.raises(RunStopped):
        one.run()
    assert gone(workers())


def test_another_loaders_worker_is_torchs_business(agent: ScriptedAgent) -> None:
    """An evaluation in the loop has workers of its own: what happens to them is raised as ever."""

    def loop(one: Trainer, loader: Loader) -> None:
        for batch in loader:
            if not one.batches:
                with pytest.raises(RuntimeError, match="DataLoader worker"):
                    list(DataLoader([Suicide()], num_workers=1, collate_fn=dying))  # type: ignore[arg-type]
            one.step(batch)

    one = Trainer(agent, 2, num_workers=1)
    with agent.play(Leader()):
        one.run(loop)
    assert one.numbers == numbers(agent)


class Suicide:
    """A sample that nobody survives."""


def dying(items: list[Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


CRASHING = """
import os, sys
import p2p_dmc.train.main as main
from p2p_dmc.train.prefetch import WorkerDied
sys.exit(main.main([sys.argv[1]]))
"""


def test_a_trainer_ends_as_its_worker_did(tmp_path: Path) -> None:
    """So its agent restarts it, and what it had in hand gets a strike, as without workers."""
    script = tmp_path / "script.py"
    script.write_text(
        "from p2p_dmc.train.prefetch import WorkerDied\nraise WorkerDied('a worker died', -11)\n", "utf-8"
    )
    ended = subprocess.run([sys.executable, "-c", CRASHING, str(script)], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGSEGV
    assert "WorkerDied: a worker died" in ended.stderr


@pytest.mark.parametrize("most", [0, 3, 64])
def test_batches_that_the_loop_keeps_stay_as_they_are(
    agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Memory is used again, in each epoch and over all of them; where there is none left for it, torch's is taken."""
    monkeypatch.setattr("p2p_dmc.train.shared_buffers.MOST_BUFFERS", most)
    kept: list[torch.Tensor] = []

    def loop(one: Trainer, loader: Loader) -> None:
        for batch in loader:
            kept.append(batch)
            one.step(batch)

    one = Trainer(agent, 1, num_workers=2, epochs=3, persistent_workers=True)
    with agent.play(Leader(epochs=3)):
        one.run(loop)
    whole = [x for epoch in range(3) for x in numbers(agent, epoch)]
    assert one.numbers == [float(x) for x in kept] == whole
    assert sum(not x.is_shared() for x in kept) == min(
        most, 2 * 2 + SPARE
    )  # torch's own memory says that it is


@pytest.mark.parametrize("prefetch_factor", [1, 4])
def test_few_buffers_serve_all_batches_that_the_loop_lets_go(
    agent: ScriptedAgent, prefetch_factor: int
) -> None:
    seen: set[int] = set()

    def loop(one: Trainer, loader: Loader) -> None:
        for batch in loader:
            assert not batch.is_shared()
            seen.add(batch.data_ptr())
            one.step(batch)

    one = Trainer(agent, 1, num_workers=2, epochs=3, persistent_workers=True, prefetch_factor=prefetch_factor)
    with agent.play(Leader(epochs=3)):
        one.run(loop)
    assert len(one.numbers) == 30
    assert len(seen) <= 2 * prefetch_factor + SPARE


def test_a_batch_that_cannot_leave_its_worker_is_an_error(agent: ScriptedAgent, tmp_path: Path) -> None:
    """And comes again if the script goes on."""
    mended = tmp_path / "mended"

    def collate(items: list[float]) -> Any:
        return torch.tensor(items) if mended.exists() else (torch.tensor(items), lambda: None)

    def loop(one: Trainer, loader: Loader) -> None:
        with pytest.raises(Exception, match="pickle"):
            one.all_batches(loader)
        mended.touch()
        one.all_batches(loader)

    one = Trainer(agent, 2, num_workers=2, collate_fn=collate)
    with agent.play(Leader()):
        one.run(loop)
    assert one.numbers == numbers(agent)
