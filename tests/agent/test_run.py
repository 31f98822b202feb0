"""One run's shell where it is delicate: views that come in the middle of a message, peers that have to go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_dmc.agent.adoption import AdoptionFailedError
from p2p_dmc.agent.run import Run
from p2p_dmc.agent.run_files import RunOptions
from p2p_dmc.agent.work import Strike
from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_messages import Stopped
from p2p_dmc.errors import UserError
from p2p_dmc.wire.messages import Withdrawn
from p2p_dmc.wire.trainer_messages import RoundReady, RoundResult
from tests.agent.helpers import Around, member, payload, peer, plain, surroundings, view_of


def run_of(around: Around) -> Run:
    return Run("r", RunOptions(), around.services)


def in_a_view_of_two(around: Around) -> Run:
    """Peer 1, whose trainer is up, in a view with peer 2 that it has not opened yet."""
    run = run_of(around)
    stopped = Stopped(member=member(1), n=1, withdrawn=True)
    run.agreement = cast(
        Agreement, SimpleNamespace(frozen=False, withdraw=lambda: stopped, history=b"h" * 16)
    )
    run.view = view_of([payload(), payload()])
    run.desk.up = True
    return run


@pytest.mark.parametrize("kind", [RoundReady, RoundResult])
def test_a_view_of_one_may_give_way_to_the_next_within_a_message(tmp_path: Path, kind: type) -> None:
    run = run_of(surroundings(tmp_path))

    def installed(_: Any) -> None:
        run.training = None  # alone, proposing and installing are one

    training = SimpleNamespace(round_ready=installed, round_result=installed, in_flight=(1, 2))
    run.training = cast(Any, training)
    run.trainer_message(plain(kind))
    assert run.training is None and run._in_flight == (1, 2)


def test_nobody_waits_for_a_peer_that_is_refused(tmp_path: Path) -> None:
    around = surroundings(tmp_path)
    run = in_a_view_of_two(around)
    run.desk.refuse("its loss is not finite")
    told = [(to, m.stopped.member) for to, m, _ in around.sent if isinstance(m, Withdrawn)]
    assert told == [(peer(2), member(1))]
    assert run.end.outcome == "refused" and not run.desk.up


@pytest.mark.parametrize(
    "fault", [AdoptionFailedError("no donor"), UserError("no room"), OSError("no slot")], ids=str
)
def test_a_peer_that_cannot_have_the_start_state_leaves_the_others_alone(
    tmp_path: Path, fault: Exception
) -> None:
    around = surroundings(tmp_path)
    run = in_a_view_of_two(around)

    async def fail(*_: object, **__: object) -> None:
        raise fault

    run.keeper.adopt = fail  # type: ignore[method-assign, assignment]
    assert run.view is not None
    asyncio.run(run._open_view(run.view, None, None))
    assert [to for to, m, _ in around.sent if isinstance(m, Withdrawn)] == [peer(2)]
    assert run.end.outcome == "refused" and str(fault) in run.end.detail


def test_a_strike_that_the_ledger_has_is_known_by_its_key(tmp_path: Path) -> None:
    desk = run_of(surroundings(tmp_path)).desk
    strike = Strike(victim="a:1", view_epoch=1, death=1, epoch=0, stretches=((0, 0, 3),))
    desk.learn_strikes((strike, strike))
    desk.forget_strikes({strike.key})
    desk.learn_strikes((strike,))  # told late
    assert desk.strikes == [] and desk.counted == (strike.key,)
    for death in range(200):
        desk.forget_strikes({("b:1", 1, death)})
    assert len(desk.counted) <= 64
