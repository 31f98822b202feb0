"""Which cuts partitions.py makes, and who should go on in them; the cuts themselves need real hosts."""

from __future__ import annotations

import random

import pytest

from tests.soak.partitions import MANY, SAMPLED, chosen, goes_on, partitions, shape

BELL = {1: 1, 2: 2, 3: 5, 4: 15, 5: 52}


@pytest.mark.parametrize("size", BELL)
def test_all_partitions(size: int) -> None:
    found = list(partitions(range(size)))
    assert len({frozenset(map(frozenset, sides)) for sides in found}) == len(found) == BELL[size]
    assert all(sorted(m for side in sides for m in side) == list(range(size)) for sides in found)


@pytest.mark.parametrize(("size", "count"), [(2, 1), (3, 3), (4, 6), (5, 11)])
def test_one_of_each_shape(size: int, count: int) -> None:
    """By how many are with the first in the ring, and how large the other sides are."""
    cuts = chosen(size, random.Random(1), every=False)
    shapes = {shape(sides) for sides in partitions(range(size)) if len(sides) > 1}
    assert [shape(sides) for sides in cuts] == sorted(shapes) and len(cuts) == count
    assert len(chosen(size, random.Random(1), every=True)) == BELL[size] - 1
    assert len(chosen(MANY, random.Random(1), every=True)) == SAMPLED


@pytest.mark.parametrize("size", BELL)
def test_at_most_one_side_should_go_on(size: int) -> None:
    for sides in partitions(range(size)):
        should = [goes_on(side, size, "majority") for side in sides]
        assert sum(should) <= 1
        assert any(should) == any(
            2 * len(side) > size or (2 * len(side) == size and 0 in side) for side in sides
        )
        assert all(goes_on(side, size, "any") for side in sides)
        assert should == [goes_on(side, size, "strict") for side in sides]
