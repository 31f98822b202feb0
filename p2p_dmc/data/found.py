"""What was found in the input: samples whose fields are ranges of files, packed into columns.

Nothing of the contents is in memory, and a sample costs its key and about 45 bytes: a `ScannedSample` exists
only while somebody looks at it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from p2p_dmc.data.manifest import (
    MAX_EXTENSION_BYTES,
    MAX_EXTENSIONS,
    MAX_FIELDS,
    MAX_KEY_BYTES,
    decode_key,
    encode_key,
)
from p2p_dmc.errors import UserError

Rows = npt.NDArray[np.int64]
Stamp = tuple[int, int]
"""Of a file: its size in bytes, when it was last written to (ns)."""

RESERVED = frozenset({"__key__", "__shard__"})


class FileField(NamedTuple):
    """One field: ``head``, then what lies at ``offset`` of the file; ``size`` bytes in all."""

    extension: str
    path: str
    size: int
    offset: int = 0
    head: bytes = b""


@dataclass(frozen=True, slots=True)
class ScannedSample:
    """One sample. ``fields`` is sorted by extension; ``group`` is what folder mode keeps together."""

    key: str
    group: str
    fields: tuple[FileField, ...]


def group_of(key: str, depth: int) -> str:
    """The folder at ``depth`` (1 is top level) that holds the key, or its own folder where that is less deep.

    A loose file beside the top-level folders is a group of its own, ``./<stem>``, so that many loose files
    can spread over shards.
    """
    folders = key.split("/")[:-1]
    return "/".join(folders[:depth]) if folders else f"./{key}"


class _Table:
    """The columns. Samples are added at the end and never change."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.count = 0
        self._keys = bytearray()
        self._key_ends = array("Q", [0])
        self._field_ends = array("Q", [0])
        self._extension_numbers = array("H")
        self._path_numbers = array("I")
        self._head_numbers = array("I")
        self._offsets = array("Q")
        self._sizes = array("Q")
        self._extensions: dict[str, int] = {}
        self._heads: dict[bytes, int] = {b"": 0}
        self._paths: list[str] = [""]
        self._names: list[str] = []
        self._prefixes: list[bytes] = [b""]

    def add(self, key: str, fields: Iterable[FileField]) -> None:
        for extension, path, size, offset, head in sorted(fields):
            if extension not in self._extensions:
                self._new_extension(extension, path)
            if head not in self._heads:
                self._heads[head] = len(self._prefixes)
                self._prefixes.append(head)
            if path != self._paths[-1]:
                self._paths.append(path)
            self._extension_numbers.append(self._extensions[extension])
            self._head_numbers.append(self._heads[head])
            self._path_numbers.append(len(self._paths) - 1)
            self._offsets.append(offset)
            self._sizes.append(size)
        self._keys += encode_key(key)
        self._key_ends.append(len(self._keys))
        self._field_ends.append(len(self._sizes))
        self.count += 1

    def _new_extension(self, extension: str, path: str) -> None:
        if len(self._names) == MAX_EXTENSIONS:
            raise UserError(f"more than {MAX_EXTENSIONS} different extensions; rename the files")
        if extension in RESERVED:
            raise UserError(f"{path!r}: the extension {extension!r} is reserved; rename the file")
        size = len(encode_key(extension))
        if not 1 <= size <= MAX_EXTENSION_BYTES or set(extension) & {"/", "\0"}:
            raise UserError(f"{path!r}: {extension!r:.300} cannot be the name of a field; rename it")
        self._extensions[extension] = len(self._names)
        self._names.append(extension)

    def key_bytes(self, row: int) -> bytes:
        return bytes(self._keys[self._key_ends[row] : self._key_ends[row + 1]])

    def sample(self, row: int) -> ScannedSample:
        key = decode_key(self.key_bytes(row))
        fields = tuple(
            FileField(
                self._names[self._extension_numbers[i]],
                self._paths[self._path_numbers[i]],
                self._sizes[i],
                self._offsets[i],
                self._prefixes[self._head_numbers[i]],
            )
            for i in range(self._field_ends[row], self._field_ends[row + 1])
        )
        return ScannedSample(key, group_of(key, self.depth), fields)

    def extension_names(self, row: int) -> Iterator[str]:
        for i in range(self._field_ends[row], self._field_ends[row + 1]):
            yield self._names[self._extension_numbers[i]]


class Samples(Sequence[ScannedSample]):
    """Some samples in some order; several of these may share one table."""

    __slots__ = ("_rows", "_table")

    def __init__(self, table: _Table, rows: Rows) -> None:
        self._table = table
        self._rows = rows

    @classmethod
    def of(cls, samples: Iterable[tuple[str, Iterable[FileField]]], depth: int = 1) -> Samples:
        """Take samples in, as ``(key, fields)``, in the order given. UserError for what no manifest may say."""
        table = _Table(depth)
        for key, fields in samples:
            checked = list(fields)
            _check_sample(key, checked)
            table.add(key, checked)
        return cls(table, np.arange(table.count, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[ScannedSample]:
        return map(self._table.sample, self._rows.tolist()) if len(self._rows) < 1024 else self._each()

    def _each(self) -> Iterator[ScannedSample]:
        for row in self._rows:
            yield self._table.sample(int(row))

    @overload
    def __getitem__(self, index: int) -> ScannedSample: ...
    @overload
    def __getitem__(self, index: slice) -> Samples: ...
    def __getitem__(self, index: int | slice) -> ScannedSample | Samples:
        if isinstance(index, slice):
            return Samples(self._table, self._rows[index])
        return self._table.sample(int(self._rows[index]))

    def pick(self, places: Rows | slice) -> Samples:
        """Those at these places, in this order."""
        return Samples(self._table, self._rows[places])

    def key_bytes(self) -> Iterator[bytes]:
        """Every key as bytes, without making the samples."""
        for row in self._rows:
            yield self._table.key_bytes(int(row))

    def by_key(self) -> Samples:
        """The same in the order of their keys' bytes."""
        return self.pick(key_order(self))

    def extensions(self) -> set[str]:
        """The fields seen."""
        return {name for row in self._rows for name in self._table.extension_names(int(row))}

    @property
    def depth(self) -> int:
        """Of the folders that make a group."""
        return self._table.depth


def key_order(samples: Samples) -> Rows:
    """The places of ``samples`` sorted by their keys' bytes."""
    keys = list(samples.key_bytes())
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)


def _check_sample(key: str, fields: Sequence[FileField]) -> None:
    place = fields[0].path if fields else key
    if not 1 <= len(encode_key(key)) <= MAX_KEY_BYTES:
        raise UserError(f"{place!r:.300}: path longer than {MAX_KEY_BYTES} bytes; shorten it")
    if len(fields) > MAX_FIELDS:
        raise UserError(
            f"sample {key!r}: more than {MAX_FIELDS} files share this stem; "
            f"rename them, or choose another rule with --stem"
        )


@dataclass(slots=True)
class Skipped:
    """How many entries were passed over, by reason."""

    hidden: int = 0
    links: int = 0
    excluded: int = 0
    special: int = 0
    unused: int = 0
    """Parts of a file that are no sample: blank lines, members of a tar without an extension."""

    def describe(self) -> str:
        """In words; empty when nothing was passed over."""
        reasons = (
            (self.hidden, "hidden"),
            (self.links, "links leaving the tree or to folders"),
            (self.excluded, "not matching --include or matching --exclude"),
            (self.special, "special files"),
            (self.unused, "blank lines or members without an extension"),
        )
        return ", ".join(f"{count} {what}" for count, what in reasons if count)

    @property
    def total(self) -> int:
        return self.hidden + self.links + self.excluded + self.special + self.unused


@dataclass(frozen=True, slots=True)
class WholeTar:
    """A tar that can be a shard as it is; its samples are ``start`` to ``stop`` of the scan's."""

    path: str
    size_bytes: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Scan:
    """What `formats.scan` found. Files in folders come sorted by key; records in the order of their files."""

    root: Path
    samples: Samples
    skipped: Skipped = field(default_factory=Skipped)
    kind: str = "folder of files"
    """What was recognised, in words."""
    stamps: dict[str, Stamp] = field(default_factory=dict)
    """Files of which samples are parts, as they were when it was found out where the parts lie."""
    identity: bytes = b""
    """Digest of all files' names, sizes and times: another one, another input."""
    tars: tuple[WholeTar, ...] = ()
    """When all of the input can be taken as it is."""

    @property
    def total_bytes(self) -> int:
        """Bytes in all fields together."""
        return sum(size for sample in self.samples for _, _, size, *_ in sample.fields)

    @property
    def extensions(self) -> tuple[str, ...]:
        """The fields seen, sorted."""
        return tuple(sorted(self.samples.extensions()))

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the top-level folders, sorted, as ImageFolder counts classes."""
        return class_names(self.samples)


def class_names(samples: Samples) -> tuple[str, ...]:
    """Names of the samples' top-level folders, sorted."""
    names = {key.partition(b"/")[0] for key in samples.key_bytes() if b"/" in key}
    return tuple(sorted(decode_key(name) for name in names))
