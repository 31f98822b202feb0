"""Agreement: who synchronises with whom, from which state (DESIGN section 6).

A state machine without I/O. One mechanism serves every change of the view: a peer that sees cause asks the
others for theirs (`Cause`); with a majority's it freezes and proposes (`Propose`); proposals grow by union
until all candidates said the same sets; then everybody installs the view that these words add up to, or waits
because the candidates are no quorum. `Ready` says what to do after each event, in which order.

This file is the face that the shell sees; `agreement_machine.py` has the transitions, `quorum.py` decides.
"""

from __future__ import annotations

from p2p_dmc.core.agreement_machine import AgreementMachine
from p2p_dmc.core.agreement_messages import (
    REPLACED_MAX,
    AgreementMessage,
    Cause,
    GivenUp,
    Lineage,
    MemberId,
    Promised,
    Propose,
    Ready,
    StateRef,
    Stopped,
    Surpassed,
    Verdict,
    Withdrawal,
)

IDLE_MS = 60_000
"""How far off the next deadline is when nothing is going on."""


class Agreement(AgreementMachine):
    """One peer's part. Event methods return a `Ready`; time is in milliseconds and never runs backwards."""

    # -- what the shell may ask ------------------------------------------------------------------

    @property
    def change_wanted(self) -> bool:
        """Goes into the next header: with it set in any header, everybody calls `at_barrier`."""
        if self.view is None or self._now < self._not_before_ms:
            return False
        return bool(self._wanted or self._joiners() or self._cause(self.view) or self.caught_up)

    @property
    def caught_up(self) -> bool:
        """A learner that holds a state of its view now: the next view makes it a voter."""
        return self.view is not None and self.me not in self.view.voters and not self.behind

    def waiting_for(self) -> str | None:
        """Why no round can be had, in plain words; None if nothing is in the way."""
        if self._withdrawn:
            return "this peer takes no part for now"
        if self.left_out and self._last is not None and all(self._lost(v) for v in self._last.voters):
            trained = ", ".join(self._last.ref.peers)
            return f"whoever trained in view {self._last.view_epoch} is gone; waiting for {trained}"
        if self.left_out:
            return "a later view stands without this peer; it asks to join"
        if self._attempt is not None:
            unheard = self._attempt.unheard()
            if unheard:
                return f"attempt {self._attempt.n} waits for the answer of {', '.join(unheard)}"
            return self._decision.describe() if self._decision is not None else None
        if self.view is None:
            return "no view has been proposed yet"
        gone = [member.peer_id for member in self.view.members if self._lost(member)]
        if not gone:
            return None
        here = len(self.view.members) - len(gone)
        name = f"view {self.view.view_epoch}"
        return f"{here} of {len(self.view.members)} members of {name} answer; waiting for {', '.join(gone)}"

    @property
    def awaited(self) -> tuple[str, ...]:
        """Peers without which no round can be had: until they are back, or evicted."""
        if self.left_out:
            return ()
        if self._attempt is not None:
            decision = self._decision
            return decision.awaited if decision is not None else ()
        if self.view is None or self._enough_causes(self.view):
            return ()
        return tuple(member.peer_id for member in self.view.voters if self._lost(member))

    @property
    def cut_off_from(self) -> tuple[str, ...]:
        """Members of whom this peer alone has long heard nothing: it had better stand aside.

        Somebody has installed the view that this peer still waits for, so it has heard everybody: only the ways between
        this peer and those that it misses are broken. No round can be had with both of two such, and all would wait.
        Of two the greater gives way first, and whoever misses several before those that miss only it; the other one if
        that does not help (it need not miss anybody: a way may be broken in one direction). Nobody gives way without
        whom the others would be too few.
        """
        attempt = self._attempt
        if attempt is None or self.left_out or self.me.peer_id not in attempt.voters:
            return ()
        missed = tuple(attempt.unheard())
        heard_all = any(word.installed and word.sets == attempt.sets for word in attempt.words.values())
        if not missed or not heard_all or not self._enough_without_me():
            return ()
        since_ms = max(self._waits_since_ms, *(self._heard_ms.get(peer, 0) for peer in missed))
        first = self.me.peer_id > max(missed)
        patience_ms = self._settings.link_patience_ms * (2 if first else 3) // (2 * len(missed))
        return missed if self._now - since_ms >= patience_ms else ()

    @property
    def evicted(self) -> tuple[str, ...]:
        """Those of whom an operator said, since the last view, that they are gone for good; sorted."""
        return tuple(sorted(self._evicted))

    def next_deadline_ms(self, now_ms: int) -> int:
        """When `tick` has something to do."""
        deadlines = [now_ms + IDLE_MS]
        attempt = self._attempt
        if attempt is not None and not self.left_out:
            deadlines += [attempt.resend_at_ms, attempt.replace_at_ms]
            deadlines += [
                attempt.since_ms[peer] + self._settings.join_patience_ms for peer in self._may_drop(attempt)
            ]
        elif self.view is not None and self._cause(self.view) is not None:
            deadlines.append(max(self._pause_end_ms(self.view), self._cause_resend_ms))
        if self.view is not None and self.behind and self.me in self.view.voters:
            deadlines.append(self._word_resend_ms)
        return max(now_ms + 1, min(deadlines))

    # -- events ----------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> Ready:
        """Time passed."""
        self._begin(now_ms)
        return self._finish()

    def receive(self, message: AgreementMessage, now_ms: int) -> Ready:
        """A message of another peer."""
        self._begin(now_ms)
        if not isinstance(message, Withdrawal):
            self._heard_ms[message.sender.peer_id] = self._now
        match message:
            case Propose():
                self._on_propose(message)
            case Cause():
                self._on_cause(message)
            case Promised():
                if self._fenced(message.sender, message.history):
                    self._book.hear_promises(message)
            case Surpassed():
                self._on_surpassed(message)
            case Withdrawal():
                if self._fenced(message.stopped.member, message.history):
                    self._on_withdrawn(message.stopped)
        return self._finish()

    def found(self, peers: tuple[str, ...], now_ms: int) -> Ready:
        """The shell found it in order to found the run, or reopen it, with these reachable peers.

        Refused for a newcomer that was asked to join a history: whoever has been in that reopens it.
        """
        self._begin(now_ms)
        if self._withdrawn or self.view is not None or self._courted:
            self._accepted = False
        elif self._attempt is None or self.left_out:
            self._open(self._n + 1, peers, (), (self.me.peer_id,), "founding or reopening")
        elif self._attempt.grow(peers, (), (self.me.peer_id,), (), self._now):
            self._say(self._attempt, "more peers to found with")
        return self._finish()

    def join_requested(self, peer_id: str, now_ms: int) -> Ready:
        """A ready peer outside the view asks to join; it repeats that until it is in."""
        self._begin(now_ms)
        if peer_id != self.me.peer_id:
            self._book.joiners[peer_id] = now_ms
            self._book.away.discard(self._book.member(peer_id))
            settled = self._now - self._installed_ms > self._settings.join_ttl_ms
            if self.view is not None and peer_id in self.view.peers and settled:
                if peer_id not in self._strays:  # perhaps it does not hear one of the others
                    self._blame(learner for learner in self.view.learners if learner.peer_id == peer_id)
                self._strays.add(peer_id)
        return self._finish()

    def verdict(self, peer_id: str, boot: int, state: Verdict, now_ms: int, *, version: int = 0) -> Ready:
        """Membership's word about one incarnation.

        Args:
            version: for CRASHED, the `promise_version` that its last sign of life carried: until promises as new
                as that are here the crash is only a death. 0: it carried none.
        """
        self._begin(now_ms)
        if peer_id != self.me.peer_id:
            if self._book.judge(MemberId(peer_id=peer_id, boot=boot), state, version):
                self._hasten()
            if state is not Verdict.REACHABLE:
                self._book.joiners.pop(peer_id, None)
        return self._finish()

    def withdrawn(self, stopped: Stopped, now_ms: int) -> Ready:
        """A graceful leave, or a lost trainer, said by that agent itself."""
        self._begin(now_ms)
        if stopped.member.peer_id != self.me.peer_id:
            self._on_withdrawn(stopped)
        return self._finish()

    def withdraw(self) -> Stopped:
        """Take no part until `rejoin`. Tell the others what is returned: they go on without these votes.

        Of what it has said alone before its first view they need not know: it never entered that, and will not.
        """
        self._freeze()
        if self._last is None:
            self._pending = {view for view in self._pending if view.members != (self.me,)}
        self._attempt, self._withdrawn = None, True
        self._vote_floor = self._n
        return self._farewell()

    def rejoin(self, now_ms: int) -> Ready:
        """The trainer is back. The memory is whole, but the votes given up stay given up."""
        self._begin(now_ms)
        if self._withdrawn:
            self._withdrawn = False
            self._book.promised.clear()
            if self._last is not None and not self.left_out:
                self._open(self._n + 1, (), (), (), "back again")
        return self._finish()

    def evict(self, peer_id: str, now_ms: int) -> Ready:
        """An operator says that this peer is gone for good. Refused for one that is not waited for.

        Once all that are waited for are evicted, the others go on under a new history: the evicted one, and whoever
        else is still in the old one, has to give that up.
        """
        self._begin(now_ms)
        if peer_id in self.awaited:
            self._evicted.add(peer_id)
            self._hasten()
        else:
            self._accepted = False
        return self._finish()

    def wants_change(self, reason: str, now_ms: int, *, at_once: bool) -> Ready:
        """This peer wants another view: at the next barrier, or at once (a collective failed)."""
        self._begin(now_ms)
        if at_once and self.view is not None:
            if self._wanted_at_once is None:
                self._blame(self.view.learners)
            self._wanted_at_once = reason
        elif not at_once:
            self._wanted = reason
        else:
            self._accepted = False
        return self._finish()

    def at_barrier(self, now_ms: int) -> Ready:
        """All members stand at a header barrier and one wants a change: every voter proposes."""
        self._begin(now_ms)
        if self.view is None or self.me not in self.view.voters:
            self._accepted = False
        else:
            self._open(self._n + 1, self._joiners(), (), (), "agreed at the barrier")
        return self._finish()

    def complete(self, state: StateRef, now_ms: int) -> Ready:
        """Record a round's result. Refused when frozen, behind, or when it is not the view's next round.

        Nothing is proposed in the same breath: what a proposal says of this peer's work has to know the round.
        """
        self._begin(now_ms)
        view = self.view
        expected = None if view is None else (view.view_epoch, self.completed.lineage[1] + 1)
        if view is None or self.behind or state.lineage != expected:
            self._accepted = False
            self._note(f"round {state.lineage} is refused: expected {expected}, frozen {self.frozen}")
            return self._finish()
        self.completed = state
        for learner in view.learners:
            self._failures.pop(learner.peer_id, None)
        self._known = view.ref
        if self._base != view.ref:
            self._base = view.ref
            self._promise_to(view.peers)
        return self._ready()

    def foreign_header(self, peer_id: str, view_epoch: int, now_ms: int) -> Ready:
        """A peer's header (or any word of a round) names another view than the one that stands here.

        Whichever of the two is behind learns it: nobody waits at the barrier of a view that others have left.
        """
        self._begin(now_ms)
        if self.view is None:
            self._accepted = False
        elif view_epoch > self.view.view_epoch:
            message = Cause(history=self.history, view_epoch=self.view.view_epoch, sender=self.me)
            self._send(peer_id, message)
        else:
            self._send(peer_id, self._said)
        return self._finish()

    def committed(self, lineage: Lineage) -> None:
        """Every member of the view is known to hold it."""
        self.committed_lineage = max(self.committed_lineage, lineage)

    def adopted(self, state: StateRef, now_ms: int) -> Ready:
        """The view's start state, or a newer one of this view (a learner's), is held and verified.

        A learner says so once a reduction with it has gone well: as a voter it would stop the others where none does.

        Refused while frozen, for what was said is final; then it is said in the next attempt (keep it).
        """
        self._begin(now_ms)
        view = self.view
        if view is None:
            self._accepted = False
            newest, last = self._late or self.completed, self._last
            if last is not None and last.view_epoch >= state.lineage[0] and state.lineage > newest.lineage:
                self._late = state
                self._hasten()
        elif self.behind and (state == view.start or state.lineage[0] == view.view_epoch):
            self._adopt(state, view)
        else:
            self._accepted = False
        return self._finish()

    def checkpointed(self, lineage: Lineage, now_ms: int) -> Ready:
        """A checkpoint of this committed state is on disk.

        The base moves on disk only together with a checkpoint from that view, and pending views up to it go.
        """
        self._begin(now_ms)
        if self._known is not None and lineage[0] == self._known.view_epoch:
            self._disk_known, self._persist = self._known, True
        if self._base is not None and lineage[0] == self._base.view_epoch:
            self._disk_base, self._persist = self._base, True
            self._pending = {view for view in self._pending if view.view_epoch > lineage[0]}
            self._prune()
        return self._finish()

    def established(self, view_epoch: int) -> None:
        """The first headers of all members of this view are in: everybody has installed it."""
        if self.view is not None and self.view.view_epoch == view_epoch:
            self._raises = 0

    def yield_history(self, completed: StateRef, now_ms: int) -> Ready:
        """Give up this peer's history for another one: from here on it is a newcomer with that state.

        Should it ever be let into the old one again, it is as one that withdrew and came back: its votes there stay
        given up, and it says what it promised there. Without that, two sides of the old one could go on: one with the
        vote of this peer as it was, one in a view that it helped to agree on since.
        """
        self._begin(now_ms)
        self._freeze()
        promised = {*self._pending, *([self._base] if self._base is not None else [])}
        former = GivenUp(history=self._bound_to, pending=tuple(sorted(promised)))
        self._given_up = (former, *self._given_up)[:REPLACED_MAX]
        self._vote_floor = self._n
        self._attempt, self._last, self._late = None, None, None
        self.history, self._courted, self.completed, self.left_out = b"", b"", completed, True
        self._replaced = ()
        self._evicted.clear()
        self._base = self._known = self._disk_base = self._disk_known = None
        self._pending.clear()
        self.committed_lineage, self.behind, self._persist = (0, 0), False, True
        return self._finish()

    def court_another(self, history: bytes, now_ms: int) -> Ready:
        """This newcomer is to join that history, which lives, and not the one it was asked to join, which nobody here
        continues. Refused for one that has been in a view.

        What it says in an attempt as a newcomer counts as no vote of the history that courts it: it votes neither
        there (`_may_vote`) nor in a founding beside it. A set without it binds its voters, who know of it, and is
        forgotten here. But a set in which it is a voter somebody may have installed: who founded with it before
        it was courted, or took it for the member that it was before it lost its disk. Such a set stays promised,
        in whatever history: whoever lets this peer in counts it.
        """
        self._begin(now_ms)
        if self._courted in (b"", history):
            self._accepted = False
        else:
            self._note(
                f"was asked to join {self._courted.hex()}, of which nobody is here; joins {history.hex()}"
            )
            self._courted, self._attempt, self._persist = history, None, True
            self._pending = {view for view in self._pending if self.me.peer_id in view.peers}
        return self._finish()

    def check_invariants(self) -> None:
        """Raise AssertionError, with both values, if this peer contradicts itself."""
        view = self.view
        assert self._n >= self._floor, f"said {self._n} after {self._floor} was on disk"
        assert (view is None) == (self._word is None), f"of view {view} this was said: {self._word}"
        assert not (self.history and self._courted), f"in {self.history!r}, and courted by {self._courted!r}"
        assert not self._withdrawn or (view is None and self._attempt is None), "withdrawn, and takes part"
        if view is not None:
            assert view.view_epoch == self._n, f"view {view.view_epoch} stands, but {self._n} was said"
            assert self.me in view.members, f"{self.me} is not in its own view {view.members}"
            assert view.ref in self._pending or self._disk_base == view.ref, (
                "the standing view was not promised"
            )
            assert self._attempt is None, "an attempt under way beside a standing view"
        for pending in self._pending:
            assert pending.view_epoch <= self._n, f"pending view {pending.view_epoch} above n {self._n}"
        assert self._late is None or self._late.lineage > self.completed.lineage, "late, and not newer"
        if self._base is not None:
            assert self.completed.lineage[0] >= self._base.view_epoch, "completed is older than the base"
        if self._attempt is not None:
            assert self._attempt.n == self._n, f"attempt {self._attempt.n} while {self._n} was said"
