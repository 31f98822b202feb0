"""Runs as lists of decisions: drawn from a seed, recorded, replayed, shrunk, told."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from p2p_dmc.core.quorum import Quorum
from tests.sim.decisions import apply, written
from tests.sim.invariants import Violation
from tests.sim.weather import Weather
from tests.sim.world import Decision, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a world begins with."""

    peers: int
    quorum: Quorum = Quorum.MAJORITY
    epochs: int = 1_000
    skip_lost: bool = False

    def world(self, trace: Callable[[str], None] | None = None) -> World:
        return World(
            self.peers,
            self.quorum,
            epochs=self.epochs,
            skip_lost=self.skip_lost,
            trace=trace,
        )


@dataclass
class Run:
    """What came of a schedule."""

    setting: Setting
    world: World
    decisions: list[Decision] = field(default_factory=list)
    failure: Exception | None = None


def setting_of(seed: int, *, quorum: Quorum = Quorum.MAJORITY) -> Setting:
    """2 to 8 peers, small worlds more often; now and then a run that ends, or one that gives lost shards up."""
    rng = random.Random(seed)
    return Setting(
        peers=rng.choice([2, 2, 3, 3, 3, 4, 4, 5, 6, 7, 8]),
        quorum=quorum,
        epochs=rng.choice([2, 4, 1_000, 1_000, 1_000, 1_000]),
        skip_lost=rng.random() < 0.2,
    )


def explore(
    seed: int,
    events: int = 300,
    *,
    quorum: Quorum = Quorum.MAJORITY,
    settle: bool = True,
) -> Run:
    """One random life and its happy end: decisions are drawn until so many events have happened."""
    setting = setting_of(seed, quorum=quorum)
    run = Run(setting, setting.world())
    world, decisions = run.world, run.decisions
    weather = Weather(world, random.Random(f"{seed} weather"))
    try:
        for decision in _drawn(weather, events, settle):
            decisions.append(decision)
            apply(world, decision)
        world.checker.finish()
    except Exception as error:  # noqa: BLE001 - whatever a life dies of is what it found
        run.failure = error
    return run


def _drawn(weather: Weather, events: int, settle: bool) -> Iterator[Decision]:
    world = weather.world
    yield from weather.founding()
    end = world.events + events
    while world.events < end and not world.over():
        yield from weather.next()
    if settle and not any(host.boot == 0 for host in world.hosts.values()):
        yield ("settle",)


def replay(setting: Setting, decisions: list[Decision], trace: Callable[[str], None] | None = None) -> Run:
    """The same run again, or what is left of it."""
    run = Run(setting, setting.world(trace), list(decisions))
    try:
        for decision in decisions:
            if trace is not None:
                trace(f"> {written(decision)}")
            apply(run.world, decision)
        run.world.checker.finish()
    except Exception as error:  # noqa: BLE001 - whatever a life dies of is what it found
        run.failure = error
        if trace is not None:
            trace(f"! {error}")
    return run


def shrink(run: Run, most_replays: int = 3_000) -> Run:
    """The fewest decisions that fail in the same way: remove ever smaller chunks, then single ones.

    Source: Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", TSE 28(2), 2002.
    """
    assert run.failure is not None, "nothing failed"
    kind = _kind(run.failure)
    best, left = run, most_replays
    chunk = max(1, len(best.decisions) // 2)
    while left > 0:
        at, shorter = 0, False
        while at < len(best.decisions) and left > 0:
            fewer = best.decisions[:at] + best.decisions[at + chunk :]
            left -= 1
            again = replay(run.setting, fewer)
            if again.failure is not None and _kind(again.failure) == kind:
                best, shorter = again, True
            else:
                at += chunk
        if chunk == 1 and not shorter:
            break
        chunk = max(1, chunk // 2)
    return best


def _kind(error: Exception) -> tuple[str, int]:
    """Failures that count as the same one."""
    return type(error).__name__, error.invariant if isinstance(error, Violation) else -1


def story(run: Run) -> str:
    """The run as a person reads it: every decision, and what the peers made of it."""
    lines: list[str] = []
    replay(run.setting, run.decisions, lines.append)
    return "\n".join(lines)
