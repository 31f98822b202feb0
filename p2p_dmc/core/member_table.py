"""What one peer believes of all the others, and how two beliefs about one peer become one.

Beliefs form a join-semilattice: whatever the order in which records arrive, the same set of records ends in
the same belief. Time only adds suspicions and their ends.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from p2p_dmc.core.membership_messages import (
    INCARNATION_LIMIT,
    MAX_ACCUSERS,
    MemberEvent,
    MemberRecord,
    MemberState,
    Sender,
)
from p2p_dmc.core.suspicion import Broadcasts, MembershipSettings, suspicion_min_ms, suspicion_remaining_ms

MAX_MEMBERS = 4096
_MAX_FORGOTTEN = 1024
_HERE = (MemberState.ALIVE, MemberState.SUSPECT)


def precedence(record: MemberRecord) -> tuple[int, int, int, bool, str, str, str, int, bytes]:
    """What makes one record newer than another: a start, a refutation, a worse state; the rest breaks ties
    between two hosts that claim one identity, so that all members believe the same one of them.
    """
    return (
        record.boot,
        record.incarnation,
        int(record.state),
        record.attested,
        record.address,
        record.bulk_address,
        record.name,
        int(record.role),
        record.meta,
    )


def _life(record: MemberRecord) -> tuple[int, int, int]:
    return record.boot, record.incarnation, int(record.state)


def join(first: MemberRecord, second: MemberRecord) -> MemberRecord:
    """The newer of two records of one peer; of two suspicions, the accusers of both."""
    newer = max(first, second, key=precedence)
    if _life(first) != _life(second) or newer.state is not MemberState.SUSPECT:
        return newer
    accusers = tuple(sorted({*first.accusers, *second.accusers})[:MAX_ACCUSERS])
    return newer if accusers == newer.accusers else replace(newer, accusers=accusers)


@dataclass(slots=True)
class Suspicion:
    """One running suspicion; its accusers are in the record."""

    boot: int
    incarnation: int
    started_ms: int


class MemberTable:
    """Records of all members, this peer included, with the timers and the news that follow from them."""

    def __init__(self, me: MemberRecord, settings: MembershipSettings) -> None:
        self.me = me
        self.suspicions: dict[str, Suspicion] = {}
        """Invariant: exactly the SUSPECT members have one, for the boot and incarnation in their record."""
        self.broadcasts = Broadcasts()
        self.events: list[MemberEvent] = []
        """Not yet handed out; whoever drains it clears it."""
        self._settings = settings
        self._records: dict[str, MemberRecord] = {}
        """All but me."""
        self._ids: list[str] = []
        """Invariant: the keys of _records, sorted."""
        self._changed_ms: dict[str, int] = {}
        """When a member's state last changed here."""
        self._heard_ms: dict[str, int] = {}
        """When each member's present boot was last heard itself."""
        self._promised: dict[str, dict[str, int]] = {}
        """What it said then of its promises. Invariant: of exactly those in _heard_ms."""
        self._forgotten: dict[str, tuple[int, int, int]] = {}
        """Last life of members that were forgotten, oldest first: slower ones do not bring them back."""
        self._here: tuple[str, ...] | None = None
        self.broadcasts.add(me.peer_id)

    # What is known.

    def get(self, peer_id: str) -> MemberRecord | None:
        return self.me if peer_id == self.me.peer_id else self._records.get(peer_id)

    def __getitem__(self, peer_id: str) -> MemberRecord:
        """Of another member; KeyError if unknown."""
        return self._records[peer_id]

    def is_here(self, peer_id: str) -> bool:
        """True for another member that is ALIVE or SUSPECT."""
        record = self._records.get(peer_id)
        return record is not None and record.state in _HERE

    def all(self) -> tuple[MemberRecord, ...]:
        """Every record, mine included, sorted by peer_id."""
        return tuple(sorted([self.me, *self._records.values()], key=lambda record: record.peer_id))

    def here(self) -> tuple[str, ...]:
        """The others that are ALIVE or SUSPECT, sorted."""
        if self._here is None:
            self._here = tuple(peer_id for peer_id in self._ids if self._records[peer_id].state in _HERE)
        return self._here

    def with_state(self, state: MemberState) -> list[str]:
        """The others in this state, sorted."""
        return [peer_id for peer_id in self._ids if self._records[peer_id].state is state]

    @property
    def size(self) -> int:
        """Members that count in the formulas: me and the others that are here."""
        return len(self.here()) + 1

    def changed_ms(self, peer_id: str) -> int:
        return self._changed_ms[peer_id]

    def heard_ms(self, peer_id: str) -> int | None:
        return self._heard_ms.get(peer_id)

    def promised(self, peer_id: str) -> dict[str, int]:
        return self._promised.get(peer_id, {})

    def hear(self, sender: Sender, now_ms: int) -> None:
        """Something arrived from sender itself. What it said before over a connection that broke may arrive later."""
        record = self._records.get(sender.peer_id)
        if record is not None and record.boot == sender.boot:
            before = self.promised(sender.peer_id)
            self._heard_ms[sender.peer_id] = now_ms
            self._promised[sender.peer_id] = {
                run: max(version, before.get(run, 0)) for run, version in sender.promised
            }

    # Change.

    def merge(self, record: MemberRecord, source: str, now_ms: int, *, push_pull: bool = False) -> bool:
        """Believe record, said by `source`, unless something newer is known. True if it was news.

        A death that push-pull tells of may be long refuted, so it becomes a suspicion, unless attested.
        """
        if record.state is not MemberState.ALIVE and record.incarnation >= INCARNATION_LIMIT:
            return False  # nobody could refute it
        old = self._records.get(record.peer_id)
        if old is None:
            if _life(record) <= self._forgotten.get(record.peer_id, (-1, -1, -1)):
                return False
            if record.state is MemberState.LEFT and push_pull:
                return False  # or two members would remind each other of it for ever
            if not self._make_room():
                return False
        elif push_pull and record.state is MemberState.DEAD and not record.attested and old.state in _HERE:
            record = replace(record, state=MemberState.SUSPECT, accusers=(source,))
        new = record if old is None else join(old, record)
        if new == old:
            return False
        said_by = "said by itself" if source == record.peer_id else f"said by {source[:8]}"
        self._apply(new, said_by, now_ms)
        return True

    def suspect(self, peer_id: str, now_ms: int) -> None:
        """My own probe of it failed."""
        old = self._records[peer_id]
        accused = replace(old, state=MemberState.SUSPECT, accusers=(self.me.peer_id,))
        new = join(old, accused)
        if new != old:
            self._apply(new, "did not answer", now_ms)

    def declare_dead(self, peer_id: str, reason: str, now_ms: int, *, attested: bool) -> None:
        """At its present incarnation, so that it can refute."""
        old = self._records[peer_id]
        self._apply(replace(old, state=MemberState.DEAD, accusers=(), attested=attested), reason, now_ms)

    def change_me(self, me: MemberRecord, reason: str | None) -> None:
        """My own facts, incarnation or state; with a reason it is an event too."""
        old, self.me = self.me, me
        self.broadcasts.add(me.peer_id)
        if reason is not None:
            self.note(old.state, me, reason)

    def note(self, old: MemberState | None, record: MemberRecord, reason: str) -> None:
        self.events.append(
            MemberEvent(peer_id=record.peer_id, old=old, new=record.state, record=record, reason=reason)
        )

    def _apply(self, new: MemberRecord, reason: str, now_ms: int) -> None:
        """Invariant: the only place where a belief about another member changes."""
        peer_id = new.peer_id
        old = self._records.get(peer_id)
        self._records[peer_id] = new
        self._here = None
        if old is None:
            bisect.insort(self._ids, peer_id)
        if old is None or old.state is not new.state or old.boot != new.boot:
            self._changed_ms[peer_id] = now_ms
        if old is not None and old.boot != new.boot:
            self._heard_ms.pop(peer_id, None)
            self._promised.pop(peer_id, None)
        running = self.suspicions.get(peer_id)
        if new.state is not MemberState.SUSPECT:
            self.suspicions.pop(peer_id, None)
        elif running is None or (running.boot, running.incarnation) != (new.boot, new.incarnation):
            self.suspicions[peer_id] = Suspicion(new.boot, new.incarnation, now_ms)
        self.broadcasts.add(peer_id)
        self._note_change(old, new, reason)

    def _note_change(self, old: MemberRecord | None, new: MemberRecord, reason: str) -> None:
        if old is None:
            self.note(None, new, reason)
        elif old.boot != new.boot:
            if old.state in _HERE:
                over = replace(old, state=MemberState.DEAD, accusers=())
                self.note(old.state, over, f"restarted: boot {old.boot} became {new.boot}")
            was = MemberState.DEAD if old.state in _HERE else old.state
            self.note(was, new, f"started again as boot {new.boot}, {reason}")
        elif old.state is not new.state:
            refuted = old.state is MemberState.SUSPECT and new.state is MemberState.ALIVE
            self.note(old.state, new, "refuted the suspicion" if refuted else reason)
        else:
            names = ("name", "address", "bulk_address", "role", "meta")
            changed = [name for name in names if getattr(old, name) != getattr(new, name)]
            if changed:
                self.note(old.state, new, f"{', '.join(changed)} changed, {reason}")

    # Time.

    def suspicion_left_ms(self, peer_id: str, now_ms: int) -> int:
        """Until this SUSPECT becomes DEAD; zero: due."""
        suspicion = self.suspicions[peer_id]
        # Only those that are well can confirm: with nobody to ask, waiting longer would tell nothing.
        able = sum(1 for other in self.here() if other not in self.suspicions)
        min_ms = suspicion_min_ms(self._settings, self.size)
        left = suspicion_remaining_ms(
            confirmations=max(0, len(self._records[peer_id].accusers) - 1),
            wanted=min(self._settings.suspicion_mult - 2, able),
            elapsed_ms=now_ms - suspicion.started_ms,
            min_ms=min_ms,
            max_ms=min_ms * self._settings.suspicion_max_mult,
        )
        return max(0, math.ceil(left))

    def expire_suspicions(self, now_ms: int) -> list[str]:
        """Declare dead whoever has been suspected long enough, and say who."""
        over = [
            peer_id for peer_id in sorted(self.suspicions) if self.suspicion_left_ms(peer_id, now_ms) <= 0
        ]
        for peer_id in over:
            heard_ms = self._heard_ms.get(peer_id, self.suspicions[peer_id].started_ms)
            others = len([who for who in self._records[peer_id].accusers if who != self.me.peer_id])
            reason = f"silent for {(now_ms - heard_ms) / 1000:.1f} s, confirmed by {others}"
            self.declare_dead(peer_id, reason, now_ms, attested=False)
        return over

    def postpone_suspicions(self, late_ms: int) -> None:
        """This peer slept so long; the suspects had no chance to be heard."""
        for suspicion in self.suspicions.values():
            suspicion.started_ms += late_ms

    def forget_old(self, now_ms: int) -> None:
        """Drop those that left or died long ago."""
        keep_ms = {
            MemberState.LEFT: self._settings.forget_left_ms,
            MemberState.DEAD: self._settings.forget_dead_ms,
        }
        self._forget(
            peer_id
            for peer_id in list(self._ids)
            if (limit_ms := keep_ms.get(self._records[peer_id].state)) is not None
            and now_ms - self._changed_ms[peer_id] >= limit_ms
        )

    def _make_room(self) -> bool:
        """True if one more member may be remembered; the one that has been gone longest makes way."""
        if len(self._ids) < MAX_MEMBERS:
            return True
        gone = [peer_id for peer_id in self._ids if self._records[peer_id].state not in _HERE]
        if gone:
            self._forget([min(gone, key=lambda peer_id: (self._changed_ms[peer_id], peer_id))])
        return bool(gone)

    def _forget(self, peer_ids: Iterable[str]) -> None:
        for peer_id in peer_ids:
            self._forgotten.pop(peer_id, None)
            self._forgotten[peer_id] = _life(self._records.pop(peer_id))
            self._ids.remove(peer_id)
            self._changed_ms.pop(peer_id)
            self._heard_ms.pop(peer_id, None)
            self._promised.pop(peer_id, None)
            self.broadcasts.discard(peer_id)
            if len(self._forgotten) > _MAX_FORGOTTEN:
                del self._forgotten[next(iter(self._forgotten))]

    def check_invariants(self) -> None:
        """Raise AssertionError, naming both values, if a field contradicts another."""
        assert self._ids == sorted(self._records), f"ids {self._ids} but records of {sorted(self._records)}"
        assert self.me.peer_id not in self._records, f"{self.me.peer_id} is me and somebody else"
        assert set(self._changed_ms) == set(self._ids), "change times of others than the members: _forget?"
        assert set(self._heard_ms) <= set(self._ids), "heard times of strangers: _forget or hear"
        assert set(self._promised) == set(self._heard_ms), (
            "promises of others than those heard: hear or _apply"
        )
        assert len(self._ids) <= MAX_MEMBERS, f"{len(self._ids)} members, at most {MAX_MEMBERS}"
        suspects = self.with_state(MemberState.SUSPECT)
        assert suspects == sorted(self.suspicions), f"suspects {suspects}, timers {sorted(self.suspicions)}"
        for peer_id, suspicion in self.suspicions.items():
            record = self._records[peer_id]
            timer = (suspicion.boot, suspicion.incarnation)
            assert timer == (record.boot, record.incarnation), f"timer {timer} of another life than {record}"
        fresh = tuple(peer_id for peer_id in self._ids if self._records[peer_id].state in _HERE)
        assert self.here() == fresh, f"cached members {self._here}, in fact {fresh}: _here not reset"
