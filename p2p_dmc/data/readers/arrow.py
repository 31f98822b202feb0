"""Parquet, and what Hugging Face's `save_to_disk` writes: a sample per row.

A column of bytes, or of Hugging Face's images and sounds, is a field of its own, named by the column in lower
case; the other columns together are the field ``json``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from p2p_dmc.data.found import FileField
from p2p_dmc.data.readers.base import Input, Record, malformed, need
from p2p_dmc.data.readers.lines import JSON
from p2p_dmc.data.walk import Entry, entry_of
from p2p_dmc.errors import UserError

ROWS_AT_ONCE = 64
_STATE, _DICT = "state.json", "dataset_dict.json"


def read_parquet(given: Input) -> Iterator[Record]:
    """Row by row, whatever the size of the row groups."""
    for entry in given.entries:
        parquet = need("pyarrow.parquet", "pyarrow", entry.path)
        with malformed(entry.path, "Parquet"), given.open(entry) as stream:
            # neither ahead nor on several threads: memory stays at some pages
            file = parquet.ParquetFile(stream, pre_buffer=False, buffer_size=1 << 20)
            batches = file.iter_batches(batch_size=ROWS_AT_ONCE, use_threads=False)
            yield from _rows(given, entry, batches)


def saved_folders(path: Path) -> list[Path]:
    """The data sets that `save_to_disk` has written to ``path``: one, or one per split; none if it has not."""
    if (path / _DICT).is_file():
        with malformed(str(path / _DICT), "save_to_disk"):
            splits = json.loads((path / _DICT).read_bytes())["splits"]
            return [path / str(split) for split in splits]
    return [path] if (path / _STATE).is_file() and (path / "dataset_info.json").is_file() else []


def saved_files(path: Path) -> list[Entry]:
    """The files of those data sets in the order of their rows."""
    entries = []
    for folder in saved_folders(path):
        state = folder / _STATE
        with malformed(str(state), "save_to_disk"):
            names = [str(file["filename"]) for file in json.loads(state.read_bytes())["_data_files"]]
        for name in names:
            if "/" in name or name.startswith("."):
                raise UserError(f"{str(state)!r}: names the file {name!r}, outside its folder; save it again")
            relative = str((folder / name).relative_to(path))
            entries.append(entry_of(folder / name)._replace(relative=relative))
    return entries


def read_saved(given: Input) -> Iterator[Record]:
    """The Arrow streams of a `save_to_disk` folder."""
    for entry in given.entries:
        ipc = need("pyarrow.ipc", "pyarrow", entry.path)
        with malformed(entry.path, "Arrow stream"), given.open(entry) as stream:
            yield from _rows(given, entry, ipc.open_stream(stream))


def _rows(given: Input, entry: Entry, batches: Any) -> Iterator[Record]:
    number = 0
    for batch in batches:
        blobs = [one.name for one in batch.schema if _is_blob(one.type)]
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            for row in batch.slice(start, ROWS_AT_ONCE).to_pylist():
                yield given.row_key(entry, number), _fields(given, entry, row, blobs)
                number += 1


def _is_blob(kind: Any) -> bool:
    types = need("pyarrow.types", "pyarrow", "Arrow")
    if types.is_struct(kind):
        names = {kind.field(i).name for i in range(kind.num_fields)}
        return names == {"bytes", "path"} and types.is_binary(kind.field("bytes").type)
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )


def _fields(given: Input, entry: Entry, row: dict[str, Any], blobs: list[str]) -> list[FileField]:
    fields: dict[str, FileField] = {}
    for name in blobs:
        value = row.pop(name)
        if isinstance(value, dict):
            if value["bytes"] is None and value["path"] is not None:
                raise UserError(
                    f"{entry.path!r}: column {name!r} names files outside, such as {value['path']!r:.200}; save it "
                    "with the contents embedded"
                )
            value = value["bytes"]
        if value is not None:
            _put(given, entry, fields, name.lower(), value)
    if row or not fields:
        _put(given, entry, fields, JSON, json.dumps(row, ensure_ascii=False, default=_plain).encode())
    return list(fields.values())


def _put(given: Input, entry: Entry, fields: dict[str, FileField], name: str, data: bytes) -> None:
    if name in fields:
        raise UserError(f"{entry.path!r}: two columns would be field {name!r}; rename one")
    fields[name] = given.spool.put(name, data)


def _plain(value: Any) -> str:
    """What JSON has no form for: times as ISO 8601, bytes in base64, decimals and the like as text."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
