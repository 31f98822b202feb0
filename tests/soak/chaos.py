"""Hurt real peers in every way for as long as asked, then see that nothing was lost and nothing is left.

    python tests/soak/chaos.py --faults 25 --seed 1 --out

Four peers, each a host of its own (network namespaces, a small disk each), train a small model on sources of Python's
library. One fault after another comes to a random one of them, sometimes two at once: SIGKILL of trainer, agent or
both, of everybody; SIGSTOP; a cable cut both ways or one way; lost packets; a full disk; damaged shards and
checkpoints; and exact cuts, where a peer strikes itself in the middle of something (p2p_dmc/observe/phases.py). After
each all come back and train together again. At the end of a run (--per-run faults) the peers are let to the end.

It needs root, `ip` and `tc`; packets are only lost, and ways broken, where `nft` is.

The last line of standard output with --json is one object with these keys:
  faults        how many happened, with proof
  kinds         how many of each kind
  diverged      runs in which two peers differed in a round, a view or the final model, or all of them from the replay
                of what they wrote down in one process
  hung          runs in which somebody did not go on, come back or finish before a deadline
  ledger_exact  whether every sample of every finished epoch counted exactly once, or is on record as given up
  orphans       processes, sockets, files and shared memory that outlived their peers, and growth of living ones
  runs          how many; rounds, samples and given_up: of them together; replayed: rounds that came out bit for bit
  seeds         that made it; programs: digests of the product's sources at the time
  unnoticed     faults that nobody noticed
  unreached     exact cuts that did not come about (not counted)
  together      faults that came while another one lasted
  records       every fault: run, kind, victim, second of the run, proof, who noticed and after how many seconds, and
                after how many all trained together again
  found         what went wrong, in words; with --total also notes: what was found and mended, and what else there is to
                say about the results (results/chaos-notes.txt)
Exit code 1 if any run diverged, hung, lost or repeated a sample or left something, or a fault was not noticed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.soak.chaos_run import ChaosRun, Outcome  # noqa: E402
from tests.soak.hosts import missing_tools  # noqa: E402

RESULTS = Path(__file__).parent / "results"
NOTES = RESULTS / "chaos-notes.txt"
QUICK_FAULTS, QUICK_S = 10, 50.0
USUAL_FAULTS = 25


def main() -> int:
    args = arguments()
    if lacking := missing_tools():
        print(f"chaos.py cannot run here: {lacking}", file=sys.stderr)
        return 2
    if args.total:
        result = merged(json.loads(path.read_text()) for path in sorted(RESULTS.glob("chaos-seed*.json")))
        result["notes"] = NOTES.read_text().splitlines() if NOTES.exists() else []
        (RESULTS / "chaos.json").write_text(pretty(result))
        print(json.dumps({k: v for k, v in result.items() if k != "records"}))
        return code_of(result)
    outcomes = list(runs(args))
    result = summary(outcomes, args.seed)
    if args.out:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"chaos-seed{args.seed}.json").write_text(pretty(result))
    print(json.dumps(result) if args.json else words(result))
    return code_of(result)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="at most two minutes")
    parser.add_argument("--seed", type=int, default=0, help="of faults, victims and moments")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    parser.add_argument("--faults", type=int, help=f"stop after so many; default {USUAL_FAULTS}")
    parser.add_argument("--hours", type=float, help="stop after so long")
    parser.add_argument("--per-run", type=int, default=25, help="faults before the peers are let to the end")
    parser.add_argument("--only", metavar="KIND", help="one kind alone, as `kinds` names it")
    parser.add_argument("--out", action="store_true", help=f"write the result to {RESULTS.relative_to(ROOT)}")
    parser.add_argument(
        "--total", action="store_true", help="add up the results that are there, in chaos.json"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the homes of runs that failed there")
    return parser.parse_args()


def runs(args: argparse.Namespace) -> Iterable[Outcome]:
    """Run after run until there were faults enough, or the time is over."""
    begun_s, suffered, number = time.monotonic(), 0, 0
    limit_s = 3600 * args.hours if args.hours else QUICK_S if args.quick else None
    wanted = QUICK_FAULTS if args.quick else args.faults or (None if args.hours else USUAL_FAULTS)
    while (wanted is None or suffered < wanted) and (limit_s is None or time.monotonic() - begun_s < limit_s):
        faults = args.per_run if wanted is None else min(args.per_run, wanted - suffered)
        until_s = None if limit_s is None else begun_s + limit_s
        outcome = one_run(f"{args.seed}.{number}", faults, until_s, args.keep, args.only)
        suffered, number = suffered + len(outcome.records), number + 1
        yield outcome
        if any("SIGTERM" in text for text in outcome.found):
            return
        if not outcome.records and outcome.found:
            return  # it would go on like this


def one_run(
    name: str, faults: int, until_s: float | None = None, keep: Path | None = None, only: str | None = None
) -> Outcome:
    """A fresh cluster that suffers, recovers and finishes. ``name`` is its seed, too."""
    with tempfile.TemporaryDirectory(prefix="dmc-chaos-") as folder:
        run = ChaosRun(Path(folder) / "peers", random.Random(name), name)
        return run.play(faults, until_s, only, keep)


def broken_off(number: int, _: object) -> None:
    """Told to end: the run counts as one that hangs; what it has on record is written, its hosts are removed."""
    signal.signal(number, signal.SIG_IGN)
    raise AssertionError("broken off by SIGTERM")


def summary(outcomes: Sequence[Outcome], seed: int) -> dict[str, Any]:
    """The keys of the module's docstring."""
    records = [r for o in outcomes for r in o.records]
    return {
        "seeds": [seed],
        "programs": [program()],
        "faults": len(records),
        "kinds": dict(sorted(Counter(r.kind for r in records).items())),
        "diverged": sum(o.diverged for o in outcomes),
        "hung": sum(o.hung for o in outcomes),
        "ledger_exact": not any(o.inexact or o.hung for o in outcomes),
        "orphans": sum(o.orphans for o in outcomes),
        "runs": len(outcomes),
        "rounds": sum(o.rounds for o in outcomes),
        "replayed": sum(o.replayed for o in outcomes),
        "samples": sum(o.samples for o in outcomes),
        "given_up": sum(o.given_up for o in outcomes),
        "unnoticed": sum(not r.noticed for r in records),
        "unreached": sum(o.unreached for o in outcomes),
        "together": sum(r.together for r in records),
        "found": [f"run {o.name}: {text}" for o in outcomes for text in o.found],
        "records": [asdict(r) for r in records],
    }


def program() -> str:
    """Of the product's sources that ran: the start of a digest over all of them."""
    hasher = hashlib.blake2b(digest_size=6)
    for path in sorted((ROOT / "p2p_dmc").rglob("*.py")):
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


def merged(results: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Several results as one."""
    total: dict[str, Any] = {}
    for result in results:
        for key, value in result.items():
            if key == "kinds":
                total[key] = dict(sorted((Counter(total.get(key, {})) + Counter(value)).items()))
            elif key == "ledger_exact":
                total[key] = total.get(key, True) and value
            else:
                total[key] = total[key] + value if key in total else value
    return total


def code_of(result: dict[str, Any]) -> int:
    failed = ("diverged", "hung", "orphans", "unnoticed", "found")
    return int(any(result[key] for key in failed) or not result["ledger_exact"])


def pretty(result: dict[str, Any]) -> str:
    """JSON with a line for each fault."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in result.items() if key != "records"]
    records = ",\n".join(f"  {json.dumps(record)}" for record in result["records"])
    return "{\n" + ",\n".join([*lines, f' "records": [\n{records}\n ]']) + "\n}\n"


def words(result: dict[str, Any]) -> str:
    return "\n".join(f"{key}: {value}" for key, value in result.items() if key != "records")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, broken_off)
    sys.exit(main())
