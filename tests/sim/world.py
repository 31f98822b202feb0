"""The world: machines, network, failure detectors and collectives, moved by decisions alone.

A decision is a tuple of a verb and its arguments (`decisions.py`); nothing in here is random, so a list of decisions is
a run. One that makes no sense at its time has no effect, so a list with gaps is a run, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

from p2p_dmc.agent.work import InFlight
from p2p_dmc.core.agreement_messages import View
from tests.sim.collective import Collective
from tests.sim.host import DOWNLOAD_STEPS, KEPT_ROUNDS, Header, Host
from tests.sim.invariants import require
from tests.sim.model import Model
from tests.sim.network import Closed
from tests.sim.stage import Stage

Decision: TypeAlias = tuple[Any, ...]


class World(Stage):
    """Rounds and states on the stage: views that open, headers, reductions, completion, downloads, the end."""

    def _installed(self, host: Host, view: View) -> None:
        self.checker.installed(host, view, self.hosts)
        host.installed(view)
        host.models = {d: m for d, m in host.models.items() if m is host.held or d == view.start.digest}
        self._open_if_held(host)

    def _open_if_held(self, host: Host) -> None:
        """The view opens where its start state is held."""
        view, core = host.view, host.core
        if view is None or core is None or host.opened or core.view is None or core.view is not view:
            return
        start = host.models.get(view.start.digest)
        if start is None or host.trainer is None:
            return
        if core.behind:
            if not self.act(host, lambda core, now: core.adopted(view.start, now)).accepted:
                return
            if host.core is not core or core.view is not view:
                return
        host.open_view(view, start.renamed(view.start), skip_lost=self.skip_lost)
        self.checker.assigned(host, view)
        if host.work is not None and host.ledger is not None and host.ledger.done:
            self.enter(host, 0, 0, ())

    # -- rounds ----------------------------------------------------------------------------------

    def enter(
        self, host: Host, samples: int, prefetch: int, lost: tuple[str, ...], *, finite: bool = True
    ) -> None:
        """The trainer's local steps are done: the header is said to all members; some miss it."""
        ledger = host.ledger
        if not host.training or host.trainer is None or host.view is None or host.own() is not None:
            return
        if host.learning:
            header = host.header(samples=0)
        elif ledger is None:
            return
        elif ledger.done:
            header = host.header(samples=0, final=ledger is host.held.ledger)
        else:
            view = host.view
            self.look_at_data(host)
            if not host.training or host.work is None or host.view is not view:
                return  # that was cause enough to leave the view
            host.step(samples, prefetch)
            header = host.header(samples=host.trainer.consumed, finite=finite)
            lineage = (host.view.view_epoch, host.round)
            host.in_flight = InFlight(lineage, host.trainer.consumed) if finite else None
        self.events += 1
        self.say_header(host, header, lost)

    def look_at_data(self, host: Host) -> None:
        """Whether the assignment still fits the shards that can be had."""
        work, ledger = host.work, host.ledger
        if work is None or ledger is None:
            return
        reachable = self._reachable_shards(host)
        gone = work.reachable - reachable
        if work.lost & reachable or (gone and any(s.shard in gone for s in ledger.remaining())):
            self.act(host, lambda core, now: core.wants_change("other shards can be had", now, at_once=False))

    def say_header(self, host: Host, header: Header, lost: tuple[str, ...] = ()) -> None:
        host.said.setdefault(host.round, {})[host.member] = header
        view = host.view
        assert view is not None
        for peer in view.peers:
            if host.view is not view or host.round != header.round:
                return
            other = self.hosts[peer]
            if other is not host and peer not in lost and self.network.linked(host.peer_id, peer):
                self._hear_header(other, host, header)
        self._look_at_barrier(host)

    def _hear_header(self, host: Host, sender: Host, header: Header) -> None:
        if host.outcome == "finished" and not sender.outcome:
            self.finished(sender, host.held)  # it has not heard yet
        elif host.outcome == "stopped" and host.up:
            self.tell_closed(host, sender.peer_id)
        core = host.core
        if core is None or host.asleep or host.outcome:
            return
        self.events += 1
        view = core.view
        if view is None or view is not host.view or view.view_id != header.view_id:
            host.early[sender.member] = header
            if view is not None and view.view_id != header.view_id:
                name = sender.peer_id
                self.act(host, lambda core, now: core.foreign_header(name, header.view_epoch, now))
        elif header.round in (host.round, host.round + 1):
            said = host.said.setdefault(header.round, {})
            again = sender.member in said
            said[sender.member] = header
            self._look_at_barrier(host)
            own = host.own()
            if again and own is not None and header.round == host.round and host.barrier() is not None:
                self._answer(host, sender, own)
        elif host.last_own is not None and header.round == host.last_own.round:
            self._answer(host, sender, host.last_own)
        if host.failed and host.view is not None and header.view_id == host.view.view_id:
            self._tell_failure(host, sender, host.view)

    def _answer(self, host: Host, sender: Host, own: Header) -> None:
        """Whoever repeats its header has missed somebody's."""
        missed = host.member not in sender.said.get(own.round, {})
        if missed and self.network.linked(host.peer_id, sender.peer_id):
            self._hear_header(sender, host, own)

    def _look_at_barrier(self, host: Host) -> None:
        """Everybody's header is here: commit the round before, then stop, change, or reduce."""
        core, view = host.core, host.view
        if not host.training or host.reducing is not None or core is None or view is None:
            return
        headers = host.barrier()
        if headers is None:
            return
        if host.learning:
            self._learner_at_barrier(host, view, headers)
            return
        digests = {header.digest for header in headers}
        require(3, len(digests) == 1, "round {} of view {} begins from different states", host.round, view)
        self._commit(host, view)
        said = host.said[host.round].values()
        if all(header.final for header in headers):
            self.finished(host, host.held)
        elif any(header.closing for header in said):
            self._close(host)
        elif any(header.change for header in said) or host.stale:
            self.act(host, lambda core, now: core.at_barrier(now))
        elif any(header.samples for header in headers if header.finite):
            self._post(host, view)
        elif any(not h.finite for h in headers) or host.ledger is not host.held.ledger or host.work.left:  # type: ignore[union-attr]
            self._complete(host, None)

    def _learner_at_barrier(self, host: Host, view: View, headers: tuple[Header, ...]) -> None:
        """It reduces with weight zero, commits nothing, and leaves what follows to the voters."""
        said = host.said[host.round].values()
        if any(header.closing for header in said) or all(header.final for header in headers):
            return
        if not any(header.change for header in said):
            self._post(host, view)

    def _commit(self, host: Host, view: View) -> None:
        assert host.core is not None
        if host.held.ref.lineage > (0, 0):
            self.checker.committed(view, host.held, self.hosts)
            host.committed = host.held
        host.core.committed(host.held.ref.lineage)
        host.core.established(view.view_epoch)

    def _post(self, host: Host, view: View) -> None:
        """It begins to reduce, unless the group is dropped: then it waits for the next view, and repeats its header."""
        if host.failed:
            return
        key = view.view_id, host.round
        collective = self.collectives.get(key)
        if collective is None:
            collective = self.collectives[key] = Collective(view, host.round)
        own = host.own()
        assert own is not None and host.trainer is not None
        delta = tuple(host.trainer.local) if own.finite and not host.learning else ()
        collective.post(host.member, host.held.ref, delta)
        host.reducing = collective
        self._flow(collective)

    def _flow(self, collective: Collective) -> bool:
        """The data flows once all have posted, and all of them are connected, awake and alive."""

        def connected(peers: list[str]) -> bool:
            reducing = all(self.hosts[p].reducing is collective and self.hosts[p].up for p in peers)
            return reducing and self.network.all_linked(peers)

        if collective.done:
            return True
        if collective.flow(connected):
            states = {collective.states[voter] for voter in collective.view.voters}
            require(3, len(states) == 1, "one round was entered from different states: {}", states)
            first = self.hosts[collective.view.voters[0].peer_id]
            self.results[collective.view.view_id, collective.round] = first.outcome_of(collective)
        return collective.done

    def finish(self, host: Host) -> None:
        """The collective ends well here."""
        collective, view = host.reducing, host.view
        if collective is None or host.failed or not host.training or view is None:
            return
        self._flow(collective)
        if host.learning:
            self._learner_finishes(host, view)
        elif collective.done:
            self._complete(host, collective)

    def _learner_finishes(self, host: Host, view: View) -> None:
        """What it got is the state after the round where it holds the one before; else it keeps it for then."""
        result = self.results.get((view.view_id, host.round))
        if result is None or host.core is None:
            return
        host.reducing = None
        self.events += 1
        if not host.core.behind and result.parent is not None and result.parent.ref == host.held.ref:
            if self.act(host, lambda core, now: core.complete(result.ref, now)).accepted:
                self.checker.completed(host, view, result)
                host.hold(result)
        else:
            host.kept[host.round] = result
            if len(host.kept) > KEPT_ROUNDS:
                del host.kept[min(host.kept)]
        host.next_round()

    def _complete(self, host: Host, collective: Collective | None) -> None:
        core, view = host.core, host.view
        assert core is not None and view is not None
        model = host.outcome_of(collective)
        before = host.held, host.claims()
        host.completing = True
        ready = self.act(host, lambda core, now: core.complete(model.ref, now))
        host.completing = False
        if not ready.accepted:
            require(5, before == (host.held, host.claims()), "a refused round changed {}", host.peer_id)
            return
        self.checker.completed(host, view, model)
        self.results.setdefault((view.view_id, host.round), model)
        if host.core is not core:  # it died as it recorded the round
            return
        if self.trace is not None:
            self.say(host, f"completes {model.ref.lineage}")
        host.completed(model)
        self.checker.assigned(host, view)
        if ready.installed is not None:  # alone, it has agreed with itself on the next view by now
            self._installed(host, ready.installed)
            return
        self._forget_old_rounds()
        if model.ledger.done:
            self.enter(host, 0, 0, ())
        else:
            self._look_at_barrier(host)

    def _forget_old_rounds(self) -> None:
        """But for those whose result a frozen peer may still get."""
        under_way = [host.reducing for host in self.hosts.values() if host.reducing is not None]
        wanted = {(one.view.view_id, one.round) for one in under_way}
        for book in (self.collectives, self.results):
            if len(book) > 24:
                for key in list(book)[:12]:
                    if key not in wanted:
                        del book[key]

    def fail(self, host: Host, lost: tuple[str, ...]) -> None:
        """The collective fails here: the group is dropped, and everybody in it is told."""
        view = host.view
        if host.reducing is None or view is None or host.core is None or not host.training:
            return
        self.faults += 1
        before = host.held, host.claims()
        self._drop_group(host)
        for peer in view.peers:
            if peer not in lost:
                self._tell_failure(host, self.hosts[peer], view)
        if host.core is not None and host.core.view in (None, view):
            require(5, before == (host.held, host.claims()), "a failed round changed {}", host.peer_id)

    def _tell_failure(self, host: Host, other: Host, view: View) -> None:
        """The word of a dropped group, repeated to members that go on with the view."""
        linked = self.network.linked(host.peer_id, other.peer_id)
        if other is host or not other.up or other.outcome or other.failed or not linked:
            return
        stands = other.core.view if other.core is not None else None
        if stands is not None and stands is other.view and stands.view_id == view.view_id:
            self._drop_group(other)

    def _drop_group(self, host: Host) -> None:
        host.failed, host.reducing = True, None
        self.act(host, lambda core, now: core.wants_change("the collective failed", now, at_once=True))

    def _close(self, host: Host) -> None:
        """Stopped by agreement: the newest state is on disk, and from now on it is deaf. Everybody is told."""
        core = host.core
        assert core is not None
        self.say(host, f"closes at {host.held.ref.lineage}")
        host.checkpoint = host.held
        self.act(host, lambda core, now: core.checkpointed(host.held.ref.lineage, now))
        if host.core is not core:
            return
        view = host.view
        assert view is not None
        beyond = any(said.view_epoch > view.view_epoch for said in host.disk.pending)
        remembers = not host.learning and not beyond
        host.word = Closed(host.held.ref, view.view_id if remembers else b"", answer=False)
        host.roll = tuple(voter.peer_id for voter in view.voters if voter != host.member)
        host.outcome, host.trainer, host.view = "stopped", None, None
        host.leave_view()
        self.stops += 1
        for peer in view.peers:
            if peer != host.peer_id:
                self.tell_closed(host, peer)
        self._keep_vote(host)

    def tell_closed(self, host: Host, peer: str) -> None:
        """It has stopped, and asks whoever it has not heard for an answer."""
        if host.word is not None:
            self.network.send(host.peer_id, peer, replace(host.word, answer=peer in host.unheard))

    def _hear_closed(self, host: Host, sender: str, closed: Closed) -> None:
        self.events += 1
        host.closings[sender] = closed
        if host.word is not None:
            if closed.answer:
                self.network.send(host.peer_id, sender, replace(host.word, answer=False))
            self._keep_vote(host)
        elif not host.outcome and host.view is not None and host.held.ref == closed.ref:
            self._close(host)

    def _keep_vote(self, host: Host) -> None:
        """Once all voters of its view have stopped as it has."""
        if host.word is not None and host.word.view_id and not host.closed and not host.unheard:
            self.say(host, "keeps its vote")
            host.closed = True
            self.kept += 1

    def finished(self, host: Host, model: Model) -> None:
        if host.core is None or host.outcome:
            return
        self.say(host, f"has finished at {model.ref.lineage}")
        require(12, model.ledger.done, "{} finishes with {}", host.peer_id, model.ledger.progress())
        host.checkpoint = host.held = model
        host.outcome = "finished"
        host.trainer, host.view = None, None
        host.leave_view()

    # -- states on their way ---------------------------------------------------------------------

    def _holder(self, host: Host, digest: bytes) -> Model | None:
        """The state, from anybody that can be reached and has it."""
        for other in self.hosts.values():
            if other is host or (other.up and self.network.both_ways(host.peer_id, other.peer_id)):
                model = other.models.get(digest)
                if model is not None:
                    return model
        return None

    def adopt(self, host: Host) -> None:
        """A download of the view's start state ends. The view may be over by then."""
        view, core = host.view, host.core
        if view is None or core is None or not host.up or host.opened or host.trainer is None or host.outcome:
            return
        if host.learning:
            self._learn(host, view)
            return
        model = self._holder(host, view.start.digest)
        if model is None:
            return
        host.models[view.start.digest] = model
        if core.view is view:
            self._open_if_held(host)
        else:  # too late for that view; the next proposal says so
            self.act(host, lambda core, now: core.adopted(view.start, now))

    def _learn(self, host: Host, view: View) -> None:
        """One step of a learner's download; after the last it applies the rounds that it kept."""
        core = host.core
        assert core is not None
        self.events += 1
        pinned = host.pinned or self._pin(host, view)
        if pinned is None or self._donor(host, view) is None:
            return
        host.pinned = pinned
        host.download -= 1
        if host.download > 0:
            return
        host.download = DOWNLOAD_STEPS
        model = pinned
        for number in sorted(host.kept):
            result = host.kept[number]
            if result.parent is not None and result.parent.ref == model.ref:
                model = result
        if core.view is view and model.ref.lineage[1] + 1 < host.round:
            host.pinned = None  # a round is missing in between: again, from a newer state
            return
        host.models[model.ref.digest] = model
        accepted = self.act(host, lambda core, now: core.adopted(model.ref, now)).accepted
        if accepted and host.core is core and core.view is view:
            host.open_view(view, model, skip_lost=self.skip_lost)
            host.kept.clear()

    def _donor(self, host: Host, view: View) -> Host | None:
        """The voter of the view with the newest state among those that can be reached."""
        donors = [
            self.hosts[voter.peer_id]
            for voter in view.voters
            if self.hosts[voter.peer_id].up and self.network.both_ways(host.peer_id, voter.peer_id)
        ]
        able = [d for d in donors if d.view is not None and d.view.view_id == view.view_id and d.opened]
        return max(able, key=lambda donor: donor.held.ref.lineage, default=None)

    def _pin(self, host: Host, view: View) -> Model | None:
        """The view's start, which donors pin; once rounds since have been missed, the newest state."""
        donor = self._donor(host, view)
        if donor is None:
            return None
        start = donor.models.get(view.start.digest)
        first = view.start.lineage[1] + 1
        if start is not None and all(number in host.kept for number in range(first, host.round)):
            return start.renamed(view.start)
        return donor.held
