"""From the lines that peers write, one for each complete step, to how long a fault disturbed them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, or round, that a peer has completed together with others."""

    time: float  # unix seconds, when it was complete
    number: int
    world: int  # how many peers took part
    group: str  # which group of peers: it changes with every change of members
    digest: str  # of the parameters after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One fault. The first two figures are the slowest survivor's."""

    disturbed_s: float  # length of the round that the fault fell into
    after_s: float  # from the fault to the next complete round
    noticed_s: float | None = None  # from the fault to the first survivor's word of it, where that is known
    rounds_s: tuple[float, ...] = ()  # lengths of undisturbed rounds before it


def disturbed(steps: Sequence[Step], when: float, worlds: frozenset[int]) -> tuple[Step, Step] | None:
    """The last step of the group that a fault at ``when`` fell into, and the first of the group that follows it.

    A group of a size that is not in ``worlds`` is passed over: not all survivors are in it.
    """
    before = next((step.group for step in reversed(steps) if step.time <= when), "")
    found = next((s for s in steps if s.time > when and s.group != before and s.world in worlds), None)
    last = [s for s in steps if found is not None and s.time < found.time and s.group == before]
    return (last[-1], found) if found is not None and last else None


def trial(survivors: Mapping[str, Sequence[Step]], when: float, worlds: frozenset[int]) -> Trial | None:
    """What a fault at ``when`` cost; None while some survivor has not gone on.

    ``worlds``: sizes of the group in which a survivor has gone on.
    """
    pairs = [disturbed(steps, when, worlds) for steps in survivors.values()]
    if not all(pairs):
        return None
    return Trial(
        disturbed_s=max(found.time - last.time for last, found in filter(None, pairs)),
        after_s=max(found.time - when for _, found in filter(None, pairs)),
    )


def undisturbed_s(steps: Sequence[Step], world: int) -> list[float]:
    """Lengths of rounds between two steps of one group of so many peers."""
    return [
        two.time - one.time
        for one, two in pairwise(steps)
        if one.group == two.group and one.world == two.world == world and two.number == one.number + 1
    ]


def differing(peers: Mapping[str, Sequence[Step]]) -> list[str]:
    """Steps that two peers completed in the same group with other parameters."""
    said: dict[tuple[str, int], dict[str, str]] = {}
    for name, steps in peers.items():
        for step in steps:
            said.setdefault((step.group, step.number), {})[name] = step.digest
    return [f"step {n} of {group}: {d}" for (group, n), d in said.items() if len(set(d.values())) > 1]


def figures(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A cell's figures from its lists. The median undisturbed round is taken off each disturbed one."""
    round_s = statistics.median(cell["rounds_s"])
    return {
        "trials": len(cell["disturbed_s"]),
        "median_s": round(statistics.median(cell["disturbed_s"]) - round_s, 3),
        "max_s": round(max(cell["disturbed_s"]) - round_s, 3),
        "round_s": round(round_s, 3),
    }
