"""torch's own DistributedDataParallel on batches that a run has trained on, each rank in a process of its own."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # each optimizer's first step imports it: here once for all processes
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

DEADLINE_S = 60
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.train.member", "tests.train.ddp"])  # torch is imported once for all

Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""One for each step."""


def train(model: torch.nn.Module, batches: Batches, options: dict[str, float]) -> list[Any]:
    """The flat parameters after each step, as numpy arrays."""
    optimizer = torch.optim.SGD(model.parameters(), **options)  # type: ignore[arg-type]
    after = []
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        after.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy())
    return after


def run(
    folder: Path, model: torch.nn.Module, batches: Sequence[Batches], options: dict[str, float]
) -> list[Any]:
    """``batches`` by rank; all ranks have the same parameters after each step, which are returned."""
    processes, lines = [], []
    copies = pickle.dumps(model)  # as an argument its tensors would be memory that all ranks share
    for rank, own in enumerate(batches):
        line, theirs = FORKSERVER.Pipe()
        plain = [(x.numpy(), y.numpy()) for x, y in own]
        args = (theirs, f"file://{folder}/rendezvous", rank, len(batches), copies, plain, options)
        processes.append(FORKSERVER.Process(target=_rank, args=args, daemon=True))
        lines.append(line)
        processes[-1].start()
        theirs.close()
    try:
        found = []
        for line in lines:
            assert line.poll(DEADLINE_S), "a rank of DDP said nothing"
            found.append(line.recv())
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert all(
        one.tobytes() == two.tobytes() for after in found for one, two in zip(after, found[0], strict=True)
    )
    return found[0]  # type: ignore[no-any-return]


def _rank(
    line: Connection, where: str, rank: int, world: int, copies: bytes, plain: Any, options: dict[str, float]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world)
    batches = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in plain]
    line.send(train(DistributedDataParallel(pickle.loads(copies)), batches, options))
    line.recv()
