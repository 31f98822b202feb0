"""Journals: whole lines, whatever happened to the writer before."""

from __future__ import annotations

import json
from pathlib import Path

from p2p_dmc.observe.journal import Journal, read_lines


def test_a_line_that_was_cut_short_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time":1,"event":"started"}\n{"time":2,"event":"mem')
    journal = Journal(tmp_path, "p")
    journal.event("left")
    journal.close()
    assert [line["event"] for line in read_lines(path)] == ["started", "left"]


def test_whole_lines_stay_as_they_are(tmp_path: Path) -> None:
    for _ in range(2):
        journal = Journal(tmp_path, "p")
        journal.round(round=1)
        journal.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 1]
    assert (tmp_path / "events.jsonl").read_text() == ""
