"""A fraction of what explore.py, partitions.py and promise_age.py do, and how they say it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from p2p_dmc.core import quorum
from p2p_dmc.core.agreement_messages import Propose, StateRef
from p2p_dmc.core.quorum import Quorum
from tests.sim import exhaust, explore, partitions, promise_age
from tests.sim.clone import Values, clone
from tests.sim.decisions import apply
from tests.sim.moves import Place

FOLDER = Path(__file__).parent


def least(words: Sequence[Propose]) -> StateRef:
    """A view that starts from the least state of its members."""
    return min((word.completed for word in words), key=lambda state: state.lineage)


def plainly(peers: list[str]) -> tuple[set[Any], set[Any], int]:
    """The same search in copied worlds: the values of its states and of its ends, and how many steps went wrong."""
    values, tidy = Values(brief=True), exhaust.tidier(False, peers)
    first = exhaust.begin(peers)
    tidy(first)
    waiting = [(first, exhaust.Fate(), 0)]
    states, ends, wrong = {(values.world(first), exhaust.Fate())}, set(), 0
    while waiting:
        world, fate, passes = waiting.pop()
        hosts = {name: exhaust.facts(host) for name, host in world.hosts.items()}
        flowed = [key for key, one in world.collectives.items() if one.done]
        moved = False
        for decision in exhaust.steps(hosts, sorted(world.network.flying), flowed, fate, passes, peers):
            new, later = clone(world), fate.after(decision)
            try:
                exhaust.play(new, decision, tidy)
            except AssertionError:
                wrong, moved = wrong + 1, True
                continue
            views = {host.view.view_id for host in new.hosts.values() if host.view is not None}
            for book in (new.collectives, new.results):
                for key in [key for key in book if key[0] not in views]:
                    del book[key]
            value = values.world(new), later
            moved = moved or value != (values.world(world), fate)
            if value not in states:
                states.add(value)
                waiting.append((new, later, passes + (decision[0] == "pass")))
        if not moved:
            ends.add((values.world(world), fate))
    return states, ends, wrong


class TestExhaustive:
    @pytest.fixture(autouse=True)
    def one_round(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exhaust, "MOST_ROUNDS", 1)

    def test_two_peers_and_a_round_in_every_order(self) -> None:
        """Steps that are looked up lead to the states that copied worlds come to, and to no others."""
        found = exhaust.explore_variant("two", checkpoints=False, peers=["a", "b"], seconds=0.0)
        states, ends, wrong = plainly(["a", "b"])
        assert found.complete and found.violations == [] and wrong == 0
        assert found.states == len(states) > 1_000 and found.ends == len(ends) > 50

    def test_what_nobody_looks_at_again_makes_no_difference(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without it there are as many kinds of ends; with it, more states."""
        kinds, values, tidy = [], Values(brief=True), exhaust.tidier(False, ["a", "b"])
        for brief in (True, False):
            search = exhaust.Search("two", ["a", "b"], ["a", "b"], checkpoints=False, brief=brief)
            ends = set()

            def end(place: Place, number: int) -> None:
                world = search.moves.world(place)  # noqa: B023
                tidy(world)
                ends.add(values.world(world))  # noqa: B023

            monkeypatch.setattr(search, "_end", end)
            found = search.run(0.0)
            assert found.complete and found.violations == []
            kinds.append((ends, found.states))
        assert kinds[0][0] == kinds[1][0] and kinds[0][1] < kinds[1][1]

    def test_it_notices_what_is_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quorum, "start_state", least)
        found = exhaust.explore_variant("two", checkpoints=False, peers=["a", "b"], seconds=0.0)
        assert len(found.violations) == exhaust.MOST_VIOLATIONS and plainly(["a", "b"])[2] > 0

    def test_a_crash_is_seen(self) -> None:
        """The survivor counts the dead one out, and goes on alone."""
        search = exhaust.Search("two", ["a", "b"], ["b"], checkpoints=False)
        place = search.first
        for decision in (("crash", "b"), ("refused", "a", "b")):
            place, _, _ = search.moves.after(place, decision)
        core = search.moves.world(place).hosts["a"].core
        assert core is not None and core.view is not None and core.view.peers == ("a",)

    def test_a_copy_is_the_same_state_and_goes_its_own_way(self) -> None:
        world, values = exhaust.begin(["a", "b", "c"]), Values(brief=False)
        other = clone(world)
        assert values.world(world) == values.world(other)
        apply(other, ("enter", "a", 1))
        assert values.world(world) != values.world(clone(other))
        apply(world, ("enter", "a", 1))
        assert values.world(clone(world)) == values.world(clone(other))

    def test_what_is_complete_is_not_followed_again(self) -> None:
        saved: list[int] = []

        one = partial(exhaust.explore_variant, checkpoints=False, peers=["a", "b"], seconds=0.5)
        work = {name: partial(one, name) for name in ("known", "begun", "new")}
        known = {
            "known": exhaust.Found("known", states=7, ends=1, depth=3, events=9),
            "begun": exhaust.Found("begun", states=7, complete=False),
        }
        told = exhaust.Result.parts_of(json.loads(json.dumps(exhaust.Result(list(known.values())).facts())))
        assert told == known
        found = exhaust.explore(work, known=told, save=lambda result: saved.append(len(result.parts)))
        assert [part.variant for part in found.parts] == list(work) and saved == [2, 3]
        assert found.parts[0] == known["known"] and min(part.states for part in found.parts[1:]) > 7


class TestRandomLives:
    def test_those_that_failed_are_lived_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        result = tmp_path / "explore.json"
        monkeypatch.setattr(explore, "RESULT", result)
        monkeypatch.setattr(sys, "argv", ["explore.py", "--part", "random", "--schedules", "2", "--out"])
        with monkeypatch.context() as wrong:
            wrong.setattr(quorum, "start_state", least)
            wrong.setattr(explore, "tell", lambda *_: None)
            assert explore.main() == 1
        seeds = [violation["seed"] for violation in json.loads(result.read_text())["violations"]]
        assert seeds
        assert explore.main() == 0
        whole = json.loads(result.read_text())
        assert whole["violations"] == [] and whole["random"]["schedules"] == 2
        assert f"{whole['schedules']} schedules" in capsys.readouterr().out


class TestPartitions:
    @pytest.mark.parametrize("rule", list(Quorum))
    @pytest.mark.parametrize("instant", partitions.INSTANTS)
    def test_three_peers(self, rule: Quorum, instant: str) -> None:
        active, _ = partitions.cut(3, ("p0",), rule, instant)
        assert active == (2 if rule is Quorum.ANY else 1)

    @pytest.mark.parametrize("side", [("p0",), ("p0", "p3"), ("p0", "p1", "p2")])
    def test_four_peers(self, side: tuple[str, ...]) -> None:
        assert partitions.cut(4, side, Quorum.MAJORITY, "in a proposal")[0] == 1

    def test_all_cuts(self) -> None:
        assert [len(list(partitions.sides(peers, every=True))) for peers in (2, 3, 4, 5, 8)] == [
            1,
            3,
            7,
            15,
            127,
        ]


def test_the_age_of_promises_is_counted() -> None:
    facts = promise_age.measure(0, 25, "shell")
    assert promise_age.both_go_on("late") and not promise_age.both_go_on("shell")
    assert facts["violations"] == 0 and facts["crashes_seen"] > 10 and facts["decisions"] > 100


def test_the_program() -> None:
    program = [sys.executable, str(FOLDER / "explore.py"), "--part", "random", "--schedules", "20", "--json"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=200, check=False)
    facts = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and facts["violations"] == [] and facts["random"]["schedules"] == 20
    assert facts["schedules"] == 20 and facts["events"] > 20 * 300
