"""Every interleaving of a small world: two or three peers, two rounds, one crash and one restart.

The run is founded and calm. From there, at every step, each of these may be next, and all of them are followed: what
is on its way on any one link arrives; a trainer has done its local steps and its header is said; a collective whose
data has flowed ends well on any member that has not got the result, or, after the crash, fails there; any one peer
crashes (once); the dead one starts again; a live peer sees the dead one's machine refuse, or the restarted one answer;
a download of a start state ends. States that have been seen are not followed again.

The bounds, which the result names:
  rounds     nobody begins a round above the second; the third round's headers, which commit the second, are said
  links      what waits on one link arrives together and in order; what was on its way to a peer that dies is lost
  timers     time passes only when no message is on its way: then every timer is due, detectors have caught up, and
             peers without a view ask to be let in or found the run again; at most `passes` times, after the crash
  checkpoint a restarted peer has the first committed state of each view on its disk, or (another variant) nothing
  depth      where `complete` is false the time was up: then all interleavings of so many steps have been followed

One in `SETTLE_EVERY` ends (no step is left) is followed by mending everything: all must train together again.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tests.sim import calm
from tests.sim.clone import Keys, clone
from tests.sim.decisions import apply, written
from tests.sim.scenario import step
from tests.sim.world import Decision, World

PEERS = ["a", "b", "c"]
LAST_ROUND = 2
PASSES = 1
PASS_MS = 6_000
SETTLE_EVERY = 200


@dataclass
class Found:
    """What an exploration amounts to."""

    variant: str
    states: int = 0
    events: int = 0
    ends: int = 0
    settled: int = 0
    depth: int = 0
    complete: bool = True
    seconds: float = 0.0
    violations: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Result:
    """Of all variants."""

    parts: list[Found]

    def facts(self) -> dict[str, Any]:
        """As documented in explore.py, with the violations."""
        return {
            "states": sum(part.states for part in self.parts),
            "events": sum(part.events for part in self.parts),
            "ends": sum(part.ends for part in self.parts),
            "settled": sum(part.settled for part in self.parts),
            "bounds": {"last_round": LAST_ROUND, "passes": PASSES, "links": "in order, together"},
            "complete": all(part.complete for part in self.parts),
            "variants": {
                part.variant: {
                    "states": part.states,
                    "ends": part.ends,
                    "depth": part.depth,
                    "complete": part.complete,
                    "seconds": round(part.seconds, 1),
                }
                for part in self.parts
            },
            "seconds": round(sum(part.seconds for part in self.parts), 1),
            "violations": [violation for part in self.parts for violation in part.violations],
        }


@dataclass
class Node:
    """A world on the way, with how it came about."""

    world: World
    path: tuple[Decision, ...]
    crashed: str = ""
    restarted: bool = False
    passes: int = 0


def begin(peers: list[str]) -> World:
    """Founded, adopted, calm."""
    world = World(peers)
    step(world, f"founded {' '.join(peers)}", lambda line: None)
    apply(world, ("flush",))
    return world


def steps(node: Node) -> list[Decision]:
    """Everything that may be next."""
    world = node.world
    found: list[Decision] = [("deliver", *link) for link in sorted(world.network.flying)]
    for name, host in world.hosts.items():
        if host.core is None:
            if name == node.crashed and not node.restarted:
                found.append(("restart", name, "dark"))
            continue
        if not node.crashed:
            found.append(("crash", name))
        if host.training and host.own() is None and host.round <= LAST_ROUND + 1:
            found.append(("enter", name, 1))
        if host.reducing is not None and host.round <= LAST_ROUND:
            if host.reducing.done:
                found.append(("finish", name))
            if node.crashed:
                found.append(("fail", name))
        if host.view is not None and not host.opened and host.core.view is host.view:
            found.append(("adopt", name))
        if node.crashed and name != node.crashed:
            dead = world.hosts[node.crashed]
            if dead.core is None:
                found.append(("refused", name, node.crashed))
            elif host.verdicts.get(node.crashed, (0, None))[0] != dead.boot:
                found.append(("probe", name, node.crashed))
    if not world.network.flying and node.passes < PASSES and node.crashed:
        found.append(("pass",))
    return found


def touched(decision: Decision) -> list[str] | None:
    """The hosts that a step changes; None where it may be all."""
    match decision:
        case ("deliver", _, name) | ("finish" | "adopt" | "crash" | "restart", name, *_):
            return [name]
        case ("refused" | "probe", name, other):
            return [name, other]
        case _:
            return None


def follow(node: Node, decision: Decision, checkpoints: bool) -> Node:
    """The world after that."""
    world = clone(node.world, touched(decision))
    new = Node(world, (*node.path, decision), node.crashed, node.restarted, node.passes)
    match decision[0]:
        case "pass":
            new.passes += 1
            time_passes(world)
        case "deliver":
            for _ in range(len(world.network.flying[decision[1], decision[2]])):
                apply(world, decision)
        case "crash":
            new.crashed = decision[1]
            apply(world, decision)
        case "restart":
            new.restarted = True
            apply(world, decision)
        case _:
            apply(world, decision)
    for link in [link for link in world.network.flying if world.hosts[link[1]].core is None]:
        del world.network.flying[link]
    if checkpoints:
        for name, host in world.hosts.items():
            committed, on_disk = host.committed, host.checkpoint
            if host.core is None or committed is None:
                continue
            if on_disk is None or on_disk.ref.lineage[0] < committed.ref.lineage[0]:
                assert name in (touched(decision) or PEERS), f"{name} has committed something by {decision}"
                apply(world, ("checkpoint", name))
    return new


def time_passes(world: World) -> None:
    """All timers are due, detectors have caught up, and whoever has no view does something about it."""
    apply(world, ("wait", PASS_MS))
    for host in list(world.hosts.values()):
        if host.core is not None:
            world.detector.truth(host, world.hosts)
            world.act(host, lambda core, now: core.tick(now))
    for host in list(world.hosts.values()):
        calm.ask(world, host)
        calm.reopen(world, host)
        calm.repeat(world, host.peer_id)


def explore_variant(variant: str, *, checkpoints: bool, peers: list[str], seconds: float) -> Found:
    """Breadth first, until every state has been followed or the time is up."""
    found, keys, seen = Found(variant), Keys(), set()
    began_s = time.monotonic()
    first = Node(begin(peers), ())
    waiting = deque([first])
    seen.add(keys.world(first.world))
    while waiting:
        if seconds and time.monotonic() - began_s > seconds:
            found.complete = False
            break
        node = waiting.popleft()
        found.states += 1
        found.depth = len(node.path)
        events, more = node.world.events, steps(node)
        for decision in more:
            try:
                new = follow(node, decision, checkpoints)
            except AssertionError as error:
                told = "; ".join(map(written, (*node.path, decision)))
                found.violations.append({"part": "exhaustive", "seed": 0, "what": f"{error} after {told}"})
                if len(found.violations) >= 5:
                    return found
                continue
            found.events += new.world.events - events
            key = hash((keys.world(new.world), new.crashed, new.restarted, new.passes))
            if key not in seen:
                seen.add(key)
                waiting.append(new)
        if not more:
            _end(node, found)
    found.seconds = time.monotonic() - began_s
    return found


def _end(node: Node, found: Found) -> None:
    found.ends += 1
    if found.ends % SETTLE_EVERY == 1:
        found.settled += 1
        try:
            calm.settle(clone(node.world))
        except AssertionError as error:
            told = "; ".join(map(written, node.path))
            found.violations.append({"part": "exhaustive", "seed": 0, "what": f"{error} after {told}"})


def explore(*, quick: bool, seconds: float = 0.0) -> Result:
    """Two peers in full, then three for at most so many seconds a variant (0: in full); `quick`: for ten."""
    parts = []
    for peers, limit in ((PEERS[:2], 0.0), (PEERS, 10.0 if quick else seconds)):
        for name, checkpoints in (("no checkpoint", False), ("first checkpoint", True)):
            variant = f"{len(peers)} peers, {name}"
            parts.append(explore_variant(variant, checkpoints=checkpoints, peers=peers, seconds=limit))
    return Result(parts)
