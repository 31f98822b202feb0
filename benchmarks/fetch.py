"""What moving shards takes: links, loopback, processors, and what it takes from training.

One joiner fetches a data set from three holders, and three peers fetch one from a lone seeder that then leaves: each
peer on a host of its own (bin/netlab; needs root) whose cable is shaped. Then one peer fetches from another through
this machine's loopback, beside plain copies of the same bytes. Last, three peers train, each on a host of its own, with
a fourth that only holds shards; it is killed, and the shards that it held are copied again while the others' rounds go
on. Every shard is verified and synced before it counts.

Keys:
  conditions    command, date, cores, load_before, python, torch, kernel
  one           one joiner, three holders:
    size_bytes, rate_mbit, seconds
    of_link     what the joiner received over what its cable takes in that time; wanted: at least 0.9
    cpu_s_per_gb  processor seconds of the joiner's agent for each 10^9 bytes
    shares      part of the bytes that each holder sent
  spread        a lone seeder, three peers, three replicas:
    size_bytes, rate_mbit, seconds
    times       seconds, from the first one's beginning to the last one's end, over size_bytes at the rate; wanted:
                at most 1.3
    apart_s     between the beginnings of the first and the last
    seeder_sent   how often the seeder sent each byte; its cable alone takes so many times size_bytes at the rate
    cpu_s_per_gb  processor seconds of all four agents for each 10^9 bytes that a peer received: where four peers share
                few cores, these are the limit and not the cables
  spread_slow   the same on slower cables, where even two cores are not the limit
  loopback      one peer from another, without encryption:
    size_bytes, seconds
    gb_per_s    wanted: at least 1, or 0.8 of disk_gb_per_s
    cpu_s_per_gb  {"sender", "receiver"}
    disk_gb_per_s   plain copy of the shards' files on the same disk, each synced
    tcp_gb_per_s, tcp_cpu_s_per_gb   plain copy through one TCP connection, each file synced
    hash_gb_per_s   BLAKE2b in one thread, which each byte goes through once
    of_disk     gb_per_s over disk_gb_per_s
  repair        training while shards are copied again:
    model_bytes, rate_mbit, step_s
    moved_bytes, seconds
    before_s, during_s  [length of each round of the first peer] before the kill, and while shards are on their way
    ratio       median of during_s over that of before_s; wanted: at most 1.15
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import bench
from fetch_kit import peers as kit
from fetch_kit import plain
from fetch_kit.peers import HungError, Peers

RATE_MBIT, SLOW_RATE_MBIT = 1000, 250
SIZE_BYTES, QUICK_SIZE_BYTES = 1 << 30, 160 << 20
REPAIR_RATE_MBIT = 200
REPAIR_BYTES, QUICK_REPAIR_BYTES = 768 << 20, 192 << 20
MODEL_BYTES, STEP_S = 20_000_000, 1.0
ROUNDS_BEFORE = 5
PATIENCE_S = 240.0
SCRIPT = Path(__file__).parent / "joining_kit" / "peer.py"

Part = tuple[dict[str, Any], list[str]]


def one_joiner(options: Any, size_bytes: int, folder: Path) -> Part:
    """One joiner from three holders on shaped cables."""
    rate = options.rate_mbit * 1e6 / 8
    with bench.lab("fetch", 4, f"{options.rate_mbit}mbit") as lab, Peers(folder, lab, 4) as peers:
        peers.bring(kit.write_files(folder / "data", size_bytes, options.seed), 4)
        peers.hold(1, 2)
        peers.until(lambda: all(_has_all(peers, i) for i in (1, 2)), "two more hold everything", PATIENCE_S)
        peers.hold(3)
        joiner = peers.all[3]
        before_s = kit.cpu_s(joiner)
        peers.until(lambda: _has_all(peers, 3), "the joiner holds everything", PATIENCE_S)
        lines = kit.fetched(joiner)
        size, (began_s, ended_s) = sum(e["size_bytes"] for e in lines), kit.span(lines)
        names = {p.peer_id: p.name for p in peers.all}
        given = {name: sum(e["sources"].get(i, 0) for e in lines) for i, name in names.items()}
        return {
            "size_bytes": size,
            "rate_mbit": options.rate_mbit,
            "seconds": round(ended_s - began_s, 3),
            "of_link": round(size / (ended_s - began_s) / rate, 3),
            "cpu_s_per_gb": round((kit.cpu_s(joiner) - before_s) / (size / 1e9), 2),
            "shares": {name: round(part / size, 3) for name, part in given.items() if part},
        }, peers.wrong(peers.all)


def lone_seeder(options: Any, size_bytes: int, folder: Path) -> Part:
    """Three peers from one that leaves then."""
    return _spread(options.rate_mbit, options.seed, size_bytes, folder)


def lone_seeder_slow(options: Any, size_bytes: int, folder: Path) -> Part:
    """The same on slower cables."""
    return _spread(options.slow_rate_mbit, options.seed, size_bytes, folder)


def _spread(rate_mbit: int, seed: int, size_bytes: int, folder: Path) -> Part:
    rate = rate_mbit * 1e6 / 8
    with bench.lab("fetch", 4, f"{rate_mbit}mbit") as lab, Peers(folder, lab, 4) as peers:
        data = kit.write_files(folder / "data", size_bytes, seed)
        peers.hold(1, 2, 3)  # before there is anything to fetch, so that all begin at once
        peers.bring(data, 3, "--leave-when-replicated")
        seeder, others = peers.all[0], peers.all[1:]
        before_s = [kit.cpu_s(peer) for peer in peers.all]
        seeder_s = before_s[0]

        def done() -> bool:
            nonlocal seeder_s
            seeder_s = max(seeder_s, kit.cpu_s(seeder))  # as long as it is there
            return all(_has_all(peers, i) for i in (1, 2, 3))

        peers.until(done, "all hold everything", PATIENCE_S)
        spent_s = sum((seeder_s, *map(kit.cpu_s, others))) - sum(before_s)
        lines = [line for peer in others for line in kit.fetched(peer)]
        received = sum(e["size_bytes"] for e in lines)
        size, (began_s, ended_s) = received // 3, kit.span(lines)
        starts = [kit.span(kit.fetched(peer))[0] for peer in others]
        return {
            "size_bytes": size,
            "rate_mbit": rate_mbit,
            "seconds": round(ended_s - began_s, 3),
            "times": round((ended_s - began_s) / (size / rate), 3),
            "apart_s": round(max(starts) - min(starts), 3),
            "seeder_sent": round(sum(e["sources"].get(seeder.peer_id, 0) for e in lines) / size, 3),
            "cpu_s_per_gb": round(spent_s / (received / 1e9), 2),
        }, peers.wrong(others)


def loopback(options: Any, size_bytes: int, folder: Path) -> Part:
    """One peer from another, and plain copies."""
    with Peers(folder, None, 2) as peers:
        peers.bring(kit.write_files(folder / "data", size_bytes, options.seed), 2)
        peers.hold(1)
        sender, receiver = peers.all
        before_s = [kit.cpu_s(peer) for peer in (sender, receiver)]
        peers.until(lambda: _has_all(peers, 1), "the other holds everything", PATIENCE_S)
        spent_s = [kit.cpu_s(peer) - s for peer, s in zip((sender, receiver), before_s, strict=True)]
        lines, wrong = kit.fetched(receiver), peers.wrong(peers.all)
    size, (began_s, ended_s) = sum(e["size_bytes"] for e in lines), kit.span(lines)
    files = sorted((sender.home / "store").glob("*/shards/*.tar"))
    disk = plain.disk_copy(files, folder / "disk")
    tcp, tcp_cpu_s = plain.tcp_copy(files, folder / "tcp")
    speed = size / (ended_s - began_s)
    return {
        "size_bytes": size,
        "seconds": round(ended_s - began_s, 3),
        "gb_per_s": round(speed / 1e9, 3),
        "cpu_s_per_gb": {
            "sender": round(spent_s[0] / (size / 1e9), 2),
            "receiver": round(spent_s[1] / (size / 1e9), 2),
        },
        "disk_gb_per_s": round(disk / 1e9, 3),
        "tcp_gb_per_s": round(tcp / 1e9, 3),
        "tcp_cpu_s_per_gb": round(tcp_cpu_s, 2),
        "hash_gb_per_s": round(plain.hashing(files) / 1e9, 3),
        "of_disk": round(speed / disk, 3),
    }, wrong


def repair(options: Any, size_bytes: int, folder: Path) -> Part:
    """Rounds while a dead peer's shards are copied again."""
    rate = f"{options.repair_rate_mbit}mbit"
    with bench.lab("fetch", 4, rate) as lab, Peers(folder, lab, 4) as peers:
        first, trainers = peers.all[0], peers.all[:3]
        peers.bring(kit.write_files(folder / "data", size_bytes, options.seed), 2)
        peers.hold(3)
        (folder / "gate").touch()
        words = ["--model-bytes", str(MODEL_BYTES), "--step-s", str(STEP_S), "--gate", str(folder / "gate")]
        for number in range(3):
            peers.train(number, 3, words, SCRIPT)
        peers.until(lambda: first.rounds(), "a round", PATIENCE_S)
        peers.until(lambda: _settled(peers), "every shard has its copies", PATIENCE_S)
        quiet = time.time()
        peers.until(lambda: len(first.rounds(quiet)) > ROUNDS_BEFORE, "rounds before", PATIENCE_S)
        killed = peers.kill(3)
        lost = len(kit.fetched(peers.all[3]))
        peers.until(
            lambda: sum(len(kit.fetched(p, killed)) for p in trainers) >= lost, "all copied again", PATIENCE_S
        )
        lines = [line for peer in trainers for line in kit.fetched(peer, killed)]
        began_s, ended_s = kit.span(lines)
        peers.until(lambda: first.rounds(ended_s), "a round after", PATIENCE_S)
        lengths = [(a["time"], b["time"]) for a, b in pairwise(first.rounds(quiet))]
        before = [b - a for a, b in lengths if b < killed]
        during = [b - a for a, b in lengths if b > began_s and a < ended_s]
        return {
            "model_bytes": MODEL_BYTES,
            "rate_mbit": options.repair_rate_mbit,
            "step_s": STEP_S,
            "moved_bytes": sum(e["size_bytes"] for e in lines),
            "seconds": round(ended_s - began_s, 3),
            "before_s": [round(s, 3) for s in before],
            "during_s": [round(s, 3) for s in during],
            "ratio": round(statistics.median(during) / statistics.median(before), 3),
        }, peers.wrong(peers.all)


def _has_all(peers: Peers, number: int) -> bool:
    return len({e["shard"] for e in kit.fetched(peers.all[number])}) >= peers.shards


def _settled(peers: Peers) -> bool:
    """Every shard has come to somebody besides the first, who has all, and nothing has come for a moment."""
    lines = [line for peer in peers.all[1:] for line in kit.fetched(peer)]
    return (
        len({e["shard"] for e in lines}) >= peers.shards and max(e["time"] for e in lines) < time.time() - 3.0
    )


PARTS: dict[str, Callable[[Any, int, Path], Part]] = {
    "one": one_joiner,
    "spread": lone_seeder,
    "spread_slow": lone_seeder_slow,
    "loopback": loopback,
    "repair": repair,
}


def main(arguments: Sequence[str]) -> int:
    parser = bench.parser(__doc__, "fetch")
    parser.add_argument("--rate-mbit", type=int, default=RATE_MBIT, metavar="N", help="of each cable")
    parser.add_argument(
        "--slow-rate-mbit", type=int, default=SLOW_RATE_MBIT, metavar="N", help="of each cable in spread_slow"
    )
    parser.add_argument(
        "--repair-rate-mbit",
        type=int,
        default=REPAIR_RATE_MBIT,
        metavar="N",
        help="of each cable while training",
    )
    parser.add_argument("--size-bytes", type=int, metavar="N", help="of the data set")
    parser.add_argument(
        "--part", choices=list(PARTS), action="append", help="only this part; may be repeated"
    )
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"conditions": bench.conditions()}
    violations: list[str] = []
    for name, part in PARTS.items():
        if options.part and name not in options.part:
            continue
        usual = (
            (QUICK_SIZE_BYTES if options.quick else SIZE_BYTES)
            if name != "repair"
            else (QUICK_REPAIR_BYTES if options.quick else REPAIR_BYTES)
        )
        bench.say(f"{name} ...")
        with tempfile.TemporaryDirectory(prefix="dmc-fetch-") as folder:
            try:
                result[name], wrong = part(options, options.size_bytes or usual, Path(folder))
            except HungError as error:
                result[name], wrong = {}, [str(error)]
        violations += [f"{name}: {line}" for line in wrong]
        facts = {k: v for k, v in result[name].items() if isinstance(v, int | float)}
        if facts:
            print(bench.table([list(facts), [f"{v:g}" for v in facts.values()]]))
    return bench.finish(options, result, violations)


if __name__ == "__main__":
    bench.run(main)
