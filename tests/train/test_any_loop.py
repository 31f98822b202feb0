"""What training loops do besides a plain step: each with a real session, its agent scripted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import p2p_dmc as dmc
from p2p_dmc.errors import RunStopped
from p2p_dmc.train.session import Peer
from p2p_dmc.wire import trainer_messages as tm
from tests.train.cluster import Cluster
from tests.train.scripted import ScriptedAgent
from tests.train.test_loop import LR, Weight, first
from tests.train.test_oracle import numbers

Step = Callable[[Any, torch.Tensor, int], None]
"""Optimizer, batch, and its number in the loop."""


@pytest.fixture
def agent(tmp_path: Path) -> ScriptedAgent:
    return ScriptedAgent(tmp_path)


def number(sample: Any) -> torch.Tensor:
    return torch.tensor(float(sample["txt"]))


def lead(
    agent: ScriptedAgent, model: torch.nn.Module, inner: torch.optim.Optimizer, step: Step, epochs: int = 1
) -> list[tm.RoundReady]:
    """A whole run alone, batches of two, two steps a round: what the trainer said of each."""
    said: list[tm.RoundReady] = []
    with agent.play(lambda agent: said.extend(agent.lead(epochs))), dmc.connect(agent.environment) as peer:
        data = peer.dataset("numbers")
        optimizer = dmc.Optimizer(inner, peer, 2, model)
        for index, x in enumerate(peer.loader(data, 2, epochs, decode=number)):
            step(optimizer, x, index)
    return said


def plain(model: torch.nn.Module) -> Step:
    """The loss of ``model`` is its mean output."""

    def step(optimizer: Any, x: torch.Tensor, index: int) -> None:
        optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward()
        optimizer.step(loss)

    return step


# -- mixed precision ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_gradient_scaler_leaves_out_is_none(agent: ScriptedAgent, fused: bool) -> None:
    """Nor does it lose samples. A fused optimizer would unscale by itself, and does not when it is wrapped."""
    model, scaler = Weight(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    stepped: list[torch.Tensor] = []

    def step(optimizer: Any, x: torch.Tensor, index: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model.w * x).mean() * (float("inf") if index == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer) if index == 2 else None  # as for clipping
        scaler.step(optimizer, loss.detach())
        scaler.update()
        stepped.extend([x] if index != 1 else [])

    said = lead(agent, model, torch.optim.SGD(model.parameters(), lr=LR, fused=fused), step)
    assert sum(ready.samples for ready in said) == 10
    assert sum(ready.steps for ready in said) == 4  # of five batches
    assert [ready.finite for ready in said] == [True] * len(said)
    oracle = 1.0 - LR * sum(float(x.mean()) for x in stepped)
    assert float(model.w.detach()) == pytest.approx(oracle, rel=1e-5)
    assert scaler.get_scale() == 512.0


def test_a_scaler_that_leaves_the_only_steps_out_is_no_script_that_never_steps(agent: ScriptedAgent) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.begin(anchor=[1.0])
        agent.lease(*first(agent, 2))
        agent.end()
        ready = agent.expect(tm.RoundReady)
        assert (ready.samples, ready.steps, ready.finite) == (2, 0, True)
        agent.send(tm.TrainerStop(reason=""))

    model, scaler = Weight(), torch.amp.GradScaler("cpu")
    with agent.play(script), pytest.raises(RunStopped), dmc.connect(agent.environment) as peer:
        optimizer = dmc.Optimizer(torch.optim.SGD(model.parameters(), lr=LR), peer, 2, model)
        for x in peer.loader(peer.dataset("numbers"), 2, decode=number):
            optimizer.zero_grad()
            scaler.scale((model.w * x).mean() * float("inf")).backward()
            scaler.step(optimizer)
            scaler.update()


class Coarse(torch.nn.Module):
    """A bfloat16 parameter of 1, whose last bit is 2^-7."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w.expand(len(x))


def test_bfloat16_is_averaged_in_float32_and_nothing_is_rounded_away(agent: ScriptedAgent) -> None:
    """This peer steps by one last bit a round, another as heavy stands still: the mean moves by half a bit."""
    anchors: list[float] = []

    def script(agent: ScriptedAgent) -> None:
        agent.begin(tau=1)
        for _ in range(5):
            agent.lease(*first(agent, 2))
            agent.expect(tm.RoundReady)
            anchors.append(float(agent.reduce(2, 4)[0][0]))
            agent.complete(tau=1)
        agent.expect(tm.LeaseRequest)
        agent.send(tm.TrainerStop(reason=""))

    model = Coarse()
    with agent.play(script), pytest.raises(RunStopped), dmc.connect(agent.environment) as peer:
        optimizer = dmc.Optimizer(
            torch.optim.SGD(model.parameters(), lr=2.0**-7, maximize=True), peer, 1, model
        )
        for index, x in enumerate(peer.loader(peer.dataset("numbers"), 2, decode=number)):
            plain(model)(optimizer, x, index)
    assert agent.parameters[0].dtype == "bfloat16"
    assert anchors == [1 + 2.0**-8 * number for number in range(1, 6)]


# -- accumulation, clipping, groups --------------------------------------------------------------------------------


def test_accumulated_batches_all_count(agent: ScriptedAgent) -> None:
    model = Weight()

    def step(optimizer: Any, x: torch.Tensor, index: int) -> None:
        loss = (model.w * x).mean()
        (loss / 2).backward()
        if index % 2:
            optimizer.step(loss)
            optimizer.zero_grad()

    said = lead(agent, model, torch.optim.SGD(model.parameters(), lr=LR), step)
    assert [(ready.samples, ready.steps) for ready in said] == [(8, 2), (2, 0)]


def test_clipped_gradients(agent: ScriptedAgent) -> None:
    model = Weight()

    def step(optimizer: Any, x: torch.Tensor, index: int) -> None:
        optimizer.zero_grad()
        loss = (model.w * (x + 1)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.25)
        optimizer.step(loss)

    lead(agent, model, torch.optim.SGD(model.parameters(), lr=LR), step)
    assert float(model.w.detach()) == pytest.approx(1.0 - 5 * LR * 0.25)


class Tied(torch.nn.Module):
    """One matrix at both ends, another that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(1, 3), torch.nn.Linear(3, 3)
        self.out = torch.nn.Linear(3, 3)
        self.out.weight = self.down.weight
        self.down.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.down(self.up(x[:, None]))))


def test_groups_with_tied_and_frozen_parameters(agent: ScriptedAgent) -> None:
    """Tied ones count once; frozen ones stay as they are to the bit; what is in no group is not the run's."""
    model = Tied()
    before = copy.deepcopy(model)
    groups = [
        {"params": [model.down.weight, model.down.bias], "lr": 0.5},
        {"params": [model.out.bias], "lr": 0.0},
    ]
    lead(agent, model, torch.optim.SGD(groups, lr=0.1), plain(model))
    assert [spec.name for spec in agent.parameters] == ["down.weight", "down.bias", "out.bias"]
    assert model.out.weight is model.down.weight
    assert not torch.equal(model.down.weight, before.down.weight)
    assert torch.equal(model.down.bias, before.down.bias)
    assert torch.equal(model.out.bias, before.out.bias)  # its group's rate is zero
    assert torch.equal(model.up.weight, before.up.weight)


@pytest.mark.parametrize(
    "inner",
    [
        lambda p: torch.optim.SparseAdam(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ],
)
def test_sparse_gradients(agent: ScriptedAgent, inner: Any) -> None:
    table = torch.nn.Embedding(11, 2, sparse=True)
    before = copy.deepcopy(table)
    said = lead(
        agent, table, inner(table.parameters()), lambda o, x, i: plain(table)(o, x.long(), i), epochs=2
    )
    assert table.weight.grad is not None and table.weight.grad.is_sparse
    assert all(ready.finite for ready in said)
    moved = (table.weight != before.weight).any(dim=1).tolist()
    assert moved == [True] * 10 + [False]  # ten numbers are in the data


def test_a_compiled_model_has_the_names_of_the_plain_one(agent: ScriptedAgent) -> None:
    model = torch.nn.Linear(1, 1)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.ones(2, 1)).sum().backward()  # it takes its time, for which no agent should have to wait
    before = copy.deepcopy(model)
    said = lead(
        agent,
        model,
        torch.optim.SGD(compiled.parameters(), lr=0.01),
        lambda o, x, i: plain(compiled)(o, x[:, None], i),
    )
    assert sum(ready.steps for ready in said) == 5
    assert [spec.name for spec in agent.parameters] == ["weight", "bias"]
    assert not torch.equal(model.weight, before.weight)


# -- running statistics --------------------------------------------------------------------------------------------


class Normal(torch.nn.Module):
    """With statistics, and a mask that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x[:, None]))


def test_running_statistics_are_averaged_with_the_parameters(tmp_path: Path) -> None:
    """Each peer normalises by its own batches in a round; after it all evaluate the same."""
    torch.manual_seed(1)
    initial = Normal()
    cluster = Cluster(tmp_path, numbers(tmp_path, 30), tau=3, shares=(2, 1))

    def script(peer: Peer, rank: int) -> tuple[list[torch.Tensor], torch.nn.Module]:
        model, batches = copy.deepcopy(initial), []
        optimizer = dmc.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), peer, 3, model)
        for index, x in enumerate(peer.loader(peer.dataset("data"), 4, decode=number)):
            batches.append(x)
            plain(model)(optimizer, x, index)
        return batches, model.eval()

    (seen_by_one, one), (seen_by_two, two) = cluster.run(script)
    names = [spec.name for spec in cluster.readies[0].parameters]
    assert names[4:] == ["norm.running_mean", "norm.running_var"]
    x = torch.randn(5)
    assert torch.equal(one(x), two(x))
    assert int(one.norm.num_batches_tracked) == 5 and int(two.norm.num_batches_tracked) == 3
    expected = np.zeros(2)
    for batches in (seen_by_one[:3], seen_by_two[:3]):  # the first round
        norm = torch.nn.BatchNorm1d(1)
        for batch in batches:
            norm(batch[:, None])
        weight = sum(map(len, batches)) / sum(cluster.lines[0]["weights"])
        expected += weight * np.array([norm.running_mean.item(), norm.running_var.item()])
    np.testing.assert_allclose(cluster.anchors[1][-2:], expected, rtol=1e-5)


def test_statistics_that_are_not_finite_are_the_anchors_again(agent: ScriptedAgent) -> None:
    def script(agent: ScriptedAgent) -> None:
        anchor = agent.begin()
        agent.lease(*first(agent, 4))
        assert not agent.expect(tm.RoundReady).finite
        assert agent.reduce(0, 4)[0].tobytes() == anchor.tobytes()
        agent.complete(reset=True)
        agent.expect(tm.LeaseRequest)
        agent.send(tm.TrainerStop(reason=""))

    model = Normal()
    with agent.play(script), pytest.raises(RunStopped), dmc.connect(agent.environment) as peer:
        optimizer = dmc.Optimizer(torch.optim.SGD(model.parameters(), lr=0.0), peer, 2, model)
        for x in peer.loader(peer.dataset("numbers"), 2, decode=number):
            model(x * float("inf"))
            optimizer.step(0.0)
    assert model.norm.running_mean.item() == 0.0 and model.norm.running_var.item() == 1.0
