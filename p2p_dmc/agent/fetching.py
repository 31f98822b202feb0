"""Getting shards and manifests from the peers that have them (DESIGN.md section 9)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from p2p_dmc.agent.bulk import BulkClient, SourceLostError
from p2p_dmc.agent.known import Known
from p2p_dmc.agent.tasks import Tasks
from p2p_dmc.config import AgentSettings
from p2p_dmc.core.membership import MemberRecord
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.store import Store, StoreFull
from p2p_dmc.errors import RemoteProtocolError, UserError
from p2p_dmc.observe.journal import Journal
from p2p_dmc.wire.messages import BulkKind, Holdings

log = logging.getLogger("p2p_dmc.data")
Key = tuple[bytes, int]  # data set digest, shard index
AGAIN_S = 1.0


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
        self._manifests: set[bytes] = set()
        self._shards: dict[Key, asyncio.Task[None]] = {}
        self._callbacks: dict[Key, list[Callable[[], None]]] = {}
        self._tasks = Tasks(lambda error: log.error("a task failed", exc_info=error))
        self._slots = asyncio.Semaphore(settings.fetch_parallel)
        self._full = False

    def __len__(self) -> int:
        """Shards that are being verified or fetched."""
        return len(self._shards)

    @property
    def full(self) -> bool:
        """There was no room for a shard, and there is none for a few yet."""
        if self._full:
            largest = max((max(k.manifest.shard_sizes) for k in self._known.values()), default=0)
            self._full = self._store.free_bytes() < 4 * largest
        return self._full

    def sources(self, key: Key) -> list[str]:
        """Who holds the shard, in the order in which HRW names them, starting at a place of this peer's own."""
        known = self._known[key[0]]
        holders = {p for p, o in known.others.items() if key[1] in o.shards}
        ranked = [p for p in (known.placed.rank(key[1]) if known.placed else ()) if p in holders]
        ranked += sorted(holders - set(ranked))
        start = (int(self._me[:8], 16) + key[1]) % len(ranked) if ranked else 0
        return ranked[start:] + ranked[:start]

    def want(self, key: Key, then: Callable[[], None]) -> None:
        """Verify or fetch a shard at once; ``then`` is called, once, when it is usable."""
        callbacks = self._callbacks.setdefault(key, [])
        if then not in callbacks:
            callbacks.append(then)
        self.start(key, urgent=True)

    def start(self, key: Key, *, urgent: bool) -> None:
        """Verify or fetch a shard in the background, unless that is under way or there is no room for it."""
        if key not in self._shards and key[0] in self._known and (self._store.has(*key) or not self.full):
            self._shards[key] = self._tasks.spawn(self._obtain(key, urgent))

    def manifest(self, sender: str, said: Holdings, then: Callable[[str, Holdings, Manifest], None]) -> None:
        """Fetch a data set's manifest from the peer that spoke of it, unless that is under way; ``then`` learns it."""
        if said.dataset not in self._manifests:
            self._manifests.add(said.dataset)
            self._tasks.spawn(self._fetch_manifest(sender, said, then))

    def _address(self, peer_id: str) -> str | None:
        return next((r.bulk_address for r in self._members() if r.peer_id == peer_id), None)

    async def _fetch_manifest(
        self, sender: str, said: Holdings, then: Callable[[str, Holdings, Manifest], None]
    ) -> None:
        try:
            address = self._address(sender)
            parts: list[bytes] = []
            total = 1
            while address is not None and sum(map(len, parts)) < total:
                total, data = await self._bulk.fetch(
                    address,
                    BulkKind.MANIFEST,
                    digest=said.dataset,
                    offset=sum(map(len, parts)),
                    size=self._settings.fetch_chunk_bytes,
                )
                if total > 1 << 30:
                    raise RemoteProtocolError("a manifest of more than 1 GiB")
                parts.append(data)
            manifest = Manifest.from_bytes(b"".join(parts))
            if manifest.digest != said.dataset:
                raise RemoteProtocolError("another manifest than was asked for")
            self._store.add_manifest(manifest)
            then(sender, said, manifest)
        except (SourceLostError, RemoteProtocolError, UserError) as error:
            log.warning("manifest %s from %s: %s", said.dataset.hex(), sender, error)
        finally:
            self._manifests.discard(said.dataset)

    async def _obtain(self, key: Key, urgent: bool) -> None:
        """Verify what is on disk, or fetch it; then tell whoever waits."""
        known = self._known[key[0]]
        try:
            if self._store.has(*key) and key[1] not in known.verified:
                stamp = self._store.stamp(*key)
                if await asyncio.to_thread(self._store.verify, *key):
                    known.verify(key[1], stamp)
                else:
                    self._journal.event("shard_corrupt", shard=known.manifest.shard_digests[key[1]].hex())
                    self._damaged(key)
            if not self._store.has(*key):
                if urgent:
                    await self._fetch(key, known)
                else:
                    async with self._slots:
                        await self._fetch(key, known)
                    await asyncio.sleep(0.0 if self._store.has(*key) else AGAIN_S)  # no source was any good
        except StoreFull as error:
            self._full = True
            self._say(str(error))
            self._journal.event("store_full", reason=str(error))
        except UserError as error:
            self._say(str(error))
        finally:
            self._shards.pop(key, None)
        for callback in self._callbacks.pop(key, []) if key[1] in known.verified else ():
            callback()

    async def _fetch(self, key: Key, known: Known) -> None:
        started_s = time.monotonic()
        tried: set[str] = set()
        while not self._store.has(*key):
            sources = [p for p in self.sources(key) if p not in tried]
            if not sources:
                return
            tried.add(sources[0])
            address = self._address(sources[0])
            if address is not None and await self._fetch_from(address, key, known):
                known.verify(key[1], self._store.stamp(*key))
                self._obtained(known)
                self._journal.event(
                    "fetched",
                    shard=known.manifest.shard_digests[key[1]].hex(),
                    source=sources[0],
                    size_bytes=known.manifest.shard_sizes[key[1]],
                    seconds=round(time.monotonic() - started_s, 3),
                )

    async def _fetch_from(self, address: str, key: Key, known: Known) -> bool:
        """Fetch the missing ranges from one source and verify the whole; False when another is needed."""
        partial = self._store.open_partial(*key)
        ranges = partial.missing_ranges(self._settings.fetch_chunk_bytes)[::-1]

        async def worker() -> None:
            while ranges:
                offset, size = ranges.pop()
                total, data = await self._bulk.fetch(
                    address, BulkKind.SHARD, digest=key[0], part=key[1], offset=offset, size=size
                )
                if total != partial.size_bytes:
                    raise SourceLostError(f"{address} has {total} bytes of it, not {partial.size_bytes}")
                partial.write(offset, data)

        workers = [asyncio.ensure_future(worker()) for _ in range(self._settings.fetch_window)]
        try:
            await asyncio.gather(*workers)
        except SourceLostError as error:
            log.info("shard %s: %s", known.manifest.shard_digests[key[1]].hex()[:12], error)
            return False
        except StoreFull:
            partial.abandon()
            raise
        finally:
            for one in workers:
                one.cancel()  # what a lost source sends late overwrites nothing of the next one's
        if await asyncio.to_thread(partial.commit):
            return True
        self._journal.event("bad_shard", shard=known.manifest.shard_digests[key[1]].hex(), source=address)
        return False

    async def close(self) -> None:
        await self._tasks.close()
