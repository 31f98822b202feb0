"""Copies of a world, and values by which two hosts, or two worlds, in the same state are recognised."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from p2p_dmc.agent.work import Work
from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_attempt import Attempt, PeerBook
from p2p_dmc.core.agreement_messages import Verdict
from p2p_dmc.core.assignment import Assignment
from p2p_dmc.core.quorum import Quorum
from tests.sim.collective import Collective
from tests.sim.host import Header, Host, Trainer
from tests.sim.invariants import Checker
from tests.sim.membership import Detector
from tests.sim.model import Model
from tests.sim.network import Network
from tests.sim.world import World

T = TypeVar("T")

TRANSIENT = {
    *("_sends", "_trace", "_installed", "_persist", "_froze", "_accepted"),
    *("_rng", "_settings", "_payload"),
}
"""Of a core: what each event sets anew, and what never differs."""
NOT_STATE = {
    *("core", "_member", "first", "clock_ms", "reachable", "last_version"),
    *("models", "heard", "early", "reducing"),
}
"""Of a host: what each event sets anew, what never differs or is only counted; and what `Values.host` adds by hand."""
FROZEN_HOST = {"said", "round", "last_own"}
FROZEN_CORE = {"_causes", "_strays", "_cause_resend_ms", "_word_resend_ms", "_installed_ms"}
"""Set anew when a view is installed, and not looked at while none stands."""
PLAIN = {int, str, bytes, bool, type(None), Verdict, Quorum}
CONTAINERS = {set, dict, list}
BOOKS = {Attempt, PeerBook}
EMPTY: frozenset[Any] = frozenset()
PARTS = {*BOOKS, Trainer, Work}


def _bare(thing: T) -> T:
    """A copy that shares all it consists of."""
    new = object.__new__(type(thing))
    vars(new).update(vars(thing))
    return new


def _containers(thing: T) -> T:
    """A copy one level deep, with its own sets, dicts and lists."""
    new = object.__new__(type(thing))
    own = vars(new)
    for name, value in vars(thing).items():
        kind = type(value)
        if kind in CONTAINERS:
            own[name] = value.copy()
        elif kind in BOOKS:
            own[name] = _containers(value)
        else:
            own[name] = value
    return new


def clone(world: World) -> World:
    """Another world in the same state, which shares only what does not change."""
    new = _bare(world)
    new.network = clone_network(world.network)
    new.checker = clone_checker(world.checker)
    new.results = dict(world.results)
    new.collectives = {key: clone_collective(one) for key, one in world.collectives.items()}
    new.detector = clone_detector(world, new)
    new.hosts = {name: clone_host(host, new.collectives) for name, host in world.hosts.items()}
    return new


def clone_detector(world: World, new: World) -> Detector:
    """For the new world."""
    detector = Detector(new.network, new._judge)
    detector.now_ms, detector.ages = world.detector.now_ms, world.detector.ages
    return detector


def clone_checker(checker: Checker) -> Checker:
    new = _containers(checker)
    new.line = {history: list(line) for history, line in checker.line.items()}
    return new


def clone_network(network: Network) -> Network:
    new = Network()
    new.flying = {link: list(queue) for link, queue in network.flying.items()}
    new.side, new.deaf = dict(network.side), set(network.deaf)
    return new


def clone_collective(collective: Collective) -> Collective:
    new = Collective(collective.view, collective.round)
    new.contributions, new.states = dict(collective.contributions), dict(collective.states)
    new.done = collective.done
    return new


def clone_host(host: Host, collectives: dict[tuple[bytes, int], Collective]) -> Host:
    """`collectives`: of the new world; one that the host takes part in is among them."""
    new = _containers(host)
    new.said = {number: dict(headers) for number, headers in host.said.items()}
    if host.trainer is not None:
        new.trainer = _containers(host.trainer)
    if host.work is not None:
        new.work = _containers(host.work)
    if host.reducing is not None:
        new.reducing = collectives[host.reducing.view.view_id, host.reducing.round]
    if host.core is not None:
        core: Agreement = _containers(host.core)
        core._payload = lambda: new.payload(new.reachable)
        new.core = core
    return new


class Values:
    """Hashable stand-ins, equal for equal states. Large values that never change are numbered as they are met."""

    def __init__(self, *, brief: bool) -> None:
        self.brief = brief
        """Leave out what nobody will look at again, and the shared memory that a dead agent left."""
        self._numbers: dict[Any, int] = {}
        self._met: dict[int, tuple[Any, int]] = {}

    def number(self, value: Any) -> int:
        """The same for equal values."""
        met = self._met.get(id(value))
        if met is None:
            if len(self._met) > 300_000:
                self._met.clear()  # each of them keeps its value alive
            facts: Any = value
            if isinstance(value, Model):
                facts = value.ref, value.parent and self.number(value.parent)
            elif isinstance(value, Assignment):
                facts = value.digest()
            number = self._numbers.setdefault((type(value), facts), len(self._numbers))
            met = self._met[id(value)] = value, number
        return met[1]

    def of(self, value: Any) -> Any:
        """A stand-in of anything that a host or a core has."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is dict:
            return frozenset([(self.of(k), self.of(v)) for k, v in value.items()]) if value else EMPTY
        if kind is set or kind is frozenset:
            return frozenset(map(self.of, value)) if value else EMPTY
        if kind is list or kind is tuple:
            return tuple(map(self.of, value)) if value else ()
        if kind is Header:
            return tuple(value)
        if kind in PARTS:
            return tuple([self.of(v) for v in vars(value).values()])
        return self.number(value)

    def of_all(
        self, thing: Any, but: Collection[str], before: Any, known: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Of each field; what equals that of the thing `before`, whose stand-ins are `known`, is not made anew."""
        fields = [k for k in vars(thing) if k not in but]
        if before is None or len(fields) != len(known):
            return tuple([self.of(v) for k, v in vars(thing).items() if k not in but])
        own, old, of = vars(thing), vars(before), self.of_changed
        return tuple([of(own[k], old[k], stand_in) for k, stand_in in zip(fields, known, strict=True)])

    def of_changed(self, value: Any, before: Any, known: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if value is before or (kind is type(before) and kind not in PARTS and value == before):
            return known
        if kind in PARTS and kind is type(before):
            return self.of_all(value, (), before, known)
        return self.of(value)

    def host(self, host: Host, before: Host | None = None, known: tuple[Any, ...] = ()) -> tuple[Any, ...]:
        """All that its future depends on, as far as it is its own.

        `before`: a host in much the same state, if there is one, and its value: what has not changed is taken from
        there.
        """
        core, but, core_but = host.core, NOT_STATE, TRANSIENT
        early: Any = self.of(host.early)
        if self.brief:
            but = but | {"memory"}
            if core is not None and core.view is None:
                but, core_but = but | FROZEN_HOST, core_but | FROZEN_CORE
            early = frozenset(
                [(self.of(m), tuple(h)) for m, h in host.early.items() if self._of_use(core, h)]
            )
        reducing = host.reducing and (host.reducing.view.view_id, host.reducing.round)
        heard = frozenset([(name, *heard) for name, heard in host.heard.items()])
        old = None if before is None else before.core
        alike = old is not None and core is not None and (old.view is None) == (core.view is None)
        inner = None
        if core is not None:
            inner = self.of_all(core, core_but, old if alike else None, known[1] if alike else ())
        outer = self.of_all(host, but, before if alike else None, known[0] if alike else ())
        return outer, inner, frozenset(host.models), heard, early, reducing

    def _of_use(self, core: Agreement | None, header: Header) -> bool:
        """Whether a view may yet be installed here for which a header came too early."""
        if core is None:
            return False
        return header.view_epoch > core._n or (header.view_epoch == core._n and core._attempt is not None)

    def common(
        self,
        checker: Checker,
        collectives: dict[tuple[bytes, int], Collective],
        results: dict[tuple[bytes, int], Model],
    ) -> tuple[Any, ...]:
        """What the hosts share: reductions, and what the checker remembers."""
        reductions = frozenset(
            [
                (key, one.done, self.of(one.contributions), self.of(one.states))
                for key, one in collectives.items()
            ]
        )
        assigned = frozenset([(key, digest) for key, (_, digest) in checker.assignments.items()])
        line = frozenset(
            [
                (history, tuple([(self.number(c.model), self.of(c.voters)) for c in commits]))
                for history, commits in checker.line.items()
            ]
        )
        told = [
            self.of(value)
            for name, value in vars(checker).items()
            if type(value) in CONTAINERS and name not in ("assignments", "line")
        ]
        return reductions, self.of(results), line, assigned, tuple(told)

    def world(self, world: World) -> tuple[Any, ...]:
        """Two worlds with the same value behave alike from here on."""
        net = world.network
        hosts = tuple([self.host(host) for host in world.hosts.values()])
        flying = frozenset([(link, self.of(queue)) for link, queue in net.flying.items()])
        return (
            world.now,
            hosts,
            self.common(world.checker, world.collectives, world.results),
            flying,
            self.of(net.side),
            self.of(net.deaf),
        )
