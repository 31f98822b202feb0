"""What was found in the input: samples whose fields are ranges of files, as records in a log.

Nothing of the contents is in memory, and of the samples only a few megabytes, however many there are: the rest
of the log is on disk (`spill`). A `ScannedSample` exists only while somebody looks at it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple, overload

from p2p_dmc.data.index import (
    MAX_EXTENSION_BYTES,
    MAX_EXTENSIONS,
    MAX_FIELDS,
    MAX_KEY_BYTES,
    decode_key,
    encode_key,
)
from p2p_dmc.data.manifest import MAX_CLASSES, RESERVED
from p2p_dmc.data.spill import RECORD_BYTES, Log
from p2p_dmc.data.tar import member_bytes
from p2p_dmc.errors import UserError

Stamp = tuple[int, int]
"""Of a file: its size in bytes, when it was last written to (ns)."""


class FileField(NamedTuple):
    """One field: ``head``, then what lies at ``offset`` of the file; ``size`` bytes in all."""

    extension: str
    path: str
    size: int
    offset: int = 0
    head: bytes = b""


class ScannedSample(NamedTuple):
    """One sample. ``fields`` is sorted by extension; ``depth``: of the folders that make a group."""

    key: str
    fields: tuple[FileField, ...]
    depth: int = 1

    @property
    def group(self) -> str:
        """What folder mode keeps together."""
        return group_of(self.key, self.depth)


def group_of(key: str, depth: int) -> str:
    """The folder at ``depth`` (1 is top level) that holds the key, or its own folder where that is less deep.

    A loose file beside the top-level folders is a group of its own, ``./<stem>``, so that many loose files
    can spread over shards.
    """
    folders = key.split("/")[:-1]
    return "/".join(folders[:depth]) if folders else f"./{key}"


def member_name(key: str, extension: str) -> bytes:
    """A field's name in a tar."""
    return encode_key(f"{key}.{extension}")


class Tally:
    """What some samples come to."""

    __slots__ = ("field_bytes", "fields", "key_bytes", "samples", "shapes", "tar_bytes")

    def __init__(self) -> None:
        self.samples = self.fields = self.key_bytes = self.field_bytes = self.tar_bytes = 0
        self.shapes: set[int] = set()
        """Numbers of the tuples of extensions seen."""

    def add(self, other: Tally) -> None:
        self.samples += other.samples
        self.fields += other.fields
        self.key_bytes += other.key_bytes
        self.field_bytes += other.field_bytes
        self.tar_bytes += other.tar_bytes
        self.shapes |= other.shapes


class _Texts:
    """Paths or heads: the first few thousand different ones by number, later ones written out."""

    MOST = 4096
    WRITTEN_OUT = (1 << 32) - 1

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {b"": 0}
        self._texts = [b""]

    def encode(self, text: bytes) -> tuple[int, bytes]:
        """(number, what follows the record)."""
        number = self._numbers.get(text)
        if number is not None:
            return number, b""
        if len(self._texts) < self.MOST:
            self._numbers[text] = len(self._texts)
            self._texts.append(text)
            return len(self._texts) - 1, b""
        return self.WRITTEN_OUT, _LENGTH.pack(len(text)) + text

    def decode(self, number: int, record: bytes, at: int) -> tuple[bytes, int]:
        """(text, where what follows goes on)."""
        if number != self.WRITTEN_OUT:
            return self._texts[number], at
        (size,) = _LENGTH.unpack_from(record, at)
        return record[at + 4 : at + 4 + size], at + 4 + size


_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<HIQQ")  # bytes of the key, shape, bytes in all fields, bytes of tar
_FIELD = struct.Struct("<IIQQ")  # path, head, offset, size


class Book:
    """How samples become records and records samples; the texts that they share."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._paths, self._heads = _Texts(), _Texts()
        self._path_names: dict[int, str] = {}
        self._shapes: list[tuple[str, ...]] = []
        self._shape_numbers: dict[tuple[str, ...], int] = {}
        self._extensions: set[str] = set()

    def encode(self, key: str, fields: Sequence[FileField]) -> bytes:
        """Raises UserError for what no manifest may say."""
        fields = sorted(fields) if len(fields) > 1 else fields
        shape = tuple(one.extension for one in fields)
        number = self._shape_numbers.get(shape)
        if number is None:
            number = self._new_shape(key, shape, fields)
        place = encode_key(key)
        if not 1 <= len(place) <= MAX_KEY_BYTES:
            raise UserError(f"{fields[0].path!r:.300}: path longer than {MAX_KEY_BYTES} bytes; shorten it")
        if b"\0" in place:
            raise UserError(f"{fields[0].path!r:.300}: key {key!r:.300} has a NUL in it; rename it")
        parts, after = [place], []
        field_bytes = tar_bytes = 0
        for extension, path, size, offset, head in fields:
            path_number, written_path = self._paths.encode(os.fsencode(path))
            head_number, written_head = self._heads.encode(head) if head else (0, b"")
            parts.append(_FIELD.pack(path_number, head_number, offset, size))
            after += [written_path, written_head]
            field_bytes += size
            tar_bytes += member_bytes(place + b"." + encode_key(extension), size)
        return b"".join([_HEAD.pack(len(place), number, field_bytes, tar_bytes), *parts, *after])

    def _new_shape(self, key: str, shape: tuple[str, ...], fields: Sequence[FileField]) -> int:
        if len(shape) > MAX_FIELDS:
            raise UserError(
                f"sample {key!r}: more than {MAX_FIELDS} files share this stem; "
                f"rename them, or choose another rule with --stem"
            )
        for extension, path, *_ in fields:
            if extension in RESERVED:
                raise UserError(f"{path!r}: the extension {extension!r} is reserved; rename the file")
            size = len(encode_key(extension))
            if not 1 <= size <= MAX_EXTENSION_BYTES or set(extension) & {"/", "\0"}:
                raise UserError(f"{path!r}: {extension!r:.300} cannot be the name of a field; rename it")
            self._extensions.add(extension)
        if len(self._extensions) > MAX_EXTENSIONS:
            raise UserError(f"more than {MAX_EXTENSIONS} different extensions; rename the files")
        self._shape_numbers[shape] = len(self._shapes)
        self._shapes.append(shape)
        return len(self._shapes) - 1

    def decode(self, record: bytes) -> ScannedSample:
        size, shape, _, _ = _HEAD.unpack_from(record)
        at = _HEAD.size + size
        key, extensions = decode_key(record[_HEAD.size : at]), self._shapes[shape]
        after = at + _FIELD.size * len(extensions)
        fields = []
        for extension, (path_number, head_number, offset, field_size) in zip(
            extensions, _FIELD.iter_unpack(record[at:after]), strict=True
        ):
            path = self._path_names.get(path_number)
            if path is None:
                written, after = self._paths.decode(path_number, record, after)
                path = os.fsdecode(written)
                if path_number != _Texts.WRITTEN_OUT:
                    self._path_names[path_number] = path
            head, after = self._heads.decode(head_number, record, after)
            fields.append(FileField(extension, path, field_size, offset, head))
        return ScannedSample(key, tuple(fields), self.depth)

    def measure(self, record: bytes, into: Tally) -> None:
        """Add one sample, without making it."""
        size, shape, field_bytes, tar_bytes = _HEAD.unpack_from(record)
        into.samples += 1
        into.fields += len(self._shapes[shape])
        into.key_bytes += size
        into.field_bytes += field_bytes
        into.tar_bytes += tar_bytes
        into.shapes.add(shape)

    def extensions(self, tally: Tally) -> tuple[str, ...]:
        """The fields of the samples counted there, sorted."""
        return tuple(sorted({name for shape in tally.shapes for name in self._shapes[shape]}))


def key_of(record: bytes) -> bytes:
    """A record's key."""
    return record[_HEAD.size : _HEAD.size + int.from_bytes(record[:2], "little")]


class Samples(Sequence[ScannedSample]):
    """Some samples in some order: ranges of a log, which others may share.

    They are read from the first on; a single one is found by counting.
    """

    def __init__(self, book: Book, log: Log, ranges: Sequence[tuple[int, int]], tally: Tally) -> None:
        self.book = book
        self.log = log
        self.ranges = ranges
        self.tally = tally

    @classmethod
    def of(
        cls, samples: Iterable[tuple[str, Sequence[FileField]]], depth: int = 1, folder: Path | None = None
    ) -> Samples:
        """Take samples in, as ``(key, fields)``, in the order given. UserError for what no manifest may say.

        ``folder``: where the log goes when it is larger than memory is to be.
        """
        book = Book(depth)
        return cls.written(book, (book.encode(key, fields) for key, fields in samples), folder)

    @classmethod
    def written(cls, book: Book, records: Iterable[bytes], folder: Path | None) -> Samples:
        """In a log of their own."""
        log, tally = Log(folder), Tally()
        for record in records:
            book.measure(record, tally)
            log.append(record)
        return cls(book, log, [(0, log.end)], tally)

    def records(self) -> Iterator[bytes]:
        for start, stop in self.ranges:
            yield from self.log.read(start, stop)

    def __len__(self) -> int:
        return self.tally.samples

    def __iter__(self) -> Iterator[ScannedSample]:
        return map(self.book.decode, self.records())

    @overload
    def __getitem__(self, index: int) -> ScannedSample: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ScannedSample, ...]: ...
    def __getitem__(self, index: int | slice) -> ScannedSample | tuple[ScannedSample, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return next(islice(self, index % len(self), None))

    def key_bytes(self) -> Iterator[bytes]:
        """Every key as bytes, without making the samples."""
        return map(key_of, self.records())

    def cut(self, counts: Iterable[int]) -> Iterator[Samples]:
        """The first so many, the next so many and so on, without a copy."""
        records, at = self.records(), 0
        assert len(self.ranges) == 1
        start = self.ranges[0][0]
        for count in counts:
            tally, at = Tally(), start
            for record in islice(records, count):
                self.book.measure(record, tally)
                at += RECORD_BYTES + len(record)
            yield Samples(self.book, self.log, [(start, at)], tally)
            start = at

    def divided(self, is_second: Callable[[bytes], bool], folder: Path | None) -> tuple[Samples, Samples]:
        """Those of whose key it says no, and those of whose key it says yes, in the same order."""
        logs, tallies = (Log(folder), Log(folder)), (Tally(), Tally())
        for record in self.records():
            side = is_second(key_of(record))
            self.book.measure(record, tallies[side])
            logs[side].append(record)
        first, second = (
            Samples(self.book, log, [(0, log.end)], tally) for log, tally in zip(logs, tallies, strict=True)
        )
        return first, second

    @property
    def extensions(self) -> tuple[str, ...]:
        """The fields seen, sorted."""
        return self.book.extensions(self.tally)

    @property
    def depth(self) -> int:
        """Of the folders that make a group."""
        return self.book.depth


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
    """A tar that can be a shard as it is, with ``samples`` samples; those of several follow each other.

    ``size_bytes`` of the file are the tar; ``missing_bytes`` of zeros more make its end what it has to be.
    """

    path: str
    size_bytes: int
    missing_bytes: int
    samples: int


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
    converted_bytes: int = 0
    """What had to be converted or decompressed, which lies beside the store until the shards are written."""
    folder: Path | None = None
    """Where what is too large for memory goes, in files without a name; None is the system's."""

    @property
    def total_bytes(self) -> int:
        """Bytes in all fields together."""
        return self.samples.tally.field_bytes

    @property
    def extensions(self) -> tuple[str, ...]:
        """The fields seen, sorted."""
        return self.samples.extensions

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the top-level folders, sorted, as ImageFolder counts classes."""
        return class_names(self.samples)


def class_names(samples: Samples) -> tuple[str, ...]:
    """Names of the samples' top-level folders, sorted; none when there are more than a manifest names.

    A tar's member may lie in a folder of no name, or of one longer than a file's may be: those are no classes.
    """
    names: set[bytes] = set()
    for key in samples.key_bytes():
        folder, slash, _ = key.partition(b"/")
        if slash and 1 <= len(folder) <= MAX_EXTENSION_BYTES:
            names.add(folder)
            if len(names) > MAX_CLASSES:
                return ()
    return tuple(sorted(decode_key(name) for name in names))
