"""MosaicML Streaming's MDS, version 2: an index.json, and shards of samples with columns.

Columns of bytes and of compressed images are fields of their own, arrays are ``<column>.npy``, the other
columns together are the field ``json``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from p2p_dmc.data.found import FileField
from p2p_dmc.data.readers.arrays import NPY, npy_head
from p2p_dmc.data.readers.base import Input, Record, malformed
from p2p_dmc.data.readers.lines import JSON
from p2p_dmc.data.walk import Entry, entry_of
from p2p_dmc.errors import UserError

INDEX = "index.json"
_BLOBS = frozenset({"bytes", "jpeg", "png"})
_DTYPES = {
    **dict(zip((8, 16, 32, 64), ("u1", "<u2", "<u4", "<u8"), strict=True)),
    **dict(zip((9, 17, 33, 65), ("i1", "<i2", "<i4", "<i8"), strict=True)),
    **dict(zip((18, 34, 66), ("<f2", "<f4", "<f8"), strict=True)),
}
"""What the number in front of an array of no fixed type means."""
_NUMBERS = {np.dtype(code).name: code for code in _DTYPES.values()} | {"int": "<i8"}
_COMPRESSIONS = {"gz": ".gz", "bz2": ".bz2", "zstd": ".zst"}


def is_mds(path: Path) -> bool:
    """Whether the folder's index says so."""
    try:
        said = json.loads((path / INDEX).read_bytes())
    except (OSError, ValueError):
        return False
    shards = said.get("shards") if isinstance(said, dict) else None
    return isinstance(shards, list) and all(
        isinstance(one, dict) and one.get("format") == "mds" for one in shards
    )


def mds_files(path: Path) -> tuple[list[Entry], dict[str, dict[str, Any]]]:
    """The shards' files in order, and for each what the index says of it."""
    entries, said = [], {}
    with malformed(str(path / INDEX), "MDS index"):
        for shard in json.loads((path / INDEX).read_bytes())["shards"]:
            compression = str(shard["compression"] or "").partition(":")[0]
            if shard["version"] != 2 or (compression and compression not in _COMPRESSIONS):
                raise UserError(
                    f"{str(path / INDEX)!r}: version {shard['version']}, compression {compression!r}: not known; "
                    "write it in version 2, with zstd or without compression"
                )
            raw, packed = (str((shard[key] or {}).get("basename", "")) for key in ("raw_data", "zip_data"))
            name = raw if not compression or (path / raw).is_file() else packed
            if "/" in name or name.startswith("."):
                raise UserError(
                    f"{str(path / INDEX)!r}: names the file {name!r}, outside its folder; mend it"
                )
            entry = entry_of(path / name)
            entries.append(entry)
            said[entry.path] = shard
    return entries, said


class MdsReader:
    """Reads the shards of one index."""

    def __init__(self, said: dict[str, dict[str, Any]]) -> None:
        self._said = said

    def __call__(self, given: Input) -> Iterator[Record]:
        row = 0
        for entry in given.entries:
            with malformed(entry.path, "MDS shard"), given.open(entry) as stream:
                for data in _samples(stream):
                    yield f"{row:09d}", _fields(given, entry, self._said[entry.path], data)
                    row += 1


def _read(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("it ends too early")
    return data


def _samples(stream: IO[bytes]) -> Iterator[bytes]:
    """Count, offsets, settings, samples; the settings are those of the index once more."""
    (count,) = struct.unpack("<I", _read(stream, 4))
    offsets = np.frombuffer(_read(stream, 4 * (count + 1)), "<u4").astype(np.int64)
    _read(stream, int(offsets[0]) - 4 * (count + 2))
    for size in np.diff(offsets).tolist():
        yield _read(stream, size)


def _fields(given: Input, entry: Entry, said: dict[str, Any], data: bytes) -> list[FileField]:
    """First the sizes of the columns that have no fixed one, then the columns."""
    sizes = list(said["column_sizes"])
    at = 4 * sizes.count(None)
    variable = iter(struct.unpack_from(f"<{sizes.count(None)}I", data))
    fields: dict[str, FileField] = {}
    others: dict[str, Any] = {}
    for name, encoding, fixed in zip(said["column_names"], said["column_encodings"], sizes, strict=True):
        size = next(variable) if fixed is None else int(fixed)
        value, at = data[at : at + size], at + size
        if len(value) < size:
            raise EOFError("a sample ends too early")
        kind = str(encoding).partition(":")[0]
        if kind in _BLOBS:
            fields[name.lower()] = given.spool.put(name.lower(), value)
        elif kind == "ndarray":
            extension = f"{name.lower()}.{NPY}"
            fields[extension] = given.spool.put(extension, *_array(str(encoding), value))
        else:
            others[name] = _plain(entry, name, str(encoding), value)
    if others or not fields:
        fields[JSON] = given.spool.put(JSON, json.dumps(others, ensure_ascii=False).encode())
    return list(fields.values())


def _plain(entry: Entry, name: str, encoding: str, value: bytes) -> Any:
    if encoding == "str":
        return value.decode()
    if encoding == "json":
        return json.loads(value)
    if encoding in _NUMBERS:
        return np.frombuffer(value, _NUMBERS[encoding])[0].item()
    if encoding == "str_int":
        return int(value)
    if encoding == "str_float":
        return float(value)
    if encoding == "str_decimal":
        return value.decode()
    why = "pickle, which runs code when it is read" if encoding == "pkl" else "not known"
    raise UserError(f"{entry.path!r}: column {name!r} is {encoding!r}: {why}; write it in another encoding")


def _array(encoding: str, value: bytes) -> tuple[bytes, bytes]:
    """(contents, .npy header) of an array whose dtype and shape are in the encoding or in front of the data."""
    _, *known = encoding.split(":")
    if known:
        dtype = np.dtype(known[0])
    else:
        dtype = np.dtype(_DTYPES[value[0]])
        value = value[1:]
    if len(known) > 1:
        shape = tuple(map(int, known[1].split(",")))
    else:
        axes, width = value[0] >> 2, 1 << (value[0] & 3)
        shape = tuple(np.frombuffer(value, f"<u{width}", axes, 1).tolist())
        value = value[1 + axes * width :]
    return value, npy_head(dtype, shape)
