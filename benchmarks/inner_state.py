"""What keeping the optimizer's state costs a trainer: Adam, one process, a round after every step.

The same steps with and without a keeper that writes as often as the disk lets it. Files go to --folder (default: a
temporary one).

Keys:
  values          parameters' elements, float32
  state_mib       what is kept of them
  plain_step_s    median of a step without a keeper
  copy_s          what the main thread waits at a step whose state is written: median, max
  other_s         the same at the other steps, max: the disk is busy, or nothing is due
  busy_step_s     median of a step while the disk is written
  write_s         from the copy to the disk: median
  end_s           the last write, for which the session's end waits
  restore_s       reading, verifying, loading
  rss_mib         resident memory that the keeper adds
  writes          how many there were
  violations      a state on disk, or a restored one, that is not the optimizer's
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bench
import psutil

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
PARAMETERS = 50


def parser() -> argparse.ArgumentParser:
    made = bench.parser(__doc__, "inner_state")
    made.add_argument("--values", type=int, default=0, metavar="N", help="default 50 million, --quick 5")
    made.add_argument("--steps", type=int, default=0, metavar="N", help="default 60, --quick 20")
    made.add_argument("--folder", type=Path, metavar="DIR", help="on the disk that is meant")
    return made


@dataclass
class Rounds:
    """Every step ends in a complete round."""

    histories: tuple[bytes, ...] = (b"h" * 16,)
    lineage: tuple[int, int] | None = None
    steps: int = 0


class Trainer:
    """Parameters with gradients, and Adam."""

    def __init__(self, values: int, seed: int) -> None:
        import torch

        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(seed)
        size = values // PARAMETERS
        self.named = [
            (f"w{number}", torch.nn.Parameter(torch.randn(size, generator=generator)))
            for number in range(PARAMETERS)
        ]
        for _, parameter in self.named:
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.inner = torch.optim.Adam([parameter for _, parameter in self.named])

    def step(self) -> float:
        """Seconds."""
        started_s = time.perf_counter()
        self.inner.step()
        return time.perf_counter() - started_s

    def state(self) -> dict[str, torch.Tensor]:
        """By the names that the file has."""
        return {f"{name}/{key}": v for name, p in self.named for key, v in self.inner.state[p].items()}


def measure(values: int, steps: int, seed: int, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The figures, and what was not as it should be."""
    from p2p_dmc.train import inner_state
    from p2p_dmc.train.inner_keeper import InnerKeeper

    trainer, rounds, process = Trainer(values, seed), Rounds(), psutil.Process()
    plain = [trainer.step() for _ in range(steps)]
    before = process.memory_info().rss
    keeper = InnerKeeper(trainer.inner, trainer.named, rounds, folder, 0.0)
    copies, others, busy, writes, begun_s = [], [], [], [], 0.0
    most = before
    for number in range(1, steps + 1):
        is_busy = keeper._is_busy()
        (busy if is_busy else plain).append(trainer.step())
        if begun_s and not keeper._is_busy():
            writes.append(time.perf_counter() - begun_s)
            begun_s = 0.0
        rounds.lineage = (1, number)
        last, started_s = keeper._last_s, time.perf_counter()
        keeper.after_step()
        spent_s = time.perf_counter() - started_s
        if keeper._last_s != last:
            copies.append(spent_s)
            begun_s = time.perf_counter()
        else:
            others.append(spent_s)
        most = max(most, process.memory_info().rss)
    started_s = time.perf_counter()
    keeper.close(wait_s=600.0)
    end_s = time.perf_counter() - started_s
    found = inner_state.read(folder)
    again = Trainer(values, seed)
    started_s = time.perf_counter()
    InnerKeeper(again.inner, again.named, rounds, folder, 0.0).restore()
    restore_s = time.perf_counter() - started_s
    faults = (
        [] if found is not None and same(found.tensors, trainer.state()) else ["the disk has another state"]
    )
    faults += [] if same(again.state(), trainer.state()) else ["another state was restored"]
    faults += [] if copies and writes else ["nothing was written: give more --steps"]
    result = {
        "values": values,
        "state_mib": round(sum(t.nbytes for t in trainer.state().values()) / MIB, 1),
        "plain_step_s": rounded(statistics.median(plain)),
        "copy_s": [rounded(statistics.median(copies or [0.0])), rounded(max(copies, default=0.0))],
        "other_s": rounded(max(others, default=0.0)),
        "busy_step_s": rounded(statistics.median(busy or [0.0])),
        "write_s": rounded(statistics.median(writes or [0.0])),
        "end_s": rounded(end_s),
        "restore_s": rounded(restore_s),
        "rss_mib": round((most - before) / MIB, 1),
        "writes": len(copies),
    }
    return result, faults


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    import torch

    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def rounded(seconds: float) -> float:
    return round(seconds, 4)


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    values = options.values or (5_000_000 if options.quick else 50_000_000)
    steps = options.steps or (20 if options.quick else 60)
    folder = Path(tempfile.mkdtemp(prefix="dmc-inner-", dir=options.folder))
    try:
        conditions = bench.conditions()
        result, faults = measure(values, steps, options.seed, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = [("", "")] + [(key, str(value)) for key, value in result.items()]
    print(bench.table(rows))
    return bench.finish(options, {**result, "conditions": conditions}, faults)


if __name__ == "__main__":
    bench.run(main)
