"""What docs/placement.md says is what happens: commands, tables, the line about dissent."""

from __future__ import annotations

import re
import shlex
from fractions import Fraction
from pathlib import Path

import pytest

from p2p_dmc.agent.known import DataWatch, Known
from p2p_dmc.cli import main
from p2p_dmc.config import DOMAIN, AgentSettings
from p2p_dmc.core.placement import placement
from p2p_dmc.core.repair import Said, copies_of
from p2p_dmc.data.store import Store
from p2p_dmc.observe.journal import Journal
from tests.agent.helpers import peer
from tests.core.placement_oracle import digests, peers_of
from tests.core.test_placement_balance import assert_held, inclusion
from tests.data.helpers import seed_tree, small_tree

ROOT = Path(__file__).parents[1]
NOTHING = copies_of({}, frozenset(), False, 1)
DOC = (ROOT / "docs" / "placement.md").read_text()


@pytest.mark.parametrize("line", re.findall(r"^    (dmc-peer .*)$", DOC, re.M))
def test_commands(line: str) -> None:
    _, name, *words = shlex.split(line, comments=True)
    context = main.commands[name].make_context(name, words)  # UsageError for what it does not know
    assert not context.params.get("domain") or DOMAIN.fullmatch(context.params["domain"])


def row(start: str, number: int = 0) -> list[str]:
    """The cells after the first of the table row that begins so."""
    line = re.findall(rf"^\| {re.escape(start)} \|(.*)\|$", DOC, re.M)[number]
    return [cell.strip() for cell in line.split("|")]


def test_the_weight_trap() -> None:
    weights = [int(cell.removesuffix("GiB")) for cell in row("capacity")]
    shares = [f"{float(Fraction(2 * weight, sum(weights))):.2f}" for weight in weights]
    assert row("weight's share of two copies") == shares
    likely = inclusion(peers_of(weights), 2)
    assert row("what it is to hold", 0) == [f"{float(p):.2f}" for p in likely.values()]
    assert_held(placement(digests(5000), peers_of(weights), 2), likely)


def test_the_domain_trap() -> None:
    peers = peers_of([100] * 5, row("domain"))
    likely = inclusion(peers, 2)
    assert row("what it is to hold", 1) == [f"{float(p):.2f}" for p in likely.values()]
    assert_held(placement(digests(5000), peers, 2), likely)


def test_the_line_about_dissent(tmp_path: Path) -> None:
    [quoted] = re.findall(r"^> (.*)$", DOC, re.M)
    here, there = re.findall(r"[0-9a-f]{12}", quoted)[::-1]
    store = Store(tmp_path / "store")
    known = Known(
        manifest=seed_tree(small_tree(tmp_path / "tree", folders=1, samples=2), store, name="digits")
    )
    known.place(())
    assert known.placed is not None
    known.others[peer(2)] = Said(copies=NOTHING, placement=bytes.fromhex(there) + b"x" * 10)
    said: list[str] = []
    still_s = AgentSettings().differ_still_ms / 1000
    assert still_s == 20 and "after twenty seconds" in DOC
    watch = DataWatch(said.append, Journal(tmp_path, peer(1)), still_s)
    for now_s in (0.0, still_s):
        watch.dissent(known, {peer(2): "bob"}, now_s)
    assert said == [quoted.replace(here, known.placed.digest().hex()[:12])]


def test_paths_and_links() -> None:
    for path in re.findall(r"`((?:benchmarks|docs|tests)/[\w./]+)`", DOC):
        assert (ROOT / path).exists(), path
