"""What one peer knows and has promised in agreement, and the questions that its transitions ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from p2p_dmc.core.agreement_attempt import Attempt, PeerBook
from p2p_dmc.core.agreement_messages import (
    UNKNOWN_BOOT,
    AgreementMessage,
    AgreementSettings,
    Lineage,
    MemberId,
    Promised,
    Promises,
    Propose,
    StateRef,
    Stopped,
    View,
    ViewRef,
)
from p2p_dmc.core.quorum import Decision, Quorum

if TYPE_CHECKING:
    import random


class AgreementState:
    """State and transitions of one peer.

    Invariant: while a view stands, its epoch is the greatest n this peer has said.
    Invariant: `completed` does not change from the first word of an attempt until a view is installed.
    """

    def __init__(
        self,
        *,
        me: MemberId,
        quorum: Quorum,
        promises: Promises,
        completed: StateRef,
        payload: Callable[[], bytes],
        rng: random.Random,
        settings: AgreementSettings,
        now_ms: int,
    ) -> None:
        self.me = me
        self.view: View | None = None
        self.left_out = False
        """A later view stands without this peer: it has to ask to join."""
        self.completed = completed
        self.committed_lineage: Lineage = (0, 0)
        self.history = promises.history
        """Of the views this peer has been in; empty for a newcomer."""
        self._courted = promises.courted
        self._replaced = promises.replaced
        self._given_up = promises.given_up
        self._evicted: set[str] = set()
        """Said by an operator, here or elsewhere, to be gone for good; forgotten with the next view."""
        self.promise_version = promises.version
        """Grows with what this peer promised; every sign of life carries it."""
        self._quorum, self._payload, self._rng, self._settings = quorum, payload, rng, settings
        self._n = self._floor = promises.n
        self._base = self._disk_base = promises.base
        self._known = self._disk_known = promises.known
        self._pending = set(promises.pending)
        self._vote_floor = 0
        self._last: View | None = None
        """The view last installed in this life."""
        self.behind = False
        """The view's start state is not adopted yet: no round can be completed here. A learner begins so."""
        self._late: StateRef | None = None
        """Adopted while frozen: said in the next attempt. Invariant: newer than `completed`."""
        self._withdrawn = False
        self._book = PeerBook()
        self._attempt: Attempt | None = None
        self._word: Propose | None = None
        """What this peer said of the standing view. Invariant: there exactly while one stands."""
        self._decision: Decision | None = None
        self._now = now_ms
        self._installed_ms = now_ms
        self._start_books(now_ms)

    def _start_books(self, now_ms: int) -> None:
        self._wanted: str | None = None
        self._wanted_at_once: str | None = None
        self._failures: dict[str, int] = {}
        """Of each learner: views in a row that failed with it: a reduction did, or it could not enter. Perhaps some
        other member cannot reach it, or is not heard by it."""
        self._shunned_ms: dict[str, int] = {}
        """Learners that are not let in before then."""
        self._strays: set[str] = set()
        """Members of the standing view that can no longer enter it."""
        self._causes: dict[MemberId, int] = {}
        """When each member of the standing view last saw cause to leave it."""
        self._cause_resend_ms = now_ms
        self._word_resend_ms = now_ms
        self._heard_ms: dict[str, int] = {}
        """When a word, cause or promise of each peer last came, since the last view was installed."""
        self._waits_since_ms = now_ms
        """When the first attempt since the last view began."""
        self._last_open_ms = now_ms - self._settings.calm_ms
        self._not_before_ms = now_ms
        self._strikes = self._raises = 0
        self._persist = self._froze = False
        self._accepted = True
        self._sends: list[tuple[str, AgreementMessage]] = []
        self._trace: list[str] = []
        self._installed: View | None = None

    # -- one event -------------------------------------------------------------------------------

    def _begin(self, now_ms: int) -> None:
        self._now = max(self._now, now_ms)
        self._persist = self._froze = False
        self._accepted = True
        self._sends, self._trace, self._installed = [], [], None

    def _send(self, peer_id: str, message: AgreementMessage) -> None:
        if peer_id != self.me.peer_id:
            self._sends.append((peer_id, message))

    def _note(self, line: str) -> None:
        self._trace.append(line)

    @property
    def promises(self) -> Promises:
        """What is on disk, or must be before anything is sent."""
        return Promises(
            n=self._n,
            history=self.history,
            base=self._disk_base,
            known=self._disk_known,
            pending=tuple(sorted(self._pending)),
            courted=self._courted,
            replaced=self._replaced,
            given_up=self._given_up,
            version=self.promise_version,
        )

    @property
    def _bound_to(self) -> bytes:
        """The history that this peer has been in, or was asked to join."""
        return self.history or self._courted

    def _history_of(self, word: Propose) -> bytes:
        """What a word is judged by where a view founds a history: its members said their words in the one before."""
        view, inside = self.view, self.me.peer_id in word.members
        if view is not None and word.sender in view.members and word.n == view.view_epoch:
            uninstalled = word.history == view.parent  # the sender has not installed this view yet
            return self.history if uninstalled else word.history
        return word.history if inside and word.minted != self.history else word.minted or word.history

    def _promised_in(self, history: bytes) -> tuple[ViewRef, ...]:
        """What whoever decides about a view of this history has to know; b"" for the founding of one: all of it."""
        former = {view for old in self._given_up if history in (b"", old.history) for view in old.pending}
        return tuple(sorted(self._pending | former))

    # -- a standing view: is there cause to leave it? --------------------------------------------

    @property
    def frozen(self) -> bool:
        """No view stands here: no round can be completed."""
        return self.view is None

    @property
    def _said(self) -> Propose:
        """What this peer said of the standing view."""
        assert self._word is not None, "of no standing view anything was said"
        return self._word

    def _lost(self, member: MemberId) -> bool:
        return member != self.me and (self._book.superseded(member) or self._book.gone(member.peer_id))

    def _left(self, member: MemberId) -> bool:
        """Not in the standing view any more: lost, or it asks to be let in (a run that was stopped, and resumed)."""
        return self._lost(member) or member.peer_id in self._strays

    def _shunned(self, peer_id: str) -> bool:
        return self._now < self._shunned_ms.get(peer_id, self._now)

    def _blame(self, learners: Iterable[MemberId]) -> None:
        """A reduction failed, or they cannot enter. Whoever is only learning stops nobody for long."""
        for learner in learners:
            failures = self._failures[learner.peer_id] = self._failures.get(learner.peer_id, 0) + 1
            if failures > 1:
                gap_ms = min(self._settings.shun_max_ms, self._settings.shun_ms << min(failures - 2, 20))
                self._shunned_ms[learner.peer_id] = self._now + gap_ms
                self._note(f"lets {learner.peer_id} not in for {gap_ms} ms: {failures} views with it failed")

    def _shun_with(self, word: Propose) -> None:
        """A voter of the last view goes on without a learner of it, which this peer need not have had to blame."""
        last = self._last
        if last is None or word.sender not in last.voters:
            return
        for learner in last.learners:
            if learner.peer_id not in word.candidates:
                until_ms = self._now + self._settings.shun_ms
                self._shunned_ms[learner.peer_id] = max(until_ms, self._shunned_ms.get(learner.peer_id, 0))

    def _cause(self, view: View) -> str | None:
        """This peer's own reason to leave the standing view, now. A learner has none: it is the voters' to keep."""
        if self.me not in view.voters:
            return None
        lost = [member.peer_id for member in view.members if self._lost(member)]
        if lost:
            return f"lost {', '.join(lost)}"
        if self._strays:
            return f"{', '.join(sorted(self._strays))} cannot enter view {view.view_epoch}"
        return self._wanted_at_once

    def _pause_end_ms(self, view: View) -> int:
        """Flapping makes the next change wait, but not for the dead: no round of their view completes any more."""
        return self._now if any(map(self._lost, view.members)) else self._not_before_ms

    def _enough_causes(self, view: View) -> bool:
        """The pre-vote: counted as the quorum is, but on this peer's own knowledge."""
        oldest = self._now - self._settings.cause_ttl_ms
        causes = {member for member, at_ms in self._causes.items() if at_ms >= oldest} | {self.me}
        causes |= {member for member in view.voters if member.peer_id in self._strays}  # it asks to be let in
        votes = [member for member in view.voters if member in causes and not self._lost(member)]
        return self._enough(votes, view.voters, view)

    def _enough(self, votes: Sequence[MemberId], voters: Sequence[MemberId], view: View) -> bool:
        """More than half of those voters that count, or half of them with the view's first."""
        counted = [member for member in voters if member in votes or not self._uncounted(member, view)]
        return 2 * len(votes) > len(counted) or (2 * len(votes) == len(counted) and view.voters[0] in votes)

    def _enough_without_me(self) -> bool:
        """Whether those of the last view that can be reached may go on once this peer has given its vote back."""
        if self._last is None:
            return (
                not self.history
            )  # a founding: others have installed this attempt's view, of which nobody is lost
        others = [member for member in self._last.voters if member != self.me]
        votes = [member for member in others if not self._lost(member)]
        return self._enough(votes, others, self._last)

    def _uncounted(self, member: MemberId, view: View) -> bool:
        if member.peer_id in self._evicted:
            return True
        if self._book.superseded(member) or (self._quorum is Quorum.ANY and self._lost(member)):
            return True
        record = self._book.records.get(member)
        if record is None:
            return False
        if record.withdrawn:
            return view.view_epoch <= record.n
        return self._quorum is not Quorum.STRICT

    def _joiners(self) -> list[str]:
        """Those who asked to join and still do."""
        oldest = self._now - self._settings.join_ttl_ms
        inside = self.view.peers if self.view is not None else ()
        return sorted(
            peer
            for peer, asked_ms in self._book.joiners.items()
            if asked_ms >= oldest
            and peer not in inside
            and not self._book.gone(peer)
            and not self._shunned(peer)
        )

    def _last_peers(self) -> tuple[str, ...]:
        return self._last.peers if self._last is not None else ()

    def _hasten(self) -> None:
        """There is news: an attempt that cannot end as it is need not wait as long as before."""
        self._raises = 0
        if self._attempt is not None:
            soon_ms = self._now + self._randomised(self._settings.stuck_ms)
            self._attempt.replace_at_ms = min(self._attempt.replace_at_ms, soon_ms)

    def _freeze(self) -> None:
        if self.view is not None:
            self.view, self._word, self._froze = None, None, True

    def _let_in(self) -> None:
        """Perhaps again, under a number this peer had said already: from now on it waits for the others."""
        if self.left_out:
            self.left_out, self._waits_since_ms = False, self._now

    def _take_strike(self) -> None:
        """Attempts in a row make the next one wait; the first after a calm is immediate."""
        calm = self._now - self._last_open_ms >= self._settings.calm_ms
        self._strikes = 0 if calm else self._strikes + 1
        self._last_open_ms = self._now
        gap_ms = min(self._settings.pause_max_ms, self._settings.pause_ms << min(self._strikes, 10))
        self._not_before_ms = self._now + self._randomised(gap_ms)

    def _randomised(self, gap_ms: int) -> int:
        return gap_ms // 2 + self._rng.randrange(gap_ms + 1)

    def _protected(self, peer_id: str) -> bool:
        """A voter of the last view: nobody drops it for silence or on hearsay."""
        return self._last is not None and self._book.member(peer_id) in self._last.voters

    def _still_votes(self, peer_id: str) -> bool:
        """Whether it does in a set that this peer has said, and has not started again since.

        It may count this peer as crashed, with promises that know nothing of being dropped.
        """
        boots = {m.boot for view in self._pending for m in view.members if m.peer_id == peer_id}
        return bool(boots) and boots <= {UNKNOWN_BOOT, self._book.member(peer_id).boot}

    def _spoken(self, attempt: Attempt) -> set[str]:
        """The voters that were heard in it, and have not started again since: these vote in the next one, too."""
        words = attempt.words
        return {v for v in attempt.voters if v in words and not self._book.superseded(words[v].sender)}

    def _farewell(self) -> Stopped:
        pending = self._promised_in(self._bound_to)
        return Stopped(member=self.me, n=self._n, base=self._base, pending=pending, withdrawn=True)

    def _promise_to(self, peers: Iterable[str]) -> None:
        self.promise_version += 1
        message = Promised(
            history=self.history,
            sender=self.me,
            n=self._n,
            base=self._base,
            pending=tuple(sorted(self._pending)),
            version=self.promise_version,
        )
        for peer in peers:
            self._send(peer, message)

    def _prune(self) -> None:
        """Forget what concerns no view of interest any more."""
        views = [self._base, self._known, *self._pending]
        self._book.forget_all_but({member for view in views if view is not None for member in view.members})
