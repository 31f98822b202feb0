"""What a person sees while the demo runs: a live page on a terminal, plain lines in a pipe, JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from p2p_dmc.config import format_size
from p2p_dmc.demo.plot import sparkline
from p2p_dmc.demo.progress import Progress

STATUS_EVERY_S = 5.0
REFRESH_EVERY_S = 0.25
EVENTS_SHOWN = 12
LOUD = {"kill": "bold red", "return": "bold green", "recovered": "green", "phase": "bold", "member": "yellow"}
STATES = {"training": "green", "finished": "green", "killed": "bold red"}


class Screen(Protocol):
    """Where the demo's words go. ``at_s``: seconds since it began."""

    def event(self, at_s: float, event: str, text: str, **facts: Any) -> None: ...
    def show(self, at_s: float, progress: Progress, samples_due: int, epochs: int) -> None: ...
    def close(self) -> None: ...


def choose(as_json: bool) -> Screen:
    """The screen that fits standard output."""
    if as_json:
        return JsonScreen()
    return LiveScreen(Console()) if sys.stdout.isatty() else PlainScreen()


def status_line(progress: Progress, samples_due: int, epochs: int) -> str:
    """The run in one line."""
    run = progress.run
    loss = f"{run.losses[-1]:.3f}" if run.losses else "-"
    return (
        f"view {run.view_epoch}  peers {len(run.members)}  epoch {min(run.epoch + 1, epochs)}/{epochs}  "
        f"round {run.round}  tau {run.tau}  loss {loss}  {run.samples_per_s:,.0f} files/s  "
        f"sent {format_size(sum(p.bytes_sent for p in progress.peers.values()))}  "
        f"{100 * run.samples / max(1, samples_due):.0f} %"
    )


class PlainScreen:
    """One line per event, and the state of the run every few seconds."""

    def __init__(self) -> None:
        self._shown_s = 0.0
        self._round = 0

    def event(self, at_s: float, event: str, text: str, **facts: Any) -> None:
        print(f"{at_s:6.1f} s  {text}", flush=True)

    def show(self, at_s: float, progress: Progress, samples_due: int, epochs: int) -> None:
        if progress.run.round == self._round or at_s - self._shown_s < STATUS_EVERY_S:
            return
        self._shown_s, self._round = at_s, progress.run.round
        print(f"{at_s:6.1f} s    {status_line(progress, samples_due, epochs)}", flush=True)

    def close(self) -> None:
        pass


class JsonScreen:
    """One object per event; `round` lines as the run advances."""

    def __init__(self) -> None:
        self._round = 0

    def event(self, at_s: float, event: str, text: str, **facts: Any) -> None:
        print(json.dumps({"event": event, "at_s": round(at_s, 3), "text": text, **facts}), flush=True)

    def show(self, at_s: float, progress: Progress, samples_due: int, epochs: int) -> None:
        run = progress.run
        if run.round == self._round:
            return
        self._round = run.round
        line = {
            "event": "round",
            "at_s": round(at_s, 3),
            "view_epoch": run.view_epoch,
            "round": run.round,
            "members": list(run.members),
            "epoch": run.epoch,
            "tau": run.tau,
            "loss": run.losses[-1] if run.losses else None,
            "samples": run.samples,
            "samples_due": samples_due,
            "samples_per_s": round(run.samples_per_s, 1),
            "bytes_sent": sum(p.bytes_sent for p in progress.peers.values()),
        }
        print(json.dumps(line), flush=True)

    def close(self) -> None:
        pass


class LiveScreen:
    """A page that redraws itself: peers, the run, the loss, the newest events."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._events: deque[Text] = deque(maxlen=EVENTS_SHOWN)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()
        self._shown_s = 0.0

    def event(self, at_s: float, event: str, text: str, **facts: Any) -> None:
        line = Text(f"{at_s:6.1f} s  ", style="dim", no_wrap=True, overflow="ellipsis")
        self._events.append(line.append(text, style=LOUD.get(event, "default")))
        self._shown_s = 0.0

    def show(self, at_s: float, progress: Progress, samples_due: int, epochs: int) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s < REFRESH_EVERY_S:
            return
        self._shown_s = now_s
        progress.count_shards()
        self._live.update(self._page(at_s, progress, samples_due, epochs), refresh=True)

    def close(self) -> None:
        self._live.stop()
        for line in self._events:
            self._console.print(line)

    def _page(self, at_s: float, progress: Progress, samples_due: int, epochs: int) -> RenderableType:
        run = progress.run
        bar = Table.grid()  # a bar alone ends without a new line
        bar.add_row(ProgressBar(total=max(1, samples_due), completed=run.samples, width=self._width()))
        rows: list[RenderableType] = [
            Text(
                f"p2p_dmc demo: four peers, no master{at_s:>{max(1, self._width() - 37)}.0f} s", style="bold"
            ),
            peers_table(progress),
            Text(),
            bar,
            Text(status_line(progress, samples_due, epochs), no_wrap=True, overflow="ellipsis"),
            Text("loss " + sparkline(run.losses, self._width() - 5), style="cyan", no_wrap=True),
            Text(),
            *self._events,
        ]
        return Group(*rows)

    def _width(self) -> int:
        return min(100, self._console.width)


def peers_table(progress: Progress) -> Table:
    """One row per peer."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("peer", "state", "view", "round", "files/s", "sent", "shards"):
        table.add_column(title, justify="left" if title in ("peer", "state") else "right", min_width=6)
    for peer in progress.peers.values():
        trains = peer.round > 0
        table.add_row(
            peer.name,
            Text(peer.state, style=STATES.get(peer.state, "default")),
            str(peer.view_epoch or "-"),
            str(peer.round) if trains else "-",
            f"{peer.samples_per_s:,.0f}" if trains else "-",
            format_size(peer.bytes_sent) if trains else "-",
            "-" if peer.state == "left" else str(peer.shards),
        )
    return table
