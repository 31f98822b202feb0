"""Looking at the shards on this peer's disk again, slowly: a damaged or missing one is found before it is needed.

After a start each shard is verified before it counts as a copy; later each once in a day. When each was verified last
is kept in the data set's folder: an agent that is restarted often begins with those it has not come to for longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from p2p_dmc.agent.known import Known, report_fault
from p2p_dmc.agent.tasks import Tasks
from p2p_dmc.config import AgentSettings
from p2p_dmc.core.pledges import Key
from p2p_dmc.data.disk import write_durably
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.store import Store
from p2p_dmc.errors import UserError
from p2p_dmc.observe.journal import Journal

log = logging.getLogger("p2p_dmc.data")
RECORD_NAME = "verified.u4"
SAVE_S = 60.0
AGAIN_S = 1.0
LOWEST_PRIORITY = 19
AT_ONCE = 20_000
"""So many shards are put in order in a few ms."""


class ScrubRecord:
    """When each shard of a data set was verified last, in unix seconds, 0 for never; a file of one uint32 a shard."""

    def __init__(self, path: Path, shards: int) -> None:
        self._path = path
        self.times = np.zeros(shards, dtype="<u4")
        self._dirty = False
        with contextlib.suppress(OSError):
            times = np.frombuffer(path.read_bytes(), dtype=np.uint8)
            if (
                times.nbytes == self.times.nbytes
            ):  # else of somebody else, or cut short: every shard's turn comes
                self.times = times.view("<u4").copy()
                self.times[self.times > time.time()] = 0  # a clock that was set back

    def mark(self, shard: int) -> None:
        self.times[shard] = int(time.time())
        self._dirty = True

    def save(self) -> None:
        """Write it, if it changed. A disk that takes nothing costs the order in which shards are looked at."""
        if self._dirty:
            self._dirty = False
            with contextlib.suppress(OSError):  # nor is a folder that was removed any harm
                write_durably(self._path, self.times.tobytes())


_Held = tuple[bytes, Manifest, npt.NDArray[np.uint32]]


@dataclass(slots=True)
class _Pass:
    """One slow pass: the shards held when it began, that which was verified longest ago first."""

    datasets: Sequence[bytes]
    numbers: npt.NDArray[np.intp]
    """Of the data set of each,"""
    shards: npt.NDArray[np.intp]
    times: npt.NDArray[np.uint32]
    """and when it was verified."""
    held_bytes: int
    at: int = 0

    @classmethod
    def of(cls, store: Store, held: Sequence[_Held], began: int) -> _Pass:
        """``began``: when what was never marked came at the latest, verified."""
        numbers, shards, times = [np.zeros(0, np.intp)], [np.zeros(0, np.intp)], [np.zeros(0, np.uint32)]
        held_bytes = 0
        for at, (dataset, manifest, marked) in enumerate(held):
            here = np.fromiter(store.holdings(dataset), dtype=np.intp)
            numbers.append(np.full(len(here), at, dtype=np.intp))
            shards.append(here)
            times.append(np.where(marked[here] == 0, np.uint32(began), marked[here]))
            held_bytes += int(np.array(manifest.shard_sizes, dtype=np.int64)[here].sum())
        number, shard, time_s = np.concatenate(numbers), np.concatenate(shards), np.concatenate(times)
        order = np.lexsort((shard, number, time_s))
        datasets = [dataset for dataset, _, _ in held]
        return cls(datasets, number[order], shard[order], time_s[order], held_bytes)

    def __len__(self) -> int:
        return len(self.shards)

    def next(self) -> Key | None:
        """The shard whose turn it is; None at the end."""
        if self.at >= len(self):
            return None
        return self.datasets[int(self.numbers[self.at])], int(self.shards[self.at])

    def time_s(self) -> int:
        """When that was verified."""
        return int(self.times[self.at])


class Scrub:
    """Verifies one shard at a time, in a thread of the lowest priority.

    ``damaged`` hears of each shard that is not whole and that the store has deleted, ``verified`` of each that is.
    """

    def __init__(
        self,
        *,
        store: Store,
        settings: AgentSettings,
        journal: Journal,
        say: Callable[[str], None],
        known: Mapping[bytes, Known],
        verified: Callable[[Known], None],
        damaged: Callable[[Key], None],
    ) -> None:
        self._store = store
        self._settings = settings
        self._journal = journal
        self._say = say
        self._known = known
        self._verified = verified
        self._damaged = damaged
        self._records: dict[bytes, ScrubRecord] = {}
        self._asked: dict[Key, None] = {}  # in the order of asking
        self._unlooked: list[Key] = []  # to be verified in this life, oldest last
        self._listed: set[bytes] = set()
        self._tasks = Tasks(lambda error: log.error("a task failed", exc_info=error))
        self._thread = ThreadPoolExecutor(1, "dmc-scrub", initializer=_lowest_priority)
        self._running: asyncio.Task[None] | None = None
        self._began = int(time.time())
        self._slow_s = 0.0
        self._pass: _Pass | None = None
        self._listing: asyncio.Task[None] | None = None
        self._saved_s = time.monotonic()

    def first(self, key: Key) -> None:
        """Verify this shard next: somebody waits for it."""
        self._asked[key] = None

    def record(self, dataset: bytes) -> ScrubRecord:
        if dataset not in self._records:
            path = self._store.root / dataset.hex() / RECORD_NAME
            self._records[dataset] = ScrubRecord(path, len(self._known[dataset].manifest.shards))
        return self._records[dataset]

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Begin, if a shard is due."""
        if self._running is None or self._running.done():
            key = self._next()
            if key is not None:
                self._running = self._tasks.spawn(self._work(key))

    async def _work(self, key: Key | None) -> None:
        """Until no shard is due. What is read in a second stays under the limit."""
        while key is not None:
            size_bytes = self._known[key[0]].manifest.shard_sizes[key[1]]
            free_s = time.monotonic() + size_bytes / self._settings.scrub_bytes_s
            await self._look(key)
            if time.monotonic() - self._saved_s >= SAVE_S:
                await self._save()
            await asyncio.sleep(max(0.0, free_s - time.monotonic()))
            key = self._next()

    async def _save(self) -> None:
        self._saved_s = time.monotonic()
        for record in list(self._records.values()):
            await asyncio.get_running_loop().run_in_executor(self._thread, record.save)

    def _next(self) -> Key | None:
        """The shard to look at now: one asked about, one not looked at in this life, or a slow pass's next."""
        while self._asked:
            key = next(iter(self._asked))
            del self._asked[key]
            if self._is_here(key):
                return key
        for dataset, known in self._known.items():
            if dataset not in self._listed:
                self._listed.add(dataset)
                self._list(dataset, known)
        while self._unlooked:
            key = self._unlooked.pop()
            if self._is_here(key) and key[1] not in self._known[key[0]].verified:
                return key
        return self._slowly(now_s) if (now_s := time.monotonic()) >= self._slow_s else None

    def _is_here(self, key: Key) -> bool:
        return key[0] in self._known and self._store.has(*key)

    def _list(self, dataset: bytes, known: Known) -> None:
        """What lies there from an earlier life, that which was verified longest ago at the end."""
        held = self._store.holdings(dataset)
        here = np.fromiter((shard for shard in held if shard not in known.verified), dtype=np.intp)
        order = np.lexsort((here, self.record(dataset).times[here]))[::-1]
        self._unlooked = [(dataset, shard) for shard in here[order].tolist()] + self._unlooked

    def _slowly(self, now_s: float) -> Key | None:
        """The shard that was verified longest ago, at such a pace that one pass takes the time it may."""
        if self._pass is None:
            self._begin_pass()
        if self._pass is None:
            return None
        while (key := self._pass.next()) is not None:
            time_s = int(self.record(key[0]).times[key[1]]) if self._is_here(key) else None
            if time_s is not None and (time_s or self._began) <= self._pass.time_s():
                break
            self._pass.at += 1  # gone, or looked at meanwhile
        else:
            is_empty = not len(self._pass)
            self._pass = None
            self._slow_s = now_s + (1.0 if is_empty else 0.0)
            return None
        part = self._known[key[0]].manifest.shard_sizes[key[1]] / max(1, self._pass.held_bytes)
        self._slow_s = now_s + part * self._settings.scrub_pass_s
        return key if time.time() - self._pass.time_s() >= part * self._settings.scrub_pass_s else None

    def _begin_pass(self) -> None:
        """At once, or of many shards soon, for the agent must hear meanwhile."""
        held = [(d, known.manifest, self.record(d).times) for d, known in self._known.items()]
        if sum(len(times) for _, _, times in held) <= AT_ONCE:
            self._pass = _Pass.of(self._store, held, self._began)
        elif self._listing is None or self._listing.done():
            self._listing = self._tasks.spawn(self._list_pass(held))

    async def _list_pass(self, held: Sequence[_Held]) -> None:
        loop = asyncio.get_running_loop()
        self._pass = await loop.run_in_executor(self._thread, _Pass.of, self._store, held, self._began)

    # -- one shard ----------------------------------------------------------------------------------------------------

    async def _look(self, key: Key) -> None:
        known, stamp = self._known[key[0]], self._store.stamp(*key)
        try:
            wrong = await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: self._store.fault(*key, from_disk=True)
            )
        except UserError as error:  # which says nothing of the shard
            log.warning("%s", error)
            self._unlooked.insert(0, key)
            await asyncio.sleep(AGAIN_S)
            return
        if wrong is None and stamp is not None and self._store.stamp(*key) == stamp:
            self.record(key[0]).mark(key[1])
            is_news = known.verified.get(key[1]) != stamp
            known.verify(key[1], stamp)
            if is_news:
                self._verified(known)
        elif wrong:
            report_fault(known, key[1], wrong, self._say, self._journal)
            self._damaged(key)

    async def close(self) -> None:
        await self._tasks.close()
        for record in self._records.values():
            record.save()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _lowest_priority() -> None:
    """Of this thread alone: Linux keeps it for each."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
