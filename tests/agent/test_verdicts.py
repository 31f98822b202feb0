"""Verdicts: a crash seen here at once, silence after the time for which this peer may count as crashed itself."""

from __future__ import annotations

import pytest

from p2p_dmc.agent.verdicts import Verdicts
from p2p_dmc.core.agreement_messages import UNKNOWN_BOOT, Verdict
from p2p_dmc.core.membership import MemberEvent, MemberRecord, MemberState, Role
from p2p_dmc.core.membership_messages import MAX_PROMISED
from p2p_dmc.wire.messages import PeerMeta, RunMeta, encode_meta

SUSPICION_MS = 2000
PEER = "ab" * 16


class Listener:
    name = "run"

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, Verdict]] = []
        self.versions: list[int] = []

    def verdict(self, peer_id: str, boot: int, verdict: Verdict, version: int = 0) -> None:
        self.heard.append((peer_id, boot, verdict))
        self.versions.append(version)


def record(state: MemberState = MemberState.ALIVE, boot: int = 3, run_boot: int | None = 3) -> MemberRecord:
    runs = ()
    if run_boot is not None:
        runs = (
            RunMeta(
                name="run",
                boot=run_boot,
                history=b"",
                view_epoch=0,
                ready=True,
                fingerprint=b"",
                samples=0,
                quorum="",
                backend="",
                on_lost="",
            ),
        )
    return MemberRecord(
        peer_id=PEER,
        boot=boot,
        incarnation=0,
        state=state,
        name="peer",
        address="tcp://127.0.0.1:7400",
        bulk_address="tcp://127.0.0.1:7401",
        role=Role.TRAIN,
        meta=encode_meta(PeerMeta(weight=1, runs=runs)),
    )


def dead(one: MemberRecord) -> MemberEvent:
    return MemberEvent(
        peer_id=PEER, old=MemberState.SUSPECT, new=MemberState.DEAD, record=one, reason="silent"
    )


def made() -> tuple[Verdicts, Listener]:
    listener = Listener()
    return Verdicts(lambda: [listener], SUSPICION_MS), listener


def test_a_crash_seen_here_is_told_at_once_and_once() -> None:
    verdicts, listener = made()
    verdicts.crashed(record(), heard_ms=9_900, now_ms=10_000, promised={"run": 7})
    verdicts.event(dead(record()), record(), 9_900, 10_001)
    verdicts.crashed(record(), heard_ms=9_900, now_ms=10_002, promised={"run": 7})
    verdicts.tick(60_000)
    assert listener.heard == [(PEER, 3, Verdict.CRASHED)] and listener.versions == [7]


@pytest.mark.parametrize(
    ("boot", "run_boot", "promised", "verdict"),
    [
        (3, 3, {}, Verdict.CRASHED),  # all that it promised came after that
        (4, 3, {}, Verdict.UNREACHABLE),
        (4, 3, {"another": 9}, Verdict.UNREACHABLE),
        (4, 3, {"run": 0}, Verdict.CRASHED),
        (4, None, {}, Verdict.UNREACHABLE),
        (4, None, {"run": 5}, Verdict.CRASHED),
        (4, 5, {}, Verdict.CRASHED),  # another script under the same name
        (3, 3, {f"r{n}": n for n in range(MAX_PROMISED - 1)}, Verdict.CRASHED),
        (3, 3, {f"r{n}": n for n in range(MAX_PROMISED)}, Verdict.UNREACHABLE),  # one more was not said
    ],
)
def test_promises_of_a_former_agent_may_be_newer_than_those_here(
    boot: int, run_boot: int | None, promised: dict[str, int], verdict: Verdict
) -> None:
    """So the crash of one that has not yet said how new its promises are is only a death."""
    verdicts, listener = made()
    verdicts.crashed(record(boot=boot, run_boot=run_boot), 9_900, 10_000, promised)
    assert listener.heard == [(PEER, UNKNOWN_BOOT if run_boot is None else run_boot, verdict)]
    assert listener.versions == [promised.get("run", 0)]


@pytest.mark.parametrize(("ago_ms", "verdict"), [(1_999, Verdict.CRASHED), (2_000, Verdict.UNREACHABLE)])
def test_a_refusal_a_suspicion_time_after_the_last_contact_is_only_a_death(
    ago_ms: int, verdict: Verdict
) -> None:
    """By then the dead one may have gone on alone."""
    verdicts, listener = made()
    verdicts.crashed(record(), heard_ms=10_000 - ago_ms, now_ms=10_000, promised={"run": 7})
    assert listener.heard == [(PEER, 3, verdict)]


def test_silence_is_held_back_until_a_suspicion_time_after_the_last_word() -> None:
    verdicts, listener = made()
    verdicts.event(dead(record()), record(), heard_ms=9_500, now_ms=10_000)
    verdicts.tick(11_499)
    assert listener.heard == []
    verdicts.tick(11_500)
    assert listener.heard == [(PEER, 3, Verdict.UNREACHABLE)]


def test_what_was_held_back_is_dropped_when_the_peer_is_back() -> None:
    verdicts, listener = made()
    verdicts.event(dead(record()), record(), heard_ms=9_500, now_ms=10_000)
    back = MemberEvent(
        peer_id=PEER, old=MemberState.DEAD, new=MemberState.ALIVE, record=record(), reason="back"
    )
    verdicts.event(back, record(), heard_ms=10_100, now_ms=10_100)
    verdicts.tick(60_000)
    assert listener.heard == [(PEER, 3, Verdict.REACHABLE)]


@pytest.mark.parametrize("refused", [True, False])
def test_one_that_refuted_its_crash_may_still_end(refused: bool) -> None:
    """Something else had refused for it, as a firewall does."""
    verdicts, listener = made()
    verdicts.crashed(record(), heard_ms=9_900, now_ms=10_000, promised={"run": 7})
    verdicts.event(dead(record()), record(), 9_900, 10_000)
    back = MemberEvent(
        peer_id=PEER, old=MemberState.DEAD, new=MemberState.ALIVE, record=record(), reason="refuted"
    )
    verdicts.event(back, record(), heard_ms=10_100, now_ms=10_100)
    if refused:
        verdicts.crashed(record(), heard_ms=99_900, now_ms=100_000, promised={"run": 9})
    verdicts.event(dead(record()), record(), 99_900, 100_000)
    verdicts.tick(160_000)
    last = Verdict.CRASHED if refused else Verdict.UNREACHABLE
    assert listener.heard == [(PEER, 3, v) for v in (Verdict.CRASHED, Verdict.REACHABLE, last)]


def test_a_restarted_peers_old_boot_is_gone_at_once() -> None:
    verdicts, listener = made()
    verdicts.event(dead(record(boot=3)), record(boot=4), heard_ms=9_999, now_ms=10_000)
    assert listener.heard == [(PEER, 3, Verdict.UNREACHABLE)]


def test_a_run_reopened_after_a_stop_knows_its_member_by_the_older_boot() -> None:
    verdicts, listener = made()
    verdicts.replay(listener, [record(boot=5, run_boot=3), record(MemberState.DEAD)], me="cd" * 16)
    assert listener.heard == [(PEER, 3, Verdict.REACHABLE)]


def test_a_peer_that_reopens_a_closed_run_is_reachable_once_it_says_under_which_boot() -> None:
    """Its agent is there, of a later boot, before it has said anything of the run."""
    verdicts, listener = made()
    for old, run_boot in ((None, None), (MemberState.ALIVE, 3)):
        one = record(boot=5, run_boot=run_boot)
        event = MemberEvent(peer_id=PEER, old=old, new=MemberState.ALIVE, record=one, reason="")
        verdicts.event(event, one, 10_000, 10_000)
    verdicts.replay(listener, [record(boot=5, run_boot=None)], me="cd" * 16)
    assert listener.heard == [(PEER, 3, Verdict.REACHABLE)]


def test_the_death_of_a_peer_that_has_not_said_its_boot_yet_is_told() -> None:
    verdicts, listener = made()
    verdicts.event(dead(record(boot=5, run_boot=None)), None, None, 10_000)
    assert listener.heard == [(PEER, UNKNOWN_BOOT, Verdict.UNREACHABLE)]
