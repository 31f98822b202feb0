"""Peers that train, and some that wait at a gate until they are to join."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import bench

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.system.checks import check_digests, check_ledger  # noqa: E402
from tests.system.cluster import Cluster, Peer, write_samples  # noqa: E402

SCRIPT = Path(__file__).with_name("peer.py")
RUN = "joining"
SAMPLES = 2000
POLL_S = 0.05

Found = TypeVar("Found")


class HungError(Exception):
    """Something that should have come did not."""


class Peers(Cluster):
    """``founders`` that train, the first of them brought the data; ``joiners`` that have everything but their start.

    ``lab``: each is on a host of its own there, in this order; else all are on this machine's loopback.
    """

    def __init__(
        self,
        folder: Path,
        lab: bench.Lab | None,
        counts: tuple[int, int],
        model_bytes: int,
        step_s: float,
        seed: int,
    ) -> None:
        super().__init__(folder / "peers")
        self._lab = lab
        self._script = ["--model-bytes", str(model_bytes), "--step-s", str(step_s)]
        self._gate = folder / "gate"
        self._data = write_samples(folder / "joining", SAMPLES, seed)
        names = [f"p{i}" for i in range(sum(counts))]
        self._hosts = dict(zip(names, lab.list(), strict=True)) if lab is not None else {}
        self.founders = [self.peer(name) for name in names[: counts[0]]]
        self.joiners = [self.peer(name) for name in names[counts[0] :]]

    def peer(self, name: str) -> Peer:
        made = super().peer(name)
        if self._lab is not None:
            made.prefix = ["ip", "netns", "exec", f"{self._lab.name}-{self._hosts[name]['host']}"]
        return made

    def begin(self) -> None:
        """Start all; the founders train when this returns, or will soon."""
        first = self.founders[0]
        seed = self.seed(
            self._data, "--name", "joining", "--insecure", name=first.name, address=self._address(first)
        )
        open_gate = self.root / "open"
        open_gate.touch()
        for peer in [*self.founders, *self.joiners]:
            gate = ["--gate", str(open_gate)]
            if peer in self.joiners:
                gate = ["--gate", str(self._gate), "--at-gate", f"{self._gate}-{peer.name}"]
            options = ["--run", RUN, "--min-peers", str(len(self.founders)), "--insecure"]
            if peer is not first:
                options += ["--listen", self._address(peer)]
            self.join(peer.name, seed, *self._script, *gate, options=options, script=SCRIPT)
        for peer in self.peers:
            self.listening(peer)

    def _address(self, peer: Peer) -> str:
        where = self._hosts[peer.name]["address"] if self._lab is not None else "127.0.0.1"
        return f"tcp://{where}:0"

    def let_in(self) -> float:
        """The joiners go on, all at once; when, in unix seconds."""
        self._gate.touch()
        return time.time()

    def at_gate(self) -> bool:
        """Whether every joiner's script stands there."""
        return len(list(self._gate.parent.glob(f"{self._gate.name}-*"))) == len(self.joiners)

    def until(self, look: Callable[[], Found], what: str, patience_s: float) -> Found:
        """What ``look`` returns once it is something; HungError."""
        try:
            return self.wait(look, what, patience_s)
        except AssertionError as error:
            raise HungError(str(error)) from None

    def violations(self) -> list[str]:
        """What they wrote down that must not be."""
        homes, found = [peer.home for peer in self.peers], []
        for check in (check_digests, check_ledger):
            try:
                check(homes, RUN)
            except AssertionError as error:
                found += str(error).splitlines()
        return found


def voter_since(peer: Peer) -> dict[str, Any]:
    """The first view in which the peer votes; {} before it."""
    return next((v for v in peer.events("view") if peer.peer_id in v["members"]), {})


def learner_since(peer: Peer) -> dict[str, Any]:
    """The first view in which it learns."""
    return next((v for v in peer.events("view") if peer.peer_id in v["learners"]), {})


def folder() -> tempfile.TemporaryDirectory[str]:
    """For one measurement."""
    return tempfile.TemporaryDirectory(prefix="dmc-joining-")


def all_vote(peers: Sequence[Peer]) -> bool:
    """Whether each of them has become a voter."""
    return all(peer.events("started") and voter_since(peer) for peer in peers)
