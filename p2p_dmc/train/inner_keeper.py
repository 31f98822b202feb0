"""When the script's own optimizer's state is written down, and restored at the next start (see ``inner_state``)."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from p2p_dmc.train import inner_state
from p2p_dmc.train.inner_state import InnerState, Named, UnkeepableError
from p2p_dmc.train.state import forget_nonfinite

THREAD_PREFIX = "dmc-inner-"
END_WAIT_S = 4.0
"""What the end of a session waits for the disk at most: an agent kills a trainer that does not go within 8 s."""


class Progress(Protocol):
    """What the keeper asks of a trainer's rounds."""

    @property
    def histories(self) -> tuple[bytes, ...]:
        """The run's, and those that it took the place of; none before the first view."""

    @property
    def lineage(self) -> tuple[int, int] | None:
        """The last round that this trainer completed."""

    @property
    def steps(self) -> int:
        """Local steps since then."""


class InnerKeeper:
    """Restores the state once, and writes it down at most every ``every_s`` seconds and at the session's end.

    Cost: at a safe point after a complete round the main thread copies the state into host memory (Adam on 100
    million parameters: 800 MB, 0.1 to 0.3 s; from a GPU at the speed of the bus), and a thread writes it. The room
    for the copy, as large as the state, is made by that thread and kept until the end: a copy into fresh memory takes
    five times as long. Restoring holds the state twice for a moment. Nothing here ends training; what goes wrong is
    one line for the user.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, named: Named, rounds: Progress, folder: Path, every_s: float
    ) -> None:
        self._inner = inner
        self._named = named
        self._rounds = rounds
        self._folder = folder
        self._every_s = every_s
        self._began = inner_state.group_options(inner)
        self._room: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._last_s = time.monotonic()
        self._seen = rounds.lineage
        self._written: tuple[tuple[int, int], int] | None = None
        self._refused = False

    def restore(self) -> None:
        """Load what an earlier trainer of this peer wrote, if it fits; a line says so, or why not."""
        try:
            kept = inner_state.read(self._folder)
            if kept is None:
                return
            histories = [history.hex() for history in self._rounds.histories]
            reason = inner_state.mismatch(kept, self._inner, self._named, histories)
            if not reason:
                inner_state.restore(kept, self._inner, self._named)
                forget_nonfinite(self._inner.state)
                view_epoch, number = kept.lineage
                _say(
                    f"state of {type(self._inner).__name__} (momentum and the like) restored from view "
                    f"{view_epoch} round {number}"
                )
        except Exception as error:  # noqa: BLE001 the optimizer's own code may raise anything; it starts afresh
            reason = str(error) or type(error).__name__
        if reason:
            _say(f"the optimizer's state in {self._folder} is ignored: {reason}")

    def after_step(self) -> None:
        """After every local step and the round that it may have ended in: write the state down, if that is due."""
        lineage, seen = self._rounds.lineage, self._seen
        self._seen = lineage
        if lineage == seen or self._refused or time.monotonic() - self._last_s < self._every_s:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        state = self._take()
        if state is None:
            return
        if not _fits(self._room, state.tensors):
            self._start(lambda: self._make_room(state.tensors), "room")
            return
        for key, tensor in state.tensors.items():
            self._room[key].copy_(tensor)
        self._last_s = time.monotonic()
        self._start(lambda: self._write(replace(state, tensors=self._room)), "write")

    def close(self, wait_s: float = END_WAIT_S) -> None:
        """Write the state as it is at the end, waiting for the disk at most ``wait_s``."""
        end_s = time.monotonic() + wait_s
        if self._thread is not None:
            self._thread.join(wait_s)
        lineage = self._rounds.lineage
        if lineage is None or self._refused or (lineage, self._rounds.steps) == self._written:
            return
        state = None if self._is_busy() else self._take()
        if state is not None:
            copy = {k: t.detach().to("cpu", copy=True).contiguous() for k, t in state.tensors.items()}
            self._start(lambda: self._write(replace(state, tensors=copy)), "write")
            assert self._thread is not None
            self._thread.join(max(0.0, end_s - time.monotonic()))
        if self._is_busy():
            _say(f"the optimizer's state at the end was not on disk in {self._folder} within {wait_s:g} s")
        self._room = {}

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _take(self) -> InnerState | None:
        """The state as it stands, in the optimizer's own memory; None when there is none, or it cannot be kept."""
        lineage = self._rounds.lineage
        assert lineage is not None
        history = self._rounds.histories[0].hex()
        try:
            state = inner_state.take(
                self._inner, self._named, self._began, history, lineage, self._rounds.steps
            )
        except UnkeepableError as error:
            self._refused = True
            _say(
                f"state of {type(self._inner).__name__} is not kept, a restarted trainer begins without: {error}"
            )
            return None
        return state if state.tensors or any(state.values) else None

    def _start(self, work: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(
            target=self._work, args=[work], name=f"{THREAD_PREFIX}{name}", daemon=True
        )
        self._thread.start()

    def _work(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            _say(f"{self._folder}: {error.strerror}; the optimizer's state is not kept, training goes on")
        except Exception as error:  # noqa: BLE001 memory, or a dtype that this safetensors does not write
            self._refused = True
            _say(f"the optimizer's state is not kept: {type(error).__name__}: {error}; training goes on")

    def _make_room(self, tensors: dict[str, torch.Tensor]) -> None:
        """Fresh memory is slow at its first touch: it is touched here."""
        self._room = {
            key: torch.empty(tensor.shape, dtype=tensor.dtype).zero_() for key, tensor in tensors.items()
        }

    def _write(self, state: InnerState) -> None:
        inner_state.write(self._folder, state)
        self._written = (state.lineage, state.ahead)


def _fits(room: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> bool:
    shapes = {key: (tensor.shape, tensor.dtype) for key, tensor in room.items()}
    return shapes == {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}


def _say(line: str) -> None:
    print(f"p2p_dmc: {line}", file=sys.stderr, flush=True)
