"""The inner optimizer's state on disk: whatever optimizer it is, whatever kills the writer or damages the files."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from p2p_dmc.train import inner_state
from p2p_dmc.train.inner_state import META, NEXT_META, TENSORS, InnerState, UnkeepableError

HISTORY = "ab" * 16
LINEAGE = (3, 41)
Make = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
}


class Counting(torch.optim.Optimizer):
    """Keeps what others do not: float32 beside bfloat16 parameters, plain numbers, and a count in its groups."""

    def __init__(self, parameters: Any, lr: float = 0.5) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0, "scale": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("sum", torch.zeros(p.shape))
                state["sum"] += p.grad.float()
                state["calls"] = state.get("calls", 0) + 1
                state["note"] = None
                p.sub_((group["lr"] * state["sum"] / group["k"]).to(p.dtype))


def net(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).to(dtype)


def train(model: torch.nn.Module, inner: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Gradients depend on the number of the step and on nothing else."""
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        inner.step()


def named(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(model.named_parameters())


def taken(
    model: torch.nn.Module, inner: torch.optim.Optimizer, began: list[dict[str, Any]] | None = None
) -> InnerState:
    began = inner_state.group_options(inner) if began is None else began
    return inner_state.take(inner, named(model), began, HISTORY, LINEAGE, 0)


def written(folder: Path, steps: int = 3) -> InnerState:
    """AdamW's state after some steps, in ``folder``."""
    model = net()
    inner = OPTIMIZERS["AdamW"](model.parameters())
    train(model, inner, range(steps))
    state = taken(model, inner)
    inner_state.write(folder, state)
    return state


def read(folder: Path) -> InnerState:
    state = inner_state.read(folder)
    assert state is not None
    return state


def equal(one: InnerState, two: InnerState) -> bool:
    same = one.tensors.keys() == two.tensors.keys() and all(
        torch.equal(tensor, two.tensors[key]) for key, tensor in one.tensors.items()
    )
    return same and replace(one, tensors={}) == replace(two, tensors={})


# -- any optimizer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_optimizer_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    through = net()
    inner = OPTIMIZERS[name](through.parameters())
    train(through, inner, range(5))
    inner_state.write(tmp_path, taken(through, inner))

    again = net()
    again.load_state_dict(through.state_dict())
    restored = OPTIMIZERS[name](again.parameters())
    state = read(tmp_path)
    assert inner_state.mismatch(state, restored, named(again), [HISTORY]) == ""
    inner_state.restore(state, restored, named(again))
    train(through, inner, range(5, 9))
    train(again, restored, range(5, 9))
    for one, two in zip(through.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_loads_what_is_kept(tmp_path: Path, name: str) -> None:
    model = net()
    inner = OPTIMIZERS[name](model.parameters())
    train(model, inner, range(5))
    inner_state.write(tmp_path, taken(model, inner))
    again = net()
    again.load_state_dict(model.state_dict())
    loaded = OPTIMIZERS[name](again.parameters())
    loaded.load_state_dict(inner_state.to_state_dict(read(tmp_path)))
    train(model, inner, range(5, 9))
    train(again, loaded, range(5, 9))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_dtypes_numbers_and_counts_come_back(tmp_path: Path) -> None:
    model = net(torch.bfloat16)
    inner = Counting(model.parameters())
    began = inner_state.group_options(inner)
    train(model, inner, range(4))
    inner.param_groups[0]["lr"] = 0.25  # a schedule's doing
    inner_state.write(tmp_path, taken(model, inner, began))

    again = net(torch.bfloat16)
    restored = Counting(again.parameters(), lr=0.125)
    inner_state.restore(read(tmp_path), restored, named(again))
    for old, new in zip(model.parameters(), again.parameters(), strict=True):
        assert restored.state[new]["sum"].dtype == torch.float32
        assert torch.equal(inner.state[old]["sum"], restored.state[new]["sum"])
        assert restored.state[new]["calls"] == 4 and restored.state[new]["note"] is None
    assert restored.param_groups[0]["k"] == 4
    assert restored.param_groups[0]["lr"] == 0.125, "the learning rate is the script's"

    same = Counting(again.parameters())
    inner_state.restore(read(tmp_path), same, named(again))
    assert same.param_groups[0]["lr"] == 0.5, "also where it is what it was at first"
    other = Counting(again.parameters())
    other.param_groups[0]["k"] = 100
    inner_state.restore(read(tmp_path), other, named(again))
    assert other.param_groups[0]["k"] == 100, "the script counts from elsewhere now"


def test_parameters_are_told_apart_by_name_not_by_place(tmp_path: Path) -> None:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, inner, range(3))
    inner_state.write(tmp_path, taken(model, inner))
    backwards = named(model)[::-1]
    restored = torch.optim.SGD([p for _, p in backwards], lr=0.1, momentum=0.9)
    inner_state.restore(read(tmp_path), restored, backwards)
    for parameter in model.parameters():
        buffers = [o.state[parameter]["momentum_buffer"] for o in (inner, restored)]
        assert torch.equal(*buffers)


def test_a_parameter_without_a_gradient_has_no_state(tmp_path: Path) -> None:
    model = net()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    next(model.parameters()).sum().backward()
    inner.step()
    inner_state.write(tmp_path, taken(model, inner))
    restored = torch.optim.Adam(model.parameters(), lr=0.1)
    inner_state.restore(read(tmp_path), restored, named(model))
    assert list(restored.state) == [next(model.parameters())]
    assert list(inner_state.to_state_dict(read(tmp_path))["state"]) == [0]


def lbfgs(model: torch.nn.Module) -> torch.optim.Optimizer:
    inner = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure() -> torch.Tensor:
        inner.zero_grad()
        loss = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    inner.step(closure)
    return inner


def test_what_cannot_be_kept_is_named() -> None:
    model = net()
    with pytest.raises(UnkeepableError, match=r"'\w+' of 0.weight is a list"):
        taken(model, lbfgs(model))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = next(model.parameters())
    for value, words in (
        (torch.zeros(2).to_sparse(), "'x' of 0.weight is a tensor of sparse_coo"),
        (torch.zeros(2, dtype=torch.complex128), "'x' of 0.weight is a tensor of complex128"),
        (object(), "'x' of 0.weight is a object"),
    ):
        inner.state[weight] = {"x": value}
        with pytest.raises(UnkeepableError, match=words):
            taken(model, inner)
    inner.state[weight] = {7: 1}
    with pytest.raises(UnkeepableError, match="under the key 7"):
        taken(model, inner)
    inner.state.clear()
    inner.state["global"] = {"step": 1}
    with pytest.raises(UnkeepableError, match="no shared parameter"):
        taken(model, inner)


# -- does it fit --------------------------------------------------------------------------------------------------


def test_why_a_state_does_not_fit(tmp_path: Path) -> None:
    state, model = written(tmp_path), net()
    inner = OPTIMIZERS["AdamW"](model.parameters())

    def why(**changes: Any) -> str:
        said = {"inner": inner, "named": named(model), "histories": [HISTORY]} | changes
        return inner_state.mismatch(state, **said)

    assert why() == ""
    assert why(histories=["00" * 16]) == "it is of another founding of this run"
    assert why(histories=["00" * 16, HISTORY]) == "", "whose place this one took"
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    assert why(inner=sgd) == "it is of torch.optim.adamw.AdamW, and the script uses torch.optim.sgd.SGD"
    wider = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5))
    assert why(named=named(wider)) == "parameter 1.weight is 2x4 there and 5x4 here"
    more = [*named(model), ("extra", torch.zeros(()))]
    assert why(named=more) == "parameter extra is missing there and scalar here"
    assert why(named=named(model)[:-1]) == "parameter 1.bias is 2 there and missing here"


# -- the disk -----------------------------------------------------------------------------------------------------


def test_nothing_there_is_nothing_wrong(tmp_path: Path) -> None:
    assert inner_state.read(tmp_path) is None
    assert inner_state.read(tmp_path / "nowhere") is None


def test_all_of_it_comes_back_and_nothing_else_is_left(tmp_path: Path) -> None:
    state = written(tmp_path / "runs" / "train")
    assert equal(read(tmp_path / "runs" / "train"), state)
    assert sorted(os.listdir(tmp_path / "runs" / "train")) == sorted([TENSORS, META])
    assert json.loads((tmp_path / "runs" / "train" / META).read_text())["lineage"] == [3, 41]


class Killed(BaseException):
    """The writer is dead: no handler of Exception runs."""


DEATHS = ["save_file", "file_digest", "write_durably", "replace 1", "replace 2", "sync_folder"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("death", DEATHS)
def test_a_writer_that_dies_anywhere_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: str, when: str
) -> None:
    old = written(tmp_path, steps=3)
    name, _, number = death.partition(" ")
    target = os if name == "replace" else inner_state
    real, calls = getattr(target, name), []
    inside = []

    def dies(*arguments: Any, **options: Any) -> Any:
        if name == "replace" and inside:
            return real(*arguments, **options)  # write_durably's own
        calls.append(arguments)
        if len(calls) == int(number or 1):
            if when == "after":
                real(*arguments, **options)
            raise Killed
        return real(*arguments, **options)

    durably = inner_state.write_durably

    def write_durably(*arguments: Any) -> None:
        inside.append(True)
        durably(*arguments)
        inside.pop()

    with monkeypatch.context() as patch:
        patch.setattr(inner_state, "write_durably", write_durably)
        real = getattr(target, name)
        patch.setattr(target, name, dies)
        with pytest.raises(Killed):
            written(tmp_path, steps=5)
    found = read(tmp_path)
    new_is_there = (death, when) in {("replace 1", "after")} or death in ("replace 2", "sync_folder")
    assert found.values == old.values
    assert float(found.tensors["0.weight/step"]) == (5 if new_is_there else 3)
    assert equal(found, old) == (not new_is_there)
    written(tmp_path, steps=7)
    assert float(read(tmp_path).tensors["0.weight/step"]) == 7
    assert sorted(os.listdir(tmp_path)) == sorted([TENSORS, META]), "leftovers"


def write_for_ever(folder: Path, state: InnerState, line: Connection) -> None:
    number = 0
    while True:
        number += 1
        tensors = {key: torch.full_like(tensor, number) for key, tensor in state.tensors.items()}
        inner_state.write(folder, replace(state, ahead=number, tensors=tensors))
        line.send(number)


def test_a_writer_that_is_killed_at_any_moment_leaves_a_whole_state(tmp_path: Path) -> None:
    """A real process and a real SIGKILL, a few times, each while it writes."""
    state = written(tmp_path)
    forked = multiprocessing.get_context("fork")
    for kill in range(6):
        line, its_line = forked.Pipe(duplex=False)
        writer = forked.Process(target=write_for_ever, args=(tmp_path, state, its_line))
        writer.start()
        its_line.close()
        while (announced := line.recv()) < 2 + kill % 3:
            pass
        writer.kill()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        found = read(tmp_path)
        assert found.ahead >= announced
        assert all(bool((tensor == found.ahead).all()) for tensor in found.tensors.values())
        line.close()


def test_damage_is_found(tmp_path: Path) -> None:
    """Every byte of the json, some of the tensors, and ends that are missing."""
    written(tmp_path)
    whole = {name: (tmp_path / name).read_bytes() for name in (TENSORS, META)}

    def is_found(name: str, data: bytes, words: str) -> None:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=words):
            inner_state.read(tmp_path)
        (tmp_path / name).write_bytes(whole[name])

    for name, step, words in ((TENSORS, 97, "is damaged"), (META, 1, "missing or damaged")):
        data = whole[name]
        for at in range(0, len(data), step):
            flipped = bytes([data[at] ^ 2])
            if name == META and not data[at : at + 1].strip() and not flipped.strip():
                continue  # one white space for another
            is_found(name, data[:at] + flipped + data[at + 1 :], words)
        for length in (0, 1, len(data) // 2, len(data) - 1):
            is_found(name, data[:length], words)
    assert equal(read(tmp_path), written(tmp_path))
    (tmp_path / META).unlink()
    with pytest.raises(ValueError, match="missing or damaged"):
        inner_state.read(tmp_path)


def test_a_stale_next_json_does_no_harm(tmp_path: Path) -> None:
    state = written(tmp_path)
    (tmp_path / NEXT_META).write_text('{"half')
    assert equal(read(tmp_path), state)
    other = written(tmp_path / "other", steps=9)
    (tmp_path / NEXT_META).write_bytes((tmp_path / "other" / META).read_bytes())
    assert equal(read(tmp_path), state) and not equal(state, other)


def test_another_versions_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(inner_state, "FORMAT", 2)
        written(tmp_path)
    with pytest.raises(ValueError, match="format 2, this version reads 1"):
        inner_state.read(tmp_path)


def test_a_disk_that_refuses_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = written(tmp_path)
    full = tmp_path / f".{TENSORS}.tmp"
    full.mkdir()  # what stands there cannot be opened for writing
    with pytest.raises(OSError):
        inner_state.write(tmp_path, state)
    full.rmdir()
    assert equal(read(tmp_path), state)
