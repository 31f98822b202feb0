"""Reading single samples out of shards by the index at their end; no tar is parsed, no torch imported."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from p2p_dmc.data.index import SampleEntry, ShardIndex
from p2p_dmc.data.manifest import Manifest

Sample = dict[str, str | bytes]

MOST_GAPS = 2
"""Fields are read one by one if what lies between them is so many times their size,"""
PAGE_BYTES = 4096
"""and this."""
MOST_CLOSED_BYTES = 4 << 20
"""Indexes of closed files are kept within so much memory: with a few samples in a shard, an index costs more to read
than a sample. Where they do not all fit, a shard has many."""
LOOKS = 2
"""So many open files are looked at, whether they are deleted, when another one is opened."""

Identity = tuple[int, int, int, int]


class ShardDamaged(OSError):
    """A shard's file is not what the manifest says. The store should verify it and fetch it again."""


class SampleReader:
    """Keeps the last ``max_open`` shard files open, with indexes. One per thread; a fork may go on with its copy.

    A file that was deleted meanwhile, because it was damaged or dropped, is not read from any more.
    """

    def __init__(self, max_open: int = 32) -> None:
        if max_open < 1:
            raise ValueError(f"max_open {max_open}: at least one file must be open to be read")
        self.max_open = max_open
        self._descriptors: OrderedDict[str, int] = OrderedDict()
        """By path, the least recently used first."""
        self._indexes: dict[str, tuple[Identity, ShardIndex]] = {}
        """Of those that are open, and what the file was when its index was read."""
        self._closed: OrderedDict[str, tuple[Identity, ShardIndex]] = OrderedDict()
        """Of others: each is good as long as its file is what it was."""
        self._closed_bytes = 0
        self._turn = 0  # which of the open ones is looked at next

    def read(self, path: Path, manifest: Manifest, shard_index: int, sample_index: int) -> Sample:
        """A sample of the shard file at ``path``: ``__key__``, ``__dataset__`` (the manifest's name), ``__shard__``
        (digest, hex), bytes per field.

        Raises IndexError for an index the manifest does not have, FileNotFoundError when the file is gone,
        ShardDamaged when it is too short.
        """
        return self.read_many(path, manifest, shard_index, (sample_index,))[0]

    def read_many(
        self, path: Path, manifest: Manifest, shard_index: int, sample_indices: Sequence[int]
    ) -> list[Sample]:
        """Samples of one shard in the order asked for. Raises as `read`."""
        samples: list[Sample] = [{}] * len(sample_indices)
        for place, sample in self.read_each(path, manifest, shard_index, sample_indices):
            samples[place] = sample
        return samples

    def read_each(
        self, path: Path, manifest: Manifest, shard_index: int, sample_indices: Sequence[int]
    ) -> Iterator[tuple[int, Sample]]:
        """Samples of one shard in the order of the file, each with its place in ``sample_indices``, one at a time:
        what is done with one while it is in the processor's cache is done sooner. The reader reads nothing else
        meanwhile. Raises as `read`.
        """
        return self.find(path, manifest, shard_index, sample_indices, set()).read()

    def find(
        self,
        path: Path,
        manifest: Manifest,
        shard_index: int,
        sample_indices: Sequence[int],
        held: set[str],
    ) -> Found:
        """Where samples of one shard lie.

        ``held``: the files, ``max_open`` of them at most, in which others were found that are still to be read; they
        stay open, and this one is added. Without it none but these can be read. Raises as `read`.
        """
        if shard_index < 0:
            raise IndexError(f"shard {shard_index}")
        shard = manifest.shards[shard_index]
        if sample_indices and not 0 <= min(sample_indices) <= max(sample_indices) < shard.sample_count:
            raise IndexError(
                f"samples {min(sample_indices)} to {max(sample_indices)} of a shard with {shard.sample_count}"
            )
        name = str(path)
        descriptor = self._open(name, held)
        entries = self._index(name, descriptor, shard.sample_count).entries(sample_indices)
        places: Sequence[int] = range(len(entries))
        if len(entries) > 1:
            places = sorted(places, key=[entry.fields[0][1] for entry in entries].__getitem__)
        return Found(name, descriptor, manifest.name, shard.digest.hex(), places, entries)

    def close(self) -> None:
        """Close all files and forget what was in them. The reader can be used again."""
        for name in list(self._descriptors):
            self._close(name)
        self._closed.clear()
        self._closed_bytes = 0

    def _close(self, name: str, *, deleted: bool = False) -> None:
        """The index of a file that is there is kept for when it is opened again."""
        os.close(self._descriptors.pop(name))
        kept = self._indexes.pop(name, None)
        if kept is not None and not deleted and kept[1].memory_bytes <= MOST_CLOSED_BYTES:
            self._closed[name] = kept
            self._closed_bytes += kept[1].memory_bytes
        while self._closed_bytes > MOST_CLOSED_BYTES:
            self._closed_bytes -= self._closed.popitem(last=False)[1][1].memory_bytes

    def __enter__(self) -> SampleReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, name: str, held: set[str]) -> int:
        """Of the files that are ``held`` none is closed: their descriptors are in use."""
        descriptor = self._descriptors.get(name)
        if descriptor is not None and name not in held and os.fstat(descriptor).st_nlink == 0:
            self._close(name, deleted=True)
            descriptor = None
        held.add(name)
        if descriptor is None:
            self._close_deleted(held)
            descriptor = self._descriptors[name] = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            if name in self._closed:
                kept = self._closed.pop(name)
                self._closed_bytes -= kept[1].memory_bytes
                if kept[0] == identity(os.fstat(descriptor)):
                    self._indexes[name] = kept
            if len(self._descriptors) > self.max_open:
                self._close(next(iter(self._descriptors)))
        self._descriptors.move_to_end(name)
        return descriptor

    def _close_deleted(self, held: set[str]) -> None:
        """The disk gets their room back only then. A few of them each time, all in turn."""
        names = list(self._descriptors)
        for name in names[self._turn : self._turn + LOOKS]:
            if name not in held and os.fstat(self._descriptors[name]).st_nlink == 0:
                self._close(name, deleted=True)
        self._turn = self._turn + LOOKS if self._turn + LOOKS < len(names) else 0

    def _index(self, name: str, descriptor: int, sample_count: int) -> ShardIndex:
        if name not in self._indexes:
            now = identity(os.fstat(descriptor))
            try:
                self._indexes[name] = now, ShardIndex.read(descriptor)
            except ValueError as error:
                raise ShardDamaged(f"{name!r}: {error}") from error
        index = self._indexes[name][1]
        if len(index) != sample_count:
            raise ShardDamaged(f"{name!r}: {len(index)} samples, and the manifest says {sample_count}")
        return index


def identity(status: os.stat_result) -> Identity:
    """Of a file: another one in its place, or the same one written to, has another."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_index(path: Path) -> ShardIndex:
    """Of the shard file at ``path``. Raises FileNotFoundError, ShardDamaged."""
    with path.open("rb", buffering=0) as file:
        try:
            return ShardIndex.read(file.fileno())
        except ValueError as error:
            raise ShardDamaged(f"{str(path)!r}: {error}") from error


class Found(NamedTuple):
    """Where samples of one shard lie, in a file that its reader has open."""

    path: str
    descriptor: int
    dataset_name: str
    shard_name: str
    places: Sequence[int]
    """In ``entries``, in the order of the file."""
    entries: Sequence[SampleEntry]

    def read(self) -> Iterator[tuple[int, Sample]]:
        """Each with its place, one at a time. Raises ShardDamaged."""
        path, descriptor, dataset_name, shard_name, places, entries = self
        for place in places:
            yield place, _sample(path, descriptor, entries[place], dataset_name, shard_name)


def _sample(path: str, descriptor: int, entry: SampleEntry, dataset_name: str, shard_name: str) -> Sample:
    """Fields that lie close together, as a tar's do, cost one read."""
    key, fields = entry
    sample: Sample = {"__key__": key, "__dataset__": dataset_name, "__shard__": shard_name}
    if len(fields) == 1:
        ((extension, offset, size),) = fields
        sample[extension] = _read(path, descriptor, offset, size, key)
        return sample
    start = min(offset for _, offset, _ in fields)
    end = max(offset + size for _, offset, size in fields)
    if end - start > MOST_GAPS * sum(size for _, _, size in fields) + PAGE_BYTES:
        for extension, offset, size in fields:
            sample[extension] = _read(path, descriptor, offset, size, key)
        return sample
    whole = _read(path, descriptor, start, end - start, key)
    for extension, offset, size in fields:
        sample[extension] = whole[offset - start : offset - start + size]
    return sample


def _read(path: str, descriptor: int, offset: int, size: int, key: str) -> bytes:
    data = os.pread(descriptor, size, offset)
    if len(data) == size:
        return data
    while len(data) < size and (more := os.pread(descriptor, size - len(data), offset + len(data))):
        data += more  # one read returns at most 2 GiB
    if len(data) < size:
        raise ShardDamaged(f"{path!r}: sample {key!r} is cut short")
    return data


def read_sample(
    path: Path, manifest: Manifest, shard_index: int, sample_index: int, reader: SampleReader | None = None
) -> Sample:
    """`SampleReader.read` with ``reader``, whose open files are kept, or with a file opened for this call."""
    if reader is not None:
        return reader.read(path, manifest, shard_index, sample_index)
    with SampleReader(max_open=1) as once:
        return once.read(path, manifest, shard_index, sample_index)
