"""NumPy's .npy and .npz, a sample per row of the first axis; tokens in a .bin, a sample per document.

Each field is a whole .npy, so that its dtype and shape come with it: `numpy.load(io.BytesIO(field))`.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from p2p_dmc.data.found import FileField
from p2p_dmc.data.readers.base import MAX_RECORD_BYTES, Input, Record, malformed
from p2p_dmc.data.walk import Entry
from p2p_dmc.errors import UserError

NPY = "npy"
ROWS_AT_ONCE = 1 << 16
"""Documents whose places are in memory."""
MAX_DESCRIPTION_BYTES = 32 << 20
"""Of the .json beside tokens; a list of more documents than fit is a .npy."""
_Bounds = npt.NDArray[np.int64]

_MEGATRON_MAGIC = b"MMIDIDX\0\0"
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


@dataclass(frozen=True, slots=True)
class _Rows:
    """An array in a file: how many rows, each of how many bytes, and what goes before one to make a .npy."""

    count: int
    row_bytes: int
    head: bytes


def npy_head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """What a .npy file of an array in C order begins with."""
    head = io.BytesIO()
    description = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(head, {"descr": description, "fortran_order": False, "shape": shape})
    return head.getvalue()


def _header(file: IO[bytes], path: str) -> _Rows:
    """Read an array's header; the file is then at its first row."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    if dtype.hasobject:
        raise UserError(
            f"{path!r}: an array of Python objects is pickled, which is not taken, since reading it runs code "
            "that is in it; save plain numbers or text"
        )
    if not shape:
        raise UserError(f"{path!r}: an array without axes has no rows; give it a first axis")
    if is_fortran and len(shape) > 1:
        raise UserError(f"{path!r}: stored column by column; save it with numpy.ascontiguousarray")
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    if row_bytes > MAX_RECORD_BYTES:
        raise UserError(
            f"{path!r}: a row of {row_bytes} bytes, more than {MAX_RECORD_BYTES}; save it in parts"
        )
    return _Rows(shape[0], row_bytes, npy_head(dtype, shape[1:]))


def read_npy(given: Input) -> Iterator[Record]:
    """The rows lie in the file as they are."""
    for entry in given.entries:
        with malformed(entry.path, ".npy"), given.open(entry) as file:
            rows = _header(file, entry.path)
            start = file.tell()
            if start + rows.count * rows.row_bytes > entry.size:
                raise UserError(f"{entry.path!r}: shorter than its header says; copy it again")
            size = len(rows.head) + rows.row_bytes
            for row in range(rows.count):
                one = FileField(NPY, entry.path, size, start + row * rows.row_bytes, rows.head)
                yield given.row_key(entry, row), [one]


def read_npz(given: Input) -> Iterator[Record]:
    """Row i of each of the arrays is sample i; an array's name and ``.npy`` is the field's."""
    for entry in given.entries:
        with (
            malformed(entry.path, ".npz"),
            zipfile.ZipFile(entry.path) as archive,
            contextlib.ExitStack() as stack,
        ):
            names = archive.namelist()
            files = [stack.enter_context(archive.open(name)) for name in names]
            arrays = [_header(file, f"{entry.path}/{name}") for file, name in zip(files, names, strict=True)]
            counts = sorted({array.count for array in arrays})
            if len(counts) > 1:
                raise UserError(
                    f"{entry.path!r}: arrays of {counts[0]} and of {counts[-1]} rows are no samples; "
                    "save those that belong together"
                )
            for row in range(counts[0] if counts else 0):
                fields = []
                for name, file, array in zip(names, files, arrays, strict=True):
                    data = file.read(array.row_bytes)
                    if len(data) < array.row_bytes:
                        raise EOFError(f"{name} ends too early")
                    fields.append(given.spool.put(name.lower().replace("/", "_"), data, array.head))
                yield given.row_key(entry, row), fields


# -- tokens -------------------------------------------------------------------------------------------------


def is_tokens(path: str) -> bool:
    """A .bin beside which a file says where the documents are."""
    return path.lower().endswith(".bin") and (
        _megatron_index(path) is not None or _described(path) is not None
    )


def _beside(path: str, ending: str) -> Path:
    return Path(path).with_suffix(ending)


def _megatron_index(path: str) -> Path | None:
    index = _beside(path, ".idx")
    try:
        with index.open("rb") as file:
            return index if file.read(len(_MEGATRON_MAGIC)) == _MEGATRON_MAGIC else None
    except FileNotFoundError:
        return None


def _described(path: str) -> dict[str, Any] | None:
    try:
        with _beside(path, ".json").open("rb") as file:
            text = file.read(MAX_DESCRIPTION_BYTES + 1)
            if len(text) > MAX_DESCRIPTION_BYTES and b'"dtype"' in text[:4096]:
                raise UserError(
                    f"{file.name!r}: more than {MAX_DESCRIPTION_BYTES} bytes; save the documents as a .npy and name "
                    "that here"
                )
            said = json.loads(text)
    except (FileNotFoundError, ValueError):
        return None
    return said if isinstance(said, dict) and "dtype" in said else None


def read_tokens(given: Input) -> Iterator[Record]:
    """Each document, a range of the file, is the .npy of its tokens."""
    for entry in given.entries:
        with malformed(entry.path, "tokens with an index"):
            index = _megatron_index(entry.path)
            dtype, bounds = _megatron(index) if index is not None else _documents(entry)
            row, start = 0, -1
            for stop in (int(bound) for some in bounds for bound in some):
                if stop * dtype.itemsize > entry.size:
                    raise UserError(f"{entry.path!r}: shorter than its index says; copy both again")
                if start >= 0:
                    head = npy_head(dtype, (stop - start,))
                    size = len(head) + (stop - start) * dtype.itemsize
                    one = FileField(NPY, entry.path, size, start * dtype.itemsize, head)
                    yield given.row_key(entry, row), [one]
                    row += 1
                start = stop
            if max(start, 0) * dtype.itemsize != entry.size:
                raise UserError(
                    f"{entry.path!r}: {entry.size} bytes, more than its index says; copy both again"
                )


def _megatron(index: Path) -> tuple[np.dtype[Any], Iterator[_Bounds]]:
    """Megatron-LM's .idx: sizes and places of sequences, and which sequences begin documents."""
    fixed = struct.Struct("<9sQBQQ")
    with index.open("rb") as file:
        _, version, code, sequences, documents = fixed.unpack(file.read(fixed.size))
    if version != 1 or code not in _MEGATRON_TYPES:
        raise UserError(
            f"{str(index)!r}: version {version}, type {code}: not known; write it with Megatron-LM"
        )
    dtype = np.dtype(_MEGATRON_TYPES[code])
    at = fixed.size
    sizes = np.memmap(index, dtype="<i4", mode="r", offset=at, shape=(sequences,))
    places = np.memmap(index, dtype="<i8", mode="r", offset=at + 4 * sequences, shape=(sequences,))
    firsts = np.memmap(index, dtype="<i8", mode="r", offset=at + 12 * sequences, shape=(documents,))
    return dtype, _megatron_bounds(index, sizes, places, firsts, dtype.itemsize)


def _megatron_bounds(
    index: Path, sizes: _Bounds, places: _Bounds, firsts: _Bounds, token_bytes: int
) -> Iterator[_Bounds]:
    """The documents' first tokens, and the end of the last, some sequences at a time."""
    done, tokens, named = 0, 0, 0
    while done <= len(sizes):
        some = sizes[done : done + ROWS_AT_ONCE].astype(np.int64)
        begins = tokens + np.concatenate(([0], np.cumsum(some)))  # of each, and of what follows
        is_last = done + len(some) == len(sizes)
        stop = done + len(some) + is_last
        until = named + int(np.searchsorted(firsts[named:], stop))
        here = firsts[named:until] - done
        is_dense = (places[done : done + len(some)] == begins[:-1] * token_bytes).all()
        if not is_dense or (some < 0).any() or (here < 0).any() or (np.diff(here) < 0).any():
            raise UserError(
                f"{str(index)!r}: the documents do not follow each other; write it with Megatron-LM"
            )
        yield begins[here]
        done, tokens, named = stop, int(begins[-1]), until
    if named < len(firsts):
        raise UserError(f"{str(index)!r}: names sequences that it does not have; write it with Megatron-LM")


def _documents(entry: Entry) -> tuple[np.dtype[Any], Iterator[_Bounds]]:
    """A .json beside it: "dtype", and "documents" (their first tokens, or a .npy of them) or "block" (tokens)."""
    said, path = _described(entry.path), str(_beside(entry.path, ".json"))
    assert said is not None
    dtype = np.dtype(said["dtype"])
    if dtype.hasobject or dtype.itemsize == 0:
        raise UserError(f"{path!r}: tokens of dtype {said['dtype']!r}; say for example uint16")
    tokens, rest = divmod(entry.size, dtype.itemsize)
    if rest:
        raise UserError(f"{entry.path!r}: {entry.size} bytes are no whole number of {dtype}; mend {path!r}")
    if "documents" not in said:
        block = said.get("block")
        if type(block) is not int or block < 1:
            raise UserError(f"{path!r}: a block of {block!r} tokens; say a number above 0, or documents")
        return dtype, _ascending(range(0, tokens, block), tokens, path)
    documents = said["documents"]
    if isinstance(documents, str):
        beside = str(Path(entry.path).parent / Path(documents).name)
        with malformed(beside, ".npy"):
            documents = np.load(beside, mmap_mode="r", allow_pickle=False)
        documents = documents.reshape(-1)
    return dtype, _ascending(documents, tokens, path)


def _ascending(documents: Sequence[int] | _Bounds, tokens: int, path: str) -> Iterator[_Bounds]:
    """The documents' first tokens, and the end of the last, some at a time."""
    last = -1
    for done in range(0, len(documents), ROWS_AT_ONCE):
        some = np.asarray(documents[done : done + ROWS_AT_ONCE], dtype=np.int64)
        if (last < 0 and some[0] != 0) or some[0] < last or (np.diff(some) < 0).any() or some[-1] > tokens:
            raise UserError(
                f"{path!r}: the documents' first tokens do not ascend from 0 to {tokens}; mend it"
            )
        last = int(some[-1])
        yield some
    if last < 0 and tokens:
        raise UserError(
            f"{path!r}: no documents, and {tokens} tokens; say where they begin, counted in tokens"
        )
    if last != tokens:
        yield np.array([tokens], dtype=np.int64)
