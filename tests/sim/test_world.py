"""Random lives of whole peers end well; they are reproducible, notice what is wrong, and shrink to what matters."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from p2p_dmc.core import quorum
from p2p_dmc.core.agreement_messages import Verdict
from p2p_dmc.core.quorum import Quorum
from tests.sim import calm
from tests.sim.decisions import apply, written
from tests.sim.invariants import Violation
from tests.sim.model import Model
from tests.sim.mutants import mutant
from tests.sim.scenario import step
from tests.sim.schedule import Run, explore, replay, setting_of, shrink, story
from tests.sim.weather import Weather
from tests.sim.world import World


def well(run: Run) -> Run:
    assert run.failure is None, story(run)
    return run


class TestLives:
    @pytest.mark.parametrize("first", range(0, 120, 30))
    def test_they_end_well(self, first: int) -> None:
        runs = [well(explore(seed)) for seed in range(first, first + 30)]
        assert all(run.world.events >= 300 or run.world.over() for run in runs)

    @pytest.mark.parametrize("rule", [Quorum.STRICT, Quorum.ANY])
    def test_with_other_quorums(self, rule: Quorum) -> None:
        for seed in range(200, 225):
            well(explore(seed, quorum=rule))

    def test_everything_happens_in_them(self) -> None:
        runs = [well(explore(seed, settle=False)) for seed in range(300, 340)]
        assert sum(run.world.faults for run in runs) > 300
        assert sum(run.world.checker.commits for run in runs) > 300
        verbs = {decision[0] for run in runs for decision in run.decisions}
        assert verbs >= {
            "crash",
            "restart",
            "freeze",
            "cut",
            "deaf",
            "withdraw",
            "leave",
            "fail",
            "drop",
            "twice",
        }
        assert verbs >= {
            "checkpoint",
            "lose",
            "bad",
            "wipe",
            "stop",
            "arm",
            "force",
            "refused",
            "suspect",
            "jump",
        }
        assert "evict" in verbs
        evicted = [view for run in runs for view in run.world.checker.began.values() if view.evicted]
        assert evicted and all(view.parent for view in evicted)
        hosts = [host for run in runs for host in run.world.hosts.values()]
        assert any(host.held.ledger.epoch for host in hosts) and any(
            host.outcome == "finished" for host in hosts
        )

    def test_runs_are_stopped_in_them_and_some_peers_hear_that_all_did(self) -> None:
        climates = [
            (seed, Weather(setting_of(seed).world(), random.Random(f"{seed} weather"))) for seed in range(90)
        ]
        runs = [well(explore(seed, settle=False)) for seed, weather in climates if weather.stops]
        stops, kept, resumed = (
            sum(getattr(run.world, name) for run in runs) for name in ("stops", "kept", "resumed")
        )
        assert stops - 5 > kept > 10 and resumed > 10
        assert {decision[0] for run in runs for decision in run.decisions} >= {"stop", "tell", "end"}


class TestReproduction:
    def test_a_seed_is_a_life(self) -> None:
        assert explore(5).decisions == explore(5).decisions

    def test_decisions_are_a_life(self) -> None:
        run = explore(7)
        again = replay(run.setting, run.decisions)
        assert again.world.events == run.world.events and again.world.now == run.world.now
        assert {n: h.held.ref for n, h in again.world.hosts.items()} == {
            n: h.held.ref for n, h in run.world.hosts.items()
        }

    def test_the_wall_clock_does_not_matter(self) -> None:
        """Time comes in, and it is the monotonic one, which starts anywhere on each host."""
        run = explore(11)
        calm_clocks = [decision for decision in run.decisions if decision[0] != "jump"]
        rng = random.Random(1)
        wild: list[tuple[object, ...]] = []
        for decision in calm_clocks:
            wild += [decision, ("jump", rng.choice(["p0", "p1"]), rng.randrange(-(10**10), 10**10))]
        traces: list[list[str]] = [[], []]
        for decisions, trace in zip((calm_clocks, wild), traces, strict=True):
            replay(run.setting, decisions, trace.append)
        told = [[line for line in trace if not line.startswith("> jump")] for trace in traces]
        assert told[0] == told[1]


class TestNotices:
    @pytest.mark.parametrize("rule", ["joint", "quorum", "forgotten", "with_checkpoint", "record", "fresh"])
    def test_a_missing_rule(self, rule: str) -> None:
        with mutant(rule):
            assert any(explore(seed, settle=False).failure for seed in range(60))

    def test_that_nothing_happens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calm, "SETTLE_MS", 3_000)
        monkeypatch.setattr(calm, "mend", lambda world: None)
        world = World(3)
        with pytest.raises(Violation, match="nothing happens"):
            apply(world, ("settle",))

    def test_a_sample_that_counts_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A trainer whose delta has other samples than its header says."""
        world = World(["a", "b"])
        _begin(world)
        apply(world, ("enter", "a"))
        trainer = world.hosts["a"].trainer
        assert trainer is not None
        trainer.local.append(replace(trainer.local[0], lo=0, hi=1))
        with pytest.raises(Violation, match="invariant 6: divided by"):
            apply(world, ("enter", "b"))

    def test_two_states_of_one_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = World(["a", "b"])
        _begin(world)
        apply(world, ("enter", "a"))
        apply(world, ("enter", "b"))
        apply(world, ("finish", "a"))
        host = world.hosts["b"]
        wrong: Model = replace(host.outcome_of(host.reducing), ref=replace(host.held.ref, lineage=(1, 1)))
        monkeypatch.setattr(host, "outcome_of", lambda collective: wrong)
        with pytest.raises(Violation, match="invariant 3: one lineage names two states"):
            apply(world, ("finish", "b"))

    @pytest.mark.parametrize("lineage", [(1, 1), (1, 2)])
    def test_that_an_eviction_loses_what_the_others_know(
        self, lineage: tuple[int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """b knows that (1, 2) is committed, and goes on from an older state, or from that one."""
        world = World(["a", "b"])
        for command in ["founded a b", *["round a b"] * 3, "cut a", "silent a / b", "force b"]:
            step(world, command, lambda line: None)
        (line,) = world.checker.line.values()
        assert line[-1].model.ref.lineage == (1, 2)
        start = world.checker.names[world.hosts["b"].core.history, lineage].ref  # type: ignore[union-attr]
        monkeypatch.setattr(quorum, "start_state", lambda words: start)
        if lineage == (1, 1):
            with pytest.raises(
                Violation, match=r"invariant 4: view 2 .* without the evicted .* goes on from"
            ):
                apply(world, ("evict", "b", "a"))
        else:
            apply(world, ("evict", "b", "a"))
            assert len(world.checker.began) == 2

    def test_operators_evict_nobody_that_is_heard(self) -> None:
        world = World(["a", "b"])
        for command in ["founded a b", "round a b", "cut a", "silent a / b", "force b", "heal", "probe a b"]:
            step(world, command, lambda line: None)
        apply(world, ("evict", "b", "a"))
        assert len(world.checker.began) == 1


def _begin(world: World) -> None:
    apply(world, ("found", *world.hosts))
    apply(world, ("flush",))
    for name in world.hosts:
        apply(world, ("adopt", name))


class TestShrinking:
    def test_what_is_left_is_short_and_fails_alike(self) -> None:
        with mutant("quorum"):
            seed = next(seed for seed in range(60) if explore(seed, settle=False).failure)
            run = explore(seed, settle=False)
            short = shrink(run, most_replays=400)
            assert short.failure is not None and len(short.decisions) < len(run.decisions)
            assert isinstance(short.failure, Violation) and isinstance(run.failure, Violation)
            assert short.failure.invariant == run.failure.invariant
            told = story(short)
        assert all(f"> {written(decision)}" in told for decision in short.decisions)
        assert told.splitlines()[-1] == f"! {short.failure}"

    def test_seeds_differ_in_their_setting(self) -> None:
        settings = {setting_of(seed) for seed in range(60)}
        assert {setting.peers for setting in settings} == set(range(2, 9)) and len(settings) > 10


def happen(world: World, *decisions: str) -> None:
    for decision in decisions:
        verb, *words = decision.split()
        apply(world, (verb, *(int(word) if word.isdigit() else word for word in words)))


class TestTheWorld:
    """It is no harder than the real one."""

    def test_whoever_has_just_been_found_has_not_been_silent(self) -> None:
        world = World(["a", "b"])
        happen(world, "found a b", "flush", "wait 100", "cut b 1", "truth a")
        assert "b" not in world.hosts["a"].verdicts
        happen(world, "wait 1500", "truth a")
        assert world.hosts["a"].verdicts["b"][1] is Verdict.UNREACHABLE

    def test_a_frozen_learner_gets_its_result_however_late(self) -> None:
        world = World(["a", "b"])
        happen(world, "found a b", "flush", "calm 200")
        world.arrive("c")
        learner = world.hosts["c"]
        for _ in range(400):
            calm.turn(world)
            if learner.learning and all(host.training for host in world.hosts.values()):
                break
        happen(world, "finish a", "finish b", "enter a 2 0", "enter b 2 0", "enter c 0 0", "flush")
        assert learner.reducing is not None and learner.learning
        world._flow(learner.reducing)
        assert learner.reducing.done
        happen(world, "freeze c", "calm 5000")
        assert world.hosts["a"].round > learner.round + 30
        world.network.flying.clear()  # nobody tells it of a later view
        happen(world, "thaw c", "calm 5000")
        view = world.hosts["a"].view
        assert view is not None and "c" in view.peers
