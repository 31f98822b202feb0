"""Getting shards and manifests from the peers that have them (DESIGN.md section 9).

Each range of a shard comes from whoever `spreading` chooses; the whole is verified once it is here. If it turns out
wrong and several peers had a part in it, it is fetched again from one holder at a time until it is right: a holder
that sent all of a wrong one is named, and so is whoever sent the blocks in which the wrong one differs from the right.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from p2p_dmc.agent.blame import senders_of_wrong
from p2p_dmc.agent.bulk import BACKGROUND, BulkClient, SourceLostError, SourceSilentError
from p2p_dmc.agent.known import Known, report_fault
from p2p_dmc.agent.manifests import Manifests
from p2p_dmc.agent.room import Room
from p2p_dmc.agent.serving import Parts, Serving
from p2p_dmc.agent.spreading import Ask, ShardPlan, Spreading
from p2p_dmc.agent.tasks import Tasks
from p2p_dmc.config import AgentSettings
from p2p_dmc.core.membership import MemberRecord
from p2p_dmc.core.pledges import Key
from p2p_dmc.data.partial import PartialShard
from p2p_dmc.data.store import Store, StoreFull
from p2p_dmc.errors import RemoteProtocolError, UserError
from p2p_dmc.observe.journal import Journal
from p2p_dmc.wire import codec
from p2p_dmc.wire.messages import BulkKind

log = logging.getLogger("p2p_dmc.data")
AGAIN_S, AGAIN_MOST_S = 1.0, 8.0
"""What nobody gave is tried again after so long, twice as long each time: until then others have its place."""
LOOK_S = 0.1
"""How often other receivers are asked what they have, and sources are looked at anew."""
AHEAD_BYTES = 16 << 20
"""Further shards are begun while less than this is left to ask for of those that are."""
MOST_OPEN = 64
"""Shards on their way at once: of small ones many are needed to fill a link."""
SILENT_S = 10.0
"""A source that fell silent is not asked for so long."""
DISTRUST_S = 600.0
"""A source that sent something wrong is asked only where nobody else holds the shard, for so long."""
ENOUGH_HOLDERS = 3
"""With so many there is no need to ask those who receive a shard, too."""
MOST_ASKED = 16
"""Receivers that are asked at each look."""
PARTS_BYTES = 1 << 18
DISK_THREADS = 4
YIELD_REST = 9
"""While training needs the link, background fetches rest so many times as long as a range has taken."""


@dataclass(eq=False, slots=True)
class _Receipt:
    """One shard on its way, and how it ends: True when all of it was written, False when nobody has the rest."""

    plan: ShardPlan
    partial: PartialShard
    only: str | None
    ended: asyncio.Future[bool]
    written: int = 0
    resumed: bool = False
    tasks: dict[Ask, asyncio.Task[None]] = field(default_factory=dict)


class Fetching:
    """Fetches what it is told to, one shard once at a time; ``known`` is read, its ``verified`` written.

    ``obtained`` hears of each shard that came whole and verified, ``damaged`` of one whose file turned out not to be.
    """

    def __init__(
        self,
        *,
        store: Store,
        bulk: BulkClient,
        peer_id: str,
        settings: AgentSettings,
        journal: Journal,
        say: Callable[[str], None],
        members: Callable[[], tuple[MemberRecord, ...]],
        known: Mapping[bytes, Known],
        obtained: Callable[[Known], None],
        damaged: Callable[[Key], None],
    ) -> None:
        self._store = store
        self._bulk = bulk
        self._me = peer_id
        self._settings = settings
        self._journal = journal
        self._say = say
        self._members = members
        self._known = known
        self._obtained = obtained
        self._damaged = damaged
        self.yields: Callable[[], bool] = lambda: False
        """Whether training needs the link just now: what nobody waits for slows down."""
        self.trains: Callable[[], bool] = lambda: False
        """Whether it will, in a moment."""
        self._shards: dict[Key, asyncio.Task[None]] = {}
        self._again: dict[Key, tuple[float, float]] = {}  # when it may be tried, the pause before that
        self._callbacks: dict[Key, list[Callable[[], None]]] = {}
        self._tasks = Tasks(lambda error: log.error("a task failed", exc_info=error))
        self._room = Room(store, known, say, journal)
        self.manifests = Manifests(bulk, settings.fetch_chunk_bytes, members, self._tasks, self._room.used_up)
        self._threads = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="shards")
        self._readers = ThreadPoolExecutor(
            DISK_THREADS, "serving"
        )  # never behind what waits for the disk to sync
        self.serving = Serving(store, known, lambda: self._receipts, damaged, self._readers)
        self._spreading = Spreading(settings.fetch_piece_bytes, settings.fetch_range_bytes)
        self._receipts: dict[Key, _Receipt] = {}
        self._open: set[Key] = set()
        self._queue: dict[Key, asyncio.Future[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._addresses: dict[str, str] = {}
        self._avoid_until_s: dict[str, float] = {}
        self._distrust_until_s: dict[str, float] = {}
        self._asking_parts: set[tuple[str, bytes]] = set()
        self._asked_parts_s: dict[tuple[str, bytes], float] = {}
        self._rest_until_s = 0.0
        self._closed = False

    def __len__(self) -> int:
        """Shards that are being verified or fetched."""
        return len(self._shards)

    def __contains__(self, key: Key) -> bool:
        return key in self._shards

    @property
    def full(self) -> bool:
        """There was no room for a shard, and there is none for a few yet."""
        return self._room.full

    def sources(self, key: Key) -> list[str]:
        """Who holds the shard, in the order in which HRW names them, starting at a place of this peer's own."""
        known = self._known[key[0]]
        holders = {p for p, o in known.others.items() if key[1] in o.shards}
        ranked = [p for p in known.rank(key[1]) if p in holders]
        ranked += sorted(holders - set(ranked))
        start = (int(self._me[:8], 16) + key[1]) % len(ranked) if ranked else 0
        return ranked[start:] + ranked[:start]

    def want(self, key: Key, then: Callable[[], None]) -> None:
        """Verify or fetch a shard at once; ``then`` is called, once, when it is usable."""
        callbacks = self._callbacks.setdefault(key, [])
        if then not in callbacks:
            callbacks.append(then)
        for one in (key, *self._store.twins(*key)):
            if one in self._receipts:
                self._receipts[one].plan.urgent = True
        if key in self._queue:
            self._queue.pop(key).set_result(None)
        self.start(key, urgent=True)

    def may_start(self, key: Key) -> bool:
        """Whether a shard that nobody waits for may be begun: it is not on its way, nor for another version of the data
        set, and was not tried in vain a moment ago.
        """
        is_due = self._again.get(key, (0.0, 0.0))[0] <= time.monotonic()
        return is_due and not any(one in self._shards for one in (key, *self._store.twins(*key)))

    def start(self, key: Key, *, urgent: bool) -> None:
        """Verify or fetch a shard in the background, unless that is under way or there is no room for it."""
        if key not in self._shards and key[0] in self._known and (self._store.has(*key) or not self.full):
            self._shards[key] = self._tasks.spawn(self._obtain(key, urgent))

    async def close(self) -> None:
        self._closed = True
        await self._tasks.close()
        for threads in (self._threads, self._readers):
            threads.shutdown(wait=False, cancel_futures=True)

    # -- one shard ----------------------------------------------------------------------------------------------------

    async def _obtain(self, key: Key, urgent: bool) -> None:
        """Verify what is on disk, or fetch it; then tell whoever waits."""
        known = self._known[key[0]]
        try:
            await self._verify(key, known)
            if not self._store.has(*key):
                await self._turn(key)
                await self._twins_end(key)
                await self._verify(key, known)  # it may have come for another version meanwhile
            if not self._store.has(*key):
                await self._fetch(key, known)
        except StoreFull as error:
            self._room.used_up(error)
        except UserError as error:
            self._say(str(error))
        finally:
            self._open.discard(key)
            self._shards.pop(key, None)
            pause_s = min(max(AGAIN_S, 2 * self._again.pop(key, (0.0, 0.0))[1]), AGAIN_MOST_S)
            if not self._store.has(*key):  # no source was any good, or the disk
                self._again[key] = time.monotonic() + pause_s, pause_s
            self._admit()
        if key[1] in known.verified:
            for callback in self._callbacks.pop(key, []):
                callback()
        elif not urgent and key in self._callbacks:  # somebody has come to wait for it meanwhile
            self.start(key, urgent=True)

    async def _verify(self, key: Key, known: Known) -> None:
        """What is on disk, if there is anything that was not yet."""
        if not self._store.has(*key) or key[1] in known.verified:
            return
        stamp = self._store.stamp(*key)
        wrong = await asyncio.to_thread(self._store.fault, *key)
        if wrong is None:
            known.verify(key[1], stamp)
        elif wrong:  # else somebody else has found it at the same time
            report_fault(known, key[1], wrong, self._say, self._journal)
            self._damaged(key)

    async def _twins_end(self, key: Key) -> None:
        """While the same shard is on its way for another version of the data set it is not fetched a second time."""
        while twin := next((one for one in self._store.twins(*key) if one in self._receipts), None):
            if key in self._callbacks:
                self._receipts[twin].plan.urgent = True
            await asyncio.wait({self._shards[twin]})

    async def _turn(self, key: Key) -> None:
        """Wait until this shard may begin; those that somebody waits for do at once."""
        if key not in self._callbacks:
            turn = self._queue[key] = asyncio.get_running_loop().create_future()
            try:
                self._admit()
                await turn
            finally:
                self._queue.pop(key, None)
        self._open.add(key)

    def _admit(self) -> None:
        if self._queue and not self._closed and len(self._open) < MOST_OPEN:
            enough = self._spreading.unasked_bytes() >= AHEAD_BYTES
            if enough and len(self._open) >= self._settings.fetch_parallel:
                return
            # the next one after this one has a plan
            self._queue.pop(next(iter(self._queue))).set_result(None)

    async def _fetch(self, key: Key, known: Known) -> None:
        started_s = time.monotonic()
        named: set[str] = set()
        receipt = await self._receive(key, known)
        wrong = [] if receipt is None or self._store.has(*key) else [receipt]
        if wrong:
            receipt = await self._receive_singly(key, known, wrong[0], named)
        if receipt is None:
            return
        for one in wrong:
            path, plan = self._store.path(*key), one.plan
            for liar in await self._in_thread(
                senders_of_wrong, path, one.partial.bad_blocks, plan.given, plan.piece_bytes
            ):
                self._blame(key, known, liar, named)
        known.verify(key[1], self._store.stamp(*key))
        self.serving.came(key)
        self._obtained(known)
        plan = receipt.plan
        given = sorted(plan.given.items(), key=lambda one: -one[1].bit_count())
        self._journal.event(
            "fetched",
            shard=known.manifest.shard_digests[key[1]].hex(),
            source=given[0][0] if given else self._me,
            sources={p: min(m.bit_count() * plan.piece_bytes, plan.size_bytes) for p, m in given},
            size_bytes=plan.size_bytes,
            seconds=round(time.monotonic() - started_s, 3),
        )

    async def _receive_singly(
        self, key: Key, known: Known, wrong: _Receipt, named: set[str]
    ) -> _Receipt | None:
        """What came from several was wrong: from one holder after the other, until one sends the right shard."""
        receipt: _Receipt | None = wrong
        sources = self.sources(key)
        while True:
            if receipt is not None and len(receipt.plan.given) == 1 and not receipt.resumed:
                self._blame(key, known, next(iter(receipt.plan.given)), named)
            single = next((peer_id for peer_id in sources if peer_id not in named), None)
            if single is None:
                return None
            sources.remove(single)
            receipt = await self._receive(key, known, only=single)
            if receipt is not None and self._store.has(*key):
                return receipt

    def _blame(self, key: Key, known: Known, peer_id: str, named: set[str]) -> None:
        if peer_id not in named:
            named.add(peer_id)
            self._distrust_until_s[peer_id] = time.monotonic() + DISTRUST_S
            digest = known.manifest.shard_digests[key[1]]
            self._journal.event("bad_shard", shard=digest.hex(), source=peer_id)

    # -- ranges -------------------------------------------------------------------------------------------------------

    async def _receive(self, key: Key, known: Known, only: str | None = None) -> _Receipt | None:
        """All ranges, from all sources or a single one, and the verdict on the whole; None if some are nowhere."""
        partial = self._store.open_partial(*key)
        if only is not None and partial.written_bytes:
            partial.abandon()
            partial = self._store.open_partial(*key)
        plan = ShardPlan.of(
            key,
            partial.size_bytes,
            self._spreading.piece_bytes,
            partial.written_ranges,
            urgent=key in self._callbacks,
        )
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        receipt = _Receipt(plan, partial, only, ended, plan.done, resumed=bool(partial.written_bytes))
        self._receipts[key], self._spreading.plans[key] = receipt, plan
        try:
            if self._looking is None or self._looking.done():
                self._look_up()
                self._looking = self._tasks.spawn(self._look_around())
            self._look_at(receipt)
            if plan.complete:
                ended.set_result(True)
            self._pump()
            if not await ended:
                partial.suspend()  # what has come is gone on with; meanwhile it takes no descriptor
                return None
            del self._spreading.plans[key]
            await self._in_thread(partial.commit, plan.piece_bytes)
            return receipt
        except StoreFull:
            partial.abandon()
            raise
        finally:
            self._spreading.plans.pop(key, None)
            del self._receipts[key]
            for task in receipt.tasks.values():
                task.cancel()  # what a slow source sends late overwrites nothing of the next one's

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def _look_around(self) -> None:
        """While anything is on its way: who has it now, and who is silent."""
        while self._receipts:
            self._look_up()
            self._spreading.forget(self._addresses)
            for receipt in list(self._receipts.values()):
                self._look_at(receipt)
            self._ask_receivers()
            self._pump()
            await asyncio.sleep(LOOK_S)

    def _look_up(self) -> None:
        self._addresses = {r.peer_id: r.bulk_address for r in self._members() if r.bulk_address}
        for told in (self._avoid_until_s, self._distrust_until_s):
            for peer_id in [p for p in told if p not in self._addresses]:
                del told[peer_id]
        self._asked_parts_s = {one: s for one, s in self._asked_parts_s.items() if one[0] in self._addresses}

    def _look_at(self, receipt: _Receipt) -> None:
        """Sources of one shard, as they are known now."""
        plan, now_s = receipt.plan, time.monotonic()
        able = {p for p in self._addresses if self._avoid_until_s.get(p, 0.0) <= now_s}
        sources = [p for p in self.sources(plan.key) if p in able] if plan.key[0] in self._known else []
        trusted = [p for p in sources if self._distrust_until_s.get(p, 0.0) <= now_s]
        if receipt.only is not None:
            plan.holders = frozenset([receipt.only]).intersection(sources)
            plan.receivers.clear()
            return
        plan.holders = frozenset(trusted or sources)
        placed = self._known[plan.key[0]].placed if plan.key[0] in self._known else None
        receivers = [p for p in (placed.holders(plan.key[1]) if placed else ()) if p not in plan.holders]
        plan.share(self._me, receivers, self._spreading.block_pieces)
        for peer_id in [p for p in plan.receivers if p not in receivers]:
            del plan.receivers[peer_id]

    def _ask_receivers(self) -> None:
        """Those who should be receiving the same shards are asked what they have of them."""
        asked: dict[tuple[str, bytes], None] = {}
        for key, receipt in self._receipts.items():
            known = self._known.get(key[0])
            if (
                known is None
                or known.placed is None
                or receipt.only
                or len(receipt.plan.holders) >= ENOUGH_HOLDERS
            ):
                continue
            for peer_id in known.placed.holders(key[1]):
                if peer_id != self._me and peer_id not in receipt.plan.holders:
                    asked[peer_id, key[0]] = None
        turns = [one for one in asked if one[0] in self._addresses and one not in self._asking_parts]
        turns.sort(key=lambda one: self._asked_parts_s.get(one, 0.0))
        for peer_id, dataset in turns[:MOST_ASKED]:
            self._asking_parts.add((peer_id, dataset))
            self._asked_parts_s[peer_id, dataset] = time.monotonic()
            self._tasks.spawn(self._ask_parts(peer_id, dataset, self._addresses[peer_id]))

    async def _ask_parts(self, peer_id: str, dataset: bytes, address: str) -> None:
        try:
            total, data = await self._bulk.fetch(
                address, BulkKind.PARTS, digest=dataset, offset=0, size=PARTS_BYTES
            )
            if total != len(data):
                raise RemoteProtocolError(f"{total} bytes of what it has")
            parts = codec.unpack_value(Parts, bytes(data), PARTS_BYTES)
            if parts.shards:
                self._spreading.active_s[peer_id] = time.monotonic()
            for shard, ranges in parts.shards:
                receipt = self._receipts.get((dataset, shard))
                trusted = self._distrust_until_s.get(peer_id, 0.0) <= time.monotonic()
                if receipt is not None and receipt.only is None and trusted:
                    receipt.plan.receivers[peer_id] = receipt.plan.pieces_within(ranges)
            self._pump()
        except (SourceLostError, RemoteProtocolError) as error:
            log.debug("parts at %s: %s", address, error)
        finally:
            self._asking_parts.discard((peer_id, dataset))

    def _pump(self) -> None:
        """Ask for whatever can be asked for now."""
        if self._closed:
            return
        self._admit()
        now_s = time.monotonic()
        busy = self.yields() and (now_s < self._rest_until_s or self._spreading.background_asked() > 0)
        trains = self.trains()
        able = {p for plan in self._spreading.plans.values() for p in (*plan.holders, *plan.receivers)}
        peers = [p for p in able if self._avoid_until_s.get(p, 0.0) <= now_s and p in self._addresses]
        while peers:
            peers.sort(key=lambda p: (self._spreading.asked_bytes(p), *self._place(p)))
            for peer_id in list(peers):
                ask = self._spreading.next_ask(peer_id, now_s, urgent_only=busy, gently=trains)
                if ask is None:
                    peers.remove(peer_id)
                    continue
                receipt = self._receipts[ask.key]
                receipt.tasks[ask] = self._tasks.spawn(self._ask(ask, receipt, self._addresses[peer_id]))
                busy = busy or (self.yields() and not receipt.plan.urgent)
        for receipt in list(self._receipts.values()):
            if receipt.plan.stuck() and not receipt.ended.done():
                receipt.ended.set_result(False)

    def _place(self, peer_id: str) -> tuple[int, str]:
        """Peers begin with different sources."""
        return (int(peer_id[:8], 16) - int(self._me[:8], 16)) % (1 << 32), peer_id

    async def _ask(self, ask: Ask, receipt: _Receipt, address: str) -> None:
        """One range from one source, into the file."""
        plan, spreading = receipt.plan, self._spreading
        try:
            total, data = await self._bulk.fetch(
                address,
                BulkKind.SHARD,
                name="" if plan.urgent else BACKGROUND,
                digest=ask.key[0],
                part=ask.key[1],
                offset=ask.offset,
                size=ask.size,
            )
            if total != plan.size_bytes:
                raise SourceLostError(f"{address} has {total} bytes of it, not {plan.size_bytes}")
            news, superfluous = spreading.taken(ask)
            for other in superfluous:
                receipt.tasks[other].cancel()
            if news:
                await self._in_thread(receipt.partial.write, ask.offset, data)
                receipt.written |= ask.pieces
                if receipt.written == plan.all and not receipt.ended.done():
                    receipt.ended.set_result(True)
            spreading.answered(ask, time.monotonic())
        except SourceLostError as error:
            log.info("shard %d of %s: %s", ask.key[1], ask.key[0].hex()[:12], error)
            self._failed(ask, plan, silent=isinstance(error, SourceSilentError))
        except UserError as error:  # the disk
            if not receipt.ended.done():
                receipt.ended.set_exception(error)
        finally:
            spreading.dropped(ask)
            receipt.tasks.pop(ask, None)
            if not plan.urgent and self.yields():
                self._rest_until_s = time.monotonic() + YIELD_REST * (time.monotonic() - ask.at_s)
            self._pump()

    def _failed(self, ask: Ask, plan: ShardPlan, *, silent: bool) -> None:
        if ask.peer_id in plan.holders:
            plan.lacking.add(ask.peer_id)
        plan.receivers.pop(ask.peer_id, None)
        if silent:
            self._avoid_until_s[ask.peer_id] = time.monotonic() + SILENT_S
