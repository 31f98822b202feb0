"""What a loader's state says, and what loading it means where the ledger is the truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p2p_dmc.errors import UserError
from p2p_dmc.train.loader import Loader
from tests.train.loading import Leader, Trainer, numbers
from tests.train.scripted import ScriptedAgent


@pytest.fixture
def agent(tmp_path: Path) -> ScriptedAgent:
    return ScriptedAgent(tmp_path)


def test_a_state_names_where_the_run_is(agent: ScriptedAgent) -> None:
    states: list[dict[str, Any]] = []

    def loop(one: Trainer, loader: Loader) -> None:
        states.append(loader.state_dict())
        for batch in loader:
            one.step(batch)
            states.append(json.loads(json.dumps(loader.state_dict())))

    one = Trainer(agent, 2, epochs=2, num_workers=2)
    with agent.play(Leader(epochs=2)):
        one.run(loop)
    fixed = {"version": 1, "dataset": agent.manifest.digest.hex(), "seed": 0}
    history = agent.history.hex()
    assert states[0] == fixed | {"history": "", "epoch": 0, "round": 0}
    assert [state["round"] for state in states] == [0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 5]
    assert [state["epoch"] for state in states] == [0] * 6 + [1] * 5
    assert all(state == state | fixed and state["history"] == history for state in states[1:])


@pytest.mark.parametrize("early", [True, False])
def test_a_loaded_state_moves_nothing(
    agent: ScriptedAgent, capsys: pytest.CaptureFixture[str], early: bool
) -> None:
    """Also not when the run has lost rounds since: that is said, and their samples come again."""
    state = {"version": 1, "dataset": agent.manifest.digest.hex(), "seed": 0}
    state |= {"history": agent.history.hex(), "epoch": 0}

    def loop(one: Trainer, loader: Loader) -> None:
        if early:
            loader.load_state_dict(state | {"round": 0})
            loader.load_state_dict(state | {"round": 3})
        for batch in loader:
            if not early and not one.batches:
                loader.load_state_dict(state | {"round": 3})
            one.step(batch)
        loader.load_state_dict(state | {"round": 1})

    one = Trainer(agent, 2)
    with agent.play(Leader()):
        one.run(loop)
    assert one.numbers == numbers(agent)
    assert capsys.readouterr().err.splitlines() == [
        "the loader's state is of round 3, the run goes on from round 0: later ones were lost, and their samples "
        "come again"
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dataset": "ff" * 16}, "is of data set ffffffffffff, not of"),
        ({"seed": 3}, "is of seed=3, the loader has seed=0"),
        ({"version": 2}, "of version 2"),
        ({"round": "3"}, "give what loader.state_dict"),
        ({"more": 1}, "give what loader.state_dict"),
    ],
)
def test_a_state_of_other_data_is_refused(agent: ScriptedAgent, change: dict[str, Any], said: str) -> None:
    def loop(one: Trainer, loader: Loader) -> None:
        with pytest.raises(UserError, match=said):
            loader.load_state_dict(loader.state_dict() | change)
        one.all_batches(loader)

    one = Trainer(agent, 2)
    with agent.play(Leader()):
        one.run(loop)


def test_a_state_of_another_run_is_refused(agent: ScriptedAgent) -> None:
    def loop(one: Trainer, loader: Loader) -> None:
        loader.load_state_dict(loader.state_dict() | {"history": "ab" * 16, "round": 2})
        with pytest.raises(UserError, match=r"of history abababab, .* join the run that it was saved in"):
            next(iter(loader))
        one.all_batches(loader)  # who goes on has been told

    one = Trainer(agent, 2)
    with agent.play(Leader()):
        one.run(loop)
    assert one.numbers == numbers(agent)
