"""Small trees of files and the data sets made of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from p2p_dmc.data.formats import scan
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.sharding import plan_shards, write_shards
from p2p_dmc.data.store import Store


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
