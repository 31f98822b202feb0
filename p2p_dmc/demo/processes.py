"""The demo's peers as the operating system sees them: started, interrupted, killed whole, and never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from p2p_dmc.agent.home import Home, MemoryFolder
from p2p_dmc.observe.journal import read_lines

MARK = "P2P_DMC_DEMO"
"""In the environment of every process of a demo, so that none can hide from the end of it."""

PROC = Path("/proc")


class PeerProcess:
    """One `dmc-peer` command on a home of its own, in a session of its own (Ctrl-C is the demo's to handle)."""

    def __init__(self, name: str, home: Path, environment: dict[str, str]) -> None:
        self.name, self.home = name, home
        self.starts = 0
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *words: str) -> None:
        """Run `dmc-peer WORDS`; what it prints goes to files beside the home."""
        self.starts += 1
        with self.log("out").open("ab") as out, self.log("err").open("ab") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "p2p_dmc.cli", *words],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def log(self, stream: str) -> Path:
        """Where its standard output ("out") or error ("err") goes."""
        return self.home.parent / f"{self.name}.{stream}"

    def facts(self) -> list[dict[str, Any]]:
        """The JSON lines that it has printed so far."""
        lines = self.log("out").read_bytes().splitlines() if self.log("out").exists() else []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def last_line(self) -> str:
        """The last thing that it said to a person."""
        text = self.log("err").read_text(errors="replace") if self.log("err").exists() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1].removeprefix("dmc-peer: ") if lines else "it said nothing"

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs or before it was started."""
        return self._process.poll() if self._process is not None else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def interrupt(self) -> None:
        """Ctrl-C: it leaves gracefully; again, at once."""
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGINT)

    def kill_tree(self) -> tuple[int, ...]:
        """SIGKILL to the agent, its trainer and whatever they started; their process ids, the agent's first."""
        if self._process is None or not self.running:
            return ()
        pids = tree(self._process.pid)
        kill(pids)
        self._process.wait()
        return pids


class Processes:
    """All peers of one demo, and the promise that nothing of them is left."""

    def __init__(self, base: Path) -> None:
        self._token = uuid.uuid4().hex
        temporary = base / "tmp"
        temporary.mkdir()
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._environment = {**os.environ, **one_thread, MARK: self._token, "TMPDIR": str(temporary)}
        self.peers: dict[str, PeerProcess] = {}

    def add(self, name: str, home: Path) -> PeerProcess:
        self.peers[name] = PeerProcess(name, home, self._environment)
        return self.peers[name]

    def close(self, grace_s: float) -> None:
        """Ask everybody to leave, wait so long, then end what is left and what it left in shared memory."""
        try:
            for peer in self.peers.values():
                peer.interrupt()
            deadline_s = time.monotonic() + grace_s
            while any(p.running for p in self.peers.values()) and time.monotonic() < deadline_s:
                time.sleep(0.05)
        finally:  # also when Ctrl-C is pressed again
            for peer in self.peers.values():
                peer.kill_tree()
            kill(marked(self._token))
            for peer in self.peers.values():
                remove_memory(peer.home)


def tree(pid: int) -> tuple[int, ...]:
    """A process and all its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for parent in found:
        found += children.get(parent, ())
    return tuple(found)


def _parents() -> Iterable[tuple[int, int]]:
    """(process, its parent) for all processes."""
    if (PROC / "self" / "stat").exists():
        for folder in PROC.iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    # the name, in parentheses, may contain anything
                    yield int(folder.name), int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    else:
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False)
        for line in listed.stdout.splitlines():
            pid, parent = line.split()
            yield int(pid), int(parent)


def marked(token: str) -> tuple[int, ...]:
    """Processes with this demo's mark in their environment; nothing where /proc is missing."""
    found = []
    for path in PROC.glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={token}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return tuple(found)


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def alive(pids: Iterable[int]) -> tuple[int, ...]:
    """Those that still run; one that is dead and not yet collected by its parent does not."""
    found = []
    for pid in pids:
        try:
            os.kill(pid, 0)
            stat = PROC / str(pid) / "stat"
            if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
        except OSError:
            continue
    return tuple(found)


def remove_memory(home: Path) -> None:
    """What a killed agent of this home left in shared memory; a peer that ends by itself leaves nothing."""
    for line in read_lines(home / "events.jsonl")[:1]:
        memory = MemoryFolder(Home(home), str(line["peer_id"]))
        memory.folder(0)  # as at the next start of this home, the leftovers go
        memory.remove()
