"""What a command shows: lines for people on standard error, the script's output and JSON on standard output."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2p_dmc.config import format_size
from p2p_dmc.wire.messages import LocalLine

if TYPE_CHECKING:
    from p2p_dmc.data.formats import Scan

SHOW_EVERY_S = 2.0
SHOWN_EVENTS = {"view", "takeover", "trainer_lost", "diverged", "round_failed", "refused"}


class Console:
    """One command's output. With ``as_json`` standard output carries JSON lines only."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._live = not as_json and sys.stderr.isatty()
        self._live_shown = False
        self._shown_s = 0.0
        self._samples = 0
        self._since_s = time.monotonic()
        self._members = 0

    def say(self, line: str) -> None:
        """One line for the person."""
        self._clear()
        print(line, file=sys.stderr, flush=True)

    def fact(self, kind: str, **facts: Any) -> None:
        """One JSON object, with --json only."""
        if self.as_json:
            print(json.dumps({"event": kind, **facts}), flush=True)

    def local(self, message: object) -> None:
        """A message of the agent about a submitted script."""
        if not isinstance(message, LocalLine):
            return
        if message.kind == "output":
            self._clear()
            stream = sys.stderr if self.as_json else sys.stdout
            stream.buffer.write(message.data)
            stream.flush()
        elif message.kind == "say":
            self.say(message.data.decode())
        else:
            line = json.loads(message.data)
            if self.as_json:
                print(json.dumps(line), flush=True)
            if message.kind == "round":
                self._round(line)
            else:
                self._event(line)

    def _round(self, line: dict[str, Any]) -> None:
        self._samples += line["samples_round"]
        now_s = time.monotonic()
        if now_s - self._shown_s < (0.2 if self._live else SHOW_EVERY_S):
            return
        rate = self._samples / max(1e-3, now_s - self._since_s)
        self._samples, self._since_s, self._shown_s = 0, now_s, now_s
        loss = "-" if line["loss"] is None else f"{line['loss']:.4f}"
        text = (
            f"view {line['view_epoch']} round {line['round']}  peers {line['members']}  epoch {line['epoch']}  "
            f"tau {line['tau']}  loss {loss}  {rate:,.0f} samples/s  "
            f"sent {format_size(line['bytes_sent'])} a round"
        )
        if self._live:
            sys.stderr.write("\r\x1b[K" + text)
            sys.stderr.flush()
            self._live_shown = True
        else:
            self.say(text)

    def _event(self, line: dict[str, Any]) -> None:
        if line["event"] == "view":
            count = len(line["members"])
            self.say(f"view {line['view_epoch']}: {count} peer{'s' * (count != 1)}")
        elif line["event"] == "member" and line["state"] in ("DEAD", "LEFT"):
            self.say(f"peer {line['peer_id'][:8]} ({line['name']}) is {line['state']}: {line['reason']}")
        elif line["event"] == "diverged":
            self.say(f"peers {', '.join(p[:8] for p in line['odd'])} hold another state at the same round")

    def _clear(self) -> None:
        if self._live_shown:
            sys.stderr.write("\r\x1b[K")
            self._live_shown = False

    def scan_line(self, path: Path, found: Scan) -> str:
        """What a look at the input has found."""
        skipped = f", {found.skipped.total} skipped" if found.skipped.total else ""
        return f"{path}: {len(found.samples)} samples, {format_size(found.total_bytes)}{skipped}"

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """A callback (bytes done, bytes in all) that shows itself when the work takes over two seconds."""
        started_s = time.monotonic()
        shown_s = started_s

        def show(done: int, total: int) -> None:
            nonlocal shown_s
            now_s = time.monotonic()
            if now_s - started_s < 2.0 or now_s - shown_s < (0.2 if self._live else 2.0):
                return
            shown_s = now_s
            rate = done / (now_s - started_s)
            left_s = (total - done) / rate if rate else 0.0
            text = f"{what}: {format_size(done)} of {format_size(total)}, {format_size(rate)}/s, {left_s:.0f} s left"
            if self._live:
                sys.stderr.write("\r\x1b[K" + text)
                sys.stderr.flush()
                self._live_shown = True
            else:
                self.say(text)

        yield show
        self._clear()
