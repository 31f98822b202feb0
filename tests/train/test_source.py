"""What becomes of one batch, without an agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_dmc.core.ledger import sample_permutation
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.mixture import Mixture
from p2p_dmc.data.samples import Sample, SampleReader, read_index
from p2p_dmc.data.store import Store
from p2p_dmc.train.leases import Batch
from p2p_dmc.train.source import DATA, MISSING, Source
from tests.data.helpers import make_tree, seed_tree

SEED = 5


@pytest.fixture
def seeded(tmp_path: Path) -> tuple[Store, Manifest]:
    """Six shards of four samples or so."""
    store = Store(tmp_path / "store")
    tree = make_tree(tmp_path / "tree", {f"{i:02d}.bin": 1000 for i in range(24)})
    manifest = seed_tree(tree, store, max_shard_size=8000)
    assert len(manifest.shards) >= 6 and min(manifest.sample_counts) >= 3
    return store, manifest


class Decoder:
    def __init__(self) -> None:
        self.keys: list[str] = []

    def __call__(self, sample: Sample) -> str:
        assert len(sample["bin"]) == 1000
        self.keys.append(str(sample["__key__"]))
        return self.keys[-1]


def source_of(store: Store, manifest: Manifest, decode: Decoder, max_open: int) -> Source:
    return Source(
        mixture=Mixture.of(manifest),
        store_root=store.root,
        seed=SEED,
        decode=decode,
        collate=list,
        skip=False,
        _reader=SampleReader(max_open=max_open),
    )


def key_at(store: Store, manifest: Manifest, shard: int, at: int) -> str:
    order = sample_permutation(manifest.digest, SEED, 0, shard, manifest.sample_counts[shard])
    return read_index(store.path(manifest.digest, shard)).key(order[at])


@pytest.mark.parametrize("max_open", [1, 2, 32])
def test_a_batch_may_be_of_more_shards_than_are_open_at_once(
    seeded: tuple[Store, Manifest], max_open: int
) -> None:
    """The samples come in the batch's order; they are decoded shard by shard, in the order of each file."""
    store, manifest = seeded
    batch = Batch(0, (((0, 0, 2), (1, 0, 2), (2, 0, 2)), ((3, 1, 3),), ((4, 0, 1), (5, 0, 1)), ((0, 2, 3),)))
    wanted = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 1), (3, 2), (4, 0), (5, 0), (0, 2)]
    decode = Decoder()
    source = source_of(store, manifest, decode, max_open)
    for _ in range(2):
        decode.keys.clear()
        made = source.__getitems__((batch, None))
        assert made == (DATA, [key_at(store, manifest, *one) for one in wanted], (), ())
        by_shard = [read_index(store.path(manifest.digest, shard)) for shard in range(6)]
        places = {
            key: (shard, at) for shard, index in enumerate(by_shard) for at, key in enumerate(index.keys())
        }
        decoded = [places[key] for key in decode.keys]
        assert decoded == sorted(decoded) and len(decoded) == len(wanted)


def test_a_shard_that_is_missing_is_noticed_before_anything_is_decoded(
    seeded: tuple[Store, Manifest],
) -> None:
    store, manifest = seeded
    decode = Decoder()
    source = source_of(store, manifest, decode, 32)
    path = store.path(manifest.digest, 4)
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    batch = Batch(0, tuple(((shard, 0, 1),) for shard in range(6)))
    assert source.__getitems__((batch, None)) == (MISSING, 4, (), ()) and decode.keys == []
    elsewhere.rename(path)
    assert source.__getitems__((batch, None)) == (
        DATA,
        [key_at(store, manifest, shard, 0) for shard in range(6)],
        (),
        (),
    )
