"""What docs/loader.md shows runs, and its options and lines are the program's."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import track

import p2p_dmc as dmc
from p2p_dmc.train.loader import Loader
from p2p_dmc.train.session import NOT_THE_SCRIPTS
from tests.train.loading import Leader, number, numbers
from tests.train.scripted import ScriptedAgent

DOC = (Path(__file__).parents[1] / "docs" / "loader.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", DOC, re.M | re.S)


def test_the_scripts_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent = ScriptedAgent(tmp_path)
    bad = numbers(agent)[3]
    seen: list[float] = []

    def decode(sample: dict[str, Any]) -> torch.Tensor:
        if number(sample) == bad:
            raise ValueError("truncated")
        return torch.tensor([number(sample)])

    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.extend(x.flatten().tolist())
            return super().forward(x)

    leader = Leader(epochs=3)
    with agent.play(leader), dmc.connect(agent.environment) as peer:
        model = Model(1, 1, bias=False)
        optimizer = dmc.Optimizer(torch.optim.SGD(model.parameters(), lr=1e-4), peer, tau=2)
        names = {"peer": peer, "data": peer.dataset("numbers"), "decode": decode, "track": track}
        names |= {"model": model, "optimizer": optimizer}
        for block in BLOCKS:
            exec(block, names)
    assert seen == [x for epoch in range(3) for x in numbers(agent, epoch) if x != bad]
    assert sum(hi - lo for ready in leader.said for lo, hi in ready.skipped) == 3
    said = capsys.readouterr().err.splitlines()[0]
    [shown] = re.findall(r"^    (skipped: .*)$", DOC, re.M)
    assert re.sub("'.*?'", "*", said) == re.sub("'.*?'", "*", shown)


def test_the_options_are_the_loaders() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", DOC, re.M)
    taken = list(inspect.signature(Loader).parameters)
    assert sorted(listed) == sorted(set(taken) - {"peer", "data"})
    defaults = {name: one.default for name, one in inspect.signature(Loader).parameters.items()}
    assert (defaults["epochs"], defaults["seed"], defaults["on_error"], defaults["num_workers"]) == (
        1,
        0,
        "stop",
        0,
    )
    [refused] = re.findall(r"^torch's (.*?) are refused", DOC, re.M)
    assert re.findall(r"`(\w+)`", refused) == [*NOT_THE_SCRIPTS]
