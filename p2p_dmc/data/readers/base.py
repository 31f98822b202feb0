"""What every reader is given, and what it may say.

A reader is a function from `Input` to samples, ``(key, fields)``, one at a time. Where a field's bytes lie in
the input as they are, the field is that range; what has to be decompressed or converted goes into the spool,
a file on the store's disk that is gone when the shards are written.
"""

from __future__ import annotations

import csv
import importlib
import io
import lzma
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Literal, cast

from p2p_dmc.config import format_size
from p2p_dmc.data.disk import PIECE_BYTES, StoreFull, disk_errors
from p2p_dmc.data.found import FileField, Skipped
from p2p_dmc.data.sources import open_file, read_errors
from p2p_dmc.data.walk import Entry
from p2p_dmc.errors import UserError

Record = tuple[str, list[FileField]]
Reader = Callable[["Input"], Iterator[Record]]
StemRule = Literal["last-dot", "first-dot"]

MAX_RECORD_BYTES = 1 << 30
"""A line or a converted value that is longer is taken for a file of another format."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_ASK_EVERY_BYTES = 32 << 20
"""So often converting asks how much room is left."""
PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".joblib")


def refuse_pickle(path: str) -> None:
    """Raise UserError for a name that pickle files have: reading one runs whatever code is in it."""
    if path.lower().endswith(PICKLES):
        raise UserError(
            f"{path!r}: pickle is not taken, since reading it runs code that is in it; save the data as .npy, "
            f".safetensors or JSON, or leave the file out with --exclude"
        )


def need(module: str, package: str, what: str) -> Any:
    """A module of an optional package. Raises UserError that names the command which installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{what!r}: reading it needs {package}; run `pip install {package}`") from error


@contextmanager
def malformed(path: str, what: str) -> Iterator[None]:
    """Turn what a parser refuses into one line for the user."""
    parsing = (ValueError, KeyError, TypeError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError)
    try:
        with read_errors(path):
            yield
    except (*parsing, csv.Error, struct.error, zipfile.BadZipFile) as error:
        words = " ".join(str(error).split())
        raise UserError(
            f"{path!r}: not whole, or no {what}: {words:.300}; if it is still being written seed again when it is "
            "whole, else mend it or leave it out"
        ) from error


class Spool:
    """Where converted fields are kept until they are in shards. Without a folder they are only measured.

    ``free_bytes``: how much room there is. What is kept needs as much again for the shards, so it ends with StoreFull
    when the room left is less than what is kept, and not when the disk is full.
    """

    def __init__(self, folder: Path | None, free_bytes: Callable[[], int] = lambda: 1 << 62) -> None:
        self.folder = folder
        self._free_bytes = free_bytes
        self._asked_at = 0
        self.path = "" if folder is None else str(folder / "spool")
        self._file: BinaryIO | None = None
        self._end = 0

    def put(self, extension: str, data: bytes, head: bytes = b"") -> FileField:
        """Keep a field."""
        return self._keep(extension, [data], head)

    def put_stream(self, extension: str, stream: IO[bytes]) -> FileField:
        """Keep a field of any size, a piece at a time."""
        return self._keep(extension, iter(lambda: stream.read(PIECE_BYTES), b""), b"")

    def _keep(self, extension: str, pieces: Iterable[bytes], head: bytes) -> FileField:
        start = self._end
        for piece in pieces:
            self._end += len(piece)
            if self.path:
                self._write(piece)
        return FileField(extension, self.path, len(head) + self._end - start, start, head)

    @property
    def size_bytes(self) -> int:
        """Of all that was converted."""
        return self._end

    def need(self, path: str, size_bytes: int) -> None:
        """Raise StoreFull unless ``path`` can be converted to so many bytes and cut into shards."""
        free = self._free_bytes()
        if self.path and free < 2 * size_bytes:
            raise StoreFull(
                f"{path!r}: has to be converted, which takes its size twice until the shards are written: "
                f"{format_size(2 * size_bytes)} or more, and {format_size(free)} are free at {str(self.folder)!r}; "
                "make room there, or give --home on another disk"
            )

    def _write(self, data: bytes) -> None:
        if self._end - self._asked_at >= _ASK_EVERY_BYTES:
            self._asked_at = self._end
            if (free := self._free_bytes()) < self._end:
                raise StoreFull(
                    f"{str(self.folder)!r}: {format_size(self._end)} of the input are converted, the shards need as "
                    f"much again and {format_size(free)} are free; make room, or give --home on another disk"
                )
        with disk_errors(Path(self.path)):
            if self._file is None:
                self._file = open(self.path, "wb", buffering=PIECE_BYTES)  # noqa: SIM115 # closed on exit
            self._file.write(data)

    def finish(self) -> bool:
        """Whether there is anything; it can be read from now on."""
        if self._file is not None:
            with disk_errors(Path(self.path)):
                self._file.close()
        return self._file is not None

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


@dataclass
class Input:
    """What a reader reads. ``on_bytes`` is told how many bytes of the input were read since the last time."""

    root: Path
    entries: list[Entry]
    spool: Spool
    stem: StemRule | None = None
    on_bytes: Callable[[int], None] = lambda _: None
    skipped: Skipped = field(default_factory=Skipped)
    is_one_file: bool = False

    def row_key(self, entry: Entry, row: int) -> str:
        """The key of a file's row, counted from 0: its number, after the file's name if there are several."""
        if self.is_one_file:
            return f"{row:09d}"
        folder, slash, name = entry.relative.rpartition("/")
        return f"{folder}{slash}{stem_of(name)}-{row:09d}"

    @contextmanager
    def open(self, entry: Entry) -> Iterator[IO[bytes]]:
        """The file's bytes, decompressed if its name says that they are compressed."""
        raw = io.BufferedReader(_Watched(open_file(entry.path), self.on_bytes), PIECE_BYTES)
        with raw:
            yield decompressed(raw, entry.path)


def stem_of(name: str) -> str:
    """A file's name without what says its format, and without dots, which would end a sample's key."""
    for ending in COMPRESSIONS:
        name = name.removesuffix(ending)
    return (name.rpartition(".")[0] or name).replace(".", "_")


class _Watched(io.FileIO):
    def __init__(self, descriptor: int, on_bytes: Callable[[int], None]) -> None:
        super().__init__(descriptor)
        self._on_bytes = on_bytes

    def readinto(self, buffer: Any, /) -> int:
        count = super().readinto(buffer) or 0
        self._on_bytes(count)
        return count


def decompressed(raw: IO[bytes], path: str) -> IO[bytes]:
    """The stream inside ``raw``, by the name's ending. Raises what `malformed` knows when it is cut short."""
    import bz2
    import gzip

    match os.path.splitext(path.lower())[1]:
        case ".gz" | ".tgz":
            return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
        case ".bz2":
            return bz2.BZ2File(raw)
        case ".xz":
            return lzma.LZMAFile(raw)
        case ".zst" | ".zstd":
            module = need("zstandard", "zstandard", path)
            return io.BufferedReader(_Zstandard(module, raw), PIECE_BYTES)
    return raw


class _Zstandard(io.RawIOBase):
    """Frames one after the other. The library's own stream reader takes a file that is cut short for whole."""

    def __init__(self, module: Any, raw: IO[bytes]) -> None:
        self._module = module
        self._raw = raw
        self._frame = module.ZstdDecompressor().decompressobj()
        self._between = True
        self._ready = b""
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            data = self._rest or self._raw.read(PIECE_BYTES >> 4)
            self._rest = b""
            if not data:
                if not self._between:
                    raise EOFError("the compressed data end too early")
                return 0
            self._decompress(data)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self, data: bytes) -> None:
        try:
            self._ready, self._between = self._frame.decompress(data), False
        except self._module.ZstdError as error:
            raise ValueError(str(error)) from error
        if self._frame.eof:
            self._rest, self._between = self._frame.unused_data, True
            self._frame = self._module.ZstdDecompressor().decompressobj()
