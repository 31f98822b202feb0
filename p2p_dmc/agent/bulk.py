"""Ranges of shards, manifests and states between agents, on a socket apart from control (DESIGN.md section 5)."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from p2p_dmc.agent.limits import RateLimit
from p2p_dmc.agent.tasks import Tasks
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.wire import codec
from p2p_dmc.wire.messages import BulkKind, BulkReply, BulkRequest
from p2p_dmc.wire.transport import bind_router

log = logging.getLogger("p2p_dmc.bulk")
MAX_DATA_BYTES = 4 << 20
IDLE_LINKS = 64
AT_ONCE = 4
"""Requests that a server works on at once: one is read from the disk while others wait for it, or are sent."""
TRICKLE_BYTES = 3_000_000
"""What nobody waits for is sent at this rate, bytes a second, while training needs the link here."""
MOST_LATER = 256
LOST_TIMES = 4
"""A request is given up after so many time-outs, though its source answers others: the request was dropped there."""

BACKGROUND = "background"
"""Name of requests that nobody waits for."""

Found = tuple[int, bytes | memoryview] | None
Provider = Callable[[BulkRequest], Found | Awaitable[Found]]


class BulkServer:
    """Answers range requests; the providers say what there is. Unknown or malformed requests cost nothing else."""

    def __init__(self, context: zmq.asyncio.Context, limit: RateLimit | None = None) -> None:
        self._limit = limit or RateLimit()
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, 64)
        self._router.setsockopt(zmq.MAXMSGSIZE, 1 << 16)  # requests are small
        self._router.setsockopt(zmq.IPV6, 1)
        self._providers: dict[BulkKind, Provider] = {}
        self.serving: asyncio.Task[None] | None = None
        self.busy: Callable[[], bool] = lambda: False
        """Whether training needs the link just now."""
        self._trickle_until_s = 0.0
        self._later = Tasks(lambda error: log.error("a bulk request failed", exc_info=error))
        self.sent_bytes = 0
        self.bad = 0

    def bind(self, host: str) -> int:
        port = bind_router(self._router, host, 0)
        self.serving = asyncio.create_task(self._serve())
        return port

    def provide(self, kind: BulkKind, provider: Provider) -> None:
        self._providers[kind] = provider

    async def _serve(self) -> None:
        await asyncio.gather(*(self._answer_forever() for _ in range(AT_ONCE)))

    async def _answer_forever(self) -> None:
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
            if request.name == BACKGROUND and self.busy() and len(self._later) < MOST_LATER:
                self._later.spawn(self._trickle(frames[0], request))
            else:
                await self._answer(frames[0], request)

    async def _trickle(self, who: bytes, request: BulkRequest) -> None:
        due_s = self._trickle_until_s = (
            max(self._trickle_until_s, time.monotonic()) + request.size / TRICKLE_BYTES
        )
        while self.busy() and time.monotonic() < due_s:
            await asyncio.sleep(0.02)
        await self._answer(who, request)

    async def _answer(self, who: bytes, request: BulkRequest) -> None:
        total, data = await self._found(request) or (-1, b"")
        await self._limit.take(len(data))
        if self._router.closed:
            return
        reply = codec.encode(BulkReply(request=request.request, total=total))
        copy = not isinstance(data, bytes)  # a view's memory may change before it is sent
        with contextlib.suppress(zmq.ZMQError):
            await self._router.send_multipart([who, reply, data], flags=zmq.NOBLOCK, copy=copy)
            self.sent_bytes += len(data)

    async def _found(self, request: BulkRequest) -> Found:
        provider = self._providers.get(request.kind)
        try:
            found = provider(request) if provider is not None else None
            return await found if inspect.isawaitable(found) else found
        except OSError as error:  # what this disk does not give is asked of another peer
            log.warning("bulk request %s: %s", request.kind.name, error)
            return None

    def close(self) -> None:
        if self.serving is not None:
            self.serving.cancel()
        self._later.cancel()
        self._router.close(0)


@dataclass(slots=True)
class _Source:
    socket: zmq.asyncio.Socket
    task: asyncio.Task[None]
    waiting: dict[int, asyncio.Future[tuple[int, memoryview]]] = field(default_factory=dict)
    heard_s: float = 0.0


class SourceLostError(Exception):
    """A source did not answer in time or does not have the thing; try another."""


class SourceSilentError(SourceLostError):
    """It answers nothing any more."""


SILENT = -2  # in place of a total


class BulkClient:
    """Asks other agents for ranges."""

    def __init__(self, context: zmq.asyncio.Context, timeout_ms: int, limit: RateLimit | None = None) -> None:
        self._context = context
        self._limit = limit or RateLimit()
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
    ) -> tuple[int, memoryview]:
        """(total size of the whole, the range's bytes); SourceLostError.

        A source may take its time with a range as long as it answers others: it is silent when nothing has come from
        it for the time-out.
        """
        await self._limit.take(size)
        used = 0
        try:
            total, data = await self._exchange(address, kind, name, digest, part, offset, size)
            used = len(data)
        finally:
            self._limit.give_back(size - used)
        return total, data

    async def _exchange(
        self, address: str, kind: BulkKind, name: str, digest: bytes, part: int, offset: int, size: int
    ) -> tuple[int, memoryview]:
        source = self._sources.get(address) or self._open(address)
        number = next(self._numbers)
        request = BulkRequest(
            request=number, kind=kind, name=name, digest=digest, part=part, offset=offset, size=size
        )
        future: asyncio.Future[tuple[int, memoryview]] = asyncio.get_running_loop().create_future()
        source.waiting[number] = future
        try:
            await source.socket.send(codec.encode(request), flags=zmq.NOBLOCK)
            total, data = await self._answer(address, source, future)
        except zmq.ZMQError:
            self.forget(address)
            raise SourceSilentError(f"{address} takes no requests") from None
        finally:
            source.waiting.pop(number, None)
        if total == SILENT:
            raise SourceSilentError(f"{address} did not answer within {self._timeout_s:g} s")
        if total < 0:
            raise SourceLostError(f"{address} does not have it")
        if len(data) != min(size, max(0, total - offset)):
            raise SourceLostError(f"{address} sent {len(data)} bytes where {size} were asked")
        self.received_bytes += len(data)
        return total, data

    async def _answer(
        self, address: str, source: _Source, future: asyncio.Future[tuple[int, memoryview]]
    ) -> tuple[int, memoryview]:
        asked_s = now_s = time.monotonic()
        while not future.done():
            left_s = max(asked_s, source.heard_s) + self._timeout_s - now_s
            if left_s <= 0:
                self.forget(address)
            elif now_s - asked_s > LOST_TIMES * self._timeout_s:
                raise SourceLostError(f"{address} answers others and not this")
            else:
                await asyncio.wait({future}, timeout=left_s)
            now_s = time.monotonic()
        return future.result()

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
            frames = await dealer.recv_multipart(copy=False)
            source = self._sources.get(address)
            if source is None or len(frames) != 2 or len(frames[1]) > MAX_DATA_BYTES:
                continue
            source.heard_s = time.monotonic()
            try:
                reply = codec.decode(frames[0].buffer)
            except RemoteProtocolError:
                continue
            future = source.waiting.get(reply.request) if isinstance(reply, BulkReply) else None
            if future is not None and not future.done():
                future.set_result((reply.total, frames[1].buffer))

    def forget(self, address: str) -> None:
        """Drop a source; its waiting requests fail at once."""
        source = self._sources.pop(address, None)
        if source is None:
            return
        source.task.cancel()
        source.socket.close(0)
        for future in source.waiting.values():
            if not future.done():
                future.set_result((SILENT, memoryview(b"")))

    def close(self) -> None:
        for address in list(self._sources):
            self.forget(address)
