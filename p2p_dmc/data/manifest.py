"""The manifest: an immutable description of a data set, identified by the digest of its bytes.

It names every shard by content digest, with its size and its number of samples. Where the samples lie in a
shard the shard's own file says (`index`), so a manifest grows with the shards and not with the samples.

A data set may have several versions: each that `seed-dataset --append` makes names the first one (``origin``) and
the one before (``parent``) by digest, and is one ``generation`` further. Shards that they share have one digest.

On the wire and on disk it is one flat msgpack map in a fixed key order: lists are joined into byte strings,
so decoding a hostile one allocates no more than its own size. There is one encoding per manifest: bytes that
decode but would be encoded otherwise are refused, so equal digests mean equal data sets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import msgpack
import numpy as np

from p2p_dmc.data.index import (
    BLOCK_BYTES,
    MAX_EXTENSIONS,
    MAX_SAMPLES,
    check,
    check_names,
    join_names,
    split_names,
)
from p2p_dmc.errors import RemoteProtocolError

Mode = Literal["file", "folder"]

VERSION = 2
DIGEST_BYTES = 16

# Bounds on what a manifest may say. They are generous for data and tight against nonsense.
MAX_MANIFEST_BYTES = 1 << 26
MAX_NAME_CHARACTERS = 128
HELD_OUT = "-val"
"""What the name of a data set of held-out samples adds to that of theirs."""
MAX_SHARDS = 1 << 20
MAX_CLASSES = 1 << 16
MAX_SHARD_BYTES = 1 << 40
MAX_REPLICAS = 255
MAX_SEED = (1 << 64) - 1
MAX_GENERATION = 1 << 20

_KEYS = (
    *("version", "name", "mode", "replicas", "seed", "generation"),
    *("origin", "parent", "fields", "classes", "digests", "sizes", "counts"),
)
_FIRST_BYTES_KEY = 6


RESERVED = frozenset({"__key__", "__dataset__", "__shard__"})
"""What a sample says of itself; no field is named so."""


def content_digest(data: bytes) -> bytes:
    """BLAKE2b-128, the digest of shards and manifests."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def class_of(key: str) -> str | None:
    """The sample's class, its top-level folder as in ImageFolder; None for a loose file."""
    folder, slash, _ = key.partition("/")
    return folder if slash else None


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard: the digest and the size of its file, and how many samples are in it."""

    digest: bytes
    size_bytes: int
    sample_count: int

    def __post_init__(self) -> None:
        check(
            isinstance(self.digest, bytes) and len(self.digest) == DIGEST_BYTES, "shard digest", self.digest
        )
        _check_int("shard size", self.size_bytes, 1, MAX_SHARD_BYTES)
        most = min(MAX_SAMPLES, self.size_bytes // BLOCK_BYTES)
        _check_int("samples in a shard", self.sample_count, 1, most)


@dataclass(frozen=True)
class Manifest:
    """A data set's description. Deterministic: no time, host or path is in it. ValueError if built wrong.

    ``fields`` are the extensions seen and ``classes`` the top-level folders, both sorted; of more than
    `MAX_CLASSES` folders none is a class. ``origin`` and ``parent`` are empty in a first version.
    """

    name: str
    mode: Mode
    replicas: int
    seed: int
    fields: tuple[str, ...]
    classes: tuple[str, ...]
    shards: tuple[ShardEntry, ...] = field(repr=False)
    generation: int = 0
    origin: bytes = b""
    parent: bytes = b""
    version: int = VERSION

    def __post_init__(self) -> None:
        check(self.version == VERSION, "manifest version", self.version)
        check_settings(self.name, self.mode, self.replicas, self.seed)
        check_names("field", self.fields, MAX_EXTENSIONS)
        check(not RESERVED.intersection(self.fields), "fields", self.fields)
        check(1 <= len(self.shards) <= MAX_SHARDS, "number of shards", len(self.shards))
        check_names("class", self.classes, min(MAX_CLASSES, len(self)))
        check(len(set(self.shard_digests)) == len(self.shards), "shards", "one of them is listed twice")
        _check_int("generation", self.generation, 0, MAX_GENERATION)
        size = DIGEST_BYTES if self.generation else 0
        for what, digest in (("origin", self.origin), ("parent", self.parent)):
            check(isinstance(digest, bytes) and len(digest) == size, what, digest)

    @property
    def first(self) -> bytes:
        """The digest of the first of this data set's versions."""
        return self.origin or self.digest

    def __len__(self) -> int:
        """Number of samples."""
        return self._sample_total

    @cached_property
    def _sample_total(self) -> int:
        return sum(shard.sample_count for shard in self.shards)

    @cached_property
    def digest(self) -> bytes:
        """The data set's identity, the digest of `to_bytes`: 16 bytes."""
        return content_digest(self.to_bytes())

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

    def to_bytes(self) -> bytes:
        """The one canonical encoding, made once: whoever comes asks for it in ranges."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        values = (
            *(self.version, self.name, self.mode, self.replicas, self.seed, self.generation),
            *(self.origin, self.parent, join_names(self.fields), join_names(self.classes)),
            b"".join(self.shard_digests),
            np.array(self.shard_sizes, dtype="<u8").tobytes(),
            np.array(self.sample_counts, dtype="<u4").tobytes(),
        )
        encoded = msgpack.packb(dict(zip(_KEYS, values, strict=True)))
        assert isinstance(encoded, bytes)
        return encoded

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
        if data != manifest.to_bytes():
            raise RemoteProtocolError("manifest in an encoding that is not the canonical one")
        return manifest

    @classmethod
    def _from_content(cls, content: Any) -> Manifest:
        check(isinstance(content, dict), "manifest", type(content))
        version = content.get("version")
        if version != VERSION:
            raise ValueError(
                f"of version {version!r:.20}, and this program reads version {VERSION}: seed the data again"
            )
        check(tuple(content) == _KEYS, "manifest keys", tuple(content))
        for key in _KEYS[_FIRST_BYTES_KEY:]:
            check(isinstance(content[key], bytes), key, type(content[key]))
        plain = ("name", "mode", "replicas", "seed", "generation", "origin", "parent")
        return cls(
            **{key: content[key] for key in plain},
            fields=split_names(content["fields"], MAX_EXTENSIONS),
            classes=split_names(content["classes"], MAX_CLASSES),
            shards=tuple(_shards_of(content)),
        )


def _shards_of(content: dict[str, Any]) -> Iterator[ShardEntry]:
    digests = content["digests"]
    count, rest = divmod(len(digests), DIGEST_BYTES)
    check(rest == 0 and count <= MAX_SHARDS, "shard digests", len(digests))
    for key, width in (("sizes", 8), ("counts", 4)):
        check(len(content[key]) == width * count, key, len(content[key]))
    sizes = np.frombuffer(content["sizes"], "<u8").tolist()
    counts = np.frombuffer(content["counts"], "<u4").tolist()
    for i in range(count):
        yield ShardEntry(digests[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)], sizes[i], counts[i])


def check_settings(name: str, mode: str, replicas: int, seed: int) -> None:
    """Raise ValueError for what no manifest may say; seeding asks before it writes."""
    named = isinstance(name, str) and 1 <= len(name) <= MAX_NAME_CHARACTERS
    check(named and name.isprintable(), "data set name", name)
    check(mode in ("file", "folder"), "mode", mode)
    _check_int("replicas", replicas, 1, MAX_REPLICAS)
    _check_int("seed", seed, 0, MAX_SEED)


def _check_int(what: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{what}: {value!r:.100} is not in {low}..{high}")
