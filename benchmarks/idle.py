"""What idle agents cost: processor time, memory and messages of peers that hold shards and do nothing else.

Some peers on this machine share a small data set; once every shard has its holders, they are watched for a while.

Keys:
  agents            how many
  seconds           how long they were watched
  cpu_percent       of one core, all agents together (the aim: under 5)
  cpu_percent_each  of one core, each agent
  rss_mib_each      resident memory, each agent, MiB
  violations        an agent that maps torch, has a child, or does not see all the others
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench
import psutil

DMC_PEER = Path(sys.executable).with_name("dmc-peer")
READY_S = 60.0
SETTLE_S = 3.0
"""After the last fetch: announcements and re-placement come to rest."""
SAMPLES = 400


def parser() -> argparse.ArgumentParser:
    made = bench.parser(__doc__, "idle")
    made.add_argument("--agents", type=int, default=4, metavar="N", help="how many (default 4)")
    return made


class Agent:
    """One `dmc-peer` process and its home."""

    def __init__(self, home: Path, *words: str) -> None:
        self.home = home
        command = [str(DMC_PEER), words[0], "--home", str(home), "--listen", "tcp://127.0.0.1:0", *words[1:]]
        self.popen = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.process = psutil.Process(self.popen.pid)

    def address(self) -> str:
        """Where it listens, as soon as it does."""
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s and self.popen.poll() is None:
            try:
                return str(json.loads((self.home / "agent.json").read_text())["address"])
            except (FileNotFoundError, ValueError):
                time.sleep(0.05)
        raise bench.BenchError(f"{' '.join(self.popen.args)} does not listen")  # type: ignore[arg-type]

    def status(self) -> dict[str, Any]:
        command = [str(DMC_PEER), "status", "--json", "--home", str(self.home)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise bench.BenchError(done.stderr.strip())
        facts: dict[str, Any] = json.loads(done.stdout)
        return facts

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def faults(self, agents: int) -> list[str]:
        """What an idle agent may not do."""
        members = [m for m in self.status()["members"] if m["state"] == "ALIVE"]
        found = []
        if "libtorch" in Path(f"/proc/{self.process.pid}/maps").read_text():
            found.append(f"{self.home.name} maps torch")
        if self.process.children():
            found.append(f"{self.home.name} has children: {self.process.children()}")
        if len(members) != agents:
            found.append(f"{self.home.name} sees {len(members)} of {agents} peers")
        return found


@contextmanager
def started(folder: Path, count: int, seed: int) -> Iterator[list[Agent]]:
    """A seeder and ``count - 1`` peers that hold shards, each knowing the first."""
    rng = random.Random(seed)
    (folder / "data").mkdir()
    for number in range(SAMPLES):
        (folder / "data" / f"{number:04}.bin").write_bytes(rng.randbytes(2000))
    agents = [Agent(folder / "peer0", "seed-dataset", str(folder / "data"))]
    try:
        address = agents[0].address()
        agents += [Agent(folder / f"peer{i}", "join", address) for i in range(1, count)]
        yield agents
    finally:
        for agent in agents:
            agent.popen.kill()
            agent.popen.wait()


def settled(agents: Sequence[Agent]) -> bool:
    """Whether all know all, and every shard has its holders."""
    facts = agents[0].status()
    at_rest = [not d["under_replicated"] and not d["fetching"] for d in facts["datasets"]]
    return len(facts["members"]) == len(agents) and bool(at_rest) and all(at_rest)


def measure(agents: Sequence[Agent], seconds: float) -> dict[str, Any]:
    """Processor seconds over wall seconds."""
    before_s, started_s = [a.cpu_s() for a in agents], time.monotonic()
    time.sleep(seconds)
    after_s, spent_s = [a.cpu_s() for a in agents], time.monotonic() - started_s
    each = [100 * (after - before) / spent_s for before, after in zip(before_s, after_s, strict=True)]
    return {
        "agents": len(agents),
        "seconds": round(spent_s, 1),
        "cpu_percent": round(sum(each), 2),
        "cpu_percent_each": [round(one, 2) for one in each],
        "rss_mib_each": [round(a.process.memory_info().rss / (1 << 20), 1) for a in agents],
    }


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="dmc-idle-"))
    try:
        with started(folder, options.agents, options.seed) as agents:
            for agent in agents:
                agent.address()
            deadline_s = time.monotonic() + READY_S
            while not settled(agents):
                if time.monotonic() > deadline_s:
                    raise bench.BenchError(f"the peers are not at rest after {READY_S:g} s")
                time.sleep(0.5)
            time.sleep(SETTLE_S)
            bench.say(f"watching {len(agents)} idle agents")
            result = measure(agents, 8.0 if options.quick else 60.0)
            faults = [fault for agent in agents for fault in agent.faults(len(agents))]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = [("agent", "cpu % of a core", "MiB")]
    for number, (cpu, rss) in enumerate(zip(result["cpu_percent_each"], result["rss_mib_each"], strict=True)):
        rows.append((f"peer{number}", f"{cpu:.2f}", f"{rss:.1f}"))
    print(bench.table([*rows, ("all", f"{result['cpu_percent']:.2f}", f"{sum(result['rss_mib_each']):.1f}")]))
    return bench.finish(options, {**result, "conditions": bench.conditions()}, faults)


if __name__ == "__main__":
    bench.run(main)
