"""Reading the bytes of found samples again, and noticing when they are not those that were found."""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

from p2p_dmc.data.disk import PIECE_BYTES
from p2p_dmc.data.found import FileField, Stamp
from p2p_dmc.errors import UserError

MAX_OPEN = 16


def stamp_of(status: os.stat_result) -> Stamp:
    """What changes when a file is written to."""
    return status.st_size, status.st_mtime_ns


def changed(path: str) -> UserError:
    """The error for a file that is not what it was."""
    return UserError(f"{path!r}: changed while it was read; seed again when nothing changes it")


@contextmanager
def read_errors(path: str) -> Iterator[None]:
    """Turn what the system refuses into one line for the user."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path!r}: {error.strerror}; make it readable and seed again") from error


def open_file(path: str) -> int:
    """A descriptor to read from. Whatever else has come in the file's place is not waited for: UserError."""
    with read_errors(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise changed(path)
    return descriptor


class Sources:
    """Files of the input, opened when needed. ``stamps``: those of which fields are parts, kept open a while.

    All methods raise UserError for a file that cannot be read or is not what it was.
    """

    def __init__(self, stamps: Mapping[str, Stamp]) -> None:
        self._stamps = stamps
        self._descriptors: OrderedDict[str, int] = OrderedDict()

    def __enter__(self) -> Sources:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def pieces(self, field: FileField) -> Iterator[bytes]:
        """The field's bytes, a piece at a time."""
        if field.head:
            yield field.head
        size = field.size - len(field.head)
        if field.path in self._stamps:
            yield from self._range(field.path, field.offset, size)
        elif size or not field.head:
            yield from self.whole(field.path, size)

    def whole(self, path: str, size: int, *, is_all: bool = True) -> Iterator[bytes]:
        """A file that has exactly this size, or with ``is_all`` False begins with it, and does not change meanwhile."""
        left = size
        with open(open_file(path), "rb", buffering=0) as file, read_errors(path):
            before = stamp_of(os.fstat(file.fileno()))
            while piece := file.read(min(PIECE_BYTES, left + is_all)):
                left -= len(piece)
                if left < 0:
                    break
                yield piece
            if left or before != stamp_of(os.fstat(file.fileno())):
                raise changed(path)

    def _range(self, path: str, offset: int, size: int) -> Iterator[bytes]:
        descriptor = self._open(path)
        while size:
            with read_errors(path):
                piece = os.pread(descriptor, min(PIECE_BYTES, size), offset)
            if not piece:
                raise changed(path)
            offset += len(piece)
            size -= len(piece)
            yield piece

    def _open(self, path: str) -> int:
        descriptor = self._descriptors.get(path)
        if descriptor is not None:
            self._descriptors.move_to_end(path)
            return descriptor
        descriptor = open_file(path)
        self._descriptors[path] = descriptor
        if stamp_of(os.fstat(descriptor)) != self._stamps[path]:
            raise changed(path)
        if len(self._descriptors) > MAX_OPEN:
            os.close(self._descriptors.popitem(last=False)[1])
        return descriptor

    def check(self) -> None:
        """All files of which fields are parts are still what they were."""
        for path, stamp in self._stamps.items():
            with read_errors(path):
                if stamp_of(os.stat(path)) != stamp:
                    raise changed(path)
