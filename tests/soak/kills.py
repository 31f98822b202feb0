"""Kill, or silence, one of four peers at random moments, each in a fresh run of real processes on this machine.

    python tests/soak/kills.py --kind tree --moments 20 --seed 1 --out

The victim is in turn the peer that brought the data, the first in the ring, and any other. Its agent and trainer
die by SIGKILL (tree), its trainer alone does (trainer), or both are stopped by SIGSTOP and woken up again when the
others have gone on (stop). Then the run is let to its end, and everything that anybody wrote down is checked.

The last line of standard output with --json is one object with these keys:
  faults        how many were made
  kinds         how many of each kind
  diverged      runs in which two peers differed in a round, a view or the final model
  hung          runs in which somebody did not go on, come back or finish before a deadline
  ledger_exact  whether every sample of every epoch counted exactly once in every run
  orphans       processes that outlived their agents
  recovery_s    from each fault to the slowest survivor's next complete round in a view without the victim: list,
                median, max, and over_limit, how many took more than 3 s (stop: 8 s) plus one round
  problems      what went wrong, in words
Exit code 1 if any run diverged, hung, lost or repeated a sample, or left a process behind.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.system.checks import check_digests, check_ledger  # noqa: E402
from tests.system.cluster import Cluster, Peer, write_samples  # noqa: E402
from tests.system.scenario import (  # noqa: E402
    RECOVERY_S,
    SILENCE_S,
    START_S,
    recovered,
    round_s,
    start,
    train_together,
)

KINDS = ("tree", "trainer", "stop")
NAMES = ("seed", "b", "c", "d")
SAMPLES, EPOCHS, DELAY_MS = 320, 40, 40
LATEST_S = 3.0
"""The fault comes at a random moment of so many seconds after the run has begun."""
QUICK_S, QUICK_MOMENTS = 75.0, 6
"""With --quick no further moment begins after so long, nor after so many."""
RESULTS = Path(__file__).parent / "results"


@dataclass(slots=True)
class Moment:
    """One run with one fault."""

    kind: str
    victim: str = ""
    recovery_s: float | None = None
    late: bool = False
    diverged: bool = False
    hung: bool = False
    inexact: bool = False
    orphans: int = 0
    problems: list[str] = field(default_factory=list)


def main() -> int:
    args = arguments()
    rng = random.Random(args.seed)
    kinds = KINDS if args.kind == "all" else (args.kind,)
    begun_s, moments = time.monotonic(), []
    for number in range(min(args.moments, QUICK_MOMENTS) if args.quick else args.moments):
        if args.quick and time.monotonic() - begun_s > QUICK_S:
            break
        moment = run(kinds[number % len(kinds)], number // len(kinds), rng, args.keep)
        moments.append(moment)
        took = "no recovery" if moment.recovery_s is None else f"recovered in {moment.recovery_s:.2f} s"
        print(f"{number + 1}: {moment.kind} of {moment.victim}: {took}", *moment.problems, file=sys.stderr)
    result = summary(moments)
    if args.out:
        RESULTS.mkdir(exist_ok=True)
        name = f"kills-{args.kind}-seed{args.seed}.json"
        (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if args.json else words(result))
    return int(bool(result["diverged"] or result["hung"] or result["orphans"] or not result["ledger_exact"]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="at most two minutes")
    parser.add_argument("--seed", type=int, default=0, help="of moments and victims")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="all")
    parser.add_argument("--moments", type=int, default=20, help="how many faults, a run for each")
    parser.add_argument("--out", action="store_true", help=f"write the result to {RESULTS.relative_to(ROOT)}")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="leave the homes of runs with problems there"
    )
    return parser.parse_args()


def run(kind: str, number: int, rng: random.Random, keep: Path | None) -> Moment:
    """A fresh run with one fault at a random moment."""
    moment = Moment(kind=kind)
    with tempfile.TemporaryDirectory(prefix="dmc-kills-") as folder:
        data = write_samples(Path(folder) / "tiny", SAMPLES)
        with Cluster(Path(folder) / "peers") as cluster:
            try:
                finishing = one_fault(cluster, data, moment, number, rng)
                cluster.hurry()
                cluster.ended(finishing, deadline_s=2 * START_S)
                judge(cluster, finishing, moment)
            except AssertionError as error:
                moment.hung = True
                moment.problems.append(str(error).partition("\n")[0])
            moment.orphans = len(cluster.orphans())
            if moment.problems and keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                kept = keep / f"{kind}-{number}-{time.time_ns()}"
                shutil.copytree(Path(folder) / "peers", kept)
                (kept / "report.txt").write_text(cluster.report())
    return moment


def one_fault(cluster: Cluster, data: Path, moment: Moment, number: int, rng: random.Random) -> list[Peer]:
    """Start, wait for the moment, do it, see that the others go on; the peers that should finish."""
    seed = cluster.seed(data, "--name", "tiny")
    peers = start(cluster, seed, NAMES, epochs=EPOCHS, script=["--delay-ms", str(DELAY_MS)])
    victim = choose(peers, number, rng)
    moment.victim = victim.name
    survivors = [p for p in peers if p is not victim]
    cluster.wait(lambda: hold_all(survivors, seed), "every shard has a holder besides the victim")
    due_s = time.monotonic() + rng.uniform(0, LATEST_S)
    cluster.wait(lambda: time.monotonic() >= due_s, "the moment has come")
    allowed_s = round_s(survivors) + (SILENCE_S if moment.kind == "stop" else RECOVERY_S)
    when = {"tree": victim.kill_tree, "trainer": victim.kill_trainer, "stop": victim.stop}[moment.kind]()
    cluster.wait(
        lambda: all(recovered(p, victim.peer_id, when) for p in survivors), "survivors go on", START_S
    )
    moment.recovery_s = max(recovered(p, victim.peer_id, when) for p in survivors) - when
    moment.late = moment.recovery_s > allowed_s
    if moment.kind == "tree":
        return survivors
    victim.go_on()
    train_together(cluster, peers, after=when)
    return peers


def choose(peers: list[Peer], number: int, rng: random.Random) -> Peer:
    """In turn the seeding peer, the first in the ring, and any."""
    first = next(p for p in peers if p.peer_id == peers[0].view["members"][0])
    return (peers[0], first, rng.choice(peers))[number % 3]


def hold_all(survivors: list[Peer], seed: Peer) -> bool:
    held = {path.name for p in survivors for path in p.home.glob("store/*/shards/*.tar")}
    return held >= {path.name for path in seed.home.glob("store/*/shards/*.tar")}


def judge(cluster: Cluster, finishing: list[Peer], moment: Moment) -> None:
    """Look at everything that anybody wrote down."""
    homes = [p.home for p in cluster.peers]
    try:
        check_digests(homes)
        assert len({p.final() for p in finishing}) == 1, "final models differ"
    except AssertionError as error:
        moment.diverged = True
        moment.problems.append(str(error))
    try:
        found = check_ledger(homes)
        assert found.finished_epochs == EPOCHS, f"{found.finished_epochs} epochs are whole, not {EPOCHS}"
    except AssertionError as error:
        moment.inexact = True
        moment.problems.append(str(error))


def summary(moments: list[Moment]) -> dict[str, object]:
    """The keys of the module's docstring."""
    times = [m.recovery_s for m in moments if m.recovery_s is not None]
    return {
        "faults": len(moments),
        "kinds": {kind: sum(m.kind == kind for m in moments) for kind in KINDS},
        "diverged": sum(m.diverged for m in moments),
        "hung": sum(m.hung for m in moments),
        "ledger_exact": not any(m.inexact or m.hung for m in moments),
        "orphans": sum(m.orphans for m in moments),
        "recovery_s": {
            "list": [round(t, 3) for t in times],
            "median": round(statistics.median(times), 3) if times else None,
            "max": round(max(times), 3) if times else None,
            "over_limit": sum(m.late for m in moments),
        },
        "problems": [f"{m.kind} of {m.victim}: {p}" for m in moments for p in m.problems],
    }


def words(result: dict[str, object]) -> str:
    return "\n".join(f"{key}: {value}" for key, value in result.items())


if __name__ == "__main__":
    sys.exit(main())
