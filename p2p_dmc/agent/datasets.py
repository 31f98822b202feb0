"""Data sets on one peer: who holds what, fetching, re-placement, repair (DESIGN.md section 9)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from p2p_dmc.agent.bulk import BulkClient
from p2p_dmc.agent.fetching import Fetching
from p2p_dmc.agent.known import DataWatch, Known, holders_of
from p2p_dmc.agent.presence import present, storing
from p2p_dmc.agent.repairing import Repairing
from p2p_dmc.agent.scrub import Scrub
from p2p_dmc.config import AgentSettings, format_size
from p2p_dmc.core.membership import MemberRecord
from p2p_dmc.core.placement import Placement
from p2p_dmc.core.pledges import Key
from p2p_dmc.core.repair import Said
from p2p_dmc.core.replication import Copies, Tally
from p2p_dmc.core.shard_set import ShardSet, union
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.store import Store
from p2p_dmc.data.versions import is_clash, meant
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.observe.journal import Journal
from p2p_dmc.wire.messages import BulkRequest, Holdings, PledgeAsked, Pledged

ANNOUNCE_AGAIN_S = 0.2
"""Changes are told at most so often."""

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
        self._scrub = self._make_scrub()
        self._repairing = self._make_repairing()
        self._reachable: dict[bytes, tuple[ShardSet, frozenset[int]]] = {}
        self._changed_s = time.monotonic()
        self._announce_wanted = True
        self._announced_s = 0.0
        self._was_full = False
        if store.excess_bytes():
            say(
                f"the shards here take {format_size(store.excess_bytes())} more than --capacity allows: no more are "
                "taken, and those that others keep are given up"
            )
        self._rng = random.Random(peer_id)
        self._refused: set[bytes] = set()
        """Data sets that have the name of another one here."""
        self.conflict: str | None = None
        """Two different data sets under one name, in words; the seeding command ends with it if one is its own."""
        self.conflicting: set[bytes] = set()
        """Those of this peer that have the name of another one elsewhere."""

    def _make_scrub(self) -> Scrub:
        return Scrub(
            store=self.store,
            settings=self._settings,
            journal=self._journal,
            say=self._say,
            known=self._known,
            verified=self._obtained,
            damaged=self._lost_one,
        )

    def _make_repairing(self) -> Repairing:
        return Repairing(
            me=self._me,
            store=self.store,
            settings=self._settings,
            journal=self._journal,
            send=self._send,
            known=self._known,
            fetching=self._fetching,
            scrub=self._scrub,
            in_use=self._in_use,
            storing=lambda: storing(self._members()),
            changed=self._announce,
            now_s=lambda: time.monotonic(),
        )

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
        self._repairing.place(known)
        self._announce()

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
        others = [other.shards for other in known.others.values()]
        there = union([self._repairing.own(known).there, *others], len(known.manifest.shards))
        if dataset not in self._reachable or self._reachable[dataset][0] != there:
            self._reachable[dataset] = there, frozenset(there)
        return self._reachable[dataset][1]

    def usable(self, dataset: bytes, shard: int) -> bool:
        """Held, and verified since this agent started and since its file was written to: training never sees a
        damaged shard.
        """
        known = self._known.get(dataset)
        if known is None or shard not in known.verified or not self.store.has(dataset, shard):
            return False
        if self.store.stamp(dataset, shard) != known.verified[shard]:
            known.doubt(shard)
            self._announce()
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

    def copies(self, dataset: bytes) -> dict[str, Copies]:
        """What each live peer says that it holds, this one included."""
        known = self._known[dataset]
        own = self._repairing.own(known)
        return {p: said.copies for p, said in sorted(known.others.items())} | {self._me: own}

    def holders(self, dataset: bytes) -> dict[int, list[str]]:
        """Shard index to the live peers that hold it, verified, this one first if it does."""
        return holders_of(self.copies(dataset), self._me, len(self._known[dataset].manifest.shards))

    def tally(self, dataset: bytes) -> Tally | None:
        """How it stands with a data set; None before it is placed."""
        return self._repairing.tally(self._known[dataset])

    def under_replicated(self, dataset: bytes) -> int:
        """Shards with fewer verified copies, on live peers that stay, than placement asks for."""
        told = self.tally(dataset)
        return told.under_replicated if told is not None else len(self._known[dataset].manifest.shards)

    @property
    def full(self) -> bool:
        """There was no room for a shard, and there is none for a few yet: this peer trains on what it holds."""
        return self._fetching.full

    def yield_to(self, busy: Callable[[], bool], trains: Callable[[], bool]) -> None:
        """Background fetches slow down while training needs the link, and ask for little where it soon will."""
        self._fetching.yields, self._fetching.trains = busy, trains

    def fetching(self) -> int:
        return len(self._fetching)

    def replicated_elsewhere(self) -> bool:
        """Whether this peer may go and no copy is missed: of every shard as many as are wanted are held, verified, by
        peers that stay and have pledged to keep them. Asks them, from the first call on.
        """
        return self._repairing.may_leave()

    def sole_copies_elsewhere(self) -> bool:
        """Whether every shard held here is also held, verified, by another live peer."""
        for known in self._known.values():
            elsewhere = union(
                [said.copies.verified for said in known.others.values()], len(known.manifest.shards)
            )
            if (self._repairing.own(known).there.mask() & ~elsewhere.mask()).any():
                return False
        return True

    # -- what others say ----------------------------------------------------------------------------------------------

    def members_changed(self) -> None:
        """Membership has moved: forget what the gone held, place anew, tell whoever is new."""
        self._forget_gone()
        for known in self._known.values():
            self._repairing.place(known)
        self._changed_s = time.monotonic()

    def _forget_gone(self) -> None:
        """What a peer said that is gone, or lives anew, says nothing of what it has now."""
        boots = {r.peer_id: r.boot for r in self._members()}
        there = {peer_id: boots[peer_id] for peer_id, _ in present(self._members())}
        anew = set()
        for known in self._known.values():
            for peer_id in [p for p, said in known.others.items() if there.get(p) != said.boot]:
                self._repairing.gone(known, peer_id)
                anew.update({peer_id}.intersection(there))
        for peer_id in sorted(anew):
            self.tell(peer_id)

    def _announce(self) -> None:
        """What is held here has changed: the others are told soon."""
        self._announce_wanted = True

    def announcement(self, dataset: bytes, *, answer: bool = False) -> Holdings:
        known = self._known[dataset]
        own = self._repairing.own(known)
        return Holdings(
            dataset=dataset,
            name=known.manifest.name,
            version=known.version,
            bitmap=own.verified.to_bytes(),
            unverified=own.unverified.to_bytes(),
            full=own.full,
            placement=known.placed.digest() if known.placed else b"",
            answer=answer,
        )

    def tell(self, peer_id: str) -> None:
        """Say to one peer what is held here of everything, and ask the same of it where that is not known."""
        for dataset, known in sorted(self._known.items()):
            self._send(peer_id, self.announcement(dataset, answer=peer_id not in known.others), "")

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
                self._fetching.manifests.fetch(sender, said, self._learn)
            return
        shards = len(known.manifest.shards)
        try:
            copies = Copies(
                verified=ShardSet.from_bytes(said.bitmap, shards),
                unverified=ShardSet.from_bytes(said.unverified, shards),
                full=said.full,
            )
        except ValueError as error:
            raise RemoteProtocolError(str(error)) from None
        there = {peer_id for peer_id, _ in present(self._members())}
        boot = next((r.boot for r in self._members() if r.peer_id == sender and sender in there), None)
        if boot is None:
            return  # the last words of one that is gone
        before = known.others.get(sender)
        if before is None or (before.boot, before.version) <= (boot, said.version):
            new = Said(copies=copies, placement=said.placement, boot=boot, version=said.version)
            self._repairing.of(known).heard(sender, new)
        if before is None or said.answer:
            self._send(sender, self.announcement(said.dataset), "")

    def heard_of_pledges(self, sender: str, message: PledgeAsked | Pledged) -> None:
        """A peer wants to give copies up, or lets this one; RemoteProtocolError when it makes no sense."""
        self._repairing.heard(sender, message)

    def _name_clash(self, mine: Manifest, said: Holdings, *, are_versions: bool) -> None:
        remedy = "append to the other one again" if are_versions else "seed one of them under another --name"
        line = (
            f"two data sets are named {said.name!r}: {mine.digest.hex()[:12]} here and {said.dataset.hex()[:12]} "
            f"elsewhere; {remedy}"
        )
        self.conflicting.add(mine.digest)
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
            self._name_clash(clash, said, are_versions=clash.first == manifest.first)
            return
        self.store.add_manifest(manifest)
        known = self._known[said.dataset] = Known(manifest=manifest)
        self._repairing.place(known)
        self._announce()
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
        """A shard has come, or was looked at: whole and verified."""
        known.version += 1
        self._announce()

    def _lost_one(self, key: Key) -> None:
        """A shard on disk turned out to be damaged or gone, or is not what it was when it was verified."""
        known = self._known[key[0]]
        if known.doubt(key[1]) or not self.store.has(*key):
            known.version += 1
            self._announce()
        if self.store.has(*key):
            self._scrub.first(key)

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Announce, fetch what is newly mine, give up what others keep, look at what lies here, name what is lost."""
        now_s = time.monotonic()
        self._forget_gone()
        for known in self._known.values():
            if known.changes != self.store.changes(known.manifest.digest):
                self._follow(known)
        self._say_holdings(now_s)
        self._scrub.tick()
        self._repairing.tick()
        if self._was_full != self.full:
            self._was_full = self.full
            self._announce()
        names = {r.peer_id: r.name for r in self._members()}
        for dataset, known in self._known.items():
            self._watch.lost(known, self.reachable(dataset), now_s, self._changed_s)
            self._watch.dissent(known, names, now_s)

    def _follow(self, known: Known) -> None:
        """A shard has come or gone, maybe for the sake of another version, with which it shares the file."""
        dataset, is_first = known.manifest.digest, known.changes is None
        known.changes = self.store.changes(dataset)
        known.version += 1
        self._announce()
        before, held = known.followed, self.store.holdings(dataset)
        known.followed = held
        for shard in known.verified.keys() - held:
            known.doubt(shard)
        for shard in held - before - known.verified.keys():
            twins = [(self._known[d], at) for d, at in self.store.twins(dataset, shard) if d in self._known]
            stamp = self.store.stamp(dataset, shard) if twins else None
            if stamp is None or any(known.vouched(shard, stamp, *twin) for twin in twins):
                continue
            if not is_first and (dataset, shard) not in self._fetching:
                self._scrub.first((dataset, shard))

    def _say_holdings(self, now_s: float) -> None:
        others = [peer_id for peer_id, _ in present(self._members()) if peer_id != self._me]
        size_bytes = len(others) * sum(len(k.manifest.shards) // 4 for k in self._known.values())
        again_s = max(ANNOUNCE_AGAIN_S, size_bytes / self._settings.holdings_bytes_s)
        if self._announce_wanted and now_s - self._announced_s > again_s:
            self._announce_wanted, self._announced_s = False, now_s
            for peer_id in others:
                self.tell(peer_id)
        elif now_s - self._announced_s > self._settings.holdings_interval_ms / 1000:
            self._announced_s = now_s
            if others:
                self.tell(self._rng.choice(others))
            self._ask_dissenters()

    def release_use(self) -> None:
        """A run ended or its assignment changed: nothing is in use until it is asked for again."""
        self._in_use.clear()

    async def close(self) -> None:
        await self._repairing.close()
        await self._scrub.close()
        await self._fetching.close()
