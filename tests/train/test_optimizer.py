"""dmc.Optimizer to the outside: a torch optimizer, with names for its parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import p2p_dmc as dmc
from p2p_dmc.core.adacomm import TauPolicy
from p2p_dmc.errors import UserError
from p2p_dmc.train.names import name_parameters
from p2p_dmc.train.rates import rate_nano


class FakeRounds:
    """Counts what the optimizer tells it."""

    tau = 2
    may_decay = True

    def __init__(self, started: bool = True) -> None:
        self.started = started
        self.losses: list[Any] = []
        self.rounds_due = 0

    def count_step(self, loss: Any) -> None:
        self.losses.append(loss)

    def after_step(self) -> None:
        self.rounds_due += 1


class FakePeer:
    def __init__(self, started: bool = True) -> None:
        self._rounds = FakeRounds(started)

    def _attach(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def wrapped(
    model: torch.nn.Module | None = None, started: bool = True, **settings: Any
) -> tuple[Any, FakeRounds, torch.optim.SGD]:
    model = model or torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    peer = FakePeer(started)
    return dmc.Optimizer(inner, peer, **settings), peer._rounds, inner  # type: ignore[arg-type]


def backward(model: torch.nn.Module) -> torch.Tensor:
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    return loss  # type: ignore[no-any-return]


def test_it_is_a_torch_optimizer() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer, rounds, inner = wrapped(model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    loss = backward(model)
    assert optimizer.step(loss) is loss
    assert rounds.losses == [loss] and rounds.rounds_due == 1
    assert optimizer.state is inner.state and len(inner.state) == 2
    saved = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 7.0
    optimizer.load_state_dict(saved)
    assert inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.5
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer.defaults["momentum"] == 0.9
    assert "SGD" in repr(optimizer)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=10),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 1.0),
    ],
)
def test_learning_rate_schedulers_work(schedule: Any, recwarn: pytest.WarningsRecorder) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer, rounds, inner = wrapped(model)
    scheduler = schedule(optimizer)
    rates = []
    for _ in range(3):
        optimizer.step(backward(model))
        scheduler.step()
        rates.append(inner.param_groups[0]["lr"])
    assert len(set(rates)) == 3
    assert len(rounds.losses) == 3
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_a_closure_is_torchs() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer, rounds, _ = wrapped(model, tau=dmc.AdaComm())
    loss = optimizer.step(lambda: backward(model))
    assert rounds.losses == [loss]
    assert isinstance(loss, torch.Tensor)


def test_a_gradient_scaler_works() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer, rounds, _ = wrapped(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(before - model.weight, torch.full((1, 2), 0.5))
    assert len(rounds.losses) == 1


def test_losses_that_cannot_be_used() -> None:
    optimizer, rounds, _ = wrapped()
    with pytest.raises(UserError, match=r"shape \(3,\)"):
        optimizer.step(torch.ones(3))
    optimizer, rounds, _ = wrapped(tau=dmc.AdaComm())
    with pytest.raises(UserError, match=r"optimizer\.step\(loss\)"):
        optimizer.step()
    assert rounds.losses == []
    optimizer, _, _ = wrapped(started=False)
    with pytest.raises(UserError, match=r"peer\.loader"):
        optimizer.step(1.0)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert len(optimizer.param_groups) == 2


def test_compress() -> None:
    assert wrapped()[0].compress == "none"
    for setting in ("none", "bf16", "int8", "int4", "topk", "auto"):
        assert wrapped(compress=setting)[0].compress == setting
    for wrong in ("int2", "", None, 8):
        with pytest.raises(UserError, match=r"compress=.*'none', 'bf16', 'int8', 'int4', 'topk', 'auto'"):
            wrapped(compress=wrong)


def test_tau() -> None:
    assert wrapped(tau=5)[0].policy == TauPolicy(kind="fixed", tau0=5)
    ada = wrapped(tau=dmc.AdaComm("basic", 4, 1.5, 32, min_utilisation=0, lr_ratio=False))[0].policy
    assert ada == TauPolicy(kind="adacomm", tau0=4, t0_ms=1500, tau_max=32)
    assert wrapped(tau=dmc.AdaComm(tau0=100))[0].policy.tau_max == 100
    ada = wrapped(tau=dmc.AdaComm(loss_floor=-0.25))[0].policy
    assert ada == TauPolicy(
        kind="adacomm",
        tau0=0,
        t0_ms=60_000,
        tau_max=64,
        rule="plateau",
        rate=True,
        floor_micro=-250_000,
        utilisation_permille=500,
    )
    for wrong in (0, -1, 2.5, "8", True, None):
        with pytest.raises(UserError, match="tau"):
            wrapped(tau=wrong)
    for wrong in (
        dmc.AdaComm(tau0=0),
        dmc.AdaComm(tau0="some"),  # type: ignore[arg-type]
        dmc.AdaComm(t0_s=0),
        dmc.AdaComm(t0_s=float("nan")),
        dmc.AdaComm("fast"),  # type: ignore[arg-type]
        dmc.AdaComm(min_utilisation=1.0),
        dmc.AdaComm(loss_floor=float("inf")),
    ):
        with pytest.raises(UserError, match="AdaComm"):
            wrapped(tau=wrong)


def test_whether_the_rate_may_decay_is_the_agents_word() -> None:
    optimizer, rounds, _ = wrapped()
    for word in (False, True):
        rounds.may_decay = word
        assert optimizer.may_decay is word


@pytest.mark.parametrize(
    ("rate", "nano"),
    [
        (0.1, 100_000_000),
        (torch.tensor(0.5), 500_000_000),
        (1e-12, 1),
        (0.0, 0),
        (-1.0, 0),
        (float("nan"), 0),
        (float("inf"), 0),
        (1e30, 2**52),
        ("fast", 0),
        (torch.ones(2), 0),
        (None, 0),
    ],
)
def test_the_learning_rate_in_headers(rate: Any, nano: int) -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    inner.param_groups[0]["lr"] = rate
    assert rate_nano(inner) == nano


def test_an_optimizer_without_a_learning_rate() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    del inner.param_groups[0]["lr"]
    assert rate_nano(inner) == rate_nano(None) == 0


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(2, 3)
        self.head = torch.nn.Linear(3, 1)


def names(groups: Any, model: torch.nn.Module | None = None) -> list[str]:
    return [name for name, _ in name_parameters(groups, model)]


def test_names() -> None:
    net = Net()
    expected = ["body.weight", "body.bias", "head.weight", "head.bias"]
    groups = torch.optim.SGD(net.parameters(), lr=1).param_groups
    assert names(groups, net) == expected
    assert names(groups) == expected  # found among the living modules
    wrapper = torch.nn.Sequential(torch.nn.Sequential(net))
    assert names(groups) == expected  # the wrapper's are longer
    two = torch.optim.SGD([{"params": net.head.parameters()}, {"params": net.body.parameters()}], lr=1)
    assert names(two.param_groups) == expected[2:] + expected[:2]
    named = torch.optim.SGD(wrapper.named_parameters(), lr=1).param_groups
    if "param_names" in named[0]:
        assert names(named) == ["0.0." + name for name in expected]
    loose = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    assert names([{"params": loose}]) == ["param.0", "param.1"]
    assert names([{"params": loose}], net) == ["param.0", "param.1"]


def test_statistics_come_after_the_parameters_and_nothing_else_does() -> None:
    body = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    body.register_buffer("mask", torch.full((2,), float("-inf")))
    optimizer, _, _ = wrapped(body)  # the model is found by itself
    found = [spec.name for spec in optimizer.flatten().specs]
    assert found[:2] == ["0.weight", "0.bias"]
    assert found[6:] == ["1.running_mean", "1.running_var"]
    body[1] = torch.nn.InstanceNorm1d(3)
    optimizer, _, _ = wrapped(body)
    assert [spec.name for spec in optimizer.flatten().specs] == ["0.weight", "0.bias", "2.weight", "2.bias"]
