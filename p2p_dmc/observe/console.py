"""What a command shows: lines for people on standard error, the script's output and JSON on standard output."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from p2p_dmc.config import format_size
from p2p_dmc.observe.narrator import Narrator, plural, printable
from p2p_dmc.observe.output import Output
from p2p_dmc.wire.messages import LocalLine

if TYPE_CHECKING:
    from p2p_dmc.data.found import Scan

LIVE_EVERY_S = 0.2
LINE_EVERY_S = 5.0
"""A round's figures in a log; a terminal's last line is replaced more often."""
PATIENCE_S = 2.0
"""Work that takes longer shows how far it is."""


class Console:
    """One command's output, a context manager. With ``as_json`` standard output carries JSON lines only."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.narrator = Narrator()
        self.output = Output()
        self._live = not as_json and sys.stderr.isatty()
        self._live_shown = False
        self._shown_s = 0.0
        self._last_round = ""

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show_last_round()
        self._clear()
        self.output.close()

    # -- lines ------------------------------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        """One line for the person."""
        self._clear()
        self._error(printable(line) + "\n")

    def fact(self, kind: str, **facts: Any) -> None:
        """One JSON object, with --json only."""
        if self.as_json:
            self._json({"event": kind, **facts})

    def _json(self, facts: dict[str, Any]) -> None:
        self.output.put(1, json.dumps(facts).encode() + b"\n")

    def _error(self, text: str) -> None:
        encoding = sys.stderr.encoding or "utf-8"
        self.output.put(2, text.encode(encoding, "backslashreplace"))

    def _replace_line(self, text: str) -> None:
        """The terminal's last line, cut to its width: a wrapped line could not be taken back."""
        width = max(20, shutil.get_terminal_size().columns - 1)
        self._error("\r\x1b[K" + printable(text)[:width])
        self._live_shown = True

    def _clear(self) -> None:
        if self._live_shown:
            self._error("\r\x1b[K")
            self._live_shown = False

    # -- a script's messages ------------------------------------------------------------------------------------------

    def local(self, message: object) -> None:
        """A message of the agent about a submitted script."""
        if not isinstance(message, LocalLine):
            return
        if message.kind == "output":
            self._clear()
            self.output.put(2 if self.as_json else 1, message.data)
        elif message.kind == "say":
            self.say(message.data.decode(errors="backslashreplace"))
        else:
            line = json.loads(message.data)
            if self.as_json:
                self._json(line)
            if message.kind == "round":
                self._round(line)
            else:
                self._event(line)

    def _round(self, line: dict[str, Any]) -> None:
        for told in self.narrator.pending():
            self.say(told)
        self._last_round = self.narrator.round(line)
        now_s = time.monotonic()
        if not self._shown_s or now_s - self._shown_s >= (LIVE_EVERY_S if self._live else LINE_EVERY_S):
            self._shown_s = now_s
            if self._live:
                self._replace_line(self._last_round)
            else:
                self._show_last_round()

    def _event(self, line: dict[str, Any]) -> None:
        if line["event"] == "run_over":
            self._show_last_round()
        for told in self.narrator.event(line):
            self.say(told)

    def _show_last_round(self) -> None:
        """The newest figures as a line that stays."""
        if self._last_round:
            self.say(self._last_round)
            self._last_round = ""

    # -- data ---------------------------------------------------------------------------------------------------------

    def scan_line(self, path: Path, found: Scan) -> str:
        """What a look at the input has found."""
        left_out = f"; passed over: {found.skipped.describe()}" if found.skipped.total else ""
        return (
            f"{path}: {found.kind}, {plural(len(found.samples), 'sample')} with fields {', '.join(found.extensions)}, "
            f"{format_size(found.total_bytes)}{left_out}"
        )

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """A callback (bytes done, bytes in all) that shows itself when the work takes over two seconds.

        The time runs from its first call: what was prepared before says nothing about the rate.
        """
        started_s = shown_s = 0.0

        def show(done: int, total: int) -> None:
            nonlocal started_s, shown_s
            now_s = time.monotonic()
            started_s = started_s or now_s
            every_s = LIVE_EVERY_S if self._live else PATIENCE_S
            if now_s - started_s < PATIENCE_S or now_s - shown_s < every_s:
                return
            shown_s = now_s
            rate = done / (now_s - started_s)
            left_s = (total - done) / rate if rate else 0.0
            text = f"{what}: {format_size(done)} of {format_size(total)}, {format_size(rate)}/s, {left_s:.0f} s left"
            if self._live:
                self._replace_line(text)
            else:
                self.say(text)

        yield show
        self._clear()
