"""From an input to data sets: one, or with a held-out split two, planned and then written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import xxhash

from p2p_dmc.data.found import Scan, group_of
from p2p_dmc.data.index import decode_key, encode_key
from p2p_dmc.data.manifest import HELD_OUT, Manifest, Mode
from p2p_dmc.data.sharding import Order, Shard, plan_shards, settle_mode, taken_as_they_are
from p2p_dmc.data.store import Store
from p2p_dmc.data.writing import Progress, write_shards
from p2p_dmc.errors import UserError

SEED = 0
DEFAULT_REPLICAS = 2
_HELD_OUT_SALT = b"held out\0"


@dataclass(frozen=True, slots=True)
class Plan:
    """A data set to be written."""

    name: str
    mode: Mode
    shards: list[Shard]
    scan: Scan
    as_they_are: bool
    """The input's own tars are the shards."""
    base: Manifest | None = None
    """The version whose shards come first, and whose mode and name these are."""

    @property
    def sample_count(self) -> int:
        return sum(map(len, self.shards))

    def shard_sizes(self) -> list[int]:
        """Bytes of each file."""
        return [shard.size_bytes for shard in self.shards]

    def write(
        self,
        store: Store,
        replicas: int | None,
        progress: Progress | None = None,
        on_resumed: Callable[[int], None] = lambda _: None,
        on_whole: Callable[[int], None] = lambda _: None,
    ) -> Manifest:
        """See `write_shards`; with ``replicas`` None they are those of the version before.

        ``on_resumed`` is told how many shards an interrupted process has left.
        """
        return write_shards(
            self.shards,
            store,
            scan=self.scan,
            name=self.name,
            mode=self.mode,
            replicas=replicas or (self.base.replicas if self.base is not None else DEFAULT_REPLICAS),
            seed=SEED,
            progress=progress,
            on_resumed=on_resumed,
            on_whole=on_whole,
            base=self.base,
        )


def plan_data_sets(
    scan: Scan,
    *,
    name: str,
    mode: Mode | Literal["auto"] = "file",
    max_shard_size: int | Literal["auto"] = "auto",
    order: Order | None = None,
    val_fraction: float | None = None,
) -> list[Plan]:
    """The data set, and with ``val_fraction`` a second one, ``<name>-val``, of the samples held out.

    They share no sample, so that no loader of the one hands out any of the other's. Raises UserError.
    """
    settled = settle_mode(scan, mode)
    parts = {name: scan}
    if val_fraction is not None:
        rest, held_out = split(scan, val_fraction, settled)
        parts = {name: rest, f"{name}{HELD_OUT}": held_out}
    return [
        Plan(
            name=one,
            mode=settled if not (whole := taken_as_they_are(part, mode, max_shard_size, order)) else "file",
            shards=plan_shards(
                part,
                mode="auto" if whole else settled,
                max_shard_size=max_shard_size,
                order=order,
                seed=SEED,
            ),
            scan=part,
            as_they_are=whole,
        )
        for one, part in parts.items()
    ]


def split(scan: Scan, fraction: float, mode: Mode) -> tuple[Scan, Scan]:
    """(what is trained on, what is held out): by a hash of the key, in folder mode of the group.

    So a sample is on the same side whatever else is in the input. Raises UserError when a side is empty.
    """
    limit = int(fraction * (1 << 64))

    def is_held_out(key: bytes) -> bool:
        text = encode_key(group_of(decode_key(key), scan.samples.depth)) if mode == "folder" else key
        return xxhash.xxh3_64_intdigest(_HELD_OUT_SALT + text) < limit

    rest, held_out = scan.samples.divided(is_held_out, scan.folder)
    if not rest or not held_out:
        side = "none" if rest else "all"
        what = "groups" if mode == "folder" else "keys"
        raise UserError(
            f"--val-fraction {fraction}: {side} of {len(scan.samples)} samples would be held out, going by their "
            f"{what}; choose another fraction"
        )
    first, second = (dataclasses.replace(scan, samples=part, tars=()) for part in (rest, held_out))
    return first, second
