"""Ranges of shards, manifests and states between agents, on a socket apart from control (DESIGN.md section 5)."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import zmq
import zmq.asyncio

from p2p_dmc.agent.limits import RateLimit
from p2p_dmc.agent.tasks import Tasks
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.wire import codec
from p2p_dmc.wire.inbox import Inbox, plain_socket
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
MOST_WAITING = 1024
"""Requests that wait their turn here; further ones wait in the queues of whoever asks."""
REASSURE_S = 1.0
"""A client hears so often that its requests wait for their turn, where nothing else is sent to it."""
STALLED_S = 3.0
NO_REQUEST = 0
"""In place of a request's number: requests of this client wait for their turn."""
LOST_TIMES = 4
"""A request is given up after so many time-outs, though its source answers others: the request was dropped there."""

BACKGROUND = "background"
"""Name of requests that nobody waits for."""

Found = tuple[int, bytes | memoryview] | None
Provider = Callable[[BulkRequest], Found | Awaitable[Found]]


class BulkServer:
    """Answers range requests; the providers say what there is. Unknown or malformed requests cost nothing else.

    Requests wait their turn here: a client whose turn takes its time is told, so that it waits.
    """

    def __init__(self, context: zmq.asyncio.Context, limit: RateLimit | None = None) -> None:
        self._limit = limit or RateLimit()
        self._router = plain_socket(context, zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, 64)
        self._router.setsockopt(
            zmq.ROUTER_MANDATORY, 1
        )  # what was for one that is gone is not counted as sent
        self._router.setsockopt(zmq.MAXMSGSIZE, 1 << 16)  # requests are small
        self._router.setsockopt(zmq.IPV6, 1)
        self._providers: dict[BulkKind, Provider] = {}
        self._inbox: Inbox | None = None
        self.serving: asyncio.Task[None] | None = None
        self.busy: Callable[[], bool] = lambda: False
        """Whether training needs the link just now."""
        self._trickle_until_s = 0.0
        self._waiting: deque[tuple[bytes, BulkRequest]] = deque()
        self._later = Tasks(lambda error: log.error("a bulk request failed", exc_info=error))
        self._working = Tasks(lambda error: log.error("a bulk request failed", exc_info=error))
        self._owed: Counter[bytes] = Counter()
        """Requests of each client that wait for their turn, or for the limit."""
        self._told_s: dict[bytes, float] = {}
        self._moved_s = 0.0
        """When something was answered last."""
        self.sent_bytes = 0
        self.bad = 0

    def bind(self, host: str) -> int:
        port = bind_router(self._router, host, 0)
        self._inbox = Inbox(self._router, self._heard, lambda: len(self._waiting) < MOST_WAITING)
        self.serving = asyncio.create_task(self._reassure())
        return port

    def provide(self, kind: BulkKind, provider: Provider) -> None:
        self._providers[kind] = provider

    def _heard(self, frames: Sequence[zmq.Frame]) -> None:
        try:
            if len(frames) != 2:
                raise RemoteProtocolError("a bulk request has one frame")
            request = codec.decode(frames[1].buffer)
            if not isinstance(request, BulkRequest):
                raise RemoteProtocolError("not a bulk request")
        except RemoteProtocolError:
            self.bad += 1
            return
        who = frames[0].bytes
        self._queued(who)
        if request.name == BACKGROUND and self.busy() and len(self._later) < MOST_LATER:
            self._later.spawn(self._trickle(who, request))
        else:
            self._waiting.append((who, request))
            self._work()

    def _queued(self, who: bytes) -> None:
        self._owed[who] += 1
        self._told_s.setdefault(who, time.monotonic())

    def _has_turn(self, who: bytes) -> None:
        self._owed[who] -= 1
        if not self._owed[who]:
            del self._owed[who], self._told_s[who]

    def _work(self) -> None:
        while self._waiting and len(self._working) < AT_ONCE:
            self._working.spawn(self._answer_next(*self._waiting.popleft())).add_done_callback(self._next)

    def _next(self, _: asyncio.Task[None]) -> None:
        if self._inbox is not None and not self._router.closed:
            self._inbox.look()
            self._work()

    async def _answer_next(self, who: bytes, request: BulkRequest) -> None:
        await self._answer(who, request)

    async def _trickle(self, who: bytes, request: BulkRequest) -> None:
        due_s = self._trickle_until_s = (
            max(self._trickle_until_s, time.monotonic()) + request.size / TRICKLE_BYTES
        )
        while self.busy() and time.monotonic() < due_s:
            await asyncio.sleep(0.02)
        await self._answer(who, request)

    async def _answer(self, who: bytes, request: BulkRequest) -> None:
        self._has_turn(who)
        total, data = await self._found(request) or (-1, b"")
        self._queued(who)
        try:
            await self._limit.take(len(data))
        finally:
            self._has_turn(who)
        self._moved_s = time.monotonic()
        if self._say(who, BulkReply(request=request.request, total=total), data):
            self.sent_bytes += len(data)
        else:
            self._limit.give_back(len(data))

    def _say(self, who: bytes, reply: BulkReply, data: bytes | memoryview) -> bool:
        """False where it cannot be sent: the client is gone, or takes nothing."""
        if self._inbox is None or self._router.closed:
            return False
        if who in self._told_s:
            self._told_s[who] = time.monotonic()
        copy = not isinstance(data, bytes)  # a view's memory may change before it is sent
        try:
            self._inbox.send([who, codec.encode(reply), data], copy=copy)
        except zmq.ZMQError:
            return False
        return True

    async def _reassure(self) -> None:
        """Who has heard nothing for a while although it has asked is told that its turn comes, as long as others'
        does: where nothing is answered any more everybody may look for other sources.
        """
        while True:
            await asyncio.sleep(REASSURE_S)
            now_s = time.monotonic()
            if self._limit.wait_s(now_s) > 0 or self._trickle_until_s > now_s:
                self._moved_s = now_s
            if now_s - self._moved_s < STALLED_S:
                for who in [who for who, told_s in self._told_s.items() if told_s <= now_s - REASSURE_S]:
                    self._say(who, BulkReply(request=NO_REQUEST, total=0), b"")

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
        self._working.cancel()
        if self._inbox is not None:
            self._inbox.close()
        self._router.close(0)


@dataclass(slots=True)
class _Waiting:
    future: asyncio.Future[tuple[int, memoryview]]
    asked_s: float


@dataclass(slots=True)
class _Source:
    inbox: Inbox
    waiting: dict[int, _Waiting] = field(default_factory=dict)
    heard_s: float = 0.0
    queued_s: float = 0.0
    """When it said last that requests wait there for their turn."""
    watch: asyncio.TimerHandle | None = None


class SourceLostError(Exception):
    """A source did not answer in time or does not have the thing; try another."""


class SourceSilentError(SourceLostError):
    """It answers nothing any more."""


SILENT, LOST = -2, -3  # in place of a total


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
        source.waiting[number] = _Waiting(future, time.monotonic())
        try:
            source.inbox.send([codec.encode(request)])
            if source.watch is None:
                self._watch(address, source)
            total, data = await future
        except zmq.ZMQError:
            self.forget(address)
            raise SourceSilentError(f"{address} takes no requests") from None
        finally:
            source.waiting.pop(number, None)
        if total == SILENT:
            raise SourceSilentError(f"{address} did not answer within {self._timeout_s:g} s")
        if total == LOST:
            raise SourceLostError(f"{address} answers others and not this")
        if total < 0:
            raise SourceLostError(f"{address} does not have it")
        if len(data) != min(size, max(0, total - offset)):
            raise SourceLostError(f"{address} sent {len(data)} bytes where {size} were asked")
        self.received_bytes += len(data)
        return total, data

    def _watch(self, address: str, source: _Source) -> None:
        """End what is waited for in vain, and look again when the next may be."""
        source.watch, now_s = None, time.monotonic()
        waiting = [one for one in source.waiting.values() if not one.future.done()]
        if not waiting or self._sources.get(address) is not source:
            return
        oldest_s = min(one.asked_s for one in waiting)
        left_s = max(oldest_s, source.heard_s) + self._timeout_s - now_s
        if left_s <= 0:
            self.forget(address)
            return
        for one in waiting:
            lost_s = max(one.asked_s, source.queued_s) + LOST_TIMES * self._timeout_s - now_s
            left_s = min(left_s, lost_s) if lost_s > 0 else left_s
            if lost_s <= 0:
                one.future.set_result((LOST, memoryview(b"")))
        source.watch = asyncio.get_running_loop().call_later(left_s, self._watch, address, source)

    def _open(self, address: str) -> _Source:
        for idle in [a for a, s in self._sources.items() if not s.waiting][
            : max(0, len(self._sources) - IDLE_LINKS)
        ]:
            self.forget(idle)
        dealer = plain_socket(self._context, zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_DATA_BYTES + (1 << 16))
        dealer.setsockopt(zmq.IPV6, 1)
        try:
            dealer.connect(address)
        except zmq.ZMQError as error:
            dealer.close(0)
            raise SourceLostError(f"{address!r}: {error.strerror}") from None
        source = self._sources[address] = _Source(Inbox(dealer, partial(self._heard, address)))
        return source

    def _heard(self, address: str, frames: Sequence[zmq.Frame]) -> None:
        source = self._sources.get(address)
        if source is None or len(frames) != 2 or len(frames[1]) > MAX_DATA_BYTES:
            return
        source.heard_s = time.monotonic()
        try:
            reply = codec.decode(frames[0].buffer)
        except RemoteProtocolError:
            return
        if not isinstance(reply, BulkReply):
            return
        if reply.request == NO_REQUEST:
            source.queued_s = source.heard_s
        one = source.waiting.get(reply.request)
        if one is not None and not one.future.done():
            one.future.set_result((max(reply.total, -1), frames[1].buffer))

    def forget(self, address: str) -> None:
        """Drop a source; its waiting requests fail at once."""
        source = self._sources.pop(address, None)
        if source is None:
            return
        if source.watch is not None:
            source.watch.cancel()
        source.inbox.close()
        for one in source.waiting.values():
            if not one.future.done():
                one.future.set_result((SILENT, memoryview(b"")))

    def close(self) -> None:
        for address in list(self._sources):
            self.forget(address)
