"""Copies of a world, and keys by which two worlds in the same state are recognised."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_attempt import Attempt, PeerBook
from p2p_dmc.core.agreement_messages import Promised, Propose, View
from tests.sim.collective import Collective
from tests.sim.host import Header, Host
from tests.sim.membership import Detector
from tests.sim.network import Network
from tests.sim.world import World

TRANSIENT = {
    *("_sends", "_trace", "_installed", "_persist", "_froze", "_accepted", "_rng", "_settings", "_payload"),
    *("_now", "promise_version"),
}
"""Of a core: what each event sets anew, what never differs, and names (see `Keys`)."""
NOT_STATE = {
    *("models", "core", "_member", "first", "memory", "last_version", "heard", "clock_ms", "wall_ms"),
    *("reachable", "key"),
}
"""Of a host: what follows from the rest, or nothing depends on."""


def _containers(thing: Any) -> Any:
    """A copy one level deep, with its own sets, dicts and lists."""
    new = copy.copy(thing)
    for name, value in vars(new).items():
        if isinstance(value, (set, dict, list)):
            setattr(new, name, value.copy())
        elif isinstance(value, (Attempt, PeerBook)):
            setattr(new, name, _containers(value))
    return new


def clone(world: World, touched: Collection[str] | None = None) -> World:
    """Another world in the same state, which shares only what does not change.

    `touched`: the hosts that are going to change, where that is known; collectives change only if all hosts may.
    """
    new = copy.copy(world)
    new.network = _network(world.network)
    new.checker = _containers(world.checker)
    new.checker.line = {history: list(line) for history, line in world.checker.line.items()}
    new.results = dict(world.results)
    new.detector = Detector(new.network, new._judge, exact=world.detector.exact)
    new.detector.now_ms, new.detector.ages = world.detector.now_ms, world.detector.ages
    new.hosts = dict(world.hosts)
    if touched is None:
        new.collectives = {key: _collective(one) for key, one in world.collectives.items()}
        touched = list(world.hosts)
    for name in touched:
        new.hosts[name] = _host(world.hosts[name], new)
    return new


def _network(network: Network) -> Network:
    new = Network()
    new.flying = {link: list(queue) for link, queue in network.flying.items()}
    new.side, new.deaf = dict(network.side), set(network.deaf)
    return new


def _collective(collective: Collective) -> Collective:
    new = Collective(collective.view, collective.round)
    new.contributions, new.states = dict(collective.contributions), dict(collective.states)
    new.done = collective.done
    return new


def _host(host: Host, new_world: World) -> Host:
    new: Host = _containers(host)
    new.__dict__.pop("key", None)
    new.said = {number: dict(headers) for number, headers in host.said.items()}
    if host.trainer is not None:
        new.trainer = copy.copy(host.trainer)
        new.trainer.local, new.trainer.queue = list(host.trainer.local), list(host.trainer.queue)
    if host.work is not None:
        new.work = copy.copy(host.work)
        new.work.cursors = list(host.work.cursors)
    if host.reducing is not None:
        key = host.reducing.view.view_id, host.reducing.round
        new.reducing = new_world.collectives.get(key) or _collective(host.reducing)
    if host.core is not None:
        core: Agreement = _containers(host.core)
        core._payload = lambda: new.payload(new.reachable)
        new.core = core
    return new


class Keys:
    """Recognises states. Large values that never change are named by a number the first time they are met.

    Two names are left out, because nobody looks into them: the id of a view, which is the hash of what was said on the
    way to it, and the versions of promises, which only order what one link delivers in order anyhow.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._met: dict[int, tuple[Any, int]] = {}

    def _number(self, value: Any) -> int:
        met = self._met.get(id(value))
        if met is None:
            facts: Any = value
            if isinstance(value, (Propose, Promised, View)):
                left_out = {"version", "view_id"}
                facts = tuple(
                    self.of(getattr(value, name))
                    for name in value.__dataclass_fields__
                    if name not in left_out
                )
            number = self._numbers.setdefault((type(value), facts), len(self._numbers))
            met = self._met[id(value)] = value, number
        return met[1]

    def of(self, value: Any) -> Any:
        """A hashable stand-in: equal for equal values."""
        if value is None or isinstance(value, (int, str, bytes)):
            return value
        if isinstance(value, Header):
            return value[1:]
        if isinstance(value, dict):
            return frozenset((self.of(k), self.of(v)) for k, v in value.items())
        if isinstance(value, (set, frozenset)):
            return frozenset(map(self.of, value))
        if isinstance(value, (list, tuple)):
            return tuple(map(self.of, value))
        if isinstance(value, (Attempt, PeerBook)):
            return frozenset((k, self.of(v)) for k, v in vars(value).items())
        if isinstance(value, Collective):
            return self.of(value.view), value.round, self.of(value.contributions), value.done
        if hasattr(value, "ledger") and hasattr(value, "parent"):  # a model is what its digest names
            return value.ref.lineage, value.ref.digest
        if type(value).__name__ in ("Trainer", "Work"):
            return tuple(self.of(v) for k, v in sorted(vars(value).items()) if k != "assignment")
        if type(value).__name__ == "Farewell":
            return self._number(value.stopped), value.strikes
        return self._number(value)

    def world(self, world: World) -> int:
        """Two worlds with the same key behave alike from here on."""
        hosts = tuple((name, self._host(host)) for name, host in world.hosts.items())
        net = world.network
        flying = frozenset((link, tuple(map(self.of, queue))) for link, queue in net.flying.items())
        return hash((world.now, hosts, flying, frozenset(net.side.items()), frozenset(net.deaf)))

    def _host(self, host: Host) -> int:
        """Computed once for each copy of a host."""
        key: int | None = vars(host).get("key")
        if key is None:
            shell = tuple(self.of(v) for k, v in vars(host).items() if k not in NOT_STATE)
            inner = None
            if host.core is not None:
                inner = tuple(self.of(v) for k, v in vars(host.core).items() if k not in TRANSIENT)
            key = hash((shell, inner, frozenset(host.models), self.of(host.memory)))
            vars(host)["key"] = key
        return key
