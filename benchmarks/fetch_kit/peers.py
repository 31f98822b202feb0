"""Peers that hold and fetch shards, on this machine's loopback or on hosts of their own."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import bench
import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.system.cluster import Cluster, Peer  # noqa: E402

SAMPLE_BYTES = 1 << 20
PORT = 7400
NAME = "joining"  # as the script of joining_kit, which trains here too, calls its data set

Found = TypeVar("Found")


class HungError(Exception):
    """Something that should have come did not."""


def write_files(folder: Path, size_bytes: int, seed: int) -> Path:
    """Files of a megabyte that do not compress."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    for number in range(max(1, size_bytes // SAMPLE_BYTES)):
        (folder / f"{number:06d}.bin").write_bytes(rng.randbytes(SAMPLE_BYTES))
    return folder


class Peers(Cluster):
    """Peers p0, p1, ...; the first brings the data. ``lab``: each is on a host of its own there, in this order."""

    def __init__(self, folder: Path, lab: bench.Lab | None, count: int) -> None:
        super().__init__(folder / "peers")
        self._lab = lab
        self._hosts = lab.list() if lab is not None else []
        self.all = [self._made(number) for number in range(count)]
        self.shards = 0

    def _made(self, number: int) -> Peer:
        made = self.peer(f"p{number}")
        if self._lab is not None:
            made.prefix = ["ip", "netns", "exec", f"{self._lab.name}-{self._hosts[number]['host']}"]
        return made

    def address(self, number: int) -> str:
        """Where the peer is to listen."""
        return f"tcp://{self._hosts[number]['address']}:{PORT}" if self._hosts else "tcp://127.0.0.1:0"

    def bring(self, data: Path, replicas: int, *options: str) -> None:
        """The first peer cuts the data into shards and serves them."""
        where = ["--listen", self.address(0), "--insecure", "--home", str(self.all[0].home)]
        command = ["seed-dataset", str(data), "--name", NAME, "--replicas", str(replicas)]
        self.all[0].start([*command, *where, *options])
        self.until(lambda: (self.all[0].home / "agent.json").exists(), "the data is cut", 600.0)
        self.listening(self.all[0])
        self.shards = len(list((self.all[0].home / "store").glob("*/shards/*.tar")))

    def hold(self, *numbers: int) -> None:
        """Peers join to hold and serve; returns when they listen. On hosts the first one may come later."""
        for number in numbers:
            peer = self.all[number]
            where = ["--listen", self.address(number), "--insecure", "--home", str(peer.home)]
            peer.start(["join", *where, "--name", peer.name, self.all[0].address or self.address(0)])
        for number in numbers:
            self.listening(self.all[number])

    def train(self, number: int, founders: int, words: Sequence[str], script: Path) -> None:
        """A peer joins with a script; the first one's agent runs already."""
        options = ["--run", "fetch", "--min-peers", str(founders), "--insecure"]
        if number:
            options += ["--listen", self.address(number)]
        self.join(self.all[number].name, self.all[0], *words, options=options, script=script)

    def until(self, look: Callable[[], Found], what: str, patience_s: float) -> Found:
        """What ``look`` returns once it is something; HungError."""
        try:
            return self.wait(look, what, patience_s)
        except AssertionError as error:
            raise HungError(str(error)) from None

    def kill(self, number: int) -> float:
        """SIGKILL a peer that has no trainer; when, in unix seconds."""
        peer = self.all[number]
        when = time.time()
        os.kill(peer.pid, signal.SIGKILL)
        if peer.process is not None:
            peer.process.wait(10)
        return when

    def wrong(self, peers: Sequence[Peer]) -> list[str]:
        """What must not have happened to those that fetched."""
        return [
            f"{p.name}: {e['event']}"
            for p in peers
            for e in p.events()
            if e["event"] in ("bad_shard", "fault")
        ]


def fetched(peer: Peer, after: float = 0.0) -> list[dict[str, Any]]:
    """Its shards that came after a time."""
    return [line for line in peer.events("fetched") if line["time"] > after]


def span(lines: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """From the first shard's beginning to the last one's end, unix seconds."""
    return min(e["time"] - e["seconds"] for e in lines), max(e["time"] for e in lines)


def cpu_s(peer: Peer) -> float:
    """Processor seconds of its agent so far; 0 once it has ended."""
    try:
        times = psutil.Process(peer.pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
