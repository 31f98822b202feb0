"""Who counts when shards are placed: what membership's records say to the data plane."""

from __future__ import annotations

from collections.abc import Iterable

from p2p_dmc.core.membership import MemberRecord, MemberState
from p2p_dmc.core.placement import StoringPeer
from p2p_dmc.wire.messages import decode_meta


def present(records: Iterable[MemberRecord]) -> tuple[tuple[str, int], ...]:
    """The live peers that say what they hold: (peer_id, weight), weight 0 for one that means to leave soon."""
    peers = []
    for record in records:
        meta = decode_meta(record.meta)
        if record.state in (MemberState.ALIVE, MemberState.SUSPECT) and meta is not None:
            peers.append((record.peer_id, max(0, meta.weight)))
    return tuple(peers)


def storing(records: Iterable[MemberRecord]) -> tuple[StoringPeer, ...]:
    """The peers that placement counts, with their weights."""
    return tuple(StoringPeer(peer_id=p, weight=weight) for p, weight in present(records) if weight)
