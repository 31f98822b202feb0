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
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, Literal

import xxhash

from p2p_dmc.data.disk import PIECE_BYTES, SHARDS_NAME, disk_errors, shard_path
from p2p_dmc.data.formats import Scan, ScannedSample
from p2p_dmc.data.manifest import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    MAX_EXTENSIONS,
    MAX_SEED,
    MAX_SHARD_BYTES,
    Manifest,
    Mode,
    SampleEntry,
    ShardEntry,
    check_settings,
    class_of,
    encode_key,
)
from p2p_dmc.data.store import Store
from p2p_dmc.errors import UserError

Order = Literal["shuffle", "keep"]
Shard = list[ScannedSample]
Progress = Callable[[int, int], None]  # (bytes done, bytes in all), of tar

MIN_AUTO_SHARD_BYTES = 64 << 10
MAX_AUTO_SHARD_BYTES = 64 << 20
AUTO_SHARDS = 256
_TRAILER_BYTES = 2 * BLOCK_BYTES
_LARGEST_OCTAL = 8**11


def plan_shards(
    scan: Scan,
    *,
    mode: Mode = "file",
    max_shard_size: int | Literal["auto"] = "auto",
    order: Order = "shuffle",
    seed: int = 0,
) -> list[Shard]:
    """Divide the samples into shards of at most ``max_shard_size`` bytes of tar.

    ``auto`` is the total over 256, between 64 KiB and 64 MiB. ``file`` mode takes the samples in the seeded
    order (``keep``: in key order); ``folder`` mode keeps each group in one shard, its samples side by side. A
    sample, or in folder mode a group, that is larger than a shard gets one of its own size. Raises UserError.
    """
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"seed {seed}: not in 0..{MAX_SEED}; choose another")
    units = _groups(scan.samples, order, seed) if mode == "folder" else _ordered(scan.samples, order, seed)
    sizes = [sum(map(_tar_bytes, unit)) for unit in units]
    if max_shard_size == "auto":
        limit = min(max(sum(sizes) // AUTO_SHARDS, MIN_AUTO_SHARD_BYTES), MAX_AUTO_SHARD_BYTES)
    elif max_shard_size < 1:
        raise UserError(
            f"--max-shard-size {max_shard_size}: not a size; use auto or a number of bytes above 0"
        )
    else:
        limit = max_shard_size
    for unit, size in zip(units, sizes, strict=True):
        if size + _TRAILER_BYTES > MAX_SHARD_BYTES:
            raise UserError(
                f"{unit[0].group!r}: {size} bytes in one shard, more than {MAX_SHARD_BYTES}; split it"
            )
    return _pack(units, sizes, limit - _TRAILER_BYTES)


def _pack(units: Iterable[Shard], sizes: Iterable[int], limit: int) -> list[Shard]:
    """Fill shards in order. An oversize unit becomes a shard without closing the one being filled."""
    shards: list[Shard] = []
    filling: Shard = []
    filled = 0
    for unit, size in zip(units, sizes, strict=True):
        if size > limit:
            shards.append(unit)
            continue
        if filled + size > limit:
            shards.append(filling)
            filling, filled = [], 0
        filling += unit
        filled += size
    return [*shards, filling] if filling else shards


def _sort_value(text: str, order: Order, seed: int) -> bytes:
    data = encode_key(text)
    return data if order == "keep" else xxhash.xxh3_128_digest(seed.to_bytes(8, "little") + data) + data


def _ordered(samples: Iterable[ScannedSample], order: Order, seed: int) -> list[Shard]:
    return [[sample] for sample in sorted(samples, key=lambda sample: _sort_value(sample.key, order, seed))]


def _groups(samples: Iterable[ScannedSample], order: Order, seed: int) -> list[Shard]:
    def value(sample: ScannedSample) -> tuple[bytes, bytes]:
        return _sort_value(sample.group, order, seed), _sort_value(sample.key, order, seed)

    ordered = sorted(samples, key=value)
    return [list(group) for _, group in groupby(ordered, key=lambda sample: sample.group)]


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
    for extension, _, size in sample.fields:
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
    """Streams samples into one tar file, hashing on the way; memory stays at one piece."""

    def __init__(self, file: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        self._file = file
        self._on_bytes = on_bytes
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self.position = 0

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.position += len(data)
        self._on_bytes(len(data))

    def add(self, sample: ScannedSample) -> SampleEntry:
        fields = []
        for extension, path, size in sample.fields:
            self._put(tar_header(member_name(sample.key, extension), size))
            fields.append((extension, self.position, size))
            for piece in _pieces(path, size):
                self._put(piece)
            self._put(bytes(_padded(size) - size))
        return SampleEntry(sample.key, tuple(fields))

    def finish(self) -> bytes:
        """End the tar, sync it, return its content digest."""
        self._put(bytes(_TRAILER_BYTES))
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._hash.digest()


def _pieces(path: str, size: int) -> Iterator[bytes]:
    """The file in pieces, exactly ``size`` bytes of it. Raises UserError if it has not just these."""
    left = size
    try:
        with open(path, "rb", buffering=0) as source:
            while piece := source.read(min(PIECE_BYTES, left + 1)):
                left -= len(piece)
                if left < 0:
                    break
                yield piece
    except OSError as error:
        raise UserError(f"{path!r}: {error.strerror}; make it readable and seed again") from error
    if left:
        raise UserError(f"{path!r}: changed its size while it was read; seed again when nothing changes it")


def write_shards(
    shards: Sequence[Sequence[ScannedSample]],
    store: Store,
    *,
    name: str,
    mode: Mode,
    replicas: int,
    seed: int,
    progress: Progress | None = None,
) -> Manifest:
    """Write the planned shards into the store, which holds them all afterwards, and return their manifest.

    Deterministic: the same files, plan and settings give the same digests. Nothing of it is visible in the
    store before all is written. Raises UserError (a file that changed or vanished, a name taken by another
    data set), StoreFull.
    """
    try:
        check_settings(name, mode, replicas, seed)
    except ValueError as error:
        raise UserError(f"{error}; choose another") from error
    extensions = tuple(sorted({field[0] for shard in shards for sample in shard for field in sample.fields}))
    if len(extensions) > MAX_EXTENSIONS:
        raise UserError(
            f"{len(extensions)} different extensions, more than {MAX_EXTENSIONS}; rename the files"
        )
    names = {class_of(sample.key) for shard in shards for sample in shard}
    classes = tuple(sorted(one for one in names if one is not None))
    total = sum(_TRAILER_BYTES + sum(map(_tar_bytes, shard)) for shard in shards)
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    with store.staging(total) as staging:
        entries = [_write_shard(shard, staging, extensions, on_bytes) for shard in shards]
        manifest = Manifest(name, mode, replicas, seed, extensions, classes, tuple(entries))
        store.publish(staging, manifest)
    return manifest


def _write_shard(
    shard: Sequence[ScannedSample],
    staging: Path,
    extensions: tuple[str, ...],
    on_bytes: Callable[[int], None],
) -> ShardEntry:
    temporary = staging / SHARDS_NAME / "next"
    with disk_errors(temporary):
        with temporary.open("wb") as file:
            writer = _ShardWriter(file, on_bytes)
            samples = [writer.add(sample) for sample in shard]
            digest = writer.finish()
        os.replace(temporary, shard_path(staging, digest))
    return ShardEntry.build(digest, writer.position, samples, extensions)
