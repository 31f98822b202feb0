"""AdaComm's rules (Wang and Joshi, MLSys 2019) in integers, against the paper's formulas in floats."""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_dmc.core.adacomm import RoundFacts, TauPolicy, TauState, after_round, start
from p2p_dmc.errors import RemoteProtocolError

SECOND = 1_000_000
ADACOMM = TauPolicy(kind="adacomm", tau0=16, t0_ms=10_000, tau_max=64)


def facts(
    loss: float = 1.0,
    samples: int = 100,
    compute_us: int = SECOND,
    comm_us: int = SECOND,
    steps: int = 4,
    rate: float = 0.0,
) -> RoundFacts:
    return RoundFacts(
        samples=samples,
        steps=steps,
        loss_sum_micro=round(loss * samples * 1_000_000),
        compute_us=compute_us,
        comm_us=comm_us,
        rate_nano=round(rate * 10**9),
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


# --- with the learning rate: tau = ceil(sqrt(eta0 / eta * F / F0) * tau0) --------------------------------


RATE = replace(ADACOMM, rate=True)


def looked(policy: TauPolicy, *intervals: tuple[float, float]) -> TauState:
    """Rounds of one member with these losses and learning rates, each one T0 long."""
    state = start(policy)
    for loss, rate in intervals:
        told = facts(loss, compute_us=policy.t0_ms * 1000 - SECOND, rate=rate)
        state = after_round(policy, state, [told])
    return state


@pytest.mark.parametrize(
    ("rate", "loss", "tau"),
    [(0.1, 1.0, 8), (0.05, 1.0, 12), (0.025, 1.0, 16), (0.01, 1.0, 26), (0.01, 0.1, 8)],
)
def test_a_lower_rate_asks_for_more_steps(rate: float, loss: float, tau: int) -> None:
    """sqrt(2) * 8 = 11.3, sqrt(10) * 8 = 25.3, sqrt(10 / 40) * 16 = 8."""
    assert looked(RATE, (4.0, 0.1), (loss, rate)).tau == tau
    assert looked(ADACOMM, (4.0, 0.1), (loss, rate)).tau == looked(RATE, (4.0, 0.1), (loss, 0.1)).tau


def test_a_warm_up_is_no_decay() -> None:
    state = looked(RATE, (4.0, 0.001), (4.0, 0.01), (1.0, 0.1))
    assert (state.tau, state.rate0_nano) == (8, 10**8)
    assert looked(RATE, (4.0, 0.001), (4.0, 0.1), (1.0, 0.025)).tau == 16


def test_the_members_middle_rate_is_the_runs_and_an_unknown_one_is_none() -> None:
    told = [facts(rate=r) for r in (0.1, 0.3, 0.2, 0.4, 0.0)] + [facts(samples=0, rate=9.0)]
    state = after_round(RATE, start(RATE), told)
    assert (state.rate_nano, state.rate0_nano) == (2 * 10**8, 2 * 10**8)
    state = after_round(RATE, state, [facts()])
    assert state.rate_nano == 2 * 10**8
    assert looked(RATE, (4.0, 0.0), (1.0, 0.0)).tau == 8


# --- above the loss's infimum: F - Finf ------------------------------------------------------------------


def test_a_floor_is_subtracted_from_both_losses() -> None:
    floor = replace(ADACOMM, floor_micro=600_000)
    assert run(floor, [4.6, 1.6]).tau == 8
    assert run(floor, [4.6, 0.85]).tau == 4
    assert run(floor, [4.6, 0.5]).tau == 1
    assert run(floor, [4.6, 1.6]).reason == "loss 0.25 of the first round's above the floor"
    assert run(floor, [0.6, 0.6]).tau == run(floor, [0.5, 9.0]).tau == 16
    assert run(floor, [0.6, 0.6]).reason == "the first round's loss was not above its floor"
    assert run(replace(ADACOMM, floor_micro=-1_000_000), [0.0, -0.75]).tau == 8


# --- refined: tau = c if c < tau, else tau / 2 -----------------------------------------------------------


PAPER = replace(ADACOMM, rule="paper")


def test_the_refined_rule_takes_what_is_less_and_halves_otherwise() -> None:
    losses = [4.0, 3.0, 0.1, 0.09, 4.0, 4.0]  # c is 16, 14, 3, 3, 16, 16
    taus = [run(PAPER, losses[: n + 1]).tau for n in range(6)]
    assert taus == [8, 4, 3, 2, 1, 1]  # the first look too: its loss is F0 itself
    assert run(PAPER, [4.0, 0.2]).tau == run(PAPER, [4.0, 0.9]).tau == 4  # c is 4, and 8


@pytest.mark.parametrize(("tau", "half"), [(1, 1), (2, 1), (3, 2), (5, 3), (64, 32)])
def test_half_of_an_odd_tau_is_rounded_up(tau: int, half: int) -> None:
    state = run(replace(PAPER, tau0=tau), [4.0])
    assert state.tau == half
    assert state.reason.startswith("as low as it goes: " if tau == 1 else "halved: loss 1.00 of")


@given(st.lists(st.floats(0, 9), min_size=1, max_size=9), st.sampled_from(["paper", "plateau"]))
def test_a_refined_tau_never_grows(losses: list[float], rule: str) -> None:
    state = start(replace(ADACOMM, rule=rule))
    for loss in losses:
        before, state = state, after_round(PAPER, state, [facts(loss, compute_us=9 * SECOND)])
        assert state.tau <= before.tau


# --- plateau: halved only if F > 0.99 F_before -----------------------------------------------------------


PLATEAU = replace(ADACOMM, rule="plateau", tau0=64)


@pytest.mark.parametrize(
    ("loss", "tau"), [(0.99, 64), (0.990001, 32), (1.0, 32), (5.0, 32), (0.98, 64), (0.9, 61), (0.25, 32)]
)
def test_a_loss_that_falls_keeps_tau(loss: float, tau: int) -> None:
    """c of 0.99 is 64, of 0.9 it is 61: what is less than tau is taken whatever the loss does."""
    state = replace(run(PLATEAU, [1.0]), tau=64)
    assert after_round(PLATEAU, state, [facts(loss, compute_us=9 * SECOND)]).tau == tau


def test_the_loss_before_is_that_of_the_interval_before() -> None:
    state = run(PLATEAU, [4.0, 9.0, 8.9, 8.91, 8.0])
    assert state.last_micro == 8_000_000
    assert run(PLATEAU, [4.0]).tau == 32  # F0 itself is no fall
    assert run(PLATEAU, [4.0, 9.0]).tau == 16
    assert run(PLATEAU, [4.0, 9.0, 8.91]).tau == 16
    assert run(PLATEAU, [4.0, 9.0, 8.911]).tau == 8
    assert run(PLATEAU, [4.0, 9.0, 8.91]).reason.startswith("kept, the loss still falls: loss 2.22 of")


def test_a_negative_loss_falls_too() -> None:
    negative = replace(PLATEAU, floor_micro=-10_000_000)
    states = [replace(run(negative, [-1.0]), tau=2) for _ in range(2)]
    fell, stood = (
        after_round(negative, s, [facts(loss, compute_us=9 * SECOND)]).tau
        for s, loss in zip(states, (-1.01, -1.005), strict=True)
    )
    assert (fell, stood) == (2, 1)


# --- tau0 from the ratio of communication to computation -------------------------------------------------


AUTO = TauPolicy(kind="adacomm", tau0=0, t0_ms=10_000, tau_max=64)


def measured(policy: TauPolicy, *rounds: tuple[int, int], members: int = 2, steps: int = 8) -> TauState:
    """Rounds of members alike, the collective (us) and a local step (us) of each; the first ones tell nothing."""
    state = start(policy)
    for comm_us, step_us in ((0, 999), *rounds):
        told = facts(steps=steps, compute_us=steps * step_us + 3, comm_us=comm_us)
        state = after_round(policy, state, [told] * members)
    return state


@pytest.mark.parametrize(
    ("comm_us", "tau0"),
    [(1, 8), (880, 8), (889, 9), (1000, 9), (1001, 10), (4000, 36), (7111, 64), (90_000, 64)],
)
def test_tau0_leaves_nine_tenths_of_the_time_to_computation(comm_us: int, tau0: int) -> None:
    state = measured(AUTO, *[(comm_us, 1000)] * 3)
    assert (state.tau, state.tau0, state.measured) == (tau0, tau0, 3)
    assert measured(replace(AUTO, tau_max=5), *[(comm_us, 1000)] * 3).tau == 5


def test_until_it_is_measured_tau_is_eight_and_no_interval_ends() -> None:
    for rounds in range(3):
        state = measured(AUTO, *[(5 * SECOND, 2 * SECOND)] * rounds)
        assert (state.tau, state.tau0, state.reason) == (8, 0, "communication is being measured")
    state = measured(AUTO, *[(5 * SECOND, 2 * SECOND)] * 3)
    assert (state.tau, state.interval_samples, state.interval_loss_micro) == (23, 0, 0)
    assert state.reason == "a round's communication takes 2.5 local steps"
    assert start(replace(AUTO, tau_max=3)).tau == 3


def test_the_ratio_moves_by_halves_then_quarters_then_eighths() -> None:
    one = 65536
    assert measured(AUTO, (1000, 1000)).ratio_q16 == one
    assert measured(AUTO, (1000, 1000), (3000, 1000)).ratio_q16 == 2 * one
    assert measured(AUTO, (1000, 1000), (3000, 1000), (6000, 1000)).ratio_q16 == 3 * one
    four = [(1000, 1000), (3000, 1000), (6000, 1000), (3000 + 8000, 1000)]
    assert measured(replace(AUTO, tau_max=8), *four).ratio_q16 == 4 * one
    assert measured(replace(AUTO, tau_max=8), *four, (4000 - 800, 1000)).ratio_q16 == 4 * one - 6554


def test_the_shortest_collective_and_the_middle_step_count() -> None:
    state = replace(start(AUTO), members=4)
    told = [(8, 8 * 1000, 9000), (8, 8 * 3000, 4000), (8, 8 * 2000, 0), (8, 8 * 9000, 7000)]
    headers = [facts(steps=s, compute_us=c, comm_us=d) for s, c, d in told]
    assert after_round(AUTO, state, headers).ratio_q16 == 2 * 65536
    headers[1] = replace(headers[1], samples=0)
    assert after_round(AUTO, state, headers).ratio_q16 == 2 * 65536  # idle, but in the collective
    headers[2] = replace(headers[2], compute_us=0)
    assert after_round(AUTO, state, headers).ratio_q16 == 4 * 65536


def test_rounds_that_tell_nothing_of_the_ratio() -> None:
    seen = replace(start(AUTO), members=2)
    good = facts(steps=4, compute_us=4000, comm_us=1000)
    assert after_round(AUTO, seen, [good] * 2).measured == 1
    assert after_round(AUTO, replace(seen, members=1), [good]).measured == 0  # alone
    assert after_round(AUTO, seen, [good]).measured == 0  # the others are gone
    assert after_round(AUTO, seen, [good] * 3).measured == 0  # somebody has come
    for nothing in ({"steps": 3}, {"steps": 0}, {"samples": 0}, {"comm_us": 0}):
        assert after_round(AUTO, seen, [replace(good, **nothing)] * 2).measured == 0
    assert after_round(AUTO, replace(seen, tau=1), [replace(good, steps=0)] * 2).measured == 0
    quick = [replace(good, compute_us=3, comm_us=7)] * 2
    assert after_round(AUTO, seen, quick).ratio_q16 == 7 * 65536  # a step of no time at all


def test_a_run_that_begins_with_two_rounds_of_one_step_is_measured_after_them() -> None:
    """As `core.pace` has it: those say little about a step, and the first has no collective before it."""
    state = start(AUTO)
    for steps, comm_us in ((1, 0), (1, 90_000), (8, 5000), (8, 5000), (8, 5000)):
        state = after_round(AUTO, state, [facts(steps=steps, compute_us=steps * 1000, comm_us=comm_us)] * 2)
    assert (state.measured, state.tau) == (3, 45)


def test_from_a_measured_tau0_on_the_rules_go_by_it() -> None:
    state = measured(replace(AUTO, rule="paper"), *[(4 * SECOND, SECOND)] * 3)
    assert state.tau == 36
    state = after_round(replace(AUTO, rule="paper"), state, [facts(0.25, compute_us=10 * SECOND)])
    assert state.tau == 18


# --- the bounds: [max(1, ceil(ratio * u / (1 - u))), tau_max] --------------------------------------------


@pytest.mark.parametrize(
    ("permille", "steps", "tau"),
    [
        (0, 10, 1),
        (500, 10, 10),
        (500, 1, 1),
        (900, 4, 36),
        (333, 10, 5),
        (1, 10, 1),
        (999, 10, 64),
        (800, 10, 40),
    ],
)
def test_tau_leaves_computation_its_share(permille: int, steps: int, tau: int) -> None:
    policy = replace(ADACOMM, utilisation_permille=permille)
    state = replace(run(policy, [4.0]), ratio_q16=steps * 65536)
    state = after_round(policy, state, [facts(0.0, compute_us=10 * SECOND)])
    assert state.tau == tau and state.lowest
    assert ("for the least utilisation" in state.reason) == (tau > 1)


def test_the_share_holds_for_a_measured_tau0_too() -> None:
    policy = replace(AUTO, utilisation_permille=950)
    assert measured(policy, *[(1000, 1000)] * 3).tau == 19
    assert not measured(policy, *[(1000, 1000)] * 3).lowest


def test_the_upper_bound_is_named() -> None:
    assert run(ADACOMM, [1.0, 400.0]).reason == "no more than 64; loss 400.00 of the first round's"
    assert run(ADACOMM, [1.0, 16.0]).reason == "loss 16.00 of the first round's"


# --- decay of the learning rate is held until tau has reached its least ----------------------------------


def test_the_rate_may_decay_once_tau_has_been_at_its_least() -> None:
    assert start(TauPolicy(kind="fixed", tau0=8)).lowest
    assert start(replace(ADACOMM, tau0=1)).lowest
    assert not start(ADACOMM).lowest and not start(AUTO).lowest
    assert [run(PAPER, [4.0] * n).lowest for n in range(1, 6)] == [False, False, False, True, True]
    state = run(ADACOMM, [4.0, 0.0])
    assert state.tau == 1 and state.lowest
    state = after_round(ADACOMM, state, [facts(4.0, compute_us=9 * SECOND)])
    assert state.tau == 16 and state.lowest
    assert measured(replace(AUTO, tau_max=1), *[(1000, 1000)] * 3).lowest


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


def random_facts(rng: random.Random) -> RoundFacts:
    return RoundFacts(
        samples=rng.randrange(50),
        steps=rng.randrange(40),
        loss_sum_micro=rng.randrange(-(10**6), 10**9),
        compute_us=rng.randrange(9 * SECOND),
        comm_us=rng.choice([0, 1, rng.randrange(SECOND), rng.randrange(90 * SECOND)]),
        rate_nano=rng.choice([0, 1, 10**8, 10**9]),
    )


policies = st.builds(
    lambda tau0, tau_max, **rest: TauPolicy(kind="adacomm", tau0=tau0, tau_max=max(tau0, tau_max), **rest),
    tau0=st.integers(0, 70),
    tau_max=st.integers(1, 100),
    t0_ms=st.integers(1, 20_000),
    rule=st.sampled_from(["basic", "paper", "plateau"]),
    rate=st.booleans(),
    floor_micro=st.integers(-(10**6), 10**6),
    utilisation_permille=st.integers(0, 999),
)


@given(policies, st.integers(0, 2**32), st.integers(0, 12))
def test_everybody_computes_the_same_whoever_joined_when(policy: TauPolicy, seed: int, joined: int) -> None:
    """Headers come in any order; a joiner has the state's bytes and the headers since."""
    rng = random.Random(seed)
    one = other = start(policy)
    for number in range(12):
        headers = [random_facts(rng) for _ in range(rng.choice([1, 3, 3, 3, 5]))]
        if number == joined:
            other = TauState.from_bytes(one.to_bytes())
        one = after_round(policy, one, headers)
        other = after_round(policy, other, rng.sample(headers, len(headers)))
        assert one.to_bytes() == other.to_bytes()
        assert 1 <= one.tau <= policy.tau_max


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
        for wrong in (
            data + b"\x00",
            b"\x02" + data,
            b"",
            b"\x90",
            msgpack.packb(7),
            msgpack.packb(msgpack.unpackb(data)[1:]),
        ):
            with pytest.raises(RemoteProtocolError):
                read(wrong)
        for at in range(len(msgpack.unpackb(data))):
            for value in (-(2**63), 1.5, True, [1], "x" * 300, 2**64 - 1):
                fields = msgpack.unpackb(data)
                fields[at] = value
                with contextlib.suppress(RemoteProtocolError):
                    assert read(msgpack.packb(fields)).to_bytes() == msgpack.packb(fields)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "magic"},
        {"kind": "fixed", "tau0": 0},
        {"tau0": -1},
        {"tau0": 65},
        {"t0_ms": 0},
        {"tau_max": 2.0},
        {"tau0": True},
        {"rule": "magic"},
        {"rate": 1},
        {"floor_micro": 0.5},
        {"floor_micro": -(2**63) - 1},
        {"utilisation_permille": 1000},
        {"utilisation_permille": -1},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    fields: dict[str, object] = {"kind": "adacomm", "tau0": 16, "t0_ms": 10_000, "tau_max": 64}
    with pytest.raises(ValueError):
        TauPolicy(**{**fields, **wrong})  # type: ignore[arg-type]


def test_facts_that_make_no_sense_are_refused() -> None:
    for name in ("samples", "steps", "compute_us", "comm_us", "rate_nano"):
        fields = {"samples": 1, "steps": 1, "loss_sum_micro": 1, "compute_us": 1, "comm_us": 1, name: -1}
        with pytest.raises(ValueError, match=name):
            RoundFacts(**fields)
