"""Ranges over loopback, and a state fetched from donors that die or lie."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from p2p_dmc.agent import adoption as adoption_module
from p2p_dmc.agent.adoption import HEAD, Adoption, AdoptionFailedError
from p2p_dmc.agent.bulk import (
    AT_ONCE,
    LOST_TIMES,
    BulkClient,
    BulkServer,
    Provider,
    SourceLostError,
    SourceSilentError,
)
from p2p_dmc.agent.limits import RateLimit
from p2p_dmc.agent.state import Held, SlotPool
from p2p_dmc.agent.state_keeper import StateKeeper
from p2p_dmc.core.agreement_messages import Promises, StateRef
from p2p_dmc.wire import codec
from p2p_dmc.wire.messages import BulkKind, BulkReply, BulkRequest, ClientRequest
from tests.agent.helpers import state, surroundings
from tests.agent.test_state import pins

DEADLINE_S = 30.0
CONTENT = bytes(range(256)) * 40
DIGEST = b"c" * 16
Answer = Callable[[BulkRequest], "tuple[int, bytes | memoryview] | None"]


def ranges_of(content: bytes) -> Answer:
    return lambda r: (len(content), content[r.offset : r.offset + r.size])


class Pair:
    """A client and servers in one loop. ``serve`` starts one with this answer and returns its address."""

    def __init__(self, timeout_ms: int) -> None:
        self.context = zmq.asyncio.Context()
        self.client = BulkClient(self.context, timeout_ms)
        self.servers: list[BulkServer] = []

    def serve(self, answer: Provider, kind: BulkKind = BulkKind.SHARD) -> str:
        server = BulkServer(self.context)
        server.provide(kind, answer)
        self.servers.append(server)
        return f"tcp://127.0.0.1:{server.bind('127.0.0.1')}"

    async def get(self, address: str, offset: int = 0, size: int = 1 << 20) -> tuple[int, bytes]:
        total, data = await self.client.fetch(
            address, BulkKind.SHARD, digest=DIGEST, offset=offset, size=size
        )
        return total, bytes(data)


@contextlib.asynccontextmanager
async def pair(timeout_ms: int = 10_000) -> AsyncIterator[Pair]:
    made = Pair(timeout_ms)
    try:
        yield made
    finally:
        made.client.close()
        for server in made.servers:
            server.close()
        made.context.destroy(linger=0)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, DEADLINE_S))


def test_ranges_and_totals() -> None:
    async def work() -> None:
        async with pair() as p:
            address = p.serve(ranges_of(CONTENT))
            assert await p.get(address) == (len(CONTENT), CONTENT)
            assert await p.get(address, 100, 50) == (len(CONTENT), CONTENT[100:150])
            assert await p.get(address, len(CONTENT) - 5, 50) == (len(CONTENT), CONTENT[-5:])
            assert await p.get(address, len(CONTENT) + 5, 50) == (len(CONTENT), b"")
            parts = await asyncio.gather(*(p.get(address, i, 250) for i in range(0, len(CONTENT), 250)))
            assert b"".join(data for _, data in parts) == CONTENT
            assert p.client.received_bytes == p.servers[0].sent_bytes == 2 * len(CONTENT) + 55

    run(work())


@pytest.mark.parametrize(
    "answer",
    [
        lambda r: None,
        lambda r: (-1, b""),
        lambda r: (100, b"x" * 99),
        lambda r: (100, b"x" * 101),
        lambda r: (100, b""),
        lambda r: (0, b"x"),
        lambda r: (1 << 60, b"x" * 50),
    ],
)
def test_a_source_without_it_or_with_another_amount_is_lost(answer: Answer) -> None:
    async def work() -> None:
        async with pair() as p:
            with pytest.raises(SourceLostError):
                await p.get(p.serve(answer), 0, 100)

    run(work())


def test_a_source_that_does_not_answer_in_time_is_lost_with_all_that_waits_for_it() -> None:
    async def work() -> None:
        async with pair(timeout_ms=100) as p:
            deaf = p.context.socket(zmq.ROUTER)
            address = f"tcp://127.0.0.1:{deaf.bind_to_random_port('tcp://127.0.0.1')}"
            results = await asyncio.gather(*(p.get(address) for _ in range(3)), return_exceptions=True)
            assert all(isinstance(one, SourceLostError) for one in results)
            assert p.client._sources == {}
            good = p.serve(ranges_of(CONTENT))
            assert (await p.get(good))[1] == CONTENT  # the client goes on

    run(work())


@pytest.mark.parametrize("address", ["", "tcp://", "nonsense", "tcp://host"])
def test_an_address_that_is_none_is_a_lost_source(address: str) -> None:
    """A member that has not said its bulk address yet: another source is asked, nothing falls."""

    async def work() -> None:
        async with pair() as p:
            with pytest.raises(SourceLostError):
                await p.get(address)
            assert p.client._sources == {}

    run(work())


def test_forgetting_a_source_ends_its_requests_at_once() -> None:
    async def work() -> None:
        async with pair(timeout_ms=60_000) as p:
            deaf = p.context.socket(zmq.ROUTER)
            address = f"tcp://127.0.0.1:{deaf.bind_to_random_port('tcp://127.0.0.1')}"
            waiting = asyncio.create_task(p.get(address))
            await asyncio.sleep(0)
            p.client.forget(address)
            with pytest.raises(SourceLostError):
                await waiting

    run(work())


def test_sources_that_idle_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2p_dmc.agent.bulk.IDLE_LINKS", 2)

    async def work() -> None:
        async with pair() as p:
            for _ in range(6):
                await p.get(p.serve(ranges_of(CONTENT)))
            assert len(p.client._sources) <= 3

    run(work())


def test_malformed_requests_are_counted_and_the_server_goes_on() -> None:
    async def work() -> None:
        async with pair() as p:
            address = p.serve(ranges_of(CONTENT))
            stranger = p.context.socket(zmq.DEALER)
            stranger.connect(address)
            good = BulkRequest(
                request=1, kind=BulkKind.SHARD, name="", digest=DIGEST, part=0, offset=0, size=1
            )
            packed = codec.encode(good)
            wrong = [
                [b"junk"],
                [packed, packed],
                [packed[:-1]],
                [b""],
                [codec.encode(ClientRequest(command="x", arguments=()))],
                [packed.replace(DIGEST, b"d" * 15 + b"")],
            ]
            for frames in wrong:
                await stranger.send_multipart(frames)
            assert (await p.get(address))[1] == CONTENT
            while p.servers[0].bad < len(wrong):
                await asyncio.sleep(0.005)
            assert p.servers[0].bad == len(wrong)
            with pytest.raises(SourceLostError):  # nobody provides this kind
                await p.client.fetch(address, BulkKind.STATE, digest=DIGEST, offset=0, size=1)

    run(work())


def test_a_provider_whose_disk_fails_does_not_have_it() -> None:
    async def work() -> None:
        async with pair() as p:

            def broken(request: BulkRequest) -> tuple[int, bytes]:
                raise OSError(5, "Input/output error")

            address = p.serve(broken)
            for _ in range(2):
                with pytest.raises(SourceLostError, match="does not have it"):
                    await p.get(address)

    run(work())


def test_replies_that_nobody_waits_for_are_dropped() -> None:
    """A source that answers twice, with junk first, under another number, or with too many frames."""

    async def work() -> None:
        async with pair() as p:
            router = p.context.socket(zmq.ROUTER)
            address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"

            async def odd() -> None:
                for _ in range(2):
                    who, packed = await router.recv_multipart()
                    number = codec.decode(packed).request
                    reply = codec.encode(BulkReply(request=number, total=3))
                    for frames in (
                        [b"junk", b"xxx"],
                        [codec.encode(BulkReply(request=number + 77, total=3)), b"yyy"],
                        [packed, b"zzz"],
                        [reply, b"abc", b"more"],
                        [reply, b"abc"],
                        [reply, b"cba"],
                    ):
                        await router.send_multipart([who, *frames])

            server = asyncio.create_task(odd())
            assert await p.get(address) == (3, b"abc")
            assert await p.get(address) == (3, b"abc")
            await server

    run(work())


def test_a_source_that_takes_its_time_with_one_range_is_not_silent_while_it_answers_others() -> None:
    async def work() -> None:
        async with pair(timeout_ms=300) as p:
            others = asyncio.Event()

            async def answer(request: BulkRequest) -> tuple[int, bytes]:
                if request.offset == 0:
                    await others.wait()
                return len(CONTENT), CONTENT[request.offset : request.offset + request.size]

            address = p.serve(answer)
            slow = asyncio.create_task(p.get(address, 0, 10))
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            while loop.time() - began_s < 0.9:  # three time-outs
                assert (await p.get(address, 10, 10))[1] == CONTENT[10:20]
                await asyncio.sleep(0.01)
            assert not slow.done()
            others.set()
            assert (await slow)[1] == CONTENT[:10]

    run(work())


def test_a_request_that_got_lost_is_given_up_though_its_source_answers_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2p_dmc.agent.bulk.LOST_TIMES", 2)

    async def work() -> None:
        async with pair(timeout_ms=200) as p:

            async def answer(request: BulkRequest) -> tuple[int, bytes]:
                if request.offset == 0:
                    await asyncio.Event().wait()
                return len(CONTENT), CONTENT[request.offset : request.offset + request.size]

            address = p.serve(answer)
            lost = asyncio.create_task(p.get(address, 0, 10))
            while not lost.done():
                assert (await p.get(address, 10, 10))[1] == CONTENT[10:20]
                await asyncio.sleep(0.01)
            with pytest.raises(SourceLostError, match="answers others") as raised:
                await lost
            assert not isinstance(raised.value, SourceSilentError)
            assert (await p.get(address, 20, 5))[1] == CONTENT[20:25]

    run(work())


def test_both_ends_keep_to_their_limits() -> None:
    """Every byte is taken from the sender's bucket before it is sent, from the receiver's before it is asked for."""

    class Counted(RateLimit):
        taken = 0

        async def take(self, size_bytes: int) -> None:
            self.taken += size_bytes

    async def work() -> None:
        context = zmq.asyncio.Context()
        up, down = Counted(), Counted()
        server, client = BulkServer(context, up), BulkClient(context, 10_000, down)
        server.provide(BulkKind.SHARD, ranges_of(CONTENT))
        address = f"tcp://127.0.0.1:{server.bind('127.0.0.1')}"
        for offset in range(0, len(CONTENT), 256):
            await client.fetch(address, BulkKind.SHARD, digest=DIGEST, offset=offset, size=256)
        assert up.taken == down.taken == len(CONTENT)
        client.close()
        server.close()
        context.destroy(linger=0)

    run(work())


def test_who_waits_for_a_low_limit_along_with_many_others_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that they ask for takes many of their time-outs to send, and the last answer longer than a lost one may."""
    monkeypatch.setattr("p2p_dmc.agent.bulk.REASSURE_S", 0.05)
    timeout_ms, clients, size = 300, 12, 1000

    async def work() -> None:
        context = zmq.asyncio.Context()
        server = BulkServer(context, RateLimit(8 * size))
        server.provide(BulkKind.SHARD, ranges_of(CONTENT))
        address = f"tcp://127.0.0.1:{server.bind('127.0.0.1')}"
        asking = [BulkClient(context, timeout_ms) for _ in range(clients)]
        began_s = asyncio.get_running_loop().time()
        answers = await asyncio.gather(
            *(
                client.fetch(address, BulkKind.SHARD, digest=DIGEST, offset=offset, size=size)
                for client in asking
                for offset in (0, size)
            )
        )
        took_s = asyncio.get_running_loop().time() - began_s
        assert [bytes(data) for _, data in answers] == [CONTENT[:size], CONTENT[size : 2 * size]] * clients
        assert took_s > (LOST_TIMES + 1) * timeout_ms / 1000
        assert not server._owed and not server._told_s
        for one in (*asking, server):
            one.close()
        context.destroy(linger=0)

    run(work())


def test_a_server_that_answers_nobody_any_more_reassures_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk hangs, say: whoever waits there is to look for another source."""
    monkeypatch.setattr("p2p_dmc.agent.bulk.REASSURE_S", 0.02)
    monkeypatch.setattr("p2p_dmc.agent.bulk.STALLED_S", 0.1)

    async def work() -> None:
        async with pair(timeout_ms=300) as p:

            async def hangs(request: BulkRequest) -> None:
                await asyncio.Event().wait()

            address = p.serve(hangs)
            waiting = [asyncio.create_task(p.get(address)) for _ in range(3 * AT_ONCE)]
            ended = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(one, SourceSilentError) for one in ended)

    run(work())


def test_what_was_for_a_client_that_is_gone_uses_up_no_limit() -> None:
    async def work() -> None:
        context = zmq.asyncio.Context()
        limit = RateLimit(1_000_000)
        server, gone = BulkServer(context, limit), asyncio.Event()

        async def answer(request: BulkRequest) -> tuple[int, bytes]:
            await gone.wait()
            return 1 << 20, bytes(1 << 20)

        server.provide(BulkKind.SHARD, answer)
        address = f"tcp://127.0.0.1:{server.bind('127.0.0.1')}"
        ends = server._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        client = BulkClient(context, 10_000)
        asked = asyncio.create_task(
            client.fetch(address, BulkKind.SHARD, digest=DIGEST, offset=0, size=1 << 20)
        )
        while not server._working:
            await asyncio.sleep(0.001)
        client.close()
        with pytest.raises(SourceSilentError):
            await asked
        assert await ends.poll(10_000), "the connection's end has not arrived"
        server._router.disable_monitor()
        gone.set()
        while server._working:
            await asyncio.sleep(0.001)
        assert limit.wait_s(time.monotonic()) == 0.0 and server.sent_bytes == 0
        server.close()
        context.destroy(linger=0)

    run(work())


# -- adoption ---------------------------------------------------------------------------------------------------------


@dataclass
class Donor:
    """Serves one state, unless told otherwise."""

    keeper: StateKeeper
    held: Held
    asked: int = 0
    dead: bool = False
    lie: Callable[[BulkRequest, tuple[int, bytes]], tuple[int, bytes] | None] | None = None

    def answer(self, request: BulkRequest) -> tuple[int, bytes | memoryview] | None:
        self.asked += 1
        found = self.keeper.provide(request)
        if self.dead or found is None:
            return None
        if self.lie is not None:
            return self.lie(request, (found[0], bytes(found[1])))
        return found


class World:
    """Donors that hold the same large state, and somebody who wants it."""

    def __init__(self, root: Path, p: Pair, donors: int) -> None:
        self.p = p
        self.arounds = [surroundings(root, me=i) for i in range(1, donors + 1)]
        self.donors: list[Donor] = []
        self.addresses: list[str] = []
        for around in self.arounds:
            keeper = StateKeeper("r", root / f"run{len(self.donors)}", around.services, Promises())
            keeper.slots = SlotPool(around.services.memory, 5000)
            held = state(keeper.slots, (2, 3), value=7.0)
            keeper.hold(held)
            self.donors.append(Donor(keeper, held))
            self.addresses.append(p.serve(self.donors[-1].answer, BulkKind.STATE))
        self.wanting = surroundings(root, me=99, bulk=p.client)
        self.slots = SlotPool(self.wanting.services.memory, 5000)
        self.ref = self.donors[0].held.ref

    async def adopt(
        self, give_up_s: float = 20.0, donors: Callable[[], list[str]] | None = None, chunk_bytes: int = 1024
    ) -> Held:
        adoption = Adoption(self.p.client, "r", self.slots, chunk_bytes)
        held = await adoption.fetch(self.ref, donors or (lambda: self.addresses), give_up_s)
        assert held.ref == self.ref and held.ledger == self.donors[0].held.ledger
        assert held.slot.read_bytes() == self.donors[0].held.slot.read_bytes()
        assert +self.slots._pins == {held.slot: 1}
        return held


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption_module, "RETRY_S", 0.01)


def with_donors(
    root: Path, count: int, work: Callable[[World], Coroutine[Any, Any, None]], timeout_ms: int = 10_000
) -> None:
    async def inner() -> None:
        async with pair(timeout_ms) as p:
            await work(World(root, p, count))

    run(inner())


def test_all_donors_take_part(tmp_path: Path) -> None:
    async def work(w: World) -> None:
        await w.adopt()
        assert all(d.asked >= 2 for d in w.donors)
        assert sum(d.asked for d in w.donors) == 1 + -(-20_000 // 1024)

    with_donors(tmp_path, 3, work)


def test_a_few_ranges_are_spread_over_the_donors(tmp_path: Path) -> None:
    async def work(w: World) -> None:
        await w.adopt(chunk_bytes=8192)
        assert [d.asked for d in w.donors] == [2, 1, 1]  # the head, and a range of each

    with_donors(tmp_path, 3, work)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_donor_that_does_not_have_it_is_replaced(tmp_path: Path, gone: int) -> None:
    """Also the first one, which is asked for the head."""

    async def work(w: World) -> None:
        w.donors[gone].dead = True
        await w.adopt()

    with_donors(tmp_path, 2, work)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_donor_that_dies_half_way_leaves_the_rest_to_the_others(tmp_path: Path, gone: int) -> None:
    """It took its ranges and is silent: the others have long finished theirs when that is noticed."""

    async def work(w: World) -> None:
        def then_silent(request: BulkRequest, found: tuple[int, bytes]) -> tuple[int, bytes] | None:
            if w.donors[gone].asked == 3:
                w.p.servers[gone].close()
            return found

        w.donors[gone].lie = then_silent
        await w.adopt(give_up_s=2.0)

    with_donors(tmp_path, 2, work, timeout_ms=150)


def flipped(request: BulkRequest, found: tuple[int, bytes]) -> tuple[int, bytes]:
    return found[0], bytes([found[1][0] ^ 1]) + found[1][1:]


def anchor_flipped(request: BulkRequest, found: tuple[int, bytes]) -> tuple[int, bytes]:
    return found if request.part == HEAD else flipped(request, found)


def shorter(request: BulkRequest, found: tuple[int, bytes]) -> tuple[int, bytes]:
    return found if request.part == HEAD else (found[0] - 1, found[1])


def endless_head(request: BulkRequest, found: tuple[int, bytes]) -> tuple[int, bytes]:
    """Always more to come, but nothing of it when it is asked for."""
    return (2 * request.size, b"x" * request.size) if request.offset == 0 else (request.offset, b"")


def huge_head(request: BulkRequest, found: tuple[int, bytes]) -> tuple[int, bytes]:
    return 1 << 40, b"x" * request.size


@pytest.mark.parametrize("lie", [flipped, anchor_flipped, shorter, endless_head, huge_head])
@pytest.mark.parametrize("liar", [0, 1])
def test_a_donor_that_lies_is_replaced(tmp_path: Path, lie: Any, liar: int) -> None:
    async def work(w: World) -> None:
        w.donors[liar].lie = lie
        await w.adopt()

    with_donors(tmp_path, 2, work)


def test_an_anchor_of_another_model_is_refused(tmp_path: Path) -> None:
    async def work(w: World) -> None:
        w.slots = SlotPool(w.wanting.services.memory, 4999)
        with pytest.raises(AdoptionFailedError, match="an anchor of 20000 bytes, 19996 here"):
            await w.adopt(give_up_s=0.2)
        assert pins(w.slots) == {}

    with_donors(tmp_path, 1, work)


def test_without_a_donor_it_fails_in_time_and_says_why(tmp_path: Path) -> None:
    async def work(w: World) -> None:
        with pytest.raises(AdoptionFailedError, match="nobody holds it"):
            await w.adopt(give_up_s=0.1, donors=list)
        for donor in w.donors:
            donor.lie = anchor_flipped
        with pytest.raises(AdoptionFailedError, match="another digest"):
            await w.adopt(give_up_s=0.2)
        for donor in w.donors:
            donor.dead = True
        with pytest.raises(AdoptionFailedError, match="does not have it"):
            await w.adopt(give_up_s=0.1)
        assert pins(w.slots) == {}

    with_donors(tmp_path, 2, work)


def test_a_holder_that_comes_late_helps(tmp_path: Path) -> None:
    async def work(w: World) -> None:
        looks = [0]

        def donors() -> list[str]:
            looks[0] += 1
            return w.addresses if looks[0] > 3 else []

        await w.adopt(donors=donors)

    with_donors(tmp_path, 1, work)


def test_giving_up_in_the_middle_gives_the_slot_back(tmp_path: Path) -> None:
    async def work(w: World) -> None:
        started = asyncio.Event()

        def note(request: BulkRequest, found: tuple[int, bytes]) -> tuple[int, bytes]:
            if request.part != HEAD:
                started.set()
            return found

        w.donors[0].lie = note
        task = asyncio.create_task(w.adopt())
        await started.wait()
        assert len(pins(w.slots)) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pins(w.slots) == {}

    with_donors(tmp_path, 1, work)


def test_two_views_that_want_the_same_state_at_once_hold_it_once(tmp_path: Path) -> None:
    async def work(w: World) -> None:
        keeper = StateKeeper("r", tmp_path / "mine", w.wanting.services, Promises())
        keeper.slots = w.slots
        one, two = await asyncio.gather(
            *(keeper.adopt(w.ref, lambda: w.addresses, give_up_s=20.0) for _ in range(2))
        )
        assert one is two and pins(w.slots) == {one.slot: 1}
        later = StateRef(lineage=(9, 9), digest=w.ref.digest)
        asked = sum(d.asked for d in w.donors)
        assert await keeper.adopt(later, list, give_up_s=1.0) is one  # known by its digest: nobody is asked
        assert sum(d.asked for d in w.donors) == asked and keeper.make_current(later).ref == later

    with_donors(tmp_path, 2, work)
