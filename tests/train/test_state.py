"""Flat parameters, slots, and bits that do not depend on the processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from p2p_dmc.errors import UserError
from p2p_dmc.train import state
from p2p_dmc.train.state import FlatParameters


def flat_of(*tensors: torch.Tensor) -> FlatParameters:
    return FlatParameters([(f"t{i}", torch.nn.Parameter(t)) for i, t in enumerate(tensors)])


def test_there_and_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Conv2d(2, 3, 2))
    model[1].weight.data = model[1].weight.data.to(memory_format=torch.channels_last)
    flat = FlatParameters(list(model.named_parameters()))
    vector = torch.empty(flat.size)
    flat.gather(vector)
    expected = np.concatenate([p.detach().numpy().reshape(-1) for p in model.parameters()])
    assert vector.numpy().tobytes() == expected.tobytes()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    flat.scatter(vector)
    again = torch.empty(flat.size)
    flat.gather(again)
    assert torch.equal(again, vector)
    assert [spec.name for spec in flat.specs] == [name for name, _ in model.named_parameters()]
    assert flat.specs[0].shape == (4, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_dtypes_go_through_float32(dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.tensor([0.1, -3.0], dtype=dtype))
    flat = FlatParameters([("p", parameter)])
    vector = torch.empty(2)
    flat.gather(vector)
    assert torch.equal(vector, parameter.detach().float())
    flat.scatter(torch.tensor([1.5, 2.5]))
    assert parameter.tolist() == [1.5, 2.5]
    assert flat.specs[0].dtype == str(dtype).removeprefix("torch.")


def test_tied_parameters_count_once_and_integers_are_refused() -> None:
    tied = torch.nn.Parameter(torch.ones(5))
    other = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    flat = FlatParameters([("a", tied), ("b", other), ("c", tied)])
    assert [spec.name for spec in flat.specs] == ["a", "b"]
    assert flat.size == 7
    with pytest.raises(UserError, match="n is int64"):
        FlatParameters([("n", torch.zeros(3, dtype=torch.int64))])
    with pytest.raises(UserError, match=r"model\.parameters\(\)"):
        FlatParameters([])


def test_gradients_are_cleared_in_place() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    (parameter * 3).sum().backward()
    held = parameter.grad
    FlatParameters([("p", parameter)]).clear_gradients()
    assert held is parameter.grad and held is not None and held.tolist() == [0, 0]


def test_a_slot_is_shared_memory_with_a_digest(tmp_path: Path) -> None:
    path = str(tmp_path / "slot")
    one, two = state.open_slot(path, 100), state.open_slot(path, 100)
    one.copy_(torch.arange(100))
    assert torch.equal(one, two)
    data = Path(path).read_bytes()
    assert data == np.arange(100, dtype="<f4").tobytes()
    digest = xxhash.xxh3_128(data).digest()
    assert state.digest_of(two) == digest
    assert torch.equal(state.read_slot(path, 100, digest), one)
    one[3] = 7
    with pytest.raises(RuntimeError, match="has digest"):
        state.read_slot(path, 100, digest)
    with pytest.raises(RuntimeError, match="does not exist"):
        state.read_slot(path + "x", 100, digest)


floats = st.floats(width=32, allow_nan=False, min_value=-(2.0**66), max_value=2.0**66)


@given(
    st.lists(st.tuples(floats, floats), min_size=1, max_size=40),
    st.integers(1, 1 << 40),
    st.integers(1, 1 << 40),
)
def test_the_average_rounds_each_operation_by_itself(
    pairs: list[tuple[float, float]], weight: int, divisor: int
) -> None:
    """The oracle is numpy, one float32 operation at a time."""
    anchor, local = (np.array(column, dtype=np.float32) for column in zip(*pairs, strict=True))
    with np.errstate(over="ignore"):
        delta = (anchor - local) * np.float32(weight)
        expected = anchor - delta / np.float32(divisor)
    scratch, out = torch.from_numpy(local.copy()), torch.empty(len(pairs))
    state.weighted_delta(torch.from_numpy(anchor), scratch, weight)
    assert scratch.numpy().tobytes() == delta.tobytes()
    state.average(torch.from_numpy(anchor), scratch, divisor, out=out)
    assert out.numpy().tobytes() == expected.tobytes()


def test_nobodys_weight_leaves_the_anchor() -> None:
    anchor, out = torch.tensor([1.0, -0.0]), torch.empty(2)
    state.average(anchor, torch.tensor([float("nan"), 1.0]), 0, out=out)
    assert out.numpy().tobytes() == anchor.numpy().tobytes()


BITS = """
import numpy, torch
from p2p_dmc.core.outer import parse
from p2p_dmc.train import outer, state
g = numpy.random.default_rng(3)  # torch's own random numbers do differ
anchor, local = (torch.from_numpy(g.standard_normal(100_003, dtype="f4")) for _ in range(2))
out = torch.empty_like(anchor)
for weight, divisor in ((3, 7), (1000003, 3000001), (17_000_001, 51_000_007)):
    scratch = local.clone()
    state.weighted_delta(anchor, scratch, weight)
    state.average(anchor, scratch, divisor, out=out)
    print(state.digest_of(out).hex())
pair = torch.cat([anchor, local])
new = torch.empty_like(pair)
for text, steps in (("block(beta=0.3)", 7), ("nesterov(lr=0.7, momentum=0.9)", 37)):
    outer.advance(pair, anchor - local, 7, parse(text).step(steps, 64), out=new)
    print(state.digest_of(new).hex())
print(torch.backends.cpu.get_cpu_capability())
"""


def test_the_bits_are_the_same_on_other_processors() -> None:
    outputs = []
    for capability in ("default", None):
        environment = {k: v for k, v in os.environ.items() if k != "ATEN_CPU_CAPABILITY"}
        if capability:
            environment["ATEN_CPU_CAPABILITY"] = capability
        done = subprocess.run(
            [sys.executable, "-c", BITS],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        *digests, used = done.stdout.split()
        outputs.append(digests)
        assert (used == "DEFAULT") == (capability == "default")  # the two runs did differ
    assert len(outputs[0]) == 5
    assert outputs[0] == outputs[1]


def test_only_a_poisoned_memory_is_forgotten() -> None:
    good, bad = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([good, bad])
    good.grad, bad.grad = torch.ones(2), torch.tensor([1.0, float("nan")])
    optimizer.step()
    assert state.forget_nonfinite(optimizer.state) == 1
    assert list(optimizer.state) == [good]


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 4999, 9999])
def test_one_element_that_is_not_finite_is_seen(odd: float, place: int) -> None:
    vector = torch.randn(10_000)
    assert state.all_finite(vector)
    vector[place] = odd
    assert not state.all_finite(vector)


def test_large_elements_are_finite_although_their_squares_are_not() -> None:
    assert state.all_finite(torch.tensor([3e38, -3e38, 1e-45, 0.0]))
    assert state.all_finite(torch.empty(0))


def test_a_slot_is_mapped_once_and_a_new_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    first = state.open_slot(str(path), 4)
    first.fill_(1.0)
    assert state.open_slot(str(path), 4).data_ptr() == first.data_ptr()
    path.rename(tmp_path / "other")
    second = state.open_slot(str(path), 4)
    second.fill_(2.0)
    assert first.tolist() == [1.0] * 4
    assert np.fromfile(tmp_path / "other", "<f4").tolist() == [1.0] * 4
    assert np.fromfile(path, "<f4").tolist() == [2.0] * 4


def test_forgotten_slots_are_unmapped(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    state.open_slot(str(path), 4)
    assert str(path) in Path("/proc/self/maps").read_text()
    state.forget_slots()
    assert str(path) not in Path("/proc/self/maps").read_text()
