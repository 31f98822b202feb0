"""How a learner comes to hold its view's state: the start, downloaded, and the rounds since (DESIGN.md section 8).

The learner takes part in every reduction, so it has what each round did to the anchor. Once the start state is here
and verified, it does the same to that, round by round, and each result is compared with what the voters say of theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from p2p_dmc.agent.adoption import AdoptionFailedError
from p2p_dmc.agent.barrier import BarrierResult
from p2p_dmc.agent.checkpoints import values_of
from p2p_dmc.agent.course import Course, outer_step
from p2p_dmc.agent.state import Held, file_digest, state_digest
from p2p_dmc.agent.state_keeper import StateKeeper
from p2p_dmc.agent.work import Work, decode_payload, opening_ledger
from p2p_dmc.core.adacomm import TauPolicy
from p2p_dmc.core.agreement_messages import Lineage, MemberId, StateRef, View
from p2p_dmc.errors import UserError
from p2p_dmc.observe.phases import reach

MOST_KEPT = 8
"""Rounds whose results a learner keeps, an anchor's memory each. With more it asks for a view with a newer start."""
MOST_KEPT_SMALL = 256
"""The same where all of them fit into ``SMALL_BYTES``: a small model's rounds are over in no time."""
SMALL_BYTES = 64 << 20
SHARE = 4
"""While a reduction runs the download yields, but for one in so many parts of the state in each round: else it might
never end. Each time that it took too many rounds all the same it yields less."""
PIECE = 1 << 20
"""Values of a state that are worked on at once: temporaries are no larger."""
GIVE_UP_S = 20.0
"""A download without success for so long needs other donors, or another state: the next view's."""
MOST_FAILURES = 3
"""After so many of them in a row no view will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One round that this learner took part in. ``mean``: slot of the averaged delta; None when nobody had weight."""

    view: View
    round: int
    result: BarrierResult
    mean: Path | None

    @property
    def lineage(self) -> Lineage:
        return self.view.view_epoch, self.round


class CatchUp:
    """One learner's way to its view's state. It goes on over views as long as these continue what it has.

    ``on_held`` is told of every state, in order, that is verified and is no older than the newest view's start.
    ``on_hopeless``: this peer cannot get any state; it had better leave than ask for one view after another.
    ``donors``: bulk addresses of the newest view's holders; before the first view, of those who offer a start.
    """

    def __init__(
        self,
        keeper: StateKeeper,
        me: MemberId,
        policy: TauPolicy,
        *,
        skip_lost: bool,
        donors: Callable[[], Sequence[str]],
        on_held: Callable[[Held], None],
        on_problem: Callable[[str], None],
        on_hopeless: Callable[[str], None],
    ) -> None:
        self._keeper = keeper
        self._me = me
        self._policy = policy
        self._skip_lost = skip_lost
        self._donors = donors
        self._on_held = on_held
        self._on_problem = on_problem
        self._on_hopeless = on_hopeless
        self.target: StateRef | None = None
        """The start state that is being downloaded, or was."""
        self.lost = False
        """The rounds that are kept no longer lead to the voters' state: another view is needed."""
        self._view: View | None = None
        self._held: Held | None = None
        self._course: Course | None = None
        self._kept: list[Kept] = []
        self._replaying: Kept | None = None
        self._untold: list[Held] = []
        """States that no voter's header has confirmed yet, oldest first."""
        self._generation = 0
        """Grows when what is under way has become useless."""
        self._said: dict[Lineage, bytes] = {}
        """Digests of states, as voters' headers say them."""
        self._wake = asyncio.Event()
        self._no_reduction = asyncio.Event()
        self._no_reduction.set()
        self._spent_bytes = 0
        self._losses = self._failures = 0
        self.began_s = time.monotonic()

    # -- what the rounds tell ---------------------------------------------------------------------------------------

    def expect(self, start: StateRef) -> None:
        """The first view probably starts from this state: it is fetched while this peer waits to be let in."""
        if self._view is None and (self.lost or self.target != start):
            self._begin_anew(start)
            self.lost = False
            self._wake.set()

    def enter(self, view: View) -> None:
        """The next view in which this peer learns. What is here goes on if the view starts where it leads to."""
        dropped = [kept for kept in self._kept if kept.lineage > view.start.lineage]
        self._kept = [kept for kept in self._kept if kept.lineage <= view.start.lineage]
        self._forget(dropped)
        expected = self._view is not None or self.target == view.start
        if self.lost or not expected or self._leads_to() != view.start.lineage:
            self._begin_anew(view.start)
        elif self._view is None:
            self.began_s = time.monotonic()
        self._view, self.lost = view, False
        self.quiet()
        self._said = {view.start.lineage: view.start.digest}
        if self._held is not None and not self._untold:
            self._to_tell(self._held)
        self._tell()
        self._wake.set()

    def _leads_to(self) -> Lineage | None:
        last = self._kept[-1] if self._kept else self._replaying
        if last is not None:
            return last.lineage
        if self._held is not None:
            return self._held.ref.lineage
        return self.target.lineage if self.target is not None else None

    def _begin_anew(self, start: StateRef) -> None:
        self._drop_all()
        self._hold(None)
        self._course, self.target = None, start
        self.began_s = time.monotonic()

    def heard(self, lineage: Lineage, digest: bytes) -> None:
        """A voter's header says the digest of its state."""
        if lineage not in self._said:
            self._said[lineage] = digest
            self._tell()

    def reducing(self) -> None:
        """A reduction begins: the download yields to it."""
        self._no_reduction.clear()
        self._spent_bytes = 0

    def quiet(self) -> None:
        """No reduction is under way any more."""
        self._no_reduction.set()

    def keep(self, kept: Kept) -> None:
        """A round's result."""
        self.quiet()
        self._kept.append(kept)
        if self.lost or len(self._kept) > self._most_kept():
            self._lose("more rounds have gone by than can be kept")
        self._wake.set()

    def _most_kept(self) -> int:
        return max(MOST_KEPT, min(MOST_KEPT_SMALL, SMALL_BYTES // self._keeper.pool().size_bytes))

    def _lose(self, reason: str) -> None:
        """What is here leads nowhere: the next view's start is downloaded."""
        if not self.lost:
            self._losses += 1
            self._on_problem(reason)
        self.lost = True
        self._drop_all()

    def _drop_all(self) -> None:
        self._generation += 1
        self._forget(self._kept)
        for held in self._untold:
            self._keeper.pool().unpin(held.slot)
        self._kept, self._untold = [], []

    def _forget(self, kept: Sequence[Kept]) -> None:
        for one in kept:
            if one.mean is not None:
                self._keeper.pool().unpin(one.mean)

    def _hold(self, held: Held | None) -> None:
        """The newest state that was verified or computed here; its slot is pinned as long as it is that."""
        if held is not None:
            self._keeper.pool().pin(held.slot)
        if self._held is not None:
            self._keeper.pool().unpin(self._held.slot)
        self._held = held

    def close(self) -> None:
        """Of no use any more."""
        self._drop_all()
        self._hold(None)

    # -- the work ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled: download what is wanted, replay what is kept."""
        while True:
            self._wake.clear()
            target = self.target
            if self._held is None and target is not None and not self.lost:
                await self._download(target)
            elif not await self._replay_one():
                await self._wake.wait()

    async def _download(self, target: StateRef) -> None:
        """The target's bytes. Broken off when another one is wanted."""
        waiting = self._view is None
        fetching = asyncio.ensure_future(
            self._keeper.adopt(target, self._donors, give_up_s=GIVE_UP_S, gate=self._gate)
        )
        try:
            while not fetching.done() and self.target is target and not self.lost:
                waking = asyncio.ensure_future(self._wake.wait())
                await asyncio.wait({fetching, waking}, return_when=asyncio.FIRST_COMPLETED)
                waking.cancel()
                if not fetching.done():
                    self._wake.clear()
            if self.target is not target or self.lost:
                return
            held = fetching.result()
        except (AdoptionFailedError, UserError, OSError) as error:
            if self._view is None:  # it was worth a try
                self.lost = True
                return
            if waiting and isinstance(error, AdoptionFailedError):
                return  # most of its time went by before the view, which gives it as much again
            self._failures += 1
            self._lose(str(error))
            if self._failures >= MOST_FAILURES or not isinstance(error, AdoptionFailedError):
                self._on_hopeless(str(error))
            return
        finally:
            if not fetching.done():
                fetching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await fetching
        self._failures = 0
        self._take(self._keeper.named(held, target))

    async def _gate(self, size: int) -> None:
        """Before each range of the download."""
        allowed_bytes = self._keeper.pool().size_bytes * (1 + self._losses) // SHARE
        while self._spent_bytes >= allowed_bytes and not self._no_reduction.is_set():
            await self._no_reduction.wait()
        self._spent_bytes += size

    async def _replay_one(self) -> bool:
        """Do to the held state what the next kept round did; False when there is none, or it is not known enough."""
        held, generation = self._held, self._generation
        if held is None or not self._kept:
            return False
        kept = self._kept[0]
        course = self._course
        if course is None or course.view is not kept.view:
            if held.ref.digest != kept.view.start.digest:
                self._lose(f"state {held.ref.lineage} is not the start of view {kept.view.view_epoch}")
                return False
            course = self._course = self._open(kept.view, held)
        outcome = course.outcome(kept.result)
        self._replaying = self._kept.pop(0)
        slot, anchor_digest = kept.mean or held.slot, held.anchor_digest
        if kept.mean is None:
            self._keeper.pool().pin(slot)
        else:
            coefficients = outer_step(self._keeper.outer, course.tau, kept.result)
            anchor_digest = await self._advanced(held.slot, kept.mean, coefficients)
        self._replaying = None
        if generation != self._generation:
            self._keeper.pool().unpin(slot)
            return True
        course.take(kept.result, outcome)
        digest = state_digest(anchor_digest, outcome.ledger, outcome.tau)
        ref = StateRef(lineage=kept.lineage, digest=digest)
        new = Held(ref=ref, slot=slot, anchor_digest=anchor_digest, ledger=outcome.ledger, tau=outcome.tau)
        self._take(new)
        self._keeper.remember(new)
        return True

    def _take(self, held: Held) -> None:
        """It is held now, and told as soon as a voter confirms it."""
        self._hold(held)
        reach("replayed")
        self._to_tell(held)
        self._tell()

    async def _advanced(self, anchor: Path, mean: Path, coefficients: tuple[float, ...]) -> bytes:
        """As `advance`, on a thread. That one goes on when this is cancelled, and keeps its slots until it ends."""
        slots = self._keeper.pool()
        size = values_of(self._keeper.parameters)
        working = asyncio.ensure_future(asyncio.to_thread(advance, anchor, mean, size, coefficients))
        slots.pin(anchor)
        working.add_done_callback(lambda _: slots.unpin(anchor))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            working.add_done_callback(lambda _: slots.unpin(mean))
            raise

    def _open(self, view: View, held: Held) -> Course:
        payloads = [decode_payload(p) for p in view.payloads]
        ledger = opening_ledger(payloads, held.ledger, skip_lost=self._skip_lost)
        me = view.members.index(self._me)
        work = Work.for_view(view, me, ledger, keep_leases=False)
        return Course(view, me, ledger, work, held.tau, self._policy)

    def _to_tell(self, held: Held) -> None:
        self._keeper.pool().pin(held.slot)
        self._untold.append(held)

    def _tell(self) -> None:
        """Of each held state that the voters' word confirms; none that is older than the newest view's start."""
        view = self._view
        while view is not None and self._untold:
            held = self._untold[0]
            digest = self._said.get(held.ref.lineage)
            if held.ref.lineage >= view.start.lineage and digest is None:
                return
            self._untold.pop(0)
            if digest is not None and digest != held.ref.digest:
                self._lose(f"state {held.ref.lineage} came out differently here")
                self._keeper.pool().unpin(held.slot)
                return
            if digest is not None:
                self._on_held(held)
            self._keeper.pool().unpin(held.slot)


def advance(anchor: Path, mean: Path, size: int, coefficients: tuple[float, ...]) -> bytes:
    """The slot ``mean``, which begins with a round's averaged delta, becomes the state after it; its digest.

    ``anchor``: slot of the state before. ``size``: of the anchor in both, the momentum follows it if there is one.
    ``coefficients``: a `core.outer.OuterStep`, () for plain averaging. Rounded as on every other member
    (`train.outer.advance`).
    """
    before = np.memmap(anchor, dtype="<f4", mode="r")
    after = np.memmap(mean, dtype="<f4", mode="r+")
    if coefficients:
        keep, gain, now, ahead = map(np.float32, coefficients)
        for start in range(0, size, PIECE):
            delta, momentum = after[start : min(start + PIECE, size)], after[size + start :][:PIECE]
            np.multiply(before[size + start :][:PIECE], keep, out=momentum)
            momentum += delta * gain
            delta *= now
            delta += momentum * ahead
    else:
        after[size:] = before[size:]
    np.subtract(before[:size], after[:size], out=after[:size])
    return file_digest(mean)
