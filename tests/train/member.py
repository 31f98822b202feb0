"""One member of a view for the collective's tests, in a process of its own."""

from __future__ import annotations

import os
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from p2p_dmc.train.collective import REAPER_PREFIX, CollectiveError, GroupKeeper
from p2p_dmc.train.compression import Codec, codec
from p2p_dmc.train.link import AgentLink
from p2p_dmc.train.reduction import reduce_in
from p2p_dmc.wire import trainer_messages as tm


def view(epoch: int, rank: int, world: int, timeout_ms: int) -> tm.ViewStarted:
    return tm.ViewStarted(
        view_epoch=epoch,
        view_id=b"view%d" % epoch,
        history=b"",
        replaced=(),
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


def main(endpoint: str, rank: int, world: int, plan: str, line: Connection) -> None:
    """Does the words of ``plan`` in turn: each names a method of Member, with an argument after "="."""
    torch.set_num_threads(1)
    member = Member(endpoint, rank, world, line)
    for word in plan.split():
        verb, _, argument = word.partition("=")
        getattr(member, verb)(*([argument] if argument else []))
    member.say("end")
    line.close()
    os._exit(0)


class Member:
    """Facts go to ``line``, one dict for each thing that happened."""

    def __init__(self, endpoint: str, rank: int, world: int, line: Connection) -> None:
        self.rank, self.world, self.line = rank, world, line
        self.epoch = 0
        self.group_timeout_ms = 4000
        self.coder: Codec | None = None
        self.groups = GroupKeeper(lambda message: self.link.send(message))
        self.groups.host = "127.0.0.1"
        self.link = AgentLink(endpoint, None, self._early)

    def _early(self, message: object) -> bool:
        if isinstance(message, tm.StoreValue):
            self.groups.put(message)
        return True

    def say(self, event: str, **facts: Any) -> None:
        self.line.send({"event": event, **facts})

    def timeout_ms(self, value: str) -> None:
        self.group_timeout_ms = int(value)

    def compress(self, scheme: str) -> None:
        """From now on vectors travel so."""
        self.coder = codec(scheme)

    def start(self) -> None:
        self.epoch += 1
        self.groups.start(view(self.epoch, self.rank, self.world, self.group_timeout_ms))

    def reduce(self, count: str) -> None:
        self.say("reduced", value=self._reduce(int(count)))

    def _reduce(self, count: int) -> float:
        tensor = torch.full((count,), float(self.rank + 1))
        group, coder = self.groups.get(self.epoch), self.coder
        if coder is None:
            group.all_reduce(tensor)
        else:
            group.exchange(lambda exchange: reduce_in(exchange, coder, tensor, torch.empty_like(tensor)))
        return float(tensor[-1])

    def until_failure(self, count: str) -> None:
        """Reduces for ever: how many ended well, and of the one that did not the error and the seconds it
        took.
        """
        done = 0
        while True:
            started = time.monotonic()
            try:
                self._reduce(int(count))
            except CollectiveError as error:
                self.say("failed", done=done, error=str(error), seconds=time.monotonic() - started)
                return
            done += 1
            if done == 1:
                self.say("flowing")

    def cancel_after(self, seconds: str) -> None:
        threading.Timer(float(seconds), self.groups.cancel, [self.epoch]).start()

    def drop(self) -> None:
        started = time.monotonic()
        self.groups.drop(self.epoch)
        self.say("dropped", seconds=time.monotonic() - started)

    def cycles(self, count: str) -> None:
        for _ in range(int(count)):
            self.start()
            self._reduce(1000)
            self.groups.drop(self.epoch)

    def failing_cycles(self, count: str) -> None:
        """One member after the other cancels; the rest notice."""
        for cycle in range(int(count)):
            self.start()
            self._reduce(10)
            if cycle % self.world == self.rank:
                self.groups.cancel(self.epoch)
            try:
                self._reduce(1000)
                self._reduce(1000)
            except CollectiveError:
                self.groups.drop(self.epoch)
            else:
                self.say("unnoticed")

    def resources(self) -> None:
        """Threads and descriptors of this process once the reapers are done."""
        for thread in threading.enumerate():
            if thread.name.startswith((REAPER_PREFIX, "dmc-group-")):
                thread.join(10)
        with open("/proc/self/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        descriptors, rss_kb = len(os.listdir("/proc/self/fd")), int(fields["VmRSS"].split()[0])
        self.say("resources", threads=int(fields["Threads"]), fds=descriptors, rss_kb=rss_kb)

    def wait(self) -> None:
        self.line.recv()
