"""AdaComm's basic rule (Wang and Joshi, MLSys 2019) in integers, against the paper's formula in floats."""

from __future__ import annotations

import contextlib
import math
import random

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_dmc.core.adacomm import RoundFacts, TauPolicy, TauState, after_round, start
from p2p_dmc.errors import RemoteProtocolError

SECOND = 1_000_000
ADACOMM = TauPolicy(kind="adacomm", tau0=16, t0_ms=10_000, tau_max=64)


def facts(
    loss: float = 1.0, samples: int = 100, compute_us: int = SECOND, comm_us: int = SECOND, steps: int = 4
) -> RoundFacts:
    return RoundFacts(
        samples=samples,
        steps=steps,
        loss_sum_micro=round(loss * samples * 1_000_000),
        compute_us=compute_us,
        comm_us=comm_us,
    )


def run(policy: TauPolicy, losses: list[float]) -> TauState:
    """Rounds of one member, each one T0 long."""
    state = start(policy)
    for loss in losses:
        state = after_round(policy, state, [facts(loss, compute_us=policy.t0_ms * 1000 - SECOND)])
    return state


# --- tau = ceil(sqrt(F / F0) * tau0) ---------------------------------------------------------------------


@given(st.floats(0.01, 50), st.floats(0.0, 50), st.integers(1, 64))
def test_tau_follows_the_papers_formula(f0: float, f: float, tau0: int) -> None:
    policy = TauPolicy(kind="adacomm", tau0=tau0, t0_ms=10_000, tau_max=10**6)
    state = run(policy, [f0, f])
    exact = math.sqrt(round(f * 100_000_000) / round(f0 * 100_000_000)) * tau0
    near = {max(1, math.ceil(exact * (1 - 1e-6))), max(1, math.ceil(exact * (1 + 1e-6)))}
    assert state.tau in near


@pytest.mark.parametrize(
    ("loss", "tau"), [(4.0, 16), (3.9999, 16), (1.0, 8), (1.0001, 9), (0.25, 4), (1e-9, 1), (0.0, 1)]
)
def test_tau_at_known_losses(loss: float, tau: int) -> None:
    assert run(ADACOMM, [4.0, loss]).tau == tau


def test_the_loss_is_the_mean_over_the_interval_weighted_by_samples() -> None:
    state = after_round(ADACOMM, start(ADACOMM), [facts(2.0, samples=10), facts(4.0, samples=30)])
    assert state.f0_micro == 3_500_000
    state = after_round(
        ADACOMM, state, [facts(1.0, samples=40), facts(0.5, samples=120, compute_us=8 * SECOND)]
    )
    mean = (2.0 * 10 + 4.0 * 30 + 1.0 * 40 + 0.5 * 120) / 200
    assert state.tau == math.ceil(math.sqrt(mean / 3.5) * 16) == 10
    assert (state.interval_samples, state.interval_loss_micro) == (0, 0)


def test_a_rising_loss_raises_tau_up_to_the_maximum() -> None:
    assert run(ADACOMM, [1.0, 4.0]).tau == 32
    assert run(ADACOMM, [1.0, 400.0]).tau == 64


# --- every T0 of the agreed clock ------------------------------------------------------------------------


def test_the_clock_is_the_longest_computation_plus_the_shortest_collective() -> None:
    headers = [
        facts(compute_us=3, comm_us=90),
        facts(compute_us=50, comm_us=40),
        facts(compute_us=1, comm_us=0),
    ]
    assert after_round(ADACOMM, start(ADACOMM), headers).elapsed_us == 50 + 40
    assert after_round(ADACOMM, start(ADACOMM), [facts(compute_us=7, comm_us=0)]).elapsed_us == 7
    assert after_round(ADACOMM, start(ADACOMM), []) == start(ADACOMM)


def test_tau_changes_only_when_the_clock_passes_a_multiple_of_t0() -> None:
    state, taus = start(ADACOMM), []
    for i in range(12):  # 2 s each, T0 is 10 s
        state = after_round(ADACOMM, state, [facts(1.0 if i < 5 else 0.25)])
        taus.append(state.tau)
    assert taus == [16] * 9 + [8] * 3
    assert state.interval_samples == 200


def test_a_round_longer_than_t0_fires_once_and_keeps_the_grid() -> None:
    state = after_round(ADACOMM, start(ADACOMM), [facts(compute_us=34 * SECOND, comm_us=SECOND)])
    state = after_round(ADACOMM, state, [facts(0.25, compute_us=3 * SECOND)])
    assert state.tau == 16
    assert after_round(ADACOMM, state, [facts(0.25)]).tau == 8


# --- invariant 13 ----------------------------------------------------------------------------------------


@given(st.integers(0, 2**32))
def test_the_order_of_the_headers_does_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    one = other = start(ADACOMM)
    for _ in range(10):
        headers = [
            facts(rng.random() * 5, rng.randrange(50), rng.randrange(9 * SECOND), rng.randrange(SECOND))
            for _ in range(rng.randint(1, 5))
        ]
        one = after_round(ADACOMM, one, headers)
        other = after_round(ADACOMM, TauState.from_bytes(other.to_bytes()), rng.sample(headers, len(headers)))
        assert one.to_bytes() == other.to_bytes()
        assert 1 <= one.tau <= ADACOMM.tau_max


def test_members_without_samples_have_no_say_in_the_loss() -> None:
    learner = RoundFacts(samples=0, steps=0, loss_sum_micro=10**15, compute_us=0, comm_us=SECOND)
    assert after_round(ADACOMM, start(ADACOMM), [facts(2.0), learner]).f0_micro == 2_000_000
    nobody = after_round(ADACOMM, start(ADACOMM), [learner])
    assert nobody.f0_micro is None
    assert after_round(ADACOMM, nobody, [facts(3.0)]).f0_micro == 3_000_000


def test_absurd_headers_do_not_stop_the_run() -> None:
    big = RoundFacts(samples=2**63 - 1, steps=1, loss_sum_micro=2**63 - 1, compute_us=2**63 - 1, comm_us=0)
    state = start(ADACOMM)
    for _ in range(3):
        state = after_round(ADACOMM, state, [big, big])
        assert TauState.from_bytes(state.to_bytes()) == state


def test_an_interval_without_samples_changes_nothing_but_the_clock() -> None:
    state = run(ADACOMM, [4.0, 1.0])
    idle = after_round(ADACOMM, state, [facts(samples=0, compute_us=20 * SECOND)])
    assert (idle.tau, idle.reason) == (8, state.reason)


def test_a_loss_that_is_not_positive_keeps_tau_in_range() -> None:
    assert run(ADACOMM, [1.0, -3.0]).tau == 1
    assert run(ADACOMM, [0.0, 1.0]).tau == run(ADACOMM, [-1.0, 1.0]).tau == 16
    assert "not positive" in run(ADACOMM, [0.0, 1.0]).reason


# --- fixed, words, bytes ---------------------------------------------------------------------------------


def test_a_fixed_tau_stays() -> None:
    policy = TauPolicy(kind="fixed", tau0=8, t0_ms=1_000, tau_max=4)
    state = run(policy, [4.0, 0.1, 9.0])
    assert (state.tau, state.reason, state.elapsed_us) == (8, "fixed", 3 * SECOND)
    assert (state.interval_samples, state.interval_loss_micro) == (0, 0)


def test_the_reason_is_for_people() -> None:
    assert start(ADACOMM).reason == "start"
    assert run(ADACOMM, [1.0, 0.6199]).reason == "loss 0.61 of the first round's"
    assert run(ADACOMM, [1.0, 1.5]).reason == "loss 1.50 of the first round's"


def test_bytes_round_trip_and_refuse_everything_else() -> None:
    state = run(ADACOMM, [4.0, 1.0])
    assert TauState.from_bytes(state.to_bytes()) == state
    assert TauState.from_bytes(start(ADACOMM).to_bytes()) == start(ADACOMM)
    assert TauPolicy.from_bytes(ADACOMM.to_bytes()) == ADACOMM
    for read, data in ((TauState.from_bytes, state.to_bytes()), (TauPolicy.from_bytes, ADACOMM.to_bytes())):
        for end in range(len(data)):
            with pytest.raises(RemoteProtocolError):
                read(data[:end])
        for wrong in (data + b"\x00", b"\x02" + data, msgpack.packb(msgpack.unpackb(data)[1:])):
            with pytest.raises(RemoteProtocolError):
                read(wrong)
        for at in range(len(msgpack.unpackb(data))):
            for value in (-(2**63), 1.5, True, [1], "x" * 300, 2**64 - 1):
                fields = msgpack.unpackb(data)
                fields[at] = value
                with contextlib.suppress(RemoteProtocolError):
                    assert read(msgpack.packb(fields)).to_bytes() == msgpack.packb(fields)


@pytest.mark.parametrize(
    "wrong", [{"kind": "magic"}, {"tau0": 0}, {"tau0": 65}, {"t0_ms": 0}, {"tau_max": 2.0}, {"tau0": True}]
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    fields: dict[str, object] = {"kind": "adacomm", "tau0": 16, "t0_ms": 10_000, "tau_max": 64}
    with pytest.raises(ValueError):
        TauPolicy(**{**fields, **wrong})  # type: ignore[arg-type]


def test_facts_that_make_no_sense_are_refused() -> None:
    for name in ("samples", "steps", "compute_us", "comm_us"):
        fields = {"samples": 1, "steps": 1, "loss_sum_micro": 1, "compute_us": 1, "comm_us": 1, name: -1}
        with pytest.raises(ValueError, match=name):
            RoundFacts(**fields)
