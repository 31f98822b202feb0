"""Damage to real files of real peers is found and repaired, also by a peer that is killed over and over meanwhile."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from p2p_dmc.data.store import Store
from tests.system.cluster import ANY_PORT, Cluster, Peer, signal_all
from tests.system.commands import facts


def storing(cluster: Cluster, name: str, seed: Peer) -> Peer:
    """`dmc-peer join` without a script; returns when it listens."""
    peer = cluster.peer(name)
    peer.start(["join", "--home", str(peer.home), "--name", name, "--listen", ANY_PORT, seed.address])
    cluster.listening(peer)
    return peer


def is_whole(cluster: Cluster, peer: Peer) -> bool:
    said = facts(cluster, "placement", peer.address)["datasets"]
    return bool(said) and all(
        said[0][what] == 0 for what in ("under_replicated", "in_flight", "unverified", "lost")
    )


def kill(peer: Peer) -> None:
    signal_all(peer.tree(), signal.SIGKILL)
    assert peer.process is not None and peer.process.wait(10) == -signal.SIGKILL


def files(peer: Peer) -> list[Path]:
    return sorted(peer.home.glob("store/*/shards/*.tar"))


def test_a_peer_that_is_killed_over_and_over_ends_with_whole_shards_and_a_rotten_one_is_repaired(
    cluster: Cluster, data: Path
) -> None:
    seed = cluster.seed(data, "--peer-name", "seed", "--replicas", "2")
    one = storing(cluster, "a", seed)
    for _ in range(3):  # as it copies
        cluster.wait(lambda: len(files(one)) > 0, "something came")
        kill(one)
        cluster.restart(one)
        cluster.listening(one)
    cluster.wait(lambda: is_whole(cluster, seed) and is_whole(cluster, one), "two copies of all", 60.0)

    kill(one)
    rotten, gone = files(one)[:2]
    before = rotten.stat()
    whole = rotten.read_bytes()
    rotten.write_bytes(whole[:-1] + b"\x01")
    os.utime(rotten, ns=(before.st_atime_ns, before.st_mtime_ns))
    gone.unlink()
    cluster.restart(one)
    cluster.listening(one)
    cluster.wait(lambda: len(one.events("shard_corrupt")) == 1, "the damage is found", 60.0)
    cluster.wait(lambda: is_whole(cluster, seed) and is_whole(cluster, one), "it is repaired", 60.0)
    assert rotten.read_bytes() == whole and gone.exists()
    assert f"shard {rotten.stem[:12]} is damaged here; it is fetched from another peer anew" in one.said()
    fetched = [event["shard"] for event in one.events("fetched")]
    assert {rotten.stem, gone.stem} <= set(fetched)

    kill(one)
    kill(seed)
    for peer in (seed, one):
        store = Store(peer.home / "store")
        [dataset] = store.datasets()
        assert all(store.verify(dataset, i) for i in range(len(store.manifest(dataset).shards)))
