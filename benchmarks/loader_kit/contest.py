"""What a trainer runs: the same samples by three loaders in turn, epoch after epoch, in one process."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from torch.utils.data import DataLoader, Dataset

import p2p_dmc as dmc

PREFETCH = 4
STEPS = 4096
"""Of a round: the loaders are compared, not what a round costs."""


def decode_bytes(data: bytes) -> torch.Tensor:
    """(1024,) uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode_image(data: bytes) -> torch.Tensor:
    """(height, width, 3) uint8, from JPEG if Pillow made the files, else from deflate."""
    if data[:2] == b"\xff\xd8":
        from PIL import Image

        return torch.from_numpy(np.array(Image.open(io.BytesIO(data))))
    return torch.frombuffer(bytearray(zlib.decompress(data)), dtype=torch.uint8)


def decode_tokens(data: bytes) -> torch.Tensor:
    """(2048,) int64."""
    return torch.from_numpy(np.frombuffer(data, dtype="<u2").astype(np.int64))


DECODERS: dict[str, Callable[[bytes], torch.Tensor]] = {
    "bytes_1k": decode_bytes,
    "image_100k": decode_image,
    "tokens": decode_tokens,
}


class LooseFiles(Dataset[torch.Tensor]):
    """A map-style data set as it is usually written."""

    def __init__(self, folder: Path, decode: Callable[[bytes], torch.Tensor]) -> None:
        self._paths = sorted(str(path) for path in folder.rglob("*.bin"))
        self._decode = decode

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with open(self._paths[index], "rb") as file:
            return self._decode(file.read())


def field(sample: dict[str, Any], decode: Callable[[bytes], torch.Tensor]) -> torch.Tensor:
    return decode(sample["bin"])


def loose(options: argparse.Namespace) -> Iterable[torch.Tensor]:
    return DataLoader(
        LooseFiles(options.folder, DECODERS[options.case]),
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        prefetch_factor=PREFETCH if options.workers else None,
        persistent_workers=options.workers > 0,
    )


def webdataset(options: argparse.Namespace) -> Iterable[torch.Tensor]:
    """In the order of the files, which is what it does best."""
    shards = sorted(str(path) for path in options.shards.glob("*.tar"))
    data = wds.WebDataset(shards, shardshuffle=False)
    decode = functools.partial(field, decode=DECODERS[options.case])
    batches = data.map(decode).batched(options.batch_size, collation_fn=torch.stack)
    return wds.WebLoader(
        batches,
        batch_size=None,
        num_workers=options.workers,
        prefetch_factor=PREFETCH if options.workers else None,
        persistent_workers=options.workers > 0,
    )


def cpu_s(pid: int) -> float:
    """Of all threads of a process that are there."""
    spent_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            spent_ns += int((task / "schedstat").read_text().split()[0])
    return spent_ns / 1e9


def children() -> list[int]:
    """Of this process."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def timed(
    batches: Callable[[], Iterable[torch.Tensor]],
    step: Callable[[torch.Tensor], None],
    besides: Sequence[int],
) -> tuple[float, int, int, float]:
    """Samples a second from the first batch to the last, samples in all, a sum over all that they hold, and
    microseconds of CPU a sample, those of the workers and of the processes ``besides`` included.
    """
    begun_s = ended_s = spent_s = 0.0
    samples = total = first = 0
    for batch in batches:
        if not samples:
            first = len(batch)
            others = [*children(), *besides]
            spent_s = -time.process_time() - sum(map(cpu_s, others))
            begun_s = time.perf_counter()
        samples += len(batch)
        total += int(batch.sum(dtype=torch.int64))
        ended_s, own_s = time.perf_counter(), time.process_time()
        step()
    spent_s += own_s + sum(map(cpu_s, others))
    rate = (samples - first) / max(ended_s - begun_s, 1e-9)
    return rate, samples, total, 1e6 * spent_s / max(1, samples - first)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=sorted(DECODERS), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--trials", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    said: dict[str, list[tuple[float, int, int, float]]] = {"ours": [], "webdataset": [], "loose": []}
    others = {"webdataset": webdataset(options), "loose": loose(options)}
    weight = torch.nn.Parameter(torch.zeros(1))
    with dmc.connect() as peer:
        data = peer.dataset("loader")
        optimizer = dmc.Optimizer(torch.optim.SGD([weight], lr=0.0), peer, tau=STEPS)
        plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
        loader = peer.loader(
            data,
            options.batch_size,
            options.trials + 1,
            decode=functools.partial(field, decode=DECODERS[options.case]),
            num_workers=options.workers,
            prefetch_factor=PREFETCH if options.workers else None,
            persistent_workers=options.workers > 0,
        )
        own_step, turns = functools.partial(optimizer.step, 0.0), list(said)
        for epoch in loader.epochs():
            for name in turns:
                mine = name == "ours"
                batches, step = (epoch, own_step) if mine else (others[name], plain.step)
                said[name].append(timed(batches, step, [os.getppid()] if mine else []))
            turns.append(turns.pop(0))  # each is as often the first of a trial as the others
    options.out.write_text(json.dumps(said))


if __name__ == "__main__":
    main()
