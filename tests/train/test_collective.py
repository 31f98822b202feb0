"""The collective with real processes and real gloo over loopback; a relay plays the agents' part."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from p2p_dmc.errors import UserError
from p2p_dmc.train import sockets
from p2p_dmc.train.collective import CollectiveError, GroupKeeper, ViewGroup, check_backend, ring_bytes
from tests.train import member
from tests.train.member import view
from tests.train.relay import Relay

DEADLINE_S = 60
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.train.member"])  # torch is imported once for all


class Process:
    """A member in a process of its own; its facts are read with a deadline."""

    def __init__(self, endpoint: str, rank: int, world: int, plan: str) -> None:
        self._line, theirs = FORKSERVER.Pipe()
        self._process = FORKSERVER.Process(
            target=member.main, args=(endpoint, rank, world, plan, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    def until(self, event: str) -> dict[str, Any]:
        while self._line.poll(DEADLINE_S):
            facts: dict[str, Any] = self._line.recv()
            assert facts["event"] != "unnoticed"
            if facts["event"] == event:
                return facts
        raise AssertionError(f"no {event!r} within {DEADLINE_S} s")

    def go_on(self) -> None:
        self._line.send("go on")

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def exit_code(self) -> int | None:
        self._process.join(DEADLINE_S)
        return self._process.exitcode

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def reap(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._line.close()


class Cluster:
    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self.members: list[Process] = []

    def start(self, *plans: str) -> list[Process]:
        self.members = [
            Process(self._relay.endpoint, rank, len(plans), plan) for rank, plan in enumerate(plans)
        ]
        return self.members


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    relay = Relay(tmp_path)
    cluster = Cluster(relay)
    try:
        yield cluster
    finally:
        for one in cluster.members:
            one.reap()
        relay.close()


def test_three_members_sum_and_a_thousandth_part_of_their_views_leaves_nothing_behind(
    cluster: Cluster,
) -> None:
    plan = "start reduce=100 compress=int8 reduce=100 cycles=20 resources cycles=100 resources"
    members = cluster.start(*[plan] * 3)
    for one in members:
        assert one.until("reduced")["value"] == 1 + 2 + 3
        assert one.until("reduced")["value"] == pytest.approx(1 + 2 + 3, rel=0.01)
        before, after = one.until("resources"), one.until("resources")
        assert after["fds"] == before["fds"]
        assert after["threads"] <= before["threads"] + 1  # the last reaper's C++ thread may still be ending
        assert after["rss_kb"] < before["rss_kb"] + 20_000


def test_cancelled_groups_leave_nothing_behind(cluster: Cluster) -> None:
    members = cluster.start(*["failing_cycles=10 resources failing_cycles=30 resources"] * 3)
    for one in members:
        before, after = one.until("resources"), one.until("resources")
        assert after["fds"] == before["fds"]
        assert after["threads"] <= before["threads"] + 1


@pytest.mark.parametrize("compress", ["", "compress=int8 ", "compress=topk "])
def test_survivors_of_a_kill_know_at_once_and_go_on_without(cluster: Cluster, compress: str) -> None:
    plan = f"{compress}start until_failure=2000000 drop resources"
    members = cluster.start(*[plan] * 4)
    for one in members:
        one.until("flowing")
    members[2].signal(signal.SIGKILL)
    assert members[2].exit_code() == -signal.SIGKILL  # the fault happened
    for one in members[:2] + members[3:]:
        failed = one.until("failed")
        assert failed["done"] >= 1
        assert failed["seconds"] < 3.5  # the group's time-out of 4 s was not sat out
        assert one.until("dropped")["seconds"] < 0.2
        one.until("end")


@pytest.mark.parametrize("compress", ["", "compress=int8 "])
def test_a_stopped_member_is_cancelled_in_milliseconds(cluster: Cluster, compress: str) -> None:
    survivor = "start reduce=10 wait cancel_after=0.5 until_failure=1000 drop resources"
    plan = f"timeout_ms=20000 {compress}"
    members = cluster.start(plan + survivor, plan + survivor, plan + "start reduce=10 wait")
    for one in members:
        one.until("reduced")
    members[2].signal(signal.SIGSTOP)
    for one in members[:2]:
        one.go_on()
    for one in members[:2]:
        failed = one.until("failed")
        assert failed["done"] == 0  # nothing was reduced with a stopped member: the fault was noticed
        assert failed["seconds"] < 5  # of 20
        assert one.until("dropped")["seconds"] < 0.2
        one.until("resources")  # the reaper has ended, too: well before the time-out
    assert members[2].alive


def test_a_member_that_never_comes_holds_nobody(cluster: Cluster) -> None:
    members = cluster.start("start cancel_after=0.3 until_failure=10 drop resources", "wait")
    failed = members[0].until("failed")
    assert "cancelled" in failed["error"]
    assert failed["seconds"] < 5
    assert members[0].until("dropped")["seconds"] < 0.2
    members[0].until("resources")


def test_alone_there_is_no_group() -> None:
    sent: list[object] = []
    group = ViewGroup(view(1, 0, 1, 1000), "127.0.0.1", sent.append)
    tensor = torch.ones(3)
    group.all_reduce(tensor)
    group.drop()
    assert tensor.tolist() == [1, 1, 1]
    assert sent == []


def test_an_old_views_group_is_not_to_be_had() -> None:
    keeper = GroupKeeper(lambda message: None)
    keeper.start(view(1, 0, 1, 1000))
    keeper.start(view(2, 0, 1, 1000))
    with pytest.raises(CollectiveError, match="view 1 is over"):
        keeper.get(1)
    assert keeper.get(2).view.view_epoch == 2
    keeper.close()
    keeper.start(view(3, 0, 1, 1000))
    with pytest.raises(CollectiveError):
        keeper.get(3)


def test_an_unbuilt_backend_is_refused_with_the_remedy() -> None:
    check_backend("gloo")
    with pytest.raises(UserError, match="--backend gloo"):
        check_backend("nccl")


@pytest.mark.parametrize(("world", "expected"), [(1, 0), (2, 1000), (4, 1500)])
def test_bytes_of_a_ring(world: int, expected: int) -> None:
    assert ring_bytes(1000, world) == expected


@pytest.mark.parametrize("listener", [None, ("127.0.0.1", 4711), ("fe80::1%eth0", 65535)])
def test_values_carry_the_listener(listener: sockets.Endpoint | None) -> None:
    value = sockets.pack_value(listener, b"\0blob\xff")
    assert sockets.unpack_value(value) == (listener, b"\0blob\xff")
    for size in range(len(value) - len(b"\0blob\xff") + 1):
        with pytest.raises(ValueError):
            sockets.unpack_value(value[:size])


def test_only_the_groups_sockets_are_shut_down() -> None:
    with contextlib.ExitStack() as stack:
        ours, users = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        dialled, accepted = connected(stack, ours)
        other, served = connected(stack, users)
        assert sockets.shut_connected(ours.getsockname(), frozenset()) == 1
        assert dialled.recv(1) == accepted.recv(1) == b""  # what our listener accepted is shut down
        other.sendall(b"x")
        assert served.recv(1) == b"x"  # the user's is not
        assert sockets.shut_connected(None, frozenset({users.getsockname()})) == 1
        assert served.recv(1) == b""
        connected(stack, ours)  # the listener still accepts


def connected(stack: contextlib.ExitStack, server: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = stack.enter_context(socket.create_connection(server.getsockname()))
    return client, stack.enter_context(server.accept()[0])
