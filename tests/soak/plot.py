"""Lines over a common axis, as a small SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 720, 90, 60, 130, 14, 34
COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8a5a99", "#b07d2b")


def svg(x: Sequence[float], panels: Mapping[str, Mapping[str, Sequence[float]]], label: str) -> str:
    """One panel under the other: its title, the least and the greatest value, a line for each series."""
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    height = TOP + len(panels) * (PANEL + GAP) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    for number, (title, lines) in enumerate(panels.items()):
        parts += _panel(x, title, lines, colours, TOP + number * (PANEL + GAP))
    for number, name in enumerate(names):
        y = TOP + 14 + 16 * number
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{y}" fill="{colours[name]}">{name}</text>')
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{height - 8}" text-anchor="end">{x[-1]:g} {label}</text></svg>'
    )
    return "\n".join(parts) + "\n"


def _panel(
    x: Sequence[float], title: str, lines: Mapping[str, Sequence[float]], colours: Mapping[str, str], top: int
) -> list[str]:
    most = max(max(values) for values in lines.values())
    parts = [
        f'<text x="{LEFT}" y="{top + 8}">{title}</text>',
        f'<path d="M{LEFT} {top + 12}V{top + PANEL + 12}H{WIDTH - RIGHT}" stroke="#888" fill="none"/>',
        f'<text x="{LEFT - 4}" y="{top + 22}" text-anchor="end">{most:g}</text>',
        f'<text x="{LEFT - 4}" y="{top + PANEL + 12}" text-anchor="end">0</text>',
    ]
    for name, values in lines.items():
        points = " ".join(
            f"{LEFT + (WIDTH - RIGHT - LEFT) * at / (x[-1] or 1):.1f},{top + 12 + PANEL * (1 - v / (most or 1)):.1f}"
            for at, v in zip(x, values, strict=True)
        )
        parts.append(f'<polyline points="{points}" stroke="{colours[name]}" fill="none"/>')
    return parts
