"""From samples to shards: which samples go together, and the tar bytes they become.

The spread is a sort by XXH3-128 of (seed, key): a permutation of our own that no library's random stream can
change. The tar headers are written here for the same reason: tarfile's bytes differ between Python versions,
and equal input must give equal digests on every machine. The files are plain POSIX tar (ustar, with a pax
record only for names that need one), which tar, tarfile and WebDataset read.
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import xxhash

from p2p_dmc.data.disk import SHARDS_NAME, disk_errors, shard_path
from p2p_dmc.data.found import Rows, Samples, Scan, ScannedSample, class_names, group_of, key_order
from p2p_dmc.data.manifest import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    MAX_SEED,
    MAX_SHARD_BYTES,
    Manifest,
    Mode,
    SampleEntry,
    ShardEntry,
    check_settings,
    decode_key,
    encode_key,
)
from p2p_dmc.data.sources import Sources
from p2p_dmc.data.store import Store
from p2p_dmc.errors import UserError

Order = Literal["shuffle", "keep"]
Shard = Samples
Progress = Callable[[int, int], None]  # (bytes done, bytes in all), of tar

MIN_AUTO_SHARD_BYTES = 64 << 10
MAX_AUTO_SHARD_BYTES = 64 << 20
AUTO_SHARDS = 256
JOURNAL_NAME = "written"
_TRAILER_BYTES = 2 * BLOCK_BYTES
_LARGEST_OCTAL = 8**11


class TarShard(Samples):
    """A shard that is there already: a tar of the input, which is copied as it is."""

    __slots__ = ("path", "size_bytes")

    def __init__(self, samples: Samples, path: str, size_bytes: int) -> None:
        super().__init__(samples._table, samples._rows)
        self.path = path
        self.size_bytes = size_bytes


def taken_as_they_are(
    scan: Scan,
    mode: Mode | Literal["auto"],
    max_shard_size: int | Literal["auto"],
    order: Order | None,
) -> bool:
    """Whether the input's own tars become the shards: they can, and nobody asked for what only cutting gives."""
    fits = all(max_shard_size == "auto" or tar.size_bytes <= max_shard_size for tar in scan.tars)
    return bool(scan.tars) and mode != "folder" and order is None and fits


def plan_shards(
    scan: Scan,
    *,
    mode: Mode | Literal["auto"] = "file",
    max_shard_size: int | Literal["auto"] = "auto",
    order: Order | None = None,
    seed: int = 0,
) -> list[Shard]:
    """Divide the samples into shards of at most ``max_shard_size`` bytes of tar.

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
        return [TarShard(scan.samples[tar.start : tar.stop], tar.path, tar.size_bytes) for tar in scan.tars]
    mode = settle_mode(scan, mode)
    ordered = scan.samples.pick(_places(scan.samples, mode, order or "shuffle", seed))
    _refuse_duplicates(ordered)
    sizes = _sizes(ordered)
    starts = _group_starts(ordered) if mode == "folder" else np.arange(len(ordered), dtype=np.int64)
    unit_sizes = np.add.reduceat(sizes, starts)
    limit = _auto_limit(int(sizes.sum())) if max_shard_size == "auto" else max_shard_size
    largest = int(unit_sizes.argmax())
    if unit_sizes[largest] + _TRAILER_BYTES > MAX_SHARD_BYTES:
        group = ordered[int(starts[largest])].group
        raise UserError(
            f"{group!r}: {unit_sizes[largest]} bytes in one shard, more than {MAX_SHARD_BYTES}; split it"
        )
    stops = np.append(starts[1:], len(ordered))
    return [
        ordered.pick(np.concatenate([np.arange(starts[unit], stops[unit]) for unit in units]))
        if mode == "folder"
        else ordered.pick(np.frombuffer(units, dtype=np.int64))
        for units in _pack(map(int, unit_sizes), limit - _TRAILER_BYTES)
    ]


def settle_mode(scan: Scan, mode: Mode | Literal["auto"]) -> Mode:
    """What ``auto`` means: ``folder`` for many small folders, such as one per recording, else ``file``.

    Many: at least four times as many as shards of the automatic size; so no folder is larger than a shard
    by much, and no shard is one class.
    """
    if mode != "auto":
        return mode
    groups = {group_of(decode_key(key), scan.samples.depth) for key in scan.samples.key_bytes()}
    if any(group.startswith("./") for group in groups):
        return "file"
    total = int(_sizes(scan.samples).sum())
    return "folder" if len(groups) >= 4 * max(1, total // _auto_limit(total)) else "file"


def _auto_limit(total_bytes: int) -> int:
    return min(max(total_bytes // AUTO_SHARDS, MIN_AUTO_SHARD_BYTES), MAX_AUTO_SHARD_BYTES)


def _pack(sizes: Iterable[int], limit: int) -> list[array[int]]:
    """Fill shards in order with units, told by number. An oversize one is a shard and closes none."""
    shards: list[array[int]] = []
    filling = array("q")
    filled = 0
    for unit, size in enumerate(sizes):
        if size > limit:
            shards.append(array("q", [unit]))
            continue
        if filled + size > limit:
            shards.append(filling)
            filling, filled = array("q"), 0
        filling.append(unit)
        filled += size
    return [*shards, filling] if filling else shards


def _places(samples: Samples, mode: Mode, order: Order, seed: int) -> Rows:
    """The places of the samples in the order in which they are put into shards."""
    if order == "keep":
        if mode == "file":
            return key_order(samples)
        keys = [(encode_key(sample.group), encode_key(sample.key)) for sample in samples]
        return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    columns = [*_digest_columns(samples.key_bytes(), seed)]
    if mode == "folder":
        columns += _digest_columns(
            (encode_key(group_of(decode_key(key), samples.depth)) for key in samples.key_bytes()), seed
        )
    return np.lexsort(columns).astype(np.int64, copy=False)


def _digest_columns(texts: Iterable[bytes], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """XXH3-128 of (seed, text), as lower and upper halves."""
    prefix, digests = seed.to_bytes(8, "little"), bytearray()
    for text in texts:
        digests += xxhash.xxh3_128_digest(prefix + text)
    halves = np.frombuffer(digests, dtype=">u8").reshape(-1, 2)
    return halves[:, 1], halves[:, 0]


def _group_starts(ordered: Samples) -> Rows:
    """Where each group begins."""
    starts, last = array("q"), None
    for place, key in enumerate(ordered.key_bytes()):
        group = group_of(decode_key(key), ordered.depth)
        if group != last:
            starts.append(place)
            last = group
    return np.frombuffer(starts, dtype=np.int64)


def _refuse_duplicates(ordered: Samples) -> None:
    """Equal keys lie side by side in every order."""
    last = b""
    for place, key in enumerate(ordered.key_bytes()):
        if key == last:
            paths = sorted({sample.fields[0].path for sample in (ordered[place - 1], ordered[place])})
            raise UserError(
                f"{decode_key(key)!r}: two samples have this key, in {' and '.join(map(repr, paths))}; "
                f"rename one, or seed them as data sets of their own"
            )
        last = key


def _sizes(samples: Samples) -> Rows:
    return np.fromiter(map(_tar_bytes, samples), dtype=np.int64, count=len(samples))


# -- tar ---------------------------------------------------------------------------------------------------


def _padded(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def member_name(key: str, extension: str) -> bytes:
    """A field's name in the tar."""
    return encode_key(f"{key}.{extension}")


def _needs_pax(name: bytes, size: int) -> bool:
    return len(name) > 100 or not name.isascii() or size >= _LARGEST_OCTAL


def _tar_bytes(sample: ScannedSample) -> int:
    total = 0
    for extension, _, size, *_ in sample.fields:
        name = member_name(sample.key, extension)
        header_bytes = len(tar_header(name, size)) if _needs_pax(name, size) else BLOCK_BYTES
        total += header_bytes + _padded(size)
    return total


def tar_header(name: bytes, size: int) -> bytes:
    """Header blocks of one regular file: owner 0, mode 0644, time 0, so nothing but name and size is in them.

    A name that is long or not ASCII, or a size beyond 8 GiB is told by a pax record in front (POSIX.1-2001).
    """
    if not _needs_pax(name, size):
        return _ustar(name, size, b"0")
    records = b""
    try:
        name.decode("utf-8")
    except UnicodeDecodeError:
        records += _pax_record(b"hdrcharset", b"BINARY")
    records += _pax_record(b"path", name)
    if size >= _LARGEST_OCTAL:
        records += _pax_record(b"size", b"%d" % size)
    stand_in = bytes(byte if byte < 128 else 0x5F for byte in name[:100]).rstrip(b"/")
    pax = _ustar(b"././@PaxHeader", len(records), b"x") + records.ljust(_padded(len(records)), b"\0")
    return pax + _ustar(stand_in, size if size < _LARGEST_OCTAL else 0, b"0")


def _pax_record(keyword: bytes, value: bytes) -> bytes:
    """``"<length> <keyword>=<value>\\n"``, where the length counts its own digits."""
    body = b" " + keyword + b"=" + value + b"\n"
    length = len(body) + len(str(len(body)))
    if len(str(length)) + len(body) != length:
        length += 1
    return b"%d" % length + body


def _ustar(name: bytes, size: int, kind: bytes) -> bytes:
    fields = (name, b"0000644", b"0000000", b"0000000", b"%011o" % size, b"%011o" % 0, b" " * 8, kind)
    block = struct.pack("100s8s8s8s12s12s8ss100s6s2s247x", *fields, b"", b"ustar", b"00")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


# -- writing -----------------------------------------------------------------------------------------------


class _ShardWriter:
    """Streams one tar file, hashing on the way; memory stays at one piece."""

    def __init__(self, file: BinaryIO, sources: Sources, on_bytes: Callable[[int], None]) -> None:
        self._file = file
        self._sources = sources
        self._on_bytes = on_bytes
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def put(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._on_bytes(len(data))

    def add(self, sample: ScannedSample) -> None:
        for one in sample.fields:
            self.put(tar_header(member_name(sample.key, one.extension), one.size))
            for piece in self._sources.pieces(one):
                self.put(piece)
            self.put(bytes(_padded(one.size) - one.size))

    def copy(self, shard: TarShard) -> None:
        for piece in self._sources.whole(shard.path, shard.size_bytes):
            self.put(piece)

    def finish(self) -> bytes:
        """Sync the file, return its content digest."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._hash.digest()


def _layout(shard: Shard) -> tuple[list[SampleEntry], int]:
    """Where everything lies in the shard, and its size in bytes."""
    if isinstance(shard, TarShard):
        entries = [
            SampleEntry(s.key, tuple((f.extension, f.offset, f.size) for f in s.fields)) for s in shard
        ]
        return entries, shard.size_bytes
    entries, position = [], 0
    for sample in shard:
        fields = []
        for extension, _, size, *_ in sample.fields:
            position += len(tar_header(member_name(sample.key, extension), size))
            fields.append((extension, position, size))
            position += _padded(size)
        entries.append(SampleEntry(sample.key, tuple(fields)))
    return entries, position + _TRAILER_BYTES


def shard_bytes(shard: Shard) -> int:
    """The size of the shard's file."""
    return shard.size_bytes if isinstance(shard, TarShard) else _TRAILER_BYTES + int(_sizes(shard).sum())


def write_shards(
    shards: Sequence[Shard],
    store: Store,
    *,
    scan: Scan,
    name: str,
    mode: Mode,
    replicas: int,
    seed: int,
    progress: Progress | None = None,
    on_resumed: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """Write the planned shards into the store, which holds them all afterwards, and return their manifest.

    Deterministic: the same files, plan and settings give the same digests. Nothing of it is visible in the
    store before all is written; when the process is killed or interrupted, the next one with the same plan of
    the same input goes on after the last whole shard (a store that is opened with ``keep_staging``). Raises
    UserError (a file that changed or vanished, a name taken by another data set), StoreFull.
    """
    try:
        check_settings(name, mode, replicas, seed)
    except ValueError as error:
        raise UserError(f"{error}; choose another") from error
    extensions = tuple(sorted(set().union(*(shard.extensions() for shard in shards))))
    classes = tuple(sorted(set().union(*(class_names(shard) for shard in shards))))
    total = left = sum(map(shard_bytes, shards))
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, left)

    with store.staging(total, _identity(scan, shards)) as staging, Sources(scan.stamps) as sources:
        written = _written(staging, shards)
        left -= sum(map(shard_bytes, shards[: len(written)]))
        if written:
            on_resumed(len(written))
        entries = []
        for number, shard in enumerate(shards):
            places, size = _layout(shard)
            if number < len(written):
                digest = written[number]
            else:
                digest = _write_shard(shard, staging, sources, on_bytes)
            entries.append(ShardEntry.build(digest, size, places, extensions))
        sources.check()
        manifest = _manifest(name, mode, replicas, seed, extensions, classes, tuple(entries))
        (staging / JOURNAL_NAME).unlink()
        store.publish(staging, manifest)
    return manifest


def _manifest(
    name: str,
    mode: Mode,
    replicas: int,
    seed: int,
    extensions: tuple[str, ...],
    classes: tuple[str, ...],
    entries: tuple[ShardEntry, ...],
) -> Manifest:
    if len({entry.digest for entry in entries}) < len(entries):
        raise UserError(f"{name!r}: two of the tars are the same, byte for byte; take one of them away")
    return Manifest(name, mode, replicas, seed, extensions, classes, entries)


def _identity(scan: Scan, shards: Sequence[Shard]) -> bytes:
    """Names a plan of an input. Empty if the input has no identity: nothing is resumed then."""
    if not scan.identity:
        return b""
    state = hashlib.blake2b(scan.identity, digest_size=DIGEST_BYTES)
    for shard in shards:
        state.update(len(shard).to_bytes(8, "little"))
        for key in shard.key_bytes():
            state.update(len(key).to_bytes(2, "little") + key)
    return state.digest()


def _written(staging: Path, shards: Sequence[Shard]) -> list[bytes]:
    """Digests of the shards, from the first on, that an interrupted process has left whole."""
    journal = staging / JOURNAL_NAME
    journal.touch()
    digests = []
    for shard, line in zip(shards, journal.read_text("ascii").splitlines(), strict=False):
        if len(line) != 2 * DIGEST_BYTES:
            break
        path = shard_path(staging, bytes.fromhex(line))
        if not path.is_file() or path.stat().st_size != shard_bytes(shard):
            break
        digests.append(bytes.fromhex(line))
    journal.write_text("".join(f"{digest.hex()}\n" for digest in digests), "ascii")
    return digests


def _write_shard(shard: Shard, staging: Path, sources: Sources, on_bytes: Callable[[int], None]) -> bytes:
    temporary = staging / SHARDS_NAME / "next"
    with disk_errors(temporary):
        with temporary.open("wb") as file:
            writer = _ShardWriter(file, sources, on_bytes)
            if isinstance(shard, TarShard):
                writer.copy(shard)
            else:
                for sample in shard:
                    writer.add(sample)
                writer.put(bytes(_TRAILER_BYTES))
            digest = writer.finish()
        os.replace(temporary, shard_path(staging, digest))
        with (staging / JOURNAL_NAME).open("a", encoding="ascii") as journal:
            journal.write(f"{digest.hex()}\n")
    return digest
