"""What docs/partitions.md and docs/checkpoints.md quote is what the program says, and their commands are commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from p2p_dmc.agent.aside import Aside
from p2p_dmc.agent.checkpoints import write_checkpoint
from p2p_dmc.agent.entering import Entrance, OtherPeer
from p2p_dmc.agent.state import SlotPool
from p2p_dmc.agent.waiting import Patience
from p2p_dmc.cli import main
from p2p_dmc.config import AgentSettings
from p2p_dmc.core.ledger import Ledger
from p2p_dmc.core.quorum import Decision
from p2p_dmc.observe.narrator import Narrator
from tests.agent.helpers import DATASET, NUMEL, PARAMETERS, peer, run_meta, state, surroundings
from tests.core.agreement_cluster import UNREACHABLE, Cluster
from tests.core.agreement_cluster import state as state_of

DOCS = Path(__file__).parents[1] / "docs"
PARTITIONS = (DOCS / "partitions.md").read_text()
CHECKPOINTS = (DOCS / "checkpoints.md").read_text()


@pytest.mark.parametrize("line", re.findall(r"^    (dmc-peer .*)$", PARTITIONS + CHECKPOINTS, re.M))
def test_commands(line: str) -> None:
    _, name, *words = shlex.split(line, comments=True)
    main.commands[name].make_context(name, words)  # UsageError for what it does not know


def test_links() -> None:
    for text in (PARTITIONS, CHECKPOINTS):
        for target in re.findall(r"\]\(([^)]+)\)", text):
            assert (DOCS / target).exists(), target


# -- why a peer waits ---------------------------------------------------------------------------------------------


def reasons() -> Iterator[str]:
    """What is said in the situations of the table, in its order."""
    two = Cluster("ab").run("ab")
    two.kill("a", UNREACHABLE)
    two.wait(5_000)
    yield two["b"].waiting_for() or ""
    five = Cluster("abcde").run("abcde")
    five.kill("abc", UNREACHABLE)
    five.do("d", five["d"].wants_change("a collective failed", five.now, at_once=True))
    for name in "de":
        five.do(name, five[name].at_barrier(five.now))
    five.deliver()
    yield five["d"].waiting_for() or ""
    three = Cluster("abc").run("abc")
    for name in "abc":
        three.do(name, three[name].checkpointed((1, 1), three.now))
    three.cores.clear()
    for name in "bc":
        three.start(name, boot=2, completed=state_of(1, 1))
    three.found()
    yield three["b"].waiting_for() or ""
    start = state_of(1, 1)
    yield Decision(holds=False, start=start, known=None, absent=("a",)).describe()
    asked = Cluster("ab").run("ab")
    asked.cut.add(("a", "b"))
    asked.do("b", asked["b"].at_barrier(asked.now))
    asked.deliver()
    yield asked["b"].waiting_for() or ""
    nothing = Mock(waiting="")
    Aside(nothing)._stand_aside(("a",), 0.0)
    yield re.sub(r"(others hear): .*", r"\1: ...", nothing.waiting)
    left = Cluster("abc").run("abc")
    left.cut |= {("a", "c"), ("b", "c"), ("c", "a"), ("c", "b")}
    left.verdict("c", UNREACHABLE, by="ab")
    left.wait(1_000)
    left.cut.clear()
    left.do("c", left["c"].wants_change("a collective failed", left.now, at_once=True))
    left.wait(5_000)
    yield left["c"].waiting_for() or ""
    door = Entrance(2, 700, 500)
    yield door.step(run_meta(), peer(1), (), False).waiting
    yield door.step(run_meta(), peer(1), (), True).waiting
    yield door.step(run_meta(), peer(1), (), True, courted=bytes.fromhex("1f2e3d4c" * 4)).waiting
    mine = run_meta(history=b"1" * 16, samples=5)
    other = OtherPeer(peer_id="1f2e3d4c" * 4, meta=run_meta(history=b"2" * 16, samples=9))
    step = door.step(mine, peer(1), (other,), True)
    yield re.sub(r" \(.*\): ", " ...: ", step.waiting)


def test_each_reason_to_wait_is_explained_as_it_is_said() -> None:
    table = PARTITIONS[PARTITIONS.index("## Why a peer says that it waits") :]
    said = re.findall(r"^\| `([^`]+)`", table, re.M)
    assert list(reasons()) == said


def test_the_line_of_a_join_that_waits() -> None:
    patience = Patience("train")
    why = "1 of 2 members of view 1 answer; waiting for a (86cbc55a)"
    assert patience.look(why, 0.0) == ""
    assert f"    {patience.look(why, 3.0)}\n" in PARTITIONS


def test_the_line_of_the_evicted() -> None:
    line = {"event": "history_given_up", "replaced": True, "lineage": [1, 4], "peer_id": "a" * 32}
    [said] = Narrator().event(line)
    assert f"`{said}`" in PARTITIONS


# -- checkpoints --------------------------------------------------------------------------------------------------


def test_files_and_numbers(tmp_path: Path) -> None:
    slots = SlotPool(surroundings(tmp_path).services.memory, NUMEL)
    held = state(slots, (3, 7), 1.0, Ledger.start(DATASET, [4], 1, 1))
    path = write_checkpoint(tmp_path / "run", held, PARAMETERS, b"h" * 16, False, 3)
    described = re.findall(r"^\| `([a-z.]+)` \|", CHECKPOINTS, re.M)
    assert sorted(described) == sorted(file.name for file in path.iterdir())
    settings = AgentSettings()
    assert (settings.checkpoints_kept, settings.checkpoint_every_s) == (3, 60.0)
    assert "The newest three are kept." in CHECKPOINTS and "then every minute" in CHECKPOINTS
