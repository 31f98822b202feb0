"""Control sockets over loopback: delivery, fences, bounds, and what a broken connection tells."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import zmq
import zmq.asyncio

from p2p_dmc.errors import RemoteProtocolError, UserError
from p2p_dmc.wire import codec, transport
from p2p_dmc.wire.messages import ClientReply, ClientRequest
from p2p_dmc.wire.transport import (
    ControlSocket,
    Envelope,
    bind_router,
    normalise_address,
    reachable_host,
    refused_by_host,
    split_address,
)

DEADLINE_S = 20.0


def said(text: str) -> ClientRequest:
    return ClientRequest(command=text, arguments=())


class End:
    """One agent's control socket, with what it received."""

    def __init__(self, context: zmq.asyncio.Context, name: str) -> None:
        self.received: list[tuple[Envelope, Any, bytes]] = []
        self.lost: list[str] = []
        self.socket = ControlSocket(context, lambda *args: self.received.append(args), self.lost.append)
        port = self.socket.bind("127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{port}"
        self.socket.me = Envelope(peer_id=name, boot=3, address=self.address, run="", to="")

    def commands(self) -> list[str]:
        return [message.command for _, message, _ in self.received]


async def until(true: Callable[[], bool]) -> None:
    """Wait for what must come; the deadline is far beyond what it takes."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not true():
        assert asyncio.get_running_loop().time() < deadline, "it did not come"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def ends(*names: str) -> AsyncIterator[list[End]]:
    context = zmq.asyncio.Context()
    made = [End(context, name) for name in names]
    try:
        yield made
    finally:
        for one in made:
            await one.socket.close()
        context.destroy(linger=0)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 2 * DEADLINE_S))


def test_a_message_arrives_with_its_sender_its_run_and_its_order() -> None:
    async def work() -> None:
        async with ends("a", "b") as (a, b):
            for i in range(50):
                a.socket.send(b.address, said(str(i)), to="b", run="mnist")
            await until(lambda: len(b.received) == 50)
            assert b.commands() == [str(i) for i in range(50)]
            envelope = b.received[0][0]
            assert envelope == Envelope(peer_id="a", boot=3, address=a.address, run="mnist", to="b")
            assert a.socket.connected(b.address) and not a.socket.connected("tcp://127.0.0.1:1")
            assert a.socket.counters.sent_bytes == b.socket.counters.received_bytes > 0
            assert a.socket.addresses() == (b.address,) and b.socket.addresses() == ()

    run(work())


def test_a_message_for_another_peer_is_dropped_and_counted() -> None:
    """Somebody else's peer lives at an address that a peer of ours had: the two clusters stay apart."""

    async def work() -> None:
        async with ends("a", "b") as (a, b):
            a.socket.send(b.address, said("for c"), to="c")
            a.socket.send(b.address, said("for b"), to="b")
            a.socket.send(b.address, said("for anybody"), to="")
            await until(lambda: len(b.received) == 2)
            assert b.commands() == ["for b", "for anybody"]
            assert b.socket.counters.bad_by_sender == {"a": 1}

    run(work())


def test_a_client_without_an_address_is_answered_on_its_connection() -> None:
    async def work() -> None:
        async with ends("a") as (a,):
            context = zmq.asyncio.Context()
            client = context.socket(zmq.DEALER)
            client.connect(a.address)
            envelope = Envelope(peer_id="", boot=0, address="", run="", to="")
            await client.send_multipart([codec.encode(envelope), codec.encode(said("status"))])
            await until(lambda: len(a.received) == 1)
            a.socket.reply(a.received[0][2], ClientReply(ok=True, body="{}", more=False))
            frames = await client.recv_multipart()
            assert codec.decode(frames[0]).peer_id == "a"
            assert codec.decode(frames[1]) == ClientReply(ok=True, body="{}", more=False)
            a.socket.reply(b"nobody", ClientReply(ok=True, body="", more=False))  # gone: nothing happens
            context.destroy(linger=0)

    run(work())


def frames_that_are_wrong() -> list[list[bytes]]:
    envelope = Envelope(peer_id="x", boot=0, address="", run="", to="")
    good, body = codec.encode(envelope), codec.encode(said("hello"))
    long_id = codec.encode(Envelope(peer_id="x" * 65, boot=0, address="", run="", to=""))
    long_run = codec.encode(Envelope(peer_id="x", boot=0, address="", run="r" * 257, to=""))
    return [
        [b"junk", body],
        [good, b"junk"],
        [good],
        [good, body, body],
        [body, good],
        [long_id, body],
        [long_run, body],
        [b"", b""],
        [good, body[:-1]],
        [good, body + b"\0"],
    ]


def test_bad_frames_are_counted_and_nothing_else_happens() -> None:
    async def work() -> None:
        async with ends("a", "b") as (a, b):
            context = zmq.asyncio.Context()
            stranger = context.socket(zmq.DEALER)
            stranger.connect(a.address)
            wrong = frames_that_are_wrong()
            for frames in wrong:
                await stranger.send_multipart(frames)
            await until(lambda: sum(a.socket.counters.bad_by_sender.values()) == len(wrong))
            assert a.received == []
            b.socket.send(a.address, said("still here"), to="a")
            await until(lambda: a.commands() == ["still here"])
            context.destroy(linger=0)

    run(work())


def test_what_the_shell_finds_wrong_is_counted_for_its_sender() -> None:
    async def work() -> None:
        async with ends("a", "b") as (a, b):

            def refuse(envelope: Envelope, message: object, routing_id: bytes) -> None:
                raise RemoteProtocolError("no")

            b.socket._on_message = refuse
            for _ in range(3):
                a.socket.send(b.address, said("x"), to="b")
            await until(lambda: b.socket.counters.bad_by_sender == {"a": 3})

    run(work())


def test_counting_strangers_is_bounded() -> None:
    async def work() -> None:
        async with ends("a") as (a,):
            for i in range(1500):
                a.socket.count_bad(f"stranger{i}", RemoteProtocolError("x"))
            a.socket.count_bad("stranger0", RemoteProtocolError("x"))
            assert len(a.socket.counters.bad_by_sender) == 1000
            assert a.socket.counters.bad_by_sender["stranger0"] == 2

    run(work())


def test_an_oversize_frame_costs_the_connection_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", 10_000)

    async def work() -> None:
        async with ends("a", "b") as (a, b):
            b.socket.send(a.address, said("x" * 20_000), to="a")
            await until(lambda: b.lost == [a.address])
            await until(lambda: b.socket.connected(a.address))  # made anew by itself
            b.socket.send(a.address, said("small"), to="a")
            await until(lambda: a.commands() == ["small"])

    run(work())


def test_a_full_queue_drops_and_counts() -> None:
    """Nobody accepts there, so nothing leaves: the queue takes its fill, the rest is dropped at once."""

    async def work() -> None:
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))  # bound, not listening: refuses
            async with ends("a") as (a,):
                address = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
                for _ in range(transport.SEND_QUEUE + 40):
                    a.socket.send(address, said("x"), to="b")
                assert a.socket.counters.dropped == 40
                a.socket.send("tcp://not an address", said("x"), to="b")
                assert a.socket.counters.dropped == 41
                assert a.socket.addresses() == (address,)

    run(work())


def test_links_are_bounded_and_the_longest_unused_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_LINKS", 3)

    async def work() -> None:
        async with ends("a", "b", "c", "d", "e") as (a, b, c, d, e):
            for other in (b, c, d, b, e):
                a.socket.send(other.address, said("x"), to="")
                await asyncio.sleep(0.002)  # so that "longest unused" is one link
            assert set(a.socket.addresses()) == {b.address, d.address, e.address}
            a.socket.forget(b.address)
            a.socket.forget(b.address)
            assert set(a.socket.addresses()) == {d.address, e.address}

    run(work())


CHILD = """
import asyncio, sys, zmq.asyncio
from p2p_dmc.wire.transport import ControlSocket
async def main():
    control = ControlSocket(zmq.asyncio.Context(), lambda *a: None, lambda a: None)
    print(control.bind("127.0.0.1", 0), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_a_killed_process_breaks_the_connection_and_its_host_refuses() -> None:
    """The evidence of a crash: the connection breaks at once, then nobody listens at the port."""
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        address = f"tcp://127.0.0.1:{int(child.stdout.readline())}"

        async def work() -> None:
            async with ends("a") as (a,):
                a.socket.send(address, ClientRequest(command="x", arguments=()), to="")
                await until(lambda: a.socket.connected(address))
                assert not await refused_by_host(address)
                assert a.lost == []
                os.kill(child.pid, signal.SIGKILL)
                await until(lambda: a.lost != [])
                assert set(a.lost) == {address} and not a.socket.connected(address)
                assert child.wait(DEADLINE_S) == -signal.SIGKILL
                assert await refused_by_host(address)

        run(work())
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def test_a_forgotten_link_reports_no_disconnection() -> None:
    async def work() -> None:
        async with ends("a", "b") as (a, b):
            a.socket.send(b.address, said("x"), to="b")
            await until(lambda: a.socket.connected(b.address))
            a.socket.forget(b.address)
            assert not a.socket.connected(b.address)
            await b.socket.close()
            await asyncio.sleep(0.05)  # nothing to wait for: nothing is to happen
            assert a.lost == []

    run(work())


def test_silence_refuses_nothing() -> None:
    """A host that drops packets, a full backlog, a name that does not resolve: no evidence of a crash."""

    async def work() -> None:
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            host, port = full.getsockname()
            waiting = [socket.socket() for _ in range(4)]
            for one in waiting:
                one.setblocking(False)
                one.connect_ex((host, port))
            assert not await refused_by_host(f"tcp://{host}:{port}", timeout_s=0.2)
            for one in waiting:
                one.close()
        assert await refused_by_host(f"tcp://{host}:{port}")  # closed now
        assert not await refused_by_host("tcp://no-such-host.invalid:7400")

    run(work())


# -- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "host", "port", "normal"),
    [
        ("tcp://10.0.0.1:7400", "10.0.0.1", 7400, "tcp://10.0.0.1:7400"),
        ("10.0.0.1:7400", "10.0.0.1", 7400, "tcp://10.0.0.1:7400"),
        ("tcp://host.example:0", "host.example", 0, "tcp://host.example:0"),
        ("tcp://[::1]:7400", "::1", 7400, "tcp://[::1]:7400"),
        ("[fe80::1]:65535", "fe80::1", 65535, "tcp://[fe80::1]:65535"),
        ("host:0080", "host", 80, "tcp://host:80"),
    ],
)
def test_addresses(address: str, host: str, port: int, normal: str) -> None:
    assert split_address(address) == (host, port)
    assert normalise_address(address) == normal == normalise_address(normal)


@pytest.mark.parametrize(
    "address",
    [
        "", "host", "tcp://host", "host:", ":7400", "tcp://:7400", "host:port", "host:-1", "host:65536", "host:1.5",
        "tcp://host:7400/x", "udp://host:7400", "host:²", "host: 7400", "tcp://[]:7400", "host:" + "9" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_address_is_the_users_error_and_names_the_remedy(address: str) -> None:
    with pytest.raises(UserError, match=r"write tcp://HOST:PORT"):
        split_address(address)
    with pytest.raises(UserError):
        normalise_address(address)


# -- listening --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def routers(count: int) -> Any:
    context = zmq.asyncio.Context()
    made = [context.socket(zmq.ROUTER) for _ in range(count)]
    for one in made:
        one.setsockopt(zmq.IPV6, 1)
    try:
        yield made
    finally:
        context.destroy(linger=0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_an_explicit_port_is_taken_or_is_an_error() -> None:
    async def work() -> None:
        with routers(3) as (one, two, three):
            port = free_port()
            assert bind_router(one, "127.0.0.1", port) == port
            with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use; choose another"):
                bind_router(two, "127.0.0.1", port)
            chosen = bind_router(two, "127.0.0.1", 0)
            assert chosen not in (0, port)
            assert bind_router(three, "::1", 0) > 0

    run(work())


def test_without_a_port_the_next_free_one_from_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs at the default on this machine: the range under test begins elsewhere."""
    base = free_port()
    monkeypatch.setattr(transport, "DEFAULT_PORT", base)

    async def work() -> None:
        with routers(2) as (one, two):
            first, second = bind_router(one, "127.0.0.1", None), bind_router(two, "127.0.0.1", None)
            assert base <= first < second < base + 200

    run(work())


def test_all_default_ports_taken_is_an_error_that_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        with routers(1) as (one,):

            def taken(endpoint: str) -> None:
                raise zmq.ZMQError(zmq.EADDRINUSE)

            monkeypatch.setattr(type(one), "bind", lambda self, endpoint: taken(endpoint))
            with pytest.raises(UserError, match=r"are all in use; give --listen tcp://127\.0\.0\.1:0"):
                bind_router(one, "127.0.0.1", None)

    run(work())


@pytest.mark.parametrize("port", [None, 0, 7400])
def test_an_address_that_is_not_this_machines_is_an_error(port: int | None) -> None:
    async def work() -> None:
        with (
            routers(1) as (one,),
            pytest.raises(
                UserError, match=r"cannot listen on 192\.0\.2\.7:.*give an address of this machine"
            ),
        ):
            bind_router(one, "192.0.2.7", port)

    run(work())


def test_the_reachable_host_is_not_loopback() -> None:
    try:
        host = reachable_host()
    except UserError as error:
        assert "--advertise" in str(error)
    else:
        assert not host.startswith("127.") and split_address(f"{host}:1") == (host, 1)
