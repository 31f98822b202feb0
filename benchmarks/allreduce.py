"""A round's reduction beside plain gloo: on loopback and on hosts with shaped cables, by size and scheme.

Each member is a process of its own; on shaped links each is on a host of its own (bin/netlab; needs root). In turn they
sum the same float32 vectors by gloo's all-reduce alone ("plain") and as a trainer does: "none", "bf16", "int8", "int4",
"topk", which are what `compress` of `dmc.Optimizer` means (docs/compression.md). The clock of a reduction runs from a
moment when all stand ready to the end on the slowest. The rest of what a round does with the vector, the same in all,
and the headers before it, which real peers with a small model say to each other, are told apart.
All processes share this machine's cores: coding and loopback take their time from each other.

Keys:
  command, date, cores, load_before, python, torch, kernel
  schemes     those that were measured
  links       for "loopback", "100mbit", "1gbit": {members: {"header_s", "sizes"}}
    header_s  median over rounds of what the last member at a barrier waits for everybody's headers
    sizes     {megabytes of float32 (10^6 bytes): {"plain", each scheme: figures, "ring_bound_s", "around_s"}}
      figures      seconds (median over the repeats of the slowest member), repeats, mb_s (megabytes / seconds),
                   of_plain (plain's seconds over these: how many times as fast), off (length of the first result's
                   distance from the true mean, over the mean's length)
      ring_bound_s bytes that a ring all-reduce of float32 sends over the link's rate; null on loopback
      around_s     median of delta, division and digest, which are no part of seconds
  violations  of these: the same bits on all members, and a result no further from the true mean than the scheme's
              coding explains
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import bench

MEMBER = Path(__file__).parent / "allreduce_kit" / "member.py"
PEER = Path(__file__).parent / "joining_kit" / "peer.py"
PLAIN = "plain"
SCHEMES = ("none", "bf16", "int8", "int4", "topk")
MOST_OFF = {PLAIN: 1e-6, "none": 1e-6, "bf16": 0.006, "int8": 0.02, "int4": 0.3, "topk": 1.0}
"""Of vectors of normal random numbers; without error feedback, which only later rounds have."""
LINKS = {"loopback": None, "100mbit": 100_000_000, "1gbit": 1_000_000_000}
"""Bits a second of each host's cable."""
MEMBERS, QUICK_MEMBERS = (2, 4, 8), (2, 4)
SIZES, QUICK_SIZES = (1.0, 16.0, 64.0, 400.0), (1.0, 16.0)
MANY, MOST_OF_MANY = 8, 64.0
"""So many members measure no more megabytes than this: each holds the vector six times."""
REPEATS = 5
LONG_S, QUICK_LONG_S = 30.0, 6.0
"""Repeats of one reduction take about so long, but there is always one."""
TIMEOUT_MS = 3000  # as agents have it by default
START_S = 180.0
HEADER_ROUNDS, QUICK_HEADER_ROUNDS = 60, 15
HEADER_STEP_S = 0.05
PATIENCE_S = 180.0


def bound_s(megabytes: float, members: int, bits_s: int | None) -> float | None:
    """What a ring all-reduce of so much cannot be faster than."""
    if bits_s is None:
        return None
    return 2 * (members - 1) / members * megabytes * 1e6 * 8 / bits_s


def repeats_of(megabytes: float, members: int, bits_s: int | None, long_s: float) -> int:
    """How often a size is reduced: often where that is quick. The first of several is a warm-up."""
    guess_s = bound_s(megabytes, members, bits_s) or megabytes * members / 400
    return max(1, min(REPEATS, int(long_s / max(guess_s, 1e-3))))


def measure(
    options: argparse.Namespace, link: str, members: int, sizes: Sequence[float]
) -> list[dict[str, Any]]:
    """What each member found."""
    long_s = QUICK_LONG_S if options.quick else LONG_S
    repeats = [repeats_of(size, members, LINKS[link], long_s) for size in sizes]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dmc-allreduce-")))
        lab = stack.enter_context(bench.lab("allreduce", members, link)) if LINKS[link] else None
        processes: dict[str, subprocess.Popen[Any]] = {}
        for rank in range(members):
            host = lab.hosts[rank] if lab is not None else ""
            command = [sys.executable, MEMBER, "--rank", rank, "--world", members, "--seed", options.seed]
            command += ["--host", lab.address(host) if lab is not None else "127.0.0.1", "--folder", folder]
            command += ["--out", folder / f"found{rank}", "--timeout-ms", TIMEOUT_MS]
            command += ["--sizes", ",".join(f"{size:g}" for size in sizes)]
            command += [
                "--ways",
                ",".join((PLAIN, *options.schemes)),
                "--repeats",
                ",".join(map(str, repeats)),
            ]
            words = [str(word) for word in command]
            processes[f"member {rank}"] = (
                lab.start(host, words) if lab is not None else subprocess.Popen(words)
            )
        ways = 1 + len(options.schemes)
        whole_s = sum(
            ways * many * ((bound_s(size, members, LINKS[link]) or 0) + size * members / 50)
            for size, many in zip(sizes, repeats, strict=True)
        )
        codes = bench.wait_all(processes, START_S + 3 * whole_s)
        if any(code != 0 for code in codes.values()):
            raise bench.BenchError(f"{link}, {members} members: exit codes {codes}")
        return [json.loads((folder / f"found{rank}").read_text()) for rank in range(members)]


def figures(found: list[dict[str, Any]], size: str, link: str) -> tuple[dict[str, Any], list[str]]:
    """One size's figures, and what must not be."""
    by_way: dict[str, Any] = {}
    wrong, around = [], []
    for way in found[0][size]:
        of_all = [member[size][way] for member in found]
        slowest = [max(times) for times in zip(*(one["seconds"] for one in of_all), strict=True)]
        timed = slowest[1:] or slowest
        seconds = statistics.median(timed)
        off = max((one["off"] for one in of_all), key=lambda off: (math.isnan(off), off))
        around += [max(times) for times in zip(*(one["around_s"] for one in of_all), strict=True)]
        by_way[way] = {
            "seconds": round(seconds, 5),
            "repeats": len(timed),
            "mb_s": round(float(size) / seconds, 2),
            "of_plain": round(by_way.get(PLAIN, {"seconds": seconds})["seconds"] / seconds, 3),
            "off": float(f"{off:.3g}"),
        }
        if len({one["digest"] for one in of_all}) > 1:
            wrong.append(f"{size} MB, {way}: members have different bits")
        if not off <= MOST_OFF[way]:
            wrong.append(f"{size} MB, {way}: {off:.3g} off the mean, at most {MOST_OFF[way]:g}")
    bound = bound_s(float(size), len(found), LINKS[link])
    by_way["ring_bound_s"] = None if bound is None else round(bound, 5)
    by_way["around_s"] = round(statistics.median(around), 5)
    return by_way, wrong


def header_s(options: argparse.Namespace, link: str, members: int) -> float:
    """Of real peers that train a small model."""
    from fetch_kit import peers as kit

    wanted = QUICK_HEADER_ROUNDS if options.quick else HEADER_ROUNDS
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dmc-allreduce-")))
        lab = stack.enter_context(bench.lab("allreduce", members, link)) if LINKS[link] else None
        peers = stack.enter_context(kit.Peers(folder, lab, members))
        try:
            peers.bring(
                kit.write_files(folder / "data", 4 * members * kit.SAMPLE_BYTES, options.seed), members
            )
            (folder / "gate").touch()
            words = ["--model-bytes", "4096", "--step-s", str(HEADER_STEP_S), "--gate", str(folder / "gate")]
            for number in range(members):
                peers.train(number, members, words, PEER)
            peers.until(lambda: all(len(p.rounds()) > wanted for p in peers.all), "rounds of all", PATIENCE_S)
        except kit.HungError as error:
            raise bench.BenchError(f"{link}, {members} peers: {str(error).partition(chr(10))[0]}") from None
        waits = [[line["wait_s"] for line in p.rounds()[1 : wanted + 1]] for p in peers.all]
        return round(statistics.median(min(one) for one in zip(*waits, strict=True)), 5)


def main(arguments: Sequence[str]) -> int:
    parser = bench.parser(__doc__, "allreduce")
    parser.add_argument("--link", choices=list(LINKS), action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--members", type=int, action="append", metavar="N", help="only so many; may be repeated"
    )
    parser.add_argument(
        "--size", type=float, action="append", metavar="MB", help="only this; may be repeated"
    )
    parser.add_argument("--scheme", choices=SCHEMES, action="append", dest="schemes", help="only these")
    parser.add_argument("--no-headers", action="store_true", help="reductions only")
    options = parser.parse_args(arguments)
    options.schemes = options.schemes or list(SCHEMES)
    links = options.link or (["loopback", "100mbit"] if options.quick else list(LINKS))
    counts = options.members or (QUICK_MEMBERS if options.quick else MEMBERS)
    usual = QUICK_SIZES if options.quick else SIZES
    result: dict[str, Any] = {**bench.conditions(), "schemes": options.schemes, "links": {}}
    violations: list[str] = []
    for link in links:
        result["links"][link] = {}
        for members in counts:
            bench.say(f"{link}, {members} members ...")
            sizes = options.size or [s for s in usual if members < MANY or s <= MOST_OF_MANY]
            found = measure(options, link, members, sizes)
            entry: dict[str, Any] = {"header_s": None, "sizes": {}}
            if not options.no_headers:
                entry["header_s"] = header_s(options, link, members)
            for size in found[0]:
                entry["sizes"][size], wrong = figures(found, size, link)
                violations += [f"{link}, {members} members, {line}" for line in wrong]
            result["links"][link][str(members)] = entry
            show(link, members, entry, options.schemes)
    return bench.finish(options, result, violations)


def show(link: str, members: int, entry: dict[str, Any], schemes: Sequence[str]) -> None:
    """Seconds, and how many times as fast as plain gloo."""
    rows = [[f"{link}, {members}", "bound s", "plain s", *(f"{s} s (x plain)" for s in schemes), "around s"]]
    for size, ways in entry["sizes"].items():
        bound = "" if ways["ring_bound_s"] is None else f"{ways['ring_bound_s']:.3f}"
        ours = [f"{ways[s]['seconds']:.4f} ({ways[s]['of_plain']:.2f})" for s in schemes]
        rows.append([f"{size} MB", bound, f"{ways[PLAIN]['seconds']:.4f}", *ours, f"{ways['around_s']:.4f}"])
    print(bench.table(rows))
    if entry["header_s"] is not None:
        print(f"headers before it: {entry['header_s'] * 1000:.1f} ms")


if __name__ == "__main__":
    bench.run(main)
