"""Which scheme a round travels in: a function of the headers that everybody has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_dmc.core.compression import AUTO, PLAIN, SCHEMES, SETTINGS, Compression, Measured

BIG = 10_000_000


def measured(mbit: int, seconds: int = 1) -> Measured:
    return Measured(bytes_sent=mbit * 125_000 * seconds, comm_us=seconds * 1_000_000)


def test_a_scheme_that_was_asked_for_is_taken_whatever_is_measured() -> None:
    assert PLAIN.scheme([measured(1)]) == "none"
    for setting in SCHEMES:
        assert (
            Compression(setting=setting, parameters=BIG).scheme([measured(1), measured(100_000)]) == setting
        )


@pytest.mark.parametrize(
    ("mbit", "scheme"), [(1, "int8"), (999, "int8"), (1000, "bf16"), (3999, "bf16"), (4000, "none")]
)
def test_auto_follows_what_was_measured(mbit: int, scheme: str) -> None:
    auto = Compression(setting=AUTO, parameters=BIG)
    assert auto.scheme([measured(mbit)]) == scheme
    learner = Measured(bytes_sent=0, comm_us=0)
    assert auto.scheme([learner, measured(mbit, seconds=7), learner]) == scheme
    waited = measured(mbit)._replace(comm_us=9_000_000)  # for somebody slow: the link is no slower for that
    assert auto.scheme([waited, measured(mbit)]) == scheme


def test_auto_compresses_nothing_before_it_has_measured_and_nothing_small() -> None:
    auto = Compression(setting=AUTO, parameters=BIG)
    assert auto.scheme([]) == auto.scheme([Measured(0, 0), Measured(0, 5)]) == "none"
    assert Compression(setting=AUTO, parameters=1000).scheme([measured(1)]) == "none"


@given(st.lists(st.builds(Measured, st.integers(0, 2**53), st.integers(0, 2**53))), st.randoms())
def test_the_order_of_members_decides_nothing(headers: list[Measured], random: object) -> None:
    auto = Compression(setting=AUTO, parameters=BIG)
    shuffled = list(headers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert auto.scheme(headers) == auto.scheme(shuffled)
    assert auto.scheme(headers) in SCHEMES


@pytest.mark.parametrize("wrong", ["", "int2", "INT8", "None"])
def test_an_unknown_setting_is_named(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"none, bf16, int8, int4, topk, auto"):
        Compression(setting=wrong)
    assert wrong not in SETTINGS
