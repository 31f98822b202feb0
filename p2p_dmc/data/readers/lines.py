"""JSONL, a sample per line, carried as it is; CSV and TSV, a sample per row, as a JSON object."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Iterator
from typing import IO

from p2p_dmc.data.found import FileField
from p2p_dmc.data.readers.base import COMPRESSIONS, MAX_RECORD_BYTES, Input, Record, malformed
from p2p_dmc.data.walk import Entry
from p2p_dmc.errors import UserError

JSON = "json"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_jsonl(given: Input) -> Iterator[Record]:
    """Blank lines are passed over; each of the others is parsed, so that none is broken or cut short."""
    for entry in given.entries:
        is_plain = not entry.path.lower().endswith(COMPRESSIONS)
        with malformed(entry.path, "JSON lines"), given.open(entry) as stream:
            row = 0
            for number, (offset, line) in enumerate(_lines(stream, entry), 1):
                start = len(line) - len(line.lstrip())
                text = line.strip()
                if not text:
                    given.skipped.unused += 1
                    continue
                try:
                    json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise _broken(entry, number, line, error) from error
                one = (
                    FileField(JSON, entry.path, len(text), offset + start)
                    if is_plain
                    else given.spool.put(JSON, text)
                )
                yield given.row_key(entry, row), [one]
                row += 1


def _broken(entry: Entry, number: int, line: bytes, error: Exception) -> UserError:
    """``number`` counts from 1. A last line that has no end was perhaps not written to its end."""
    words, remedy = " ".join(str(error).split()), "mend it or take it out, and seed again"
    if isinstance(error, json.JSONDecodeError):
        column = error.colno + len(line) - len(line.lstrip())
        words = f"{error.msg.removesuffix(' at')} at column {column}"
    if not line.endswith(b"\n"):
        remedy = "the file ends in it; if it is still being written seed again when it is whole, else mend it"
    return UserError(f"{entry.path!r}: line {number} is no JSON: {words:.300}; {remedy}")


def _lines(stream: IO[bytes], entry: Entry) -> Iterator[tuple[int, bytes]]:
    """Each line with its offset in bytes."""
    offset = 0
    while line := stream.readline(MAX_RECORD_BYTES):
        if len(line) == MAX_RECORD_BYTES:
            raise UserError(
                f"{entry.path!r}: a line of more than {MAX_RECORD_BYTES} bytes; are these JSON lines?"
            )
        mark = len(_BYTE_ORDER_MARK) if offset == 0 and line.startswith(_BYTE_ORDER_MARK) else 0
        yield offset + mark, line[mark:]
        offset += len(line)


def read_csv(given: Input) -> Iterator[Record]:
    """The first row names the columns, unless all of it are numbers: then they are called "0", "1", ..."""
    for entry in given.entries:
        delimiter = "\t" if ".tsv" in entry.name.lower() else ","
        with malformed(entry.path, "CSV in UTF-8"), given.open(entry) as stream, _long_fields():
            text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
            rows = csv.reader(text, delimiter=delimiter, strict=True)
            columns: list[str] | None = None
            row = 0
            for cells in rows:
                if not cells:
                    given.skipped.unused += 1
                    continue
                if columns is None:
                    columns = _column_names(cells, entry)
                    if columns is cells:
                        continue
                if len(cells) != len(columns):
                    raise UserError(
                        f"{entry.path!r}: line {rows.line_num} has {len(cells)} cells and the first one has "
                        f"{len(columns)}; mend it"
                    )
                data = json.dumps(dict(zip(columns, cells, strict=True)), ensure_ascii=False)
                yield given.row_key(entry, row), [given.spool.put(JSON, data.encode())]
                row += 1


@contextlib.contextmanager
def _long_fields() -> Iterator[None]:
    """The csv module's bound on a cell is the whole process's, and too low for texts."""
    before = csv.field_size_limit(MAX_RECORD_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _column_names(cells: list[str], entry: Entry) -> list[str]:
    if all(map(_is_number, cells)):
        return [str(number) for number in range(len(cells))]
    if len(set(cells)) < len(cells):
        raise UserError(f"{entry.path!r}: two columns have one name, of {', '.join(cells):.300}; rename one")
    return cells


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
