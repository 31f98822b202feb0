"""The step on the anchor: against torch's SGD, and bit for bit against what a learner's agent does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import p2p_dmc as dmc
from p2p_dmc.agent import catch_up
from p2p_dmc.core.outer import AVERAGE, OuterPolicy, parse
from p2p_dmc.errors import UserError
from p2p_dmc.train import state
from p2p_dmc.train.outer import advance, policy_of

NESTEROV, BLOCK = parse("nesterov(lr=0.7, momentum=0.9)"), parse("block(beta=0.3)")


def test_nesterov_is_torchs_sgd_on_the_averaged_delta() -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(50))
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    before = torch.cat([parameter.detach().clone(), torch.zeros(50)])
    for _ in range(6):
        delta = torch.randn(50)
        parameter.grad = delta.clone()
        sgd.step()
        after = torch.empty(100)
        advance(before, delta * 3, 3, NESTEROV.step(16, 16) or (), after)
        before = after
    assert torch.allclose(before[:50], parameter.detach(), atol=1e-5)
    assert torch.allclose(before[50:], sgd.state[parameter]["momentum_buffer"], atol=1e-5)


def test_block_is_a_sum_of_what_was_before() -> None:
    before = torch.tensor([8.0, 0.0])
    for reduced, expected in ((2.0, [7.0, 1.0]), (4.0, [4.5, 2.5]), (0.0, [3.25, 1.25])):
        after = torch.empty(2)
        advance(before, torch.tensor([reduced]), 2, parse("block(beta=0.5)").step(9, 9) or (), after)
        assert after.tolist() == expected
        before = after


@pytest.mark.parametrize("divisor", [0, 2])
def test_a_plain_round_leaves_the_momentum(divisor: int) -> None:
    before, after = torch.tensor([1.0, 2.0, 5.0, -6.0]), torch.empty(4)
    advance(before, torch.tensor([4.0, 2.0]), divisor, (), after)
    assert after.tolist() == ([-1.0, 1.0, 5.0, -6.0] if divisor else before.tolist())
    after = torch.empty(4)
    advance(before, torch.tensor([4.0, 2.0]), 0, (0.5, 1.0, 0.0, 1.0), after)
    assert after.tolist() == before.tolist()
    alone = torch.empty(2)
    advance(before[:2], torch.tensor([4.0, 2.0]), 2, (), alone)
    assert alone.tolist() == [-1.0, 1.0]


@given(
    st.integers(0, 2**32),
    st.integers(1, 40),
    st.sampled_from([AVERAGE, NESTEROV, BLOCK]),
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(1, 1 << 40),
)
def test_a_learner_comes_to_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    size: int,
    policy: OuterPolicy,
    steps: int,
    reference: int,
    divisor: int,
) -> None:
    generator = np.random.default_rng(seed)
    coefficients = policy.step(steps, reference) or ()
    values = generator.standard_normal(size * policy.vectors) * 2.0 ** generator.integers(-40, 40)
    reduced = torch.from_numpy((generator.standard_normal(size) * divisor).astype(np.float32))
    folder = tmp_path_factory.getbasetemp()
    anchor, slot = folder / "anchor", folder / "mean"
    values.astype("<f4").tofile(anchor)
    before = torch.from_numpy(np.fromfile(anchor, "<f4"))
    generator.standard_normal(len(values)).astype("<f4").tofile(slot)  # what an earlier round left there
    mean = torch.from_numpy(np.memmap(slot, "<f4", "r+"))
    state.mean(reduced, divisor, out=mean[:size])
    after = torch.empty(len(before))
    advance(before, reduced, divisor, coefficients, after)
    pieces = catch_up.PIECE
    catch_up.PIECE = 7
    try:
        digest = catch_up.advance(anchor, slot, size, coefficients)
    finally:
        catch_up.PIECE = pieces
    assert slot.read_bytes() == after.numpy().tobytes()
    assert digest == state.digest_of(after)


@pytest.mark.parametrize(
    ("outer", "text"),
    [
        ("average", "average"),
        ("block", "block(beta=0.3)"),
        ("nesterov", "nesterov(lr=0.7, momentum=0.9)"),
        (dmc.Block(), "block(beta=0.3)"),
        (dmc.Block(beta=0.5), "block(beta=0.5)"),
        (dmc.Nesterov(lr=1, momentum=0.123456789), "nesterov(lr=1, momentum=0.123456789)"),
    ],
)
def test_what_a_script_may_say(outer: Any, text: str) -> None:
    assert str(policy_of(outer)) == text


@pytest.mark.parametrize(
    "outer",
    [
        "adam",
        None,
        0.9,
        dmc.Nesterov,
        dmc.Block(1.0),
        dmc.Block(float("nan")),
        dmc.Nesterov(lr=0),
        dmc.Nesterov(0.7, -1),
    ],
)
def test_what_it_may_not_say(outer: Any) -> None:
    with pytest.raises(UserError, match=r"outer=|Block\(|Nesterov\("):
        policy_of(outer)


def test_slots_are_files_of_both(tmp_path: Path) -> None:
    slot = state.open_slot(str(tmp_path / "slot"), 4)
    advance(torch.tensor([1.0, 2.0, 0.0, 0.0]), torch.ones(2), 1, NESTEROV.step(9, 9) or (), slot)
    assert np.fromfile(tmp_path / "slot", "<f4")[2:].tolist() == [1.0, 1.0]
