"""One member of a reduction, in a process of its own: the same vectors by plain gloo and as a trainer reduces them.

Writes one JSON object to --out: for each size, for each way, seconds of each repeat, what else a round does with the
vector (``around_s``), a digest of the result and how far it is from the true mean.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from p2p_dmc.train import state
from p2p_dmc.train.collective import ViewGroup
from p2p_dmc.train.reduction import Reducer
from p2p_dmc.wire import trainer_messages as tm

PLAIN = "plain"
CONNECT_S = 60.0


class Rendezvous:
    """In place of the agents: what a member publishes is a file that the others find."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.group: ViewGroup | None = None

    def __call__(self, message: Any) -> None:
        path = self._folder / message.key.replace("/", "-")
        if isinstance(message, tm.StoreSet):
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_bytes(message.value)
            draft.replace(path)
        elif path.exists() and self.group is not None:
            value = path.read_bytes()
            self.group.put(tm.StoreValue(view_id=message.view_id, key=message.key, value=value))


def ours(args: argparse.Namespace, folder: Path) -> ViewGroup:
    """The group of a view, as a trainer makes it."""
    view = tm.ViewStarted(
        view_epoch=1,
        view_id=b"view",
        history=b"",
        replaced=(),
        rank=args.rank,
        world=args.world,
        next_round=1,
        slot_path="",
        digest=b"",
        tau=1,
        epoch=0,
        local=tm.Local.RESET,
        backend="gloo",
        group_timeout_ms=args.timeout_ms,
    )
    rendezvous = Rendezvous(folder)
    rendezvous.group = ViewGroup(view, args.host, rendezvous)
    if not rendezvous.group.wait_ready(CONNECT_S):
        raise RuntimeError("the group was not made")
    return rendezvous.group


def plain(args: argparse.Namespace, folder: Path) -> Any:
    """gloo by itself."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = datetime.timedelta(milliseconds=args.timeout_ms)
    options._threads = 1
    options._devices = [gloo.create_device(hostname=args.host)]
    return gloo(dist.FileStore(str(folder / "plain"), args.world), args.rank, args.world, options)


def vector(seed: int, rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 * seed + rank))


class Contest:
    """One size, every way."""

    def __init__(self, args: argparse.Namespace, count: int, group: ViewGroup, bare: Any) -> None:
        self.args, self.group, self.bare = args, group, bare
        self.local = vector(args.seed, args.rank, count)
        self.anchor, self.scratch = torch.zeros(count), torch.empty(count)

    def run(self, way: str, repeats: int) -> dict[str, Any]:
        reducer = Reducer()
        seconds, around, facts = [], [], {}
        for repeat in range(repeats):
            started = time.perf_counter()
            self.scratch.copy_(self.local)
            state.weighted_delta(self.anchor, self.scratch, 1)
            before = time.perf_counter() - started
            self._meet()
            started = time.perf_counter()
            divisor = self._reduce(way, reducer)
            seconds.append(time.perf_counter() - started)
            started = time.perf_counter()
            self.scratch.div_(float(divisor))
            digest = state.digest_of(self.scratch).hex()
            around.append(before + time.perf_counter() - started)
            reducer.feedback.settle(counted=True)
            if repeat == 0:
                facts = {"digest": digest, "off": self._off()}
        return {"seconds": seconds, "around_s": around, **facts}

    def _meet(self) -> None:
        """Everybody begins at once, as after the headers."""
        self.bare.allreduce([torch.zeros(1)]).wait()

    def _reduce(self, way: str, reducer: Reducer) -> int:
        if way == PLAIN:
            self.bare.allreduce([self.scratch]).wait()
            return self.args.world
        return reducer.reduce(self.group, way, self.scratch, self.args.world).divisor

    def _off(self) -> float:
        """Of the first round's result from the true mean, over its length; only the first elements are looked at."""
        count = min(self.scratch.numel(), 1 << 18)
        exact = -sum(vector(self.args.seed, r, self.scratch.numel())[:count] for r in range(self.args.world))
        exact /= self.args.world
        return float((self.scratch[:count] - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("rank", "world", "seed", "timeout-ms"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("host", "folder", "out", "sizes", "ways", "repeats"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(args.folder)
    group, bare = ours(args, folder), plain(args, folder)
    found: dict[str, Any] = {}
    for megabytes, repeats in zip(args.sizes.split(","), args.repeats.split(","), strict=True):
        contest = Contest(args, int(float(megabytes) * 1e6) // 4, group, bare)
        found[megabytes] = {way: contest.run(way, int(repeats)) for way in args.ways.split(",")}
    contest._meet()
    Path(args.out).write_text(json.dumps(found))
    os._exit(0)  # groups end with their process


if __name__ == "__main__":
    main()
