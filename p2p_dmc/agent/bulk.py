"""Ranges of shards, manifests and states between agents, on a socket apart from control (DESIGN.md section 5)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.wire import codec
from p2p_dmc.wire.messages import BulkKind, BulkReply, BulkRequest
from p2p_dmc.wire.transport import bind_router

log = logging.getLogger("p2p_dmc.bulk")
MAX_DATA_BYTES = 4 << 20
IDLE_LINKS = 64

Provider = Callable[[BulkRequest], "tuple[int, bytes | memoryview] | None"]


class BulkServer:
    """Answers range requests; the providers say what there is. Unknown or malformed requests cost nothing else."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, 64)
        self._router.setsockopt(zmq.MAXMSGSIZE, 1 << 16)  # requests are small
        self._router.setsockopt(zmq.IPV6, 1)
        self._providers: dict[BulkKind, Provider] = {}
        self.serving: asyncio.Task[None] | None = None
        self.sent_bytes = 0
        self.bad = 0

    def bind(self, host: str) -> int:
        port = bind_router(self._router, host, 0)
        self.serving = asyncio.create_task(self._serve())
        return port

    def provide(self, kind: BulkKind, provider: Provider) -> None:
        self._providers[kind] = provider

    async def _serve(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            try:
                if len(frames) != 2:
                    raise RemoteProtocolError("a bulk request has one frame")
                request = codec.decode(frames[1])
                if not isinstance(request, BulkRequest):
                    raise RemoteProtocolError("not a bulk request")
            except RemoteProtocolError:
                self.bad += 1
                continue
            total, data = self._found(request) or (-1, b"")
            reply = codec.encode(BulkReply(request=request.request, total=total))
            with contextlib.suppress(zmq.ZMQError):
                await self._router.send_multipart([frames[0], reply, data], flags=zmq.NOBLOCK, copy=True)
                self.sent_bytes += len(data)

    def _found(self, request: BulkRequest) -> tuple[int, bytes | memoryview] | None:
        provider = self._providers.get(request.kind)
        try:
            return provider(request) if provider is not None else None
        except OSError as error:  # what this disk does not give is asked of another peer
            log.warning("bulk request %s: %s", request.kind.name, error)
            return None

    def close(self) -> None:
        if self.serving is not None:
            self.serving.cancel()
        self._router.close(0)


@dataclass(slots=True)
class _Source:
    socket: zmq.asyncio.Socket
    task: asyncio.Task[None]
    waiting: dict[int, asyncio.Future[tuple[int, bytes]]] = field(default_factory=dict)


class SourceLostError(Exception):
    """A source did not answer in time or does not have the thing; try another."""


class BulkClient:
    """Asks other agents for ranges."""

    def __init__(self, context: zmq.asyncio.Context, timeout_ms: int) -> None:
        self._context = context
        self._timeout_s = timeout_ms / 1000
        self._sources: dict[str, _Source] = {}
        self._numbers = itertools.count(1)
        self.received_bytes = 0

    async def fetch(
        self,
        address: str,
        kind: BulkKind,
        *,
        digest: bytes,
        name: str = "",
        part: int = 0,
        offset: int,
        size: int,
    ) -> tuple[int, bytes]:
        """(total size of the whole, the range's bytes); SourceLostError."""
        source = self._sources.get(address) or self._open(address)
        number = next(self._numbers)
        request = BulkRequest(
            request=number, kind=kind, name=name, digest=digest, part=part, offset=offset, size=size
        )
        future: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        source.waiting[number] = future
        try:
            await source.socket.send(codec.encode(request), flags=zmq.NOBLOCK)
            total, data = await asyncio.wait_for(future, self._timeout_s)
        except (asyncio.TimeoutError, zmq.ZMQError):
            self.forget(address)
            raise SourceLostError(f"{address} did not answer within {self._timeout_s:g} s") from None
        finally:
            source.waiting.pop(number, None)
        if total < 0:
            raise SourceLostError(f"{address} does not have it")
        if len(data) != min(size, max(0, total - offset)):
            raise SourceLostError(f"{address} sent {len(data)} bytes where {size} were asked")
        self.received_bytes += len(data)
        return total, data

    def _open(self, address: str) -> _Source:
        for idle in [a for a, s in self._sources.items() if not s.waiting][
            : max(0, len(self._sources) - IDLE_LINKS)
        ]:
            self.forget(idle)
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_DATA_BYTES + (1 << 16))
        dealer.setsockopt(zmq.IPV6, 1)
        try:
            dealer.connect(address)
        except zmq.ZMQError as error:
            dealer.close(0)
            raise SourceLostError(f"{address!r}: {error.strerror}") from None
        source = _Source(socket=dealer, task=asyncio.create_task(self._receive(address, dealer)))
        self._sources[address] = source
        return source

    async def _receive(self, address: str, dealer: zmq.asyncio.Socket) -> None:
        while True:
            frames = await dealer.recv_multipart()
            source = self._sources.get(address)
            if source is None or len(frames) != 2 or len(frames[1]) > MAX_DATA_BYTES:
                continue
            try:
                reply = codec.decode(frames[0])
            except RemoteProtocolError:
                continue
            future = source.waiting.get(reply.request) if isinstance(reply, BulkReply) else None
            if future is not None and not future.done():
                future.set_result((reply.total, frames[1]))

    def forget(self, address: str) -> None:
        """Drop a source; its waiting requests fail at once."""
        source = self._sources.pop(address, None)
        if source is None:
            return
        source.task.cancel()
        source.socket.close(0)
        for future in source.waiting.values():
            if not future.done():
                future.set_result((-1, b""))

    def close(self) -> None:
        for address in list(self._sources):
            self.forget(address)
