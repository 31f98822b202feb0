"""How a run ends on this peer: finished, stopped by agreement, left, refused (DESIGN.md sections 6 and 11)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from p2p_dmc.agent.adoption import AdoptionFailedError
from p2p_dmc.agent.entering import others, speaks_for
from p2p_dmc.agent.roll_call import RollCall
from p2p_dmc.agent.state import Held
from p2p_dmc.core.agreement_messages import StateRef
from p2p_dmc.errors import RemoteProtocolError, UserError
from p2p_dmc.observe.phases import reach
from p2p_dmc.wire import messages
from p2p_dmc.wire import trainer_messages as local

if TYPE_CHECKING:
    from p2p_dmc.agent.run import Run

LAST_ROUND_S = 5.0
"""So long a peer that leaves waits for the end of a round: others may take longer steps, and reduce later."""

LINGER_S = 2.0
"""A peer whose run is over answers the others' last headers for this long, and after a request for its state, too."""
LOOK_S = 0.1
"""While it waits for others that stop, too, it looks so often whether that is over."""
MOST_LINGER_S = 300.0
"""Whoever downloads the final state in that time has it: a peer that was still catching up when the run ended."""


class RunEnd:
    """Closes a run once. ``outcome`` is "" while it goes on."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.outcome = ""
        self.detail = ""
        self.history = b""
        """The founding of which this peer, a newcomer, has taken the end."""
        self.over_s = 0.0
        self.stop_asked = False
        self.done = asyncio.Event()
        self.roll = RollCall(run)
        self._closing = self._stopping = False
        self._ending: asyncio.Task[None] | None = None
        """What the run's end still takes here, once it is agreed."""
        self.leaving = False
        """This peer says no header any more: it would draw the others into a reduction that it breaks."""
        self._round_over = asyncio.Event()

    @property
    def agreed(self) -> bool:
        """The run has ended here as all agreed: no view follows, and what is on disk stays as it is."""
        return self.outcome in ("finished", "stopped")

    @property
    def waits_for(self) -> tuple[str, ...]:
        """For whom the stop of the run waits, by id, perhaps for this peer itself; () while nobody stops it."""
        run, rounds = self._run, self._run.rounds
        if self.outcome:
            return self.roll.awaited
        if self._stopping:
            return (run.me.peer_id,)  # its state is on the way to its disk
        if self.stop_asked and rounds is not None:
            return tuple(member.peer_id for member in rounds.barrier.missing())
        return ()

    def ask_stop(self, reason: str, *, tell: bool) -> None:
        """Agree to stop: the closing flag goes into this peer's next header, and everybody is told to do the same."""
        if self.stop_asked or self.outcome:
            return
        run = self._run
        self.stop_asked = True
        run.event("stop_asked", reason=reason)
        if tell and run.view is not None:
            for member in run.view.members:
                if member != run.me:
                    run.to_member(member.peer_id, messages.StopAsked(reason=reason))
        if run.training is not None:
            run.training.repeat()

    def close(self, finished: bool) -> None:
        """All members' headers agree on the held state: it is committed, and the run ends or pauses with it."""
        training = self._run.training
        if training is not None and not self._closing:
            training.frozen = True
            if finished:
                self._closing = True
                self._ending = self._run.spawn(self._close(training.held))
            else:
                self._begin_stop(training.held)

    def _begin_stop(self, held: Held) -> None:
        """All are to stop at this state: from here on nothing can become of this peer's view but that it is over."""
        self._closing = self._stopping = True
        self.roll.begin()
        self._run.fall_silent()
        self._ending = self._run.spawn(self._stop(held))

    async def settle(self) -> None:
        """How the run ends is agreed, and on its way to the disk here: until it is over, or fails.

        From that instant on it makes no difference to the others, nor to this peer's vote, what becomes of its trainer.
        """
        if self._ending is None or self.outcome:
            return
        over = asyncio.ensure_future(self.done.wait())
        try:
            await asyncio.wait({over, self._ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()

    async def _close(self, held: Held) -> None:
        run = self._run
        await run.checkpoint(held)
        path = ""
        try:
            path = str(await run.keeper.write_final(held))
        except OSError as error:
            run.services.say(
                f"{run.folder / 'final'}: {error.strerror}; the checkpoint has the same parameters"
            )
        self.tell_trainer(held, path)
        self._tell_all(held)
        self.over("finished", path)

    async def _stop(self, held: Held) -> None:
        """The state goes to disk; then the others are told, and this peer waits until all have said the same."""
        run = self._run
        written = await run.checkpoint(held, closed=True)
        refused = self.outcome  # it left meanwhile
        reach("stopped")
        self.roll.stopped(held.ref, on_disk=written and not refused)
        run.to_trainer(local.TrainerStop(reason="the run was stopped"))
        self._tell_all()
        self.over("stopped", "")
        self.roll.look()
        await self.roll.attend()

    def disk_refused(self, error: OSError) -> None:
        """It takes no promise: this peer leaves the run with a word, and the others go on. Or it has stopped anyway."""
        run = self._run
        reason = f"{run.folder}: {error.strerror}; free some disk space"
        if self._stopping:
            run.services.say(reason)
        else:
            run.desk.refuse(f"{reason} and run the command again")

    def _tell_all(self, final: Held | None = None) -> None:
        run = self._run
        peers = {peer.peer_id for peer in others(run.services, run.name)}  # some may stand aside
        peers |= {member.peer_id for member in run.view.members} if run.view is not None else set()
        for peer_id in sorted(peers - {run.me.peer_id}):
            self.tell(peer_id, final)

    async def save_before_leaving(self) -> None:
        """This peer leaves: what is committed by now is on disk, so that its next start goes on from there."""
        run, training = self._run, self._run.training
        if self._stopping and not self.outcome:  # the others wait to hear that its state is on disk
            run.services.say(f"run {run.name!r} is being stopped; leaving once its state is on disk")
            await self.settle()
        if training is None or self._closing or self.outcome:
            return
        alone = len(training.view.members) == 1  # then whatever it completed is committed
        held = run.keeper.by_lineage(training.held.ref.lineage if alone else training.committed_round)
        if held is not None and held.ref.lineage > (0, 0):
            await run.checkpoint(held)

    async def leave_between_rounds(self) -> None:
        """This peer leaves: the round whose header it has said ends first, so that nobody has to reduce it again."""
        training = self._run.training
        self.leaving = True
        if training is None or training.frozen or training.barrier.own is None or self._closing:
            return
        reach("leaving")
        self._round_over.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._round_over.wait(), LAST_ROUND_S)

    def round_over(self) -> None:
        """The round is complete here, or never will be."""
        self._round_over.set()

    def linger_s(self, now_s: float) -> float:
        """How much longer this peer stays for the others' sake, in seconds; ``now_s`` is monotonic."""
        if self.roll.attending:
            return LOOK_S
        if self.outcome == "stopped" and self.leaving:
            return 0.0
        last_s = max(self.over_s, self._run.keeper.last_request_s, self.roll.last_word_s)
        return min(last_s + LINGER_S, self.over_s + MOST_LINGER_S) - now_s

    def tell_trainer(self, held: Held, final_path: str) -> None:
        """The run is finished with this state. Said again to a trainer that was started anew meanwhile."""
        self._run.to_trainer(
            local.RunFinished(slot_path=str(held.slot), digest=held.anchor_digest, final_path=final_path)
        )

    def tell(self, peer_id: str, final: Held | None = None) -> None:
        """Say to a member, or to somebody who asks to join, how the run ended; ``final``: it is finished with that."""
        held = final or self._run.keeper.current
        if not self.roll.tell(peer_id) and held is not None:
            closed = messages.RunClosed(
                lineage=held.ref.lineage,
                digest=held.ref.digest,
                finished=final is not None or self.outcome == "finished",
                history=self._run.history,
                view_id=b"",
                answer=False,
            )
            self._run.to_member(peer_id, closed)

    def closed_elsewhere(self, sender: str, closed: messages.RunClosed) -> None:
        """Another peer ended the run at this state; RemoteProtocolError when it can be none, or is not its to say."""
        run, held = self._run, self._run.keeper.current
        try:
            ref = StateRef(lineage=closed.lineage, digest=closed.digest)
        except ValueError as error:
            raise RemoteProtocolError(f"a run closed at no state: {error}") from None
        if not closed.finished:
            self.roll.note(sender, closed)
        if self.outcome or self._closing or run.keeper.slots is None:
            return
        if closed.finished:
            if not speaks_for(run, sender, closed.history):
                raise RemoteProtocolError("a run finished, says one that is in no founding of it known here")
            # lineages of two foundings say nothing of each other
            if held is None or not run.history or held.ref.lineage <= closed.lineage:
                self._closing = True
                self._ending = run.spawn(self._adopt_end(sender, ref, closed.history))
        elif held is not None and held.ref == ref and run.agreement is not None and self._stops_with(sender):
            self._begin_stop(held)
        # else it was not at the barrier, or has just been started again: it resumes with the others

    def _stops_with(self, sender: str) -> bool:
        """A member of its view: one that was counted out, stopped where this view began, and is back, ends nothing."""
        return self._run.view is not None and sender in self._run.view.peers

    async def _adopt_end(self, sender: str, ref: StateRef, history: bytes) -> None:
        run = self._run
        record = run.services.record(sender)
        addresses = [record.bulk_address] if record else []
        try:
            held = await run.keeper.adopt(ref, lambda: addresses, give_up_s=30.0)
            if not held.ledger.done:
                raise AdoptionFailedError("the run is not finished with this state: samples are left")
        except (AdoptionFailedError, UserError, OSError) as error:
            run.event("adoption_failed", reason=str(error))
            self._closing = False
            return
        except Exception:
            self._closing = False  # the next word is heard, whatever was wrong with this one
            raise
        self.history = run.keeper.history = history
        await self._close(run.keeper.make_current(ref))

    def over(self, outcome: str, detail: str) -> None:
        """The run is over here."""
        if self.outcome:
            return
        self.outcome, self.detail = outcome, detail
        self.round_over()
        self._run.views.stop_learning()
        self.over_s = time.monotonic()
        self._run.event("run_over", outcome=outcome, detail=detail)
        self._run.services.meta_changed()
        self.done.set()
        self._run.services.run_over(self._run.name)
