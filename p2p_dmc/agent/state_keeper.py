"""Which states of a run this peer holds: slots, checkpoints, serving and adopting (DESIGN.md sections 2 and 8)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from p2p_dmc.agent import run_files
from p2p_dmc.agent.adoption import ANCHOR, HEAD, Adoption
from p2p_dmc.agent.checkpoints import (
    CheckpointRef,
    checkpoint_parameters,
    list_checkpoints,
    load_checkpoint,
    model_digest,
    unfinished_checkpoints,
    values_of,
    write_checkpoint,
    write_model,
)
from p2p_dmc.agent.memory_record import (
    MemoryRecord,
    drop_record,
    newest_record,
    remove_leftover,
    take_state,
    write_record,
)
from p2p_dmc.agent.services import Services
from p2p_dmc.agent.state import Held, SlotPool, encode_head, state_digest
from p2p_dmc.core.adacomm import TauState
from p2p_dmc.core.agreement_messages import Lineage, Promises, StateRef
from p2p_dmc.core.ledger import Ledger
from p2p_dmc.core.outer import AVERAGE, OuterPolicy
from p2p_dmc.errors import UserError
from p2p_dmc.observe.phases import reach
from p2p_dmc.wire.messages import BulkRequest
from p2p_dmc.wire.trainer_messages import ParameterSpec

log = logging.getLogger("p2p_dmc.state")
CACHED = 2
"""States remembered, the current one among them."""
SERVED_S = 30.0
"""A state that somebody downloads is remembered for so long after the last request,"""
MOST_SERVED = 2
"""but no more of them than this at once."""


class StateKeeper:
    """The current state, a few recent ones, and their way to disk and to other peers."""

    def __init__(self, run: str, folder: Path, services: Services, promises: Promises) -> None:
        self._run = run
        self._promises = promises
        self.history = promises.history
        """That the states held from now on are of."""
        self._folder = folder
        self._services = services
        self.slots: SlotPool | None = None
        self.parameters: tuple[ParameterSpec, ...] = ()
        self.outer = AVERAGE
        self.current: Held | None = None
        self._recent: dict[bytes, Held] = {}
        self._served_s: dict[bytes, float] = {}
        """When each state was last asked for, or promised to somebody."""
        self._checkpointed_s = time.monotonic()
        self._checkpointed_view = 0
        self._writing = False
        self._one_at_a_time = asyncio.Lock()
        self._scratch: Path | None = None

    def open(self, parameters: Sequence[ParameterSpec], outer: OuterPolicy = AVERAGE) -> None:
        """The parameters are known: make room, and load the newest state that is whole and of this history.

        A checkpoint, unless an agent that was killed left a newer state in this machine's memory.
        """
        self.parameters, self.outer = tuple(parameters), outer
        self.slots = SlotPool(self._services.memory, values_of(parameters) * outer.vectors)
        for folder in unfinished_checkpoints(self._folder):
            self._skip(folder, "its writing did not come to its end")
        found = newest_record(self._services.memory.left, self._run)
        for checkpoint in list_checkpoints(self._folder):
            if found is not None and found[1].lineage > checkpoint.lineage and self._take_memory(*found):
                break
            if self._take_checkpoint(checkpoint):
                break
        else:
            if found is not None:
                self._take_memory(*found)
        for folder in self._services.memory.left:
            remove_leftover(folder, self._run)

    def _take_checkpoint(self, checkpoint: CheckpointRef) -> bool:
        try:
            if checkpoint_parameters(checkpoint) != self.parameters:
                raise ValueError("it is of another model")
            self._check_history(bytes.fromhex(checkpoint.meta["history"]), checkpoint.lineage)
            held = load_checkpoint(checkpoint, self.pool())
        except ValueError as error:
            self._skip(checkpoint.folder, str(error))
            return False
        self.hold(held)
        self._say_from("the checkpoint", held)
        return True

    def _take_memory(self, folder: Path, record: MemoryRecord) -> bool:
        """What a killed agent of this home left in memory."""
        try:
            self._check_history(record.history, record.lineage)
            held = take_state(folder, record, self.pool())
        except (ValueError, OSError, UserError) as error:
            self._services.journal.event("memory_skipped", path=str(folder), reason=str(error))
            return False
        self.hold(held)
        self._say_from("what its killed agent left in memory,", held)
        return True

    def _check_history(self, history: bytes, lineage: Lineage) -> None:
        if not run_files.belongs(self._promises, history, lineage):
            raise ValueError("it is of a history of this run that was given up")

    def _say_from(self, source: str, held: Held) -> None:
        (view_epoch, number), ledger = held.ref.lineage, held.ledger
        self._services.say(
            f"run {self._run!r} goes on from {source} of view {view_epoch} round {number}, "
            f"epoch {min(ledger.epoch + 1, ledger.epochs)} of {ledger.epochs}"
        )
        self._services.journal.event(
            "state_found", lineage=[view_epoch, number], memory=not source.endswith("checkpoint")
        )

    def _record(self) -> None:
        """Say in memory which slot is current, in case this agent is killed."""
        if self.current is not None and self.current.ref.lineage > (0, 0):
            with contextlib.suppress(OSError):  # then a checkpoint has to do
                write_record(self._run, self.history, self.current)

    def _skip(self, folder: Path, reason: str) -> None:
        self._services.say(f"checkpoint {folder} is skipped: {reason}")
        self._services.journal.event("checkpoint_skipped", path=str(folder), reason=reason)

    def found(self, slot: Path, anchor_digest: bytes, ledger: Ledger, tau: TauState) -> None:
        """The initial state, lineage (0, 0), from this peer's own trainer."""
        ref = StateRef(lineage=(0, 0), digest=state_digest(anchor_digest, ledger, tau))
        self.hold(Held(ref=ref, slot=slot, anchor_digest=anchor_digest, ledger=ledger, tau=tau))

    def hold(self, held: Held) -> None:
        """This is the current state now. ``held.slot`` comes pinned once, for this keeper."""
        if held.slot == self._scratch:
            self._scratch = None  # the next candidate gets another slot
        self.current = held
        self._record()
        self.remember(held)

    def remember(self, held: Held) -> None:
        """For those who ask for it, and for a view that may start from it. ``held.slot`` comes pinned once."""
        slots = self.pool()
        if held.ref.digest in self._recent:
            slots.unpin(held.slot)  # already remembered, the same bytes
            if self.current is held:
                self.make_current(held.ref)
            return
        self._recent[held.ref.digest] = held
        self._forget_old()

    def _forget_old(self) -> None:
        """Of the states that are remembered, the newest, and those that somebody downloads, remain."""
        since_s = time.monotonic() - SERVED_S
        served = [d for d, at_s in self._served_s.items() if at_s > since_s and d in self._recent]
        wanted = set(served[-MOST_SERVED:])
        others = [d for d, h in self._recent.items() if h is not self.current and d not in wanted]
        for digest in others[: max(0, len(others) + 1 - CACHED)]:
            self.pool().unpin(self._recent.pop(digest).slot)
            self._served_s.pop(digest, None)

    @property
    def last_request_s(self) -> float:
        """When somebody last asked for a state, in monotonic seconds; 0 when nobody has."""
        return max(self._served_s.values(), default=0.0)

    def expect_request(self, digest: bytes) -> None:
        """Somebody is about to download this state."""
        self._served_s.pop(digest, None)
        self._served_s[digest] = time.monotonic()

    def named(self, held: Held, ref: StateRef) -> Held:
        """The same state under an agreed lineage."""
        if held.ref == ref:
            return held
        return Held(
            ref=ref, slot=held.slot, anchor_digest=held.anchor_digest, ledger=held.ledger, tau=held.tau
        )

    def discard(self) -> None:
        """The run is over in this agent's memory; what is on disk stays."""
        if self.slots is not None:
            drop_record(self.slots.folder, self._run)
            self.slots.discard()
        self._recent.clear()

    def by_lineage(self, lineage: tuple[int, int]) -> Held | None:
        """The state of this lineage, if it is among the recent ones."""
        return next((held for held in self._recent.values() if held.ref.lineage == lineage), None)

    def pool(self) -> SlotPool:
        if self.slots is None:
            raise AssertionError("the run's parameters are not known yet")
        return self.slots

    def scratch(self) -> Path:
        """The slot that the trainer writes its next candidate into. It stays the same over views

        until a candidate in it is held: a write that comes late hits nothing else.
        """
        if self._scratch is None:
            self._scratch = self.pool().take()
        return self._scratch

    # -- other peers ------------------------------------------------------------------------------------------------

    def provide(self, request: BulkRequest) -> tuple[int, bytes | memoryview] | None:
        """A range of a state that is asked for by its digest."""
        held = self._recent.get(request.digest)
        if held is None:
            return None
        reach("serving")
        self.expect_request(request.digest)  # more of it is asked for soon
        if request.part == HEAD:
            head = encode_head(held)
            return len(head), head[request.offset : request.offset + request.size]
        if request.part != ANCHOR or request.offset > self.pool().size_bytes:
            return None
        with open(held.slot, "rb") as file:
            file.seek(request.offset)
            return self.pool().size_bytes, file.read(request.size)

    async def adopt(
        self,
        ref: StateRef,
        donors: Callable[[], Sequence[str]],
        give_up_s: float,
        gate: Callable[[int], Awaitable[None]] | None = None,
    ) -> Held:
        """Fetch and verify; it is remembered, but current only when the run says so. AdoptionFailedError."""
        known = self._recent.get(ref.digest)
        if known is not None:
            return known
        adoption = Adoption(
            self._services.bulk, self._run, self.pool(), self._services.settings.fetch_chunk_bytes, gate
        )
        held = await adoption.fetch(ref, donors, give_up_s)
        if ref.digest in self._recent:  # adopted for another view meanwhile
            self.pool().unpin(held.slot)
        else:
            self._recent[ref.digest] = held
            self._forget_old()
        return self._recent[ref.digest]

    def make_current(self, ref: StateRef) -> Held:
        """The agreed state, which is remembered under its digest, carries the agreed lineage from now on."""
        held = self.named(self._recent[ref.digest], ref)
        self._recent[ref.digest] = held
        self.current = held
        self._record()
        return held

    def take_scratch(self) -> Path:
        """The scratch slot, which holds something worth keeping now: the caller's, pinned once."""
        slot = self.scratch()
        self._scratch = None
        return slot

    # -- disk ---------------------------------------------------------------------------------------------------------

    def checkpoint_due(self, held: Held, every_s: float) -> bool:
        """Time has passed, or the view of this committed state has none yet.

        On disk the base moves only with a checkpoint from its view; after a power cut a view without one would
        need the peers of the view before it, too.
        """
        view_epoch = held.ref.lineage[0]
        if self._writing or not view_epoch:
            return False
        return view_epoch > self._checkpointed_view or time.monotonic() - self._checkpointed_s >= every_s

    async def checkpoint(self, held: Held, history: bytes, *, closed: bool, keep: int) -> bool:
        """Write a committed state in the background; False (and a word to the user) when the disk refuses."""
        slots = self.pool()
        self._writing = True
        slots.pin(held.slot)
        try:
            async with self._one_at_a_time:  # the run may be closed while the last one is on its way
                path = await asyncio.to_thread(
                    write_checkpoint, self._folder, held, self.parameters, history, closed, keep
                )
        except OSError as error:
            self._services.say(
                f"checkpoint in {self._folder} failed: {error.strerror}; training goes on, free some room"
            )
            self._services.journal.event("checkpoint_failed", reason=str(error))
            return False
        finally:
            slots.unpin(held.slot)
            self._writing = False
            self._checkpointed_s = time.monotonic()
            self._checkpointed_view = held.ref.lineage[0]
        self._services.journal.event("checkpoint", path=str(path), lineage=list(held.ref.lineage))
        return True

    async def write_final(self, held: Held) -> Path:
        """runs/<run>/final/model.safetensors; OSError."""
        path = self._folder / "final" / "model.safetensors"
        slots = self.pool()
        slots.pin(held.slot)
        try:
            await asyncio.to_thread(write_model, path, held.slot, self.parameters, {"format": "pt"})
            digest = await asyncio.to_thread(model_digest, held, self.parameters)
        finally:
            slots.unpin(held.slot)
        run_files.save_run(
            self._folder,
            finished={"lineage": list(held.ref.lineage), "digest": digest.hex()},
            ledger=held.ledger.to_bytes().hex(),
        )
        return path
