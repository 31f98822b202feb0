"""Whether joining is free: the others' rounds while a peer joins, how long it takes it to catch up, views for many.

Three peers on hosts of their own (bin/netlab; needs root), whose cables are shaped, train one model that each of them
averages after every local step; a step lasts longer than the averaging and leaves the processors alone, as one on a
GPU does. A fourth peer, which has its interpreter and its agent running, becomes ready; the measurement ends some
rounds after it has become a voter. Then, on this machine's loopback, many peers with a small model become ready at once
beside two that train, and the views that it takes until all of them vote are counted.

Keys:
  conditions    command, date, cores, load_before, python, torch, kernel
  one           one joiner on shaped cables:
    model_bytes, rate_mbit, step_s
    before_s, joining_s, after_s   [length of each round of the first peer]: until the joiner is ready, until the
                first round in which it votes is complete, from then on
    comm_s      the same three parts of what each round's reduction took
    median_s    of before_s
    max_ratio   longest of joining_s over median_s; wanted: at most 1.3
    ideal_s     model_bytes over the rate
    caught_up_s from the view in which it learns to the state that it holds
    caught_up_ratio  over ideal_s; wanted: at most 3
    waited_s    from being ready to the view in which it learns: till the end of a round
    joined_s    from being ready to the view in which it votes
    views       that were installed for it; 2 is the least
  many          many joiners at once:
    joiners, step_s
    ready_s     between the first and the last that was ready
    views       that were installed from the first one's being ready until all of them voted; 2 is the least
    joined_s    how long that took
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import bench
from joining_kit import peers as kit
from joining_kit.peers import HungError, Peers

FOUNDERS = 3
MODEL_BYTES, QUICK_MODEL_BYTES = 400_000_000, 40_000_000
STEP_S, QUICK_STEP_S = 10.0, 2.0
RATE_MBIT = 1000
BEFORE, AFTER = 5, 2
MANY, QUICK_MANY = 10, 4
MANY_FOUNDERS, MANY_STEP_S, MANY_MODEL_BYTES = 2, 1.0, 4096
START_S = 120.0
"""Interpreters that import torch, all at once on few processors."""


def one_joins(options: Any, model_bytes: int, step_s: float) -> tuple[dict[str, Any], list[str]]:
    """A joiner of a large model on shaped cables; what was measured, and what was wrong."""
    rate_mbit: int = options.rate_mbit
    ideal_s = model_bytes * 8 / (rate_mbit * 1e6)
    result: dict[str, Any] = {"model_bytes": model_bytes, "rate_mbit": rate_mbit, "step_s": step_s}
    with bench.lab("joining", FOUNDERS + 1, f"{rate_mbit}mbit") as lab, kit.folder() as folder:
        counts = (FOUNDERS, 1)
        with Peers(Path(folder), lab, counts, model_bytes, step_s, options.seed) as peers:
            first, joiner = peers.founders[0], peers.joiners[0]
            round_s = step_s + 3 * ideal_s
            patience_s = START_S + 20 * round_s
            try:
                peers.begin()
                peers.until(peers.at_gate, "the joiner at the gate", patience_s)
                begun = time.time()
                peers.until(lambda: len(first.rounds(begun)) > BEFORE, "rounds before", patience_s)
                peers.let_in()
                peers.until(lambda: kit.all_vote([joiner]), "the joiner votes", patience_s)
                bench.say(f"it votes; {AFTER} rounds more")
                voted = kit.voter_since(joiner)["time"]
                peers.until(lambda: len(first.rounds(voted)) > AFTER, "rounds after", patience_s)
            except HungError as error:
                return result, [f"one: {error}"]
            return result | measured(first, joiner, ideal_s), [f"one: {v}" for v in peers.violations()]


def measured(first: kit.Peer, joiner: kit.Peer, ideal_s: float) -> dict[str, Any]:
    """From what the two wrote down."""
    ready = joiner.events("trainer_ready")[0]["time"]
    learns, votes = kit.learner_since(joiner), kit.voter_since(joiner)
    caught_up = next(e for e in joiner.events("adopted") if e["time"] > learns["time"])
    rounds = first.rounds()
    end = next((r["time"] for r in rounds if r["view_epoch"] == votes["view_epoch"]), 0.0)
    parts: dict[str, list[tuple[float, float]]] = {"before_s": [], "joining_s": [], "after_s": []}
    for one, two in pairwise(rounds[1:]):  # the first round begins with the founding
        name = "before_s" if two["time"] < ready else "joining_s" if two["time"] <= end else "after_s"
        parts[name].append((two["time"] - one["time"], two["comm_s"]))
    lengths = {name: [round(length, 3) for length, _ in part] for name, part in parts.items()}
    median_s = statistics.median(lengths["before_s"])
    held_s = caught_up["time"] - learns["time"]
    return {
        **lengths,
        "comm_s": {name: [round(comm, 3) for _, comm in part] for name, part in parts.items()},
        "median_s": median_s,
        "max_ratio": round(max(lengths["joining_s"]) / median_s, 3),
        "ideal_s": round(ideal_s, 3),
        "caught_up_s": round(held_s, 3),
        "caught_up_ratio": round(held_s / ideal_s, 3),
        "waited_s": round(learns["time"] - ready, 3),
        "joined_s": round(votes["time"] - ready, 3),
        "views": sum(
            1 for v in first.events("view") if ready < v["time"] and v["view_epoch"] <= votes["view_epoch"]
        ),
    }


def many_join(options: Any, count: int) -> tuple[dict[str, Any], list[str]]:
    """Many joiners of a small model at once; what was measured, and what was wrong."""
    result: dict[str, Any] = {"joiners": count, "step_s": MANY_STEP_S}
    with kit.folder() as folder:
        counts = (MANY_FOUNDERS, count)
        with Peers(Path(folder), None, counts, MANY_MODEL_BYTES, MANY_STEP_S, options.seed) as peers:
            first = peers.founders[0]
            try:
                peers.begin()
                peers.until(lambda: len(first.rounds()) > 1, "rounds before", START_S)
                peers.until(peers.at_gate, "all joiners at the gate", START_S)
                peers.let_in()
                peers.until(lambda: kit.all_vote(peers.joiners), "all vote", START_S)
                settled = time.time()
                peers.until(lambda: first.rounds(settled), "a round of all", START_S)
            except HungError as error:
                return result, [f"many: {error}"]
            ready = sorted(joiner.events("trainer_ready")[0]["time"] for joiner in peers.joiners)
            last = max((kit.voter_since(joiner) for joiner in peers.joiners), key=lambda v: v["view_epoch"])
            end = last["time"]
            views = [
                v
                for v in first.events("view")
                if ready[0] < v["time"] and v["view_epoch"] <= last["view_epoch"]
            ]
            result |= {
                "ready_s": round(ready[-1] - ready[0], 3),
                "views": len(views),
                "joined_s": round(end - ready[0], 3),
            }
            return result, [f"many: {v}" for v in peers.violations()]


def main(arguments: Sequence[str]) -> int:
    parser = bench.parser(__doc__, "joining")
    parser.add_argument("--model-bytes", type=int, metavar="N", help="of the one joiner's model")
    parser.add_argument("--step-s", type=float, metavar="S", help="what a local step lasts there")
    parser.add_argument("--rate-mbit", type=int, default=RATE_MBIT, metavar="N", help="of each cable")
    parser.add_argument("--part", choices=["one", "many"], help="only this part")
    options = parser.parse_args(arguments)
    model_bytes = options.model_bytes or (QUICK_MODEL_BYTES if options.quick else MODEL_BYTES)
    step_s = options.step_s or (QUICK_STEP_S if options.quick else STEP_S)
    result: dict[str, Any] = {"conditions": bench.conditions()}
    violations: list[str] = []
    if options.part != "many":
        result["one"], wrong = one_joins(options, model_bytes, step_s)
        violations += wrong
    if options.part != "one":
        result["many"], wrong = many_join(options, QUICK_MANY if options.quick else MANY)
        violations += wrong
    if not violations:
        for part in ("one", "many"):
            facts = {k: v for k, v in result.get(part, {}).items() if isinstance(v, int | float)}
            if facts:
                print(bench.table([list(facts), [f"{v:g}" for v in facts.values()]]))
    return bench.finish(options, result, violations)


if __name__ == "__main__":
    bench.run(main)
