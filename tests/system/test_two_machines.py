"""Two peers, and everything that may become of one of them: who goes on, and who waits (docs/partitions.md)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from p2p_dmc.agent.client import ask
from tests.system.cluster import Cluster, Peer
from tests.system.scenario import NAMES, SILENCE_S, finish, go_on_without, start, train_together


def in_ring_order(peers: list[Peer]) -> tuple[Peer, Peer]:
    ring = peers[0].view["members"]
    first, second = sorted(peers, key=lambda p: ring.index(p.peer_id))
    return first, second


def test_either_may_crash(cluster: Cluster, data: Path) -> None:
    """Its host lives and says so: the other one goes on at once, whichever of the two it is."""
    seed = cluster.seed(data, "--name", "tiny")
    peers = start(cluster, seed, NAMES[:2])
    for number in (0, 1):
        victim, other = in_ring_order(peers)[number], in_ring_order(peers)[1 - number]
        when = victim.kill_tree()
        go_on_without(cluster, [other], victim.peer_id, when)
        cluster.restart(victim)
        train_together(cluster, peers, after=when)
    finish(cluster, peers)


def test_one_that_vanishes_is_waited_for_only_if_it_is_the_first(cluster: Cluster, data: Path) -> None:
    """All under one history: nothing that either has done is lost. Who waits says for whom, and goes on by itself."""
    seed = cluster.seed(data, "--name", "tiny")
    peers = start(cluster, seed, NAMES[:2])
    first, second = in_ring_order(peers)
    when = second.stop()
    go_on_without(cluster, [first], second.peer_id, when, limit_s=SILENCE_S)
    second.go_on()
    train_together(cluster, peers, after=when)
    when = first.stop()
    see_it_wait(cluster, second, first, when)
    first.go_on()
    cluster.rounds(peers, 2, after=time.time())
    assert {len(p.view["members"]) for p in peers} == {2}
    assert len({v["history"] for p in peers for v in p.events("view")}) == 1
    finish(cluster, peers)


@pytest.mark.long
def test_strict_waits_for_one_that_was_seen_to_crash(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--name", "tiny")
    peers = start(cluster, seed, NAMES[:2], "--quorum", "strict")
    first, second = in_ring_order(peers)
    when = first.kill_tree()
    see_it_wait(cluster, second, first, when)
    cluster.restart(first)
    train_together(cluster, peers, after=when)
    finish(cluster, peers)


def see_it_wait(cluster: Cluster, peer: Peer, missing: Peer, when: float) -> None:
    """For a while after it has said so, too."""
    words = f"waiting for {missing.name} ({missing.peer_id[:8]})"
    cluster.wait(lambda: words in peer.said(), f"{peer.name} says {words!r}")
    said_s = time.time()
    cluster.wait(lambda: time.time() > said_s + 2, "two seconds have passed")
    alone = [v for v in peer.events("view") if v["time"] > when and len(v["members"]) == 1]
    assert not alone, f"it went on alone: {alone}"
    [run] = ask([peer.address], "status")["runs"]
    assert words in run["waiting"]
