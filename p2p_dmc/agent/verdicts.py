"""From membership's events to verdicts for agreement: who is reachable, gone, or was seen to crash (DESIGN.md 5, 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from p2p_dmc.core.agreement_messages import NUMBER_MAX, UNKNOWN_BOOT, Verdict
from p2p_dmc.core.membership import MemberEvent, MemberRecord, MemberState
from p2p_dmc.core.membership_messages import MAX_PROMISED
from p2p_dmc.wire.messages import decode_meta


class Judged(Protocol):
    """A run, as far as verdicts go."""

    name: str

    def verdict(self, peer_id: str, boot: int, verdict: Verdict, version: int = 0) -> None: ...


class Verdicts:
    """One agent's verdicts about the others.

    A crash seen by this agent itself is told at once. Silence is held back until a suspicion time after this agent last
    heard the other one: for so long the other may count this one as crashed, on the word of its acknowledgement.
    That a peer can be reached is told to a run once the peer has said under which boot it takes part in it, and before
    that its death is of whichever boot the run knows: what is said of a later boot would make the words of the one that
    reopens a closed run those of a former life.
    """

    def __init__(self, runs: Callable[[], Iterable[Judged]], suspicion_ms: int) -> None:
        self._runs = runs
        self._suspicion_ms = suspicion_ms
        self._crashed: set[tuple[str, int]] = set()
        self._held: dict[tuple[str, int], tuple[int, MemberRecord]] = {}

    def crashed(
        self, record: MemberRecord, heard_ms: int | None, now_ms: int, promised: Mapping[str, int]
    ) -> None:
        """This agent saw the peer's live host refuse: a crash, if the peer was heard within the last suspicion time.

        After that the peer may have given this agent up, and gone on without it, with nobody left who knows.

        ``promised``: the version of its promises in each run, as said when it was last heard. Of a run that it did not
        speak of then, a former agent of it may have promised what nobody here knows: that is a death only, but for
        a member that began with this agent, and has said all since. Of very many runs an agent speaks of some only.
        """
        key = (record.peer_id, record.boot)
        if key in self._crashed:
            return
        in_contact = heard_ms is not None and now_ms - heard_ms < self._suspicion_ms
        if in_contact:
            self._crashed.add(key)
        self._held.pop(key, None)
        for run in self._runs():
            boot = boot_in(record, run.name)
            began_here = boot is not None and boot >= record.boot and len(promised) < MAX_PROMISED
            known = run.name in promised or began_here
            verdict = Verdict.CRASHED if in_contact and known else Verdict.UNREACHABLE
            run.verdict(
                record.peer_id, UNKNOWN_BOOT if boot is None else boot, verdict, promised.get(run.name, 0)
            )

    def event(
        self, event: MemberEvent, latest: MemberRecord | None, heard_ms: int | None, now_ms: int
    ) -> None:
        """One change of membership. ``latest``: what is known of the peer now, perhaps of a later boot."""
        record = event.record
        key = (record.peer_id, record.boot)
        if event.new is MemberState.ALIVE:
            self._held.pop(key, None)
            self._crashed.discard(key)  # something else had refused
            for run in self._runs():
                _reachable(run, record)
        elif event.new is MemberState.LEFT:
            self._tell(record, Verdict.UNREACHABLE)
        elif event.new is MemberState.DEAD and key not in self._crashed:
            restarted = latest is not None and latest.boot > record.boot
            due_ms = now_ms if restarted or heard_ms is None else heard_ms + self._suspicion_ms
            if due_ms <= now_ms:
                self._tell(record, Verdict.UNREACHABLE)
            else:
                self._held[key] = (due_ms, record)

    def tick(self, now_ms: int) -> None:
        """Tell what was held back long enough."""
        for key in [k for k, (due_ms, _) in self._held.items() if due_ms <= now_ms]:
            self._tell(self._held.pop(key)[1], Verdict.UNREACHABLE)

    def replay(self, run: Judged, members: Iterable[MemberRecord], me: str) -> None:
        """A run has just begun to listen: who can be reached."""
        for record in members:
            if record.state in (MemberState.ALIVE, MemberState.SUSPECT) and record.peer_id != me:
                _reachable(run, record)

    def _tell(self, record: MemberRecord, verdict: Verdict) -> None:
        for run in self._runs():
            boot = boot_in(record, run.name)
            run.verdict(record.peer_id, UNKNOWN_BOOT if boot is None else boot, verdict)


def _reachable(run: Judged, record: MemberRecord) -> None:
    boot = boot_in(record, run.name)
    if boot is not None:
        run.verdict(record.peer_id, boot, Verdict.REACHABLE)


def boot_in(record: MemberRecord, run: str) -> int | None:
    """The boot under which a peer is a member of this run's views: an older one when it reopened a closed run.

    None as long as it says nothing of this run.
    """
    meta = decode_meta(record.meta)
    boots = {one.name: min(one.boot, NUMBER_MAX) for one in meta.runs} if meta else {}
    return boots.get(run)
