"""The whole trainer against a scripted agent: what a script does, what the agent hears, what the parameters
are.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import p2p_dmc as dmc
from p2p_dmc.agent.training import check_header
from p2p_dmc.core.ledger import sample_permutation
from p2p_dmc.data.samples import read_index
from p2p_dmc.errors import RunStopped, UserError
from p2p_dmc.train import state
from p2p_dmc.train.rounds import _micro
from p2p_dmc.train.session import Peer
from p2p_dmc.wire import codec
from p2p_dmc.wire import trainer_messages as tm
from p2p_dmc.wire.messages import RoundHeader
from tests.agent.helpers import plain
from tests.train.scripted import ScriptedAgent

LR = 0.125  # powers of two: the oracle's arithmetic is exact


class Weight(torch.nn.Module):
    """One number w; the loss of sample x is w * x, so a step over a batch moves w by -LR * mean(x)."""

    def __init__(self, w: float = 1.0) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([w]))


class Script:
    """A user's script on the data set "numbers", as an object that a test can look into."""

    def __init__(self, agent: ScriptedAgent, **settings: Any) -> None:
        self.agent = agent
        self.model = Weight()
        self.batches: list[list[float]] = []
        self.after_step: list[float] = []
        self.batch_size = settings.pop("batch_size", 2)
        self.epochs = settings.pop("epochs", 1)
        self.tau = settings.pop("tau", 2)
        self.inner: Any = settings.pop("inner", lambda p: torch.optim.SGD(p, lr=LR))
        self.loss: Any = settings.pop("loss", lambda x: (self.model.w * x).mean())
        self.decode: Any = settings.pop("decode", lambda sample: float(sample["txt"]))
        self.outer: Any = settings.pop("outer", "average")
        self.on_batch: Any = settings.pop("on_batch", lambda: None)
        assert not settings

    @property
    def w(self) -> float:
        return float(self.model.w.detach())

    def run(self) -> Peer:
        with dmc.connect(self.agent.environment) as peer:
            data = peer.dataset("numbers")
            self.optimizer = dmc.Optimizer(
                self.inner(self.model.parameters()), peer, tau=self.tau, outer=self.outer
            )
            for x in peer.loader(data, self.batch_size, epochs=self.epochs, decode=self.decode):
                self.batches.append(x.tolist())
                self.on_batch()
                self.optimizer.zero_grad()
                loss = self.loss(x)
                loss.backward()
                self.optimizer.step(loss)
                self.after_step.append(self.w)
        return peer


@pytest.fixture
def agent(tmp_path: Path) -> ScriptedAgent:
    return ScriptedAgent(tmp_path)


def expected_values(agent: ScriptedAgent, *stretches: tuple[int, int, int], epoch: int = 0) -> list[float]:
    """The numbers at these positions, worked out from the data set's definition."""
    numbers = []
    for shard, lo, hi in stretches:
        count = agent.manifest.shards[shard].sample_count
        order = sample_permutation(agent.manifest.digest, 0, epoch, shard, count)
        index = read_index(agent.store.path(agent.manifest.digest, shard))
        keys = [index.key(order[place]) for place in range(lo, hi)]
        numbers += [float(key.removeprefix("s")) for key in keys]
    return numbers


def first(agent: ScriptedAgent, count: int) -> list[tuple[int, int, int]]:
    """The first positions of the epoch's order."""
    chosen = []
    for shard, lo, hi in all_stretches(agent):
        chosen += [(shard, lo, min(hi, lo + count))] if count else []
        count -= min(hi - lo, count)
    return chosen


def all_stretches(agent: ScriptedAgent) -> list[tuple[int, int, int]]:
    return [(shard, 0, count) for shard, count in enumerate(agent.manifest.sample_counts)]


def test_a_run_of_two_epochs_alone(agent: ScriptedAgent) -> None:
    said: list[tm.RoundReady] = []
    one = Script(agent, batch_size=3, epochs=2)
    with agent.play(lambda agent: said.extend(agent.lead(epochs=2))):
        peer = one.run()
    assert [spec.name for spec in agent.parameters] == ["w"]
    assert len(agent.manifest.shards) > 1  # batches did span stretches
    for epoch in range(2):
        count = len(one.batches) // 2
        numbers = [x for batch in one.batches[epoch * count : (epoch + 1) * count] for x in batch]
        assert numbers == expected_values(agent, *all_stretches(agent), epoch=epoch)
        assert Counter(numbers) == Counter(map(float, range(10)))  # each sample once, none padded
    assert [len(batch) for batch in one.batches] == [3, 3, 3, 1] * 2
    assert [ready.samples for ready in said] == [6, 4] * 2
    assert all(ready.finite for ready in said)
    assert peer.is_first
    oracle = 1.0 - LR * sum(float(np.mean(batch)) for batch in one.batches)
    assert one.w == pytest.approx(oracle, rel=1e-5)
    assert one.w == one.after_step[-1]


def test_the_first_views_anchor_is_the_initial_model(agent: ScriptedAgent) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.begin(anchor=[5.0], local=tm.Local.KEEP)  # another peer's parameters, whatever it says of ours
        agent.lease((0, 0, 2))
        agent.expect(tm.LeaseRequest)
        agent.finish([7.0])

    one = Script(agent, on_batch=lambda: seen.append(one.w))
    seen: list[float] = []
    with agent.play(script):
        one.run()
    assert seen == [5.0]
    assert one.w == 7.0  # and the last one is the final model


def test_weight_and_divisor_are_the_agents(agent: ScriptedAgent) -> None:
    result: list[np.ndarray[Any, Any]] = []

    def script(agent: ScriptedAgent) -> None:
        agent.begin(anchor=[1.0])
        agent.lease((0, 0, 2))
        agent.end()
        ready = agent.expect(tm.RoundReady)
        assert (ready.samples, ready.steps) == (2, 1)
        result.append(agent.reduce(weight=2, divisor=8)[0])  # as if others had 6 and stood still
        agent.complete()
        agent.expect(tm.LeaseRequest)
        agent.finish(result[0])

    one = Script(agent)
    with agent.play(script):
        one.run()
    moved = LR * np.mean(one.batches[0])
    assert result[0].tolist() == [1.0 - moved * 2 / 8]


def test_the_loss_is_summed_over_samples(agent: ScriptedAgent) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.begin(anchor=[2.0])
        agent.lease((0, 0, 1), (1, 0, 2))
        agent.expect(tm.LeaseRequest)
        agent.send(tm.LeaseEnd(epoch=0, finished=False))
        ready = agent.expect(tm.RoundReady)
        assert ready.samples == 3
        assert ready.loss_sum_micro == round(sum(len(b) * 0.75 for b in one.batches) * 1e6)
        assert ready.compute_us > 0
        agent.send(tm.TrainerStop(reason="stopped"))

    one = Script(agent, loss=lambda x: 0.0 * one.model.w.sum() + 0.75)
    with agent.play(script), pytest.raises(RunStopped):
        one.run()


@pytest.mark.parametrize("local", [local for local in tm.Local if local is not tm.Local.LEARN])
def test_a_view_at_the_barrier(agent: ScriptedAgent, local: tm.Local) -> None:
    """What each kind of view to train in leaves of local parameters, samples and leases."""
    second: list[tm.RoundReady] = []

    def script(agent: ScriptedAgent) -> None:
        agent.begin(anchor=[1.0])
        agent.lease(*all_stretches(agent))
        first = agent.expect(tm.RoundReady)
        assert (first.samples, first.steps, first.view_epoch) == (4, 2, 1)
        agent.view([1.0] if local is tm.Local.KEEP else [9.0], local)
        second.append(agent.expect(tm.RoundReady))
        agent.reduce(second[0].samples, second[0].samples)
        agent.complete()
        if local is tm.Local.RESET:
            agent.lease((0, 0, 2))  # leases were dropped: it asks for others
            agent.send(tm.TrainerStop(reason=""))
        else:
            assert agent.expect(tm.RoundReady).samples == 4  # it goes on with those it had
            agent.send(tm.TrainerStop(reason=""))

    one = Script(agent)
    with agent.play(script), pytest.raises(RunStopped):
        one.run()
    assert second[0].view_epoch == 2
    if local is tm.Local.KEEP:
        assert (second[0].samples, second[0].steps) == (4, 2)
        assert one.after_step[1] == one.after_step[0] - LR * np.mean(one.batches[1])
    else:
        assert (second[0].samples, second[0].steps, second[0].loss_sum_micro) == (0, 0, 0)
        assert one.after_step[1] == 9.0  # local := anchor; nothing weighed, so the anchor stayed
    if local is tm.Local.COUNTED:
        numbers = [x for batch in one.batches for x in batch]
        assert numbers[:8] == expected_values(agent, *all_stretches(agent))[:8]


def test_a_view_that_changes_nothing_here_costs_nothing_of_the_models_size(
    agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The anchor that this trainer wrote is not read again, nor the delta made again that no reduction has touched."""
    done: list[str] = []
    candidate = ""

    def counting(owner: Any, name: str) -> None:
        whole = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *words: done.append(name) or whole(*words))

    def script(agent: ScriptedAgent) -> None:
        nonlocal candidate
        agent.begin(anchor=[1.0])
        agent.lease(*first(agent, 4))
        agent.expect(tm.RoundReady)
        agent.reduce(4, 4)
        candidate = str(agent.folder / f"slot{agent._slots}")
        agent.complete()
        agent.lease(*first(agent, 4))
        agent.expect(tm.RoundReady)
        done.clear()
        agent.view(None, tm.Local.KEEP, slot=candidate)
        agent.expect(tm.RoundReady)
        assert done == []
        agent.send(tm.CancelGroup(view_epoch=agent.view_epoch))
        agent.view(agent.read(candidate), tm.Local.KEEP)  # the same parameters elsewhere: who knows
        agent.expect(tm.RoundReady)
        assert done == ["read_slot"]
        agent.reduce(4, 4)
        agent.refuse()  # that has used the delta up
        agent.view(None, tm.Local.KEEP, slot=str(agent.folder / f"slot{agent._slots - 1}"))
        agent.expect(tm.RoundReady)
        assert done == ["read_slot", "gather"]
        agent.send(tm.TrainerStop(reason=""))

    counting(state, "read_slot")
    counting(state.FlatParameters, "gather")
    with agent.play(script), pytest.raises(RunStopped):
        Script(agent).run()


def test_a_reset_between_rounds_drops_the_batch_in_hand(agent: ScriptedAgent) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.begin(anchor=[1.0])
        agent.lease((0, 0, 2))
        agent.expect(tm.LeaseRequest)  # for the second batch
        agent.view([4.0], tm.Local.RESET)
        agent.lease((1, 0, 2))
        agent.expect(tm.LeaseRequest)
        agent.send(tm.LeaseEnd(epoch=0, finished=False))
        ready = agent.expect(tm.RoundReady)
        assert (ready.samples, ready.steps) == (2, 1)
        agent.send(tm.TrainerStop(reason=""))

    one = Script(agent, on_batch=lambda: seen.append(one.w))
    seen: list[float] = []
    with agent.play(script), pytest.raises(RunStopped):
        one.run()
    assert seen == [1.0, 4.0]


def test_a_refused_result_changes_nothing(agent: ScriptedAgent) -> None:
    candidates: list[list[float]] = []

    def script(agent: ScriptedAgent) -> None:
        anchor = agent.begin(anchor=[1.0])
        agent.lease(*first(agent, 4))
        agent.expect(tm.RoundReady)
        candidates.append(agent.reduce(4, 4)[0].tolist())
        agent.refuse()
        agent.view(anchor, tm.Local.KEEP)
        assert agent.expect(tm.RoundReady).samples == 4
        candidates.append(agent.reduce(4, 4)[0].tolist())  # the same delta again, from the same anchor
        agent.complete()
        agent.expect(tm.LeaseRequest)
        agent.send(tm.TrainerStop(reason=""))

    one = Script(agent)
    with agent.play(script), pytest.raises(RunStopped):
        one.run()
    assert candidates[0] == candidates[1] == [one.w]


def test_late_words_of_another_view_are_ignored(agent: ScriptedAgent) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.begin(anchor=[1.0])
        agent.lease(*first(agent, 4))
        agent.expect(tm.RoundReady)
        agent.send(tm.Reduce(view_epoch=7, round=1, weight=4, divisor=4, slot_path="/nowhere"))
        agent.send(
            tm.RoundComplete(view_epoch=1, round=9, steps=1, limit_us=0, epoch=0, reset=True, retake=False)
        )
        agent.send(tm.LeaseEnd(epoch=0, finished=False))
        agent.reduce(4, 4)
        agent.complete()
        agent.expect(tm.LeaseRequest)
        agent.send(tm.TrainerStop(reason=""))

    with agent.play(script), pytest.raises(RunStopped):
        Script(agent).run()


def test_a_delta_that_is_not_finite_weighs_nothing(agent: ScriptedAgent) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.begin(anchor=[1.0])
        agent.lease(*all_stretches(agent))
        ready = agent.expect(tm.RoundReady)
        assert not ready.finite
        assert agent.reduce(0, 6)[0].tolist() == [1.0]  # zeros, not 0 x NaN
        agent.complete(reset=True)
        agent.lease((0, 0, 2))  # its leases were dropped
        agent.expect(tm.LeaseRequest)
        agent.send(tm.LeaseEnd(epoch=0, finished=False))
        assert agent.expect(tm.RoundReady).finite  # and the momentum is not poisoned
        agent.send(tm.TrainerStop(reason=""))

    factors = iter([float("nan"), 1.0, 1.0])
    one = Script(
        agent,
        inner=lambda p: torch.optim.Adam(p, lr=LR),
        loss=lambda x: (one.model.w * x).mean() * next(factors),
    )
    with agent.play(script), pytest.raises(RunStopped):
        one.run()


def test_leases_that_are_taken_back_are_not_trained_on(agent: ScriptedAgent) -> None:
    """All six samples are leased; after a round of four the rest is shared out anew, and two others are this peer's."""

    def script(agent: ScriptedAgent) -> None:
        agent.begin(anchor=[1.0], tau=2)
        agent.lease(*all_stretches(agent))
        for count, tau, retake in ((4, 1, True), (1, 1, False)):
            ready = agent.expect(tm.RoundReady)
            assert (ready.samples, ready.steps) == (count, 2 if count == 4 else 1)
            agent.reduce(count, count)
            agent.complete(tau=tau, retake=retake)
            if retake:
                agent.lease((0, 1, 2))
                agent.expect(tm.LeaseRequest)
                agent.send(tm.LeaseEnd(epoch=0, finished=False))
        agent.expect(tm.LeaseRequest)
        agent.send(tm.TrainerStop(reason=""))

    with agent.play(script), pytest.raises(RunStopped):
        Script(agent).run()


def test_a_round_is_due_when_its_time_is_up(agent: ScriptedAgent) -> None:
    """After the first round of two steps it may take a hundred, but its time is up after one."""

    def script(agent: ScriptedAgent) -> None:
        agent.begin(anchor=[1.0], tau=2)
        agent.lease(*all_stretches(agent))
        assert agent.expect(tm.RoundReady).steps == 2
        agent.reduce(4, 4)
        agent.complete(tau=100, limit_us=1)
        ready = agent.expect(tm.RoundReady)  # it asks for no more samples first
        assert (ready.steps, ready.samples) == (1, 2)
        agent.send(tm.TrainerStop(reason=""))

    with agent.play(script), pytest.raises(RunStopped):
        Script(agent).run()


def test_the_learning_rate_is_told_and_the_agent_says_when_it_may_decay(agent: ScriptedAgent) -> None:
    """The script halves it when told that it may, after a view said no and a round said yes."""

    def script(agent: ScriptedAgent) -> None:
        agent.begin(anchor=[1.0], tau=1, may_decay=False)
        agent.lease(*all_stretches(agent))
        for rate, may_decay in ((LR, False), (LR, True), (LR, True), (LR / 2, True)):
            ready = agent.expect(tm.RoundReady)
            assert ready.rate_nano == rate * 1e9
            agent.reduce(2, 2)
            agent.complete(tau=1, may_decay=may_decay)
        agent.receive()
        agent.send(tm.TrainerStop(reason=""))

    one = Script(agent)

    def decay() -> None:
        if one.optimizer.may_decay and len(one.batches) > 3:
            one.optimizer.param_groups[0]["lr"] = LR / 2

    one.on_batch = decay
    with agent.play(script), pytest.raises(RunStopped):
        one.run()


def test_the_outer_momentum_lies_behind_the_parameters(agent: ScriptedAgent) -> None:
    """At first zeros; a round that goes by it, one that does not, and the end."""
    states: list[list[float]] = []

    def script(agent: ScriptedAgent) -> None:
        states.append(agent.begin(tau=2).tolist())
        agent.lease(*all_stretches(agent))
        for outer in ((0.5, 1.0, 0.0, 1.0), ()):
            agent.expect(tm.RoundReady)
            found, _ = agent.reduce(4, 4, outer)
            states.append(found.tolist())
            agent.complete(tau=2)
        agent.receive()
        agent.finish([7.0, 0.0])

    one = Script(agent, outer=dmc.Block(0.5))
    with agent.play(script):
        one.run()
    first, second = 1.0 - one.after_step[1], states[1][0] - one.after_step[3]
    assert states == [[1.0, 0.0], [1.0 - first, first], [1.0 - first - second, first]]
    assert one.w == 7.0


def test_a_round_in_which_nobody_had_weight(agent: ScriptedAgent) -> None:
    """It is complete without a reduction: the anchor stays."""

    def script(agent: ScriptedAgent) -> None:
        agent.begin(anchor=[1.0])
        for _ in range(2):
            agent.lease(*first(agent, 4))
            assert not agent.expect(tm.RoundReady).finite
            agent.complete(reset=True)
        agent.expect(tm.LeaseRequest)
        agent.send(tm.TrainerStop(reason=""))

    one = Script(agent, loss=lambda x: one.model.w.sum() * float("inf"))
    with agent.play(script), pytest.raises(RunStopped):
        one.run()
    assert one.w == 1.0


def test_a_group_that_is_cancelled_is_a_failed_round(agent: ScriptedAgent) -> None:
    def script(agent: ScriptedAgent) -> None:
        anchor = agent.begin(anchor=[1.0], world=2)  # the other member never comes
        agent.lease(*first(agent, 4))
        ready = agent.expect(tm.RoundReady)
        path = agent.slot()
        agent.send(tm.Reduce(view_epoch=1, round=1, weight=4, divisor=4, slot_path=path))
        agent.send(tm.CancelGroup(view_epoch=1))
        failed = agent.expect(tm.RoundFailed)
        assert (failed.view_epoch, failed.round) == (1, 1)
        agent.view(anchor, tm.Local.KEEP)
        again = agent.expect(tm.RoundReady)
        assert (again.samples, again.steps) == (ready.samples, ready.steps) == (4, 2)
        agent.reduce(4, 4)
        agent.complete()
        agent.expect(tm.LeaseRequest)
        agent.send(tm.TrainerStop(reason=""))

    with agent.play(script), pytest.raises(RunStopped):
        Script(agent).run()


def test_without_samples_a_peer_still_takes_part(agent: ScriptedAgent) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.begin(anchor=[1.0])
        for _ in range(2):
            agent.end()
            ready = agent.expect(tm.RoundReady)
            assert (ready.samples, ready.steps, ready.compute_us) == (0, 0, 0)
            agent.reduce(0, 5)
            agent.complete()
        agent.expect(tm.LeaseRequest)
        agent.view([3.0], tm.Local.RESET)  # instead of an answer: it asks again
        agent.end(epoch=1)  # the others finished the epoch
        agent.end(epoch=1, finished=True)
        agent.finish([4.0])

    one = Script(agent)
    with agent.play(script):
        one.run()
    assert one.batches == []
    assert one.w == 4.0


def test_a_step_back_after_the_last_epoch_goes_on(agent: ScriptedAgent) -> None:
    """The round that ended the last epoch was lost with those that had it: its samples come again."""

    def script(agent: ScriptedAgent) -> None:
        agent.begin(anchor=[1.0])
        agent.lease(*first(agent, 4))
        agent.expect(tm.RoundReady)
        agent.reduce(4, 4)
        agent.complete(epoch=1)
        agent.end(epoch=1, finished=True)
        agent.view([1.0], tm.Local.RESET, epoch=0)
        agent.lease(*first(agent, 4))
        assert agent.expect(tm.RoundReady).samples == 4
        anchor, _ = agent.reduce(4, 4)
        agent.complete(epoch=1)
        agent.expect(tm.LeaseRequest)
        agent.finish(anchor)

    one = Script(agent)
    with agent.play(script):
        one.run()
    assert len(one.batches) == 4


def test_a_stop_at_the_barrier_and_a_refusal_at_the_start(agent: ScriptedAgent) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.welcome()
        agent.dataset()
        agent.expect(tm.RunReady)
        agent.send(
            tm.TrainerRefused(reason="parameter w has shape (1,), the run has (2,): use the run's model")
        )

    with agent.play(script), pytest.raises(UserError, match="the run has"):
        Script(agent).run()


def test_an_unreadable_message_costs_itself_only(
    agent: ScriptedAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.welcome()
        agent._socket.send_multipart([agent._trainer, b"\xc1junk"])
        agent.dataset()
        agent.expect(tm.RunReady)
        agent.send(tm.TrainerStop(reason=""))

    with agent.play(script), pytest.raises(RunStopped):
        Script(agent).run()
    assert "unreadable message" in capsys.readouterr().err


def test_a_decode_that_raises_names_the_sample(agent: ScriptedAgent) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.begin()
        agent.lease((0, 0, 2))

    def decode(sample: dict[str, Any]) -> float:
        raise KeyError("png")

    with agent.play(script), pytest.raises(KeyError) as caught:
        Script(agent, decode=decode).run()
    text = "".join([*getattr(caught.value, "__notes__", []), str(caught.value)])
    either = [f"'s{number:.0f}'" for number in expected_values(agent, (0, 0, 2))]
    assert sum(name in text for name in either) == 1  # the one that comes first on the disk
    assert agent.manifest.shards[0].digest.hex() in text


def test_what_must_come_before_what(agent: ScriptedAgent) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.begin()
        agent.lease((0, 0, 2))

    with agent.play(script), dmc.connect(agent.environment) as peer:
        data = peer.dataset("numbers")
        loader = peer.loader(data, 2, decode=lambda sample: float(sample["txt"]))
        with pytest.raises(UserError, match="make the optimizer before"):
            next(iter(loader))
        model = Weight()
        with pytest.raises(UserError, match=r"torch\.optim\.Optimizer, not Weight"):
            dmc.Optimizer(model, peer)  # type: ignore[arg-type]
        optimizer = dmc.Optimizer(torch.optim.SGD(model.parameters(), lr=LR), peer)
        with pytest.raises(UserError, match=r"second dmc\.Optimizer"):
            dmc.Optimizer(torch.optim.SGD(model.parameters(), lr=LR), peer)
        with pytest.raises(UserError, match="before the first batch"):
            optimizer.step()
        assert not peer.is_first
        next(iter(loader))
        with pytest.raises(UserError, match="second loader"):
            next(iter(peer.loader(data, 2)))
        with pytest.raises(UserError, match="add it before"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        for wrong in ({"batch_size": 0}, {"batch_size": 2, "epochs": 0}, {"batch_size": 2, "seed": -1}):
            with pytest.raises(UserError, match=next(reversed(wrong))):
                peer.loader(data, **wrong)


def test_reading_the_data_set_asks_for_shards_that_are_elsewhere(agent: ScriptedAgent) -> None:
    path = agent.store.path(agent.manifest.digest, 1)
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)

    def script(agent: ScriptedAgent) -> None:
        agent.welcome()
        agent.dataset()
        for _ in range(agent.manifest.sample_counts[1] + 1):  # for each sample, and for all keys at once
            request = agent.expect(tm.ShardRequest)
            assert (request.dataset, request.shard) == (agent.manifest.digest, 1)
            agent.send(tm.ShardReady(dataset=request.dataset, shard=1, path=str(elsewhere)))

    with agent.play(script), dmc.connect(agent.environment) as peer:
        data = peer.dataset("numbers")
        assert len(data) == 10
        assert data.classes == ()
        samples, keys = list(data), list(data.keys())
    assert [sample["__key__"] for sample in samples] == keys
    assert sorted(int(sample["txt"]) for sample in samples) == list(range(10))


def test_a_shard_that_was_cut_short_under_the_reader_is_asked_for(agent: ScriptedAgent) -> None:
    path = agent.store.path(agent.manifest.digest, 1)
    whole = path.read_bytes()
    os.truncate(path, 10)

    def script(agent: ScriptedAgent) -> None:
        agent.welcome()
        agent.dataset()
        agent.expect(tm.ShardRequest)
        path.unlink()  # as the agent does when it has verified it
        path.write_bytes(whole)
        agent.send(tm.ShardReady(dataset=agent.manifest.digest, shard=1, path=str(path)))

    with agent.play(script), dmc.connect(agent.environment) as peer:
        assert sorted(int(sample["txt"]) for sample in peer.dataset("numbers")) == list(range(10))


def test_connect_elsewhere_says_what_to_do() -> None:
    with pytest.raises(UserError, match="dmc-peer join"):
        dmc.connect({})


@pytest.mark.parametrize("loss", [1e13, -1e13, 1e300, math.inf, math.nan])
def test_any_loss_fits_a_header(loss: float) -> None:
    said = _micro(loss)
    assert abs(said) <= tm.MOST_LOSS_MICRO
    header = plain(RoundHeader, digest=b"d" * 16, payload_spec=b"p" * 16, loss_sum_micro=said)
    check_header(header)
    assert codec.decode(codec.encode(header)) == header
