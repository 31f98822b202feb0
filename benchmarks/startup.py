"""How long four peers on this machine take from the last `join` to their first complete round.

Beside it, in the same run: four Python processes at once that import torch and make an optimizer, which a training
script cannot do without. What is left over is the product's own.

Keys:
  trials        how many times it was done
  import_s      seconds until the slowest of four processes has torch and an optimizer, per trial
  first_round_s seconds from the start of the last join to the first round that all four have, per trial
  beyond_s      median of first_round_s minus median of import_s
  ratio         median of first_round_s over median of import_s
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import bench

Found = TypeVar("Found")
PEERS = 4
PATIENCE_S = 120.0
WITHOUT_US = "import torch; torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)"
SCRIPT = """
import torch
import p2p_dmc as dmc

with dmc.connect() as peer:
    data = peer.dataset("startup")
    model = torch.nn.Linear(8, 1)
    optimizer = dmc.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), peer, tau=1)
    decode = lambda s: torch.tensor(list(s["bin"]), dtype=torch.float)
    for x in peer.loader(data, batch_size=1, epochs=1, decode=decode):
        optimizer.zero_grad()
        loss = model(x / 255).square().mean()
        loss.backward()
        optimizer.step(loss)
"""


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def import_seconds() -> float:
    """Four interpreters at once, as four trainers are."""
    began = time.monotonic()
    processes = [
        subprocess.Popen([sys.executable, "-c", WITHOUT_US], env=environment()) for _ in range(PEERS)
    ]
    for process in processes:
        if process.wait(PATIENCE_S):
            raise bench.BenchError("torch cannot be imported here; run bin/setup-venv")
    return time.monotonic() - began


def first_round(home: Path) -> float | None:
    """Unix time of a home's first complete round with all members."""
    path = home / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        facts = json.loads(line)
        if facts["members"] == PEERS:
            return float(facts["time"])
    return None


def start_seconds(folder: Path) -> float:
    """Seed, join four times, wait for the first round of four."""
    data, script = folder / "startup", folder / "train.py"
    data.mkdir()
    for i in range(4000):
        (data / f"{i:04}.bin").write_bytes(bytes((i * k) % 256 for k in range(1, 9)))
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "p2p_dmc.cli"]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with open(folder / "output", "wb") as output:
            seed = [
                *command,
                "seed-dataset",
                str(data),
                "--home",
                str(folder / "seed"),
                "--listen",
                "tcp://127.0.0.1:0",
            ]
            processes.append(subprocess.Popen(seed, stdout=output, stderr=output, env=environment()))
            address = wait_for(lambda: announced(folder / "seed"))
            for i in range(PEERS):
                join = [*command, "join", "--home", str(folder / f"peer{i}"), "--listen", "tcp://127.0.0.1:0"]
                join += ["--min-peers", str(PEERS), address, str(script)]
                began = time.time()
                processes.append(subprocess.Popen(join, stdout=output, stderr=output, env=environment()))
            ended = [wait_for(lambda home=folder / f"peer{i}": first_round(home)) for i in range(PEERS)]
        return max(ended) - began
    finally:
        end(processes)


def announced(home: Path) -> str | None:
    try:
        return str(json.loads((home / "agent.json").read_text())["address"])
    except (OSError, ValueError):
        return None


def wait_for(look: Callable[[], Found | None]) -> Found:
    """What ``look`` returns once that is something; BenchError when it takes too long."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = look()
        if found is not None:
            return found
        time.sleep(0.01)
    raise bench.BenchError(f"the peers have not begun within {PATIENCE_S:g} s")


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # the second one: at once
    for process in processes:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(arguments: Sequence[str]) -> int:
    options = bench.parser(__doc__, "startup").parse_args(arguments)
    trials = 2 if options.quick else 5
    conditions = bench.conditions()
    imports, starts = [], []
    import_seconds()  # warms the file cache
    for trial in range(trials):
        imports.append(round(import_seconds(), 3))
        with tempfile.TemporaryDirectory(prefix="dmc-startup-") as folder:
            starts.append(round(start_seconds(Path(folder)), 3))
        bench.say(
            f"trial {trial + 1} of {trials}: import {imports[-1]:.2f} s, first round {starts[-1]:.2f} s"
        )
    beyond = statistics.median(starts) - statistics.median(imports)
    result = {
        "trials": trials,
        "import_s": imports,
        "first_round_s": starts,
        "beyond_s": round(beyond, 3),
        "ratio": round(statistics.median(starts) / statistics.median(imports), 3),
    }
    print(
        bench.table(
            [
                ["import torch", "first round", "beyond"],
                [
                    f"{statistics.median(imports):.2f} s",
                    f"{statistics.median(starts):.2f} s",
                    f"{beyond:.2f} s",
                ],
            ]
        )
    )
    return bench.finish(options, {"conditions": conditions, **result}, [])


if __name__ == "__main__":
    bench.run(main)
