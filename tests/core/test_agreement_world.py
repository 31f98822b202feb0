"""Random lives of the whole protocol, and what they notice when a rule is missing."""

from __future__ import annotations

import pytest

from p2p_dmc.core.quorum import Quorum
from tests.core import agreement_world
from tests.sim.mutants import mutant
from tests.core.agreement_world import Violation, World, run


class TestWorld:
    @pytest.mark.parametrize("seed", range(24))
    def test_random_lives_end_well(self, seed: int) -> None:
        world = run(seed, 500)
        assert world.installs > 1 and world.rounds > 0

    @pytest.mark.parametrize("quorum", [Quorum.STRICT, Quorum.ANY])
    def test_other_quorums_are_safe(self, quorum: Quorum) -> None:
        for seed in range(6):
            run(seed, 300, quorum=quorum, settle=quorum is Quorum.STRICT)

    def test_the_same_seed_is_the_same_life(self) -> None:
        lives = [run(5, 300, settle=False) for _ in range(2)]
        assert len({(life.installs, life.rounds, life.now, len(life.net)) for life in lives}) == 1

    def test_faults_happen(self) -> None:
        lives = [run(seed, 500, settle=False) for seed in range(12)]
        assert sum(life.faults for life in lives) > 10 and sum(len(life.commits) for life in lives) > 100

    @pytest.mark.parametrize("rule", ["joint", "quorum", "forgotten", "with_checkpoint", "record", "fresh"])
    def test_it_notices_a_missing_rule(self, rule: str) -> None:
        with mutant(rule), pytest.raises(AssertionError):
            for seed in range(200):
                run(seed, 600, settle=False)

    def test_it_notices_that_nothing_happens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(agreement_world, "SETTLE_MS", 5_000)
        world = World(3, 3)
        world.found_all()
        monkeypatch.setattr(world, "linked", lambda source, destination: False)
        for host in world.hosts.values():
            world.force(host)
        with pytest.raises(Violation, match="nothing happens"):
            world.settle()
