"""Who counts when shards are placed: what membership's records say to the data plane."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from p2p_dmc.core.membership import MemberRecord, MemberState
from p2p_dmc.core.placement import StoringPeer
from p2p_dmc.wire.messages import PeerMeta, decode_meta


def present(records: Iterable[MemberRecord]) -> tuple[tuple[str, int], ...]:
    """The live peers that say what they hold: (peer_id, weight), weight 0 for one that means to leave soon."""
    return tuple((peer_id, meta.weight) for peer_id, meta in _metas(records))


def storing(records: Iterable[MemberRecord]) -> tuple[StoringPeer, ...]:
    """The peers that placement counts, with their weights and failure domains."""
    return tuple(
        StoringPeer(peer_id=peer_id, weight=meta.weight, domain=meta.domain)
        for peer_id, meta in _metas(records)
        if meta.weight
    )


_decoded = lru_cache(maxsize=4096)(decode_meta)  # asked for at every tick, and seldom new


def _metas(records: Iterable[MemberRecord]) -> Iterator[tuple[str, PeerMeta]]:
    for record in records:
        meta = _decoded(record.meta)
        if record.state in (MemberState.ALIVE, MemberState.SUSPECT) and meta is not None:
            yield record.peer_id, meta
