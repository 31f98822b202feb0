"""What happens next, by chance. Each seed has its own climate, in which some troubles are rare, some frequent."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from tests.sim.world import Decision, World

Maker = Callable[[], "Decision | None"]


class Weather:
    """Draws decisions for one world. It looks at the world, so that most of them have an effect there."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        rate = self._rate
        self.pace_ms = rng.choice([4, 12, 40])
        self.lost = rng.choice([0.0, 0.02, 0.1])
        """Share of messages and headers that are lost."""
        self.wipes = rng.random() < 0.15
        self.stops = rng.choice([0.0, 0.0, 1.0])
        self.evicts = rng.random() < 0.3
        table: list[tuple[Maker, float]] = [
            (self._message, 30.0),
            (self._enter, 14.0),
            (self._finish, 14.0),
            (lambda: self._one("tick"), 4.0),
            (self._calm, rng.choice([1.0, 3.0])),
            (lambda: self._two("probe"), 4.0),
            (lambda: self._one("truth"), 1.0 + rate(1.0)),
            (lambda: self._two("suspect"), rate(2.0)),
            (self._refused, 1.0 + rate(2.0)),
            (lambda: self._if("adopt", lambda h: h.view is not None and not h.opened), 2.0 + rate(2.0)),
            (lambda: self._if("ask", lambda h: h.core.view is None), 1.0 + rate(1.0)),
            (lambda: self._if("reopen", lambda h: h.core.view is None), rate(0.7)),
            (lambda: self._if("repeat", lambda h: h.own() is not None), 1.0 + rate(1.0)),
            (self._fail, rate(1.5)),
            (self._want, rate(0.7)),
            (lambda: self._one("force"), rate(1.0)),
            (lambda: self._if("checkpoint", lambda h: h.committed is not h.checkpoint), rate(2.0)),
            (self._cut, rate(0.8)),
            (lambda: self._two("deaf"), rate(0.4)),
            (lambda: ("heal",), 0.3),
            (lambda: self._one("crash"), rate(0.5)),
            (self._corner, rate(0.8)),
            (self._restart, rng.choice([0.5, 2.0])),
            (lambda: self._one("freeze"), rate(0.3)),
            (self._thaw, 0.6),
            (self._withdraw, rate(0.4)),
            (lambda: self._if("rejoin", lambda h: h.trainer is None), 0.5 + rate(0.5)),
            (self._data, rate(1.0)),
            (lambda: self._one("bad"), rate(0.1)),
            (lambda: self._one("leave"), rate(0.15)),
            (self._stop, self.stops),
            (lambda: self._if("tell", lambda h: bool(h.unheard)), 4.0 * self.stops),
            (lambda: self._if("end", lambda h: h.outcome == "stopped"), self.stops),
            (self._unheard, 6.0 * self.stops),
            (self._wipe, 0.3 if self.wipes else 0.0),
            (lambda: ("jump", self._name(), rng.randrange(-(10**7), 10**7)), 0.1),
            (self._evict, rng.choice([0.3, 3.0]) if self.evicts else 0.0),
            (lambda: self._one("yield"), 0.5 if self.evicts or not world.checker.one_history else 0.0),
            (lambda: self._one("court"), 0.5 if self.evicts or not world.checker.one_history else 0.0),
        ]
        self.makers = [maker for maker, weight in table if weight > 0]
        self.bounds = list(accumulate(weight for _, weight in table if weight > 0))

    def _rate(self, usual: float) -> float:
        return usual * self.rng.choice([0.0, 0.3, 1.0, 1.0, 3.0])

    def founding(self) -> list[Decision]:
        """Some found the run in calm, now and then over a broken way; the others come later."""
        rng, names = self.rng, sorted(self.world.hosts)
        founders = names[: rng.randrange(len(names)) + 1]
        found: list[Decision] = [("found", *founders), ("flush",)]
        if len(founders) < 3 or rng.random() > 0.06:
            return found
        one, other = rng.sample(founders, 2)
        ways: list[Decision] = [("deaf", one, other), ("deaf", other, one)]
        return [*ways[: rng.randrange(1, 3)], *found, ("calm", rng.choice([1_000, 12_000, 25_000]))]

    def next(self) -> list[Decision]:
        """One thing, and the time before it."""
        rng = self.rng
        found: Decision | None = None
        while found is None:
            found = self.makers[bisect_right(self.bounds, rng.random() * self.bounds[-1])]()
        if rng.random() < 0.4:
            return [("wait", rng.randrange(1, 2 * self.pace_ms)), found]
        return [found]

    # -- which, and to whom ----------------------------------------------------------------------

    def _name(self) -> str:
        names = list(self.world.hosts)
        return names[int(self.rng.random() * len(names))]

    def _able(self) -> str | None:
        """Somebody whose agent does something, unless everybody is dead or asleep."""
        names = [name for name, host in self.world.hosts.items() if host.core is not None and not host.asleep]
        return names[int(self.rng.random() * len(names))] if names else None

    def _one(self, verb: str) -> Decision | None:
        name = self._able()
        return (verb, name) if name is not None else None

    def _if(self, verb: str, sense: Callable[[Any], bool]) -> Decision | None:
        """Of somebody with whom it makes sense."""
        able = [h for h in self.world.hosts.values() if h.core is not None and not h.asleep and sense(h)]
        return (verb, able[int(self.rng.random() * len(able))].peer_id) if able else None

    def _thaw(self) -> Decision | None:
        asleep = [name for name, host in self.world.hosts.items() if host.asleep]
        return ("thaw", self.rng.choice(asleep)) if asleep else None

    def _two(self, verb: str) -> Decision | None:
        one, other = self._able(), self._name()
        return (verb, one, other) if one is not None and one != other else None

    def _message(self) -> Decision | None:
        rng, flying = self.rng, self.world.network.flying
        if not flying:
            return None
        links = list(flying)
        source, destination = links[int(rng.random() * len(links))]
        waiting = len(flying[source, destination])
        index = 0 if waiting == 1 or rng.random() < 0.7 else rng.randrange(waiting)
        luck = rng.random()
        if luck < self.lost:
            return "drop", source, destination, index
        return ("twice" if luck > 0.98 else "deliver"), source, destination, index

    def _misses(self) -> tuple[str, ...]:
        return tuple(name for name in self.world.hosts if self.rng.random() < self.lost)

    def _enter(self) -> Decision | None:
        able = [h for h in self.world.hosts.values() if h.training and h.reducing is None and h.own() is None]
        if not able:
            return None
        host, rng = able[int(self.rng.random() * len(able))], self.rng
        return "enter", host.peer_id, rng.choice([0, 1, 2, 2, 3]), rng.choice([0, 0, 1, 4]), *self._misses()

    def _finish(self) -> Decision | None:
        able = [h for h in self.world.hosts.values() if h.reducing is not None]
        return ("finish", able[int(self.rng.random() * len(able))].peer_id) if able else None

    def _fail(self) -> Decision | None:
        able = [h for h in self.world.hosts.values() if h.reducing is not None]
        return ("fail", able[int(self.rng.random() * len(able))].peer_id, *self._misses()) if able else None

    def _calm(self) -> Decision:
        return "calm", self.rng.choice([50, 200, 600])

    def _refused(self) -> Decision | None:
        dead = [h.peer_id for h in self.world.hosts.values() if h.core is None]
        if not dead:
            return None
        name, other = self._able(), self.rng.choice(dead)
        return ("refused", name, other) if name is not None else None

    def _restart(self) -> Decision | None:
        dead = [h.peer_id for h in self.world.hosts.values() if h.core is None and h.boot]
        if self.rng.random() < 0.1 * self.stops:  # whoever has stopped may be started again at once
            dead += [h.peer_id for h in self.world.hosts.values() if h.up and h.outcome == "stopped"]
        if not dead:
            return None
        return "restart", self.rng.choice(dead), self.rng.choice(["dark", "dark", "memory"])

    def _cut(self) -> Decision:
        return "cut", self._name(), self.rng.choice([0, 0, 0, 1])

    def _want(self) -> Decision:
        return ("want", self._name(), "at-once") if self.rng.random() < 0.7 else ("want", self._name())

    def _withdraw(self) -> Decision:
        return (
            ("withdraw", self._name(), "in-hand") if self.rng.random() < 0.5 else ("withdraw", self._name())
        )

    def _stop(self) -> Decision:
        return "stop", self._name()

    def _unheard(self) -> Decision | None:
        """One has stopped and does not know yet whether all will: somebody is cut off, dies, or is started again."""
        unheard = [h for h in self.world.hosts.values() if h.unheard]
        if not unheard:
            return None
        host = self.rng.choice(unheard)
        other = self.rng.choice(host.unheard)
        return self.rng.choice(
            [
                ("cut", other, 1),
                ("deaf", other, host.peer_id),
                ("drop", host.peer_id, other),
                ("end", host.peer_id),
                ("crash", other),
                ("restart", host.peer_id, "dark"),
                ("restart", host.peer_id, "memory"),
            ]
        )

    def _wipe(self) -> Decision | None:
        dead = [h.peer_id for h in self.world.hosts.values() if h.core is None and h.boot]
        return ("wipe", self.rng.choice(dead)) if dead and len(self.world.hosts) < 10 else None

    def _evict(self) -> Decision | None:
        """At one that waits; whoever it waits for may well be alive behind a cut cable."""
        able = [
            h for h in self.world.hosts.values() if h.core is not None and not h.asleep and h.core.awaited
        ]
        if not able:
            return None
        host = able[int(self.rng.random() * len(able))]
        assert host.core is not None
        return "evict", host.peer_id, self.rng.choice(host.core.awaited)

    def _data(self) -> Decision:
        rng, name = self.rng, self._name()
        return rng.choice(
            [
                ("hold", name, rng.randrange(3)),
                ("lose", name, rng.randrange(3)),
                ("full", name),
                ("speed", name, rng.choice([0, 1, 5, 50])),
            ]
        )

    def _corner(self) -> Decision | None:
        """Where histories break: between complete and commit, in a proposal, behind a cut cable."""
        rng, hosts = self.rng, list(self.world.hosts.values())
        ahead = [h for h in hosts if h.up and h.committed is not h.held and h.held.depth]
        proposing = [h for h in hosts if h.core is not None and h.core._attempt is not None]
        dead = [h for h in hosts if h.core is None and h.boot]
        luck = rng.random()
        if luck < 0.4 and ahead:
            return "crash", rng.choice(ahead).peer_id
        if luck < 0.7 and proposing:
            victim = rng.choice(proposing).peer_id
            return rng.choice([("cut", victim, 1), ("crash", victim), ("arm", victim, rng.randrange(4))])
        if luck < 0.85 and dead:
            return "cut", rng.choice(dead).peer_id, 1
        return "arm", self._name(), rng.randrange(4)
