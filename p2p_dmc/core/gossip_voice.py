"""How one peer speaks: numbered messages under its own name, news on each of them, rounds of gossip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2p_dmc.core.member_table import MemberTable
from p2p_dmc.core.membership_messages import (
    MAX_PIGGYBACK_RECORDS,
    MAX_PROMISED,
    MAX_PUSH_PULL_RECORDS,
    Gossip,
    MemberRecord,
    MembershipMessage,
    MemberState,
    PushPull,
    Send,
    Sender,
)
from p2p_dmc.core.suspicion import MembershipSettings, retransmit_limit

if TYPE_CHECKING:
    import random

_MAX_TOLD_AT_ONCE = 64
_MAX_SPOKEN = 2048


class Voice:
    """Collects what is to be sent until the next call returns."""

    def __init__(
        self, table: MemberTable, settings: MembershipSettings, rng: random.Random, now_ms: int
    ) -> None:
        self.sends: list[Send] = []
        """Not yet handed out; whoever drains it clears it."""
        self.gossip_at_ms = now_ms
        self._table = table
        self._settings = settings
        self._rng = rng
        self._seq = rng.getrandbits(48)
        self._spoken_ms: dict[tuple[str, str], int] = {}
        """When a peer was last told or asked something out of turn, so that no two can set each other off."""
        self._promised: dict[str, int] = {}
        """Of each run, the last one to change at the end."""

    def me(self) -> Sender:
        me = self._table.me
        return Sender(
            peer_id=me.peer_id,
            boot=me.boot,
            incarnation=me.incarnation,
            address=me.address,
            promised=tuple(sorted(self._promised.items())),
        )

    def promised(self, run: str, version: int | None) -> None:
        """Said with every message from here on; None: of this run nothing is. Of too many, that whose promises changed
        longest ago goes.
        """
        if self._promised.get(run) == version:
            return
        self._promised.pop(run, None)
        if version is None:
            return
        if len(self._promised) >= MAX_PROMISED:
            del self._promised[next(iter(self._promised))]
        self._promised[run] = version

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def send(self, address: str, peer_id: str | None, message: MembershipMessage) -> None:
        self.sends.append(Send(address=address, peer_id=peer_id, message=message))

    def send_to(self, peer_id: str, message: MembershipMessage) -> None:
        self.send(self._table[peer_id].address, peer_id, message)

    def news(self, *, first: tuple[MemberRecord, ...] = ()) -> tuple[MemberRecord, ...]:
        """Records for one message: those given, then what has been sent least."""
        limit = retransmit_limit(self._settings.retransmit_mult, self._table.size)
        room = MAX_PIGGYBACK_RECORDS - len(first)
        news = self._table.broadcasts.take(self._table.get, limit, room=room)
        return (*first, *(record for record in news if record not in first))

    def everything(self, seq: int, *, reply: bool) -> PushPull:
        """All that is known; of a very large cluster a random part, this peer always in it."""
        records = self._table.all()
        if len(records) > MAX_PUSH_PULL_RECORDS:
            others = [record for record in records if record is not self._table.me]
            records = (self._table.me, *self._rng.sample(others, MAX_PUSH_PULL_RECORDS - 1))
        return PushPull(sender=self.me(), seq=seq, reply=reply, records=records)

    def tell(self, sender: Sender, record: MemberRecord, now_ms: int) -> None:
        """Answer somebody with a record that it seems not to know."""
        if self.may_speak("tell", sender.peer_id, now_ms):
            self.send(sender.address, sender.peer_id, Gossip(sender=self.me(), records=(record,)))

    def tell_all(self, record: MemberRecord) -> None:
        """At once, without waiting for gossip to spread it."""
        here = self._table.here()
        told = here if len(here) <= _MAX_TOLD_AT_ONCE else self._rng.sample(here, _MAX_TOLD_AT_ONCE)
        for peer_id in told:
            self.send_to(peer_id, Gossip(sender=self.me(), records=(record,)))

    def may_speak(self, what: str, peer_id: str, now_ms: int) -> bool:
        """At most once per probe time-out and peer."""
        last_ms = self._spoken_ms.get((what, peer_id))
        if last_ms is not None and now_ms - last_ms < self._settings.probe_timeout_ms:
            return False
        if len(self._spoken_ms) >= _MAX_SPOKEN:
            self._spoken_ms.clear()
        self._spoken_ms[(what, peer_id)] = now_ms
        return True

    def gossip(self, now_ms: int) -> None:
        """News to a few random members; to the recently dead too, who may have something to say to it."""
        self.gossip_at_ms = now_ms + self._settings.gossip_interval_ms
        if not len(self._table.broadcasts):
            return
        recent_ms = now_ms - 2 * self._settings.reclaim_dead_ms
        dead = [p for p in self._table.with_state(MemberState.DEAD) if self._table.changed_ms(p) > recent_ms]
        targets = sorted([*self._table.here(), *dead])
        for peer_id in self._rng.sample(targets, min(self._settings.gossip_fanout, len(targets))):
            news = self.news()
            if news:
                self.send_to(peer_id, Gossip(sender=self.me(), records=news))
        if not targets:
            self._table.broadcasts.clear()  # whoever comes exchanges everything first
