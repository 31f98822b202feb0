"""A few agreement cores on a perfect network whose time stands still: for tests of one behaviour at a time."""

from __future__ import annotations

import random

from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_messages import (
    AgreementMessage,
    AgreementSettings,
    MemberId,
    Promises,
    Ready,
    StateRef,
    Verdict,
    View,
)
from p2p_dmc.core.quorum import Quorum

REACHABLE, UNREACHABLE, CRASHED = Verdict.REACHABLE, Verdict.UNREACHABLE, Verdict.CRASHED


def state(epoch: int, number: int, mark: str = "s") -> StateRef:
    return StateRef(lineage=(epoch, number), digest=mark.encode().ljust(16, b"."))


class Cluster:
    """A few cores and a perfect network, on which messages may be held back. Time moves only when told to."""

    def __init__(self, names: str, quorum: Quorum = Quorum.MAJORITY, seed: int = 0) -> None:
        self.now = 1_000
        self.quorum = quorum
        self.rng = random.Random(seed)
        self.cores: dict[str, Agreement] = {}
        self.disk: dict[str, Promises] = {}
        self.mail: list[tuple[str, str, AgreementMessage]] = []
        self.sent: list[tuple[str, str, AgreementMessage]] = []
        self.down: set[str] = set()
        self.cut: set[tuple[str, str]] = set()
        self.views: dict[str, list[View]] = {}
        self.hops = 0
        for name in names:
            self.start(name)

    def start(
        self, name: str, boot: int = 1, completed: StateRef | None = None, disk: Promises | None = None
    ) -> Agreement:
        self.disk[name] = disk or self.disk.get(name, Promises())
        self.views.setdefault(name, [])
        self.down.discard(name)
        self.cores[name] = Agreement(
            me=MemberId(peer_id=name, boot=boot),
            quorum=self.quorum,
            promises=self.disk[name],
            completed=completed or state(0, 0, name),
            payload=lambda: f"of {name}".encode(),
            rng=random.Random(1),
            settings=AgreementSettings(),
            now_ms=self.now,
        )
        return self.cores[name]

    def __getitem__(self, name: str) -> Agreement:
        return self.cores[name]

    def do(self, name: str, ready: Ready) -> Ready:
        if ready.persist is not None:
            self.disk[name] = ready.persist
        for peer, message in ready.sends:
            self.mail.append((name, peer, message))
            self.sent.append((name, peer, message))
        if ready.installed is not None:
            self.views[name].append(ready.installed)
        self.cores[name].check_invariants()
        return ready

    def deliver(self, *, shuffle: bool = False, hops: int = 1_000_000) -> None:
        """Until nobody says anything more, or for so many message delays; counts those that it took."""
        end = self.hops + hops
        while self.mail and self.hops < end:
            batch, self.mail = self.mail, []
            self.hops += 1
            if shuffle:
                self.rng.shuffle(batch)
            for source, peer, message in batch:
                if peer in self.cores and peer not in self.down and (source, peer) not in self.cut:
                    self.do(peer, self[peer].receive(message, self.now))

    def wait(self, duration_ms: int, step_ms: int = 50) -> None:
        end = self.now + duration_ms
        while self.now < end:
            self.now += step_ms
            for name in self.up():
                self.do(name, self[name].tick(self.now))
            self.deliver()

    def up(self) -> list[str]:
        return [name for name in self.cores if name not in self.down]

    def found(self) -> None:
        for name in self.up():
            self.do(name, self[name].found(tuple(sorted(self.up())), self.now))
        self.deliver()

    def verdict(self, about: str, verdict: Verdict, by: str | None = None, boot: int = 1) -> None:
        for name in by or self.up():
            if name != about and name not in self.down:
                self.do(name, self[name].verdict(about, boot, verdict, self.now))

    def kill(self, names: str, verdict: Verdict = CRASHED) -> None:
        self.down |= set(names)
        for name in names:
            self.verdict(name, verdict)

    def round(self, names: str) -> StateRef:
        """These members complete the next round of their view."""
        view = self[names[0]].view
        assert view is not None
        done = state(view.view_epoch, self[names[0]].completed.lineage[1] + 1)
        for name in names:
            assert self.do(name, self[name].complete(done, self.now)).accepted
        self.deliver()
        return done

    def adopt(self, names: str) -> None:
        for name in names:
            view = self[name].view
            assert view is not None
            self.do(name, self[name].adopted(view.start, self.now))

    def standing(self, names: str) -> View:
        """The view that stands at all of these, and of exactly these."""
        views = {self[name].view for name in names}
        assert len(views) == 1, {name: self[name].waiting_for() for name in names}
        (view,) = views
        assert view is not None and view.peers == tuple(names)
        return view

    def run(self, names: str) -> Cluster:
        """Founded, adopted, one round complete, calm again."""
        self.found()
        self.adopt(names)
        self.round(names)
        self.now += 20_000
        self.sent.clear()
        self.hops = 0
        return self
