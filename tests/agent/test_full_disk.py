"""A peer whose disk is full while it receives, over real sockets: it says so, keeps what it has, goes on with room."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2p_dmc.config import AgentSettings
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.store import Store
from p2p_dmc.wire.messages import BulkKind, BulkRequest
from tests.agent.test_datasets import SETTINGS, Node, net_of, run
from tests.data.helpers import make_tree, seed_tree

__all__ = ["net_of"]  # a fixture

DISK_BYTES = 4 << 20
RANGE, SEVERAL = 16384, 3
FIRST = frozenset({0, 1})
"""These shards come whole, before the disk is full; of the others the first range."""


class MountedDisk:
    """A file system of its own, to which others write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """To the last block."""
        with self._ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
        assert shutil.disk_usage(self.folder).free == 0

    def clear(self) -> None:
        self._ballast.unlink()


class FeignedDisk:
    """For whoever may not mount one: the system's calls say what they say when the disk is full."""

    Usage = namedtuple("Usage", "total used free")

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.is_full = False
        for name in ("pwrite", "fsync"):
            monkeypatch.setattr(os, name, self._refusing(getattr(os, name)))
        monkeypatch.setattr(shutil, "disk_usage", self._usage)

    def _refusing(self, call: Any) -> Any:
        def refusing(descriptor: int, *rest: Any) -> Any:
            if self.is_full and str(self.folder) in os.readlink(f"/proc/self/fd/{descriptor}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(descriptor, *rest)

        return refusing

    def _usage(self, path: Path) -> Any:
        free = 0 if self.is_full else DISK_BYTES
        return self.Usage(DISK_BYTES, DISK_BYTES - free, free)

    def fill(self) -> None:
        self.is_full = True

    def clear(self) -> None:
        self.is_full = False


Disk = MountedDisk | FeignedDisk


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(words, check=False).returncode:
        yield FeignedDisk(folder, monkeypatch)
        return
    try:
        yield MountedDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def seeded(tmp_path: Path) -> tuple[Store, Manifest]:
    store = Store(tmp_path / "seed")
    tree = make_tree(tmp_path / "tree", {f"{i:02d}.bin": 20_000 + i for i in range(60)})
    manifest = seed_tree(tree, store, max_shard_size=130_000)
    assert len(manifest.shards) >= 8 and min(manifest.shard_sizes) > 2 * RANGE
    return store, manifest


def settings() -> AgentSettings:
    return replace(SETTINGS, fetch_range_bytes=RANGE, fetch_piece_bytes=4096)


def holds_back(node: Node) -> asyncio.Event:
    """It sends shards other than the first ones beyond their first range only once the event is set."""
    go_on = asyncio.Event()

    async def provide(request: BulkRequest) -> tuple[int, bytes] | None:
        if request.part not in FIRST and request.offset:
            await go_on.wait()
        return await node.data.provide_shard(request)

    node.server.provide(BulkKind.SHARD, provide)
    return go_on


def parts(store: Store) -> list[Path]:
    return list(store.root.rglob("*.part"))


def test_a_disk_that_fills_while_shards_come(
    tmp_path: Path, net_of: Any, disk: Disk, seeded: tuple[Store, Manifest]
) -> None:
    origin, manifest = seeded
    d, shards = manifest.digest, range(len(manifest.shards))

    async def work() -> None:
        async with net_of(settings()) as net:
            one, two = net.join(1, origin), net.join(2, Store(disk.folder / "store"))
            two.client._timeout_s = 30.0  # the one that holds back is not taken for silent
            go_on = holds_back(one)
            await net.until(lambda: two.data.held(d) == FIRST)

            def several_begun() -> bool:
                begun = [one for s in shards if s not in FIRST and (one := two.store.begun(d, s))]
                return len(begun) >= SEVERAL and any(one.written_bytes for one in begun)

            await net.until(several_begun)
            disk.fill()
            go_on.set()
            await net.until(lambda: two.data.fetching() == 0)

            [line] = two.around.said
            assert str(two.store.root) in line
            assert line.endswith(": No space left on device; free some disk space")
            assert [event["reason"] for event in two.events("store_full")] == [line]
            assert two.data.full and two.data.held(d) == FIRST and parts(two.store) == []
            assert all(two.data.usable(d, s) and two.store.verify(d, s) for s in FIRST)
            begun: list[int] = []
            net.watch = lambda: begun.append(two.data.fetching())
            await net.rest(20.0)
            assert set(begun) == {0} and len(two.around.said) == 1
            assert one.data.copies(d)[two.id].full

            disk.clear()
            await net.until(lambda: two.data.held(d) == set(shards))
            assert all(two.data.usable(d, s) for s in shards) and len(two.around.said) == 1
            await net.until(lambda: not one.data.copies(d)[two.id].full)

    run(work())


def test_a_disk_that_is_full_before_a_data_set_is_known(
    tmp_path: Path, net_of: Any, disk: Disk, seeded: tuple[Store, Manifest]
) -> None:
    origin, manifest = seeded
    d = manifest.digest

    async def work() -> None:
        async with net_of(settings()) as net:
            one, store = net.join(1, origin), Store(disk.folder / "store")
            disk.fill()
            two = net.join(2, store)
            await net.until(lambda: bool(two.around.said))
            await net.rest(20.0)
            [line] = two.around.said
            assert line.endswith(": No space left on device; free some disk space")
            assert two.data.manifest(d) is None and one.data.manifest(d) == manifest
            disk.clear()
            await net.until(lambda: len(two.data.held(d)) == len(manifest.shards))
            assert two.around.said == [line]

    run(work())
