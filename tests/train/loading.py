"""For the loader's tests: an agent that leases as asked, a script whose loop notes what it gets, and its workers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

import p2p_dmc as dmc
from p2p_dmc.core.ledger import sample_permutation
from p2p_dmc.data.samples import Sample, SampleReader
from p2p_dmc.train.loader import Loader
from p2p_dmc.wire import trainer_messages as tm
from tests.train.scripted import ScriptedAgent

Stretch = tuple[int, int, int]


def number(sample: Sample) -> float:
    """The sample of the data set "numbers" that it is."""
    return float(sample["txt"])


def numbers(agent: ScriptedAgent, epoch: int = 0) -> list[float]:
    """Every sample in the order in which ``Leader`` hands them out, worked out from the data set's definition."""
    found = []
    for shard, entry in enumerate(agent.manifest.shards):
        order = sample_permutation(agent.manifest.digest, 0, epoch, shard, entry.sample_count)
        path = agent.store.path(agent.manifest.digest, shard)
        with SampleReader() as reader:
            found += [float(reader.read(path, agent.manifest, shard, index)["txt"]) for index in order]
    return found


class Leader:
    """Plays the agent of a run of one peer, from the first view to the run's end."""

    def __init__(self, epochs: int = 1, tau: int = 2, on_lease: Callable[[], None] = lambda: None) -> None:
        self.epochs, self.tau, self.on_lease = epochs, tau, on_lease
        self.said: list[tm.RoundReady] = []
        self.requests: list[tm.LeaseRequest] = []

    def __call__(self, agent: ScriptedAgent) -> None:
        anchor = agent.begin(tau=self.tau)
        for epoch in range(self.epochs):
            anchor = self.epoch(agent, epoch, anchor)
        agent.end(epoch=self.epochs, finished=True)
        agent.finish(anchor)

    def epoch(self, agent: ScriptedAgent, epoch: int, anchor: Any) -> Any:
        counts = agent.manifest.sample_counts
        flat = [(shard, at) for shard, count in enumerate(counts) for at in range(count)]
        leased = settled = 0
        while settled < len(flat):
            message = agent.receive()
            if isinstance(message, tm.LeaseRequest):
                self.requests.append(message)
                self.on_lease()
                end = min(len(flat), leased + message.samples)
                if end == leased:
                    agent.send(tm.LeaseEnd(epoch=epoch, finished=False))
                else:
                    agent.send(lease_of(flat, leased, end, message.ahead, epoch))
                leased = end
            elif isinstance(message, tm.RoundReady):
                self.said.append(message)
                settled += message.samples
                trained = message.samples - sum(hi - lo for lo, hi in message.skipped)
                if trained:
                    anchor, _ = agent.reduce(trained, trained)
                agent.complete(tau=self.tau, epoch=epoch + (settled == len(flat)))
            else:
                self.other(agent, message)
        return anchor

    def other(self, agent: ScriptedAgent, message: Any) -> None:
        raise AssertionError(message)


def lease_of(flat: list[tuple[int, int]], start: int, end: int, ahead: int, epoch: int = 0) -> tm.Lease:
    known = min(len(flat), end + ahead)

    def plain(lo: int, hi: int) -> tuple[tuple[Stretch], ...]:
        return tuple(((shard, at, at + 1),) for shard, at in flat[lo:hi])

    return tm.Lease(epoch=epoch, braids=plain(start, end), ahead=plain(end, known), left=len(flat) - end)


class Trainer:
    """A script on "numbers". ``loop`` is what the script does with its loader; ``step`` a local step."""

    def __init__(self, agent: ScriptedAgent, batch_size: int = 2, tau: int = 2, **options: Any) -> None:
        self.agent, self.batch_size, self.tau = agent, batch_size, tau
        self.options = {"decode": number} | options
        self.model = torch.nn.Linear(1, 1, bias=False)
        self.batches: list[list[float]] = []

    def run(self, loop: Callable[[Trainer, Loader], None] | None = None) -> None:
        with dmc.connect(self.agent.environment) as peer:
            data = peer.dataset("numbers")
            self.optimizer = dmc.Optimizer(
                torch.optim.SGD(self.model.parameters(), lr=0.0), peer, tau=self.tau
            )
            self.loader = peer.loader(data, self.batch_size, **self.options)
            (loop or Trainer.all_batches)(self, self.loader)

    def all_batches(self, loader: Loader) -> None:
        for batch in loader:
            self.step(batch)

    def step(self, batch: torch.Tensor) -> None:
        self.batches.append(batch.tolist())
        self.optimizer.step((self.model.weight * batch.mean()).sum())

    @property
    def numbers(self) -> list[float]:
        return [x for batch in self.batches for x in batch]


def workers(pid: int | None = None) -> list[int]:
    """Process ids of a process's torch workers."""
    children = [c for c in psutil.Process(pid).children(recursive=True) if c.pid not in _EARLIER]
    return [c.pid for c in children if c.status() != psutil.STATUS_ZOMBIE and not _is_tracker(c)]


_EARLIER: set[int] = set()
"""Processes of tests that came before."""


def leave_out_earlier() -> None:
    """What runs now are no workers of this test, and what shared memory there is is not theirs."""
    _EARLIER.update(workers())
    _EARLIER_MEMORY.update(os.listdir("/dev/shm"))


def _is_tracker(child: psutil.Process) -> bool:
    try:
        return "resource_tracker" in " ".join(child.cmdline())
    except psutil.Error:
        return True


def gone(pids: list[int], patience_s: float = 20.0) -> bool:
    """Whether these processes end in time."""
    return comes(lambda: not any(map(_lives, pids)), patience_s)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory(pids: set[int]) -> list[str]:
    """What torch keeps in shared memory for these processes, by name."""
    begin = tuple(f"torch_{pid}_" for pid in pids)
    names = set(os.listdir("/dev/shm")) - _EARLIER_MEMORY  # other programs' of the same numbers
    return sorted(name for name in names if name.startswith(begin))


_EARLIER_MEMORY: set[str] = set()


def comes(condition: Callable[[], object], patience_s: float = 20.0) -> bool:
    """Whether it becomes true in time."""
    deadline = time.monotonic() + patience_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


class Note:
    """Lines that processes write down for the test."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, line: Any) -> None:
        with self.path.open("a") as file:
            file.write(f"{line}\n")

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    def __iter__(self) -> Iterator[str]:
        return iter(self.lines())
