"""Steps that tests of running peers share: start a run, see that the others went on, that one came back, finish."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from p2p_dmc.observe.audit import Audit
from p2p_dmc.observe.phases import ENV_ORDERS
from tests.system.checks import check_finished
from tests.system.cluster import Cluster, Peer

EPOCHS = 20
NAMES = ("a", "b", "c", "d")
RECOVERY_S = 3.0
"""What survivors may take to their next complete round after a kill, besides a round's own time."""
SILENCE_S = 8.0
"""The same after SIGSTOP, where suspicion takes its time."""
START_S = 90.0
"""Four interpreters that import torch at once on a busy machine."""


def arguments(cluster: Cluster, *more: str, epochs: int = EPOCHS) -> list[str]:
    """The script's, for a run that is slow until `cluster.hurry()`."""
    return ["--epochs", str(epochs), "--slow", str(cluster.slow), *more]


def start(
    cluster: Cluster,
    seed: Peer,
    names: Sequence[str],
    *options: str,
    epochs: int = EPOCHS,
    script: Sequence[str] = (),
) -> list[Peer]:
    """Joins that train slowly; returns when all of them have done some rounds together.

    ``options`` are for `join`, ``script`` for the script.
    """
    said = arguments(cluster, *script, epochs=epochs)
    peers = [cluster.join(n, seed, *said, options=["--min-peers", str(len(names)), *options]) for n in names]
    for peer in peers:
        cluster.listening(peer)
    train_together(cluster, peers)
    return peers


def train_together(cluster: Cluster, peers: Sequence[Peer], after: float = 0.0) -> None:
    """Wait until exactly these peers are a view, newer than ``after``, and have completed two rounds in it."""
    names = {p.name for p in peers}

    def together(peer: Peer) -> bool:
        views = [v for v in peer.events("view") if v["time"] > after]
        if not views or {p.name for p in peers if p.peer_id in views[-1]["members"]} != names:
            return False
        same = [r for r in peer.rounds(after) if r["view_epoch"] == views[-1]["view_epoch"]]
        return len(views[-1]["members"]) == len(names) and len(same) >= 2

    cluster.wait(lambda: all(map(together, peers)), f"rounds of {', '.join(sorted(names))} together", START_S)


def obeys(cluster: Cluster, peer: Peer) -> Path:
    """The folder for orders to the peer, which has to be started yet."""
    folder = cluster.root / f"orders-{peer.name}"
    folder.mkdir(exist_ok=True)
    peer.environment[ENV_ORDERS] = str(folder)
    return folder


def struck(cluster: Cluster, folder: Path, phase: str, times: int = 1) -> float:
    """When a peer carried out its order for the phase, which it has to have done so often."""

    def proof() -> list[dict[str, Any]]:
        path = folder / "proof"
        lines = path.read_text().splitlines() if path.exists() else []
        return [one for one in map(json.loads, lines) if one["phase"] == phase]

    cluster.wait(lambda: len(proof()) == times, f"an order for {phase} is carried out", START_S)
    return float(proof()[-1]["time"])


def round_s(peers: Sequence[Peer]) -> float:
    """How long a round usually takes, from one line to the next."""
    times = [line["time"] for line in peers[0].rounds()]
    return statistics.median(two - one for one, two in pairwise(times))


def recovered(peer: Peer, victim: str, when: float) -> float:
    """When this peer completed a round in a view without the victim (a peer_id), installed after ``when``; or 0."""
    views = [v for v in peer.events("view") if v["time"] >= when and victim not in v["members"]]
    return next((r["time"] for v in views for r in peer.rounds(v["time"])), 0.0)


def go_on_without(
    cluster: Cluster, survivors: Sequence[Peer], victim: str, when: float, limit_s: float = RECOVERY_S
) -> float:
    """The survivors notice, install a view without the victim, and complete a round in it in time; the longest."""
    allowed_s = limit_s + round_s(survivors)
    cluster.wait(
        lambda: all(recovered(p, victim, when) for p in survivors),
        "survivors complete a round without the victim",
        START_S,
    )
    took_s = max(recovered(p, victim, when) - when for p in survivors)
    assert took_s < allowed_s, f"survivors took {took_s:.1f} s of {allowed_s:.1f} s\n{cluster.report()}"
    return took_s


def finish(cluster: Cluster, peers: Sequence[Peer], *, epochs: int = EPOCHS) -> Audit:
    """Let it end, and look at everything that anybody wrote down."""
    cluster.hurry()
    cluster.ended(peers)
    others = [p.home for p in cluster.peers if p not in peers]
    return check_finished([p.home for p in peers], others, epochs=epochs)
