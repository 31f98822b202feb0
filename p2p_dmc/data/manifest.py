"""The manifest: an immutable description of a data set, identified by the digest of its bytes.

It names every shard by content digest and says where in the shard each field of each sample lies, so that a
sample is read without parsing tar. A data set of millions of samples stays usable: per shard the index is a
few packed little-endian columns, checked as a whole when the manifest is built or received and read in
place; a `SampleEntry` exists only while somebody looks at it.

On the wire and on disk it is one flat msgpack map in a fixed key order: lists are joined into byte strings,
so decoding a hostile one allocates no more than its own size. There is one encoding per manifest: bytes that
decode but would be encoded otherwise are refused, so equal digests mean equal data sets.

A shard's columns, n samples with f fields in all:

    key size u16[n] | field count u8[n] | extension number u16[f] | offset/512 u32[f] | size u64[f] | keys
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, overload

import msgpack
import numpy as np
import numpy.typing as npt

from p2p_dmc.errors import RemoteProtocolError

Mode = Literal["file", "folder"]
I64 = npt.NDArray[np.int64]

VERSION = 1
DIGEST_BYTES = 16
BLOCK_BYTES = 512  # tar's unit: every field starts at a multiple of it

# Bounds on what a manifest may say. They are generous for data and tight against nonsense.
MAX_MANIFEST_BYTES = 1 << 30
MAX_NAME_CHARACTERS = 128
MAX_SHARDS = 1 << 20
MAX_CLASSES = 1 << 20
MAX_SHARD_BYTES = 1 << 40
MAX_FIELDS = 16
MAX_EXTENSIONS = (1 << 16) - 1
MAX_EXTENSION_BYTES = 255
MAX_KEY_BYTES = 4096
MAX_REPLICAS = 255
MAX_SEED = (1 << 64) - 1

_FIXED_BYTES = 2 + 1  # per sample
_FIELD_BYTES = 2 + 4 + 8  # per field
_KEYS = (
    *("version", "name", "mode", "replicas", "seed"),
    *("fields", "classes", "digests", "sizes", "counts", "index_sizes", "indexes"),
)


def content_digest(data: bytes) -> bytes:
    """BLAKE2b-128, the digest of shards and manifests."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def encode_key(key: str) -> bytes:
    """A key's bytes: UTF-8, with undecodable bytes of a file name as they were."""
    return key.encode("utf-8", "surrogateescape")


def decode_key(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def class_of(key: str) -> str | None:
    """The sample's class, its top-level folder as in ImageFolder; None for a loose file."""
    folder, slash, _ = key.partition("/")
    return folder if slash else None


@dataclass(frozen=True, slots=True)
class SampleEntry:
    """One sample in a shard: ``fields`` are (extension, offset in the shard, size), both in bytes."""

    key: str
    fields: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Columns:
    key_ends: I64
    field_ends: I64
    extension_numbers: npt.NDArray[np.uint16]
    offset_blocks: npt.NDArray[np.uint32]
    sizes: npt.NDArray[np.uint64]
    keys: memoryview


@dataclass(frozen=True)
class ShardEntry:
    """One shard. ``samples`` reads the packed index in place, a sequence of `SampleEntry` in file order.

    Invariant: the packed index is whole and every field lies inside the shard; checked when built.
    """

    digest: bytes
    size_bytes: int
    sample_count: int
    packed: bytes = field(repr=False)
    extensions: tuple[str, ...] = field(repr=False)

    def __post_init__(self) -> None:
        _check(
            isinstance(self.digest, bytes) and len(self.digest) == DIGEST_BYTES, "shard digest", self.digest
        )
        _check_int("shard size", self.size_bytes, 1, MAX_SHARD_BYTES)
        _check_int("samples in a shard", self.sample_count, 1, self.size_bytes // BLOCK_BYTES)
        _check(isinstance(self.packed, bytes), "packed index", type(self.packed))
        _check_columns(self)

    @classmethod
    def build(
        cls, digest: bytes, size_bytes: int, samples: Sequence[SampleEntry], extensions: tuple[str, ...]
    ) -> ShardEntry:
        """Pack the samples' index. Fields of a sample must come sorted by extension. Raises ValueError."""
        number_of = {extension: number for number, extension in enumerate(extensions)}
        fields = [one for sample in samples for one in sample.fields]
        if any(offset % BLOCK_BYTES for _, offset, _ in fields):
            raise ValueError("a field that does not start at a tar block")
        keys = [encode_key(sample.key) for sample in samples]
        packed = b"".join(
            [
                np.array([len(key) for key in keys], dtype="<u2").tobytes(),
                np.array([len(sample.fields) for sample in samples], dtype="<u1").tobytes(),
                np.array([number_of[extension] for extension, _, _ in fields], dtype="<u2").tobytes(),
                np.array([offset // BLOCK_BYTES for _, offset, _ in fields], dtype="<u4").tobytes(),
                np.array([size for _, _, size in fields], dtype="<u8").tobytes(),
                *keys,
            ]
        )
        return cls(digest, size_bytes, len(samples), packed, extensions)

    @property
    def samples(self) -> ShardSamples:
        return ShardSamples(self)

    @cached_property
    def _columns(self) -> _Columns:
        return _unpack(self.packed, self.sample_count)

    def key(self, sample_index: int) -> str:
        """The key alone, cheaper than the whole entry."""
        columns = self._columns
        start = int(columns.key_ends[sample_index - 1]) if sample_index else 0
        return decode_key(bytes(columns.keys[start : int(columns.key_ends[sample_index])]))

    def sample(self, sample_index: int) -> SampleEntry:
        """Entry number ``sample_index``, counted from 0. Raises IndexError."""
        if not 0 <= sample_index < self.sample_count:
            raise IndexError(f"sample {sample_index} of a shard with {self.sample_count}")
        columns = self._columns
        start = int(columns.field_ends[sample_index - 1]) if sample_index else 0
        fields = tuple(
            (
                self.extensions[int(columns.extension_numbers[i])],
                int(columns.offset_blocks[i]) * BLOCK_BYTES,
                int(columns.sizes[i]),
            )
            for i in range(start, int(columns.field_ends[sample_index]))
        )
        return SampleEntry(self.key(sample_index), fields)


class ShardSamples(Sequence[SampleEntry]):
    """A shard's samples as a sequence whose items are made on access."""

    __slots__ = ("_entry",)

    def __init__(self, entry: ShardEntry) -> None:
        self._entry = entry

    def __len__(self) -> int:
        return self._entry.sample_count

    @overload
    def __getitem__(self, index: int) -> SampleEntry: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[SampleEntry, ...]: ...
    def __getitem__(self, index: int | slice) -> SampleEntry | tuple[SampleEntry, ...]:
        if isinstance(index, slice):
            return tuple(self._entry.sample(i) for i in range(*index.indices(len(self))))
        return self._entry.sample(index + len(self) if index < 0 else index)


@dataclass(frozen=True)
class Manifest:
    """A data set's description. Deterministic: no time, host or path is in it. ValueError if built wrong.

    ``fields`` are the extensions seen and ``classes`` the top-level folders, both sorted.
    """

    name: str
    mode: Mode
    replicas: int
    seed: int
    fields: tuple[str, ...]
    classes: tuple[str, ...]
    shards: tuple[ShardEntry, ...] = field(repr=False)
    version: int = VERSION

    def __post_init__(self) -> None:
        _check(self.version == VERSION, "manifest version", self.version)
        check_settings(self.name, self.mode, self.replicas, self.seed)
        _check_names("field", self.fields, MAX_EXTENSIONS)
        _check("__key__" not in self.fields and "__shard__" not in self.fields, "fields", self.fields)
        _check(1 <= len(self.shards) <= MAX_SHARDS, "number of shards", len(self.shards))
        _check_names("class", self.classes, min(MAX_CLASSES, len(self)))
        _check(len(set(self.shard_digests)) == len(self.shards), "shards", "one of them is listed twice")
        _check(all(self._shares_fields(shard) for shard in self.shards), "shards", "other extensions")

    def _shares_fields(self, shard: ShardEntry) -> bool:
        return shard.extensions is self.fields or shard.extensions == self.fields

    def __len__(self) -> int:
        """Number of samples."""
        return self._sample_total

    @cached_property
    def _sample_total(self) -> int:
        return sum(shard.sample_count for shard in self.shards)

    @cached_property
    def digest(self) -> bytes:
        """The data set's identity, the digest of `to_bytes`: 16 bytes."""
        state = hashlib.blake2b(self._head(), digest_size=DIGEST_BYTES)
        for shard in self.shards:
            state.update(shard.packed)
        return state.digest()

    @cached_property
    def shard_digests(self) -> tuple[bytes, ...]:
        return tuple(shard.digest for shard in self.shards)

    @cached_property
    def shard_sizes(self) -> tuple[int, ...]:
        """Bytes per shard file."""
        return tuple(shard.size_bytes for shard in self.shards)

    @cached_property
    def sample_counts(self) -> tuple[int, ...]:
        return tuple(shard.sample_count for shard in self.shards)

    @property
    def total_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(self.shard_sizes)

    def keys(self) -> Iterator[str]:
        """Every sample's key, shard by shard, in file order."""
        for shard in self.shards:
            for index in range(shard.sample_count):
                yield shard.key(index)

    def _head(self) -> bytes:
        """The encoding up to the shards' indexes, which make up nearly all of it and follow as they are."""
        values = (
            self.version,
            self.name,
            self.mode,
            self.replicas,
            self.seed,
            _join_names(self.fields),
            _join_names(self.classes),
            b"".join(self.shard_digests),
            np.array(self.shard_sizes, dtype="<u8").tobytes(),
            np.array(self.sample_counts, dtype="<u4").tobytes(),
            np.array([len(shard.packed) for shard in self.shards], dtype="<u4").tobytes(),
            b"",
        )
        encoded = msgpack.packb(dict(zip(_KEYS, values, strict=True)))
        assert isinstance(encoded, bytes) and encoded.endswith(b"\xc4\0")  # the empty byte string
        return encoded[:-2] + _bin_header(sum(len(shard.packed) for shard in self.shards))

    def to_bytes(self) -> bytes:
        """The one canonical encoding."""
        return b"".join([self._head(), *(shard.packed for shard in self.shards)])

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Decode what another peer sent. Raises RemoteProtocolError for what `to_bytes` would not say."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise RemoteProtocolError(f"manifest of {len(data)} bytes, more than {MAX_MANIFEST_BYTES}")
        try:
            # Only flat maps: msgpack bounds byte strings by the data's own length before it allocates.
            content = msgpack.unpackb(data, strict_map_key=True, max_array_len=0, max_map_len=len(_KEYS))
            manifest = cls._from_content(content)
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
            raise RemoteProtocolError(f"malformed manifest: {error}") from error
        head = manifest._head()  # the rest of the data is in the shards as it came
        if data[: len(head)] != head:
            raise RemoteProtocolError("manifest in an encoding that is not the canonical one")
        return manifest

    @classmethod
    def _from_content(cls, content: Any) -> Manifest:
        _check(isinstance(content, dict), "manifest", type(content))
        version = content.get("version")
        _check(version == VERSION, f"this program reads version {VERSION}, not", version)
        _check(tuple(content) == _KEYS, "manifest keys", tuple(content))
        for key in _KEYS[5:]:
            _check(isinstance(content[key], bytes), key, type(content[key]))
        fields = _split_names(content["fields"], MAX_EXTENSIONS)
        _check_names("field", fields, MAX_EXTENSIONS)
        head = {key: content[key] for key in ("name", "mode", "replicas", "seed")}
        classes = _split_names(content["classes"], MAX_CLASSES)
        return cls(**head, fields=fields, classes=classes, shards=tuple(_shards_of(content, fields)))


def _bin_header(size: int) -> bytes:
    """What msgpack puts in front of a byte string."""
    if size < 1 << 8:
        return struct.pack(">BB", 0xC4, size)
    return struct.pack(">BH", 0xC5, size) if size < 1 << 16 else struct.pack(">BI", 0xC6, size)


def _join_names(names: tuple[str, ...]) -> bytes:
    return b"\0".join([encode_key(name) for name in names])


def _split_names(data: bytes, limit: int) -> tuple[str, ...]:
    _check(data.count(b"\0") < limit, "number of names", "too many")
    return tuple(decode_key(name) for name in data.split(b"\0")) if data else ()


def _shards_of(content: dict[str, Any], fields: tuple[str, ...]) -> Iterator[ShardEntry]:
    digests, packed = content["digests"], content["indexes"]
    count, rest = divmod(len(digests), DIGEST_BYTES)
    _check(rest == 0 and count <= MAX_SHARDS, "shard digests", len(digests))
    for key, width in (("sizes", 8), ("counts", 4), ("index_sizes", 4)):
        _check(len(content[key]) == width * count, key, len(content[key]))
    sizes = np.frombuffer(content["sizes"], "<u8").tolist()
    counts = np.frombuffer(content["counts"], "<u4").tolist()
    ends = np.cumsum(np.frombuffer(content["index_sizes"], "<u4"), dtype=np.int64).tolist()
    _check((ends[-1] if ends else 0) == len(packed), "indexes", len(packed))
    start = 0
    for i, end in enumerate(ends):
        digest = digests[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)]
        yield ShardEntry(digest, sizes[i], counts[i], packed[start:end], fields)
        start = end


def check_settings(name: str, mode: str, replicas: int, seed: int) -> None:
    """Raise ValueError for what no manifest may say; seeding asks before it writes."""
    named = isinstance(name, str) and 1 <= len(name) <= MAX_NAME_CHARACTERS
    _check(named and name.isprintable(), "data set name", name)
    _check(mode in ("file", "folder"), "mode", mode)
    _check_int("replicas", replicas, 1, MAX_REPLICAS)
    _check_int("seed", seed, 0, MAX_SEED)


def _check(holds: object, what: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{what}: {value!r:.200}")


def _check_int(what: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{what}: {value!r:.100} is not in {low}..{high}")


def _check_names(what: str, names: tuple[str, ...], limit: int) -> None:
    """Sorted, distinct, none empty or longer than a file name can be."""
    _check(len(names) <= limit, f"number of {what} names", len(names))
    for name in names:
        valid = (
            isinstance(name, str)
            and 1 <= len(encode_key(name)) <= MAX_EXTENSION_BYTES
            and not set(name) & {"/", "\0"}
        )
        _check(valid, f"{what} name", name)
    _check(
        all(a < b for a, b in itertools.pairwise(names)),
        f"{what} names",
        "not sorted or not distinct",
    )


def _unpack(packed: bytes, count: int) -> _Columns:
    """Views into the packed bytes. Every length is compared with what is there before it is used."""
    _check(len(packed) >= _FIXED_BYTES * count, "packed index", f"too short for {count} samples")
    key_ends = np.cumsum(np.frombuffer(packed, "<u2", count), dtype=np.int64)
    field_ends = np.cumsum(np.frombuffer(packed, "<u1", count, 2 * count), dtype=np.int64)
    at, total = _FIXED_BYTES * count, int(field_ends[-1])
    expected = at + _FIELD_BYTES * total + int(key_ends[-1])
    _check(len(packed) == expected, "packed index", f"{len(packed)} bytes instead of {expected}")
    return _Columns(
        key_ends=key_ends,
        field_ends=field_ends,
        extension_numbers=np.frombuffer(packed, "<u2", total, at),
        offset_blocks=np.frombuffer(packed, "<u4", total, at + 2 * total),
        sizes=np.frombuffer(packed, "<u8", total, at + 6 * total),
        keys=memoryview(packed)[at + _FIELD_BYTES * total :],
    )


def _check_columns(shard: ShardEntry) -> None:
    """Fields inside the shard, without overlap, sorted by extension within each sample.

    In which order they lie in the file is free, so that others' tars can be shards.
    """
    columns = _unpack(shard.packed, shard.sample_count)
    key_sizes, field_counts = np.diff(columns.key_ends, prepend=0), np.diff(columns.field_ends, prepend=0)
    _check((key_sizes >= 1).all() and (key_sizes <= MAX_KEY_BYTES).all(), "key sizes", "out of bounds")
    _check(
        (field_counts >= 1).all() and (field_counts <= MAX_FIELDS).all(), "fields per sample", "out of bounds"
    )
    numbers = columns.extension_numbers.astype(np.int64)
    _check((numbers < len(shard.extensions)).all(), "extension number", "not in the list of fields")
    is_first = np.zeros(len(numbers), dtype=bool)
    is_first[np.concatenate(([0], columns.field_ends[:-1]))] = True
    _check(((np.diff(numbers) > 0) | is_first[1:]).all(), "fields of a sample", "not sorted or not distinct")
    _check((columns.sizes <= np.uint64(shard.size_bytes)).all(), "field size", "larger than the shard")
    starts = columns.offset_blocks.astype(np.int64) * BLOCK_BYTES
    ends = starts + columns.sizes.astype(np.int64)
    _check((ends <= shard.size_bytes).all(), "field", "ends outside the shard")
    order = np.lexsort((ends, starts))  # an empty field may begin where the next one does
    _check((starts[order][1:] >= ends[order][:-1]).all(), "fields", "overlap")
