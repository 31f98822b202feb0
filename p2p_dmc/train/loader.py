"""Batches of this peer's part of the epoch, as the agents' ledger hands it out (DESIGN.md sections 7, 9)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import default_collate

from p2p_dmc.core.ledger import sample_permutation
from p2p_dmc.data.samples import Sample
from p2p_dmc.errors import UserError
from p2p_dmc.train.dataset import Dataset
from p2p_dmc.train.leases import Position
from p2p_dmc.wire import trainer_messages as tm

if TYPE_CHECKING:
    from p2p_dmc.train.session import Peer

Decode = Callable[[Sample], Any]
Collate = Callable[[list[Any]], Any]


class Loader:
    """Iterating gives batches until the cluster's ledger says that all epochs are done; ``epochs()`` one by
    one.

    How many batches this peer gets depends on its speed and on who else is there. The last batch of a stretch
    of work may be short; nothing is padded or repeated. When the loop ends, the parameters are the final
    anchor.
    """

    def __init__(
        self,
        peer: Peer,
        data: Dataset,
        batch_size: int,
        epochs: int = 1,
        decode: Decode | None = None,
        seed: int = 0,
        collate: Collate | None = None,
    ) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("epochs", epochs, 1), ("seed", seed, 0)):
            if type(value) is not int or value < least:
                raise UserError(f"{name} {value!r}: an integer from {least}")
        self._peer = peer
        self._rounds = peer._rounds
        self._data = data
        self._batch_size = batch_size
        self._epochs = epochs
        self._decode = decode
        self._seed = seed
        self._collate: Collate = collate or default_collate
        self._orders: dict[tuple[int, int], tuple[int, ...]] = {}

    def __iter__(self) -> Iterator[Any]:
        for epoch in self.epochs():
            yield from epoch

    def epochs(self) -> Iterator[Epoch]:
        """The epochs that are left, each an iterable of batches; a resumed run starts where it stopped."""
        self._start()
        rounds = self._rounds
        while not rounds.finished:
            if rounds.epoch < self._epochs:
                yield Epoch(self, rounds.epoch)
            else:
                self._await_end()

    def batches(self, epoch: int) -> Iterator[Any]:
        """This peer's batches until the ledger is past ``epoch``."""
        leases = self._rounds.leases
        while positions := self._next_positions(epoch):
            generation = leases.generation
            items = [self._item(position) for position in positions]
            batch = _to_device(self._collate(items), self._peer.device)
            if generation != leases.generation:  # a view came while a shard was fetched: they are others' now
                continue
            self._rounds.yielded += len(positions)
            yield batch

    def _start(self) -> None:
        if self._rounds.started:
            if self._peer._loader is not self:
                raise UserError(
                    "a second loader: a run has one, use peer.loader(..., epochs=N) and loader.epochs()"
                )
            return
        optimizer = self._peer._optimizer
        if optimizer is None:
            raise UserError(
                "the first batch before dmc.Optimizer(...): make the optimizer before taking batches"
            )
        self._peer._loader = self
        flat = optimizer.flatten()
        ready = tm.RunReady(
            dataset=self._data.digest,
            seed=self._seed,
            epochs=self._epochs,
            batch_size=self._batch_size,
            parameters=flat.specs,
            tau_policy=optimizer.policy.to_bytes(),
            outer="average",
        )
        self._rounds.start(ready, flat, optimizer.inner)
        optimizer.keep_state(self._peer._run_folder, self._peer._welcome.checkpoint_every_s)

    def _next_positions(self, epoch: int) -> list[Position]:
        """A batch's worth of samples of this peer's; none when the epoch is over."""
        rounds, leases = self._rounds, self._rounds.leases
        rounds.poll()
        while not rounds.finished and rounds.epoch <= epoch:
            if leases.count >= self._batch_size or (leases.end is not None and leases.count):
                return leases.take(self._batch_size)
            if leases.end is None:
                self._ask()
            else:
                self._wait_out(leases.end)
        return []

    def _await_end(self) -> None:
        """All epochs are done here: help with what is left to agree on, until the run ends or steps back."""
        rounds, leases = self._rounds, self._rounds.leases
        while not rounds.finished and rounds.epoch >= self._epochs:
            if leases.end is None:
                self._ask()
            else:
                self._wait_out(leases.end)

    def _wait_out(self, end: tm.LeaseEnd) -> None:
        """Nothing to hand out: the others' work ends in a round, the run in a word from the agent."""
        if end.finished:
            self._rounds.take()
        else:
            self._rounds.consume_yielded()
            if self._rounds.samples and not self._rounds.ever_stepped:
                raise UserError(
                    f"{self._rounds.samples} samples were handed out and the optimizer took no step: "
                    "call step(loss) of the dmc.Optimizer in the loop"
                )
            self._rounds.synchronise()

    def _ask(self) -> None:
        """Ask for what the rest of the round needs; a view that comes instead of the answer makes it ask
        again.
        """
        rounds = self._rounds
        wanted = self._batch_size * max(1, rounds.tau - rounds.steps) - rounds.leases.count
        request = tm.LeaseRequest(samples=max(1, wanted))
        rounds.send(request)
        while not rounds.finished:
            message = rounds.take()
            if isinstance(message, tm.Lease | tm.LeaseEnd):
                return
            if rounds.expected:
                rounds.synchronise()
                return
            if isinstance(message, tm.ViewStarted):
                rounds.send(request)

    def _item(self, position: Position) -> Any:
        epoch, shard, place = position
        sample = self._data.read(shard, self._order(epoch, shard)[place])
        if self._decode is None:
            return sample
        try:
            return self._decode(sample)
        except Exception as error:
            _add_note(error, f"in decode of sample {sample['__key__']!r} of shard {sample['__shard__']!r}")
            raise

    def _order(self, epoch: int, shard: int) -> tuple[int, ...]:
        if (epoch, shard) not in self._orders:
            self._orders = {key: order for key, order in self._orders.items() if key[0] == epoch}
            count = self._data.manifest.sample_counts[shard]
            self._orders[epoch, shard] = sample_permutation(
                self._data.digest, self._seed, epoch, shard, count
            )
        return self._orders[epoch, shard]


class Epoch:
    """One pass over the data; iterable once. ``index`` counts from 0."""

    def __init__(self, loader: Loader, index: int) -> None:
        self.index = index
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self._loader.batches(self.index)


def _to_device(batch: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: _to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_to_device(value, device) for value in batch)
    return batch


def _add_note(error: Exception, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = (f"{error!s} [{note}]",)
