"""DDP on gloo against p2p_dmc with fixed tau and with AdaComm, on four hosts, over slow and over fast links.

Each host is a network namespace (bin/netlab; needs root), first shaped to 100 Mbit/s, then unshaped. One
model (a perceptron of 10 million parameters), one data set, the same initial parameters and learning rate; each
contestant consumes every sample of each epoch once, in batches of the same size, so the number of local
steps is the same. The processes of all hosts share this machine's cores: compare the contestants of one run with
each other, not with other machines. Data: made-up images, or MNIST with --data (or MNIST_DIR in the environment).

The clock of a contestant runs from its first step on any host to the end of training on the last. p2p_dmc's data
comes over the network, DDP's is on every host from the start.

Keys:
  command, date, cores, load_before, python, torch, kernel
  hosts, data ("made-up" or "mnist"), parameters, batch_size (per host), epochs, samples (of all epochs)
  steps         local steps per host: samples / (hosts x batch_size)
  tau, t0_s     local steps per round (AdaComm: of its first round), seconds between AdaComm's decisions
  lr, wall_s    the learning rate; how long the whole benchmark took
  networks      for "100mbit" and "unshaped": {"ddp", "fixed", "adacomm": contestant, "ratios"}
  contestant    ready_s        from starting its processes to its first step
                seconds        of training, and s_per_step: seconds / steps
                samples        consumed
                sent_bytes, received_bytes   of each host's interface while training
                sent_bytes_all               the same from before start-up to the end, data and gossip included
                loss           [[seconds, mean training loss of the hosts' steps since the entry before], ...]
                test_loss, test_accuracy     of the final parameters, on samples that nobody trained on
                rounds, tau                  p2p_dmc: complete rounds, and the tau of each
                compute_s, comm_s, wait_s    p2p_dmc: mean over the peers, whole run
  ratios        for "fixed" and "adacomm", DDP's figure divided by theirs: speed (s_per_step), bytes (sent_bytes),
                time_to_loss (seconds to the first entry of "loss" that is at most the greatest of the three
                contestants' last ones)
  violations    of these: equal digests on all peers in every round and at the end, every sample exactly once in the
                ledger of each epoch and in the trainers' hands, bytes that the interfaces can have moved and that
                the reductions need
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench

HOSTS = 4
CONTESTANTS = Path(__file__).parent / "contestants"
NETWORKS = {"100mbit": 100_000_000, "unshaped": None}
"""Bits per second of each host's link, both ways."""
START_S = 120.0
"""Until a contestant's first step, on a busy machine."""
CURVE_POINTS = 32
TEST_SAMPLES = 1000
PARAMETER_BYTES = 4

SEED = [sys.executable, "-m", "p2p_dmc.cli", "seed-dataset"]
JOIN = [sys.executable, "-m", "p2p_dmc.cli", "join"]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(bench.ROOT),
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass
class Trained:
    """What one contestant left: each host's record, and what the interfaces say."""

    name: str
    started_s: float
    records: dict[str, dict[str, Any]]
    sent_all: list[int]
    """Bytes of each host from before the first process to after the last."""
    metrics: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    events: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    sample_counts: tuple[int, ...] = ()

    @property
    def begin_s(self) -> float:
        return float(min(record["begin_s"] for record in self.records.values()))

    @property
    def seconds(self) -> float:
        return float(max(record["end_s"] for record in self.records.values())) - self.begin_s

    def moved(self, way: int) -> list[int]:
        """Bytes that each host sent (0) or received (1) while training."""
        return [r["bytes_end"][way] - r["bytes_begin"][way] for r in self.records.values()]


# --- running ---------------------------------------------------------------------------------------------


class Course:
    """The hosts and the task, the same for the three contestants of one network."""

    def __init__(
        self, lab: bench.Lab, folder: Path, options: argparse.Namespace, data: tuple[Path, Path]
    ) -> None:
        self.lab = lab
        self.folder = folder
        self.options = options
        self.images = data[0]
        self.task = ["--data", data[0], "--test", data[1], "--hidden", options.hidden]
        self.task += ["--batch-size", options.batch_size, "--epochs", options.epochs]
        self.task += ["--lr", options.lr, "--seed", options.seed]
        self.addresses = {host["host"]: host["address"] for host in lab.list()}

    def ddp(self) -> Trained:
        """One process per host; no torchrun needed."""
        script = CONTESTANTS / "ddp.py"
        place = ["--world", HOSTS, "--master", f"{self.addresses['h1']}:29500"]
        return self._compete(
            "ddp",
            lambda record: {
                host: [sys.executable, script, *self.task, "--record", record, *place, "--rank", rank]
                for rank, host in enumerate(self.addresses)
            },
        )

    def p2p(self, name: str, tau: Sequence[Any]) -> Trained:
        """One agent per host; the first brings the data."""
        homes = {host: self.folder / name / host for host in self.addresses}
        with SeedingPeer(self, homes["h1"]) as seed:

            def commands(record: Path) -> dict[str, list[Any]]:
                script = [CONTESTANTS / "peer.py", *self.task, "--record", record, "--name", "images", *tau]
                where = ["--run", name, "--min-peers", HOSTS, "--insecure", "--listen"]
                return {
                    host: [
                        *JOIN,
                        "--home",
                        homes[host],
                        "--name",
                        host,
                        *where,
                        f"tcp://{address}:0",
                        seed,
                        *script,
                    ]
                    for host, address in self.addresses.items()
                }

            trained = self._compete(name, commands)
            manifest = next((homes["h1"] / "store").glob("*/manifest.msgpack"))
        trained.metrics = {host: read_lines(home / "metrics.jsonl") for host, home in homes.items()}
        trained.events = {host: read_lines(home / "events.jsonl") for host, home in homes.items()}
        trained.sample_counts = counts_of(manifest)
        return trained

    def _compete(self, name: str, commands: Any) -> Trained:
        """Start a command on each host and wait for all."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        sent_before = [host["sent_bytes"] for host in self.lab.list()]
        started_s = time.monotonic()
        processes = {}
        for host, command in commands(folder).items():
            with open(folder / f"{host}.log", "wb") as log:
                processes[host] = self.lab.start(
                    host, command, stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT, cwd=bench.ROOT
                )
        codes = bench.wait_all(processes, self.limit_s())
        for host, code in codes.items():
            if code != 0:
                said = (folder / f"{host}.log").read_text(errors="replace").splitlines()[-3:]
                how = (
                    f"exit code {code}" if code is not None else f"still running after {self.limit_s():.0f} s"
                )
                raise bench.BenchError(f"{name}, {host}: {how}: {' | '.join(said) or 'it said nothing'}")
        records = {host: json.loads((folder / f"{host}.json").read_text()) for host in processes}
        sent_after = [host["sent_bytes"] for host in self.lab.list()]
        sent = [after - before for before, after in zip(sent_before, sent_after, strict=True)]
        return Trained(name=name, started_s=started_s, records=records, sent_all=sent)

    def limit_s(self) -> float:
        """Several times what the slowest contestant takes on a busy machine."""
        moved_bytes: int = 2 * 3 * self.options.hidden**2 * PARAMETER_BYTES
        steps: int = self.options.steps
        return START_S + 4 * steps * (1.0 + moved_bytes * 8 / 100e6)


class SeedingPeer:
    """The agent of h1 while it lives; its address. `join` hands it the script."""

    def __init__(self, course: Course, home: Path) -> None:
        home.parent.mkdir(exist_ok=True)
        listen = ["--listen", f"tcp://{course.addresses['h1']}:0", "--insecure", "--json"]
        command: list[Any] = [
            *SEED,
            course.images,
            "--name",
            "images",
            "--peer-name",
            "h1",
            "--home",
            home,
            *listen,
        ]
        self._log = open(home.parent / "seed.log", "w+b")  # noqa: SIM115 the process writes as long as it lives
        self._process = course.lab.start(
            "h1", command, stdout=subprocess.PIPE, stderr=self._log, env=ENVIRONMENT, cwd=bench.ROOT
        )

    def __enter__(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            fact = json.loads(line)
            if fact["event"] == "seeding":
                return str(fact["address"])
        self._log.seek(0)
        raise bench.BenchError(f"seed-dataset: {self._log.read().decode(errors='replace').strip()[-500:]}")

    def __exit__(self, *_: object) -> None:
        bench.end(self._process)
        self._log.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A journal of one JSON object a line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def counts_of(manifest: Path) -> tuple[int, ...]:
    """Samples of each shard."""
    from p2p_dmc.data.manifest import Manifest

    return tuple(Manifest.from_bytes(manifest.read_bytes()).sample_counts)


# --- invariants ------------------------------------------------------------------------------------------


def check_digests(trained: Trained) -> list[str]:
    """Same parameters on all hosts at the end, and in each round that they share."""
    found = []
    finals = {host: record["digest"] for host, record in trained.records.items()}
    if len(set(finals.values())) != 1:
        found.append(f"{trained.name}: final parameters differ: {finals}")
    rounds: dict[tuple[int, int], set[str]] = {}
    for lines in trained.metrics.values():
        for line in lines:
            rounds.setdefault((line["view_epoch"], line["round"]), set()).add(line["digest"])
    differing = sorted(lineage for lineage, digests in rounds.items() if len(digests) != 1)
    if differing:
        found.append(f"{trained.name}: digests differ in rounds {differing}")
    return found


def check_samples(trained: Trained, per_epoch: int, epochs: int) -> list[str]:
    """Every sample once in each epoch: in the hosts' steps, and in p2p_dmc's ledger as its rounds count it."""
    found = []
    seen = Counter((epoch, number) for r in trained.records.values() for epoch, number in r["seen"])
    if set(seen) != {(epoch, number) for epoch in range(epochs) for number in range(per_epoch)}:
        found.append(f"{trained.name}: {len(seen)} of {per_epoch * epochs} samples were trained on")
    faults = {"round_failed", "trainer_lost", "diverged"}  # after one, samples in hand are trained on again
    if not any(event["event"] in faults for events in trained.events.values() for event in events):
        again = sum(count > 1 for count in seen.values())
        if again:
            found.append(f"{trained.name}: {again} samples were trained on more than once")
    for host, lines in trained.metrics.items():
        counted = Counter(
            (line["epoch"], shard, place)
            for line in lines
            for braid in line["counted"]
            for shard, lo, hi in braid
            for place in range(lo, hi)
        )
        due = {
            (epoch, shard, place)
            for epoch in range(epochs)
            for shard, count in enumerate(trained.sample_counts)
            for place in range(count)
        }
        if set(counted) != due or any(count != 1 for count in counted.values()):
            found.append(f"{trained.name}, {host}: the ledger counts {counted.total()} samples of {len(due)}")
    return found


def check_bytes(trained: Trained, parameters: int, bits_per_second: int | None) -> list[str]:
    """The reductions need their bytes, and no link carries more than its rate."""
    found = []
    for i, (host, record) in enumerate(trained.records.items()):
        sent, everything = trained.moved(0)[i], trained.sent_all[i]
        if not 0 < sent <= everything:
            found.append(f"{trained.name}, {host}: {sent} bytes while training, {everything} in all")
        rounds = trained.metrics.get(host)
        members = [line["members"] for line in rounds] if rounds else [HOSTS] * len(record["steps"])
        needed = sum(2 * (m - 1) * parameters * PARAMETER_BYTES // m for m in members)
        if everything < needed:
            need = f"{len(members)} reductions need {needed}"
            found.append(f"{trained.name}, {host}: {everything} bytes sent, {need}")
        claimed = sum(line["bytes_sent"] for line in rounds or ())
        if claimed > everything:
            found.append(f"{trained.name}, {host}: {claimed} bytes claimed, {everything} sent")
        for way, moved in (("sent", sent), ("received", trained.moved(1)[i])):
            took_s = record["end_s"] - record["begin_s"]
            most = (bits_per_second or 0) / 8 * took_s * 1.02 + 1_000_000  # bursts and queues
            if bits_per_second and moved > most:
                found.append(f"{trained.name}, {host}: {moved} bytes {way} in {took_s:.1f} s, {most:.0f} fit")
    return found


# --- the report ------------------------------------------------------------------------------------------


def curve(trained: Trained) -> list[list[float]]:
    """[seconds, loss]: all hosts' steps in order of time, in at most CURVE_POINTS parts, weighted by samples."""
    steps = sorted(tuple(step) for record in trained.records.values() for step in record["steps"])
    size = -(-len(steps) // CURVE_POINTS)
    size = -(-size // HOSTS) * HOSTS
    points = []
    for start in range(0, len(steps), size):
        part = steps[start : start + size]
        samples = sum(count for _, count, _ in part)
        loss = sum(count * value for _, count, value in part) / samples
        points.append([round(part[-1][0] - trained.begin_s, 3), round(loss, 4)])
    return points


def summary(trained: Trained, steps: int) -> dict[str, Any]:
    """The contestant's part of the result."""
    tested = next(record for record in trained.records.values() if "test_loss" in record)
    facts: dict[str, Any] = {
        "ready_s": round(trained.begin_s - trained.started_s, 2),
        "seconds": round(trained.seconds, 2),
        "s_per_step": round(trained.seconds / steps, 4),
        "samples": sum(len(record["seen"]) for record in trained.records.values()),
        "sent_bytes": trained.moved(0),
        "received_bytes": trained.moved(1),
        "sent_bytes_all": trained.sent_all,
        "loss": curve(trained),
        "test_loss": round(tested["test_loss"], 4),
        "test_accuracy": round(tested["test_accuracy"], 4),
    }
    if trained.metrics:
        lines = max(trained.metrics.values(), key=len)
        facts |= {"rounds": len(lines), "tau": [line["tau"] for line in lines]}
        for key in ("compute_s", "comm_s", "wait_s"):
            total = sum(line[key] for lines in trained.metrics.values() for line in lines)
            facts[key] = round(total / len(trained.metrics), 2)
    return facts


def ratios(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """DDP's figures divided by the others'."""
    target = max(facts["loss"][-1][1] for facts in results.values())
    reached_s = {
        name: next(s for s, loss in facts["loss"] if loss <= target) for name, facts in results.items()
    }
    ddp = results["ddp"]
    return {
        name: {
            "speed": round(ddp["s_per_step"] / facts["s_per_step"], 3),
            "bytes": round(sum(ddp["sent_bytes"]) / sum(facts["sent_bytes"]), 3),
            "time_to_loss": round(reached_s["ddp"] / reached_s[name], 3),
        }
        for name, facts in results.items()
        if name != "ddp"
    }


def report(networks: dict[str, dict[str, Any]]) -> str:
    """The table for people."""
    head = (
        "network contestant s/step MB/peer loss test_loss accuracy rounds faster fewer_bytes sooner_at_loss"
    )
    rows = [head.split()]
    for network, results in networks.items():
        for name in ("ddp", "fixed", "adacomm"):
            facts, compared = results[name], results["ratios"].get(name, {})
            row = [
                network,
                name,
                f"{facts['s_per_step']:.3f}",
                f"{sum(facts['sent_bytes']) / HOSTS / 1e6:.0f}",
            ]
            row += [
                f"{facts['loss'][-1][1]:.3f}",
                f"{facts['test_loss']:.3f}",
                f"{facts['test_accuracy']:.1%}",
            ]
            row += [str(facts.get("rounds", "-"))]
            row += [
                f"{compared[key]:.1f}x" if compared else "-" for key in ("speed", "bytes", "time_to_loss")
            ]
            rows.append(row)
    return bench.table(rows)


# --- the command line ------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = bench.parser(__doc__, "vs_ddp")
    made.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        default=Path(os.environ["MNIST_DIR"]) if os.environ.get("MNIST_DIR") else None,
        help="MNIST's four IDX files, .gz (default MNIST_DIR in the environment, else made-up images)",
    )
    made.add_argument("--steps", type=int, help="local steps per host (default 64; quick 16)")
    made.add_argument("--epochs", type=int, help="passes over the data in these steps (default 1; quick 2)")
    made.add_argument("--batch-size", type=int, default=32, help="samples per host and step (default 32)")
    made.add_argument("--hidden", type=int, help="width (default 1720: 10.2 million weights; quick 512: 1.2)")
    made.add_argument("--tau", type=int, help="local steps per round, AdaComm's first (default 16; quick 4)")
    made.add_argument("--t0", type=float, help="seconds between AdaComm's decisions (default 5; quick 1)")
    made.add_argument("--lr", type=float, default=0.03, help="plain SGD's, for all (default 0.03)")
    made.add_argument("--keep", type=Path, metavar="DIR", help="leave homes, logs and records there")
    return made


def parse(argv: Sequence[str]) -> argparse.Namespace:
    options = parser().parse_args(argv)
    defaults = {"steps": (64, 16), "epochs": (1, 2), "hidden": (1720, 512), "tau": (16, 4), "t0": (5.0, 1.0)}
    for name, (full, quick) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    if min(options.steps, options.epochs, options.batch_size, options.hidden, options.tau) < 1:
        raise bench.BenchError("--steps, --epochs, --batch-size, --hidden and --tau are 1 or more")
    if options.steps % options.epochs:
        raise bench.BenchError(f"--steps {options.steps} is no multiple of --epochs {options.epochs}")
    return options


def compete(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """All contestants on all networks; the results of each network, and violations."""
    per_epoch = options.steps * options.batch_size * HOSTS // options.epochs
    try:
        from contestants import images

        data = images.write(folder, per_epoch, TEST_SAMPLES, options.seed, options.data)
    except (OSError, ValueError) as error:
        raise bench.BenchError(f"--data {options.data}: {error}") from None
    taus = {
        "ddp": None,
        "fixed": ["--tau", options.tau],
        "adacomm": ["--tau0", options.tau, "--t0", options.t0],
    }
    networks: dict[str, Any] = {}
    violations: list[str] = []
    for network, rate in NETWORKS.items():
        (folder / network).mkdir()
        with bench.lab("vsddp", HOSTS, network) as lab:
            course = Course(lab, folder / network, options, data)
            results: dict[str, Any] = {}
            for name, tau in taus.items():
                trained = course.ddp() if tau is None else course.p2p(name, tau)
                results[name] = summary(trained, options.steps)
                bench.say(f"{network}, {name}: {results[name]['s_per_step']:.3f} s per step")
                options.parameters = next(iter(trained.records.values()))["parameters"]
                found = check_digests(trained) + check_samples(trained, per_epoch, options.epochs)
                found += check_bytes(trained, options.parameters, rate)
                violations += [f"{network}, {line}" for line in found]
        networks[network] = results | {"ratios": ratios(results)}
    return networks, violations


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    conditions = bench.conditions()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vs_ddp.") as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise bench.BenchError(f"--keep {folder} is not empty: give a new folder")
        networks, violations = compete(folder, options)
    print(report(networks))
    result = {
        **conditions,
        "hosts": HOSTS,
        "data": "mnist" if options.data else "made-up",
        "parameters": options.parameters,
        "batch_size": options.batch_size,
        "epochs": options.epochs,
        "samples": options.steps * options.batch_size * HOSTS,
        "steps": options.steps,
        "tau": options.tau,
        "t0_s": options.t0,
        "lr": options.lr,
        "wall_s": round(time.monotonic() - started_s, 1),
        "networks": networks,
    }
    return bench.finish(options, result, violations)


if __name__ == "__main__":
    bench.run(main)
