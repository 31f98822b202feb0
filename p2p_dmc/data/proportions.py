"""From the shares of data sets that are wanted to whole numbers of passes over each."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from fractions import Fraction
from numbers import Real

from p2p_dmc.data.mixture import MAX_PASSES
from p2p_dmc.errors import UserError

TOLERANCE = 0.01
"""A part's share of an epoch's samples may be so far from the one that is wanted: a percentage point."""
MOST_LONGER = Fraction(5, 4)
"""So many times longer an epoch may be for shares that are nearer than they have to be."""


def passes_for(
    weights: Mapping[str, float], samples: Mapping[str, int], tolerance: float = TOLERANCE
) -> dict[str, int]:
    """Passes over each data set an epoch, such that its share of the samples is its weight's share of all weights.

    From one pass over each on, the next one goes to the data set whose passes are the most too few, as seats go to
    parties (Webster's method), until all shares are within ``tolerance`` (a share, from 0 to 1): so an epoch is about
    as short as it can be. The nearest passes that go with those of the least frequent one are taken if they do, too.
    Exact arithmetic: the same on every machine, and weights that differ by a factor are the same.

    Raises:
        UserError: a weight or the tolerance is no such number, or a data set would come more than `MAX_PASSES` times.
    """
    check_weights(weights, tolerance)
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    wanted = {name: weight / sum(exact.values()) for name, weight in exact.items()}
    often = {name: share / samples[name] for name, share in wanted.items()}
    allowed = Fraction(str(tolerance))

    def length(passes: Mapping[str, int]) -> int:
        return sum(passes[name] * samples[name] for name in passes)

    def fit(passes: Mapping[str, int]) -> bool:
        shares = {name: Fraction(passes[name] * samples[name], length(passes)) for name in passes}
        few_enough = max(passes.values()) <= MAX_PASSES
        return few_enough and all(abs(shares[name] - wanted[name]) <= allowed for name in passes)

    passes = dict.fromkeys(often, 1)
    next_one = [(Fraction(3, 2) / rate, name) for name, rate in sorted(often.items())]
    heapq.heapify(next_one)
    while max(passes.values()) <= MAX_PASSES:
        if fit(passes):
            seldom = min(often, key=lambda one: (often[one], one))
            nearest = {n: max(1, round(passes[seldom] * rate / often[seldom])) for n, rate in often.items()}
            longer = Fraction(length(nearest), length(passes))
            return nearest if fit(nearest) and longer <= MOST_LONGER else passes
        name = next_one[0][1]
        passes[name] += 1
        heapq.heapreplace(next_one, ((passes[name] + Fraction(1, 2)) / often[name], name))
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
