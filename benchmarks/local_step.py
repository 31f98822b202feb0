"""What a local step costs over the optimizer that it wraps, and what a trainer's memory costs over its model.

One process, one peer: the demo's model, AdamW. Steps of `dmc.Optimizer` with its loss given, AdamW's own part of each
timed apart, in turn with steps of AdamW alone. Then rounds by themselves, and a model of --values parameters for the
memory. Seconds are the processor's, of the trainer's thread, so other processes do not count.

Keys:
  parameters    of the demo's model
  bare_step_s   median of a step of AdamW alone: zero_grad, forward, backward, step
  inner_s       median of AdamW's own part of a step
  over_s        median of what dmc.Optimizer adds to a step without a round
  over          over_s over bare_step_s
  round_s       median of what a round takes by itself: delta, average, digest; no communication
  values        of the model for the memory
  model_mib     its parameters, float32
  rss_models    resident memory that start and first round add, in models: the scratch vector and the mapped slots
  slots         of those, files of shared memory that are the agent's
  violations    a step that was not counted, a slot of another size than the model
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import bench
import psutil

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
WINDOW, BATCH = 64, 8
SLOTS = 2
"""In turn: the anchor and the candidate."""


def parser() -> argparse.ArgumentParser:
    made = bench.parser(__doc__, "local_step")
    made.add_argument(
        "--steps", type=int, default=0, metavar="N", help="of each kind; default 300, --quick 40"
    )
    made.add_argument("--values", type=int, default=0, metavar="N", help="default 50 million, --quick 5")
    return made


class Line:
    """The agent's part of a run of one peer: each word of the trainer has its answer at once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.waited_s, self.tau, self.round = folder, 0.0, 1 << 40, 1
        self._answers: deque[Any] = deque()

    def get(self, timeout_s: float | None = None) -> Any:
        return self._answers.popleft()

    def get_nowait(self) -> Any | None:
        return self._answers.popleft() if self._answers else None

    def send(self, said: Any) -> None:
        from p2p_dmc.wire import trainer_messages as tm

        match said:
            case tm.RunReady():
                self._answers.append(tm.WriteInitial(slot_path=self.slot()))
            case tm.InitialWritten():
                self._answers.append(self._view(said.digest))
            case tm.RoundReady():
                self.round += 1
                self._answers.append(
                    tm.Reduce(
                        view_epoch=1,
                        round=said.round,
                        weight=said.samples,
                        divisor=said.samples,
                        slot_path=self.slot(),
                    )
                )
            case tm.RoundResult():
                self._answers.append(
                    tm.RoundComplete(
                        view_epoch=1,
                        round=said.round,
                        steps=self.tau,
                        limit_us=0,
                        epoch=0,
                        reset=False,
                        retake=False,
                    )
                )

    def slot(self) -> str:
        return str(self.folder / f"slot{self.round % SLOTS}")

    def _view(self, digest: bytes) -> Any:
        from p2p_dmc.wire import trainer_messages as tm

        return tm.ViewStarted(
            view_epoch=1,
            view_id=b"view",
            history=b"history of 16 by",
            replaced=(),
            rank=0,
            world=1,
            next_round=1,
            slot_path=self.slot(),
            digest=digest,
            tau=self.tau,
            epoch=0,
            local=tm.Local.RESET,
            backend="gloo",
            group_timeout_ms=1000,
        )


class Trainer:
    """A model in the hands of ``dmc.Optimizer``, at its first batch."""

    def __init__(self, folder: Path, model: torch.nn.Module, inner: torch.optim.Optimizer) -> None:
        import p2p_dmc as dmc
        from p2p_dmc.train.collective import GroupKeeper
        from p2p_dmc.train.rounds import Rounds
        from p2p_dmc.wire import trainer_messages as tm

        self.line: Any = Line(folder)
        groups = GroupKeeper(self.line.send)
        self.rounds = Rounds(self.line, groups)
        peer: Any = SimpleNamespace(_rounds=self.rounds, _attach=lambda optimizer: None)
        self.optimizer = dmc.Optimizer(inner, peer, 1, model)
        flat = self.optimizer.flatten()
        ready = tm.RunReady(
            dataset=b"",
            seed=0,
            epochs=1,
            batch_size=BATCH,
            parameters=flat.specs,
            tau_policy=self.optimizer.policy.to_bytes(),
            outer="average",
        )
        groups.start(self.line._view(b""))
        self.rounds.start(ready, flat, inner)


def median_s(measure: Callable[[], float], times: int) -> float:
    return statistics.median(measure() for _ in range(times))


def steps(folder: Path, count: int, seed: int, violations: list[str]) -> dict[str, Any]:
    """The demo's model."""
    import torch

    stdlib = _example()
    torch.manual_seed(seed)
    model = stdlib.ByteTransformer(WINDOW)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randint(0, 256, (2, BATCH, WINDOW))
    trainer = Trainer(folder, model, inner)
    inside = [0.0]
    own_step = inner.step

    def timed_step(closure: Any = None) -> Any:
        started = time.thread_time()
        try:
            return own_step(closure)
        finally:
            inside[0] = time.thread_time() - started

    def gradients() -> Any:
        inner.zero_grad()
        loss = stdlib.loss_of(model(x), y)
        loss.backward()
        return loss

    bare, own, over = [], [], []
    for number in range(count + 10):
        started = time.thread_time()
        gradients()
        own_step()
        bare_s = time.thread_time() - started
        loss = gradients()
        trainer.rounds.tally.hand_out(BATCH)
        inner.step = timed_step  # type: ignore[method-assign]
        started = time.thread_time()
        trainer.optimizer.step(loss)
        whole_s = time.thread_time() - started
        inner.step = own_step  # type: ignore[method-assign]
        if number >= 10:
            bare.append(bare_s)
            own.append(inside[0])
            over.append(whole_s - inside[0])
    if trainer.rounds.steps != count + 10:
        violations.append(f"{trainer.rounds.steps} local steps were counted of {count + 10}")

    def a_round() -> float:
        started = time.thread_time()
        trainer.rounds.synchronise()
        taken_s = time.thread_time() - started
        trainer.rounds.tally.hand_out(BATCH)
        trainer.rounds.count_step(None)
        return taken_s

    bare_s, over_s = statistics.median(bare), statistics.median(over)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "bare_step_s": bare_s,
        "inner_s": statistics.median(own),
        "over_s": over_s,
        "over": over_s / bare_s,
        "round_s": median_s(a_round, 20),
    }


def memory(folder: Path, values: int, violations: list[str]) -> dict[str, Any]:
    """What two rounds add to a process that has model, gradients and AdamW's state already."""
    import torch

    size = values // 50
    model = torch.nn.ParameterList(torch.zeros(size) for _ in range(50))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones(size)
    inner.step()
    process = psutil.Process()
    before = process.memory_info().rss
    trainer = Trainer(folder, model, inner)
    for _ in range(2):
        trainer.rounds.tally.hand_out(BATCH)
        trainer.optimizer.step(1.0)
        trainer.rounds.synchronise()
    added, whole = process.memory_info().rss - before, 4 * 50 * size
    slots = sorted(folder.iterdir())
    if any(slot.stat().st_size != whole for slot in slots):
        violations.append("a slot has another size than the model")
    return {
        "values": 50 * size,
        "model_mib": whole / MIB,
        "rss_models": added / whole,
        "slots": len(slots),
    }


def _example() -> Any:
    path = bench.ROOT / "examples" / "train_stdlib.py"
    spec = importlib.util.spec_from_file_location("train_stdlib", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    conditions, violations = bench.conditions(), []
    import torch

    torch.set_num_threads(1)
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=root) as one, tempfile.TemporaryDirectory(dir=root) as two:
        result = steps(Path(one), options.steps or (40 if options.quick else 300), options.seed, violations)
        bench.say(f"a step {1e3 * result['bare_step_s']:.2f} ms, over it {1e6 * result['over_s']:.0f} us")
        result |= memory(
            Path(two), options.values or (5_000_000 if options.quick else 50_000_000), violations
        )
    rows = [["bare step ms", "AdamW ms", "over it us", "%", "round ms", "rss, models"]]
    numbers = (
        1e3 * result["bare_step_s"],
        1e3 * result["inner_s"],
        1e6 * result["over_s"],
        100 * result["over"],
        1e3 * result["round_s"],
        result["rss_models"],
    )
    print(bench.table([*rows, [f"{number:.2f}" for number in numbers]]))
    return bench.finish(options, {**result, "conditions": conditions}, violations)


if __name__ == "__main__":
    bench.run(main)
