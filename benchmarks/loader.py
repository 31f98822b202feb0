"""Samples a second of peer.loader, of webdataset and of torch's DataLoader over loose files: the same samples.

One peer that trains alone, with its agent, leases and rounds. Its script goes through the data by each of the three
in turn, with the same decoder, batch size and workers, the loop's body is an optimizer's step over one parameter, and
each trial is an epoch from its first batch to its last. The first epoch of each warms up and is left out.
peer.loader and the loose files give the samples shuffled, webdataset in the order of the shards. Who is first changes
from trial to trial; all files are in the page cache. Where other programs run, CPU time says more than the wall's.

Keys:
  conditions    command, date, cores, load_before, python, torch, kernel, webdataset
  trials        epochs of each
  cases         by name: bytes_1k, image_100k (format: jpeg where Pillow is installed, else deflate), tokens:
    samples, sample_bytes (mean), batch_size
    workers_0, workers_2:
      ours, webdataset, loose   samples a second, per trial
      over_webdataset, over_loose   ratio of the medians, ours to theirs; wanted: at least 1
      cpu_us        by loader: microseconds of CPU a sample, median; trainer, workers, and for ours the agent
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench

KIT = Path(__file__).parent / "loader_kit" / "contest.py"
WORKERS = (0, 2)
TRIALS, QUICK_TRIALS = 9, 3
PATIENCE_S = 300.0
SHARD_BYTES = "512KiB"
"""Some shards for each worker also in a quick run: webdataset deals out whole ones."""
SIZES = {"bytes_1k": (16384, 64), "image_100k": (768, 16), "tokens": (8192, 32)}
"""Samples and batch size."""
QUICK_DIVISOR = 8
SIDE = 280
"""Pixels of an image; noise makes about 100 kB of it."""


def bytes_1k(rng: random.Random) -> bytes:
    return rng.randbytes(1024)


def tokens(rng: random.Random) -> bytes:
    return rng.randbytes(4096)


def image_100k(rng: random.Random) -> bytes:
    """JPEG of noise, or where there is no Pillow 100 kB of deflate."""
    try:
        from PIL import Image
    except ImportError:
        half = rng.randbytes(100_000)
        return zlib.compress(bytes(value & 0xFC for value in half), 1)
    kept = io.BytesIO()
    Image.frombytes("RGB", (SIDE, SIDE), rng.randbytes(SIDE * SIDE * 3)).save(kept, "JPEG", quality=80)
    return kept.getvalue()


MAKERS: dict[str, Callable[[random.Random], bytes]] = {
    "bytes_1k": bytes_1k,
    "image_100k": image_100k,
    "tokens": tokens,
}


def make(case: str, folder: Path, samples: int, rng: random.Random) -> int:
    """Loose files in folders of a thousand; all their bytes."""
    written = 0
    for number in range(samples):
        path = folder / f"{number // 1000:03}" / f"{number:06}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        written += path.write_bytes(MAKERS[case](rng))
    return written


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "p2p_dmc.cli", *map(str, words)]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def contest(
    case: str, folder: Path, home: Path, batch_size: int, workers: int, trials: int
) -> dict[str, Any]:
    """One run; what each loader did, the first epoch of each left out."""
    out = folder.parent / "said.json"
    [shards] = home.glob("store/*/shards")
    words = ["join", "--home", home, "--run", f"workers{workers}", KIT]
    words += ["--case", case, "--folder", folder, "--shards", shards, "--out", out, "--workers", workers]
    words += ["--batch-size", batch_size, "--trials", trials]
    ended = subprocess.run(
        command(*words), env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    if ended.returncode or not out.exists():
        raise bench.BenchError(f"the run failed: {(ended.stdout + ended.stderr)[-800:]}")
    said: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return said


def judge(case: str, samples: int, said: dict[str, Any]) -> list[str]:
    """Each loader gave every sample once, in every epoch: as many, and the same sum over all their values."""
    sums = {total for epochs in said.values() for _, _, total, _ in epochs}
    wrong = [
        f"{case}: {name} gave {n} of {samples} samples"
        for name, epochs in said.items()
        for _, n, _, _ in epochs
        if n != samples
    ]
    return wrong + ([f"{case}: the samples differ"] if len(sums) != 1 else [])


def compare(said: dict[str, Any]) -> dict[str, Any]:
    """Rates per trial, and how ours relate."""
    rates = {name: [round(rate, 1) for rate, _, _, _ in epochs[1:]] for name, epochs in said.items()}
    ours = statistics.median(rates["ours"])
    over = {
        f"over_{name}": round(ours / statistics.median(rates[name]), 3) for name in ("webdataset", "loose")
    }
    cpu_us = {name: round(statistics.median(e[3] for e in epochs[1:]), 2) for name, epochs in said.items()}
    return rates | over | {"cpu_us": cpu_us}


def measure(case: str, root: Path, options: Any, violations: list[str]) -> dict[str, Any]:
    """Seed the case's samples, then one run for each number of workers."""
    samples, batch_size = SIZES[case]
    samples //= QUICK_DIVISOR if options.quick else 1
    trials = QUICK_TRIALS if options.quick else TRIALS
    folder, home = root / "files", root / "home"
    written = make(case, folder, samples, random.Random(options.seed))
    first = next(folder.rglob("*.bin")).read_bytes()
    result: dict[str, Any] = {
        "samples": samples,
        "sample_bytes": written // samples,
        "batch_size": batch_size,
    }
    if case == "image_100k":
        result["format"] = "jpeg" if first[:2] == b"\xff\xd8" else "deflate"
    words = ["seed-dataset", folder, "--name", "loader", "--home", home, "--listen", "tcp://127.0.0.1:0"]
    with open(root / "output", "wb") as output:
        seed = subprocess.Popen(
            command(*words, "--max-shard-size", SHARD_BYTES), stdout=output, stderr=output, env=environment()
        )
    try:
        wait_until(lambda: (home / "agent.json").exists() and any(home.glob("store/*/shards/*.tar")), seed)
        for workers in WORKERS:
            said = contest(case, folder, home, batch_size, workers, trials)
            violations += judge(case, samples, said)
            found = result[f"workers_{workers}"] = compare(said)
            bench.say(
                f"{case}, {workers} workers: {statistics.median(found['ours']):,.0f} samples/s, "
                f"{found['over_webdataset']:.2f} x webdataset, {found['over_loose']:.2f} x loose files"
            )
    finally:
        seed.send_signal(signal.SIGTERM)
        seed.send_signal(signal.SIGTERM)
        seed.wait(20)
    return result


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise bench.BenchError("seeding failed; try dmc-peer seed-dataset by hand")
        time.sleep(0.05)


def main(arguments: Sequence[str]) -> int:
    parser = bench.parser(__doc__, "loader")
    parser.add_argument("--case", choices=sorted(SIZES), action="append", help="only this one (repeatable)")
    options = parser.parse_args(arguments)
    conditions = bench.conditions() | {"webdataset": importlib.metadata.version("webdataset")}
    violations: list[str] = []
    cases: dict[str, Any] = {}
    for case in options.case or SIZES:
        with tempfile.TemporaryDirectory(prefix="dmc-loader-") as folder:
            cases[case] = measure(case, Path(folder), options, violations)
    rows = [
        [
            "",
            "workers",
            "ours/s",
            "webdataset/s",
            "loose files/s",
            "ours over them",
            "CPU us a sample of each",
        ]
    ]
    for case, found in cases.items():
        for workers in WORKERS:
            one = found[f"workers_{workers}"]
            rates = [f"{statistics.median(one[name]):,.0f}" for name in ("ours", "webdataset", "loose")]
            over = f"{one['over_webdataset']:.2f}, {one['over_loose']:.2f}"
            cpu = ", ".join(f"{one['cpu_us'][name]:.1f}" for name in ("ours", "webdataset", "loose"))
            rows.append([case, str(workers), *rates, over, cpu])
    print(bench.table(rows))
    result = {"conditions": conditions, "trials": QUICK_TRIALS if options.quick else TRIALS, "cases": cases}
    return bench.finish(options, result, violations)


if __name__ == "__main__":
    bench.run(main)
