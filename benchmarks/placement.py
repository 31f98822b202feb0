"""What placement costs a peer: from nothing, and after one peer joined, left or changed; without and with domains.

Nothing is sent or stored: this is the computation that every peer does by itself when membership has moved. Each case
runs in a process of its own. After each kind of change the placement is computed anew too, and must be the same.

Keys:
  conditions    command, date, cores, load_before, python, torch, kernel, numpy
  shards, peers, replicas
  cases         by name: equal (weights), weighted (1 to 100), domains (the same in 8 domains), two_domains
                (fewer than replicas: a second order without domains is kept):
    full_s      the placement from nothing; wanted: at most 10
    digest_s    its digest, the first one of these shards
    resident_mib  most memory of the process until then, the shards' digests and the interpreter included; wanted: at
                most 2048
    join_s, leave_s, weight_s, domain_s   [one peer joins, leaves, has another weight or domain]; wanted: at most 0.15
                for a join or leave
    digest_again_s  [the digest after each of these]
    moved       copies that each kind of change moves, the first time
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench
import numpy as np

from p2p_dmc.core.placement import Placement, StoringPeer, moves, placement

SHARDS, QUICK_SHARDS = 1_000_000, 50_000
PEERS = 256
REPLICAS = 3
TIMES, QUICK_TIMES = 5, 3
CASES = {"equal": 0, "weighted": 0, "domains": 8, "two_domains": 2}
KINDS = ("join", "leave", "weight", "domain")


def peer_of(case: str, i: int) -> StoringPeer:
    """The i-th peer; ids are as scattered as those of real peers."""
    domains = CASES[case]
    return StoringPeer(
        peer_id=f"{i * 0x9E3779B97F4A7C15 % 2**64:032x}",
        weight=1 if case == "equal" else 1 + i * 37 % 100,
        domain=f"rack{i % domains}" if domains else "",
    )


def changed(case: str, kind: str, peers: list[StoringPeer], which: int) -> list[StoringPeer]:
    """The peers after one change."""
    if kind == "join":
        return [*peers, peer_of(case, len(peers) + which)]
    one, rest = peers[which], peers[:which] + peers[which + 1 :]
    if kind == "leave":
        return rest
    if kind == "weight":
        return [*rest, replace(one, weight=one.weight + 10)]
    return [*rest, replace(one, domain="elsewhere" if CASES[case] != 2 else f"rack{1 - which % 2}")]


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """One case, in this process."""
    rng = random.Random(options.seed)
    digests = [rng.randbytes(16) for _ in range(options.shards)]
    peers = [peer_of(case, i) for i in range(options.peers)]
    begun_s = time.perf_counter()
    before = placement(digests, peers, REPLICAS)
    full_s = time.perf_counter() - begun_s
    digest_s = digest_seconds(before)
    result: dict[str, Any] = {
        "full_s": round(full_s, 3),
        "digest_s": round(digest_s, 4),
        "resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        **{f"{kind}_s": [] for kind in KINDS},
        "digest_again_s": [],
        "moved": {},
        "violations": [],
    }
    for kind in KINDS:
        for which in rng.sample(range(options.peers), QUICK_TIMES if options.quick else TIMES):
            peers_after = changed(case, kind, peers, which)
            begun_s = time.perf_counter()
            after = before.with_peers(peers_after)
            result[f"{kind}_s"].append(round(time.perf_counter() - begun_s, 4))
            result["digest_again_s"].append(round(digest_seconds(after), 4))
            if kind not in result["moved"]:
                result["moved"][kind] = len(moves(before, after))
                if after.digest() != placement(digests, peers_after, REPLICAS).digest():
                    result["violations"].append(
                        f"{case}: after a {kind} the placement is not what it is from nothing"
                    )
    return result


def digest_seconds(placed: Placement) -> float:
    begun_s = time.perf_counter()
    placed.digest()
    return time.perf_counter() - begun_s


def in_a_process(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """One case, in a process of its own: so its memory is nobody else's."""
    words = [str(Path(__file__)), "--case", case, "--seed", str(options.seed)]
    words += [
        "--shards",
        str(options.shards),
        "--peers",
        str(options.peers),
        *(["--quick"] if options.quick else []),
    ]
    done = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise bench.BenchError(f"case {case} failed; its error is above")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def shown(cases: dict[str, dict[str, Any]]) -> str:
    rows = [["", "full s", "MiB", *(f"{kind} ms" for kind in KINDS), "digest ms"]]
    for name, one in cases.items():
        times = [statistics.median(one[f"{kind}_s"]) for kind in KINDS] + [
            statistics.median(one["digest_again_s"])
        ]
        rows.append(
            [name, f"{one['full_s']:.2f}", str(one["resident_mib"]), *(f"{1000 * t:.0f}" for t in times)]
        )
    return bench.table(rows)


def main(arguments: Sequence[str]) -> int:
    made = bench.parser(__doc__, "placement")
    made.add_argument("--shards", type=int, metavar="N", help=f"default {SHARDS}, quick {QUICK_SHARDS}")
    made.add_argument("--peers", type=int, default=PEERS, metavar="N", help=f"default {PEERS}")
    made.add_argument("--case", choices=list(CASES), help="only this one, its result alone, in this process")
    options = made.parse_args(arguments)
    options.shards = options.shards or (QUICK_SHARDS if options.quick else SHARDS)
    if options.case:
        print(json.dumps(measure(options.case, options)))
        return 0
    result = {"conditions": {**bench.conditions(), "numpy": np.__version__}}
    result |= {"shards": options.shards, "peers": options.peers, "replicas": REPLICAS}
    cases: dict[str, dict[str, Any]] = {}
    violations: list[str] = []
    for case in CASES:
        cases[case] = in_a_process(case, options)
        violations += cases[case].pop("violations")
        bench.say(f"{case}: {cases[case]['full_s']:.2f} s from nothing")
    print(shown(cases))
    return bench.finish(options, result | {"cases": cases}, violations)


if __name__ == "__main__":
    bench.run(main)
