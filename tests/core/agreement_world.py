"""A random world made of the real agreement core: crashes, restarts, cuts, loss, slow adoption, withdrawals.

    python -m tests.core.agreement_world --seeds 2000              explore
    python -m tests.core.agreement_world --seeds 500 --break RULE  leave one rule out, to see it caught

The world is the shell, the disk, the network, membership and the trainers of all peers at once. It breaks no
promise that the real ones keep, and nothing else is certain. A state is a chain of the rounds in it, its digest
their hash.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from collections.abc import Callable

from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_messages import (
    AgreementMessage,
    AgreementSettings,
    MemberId,
    Ready,
    StateRef,
    Stopped,
    Verdict,
    View,
)
from p2p_dmc.core.quorum import Quorum
from tests.core.agreement_hosts import Entry, Host, Violation
from tests.sim.mutants import MUTANTS, mutant

SUSPICION_MS = 1_500
SETTLE_MS = 120_000
"""Virtual time within which everybody must train together once all faults have ended."""

Chain = tuple[tuple[tuple[int, int], tuple[str, ...]], ...]


class World:
    """See the module's docstring. Everything random comes from one seeded generator."""

    def __init__(self, seed: int, peers: int, quorum: Quorum = Quorum.MAJORITY, log: bool = False) -> None:
        self.r = random.Random(seed)
        self.quorum = quorum
        self.now = 0
        self.log = log
        self.hosts = {f"p{i}": Host(f"p{i}") for i in range(peers)}
        self.net: list[tuple[int, str, str, AgreementMessage | Stopped]] = []
        """(due, source, destination, message)"""
        self.cut = dict.fromkeys(self.hosts, 0)
        self.deaf: set[tuple[str, str]] = set()
        self.chains: dict[bytes, Chain] = {}
        self.names: dict[tuple[bytes, tuple[int, int]], bytes] = {}
        self.entered: dict[tuple[bytes, int], dict[MemberId, StateRef]] = {}
        self.views: dict[tuple[bytes, int, bytes], View] = {}
        self.commits: list[tuple[bytes, Chain, tuple[MemberId, ...]]] = []
        self.installs = self.rounds = self.faults = 0
        self.lossy = True
        self.weather()
        for host in self.hosts.values():
            self.start(host)

    # -- hosts -----------------------------------------------------------------------------------

    def initial(self, host: Host) -> StateRef:
        digest = hashlib.blake2b(host.peer_id.encode(), digest_size=16).digest()
        self.chains.setdefault(digest, ())
        return StateRef(lineage=(0, 0), digest=digest)

    def start(self, host: Host, memory: StateRef | None = None) -> None:
        completed = memory or host.checkpoint or self.initial(host)
        host.core = Agreement(
            me=host.member,
            quorum=self.quorum,
            promises=host.disk,
            completed=completed,
            payload=lambda: host.peer_id.encode(),
            rng=random.Random(self.r.random()),
            settings=AgreementSettings(),
            now_ms=self.now,
        )
        host.held = {completed}
        host.entry, host.verdicts, host.contact, host.acknowledged_ms = None, {}, {}, {}
        host.withdrawn = False

    def live(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.core is not None]

    def linked(self, source: str, destination: str) -> bool:
        return self.cut[source] == self.cut[destination] and (source, destination) not in self.deaf

    def reachable(self, host: Host) -> list[Host]:
        return [
            other
            for other in self.live()
            if other is not host
            and self.linked(host.peer_id, other.peer_id)
            and self.linked(other.peer_id, host.peer_id)
        ]

    def crash(self, host: Host) -> None:
        self.faults += 1
        self.say(host, "crashes")
        memory = host.core.completed if host.core is not None else None
        host.core, host.entry = None, None
        host.held = {memory} if memory is not None and self.r.random() < 0.2 else set()

    def restart(self, host: Host) -> None:
        """The same machine again; its shared memory may have survived the agent."""
        host.boot += 1
        memory = max(host.held, key=lambda state: state.lineage, default=None)
        self.start(host, memory)
        self.say(host, f"restarts from {host.core.completed.lineage}")  # type: ignore[union-attr]

    def say(self, host: Host, line: str) -> None:
        if self.log:
            print(f"{self.now:7d} {host.peer_id}.{host.boot} {line}")

    def act(self, host: Host, event: Callable[[Agreement], Ready]) -> Ready:
        """One event of one core, and what its shell makes of it."""
        core = host.core
        assert core is not None
        n = core._n
        ready = event(core)
        for line in ready.trace:
            self.say(host, line)
        if core._n < n:
            raise Violation(f"n of {host.peer_id} fell from {n} to {core._n}")
        if ready.persist is not None:
            host.disk = ready.persist
        dies = self.lossy and ready.persist is not None and self.r.random() < 0.01
        sends = list(ready.sends)
        self.r.shuffle(sends)
        for peer, message in sends[: self.r.randrange(len(sends) + 1)] if dies else sends:
            self.net.append((self.now + self.r.randrange(1, 20), host.peer_id, peer, message))
        if ready.froze or core.frozen:
            host.entry = None
        if ready.installed is not None:
            self.on_installed(host, ready.installed)
        core.check_invariants()
        if dies:
            self.crash(host)
        return ready

    def on_installed(self, host: Host, view: View) -> None:
        self.installs += 1
        known = self.views.setdefault((view.history, view.view_epoch, view.view_id), view)
        if known != view:
            raise Violation(f"one view id, two views: {known} and {view}")
        if self.quorum is not Quorum.ANY and len({history for history, _, _ in self.views}) > 1:
            raise Violation("two histories were founded")

    # -- rounds ----------------------------------------------------------------------------------

    def enter(self, host: Host) -> None:
        core = host.core
        if core is None or core.frozen or core.view is None or host.entry or core.behind:
            return
        host.entry = Entry(core.view, core.completed.lineage[1] + 1, core.completed)
        key = core.view.view_id, host.entry.round_number
        self.entered.setdefault(key, {})[host.member] = core.completed

    def complete(self, host: Host) -> None:
        entry, core = host.entry, host.core
        if entry is None or core is None:
            return
        view = entry.view
        got = self.entered[view.view_id, entry.round_number]
        if not set(got) >= set(view.voters):  # learners enter with whatever they have, or with nothing
            return
        if len(set(got.values())) != 1:
            raise Violation(f"one round was entered from different states: {got}")
        chain = self.chains[entry.state.digest]
        if chain:
            self.commit(view, chain)
            core.committed(entry.state.lineage)
            if self.r.random() < self.checkpoints:
                host.checkpoint = entry.state
                self.act(host, lambda core: core.checkpointed(entry.state.lineage, self.now))
                if host.core is None:
                    return
        longer = (*chain, ((view.view_epoch, entry.round_number), view.ref.peers))
        digest = hashlib.blake2b(repr((longer, view.history)).encode(), digest_size=16).digest()
        self.chains[digest] = longer
        state = StateRef(lineage=longer[-1][0], digest=digest)
        if self.names.setdefault((view.history, state.lineage), digest) != digest:
            raise Violation(f"one lineage names two states: {state.lineage}")
        host.entry = None
        if self.act(host, lambda core: core.complete(state, self.now)).accepted:
            self.rounds += 1
            host.held.add(state)

    def commit(self, view: View, chain: Chain) -> None:
        """Everybody in the view has it. No other committed history may still be remembered."""
        fact = view.history, chain, view.voters
        if fact in self.commits:
            return
        for history, other, members in self.commits:
            if history != view.history:
                continue
            short, long = sorted((chain, other), key=len)
            differ = long[: len(short)] != short
            if differ and self.remembered(other, members) and self.remembered(chain, view.voters):
                raise Violation(f"two remembered histories: ...{chain[-2:]} and ...{other[-2:]}")
        self.commits.append(fact)

    def remembered(self, chain: Chain, members: tuple[MemberId, ...]) -> bool:
        for member in members:
            host = self.hosts[member.peer_id]
            alive = host.core is not None and host.boot == member.boot
            if alive and self.chains[host.core.completed.digest][: len(chain)] == chain:  # type: ignore[union-attr]
                return True
        return False

    def adopt(self, host: Host, *, frozen_too: bool = True) -> None:
        """A download of the start state ends, from anybody who holds it. The view may be over by then."""
        core = host.core
        views = [view for view in self.views.values() if host.member in view.members]
        if core is None or not views:
            return
        view = max(views, key=lambda view: view.view_epoch)
        if core.completed.lineage >= view.start.lineage > (0, 0) and not core.behind:
            return
        if core.frozen and not frozen_too:
            return
        states = {view.start}
        if host.member not in view.voters:  # it replays the rounds that it took part in
            states |= {s for other in self.live() for s in other.held if s.lineage[0] == view.view_epoch}
        state = self.r.choice(sorted(states, key=lambda state: state.lineage))
        if any(state in other.held for other in [host, *self.reachable(host)]):
            host.held.add(state)
            self.act(host, lambda core: core.adopted(state, self.now))

    # -- membership ------------------------------------------------------------------------------

    def probe(self, host: Host, other: Host) -> None:
        """`other` probes `host`, which acknowledges: to a peer it takes for alive, and with its promise version."""
        core = host.core
        if (
            core is None
            or other.core is None
            or host is other
            or not self.linked(other.peer_id, host.peer_id)
        ):
            return
        if host.verdicts.get(other.peer_id) not in (None, Verdict.REACHABLE):
            self.judge(host, other, Verdict.REACHABLE)
        host.acknowledged_ms[other.peer_id] = self.now
        if self.linked(host.peer_id, other.peer_id):
            other.contact[host.peer_id] = (host.boot, self.now, core.promise_version)

    def judge(
        self, host: Host, other: Host, verdict: Verdict, version: int | None = None, boot: int = 0
    ) -> None:
        host.verdicts[other.peer_id] = verdict
        at = boot or other.boot
        self.act(host, lambda core: core.verdict(other.peer_id, at, verdict, self.now, version=version))

    def suspect(self, host: Host, other: Host) -> None:
        """Suspicion ran out, rightly or not; never within a suspicion time of acknowledging."""
        if other is host:
            return
        since = self.now - host.acknowledged_ms.get(other.peer_id, -SUSPICION_MS)
        if host.core is not None and since >= SUSPICION_MS:
            self.judge(host, other, Verdict.UNREACHABLE)

    def see_crash(self, host: Host, other: Host) -> None:
        """Refused by a live machine shortly after an acknowledgement."""
        if host is other:
            return
        boot, at_ms, version = host.contact.get(other.peer_id, (0, -SUSPICION_MS, 0))
        dead = other.core is None or other.boot > boot
        if boot and dead and self.now - at_ms < SUSPICION_MS and self.linked(other.peer_id, host.peer_id):
            self.judge(host, other, Verdict.CRASHED, version, boot)

    def truth(self, host: Host) -> None:
        """Membership has caught up."""
        reachable = self.reachable(host)
        for other in self.hosts.values():
            if other is host or host.core is None:
                continue
            if other in reachable:
                self.judge(host, other, Verdict.REACHABLE)
            else:
                self.suspect(host, other)

    # -- the shell's requests --------------------------------------------------------------------

    def ask(self, host: Host) -> None:
        core = host.core
        if core is None or core.view is not None or host.withdrawn:
            return
        for other in self.reachable(host):
            if self.r.random() < 0.9 or not self.lossy:
                self.act(other, lambda core: core.join_requested(host.peer_id, self.now))

    def repeat_header(self, host: Host) -> None:
        """To members that it waits for; some of them may have moved on."""
        if host.entry is None:
            return
        view = host.entry.view
        for other in self.reachable(host):
            stands = other.core is not None and other.core.view not in (None, view)
            if other.peer_id in view.peers and stands:
                self.act(other, lambda core: core.foreign_header(host.peer_id, view.view_epoch, self.now))

    def barrier(self, host: Host) -> None:
        """All members stand at a header barrier, and one wants a change."""
        view = host.core.view if host.core is not None else None
        if view is None:
            return
        hosts = [self.hosts[member.peer_id] for member in view.voters]
        cores = [host.core for host in hosts if host.core is not None and host.core.view == view]
        learners = [self.hosts[member.peer_id] for member in view.learners]
        asking = [one.core for one in learners if one.core is not None and one.core.view == view]
        if len(cores) == len(hosts) and any(core.change_wanted for core in [*cores, *asking]):
            for other in hosts:
                if other.core is not None and (self.r.random() < 0.9 or not self.lossy):
                    self.act(other, lambda core: core.at_barrier(self.now))

    def reopen(self, host: Host) -> None:
        core = host.core
        if core is not None and core.view is None and core.history and not host.withdrawn:
            peers = tuple(sorted(other.peer_id for other in [host, *self.reachable(host)]))
            self.act(host, lambda core: core.found(peers, self.now))

    def withdraw(self, host: Host) -> None:
        if host.core is None or host.withdrawn:
            return
        self.faults += 1
        stopped = host.core.withdraw()
        self.say(host, "withdraws")
        host.withdrawn, host.entry = True, None
        for other in self.hosts:
            if other != host.peer_id:
                self.net.append((self.now + self.r.randrange(1, 50), host.peer_id, other, stopped))

    def rejoin(self, host: Host) -> None:
        if host.core is not None and host.withdrawn:
            host.withdrawn = False
            self.say(host, "rejoins")
            self.act(host, lambda core: core.rejoin(self.now))

    # -- time ------------------------------------------------------------------------------------

    def deliver(self, index: int) -> None:
        _, source, destination, message = self.net[index]
        if not (self.lossy and self.r.random() < 0.03):  # else: twice
            self.net[index] = self.net[-1]
            self.net.pop()
        host = self.hosts[destination]
        if host.core is None or not self.linked(source, destination):
            return
        if self.lossy and self.r.random() < 0.05:
            return
        if isinstance(message, Stopped):
            self.act(host, lambda core: core.withdrawn(message, self.now))
        else:
            self.act(host, lambda core: core.receive(message, self.now))

    def found_all(self) -> None:
        """The founding, in calm, by some of the hosts. The others come later."""
        self.lossy = False
        peers = tuple(sorted(self.hosts))[: self.r.randrange(len(self.hosts)) + 1]
        for host in [self.hosts[peer] for peer in peers]:
            self.act(host, lambda core: core.found(peers, self.now))
        while self.net:
            self.deliver(self.r.randrange(len(self.net)))
        self.lossy = True

    def weather(self) -> None:
        """Each seed has its own climate (swarm testing): some kinds of trouble are rare in it, some frequent."""
        r = self.r
        rate = lambda usual: usual * r.choice([0.0, 0.3, 1.0, 1.0, 3.0])  # noqa: E731
        self.actions: list[tuple[Callable[[Host, Host], object], float]] = [
            (lambda a, b: self.net and self.deliver(r.randrange(len(self.net))), 45),
            (lambda a, b: self.enter(a), 12),
            (lambda a, b: self.complete(a), 12),
            (lambda a, b: self.act(a, lambda core: core.tick(self.now)), 6),
            (lambda a, b: self.probe(a, b), 8),
            (lambda a, b: self.adopt(a), rate(5)),
            (lambda a, b: self.see_crash(a, b), 2 + rate(6)),
            (lambda a, b: self.suspect(a, b), rate(3)),
            (lambda a, b: self.truth(a), rate(3)),
            (lambda a, b: self.ask(a), rate(3)),
            (lambda a, b: self.barrier(a), rate(2)),
            (lambda a, b: self.reopen(a), rate(1)),
            (lambda a, b: self.odd(a), rate(1)),
            (lambda a, b: self.force(a), rate(2)),
            (lambda a, b: self.cut.update({a.peer_id: r.choice([0, 0, 0, 1])}), rate(1)),
            (lambda a, b: self.deaf.symmetric_difference_update({(a.peer_id, b.peer_id)}), rate(0.5)),
            (lambda a, b: self.deaf.clear(), 0.5),
            (lambda a, b: self.crash(a), rate(0.6)),
            (lambda a, b: self.withdraw(a), rate(0.3)),
            (lambda a, b: self.rejoin(a), rate(1)),
        ]
        self.weights = [weight for _, weight in self.actions]
        self.restarts = r.choice([0.02, 0.1, 0.3])
        self.pace_ms = r.choice([4, 12, 40])
        self.checkpoints = r.choice([0.02, 0.2, 0.6])

    def odd(self, host: Host) -> None:
        at_once = self.r.random() < 0.7
        self.act(host, lambda core: core.wants_change("an odd collective", self.now, at_once=at_once))

    def force(self, host: Host) -> None:
        """An attempt without any cause: that nobody starts one without a majority's is not what safety rests on."""

        def event(core: Agreement) -> Ready:
            core._begin(self.now)
            if not core._withdrawn and core.history:
                core._open(
                    core._n + 1, [other.peer_id for other in self.reachable(host)], (), (), "for no reason"
                )
            return core._finish()

        self.act(host, event)

    def step(self) -> None:
        """One thing happens somewhere."""
        r = self.r
        self.now += r.randrange(self.pace_ms)
        host = r.choice(list(self.hosts.values()))
        other = r.choice([other for other in self.hosts.values() if other is not host] or [host])
        if len(self.net) > 300:
            self.net = self.net[-150:]
        if host.core is not None:
            ((action, _),) = r.choices(self.actions, self.weights)
            action(host, other)
        elif r.random() < self.restarts:
            self.restart(host)
        elif other is not host and other.core is not None and r.random() < 0.5:
            self.see_crash(other, host)

    # -- the end: all faults are over ------------------------------------------------------------

    def settle(self) -> None:
        """Everything is mended. Raise unless all hosts soon train in one view."""
        self.cut, self.lossy = dict.fromkeys(self.hosts, 0), False
        self.deaf.clear()
        self.net.clear()
        for host in self.hosts.values():
            if host.core is None:
                self.restart(host)
            self.rejoin(host)
        end = self.now + SETTLE_MS
        target = None
        for turn in range(SETTLE_MS // 10):
            self.now += 10
            if self.now > end:
                break
            self.turn(turn)
            rounds = [self.settled_rounds(host) for host in self.hosts.values()]
            if None not in rounds:
                target = target or max(rounds) + 3  # type: ignore[type-var, operator]
                if min(rounds) >= target:  # type: ignore[type-var]
                    return
            else:
                target = None
        waits = {host.peer_id: host.core.waiting_for() for host in self.live() if host.core is not None}
        raise Violation(f"nothing happens any more at {self.now}: {waits}")

    def settled_rounds(self, host: Host) -> int | None:
        view = host.core.view if host.core is not None else None
        if view is None or {member.peer_id for member in view.voters} != set(self.hosts):
            return None
        return host.core.completed.lineage[1]  # type: ignore[union-attr]

    def lull(self, turns: int) -> None:
        """Cuts and deaths stay as they are, but nothing new goes wrong for a while: somebody may get on."""
        self.lossy = False
        for turn in range(turns):
            self.now += 10
            self.turn(turn)
        self.lossy = True

    def turn(self, turn: int) -> None:
        """Ten milliseconds of a shell that does its work at every host."""
        due = [item for item in self.net if item[0] <= self.now]
        for item in due:
            self.deliver(self.net.index(item))
        for host in self.live():
            assert host.core is not None
            if turn % 20 == 0:
                self.truth(host)
            if host.core.next_deadline_ms(self.now - 10) <= self.now:
                self.act(host, lambda core: core.tick(self.now))
            if turn % 30 == 0:
                self.adopt(host, frozen_too=False)
            if turn % 50 == 0:
                self.ask(host)
            if turn % 10 == 0:
                self.enter(host)
                self.complete(host)
            if turn % 10 == 0 and self.r.random() < 0.3:
                self.barrier(host)
            if turn % 40 == 0:
                self.repeat_header(host)
        if turn % 100 == 0 and not any(host.core.view for host in self.live() if host.core):
            stuck = [
                host
                for host in self.live()
                if host.core
                and (host.core.left_out or host.peer_id not in getattr(host.core._attempt, "voters", ()))
            ]
            for host in stuck:
                self.reopen(host)


def run(
    seed: int, steps: int = 1500, *, quorum: Quorum = Quorum.MAJORITY, settle: bool = True, log: bool = False
) -> World:
    """One random life of 1 to 6 peers, and its happy end."""
    world = World(seed, 1 + seed % 6, quorum=quorum, log=log)
    world.found_all()
    while steps > 0:
        world.lull(world.r.choice([0, 30, 100, 300]))
        storm = world.r.choice([5, 20, 60, 200])
        for _ in range(storm):
            world.step()
        steps -= storm
    if settle:
        world.settle()
    return world


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--quorum", choices=[quorum.name.lower() for quorum in Quorum], default="majority")
    parser.add_argument("--break", dest="broken", choices=sorted(MUTANTS), help="leave one rule out")
    parser.add_argument("--no-settle", action="store_true", help="safety only")
    parser.add_argument("--log", action="store_true")
    options = parser.parse_args()
    began, bad = time.monotonic(), 0
    totals = [0, 0, 0, 0]
    with mutant(options.broken):
        for seed in range(options.start, options.start + options.seeds):
            try:
                world = run(
                    seed,
                    options.steps,
                    quorum=Quorum[options.quorum.upper()],
                    settle=not options.no_settle,
                    log=options.log,
                )
                counts = world.installs, world.rounds, len(world.commits), world.faults
                totals = [total + count for total, count in zip(totals, counts, strict=True)]
            except AssertionError as error:
                bad += 1
                if bad <= 5:
                    print(f"seed {seed}: {type(error).__name__}: {error}"[:600])
    installs, rounds, commits, faults = totals
    print(
        f"{options.seeds} seeds, {options.quorum}, without {options.broken or 'nothing'}: {bad} violations; "
        f"{installs} installs, {rounds} rounds, {commits} commits, {faults} faults; {time.monotonic() - began:.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
