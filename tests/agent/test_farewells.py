"""A member that leaves between rounds: whoever still reduces its last round ends that first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_dmc.agent.run import Run
from p2p_dmc.agent.run_files import RunOptions
from p2p_dmc.agent.work import encode_strikes
from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_messages import Stopped, Verdict
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

    def leaves(self, completed: tuple[int, int], who: int = 2) -> Stopped:
        stopped = Stopped(member=member(who), n=3, withdrawn=True)
        said = Withdrawn(stopped=stopped, reason="it leaves", strikes=encode_strikes([]), completed=completed)
        self.run.members.message(peer(who), said)
        return stopped


@pytest.mark.parametrize("mode", ["training", "learning"])
def test_the_round_that_the_leaver_has_completed_is_completed_first(tmp_path: Path, mode: str) -> None:
    one = Reducing(tmp_path, mode)
    stopped = one.leaves(ROUND)
    one.run.members.hear_farewells()
    assert one.heard == []
    one.run.trainer_message(plain(RoundResult))
    assert one.heard == [("complete",), ("withdrawn", stopped)]
    one.run.members.hear_farewells(at_once=True)
    assert len(one.heard) == 2, "it is heard once"


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


def test_a_view_that_is_over_hears_it_with_the_next_tick(tmp_path: Path) -> None:
    one = Reducing(tmp_path)
    stopped = one.leaves(ROUND)
    one.run.tick()
    assert [what for what, *_ in one.heard] == ["tick"]
    one.rounds.reducing = None  # frozen by something else
    one.run.tick()
    assert one.heard[1] == ("withdrawn", stopped)
