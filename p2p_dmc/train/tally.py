"""Which samples this trainer has consumed since the last complete round, and which of them it did not train on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from p2p_dmc.wire.trainer_messages import MAX_SKIPPED

Places = list[tuple[int, int]]  # [lo, hi), sorted, apart from each other


class Tally:
    """Samples count in the order of the leases: n of them consumed says exactly which.

    A batch is handed out first, and consumed with the local step that follows. ``skipped`` are places among the
    consumed samples.
    """

    def __init__(self) -> None:
        self.consumed = 0
        self.skipped: Places = []
        self._handed_out = 0
        self._left_out: Places = []  # places among those handed out

    @property
    def trained(self) -> int:
        """Samples that the local parameters have seen since the last complete round."""
        return self.consumed - _size(self.skipped)

    @property
    def crowded(self) -> bool:
        """As many skipped samples, each apart from the others, as a round can tell of comfortably."""
        return len(self.skipped) >= MAX_SKIPPED // 2

    def told(self, skipped: Sequence[int]) -> int:
        """Stretches of skipped samples in the next round if what is handed out next leaves these out, sorted."""
        begun = sum(place != before + 1 for before, place in zip((-2, *skipped), skipped, strict=False))
        return len(self.skipped) + len(self._left_out) + begun

    def hand_out(self, samples: int, skipped: Iterable[int] = ()) -> None:
        """The next samples are given to the loop; ``skipped``: which were left out, as places among these."""
        for place in sorted(skipped):
            at = self._handed_out + place
            _add(self._left_out, at, at + 1)
        self._handed_out += samples

    def consume(self) -> int:
        """All that was handed out is trained on by a step; how many samples those are."""
        samples = self._handed_out - _size(self._left_out)
        for lo, hi in self._left_out:
            _add(self.skipped, self.consumed + lo, self.consumed + hi)
        self.consumed += self._handed_out
        self.forget_handed_out()
        return samples

    @property
    def in_vain(self) -> bool:
        """Of what was handed out nothing can be trained on."""
        return self._handed_out == _size(self._left_out)

    def forget_handed_out(self) -> None:
        """It is others' now, or comes again."""
        self._handed_out, self._left_out = 0, []

    def restart(self) -> None:
        """A round is complete, or what was consumed since then is others'."""
        self.consumed, self.skipped = 0, []


def _add(places: Places, lo: int, hi: int) -> None:
    """At the end."""
    if places and places[-1][1] == lo:
        lo = places.pop()[0]
    places.append((lo, hi))


def _size(places: Places) -> int:
    return sum(hi - lo for lo, hi in places)
