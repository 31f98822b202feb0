"""Peers that fetch shards from each other in one loop: real stores and sockets; who holds what is said by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq.asyncio

from p2p_dmc.agent.bulk import BulkClient, BulkServer
from p2p_dmc.agent.fetching import Fetching
from p2p_dmc.agent.known import Known
from p2p_dmc.agent.limits import RateLimit
from p2p_dmc.config import AgentSettings
from p2p_dmc.core.membership import MemberRecord
from p2p_dmc.core.placement import StoringPeer, placement
from p2p_dmc.core.repair import Said, copies_of
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.store import Store
from p2p_dmc.wire.messages import BulkKind, BulkRequest
from tests.agent.helpers import peer, record, surroundings

DEADLINE_S = 60.0
PIECE, RANGE = 4096, 16384
SETTINGS = AgentSettings(fetch_piece_bytes=PIECE, fetch_range_bytes=RANGE, range_timeout_ms=2000)
Found = tuple[int, bytes] | None


def said(shards: frozenset[int], count: int) -> Said:
    """The word of a peer that has verified these shards."""
    return Said(copies=copies_of(dict.fromkeys(shards, 0), shards, False, count), placement=b"")


class Node:
    """One peer. ``asked``: (shard, offset) of the ranges that others asked it for, how often each."""

    def __init__(self, world: World, i: int, store: Store, upload: int | None) -> None:
        self.id, self.store, self.world = peer(i), store, world
        self.server = BulkServer(world.context, RateLimit(upload))
        self.record = record(i, bulk=f"tcp://127.0.0.1:{self.server.bind('127.0.0.1')}")
        self.client = BulkClient(world.context, SETTINGS.range_timeout_ms)
        self.around = surroundings(world.root, me=i)
        self.known = {world.manifest.digest: Known(manifest=world.manifest)}
        self.asked: Counter[tuple[int, int]] = Counter()
        self.asked_bytes = 0
        self.outstanding = self.most_outstanding = 0
        self.answer: Callable[[BulkRequest, Found], Coroutine[Any, Any, Found]] | None = None
        self.damaged: list[int] = []
        store.add_manifest(world.manifest)
        self.fetching = Fetching(
            store=store,
            bulk=self.client,
            peer_id=self.id,
            settings=SETTINGS,
            journal=self.around.services.journal,
            say=self.around.said.append,
            members=world.members,
            known=self.known,
            obtained=self._obtained,
            damaged=self._damaged,
        )
        self.server.provide(BulkKind.SHARD, self._provide)
        self.server.provide(BulkKind.PARTS, self.fetching.serving.parts)

    def _damaged(self, key: tuple[bytes, int]) -> None:
        self.damaged.append(key[1])

    def _obtained(self, known: Known) -> None:
        self.world.tell()

    async def _provide(self, request: BulkRequest) -> Found:
        self.asked[request.part, request.offset] += 1
        self.asked_bytes += request.size
        self.outstanding += 1
        self.most_outstanding = max(self.most_outstanding, self.outstanding)
        try:
            found = await self.fetching.serving.shard(request)
            return found if self.answer is None else await self.answer(request, found)
        finally:
            self.outstanding -= 1

    def want(self, shards: Sequence[int]) -> list[int]:
        """Wanted at once; the list fills as they come."""
        came: list[int] = []
        for shard in shards:
            self.fetching.want((self.world.manifest.digest, shard), partial(came.append, shard))
        return came

    def events(self, name: str) -> list[dict[str, Any]]:
        return self.around.named(name)

    def has(self, shard: int) -> bool:
        """Held, and the same bytes as the origin's."""
        d, origin = self.world.manifest.digest, self.world.origin
        return self.store.has(d, shard) and (
            self.store.path(d, shard).read_bytes() == origin.path(d, shard).read_bytes()
        )


class World:
    """All peers; each knows at once what the others hold."""

    def __init__(self, root: Path, origin: Store, manifest: Manifest) -> None:
        self.root, self.origin, self.manifest = root, origin, manifest
        self.context = zmq.asyncio.Context()
        self.nodes: list[Node] = []

    def members(self) -> tuple[MemberRecord, ...]:
        return tuple(node.record for node in self.nodes)

    def holder(self, i: int, upload: int | None = None) -> Node:
        """A peer with a copy of everything."""
        store = Store(self.root / f"store{i}")
        store.add_manifest(self.manifest)
        for shard, size in enumerate(self.manifest.shard_sizes):
            begun = store.open_partial(self.manifest.digest, shard)
            begun.write(0, self.origin.read_range(self.manifest.digest, shard, 0, size))
            assert begun.commit()
        return self.add(i, store, upload)

    def receiver(self, i: int, upload: int | None = None, **given: Any) -> Node:
        """A peer with nothing, or with what an earlier one of that number had."""
        return self.add(i, Store(self.root / f"store{i}", **given), upload)

    def add(self, i: int, store: Store, upload: int | None = None) -> Node:
        self.nodes.append(Node(self, i, store, upload))
        self.tell()
        return self.nodes[-1]

    def place(self, *receivers: Node) -> None:
        """These are to hold everything."""
        peers = tuple(StoringPeer(peer_id=n.id) for n in receivers)
        for node in self.nodes:
            node.known[self.manifest.digest].placed = placement(
                self.manifest.shard_digests, peers, len(peers)
            )
        self.tell()

    def tell(self) -> None:
        """Everybody hears what everybody holds."""
        d = self.manifest.digest
        for node in self.nodes:
            node.known[d].others = {
                other.id: said(other.store.holdings(d), len(self.manifest.shards))
                for other in self.nodes
                if other is not node
            }

    async def gone(self, node: Node) -> None:
        """Its process is no more; what it left on the disk stays."""
        self.nodes.remove(node)
        node.server.close()
        await node.fetching.close()
        node.client.close()
        self.tell()

    async def until(self, true: Callable[[], Any]) -> None:
        while not true():
            await asyncio.sleep(0.005)


def run(
    root: Path, origin: Store, manifest: Manifest, work: Callable[[World], Coroutine[Any, Any, None]]
) -> None:
    """The work, in a world of its own, within the deadline."""

    async def inner() -> None:
        async with world_of(root, origin, manifest) as world:
            await work(world)

    asyncio.run(asyncio.wait_for(inner(), DEADLINE_S))


@contextlib.asynccontextmanager
async def world_of(root: Path, origin: Store, manifest: Manifest) -> AsyncIterator[World]:
    world = World(root, origin, manifest)
    try:
        yield world
    finally:
        for node in list(world.nodes):
            await world.gone(node)
        world.context.destroy(linger=0)
