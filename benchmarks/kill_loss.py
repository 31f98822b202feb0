"""What a kill costs in loss: the demo's training, with and without a peer killed and brought back.

For each of five seeds the run is done three times: undisturbed, undisturbed again, and with one of the four
peers' whole process tree killed after a third of the samples and started again later. Timing decides who trains
on what, so two undisturbed runs of one seed differ, too: that is the noise.

Keys:
  seeds       the seeds
  final_loss  per seed: "without", "again", "with": mean training loss over the samples of the last epoch
  noise       per seed: again - without
  cost        per seed: with - without
  mean_noise  mean of the absolute noise
  mean_cost   mean of the cost, signed
  ratio       mean of the absolute cost over mean_noise
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench

from p2p_dmc.demo import plan as plans
from p2p_dmc.demo.plan import RUN, Plan
from p2p_dmc.demo.processes import Processes
from p2p_dmc.demo.progress import Progress
from p2p_dmc.demo.story import Outcome, Story
from p2p_dmc.errors import UserError
from p2p_dmc.observe.audit import audit

SEEDS = 5
CASES = {"without": False, "again": False, "with": True}


class Silent:
    """Nothing to see: this benchmark has a line per run."""

    def event(self, at_s: float, event: str, text: str, **facts: Any) -> None:
        return

    def show(self, at_s: float, progress: Progress, samples_due: int, epochs: int) -> None:
        return

    def close(self) -> None:
        return


def perform(plan: Plan) -> tuple[Outcome, float, list[str]]:
    """One run: what happened, its final loss, and what the audit found wrong."""
    with tempfile.TemporaryDirectory(prefix="dmc-kill-loss-") as folder:
        base, homes = Path(folder), Path(folder, "homes")
        homes.mkdir()
        processes = Processes(base)
        try:
            outcome = Story(plan, base, homes, Silent(), processes).run()
        finally:
            processes.close(5.0)
        judged = audit(list(outcome.homes.values()), RUN)
        last = [
            line for line in judged.rounds if line["epoch"] == plan.epochs - 1 and line["loss"] is not None
        ]
        samples = sum(line["samples_round"] for line in last)
        loss = sum(line["loss"] * line["samples_round"] for line in last) / samples
        return outcome, loss, [*judged.unequal, *judged.inexact]


def main(arguments: Sequence[str]) -> int:
    options = bench.parser(__doc__, "kill_loss").parse_args(arguments)
    seeds = [options.seed + i for i in range(1 if options.quick else SEEDS)]
    cases = {name: kill for name, kill in CASES.items() if not (options.quick and name == "again")}
    conditions, losses, violations = bench.conditions(), {}, []
    for seed in seeds:
        losses[str(seed)] = {}
        for name, kill in cases.items():
            plan = dataclasses.replace(plans.quick(seed), kill=kill)
            try:
                outcome, loss, faults = perform(plan)
            except UserError as error:
                raise bench.BenchError(str(error)) from None
            if kill and not outcome.killed_pids:
                faults.append("nobody was killed")
            violations += [f"seed {seed} {name}: {fault}" for fault in faults]
            losses[str(seed)][name] = round(loss, 4)
            bench.say(f"seed {seed} {name:8} final loss {loss:.4f}")
    result: dict[str, Any] = {"seeds": seeds, "final_loss": losses}
    result["cost"] = [round(one["with"] - one["without"], 4) for one in losses.values()]
    result["mean_cost"] = round(statistics.mean(result["cost"]), 4)
    if not options.quick:
        result["noise"] = [round(one["again"] - one["without"], 4) for one in losses.values()]
        result["mean_noise"] = round(statistics.mean(map(abs, result["noise"])), 4)
        result["ratio"] = round(
            statistics.mean(map(abs, result["cost"])) / max(result["mean_noise"], 1e-9), 3
        )
    head = ["seed", *cases]
    print(bench.table([head, *([seed, *(f"{one[c]:.4f}" for c in cases)] for seed, one in losses.items())]))
    return bench.finish(options, {"conditions": conditions, **result}, violations)


if __name__ == "__main__":
    bench.run(main)
