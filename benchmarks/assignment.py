"""How long peers of unequal speed wait for each other, by what they are given and the steps of their rounds.

Each peer is given shards by its speed, the rest is shared out anew when they would not end together, and a faster peer
takes more local steps in a round.

First a model of the schedule: the product's own assignment, paces and rebalancing, with members that need exactly the
time that their speed says; then real peers on this machine whose steps sleep for as long. In all cases the speeds are
unknown at first. Idle is the time that a peer stands at a round's barrier and waits for the others, as a share of the
epoch; the aim is at most 5 % for every peer.

Keys:
  model       per case: speeds (samples a second), rounds and idle_percent (each member) per epoch, fetched_shards
              (that were trained on by a member which did not hold them), anew (how often the rest was shared out anew)
  real        the same for real peers, without the fetches; epoch_s, the wall time of each epoch
  violations  a sample of a finished epoch that did not count exactly once
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench
from idle import Agent

from p2p_dmc.agent.barrier import BarrierResult
from p2p_dmc.agent.course import Course
from p2p_dmc.agent.work import ProposalPayload, Work, bitmap, encode_payload
from p2p_dmc.core.adacomm import TauPolicy, start
from p2p_dmc.core.agreement_messages import MemberId, StateRef, View
from p2p_dmc.core.braids import unordered
from p2p_dmc.core.ledger import Ledger, check_exact
from p2p_dmc.core.pace import local_steps
from p2p_dmc.observe.audit import audit
from p2p_dmc.observe.seen import header

SCRIPT = Path(__file__).parent / "assignment_kit" / "train_at_speed.py"
BATCH, TAU = 4, 4
SHARDS, PER_SHARD = 64, 600
SPEEDS = (100, 100, 200, 400)
RUN_S = 240.0


# --- the model -------------------------------------------------------------------------------------------


def even(rng: random.Random, members: int) -> list[set[int]]:
    """Two copies of each shard."""
    held: list[set[int]] = [set() for _ in range(members)]
    for shard in range(SHARDS):
        for member in rng.sample(range(members), min(2, members)):
            held[member].add(shard)
    return held


def skewed(rng: random.Random, members: int) -> list[set[int]]:
    """The slowest has everything, the fastest nearly nothing."""
    return [set(range(SHARDS)), *(set(rng.sample(range(SHARDS), 16 >> i)) for i in range(1, members))]


CASES: dict[str, tuple[Callable[[random.Random, int], list[set[int]]], int]] = {
    "1:1:2:4": (even, 0),
    "1:1:2:4, skewed holdings": (skewed, 0),
    "1:1:2:4, the fastest becomes the slowest in the middle of epoch 1": (even, 1),
}


def view_of(holdings: Sequence[set[int]]) -> View:
    members = tuple(MemberId(peer_id=f"{i:032x}", boot=1) for i in range(len(holdings)))
    everything = bitmap(range(SHARDS), SHARDS)
    payloads = tuple(
        encode_payload(
            ProposalPayload(
                view_epoch=0,
                epoch=0,
                part=0,
                claims=(),
                holdings=bitmap(held, SHARDS),
                reachable=everything,
                speed=0,
                full=False,
                strikes=(),
            )
        )
        for held in holdings
    )
    start_state = StateRef(lineage=(0, 0), digest=bytes(16))
    return View(
        history=bytes(16),
        view_epoch=1,
        view_id=bytes(16),
        members=members,
        voters=members,
        start=start_state,
        holders=members,
        payloads=payloads,
        stopped=(),
    )


class Model:
    """One view's rounds, in which everybody needs the time that its speed says."""

    def __init__(self, holdings: Sequence[set[int]], seed: int, epochs: int) -> None:
        self.held = holdings
        self.speeds = list(SPEEDS)
        policy = TauPolicy(kind="fixed", tau0=TAU)
        ledger = Ledger.start(b"d" * 32, [PER_SHARD] * SHARDS, seed, epochs)
        view = view_of(holdings)
        work = Work.for_view(view, 0, ledger, keep_leases=False)
        self.course = Course(view, 0, ledger, work, start(policy), policy)
        self.counted: list[Any] = []
        self.fetched: set[tuple[int, int]] = set()
        self.anew = 0

    def round(self, number: int) -> list[float]:
        """Microseconds that each member computes in it."""
        course, work = self.course, self.course.work
        headers, taken = [], []
        for i, speed in enumerate(self.speeds):
            left = work.assignment.length(i) - work.cursors[i]
            steps, limit_us = local_steps(course.tau.tau, course.paces, i, work.busy)
            if limit_us:
                steps = min(steps, int(limit_us * speed / BATCH / 1e6) + 1)
            samples = min(left, steps * BATCH)
            taken.append(-(-samples // BATCH) * BATCH / speed * 1e6)
            headers.append(header(1, number, samples, -(-samples // BATCH), int(taken[-1])))
        work.lease(headers[0].samples)
        result = BarrierResult(headers=tuple(headers), voting=(True,) * len(headers))
        outcome = course.outcome(result)
        for i, braids in enumerate(outcome.counted):
            self.counted += [(course.ledger.epoch, stretch) for stretch in unordered(braids)]
            shards = {stretch.shard for stretch in unordered(braids)}
            self.fetched |= {(i, shard) for shard in shards - self.held[i]}
        self.anew += outcome.ledger.part > course.ledger.part
        course.take(result, outcome)
        return taken


def modelled(case: str, seed: int, epochs: int) -> tuple[dict[str, Any], list[str]]:
    """What becomes of one case; and what did not count once."""
    place, changes = CASES[case]
    model = Model(place(random.Random(seed), len(SPEEDS)), seed, epochs)
    idle: list[list[float]] = [[0.0] * len(SPEEDS) for _ in range(epochs)]
    spent, rounds = [0.0] * epochs, [0] * epochs
    number = 0
    while not model.course.ledger.done:
        number += 1
        epoch = model.course.ledger.epoch
        if changes and epoch == changes and 2 * sum(model.course.ledger.progress()[:2]) > SHARDS * PER_SHARD:
            model.speeds[-1] = SPEEDS[0] // 2
        taken = model.round(number)
        spent[epoch] += max(taken)
        rounds[epoch] += 1
        for i, one in enumerate(taken):
            idle[epoch][i] += max(taken) - one
    percent = [[round(100 * one / spent[e], 2) for one in idle[e]] for e in range(epochs)]
    facts = {
        "speeds": list(SPEEDS),
        "rounds": rounds,
        "idle_percent": percent,
        "fetched_shards": len(model.fetched),
        "anew": model.anew,
    }
    return facts, check_exact([PER_SHARD] * SHARDS, epochs, model.counted)[:3]


# --- real peers ------------------------------------------------------------------------------------------


def real(folder: Path, seed: int, epochs: int, step_ms: Sequence[float], later_ms: float | None) -> Any:
    """Peers whose steps take so long, the last one another time from the second epoch on; and what is wrong."""
    rng, samples = random.Random(seed), SHARDS * PER_SHARD // 8
    (folder / "data").mkdir()
    for number in range(samples):
        (folder / "data" / f"{number:05}.bin").write_bytes(rng.randbytes(16))
    words = [str(folder / "data"), "--name", "numbers", "--max-shard-size", "64KiB", "--insecure"]
    agents = [Agent(folder / "seeder", "seed-dataset", *words)]
    homes = [folder / f"peer{i}" for i in range(len(step_ms))]
    try:
        address = agents[0].address()
        for home, one in zip(homes, step_ms, strict=True):
            script = [str(SCRIPT), "--step-ms", str(one), "--epochs", str(epochs), "--seed", str(seed)]
            script += ["--per-epoch", str(samples)]
            script += ["--later-ms", str(later_ms)] if later_ms and home == homes[-1] else []
            options = ["--run", "train", "--min-peers", str(len(step_ms)), "--insecure"]
            agents.append(Agent(home, "join", *options, address, *script))
        for agent in agents[1:]:
            if agent.popen.wait(RUN_S):
                raise bench.BenchError(f"a peer failed, see {agent.home}")
        return measured(homes, epochs)
    except subprocess.TimeoutExpired:
        raise bench.BenchError(f"the peers did not finish within {RUN_S:g} s") from None
    finally:
        for agent in agents:
            agent.popen.kill()
            agent.popen.wait()


def measured(homes: Sequence[Path], epochs: int) -> tuple[dict[str, Any], list[str]]:
    """Of the homes' journals."""
    found = audit(homes, "train")
    lines = {home.name: [json.loads(x) for x in (home / "metrics.jsonl").open()] for home in homes}
    idle, epoch_s, rounds = [], [], []
    for epoch in range(epochs):
        first = next(iter(lines.values()))
        mine = [line["time"] for line in first if line["epoch"] == epoch]
        before = [line["time"] for line in first if line["epoch"] == epoch - 1][-1:]
        begun_s = before[0] if before else mine[0]
        spent_s = mine[-1] - begun_s
        epoch_s.append(round(spent_s, 2))
        rounds.append(len(mine))
        idle.append(
            [
                round(100 * sum(x["wait_s"] for x in said if x["epoch"] == epoch) / spent_s, 2)
                for said in lines.values()
            ]
        )
    parts = [(x["epoch"], x["part"]) for x in first]
    anew = sum(a[0] == b[0] and a[1] < b[1] for a, b in itertools.pairwise(parts))
    facts = {"rounds": rounds, "epoch_s": epoch_s, "idle_percent": idle, "anew": anew}
    return facts, [*found.unequal, *found.inexact]


# --- both ------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = bench.parser(__doc__, "assignment")
    made.add_argument("--part", choices=["both", "model", "real"], default="both")
    return made


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    epochs, violations = 3, []
    result: dict[str, Any] = {"model": {}, "real": {}}
    rows = [("case", "epoch", "rounds", "idle % of each peer")]
    if options.part != "real":
        for case in CASES:
            result["model"][case], wrong = modelled(case, options.seed, epochs)
            violations += [f"model, {case}: {one}" for one in wrong]
    if options.part != "model":
        slow_ms = 40.0 if options.quick else 200.0
        cases: dict[str, tuple[list[float], float | None]] = {
            "1:1:2:4": ([slow_ms, slow_ms, slow_ms / 2, slow_ms / 4], None)
        }
        if not options.quick:
            cases["1:1:2:4, the fastest becomes the slowest"] = (cases["1:1:2:4"][0], 2 * slow_ms)
        for case, (step_ms, later_ms) in cases.items():
            bench.say(f"real peers: {case}")
            folder = Path(tempfile.mkdtemp(prefix="dmc-assignment-"))
            try:
                facts, wrong = real(folder, options.seed, 2, step_ms, later_ms)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            result["real"][case] = {"step_ms": step_ms, **facts}
            violations += [f"real, {case}: {one}" for one in wrong]
    for kind in ("model", "real"):
        for case, facts in result[kind].items():
            for epoch, each in enumerate(facts["idle_percent"]):
                percents = "  ".join(f"{one:.1f}" for one in each)
                rows.append((f"{kind}, {case}", str(epoch), str(facts["rounds"][epoch]), percents))
    print(bench.table(rows))
    return bench.finish(options, {**result, "conditions": bench.conditions()}, violations)


if __name__ == "__main__":
    bench.run(main)
