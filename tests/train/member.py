"""One member of a view for the collective's tests: ``python -m tests.train.member ENDPOINT RANK WORLD
PLAN...``.

PLAN is a list of words, done in turn; each prints one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import torch

from p2p_dmc.train.collective import REAPER_PREFIX, CollectiveError, GroupKeeper
from p2p_dmc.train.link import AgentLink
from p2p_dmc.wire import trainer_messages as tm


def view(epoch: int, rank: int, world: int, timeout_ms: int) -> tm.ViewStarted:
    return tm.ViewStarted(
        view_epoch=epoch,
        view_id=b"view%d" % epoch,
        rank=rank,
        world=world,
        next_round=1,
        slot_path="",
        digest=b"",
        tau=1,
        epoch=0,
        local=tm.Local.RESET,
        backend="gloo",
        group_timeout_ms=timeout_ms,
    )


class Member:
    def __init__(self, endpoint: str, rank: int, world: int) -> None:
        self.rank, self.world, self.epoch = rank, world, 0
        self.groups = GroupKeeper(lambda message: self.link.send(message))
        self.groups.host = "127.0.0.1"
        self.link = AgentLink(endpoint, None, self._early)
        self.timeout_ms = 4000

    def _early(self, message: object) -> bool:
        if isinstance(message, tm.StoreValue):
            self.groups.put(message)
        return True

    def start(self) -> None:
        self.epoch += 1
        self.groups.start(view(self.epoch, self.rank, self.world, self.timeout_ms))

    def reduce(self, count: int) -> float:
        tensor = torch.full((count,), float(self.rank + 1))
        self.groups.get(self.epoch).all_reduce(tensor)
        return float(tensor[-1])

    def reduce_until_failure(self, count: int) -> tuple[int, str, float]:
        """Reductions that ended well, the error of the one that did not, seconds it took."""
        done = 0
        while True:
            started = time.monotonic()
            try:
                self.reduce(count)
            except CollectiveError as error:
                return done, str(error), time.monotonic() - started
            done += 1
            if done == 1:
                say(event="flowing")


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def resources() -> dict[str, int]:
    """Threads and descriptors of this process once the reapers are done."""
    for thread in threading.enumerate():
        if thread.name.startswith((REAPER_PREFIX, "dmc-group-")):
            thread.join(10)
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return {
        "threads": int(fields["Threads"]),
        "fds": len(os.listdir("/proc/self/fd")),
        "rss_kb": int(fields["VmRSS"].split()[0]),
    }


def main(endpoint: str, rank: str, world: str, *plan: str) -> None:
    member = Member(endpoint, int(rank), int(world))
    for word in plan:
        verb, _, argument = word.partition("=")
        if verb == "start":
            member.start()
        elif verb == "timeout_ms":
            member.timeout_ms = int(argument)
        elif verb == "reduce":
            say(event="reduced", value=member.reduce(int(argument)))
        elif verb == "until-failure":
            done, error, seconds = member.reduce_until_failure(int(argument))
            say(event="failed", done=done, error=error, seconds=seconds)
        elif verb == "cancel-after":
            threading.Timer(float(argument), member.groups.cancel, [member.epoch]).start()
        elif verb == "drop":
            started = time.monotonic()
            member.groups.drop(member.epoch)
            say(event="dropped", seconds=time.monotonic() - started)
        elif verb == "resources":
            say(event="resources", **resources())
        elif verb == "cycles":
            for _ in range(int(argument)):
                member.start()
                member.reduce(1000)
                member.groups.drop(member.epoch)
            say(event="cycled")
        elif verb == "failing-cycles":
            for cycle in range(int(argument)):
                member.start()
                member.reduce(10)
                if cycle % member.world == member.rank:
                    member.groups.cancel(member.epoch)
                try:
                    member.reduce(1000)
                    member.reduce(1000)
                    say(event="unexpected")
                except CollectiveError:
                    pass
                member.groups.drop(member.epoch)
            say(event="cycled")
        elif verb == "wait-input":
            sys.stdin.readline()
        else:
            raise SystemExit(f"unknown word {word}")
    say(event="end")
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
