"""Writing so that a crash leaves nothing or the whole: the few disk operations the store is made of."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase, RawIOBase
from pathlib import Path

from p2p_dmc.data.manifest import DIGEST_BYTES
from p2p_dmc.errors import UserError

MANIFEST_NAME = "manifest.msgpack"
SHARDS_NAME = "shards"
PIECE_BYTES = 1 << 20


class StoreFull(UserError):
    """No room for a shard: the store's capacity or the disk is used up. Nothing half-written is visible."""


class ShardMissing(LookupError):
    """The shard is not held here, or its file turned out to be damaged and is held no longer."""


def shard_path(dataset_folder: Path, shard_digest: bytes) -> Path:
    """A shard's final name. Only a digest, in hexadecimal, becomes part of it."""
    if len(shard_digest) != DIGEST_BYTES:
        raise ValueError(f"shard digest {shard_digest!r:.50} does not have {DIGEST_BYTES} bytes")
    return dataset_folder / SHARDS_NAME / f"{shard_digest.hex()}.tar"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into one line for the user: StoreFull if it has no room, else UserError."""
    try:
        yield
    except OSError as error:
        name = str(error.filename or path)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"{name!r}: {error.strerror}; free some disk space") from error
        raise UserError(f"{name!r}: {error.strerror}; check the disk, or give another --home") from error


def is_of_file(error: OSError) -> bool:
    """Whether an error says something of the file, and not that this process lacks descriptors or memory."""
    return error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file under a temporary name, sync it, rename it, sync its folder."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def file_digest(
    file: BufferedIOBase | RawIOBase, state: hashlib.blake2b | None = None, offset: int = 0
) -> bytes:
    """BLAKE2b-128 of a file, in pieces; ``state`` is of what comes before the offset."""
    state = state or hashlib.blake2b(digest_size=DIGEST_BYTES)
    buffer = memoryview(bytearray(PIECE_BYTES))  # one for all pieces: new memory costs as much as the copying
    file.seek(offset)
    while count := file.readinto(buffer):
        state.update(buffer[:count])
    return state.digest()
