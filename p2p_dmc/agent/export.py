"""`dmc-peer export`: a run's parameters, and this peer's optimizer state, as files that torch and safetensors read.

Reads the home's files only, so it does not matter whether an agent runs there. torch is imported when it is needed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from safetensors import SafetensorError

from p2p_dmc.agent.checkpoints import (
    CheckpointRef,
    checkpoint_parameters,
    list_checkpoints,
    verify_checkpoint,
)
from p2p_dmc.agent.home import Home, sync_folder
from p2p_dmc.agent.run_files import load_record, load_run
from p2p_dmc.config import format_size
from p2p_dmc.errors import UserError
from p2p_dmc.observe.narrator import plural, printable

if TYPE_CHECKING:
    import torch

    from p2p_dmc.train.inner_state import InnerState

FORMATS = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
"""By the ending of the file's name, where --format does not say."""
LINEAGE = re.compile(r"(\d{1,19})[-.](\d{1,19})")
TRIES = 3
"""An agent that runs replaces its oldest checkpoint now and then; what is gone meanwhile is looked for anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file of committed parameters, verified: float32, whatever the model's dtype is."""

    kind: str
    """"final" or "checkpoint"."""
    lineage: tuple[int, int]
    path: Path
    dtypes: dict[str, str]
    """The model's own, by parameter, in the model's order."""
    history: str
    """Hexadecimal; "" where the file does not say."""


def export(
    *,
    out: Path,
    home: Path,
    run: str | None,
    source: str | None,
    form: str | None,
    with_optimizer: bool,
    fp32: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write OUT, and OUT's neighbour ``.optimizer`` if that is wanted; say what they are. UserError."""
    form = form or _format_of(out)
    beside = out.with_name(f"{out.stem}.optimizer{out.suffix}")
    _refuse_existing([out, beside] if with_optimizer else [out], force)
    folder = _run_folder(Home(home), run)
    found, tensors = _read(folder, source, fp32)
    inner = _inner(folder, found) if with_optimizer else None
    _write(out, lambda path: _save(tensors, path, form))
    if inner is not None:
        _write(beside, lambda path: _save_optimizer(inner, path, form))
    facts = {
        "run": folder.name,
        "from": found.kind,
        "lineage": list(found.lineage),
        "out": str(out),
        "format": form,
        "parameters": len(tensors),
        "values": sum(tensor.numel() for tensor in tensors.values()),
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}),
        "size_bytes": out.stat().st_size,
        "optimizer": None
        if inner is None
        else {
            "class": inner.optimizer,
            "lineage": list(inner.lineage),
            "ahead": inner.ahead,
            "out": str(beside),
            "size_bytes": beside.stat().st_size,
        },
    }
    print(json.dumps(facts) if as_json else printable(_told(facts)))


def _told(facts: dict[str, Any]) -> str:
    view_epoch, number = facts["lineage"]
    kind = "final model" if facts["from"] == "final" else "checkpoint"
    line = (
        f"{facts['out']}: {kind} of run {facts['run']!r}, view {view_epoch} round {number}; "
        f"{plural(facts['parameters'], 'parameter')} with {plural(facts['values'], 'value')} "
        f"({', '.join(facts['dtypes'])}), {format_size(facts['size_bytes'])}"
    )
    if (optimizer := facts["optimizer"]) is not None:
        view_epoch, number = optimizer["lineage"]
        ahead = f" and {plural(optimizer['ahead'], 'local step')}" if optimizer["ahead"] else ""
        line += (
            f"\n{optimizer['out']}: this peer's state of {optimizer['class'].rpartition('.')[2]}, "
            f"view {view_epoch} round {number}{ahead}; {format_size(optimizer['size_bytes'])}"
        )
    return line


# -- where from ---------------------------------------------------------------------------------------------------


def _run_folder(home: Home, run: str | None) -> Path:
    """The folder of the run that is meant; UserError naming those that are there."""
    root = home.root / "runs"
    found = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    if not found:
        raise UserError(f"{home.root} has no run; give the --home of a peer that has trained")
    if run is None and len(found) == 1:
        return root / found[0]
    if run is None:
        raise UserError(f"{home.root} has several runs, {', '.join(found)}; say which with --run NAME")
    if run not in found:
        raise UserError(f"{home.root} has no run {run!r}; give one of {', '.join(found)} as --run NAME")
    return root / run


def _read(folder: Path, wanted: str | None, fp32: bool) -> tuple[Source, dict[str, torch.Tensor]]:
    """The parameters that ``--from`` means, in the model's order and dtypes."""
    for left in reversed(range(TRIES)):
        found = _find(folder, wanted)
        try:
            return found, _load(found, fp32)
        except FileNotFoundError:
            if not left:
                raise
    raise AssertionError("unreachable")


def _find(folder: Path, wanted: str | None) -> Source:
    """What ``--from`` means: the final model of a finished run, a checkpoint's lineage, else the newest whole one."""
    if wanted in (None, "final"):
        try:
            final = _final(folder)
        except ValueError as error:
            if wanted:
                raise UserError(
                    f"{folder / 'final'}: {error}; --from checkpoint takes the newest checkpoint"
                ) from None
            final = None
            _note(f"{folder / 'final'}: {error}; a checkpoint is taken")
        if final is not None:
            return final
        if wanted:
            raise UserError(
                f"run {folder.name!r} is not finished on this peer; --from checkpoint takes its newest checkpoint"
            )
    match = LINEAGE.fullmatch(wanted or "")
    if match is None and wanted not in (None, "final", "checkpoint"):
        raise UserError(
            f"--from {wanted}: write final, checkpoint, or a view and a round such as 3-41 of {_known(folder)}"
        )
    lineage = (int(match[1]), int(match[2])) if match else None
    checkpoints = [c for c in list_checkpoints(folder) if lineage in (None, c.lineage)]
    for checkpoint in checkpoints:
        try:
            return _checkpoint(checkpoint)
        except ValueError as error:
            _note(f"checkpoint {checkpoint.folder} is skipped: {error}")
    if lineage is not None:
        raise UserError(
            f"run {folder.name!r} has no whole checkpoint {wanted} here; there is {_known(folder)}"
        )
    raise UserError(
        f"run {folder.name!r} has no whole checkpoint here yet; try again in a minute, or give another peer's --home"
    )


def _known(folder: Path) -> str:
    return ", ".join(f"{v}-{r}" for v, r in (c.lineage for c in list_checkpoints(folder))) or "none"


def _final(folder: Path) -> Source | None:
    """The final model, None while the run is not finished; ValueError saying what is wrong with it."""
    facts = load_run(folder)
    if "finished" not in facts:
        return None
    prefix = "parameter "
    said = {str(k): str(v) for k, v in facts.get("fingerprint", ()) if str(k).startswith(prefix)}
    dtypes = {setting.removeprefix(prefix): value.rpartition(" ")[2] for setting, value in said.items()}
    if not dtypes:
        raise ValueError("run.json does not say what it holds")
    source = Source(
        kind="final",
        lineage=(int(facts["finished"]["lineage"][0]), int(facts["finished"]["lineage"][1])),
        path=folder / "final" / "model.safetensors",
        dtypes=dtypes,
        history="",
    )
    try:
        digest = _anchor_digest(source.path, dtypes)
    except FileNotFoundError:
        raise ValueError(f"{source.path.name} is missing") from None
    except SafetensorError as error:
        raise ValueError(f"{source.path.name} is damaged ({error})") from None
    if digest != facts["finished"]["digest"]:
        raise ValueError(f"{source.path.name} is damaged")
    return source


def _anchor_digest(path: Path, names: Iterable[str]) -> str:
    """xxh3_128 of the parameters in this order, float32, hexadecimal."""
    from safetensors import safe_open

    hasher = xxhash.xxh3_128()
    with safe_open(path, framework="np") as tensors:
        for name in names:
            hasher.update(tensors.get_tensor(name).tobytes())
    return hasher.hexdigest()


def _checkpoint(checkpoint: CheckpointRef) -> Source:
    """It is whole; ValueError saying what is wrong with it."""
    verify_checkpoint(checkpoint)
    return Source(
        kind="checkpoint",
        lineage=checkpoint.lineage,
        path=checkpoint.folder / "model.safetensors",
        dtypes={p.name: p.dtype for p in checkpoint_parameters(checkpoint)},
        history=str(checkpoint.meta["history"]),
    )


def _load(source: Source, fp32: bool) -> dict[str, torch.Tensor]:
    import torch
    from safetensors import safe_open

    tensors = {}
    with safe_open(source.path, framework="pt") as file:
        for name, dtype in source.dtypes.items():
            kind = torch.float32 if fp32 else getattr(torch, dtype, None)
            if not isinstance(kind, torch.dtype):
                raise UserError(
                    f"parameter {name} is {dtype}, which torch {torch.__version__} lacks; add --fp32"
                )
            tensors[name] = file.get_tensor(name).to(kind)
    return tensors


def _inner(folder: Path, source: Source) -> InnerState:
    """This peer's optimizer state; UserError when there is none that belongs to the run."""
    from p2p_dmc.train import inner_state

    for left in reversed(range(TRIES)):
        try:
            state = inner_state.read(folder)
            break
        except ValueError as error:  # its trainer may have replaced it meanwhile
            if not left:
                raise UserError(
                    f"{folder / inner_state.TENSORS}: {error}; leave out --with-optimizer"
                ) from None
    if state is None:
        raise UserError(
            f"this peer has no optimizer state of run {folder.name!r}: the script's optimizer keeps none, or it was "
            "not written yet; leave out --with-optimizer, or try again in a minute"
        )
    if source.history and not _is_one_run(folder, source.history, state.history):
        raise UserError(
            f"{folder / inner_state.TENSORS} is of another founding of run {folder.name!r}; leave out --with-optimizer"
        )
    return state


def _is_one_run(folder: Path, one: str, two: str) -> bool:
    """Whether these histories, hexadecimal, are the same, or one took the other's place."""
    record = load_record(folder) if one != two else None
    if record is None:
        return one == two
    known = {record.promises.history.hex(), *(r.history.hex() for r in record.promises.replaced)}
    return {one, two} <= known


# -- where to -----------------------------------------------------------------------------------------------------


def _format_of(out: Path) -> str:
    if out.suffix not in FORMATS:
        raise UserError(
            f"{out}: its name does not say what it is to be; end it in .safetensors or .pt, or give --format"
        )
    return FORMATS[out.suffix]


def _refuse_existing(paths: Iterable[Path], force: bool) -> None:
    for path in paths:
        if path.is_dir():
            raise UserError(f"{path} is a directory; give the name of a file")
        if path.exists() and not force:
            raise UserError(f"{path} exists; give another name, or --force to replace it")
        if not path.parent.is_dir():
            raise UserError(f"{path.parent} is no directory; make it, or give another name")


def _write(path: Path, save: Callable[[Path], None]) -> None:
    """Under its name only when whole, and on disk then; OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def _save(tensors: dict[str, torch.Tensor], path: Path, form: str, **metadata: str) -> None:
    from safetensors.torch import save_file

    if form == "torch":
        _torch_save(tensors, path)
        return
    try:
        save_file(tensors, path, metadata={"format": "pt", **metadata})
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from None


def _save_optimizer(inner: InnerState, path: Path, form: str) -> None:
    from p2p_dmc.train import inner_state

    if form == "torch":
        _torch_save(inner_state.to_state_dict(inner), path)
    else:
        _save(inner.tensors, path, form, optimizer=json.dumps(inner_state.to_json(inner)))


def _torch_save(value: dict[str, Any], path: Path) -> None:
    import torch

    try:
        with open(path, "wb") as file:
            torch.save(value, file)
    except RuntimeError as error:  # how torch tells of a full disk
        raise OSError(errno.EIO, str(error).partition("\n")[0], str(path)) from None


def _note(line: str) -> None:
    print(f"dmc-peer: {printable(line)}", file=sys.stderr)
