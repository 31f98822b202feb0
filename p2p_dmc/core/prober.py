"""Who is silent: direct and indirect probes (SWIM, sections 3.1 and 4.3; Lifeguard, section IV).

Two additions. Every second probe goes to the next well member in the ring of peer ids, so that somebody
probes everybody within two intervals, where shuffled round-robin alone has a long tail. And suspects
heard of, like helpers that said not even a nack, are probed out of turn, so that confirmations need not wait.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2p_dmc.core.gossip_voice import Voice
from p2p_dmc.core.member_table import MemberTable
from p2p_dmc.core.membership_messages import Ack, MemberState, Nack, Ping, PingReq, Sender
from p2p_dmc.core.suspicion import Awareness, MembershipSettings

if TYPE_CHECKING:
    import random

_MAX_RELAYS = 256
_MAX_AT_ONCE = 16
_CONFIRMERS = 16
"""About so many members probe a suspect out of turn, however large the cluster."""


@dataclass(slots=True)
class _Probe:
    peer_id: str
    boot: int
    incarnation: int
    indirect_at_ms: int
    verdict_at_ms: int
    asked: bool
    alone: bool
    """There was nobody to ask."""
    silent: list[str]
    """Those that were asked to try and have said nothing yet, not even a nack."""

    def due_ms(self) -> int:
        return self.verdict_at_ms if self.asked else self.indirect_at_ms


@dataclass(slots=True)
class _Relay:
    requester: Sender
    seq: int
    peer_id: str
    nack_at_ms: int
    nacked: bool
    until_ms: int

    def due_ms(self) -> int:
        return self.until_ms if self.nacked else self.nack_at_ms


class Prober:
    """Probes under way, for this peer itself and on behalf of others."""

    def __init__(
        self,
        table: MemberTable,
        voice: Voice,
        settings: MembershipSettings,
        rng: random.Random,
        now_ms: int,
    ) -> None:
        self.awareness = Awareness(settings.awareness_max)
        self._table = table
        self._voice = voice
        self._settings = settings
        self._rng = rng
        self._probe_at_ms = now_ms + rng.randrange(settings.probe_interval_ms)
        self._probes: dict[int, _Probe] = {}
        """Invariant: no two of one member."""
        self._relays: dict[int, _Relay] = {}
        self._round_robin: list[str] = []
        """Who is still to be probed in this pass, the next one last."""
        self._ring_turn = False

    def due_ms(self) -> int:
        """When `tick` is next needed."""
        probes_ms = [probe.due_ms() for probe in self._probes.values()]
        relays_ms = [relay.due_ms() for relay in self._relays.values()]
        return min([self._probe_at_ms, *probes_ms, *relays_ms])

    def tick(self, now_ms: int) -> None:
        self._advance_probes(now_ms)
        self._advance_relays(now_ms)
        if now_ms >= self._probe_at_ms:
            self._probe_at_ms = now_ms + self._settings.probe_interval_ms * self.awareness.scale
            self._probe_next(now_ms)

    def postpone(self, late_ms: int, now_ms: int) -> None:
        """This peer itself slept so long: nobody is judged by it, and those that asked have moved on."""
        self.awareness.add(1)
        self._relays.clear()
        self._probe_at_ms = max(self._probe_at_ms, now_ms)
        for probe in self._probes.values():
            probe.indirect_at_ms += late_ms
            probe.verdict_at_ms += late_ms

    def stop(self) -> None:
        self._probes.clear()
        self._relays.clear()

    def welcome(self, peer_id: str) -> None:
        """A new member gets a random place in the present pass (SWIM, section 4.3)."""
        self._round_robin.insert(self._rng.randint(0, len(self._round_robin)), peer_id)

    # Probing.

    def _probe_next(self, now_ms: int) -> None:
        busy = {probe.peer_id for probe in self._probes.values()}
        free = [peer_id for peer_id in self._table.here() if peer_id not in busy]
        if not free:
            return
        self._ring_turn = not self._ring_turn
        well = [peer_id for peer_id in free if peer_id not in self._table.suspicions]
        if self._ring_turn and well:
            self._probe(well[bisect.bisect(well, self._table.me.peer_id) % len(well)], now_ms)
            return
        while True:
            while self._round_robin:
                peer_id = self._round_robin.pop()
                if peer_id in free:
                    self._probe(peer_id, now_ms)
                    return
            self._round_robin = list(self._table.here())
            self._rng.shuffle(self._round_robin)

    def out_of_turn(self, peer_id: str, now_ms: int) -> None:
        """Probe it now, unless that is under way or enough others do."""
        if len(self._probes) >= _MAX_AT_ONCE or any(p.peer_id == peer_id for p in self._probes.values()):
            return
        if self._rng.random() * self._table.size < _CONFIRMERS:
            self._probe(peer_id, now_ms)

    def _probe(self, peer_id: str, now_ms: int) -> None:
        record = self._table[peer_id]
        scale = self.awareness.scale
        seq = self._voice.next_seq()
        self._probes[seq] = _Probe(
            peer_id=peer_id,
            boot=record.boot,
            incarnation=record.incarnation,
            indirect_at_ms=now_ms + self._settings.probe_timeout_ms * scale,
            verdict_at_ms=now_ms + self._settings.probe_interval_ms * scale,
            asked=False,
            alone=True,
            silent=[],
        )
        # A suspect hears of it from whoever pings it, so that it refutes at once (Lifeguard, buddy system).
        staple = () if record.state is MemberState.ALIVE else (record,)
        ping = Ping(
            sender=self._voice.me(),
            seq=seq,
            peer_id=peer_id,
            boot=record.boot,
            incarnation=record.incarnation,
            records=self._voice.news(first=staple),
        )
        self._voice.send(record.address, peer_id, ping)

    def _advance_probes(self, now_ms: int) -> None:
        for seq, probe in list(self._probes.items()):
            if not self._table.is_here(probe.peer_id):
                del self._probes[seq]
            elif now_ms >= probe.verdict_at_ms:
                del self._probes[seq]
                self._fail(probe, now_ms)
            elif now_ms >= probe.indirect_at_ms and not probe.asked:
                self._ask_others(seq, probe, now_ms)

    def _ask_others(self, seq: int, probe: _Probe, now_ms: int) -> None:
        record = self._table[probe.peer_id]
        suspects = self._table.suspicions
        well = [p for p in self._table.here() if p not in suspects and p != probe.peer_id]
        probe.asked = True
        probe.silent = self._rng.sample(well, min(self._settings.indirect_probes, len(well)))
        probe.alone = not probe.silent
        for helper in probe.silent:
            request = PingReq(
                sender=self._voice.me(),
                seq=seq,
                peer_id=record.peer_id,
                boot=record.boot,
                incarnation=record.incarnation,
                address=record.address,
                timeout_ms=max(1, (probe.verdict_at_ms - now_ms) * 4 // 5),
                records=self._voice.news(),
            )
            self._voice.send_to(helper, request)

    def _fail(self, probe: _Probe, now_ms: int) -> None:
        record = self._table[probe.peer_id]
        # With nobody to ask, or askers that are silent too, the fault may well be mine.
        self.awareness.add(1 if probe.alone else len(probe.silent))
        if (record.boot, record.incarnation) == (probe.boot, probe.incarnation):
            self._table.suspect(probe.peer_id, now_ms)
            if self._table.size <= _CONFIRMERS:
                self._voice.tell_all(self._table[probe.peer_id])
            else:
                self._voice.gossip_at_ms = now_ms
        for helper in probe.silent:
            if self._table.is_here(helper):
                self.out_of_turn(helper, now_ms)

    def _advance_relays(self, now_ms: int) -> None:
        for seq, relay in list(self._relays.items()):
            if now_ms >= relay.nack_at_ms and not relay.nacked:
                relay.nacked = True
                nack = Nack(sender=self._voice.me(), seq=relay.seq, records=self._voice.news())
                self._voice.send(relay.requester.address, relay.requester.peer_id, nack)
            if now_ms >= relay.until_ms:
                del self._relays[seq]

    # Answers.

    def answer(self, ping: Ping) -> None:
        """As myself, even if somebody else was meant: so the asker learns who lives here now."""
        me = self._table.me
        current = (ping.peer_id, ping.boot, ping.incarnation) == (me.peer_id, me.boot, me.incarnation)
        ack = Ack(
            sender=self._voice.me(),
            seq=ping.seq,
            peer_id=me.peer_id,
            boot=me.boot,
            records=self._voice.news(first=() if current else (me,)),
        )
        self._voice.send(ping.sender.address, ping.sender.peer_id, ack)

    def help(self, request: PingReq, now_ms: int) -> None:
        """Ping somebody for somebody."""
        if len(self._relays) >= _MAX_RELAYS:
            return
        seq = self._voice.next_seq()
        nack_at_ms = now_ms + request.timeout_ms
        self._relays[seq] = _Relay(
            requester=request.sender,
            seq=request.seq,
            peer_id=request.peer_id,
            nack_at_ms=nack_at_ms,
            nacked=False,
            until_ms=nack_at_ms + request.timeout_ms,
        )
        ping = Ping(
            sender=self._voice.me(),
            seq=seq,
            peer_id=request.peer_id,
            boot=request.boot,
            incarnation=request.incarnation,
            records=self._voice.news(),
        )
        self._voice.send(request.address, request.peer_id, ping)

    def hear_nack(self, nack: Nack) -> None:
        probe = self._probes.get(nack.seq)
        if probe is not None and nack.sender.peer_id in probe.silent:
            probe.silent.remove(nack.sender.peer_id)

    def hear_ack(self, ack: Ack) -> str | None:
        """Returns whom was meant if somebody else answered in its place."""
        probe = self._probes.get(ack.seq)
        relay = self._relays.get(ack.seq)
        if probe is not None:
            if ack.peer_id == probe.peer_id:
                del self._probes[ack.seq]
                self.awareness.add(-1)
            elif ack.peer_id == ack.sender.peer_id:
                del self._probes[ack.seq]
                return probe.peer_id
        elif relay is not None:
            del self._relays[ack.seq]
            if ack.peer_id != relay.peer_id:
                return relay.peer_id
            answer = Ack(
                sender=self._voice.me(),
                seq=relay.seq,
                peer_id=ack.peer_id,
                boot=ack.boot,
                records=self._voice.news(),
            )
            self._voice.send(relay.requester.address, relay.requester.peer_id, answer)
        return None

    def check_invariants(self) -> None:
        assert len(self._relays) <= _MAX_RELAYS, f"{len(self._relays)} relays, at most {_MAX_RELAYS}"
        targets = sorted(probe.peer_id for probe in self._probes.values())
        assert len(targets) == len(set(targets)), f"two probes of one member under way: {targets}"
