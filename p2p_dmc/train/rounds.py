"""A trainer's part of its run: views as they come, local counters, and the round (DESIGN.md section 7)."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from p2p_dmc.core.outer import parse
from p2p_dmc.errors import RunStopped, UserError
from p2p_dmc.observe.phases import reach
from p2p_dmc.train import outer, state
from p2p_dmc.train.collective import CollectiveError, GroupKeeper, check_backend, ring_bytes
from p2p_dmc.train.leases import Leases
from p2p_dmc.train.link import AgentLink
from p2p_dmc.train.rates import rate_nano
from p2p_dmc.train.tally import Tally
from p2p_dmc.wire import trainer_messages as tm

T = TypeVar("T")


class Rounds:
    """What the main thread knows of its run. Messages are acted on at safe points only: when the script asks
    for the next batch, steps its optimizer, or waits at a round's barrier.

    Invariant: live parameters change only by the script's steps and by ``_restart`` from a recorded anchor.
    """

    def __init__(self, link: AgentLink, groups: GroupKeeper) -> None:
        self._link = link
        self._groups = groups
        self.leases = Leases()
        self.view: tm.ViewStarted | None = None
        self.tau = 1
        self.may_decay = True
        self.epoch = 0  # the ledger's
        self.finished = False
        self.final_path: str | None = None
        self.lineage: tuple[int, int] | None = None  # of the last round that was complete here
        self.tally = Tally()
        self.steps = 0
        self.ever_stepped = False
        self._next_round = 0
        self._parked = False  # no local step until a view to train in has come
        self._learning: tm.ViewStarted | None = None  # the view to learn in
        self.expected = (
            False  # the others stand at a barrier with their local steps done, and this peer has none
        )
        self._loss_sum: torch.Tensor | float = (
            0.0  # stays on its device: reading it each step would wait for the GPU
        )
        self._compute_from = (0.0, 0.0)  # clock, and time waited for the agent, when computing began
        self._compute_us = 0
        self._limit_us = 0  # of computing, after which a round is due; 0: none
        self._flat: state.FlatParameters | None = None
        self._slot_size = 0  # values of a state: the parameters, and the outer momentum if there is one
        self._inner: torch.optim.Optimizer | None = None
        self._anchor = torch.empty(0)
        self._anchor_in = ("", b"")  # its slot and digest: this trainer has written or verified it
        self._candidate_in = ("", b"")
        self._candidate: torch.Tensor | None = None  # the slot that the last Reduce named, not yet recorded
        self._scratch = torch.empty(0)
        self._scratch_weight: int | None = (
            None  # the delta's weight in scratch; None: something else is there
        )

    # -- start -----------------------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        return self._flat is not None

    @property
    def histories(self) -> tuple[bytes, ...]:
        """The run's, and those that it took the place of; none before the first view."""
        return (self.view.history, *self.view.replaced) if self.view is not None else ()

    @property
    def last_round(self) -> int:
        """The last complete one, by its number in the history; 0 before any."""
        return max(0, self._next_round - 1)

    def start(self, ready: tm.RunReady, flat: state.FlatParameters, inner: torch.optim.Optimizer) -> None:
        """Say RunReady and wait for the first view, whose anchor becomes the parameters (or for the run's
        end).
        """
        self._flat, self._inner = flat, inner
        self._scratch = torch.zeros(flat.size)
        self._slot_size = flat.size * parse(ready.outer).vectors
        self._link.send(ready)
        while self.view is None and not self.finished:
            self.take()
        self._computing()

    # -- messages --------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """A safe point: act on what has arrived. Without waiting, unless this trainer is parked or expected."""
        self._drain()
        if self.expected and not self.finished:
            self.synchronise()

    def _drain(self) -> None:
        while (message := self._link.get_nowait()) is not None:
            self._apply(message)
        while self._parked and not self.finished:
            self.take()

    def take(self) -> Any:
        """Wait for the next message, act on it, return it."""
        message = self._link.get()
        self._apply(message)
        return message

    def expect(self, kind: type[T], wanted: Callable[[T], bool]) -> T:
        """Wait for one particular answer, acting on whatever comes before it."""
        while True:
            message = self.take()
            if isinstance(message, kind) and wanted(message):
                return message

    def send(self, message: Any) -> None:
        """To the agent."""
        self._link.send(message)

    def _apply(self, message: Any) -> None:
        match message:
            case tm.TrainerStop():
                raise RunStopped()
            case tm.TrainerRefused():
                raise UserError(message.reason)
            case tm.RunFinished() if not self.finished and self.started:  # else RunReady is answered by it
                self._finish(message)
            case tm.ViewStarted() if not self.finished:
                self._enter_view(message)
            case tm.Park() if not self.finished:
                self._parked = True
                self.send(tm.Parked())
            case tm.Reduce() if self._learning is not None:
                self._reduce_to_learn(message, self._learning)
            case tm.WriteInitial() if self.view is None and self._flat is not None:
                self._write_initial(message, self._flat)
            case tm.Lease():
                self.leases.add(message)
            case tm.LeaseEnd():
                if message.epoch <= self.epoch or message.finished:
                    self.leases.stop(message)
                self.epoch = max(self.epoch, message.epoch)  # a new epoch: the loader asks for that
            case _:
                pass  # an answer that somebody waits for, or the late word of a round that is over

    def _write_initial(self, message: tm.WriteInitial, flat: state.FlatParameters) -> None:
        slot = state.open_slot(message.slot_path, self._slot_size)
        flat.gather(slot)
        slot[flat.size :].zero_()
        self.send(tm.InitialWritten(digest=state.digest_of(slot)))

    def _enter_view(self, view: tm.ViewStarted) -> None:
        check_backend(view.backend)
        if self._flat is None:
            raise RuntimeError("a view before RunReady")
        if view.local is tm.Local.LEARN:
            self._learning, self._parked, self.expected = view, True, False
            return
        if self._learning is not None:
            self.expected = True  # who has learned enough begins with a round, not with steps
            state.forget_slots()  # those of the rounds that it kept: the agent gives their memory back
        self._learning, self._parked = None, False
        anchor_in = (view.slot_path, view.digest)
        if anchor_in != self._anchor_in:
            self._anchor = state.read_slot(view.slot_path, self._slot_size, view.digest)
            self._anchor_in = anchor_in
        first, self.view = self.view is None, view
        self.tau, self.epoch, self._next_round = view.tau, view.epoch, view.next_round
        self.may_decay = view.may_decay
        self._limit_us = 0
        self.leases.end = None
        if view.local is tm.Local.RESET:
            self._forget_leases()
        if first or view.local is not tm.Local.KEEP:
            self._restart()

    def _finish(self, message: tm.RunFinished) -> None:
        assert self._flat is not None
        self._anchor = state.read_slot(message.slot_path, self._slot_size, message.digest)
        self.finished, self.final_path = True, message.final_path
        self._forget_leases()
        self._restart()
        self._groups.close()
        state.forget_slots()

    def _forget_leases(self) -> None:
        """Samples in hand are others' now; so is the gradient of those that were not stepped."""
        assert self._flat is not None
        self.leases.clear()
        self.tally.forget_handed_out()
        self._flat.clear_gradients()

    def _restart(self) -> None:
        """Local parameters := anchor, with nothing done since."""
        assert self._flat is not None
        self._flat.scatter(self._anchor)
        self.tally.restart()
        self.steps = self._compute_us = 0
        self._loss_sum = 0.0
        self._scratch_weight = None

    # -- local steps -----------------------------------------------------------------------------------------

    def count_step(self, loss: torch.Tensor | float | None) -> None:
        """One local step is done: the samples handed out since the last one are consumed."""
        count = self.tally.consume()
        self.steps += 1
        self.ever_stepped = True
        if isinstance(loss, torch.Tensor):
            value = loss.detach()
            self._loss_sum = (
                self._loss_sum + (value.float() if value.device.type == "mps" else value.double()) * count
            )
        elif loss is not None:
            self._loss_sum = self._loss_sum + float(loss) * count

    def pass_over(self) -> None:
        """A batch of which every sample was skipped: it is due like a step, so that nobody waits for this peer."""
        if self.tally.in_vain:
            self.tally.consume()
            self.steps += 1
            self.after_step()

    def after_step(self) -> None:
        """The safe point after a local step: a round is due every tau steps, or when its time is up."""
        self.poll()
        late = 0 < self._limit_us < self._compute_us + self._spent_us()
        if (self.steps >= self.tau or late or self.tally.crowded) and not self.finished:
            self.synchronise()

    # -- the round -------------------------------------------------------------------------------------------

    def synchronise(self) -> None:
        """One round: say what this peer has, reduce when all agree, take the new anchor when the agent
        recorded it.

        Whatever happens instead (a lost member, a failed reduction, a refused result) ends in a new view, and
        this peer says again what it has there.
        """
        self._drain()
        self._say_ready()
        while not self.finished:
            message = self.take()
            if isinstance(message, tm.ViewStarted):
                self._say_ready()
            elif isinstance(message, tm.Reduce) and self._is_current(message):
                self._reduce(message)
            elif isinstance(message, tm.RoundComplete) and self._is_current(message):
                self._complete(message)
                break
        self._computing()

    def _is_current(self, message: tm.Reduce | tm.RoundComplete) -> bool:
        assert self.view is not None
        return (message.view_epoch, message.round) == (self.view.view_epoch, self._next_round)

    def _say_ready(self) -> None:
        if self.finished or self._parked:
            return
        assert self.view is not None
        self.expected = False
        self._candidate = None
        self._scale(self.tally.trained)
        finite = state.all_finite(self._scratch)
        self._stop_computing()
        self.send(
            tm.RoundReady(
                view_epoch=self.view.view_epoch,
                round=self._next_round,
                samples=self.tally.consumed,
                steps=self.steps,
                loss_sum_micro=_micro(self._loss_sum),
                compute_us=self._compute_us,
                finite=finite,
                skipped=tuple(self.tally.skipped),
                rate_nano=rate_nano(self._inner),
            )
        )

    def _scale(self, weight: int) -> None:
        """Scratch := weight x (anchor - local). Never 0 x delta: that would be NaN for a delta that is not
        finite.
        """
        assert self._flat is not None
        if weight == self._scratch_weight:
            return
        if weight == 0:
            self._scratch.zero_()
        else:
            self._flat.gather(self._scratch)
            state.weighted_delta(self._anchor[: self._flat.size], self._scratch, weight)
        self._scratch_weight = weight

    def _all_reduce(self, order: tm.Reduce) -> int | None:
        """Sum everybody's weighted delta into scratch; microseconds, or None when it failed."""
        started = time.perf_counter()
        self._scale(order.weight)
        self._scratch_weight = None
        try:
            if order.divisor:
                self._groups.get(order.view_epoch).all_reduce(self._scratch)
        except CollectiveError as error:
            self._groups.drop(order.view_epoch)  # at once: the others learn of it by their broken connections
            self.send(tm.RoundFailed(view_epoch=order.view_epoch, round=order.round, reason=str(error)))
            return None
        return int((time.perf_counter() - started) * 1e6)

    def _reduce(self, order: tm.Reduce) -> None:
        assert self.view is not None and self._flat is not None
        comm_us = self._all_reduce(order)
        if comm_us is None:
            return
        candidate = state.open_slot(order.slot_path, self._slot_size)
        outer.advance(self._anchor, self._scratch, order.divisor, order.outer, out=candidate)
        digest = state.digest_of(candidate)
        self._candidate, self._candidate_in = candidate, (order.slot_path, digest)
        reach("reduced")
        self._say_result(order, digest, comm_us, self.view.world if order.divisor else 1)

    def _reduce_to_learn(self, order: tm.Reduce, view: tm.ViewStarted) -> None:
        """A learner has no anchor yet: it adds zeros, and hands on what the round does to everybody's."""
        assert self._flat is not None
        if order.view_epoch != view.view_epoch:
            return
        comm_us = self._all_reduce(order)
        if comm_us is None:
            return
        slot = state.open_slot(order.slot_path, self._slot_size)
        state.mean(self._scratch, order.divisor, out=slot[: self._flat.size])
        self._say_result(order, b"", comm_us, view.world)

    def _say_result(self, order: tm.Reduce, digest: bytes, comm_us: int, world: int) -> None:
        assert self._flat is not None
        moved = ring_bytes(self._flat.size * state.ITEM_BYTES, world)
        self.send(
            tm.RoundResult(
                view_epoch=order.view_epoch,
                round=order.round,
                digest=digest,
                comm_us=comm_us,
                bytes_sent=moved,
                bytes_received=moved,
            )
        )

    def _complete(self, message: tm.RoundComplete) -> None:
        assert self._inner is not None
        if self._candidate is not None:  # without a Reduce nobody had weight, and the anchor stays
            self._anchor, self._anchor_in = self._candidate, self._candidate_in
        self.tau, self._limit_us, self.epoch = message.steps, message.limit_us, message.epoch
        self.may_decay = message.may_decay
        self.lineage = (message.view_epoch, message.round)
        self._next_round = message.round + 1
        self.leases.end = None
        if message.reset:
            self._forget_leases()
            state.forget_nonfinite(self._inner.state)
        elif message.retake:
            self._forget_leases()
        self._restart()

    # -- time ------------------------------------------------------------------------------------------------

    def _computing(self) -> None:
        self._compute_from = (time.perf_counter(), self._link.waited_s)

    def _stop_computing(self) -> None:
        """Time since the last round without what was spent waiting for the agent; a second ready adds
        nothing.
        """
        spent_us = self._spent_us()
        self._computing()
        if self.steps:
            self._compute_us += spent_us

    def _spent_us(self) -> int:
        now, waited_s = time.perf_counter(), self._link.waited_s
        spent_s = (now - self._compute_from[0]) - (waited_s - self._compute_from[1])
        return max(0, int(spent_s * 1e6))


def _micro(loss_sum: torch.Tensor | float) -> int:
    """The sum in millionths; 0 for one that is not finite (such a round soon weighs nothing)."""
    value = float(loss_sum)
    with contextlib.suppress(OverflowError):
        if math.isfinite(value):
            return max(-tm.MOST_LOSS_MICRO, min(tm.MOST_LOSS_MICRO, round(value * 1e6)))
    return 0
