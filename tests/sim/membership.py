"""Membership as agreement sees it: what a truthful detector may say, at the worst moments it may say it.

The rules are the shell's (`p2p_dmc/agent/verdicts.py`): silence is told no earlier than a suspicion time after the
peer was last heard; a refusal by a live machine counts as a crash if the peer was heard within that time, with promises
as new as it said then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from p2p_dmc.core.agreement_messages import Verdict
from tests.sim.host import Host
from tests.sim.network import Network

SUSPICION_MS = 1_500
UNTOLD = -1
"""In place of a version: it said nothing of its promises (`Host.told`), and its end is a death only."""


@dataclass
class Ages:
    """How old the promises were with which crashes were counted."""

    crashes: int = 0
    """Crashes that somebody saw."""
    without_promises: int = 0
    """... of which nothing was known."""
    behind_the_ack: int = 0
    """... of which the promises were older than its last acknowledgement."""
    behind_the_dead: int = 0
    """... of which the promises were older than the dead one's last, whoever it had told."""


def told(host: Host) -> int:
    """How new its promises are, as its signs of life say."""
    assert host.core is not None
    return host.core.promise_version if host.told else UNTOLD


class Detector:
    """All peers' failure detectors at once."""

    def __init__(
        self,
        network: Network,
        judge: Callable[[Host, Host, int, Verdict, int], None],
    ) -> None:
        self.network, self.judge = network, judge
        self.contact = 1
        """A refusal counts as a crash within so many suspicion times of the last sign of life; as in the shell."""
        self.ages = Ages()
        self.now_ms = 0

    def probe(self, host: Host, other: Host) -> None:
        """`other` probes `host`, which hears that and acknowledges."""
        core = host.core
        if (
            core is None
            or not host.up
            or not other.up
            or not self.network.linked(other.peer_id, host.peer_id)
        ):
            return
        self.hear(host, other)
        if self.network.linked(host.peer_id, other.peer_id) and host.core is not None:
            self.hear(other, host)

    def hear(self, host: Host, other: Host) -> None:
        """A sign of life."""
        if host.core is None or other.core is None:
            return
        now = self.now_ms + host.clock_ms
        host.heard[other.peer_id] = (other.boot, now, told(other))
        self.tell(host, other, other.boot, Verdict.REACHABLE)

    def meet(self, host: Host, others: Sequence[Host]) -> None:
        """They have just found each other: none of them has been silent yet."""
        now = self.now_ms + host.clock_ms
        for other in others:
            if other is not host and host.core is not None and other.core is not None:
                host.heard.setdefault(other.peer_id, (other.boot, now, told(other)))

    def tell(self, host: Host, other: Host, boot: int, verdict: Verdict, version: int = 0) -> None:
        if host.up and host.verdicts.get(other.peer_id) != (boot, verdict):
            host.verdicts[other.peer_id] = boot, verdict
            self.judge(host, other, boot, verdict, version)

    def suspect(self, host: Host, other: Host) -> None:
        """Suspicion runs out, rightly or not."""
        boot, heard_ms, _ = host.heard.get(other.peer_id, (0, -SUSPICION_MS, 0))
        if self.now_ms + host.clock_ms - heard_ms >= SUSPICION_MS:
            self.tell(host, other, boot or other.boot, Verdict.UNREACHABLE)

    def see_crash(self, host: Host, other: Host) -> None:
        """The machine of `other` lives and refuses."""
        boot, heard_ms, version = host.heard.get(other.peer_id, (0, 0, 0))
        refused = other.core is None or other.boot > boot
        if not host.up or not boot or not refused or not self.network.both_ways(host.peer_id, other.peer_id):
            return
        in_contact = (
            self.now_ms + host.clock_ms - heard_ms < self.contact * SUSPICION_MS and version != UNTOLD
        )
        if in_contact and host.verdicts.get(other.peer_id) != (boot, Verdict.CRASHED):
            self._note_age(host, other, boot, version)
        self.tell(
            host,
            other,
            boot,
            Verdict.CRASHED if in_contact else Verdict.UNREACHABLE,
            max(0, version),
        )

    def _note_age(self, host: Host, other: Host, boot: int, acknowledged: int) -> None:
        assert host.core is not None
        promised = next(
            (p for m, p in host.core._book.promised.items() if (m.peer_id, m.boot) == (other.peer_id, boot)),
            None,
        )
        self.ages.crashes += 1
        self.ages.without_promises += promised is None
        if promised is not None:
            self.ages.behind_the_ack += promised.version < acknowledged
            last = other.last_version if other.last_version[0] == boot else (boot, promised.version)
            self.ages.behind_the_dead += promised.version < last[1]

    def truth(self, host: Host, hosts: dict[str, Host]) -> None:
        """This host's detector has caught up with what is; where it hears nothing itself, others probe for it."""

        def heard_by_a_third(other: Host) -> bool:
            both_ways = self.network.both_ways
            return any(
                both_ways(host.peer_id, third.peer_id) and both_ways(third.peer_id, other.peer_id)
                for third in hosts.values()
                if third is not host and third is not other and third.up
            )

        for other in hosts.values():
            if other is host or not host.up:
                continue
            if self.network.both_ways(host.peer_id, other.peer_id) and not other.asleep:
                if other.core is not None:
                    self.hear(host, other)
                elif other.boot:
                    self.see_crash(host, other)
            elif other.up and heard_by_a_third(other):
                self.tell(host, other, other.boot, Verdict.REACHABLE)
            else:
                self.suspect(host, other)
