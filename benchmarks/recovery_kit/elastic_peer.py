"""A worker of torchrun: DDP over gloo, a checkpoint now and then, everything anew after each change of members."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from lines import StepFile, Task, arguments
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT_STEPS = 10
TIMEOUT = datetime.timedelta(seconds=5)


def main() -> None:
    args = arguments("checkpoint")
    dist.init_process_group("gloo", timeout=TIMEOUT)
    task, steps, number = Task(args), StepFile(), 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint)
        number = state["number"]
        task.model.load_state_dict(state["model"])
    model = DistributedDataParallel(task.model)
    world = dist.get_world_size()
    group = f"{os.environ['MASTER_PORT']}-{world}"  # a port of its own for each group
    while True:
        task.backward(model)
        task.optimizer.step()
        number += 1
        steps.write(number, world, group)
        if number % CHECKPOINT_STEPS == 0 and dist.get_rank() == 0:
            torch.save({"number": number, "model": task.model.state_dict()}, args.checkpoint + ".new")
            os.replace(args.checkpoint + ".new", args.checkpoint)


if __name__ == "__main__":
    main()
