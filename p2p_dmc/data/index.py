"""The index of a shard: where in the file each field of each sample lies, so that no tar is parsed to read one.

It stands in the shard's own file, behind the end of the tar, where programs that read tars have stopped. So it
is covered by the shard's digest, travels with the shard, and is in memory only while somebody reads the shard:
neither a manifest nor a peer grows with the number of samples. n samples with f fields in all, little endian:

    field names, NUL between them | key end u32[n] | field end u32[n] |
    name number u16[f] | offset/512 u32[f] | size u64[f] | keys | footer
"""

from __future__ import annotations

import itertools
import os
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 512  # tar's unit: every field starts at a multiple of it

MAX_SAMPLES = 1 << 22
"""In a shard: what a reader has to hold of its index stays below some 200 MB, and at some 2 MB as a rule."""
MAX_FIELDS = 16
MAX_EXTENSIONS = (1 << 16) - 1
MAX_EXTENSION_BYTES = 255
MAX_KEY_BYTES = 4096

_FOOTER = struct.Struct("<IIIQ8s")  # bytes of names, samples, fields, bytes of keys
_MAGIC = b"dmcindex"
_SAMPLE_BYTES = 4 + 4
_FIELD_BYTES = 2 + 4 + 8


def encode_key(key: str) -> bytes:
    """A key's bytes: UTF-8, with undecodable bytes of a file name as they were."""
    return key.encode("utf-8", "surrogateescape")


def decode_key(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def join_names(names: Sequence[str]) -> bytes:
    return b"\0".join([encode_key(name) for name in names])


def split_names(data: bytes, limit: int) -> tuple[str, ...]:
    """Raises ValueError for more than ``limit``."""
    check(data.count(b"\0") < limit, "number of names", "too many")
    return tuple(decode_key(name) for name in data.split(b"\0")) if data else ()


def check(holds: object, what: str, value: object) -> None:
    """Raise ValueError that says what has which value, unless it holds."""
    if not holds:
        raise ValueError(f"{what}: {value!r:.200}")


def check_names(what: str, names: Sequence[str], limit: int) -> None:
    """Sorted, distinct, none empty or longer than a file name can be. Raises ValueError."""
    check(len(names) <= limit, f"number of {what} names", len(names))
    for name in names:
        valid = (
            isinstance(name, str)
            and 1 <= len(encode_key(name)) <= MAX_EXTENSION_BYTES
            and not set(name) & {"/", "\0"}
        )
        check(valid, f"{what} name", name)
    check(all(a < b for a, b in itertools.pairwise(names)), f"{what} names", "not sorted or not distinct")


class SampleEntry(NamedTuple):
    """One sample in a shard: ``fields`` are (extension, offset in the shard, size), both in bytes."""

    key: str
    fields: tuple[tuple[str, int, int], ...]


class IndexBuilder:
    """Collects a shard's samples in the order of the file. ``extensions``: all that will come, sorted."""

    def __init__(self, extensions: Sequence[str]) -> None:
        self._names = join_names(extensions)
        self._number_of = {extension: number for number, extension in enumerate(extensions)}
        self._keys = bytearray()
        self._key_ends, self._field_ends = array("I"), array("I")
        self._numbers, self._blocks, self._sizes = array("H"), array("I"), array("Q")

    def add(self, key: bytes, fields: Sequence[tuple[str, int, int]]) -> None:
        """``fields`` as in `SampleEntry`, sorted by extension. Raises ValueError."""
        for extension, offset, size in fields:
            if offset % BLOCK_BYTES:
                raise ValueError("a field that does not start at a tar block")
            self._numbers.append(self._number_of[extension])
            self._blocks.append(offset // BLOCK_BYTES)
            self._sizes.append(size)
        self._keys += key
        self._key_ends.append(len(self._keys))
        self._field_ends.append(len(self._sizes))

    def to_bytes(self) -> bytes:
        columns = (self._key_ends, self._field_ends, self._numbers, self._blocks, self._sizes)
        packed = [np.array(column).astype(f"<u{column.itemsize}").tobytes() for column in columns]
        counts = (len(self._names), len(self._key_ends), len(self._sizes), len(self._keys))
        return b"".join([self._names, *packed, self._keys, _FOOTER.pack(*counts, _MAGIC)])


def index_bytes(names_bytes: int, samples: int, fields: int, keys_bytes: int) -> int:
    """The size of an index."""
    return names_bytes + _SAMPLE_BYTES * samples + _FIELD_BYTES * fields + keys_bytes + _FOOTER.size


class ShardIndex(Sequence[SampleEntry]):
    """A shard's samples in the order of the file; an entry is made when somebody looks at it.

    Invariant: every field lies in the tar, in front of the index; checked when it is built, ValueError.
    """

    def __init__(self, data: bytes, shard_bytes: int) -> None:
        """``data``: the index alone, footer included, of a file of ``shard_bytes``."""
        check(len(data) >= _FOOTER.size, "index", f"{len(data)} bytes")
        names, samples, fields, keys, magic = _FOOTER.unpack(data[-_FOOTER.size :])
        check(magic == _MAGIC, "index", "none at the end of the shard")
        check(len(data) == index_bytes(names, samples, fields, keys), "index", f"{len(data)} bytes")
        check(1 <= samples <= MAX_SAMPLES, "samples in a shard", samples)
        self.tar_bytes = shard_bytes - len(data)
        self.extensions = split_names(data[:names], MAX_EXTENSIONS)
        check_names("field", self.extensions, MAX_EXTENSIONS)
        counts = (("I", samples), ("I", samples), ("H", fields), ("I", fields), ("Q", fields))
        columns, at = [], names
        for code, count in counts:
            column = array(code)
            column.frombytes(data[at : at + count * column.itemsize])
            if sys.byteorder == "big":
                column.byteswap()
            columns.append(column)
            at += count * column.itemsize
        self._columns = tuple(columns)
        """Ends of keys, ends of fields; number of the name, block and size of each field. Single values come out of
        these several times as quickly as out of numpy's."""
        self._keys = data[at : at + keys]
        self.memory_bytes = sum(len(column) * column.itemsize for column in columns) + keys
        self._check(fields, keys)

    @classmethod
    def read(cls, descriptor: int) -> ShardIndex:
        """Of an open shard. Raises ValueError when there is no whole index at its end."""
        shard_bytes = os.fstat(descriptor).st_size
        return cls(
            os.pread(descriptor, size := _size_at_end(descriptor, shard_bytes), shard_bytes - size),
            shard_bytes,
        )

    def _check(self, fields: int, keys: int) -> None:
        """Fields inside the tar, without overlap, sorted by extension within each sample.

        In which order they lie in the file is free, so that others' tars can be shards.
        """
        key_ends, field_ends, numbers, blocks, sizes = (np.frombuffer(c, c.typecode) for c in self._columns)
        check(key_ends[-1] == keys and field_ends[-1] == fields, "index", "ends do not fit")
        key_sizes, counts = _steps(key_ends), _steps(field_ends)
        check(key_sizes.min() >= 1 and key_sizes.max() <= MAX_KEY_BYTES, "key sizes", "out of bounds")
        check(counts.min() >= 1 and counts.max() <= MAX_FIELDS, "fields per sample", "out of bounds")
        check(numbers.max() < len(self.extensions), "name number", "not in the list of fields")
        is_first = np.zeros(fields, dtype=bool)
        is_first[0] = True
        is_first[field_ends[:-1]] = True
        check((is_first | (_steps(numbers) > 0)).all(), "fields of a sample", "not sorted or distinct")
        check(sizes.max() <= self.tar_bytes, "field size", "larger than the shard")
        starts = blocks.astype(np.int64) * BLOCK_BYTES
        ends = starts + sizes.astype(np.int64)
        check(ends.max() <= self.tar_bytes, "field", "ends outside the tar")
        if not (starts[1:] >= ends[:-1]).all():  # not in the order of the file
            order = np.lexsort((ends, starts))  # an empty field may begin where the next one does
            check((starts[order][1:] >= ends[order][:-1]).all(), "fields", "overlap")

    def __len__(self) -> int:
        return len(self._columns[0])

    def key_bytes(self, sample_index: int) -> bytes:
        key_ends = self._columns[0]
        return self._keys[key_ends[sample_index - 1] if sample_index else 0 : key_ends[sample_index]]

    def key(self, sample_index: int) -> str:
        """The key alone, cheaper than the whole entry."""
        return decode_key(self.key_bytes(sample_index))

    def keys(self) -> Iterator[str]:
        """Of every sample, in file order."""
        return map(self.key, range(len(self)))

    def entries(self, sample_indices: Sequence[int]) -> list[SampleEntry]:
        """Of these samples, whose indices are not negative; IndexError. Quicker than one by one."""
        key_ends, field_ends, numbers, blocks, sizes = self._columns
        keys, extensions, alone = self._keys, self.extensions, len(field_ends) == len(sizes)
        found = []
        for i in sample_indices:
            key = decode_key(keys[key_ends[i - 1] if i else 0 : key_ends[i]])
            if alone:  # each sample has one field
                field = extensions[numbers[i]], blocks[i] * BLOCK_BYTES, sizes[i]
                found.append(SampleEntry(key, (field,)))
            else:
                here = range(field_ends[i - 1] if i else 0, field_ends[i])
                fields = [(extensions[numbers[j]], blocks[j] * BLOCK_BYTES, sizes[j]) for j in here]
                found.append(SampleEntry(key, tuple(fields)))
        return found

    @overload
    def __getitem__(self, index: int) -> SampleEntry: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[SampleEntry, ...]: ...
    def __getitem__(self, index: int | slice) -> SampleEntry | tuple[SampleEntry, ...]:
        if isinstance(index, slice):
            return tuple(self.entries(range(*index.indices(len(self)))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a shard with {len(self)}")
        return self.entries((index % len(self),))[0]


def _steps(column: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Each value less the one before it; the first one less nothing."""
    steps = column.astype(np.int64)
    steps[1:] -= column[:-1]
    return steps


def _size_at_end(descriptor: int, shard_bytes: int) -> int:
    """The size of the index that a file ends with; ValueError if it ends with none."""
    check(shard_bytes >= _FOOTER.size, "shard", f"{shard_bytes} bytes")
    footer = os.pread(descriptor, _FOOTER.size, shard_bytes - _FOOTER.size)
    check(len(footer) == _FOOTER.size and footer.endswith(_MAGIC), "index", "none at the end of the shard")
    size = index_bytes(*_FOOTER.unpack(footer)[:4])
    check(size <= shard_bytes, "index", "larger than the shard")
    return size


def tar_bytes_of(descriptor: int) -> int:
    """How much of an open file is in front of an index; all of it if there is none."""
    shard_bytes = os.fstat(descriptor).st_size
    try:
        return shard_bytes - _size_at_end(descriptor, shard_bytes)
    except ValueError:
        return shard_bytes
