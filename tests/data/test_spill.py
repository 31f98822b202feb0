"""Logs and sorts give back what was put in, whatever fits into memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.data import spill
from p2p_dmc.data.spill import Log, sort_records
from p2p_dmc.data.store import StoreFull

RECORDS = st.lists(st.binary(max_size=300), max_size=80)


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little memory that everything goes to disk."""
    for name, size in (
        ("IN_MEMORY_BYTES", 100),
        ("RUN_BYTES", 400),
        ("_READ_BYTES", 64),
        ("_MERGE_BYTES", 1),
    ):
        monkeypatch.setattr(spill, name, size)


@settings(max_examples=60)
@given(RECORDS, st.sampled_from([1, 7, 64, 1 << 18]))
def test_a_log_in_memory(records: list[bytes], at_once: int) -> None:
    log = Log(None)
    for record in records:
        log.append(record)
    assert list(log.read(at_once=at_once)) == records


def test_a_log_on_disk(tight: None, tmp_path: Path) -> None:
    rng, log = random.Random(1), Log(tmp_path)
    records, places = [rng.randbytes(rng.randrange(200)) for _ in range(500)], [0]
    for record in records:
        log.append(record)
        places.append(log.end)
    assert list(tmp_path.iterdir()) == []  # the file has no name
    assert list(log.read()) == records
    for _ in range(100):
        start, stop = sorted(rng.choices(range(501), k=2))
        assert (
            list(log.read(places[start], places[stop], at_once=rng.randrange(1, 300))) == records[start:stop]
        )


def test_a_log_that_is_read_while_it_grows(tight: None, tmp_path: Path) -> None:
    log, seen = Log(tmp_path), []
    for number in range(50):
        log.append(b"%03d" % number)
    for record in log.read(0, log.end):
        seen.append(record)
        for _ in range(3):
            log.append(b"later")
    assert seen == [b"%03d" % number for number in range(50)]


def test_a_sort_of_more_than_fits(tight: None, tmp_path: Path) -> None:
    rng = random.Random(2)
    records = [rng.randbytes(rng.randrange(60)) for _ in range(3000)]
    assert list(sort_records(iter(records), tmp_path)) == sorted(records)


@settings(max_examples=60)
@given(RECORDS)
def test_a_sort_in_memory(records: list[bytes]) -> None:
    assert list(sort_records(records, None)) == sorted(records)


def test_a_full_disk_is_one_line(tight: None, tmp_path: Path) -> None:
    log = Log(tmp_path)

    class Full:
        def write(self, data: memoryview) -> int:
            raise OSError(28, "No space left on device")

    log._file = Full()  # type: ignore[assignment]
    with pytest.raises(StoreFull, match="No space left"):
        for _ in range(100):
            log.append(b"x" * 50)
