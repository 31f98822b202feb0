"""Committed states on disk: written under a temporary name, synced, renamed; verified when read (DESIGN.md 6, 11).

``runs/<run>/checkpoints/<view epoch>-<round>/`` holds model.safetensors (float32, one tensor a parameter),
outer.safetensors (the outer momentum in the same way, empty without one), ledger.msgpack and meta.json, which has the
digests of the others and its own. ``.<name>.new.tmp`` is being written, or was when the writer died;
``.<name>.old.tmp`` is moved aside for its successor; ``.<name>.gone.tmp`` is being removed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
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
from p2p_dmc.observe.phases import reach
from p2p_dmc.wire.trainer_messages import ParameterSpec

NAME = re.compile(r"\d{1,19}-\d{1,19}")
ASIDE = re.compile(r"\.(\d{1,19}-\d{1,19})\.old\.tmp")
UNREADABLE = (OSError, KeyError, TypeError, AttributeError, SafetensorError, RemoteProtocolError)
"""What reading a damaged checkpoint may raise, beside ValueError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """A checkpoint that was found; what it holds is verified when it is loaded."""

    folder: Path
    lineage: tuple[int, int]
    meta: dict[str, Any]
    problem: str = ""
    """Why it cannot be read at all, in words."""


def anchor_tensors(
    slot: Path, parameters: Sequence[ParameterSpec]
) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Views of the flat anchor by parameter name, float32."""
    return _tensors(np.memmap(slot, dtype="<f4", mode="r"), parameters)


def outer_tensors(
    slot: Path, parameters: Sequence[ParameterSpec]
) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Of the outer momentum behind the anchor; empty without one."""
    momentum = np.memmap(slot, dtype="<f4", mode="r")[values_of(parameters) :]
    return _tensors(momentum, parameters) if momentum.size else {}


def values_of(parameters: Sequence[ParameterSpec]) -> int:
    """How many numbers these parameters have."""
    return sum(int(np.prod(p.shape, dtype=np.int64)) for p in parameters)


def model_digest(held: Held, parameters: Sequence[ParameterSpec]) -> bytes:
    """xxh3_128 of the parameters alone, without what else the slot holds."""
    flat = np.memmap(held.slot, dtype="<f4", mode="r")[: values_of(parameters)]
    return bytes(xxhash.xxh3_128(flat.data).digest())


def _tensors(
    flat: np.ndarray[Any, np.dtype[np.float32]], parameters: Sequence[ParameterSpec]
) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
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
    try:
        _save(anchor_tensors(slot, parameters), temporary, metadata)
        _sync_file(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
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
    _clear_leftovers(runs_folder)
    view_epoch, round_number = held.ref.lineage
    final = root / f"{view_epoch}-{round_number}"
    temporary, replaced = root / f".{final.name}.new.tmp", root / f".{final.name}.old.tmp"
    temporary.mkdir()
    try:
        write_model(temporary / "model.safetensors", held.slot, parameters, {"format": "pt"})
        _save(outer_tensors(held.slot, parameters), temporary / "outer.safetensors", {"format": "pt"})
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
        write_json(temporary / "meta.json", meta | {"meta_digest": meta_digest(meta)})
        reach("checkpointing")
        if final.exists():
            os.replace(final, replaced)
        os.replace(temporary, final)
        sync_folder(root)
        reach("checkpointed")
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _drop_oldest(runs_folder, final, keep, history)
    return final


def meta_digest(meta: dict[str, Any]) -> str:
    """Of everything else that meta.json says, in hexadecimal."""
    said = {key: value for key, value in meta.items() if key != "meta_digest"}
    return xxhash.xxh3_128(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _clear_leftovers(runs_folder: Path) -> None:
    """What an earlier life left behind: a checkpoint moved aside gets its place back, the rest goes."""
    for checkpoint in list_checkpoints(runs_folder):
        if (match := ASIDE.fullmatch(checkpoint.folder.name)) is not None:
            os.replace(checkpoint.folder, checkpoint.folder.with_name(match[1]))
    for leftover in (runs_folder / "checkpoints").glob(".*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def _drop_oldest(runs_folder: Path, final: Path, keep: int, history: bytes) -> None:
    """Keep the newest; what cannot be read is kept no longer than what is whole beside it.

    What is newer than the one just written and of another history was given up with that.
    """
    found = list_checkpoints(runs_folder)
    latest = next(c.lineage for c in found if c.folder == final)
    for given_up in [c for c in found if c.lineage > latest and c.meta.get("history", "") != history.hex()]:
        if not given_up.problem:
            _remove(given_up.folder)
            found.remove(given_up)
    others = [c for c in found if c.folder != final and not c.problem][: keep - 1]
    oldest = min([c.lineage for c in found if c.folder == final] + [c.lineage for c in others])
    kept = {
        final,
        *(c.folder for c in others),
        *(c.folder for c in found if c.problem and c.lineage > oldest),
    }
    for old in [c.folder for c in found if c.folder not in kept]:
        _remove(old)


def _remove(folder: Path) -> None:
    """Nobody finds it half there."""
    gone = folder.with_name(f".{folder.name}.gone.tmp")
    os.replace(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def list_checkpoints(runs_folder: Path) -> list[CheckpointRef]:
    """What lies there, newest lineage first; of one that cannot be read, why."""
    found = []
    for folder in (runs_folder / "checkpoints").glob("*"):
        if NAME.fullmatch(folder.name):
            found.append(_find(folder, folder.name))
        elif (match := ASIDE.fullmatch(folder.name)) is not None and not folder.with_name(match[1]).exists():
            found.append(_find(folder, match[1]))  # its successor did not come to be
    return sorted(found, key=lambda c: c.lineage, reverse=True)


def _find(folder: Path, name: str) -> CheckpointRef:
    view_epoch, _, number = name.partition("-")
    lineage = (int(view_epoch), int(number))
    meta: dict[str, Any] = {}
    problem = ""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if meta["meta_digest"] != meta_digest(meta):
            problem = "meta.json is damaged"
        elif meta["lineage"] != list(lineage):
            problem = f"it is of {meta['lineage']}, and its folder has another name"
    except FileNotFoundError:
        problem = "meta.json is missing"
    except OSError as error:
        problem = f"meta.json cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        problem = "meta.json is damaged"
    return CheckpointRef(folder=folder, lineage=lineage, meta={} if problem else meta, problem=problem)


def unfinished_checkpoints(runs_folder: Path) -> list[Path]:
    """Folders of checkpoints whose writing has not come to its end."""
    return sorted((runs_folder / "checkpoints").glob(".*.new.tmp"))


def checkpoint_parameters(checkpoint: CheckpointRef) -> tuple[ParameterSpec, ...]:
    """What it says that its tensors are; ValueError when it does not say."""
    if checkpoint.problem:
        raise ValueError(checkpoint.problem)
    try:
        return tuple(
            ParameterSpec(name=str(name), shape=tuple(int(n) for n in shape), dtype=str(dtype))
            for name, shape, dtype in checkpoint.meta["parameters"]
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"meta.json has no parameters ({type(error).__name__})") from None


def load_checkpoint(checkpoint: CheckpointRef, slots: SlotPool) -> Held:
    """Read it into a slot and verify every digest; ValueError saying what is wrong with it."""
    slot = slots.take()
    try:
        return _read(checkpoint, slot, np.memmap(slot, dtype="<f4", mode="r+"), slots.size_bytes)
    except ValueError:
        slots.unpin(slot)
        raise


def verify_checkpoint(checkpoint: CheckpointRef) -> Ledger:
    """Read all of it, a tensor at a time, and verify every digest; ValueError saying what is wrong with it."""
    return _read(checkpoint, Path(), None, None).ledger


def closed_is_whole(runs_folder: Path) -> bool:
    """Whether the newest checkpoint is the one that the run was closed with, and whole."""
    newest = list_checkpoints(runs_folder)[:1]
    if not newest or newest[0].meta.get("closed") is not True:
        return False
    try:
        verify_checkpoint(newest[0])
    except ValueError:
        return False
    return True


def _read(
    checkpoint: CheckpointRef,
    slot: Path,
    flat: np.ndarray[Any, np.dtype[np.float32]] | None,
    size_bytes: int | None,
) -> Held:
    if checkpoint.problem:
        raise ValueError(checkpoint.problem)
    folder, meta = checkpoint.folder, checkpoint.meta
    try:
        for name in meta["files"]:
            if not (folder / name).exists():
                raise ValueError(f"{name} is missing")
        for name, digest in meta["files"].items():
            if file_digest(folder / name).hex() != digest:
                raise ValueError(f"{name} is damaged")
        ledger = Ledger.from_bytes((folder / "ledger.msgpack").read_bytes())
        tau = TauState.from_bytes(bytes.fromhex(meta["tau"]))
        anchor_digest, read_bytes = _read_anchor(checkpoint, flat)
        if size_bytes is not None and read_bytes != size_bytes:
            raise ValueError(f"{read_bytes} bytes of parameters where {size_bytes} belong")
        digest = state_digest(anchor_digest, ledger, tau)
        if digest.hex() != meta["digest"]:
            raise ValueError("its parts do not belong together")
    except UNREADABLE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    ref = StateRef(lineage=checkpoint.lineage, digest=digest)
    return Held(ref=ref, slot=slot, anchor_digest=anchor_digest, ledger=ledger, tau=tau)


def _read_anchor(
    checkpoint: CheckpointRef, flat: np.ndarray[Any, np.dtype[np.float32]] | None
) -> tuple[bytes, int]:
    """The anchor's digest and size in bytes; its values go to ``flat``. ValueError when they do not fit there."""
    hasher, offset = xxhash.xxh3_128(), 0
    for values in _values(checkpoint):
        if flat is not None:
            flat[offset : offset + values.size] = values
        hasher.update(values.data)
        offset += values.size
    return hasher.digest(), 4 * offset


def _values(checkpoint: CheckpointRef) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
    """The parameters, flat, in their order, then the outer momentum in the same one if there is any."""
    parameters = checkpoint_parameters(checkpoint)
    for name in ("model.safetensors", "outer.safetensors"):
        with safe_open(checkpoint.folder / name, framework="np") as tensors:
            if name == "outer.safetensors" and not list(tensors.keys()):
                return
            for parameter in parameters:
                values = tensors.get_tensor(parameter.name)
                if values.shape != parameter.shape or values.dtype != np.dtype("<f4"):
                    raise ValueError(f"parameter {parameter.name} of {name} is not what meta.json says")
                yield np.ascontiguousarray(values).reshape(-1)
