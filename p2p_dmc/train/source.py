"""What becomes of a batch's samples, in a worker process or in the trainer's own: read, decode, collate.

Nothing here speaks to the agent: a shard that is missing, or an error, is handed back.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import default_collate, get_worker_info

from p2p_dmc.core.ledger import sample_permutation
from p2p_dmc.data.disk import shard_path
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.mixture import Mixture
from p2p_dmc.data.samples import Found, Sample, SampleReader, ShardDamaged
from p2p_dmc.train.leases import Batch
from p2p_dmc.train.processes import die_with_parent
from p2p_dmc.train.shared_buffers import Desk, Loan, Parcel

Decode = Callable[[Sample], Any]
Collate = Callable[[list[Any]], Any]

DATA, NOTHING, MISSING, FAILED = "data", "nothing", "missing", "failed"
Outcome = tuple[str, Any, tuple[int, ...], tuple[str, ...]]
"""What was made of a batch, of plain types so that torch finds the tensors in it to pin.

DATA: what ``collate`` returned; which samples were skipped, as places in the batch; the first of them in words.
NOTHING: all were skipped. MISSING: a shard's number. FAILED: a `Failure`.
"""
Task = tuple[Batch, Loan | None]
"""A batch to make, and the buffer for it."""
MOST_NAMED = 3
PARENT_LOOK_S = 0.5


@dataclass
class Source:
    """A map-style data set to torch's machinery, whose index is a whole batch."""

    mixture: Mixture
    store_root: Path
    seed: int
    decode: Decode | None
    collate: Collate
    skip: bool
    """A sample that ``decode`` raises on is left out; else the error is the batch's."""
    _reader: SampleReader = field(default_factory=SampleReader, repr=False)
    _desk: Desk = field(default_factory=Desk, repr=False)
    _places: dict[int, tuple[Path, Manifest, int, int]] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return self.mixture.samples

    def __getitems__(self, task: Task | None) -> Outcome | Parcel | None:
        """None for None: the pipe is kept full with those."""
        if task is None:
            return None
        batch, loan = task
        if get_worker_info() is None:
            return self._make(batch, self.collate)
        if loan is None:
            return self._made(batch, self.collate)
        writer = self._desk.begin(loan)
        made = self._made(batch, writer.collate if self.collate is default_collate else self.collate)
        try:
            return self._desk.pack(made, writer)
        except Exception as error:  # noqa: BLE001 of whatever is in the batch
            return self._desk.pack((FAILED, Failure(error), (), ()), writer)

    def _made(self, batch: Batch, collate: Collate) -> Outcome:
        """In a worker."""
        try:
            return self._make(batch, collate)
        except Exception as error:  # noqa: BLE001 raised where the batch is asked for, if it still is
            return FAILED, Failure(error), (), ()

    def name(self, batch: Batch) -> str:
        """A batch's samples, by the keys of the first few; by place where the shard cannot be read."""
        keys: list[str] = []
        for shard, lo, hi in batch.pieces:
            if len(keys) == MOST_NAMED:
                break
            indices = self._order(batch.epoch, shard)[lo:hi][: MOST_NAMED - len(keys)]
            try:
                keys += [str(sample["__key__"]) for sample in self._read(shard, indices)]
            except (FileNotFoundError, ShardDamaged):
                manifest, at, first = self.mixture.where(shard)
                keys += [f"{manifest.shard_digests[at].hex()}#{first + index}" for index in indices]
        more = f" and {len(batch) - len(keys)} more" if len(batch) > len(keys) else ""
        return f"{'sample' if len(batch) == 1 else 'samples'} {', '.join(map(repr, keys))}{more}"

    def _make(self, batch: Batch, collate: Collate) -> Outcome:
        made: list[Any] = [None] * len(batch)
        skipped: dict[int, str] = {}
        try:
            for place, sample in self._samples(batch):
                try:
                    made[place] = sample if self.decode is None else self.decode(sample)
                except Exception as error:
                    name = f"sample {sample['__key__']!r} of shard {sample['__shard__']!r}"
                    name += f" of data set {sample['__dataset__']!r}" if self.mixture.is_mixed else ""
                    if not self.skip:
                        add_note(error, f"in decode of {name}")
                        raise
                    skipped[place] = f"{name}: {type(error).__name__}: {error}"
        except ShardMissing as missing:
            return MISSING, missing.shard, (), ()
        left_out = tuple(sorted(skipped))
        named = tuple(skipped[place] for place in left_out[:MOST_NAMED])
        if len(skipped) == len(made):
            return NOTHING, None, left_out, named
        items = [item for place, item in enumerate(made) if place not in skipped] if skipped else made
        return DATA, collate(items), left_out, named

    def _samples(self, batch: Batch) -> Iterator[tuple[int, Sample]]:
        """With their places in the batch, in the order in which they lie on the disk, each read when it is its turn:
        the first ones would be out of the processor's cache when all are read. Raises ShardMissing.
        """
        wanted: dict[int, tuple[list[int], list[int]]] = {}
        place = 0
        for braid in batch.braids:
            lanes = len(braid)
            end = place + lanes * (braid[0][2] - braid[0][1])
            for lane, (shard, lo, hi) in enumerate(braid, place):
                places, indices = wanted.setdefault(shard, ([], []))
                places += range(lane, end, lanes)
                indices += self._order(batch.epoch, shard)[lo:hi]
            place = end
        shards = list(wanted)
        for lo in range(0, len(shards), self._reader.max_open):
            held: set[str] = set()
            found = [
                (shard, wanted[shard][0], self._find(shard, wanted[shard][1], held))
                for shard in shards[lo : lo + self._reader.max_open]
            ]
            for shard, places, there in found:
                try:
                    for which, sample in there.read():
                        yield places[which], sample
                except ShardDamaged as error:
                    raise ShardMissing(shard) from error

    def _find(self, shard: int, indices: Sequence[int], held: set[str]) -> Found:
        """Where samples of one shard lie, looked up for all of a batch before the first is decoded: between two decodes
        the same takes longer, since they drive all else out of the processor's cache.
        """
        path, manifest, at, first = self._place(shard)
        try:
            return self._reader.find(
                path, manifest, at, [first + index for index in indices] if first else indices, held
            )
        except (FileNotFoundError, ShardDamaged) as error:
            raise ShardMissing(shard) from error

    def _read(self, shard: int, indices: Sequence[int]) -> list[Sample]:
        path, manifest, at, first = self._place(shard)
        return self._reader.read_many(path, manifest, at, [first + index for index in indices])

    def _place(self, shard: int) -> tuple[Path, Manifest, int, int]:
        """File, data set, number and first sample of what a shard of the mixture stands for."""
        if shard not in self._places:
            manifest, at, first = self.mixture.where(shard)
            path = shard_path(self.store_root / manifest.digest.hex(), manifest.shard_digests[at])
            self._places[shard] = path, manifest, at, first
        return self._places[shard]

    def _order(self, epoch: int, shard: int) -> tuple[int, ...]:
        count = self.mixture.sample_counts[shard]
        return sample_permutation(self.mixture.digest, self.seed, epoch, shard, count)


class ShardMissing(Exception):
    """A shard is not on this machine, or not whole."""

    def __init__(self, shard: int) -> None:
        super().__init__(f"shard {shard}")
        self.shard = shard


class Failure:
    """An exception on its way out of a worker process. Its traceback comes along as text."""

    def __init__(self, error: Exception) -> None:
        self._text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        try:
            self._pickled = pickle.dumps(error)
            pickle.loads(self._pickled)
        except Exception:  # noqa: BLE001 of any class, so by any error
            self._pickled = b""

    def error(self) -> Exception:
        """The same exception, or a RuntimeError that quotes it if it cannot leave its process."""
        error = pickle.loads(self._pickled) if self._pickled else RuntimeError(self._text)
        error.__cause__ = WorkerTraceback(f"\n{self._text}")
        return error


class WorkerTraceback(Exception):
    """Where in the worker process it was raised."""


def add_note(error: Exception, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = (f"{error!s} [{note}]",)


@dataclass(frozen=True)
class WorkerStart:
    """Runs first in a worker process: it is to end with the trainer, however that ends."""

    trainer_pid: int
    worker_init_fn: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        if sys.platform == "linux" and os.getppid() == self.trainer_pid:
            die_with_parent()
        if os.getppid() != self.trainer_pid or sys.platform != "linux":
            threading.Thread(target=self._follow, name="dmc-trainer-watch", daemon=True).start()
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)

    def _follow(self) -> None:
        """It is no child of the trainer's (forkserver), or this system tells a child nothing."""
        while True:
            try:
                os.kill(self.trainer_pid, 0)
            except ProcessLookupError:
                os._exit(1)
            time.sleep(PARENT_LOOK_S)
