"""`dmc-peer evict` with real processes: the survivor goes on, the evicted comes back as a newcomer (DESIGN.md 6)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.cluster import Cluster, Peer
from tests.system.commands import complaint, facts
from tests.system.scenario import NAMES, START_S, finish, start, train_together


@pytest.mark.long
@pytest.mark.parametrize("came_back", ["woken up", "started again"])
def test_of_two_machines_the_first_vanishes_and_comes_back(
    cluster: Cluster, data: Path, came_back: str
) -> None:
    """Silently: so it may go on somewhere, and the other one waits until a person says that it does not."""
    seed = cluster.seed(data, "--name", "tiny", "--peer-name", "seed")
    peers = start(cluster, seed, NAMES[:2], "--checkpoint-every", "1s")
    first = next(p for p in peers if p.peer_id == p.view["members"][0])
    second = next(p for p in peers if p is not first)
    called = f"{first.name} ({first.peer_id[:8]})"
    home = ("--home", str(second.home))
    old = second.view["history"]

    assert f"{called} is here; `dmc-peer leave" in complaint(cluster, "evict", first.name, "--yes", *home)
    assert f"{first.name} {first.peer_id[:8]}" in complaint(cluster, "evict", "nobody", "--yes", *home)
    when = first.stop()
    cluster.wait(lambda: f"waiting for {called}" in second.said(), "the other one says for whom it waits")
    assert not [r for r in second.rounds(when + 1) if r["members"] == 1], "it went on alone"
    assert "say --yes" in complaint(cluster, "evict", first.name, *home)

    told = facts(cluster, "evict", first.name, "--yes", *home)
    assert (told["peer_id"], told["parent"], told["waits_for"]) == (first.peer_id, old, [])
    assert told["history"] == second.view["history"] != old
    cluster.rounds([second], 2, after=second.view["time"])
    assert second.events("evicted", peer_id=first.peer_id)
    assert f"{first.name} is evicted: the run goes on without it, under a new history" in second.said()
    again = complaint(cluster, "evict", first.name, "--yes", *home)
    assert f"does not wait for {called}: it goes on" in again

    come_back(cluster, first, came_back)
    train_together(cluster, [first, second], after=when)
    [given_up] = first.events("history_given_up")
    assert given_up["replaced"] and given_up["to"] == told["history"]
    assert "the others went on without this peer, which was evicted or gone" in first.said()
    assert first.view["history"] == second.view["history"] == told["history"]
    finish(cluster, peers)


def come_back(cluster: Cluster, peer: Peer, how: str) -> None:
    if how == "woken up":
        peer.go_on()
    else:
        peer.kill_tree()
        cluster.restart(peer)


@pytest.mark.long
def test_after_a_power_cut_one_that_stays_away_is_evicted(cluster: Cluster, data: Path) -> None:
    """Nobody remembers the last view then, so all its peers are needed; of three one does not come back in time."""
    seed = cluster.seed(data, "--name", "tiny", "--peer-name", "seed")
    peers = start(cluster, seed, NAMES[:3], "--checkpoint-every", "1s")
    cluster.wait(lambda: all(p.events("checkpoint") for p in peers), "everybody has a checkpoint")
    old = peers[0].view["history"]
    when = max([p.cut_power() for p in peers])
    *two, last = peers
    for peer in two:
        cluster.restart(peer)
    called = f"{last.name} ({last.peer_id[:8]})"
    for peer in two:
        cluster.wait(
            lambda p=peer: f"waiting for {called}" in p.said(), f"{peer.name} says for whom it waits", START_S
        )
    # asked at a peer that does not train, which says whom to ask
    told = facts(cluster, "evict", last.peer_id[:8], "--yes", "--home", str(seed.home))
    assert (told["name"], told["parent"], told["waits_for"]) == (called, old, [])
    train_together(cluster, two, after=when)
    resumed = next(v for v in two[0].events("view") if v["time"] > when)
    newest = max(tuple(e["lineage"]) for p in two for e in p.events("checkpoint") if e["time"] < when)
    assert (tuple(resumed["start"]), resumed["parent"]) == (newest, old)

    cluster.restart(last)
    train_together(cluster, peers, after=when)
    assert [e["replaced"] for e in last.events("history_given_up")] == [True]
    finish(cluster, peers)
