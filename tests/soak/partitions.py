"""Cut peers apart in every way and mend it again: real hosts of a small network (bin/netlab), real training.

    python tests/soak/partitions.py --quorum majority --out

Every peer is a host of its own with all the data. A partition gives each side a switch of its own, and takes it away
again when the sides have gone on or said why they do not. Of N peers all partitions are made that differ in more than
the names of those that are not first in the ring (--every: also those), of 8 a few by chance. Under majority and
strict the side with more than half of the peers goes on, or the one with half and the first; under any, every side.
Of two peers, at last, the first is evicted at the other one while both are well and only the cable between them is
cut: both train, and when it is mended the evicted one, however much it has trained, has to give that up.

The last line of standard output with --json is one object with these keys:
  cuts           how many partitions were made
  by_size        how many of each number of peers
  two_sides      cuts in which two sides completed rounds (under any that is meant to be)
  wrong_side     cuts in which another side than the one that should went on, or none did
  silent         peers that stood still without saying for whom they wait
  not_serving    peers that stood still and did not serve a shard
  not_rejoined   cuts after which not all trained together again by themselves
  evictions      how many peers were evicted across a cut
  not_given_up   evicted peers that came back as if nothing had happened
  diverged       runs in which two peers differed in a round or a view, or samples were lost or counted twice
  went_on_s, rejoined_s   from the cut to the first round of the side that goes on, and from the mending to rounds of
                 all together: list of medians and maxima by number of peers
  problems       what went wrong, in words
Exit code 1 if anything but the times is not as it should be. It needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from p2p_dmc.agent.client import ask_local  # noqa: E402
from p2p_dmc.data.disk import MANIFEST_NAME  # noqa: E402
from tests.soak.hosts import Hosts, missing_tools  # noqa: E402
from tests.system.checks import check_digests, check_ledger  # noqa: E402
from tests.system.cluster import SCRIPT, Peer, write_samples  # noqa: E402
from tests.system.scenario import START_S, train_together  # noqa: E402

QUORUMS = ("majority", "strict", "any")
SIZES = (2, 3, 4, 5)
MANY, SAMPLED = 8, 3
"""So many cuts of so many peers are sampled, unless it is to be quick."""
EPOCHS, SAMPLES, DELAY_MS = 2000, 320, 100
WAIT_S = 20.0
"""For a side to go on, or to say why it does not: silence is noticed within a few seconds."""
STILL_S = 2.0
"""A side that waits is watched so much longer: it must not go on."""
RESULTS = Path(__file__).parent / "results"
Sides = tuple[tuple[int, ...], ...]

FETCH = """
import asyncio, sys, zmq.asyncio
from p2p_dmc.agent.bulk import BulkClient
from p2p_dmc.wire.messages import BulkKind

async def main(address, dataset):
    client = BulkClient(zmq.asyncio.Context(), 3000)
    total, data = await client.fetch(
        address, BulkKind.SHARD, digest=bytes.fromhex(dataset), part=0, offset=0, size=1 << 20
    )
    print(total, len(data))
    client.close()

asyncio.run(main(*sys.argv[1:]))
"""


@dataclass(slots=True)
class Tally:
    """What the cuts came to."""

    cuts: int = 0
    by_size: dict[int, int] = field(default_factory=dict)
    two_sides: int = 0
    wrong_side: int = 0
    silent: int = 0
    not_serving: int = 0
    not_rejoined: int = 0
    evictions: int = 0
    not_given_up: int = 0
    diverged: int = 0
    went_on_s: dict[int, list[float]] = field(default_factory=dict)
    rejoined_s: dict[int, list[float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def main() -> int:
    args = arguments()
    lacking = missing_tools()
    if lacking:
        sys.exit(f"partitions.py: {lacking}")
    rng, tally = random.Random(args.seed), Tally()
    end_s = time.monotonic() + args.limit_s
    quorums = QUORUMS if args.quorum == "all" else (args.quorum,)
    sizes = args.sizes or ((2, 3) if args.quick else (*SIZES, MANY))
    for quorum in quorums[: 1 if args.quick else None]:
        for size in sizes:
            with tempfile.TemporaryDirectory(prefix="dmc-cuts-") as folder:
                run(Path(folder), quorum, chosen(size, rng, args.every), tally, end_s)
    result = summary(tally, quorums)
    if args.out:
        RESULTS.mkdir(exist_ok=True)
        name = f"partitions-{args.quorum}-{'-'.join(map(str, sizes))}-seed{args.seed}.json"
        (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if args.json else "\n".join(f"{k}: {v}" for k, v in result.items()))
    return int(bool(tally.problems))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 and 3 peers, one quorum: at most two minutes")
    parser.add_argument("--seed", type=int, default=0, help="of who is on which side, and of samples")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    parser.add_argument("--quorum", choices=[*QUORUMS, "all"], default="majority")
    parser.add_argument(
        "--sizes", type=lambda t: tuple(map(int, t.split(","))), metavar="N,N", help="how many peers"
    )
    parser.add_argument("--limit-s", type=float, default=1e9, help="no cut begins after so long")
    parser.add_argument("--every", action="store_true", help="every partition, whoever is on which side")
    parser.add_argument("--out", action="store_true", help=f"write the result to {RESULTS.relative_to(ROOT)}")
    return parser.parse_args()


# -- which cuts ---------------------------------------------------------------------------------------------------


def partitions(members: Sequence[int]) -> Iterator[Sides]:
    """All ways to put the members on sides, each side and the sides in order."""
    if not members:
        yield ()
        return
    first, rest = members[0], members[1:]
    for others in partitions(rest):
        yield ((first,), *others)
        for i, side in enumerate(others):
            yield (*others[:i], (first, *side), *others[i + 1 :])


def shape(sides: Sides) -> tuple[int, tuple[int, ...]]:
    """How many are with the first in the ring, and how many on each other side."""
    with_first = next(len(side) for side in sides if 0 in side)
    return with_first, tuple(sorted(len(side) for side in sides if 0 not in side))


def chosen(size: int, rng: random.Random, every: bool) -> list[Sides]:
    """The cuts of so many peers, 0 being the first in the ring."""
    found = [tuple(sorted(sides)) for sides in partitions(range(size)) if len(sides) > 1]
    rng.shuffle(found)
    if size >= MANY:
        return found[:SAMPLED]
    if every:
        return found
    one_each = {shape(sides): sides for sides in found}
    return [one_each[key] for key in sorted(one_each)]


def goes_on(side: Sequence[int], size: int, quorum: str) -> bool:
    """Whether this side should: nobody was seen to crash, so strict is as majority."""
    return quorum == "any" or 2 * len(side) > size or (2 * len(side) == size and 0 in side)


# -- one run, many cuts -------------------------------------------------------------------------------------------


class Network(Hosts):
    """Hosts whose cables go to switches of their own while they are cut apart."""

    def partition(self, sides: Sequence[Sequence[Peer]]) -> None:
        bridge = f"{self.lab}-br"
        for number, side in enumerate(sides[1:], start=1):
            ip("-n", bridge, "link", "add", f"br{number}", "type", "bridge")
            ip("-n", bridge, "link", "set", f"br{number}", "up")
            for peer in side:
                ip("-n", bridge, "link", "set", self.host[peer.name], "master", f"br{number}")

    def join_all(self, sides: Sequence[Sequence[Peer]]) -> None:
        bridge = f"{self.lab}-br"
        for number, side in enumerate(sides[1:], start=1):
            for peer in side:
                ip("-n", bridge, "link", "set", self.host[peer.name], "master", "br0")
            ip("-n", bridge, "link", "del", f"br{number}")


def ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, stdin=subprocess.DEVNULL, capture_output=True)


def run(folder: Path, quorum: str, cuts: Sequence[Sides], tally: Tally, end_s: float) -> None:
    """One cluster, cut and mended in these ways."""
    size = sum(map(len, cuts[0]))
    names = [f"p{i}" for i in range(size)]
    with Network(folder / "peers", names) as hosts:
        before = len(tally.problems)
        try:
            peers = start(hosts, names, quorum, write_samples(folder / "tiny", SAMPLES))
            for sides in cuts:
                if time.monotonic() > end_s:
                    break
                ring = [next(p for p in peers if p.peer_id == m) for m in peers[0].view["members"]]
                cut(hosts, [[ring[i] for i in side] for side in sides], sides, quorum, tally)
            if size == 2 and quorum != "any":
                ring = [next(p for p in peers if p.peer_id == m) for m in peers[0].view["members"]]
                evict(hosts, ring[0], ring[1], quorum, tally)
            stopped(hosts, peers)
            check_digests([p.home for p in peers])
            check_ledger([p.home for p in peers])
        except AssertionError as error:
            tally.diverged += len(tally.problems) == before
            tally.problems.append(f"{quorum}, {size} peers: {str(error).partition(chr(10))[0]}")
            print(str(error)[:20_000], file=sys.stderr)


def start(hosts: Network, names: Sequence[str], quorum: str, data: Path) -> list[Peer]:
    """All train, and each has all the data."""
    size = len(names)
    first = hosts.seed(
        data,
        "--insecure",
        "--name",
        "tiny",
        "--replicas",
        str(size),
        name=names[0],
        address=hosts.address_of(names[0]),
    )
    script = ["--epochs", str(EPOCHS), "--slow", str(hosts.slow), "--delay-ms", str(DELAY_MS)]
    for name in names:
        options = ["--min-peers", str(size), "--quorum", quorum, "--checkpoint-every", "2s"]
        if name != first.name:
            options += ["--insecure", "--listen", hosts.address_of(name)]
        hosts.join(name, first, *script, options=options, script=SCRIPT)
    peers = [hosts.peer(name) for name in names]
    train_together(hosts, peers)
    hosts.wait(lambda: all(len(shards(p)) == len(shards(first)) for p in peers), "everybody has all the data")
    return peers


def shards(peer: Peer) -> list[Path]:
    return list(peer.home.glob("store/*/shards/*.tar"))


def cut(hosts: Network, sides: Sequence[Sequence[Peer]], numbers: Sides, quorum: str, tally: Tally) -> None:
    """One partition, what comes of it, and its end."""
    size = sum(map(len, sides))
    named = " | ".join(" ".join(map(str, side)) for side in numbers)
    tally.cuts += 1
    tally.by_size[size] = tally.by_size.get(size, 0) + 1
    when = time.time()
    hosts.partition(sides)
    try:
        settled(hosts, sides, numbers, when, quorum, f"{quorum}, {size} peers, {named}", tally)
    finally:
        hosts.join_all(sides)
    mended = time.time()
    try:
        together(hosts, [p for side in sides for p in side], mended)
    except AssertionError:
        tally.not_rejoined += 1
        raise
    took = time.time() - mended
    tally.rejoined_s.setdefault(size, []).append(took)
    print(f"{quorum}, {size} peers, {named}: together again after {took:.1f} s", file=sys.stderr)


def evict(hosts: Network, first: Peer, second: Peer, quorum: str, tally: Tally) -> None:
    """An operator is wrong: the first is not gone, it trains on behind a cut cable."""
    when = time.time()
    hosts.partition([[first], [second]])
    try:
        hosts.wait(
            lambda: bool(reason(second)) and went_on([first], when), "one goes on, the other waits", WAIT_S
        )
        tally.evictions += 1
        told = ask_local(endpoint(second), "evict", [first.peer_id, ""])
        assert told["waits_for"] == [], f"evicting the only one that is missing is not enough: {told}"
        hosts.wait(lambda: went_on([second], when), "the other one goes on alone", WAIT_S)
        hosts.rounds([first, second], 5, after=time.time())
        alone = first.rounds()[-1]["samples_total"]
    finally:
        hosts.join_all([[first], [second]])
    together(hosts, [first, second], time.time())
    given_up = first.events("history_given_up", replaced=True)
    same = {p.view["history"] for p in (first, second)} == {second.events("evicted")[-1]["history"]}
    if len(given_up) != 1 or second.events("history_given_up") or not same:
        tally.not_given_up += 1
        tally.problems.append(f"{quorum}: the evicted one gave up {given_up}, the same history: {same}")
    hosts.wait(
        lambda: second.rounds()[-1]["samples_total"] > alone, "the run outgrows what was given up", START_S
    )
    print(f"{quorum}: evicted with {alone} samples, which it gave up", file=sys.stderr)


def endpoint(peer: Peer) -> str:
    return str(json.loads((peer.home / "agent.json").read_text())["endpoint"])


def together(hosts: Network, peers: Sequence[Peer], after: float) -> None:
    """Wait for rounds of all of them in one view, which may be the one that stood before the cut."""

    def all_train() -> bool:
        if len({p.view["view_id"] for p in peers}) > 1 or len(peers[0].view["members"]) < len(peers):
            return False
        number = peers[0].view["view_epoch"]
        return all(sum(r["view_epoch"] == number for r in p.rounds(after)) >= 2 for p in peers)

    hosts.wait(all_train, "all train together again", START_S)


def settled(
    hosts: Network,
    sides: Sequence[Sequence[Peer]],
    numbers: Sides,
    when: float,
    quorum: str,
    what: str,
    tally: Tally,
) -> None:
    """Wait until each side has gone on or says why it does not, and judge that."""
    size = sum(map(len, sides))
    should = [goes_on(side, size, quorum) for side in numbers]

    def each_knows() -> bool:
        ready = [
            went_on(side, when) if go else all(reason(p) for p in side)
            for side, go in zip(sides, should, strict=True)
        ]
        return all(ready)

    try:
        hosts.wait(each_knows, f"{what}: each side goes on, or says why it does not", WAIT_S)
    except AssertionError:
        tally.silent += sum(
            not reason(p) for side, go in zip(sides, should, strict=True) if not go for p in side
        )
        tally.wrong_side += any(
            bool(went_on(side, when)) != go for side, go in zip(sides, should, strict=True)
        )
        raise
    known = time.time()
    if not all(should):
        hosts.wait(lambda: time.time() > known + STILL_S, "whoever waits is watched for a while")
    did = [went_on(side, when) for side in sides]
    if [bool(at) for at in did] != should:
        tally.wrong_side += 1
        tally.problems.append(f"{what}: {did} went on, {should} should have")
    tally.two_sides += sum(map(bool, did)) > 1
    tally.went_on_s.setdefault(size, []).extend(at - when for at in did if at)
    for side, go in zip(sides, should, strict=True):
        if not go:
            check_waiting(
                hosts, side[-1], [p for other in sides if other is not side for p in other], what, tally
            )


def went_on(side: Sequence[Peer], when: float) -> float:
    """When all of this side had completed a round in a view of theirs alone; 0 when they have not."""
    ids = {p.peer_id for p in side}
    times = []
    for peer in side:
        views = [v for v in peer.events("view") if v["time"] > when and set(v["members"]) <= ids]
        times.append(next((r["time"] for v in views[:1] for r in peer.rounds(v["time"])), 0.0))
    return max(times) if all(times) else 0.0


def reason(peer: Peer) -> str:
    """Why it waits, as `dmc-peer status` says."""
    facts = status(peer)
    return "".join(str(run["waiting"]) for run in facts["runs"] if "waiting for" in run.get("waiting", ""))


def status(peer: Peer) -> dict[str, Any]:
    return ask_local(endpoint(peer), "status")


def check_waiting(hosts: Network, peer: Peer, missing: Sequence[Peer], what: str, tally: Tally) -> None:
    """It names somebody who is missing, and serves shards to who can reach it."""
    said = reason(peer)
    if not any(f"({p.peer_id[:8]})" in said for p in missing):
        tally.silent += 1
        tally.problems.append(f"{what}: {peer.name} waits, and says {said!r}")
    bulk = next(m["bulk_address"] for m in status(peer)["members"] if m["peer_id"] == peer.peer_id)
    dataset = next(path.parent.name for path in peer.home.glob(f"store/*/{MANIFEST_NAME}"))
    done = subprocess.run(
        [*hosts.inside(peer), sys.executable, "-c", FETCH, bulk, dataset],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        cwd=ROOT,
        check=False,
    )
    if done.returncode or int(done.stdout.split()[1]) == 0:
        tally.not_serving += 1
        tally.problems.append(f"{what}: {peer.name} serves no shard: {done.stderr.strip()[-200:]}")


def stopped(hosts: Network, peers: Sequence[Peer]) -> None:
    """Agreed by all, so that what they wrote down ends at one round."""
    assert ask_local(endpoint(peers[0]), "stop")["stopping"]
    hosts.wait(lambda: all(p.events("run_over") for p in peers), "the run stops")


def summary(tally: Tally, quorums: Sequence[str]) -> dict[str, Any]:
    """The keys of the module's docstring."""

    def times(by_size: dict[int, list[float]]) -> dict[str, dict[str, float]]:
        return {
            str(size): {"median": round(statistics.median(found), 2), "max": round(max(found), 2)}
            for size, found in sorted(by_size.items())
            if found
        }

    if "any" not in quorums and tally.two_sides:
        tally.problems.append(f"two sides went on in {tally.two_sides} cuts")
    return {
        "quorum": list(quorums),
        "cuts": tally.cuts,
        "by_size": {str(k): v for k, v in sorted(tally.by_size.items())},
        "two_sides": tally.two_sides,
        "wrong_side": tally.wrong_side,
        "silent": tally.silent,
        "not_serving": tally.not_serving,
        "not_rejoined": tally.not_rejoined,
        "evictions": tally.evictions,
        "not_given_up": tally.not_given_up,
        "diverged": tally.diverged,
        "went_on_s": times(tally.went_on_s),
        "rejoined_s": times(tally.rejoined_s),
        "problems": tally.problems,
    }


if __name__ == "__main__":
    sys.exit(main())
