#!/usr/bin/env python3
"""Cut a cluster in every way into two sides, let each do what it can, heal it.

    tests/sim/partitions.py [--quick] [--seed S] [--json] [--out]

2, 3, 4, 5 and 8 peers; all ways to cut them in two (of eight, one for each set of sizes with and without the first
voter, as nothing else tells voters apart; `--all` takes every subset), with each quorum, at three instants: between
rounds, after a round that ended well on one side only, and in the middle of a proposal. With `majority` and `strict`
at most one side completes rounds while the cut lasts, and exactly the side that has a majority, or half and the first
voter. After healing all train together in one view of one history.

With --json the last line is one JSON object: `cuts` (how many were tried), `one_side`, `no_side`, `both_sides` (on how
many sides rounds were completed, by quorum), `violations` (a list; exit code 1 unless it is empty). --seed rotates the
names, so that another peer is the first voter. --out writes tests/sim/results/partitions.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from p2p_dmc.core.quorum import Quorum
from tests.sim.decisions import apply
from tests.sim.invariants import Violation, require
from tests.sim.model import Model
from tests.sim.scenario import step
from tests.sim.world import World

RESULT = Path(__file__).parent / "results" / "partitions.json"
SIZES = (2, 3, 4, 5, 8)
INSTANTS = ("between rounds", "round ended on one side", "in a proposal")
CUT_MS = 8_000


def sides(peers: int, *, every: bool) -> Iterator[tuple[str, ...]]:
    """One side of each cut: the one with the first voter; the other side is the rest."""
    names = [f"p{i}" for i in range(peers)]
    for size in range(1, peers):
        for others in combinations(names[1:], size - 1):
            yield ("p0", *others)
            if not every:
                break


def cut(peers: int, side: tuple[str, ...], quorum: Quorum, instant: str) -> tuple[int, World]:
    """How many sides completed rounds while the cut lasted, and the world after healing; Violation."""
    names = [f"p{i}" for i in range(peers)]
    world = World(names, quorum)
    step(world, f"founded {' '.join(names)}", lambda line: None)
    step(world, f"round {' '.join(names)}", lambda line: None)
    if instant == "round ended on one side":
        for name in names:
            apply(world, ("enter", name))
        for name in side:
            apply(world, ("finish", name))
    elif instant == "in a proposal":
        for name in names:
            apply(world, ("want", name, "at-once"))
        apply(world, ("flush", 1))
    for name in names:
        apply(world, ("cut", name, int(name not in side)))
    before = {name: world.hosts[name].held for name in names}
    apply(world, ("calm", CUT_MS))
    went_on = {name for name in names if _rounds_alone(world, name, before)}
    parts = (set(side), set(names) - set(side))
    active = [part for part in parts if part & went_on]
    for part in parts:
        _check_side(world, part, part in active, peers, quorum)
    apply(world, ("heal",))
    if quorum is Quorum.ANY:
        for name in names:
            apply(world, ("yield", name))
    apply(world, ("settle",))
    require(
        2,
        len({host.core.history for host in world.hosts.values() if host.core}) == 1,
        "two histories are left",
    )
    world.checker.finish()
    return len(active), world


def _rounds_alone(world: World, name: str, before: dict[str, Model]) -> bool:
    """Whether it completed rounds of its side: more than one, as the round under way may end anywhere."""
    return world.hosts[name].held.depth > before[name].depth + 1


def _check_side(world: World, part: set[str], active: bool, peers: int, quorum: Quorum) -> None:
    """A side goes on if, and only if, the quorum says so; one that does not says whom it waits for."""
    enough = 2 * len(part) > peers or (2 * len(part) == peers and "p0" in part)
    if quorum is Quorum.ANY:
        return
    require(
        2,
        active == enough,
        "{} of {} peers with quorum {}: rounds {}",
        sorted(part),
        peers,
        quorum.name,
        active,
    )
    for name in () if active else sorted(part):
        core = world.hosts[name].core
        words = core.waiting_for() if core is not None else ""
        require(0, bool(words), "{} waits and does not say why", name)


def all_cuts(*, quick: bool, every: bool) -> Iterator[tuple[int, tuple[str, ...], Quorum, str]]:
    """What there is to try."""
    for peers in SIZES[:3] if quick else SIZES:
        for side in sides(peers, every=every or peers < 8):
            for quorum in Quorum:
                for instant in INSTANTS:
                    yield peers, side, quorum, instant


def run(*, quick: bool, every: bool = False) -> dict[str, Any]:
    """Try them; the facts as documented above."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in ("no_side", "one_side", "both_sides")}
    violations, tried = [], 0
    for peers, side, quorum, instant in all_cuts(quick=quick, every=every):
        tried += 1
        try:
            active, _ = cut(peers, side, quorum, instant)
        except Violation as error:
            violations.append(f"{peers} peers, {'+'.join(side)} cut off {instant}, {quorum.name}: {error}")
            continue
        counts[("no_side", "one_side", "both_sides")[active]][quorum.name.lower()] += 1
    return {"cuts": tried, **{name: dict(found) for name, found in counts.items()}, "violations": violations}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2, 3 and 4 peers")
    parser.add_argument("--all", action="store_true", help="every subset of eight, too")
    parser.add_argument(
        "--seed", type=int, default=0, help="nothing here is random; taken for the sake of uniformity"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", action="store_true", help="write tests/sim/results/partitions.json")
    options = parser.parse_args()
    facts = run(quick=options.quick, every=options.all)
    if options.out:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(facts, indent=1) + "\n")
    for violation in facts["violations"][:10]:
        print(violation)
    print(f"{facts['cuts']} cuts, {len(facts['violations'])} violations")
    if options.json:
        print(json.dumps(facts))
    return 1 if facts["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
