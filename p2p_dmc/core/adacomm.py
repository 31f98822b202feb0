"""tau as a pure function of committed round headers (invariant 13).

Source: Wang and Joshi, "Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in
Local-Update SGD", MLSys 2019 (arXiv 1810.08313): every T0 of wall-clock time, tau = ceil(sqrt(F / F0) *
tau0), F the training loss (basic rule, with the loss's infimum taken as 0).

There is no master to announce tau, and no common clock. Every peer computes both from the headers that all of
them hold, in integers, so that no two processors can disagree. The state travels with the model to joiners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any, TypeVar, cast

import msgpack

from p2p_dmc.errors import RemoteProtocolError

__all__ = ["RoundFacts", "TauPolicy", "TauState", "after_round", "start"]

FORMAT = 1
"""First item of the encoded forms; grows when a rule (halving, plateau, learning rate) adds fields."""

LIMIT = 2**63
KINDS = ("fixed", "adacomm")

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
    """Time in the collective, waiting included; 0 when it was not measured."""

    def __post_init__(self) -> None:
        for name in ("samples", "steps", "compute_us", "comm_us"):
            _check_int(name, getattr(self, name), low=0)
        _check_int("loss_sum_micro", self.loss_sum_micro, low=-LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TauPolicy:
    """How tau moves; the same on all peers of a run (part of its fingerprint)."""

    kind: str
    """"fixed": always `tau0`. "adacomm": the basic rule."""
    tau0: int
    """Local steps per round at the start."""
    t0_ms: int = 60_000
    """T0, how often tau may change, on the agreed clock. The paper's 60 s."""
    tau_max: int = 512
    """Upper bound for kind "adacomm": a rising loss must not stop the averaging."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"tau policy {self.kind!r}: it is one of {', '.join(KINDS)}")
        for name in ("tau0", "t0_ms", "tau_max"):
            _check_int(name, getattr(self, name), low=1)
        if self.kind == "adacomm" and self.tau0 > self.tau_max:
            raise ValueError(f"tau0 {self.tau0} is above tau_max {self.tau_max}: raise tau_max")

    def to_bytes(self) -> bytes:
        """The one encoding of this value (msgpack)."""
        return _pack(self.kind, self.tau0, self.t0_ms, self.tau_max)

    @classmethod
    def from_bytes(cls, data: bytes) -> TauPolicy:
        """Inverse of `to_bytes`; RemoteProtocolError for anything that it would not have written."""
        try:
            kind, tau0, t0_ms, tau_max = _unpack(data)
            policy = cls(kind=kind, tau0=tau0, t0_ms=t0_ms, tau_max=tau_max)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RemoteProtocolError(f"not a tau policy: {error}") from None
        return _canonical(policy, data)


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

    def __post_init__(self) -> None:
        _check_int("tau", self.tau, low=1)
        if self.f0_micro is not None:
            _check_int("f0_micro", self.f0_micro, low=-LIMIT)
        _check_int("elapsed_us", self.elapsed_us, low=0)
        _check_int("interval_samples", self.interval_samples, low=0)
        _check_int("interval_loss_micro", self.interval_loss_micro, low=-LIMIT)
        if type(self.reason) is not str or len(self.reason) > 200:
            raise ValueError(f"reason is a short text, not {self.reason!r}")

    def to_bytes(self) -> bytes:
        """The one encoding of this value (msgpack)."""
        return _pack(
            self.tau,
            self.f0_micro,
            self.elapsed_us,
            self.interval_samples,
            self.interval_loss_micro,
            self.reason,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> TauState:
        """Inverse of `to_bytes`; RemoteProtocolError for anything that it would not have written."""
        try:
            tau, f0_micro, elapsed_us, interval_samples, interval_loss_micro, reason = _unpack(data)
            state = cls(
                tau=tau,
                f0_micro=f0_micro,
                elapsed_us=elapsed_us,
                interval_samples=interval_samples,
                interval_loss_micro=interval_loss_micro,
                reason=reason,
            )
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RemoteProtocolError(f"not a tau state: {error}") from None
        return _canonical(state, data)


def start(policy: TauPolicy) -> TauState:
    """The state before the first round."""
    return TauState(
        tau=policy.tau0,
        f0_micro=None,
        elapsed_us=0,
        interval_samples=0,
        interval_loss_micro=0,
        reason="fixed" if policy.kind == "fixed" else "start",
    )


def after_round(policy: TauPolicy, state: TauState, headers: Sequence[RoundFacts]) -> TauState:
    """The state after a complete round with these headers, in any order."""
    state = _noted(state, headers)
    if policy.kind == "fixed":
        return replace(state, interval_samples=0, interval_loss_micro=0)
    t0_us = policy.t0_ms * 1000
    due = state.elapsed_us // t0_us > (state.elapsed_us - _round_us(headers)) // t0_us
    if not due or state.interval_samples == 0 or state.f0_micro is None:
        return state
    if state.f0_micro <= 0:
        tau, reason = policy.tau0, "the first round's loss was not positive"
    else:
        tau, reason = _basic_rule(policy, state, state.f0_micro)
    return replace(state, tau=tau, interval_samples=0, interval_loss_micro=0, reason=reason)


def _noted(state: TauState, headers: Sequence[RoundFacts]) -> TauState:
    """The round added to the sums and to the clock; the first one with samples sets F0."""
    samples = sum(header.samples for header in headers)
    loss_micro = sum(header.loss_sum_micro for header in headers if header.samples)
    f0_micro = state.f0_micro
    if f0_micro is None and samples:
        f0_micro = _bounded(-(-loss_micro // samples))  # up: a loss that stays the same raises no tau
    return replace(
        state,
        f0_micro=f0_micro,
        elapsed_us=_bounded(state.elapsed_us + _round_us(headers)),
        interval_samples=_bounded(state.interval_samples + samples),
        interval_loss_micro=_bounded(state.interval_loss_micro + loss_micro),
    )


def _bounded(value: int) -> int:
    """What fits the encoding: absurd headers must not stop the run."""
    return min(max(value, -LIMIT), LIMIT - 1)


def _round_us(headers: Sequence[RoundFacts]) -> int:
    """Time in the collective includes waiting for the slowest member; the shortest is the network's."""
    compute_us = max((header.compute_us for header in headers), default=0)
    comm_us = min((header.comm_us for header in headers if header.comm_us), default=0)
    return compute_us + comm_us


def _basic_rule(policy: TauPolicy, state: TauState, f0_micro: int) -> tuple[int, str]:
    """ceil(sqrt(F / F0) * tau0) = the least t with t^2 * F0 >= tau0^2 * F, and F / F0 in words."""
    loss_micro = max(0, state.interval_loss_micro)
    f0_sum_micro = f0_micro * state.interval_samples
    squared = -(-(policy.tau0**2 * loss_micro) // f0_sum_micro)
    tau = isqrt(squared)
    tau += tau * tau < squared
    percent = 100 * loss_micro // f0_sum_micro
    return min(max(1, tau), policy.tau_max), f"loss {percent // 100}.{percent % 100:02d} of the first round's"


def _check_int(name: str, value: object, *, low: int) -> None:
    if type(value) is not int or not low <= value < LIMIT:
        raise ValueError(f"{name} is an integer from {low}, not {value!r}")


def _pack(*fields: Any) -> bytes:
    return cast(bytes, msgpack.packb((FORMAT, *fields)))


def _unpack(data: bytes) -> list[Any]:
    fields: list[Any]
    version, *fields = msgpack.unpackb(data)
    if version != FORMAT:
        raise ValueError(f"format {version!r}, expected {FORMAT}")
    return fields


def _canonical(value: Encoded, data: bytes) -> Encoded:
    if value.to_bytes() != data:
        raise RemoteProtocolError(f"not a {type(value).__name__}: written in another way than ours")
    return value
