"""Runs that go well, and scripts and samples that do not: what `dmc-peer join` comes to, as real processes."""

from __future__ import annotations

from pathlib import Path

from tests.system.checks import check_finished
from tests.system.cluster import Cluster, Peer
from tests.system.scenario import NAMES, arguments, finish, start

FEW_EPOCHS = 3
MOST_SKIPPED = 8
"""A bad sample may take what was handed out with it along, two batches at most."""


def test_four_join_and_finish(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--name", "tiny")
    script = ["--epochs", str(FEW_EPOCHS)]
    peers = [cluster.join(name, seed, *script, options=["--min-peers", "4"]) for name in NAMES]
    cluster.ended(peers)
    found = check_finished([p.home for p in peers], epochs=FEW_EPOCHS)
    assert found.compared == len(found.rounds) and len(found.rounds[0]["counted"]) >= 4
    sums = {p.log("out").read_text() for p in peers}
    assert len(sums) == 1 and sums.pop().startswith("parameters sum to "), "scripts end with other parameters"
    for peer in peers:
        assert str(peer.home / "runs" / "train" / "final" / "model.safetensors") in peer.said()

    rounds = len(peers[0].rounds())
    cluster.restart(peers[0])
    cluster.ended(peers[:1])
    assert "is finished" in peers[0].said(), peers[0].said()
    assert len(peers[0].rounds()) == rounds


def test_peers_that_are_there_before_their_seed(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    """They wait for it and say so. Where it will listen is known from a first start."""
    seed = cluster.seed(data, "--name", "tiny")
    seed.interrupt()
    cluster.ended([seed])
    script = ["--epochs", str(FEW_EPOCHS)]
    peers = [cluster.join(name, seed, *script, options=["--min-peers", "2"]) for name in NAMES[:2]]
    cluster.wait(lambda: all("no peer answers" in p.said() for p in peers), "they say that they wait")
    cluster.restart(seed)
    cluster.ended(peers)
    check_finished([p.home for p in peers], epochs=FEW_EPOCHS)


def test_another_model_is_refused_and_a_script_that_raises_leaves(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--name", "tiny")
    a, b = start(cluster, seed, NAMES[:2])
    other = cluster.join("other", seed, *arguments(cluster, "--hidden", "8"))
    raising = cluster.join("raising", seed, *arguments(cluster, "--fault", "raise"))
    cluster.ended([other, raising], code=1)
    last = other.said().splitlines()[-1]
    assert "parameter" in last and "--run" in last, f"not one line that names the difference: {other.said()}"
    assert "Traceback" not in other.said()
    assert not other.rounds(), "a peer with another model has trained"
    last = raising.said().splitlines()[-1]
    assert "train.py failed" in last and "is broken" in last, raising.said()
    assert len(raising.events("trainer_exit")) == 1, "a script that raises is not started again"
    assert any(raising.peer_id in v["members"] for v in a.events("view")), "it never trained"
    finish(cluster, [a, b])


def test_a_sample_that_kills_trainers_is_put_aside(cluster: Cluster, data: Path) -> None:
    """Two trainers die of it, then it is skipped, and only what both had in hand with it."""
    peers = run_with_a_bad_sample(cluster, data, "kill")
    deaths = [e for p in peers for e in p.events("trainer_exit", signal="SIGSEGV")]
    assert len(deaths) == 2, f"it killed {len(deaths)} trainers\n{cluster.report()}"


def test_a_sample_that_makes_nan_is_put_aside(cluster: Cluster, data: Path) -> None:
    peers = run_with_a_bad_sample(cluster, data, "nan")
    assert all(not p.events("trainer_exit", signal="SIGSEGV") for p in peers)
    assert all(len(p.events("not_finite")) == 2 for p in peers), "two rounds have shown it"


def run_with_a_bad_sample(cluster: Cluster, data: Path, fault: str) -> list[Peer]:
    """One epoch on two peers. It finishes; the sample is skipped and named; all the rest counts once."""
    key = "2/00002"
    seed = cluster.seed(data, "--name", "tiny")
    script = ["--epochs", "1", "--tau", "1", "--fault", fault, "--key", key]
    peers = [cluster.join(name, seed, *script, options=["--min-peers", "2"]) for name in NAMES[:2]]
    cluster.ended(peers)
    check_finished([p.home for p in peers], epochs=1, skipped=MOST_SKIPPED)
    named = {k for p in peers for event in p.events("given_up") for k in event["keys"]}
    assert key in named, f"{key} is not among {named}"
    return peers
