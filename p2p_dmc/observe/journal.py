"""metrics.jsonl and events.jsonl of one home: append-only, one JSON object a line (DESIGN.md section 11)."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


class Journal:
    """Writes lines; ``listeners`` see each line too (progress display, attached clients)."""

    def __init__(self, home: Path, peer_id: str) -> None:
        self._peer_id = peer_id
        self._metrics = _open(home / "metrics.jsonl")
        self._events = _open(home / "events.jsonl")
        self.listeners: list[Callable[[str, dict[str, Any]], None]] = []

    def round(self, **facts: Any) -> None:
        """One complete round."""
        self._write("round", self._metrics, {"time": round(time.time(), 3), **facts})

    def event(self, event: str, *, peer_id: str | None = None, **facts: Any) -> None:
        """One membership, view, fetch, takeover or fault event; ``peer_id`` is whom it is about, default this peer."""
        line = {"time": round(time.time(), 3), "event": event, "peer_id": peer_id or self._peer_id, **facts}
        self._write("event", self._events, line)

    def _write(self, kind: str, file: IO[str], line: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a full disk costs lines, not the run
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        for listener in self.listeners:
            listener(kind, line)

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


def _open(path: Path) -> IO[str]:
    """To append to; a last line that a crash or a full disk cut short is ended, so that the next one is whole."""
    file = open(path, "a", buffering=1)  # noqa: SIM115
    with contextlib.suppress(OSError), path.open("rb") as written:
        written.seek(max(0, file.tell() - 1))
        if written.read(1) not in (b"", b"\n"):
            file.write("\n")
    return file


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal; a last line cut short by a crash is left out."""
    lines = []
    if path.exists():
        for text in path.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue
    return lines
