"""A fraction of what explore.py, partitions.py and promise_age.py do, and how they say it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from p2p_dmc.core import quorum
from p2p_dmc.core.quorum import Quorum
from tests.sim import exhaust, partitions, promise_age
from tests.sim.clone import Keys, clone
from tests.sim.decisions import apply

FOLDER = Path(__file__).parent


class TestExhaustive:
    def test_two_peers_and_a_round_in_every_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exhaust, "LAST_ROUND", 1)
        found = exhaust.explore_variant("two", checkpoints=False, peers=["a", "b"], seconds=0.0)
        assert found.complete and found.violations == [] and found.states > 1_000 and found.ends > 20

    def test_it_notices_what_is_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A view that starts from the least state of its members."""
        least = lambda words: min((word.completed for word in words), key=lambda state: state.lineage)  # noqa: E731
        monkeypatch.setattr(exhaust, "LAST_ROUND", 1)
        monkeypatch.setattr(quorum, "start_state", least)
        found = exhaust.explore_variant("two", checkpoints=False, peers=["a", "b"], seconds=0.0)
        assert found.violations

    def test_a_copy_is_the_same_state_and_goes_its_own_way(self) -> None:
        world, keys = exhaust.begin(["a", "b", "c"]), Keys()
        other = clone(world)
        assert keys.world(world) == keys.world(other)
        apply(other, ("enter", "a", 1))
        assert keys.world(world) != keys.world(clone(other))
        apply(world, ("enter", "a", 1))
        assert keys.world(clone(world)) == keys.world(clone(other))


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
