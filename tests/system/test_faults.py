"""Peers that die, fall silent and come back, as real processes (DESIGN.md section 10).

Each test shows that the fault happened and was noticed, that the others went on in time, and that in the end every
sample counted exactly once and all have the same model.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from tests.system.checks import check_finished
from tests.system.cluster import Cluster, Peer

EPOCHS = 30
NAMES = ("a", "b", "c", "d")
RECOVERY_S = 3.0
SILENCE_S = 8.0
"""After SIGSTOP suspicion takes its time."""


def start(cluster: Cluster, seed: Peer, names: Sequence[str], *options: str) -> list[Peer]:
    """Joins that train slowly, until all of them have done some rounds together."""
    arguments = ["--epochs", str(EPOCHS), "--slow", str(cluster.slow)]
    options = ("--min-peers", str(len(names)), *options)
    peers = [cluster.join(name, seed, *arguments, options=options) for name in names]
    for peer in peers:
        if peer is not seed:
            cluster.listening(peer)
    cluster.wait(
        lambda: all(p.events("view") and len(p.view["members"]) == len(names) for p in peers),
        f"a view of {', '.join(names)}",
        60.0,
    )
    cluster.rounds(peers, 3)
    return peers


def round_s(peers: Sequence[Peer]) -> float:
    """How long a round usually takes, from one line to the next."""
    times = [line["time"] for line in peers[0].rounds()]
    return statistics.median(two - one for one, two in pairwise(times))


def go_on_without(
    cluster: Cluster, survivors: Sequence[Peer], victim: str, when: float, limit_s: float = RECOVERY_S
) -> None:
    """The survivors notice, install a view without the victim (a peer_id), and complete a round in it in time."""
    allowed_s = limit_s + round_s(survivors)

    def recovered(peer: Peer) -> float:
        views = [v for v in peer.events("view") if v["time"] >= when and victim not in v["members"]]
        return next((r["time"] for v in views for r in peer.rounds(v["time"])), 0.0)

    cluster.wait(lambda: all(map(recovered, survivors)), "survivors complete a round without the victim", 20)
    for peer in survivors:
        took_s = recovered(peer) - when
        assert took_s < allowed_s, f"{peer.name} took {took_s:.1f} s of {allowed_s:.1f} s\n{cluster.report()}"


def back_again(cluster: Cluster, peers: Sequence[Peer], peer_id: str, after: float) -> None:
    """A newer view has this peer, and all complete a round in it."""

    def together(peer: Peer) -> bool:
        views = [v for v in peer.events("view") if v["time"] > after and peer_id in v["members"]]
        return any(r["view_epoch"] == v["view_epoch"] for v in views for r in peer.rounds(v["time"]))

    cluster.wait(lambda: all(map(together, peers)), f"{peer_id} trains with the others again", 60)


def finish(cluster: Cluster, peers: Sequence[Peer]) -> None:
    """Let it end, and look at everything that anybody wrote down."""
    cluster.hurry()
    cluster.ended(peers)
    others = [p.home for p in cluster.peers if p not in peers]
    check_finished([p.home for p in peers], others, epochs=EPOCHS)


def test_the_first_of_four_is_killed_and_comes_back(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--name", "tiny")
    peers = start(cluster, seed, NAMES)
    first = peers[0].view["members"][0]
    victim = next(p for p in peers if p.peer_id == first)
    survivors = [p for p in peers if p is not victim]
    when = victim.kill_tree()
    go_on_without(cluster, survivors, first, when)
    for peer in survivors:
        assert peer.events("member", peer_id=first, state="DEAD"), f"{peer.name} did not notice"
    assert any(p.events("takeover", **{"from": first}) for p in survivors), "nobody took anything over"
    cluster.restart(victim)
    back_again(cluster, peers, first, when)
    finish(cluster, peers)


def test_the_seeding_peer_is_killed(cluster: Cluster, data: Path) -> None:
    """The peer that brought the data trains too; every shard has another holder, so nothing is lost with it."""
    seed = cluster.seed(data, "--name", "tiny")
    peers = start(cluster, seed, ("seed", "b", "c"))
    cluster.wait(lambda: fully_replicated(peers[1:]), "every shard has a holder besides the seeding peer")
    when = seed.kill_tree()
    go_on_without(cluster, peers[1:], seed.peer_id, when)
    finish(cluster, peers[1:])


def fully_replicated(peers: Sequence[Peer]) -> bool:
    """Whether these peers together have all shards on disk."""
    held = {path.name for p in peers for path in p.home.glob("store/*/shards/*.tar")}
    return len(held) == len({path.name for path in peers[0].home.parent.glob("seed/store/*/shards/*.tar")})
