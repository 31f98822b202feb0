"""Curves in text: braille dots where the terminal can show them, stars elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean

BLOCKS = "▁▂▃▄▅▆▇█"
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character, by row and column (Unicode 2800 to 28FF)."""


def shrink(values: Sequence[float], columns: int) -> list[float]:
    """At most so many values: means of neighbours."""
    if len(values) <= columns:
        return list(values)
    cuts = [i * len(values) // columns for i in range(columns + 1)]
    return [fmean(values[lo:hi]) for lo, hi in itertools.pairwise(cuts)]


def stretch(values: Sequence[float], columns: int) -> list[float]:
    """So many values: straight lines between the given ones."""
    if len(values) < 2:
        return list(values)
    stretched = []
    for i in range(columns):
        place = i * (len(values) - 1) / (columns - 1)
        before = min(int(place), len(values) - 2)
        part = place - before
        stretched.append(values[before] * (1 - part) + values[before + 1] * part)
    return stretched


def sparkline(values: Sequence[float], columns: int) -> str:
    """One line of blocks from the least to the greatest value."""
    shown = shrink(values, columns)
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    return "".join(BLOCKS[round((v - low) / span * (len(BLOCKS) - 1)) if span else 0] for v in shown)


def curve(
    values: Sequence[float],
    *,
    columns: int = 64,
    rows: int = 9,
    marks: Mapping[int, str] | None = None,
    plain: bool = False,
) -> list[str]:
    """Lines of a plot with its axes, at least 2 x 2. ``marks``: index of a value to a word under it.

    ``plain``: ASCII only.
    """
    if not values:
        return []
    across, down = (1, 1) if plain else (2, 4)
    shown = stretch(shrink(values, columns * across), columns * across)
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    grid = [[0] * columns for _ in range(rows)]
    heights = [round((high - value) / span * (rows * down - 1)) for value in shown]
    for x, (y, before) in enumerate(zip(heights, heights[:1] + heights[:-1], strict=True)):
        for between in range(min(y, before + (y > before)), max(y, before - (y < before)) + 1):
            grid[between // down][x // across] |= DOTS[between % down][x % across]
    lines = []
    for row, cells in enumerate(grid):
        label = f"{high - span * row / (rows - 1):8.3f}" if row in (0, rows // 2, rows - 1) else " " * 8
        text = "".join((" *"[c > 0] if plain else (chr(0x2800 + c) if c else " ")) for c in cells)
        lines.append(f"{label} {'|' if plain else '┤'}{text.rstrip()}")
    lines.append(" " * 9 + ("+" + "-" * columns if plain else "└" + "─" * columns))
    return [*lines, *_mark_lines(marks or {}, len(values), columns, plain)]


def _mark_lines(marks: Mapping[int, str], count: int, columns: int, plain: bool) -> list[str]:
    """Words under the places of their values, as many lines as they need not to touch."""
    lines: list[str] = []
    for index, word in sorted(marks.items()):
        at = 10 + index * (columns - 1) // max(1, count - 1)
        text = f"{'^' if plain else '↑'} {word}"
        for i, line in enumerate(lines):
            if len(line) < at:
                lines[i] = line.ljust(at) + text
                break
        else:
            lines.append(" " * at + text)
    return lines
