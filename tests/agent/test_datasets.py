"""Data sets on several peers in one loop: real stores and real ranges, membership and mail by hand."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq.asyncio

from p2p_dmc.agent import datasets as datasets_module
from p2p_dmc.agent import fetching as fetching_module
from p2p_dmc.agent import repairing, spreading
from p2p_dmc.agent.bulk import BulkClient, BulkServer
from p2p_dmc.agent.datasets import DataService
from p2p_dmc.agent.manifests import MOST as MOST_MANIFESTS
from p2p_dmc.agent.work import bitmap
from p2p_dmc.config import AgentSettings
from p2p_dmc.core.membership import MemberRecord, MemberState
from p2p_dmc.core.pledges import MOST_SHARDS
from p2p_dmc.core.shard_set import ShardSet
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.store import Store
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.wire.messages import BulkKind, BulkRequest, Holdings, PledgeAsked, Pledged
from tests.agent.helpers import Around, peer, record, surroundings
from tests.data.helpers import seed_tree, small_tree

DEADLINE_S = 60.0
STEP_S = 0.1
SETTINGS = AgentSettings(
    fetch_chunk_bytes=2048,
    fetch_range_bytes=2048,
    fetch_piece_bytes=1024,
    range_timeout_ms=500,
    holdings_interval_ms=400,
    reconcile_still_ms=100,
    drop_still_ms=200,
    differ_still_ms=2000,
)


class Node:
    """One peer's data: store, service, bulk server."""

    def __init__(self, net: Net, i: int, store: Store, weight: int, domain: str = "") -> None:
        self.id = peer(i)
        self.store = store
        self.alive = True
        self.server = BulkServer(net.context)
        bulk = f"tcp://127.0.0.1:{self.server.bind('127.0.0.1')}"
        self.record = record(i, weight=weight, bulk=bulk, domain=domain)
        self.client = BulkClient(net.context, SETTINGS.range_timeout_ms)
        self.around: Around = surroundings(net.root, me=i)
        self.data = DataService(
            store=store,
            bulk=self.client,
            peer_id=self.id,
            settings=net.settings,
            journal=self.around.services.journal,
            say=self.around.said.append,
            send=lambda to, message, run: net.deliver(self, to, message),
            members=lambda: net.seen_by(self),
        )
        self.server.provide(BulkKind.MANIFEST, self.data.provide_manifest)
        self.server.provide(BulkKind.SHARD, self.data.provide_shard)
        self.server.provide(BulkKind.PARTS, self.data.provide_parts)

    def events(self, name: str) -> list[dict[str, Any]]:
        return self.around.named(name)


class Net:
    """Peers that know each other, their mail, and their clock, which each step moves on."""

    def __init__(self, root: Path, settings: AgentSettings) -> None:
        self.root = root
        self.settings = settings
        self.context = zmq.asyncio.Context()
        self.nodes: list[Node] = []
        self.now_s = 1000.0
        self.watch: Callable[[], None] = lambda: None
        self.pledges: Callable[[Node, str, PledgeAsked], None] | None = None
        self.seen_by: Callable[[Node], tuple[MemberRecord, ...]] = lambda node: self.members()
        self.lose: Callable[[Node, str, Holdings], bool] = lambda sender, to, message: False

    def members(self) -> tuple[MemberRecord, ...]:
        return tuple(n.record if n.alive else replace(n.record, state=MemberState.DEAD) for n in self.nodes)

    def deliver(self, sender: Node, to: str, message: object) -> None:
        if isinstance(message, Holdings) and self.lose(sender, to, message):
            return

        if isinstance(message, PledgeAsked) and self.pledges is not None:
            self.pledges(sender, to, message)

        def arrive() -> None:
            for node in self.nodes:
                if node.id == to and node.alive and sender.alive:
                    if isinstance(message, Holdings):
                        node.data.heard(sender.id, message)
                    elif isinstance(message, (PledgeAsked, Pledged)):
                        node.data.heard_of_pledges(sender.id, message)

        asyncio.get_running_loop().call_soon(arrive)

    def join(self, i: int, store: Store, weight: int = 1, domain: str = "") -> Node:
        node = Node(self, i, store, weight, domain)
        self.nodes.append(node)
        self.changed()
        for other in self.nodes:
            if other is not node and other.alive:
                other.data.tell(node.id)
                node.data.tell(other.id)
        return node

    def changed(self) -> None:
        for node in self.nodes:
            if node.alive:
                node.data.members_changed()

    def kill(self, node: Node) -> None:
        node.alive = False
        node.server.close()
        self.changed()

    async def step(self) -> None:
        self.now_s += STEP_S
        for node in self.nodes:
            if node.alive:
                node.data.tick()
        self.watch()
        await asyncio.sleep(0.001)

    async def until(self, true: Callable[[], bool]) -> None:
        for _ in range(4000):
            if true():
                return
            await self.step()
        raise AssertionError("it did not come")

    async def rest(self, seconds: float) -> None:
        """Long enough for what is not to happen."""
        for _ in range(int(seconds / STEP_S)):
            await self.step()


@pytest.fixture
def net_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    @contextlib.asynccontextmanager
    async def make(settings: AgentSettings = SETTINGS) -> AsyncIterator[Net]:
        net = Net(tmp_path, settings)
        monkeypatch.setattr(spreading, "OVERDUE_S", 60.0)  # whoever is asked first answers first
        monkeypatch.setattr(datasets_module, "time", SimpleNamespace(monotonic=lambda: net.now_s))
        try:
            yield net
        finally:
            for node in net.nodes:
                await node.data.close()
                node.client.close()
                node.server.close()
            net.context.destroy(linger=0)

    return make


@pytest.fixture
def seeded(tmp_path: Path) -> tuple[Store, Manifest]:
    """A small data set of some shards, two replicas, and the store that holds it all."""
    store = Store(tmp_path / "seed")
    manifest = seed_tree(small_tree(tmp_path / "tree", folders=2, samples=8), store, max_shard_size=10_000)
    assert 4 <= len(manifest.shards) <= 12
    return store, manifest


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, DEADLINE_S))


def empty(root: Path, i: int, **given: Any) -> Store:
    return Store(root / f"store{i}", **given)


def copy(root: Path, i: int, store: Store, manifest: Manifest) -> Store:
    """A store with everything in it, too."""
    made = empty(root, i)
    made.add_manifest(manifest)
    for shard in range(len(manifest.shards)):
        partial = made.open_partial(manifest.digest, shard)
        partial.write(0, store.read_range(manifest.digest, shard, 0, manifest.shard_sizes[shard]))
        assert partial.commit()
    return made


def damage(store: Store, manifest: Manifest, shard: int) -> None:
    path = store.path(manifest.digest, shard)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def zero(store: Store, manifest: Manifest, shard: int) -> None:
    """Damaged all over."""
    store.path(manifest.digest, shard).write_bytes(bytes(manifest.shard_sizes[shard]))


def unnoticed(
    store: Store, manifest: Manifest, shard: int, how: Callable[[Store, Manifest, int], None]
) -> None:
    """Other bytes in a file that nobody wrote to, as far as the disk knows."""
    before = store.path(manifest.digest, shard).stat()
    how(store, manifest, shard)
    os.utime(store.path(manifest.digest, shard), ns=(before.st_atime_ns, before.st_mtime_ns))


def all_verified(node: Node, manifest: Manifest) -> bool:
    known = node.data._known.get(manifest.digest)
    return known is not None and set(known.verified) == node.data.held(manifest.digest)


def settled(net: Net, manifest: Manifest) -> bool:
    """Everybody who is there has what placement gives it."""
    d = manifest.digest
    return all(
        (placed := n.data.placed(d)) is not None and set(placed.shards_of(n.id)) <= n.data.held(d)
        for n in net.nodes
        if n.alive
    )


# -- spreading --------------------------------------------------------------------------------------------------------


def test_a_newcomer_gets_the_manifest_and_its_part(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, manifest = seeded
    d = manifest.digest

    async def work() -> None:
        async with net_of() as net:
            one, two = net.join(1, store), net.join(2, empty(tmp_path, 2))
            await net.until(lambda: two.data.manifest(d) is not None)
            assert two.data.by_name("small") == manifest == two.store.manifest(d)
            assert two.data.manifests() == (manifest,) and two.data.by_name("large") is None
            await net.until(lambda: settled(net, manifest) and two.data.fetching() == 0)
            assert two.data.held(d) == set(range(len(manifest.shards)))  # two peers, two replicas
            for shard in range(len(manifest.shards)):
                assert two.store.path(d, shard).read_bytes() == store.path(d, shard).read_bytes()
                assert two.data.usable(d, shard)
            fetched = two.events("fetched")
            assert {e["source"] for e in fetched} == {one.id} and len(fetched) == len(manifest.shards)
            await net.until(lambda: one.data.under_replicated(d) == 0 == two.data.under_replicated(d))
            assert one.data.holders(d) == {s: [one.id, two.id] for s in range(len(manifest.shards))}
            assert one.data.fetching() == two.data.fetching() == 0
            assert [e["samples"] for e in two.events("dataset")] == [len(manifest)]

    run(work())


def test_surplus_is_dropped_and_never_below_the_replicas(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, manifest = seeded
    d, shards = manifest.digest, range(len(manifest.shards))

    async def work() -> None:
        async with net_of() as net:
            nodes = [net.join(1, store), *(net.join(i, empty(tmp_path, i)) for i in (2, 3, 4))]
            replicated: set[int] = set()

            def watch() -> None:
                for shard in shards:
                    copies = sum(n.store.path(d, shard).exists() for n in nodes if n.data.manifest(d))
                    if copies >= 2:
                        replicated.add(shard)
                    assert copies >= (2 if shard in replicated else 1)

            net.watch = watch
            await net.until(
                lambda: (
                    settled(net, manifest)
                    and all(n.data.held(d) == set(n.data.placed(d).shards_of(n.id)) for n in nodes)
                )
            )
            assert all(sum(s in n.data.held(d) for n in nodes) == 2 for s in shards)
            assert len(nodes[0].events("dropped")) == len(shards) - len(nodes[0].data.held(d)) > 0

    run(work())


def test_after_a_death_the_rest_restores_the_replicas(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, manifest = seeded
    d, shards = manifest.digest, range(len(manifest.shards))

    async def work() -> None:
        async with net_of() as net:
            nodes = [net.join(1, store), *(net.join(i, empty(tmp_path, i)) for i in (2, 3, 4))]
            await net.until(
                lambda: (
                    settled(net, manifest)
                    and all(n.data.held(d) == set(n.data.placed(d).shards_of(n.id)) for n in nodes)
                )
            )
            net.kill(nodes[0])
            rest = nodes[1:]
            assert all(nodes[0].id not in h for n in rest for h in n.data.holders(d).values())
            await net.until(lambda: all(n.data.under_replicated(d) == 0 for n in rest))
            assert all(sum(s in n.data.held(d) for n in rest) >= 2 for s in shards)
            net.kill(nodes[1])
            await net.until(lambda: all(n.data.held(d) == set(shards) for n in rest[1:]))

    run(work())


def test_bytes_wait_out_flapping_shard_by_shard(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    """A peer that comes and goes moves nothing, and keeps nobody from replacing what another took with it."""
    store, manifest = seeded
    d, shards = manifest.digest, range(len(manifest.shards))

    async def work() -> None:
        async with net_of(replace(SETTINGS, reconcile_still_ms=1000, drop_still_ms=2000)) as net:
            nodes = [net.join(1, store), *(net.join(i, empty(tmp_path, i)) for i in (2, 3, 4))]
            await net.until(
                lambda: (
                    settled(net, manifest)
                    and all(n.data.held(d) == set(n.data.placed(d).shards_of(n.id)) for n in nodes)
                )
            )
            fetched = [len(n.events("fetched")) for n in nodes]
            flapping, dead = nodes[3], nodes[2]
            was = {s: nodes[0].data.placed(d).holders(s) for s in shards}

            async def flap() -> None:
                flapping.alive = not flapping.alive
                net.changed()
                await net.rest(0.8)

            for _ in range(6):
                await flap()
            assert [len(n.events("fetched")) for n in nodes] == fetched
            net.kill(dead)
            due = {s for s in shards if dead.id in was[s] and flapping.id not in was[s]}
            assert due
            for _ in range(20):
                await flap()
            two = nodes[:2]
            assert all(sum(n.data.usable(d, s) for n in (*two, flapping)) >= 2 for s in due)

    run(work())


def test_a_peer_that_means_to_leave_is_placed_nothing_and_asked_for_what_it_has(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, manifest = seeded
    d, shards = manifest.digest, range(len(manifest.shards))

    async def work() -> None:
        async with net_of() as net:
            leaver = net.join(1, store, weight=0)
            assert (
                leaver.data.replicated_elsewhere() is False and leaver.data.sole_copies_elsewhere() is False
            )
            two = net.join(2, empty(tmp_path, 2))
            await net.until(lambda: leaver.data.sole_copies_elsewhere())
            assert not leaver.data.replicated_elsewhere()  # two replicas are wanted, one peer stays
            three = net.join(3, empty(tmp_path, 3))
            await net.until(lambda: leaver.data.replicated_elsewhere())
            assert leaver.data.placed(d).shards_of(leaver.id) == ()
            assert two.data.held(d) == three.data.held(d) == set(shards)

    run(work())


def test_copies_go_to_different_domains_and_do_so_again_after_one_is_lost(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, manifest = seeded
    d, shards = manifest.digest, range(len(manifest.shards))

    async def work() -> None:
        async with net_of() as net:
            nodes = [net.join(1, store, domain="a")]
            nodes += [net.join(i, empty(tmp_path, i), domain=w) for i, w in enumerate("abbc", start=2)]
            domain_of = dict(zip([n.id for n in nodes], "aabbc", strict=True))

            def spread(least: int) -> bool:
                return all(
                    len({domain_of[p] for p in holders}) >= least
                    for holders in nodes[-1].data.holders(d).values()
                )

            await net.until(lambda: settled(net, manifest) and spread(2))
            await net.until(
                lambda: all(n.data.held(d) == set(n.data.placed(d).shards_of(n.id)) for n in nodes)
            )
            assert spread(2) and all(sum(s in n.data.held(d) for n in nodes) == 2 for s in shards)
            for node in nodes[:2]:  # the whole of domain a: no shard is lost with it
                net.kill(node)
            assert all(nodes[-1].data.holders(d)[s] for s in shards)
            await net.until(lambda: settled(net, manifest) and spread(2))

    run(work())


# -- dissent ----------------------------------------------------------------------------------------------------------


def test_peers_that_place_otherwise_for_long_are_named_by_both(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    """Peer 2 believes that peer 3 is in another domain, which changes no holder but the placement's digest."""
    store, manifest = seeded
    d = manifest.digest

    async def work() -> None:
        async with net_of() as net:
            one, two = net.join(1, store), net.join(2, empty(tmp_path, 2))
            three = net.join(3, empty(tmp_path, 3))
            await net.until(lambda: all(d in [m.digest for m in n.data.manifests()] for n in net.nodes))
            await net.rest(4.0)
            assert not [e for n in net.nodes for e in n.events("placement_differs")]
            other = replace(three.record, meta=record(3, domain="elsewhere").meta)
            net.seen_by = lambda node: (
                net.members()
                if node is not two
                else tuple(other if r is three.record else r for r in net.members())
            )
            net.changed()
            await net.until(lambda: one.data.dissenters(d) == [two.id] and len(two.data.dissenters(d)) == 2)
            await net.until(lambda: len(two.events("placement_differs")) == 2)
            await net.until(lambda: all(len(n.events("placement_differs")) == 1 for n in (one, three)))
            await net.rest(4.0)
            assert [e["peer_id"] for e in one.events("placement_differs")] == [two.id]
            (line,) = [line for line in one.around.said if "otherwise" in line]
            assert line.startswith("peer2 places data set 'small' otherwise than this peer")
            net.seen_by = lambda node: net.members()
            net.changed()
            await net.until(lambda: len(two.events("placement_agrees")) == 2)
            await net.until(lambda: all(len(n.events("placement_agrees")) == 1 for n in (one, three)))
            assert all(n.data.dissenters(d) == [] for n in net.nodes)

    run(work())


def test_a_word_that_was_lost_is_asked_for_before_anybody_is_named(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, manifest = seeded
    d = manifest.digest

    async def work() -> None:
        async with net_of() as net:
            one, two = net.join(1, store), net.join(2, empty(tmp_path, 2))
            await net.until(lambda: settled(net, manifest))
            lost, asked = [], False

            def lose(sender: Node, to: str, message: Holdings) -> bool:
                """All that peer 2 says to peer 1, until it is asked."""
                nonlocal asked
                asked = asked or (sender is one and to == two.id and message.answer)
                if sender is two and to == one.id and not asked:
                    lost.append(message.placement)
                    return True
                return False

            net.lose = lose
            net.join(3, empty(tmp_path, 3))
            await net.until(lambda: asked)
            assert two.data.placed(d).digest() in lost
            await net.rest(0.3)
            assert one.data.dissenters(d) == []
            await net.rest(4.0)
            assert not [e for n in net.nodes for e in n.events("placement_differs")]

    run(work())


# -- dropping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        "agreed",
        "one lacks it",
        "another placement",
        "unheard",
        "in use",
        "too soon",
        "few",
        "no pledge",
        "none of one",
    ],
)
def test_a_copy_is_dropped_only_when_all_that_should_have_it_pledge_to_keep_it(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest], case: str
) -> None:
    """The others' word by hand: peers 2 and 3 are to hold everything, peer 1 nothing."""
    store, manifest = seeded
    d, shards = manifest.digest, range(len(manifest.shards))

    async def work() -> None:
        async with net_of() as net:
            net.nodes += [one := Node(net, 1, store, 0)]
            others = [record(2, weight=1), *([record(3, weight=1)] if case != "few" else [])]
            one.data._members = lambda: (one.record, *others)  # type: ignore[method-assign]
            one.data.members_changed()
            placed = one.data.placed(d)
            assert placed is not None and placed.shards_of(one.id) == ()

            def says(i: int, held: range | list[int], placement: bytes) -> None:
                if case != "unheard" or i == 2:
                    said = Holdings(
                        dataset=d, name="small", version=1, bitmap=bitmap(frozenset(held), len(shards)),
                        unverified=bitmap(frozenset(), len(shards)), full=False, placement=placement, answer=False,
                    )  # fmt: skip
                    one.data.heard(peer(i), said)

            def pledges(sender: Node, to: str, asked: PledgeAsked) -> None:
                kept = tuple(s for s in asked.shards if to == peer(2) or (case, s) != ("none of one", 0))
                if to == peer(2) or case != "no pledge":
                    sender.data.heard_of_pledges(to, Pledged(dataset=d, number=asked.number, shards=kept))

            net.pledges = pledges
            says(2, shards, placed.digest())
            if case != "few":
                says(
                    3,
                    shards[1:] if case == "one lacks it" else shards,
                    b"x" * 16 if case == "another placement" else placed.digest(),
                )
            if case == "in use":
                one.data._in_use.add((d, 0))
            await net.rest(0.2 if case == "too soon" else 2.0)
            kept = {"agreed": set(), "one lacks it": {0}, "in use": {0}, "none of one": {0}}.get(
                case, set(shards)
            )
            assert one.data.held(d) == kept
            assert all(store.path(d, s).exists() == (s in kept) for s in shards)
            if case == "in use":
                one.data.release_use()
                await net.rest(0.5)
                assert one.data.held(d) == set()

    run(work())


# -- sources that fail ------------------------------------------------------------------------------------------------


def wanting(tmp_path: Path, net: Net, seeded: tuple[Store, Manifest]) -> Node:
    """Peer 3 has nothing and is to keep nothing; 1 and 2 have everything."""
    store, manifest = seeded
    net.join(1, store)
    net.join(2, copy(tmp_path, 2, store, manifest))
    lacking = empty(tmp_path, 3)
    lacking.add_manifest(manifest)
    return net.join(3, lacking, weight=0)


def in_order(net: Net, node: Node, manifest: Manifest, shard: int) -> list[Node]:
    """Whom it will ask, first to last."""
    by_id = {n.id: n for n in net.nodes}
    return [by_id[p] for p in node.data._fetching.sources((manifest.digest, shard))]


def lie(node: Node, answer: Callable[[BulkRequest, tuple[int, bytes]], tuple[int, bytes] | None]) -> None:
    async def provide(request: BulkRequest) -> tuple[int, bytes] | None:
        found = await node.data.provide_shard(request)
        return None if found is None else answer(request, found)

    node.server.provide(BulkKind.SHARD, provide)


FAULTS: dict[str, Callable[[Node, Manifest], None]] = {
    "written to on its disk": lambda node, m: zero(node.store, m, 1),
    "rotten on its disk": lambda node, m: unnoticed(node.store, m, 1, zero),
    "gone from its disk": lambda node, m: node.store.path(m.digest, 1).unlink(),
    "silent": lambda node, m: node.server.close(),
    "does not have it": lambda node, m: lie(node, lambda r, found: None),
    "a smaller whole": lambda node, m: lie(
        node, lambda r, found: (r.offset + len(found[1]) // 2, found[1][: len(found[1]) // 2])
    ),
    "a larger whole": lambda node, m: lie(
        node, lambda r, found: (found[0] + 5, found[1].ljust(r.size, b"x"))
    ),
    "another's bytes": lambda node, m: lie(node, lambda r, found: (found[0], bytes(len(found[1])))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_source_that_fails_is_replaced_by_another(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest], fault: str
) -> None:
    store, manifest = seeded
    d = manifest.digest

    async def work() -> None:
        async with net_of() as net:
            three, shard = wanting(tmp_path, net, seeded), 1
            await net.until(lambda: len(three.data._fetching.sources((d, shard))) == 2)
            bad, good = in_order(net, three, manifest, shard)
            whole = store.path(d, shard).read_bytes()
            await net.until(lambda: all_verified(bad, manifest) and all_verified(good, manifest))
            FAULTS[fault](bad, manifest)
            came: list[int] = []
            three.data.want(d, shard, lambda: came.append(1))
            await net.until(lambda: came == [1])
            assert three.data.usable(d, shard) and three.store.path(d, shard).read_bytes() == whole
            assert [e["source"] for e in three.events("fetched")] == [good.id]
            digests_fit = fault not in ("rotten on its disk", "another's bytes")
            assert [e["source"] for e in three.events("bad_shard")] == ([] if digests_fit else [bad.id])
            if fault == "gone from its disk":  # whoever notices gets it back
                await net.until(lambda: [e["source"] for e in bad.events("fetched")] == [good.id])
                assert bad.store.path(d, shard).read_bytes() == whole

    run(work())


def test_without_a_good_source_nothing_is_kept_and_it_is_tried_again(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    _, manifest = seeded
    d = manifest.digest

    async def work() -> None:
        async with net_of() as net:
            three, shard = wanting(tmp_path, net, seeded), 1
            await net.until(lambda: len(three.data._fetching.sources((d, shard))) == 2)
            for node in net.nodes[:2]:
                lie(node, lambda r, found: (found[0], bytes(len(found[1]))))
            came: list[int] = []
            three.data.want(d, shard, lambda: came.append(1))
            await net.until(lambda: len(three.events("bad_shard")) == 2)
            await net.until(lambda: three.data.fetching() == 0)
            assert came == [] and not three.data.usable(d, shard) and not three.store.path(d, shard).exists()
            for node in net.nodes[:2]:
                node.server.provide(BulkKind.SHARD, node.data.provide_shard)
            three.data.want(d, shard, lambda: came.append(2))
            await net.until(lambda: came == [1, 2])  # whoever waits is told, from the first on

    run(work())


def test_a_member_without_a_bulk_address_is_passed_over(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    _, manifest = seeded
    d = manifest.digest

    async def work() -> None:
        async with net_of() as net:
            three, shard = wanting(tmp_path, net, seeded), 1
            await net.until(lambda: len(three.data._fetching.sources((d, shard))) == 2)
            first = in_order(net, three, manifest, shard)[0]
            first.record = replace(first.record, bulk_address="")
            came: list[int] = []
            three.data.want(d, shard, lambda: came.append(1))
            await net.until(lambda: came == [1])

    run(work())


def test_an_absurd_request_costs_the_peer_that_is_asked_nothing(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, manifest = seeded
    d = manifest.digest

    async def work() -> None:
        async with net_of() as net:
            one = net.join(1, store)
            total = manifest.shard_sizes[0]
            one.data.want(d, 0, lambda: None)
            await net.until(lambda: one.data.usable(d, 0))

            async def asked(
                digest: bytes, part: int, offset: int, size: int = 100
            ) -> tuple[int, bytes] | None:
                return await one.data.provide_shard(
                    BulkRequest(
                        request=1,
                        kind=BulkKind.SHARD,
                        name="",
                        digest=digest,
                        part=part,
                        offset=offset,
                        size=size,
                    )
                )

            assert await asked(d, 0, total - 10) == (total, store.read_range(d, 0, total - 10, 10))
            for digest, part, offset in (
                (d, 0, total + 1), (d, 0, 1 << 62), (d, 0, (1 << 64) - 1), (d, len(manifest.shards), 0),
                (b"x" * 16, 0, 0), (d, 1 << 40, 0),
            ):  # fmt: skip
                found = await asked(digest, part, offset)
                assert found is None or found[1] == b""
            assert one.data.usable(d, 0) and one.data.held(d) == set(range(len(manifest.shards)))
            request = BulkRequest(
                request=1, kind=BulkKind.MANIFEST, name="", digest=d, part=0, offset=(1 << 64) - 1, size=100
            )
            found = one.data.provide_manifest(request)
            assert found is not None and found[1] == b""
            assert one.data.provide_manifest(replace(request, digest=b"x" * 16)) is None

    run(work())


# -- what is on the disk ----------------------------------------------------------------------------------------------


def test_after_a_start_a_shard_is_verified_before_it_is_used(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, manifest = seeded
    d = manifest.digest

    async def work() -> None:
        async with net_of() as net:
            one = net.join(1, store)
            two = net.join(2, copy(tmp_path, 2, store, manifest))
            await net.until(lambda: len(one.data._fetching.sources((d, 0))) == 1)
            damage(store, manifest, 0)
            assert not one.data.usable(d, 0) and not one.data.usable(d, 1)
            came: list[int] = []
            one.data.want(d, 0, lambda: came.append(0))
            one.data.want(d, 1, lambda: came.append(1))
            await net.until(lambda: sorted(came) == [0, 1])
            assert one.data.usable(d, 0) and one.data.usable(d, 1)
            assert len(one.events("shard_corrupt")) == 1 == len(one.around.said)
            assert [e["source"] for e in one.events("fetched")] == [two.id]
            assert store.path(d, 0).read_bytes() == two.store.path(d, 0).read_bytes()

    run(work())


def test_a_shard_that_is_written_to_later_is_verified_again_before_it_is_used(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, manifest = seeded
    d = manifest.digest

    async def work() -> None:
        async with net_of() as net:
            one = net.join(1, store)
            two = net.join(2, copy(tmp_path, 2, store, manifest))
            await net.until(lambda: len(one.data._fetching.sources((d, 0))) == 1)
            came: list[int] = []
            for shard in (0, 1):
                one.data.want(d, shard, lambda shard=shard: came.append(shard))
            await net.until(lambda: sorted(came) == [0, 1])
            damage(store, manifest, 0)
            store.path(d, 1).touch()
            assert not one.data.usable(d, 0) and not one.data.usable(d, 1)
            for shard in (0, 1):
                one.data.want(d, shard, lambda shard=shard: came.append(shard))
            await net.until(lambda: sorted(came) == [0, 0, 1, 1])
            assert one.data.usable(d, 0) and one.data.usable(d, 1)
            assert [e["shard"] for e in one.events("shard_corrupt")] == [manifest.shard_digests[0].hex()]
            assert store.path(d, 0).read_bytes() == two.store.path(d, 0).read_bytes()

    run(work())


def test_what_this_peer_has_just_sharded_is_usable(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    _, manifest = seeded

    async def work() -> None:
        async with net_of() as net:
            one = net.join(1, empty(tmp_path, 1))
            made = seed_tree(tmp_path / "tree", one.store, max_shard_size=10_000)
            assert made == manifest and not one.data.usable(made.digest, 0)
            one.data.add(made)
            assert all(one.data.usable(made.digest, s) for s in range(len(made.shards)))

    run(work())


def test_a_full_store_says_so_and_goes_on_with_what_it_has(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, manifest = seeded
    d = manifest.digest

    async def work() -> None:
        async with net_of() as net:
            net.join(1, store)
            room = manifest.shard_sizes[0] + manifest.shard_sizes[1]
            two = net.join(2, empty(tmp_path, 2, capacity_bytes=room))
            await net.until(lambda: len(two.events("store_full")) > 0)
            await net.until(lambda: two.data.fetching() == 0)
            held, said = two.data.held(d), len(two.around.said)
            assert "free some disk space or raise --capacity" in two.around.said[0]
            assert 0 < len(held) < len(manifest.shards) and all(two.data.usable(d, s) for s in held)
            assert two.data.full
            await net.rest(20.0)
            assert len(two.around.said) == said  # it does not try again while there is no room
            two.data.store.capacity_bytes = None
            await net.until(lambda: len(two.data.held(d)) == len(manifest.shards))
            assert not two.data.full

    run(work())


def test_a_rotten_shard_is_found_said_and_repaired_and_meanwhile_nobody_counts_on_it(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, manifest = seeded
    d = manifest.digest

    async def work() -> None:
        async with net_of(replace(SETTINGS, scrub_pass_s=0.5)) as net:
            one, two = net.join(1, store), net.join(2, empty(tmp_path, 2))
            await net.until(lambda: settled(net, manifest) and all_verified(one, manifest))
            whole = store.path(d, 2).read_bytes()
            unnoticed(store, manifest, 2, zero)
            await net.until(lambda: len(one.events("shard_corrupt")) == 1)
            assert not one.data.usable(d, 2) and 2 not in one.data.held(d)
            given = await one.data.provide_shard(shard_request(d, 2))
            assert given in (None, (len(whole), whole[:1]))  # what has come of the right one is passed on
            await net.until(lambda: [e["source"] for e in one.events("fetched")] == [two.id])
            assert one.data.usable(d, 2) and store.path(d, 2).read_bytes() == whole
            [line] = one.around.said
            assert "shard" in line and "is damaged here" in line
            await net.until(lambda: two.data.under_replicated(d) == 0)

    run(work())


def shard_request(dataset: bytes, shard: int) -> BulkRequest:
    return BulkRequest(request=1, kind=BulkKind.SHARD, name="", digest=dataset, part=shard, offset=0, size=1)


def test_a_copy_that_was_not_looked_at_for_long_is_before_it_is_pledged(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    """A copy too many stays while one of those that are to keep the shard has a rotten one."""
    store, manifest = seeded
    d, shards = manifest.digest, range(len(manifest.shards))

    async def work() -> None:
        async with net_of(replace(SETTINGS, reconcile_still_ms=10_000_000)) as net:
            one, two = net.join(1, store, weight=0), net.join(2, copy(tmp_path, 2, store, manifest))
            three = net.join(3, copy(tmp_path, 3, store, manifest))
            net.lose = lambda sender, to, message: sender is not one  # nobody knows who holds what
            await net.until(lambda: all(all_verified(n, manifest) for n in net.nodes))
            unnoticed(three.store, manifest, 1, zero)
            three.data._known[d].verified_s[1] -= SETTINGS.pledge_fresh_s + 1
            net.lose = lambda sender, to, message: False
            await net.until(lambda: one.data.held(d) == {1} and len(three.events("shard_corrupt")) == 1)
            await net.rest(5.0)
            assert one.data.held(d) == {1} and two.data.held(d) == set(shards)
            assert three.data.held(d) == set(shards) - {1} and len(three.events("shard_corrupt")) == 1

    run(work())


def test_what_a_peer_held_in_a_former_life_counts_for_nothing(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    """It is back before anybody missed it, on an empty disk, and says nothing, for it knows no data set."""
    store, manifest = seeded
    d, shards = manifest.digest, range(len(manifest.shards))

    async def work() -> None:
        async with net_of(replace(SETTINGS, drop_still_ms=10_000_000)) as net:
            one = net.join(1, store, weight=0)
            two, three = net.join(2, empty(tmp_path, 2)), net.join(3, empty(tmp_path, 3))
            await net.until(lambda: two.data.held(d) == three.data.held(d) == set(shards))
            await net.until(lambda: all(len(h) == 3 for h in one.data.holders(d).values()))
            net.lose = lambda sender, to, message: sender is three
            three.record = replace(three.record, boot=2)
            await net.step()
            assert all(three.id not in h for h in one.data.holders(d).values())
            assert one.data.under_replicated(d) == len(shards) and not one.data.replicated_elsewhere()
            net.lose = lambda sender, to, message: False
            await net.until(lambda: all(len(h) == 3 for h in two.data.holders(d).values()))

    run(work())


def test_what_does_not_fit_goes_to_others_and_no_peer_stores_more_than_it_may(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, manifest = seeded
    d, shards = manifest.digest, range(len(manifest.shards))
    room = 2 * max(manifest.shard_sizes)

    async def work() -> None:
        async with net_of() as net:
            one, small = net.join(1, store), net.join(2, empty(tmp_path, 2, capacity_bytes=room))
            large = net.join(3, empty(tmp_path, 3))

            def watch() -> None:
                stored = 0
                for path in (tmp_path / "store2").glob("*/shards/*"):
                    with contextlib.suppress(FileNotFoundError):  # it has got its name just now
                        stored += path.stat().st_size
                assert stored <= room

            net.watch = watch
            await net.until(lambda: small.data.full)
            await net.until(lambda: all(n.data.under_replicated(d) == 0 for n in net.nodes))
            copies = [sum(n.data.usable(d, s) for n in net.nodes) for s in shards]
            assert min(copies) >= 2 and small.data.held(d)

            def at_rest() -> bool:  # there may be enough copies before each is where it belongs
                told, placed = one.data.tally(d), large.data.placed(d)
                assert told is not None and placed is not None
                whole = large.data.held(d) > set(placed.shards_of(large.id))
                return whole and (told.under_replicated, told.lost, told.in_flight) == (0, 0, 0)

            await net.until(at_rest)

    run(work())


def test_a_smaller_capacity_than_before_is_said_and_kept_to_as_far_as_others_keep_the_rest(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, manifest = seeded
    d = manifest.digest
    room = manifest.total_bytes - 2 * max(manifest.shard_sizes)

    async def work() -> None:
        async with net_of() as net:
            one = net.join(1, Store(store.root, capacity_bytes=room))
            [line] = one.around.said
            assert "more than --capacity allows" in line
            await net.rest(3.0)
            assert len(one.data.held(d)) == len(manifest.shards)  # nobody else has them
            others = [net.join(i, empty(tmp_path, i)) for i in (2, 3, 4)]
            await net.until(lambda: settled(net, manifest) and one.store.excess_bytes() == 0)
            await net.until(lambda: all(o.data.under_replicated(d) == 0 for o in others))
            assert one.data.held(d)

    run(work())


@pytest.mark.parametrize("when", ["before it is deleted", "after it was deleted"])
def test_an_agent_that_is_killed_as_it_gives_a_copy_up_holds_it_or_does_not(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    store, manifest = seeded
    d, shards = manifest.digest, range(len(manifest.shards))

    class Killed(BaseException):
        pass

    drop = Store.drop

    dropped: list[int] = []

    def killed(self: Store, dataset: bytes, shard: int) -> None:
        if self is store:
            dropped.append(shard)
            if when == "after it was deleted":
                drop(self, dataset, shard)
            raise Killed

    async def work() -> None:
        async with net_of() as net:
            one = net.join(1, store, weight=0)
            two, three = net.join(2, empty(tmp_path, 2)), net.join(3, empty(tmp_path, 3))
            monkeypatch.setattr(Store, "drop", killed)
            with pytest.raises(Killed):
                await net.until(lambda: False)
            monkeypatch.setattr(Store, "drop", drop)
            net.kill(one)
            again = Store(store.root)
            lacks = set(shards) - again.holdings(d)
            assert lacks == (set(dropped) if when == "after it was deleted" else set())
            assert all(again.verify(d, s) for s in again.holdings(d)) and len(dropped) == 1
            for other in (two, three):
                assert other.store.verify(d, dropped[0])  # what was pledged is there

    run(work())


# -- what others say --------------------------------------------------------------------------------------------------


def test_two_data_sets_of_one_name_are_named_once_and_neither_is_taken(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, manifest = seeded
    other_store = Store(tmp_path / "other")
    other = seed_tree(tmp_path / "tree", other_store, max_shard_size=14_000)
    assert other.name == manifest.name and other.digest != manifest.digest

    async def work() -> None:
        async with net_of() as net:
            one, two = net.join(1, store), net.join(2, other_store)
            await net.until(lambda: one.data.conflict is not None and two.data.conflict is not None)
            await net.rest(3.0)
            for node, here, there in ((one, manifest, other), (two, other, manifest)):
                (line,) = node.around.said
                assert (
                    line == node.data.conflict
                    and here.digest.hex()[:12] in line
                    and there.digest.hex()[:12] in line
                )
                assert "--name" in line and node.data.manifests() == (here,)
                (event,) = node.events("name_clash")
                assert (event["here"], event["there"]) == (here.digest.hex(), there.digest.hex())

    run(work())


def test_holdings_that_make_no_sense_are_the_senders_fault(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, manifest = seeded

    async def work() -> None:
        async with net_of() as net:
            one = net.join(1, store)
            good = one.data.announcement(manifest.digest)
            one.data.heard(peer(2), good)
            for wrong in (
                replace(good, bitmap=good.bitmap + b"\0"),
                replace(good, bitmap=b""),
                replace(good, dataset=b"short"),
                replace(good, name="n" * 257),
            ):
                with pytest.raises(RemoteProtocolError):
                    one.data.heard(peer(2), wrong)
            assert peer(2) not in one.data.copies(manifest.digest)  # peer 2 is no member (any more)

    run(work())


def test_what_was_said_before_does_not_take_the_place_of_what_was_said_after(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, manifest = seeded
    d = manifest.digest

    async def work() -> None:
        async with net_of() as net:
            one, two = net.join(1, store), net.join(2, empty(tmp_path, 2))
            await net.until(lambda: two.data.manifest(d) is not None)
            before = two.data.announcement(d)
            await net.until(lambda: two.id in one.data.copies(d))
            await net.until(
                lambda: (
                    one.data.copies(d)[two.id].verified
                    == ShardSet.of(store.holdings(d), len(manifest.shards))
                )
            )
            one.data.heard(two.id, before)  # on another way
            assert len(one.data.copies(d)[two.id].verified) == len(manifest.shards)

    run(work())


@pytest.mark.parametrize("case", ["another's", "junk", "cut", "gone", "no address", "endless"])
def test_a_manifest_that_cannot_be_had_is_had_from_another(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest], case: str
) -> None:
    store, manifest = seeded
    another = seed_tree(tmp_path / "tree", Store(tmp_path / "other"), max_shard_size=14_000).to_bytes()
    answers: dict[str, Callable[[BulkRequest], tuple[int, bytes] | None]] = {
        "another's": lambda r: (len(another), another[r.offset : r.offset + r.size]),
        "junk": lambda r: (10, b"x" * 10),
        "cut": lambda r: (
            len(manifest.to_bytes()) - 1,
            manifest.to_bytes()[r.offset : r.offset + r.size][: -1 if r.offset else None],
        ),
        "gone": lambda r: None,
        "endless": lambda r: (1 << 40, b"x" * r.size),
    }

    async def work() -> None:
        async with net_of() as net:
            one = net.join(1, store)
            if case == "no address":
                one.record = replace(one.record, bulk_address="")
            else:
                one.server.provide(BulkKind.MANIFEST, answers[case])  # type: ignore[arg-type]
            three = net.join(3, empty(tmp_path, 3))
            await net.rest(1.5)
            assert three.data.manifests() == () and three.store.datasets() == ()
            await net.until(lambda: not three.data._fetching.manifests._senders)
            net.join(2, copy(tmp_path, 2, store, manifest))
            await net.until(lambda: three.data.manifests() == (manifest,))

    run(work())


def test_lost_shards_are_named_and_named_again_each_minute(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, manifest = seeded
    d, shards = manifest.digest, set(range(len(manifest.shards)))

    async def work() -> None:
        async with net_of() as net:
            lacking = empty(tmp_path, 2)
            lacking.add_manifest(manifest)
            two = net.join(2, lacking)
            assert two.data.reachable(d) == set() and two.data.reachable(b"x" * 16) == set()
            await net.rest(4.0)
            assert two.around.said == []  # it may be on its way
            await net.rest(4.0)
            (line,) = two.around.said
            assert (
                f"no live peer holds {len(shards)} of {len(shards)} shards" in line
                and f"and {len(shards) - 3} more" in line
            )
            assert manifest.shard_digests[0].hex()[:12] in line and line.endswith(
                "start a peer that has them"
            )
            await net.rest(55.0)
            assert len(two.around.said) == 1
            await net.rest(10.0)
            assert len(two.around.said) == 2 and len(two.events("shards_lost")) == 2
            net.join(1, store)
            await net.until(lambda: two.data.reachable(d) == shards)
            await net.rest(70.0)
            assert len(two.around.said) == 2

    run(work())


# -- what a peer does to others ---------------------------------------------------------------------------------------


def test_shards_that_nobody_gives_hold_up_no_others(
    tmp_path: Path, net_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching_module, "AGAIN_S", 0.1)
    monkeypatch.setattr(fetching_module, "AGAIN_MOST_S", 0.2)
    monkeypatch.setattr(repairing, "AT_ONCE", at_once := 6)
    store = Store(tmp_path / "seed")
    manifest = seed_tree(small_tree(tmp_path / "tree", folders=2, samples=8), store, max_shard_size=2000)
    d, shards = manifest.digest, set(range(len(manifest.shards)))
    assert len(shards) > at_once + 6

    async def work() -> None:
        async with net_of() as net:
            one, two = net.join(1, store), net.join(2, empty(tmp_path, 2))
            first: dict[int, None] = {}

            async def answer(request: BulkRequest) -> tuple[int, bytes] | None:
                if len(first) < at_once:
                    first[request.part] = None
                return None if request.part in first else await one.data.provide_shard(request)

            one.server.provide(BulkKind.SHARD, answer)
            await net.until(lambda: len(two.data.held(d)) == len(shards) - at_once)
            assert two.data.held(d) == shards - set(first)
            await net.until(lambda: all(two.store.begun(d, shard) is None for shard in shards))
            one.server.provide(BulkKind.SHARD, one.data.provide_shard)
            await net.until(lambda: two.data.held(d) == shards)

    run(work())


def test_nobody_asks_about_more_shards_at_once_than_can_be_looked_at(
    net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, manifest = seeded

    async def work() -> None:
        async with net_of() as net:
            one = net.join(1, store)
            one.data.add(manifest)
            for kind in (PledgeAsked, Pledged):
                few = kind(dataset=manifest.digest, number=1, shards=(0,) * MOST_SHARDS)
                one.data.heard_of_pledges(peer(2), few)
                with pytest.raises(RemoteProtocolError, match="shards in one message"):
                    one.data.heard_of_pledges(peer(2), replace(few, shards=(0,) * (MOST_SHARDS + 1)))

    run(work())


def test_of_one_peer_only_so_many_manifests_are_fetched_at_once(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    async def work() -> None:
        async with net_of() as net:
            one, two = net.join(1, empty(tmp_path, 1)), net.join(2, empty(tmp_path, 2))
            for i in range(3 * MOST_MANIFESTS):
                said = Holdings(
                    dataset=i.to_bytes(16, "big"),
                    name="n",
                    version=1,
                    bitmap=b"",
                    unverified=b"",
                    full=False,
                    placement=b"",
                    answer=False,
                )
                one.data.heard(two.id, said)
            assert len(one.data._fetching.manifests._senders) == MOST_MANIFESTS
            await net.until(lambda: not one.data._fetching.manifests._senders)

    run(work())
