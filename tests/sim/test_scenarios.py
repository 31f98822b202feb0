"""Every scenario leaves the trace that stands in its file, and every mutant is noticed by one of them."""

from __future__ import annotations

import os

import pytest

from tests.sim.decisions import VERBS, parsed, written
from tests.sim.mutants import MUTANTS, mutant
from tests.sim.scenario import FOLDER, Scenario

FILES = sorted(FOLDER.glob("*.txt"))
NAMES = [path.stem for path in FILES]
CATCHES = [(path.stem, rule) for path in FILES for rule in Scenario.read(path.read_text()).setting("catches")]


@pytest.mark.parametrize("name", NAMES)
def test_trace(name: str) -> None:
    path = FOLDER / f"{name}.txt"
    text = path.read_text()
    now = Scenario.read(text).played().written()
    if os.environ.get("REWRITE"):
        path.write_text(now)
    assert now == path.read_text(), (
        "the trace has changed: write it with REWRITE=1 and look at the difference"
    )


@pytest.mark.parametrize(("name", "rule"), CATCHES)
def test_it_notices_that_a_rule_is_missing(name: str, rule: str) -> None:
    scenario = Scenario.read((FOLDER / f"{name}.txt").read_text())
    with mutant(rule), pytest.raises(AssertionError):
        scenario.played()


def test_every_rule_has_a_scenario() -> None:
    assert {rule for _, rule in CATCHES} == set(MUTANTS)


def test_decisions_are_written_and_read() -> None:
    for decision in (("enter", "a", 2, 0, "b"), ("jump", "a", -5), ("heal",)):
        assert parsed(written(decision)) == decision
    with pytest.raises(ValueError, match="no such verb: 'ente'"):
        parsed("ente a")
    assert all(function.__doc__ for function in VERBS.values())
