"""Machines, network, detectors, and one event of one core at a time: what the rounds in `world.py` stand on."""

from __future__ import annotations

import random
from collections.abc import Callable

from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_messages import (
    AgreementSettings,
    MemberId,
    Ready,
    Stopped,
    Verdict,
    View,
    Withdrawal,
)
from p2p_dmc.core.quorum import Quorum
from tests.sim.collective import Collective
from tests.sim.host import Host, Trainer
from tests.sim.invariants import Checker, require
from tests.sim.membership import Detector
from tests.sim.model import Model, initial
from tests.sim.network import Closed, Farewell, Network

COUNTS = (11, 7, 9)
"""Samples of each shard: small, so that epochs end."""


class Middle(random.Random):
    """A generator for timers: always in the middle, so that a run is its decisions."""

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return start // 2 if stop is None else (start + stop) // 2


MIDDLE = Middle()


class Stage:
    """See the module's docstring."""

    def __init__(
        self,
        peers: int | list[str],
        quorum: Quorum = Quorum.MAJORITY,
        *,
        epochs: int = 1_000,
        skip_lost: bool = False,
        settings: AgreementSettings | None = None,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        names = [f"p{i}" for i in range(peers)] if isinstance(peers, int) else peers
        self.quorum, self.epochs, self.skip_lost = quorum, epochs, skip_lost
        self.settings = settings or AgreementSettings()
        self.trace = trace
        self.now = 0
        self.events = 0
        self.faults = 0
        self.stops = 0
        """So often a host has stopped with the run."""
        self.kept = 0
        """... and heard that all voters of its view had, so that it kept its vote."""
        self.resumed = 0
        """... and started again with its vote."""
        self.network = Network()
        self.detector = Detector(self.network, self._judge)
        self.checker = Checker(one_history=quorum is not Quorum.ANY)
        self.collectives: dict[tuple[bytes, int], Collective] = {}
        self.results: dict[tuple[bytes, int], Model] = {}
        """What each round whose data flowed results in."""
        self.graves: dict[MemberId, Stopped] = {}
        """What each incarnation that crashed had promised by then, whoever heard of it."""
        self.hosts: dict[str, Host] = {}
        for name in names:
            self.arrive(name)

    # -- machines --------------------------------------------------------------------------------

    def arrive(self, name: str) -> None:
        """A new machine, with an agent and a trainer that waits for a view."""
        if name in self.hosts:
            return
        host = Host(name, initial(name, COUNTS, self.epochs), len(COUNTS))
        host.clock_ms = 1_000 * (7 * len(self.hosts) % 5)
        self.hosts[name] = host
        self.start(host, host.first)

    def start(self, host: Host, completed: Model) -> None:
        host.held = completed
        host.models[completed.ref.digest] = completed
        host.trainer = Trainer()
        host.core = Agreement(
            me=host.member,
            quorum=self.quorum,
            promises=host.disk,
            completed=completed.ref,
            payload=lambda: host.payload(host.reachable),
            rng=MIDDLE,
            settings=self.settings,
            now_ms=self.now + host.clock_ms,
        )
        host.memory = completed

    def _reachable_shards(self, host: Host) -> frozenset[int]:
        linked = self.network.both_ways
        holders = [h for h in self.hosts.values() if h is host or (h.up and linked(h.peer_id, host.peer_id))]
        return frozenset(shard for holder in holders for shard in holder.holdings)

    def over(self) -> bool:
        """The run has ended for everybody that is left."""
        return all(host.outcome == "finished" or not host.boot for host in self.hosts.values())

    def restart(self, host: Host, *, memory: bool = False) -> None:
        """The agent starts again, and its trainer; `memory`: what it held is still in shared memory."""
        if host.outcome == "stopped":
            self.end(host)
        if host.core is not None or host.outcome == "finished" or not host.boot:
            return
        host.told = not host.closed
        if host.closed:  # it is the member that stopped with the run, and keeps its vote
            self.resumed += 1
        else:
            host.boot += 1
        host.outcome, host.asleep = "", False
        self.start(host, (host.memory if memory else None) or host.checkpoint or host.first)
        self.say(host, f"starts from {host.held.ref.lineage}")

    def end(self, host: Host) -> None:
        """A process that has stopped with the run ends."""
        if host.core is not None and host.outcome == "stopped":
            host.last_version = host.boot, host.core.promise_version
            host.reset()
            host.outcome = "stopped"

    def rejoin(self, host: Host) -> None:
        """Its agent has started another trainer."""
        if host.trainer is None and not host.outcome:
            host.trainer = Trainer()
            self.say(host, "rejoins")
            self.act(host, lambda core, now: core.rejoin(now))

    def withdraw(self, host: Host, core: Agreement, *, in_hand: bool) -> None:
        """Its trainer is gone, perhaps with samples in hand; its agent says so."""
        host.lose_trainer(in_hand=in_hand)
        stopped = core.withdraw()
        host.closed, host.told = False, True
        self.say(host, "withdraws")
        for other in self.hosts.values():
            if other is not host:
                self.network.send(host.peer_id, other.peer_id, Farewell(stopped, tuple(host.strikes)))

    def stand_aside(self, host: Host) -> None:
        """It does once it is cut off from somebody whom others hear; `rejoin` ends it."""
        core = host.core
        if core is not None and host.trainer is not None and not host.outcome and core.cut_off_from:
            self.withdraw(host, core, in_hand=False)

    def say(self, host: Host, line: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.now:7d} {host.peer_id}.{host.boot} {line}")

    def crash(self, host: Host) -> None:
        """The agent dies, and its trainer with it. What is in shared memory stays until the machine loses power."""
        if host.outcome == "finished":
            return
        self.faults += 1
        self.say(host, "crashes")
        if host.core is not None:
            core = host.core
            host.last_version = host.boot, core.promise_version
            self.graves[host.member] = Stopped(
                member=host.member, n=core._n, base=core._base, pending=tuple(sorted(core._pending))
            )
        host.reset()

    # -- one event of one core -------------------------------------------------------------------

    def act(self, host: Host, event: Callable[[Agreement, int], Ready]) -> Ready:
        """What its shell makes of it: to disk, then said, then acted on."""
        core = host.core
        assert core is not None
        if host.outcome:
            return Ready(accepted=False)
        self.events += 1
        host.reachable = self._reachable_shards(host)
        n = core._n
        ready = event(core, self.now + host.clock_ms)
        if self.trace is not None:
            for line in ready.trace:
                self.say(host, line)
        require(7, core._n >= n, "n of {} fell from {} to {}", host.peer_id, n, core._n)
        sends, dies = ready.sends, False
        if ready.persist is not None:
            host.disk, host.closed, host.told = ready.persist, False, True
            if host.armed is not None:
                sends, dies = sends[: host.armed], True
        for peer, message in sends:
            if peer in self.hosts:
                self.network.send(host.peer_id, peer, message)
        if ready.froze or core.frozen:
            host.reducing = None
        if core.completed != host.held.ref:  # a state that was adopted too late for the last view
            self._caught_up_late(host, core)
        if ready.installed is not None:
            self.checker.agreed(ready.installed)
        if ready.installed is not None and not dies and not host.completing:
            self._installed(host, ready.installed)
        if core.left_out and host.view is not None and host.core is core:
            host.left_out()
        if host.core is core:
            core.check_invariants()
            if dies:
                self.crash(host)
        return ready

    def _caught_up_late(self, host: Host, core: Agreement) -> None:
        model = host.models.get(core.completed.digest)
        if model is not None:
            host.held = model.renamed(core.completed)

    def deliver(self, source: str, destination: str, index: int = 0, *, keep: bool = False) -> None:
        """A message arrives, or is lost at a cut; `keep`: it will arrive again."""
        host = self.hosts.get(destination)
        if host is None or host.asleep:
            return
        message = self.network.take(source, destination, index, keep=keep)
        core, linked = host.core, self.network.linked(source, destination)
        if message is None or core is None or not linked:
            return
        if isinstance(message, Closed):
            self._hear_closed(host, source, message)
            return
        if host.outcome:
            asking = self.hosts[source]
            if host.outcome == "finished" and asking.up and self.network.linked(destination, source):
                self.finished(asking, host.held)  # it has not heard yet
            elif host.outcome == "stopped" and not isinstance(message, Farewell):
                self.tell_closed(host, source)
            return
        if isinstance(message, Farewell):
            host.learn_strikes(message.strikes)
            stopped = message.stopped
            self.act(host, lambda core, now: core.withdrawn(stopped, now))
            return
        said = message
        sender = said.stopped.member if isinstance(said, Withdrawal) else said.sender
        fenced = core._book.superseded(sender)
        before = core._attempt.words.get(sender.peer_id) if fenced and core._attempt is not None else None
        self.act(host, lambda core, now: core.receive(said, now))
        if fenced and host.core is core and core._attempt is not None:
            word = core._attempt.words.get(sender.peer_id)
            deaf = word is None or word is before or word.sender != sender
            require(7, deaf, "{} listens to the fenced {}", destination, sender)

    def _judge(self, host: Host, other: Host, boot: int, verdict: Verdict, version: int) -> None:
        self.act(host, lambda core, now: core.verdict(other.peer_id, boot, verdict, now, version=version))

    def finished(self, host: Host, model: Model) -> None:
        """The run ended with that state."""
        raise NotImplementedError

    def tell_closed(self, host: Host, peer: str) -> None:
        """It has stopped, and says so."""
        raise NotImplementedError

    def _hear_closed(self, host: Host, sender: str, closed: Closed) -> None:
        """Another one has stopped."""
        raise NotImplementedError

    def _installed(self, host: Host, view: View) -> None:
        """A view stands there: what that means for its rounds."""
        raise NotImplementedError
