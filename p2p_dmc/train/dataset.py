"""What a script trains on, as it sees it: what the manifests say, and all the samples once, for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from p2p_dmc.data.disk import shard_path
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.mixture import Mixture
from p2p_dmc.data.samples import Sample, SampleReader, ShardDamaged, read_index
from p2p_dmc.errors import UserError
from p2p_dmc.train.rounds import Rounds
from p2p_dmc.wire.trainer_messages import ShardReady, ShardRequest


class Dataset:
    """A data set, or a mixture of several. ``len(data)``, the samples of an epoch, and ``data.classes`` come from the
    manifests.

    Iterating reads every sample of an epoch, in the shards' order and without the ledger, ``data.keys()`` their keys
    alone; shards that are not on this machine are fetched. A sample is a dict: ``__key__``, ``__dataset__`` (the name),
    ``__shard__``, and one ``bytes`` field per extension.
    """

    def __init__(self, mixture: Mixture, store_root: Path, rounds: Rounds) -> None:
        self.mixture = mixture
        self.store_root = store_root
        self._rounds = rounds
        self._reader = SampleReader()

    @property
    def name(self) -> str:
        """Of a mixture with its passes, `3 x code + 7 x web`."""
        return self.mixture.name

    @property
    def digest(self) -> bytes:
        """What it is known by: of a mixture it covers its data sets' digests and passes."""
        return self.mixture.digest

    @property
    def parts(self) -> dict[str, Dataset]:
        """A mixture's data sets by name, each by itself: iterating over one gives its samples once."""
        return {
            part.manifest.name: Dataset(Mixture.of(part.manifest), self.store_root, self._rounds)
            for part in self.mixture.parts
        }

    @property
    def passes(self) -> dict[str, int]:
        """How many times an epoch each data set's samples come, by name."""
        return {part.manifest.name: part.passes for part in self.mixture.parts}

    @property
    def recipe(self) -> tuple[tuple[bytes, int], ...]:
        """For the agent: digest and passes of a mixture's data sets; () of one by itself."""
        parts = self.mixture.parts if self.mixture.is_mixed else ()
        return tuple((part.manifest.digest, part.passes) for part in parts)

    def __len__(self) -> int:
        return self.mixture.samples

    def keys(self) -> Iterator[str]:
        """Every sample's key, in the order of iteration, read from the shards' indexes."""
        for shard, count in enumerate(self.mixture.sample_counts):
            first = self.mixture.where(shard).first
            try:
                index = read_index(self._path(shard))
            except (FileNotFoundError, ShardDamaged):
                index = read_index(self.fetch(shard))
            yield from map(index.key, range(first, first + count))

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the top-level folders, sorted, as torchvision's ImageFolder counts classes; of a mixture those of
        all its data sets.
        """
        return self.mixture.classes

    def __iter__(self) -> Iterator[Sample]:
        for shard, count in enumerate(self.mixture.sample_counts):
            for index in range(count):
                yield self.read(shard, index)

    def read(self, shard: int, index: int) -> Sample:
        """One sample; its shard is fetched if it is not on this machine, or not whole."""
        manifest, place, first = self.mixture.where(shard)
        try:
            return self._reader.read(self._path(shard), manifest, place, first + index)
        except (FileNotFoundError, ShardDamaged):
            return self._reader.read(self.fetch(shard), manifest, place, first + index)

    def _path(self, shard: int) -> Path:
        manifest, place, _ = self.mixture.where(shard)
        return shard_path(self.store_root / manifest.digest.hex(), manifest.shard_digests[place])

    def fetch(self, shard: int) -> Path:
        """Have the agent fetch a shard, or verify it, and wait for that; where it is.

        UserError where the shard's digest is right and its index is not: it was made like that, no other copy helps.
        """
        manifest, place, _ = self.mixture.where(shard)
        self._rounds.send(ShardRequest(dataset=manifest.digest, shard=place))
        ready = self._rounds.expect(ShardReady, lambda m: m.dataset == manifest.digest and m.shard == place)
        path = Path(ready.path)
        try:
            found, said = len(read_index(path)), manifest.sample_counts[place]
        except FileNotFoundError:
            return path  # gone again: whoever reads it asks again
        except ShardDamaged as error:
            raise _made_wrong(manifest, place, str(error)) from error
        if found != said:
            raise _made_wrong(manifest, place, f"{found} samples, and the manifest says {said}")
        return path


def _made_wrong(manifest: Manifest, shard: int, what: str) -> UserError:
    return UserError(
        f"data set {manifest.name!r}: shard {manifest.shard_digests[shard].hex()[:12]} has the right digest and "
        f"cannot be read ({what}): it was made like that; seed the data again under another --name"
    )
