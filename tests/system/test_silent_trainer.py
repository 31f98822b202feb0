"""A trainer that is stopped while its agent lives: nobody waits for it at the barrier for ever."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.system.cluster import Cluster
from tests.system.scenario import finish, start, train_together

PATIENCE_S = 40.0
"""The agent's own is 15 s of its clock, which a busy machine stretches."""


@pytest.mark.long
def test_a_stopped_trainer_is_killed_and_started_again(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--name", "tiny")
    peers = start(cluster, seed, ["a", "b"])
    stopped = peers[0].trainer()
    assert stopped is not None
    when = time.time()
    stopped.send_signal(signal.SIGSTOP)
    cluster.wait(lambda: bool(peers[0].events("trainer_silent")), "its agent has noticed", PATIENCE_S)
    train_together(cluster, peers, after=when)
    assert peers[0].events("trainer_exit", signal="SIGKILL"), "it was noticed and not ended"
    assert peers[1].events("trainer_lost", peer_id=peers[0].peer_id), "the other one was not told"
    finish(cluster, peers)
