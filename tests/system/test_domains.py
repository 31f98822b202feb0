"""Failure domains with real processes: copies lie in different ones, and one may be lost as a whole."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tests.system.cluster import ANY_PORT, Cluster, Peer, signal_all
from tests.system.commands import command, facts

RESTORED_S = 40.0
"""Suspicion is skipped, since hosts refuse; what remains is stillness and the copying."""


def storing(cluster: Cluster, name: str, seed: Peer, *options: str) -> Peer:
    """`dmc-peer join` without a script; returns when it listens."""
    peer = cluster.peer(name)
    words = ["join", "--home", str(peer.home), "--name", name, "--listen", ANY_PORT]
    peer.start([*words, *options, seed.address])
    cluster.listening(peer)
    return peer


def test_a_lost_domain_takes_no_shard_with_it(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--peer-name", "seed", "--domain", "attic")
    attic = [seed, storing(cluster, "a", seed, "--domain", "attic")]
    office = [storing(cluster, name, seed, "--domain", "office/rack2") for name in ("b", "c")]
    offices = {peer.peer_id for peer in office}

    def placed(asked: Peer) -> list[dict[str, Any]]:
        said = facts(cluster, "placement", asked.address)
        assert len(said["datasets"]) <= 1
        return said["datasets"][0]["shards"] if said["datasets"] else []

    def in_both(shards: list[dict[str, Any]], key: str) -> bool:
        return bool(shards) and all(set(s[key]) & offices and set(s[key]) - offices for s in shards)

    cluster.wait(
        lambda: len(facts(cluster, "placement", seed.address)["domains"]) == 4, "all four are placed on"
    )
    assert in_both(placed(seed), "should")
    cluster.wait(lambda: in_both(placed(seed), "does"), "each shard is in both domains", RESTORED_S)
    text = command(cluster, "placement", "--home", str(office[0].home))
    assert "\ndomain attic: a, seed\n" in text and "\ndomain office/rack2: b, c\n" in text
    assert "otherwise" not in text

    for peer in attic:
        signal_all(peer.tree(), signal.SIGKILL)
        assert peer.process is not None and peer.process.wait(10) == -signal.SIGKILL
    cluster.wait(
        lambda: all(set(s["should"]) == set(s["does"]) == offices for s in placed(office[0])),
        "two copies of each shard in what is left",
        RESTORED_S,
    )
    said = facts(cluster, "status", office[0].address)["datasets"][0]
    assert (said["lost"], said["under_replicated"]) == (0, 0)
    assert not [e for peer in office for e in peer.events("shards_lost")]
