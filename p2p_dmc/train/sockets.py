"""The sockets of one gloo group, found among the process's own, and shut down (facts: gloo's ``abort`` does
nothing).

A group is cancelled by ``shutdown(2)`` on its connected sockets: those that its listener accepted and those
that lead to a member's listener. Never the listener itself (gloo answers an accept error by ending the
process), never a socket of the user's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator

Endpoint = tuple[str, int]  # numeric host, port

_DESCRIPTORS = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
_HEAD = struct.Struct("!HB")  # listener's port, length of its host; host and gloo's own bytes follow


def listener_in(blob: bytes) -> Endpoint | None:
    """This process's listening socket whose address gloo has written into ``blob``."""
    for sock in _tcp_sockets():
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            continue
        host, port = sock.getsockname()[:2]
        if _sockaddr_part(sock.family, host, port) in blob:
            return host, port
    return None


def shut_connected(mine: Endpoint | None, others: frozenset[Endpoint]) -> int:
    """Shut down every connected socket from or to these listeners; how many there were."""
    count = 0
    for sock in _tcp_sockets():
        with contextlib.suppress(OSError):  # not connected (any more)
            local, remote = sock.getsockname()[:2], sock.getpeername()[:2]
            if local == mine or remote in others:
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def pack_value(listener: Endpoint | None, blob: bytes) -> bytes:
    """gloo's rendezvous bytes together with the address of the listener they speak of."""
    host, port = listener or ("", 0)
    return _HEAD.pack(port, len(host)) + host.encode() + blob


def unpack_value(value: bytes) -> tuple[Endpoint | None, bytes]:
    """The reverse; ValueError on anything that cannot be one."""
    if len(value) < _HEAD.size:
        raise ValueError("a rendezvous value is too short")
    port, host_bytes = _HEAD.unpack_from(value)
    end = _HEAD.size + host_bytes
    if len(value) <= end:
        raise ValueError("a rendezvous value is too short")
    return ((value[_HEAD.size : end].decode(), port) if port else None), value[end:]


def _sockaddr_part(family: int, host: str, port: int) -> bytes:
    address = socket.inet_pton(family, host.partition("%")[0])
    flow = bytes(4) if family == socket.AF_INET6 else b""
    return port.to_bytes(2, "big") + flow + address


def _tcp_sockets() -> Iterator[socket.socket]:
    """A duplicate of each TCP socket of this process, closed when the next one is asked for.

    All questions go to the duplicate, so that a descriptor closed and reused meanwhile cannot be mistaken.
    """
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # closed since it was listed
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with _borrowed(os.dup(int(name))) as sock:
                    if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                        yield sock


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    blocking = os.get_blocking(fd)
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        raise
    with sock:
        if (
            os.get_blocking(fd) != blocking
        ):  # Python applies its default time-out; the mode is the owner's, too
            os.set_blocking(fd, blocking)
        yield sock
