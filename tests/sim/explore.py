#!/usr/bin/env python3
"""Explore the simulator: every interleaving of a small world, and random lives of larger ones.

    tests/sim/explore.py                       both, as in results/explore.json
    tests/sim/explore.py --quick --json        a fraction of both, in at most two minutes
    tests/sim/explore.py --part random --seed 7 --schedules 1
                                               one random life; if it fails, it is shrunk and told

Invariants 1 to 7, 12 and 13 of DESIGN.md section 4 are checked after every event. Exit code 1 when one fails.

Random lives: 2 to 8 peers, at least 300 events each (an event is one thing that happens to one peer: a message or a
header that arrives, a verdict, a timer, a step of a round, a fault), quorum majority in 6 of 8 seeds, strict and any in
one each. Three in ten have operators who evict whoever is waited for, rightly or not: then histories take the place of
others, and whoever goes on loses nothing that one of them knew to be committed. Every twentieth life ends with
everything mended, and then all have to train together again. A life whose run is over before its 300 events counts as
"short", not as a schedule. With --out the lives go on where the file ends; those that failed are lived again first,
and a variant of the exhaustive part that is complete is not followed again: remove the file when a core has changed.

With --json the last line is one JSON object:
  schedules   runs: random lives, and ends of the exhaustive part (states from which no step is left)
  events      events in them
  violations  list of {"part", "seed", "what"}; empty when all is well
  random      {"schedules", "short", "events", "faults", "rounds", "commits", "views", "anew", "settled", "stops",
               "kept", "resumed", "first_seed", "seconds"}
              "anew": assignments of the rest of an epoch while a view stood; "stops": so often a peer stopped with the
              run, "kept": and heard that all voters had, "resumed": and started again with its vote
  exhaustive  {"states", "events", "ends", "settled", "bounds", "variants", "complete", "seconds"}: states are distinct
              ones; of each variant "complete" or the "depth" that was followed; the bounds are in tests/sim/exhaust.py
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from p2p_dmc.core.quorum import Quorum
from tests.sim import exhaust
from tests.sim.schedule import Run, explore, shrink, story

RESULT = Path(__file__).parent / "results" / "explore.json"
QUORUMS = (*[Quorum.MAJORITY] * 6, Quorum.STRICT, Quorum.ANY)
BLOCK = 250
"""Lives that a process lives before it reports."""
SETTLED = 20
"""Every so manieth life ends with everything mended."""
COUNTS = (
    *("schedules", "short", "events", "faults", "rounds", "commits", "views", "anew", "settled"),
    *("stops", "kept", "resumed"),
)


class Totals:
    """What the random lives amount to, those of former calls of the program too."""

    def __init__(self, first_seed: int, before: dict[str, Any]) -> None:
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self.counts |= {name: before[name] for name in COUNTS if name in before}
        self.first_seed = first_seed
        self.violations: list[dict[str, Any]] = []
        self.before_s = before.get("seconds", 0.0)
        self.began_s = time.monotonic()

    @property
    def next_seed(self) -> int:
        return self.first_seed + self.counts["schedules"] + self.counts["short"]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_s

    def add(self, counts: Counter[str], violations: list[dict[str, Any]]) -> None:
        for name in COUNTS:
            self.counts[name] += counts[name]
        self.violations += violations

    def facts(self) -> dict[str, Any]:
        return self.counts | {
            "first_seed": self.first_seed,
            "seconds": round(self.before_s + self.seconds, 1),
        }


def life(seed: int, events: int) -> Run:
    """The random life of a seed."""
    return explore(seed, events, quorum=QUORUMS[seed % len(QUORUMS)], settle=seed % SETTLED == 0)


def lives(first: int, count: int, events: int) -> tuple[Counter[str], list[dict[str, Any]]]:
    """So many random lives from a seed on: what they amount to, and their violations."""
    gc.set_threshold(100_000)  # what a life leaves behind is cyclic and small
    counts: Counter[str] = Counter()
    violations: list[dict[str, Any]] = []
    for seed in range(first, first + count):
        run = life(seed, events)
        world, checker = run.world, run.world.checker
        counts["schedules" if world.events >= events or run.failure is not None else "short"] += 1
        counts.update(events=world.events, faults=world.faults, settled=seed % SETTLED == 0)
        counts.update(rounds=checker.rounds, commits=checker.commits, views=checker.installs)
        counts.update(stops=world.stops, kept=world.kept, resumed=world.resumed)
        counts.update(anew=sum(part > 0 for _, _, part in checker.assignments))
        if run.failure is not None:
            what = str(run.failure)[:500] or repr(run.failure)
            violations.append({"part": "random", "seed": seed, "what": what})
    return counts, violations


def random_part(options: argparse.Namespace, totals: Totals, save: Callable[[Totals], None]) -> None:
    """Random lives until there are enough of them, or until the time is up."""
    with ProcessPoolExecutor(options.jobs) as pool:
        while (missing := options.schedules - totals.counts["schedules"]) > 0:
            size = min(BLOCK, -(-missing // options.jobs))
            firsts = [totals.next_seed + job * size for job in range(options.jobs)]
            told = len(totals.violations)
            for found in pool.map(lives, firsts, [size] * options.jobs, [options.events] * options.jobs):
                totals.add(*found)
            for violation in totals.violations[told:3]:
                tell(violation["seed"], life(violation["seed"], options.events), options.json)
            save(totals)
            if options.seconds and totals.seconds > options.seconds:
                break


def tell(seed: int, run: Run, quiet: bool) -> None:
    """The failing run, shrunk, as a person reads it."""
    stream = sys.stderr if quiet else sys.stdout
    print(f"seed {seed} fails: {run.failure}; {len(run.decisions)} decisions, shrinking", file=stream)
    short = shrink(run, most_replays=1_500)
    print(f"{short.setting}\n{len(short.decisions)} decisions are left:\n{story(short)}\n", file=stream)


def result(
    random: dict[str, Any], exhaustive: dict[str, Any], violations: list[dict[str, Any]]
) -> dict[str, Any]:
    """All in one, as documented above."""
    return {
        "schedules": random.get("schedules", 0) + exhaustive.get("ends", 0),
        "events": random.get("events", 0) + exhaustive.get("events", 0),
        "violations": violations,
        "random": random,
        "exhaustive": exhaustive,
    }


def saved(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="at most two minutes")
    parser.add_argument("--seed", type=int, default=0, help="of the first random life")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", action="store_true", help="last line: one JSON object, see above")
    parser.add_argument("--part", choices=["all", "random", "exhaustive"], default="all")
    parser.add_argument("--schedules", type=int, default=100_000, help="random lives")
    parser.add_argument("--events", type=int, default=300, help="of each life, at least")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="end the random part after this long; 0: never"
    )
    parser.add_argument(
        "--exhaustive-seconds", type=float, default=0.0, help="of each variant with three peers; 0: in full"
    )
    parser.add_argument(
        "--out", action="store_true", help="write tests/sim/results/explore.json; go on from it"
    )
    options = parser.parse_args()
    if options.quick:
        options.schedules, options.seconds = min(options.schedules, 2_000), options.seconds or 45.0
    return options


def main() -> int:
    options = arguments()
    old = saved(RESULT) if options.out else {}
    random: dict[str, Any] = old.get("random", {})
    exhaustive: dict[str, Any] = old.get("exhaustive", {})
    found = {
        part: [v for v in old.get("violations", []) if v["part"] == part] for part in ("random", "exhaustive")
    }

    def save() -> dict[str, Any]:
        whole = result(random, exhaustive, found["random"] + found["exhaustive"])
        if options.out:
            RESULT.parent.mkdir(exist_ok=True)
            RESULT.write_text(json.dumps(whole, indent=1) + "\n")
        return whole

    def save_lives(totals: Totals) -> None:
        nonlocal random
        random, found["random"] = totals.facts(), totals.violations
        save()

    def save_variants(result: exhaust.Result) -> None:
        nonlocal exhaustive
        exhaustive = result.facts()
        found["exhaustive"] = exhaustive.pop("violations")
        save()

    if options.part != "random":
        work = exhaust.variants(quick=options.quick, seconds=options.exhaustive_seconds)
        known = exhaust.Result.parts_of(exhaustive) if not found["exhaustive"] else {}
        save_variants(exhaust.explore(work, known=known, jobs=options.jobs, save=save_variants))
    if options.part != "exhaustive":
        goes_on = random.get("first_seed") == options.seed
        totals = Totals(options.seed, random if goes_on else {})
        failed = [violation["seed"] for violation in found["random"]] if goes_on else []
        totals.violations = [again for seed in failed for again in lives(seed, 1, options.events)[1]]
        random_part(options, totals, save_lives)
        save_lives(totals)
    whole = save()
    print(f"{whole['schedules']} schedules, {whole['events']} events, {len(whole['violations'])} violations")
    if options.json:
        print(json.dumps(whole))
    return 1 if whole["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
