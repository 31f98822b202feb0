"""The numbers of SWIM and Lifeguard: settings, formulas, awareness of one's own health, and the news queue.

Sources: Das, Gupta, Motivala, "SWIM" (DSN 2002); Dadgar, Phillips, Currey, "Lifeguard" (DSN-W 2018);
hashicorp/memberlist for the constants where the papers leave them open.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from p2p_dmc.core.membership_messages import MAX_PIGGYBACK_RECORDS, MemberRecord

_PUSH_PULL_SCALE_MEMBERS = 32
_MAX_PIGGYBACK_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipSettings:
    """How fast members look at each other. `lan()` derives all of it from one period."""

    probe_interval_ms: int
    """From one probe to the next, while this peer feels well."""
    probe_timeout_ms: int
    """For a direct answer, before others are asked to try; the rest of the interval is theirs."""
    indirect_probes: int
    """How many others are asked."""
    suspicion_mult: int
    """Suspicion lasts at least this many probe intervals (times log10 of the members beyond ten)."""
    suspicion_max_mult: int
    """An unconfirmed suspicion lasts this many times longer."""
    gossip_interval_ms: int
    """Between two rounds of gossip while there is news."""
    gossip_fanout: int
    """Members told per round of gossip."""
    retransmit_mult: int
    """Each piece of news is sent this many times log10 of the members."""
    push_pull_interval_ms: int
    """Between full exchanges with a random member, which repair what gossip missed."""
    seed_retry_ms: int
    """Between tries of a seed that has not answered yet."""
    reclaim_dead_ms: int
    """Between tries of one dead member, so that a healed partition merges."""
    forget_left_ms: int
    """A member that left is remembered so long, so that old news does not revive it."""
    forget_dead_ms: int
    """A dead member is remembered, shown and tried so long."""
    awareness_max: int
    """An unwell peer probes at most this many times more slowly (Lifeguard's S, plus one)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < (0 if field.name == "indirect_probes" else 1):
                raise ValueError(f"{field.name} {value} is too small")
        if self.probe_timeout_ms >= self.probe_interval_ms:
            raise ValueError(
                f"probe_timeout_ms {self.probe_timeout_ms} leaves nothing of probe_interval_ms "
                f"{self.probe_interval_ms} for indirect probes"
            )

    @classmethod
    def lan(cls, *, base_ms: int = 500) -> MembershipSettings:
        """For one local network. Silence is DEAD everywhere within 8 x base_ms at up to 16 members:

        2 base until the ring predecessor probes, 1 for the probe, 3 to 3.6 of suspicion, the rest to spread.
        """
        return cls(
            probe_interval_ms=base_ms,
            probe_timeout_ms=base_ms // 2,
            indirect_probes=3,
            suspicion_mult=3,
            suspicion_max_mult=6,
            gossip_interval_ms=base_ms // 5,
            gossip_fanout=3,
            retransmit_mult=4,
            push_pull_interval_ms=20 * base_ms,
            seed_retry_ms=2 * base_ms,
            reclaim_dead_ms=10 * base_ms,
            forget_left_ms=120 * base_ms,
            forget_dead_ms=24 * 3600 * 1000,
            awareness_max=8,
        )


def suspicion_min_ms(settings: MembershipSettings, members: int) -> int:
    """Shortest suspicion in a cluster of `members` (memberlist, suspicionTimeout)."""
    scale = max(1.0, math.log10(max(1, members)))
    return round(settings.suspicion_mult * scale * settings.probe_interval_ms)


def suspicion_remaining_ms(
    *, confirmations: int, wanted: int, elapsed_ms: float, min_ms: float, max_ms: float
) -> float:
    """Time left of a suspicion after `confirmations` independent ones of `wanted`; negative: over.

    Lifeguard, section IV.B: from max_ms down to min_ms, logarithmically in the confirmations.
    """
    if wanted < 1:
        return min_ms - elapsed_ms
    fraction = math.log(confirmations + 1) / math.log(wanted + 1)
    return max(min_ms, max_ms - fraction * (max_ms - min_ms)) - elapsed_ms


def retransmit_limit(mult: int, members: int) -> int:
    """How often one member sends one piece of news (memberlist, retransmitLimit)."""
    return mult * math.ceil(math.log10(members + 1))


def push_pull_scale(members: int) -> int:
    """Factor on the push-pull interval, so that large clusters exchange no more in total (memberlist)."""
    if members <= _PUSH_PULL_SCALE_MEMBERS:
        return 1
    return math.ceil(math.log2(members) - math.log2(_PUSH_PULL_SCALE_MEMBERS)) + 1


class Awareness:
    """How unwell this peer seems to itself, 0 (well) to limit - 1 (Lifeguard, section IV.A)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.score = 0

    def add(self, delta: int) -> None:
        self.score = max(0, min(self._limit - 1, self.score + delta))

    @property
    def scale(self) -> int:
        """Factor on probe interval and time-out."""
        return self.score + 1


class Broadcasts:
    """News still to be sent: at most one piece per subject, always what is known of it now, each a limited
    number of times, the least sent first (memberlist, TransmitLimitedQueue).
    """

    def __init__(self) -> None:
        self._sent: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self._sent

    def add(self, peer_id: str) -> None:
        """There is something new to say of peer_id; whatever was said of it before is superseded."""
        self._sent[peer_id] = 0

    def discard(self, peer_id: str) -> None:
        self._sent.pop(peer_id, None)

    def clear(self) -> None:
        self._sent.clear()

    def take(
        self, lookup: Callable[[str], MemberRecord | None], limit: int, *, room: int = MAX_PIGGYBACK_RECORDS
    ) -> tuple[MemberRecord, ...]:
        """News for one message, counted as sent once. Empty once everything was sent `limit` times."""
        taken: list[MemberRecord] = []
        size_bytes = 0
        for peer_id in sorted(self._sent, key=lambda peer: (self._sent[peer], peer)):
            record = lookup(peer_id)
            if record is None:
                del self._sent[peer_id]
                continue
            size_bytes += len(record.meta)
            if len(taken) >= room or (taken and size_bytes > _MAX_PIGGYBACK_BYTES):
                break
            taken.append(record)
            self._sent[peer_id] += 1
            if self._sent[peer_id] >= limit:
                del self._sent[peer_id]
        return tuple(taken)
