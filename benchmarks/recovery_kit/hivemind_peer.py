"""A peer of hivemind: local steps, then DecentralizedAverager.step, which averages the parameters in groups."""

from __future__ import annotations

import signal
import sys
import zlib

import hivemind
from lines import StepFile, Task, arguments


def main() -> None:
    args = arguments("initial")
    dht = hivemind.DHT(
        initial_peers=[args.initial],
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        start=True,
    )
    task, steps = Task(args), StepFile()
    weight = task.model.weight.detach()
    averager = hivemind.DecentralizedAverager(
        [weight.clone()],
        dht,
        prefix="recovery",
        target_group_size=args.peers,
        min_matchmaking_time=1.0,
        request_timeout=0.5,
        next_chunk_timeout=2.0,
        sender_timeout=2.0,
        reducer_timeout=4.0,
        allreduce_timeout=30.0,
        start=True,
    )
    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: leaving.append(number))
    number = 0
    while not leaving:
        task.backward()
        task.optimizer.step()
        with averager.get_tensors() as averaged:
            averaged[0].copy_(weight)
        try:
            group = averager.step(gather=number, timeout=60.0)
        except Exception as error:  # noqa: BLE001 whatever it is, the loop goes on as hivemind.Optimizer's does
            print(f"averaging failed: {error!r}", file=sys.stderr, flush=True)
            group = None
        with averager.get_tensors() as averaged:
            weight.copy_(averaged[0])
        number += 1
        if group:
            members = ",".join(sorted(map(str, group)))
            steps.write(number, len(group), f"{zlib.crc32(members.encode()):08x}")
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
