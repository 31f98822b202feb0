"""From samples to shards: which samples go together, in which order.

The spread is a sort by XXH3-128 of (seed, key): a permutation of our own that no library's random stream can
change. It is sorted outside of memory, so that a plan of any number of samples takes as little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import xxhash

from p2p_dmc.data.found import Book, Samples, Scan, Tally, group_of, key_of
from p2p_dmc.data.index import MAX_SAMPLES, decode_key, encode_key, index_bytes, join_names
from p2p_dmc.data.manifest import MAX_SEED, MAX_SHARD_BYTES, Mode
from p2p_dmc.data.spill import Log, sort_records
from p2p_dmc.data.tar import TRAILER
from p2p_dmc.errors import UserError

Order = Literal["shuffle", "keep"]
MaxShardSize = int | Literal["auto"]

MIN_AUTO_SHARD_BYTES = 64 << 10
MAX_AUTO_SHARD_BYTES = 64 << 20
AUTO_SHARDS = 256
_DIGEST_BYTES = 16


class Shard(Samples):
    """The samples of one shard. ``identity``: a digest of their keys."""

    def __init__(
        self, book: Book, log: Log, ranges: list[tuple[int, int]], tally: Tally, identity: int
    ) -> None:
        super().__init__(book, log, ranges, tally)
        self.identity = identity

    @property
    def tar_bytes(self) -> int:
        """What is in front of the index."""
        return self.tally.tar_bytes + len(TRAILER)

    @property
    def size_bytes(self) -> int:
        """Of the shard's file."""
        tally, names = self.tally, len(join_names(self.extensions))
        return self.tar_bytes + index_bytes(names, tally.samples, tally.fields, tally.key_bytes)


class TarShard(Shard):
    """A shard that is there already: a tar of the input, which is copied as it is."""

    def __init__(self, samples: Samples, path: str, copied_bytes: int, missing_bytes: int) -> None:
        identity = xxhash.xxh3_64_intdigest(
            f"{len(samples)} {copied_bytes} {path}".encode("utf-8", "surrogateescape")
        )
        super().__init__(samples.book, samples.log, list(samples.ranges), samples.tally, identity)
        self.path = path
        self.copied_bytes = copied_bytes
        self.missing_bytes = missing_bytes

    @property
    def tar_bytes(self) -> int:
        return self.copied_bytes + self.missing_bytes


def taken_as_they_are(
    scan: Scan, mode: Mode | Literal["auto"], max_shard_size: MaxShardSize, order: Order | None
) -> bool:
    """Whether the input's own tars become the shards: they can, and nobody asked for what only cutting gives."""
    fits = all(max_shard_size == "auto" or tar.size_bytes <= max_shard_size for tar in scan.tars)
    return bool(scan.tars) and mode != "folder" and order is None and fits


def plan_shards(
    scan: Scan,
    *,
    mode: Mode | Literal["auto"] = "file",
    max_shard_size: MaxShardSize = "auto",
    order: Order | None = None,
    seed: int = 0,
) -> list[Shard]:
    """Divide the samples into shards of at most ``max_shard_size`` bytes of tar; their index comes on top.

    ``auto`` is the total over 256, between 64 KiB and 64 MiB. ``file`` mode takes the samples in the seeded
    order (``keep``: in key order); ``folder`` mode keeps each group in one shard, its samples side by side. A
    sample, or in folder mode a group, that is larger than a shard gets one of its own size. With no order
    given tars that can be shards become shards as they are; else None means ``shuffle``. Raises UserError.
    """
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"seed {seed}: not in 0..{MAX_SEED}; choose another")
    if max_shard_size != "auto" and max_shard_size < 1:
        raise UserError(
            f"--max-shard-size {max_shard_size}: not a size; use auto or a number of bytes above 0"
        )
    if taken_as_they_are(scan, mode, max_shard_size, order):
        parts = scan.samples.cut(tar.samples for tar in scan.tars)
        return [
            TarShard(part, tar.path, tar.size_bytes, tar.missing_bytes)
            for part, tar in zip(parts, scan.tars, strict=True)
        ]
    mode = settle_mode(scan, mode)
    total = scan.samples.tally.tar_bytes
    limit = auto_limit(total) if max_shard_size == "auto" else max_shard_size
    packer = _Packer(scan.samples.book, Log(scan.folder), limit - len(TRAILER))
    for record in ordered(scan, mode, order or "shuffle", seed):
        packer.put(record, new_unit=mode == "file")
    return packer.finish()


def settle_mode(scan: Scan, mode: Mode | Literal["auto"]) -> Mode:
    """What ``auto`` means: ``folder`` for many small folders, such as one per recording, else ``file``.

    Many: at least four times as many as shards of the automatic size; so no folder is larger than a shard
    by much, and no shard is one class.
    """
    if mode != "auto":
        return mode
    total = scan.samples.tally.tar_bytes
    enough = 4 * max(1, total // auto_limit(total))
    groups: set[bytes] = set()
    for key in scan.samples.key_bytes():
        if b"/" not in key:
            return "file"
        if len(groups) < enough:
            groups.add(_group(key, scan.samples.depth))
    return "folder" if len(groups) >= enough else "file"


def auto_limit(total_bytes: int) -> int:
    """The automatic size of a shard's tar."""
    return min(max(total_bytes // AUTO_SHARDS, MIN_AUTO_SHARD_BYTES), MAX_AUTO_SHARD_BYTES)


def _group(key: bytes, depth: int) -> bytes:
    return encode_key(group_of(decode_key(key), depth))


class _Packer:
    """Fills shards in order with units. An oversize unit is a shard of its own and closes none.

    Invariant: the samples of a unit, a sample or a group, come one after the other.
    """

    def __init__(self, book: Book, log: Log, limit: int) -> None:
        self._book, self._log, self._limit = book, log, limit
        self._shards: list[Shard] = []
        self._filling, self._unit = _Pile(), _Pile()
        self._last, self._last_key, self._last_group = b"", b"", b""

    def put(self, record: bytes, *, new_unit: bool) -> None:
        """The next sample. ``new_unit``: each is one; else those of a group are."""
        key = key_of(record)
        if key == self._last_key:
            paths = sorted({self._book.decode(one).fields[0].path for one in (self._last, record)})
            raise UserError(
                f"{decode_key(key)!r}: two samples have this key, in {' and '.join(map(repr, paths))}; "
                f"rename one, or seed them as data sets of their own"
            )
        self._last, self._last_key = record, key
        group = key if new_unit else _group(key, self._book.depth)
        if group != self._last_group:
            self._close_unit()
            self._last_group = group
        start = self._log.end
        self._log.append(record)
        self._unit.add(start, self._log.end, key)
        self._book.measure(record, self._unit.tally)

    def _close_unit(self) -> None:
        unit, filling = self._unit, self._filling
        size, count = unit.tally.tar_bytes, unit.tally.samples
        if count == 0:
            return
        if size + len(TRAILER) > MAX_SHARD_BYTES >> 1 or count > MAX_SAMPLES:
            raise UserError(
                f"{decode_key(self._last_group)!r}: {count} samples of {size} bytes in one shard, more than "
                f"{MAX_SAMPLES} or {MAX_SHARD_BYTES >> 1}; split it"
            )
        if size > self._limit:
            self._close(unit)
        else:
            if filling.tally.tar_bytes + size > self._limit or filling.tally.samples + count > MAX_SAMPLES:
                self._close(filling)
                self._filling = filling = _Pile()
            filling.join(unit)
        self._unit = _Pile()

    def _close(self, pile: _Pile) -> None:
        if pile.tally.samples:
            identity = pile.keys.intdigest()
            self._shards.append(Shard(self._book, self._log, pile.ranges, pile.tally, identity))

    def finish(self) -> list[Shard]:
        self._close_unit()
        self._close(self._filling)
        return self._shards


class _Pile:
    """What goes together."""

    __slots__ = ("keys", "ranges", "tally")

    def __init__(self) -> None:
        self.tally = Tally()
        self.ranges: list[tuple[int, int]] = []
        self.keys = xxhash.xxh3_64()

    def add(self, start: int, stop: int, key: bytes) -> None:
        self._extend(start, stop)
        self.keys.update(key + b"\0")

    def _extend(self, start: int, stop: int) -> None:
        if self.ranges and self.ranges[-1][1] == start:
            self.ranges[-1] = (self.ranges[-1][0], stop)
        else:
            self.ranges.append((start, stop))

    def join(self, other: _Pile) -> None:
        for start, stop in other.ranges:
            self._extend(start, stop)
        self.tally.add(other.tally)
        self.keys.update(other.keys.digest())


def ordered(scan: Scan, mode: Mode, order: Order, seed: int) -> Iterator[bytes]:
    """The samples' records in the order in which they are put into shards; those of one key lie side by side."""
    prefix = seed.to_bytes(8, "little")
    depth = scan.samples.depth

    def spread(text: bytes) -> bytes:
        return xxhash.xxh3_128_digest(prefix + text)

    places: dict[tuple[Order, Mode], Callable[[bytes], bytes]] = {
        ("shuffle", "file"): spread,
        ("shuffle", "folder"): lambda key: spread(_group(key, depth)) + spread(key),
        ("keep", "file"): lambda key: key + b"\0",
        ("keep", "folder"): lambda key: _group(key, depth) + b"\0" + key + b"\0",
    }
    place = places[order, mode]
    placed = (place(key_of(record)) + record for record in scan.samples.records())
    if order == "shuffle":
        size = _DIGEST_BYTES * (1 if mode == "file" else 2)
        return (one[size:] for one in sort_records(placed, scan.folder))
    parts = 1 if mode == "file" else 2
    return (one.split(b"\0", parts)[parts] for one in sort_records(placed, scan.folder))
