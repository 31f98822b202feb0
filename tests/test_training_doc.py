"""What docs/training.md shows runs, and what it names is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
import torch.nn.functional as F

import p2p_dmc as dmc
from p2p_dmc.agent.training import BAD_ROUNDS
from p2p_dmc.train.names import STATISTICS
from tests.train.loading import Leader
from tests.train.scripted import ScriptedAgent

ROOT = Path(__file__).parents[1]
DOC = (ROOT / "docs" / "training.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", DOC, re.M | re.S)


def test_the_script_runs(tmp_path: Path) -> None:
    leader = Leader(epochs=2)
    agent = ScriptedAgent(tmp_path)
    with agent.play(leader), dmc.connect(agent.environment) as peer:
        model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
        optimizer = dmc.Optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), peer, tau=2, model=model)
        loader = peer.loader(
            peer.dataset("numbers"), 2, epochs=2, decode=lambda s: (torch.tensor([float(s["txt"])]), 1.0)
        )
        names = {"peer": peer, "model": model, "optimizer": optimizer, "loader": loader, "torch": torch}
        names["loss_of"] = lambda output, y: F.mse_loss(output.flatten().float(), y.float())
        [block] = BLOCKS
        exec(block, names)
    assert sum(ready.samples for ready in leader.said) == 20
    assert sum(ready.steps for ready in leader.said) == 5
    assert optimizer.param_groups[0]["lr"] < 0.1
    assert {spec.name.rpartition(".")[2] for spec in agent.parameters} == {"weight", "bias", *STATISTICS}


def test_what_it_says() -> None:
    assert BAD_ROUNDS == 3 and "three rounds in a row" in DOC
    for name in re.findall(r"`((?:docs|benchmarks)/[\w./]+)`", DOC):
        assert (ROOT / name).exists(), name


def test_a_local_step_costs_less_than_a_hundredth() -> None:
    """The committed measurement."""
    result = json.loads((ROOT / "benchmarks" / "results" / "local_step.json").read_text())
    assert not result["violations"] and not result["quick"]
    assert result["over"] < 0.01
    assert 2.9 < result["rss_models"] < 3.2 and result["slots"] == 2
