"""Every interleaving of a small world: two or three peers, two rounds, one crash and one restart.

The run is founded and calm. From there, at every step, each of these may be next, and all of them are followed: what
is on its way on any one link arrives; a trainer has done its local steps and its header is said; a collective whose
data has flowed ends well on any member that has not got the result, or fails there because a member has died; one peer
crashes (each peer is a variant of its own); the dead one starts again; a live peer sees the dead one's machine refuse,
or the restarted one answer; a download of a start state ends. States that have been seen are not followed again.

The bounds, which the result names:
  rounds     two rounds are trained in all, in however many views: nobody begins one from a state that has two in it;
             the headers that follow, which commit the second, are said
  links      what waits on one link arrives together and in order; what was on its way to a peer that dies is lost
  headers    reach everybody that lives at once
  failures   a collective fails only in a view of which a member has died
  timers     time passes only when no message is on its way and nobody has a step, a download or a result before it:
             then every timer is due, detectors have caught up, and peers without a view ask to be let in or found the
             run again; at most `passes` times, after the crash
  checkpoint a restarted peer has the first committed state of each view on its disk, or (another variant) nothing
  depth      where `complete` is false the time was up: then all interleavings of so many steps have been followed

No interleaving within these bounds is left out: there is no partial-order reduction, and no symmetry (the core breaks
ties by name). What makes it affordable is that a state is a few numbers and a step is computed once for all states in
which it is the same (`moves.py`), which leaves the states as they are; and that what nobody will look at again does not
tell two states apart (`clone.Values`, `brief`): headers and pre-votes of a view that a frozen peer has left, headers
that came too early for a view that can no longer be installed, the memory of a peer that will restart from its disk;
and what only a crash of its sender would make count, where that one will not crash (`forget`).
What the checker remembers is part of a state, so that every invariant is checked after every step with every past that
it depends on. A state is recognised by 96 bits of its digest; for ten million states the odds that two of them share
one are below 1 : 10^14. What is found is played again from the beginning in an ordinary world, and told with its steps.
Silence without a crash, cut links and failures without a death are left to the random lives.

One in `SETTLE_EVERY` ends (no step changes anything) is followed by mending everything: all must train together again.
Seconds are of CPU time.
"""

from __future__ import annotations

import gc
import marshal
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

from p2p_dmc.core.agreement_messages import MemberId, Promised, Propose, Verdict
from tests.sim import calm
from tests.sim.clone import clone
from tests.sim.decisions import apply, written
from tests.sim.host import Host
from tests.sim.moves import Moves, Place
from tests.sim.scenario import step
from tests.sim.world import Decision, World

T = TypeVar("T")

PEERS = ["a", "b", "c"]
MOST_ROUNDS = 2
PASSES = 1
PASS_MS = 6_000
SETTLE_EVERY = 500
MOST_VIOLATIONS = 5
LOOK_EVERY = 64
"""Reading a process's clock may take longer than following a state."""


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

    @staticmethod
    def parts_of(facts: dict[str, Any]) -> dict[str, Found]:
        """By their names, from what `facts` said of them."""
        said = facts.get("variants", {})
        return {name: Found(name, **one) for name, one in said.items() if "events" in one}

    def facts(self) -> dict[str, Any]:
        """As documented in explore.py, with the violations."""
        return {
            "states": sum(part.states for part in self.parts),
            "events": sum(part.events for part in self.parts),
            "ends": sum(part.ends for part in self.parts),
            "settled": sum(part.settled for part in self.parts),
            "bounds": {
                "rounds": MOST_ROUNDS,
                "passes": PASSES,
                "links": "in order, together",
                "failures": "in views of which a member has died",
                "timers": "when nothing else is to be done",
            },
            "complete": all(part.complete for part in self.parts),
            "variants": {
                part.variant: {
                    "states": part.states,
                    "events": part.events,
                    "ends": part.ends,
                    "settled": part.settled,
                    "depth": part.depth,
                    "complete": part.complete,
                    "seconds": round(part.seconds, 1),
                }
                for part in self.parts
            },
            "seconds": round(sum(part.seconds for part in self.parts), 1),
            "violations": [violation for part in self.parts for violation in part.violations],
        }


class Facts(NamedTuple):
    """What a host may do next, as far as that follows from its own state."""

    up: bool
    boot: int
    enters: bool
    reduces: tuple[bytes, int] | None
    members: frozenset[tuple[str, int]]
    """Of its view: peer and incarnation."""
    adopts: bool
    verdicts: dict[str, tuple[int, Verdict]]


class Fate(NamedTuple):
    """Of the one that crashes."""

    peer: str = ""
    restarted: bool = False

    def after(self, decision: Decision) -> Fate:
        match decision[0]:
            case "crash":
                return Fate(decision[1])
            case "restart":
                return Fate(self.peer, True)
            case _:
                return self


def facts(host: Host) -> Facts:
    core, view = host.core, host.view
    reducing = host.reducing if host.held.depth < MOST_ROUNDS else None
    return Facts(
        up=core is not None,
        boot=host.boot,
        enters=host.training and host.own() is None and host.held.depth <= MOST_ROUNDS,
        reduces=None if reducing is None else (reducing.view.view_id, reducing.round),
        members=frozenset([(m.peer_id, m.boot) for m in view.members]) if view is not None else frozenset(),
        adopts=core is not None and view is not None and not host.opened and core.view is view,
        verdicts=host.verdicts,
    )


def steps(
    hosts: dict[str, Facts],
    links: list[tuple[str, str]],
    flowed: Collection[tuple[bytes, int]],
    fate: Fate,
    passes: int,
    victims: Collection[str],
) -> list[Decision]:
    """Everything that may be next."""
    found: list[Decision] = [("deliver", *link) for link in links]
    busy = bool(links)
    for name, host in hosts.items():
        if not host.up:
            if name == fate.peer and not fate.restarted:
                found.append(("restart", name, "dark"))
            continue
        if not fate.peer and name in victims:
            found.append(("crash", name))
        if host.enters:
            found.append(("enter", name, 1))
        if host.reduces in flowed:
            found.append(("finish", name))
        if host.reduces is not None and (fate.peer, 1) in host.members:
            found.append(("fail", name))
        if host.adopts:
            found.append(("adopt", name))
        busy = busy or host.enters or host.adopts or host.reduces in flowed
        if fate.peer and name != fate.peer:
            found += _sight(name, host, fate.peer, hosts[fate.peer])
    if fate.peer and not busy and passes < PASSES:
        found.append(("pass",))
    return found


def _sight(name: str, host: Facts, peer: str, dead: Facts) -> list[Decision]:
    """What a host may see of the one that crashed."""
    boot, verdict = host.verdicts.get(peer, (0, Verdict.UNREACHABLE))
    if dead.up:
        return [("probe", name, peer)] if boot != dead.boot else []
    return [("refused", name, peer)] if (boot, verdict) == (dead.boot, Verdict.REACHABLE) else []


# -- worlds ------------------------------------------------------------------------------------------


def begin(peers: list[str]) -> World:
    """Founded, adopted, calm; everybody has just been heard by everybody."""
    world = World(peers)
    step(world, f"founded {' '.join(peers)}", lambda line: None)
    for name in peers:
        apply(world, ("truth", name))
    apply(world, ("flush",))
    return world


def tidier(checkpoints: bool, victims: Collection[str] | None) -> Callable[[World], None]:
    """What follows on every step: nothing flies to the dead, a first checkpoint is written where that is so, and what
    makes no difference where only the `victims` crash is forgotten (None: nothing is)."""

    def tidy(world: World) -> None:
        for link in [link for link in world.network.flying if world.hosts[link[1]].core is None]:
            del world.network.flying[link]
        for name, host in world.hosts.items() if checkpoints else ():
            committed, on_disk = host.committed, host.checkpoint
            if host.core is None or committed is None:
                continue
            if on_disk is None or on_disk.ref.lineage[0] < committed.ref.lineage[0]:
                apply(world, ("checkpoint", name))
        if victims is not None:
            forget(world, {MemberId(peer_id=name, boot=1) for name in victims})

    return tidy


def forget(world: World, mortal: Collection[MemberId]) -> None:
    """What counts only when its sender crashes, of all that will not: their promises, and how many there were.

    And when everybody was last heard, which only matters to who stands aside, for which there is no time here.
    """
    for host in world.hosts.values():
        core = host.core
        if core is None:
            continue
        core._heard_ms.clear()
        for peer, (boot, heard_ms, version) in host.heard.items():
            if version and MemberId(peer_id=peer, boot=boot) not in mortal:
                host.heard[peer] = boot, heard_ms, 0
        if host.disk.version:  # a peer that starts again is another one
            host.disk = replace(host.disk, version=0)
        for member in [member for member in core._book.promised if member not in mortal]:
            del core._book.promised[member]
        if host.member not in mortal and core.promise_version:
            core.promise_version = 0
            if core._word is not None:
                core._word = replace(core._word, version=0)
            attempt = core._attempt
            if attempt is not None:
                attempt.words[host.peer_id] = unnumbered(attempt.words[host.peer_id], mortal)
                attempt.judged = tuple([unnumbered(word, mortal) for word in attempt.judged])
    flying = world.network.flying
    for link, queue in list(flying.items()):
        said = [unnumbered(message, mortal) for message in queue if not _idle(message, mortal)]
        if not said:
            del flying[link]
        elif said != queue:
            flying[link] = said


def _idle(message: Any, mortal: Collection[MemberId]) -> bool:
    return isinstance(message, Promised) and message.sender not in mortal


def unnumbered(message: T, mortal: Collection[MemberId]) -> T:
    """The same message; a word of one that will not crash has no number."""
    if isinstance(message, Propose) and message.version and message.sender not in mortal:
        return replace(message, version=0)
    return message


def play(world: World, decision: Decision, tidy: Callable[[World], None]) -> None:
    """One step, and what follows on it; on each message, if several arrive."""
    match decision[0]:
        case "pass":
            time_passes(world)
        case "deliver":
            for _ in range(len(world.network.flying[decision[1], decision[2]]) - 1):
                apply(world, decision)
                tidy(world)
            apply(world, decision)
        case _:
            apply(world, decision)
    tidy(world)


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


# -- the search --------------------------------------------------------------------------------------


class Search:
    """Breadth first through the states of one variant."""

    def __init__(
        self,
        variant: str,
        peers: list[str],
        victims: Collection[str],
        *,
        checkpoints: bool,
        brief: bool = True,
    ) -> None:
        self.found = Found(variant)
        self.peers, self.victims = peers, victims
        self.tidy = tidier(checkpoints, victims if brief else None)
        first = begin(peers)
        self.tidy(first)
        self.moves = Moves(first, partial(play, tidy=self.tidy), self.tidy, PASS_MS, brief=brief)
        self.facts: list[Facts] = []
        self.first = self.moves.first
        self.seen = {_digest(self.first, Fate())}
        self.parents, self.taken = array("q", [-1]), array("h", [-1])
        """Of each state that is waiting or was followed: the one before it, and which step led to it."""
        self.decisions: dict[Decision, int] = {}
        self.waiting = deque([(self.first, Fate(), 0, 0)])

    def run(self, seconds: float) -> Found:
        """Until every state has been followed or the time is up (0: never)."""
        found, began_s = self.found, time.process_time()
        while self.waiting and len(found.violations) < MOST_VIOLATIONS:
            if seconds and not found.states % LOOK_EVERY and time.process_time() - began_s > seconds:
                found.complete = False
                break
            place, fate, number, found.depth = self.waiting.popleft()
            found.states += 1
            if not self._follow(place, fate, number):
                self._end(place, number)
        found.complete = found.complete and not self.waiting
        found.seconds = time.process_time() - began_s
        return found

    def steps(self, place: Place, fate: Fate) -> list[Decision]:
        moves = self.moves
        self.facts += map(facts, moves.hosts[len(self.facts) :])
        hosts = {name: self.facts[i] for name, i in zip(self.peers, place.hosts, strict=True)}
        links = [(self.peers[source], self.peers[destination]) for (source, destination), _ in place.flying]
        return steps(hosts, links, moves.commons[place.common].flowed, fate, place.clock, self.victims)

    def _follow(self, place: Place, fate: Fate, number: int) -> bool:
        """Whether any step changed anything."""
        found, moved = self.found, False
        for decision in self.steps(place, fate):
            new, events, violation = self.moves.after(place, decision)
            found.events += events
            if violation:
                moved = True
                self._tell([*self._path(number), decision])
            elif new != place:
                moved = True
                later = fate.after(decision)
                digest = _digest(new, later)
                if digest not in self.seen:
                    self.seen.add(digest)
                    self.waiting.append((new, later, len(self.parents), found.depth + 1))
                    self.parents.append(number)
                    self.taken.append(self.decisions.setdefault(decision, len(self.decisions)))
        return moved

    def _path(self, number: int) -> list[Decision]:
        names, path = list(self.decisions), []
        while number:
            path.append(names[self.taken[number]])
            number = self.parents[number]
        return path[::-1]

    def _tell(self, path: list[Decision]) -> None:
        """What was found, played from the beginning."""
        told, world = "; ".join(map(written, path)), clone(self.moves.template)
        try:
            for decision in path:
                play(world, decision, self.tidy)
        except AssertionError as error:
            what = f"{error} after {told}"
            self.found.violations.append({"part": "exhaustive", "seed": 0, "what": what})
            return
        raise RuntimeError(f"played again, nothing is wrong after {told}")

    def _end(self, place: Place, number: int) -> None:
        found = self.found
        found.ends += 1
        if found.ends % SETTLE_EVERY == 1:
            found.settled += 1
            try:
                calm.settle(self.moves.world(place))
            except AssertionError as error:
                told = "; ".join(map(written, self._path(number)))
                found.violations.append({"part": "exhaustive", "seed": 0, "what": f"{error} after {told}"})


def _digest(place: Place, fate: Fate) -> bytes:
    return blake2b(marshal.dumps((*place, *fate), 2), digest_size=12).digest()


def explore_variant(
    variant: str,
    *,
    checkpoints: bool,
    peers: list[str],
    seconds: float,
    victims: Collection[str] = PEERS,
    brief: bool = True,
) -> Found:
    """All states in which one of the victims has crashed or will."""
    gc.set_threshold(100_000, 20, 100)  # most of what there is stays
    return Search(variant, peers, victims, checkpoints=checkpoints, brief=brief).run(seconds)


def variants(*, quick: bool, seconds: float) -> dict[str, Callable[[], Found]]:
    """Two peers in full, then three for at most so many seconds a variant (0: in full); `quick`: for five."""
    work: dict[str, Callable[[], Found]] = {}
    kinds = (("no checkpoint", False), ("first checkpoint", True))
    for kind, checkpoints in kinds:
        name, limit = f"2 peers, {kind}", 5.0 if quick else 0.0
        work[name] = partial(explore_variant, name, checkpoints=checkpoints, peers=PEERS[:2], seconds=limit)
    for kind, checkpoints in kinds:
        for victim in PEERS:
            name, limit = f"3 peers, {victim} crashes, {kind}", 5.0 if quick else seconds
            work[name] = partial(
                explore_variant, name, checkpoints=checkpoints, peers=PEERS, seconds=limit, victims=[victim]
            )
    return work


def explore(
    work: Mapping[str, Callable[[], Found]],
    *,
    known: Mapping[str, Found],
    jobs: int = 1,
    save: Callable[[Result], None] = lambda _: None,
) -> Result:
    """All these variants but those that are known in full; ``save`` hears of each one's end."""
    found = {name: one for name, one in known.items() if name in work and one.complete}
    with ProcessPoolExecutor(jobs) as pool:
        for ended in as_completed([pool.submit(one) for name, one in work.items() if name not in found]):
            found[ended.result().variant] = ended.result()
            save(Result([found[name] for name in work if name in found]))
    return Result([found[name] for name in work])
