"""Batches of this peer's part of the epoch, as the agents' ledger hands it out (DESIGN.md sections 7, 9)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import DataLoader

from p2p_dmc.errors import UserError
from p2p_dmc.train import source
from p2p_dmc.train.dataset import Dataset
from p2p_dmc.train.leases import Batch
from p2p_dmc.train.loader_state import LoaderState
from p2p_dmc.train.prefetch import Pipe, WorkerSettings
from p2p_dmc.train.source import Collate, Decode, Source
from p2p_dmc.wire import trainer_messages as tm

if TYPE_CHECKING:
    from p2p_dmc.train.session import Peer

OnError = Literal["stop", "skip"]

MOST_SKIPS_SAID = 10
"""Skipped samples that are named one by one; later ones are counted."""


class Loader(DataLoader[Any]):
    """A ``torch.utils.data.DataLoader`` whose sampler is the cluster's ledger.

    Iterating gives batches until the ledger says that all epochs are done; ``epochs()`` gives them one by one.
    How many batches this peer gets depends on its speed and on who else is there. The last batch of a stretch of
    work may be short; nothing is padded, repeated or dropped. A batch is consumed when the loop has it, not when a
    worker has prepared it. When the loop ends, the parameters are the final anchor.
    """

    def __init__(
        self,
        peer: Peer,
        data: Dataset,
        batch_size: int,
        epochs: int = 1,
        decode: Decode | None = None,
        seed: int = 0,
        collate_fn: Collate | None = None,
        *,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        on_error: OnError = "stop",
    ) -> None:
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("epochs", epochs, 1),
            ("seed", seed, 0),
            ("num_workers", num_workers, 0),
            ("prefetch_factor", 1 if prefetch_factor is None else prefetch_factor, 1),
        ):
            if type(value) is not int or value < least:
                raise UserError(f"{name} {value!r}: an integer from {least}")
        if on_error not in ("stop", "skip"):
            raise UserError(f'on_error {on_error!r}: "stop" or "skip"')
        super().__init__(
            data,  # type: ignore[arg-type]  # sized, and its samples are read by position
            batch_size,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        self._peer, self._rounds, self._data = peer, peer._rounds, data
        self._batch_size, self._epochs, self._seed = batch_size, epochs, seed
        self._loaded: LoaderState | None = None
        self._skips = 0
        self._given = (0, 0)  # epoch, batches of it that the loop has got
        made = Source(
            mixture=data.mixture,
            store_root=data.store_root,
            seed=seed,
            decode=decode,
            collate=self.collate_fn,
            skip=on_error == "skip",
        )
        self._pipe = Pipe(made, WorkerSettings.of(self), peer.peer_id)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterator's class
        for epoch in self.epochs():
            yield from epoch

    def __len__(self) -> int:
        """Batches of this peer in the current epoch, as far as can be foreseen: an estimate."""
        return self.expected(min(self._rounds.epoch, self._epochs - 1))

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
        leases, pipe = self._rounds.leases, self._pipe
        try:
            while self._lease(epoch):
                batch = self._plan()[0]
                kind, made, skipped, named = pipe.get(self._plan())
                if kind == source.MISSING:
                    pipe.forget()
                    self._data.fetch(made)
                    continue  # a view may have come meanwhile
                if kind == source.FAILED:
                    raise made.error()
                self._check_skipped(batch, skipped, named)
                leases.take(batch)
                self._rounds.tally.hand_out(len(batch), skipped)
                if kind == source.NOTHING:
                    self._rounds.pass_over()
                    continue
                self._given = (epoch, self._given[1] + 1 if self._given[0] == epoch else 1)
                yield _to_device(made, self._peer.device)
        finally:
            if not self.persistent_workers:
                pipe.close()

    def expected(self, epoch: int) -> int:
        """Batches of this peer in that epoch, those that it has got included: what is leased or assigned to it, else
        an even share.
        """
        leases, view = self._rounds.leases, self._rounds.view
        given = self._given[1] if self._given[0] == epoch else 0
        foreseen = leases.foreseen(epoch)
        if foreseen is not None:
            return given + -(-foreseen // self._batch_size)
        return max(given, -(-len(self._data) // (self._batch_size * (view.world if view is not None else 1))))

    def state_dict(self) -> dict[str, Any]:
        """By torchdata's conventions: plain values that name the data, its order, and how far the run has come."""
        return LoaderState.now(self._data.digest.hex(), self._seed, self._rounds).to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that this run is the one in which the state was saved; UserError, now or at the first batch.

        The loader goes on where the run is, which the other peers and the checkpoints know, never back to the state.
        """
        state = LoaderState.parse(state_dict)
        state.check_data(self._data.digest.hex(), self._seed)
        if self._rounds.started:
            state.check_run(self._rounds)
        else:
            self._loaded = state

    def close(self) -> None:
        """End the workers. Iterating starts them again."""
        self._pipe.close()

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
            outer=str(optimizer.outer),
            parts=self._data.recipe,
        )
        self._rounds.start(ready, flat, optimizer.inner)
        if self._loaded is not None and self._rounds.view is not None:
            self._loaded.check_run(self._rounds)
        optimizer.keep_state(self._peer._run_folder, self._peer._welcome.checkpoint_every_s)

    def _lease(self, epoch: int) -> bool:
        """Wait until a batch's worth of samples of this peer's is leased; False when the epoch is over."""
        rounds, leases = self._rounds, self._rounds.leases
        rounds.poll()
        while not rounds.finished and rounds.epoch <= epoch:
            if leases.count >= self._batch_size or (leases.end is not None and leases.count):
                return True
            if leases.end is None:
                self._ask()
            else:
                self._wait_out(leases.end)
        return False

    def _plan(self) -> Sequence[Batch]:
        return self._rounds.leases.plan(self._batch_size, self._pipe.depth + 1)

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
            tally = self._rounds.tally
            tally.consume()
            if tally.trained and not self._rounds.ever_stepped:
                raise UserError(
                    f"{tally.trained} samples were handed out and the optimizer took no step: "
                    "call step(loss) of the dmc.Optimizer in the loop"
                )
            self._rounds.synchronise()

    def _ask(self) -> None:
        """Ask for what the rest of the round needs; a view that comes instead of the answer makes it ask
        again.
        """
        rounds = self._rounds
        wanted = self._batch_size * max(1, rounds.tau - rounds.steps) - rounds.leases.count
        request = tm.LeaseRequest(samples=max(1, wanted), ahead=self._batch_size * self._pipe.depth)
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

    def _check_skipped(self, batch: Batch, skipped: Sequence[int], named: Sequence[str]) -> None:
        """Name the first that are skipped; UserError when there are more than a round can tell of."""
        if skipped and self._rounds.tally.told(skipped) > tm.MAX_SKIPPED:
            raise UserError(
                f"{len(skipped)} of the {len(batch)} samples of a batch cannot be decoded ({named[0]}): "
                "mend decode, or the data"
            )
        for line in named:
            self._skips += 1
            if self._skips <= MOST_SKIPS_SAID:
                print(f"skipped: {line}", file=sys.stderr)


class Epoch:
    """One pass over the data; iterable once. ``index`` counts from 0, ``len()`` is an estimate."""

    def __init__(self, loader: Loader, index: int) -> None:
        self.index = index
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self._loader.batches(self.index)

    def __len__(self) -> int:
        return self._loader.expected(self.index)


def _to_device(batch: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=batch.is_pinned())
    if isinstance(batch, dict):
        return {key: _to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_to_device(value, device) for value in batch)
    return batch
