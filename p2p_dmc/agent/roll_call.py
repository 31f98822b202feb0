"""Who has stopped, when a run is stopped by agreement: what a peer's vote at its next start hangs on (DESIGN.md 6)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from p2p_dmc.agent.entering import others
from p2p_dmc.agent.waiting import called
from p2p_dmc.core.agreement_messages import MemberId, StateRef
from p2p_dmc.wire.messages import RunClosed, RunMeta

if TYPE_CHECKING:
    from p2p_dmc.agent.run import Run

REPEAT_S = 0.25
"""Whoever has not been heard is told again so often, and asked for an answer."""
SAY_AFTER_S = 2.0
MOST_S = 300.0
"""So long this peer waits for the others: one may have to write its state to a slow disk."""
NEWS_S = 10.0
"""What a peer says of itself through membership may be older than its last header, but not by that much."""
MAX_SENDERS = 4096


class RollCall:
    """Of the voters of the view in which this peer stopped: who was heard to have stopped in it, at the same state.

    Whoever says so is deaf to agreement for the rest of its life, and has never said a set beyond that view. Once all
    are heard nobody is left who could take one of them, whose port refuses by then, for crashed, and go on without it.
    Before that a vote that is kept may be one that was counted out. A disk that does not take what its peer ended with
    makes no difference to the others: that one's next life is somebody else, who has no vote in this view.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._heard: dict[str, RunClosed] = {}
        """What each peer said last; also before this one has stopped."""
        self._withdrawn: set[str] = set()
        """Since this peer began to stop."""
        self._own: RunClosed | None = None
        """What this peer says once it has stopped."""
        self._on_disk = False
        """What it says so of."""
        self._voters: tuple[MemberId, ...] = ()
        """The others of its view."""
        self._boots: dict[str, int] = {}
        """Of the others' agents, when this peer began to stop."""
        self._gave_up_n = 0
        """This peer has withdrawn from the views up to this one: others may have counted it out since."""
        self._since_s = 0.0
        self.last_word_s = 0.0
        """When somebody last asked for an answer, or the last one was heard, in monotonic seconds."""
        self.kept = False
        """All were heard, and the record says so."""
        self.attending = False
        """Some may yet be heard."""

    # -- what is said and heard -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """This peer begins to stop: its state is on the way to its disk."""
        view, records = self._run.view, self._run.services.members()
        assert view is not None, "whoever stops is in a view"
        self._voters = tuple(voter for voter in view.voters if voter != self._run.me)
        self._boots = {record.peer_id: record.boot for record in records}
        self._withdrawn.clear()

    def stopped(self, ref: StateRef, *, on_disk: bool) -> None:
        """This peer has stopped at that state. ``on_disk``: at its next start it remembers that."""
        view = self._run.view
        assert view is not None, "whoever stops is in a view"
        votes = self._run.me in view.voters and view.view_epoch > self._gave_up_n
        # somebody may have installed a later view, if this peer has said a set for it
        beyond = any(said.view_epoch > view.view_epoch for said in self._run.promises.pending)
        deaf = votes and not beyond
        self._on_disk = on_disk
        self._own = RunClosed(
            lineage=ref.lineage,
            digest=ref.digest,
            finished=False,
            history=self._run.history,
            view_id=view.view_id if deaf else b"",
            answer=False,
        )
        self._since_s = time.monotonic()

    def tell(self, peer_id: str) -> bool:
        """Say that this peer has stopped, if it has, and ask whoever has not been heard for an answer."""
        if self._own is None:
            return False
        answer = any(voter.peer_id == peer_id for voter in self.missing())
        self._run.to_member(peer_id, replace(self._own, answer=answer))
        return True

    def note(self, sender: str, closed: RunClosed) -> None:
        """A peer says that it has stopped."""
        if sender in self._heard or len(self._heard) < MAX_SENDERS:
            self._heard[sender] = closed
        if self._own is not None and closed.answer:
            self.last_word_s = time.monotonic()
            self._run.to_member(sender, replace(self._own, answer=False))
        self.look()

    def gave_up(self, n: int) -> None:
        """This peer tells everybody that its votes in the views up to this one count no more."""
        self._gave_up_n = n

    def withdrawn(self, sender: str) -> None:
        """A peer takes no part any more."""
        if any(voter.peer_id == sender for voter in self._voters):
            self._withdrawn.add(sender)

    # -- what follows from it ---------------------------------------------------------------------------------------

    def look(self) -> None:
        """Keep the vote if all have been heard, and this peer remembers at its next start what it ended with."""
        heard = self._own is not None and self._own.view_id and not self.missing()
        if heard and self._on_disk and not self.kept:
            self.kept = self._on_disk = self._run.save_closed()

    def missing(self) -> tuple[MemberId, ...]:
        """The other voters that were not heard to have stopped in this peer's view at its state."""
        return tuple(v for v in self._voters if not self._at_my_state(v) or not self._in_my_view(v))

    @property
    def awaited(self) -> tuple[str, ...]:
        """For whose word this peer waits, by id."""
        return tuple(voter.peer_id for voter in self._awaited()) if self.attending else ()

    @property
    def unheard(self) -> tuple[str, ...]:
        """Whose word has not come, by id: with them all peers of the last view are needed to go on."""
        counts = self._own is not None and bool(self._own.view_id)
        return tuple(voter.peer_id for voter in self.missing()) if counts else ()

    def _awaited(self) -> tuple[MemberId, ...]:
        """Of the missing those that may yet say so: not the dead, nor those that go on or have stopped otherwise."""
        run, own, waited_s = self._run, self._own, time.monotonic() - self._since_s
        if own is None or not own.view_id or run.end.leaving or waited_s > MOST_S:
            return ()
        here = {other.peer_id: other.meta for other in others(run.services, run.name)}
        return tuple(
            voter
            for voter in self.missing()
            if voter.peer_id in here
            and not self._goes_on(voter, here[voter.peer_id], waited_s)
            and voter.peer_id not in self._withdrawn
            and not self._at_my_state(voter)
            and not self._stopped_later(voter)
        )

    def _goes_on(self, voter: MemberId, meta: RunMeta, waited_s: float) -> bool:
        """It has been started anew, is in a later view, or in none and wants to be."""
        view, record = self._run.view, self._run.services.record(voter.peer_id)
        anew = record is not None and record.boot > self._boots.get(voter.peer_id, record.boot)
        later = view is not None and meta.view_epoch > view.view_epoch
        outside = meta.ready and not meta.view_epoch and waited_s > NEWS_S
        return anew or later or outside or meta.boot > voter.boot

    def _stopped_later(self, voter: MemberId) -> bool:
        """It went on in another view, and has stopped there. An earlier word is one of a former stop."""
        own, heard = self._own, self._heard.get(voter.peer_id)
        return own is not None and heard is not None and heard.lineage > own.lineage

    def _at_my_state(self, voter: MemberId) -> bool:
        own, heard = self._own, self._heard.get(voter.peer_id)
        at = (heard.lineage, heard.digest) if heard is not None else None
        return own is not None and at == (own.lineage, own.digest)

    def _in_my_view(self, voter: MemberId) -> bool:
        heard = self._heard.get(voter.peer_id)
        return self._own is not None and heard is not None and heard.view_id == self._own.view_id

    async def attend(self) -> None:
        """Wait until all have been heard or will not be any more; say for whom, and what is not so in the end."""
        run, said, self.attending = self._run, False, True
        try:
            while awaited := self._awaited():
                for voter in awaited:
                    self.tell(voter.peer_id)
                if not said and time.monotonic() - self._since_s > SAY_AFTER_S:
                    said = True
                    run.services.say(
                        f"run {run.name!r} is stopped here; waiting for word that {self._names(awaited)} "
                        "stopped, too (Ctrl-C ends the wait)"
                    )
                await asyncio.sleep(REPEAT_S)
            missing = self.missing()
            run.event("roll_call", kept=self.kept, missing=[voter.peer_id for voter in missing])
            if not self.kept and run.view is not None and run.me in run.view.voters:
                run.services.say(f"run {run.name!r}: {self._why_not(missing)}")
        finally:
            self.attending, self.last_word_s = False, time.monotonic()

    def _why_not(self, missing: Sequence[MemberId]) -> str:
        """Why this peer has no vote at its next start, and what that means."""
        if self._own is None or not self._own.view_id:
            return "this peer could not keep its vote; all peers of the last view are needed to go on"
        if missing:
            unheard = f"no word came that {self._names(missing)} stopped at the same round"
            return f"{unheard}; all peers of the last view are needed to go on"
        return (
            "what it ended with is not on this peer's disk: at its next start it has no vote, and takes the state from "
            "the others"
        )

    def _names(self, voters: Sequence[MemberId]) -> str:
        return ", ".join(called(self._run, voter.peer_id) for voter in voters)
