"""p2p_dmc's peers, each an agent with its trainer."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recovery_kit.contestant import HungError
from recovery_kit.steps import Step

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from p2p_dmc.errors import UserError  # noqa: E402
from tests.system.checks import check_digests, check_ledger  # noqa: E402
from tests.system.cluster import Cluster, write_samples  # noqa: E402

SCRIPT = Path(__file__).with_name("ours_peer.py")
SAMPLES = 400
RUN = SCRIPT.stem


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """What the cluster waited for in vain is a hang."""
    try:
        yield
    except AssertionError as error:
        raise HungError(str(error)) from None


class Ours:
    """The first peer is also the one that brought the data."""

    name = "ours"
    patience_s = 120.0

    def __init__(
        self, peers: int, width: int, pause_s: float, seed: int, options: Sequence[str] = ()
    ) -> None:
        """``options``: more of `dmc-peer join`."""
        self.names = [f"p{i}" for i in range(peers)]
        self._script = ["--width", str(width), "--pause-s", str(pause_s), "--seed", str(seed)]
        self._seed, self._options = seed, options
        self._folder = tempfile.TemporaryDirectory(prefix="dmc-recovery-")
        self._cluster = Cluster(Path(self._folder.name) / "peers")

    def __enter__(self) -> Ours:
        return self

    def start(self) -> None:
        data = write_samples(Path(self._folder.name) / "recovery", SAMPLES, self._seed)
        with in_time():
            seed = self._cluster.seed(data, "--name", "recovery", name=self.names[0])
        for name in self.names:
            options = ["--min-peers", str(len(self.names)), *self._options]
            self._cluster.join(name, seed, *self._script, options=options, script=SCRIPT)
        with in_time():
            for name in self.names:
                self._cluster.listening(self._cluster.peer(name))

    def __exit__(self, *_: object) -> None:
        self._cluster.close()
        self._folder.cleanup()

    def steps(self, name: str) -> Sequence[Step]:
        return [
            Step(
                time=line["time"],
                number=line["round"],
                world=line["members"],
                group=str(line["view_epoch"]),
                digest=line["digest"],
            )
            for line in self._cluster.peer(name).rounds()
        ]

    def worlds(self, kind: str) -> frozenset[int]:
        return frozenset({len(self.names) - 1})

    def fault(self, kind: str, name: str) -> float:
        peer = self._cluster.peer(name)
        if kind == "leave":
            when = time.time()
            peer.interrupt()
            return when
        return {"tree": peer.kill_tree, "trainer": peer.kill_trainer, "silence": peer.stop}[kind]()

    def noticed(self, name: str, when: float) -> float | None:
        victim = self._cluster.peer(name).peer_id
        told = [
            event["time"] - when
            for peer in self._cluster.peers
            for event in peer.events()
            if peer.name != name
            and event["time"] > when
            and (event["event"] == "trainer_lost" or event.get("state") in ("DEAD", "LEFT"))
            and event["peer_id"] == victim
        ]
        return min(told, default=None)

    def bring_back(self, kind: str, name: str) -> None:
        """An agent whose trainer is killed again and again gives up after a few times: it is started again, too."""
        peer = self._cluster.peer(name)
        if kind == "silence":
            peer.go_on()
            return
        with in_time():
            if kind == "leave":
                self._cluster.wait(lambda: not peer.running, f"{name} has left", self.patience_s)
            if kind == "trainer":
                self._cluster.wait(
                    lambda: not peer.running or peer.trainer() is not None,
                    f"{name} has another trainer, or has ended",
                    self.patience_s,
                )
        if not peer.running:
            self._cluster.restart(peer)

    def journal(self, name: str, event: str) -> Sequence[dict[str, Any]]:
        """One peer's events of a kind."""
        return self._cluster.peer(name).events(event)

    def said(self) -> str:
        return self._cluster.report()

    def violations(self) -> list[str]:
        homes, found = [peer.home for peer in self._cluster.peers], []
        for check in (check_digests, check_ledger):
            try:
                check(homes, RUN)
            except (AssertionError, UserError) as error:
                found += str(error).splitlines()
        return found
