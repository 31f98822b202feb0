"""seed-dataset --append while a run is on: everybody gets the new version, the run keeps to its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2p_dmc.agent.run_files import load_run
from tests.system.cluster import ANY_PORT, Cluster, Peer, write_samples
from tests.system.conftest import SAMPLES
from tests.system.scenario import START_S, arguments, finish, start, train_together


def digests(peer: Peer) -> set[str]:
    """Of the data sets in its store."""
    return {path.parent.name for path in (peer.home / "store").glob("*/manifest.msgpack")}


def trains_on(peer: Peer, run: str = "train") -> str:
    """What its run's record says of the data set: the first digits of the digest."""
    return str(dict(load_run(peer.home / "runs" / run)["fingerprint"])["data set"]).rpartition(" ")[2]


@pytest.mark.long
def test_a_run_keeps_to_its_version_and_the_next_takes_the_newer_one(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data)
    pair = start(cluster, seed, ["a", "b"])
    [old] = digests(pair[0])
    seed.interrupt()
    cluster.ended([seed])

    write_samples(data, SAMPLES + 60)  # the first of them as they were
    seed.start([*seed.arguments, "--append"])
    cluster.listening(seed)
    assert "60 new samples for data set 'tiny'" in seed.said()
    cluster.wait(lambda: all(len(digests(peer)) == 2 for peer in pair), "the version is everywhere", START_S)
    [new] = digests(seed) - {old}
    first, second = (pair[0].home / "store" / one / "shards" for one in (old, new))

    def shared() -> bool:
        names = {path.name for path in first.glob("*.tar")} & {path.name for path in second.glob("*.tar")}
        return bool(names) and all(os.path.samefile(first / name, second / name) for name in names)

    cluster.wait(shared, "what both have is one file")
    assert not any(peer.events("name_clash") for peer in (seed, *pair))

    late = cluster.join("c", pair[0], *arguments(cluster))
    cluster.listening(late)
    train_together(cluster, [*pair, late])
    peers = [*pair, late]
    assert {trains_on(peer) for peer in peers} == {old[:12]}
    finish(cluster, peers)

    after = cluster.join("d", seed, *arguments(cluster, epochs=1), options=["--run", "next"])
    cluster.ended([after])
    assert trains_on(after, "next") == new[:12]


def test_what_the_home_lacks_is_fetched_first(cluster: Cluster, data: Path) -> None:
    """By a home that has nothing at all, then by the one that seeded it, whose version is not the newest any more."""
    seed = cluster.seed(data)
    keeper = cluster.peer("keeper")
    keeper.start(["join", "--home", str(keeper.home), "--listen", ANY_PORT, seed.address])
    cluster.listening(keeper)
    shards = len(list(seed.home.glob("store/*/shards/*.tar")))
    cluster.wait(lambda: len(list(keeper.home.glob("store/*/shards/*.tar"))) == shards, "all is there twice")
    [old] = digests(seed)
    seed.interrupt()
    cluster.ended([seed])

    write_samples(data, SAMPLES + 60)
    fresh = cluster.seed(data, "--append", "--join", keeper.address, name="fresh")
    cluster.wait(lambda: "serving at" in fresh.said(), "it has appended")
    assert f"{shards} shards of data set 'tiny' to be fetched for the comparison" in fresh.said()
    assert f"60 new samples for data set 'tiny', whose newest version is {old[:12]}" in fresh.said()
    [newer] = digests(fresh) - {old}
    cluster.wait(lambda: newer in digests(keeper), "the keeper knows it")

    write_samples(data, SAMPLES + 61)
    seed.start([*seed.arguments, "--append"])
    cluster.wait(lambda: "serving at" in seed.said(), "the other home has appended")
    assert f"1 new sample for data set 'tiny', whose newest version is {newer[:12]}" in seed.said()
    assert not any(peer.events("name_clash") for peer in (seed, keeper, fresh))
