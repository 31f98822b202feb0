"""Shares that are wanted, and the passes that are taken for them, against a search of all small ones."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.data.mixture import MAX_PASSES
from p2p_dmc.data.proportions import TOLERANCE, passes_for
from p2p_dmc.errors import UserError

NAMES = ("a", "b", "c")


def shares(passes: dict[str, int], samples: dict[str, int]) -> dict[str, float]:
    total = sum(passes[name] * samples[name] for name in passes)
    return {name: passes[name] * samples[name] / total for name in passes}


def within(
    passes: dict[str, int], weights: dict[str, float], samples: dict[str, int], tolerance: float
) -> bool:
    reached = shares(passes, samples)
    return all(
        abs(reached[name] - weight / sum(weights.values())) <= tolerance + 1e-9
        for name, weight in weights.items()
    )


@pytest.mark.parametrize(
    ("weights", "samples", "passes"),
    [
        ({"web": 0.7, "code": 0.3}, {"web": 700, "code": 300}, {"web": 1, "code": 1}),
        ({"web": 0.7, "code": 0.3}, {"web": 100, "code": 100}, {"web": 7, "code": 3}),
        ({"web": 0.7, "code": 0.3}, {"web": 7000, "code": 100}, {"web": 1, "code": 30}),
        ({"web": 0.5, "code": 0.5}, {"web": 1000, "code": 100}, {"web": 1, "code": 10}),
        ({"web": 2.0, "code": 1.0}, {"web": 10, "code": 10}, {"web": 2, "code": 1}),
        ({"web": 3.0}, {"web": 10}, {"web": 1}),
    ],
)
def test_golden(weights: dict[str, float], samples: dict[str, int], passes: dict[str, int]) -> None:
    """They are part of a run's identity: other ones, and no peer could join or resume."""
    assert passes_for(weights, samples) == passes


def test_weights_are_shares_of_their_sum_whatever_numbers_say_them() -> None:
    samples = {"web": 120, "code": 36}
    spoken = [
        (5, 3),
        (0.625, 0.375),
        (np.float64(0.625), np.float32(0.375)),
        (5e-300, 3e-300),
        (5 * 10**400, 3 * 10**400),
    ]
    found = [passes_for({"web": web, "code": code}, samples) for web, code in spoken]
    assert found == [{"web": 1, "code": 2}] * len(spoken)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 60)), min_size=1, max_size=3),
    st.sampled_from([0.01, 0.03, 0.1]),
)
@settings(max_examples=80)
def test_the_shares_are_met_and_an_epoch_is_short(pairs: list[tuple[int, int]], tolerance: float) -> None:
    weights = {name: float(weight) for name, (weight, _) in zip(NAMES, pairs, strict=False)}
    samples = {name: count for name, (_, count) in zip(NAMES, pairs, strict=False)}
    rates = [weight / count for weight, count in pairs]
    if max(rates) / min(rates) > MAX_PASSES:
        with pytest.raises(UserError):
            passes_for(weights, samples, tolerance)
        return
    passes = passes_for(weights, samples, tolerance)
    assert passes.keys() == weights.keys() and min(passes.values()) >= 1
    assert within(passes, weights, samples, tolerance)
    assert math.gcd(*passes.values()) == 1
    assert passes == passes_for(dict(reversed(weights.items())), samples, tolerance)
    least = min(passes.values())
    for once in range(1, least):  # with fewer of the least, no rounding of the others is near enough
        options = [
            {once * rate / min(rates) // 1, -(-once * rate / min(rates) // 1)} | {once} for rate in rates
        ]
        nearest = [
            min(choice, key=lambda n, rate=rate: abs(n - once * rate / min(rates)))
            for choice, rate in zip(options, rates, strict=True)
        ]
        tried = {name: int(n) for name, n in zip(weights, nearest, strict=True)}
        assert not within(tried, weights, samples, tolerance - 1e-6)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=2, max_size=3))
@settings(max_examples=40)
def test_no_other_passes_are_much_shorter(pairs: list[tuple[int, int]]) -> None:
    """All of up to twelve are tried: whatever is shorter misses a share, or is nearly as long."""
    weights = {name: float(weight) for name, (weight, _) in zip(NAMES, pairs, strict=False)}
    samples = {name: count for name, (_, count) in zip(NAMES, pairs, strict=False)}
    taken = passes_for(weights, samples, 0.05)
    length = sum(taken[name] * samples[name] for name in taken)
    for passes in product(range(1, 13), repeat=len(pairs)):
        tried = dict(zip(weights, passes, strict=True))
        if within(tried, weights, samples, 0.05 - 1e-6):
            shorter = sum(tried[name] * samples[name] for name in tried)
            assert length <= 2 * shorter, (taken, tried)


@pytest.mark.parametrize("bad", [0, 0.0, -1, math.nan, math.inf, True, "1", None])
def test_what_is_no_weight(bad: object) -> None:
    with pytest.raises(UserError, match="of data set 'b': a number above 0; leave out what is not wanted"):
        passes_for({"a": 1.0, "b": bad}, {"a": 10, "b": 10})  # type: ignore[dict-item]


@pytest.mark.parametrize("bad", [-0.1, 1, math.nan, True, "1"])
def test_what_is_no_tolerance(bad: object) -> None:
    with pytest.raises(
        UserError, match=r"tolerance .*the share of samples that may be missed, such as 0\.01"
    ):
        passes_for({"a": 1.0}, {"a": 10}, bad)  # type: ignore[arg-type]


def test_more_passes_than_there_may_be() -> None:
    with pytest.raises(UserError) as refused:
        passes_for({"web": 0.1, "code": 0.9}, {"web": 1_000_000, "code": 100})
    assert str(refused.value) == (
        "data set 'code' is to be 90.00% of the samples and has 100: that takes more than 1000 passes over it "
        "an epoch; give it less weight, or a larger tolerance than 0.01"
    )
    with pytest.raises(UserError, match=r"a larger tolerance than 1e-09"):
        passes_for({"a": math.pi, "b": 1.0}, {"a": 10, "b": 10}, 1e-9)
    with pytest.raises(UserError, match=r"a larger tolerance than 1e-09"):
        passes_for({"a": math.pi, "b": 1.0}, {"a": 10, "b": 10}, Fraction("1e-9"))  # type: ignore[arg-type]
    assert TOLERANCE == 0.01
