"""What `dmc-peer placement` shows: how each data set stands, who holds what, who should, and what would move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from p2p_dmc.agent.datasets import DataService
from p2p_dmc.agent.known import holders_of
from p2p_dmc.core.placement import Placement, StoringPeer, moves, placement
from p2p_dmc.core.replication import Copies, Tally
from p2p_dmc.data.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """All that is shown of one data set comes from here; none of it changes, so that a thread may work it out."""

    manifest: Manifest
    placed: Placement
    copies: dict[str, Copies]
    told: Tally | None
    me: str
    fetching: int
    dissenters: list[str]

    @classmethod
    def of(cls, data: DataService, manifest: Manifest, me: str) -> Standing:
        placed = data.placed(manifest.digest) or placement(manifest.shard_digests, (), manifest.replicas)
        return cls(
            manifest=manifest,
            placed=placed,
            copies=data.copies(manifest.digest),
            told=data.tally(manifest.digest),
            me=me,
            fetching=data.fetching(),
            dissenters=data.dissenters(manifest.digest),
        )


def dataset_facts(seen: Standing, peers: tuple[StoringPeer, ...], gone: set[str]) -> dict[str, Any]:
    """One data set; ``moves`` are what would be fetched if the peers ``gone`` left. Of a million shards it takes
    seconds.
    """
    manifest, copies = seen.manifest, seen.copies
    now = seen.placed.with_peers(peers)
    later = now.with_peers([p for p in peers if p.peer_id not in gone])
    holders = holders_of(copies, seen.me, len(manifest.shards))
    shards = [
        {
            "shard": digest.hex(),
            "size_bytes": size_bytes,
            "samples": samples,
            "should": list(now.holders(i)),
            "does": holders[i],
        }
        for i, (digest, size_bytes, samples) in enumerate(
            zip(manifest.shard_digests, manifest.shard_sizes, manifest.sample_counts, strict=True)
        )
    ]
    return {
        "name": manifest.name,
        "dataset": manifest.digest.hex(),
        "size_bytes": sum(manifest.shard_sizes),
        "replicas": manifest.replicas,
        **_standing(seen.told, len(shards)),
        "fetching_here": seen.fetching,
        "placement": now.digest().hex(),
        "dissenters": seen.dissenters,
        "peers": [
            _peer(manifest, now, p, copies.get(p)) for p in sorted({p.peer_id for p in peers} | set(copies))
        ],
        "shards": shards,
        "moves": [
            {
                "shard": manifest.shard_digests[m.shard_index].hex(),
                "to": m.peer_id,
                "size_bytes": manifest.shard_sizes[m.shard_index],
            }
            for m in moves(now, later)
        ]
        if gone
        else [],
    }


def _standing(told: Tally | None, shards: int) -> dict[str, int]:
    if told is None:
        return {"copies_wanted": 0, "under_replicated": 0, "in_flight": 0, "unverified": 0, "lost": shards}
    return {
        "copies_wanted": told.wanted,
        "under_replicated": told.under_replicated,
        "in_flight": told.in_flight,
        "unverified": told.unverified,
        "lost": told.lost,
    }


def _peer(manifest: Manifest, placed: Placement, peer_id: str, copies: Copies | None) -> dict[str, Any]:
    """What one peer holds, verified or not looked at yet, and what it should hold; ``to_come``: what it lacks of it."""
    sizes = np.array(manifest.shard_sizes, dtype=np.int64)
    nothing = np.zeros(len(sizes), dtype=bool)
    should = placed.ranks_of(peer_id) >= 0
    held = copies.verified.mask() if copies is not None else nothing
    unverified = copies.unverified.mask() if copies is not None else nothing
    lacks = should & ~held & ~unverified
    return {
        "peer_id": peer_id,
        "held": int(held.sum()),
        "held_bytes": int(sizes[held].sum()),
        "unverified": int(unverified.sum()),
        "placed": int(should.sum()),
        "placed_bytes": int(sizes[should].sum()),
        "to_come": int(lacks.sum()),
        "to_come_bytes": int(sizes[lacks].sum()),
        "full": copies is not None and copies.full,
    }
