"""Committed states on disk: written under a temporary name, synced, renamed; verified when read (DESIGN.md 6, 11).

``runs/<run>/checkpoints/<view epoch>-<round>/`` holds model.safetensors (float32, one tensor a parameter),
outer.safetensors (empty while the outer step has no state), ledger.msgpack and meta.json.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from p2p_dmc.agent.home import sync_folder, write_json
from p2p_dmc.agent.state import Held, SlotPool, file_digest, state_digest
from p2p_dmc.core.adacomm import TauState
from p2p_dmc.core.agreement_messages import StateRef
from p2p_dmc.core.ledger import Ledger
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.wire.trainer_messages import ParameterSpec

UNREADABLE = (OSError, KeyError, TypeError, AttributeError, SafetensorError, RemoteProtocolError)
"""What reading a damaged checkpoint may raise, beside ValueError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """A checkpoint that was found and looks whole; its tensors are verified when it is loaded."""

    folder: Path
    lineage: tuple[int, int]
    meta: dict[str, Any]


def anchor_tensors(
    slot: Path, parameters: Sequence[ParameterSpec]
) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Views of the flat anchor by parameter name, float32."""
    flat = np.memmap(slot, dtype="<f4", mode="r")
    tensors, offset = {}, 0
    for parameter in parameters:
        size = int(np.prod(parameter.shape, dtype=np.int64))
        tensors[parameter.name] = np.asarray(flat[offset : offset + size]).reshape(parameter.shape)
        offset += size
    return tensors


def write_model(
    path: Path, slot: Path, parameters: Sequence[ParameterSpec], metadata: dict[str, str]
) -> None:
    """A safetensors file of the anchor, durable under its final name only when whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _save(anchor_tensors(slot, parameters), temporary, metadata)
    _sync_file(temporary)
    os.replace(temporary, path)
    sync_folder(path.parent)


def _save(
    tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]], path: Path, metadata: dict[str, str]
) -> None:
    """OSError when the disk does not take it, for which safetensors has an exception of its own."""
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error)) from None


def write_checkpoint(
    runs_folder: Path,
    held: Held,
    parameters: Sequence[ParameterSpec],
    history: bytes,
    closed: bool,
    keep: int,
) -> Path:
    """Write one committed state and drop the oldest beyond ``keep``; OSError when the disk does not take it.

    One at a time in a run's folder: what lies there half-written is an earlier life's, and removed.
    """
    root = runs_folder / "checkpoints"
    root.mkdir(parents=True, exist_ok=True)
    for unfinished in root.glob(".*.tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)
    view_epoch, round_number = held.ref.lineage
    final = root / f"{view_epoch}-{round_number}"
    temporary, replaced = root / f".{final.name}.new.tmp", root / f".{final.name}.old.tmp"
    temporary.mkdir()
    try:
        write_model(temporary / "model.safetensors", held.slot, parameters, {"format": "pt"})
        _save({}, temporary / "outer.safetensors", {"format": "pt"})
        (temporary / "ledger.msgpack").write_bytes(held.ledger.to_bytes())
        for name in ("outer.safetensors", "ledger.msgpack"):
            _sync_file(temporary / name)
        meta = {
            "lineage": list(held.ref.lineage),
            "digest": held.ref.digest.hex(),
            "anchor_digest": held.anchor_digest.hex(),
            "tau": held.tau.to_bytes().hex(),
            "history": history.hex(),
            "closed": closed,
            "parameters": [[p.name, list(p.shape), p.dtype] for p in parameters],
            "files": {f.name: file_digest(f).hex() for f in sorted(temporary.iterdir())},
        }
        write_json(temporary / "meta.json", meta)
        if final.exists():
            os.replace(final, replaced)
        os.replace(temporary, final)
        sync_folder(root)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in [c for c in list_checkpoints(runs_folder) if c.folder != final][keep - 1 :]:
        shutil.rmtree(old.folder, ignore_errors=True)
    return final


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def list_checkpoints(runs_folder: Path) -> list[CheckpointRef]:
    """What lies there, newest lineage first. Unfinished and unreadable ones are not listed."""
    found = []
    for meta_path in (runs_folder / "checkpoints").glob("*-*/meta.json"):
        if meta_path.parent.name.startswith("."):
            continue
        try:
            meta = json.loads(meta_path.read_text())
            lineage = (int(meta["lineage"][0]), int(meta["lineage"][1]))
        except (ValueError, KeyError, IndexError, TypeError, OSError):
            continue
        found.append(CheckpointRef(folder=meta_path.parent, lineage=lineage, meta=meta))
    return sorted(found, key=lambda c: c.lineage, reverse=True)


def checkpoint_parameters(checkpoint: CheckpointRef) -> tuple[ParameterSpec, ...]:
    """What it says that its tensors are; ValueError when it does not say."""
    try:
        return tuple(
            ParameterSpec(name=str(name), shape=tuple(int(n) for n in shape), dtype=str(dtype))
            for name, shape, dtype in checkpoint.meta["parameters"]
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"meta.json has no parameters ({type(error).__name__})") from None


def load_checkpoint(checkpoint: CheckpointRef, slots: SlotPool) -> Held:
    """Read it into a slot and verify every digest; ValueError saying what is wrong with it."""
    folder, meta = checkpoint.folder, checkpoint.meta
    try:
        for name, digest in meta["files"].items():
            if file_digest(folder / name).hex() != digest:
                raise ValueError(f"{name} is damaged")
        ledger = Ledger.from_bytes((folder / "ledger.msgpack").read_bytes())
        tau = TauState.from_bytes(bytes.fromhex(meta["tau"]))
        slot = slots.take()
        try:
            anchor_digest = _load_anchor(checkpoint, slot, slots.size_bytes)
            digest = state_digest(anchor_digest, ledger, tau)
            if digest.hex() != meta["digest"]:
                raise ValueError("its parts do not belong together")
        except (*UNREADABLE, ValueError):
            slots.unpin(slot)
            raise
    except UNREADABLE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    ref = StateRef(lineage=checkpoint.lineage, digest=digest)
    return Held(ref=ref, slot=slot, anchor_digest=anchor_digest, ledger=ledger, tau=tau)


def _load_anchor(checkpoint: CheckpointRef, slot: Path, size_bytes: int) -> bytes:
    """Read the tensors into the slot; the digest of what stands there. ValueError when they do not fill it."""
    flat = np.memmap(slot, dtype="<f4", mode="r+")
    offset = 0
    with safe_open(checkpoint.folder / "model.safetensors", framework="np") as tensors:
        for parameter in checkpoint_parameters(checkpoint):
            values = tensors.get_tensor(parameter.name).reshape(-1)
            flat[offset : offset + values.size] = values
            offset += values.size
    if 4 * offset != size_bytes:
        raise ValueError(f"{4 * offset} bytes of parameters where {size_bytes} belong")
    return xxhash.xxh3_128(flat.data).digest()
