"""Peers as real processes on this machine, what can be done to them, and what they wrote down about it.

A `Cluster` owns every process it started, and those that they started: all carry a mark in their environment, and
`close` ends whatever still carries it. Waiting is done in one place, `Cluster.wait`, by looking at files.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
Line = dict[str, Any]

ANY_PORT = "tcp://127.0.0.1:0"
POLL_S = 0.02
ORPHAN_GRACE_S = 3.0
"""A trainer whose agent was killed may take this long to be gone."""
DMC_PEER = Path(sys.executable).with_name("dmc-peer")
SCRIPT = Path(__file__).parent / "scripts" / "train.py"
MARK = "DMC_TEST_CLUSTER"
TAIL_LINES, LINE_CHARACTERS = 25, 300


class Lines:
    """The whole lines of a journal, as far as it has been written; only what is new is read again.

    What a full disk cut short is left out, as `observe.journal.read_lines` does.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._lines: list[Line] = []

    def read(self) -> list[Line]:
        """All lines so far."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            for text in whole.splitlines():
                with contextlib.suppress(ValueError):
                    self._lines.append(json.loads(text))
        return self._lines


class Peer:
    """One home, and the `dmc-peer` process that runs on it now (a restart makes another).

    ``process`` is the agent. A `join` on a home whose agent runs hands it the script: that command is
    ``submission``, and ends when the script does.
    """

    def __init__(self, name: str, home: Path, logs: Path, environment: dict[str, str]) -> None:
        self.name, self.home = name, home
        self.arguments: list[str] = []
        self.prefix: list[str] = []
        """Words before the command, as of a program that runs it on another host."""
        self.address = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.submission: subprocess.Popen[bytes] | None = None
        self.environment = environment
        self._logs = logs
        self._starts = 0
        self._events = Lines(home / "events.jsonl")
        self._rounds = Lines(home / "metrics.jsonl")

    # -- life ------------------------------------------------------------------------------------------------

    def start(self, arguments: Sequence[str]) -> None:
        """Run `dmc-peer` with these arguments, in a session of its own."""
        self.arguments = list(arguments)
        self._starts += 1
        with self.log("out").open("wb") as out, self.log("err").open("wb") as err:
            started = subprocess.Popen(
                [*self.prefix, str(DMC_PEER), *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        if self.running:
            self.submission = started
        else:
            self.process, self.submission = started, None

    def log(self, stream: str) -> Path:
        """What this start wrote on "out" or "err"."""
        return self._logs / f"{self.name}-{self._starts}.{stream}"

    def said(self) -> str:
        """Everything that this start wrote on standard error."""
        return self.log("err").read_text(errors="replace") if self.log("err").exists() else ""

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was never started"
        return self.process.pid

    @property
    def code(self) -> int | None:
        """Exit code of the command that has the script, None while it runs."""
        command = self.submission or self.process
        return command.poll() if command is not None else None

    @property
    def running(self) -> bool:
        """Whether its agent runs."""
        return self.process is not None and self.process.poll() is None

    # -- what is done to it ----------------------------------------------------------------------------------

    def tree(self) -> list[psutil.Process]:
        """The agent and everything below it, the agent first; [] when it is gone."""
        try:
            agent = psutil.Process(self.pid)
            return [agent, *agent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def trainer(self) -> psutil.Process | None:
        """The process that runs the script."""
        return next((p for p in self.tree()[1:] if "p2p_dmc.train.main" in command_of(p)), None)

    def kill_tree(self) -> float:
        """SIGKILL agent and trainer; when, in unix seconds."""
        tree = self.tree()
        assert len(tree) > 1, f"{self.name} has no trainer to kill: {tree}"
        when = time.time()
        signal_all(tree, signal.SIGKILL)
        assert self.process is not None
        assert self.process.wait(10) == -signal.SIGKILL
        return when

    def cut_power(self) -> float:
        """SIGKILL the tree, and what it had in memory is gone; when, in unix seconds."""
        when = self.kill_tree()
        self.forget_memory()
        return when

    def forget_memory(self) -> None:
        """Remove what its killed agents left in shared memory."""
        for started in self.events("started")[:1]:
            for folder in Path("/dev/shm").glob(f"dmc-{started['peer_id'][:16]}-*"):
                shutil.rmtree(folder, ignore_errors=True)

    def kill_trainer(self) -> float:
        """SIGKILL the trainer only; when, in unix seconds."""
        trainer = self.trainer()
        assert trainer is not None, f"{self.name} has no trainer to kill"
        when = time.time()
        trainer.kill()
        return when

    def stop(self) -> float:
        """SIGSTOP the whole tree: it is silent, its sockets stay; when, in unix seconds."""
        tree = self.tree()
        assert len(tree) > 1, f"{self.name} has no trainer to stop: {tree}"
        when = time.time()
        signal_all(tree, signal.SIGSTOP)
        return when

    def go_on(self) -> None:
        """SIGCONT the whole tree."""
        signal_all(self.tree(), signal.SIGCONT)

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to the agent."""
        os.kill(self.pid, signal.SIGINT)

    # -- what it wrote down ----------------------------------------------------------------------------------

    def events(self, kind: str = "", **facts: Any) -> list[Line]:
        """Lines of events.jsonl, all or those of a kind whose fields have these values."""
        lines = self._events.read()
        return [
            line
            for line in lines
            if (not kind or line["event"] == kind) and all(line.get(k) == v for k, v in facts.items())
        ]

    def rounds(self, after: float = 0.0) -> list[Line]:
        """Lines of metrics.jsonl written after this time (unix seconds)."""
        return [line for line in self._rounds.read() if line["time"] > after]

    @property
    def peer_id(self) -> str:
        return str(self.events("started")[0]["peer_id"])

    @property
    def view(self) -> Line:
        """The newest view that it installed; one without members before the first."""
        return (self.events("view") or [{"members": []}])[-1]

    def final(self, run: str = "train") -> bytes:
        """The bytes of its final model."""
        return (self.home / "runs" / run / "final" / "model.safetensors").read_bytes()

    def report(self) -> str:
        """For a failure: how it is, and the last that it said."""
        parts = [f"--- {self.name}: exit code {self.code}, `dmc-peer {' '.join(self.arguments)}`"]
        for path in (self.log("err"), self.log("out"), self.home / "events.jsonl", self.home / "agent.log"):
            if path.exists():
                lines = path.read_text(errors="replace").splitlines()
                told = [line[:LINE_CHARACTERS] for line in lines if '"event":"fetched"' not in line]
                parts += [f"{path.name}:", *(f"    {line}" for line in told[-TAIL_LINES:])]
        rounds = self.rounds()
        parts.append(f"rounds: {len(rounds)}, last {({**rounds[-1], 'counted': '...'}) if rounds else None}")
        return "\n".join(parts)


class Cluster:
    """Some peers under one folder. A context manager: whatever happens, nothing outlives it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.peers: list[Peer] = []
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.temporary = Path(tempfile.mkdtemp(prefix="dmct-"))  # a socket's path has 107 bytes at most
        (root / "logs").mkdir(parents=True)
        self.slow = root / "slow"
        """While this file exists, steps of scripts that are given `--slow` with it take long."""
        self.slow.touch()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- peers -----------------------------------------------------------------------------------------------

    def peer(self, name: str) -> Peer:
        """The peer of that name; a new one has an empty home."""
        known = next((p for p in self.peers if p.name == name), None)
        if known is not None:
            return known
        environment = dict(os.environ) | {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
            MARK: self.mark,
        }
        peer = Peer(name, self.root / name, self.root / "logs", environment)
        self.peers.append(peer)
        return peer

    def seed(self, folder: Path, *options: str, name: str = "seed", address: str = ANY_PORT) -> Peer:
        """`dmc-peer seed-dataset FOLDER`; returns when it listens."""
        peer = self.peer(name)
        command = ["seed-dataset", str(folder), "--home", str(peer.home), "--listen", address]
        peer.start([*command, "--max-shard-size", "16KiB", *options])
        self.listening(peer)
        return peer

    def join(
        self,
        name: str,
        seed: Peer | str,
        *script_arguments: str,
        options: Sequence[str] = (),
        script: Path = SCRIPT,
    ) -> Peer:
        """`dmc-peer join SEED SCRIPT`; does not wait for anything. ``seed`` "": none is named."""
        peer = self.peer(name)
        known_as = [a for a in [seed if isinstance(seed, str) else seed.address] if a]
        command = ["join", "--home", str(peer.home), "--name", name]
        if peer is not seed and "--listen" not in options:
            command += ["--listen", ANY_PORT]
        peer.start([*command, *options, *known_as, str(script), *script_arguments])
        return peer

    def restart(self, peer: Peer) -> None:
        """The same command on the same home, at the address that it had."""
        assert not peer.running, f"{peer.name} still runs"
        arguments = [peer.address or a if a == ANY_PORT else a for a in peer.arguments]
        peer.start(arguments)

    def listening(self, peer: Peer) -> str:
        """Wait until its agent listens and has said who it is; its address."""

        def announced() -> str:
            with contextlib.suppress(FileNotFoundError, ValueError):
                facts = json.loads((peer.home / "agent.json").read_text())
                return str(facts["address"]) if facts["pid"] == peer.pid and peer.events("started") else ""
            return ""

        peer.address = self.wait(announced, f"{peer.name} listens")
        return peer.address

    # -- waiting ---------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], T], what: str, deadline_s: float = 30.0) -> T:
        """Look until the condition is true and return its value; AssertionError with everybody's last words.

        It gives up early when every process has ended: then nothing changes any more.
        """
        end_s = time.monotonic() + deadline_s
        while True:
            anybody = any(p.running for p in self.peers)
            value = condition()
            if value:
                return value
            if time.monotonic() > end_s or not anybody:
                late = f"after {deadline_s:g} s" if anybody else "and every process has ended"
                raise AssertionError(f"not so {late}: {what}\n{self.report()}")
            time.sleep(POLL_S)

    def rounds(self, peers: Sequence[Peer], count: int, after: float = 0.0, deadline_s: float = 30.0) -> None:
        """Wait until each of these peers has completed so many rounds after a time."""
        self.wait(
            lambda: all(len(p.rounds(after)) >= count for p in peers),
            f"{count} rounds on {', '.join(p.name for p in peers)}",
            deadline_s,
        )

    def ended(self, peers: Sequence[Peer], code: int = 0, deadline_s: float = 120.0) -> None:
        """Wait until these peers' commands have ended, each with this exit code."""
        self.wait(
            lambda: all(p.code is not None for p in peers),
            f"{', '.join(p.name for p in peers)} end",
            deadline_s,
        )
        for peer in peers:
            assert peer.code == code, f"{peer.name} ended with {peer.code}, not {code}\n{self.report()}"

    def report(self) -> str:
        """Everybody's last words."""
        return "\n".join(peer.report() for peer in self.peers)

    # -- the end ---------------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Let the run come to its end: steps take no more than they need."""
        self.slow.unlink(missing_ok=True)

    def orphans(self, grace_s: float = ORPHAN_GRACE_S) -> list[psutil.Process]:
        """What is still alive after a moment's grace and belongs to no peer whose agent runs."""
        end_s = time.monotonic() + grace_s
        while True:
            owned = {p.pid for peer in self.peers if peer.running for p in peer.tree()}
            owned |= {p.submission.pid for p in self.peers if p.submission is not None}
            left = [p for p in self.processes() if p.pid not in owned]
            if not left or time.monotonic() > end_s:
                return left
            time.sleep(POLL_S)

    def processes(self) -> list[psutil.Process]:
        """Everything alive that descends from this cluster, whoever its parent is now."""
        return [p for p in psutil.process_iter() if environment_of(p).get(MARK) == self.mark]

    def close(self) -> None:
        """End and reap everything, and remove what killed peers left in shared memory."""
        left = self.processes()
        signal_all(left, signal.SIGKILL)
        for peer in self.peers:
            for process in (peer.process, peer.submission):
                if process is not None:
                    process.wait(10)
        psutil.wait_procs(left, timeout=10)
        for peer in self.peers:
            peer.forget_memory()
        shutil.rmtree(self.temporary, ignore_errors=True)


def signal_all(processes: Sequence[psutil.Process], number: int) -> None:
    """One signal to each that is still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def command_of(process: psutil.Process) -> list[str]:
    """Its arguments; [] when it is gone."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Its environment; {} when it is gone or somebody else's."""
    with contextlib.suppress(psutil.Error):
        return process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
    return {}


def write_samples(folder: Path, count: int, seed: int = 0) -> Path:
    """`count` files of 16 bytes in four folders, the classes; the mean of a file depends on its class."""
    rng = random.Random(seed)
    for number in range(count):
        label = number % 4
        path = folder / str(label) / f"{number:05}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(rng.randrange(48 * label, 48 * label + 64) for _ in range(16)))
    return folder


def keys(folder: Path) -> Iterator[str]:
    """The samples' keys, sorted."""
    for path in sorted(folder.rglob("*.bin")):
        yield path.relative_to(folder).with_suffix("").as_posix()
