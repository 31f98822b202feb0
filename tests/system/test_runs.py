"""Runs that go well, and scripts and samples that do not: what `dmc-peer join` comes to, as real processes."""

from __future__ import annotations

from pathlib import Path

from tests.system.checks import check_finished
from tests.system.cluster import Cluster, Peer
from tests.system.scenario import NAMES, START_S, arguments, finish, start

FEW_EPOCHS = 3
BAD_KEY = "2/00106"  # in the first shard of the epoch: much of it is left when the trainers are back
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
    cluster.hurry()
    seed, script = cluster.seed(data, "--name", "tiny"), bad_sample("kill", "--delay-ms", "2000")
    peers = [cluster.join(name, seed, *script, "--slow", str(cluster.slow)) for name in NAMES[:2]]

    def deaths() -> int:
        return sum(len(p.events("trainer_exit", signal="SIGSEGV")) for p in peers)

    cluster.wait(lambda: deaths() == 2, "two trainers have died", START_S)
    cluster.slow.touch()  # the run must not end before both are back
    cluster.wait(lambda: all(len(p.view["members"]) == 2 for p in peers), "both are back", START_S)
    cluster.hurry()
    cluster.ended(peers)
    assert deaths() == 2
    check_put_aside(peers)


def test_a_sample_that_makes_nan_is_put_aside(cluster: Cluster, data: Path) -> None:
    seed, script = cluster.seed(data, "--name", "tiny"), bad_sample("nan")
    peers = [cluster.join(name, seed, *script, options=["--min-peers", "2"]) for name in NAMES[:2]]
    cluster.ended(peers)
    assert all(len(p.events("not_finite")) == 2 for p in peers), "two rounds have shown it"
    check_put_aside(peers)


def bad_sample(fault: str, *more: str) -> list[str]:
    """A script's arguments: one epoch, a round after each step, and one sample with a fault."""
    return ["--epochs", "1", "--tau", "1", "--fault", fault, "--key", BAD_KEY, *more]


def check_put_aside(peers: list[Peer]) -> None:
    """The sample is skipped and named, with few others; all the rest counts once."""
    check_finished([p.home for p in peers], epochs=1, skipped=MOST_SKIPPED)
    named = {key for p in peers for event in p.events("given_up") for key in event["keys"]}
    assert BAD_KEY in named, f"{BAD_KEY} is not among {named}"
