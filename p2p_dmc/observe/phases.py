"""Instants at which a test strikes this process exactly (tests/soak/chaos.py). In a user's run nothing happens.

`reach` is called where a peer does something that a crash must not spoil. When the environment variable `DMC_PHASES`
names a folder, a file in it that has the phase's name is an order (`give`): ``ACTION COUNT DELAY_MS``. At the
COUNT-th time since the order is there the process takes it away, adds a line to the file ``proof`` in the same folder,
and strikes itself, DELAY_MS milliseconds later while it goes on.

Actions: ``kill`` (SIGKILL of this process; an agent takes its trainer with it), ``kill-both`` (a trainer kills its
agent, then itself), ``stop`` (SIGSTOP of this process), ``hold`` (this thread alone stands still, as at a slow disk,
until the folder has a file ``go-on``).
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

from p2p_dmc.wire.trainer_messages import ENV_AGENT

ENV_ORDERS = "DMC_PHASES"
ACTIONS = ("kill", "kill-both", "stop", "hold")
HOLD_LOOK_S = 0.01

AGENT_PHASES = {
    "before-header": "the local steps are done, no header of the round is said",
    "header-said": "this peer's header is said",
    "complete": "the round is recorded here; that others have it is not known",
    "proposing": "this peer has frozen and said its first word of an attempt",
    "promising": "what is to be said is not on disk yet",
    "promised": "it is on disk and not said yet",
    "installed": "a view is agreed and on disk; nothing of it has begun",
    "opening": "the start state is held; the trainer has not been told of the view",
    "serving": "another peer asks this one for a part of a state",
    "adopting": "a part of a state has come from another peer",
    "learning": "a learner keeps what a round did; its header of the next one is not said",
    "replayed": "a learner holds the state after a round; nobody knows that it has caught up",
    "checkpointing": "a checkpoint is written under its temporary name",
    "checkpointed": "it has its name; the promises on disk do not know",
    "leaving": "this peer leaves and says no header any more; the round whose header it has said is not over",
    "put-off": "the farewell of another peer waits here for the end of a reduction",
    "stopped": "the state at which the run is stopped is on disk; this peer has told nobody",
    "all-stopped": "all voters were heard to have stopped; this peer's record does not say that it keeps its vote",
    "aside": "this peer stands aside; it has not said so",
}
"""Reached by agents."""

TRAINER_PHASES = {
    "rendezvous": "this peer's address is published; the others' are not read",
    "reducing": "the all-reduce is under way",
    "reduced": "the result is in scratch; the agent has not been asked",
}
"""Reached by trainers."""

_folder = os.environ.get(ENV_ORDERS, "")
_reached: dict[tuple[str, int], int] = {}


def give(folder: Path, phase: str, action: str, count: int = 1, delay_ms: int = 0) -> None:
    """Order that whoever looks into ``folder`` is struck at this phase; in place of an earlier order for it."""
    if phase not in AGENT_PHASES | TRAINER_PHASES or action not in ACTIONS:
        raise ValueError(f"no such order: {phase!r}, {action!r}")
    draft = folder / f".{phase}"
    draft.write_text(f"{action} {count} {delay_ms}")
    draft.replace(folder / phase)


def reach(phase: str) -> None:
    """This process is at ``phase`` now."""
    if _folder:
        _obey(Path(_folder), phase)


def _obey(folder: Path, phase: str) -> None:
    """Carry out an order for this phase, if there is one and its time has come."""
    order = folder / phase
    try:
        given_ns, (action, count, delay_ms) = order.stat().st_mtime_ns, order.read_text().split()
        times = _reached[phase, given_ns] = _reached.get((phase, given_ns), 0) + 1
        if times < int(count):
            return
        order.unlink()
    except FileNotFoundError:
        return  # there is none, or another thread was here at the same time
    _prove(folder, phase=phase, action=action, count=times, delay_ms=int(delay_ms))
    if int(delay_ms):
        threading.Thread(target=_strike, args=(action, int(delay_ms) / 1000), daemon=True).start()
    else:
        _strike(action, 0.0)


def _prove(folder: Path, **facts: object) -> None:
    """One line, with one write, before the deed."""
    who = "trainer" if ENV_AGENT in os.environ else "agent"
    line = json.dumps({"time": time.time(), "pid": os.getpid(), "process": who, **facts}) + "\n"
    descriptor = os.open(folder / "proof", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def _strike(action: str, after_s: float) -> None:
    if after_s:
        time.sleep(after_s)
    if action == "hold":
        while not Path(_folder, "go-on").exists():
            time.sleep(HOLD_LOOK_S)
        return
    parent = os.getppid()
    if action == "kill-both" and ENV_AGENT in os.environ and parent > 1:
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGSTOP if action == "stop" else signal.SIGKILL)
