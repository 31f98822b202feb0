"""What can happen to a peer, each with proof that it did and with who noticed it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import psutil

from p2p_dmc.observe import phases
from tests.soak.hosts import Hosts
from tests.system.cluster import Peer, signal_all

BALLAST = "ballast"
SLOW_FACTOR = 4
"""A round that took so many times the usual was held up."""


class Fault:
    """One fault to one peer. `strike` begins it; `heal` undoes what lasts; dead peers are the driver's to restart.

    ``when``: unix seconds of the strike. ``proof``: that it happened, in words, "" until it has.
    """

    kind: ClassVar[str]
    deadly: bool = False
    """Whether a process dies, so that no view from before it can go on."""
    stubborn: ClassVar[bool] = False
    """Whether it lasts until it is noticed, because it would have no effect before."""
    at_return: ClassVar[bool] = False
    """Whether it can only be noticed when the victim is back."""
    brief_s: ClassVar[tuple[float, float]] = (0.0, 0.0)
    """How long it lasts at least before it is healed, when nobody waits for it to be noticed."""

    def __init__(self, hosts: Hosts, victim: Peer, rng: random.Random) -> None:
        self.hosts, self.victim, self.rng = hosts, victim, rng
        self.when = 0.0
        self.proof = ""

    @property
    def comes_by_itself(self) -> bool:
        """Whether it happens whatever else does or does not."""
        return True

    @property
    def others(self) -> list[Peer]:
        return [p for p in self.hosts.peers if p is not self.victim]

    def strike(self) -> None:
        """Do it, or see to it that it will be done."""
        raise NotImplementedError

    def struck(self) -> bool:
        """Whether it has happened by now."""
        return bool(self.proof)

    def noticed(self) -> str:
        """Who noticed it and how, in words; "" while nobody has."""
        return self.seen_by_others() or self.held_up()

    def heal(self) -> None:
        """Undo what lasts."""

    # -- witnesses -------------------------------------------------------------------------------------------

    def seen_by_others(self) -> str:
        """A word of another peer about the victim."""
        for peer in self.others:
            for line in since(peer, self.when):
                about = line.get("peer_id") == self.victim.peer_id
                if (
                    about
                    and line["event"] == "member"
                    and (line["state"] != "ALIVE" or line["old"] == "DEAD")
                ):
                    return f"{peer.name}: member {line['state']}, {line['reason']}"
                if about and line["event"] == "trainer_lost":
                    return f"{peer.name}: trainer_lost, {line['reason']}"
                if line["event"] == "view" and self.victim.peer_id not in line["members"]:
                    return f"{peer.name}: view {line['view_epoch']} without it"
        return ""

    def held_up(self) -> str:
        """A round of others that took far longer than usual."""
        for peer in self.others:
            times = [line["time"] for line in peer.rounds()]
            gaps = [(two - one, two) for one, two in pairwise(times)]
            late = [gap for gap, end in gaps if end > self.when]
            usual_s = statistics.median([gap for gap, end in gaps if end <= self.when] or [1.0])
            if late and max(late) > SLOW_FACTOR * usual_s:
                return f"{peer.name}: a round took {max(late):.2f} s, usually {usual_s:.2f} s"
        return ""


def since(peer: Peer, when: float) -> Iterator[dict[str, Any]]:
    """Its events after a time."""
    return (line for line in peer.events() if line["time"] >= when - 0.001)


def said_since(peer: Peer, when: float, event: str, **facts: Any) -> bool:
    return any(
        line["event"] == event and all(line.get(k) == v for k, v in facts.items())
        for line in since(peer, when)
    )


# --- death ------------------------------------------------------------------------------------------------


class KillTrainer(Fault):
    kind = "kill trainer"
    deadly = True

    def strike(self) -> None:
        trainer = self.victim.trainer()
        assert trainer is not None, f"{self.victim.name} has no trainer"
        self.when = time.time()
        trainer.kill()
        trainer.wait(10)
        self.proof = f"process {trainer.pid} is gone"

    def noticed(self) -> str:
        owner = said_since(self.victim, self.when, "trainer_exit", signal="SIGKILL")
        seen = self.seen_by_others()
        return f"its agent: trainer_exit; {seen}" if owner and seen else ""


class KillAgent(Fault):
    """SIGKILL of the agent alone: its trainer goes with it."""

    kind = "kill agent"
    deadly = True

    def strike(self) -> None:
        self.kill(self.victim)

    def kill(self, peer: Peer) -> None:
        tree = peer.tree()
        self.when = self.when or time.time()
        os.kill(peer.pid, signal.SIGKILL)
        assert peer.process is not None
        code = peer.process.wait(10)
        _, alive = psutil.wait_procs(tree[1:], timeout=10)
        assert not alive, f"{alive} outlived the agent of {peer.name}"
        self.proof += f"{peer.name}: exit status {code}, {len(tree) - 1} processes went with it; "

    def noticed(self) -> str:
        return self.seen_by_others()


class KillTree(KillAgent):
    """SIGKILL of trainer and agent together."""

    kind = "kill both"

    def kill(self, peer: Peer) -> None:
        tree = peer.tree()
        self.when = self.when or time.time()
        signal_all(tree[::-1], signal.SIGKILL)
        assert peer.process is not None
        self.proof += f"{peer.name}: exit status {peer.process.wait(10)}; "


class KillAll(KillTree):
    """Everybody at once: what is committed and checkpointed is all that is left."""

    kind = "kill all"
    at_return = True

    def strike(self) -> None:
        for peer in self.hosts.peers:
            if peer.running:
                self.kill(peer)

    def noticed(self) -> str:
        resumed = [p for p in self.hosts.peers for line in since(p, self.when) if line["event"] == "view"]
        return f"{resumed[0].name}: a view after it" if resumed else ""


class PowerCut(KillTree):
    """Agent and trainer die, and what they had in memory is gone; the disk is as it was."""

    kind = "power cut"

    def kill(self, peer: Peer) -> None:
        super().kill(peer)
        self.proof += self.hosts.forget_memory(peer) + "; "


class PowerCutAll(KillAll):
    kind = "power cut of all"

    def kill(self, peer: Peer) -> None:
        super().kill(peer)
        self.proof += self.hosts.forget_memory(peer) + "; "


class Restart(Fault):
    """Ctrl-C: it leaves, and comes back as a new incarnation."""

    kind = "restart"
    deadly = True

    def strike(self) -> None:
        self.when = time.time()
        self.victim.interrupt()

    def struck(self) -> bool:
        if self.victim.process is not None and self.victim.process.poll() is not None:
            self.proof = f"exit status {self.victim.process.poll()}"
        return bool(self.proof)

    def noticed(self) -> str:
        return self.seen_by_others()


# --- silence ----------------------------------------------------------------------------------------------


class StopTree(Fault):
    """SIGSTOP of agent and trainer: no word, but sockets that take what is sent."""

    kind = "stop both"
    brief_s = (1.0, 6.0)

    def strike(self) -> None:
        self._stopped = self.processes()
        self.when = time.time()
        signal_all(self._stopped, signal.SIGSTOP)
        deadline_s = time.monotonic() + 5
        while any(map(running, self._stopped)) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert not any(map(running, self._stopped)), "a process does not stop"
        self.proof = f"processes {[p.pid for p in self._stopped]} are stopped"

    def processes(self) -> list[psutil.Process]:
        return self.victim.tree()

    def heal(self) -> None:
        signal_all(self._stopped, signal.SIGCONT)


class StopTrainer(StopTree):
    kind = "stop trainer"

    def processes(self) -> list[psutil.Process]:
        trainer = self.victim.trainer()
        assert trainer is not None, f"{self.victim.name} has no trainer"
        return [trainer]


class StopAgent(StopTree):
    kind = "stop agent"

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(self.victim.pid)]


def running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return False


# --- the network ------------------------------------------------------------------------------------------


class Cut(Fault):
    kind = "cut"
    brief_s = (1.0, 6.0)
    way: ClassVar[str] = ""

    def strike(self) -> None:
        self.when = time.time()
        self.hosts.cut(self.victim, self.way)
        state = self.hosts.cable(self.victim)
        assert state == (f"cut-{self.way}" if self.way else "cut"), state
        self.proof = f"cable is {state}"

    def heal(self) -> None:
        self.hosts.mend(self.victim)


class CutIn(Cut):
    """It hears nothing; what it says arrives."""

    kind, way = "cut in", "in"


class CutOut(Cut):
    """Nobody hears it; what others say arrives."""

    kind, way = "cut out", "out"


class BrokenWay(Fault):
    """Nothing passes between two peers, which everybody else hears; or nothing in one direction."""

    kind = "broken way"
    brief_s = (1.0, 20.0)

    def strike(self) -> None:
        other = self.rng.choice(self.others)
        both = self.rng.random() < 0.5
        self.when = time.time()
        ways = [(self.victim, other), (other, self.victim)][: 1 + both]
        self.broken = [(deaf, self.hosts.silence(deaf, mute)) for deaf, mute in ways]
        self.proof = f"no packets {'between it and' if both else 'to it from'} {other.name}"

    def struck(self) -> bool:
        return all(self.hosts.silenced(deaf, table) > 0 for deaf, table in self.broken)

    def noticed(self) -> str:
        aside = [
            p.name for p in self.hosts.peers if any(e["time"] > self.when for e in p.events("stands_aside"))
        ]
        return f"{aside[0]} stands aside" if aside else self.seen_by_others() or self.held_up()

    def heal(self) -> None:
        dropped = [self.hosts.silence_no_more(deaf, table) for deaf, table in self.broken]
        self.proof += f"; {sum(dropped)} packets dropped"


class Loss(Fault):
    """Packets vanish at random in both directions."""

    kind = "packet loss"
    brief_s = (2.0, 5.0)

    def strike(self) -> None:
        self.percent = self.rng.choice((5, 15, 30, 50))
        self.when = time.time()
        self.hosts.lose(self.victim, self.percent)

    def struck(self) -> bool:
        return self.hosts.lost(self.victim) > 0

    def noticed(self) -> str:
        return self.seen_by_others() or self.held_up() or self.retransmitted()

    def retransmitted(self) -> str:
        """Light loss costs a connection a repeat, and the peers nothing."""
        return f"the kernel: {self.repeats} segments repeated" if self.proof and self.repeats else ""

    def heal(self) -> None:
        dropped, self.repeats = self.hosts.lose_nothing(self.victim)
        self.proof = f"{dropped} packets dropped at {self.percent} %"


# --- the disk ---------------------------------------------------------------------------------------------


class DiskFull(Fault):
    kind = "disk full"
    stubborn = True

    def strike(self) -> None:
        self.when, self._heard = time.time(), len(self.victim.said())
        self.full, self.proof = True, self.fill()

    def fill(self) -> str:
        """Take all that is free; what the disk says then."""
        written = 0
        try:
            with (self.victim.home / BALLAST).open("ab", buffering=0) as file:
                while True:
                    written += file.write(bytes(4096))
        except OSError as error:
            return f"{error.strerror} after {written} bytes"

    def noticed(self) -> str:
        lines = self.victim.said()[self._heard :].splitlines()
        told = [line for line in lines if "free some" in line or "make room" in line]
        if told:
            return f"it says: {told[0][-160:]}"
        if self.full:
            self.fill()  # an old checkpoint may have made room
        return ""

    def heal(self) -> None:
        self.full = False
        (self.victim.home / BALLAST).unlink(missing_ok=True)


def damage(path: Path, rng: random.Random) -> str:
    """Other bytes in the middle of a file, or fewer; what was done, in words."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(max(1, len(data) - 8))
    how = rng.choice(("flip", "zero", "cut short"))
    if how == "flip":
        data[at] ^= 1 << rng.randrange(8)
    elif how == "zero":
        data[at : at + 512] = bytes(len(data[at : at + 512]))
    else:
        del data[at:]
    if bytes(data) == path.read_bytes():
        data[at] ^= 1
        how = "flip"
    path.write_bytes(data)
    return f"{path.parent.name}/{path.name[:16]}: {how} at {at}"


class BadShard(KillAgent):
    """Shards on the disk of a peer that is down are damaged; it finds them when it is back."""

    kind = "bad shard"
    at_return = True

    def strike(self) -> None:
        super().strike()
        held = sorted(self.victim.home.glob("store/*/shards/*.tar"))
        self._damaged = self.rng.sample(held, min(8, len(held)))
        self.proof += ", ".join(damage(path, self.rng) for path in self._damaged)

    def noticed(self) -> str:
        for path in self._damaged:
            if said_since(self.victim, self.when, "shard_corrupt", shard=path.stem):
                return f"its agent: shard_corrupt {path.stem[:16]}"
        return ""


class LiveBadShard(BadShard):
    """The same on the disk of a peer that goes on."""

    kind = "bad shard, live"
    deadly = False

    def strike(self) -> None:
        self.when = time.time()
        held = sorted(self.victim.home.glob("store/*/shards/*.tar"))
        self._damaged = self.rng.sample(held, min(8, len(held)))
        self.proof = ", ".join(damage(path, self.rng) for path in self._damaged)


class BadCheckpoint(PowerCut):
    """Power is lost and the newest checkpoint is damaged: the peer goes on from an older one, or from others."""

    kind = "bad checkpoint"
    at_return = True

    def strike(self) -> None:
        super().strike()
        folders = [p for p in self.victim.home.glob("runs/*/checkpoints/*-*") if not p.name.startswith(".")]
        assert folders, f"{self.victim.name} has no checkpoint to damage"
        newest = max(folders, key=lambda p: tuple(map(int, p.name.split("-"))))
        self._folder = newest
        self.proof += damage(self.rng.choice(sorted(newest.iterdir())), self.rng)

    def noticed(self) -> str:
        skipped = said_since(self.victim, self.when, "checkpoint_skipped", path=str(self._folder))
        return f"its agent: checkpoint_skipped {self._folder.name}" if skipped else ""


# --- exact cuts -------------------------------------------------------------------------------------------

VIEW_PHASES = ("proposing", "promising", "promised", "installed", "opening", "rendezvous")
"""Reached only while a view changes: another fault has to bring that about."""
STATE_PHASES = ("serving", "adopting", "learning", "replayed")
"""Reached only when a peer comes back."""
PARTING_PHASES = ("leaving", "put-off", "aside", "stopped", "all-stopped")
"""Reached only when a peer leaves by itself or stands aside, or when the run is stopped."""


class PhaseCut(Fault):
    """The victim strikes itself at a phase (p2p_dmc.observe.phases): with ``action`` given at once, else with one by
    chance at the first time or one of the next.
    """

    brief_s = (1.0, 4.0)

    def __init__(
        self, hosts: Hosts, victim: Peer, rng: random.Random, phase: str, action: str | None = None
    ) -> None:
        super().__init__(hosts, victim, rng)
        self.phase = phase
        self.trainers = phase in phases.TRAINER_PHASES
        actions = ("kill", "kill", "kill-both", "stop") if self.trainers else ("kill", "kill", "stop")
        self.action, self.exact = action or rng.choice(actions), action is not None
        self.kind = f"{self.action} at {phase}"  # type: ignore[misc]
        self.deadly = self.action != "stop"
        self._line: dict[str, Any] = {}

    def strike(self) -> None:
        self.when = time.time()
        self._orders = self.hosts.orders / self.victim.name
        once = self.exact or self.phase in (*STATE_PHASES, "checkpointing", "checkpointed")
        count = 1 if once else self.rng.choice((1, 1, 2, 3))
        delay_ms = self.rng.choice((0, 0, 5, 20)) if self.phase in ("reducing", "header-said") else 0
        phases.give(self._orders, self.phase, self.action, count, delay_ms)

    @property
    def comes_by_itself(self) -> bool:
        return self.phase not in (*VIEW_PHASES, *STATE_PHASES)

    def struck(self) -> bool:
        path = self._orders / "proof"
        for text in path.read_text().splitlines() if path.exists() else ():
            line = json.loads(text)
            if line["time"] >= self.when and line["phase"] == self.phase and not running_pid(line["pid"]):
                self._line, self.when = line, line["time"]
                end = "is stopped" if self.action == "stop" else "is gone"
                self.proof = f"{line['process']} {line['pid']} at {self.phase} ({line['count']}) {end}"
                return True
        return False

    def withdraw(self) -> bool:
        """Take the order back; False when it has been carried out meanwhile."""
        path = self._orders / self.phase
        if path.exists():
            path.unlink(missing_ok=True)
            return True
        return False

    def noticed(self) -> str:
        if self.action == "stop":
            return super().noticed()
        return self.seen_by_others()

    def heal(self) -> None:
        if self.action == "stop" and self._line:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._line["pid"], signal.SIGCONT)


def running_pid(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return running(psutil.Process(pid))
    return False


KINDS: dict[type[Fault], int] = {
    KillTrainer: 3,
    KillAgent: 3,
    KillTree: 2,
    KillAll: 1,
    PowerCut: 2,
    PowerCutAll: 1,
    StopTree: 3,
    StopTrainer: 1,
    StopAgent: 2,
    Cut: 2,
    CutIn: 2,
    CutOut: 2,
    BrokenWay: 2,
    Loss: 3,
    DiskFull: 1,
    BadShard: 1,
    LiveBadShard: 2,
    BadCheckpoint: 1,
    Restart: 2,
}
"""How often each comes, besides exact cuts."""

SILENT: tuple[type[Fault], ...] = (StopTree, StopAgent, Cut, CutIn, CutOut)
"""Those that end when they are healed, and cost nobody a process."""
