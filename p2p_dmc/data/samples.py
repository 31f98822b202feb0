"""Reading single samples out of shards by the index at their end; no tar is parsed, no torch imported."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from p2p_dmc.data.index import SampleEntry, ShardIndex
from p2p_dmc.data.manifest import Manifest

Sample = dict[str, str | bytes]

MOST_GAPS = 2
"""Fields are read one by one if what lies between them is so many times their size,"""
PAGE_BYTES = 4096
"""and this."""


class ShardDamaged(OSError):
    """A shard's file is not what the manifest says. The store should verify it and fetch it again."""


class SampleReader:
    """Keeps the last ``max_open`` shard files open, with indexes. One per thread; a fork may go on with its copy.

    A file that was deleted meanwhile, because it was damaged or dropped, is not read from any more.
    """

    def __init__(self, max_open: int = 32) -> None:
        if max_open < 1:
            raise ValueError(f"max_open {max_open}: at least one file must be open to be read")
        self._max_open = max_open
        self._descriptors: OrderedDict[str, int] = OrderedDict()
        self._indexes: dict[int, ShardIndex] = {}
        """By descriptor, of those that are open."""

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
        """Samples of one shard in the order asked for; they are read in the order of the file. Raises as `read`."""
        if shard_index < 0:
            raise IndexError(f"shard {shard_index}")
        shard = manifest.shards[shard_index]
        for sample_index in sample_indices:
            if not 0 <= sample_index < shard.sample_count:
                raise IndexError(f"sample {sample_index} of a shard with {shard.sample_count}")
        descriptor, name = self._open(str(path)), shard.digest.hex()
        index = self._index(path, descriptor, shard.sample_count)
        entries = [index[sample_index] for sample_index in sample_indices]
        samples: list[Sample] = [{}] * len(entries)
        for place in sorted(range(len(entries)), key=lambda i: entries[i].fields[0][1]):
            samples[place] = _sample(path, descriptor, entries[place], manifest.name, name)
        return samples

    def close(self) -> None:
        """Close all files. The reader can be used again."""
        while self._descriptors:
            self._close(self._descriptors.popitem()[1])

    def _close(self, descriptor: int) -> None:
        self._indexes.pop(descriptor, None)
        os.close(descriptor)

    def __enter__(self) -> SampleReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, name: str) -> int:
        descriptor = self._descriptors.pop(name, None)
        if descriptor is not None and os.fstat(descriptor).st_nlink == 0:
            self._close(descriptor)
            descriptor = None
        if descriptor is None:
            self._close_deleted()
            descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        self._descriptors[name] = descriptor
        if len(self._descriptors) > self._max_open:
            self._close(self._descriptors.popitem(last=False)[1])
        return descriptor

    def _close_deleted(self) -> None:
        """The disk gets their room back only then."""
        for name, descriptor in list(self._descriptors.items()):
            if os.fstat(descriptor).st_nlink == 0:
                self._close(self._descriptors.pop(name))

    def _index(self, path: Path, descriptor: int, sample_count: int) -> ShardIndex:
        index = self._indexes.get(descriptor)
        if index is None:
            try:
                index = self._indexes[descriptor] = ShardIndex.read(descriptor)
            except ValueError as error:
                raise ShardDamaged(f"{str(path)!r}: {error}") from error
        if len(index) != sample_count:
            raise ShardDamaged(f"{str(path)!r}: {len(index)} samples, and the manifest says {sample_count}")
        return index


def read_index(path: Path) -> ShardIndex:
    """Of the shard file at ``path``. Raises FileNotFoundError, ShardDamaged."""
    with path.open("rb", buffering=0) as file:
        try:
            return ShardIndex.read(file.fileno())
        except ValueError as error:
            raise ShardDamaged(f"{str(path)!r}: {error}") from error


def _sample(path: Path, descriptor: int, entry: SampleEntry, dataset_name: str, shard_name: str) -> Sample:
    """Fields that lie close together, as a tar's do, cost one read."""
    sample: Sample = {"__key__": entry.key, "__dataset__": dataset_name, "__shard__": shard_name}
    if len(entry.fields) == 1:
        ((extension, offset, size),) = entry.fields
        sample[extension] = _read(path, descriptor, offset, size, entry.key)
        return sample
    start = min(offset for _, offset, _ in entry.fields)
    end = max(offset + size for _, offset, size in entry.fields)
    if end - start > MOST_GAPS * sum(size for _, _, size in entry.fields) + PAGE_BYTES:
        for extension, offset, size in entry.fields:
            sample[extension] = _read(path, descriptor, offset, size, entry.key)
        return sample
    whole = _read(path, descriptor, start, end - start, entry.key)
    for extension, offset, size in entry.fields:
        sample[extension] = whole[offset - start : offset - start + size]
    return sample


def _read(path: Path, descriptor: int, offset: int, size: int, key: str) -> bytes:
    data = os.pread(descriptor, size, offset)
    while len(data) < size and (more := os.pread(descriptor, size - len(data), offset + len(data))):
        data += more  # one read returns at most 2 GiB
    if len(data) < size:
        raise ShardDamaged(f"{str(path)!r}: sample {key!r} is cut short")
    return data


def read_sample(
    path: Path, manifest: Manifest, shard_index: int, sample_index: int, reader: SampleReader | None = None
) -> Sample:
    """`SampleReader.read` with ``reader``, whose open files are kept, or with a file opened for this call."""
    if reader is not None:
        return reader.read(path, manifest, shard_index, sample_index)
    with SampleReader(max_open=1) as once:
        return once.read(path, manifest, shard_index, sample_index)
