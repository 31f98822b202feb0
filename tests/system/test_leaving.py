"""Who leaves loses nothing that was committed."""

from __future__ import annotations

from pathlib import Path

from tests.system.cluster import Cluster
from tests.system.scenario import finish, start, train_together


def test_the_last_one_leaves_and_goes_on_where_it_was(cluster: Cluster, data: Path) -> None:
    """With a checkpoint a minute it would go back to the first round of its view."""
    seed = cluster.seed(data, "--name", "tiny")
    [peer] = start(cluster, seed, ["a"])
    cluster.wait(lambda: len(peer.rounds()) >= 8, "a few rounds")
    peer.interrupt()
    cluster.ended([peer])
    last = peer.rounds()[-1]
    assert peer.events("checkpoint")[-1]["lineage"] == [last["view_epoch"], last["round"]]
    when = last["time"]
    cluster.restart(peer)
    train_together(cluster, [peer], after=when)
    resumed = next(view for view in peer.events("view") if view["time"] > when)
    assert resumed["start"] == [last["view_epoch"], last["round"]]
    assert "goes on from the checkpoint" in peer.said()
    finish(cluster, [peer])
