"""What becomes of a trainer's error feedback at each of the agent's words: both outcomes of a failed round are kept."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from p2p_dmc.train import reduction, state
from p2p_dmc.train.collective import CollectiveError
from p2p_dmc.train.rounds import Rounds
from p2p_dmc.wire import trainer_messages as tm

ANCHOR = [4.0, 2.0]
LEFT = 0.25
"""The part of what is brought that the stub of a reduction leaves out."""


class Link:
    """In place of the agent's socket: words that are there already, and what the trainer answers."""

    waited_s = 0.0

    def __init__(self) -> None:
        self.words: deque[Any] = deque()
        self.said: list[Any] = []

    def send(self, message: Any) -> None:
        self.said.append(message)

    def get(self) -> Any:
        word = self.words.popleft()
        return word() if callable(word) else word

    def get_nowait(self) -> Any:
        return None


class Groups:
    """One that reduces with nobody."""

    fails = False
    world = 2

    @property
    def view(self) -> Groups:
        return self

    def get(self, view_epoch: int) -> Groups:
        return self

    def drop(self, view_epoch: int) -> None: ...

    def close(self) -> None: ...

    def exchange(self, work: Any) -> None:
        work(self)
        if self.fails:
            raise CollectiveError("a member is gone")

    sent_bytes, received_bytes = 11, 12


class Trainer:
    """A trainer with two parameters, and its agent's words."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.link, self.groups = folder, Link(), Groups()
        self.brought: list[list[float]] = []
        monkeypatch.setattr(reduction, "reduce_in", self._reduce)
        self.rounds = Rounds(self.link, self.groups)  # type: ignore[arg-type]
        self.weights = torch.nn.Parameter(torch.zeros(2))
        flat = state.FlatParameters([("w", self.weights)])
        inner = torch.optim.SGD([self.weights], lr=1.0)
        self.view_epoch, self.number, self.slots = 0, 1, 0
        self.link.words.append(self.view(tm.Local.RESET))
        self.rounds.start(None, flat, inner)  # type: ignore[arg-type]

    def _reduce(self, _: Any, __: Any, values: torch.Tensor, error: torch.Tensor) -> None:
        self.brought.append(values.tolist())
        torch.mul(values, LEFT, out=error)
        values.mul_(1 - LEFT)

    def view(self, local: tm.Local) -> tm.ViewStarted:
        self.view_epoch += 1
        self.slots += 1
        path = self.folder / f"view{self.view_epoch}"
        anchor = self.rounds._anchor.tolist() if self.rounds.started else ANCHOR
        path.write_bytes(np.asarray(anchor, dtype="<f4").tobytes())
        return tm.ViewStarted(
            view_epoch=self.view_epoch,
            view_id=b"v%d" % self.view_epoch,
            history=b"h",
            replaced=(),
            rank=0,
            world=2,
            next_round=self.number,
            slot_path="" if local is tm.Local.LEARN else str(path),
            digest=xxhash.xxh3_128(path.read_bytes()).digest(),
            tau=1,
            epoch=0,
            local=local,
            backend="gloo",
            group_timeout_ms=1000,
        )

    def order(self, compress: str = "int8", weight: int = 1) -> tm.Reduce:
        self.slots += 1
        return tm.Reduce(
            view_epoch=self.view_epoch,
            round=self.number,
            weight=weight,
            divisor=4,
            slot_path=str(self.folder / f"slot{self.slots}"),
            compress=compress,
        )

    def complete(self) -> tm.RoundComplete:
        done = tm.RoundComplete(
            view_epoch=self.view_epoch,
            round=self.number,
            steps=1,
            limit_us=0,
            epoch=0,
            reset=False,
            retake=False,
        )
        self.number += 1
        return done

    def step(self, by: float) -> None:
        with torch.no_grad():
            self.weights.sub_(by)
        self.rounds._scratch_weight = None

    def round(self, *words: Any) -> None:
        self.link.words.extend(words)
        self.rounds.synchronise()


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    return Trainer(tmp_path, monkeypatch)


def test_what_a_round_leaves_out_is_added_to_the_next(trainer: Trainer) -> None:
    trainer.step(8.0)
    trainer.round(trainer.order(), trainer.complete())
    assert trainer.brought == [[2.0, 2.0]]  # 8 x weight 1 / divisor 4
    assert trainer.weights.tolist() == [4.0 - 1.5, 2.0 - 1.5]
    trainer.round(trainer.order(weight=0), trainer.complete())
    assert trainer.brought[1] == [0.5, 0.5]  # only what it owes
    result = trainer.link.said[-1]
    assert isinstance(result, tm.RoundResult)
    assert (result.bytes_sent, result.bytes_received) == (11, 12)
    assert trainer.weights.tolist() == [2.5 - 0.375, 0.5 - 0.375]


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize(
    ("local", "brought"),
    [
        (tm.Local.KEEP, 2.0 + 0.5),  # not in the history: the same once more, with what was owed before
        (tm.Local.COUNTED, LEFT * 2.5),  # in the history: what that round left out
        (tm.Local.RESET, 0.0),  # nobody knows: nothing is owed
    ],
)
def test_the_next_view_says_which_outcome_holds(
    trainer: Trainer, fails: bool, local: tm.Local, brought: float
) -> None:
    """``fails``: at this peer, or it was done here and the agent refused it."""
    trainer.step(8.0)
    trainer.round(trainer.order(), trainer.complete())
    trainer.step(8.0)
    trainer.groups.fails = fails

    def view() -> tm.ViewStarted:
        trainer.groups.fails = False
        return trainer.view(local)

    weight = 1 if local is tm.Local.KEEP else 0
    trainer.round(trainer.order(), view, lambda: trainer.order(weight=weight), trainer.complete)
    assert trainer.brought[1] == [2.5, 2.5]
    assert trainer.brought[2] == [brought, brought]
    failed = [m for m in trainer.link.said if isinstance(m, tm.RoundFailed)]
    assert len(failed) == fails


def test_a_learner_brings_zeros_and_owes_nothing(trainer: Trainer) -> None:
    trainer.step(8.0)
    trainer.round(trainer.order(), trainer.complete())
    trainer.link.words.extend([trainer.view(tm.Local.LEARN), trainer.order(weight=0)])
    for _ in range(2):
        trainer.rounds.take()
    trainer.number += 1
    trainer.link.words.append(trainer.order(weight=0))
    trainer.rounds.take()
    assert trainer.brought[1:] == [[0.0, 0.0], [0.0, 0.0]]
    results = [m for m in trainer.link.said if isinstance(m, tm.RoundResult)]
    assert [m.digest == b"" for m in results] == [False, True, True]


def test_the_end_of_the_run_frees_it(trainer: Trainer) -> None:
    trainer.step(8.0)
    trainer.round(trainer.order(), trainer.complete())
    feedback = trainer.rounds._reducer.feedback
    assert feedback.owed is not None
    slot = trainer.folder / "final"
    slot.write_bytes(np.asarray([1.0, 1.0], dtype="<f4").tobytes())
    digest = xxhash.xxh3_128(slot.read_bytes()).digest()
    trainer.link.words.append(tm.RunFinished(slot_path=str(slot), digest=digest, final_path=""))
    trainer.rounds.take()
    assert feedback.owed is None and trainer.weights.tolist() == [1.0, 1.0]
