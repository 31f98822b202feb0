"""What a run trains on, as far as this peer has it: by the shards of its mixture, of which placement knows nothing."""

from __future__ import annotations

from collections.abc import Callable

from p2p_dmc.agent.datasets import DataService
from p2p_dmc.data.mixture import Mixture


class RunData:
    """A shard of the mixture is here, or to be had, when the shard of the data set that it stands for is."""

    def __init__(self, data: DataService, mixture: Mixture) -> None:
        self.mixture = mixture
        self._data = data
        self._reachable: tuple[tuple[frozenset[int], ...], frozenset[int]] = (), frozenset()

    @property
    def full(self) -> bool:
        """There is no room for more shards here."""
        return self._data.full

    def held(self) -> frozenset[int]:
        """Shards whose file is here."""
        return self.mixture.spread(self._data.held(part.manifest.digest) for part in self.mixture.parts)

    def reachable(self) -> frozenset[int]:
        """Shards that this peer holds or knows a live peer to hold. Asked at each tick, and made when it changes."""
        now = tuple(self._data.reachable(part.manifest.digest) for part in self.mixture.parts)
        if self._reachable[0] != now:
            self._reachable = now, self.mixture.spread(now)
        return self._reachable[1]

    def usable(self, shard: int) -> bool:
        """Held and verified: see `DataService.usable`."""
        manifest, place, _ = self.mixture.where(shard)
        return self._data.usable(manifest.digest, place)

    def want(self, shard: int, then: Callable[[], None]) -> None:
        """Make a shard usable, ahead of re-placement; ``then`` is called when it is."""
        manifest, place, _ = self.mixture.where(shard)
        self._data.want(manifest.digest, place, then)
