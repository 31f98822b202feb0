"""A replica group of one process in torchft: quorum, averaged gradients, commit."""

from __future__ import annotations

import signal
import sys
from datetime import timedelta

import torch.distributed as dist
from lines import StepFile, Task, arguments
from torchft import Manager, ProcessGroupGloo

TIMEOUT = timedelta(seconds=5)


def main() -> None:
    args = arguments("lighthouse", "name")
    task, steps = Task(args), StepFile()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict) -> None:
        task.model.load_state_dict(state["model"])
        task.optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": task.model.state_dict(), "optimizer": task.optimizer.state_dict()},
        min_replica_size=2,
        timeout=TIMEOUT,
        quorum_timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=args.lighthouse,
        replica_id=args.name,
        hostname="127.0.0.1",
    )
    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: leaving.append(number))
    while not leaving:
        manager.start_quorum()
        task.backward()
        for parameter in task.model.parameters():
            manager.allreduce(parameter.grad).wait()
        if manager.should_commit():
            task.optimizer.step()
            steps.write(manager.current_step(), manager.num_participants(), str(manager._quorum_id))
    manager.shutdown(wait=False)
    sys.exit(0)


if __name__ == "__main__":
    main()
