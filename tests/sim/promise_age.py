#!/usr/bin/env python3
"""How often the age of a crashed member's promises could matter with quorum `majority`.

    tests/sim/promise_age.py [--quick] [--seed S] [--lives N] [--json] [--out]

A member that was seen to crash is counted out with the promises of its that the witness has, which are at least as new
as its last sign of life told of (`verdict(..., version=)`), and not necessarily its last ones. It matters when the dead
one had gone on without the witness and nobody left knows: cut off for a suspicion time, a quorum alone (the first of
two), killed, and its machine back on the network within the second one. `both_went_on` says of this very case whether
the witness goes on, too.

Random lives, in which somebody is deaf on one ear more often than in explore.py, count how often a view was decided
so, how often with promises that were older than the dead one's last, and how often the decision would have been
another one with the last ones known.

With --json the last line is one JSON object, with one object for each of three rules:
  shell       what the product does: a refusal counts as a crash within a suspicion time of the last sign of life, once
              promises as new as that told of are here
  blind       the same, with whatever promises have arrived
  late        as shell, but within two suspicion times
Each of them has, of the same lives:
  both_went_on         the case above: the witness goes on beside what the dead one has on its disk
  lives, events
  crashes_seen         verdicts "crashed"
  behind_last_word     ... of which the witness's promises were older than the dead one's last
  behind_last_ack      ... of which they were older even than its last sign of life told of, at the time of the verdict
  decisions            attempts that were decided, at any peer
  counted_a_crash      ... that hold only because somebody seen to crash was left out
  with_old_promises    ... of these, with promises older than the dead one's last
  outcome_differs      ... of these, that would not have held, or from another state, with its last promises
  lost_from_disk       ... of these, in which the dead one has a checkpoint of a committed round that the new view lacks
  violations           lives in which an invariant failed (exit code 1 unless it is 0 under `shell`)
--out writes tests/sim/results/promise_age.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from p2p_dmc.core import agreement_machine
from p2p_dmc.core.agreement_messages import Propose, Stopped
from p2p_dmc.core.quorum import Decision, Quorum, decide, judge
from tests.sim import schedule
from tests.sim.mutants import mutant
from tests.sim.scenario import step
from tests.sim.weather import Weather
from tests.sim.world import World

COUNTED: tuple[str, ...] = (
    *("crashes_seen", "behind_last_word", "behind_last_ack", "decisions"),
    *("counted_a_crash", "with_old_promises", "outcome_differs", "lost_from_disk"),
)
WORST_CASE = (
    "founded a b, round a b, flush, probe a b, probe b a, cut b, silent b / a, round a, round a, checkpoint a, "
    "crash a, heal, refused b a, pause 500"
)
RULES = ("shell", "blind", "late")
RESULT = Path(__file__).parent / "results" / "promise_age.json"


class Count:
    """Looks at every decision of one life at a time."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.world: World | None = None

    def decide(self, words: Sequence[Propose], quorum: Quorum) -> Decision:
        """The product's decision, looked at."""
        decision = decide(words, quorum)
        self.found["decisions"] += 1
        if decision.holds and quorum is Quorum.MAJORITY and self._counted_a_crash(words):
            self.found["counted_a_crash"] += 1
            known = self._with_last_promises(words)
            if known != list(words):
                self.found["with_old_promises"] += 1
                better = decide(known, quorum)
                if not better.holds or better.start != decision.start:
                    self.found["outcome_differs"] += 1
                    self.found["lost_from_disk"] += self._loses_a_checkpoint(words, decision)
        return decision

    def _counted_a_crash(self, words: Sequence[Propose]) -> bool:
        withdrawn = [record for word in words for record in word.seen if record.withdrawn]
        return not judge(words, []).holds and not judge(words, withdrawn).holds

    def _with_last_promises(self, words: Sequence[Propose]) -> list[Propose]:
        return [replace(word, seen=tuple(map(self._last, word.seen))) for word in words]

    def _last(self, record: Stopped) -> Stopped:
        """What the dead one had promised at its death."""
        assert self.world is not None
        grave: Stopped | None = self.world.graves.get(record.member)
        if record.withdrawn or grave is None or (grave.base, grave.pending) == (record.base, record.pending):
            return record
        return grave

    def _loses_a_checkpoint(self, words: Sequence[Propose], decision: Decision) -> bool:
        assert self.world is not None
        crashed = {record.member.peer_id for word in words for record in word.seen if not record.withdrawn}
        return any(
            host.checkpoint is not None and host.checkpoint.ref.lineage > decision.start.lineage
            for host in self.world.hosts.values()
            if host.peer_id in crashed
        )


class OneEar(Weather):
    """Somebody is deaf on one ear, or suspects somebody, more often, and crashes are seen soon."""

    def __init__(self, world: World, rng: Any) -> None:
        super().__init__(world, rng)
        more = [
            (lambda: self._two("deaf"), 1.0),
            (lambda: self._two("suspect"), 4.0),
            (lambda: self._two("probe"), 6.0),
            (lambda: self._one("crash"), 1.0),
            (self._refused, 4.0),
            (lambda: self._if("checkpoint", lambda h: h.committed is not h.checkpoint), 3.0),
        ]
        for maker, weight in more:
            self.makers.append(maker)
            self.bounds.append(self.bounds[-1] + weight)


def measure(first_seed: int, lives: int, rule: str) -> dict[str, Any]:
    """So many lives under one of the rules; the facts as documented above."""
    count = Count()
    began = World.__init__

    def begin(world: World, *arguments: Any, **named: Any) -> None:
        began(world, *arguments, **named)
        world.detector.contact = 2 if rule == "late" else 1
        count.world = world

    found, events, violations = count.found, 0, 0
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(agreement_machine, "decide", count.decide))
        stack.enter_context(mock.patch.object(World, "__init__", begin))
        stack.enter_context(mock.patch.object(schedule, "Weather", OneEar))
        stack.enter_context(mutant("last_promises" if rule == "blind" else None))
        for seed in range(first_seed, first_seed + lives):
            run = schedule.explore(seed, 400, settle=seed % 4 == 0)
            ages = run.world.detector.ages
            found["crashes_seen"] += ages.crashes
            found["behind_last_word"] += ages.behind_the_dead
            found["behind_last_ack"] += ages.behind_the_ack
            events += run.world.events
            violations += run.failure is not None
    counts = {name: found[name] for name in COUNTED}
    return {"lives": lives, "events": events, **counts, "violations": violations}


def both_go_on(rule: str) -> bool:
    """Whether b goes on beside what a did alone, behind a cut cable, before it died."""
    world = World(["a", "b"])
    world.detector.contact = 2 if rule == "late" else 1
    with mutant("last_promises" if rule == "blind" else None):
        for command in WORST_CASE.split(", "):
            step(world, command, lambda line: None)
    core = world.hosts["b"].core
    return core is not None and core.view is not None and core.view.peers == ("b",)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="100 lives under each rule")
    parser.add_argument("--seed", type=int, default=0, help="of the first life")
    parser.add_argument("--lives", type=int, default=3_000, help="under each rule")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", action="store_true", help="write tests/sim/results/promise_age.json")
    options = parser.parse_args()
    lives = 100 if options.quick else options.lives
    facts = {rule: {"both_went_on": both_go_on(rule)} | measure(options.seed, lives, rule) for rule in RULES}
    if options.out:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(facts, indent=1) + "\n")
    for rule in RULES:
        print(f"{rule}: " + "; ".join(f"{name} {value}" for name, value in facts[rule].items()))
    if options.json:
        print(json.dumps(facts))
    return 1 if facts["shell"]["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
