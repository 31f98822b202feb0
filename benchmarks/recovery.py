"""From a fault to the survivors' next complete round, beyond the round's own time; beside three neighbours.

N peers on this machine train one linear layer (64 MiB of float32 parameters) and average after each local step. At
a random moment of a round something happens to one of them; what counts is how much longer the round is that the
fault fell into: from the survivors' last complete round in the old group to the first one that all of them complete
in the group that follows, the slowest survivor's. The peer is brought back, and after ten calm seconds comes the
next fault.

  tree      SIGKILL to everything of a peer: agent and trainer
  trainer   SIGKILL to the trainer alone; the agent lives (torchft and hivemind have no such pair: not measured)
  leave     a peer is asked to leave: Ctrl-C, SIGTERM for the neighbours
  silence   SIGSTOP to everything of a peer: it says nothing, its connections stay

Neighbours are torchft, hivemind and torchrun elastic with DDP, all with time-outs tuned down (see "settings"), each
in an environment of its own under --envs, made when it is missing. Their central processes (lighthouse, first DHT
node, rendezvous store) are apart and never hurt. "Complete" is their committed step, their averaging in a group of
all survivors, their DDP step. The cores are shared by all peers: compare contestants with each other, not with other
machines. A round of fewer peers is shorter here, so a figure may be below zero.

With --quick, changes follow each other without the calm, and the pause that damps them is in the figures: they show
that it works, not how fast. A long measurement can be made in parts: --budget-s, and --resume with the same --out.

Keys:
  conditions   of the last part of the measurement: command, date, cores, load_before, python, torch, kernel
  model_bytes  of parameters
  ours, torchft, hivemind, torchrun
               either {"skipped": why}, or settings, version and for each N ("4", "8") for each kind a cell
  cell         trials      how many faults
               median_s    median of the disturbed rounds, minus round_s
               max_s       the longest of them, minus round_s
               round_s     median of the undisturbed rounds of all N
               after_s     [from each fault to the slowest survivor's next complete round]
               disturbed_s [length of each disturbed round]
               rounds_s    [lengths of undisturbed rounds]
               noticed_s   ours: [from each fault to the first survivor's notice of it: lost, left or dead]
               hung        faults after which the others did not go on, or not all came together again, in time
               not_measured  instead of all these: why
  violations   ours: digests of a round that differ, a sample lost or counted twice, a hang
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench
from recovery_kit.contestant import KINDS, Contestant, HungError, run_trials
from recovery_kit.envs import UnavailableError, python_of, version_of
from recovery_kit.foreign import NEIGHBOURS, Foreign
from recovery_kit.ours import Ours
from recovery_kit.steps import figures

WIDTH, QUICK_WIDTH = 4096, 1024
QUICK_S, QUICK_TRIALS, QUICK_PATIENCE_S = 80.0, 2, 25.0
CALM_S, QUICK_CALM_S = 10.0, 1.0
"""Between the last change of members and the next fault: changes in a row are damped on purpose."""
MOST_HUNG = 2
"""A neighbour that hung so often in one cell is left alone."""
NAMES = ("ours", *(neighbour.name for neighbour in NEIGHBOURS))
RAW = ("disturbed_s", "after_s", "rounds_s", "noticed_s")


class Measurement:
    """All cells, as far as they have been measured."""

    def __init__(self, options: argparse.Namespace, result: dict[str, Any]) -> None:
        self.options = options
        self.result = result
        self.violations: list[str] = list(result.get("violations", []))
        self.until = time.monotonic() + options.budget_s

    def cell(self, name: str, peers: int, kind: str) -> dict[str, Any]:
        of_name = self.result.setdefault(name, {})
        empty = {"trials": 0, "hung": 0, **{key: [] for key in RAW}}
        found: dict[str, Any] = of_name.setdefault(str(peers), {}).setdefault(kind, empty)
        return found

    def missing(self, name: str, peers: int, kind: str) -> int:
        """Trials still to do."""
        cell = self.cell(name, peers, kind)
        if "not_measured" in cell or cell["hung"] >= (1 if name == "ours" else MOST_HUNG):
            return 0
        wanted = self.options.trials if name == "ours" else self.options.neighbour_trials
        return max(0, int(wanted) - int(cell["trials"] + cell["hung"]))

    def measure(self, name: str, peers: int, contestant: Any, kinds: Sequence[str]) -> None:
        """The trials of these kinds, one cluster for all; a hang ends it."""
        with contestant:
            kind = kinds[0]
            try:
                contestant.start()
                for kind in kinds:
                    self._trials(name, peers, contestant, kind)
            except HungError as error:
                self.cell(name, peers, kind)["hung"] += 1
                bench.say(f"{name}, {peers} peers, {kind}: {error}")
                if name == "ours":
                    self.violations.append(f"{peers} peers, {kind}: {str(error).partition(chr(10))[0]}")
            self.violations += [f"{peers} peers: {line}" for line in contestant.violations()]

    def _trials(self, name: str, peers: int, contestant: Contestant, kind: str) -> None:
        cell, count = self.cell(name, peers, kind), self.missing(name, peers, kind)
        rng = random.Random(f"{self.options.seed} {name} {peers} {kind} {cell['trials']}")
        calm_s = QUICK_CALM_S if self.options.quick else CALM_S
        done = run_trials(contestant, kind, count, rng, self.until, calm_s)
        for trial in done:
            cell["disturbed_s"].append(round(trial.disturbed_s, 3))
            cell["after_s"].append(round(trial.after_s, 3))
            cell["rounds_s"] += [round(s, 3) for s in trial.rounds_s]
            if trial.noticed_s is not None:
                cell["noticed_s"].append(round(trial.noticed_s, 3))
            cell.update(figures(cell))
            bench.say(
                f"{name}, {peers} peers, {kind} {cell['trials']}: {trial.after_s:.2f} s after the fault, "
                f"the round took {trial.disturbed_s:.2f} s; median beyond {cell['median_s']:.2f} s"
            )
            self.save()

    def save(self) -> None:
        """What has been measured survives an interruption."""
        if self.options.out is not None:
            self.options.out.parent.mkdir(parents=True, exist_ok=True)
            self.options.out.write_text(json.dumps(self.result | {"violations": self.violations}, indent=1))


def work(measurement: Measurement) -> None:
    """Everything that is still missing, in the order of the options."""
    options = measurement.options
    for name in options.only:
        for peers in options.peers:
            if time.monotonic() > measurement.until:
                return
            make = maker(measurement, name, peers)
            while make is not None and time.monotonic() < measurement.until:
                kinds = [kind for kind in options.kinds if measurement.missing(name, peers, kind)]
                if not kinds:
                    break
                measurement.measure(name, peers, make(), kinds)


def maker(measurement: Measurement, name: str, peers: int) -> Any:
    """What makes this contestant's peers; None when it has to be skipped."""
    options, of_name = measurement.options, measurement.result.setdefault(name, {})
    task = (peers, options.width, 0.0, options.seed)
    if name == "ours":
        return lambda: patient(Ours(*task), options)
    neighbour = next(n for n in NEIGHBOURS if n.name == name)
    try:
        python = python_of(options.envs, name, install=not options.quick)
    except UnavailableError as error:
        measurement.result[name] = {"skipped": str(error)}
        bench.say(f"{name} is skipped: {error}")
        return None
    of_name.pop("skipped", None)
    of_name |= {"version": version_of(python, name), "settings": neighbour.settings}
    for kind in options.kinds:
        if kind not in neighbour.kinds:
            cells = of_name.setdefault(str(peers), {})
            cells[kind] = {"not_measured": "a peer is one process: the same as tree"}
    return lambda: patient(neighbour(python, *task), options)


def patient(contestant: Ours | Foreign, options: argparse.Namespace) -> Ours | Foreign:
    """With --quick nobody is waited for long."""
    if options.quick:
        contestant.patience_s = QUICK_PATIENCE_S
    return contestant


def report(result: dict[str, Any]) -> str:
    """A row for each cell."""
    rows = [
        ["", "peers", "fault", "trials", "round s", "beyond: median s", "max s", "after the fault: median s"]
    ]
    for name in NAMES:
        for peers, cells in sorted(result.get(name, {}).items()):
            for kind, cell in cells.items() if isinstance(cells, dict) else ():
                if cell.get("trials"):
                    after = sorted(cell["after_s"])[len(cell["after_s"]) // 2]
                    figures = [f"{cell[key]:.2f}" for key in ("round_s", "median_s", "max_s")]
                    rows.append([name, peers, kind, str(cell["trials"]), *figures, f"{after:.2f}"])
    return bench.table(rows)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = bench.parser(__doc__, "recovery")
    cache = Path.home() / ".cache" / "p2p_dmc" / "recovery"
    parser.add_argument("--peers", type=int, nargs="+", metavar="N", help="default 4 8; --quick: 4")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--trials", type=int, help="of each kind for each N (default 20)")
    parser.add_argument(
        "--neighbour-trials", type=int, help="the same for each neighbour (default: as --trials)"
    )
    parser.add_argument("--envs", type=Path, metavar="DIR", default=cache, help=f"default {cache}")
    parser.add_argument("--resume", action="store_true", help="keep what --out has, add what is missing")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin no trial after so long")
    options = parser.parse_args(arguments)
    options.peers = options.peers or ([4] if options.quick else [4, 8])
    options.trials = options.trials or (QUICK_TRIALS if options.quick else 20)
    options.neighbour_trials = options.neighbour_trials or (1 if options.quick else options.trials)
    options.width = QUICK_WIDTH if options.quick else WIDTH
    if options.quick:
        options.budget_s = min(options.budget_s, QUICK_S)
    if min(options.peers) < 3 or options.trials < 1:
        raise bench.BenchError("--peers 3 or more: two survivors make a round; --trials 1 or more")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # no peer outlives this program
    result: dict[str, Any] = {}
    if options.resume and options.out is not None and options.out.exists():
        result = json.loads(options.out.read_text())
    result |= {"conditions": bench.conditions(), "model_bytes": 4 * options.width**2}
    measurement = Measurement(options, result)
    work(measurement)
    print(report(result))
    violations = measurement.violations
    return bench.finish(options, {k: v for k, v in result.items() if k != "violations"}, violations)


if __name__ == "__main__":
    bench.run(main)
