"""What a store has in memory of one data set."""

from __future__ import annotations

from pathlib import Path

from p2p_dmc.data.disk import shard_path
from p2p_dmc.data.manifest import Manifest, ShardEntry
from p2p_dmc.data.partial import PartialShard
from p2p_dmc.errors import RemoteProtocolError


class HeldDataset:
    """Invariant: ``held`` names shards whose file is whole. ``changes`` grows with each that comes or goes."""

    __slots__ = ("_places", "changes", "folder", "held", "manifest", "partial")

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.held: set[int] = set()
        self.changes = 0
        self.partial: dict[int, PartialShard] = {}
        self._places: dict[ShardEntry, int] | None = None

    def place_of(self, other: Manifest, shard_index: int) -> int | None:
        """The index of a shard of another version here; one of which the two say different sizes is none."""
        if other.first != self.manifest.first:
            return None
        if self._places is None:
            self._places = {one: index for index, one in enumerate(self.manifest.shards)}
        return self._places.get(other.shards[shard_index])

    def counted(self, shard_index: int) -> tuple[bytes, bytes]:
        """What versions that share the shard's file name it by."""
        return self.manifest.first, self.manifest.shard_digests[shard_index]

    def path(self, shard_index: int) -> Path:
        digests = self.manifest.shard_digests
        if not 0 <= shard_index < len(digests):
            raise RemoteProtocolError(f"shard {shard_index} of a data set with {len(digests)}")
        return shard_path(self.folder, digests[shard_index])
