"""The agent: one asyncio loop around membership, data sets and runs; it supervises trainers (DESIGN.md section 2)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq.asyncio

from p2p_dmc.agent.bulk import BulkClient, BulkServer
from p2p_dmc.agent.clock import now_ms
from p2p_dmc.agent.datasets import DataService
from p2p_dmc.agent.entering import run_meta
from p2p_dmc.agent.home import Home, MemoryFolder
from p2p_dmc.agent.jobs import Jobs
from p2p_dmc.agent.limits import RateLimit
from p2p_dmc.agent.local_socket import LocalSocket
from p2p_dmc.agent.requests import Requests
from p2p_dmc.agent.run import Run
from p2p_dmc.agent.services import Services
from p2p_dmc.agent.verdicts import Verdicts
from p2p_dmc.config import AgentSettings
from p2p_dmc.core.membership import (
    MemberEvent,
    MemberRecord,
    Membership,
    MembershipSettings,
    MemberState,
    Output,
    Role,
)
from p2p_dmc.core.placement import MAX_WEIGHT
from p2p_dmc.core.suspicion import suspicion_min_ms
from p2p_dmc.data.store import Store
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.observe.journal import Journal
from p2p_dmc.wire.messages import (
    MEMBERSHIP_MESSAGES,
    BulkKind,
    BulkRequest,
    ClientRequest,
    Holdings,
    PeerMeta,
    PledgeAsked,
    Pledged,
    encode_meta,
)
from p2p_dmc.wire.transport import ControlSocket, Envelope, refused_by_host, split_address

log = logging.getLogger("p2p_dmc.agent")
MEMBERSHIP = MembershipSettings.lan()
REFUSAL_LOOKS_S = (0.0, 0.02, 0.1, 0.4)
"""When to ask a host whose connection broke: its sockets close one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """How to start an agent."""

    home: Path
    name: str
    bind_host: str = "127.0.0.1"
    port: int | None = None  # None: the default one or the next free
    advertise: str | None = None  # tcp://host:port
    advertise_host: str = "127.0.0.1"
    seeds: tuple[str, ...] = ()
    role: Role = Role.TRAIN
    capacity_bytes: int = 100 << 30
    max_upload: int | None = (
        None  # bytes a second of shards, manifests and states; None: what the link allows
    )
    max_download: int | None = None
    domain: str = ""  # what this peer may fail together with, a rack or a house; "": alone
    stays: bool = (
        True  # False: placement does not count on it, so that others hold everything before it leaves
    )
    settings: AgentSettings = field(default_factory=AgentSettings)


class Agent:
    """One peer. ``start`` makes it listen; ``stop`` leaves gracefully; between them everything is event-driven."""

    def __init__(self, options: AgentOptions, home: Home, say: Callable[[str], None]) -> None:
        self.options = options
        self.settings = options.settings
        self.home = home  # locked by the caller
        self.say = say
        self.identity = home.start_identity()
        self.peer_id = self.identity.peer_id
        self.journal = Journal(home.root, self.peer_id)
        self.memory = MemoryFolder(home, self.peer_id)
        self.context = zmq.asyncio.Context(io_threads=1)
        self.control = ControlSocket(self.context, self._on_control, self._on_disconnect)
        self.bulk_context = zmq.asyncio.Context(io_threads=2)  # a full link delays no word of control
        self.bulk_server = BulkServer(self.bulk_context, RateLimit(options.max_upload))
        self.bulk = BulkClient(
            self.bulk_context, self.settings.range_timeout_ms, RateLimit(options.max_download)
        )
        self.local = LocalSocket(self.context, self._on_local)
        self.runs: dict[str, Run] = {}
        self.verdicts = Verdicts(lambda: self.runs.values(), suspicion_min_ms(MEMBERSHIP, 3))
        self.jobs = Jobs(self)
        self.requests = Requests(self)
        self.store = Store(home.store_root, options.capacity_bytes)
        self.data = DataService(
            store=self.store,
            bulk=self.bulk,
            peer_id=self.peer_id,
            settings=self.settings,
            journal=self.journal,
            say=say,
            send=self.send,
            members=self.members,
        )
        self.data.yield_to(self._reducing, self._training)
        self.bulk_server.busy = self._reducing
        self.membership: Membership | None = None
        self.address = ""
        self.endpoint = ""
        self.leaving = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.fault = ""
        """Why the agent ends although nobody asked it to."""
        self._meta_dirty = False
        self._lived_at: dict[str, str] = {}
        """Address to peer_id, also of this home's earlier life: asked by name."""
        self._peers_dirty_s = 0.0

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen, make contact with the seeds, serve. UserError when a port is taken."""
        options = self.options
        port = self.control.bind(options.bind_host, options.port)
        bulk_port = self.bulk_server.bind(options.bind_host)
        self.address = options.advertise or f"tcp://{_bracket(options.advertise_host)}:{port}"
        advertised_host = split_address(self.address)[0]
        self.control.me = Envelope(
            peer_id=self.peer_id, boot=self.identity.boot, address=self.address, run="", to=""
        )
        record = MemberRecord(
            peer_id=self.peer_id,
            boot=self.identity.boot,
            incarnation=0,
            state=MemberState.ALIVE,
            name=options.name[:64],
            address=self.address,
            bulk_address=f"tcp://{_bracket(advertised_host)}:{bulk_port}",
            role=options.role,
            meta=encode_meta(self._meta()),
        )
        self._lived_at = self.home.known_peers()
        known = dict.fromkeys((*options.seeds, *self._lived_at))
        seeds = tuple(address for address in known if address != self.address)
        self.membership = Membership(
            record,
            seeds,
            MEMBERSHIP,
            random.Random(f"{self.peer_id}{self.identity.boot}"),
            now_ms(),
        )
        self.bulk_server.provide(BulkKind.MANIFEST, self.data.provide_manifest)
        self.bulk_server.provide(BulkKind.SHARD, self.data.provide_shard)
        self.bulk_server.provide(BulkKind.PARTS, self.data.provide_parts)
        self.bulk_server.provide(BulkKind.STATE, self._provide_state)
        self.endpoint = self.home.local_endpoint()
        self.local.bind(self.endpoint)
        self.home.announce(endpoint=self.endpoint, address=self.address, peer_id=self.peer_id)
        self.data.members_changed()
        self.journal.event("started", address=self.address, boot=self.identity.boot, name=options.name)
        self.spawn(self._tick_forever(), vital=True)
        for serving in (self.control.serving, self.local.serving, self.bulk_server.serving):
            if serving is not None:
                self._look_after(serving, vital=True)

    def spawn(self, work: Coroutine[Any, Any, None], *, vital: bool = False) -> asyncio.Task[None]:
        """A task that ends with the agent; a failure of ours is logged, never lost."""
        task = asyncio.get_running_loop().create_task(work)
        self._look_after(task, vital=vital)
        return task

    def _look_after(self, task: asyncio.Task[None], *, vital: bool) -> None:
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._task_done(done, vital))

    def _task_done(self, task: asyncio.Task[None], vital: bool) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        log.error("a task of the agent failed", exc_info=task.exception())
        self.journal.event("fault", reason=repr(task.exception()))
        if vital:  # deaf or without its clock the agent is of no use to anybody; the others go on without it
            self.fault = f"a fault of this program: {task.exception()!r}; see {self.home.root}/agent.log"
            self.leaving.set()

    async def stop(self, *, graceful: bool = True) -> None:
        """Leave: runs withdraw, shards that only this peer holds are handed over, everybody is told."""
        if graceful:
            await self.jobs.stop_all("this peer leaves")
            await self._hand_over()
            if self.membership is not None:
                self._act(self.membership.leave(now_ms()))
        self.journal.event("left" if graceful else "aborted")
        for run in self.runs.values():
            await run.shut_down()
        for task in list(self._tasks):
            task.cancel()
        self.bulk_server.close()
        await self.data.close()
        await self.control.close(flush_s=0.2 if graceful else 0.0)
        self.bulk.close()
        self.local.close()
        self.context.destroy(linger=0)
        self.bulk_context.destroy(linger=0)
        self.memory.remove()
        self.journal.close()
        self.home.unlock()

    async def _hand_over(self) -> None:
        """Wait, bounded, until nobody depends on this peer's copies. After a finished run nobody does."""
        if self.jobs.all_finished and not any(r["view_epoch"] for r in self.requests.other_runs()):
            return
        deadline_s = time.monotonic() + self.settings.leave_grace_s
        said = False
        while self._others_alive() and self.data.manifests() and not self.data.sole_copies_elsewhere():
            if time.monotonic() > deadline_s:
                self.say(
                    "leaving although some shards have no other holder yet; start this home again to serve them"
                )
                return
            if not said:
                said = True
                self.say(
                    f"waiting up to {self.settings.leave_grace_s:g} s for others to copy shards only this peer has"
                )
            await asyncio.sleep(0.2)

    def _others_alive(self) -> bool:
        return any(r.state is MemberState.ALIVE and r.peer_id != self.peer_id for r in self.members())

    # -- time -------------------------------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self.settings.tick_ms / 1000)
            self.tick()

    def tick(self) -> None:
        """Whatever is due."""
        if self.membership is None:
            return
        now = now_ms()
        if self.membership.next_deadline_ms(now) <= now:
            self._act(self.membership.tick(now))
        self.verdicts.tick(now)
        self.jobs.tick()
        for run in list(self.runs.values()):
            run.tick()
        self.data.tick()
        if self._meta_dirty:
            self._meta_dirty = False
            meta = encode_meta(self._meta())
            if meta != self.membership.me.meta:
                self._act(self.membership.update(now, meta=meta))
        if self._peers_dirty_s and time.monotonic() - self._peers_dirty_s > 1.0:
            self._peers_dirty_s = 0.0
            known = {r.address: r.peer_id for r in self.members() if r.peer_id != self.peer_id}
            if known:
                with contextlib.suppress(OSError):  # a full disk: the next start has its seeds
                    self.home.remember_peers(dict(list(known.items())[:64]))

    # -- membership ---------------------------------------------------------------------------------------------------

    def _meta(self) -> PeerMeta:
        weight = min(MAX_WEIGHT, max(1, self.options.capacity_bytes >> 30)) if self.options.stays else 0
        # of a run that it left, or that failed here, a peer says nothing: nobody is to wait for it
        told = [run for run in self.runs.values() if run.end.outcome in ("", "finished", "stopped")]
        # those that go on come last: there may be no room for the first
        told.sort(key=lambda run: (not run.end.outcome, run.name))
        runs = tuple(run_meta(run) for run in told)[-8:]
        return PeerMeta(weight=weight, domain=self.options.domain, runs=runs)

    def meta_changed(self) -> None:
        """What this peer says of itself is stale; told at the next tick, or at once when a view opens."""
        self._meta_dirty = True

    def members(self) -> tuple[MemberRecord, ...]:
        return self.membership.members() if self.membership is not None else ()

    def _act(self, output: Output) -> None:
        for send in output.sends:
            to = send.peer_id or self._meant_at(send.address)
            self.control.send(send.address, send.message, to=to)
        for event in output.events:
            self._member_event(event)

    def _meant_at(self, address: str) -> str:
        """Whom a word to a seed is for. A seed is tried for ever, and somebody else may live at its address one day:
        a peer of another run, whom only a peer that has nobody else may take for its seed.
        """
        if address in self.options.seeds and not self._others_alive():
            return ""
        return self._lived_at.get(address, "")

    def _member_event(self, event: MemberEvent) -> None:
        record = event.record
        if event.peer_id != self.peer_id and event.old is not event.new:
            self._peers_dirty_s = self._peers_dirty_s or time.monotonic()
            self.journal.event(
                "member",
                peer_id=event.peer_id,
                name=record.name,
                old=event.old.name if event.old is not None else None,
                state=event.new.name,
                boot=record.boot,
                incarnation=record.incarnation,
                address=record.address,
                reason=event.reason,
            )
            self.data.members_changed()
            if event.new is MemberState.ALIVE:
                self._lived_at[record.address] = event.peer_id
                self.data.tell(event.peer_id)
        if event.peer_id == self.peer_id:
            return
        membership = self.membership
        if membership is not None:
            latest, heard = membership.get(event.peer_id), membership.last_heard_ms(event.peer_id)
            self.verdicts.event(event, latest, heard, now_ms())
        if event.new in (MemberState.DEAD, MemberState.LEFT):
            self.control.forget(record.address)
            self.bulk.forget(record.bulk_address)
        if event.new is MemberState.DEAD and record.attested:
            self.spawn(
                self._ask_host(record)
            )  # others saw it refused; what this peer sees itself counts for more

    def _on_disconnect(self, address: str) -> None:
        record = next((r for r in self.members() if r.address == address), None)
        if record is not None and record.state in (MemberState.ALIVE, MemberState.SUSPECT):
            self.spawn(self._ask_host(record))

    async def _ask_host(self, record: MemberRecord) -> None:
        """A connection broke. If the peer's host is alive and refuses, the peer crashed: no suspicion is needed."""
        for pause_s in REFUSAL_LOOKS_S:
            await asyncio.sleep(pause_s)
            if await refused_by_host(record.address):
                break
        else:
            return
        if self.membership is None:
            return
        heard_ms, promised = self.membership.last_heard_ms(record.peer_id), {}
        latest = self.membership.get(record.peer_id)
        if latest is not None and latest.boot == record.boot:
            promised = self.membership.last_promised(record.peer_id)
        else:
            heard_ms = None  # started again meanwhile: what was heard was heard of that one
        self.verdicts.crashed(record, heard_ms, now_ms(), promised)
        self._act(self.membership.refused(record.peer_id, record.boot, now_ms()))

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(self, peer_id: str, message: object, run: str) -> None:
        """Best effort to a peer that membership knows."""
        record = self.membership.get(peer_id) if self.membership is not None else None
        if record is not None and peer_id != self.peer_id:
            self.control.send(record.address, message, to=peer_id, run=run)

    def _on_control(self, envelope: Envelope, message: object, routing_id: bytes) -> None:
        if self.membership is None:
            return
        try:
            if isinstance(message, ClientRequest):
                self.requests.handle(
                    message, lambda reply: self.control.reply(routing_id, reply), local=False
                )
            elif isinstance(message, MEMBERSHIP_MESSAGES):
                self._act(self.membership.receive(message, now_ms()))
            elif not self._fenced(envelope):
                self._from_peer(envelope, message)
        except RemoteProtocolError as error:
            self.control.count_bad(envelope.peer_id, error)

    def _fenced(self, envelope: Envelope) -> bool:
        """An old incarnation has no say (DESIGN.md invariant 7), nor has anybody whom membership does not know."""
        record = self.membership.get(envelope.peer_id) if self.membership is not None else None
        return record is None or record.boot > envelope.boot

    def _from_peer(self, envelope: Envelope, message: object) -> None:
        if isinstance(message, Holdings):
            self.data.heard(envelope.peer_id, message)
        elif isinstance(message, (PledgeAsked, Pledged)):
            self.data.heard_of_pledges(envelope.peer_id, message)
        elif envelope.run in self.runs:
            self.runs[envelope.run].members.message(envelope.peer_id, message)

    def _on_local(self, routing_id: bytes, message: object) -> None:
        if isinstance(message, ClientRequest):
            self.requests.handle(message, lambda reply: self.local.send(routing_id, reply), local=True)
        else:
            self.jobs.message(routing_id, message)

    def _provide_state(self, request: BulkRequest) -> tuple[int, bytes | memoryview] | None:
        run = self.runs.get(request.name)
        return run.keeper.provide(request) if run is not None else None

    # -- for runs

    def services(self) -> Services:
        """What a run gets."""
        return Services(
            home=self.home,
            peer_id=self.peer_id,
            boot=self.identity.boot,
            name=self.options.name,
            settings=self.settings,
            journal=self.journal,
            memory=self.memory,
            bulk=self.bulk,
            data=self.data,
            send=self.send,
            members=self.members,
            promised=self._promised,
            meta_changed=self.meta_changed,
            replay_verdicts=lambda run: self.verdicts.replay(run, self.members(), self.peer_id),
            say=self.say,
            seed_known=self._seed_known,
            run_over=self.jobs.run_over,
            collective_host=lambda: split_address(self.address)[0],
        )

    def _promised(self, run: str, version: int | None) -> None:
        if self.membership is not None:
            self.membership.promised(run, version)

    def _reducing(self) -> bool:
        """Whether some run is averaging: its traffic goes first."""
        return any(run.rounds is not None and run.rounds.reducing for run in self.runs.values())

    def _training(self) -> bool:
        return any(run.rounds is not None for run in self.runs.values())

    def _seed_known(self) -> bool:
        return not self.options.seeds or (self.membership is not None and self.membership.seed_contacted)


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
