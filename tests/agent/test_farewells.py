"""A member that leaves between rounds: whoever still reduces its last round ends that first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2p_dmc.agent import member_desk
from p2p_dmc.agent import run as run_module
from p2p_dmc.agent.run import Run
from p2p_dmc.agent.run_files import RunOptions
from p2p_dmc.agent.state import file_digest
from p2p_dmc.agent.training import Measured, Training
from p2p_dmc.agent.work import Work, encode_payload, encode_strikes
from p2p_dmc.core.agreement_messages import StateRef, Verdict, View
from p2p_dmc.wire.messages import AGREEMENT_MESSAGES, GroupFailed, Withdrawn
from p2p_dmc.wire.trainer_messages import RoundFailed, RoundReady, RoundResult
from tests.agent.helpers import PARAMETERS, POLICY, header_like, payload, peer, state, surroundings
from tests.core.agreement_cluster import Cluster

ROUND = (1, 1)
"""That is being reduced here, and is complete at the others."""
SPEC = b"p" * 16
ALL = range(4)
LAYOUTS = [(3, 1, 2), (3, 3, 1), (4, 2, 1)]
"""How many there are, who is here, who leaves."""


class Scene:
    """Peers that agree by their real cores. The one here has a real run and training, and reduces its first round."""

    def __init__(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, count: int = 3, here: int = 1, leaver: int = 2
    ) -> None:
        self.around = surroundings(root, me=here)
        self.run = Run("r", RunOptions(), self.around.services)
        self.run.keeper.open(PARAMETERS)
        held = state(self.run.keeper.pool(), (0, 0))
        self.run.keeper.hold(held)
        self.net = Cluster("")
        for module in (run_module, member_desk):
            monkeypatch.setattr(module, "now_ms", lambda: self.net.now)
        monkeypatch.setattr(run_module, "out_of_date", lambda *_: "")
        monkeypatch.setattr(member_desk, "PUT_OFF_S", 1e9)
        self.here, self.leaver = peer(here), peer(leaver)
        names = [peer(i) for i in range(1, count + 1)]
        self.others = [name for name in names if name != self.here]
        for name in names:
            self.net.start(name, completed=held.ref)._payload = lambda: encode_payload(payload(ALL))
        for name in names:
            self.net.do(name, self.net[name].found(tuple(names), self.net.now))
        self.net.deliver()
        self.heard: list[Any] = []
        self.views: list[View] = []
        self._stand(held, monkeypatch)
        for name in self.others:
            self.net.do(
                name, self.net[name].complete(StateRef(lineage=ROUND, digest=b"x" * 16), self.net.now)
            )

    def _stand(self, held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The view is open here, and its first round's reduction has begun."""
        run, core = self.run, self.net[self.here]
        view = run.view = core.view
        assert view is not None and view.view_epoch == 1 and len(view.voters) == len(self.others) + 1
        run.agreement, run.desk.up = core, False
        monkeypatch.setattr(run, "_save", lambda *_, **__: True)
        monkeypatch.setattr(run.views, "installed", self._installed)
        complete = run.complete
        monkeypatch.setattr(run, "complete", lambda ref: (self.heard.append("complete"), complete(ref))[1])
        me = view.members.index(run.me)
        run.training = Training(
            host=run,
            view=view,
            me=run.me,
            held=held,
            ledger=held.ledger,
            work=Work.for_view(view, me, held.ledger, keep_leases=False),
            policy=POLICY,
            payload_spec=SPEC,
            measured=Measured(),
            keeper=run.keeper,
        )
        assert run.training.reducing is None
        run.trainer_message(
            RoundReady(view_epoch=1, round=1, samples=0, steps=1, loss_sum_micro=0, compute_us=5, finite=True)
        )
        own = run.training.barrier.own
        assert own is not None
        for name in self.others:
            run.members.message(name, header_like(own, samples=2))
        assert run.training.reducing == ROUND

    def _installed(self, view: View) -> None:
        self.views.append(view)
        self.run.views.end()
        self.run.view = view

    def pass_ms(self, ms: int) -> None:
        """So much time, in which everybody does its work."""
        for _ in range(ms // 100):
            self.net.now += 100
            self.run.tick()
            for name in self.others:
                self.net.do(name, self.net[name].tick(self.net.now))
            self.pump()

    def pump(self) -> None:
        """Until nobody says anything more."""
        for _ in range(200):
            sent, self.around.sent[:] = list(self.around.sent), []
            self.net.mail += [(self.here, to, m) for to, m, _ in sent if isinstance(m, AGREEMENT_MESSAGES)]
            if not self.net.mail:
                return
            batch, self.net.mail = self.net.mail, []
            for source, to, message in batch:
                if to == self.here:
                    self.run.members.message(source, message)
                else:
                    self.net.do(to, self.net[to].receive(message, self.net.now))
        raise AssertionError("they do not come to an end")

    def leaves(self, completed: tuple[int, int] = ROUND, *, told: bool = True) -> None:
        """One of the others leaves, and says so; ``told``: to everybody."""
        stopped = self.net[self.leaver].withdraw()
        said = Withdrawn(stopped=stopped, reason="it leaves", strikes=encode_strikes([]), completed=completed)
        self.run.members.message(self.leaver, said)
        for name in self.others if told else ():
            if name != self.leaver:
                self.net.do(name, self.net[name].withdrawn(stopped, self.net.now))

    def ends_well(self) -> None:
        """The reduction, here."""
        scratch = self.run.keeper.scratch()
        self.run.trainer_message(
            RoundResult(
                view_epoch=1,
                round=1,
                digest=file_digest(scratch),
                comm_us=9,
                bytes_sent=1,
                bytes_received=1,
            )
        )


@pytest.fixture(params=LAYOUTS, ids=str)
def scene(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch, *request.param)


def test_the_round_that_the_leaver_has_completed_is_completed_first(scene: Scene) -> None:
    scene.leaves()
    scene.pass_ms(300)  # the others propose
    assert scene.heard == [] and scene.views == [] and not scene.net[scene.here].frozen
    scene.ends_well()
    scene.pass_ms(300)
    assert scene.heard == ["complete"]
    assert [v.start.lineage for v in scene.views] == [ROUND]
    assert scene.views[0].holders != () and scene.run.me in scene.views[0].members
    held = scene.run.keeper.current
    assert held is not None and held.ref.lineage == ROUND, "nothing has to be fetched"


@pytest.mark.parametrize("completed", [(1, 0), (0, 9), (0, 0), (2, 1)])
def test_a_round_that_the_leaver_breaks_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, completed: tuple[int, int]
) -> None:
    scene = Scene(tmp_path, monkeypatch)
    scene.leaves(completed)
    scene.pass_ms(300)
    assert scene.views and scene.heard == []


def test_the_farewell_of_a_stranger_is_not_put_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch)
    for number in (8, 9):
        scene.leaver = peer(number)
        scene.net.start(scene.leaver, completed=StateRef(lineage=(0, 0), digest=b"s" * 16))
        scene.leaves(told=False)
    assert scene.run.members._put_off == []


def test_what_breaks_the_round_is_heard_behind_what_was_put_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch, 4, 1, 2)
    order: list[str] = []
    monkeypatch.setattr(scene.run, "withdrawn", lambda stopped: order.append(stopped.member.peer_id))
    scene.leaves()
    scene.leaver = peer(3)
    scene.leaves((1, 0))
    assert order == [peer(2), peer(3)] and scene.run.members._put_off == []


def test_a_view_change_for_another_reason_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch)
    for name in scene.others:
        scene.net.do(name, scene.net[name].wants_change("no reason", scene.net.now, at_once=True))
    scene.pass_ms(2000)
    assert scene.views and scene.heard == []


def test_what_is_put_off_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_desk, "MAX_EARLY_MESSAGES", 3)
    scene = Scene(tmp_path, monkeypatch)
    for _ in range(4):
        scene.leaves()
        assert len(scene.run.members._put_off) <= 3
    scene.pass_ms(300)
    assert scene.views, "what is too much for the queue is heard"


def _fails_here(scene: Scene) -> None:
    scene.run.trainer_message(RoundFailed(view_epoch=1, round=1, reason="connection closed"))


def _fails_elsewhere(scene: Scene) -> None:
    assert scene.run.view is not None
    said = GroupFailed(view_epoch=1, view_id=scene.run.view.view_id, reason="connection closed")
    scene.run.members.message(next(n for n in scene.others if n != scene.leaver), said)


FAILURES = pytest.mark.parametrize("fails", [_fails_here, _fails_elsewhere])


@FAILURES
@pytest.mark.parametrize("farewell_first", [True, False])
def test_a_reduction_that_fails_is_waited_for_no_longer(
    scene: Scene, fails: Callable[[Scene], None], farewell_first: bool
) -> None:
    """Else the next view would wait for the vote of a peer that is gone, or for this one's for ever."""
    for step in (scene.leaves, lambda: fails(scene))[:: 1 if farewell_first else -1]:
        step()
    scene.pass_ms(3000)
    assert scene.views and scene.heard == []


@FAILURES
def test_what_failed_is_the_old_view(scene: Scene, fails: Callable[[Scene], None]) -> None:
    """The words that were put off make the next one, of which nothing has failed."""
    scene.leaves()
    scene.pass_ms(500)
    fails(scene)
    scene.pass_ms(8000)
    assert [v.view_epoch for v in scene.views] == [2]
    assert not scene.net[scene.here].change_wanted


def test_a_death_is_not_waited_for(scene: Scene) -> None:
    scene.leaves()
    scene.run.verdict(scene.leaver, 1, Verdict.REACHABLE)  # it still says something: no news
    assert scene.run.members._put_off
    scene.run.verdict(scene.leaver, 1, Verdict.UNREACHABLE)
    assert not scene.run.members._put_off
    scene.pass_ms(500)
    assert scene.views


def test_a_reduction_that_does_not_end_is_waited_for_so_long_and_no_longer(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.leaves()
    scene.pass_ms(500)
    assert not scene.views
    monkeypatch.setattr(member_desk, "PUT_OFF_S", -1.0)
    scene.pass_ms(500)
    assert scene.views and scene.heard == []


def test_a_view_that_is_over_hears_it_with_the_next_tick(scene: Scene) -> None:
    scene.leaves()
    scene.run.views.end()
    scene.pass_ms(500)
    assert scene.views


def test_agreement_hears_nothing_after_the_end(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.leaves()
    scene.pass_ms(300)
    received = len(scene.net.sent)
    scene.run.end.outcome = "finished"
    scene.run.members.hear_put_off(at_once=True)
    assert not scene.run.members._put_off and not scene.views and len(scene.net.sent) == received
    assert not scene.net[scene.here].frozen


def test_whoever_leaves_says_what_it_has_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, monkeypatch)
    scene.ends_well()
    scene.around.sent.clear()
    scene.run.withdraw("it leaves")
    said = [m for _, m, _ in scene.around.sent if isinstance(m, Withdrawn)]
    assert [m.completed for m in said] == [ROUND] * 2
