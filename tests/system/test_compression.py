"""Peers whose rounds travel as int8: one differs, one dies, one learns; real processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from p2p_dmc.train.collective import ring_bytes
from tests.system.cluster import Cluster, Peer
from tests.system.scenario import NAMES, START_S, arguments, finish, go_on_without, start, train_together

PARAMETERS = 16 * 32 + 32 + 32 * 4 + 4  # of the script's model
INT8 = ("--compress", "int8")


def check_bytes(peers: Sequence[Peer]) -> None:
    """Every round that moved anything moved int8, and says so."""
    lines = [line for p in peers for line in p.rounds() if line["samples_round"] and line["members"] > 1]
    assert lines and {line["compress"] for line in lines} == {"int8"}
    assert all(0 < line["bytes_sent"] < ring_bytes(4 * PARAMETERS, 3) for line in lines)


@pytest.mark.long
def test_one_that_differs_is_refused_and_one_of_three_is_killed(cluster: Cluster, data: Path) -> None:
    """All have the same bits in every round: `finish` compares them."""
    seed = cluster.seed(data, "--name", "tiny", "--replicas", "3")
    peers = start(cluster, seed, NAMES[:3], script=INT8)
    other = cluster.join("d", seed, *arguments(cluster))
    said = "compression is none here and int8 in the run"
    cluster.wait(lambda: said in other.said(), "the setting is named", START_S)
    victim = peers[2]
    when = victim.kill_tree()
    go_on_without(cluster, peers[:2], victim.peer_id, when)
    cluster.ended([other], code=1)
    finish(cluster, peers[:2])
    check_bytes(peers)


@pytest.mark.long
def test_one_that_comes_back_learns_from_int8(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--name", "tiny", "--replicas", "3")
    peers = start(cluster, seed, NAMES[:3], script=INT8)
    victim = peers[2]
    when = victim.cut_power()
    go_on_without(cluster, peers[:2], victim.peer_id, when)
    cluster.restart(victim)
    train_together(cluster, peers, after=when)
    views = [v for v in peers[0].events("view") if v["time"] > when]
    assert any(victim.peer_id in v["learners"] for v in views), "it did not learn"
    finish(cluster, peers)
    check_bytes(peers)
