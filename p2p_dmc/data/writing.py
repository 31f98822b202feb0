"""Planned shards become files, and the files a data set."""

from __future__ import annotations

import hashlib
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from p2p_dmc.data.disk import PIECE_BYTES, SHARDS_NAME, disk_errors, shard_path
from p2p_dmc.data.found import Scan, ScannedSample, class_names, member_name
from p2p_dmc.data.index import IndexBuilder, ShardIndex, encode_key
from p2p_dmc.data.manifest import DIGEST_BYTES, MAX_CLASSES, Manifest, Mode, ShardEntry, check_settings
from p2p_dmc.data.sharding import Shard, TarShard
from p2p_dmc.data.sources import Sources
from p2p_dmc.data.store import Store
from p2p_dmc.data.tar import TRAILER, padded, tar_header
from p2p_dmc.errors import UserError

Progress = Callable[[int, int], None]  # (bytes done, bytes in all), of shards

JOURNAL_NAME = "written"
_DIGEST = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


class _ShardWriter:
    """Streams one shard's file, hashing on the way; of the contents memory holds a piece."""

    def __init__(self, file: BinaryIO, sources: Sources, on_bytes: Callable[[int], None]) -> None:
        self._file = file
        self._sources = sources
        self._on_bytes = on_bytes
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._written = 0

    def put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= PIECE_BYTES:
            self._flush()

    def _flush(self) -> None:
        data = b"".join(self._waiting)
        self._file.write(data)
        self._hash.update(data)
        self._on_bytes(len(data))
        self._written += len(data)
        self._waiting, self._waiting_bytes = [], 0

    def add(self, sample: ScannedSample, index: IndexBuilder) -> None:
        places = []
        for one in sample.fields:
            self.put(tar_header(member_name(sample.key, one.extension), one.size))
            places.append((one.extension, self._written + self._waiting_bytes, one.size))
            for piece in self._sources.pieces(one):
                self.put(piece)
            if rest := padded(one.size) - one.size:
                self.put(bytes(rest))
        index.add(encode_key(sample.key), places)

    def write(self, shard: Shard) -> None:
        index = IndexBuilder(shard.extensions)
        if isinstance(shard, TarShard):
            for piece in self._sources.whole(shard.path, shard.copied_bytes, is_all=False):
                self.put(piece)
            self.put(bytes(shard.missing_bytes))
            for sample in shard:
                index.add(encode_key(sample.key), [(f.extension, f.offset, f.size) for f in sample.fields])
            self._refuse_what_nobody_reads(shard.path, index.to_bytes())
        else:
            for sample in shard:
                self.add(sample, index)
            self.put(TRAILER)
        self.put(index.to_bytes())

    def _refuse_what_nobody_reads(self, path: str, index: bytes) -> None:
        """A tar made by hand may name the same bytes twice, or end with what looks like an index."""
        try:
            ShardIndex(index, self._written + self._waiting_bytes + len(index))
        except ValueError as error:
            raise UserError(f"{path!r}: {error}; pack it again, or have it cut with --order keep") from error

    def finish(self) -> bytes:
        """All is with the system, not yet on the disk; the content digest."""
        self._flush()
        self._file.flush()
        return self._hash.digest()


class _Finisher:
    """Syncs shards, gives them their names and notes them, in order, on a thread while the next one is written.

    Invariant: what is noted is on the disk, and so is all that was noted before.
    """

    def __init__(self, staging: Path, digests: list[bytes], on_whole: Callable[[int], None]) -> None:
        self._staging = staging
        self._digests = digests
        self._on_whole = on_whole
        self._thread = ThreadPoolExecutor(1)
        self._under_way: deque[Future[bytes]] = deque()
        self._broken = False

    def __enter__(self) -> _Finisher:
        self._on_whole(len(self._digests))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for what was written, which counts even when the next one was interrupted."""
        self._thread.shutdown()
        while self._under_way:
            self._take(is_failure_told=kind is None)

    def add(self, file: BinaryIO, digest: bytes) -> None:
        """A file that was written; it is closed here. Raises what went wrong with an earlier one."""
        self._under_way.append(self._thread.submit(self._finish, file, digest))
        while len(self._under_way) > 1:
            self._take(is_failure_told=True)

    def _take(self, *, is_failure_told: bool) -> None:
        error = self._under_way[0].exception()
        if error is None:
            self._digests.append(self._under_way.popleft().result())
            self._on_whole(len(self._digests))
        else:
            self._under_way.clear()
            if is_failure_told:
                raise error

    def _finish(self, file: BinaryIO, digest: bytes) -> bytes:
        with file, disk_errors(self._staging):
            if self._broken:
                raise RuntimeError("an earlier shard could not be finished")
            self._broken = True
            os.fsync(file.fileno())
            os.replace(file.name, shard_path(self._staging, digest))
            with (self._staging / JOURNAL_NAME).open("a", encoding="ascii") as journal:
                journal.write(f"{digest.hex()}\n")
            self._broken = False
        return digest


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
    on_whole: Callable[[int], None] = lambda _: None,
    base: Manifest | None = None,
) -> Manifest:
    """Write the planned shards into the store, which holds them all afterwards, and return their manifest.

    Deterministic: the same files, plan and settings give the same digests. Nothing of it is visible in the
    store before all is written; when the process is killed or interrupted, the next one with the same plan of
    the same input goes on after the last whole shard (a store that is opened with ``keep_staging``). With
    ``base`` it is the version after that one, and has its shards too. ``on_whole`` is told how many shards are
    whole. Raises UserError (a file that changed or vanished, a name taken by another data set), StoreFull.
    """
    try:
        check_settings(name, mode, replicas, seed)
    except ValueError as error:
        raise UserError(f"{error}; choose another") from error
    total = left = sum(shard.size_bytes for shard in shards)
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, left)

    with store.staging(total, _identity(scan, shards, base)) as staging, Sources(scan.stamps) as sources:
        digests = _written(staging, shards)
        left -= sum(shard.size_bytes for shard in shards[: len(digests)])
        if digests:
            on_resumed(len(digests))
        with _Finisher(staging, digests, on_whole) as finisher:
            for number in range(len(digests), len(shards)):
                file, digest = _write_shard(shards[number], staging, number, sources, on_bytes)
                finisher.add(file, digest)
        sources.check()
        settings = {"name": name, "mode": mode, "replicas": replicas, "seed": seed}
        manifest = _manifest(settings, scan, _entries(name, shards, digests), shards, base)
        (staging / JOURNAL_NAME).unlink()
        store.publish(staging, manifest)
    return manifest


def _manifest(
    settings: dict[str, Any],
    scan: Scan,
    entries: tuple[ShardEntry, ...],
    shards: Sequence[Shard],
    base: Manifest | None,
) -> Manifest:
    fields = {name for shard in shards for name in shard.extensions}
    classes = set(class_names(scan.samples))
    follows: dict[str, Any] = {}
    if base is not None:
        fields.update(base.fields)
        classes.update(base.classes)
        entries = (*base.shards, *entries)
        follows = {"generation": base.generation + 1, "origin": base.first, "parent": base.digest}
    return Manifest(
        **settings,
        fields=tuple(sorted(fields)),
        classes=tuple(sorted(classes)) if len(classes) <= MAX_CLASSES else (),
        shards=entries,
        **follows,
    )


def _entries(name: str, shards: Sequence[Shard], digests: Sequence[bytes]) -> tuple[ShardEntry, ...]:
    if len(set(digests)) < len(digests):
        raise UserError(f"{name!r}: two of the tars are the same, byte for byte; take one of them away")
    return tuple(
        ShardEntry(digest, shard.size_bytes, len(shard))
        for shard, digest in zip(shards, digests, strict=True)
    )


def _identity(scan: Scan, shards: Sequence[Shard], base: Manifest | None) -> bytes:
    """Names a plan of an input. Empty if the input has no identity: nothing is resumed then."""
    if not scan.identity:
        return b""
    state = hashlib.blake2b(scan.identity + (base.digest if base else b""), digest_size=DIGEST_BYTES)
    for shard in shards:
        state.update(shard.identity.to_bytes(8, "little") + len(shard).to_bytes(8, "little"))
    return state.digest()


def _written(staging: Path, shards: Sequence[Shard]) -> list[bytes]:
    """Digests of the shards, from the first on, that an interrupted process has left whole."""
    journal = staging / JOURNAL_NAME
    journal.touch()
    digests = []
    for shard, line in zip(shards, journal.read_text("latin-1").splitlines(), strict=False):
        if not _DIGEST.fullmatch(line):  # cut short, or what a power cut has left
            break
        path = shard_path(staging, bytes.fromhex(line))
        if not path.is_file() or path.stat().st_size != shard.size_bytes:
            break
        digests.append(bytes.fromhex(line))
    journal.write_text("".join(f"{digest.hex()}\n" for digest in digests), "ascii")
    return digests


def _write_shard(
    shard: Shard, staging: Path, number: int, sources: Sources, on_bytes: Callable[[int], None]
) -> tuple[BinaryIO, bytes]:
    """The file, which is to be finished, and its digest."""
    temporary = staging / SHARDS_NAME / f"next-{number}"
    with disk_errors(temporary):
        file = temporary.open("wb")
        try:
            writer = _ShardWriter(file, sources, on_bytes)
            writer.write(shard)
            return file, writer.finish()
        except BaseException:
            file.close()
            raise
