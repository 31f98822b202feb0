"""In how much memory `dmc-peer seed-dataset` takes an input that is larger than the machine's memory.

The command itself, from its start until it serves; wanted are less than 500 MB whatever the input. The input's names
are links to a few files, so that only the shards take the disk's room: seeding reads each name as a file of its own.

Keys:
  conditions    command, date, cores, load_before, python, torch, kernel
  limit_bytes   what must not be reached
  cases         by name: files (a folder of very many small files and a few larger than a shard), packed (a JSONL that
                has to be decompressed):
    input_bytes   that samples are made of
    samples, shards
    shard_bytes   on disk
    seconds       until it serves
    resident_bytes  the most that the process had resident
    children      processes that it had started, of which there should be none
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import bench

LIMIT_BYTES = 500_000_000
BLOCK_BYTES = 1 << 20


class Size(NamedTuple):
    """``small`` and ``large`` files of so many bytes, and ``rows``."""

    small: int
    small_bytes: int
    large: int
    large_bytes: int
    rows: int
    row_bytes: int


SIZE = Size(500_000, 10_000, 10, 1_500_000_000, 400_000, 10_000)
QUICK_SIZE = Size(10_000, 10_000, 4, 100_000_000, 10_000, 10_000)
CONTENTS = 50
"""Different small files; ext4 allows 65 000 names of one."""
FOLDERS = 100


def write(path: Path, size: int, block: bytes) -> None:
    """A file of so many bytes, blocks one after the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for left in range(size, 0, -len(block)):
            file.write(block[:left])


def make_files(folder: Path, size: Size) -> tuple[Path, int]:
    """The input and its bytes."""
    root, hidden = folder / "files", folder / "contents"
    for number in range(CONTENTS):
        write(hidden / str(number), size.small_bytes, os.urandom(size.small_bytes))
    write(hidden / "large", size.large_bytes, os.urandom(BLOCK_BYTES))
    for number in range(FOLDERS):
        (root / f"{number:03d}").mkdir(parents=True)
    for number in range(size.small):
        os.link(hidden / str(number % CONTENTS), root / f"{number % FOLDERS:03d}" / f"{number:06d}.bin")
    for number in range(size.large):
        os.link(hidden / "large", root / f"large{number:02d}.bin")
    return root, size.small * size.small_bytes + size.large * size.large_bytes


def make_packed(folder: Path, size: Size) -> tuple[Path, int]:
    """The input and the bytes that are packed in it."""
    path = folder / "rows.jsonl.gz"
    text = "x" * (size.row_bytes - 40)
    with gzip.open(path, "wb", compresslevel=1) as file:
        for number in range(size.rows):
            file.write(b'{"n": %9d, "text": "%s"}\n' % (number, text.encode()))
    return path, size.rows * size.row_bytes


def measure(path: Path, home: Path) -> dict[str, Any]:
    """Run the command until it serves, and look at what it took."""
    words = [sys.executable, "-m", "p2p_dmc.cli", "seed-dataset", str(path), "--home", str(home), "--json"]
    began_s = time.monotonic()
    log = home.with_name("log")
    with (
        log.open("w") as errors,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            seeding: dict[str, Any] = {}
            for line in process.stdout:
                seeding = json.loads(line)
                if seeding.get("event") == "seeding":
                    break
            else:
                raise bench.BenchError(f"seed-dataset ended: {log.read_text().strip()[-300:]}")
            seconds = time.monotonic() - began_s
            status = Path(f"/proc/{process.pid}/status").read_text()
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        finally:
            process.send_signal(signal.SIGINT)
            process.stdout.read()
    stored = list(home.rglob("*.tar"))
    return {
        "samples": seeding["samples"],
        "shards": seeding["shards"],
        "shard_bytes": sum(one.stat().st_size for one in stored),
        "seconds": round(seconds, 1),
        "resident_bytes": peak << 10,
        "children": len(children),
    }


CASES = {"files": make_files, "packed": make_packed}


def main(argv: Sequence[str]) -> int:
    made = bench.parser(__doc__, "seed_memory")
    made.add_argument(
        "--scratch", type=Path, metavar="DIR", help="on which disk (default the system's for such)"
    )
    options = made.parse_args(argv)
    size = QUICK_SIZE if options.quick else SIZE
    result: dict[str, Any] = {"conditions": bench.conditions(), "limit_bytes": LIMIT_BYTES, "cases": {}}
    violations = []
    for name, make in CASES.items():
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            room = 2 * size.small * size.small_bytes + (size.large + 2) * size.large_bytes
            if shutil.disk_usage(scratch).free < room:
                raise bench.BenchError(f"{scratch}: {room} bytes have to be free; give another --scratch")
            path, input_bytes = make(Path(scratch), size)
            bench.say(f"{name}: {input_bytes / 1e9:.1f} GB")
            one = {"input_bytes": input_bytes, **measure(path, Path(scratch) / "home")}
        result["cases"][name] = one
        if one["resident_bytes"] >= LIMIT_BYTES or one["children"]:
            violations.append(f"{name}: {one['resident_bytes']} bytes resident, {one['children']} children")
    print(report(result))
    return bench.finish(options, result, violations)


def report(result: dict[str, Any]) -> str:
    rows = [["", "GB", "samples", "shards", "s", "MB resident"]]
    for name, case in result["cases"].items():
        counts = [str(case[one]) for one in ("samples", "shards", "seconds")]
        rows.append(
            [name, f"{case['input_bytes'] / 1e9:.1f}", *counts, f"{case['resident_bytes'] / 1e6:.0f}"]
        )
    return bench.table(rows)


if __name__ == "__main__":
    bench.run(main)
