"""Who sent what was wrong in a shard that came from several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from p2p_dmc.data.partial import block_digests


def senders_of_wrong(
    right: Path, wrong_blocks: Sequence[bytes], given: Mapping[str, int], block_bytes: int
) -> list[str]:
    """Peers whose blocks differ from those of the ``right`` file.

    ``wrong_blocks``: digests of the wrong shard's blocks; ``given``: which of them came from whom, a bit each. Nobody
    if the file is gone again.
    """
    try:
        with right.open("rb") as file:
            blocks = block_digests(file.fileno(), right.stat().st_size, block_bytes)
    except OSError:
        return []
    pairs = enumerate(zip(wrong_blocks, blocks, strict=False))
    different = sum(1 << place for place, (one, other) in pairs if one != other)
    return sorted(peer_id for peer_id, pieces in given.items() if pieces & different)
