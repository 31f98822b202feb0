"""The outer optimizers' formulas (core/outer.py), in decimals against floats, and their words."""

from __future__ import annotations

import decimal
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_dmc.core.outer import AVERAGE, LEAST_STEPS, NANO, OuterPolicy, parse

NESTEROV = OuterPolicy(kind="nesterov", rate_nano=700_000_000, momentum_nano=900_000_000)
BLOCK = OuterPolicy(kind="block", momentum_nano=300_000_000)


def single(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def moved(policy: OuterPolicy, rounds: list[tuple[int, float]], reference: int) -> tuple[float, float]:
    """How far x has moved after rounds of (steps, averaged delta), and u; in one dimension."""
    x = u = 0.0
    for steps, delta in rounds:
        found = policy.step(steps, reference)
        if found is None:
            x += delta
        else:
            keep, gain, now, ahead = found
            u = keep * u + gain * delta
            x += now * delta + ahead * u
    return x, u


def test_block_momentum_is_the_papers() -> None:
    """u <- 0.3 u + D; x <- x - u."""
    assert BLOCK.step(16, 16) == (single(0.3), 1.0, 0.0, 1.0)
    x, u = moved(BLOCK, [(16, 1.0), (16, 1.0), (16, 2.0)], 16)
    assert u == pytest.approx(0.3 * 1.3 + 2) and x == pytest.approx(1 + 1.3 + 2.39)


def test_nesterovs_is_torchs() -> None:
    """u <- 0.9 u + D; x <- x - 0.7 (D + 0.9 u)."""
    assert NESTEROV.step(16, 16) == (single(0.9), 1.0, single(0.7), single(0.63))
    x, u = moved(NESTEROV, [(16, 1.0), (16, 1.0)], 16)
    assert u == pytest.approx(1.9) and x == pytest.approx(0.7 * 1.9 + 0.7 * (1 + 0.9 * 1.9))


def test_average_has_no_step_and_one_vector() -> None:
    assert AVERAGE.step(16, 16) is None
    assert [policy.vectors for policy in (AVERAGE, BLOCK, NESTEROV)] == [1, 2, 2]


@pytest.mark.parametrize(
    ("steps", "reference", "plain"), [(7, 64, True), (8, 64, False), (7, 7, True), (1, 1, True)]
)
def test_nesterovs_momentum_leaves_short_rounds_alone(steps: int, reference: int, plain: bool) -> None:
    assert (NESTEROV.step(steps, reference) is None) is plain
    assert BLOCK.step(steps, reference) is not None


@pytest.mark.parametrize("policy", [BLOCK, NESTEROV])
def test_nothing_but_an_average_before_the_first_tau_is_known(policy: OuterPolicy) -> None:
    assert policy.step(8, 0) is None and policy.step(0, 8) is None


@given(
    st.sampled_from([BLOCK, NESTEROV]),
    st.integers(LEAST_STEPS, 512),
    st.lists(st.integers(LEAST_STEPS, 512), min_size=1, max_size=9),
    st.floats(0.01, 100),
)
def test_a_steady_delta_moves_x_equally_far_in_rounds_of_any_length(
    policy: OuterPolicy, reference: int, lengths: list[int], per_step: float
) -> None:
    """Once u has become what it stays at: the delta of the reference's steps over 1 - momentum."""
    share = 1 - policy.momentum_nano / NANO
    u = per_step * reference / share
    for steps in lengths:
        found = policy.step(steps, reference)
        assert found is not None
        keep, gain, now, ahead = found
        delta = per_step * steps
        assert keep * u + gain * delta == pytest.approx(u, rel=1e-5)
        if policy is BLOCK:
            assert now * delta + ahead * u == pytest.approx(delta / share, rel=1e-5)
        else:
            power = (policy.momentum_nano / NANO) ** (steps / reference)
            assert now * delta + ahead * u == pytest.approx(0.7 * (delta + power * delta / share), rel=1e-5)


def test_momentum_is_a_matter_of_time() -> None:
    """Two rounds of half the steps keep as much of u as one of all of them."""
    half, whole = NESTEROV.step(32, 64), NESTEROV.step(64, 64)
    assert half is not None and whole is not None
    assert half[0] ** 2 == pytest.approx(whole[0], rel=1e-6)
    assert half[1] == pytest.approx((1 - 0.9**0.5) / 0.1 * 2, rel=1e-6)
    assert half[3] == pytest.approx(0.7 * 0.9**0.5 / 2, rel=1e-6)
    assert half == (0.9486833214759827, 1.0263340473175049, 0.699999988079071, 0.33203914761543274)


def test_without_momentum_u_is_the_delta_of_the_references_steps() -> None:
    policy = OuterPolicy(kind="block")
    assert policy.step(16, 64) == (0.0, 4.0, 0.0, 0.25)


def test_the_threads_decimal_context_has_no_say() -> None:
    wanted = NESTEROV.step(37, 64)
    with decimal.localcontext() as context:
        context.prec = 3
        context.rounding = decimal.ROUND_UP
        assert NESTEROV.step(37, 64) == wanted
        assert parse(str(NESTEROV)) == NESTEROV


@pytest.mark.parametrize(
    "text",
    [
        "average",
        "block(beta=0.3)",
        "block(beta=0)",
        "nesterov(lr=0.7, momentum=0.9)",
        "nesterov(lr=1, momentum=0)",
    ],
)
def test_words_there_and_back(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "block",
        "Average",
        "block(beta=1)",
        "block(beta=0.30)",
        "block(beta=0.3",
        "block(beta=0.3)x",
        "nesterov(lr=0, momentum=0.9)",
        "nesterov(lr=0.7, momentum=1.5)",
        "nesterov(lr=10, momentum=0.9)",
        "nesterov(lr=0.7,momentum=0.9)",
        "nesterov(lr=\u0661, momentum=0.9)",
    ],
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "adam"},
        {"kind": "average", "momentum_nano": 1},
        {"kind": "average", "rate_nano": 1},
        {"kind": "block", "rate_nano": 1},
        {"kind": "block", "momentum_nano": NANO},
        {"kind": "block", "momentum_nano": -1},
        {"kind": "block", "momentum_nano": 0.5},
        {"kind": "nesterov", "rate_nano": 0},
        {"kind": "nesterov", "rate_nano": True},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        OuterPolicy(**wrong)  # type: ignore[arg-type]
