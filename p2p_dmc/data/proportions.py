"""From the shares of data sets that are wanted to whole numbers of passes over each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from numbers import Real

from p2p_dmc.data.mixture import MAX_PASSES
from p2p_dmc.errors import UserError

TOLERANCE = 0.01
"""A part's share of an epoch's samples may be so far from the one that is wanted: a percentage point."""


def passes_for(
    weights: Mapping[str, float], samples: Mapping[str, int], tolerance: float = TOLERANCE
) -> dict[str, int]:
    """Passes over each data set an epoch, such that its share of the samples is its weight's share of all weights.

    The data set that is to come least often comes once, twice, ...; the others' passes are the nearest whole numbers.
    The first that are all within ``tolerance`` (a share, from 0 to 1) are taken, so an epoch is about as short as it
    can be. Exact arithmetic: the same on every machine, and weights that differ by a factor are the same.

    Raises:
        UserError: a weight or the tolerance is no such number, or a data set would come more than `MAX_PASSES` times.
    """
    check_weights(weights, tolerance)
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    wanted = {name: weight / sum(exact.values()) for name, weight in exact.items()}
    often = {name: share / samples[name] for name, share in wanted.items()}
    allowed = Fraction(str(tolerance))
    least = min(often.values())
    for once in range(1, MAX_PASSES + 1):
        passes = {name: round(once * rate / least) for name, rate in often.items()}
        if max(passes.values()) > MAX_PASSES:
            break
        total = sum(passes[name] * samples[name] for name in passes)
        if all(abs(Fraction(passes[n] * samples[n], total) - wanted[n]) <= allowed for n in passes):
            return passes
    name = max(often, key=lambda one: (often[one], one))
    raise UserError(
        f"data set {name!r} is to be {float(wanted[name]):.2%} of the samples and has {samples[name]}: that takes more "
        f"than {MAX_PASSES} passes over it an epoch; give it less weight, "
        f"or a larger tolerance than {float(tolerance):g}"
    )


def check_weights(weights: Mapping[str, float], tolerance: float) -> None:
    """UserError that names what is no weight or no tolerance."""
    if not _is_number(tolerance) or not 0 <= tolerance < 1:
        raise UserError(
            f"tolerance {tolerance!r}: the share of samples that may be missed, such as {TOLERANCE}"
        )
    for name, weight in weights.items():
        if not _is_number(weight) or not 0 < weight < math.inf:
            raise UserError(
                f"weight {weight!r} of data set {name!r}: a number above 0; leave out what is not wanted"
            )


def _is_number(value: object) -> bool:
    """A real number, and no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool)
