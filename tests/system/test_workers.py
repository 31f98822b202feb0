"""Loaders with worker processes, and samples that cannot be decoded, when trainers and peers are killed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.system.checks import check_finished
from tests.system.cluster import Cluster, Peer, keys
from tests.system.scenario import EPOCHS, NAMES, arguments, go_on_without, start, train_together

WORKERS = 2


def workers(peer: Peer) -> list[psutil.Process]:
    """The children of a peer's trainer."""
    trainer = peer.trainer()
    return trainer.children(recursive=True) if trainer is not None else []


def printed(peer: Peer) -> str:
    """By its script."""
    return peer.log("out").read_text(errors="replace")


@pytest.mark.long
def test_who_skipped_is_killed_and_its_samples_are_skipped_by_others(cluster: Cluster, data: Path) -> None:
    """Each of them once in each epoch, whoever came upon it; and everything else counts once."""
    broken = sorted(keys(data))[::20]
    script = ["--fault", "raise", "--on-error", "skip", "--workers", str(WORKERS)]
    for key in broken:
        script += ["--key", key]
    seed = cluster.seed(data, "--name", "tiny")
    peers = start(cluster, seed, NAMES[:3], script=script)
    cluster.wait(lambda: any("skipped: sample" in printed(p) for p in peers), "somebody skips a sample")
    victim = next(p for p in peers if "skipped: sample" in printed(p))
    others = [p for p in peers if p is not victim]
    busy = workers(victim)
    assert len(busy) == WORKERS
    when = victim.kill_tree()
    psutil.wait_procs(busy, timeout=10)
    assert not any(p.is_running() for p in busy)
    go_on_without(cluster, others, victim.peer_id, when)
    cluster.restart(victim)
    train_together(cluster, peers, after=when)
    cluster.hurry()
    cluster.ended(peers)
    found = check_finished([p.home for p in peers], epochs=EPOCHS, skipped=len(broken) * EPOCHS)
    gone = Counter(
        epoch for line in found.rounds for epoch, _, lo, hi in line["skipped"] for _ in range(lo, hi)
    )
    assert gone == dict.fromkeys(range(EPOCHS), len(broken))
    named = {key for p in peers for line in p.events("given_up") for key in line["keys"]}
    assert {key for key in named if "#" not in key} == set(broken)  # by those who have the shard
    assert all("skipped: '" in p.said() for p in others)


def test_a_sample_that_kills_workers_is_quarantined(cluster: Cluster, data: Path) -> None:
    """As one that kills trainers: whose worker dies of it twice dies likewise, and after two of those it is skipped."""
    poison = sorted(keys(data))[100]
    seed = cluster.seed(data, "--name", "tiny")
    script = ["--fault", "kill", "--key", poison, "--workers", str(WORKERS), "--tau", "2"]
    said = arguments(cluster, *script, epochs=1)
    peers = [cluster.join(name, seed, *said, options=["--min-peers", "2"]) for name in NAMES[:2]]
    cluster.hurry()
    cluster.ended(peers, deadline_s=200)
    deaths = [line for p in peers for line in p.events("trainer_exit", signal="SIGSEGV")]
    assert len(deaths) == 2
    named = [line for p in peers for line in printed(p).splitlines() if "SIGSEGV over sample" in line]
    assert named and all(f"'{poison}'" in line or " and 1 more" in line for line in named)
    check_finished([p.home for p in peers], epochs=1, skipped=2 * 4 * 2)
    assert poison in {key for p in peers for line in p.events("given_up") for key in line["keys"]}


@pytest.mark.long
def test_workers_end_with_their_trainer(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--name", "tiny")
    peers = start(cluster, seed, NAMES[:2], script=["--workers", str(WORKERS)])
    victim, other = peers
    busy = workers(victim)
    assert len(busy) == WORKERS
    when = victim.kill_trainer()
    _, alive = psutil.wait_procs(busy, timeout=10)
    assert not alive, "workers outlived their trainer"
    train_together(cluster, peers, after=when)
    busy = workers(other)
    other.interrupt()
    cluster.ended([other])
    assert not any(p.is_running() for p in busy), "workers outlived a trainer that was told to leave"
    cluster.hurry()
    cluster.ended([victim])
    check_finished([victim.home], [other.home], epochs=EPOCHS)
