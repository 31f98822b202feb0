"""One host of DistributedDataParallel on gloo, in fp32, as torch has it."""

from __future__ import annotations

import os
from pathlib import Path

import task
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def load(folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All samples: pixels (n, 784), classes (n,), numbers (n,), in the order of their names."""
    paths = sorted(folder.glob("*/*.raw"))
    samples = [task.tensors(path.read_bytes(), f"{path.parent.name}/{path.stem}") for path in paths]
    pixels, labels, numbers = zip(*samples, strict=True)
    return torch.stack(pixels), torch.tensor(labels), torch.tensor(numbers)


def main() -> None:
    parser = task.options(__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--master", required=True, metavar="HOST:PORT")
    args = parser.parse_args()

    model = task.network(args.hidden, args.seed)
    pixels, labels, numbers = load(args.data)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method=f"tcp://{args.master}", rank=args.rank, world_size=args.world)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    record = task.Record()
    dist.barrier()
    record.begin()
    for epoch in range(args.epochs):
        order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(args.seed + epoch))
        for batch in order[args.rank :: args.world].split(args.batch_size):
            loss = task.step(wrapped, optimizer, pixels[batch], labels[batch])
            optimizer.step()
            record.step(loss.item(), epoch, numbers[batch])
    record.end()
    record.write(model, args, evaluate=args.rank == 0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
