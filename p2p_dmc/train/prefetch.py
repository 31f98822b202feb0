"""Batches on their way through torch's workers: what comes next is prepared while the loop is busy.

torch's DataLoader is the machinery. Its sampler never ends: while nothing is known to come, it is fed with empty
tasks, so that the workers stand ready across rounds and views. What torch returns is in the order in which it was
asked for; a batch that is not wanted any more, because a view gave its samples to others, is thrown away when it
comes out.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from p2p_dmc.train.leases import Batch
from p2p_dmc.train.shared_buffers import SharedBuffers
from p2p_dmc.train.source import Outcome, Source, Task, WorkerStart, add_note
from p2p_dmc.train.worker_watch import WorkerWatch

DEATH_S = 1.0
"""What a worker has made is fetched from it, so its death may show as a broken connection before it is over."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """As torch's DataLoader has them."""

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> WorkerSettings:
        """The settings of a loader, as torch has checked and completed them."""
        return cls(
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
        )

    @property
    def depth(self) -> int:
        """Batches under way at most."""
        return self.num_workers * (self.prefetch_factor or 0)


class Pipe:
    """Gives the outcomes of batches in the order planned.

    Invariant: ``_asked`` is what torch has been asked for and has not returned; None where nobody wants it.
    """

    def __init__(self, source: Source, settings: WorkerSettings, salt: str) -> None:
        """``salt``: the peer's identity."""
        self._salt = salt
        self._source = source
        self._settings = settings
        self._asked: deque[Batch | None] = deque()
        self._coming: deque[Batch] = deque()
        self._returned: Iterator[Outcome | None] | None = None
        self._buffers: SharedBuffers | None = None
        self._watch = WorkerWatch()
        self._alone = 0  # so many batches are still made one after the other
        self._last_death: int | None = None

    @property
    def depth(self) -> int:
        return self._settings.depth

    def get(self, plan: Sequence[Batch]) -> Outcome:
        """The outcome of the first batch of the plan, and the workers go on with the next ones.

        When a worker dies, all are started anew and make one batch after the other, so that none but the one that is
        wanted can be to blame; what the dead had made was not handed out. Raises WorkerDied if that one kills, too;
        what ``decode`` and ``collate`` raise if there are no workers; and torch's errors about workers that hang or
        cannot start. The workers are gone then.
        """
        how = self._watch.dead() if self._watch.alarm else None
        while True:
            if how is not None:
                print(
                    f"a worker of the loader {died(how)}: starting anew, one batch at a time", file=sys.stderr
                )
                self.close()
                self._alone = max(1, self.depth)
            alone = self._alone > 0
            try:
                return self._next(list(plan)[:1] if alone else plan)
            except Exception as error:
                how = self._last_death
                if how is None:
                    if self.depth:
                        add_note(error, f"while making the batch of {self._source.name(plan[0])}")
                    raise
                if alone:
                    name = self._source.name(plan[0])
                    raise WorkerDied(f"a worker of the loader {died(how)} over {name}", how) from error

    def _next(self, plan: Sequence[Batch]) -> Outcome:
        self._agree(plan)
        try:
            outcome = self._wait()
        except BaseException:  # an interrupt, too, leaves no worker behind
            self._last_death = self._watch.dead(DEATH_S)
            self.close()
            raise
        self._alone = max(0, self._alone - 1)
        return outcome

    def _wait(self) -> Outcome:
        """For the next batch that is wanted; a worker's death may be raised meanwhile."""
        self._watch.waiting = True
        try:
            if self._returned is None:
                self._returned = self._start()
            while True:
                outcome = next(self._returned)
                if self._asked.popleft() is not None:
                    assert outcome is not None
                    return outcome
        finally:
            self._watch.waiting = False

    def forget(self) -> None:
        """Nothing that is under way is wanted any more."""
        self._asked = deque([None] * len(self._asked))
        self._coming.clear()

    def close(self) -> None:
        """End the workers; the next batch starts them again."""
        end = getattr(self._returned, "_shutdown_workers", None)
        self._returned = (
            None  # torch's iterator ends its workers when it goes; a traceback may hold it for long
        )
        if end is not None:
            end()
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None
        self._watch.end()
        self._asked.clear()
        self._coming.clear()

    def _agree(self, plan: Sequence[Batch]) -> None:
        """What is under way and planned still is kept, as far as the order is the same."""
        kept, same = 0, True
        for i, batch in enumerate(self._asked):
            same = same and (batch is None or (kept < len(plan) and batch == plan[kept]))
            if not same:
                self._asked[i] = None
            elif batch is not None:
                kept += 1
        self._coming = deque(plan[i] for i in range(kept, len(plan)))

    def _start(self) -> Iterator[Outcome | None]:
        own = torch.Generator()  # else torch's, which belongs to the script
        own.manual_seed(self._worker_seed())
        settings = self._settings
        loader: DataLoader[Any] = DataLoader(
            self._source,  # type: ignore[arg-type]  # it has what torch asks of a data set
            batch_sampler=_Tasks(self),  # type: ignore[arg-type]  # a batch instead of a list of indices
            collate_fn=_as_it_is,  # the source has done it
            num_workers=settings.num_workers,
            prefetch_factor=settings.prefetch_factor,
            pin_memory=settings.pin_memory,
            timeout=settings.timeout,
            worker_init_fn=WorkerStart(os.getpid(), settings.worker_init_fn)
            if settings.num_workers
            else None,
            multiprocessing_context=settings.multiprocessing_context,
            generator=own,
        )
        self._buffers = SharedBuffers(self.depth) if self.depth else None
        self._watch.begin()
        returned = iter(loader)
        self._watch.started()
        return returned

    def _worker_seed(self) -> int:
        """What random numbers in the workers begin with: another one on each peer, and wherever they start."""
        first = self._coming[0]
        said = repr((self._source.seed, self._salt, first.epoch, first.pieces)).encode()
        return int.from_bytes(hashlib.blake2b(said, digest_size=7).digest(), "little")

    def next_task(self) -> Task | None:
        """What torch is to do next."""
        batch = self._coming.popleft() if self._coming else None
        self._asked.append(batch)
        if batch is None:
            return None
        return batch, None if self._buffers is None else self._buffers.lend()


class WorkerDied(RuntimeError):
    """A worker process died over one batch. ``worker_signal``: what killed it, or 0."""

    def __init__(self, said: str, how: int) -> None:
        super().__init__(said)
        self.worker_signal = max(0, -how)


def died(how: int | None) -> str:
    """In words."""
    if how is None or how > 0:
        return f"ended with exit code {how}"
    return f"was killed by {signal.Signals(-how).name}"


class _Tasks:
    """An endless sampler."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def __iter__(self) -> Iterator[Task | None]:
        while True:
            yield self._pipe.next_task()


def _as_it_is(outcome: Any) -> Any:
    return outcome
