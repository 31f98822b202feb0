"""Any number of records in little memory: a log that goes to disk when it grows, and a sort of more than fits.

The files have no name, so that a crash leaves nothing of them. Methods raise what `disk_errors` makes of a full
disk.
"""

from __future__ import annotations

import heapq
import itertools
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from p2p_dmc.data.disk import disk_errors

IN_MEMORY_BYTES = 4 << 20
"""A log larger than this is a file."""
RUN_BYTES = 48 << 20
"""So much memory for the records that are sorted at once."""
_MERGE_BYTES = 8 << 20
_READ_BYTES = 256 << 10
_OBJECT_BYTES = 41
"""What Python takes for a record besides its bytes."""
_SIZE = struct.Struct("<I")
RECORD_BYTES = _SIZE.size
"""What a record takes in a log besides its own."""


class Log:
    """Records one after the other, read from any of the places that `end` has told. ``folder``: for its file."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._tail = bytearray()
        self._flushed = 0

    @property
    def end(self) -> int:
        """The place after the last record; 0 when there is none."""
        return self._flushed + len(self._tail)

    def append(self, record: bytes) -> None:
        self._tail += _SIZE.pack(len(record))
        self._tail += record
        if len(self._tail) > (IN_MEMORY_BYTES if self._file is None else _READ_BYTES):
            self._flush()

    def _flush(self) -> None:
        with disk_errors(self._folder or Path(tempfile.gettempdir())):
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115 # lives as long as this
            left = memoryview(self._tail)
            while left:
                left = left[self._file.write(left) :]
        self._flushed += len(self._tail)
        self._tail = bytearray()

    def read(self, start: int = 0, stop: int | None = None, *, at_once: int = _READ_BYTES) -> Iterator[bytes]:
        """The records between two places."""
        stop = self.end if stop is None else stop
        data, at = b"", 0
        while at < len(data) or start < stop:
            if len(data) - at >= _SIZE.size:
                (size,) = _SIZE.unpack_from(data, at)
                after = at + _SIZE.size + size
                if after <= len(data):
                    yield data[at + _SIZE.size : after]
                    at = after
                    continue
                wanted = max(at_once, after - len(data))
            else:
                wanted = at_once
            piece = self._piece(start, min(wanted, stop - start))
            start += len(piece)
            data, at = data[at:] + piece, 0

    def _piece(self, offset: int, size: int) -> bytes:
        if offset >= self._flushed:
            at = offset - self._flushed
            return bytes(self._tail[at : at + size])
        assert self._file is not None
        return os.pread(self._file.fileno(), min(size, self._flushed - offset), offset)


def sort_records(records: Iterable[bytes], folder: Path | None) -> Iterator[bytes]:
    """The records in the order of their bytes."""
    log, places = Log(folder), [0]
    run: list[bytes] = []
    filled = 0
    for record in records:
        run.append(record)
        filled += len(record) + _OBJECT_BYTES
        if filled >= RUN_BYTES:
            run.sort()
            for one in run:
                log.append(one)
            places.append(log.end)
            run, filled = [], 0
    run.sort()
    if len(places) == 1:
        return iter(run)
    at_once = max(4096, min(_READ_BYTES, _MERGE_BYTES // len(places)))
    runs = [log.read(start, stop, at_once=at_once) for start, stop in itertools.pairwise(places)]
    return heapq.merge(*runs, run)
