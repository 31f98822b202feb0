"""When the inner optimizer's state is written: after complete rounds, nobody waiting for the disk, and at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2p_dmc.train import inner_keeper, inner_state
from p2p_dmc.train.inner_keeper import InnerKeeper
from p2p_dmc.train.inner_state import InnerState
from p2p_dmc.wire import trainer_messages as tm
from tests.train.scripted import ScriptedAgent
from tests.train.test_loop import LR, Script

PATIENCE_S = 20.0


@dataclass
class FakeRounds:
    histories: tuple[bytes, ...] = (b"h" * 16,)
    lineage: tuple[int, int] | None = None
    steps: int = 0


class Trainer:
    """One parameter, SGD with momentum, rounds that a test decides on."""

    def __init__(self, folder: Path, every_s: float = 0.0, inner: Any = None) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.inner = inner([self.weight]) if inner else torch.optim.SGD([self.weight], lr=0.1, momentum=0.5)
        self.rounds = FakeRounds()
        self.folder = folder
        self.keeper = InnerKeeper(self.inner, [("weight", self.weight)], self.rounds, folder, every_s)

    def step(self, lineage: tuple[int, int] | None = None) -> None:
        """A local step, and the round that it may end in."""
        self.weight.grad = torch.ones(3)
        self.inner.step()
        self.rounds.steps += 1
        if lineage is not None:
            self.rounds.lineage, self.rounds.steps = lineage, 0
        self.keeper.after_step()

    def settle(self) -> None:
        """The keeper's thread is done."""
        thread = self.keeper._thread
        if thread is not None:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    @property
    def momentum(self) -> float:
        return float(self.inner.state[self.weight]["momentum_buffer"][0])

    def on_disk(self) -> InnerState | None:
        return inner_state.read(self.folder)


def momentum_of(state: InnerState | None) -> float:
    assert state is not None
    return float(state.tensors["weight/momentum_buffer"][0])


class Gate:
    """A disk that takes its time: writing begins, and ends when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()
        self._write = inner_state.write
        monkeypatch.setattr(inner_state, "write", self)

    def __call__(self, folder: Path, state: InnerState) -> None:
        self.begun.set()
        assert self.opened.wait(PATIENCE_S)
        self._write(folder, state)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def test_only_a_complete_round_is_written_and_by_another_thread(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    for _ in range(3):
        trainer.step()
    assert trainer.keeper._thread is None, "nothing was complete"
    trainer.step((2, 1))
    trainer.settle()
    assert trainer.on_disk() is None, "the first time there was no room for a copy"
    trainer.step()
    trainer.settle()
    assert trainer.on_disk() is None, "a local step is no complete round"
    trainer.step((2, 2))
    trainer.settle()
    state = trainer.on_disk()
    assert state is not None and state.lineage == (2, 2) and state.ahead == 0
    assert state.history == ("h" * 16).encode().hex() and state.optimizer == "torch.optim.sgd.SGD"
    assert momentum_of(state) == trainer.momentum


def test_what_is_written_is_the_state_at_the_round_while_training_goes_on(tmp_path: Path, gate: Gate) -> None:
    trainer = Trainer(tmp_path)
    trainer.step((2, 1))
    trainer.settle()
    trainer.step((2, 2))
    at_the_round = trainer.momentum
    assert gate.begun.wait(PATIENCE_S)
    for number in range(3, 6):  # the disk is not done, and nobody waits for it
        trainer.step((2, number))
    assert trainer.momentum != at_the_round
    gate.opened.set()
    trainer.settle()
    state = trainer.on_disk()
    assert state is not None and state.lineage == (2, 2)
    assert momentum_of(state) == at_the_round


def test_not_oftener_than_asked_for_but_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(tmp_path, every_s=1e9)
    for number in range(1, 5):
        trainer.step((2, number))
    assert trainer.keeper._thread is None
    trainer.step()
    trainer.step()
    trainer.keeper.close()
    state = trainer.on_disk()
    assert state is not None and (state.lineage, state.ahead) == ((2, 4), 2)
    assert momentum_of(state) == trainer.momentum
    (tmp_path / inner_state.TENSORS).unlink()
    trainer.keeper.close()
    assert trainer.on_disk() is None, "the same state was written twice"
    assert capfd.readouterr().err == ""


def test_the_next_one_is_due_a_while_after_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(inner_keeper, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    trainer = Trainer(tmp_path, every_s=60.0)
    found = []
    for number, now_s in enumerate((159.0, 160.0, 161.0, 220.0, 221.0, 222.0, 281.0), start=1):
        clock[0] = now_s
        trainer.step((2, number))
        trainer.settle()
        state = trainer.on_disk()
        found.append(state.lineage[1] if state else 0)
    assert found == [0, 0, 3, 3, 5, 5, 7], "160: room for the copy; 161, 221, 281: written"


def test_a_state_of_any_layout(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    across = torch.arange(6.0).reshape(2, 3).t()
    trainer.inner.state[trainer.weight]["factor"] = across
    for number in (1, 2):
        trainer.step((2, number))
        trainer.settle()
    for again in ("by the thread", "at the end"):
        state = trainer.on_disk()
        assert state is not None and torch.equal(state.tensors["weight/factor"], across), again
        trainer.step()
        trainer.keeper.close()


def test_a_session_without_a_complete_round_leaves_what_is_there(tmp_path: Path) -> None:
    first = Trainer(tmp_path)
    first.step((2, 1))
    first.keeper.close()
    second = Trainer(tmp_path)
    second.keeper.restore()
    second.step()
    second.keeper.close()
    assert momentum_of(second.on_disk()) == first.momentum != second.momentum


def test_the_end_waits_so_long_and_no_longer(
    tmp_path: Path, gate: Gate, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(tmp_path, every_s=1e9)
    trainer.step((2, 1))
    trainer.keeper.close(wait_s=0.05)
    assert gate.begun.is_set() and trainer.on_disk() is None
    assert "was not on disk" in capfd.readouterr().err
    gate.opened.set()
    trainer.settle()
    assert momentum_of(trainer.on_disk()) == trainer.momentum


def test_the_end_does_not_write_beside_a_writer(
    tmp_path: Path, gate: Gate, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(tmp_path)
    trainer.step((2, 1))
    trainer.settle()
    trainer.step((2, 2))
    assert gate.begun.wait(PATIENCE_S)
    writer = trainer.keeper._thread
    trainer.step((2, 3))
    trainer.keeper.close(wait_s=0.05)
    assert trainer.keeper._thread is writer and "was not on disk" in capfd.readouterr().err


def test_restored_and_told_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = Trainer(tmp_path)
    first.keeper.restore()
    assert capfd.readouterr().err == "", "there was nothing to say"
    first.step((2, 7))
    first.keeper.close()
    second = Trainer(tmp_path)
    second.keeper.restore()
    assert second.momentum == first.momentum
    assert "state of SGD (momentum and the like) restored from view 2 round 7" in capfd.readouterr().err


def test_restored_under_the_history_that_took_its_place(tmp_path: Path) -> None:
    first = Trainer(tmp_path)
    first.step((2, 7))
    first.keeper.close()
    second = Trainer(tmp_path)
    second.rounds.histories = (b"i" * 16, b"h" * 16)
    second.keeper.restore()
    assert second.momentum == first.momentum
    second.step((3, 8))
    second.keeper.close()
    state = second.on_disk()
    assert state is not None and state.history == (b"i" * 16).hex()


@pytest.mark.parametrize("what", ["another optimizer", "damage", "another history", "raises", "no number"])
def test_what_is_not_restored_is_one_line_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    first = Trainer(tmp_path)
    first.step((2, 7))
    if what == "no number":
        first.inner.state[first.weight]["momentum_buffer"][1] = float("nan")
    first.keeper.close()
    second = Trainer(tmp_path, inner=torch.optim.Adam if what == "another optimizer" else None)
    if what == "damage":
        data = (tmp_path / inner_state.TENSORS).read_bytes()
        (tmp_path / inner_state.TENSORS).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    if what == "another history":
        second.rounds.histories = (b"i" * 16,)
    if what == "raises":

        def refuse(state: Any) -> None:
            raise KeyError("mine")

        second.inner.load_state_dict = refuse
    second.keeper.restore()
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    reason = {
        "another optimizer": "it is of torch.optim.sgd.SGD, and the script uses torch.optim.adam.Adam",
        "damage": "inner.safetensors is damaged",
        "another history": "it is of another founding of this run",
        "raises": "'mine'",
        "no number": "restored from view 2 round 7",
    }[what]
    assert reason in said
    assert not second.inner.state
    second.step((3, 1))
    second.keeper.close()
    assert second.on_disk() is not None, "training did not go on"


def test_a_state_that_cannot_be_kept_is_named_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(tmp_path)
    trainer.inner.state[trainer.weight]["history"] = [1, 2]
    for number in range(1, 4):
        trainer.step((2, number))
    trainer.keeper.close()
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "state of SGD is not kept" in said
    assert "'history' of weight is a list" in said
    assert trainer.on_disk() is None


def test_a_disk_that_refuses_is_told_of_and_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").write_text("a file where a folder belongs")
    trainer = Trainer(tmp_path / "home" / "run")
    for number in range(1, 3):
        trainer.step((2, number))
        trainer.settle()
    assert "Not a directory; the optimizer's state is not kept, training goes on" in capfd.readouterr().err
    (tmp_path / "home").unlink()
    trainer.step((2, 3))
    trainer.settle()
    assert momentum_of(trainer.on_disk()) == trainer.momentum


def test_any_other_fault_of_writing_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("a dtype of its own")

    monkeypatch.setattr(inner_state, "write", fails)
    trainer = Trainer(tmp_path)
    for number in range(1, 6):
        trainer.step((2, number))
        trainer.settle()
    trainer.keeper.close()
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "KeyError: 'a dtype of its own'; training goes on" in said


def test_without_any_state_nothing_is_written(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, inner=lambda p: torch.optim.SGD(p, lr=0.1))
    for number in range(1, 4):
        trainer.step((2, number))
    trainer.keeper.close()
    assert trainer.on_disk() is None and not list(tmp_path.iterdir())


def test_no_thread_is_left(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    for number in range(1, 8):
        trainer.step((2, number))
        trainer.settle()
    trainer.keeper.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(inner_keeper.THREAD_PREFIX)]


# -- a whole trainer ----------------------------------------------------------------------------------------------


def momentum_script(agent: ScriptedAgent, **settings: Any) -> Script:
    return Script(agent, inner=lambda p: torch.optim.SGD(p, lr=LR, momentum=0.5), **settings)


def second_start(first: ScriptedAgent, folder: Path) -> ScriptedAgent:
    """An agent of the same home."""
    folder.mkdir()
    agent = ScriptedAgent(folder)
    agent.home, agent.history, agent.replaced = first.home, b"the one after it", (first.history,)
    return agent


def test_a_trainer_that_starts_again_has_its_momentum(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one").mkdir()
    agent = ScriptedAgent(tmp_path / "one")
    one = momentum_script(agent)
    with agent.play(lambda agent: agent.lead(epochs=1)):
        one.run()
    momentum = one.optimizer.state[one.model.w]["momentum_buffer"].clone()
    assert float(momentum) != 0
    kept = inner_state.read(agent.home / "runs" / "test")
    assert kept is not None and kept.lineage == (1, agent.round - 1)

    again = second_start(agent, tmp_path / "two")
    found: list[float] = []
    two = momentum_script(
        again,
        on_batch=lambda: found.append(float(two.optimizer.state[two.model.w].get("momentum_buffer", 0))),
    )
    with again.play(lambda agent: agent.lead(epochs=1)):
        two.run()
    assert found[0] == float(momentum)
    assert f"restored from view 1 round {agent.round - 1}" in capfd.readouterr().err


def test_a_run_that_is_stopped_leaves_its_momentum(tmp_path: Path) -> None:
    agent = ScriptedAgent(tmp_path)

    def play(agent: ScriptedAgent) -> None:
        agent.begin([1.0])
        agent.lease((0, 0, 2))
        agent.end()
        ready = agent.expect(tm.RoundReady)
        agent.reduce(ready.samples, ready.samples)
        agent.complete()
        agent.expect(tm.LeaseRequest)
        agent.send(tm.TrainerStop(reason="the run was stopped"))

    one = momentum_script(agent)
    with agent.play(play), pytest.raises(SystemExit):
        one.run()
    kept = inner_state.read(agent.home / "runs" / "test")
    assert kept is not None and kept.lineage == (1, 1) and kept.ahead == 0
    assert torch.equal(kept.tensors["w/momentum_buffer"], one.optimizer.state[one.model.w]["momentum_buffer"])


def test_a_script_that_fails_leaves_nothing_of_the_step_it_failed_in(tmp_path: Path) -> None:
    agent = ScriptedAgent(tmp_path)
    one = momentum_script(agent)

    def play(agent: ScriptedAgent) -> None:
        agent.begin([1.0])
        agent.lease((0, 0, 2))
        agent.end()
        ready = agent.expect(tm.RoundReady)
        agent.reduce(ready.samples, ready.samples)
        agent.complete()
        agent.lease((1, 0, 2))
        agent.expect(tm.TrainerBye)

    def fail() -> None:
        if one.after_step:
            raise ValueError("in the second step")

    one.on_batch = fail
    with agent.play(play), pytest.raises(ValueError, match="second step"):
        one.run()
    assert inner_state.read(agent.home / "runs" / "test") is None
