"""How fast an input becomes shards, and in how much memory, beside `tar cf` and webdataset's ShardWriter.

All write the same contents to the same disk, one after the other in the same run, each in a process of its own, and
each ends when its files are synced. What the system remembers of the input is written and read once before.
seed-dataset also looks at the input, shuffles it, hashes it and makes an index; the others do not. tar and ShardWriter
take the rows of the JSONL one by one from memory, as members of tars.

Keys:
  conditions    command, date, cores, load_before, python, torch, kernel, webdataset
  cases         by name: rows (a JSONL of rows of 1 kB), files (of 100 kB, in folders), big (files of 64 MB):
    input_bytes, samples
    seconds, megabytes_per_s   of input, by contender: seed (seed-dataset), tar (tar cf; rows: tarfile, since tar takes
                no rows), webdataset (ShardWriter); the median of the repeats
    all_seconds  of each repeat, by contender
    resident_mib  the most that seed-dataset had resident
  slope         of seed-dataset on rows, from half of them to all (up to some 400 000 are sorted in memory, so that with
                --quick it is what a sample takes there):
    samples     [few, many]
    resident_mib  [with few, with many]
    bytes_per_sample   what one more sample takes; wanted: 0
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bench

ROW_BYTES = 1000
SIZES = {"rows": 1_000_000_000, "files": 1_000_000_000, "big": 2_000_000_000}
QUICK_SIZES = {"rows": 100_000_000, "files": 100_000_000, "big": 200_000_000}
FILE_BYTES = {"files": 100_000, "big": 64_000_000}
REPEATS, QUICK_REPEATS = 3, 1
SHARD_SAMPLES = 10_000
CONTENDERS = ("seed", "tar", "webdataset")


def rows(count: int, seed: int) -> Iterator[bytes]:
    """Lines of JSON of about a kilobyte, newline included, all different."""
    filler = b"%d " % seed * ROW_BYTES
    for number in range(count):
        line = b'{"n": %d, "text": "%s' % (number, filler)
        yield line[: ROW_BYTES - 3] + b'"}\n'


def make_input(case: str, folder: Path, size: int, seed: int) -> tuple[Path, int]:
    """The input, and how many samples are in it."""
    folder.mkdir()
    if case == "rows":
        path, count = folder / "rows.jsonl", size // ROW_BYTES
        with path.open("wb") as file:
            for line in rows(count, seed):
                file.write(line)
    else:
        path, each = folder / "files", FILE_BYTES[case]
        count = size // each
        block = os.urandom(1 << 20)
        for number in range(count):
            one = path / f"class{number % 10}" / f"{number:06d}.bin"
            one.parent.mkdir(parents=True, exist_ok=True)
            with one.open("wb") as file:
                file.write(b"%012d" % number)
                for left in range(each - 12, 0, -len(block)):
                    file.write(block[:left])
    os.sync()
    return path, count


# --- the contenders, each in a process of its own ----------------------------------------------------------


def with_seed(path: Path, out: Path) -> None:
    """What seed-dataset does before it serves."""
    from p2p_dmc.data.formats import scan
    from p2p_dmc.data.readers.base import Spool
    from p2p_dmc.data.seeding import plan_data_sets
    from p2p_dmc.data.store import Store

    store = Store(out)
    with store.spool_folder() as folder, Spool(folder) as spool:
        [plan] = plan_data_sets(scan(path, spool=spool), name="bench")
        plan.write(store, 1)


def with_tar(path: Path, out: Path) -> None:
    """tar cf; rows, which tar does not know, by tarfile."""
    out.mkdir()
    if path.is_dir():
        subprocess.run(["tar", "cf", out / "all.tar", "-C", path, "."], check=True)
    else:
        import io
        import tarfile

        with tarfile.open(out / "all.tar", "w", format=tarfile.USTAR_FORMAT) as tar, path.open("rb") as file:
            for number, line in enumerate(file):
                member = tarfile.TarInfo(f"{number:09d}.json")
                member.size = len(line)
                tar.addfile(member, io.BytesIO(line))
                tar.members.clear()  # type: ignore[attr-defined] # it would remember them all


def with_webdataset(path: Path, out: Path) -> None:
    """webdataset.ShardWriter, in the order of the input."""
    import webdataset

    out.mkdir()
    with webdataset.ShardWriter(
        str(out / "%05d.tar"), maxcount=SHARD_SAMPLES, maxsize=64 << 20, verbose=0
    ) as writer:
        if path.is_dir():
            for one in sorted(path.rglob("*.bin")):
                key = str(one.relative_to(path).with_suffix(""))
                writer.write({"__key__": key, "bin": one.read_bytes()})
        else:
            with path.open("rb") as file:
                for number, line in enumerate(file):
                    writer.write({"__key__": f"{number:09d}", "json": line.rstrip(b"\n")})


CHILD = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
import seed
began_s = time.perf_counter()
seed.with_{contender}(Path({path!r}), Path({out!r}))
import os
for folder, _, names in os.walk({out!r}):
    for name in names:
        descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
seconds = time.perf_counter() - began_s
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({{"seconds": seconds, "resident_mib": peak / 1024}}))
"""


def measure(contender: str, path: Path, scratch: Path) -> dict[str, float]:
    """One contender once; what it wrote is removed."""
    out = scratch / "out"
    child = CHILD.format(here=str(Path(__file__).parent), contender=contender, path=str(path), out=str(out))
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=False)
    if done.returncode:
        raise bench.BenchError(f"{contender} on {path}: {done.stderr.strip().splitlines()[-1:]}")
    shutil.rmtree(out)
    said: dict[str, float] = json.loads(done.stdout)
    return said


def measure_case(case: str, size: int, repeats: int, seed: int, scratch: Path) -> dict[str, Any]:
    """All contenders in turn, so that each repeat has them at about the same time."""
    path, samples = make_input(case, scratch / case, size, seed)
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    input_bytes = sum(one.stat().st_size for one in files)
    for one in files:
        with one.open("rb") as file:
            while file.read(1 << 24):
                pass
    said: dict[str, list[dict[str, float]]] = {contender: [] for contender in CONTENDERS}
    for _ in range(repeats):
        for contender in CONTENDERS:
            said[contender].append(measure(contender, path, scratch))
    shutil.rmtree(path.parent)
    seconds = {name: statistics.median(one["seconds"] for one in ones) for name, ones in said.items()}
    return {
        "input_bytes": input_bytes,
        "samples": samples,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "megabytes_per_s": {name: round(input_bytes / 1e6 / value, 1) for name, value in seconds.items()},
        "all_seconds": {name: [round(one["seconds"], 3) for one in ones] for name, ones in said.items()},
        "resident_mib": round(max(one["resident_mib"] for one in said["seed"]), 1),
    }


def slope(case: dict[str, Any], size: int, seed: int, scratch: Path) -> dict[str, Any]:
    """Memory with half of the rows beside that with all."""
    path, few = make_input("rows", scratch / "few", size // 2, seed)
    resident_mib = measure("seed", path, scratch)["resident_mib"]
    more = case["samples"] - few
    return {
        "samples": [few, case["samples"]],
        "resident_mib": [round(resident_mib, 1), case["resident_mib"]],
        "bytes_per_sample": round((case["resident_mib"] - resident_mib) * 2**20 / more, 2),
    }


def main(argv: Sequence[str]) -> int:
    made = bench.parser(__doc__, "seed")
    made.add_argument(
        "--scratch", type=Path, metavar="DIR", help="on which disk (default the system's for such)"
    )
    options = made.parse_args(argv)
    sizes = QUICK_SIZES if options.quick else SIZES
    result: dict[str, Any] = {"conditions": conditions(), "cases": {}}
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        scratch = Path(name)
        room = 4 * max(sizes.values())
        if shutil.disk_usage(scratch).free < room:
            raise bench.BenchError(f"{scratch}: {room} bytes have to be free; give another --scratch")
        for case, size in sizes.items():
            began_s = time.monotonic()
            repeats = QUICK_REPEATS if options.quick else REPEATS
            result["cases"][case] = measure_case(case, size, repeats, options.seed, scratch)
            bench.say(f"{case}: {time.monotonic() - began_s:.0f} s")
        result["slope"] = slope(result["cases"]["rows"], sizes["rows"], options.seed, scratch)
    print(report(result))
    return bench.finish(options, result, [])


def conditions() -> dict[str, Any]:
    return {**bench.conditions(), "webdataset": importlib.metadata.version("webdataset")}


def report(result: dict[str, Any]) -> str:
    rows = [["", *(f"{name} MB/s" for name in CONTENDERS), "seed MiB"]]
    for name, case in result["cases"].items():
        rates = case["megabytes_per_s"]
        rows.append([name, *(f"{rates[one]:.0f}" for one in CONTENDERS), f"{case['resident_mib']:.0f}"])
    return f"{bench.table(rows)}\n{result['slope']['bytes_per_sample']} bytes of memory for one sample more"


if __name__ == "__main__":
    bench.run(main)
