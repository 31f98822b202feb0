"""The state that the agent owns: anchors in shared memory, ledger and tau (DESIGN.md section 2).

A state is identified by its digest: xxh3_128 over the anchor's own digest, the ledger and the tau controller. The
trainer writes a candidate anchor into a slot that the agent names; only the agent's word makes it the anchor.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import xxhash

from p2p_dmc.agent.home import MemoryFolder
from p2p_dmc.core.adacomm import TauState
from p2p_dmc.core.agreement_messages import StateRef
from p2p_dmc.core.ledger import Ledger
from p2p_dmc.errors import RemoteProtocolError, UserError
from p2p_dmc.wire import codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One complete state that this peer holds and has verified."""

    ref: StateRef
    slot: Path
    anchor_digest: bytes
    ledger: Ledger
    tau: TauState


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHead:
    """The small part of a state, sent before its anchor. Lineage is the receiver's to know."""

    anchor_digest: bytes
    anchor_bytes: int
    ledger: bytes
    tau: bytes


def state_digest(anchor_digest: bytes, ledger: Ledger, tau: TauState) -> bytes:
    """16 bytes that two peers share exactly when anchor, ledger and tau controller are equal."""
    hasher = xxhash.xxh3_128()
    for part in (anchor_digest, ledger.to_bytes(), tau.to_bytes()):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def file_digest(path: Path) -> bytes:
    """xxh3_128 of a file's bytes."""
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            hasher.update(chunk)
    return hasher.digest()


def encode_head(held: Held) -> bytes:
    head = StateHead(
        anchor_digest=held.anchor_digest,
        anchor_bytes=held.slot.stat().st_size,
        ledger=held.ledger.to_bytes(),
        tau=held.tau.to_bytes(),
    )
    return codec.pack_value(head)


def decode_head(data: bytes, expected: bytes) -> tuple[StateHead, Ledger, TauState]:
    """Checked against the state's digest; RemoteProtocolError when it is another state's."""
    head = codec.unpack_value(StateHead, data, 64 << 20)
    ledger, tau = Ledger.from_bytes(head.ledger), TauState.from_bytes(head.tau)
    if state_digest(head.anchor_digest, ledger, tau) != expected:
        raise RemoteProtocolError("the state's head does not have the digest that was agreed")
    return head, ledger, tau


class SlotPool:
    """Files of one anchor each. A slot that is pinned (held, served, being written out) is never handed out."""

    def __init__(self, memory: MemoryFolder, numel: int) -> None:
        self.size_bytes = max(4, 4 * numel)
        self.folder = memory.folder(4 * self.size_bytes)
        self._slots: list[Path] = []
        self._pins: Counter[Path] = Counter()
        self._preparing = False

    def take(self) -> Path:
        """A slot that nobody uses, pinned once for the caller; UserError when memory and disk are full."""
        for slot in self._slots:
            if not self._pins[slot]:
                self._pins[slot] = 1
                return slot
        path = self._make()
        self._slots.append(path)
        self._pins[path] = 1
        return path

    def _make(self) -> Path:
        """Takes a moment for a large model: its memory is cleared."""
        path = self.folder / f"anchor-{uuid.uuid4().hex[:8]}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.size_bytes)
        except OSError as error:
            os.unlink(path)
            raise UserError(
                f"no room for {self.size_bytes} bytes of parameters in {self.folder} ({error.strerror}); free some"
            ) from None
        finally:
            os.close(descriptor)
        return path

    async def prepare(self, free: int) -> None:
        """So many slots will be wanted at once and nobody should wait for them. Without room it does nothing."""
        if self._preparing:
            return
        self._preparing = True
        try:
            while sum(not self._pins[slot] for slot in self._slots) < free:
                self._slots.append(await asyncio.to_thread(self._make))
        except UserError:
            pass  # whoever takes one says so
        finally:
            self._preparing = False

    def trim(self, free: int) -> None:
        """Give the memory back of all but so many of the slots that nobody uses."""
        unused = [slot for slot in self._slots if not self._pins[slot]]
        for slot in unused[free:]:
            slot.unlink(missing_ok=True)
            self._slots.remove(slot)
            self._pins.pop(slot, None)

    def pin(self, slot: Path) -> None:
        self._pins[slot] += 1

    def discard(self) -> None:
        """Give the memory back; nobody may use a slot any more."""
        for slot in self._slots:
            slot.unlink(missing_ok=True)
        self._slots.clear()

    def unpin(self, slot: Path) -> None:
        if self._pins[slot] <= 0:
            raise AssertionError(f"{slot.name} is unpinned more often than pinned")
        self._pins[slot] -= 1
