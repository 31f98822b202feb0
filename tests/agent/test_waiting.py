"""When a reason to wait is said, and when not."""

from __future__ import annotations

import pytest

from p2p_dmc.agent.waiting import Patience


def told(*reasons: tuple[float, str]) -> list[tuple[float, str]]:
    """(seconds, line) of all that is said, when each reason holds from its time until the next one's."""
    patience, lines = Patience("r"), []
    ends = [begin for begin, _ in reasons[1:]] + [reasons[-1][0]]
    for (begin, reason), end in zip(reasons, ends, strict=True):
        tenth = round(begin * 10)
        while tenth <= round(end * 10) - (end > begin):
            line = patience.look(reason, tenth / 10)
            if line:
                lines.append((tenth / 10, line.removeprefix("run 'r' ")))
            tenth += 1
    return lines


@pytest.mark.parametrize(
    ("reasons", "lines"),
    [
        ([(0, ""), (1, "x"), (2.5, ""), (9, "")], []),  # a change of view
        ([(0, "x"), (30, ""), (40, "")], [(2.1, "waits: x"), (30, "goes on")]),
        ([(0, "x"), (70, "x")], [(2.1, "waits: x"), (62.2, "waits: x")]),
        ([(0, "x"), (5, "y"), (10, "x"), (11, "x")], [(2.1, "waits: x"), (7.1, "waits: y")]),
        ([(0, "x"), (5, "y"), (6, ""), (7, "")], [(2.1, "waits: x"), (6, "goes on")]),
        # attempts that follow each other quickly are one wait
        ([(0, "1"), (1, "2"), (2, "3"), (3, "4"), (4, "5"), (5, "5")], [(2.1, "waits: 3")]),
    ],
)
def test_what_is_said(reasons: list[tuple[float, str]], lines: list[tuple[float, str]]) -> None:
    assert told(*reasons) == lines
