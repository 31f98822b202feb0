"""Who is here: SWIM with Lifeguard's refinements, as a pure core.

Time comes in as integer milliseconds of a clock that never runs backwards, messages come in by `receive`, and
every call returns what to send and what changed. The shell calls `tick` when `next_deadline_ms` says so.

Identity is (peer_id, boot, incarnation). A peer that slept judges nobody by the time it missed. What is known
lives in member_table, probing in prober, speaking in gossip_voice, the formulas in suspicion.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from p2p_dmc.core.gossip_voice import Voice
from p2p_dmc.core.member_table import MemberTable
from p2p_dmc.core.membership_messages import (
    INCARNATION_LIMIT,
    Ack,
    Gossip,
    MemberEvent,
    MemberRecord,
    MembershipMessage,
    MemberState,
    Nack,
    Output,
    Ping,
    PingReq,
    PushPull,
    Role,
    Send,
    Sender,
)
from p2p_dmc.core.prober import Prober
from p2p_dmc.core.suspicion import MembershipSettings, push_pull_scale
from p2p_dmc.errors import RemoteProtocolError

if TYPE_CHECKING:
    import random

__all__ = [
    "Ack",
    "Gossip",
    "MemberEvent",
    "MemberRecord",
    "MemberState",
    "Membership",
    "MembershipMessage",
    "MembershipSettings",
    "Nack",
    "Output",
    "Ping",
    "PingReq",
    "PushPull",
    "Role",
    "Send",
    "Sender",
]

_MAX_EXCHANGES = 128
_MAX_CLASHES = 16


class Membership:
    """One peer's view of who is here. Reads no clock, opens no socket, draws from no global generator."""

    def __init__(
        self,
        me: MemberRecord,
        seeds: tuple[str, ...],
        settings: MembershipSettings,
        rng: random.Random,
        now_ms: int,
    ) -> None:
        """Says nothing yet: the first `tick`, due at once, greets the seeds (addresses, tried for ever)."""
        if me.state is not MemberState.ALIVE:
            raise ValueError(f"a peer starts ALIVE, not {me.state.name}")
        self._settings = settings
        self._rng = rng
        self._table = MemberTable(me, settings)
        self._voice = Voice(self._table, settings, rng, now_ms)
        self._prober = Prober(self._table, self._voice, settings, rng, now_ms)
        self._exchanges: dict[int, tuple[str, str | None]] = {}
        """Push-pull requests under way, oldest first: address and who was believed to live there."""
        self._seeds: dict[str, str | None] = dict.fromkeys(seeds)
        """Who answered at each seed's address."""
        self._open_seeds: tuple[tuple[str, ...] | None, list[str]] = (None, [])
        self._seed_contacted = False
        self._my_addresses = {me.address}
        self._clashes: set[tuple[int, str]] = set()
        self._seeds_at_ms = now_ms
        self._push_pull_at_ms = now_ms + self._jitter_ms() + settings.push_pull_interval_ms // 10
        self._housekeeping_at_ms = now_ms + settings.reclaim_dead_ms
        self._due_ms = now_ms

    # What is known.

    @property
    def me(self) -> MemberRecord:
        return self._table.me

    @property
    def seed_contacted(self) -> bool:
        """True once a full exchange with another peer has succeeded."""
        return self._seed_contacted

    @property
    def health(self) -> int:
        """0: well; more: this peer seems slow to itself (Lifeguard's local health)."""
        return self._prober.awareness.score

    def members(self) -> tuple[MemberRecord, ...]:
        """All known members, me and the departed included, sorted by peer_id."""
        return self._table.all()

    def get(self, peer_id: str) -> MemberRecord | None:
        return self._table.get(peer_id)

    def last_heard_ms(self, peer_id: str) -> int | None:
        """When something last arrived from the present boot of that peer itself."""
        return self._table.heard_ms(peer_id)

    def last_promised(self, peer_id: str) -> dict[str, int]:
        """Version of its promises in each run, as the last that arrived from the present boot of that peer said."""
        return self._table.promised(peer_id)

    def next_deadline_ms(self, now_ms: int) -> int:
        """When to call `tick` next; never before now_ms."""
        return max(now_ms, self._next_due_ms(now_ms))

    def _next_due_ms(self, now_ms: int) -> int:
        gossip_ms = [self._voice.gossip_at_ms] if len(self._table.broadcasts) else []
        if self._left:
            return min(gossip_ms, default=now_ms + self._settings.push_pull_interval_ms)
        due_ms = [self._prober.due_ms(), self._push_pull_at_ms, self._housekeeping_at_ms, *gossip_ms]
        due_ms += [now_ms + self._table.suspicion_left_ms(peer, now_ms) for peer in self._table.suspicions]
        if self._seeds_to_try():
            due_ms.append(self._seeds_at_ms)
        return min(due_ms)

    @property
    def _left(self) -> bool:
        return self.me.state is MemberState.LEFT

    # What happens.

    def tick(self, now_ms: int) -> Output:
        """Time has passed."""
        self._notice_sleep(now_ms)
        if not self._left:
            self._prober.tick(now_ms)
            for peer_id in self._table.expire_suspicions(now_ms):
                self._voice.tell_all(self._table[peer_id])
            if now_ms >= self._push_pull_at_ms:
                wait_ms = self._settings.push_pull_interval_ms * push_pull_scale(self._table.size)
                self._push_pull_at_ms = now_ms + wait_ms + self._jitter_ms()
                self._exchange_with_one_of(self._table.here())
            if now_ms >= self._seeds_at_ms:
                self._try_seeds(now_ms)
            if now_ms >= self._housekeeping_at_ms:
                # One of the dead is tried now and then, so that a healed partition merges.
                self._housekeeping_at_ms = now_ms + self._settings.reclaim_dead_ms
                self._table.forget_old(now_ms)
                self._exchange_with_one_of(self._table.with_state(MemberState.DEAD))
        if now_ms >= self._voice.gossip_at_ms:
            self._voice.gossip(now_ms)
        return self._output(now_ms)

    def receive(self, message: MembershipMessage, now_ms: int) -> Output:
        """A message arrived. Raises RemoteProtocolError for what is no membership message."""
        if not isinstance(message, Ping | PingReq | Ack | Nack | Gossip | PushPull):
            raise RemoteProtocolError(f"{type(message).__name__} is no membership message")
        self._notice_sleep(now_ms)
        sender = message.sender
        known = self._table.get(sender.peer_id)
        if self._left:
            if isinstance(message, Ping):
                self._voice.tell(sender, self.me, now_ms)
        elif sender.peer_id == self.me.peer_id:
            self._hear_namesake(sender.boot, sender.address)
        elif known is not None and sender.boot < known.boot:
            self._voice.tell(sender, known, now_ms)  # an earlier life: fenced, and told so
        else:
            for record in message.records:
                self._merge(record, sender, now_ms, push_pull=isinstance(message, PushPull))
            self._hear(sender, now_ms)
            self._handle(message, now_ms)
        return self._output(now_ms)

    def refused(self, peer_id: str, boot: int, now_ms: int) -> Output:
        """The live host of this member refused a connection: that boot of it crashed, and all are told."""
        self._notice_sleep(now_ms)
        record = self._table.get(peer_id)
        if record is not None and record.boot == boot and not self._left:
            self._attest_death(peer_id, "refused by its host", now_ms)
        return self._output(now_ms)

    def leave(self, now_ms: int) -> Output:
        """Leave gracefully. From here on this peer says nothing but that it left; tick a few times more."""
        if not self._left:
            self._prober.stop()
            self._table.broadcasts.clear()
            self._table.change_me(replace(self.me, state=MemberState.LEFT), "left")
            self._voice.tell_all(self.me)
        return self._output(now_ms)

    def update(
        self,
        now_ms: int,
        *,
        name: str | None = None,
        role: Role | None = None,
        address: str | None = None,
        bulk_address: str | None = None,
        meta: bytes | None = None,
    ) -> Output:
        """My own facts change and are gossiped at once; None leaves a fact as it is. Nothing after `leave`.

        Raises ValueError for a fact that is out of bounds, and then changes nothing.
        """
        me = self.me
        new = replace(
            me,
            name=me.name if name is None else name,
            role=me.role if role is None else role,
            address=me.address if address is None else address,
            bulk_address=me.bulk_address if bulk_address is None else bulk_address,
            meta=me.meta if meta is None else meta,
        )
        if new != me and not self._left:
            self._my_addresses.add(new.address)
            self._raise_incarnation(new, me.incarnation, None)
            self._voice.gossip(now_ms)
        return self._output(now_ms)

    def promised(self, run: str, version: int | None) -> None:
        """This peer's promises in a run are of this version now: before anything is sent that depends on them."""
        self._voice.promised(run, version)

    def _output(self, now_ms: int) -> Output:
        output = Output(sends=tuple(self._voice.sends), events=tuple(self._table.events))
        self._voice.sends.clear()
        self._table.events.clear()
        self._due_ms = self._next_due_ms(now_ms)
        return output

    def _notice_sleep(self, now_ms: int) -> None:
        """If this process itself stood still, others had no chance to be heard: what was to be judged
        meanwhile moves, and it counts against this peer's own health (Lifeguard: the slow ones accuse).
        """
        late_ms = now_ms - self._due_ms
        if late_ms <= self._settings.probe_timeout_ms:
            return
        self._prober.postpone(late_ms, now_ms)
        self._table.postpone_suspicions(late_ms)
        self._push_pull_at_ms = max(self._push_pull_at_ms, now_ms)
        self._housekeeping_at_ms = max(self._housekeeping_at_ms, now_ms)
        self._seeds_at_ms = max(self._seeds_at_ms, now_ms)
        self._voice.gossip_at_ms = max(self._voice.gossip_at_ms, now_ms)

    # Records.

    def _merge(self, record: MemberRecord, sender: Sender, now_ms: int, *, push_pull: bool) -> None:
        if record.peer_id == self.me.peer_id:
            self._hear_about_me(record, sender, now_ms)
            return
        old = self._table.get(record.peer_id)
        if not self._table.merge(record, sender.peer_id, now_ms, push_pull=push_pull):
            return
        new = self._table[record.peer_id]
        if old is None and self._table.is_here(new.peer_id):
            self._prober.welcome(new.peer_id)
        if new.state is MemberState.SUSPECT and (old is None or old.state is not MemberState.SUSPECT):
            self._prober.out_of_turn(new.peer_id, now_ms)

    def _hear_about_me(self, record: MemberRecord, sender: Sender, now_ms: int) -> None:
        me = self.me
        if record.boot > me.boot:
            self._hear_namesake(record.boot, record.address)
        elif (record.boot, record.incarnation) < (me.boot, me.incarnation):
            self._voice.tell(sender, me, now_ms)
        elif record.address != me.address:
            self._hear_namesake(record.boot, record.address)
        elif record.state is not MemberState.ALIVE and record.incarnation >= INCARNATION_LIMIT:
            return  # nobody believes it, see MemberTable.merge
        elif record.state is not MemberState.ALIVE or record.incarnation > me.incarnation:
            self._prober.awareness.add(1)
            said = f"{record.state.name} said by {sender.peer_id[:8]}"
            self._raise_incarnation(me, record.incarnation, f"refuted: {said}")
            self._voice.gossip_at_ms = now_ms

    def _raise_incarnation(self, me: MemberRecord, above: int, reason: str | None) -> None:
        if above >= INCARNATION_LIMIT:
            self._table.change_me(me, "incarnations used up: only a restart can refute or change anything")
        else:
            self._table.change_me(replace(me, incarnation=above + 1), reason)

    def _hear_namesake(self, boot: int, address: str) -> None:
        """Somebody speaks under my identity. Never answered by a higher incarnation, or two hosts that share
        a copy of one home would outbid each other for ever; the shell is told once per boot and address.
        """
        me = self.me
        if boot < me.boot or (boot == me.boot and address in self._my_addresses):
            return  # an echo of an earlier life, or my own voice through a seed
        if (boot, address) in self._clashes or len(self._clashes) >= _MAX_CLASHES:
            return
        self._clashes.add((boot, address))
        rival = replace(me, boot=boot, address=address)
        self._table.note(me.state, rival, f"identity clash: boot {boot} at {address} claims to be this peer")

    def _hear(self, sender: Sender, now_ms: int) -> None:
        self._table.hear(sender, now_ms)
        known = self._table.get(sender.peer_id)
        if known is None or (known.boot, known.incarnation) < (sender.boot, sender.incarnation):
            if self._voice.may_speak("ask", sender.peer_id, now_ms):
                self._exchange(sender.address, sender.peer_id)
        elif known.state is not MemberState.ALIVE:
            self._voice.tell(sender, known, now_ms)  # so that it can refute

    # Messages.

    def _handle(self, message: MembershipMessage, now_ms: int) -> None:
        match message:
            case Ping():
                self._prober.answer(message)
            case PingReq():
                self._prober.help(message, now_ms)
            case Ack():
                self._replace(self._prober.hear_ack(message), message.sender, now_ms)
            case Nack():
                self._prober.hear_nack(message)
            case PushPull():
                self._hear_exchange(message, now_ms)
            case Gossip():
                pass  # its records were all it had

    def _hear_exchange(self, message: PushPull, now_ms: int) -> None:
        sender = message.sender
        self._seed_contacted = True
        if not message.reply:
            self._voice.send(sender.address, sender.peer_id, self._voice.everything(message.seq, reply=True))
            return
        address, believed = self._exchanges.pop(message.seq, (None, None))
        if address in self._seeds:
            self._seeds[address] = sender.peer_id
            self._open_seeds = (None, [])
        if believed != sender.peer_id:
            self._replace(believed, sender, now_ms)

    def _replace(self, peer_id: str | None, sender: Sender, now_ms: int) -> None:
        """Sender answered where peer_id was believed to live."""
        record = None if peer_id is None else self._table.get(peer_id)
        if record is not None and record.address == sender.address:
            self._attest_death(record.peer_id, f"{sender.peer_id[:8]} answers at its address", now_ms)

    def _attest_death(self, peer_id: str, reason: str, now_ms: int) -> None:
        if self._table.is_here(peer_id):
            self._table.declare_dead(peer_id, reason, now_ms, attested=True)
            self._voice.tell_all(self._table[peer_id])

    # Exchanges.

    def _exchange(self, address: str, peer_id: str | None) -> None:
        if address == self.me.address:
            return
        seq = self._voice.next_seq()
        if len(self._exchanges) >= _MAX_EXCHANGES:
            del self._exchanges[next(iter(self._exchanges))]
        self._exchanges[seq] = (address, peer_id)
        self._voice.send(address, peer_id, self._voice.everything(seq, reply=False))

    def _exchange_with_one_of(self, peer_ids: tuple[str, ...] | list[str]) -> None:
        if peer_ids:
            record = self._table[self._rng.choice(peer_ids)]
            self._exchange(record.address, record.peer_id)

    def _seeds_to_try(self) -> list[str]:
        """Seeds where nobody is known to be at present."""
        here = self._table.here()
        if self._open_seeds[0] is not here:  # a new tuple after every change
            taken = {self.me.address, *(self._table[peer_id].address for peer_id in here)}
            live = set(here)
            seeds = [seed for seed, who in self._seeds.items() if seed not in taken and who not in live]
            self._open_seeds = (here, seeds)
        return self._open_seeds[1]

    def _try_seeds(self, now_ms: int) -> None:
        wait_ms = self._settings.reclaim_dead_ms if self._table.here() else self._settings.seed_retry_ms
        self._seeds_at_ms = now_ms + wait_ms
        for seed in self._seeds_to_try():
            self._exchange(seed, None)

    def _jitter_ms(self) -> int:
        return self._rng.randrange(max(1, self._settings.push_pull_interval_ms // 10))

    def check_invariants(self) -> None:
        """Raise AssertionError, naming both values, if the state contradicts itself."""
        self._table.check_invariants()
        self._prober.check_invariants()
        assert self.me.state in (MemberState.ALIVE, MemberState.LEFT), (
            f"this peer believes itself {self.me.state}"
        )
        assert len(self._exchanges) <= _MAX_EXCHANGES, f"{len(self._exchanges)} exchanges of {_MAX_EXCHANGES}"
