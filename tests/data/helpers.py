"""Small trees of files and the data sets made of them."""

from __future__ import annotations

import hashlib
from itertools import chain
from pathlib import Path
from typing import Any

from p2p_dmc.data.formats import scan
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.readers.base import Spool
from p2p_dmc.data.samples import SampleReader, read_index
from p2p_dmc.data.sharding import plan_shards
from p2p_dmc.data.store import Store
from p2p_dmc.data.writing import write_shards


def content(name: str, size: int) -> bytes:
    """Bytes that depend on the name, so that a swapped field shows."""
    seed = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return (seed * (size // len(seed) + 1))[:size]


def make_tree(root: Path, sizes: dict[str, int]) -> Path:
    for name, size in sizes.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(name, size))
    return root


def small_tree(root: Path, folders: int = 4, samples: int = 12) -> Path:
    """``folders`` x ``samples`` samples of two fields, of many sizes, an empty file among them."""
    sizes = {}
    for folder in range(folders):
        for sample in range(samples):
            sizes[f"class{folder}/item{sample:03d}.txt"] = (folder * 131 + sample * 977) % 3000
            sizes[f"class{folder}/item{sample:03d}.cls"] = 1
    return make_tree(root, sizes)


def seed_tree(tree: Path, store: Store, **options: Any) -> Manifest:
    """Scan, plan, write with small shards, so that there are several."""
    settings: dict[str, Any] = {
        "mode": "file",
        "max_shard_size": 20_000,
        "order": "shuffle",
        "seed": 3,
        **options,
    }
    name = settings.pop("name", "small")
    replicas = settings.pop("replicas", 2)
    found = scan(tree)
    shards = plan_shards(found, **settings)
    return write_shards(
        shards, store, scan=found, name=name, mode=settings["mode"], replicas=replicas, seed=settings["seed"]
    )


def take(path: Path, folder: Path, **options: Any) -> tuple[Manifest, dict[str, dict[str, bytes]]]:
    """Seed whatever lies at ``path`` into a store below ``folder``, and read all of it back by the manifest."""
    planning = {name: options.pop(name) for name in ("mode", "max_shard_size", "order") if name in options}
    store = Store(folder / "store")
    with store.spool_folder() as spool_folder, Spool(spool_folder) as spool:
        found = scan(path, spool=spool, **options)
        shards = plan_shards(found, **planning)
        manifest = write_shards(shards, store, scan=found, name="taken", mode="file", replicas=1, seed=0)
    return manifest, read_back(store, manifest)


def read_back(store: Store, manifest: Manifest) -> dict[str, dict[str, bytes]]:
    """Every sample's fields by its key."""
    samples = {}
    with SampleReader() as reader:
        for index, count in enumerate(manifest.sample_counts):
            for place in range(count):
                sample = reader.read(store.path(manifest.digest, index), manifest, index, place)
                fields = {name: value for name, value in sample.items() if isinstance(value, bytes)}
                samples[str(sample["__key__"])] = fields
    assert len(samples) == len(manifest)
    return samples


def keys_of(store: Store, manifest: Manifest) -> list[str]:
    """Every sample's key, shard by shard, in file order."""
    shards = range(len(manifest.shards))
    return list(
        chain.from_iterable(read_index(store.path(manifest.digest, index)).keys() for index in shards)
    )
