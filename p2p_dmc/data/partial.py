"""A shard on its way: ranges arrive in any order from any peer, the whole is verified before it counts.

    bytes 0 to size                what has arrived, holes between
    16 bytes each from there on    one range that was written: offset and end, little-endian

A range is noted after its bytes were written, so whoever opens the file again, after a crash at any instant, goes on
with what is noted. Nothing of that is synced: after a power cut a note may stand for bytes that are not there, and
the digest of the whole, which counts alone, shows it.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from p2p_dmc.data.disk import disk_errors, file_digest, sync_folder
from p2p_dmc.data.manifest import DIGEST_BYTES

PART_SUFFIX = ".part"
_NOTE = struct.Struct("<QQ")

Range = tuple[int, int]  # (offset, size), both in bytes


class PartialShard:
    """Receives one shard into a temporary file; made by `Store.open_partial`. Threads may share it.

    What an earlier life received into the same file is there already (`written_bytes`).

    ``on_written`` is told how many bytes were covered for the first time; ``on_end``, once, whether the shard
    is held now and how many bytes were never written. Both are called under this object's lock.
    Invariant: nothing is under the final name before the whole file had the right digest.
    """

    def __init__(
        self,
        path: Path,
        digest: bytes,
        size_bytes: int,
        *,
        on_written: Callable[[int], None],
        on_end: Callable[[bool, int], None],
    ) -> None:
        self.size_bytes = size_bytes
        self._path = path
        self._part_path = path.with_name(path.name + PART_SUFFIX)
        self._digest = digest
        self._on_written = on_written
        self._on_end = on_end
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        """Held while the file is closed, or taken hold of to read it."""
        self._state: hashlib.blake2b | None = hashlib.blake2b(digest_size=DIGEST_BYTES)
        """Of the first ``_hashed_bytes``, as they were written; None once some of them were written twice."""
        self._hashed_bytes = 0
        self._covered: list[tuple[int, int]] = []  # [start, end), sorted, apart; never changed in place
        self.bad_blocks: tuple[bytes, ...] = ()
        """Digests of the pieces of a shard that had the wrong one, to find out afterwards who sent which."""
        self._file = os.fdopen(os.open(self._part_path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        self._notes = self._go_on()

    def _go_on(self) -> int:
        """Take over what is noted in the file; the number of notes."""
        descriptor = self._file.fileno()
        notes = max(0, os.fstat(descriptor).st_size - self.size_bytes) // _NOTE.size
        data = os.pread(descriptor, notes * _NOTE.size, self.size_bytes)
        for start, end in _NOTE.iter_unpack(data[: len(data) // _NOTE.size * _NOTE.size]):
            if start < end <= self.size_bytes:
                self._cover(start, end)
        return notes

    @property
    def closed(self) -> bool:
        """Committed, abandoned or suspended: nothing more can be written."""
        return self._file.closed

    @property
    def written_bytes(self) -> int:
        """Bytes covered so far. Waits for nobody, also while another thread verifies the whole."""
        return self._covered_bytes()

    @property
    def written_ranges(self) -> list[tuple[int, int]]:
        """(start, end) of what was written so far, in file order, apart from each other. Waits for nobody."""
        return list(self._covered)

    def _covered_bytes(self) -> int:
        return sum(end - start for start, end in self._covered)

    def missing_ranges(self, chunk_bytes: int) -> list[Range]:
        """What is still to be fetched, in file order, in pieces of at most ``chunk_bytes``."""
        if chunk_bytes < 1:
            raise ValueError(f"chunk of {chunk_bytes} bytes")
        with self._lock:
            edges = [0, *(edge for pair in self._covered for edge in pair), self.size_bytes]
        gaps = zip(edges[0::2], edges[1::2], strict=True)
        return [
            (offset, min(chunk_bytes, end - offset))
            for start, end in gaps
            for offset in range(start, end, chunk_bytes)
        ]

    def read(self, offset: int, size: int) -> bytes | None:
        """A range that was written, not verified yet; None if part of it was not, or the shard has come to its end.

        Waits for nobody, also while another thread verifies the whole.
        """
        if not any(a <= offset and offset + size <= b for a, b in self._covered):
            return None
        with self._closing:
            if self.closed:
                return None
            descriptor = os.dup(self._file.fileno())
        try:
            return os.pread(descriptor, size, offset)
        finally:
            os.close(descriptor)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put a range where it belongs. A later write to the same place wins.

        Raises ValueError for a range outside the shard or after the end, StoreFull if the disk is full: what
        was written before stays good, so abandon the shard or try again later.
        """
        end = offset + len(data)
        if offset < 0 or end > self.size_bytes:
            raise ValueError(f"range {offset}+{len(data)} is outside a shard of {self.size_bytes} bytes")
        with self._lock:
            self._require_open()
            if offset < self._hashed_bytes:
                self._state = None
            view, at = memoryview(data), offset
            with disk_errors(self._part_path):
                while view:
                    count = os.pwrite(self._file.fileno(), view, at)
                    view, at = view[count:], at + count
                if offset < end:
                    note_at = self.size_bytes + self._notes * _NOTE.size
                    os.pwrite(self._file.fileno(), _NOTE.pack(offset, end), note_at)
                    self._notes += 1
            self._hash(offset, data)
            before = self._covered_bytes()
            self._cover(offset, end)
            self._on_written(self._covered_bytes() - before)

    def _hash(self, offset: int, data: bytes | memoryview) -> None:
        """While what comes goes on where the last one ended it needs not be read again to be verified."""
        if offset == self._hashed_bytes and self._state is not None:
            self._state.update(data)
            self._hashed_bytes += len(data)

    def _whole_digest(self) -> bytes:
        if self._state is None:
            return file_digest(self._file)
        return file_digest(self._file, self._state, self._hashed_bytes)

    def _cover(self, start: int, end: int) -> None:
        apart = [(a, b) for a, b in self._covered if b < start or a > end]
        touching = [(a, b) for a, b in self._covered if not (b < start or a > end)]
        merged = (min([start, *(a for a, _ in touching)]), max([end, *(b for _, b in touching)]))
        self._covered = sorted([*apart, merged] if merged[0] < merged[1] else apart)

    def commit(self, block_bytes: int = 1 << 20) -> bool:
        """Verify the whole; if it is right, sync and rename it and return True, else delete it, return False.

        Of a wrong one, ``bad_blocks`` has the digest of each ``block_bytes`` afterwards.

        Raises ValueError while something is missing, StoreFull or UserError when the disk fails at it.
        """
        with self._lock:
            self._require_open()
            if self._covered != [(0, self.size_bytes)]:
                raise ValueError("commit of a shard with missing ranges")
            held = False
            try:
                with disk_errors(self._part_path):
                    os.ftruncate(self._file.fileno(), self.size_bytes)  # off with the notes
                    if self._whole_digest() != self._digest:
                        self.bad_blocks = block_digests(self._file.fileno(), self.size_bytes, block_bytes)
                    else:
                        os.fsync(self._file.fileno())
                        os.replace(self._part_path, self._path)
                        held = True
                        sync_folder(self._path.parent)
            finally:
                self._end(held=held)
            return held

    def abandon(self) -> None:
        """Give up and delete what was received. Does nothing after the end."""
        with self._lock:
            if not self.closed:
                self._end(held=False)

    def suspend(self) -> None:
        """Close the file, for whoever opens the shard again to go on with. Does nothing after the end."""
        with self._lock:
            if not self.closed:
                self._end(held=False, is_kept=True)

    def _end(self, *, held: bool, is_kept: bool = False) -> None:
        with self._closing:
            self._file.close()
        if not held and not is_kept:
            self._part_path.unlink(missing_ok=True)
        self._on_end(held, self.size_bytes - self._covered_bytes())

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError("the shard was committed or abandoned")


def block_digests(descriptor: int, size_bytes: int, block_bytes: int) -> tuple[bytes, ...]:
    """BLAKE2b-128 of each block of an open file."""
    return tuple(
        hashlib.blake2b(os.pread(descriptor, block_bytes, offset), digest_size=DIGEST_BYTES).digest()
        for offset in range(0, size_bytes, block_bytes)
    )
