"""A thousand view changes in the same processes: what they hold stays flat (DESIGN.md section 4, invariant 9).

    python tests/soak/views.py --changes 1000 --out

Two peers, each an agent and a trainer, train on while a third one leaves their view and enters it again, over and
over. After every few changes the program looks at what the four processes hold. The third peer is a real one whose
run gives up its place as soon as it has completed a round (tests/soak/hasty_peer.py); all three have the pause
between changes taken out, which would make this last for hours.

What is looked at, for each process: threads, open descriptors, sockets that listen, sockets that are connected,
children, resident memory; besides, files in shared memory and the size of agreement.json. A straight line is fitted
through each series, leaving out the first fifth, in which caches fill. A thing left behind by every change is a
slope of 1000 per thousand changes, one left behind by every hundredth change of 10. The bound is 5 per thousand. A
group of the collective that is being made or dropped as the program looks moves a count by some units: what that
can do to the slope is its standard error, and three of those are allowed for (little in a thousand changes, more
with --quick). For memory the bound is 16 MiB per thousand, 16 KiB a change: less than the smallest thing that a view
makes (a thread's stack, a connection's buffers).

The last line of standard output with --json is one object with these keys:
  changes     views installed by the first peer after the start
  rounds      completed by the first peer meanwhile
  seconds     that took
  slopes      per process and quantity: how much it grows per thousand changes, by the fitted line, and the
              standard error of that
  bounds      what each quantity may grow
  series      {"changes": [n, ...], process: {quantity: [value at each look, ...]}}
  diverged    rounds or views that differ between two peers
  ledger_exact  whether every sample of every finished epoch counted exactly once
  problems    what went wrong, in words
Exit code 1 if something grows, differs, or nobody goes on any more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.soak.hasty_peer import FLAPPING  # noqa: E402
from tests.soak.plot import svg  # noqa: E402
from tests.system import cluster as clusters  # noqa: E402
from tests.system.checks import check_digests, check_ledger  # noqa: E402
from tests.system.cluster import Cluster, Peer, write_samples  # noqa: E402
from tests.system.scenario import START_S  # noqa: E402

Sample = dict[str, Any]

NAMES = ("a", "b", FLAPPING)
SAMPLES, EPOCHS = 400, 100_000
QUICK_S = 60.0
"""With --quick it ends after so long, however many changes that were."""
LOOK_EVERY = 5
"""Changes between two looks."""
WARM = 0.2
"""Part of the series in which caches fill, sockets are opened for the first time, and torch makes its pools."""
STALLED_S = 60.0
COUNT_BOUND, MEMORY_BOUND_MIB = 5.0, 16.0
BOUNDS = {
    "threads": COUNT_BOUND,
    "descriptors": COUNT_BOUND,
    "listening": COUNT_BOUND,
    "connected": COUNT_BOUND,
    "children": COUNT_BOUND,
    "memory_mib": MEMORY_BOUND_MIB,
    "shared_files": COUNT_BOUND,
    "promises_kib": 5.0,
}
"""What each quantity may grow per thousand changes."""
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    args = arguments()
    result = soak(args.changes, args.seed, QUICK_S if args.quick else float("inf"))
    if args.out:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "views.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")
        (RESULTS / "views.svg").write_text(plot(result["series"]))
    print(json.dumps(result) if args.json else words(result))
    return int(bool(result["problems"]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="at most two minutes")
    parser.add_argument("--seed", type=int, default=0, help="of the data")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    parser.add_argument("--changes", type=int, default=1000)
    parser.add_argument(
        "--out", action="store_true", help=f"write views.json and views.svg to {RESULTS.relative_to(ROOT)}"
    )
    return parser.parse_args()


def soak(changes: int, seed: int, limit_s: float) -> dict[str, Any]:
    """Start three peers, look at two of them until so many views have come or so long has passed, and judge."""
    result: dict[str, Any] = {"changes": 0, "rounds": 0, "seconds": 0.0, "bounds": BOUNDS, "series": []}
    with tempfile.TemporaryDirectory(prefix="dmc-views-") as folder:
        data = write_samples(Path(folder) / "tiny", SAMPLES, seed)
        launcher = hasty_command(Path(folder))
        with Cluster(Path(folder) / "peers") as cluster:
            problems = []
            try:
                stable = start(cluster, data, launcher)
                watch(cluster, stable, changes, limit_s, result)
            except AssertionError as error:
                problems.append(str(error).partition("\n")[0])
            judge(cluster, result, problems)
    result["slopes"] = slopes(result["series"])
    problems += grown(result["slopes"])
    result["series"], result["problems"] = columns(result["series"]), problems
    return result


def hasty_command(folder: Path) -> Path:
    """An executable that stands in for dmc-peer."""
    command = folder / "hasty-peer"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("hasty_peer.py")} "$@"\n')
    command.chmod(0o755)
    return command


def start(cluster: Cluster, data: Path, launcher: Path) -> list[Peer]:
    """Three peers; the two that stay."""
    clusters.DMC_PEER = launcher
    cluster.hurry()
    seed = cluster.seed(data, "--name", "tiny", name=NAMES[0])
    script = ["--epochs", str(EPOCHS), "--tau", "2"]
    peers = [cluster.join(name, seed, *script, options=["--min-peers", "3"]) for name in NAMES]
    for peer in peers:
        cluster.listening(peer)
    cluster.wait(lambda: all(peer.rounds() for peer in peers), "the first rounds", START_S)
    return peers[:2]


def watch(
    cluster: Cluster, stable: Sequence[Peer], changes: int, limit_s: float, result: dict[str, Any]
) -> None:
    """Look after every few changes; AssertionError when none come any more."""
    began_s, first = time.monotonic(), stable[0]
    base, rounds = len(first.events("view")), len(first.rounds())
    due = 0
    while result["changes"] < changes and result["seconds"] < limit_s:
        cluster.wait(partial(views_since, first, base, due), f"change {due} of the view", STALLED_S)
        result["changes"] = len(first.events("view")) - base
        result["rounds"] = len(first.rounds()) - rounds
        result["seconds"] = round(time.monotonic() - began_s, 1)
        result["series"].append({"changes": result["changes"], **look(stable)})
        due = result["changes"] + LOOK_EVERY


def views_since(peer: Peer, base: int, due: int) -> bool:
    """Whether it has installed so many views after the first ``base``."""
    return len(peer.events("view")) - base >= due


def look(stable: Sequence[Peer]) -> Sample:
    """What each process of these peers holds now."""
    found: Sample = {}
    for peer in stable:
        agent, trainer = psutil.Process(peer.pid), peer.trainer()
        assert trainer is not None, f"{peer.name} has no trainer"
        promised = sum(p.stat().st_size for p in peer.home.glob("runs/*/agreement.json"))
        found[f"{peer.name} agent"] = held_by(agent) | {
            "shared_files": len(list(Path("/dev/shm").glob(f"dmc-{peer.peer_id[:16]}-*/*"))),
            "promises_kib": round(promised / 1024, 2),
        }
        found[f"{peer.name} trainer"] = held_by(trainer)
    return found


def held_by(process: psutil.Process) -> Sample:
    """One process's threads, descriptors, sockets, children and memory."""
    sockets = (
        process.connections("inet")
        if not hasattr(process, "net_connections")
        else process.net_connections("inet")
    )
    return {
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
        "listening": sum(one.status == psutil.CONN_LISTEN for one in sockets),
        "connected": sum(one.status != psutil.CONN_LISTEN for one in sockets),
        "children": len(process.children()),
        "memory_mib": round(process.memory_info().rss / 2**20, 2),
    }


def judge(cluster: Cluster, result: dict[str, Any], problems: list[str]) -> None:
    """Look at everything that anybody wrote down."""
    homes = [peer.home for peer in cluster.peers]
    for key, check in (("diverged", check_digests), ("ledger_exact", check_ledger)):
        try:
            check(homes)
            result[key] = key == "ledger_exact"
        except AssertionError as error:
            result[key] = key == "diverged"
            problems += str(error).splitlines()[:5]


# --- the lines -------------------------------------------------------------------------------------------


def slopes(series: Sequence[Sample]) -> dict[str, dict[str, tuple[float, float]]]:
    """Growth of each quantity of each process per thousand changes, and its standard error, after the warm-up."""
    warm = series[int(len(series) * WARM) :]
    if len(warm) < 3:
        return {}
    at = [sample["changes"] for sample in warm]
    return {
        process: {quantity: line(at, [sample[process][quantity] for sample in warm]) for quantity in held}
        for process, held in warm[0].items()
        if process != "changes"
    }


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope of the least-squares line, and the slope's standard error; per thousand."""
    fitted = statistics.linear_regression(x, y)
    left = sum((b - fitted.intercept - fitted.slope * a) ** 2 for a, b in zip(x, y, strict=True))
    spread = sum((a - statistics.mean(x)) ** 2 for a in x)
    error = (left / (len(x) - 2) / spread) ** 0.5
    return round(1000 * fitted.slope, 3), round(1000 * error, 3)


def grown(found: dict[str, dict[str, tuple[float, float]]]) -> list[str]:
    """Quantities that grow more than they may."""
    if not found:
        return ["too few samples for a line"]
    return [
        f"{process}: {quantity} grows by {slope:g} (+- {error:g}) per thousand changes, {BOUNDS[quantity]:g} allowed"
        for process, held in found.items()
        for quantity, (slope, error) in held.items()
        if slope - 3 * error > BOUNDS[quantity]
    ]


def columns(series: Sequence[Sample]) -> dict[str, Any]:
    """The looks turned: a list for each quantity."""
    turned: dict[str, Any] = {"changes": [sample["changes"] for sample in series]}
    for process, held in series[0].items() if series else ():
        if process != "changes":
            turned[process] = {
                quantity: [sample[process][quantity] for sample in series] for quantity in held
            }
    return turned


def plot(series: dict[str, Any]) -> str:
    """The series of all processes, one panel for each quantity."""
    processes = [name for name in series if name != "changes"]
    panels = {
        quantity.replace("_", " "): {process: series[process][quantity] for process in processes}
        for quantity in ("threads", "descriptors", "listening", "connected", "memory_mib")
    }
    return svg(series["changes"], panels, "view changes")


def words(result: dict[str, Any]) -> str:
    lines = [f"{result['changes']} changes and {result['rounds']} rounds in {result['seconds']} s"]
    for process, held in result["slopes"].items():
        said = ", ".join(f"{quantity} {slope:+g}" for quantity, (slope, _) in held.items())
        lines.append(f"{process}: per thousand changes {said}")
    return "\n".join([*lines, *result["problems"]])


if __name__ == "__main__":
    sys.exit(main())
