"""The machines of the random world, as it sees them from outside."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_messages import (
    MemberId,
    Promises,
    StateRef,
    Verdict,
    View,
)


class Violation(AssertionError):
    """Two peers contradict each other, or nothing happens any more."""


@dataclass
class Entry:
    """A member at a round's barrier: it goes in with the state it has."""

    view: View
    round_number: int
    state: StateRef


@dataclass
class Host:
    """One machine."""

    peer_id: str
    boot: int = 1
    disk: Promises = field(default_factory=Promises)
    checkpoint: StateRef | None = None
    core: Agreement | None = None
    entry: Entry | None = None
    held: set[StateRef] = field(default_factory=set)
    """States in memory: what it completed, and downloads that are whole."""
    acknowledged_ms: dict[str, int] = field(default_factory=dict)
    """When this host last acknowledged a probe of each other one."""
    contact: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Of each other one: (boot, when it acknowledged, promise version) as last heard."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    withdrawn: bool = False

    @property
    def member(self) -> MemberId:
        return MemberId(peer_id=self.peer_id, boot=self.boot)
