"""Data sets on one peer: who holds what, fetching, re-placement, repair (DESIGN.md section 9)."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from p2p_dmc.agent.bulk import BulkClient, SourceLostError
from p2p_dmc.agent.known import DataWatch, Known, OthersHoldings
from p2p_dmc.agent.presence import present, storing
from p2p_dmc.agent.tasks import Tasks
from p2p_dmc.agent.work import bitmap, from_bitmap
from p2p_dmc.config import AgentSettings
from p2p_dmc.core.membership import MemberRecord
from p2p_dmc.core.placement import Placement
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.store import ShardMissing, Stamp, Store, StoreFull
from p2p_dmc.errors import RemoteProtocolError, UserError
from p2p_dmc.observe.journal import Journal
from p2p_dmc.wire.messages import BulkKind, BulkRequest, Holdings

log = logging.getLogger("p2p_dmc.data")
Key = tuple[bytes, int]  # data set digest, shard index
AGAIN_S = 1.0


class DataService:
    """Keeps this peer's part of every data set, and knows where the rest is."""

    def __init__(
        self,
        *,
        store: Store,
        bulk: BulkClient,
        peer_id: str,
        settings: AgentSettings,
        journal: Journal,
        say: Callable[[str], None],
        send: Callable[[str, object, str], None],
        members: Callable[[], tuple[MemberRecord, ...]],
    ) -> None:
        self.store = store
        self._bulk = bulk
        self._me = peer_id
        self._settings = settings
        self._journal = journal
        self._say = say
        self._send = send
        self._watch = DataWatch(say, journal, settings.differ_still_ms / 1000)
        self._members = members
        self._known: dict[bytes, Known] = {d: Known(manifest=store.manifest(d)) for d in store.datasets()}
        self._manifest_fetches: set[bytes] = set()
        self._fetching: dict[Key, asyncio.Task[None]] = {}
        self._callbacks: dict[Key, list[Callable[[], None]]] = {}
        self._in_use: set[Key] = set()
        self._tasks = Tasks(lambda error: log.error("a task failed", exc_info=error))
        self._slots = asyncio.Semaphore(settings.fetch_parallel)
        self._changed_s = time.monotonic()
        self._announce_wanted = True
        self._announced_s = 0.0
        self._full = False
        self._rng = random.Random(peer_id)
        self.conflict: str | None = None
        """Two different data sets under one name, in words; the seeding command ends with it."""

    # -- what there is ----------------------------------------------------------------------------------------------

    def manifests(self) -> tuple[Manifest, ...]:
        return tuple(k.manifest for _, k in sorted(self._known.items()))

    def manifest(self, dataset: bytes) -> Manifest | None:
        known = self._known.get(dataset)
        return known.manifest if known else None

    def by_name(self, name: str) -> Manifest | None:
        return next((k.manifest for k in self._known.values() if k.manifest.name == name), None)

    def add(self, manifest: Manifest) -> None:
        """A data set that this peer has just sharded; its shards are in the store, verified as they were written."""
        known = self._known[manifest.digest] = Known(manifest=manifest)
        for shard in self.store.holdings(manifest.digest):
            self._verified(known, shard, self.store.stamp(manifest.digest, shard))
        self._replace(known)
        self._announce_wanted = True

    def forget(self, dataset: bytes) -> None:
        """Speak of a data set no more; what is on disk stays."""
        self._known.pop(dataset, None)

    def held(self, dataset: bytes) -> frozenset[int]:
        return self.store.holdings(dataset) if dataset in self._known else frozenset()

    def reachable(self, dataset: bytes) -> frozenset[int]:
        """Shards that this peer holds or knows a live peer to hold."""
        known = self._known.get(dataset)
        if known is None:
            return frozenset()
        return self.held(dataset).union(*(o.shards for o in known.others.values()))

    def usable(self, dataset: bytes, shard: int) -> bool:
        """Held, and verified since this agent started and since its file was written to: training never sees a
        damaged shard.
        """
        known = self._known.get(dataset)
        if known is None or shard not in known.verified or not self.store.has(dataset, shard):
            return False
        if self.store.stamp(dataset, shard) != known.verified[shard]:
            del known.verified[shard]
            return False
        self._in_use.add((dataset, shard))
        return True

    def _verified(self, known: Known, shard: int, stamp: Stamp | None) -> None:
        if stamp is not None:
            known.verified[shard] = stamp

    def want(self, dataset: bytes, shard: int, then: Callable[[], None]) -> None:
        """Make a shard usable, ahead of re-placement; ``then`` is called when it is."""
        key = (dataset, shard)
        callbacks = self._callbacks.setdefault(key, [])
        if then not in callbacks:
            callbacks.append(then)
        self._in_use.add(key)
        self._start_fetch(key, urgent=True)

    def placed(self, dataset: bytes) -> Placement | None:
        known = self._known.get(dataset)
        return known.placed if known else None

    def dissenters(self, dataset: bytes) -> list[str]:
        """Peers that mean another placement than this one, for a moment or for good."""
        return self._known[dataset].dissenters()

    def holders(self, dataset: bytes) -> dict[int, list[str]]:
        """Shard index to the live peers that hold it, this one included."""
        known = self._known[dataset]
        found: dict[int, list[str]] = {i: [] for i in range(len(known.manifest.shards))}
        for shard in self.held(dataset):
            found[shard].append(self._me)
        for peer_id, others in sorted(known.others.items()):
            for shard in others.shards:
                found[shard].append(peer_id)
        return found

    def under_replicated(self, dataset: bytes) -> int:
        """Shards with fewer live holders than placement asks for."""
        known = self._known[dataset]
        wanted = min(known.manifest.replicas, len(storing(self._members())))
        return sum(len(h) < wanted for h in self.holders(dataset).values())

    @property
    def full(self) -> bool:
        """There was no room for a shard, and there is none for a few yet: this peer trains on what it holds."""
        if self._full:
            largest = max((max(k.manifest.shard_sizes) for k in self._known.values()), default=0)
            self._full = self.store.free_bytes() < 4 * largest
        return self._full

    def fetching(self) -> int:
        return len(self._fetching)

    def replicated_elsewhere(self) -> bool:
        """Whether every shard held here has as many holders as are wanted among the peers that stay."""
        staying = {p.peer_id for p in storing(self._members())} - {self._me}
        return all(
            len(staying.intersection(holders)) >= known.manifest.replicas
            for dataset, known in self._known.items()
            for holders in self.holders(dataset).values()
            if self._me in holders
        )

    def sole_copies_elsewhere(self) -> bool:
        """Whether every shard held here is also held by another live peer."""
        return all(
            len(holders) > 1 or self._me not in holders
            for dataset in self._known
            for holders in self.holders(dataset).values()
        )

    # -- what others say ----------------------------------------------------------------------------------------------

    def members_changed(self) -> None:
        """Membership has moved: forget what the gone held, place anew, tell whoever is new."""
        alive = {peer_id for peer_id, _ in present(self._members())}
        for known in self._known.values():
            for peer_id in [p for p in known.others if p not in alive]:
                del known.others[peer_id]
            self._replace(known)
        self._changed_s = time.monotonic()

    def _replace(self, known: Known) -> None:
        if known.place(storing(self._members())):
            known.drop_agreed_since_s = None
            self._announce_wanted = True

    def announcement(self, dataset: bytes, *, answer: bool = False) -> Holdings:
        known = self._known[dataset]
        return Holdings(
            dataset=dataset,
            name=known.manifest.name,
            version=known.version,
            bitmap=bitmap(self.held(dataset), len(known.manifest.shards)),
            placement=known.placed.digest() if known.placed else b"",
            answer=answer,
        )

    def tell(self, peer_id: str) -> None:
        """Say to one peer what is held here of everything."""
        for dataset in sorted(self._known):
            self._send(peer_id, self.announcement(dataset), "")

    def _ask_dissenters(self) -> None:
        """What made them mean another placement, or not any more, may have been lost on the way."""
        for dataset, known in sorted(self._known.items()):
            for peer_id in known.dissenters():
                self._send(peer_id, self.announcement(dataset, answer=True), "")

    def heard(self, sender: str, said: Holdings) -> None:
        """A peer's holdings; RemoteProtocolError when they make no sense."""
        if len(said.dataset) != 16 or len(said.name) > 256:
            raise RemoteProtocolError("holdings of no data set")
        known = self._known.get(said.dataset)
        if known is None:
            clash = self.by_name(said.name)
            if clash is not None:
                self._name_clash(clash, said)
            elif said.dataset not in self._manifest_fetches:
                self._manifest_fetches.add(said.dataset)
                self._tasks.spawn(self._fetch_manifest(sender, said))
            return
        shards = from_bitmap(said.bitmap, len(known.manifest.shards))
        if all(peer_id != sender for peer_id, _ in present(self._members())):
            return  # the last words of one that is gone
        before = known.others.get(sender)
        known.others[sender] = OthersHoldings(version=said.version, shards=shards, placement=said.placement)
        if before is None or said.answer:
            self._send(sender, self.announcement(said.dataset), "")

    def _name_clash(self, mine: Manifest, said: Holdings) -> None:
        line = (
            f"two data sets are named {said.name!r}: {mine.digest.hex()[:12]} here and {said.dataset.hex()[:12]} "
            "elsewhere; seed one of them under another --name"
        )
        if self.conflict != line:
            self.conflict = line
            self._say(line)
            self._journal.event(
                "name_clash", name=said.name, here=mine.digest.hex(), there=said.dataset.hex()
            )

    async def _fetch_manifest(self, sender: str, said: Holdings) -> None:
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
            self.store.add_manifest(manifest)
            self._known[said.dataset] = Known(manifest=manifest)
            self._replace(self._known[said.dataset])
            self._announce_wanted = True
            self._journal.event(
                "dataset", name=manifest.name, dataset=said.dataset.hex(), samples=len(manifest)
            )
            self.heard(sender, said)
        except (SourceLostError, RemoteProtocolError, UserError) as error:
            log.warning("manifest %s from %s: %s", said.dataset.hex(), sender, error)
        finally:
            self._manifest_fetches.discard(said.dataset)

    # -- serving ------------------------------------------------------------------------------------------------------

    def provide_manifest(self, request: BulkRequest) -> tuple[int, bytes] | None:
        known = self._known.get(request.digest)
        if known is None:
            return None
        data = known.manifest.to_bytes()
        return len(data), data[request.offset : request.offset + request.size]

    def provide_shard(self, request: BulkRequest) -> tuple[int, bytes] | None:
        known = self._known.get(request.digest)
        if known is None or request.part >= len(known.manifest.shards):
            return None
        total = known.manifest.shard_sizes[request.part]
        offset = min(request.offset, total)
        size = min(request.size, total - offset)
        try:
            data = self.store.read_range(request.digest, request.part, offset, size)
        except ShardMissing:
            self._lost_one((request.digest, request.part))
            return None
        return total, data

    def _lost_one(self, key: Key) -> None:
        """A shard on disk turned out to be damaged or gone."""
        known = self._known[key[0]]
        if key[1] in known.verified or not self.store.has(*key):
            known.verified.pop(key[1], None)
            known.version += 1
            self._announce_wanted = True

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Announce, fetch what is newly mine, drop what is surely elsewhere, name what is lost."""
        now_s = time.monotonic()
        if self._announce_wanted and now_s - self._announced_s > 0.2:
            self._announce_wanted, self._announced_s = False, now_s
            for peer_id, _ in present(self._members()):
                if peer_id != self._me:
                    self.tell(peer_id)
        elif now_s - self._announced_s > self._settings.holdings_interval_ms / 1000:
            self._announced_s = now_s
            others = [peer_id for peer_id, _ in present(self._members()) if peer_id != self._me]
            if others:
                self.tell(self._rng.choice(others))
            self._ask_dissenters()
        if now_s - self._changed_s < self._settings.reconcile_still_ms / 1000:
            return
        names = {r.peer_id: r.name for r in self._members()}
        for dataset, known in self._known.items():
            if known.placed is not None and not self.full:
                for shard in known.placed.shards_of(self._me):
                    if not self.store.has(dataset, shard) and self._sources((dataset, shard)):
                        self._start_fetch((dataset, shard), urgent=False)
            self._drop_surplus(dataset, known, now_s)
            self._watch.lost(known, self.reachable(dataset), now_s, self._changed_s)
            self._watch.dissent(known, names, now_s)

    def _drop_surplus(self, dataset: bytes, known: Known, now_s: float) -> None:
        """Never the last copy: only what its placed holders, who mean the same placement, all say they hold."""
        if known.placed is None:
            return
        digest = known.placed.digest()
        placed_peers = {p.peer_id for p in known.placed.peers} - {self._me}
        agreed = all(p in known.others and known.others[p].placement == digest for p in placed_peers)
        if not agreed or self._fetching:
            known.drop_agreed_since_s = None
            return
        if known.drop_agreed_since_s is None:
            known.drop_agreed_since_s = now_s
        if now_s - known.drop_agreed_since_s < self._settings.drop_still_ms / 1000:
            return
        for shard in sorted(self.held(dataset)):
            holders = known.placed.holders(shard)
            full = len(holders) >= known.manifest.replicas
            safe = full and all(p in known.others and shard in known.others[p].shards for p in holders)
            if self._me not in holders and safe and (dataset, shard) not in self._in_use:
                self.store.drop(dataset, shard)
                known.verified.pop(shard, None)
                known.version += 1
                self._announce_wanted = True
                self._journal.event("dropped", shard=known.manifest.shard_digests[shard].hex())

    def release_use(self) -> None:
        """A run ended or its assignment changed: nothing is in use until it is asked for again."""
        self._in_use.clear()

    # -- fetching -----------------------------------------------------------------------------------------------------

    def _address(self, peer_id: str) -> str | None:
        return next((r.bulk_address for r in self._members() if r.peer_id == peer_id), None)

    def _sources(self, key: Key) -> list[str]:
        """Who holds the shard, in the order in which HRW names them, starting at a place of this peer's own."""
        known = self._known[key[0]]
        holders = {p for p, o in known.others.items() if key[1] in o.shards}
        ranked = [p for p in (known.placed.rank(key[1]) if known.placed else ()) if p in holders]
        ranked += sorted(holders - set(ranked))
        start = (int(self._me[:8], 16) + key[1]) % len(ranked) if ranked else 0
        return ranked[start:] + ranked[:start]

    def _start_fetch(self, key: Key, *, urgent: bool) -> None:
        if key not in self._fetching and key[0] in self._known and (self.store.has(*key) or not self.full):
            self._fetching[key] = self._tasks.spawn(self._obtain(key, urgent))

    async def _obtain(self, key: Key, urgent: bool) -> None:
        """Verify what is on disk, or fetch it; then tell whoever waits."""
        known = self._known[key[0]]
        try:
            if self.store.has(*key) and key[1] not in known.verified:
                stamp = self.store.stamp(*key)
                if await asyncio.to_thread(self.store.verify, *key):
                    self._verified(known, key[1], stamp)
                else:
                    self._journal.event("shard_corrupt", shard=known.manifest.shard_digests[key[1]].hex())
                    self._lost_one(key)
            if not self.store.has(*key):
                if urgent:
                    await self._fetch(key, known)
                else:
                    async with self._slots:
                        await self._fetch(key, known)
                    await asyncio.sleep(0.0 if self.store.has(*key) else AGAIN_S)  # no source was any good
        except StoreFull as error:
            self._full = True
            self._say(str(error))
            self._journal.event("store_full", reason=str(error))
        except UserError as error:
            self._say(str(error))
        finally:
            self._fetching.pop(key, None)
        for callback in self._callbacks.pop(key, []) if key[1] in known.verified else ():
            callback()

    async def _fetch(self, key: Key, known: Known) -> None:
        started_s = time.monotonic()
        tried: set[str] = set()
        while not self.store.has(*key):
            sources = [p for p in self._sources(key) if p not in tried]
            if not sources:
                return
            tried.add(sources[0])
            address = self._address(sources[0])
            if address is not None and await self._fetch_from(address, key, known):
                self._verified(known, key[1], self.store.stamp(*key))
                known.version += 1
                self._announce_wanted = True
                self._journal.event(
                    "fetched",
                    shard=known.manifest.shard_digests[key[1]].hex(),
                    source=sources[0],
                    size_bytes=known.manifest.shard_sizes[key[1]],
                    seconds=round(time.monotonic() - started_s, 3),
                )

    async def _fetch_from(self, address: str, key: Key, known: Known) -> bool:
        """Fetch the missing ranges from one source and verify the whole; False when another is needed."""
        partial = self.store.open_partial(*key)
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
