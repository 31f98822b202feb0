"""The outer optimizer: what a round's averaged delta does to the anchor, as a pure function of committed state.

With x the anchor, D the averaged delta (anchor minus local parameters), u the outer momentum:

    average     x <- x - D
    block       u <- beta u + D;  x <- x - u
    nesterov    u <- mu u + D;    x <- x - eta (D + mu u)

Sources: block momentum as in Wang and Joshi, MLSys 2019 (arXiv 1810.08313); Nesterov's as in torch's SGD and in
Douillard et al., "DiLoCo", 2023 (arXiv 2311.08105).

A round of t steps may be shorter than the run's first ones of T, with AdaComm and at an epoch's end. Then momentum is a
matter of time, not of rounds: m = mu^(t/T) instead of mu, and u is made of what T steps like the round's would do:

    u <- m u + (1 - m) / (1 - mu) (T/t) D;  x <- x - eta (D + m (t/T) u), with block x <- x - (t/T) u

For t = T these are the formulas above; a delta that stays the same, step for step, moves x equally far in short rounds.
The powers are worked out in decimals, for a machine's own may differ in the last bit.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal

__all__ = ["AVERAGE", "OuterPolicy", "OuterStep", "parse"]

KINDS = ("average", "block", "nesterov")
NANO = 10**9
LEAST_STEPS = 8
"""Nesterov's momentum over rounds of fewer steps is worse than none: these are averaged plainly, and u stays."""
NUMBER = r"(\d(?:\.\d{1,9})?)"
TEXT = re.compile(rf"block\(beta={NUMBER}\)|nesterov\(lr={NUMBER}, momentum={NUMBER}\)")
_EXACT = Context(prec=40, rounding=ROUND_HALF_EVEN)

OuterStep = tuple[float, float, float, float]
"""keep, gain, now, ahead, each a float32: u <- keep u + gain D; x <- x - (now D + ahead u)."""


def _words(nano: int) -> str:
    whole, part = divmod(nano, NANO)
    return f"{whole}.{part:09d}".rstrip("0").rstrip(".")


def _check_int(name: str, value: object, *, low: int, high: int) -> None:
    if type(value) is not int or not low <= value < high:
        raise ValueError(f"{name} is from {_words(low)} to below {_words(high)}, not {value!r} billionths")


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterPolicy:
    """The same on all peers of a run (part of its fingerprint). In billionths."""

    kind: str
    rate_nano: int = NANO
    """eta, of kind "nesterov"."""
    momentum_nano: int = 0
    """beta or mu, below 1."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"outer optimizer {self.kind!r}: it is one of {', '.join(KINDS)}")
        _check_int("lr", self.rate_nano, low=1, high=10 * NANO)
        _check_int("momentum", self.momentum_nano, low=0, high=NANO)
        if self.kind != "nesterov" and self.rate_nano != NANO:
            raise ValueError(f"{self.kind} has no learning rate")
        if self.kind == "average" and self.momentum_nano:
            raise ValueError("average has no momentum")

    def __str__(self) -> str:
        """For people and fingerprints; `parse` reads it."""
        if self.kind == "block":
            return f"block(beta={_words(self.momentum_nano)})"
        if self.kind == "nesterov":
            return f"nesterov(lr={_words(self.rate_nano)}, momentum={_words(self.momentum_nano)})"
        return "average"

    @property
    def vectors(self) -> int:
        """Vectors of the model's size in a state: the anchor, and the momentum if there is one, behind it."""
        return 1 if self.kind == "average" else 2

    def step(self, steps: int, reference: int) -> OuterStep | None:
        """What a round of so many local steps does, ``reference`` being T; None: it is averaged plainly, u stays.

        So it is while T is not known yet, which is said as 0.
        """
        if self.kind == "average" or min(steps, reference) < 1:
            return None
        if self.kind == "nesterov" and steps < LEAST_STEPS:
            return None
        rate, momentum = (Decimal(nano).scaleb(-9, _EXACT) for nano in (self.rate_nano, self.momentum_nano))
        keep, gain, shorter = momentum, Decimal(1), Decimal(1)
        if steps != reference:
            shorter = _EXACT.divide(Decimal(steps), Decimal(reference))
            keep = _power(momentum, shorter)
            gain = _EXACT.divide(_EXACT.divide(_rest(keep), _rest(momentum)), shorter)
        if self.kind == "block":
            return _singles(keep, gain, Decimal(0), shorter)
        return _singles(keep, gain, rate, _EXACT.multiply(_EXACT.multiply(rate, keep), shorter))


AVERAGE = OuterPolicy(kind="average")


def parse(text: str) -> OuterPolicy:
    """The policy with this text; ValueError for anything else."""
    if text == str(AVERAGE):
        return AVERAGE
    match = TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"outer optimizer {text[:80]!r}")
    beta, rate, momentum = (
        None if said is None else int(Decimal(said).scaleb(9, _EXACT)) for said in match.groups()
    )
    if beta is not None:
        policy = OuterPolicy(kind="block", momentum_nano=beta)
    else:
        policy = OuterPolicy(kind="nesterov", rate_nano=rate or 0, momentum_nano=momentum or 0)
    if str(policy) != text:
        raise ValueError(f"outer optimizer {text!r} is written {policy}")
    return policy


def _rest(share: Decimal) -> Decimal:
    return _EXACT.subtract(Decimal(1), share)


def _power(base: Decimal, exponent: Decimal) -> Decimal:
    """base ** exponent, of 0 <= base < 1; by the correctly rounded logarithm and exponential, the same everywhere."""
    return _EXACT.exp(_EXACT.multiply(_EXACT.ln(base), exponent)) if base else Decimal(0)


def _singles(keep: Decimal, gain: Decimal, now: Decimal, ahead: Decimal) -> OuterStep:
    return _single(keep), _single(gain), _single(now), _single(ahead)


def _single(value: Decimal) -> float:
    """Rounded to a float32."""
    (single,) = struct.unpack("<f", struct.pack("<f", float(value)))
    return float(single)
