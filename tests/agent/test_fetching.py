"""Shards fetched from several peers at once, over real sockets, from sources that are slow, gone, full or lie."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from p2p_dmc.agent import fetching as fetching_module
from p2p_dmc.agent import spreading
from p2p_dmc.agent.bulk import SourceLostError
from p2p_dmc.agent.serving import Parts
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.store import Store
from p2p_dmc.wire import codec
from p2p_dmc.wire.messages import BulkKind, BulkRequest
from tests.agent.fetchers import PIECE, RANGE, Found, Node, World, run
from tests.data.helpers import make_tree, seed_tree

SHARD = 400_000


@pytest.fixture
def origin(tmp_path: Path) -> Store:
    return Store(tmp_path / "origin")


@pytest.fixture
def manifest(tmp_path: Path, origin: Store) -> Manifest:
    """A few shards of some hundred kB."""
    tree = make_tree(tmp_path / "tree", {f"{i:03d}.bin": 60_000 + i for i in range(30)})
    made = seed_tree(tree, origin, max_shard_size=SHARD, replicas=3)
    assert 4 <= len(made.shards) <= 8 and min(made.shard_sizes) > 8 * RANGE
    return made


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is asked first answers first, on a slow machine too; tests of haste say otherwise."""
    monkeypatch.setattr(spreading, "OVERDUE_S", 60.0)
    monkeypatch.setattr(fetching_module, "LOOK_S", 0.02)


def zeros(node: Node) -> None:
    """It sends something else."""

    async def answer(request: BulkRequest, found: Found) -> Found:
        return None if found is None else (found[0], bytes(len(found[1])))

    node.answer = answer


def late(node: Node, after: int = 0) -> asyncio.Event:
    """It sends the first so many ranges of a shard, and others only once the event is set."""
    go_on = asyncio.Event()

    async def answer(request: BulkRequest, found: Found) -> Found:
        if request.offset >= after * RANGE:
            await go_on.wait()
        return found

    node.answer = answer
    return go_on


def test_all_holders_take_part(tmp_path: Path, origin: Store, manifest: Manifest) -> None:
    async def work(w: World) -> None:
        holders, me = [w.holder(i) for i in (1, 2, 3)], w.receiver(9)
        shards = range(len(manifest.shards))
        came = me.want(shards)
        await w.until(lambda: sorted(came) == list(shards))
        assert all(me.has(s) for s in shards) and len(me.fetching) == 0
        assert all(node.asked for node in holders)
        assert all(max(node.asked.values()) == 1 for node in holders)
        asked = sum(node.server.sent_bytes for node in holders)
        assert asked == manifest.total_bytes == me.client.received_bytes  # each byte once
        lines = me.events("fetched")
        assert all(sum(line["sources"].values()) >= line["size_bytes"] for line in lines)
        assert {source for line in lines for source in line["sources"]} == {node.id for node in holders}

    run(tmp_path, origin, manifest, work)


def test_ranges_of_a_slow_source_are_asked_of_another(
    tmp_path: Path, origin: Store, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spreading, "OVERDUE_S", 0.1)

    async def work(w: World) -> None:
        slow, quick, me = w.holder(1), w.holder(2), w.receiver(9)
        never = late(slow)
        came = me.want([0])
        await w.until(lambda: came == [0])
        assert me.has(0) and slow.asked and not never.is_set()
        (line,) = me.events("fetched")
        assert list(line["sources"]) == [quick.id]

    run(tmp_path, origin, manifest, work)


def test_a_source_that_falls_silent_is_left_for_another_after_a_bound(
    tmp_path: Path, origin: Store, manifest: Manifest
) -> None:
    async def work(w: World) -> None:
        silent, other, me = w.holder(1), w.holder(2), w.receiver(9)
        late(silent, after=2)
        came = me.want([0])
        await w.until(lambda: came == [0])
        assert me.has(0) and silent.asked.total() > 2
        asked = silent.asked.total()
        more = me.want([1])
        await w.until(lambda: more == [1])
        assert silent.asked.total() == asked  # not asked again for a while
        assert other.asked

    run(tmp_path, origin, manifest, work)


@pytest.mark.parametrize("liars", [(1,), (3,), (1, 2)])
def test_a_source_that_lies_is_found_and_named(
    tmp_path: Path, origin: Store, manifest: Manifest, liars: tuple[int, ...]
) -> None:
    async def work(w: World) -> None:
        nodes, me = {i: w.holder(i) for i in (1, 2, 3)}, w.receiver(9)
        for i in liars:
            zeros(nodes[i])
        came = me.want([0, 1])
        await w.until(lambda: sorted(came) == [0, 1])
        assert me.has(0) and me.has(1)
        named = {line["source"] for line in me.events("bad_shard")}
        assert named == {nodes[i].id for i in liars}
        asked = {i: nodes[i].asked.total() for i in liars}
        came = me.want([2])
        await w.until(lambda: came == [2])
        assert me.has(2) and asked == {i: nodes[i].asked.total() for i in liars}  # not trusted for a while

    run(tmp_path, origin, manifest, work)


def test_one_wrong_byte_among_the_ranges_of_three_names_its_sender(
    tmp_path: Path, origin: Store, manifest: Manifest
) -> None:
    async def work(w: World) -> None:
        nodes, me = [w.holder(i) for i in (1, 2, 3)], w.receiver(9)
        sent: list[str] = []

        def once(node: Node) -> None:
            async def answer(request: BulkRequest, found: Found) -> Found:
                if found is None or sent or request.offset < SHARD // 2:
                    return found
                sent.append(node.id)
                return found[0], bytes([found[1][0] ^ 1]) + found[1][1:]

            node.answer = answer

        for node in nodes:
            once(node)
        came = me.want([0])
        await w.until(lambda: came == [0])
        assert me.has(0) and [line["source"] for line in me.events("bad_shard")] == sent

    run(tmp_path, origin, manifest, work)


def test_when_all_lie_nothing_is_kept(tmp_path: Path, origin: Store, manifest: Manifest) -> None:
    async def work(w: World) -> None:
        nodes, me = [w.holder(i) for i in (1, 2)], w.receiver(9)
        for node in nodes:
            zeros(node)
        came = me.want([0])
        await w.until(lambda: len(me.fetching) == 0)
        assert came == [] and {line["source"] for line in me.events("bad_shard")} == {n.id for n in nodes}
        assert list(me.store.root.rglob("*.tar*")) == []
        for node in nodes:
            node.answer = None
        came = me.want([0])  # nobody better is there
        await w.until(lambda: came == [0])

    run(tmp_path, origin, manifest, work)


def test_after_a_restart_only_what_is_missing_is_fetched(
    tmp_path: Path, origin: Store, manifest: Manifest
) -> None:
    d = manifest.digest

    async def work(w: World) -> None:
        holder, me = w.holder(1), w.receiver(9)
        late(holder, after=9)
        came = me.want([0])
        await w.until(lambda: holder.asked.total() > 9)
        partial = me.store.begun(d, 0)
        assert partial is not None
        written = 9 * RANGE
        await w.until(lambda: partial.written_bytes == written)
        await w.gone(me)
        assert came == []
        await w.gone(holder)
        other, again = w.holder(2), w.receiver(9)
        came = again.want([0])
        await w.until(lambda: came == [0])
        assert again.has(0) and other.server.sent_bytes == manifest.shard_sizes[0] - written

    run(tmp_path, origin, manifest, work)


def test_what_is_left_of_an_earlier_life_and_wrong_costs_a_fetch_and_names_nobody(
    tmp_path: Path, origin: Store, manifest: Manifest
) -> None:
    d = manifest.digest
    earlier = Store(tmp_path / "store9")
    earlier.add_manifest(manifest)
    earlier.open_partial(d, 0).write(0, bytes(3 * PIECE))

    async def work(w: World) -> None:
        w.holder(1)
        me = w.receiver(9)
        came = me.want([0])
        await w.until(lambda: came == [0])
        assert me.has(0) and me.events("bad_shard") == []

    run(tmp_path, origin, manifest, work)


def test_a_source_that_vanishes_leaves_what_came_to_the_next(
    tmp_path: Path, origin: Store, manifest: Manifest
) -> None:
    d = manifest.digest

    async def work(w: World) -> None:
        first, me = w.holder(1), w.receiver(9)
        late(first, after=5)
        came = me.want([0])
        await w.until(lambda: (p := me.store.begun(d, 0)) is not None and p.written_bytes >= 5 * PIECE)
        await w.gone(first)
        second = w.holder(2)
        await w.until(lambda: came == [0] or len(me.fetching) == 0)
        if came == []:
            came = me.want([0])
            await w.until(lambda: came == [0])
        assert me.has(0) and second.server.sent_bytes <= manifest.shard_sizes[0] - 5 * PIECE

    run(tmp_path, origin, manifest, work)


def test_without_room_it_is_said_once_and_nothing_is_left(
    tmp_path: Path, origin: Store, manifest: Manifest
) -> None:
    async def work(w: World) -> None:
        w.holder(1)
        me = w.receiver(9, capacity_bytes=manifest.shard_sizes[0] + 1000)
        came = me.want(range(len(manifest.shards)))
        await w.until(lambda: len(me.fetching) == 0)
        assert came == [0] and me.has(0) and me.fetching.full
        assert len(me.events("store_full")) == len(me.around.said) > 0
        assert "--capacity" in me.around.said[0] and not list(me.store.root.rglob("*.part"))

    run(tmp_path, origin, manifest, work)


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_disk_that_is_full_in_the_middle_of_a_shard(
    tmp_path: Path, origin: Store, manifest: Manifest, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(w: World) -> None:
        w.holder(1)
        w.holder(2)
        me = w.receiver(9)
        real, calls = getattr(os, call), [0]

        def full(*arguments: Any) -> Any:
            calls[0] += 1
            if calls[0] > (6 if call == "pwrite" else 0):
                raise OSError(28, "No space left on device")
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(f"p2p_dmc.data.partial.os.{call}", full)
            came = me.want([0])
            await w.until(lambda: len(me.fetching) == 0)
        assert came == [] and me.around.said and not list(me.store.root.rglob("*.tar*"))
        came = me.want([0])
        await w.until(lambda: came == [0])
        assert me.has(0)

    run(tmp_path, origin, manifest, work)


# -- passing on -------------------------------------------------------------------------------------------------------


def test_a_lone_holder_sends_little_more_than_once_what_three_receive(
    tmp_path: Path, origin: Store, manifest: Manifest
) -> None:
    async def work(w: World) -> None:
        holder = w.holder(1, upload=1_500_000)
        three = [w.receiver(i) for i in (2, 3, 4)]
        w.place(*three)
        shards = range(len(manifest.shards))
        for node in three:
            for shard in shards:
                node.fetching.start((manifest.digest, shard), urgent=False)
        await w.until(lambda: all(node.has(s) for node in three for s in shards))
        assert sum(node.client.received_bytes for node in three) >= 3 * manifest.total_bytes
        assert (
            holder.server.sent_bytes < 2 * manifest.total_bytes
        )  # by itself it would send three times as much
        assert all(node.server.sent_bytes > manifest.total_bytes // 8 for node in three)

    run(tmp_path, origin, manifest, work)


def test_a_receiver_passes_on_what_has_arrived_and_nothing_else(
    tmp_path: Path, origin: Store, manifest: Manifest
) -> None:
    d = manifest.digest

    async def work(w: World) -> None:
        holder, me, other = w.holder(1), w.receiver(2), w.receiver(3)
        late(holder, after=3)
        me.want([0])
        await w.until(lambda: (p := me.store.begun(d, 0)) is not None and p.written_bytes >= 3 * RANGE)

        async def range_of(offset: int, size: int) -> bytes:
            total, data = await other.client.fetch(
                me.record.bulk_address, BulkKind.SHARD, digest=d, part=0, offset=offset, size=size
            )
            assert total == manifest.shard_sizes[0]
            return bytes(data)

        assert await range_of(0, 3 * RANGE) == origin.read_range(d, 0, 0, 3 * RANGE)
        for offset, size in ((0, 3 * RANGE + 1), (3 * RANGE - 1, 2), (20 * RANGE, 1)):
            with pytest.raises(SourceLostError):
                await range_of(offset, size)
        total, data = await other.client.fetch(
            me.record.bulk_address, BulkKind.PARTS, digest=d, offset=0, size=1 << 18
        )
        assert total == len(data)
        assert codec.unpack_value(Parts, bytes(data), 1 << 18).shards == ((0, ((0, 3 * RANGE),)),)

    run(tmp_path, origin, manifest, work)


def test_a_receiver_that_passes_on_something_else_is_named(
    tmp_path: Path, origin: Store, manifest: Manifest
) -> None:
    async def work(w: World) -> None:
        holder = w.holder(1, upload=1_000_000)
        liar, me = w.receiver(2), w.receiver(3)
        w.place(liar, me)
        zeros(liar)
        shards = range(len(manifest.shards))
        for node in (liar, me):
            for shard in shards:
                node.fetching.start((manifest.digest, shard), urgent=False)
        await w.until(lambda: all(node.has(s) for node in (liar, me) for s in shards))
        assert liar.asked and {e["source"] for e in me.events("bad_shard")} == {liar.id}
        assert liar.events("bad_shard") == [] and holder.asked

    run(tmp_path, origin, manifest, work)


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"junk",
        codec.pack_value(Parts(shards=((0, ((5, 1), (-7, 1 << 60))), (-1, ((0, 9),)), (1 << 40, ())))),
    ],
)
def test_nonsense_about_parts_does_nothing(
    tmp_path: Path, origin: Store, manifest: Manifest, junk: bytes
) -> None:
    async def work(w: World) -> None:
        w.holder(1, upload=1_000_000)
        other, me = w.receiver(2), w.receiver(3)
        w.place(other, me)
        asked = []

        def parts(request: BulkRequest) -> Found:
            asked.append(request)
            return len(junk), junk

        other.server.provide(BulkKind.PARTS, parts)
        came = me.want([0])
        await w.until(lambda: came == [0])
        assert me.has(0) and asked

    run(tmp_path, origin, manifest, work)


# -- yielding ---------------------------------------------------------------------------------------------------------


def test_while_training_needs_the_link_the_background_trickles_and_what_is_waited_for_does_not(
    tmp_path: Path, origin: Store, manifest: Manifest
) -> None:
    d = manifest.digest

    async def work(w: World) -> None:
        holder, me = w.holder(1), w.receiver(9)
        busy = True
        me.fetching.yields = lambda: busy
        for shard in (0, 1, 2):
            me.fetching.start((d, shard), urgent=False)
        await w.until(lambda: holder.asked.total() > 10)
        assert holder.most_outstanding == 1
        came = me.want([3])
        await w.until(lambda: came == [3])
        assert me.has(3) and holder.most_outstanding > 1 and not me.store.holdings(d).issuperset({0, 1, 2})
        came = me.want([2])  # it was in the background until now
        await w.until(lambda: came == [2])
        busy = False
        await w.until(lambda: me.store.holdings(d) >= {0, 1, 2, 3})

    run(tmp_path, origin, manifest, work)


def test_a_holder_whose_training_needs_the_link_sends_first_what_is_waited_for(
    tmp_path: Path, origin: Store, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2p_dmc.agent.bulk.TRICKLE_BYTES", 5 * RANGE)
    d = manifest.digest

    async def work(w: World) -> None:
        holder, me = w.holder(1), w.receiver(9)
        busy = True
        holder.server.busy = lambda: busy
        me.fetching.start((d, 0), urgent=False)
        await w.until(lambda: holder.asked.total() > 2)  # it trickles
        for shard in (1, 2, 3):
            came = me.want([shard])
            await w.until(lambda came=came: came)  # type: ignore[misc]
            assert not me.store.has(d, 0)
        busy = False
        await w.until(lambda: me.has(0))

    run(tmp_path, origin, manifest, work)


def test_what_others_ask_for_does_not_wait_for_what_is_being_synced_here(
    tmp_path: Path, origin: Store, manifest: Manifest
) -> None:
    async def work(w: World) -> None:
        holder, me = w.holder(1), w.receiver(9)
        synced = threading.Event()
        for _ in range(2 * fetching_module.DISK_THREADS):
            holder.fetching._threads.submit(synced.wait, 20.0)
        came = me.want([0])
        await w.until(lambda: came == [0])
        assert not synced.is_set() and me.has(0)
        synced.set()

    run(tmp_path, origin, manifest, work)


# -- crashes ----------------------------------------------------------------------------------------------------------

CHILD = """
import asyncio, sys
from pathlib import Path
from types import SimpleNamespace
from p2p_dmc.data.store import Store
from tests.agent import fetchers
from tests.agent.helpers import peer, record

async def work(w):
    me = w.receiver(9)
    w.nodes.append(SimpleNamespace(record=record(1, bulk=sys.argv[2])))
    w.tell = lambda: None
    me.known[w.manifest.digest].others = {
        peer(1): fetchers.said(w.origin.holdings(w.manifest.digest), len(w.manifest.shards))
    }
    came = me.want([0])
    await w.until(lambda: came == [0])
    w.nodes.pop()
    print("fetched", flush=True)

origin = Store(Path(sys.argv[1]) / "origin")
fetchers.run(Path(sys.argv[1]), origin, origin.manifest(origin.datasets()[0]), work)
"""


def test_killed_in_the_middle_of_a_shard_it_goes_on_where_it_was(
    tmp_path: Path, origin: Store, manifest: Manifest
) -> None:
    size = manifest.shard_sizes[0]

    async def work(w: World) -> None:
        holder = w.holder(1)

        def child(source: Node) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [sys.executable, "-c", CHILD, str(tmp_path), source.record.bulk_address],
                cwd=Path(__file__).parents[2],
                stdout=subprocess.PIPE,
            )

        late(holder, after=12)
        one = child(holder)
        part = tmp_path / "store9" / manifest.digest.hex() / "shards"
        await w.until(lambda: any(p.stat().st_size >= size + 5 * 16 for p in part.glob("*.part")))
        one.send_signal(signal.SIGKILL)
        assert one.wait() == -signal.SIGKILL
        (left,) = part.iterdir()
        notes = struct.iter_unpack("<QQ", left.read_bytes()[size:])
        written = sum(end - start for start, end in notes)
        await w.gone(holder)
        another = w.holder(2)
        two = child(another)
        await w.until(lambda: two.poll() is not None)
        assert two.returncode == 0 and two.stdout is not None and b"fetched" in two.stdout.read()
        again = Store(tmp_path / "store9")
        assert again.verify(manifest.digest, 0)
        assert another.asked_bytes == size - written < size

    run(tmp_path, origin, manifest, work)


def test_a_small_store_that_was_full_takes_shards_again(
    tmp_path: Path, origin: Store, manifest: Manifest
) -> None:
    d, largest = manifest.digest, max(manifest.shard_sizes)

    async def work(w: World) -> None:
        w.holder(1)
        me = w.receiver(9, capacity_bytes=2 * largest)
        came = me.want(range(len(manifest.shards)))
        await w.until(lambda: len(me.fetching) == 0)
        assert me.fetching.full and len(came) == 2
        for shard in came:
            me.store.drop(d, shard)
        assert not me.fetching.full
        again = me.want([came[0]])
        await w.until(lambda: again == [came[0]])

    run(tmp_path, origin, manifest, work)
