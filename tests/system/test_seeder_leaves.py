"""A seeder that leaves when everything is replicated, with real processes: at that moment nothing depends on it."""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest

from p2p_dmc.data.store import Store
from tests.system.cluster import ANY_PORT, Cluster, Peer, signal_all
from tests.system.commands import facts


def storing(cluster: Cluster, name: str, seed: Peer, *options: str) -> Peer:
    """`dmc-peer join` without a script; returns when it listens."""
    peer = cluster.peer(name)
    words = ["join", "--home", str(peer.home), "--name", name, "--listen", ANY_PORT]
    peer.start([*words, *options, seed.address])
    cluster.listening(peer)
    return peer


def copies_on_disk(peers: list[Peer]) -> tuple[Counter[str], int]:
    """Of each shard, how many disks have it with the right digest; and how many shards there are."""
    found: Counter[str] = Counter()
    shards: set[str] = set()
    for peer in peers:
        store = Store(peer.home / "store")
        for dataset in store.datasets():
            digests = [digest.hex() for digest in store.manifest(dataset).shard_digests]
            shards.update(digests)
            found.update(digests[i] for i in store.holdings(dataset) if store.verify(dataset, i))
    return found, len(shards)


def test_when_the_seeder_exits_all_copies_are_on_the_others_disks(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--peer-name", "seed", "--replicas", "2", "--leave-when-replicated")
    others = [storing(cluster, name, seed) for name in ("a", "b", "c")]
    cluster.ended([seed])
    for peer in others:  # at once, all of them, without a word
        signal_all(peer.tree(), signal.SIGKILL)
    shutil.rmtree(seed.home)
    for peer in others:
        assert peer.process is not None and peer.process.wait(10) == -signal.SIGKILL
    found, shards = copies_on_disk(others)
    assert len(found) == shards > 3 and min(found.values()) >= 2


@pytest.mark.long
def test_a_seeder_stays_while_one_of_those_it_relied_on_is_gone(cluster: Cluster, data: Path) -> None:
    """It needs two peers that stay; one of the two is killed as it copies, and comes back with an empty disk."""
    seed = cluster.seed(data, "--peer-name", "seed", "--replicas", "2", "--leave-when-replicated")
    one = storing(cluster, "a", seed)
    shards = facts(cluster, "status", seed.address)["datasets"][0]["shards"]
    cluster.wait(lambda: len(one.events("fetched")) == shards, "one has all of it")
    assert seed.running
    signal_all(one.tree(), signal.SIGKILL)
    assert one.process is not None
    one.process.wait(10)
    shutil.rmtree(one.home / "store")
    others = [storing(cluster, name, seed) for name in ("b", "c")]
    cluster.ended([seed])
    found, _ = copies_on_disk(others)
    assert len(found) == shards and min(found.values()) == 2
