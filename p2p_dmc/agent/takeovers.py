"""Who takes over what of members that are gone (DESIGN.md section 11, events.jsonl)."""

from __future__ import annotations

from dataclasses import dataclass

from p2p_dmc.agent.work import Work
from p2p_dmc.core.agreement_messages import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    """Samples of one shard that changed hands because their owner is gone."""

    shard: int
    from_peer: str
    to_peer: str
    first: int  # position in the epoch's order of the first sample taken over
    samples: int


def takeovers(old: Work, old_view: View, new: Work, new_view: View) -> tuple[Takeover, ...]:
    """For each member of the old view that the new one lacks: the uncounted part of its list, and who has it now."""
    if old.assignment.epoch != new.assignment.epoch:
        return ()
    staying = {m.peer_id for m in new_view.members}
    owners: dict[int, list[tuple[int, int, str]]] = {}
    for i, member in enumerate(new_view.members):
        for s in new.assignment.stretches(i):
            owners.setdefault(s.shard, []).append((s.lo, s.hi, member.peer_id))
    found = []
    for i, member in enumerate(old_view.members):
        if member.peer_id in staying:
            continue
        for stretch in old.assignment.stretches(i):
            for lo, hi, owner in owners.get(stretch.shard, ()):
                first, last = max(lo, stretch.lo), min(hi, stretch.hi)
                if first < last:
                    found.append(
                        Takeover(
                            shard=stretch.shard,
                            from_peer=member.peer_id,
                            to_peer=owner,
                            first=first,
                            samples=last - first,
                        )
                    )
    return tuple(found)
