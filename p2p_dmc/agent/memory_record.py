"""What an agent that was killed left in shared memory: its newest state, for the next agent of its home (DESIGN.md 6).

The state comes back, not the member: a restarted agent may have been counted as crashed, so its votes of before are
gone even where its memory is whole.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from p2p_dmc.agent.home import RECORD_PREFIX
from p2p_dmc.agent.state import Held, SlotPool, file_digest, state_digest
from p2p_dmc.core.adacomm import TauState
from p2p_dmc.core.agreement_messages import StateRef
from p2p_dmc.core.ledger import Ledger
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.wire import codec

MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecord:
    """The newest complete state of one run, beside its slot."""

    run: str
    history: bytes
    lineage: tuple[int, int]
    slot: str
    anchor_digest: bytes
    ledger: bytes
    tau: bytes
    power: str  # of the system's start: slots that lie on a disk do not outlive a power cut whole


def _path(folder: Path, run: str) -> Path:
    return folder / f"{RECORD_PREFIX}{hashlib.blake2b(run.encode(), digest_size=8).hexdigest()}"


@functools.cache
def _power() -> str:
    """Which start of the system this is; asked once, not in every round."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def write_record(run: str, history: bytes, held: Held) -> None:
    """Replace the run's record beside the slot. A crash leaves the one before, whose slot is not handed out yet."""
    folder = held.slot.parent
    record = MemoryRecord(
        run=run,
        history=history,
        lineage=held.ref.lineage,
        slot=held.slot.name,
        anchor_digest=held.anchor_digest,
        ledger=held.ledger.to_bytes(),
        tau=held.tau.to_bytes(),
        power=_power(),
    )
    temporary = folder / f".{_path(folder, run).name}.tmp"
    temporary.write_bytes(codec.pack_value(record))
    os.replace(temporary, _path(folder, run))


def find_record(folder: Path, run: str) -> MemoryRecord | None:
    """What a killed agent's folder says of this run; None if it says nothing that can be used."""
    try:
        record = codec.unpack_value(MemoryRecord, _path(folder, run).read_bytes(), MOST_BYTES)
    except (OSError, RemoteProtocolError):
        return None
    plain = Path(record.slot).name == record.slot and (folder / record.slot).is_file()
    return record if plain and record.run == run and record.power == _power() else None


def take_state(folder: Path, record: MemoryRecord, slots: SlotPool) -> Held:
    """The recorded state in a slot of this agent's, verified; ValueError when the memory is not whole."""
    left = folder / record.slot
    if left.stat().st_size != slots.size_bytes:
        raise ValueError(f"an anchor of {left.stat().st_size} bytes, {slots.size_bytes} here")
    try:
        ledger, tau = Ledger.from_bytes(record.ledger), TauState.from_bytes(record.tau)
    except RemoteProtocolError as error:
        raise ValueError(str(error)) from None
    slot = slots.take()
    shutil.copyfile(left, slot)
    if file_digest(slot) != record.anchor_digest:
        slots.unpin(slot)
        raise ValueError("its parameters are damaged")
    ref = StateRef(lineage=record.lineage, digest=state_digest(record.anchor_digest, ledger, tau))
    return Held(ref=ref, slot=slot, anchor_digest=record.anchor_digest, ledger=ledger, tau=tau)


def newest_record(folders: Sequence[Path], run: str) -> tuple[Path, MemoryRecord] | None:
    """The record of the greatest lineage among what is left of killed agents, and the folder in which it lies."""
    found = [(folder, record) for folder in folders if (record := find_record(folder, run)) is not None]
    return max(found, key=lambda entry: entry[1].lineage, default=None)


def drop_record(folder: Path, run: str) -> None:
    """The run is over in this agent's memory."""
    _path(folder, run).unlink(missing_ok=True)


def remove_leftover(folder: Path, run: str) -> None:
    """A killed agent's record is taken, or of no use; the folder goes with the last one."""
    drop_record(folder, run)
    if not any(folder.glob(f"{RECORD_PREFIX}*")):
        shutil.rmtree(folder, ignore_errors=True)
