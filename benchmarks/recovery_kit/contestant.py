"""What a trial does to a contestant's peers, whoever they are, and the trials themselves."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from recovery_kit.steps import Step, Trial, trial, undisturbed_s

Found = TypeVar("Found")

KINDS = ("tree", "trainer", "leave", "silence")
POLL_S = 0.05
TOGETHER_STEPS = 4
"""A trial begins after so many steps of all peers in one group: nothing of the trial before goes on."""


class Contestant(Protocol):
    """N peers that train together on this machine; a context manager that leaves nothing behind."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def patience_s(self) -> float:
        """How long it may take them to begin, to go on after a fault, or to be together again."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...

    def start(self) -> None:
        """Start all peers; HungError."""

    def steps(self, name: str) -> Sequence[Step]:
        """The complete steps of one peer so far."""

    def worlds(self, kind: str) -> frozenset[int]:
        """In a group of what size survivors go on after a fault."""

    def fault(self, kind: str, name: str) -> float:
        """Do it to one peer; when, in unix seconds."""

    def noticed(self, name: str, when: float) -> float | None:
        """From the fault to the first survivor's word of it, in seconds; None where nobody writes that down."""

    def bring_back(self, kind: str, name: str) -> None:
        """Let that peer take part again; returns at once. HungError."""

    def said(self) -> str:
        """Everybody's last words, for a failure."""

    def violations(self) -> list[str]:
        """What they wrote down that must not be."""


class HungError(Exception):
    """Somebody did not begin, go on or come back in time."""


def run_trials(
    contestant: Contestant, kind: str, count: int, rng: random.Random, until: float, calm_s: float
) -> Iterator[Trial]:
    """So many faults one after the other.

    Each comes at a random moment of a round, to a random peer, ``calm_s`` after the last change of members at least.
    No trial begins after ``until`` (monotonic seconds). HungError when nothing more will come.
    """
    names, since = list(contestant.names), 0.0
    for _ in range(count):
        if time.monotonic() > until:
            return
        wait(contestant, partial(together, contestant, since, calm_s), "all peers train together")
        usual = usual_rounds(contestant, since)
        time.sleep(rng.random() * max(usual))
        victim = rng.choice(names)
        survivors = [name for name in names if name != victim]
        when = contestant.fault(kind, victim)
        measured = wait(
            contestant,
            partial(recovered, contestant, survivors, when, contestant.worlds(kind)),
            f"the others go on after {kind} of {victim}",
        )
        since = time.time()
        yield replace(measured, rounds_s=tuple(usual), noticed_s=contestant.noticed(victim, when))
        contestant.bring_back(kind, victim)


def recovered(
    contestant: Contestant, survivors: Sequence[str], when: float, worlds: frozenset[int]
) -> Trial | None:
    """The trial, once all survivors have gone on."""
    return trial({name: contestant.steps(name) for name in survivors}, when, worlds)


def together(contestant: Contestant, since: float, calm_s: float) -> bool:
    """Whether the newest steps of all peers are in one group of all, which stands for so long, after ``since``."""
    groups = set()
    for name in contestant.names:
        newest = contestant.steps(name)[-TOGETHER_STEPS:]
        fresh = [s for s in newest if s.time > since and s.world == len(contestant.names)]
        if len(fresh) < TOGETHER_STEPS:
            return False
        oldest = next(step for step in contestant.steps(name) if step.group == fresh[-1].group)
        if fresh[-1].time - oldest.time < calm_s:
            return False
        groups |= {step.group for step in fresh}
    return len(groups) == 1


def usual_rounds(contestant: Contestant, since: float) -> list[float]:
    """Undisturbed rounds of one peer, the newest."""
    name = contestant.names[0]
    fresh = [step for step in contestant.steps(name) if step.time > since]
    return undisturbed_s(fresh, len(contestant.names))[1 - TOGETHER_STEPS :]


def wait(contestant: Contestant, look: Callable[[], Found | None], what: str) -> Found:
    """What ``look`` returns once it is something."""
    deadline = time.monotonic() + contestant.patience_s
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(POLL_S)
    raise HungError(f"not so after {contestant.patience_s:g} s: {what}\n{contestant.said()}")
