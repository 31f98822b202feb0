"""Scenarios: text files of decisions with the trace that they leave, reviewed as diffs.

    # What it shows.
    peers a b c               (settings: peers, quorum, epochs, skip-lost; `catches` names mutants it must notice;
                              with two-histories a second founding is no violation)
    > found a b c             (a decision, see decisions.py, or one of the commands below)
          0 a.1 proposes ...  (what follows from it)

    founded A B C             A founds the run with the others, all hold its state, and it has been calm for a while
    round A B C [/ N]         these enter the round (with N samples each) and finish it
    partial A B C / B         these enter; it ends well for those after the stroke, and fails for the others
    pause MS                  time passes, and everybody looks at its timers
    down A / B C              A crashes, and B and C see its machine refuse
    silent A / B C            a suspicion time after B and C last heard A, they give it up
    settle                    all is mended, and all must soon train together; without its trace
    show A                    where A stands
    expect A ...              view N VOTERS [teaching LEARNERS] | no view | at EPOCH ROUND | behind | current |
                              waits WORDS | claims N | counted N (samples of all epochs) | skipped N | epoch N |
                              boot N | finished | stopped

Names joined by + are voters or learners in ring order. An `expect` that fails is a failure however the traces are
written; `REWRITE=1 pytest tests/sim/test_scenarios.py` writes the traces anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from p2p_dmc.core.braids import size
from p2p_dmc.core.quorum import Quorum
from tests.sim.decisions import apply, parsed
from tests.sim.host import Host
from tests.sim.invariants import Violation
from tests.sim.membership import SUSPICION_MS
from tests.sim.world import World

FOLDER = Path(__file__).parent / "scenarios"


@dataclass
class Scenario:
    """One file."""

    head: list[str] = field(default_factory=list)
    """Its first lines, as they are: comments and settings."""
    steps: list[tuple[str, list[str]]] = field(default_factory=list)
    """(command, or "" for a comment between them; the trace that follows)."""

    @classmethod
    def read(cls, text: str) -> Scenario:
        scenario = cls()
        for line in text.splitlines():
            if line.startswith("> "):
                scenario.steps.append((line[2:], []))
            elif scenario.steps:
                scenario.steps[-1][1].append(line)
            else:
                scenario.head.append(line)
        return scenario

    def written(self) -> str:
        lines = list(self.head)
        for command, trace in self.steps:
            lines += [f"> {command}", *trace]
        return "\n".join(lines) + "\n"

    def setting(self, name: str) -> list[str]:
        """The words after a setting's name, [] if it is not there."""
        return next((line.split()[1:] for line in self.head if line.split()[:1] == [name]), [])

    def world(self, trace: Callable[[str], None]) -> World:
        quorum = self.setting("quorum") or ["majority"]
        epochs = self.setting("epochs") or ["1000"]
        lines = [line.strip() for line in self.head]
        world = World(
            self.setting("peers"),
            Quorum[quorum[0].upper()],
            epochs=int(epochs[0]),
            skip_lost="skip-lost" in lines,
            trace=trace,
        )
        world.checker.one_founding &= "two-histories" not in lines
        return world

    def played(self) -> Scenario:
        """The same scenario with the trace that it leaves now. Comments and blank lines stay where they are."""
        trace: list[str] = []
        world = self.world(trace.append)
        new = Scenario(list(self.head))
        for command, old in self.steps:
            trace.clear()
            try:
                step(world, command, trace.append)
            except Violation as error:
                raise Violation(error.invariant, f"at `{command}`: {error}") from error
            comments = [line for line in old if not line.strip() or line.startswith("#")]
            new.steps.append((command, [*trace, *comments]))
        world.checker.finish()
        return new


def step(world: World, command: str, say: Callable[[str], None]) -> None:
    """One command."""
    verb, *words = command.split()
    names, others = _halves(words)
    match verb:
        case "founded":
            world.act(world.hosts[names[0]], lambda core, now: core.found(tuple(sorted(names)), now))
            apply(world, ("flush",))
            for name in names:
                apply(world, ("adopt", name))
            apply(world, ("wait", 20_000))
        case "round":
            for name in names:
                apply(world, ("enter", name, int(others[0]) if others else 2))
            for name in names:
                apply(world, ("finish", name))
        case "partial":
            for name in names:
                apply(world, ("enter", name))
            for name in others:
                apply(world, ("finish", name))
            for name in names:
                if name not in others:
                    apply(world, ("fail", name))
        case "pause":
            apply(world, ("wait", int(names[0])))
            for name in list(world.hosts):
                apply(world, ("tick", name))
        case "down":
            for other in others:
                apply(world, ("probe", names[0], other))
            apply(world, ("crash", names[0]))
            for other in others:
                apply(world, ("refused", other, names[0]))
        case "silent":
            apply(world, ("wait", SUSPICION_MS))
            for other in others:
                apply(world, ("suspect", other, names[0]))
        case "settle":  # how is of no interest
            told, world.trace = world.trace, None
            apply(world, ("settle",))
            world.trace = told
        case "show":
            say(f"{'':7} {names[0]} {shown(world.hosts[names[0]])}")
        case "expect":
            expect(world, words[0], words[1:])
        case _:
            apply(world, parsed(command))


def _halves(words: list[str]) -> tuple[list[str], list[str]]:
    if "/" not in words:
        return words, []
    at = words.index("/")
    return words[:at], words[at + 1 :]


def shown(host: Host) -> str:
    """Where a host stands, in one line."""
    core = host.core
    if core is None:
        return host.outcome or "is down"
    view = core.view
    parts = [view_words(host), f"at {host.held.ref.lineage}"]
    if view is not None and core.behind:
        parts.append("behind")
    if host.work is not None:
        parts.append(f"claims {size(host.work.claims())}")
    waits = core.waiting_for()
    return ", ".join(parts) + (f": {waits}" if waits else "")


def view_words(host: Host) -> str:
    view = host.core.view if host.core is not None else None
    if view is None:
        return "no view"
    teaching = "+".join(member.peer_id for member in view.learners)
    voters = "+".join(member.peer_id for member in view.voters)
    return f"view {view.view_epoch} {voters}" + (f" teaching {teaching}" if teaching else "")


def expect(world: World, name: str, words: list[str]) -> None:
    """Raise Violation unless it is so."""
    host = world.hosts[name]
    wanted, kind = " ".join(words), words[0]
    found = {
        "view": lambda: view_words(host),
        "no": lambda: view_words(host),
        "at": lambda: "at {} {}".format(*host.held.ref.lineage),
        "behind": lambda: _state(host),
        "current": lambda: _state(host),
        "waits": lambda: wanted if wanted[6:] in _waits(host) else f"waits {_waits(host)}",
        "counted": lambda: f"counted {host.held.ledger.samples_total}",
        "skipped": lambda: f"skipped {host.held.ledger.progress()[1]}",
        "epoch": lambda: f"epoch {host.held.ledger.epoch}",
        "boot": lambda: f"boot {host.boot}",
        "claims": lambda: f"claims {size(host.claims())}",
        "finished": lambda: host.outcome or "goes on",
        "stopped": lambda: host.outcome or "goes on",
    }[kind]()
    if found != wanted:
        raise Violation(0, f"{name} is expected: {wanted}; found: {found}")


def _state(host: Host) -> str:
    return "behind" if host.core is None or host.core.behind or host.core.view is None else "current"


def _waits(host: Host) -> str:
    return (host.core.waiting_for() if host.core is not None else "") or "for nothing"
