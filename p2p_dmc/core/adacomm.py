"""tau as a pure function of committed round headers (invariant 13).

Source: Wang and Joshi, "Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in
Local-Update SGD", MLSys 2019 (arXiv 1810.08313). Every T0 of wall-clock time

    c = ceil(sqrt(eta0 / eta * (F - Finf) / (F0 - Finf)) * tau0)

with F the training loss since the last look, F0 the first round's, Finf its infimum (0 unless it is given), eta the
learning rate and eta0 the first one. Of eta0 / eta the theory wants the power 3/2, which the authors found too steep.
"basic": tau = c. "paper" (their refined rule): tau = c if that is less than tau, else tau / 2. "plateau": like "paper",
but halved only when F is no more than a hundredth below the F before it.

There is no master to announce tau, and no common clock. Every peer computes both from the headers that all of
them hold, in integers, so that no two processors can disagree. The state travels with the model to joiners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from math import isqrt
from typing import Any, TypeVar, cast

import msgpack

from p2p_dmc.errors import RemoteProtocolError

__all__ = ["RoundFacts", "TauPolicy", "TauState", "after_round", "start"]

FORMAT = 2
"""First item of the encoded forms; grows when a rule adds fields."""

LIMIT = 2**63
KINDS = ("fixed", "adacomm")
RULES = ("basic", "paper", "plateau")
LEAST_MEASURED = 8
"""tau while tau0 is being measured, and the least that comes of it (unless tau_max is less)."""
AUTO_STEPS = 9
"""tau0 in units of the communication's length in local steps: so nine tenths of a round's time are computation."""
AUTO_ROUNDS = 3
"""Rounds after which tau0 is settled."""
ONE = 1 << 16
"""Of `TauState.ratio_q16`."""

Encoded = TypeVar("Encoded", "TauPolicy", "TauState")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFacts:
    """What one member's header says of a round."""

    samples: int
    """Samples whose gradients are in the member's delta; 0 for learners, idle members, non-finite ones."""
    steps: int
    loss_sum_micro: int
    """Sum over the samples of their loss, in millionths; may be negative."""
    compute_us: int
    comm_us: int
    """Time in the collective of the round before, waiting included; 0 when it was not measured."""
    rate_nano: int = 0
    """The member's learning rate, in billionths; 0 when it is not known."""

    def __post_init__(self) -> None:
        for name in ("samples", "steps", "compute_us", "comm_us", "rate_nano"):
            _check_int(name, getattr(self, name), low=0)
        _check_int("loss_sum_micro", self.loss_sum_micro, low=-LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TauPolicy:
    """How tau moves; the same on all peers of a run (part of its fingerprint)."""

    kind: str
    """"fixed": always `tau0`. "adacomm": by `rule`."""
    tau0: int
    """Local steps per round at the start. 0, with kind "adacomm": by the measured ratio of communication to
    computation."""
    t0_ms: int = 60_000
    """T0, how often tau may change, on the agreed clock. The paper's 60 s."""
    tau_max: int = 512
    """Upper bound for kind "adacomm": a rising loss must not stop the averaging."""
    rule: str = "basic"
    """"basic", "paper" or "plateau": see above."""
    rate: bool = False
    """Whether c follows the learning rate; else eta0 / eta is taken as 1."""
    floor_micro: int = 0
    """Finf in millionths."""
    utilisation_permille: int = 0
    """Least share of computation in a round's time, in thousandths: keeps tau from falling further. 0: the paper."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"tau policy {self.kind!r}: it is one of {', '.join(KINDS)}")
        if self.rule not in RULES:
            raise ValueError(f"policy {self.rule!r}: it is one of {', '.join(RULES)}")
        _check_int("tau0", self.tau0, low=int(self.kind == "fixed"))
        for name in ("t0_ms", "tau_max"):
            _check_int(name, getattr(self, name), low=1)
        _check_int("floor_micro", self.floor_micro, low=-LIMIT)
        _check_int("utilisation_permille", self.utilisation_permille, low=0)
        if type(self.rate) is not bool or self.utilisation_permille > 999:
            raise ValueError(f"a rate of {self.rate!r} or {self.utilisation_permille} of 999 thousandths")
        if self.kind == "adacomm" and self.tau0 > self.tau_max:
            raise ValueError(f"tau0 {self.tau0} is above tau_max {self.tau_max}: raise tau_max")

    def to_bytes(self) -> bytes:
        """The one encoding of this value (msgpack)."""
        return _pack(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> TauPolicy:
        """Inverse of `to_bytes`; RemoteProtocolError for anything that it would not have written."""
        return _unpack(cls, data, "policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class TauState:
    """The controller's memory after some committed round."""

    tau: int
    """Local steps of the next round."""
    f0_micro: int | None
    """Mean loss per sample of the first round that had any, in millionths; None before it."""
    elapsed_us: int
    """The agreed clock: per round, the longest computation plus the shortest collective."""
    interval_samples: int
    """Samples since tau was last looked at."""
    interval_loss_micro: int
    """Their summed loss, in millionths."""
    reason: str
    """Why tau is what it is, for people."""
    tau0: int = 0
    """The policy's, or as measured; 0 before that."""
    last_micro: int = 0
    """Mean loss per sample of the interval before this one, of the first round before there is one, in millionths."""
    rate_nano: int = 0
    """Learning rate of the last round that told one, in billionths; 0 before."""
    rate0_nano: int = 0
    """The greatest one so far, so that a warm-up is no decay."""
    ratio_q16: int = 0
    """Communication over the computation of a local step, in 1 / 65536: a moving average."""
    measured: int = 0
    """Rounds that are in it."""
    members: int = 0
    """Headers of the last round: what the next ones say of its collective is of so many."""
    lowest: bool = False
    """tau cannot fall any further, or could not at some time: the learning rate may decay."""

    def __post_init__(self) -> None:
        _check_int("tau", self.tau, low=1)
        if self.f0_micro is not None:
            _check_int("f0_micro", self.f0_micro, low=-LIMIT)
        for name in ("elapsed_us", "interval_samples", "tau0", "rate_nano", "rate0_nano", "ratio_q16"):
            _check_int(name, getattr(self, name), low=0)
        for name in ("measured", "members"):
            _check_int(name, getattr(self, name), low=0)
        for name in ("interval_loss_micro", "last_micro"):
            _check_int(name, getattr(self, name), low=-LIMIT)
        if type(self.reason) is not str or len(self.reason) > 200:
            raise ValueError(f"reason is a short text, not {self.reason!r}")
        if type(self.lowest) is not bool:
            raise ValueError(f"lowest is True or False, not {self.lowest!r}")

    def to_bytes(self) -> bytes:
        """The one encoding of this value (msgpack)."""
        return _pack(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> TauState:
        """Inverse of `to_bytes`; RemoteProtocolError for anything that it would not have written."""
        return _unpack(cls, data, "state")


def start(policy: TauPolicy) -> TauState:
    """The state before the first round."""
    tau = policy.tau0 or min(LEAST_MEASURED, policy.tau_max)
    if policy.kind == "fixed":
        reason = "fixed"
    else:
        reason = "start" if policy.tau0 else "communication is being measured"
    return TauState(
        tau=tau,
        f0_micro=None,
        elapsed_us=0,
        interval_samples=0,
        interval_loss_micro=0,
        reason=reason,
        tau0=policy.tau0,
        lowest=policy.kind == "fixed" or tau == 1,
    )


def after_round(policy: TauPolicy, state: TauState, headers: Sequence[RoundFacts]) -> TauState:
    """The state after a complete round with these headers, in any order."""
    state = _noted(state, headers)
    if policy.kind == "fixed":
        return replace(state, interval_samples=0, interval_loss_micro=0)
    if not state.tau0:
        return _begun(policy, state)
    t0_us = policy.t0_ms * 1000
    due = state.elapsed_us // t0_us > (state.elapsed_us - _round_us(headers)) // t0_us
    if not due or state.interval_samples == 0 or state.f0_micro is None:
        return state
    return _looked(policy, state, state.f0_micro)


# --- what the headers tell ---------------------------------------------------------------------------------


def _noted(state: TauState, headers: Sequence[RoundFacts]) -> TauState:
    """The round added to the sums, the clock and the ratio; the first one with samples sets F0."""
    samples = sum(header.samples for header in headers)
    loss_micro = sum(header.loss_sum_micro for header in headers if header.samples)
    if state.f0_micro is None and samples:
        f0_micro = _mean_micro(loss_micro, samples)
        state = replace(state, f0_micro=f0_micro, last_micro=f0_micro)
    rates = sorted(header.rate_nano for header in headers if header.samples and header.rate_nano)
    rate_nano = _middle(rates) if rates else state.rate_nano
    state = _measured(state, headers)
    return replace(
        state,
        elapsed_us=_bounded(state.elapsed_us + _round_us(headers)),
        interval_samples=_bounded(state.interval_samples + samples),
        interval_loss_micro=_bounded(state.interval_loss_micro + loss_micro),
        rate_nano=rate_nano,
        rate0_nano=max(state.rate0_nano, rate_nano),
        members=len(headers),
    )


def _measured(state: TauState, headers: Sequence[RoundFacts]) -> TauState:
    """The ratio of communication to computation with this round in it, if it tells any.

    It does not when this peer is alone; when the members were others in the round whose collective the headers tell
    of; or when nobody has taken half of tau steps: at a run's beginning, an epoch's end.
    """
    step_us = sorted(
        max(1, header.compute_us // header.steps)
        for header in headers
        if header.samples and header.steps and 2 * header.steps >= state.tau
    )
    comm_us = _comm_us(headers)
    if not step_us or not comm_us or not len(headers) == state.members > 1:
        return state
    ratio_q16 = _bounded(comm_us * ONE // _middle(step_us))
    if state.measured:
        ratio_q16 = state.ratio_q16 + ((ratio_q16 - state.ratio_q16) >> min(state.measured, 3))
    return replace(state, ratio_q16=ratio_q16, measured=state.measured + 1)


def _middle(ordered: Sequence[int]) -> int:
    """The median, of two the lower one."""
    return ordered[(len(ordered) - 1) // 2]


def _mean_micro(loss_micro: int, samples: int) -> int:
    """Rounded up, so that a loss that stays the same raises no tau."""
    return _bounded(-(-loss_micro // samples))


def _bounded(value: int) -> int:
    """What fits the encoding: absurd headers must not stop the run."""
    return min(max(value, -LIMIT), LIMIT - 1)


def _comm_us(headers: Sequence[RoundFacts]) -> int:
    """Time in the collective includes waiting for the slowest member; the shortest is the network's."""
    return min((header.comm_us for header in headers if header.comm_us), default=0)


def _round_us(headers: Sequence[RoundFacts]) -> int:
    return max((header.compute_us for header in headers), default=0) + _comm_us(headers)


# --- what follows from it ----------------------------------------------------------------------------------


def _begun(policy: TauPolicy, state: TauState) -> TauState:
    """tau0 from the measured ratio, once enough rounds have told of it; what was before is no interval."""
    state = replace(state, interval_samples=0, interval_loss_micro=0)
    if state.measured < AUTO_ROUNDS:
        return state
    wanted = max(LEAST_MEASURED, -(-AUTO_STEPS * state.ratio_q16 // ONE), _lowest(policy, state))
    tau0 = min(wanted, policy.tau_max)
    tenths = 10 * state.ratio_q16 // ONE
    return replace(
        state,
        tau=tau0,
        tau0=tau0,
        reason=f"a round's communication takes {tenths // 10}.{tenths % 10} local steps",
        lowest=state.lowest or tau0 == 1,
    )


def _looked(policy: TauPolicy, state: TauState, f0_micro: int) -> TauState:
    """An interval is over: the next tau, and a new interval."""
    if f0_micro <= policy.floor_micro:
        value, words = state.tau0, "the first round's loss was not positive"
        if policy.floor_micro:
            words = "the first round's loss was not above its floor"
    else:
        value, words = _basic_rule(policy, state, f0_micro)
    tau, words = _refined(policy, state, value, words)
    lowest = _lowest(policy, state)
    if tau < lowest:
        tau, words = lowest, f"{lowest} for the least utilisation; {words}"
    elif tau > policy.tau_max:
        tau, words = policy.tau_max, f"no more than {policy.tau_max}; {words}"
    return replace(
        state,
        tau=tau,
        interval_samples=0,
        interval_loss_micro=0,
        reason=words,
        last_micro=_mean_micro(state.interval_loss_micro, state.interval_samples),
        lowest=state.lowest or tau == lowest,
    )


def _basic_rule(policy: TauPolicy, state: TauState, f0_micro: int) -> tuple[int, str]:
    """c = the least t with t^2 * eta * (F0 - Finf) >= tau0^2 * eta0 * (F - Finf), and F / F0 in words."""
    eta, eta0 = (state.rate_nano, state.rate0_nano) if policy.rate and state.rate_nano else (1, 1)
    above_micro = max(0, state.interval_loss_micro - policy.floor_micro * state.interval_samples)
    f0_above_micro = (f0_micro - policy.floor_micro) * state.interval_samples
    squared = -(-(state.tau0**2 * eta0 * above_micro) // (eta * f0_above_micro))
    tau = isqrt(squared)
    tau += tau * tau < squared
    words = f"loss {_hundredths(above_micro, f0_above_micro)} of the first round's"
    if policy.floor_micro:
        words += " above the floor"
    if eta != eta0:
        words += f", learning rate {_hundredths(eta, eta0)} of the greatest"
    return max(1, tau), words


def _refined(policy: TauPolicy, state: TauState, value: int, words: str) -> tuple[int, str]:
    """The rule's next tau before it is bounded: ``value`` is c, ``words`` say where that comes from."""
    if policy.rule == "basic" or value < state.tau:
        return value, words
    if policy.rule == "plateau" and _falls(state):
        return state.tau, f"kept, the loss still falls: {words}"
    return -(-state.tau // 2), f"{'halved' if state.tau > 1 else 'as low as it goes'}: {words}"


def _falls(state: TauState) -> bool:
    """Whether this interval's mean loss is at least a hundredth below the one before: not F > 0.99 F_before."""
    fallen_micro = state.last_micro * state.interval_samples - state.interval_loss_micro
    return 100 * fallen_micro >= abs(state.last_micro) * state.interval_samples


def _lowest(policy: TauPolicy, state: TauState) -> int:
    """The least tau with which computation has its share u: ceil(ratio * u / (1 - u)), at least 1."""
    share = policy.utilisation_permille
    steps = -(-(state.ratio_q16 * share) // ((1000 - share) * ONE))
    return min(max(1, steps), policy.tau_max)


def _hundredths(part: int, whole: int) -> str:
    percent = 100 * part // whole
    return f"{percent // 100}.{percent % 100:02d}"


# --- bytes -------------------------------------------------------------------------------------------------


def _check_int(name: str, value: object, *, low: int) -> None:
    if type(value) is not int or not low <= value < LIMIT:
        raise ValueError(f"{name} is an integer from {low}, not {value!r}")


def _pack(value: TauPolicy | TauState) -> bytes:
    return cast(bytes, msgpack.packb((FORMAT, *astuple(value))))


def _unpack(cls: type[Encoded], data: bytes, what: str) -> Encoded:
    """The value in ``data``, which has to be written as we write it; RemoteProtocolError."""
    try:
        version, *said = msgpack.unpackb(data)
        if version != FORMAT:
            raise ValueError(f"format {version!r}, expected {FORMAT}")
        names = [field.name for field in fields(cls)]
        value = cls(**dict[str, Any](zip(names, said, strict=True)))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"not a tau {what}: {error}") from None
    if value.to_bytes() != data:
        raise RemoteProtocolError(f"not a {cls.__name__}: written in another way than ours")
    return value
