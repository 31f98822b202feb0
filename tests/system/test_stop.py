"""Peers that die while a run is stopped: who goes on afterwards, with whom (DESIGN.md section 6)."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from p2p_dmc.agent.client import ask
from p2p_dmc.observe.phases import give
from tests.system.cluster import Cluster, Peer
from tests.system.scenario import NAMES, START_S, finish, obeys, start, struck, train_together

THREE = NAMES[:3]


def three(cluster: Cluster, data: Path, orders: dict[str, tuple[str, str]]) -> list[Peer]:
    """Peers that train; each with orders is struck once, (where, how). Whoever brought the data stays."""
    seed = cluster.seed(data, "--name", "tiny", "--replicas", "3")
    for name, (phase, action) in orders.items():
        give(obeys(cluster, cluster.peer(name)), phase, action)
    return start(cluster, seed, THREE)


def keeps_vote(peer: Peer) -> bool:
    return bool(json.loads((peer.home / "runs" / "train" / "agreement.json").read_text())["closed"])


def newest(peer: Peer) -> tuple[int, int]:
    """Its newest checkpoint."""
    folders = (peer.home / "runs" / "train" / "checkpoints").glob("[0-9]*-*")
    return max(
        (int(view), int(number)) for view, _, number in (folder.name.partition("-") for folder in folders)
    )


def first_start(peer: Peer, after: float) -> tuple[int, ...]:
    return tuple(next(v for v in peer.events("view") if v["time"] > after)["start"])


@pytest.mark.long
def test_one_is_killed_before_it_says_that_it_stopped(cluster: Cluster, data: Path) -> None:
    """The others do not wait for it for long, and say that all are needed. So it is; then they go on exactly there."""
    a, b, c = three(cluster, data, {"c": ("stopped", "kill")})
    assert ask([a.address], "stop")["stopping"]
    struck(cluster, cluster.root / "orders-c", "stopped")
    cluster.ended([a, b])
    assert not any(map(keeps_vote, (a, b, c)))
    for peer in (a, b):
        words = f"no word came that c ({c.peer_id[:8]}) stopped at the same round; all peers of the last view"
        assert words in peer.said()
    end = newest(a)
    assert newest(b) == newest(c) == end

    when = time.time()
    for peer in (a, b):
        cluster.restart(peer)
    for peer in (a, b):
        cluster.wait(
            lambda p=peer: f"waiting for c ({c.peer_id[:8]})" in p.said(), "they wait for c", START_S
        )
    cluster.restart(c)
    train_together(cluster, [a, b, c], after=when)
    assert {first_start(p, when) for p in (a, b, c)} == {end}
    assert c.rounds(when)[0]["round"] == end[1] + 1
    finish(cluster, [a, b, c])


@pytest.mark.long
def test_one_is_killed_after_it_said_that_it_stopped(cluster: Cluster, data: Path) -> None:
    """Those that heard it keep their votes, and go on without it; it has none, and joins them later."""
    late = ("stopped", "stop")
    a, b, c = three(cluster, data, {"a": late, "b": late, "c": ("all-stopped", "kill")})
    assert ask([c.address], "stop")["stopping"]
    for name in "ab":
        struck(cluster, cluster.root / f"orders-{name}", "stopped")
    cluster.wait(lambda: c.events("run_over"), "c has said that it stopped")
    for peer in (a, b):
        peer.go_on()
    struck(cluster, cluster.root / "orders-c", "all-stopped")
    cluster.ended([a, b])
    cluster.wait(lambda: not c.running, "c is dead")
    assert [keeps_vote(p) for p in (a, b, c)] == [True, True, False]
    end = newest(a)
    assert newest(b) == newest(c) == end

    when = time.time()
    for peer in (a, b):
        cluster.restart(peer)
    train_together(cluster, [a, b], after=when)
    assert {first_start(p, when) for p in (a, b)} == {end}
    cluster.restart(c)
    train_together(cluster, [a, b, c], after=when)
    finish(cluster, [a, b, c])


@pytest.mark.long
def test_ctrl_c_ends_the_wait_for_one_that_is_slow(cluster: Cluster, data: Path) -> None:
    """The run is stopped all the same, and both go on from there; who did not wait has no vote in what it left."""
    seed = cluster.seed(data, "--name", "tiny")
    give(obeys(cluster, cluster.peer("a")), "stopped", "stop")
    a, b = start(cluster, seed, NAMES[:2])
    assert ask([b.address], "stop")["stopping"]
    waits = f"run 'train' is stopped here; waiting for word that a ({a.peer_id[:8]}) stopped, too"
    cluster.wait(lambda: waits in b.said(), "b waits for a")
    b.interrupt()
    cluster.ended([b])
    assert f"no word came that a ({a.peer_id[:8]}) stopped at the same round" in b.said()
    a.go_on()
    cluster.ended([a])
    assert [keeps_vote(p) for p in (a, b)] == [True, False]
    end = newest(a)
    assert newest(b) == end

    when = time.time()
    for peer in (a, b):
        cluster.restart(peer)
    train_together(cluster, [a, b], after=when)
    assert {first_start(p, when) for p in (a, b)} == {end}
    finish(cluster, [a, b])


@pytest.mark.long
def test_a_script_ends_by_itself_while_its_peer_stops(cluster: Cluster, data: Path) -> None:
    """Its agent writes the state all the same and says so: all keep their votes."""
    orders = obeys(cluster, cluster.peer("c"))
    a, b, c = three(cluster, data, {})
    cluster.wait(
        lambda: c.events("checkpoint"), "c has written a checkpoint; the next one is that of the stop"
    )
    give(orders, "checkpointing", "hold")
    trainer = c.trainer()
    assert trainer is not None and ask([a.address], "stop")["stopping"]
    struck(cluster, orders, "checkpointing")
    trainer.send_signal(signal.SIGUSR1)
    cluster.wait(lambda: c.events("trainer_exit", code=3), "c's script has ended")
    (orders / "go-on").touch()
    cluster.ended([a, b])
    cluster.ended([c], code=1)
    assert "run 'train' is stopped, but the script failed" in c.said()
    [over] = c.events("run_over")
    assert over["outcome"] == "stopped" and over["time"] > c.events("trainer_exit")[0]["time"]
    assert all(map(keeps_vote, (a, b, c)))
    assert newest(a) == newest(b) == newest(c)
