"""ZeroMQ sockets of one agent: control, bulk and local (DESIGN.md section 5, facts/dataplane_gossip.md A).

Control is one ROUTER that only receives (and answers clients that have no address), and one DEALER per known address
that only sends. High-water marks are small and linger is zero: what cannot be sent is dropped and counted, and the
protocols above repeat themselves. A connection that breaks is reported, so that the shell can ask the host about it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import re
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from p2p_dmc.config import DEFAULT_PORT
from p2p_dmc.errors import RemoteProtocolError, UserError
from p2p_dmc.wire import codec

SEND_QUEUE = 512  # messages waiting for one peer; more means that it does not read
MAX_FRAME_BYTES = codec.MAX_MESSAGE_BYTES
MAX_LINKS = 1024


@codec.message
@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Who sends, first frame of every control message. ``run`` is "" unless the message belongs to one run.

    ``to`` is the peer_id that the sender believes to live at the address, "" when it asks whoever is there: an address
    that a peer of another cluster has taken over must not merge the two.
    """

    peer_id: str
    boot: int
    address: str
    run: str
    to: str


@dataclass(slots=True)
class Link:
    """The sending side of one address."""

    socket: zmq.asyncio.Socket
    monitor: asyncio.Task[None]
    last_used_s: float
    connected: bool = False


@dataclass(slots=True)
class Counters:
    sent_bytes: int = 0
    received_bytes: int = 0
    dropped: int = 0
    bad_by_sender: dict[str, int] = field(default_factory=dict)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of tcp://host:port; UserError otherwise."""
    rest = address.removeprefix("tcp://")
    host, separator, port = rest.rpartition(":")
    number = int(port) if re.fullmatch("[0-9]{1,5}", port) else 65536
    if not separator or not host.strip("[]") or number >= 65536 or "/" in rest:
        raise UserError(f"{address!r} is not an address; write tcp://HOST:PORT")
    return host.strip("[]"), number


def normalise_address(address: str) -> str:
    """tcp://host:port, the scheme added when left out."""
    host, port = split_address(address)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class ControlSocket:
    """Messages to and from other agents and from clients."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        on_message: Callable[[Envelope, object, bytes], None],
        on_disconnect: Callable[[str], None],
    ) -> None:
        self._context = context
        self._on_message = on_message
        self._on_disconnect = on_disconnect
        self._links: dict[str, Link] = {}
        self.serving: asyncio.Task[None] | None = None
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._router.setsockopt(zmq.IPV6, 1)
        self.counters = Counters()
        self.me = Envelope(peer_id="", boot=0, address="", run="", to="")

    def bind(self, host: str, port: int | None) -> int:
        """Listen at ``port``, or at the default or the next free one; returns it. UserError if taken."""
        bound = bind_router(self._router, host, port)
        self.serving = asyncio.create_task(self._receive())
        return bound

    async def _receive(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            sender = ""
            try:
                if len(frames) != 3:
                    raise RemoteProtocolError("a control message has two frames")
                self.counters.received_bytes += len(frames[1]) + len(frames[2])
                envelope = codec.decode(frames[1])
                if (
                    not isinstance(envelope, Envelope)
                    or len(envelope.peer_id) > 64
                    or len(envelope.run) > 256
                ):
                    raise RemoteProtocolError("the first frame is not an envelope")
                sender = envelope.peer_id
                if envelope.to not in ("", self.me.peer_id):
                    raise RemoteProtocolError("meant for another peer, which lived at this address before")
                self._on_message(envelope, codec.decode(frames[2]), frames[0])
            except RemoteProtocolError as error:
                self.count_bad(sender, error)

    def count_bad(self, sender: str, error: RemoteProtocolError) -> None:
        """Drop and count; nothing else happens (DESIGN.md section 10)."""
        if sender in self.counters.bad_by_sender or len(self.counters.bad_by_sender) < 1000:
            self.counters.bad_by_sender[sender] = self.counters.bad_by_sender.get(sender, 0) + 1

    def send(self, address: str, message: object, *, to: str, run: str = "") -> None:
        """Queue a message for the peer ``to`` at ``address``; dropped and counted when the queue is full."""
        link = self._links.get(address) or self._open(address)
        if link is None:
            self.counters.dropped += 1
            return
        link.last_used_s = time.monotonic()
        envelope = replace(self.me, run=run, to=to)
        frames = [codec.encode(envelope), codec.encode(message)]
        if _sent(link.socket, frames):
            self.counters.sent_bytes += sum(map(len, frames))
        else:
            self.counters.dropped += 1

    def reply(self, routing_id: bytes, message: object) -> None:
        """Answer a client on the connection that it asked on."""
        frames = [routing_id, codec.encode(self.me), codec.encode(message)]
        if not _sent(self._router, frames):
            self.counters.dropped += 1

    def _open(self, address: str) -> Link | None:
        if len(self._links) >= MAX_LINKS:
            oldest = min(self._links, key=lambda a: self._links[a].last_used_s)
            self.forget(oldest)
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        dealer.setsockopt(zmq.RECONNECT_IVL, 100)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
        dealer.setsockopt(zmq.IPV6, 1)
        monitor = dealer.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        try:
            dealer.connect(address)
        except zmq.ZMQError:
            dealer.disable_monitor()
            dealer.close(0)
            return None
        task = asyncio.create_task(self._watch(address, monitor))
        link = Link(socket=dealer, monitor=task, last_used_s=time.monotonic())
        self._links[address] = link
        return link

    async def _watch(self, address: str, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            link = self._links.get(address)
            if event == zmq.EVENT_MONITOR_STOPPED or link is None:
                return
            if event == zmq.EVENT_CONNECTED:
                link.connected = True
            elif event == zmq.EVENT_DISCONNECTED:
                link.connected = False
                self._on_disconnect(address)

    def connected(self, address: str) -> bool:
        """Whether a connection to this address stands."""
        link = self._links.get(address)
        return link is not None and link.connected

    def forget(self, address: str) -> None:
        """Close the link to an address that nobody needs; queued messages are dropped."""
        link = self._links.pop(address, None)
        if link is not None:
            link.monitor.cancel()
            with contextlib.suppress(zmq.ZMQError):
                link.socket.disable_monitor()
            link.socket.close(0)

    def addresses(self) -> tuple[str, ...]:
        return tuple(self._links)

    async def close(self, flush_s: float = 0.0) -> None:
        """Close everything; ``flush_s`` gives queued farewells a moment to leave."""
        if flush_s:
            await asyncio.sleep(flush_s)
        for address in list(self._links):
            self.forget(address)
        if self.serving is not None:
            self.serving.cancel()
        self._router.close(0)


def _sent(sender: zmq.asyncio.Socket, frames: list[bytes]) -> bool:
    """Send without waiting; False when the queue is full. A non-blocking send is decided when it returns."""
    future = cast("asyncio.Future[object]", sender.send_multipart(frames, flags=zmq.NOBLOCK))
    return future.done() and future.exception() is None


def bind_router(router: zmq.Socket[Any], host: str, port: int | None) -> int:
    """Bind to an explicit port, to any (0), or to the first free one from the default (None)."""
    if port is not None:
        try:
            router.bind(f"tcp://{_bracket(host)}:{port if port else '*'}")
        except zmq.ZMQError as error:
            raise UserError(_bind_problem(host, port, error)) from None
        return _bound_port(router)
    for candidate in range(DEFAULT_PORT, DEFAULT_PORT + 200):
        try:
            router.bind(f"tcp://{_bracket(host)}:{candidate}")
            return candidate
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise UserError(_bind_problem(host, candidate, error)) from None
    raise UserError(
        f"ports {DEFAULT_PORT} to {DEFAULT_PORT + 199} are all in use; give --listen tcp://{host}:0"
    )


def _bind_problem(host: str, port: int, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        return f"port {port} on {host} is in use; choose another, or --listen tcp://{host}:0 for a free one"
    return f"cannot listen on {host}:{port} ({error.strerror}); give an address of this machine with --listen"


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _bound_port(router: zmq.Socket[Any]) -> int:
    return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def reachable_host() -> str:
    """An address of this machine that other machines can probably reach; UserError when there is none."""
    for probe in ("10.255.255.255", "192.0.2.1"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, contextlib.suppress(OSError):
            udp.connect((probe, 9))  # chooses a route, sends nothing
            host = str(udp.getsockname()[0])
            if not host.startswith("127."):
                return host
    for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET):
        if not str(info[4][0]).startswith("127."):
            return str(info[4][0])
    for _, name in socket.if_nameindex():
        if host := _interface_host(name):
            return host
    raise UserError(
        "no address of this machine that others can reach was found; give --advertise tcp://HOST:PORT"
    )


def _interface_host(name: str) -> str:
    """IPv4 address of a network interface that is not loopback; "" when it has none (Linux: SIOCGIFADDR)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, contextlib.suppress(OSError):
        found = fcntl.ioctl(udp.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
        host = socket.inet_ntoa(found[20:24])
        return "" if host.startswith("127.") else host
    return ""


async def refused_by_host(address: str, timeout_s: float = 1.0) -> bool:
    """Whether the host at ``address`` lives and refuses: nobody listens there any more. Silence refuses nothing."""
    host, port = split_address(address)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout_s)
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return False
