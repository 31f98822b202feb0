"""The committed parameters once more, in one process with plain torch, from what the peers wrote down.

The rounds of the winning lineage say who counted which samples, in which order. From them, the samples and the initial
parameters every round's anchor follows (`scripts/chaos_model.py` says why bit for bit). No code is shared with what
trains, reduces or averages in a run; the order of an epoch's samples and the audit of the chain of views are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import xxhash

from p2p_dmc.core.ledger import sample_permutation
from p2p_dmc.data.disk import MANIFEST_NAME, shard_path
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.samples import SampleReader
from p2p_dmc.observe.audit import audit

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
import chaos_model as model

Sample = tuple[int, int, int]
"""Epoch, shard, position in the epoch's order of the shard."""
Read = Callable[[Sample], tuple[torch.Tensor, int]]
"""A sample's features and its class."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of it."""

    rounds: int
    samples: int
    parameters: torch.Tensor
    faults: tuple[str, ...]
    """Rounds whose anchor is another one than the peers wrote down, the first few in words."""


def replay_run(homes: Sequence[Path], run: str, read: Read) -> Replay:
    """All rounds of the winning lineage, from the homes' journals."""
    return replay(audit(homes, run).rounds, read)


def replay(rounds: Sequence[dict[str, Any]], read: Read) -> Replay:
    """Rounds in order, as `metrics.jsonl` has them."""
    anchor, samples, faults = model.initial(), 0, []
    for line in rounds:
        name = f"view {line['view_epoch']} round {line['round']}"
        if line.get("compress", "none") != "none":
            faults.append(
                f"{name}: it travelled as {line['compress']}; only rounds in float32 can be replayed"
            )
            break
        parts = parts_of(line)
        anchor = next_anchor(anchor, [[read((line["epoch"], *at)) for at in part] for part in parts])
        samples += sum(map(len, parts))
        digest = xxhash.xxh3_128(anchor.numpy().data).hexdigest()
        if digest != line["digest"]:
            faults.append(f"{name}: the anchor is {digest} by replay, {line['digest']} on the peers")
            break  # all later ones differ, too
    return Replay(len(rounds), samples, anchor, tuple(faults))


def parts_of(line: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """Per member the samples that the round counted of it, in its order: (shard, position)."""
    counted = [
        (shard, lo + row)
        for braid in line["counted"]
        for row in range(braid[0][2] - braid[0][1])
        for shard, lo, _ in braid
    ]
    ends = [sum(line["weights"][: i + 1]) for i in range(len(line["weights"]))]
    assert not ends or ends[-1] == len(counted), f"weights {line['weights']} of {len(counted)} samples"
    return [counted[end - weight : end] for weight, end in zip(line["weights"], ends, strict=True)]


def next_anchor(anchor: torch.Tensor, parts: Sequence[Sequence[tuple[torch.Tensor, int]]]) -> torch.Tensor:
    """Each member steps from the anchor over its samples; the mean of what they changed, weighted by samples."""
    total, weights = torch.zeros_like(anchor), sum(map(len, parts))
    for part in parts:
        local = anchor
        for x, wanted in part:
            local = model.stepped(local, x, wanted)
        total += (anchor - local) * len(part)
    return anchor - total / weights if weights else anchor


def reader(home: Path) -> Read:
    """Samples from the store of a home that holds them all."""
    [path] = (home / "store").glob(f"*/{MANIFEST_NAME}")
    manifest, files = Manifest.from_bytes(path.read_bytes()), SampleReader(max_open=256)

    @lru_cache(maxsize=4096)
    def sample(shard: int, index: int) -> tuple[torch.Tensor, int]:
        found = files.read(shard_path(path.parent, manifest.shards[shard].digest), manifest, shard, index)
        return model.features(bytes(found["txt"])), model.label(str(found["__key__"]))  # type: ignore[arg-type]

    def read(at: Sample) -> tuple[torch.Tensor, int]:
        epoch, shard, position = at
        order = sample_permutation(manifest.digest, 0, epoch, shard, manifest.sample_counts[shard])
        return sample(shard, order[position])

    return read
