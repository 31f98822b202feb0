"""Whether checkpoints hold up the rounds: the same training with a checkpoint always on its way to disk, and with none.

Two peers train one linear layer (64 MiB of float32 parameters) and average after each local step, which lasts a
moment in which the processors are free, as one on a GPU does. With `--checkpoint-every 0.001s` the next checkpoint
begins with the first round that is committed after the last one; with `--checkpoint-every 1000h` there is one, of the
first view. The two take turns, and each part's first rounds are left out.

Keys:
  conditions    command, date, cores, load_before, python, torch, kernel
  model_bytes   of parameters
  step_s        what a local step waits
  without, with_checkpoints
                rounds_s     [length of each round of the first peer]
                median_s, max_s
                checkpoints  written by the first peer meanwhile
                write_s      ["with_checkpoints" only: from a checkpoint's round to its place on disk]
  ratio         median round with checkpoints over median round without
  max_ratio     the same of the longest rounds
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import bench
from recovery_kit.contestant import HungError, wait
from recovery_kit.ours import Ours
from recovery_kit.steps import undisturbed_s

CASES = {"without": "1000h", "with_checkpoints": "0.001s"}
PEERS, WIDTH, QUICK_WIDTH = 2, 4096, 1024
STEP_S = 0.3
TURNS, QUICK_TURNS = 3, 1
ROUNDS, QUICK_ROUNDS = 30, 15
WARM_ROUNDS = 5


def turn(options: Any, every: str, rounds: int, width: int) -> dict[str, Any]:
    """One cluster's rounds after the first ones; what it did wrong besides."""
    with Ours(PEERS, width, STEP_S, options.seed, ["--checkpoint-every", every]) as ours:
        name = ours.names[0]
        try:
            ours.start()
            wait(ours, lambda: len(ours.steps(name)) > WARM_ROUNDS + rounds, f"{rounds} rounds")
        except HungError as error:
            return {"violations": [str(error).partition("\n")[0]]}
        steps = ours.steps(name)[WARM_ROUNDS:]
        completed = {step.number: step.time for step in ours.steps(name)}
        written = [c for c in ours.journal(name, "checkpoint") if c["time"] > steps[0].time]
        return {
            "rounds_s": [round(s, 4) for s in undisturbed_s(steps, PEERS)],
            "checkpoints": len(written),
            "write_s": [round(c["time"] - completed[c["lineage"][1]], 4) for c in written],
            "violations": ours.violations(),
        }


def main(arguments: Sequence[str]) -> int:
    parser = bench.parser(__doc__, "checkpoint_stall")
    parser.add_argument("--turns", type=int, help=f"of each of the two (default {TURNS})")
    options = parser.parse_args(arguments)
    turns = options.turns or (QUICK_TURNS if options.quick else TURNS)
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    width = QUICK_WIDTH if options.quick else WIDTH
    conditions, violations = bench.conditions(), []
    cases: dict[str, Any] = {name: {"rounds_s": [], "checkpoints": 0, "write_s": []} for name in CASES}
    for _ in range(turns):
        for name, every in CASES.items():
            found = turn(options, every, rounds, width)
            violations += [f"{name}: {line}" for line in found.pop("violations")]
            for key, value in found.items():
                cases[name][key] += value
    for case in cases.values():
        if case["rounds_s"]:
            case |= {
                "median_s": round(statistics.median(case["rounds_s"]), 4),
                "max_s": max(case["rounds_s"]),
            }
    del cases["without"]["write_s"]
    result = {"conditions": conditions, "model_bytes": 4 * width**2, "step_s": STEP_S, **cases}
    if not violations:
        for key, of in (("ratio", "median_s"), ("max_ratio", "max_s")):
            result[key] = round(cases["with_checkpoints"][of] / cases["without"][of], 3)
        rows = [["", "rounds", "median s", "max s", "checkpoints"]]
        for name, case in cases.items():
            figures = [f"{case['median_s']:.3f}", f"{case['max_s']:.3f}", str(case["checkpoints"])]
            rows.append([name, str(len(case["rounds_s"])), *figures])
        print(bench.table(rows))
        if not cases["with_checkpoints"]["checkpoints"]:
            violations.append("no checkpoint was written: nothing was measured")
    return bench.finish(options, result, violations)


if __name__ == "__main__":
    bench.run(main)
