"""Shards on the disk are looked at again: all after a start, then slowly; what is wrong is found, said and gone."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2p_dmc.agent import scrub as scrub_module
from p2p_dmc.agent.known import Known
from p2p_dmc.agent.scrub import RECORD_NAME, Scrub, ScrubRecord
from p2p_dmc.config import AgentSettings
from p2p_dmc.core.pledges import Key
from p2p_dmc.data import disk
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.store import Store
from p2p_dmc.errors import UserError
from p2p_dmc.observe.journal import Journal
from tests.agent.helpers import peer
from tests.data.helpers import seed_tree, small_tree

DEADLINE_S = 60.0


class Scrubbed:
    """A store, its scrub, and what that found."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.store = Store(root / "store")
        if not self.store.datasets():
            tree = small_tree(root / "tree", folders=2, samples=8)
            seed_tree(tree, self.store, max_shard_size=10_000)
        (self.dataset,) = self.store.datasets()
        self.manifest: Manifest = self.store.manifest(self.dataset)
        self.known = {self.dataset: Known(manifest=self.manifest)}
        self.looked: list[int] = []
        self.bad: list[Key] = []
        self.said: list[str] = []
        self.events: list[dict[str, Any]] = []
        journal = Journal(root, peer(1))
        journal.listeners.append(lambda kind, line: self.events.append(line))
        self.scrub = Scrub(
            store=self.store,
            settings=AgentSettings(**settings),
            journal=journal,
            say=self.said.append,
            known=self.known,
            verified=lambda known: None,
            damaged=self.bad.append,
        )
        fault = self.store.fault

        def watched(dataset: bytes, shard: int, *, from_disk: bool = False) -> str | None:
            assert from_disk
            self.looked.append(shard)
            return fault(dataset, shard, from_disk=from_disk)

        self.store.fault = watched  # type: ignore[method-assign]

    @property
    def shards(self) -> int:
        return len(self.manifest.shards)

    @property
    def verified(self) -> set[int]:
        return set(self.known[self.dataset].verified)

    def rot(self, shard: int) -> None:
        """Other bytes, under a file that seems untouched."""
        path = self.store.path(self.dataset, shard)
        before = path.stat()
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    async def until(self, true: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not true():
            assert time.monotonic() < deadline_s
            self.scrub.tick()
            await asyncio.sleep(0.001)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, DEADLINE_S))


def test_after_a_start_every_shard_is_looked_at_once(tmp_path: Path) -> None:
    async def work() -> None:
        one = Scrubbed(tmp_path)
        assert one.verified == set()
        await one.until(lambda: len(one.verified) == one.shards)
        assert sorted(one.looked) == list(range(one.shards)) and not one.bad and not one.said
        await one.scrub.close()
        record = ScrubRecord(one.store.root / one.dataset.hex() / RECORD_NAME, one.shards)
        assert (abs(record.times.astype(int) - time.time()) < DEADLINE_S).all()

    run(work())


@pytest.mark.parametrize("fault", ["rotten", "gone", "unreadable"])
def test_what_is_wrong_is_said_once_and_is_held_no_longer(tmp_path: Path, fault: str) -> None:
    async def work() -> None:
        one = Scrubbed(tmp_path, scrub_pass_s=0.05)
        await one.until(lambda: len(one.verified) == one.shards)
        path = one.store.path(one.dataset, 2)
        if fault == "rotten":
            one.rot(2)
        elif fault == "gone":
            path.unlink()
        else:
            path.unlink()
            path.mkdir()
        await one.until(lambda: one.bad == [(one.dataset, 2)])
        words = {"rotten": "is damaged", "gone": "is gone from the disk", "unreadable": "cannot be read"}[
            fault
        ]
        (line,) = one.said
        assert f"shard {one.manifest.shard_digests[2].hex()[:12]} {words}" in line and "'small'" in line
        (event,) = [e for e in one.events if e["event"] == "shard_corrupt"]
        assert event["shard"] == one.manifest.shard_digests[2].hex() and event["reason"].startswith(words)
        assert not one.store.has(one.dataset, 2)
        await one.scrub.close()

    run(work())


def test_what_somebody_asks_about_comes_first(tmp_path: Path) -> None:
    async def work() -> None:
        one = Scrubbed(tmp_path)
        one.scrub.first((one.dataset, 3))
        one.scrub.first((b"x" * 16, 0))  # of no data set, by now
        one.scrub.first((one.dataset, 1))
        await one.until(lambda: len(one.looked) >= 2)
        assert one.looked[:2] == [3, 1]
        await one.scrub.close()

    run(work())


def test_a_pass_takes_the_time_it_may_and_begins_with_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of the test's: what is due is one shard after another, each for its part of the bytes."""
    one = Scrubbed(tmp_path, scrub_pass_s=1000.0)
    now = [1e6]
    monkeypatch.setattr(scrub_module, "time", Clock(now))
    known = one.known[one.dataset]
    for shard in range(one.shards):
        known.verify(shard, one.store.stamp(one.dataset, shard))
    times = one.scrub.record(one.dataset).times
    times[:] = np.arange(one.shards, dtype="<u4")[::-1] + 100
    order, at = [], []
    for _ in range(2_000):
        now[0] += 1.0
        key = one.scrub._next()
        if key is not None:
            order.append(key[1])
            at.append(now[0])
            one.scrub.record(one.dataset).mark(key[1])
    assert order[: one.shards] == list(range(one.shards))[::-1]
    total = sum(one.manifest.shard_sizes)
    for shard, start, end in zip(order, at, at[1:], strict=False):
        assert end - start == pytest.approx(1000 * one.manifest.shard_sizes[shard] / total, abs=2)
    assert len(order) == pytest.approx(2 * one.shards, abs=2)
    asyncio.run(one.scrub.close())


def test_for_a_whole_pass_what_is_held_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Scrubbed(tmp_path, scrub_pass_s=1000.0)
    now = [1e6]
    monkeypatch.setattr(scrub_module, "time", Clock(now))
    listed = []
    holdings = one.store.holdings
    monkeypatch.setattr(one.store, "holdings", lambda d: listed.append(d) or holdings(d))
    for shard in range(one.shards):
        one.known[one.dataset].verify(shard, one.store.stamp(one.dataset, shard))
    one.scrub.record(one.dataset).times[:] = 100
    asked, gone = 1, 2
    found = []
    for second in range(990):
        now[0] += 1.0
        if second == 2:  # somebody has it looked at, and another one is dropped
            one.scrub.record(one.dataset).mark(asked)
            one.store.drop(one.dataset, gone)
        if (key := one.scrub._next()) is not None:
            found.append(key[1])
            one.scrub.record(one.dataset).mark(key[1])
        if len(found) == one.shards - 2:
            break
    assert found == [shard for shard in range(one.shards) if shard not in (asked, gone)]
    assert len(listed) == 2  # of this life's first look, and the pass
    asyncio.run(one.scrub.close())


def test_of_many_shards_the_pass_is_listed_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub_module, "AT_ONCE", 1)

    async def work() -> None:
        one = Scrubbed(tmp_path, scrub_pass_s=0.05)
        await one.until(lambda: len(one.verified) == one.shards)
        loop_thread, listers = threading.get_ident(), set()
        holdings = one.store.holdings

        def listing(dataset: bytes) -> frozenset[int]:
            listers.add(threading.get_ident())
            return holdings(dataset)

        monkeypatch.setattr(one.store, "holdings", listing)
        one.looked.clear()
        one.scrub._pass = None
        await one.until(lambda: len(set(one.looked)) == one.shards)
        assert listers and loop_thread not in listers
        await one.scrub.close()

    run(work())


class Clock:
    def __init__(self, now: list[float]) -> None:
        self._now = now

    def time(self) -> float:
        return self._now[0]

    def monotonic(self) -> float:
        return self._now[0]


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_after_a_restart_it_begins_with_what_was_not_looked_at_for_longest(tmp_path: Path) -> None:
    """A life that ends after a few shards, without a word: the next one goes on where it was."""

    async def life(shards: int, *, is_killed: bool) -> tuple[list[int], set[int]]:
        one = Scrubbed(tmp_path)
        one.scrub._saved_s = -1e9  # it is due to save
        await one.until(lambda: len(one.looked) >= shards and len(one.verified) >= shards)
        if is_killed:
            await one.scrub._tasks.close()
        else:
            await one.scrub.close()
        return one.looked, one.verified

    async def work() -> None:
        _, first = await life(2, is_killed=False)
        count = Scrubbed(tmp_path).shards
        second, _ = await life(count - len(first), is_killed=True)
        assert first.union(second[: count - len(first)]) == set(range(count)) > first

    run(work())


@pytest.mark.parametrize("left", [b"", b"\xff" * 7, None])
def test_a_record_that_is_none_costs_only_the_order(tmp_path: Path, left: bytes | None) -> None:
    path = tmp_path / RECORD_NAME
    if left is not None:
        path.write_bytes(left)
    assert ScrubRecord(path, 4).times.tolist() == [0, 0, 0, 0]


def test_a_mark_that_a_crash_interrupts_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / RECORD_NAME
    record = ScrubRecord(path, 3)
    record.mark(1)
    record.save()
    before = path.read_bytes()
    for step in ("fsync", "replace"):

        def crash(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(disk.os, step, crash)
            record.mark(2)
            with pytest.raises(KeyboardInterrupt):
                record.save()
        assert path.read_bytes() == before
        assert ScrubRecord(path, 3).times.tolist() == np.frombuffer(before, "<u4").tolist()


def test_times_from_a_clock_that_was_set_back_count_as_never(tmp_path: Path) -> None:
    path = tmp_path / RECORD_NAME
    path.write_bytes(np.array([5, int(time.time()) + 10_000], dtype="<u4").tobytes())
    assert ScrubRecord(path, 2).times.tolist() == [5, 0]


def test_a_disk_that_takes_no_record_stops_nothing(tmp_path: Path) -> None:
    record = ScrubRecord(tmp_path / "gone" / RECORD_NAME, 1)
    record.mark(0)
    record.save()
    assert not (tmp_path / "gone").exists()


def test_a_shard_that_comes_anew_while_the_old_one_is_read_is_kept(tmp_path: Path) -> None:
    """Between the bad digest and the deletion the file may have become another one."""
    one = Scrubbed(tmp_path)
    path = one.store.path(one.dataset, 0)
    good = path.read_bytes()
    path.write_bytes(b"\x00" * len(good))
    stamps = [0]
    stamp = one.store.stamp

    def replaced(dataset: bytes, shard: int) -> Any:
        stamps[0] += 1
        if stamps[0] == 2:  # after it was read
            path.unlink()
            path.write_bytes(good)
        return stamp(dataset, shard)

    one.store.stamp = replaced  # type: ignore[method-assign]
    assert one.store.fault(one.dataset, 0, from_disk=True) is None
    assert path.read_bytes() == good and one.store.has(one.dataset, 0)


def test_what_cannot_be_looked_at_just_now_is_looked_at_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub_module, "AGAIN_S", 0.01)

    async def work() -> None:
        one, failed = Scrubbed(tmp_path), 0
        fault = one.store.fault

        def busy(dataset: bytes, shard: int, *, from_disk: bool = False) -> str | None:
            nonlocal failed
            if failed < 5:
                failed += 1
                raise UserError("too many open files")
            return fault(dataset, shard, from_disk=from_disk)

        one.store.fault = busy  # type: ignore[method-assign]
        await one.until(lambda: len(one.verified) == one.shards)
        assert failed == 5 and not one.bad and not one.said
        await one.scrub.close()

    run(work())
