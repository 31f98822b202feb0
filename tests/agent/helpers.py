"""A peer's surroundings, made by hand: records, views, services without an agent."""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import numpy as np

from p2p_dmc.agent.bulk import BulkClient
from p2p_dmc.agent.datasets import DataService
from p2p_dmc.agent.home import Home, MemoryFolder
from p2p_dmc.agent.services import Services
from p2p_dmc.agent.state import Held, SlotPool, file_digest, state_digest
from p2p_dmc.agent.work import PlainBraid, ProposalPayload, Strike, bitmap, encode_payload
from p2p_dmc.config import AgentSettings
from p2p_dmc.core.adacomm import TauPolicy, TauState, start
from p2p_dmc.core.agreement_messages import MemberId, StateRef, View
from p2p_dmc.core.ledger import Ledger
from p2p_dmc.core.membership import MemberRecord, MemberState
from p2p_dmc.core.membership_messages import Role
from p2p_dmc.observe.journal import Journal
from p2p_dmc.wire.messages import PeerMeta, RoundHeader, RunMeta, encode_meta
from p2p_dmc.wire.trainer_messages import ParameterSpec

POLICY = TauPolicy(kind="fixed", tau0=4)
VIEW_ID = b"v" * 16
DATASET = b"d" * 16


def peer(i: int) -> str:
    """The i-th peer's id; they sort as their numbers do."""
    return f"{i:032x}"


def member(i: int, boot: int = 1) -> MemberId:
    return MemberId(peer_id=peer(i), boot=boot)


def plain(cls: type, **facts: Any) -> Any:
    """One of a dataclass with the fields that matter here; the others are 0, empty or False."""
    hints = typing.get_type_hints(cls)
    for one in fields(cls):
        if one.name not in facts and hints[one.name] in (int, str, bytes, bool, float):
            facts[one.name] = hints[one.name]()
    return cls(**facts)


def run_meta(**facts: Any) -> RunMeta:
    """A ready peer outside of any view."""
    given = {"name": "r", "boot": 1, "ready": True, "fingerprint": b"f" * 8} | facts
    return cast(RunMeta, plain(RunMeta, **given))


def record(
    i: int,
    *runs: RunMeta,
    weight: int = 1,
    state: MemberState = MemberState.ALIVE,
    bulk: str = "",
    domain: str = "",
) -> MemberRecord:
    return MemberRecord(
        peer_id=peer(i),
        boot=1,
        incarnation=0,
        state=state,
        name=f"peer{i}",
        address=f"tcp://127.0.0.1:{10000 + i}",
        bulk_address=bulk,
        role=Role.TRAIN,
        meta=encode_meta(PeerMeta(weight=weight, domain=domain, runs=runs)),
    )


def payload(
    shards: Sequence[int] = (),
    count: int = 4,
    *,
    view_epoch: int = 0,
    epoch: int = 0,
    part: int = 0,
    claims: tuple[PlainBraid, ...] = (),
    reachable: Sequence[int] | None = None,
    speed: int = 0,
    strikes: tuple[Strike, ...] = (),
    counted: tuple[tuple[str, int, int], ...] = (),
) -> ProposalPayload:
    """What a member's proposal carries; it holds ``shards``, and knows where ``reachable`` are (default: all)."""
    return ProposalPayload(
        view_epoch=view_epoch,
        epoch=epoch,
        part=part,
        claims=claims,
        holdings=bitmap(frozenset(shards), count),
        reachable=bitmap(frozenset(range(count) if reachable is None else reachable), count),
        speed=speed,
        full=False,
        strikes=strikes,
        counted=counted,
    )


def view_of(
    payloads: Sequence[ProposalPayload],
    *,
    view_epoch: int = 1,
    start: tuple[int, int] = (0, 0),
    members: Sequence[int] | None = None,
    learners: Sequence[int] = (),
) -> View:
    """A view of peers 1, 2, ... with these payloads, those of ``learners`` as learners."""
    ids = tuple(member(i) for i in (members if members is not None else range(1, len(payloads) + 1)))
    return View(
        history=b"h" * 16,
        view_epoch=view_epoch,
        view_id=VIEW_ID,
        members=ids,
        voters=tuple(m for m in ids if m not in [member(i) for i in learners]),
        start=StateRef(lineage=start, digest=b"s" * 16),
        holders=ids,
        payloads=tuple(encode_payload(p) for p in payloads),
        stopped=(),
    )


def header_like(own: RoundHeader, **facts: Any) -> RoundHeader:
    """Another member's header of the same round."""
    values = {f.name: getattr(own, f.name) for f in fields(own)}
    return RoundHeader(**(values | facts))


PARAMETERS = (
    ParameterSpec(name="weight", shape=(2, 3), dtype="float32"),
    ParameterSpec(name="bias", shape=(), dtype="float32"),
)
NUMEL = 7


def fill(slot: Path, value: float) -> bytes:
    """Write an anchor whose elements depend on ``value`` into a slot; its digest."""
    count = slot.stat().st_size // 4
    np.memmap(slot, dtype="<f4", mode="r+")[:] = np.arange(count, dtype=np.float32) + np.float32(value)
    return file_digest(slot)


def state(
    slots: SlotPool,
    lineage: tuple[int, int],
    value: float = 0.0,
    ledger: Ledger | None = None,
    tau: TauState | None = None,
) -> Held:
    """A state made up in a fresh slot, which it has pinned once."""
    slot = slots.take()
    anchor = fill(slot, value)
    ledger = ledger or Ledger.start(DATASET, [10, 10, 10, 10], 1, 2)
    tau = tau or start(POLICY)
    ref = StateRef(lineage=lineage, digest=state_digest(anchor, ledger, tau))
    return Held(ref=ref, slot=slot, anchor_digest=anchor, ledger=ledger, tau=tau)


class PlainFolder(MemoryFolder):
    """The agent's memory in its home: what a test kills leaves nothing outside of the test's folder."""

    def folder(self, needed_bytes: int) -> Path:
        self._home.root.mkdir(parents=True, exist_ok=True)
        folder = self._home.root / "memory"
        folder.mkdir(exist_ok=True)
        return folder


@dataclass
class Around:
    """Services of one peer, and what it said through them."""

    services: Services
    sent: list[tuple[str, object, str]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    members: list[MemberRecord] = field(default_factory=list)

    def named(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.events if line["event"] == event]


def surroundings(
    root: Path,
    *,
    me: int = 1,
    bulk: BulkClient | None = None,
    data: DataService | None = None,
    settings: AgentSettings | None = None,
) -> Around:
    """A home in ``root`` and everything a run may use, without an agent."""
    home = Home(root / f"home{me}")
    home.create()
    sent: list[tuple[str, object, str]] = []
    said: list[str] = []
    members: list[MemberRecord] = []
    journal = Journal(home.root, peer(me))
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    services = Services(
        home=home,
        peer_id=peer(me),
        boot=1,
        name=f"peer{me}",
        settings=settings or AgentSettings(),
        journal=journal,
        memory=PlainFolder(home, peer(me)),
        bulk=cast(BulkClient, bulk),
        data=cast(DataService, data),
        send=lambda to, message, run: sent.append((to, message, run)),
        members=lambda: tuple(members),
        promised=nothing,
        meta_changed=nothing,
        replay_verdicts=nothing,
        say=said.append,
        seed_known=lambda: True,
        run_over=nothing,
        collective_host=lambda: "127.0.0.1",
    )
    around = Around(services=services, sent=sent, said=said, members=members)
    journal.listeners.append(lambda kind, line: around.events.append(line) if kind == "event" else None)
    return around
