"""The neighbours' peers: ordinary processes of an environment of their own, one session for each peer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from recovery_kit.contestant import HungError
from recovery_kit.steps import Step

FOLDER = Path(__file__).parent
POLL_S = 0.02
TAIL = 15
MARK, CENTRAL = "RECOVERY_PEER", "central"
"""Every process carries in its environment whose it is."""


class Foreign:
    """What the neighbours share. ``python`` is that of their environment."""

    name = ""
    kinds: tuple[str, ...] = ("tree", "leave", "silence")
    settings = ""
    patience_s = 150.0
    begin_s = 30.0

    def __init__(self, python: Path, peers: int, width: int, pause_s: float, seed: int) -> None:
        self.names = [f"p{i}" for i in range(peers)]
        self._python = python
        self._common = ["--width", width, "--pause-s", pause_s, "--seed", seed, "--peers", peers]
        self._temporary = tempfile.TemporaryDirectory(prefix=f"recovery-{self.name}-")
        self.folder = Path(self._temporary.name)
        self._peers: dict[str, subprocess.Popen[bytes]] = {}
        self._central: list[subprocess.Popen[bytes]] = []
        self._read: dict[str, tuple[int, list[Step]]] = {}

    def __enter__(self) -> Foreign:
        return self

    def start(self) -> None:
        self.prepare()
        for name in self.names:
            self._start(name)

    def __exit__(self, *_: object) -> None:
        for mark in (*self.names, CENTRAL):
            self.signal(mark, signal.SIGKILL)
        for process in (*self._peers.values(), *self._central):
            process.wait(10)
        self._temporary.cleanup()

    # -- what each of them has of its own ----------------------------------------------------------------------

    def prepare(self) -> None:
        """Whatever must stand before the peers."""

    def command(self, name: str) -> list[Any]:
        """How a peer is started."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    # -- processes ---------------------------------------------------------------------------------------------

    def launch(self, command: Sequence[Any], log: str, **more: str) -> subprocess.Popen[bytes]:
        """A process in a session of its own."""
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **self.environment(), **more}
        environment.setdefault(MARK, self._mark(CENTRAL))
        with (self.folder / f"{log}.log").open("ab") as output:
            return subprocess.Popen(
                [str(word) for word in command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.folder,
            )

    def central(self, command: Sequence[Any], log: str) -> None:
        """A process that is no peer; it is never hurt."""
        self._central.append(self.launch(command, log))

    def _mark(self, name: str) -> str:
        return f"{self.folder}:{name}"

    def processes(self, name: str) -> list[psutil.Process]:
        """All that live and descend from a peer's, in whatever session they are."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self._mark(
                    name
                ):
                    found.append(process)
        return found

    def signal(self, name: str, number: int) -> float:
        """One signal to all of a peer's processes; when, in unix seconds."""
        found = self.processes(name)
        when = time.time()
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        return when

    def _start(self, name: str) -> None:
        steps = str(self.folder / f"{name}.steps")
        marked = {MARK: self._mark(name), "RECOVERY_STEPS": steps}
        self._peers[name] = self.launch(self.command(name), name, **marked)

    # -- Contestant --------------------------------------------------------------------------------------------

    def steps(self, name: str) -> Sequence[Step]:
        offset, known = self._read.get(name, (0, []))
        with contextlib.suppress(FileNotFoundError), (self.folder / f"{name}.steps").open("rb") as file:
            file.seek(offset)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            known += [Step(**json.loads(line)) for line in whole.splitlines()]
            offset += len(whole)
        self._read[name] = (offset, known)
        return known

    def worlds(self, kind: str) -> frozenset[int]:
        return frozenset({len(self.names) - 1})

    def fault(self, kind: str, name: str) -> float:
        if kind == "leave":
            when = time.time()
            self._peers[name].terminate()
            return when
        return self.signal(name, signal.SIGSTOP if kind == "silence" else signal.SIGKILL)

    def noticed(self, name: str, when: float) -> float | None:
        return None

    def bring_back(self, kind: str, name: str) -> None:
        process = self._peers[name]
        if kind == "silence":
            self.signal(name, signal.SIGCONT)
            if process.poll() is None:
                return
        elif kind != "trainer":
            self.signal(name, signal.SIGKILL)
            process.wait(10)
        if process.poll() is not None:
            self._start(name)

    def said(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(
            f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-TAIL:])
            for log in logs
        )

    def violations(self) -> list[str]:
        return []  # what a neighbour does wrong is no fault of ours


class Torchft(Foreign):
    """One replica group a peer; the lighthouse is a process apart."""

    name = "torchft"
    settings = "lighthouse: heartbeat and join time-out 1 s, tick 50 ms; gloo and manager time-out 5 s"

    def prepare(self) -> None:
        port = free_port()
        self._lighthouse = f"http://127.0.0.1:{port}"
        times = ["--heartbeat_timeout_ms", 1000, "--join_timeout_ms", 1000, "--quorum_tick_ms", 50]
        program = self._python.with_name("torchft_lighthouse")
        self.central(
            [self._python, program, "--bind", f"127.0.0.1:{port}", "--min_replicas", 2, *times], "lighthouse"
        )

    def command(self, name: str) -> list[Any]:
        script = FOLDER / "torchft_peer.py"
        return [self._python, script, *self._common, "--lighthouse", self._lighthouse, "--name", name]


class Hivemind(Foreign):
    """A DHT whose first node is a process apart, so that any peer may die."""

    name = "hivemind"
    settings = (
        "matchmaking 1 s, request 0.5 s, chunk and sender 2 s, reducer 4 s, all-reduce 30 s; no compression"
    )

    def prepare(self) -> None:
        announced = self.folder / "address"
        self.central([self._python, FOLDER / "hivemind_root.py", announced], "dht")
        end_s = time.monotonic() + self.patience_s
        while not (announced.exists() and announced.read_text()):
            if time.monotonic() > end_s or self._central[0].poll() is not None:
                raise HungError(f"hivemind's DHT does not start\n{self.said()}")
            time.sleep(POLL_S)
        self._initial = announced.read_text()

    def command(self, name: str) -> list[Any]:
        return [self._python, FOLDER / "hivemind_peer.py", *self._common, "--initial", self._initial]


class Elastic(Foreign):
    """torchrun, an agent and a worker a peer; the rendezvous' store is a process apart."""

    name = "torchrun"
    kinds = ("tree", "trainer", "leave", "silence")
    settings = (
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (without it it does not recover), last call 2 s, "
        "keep-alive 2 s x 3, gloo time-out 5 s, a checkpoint each 10 steps"
    )

    def prepare(self) -> None:
        self._port = free_port()
        code = "import sys, time, torch.distributed as d\n"
        code += "s = d.TCPStore('127.0.0.1', int(sys.argv[1]), is_master=True, wait_for_workers=False)\n"
        self.central([self._python, "-c", code + "time.sleep(1e6)", self._port], "store")

    def environment(self) -> dict[str, str]:
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def command(self, name: str) -> list[Any]:
        peers = len(self.names)
        conf = "is_host=0,last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=3,join_timeout=120"
        return [
            *(self._python, "-m", "torch.distributed.run", f"--nnodes={max(1, peers // 2)}:{peers}"),
            *("--nproc-per-node=1", "--max-restarts=1000", "--rdzv-backend=c10d", "--rdzv-id=recovery"),
            *(f"--rdzv-endpoint=127.0.0.1:{self._port}", f"--rdzv-conf={conf}", "--local-addr=127.0.0.1"),
            *(FOLDER / "elastic_peer.py", *self._common, "--checkpoint", self.folder / "checkpoint.pt"),
        ]

    def worlds(self, kind: str) -> frozenset[int]:
        n = len(self.names)
        return frozenset({n - 1, n} if kind == "trainer" else {n - 1})

    def fault(self, kind: str, name: str) -> float:
        if kind != "trainer":
            return super().fault(kind, name)
        worker = psutil.Process(self._peers[name].pid).children()[0]
        when = time.time()
        worker.kill()
        return when


NEIGHBOURS: tuple[type[Foreign], ...] = (Torchft, Hivemind, Elastic)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
