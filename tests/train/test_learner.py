"""A trainer that learns: parked at a safe point, zeros in every reduction, and a round before its first step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2p_dmc.errors import RunStopped
from p2p_dmc.train.collective import CollectiveError, ViewGroup
from p2p_dmc.train.link import AgentLink
from p2p_dmc.wire import codec
from p2p_dmc.wire import trainer_messages as tm
from tests.train.scripted import ScriptedAgent
from tests.train.test_loop import Script, all_stretches, first

OTHERS = 6.0
"""What the other members' weighted deltas sum to."""
QUIET_MS = 150


class Group:
    """In place of gloo: the others add their part; what this trainer brought is kept."""

    def __init__(self) -> None:
        self.brought: list[list[float]] = []
        self.fails = 0

    def all_reduce(self, _: ViewGroup, tensor: torch.Tensor) -> None:
        self.brought.append(tensor.tolist())
        if self.fails:
            self.fails -= 1
            tensor.fill_(float("nan"))  # partly reduced
            raise CollectiveError("a member is gone")
        tensor.add_(OTHERS)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    made = Group()
    monkeypatch.setattr(ViewGroup, "all_reduce", lambda self, tensor: made.all_reduce(self, tensor))
    return made


@pytest.fixture
def agent(tmp_path: Path) -> ScriptedAgent:
    return ScriptedAgent(tmp_path)


def learn(agent: ScriptedAgent) -> None:
    """The next view is one to learn in."""
    agent.view_epoch += 1
    agent.send(
        tm.ViewStarted(
            view_epoch=agent.view_epoch,
            view_id=b"view%d" % agent.view_epoch,
            history=agent.history,
            replaced=(),
            rank=0,
            world=1,
            next_round=agent.round,
            slot_path="",
            digest=b"",
            tau=1,
            epoch=0,
            local=tm.Local.LEARN,
            backend="gloo",
            group_timeout_ms=2000,
        )
    )


def order(agent: ScriptedAgent, divisor: int, **other: Any) -> str:
    """A reduction in which the learner takes part; the slot that it writes into."""
    path = agent.slot()
    facts = {"view_epoch": agent.view_epoch, "round": agent.round, "weight": 0, "divisor": divisor}
    agent.send(tm.Reduce(**(facts | other), slot_path=path))
    return path


def reduce(agent: ScriptedAgent, divisor: int) -> np.ndarray[Any, Any]:
    path = order(agent, divisor)
    result = agent.expect(tm.RoundResult)
    assert (result.view_epoch, result.round, result.digest) == (agent.view_epoch, agent.round, b"")
    agent.round += 1
    return agent.read(path)


def silent(agent: ScriptedAgent) -> bool:
    return not agent._socket.poll(QUIET_MS)


def start(agent: ScriptedAgent) -> None:
    """Up to the first view, which is one to learn in."""
    agent.welcome()
    agent.dataset()
    agent.initial()
    learn(agent)


def run(agent: ScriptedAgent, script: Callable[[ScriptedAgent], None], one: Script) -> None:
    with agent.play(script):
        one.run()


def test_a_trainer_is_parked_at_a_safe_point_and_does_nothing_until_it_trains_again(
    agent: ScriptedAgent, group: Group
) -> None:
    inside, go_on = threading.Event(), threading.Event()
    seen: list[float] = []

    def on_batch() -> None:
        seen.append(one.w)
        if len(one.batches) == 1:
            inside.set()
            assert go_on.wait(10)

    def script(agent: ScriptedAgent) -> None:
        agent.begin(anchor=[1.0])
        agent.lease(*all_stretches(agent))
        assert inside.wait(10)
        agent.send(tm.Park())
        assert silent(agent)  # in the middle of a step nobody listens
        go_on.set()
        agent.expect(tm.Parked)
        learn(agent)
        assert silent(agent) and len(one.batches) == 1
        assert reduce(agent, 3).tolist() == [2.0]
        assert reduce(agent, 12).tolist() == [0.5]
        agent.view([9.0], tm.Local.RESET)
        ready = agent.expect(tm.RoundReady)  # the others stand at a barrier
        assert (ready.samples, ready.steps, ready.finite) == (0, 0, True)
        assert len(one.batches) == 1
        candidate, _ = agent.reduce(weight=0, divisor=4)
        assert candidate.tolist() == [9.0 - OTHERS / 4]
        agent.complete()
        agent.lease(*first(agent, 4))  # what it had in hand is others' now
        assert agent.expect(tm.RoundReady).samples == 4
        agent.send(tm.TrainerStop(reason=""))

    one = Script(agent, on_batch=on_batch)
    with pytest.raises(RunStopped):
        run(agent, script, one)
    assert one.after_step[0] != 1.0  # the step that was under way was done
    assert seen[1] == 7.5  # and is of no account: the first one after that begins at the anchor
    assert group.brought == [[0.0]] * 3


def test_a_joiner_learns_before_it_takes_a_batch(agent: ScriptedAgent, group: Group) -> None:
    def script(agent: ScriptedAgent) -> None:
        start(agent)
        assert reduce(agent, 2).tolist() == [3.0]
        learn(agent)
        assert reduce(agent, 1).tolist() == [6.0]
        assert silent(agent) and not one.batches
        agent.view([4.0], tm.Local.RESET)
        assert agent.expect(tm.RoundReady).samples == 0
        agent.reduce(weight=0, divisor=6)
        agent.complete()
        agent.lease((0, 0, 2))
        agent.expect(tm.LeaseRequest)
        agent.finish([7.0])

    seen: list[float] = []
    one = Script(agent, on_batch=lambda: seen.append(one.w))
    run(agent, script, one)
    assert seen == [3.0]


def test_what_a_learner_has_kept_is_unmapped_once_it_trains(agent: ScriptedAgent, group: Group) -> None:
    """Its agent gives the memory back, which is the machine's again only then."""

    def script(agent: ScriptedAgent) -> None:
        start(agent)
        slots = [order(agent, divisor) for divisor in (2, 1)]
        for _ in slots:
            agent.expect(tm.RoundResult)
        assert all(slot in Path("/proc/self/maps").read_text() for slot in slots)
        agent.view([4.0], tm.Local.RESET)
        agent.expect(tm.RoundReady)
        assert not any(slot in Path("/proc/self/maps").read_text() for slot in slots)
        agent.finish([7.0])

    run(agent, script, Script(agent))


def test_what_a_learner_has_itself_never_enters_a_reduction(agent: ScriptedAgent, group: Group) -> None:
    """Zeros, and not zero times a delta: this trainer's own parameters are NaN."""

    def script(agent: ScriptedAgent) -> None:
        start(agent)
        assert reduce(agent, 3).tolist() == [2.0]
        assert reduce(agent, 3).tolist() == [2.0]
        agent.send(tm.TrainerStop(reason=""))

    one = Script(agent)
    with torch.no_grad():
        one.model.w.fill_(float("nan"))
    with pytest.raises(RunStopped):
        run(agent, script, one)
    assert group.brought == [[0.0], [0.0]]


def test_a_reduction_that_fails_is_said_and_the_next_view_has_another(
    agent: ScriptedAgent, group: Group
) -> None:
    group.fails = 1

    def script(agent: ScriptedAgent) -> None:
        start(agent)
        path = order(agent, 3)
        failed = agent.expect(tm.RoundFailed)
        assert (failed.view_epoch, failed.round) == (agent.view_epoch, agent.round)
        assert not Path(path).exists() or agent.read(path).tolist() == [0.0]
        learn(agent)
        assert reduce(agent, 3).tolist() == [2.0]
        agent.send(tm.TrainerStop(reason=""))

    with pytest.raises(RunStopped):
        run(agent, script, Script(agent))
    assert group.brought == [[0.0], [0.0]]  # nothing of what the failure left behind


def test_the_reduction_of_another_view_is_none_of_its(agent: ScriptedAgent, group: Group) -> None:
    def script(agent: ScriptedAgent) -> None:
        start(agent)
        learn(agent)
        order(agent, 3, view_epoch=agent.view_epoch - 1)
        assert reduce(agent, 3).tolist() == [2.0]
        agent.send(tm.TrainerStop(reason=""))

    with pytest.raises(RunStopped):
        run(agent, script, Script(agent))
    assert len(group.brought) == 1


def test_one_that_waits_for_samples_is_parked_and_begins_with_a_round(
    agent: ScriptedAgent, group: Group
) -> None:
    """The loader's wait is a safe point, too: whoever was left out there does not begin with local steps."""

    def script(agent: ScriptedAgent) -> None:
        agent.begin(anchor=[1.0])
        agent.expect(tm.LeaseRequest)
        agent.send(tm.Park())
        agent.expect(tm.Parked)
        learn(agent)
        agent.expect(tm.LeaseRequest)
        reduce(agent, 3)
        agent.view([8.0], tm.Local.RESET)
        agent.send(tm.Lease(epoch=0, braids=(((0, 0, 2),),)))  # the answer to what it asked before
        assert agent.expect(tm.RoundReady).samples == 0
        agent.reduce(weight=0, divisor=3)
        agent.complete(tau=1)
        assert agent.expect(tm.RoundReady).samples == 2
        agent.send(tm.TrainerStop(reason=""))

    one = Script(agent)
    with pytest.raises(RunStopped):
        run(agent, script, one)
    assert len(one.batches) == 1


def test_one_that_stands_at_a_barrier_is_parked_and_comes_to_the_next(
    agent: ScriptedAgent, group: Group
) -> None:
    """Left out with its header said: in the view in which it trains again it says one without samples."""

    def script(agent: ScriptedAgent) -> None:
        agent.begin(anchor=[1.0])
        agent.lease(*all_stretches(agent))
        assert agent.expect(tm.RoundReady).samples == 4
        agent.send(tm.Park())
        agent.expect(tm.Parked)
        learn(agent)
        reduce(agent, 3)
        agent.view([8.0], tm.Local.RESET)
        assert agent.expect(tm.RoundReady).samples == 0
        agent.reduce(weight=0, divisor=3)
        agent.complete()
        agent.lease(*first(agent, 4))
        assert (
            agent.expect(tm.RoundReady).samples == 4
        )  # of its steps since then, one round's: no second empty one
        agent.send(tm.TrainerStop(reason=""))

    one = Script(agent)
    with pytest.raises(RunStopped):
        run(agent, script, one)
    assert len(one.batches) == 4


def test_a_view_that_follows_at_once_expects_the_same_round(agent: ScriptedAgent, group: Group) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.welcome()
        agent.dataset()
        agent.initial()
        learn(agent)
        agent.view([4.0], tm.Local.RESET)
        agent.view([5.0], tm.Local.RESET)
        ready = agent.expect(tm.RoundReady)
        if ready.view_epoch < agent.view_epoch:  # it was quicker than the second view
            ready = agent.expect(tm.RoundReady)
        assert (ready.view_epoch, ready.samples) == (agent.view_epoch, 0)
        agent.reduce(weight=0, divisor=3)
        agent.complete()
        agent.expect(tm.LeaseRequest)
        agent.finish([7.0])

    one = Script(agent)
    run(agent, script, one)
    assert not one.batches and one.w == 7.0


def test_a_view_to_learn_in_parks_by_itself(
    agent: ScriptedAgent, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, arrived = threading.Event(), threading.Event()
    receive = AgentLink._receive

    def look_and_receive(link: AgentLink, data: bytes) -> None:
        receive(link, data)
        if getattr(codec.decode(data), "local", None) is tm.Local.LEARN:
            arrived.set()

    monkeypatch.setattr(AgentLink, "_receive", look_and_receive)

    def on_batch() -> None:
        inside.set()
        assert arrived.wait(10)

    def script(agent: ScriptedAgent) -> None:
        agent.begin(anchor=[1.0])
        agent.lease(*all_stretches(agent))
        assert inside.wait(10)
        learn(agent)
        assert reduce(agent, 3).tolist() == [2.0]
        assert silent(agent) and len(one.batches) == 1
        agent.send(tm.TrainerStop(reason=""))

    one = Script(agent, on_batch=on_batch)
    with pytest.raises(RunStopped):
        run(agent, script, one)
