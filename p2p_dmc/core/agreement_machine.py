"""The transitions of agreement: freeze, open an attempt, say a word, merge one, install, be left out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from p2p_dmc.core.agreement_attempt import Attempt, said_set
from p2p_dmc.core.agreement_messages import (
    REPLACED_MAX,
    Cause,
    MemberId,
    Propose,
    Ready,
    Replaced,
    StateRef,
    Stopped,
    Surpassed,
    View,
    Withdrawal,
    minted_history,
    view_id,
)
from p2p_dmc.core.agreement_state import AgreementState
from p2p_dmc.core.quorum import Decision, decide


class AgreementMachine(AgreementState):
    """The transitions of one peer."""

    def _finish(self) -> Ready:
        self._progress()
        return self._ready()

    def _ready(self) -> Ready:
        return Ready(
            froze=self._froze,
            persist=self.promises if self._persist else None,
            sends=tuple(self._sends),
            installed=self._installed,
            accepted=self._accepted,
            trace=tuple(self._trace),
        )

    def _progress(self) -> None:
        """Whatever has become possible or due."""
        if self.view is not None:
            self._consider_change(self.view)
        if self.view is not None:
            self._repeat_word(self.view)
        if self._attempt is not None and not self.left_out:
            self._advance(self._attempt)

    def _consider_change(self, view: View) -> None:
        if all(map(self._left, view.voters)):
            self._abandon(view)
            return
        cause = self._cause(view)
        if cause is None or self._now < self._pause_end_ms(view):
            return
        if self._now >= self._cause_resend_ms:
            self._cause_resend_ms = self._now + self._settings.cause_ttl_ms // 4
            message = Cause(history=self.history, view_epoch=view.view_epoch, sender=self.me)
            for peer in view.peers:
                self._send(peer, message)
            self._note(f"sees cause to leave view {view.view_epoch}: {cause}")
        if self._enough_causes(view):
            self._open(self._n + 1, self._joiners(), (), (), cause)

    def _repeat_word(self, view: View) -> None:
        """A voter that fetches its start state says no header; whoever has left the view answers to this instead."""
        if not self.behind or self.me not in view.voters:
            return
        if self._now >= self._word_resend_ms:
            self._word_resend_ms = self._now + self._settings.resend_max_ms
            for voter in view.voters:
                self._send(voter.peer_id, self._said)

    # -- an attempt ------------------------------------------------------------------------------

    def _open(
        self, n: int, candidates: Iterable[str], stopped: Iterable[str], voters: Iterable[str], why: str
    ) -> Attempt:
        """Freeze and say the first word of attempt n. What it says of this peer is fixed here.

        The voters of the last view vote again, and those named. A joiner is not among them until it caught up, nor is
        who was left out of a later view: it may be far behind, and nobody waits for it.
        """
        last = self._last if not self.left_out else None
        if self._attempt is None or self.left_out:
            self._waits_since_ms = self._now
        self._freeze()
        self._take_strike()
        self._say_late()
        self.left_out = False
        self._wanted = self._wanted_at_once = None
        self._n = n
        content = Propose(
            history=self._bound_to,
            n=n,
            sender=self.me,
            candidates=(self.me.peer_id,),
            stopped=(),
            voters=(),
            completed=self.completed,
            base=self._base,
            known=self._known,
            pending=(),
            seen=(),
            vote_floor=self._vote_floor,
            joined=bool(self.history),
            replaced=self._replaced,
            payload=self._payload(),
        )
        attempt = Attempt(n=n, content=content, now_ms=self._now)
        gap_ms = min(self._settings.stuck_max_ms, self._settings.stuck_ms << min(self._raises, 10))
        attempt.replace_at_ms = self._now + self._randomised(gap_ms)
        self._attempt, self._decision = attempt, None
        peers = [peer for peer in self._last_peers() if not self._shunned(peer)]
        everybody = {self.me.peer_id, *peers, *candidates}
        gone = {peer for peer in everybody if peer != self.me.peer_id and self._book.gone(peer)}
        remembered = [v for v in last.voters if not self._book.superseded(v)] if last is not None else []
        voting = {*voters, *(v.peer_id for v in remembered)}
        attempt.grow(everybody, {*stopped, *gone}, voting, self._evicted, self._now)
        self._say(attempt, why)
        return attempt

    def _say_late(self) -> None:
        """From here on it says what it has adopted since its last word; of the view that it was learning in, too."""
        if self._late is not None and self._last is not None:
            self._adopt(self._late, self._last)
        self._late = None

    def _say(self, attempt: Attempt, why: str) -> None:
        """Say the sets as they are now. On disk first: somebody may install them."""
        candidates, stopped, voters, evicted = attempt.sets
        voting = [self.me if peer == self.me.peer_id else self._book.member(peer) for peer in attempt.voting]
        if voting:  # without, nobody can install it
            self._pending.add(said_set(attempt.n, voting))
        self.promise_version += 1
        self._persist = True
        records = self._book.records
        word = replace(
            attempt.content,
            candidates=candidates,
            stopped=stopped,
            voters=voters,
            evicted=evicted,
            pending=self._promised_in(attempt.content.history),
            seen=tuple(records[member] for member in sorted(records)),
            version=self.promise_version,
        )
        attempt.words[self.me.peer_id] = word
        attempt.resend_gap_ms = self._settings.resend_ms
        attempt.resend_at_ms = self._now + attempt.resend_gap_ms
        for peer in candidates:
            self._send(peer, word)
        learners = "+".join(peer for peer in attempt.members if peer not in voters)
        gone = f", evicted {'+'.join(evicted)}" if evicted else ""
        self._note(
            f"proposes {attempt.n} {'+'.join(attempt.voting)}{f' teaching {learners}' if learners else ''} "
            f"without {'+'.join(stopped) or 'none'}{gone}: {why}"
        )

    def _advance(self, attempt: Attempt) -> None:
        """Grow the sets by what is known by now, install if everybody agrees, else repeat or replace."""
        me = self.me.peer_id
        stopped = {peer for peer in attempt.members if peer != me and self._book.gone(peer)}
        stopped |= self._silent(attempt)
        refused = self._decision is not None
        if attempt.grow(self._joiners() if refused else (), stopped, (), self._evicted, self._now):
            self._say(attempt, "the sets grew")
        words = attempt.agreed()
        if words is not None and words != attempt.judged:
            self._judge(attempt, words)
        if self._attempt is not attempt:
            return
        if self._now >= attempt.replace_at_ms and me in attempt.voters:
            self._replace_if_stuck(attempt)
        elif self._now >= attempt.resend_at_ms:
            attempt.resend_gap_ms = min(self._settings.resend_max_ms, 2 * attempt.resend_gap_ms)
            attempt.resend_at_ms = self._now + attempt.resend_gap_ms
            asking = replace(attempt.words[me], asks=True)
            late = 2 * (self._now - self._waits_since_ms) >= self._settings.link_patience_ms
            for peer in (
                attempt.members if late else attempt.unheard()
            ):  # somebody may have heard them all by now
                self._send(peer, asking)

    def _silent(self, attempt: Attempt) -> set[str]:
        """Joiners that did not answer in time."""
        deadline_ms = self._now - self._settings.join_patience_ms
        return {peer for peer in self._may_drop(attempt) if attempt.since_ms[peer] <= deadline_ms}

    def _may_drop(self, attempt: Attempt) -> list[str]:
        """Whom this peer has not heard, and may leave out for it: nobody of its last view; before its first one, nobody
        who votes, for somebody has heard that one, or did.
        """
        unheard = [peer for peer in attempt.members if peer not in attempt.words]
        if self._last is None:
            return [peer for peer in unheard if not self._still_votes(peer)]
        return [peer for peer in unheard if not self._protected(peer)]

    def _judge(self, attempt: Attempt, words: tuple[Propose, ...]) -> None:
        """All members said the same sets: do they make a view?

        A view founds a history when none of its members is bound to one. That a run has two, though nobody was
        evicted, is not ruled out; that both have committed something is, where their founders have promised anything
        to each other. For a founding is a change like any other: every set that any of its members said before has to
        be held (`decide`). So of two foundings that share such sets one has no votes left to complete a round with,
        commits nothing, and its members give it up when they meet the other (`rivals` in agent/entering.py). And who
        was asked to join a history founds nothing beside it: whoever founds with such a one is bound to that history
        from its word on (`_court`). Foundings by peers that know nothing of each other are for people to choose from.
        """
        attempt.judged = words
        histories = {word.history for word in words} | {self._courted}
        histories.discard(b"")
        if len(histories) > 1:
            self._note(f"attempt {attempt.n} mixes histories {sorted(h.hex() for h in histories)}")
            return
        if histories and not any(word.history for word in words):
            self._note(f"attempt {attempt.n} would found a second history")
            return
        self._decision = decide(words, self._quorum)
        if self._decision.holds:
            self._install(attempt, words, self._decision, min(histories, default=b""))
        else:
            self._note(f"attempt {attempt.n} has no quorum: {self._decision.describe()}")
            self._leave_newcomers_out(attempt, words)

    def _leave_newcomers_out(self, attempt: Attempt, words: tuple[Propose, ...]) -> None:
        """Newcomers whose own promises are all that is in the way are not let in for now: they would stop the others.

        They would wait for those with whom they meant to found a history, who may be away for long. A round that is
        complete in a view of a greater number than they promised overtakes that.
        """
        joined = tuple(word for word in words if word.joined)
        newcomers = {word.sender.peer_id for word in words if not word.joined}
        if self.history and decide(joined, self._quorum).holds:
            for peer in newcomers:
                self._shunned_ms[peer] = self._now + self._settings.shun_ms
            attempt.grow((), newcomers, (), (), self._now)
            self._say(attempt, f"with what {', '.join(sorted(newcomers))} promised elsewhere nobody goes on")

    def _replace_if_stuck(self, attempt: Attempt) -> None:
        """An attempt's sets only grow, so what they got wrong is put right in another attempt."""
        attempt.replace_at_ms = self._now + self._randomised(self._settings.stuck_ms)
        back = [peer for peer in attempt.stopped if not self._book.gone(peer) and self._welcome(peer)]
        restarted = [
            peer
            for peer, word in attempt.words.items()
            if peer in attempt.members and self._book.superseded(word.sender)
        ]
        at_odds = [peer for peer in attempt.unheard() if peer in attempt.words]
        told = {record.member for record in attempt.words[self.me.peer_id].seen}
        unsaid = not told.issuperset(self._book.records)  # a crash that has come to count since
        if back or restarted or at_odds or unsaid or self._late is not None:
            self._raises += 1
            names = {peer for peer in attempt.candidates if not self._book.gone(peer)}  # and the last view's
            voters = self._spoken(attempt) & names
            self._open(self._n + 1, names | set(self._joiners()), (), voters, f"attempt {attempt.n} is stuck")

    def _welcome(self, peer_id: str) -> bool:
        """Worth another attempt: needed, or asking."""
        decision = self._decision
        needed = set(decision.absent) if decision is not None else set()
        needed |= (
            {peer for count in decision.lacking for peer in count.missing} if decision is not None else set()
        )
        return self._protected(peer_id) or peer_id in needed or peer_id in self._joiners()

    # -- installing ------------------------------------------------------------------------------

    def _install(
        self, attempt: Attempt, words: tuple[Propose, ...], decision: Decision, history: bytes
    ) -> None:
        identity = view_id(words)
        view = View(
            history=minted_history(identity) if decision.thin or not history else history,
            view_epoch=words[0].n,
            view_id=identity,
            members=tuple(word.sender for word in words),
            voters=tuple(word.sender for word in words if word.sender.peer_id in word.voting),
            start=decision.start,
            holders=tuple(word.sender for word in words if word.completed == decision.start),
            payloads=tuple(word.payload for word in words),
            stopped=words[0].stopped,
            parent=history if decision.thin else b"",
            evicted=words[0].evicted if decision.thin else (),
        )
        self._replaced = max((word.replaced for word in words), key=lambda said: (len(said), said))
        if view.parent:
            at = view.start.lineage
            taken = Replaced(history=view.parent, lineage=at, evicted=bool(view.evicted))
            self._replaced = (taken, *self._replaced)[:REPLACED_MAX]
        self._evicted.clear()
        if decision.thin:
            self._pending.clear()
            self._base = self._disk_base = self._disk_known = None
        self._known = None if decision.thin else decision.known
        ref = view.ref
        said = {p for p in self._pending if p.view_epoch == ref.view_epoch and p.peers == ref.peers}
        self._pending = (self._pending - said) | {ref}  # by now all incarnations are known
        self._enter_history(view.history)
        self._last, self.view, self._installed, self._installed_ms = view, view, view, self._now
        self._word = replace(attempt.words[self.me.peer_id], installed=True, minted=view.history)
        self._attempt, self._decision = None, None
        self._heard_ms.clear()
        self.left_out = False
        self.behind = self.completed != view.start
        if self._late == view.start:
            self._adopt(view.start, view)
        self._late = None
        self._strays.clear()
        for peer in ref.peers:
            self._failures.pop(peer, None)
            self._shunned_ms.pop(peer, None)
        self._causes.clear()
        self._cause_resend_ms = self._now
        self._word_resend_ms = self._now + self._settings.resend_max_ms
        self._raises = 0
        for peer in view.peers:
            self._book.joiners.pop(peer, None)
        names = "+".join(ref.peers)
        learners = "+".join(member.peer_id for member in view.learners)
        self._note(
            f"installed view {view.view_epoch} {names}{f' teaching {learners}' if learners else ''} "
            f"from {view.start.lineage}"
        )

    def _enter_history(self, history: bytes) -> None:
        """What this peer promised in it before it gave it up counts as promised now."""
        former = [old for old in self._given_up if old.history == history]
        self._pending |= {view for old in former for view in old.pending}
        self._given_up = tuple(old for old in self._given_up if old not in former)
        self.history, self._courted, self._persist = history, b"", True

    def _adopt(self, state: StateRef, view: View) -> None:
        self.completed, self.behind = state, False
        if state.lineage[0] == view.view_epoch:
            self._known = view.ref

    def _abandon(self, view: View) -> None:
        """A learner whose voters are all gone: what comes after them is not this peer's to propose."""
        self._freeze()
        self.left_out = True
        self._note(f"leaves view {view.view_epoch}, whose voters are gone")

    def _leave(self, word: Propose) -> None:
        """A later view stands without this peer."""
        self._freeze()
        if self._attempt is not None and self._attempt.n <= word.n:
            self._attempt = None
        if not self.left_out:
            self._note(f"left out of view {word.n} of {'+'.join(word.members)}")
        self.left_out = True

    # -- messages --------------------------------------------------------------------------------

    def _fenced(self, sender: MemberId, history: bytes) -> bool:
        """Worth listening to: another peer, its newest incarnation, not of another history."""
        if sender.peer_id == self.me.peer_id or not self._book.note(sender):
            return False
        mine = self._bound_to
        if history and mine and history != mine:
            self._note(f"ignores {sender.peer_id}, which is of history {history.hex()}")
            return False
        return True

    def _on_propose(self, word: Propose) -> None:
        if not self._fenced(word.sender, self._history_of(word)) or not self._book.hear_word(word):
            return
        for record in word.seen:
            if record.withdrawn and record.member != self.me:
                self._book.withdraw(record)
        if self._withdrawn:
            self._send(word.sender.peer_id, Withdrawal(history=self.history, stopped=self._farewell()))
        elif self.view is not None:
            self._on_propose_standing(word, self.view)
        elif word.installed:
            self._on_installed_elsewhere(word)
        else:
            self._on_propose_frozen(word)

    def _on_propose_standing(self, word: Propose, view: View) -> None:
        voter = word.sender in view.voters
        mine = self._said
        inside = self.me.peer_id in word.members
        if word.installed and (word.n > view.view_epoch or (word.n == view.view_epoch and not inside)):
            self._leave(word)
        elif word.n > view.view_epoch and voter:
            self._follow(word)
        elif voter and word.n == view.view_epoch and word.sets != mine.sets:
            self._strays.add(word.sender.peer_id)
        elif not word.installed or word.n < view.view_epoch:
            self._send(word.sender.peer_id, mine)

    def _on_installed_elsewhere(self, word: Propose) -> None:
        inside = self.me.peer_id in word.members
        attempt = self._attempt
        if inside and attempt is not None and attempt.n == word.n:
            self._let_in()
            attempt.hear(word)
        elif (self._last is None or word.n > self._last.view_epoch) and (not inside or word.n > self._n):
            self._leave(word)

    def _on_propose_frozen(self, word: Propose) -> None:
        attempt, sender = self._attempt, word.sender.peer_id
        inside = self.me.peer_id in word.members
        if attempt is not None and word.n == attempt.n:
            if self.left_out and inside:
                self._let_in()
                for peer in attempt.members:
                    self._send(peer, attempt.words[self.me.peer_id])
            self._merge(attempt, word)
        elif word.n > self._n:
            if inside or (attempt is not None and not self.left_out):
                self._follow(word)
        elif attempt is not None and not self.left_out:
            self._send(sender, attempt.words[self.me.peer_id])
        elif inside:
            self._send(sender, Surpassed(sender=self.me, n=self._n))

    def _follow(self, word: Propose) -> None:
        """Move to a greater n that somebody else said."""
        self._court(word)
        self._evicted |= set(word.evicted)
        self._shun_with(word)
        voters = {*word.voters, self.me.peer_id} if self._may_vote(word) else word.voters
        why = f"{word.sender.peer_id} says so"
        self._open(word.n, word.candidates, self._admissible(word), voters, why).hear(word)

    def _may_vote(self, word: Propose) -> bool:
        """A newcomer among those who found, or somebody who is not behind whoever proposes: nobody waits for it.

        One that was asked to join a history votes in no founding beside it: it is let in there, or by another one that
        lives (`court_another`), and neither has to wait for a set that it promised with others who knew nothing of it.
        """
        if not self.history:
            return not self._courted
        return self.completed.lineage >= word.completed.lineage

    def _court(self, word: Propose) -> None:
        """A newcomer remembers which history it was asked to join."""
        if word.history and not self.history and not self._courted:
            self._courted, self._persist = word.history, True

    def _merge(self, attempt: Attempt, word: Propose) -> None:
        self._court(word)
        self._evicted |= set(word.evicted)
        attempt.hear(word)
        if attempt.grow(word.candidates, self._admissible(word), word.voters, self._evicted, self._now):
            self._say(attempt, f"with {word.sender.peer_id}")
        elif word.asks:
            self._send(word.sender.peer_id, attempt.words[self.me.peer_id])

    def _admissible(self, word: Propose) -> set[str]:
        """The stopped peers that this peer leaves out too.

        Not a member of its last view on hearsay: that one may be in contact and count this peer as crashed,
        with promises that know nothing of being dropped. A crash that somebody saw is no hearsay.
        """
        recorded = {record.member for record in word.seen if not record.withdrawn}
        return {
            peer
            for peer in word.stopped
            if peer != self.me.peer_id
            and (not self._protected(peer) or self._book.gone(peer) or self._book.member(peer) in recorded)
        }

    def _on_cause(self, message: Cause) -> None:
        if not self._fenced(message.sender, message.history):
            return
        view = self.view
        if view is None:
            return
        if message.view_epoch == view.view_epoch and message.sender in view.voters:
            self._causes[message.sender] = self._now
        elif message.view_epoch <= view.view_epoch:
            self._send(message.sender.peer_id, self._said)

    def _on_surpassed(self, message: Surpassed) -> None:
        attempt = self._attempt
        if not self._fenced(message.sender, b"") or attempt is None or self.left_out:
            return
        if self.me.peer_id not in attempt.voters:
            return
        if message.n >= attempt.n and message.sender.peer_id in attempt.members:
            why = f"{message.sender.peer_id} has said {message.n}"
            self._open(message.n + 1, attempt.candidates, (), self._spoken(attempt), why)

    def _on_withdrawn(self, stopped: Stopped) -> None:
        known = stopped.member in self._book.away
        self._accepted = self._book.withdraw(stopped)
        self._book.joiners.pop(stopped.member.peer_id, None)
        if self._accepted and not known:  # it may not reach everybody itself
            for peer in self._last_peers():
                if peer != stopped.member.peer_id:
                    self._send(peer, Withdrawal(history=self.history, stopped=stopped))
