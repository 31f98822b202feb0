"""What the agent offers to its runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from p2p_dmc.agent.bulk import BulkClient
from p2p_dmc.agent.datasets import DataService
from p2p_dmc.agent.home import Home, MemoryFolder
from p2p_dmc.agent.verdicts import Judged
from p2p_dmc.config import AgentSettings
from p2p_dmc.core.membership import MemberRecord
from p2p_dmc.observe.journal import Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything a run may use of its agent; built once, when the agent has its address."""

    home: Home
    peer_id: str
    boot: int
    name: str
    settings: AgentSettings
    journal: Journal
    memory: MemoryFolder
    bulk: BulkClient
    data: DataService
    send: Callable[[str, object, str], None]
    """peer_id, message, run: best effort, the protocols repeat themselves."""
    members: Callable[[], tuple[MemberRecord, ...]]
    """Everybody that membership knows, this peer included."""
    promised: Callable[[str, int | None], None]
    """The version of this peer's promises in a run, by name: every sign of life tells it from here on."""
    meta_changed: Callable[[], None]
    """What this peer says of its runs has changed."""
    say: Callable[[str], None]
    """One line for the user."""
    replay_verdicts: Callable[[Judged], None]
    """Tell a run that has just begun to listen who can be reached."""
    seed_known: Callable[[], bool]
    """Whether founding is in order as far as seeds go: none was given, or one has answered."""
    run_over: Callable[[str], None]
    """This run (by name) is over on this peer."""
    collective_host: Callable[[], str]
    """The address of this machine that the other trainers can reach."""

    def record(self, peer_id: str) -> MemberRecord | None:
        return next((r for r in self.members() if r.peer_id == peer_id), None)
