"""Peers that die, fall silent and come back, as real processes (DESIGN.md section 10).

Each test shows that the fault happened and was noticed, that the others went on in time, and that in the end every
sample counted exactly once and all have the same model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from p2p_dmc.agent.client import ask
from tests.system.cluster import Cluster, Peer
from tests.system.scenario import (
    NAMES,
    SILENCE_S,
    arguments,
    finish,
    go_on_without,
    start,
    train_together,
)

STOPPED_S = 6.0


@pytest.mark.long
def test_the_first_of_four_is_killed_and_comes_back(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--name", "tiny")
    peers = start(cluster, seed, NAMES)
    first = peers[0].view["members"][0]
    victim = next(p for p in peers if p.peer_id == first)
    survivors = [p for p in peers if p is not victim]
    when = victim.kill_tree()
    go_on_without(cluster, survivors, first, when)
    for peer in survivors:
        assert peer.events("member", peer_id=first, state="DEAD"), f"{peer.name} did not notice"
    assert any(p.events("takeover", **{"from": first}) for p in survivors), "nobody took anything over"
    cluster.restart(victim)
    train_together(cluster, peers, after=when)
    finish(cluster, peers)


def test_the_seeding_peer_is_killed(cluster: Cluster, data: Path) -> None:
    """The peer that brought the data trains too; every shard has another holder, so nothing is lost with it."""
    seed = cluster.seed(data, "--name", "tiny")
    peers = start(cluster, seed, ("seed", "b", "c"))
    cluster.wait(lambda: hold_everything(peers[1:]), "every shard has a holder besides the seeding peer")
    when = seed.kill_tree()
    go_on_without(cluster, peers[1:], seed.peer_id, when)
    assert all(p.events("member", peer_id=seed.peer_id, state="DEAD") for p in peers[1:])
    finish(cluster, peers[1:])


def hold_everything(peers: Sequence[Peer]) -> bool:
    """Whether these peers together have all shards on disk."""
    held = {path.name for p in peers for path in p.home.glob("store/*/shards/*.tar")}
    seeded = {path.name for path in peers[0].home.parent.glob("seed/store/*/shards/*.tar")}
    return held == seeded


@pytest.mark.long
def test_a_trainer_is_killed_then_a_peer_falls_silent(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--name", "tiny")
    peers = start(cluster, seed, NAMES[:3])
    a, b, c = peers
    when = a.kill_trainer()
    go_on_without(cluster, [b, c], a.peer_id, when)
    assert all(p.events("trainer_lost", peer_id=a.peer_id) for p in (b, c)), "its agent said nothing"
    assert not any(p.events("member", peer_id=a.peer_id, state="DEAD") for p in (b, c)), "its agent lives"
    train_together(cluster, peers, after=when)
    assert len(a.events("trainer_exit", signal="SIGKILL")) == 1

    when = b.stop()
    go_on_without(cluster, [a, c], b.peer_id, when, limit_s=SILENCE_S)
    assert all(p.events("member", peer_id=b.peer_id, state="DEAD") for p in (a, c)), "nobody suspected it"
    cluster.wait(lambda: time.time() > when + STOPPED_S, f"{STOPPED_S:g} s have passed")
    b.go_on()
    train_together(cluster, peers, after=when)
    finish(cluster, peers)


def test_all_are_killed_then_all_are_stopped(cluster: Cluster, data: Path) -> None:
    """They resume from what is in memory while the machines run, and from the agreed state after `dmc-peer stop`."""
    seed = cluster.seed(data, "--name", "tiny")
    peers = start(cluster, seed, NAMES[:3])
    cluster.rounds(peers, 4)
    when = max([p.kill_tree() for p in peers])
    newest = max([p.rounds()[-1]["view_epoch"], p.rounds()[-1]["round"]] for p in peers)
    for peer in peers:
        cluster.restart(peer)
    train_together(cluster, peers, after=when)
    resumed = next(v for v in peers[0].events("view") if v["time"] > when)
    assert resumed["start"] >= newest, f"a complete round is lost: {resumed}"

    assert ask([peers[1].address], "stop")["stopping"]
    cluster.ended(peers)
    ends = [p.events("run_over")[-1] for p in peers]
    assert [e["outcome"] for e in ends] == ["stopped"] * 3
    checkpoints = {tuple(p.events("checkpoint")[-1]["lineage"]) for p in peers}
    assert len(checkpoints) == 1, f"they stopped at different rounds: {checkpoints}"
    records = [json.loads((p.home / "runs" / "train" / "agreement.json").read_text()) for p in peers]
    assert all(record["closed"] for record in records), "a peer would have no vote when it comes back"
    when = ends[0]["time"]
    for peer in peers:
        cluster.restart(peer)
    train_together(cluster, peers, after=when)
    assert tuple(next(v for v in peers[0].events("view") if v["time"] > when)["start"]) in checkpoints
    finish(cluster, peers)


def test_one_of_two_is_interrupted_then_killed(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--name", "tiny")
    peers = start(cluster, seed, NAMES[:2])
    a, b = peers
    when = time.time()
    b.interrupt()
    cluster.ended([b], code=0)
    assert b.events("left") and "leaving" in b.said()
    go_on_without(cluster, [a], b.peer_id, when)
    assert a.events("member", peer_id=b.peer_id, state="LEFT"), "it left without a word"
    cluster.restart(b)
    train_together(cluster, peers, after=when)
    when = b.kill_tree()
    go_on_without(cluster, [a], b.peer_id, when)
    assert a.events("member", peer_id=b.peer_id, state="DEAD")
    finish(cluster, [a])


def test_a_peer_alone_is_killed_and_goes_on_from_its_home(cluster: Cluster, data: Path) -> None:
    """The home of the seeding peer has everything: it is reopened without a seed's address."""
    seed = cluster.seed(data, "--name", "tiny")
    start(cluster, seed, ["seed"], "--checkpoint-every", "1s")
    cluster.wait(lambda: seed.events("checkpoint"), "a checkpoint")
    when = seed.kill_tree()
    cluster.join("seed", "", *arguments(cluster), options=["--listen", "tcp://127.0.0.1:0"])
    train_together(cluster, [seed], after=when)
    assert seed.view["start"] > [0, 0], f"it began anew: {seed.view}"
    finish(cluster, [seed])
