"""Coding of flat vectors: what is read back, what is left out, and that every processor reads the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from p2p_dmc.train import compression
from p2p_dmc.train.compression import CHUNK, KEPT, LARGEST, codec

SCHEMES = ("bf16", "int8", "int4", "topk")
STEPS = {"int8": 127, "int4": 7}
ANY = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
FINITE = st.floats(-(2.0**100), 2.0**100, width=32)
SIZES = st.sampled_from([1, 2, 3, 255, 256, 257, 511, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77])

scheme = pytest.mark.parametrize("name", SCHEMES)


def coded(name: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The payload, what it says, and the error."""
    coder = codec(name)
    payload = torch.full((coder.size_bytes(values.numel()),), 0xAA, dtype=torch.uint8)
    error, out = torch.full_like(values, 7.0), torch.full_like(values, 7.0)
    coder.encode(values, payload, error)
    coder.decode(payload, out)
    return payload, out, error


def random(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def sane(values: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(values, nan=0.0).clamp(-LARGEST, LARGEST)


def vectors(elements: st.SearchStrategy[float]) -> st.SearchStrategy[torch.Tensor]:
    """Of odd sizes, most elements one value."""
    return SIZES.flatmap(lambda n: hnp.arrays(np.float32, n, elements=elements, fill=elements)).map(
        lambda array: torch.from_numpy(array.copy())
    )


@scheme
@settings(max_examples=40, deadline=None)
@given(values=vectors(ANY))
def test_what_is_read_and_the_error_are_the_value_exactly(name: str, values: torch.Tensor) -> None:
    before = values.clone()
    _, out, error = coded(name, values)
    assert torch.equal(values.view(torch.int32), before.view(torch.int32))
    assert torch.isfinite(out).all() and torch.isfinite(error).all()
    assert torch.equal(out.double() + error.double(), sane(values).double())


@scheme
@settings(max_examples=15, deadline=None)
@given(values=vectors(FINITE))
def test_adding_is_reading_and_one_more_rounding(name: str, values: torch.Tensor) -> None:
    payload, out, _ = coded(name, values)
    total = random(values.numel(), 1)
    expected = total + out
    codec(name).add(payload, total)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("name", ["int8", "int4"])
@settings(max_examples=25, deadline=None)
@given(values=vectors(FINITE))
def test_integers_are_off_by_half_a_step_at_most(name: str, values: torch.Tensor) -> None:
    _, out, _ = coded(name, values)
    for lo in range(0, values.numel(), 256):
        block = values[lo : lo + 256].double()
        step = float(block.abs().max()) / STEPS[name]
        least = 2.0**-100 * STEPS[name]  # of which nothing is sent
        assert float((out[lo : lo + 256].double() - block).abs().max()) <= max(0.5001 * step, least)


def test_bf16_rounds_to_the_nearest_and_ties_to_even() -> None:
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -(1 + 2.0**-8), 1e-39, 0.0])
    _, out, _ = coded("bf16", ties)
    assert out[:4].tolist() == [1.0, 1 + 2.0**-6, 1 + 2.0**-7, -1.0]
    values = random(5000)
    assert torch.equal(coded("bf16", values)[1], values.to(torch.bfloat16).float())


def test_int8_and_int4_are_the_integers_of_an_oracle() -> None:
    for name, steps in STEPS.items():
        values = random(256 * 5, 3) * 10
        blocks = values.numpy().reshape(-1, 256)
        scale = (np.abs(blocks).max(1, keepdims=True) / np.float32(steps)).astype(np.float32)
        numbers = np.rint(blocks * (np.float32(1) / scale))
        assert np.abs(numbers).max() == steps
        expected = (numbers.astype(np.float32) * scale).reshape(-1)
        assert np.array_equal(coded(name, values)[1].numpy(), expected)


def test_topk_keeps_the_greatest_of_each_chunk() -> None:
    values = random(2 * CHUNK + 100, 5)
    _, out, error = coded("topk", values)
    for lo in range(0, values.numel(), CHUNK):
        chunk, read = values[lo : lo + CHUNK], out[lo : lo + CHUNK]
        kept = set(chunk.abs().topk(KEPT).indices.tolist())
        assert set(read.nonzero().view(-1).tolist()) <= kept
        step = float(chunk.abs().max()) / 127
        places = torch.tensor(sorted(kept))
        assert float((read[places] - chunk[places]).abs().max()) <= 0.5001 * step
    assert torch.equal(error[out == 0], values[out == 0])


def test_places_go_up_to_the_last_of_a_chunk() -> None:
    for places in (
        [0, CHUNK - 1],
        [1, 255, 256, 2048, 4094],
        list(range(KEPT)),
        list(range(CHUNK - KEPT, CHUNK)),
    ):
        values = torch.zeros(CHUNK)
        values[places] = 127.0
        assert torch.equal(coded("topk", values)[1], values)


@scheme
def test_zeros_and_nothing_at_all(name: str) -> None:
    for count in (1, 300, 5000):
        payload, out, error = coded(name, torch.zeros(count))
        assert not out.any() and not error.any()
        assert payload.numel() == codec(name).size_bytes(count)
    payload, out, _ = coded(name, torch.empty(0))
    assert payload.numel() == codec(name).size_bytes(0) == 0 and out.numel() == 0


@scheme
def test_the_error_may_take_the_values_place(name: str) -> None:
    values = random(CHUNK + 300, 9)
    payload, _, error = coded(name, values)
    again, coder = torch.empty_like(payload), codec(name)
    coder.encode(values, again, values)
    assert torch.equal(values, error) and torch.equal(again[: 4 * 17], payload[: 4 * 17])


@scheme
def test_sizes_depend_on_the_count_alone_and_are_aligned(name: str) -> None:
    coder, n = codec(name), 10_000_000
    assert all(coder.size_bytes(count) % 16 == 0 for count in range(0, 9000, 7))
    per_element = {"bf16": 2.0001, "int8": 1.0157, "int4": 0.5157, "topk": 0.0401}[name]
    assert coder.size_bytes(n) <= per_element * n


def test_a_vector_longer_than_a_piece_is_coded_like_its_parts() -> None:
    for name in SCHEMES:
        whole = random(compression.PIECE + CHUNK + 5, 11)
        _, out, error = coded(name, whole)
        cut = compression.PIECE
        for part in (slice(0, cut), slice(cut, None)):
            _, read, left = coded(name, whole[part].clone())
            assert torch.equal(read, out[part]) and torch.equal(left, error[part])


HASHES = """
import hashlib, numpy, torch
from p2p_dmc.train.compression import codec
random = numpy.random.default_rng(1)  # torch's own random numbers are not the same on all processors
values = torch.from_numpy(random.normal(size=70_001).astype("f4") * 2.0 ** random.integers(-30, 30, 70_001)).float()
hashed = []
for name in ("bf16", "int8", "int4", "topk"):
    coder = codec(name)
    payload = torch.zeros(coder.size_bytes(values.numel()), dtype=torch.uint8)
    error, total = torch.empty_like(values), values.flip(0)
    coder.encode(values, payload, error)
    coder.add(payload, total)
    read = torch.empty_like(values)
    coder.decode(payload, read)
    hashed += [hashlib.sha256(t.numpy().tobytes()).hexdigest() for t in (read, error, total)]
print(torch.backends.cpu.get_cpu_capability(), *hashed)
"""


def test_a_plain_processor_reads_the_same_bits() -> None:
    said = []
    for capability in ("default", ""):
        environment = {k: v for k, v in os.environ.items() if k != "ATEN_CPU_CAPABILITY"}
        environment |= {"ATEN_CPU_CAPABILITY": capability} if capability else {}
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        done = subprocess.run(
            [sys.executable, "-c", HASHES], env=environment, capture_output=True, text=True, check=True
        )
        said.append(done.stdout.split())
    (plain, *hashes), (_, *others) = said
    assert plain in ("DEFAULT", "NO AVX")
    assert len(hashes) == 12
    assert hashes == others
