"""A trainer that is killed, and a run that is stopped, go on with their momentum; and what is exported meanwhile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from p2p_dmc.agent.client import ask
from p2p_dmc.train import inner_state
from tests.system.cluster import Cluster, Peer
from tests.system.scenario import finish, start, train_together
from tests.system.test_commands import command, facts

RESTORED = re.compile(r"state of SGD \(momentum and the like\) restored from view (\d+) round (\d+)")


def restored(peer: Peer) -> list[tuple[int, int]]:
    """From which rounds its trainers say that they have their momentum, in order."""
    text = (peer.home / "trainer.log").read_text(errors="replace")
    return [(int(view_epoch), int(number)) for view_epoch, number in RESTORED.findall(text)]


def kept(peer: Peer) -> tuple[int, int] | None:
    """The round of the optimizer's state on its disk."""
    try:
        state = inner_state.read(peer.home / "runs" / "train")
    except ValueError:  # its trainer has just replaced it
        return None
    return state.lineage if state is not None else None


@pytest.mark.long
def test_momentum_outlives_the_trainer_and_is_exported(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--name", "tiny")
    peers = start(cluster, seed, ("a", "b"), "--checkpoint-every", "1s", script=("--momentum", "0.5"))
    a, b = peers
    cluster.wait(lambda: all(map(kept, peers)), "both have written their optimizer's state down")
    before = kept(a)
    when = a.kill_trainer()
    train_together(cluster, peers, after=when)
    [once] = restored(a)
    assert before is not None and once >= before, f"restored {once}, and {before} was there"
    assert not restored(b), "its trainer was never started again"
    cluster.wait(lambda: any(e["time"] > when for e in a.events("checkpoint")), "a checkpoint since")
    see_export(cluster, a, "checkpoint")

    assert ask([b.address], "stop")["stopping"]
    cluster.ended(peers)
    end = max(line["time"] for p in peers for line in p.rounds())
    stopped_at = [(line["view_epoch"], line["round"]) for line in a.rounds()][-1]
    assert kept(a) == kept(b) == stopped_at, "the end was not written down"
    for peer in peers:
        cluster.restart(peer)
    train_together(cluster, peers, after=end)
    assert restored(a) == [once, stopped_at] and restored(b) == [stopped_at]
    finish(cluster, peers)
    assert facts(cluster, "export", "--home", str(b.home), str(cluster.root / "b.pt"))["from"] == "final"
    see_export(cluster, a, "final")


def see_export(cluster: Cluster, peer: Peer, kind: str) -> None:
    """Export from its home, whether or not its agent runs: torch goes on with it."""
    out = cluster.root / f"{kind}.pt"
    said = facts(cluster, "export", "--with-optimizer", "--home", str(peer.home), str(out))
    assert said["from"] == kind and said["optimizer"]["class"] == "torch.optim.sgd.SGD"
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    model.load_state_dict(torch.load(out, weights_only=True))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    inner.load_state_dict(torch.load(said["optimizer"]["out"], weights_only=True))
    assert inner.param_groups[0]["momentum"] == 0.5
    buffers = [inner.state[p]["momentum_buffer"] for p in model.parameters()]
    assert all(buffer.abs().sum() > 0 for buffer in buffers)
    if kind == "final":
        whole = safetensors.torch.load(peer.final())
        assert same(whole, dict(model.state_dict()))
        words = command(cluster, "export", "--home", str(peer.home), str(out.with_suffix(".safetensors")))
        assert "final model of run 'train'" in words
        assert same(whole, safetensors.torch.load_file(out.with_suffix(".safetensors")))


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
