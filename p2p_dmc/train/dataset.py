"""A data set as a script sees it: what the manifest says, and all its samples once, for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from p2p_dmc.data.disk import shard_path
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.samples import Sample, SampleReader, ShardDamaged, read_index
from p2p_dmc.errors import UserError
from p2p_dmc.train.rounds import Rounds
from p2p_dmc.wire.trainer_messages import ShardReady, ShardRequest


class Dataset:
    """``len(data)`` and ``data.classes`` (folder names, sorted) come from the manifest.

    Iterating reads every sample once, in the shards' order and without the ledger, ``data.keys()`` their keys
    alone; shards that are not on this machine are fetched. A sample is a dict: ``__key__``, ``__shard__``, and
    one ``bytes`` field per extension.
    """

    def __init__(self, name: str, digest: bytes, manifest: Manifest, folder: Path, rounds: Rounds) -> None:
        self.name = name
        self.digest = digest
        self.manifest = manifest
        self.folder = folder
        self._rounds = rounds
        self._reader = SampleReader()

    def __len__(self) -> int:
        return len(self.manifest)

    def keys(self) -> Iterator[str]:
        """Every sample's key, in the order of iteration, read from the shards' indexes."""
        for shard in range(len(self.manifest.shards)):
            try:
                index = read_index(self._path(shard))
            except (FileNotFoundError, ShardDamaged):
                index = read_index(self.fetch(shard))
            yield from index.keys()

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the top-level folders, sorted, as torchvision's ImageFolder counts classes."""
        return self.manifest.classes

    def __iter__(self) -> Iterator[Sample]:
        for shard, count in enumerate(self.manifest.sample_counts):
            for index in range(count):
                yield self.read(shard, index)

    def read(self, shard: int, index: int) -> Sample:
        """One sample; its shard is fetched if it is not on this machine, or not whole."""
        try:
            return self._reader.read(self._path(shard), self.manifest, shard, index)
        except (FileNotFoundError, ShardDamaged):
            return self._reader.read(self.fetch(shard), self.manifest, shard, index)

    def _path(self, shard: int) -> Path:
        return shard_path(self.folder, self.manifest.shards[shard].digest)

    def fetch(self, shard: int) -> Path:
        """Have the agent fetch a shard, or verify it, and wait for that; where it is.

        UserError where the shard's digest is right and its index is not: it was made like that, no other copy helps.
        """
        self._rounds.send(ShardRequest(dataset=self.digest, shard=shard))
        ready = self._rounds.expect(ShardReady, lambda m: m.dataset == self.digest and m.shard == shard)
        path = Path(ready.path)
        try:
            found, said = len(read_index(path)), self.manifest.sample_counts[shard]
        except FileNotFoundError:
            return path  # gone again: whoever reads it asks again
        except ShardDamaged as error:
            raise self._made_wrong(shard, str(error)) from error
        if found != said:
            raise self._made_wrong(shard, f"{found} samples, and the manifest says {said}")
        return path

    def _made_wrong(self, shard: int, what: str) -> UserError:
        return UserError(
            f"data set {self.name!r}: shard {self.manifest.shards[shard].digest.hex()[:12]} has the right digest and "
            f"cannot be read ({what}): it was made like that; seed the data again under another --name"
        )
