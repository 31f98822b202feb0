"""How a run ends on this peer: finished, stopped by agreement, left, refused (DESIGN.md sections 6 and 11)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from p2p_dmc.agent.adoption import AdoptionFailedError
from p2p_dmc.agent.entering import others
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
MOST_LINGER_S = 300.0
"""Whoever downloads the final state in that time has it: a peer that was still catching up when the run ended."""


class RunEnd:
    """Closes a run once. ``outcome`` is "" while it goes on."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.outcome = ""
        self.detail = ""
        self.over_s = 0.0
        self.stop_asked = False
        self.done = asyncio.Event()
        self._closing = False
        self.leaving = False
        """This peer says no header any more: it would draw the others into a reduction that it breaks."""
        self._round_over = asyncio.Event()

    @property
    def agreed(self) -> bool:
        """The run has ended here as all agreed: no view follows, and what is on disk stays as it is."""
        return self.outcome in ("finished", "stopped")

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
            self._closing = True
            training.frozen = True
            self._run.spawn(self._close(training.held, finished))

    async def _close(self, held: Held, finished: bool) -> None:
        run = self._run
        written = await run.checkpoint(held, closed=not finished)
        path = ""
        if finished:
            try:
                path = str(await run.keeper.write_final(held))
            except OSError as error:
                run.services.say(
                    f"{run.folder / 'final'}: {error.strerror}; the checkpoint has the same parameters"
                )
            self.tell_trainer(held, path)
        else:
            if (
                written
            ):  # without the state on disk this peer has no memory of it, and no vote, at the next start
                run.save_closed()
            run.to_trainer(local.TrainerStop(reason="the run was stopped"))
        peers = {peer.peer_id for peer in others(run.services, run.name)}  # some may stand aside
        peers |= {member.peer_id for member in run.view.members} if run.view is not None else set()
        for peer_id in sorted(peers - {run.me.peer_id}):
            self.tell(peer_id, held, finished)
        self.over("finished" if finished else "stopped", path)

    async def save_before_leaving(self) -> None:
        """This peer leaves: what is committed by now is on disk, so that its next start goes on from there."""
        run, training = self._run, self._run.training
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
        last_s = max(self.over_s, self._run.keeper.last_request_s)
        return min(last_s + LINGER_S, self.over_s + MOST_LINGER_S) - now_s

    def tell_trainer(self, held: Held, final_path: str) -> None:
        """The run is finished with this state. Said again to a trainer that was started anew meanwhile."""
        self._run.to_trainer(
            local.RunFinished(slot_path=str(held.slot), digest=held.anchor_digest, final_path=final_path)
        )

    def tell(self, peer_id: str, held: Held | None = None, finished: bool | None = None) -> None:
        """Say to a member, or to somebody who asks to join, how the run ended."""
        held = held or self._run.keeper.current
        if held is not None:
            closed = messages.RunClosed(
                lineage=held.ref.lineage,
                digest=held.ref.digest,
                finished=self.outcome == "finished" if finished is None else finished,
            )
            self._run.to_member(peer_id, closed)

    def closed_elsewhere(self, sender: str, closed: messages.RunClosed) -> None:
        """Another peer ended the run at this state; RemoteProtocolError when it can be none."""
        run = self._run
        if self.outcome or self._closing or run.keeper.slots is None:
            return
        held = run.keeper.current
        try:
            ref = StateRef(lineage=closed.lineage, digest=closed.digest)
        except ValueError as error:
            raise RemoteProtocolError(f"a run closed at no state: {error}") from None
        if held is not None and held.ref.lineage > closed.lineage:
            return
        if not closed.finished and (held is None or held.ref != ref):
            return  # stopping is agreed at a barrier; whoever was not there resumes with the others
        self._closing = True
        run.spawn(self._adopt_end(sender, ref, closed.finished))

    async def _adopt_end(self, sender: str, ref: StateRef, finished: bool) -> None:
        run = self._run
        record = run.services.record(sender)
        addresses = [record.bulk_address] if record else []
        try:
            await run.keeper.adopt(ref, lambda: addresses, give_up_s=30.0)
        except (AdoptionFailedError, UserError, OSError) as error:
            run.event("adoption_failed", reason=str(error))
            self._closing = False
            return
        await self._close(run.keeper.make_current(ref), finished)

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
