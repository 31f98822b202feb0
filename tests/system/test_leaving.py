"""Who leaves loses nothing that was committed; and who is killed while somebody leaves, itself or another."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from p2p_dmc.observe.phases import give
from tests.system.cluster import Cluster, Peer
from tests.system.scenario import (
    NAMES,
    SILENCE_S,
    arguments,
    finish,
    go_on_without,
    obeys,
    start,
    struck,
    train_together,
)

SLOWLY = ("--delay-ms", "400")
"""Rounds of more than a second and a half."""


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


@pytest.mark.long
def test_one_that_is_killed_while_it_leaves_is_not_waited_for(cluster: Cluster, data: Path) -> None:
    """It has said its header and not its farewell: the others go into a reduction that it does not come to."""
    seed = cluster.seed(data, "--name", "tiny")
    orders = obeys(cluster, cluster.peer("c"))
    peers = start_unequal(cluster, seed, quick="c")
    leaver = peers[-1]
    give(orders, "leaving", "kill")
    rounds = len(leaver.rounds())
    cluster.wait(lambda: len(leaver.rounds()) > rounds, "a round ends")
    at_barrier_s = leaver.rounds()[-1]["time"] + 0.5
    cluster.wait(lambda: time.time() > at_barrier_s, "it waits for the others, which take a second longer")
    leaver.interrupt()
    when = struck(cluster, orders, "leaving")
    go_on_without(cluster, peers[:-1], leaver.peer_id, when)
    assert not leaver.events("left") and not leaver.events("withdrawn"), "it has said its farewell"
    for peer in peers[:-1]:
        assert peer.events("member", peer_id=leaver.peer_id, state="DEAD"), f"{peer.name} did not notice"
        assert not peer.events("member", peer_id=leaver.peer_id, state="LEFT")
    cluster.restart(leaver)
    train_together(cluster, peers, after=when)
    finish(cluster, peers)


def start_unequal(cluster: Cluster, seed: Peer, *, quick: str) -> list[Peer]:
    """Three that train, of which one waits for the others in each round."""
    options = ["--min-peers", "3"]
    peers = []
    for name in NAMES[:3]:
        script = arguments(cluster, "--delay-ms", "20" if name == quick else SLOWLY[1])
        peers.append(cluster.join(name, seed, *script, options=options))
    for peer in peers:
        cluster.listening(peer)
    train_together(cluster, peers)
    return peers


@pytest.mark.long
def test_one_that_is_killed_while_it_puts_a_farewell_off_has_lost_nothing(
    cluster: Cluster, data: Path
) -> None:
    """Its trainer has the round's result and stops there. The others have completed the round, and one of them leaves;

    so the farewell waits for the trainer. Then the agent is killed, and has promised nothing since.
    """
    seed = cluster.seed(data, "--name", "tiny")
    orders = obeys(cluster, cluster.peer("b"))
    peers = start(cluster, seed, NAMES, script=SLOWLY)
    victim, leaver = peers[1], peers[2]
    others = [peers[0], peers[3]]
    give(orders, "put-off", "kill")
    give(orders, "reduced", "stop")
    struck(cluster, orders, "reduced")
    last = victim.rounds()[-1]
    cluster.wait(lambda: leaver.rounds()[-1]["round"] > last["round"], "the others complete that round")
    leaver.interrupt()
    when = struck(cluster, orders, "put-off")
    cluster.ended([leaver])
    go_on_without(cluster, others, victim.peer_id, when, limit_s=SILENCE_S)
    assert victim.rounds()[-1] == last, "it has completed what its trainer did not hand over"
    for peer in others:
        assert peer.events("member", peer_id=leaver.peer_id, state="LEFT"), "it left without a word"
        assert peer.events("member", peer_id=victim.peer_id, state="DEAD"), f"{peer.name} did not notice"
    cluster.restart(victim)
    train_together(cluster, [*others, victim], after=when)
    finish(cluster, [*others, victim])
