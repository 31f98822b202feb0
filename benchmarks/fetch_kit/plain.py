"""The same bytes without p2p_dmc: copied on the disk, sent through one TCP connection, hashed."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BUFFER_BYTES = 1 << 20


def disk_copy(files: Sequence[Path], target: Path) -> float:
    """Bytes a second of copying the files into a folder and syncing each."""
    target.mkdir()
    began_s, size = time.monotonic(), 0
    for path in files:
        with path.open("rb", buffering=0) as source, (target / path.name).open("wb", buffering=0) as sink:
            while piece := source.read(BUFFER_BYTES):
                size += sink.write(piece)
            os.fsync(sink.fileno())
    return size / (time.monotonic() - began_s)


def tcp_copy(files: Sequence[Path], target: Path) -> tuple[float, float]:
    """(bytes a second, processor seconds per GB of both ends) of sending them to a process that writes and syncs."""
    target.mkdir()
    spawn = multiprocessing.get_context("spawn")
    sender_cpu_s = spawn.Value("d", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = ([str(path) for path in files], server.getsockname()[1], sender_cpu_s)
        sender = spawn.Process(target=_send, args=words)
        sender.start()
        connection, _ = server.accept()
        began_s, began_cpu_s = time.monotonic(), _cpu_s()
        with connection:
            size = sum(_receive(connection, path.stat().st_size, target / path.name) for path in files)
        took_s, own_cpu_s = time.monotonic() - began_s, _cpu_s() - began_cpu_s
        sender.join()
    return size / took_s, (own_cpu_s + sender_cpu_s.value) / (size / 1e9)


def _receive(connection: socket.socket, size: int, path: Path) -> int:
    buffer, left = memoryview(bytearray(BUFFER_BYTES)), size
    with path.open("wb", buffering=0) as sink:
        while left:
            got = connection.recv_into(buffer[: min(left, BUFFER_BYTES)])
            if not got:
                raise ConnectionError("the sender of the plain copy is gone")
            sink.write(buffer[:got])
            left -= got
        os.fsync(sink.fileno())
    return size


def _send(files: Sequence[str], port: int, cpu_s: Any) -> None:
    began_s = _cpu_s()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for path in files:
            with open(path, "rb") as source:
                connection.sendfile(source)
    cpu_s.value = _cpu_s() - began_s


def hashing(files: Sequence[Path]) -> float:
    """Bytes a second of the shards' digest, BLAKE2b, in one thread."""
    began_s, size = time.monotonic(), 0
    for path in files:
        state = hashlib.blake2b(digest_size=16)
        with path.open("rb", buffering=0) as source:
            while piece := source.read(BUFFER_BYTES):
                state.update(piece)
                size += len(piece)
    return size / (time.monotonic() - began_s)


def _cpu_s() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime
