"""A member that leaves between rounds: whoever still reduces its last round ends that first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_dmc.agent import member_desk
from p2p_dmc.agent.run import Run
from p2p_dmc.agent.run_files import RunOptions
from p2p_dmc.agent.work import encode_payload, encode_strikes
from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_messages import Propose, StateRef, Stopped, Verdict
from p2p_dmc.wire.messages import GroupFailed, Withdrawn
from p2p_dmc.wire.trainer_messages import RoundFailed, RoundResult
from tests.agent.helpers import member, payload, peer, plain, surroundings, view_of

ROUND = (1, 4)
"""That is being reduced here."""


class Reducing:
    """Peer 1 in a view with peers 2 and 3; what its agreement hears, in order."""

    def __init__(self, root: Path, mode: str = "training") -> None:
        self.heard: list[Any] = []
        self.run = Run("r", RunOptions(), surroundings(root).services)
        ready = SimpleNamespace(trace=(), persist=None, sends=(), froze=False, installed=None)

        def hears(name: str) -> Any:
            return lambda *facts, **_: (self.heard.append((name, *facts[:1])), ready)[1]

        self.run.agreement = cast(
            Agreement,
            SimpleNamespace(
                withdrawn=hears("withdrawn"),
                receive=hears("receive"),
                wants_change=hears("wants_change"),
                verdict=hears("verdict"),
                tick=hears("tick"),
                left_out=False,
                cut_off_from=(),
            ),
        )
        self.run.view = view_of([payload()] * 3)
        self.rounds = SimpleNamespace(
            reducing=ROUND,
            view=self.run.view,
            frozen=True,
            in_flight=None,
            round_result=self._result,
            group_failed=lambda: None,
        )
        setattr(self.run, mode, self.rounds)

    def _result(self, _: Any) -> None:
        self.heard.append(("complete",))
        self.rounds.reducing = None

    def others_propose(self) -> Propose:
        """Whoever has completed the round makes a view without the leaver."""
        both = (peer(1), peer(3))
        proposal = Propose(
            history=b"h" * 16,
            n=4,
            sender=member(3),
            candidates=both,
            stopped=(),
            voters=both,
            completed=StateRef(lineage=ROUND, digest=b"s" * 16),
            base=None,
            known=None,
            pending=(),
            seen=(),
            payload=encode_payload(payload()),
        )
        self.run.members.message(peer(3), proposal)
        return proposal

    def leaves(self, completed: tuple[int, int], who: int = 2) -> Stopped:
        stopped = Stopped(member=member(who), n=3, withdrawn=True)
        said = Withdrawn(stopped=stopped, reason="it leaves", strikes=encode_strikes([]), completed=completed)
        self.run.members.message(peer(who), said)
        return stopped


@pytest.mark.parametrize("mode", ["training", "learning"])
def test_the_round_that_the_leaver_has_completed_is_completed_first(tmp_path: Path, mode: str) -> None:
    one = Reducing(tmp_path, mode)
    stopped = one.leaves(ROUND)
    proposal = one.others_propose()
    one.run.members.hear_put_off()
    assert one.heard == []
    one.run.trainer_message(plain(RoundResult))
    assert one.heard == [("complete",), ("withdrawn", stopped), ("receive", proposal)]
    one.run.members.hear_put_off(at_once=True)
    assert len(one.heard) == 3, "all is heard once"


def test_a_view_change_for_another_reason_waits_for_nothing(tmp_path: Path) -> None:
    one = Reducing(tmp_path)
    proposal = one.others_propose()
    assert one.heard == [("receive", proposal)]


def test_what_is_put_off_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_desk, "MAX_EARLY_MESSAGES", 3)
    one = Reducing(tmp_path)
    one.leaves(ROUND)
    for _ in range(9):
        one.others_propose()
    one.run.trainer_message(plain(RoundResult))
    assert [what for what, *_ in one.heard] == ["complete", "withdrawn", "receive", "receive"]


@pytest.mark.parametrize("completed", [(1, 3), (0, 9), (0, 0)])
def test_a_round_that_the_leaver_breaks_is_not_waited_for(tmp_path: Path, completed: tuple[int, int]) -> None:
    one = Reducing(tmp_path)
    stopped = one.leaves(completed)
    assert one.heard == [("withdrawn", stopped)]


def test_between_rounds_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    one = Reducing(tmp_path)
    one.rounds.reducing = None
    stopped = one.leaves(ROUND)
    one.run.training = None
    later = one.leaves(ROUND, who=3)
    assert one.heard == [("withdrawn", stopped), ("withdrawn", later)]


def _fails_here(run: Run) -> None:
    run.trainer_message(RoundFailed(view_epoch=1, round=4, reason="connection closed"))


def _fails_elsewhere(run: Run) -> None:
    assert run.view is not None
    said = GroupFailed(view_epoch=1, view_id=run.view.view_id, reason="connection closed")
    run.members.message(peer(3), said)


def _somebody_dies(run: Run) -> None:
    run.verdict(peer(3), 1, Verdict.CRASHED)


@pytest.mark.parametrize("end", [_fails_here, _fails_elsewhere, _somebody_dies])
def test_a_reduction_that_fails_is_waited_for_no_longer(tmp_path: Path, end: Any) -> None:
    """Else the next view would wait for the vote of a peer that is gone."""
    one = Reducing(tmp_path)
    stopped = one.leaves(ROUND)
    one.run.verdict(peer(2), 1, Verdict.REACHABLE)  # it still says something: no news
    assert [what for what, *_ in one.heard] == ["verdict"]
    end(one.run)
    assert one.heard[1] == ("withdrawn", stopped) and len(one.heard) == 3


def test_a_reduction_that_does_not_end_is_waited_for_so_long_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Reducing(tmp_path)
    stopped = one.leaves(ROUND)
    one.run.tick()
    one.others_propose()
    monkeypatch.setattr(member_desk, "PUT_OFF_S", -1.0)
    one.run.tick()
    assert [what for what, *_ in one.heard] == ["tick", "withdrawn", "receive", "tick"]
    assert one.heard[1] == ("withdrawn", stopped)


def test_a_view_that_is_over_hears_it_with_the_next_tick(tmp_path: Path) -> None:
    one = Reducing(tmp_path)
    stopped = one.leaves(ROUND)
    one.run.tick()
    assert [what for what, *_ in one.heard] == ["tick"]
    one.rounds.reducing = None  # frozen by something else
    one.run.tick()
    assert one.heard[1] == ("withdrawn", stopped)
