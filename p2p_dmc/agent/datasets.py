"""Data sets on one peer: who holds what, fetching, re-placement, repair (DESIGN.md section 9)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from p2p_dmc.agent.bulk import BulkClient
from p2p_dmc.agent.fetching import Fetching
from p2p_dmc.agent.known import DataWatch, Known, OthersHoldings
from p2p_dmc.agent.presence import present, storing
from p2p_dmc.agent.spreading import Key
from p2p_dmc.agent.work import bitmap, from_bitmap
from p2p_dmc.config import AgentSettings
from p2p_dmc.core.membership import MemberRecord
from p2p_dmc.core.placement import Placement
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.store import Store
from p2p_dmc.data.versions import is_clash, meant
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.observe.journal import Journal
from p2p_dmc.wire.messages import BulkRequest, Holdings

MOST_REFUSED = 1024


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
        self._me = peer_id
        self._settings = settings
        self._journal = journal
        self._say = say
        self._send = send
        self._watch = DataWatch(say, journal, settings.differ_still_ms / 1000)
        self._members = members
        self._known: dict[bytes, Known] = {d: Known(manifest=store.manifest(d)) for d in store.datasets()}
        self._fetching = Fetching(
            store=store,
            bulk=bulk,
            peer_id=peer_id,
            settings=settings,
            journal=journal,
            say=say,
            members=members,
            known=self._known,
            obtained=self._obtained,
            damaged=self._lost_one,
        )
        self._in_use: set[Key] = set()
        self._changed_s = time.monotonic()
        self._announce_wanted = True
        self._announced_s = 0.0
        self._rng = random.Random(peer_id)
        self._refused: set[bytes] = set()
        """Data sets that have the name of another one here."""
        self.conflict: str | None = None
        """Two different data sets under one name, in words; the seeding command ends with it."""

    # -- what there is ----------------------------------------------------------------------------------------------

    def manifests(self) -> tuple[Manifest, ...]:
        return tuple(k.manifest for _, k in sorted(self._known.items()))

    def manifest(self, dataset: bytes) -> Manifest | None:
        known = self._known.get(dataset)
        return known.manifest if known else None

    def by_name(self, name: str) -> Manifest | None:
        """The newest version of that name of which no shard is lost, else the newest; NAME@DIGEST means one version."""
        found = meant((known.manifest for known in self._known.values()), name)
        whole = (one for one in found if len(self.reachable(one.digest)) == len(one.shards))
        return next(whole, found[0] if found else None)

    def add(self, manifest: Manifest) -> None:
        """A data set that this peer has just sharded; its shards are in the store, verified as they were written."""
        known = self._known[manifest.digest] = Known(manifest=manifest)
        for shard in self.store.holdings(manifest.digest):
            known.verify(shard, self.store.stamp(manifest.digest, shard))
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

    def want(self, dataset: bytes, shard: int, then: Callable[[], None]) -> None:
        """Make a shard usable, ahead of re-placement; ``then`` is called when it is."""
        key = (dataset, shard)
        self._in_use.add(key)
        self._fetching.want(key, then)

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
        return self._fetching.full

    def yield_to(self, busy: Callable[[], bool]) -> None:
        """Background fetches slow down while this is true."""
        self._fetching.yields = busy

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
            if said.dataset not in self._refused:
                self._fetching.manifest(sender, said, self._learn)
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

    def _learn(self, sender: str, said: Holdings, manifest: Manifest) -> None:
        """A data set that another peer spoke of, or another version of one that is here."""
        here = [known.manifest for known in self._known.values() if known.manifest.name == manifest.name]
        clash = next((one for one in here if is_clash(one, manifest)), None)
        if clash is not None:
            if len(self._refused) == MOST_REFUSED:
                self._refused.clear()  # they are fetched once more
            self._refused.add(said.dataset)
            self._name_clash(clash, said)
            return
        self.store.add_manifest(manifest)
        known = self._known[said.dataset] = Known(manifest=manifest)
        self._replace(known)
        self._announce_wanted = True
        self._journal.event("dataset", name=manifest.name, dataset=said.dataset.hex(), samples=len(manifest))
        self.heard(sender, said)

    # -- serving ------------------------------------------------------------------------------------------------------

    def provide_manifest(self, request: BulkRequest) -> tuple[int, bytes] | None:
        known = self._known.get(request.digest)
        if known is None:
            return None
        data = known.manifest.to_bytes()
        return len(data), data[request.offset : request.offset + request.size]

    async def provide_shard(self, request: BulkRequest) -> tuple[int, bytes] | None:
        return await self._fetching.serving.shard(request)

    def provide_parts(self, request: BulkRequest) -> tuple[int, bytes] | None:
        return self._fetching.serving.parts(request)

    def _obtained(self, known: Known) -> None:
        """A shard has come, whole and verified."""
        known.version += 1
        self._announce_wanted = True

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
                    if not self.store.has(dataset, shard) and self._fetching.sources((dataset, shard)):
                        self._fetching.start((dataset, shard), urgent=False)
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

    async def close(self) -> None:
        await self._fetching.close()
