"""The states of a small world as a few numbers, and its steps computed once for all states in which they are the same.

What a step does depends on the hosts that it touches and on little else. So each distinct state of a host is kept
once, under a number, and so is each distinct message; a state of the world (`Place`) is the numbers of its hosts, of
what they share (`Common`) and of the messages on each link. A step is played in a real world, by the product's code,
the first time that it is taken from these states of these hosts; after that what came of it is looked up:

A step is taken in parts, each of which happens at one host: messages arrive one by one; a header is said, heard by one
peer after the other, and looked at by its sender; a probe is a sign of life on both ends. A part depends on the state
of its host, on the messages, and on who is up in which incarnation; if the checker or a reduction was looked at on the
way (`Watched` notes that), on `Common`, too, and on what state each peer holds. Where a part turns out to concern more
than its host, the step is played at once and depends on the states of all members of the view. So do, with the states
of all hosts, the end of a download, and time.

Nothing is left out: two states are the same only if all that anything depends on is equal (`clone.Values`), what the
checker remembers included. `check_every`: so often is a step that could be looked up played again, in full, in a world
of which all is copied and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from p2p_dmc.core.agreement_messages import View
from tests.sim.clone import (
    Values,
    clone_checker,
    clone_collective,
    clone_detector,
    clone_host,
    clone_network,
)
from tests.sim.collective import Collective
from tests.sim.host import Header, Host
from tests.sim.invariants import Checker
from tests.sim.model import Model
from tests.sim.network import Network
from tests.sim.world import Decision, World

Link = tuple[int, int]
Flying = tuple[tuple[Link, tuple[int, ...]], ...]
"""Sorted by link; a link is the indices of source and destination; no link is empty."""
Play = Callable[[World, Decision], None]
Key = tuple[Any, ...]
Collectives = dict[tuple[bytes, int], Collective]
Results = dict[tuple[bytes, int], Model]


class Place(NamedTuple):
    """A state of the world. Its numbers are those of one `Moves`."""

    hosts: tuple[int, ...]
    common: int
    flying: Flying
    clock: int
    """How often time has passed."""


class Common(NamedTuple):
    """What hosts share."""

    checker: Checker
    collectives: Collectives
    results: Results
    flowed: frozenset[tuple[bytes, int]]
    """Reductions of which everybody in them may have the result."""


class Change(NamedTuple):
    """What came of a step."""

    hosts: tuple[tuple[int, int], ...] = ()
    """(index, new number)"""
    common: int | None = None
    sends: Flying = ()
    events: int = 0
    violation: str = ""
    said: int | None = None
    """The header that is to be heard by others."""


WIDE = Change(violation="wide")


@dataclass
class Way:
    """How far a step has come."""

    hosts: tuple[int, ...]
    common: int
    sends: list[tuple[Link, tuple[int, ...]]]
    events: int = 0
    violation: str = ""


class Wide(Exception):
    """More hosts have to do with it than was thought."""


class Watched(World):
    """It notes whether anybody looked at what hosts share, and raises `Wide` where one host's step is not only its."""

    alone = True
    """Only one host's part is to be played."""
    step = ""

    @property
    def checker(self) -> Checker:  # type: ignore[override]
        self.__dict__["looked"] = True
        return self.__dict__["_checker"]  # type: ignore[no-any-return]

    @property
    def collectives(self) -> Collectives:  # type: ignore[override]
        self.__dict__["looked"] = True
        return self.__dict__["_collectives"]  # type: ignore[no-any-return]

    @property
    def results(self) -> Results:  # type: ignore[override]
        self.__dict__["looked"] = True
        return self.__dict__["_results"]  # type: ignore[no-any-return]

    said: Header | None = None

    def say_header(self, host: Host, header: Header, lost: tuple[str, ...] = ()) -> None:
        if not self.alone:
            return super().say_header(host, header, lost)
        host.said.setdefault(host.round, {})[host.member] = header
        if self.said is not None:
            raise Wide
        self.said = header
        return None

    def _answer(self, host: Host, sender: Host, own: Header) -> None:
        if self.alone:
            raise Wide
        super()._answer(host, sender, own)

    def _tell_failure(self, host: Host, other: Host, view: View) -> None:
        if self.alone:
            if self.step == "hear":
                raise Wide
            return
        super()._tell_failure(host, other, view)

    def _flow(self, collective: Collective) -> bool:
        if (
            self.alone
            and not collective.done
            and len(collective.contributions) == len(collective.view.members)
        ):
            raise Wide
        return super()._flow(collective)

    # -- steps of one host ---------------------------------------------------------------------------

    def part(self, kind: str, host: Host, other: Host, what: Any) -> None:
        """A part of a step: what happens at `host` because of `other`."""
        self.step = kind
        match kind:
            case "hear":
                self._hear_header(host, other, what)
            case "look":
                self._look_at_barrier(host)
            case "told":
                super()._tell_failure(other, host, what)
            case "hears":
                self.detector.hear(host, other)


class Moves:
    """See the module's docstring."""

    def __init__(
        self,
        world: World,
        play: Play,
        tidy: Callable[[World], None],
        pass_ms: int,
        *,
        check_every: int = 997,
        brief: bool = True,
    ) -> None:
        self.template, self.play, self.tidy, self.pass_ms, self.check_every = (
            world,
            play,
            tidy,
            pass_ms,
            check_every,
        )
        self.names = list(world.hosts)
        self.index = {name: i for i, name in enumerate(self.names)}
        self.values = Values(brief=brief)
        self.hosts: list[Host] = []
        self.up: list[int] = []
        """Of each state of a host: its incarnation, and whether it is up."""
        self.holds: list[Key] = []
        """... and what it holds, besides."""
        self.views: list[bytes] = []
        """... and the view."""
        self._host_values: list[Key] = []
        self.commons: list[Common] = []
        self.messages: list[Any] = []
        self._host_numbers: dict[Key, int] = {}
        self._common_numbers: dict[Key, int] = {}
        self._message_numbers: dict[Any, int] = {}
        self._standing: dict[Key, int] = {}
        self._known: dict[Key, Change | None] = {}
        """None: it depends on what hosts share, see under the longer key."""
        self.played = self.taken = self.checked = 0
        ids = tuple(self._host(host) for host in world.hosts.values())
        self.first = Place(
            ids, self._common(world.checker, world.collectives, world.results), self._flying(world.network), 0
        )

    # -- numbers -------------------------------------------------------------------------------------

    def _host(self, host: Host, before: int | None = None) -> int:
        """`before`: the state of the host from which it comes."""
        if before is None:
            value = self.values.host(host)
        else:
            value = self.values.host(host, self.hosts[before], self._host_values[before])
        number = self._host_numbers.setdefault(value, len(self.hosts))
        if number == len(self.hosts):
            self.hosts.append(host)
            self._host_values.append(value)
            self.up.append(2 * host.boot + (host.core is not None))
            self.holds.append((host.boot, host.core is not None, self.values.number(host.held)))
            self.views.append(host.view.view_id if host.view is not None else b"")
        return number

    def _common(self, checker: Checker, collectives: Collectives, results: Results) -> int:
        value = self.values.common(checker, collectives, results)
        number = self._common_numbers.setdefault(value, len(self.commons))
        if number == len(self.commons):
            flowed = frozenset(key for key, one in collectives.items() if one.done)
            self.commons.append(Common(checker, collectives, results, flowed))
        return number

    def _cleared(self, common: int, hosts: Sequence[int]) -> int:
        """Reductions of views that stand nowhere are over: whoever may still install one finds nobody in it."""
        views = frozenset([self.views[i] for i in hosts])
        number = self._standing.get((common, views))
        if number is None:
            checker, collectives, results, _ = self.commons[common]
            here = {key: one for key, one in collectives.items() if key[0] in views}
            known = {key: one for key, one in results.items() if key[0] in views}
            number = self._standing[common, views] = self._common(checker, here, known)
        return number

    def _message(self, message: Any) -> int:
        number = self._message_numbers.setdefault(message, len(self.messages))
        if number == len(self.messages):
            self.messages.append(message)
        return number

    def _flying(self, network: Network) -> Flying:
        index = self.index
        return tuple(
            sorted(
                ((index[source], index[destination]), tuple(map(self._message, queue)))
                for (source, destination), queue in network.flying.items()
            )
        )

    # -- worlds --------------------------------------------------------------------------------------

    def world(self, place: Place, only: tuple[int, ...] | None = None, kind: type[World] = World) -> World:
        """A world in that state; of the hosts not in `only` nothing may change."""
        common = self.commons[place.common]
        new: Any = object.__new__(kind)
        own = vars(new)
        own.update(vars(self.template))
        mark = "_" if kind is Watched else ""
        collectives = {key: clone_collective(one) for key, one in common.collectives.items()}
        own[f"{mark}collectives"] = collectives
        own[f"{mark}results"] = dict(common.results)
        own[f"{mark}checker"] = clone_checker(common.checker)
        new.now = self.template.now + place.clock * self.pass_ms
        new.events = new.faults = 0
        new.network = clone_network(self.template.network)
        for (source, destination), queue in place.flying:
            link = self.names[source], self.names[destination]
            new.network.flying[link] = [self.messages[number] for number in queue]
        new.detector = clone_detector(self.template, new)
        new.detector.now_ms = new.now
        new.hosts = {}
        for i, name in enumerate(self.names):
            host = self.hosts[place.hosts[i]]
            copied = only is None or i in only
            new.hosts[name] = clone_host(host, collectives) if copied else host
        world: World = new
        return world

    # -- steps ---------------------------------------------------------------------------------------

    def after(self, place: Place, decision: Decision) -> tuple[Place, int, str]:
        """The state after a step, how many events it was, and which invariant failed in it, if any."""
        queue: tuple[int, ...] = ()
        flying = place.flying
        if decision[0] == "deliver":
            link = self.index[decision[1]], self.index[decision[2]]
            queue = next(waiting for other, waiting in flying if other == link)
            flying = tuple([item for item in flying if item[0] != link])
        try:
            way = self._in_parts(place, decision, queue)
        except Wide:
            way = self._at_once(place, decision)
        self.taken += 1
        if self.taken % self.check_every == 0:
            self._check(place, decision, queue, way)
        if way.violation:
            return place, way.events, way.violation
        hosts, common = way.hosts, way.common
        if way.sends:
            links = dict(flying)
            for link, said in way.sends:
                links[link] = links.get(link, ()) + said
            flying = tuple(sorted(links.items()))
        if decision[0] == "crash" or way.sends:
            up = self.up
            flying = tuple([item for item in flying if up[hosts[item[0][1]]] & 1])
        views = self.views
        if common != place.common or any(
            views[a] != views[b] for a, b in zip(place.hosts, hosts, strict=True) if a != b
        ):
            common = self._cleared(common, hosts)
        return Place(hosts, common, flying, place.clock + (decision[0] == "pass")), way.events, ""

    def _in_parts(self, place: Place, decision: Decision, queue: tuple[int, ...]) -> Way:
        """A step as what happens at one host after the other."""
        way = Way(place.hosts, place.common, [])
        kind, me = decision[0], self.index[decision[1]] if len(decision) > 1 else -1
        match kind:
            case "deliver":
                for message in queue:
                    if not way.violation:
                        self._part(place, way, decision, self.index[decision[2]], (message,))
            case "crash" | "restart" | "refused" | "suspect" | "finish":
                self._part(place, way, decision, me, ())
            case "probe":
                other = self.index[decision[2]]
                said = self._version(way, other)
                self._part(place, way, ("hears", decision[1], decision[2], said), me, ())
                if not way.violation:
                    said = self._version(way, me)
                    self._part(place, way, ("hears", decision[2], decision[1], said), other, ())
            case "enter" | "fail":
                view = self.hosts[place.hosts[me]].view
                assert view is not None, f"{decision} without a view"
                said = self._part(place, way, decision, me, ())
                sub, what = ("hear", said) if kind == "enter" else ("told", self._message(view))
                if what is None:
                    return way
                for peer in view.peers:
                    if peer != decision[1] and not way.violation:
                        self._part(place, way, (sub, peer, decision[1]), self.index[peer], (what,))
                if kind == "enter" and not way.violation:
                    self._part(place, way, ("look", decision[1], decision[1]), me, ())
            case _:
                raise Wide
        return way

    def _part(
        self, place: Place, way: Way, decision: Decision, me: int, queue: tuple[int, ...]
    ) -> int | None:
        up, ids = self.up, way.hosts
        key: Key = (decision, place.clock, tuple([up[i] for i in ids]), ids[me], queue)
        known: Any = self._known.get(key, self)
        if known is None:
            key = (*key, way.common, tuple([self.holds[i] for i in ids]))
            known = self._known.get(key, self)
        if known is self:
            self.played += 1
            known, looked = self._played(
                Place(ids, way.common, (), place.clock), decision, queue, (me,), alone=True
            )
            if looked and len(key) == 5:
                self._known[key] = None
                key = (*key, way.common, tuple([self.holds[i] for i in ids]))
            self._known[key] = known
        if known is WIDE:
            raise Wide
        for i, number in known.hosts:
            way.hosts = (*way.hosts[:i], number, *way.hosts[i + 1 :])
        if known.common is not None:
            way.common = known.common
        way.sends += known.sends
        way.events += known.events
        way.violation = known.violation
        said: int | None = known.said
        return said

    def _version(self, way: Way, me: int) -> int:
        """Of its promises, which every sign of life tells."""
        core = self.hosts[way.hosts[me]].core
        return core.promise_version if core is not None else 0

    def _at_once(self, place: Place, decision: Decision) -> Way:
        """A step of several hosts: of all members of a view, or of all hosts."""
        ids = place.hosts
        only = tuple(range(len(ids)))
        view = self.hosts[ids[self.index[decision[1]]]].view if decision[0] in ("enter", "fail") else None
        if view is not None:
            only = tuple([i for i in only if self.names[i] in view.peers])
        held = tuple([self.holds[i] for i in ids])
        key: Key = (decision, place.clock, tuple([ids[i] for i in only]), place.common, held)
        known = self._known.get(key)
        if known is None:
            self.played += 1
            known, _ = self._played(place._replace(flying=()), decision, (), only, alone=False)
            self._known[key] = known
        return self._way(place, known)

    def _way(self, place: Place, known: Change) -> Way:
        hosts = list(place.hosts)
        for i, number in known.hosts:
            hosts[i] = number
        common = place.common if known.common is None else known.common
        return Way(tuple(hosts), common, list(known.sends), known.events, known.violation)

    def _played(
        self,
        place: Place,
        decision: Decision,
        queue: tuple[int, ...],
        only: tuple[int, ...] | None,
        *,
        alone: bool,
    ) -> tuple[Change, bool]:
        """What comes of it in a real world; and whether it depends on what hosts share."""
        flying: Flying = ()
        kind = decision[0]
        if kind == "deliver":
            flying = (((self.index[decision[1]], self.index[decision[2]]), queue),)
        world: Any = self.world(place._replace(flying=flying), only, Watched)
        world.alone = alone
        world.step = kind
        try:
            if kind in ("hear", "look", "told", "hears"):
                what = self.messages[queue[0]] if queue else None
                world.part(kind, world.hosts[decision[1]], world.hosts[decision[2]], what)
                self.tidy(world)
            else:
                self.play(world, decision)
        except AssertionError as error:
            return Change(violation=str(error)), True
        except Wide:
            return WIDE, "looked" in vars(world)
        looked = "looked" in vars(world)
        numbers = [
            place.hosts[i]
            if only is not None and i not in only
            # a step that is played to check on others relies on nothing that they do
            else self._host(host, place.hosts[i] if only is not None else None)
            for i, host in enumerate(world.hosts.values())
        ]
        hosts = tuple([(i, number) for i, number in enumerate(numbers) if number != place.hosts[i]])
        common = place.common
        if looked:
            common = self._common(world.checker, world.collectives, world.results)
        return Change(
            hosts,
            None if common == place.common else common,
            self._flying(world.network),
            world.events,
            "",
            None if world.said is None else self._message(world.said),
        ), looked

    def _check(self, place: Place, decision: Decision, queue: tuple[int, ...], way: Way) -> None:
        """Nothing that was not looked at makes a difference."""
        self.checked += 1
        change, _ = self._played(place, decision, queue, None, alone=False)
        other = self._way(place, change)
        sends: dict[Link, tuple[int, ...]] = {}
        for link, said in way.sends:
            sends[link] = sends.get(link, ()) + said
        sends = {link: said for link, said in sends.items() if self.up[way.hosts[link[1]]] & 1}
        mine = way.hosts, way.common, sends, way.events, way.violation
        theirs = other.hosts, other.common, dict(other.sends), other.events, other.violation
        if mine != theirs and not (way.violation and other.violation):
            raise RuntimeError(f"{decision} at {place}: {mine}, but {theirs}")
