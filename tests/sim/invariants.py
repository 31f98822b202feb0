"""The invariants of DESIGN.md section 4 that a simulation can see: 1 to 7, 12 and 13, after every event.

The checker knows what no peer knows: all states, who truly remembers what, whose samples are truly in a delta.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2p_dmc.core import adacomm
from p2p_dmc.core.agreement_messages import MemberId, View
from p2p_dmc.core.ledger import Stretch, check_exact
from tests.sim.model import POLICY, Model

if TYPE_CHECKING:
    from tests.sim.host import Host


class Violation(AssertionError):
    """An invariant does not hold, or nothing happens any more."""

    def __init__(self, invariant: int, what: str) -> None:
        self.invariant = invariant
        super().__init__(f"invariant {invariant}: {what}" if invariant else what)


def require(invariant: int, condition: bool, what: str, *values: object) -> None:
    """Raise `Violation` unless it holds; `what` has a place for each of the values."""
    if not condition:
        raise Violation(invariant, what.format(*values))


@dataclass(frozen=True, slots=True, eq=False)
class Commit:
    """Every voter of the view is known to hold the model."""

    model: Model
    voters: tuple[MemberId, ...]


class Checker:
    """What has been agreed, completed and committed anywhere so far."""

    def __init__(self, *, one_history: bool) -> None:
        self.one_founding = self.one_history = one_history
        """Whether a second founding is a violation; whether there is only one history: no operator evicted anybody."""
        self.calm_founding = True
        """Everybody heard everybody when the run was founded: then one view founds it. Else there may be several, of
        which nothing is committed but in one."""
        self.began: dict[bytes, View] = {}
        """The first view of each history."""
        self.views: dict[tuple[bytes, int, bytes], View] = {}
        self.names: dict[tuple[bytes, tuple[int, int]], Model] = {}
        """What each lineage of each history names."""
        self.line: dict[bytes, list[Commit]] = {}
        """Per history, its commits in order; each follows from the one before unless somebody forgot."""
        self.assignments: dict[tuple[bytes, int, int], tuple[str, bytes]] = {}
        """Of each view, epoch and part of it: who had it first, and its digest."""
        self.epochs: dict[MemberId, int] = {}
        """The last view epoch that each incarnation installed."""
        self.commits = self.rounds = self.installs = 0

    # -- 1, 2, 4, 7: a view ----------------------------------------------------------------------

    def agreed(self, view: View) -> None:
        """A view stands somewhere, or did for as long as it took to write it down and die.

        Without a view before it, an operator's word that a founder is gone for good founds another history.
        """
        first = self.began.setdefault(view.history, view)
        if self.one_founding:
            roots = [root for root in self.began.values() if not root.parent and not root.evicted]
            require(2, len(roots) == 1 or not self.calm_founding, "two histories were founded: {}", roots)
            require(2, not first.parent or bool(first.evicted), "view {} has no quorum", first)

    def installed(self, host: Host, view: View, hosts: Mapping[str, Host]) -> None:
        self.installs += 1
        key = view.history, view.view_epoch, view.view_id
        known = self.views.setdefault(key, view)
        require(1, known is view or known == view, "one view id, two views: {} and {}", known, view)
        require(7, host.member in view.members, "{} installed view {} of others", host.peer_id, view)
        last = self.epochs.get(host.member, 0)
        require(7, view.view_epoch > last, "{} goes from view {} to {}", host.peer_id, last, view.view_epoch)
        self.epochs[host.member] = view.view_epoch
        if view.parent and view.evicted:
            self._nothing_known_is_lost(view, hosts)
        start = self.names.get((view.history, view.start.lineage))
        if start is not None:
            require(
                3, start.ref == view.start, "view {} starts from an unknown {}", view.view_epoch, view.start
            )
            what = f"view {view.view_epoch} of {view.peers}"
            self._no_commit_lost(view.history, start, hosts, what, before=view.view_epoch)

    def _nothing_known_is_lost(self, view: View, hosts: Mapping[str, Host]) -> None:
        """What the evicted alone had is lost. What was committed and anybody who goes on remembers is not."""
        start = self.names.get((view.parent, view.start.lineage))
        if start is not None:
            here = {peer: hosts[peer] for peer in view.peers}
            what = f"view {view.view_epoch} of {view.peers} without the evicted {view.evicted}"
            self._no_commit_lost(view.parent, start, here, what, before=view.view_epoch)

    def assigned(self, host: Host, view: View) -> None:
        """Its assignment is a function of the view, its start state and what its rounds' headers said."""
        if host.work is None or host.ledger is None:
            return
        digest = host.work.assignment.digest()
        key = view.view_id, host.ledger.epoch, host.ledger.part
        first, known = self.assignments.setdefault(key, (host.peer_id, digest))
        require(
            1, digest == known, "{} and {} differ in the assignment of view {}", first, host.peer_id, view
        )

    def _no_commit_lost(
        self, history: bytes, model: Model, hosts: Mapping[str, Host], what: str, *, before: int = 0
    ) -> None:
        """Whatever was committed and is still remembered by a member of its view is in the model.

        `before`: of commits in views before this one. Somebody may install a view late that others have left.
        """
        line = self.line.get(history)
        if not line or model.descends_from(line[-1].model):
            return
        for commit in reversed(line):
            if model.descends_from(commit.model):
                break
            if not before and commit.model.descends_from(model):
                continue  # who learns late that it is committed
            if before and commit.model.ref.lineage[0] >= before:
                continue
            for member in commit.voters:
                host = hosts.get(member.peer_id)
                if host is None or host.core is None or host.boot != member.boot:
                    continue
                if host.held.ref.lineage == (0, 0):
                    continue  # it gave up the history, and knows of no round of it
                require(
                    4,
                    not host.held.descends_from(commit.model),
                    "{} goes on from {}, but {} remembers {}, which {} committed",
                    what,
                    model.ref.lineage,
                    host.peer_id,
                    commit.model.ref.lineage,
                    ", ".join(voter.peer_id for voter in commit.voters),
                )

    # -- 2, 3, 13: a round -----------------------------------------------------------------------

    def completed(self, host: Host, view: View, model: Model) -> None:
        self.rounds += 1
        known = self.names.setdefault((view.history, model.ref.lineage), model)
        if known is not model:
            before = [one.parent.ref if one.parent is not None else None for one in (known, model)]
            require(
                3,
                before[0] == before[1],
                "round {} follows on two states: {} and {}",
                model.ref.lineage,
                *before,
            )
            require(13, known.tau == model.tau, "tau after {}: {} and {}", *_both(known, model, "tau"))
            require(
                12, known.ledger == model.ledger, "ledger of {}: {} and {}", *_both(known, model, "ledger")
            )
            require(
                3, known.ref == model.ref, "one lineage names two states: {} and {}", known.ref, model.ref
            )

    def committed(self, view: View, model: Model, hosts: Mapping[str, Host]) -> None:
        line = self.line.setdefault(view.history, [])
        if line and line[-1].model.ref == model.ref and line[-1].voters == view.voters:
            return
        self._no_commit_lost(view.history, model, hosts, f"a commit of {view.peers}")
        line.append(Commit(model, view.voters))
        self.commits += 1
        if self.one_founding:
            first = [self.began[history] for history, commits in self.line.items() if commits]
            roots = [root for root in first if not root.parent and not root.evicted]
            require(2, len(roots) <= 1, "of two foundings, each has committed something: {}", roots)

    # -- 12, 13: a whole run ---------------------------------------------------------------------

    def finish(self, skipping: Iterable[tuple[int, Stretch]] = ()) -> None:
        """Replay what was committed last, with code that shares nothing with the ledger."""
        for line in self.line.values():
            if line:
                replay(line[-1].model, list(skipping))


def replay(model: Model, skipped: list[tuple[int, Stretch]]) -> None:
    """Every sample exactly once in each finished epoch, and tau from the rounds' facts alone."""
    chain: list[Model] = []
    at: Model | None = model
    while at is not None:
        chain.append(at)
        at = at.parent
    chain.reverse()
    tau = chain[0].tau if chain[0].depth == 0 else None
    counted: list[tuple[int, Stretch]] = []
    for state in chain:
        counted += [(state.epoch, stretch) for pieces in state.counted for stretch in pieces]
        if tau is not None and state.depth:
            tau = adacomm.after_round(POLICY, tau, state.facts)
            require(13, tau == state.tau, "tau of {} is {}, not {}", state.ref.lineage, state.tau, tau)
    if chain[0].depth:
        return
    given_up = skipped if skipped else _given_up(chain)
    wrong = check_exact(model.ledger.counts, model.ledger.epoch, counted, given_up)
    require(12, not wrong, "{}", "; ".join(wrong[:5]))


def _given_up(chain: list[Model]) -> list[tuple[int, Stretch]]:
    """What the ledgers of the chain skipped, from one to the next."""
    found: list[tuple[int, Stretch]] = []
    for before, after in itertools.pairwise(chain):
        found += after.ledger.given_up_since(before.ledger, [s for pieces in after.counted for s in pieces])
    return found


def _both(one: Model, other: Model, name: str) -> tuple[object, object, object]:
    return one.ref.lineage, getattr(one, name), getattr(other, name)
