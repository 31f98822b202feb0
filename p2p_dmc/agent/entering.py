"""How a ready trainer gets into a view: found one, ask to be let in, or wait and say why (DESIGN.md section 6)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from p2p_dmc.agent import run_files
from p2p_dmc.agent.services import Services
from p2p_dmc.core.membership import MemberState
from p2p_dmc.wire.messages import REPLACED_TOLD, RunMeta, decode_meta

if TYPE_CHECKING:
    from p2p_dmc.agent.run import Run


ASKED_AT_ONCE = 8
"""Others that a newcomer asks to be let in, in turn: a view is left when most of its voters have a reason to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPeer:
    """Another live peer's word about this run."""

    peer_id: str
    meta: RunMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What to do now; at most one of the first four is set."""

    found: tuple[str, ...] = ()
    ask: tuple[str, ...] = ()
    court: bytes = b""  # history to join instead of the courting one, of which nobody is here
    yield_to: bytes = b""  # history to give mine up for: it has committed more, or took mine's place
    replaced: bool = False  # it took mine's place
    waiting: str = ""


def others(services: Services, run: str) -> tuple[OtherPeer, ...]:
    """Live peers that say something of this run, by peer_id."""
    found = []
    for record in services.members():
        if record.state not in (MemberState.ALIVE, MemberState.SUSPECT) or record.peer_id == services.peer_id:
            continue
        meta = decode_meta(record.meta)
        for run_meta in meta.runs if meta else ():
            if run_meta.name == run:
                found.append(OtherPeer(peer_id=record.peer_id, meta=run_meta))
    return tuple(found)


def run_meta(run: Run) -> RunMeta:
    """What this peer says of a run to everybody, for the others' decisions of this kind."""
    held, rounds, desk = run.keeper.current, run.rounds, run.desk
    standing = rounds is not None and not run.end.outcome
    committed = held is not None and held.ref.lineage > (0, 0)
    parts = desk.data.mixture.parts if desk.data is not None else ()
    return RunMeta(
        name=run.name,
        boot=run.me.boot,
        history=run.history,
        view_epoch=rounds.view.view_epoch if standing and rounds is not None else 0,
        ready=desk.up and not run.end.outcome,
        fingerprint=run_files.fingerprint_digest(desk.fingerprint) if desk.fingerprint else b"",
        dataset=b"".join(part.manifest.digest for part in parts),
        samples=held.ledger.samples_total if held is not None and committed else 0,
        quorum=desk.quorum,
        backend=desk.backend,
        on_lost=desk.on_lost,
        replaced=tuple(r.history for r in run.promises.replaced if r.evicted)[:REPLACED_TOLD],
    )


def speaks_for(run: Run, sender: str, history: bytes) -> bool:
    """Whether a peer is in the founding of the run that this one is in, and speaks of that one.

    It is if it is in the newest view here, as the one that it was then, or if it says so to everybody. A newcomer is in
    none: it means the one that it was asked to join, if somebody of that is here, else the one that it would ask.
    """
    metas = {other.peer_id: other.meta for other in others(run.services, run.name)}
    if not history or history != (run.history or _meant(tuple(metas.values()), run.promises.courted)):
        return False
    meta, view = metas.get(sender), run.view
    if meta is not None and meta.history == history:
        return True
    boots = (
        {member.peer_id: member.boot for member in view.members} if view and view.history == history else {}
    )
    return sender in boots and (meta is None or meta.boot == boots[sender])


def _meant(metas: Sequence[RunMeta], courted: bytes = b"") -> bytes:
    """Which founding of a run a newcomer means: of those that it hears of the one that is the furthest; b"" for none.

    Only one, and not one whose place another took: whoever asks and then does not answer costs them a view.
    """
    begun = [meta for meta in metas if meta.history]
    if courted in (meta.history for meta in begun):
        return courted
    replaced = {old for meta in begun for old in meta.replaced}
    left = [meta for meta in begun if meta.history not in replaced] or begun
    return max(((meta.samples, meta.history) for meta in left), default=(0, b""))[1]


def pinned_version(run: Run, name: str) -> str | None:
    """NAME@DIGEST of the version of a data set with which this run has begun, by its record here or others' word."""
    for part in run_files.parts_of(run_files.load_run(run.folder).get("fingerprint", ())):
        if part.name == name:
            return f"{name}@{part.digest}"
    begun = [other.meta for other in others(run.services, run.name) if other.meta.history]
    told = [digest for meta in begun for digest in meta.datasets]
    known = {digest: run.services.data.manifest(digest) for digest in told}
    unknown = [digest for digest in told if known[digest] is None]  # its manifest may be on its way
    named = [digest for digest, manifest in known.items() if manifest is not None and manifest.name == name]
    return next((f"{name}@{digest.hex()}" for digest in [*named, *unknown]), None)


class Entrance:
    """Decides from gossip. ``clock``: seconds, monotonic."""

    def __init__(
        self,
        min_peers: int,
        found_still_ms: int,
        join_retry_ms: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._min_peers = min_peers
        self._still_s = found_still_ms / 1000
        self._retry_s = join_retry_ms / 1000
        self._clock = clock
        self._ready_set: tuple[str, ...] = ()
        self._still_since_s = 0.0
        self._asked_s = 0.0
        self._asked = 0

    def step(
        self, mine: RunMeta, me: str, peers: Sequence[OtherPeer], seed_known: bool, courted: bytes = b""
    ) -> Step:
        """One look at who is there. Call now and then while no view stands here and the trainer is ready.

        Args:
            courted: the history that this newcomer was asked to join; b"" for one that was not, or has been in a view.
        """
        rivals = self.rivals(mine, peers)
        if rivals is not None:
            return rivals
        standing = self._standing(peers, mine.history or courted)
        if standing:
            return self._ask(standing)
        if courted and not mine.history:
            return self._courted(courted, peers)
        elders = [p for p in peers if p.meta.history and p.meta.samples and not self._fits(mine, p)]
        if elders and not mine.history:
            return replace(self._ask(elders), waiting=f"peer {elders[0].peer_id} has begun it and pauses")
        ready = tuple(sorted([me, *(p.peer_id for p in peers if self._fits(mine, p))]))
        now_s = self._clock()
        if ready != self._ready_set:
            self._ready_set, self._still_since_s = ready, now_s
        if not seed_known:
            return Step(waiting="no seed has answered yet")
        if len(ready) < self._min_peers and not mine.history:  # one that has begun goes on by its quorum
            return Step(
                waiting=f"{len(ready)} of at least {self._min_peers} trainers are ready (--min-peers)"
            )
        if now_s - self._still_since_s < self._still_s:
            return Step()
        misfits = [p.peer_id for p in peers if p.meta.ready and p.meta.fingerprint != mine.fingerprint]
        if misfits and min(misfits) < ready[0]:
            return Step()  # theirs is founded first; asking to join it names the difference
        return Step(found=ready)

    def _standing(self, peers: Sequence[OtherPeer], history: bytes) -> list[OtherPeer]:
        """Those with a view of that history; for a newcomer whom none courts, of the one that it means."""
        standing = [p for p in peers if p.meta.view_epoch > 0]
        history = history or _meant([p.meta for p in standing])
        return [p for p in standing if p.meta.history == history]

    def _courted(self, courted: bytes, peers: Sequence[OtherPeer]) -> Step:
        """No view of the history that courts this newcomer stands. It founds nothing beside that.

        While somebody who is in it can be heard, it may go on any moment. If nobody can, and another one goes on, then
        that is the run by now: it may have been founded where nobody knew of the first one, or have taken its place.
        Should both be heard again, their members settle it (`rivals`); this peer is in one of them, as a learner first.
        Whoever has no view may have finished the run, and says so when it is asked.
        """
        here = [p for p in peers if p.meta.history == courted]
        if here:
            return replace(self._ask(here), waiting=f"peer {here[0].peer_id} has begun it and pauses")
        others = self._standing(peers, b"")
        if others:
            return Step(court=others[0].meta.history)
        waiting = f"nobody is here of those that have begun it (history {courted.hex()[:8]})"
        return replace(self._ask([p for p in peers if p.meta.history]), waiting=waiting)

    def _fits(self, mine: RunMeta, other: OtherPeer) -> bool:
        same_history = not mine.history or not other.meta.history or other.meta.history == mine.history
        return other.meta.ready and same_history and other.meta.fingerprint == mine.fingerprint

    def _ask(self, standing: Sequence[OtherPeer]) -> Step:
        now_s = self._clock()
        if now_s - self._asked_s < self._retry_s:
            return Step()
        self._asked_s = now_s
        self._asked += 1
        turn = ASKED_AT_ONCE * (self._asked - 1) % max(1, len(standing))
        return Step(ask=tuple(p.peer_id for p in [*standing[turn:], *standing[:turn]][:ASKED_AT_ONCE]))

    def rivals(self, mine: RunMeta, peers: Sequence[OtherPeer]) -> Step | None:
        """Whether somebody continues another history of this run; None if not. Ask now and then, in a view too.

        Different histories never merge by lineage: one whose place another took by eviction yields, one that has
        committed nothing, and with quorum "any" the one with fewer samples committed. Otherwise both name each other,
        and the user chooses. A learner has not got what its history has committed: what others say of it counts.
        """
        strangers = [p for p in peers if mine.history and p.meta.history not in (b"", mine.history)]
        successors = [p for p in strangers if mine.history in p.meta.replaced]
        if successors:
            newest = max(successors, key=lambda p: (p.meta.samples, p.meta.history))
            return Step(yield_to=newest.meta.history, replaced=True)
        strangers = [p for p in strangers if p.meta.history not in mine.replaced]  # those yield
        if not strangers:
            return None
        best = max(strangers, key=lambda p: (p.meta.samples, p.meta.history))
        samples = max([mine.samples, *(p.meta.samples for p in peers if p.meta.history == mine.history)])
        ahead = (best.meta.samples, best.meta.history) > (samples, mine.history)
        if ahead and (samples == 0 or mine.quorum == "any"):
            return Step(yield_to=best.meta.history)
        if best.meta.samples == 0 or mine.quorum == "any":
            return Step()  # the other one yields
        return Step(
            waiting=f"peer {best.peer_id[:8]} continues another history of this run ({best.meta.history.hex()[:8]}, "
            f"{best.meta.samples} samples; here {mine.history.hex()[:8]}, {samples}): "
            "stop one of the two, or give one another --run name"
        )
