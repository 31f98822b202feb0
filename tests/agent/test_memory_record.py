"""What a killed agent left in memory: taken when it is whole, newer than any checkpoint and of this history."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from p2p_dmc.agent import memory_record
from p2p_dmc.agent.checkpoints import list_checkpoints, write_checkpoint
from p2p_dmc.agent.home import Home, MemoryFolder
from p2p_dmc.agent.state import Held, SlotPool
from p2p_dmc.agent.state_keeper import StateKeeper
from p2p_dmc.core.agreement_messages import Promises
from tests.agent.helpers import NUMEL, PARAMETERS, peer, state, surroundings

HISTORY = b"h" * 16
PROMISES = Promises(n=9, history=HISTORY)


class Disk(MemoryFolder):
    """In the home instead of /dev/shm: nothing outside of the test's folder."""

    def __init__(self, root: Path) -> None:
        (root / "home").mkdir(exist_ok=True)
        super().__init__(Home(root / "home"), peer(1))


@pytest.fixture(autouse=True)
def _no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2p_dmc.agent.home.os.access", lambda *_: False)


def keeper_on(root: Path) -> tuple[StateKeeper, list[str]]:
    """The next agent's keeper, of a run that this home has been in."""
    around = surroundings(root)
    services = replace(around.services, memory=Disk(root))
    made = StateKeeper("r", root / "run", services, PROMISES)
    made.open(PARAMETERS)
    return made, around.said


def leave(root: Path, lineage: tuple[int, int] = (3, 7), history: bytes = HISTORY) -> Held:
    """An agent that held this state, and was killed."""
    slots = SlotPool(Disk(root), NUMEL)
    held = state(slots, lineage=lineage, value=5.0)
    memory_record.write_record("r", history, held)
    return held


def test_the_next_agent_takes_it(tmp_path: Path) -> None:
    left = leave(tmp_path)
    bits = left.slot.read_bytes()
    keeper, said = keeper_on(tmp_path)
    assert keeper.current is not None and keeper.current.ref == left.ref
    assert keeper.current.slot != left.slot and keeper.current.slot.read_bytes() == bits
    assert keeper.current.ledger == left.ledger and keeper.current.tau == left.tau
    assert "goes on from what its killed agent left in memory" in said[0]
    assert not left.slot.parent.exists(), "the leftover is gone"


def test_each_completed_round_replaces_the_record(tmp_path: Path) -> None:
    keeper, _ = keeper_on(tmp_path)
    for number in (1, 2, 3):
        keeper.hold(state(keeper.pool(), lineage=(3, number), value=float(number)))
    newest = keeper.current
    again, _ = keeper_on(tmp_path)
    assert newest is not None and again.current is not None and again.current.ref == newest.ref


def test_a_newer_checkpoint_is_preferred(tmp_path: Path) -> None:
    leave(tmp_path, (3, 7))
    slots = SlotPool(Disk(tmp_path), NUMEL)
    newer = state(slots, lineage=(3, 8), value=6.0)
    write_checkpoint(tmp_path / "run", newer, PARAMETERS, HISTORY, False, 2)
    assert len(list_checkpoints(tmp_path / "run")) == 1
    keeper, said = keeper_on(tmp_path)
    assert keeper.current is not None and keeper.current.ref == newer.ref and "checkpoint" in said[0]


def test_memory_comes_before_an_older_checkpoint_when_the_newest_is_damaged(tmp_path: Path) -> None:
    left = leave(tmp_path, (3, 7))
    slots = SlotPool(Disk(tmp_path), NUMEL)
    for number in (6, 7):
        made = write_checkpoint(
            tmp_path / "run", state(slots, lineage=(3, number), value=5.0), PARAMETERS, HISTORY, False, 2
        )
    (made / "model.safetensors").write_bytes(b"")
    keeper, said = keeper_on(tmp_path)
    assert keeper.current is not None and keeper.current.ref == left.ref
    assert "3-7 is skipped" in said[0] and "left in memory" in said[1]


def damage(held: Held) -> None:
    np.memmap(held.slot, dtype="<f4", mode="r+")[3] += 1


def cut(held: Held) -> None:
    held.slot.write_bytes(held.slot.read_bytes()[:-4])


def spoil(held: Held) -> None:
    (record,) = held.slot.parent.glob("current-*")
    record.write_bytes(record.read_bytes()[:-1])


def lose(held: Held) -> None:
    held.slot.unlink()


@pytest.mark.parametrize("harm", [damage, cut, spoil, lose])
def test_what_is_not_whole_is_not_taken(tmp_path: Path, harm: object) -> None:
    held = leave(tmp_path)
    harm(held)  # type: ignore[operator]
    keeper, said = keeper_on(tmp_path)
    assert keeper.current is None and said == []
    assert not list((tmp_path / "home" / "memory").glob("*/current-*")), "it is not tried again"
    keeper.pool().take()


@pytest.mark.parametrize("point", ["write_bytes", "replace"])
def test_an_agent_killed_while_it_writes_leaves_the_record_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    keeper, _ = keeper_on(tmp_path)
    keeper.hold(state(keeper.pool(), lineage=(3, 1), value=1.0))
    whole = keeper.current

    def killed(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        if point == "replace":
            patch.setattr(memory_record.os, "replace", killed)
        else:
            patch.setattr(Path, "write_bytes", killed)
        keeper.hold(state(keeper.pool(), lineage=(3, 2), value=2.0))
    again, _ = keeper_on(tmp_path)
    assert whole is not None and again.current is not None and again.current.ref == whole.ref


def test_another_history_is_not_taken(tmp_path: Path) -> None:
    leave(tmp_path, history=b"x" * 16)
    keeper, _ = keeper_on(tmp_path)
    assert keeper.current is None


def test_what_lay_there_before_a_power_cut_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(tmp_path)
    monkeypatch.setattr(memory_record, "_power", lambda: "another start of the system")
    keeper, _ = keeper_on(tmp_path)
    assert keeper.current is None


def test_another_run_leaves_it_alone(tmp_path: Path) -> None:
    held = leave(tmp_path)
    memory = Disk(tmp_path)
    services = replace(surroundings(tmp_path).services, memory=memory)
    other = StateKeeper("other", tmp_path / "other", services, PROMISES)
    other.open(PARAMETERS)
    assert other.current is None and held.slot.exists()
    memory.remove()
    assert not held.slot.exists(), "an agent that ends leaves nothing of its predecessors either"


def test_a_run_that_is_over_leaves_no_record(tmp_path: Path) -> None:
    keeper, _ = keeper_on(tmp_path)
    keeper.hold(state(keeper.pool(), lineage=(3, 1), value=1.0))
    folder = keeper.pool().folder
    keeper.discard()
    assert folder.exists() and not list(folder.glob("current-*"))
