"""Peers whose rounds travel as int8: one dies, one learns, one differs; real processes."""

from __future__ import annotations

from pathlib import Path

from p2p_dmc.train.collective import ring_bytes
from tests.system.cluster import Cluster
from tests.system.scenario import NAMES, finish, go_on_without, start, train_together

PARAMETERS = 16 * 32 + 32 + 32 * 4 + 4  # of the script's model


def test_one_of_three_is_killed_and_comes_back(cluster: Cluster, data: Path) -> None:
    """All have the same bits in every round: `finish` compares them. Who comes back learns before it votes."""
    seed = cluster.seed(data, "--name", "tiny", "--replicas", "3")
    peers = start(cluster, seed, NAMES[:3], script=["--compress", "int8"])
    victim = peers[2]
    when = victim.kill_tree()
    go_on_without(cluster, peers[:2], victim.peer_id, when)
    cluster.restart(victim)
    train_together(cluster, peers, after=when)
    learned = [v for v in peers[0].events("view") if v["time"] > when and victim.peer_id in v["learners"]]
    assert learned, "it did not learn"
    finish(cluster, peers)
    lines = [r for p in peers for r in p.rounds() if r["samples_round"] and r["comm_s"]]
    assert {r["compress"] for r in lines} == {"int8"}
    assert max(r["bytes_sent"] for r in lines) < ring_bytes(4 * PARAMETERS, 3)
    assert all(r["bytes_sent"] > 0 for r in lines)


def test_one_that_differs_is_refused_and_the_setting_named(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--name", "tiny")
    peers = start(cluster, seed, NAMES[:2], script=["--compress", "int8"])
    other = cluster.join("c", seed, "--epochs", "20", "--slow", str(cluster.slow))
    cluster.wait(lambda: "compression is none here and int8 in the run" in other.said(), "c is refused", 60.0)
    finish(cluster, peers)
