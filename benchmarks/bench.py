"""What the programs under benchmarks/ share: their common options, the result, hosts made with bin/netlab.

A benchmark is a file ``benchmarks/NAME.py`` with

- a module docstring: what is measured, and under "Keys:" every key of its JSON object;
- options by ``bench.parser(__doc__, NAME)``, which has ``--quick --seed --json --out`` already;
- ``main(argv)``, which ends with ``return bench.finish(options, results, violations)``.

It imports torch only in the processes that it starts: ``--help`` is quick. Progress goes to standard error by
``say``, tables to standard output; with ``--json`` the last line there is one JSON object. ``violations`` is a
list of lines, one for each invariant that did not hold: any makes the exit code 1. A speed never does. What a
benchmark cannot work without raises ``BenchError``, which ``run`` turns into one line and exit code 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NETLAB = ROOT / "bin" / "netlab"
LAB_START_S = 60.0
END_GRACE_S = 10.0


COMMON_KEYS = """Keys of every benchmark's JSON object, besides its own:
  benchmark, quick, seed
  violations  invariants that did not hold, one line each; any makes the exit code 1, a speed never does"""


class BenchError(Exception):
    """One line for the user: what is missing, and the remedy."""


# --- options and result ----------------------------------------------------------------------------------


def parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """The options that every benchmark takes; ``doc`` is its module docstring."""
    made = argparse.ArgumentParser(
        prog=f"benchmarks/{name}.py",
        description=doc,
        epilog=COMMON_KEYS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.set_defaults(benchmark=name)
    made.add_argument("--quick", action="store_true", help="a smaller measurement, at most two minutes")
    made.add_argument("--seed", type=int, default=0, metavar="S", help="of data, order and model (default 0)")
    made.add_argument("--json", action="store_true", help="the last line of output is one JSON object")
    made.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"also write it there, by custom benchmarks/results/{name}.json",
    )
    return made


def conditions() -> dict[str, Any]:
    """Where and how a result was made: without it a number says nothing."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "kernel": platform.release(),
    }


def finish(options: argparse.Namespace, result: dict[str, Any], violations: Sequence[str]) -> int:
    """Writes and prints the result, its violations among it; the exit code."""
    whole = {"benchmark": options.benchmark, "quick": options.quick, "seed": options.seed, **result}
    whole["violations"] = list(violations)
    for line in violations:
        say(f"VIOLATION: {line}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        draft = options.out.with_name(options.out.name + ".new")
        draft.write_text(json.dumps(whole, indent=1) + "\n")
        draft.replace(options.out)
        say(f"written to {options.out}")
    if options.json:
        print(json.dumps(whole), flush=True)
    return 1 if violations else 0


def run(main: Callable[[Sequence[str]], int]) -> None:
    """A benchmark's last line."""
    try:
        sys.exit(main(sys.argv[1:]))
    except BenchError as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def say(line: str) -> None:
    """Progress, for people."""
    print(line, file=sys.stderr, flush=True)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


# --- hosts -----------------------------------------------------------------------------------------------


class Lab:
    """Hosts h1 to hN, each a network namespace on one bridge (bin/netlab)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hosts = [host["host"] for host in self.list()]

    def list(self) -> list[dict[str, Any]]:
        """Each host's address, rate, state and bytes, as ``netlab list --json`` says them."""
        listed = subprocess.run(
            [sys.executable, NETLAB, "list", "--json", "--name", self.name],
            capture_output=True,
            text=True,
            check=False,
        )
        if listed.returncode:
            raise BenchError(listed.stderr.strip())
        hosts: list[dict[str, Any]] = json.loads(listed.stdout)["hosts"]
        return hosts

    def address(self, host: str) -> str:
        """The host's IPv4 address."""
        return str(next(h["address"] for h in self.list() if h["host"] == host))

    def start(self, host: str, command: Sequence[Any], **how: Any) -> subprocess.Popen[Any]:
        """Start a command on a host; NETLAB_HOST and NETLAB_ADDRESS are in its environment."""
        words = [sys.executable, NETLAB, "exec", host, "--name", self.name, "--", *command]
        return subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, **how)


@contextmanager
def lab(name: str, hosts: int, rate: str) -> Iterator[Lab]:
    """A lab that goes, with everything that runs in it, however this process ends.

    ``rate`` is netlab's: 100mbit, h1=100mbit,h2=1gbit, unshaped. BenchError without root or iproute2.
    """
    # netlab takes the lab down when its command ends, and that ends with our side of the pipe
    hold = ["sh", "-c", "echo up; exec cat"]
    words = [sys.executable, NETLAB, "run", str(hosts), "--rate", rate, "--name", name, "--", *hold]
    keeper = subprocess.Popen(
        [str(word) for word in words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert keeper.stdin is not None and keeper.stdout is not None and keeper.stderr is not None
    try:
        if keeper.stdout.readline().strip() != "up":
            raise BenchError(f"no hosts: {keeper.stderr.read().strip()}")
        yield Lab(name)
    finally:
        keeper.stdin.close()
        keeper.wait(LAB_START_S)
        keeper.stdout.close()
        keeper.stderr.close()


def wait_all(processes: dict[str, subprocess.Popen[Any]], timeout_s: float) -> dict[str, int | None]:
    """Exit code of each by its name, None for those that had to be ended; the first failure ends the wait."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        codes = {name: process.poll() for name, process in processes.items()}
        if all(code is not None for code in codes.values()) or any(codes.values()):
            break
        time.sleep(0.05)
    codes = {name: process.poll() for name, process in processes.items()}
    for process in processes.values():
        end(process)
    return codes


def end(process: subprocess.Popen[Any]) -> None:
    """Ask a process to end, then make it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
