"""The state of the script's own optimizer on disk: this peer's alone, from one start of its trainer to the next.

``runs/<run>/inner.safetensors`` has the tensors, named ``<parameter>/<key>`` (Adam: ``0.weight/exp_avg``), and
``inner.json`` the rest: where it comes from (history and lineage), the optimizer's class, the parameters' shapes, what
is no tensor, and the digest of the very file of tensors that it belongs to. A new one is first written as
``inner.next.json``; then the tensors get their name, then the json does. So whenever a writer dies, one of the two
belongs to the tensors.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from p2p_dmc.data.disk import file_digest, sync_folder, write_durably

TENSORS, META, NEXT_META = "inner.safetensors", "inner.json", "inner.next.json"
FORMAT = 1
DIGEST_BYTES = 16
DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
"""What a file of tensors can have, whichever version wrote it."""
SCHEDULED = frozenset({"lr", "initial_lr", "momentum", "betas", "weight_decay"})
"""Options of a group that the script or its schedulers set: never restored."""

Named = Sequence[tuple[str, torch.Tensor]]
Options = dict[str, Any]


class UnkeepableError(Exception):
    """The state has something that is neither a tensor nor a plain value. The message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerState:
    """An optimizer's state, of no process in particular."""

    optimizer: str
    """Module and name of its class."""
    history: str
    """Of the run, hexadecimal."""
    lineage: tuple[int, int]
    """The last round that was complete before."""
    ahead: int
    """Local steps taken since that round."""
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes, in the groups' order."""
    values: tuple[Options, ...]
    """Of each parameter what is no tensor, by key."""
    groups: tuple[Options, ...]
    """Of each group: ``options``, how many ``parameters``, and ``moved``: numbers that the steps themselves changed,
    each as [what the script had set, what it is now].
    """
    tensors: dict[str, torch.Tensor]
    """By ``<parameter>/<key>``, on the CPU as far as it was read from disk."""


def class_name(inner: torch.optim.Optimizer) -> str:
    """Which optimizer it is."""
    return f"{type(inner).__module__}.{type(inner).__qualname__}"


def group_options(inner: torch.optim.Optimizer) -> list[Options]:
    """Of each group what is plain: numbers, words, tuples of them; a tensor of one element counts as a number."""
    return [{k: _plain(v) for k, v in g.items() if _is_plain(_plain(v))} for g in inner.param_groups]


def take(
    inner: torch.optim.Optimizer,
    named: Named,
    began: Sequence[Options],
    history: str,
    lineage: tuple[int, int],
    ahead: int,
) -> InnerState:
    """The state as it stands; its tensors are the optimizer's own. UnkeepableError.

    ``began``: the groups' options before the first step.
    """
    shared = {id(parameter) for _, parameter in named}
    stray = next((key for key in inner.state if id(key) not in shared), None)
    if stray is not None:
        raise UnkeepableError(f"an entry of no shared parameter, under a {type(stray).__name__}")
    tensors: dict[str, torch.Tensor] = {}
    values: list[Options] = []
    for name, parameter in named:
        values.append({})
        for key, value in inner.state.get(parameter, {}).items():
            if not isinstance(key, str) or "/" in key:
                raise UnkeepableError(f"{name} has an entry under the key {key!r}")
            if isinstance(value, torch.Tensor):
                _check_tensor(name, key, value)
                tensors[f"{name}/{key}"] = value
            elif _is_single(value):
                values[-1][key] = value
            else:
                raise UnkeepableError(f"{key!r} of {name} is a {type(value).__name__}")
    return InnerState(
        optimizer=class_name(inner),
        history=history,
        lineage=lineage,
        ahead=ahead,
        parameters=tuple((name, tuple(parameter.shape)) for name, parameter in named),
        values=tuple(values),
        groups=tuple(
            {"options": now, "parameters": len(group["params"]), "moved": _moved(before, now)}
            for group, before, now in zip(inner.param_groups, began, group_options(inner), strict=True)
        ),
        tensors=tensors,
    )


def write(folder: Path, state: InnerState) -> None:
    """Replace what lies in ``folder``, durably; OSError when the disk does not take it, and the old one stays."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{TENSORS}.tmp"
    try:
        try:
            save_file(state.tensors, temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from None
        with open(temporary, "rb") as file:
            digest = file_digest(file)
            os.fsync(file.fileno())
        meta = to_json(state) | {"digest": digest.hex()}
        write_durably(
            folder / NEXT_META, json.dumps(meta | {"meta_digest": _meta_digest(meta)}, indent=1).encode()
        )
        os.replace(temporary, folder / TENSORS)
        os.replace(folder / NEXT_META, folder / META)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(folder)


def read(folder: Path) -> InnerState | None:
    """What lies there, verified, None when nothing does; ValueError saying what is wrong with it, OSError."""
    try:
        data = (folder / TENSORS).read_bytes()
    except FileNotFoundError:
        return None
    digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
    metas = [_read_meta(folder / name) for name in (META, NEXT_META)]
    meta = next((m for m in metas if m is not None and m["digest"] == digest), None)
    if meta is None:
        raise ValueError(f"{TENSORS} is damaged" if any(metas) else f"{META} is missing or damaged")
    if meta.get("format") != FORMAT:
        raise ValueError(f"it has format {meta.get('format')}, this version reads {FORMAT}")
    return _from_json(meta, load(data))


def mismatch(state: InnerState, inner: torch.optim.Optimizer, named: Named, histories: Sequence[str]) -> str:
    """Why this optimizer cannot go on from that state, in words; "" when it can.

    ``histories``: the run's, and those that it took the place of.
    """
    if state.history not in histories:
        return "it is of another founding of this run"
    if state.optimizer != class_name(inner):
        return f"it is of {state.optimizer}, and the script uses {class_name(inner)}"
    there = dict(state.parameters)
    here = {name: tuple(parameter.shape) for name, parameter in named}
    for name in [*there, *here]:
        if there.get(name) != here.get(name):
            return f"parameter {name} is {_shape(there.get(name))} there and {_shape(here.get(name))} here"
    return ""


def restore(state: InnerState, inner: torch.optim.Optimizer, named: Named) -> None:
    """Make ``state``, which fits, the optimizer's. Options of its groups stay the script's, except numbers that the
    steps themselves count up. Raises what the optimizer's ``load_state_dict`` raises.
    """
    parts = by_parameter(state)
    entries = {index: dict(parts[name]) for index, (name, _) in enumerate(named) if parts[name]}
    inner.load_state_dict({"state": entries, "param_groups": inner.state_dict()["param_groups"]})
    for index, entry in entries.items():  # torch casts to the parameter's dtype
        loaded = inner.state[named[index][1]]
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and isinstance(loaded.get(key), torch.Tensor):
                loaded[key] = value.to(loaded[key].device)
    if [len(group["params"]) for group in inner.param_groups] != [g["parameters"] for g in state.groups]:
        return
    for group, kept in zip(inner.param_groups, state.groups, strict=True):
        for key, (before, now) in kept["moved"].items():
            if _plain(group.get(key)) == before:
                group[key] = now


def by_parameter(state: InnerState) -> dict[str, Options]:
    """Each parameter's entries, tensors and others, by the parameter's name."""
    found = {name: dict(values) for (name, _), values in zip(state.parameters, state.values, strict=True)}
    for full, tensor in state.tensors.items():
        name, _, key = full.rpartition("/")
        found[name][key] = tensor
    return found


def to_state_dict(state: InnerState) -> dict[str, Any]:
    """What torch's ``load_state_dict`` of the same optimizer over the same parameters takes."""
    groups, first = [], 0
    for group in state.groups:
        after = first + int(group["parameters"])
        groups.append(group["options"] | {"params": list(range(first, after))})
        first = after
    entries = {index: entry for index, entry in enumerate(by_parameter(state).values()) if entry}
    return {"state": entries, "param_groups": groups}


def _check_tensor(name: str, key: str, value: torch.Tensor) -> None:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise UnkeepableError(f"{key!r} of {name} is a {type(value).__name__}")
    if value.layout is not torch.strided or value.dtype not in DTYPES:
        kind = value.layout if value.layout is not torch.strided else value.dtype
        raise UnkeepableError(f"{key!r} of {name} is a tensor of {str(kind).removeprefix('torch.')}")


def _moved(before: Options, now: Options) -> dict[str, list[float]]:
    return {
        key: [before[key], value]
        for key, value in now.items()
        if key not in SCHEDULED and _is_number(value) and _is_number(before.get(key)) and value != before[key]
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_single(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _is_plain(value: Any) -> bool:
    return _is_single(value) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "x".join(map(str, shape)) or "scalar"


def to_json(state: InnerState) -> dict[str, Any]:
    """All but the tensors."""
    return {
        "format": FORMAT,
        "optimizer": state.optimizer,
        "history": state.history,
        "lineage": list(state.lineage),
        "ahead": state.ahead,
        "parameters": [[name, list(shape)] for name, shape in state.parameters],
        "values": list(state.values),
        "groups": list(state.groups),
    }


def _from_json(meta: dict[str, Any], tensors: dict[str, torch.Tensor]) -> InnerState:
    groups = [
        {
            "options": {key: _tuples(value) for key, value in g["options"].items()},
            "parameters": int(g["parameters"]),
            "moved": g["moved"],
        }
        for g in meta["groups"]
    ]
    return InnerState(
        optimizer=str(meta["optimizer"]),
        history=str(meta["history"]),
        lineage=(int(meta["lineage"][0]), int(meta["lineage"][1])),
        ahead=int(meta["ahead"]),
        parameters=tuple((str(name), tuple(shape)) for name, shape in meta["parameters"]),
        values=tuple(meta["values"]),
        groups=tuple(groups),
        tensors=tensors,
    )


def _read_meta(path: Path) -> dict[str, Any] | None:
    """What it says when it is whole."""
    try:
        meta = json.loads(path.read_bytes())
        sealed = meta.pop("meta_digest")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return meta if sealed == _meta_digest(meta) and "digest" in meta else None


def _meta_digest(meta: dict[str, Any]) -> str:
    said = json.dumps(meta, sort_keys=True).encode()
    return hashlib.blake2b(said, digest_size=DIGEST_BYTES).hexdigest()
