"""One run of peers that are hurt again and again: what happens, what is waited for, what must hold at the end."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch
from safetensors.torch import load

from p2p_dmc.observe import phases
from tests.soak import faults as kinds
from tests.soak import replay
from tests.soak.faults import Fault, PhaseCut
from tests.soak.hosts import Hosts, can_lose
from tests.system.checks import check_digests, check_ledger
from tests.system.cluster import Peer

NAMES = ("a", "b", "c", "d")
RUN = "chaos"
SCRIPT = Path(__file__).parent / "scripts" / "chaos_train.py"
PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
SAMPLES, SAMPLE_BYTES = 512, 700
FAULT_S, SAMPLES_A_SECOND = 8, 30
"""About how long a fault takes, and how fast the peers are while they are slow: so long does a run have to be."""
DELAY_MS = 100
START_S, PROOF_S, NOTICE_S, TOGETHER_S, END_S = 90.0, 30.0, 30.0, 75.0, 150.0
LATE_NOTICE_S = 8.0
CALM_S = (0.0, 0.7)
"""From one recovery to the next fault."""
AT_ONCE = (1, 2, 3, 3)
"""How many faults come together."""
MEANWHILE = (1, 2, 4, 6)
"""How many more come to others while a peer that died comes back, each for BRIEF_S at least."""
BRIEF_S, SOON_S = (0.5, 2.0), 5.0
AGAIN = 5
"""A peer that ends by itself while others are hurt is started again at most so often for one fault."""
MORE_THREADS, MORE_FILES = 8, 32
"""Growth of a process that is no chance: a view's group has a few of each, and lives a moment longer than its view."""
ANY_NUMBER = 1 << 30


Plan = Callable[[Hosts, random.Random], Sequence[Fault]]
"""Makes the faults of one moment."""


@dataclass(slots=True)
class Record:
    """One fault."""

    run: str
    kind: str
    victim: str
    at_s: float
    proof: str
    noticed: str = ""
    noticed_s: float | None = None
    recovered_s: float | None = None
    together: bool = False


@dataclass(slots=True)
class Outcome:
    """What a run came to."""

    name: str
    records: list[Record] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    diverged: bool = False
    hung: bool = False
    inexact: bool = False
    orphans: int = 0
    unreached: int = 0
    rounds: int = 0
    replayed: int = 0
    samples: int = 0
    given_up: int = 0


class ChaosRun:
    """Plays once."""

    def __init__(self, root: Path, rng: random.Random, name: str) -> None:
        self.root, self.rng = root, rng
        self.outcome = Outcome(name)
        self.hosts: Hosts
        self.begun_s = 0.0
        self.epochs = 0
        self.only: str | None = None
        self.planned = False
        self.unnoticed: list[tuple[Fault, Record]] = []
        """Faults that nobody had noticed when all trained together again: damage that nobody had read yet."""
        self._sizes: dict[int, tuple[str, int, int]] = {}
        """Process id to whose it is, threads and open files when it was first looked at."""

    def play(
        self,
        faults: int,
        until_s: float | None = None,
        only: str | None = None,
        keep: Path | None = None,
        plan: Sequence[Plan] = (),
    ) -> Outcome:
        """So many faults, or as many as fit before ``until_s`` (monotonic), and the end.

        ``keep``: where the homes of a run that failed are copied to. ``plan``: what comes, instead of chance.
        """
        self.only, self.planned = only, bool(plan)
        expected_s = min(faults * FAULT_S, until_s - time.monotonic() if until_s else faults * FAULT_S)
        self.epochs = max(4, round(expected_s * SAMPLES_A_SECOND / SAMPLES))
        with Hosts(self.root, NAMES) as hosts:
            self.hosts = hosts
            try:
                self.start()
                for planned in plan:
                    self.suffer(planned(hosts, self.rng))
                while not self.planned and len(self.outcome.records) < faults and not self.late(until_s):
                    self.suffer(self.choose(faults - len(self.outcome.records)))
                self.measure(grown=True)
                hosts.hurry()
                hosts.ended(hosts.peers, deadline_s=END_S)
                for fault, record in self.unnoticed:
                    record.noticed = fault.noticed()[:200]
                self.judge()
            except (AssertionError, psutil.Error, subprocess.CalledProcessError) as error:
                self.outcome.hung = True
                what = str(error).partition("\n")[0]
                self.outcome.found.append(f"{what}; {self.where()}")
            self.left_behind()
            if self.outcome.found and keep is not None:
                self.keep(keep / f"chaos-{self.outcome.name}-{time.time_ns()}")
        return self.outcome

    def keep(self, folder: Path) -> None:
        """For whoever looks into it."""
        shutil.copytree(self.root, folder, ignore=shutil.ignore_patterns("shards", "memory", "sources"))
        records = [asdict(record) for record in self.outcome.records]
        (folder / "records.json").write_text(json.dumps(records, indent=1))
        (folder / "found.txt").write_text("\n".join([*self.outcome.found, self.hosts.report()]))

    # -- the start -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The first peer brings the data, then all train."""
        hosts = self.hosts
        data = write_sources(self.root / "sources", SAMPLES)
        first = hosts.peer(NAMES[0])
        hosts.seed(
            data, "--insecure", "--name", "sources", name=first.name, address=hosts.address_of(first.name)
        )
        first.interrupt()
        assert first.process is not None and first.process.wait(30) in (0, 130), "the seeding command failed"
        shutil.copytree(first.home / "store", self.root / "origin" / "store")
        for name in NAMES:
            others = ",".join(hosts.address_of(other) for other in NAMES if other != name)
            options = [
                "--insecure",
                "--listen",
                hosts.address_of(name),
                "--run",
                RUN,
                "--min-peers",
                str(len(NAMES)),
            ]
            script = ["--epochs", str(self.epochs), "--slow", str(hosts.slow), "--delay-ms", str(DELAY_MS)]
            hosts.join(name, others, *script, options=[*options, "--checkpoint-every", "2s"], script=SCRIPT)
            hosts.peers[-1].address = hosts.address_of(name)
        self.begun_s = time.time()
        self.together(0.0, START_S)
        self.measure()

    # -- one fault, or two -----------------------------------------------------------------------------------

    def choose(self, most: int) -> list[Fault]:
        """What comes next: up to AT_ONCE faults that do not wait for each other, on different peers."""
        rng, only = self.rng, self.only
        first = self.one(rng.choice(self.hosts.peers), only)
        others = rng.sample([p for p in self.hosts.peers if p is not first.victim], len(NAMES) - 1)
        if isinstance(first, PhaseCut) and first.phase in ("adopting", "learning", "replayed"):
            return [first, kinds.KillAgent(self.hosts, first.victim, rng)]
        chosen = [first]
        if isinstance(first, PhaseCut) and first.phase == "serving":
            chosen.append(kinds.KillAgent(self.hosts, others.pop(), rng))
        if isinstance(first, PhaseCut) and first.phase in kinds.VIEW_PHASES:
            kind = rng.choice((kinds.KillTrainer, kinds.KillAgent))
            chosen.append(kind(self.hosts, others.pop(), rng))
        more = rng.choice(AT_ONCE) if only is None and not isinstance(first, kinds.KillAll) else 1
        while len(chosen) < min(more, most):
            fault = self.one(others.pop(), None)
            if isinstance(fault, kinds.KillAll) or (
                isinstance(fault, PhaseCut) and fault.phase in kinds.STATE_PHASES
            ):
                break  # it needs peers that nothing else happens to
            chosen.append(fault)
        return chosen

    def one(self, victim: Peer, only: str | None) -> Fault:
        rng = self.rng
        known = [*phases.AGENT_PHASES, *phases.TRAINER_PHASES]
        every = [phase for phase in known if phase not in kinds.PARTING_PHASES]
        if only in every or (only is None and rng.random() < 0.4):
            return PhaseCut(self.hosts, victim, rng, only or rng.choice(every))
        weights = {
            kind: weight
            for kind, weight in kinds.KINDS.items()
            if only in (None, kind.kind) and (can_lose() or kind not in (kinds.Loss, kinds.BrokenWay))
        }
        if not weights:
            raise SystemExit(f"--only {only}: no such kind")
        return rng.choices(list(weights), list(weights.values()))[0](self.hosts, victim, rng)

    def suffer(self, faults: Sequence[Fault]) -> None:
        """They come, are noticed, are healed, and all train together again."""
        self.pause(self.rng.uniform(*CALM_S))
        begun, view = time.time(), max(p.view["view_epoch"] for p in self.hosts.peers)
        for fault in faults:
            fault.strike()
            if self.planned:
                self.await_proof([fault] if fault.comes_by_itself else [])
            else:
                self.pause(self.rng.choice((0.0, 0.0, 0.2, 1.0)) if len(faults) > 1 else 0.0)
        patient = self.rng.random() < 0.6
        happened = self.await_proof(faults)
        records = {id(f): self.record(f, len(happened) > 1) for f in happened}
        self.outcome.records += records.values()
        if not patient:
            self.revive()
        self.pause(max([self.rng.uniform(*f.brief_s) for f in happened], default=0.0))
        now = [f for f in happened if f.stubborn or (patient and not f.at_return)]
        self.await_notice(now, records, NOTICE_S)
        for fault in happened:
            fault.heal()
            records[id(fault)].proof = fault.proof
        self.revive()
        newer = view if any(f.deadly for f in happened) else 0
        happened += self.meanwhile(records) if newer else []
        self.together(max([f.when for f in happened], default=begun), TOGETHER_S, newer)
        back = time.time()
        for fault in happened:
            records[id(fault)].recovered_s = round(back - fault.when, 2)
        self.await_notice(happened, records, LATE_NOTICE_S)
        self.unnoticed += [(f, records[id(f)]) for f in happened if not records[id(f)].noticed]
        for fault in happened:
            print(*asdict(records[id(fault)]).values(), sep=" | ", file=sys.stderr, flush=True)
        self.measure()

    def meanwhile(self, records: dict[int, Record]) -> list[Fault]:
        """While somebody comes back, others fall silent for a moment, one after another."""
        happened: list[Fault] = []
        for _ in range(0 if self.only or self.planned else self.rng.choice(MEANWHILE)):
            able = [p for p in self.hosts.peers if p.running and p.trainer() is not None]
            if not able:
                break
            fault = self.rng.choice(kinds.SILENT)(self.hosts, self.rng.choice(able), self.rng)
            fault.strike()
            records[id(fault)] = self.record(fault, True)
            self.outcome.records.append(records[id(fault)])
            happened.append(fault)
            self.pause(self.rng.uniform(*BRIEF_S))
            self.await_notice([fault], records, SOON_S)
            fault.heal()
            records[id(fault)].proof = fault.proof
        return happened

    def record(self, fault: Fault, together: bool) -> Record:
        at_s = round(fault.when - self.begun_s, 2)
        return Record(self.outcome.name, fault.kind, fault.victim.name, at_s, fault.proof, together=together)

    def await_proof(self, faults: Sequence[Fault]) -> list[Fault]:
        """Those that have happened. Peers that are down come back meanwhile if a cut waits for that."""
        waiting = [f for f in faults if not f.struck()]
        if any(isinstance(f, PhaseCut) and f.phase in kinds.STATE_PHASES for f in waiting):
            self.revive()
        end_s = time.monotonic() + PROOF_S
        while waiting and time.monotonic() < end_s:
            time.sleep(0.02)
            waiting = [f for f in waiting if not f.struck()]
        for fault in waiting:
            if isinstance(fault, PhaseCut) and fault.withdraw():
                self.outcome.unreached += 1
            else:
                assert fault.struck(), f"{fault.kind} of {fault.victim.name} did not happen"
        return [f for f in faults if f.struck()]

    def await_notice(self, faults: Sequence[Fault], records: dict[int, Record], deadline_s: float) -> None:
        """Somebody has noticed each; who did is put on record. One that nobody notices is on record as that."""
        end_s = time.monotonic() + deadline_s
        waiting = [f for f in faults if not records[id(f)].noticed]
        while waiting and time.monotonic() < end_s:
            for fault in waiting:
                if word := fault.noticed():
                    records[id(fault)].noticed = word[:200]
                    records[id(fault)].noticed_s = round(time.time() - fault.when, 2)
            waiting = [f for f in waiting if not records[id(f)].noticed]
            time.sleep(0.05)

    def pause(self, seconds: float) -> None:
        """Peers are left alone for a moment: the driver's own time, not a wait for anything."""
        time.sleep(seconds)

    def revive(self) -> None:
        """Start whoever is down."""
        for peer in self.hosts.peers:
            if not peer.running:
                self.hosts.restart(peer)

    def together(self, after: float, deadline_s: float, newer: int = 0) -> None:
        """All are in one view, newer than that, and complete rounds in it; who ended by itself is started again."""
        restarts = 0
        end_s = time.monotonic() + deadline_s
        while not all(self.trains(peer, after, newer) for peer in self.hosts.peers):
            down = [p for p in self.hosts.peers if not p.running]
            finished = [p.name for p in down if p.events("run_over", outcome="finished")]
            assert not finished, f"{finished} finished before the faults did"
            restarts += len(down)
            assert restarts <= AGAIN, f"{[p.name for p in down]} end again and again"
            self.revive()
            assert time.monotonic() < end_s, f"not so after {deadline_s:g} s: all train together again"
            time.sleep(0.05)

    def trains(self, peer: Peer, after: float, newer: int) -> bool:
        """In a view of all, it has completed a round after the faults and two in the view."""
        rounds = peer.rounds(after)
        if not rounds:
            return False
        here = [r for r in peer.rounds() if r["view_epoch"] == rounds[-1]["view_epoch"]]
        whole = (
            rounds[-1]["members"] == len(NAMES) and peer.view.get("view_epoch") == rounds[-1]["view_epoch"]
        )
        return whole and len(here) >= 2 and time.time() - rounds[-1]["time"] < 5.0

    def where(self) -> str:
        """How far everybody is, in words."""
        names = {p.peer_id: p.name for p in self.hosts.peers if p.events("started")}
        parts = []
        for peer in self.hosts.peers:
            rounds, view = peer.rounds(), peer.view
            last = f"{rounds[-1]['view_epoch']}-{rounds[-1]['round']}" if rounds else "none"
            members = "+".join(names.get(member, "?") for member in view["members"]) or "nobody"
            state = "" if peer.running else f" (ended with {peer.code})"
            parts.append(f"{peer.name}{state}: view {view.get('view_epoch')} of {members}, last round {last}")
        return ", ".join(parts)

    def late(self, until_s: float | None) -> bool:
        """No time, or not enough of the run, is left for another fault."""
        done = max((p.rounds()[-1]["samples_total"] for p in self.hosts.peers if p.rounds()), default=0)
        soon = done > 0.9 * self.epochs * SAMPLES
        return soon or (until_s is not None and time.monotonic() > until_s)

    # -- the end ---------------------------------------------------------------------------------------------

    def measure(self, *, grown: bool = False) -> None:
        """Threads and open files of every process; ``grown``: say whose have become many more."""
        for peer in self.hosts.peers:
            for process in peer.tree():
                try:
                    size = process.num_threads(), process.num_fds()
                except psutil.NoSuchProcess:
                    continue
                name, threads, files = self._sizes.setdefault(process.pid, (peer.name, *size))
                if grown and (size[0] > threads + MORE_THREADS or size[1] > files + MORE_FILES):
                    self.outcome.orphans += 1
                    self.outcome.found.append(
                        f"a process of {name} has {size[0]} threads and {size[1]} files, {threads} and {files} before"
                    )

    def judge(self) -> None:
        """Everything that anybody wrote down."""
        outcome, homes = self.outcome, [p.home for p in self.hosts.peers]
        try:
            check_digests(homes, RUN)
            assert len({p.final(RUN) for p in self.hosts.peers}) == 1, "final models differ"
        except AssertionError as error:
            outcome.diverged = True
            outcome.found.append(str(error))
        try:
            found = check_ledger(homes, RUN, skipped=ANY_NUMBER)
            assert found.finished_epochs == self.epochs, f"{found.finished_epochs} epochs, not {self.epochs}"
            outcome.rounds, outcome.samples = len(found.rounds), found.samples_counted
            outcome.given_up = found.samples_due - found.samples_counted
        except AssertionError as error:
            outcome.inexact = True
            outcome.found.append(str(error))
        again = replay.replay_run(homes, RUN, replay.reader(self.root / "origin"))
        outcome.replayed = again.rounds if not again.faults else 0
        final = next(iter(load(self.hosts.peers[0].final(RUN)).values()))
        if again.faults or not torch.equal(final, again.parameters):
            outcome.diverged = True
            outcome.found += again.faults or ["the final model is not what the replay comes to"]

    def left_behind(self) -> None:
        """Processes, sockets and files of peers that are gone."""
        hosts = self.hosts
        left = [f"process {p.pid} of {p.name()}" for p in hosts.orphans()]
        if not any(peer.running for peer in hosts.peers):
            left += hosts.open_sockets() + hosts.left_files()
        self.outcome.orphans += len(left)
        self.outcome.found += [f"left behind: {what}" for what in left]


def write_sources(folder: Path, count: int) -> Path:
    """`count` pieces of the standard library's sources, in a folder for each of PACKAGES."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for number, package in enumerate(PACKAGES):
        text = b"".join(path.read_bytes() for path in sorted((library / package).rglob("*.py")))
        pieces = count // len(PACKAGES)
        gap = len(text) // pieces
        assert gap >= SAMPLE_BYTES, f"{package} has only {len(text)} bytes"
        for piece in range(pieces):
            path = folder / str(number) / f"{piece:04}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text[piece * gap : piece * gap + SAMPLE_BYTES])
    return folder
