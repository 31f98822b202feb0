"""Shards on disk: content-addressed, verified, and never half-written under their final name.

    root/<data set digest>/manifest.msgpack
    root/<data set digest>/shards/<shard digest>.tar          held: whole and verified when it was written
    root/<data set digest>/shards/<shard digest>.tar.part     on its way; gone on with after a restart
    root/staging-*/                                           a data set being made, removed when the store is opened

Only digests in hexadecimal become part of a path. A file gets its final name by rename, after it and before
its folder is synced, so a crash at any instant leaves either nothing or the whole shard. One process uses a
store at a time (the agent sees to that); its threads may share it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from p2p_dmc.data.disk import (
    MANIFEST_NAME,
    SHARDS_NAME,
    ShardMissing,
    StoreFull,
    disk_errors,
    file_digest,
    is_of_file,
    shard_path,
    sync_folder,
    write_durably,
)
from p2p_dmc.data.held import HeldDataset
from p2p_dmc.data.manifest import DIGEST_BYTES, Manifest
from p2p_dmc.data.partial import PART_SUFFIX, PartialShard
from p2p_dmc.data.versions import is_clash, link, versions
from p2p_dmc.errors import RemoteProtocolError, UserError

__all__ = ["PartialShard", "ShardMissing", "Stamp", "Store", "StoreFull"]

Stamp = tuple[int, int, int]
"""Of a file: when it was last written to (ns), its size in bytes, its inode."""

SPARED_BYTES, SPARED_PART = 1 << 30, 0.02
"""Of a disk, whichever is less, is left to checkpoints, logs and everybody else."""

log = logging.getLogger("p2p_dmc.data")

_STAGING = "staging-"
_SPOOL = "spool-"
_DATASET_NAME = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}\Z")


class Store:
    """All shards of one peer. Raises UserError when ``root`` cannot be used.

    ``capacity_bytes`` bounds the bytes of shards, held and on their way; None leaves it to the disk.
    A data set is named by its manifest's 16-byte digest, a shard by its index in the manifest. Methods that
    take them raise LookupError for an unknown data set, RemoteProtocolError for an index out of range.
    ``keep_staging`` leaves what an interrupted seeding has written for `staging` to go on with.
    """

    def __init__(self, root: Path, capacity_bytes: int | None = None, *, keep_staging: bool = False) -> None:
        self.root = root
        self._keep_staging = keep_staging
        self.capacity_bytes = capacity_bytes
        self._lock = threading.RLock()
        self._datasets: dict[bytes, HeldDataset] = {}
        self._copies: Counter[tuple[bytes, bytes]] = Counter()
        """Of each shard held, by its data set's first version, in how many versions: they share its file."""
        self._used_bytes = 0  # held and reserved
        self._unwritten_bytes = 0  # reserved and not on the disk yet
        self.damaged: list[Path] = []
        """Manifests found unreadable when the store was opened; `add_manifest` mends them."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise UserError(f"{str(root)!r}: {error.strerror}; give another --home") from error

    def _open(self) -> None:
        for folder in sorted(self.root.iterdir()):
            if folder.name.startswith(_SPOOL):
                shutil.rmtree(folder)
            elif folder.name.startswith(_STAGING):
                if not self._keep_staging:
                    shutil.rmtree(folder)
            elif _DATASET_NAME.match(folder.name) and (folder / MANIFEST_NAME).is_file():
                try:
                    manifest: Manifest | None = Manifest.from_bytes((folder / MANIFEST_NAME).read_bytes())
                except RemoteProtocolError:
                    manifest = None
                if manifest is None or manifest.digest.hex() != folder.name:
                    self.damaged.append(folder)
                else:
                    self._adopt(folder, manifest)
        for dataset in self._datasets.values():
            self._share(dataset, frozenset(dataset.held))

    def _adopt(self, folder: Path, manifest: Manifest) -> None:
        """Take a data set in: list its shards, remove what an earlier life left unfinished."""
        dataset = HeldDataset(folder, manifest)
        size_of: dict[str, int] = {}
        for path in (folder / SHARDS_NAME).glob("*"):
            size_of[path.name] = path.stat().st_size
        for index, shard in enumerate(manifest.shards):
            path = dataset.path(index)
            size = size_of.get(path.name)
            if size == shard.size_bytes:
                self._hold(dataset, index)
            elif size is not None:
                path.unlink()
            if index not in dataset.held:
                size_of.pop(path.name + PART_SUFFIX, None)  # to be gone on with
        for name in size_of:
            if name.endswith(PART_SUFFIX):
                (folder / SHARDS_NAME / name).unlink()
        self._datasets[manifest.digest] = dataset

    # -- data sets ---------------------------------------------------------------------------------------

    def datasets(self) -> tuple[bytes, ...]:
        """Digests of all data sets known here, sorted."""
        with self._lock:
            return tuple(sorted(self._datasets))

    def manifest(self, dataset: bytes) -> Manifest:
        return self._dataset(dataset).manifest

    def by_name(self, name: str) -> Manifest | None:
        """The newest version of that name, None when there is none. Raises UserError when the name is ambiguous."""
        with self._lock:
            found = versions([one.manifest for one in self._datasets.values()], name)
        return found[0] if found else None

    def add_manifest(self, manifest: Manifest) -> None:
        """Make a data set known and durable. Nothing happens if it is known already."""
        with self._lock:
            if manifest.digest in self._datasets:
                return
            folder = self.root / manifest.digest.hex()
            with disk_errors(folder):
                (folder / SHARDS_NAME).mkdir(parents=True, exist_ok=True)
                write_durably(folder / MANIFEST_NAME, manifest.to_bytes())
                sync_folder(self.root)
                self._adopt(folder, manifest)
            self._take_shared(manifest)

    def _take_shared(self, manifest: Manifest) -> None:
        """A data set that has come: what other versions of it hold it holds too."""
        for other in list(self._datasets.values()):
            if other.manifest.first == manifest.first:
                self._share(other, frozenset(other.held))

    def twins(self, dataset: bytes, shard_index: int) -> list[tuple[bytes, int]]:
        """The same shard in other versions of the data set, held there or not."""
        one = self._dataset(dataset).manifest
        with self._lock:
            others = [other for d, other in self._datasets.items() if d != dataset]
        places = [(o.manifest.digest, o.place_of(one, shard_index)) for o in others]
        return [(digest, at) for digest, at in places if at is not None]

    def _dataset(self, dataset: bytes) -> HeldDataset:
        with self._lock:
            try:
                return self._datasets[dataset]
            except KeyError:
                raise LookupError(f"data set {dataset.hex()} is not known here") from None

    # -- what is held ------------------------------------------------------------------------------------

    def has(self, dataset: bytes, shard_index: int) -> bool:
        with self._lock:
            return dataset in self._datasets and shard_index in self._datasets[dataset].held

    def holdings(self, dataset: bytes) -> frozenset[int]:
        """Indexes of the shards held, from memory."""
        with self._lock:
            return frozenset(self._dataset(dataset).held)

    def changes(self, dataset: bytes) -> int:
        """Grows with every shard that comes or goes."""
        return self._dataset(dataset).changes

    def path(self, dataset: bytes, shard_index: int) -> Path:
        """Where the shard lies once it is held, held or not."""
        return self._dataset(dataset).path(shard_index)

    def free_bytes(self) -> int:
        """Room for more shards: what capacity and disk both allow, never negative."""
        with self._lock:
            return max(0, self._room())

    def excess_bytes(self) -> int:
        """By how much what is held is more than the capacity, which may be less than it was when that came."""
        with self._lock:
            return max(0, self._used_bytes - (self.capacity_bytes or self._used_bytes))

    def _room(self, written_bytes: int = 0) -> int:
        """``written_bytes`` are on the disk for what the room is asked for, and not counted as used yet."""
        disk = shutil.disk_usage(self.root)
        spared = min(SPARED_BYTES, int(disk.total * SPARED_PART))
        free = disk.free - spared - self._unwritten_bytes + written_bytes
        if self.capacity_bytes is not None:
            free = min(free, self.capacity_bytes - self._used_bytes)
        return free

    def read_range(self, dataset: bytes, shard_index: int, offset: int, size: int) -> bytes:
        """Bytes of a held shard, to serve them. Raises RemoteProtocolError for a range outside the shard.

        ShardMissing if it is not held or cannot be read just now, or if the file is gone or short, in which case it is
        held no longer.
        """
        one = self._dataset(dataset)
        path = one.path(shard_index)
        if offset < 0 or size < 0 or offset + size > one.manifest.shard_sizes[shard_index]:
            raise RemoteProtocolError(f"range {offset}+{size} is outside shard {shard_index}")
        if not self.has(dataset, shard_index):
            raise ShardMissing(f"shard {shard_index} of data set {dataset.hex()} is not held here")
        try:
            with path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), size, offset)
        except OSError as error:
            if is_of_file(error):
                self._drop_damaged(dataset, shard_index)
            raise ShardMissing(f"{str(path)!r}: {error.strerror}") from error
        if len(data) != size:
            self._drop_damaged(dataset, shard_index)
            raise ShardMissing(f"{str(path)!r}: the file is shorter than the manifest says")
        return data

    def verify(self, dataset: bytes, shard_index: int) -> bool:
        """Hash a held shard again. A damaged one is deleted and held no longer. False if it is not held."""
        return self.fault(dataset, shard_index) is None

    def fault(self, dataset: bytes, shard_index: int, *, from_disk: bool = False) -> str | None:
        """Hash a held shard again: None for one that is whole, else what is wrong, and it is deleted, held no longer.

        ``from_disk``: read it from there, not from what the system remembers of it. "" for one that is not held.
        UserError when this process lacks what it takes to read a file.
        """
        one = self._dataset(dataset)
        path = one.path(shard_index)
        while self.has(dataset, shard_index):
            before = self.stamp(dataset, shard_index)
            try:
                with path.open("rb") as file:
                    if from_disk:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    if file_digest(file) == one.manifest.shard_digests[shard_index]:
                        return None
                    wrong = "is damaged"
            except FileNotFoundError:
                wrong = "is gone from the disk"
            except OSError as error:  # as good as damaged: another replica has it
                if not is_of_file(error):
                    raise UserError(f"{str(path)!r}: {error.strerror}; raise that limit") from error
                wrong = f"cannot be read ({error.strerror})"
            with self._lock:
                if self.stamp(dataset, shard_index) == before:  # else it came anew while it was read
                    self._drop_damaged(dataset, shard_index)
                    return wrong
        return ""

    def stamp(self, dataset: bytes, shard_index: int) -> Stamp | None:
        """Of a shard's file; another one than before means that it was written to. None: there is no file."""
        try:
            found = self._dataset(dataset).path(shard_index).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def drop(self, dataset: bytes, shard_index: int) -> None:
        """Delete a shard. Whether other peers hold it is the caller's care. Nothing happens if not held.

        A file that the disk does not let go of is held no longer all the same; the next start finds it again.
        """
        one = self._dataset(dataset)
        path = one.path(shard_index)
        with self._lock:
            if shard_index in one.held:
                one.held.discard(shard_index)
                one.changes += 1
                self._copies[one.counted(shard_index)] -= 1
                if not self._copies[one.counted(shard_index)]:
                    del self._copies[one.counted(shard_index)]
                    self._used_bytes -= one.manifest.shard_sizes[shard_index]
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    log.warning("%s: %s", path, error.strerror)

    def _drop_damaged(self, dataset: bytes, shard_index: int) -> None:
        """Of every version that has this file, or none either."""
        stamp = self.stamp(dataset, shard_index)
        with self._lock:
            for twin in self.twins(dataset, shard_index):
                if self.stamp(*twin) == stamp:
                    self.drop(*twin)
            self.drop(dataset, shard_index)

    # -- what is on its way ------------------------------------------------------------------------------

    def open_partial(self, dataset: bytes, shard_index: int) -> PartialShard:
        """Begin to receive a shard, or go on: the same object while it is neither committed nor abandoned.

        Room for the whole shard is reserved. Raises StoreFull, and ValueError if the shard is held already.
        """
        one = self._dataset(dataset)
        path = one.path(shard_index)
        with self._lock:
            if shard_index in one.held:
                raise ValueError(f"shard {shard_index} of data set {dataset.hex()} is held already")
            if shard_index not in one.partial:
                one.partial[shard_index] = self._new_partial(one, shard_index, path)
            return one.partial[shard_index]

    def begun(self, dataset: bytes, shard_index: int) -> PartialShard | None:
        """The shard that is being received at present."""
        with self._lock:
            one = self._datasets.get(dataset)
            return one.partial.get(shard_index) if one is not None else None

    def _new_partial(self, one: HeldDataset, shard_index: int, path: Path) -> PartialShard:
        size_bytes = one.manifest.shard_sizes[shard_index]
        left = path.with_name(path.name + PART_SUFFIX)
        written_bytes = min(size_bytes, left.stat().st_blocks * 512) if left.exists() else 0
        if size_bytes > self._room(written_bytes):
            self._drop_leftovers(keep=left)
        self._require_room(size_bytes, written_bytes)
        with disk_errors(path):
            path.parent.mkdir(exist_ok=True)
            begun = PartialShard(
                path,
                one.manifest.shard_digests[shard_index],
                size_bytes,
                on_written=self._wrote,
                on_end=partial(self._ended, one, shard_index),
            )
        self._used_bytes += size_bytes
        self._unwritten_bytes += size_bytes - begun.written_bytes
        return begun

    def _drop_leftovers(self, keep: Path) -> None:
        """What an earlier life began to receive and nobody has asked for since gives way."""
        for one in self._datasets.values():
            open_now = {one.path(index).name + PART_SUFFIX for index in one.partial}
            for path in (one.folder / SHARDS_NAME).glob(f"*{PART_SUFFIX}"):
                if path.name not in open_now and path != keep:
                    path.unlink(missing_ok=True)

    def _require_room(self, size_bytes: int, written_bytes: int = 0) -> None:
        free = self._room(written_bytes)
        if size_bytes > free:
            raise StoreFull(
                f"{str(self.root)!r}: no room for {size_bytes} bytes, {max(0, free)} are free; "
                f"free some disk space or raise --capacity"
            )

    def _wrote(self, count: int) -> None:
        with self._lock:
            self._unwritten_bytes -= count

    def _ended(self, one: HeldDataset, shard_index: int, held: bool, unwritten_bytes: int) -> None:
        """A partial shard was renamed into place, or is gone. Takes back what was reserved for it."""
        with self._lock:
            del one.partial[shard_index]
            self._unwritten_bytes -= unwritten_bytes
            self._used_bytes -= one.manifest.shard_sizes[shard_index]
            if held:
                self._hold(one, shard_index)
                self._share(one, frozenset({shard_index}))

    def _hold(self, one: HeldDataset, shard_index: int) -> None:
        if shard_index not in one.held:
            one.held.add(shard_index)
            one.changes += 1
            self._copies[one.counted(shard_index)] += 1
            if self._copies[one.counted(shard_index)] == 1:
                self._used_bytes += one.manifest.shard_sizes[shard_index]

    def _share(self, one: HeldDataset, shards: frozenset[int]) -> None:
        """These shards of a data set are held by its other versions too that list them: one file, several names."""
        for index in shards:
            for digest, at in self.twins(one.manifest.digest, index):
                other = self._datasets[digest]
                free = at not in other.held and at not in other.partial
                if free and link(one.path(index), other.path(at)):
                    self._hold(other, at)

    # -- making a data set -------------------------------------------------------------------------------

    @contextmanager
    def spool_folder(self) -> Iterator[Path]:
        """A folder on the store's disk for what is needed only while a data set is made."""
        with disk_errors(self.root):
            folder = Path(tempfile.mkdtemp(prefix=_SPOOL, dir=self.root))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def staging(self, size_bytes: int, identity: bytes = b"") -> Iterator[Path]:
        """A folder for the shards, ``size_bytes`` in all, of a data set being made.

        It is gone afterwards unless `publish` has taken it, or the process is interrupted: then the next one
        that names the same ``identity`` gets it with what was written. Others' leftovers are removed. Raises
        StoreFull when there is no room.
        """
        folder = self.root / f"{_STAGING}{identity.hex() or 'once'}"
        for left in self.root.glob(f"{_STAGING}*"):
            if left != folder or not identity:
                shutil.rmtree(left, ignore_errors=True)
        there = sum(path.stat().st_size for path in (folder / SHARDS_NAME).glob("*.tar"))
        with self._lock:
            self._require_room(size_bytes, there)
            self._used_bytes += size_bytes
        try:
            with disk_errors(self.root):
                (folder / SHARDS_NAME).mkdir(parents=True, exist_ok=True)
            try:
                yield folder
            except Exception:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            except BaseException:
                if not any((folder / SHARDS_NAME).glob("*.tar")):  # nothing to go on from
                    shutil.rmtree(folder, ignore_errors=True)
                raise
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            with self._lock:
                self._used_bytes -= size_bytes

    def publish(self, staging: Path, manifest: Manifest) -> None:
        """Take in a staged data set, all of whose shards lie synced in ``staging``, by one rename.

        A data set that is known already has these instead of what it held, which nobody has read just now. Raises
        UserError if another data set has this name.
        """
        with self._lock:
            other = self.by_name(manifest.name)
            if other is not None and is_clash(other, manifest):
                digests = f"{other.digest.hex()} is here and {manifest.digest.hex()} is new"
                raise UserError(
                    f"{manifest.name!r}: another data set has this name, {digests}; use another --name"
                )
            folder = self.root / manifest.digest.hex()
            with disk_errors(folder):
                if folder.exists():
                    self.add_manifest(manifest)
                    self._take_all(staging, self._dataset(manifest.digest))
                else:
                    write_durably(staging / MANIFEST_NAME, manifest.to_bytes())
                    sync_folder(staging / SHARDS_NAME)
                    os.rename(staging, folder)
                    sync_folder(self.root)
                    self._adopt(folder, manifest)
            self._take_shared(manifest)

    def _take_all(self, staging: Path, one: HeldDataset) -> None:
        for index, digest in enumerate(one.manifest.shard_digests):
            before = self.stamp(one.manifest.digest, index)
            os.replace(shard_path(staging, digest), one.path(index))
            self._hold(one, index)
            for twin in self.twins(one.manifest.digest, index):
                if self.stamp(*twin) == before:
                    self.drop(*twin)  # the same file as there was: it is linked anew
        sync_folder(one.folder / SHARDS_NAME)
